/* test_transport.c - a transport of the program, over socket pairs: all calls, splits and a training step give the bits
   that ranks over threads give, with ranks that are threads and with ranks that are processes; ranks that leave, are
   killed, do not come, or call something else, and a transport that fails: each rank gets its error and a sentence. */

#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"
#include "mt_test.h"
#include "mt_test_sockets.h"

#define TEXT 1200
#define SHORT 0.2 /* the first timeout where one is waited for, and the longest that is tried */
#define LONGEST 60.0

/* ---- ranks over sockets ------------------------------------------------------------------------------------------ */

typedef struct outcome {
    mt_status status;
    uint64_t hash; /* of what the rank has computed */
    char text[TEXT];
} outcome;

struct job;
typedef void (*job_function)(struct job *job, mt_comm *world, int rank);

/* Ranks and what they found. In memory that processes share. */
typedef struct job {
    int ranks, kind, check;
    double timeout;
    job_function run;
    sockets *ends; /* [ranks], in memory of each process */
    outcome of[SOCKETS_RANKS];
} job;

static void job_note(job *j, mt_context *ctx, int rank, mt_status status) {
    j->of[rank].status = status;
    snprintf(j->of[rank].text, TEXT, "%s", status == MT_SUCCESS ? "" : mt_last_error(ctx));
}

/* Creates the communicator of a rank, runs it, and closes its sockets. */
static void over_sockets(job *j, int rank) {
    mt_comm *world = NULL;
    j->of[rank].status = mt_comm_create_transport(&sockets_table, &j->ends[rank], j->ranks, rank, j->timeout, &world);
    if (world) j->run(j, world, rank);
    mt_comm_destroy(world);
    sockets_close(&j->ends[rank]);
}

static mt_status over_sockets_thread(mt_comm *threads, void *user) {
    over_sockets((job *)user, mt_comm_rank(threads));
    return MT_SUCCESS;
}

static mt_status over_threads(mt_comm *threads, void *user) {
    job *j = (job *)user;
    j->run(j, threads, mt_comm_rank(threads));
    return MT_SUCCESS;
}

static job *job_new(int ranks, job_function run) {
    job *j = (job *)mmap(NULL, sizeof *j, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(j != MAP_FAILED);
    j->ranks = ranks;
    j->run = run;
    j->timeout = TEST_NEVER_OVER;
    j->ends = (sockets *)malloc((size_t)ranks * sizeof *j->ends);
    assert_true(j->ends && sockets_open(j->ends, ranks));
    for (int r = 0; r < ranks; r++)
        j->ends[r].most = r == 1 ? (SANITIZED ? 1009 : 211) : 0; /* rank 1 moves few bytes at once */
    return j;
}

static void job_free(job *j) {
    for (int r = 0; r < j->ranks; r++) sockets_close(&j->ends[r]);
    free(j->ends);
    munmap(j, sizeof *j);
}

static void run_threads(job *j, mt_rank_function f) {
    mt_launch_desc d;
    memset(&d, 0, sizeof d);
    d.ranks = j->ranks;
    d.no_pinning = 1;
    assert_int_equal(mt_launch(&d, f, j), MT_SUCCESS);
}

/* Forks the ranks, and waits for them. killed: the rank that ends by SIGKILL; -1: none */
static void run_processes(job *j, int killed) {
    pid_t child[SOCKETS_RANKS];
    fflush(NULL);
    for (int r = 0; r < j->ranks; r++) {
        child[r] = fork();
        assert_true(child[r] >= 0);
        if (child[r] > 0) continue;
        for (int other = 0; other < j->ranks; other++)
            if (other != r) sockets_close(&j->ends[other]);
        over_sockets(j, r);
        _exit(0);
    }
    for (int r = 0; r < j->ranks; r++) sockets_close(&j->ends[r]); /* only the children have them open */
    for (int r = 0; r < j->ranks; r++) {
        int how = 0;
        assert_true(waitpid(child[r], &how, 0) == child[r]);
        if (r == killed) assert_true(WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL);
        else assert_true(WIFEXITED(how) && WEXITSTATUS(how) == 0);
    }
}

enum { THREADS, SOCKETS_OF_THREADS, SOCKETS_OF_PROCESSES, WAYS };

static job *job_run(int ranks, int way, int kind, int check, job_function run) {
    job *j = job_new(ranks, run);
    j->kind = kind;
    j->check = check;
    if (way == THREADS) run_threads(j, over_threads);
    if (way == SOCKETS_OF_THREADS) run_threads(j, over_sockets_thread);
    if (way == SOCKETS_OF_PROCESSES) run_processes(j, -1);
    return j;
}

/* Every rank succeeds, and computes the same over sockets as over threads. */
static void same_over_all(int ranks, int kind, int check, job_function run) {
    job *threads = job_run(ranks, THREADS, kind, check, run);
    for (int way = SOCKETS_OF_THREADS; way < WAYS; way++) {
        job *j = job_run(ranks, way, kind, check, run);
        for (int r = 0; r < ranks; r++) {
            if (j->of[r].status != MT_SUCCESS) fail_msg("rank %d of %d: %s", r, ranks, j->of[r].text);
            if (j->of[r].hash != threads->of[r].hash || !j->of[r].hash)
                fail_msg("rank %d of %d, way %d, kind %d: other bits", r, ranks, way, kind);
        }
        job_free(j);
    }
    for (int r = 0; r < ranks; r++) assert_int_equal(threads->of[r].status, MT_SUCCESS);
    job_free(threads);
}

static void hash_bytes(uint64_t *hash, const void *data, size_t bytes) {
    const unsigned char *x = (const unsigned char *)data;
    if (!*hash) *hash = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < bytes; i++) *hash = (*hash ^ x[i]) * 1099511628211u;
}

/* ---- all calls --------------------------------------------------------------------------------------------------- */

#define MOST 6000 /* elements: in f32 more than what travels with a header */

typedef struct arrays {
    unsigned char a[4 * MOST * SOCKETS_RANKS], b[4 * MOST * SOCKETS_RANKS];
} arrays;

/* Small values of every type; sums of them round in f32 and in the 16-bit types. */
static void fill(arrays *x, mt_dtype dtype, int rank) {
    uint32_t random = 12345u + 977u * (uint32_t)rank;
    for (size_t i = 0; i < MOST * SOCKETS_RANKS; i++) {
        random = random * 1664525u + 1013904223u;
        float f = (float)(int32_t)random * 0x1p-31f;
        if (dtype == MT_F32) memcpy(x->a + 4 * i, &f, 4);
        else if (dtype == MT_I32) memcpy(x->a + 4 * i, &random, 4);
        else if (dtype == MT_U8) x->a[i] = (unsigned char)(random >> 24);
        else mt_f32_to_16bit(dtype, &f, (uint16_t *)(void *)x->a + i, 1);
    }
    memset(x->b, 0, sizeof x->b);
}

static mt_status reductions(mt_context *ctx, mt_comm *comm, arrays *x, mt_dtype dtype, size_t n, uint64_t *hash) {
    size_t bytes = n * mt_dtype_size(dtype), all = bytes * (size_t)mt_comm_size(comm);
    int rank = mt_comm_rank(comm);
    for (int op = MT_SUM; op <= MT_MAX && dtype != MT_U8; op++) {
        fill(x, dtype, rank);
        MT_TRY(mt_all_reduce(ctx, comm, x->a, x->b, n, dtype, (mt_op)op));
        hash_bytes(hash, x->b, bytes);
        MT_TRY(mt_all_reduce(ctx, comm, x->a, x->a, n, dtype, (mt_op)op));
        CHECK(memcmp(x->a, x->b, bytes) == 0);
        fill(x, dtype, rank);
        MT_TRY(mt_reduce_scatter(ctx, comm, x->a, x->b, n, dtype, (mt_op)op));
        hash_bytes(hash, x->b, bytes);
        MT_TRY(mt_reduce_scatter(ctx, comm, x->a, x->a + bytes * (size_t)rank, n, dtype, (mt_op)op));
        CHECK(memcmp(x->a + bytes * (size_t)rank, x->b, bytes) == 0);
        hash_bytes(hash, x->a, all);
    }
    return MT_SUCCESS;
}

static mt_status copies(mt_context *ctx, mt_comm *comm, arrays *x, mt_dtype dtype, size_t n, uint64_t *hash) {
    size_t bytes = n * mt_dtype_size(dtype), all = bytes * (size_t)mt_comm_size(comm);
    int rank = mt_comm_rank(comm), size = mt_comm_size(comm), next = (rank + 1) % size, last = (rank + size - 1) % size;
    size_t sends[SOCKETS_RANKS], recvs[SOCKETS_RANKS];
    fill(x, dtype, rank);
    MT_TRY(mt_all_gather(ctx, comm, x->a, x->b, n, dtype));
    hash_bytes(hash, x->b, all);
    memcpy(x->a + bytes * (size_t)rank, x->a, bytes);
    MT_TRY(mt_all_gather(ctx, comm, x->a + bytes * (size_t)rank, x->a, n, dtype));
    CHECK(memcmp(x->a, x->b, all) == 0);
    for (int root = 0; root < size; root++) {
        fill(x, dtype, rank);
        MT_TRY(mt_broadcast(ctx, comm, x->a, x->b, n, dtype, root));
        MT_TRY(mt_broadcast(ctx, comm, x->a, x->a, n, dtype, root));
        CHECK(memcmp(x->a, x->b, bytes) == 0);
        hash_bytes(hash, x->b, bytes);
    }
    fill(x, dtype, rank);
    MT_TRY(mt_send_recv(ctx, comm, x->a, n, next, x->b, n, last, dtype));
    hash_bytes(hash, x->b, bytes);
    MT_TRY(mt_all_to_all(ctx, comm, x->a, x->b, n, dtype));
    hash_bytes(hash, x->b, all);
    for (int r = 0; r < size; r++)
        sends[r] = n * (size_t)((rank + 2 * r) % 5) / 4, recvs[r] = n * (size_t)((r + 2 * rank) % 5) / 4;
    MT_TRY(mt_all_to_all_v(ctx, comm, x->a, sends, x->b, recvs, dtype));
    hash_bytes(hash, x->b, all);
    if (rank % 2) MT_TRY(mt_send(ctx, comm, x->a, n, dtype, rank - 1));
    else MT_TRY(mt_recv(ctx, comm, x->b, n, dtype, rank + 1));
    hash_bytes(hash, x->b, bytes);
    return mt_barrier(ctx, comm);
}

/* One rank sends and receives in one call, the other one in two. */
static mt_status unlike_pair(mt_context *ctx, mt_comm *comm, arrays *x, uint64_t *hash) {
    int rank = mt_comm_rank(comm);
    fill(x, MT_F32, rank);
    if (rank == 0) MT_TRY(mt_send_recv(ctx, comm, x->a, MOST, 1, x->b, MOST, 1, MT_F32));
    if (rank == 1) MT_TRY(mt_send(ctx, comm, x->a, MOST, MT_F32, 0));
    if (rank == 1) MT_TRY(mt_recv(ctx, comm, x->b, MOST, MT_F32, 0));
    hash_bytes(hash, x->b, 4 * MOST);
    return MT_SUCCESS;
}

/* Groups of a world, with its ranks in reverse order, that are destroyed in turn. */
static mt_status splits(mt_context *ctx, mt_comm *world, arrays *x, uint64_t *hash) {
    int rank = mt_comm_rank(world), colors = mt_comm_size(world) / 2;
    for (int k = 0; k < 3; k++) {
        mt_comm *group = NULL, *none = NULL, *alone = NULL;
        mt_status status;
        MT_TRY(mt_comm_split(world, rank % colors, -rank, &group));
        MT_TRY(mt_comm_split(group, -1, 0, &none));
        MT_TRY(mt_comm_split(group, mt_comm_rank(group), 0, &alone));
        CHECK(!none && mt_comm_size(alone) == 1 && mt_comm_size(group) == mt_comm_size(world) / colors);
        CHECK(mt_comm_local_rank(group) == rank);
        hash_bytes(hash, mt_comm_name(group), strlen(mt_comm_name(group)));
        status = reductions(ctx, group, x, MT_F32, 777, hash);
        MT_KEEP(status, copies(ctx, group, x, MT_BF16, 3, hash));
        mt_comm_destroy(alone);
        mt_comm_destroy(group);
        MT_TRY(status);
        MT_TRY(mt_barrier(ctx, world));
    }
    return MT_SUCCESS;
}

/* f and g and their relatives. */
static mt_status conjugates(mt_context *ctx, mt_comm *comm, arrays *x, uint64_t *hash) {
    int64_t size = mt_comm_size(comm);
    mt_tensor whole = mt_tensor_f32((float *)(void *)x->a, 8, 4 * size), all = whole;
    mt_tensor part = mt_tensor_f32((float *)(void *)x->b, 8, 4);
    fill(x, MT_F32, mt_comm_rank(comm));
    MT_TRY(mt_copy_to_tensor_region_forward(ctx, comm, whole));
    MT_TRY(mt_copy_to_tensor_region_backward(ctx, comm, whole));
    MT_TRY(mt_reduce_from_tensor_region_forward(ctx, comm, whole));
    MT_TRY(mt_reduce_from_tensor_region_backward(ctx, comm, whole));
    hash_bytes(hash, x->a, (size_t)(32 * size) * 4);
    MT_TRY(mt_scatter_to_tensor_region(ctx, comm, whole, part));
    hash_bytes(hash, x->b, 32 * 4);
    MT_TRY(mt_gather_from_tensor_region(ctx, comm, part, whole));
    hash_bytes(hash, x->a, (size_t)(32 * size) * 4);
    part.rows = 8 / size;
    part.cols = part.ld = all.cols;
    MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, comm, all, part));
    MT_TRY(mt_gather_from_sequence_region(ctx, comm, part, all));
    hash_bytes(hash, x->a, (size_t)(32 * size) * 4);
    return MT_SUCCESS;
}

static mt_status all_calls(mt_context *ctx, mt_comm *world, arrays *x, uint64_t *hash) {
    static const mt_dtype dtypes[] = {MT_F32, MT_BF16, MT_F16, MT_I32, MT_U8};
    static const size_t counts[] = {0, 1, 3, 257, MOST};
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        for (size_t n = 0; n < sizeof counts / sizeof *counts; n++) {
            MT_TRY(reductions(ctx, world, x, dtypes[d], counts[n], hash));
            MT_TRY(copies(ctx, world, x, dtypes[d], counts[n], hash));
        }
    }
    MT_TRY(unlike_pair(ctx, world, x, hash));
    MT_TRY(splits(ctx, world, x, hash));
    return conjugates(ctx, world, x, hash);
}

static mt_context *new_context(mt_comm *world, int check) {
    mt_context_desc d;
    mt_context *ctx = NULL;
    memset(&d, 0, sizeof d);
    d.arena_bytes = (size_t)4 << 20;
    d.check = check;
    return mt_context_create(world, &d, &ctx) == MT_SUCCESS ? ctx : NULL;
}

static void calls_rank(job *j, mt_comm *world, int rank) {
    mt_context *ctx = new_context(world, j->check);
    arrays *x = (arrays *)malloc(sizeof *x);
    job_note(j, ctx, rank, ctx && x ? all_calls(ctx, world, x, &j->of[rank].hash) : MT_ERR_MEMORY);
    free(x);
    mt_context_destroy(ctx);
}

static void test_all_calls(void **state) {
    (void)state;
    same_over_all(2, 0, 0, calls_rank);
    same_over_all(4, 0, 0, calls_rank);
}

/* ---- training ---------------------------------------------------------------------------------------------------- */

enum { TENSOR, SEQUENCE, DATA, OTHER_BIAS };

static mt_status steps(mt_context *ctx, mt_params *params, mt_gpt *gpt, mt_gpt_saved *saved, mt_optimizer *adam,
                       uint64_t *hash) {
    static const int32_t ids[] = {3, 1, 4, 1, 5, 9, 2, 6, 5};
    mt_batch batch;
    float loss[8];
    memset(&batch, 0, sizeof batch);
    batch.sequences = 1;
    batch.seq = 8;
    for (int step = 0; step < 4; step++) {
        size_t mark = mt_arena_mark(ctx);
        MT_TRY(mt_params_zero_grad(ctx, params));
        MT_TRY(mt_gpt_forward(ctx, gpt, &batch, ids, ids + 1, mt_tensor_f32(loss, 1, 8), saved));
        MT_TRY(mt_gpt_backward(ctx, gpt, 1.0f / 8, saved));
        MT_TRY(mt_sync_gradients(ctx, params));
        MT_TRY(mt_optimizer_step(ctx, adam, 1e-2f, 1.0f));
        hash_bytes(hash, loss, sizeof loss);
        mt_arena_release(ctx, mark);
    }
    return MT_SUCCESS;
}

/* Trains a GPT of one layer. */
static mt_status train(mt_context *ctx, mt_comm *world, int kind, uint64_t *hash) {
    mt_grid_desc shape;
    mt_gpt_desc model;
    mt_grid grid;
    mt_params *params;
    mt_gpt gpt;
    mt_gpt_saved saved;
    mt_optimizer adam;
    mt_status status;
    memset(&shape, 0, sizeof shape);
    memset(&model, 0, sizeof model);
    shape.tp = kind == DATA ? 1 : mt_comm_size(world);
    model.vocab = 16;
    model.layers = 1;
    model.max_seq = 8;
    model.layer.hidden = 32;
    model.layer.heads = 4;
    model.layer.sequence_parallel = kind == SEQUENCE;
    MT_TRY(mt_grid_create(world, &shape, &grid));
    MT_TRY(mt_params_create(ctx, &grid, &params));
    MT_TRY(mt_gpt_create(ctx, params, &model, &gpt));
    MT_TRY(mt_params_init(ctx, params, 1234));
    MT_TRY(mt_gpt_saved_create(ctx, &gpt, &saved));
    MT_TRY(mt_optimizer_create(ctx, params, NULL, &adam));
    if (kind == OTHER_BIAS && grid.tp_rank == 1) *(float *)gpt.model.layers[0].mlp.fc2.bias->value.data = 1;
    status = steps(ctx, params, &gpt, &saved, &adam, hash);
    mt_gpt_saved_destroy(&saved);
    mt_optimizer_destroy(ctx, &adam);
    mt_params_destroy(params);
    mt_grid_destroy(&grid);
    return status;
}

static void train_rank(job *j, mt_comm *world, int rank) {
    mt_context *ctx = new_context(world, j->check);
    job_note(j, ctx, rank, ctx ? train(ctx, world, j->kind, &j->of[rank].hash) : MT_ERR_MEMORY);
    mt_context_destroy(ctx);
}

static void test_training(void **state) {
    (void)state;
    for (int ranks = 2; ranks <= 4; ranks += 2)
        for (int kind = TENSOR; kind <= DATA; kind++) same_over_all(ranks, kind, 0, train_rank);
}

/* In check mode 2 the ranks compare values, which goes over the transport, too. */
static void test_training_in_check_mode(void **state) {
    (void)state;
    same_over_all(2, SEQUENCE, 2, train_rank);
    same_over_all(4, TENSOR, 2, train_rank);
}

static void assert_said(const job *j, int rank, mt_status status, const char *part) {
    const char *text = j->of[rank].text, *fault = test_message_fault(text);
    assert_int_equal(j->of[rank].status, status);
    if (!strstr(text, part)) fail_msg("rank %d: \"%s\" does not contain \"%s\"", rank, text, part);
    if (fault && status != MT_SUCCESS) fail_msg("\"%s\" is not one sentence: %s", text, fault);
}

/* A bias of rank 1 is another one. */
static void test_check_mode_names_the_rank(void **state) {
    (void)state;
    for (int way = THREADS; way < WAYS; way++) {
        job *j = job_run(2, way, OTHER_BIAS, 2, train_rank);
        for (int r = 0; r < 2; r++) assert_said(j, r, MT_ERR_MISMATCH, "but rank 1 has other values than rank 0");
        assert_string_equal(j->of[0].text, j->of[1].text);
        job_free(j);
    }
}

/* ---- faults ------------------------------------------------------------------------------------------------------ */

enum { LEAVES, KILLED, KILLED_AT_THE_END, DIFFERS };

/* The last rank has the fault. The others reduce more than travels with a header. */
static mt_status fault_call(const job *j, mt_context *ctx, mt_comm *group, int rank, float *x) {
    if (rank + 1 < j->ranks && j->kind == KILLED_AT_THE_END) return MT_SUCCESS;
    if (rank + 1 < j->ranks) return mt_all_reduce(ctx, group, x, x, MOST, MT_F32, MT_SUM);
    switch (j->kind) {
    case LEAVES: return MT_SUCCESS;
    case KILLED:
    case KILLED_AT_THE_END: raise(SIGKILL); return MT_SUCCESS;
    case DIFFERS:
        return mt_all_gather(ctx, group, x, x, 5, MT_U8) == MT_ERR_ARGUMENT /* overlap: it has not joined */
                   ? mt_all_reduce(ctx, group, x, x, MOST, MT_I32, MT_SUM)
                   : MT_ERR_DATA;
    default: return MT_ERR_DATA;
    }
}

static void fault_rank(job *j, mt_comm *world, int rank) {
    mt_context *ctx = new_context(world, 0);
    mt_comm *group = NULL;
    float *x = (float *)calloc(MOST, 4);
    mt_status status = ctx && x ? mt_comm_split(world, 0, 0, &group) : MT_ERR_MEMORY;
    MT_KEEP(status, mt_barrier(ctx, group));
    if (group) mt_comm_set_name(group, "tensor");
    if (status == MT_SUCCESS) status = fault_call(j, ctx, group, rank, x);
    job_note(j, ctx, rank, status);
    mt_comm_destroy(group);
    if (j->kind == LEAVES && status != MT_SUCCESS) { /* the world goes on without the group */
        int32_t one = 1, sum = 0;
        if (mt_all_reduce(ctx, world, &one, &sum, 1, MT_I32, MT_SUM) == MT_SUCCESS) j->of[rank].hash = (uint64_t)sum;
    } else if (j->kind == LEAVES) {
        int32_t one = 1;
        mt_all_reduce(ctx, world, &one, &one, 1, MT_I32, MT_SUM);
    }
    free(x);
    mt_context_destroy(ctx);
}

static void test_a_rank_leaves(void **state) {
    (void)state;
    for (int way = SOCKETS_OF_THREADS; way < WAYS; way++) {
        job *j = job_run(4, way, LEAVES, 0, fault_rank);
        for (int r = 0; r < 3; r++) {
            assert_said(j, r, MT_ERR_PEER, "all_reduce(count 6000, f32, sum) on \"tensor\" (4 ranks): ");
            assert_said(j, r, MT_ERR_PEER, "rank 3 has left the group");
            assert_int_equal(j->of[r].hash, 4);
        }
        job_free(j);
    }
}

static void test_a_rank_is_killed(void **state) {
    (void)state;
    for (int ranks = 2; ranks <= 4; ranks += 2) {
        job *j = job_new(ranks, fault_rank);
        j->kind = KILLED;
        run_processes(j, ranks - 1);
        for (int r = 0; r + 1 < ranks; r++)
            if (j->of[r].status != MT_ERR_PEER) fail_msg("rank %d: %s", r, j->of[r].text);
        assert_said(j, 0, MT_ERR_PEER, "all_reduce(count 6000, f32, sum) on \"tensor\"");
        if (ranks == 2) assert_said(j, 0, MT_ERR_PEER, " its rank 1: MT_ERR_PEER (a peer rank is gone or failed)");
        job_free(j);
    }
}

/* The others destroy their communicators. They do not wait for the timeout. */
static void test_a_rank_is_killed_at_the_end(void **state) {
    job *j = job_new(4, fault_rank);
    (void)state;
    j->kind = KILLED_AT_THE_END;
    run_processes(j, 3);
    for (int r = 0; r < 3; r++) assert_int_equal(j->of[r].status, MT_SUCCESS);
    job_free(j);
}

static void test_different_calls(void **state) {
    (void)state;
    for (int way = SOCKETS_OF_THREADS; way < WAYS; way++) {
        job *j = job_run(4, way, DIFFERS, 0, fault_rank);
        for (int r = 0; r < 4; r++) {
            assert_said(j, r, MT_ERR_MISMATCH, "ranks 0, 1, 2 called all_reduce(count 6000, f32, sum)");
            assert_said(j, r, MT_ERR_MISMATCH, "rank 3 called all_reduce(count 6000, i32, sum)");
        }
        job_free(j);
    }
}

/* Rank 1 never calls, and ends when the other one has noted its error. */
static void silent_rank(job *j, mt_comm *world, int rank) {
    mt_context *ctx = new_context(world, 0);
    struct timespec nap = {0, 1000000};
    float x = 1;
    if (rank == 0) job_note(j, ctx, 0, mt_all_reduce(ctx, world, &x, &x, 1, MT_F32, MT_SUM));
    if (rank == 0) __atomic_store_n(&j->of[1].hash, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&j->of[1].hash, __ATOMIC_ACQUIRE)) nanosleep(&nap, NULL);
    mt_context_destroy(ctx);
}

/* On a busy machine the creation may be late, too: the test tries again with twice the timeout. */
static void test_a_rank_never_calls(void **state) {
    (void)state;
    for (double timeout = SHORT;; timeout *= 2) {
        job *j = job_new(2, silent_rank);
        int came;
        j->timeout = timeout;
        run_threads(j, over_sockets_thread);
        came = j->of[0].status != MT_SUCCESS && j->of[0].text[0] != '\0';
        if (came || 2 * timeout > LONGEST) {
            assert_said(j, 0, MT_ERR_TIMEOUT, "all_reduce(count 1, f32, sum) on \"world\" (2 ranks): waited ");
            assert_said(j, 0, MT_ERR_TIMEOUT, " s for rank 1, which has not called anything here yet");
        }
        job_free(j);
        if (came) return;
    }
}

/* One rank alone: the others do not create their communicators. */
static void test_nobody_creates(void **state) {
    sockets ends[2];
    mt_comm *world = NULL;
    (void)state;
    assert_true(sockets_open(ends, 2));
    assert_int_equal(mt_comm_create_transport(&sockets_table, &ends[0], 2, 0, SHORT, &world), MT_ERR_TIMEOUT);
    assert_null(world);
    sockets_close(&ends[1]);
    assert_int_equal(mt_comm_create_transport(&sockets_table, &ends[0], 2, 0, TEST_NEVER_OVER, &world), MT_ERR_PEER);
    assert_null(world);
    sockets_close(&ends[0]);
}

/* What arrives is not from this library. */
static void test_strange_bytes(void **state) {
    static const char hello[] = "GET / HTTP/1.1\r\nHost: example.org\r\n\r\n";
    sockets ends[2];
    mt_comm *world = NULL;
    (void)state;
    assert_true(sockets_open(ends, 2));
    assert_true(write(ends[1].fd[0], hello, sizeof hello) == (ssize_t)sizeof hello);
    assert_int_equal(mt_comm_create_transport(&sockets_table, &ends[0], 2, 0, TEST_NEVER_OVER, &world),
                     MT_ERR_MISMATCH);
    assert_null(world);
    sockets_close(&ends[0]);
    sockets_close(&ends[1]);
}

/* Rank 1 believes that there are 3 ranks. */
static mt_status other_size(mt_comm *threads, void *user) {
    job *j = (job *)user;
    int rank = mt_comm_rank(threads);
    mt_comm *world = NULL;
    j->of[rank].status =
        mt_comm_create_transport(&sockets_table, &j->ends[rank], 2 + rank, rank, TEST_NEVER_OVER, &world);
    CHECK(!world);
    sockets_close(&j->ends[rank]);
    return MT_SUCCESS;
}

static void test_other_numbers_of_ranks(void **state) {
    job *j = job_new(3, NULL);
    (void)state;
    j->ranks = 2;
    run_threads(j, other_size);
    for (int r = 0; r < 2; r++) assert_int_equal(j->of[r].status, MT_ERR_MISMATCH);
    j->ranks = 3;
    job_free(j);
}

/* Call number `fails` of rank 0's transport returns an error. The ranks call until they get one. */
static void failing_rank(job *j, mt_comm *world, int rank) {
    mt_context *ctx = new_context(world, 0);
    float *x = (float *)calloc(MOST, 4);
    mt_status status = MT_SUCCESS;
    if (rank == 0) j->ends[0].fails = j->ends[0].calls + 1 + j->kind;
    for (int i = 0; i < 1000 && status == MT_SUCCESS; i++)
        status = i % 2 ? mt_all_reduce(ctx, world, x, x, MOST, MT_F32, MT_SUM) : mt_barrier(ctx, world);
    job_note(j, ctx, rank, status);
    free(x);
    mt_context_destroy(ctx);
}

static void check_failed(const job *j, mt_status why, mt_status becomes) {
    char said[TEXT];
    snprintf(said, sizeof said, "%s (%s)", mt_status_name(why), mt_status_string(why));
    assert_said(j, 0, becomes, said);
    assert_said(j, 0, becomes, " on \"world\" (2 ranks): rank 0: the transport \"sockets\" could not ");
    assert_said(j, 0, becomes, " its rank 1: ");
    if (j->of[1].status != MT_ERR_PEER && j->of[1].status != becomes) fail_msg("rank 1: %s", j->of[1].text);
}

static void test_the_transport_fails(void **state) {
    static const mt_status why[][2] = {{MT_ERR_SYSTEM, MT_ERR_PEER},
                                       {MT_ERR_PEER, MT_ERR_PEER},
                                       {MT_ERR_TIMEOUT, MT_ERR_TIMEOUT},
                                       {MT_ERR_IO, MT_ERR_PEER}};
    (void)state;
    for (int i = 0; i < 40; i++) {
        job *j = job_new(2, failing_rank);
        j->kind = i * i;
        j->ends[0].why = why[i % 4][0];
        run_threads(j, over_sockets_thread);
        check_failed(j, why[i % 4][0], why[i % 4][1]);
        job_free(j);
    }
}

/* A transport that says that it has moved more than it was given. */
static mt_status sends_too_much(void *state, int peer, const void *data, size_t bytes, size_t *moved) {
    (void)state, (void)peer, (void)data;
    *moved = bytes + 1;
    return MT_SUCCESS;
}

static mt_status receives_nothing(void *state, int peer, void *data, size_t bytes, size_t *moved) {
    (void)state, (void)peer, (void)data, (void)bytes, (void)moved;
    return MT_SUCCESS;
}

static void test_arguments(void **state) {
    mt_transport t = {"wrong", sends_too_much, receives_nothing};
    mt_comm *world = NULL;
    (void)state;
    assert_int_equal(mt_comm_create_transport(&t, NULL, 2, 0, TEST_NEVER_OVER, &world), MT_ERR_PEER);
    assert_int_equal(mt_comm_create_transport(NULL, NULL, 2, 0, 1, &world), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_create_transport(&t, NULL, 2, 0, 1, NULL), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_create_transport(&t, NULL, 0, 0, 1, &world), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_create_transport(&t, NULL, 1025, 0, 1, &world), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_create_transport(&t, NULL, 2, 2, 1, &world), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_create_transport(&t, NULL, 2, -1, 1, &world), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_create_transport(&t, NULL, 2, 0, strtod("nan", NULL), &world), MT_ERR_ARGUMENT);
    t.name = NULL;
    assert_int_equal(mt_comm_create_transport(&t, NULL, 2, 0, 1, &world), MT_ERR_ARGUMENT);
    t.name = "wrong", t.send = NULL;
    assert_int_equal(mt_comm_create_transport(&t, NULL, 2, 0, 1, &world), MT_ERR_ARGUMENT);
    t.send = sends_too_much, t.recv = NULL;
    assert_int_equal(mt_comm_create_transport(&t, NULL, 2, 0, 1, &world), MT_ERR_ARGUMENT);
    assert_null(world);
    t.recv = receives_nothing;
    assert_int_equal(mt_comm_create_transport(&t, NULL, 1, 0, 1, &world), MT_SUCCESS);
    assert_int_equal(mt_comm_size(world), 1);
    mt_comm_destroy(world);
}

/* ---- other uses of the communicator ------------------------------------------------------------------------------ */

/* Without NCCL, mt_comm_create_for gives a group of the same ranks. A context without data is refused. */
static void others_rank(job *j, mt_comm *world, int rank) {
    mt_context_desc d;
    mt_context *ctx = new_context(world, 0), *meta = NULL;
    mt_comm *twin = NULL;
    int32_t one = 1, sum = 0;
    mt_status status;
    memset(&d, 0, sizeof d);
    d.device = MT_DEVICE_META;
    status = mt_comm_create_for(ctx, world, &twin);
    MT_KEEP(status, mt_all_reduce(ctx, twin, &one, &sum, 1, MT_I32, MT_SUM));
    MT_KEEP(status, mt_context_create(world, &d, &meta));
    if (status == MT_SUCCESS && mt_all_reduce(meta, world, &one, &sum, 1, MT_I32, MT_SUM) == MT_ERR_ARGUMENT)
        j->of[rank].hash = (uint64_t)sum;
    job_note(j, ctx, rank, status);
    mt_context_destroy(meta);
    mt_comm_destroy(world == twin ? NULL : twin);
    mt_context_destroy(ctx);
}

static void test_other_contexts(void **state) {
    job *j = job_run(2, SOCKETS_OF_THREADS, 0, 0, others_rank);
    (void)state;
    for (int r = 0; r < 2; r++) {
        assert_said(j, r, MT_SUCCESS, "");
        assert_int_equal(j->of[r].hash, 2);
    }
    job_free(j);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_calls),
        cmocka_unit_test(test_training),
        cmocka_unit_test(test_training_in_check_mode),
        cmocka_unit_test(test_check_mode_names_the_rank),
        cmocka_unit_test(test_a_rank_leaves),
        cmocka_unit_test(test_a_rank_is_killed),
        cmocka_unit_test(test_a_rank_is_killed_at_the_end),
        cmocka_unit_test(test_different_calls),
        cmocka_unit_test(test_a_rank_never_calls),
        cmocka_unit_test(test_nobody_creates),
        cmocka_unit_test(test_strange_bytes),
        cmocka_unit_test(test_other_numbers_of_ranks),
        cmocka_unit_test(test_the_transport_fails),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_other_contexts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
