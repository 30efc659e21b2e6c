/* test_cuda_graph.cu - tests CUDA graphs (mt_graph_*): what a launch computes, what a recording refuses, ranks that
   record one graph together, and what the others get when one of them fails.
     On a GPU:       nvcc -std=c++17 -O2 -arch=native -I. tests/test_cuda_graph.cu -lcublasLt
                     Ranks share the GPU; with two GPUs some cases run on both.
     Without a GPU:  the engine in tests/engine/ runs the same file on a CPU. Only there it counts calls of CUDA, and
                     makes them fail. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test.h"

#include <math.h>
#include <unistd.h>
#if defined(MT_CUDA_ENGINE)
#include "runtime.h"
#endif

#define RANKS_MAX 4
#define PATIENCE 0.5 /* the first timeout where one is waited for, and the longest that is tried */
#define PATIENCE_MAX 60.0

/* ---- ranks on GPUs ----------------------------------------------------------------------------------------------- */

typedef struct job job;
struct job {
    int ranks, gpus; /* rank r is on GPU r % gpus */
    double timeout;
    mt_status (*body)(job *j, mt_context *ctx, mt_comm *world);
    int who, what; /* of the body */
    const char *call;
    int after;
    mt_status status[RANKS_MAX]; /* what the body has stored */
    int stored;                  /* by how many ranks that are not absent */
};

static job job_make(int ranks, mt_status (*body)(job *, mt_context *, mt_comm *)) {
    job j;
    memset(&j, 0, sizeof j);
    j.ranks = ranks;
    j.gpus = 1;
    j.timeout = TEST_NEVER_OVER;
    j.body = body;
    return j;
}

static mt_status job_rank(mt_comm *world, void *user) {
    job *j = (job *)user;
    mt_context_desc where;
    mt_context *ctx;
    mt_status status;
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_CUDA;
    where.ordinal = mt_comm_rank(world) % j->gpus;
    where.arena_bytes = (size_t)1 << 20;
    MT_TRY(mt_context_create(world, &where, &ctx));
    status = (j->body)(j, ctx, world);
    mt_context_destroy(ctx);
    return status;
}

static mt_status job_launch(job *j, int say) {
    mt_launch_desc d;
    memset(&d, 0, sizeof d);
    d.ranks = j->ranks;
    d.no_pinning = 1;
    d.timeout_s = j->timeout;
    if (!say) d.logger.log = test_quiet;
    return mt_launch(&d, job_rank, j);
}

/* The ranks must succeed. */
static void job_run(job *j) {
    mt_status status = job_launch(j, 0);
    if (status != MT_SUCCESS) fail_msg("%d ranks: %s", j->ranks, mt_status_name(status));
}

static void run(int ranks, mt_status (*body)(job *, mt_context *, mt_comm *)) {
    job j = job_make(ranks, body);
    job_run(&j);
}

/* The absent rank: waits until the calls of the other ranks have ended. */
static void outlast(const job *j) {
    while (__atomic_load_n(&j->stored, __ATOMIC_ACQUIRE) < j->ranks - 1) usleep(1000);
}

/* Inside a rank: the call returns this error, with every word of "a|b|c" in its message. */
static int refused(mt_context *ctx, mt_status got, mt_status expected, const char *words) {
    if (got == expected && test_has_words(mt_last_error(ctx), words)) return 1;
    fprintf(stderr, "got %s, expected %s with '%s': %s\n", mt_status_name(got), mt_status_name(expected), words,
            mt_last_error(ctx));
    return 0;
}

/* ---- what is recorded -------------------------------------------------------------------------------------------- */

#define ROWS 4
#define COLS 64

/* y [ROWS, ROWS] = t t^T with t = x + number */
typedef struct work {
    mt_tensor x, y;
    float number;
} work;

static mt_status work_open(mt_context *ctx, work *w) {
    MT_TRY(mt_arena_tensor(ctx, MT_F32, ROWS, COLS, &w->x));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, ROWS, ROWS, &w->y));
    w->number = 0.25f;
    MT_TRY(mt_fill(ctx, w->x, 0.0f));
    return mt_fill(ctx, w->y, 7.0f);
}

static mt_status work_do(mt_context *ctx, const work *w) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor t;
    mt_status status = mt_arena_tensor(ctx, MT_F32, ROWS, COLS, &t);
    if (status == MT_SUCCESS) status = mt_fill(ctx, t, w->number);
    if (status == MT_SUCCESS) status = mt_add(ctx, t, w->x, t);
    if (status == MT_SUCCESS) status = mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1.0f, t, t, 0.0f, w->y);
    mt_arena_release(ctx, mark);
    return status;
}

static mt_status work_put(mt_context *ctx, const work *w, int round) {
    float host[ROWS * COLS];
    uint64_t seed = (uint64_t)round + 1;
    for (int i = 0; i < ROWS * COLS; i++) host[i] = test_float(&seed);
    return mt_upload(ctx, host, w->x);
}

/* Fills memory of the arena that is free now, and that a launch may use. */
static mt_status soil_arena(mt_context *ctx) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor t;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 64, 64, &t));
    MT_TRY(mt_fill(ctx, t, -99.0f));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Launches with three inputs, and compares with the same calls that are not recorded. */
static mt_status work_check(mt_context *ctx, const work *w, mt_graph *graph) {
    float launched[ROWS * ROWS], eager[ROWS * ROWS];
    for (int round = 0; round < 3; round++) {
        MT_TRY(work_put(ctx, w, round));
        MT_TRY(soil_arena(ctx));
        MT_TRY(mt_graph_launch(ctx, graph));
        MT_TRY(mt_download(ctx, w->y, launched));
        MT_TRY(mt_fill(ctx, w->y, 7.0f));
        MT_TRY(work_do(ctx, w));
        MT_TRY(mt_download(ctx, w->y, eager));
        CHECK(memcmp(launched, eager, sizeof eager) == 0);
    }
    return MT_SUCCESS;
}

static mt_status work_record(mt_context *ctx, mt_comm *comm, const work *w, mt_graph **graph) {
    mt_status status;
    *graph = NULL;
    MT_TRY(mt_graph_begin(ctx, comm));
    status = work_do(ctx, w);
    MT_KEEP(status, mt_graph_end(ctx, status == MT_SUCCESS ? graph : NULL));
    return status;
}

/* ---- one rank ---------------------------------------------------------------------------------------------------- */

/* A launch has the bits of the calls, with what the memory has then. Nothing runs while it is recorded. */
static mt_status one_rank(job *j, mt_context *ctx, mt_comm *world) {
    float y[ROWS * ROWS];
    mt_graph *graph;
    work w;
    for (int with_comm = 0; with_comm < 2; with_comm++) {
        MT_TRY(work_open(ctx, &w));
        MT_TRY(work_do(ctx, &w));
        MT_TRY(mt_fill(ctx, w.y, 7.0f));
        MT_TRY(work_record(ctx, with_comm ? world : NULL, &w, &graph));
        MT_TRY(mt_download(ctx, w.y, y));
        for (int i = 0; i < ROWS * ROWS; i++) CHECK(y[i] == 7.0f);
        MT_TRY(work_check(ctx, &w, graph));
        mt_graph_destroy(ctx, graph);
    }
    (void)j;
    return MT_SUCCESS;
}

static void test_one_rank(void **state) {
    (void)state;
    run(1, one_rank);
}

/* A number of the host is part of the graph: what it becomes later has no effect. */
static mt_status host_numbers(job *j, mt_context *ctx, mt_comm *world) {
    float before[ROWS * ROWS], after[ROWS * ROWS];
    mt_graph *graph;
    work w;
    (void)j, (void)world;
    MT_TRY(work_open(ctx, &w));
    MT_TRY(work_do(ctx, &w));
    MT_TRY(mt_download(ctx, w.y, before));
    MT_TRY(work_record(ctx, NULL, &w, &graph));
    w.number = 3.0f;
    MT_TRY(mt_fill(ctx, w.y, 7.0f));
    MT_TRY(mt_graph_launch(ctx, graph));
    MT_TRY(mt_download(ctx, w.y, after));
    CHECK(memcmp(before, after, sizeof after) == 0);
    mt_graph_destroy(ctx, graph);
    return MT_SUCCESS;
}

static void test_host_numbers_are_recorded(void **state) {
    (void)state;
    run(1, host_numbers);
}

#if defined(MT_CUDA_ENGINE)
/* A launch is one call of CUDA, after which the host does not wait. */
static mt_status counted(job *j, mt_context *ctx, mt_comm *world) {
    mt_graph *graph;
    work w;
    (void)j, (void)world;
    MT_TRY(work_open(ctx, &w));
    MT_TRY(work_do(ctx, &w));
    MT_TRY(work_record(ctx, NULL, &w, &graph));
    for (int round = 0; round < 3; round++) {
        long waits = mte::host_waits(), launches = mte::graph_launches(), kernels = mte::kernels_replayed();
        MT_TRY(work_put(ctx, &w, round));
        MT_TRY(mt_graph_launch(ctx, graph));
        CHECK(mte::host_waits() == waits && mte::graph_launches() == launches + 1);
        MT_TRY(mt_context_synchronize(ctx));
        CHECK(mte::kernels_replayed() > kernels);
    }
    mt_graph_destroy(ctx, graph);
    return MT_SUCCESS;
}

static void test_a_launch_is_one_call(void **state) {
    (void)state;
    run(1, counted);
}
#endif

/* ---- ranks that record together ---------------------------------------------------------------------------------- */

#define COUNT 37
#define BLOCKS (5 + 3 * RANKS_MAX) /* of COUNT numbers */

/* x [ranks * COUNT] is this rank's input, y [BLOCKS * COUNT] has the results. */
typedef struct talk {
    mt_comm *world, *half; /* half of the world, or with two ranks both in the other order */
    mt_tensor x, y, z;
    int round;
} talk;

static mt_status talk_open(mt_context *ctx, mt_comm *world, talk *t) {
    int rank = mt_comm_rank(world), ranks = mt_comm_size(world);
    memset(t, 0, sizeof *t);
    t->world = world;
    MT_TRY(mt_comm_split(world, ranks > 2 ? rank % 2 : 0, -rank, &t->half));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, ranks, COUNT, &t->x));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, BLOCKS, COUNT, &t->y));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, ranks, COUNT, &t->z));
    MT_TRY(mt_fill(ctx, t->x, 1.0f));
    return mt_fill(ctx, t->y, -1.0f);
}

static mt_status talk_put(mt_context *ctx, const talk *t, int round) {
    float host[RANKS_MAX * COUNT];
    uint64_t seed = (uint64_t)(100 * round + mt_comm_rank(t->world));
    for (int i = 0; i < RANKS_MAX * COUNT; i++) host[i] = test_float(&seed);
    MT_TRY(mt_upload(ctx, host, t->x));
    return mt_fill(ctx, t->y, -1.0f);
}

static float *talk_block(const talk *t, int block) { return (float *)t->y.data + block * COUNT; }

/* z = x plus what rank's last collective has given, so that collectives and kernels wait for each other. */
static mt_status talk_mix(mt_context *ctx, const talk *t, int block) {
    mt_tensor first = mt_tensor_rows(t->z, 0, 1);
    return mt_add(ctx, first, mt_tensor_f32(talk_block(t, block), 1, COUNT), first);
}

static mt_status talk_chain(mt_context *ctx, const talk *t, int block) {
    int rank = mt_comm_rank(t->world), ranks = mt_comm_size(t->world);
    if (rank > 0) MT_TRY(mt_recv(ctx, t->world, talk_block(t, block), COUNT, MT_F32, rank - 1));
    if (rank > 0) MT_TRY(talk_mix(ctx, t, block));
    return rank + 1 < ranks ? mt_send(ctx, t->world, t->z.data, COUNT, MT_F32, rank + 1) : MT_SUCCESS;
}

/* Every kind of call, on the world and on half of it. */
static mt_status talk_do(mt_context *ctx, const talk *t) {
    int rank = mt_comm_rank(t->world), ranks = mt_comm_size(t->world);
    int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
    const void *z = t->z.data;
    MT_TRY(mt_copy(ctx, t->x, t->z));
    MT_TRY(mt_all_reduce(ctx, t->world, z, talk_block(t, 0), COUNT, MT_F32, MT_SUM));
    MT_TRY(talk_mix(ctx, t, 0));
    MT_TRY(mt_reduce_scatter(ctx, t->world, z, talk_block(t, 1), COUNT, MT_F32, MT_SUM));
    MT_TRY(talk_mix(ctx, t, 1));
    MT_TRY(mt_broadcast(ctx, t->world, z, talk_block(t, 2), COUNT, MT_F32, ranks - 1));
    MT_TRY(talk_mix(ctx, t, 2));
    MT_TRY(mt_all_reduce(ctx, t->half, z, talk_block(t, 3), COUNT, MT_F32, MT_MAX));
    MT_TRY(talk_mix(ctx, t, 3));
    MT_TRY(mt_send_recv(ctx, t->world, z, COUNT, next, talk_block(t, 4), COUNT, before, MT_F32));
    MT_TRY(talk_mix(ctx, t, 4));
    MT_TRY(talk_chain(ctx, t, 5));
    MT_TRY(mt_all_gather(ctx, t->half, z, talk_block(t, 6), COUNT, MT_F32));
    MT_TRY(talk_mix(ctx, t, 6));
    MT_TRY(mt_all_to_all(ctx, t->half, z, talk_block(t, 6), COUNT / RANKS_MAX, MT_F32));
    MT_TRY(talk_mix(ctx, t, 6));
    MT_TRY(mt_all_gather(ctx, t->world, z, talk_block(t, 6 + RANKS_MAX), COUNT, MT_F32));
    return mt_all_reduce(ctx, t->world, t->y.data, t->y.data, BLOCKS * COUNT, MT_F32, MT_SUM);
}

static mt_status talk_record(mt_context *ctx, mt_comm *comm, const talk *t, mt_graph **graph) {
    mt_status status;
    *graph = NULL;
    MT_TRY(mt_graph_begin(ctx, comm));
    status = talk_do(ctx, t);
    MT_KEEP(status, mt_graph_end(ctx, status == MT_SUCCESS ? graph : NULL));
    return status;
}

/* Launches with three inputs, and compares with the same calls that are not recorded. */
static mt_status talk_check(mt_context *ctx, const talk *t, mt_graph *graph) {
    static const size_t bytes = BLOCKS * COUNT * sizeof(float);
    float eager[BLOCKS * COUNT], launched[BLOCKS * COUNT];
    for (int round = 0; round < 3; round++) {
        MT_TRY(talk_put(ctx, t, round));
        MT_TRY(talk_do(ctx, t));
        MT_TRY(mt_download(ctx, t->y, eager));
        MT_TRY(talk_put(ctx, t, round));
        MT_TRY(soil_arena(ctx));
        MT_TRY(mt_graph_launch(ctx, graph));
        MT_TRY(mt_download(ctx, t->y, launched));
        CHECK(memcmp(eager, launched, bytes) == 0);
    }
    return MT_SUCCESS;
}

static mt_status together(job *j, mt_context *ctx, mt_comm *world) {
    float y[BLOCKS * COUNT];
    mt_ledger recorded, launched;
    mt_graph *graph;
    talk t;
    (void)j;
    MT_TRY(talk_open(ctx, world, &t));
    MT_TRY(talk_do(ctx, &t));
    MT_TRY(mt_fill(ctx, t.y, -1.0f));
    MT_TRY(talk_record(ctx, world, &t, &graph));
    MT_TRY(mt_download(ctx, t.y, y));
    for (int i = 0; i < BLOCKS * COUNT; i++) CHECK(y[i] == -1.0f); /* nothing has run */
    recorded = mt_comm_ledger(world);
    MT_TRY(mt_graph_launch(ctx, graph));
    launched = mt_comm_ledger(world);
    CHECK(memcmp(&recorded, &launched, sizeof launched) == 0);
    MT_TRY(talk_check(ctx, &t, graph));
    mt_graph_destroy(ctx, graph);
    mt_comm_destroy(t.half);
    return MT_SUCCESS;
}

static void test_ranks_together(void **state) {
    int gpus = mt_device_count(MT_DEVICE_CUDA) > 1 ? 2 : 1;
    (void)state;
    for (int ranks = 2; ranks <= RANKS_MAX; ranks++)
        for (int g = 1; g <= gpus; g++) {
            job j = job_make(ranks, together);
            j.gpus = g;
            job_run(&j);
        }
}

/* Several launches without a wait in between: each one comes after the work of all ranks. */
static mt_status launches_in_a_row(job *j, mt_context *ctx, mt_comm *world) {
    float y[COUNT];
    mt_graph *graph = NULL;
    mt_tensor x;
    (void)j;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, COUNT, &x));
    MT_TRY(mt_graph_begin(ctx, world));
    MT_TRY(mt_all_reduce(ctx, world, x.data, x.data, COUNT, MT_F32, MT_SUM));
    MT_TRY(mt_graph_end(ctx, &graph));
    for (int round = 0; round < 3; round++) {
        MT_TRY(mt_fill(ctx, x, 1.0f + (float)mt_comm_rank(world)));
        for (int n = 0; n < 3; n++) MT_TRY(mt_graph_launch(ctx, graph)); /* 1 + 2 + 3, then times 3 and 9 */
        MT_TRY(mt_add(ctx, x, x, x));
        MT_TRY(mt_download(ctx, x, y));
        for (int i = 0; i < COUNT; i++) CHECK(y[i] == 108.0f);
    }
    mt_graph_destroy(ctx, graph);
    return MT_SUCCESS;
}

static void test_launches_in_a_row(void **state) {
    (void)state;
    run(3, launches_in_a_row);
}

/* A rank that is still in the collective before mt_graph_begin is not captured. */
static mt_status begun_at_once(job *j, mt_context *ctx, mt_comm *world) {
    mt_graph *graph;
    talk t;
    (void)j;
    MT_TRY(talk_open(ctx, world, &t));
    for (int i = 0; i < 20; i++) {
        MT_TRY(talk_do(ctx, &t));
        MT_TRY(talk_record(ctx, world, &t, &graph));
        MT_TRY(mt_graph_launch(ctx, graph));
        mt_graph_destroy(ctx, graph);
    }
    mt_comm_destroy(t.half);
    return mt_context_synchronize(ctx);
}

static void test_recordings_in_a_row(void **state) {
    (void)state;
    run(3, begun_at_once);
}

/* ---- refusals ---------------------------------------------------------------------------------------------------- */

#define NOT_NOW "between mt_graph_begin and mt_graph_end"

/* Calls that a recording refuses. It then goes on. */
static mt_status refuse_all(mt_context *ctx, mt_comm *comm, const work *w) {
    float host[ROWS * COLS];
    mt_graph *other = NULL;
    uint64_t hash = 0;
    void *memory = host;
    CHECK(refused(ctx, mt_context_synchronize(ctx), MT_ERR_UNSUPPORTED, NOT_NOW));
    memset(host, 0, sizeof host);
    CHECK(refused(ctx, mt_upload(ctx, host, w->x), MT_ERR_UNSUPPORTED, NOT_NOW));
    CHECK(refused(ctx, mt_download(ctx, w->x, host), MT_ERR_UNSUPPORTED, NOT_NOW));
    CHECK(refused(ctx, mt_context_alloc(ctx, 64, &memory), MT_ERR_UNSUPPORTED, NOT_NOW) && memory == NULL);
    CHECK(refused(ctx, mt_barrier(ctx, comm), MT_ERR_UNSUPPORTED, NOT_NOW));
    CHECK(refused(ctx, mt_hash(ctx, w->x, 0, 0, COLS, &hash), MT_ERR_UNSUPPORTED, NOT_NOW));
    CHECK(refused(ctx, mt_graph_begin(ctx, comm), MT_ERR_ARGUMENT, "mt_graph_begin|records already"));
    CHECK(refused(ctx, mt_graph_launch(ctx, NULL), MT_ERR_ARGUMENT, "mt_graph_launch|records already"));
    CHECK(other == NULL);
    return MT_SUCCESS;
}

static mt_status refusals(job *j, mt_context *ctx, mt_comm *world) {
    mt_graph *graph = NULL;
    mt_tensor sum;
    float host;
    work w;
    (void)j;
    MT_TRY(work_open(ctx, &w));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, 1, &sum));
    MT_TRY(work_do(ctx, &w));
    CHECK(refused(ctx, mt_graph_end(ctx, &graph), MT_ERR_ARGUMENT, "mt_graph_end|does not record|mt_graph_begin"));
    CHECK(refused(ctx, mt_graph_launch(ctx, NULL), MT_ERR_ARGUMENT, "mt_graph_launch|graph is NULL") && !graph);
    CHECK(mt_graph_begin(NULL, world) == MT_ERR_ARGUMENT && mt_graph_end(NULL, &graph) == MT_ERR_ARGUMENT);
    CHECK(mt_graph_launch(NULL, NULL) == MT_ERR_ARGUMENT);
    mt_graph_destroy(ctx, NULL);
    MT_TRY(mt_graph_begin(ctx, world));
    MT_TRY(refuse_all(ctx, world, &w));
    MT_TRY(work_do(ctx, &w));
    MT_TRY(mt_fill(ctx, sum, 1.0f));
    MT_TRY(mt_all_reduce(ctx, world, sum.data, sum.data, 1, MT_F32, MT_SUM));
    MT_TRY(refuse_all(ctx, world, &w));
    MT_TRY(mt_graph_end(ctx, &graph));
    MT_TRY(work_check(ctx, &w, graph));
    MT_TRY(mt_download(ctx, sum, &host));
    CHECK(host == (float)mt_comm_size(world));
    mt_graph_destroy(ctx, graph);
    return mt_barrier(ctx, world);
}

static void test_refusals(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks++) run(ranks, refusals);
}

static void test_cpu_has_no_graphs(void **state) {
    mt_context *ctx;
    mt_graph *graph = NULL;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    assert_true(refused(ctx, mt_graph_begin(ctx, NULL), MT_ERR_UNSUPPORTED, "mt_graph_begin|MT_DEVICE_CPU"));
    assert_true(refused(ctx, mt_graph_end(ctx, &graph), MT_ERR_UNSUPPORTED, "mt_graph_end|MT_DEVICE_CPU"));
    assert_true(refused(ctx, mt_graph_launch(ctx, graph), MT_ERR_UNSUPPORTED, "mt_graph_launch|MT_DEVICE_CPU"));
    mt_graph_destroy(ctx, graph);
    mt_context_destroy(ctx);
}

/* What is recorded on MT_DEVICE_META is planned as what is not recorded; a launch does nothing. */
static void test_meta_plans_the_same(void **state) {
    size_t peak[2], allocated[2];
    (void)state;
    for (int recorded = 0; recorded < 2; recorded++) {
        mt_context_desc where;
        mt_context *ctx;
        mt_graph *graph = NULL;
        work w;
        memset(&where, 0, sizeof where);
        where.device = MT_DEVICE_META;
        ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, &where, &ctx));
        ASSERT_STATUS(ctx, MT_SUCCESS, work_open(ctx, &w));
        if (recorded) ASSERT_STATUS(ctx, MT_SUCCESS, mt_graph_begin(ctx, NULL));
        ASSERT_STATUS(ctx, MT_SUCCESS, work_do(ctx, &w));
        if (recorded) {
            ASSERT_STATUS(ctx, MT_SUCCESS, mt_graph_end(ctx, &graph));
            assert_non_null(graph);
            ASSERT_STATUS(ctx, MT_SUCCESS, mt_graph_launch(ctx, graph));
        }
        peak[recorded] = mt_arena_peak(ctx);
        allocated[recorded] = mt_context_allocated(ctx);
        mt_graph_destroy(ctx, graph);
        mt_context_destroy(ctx);
    }
    assert_int_equal(peak[0], peak[1]);
    assert_int_equal(allocated[0], allocated[1]);
}

/* ---- recordings that are discarded, and ranks that do not come --------------------------------------------------- */

static mt_status discard(job *j, mt_context *ctx, mt_comm *world) {
    mt_graph *graph = NULL;
    work w;
    (void)j;
    MT_TRY(work_open(ctx, &w));
    MT_TRY(work_do(ctx, &w));
    for (int i = 0; i < 2; i++) {
        MT_TRY(mt_graph_begin(ctx, world));
        MT_TRY(work_do(ctx, &w));
        MT_TRY(mt_graph_end(ctx, NULL));
        MT_TRY(work_do(ctx, &w));
        MT_TRY(mt_context_synchronize(ctx));
    }
    MT_TRY(work_record(ctx, world, &w, &graph));
    MT_TRY(work_check(ctx, &w, graph));
    mt_graph_destroy(ctx, graph);
    return MT_SUCCESS;
}

static void test_discard(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++) run(ranks, discard);
}

/* One rank discards the graph: the others are told, and all can go on. */
static mt_status one_discards(job *j, mt_context *ctx, mt_comm *world) {
    int discards = mt_comm_rank(world) == j->who;
    mt_graph *graph = NULL;
    mt_status status;
    talk t;
    MT_TRY(talk_open(ctx, world, &t));
    MT_TRY(talk_do(ctx, &t));
    MT_TRY(mt_graph_begin(ctx, world));
    MT_TRY(talk_do(ctx, &t));
    status = mt_graph_end(ctx, discards ? NULL : &graph);
    CHECK(graph == NULL);
    if (discards) MT_TRY(status);
    else CHECK(refused(ctx, status, MT_ERR_PEER, "graph_end|discards"));
    MT_TRY(talk_do(ctx, &t));
    MT_TRY(talk_record(ctx, world, &t, &graph));
    MT_TRY(talk_check(ctx, &t, graph));
    mt_graph_destroy(ctx, graph);
    mt_comm_destroy(t.half);
    return MT_SUCCESS;
}

static void test_one_rank_discards(void **state) {
    (void)state;
    for (int who = 0; who < 3; who++) {
        job j = job_make(3, one_discards);
        j.who = who;
        job_run(&j);
    }
}

enum { NO_BEGIN, NO_END, NO_LAUNCH, NO_CALL, LEAVES };

static mt_status absent_at(job *j, mt_context *ctx, mt_comm *comm, const talk *t, mt_graph **graph, int absent) {
    mt_status status;
    if (absent && j->what == NO_BEGIN) return outlast(j), MT_SUCCESS;
    MT_TRY(mt_graph_begin(ctx, comm));
    if (absent && j->what == LEAVES) return MT_ERR_DATA;
    if (absent && j->what == NO_CALL) outlast(j);
    status = talk_do(ctx, t);
    if (absent && j->what == NO_END) outlast(j);
    MT_KEEP(status, mt_graph_end(ctx, status == MT_SUCCESS ? graph : NULL));
    MT_TRY(status);
    if (absent && j->what == NO_LAUNCH) return outlast(j), MT_SUCCESS;
    return mt_graph_launch(ctx, *graph);
}

/* One rank does not come. It destroys its communicators and then its context, in whatever state they are. */
static mt_status absent(job *j, mt_context *ctx, mt_comm *world) {
    int rank = mt_comm_rank(world);
    mt_graph *graph = NULL;
    mt_comm *comm;
    talk t;
    MT_TRY(mt_comm_split(world, 0, rank, &comm));
    MT_TRY(talk_open(ctx, comm, &t));
    MT_TRY(talk_do(ctx, &t));
    MT_TRY(mt_barrier(ctx, comm));
    j->status[rank] = absent_at(j, ctx, comm, &t, &graph, rank == j->who);
    if (rank != j->who) __atomic_add_fetch(&j->stored, 1, __ATOMIC_RELEASE);
    mt_graph_destroy(ctx, graph);
    mt_comm_destroy(t.half);
    mt_comm_destroy(comm);
    return MT_SUCCESS;
}

/* On a busy machine another rank may be late, too, before its calls: then once more with twice the timeout. */
static void check_absent(int what, int who) {
    for (double timeout = PATIENCE;; timeout *= 2) {
        job j = job_make(3, absent);
        mt_status status;
        int late = 0;
        j.what = what;
        j.who = who;
        j.timeout = timeout;
        status = job_launch(&j, 0);
        for (int r = 0; r < 3; r++) late += r != who && (j.status[r] == MT_ERR_TIMEOUT || j.status[r] == MT_ERR_PEER);
        if (status == MT_SUCCESS && late == 2) return;
        if (timeout > PATIENCE_MAX)
            fail_msg("%d, without rank %d: %s; the ranks got %s, %s, %s", what, who, mt_status_name(status),
                     mt_status_name(j.status[0]), mt_status_name(j.status[1]), mt_status_name(j.status[2]));
    }
}

static void test_one_rank_does_not_come(void **state) {
    (void)state;
    for (int what = NO_BEGIN; what <= NO_CALL; what++)
        for (int who = 0; who < 2; who++) check_absent(what, who);
}

static void test_one_rank_leaves_while_it_records(void **state) {
    (void)state;
    for (int who = 0; who < 3; who++) check_absent(LEAVES, who);
}

/* ---- overlaps ---------------------------------------------------------------------------------------------------- */

static mt_status in_stream(mt_context *ctx, mt_comm *comm, mt_stream stream, int ticket, mt_tensor x) {
    mt_status status;
    MT_TRY(mt_overlap_begin(ctx, comm, stream));
    status = mt_all_reduce(ctx, comm, x.data, x.data, (size_t)(x.rows * x.cols), MT_F32, MT_SUM);
    return mt_overlap_end(ctx, ticket, status);
}

/* Three sums in other streams. The host waits for one of them before the last addition; the others are waited for by
   what comes behind. */
static mt_status overlapped(mt_context *ctx, mt_comm *comm, mt_tensor x) {
    MT_TRY(in_stream(ctx, comm, MT_STREAM_SECOND, 1, mt_tensor_rows(x, 0, 1)));
    MT_TRY(in_stream(ctx, comm, MT_STREAM_SECOND, 2, mt_tensor_rows(x, 1, 1)));
    MT_TRY(in_stream(ctx, comm, MT_STREAM_THIRD, MT_OVERLAP_TICKET_THIRD, mt_tensor_rows(x, 2, 1)));
    MT_TRY(mt_overlap_wait(ctx, 1));
    return mt_add(ctx, mt_tensor_rows(x, 0, 1), mt_tensor_rows(x, 3, 1), mt_tensor_rows(x, 0, 1));
}

static mt_status over_borders(job *j, mt_context *ctx, mt_comm *world) {
    int ranks = mt_comm_size(world);
    float one = (float)(ranks * (ranks + 1) / 2), host[4 * COLS];
    mt_graph *graph = NULL;
    mt_tensor x;
    (void)j;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 4, COLS, &x));
    MT_TRY(mt_fill(ctx, x, 1.0f));
    MT_TRY(overlapped(ctx, world, x));
    MT_TRY(mt_overlap_begin(ctx, world, MT_STREAM_SECOND));
    CHECK(refused(ctx, mt_graph_begin(ctx, world), MT_ERR_ARGUMENT, "mt_graph_begin|mt_overlap_end"));
    MT_TRY(mt_overlap_end(ctx, 0, MT_SUCCESS));
    MT_TRY(mt_overlap_wait_all(ctx));
    MT_TRY(mt_overlap_wait(ctx, MT_OVERLAP_TICKET_THIRD));
    MT_TRY(in_stream(ctx, world, MT_STREAM_SECOND, 5, x)); /* pending when the recording begins */
    MT_TRY(mt_graph_begin(ctx, world));
    MT_TRY(overlapped(ctx, world, x));
    MT_TRY(mt_overlap_begin(ctx, world, MT_STREAM_SECOND));
    CHECK(refused(ctx, mt_graph_end(ctx, &graph), MT_ERR_ARGUMENT, "mt_graph_end|mt_overlap_end") && !graph);
    MT_TRY(mt_overlap_end(ctx, 3, MT_SUCCESS));
    MT_TRY(mt_graph_end(ctx, &graph)); /* two tickets are pending */
    for (int round = 0; round < 3; round++) {
        MT_TRY(mt_fill(ctx, x, 1.0f + (float)mt_comm_rank(world)));
        MT_TRY(mt_graph_launch(ctx, graph));
        MT_TRY(mt_download(ctx, x, host));
        for (int i = 0; i < 4 * COLS; i++) {
            float mine = 1.0f + (float)mt_comm_rank(world);
            CHECK(host[i] == (i < COLS ? one + mine : i < 3 * COLS ? one : mine));
        }
        MT_TRY(overlapped(ctx, world, x)); /* events of the recording are used anew */
        MT_TRY(mt_overlap_wait_all(ctx));
        MT_TRY(mt_overlap_wait(ctx, MT_OVERLAP_TICKET_THIRD));
    }
    mt_graph_destroy(ctx, graph);
    return MT_SUCCESS;
}

static void test_overlaps(void **state) {
    (void)state;
    for (int ranks = 2; ranks <= 3; ranks++) run(ranks, over_borders);
}

/* A launch comes after work that is still in another stream. */
static mt_status launch_behind_overlap(job *j, mt_context *ctx, mt_comm *world) {
    mt_graph *graph = NULL;
    mt_tensor x;
    float host[COLS];
    (void)j;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 2, COLS, &x));
    MT_TRY(mt_graph_begin(ctx, world));
    MT_TRY(mt_add(ctx, mt_tensor_rows(x, 0, 1), mt_tensor_rows(x, 1, 1), mt_tensor_rows(x, 0, 1)));
    MT_TRY(mt_graph_end(ctx, &graph));
    for (int round = 0; round < 2; round++) {
        mt_stream stream = round ? MT_STREAM_THIRD : MT_STREAM_SECOND;
        MT_TRY(mt_fill(ctx, x, 1.0f));
        MT_TRY(in_stream(ctx, world, stream, round ? MT_OVERLAP_TICKET_THIRD : 0, mt_tensor_rows(x, 0, 1)));
        MT_TRY(mt_graph_launch(ctx, graph));
        MT_TRY(mt_download(ctx, mt_tensor_rows(x, 0, 1), host));
        for (int i = 0; i < COLS; i++) CHECK(host[i] == (float)mt_comm_size(world) + 1.0f);
    }
    mt_graph_destroy(ctx, graph);
    return MT_SUCCESS;
}

static void test_launch_behind_an_overlap(void **state) {
    (void)state;
    run(2, launch_behind_overlap);
}

/* Rank 1 launches another graph than the other ranks: all are told. */
static mt_status launch_different(job *j, mt_context *ctx, mt_comm *world) {
    mt_graph *graphs[2] = {NULL, NULL};
    mt_tensor x;
    (void)j;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, COLS, &x));
    for (int i = 0; i < 2; i++) {
        MT_TRY(mt_graph_begin(ctx, world));
        MT_TRY(mt_fill(ctx, x, (float)i));
        MT_TRY(mt_graph_end(ctx, &graphs[i]));
    }
    for (int i = 0; i < 2; i++) MT_TRY(mt_graph_launch(ctx, graphs[i]));
    CHECK(refused(ctx, mt_graph_launch(ctx, graphs[mt_comm_rank(world) == 1]), MT_ERR_MISMATCH, "graph_launch|rank 1"));
    for (int i = 0; i < 2; i++) mt_graph_destroy(ctx, graphs[i]);
    return MT_SUCCESS;
}

static void test_launch_of_different_graphs(void **state) {
    (void)state;
    run(3, launch_different);
}

/* ---- what the steps of a training loop change -------------------------------------------------------------------- */

/* A wrong id in the third launch is reported by the next wait, once. */
static mt_status wrong_id(job *j, mt_context *ctx, mt_comm *world) {
    mt_graph *graph = NULL;
    mt_tensor table, ids, y;
    (void)j;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 10, COLS, &table));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, ROWS, &ids));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, ROWS, COLS, &y));
    MT_TRY(mt_fill(ctx, table, 1.0f));
    MT_TRY(mt_graph_begin(ctx, world));
    MT_TRY(mt_ids_check(ctx, "token id", (const int32_t *)ids.data, ROWS, 10, 0));
    MT_TRY(mt_embedding_forward(ctx, table, 0, (const int32_t *)ids.data, 0.0f, y));
    MT_TRY(mt_graph_end(ctx, &graph));
    for (int round = 0; round < 5; round++) {
        int32_t host[ROWS] = {1, 2, round == 2 ? 99 : 3, 4};
        MT_TRY(mt_upload(ctx, host, ids));
        MT_TRY(mt_graph_launch(ctx, graph));
        if (round == 2)
            CHECK(refused(ctx, mt_context_synchronize(ctx), MT_ERR_DATA, "token id 99 at index 2 is not in [0, 10)"));
        MT_TRY(mt_context_synchronize(ctx));
    }
    mt_graph_destroy(ctx, graph);
    return MT_SUCCESS;
}

static void test_wrong_id_in_a_launch(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++) run(ranks, wrong_id);
}

/* A parameter with its optimizer and its step. */
typedef struct model {
    mt_grid grid;
    mt_params *params;
    mt_param *param;
    mt_optimizer optimizer;
    mt_step step;
    mt_tensor masked, ones;
} model;

static mt_status model_open(mt_context *ctx, mt_comm *world, model *m) {
    mt_param_desc what;
    mt_grid_desc shape;
    memset(&what, 0, sizeof what);
    memset(&shape, 0, sizeof shape);
    what.rows = ROWS;
    what.cols = COLS;
    what.init_value = 1.0f;
    shape.tp = 1;
    MT_TRY(mt_grid_create(world, &shape, &m->grid));
    MT_TRY(mt_params_create(ctx, &m->grid, &m->params));
    MT_TRY(mt_params_add(ctx, m->params, &what, &m->param));
    MT_TRY(mt_params_init(ctx, m->params, 1));
    MT_TRY(mt_optimizer_create(ctx, m->params, NULL, &m->optimizer));
    MT_TRY(mt_step_create(ctx, &m->optimizer, NULL, 1.0f, &m->step));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, ROWS, COLS, &m->masked));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, ROWS, COLS, &m->ones));
    return mt_fill(ctx, m->ones, 1.0f);
}

static void model_close(mt_context *ctx, model *m) {
    mt_step_destroy(ctx, &m->step);
    mt_optimizer_destroy(ctx, &m->optimizer);
    mt_params_destroy(m->params);
    mt_grid_destroy(&m->grid);
}

static mt_dropout drop_words(const uint64_t *offset, uint64_t subsequence) {
    mt_dropout d;
    memset(&d, 0, sizeof d);
    d.at.seed = 5;
    d.at.subsequence = subsequence;
    d.at.global_cols = COLS;
    d.at.offset = offset;
    d.p = 0.5f;
    return d;
}

/* The gradient is the parameter, with dropout. */
static mt_status model_do(mt_context *ctx, model *m) {
    mt_dropout d = drop_words(mt_step_random_offset(&m->step), 0);
    MT_TRY(mt_params_zero_grad(ctx, m->params));
    MT_TRY(mt_bias_dropout_add_forward(ctx, m->ones, mt_none(), mt_none(), d, m->masked));
    MT_TRY(mt_add(ctx, m->masked, m->param->value, m->param->grad));
    MT_TRY(mt_sync_gradients(ctx, m->params));
    return mt_step_update(ctx, &m->step, mt_none());
}

/* Three steps, with a learning rate and a number that change. */
static mt_status model_train(mt_context *ctx, mt_comm *world, int recorded, float *out, float *masks) {
    mt_graph *graph = NULL;
    model m;
    memset(&m, 0, sizeof m);
    MT_TRY(model_open(ctx, world, &m));
    for (int n = 0; n < 4; n++) {
        MT_TRY(mt_step_begin(ctx, &m.step, 0.1f / (float)(n + 1), (uint64_t)n + 1));
        if (recorded && n == 1) {
            MT_TRY(mt_graph_begin(ctx, world));
            MT_TRY(model_do(ctx, &m));
            MT_TRY(mt_graph_end(ctx, &graph));
        }
        MT_TRY(graph ? mt_graph_launch(ctx, graph) : model_do(ctx, &m));
        MT_TRY(mt_download(ctx, m.param->value, out + n * ROWS * COLS));
        MT_TRY(mt_download(ctx, m.masked, masks + n * ROWS * COLS));
    }
    mt_graph_destroy(ctx, graph);
    model_close(ctx, &m);
    return MT_SUCCESS;
}

static mt_status training(job *j, mt_context *ctx, mt_comm *world) {
    static const size_t bytes = 4 * ROWS * COLS * sizeof(float);
    float *all = (float *)malloc(4 * bytes), *other = all + 4 * ROWS * COLS, *masks = other + 4 * ROWS * COLS;
    float *other_masks = masks + 4 * ROWS * COLS, wanted[ROWS * COLS];
    mt_tensor ones, y;
    (void)j;
    if (!all) return MT_ERR_MEMORY;
    MT_TRY(model_train(ctx, world, 0, all, masks));
    MT_TRY(model_train(ctx, world, 1, other, other_masks));
    CHECK(memcmp(all, other, bytes) == 0 && memcmp(masks, other_masks, bytes) == 0);
    CHECK(all[0] > 0.899f && all[0] < 0.901f); /* the first step of Adam changes each parameter by the learning rate */
    MT_TRY(mt_arena_tensor(ctx, MT_F32, ROWS, COLS, &ones));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, ROWS, COLS, &y));
    MT_TRY(mt_fill(ctx, ones, 1.0f));
    for (uint64_t n = 0; n < 4; n++) { /* the words of each step */
        MT_TRY(mt_bias_dropout_add_forward(ctx, ones, mt_none(), mt_none(), drop_words(NULL, (n + 1) << 20), y));
        MT_TRY(mt_download(ctx, y, wanted));
        CHECK(memcmp(wanted, other_masks + n * ROWS * COLS, sizeof wanted) == 0);
    }
    free(all);
    return MT_SUCCESS;
}

static void test_steps(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++) run(ranks, training);
}

/* ---- ends in other orders ---------------------------------------------------------------------------------------- */

/* A graph is destroyed while its launches are in the stream, and its communicator after it. A context is destroyed
   while it records (by job_rank). */
static mt_status ends(job *j, mt_context *ctx, mt_comm *world) {
    float y[COUNT];
    mt_graph *graph = NULL;
    mt_comm *comm;
    mt_tensor x;
    (void)j;
    MT_TRY(mt_comm_split(world, 0, mt_comm_rank(world), &comm));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, COUNT, &x));
    MT_TRY(mt_fill(ctx, x, 1.0f));
    MT_TRY(mt_graph_begin(ctx, comm));
    MT_TRY(mt_all_reduce(ctx, comm, x.data, x.data, COUNT, MT_F32, MT_SUM));
    MT_TRY(mt_add(ctx, x, x, x));
    MT_TRY(mt_graph_end(ctx, &graph));
    for (int n = 0; n < 3; n++) MT_TRY(mt_graph_launch(ctx, graph));
    mt_graph_destroy(ctx, graph);
    CHECK(cudaStreamQuery(mt_context_stream(ctx)) == cudaSuccess); /* it has waited */
    mt_comm_destroy(comm);
    MT_TRY(mt_download(ctx, x, y));
    for (int i = 0, all = mt_comm_size(world); i < COUNT; i++) CHECK(y[i] == (float)(8 * all * all * all));
    MT_TRY(mt_graph_begin(ctx, world));
    return mt_add(ctx, x, x, x);
}

static void test_ends(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks++) run(ranks, ends);
    run(1, one_rank);
}

#if defined(MT_CUDA_ENGINE)
/* ---- calls of CUDA that fail on one rank ------------------------------------------------------------------------- */

/* Records, launches, and waits. Returns the first error. */
static mt_status attempt(mt_context *ctx, mt_comm *comm, const talk *t, mt_graph **graph) {
    MT_TRY(talk_record(ctx, comm, t, graph));
    MT_TRY(mt_graph_launch(ctx, *graph));
    return mt_barrier(ctx, comm);
}

static mt_status fails_once(job *j, mt_context *ctx, mt_comm *world) {
    int rank = mt_comm_rank(world);
    mt_graph *graph = NULL;
    mt_comm *comm;
    size_t mark = mt_arena_mark(ctx);
    talk t;
    for (int again = 0; again < 2; again++) {
        MT_TRY(mt_comm_split(world, 0, rank, &comm));
        MT_TRY(talk_open(ctx, comm, &t));
        MT_TRY(talk_do(ctx, &t));
        MT_TRY(mt_barrier(ctx, comm));
        if (!again && rank == j->who) mte::cuda_fail_after(j->call, j->after, cudaErrorLaunchFailure);
        if (!again) j->status[rank] = attempt(ctx, comm, &t, &graph);
        else MT_TRY(attempt(ctx, comm, &t, &graph));
        if (again) MT_TRY(talk_check(ctx, &t, graph));
        mte::cuda_fail_after(NULL, 0, cudaSuccess);
        mt_graph_destroy(ctx, graph);
        graph = NULL;
        mt_comm_destroy(t.half);
        mt_comm_destroy(comm);
        mt_arena_release(ctx, mark);
    }
    return MT_SUCCESS;
}

/* Lets the call fail at each place. Returns the number of places. */
static int fail_everywhere(const char *call, int who, int step) {
    for (int after = 0;; after += step) {
        job j = job_make(3, fails_once);
        int failed = 0;
        j.call = call;
        j.after = after;
        j.who = who;
        if (job_launch(&j, 0) != MT_SUCCESS) fail_msg("%s, call %d of rank %d", call, after, who);
        for (int r = 0; r < 3; r++) failed += j.status[r] != MT_SUCCESS;
        if (failed == 0) return after;
        if (failed < 3 || j.status[who] != MT_ERR_SYSTEM)
            fail_msg("%s, call %d of rank %d: %s, %s, %s", call, after, who, mt_status_name(j.status[0]),
                     mt_status_name(j.status[1]), mt_status_name(j.status[2]));
    }
}

/* When a call fails on one rank, every rank gets an error, and a recording on a new communicator works. */
static void test_calls_that_fail(void **state) {
    static const char *const once[] = {"cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate",
                                       "cudaGraphLaunch"};
    (void)state;
    for (int i = 0; i < 4; i++) assert_int_equal(fail_everywhere(once[i], 0, 1), 1);
    for (int who = 0; who < 2; who++) {
        assert_true(fail_everywhere("cudaEventRecord", who, test_all() ? 1 : 5) > 10);
        assert_true(fail_everywhere("cudaStreamWaitEvent", who, test_all() ? 1 : 5) > 10);
    }
}
#endif

/* ---- gradients that are zeroed lazily ---------------------------------------------------------------------------- */

/* A layer with x and dy of ones: a backward adds ROWS to each element of the gradient of its weight. */
typedef struct lazy_layer {
    mt_grid grid;
    mt_params *params;
    mt_column_parallel_linear layer;
    mt_linear_saved saved;
    mt_tensor dy;
} lazy_layer;

static mt_status lazy_open(mt_context *ctx, mt_comm *world, lazy_layer *l) {
    mt_grid_desc shape;
    mt_linear_desc d;
    mt_tensor x;
    memset(&shape, 0, sizeof shape);
    memset(&d, 0, sizeof d);
    shape.tp = 1;
    d.in_features = COLS;
    d.out_features = ROWS;
    MT_TRY(mt_grid_create(world, &shape, &l->grid));
    MT_TRY(mt_params_create(ctx, &l->grid, &l->params));
    MT_TRY(mt_column_parallel_linear_create(ctx, l->params, "l", &d, &l->layer));
    MT_TRY(mt_params_init(ctx, l->params, 1));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, ROWS, COLS, &x));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, ROWS, ROWS, &l->dy));
    MT_TRY(mt_fill(ctx, x, 1.0f));
    MT_TRY(mt_fill(ctx, l->dy, 1.0f));
    l->saved.x = x;
    return MT_SUCCESS;
}

/* Runs or records: gradients of NaN that count as zero, and backwards. */
static mt_status lazy_do(mt_context *ctx, const lazy_layer *l, int zero, int backwards) {
    if (zero) MT_TRY(mt_fill(ctx, l->layer.weight->grad, NAN));
    if (zero) MT_TRY(mt_params_zero_grad_lazy(ctx, l->params));
    while (backwards-- > 0) MT_TRY(mt_parallel_linear_backward(ctx, &l->layer, l->dy, mt_none(), &l->saved));
    return MT_SUCCESS;
}

static mt_status lazy_record(mt_context *ctx, const lazy_layer *l, int zero, int backwards, mt_graph **graph) {
    mt_status status;
    MT_TRY(mt_graph_begin(ctx, NULL));
    status = lazy_do(ctx, l, zero, backwards);
    MT_KEEP(status, mt_graph_end(ctx, status == MT_SUCCESS ? graph : NULL));
    return status;
}

/* Checks that the memory of the gradient has what so many backwards have added. */
static mt_status lazy_has(mt_context *ctx, const lazy_layer *l, int backwards) {
    float got[ROWS * COLS];
    MT_TRY(mt_download(ctx, l->layer.weight->grad, got));
    for (int i = 0; i < ROWS * COLS; i++) CHECK(got[i] == (float)(ROWS * backwards));
    return MT_SUCCESS;
}

/* Wherever the zeroing is, a launch does what the calls would do. */
static mt_status lazy_graphs(mt_context *ctx, const lazy_layer *l) {
    mt_graph *add, *zero, *step;
    MT_TRY(lazy_do(ctx, l, 1, 0));
    MT_TRY(lazy_record(ctx, l, 0, 1, &add)); /* zeroed before the recording */
    MT_TRY(lazy_has(ctx, l, 0));
    for (int n = 1; n <= 2; n++) {
        MT_TRY(mt_graph_launch(ctx, add));
        MT_TRY(lazy_has(ctx, l, n));
    }
    MT_TRY(lazy_do(ctx, l, 1, 0)); /* before a launch */
    for (int n = 1; n <= 3; n++) {
        MT_TRY(mt_graph_launch(ctx, add));
        MT_TRY(lazy_has(ctx, l, n));
    }
    MT_TRY(lazy_record(ctx, l, 1, 2, &step)); /* in the graph */
    for (int n = 0; n < 2; n++) {
        MT_TRY(mt_graph_launch(ctx, step));
        MT_TRY(lazy_has(ctx, l, 2));
    }
    MT_TRY(mt_graph_launch(ctx, add));
    MT_TRY(lazy_has(ctx, l, 3));
    MT_TRY(lazy_record(ctx, l, 1, 0, &zero)); /* a graph of its own */
    for (int n = 0; n < 2; n++) {
        MT_TRY(mt_graph_launch(ctx, zero));
        MT_TRY(lazy_has(ctx, l, 0));
        MT_TRY(lazy_do(ctx, l, 0, 1));
        MT_TRY(mt_graph_launch(ctx, add));
        MT_TRY(lazy_has(ctx, l, 2));
    }
    mt_graph_destroy(ctx, add);
    mt_graph_destroy(ctx, zero);
    mt_graph_destroy(ctx, step);
    return MT_SUCCESS;
}

static mt_status lazy_gradients(job *j, mt_context *ctx, mt_comm *world) {
    lazy_layer l;
    mt_status status;
    memset(&l, 0, sizeof l);
    (void)j;
    status = lazy_open(ctx, world, &l);
    if (status == MT_SUCCESS) status = lazy_do(ctx, &l, 1, 2); /* chooses the algorithms */
    if (status == MT_SUCCESS) status = lazy_has(ctx, &l, 2);
    if (status == MT_SUCCESS) status = lazy_graphs(ctx, &l);
    mt_params_destroy(l.params);
    mt_grid_destroy(&l.grid);
    return status;
}

static void test_lazy_gradients(void **state) {
    (void)state;
    run(1, lazy_gradients);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_rank),
        cmocka_unit_test(test_host_numbers_are_recorded),
        cmocka_unit_test(test_ranks_together),
        cmocka_unit_test(test_launches_in_a_row),
        cmocka_unit_test(test_recordings_in_a_row),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_cpu_has_no_graphs),
        cmocka_unit_test(test_meta_plans_the_same),
        cmocka_unit_test(test_discard),
        cmocka_unit_test(test_one_rank_discards),
        cmocka_unit_test(test_one_rank_does_not_come),
        cmocka_unit_test(test_one_rank_leaves_while_it_records),
        cmocka_unit_test(test_overlaps),
        cmocka_unit_test(test_launch_behind_an_overlap),
        cmocka_unit_test(test_launch_of_different_graphs),
        cmocka_unit_test(test_wrong_id_in_a_launch),
        cmocka_unit_test(test_steps),
        cmocka_unit_test(test_ends),
        cmocka_unit_test(test_lazy_gradients),
#if defined(MT_CUDA_ENGINE)
        cmocka_unit_test(test_a_launch_is_one_call),
        cmocka_unit_test(test_calls_that_fail),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
