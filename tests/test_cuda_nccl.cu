/* test_cuda_nccl.cu - tests communicators over NCCL against ranks that are threads on a CPU: collectives, splits,
   faults, calls that differ, registration.
     On GPUs:       nvcc -std=c++17 -O2 -arch=native -I. tests/test_cuda_nccl.cu -lcublasLt -lnccl
                    N ranks need N GPUs, or NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1, with which they share one.
                    Otherwise these cases are skipped. One GPU is enough for ranks over threads that share it, and for
                    one rank over NCCL.
     Without GPUs:  the engine in tests/engine/ runs the same file on a CPU. Only there it tests the
                    faults that the stand-in for NCCL causes. */

#define MT_USE_NCCL
#include "megatron.h"

/* The patch number of the library that the rank in this thread is built with. The implementation below reads it. */
enum { PATCH = MT_VERSION_PATCH };
static thread_local int patch_of_rank = PATCH;
#undef MT_VERSION_PATCH
#define MT_VERSION_PATCH patch_of_rank
#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_gpus.h"
#include "mt_test.h"

#include <math.h>
#include <sys/resource.h>

#if defined(MT_CUDA_ENGINE)
namespace mte {
struct NcclCounts {
    int created, alive, registered, windows, threads, calls;
};
NcclCounts nccl_counts();
void nccl_silence(int device, int after);
void nccl_fail_after(int device, int after, ncclResult_t result);
void nccl_reset_faults();
void nccl_set_version(int version);
void nccl_keep_windows(bool on);
void nccl_let_mismatches_hang(bool on);
void nccl_abort_slowly(bool on);
void cuda_fail_after(const char *name, int after, cudaError_t error);
long host_waits();
} // namespace mte
#endif

#define RANKS_MAX 8
#define OTHER_PATCH 99 /* of a rank that is of another version */
#define PATIENCE 1.0   /* seconds: the timeout where one is waited for on a GPU */
#define SHORT 0.2      /* the timeout where one is waited for on the engine */
#define LONG 64.0      /* where a slow rank also runs out of the timeout, it is doubled up to this */

static bool is_on_nccl(const mt_comm *comm) { return comm->transport == &mti_over_nccl; }

/* ---- ranks, started in every way --------------------------------------------------------------------------------- */

typedef enum way {
    ON_CPU,     /* threads on a CPU: the reference */
    ON_ONE_GPU, /* threads that share a GPU, without NCCL */
    FOR_DEVICE, /* created by mt_comm_create_for */
    FROM_ID,
    FROM_CALLER,      /* the program's own ncclComm_t */
    FROM_NONBLOCKING, /* as FROM_CALLER, non-blocking */
    WAYS
} way;
static const char *const way_names[] = {"on the CPU",
                                        "on one GPU",
                                        "mt_comm_create_for",
                                        "from an id",
                                        "from the caller's communicator",
                                        "from the caller's non-blocking communicator"};
static int is_callers(way how) { return how == FROM_CALLER || how == FROM_NONBLOCKING; }

typedef struct job job;
struct job {
    way how;
    int ranks;
    mt_status (*body)(job *j, mt_context *ctx, mt_comm *comm);
    mt_context_desc where; /* ordinal and device are set here */
    int lone;              /* 1: one rank, over NCCL nevertheless */
    double timeout;
    int other_version;           /* 1 + the rank that is of another version; 0: none */
    mt_status made[RANKS_MAX];   /* what the creation of the communicator has returned */
    mt_comm *threads[RANKS_MAX]; /* the launcher's communicators */
    mt_nccl_id id;
    ncclComm_t callers[RANKS_MAX];
    void *result;
};

static int is_over_nccl(const job *j) { return j->how >= FOR_DEVICE && (j->ranks > 1 || j->lone); }

/* Returns 1 when there are GPUs for the ranks, and otherwise says that something is skipped. */
static int has_gpus(int ranks) {
    int gpus = mt_device_count(MT_DEVICE_CUDA), enough = test_enough_gpus(ranks, gpus);
    if (!enough) printf("      skipped: %d ranks need %d GPUs, and there are %d\n", ranks, ranks, gpus);
    return enough;
}

static void need_gpus(int ranks) {
    if (!has_gpus(ranks)) skip();
}

static mt_status job_comm(job *j, mt_context *ctx, mt_comm *world, mt_comm **out) {
    int rank = mt_comm_rank(world);
    if (j->lone && j->how == FROM_ID) return mti_nccl_create(ctx, &j->id, 1, 0, j->timeout, NULL, out);
    if (j->lone) return mti_nccl_wrap(ctx, j->callers[0], 1, 0, j->timeout, out);
    if (j->how == FROM_ID) return mt_comm_create_nccl_id(ctx, &j->id, j->ranks, rank, j->timeout, out);
    if (is_callers(j->how)) return mt_comm_create_nccl(ctx, j->callers[rank], j->timeout, out);
    return mt_comm_create_for(ctx, world, out);
}

static mt_status job_rank(mt_comm *world, void *user) {
    job *j = (job *)user;
    mt_context_desc where = j->where;
    mt_context *ctx = NULL;
    mt_comm *comm = NULL;
    mt_status status;
    int patch = patch_of_rank;
    j->threads[mt_comm_rank(world)] = world;
    where.device = j->how == ON_CPU ? MT_DEVICE_CPU : MT_DEVICE_CUDA;
    where.ordinal = j->how < FOR_DEVICE ? 0 : test_gpu_of(mt_comm_rank(world));
    if (!where.arena_bytes) where.arena_bytes = (size_t)1 << 20;
    status = mt_context_create(world, &where, &ctx);
    if (j->other_version == mt_comm_rank(world) + 1) patch_of_rank = OTHER_PATCH;
    if (status == MT_SUCCESS) status = j->made[mt_comm_rank(world)] = job_comm(j, ctx, world, &comm);
    if (status == MT_SUCCESS || j->other_version) status = j->body(j, ctx, comm);
    patch_of_rank = patch;
    mt_comm_destroy(comm);
    /* aborted after mt_comm_destroy and before mt_context_destroy, as the header requires */
    if (is_callers(j->how) && status != MT_SUCCESS) {
        ncclCommAbort(j->callers[mt_comm_rank(world)]);
        j->callers[mt_comm_rank(world)] = NULL;
    }
    mt_context_destroy(ctx);
    return status;
}

static int helper_threads(void) {
#if defined(MT_CUDA_ENGINE)
    return mte::nccl_counts().threads;
#else
    return 0;
#endif
}

/* Returns the number of collectives and messages of NCCL so far; 0 on a GPU, where nobody counts them. */
static int nccl_calls(void) {
#if defined(MT_CUDA_ENGINE)
    return mte::nccl_counts().calls;
#else
    return 0;
#endif
}

/* Checks the number of calls since `before`. */
static void expect_calls(int before, int calls) {
#if defined(MT_CUDA_ENGINE)
    assert_int_equal(nccl_calls() - before, calls);
#else
    (void)before, (void)calls;
#endif
}

static void make_callers(job *j) {
    if (j->how == FROM_CALLER && !test_may_share())
        assert_int_equal(ncclCommInitAll(j->callers, j->ranks, NULL), ncclSuccess);
    else if (is_callers(j->how)) test_make_callers(j->callers, j->ranks, j->how == FROM_CALLER);
}

static mt_status job_launch(job *j, int say) {
    mt_launch_desc d;
    mt_context *ctx;
    mt_context_desc where;
    mt_status status;
    int before = helper_threads(), hidden = j->how == ON_ONE_GPU && test_may_share();
    memset(&d, 0, sizeof d);
    memset(&where, 0, sizeof where);
    if (j->timeout <= 0) j->timeout = TEST_NEVER_OVER;
    if (is_over_nccl(j)) need_gpus(j->ranks);
    d.ranks = j->ranks;
    d.no_pinning = 1;
    d.timeout_s = j->timeout;
    if (!say) d.logger.log = test_quiet;
    where.device = MT_DEVICE_CUDA;
    where.arena_bytes = 4096;
    if (j->how == FROM_ID) {
        ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, &where, &ctx));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_nccl_unique_id(ctx, &j->id));
        mt_context_destroy(ctx);
    }
    make_callers(j);
    if (hidden) unsetenv("NCCL_MULTI_RANK_GPU_ENABLE"); /* no NCCL for threads that share a GPU */
    status = mt_launch(&d, job_rank, j);
    if (hidden) setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    if (j->how != FROM_NONBLOCKING) assert_int_equal(helper_threads(), before); /* NCCL starts none per call */
    for (int r = 0; is_callers(j->how) && r < j->ranks; r++)
        if (j->callers[r]) assert_int_equal(ncclCommDestroy(j->callers[r]), ncclSuccess);
    return status;
}

static void nothing_left(void) {
#if defined(MT_CUDA_ENGINE)
    assert_int_equal(mte::nccl_counts().alive, 0);
    assert_int_equal(mte::nccl_counts().registered, 0);
#endif
}

static void job_run(job *j) {
    mt_status status = job_launch(j, 1);
    if (status != MT_SUCCESS) fail_msg("%d ranks, %s: %s", j->ranks, way_names[j->how], mt_status_name(status));
    nothing_left();
}

static job job_make(way how, int ranks, mt_status (*body)(job *, mt_context *, mt_comm *)) {
    job j;
    memset(&j, 0, sizeof j);
    j.how = how;
    j.ranks = ranks;
    j.body = body;
    return j;
}

static mt_status put(mt_context *ctx, const void *host, void *device, size_t bytes) {
    return mt_upload(ctx, host, mt_tensor_make(device, MT_U8, 1, (int64_t)bytes));
}

static mt_status get(mt_context *ctx, const void *device, void *host, size_t bytes) {
    return mt_download(ctx, mt_tensor_make(device, MT_U8, 1, (int64_t)bytes), host);
}

/* ---- every collective, type, number of ranks, in place and not --------------------------------------------------- */

#define COUNT 37
#define BYTES (RANKS_MAX * COUNT * 4)

typedef enum what {
    REDUCE_SUM,
    REDUCE_MAX,
    SCATTER_SUM,
    SCATTER_MAX,
    SCATTER_ROWS,
    GATHER,
    GATHER_ROWS,
    BROADCAST,
    RING,
    CHAIN,
    BLOCKS,
    COUNTS,
    SELF,
    WHATS
} what;
static const char *const what_names[] = {
    "all_reduce, sum", "all_reduce, max",      "reduce_scatter, sum", "reduce_scatter, max", "reduce_scatter in chunks",
    "all_gather",      "all_gather in chunks", "broadcast",           "send_recv",           "send and recv",
    "all_to_all",      "all_to_all_v",         "send_recv to oneself"};
#define TYPES 5 /* MT_F32 to MT_U8 */

typedef struct results {
    unsigned char bytes[RANKS_MAX][WHATS][TYPES][2][BYTES];
    mt_ledger ledger[RANKS_MAX];
} results;

static int reduces(int w) { return w <= SCATTER_ROWS; }
static int in_chunks(int w) { return w == SCATTER_ROWS || w == GATHER_ROWS; }
static int has_blocks(int w) { return w >= SCATTER_SUM && w <= GATHER_ROWS; }

/* Fills with numbers of each type. Float types include a NaN, an infinity and a negative zero, on one rank. */
static void fill(mt_dtype dtype, int rank, int what_, unsigned char *bytes, size_t n) {
    uint64_t seed = (uint64_t)(rank * 1000 + what_);
    for (size_t i = 0; i < n; i++) {
        float x = 4.0f * test_float(&seed);
        uint16_t h;
        if (what_ == REDUCE_MAX && rank == 1 && i == 3) x = NAN;
        if (what_ == REDUCE_MAX && rank == 0 && i == 4) x = -INFINITY;
        h = dtype == MT_BF16 ? mti_f32_to_bf16(x) : mti_f32_to_f16(x);
        if (dtype == MT_F32) memcpy(bytes + 4 * i, &x, 4);
        else if (mt_dtype_size(dtype) == 2) memcpy(bytes + 2 * i, &h, 2);
        else
            for (size_t b = 0, m = mt_dtype_size(dtype); b < m; b++)
                bytes[i * m + b] = (unsigned char)test_random(&seed);
    }
}

static mt_status chain(mt_context *ctx, mt_comm *comm, const void *send, void *recv, mt_dtype dtype) {
    int rank = mt_comm_rank(comm), ranks = mt_comm_size(comm);
    if (rank > 0) MT_TRY(mt_recv(ctx, comm, recv, COUNT, dtype, rank - 1));
    return rank + 1 < ranks ? mt_send(ctx, comm, send, COUNT, dtype, rank + 1) : MT_SUCCESS;
}

#define ROWS 5 /* rows of 7 columns on each rank, in two chunks: rank 0, and the other ranks */
#define COLS 7

static mt_status rows_call(mt_context *ctx, mt_comm *comm, int w, mt_dtype dtype, const void *send, void *recv) {
    int ranks = mt_comm_size(comm);
    mt_tensor x = mt_tensor_make(send, dtype, w == SCATTER_ROWS ? ROWS * ranks : ROWS, COLS);
    mt_tensor y = mt_tensor_make(recv, dtype, w == SCATTER_ROWS ? ROWS : ROWS * ranks, COLS);
    for (int first = 0; first < ranks && first < 2; first++) {
        int count = first ? ranks - 1 : 1;
        if (w == GATHER_ROWS) MT_TRY(mt_gather_ranks_from_sequence_region(ctx, comm, x, y, first, count));
        else MT_TRY(mt_reduce_scatter_ranks_to_sequence_region(ctx, comm, x, y, first, count));
    }
    return MT_SUCCESS;
}

/* The elements that a rank sends another one: up to COUNT, also none. */
static size_t count_of(int from, int to) { return (size_t)((5 * from + 11 * to + 1) % 4 * COUNT / 3); }

static mt_status counts_call(mt_context *ctx, mt_comm *comm, mt_dtype dtype, const void *send, void *recv) {
    size_t sends[RANKS_MAX], recvs[RANKS_MAX];
    for (int r = 0; r < mt_comm_size(comm); r++) {
        sends[r] = count_of(mt_comm_rank(comm), r);
        recvs[r] = count_of(r, mt_comm_rank(comm));
    }
    return mt_all_to_all_v(ctx, comm, send, sends, recv, recvs, dtype);
}

static mt_status one_call(mt_context *ctx, mt_comm *comm, int w, mt_dtype dtype, const void *send, void *recv) {
    int rank = mt_comm_rank(comm), ranks = mt_comm_size(comm), next = (rank + 1) % ranks,
        before = (rank + ranks - 1) % ranks;
    mt_op op = w == REDUCE_MAX || w == SCATTER_MAX ? MT_MAX : MT_SUM;
    switch (w) {
    case REDUCE_SUM:
    case REDUCE_MAX: return mt_all_reduce(ctx, comm, send, recv, COUNT, dtype, op);
    case SCATTER_SUM:
    case SCATTER_MAX: return mt_reduce_scatter(ctx, comm, send, recv, COUNT, dtype, op);
    case SCATTER_ROWS:
    case GATHER_ROWS: return rows_call(ctx, comm, w, dtype, send, recv);
    case GATHER: return mt_all_gather(ctx, comm, send, recv, COUNT, dtype);
    case BROADCAST: return mt_broadcast(ctx, comm, send, recv, COUNT, dtype, ranks - 1);
    case RING: return mt_send_recv(ctx, comm, send, COUNT, next, recv, COUNT, before, dtype);
    case CHAIN: return chain(ctx, comm, send, recv, dtype);
    case BLOCKS: return mt_all_to_all(ctx, comm, send, recv, COUNT, dtype);
    case COUNTS: return counts_call(ctx, comm, dtype, send, recv);
    default: return mt_send_recv(ctx, comm, send, COUNT, rank, recv, COUNT, rank, dtype);
    }
}

/* Offset of a rank's block in the buffer of all ranks, in bytes. */
static size_t block(int w, mt_dtype dtype, int rank) {
    return (size_t)rank * (in_chunks(w) ? ROWS * COLS : COUNT) * mt_dtype_size(dtype);
}

/* One call with sendbuf and recvbuf in one buffer, as NCCL defines in place. Point-to-point calls have no such rule. */
static mt_status in_one_place(mt_context *ctx, mt_comm *comm, int w, mt_dtype dtype, char *x) {
    char *mine = x + block(w, dtype, mt_comm_rank(comm));
    if (!has_blocks(w)) return one_call(ctx, comm, w, dtype, x, x);
    return reduces(w) ? one_call(ctx, comm, w, dtype, x, mine) : one_call(ctx, comm, w, dtype, mine, x);
}

static mt_status one_case(mt_context *ctx, mt_comm *comm, int w, mt_dtype dtype, int in_place, unsigned char *out) {
    size_t mark = mt_arena_mark(ctx);
    unsigned char *host = (unsigned char *)malloc(BYTES);
    void *x, *y;
    if (!host) return MT_ERR_MEMORY;
    fill(dtype, mt_comm_rank(comm), w, host, BYTES / mt_dtype_size(dtype));
    MT_TRY(mt_arena_alloc(ctx, BYTES, &x));
    MT_TRY(mt_arena_alloc(ctx, BYTES, &y));
    MT_TRY(put(ctx, host, x, BYTES));
    memset(host, 0xa5, BYTES);
    MT_TRY(put(ctx, host, y, BYTES));
    if (in_place) MT_TRY(in_one_place(ctx, comm, w, dtype, (char *)x));
    else MT_TRY(one_call(ctx, comm, w, dtype, x, y));
    MT_TRY(get(ctx, in_place ? x : y, out, BYTES));
    free(host);
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

static int skipped(int w, mt_dtype dtype, int in_place) {
    return (reduces(w) && dtype == MT_U8) || (in_place && w >= RING && w <= COUNTS);
}

static mt_status all_cases(job *j, mt_context *ctx, mt_comm *comm) {
    results *r = (results *)j->result;
    int rank = mt_comm_rank(comm);
    CHECK(is_on_nccl(comm) == is_over_nccl(j));
    CHECK(mt_comm_size(comm) == j->ranks);
    for (int w = 0; w < WHATS; w++)
        for (int t = 0; t < TYPES; t++)
            for (int in_place = 0; in_place < 2; in_place++)
                if (!skipped(w, (mt_dtype)t, in_place))
                    MT_TRY(one_case(ctx, comm, w, (mt_dtype)t, in_place, r->bytes[rank][w][t][in_place]));
    MT_TRY(mt_barrier(ctx, comm));
    r->ledger[rank] = mt_comm_ledger(comm);
    return MT_SUCCESS;
}

static double value(mt_dtype dtype, const unsigned char *bytes, size_t i) {
    uint16_t h;
    float x = 0;
    memcpy(&h, bytes + 2 * i, sizeof h);
    if (dtype == MT_F32) memcpy(&x, bytes + 4 * i, sizeof x);
    return dtype == MT_F32 ? x : dtype == MT_BF16 ? mti_bf16_to_f32(h) : mti_f16_to_f32(h);
}

/* Compares with NCCL's sums, which round a partial sum of at most 4 per rank at each further hop. */
static void near(const char *name, mt_dtype dtype, int ranks, const unsigned char *a, const unsigned char *b,
                 size_t n) {
    double last = dtype == MT_F32 ? ldexp(1, -24) : dtype == MT_BF16 ? ldexp(1, -9) : ldexp(1, -12);
    double allowed = 2 * 4.0 * ranks * ranks * last;
    for (size_t i = 0; i < n; i++)
        if (!(fabs(value(dtype, a, i) - value(dtype, b, i)) <= allowed))
            fail_msg("%s, %s, %d ranks: element %zu is %g, on the CPU %g", name, mt_dtype_name(dtype), ranks, i,
                     value(dtype, b, i), value(dtype, a, i));
}

/* Returns 1 for the same bits. Two NaN of a 16-bit type are equal: the GPU chooses their bits. */
static int same_bits(mt_dtype dtype, const unsigned char *a, const unsigned char *b) {
    if (mt_dtype_size(dtype) != 2) return memcmp(a, b, BYTES) == 0;
    for (size_t i = 0; i < BYTES / 2; i++)
        if (memcmp(a + 2 * i, b + 2 * i, 2) != 0 && !(isnan(value(dtype, a, i)) && isnan(value(dtype, b, i)))) return 0;
    return 1;
}

static int sums(int w) { return w == REDUCE_SUM || w == SCATTER_SUM || w == SCATTER_ROWS; }

static void compare(const results *cpu, const results *gpu, const job *j) {
    for (int rank = 0; rank < j->ranks; rank++) {
        for (int w = 0; w < WHATS; w++)
            for (int t = 0; t < TYPES; t++)
                for (int in_place = 0; in_place < 2; in_place++) {
                    const unsigned char *a = cpu->bytes[rank][w][t][in_place], *b = gpu->bytes[rank][w][t][in_place];
                    size_t at = in_place && has_blocks(w) ? block(w, (mt_dtype)t, rank) : 0;
                    if (sums(w) && t <= MT_F16 && !j->where.invariant && is_over_nccl(j) && j->ranks > 1)
                        near(what_names[w], (mt_dtype)t, j->ranks, a + at, b + at, in_chunks(w) ? ROWS * COLS : COUNT);
                    else if (!same_bits((mt_dtype)t, a, b))
                        fail_msg("%s of %s%s, %d ranks, %s: rank %d has other bits than on the CPU", what_names[w],
                                 mt_dtype_name((mt_dtype)t), in_place ? ", in place" : "", j->ranks, way_names[j->how],
                                 rank);
                }
        if (memcmp(&cpu->ledger[rank], &gpu->ledger[rank], sizeof(mt_ledger)) != 0)
            fail_msg("rank %d: another ledger", rank);
    }
}

static const int sizes[] = {1, 2, 3, 4, 8};

/* mt_comm_create_for is tested with all numbers of ranks, the other ways from `first` to `last` with some. */
static void collectives(way first, way last, int invariant, int lone) {
    results *cpu = (results *)calloc(1, sizeof *cpu), *gpu = (results *)calloc(1, sizeof *gpu);
    for (int i = 0; i < (lone ? 1 : 5); i++) {
        if (first >= FOR_DEVICE && !has_gpus(sizes[i])) break;
        for (int how = first; how <= (int)last; how++) {
            job j = job_make(ON_CPU, sizes[i], all_cases);
            if (how > FOR_DEVICE && !lone && (sizes[i] == 4 || sizes[i] == 8 || invariant)) continue;
            memset(gpu, 0, sizeof *gpu);
            j.result = cpu;
            if (how == (int)first) job_run(&j);
            j.how = (way)how;
            j.lone = lone;
            j.where.invariant = invariant;
            j.result = gpu;
            job_run(&j);
            compare(cpu, gpu, &j);
        }
    }
    free(gpu);
    free(cpu);
}

static void test_collectives(void **state) {
    (void)state;
    need_gpus(2);
    collectives(FOR_DEVICE, FROM_NONBLOCKING, 0, 0);
}

static void test_collectives_in_invariant_mode(void **state) {
    (void)state;
    need_gpus(2);
    collectives(FOR_DEVICE, FOR_DEVICE, 8, 0);
}

/* NCCL would refuse ranks on one GPU: they keep the thread backend. */
static void test_collectives_on_one_gpu(void **state) {
    (void)state;
#if defined(MT_CUDA_ENGINE)
    int before = mte::nccl_counts().created;
#endif
    collectives(ON_ONE_GPU, ON_ONE_GPU, 0, 0);
#if defined(MT_CUDA_ENGINE)
    assert_int_equal(mte::nccl_counts().created, before);
#endif
}

/* More elements than one chunk of scratch memory has; the last chunk does not have parts for all ranks. */
#define MANY 1049000

static mt_status long_sums(job *j, mt_context *ctx, mt_comm *comm) {
    int rank = mt_comm_rank(comm), ranks = mt_comm_size(comm);
    float *host = (float *)malloc((size_t)MANY * 4 * 2), *kept = (float *)j->result + (size_t)rank * 2 * MANY;
    uint64_t seed = 7 + (uint64_t)rank;
    void *x, *y;
    for (int i = 0; i < 2 * MANY; i++) host[i] = test_float(&seed);
    MT_TRY(mt_context_alloc(ctx, (size_t)MANY * 8, &x));
    MT_TRY(mt_context_alloc(ctx, (size_t)MANY * 4, &y));
    MT_TRY(put(ctx, host, x, (size_t)MANY * 8));
    MT_TRY(mt_all_reduce(ctx, comm, x, y, MANY, MT_F32, MT_SUM));
    MT_TRY(get(ctx, y, kept, (size_t)MANY * 4));
    MT_TRY(mt_reduce_scatter(ctx, comm, x, y, (size_t)(2 * MANY / ranks), MT_F32, MT_SUM));
    MT_TRY(get(ctx, y, kept + MANY, (size_t)MANY * 4));
    mt_context_free(ctx, y, (size_t)MANY * 4);
    mt_context_free(ctx, x, (size_t)MANY * 8);
    free(host);
    return MT_SUCCESS;
}

static void compare_long_sums(way how) {
    float *cpu = (float *)malloc((size_t)MANY * 4 * 4), *gpu = (float *)malloc((size_t)MANY * 4 * 4);
    job j = job_make(ON_CPU, 2, long_sums);
    j.where.invariant = 2;
    j.where.arena_bytes = (size_t)5 << 20;
    j.result = cpu;
    job_run(&j);
    j.how = how;
    j.result = gpu;
    job_run(&j);
    assert_memory_equal(cpu, gpu, (size_t)MANY * 4 * 4);
    free(gpu);
    free(cpu);
}

static void test_long_sums_in_invariant_mode(void **state) {
    (void)state;
    need_gpus(2);
    compare_long_sums(FOR_DEVICE);
}

static void test_long_sums_on_one_gpu(void **state) {
    (void)state;
    compare_long_sums(ON_ONE_GPU);
}

/* ---- splits ------------------------------------------------------------------------------------------------------ */

typedef struct group_of {
    int rank, size;
    float sum;
} group_of;

#define SPLITS 6

/* Rank r's color and key: rows, columns in reverse order, some ranks in no group, one group per rank, all ranks in one,
   rank 0 alone. */
static int color_of(int split, int rank) {
    const int colors[SPLITS] = {rank / 2, rank % 2, rank == 2 ? -5 : 3, rank, 0, rank > 0};
    return colors[split];
}

static mt_status split_all(job *j, mt_context *ctx, mt_comm *comm) {
    group_of *found = (group_of *)j->result + mt_comm_rank(comm) * SPLITS;
    mt_tensor x;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, 1, &x));
    for (int s = 0; s < SPLITS; s++) {
        int rank = mt_comm_rank(comm), color = color_of(s, rank);
        mt_comm *part = NULL;
        MT_TRY(mt_comm_split(comm, color, s == 1 ? -rank : 0, &part));
        CHECK((part == NULL) == (color < 0));
        if (!part) continue;
        MT_TRY(mt_fill(ctx, x, (float)(1 << rank)));
        MT_TRY(mt_all_reduce(ctx, part, x.data, x.data, 1, MT_F32, MT_SUM));
        found[s].rank = mt_comm_rank(part);
        found[s].size = mt_comm_size(part);
        MT_TRY(mt_download(ctx, x, &found[s].sum));
        CHECK(is_on_nccl(part) == (is_on_nccl(comm) && part->size > 1));
        mt_comm_destroy(part);
    }
    return MT_SUCCESS;
}

static void splits(way first, way last) {
    for (int ranks = 2; ranks <= 6 && (first < FOR_DEVICE || has_gpus(ranks)); ranks += 2)
        for (int how = first; how <= (int)last; how++) {
            group_of cpu[RANKS_MAX * SPLITS], gpu[RANKS_MAX * SPLITS];
            job j = job_make(ON_CPU, ranks, split_all);
            memset(cpu, 0, sizeof cpu);
            memset(gpu, 0, sizeof gpu);
            j.result = cpu;
            job_run(&j);
            j.how = (way)how;
            j.result = gpu;
            job_run(&j);
            assert_memory_equal(cpu, gpu, sizeof cpu);
        }
}

static void test_split(void **state) {
    (void)state;
    need_gpus(2);
    splits(FOR_DEVICE, FROM_NONBLOCKING);
}

static void test_split_on_one_gpu(void **state) {
    (void)state;
    splits(ON_ONE_GPU, ON_ONE_GPU);
}

/* The ranks of a group in reverse order, split by their parity. */
static mt_status split_a_split(job *j, mt_context *ctx, mt_comm *comm) {
    int rank = mt_comm_rank(comm), sum = 0;
    mt_comm *back = NULL, *half = NULL;
    mt_tensor x;
    float back_sum = 0;
    for (int r = rank % 2; r < j->ranks; r += 2) sum += 1 << r;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, 1, &x));
    MT_TRY(mt_comm_split(comm, 0, -rank, &back));
    CHECK(mt_comm_rank(back) == j->ranks - 1 - rank);
    MT_TRY(mt_comm_split(back, rank % 2, mt_comm_rank(back), &half));
    CHECK(mt_comm_rank(half) == (j->ranks - 1 - rank) / 2 && is_on_nccl(half) == (is_over_nccl(j) && half->size > 1));
    MT_TRY(mt_fill(ctx, x, (float)(1 << rank)));
    MT_TRY(mt_all_reduce(ctx, half, x.data, x.data, 1, MT_F32, MT_SUM));
    MT_TRY(mt_download(ctx, x, &back_sum));
    CHECK((int)back_sum == sum);
    mt_comm_destroy(half);
    mt_comm_destroy(back);
    return MT_SUCCESS;
}

static void test_split_of_a_split(void **state) {
    (void)state;
    need_gpus(3);
    for (int ranks = 3; ranks <= 4 && has_gpus(ranks); ranks++)
        for (int how = FOR_DEVICE; how < WAYS; how++) {
            job j = job_make((way)how, ranks, split_a_split);
            job_run(&j);
        }
}

static void test_split_of_a_split_on_one_gpu(void **state) {
    (void)state;
    for (int ranks = 3; ranks <= 4; ranks++) {
        job j = job_make(ON_ONE_GPU, ranks, split_a_split);
        job_run(&j);
    }
}

static mt_status make_grid(job *j, mt_context *ctx, mt_comm *comm) {
    const int *sizes = (const int *)j->result;
    mt_grid_desc shape = {sizes[0], 0, 0, sizes[1]};
    mt_grid grid;
    (void)ctx;
    MT_TRY(mt_grid_create(comm, &shape, &grid));
    CHECK(!is_on_nccl(grid.pp) && !is_on_nccl(grid.embedding));
    CHECK(is_on_nccl(grid.tp) == (grid.tp_size > 1) && is_on_nccl(grid.dp) == (grid.dp_size > 1));
    CHECK(is_on_nccl(grid.cp) == (grid.cp_size > 1) && is_on_nccl(grid.dp_cp) == (grid.cp_size * grid.dp_size > 1));
    mt_grid_destroy(&grid);
    return MT_SUCCESS;
}

/* World, tensor, data, model, context and data x context group. A group of one rank has no NCCL communicator, the world
   has two. */
static void test_no_communicator_for_one(void **state) {
    static const int cases[][4] = {{1, 0, 1, 1}, {4, 3, 1, 1}, {4, 5, 2, 1}, {4, 4, 4, 1},
                                   {4, 6, 2, 2}, {4, 5, 1, 2}}; /* ranks, communicators per rank, tp, cp */
    (void)state;
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        job j = job_make(FOR_DEVICE, cases[i][0], make_grid);
        int sizes[2] = {cases[i][2], cases[i][3]};
#if defined(MT_CUDA_ENGINE)
        int before = mte::nccl_counts().created;
#endif
        j.result = sizes;
        job_run(&j);
#if defined(MT_CUDA_ENGINE)
        assert_int_equal(mte::nccl_counts().created - before, cases[i][0] * cases[i][1]);
#endif
    }
}

/* ---- arguments --------------------------------------------------------------------------------------------------- */

/* A rank that has no memory for a call can free some and make the call: the others do not notice. */
static mt_status without_memory(job *j, mt_context *ctx, mt_comm *comm) {
    size_t mark;
    mt_tensor x;
    void *rest;
    (void)j;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, 64, &x));
    MT_TRY(mt_fill(ctx, x, 1.0f));
    for (int barrier = 0; barrier < 2; barrier++) {
        mark = mt_arena_mark(ctx);
        MT_TRY(mt_arena_alloc(ctx, mt_arena_available(ctx), &rest));
        if (mt_comm_rank(comm) == 1 && barrier) CHECK(mt_barrier(ctx, comm) == MT_ERR_MEMORY);
        else if (mt_comm_rank(comm) == 1)
            CHECK(mt_all_reduce(ctx, comm, x.data, x.data, 64, MT_F32, MT_SUM) == MT_ERR_MEMORY);
        mt_arena_release(ctx, mark);
        if (barrier) MT_TRY(mt_barrier(ctx, comm));
        else MT_TRY(mt_all_reduce(ctx, comm, x.data, x.data, 64, MT_F32, MT_SUM));
        MT_TRY(mt_broadcast(ctx, comm, x.data, x.data, 64, MT_F32, 0));
        MT_TRY(mt_context_synchronize(ctx));
    }
    return mt_barrier(ctx, comm); /* rank 0 has compared the calls before, or finds out now */
}

static void test_a_call_without_memory(void **state) {
    (void)state;
    job j = job_make(FOR_DEVICE, 2, without_memory);
    j.where.invariant = 2;
    job_run(&j);
}

static mt_status refusals(job *j, mt_context *ctx, mt_comm *comm) {
    mt_context_desc where;
    mt_context *other = NULL;
    mt_comm *none = (mt_comm *)(void *)&where;
    float x = 0;
    void *p;
    memset(&where, 0, sizeof where);
    MT_TRY(mt_arena_alloc(ctx, 64, &p));
    CHECK(mt_comm_create_nccl_id(ctx, &j->id, 2, 2, 0, &none) == MT_ERR_ARGUMENT && !none);
    CHECK(strstr(mt_last_error(ctx), "rank 2 of 2"));
    CHECK(mt_comm_create_nccl_id(ctx, NULL, 2, 0, 0, &none) == MT_ERR_ARGUMENT);
    CHECK(mt_comm_create_nccl_id(NULL, &j->id, 2, 0, 0, &none) == MT_ERR_ARGUMENT);
    CHECK(mt_comm_create_nccl(ctx, NULL, 0, &none) == MT_ERR_ARGUMENT);
    if (test_gpu_of(0) != test_gpu_of(1)) {
        CHECK(mt_comm_create_nccl(ctx, j->callers[1 - mt_comm_rank(comm)], 0, &none) == MT_ERR_ARGUMENT && !none);
        CHECK(strstr(mt_last_error(ctx), "the context on GPU"));
    }
    CHECK(mt_comm_create_for(ctx, comm, &none) == MT_ERR_ARGUMENT && !none);
    CHECK(mt_nccl_unique_id(ctx, NULL) == MT_ERR_ARGUMENT);
    CHECK(mt_all_reduce(ctx, comm, p, p, 4, MT_U8, MT_SUM) == MT_ERR_DTYPE);
    CHECK(mt_broadcast(ctx, comm, p, p, 4, MT_F32, 2) == MT_ERR_ARGUMENT);
    MT_TRY(mt_context_create(NULL, &where, &other));
    CHECK(mt_all_reduce(other, comm, &x, &x, 1, MT_F32, MT_SUM) == MT_ERR_ARGUMENT);
    CHECK(strstr(mt_last_error(other), "another context"));
    CHECK(mt_nccl_unique_id(other, &j->id) == MT_ERR_ARGUMENT && strstr(mt_last_error(other), "MT_DEVICE_CUDA"));
    mt_context_destroy(other);
    return mt_barrier(ctx, comm); /* the refused calls have had no effect on the communicator */
}

static void test_refusals(void **state) {
    job j = job_make(FROM_CALLER, 2, refusals);
    (void)state;
    job_run(&j);
}

static mt_status outlive(job *j, mt_context *ctx, mt_comm *comm) {
    mt_context_desc where;
    mt_context *brief;
    mt_comm *mine = NULL, *part = NULL;
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_CUDA;
    where.arena_bytes = 1 << 16;
    where.ordinal = test_gpu_of(mt_comm_rank(comm));
    MT_TRY(mt_context_create(NULL, &where, &brief));
    if (j->lone) {
        mt_nccl_id id;
        MT_TRY(mt_nccl_unique_id(brief, &id));
        MT_TRY(mti_nccl_create(brief, &id, 1, 0, j->timeout, NULL, &mine));
    } else MT_TRY(mt_comm_create_for(brief, j->threads[mt_comm_rank(comm)], &mine));
    mt_context_destroy(brief); /* in the wrong order: the communicator can still be destroyed */
    CHECK(mt_comm_split(mine, 0, 0, &part) == MT_ERR_ARGUMENT &&
          strstr(mt_comm_last_error(mine), "has been destroyed"));
    CHECK(mt_barrier(ctx, mine) == MT_ERR_ARGUMENT);
    mt_comm_destroy(mine);
    return MT_SUCCESS;
}

static void test_context_destroyed_first(void **state) {
    job j = job_make(FOR_DEVICE, 2, outlive);
    (void)state;
    job_run(&j);
}

/* mt_cuda_wait_peers returns when the collectives in the stream are done, and at once when there are none. The last
   rank is late. */
static mt_status wait_for_peers(job *j, mt_context *ctx, mt_comm *comm) {
    float back[2] = {0, 0};
    double start;
    void *x;
    MT_TRY(mt_arena_alloc(ctx, sizeof back, &x));
    MT_TRY(mt_cuda_zero(ctx, x, sizeof back));
    MT_TRY(mt_cuda_wait_peers(ctx)); /* no collective */
    for (int round = 0; round < 3; round++) {
        const float mine[2] = {1, (float)mt_comm_rank(comm)};
        MT_TRY(put(ctx, mine, x, sizeof mine));
        MT_TRY(mt_barrier(ctx, comm));
        start = mti_now();
        while (mt_comm_rank(comm) == j->ranks - 1 && mti_now() < start + 0.1) continue;
        MT_TRY(mt_all_reduce(ctx, comm, x, x, 2, MT_F32, MT_SUM));
        MT_TRY(mt_cuda_wait_peers(ctx));
        CHECK(!is_on_nccl(comm) || cudaStreamQuery(mt_context_stream(ctx)) == cudaSuccess);
        MT_TRY(mt_cuda_wait_peers(ctx)); /* the collective is done */
        MT_TRY(mt_cuda_fetch(ctx, back, x, sizeof back));
        CHECK(back[0] == (float)j->ranks && back[1] == (float)(j->ranks * (j->ranks - 1) / 2));
    }
    return mt_cuda_wait_peers(NULL) == MT_ERR_ARGUMENT ? MT_SUCCESS : MT_ERR_DATA;
}

static void test_wait_for_peers(void **state) {
    (void)state;
    for (int how = FOR_DEVICE; how < WAYS; how++) {
        job j = job_make((way)how, 3, wait_for_peers);
        job_run(&j);
    }
}

static void test_wait_for_peers_on_one_gpu(void **state) {
    job j = job_make(ON_ONE_GPU, 3, wait_for_peers);
    (void)state;
    job_run(&j);
}

/* ---- the streams of ranks that are threads wait for each other, and the threads do not wait for them ------------- */

static long host_waits(void) {
#if defined(MT_CUDA_ENGINE)
    return mte::host_waits();
#else
    return 0;
#endif
}

/* Element i of the result when each rank sends `base` + its number. SELF: a ring in the other direction. */
static float sent_by_ranks(int w, int rank, int ranks, int i, float base) {
    int from = 0, end = 0;
    switch (w) {
    case REDUCE_SUM:
    case SCATTER_SUM: return (float)ranks * base + (float)(ranks * (ranks - 1) / 2);
    case REDUCE_MAX:
    case SCATTER_MAX:
    case BROADCAST: return base + (float)(ranks - 1);
    case BLOCKS:
    case GATHER: return base + (float)(i / COUNT);
    case COUNTS:
        while (from < ranks && (end += (int)count_of(from, rank)) <= i) from++;
        return from < ranks ? base + (float)from : -1.0f;
    case SELF: return base + (float)((rank + 1) % ranks);
    case CHAIN: return rank > 0 ? base + (float)(rank - 1) : -1.0f;
    default: return base + (float)((rank + ranks - 1) % ranks);
    }
}

/* A rank sends what the work before the call has written to x, and work behind the call overwrites x. */
static mt_status run_ahead_once(mt_context *ctx, mt_comm *comm, int w, int beside, mt_tensor x, mt_tensor y) {
    int rank = mt_comm_rank(comm), ranks = mt_comm_size(comm);
    float back[RANKS_MAX * COUNT], base = (float)(10 * w + 200 * beside);
    mt_status status;
    long waits;
    MT_TRY(mt_fill(ctx, y, -1.0f));
    if (beside) MT_TRY(mt_overlap_begin(ctx, comm, MT_STREAM_SECOND));
    MT_TRY(mt_fill(ctx, x, base + (float)rank));
    waits = host_waits();
    if (w == SELF)
        status = mt_send_recv(ctx, comm, x.data, COUNT, (rank + ranks - 1) % ranks, y.data, COUNT, (rank + 1) % ranks,
                              MT_F32);
    else status = one_call(ctx, comm, w, MT_F32, x.data, y.data);
    CHECK(host_waits() == waits);
    if (beside) MT_TRY(mt_overlap_end(ctx, 0, status));
    if (beside) MT_TRY(mt_overlap_wait(ctx, 0));
    MT_TRY(status);
    MT_TRY(mt_fill(ctx, x, 9999.0f));
    MT_TRY(mt_context_synchronize(ctx));
    MT_TRY(mt_download(ctx, y, back));
    for (int i = 0; i < (w == GATHER || w == BLOCKS || w == COUNTS ? ranks * COUNT : COUNT); i++)
        CHECK(back[i] == sent_by_ranks(w, rank, ranks, i, base));
    return MT_SUCCESS;
}

/* Over the communicator of the launcher, which is not over NCCL. The ranks share a GPU or have one each. */
static mt_status run_ahead(job *j, mt_context *ctx, mt_comm *comm) {
    mt_comm *world = j->threads[mt_comm_rank(comm)];
    mt_tensor x, y;
    CHECK(!is_on_nccl(world));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, RANKS_MAX * COUNT, &x));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, RANKS_MAX * COUNT, &y));
    for (int beside = 0; beside < 2; beside++)
        for (int w = 0; w < WHATS; w++)
            if (!in_chunks(w)) MT_TRY(run_ahead_once(ctx, world, w, beside, x, y));
    MT_TRY(mt_fill(ctx, x, 1.0f));
    MT_TRY(mt_barrier(ctx, world)); /* waits for the stream */
    CHECK(cudaStreamQuery(mt_context_stream(ctx)) == cudaSuccess);
    return MT_SUCCESS;
}

static void test_streams_wait(void **state) {
    (void)state;
    for (int ranks = 2; ranks <= 3; ranks++) {
        job j = job_make(FOR_DEVICE, ranks, run_ahead);
        job_run(&j);
    }
}

static void test_streams_wait_on_one_gpu(void **state) {
    (void)state;
    for (int ranks = 2; ranks <= 4; ranks++) {
        job j = job_make(ON_ONE_GPU, ranks, run_ahead);
        job_run(&j);
    }
}

/* ---- one queue for all streams ----------------------------------------------------------------------------------- */

static void count_warning(void *user, mt_log_level level, const char *message) {
    if (level == MT_LOG_WARNING && strstr(message, "CUDA_DEVICE_MAX_CONNECTIONS is 1")) ++*(int *)user;
}

typedef struct one_queue {
    int wanted, warnings[2];
} one_queue;

static mt_status overlap_twice(job *j, mt_context *ctx, mt_comm *comm) {
    one_queue *q = (one_queue *)j->result;
    int *warnings = &q->warnings[mt_comm_rank(comm)];
    void *p;
    MT_TRY(mt_arena_alloc(ctx, 64, &p));
    MT_TRY(mt_cuda_zero(ctx, p, 64));
    ctx->logger.log = count_warning;
    ctx->logger.user = warnings;
    MT_TRY(mt_all_reduce(ctx, comm, p, p, 4, MT_F32, MT_SUM));
    CHECK(*warnings == 0);
    for (int i = 0; i < 2; i++) {
        MT_TRY(mt_overlap_begin(ctx, comm, MT_STREAM_SECOND));
        CHECK(*warnings == q->wanted); /* once, at the first overlap */
        MT_TRY(mt_overlap_end(ctx, 0, mt_all_reduce(ctx, comm, p, p, 4, MT_F32, MT_SUM)));
        MT_TRY(mt_overlap_wait(ctx, 0));
    }
    CHECK(*warnings == q->wanted);
    return mt_context_synchronize(ctx);
}

static void test_warning_of_one_queue(void **state) {
    static const char *const values[] = {"1", "8", NULL};
    const char *set = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    char before[16] = "";
    (void)state;
    if (set) snprintf(before, sizeof before, "%s", set);
    for (int i = has_gpus(2) ? 0 : 3; i < 6; i++) {
        job j = job_make(i < 3 ? FOR_DEVICE : ON_ONE_GPU, 2, overlap_twice);
        one_queue q = {i % 3 == 0, {0, 0}};
        j.result = &q;
        if (values[i % 3]) setenv("CUDA_DEVICE_MAX_CONNECTIONS", values[i % 3], 1);
        else unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
        job_run(&j);
    }
    if (set) setenv("CUDA_DEVICE_MAX_CONNECTIONS", before, 1);
}

/* ---- one rank over NCCL ------------------------------------------------------------------------------------------ */

/* The library's functions give a group of one rank no NCCL communicator. These jobs call what the functions call for
   more ranks, so one GPU is enough to test NCCL. */
static job lone_job(way how, mt_status (*body)(job *, mt_context *, mt_comm *)) {
    job j = job_make(how, 1, body);
    j.lone = 1;
    return j;
}

static void run_lone(mt_status (*body)(job *, mt_context *, mt_comm *)) {
    for (int how = FROM_ID; how < WAYS; how++) {
        job j = lone_job((way)how, body);
        job_run(&j);
    }
}

static void pause_for(double seconds) {
    double start = mti_now();
    while (mti_now() < start + seconds) mti_rest(1, 1e-3);
}

/* One rank makes 79 calls of NCCL. In invariant mode 18 of them are missing: the sums of floats, which the library adds
   itself. */
static void test_one_rank_collectives(void **state) {
    (void)state;
    for (int invariant = 0; invariant <= 8; invariant += 8) {
        int before = nccl_calls();
        collectives(FROM_ID, FROM_NONBLOCKING, invariant, 1);
        expect_calls(before, 3 * (invariant ? 61 : 79));
    }
}

/* A copy from x to y by one call. */
static mt_status copy_by(mt_context *ctx, mt_comm *comm, int kind, mt_dtype dtype, const void *x, void *y) {
    mti_call call = mti_call_make(kind, x, y, COUNT, dtype);
    call.recvcount = COUNT;
    return mti_nccl_call(ctx, comm, &call);
}

/* The library copies messages of a rank to itself without NCCL, so this test calls NCCL directly. */
static mt_status send_to_itself(job *j, mt_context *ctx, mt_comm *comm) {
    unsigned char sent[4 * COUNT], got[4 * COUNT];
    (void)j;
    for (int t = 0; t < TYPES; t++) {
        size_t mark = mt_arena_mark(ctx), bytes = COUNT * mt_dtype_size((mt_dtype)t);
        void *x, *y;
        fill((mt_dtype)t, 0, SELF, sent, COUNT);
        MT_TRY(mt_arena_alloc(ctx, bytes, &x));
        MT_TRY(mt_arena_alloc(ctx, bytes, &y));
        MT_TRY(put(ctx, sent, x, bytes));
        MT_TRY(copy_by(ctx, comm, MTI_SEND_RECV, (mt_dtype)t, x, y));
        MT_TRY(get(ctx, y, got, bytes));
        CHECK(memcmp(sent, got, bytes) == 0);
        mt_arena_release(ctx, mark);
    }
    return MT_SUCCESS;
}

static void test_one_rank_sends_to_itself(void **state) {
    int before = nccl_calls();
    (void)state;
    run_lone(send_to_itself);
    expect_calls(before, 3 * 2 * TYPES);
}

/* Checks a sum over one rank, in memory of the arena or at `memory`. */
static mt_status sum_at(mt_context *ctx, mt_comm *comm, void *memory) {
    float sent[COUNT], got[COUNT];
    size_t mark = mt_arena_mark(ctx);
    fill(MT_F32, 0, REDUCE_SUM, (unsigned char *)sent, COUNT);
    if (!memory) MT_TRY(mt_arena_alloc(ctx, 2 * sizeof sent, &memory));
    MT_TRY(put(ctx, sent, memory, sizeof sent));
    MT_TRY(mt_all_reduce(ctx, comm, memory, (float *)memory + COUNT, COUNT, MT_F32, MT_SUM));
    MT_TRY(get(ctx, (float *)memory + COUNT, got, sizeof got));
    CHECK(memcmp(sent, got, sizeof got) == 0);
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* A split as mt_comm_split makes it for more ranks. */
static mt_status split_off(mt_context *ctx, mt_comm *comm, mt_comm **out) {
    mt_comm *part = mti_nccl_new(comm->transport, ctx, 0, 1, "part", comm->nccl.timeout, MTI_SPLIT);
    mt_status status = part ? mti_watchdog_join(ctx, part) : MT_ERR_MEMORY;
    *out = NULL;
    if (!part) return status;
    if (status == MT_SUCCESS) status = mti_nccl_carve(ctx, comm, 0, 0, part);
    return mti_nccl_begin(ctx, part, status, out);
}

/* From the opener, from the caller's communicator, and from a part, which has no opener. */
static mt_status split_one(job *j, mt_context *ctx, mt_comm *comm) {
    mt_comm *alone = NULL, *part = NULL, *again = NULL;
    MT_TRY(mt_comm_split(comm, 0, 0, &alone));
    CHECK(!is_on_nccl(alone) && mt_comm_size(alone) == 1);
    mt_comm_destroy(alone);
    MT_TRY(split_off(ctx, comm, &part));
    MT_TRY(split_off(ctx, part, &again));
    CHECK((comm->nccl.opener != NULL) == (j->how == FROM_ID) && !part->nccl.opener && !again->nccl.opener);
    CHECK(part->nccl.handle && again->nccl.handle && part->nccl.handle != again->nccl.handle);
    MT_TRY(sum_at(ctx, comm, NULL));
    MT_TRY(sum_at(ctx, again, NULL));
    MT_TRY(sum_at(ctx, part, NULL));
    mt_comm_destroy(part); /* the part of the part stays */
    MT_TRY(sum_at(ctx, again, NULL));
    mt_comm_destroy(again);
    return sum_at(ctx, comm, NULL);
}

static void test_one_rank_splits(void **state) {
    int before = nccl_calls();
    (void)state;
    run_lone(split_one);
    expect_calls(before, 3 * 6); /* one gathers the colors */
}

static void test_one_rank_waits(void **state) {
    (void)state;
    run_lone(wait_for_peers);
}

/* y = the sum of x over one rank, in the second stream. The function enters this stream itself, because
   mt_overlap_begin does so only with more ranks. */
static mt_status sum_beside(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    mt_status status;
    MT_TRY(mti_cuda_fork(ctx, ctx->second_stream));
    status = mt_all_reduce(ctx, comm, x.data, y.data, COUNT, MT_F32, MT_SUM);
    MT_TRY(mt_overlap_end(ctx, 0, status));
    return mt_overlap_wait(ctx, 0);
}

/* z = 4 x by two sums over one rank, each with a kernel behind it. */
static mt_status double_twice(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y, mt_tensor z) {
    MT_TRY(mt_all_reduce(ctx, comm, x.data, y.data, COUNT, MT_F32, MT_SUM));
    MT_TRY(mt_add(ctx, y, y, y));
    MT_TRY(sum_beside(ctx, comm, y, z));
    return mt_add(ctx, z, z, z);
}

/* Launches the graph, or without it makes the calls. The host waits for neither. */
static mt_status launch_or_call(mt_context *ctx, mt_comm *comm, mt_graph *graph, mt_tensor x, mt_tensor y,
                                mt_tensor z) {
    long waits = host_waits();
    MT_TRY(graph ? mt_graph_launch(ctx, graph) : double_twice(ctx, comm, x, y, z));
    CHECK(host_waits() == waits);
    return MT_SUCCESS;
}

/* Records the calls, and launches them with three inputs. Each time they give what they give without a graph. */
static mt_status record(job *j, mt_context *ctx, mt_comm *comm) {
    float sent[COUNT], launched[COUNT], called[COUNT];
    mt_graph *graph = NULL;
    mt_tensor x, y, z;
    mt_arena_request memory[] = {{&x, MT_F32, 1, COUNT}, {&y, MT_F32, 1, COUNT}, {&z, MT_F32, 1, COUNT}};
    (void)j;
    MT_TRY(mt_arena_tensors(ctx, memory, 3));
    MT_TRY(mt_fill(ctx, x, 1.0f));
    MT_TRY(double_twice(ctx, comm, x, y, z)); /* connects NCCL */
    MT_TRY(mt_fill(ctx, z, -1.0f));
    MT_TRY(mt_graph_begin(ctx, comm));
    MT_TRY(double_twice(ctx, comm, x, y, z));
    MT_TRY(mt_graph_end(ctx, &graph));
    MT_TRY(mt_download(ctx, z, launched));
    for (int i = 0; i < COUNT; i++) CHECK(launched[i] == -1.0f); /* nothing has run */
    for (int round = 0; round < 3; round++) {
        fill(MT_F32, round, REDUCE_SUM, (unsigned char *)sent, COUNT);
        MT_TRY(mt_upload(ctx, sent, x));
        MT_TRY(launch_or_call(ctx, comm, graph, x, y, z));
        MT_TRY(mt_download(ctx, z, launched));
        MT_TRY(mt_fill(ctx, z, -1.0f));
        MT_TRY(launch_or_call(ctx, comm, NULL, x, y, z));
        MT_TRY(mt_download(ctx, z, called));
        CHECK(memcmp(launched, called, sizeof called) == 0);
        for (int i = 0; i < COUNT; i++) CHECK(launched[i] == 4.0f * sent[i]);
    }
    mt_graph_destroy(ctx, graph);
    return sum_at(ctx, comm, NULL); /* the communicator still works */
}

/* Two sums in the first run, in the recording, and in each of three runs without a graph; then one sum. The host makes
   no call of NCCL for a launch. */
static void test_one_rank_records(void **state) {
    int before = nccl_calls();
    (void)state;
    run_lone(record);
    expect_calls(before, 3 * (2 * 5 + 1));
}

/* The caller's ncclComm_t outlives what is made from it. mt_comm_create_nccl does not use it for one rank. */
static mt_status borrow(job *j, mt_context *ctx, mt_comm *comm) {
    mt_comm *second = NULL, *alone = NULL;
    int size = 0;
    MT_TRY(mti_nccl_wrap(ctx, j->callers[0], 1, 0, j->timeout, &second));
    MT_TRY(sum_at(ctx, second, NULL));
    mt_comm_destroy(second);
    CHECK(ncclCommCount(j->callers[0], &size) == ncclSuccess && size == 1);
    MT_TRY(sum_at(ctx, comm, NULL));
    MT_TRY(mt_comm_create_nccl(ctx, j->callers[0], j->timeout, &alone));
    CHECK(!is_on_nccl(alone));
    mt_comm_destroy(alone);
    return MT_SUCCESS;
}

static void test_one_rank_of_the_caller(void **state) {
    (void)state;
    for (int how = FROM_CALLER; how <= FROM_NONBLOCKING; how++) {
        job j = lone_job((way)how, borrow);
        job_run(&j);
    }
}

static void test_one_rank_outlives_its_context(void **state) {
    job j = lone_job(FROM_ID, outlive);
    (void)state;
    job_run(&j);
}

static int registered_with(const mt_context *ctx, const mt_comm *comm) {
    int n = 0;
    for (const mti_window *w = ctx->windows; w; w = w->next) n += w->comm == comm;
    return n;
}

/* Checks how many registrations NCCL has. Only the engine counts. */
static int are_registered(int n) {
#if defined(MT_CUDA_ENGINE)
    return mte::nccl_counts().registered == n;
#else
    return n >= 0;
#endif
}

/* A part registers the arena, and comm registers other memory. Destroying the part and freeing the memory deregister
   them. Then comm registers the arena, and ends with it. */
static mt_status register_one(job *j, mt_context *ctx, mt_comm *comm) {
    const size_t bytes = (size_t)3 << 20;
    mt_comm *part = NULL;
    void *p;
    (void)j;
    MT_TRY(split_off(ctx, comm, &part));
    MT_TRY(mt_arena_register(ctx, part));
    MT_TRY(mt_context_alloc(ctx, bytes, &p));
    MT_TRY(mt_comm_register(ctx, comm, p, bytes));
    CHECK(registered_with(ctx, part) == 1 && registered_with(ctx, comm) == 1 && are_registered(2));
    MT_TRY(sum_at(ctx, part, NULL));
    MT_TRY(sum_at(ctx, comm, p));
    mt_context_free(ctx, p, bytes);
    CHECK(registered_with(ctx, comm) == 0 && are_registered(1) && !comm->nccl.broken);
    MT_TRY(sum_at(ctx, part, NULL));
    mt_comm_destroy(part);
    CHECK(!ctx->windows && are_registered(0));
    MT_TRY(mt_arena_register(ctx, comm));
    CHECK(registered_with(ctx, comm) == 1 && are_registered(1));
    return sum_at(ctx, comm, NULL);
}

/* The library registers buffers where NCCL is older than 2.27, which only the engine can pretend. */
static void test_one_rank_registers(void **state) {
    int version = 0;
    (void)state;
    ncclGetVersion(&version);
    printf("      NCCL %d\n", version);
    for (int i = 0; i < 2 * (WAYS - FROM_ID); i++) {
        job j = lone_job((way)(FROM_ID + i / 2), register_one);
        j.where.arena_symmetric = 1;
        j.where.arena_bytes = (size_t)3 << 20;
#if defined(MT_CUDA_ENGINE)
        mte::nccl_set_version(i % 2 ? NCCL_VERSION(2, 26, 2) : 0);
        job_run(&j);
        mte::nccl_set_version(0);
#else
        if (i % 2 == 0) job_run(&j);
#endif
    }
}

static int is_aborted(mti_watchdog *w) {
    pthread_mutex_lock(&w->mutex);
    int yes = w->late > 0;
    pthread_mutex_unlock(&w->mutex);
    return yes;
}

/* A call seems to be inside NCCL for too long. The watchdog aborts it, in its own thread. An abort takes NCCL 1 s or
   more, and the watchdog looks at the next call after it. */
static mt_status hang_inside(mt_context *ctx, mt_comm *comm) {
    MT_TRY(sum_at(ctx, comm, NULL));
    comm->nccl.timeout = 0.1;
    mti_nccl_enter(comm);
    for (int i = 0; i < 6000 && !is_aborted(comm->nccl.watchdog); i++) pause_for(0.1);
    CHECK(mti_nccl_settle(ctx, comm, ncclInternalError) == MT_ERR_TIMEOUT);
    CHECK(strstr(mt_last_error(ctx), "all_reduce(count 37, f32, sum) on \"") && !comm->nccl.handle);
    CHECK(mt_barrier(ctx, comm) == MT_ERR_PEER);
    return mt_context_synchronize(ctx);
}

/* comm still works after the abort of its part. The caller's communicator has no watchdog, its part has. */
static mt_status hang_both(job *j, mt_context *ctx, mt_comm *comm) {
    mt_comm *part = NULL;
    MT_TRY(split_off(ctx, comm, &part));
    MT_TRY(hang_inside(ctx, part));
    mt_comm_destroy(part);
    MT_TRY(sum_at(ctx, comm, NULL));
    return j->how == FROM_ID ? hang_inside(ctx, comm) : MT_SUCCESS;
}

static void test_one_rank_is_aborted_by_the_watchdog(void **state) {
    (void)state;
    for (int how = FROM_ID; how <= FROM_CALLER; how++) {
        job j = lone_job((way)how, hang_both);
        job_run(&j);
    }
}

#if !defined(MT_CUDA_ENGINE)
static void CUDART_CB pause_in_stream(void *seconds) { pause_for(*(const double *)seconds); }
#endif

/* Makes the next collective late. On a GPU it comes after work that lasts longer than the timeout. On the engine it
   never arrives. */
static mt_status make_late(mt_context *ctx) {
#if defined(MT_CUDA_ENGINE)
    mte::nccl_silence(0, 0);
    return ctx ? MT_SUCCESS : MT_ERR_ARGUMENT;
#else
    static double seconds = 3 * PATIENCE;
    cudaStream_t stream = (cudaStream_t)mt_context_stream(ctx);
    return cudaLaunchHostFunc(stream, pause_in_stream, &seconds) == cudaSuccess ? MT_SUCCESS : MT_ERR_SYSTEM;
#endif
}

/* The library aborts its own communicator, and leaves the caller's as it is. */
static mt_status late_stream(job *j, mt_context *ctx, mt_comm *comm) {
    void *x;
    MT_TRY(sum_at(ctx, comm, NULL));
    MT_TRY(mt_arena_alloc(ctx, 64, &x));
    MT_TRY(mt_cuda_zero(ctx, x, 64));
    MT_TRY(mt_context_synchronize(ctx));
    MT_TRY(make_late(ctx));
    MT_TRY(mt_all_reduce(ctx, comm, x, x, 4, MT_F32, MT_SUM));
    comm->nccl.timeout = PATIENCE; /* of the wait only: the call itself may take long */
    CHECK(mt_cuda_wait_peers(ctx) == MT_ERR_TIMEOUT);
    CHECK(strstr(mt_last_error(ctx), "all_reduce(count 4, f32, sum) on \"world\" (1 ranks)"));
    CHECK((comm->nccl.handle != NULL) == is_callers(j->how) && !comm->nccl.opener);
    CHECK(mt_all_reduce(ctx, comm, x, x, 4, MT_F32, MT_SUM) == MT_ERR_PEER);
    return is_callers(j->how) ? MT_ERR_TIMEOUT : mt_context_synchronize(ctx); /* job_rank aborts the caller's */
}

static void test_one_rank_in_a_stream_that_is_late(void **state) {
    (void)state;
    for (int how = FROM_ID; how < WAYS; how++) {
        job j = lone_job((way)how, late_stream);
        assert_int_equal(job_launch(&j, 0), is_callers(j.how) ? MT_ERR_TIMEOUT : MT_SUCCESS);
#if defined(MT_CUDA_ENGINE)
        mte::nccl_reset_faults();
#endif
        nothing_left();
    }
}

/* A peer never joins: the call must return. */
static mt_status join_alone(job *j, mt_context *ctx, mt_comm *comm) {
    mt_comm *pair = NULL;
    (void)comm;
    CHECK(mt_comm_create_nccl_id(ctx, (const mt_nccl_id *)j->result, 2, 0, PATIENCE, &pair) == MT_ERR_TIMEOUT && !pair);
    CHECK(strstr(mt_last_error(ctx), "create on \"world\" (2 ranks): rank 0 waited"));
    return MT_SUCCESS;
}

/* Both ranks use GPU 0. */
static mt_status join_on_one_gpu(job *j, mt_context *ctx, mt_comm *comm) {
    mt_comm *pair = NULL;
    const mt_nccl_id *id = (const mt_nccl_id *)j->result;
    CHECK(mt_comm_create_nccl_id(ctx, id, 2, mt_comm_rank(comm), j->timeout, &pair) == MT_ERR_ARGUMENT);
    CHECK(!pair && strstr(mt_last_error(ctx), ": NCCL: invalid usage"));
    return MT_SUCCESS;
}

static void test_ids_that_lead_nowhere(void **state) {
    mt_nccl_id ids[2];
    (void)state;
    for (int i = 0; i < 2; i++) {
        job j = job_make(ON_ONE_GPU, i + 1, i ? join_on_one_gpu : join_alone);
        assert_int_equal(ncclGetUniqueId((ncclUniqueId *)&ids[i]), ncclSuccess);
        j.result = &ids[i];
        job_run(&j);
    }
}

#if defined(MT_CUDA_ENGINE)
/* Waits until so many ranks have stored what they got. */
static void outlast(const int *stored, int ranks) {
    while (__atomic_load_n(stored, __ATOMIC_ACQUIRE) < ranks) pause_for(0.001);
}

/* ---- faults, in calls that are not compared ---------------------------------------------------------------------- */

typedef struct fault {
    mt_status status[RANKS_MAX];
    double seconds[RANKS_MAX];
    int stored; /* ranks that have stored what they got */
    char text[RANKS_MAX][MT_ERROR_BYTES];
    int in_group;  /* 1: on a group of two that was split off; 2: there, then on all ranks; 0: on all ranks */
    int how_waits; /* 0: mt_context_synchronize; 1: reading a result; 2: a barrier; 3: no wait; 4: mt_cuda_wait_peers */
    int first;     /* 1: no call connects the ranks before the call that fails */
    int absent;    /* this rank makes no call; -1: every rank calls */
    unsigned late; /* the ranks, as bits, that wait in vain; the others have no timeout, so a slow rank is no error */
    int beside;    /* 1: on the second stream; the rank waits for the call unless how_waits is 3 */
} fault;

static mt_status wait_somehow(mt_context *ctx, mt_comm *comm, int how, void *x) {
    float back[4];
    if (how == 1) return get(ctx, x, back, sizeof back);
    if (how == 4) return mt_cuda_wait_peers(ctx);
    return how == 2 ? mt_barrier(ctx, comm) : mt_context_synchronize(ctx);
}

/* Gives this rank its timeout. A rank that waits in vain has a short one. */
static void hurry(mt_comm *all, mt_comm *part, int hurries) {
    all->nccl.timeout = part->nccl.timeout = hurries ? SHORT : TEST_NEVER_OVER;
}

/* The call after the barrier fails. The timeout begins when nothing else of this rank can be late: with its wait, or,
   as the first call of a communicator waits, with the call. */
static mt_status suffer_on(job *j, mt_context *ctx, mt_comm *all, mt_comm *part, void *x) {
    fault *f = (fault *)j->result;
    int rank = mt_comm_rank(ctx->world), is_late = f->late >> rank & 1;
    double start = mti_now();
    mt_status status = f->beside ? mt_overlap_begin(ctx, part, MT_STREAM_SECOND) : MT_SUCCESS;
    hurry(all, part, is_late && f->first);
    if (status == MT_SUCCESS) status = mt_all_reduce(ctx, part, x, x, 4, MT_F32, MT_SUM);
    if (f->beside) status = mt_overlap_end(ctx, 0, status);
    if (f->how_waits != 3 && f->beside) MT_TRY(mt_overlap_wait(ctx, 0));
    if (f->in_group == 2) status = mt_all_reduce(ctx, all, x, x, 5, MT_F32, MT_SUM);
    hurry(all, part, is_late);
    if (f->how_waits == 3) return status;
    if (status == MT_SUCCESS) status = wait_somehow(ctx, part, f->how_waits, x);
    f->seconds[rank] = mti_now() - start;
    f->status[rank] = status;
    snprintf(f->text[rank], sizeof f->text[rank], "%s", mt_last_error(ctx));
    if (status == MT_SUCCESS) return status;
    CHECK(mt_all_reduce(ctx, part, x, x, 4, MT_F32, MT_SUM) == MT_ERR_PEER);
    CHECK(strstr(mt_last_error(ctx), "calls after this communicator failed"));
    if (f->in_group == 2) CHECK(mt_barrier(ctx, all) == MT_ERR_PEER);
    hurry(all, part, 1);
    CHECK(mt_context_synchronize(ctx) == (is_callers(j->how) && f->in_group != 1 ? MT_ERR_TIMEOUT : MT_SUCCESS));
    return status;
}

static mt_status suffer(job *j, mt_context *ctx, mt_comm *comm) {
    fault *f = (fault *)j->result;
    int rank = mt_comm_rank(comm);
    mt_comm *pair = NULL;
    void *x;
    mt_status status;
    MT_TRY(mt_arena_alloc(ctx, 64, &x));
    MT_TRY(mt_cuda_zero(ctx, x, 64));
    if (f->in_group) MT_TRY(mt_comm_split(comm, rank / 2, rank, &pair));
    if (pair) mt_comm_set_name(pair, "pair");
    if (!f->first) MT_TRY(mt_barrier(ctx, comm));
    if (!f->first && pair) MT_TRY(mt_barrier(ctx, pair));
    status = rank == f->absent ? MT_SUCCESS : suffer_on(j, ctx, comm, pair ? pair : comm, x);
    mt_comm_destroy(pair);
    return status;
}

/* Checks that the ranks that wait in vain have timed out, not before the time, with a message that contains both
   words, and that the other ranks have not. */
static void expect(const job *j, const fault *f, const char *call, const char *name) {
    for (int r = 0; r < j->ranks; r++) {
        mt_status wanted = f->late >> r & 1 ? MT_ERR_TIMEOUT : MT_SUCCESS;
        if (f->status[r] != wanted)
            fail_msg("rank %d: %s, expected %s; %s", r, mt_status_name(f->status[r]), mt_status_name(wanted),
                     f->text[r]);
        if (wanted == MT_SUCCESS) continue;
        assert_true(f->seconds[r] > 0.99 * SHORT);
        if (!strstr(f->text[r], call) || !strstr(f->text[r], name))
            fail_msg("'%s' or '%s' is not in '%s'", call, name, f->text[r]);
    }
}

static job fault_job(way how, int ranks, fault *f) {
    job j = job_make(how, ranks, suffer);
    need_gpus(ranks);
    memset(f, 0, sizeof *f);
    f->absent = -1;
    f->late = (1u << ranks) - 1;
    j.where.no_nccl_checks = 1;
    j.result = f;
    return j;
}

/* The call of one rank never arrives, for every way of waiting. The calls before it are a barrier, and one all-gather
   of a split. */
static void test_silent_rank(void **state) {
    (void)state;
    for (int how = FOR_DEVICE; how < WAYS; how++)
        for (int waits = 0; waits <= 4; waits++) {
            fault f;
            job j = fault_job((way)how, 3, &f);
            if (waits == 3) continue; /* no wait */
            f.how_waits = waits;
            mte::nccl_silence(1, 1);
            assert_int_equal(job_launch(&j, 0), MT_ERR_TIMEOUT);
            expect(&j, &f, waits == 2 ? "barrier" : "all_reduce(count 4, f32, sum)", "\"world\" (3 ranks)");
            mte::nccl_reset_faults();
            nothing_left();
        }
}

/* Ranks of another group are not affected. */
static void test_silent_rank_in_a_group(void **state) {
    (void)state;
    for (int how = FOR_DEVICE; how < WAYS; how++) {
        fault f;
        job j = fault_job((way)how, 4, &f);
        f.in_group = 1;
        f.late = 12;
        mte::nccl_silence(3, 3); /* the all-gather of the split, and two barriers */
        assert_int_equal(job_launch(&j, 0), MT_ERR_TIMEOUT);
        expect(&j, &f, "all_reduce(count 4, f32, sum)", "\"pair\" (2 ranks)");
        mte::nccl_reset_faults();
        nothing_left();
    }
}

/* Two collectives are in the stream, and it is unknown which of them hangs. */
static void test_two_that_hang(void **state) {
    fault f;
    job j = fault_job(FOR_DEVICE, 4, &f);
    (void)state;
    f.in_group = 2;
    mte::nccl_silence(3, 3);
    assert_int_equal(job_launch(&j, 0), MT_ERR_TIMEOUT);
    expect(&j, &f, "all_reduce(count 4, f32, sum)", "\"pair\" (2 ranks)");
    expect(&j, &f, ", or ", "all_reduce(count 5, f32, sum) on \"world\" (4 ranks)");
    mte::nccl_reset_faults();
    nothing_left();
}

static void test_asynchronous_error(void **state) {
    static const ncclResult_t errors[] = {ncclRemoteError, ncclSystemError, ncclInternalError};
    (void)state;
    for (int i = 0; i < 3; i++) {
        fault f;
        job j = fault_job((way)(FOR_DEVICE + i), 2, &f);
        mt_status status = errors[i] == ncclInternalError ? MT_ERR_SYSTEM : MT_ERR_PEER;
        f.late = 1;
        mte::nccl_fail_after(1, 1, errors[i]);
        job_launch(&j, 0);
        assert_int_equal(f.status[0], MT_ERR_TIMEOUT);
        if (f.status[1] != status) fail_msg("%s, expected %s", mt_status_name(f.status[1]), mt_status_name(status));
        assert_non_null(strstr(f.text[1], ncclGetErrorString(errors[i])));
        mte::nccl_reset_faults();
        nothing_left();
    }
}

static void test_rank_that_leaves(void **state) {
    (void)state;
    for (int how = FOR_DEVICE; how < WAYS; how++) {
        fault f;
        job j = fault_job((way)how, 3, &f);
        f.absent = 1;
        f.late = 5;
        assert_int_equal(job_launch(&j, 0), MT_ERR_TIMEOUT);
        expect(&j, &f, "all_reduce(count 4, f32, sum)", "\"world\" (3 ranks)");
        nothing_left();
    }
}

/* NCCL waits for peers inside the first calls, while it connects to them. The call of one rank never arrives, or one
   rank makes none. */
static void test_first_call_without_a_peer(void **state) {
    (void)state;
    for (int how = FOR_DEVICE; how <= FROM_ID; how++)
        for (int absent = 0; absent < 2; absent++)
            for (int in_group = 0; in_group < 2; in_group++) {
                fault f;
                job j = fault_job((way)how, 4, &f);
                f.first = 1;
                f.in_group = in_group;
                f.late = (in_group ? 4u : 7u) | (absent ? 0u : 8u);
                if (absent) f.absent = 3;
                else mte::nccl_silence(3, in_group); /* a split begins with one all-gather */
                assert_int_equal(job_launch(&j, 0), MT_ERR_TIMEOUT);
                expect(&j, &f, "all_reduce(count 4, f32, sum)",
                       in_group ? "\"pair\" (2 ranks): " : "\"world\" (4 ranks): ");
                mte::nccl_reset_faults();
                nothing_left();
            }
}

typedef enum lonely { LONELY_RECEIVE, LONELY_MEMORY, LONELY_SPLIT, LONELY_SPLIT_OF_A_SPLIT, LONELIES } lonely;

/* The last rank does not make the call of the others. It only takes part in the all-gather that begins a split. */
static mt_status call_alone(job *j, mt_context *ctx, mt_comm *comm) {
    lonely what = *(const lonely *)j->result;
    int rank = mt_comm_rank(comm), gone = rank == j->ranks - 1;
    mt_comm *world = comm, *part = NULL;
    mti_member members[RANKS_MAX] = {};
    void *p, *wide;
    mt_status status = MT_SUCCESS;
    MT_TRY(mt_arena_alloc(ctx, 64, &p));
    MT_TRY(mt_context_alloc(ctx, MTI_NCCL_MEMORY, &wide));
    MT_TRY(mt_barrier(ctx, comm));
    if (what == LONELY_SPLIT_OF_A_SPLIT) MT_TRY(mt_comm_split(world, 0, 0, &comm));
    if (what == LONELY_RECEIVE && !gone) status = mt_recv(ctx, comm, p, 4, MT_F32, j->ranks - 1);
    if (what == LONELY_MEMORY && !gone) status = mt_comm_register(ctx, comm, wide, MTI_NCCL_MEMORY);
    if (what >= LONELY_SPLIT && gone) MT_TRY(mti_nccl_members(ctx, comm, MTI_SPLIT, members));
    if (what >= LONELY_SPLIT && !gone) status = mt_comm_split(comm, 0, 0, &part);
    CHECK(status == (gone ? MT_SUCCESS : MT_ERR_TIMEOUT) && !part);
    CHECK(gone || strstr(mt_last_error(ctx), " (3 ranks): rank "));
    CHECK(gone || what < LONELY_SPLIT || strstr(mt_last_error(ctx), "split on \"world"));
    CHECK(gone || mt_barrier(ctx, comm) == MT_ERR_PEER);
    mt_context_free(ctx, wide, MTI_NCCL_MEMORY);
    if (comm != world) mt_comm_destroy(comm);
    return MT_SUCCESS;
}

/* Runs a job whose ranks also have to be in time: as long as they are too slow, again with twice the timeout. */
static void job_run_in_time(const job *given) {
    mt_status status = MT_ERR_TIMEOUT;
    for (double timeout = SHORT; status != MT_SUCCESS && timeout < LONG; timeout *= 2) {
        job j = *given;
        j.timeout = timeout;
        status = job_launch(&j, 2 * timeout >= LONG);
        nothing_left();
    }
    if (status != MT_SUCCESS) fail_msg("%s: %s", way_names[given->how], mt_status_name(status));
}

static void test_calls_without_a_peer(void **state) {
    (void)state;
#if defined(MT_CUDA_ENGINE)
    mte::nccl_abort_slowly(true); /* memory is freed after the abort that deregisters it */
#endif
    for (int how = FOR_DEVICE; how <= FROM_ID; how++)
        for (int what = 0; what < LONELIES; what++) {
            job j = job_make((way)how, 3, call_alone);
            if (what == LONELY_MEMORY && test_may_share()) continue; /* a buffer, for which no rank waits */
            j.where.no_nccl_checks = 1;
            j.result = &what;
            job_run_in_time(&j);
        }
#if defined(MT_CUDA_ENGINE)
    mte::nccl_abort_slowly(false);
#endif
}

/* A rank is late at the first call of each of several groups, by less than the timeout. Then all ranks pause for longer
   than the timeout. The watchdog aborts nothing. */
static mt_status pause_between_calls(job *j, mt_context *ctx, mt_comm *comm) {
    void *p;
    MT_TRY(mt_arena_alloc(ctx, 64, &p));
    MT_TRY(mt_cuda_zero(ctx, p, 64));
    for (int i = 0; i < 5; i++) {
        mt_comm *part;
        MT_TRY(mt_comm_split(comm, 0, 0, &part));
        if (mt_comm_rank(comm) == 1) pause_for(0.3 * j->timeout);
        MT_TRY(mt_all_reduce(ctx, part, p, p, 4, MT_F32, MT_SUM));
        MT_TRY(mt_context_synchronize(ctx));
        mt_comm_destroy(part);
    }
    MT_TRY(mt_barrier(ctx, comm));
    pause_for(1.5 * j->timeout);
    return mt_barrier(ctx, comm);
}

static void test_pauses(void **state) {
    (void)state;
    for (int how = FOR_DEVICE; how <= FROM_ID; how++) {
        job j = job_make((way)how, 3, pause_between_calls);
        job_run_in_time(&j);
    }
}

/* The last rank never launches its graph, so a collective in the graphs of the others does not end. */
static mt_status launch_alone(job *j, mt_context *ctx, mt_comm *comm) {
    fault *f = (fault *)j->result;
    int rank = mt_comm_rank(comm);
    mt_graph *graph = NULL;
    void *x;
    MT_TRY(mt_arena_alloc(ctx, 64, &x));
    MT_TRY(mt_cuda_zero(ctx, x, 64));
    MT_TRY(mt_all_reduce(ctx, comm, x, x, 4, MT_F32, MT_SUM));
    MT_TRY(mt_graph_begin(ctx, comm));
    MT_TRY(mt_all_reduce(ctx, comm, x, x, 4, MT_F32, MT_SUM));
    MT_TRY(mt_graph_end(ctx, &graph));
    MT_TRY(mt_graph_launch(ctx, graph));
    MT_TRY(mt_context_synchronize(ctx));
    MT_TRY(mt_barrier(ctx, comm));
    if (rank + 1 == j->ranks) outlast(&f->stored, j->ranks - 1);
    else {
        double start = mti_now();
        MT_TRY(mt_graph_launch(ctx, graph));
        hurry(comm, comm, 1);
        f->status[rank] = mt_context_synchronize(ctx);
        f->seconds[rank] = mti_now() - start;
        snprintf(f->text[rank], sizeof f->text[rank], "%s", mt_last_error(ctx));
        __atomic_add_fetch(&f->stored, 1, __ATOMIC_RELEASE);
        if (mt_graph_launch(ctx, graph) != MT_ERR_PEER) return MT_ERR_MISMATCH;
    }
    mt_graph_destroy(ctx, graph);
    return f->status[rank];
}

/* A communicator that is destroyed ends the graphs that may use it, because NCCL waits for them. The mistake of passing
   a communicator of threads is refused. */
static mt_status destroy_before_graph(job *j, mt_context *ctx, mt_comm *comm) {
    mt_comm *other = NULL, *threads[2] = {NULL, NULL};
    mt_graph *graph = NULL;
    mt_status status;
    void *x;
    (void)j;
    MT_TRY(mt_comm_create_local(2, 1.0, threads));
    status = mt_graph_begin(ctx, threads[0]);
    for (int i = 0; i < 2; i++) mt_comm_destroy(threads[i]);
    if (status != MT_ERR_ARGUMENT || !strstr(mt_last_error(ctx), "not over NCCL")) return MT_ERR_MISMATCH;
    MT_TRY(mt_comm_split(comm, 0, mt_comm_rank(comm), &other));
    MT_TRY(mt_arena_alloc(ctx, 64, &x));
    MT_TRY(mt_cuda_zero(ctx, x, 64));
    MT_TRY(mt_all_reduce(ctx, other, x, x, 4, MT_F32, MT_SUM));
    MT_TRY(mt_graph_begin(ctx, comm));
    MT_TRY(mt_all_reduce(ctx, other, x, x, 4, MT_F32, MT_SUM));
    MT_TRY(mt_graph_end(ctx, &graph));
    for (int i = 0; i < 3; i++) MT_TRY(mt_graph_launch(ctx, graph));
    mt_comm_destroy(other);
    if (mt_graph_launch(ctx, graph) != MT_ERR_PEER) return MT_ERR_MISMATCH;
    mt_graph_destroy(ctx, graph);
    return mt_all_reduce(ctx, comm, x, x, 4, MT_F32, MT_SUM);
}

static void test_destroy_before_a_graph(void **state) {
    job j = job_make(FOR_DEVICE, 2, destroy_before_graph);
    (void)state;
    job_run(&j);
    nothing_left();
}

static void test_launch_without_a_peer(void **state) {
    fault f;
    job j = fault_job(FOR_DEVICE, 3, &f);
    (void)state;
    j.body = launch_alone;
    f.late = 3;
    assert_int_equal(job_launch(&j, 0), MT_ERR_TIMEOUT);
    expect(&j, &f, "graph_launch", "\"world\" (3 ranks)");
    nothing_left();
}

static void test_destroy_waits_for_nobody_for_ever(void **state) {
    (void)state;
    for (int beside = 0; beside < 2; beside++) {
        fault f;
        job j = fault_job(FOR_DEVICE, 3, &f);
        f.how_waits = 3;
        f.beside = beside;
        mte::nccl_silence(1, 1);
        assert_int_equal(job_launch(&j, 0), MT_SUCCESS);
        mte::nccl_reset_faults();
        nothing_left();
    }
}

static void test_silent_rank_beside_computation(void **state) {
    fault f;
    job j = fault_job(FROM_ID, 2, &f);
    (void)state;
    f.beside = 1;
    mte::nccl_silence(0, 1);
    assert_int_equal(job_launch(&j, 0), MT_ERR_TIMEOUT);
    expect(&j, &f, "all_reduce(count 4, f32, sum)", "\"world\" (2 ranks)");
    mte::nccl_reset_faults();
    nothing_left();
}

/* ---- calls that are compared ------------------------------------------------------------------------------------- */

/* What rank 1 does, while the other ranks call all_reduce(count 4, f32, sum). */
typedef enum odd {
    ODD_COUNT,
    ODD_DTYPE,
    ODD_OP,
    ODD_KIND,
    ODD_ROOT, /* the others call broadcast(count 4, f32, root 0) */
    ODD_SPLIT,
    ODD_MESSAGE,  /* rank 0 sends 4 floats to rank 1, which receives 3 */
    ODD_COUNTS,   /* the same in an all_to_all_v */
    ODD_RECORDED, /* in a graph */
    ODD_STUCK,
    ODD_LEAVES,
    ODD_EXTRA, /* makes one call more */
    ODDS
} odd;

typedef struct odd_job {
    odd what;
    mt_status status[RANKS_MAX];
    int stored; /* by how many ranks */
    char text[RANKS_MAX][MT_ERROR_BYTES];
} odd_job;

static mt_status odd_call(mt_context *ctx, mt_comm *comm, odd what, void *x) {
    mt_comm *part = NULL;
    int rank = mt_comm_rank(comm), is_odd = rank == 1;
    if (what == ODD_MESSAGE) {
        if (rank == 0) return mt_send(ctx, comm, x, 4, MT_F32, 1);
        return is_odd ? mt_recv(ctx, comm, x, 3, MT_F32, 0) : mt_barrier(ctx, comm);
    }
    if (what == ODD_COUNTS) {
        size_t sends[3] = {4, 4, 4}, recvs[3] = {(size_t)(is_odd ? 3 : 4), 4, 4};
        MT_TRY(mt_all_to_all_v(ctx, comm, x, sends, (float *)x + 12, recvs, MT_F32));
        return mt_barrier(ctx, comm); /* over NCCL, rank 2 may have had its blocks */
    }
    if (what == ODD_ROOT) return mt_broadcast(ctx, comm, x, x, 4, MT_F32, is_odd);
    if (what == ODD_EXTRA && !is_odd) return MT_SUCCESS;
    if (!is_odd) return mt_all_reduce(ctx, comm, x, x, 4, MT_F32, MT_SUM);
    if (what == ODD_SPLIT) return mt_comm_split(comm, 0, 0, &part);
    if (what == ODD_KIND) return mt_all_gather(ctx, comm, x, (float *)x + 4, 1, MT_F32);
    return mt_all_reduce(ctx, comm, x, x, what == ODD_COUNT ? 3 : 4, what == ODD_DTYPE ? MT_I32 : MT_F32,
                         what == ODD_OP ? MT_MAX : MT_SUM);
}

/* A graph cannot wait, so the error comes from a later call that is recorded. */
static mt_status record_odd(mt_context *ctx, mt_comm *comm, void *x) {
    mt_status status;
    MT_TRY(mt_graph_begin(ctx, comm));
    status = mt_all_reduce(ctx, comm, x, x, mt_comm_rank(comm) == 1 ? 3 : 4, MT_F32, MT_SUM);
    while (status == MT_SUCCESS) {
        pause_for(0.05);
        status = mt_all_reduce(ctx, comm, x, x, 4, MT_F32, MT_SUM);
    }
    mt_graph_end(ctx, NULL);
    return status;
}

static mt_status call_odd(job *j, mt_context *ctx, mt_comm *comm) {
    odd_job *o = (odd_job *)j->result;
    int rank = mt_comm_rank(comm), leaves = (rank == 1) == (o->what != ODD_EXTRA) && o->what >= ODD_LEAVES;
    mt_status status;
    void *x;
    MT_TRY(mt_arena_alloc(ctx, 256, &x));
    if (mt_context_device(ctx) == MT_DEVICE_CUDA) MT_TRY(mt_cuda_zero(ctx, x, 256));
    else memset(x, 0, 256);
    MT_TRY(mt_barrier(ctx, comm));
    MT_TRY(mt_barrier(ctx, j->threads[rank])); /* no verdict while a rank is in the barrier over NCCL */
    if (leaves) return MT_SUCCESS;
    if (rank == 1 && o->what == ODD_STUCK) {
        outlast(&o->stored, j->ranks - 1);
        return MT_SUCCESS;
    }
    status = o->what == ODD_RECORDED ? record_odd(ctx, comm, x) : odd_call(ctx, comm, o->what, x);
    if (status == MT_SUCCESS) status = mt_context_synchronize(ctx);
    o->status[rank] = status;
    snprintf(o->text[rank], sizeof o->text[rank], "%s", mt_comm_last_error(comm));
    __atomic_add_fetch(&o->stored, 1, __ATOMIC_RELEASE);
    CHECK(mt_barrier(ctx, comm) == MT_ERR_PEER);
    CHECK(strstr(mt_last_error(ctx), "calls after this communicator failed"));
    return is_callers(j->how) ? status : MT_SUCCESS; /* job_rank aborts the caller's */
}

static void run_odd(odd what, int how, double timeout, odd_job *o) {
    job j = job_make((way)how, 3, call_odd);
    memset(o, 0, sizeof *o);
    o->what = what;
    j.result = o;
    j.timeout = timeout;
    job_launch(&j, 0);
    nothing_left();
}

/* Returns 1 when every rank got the error and the words over NCCL, and on a CPU. say: otherwise fails */
static int odd_is_told(odd what, int how, double timeout, const char *words, int say) {
    mt_status wanted = what < ODD_STUCK ? MT_ERR_MISMATCH : what == ODD_STUCK ? MT_ERR_TIMEOUT : MT_ERR_PEER;
    int on_cpu = what != ODD_RECORDED && what != ODD_EXTRA;
    odd_job cpu, o;
    if (on_cpu) run_odd(what, ON_CPU, timeout, &cpu);
    run_odd(what, how, timeout, &o);
    for (int r = 0; r < 3; r++) {
        int silent = (what == ODD_STUCK || what == ODD_LEAVES) ? r == 1 : what == ODD_EXTRA && r != 1;
        if (silent ||
            (o.status[r] == wanted && strstr(o.text[r], words) && (!on_cpu || strstr(cpu.text[r], o.text[r]))))
            continue;
        if (say)
            fail_msg("case %d, %s, rank %d: %s: \"%s\", on a CPU \"%s\"", what, way_names[how], r,
                     mt_status_name(o.status[r]), o.text[r], on_cpu ? cpu.text[r] : "");
        return 0;
    }
    return 1;
}

/* Every rank gets the error and the sentence of ranks that are threads on a CPU, before the timeout. A thread that
   calls later gets more words around the sentence. */
static void test_odd_calls(void **state) {
    static const char *const words[] = {
        ": ranks 0, 2 called all_reduce(count 4, f32, sum), rank 1 called all_reduce(count 3, f32, sum)",
        "rank 1 called all_reduce(count 4, i32, sum)",
        "rank 1 called all_reduce(count 4, f32, max)",
        "rank 1 called all_gather(count 1, f32)",
        ": ranks 0, 2 called broadcast(count 4, f32, root 0), rank 1 called broadcast(count 4, f32, root 1)",
        "rank 1 called split",
        "recv on \"world\" (3 ranks): rank 0 called send(count 4, f32, to rank 1), rank 1 called recv(count 3, ",
        "all_to_all_v(f32) on \"world\" (3 ranks): rank 0 sends 4 elements to rank 1, which receives 3",
        ": ranks 0, 2 called all_reduce(count 4, f32, sum), rank 1 called all_reduce(count 3, f32, sum)",
        " s for rank 1, whose last call here was barrier",
        "all_reduce(count 4, f32, sum) on \"world\" (3 ranks): rank 1 has left the group",
        "all_reduce(count 4, f32, sum) on \"world\" (3 ranks): rank "};
    (void)state;
    mte::nccl_let_mismatches_hang(true);
    for (int what = 0; what < ODDS; what++) {
        for (int how = FOR_DEVICE; how < WAYS; how++) {
            double timeout = what == ODD_STUCK ? SHORT : TEST_NEVER_OVER; /* SHORT: a slow rank needs a longer one */
            /* the first messages, and those of a maximum, wait for ever inside a blocking communicator of the caller */
            if (how == FROM_CALLER && (what == ODD_OP || what == ODD_MESSAGE || what == ODD_COUNTS)) continue;
            while (!odd_is_told((odd)what, how, timeout, words[what], 2 * timeout >= LONG)) timeout *= 2;
        }
    }
    mte::nccl_let_mismatches_hang(false);
}

/* The first receive from a rank waits inside NCCL. The rank leaves, and the watchdog ends the receive. */
static mt_status receive_from_nobody(job *j, mt_context *ctx, mt_comm *comm) {
    void *x;
    (void)j;
    MT_TRY(mt_arena_alloc(ctx, 64, &x));
    MT_TRY(mt_barrier(ctx, comm));
    if (mt_comm_rank(comm) == 1) return MT_SUCCESS;
    CHECK(mt_recv(ctx, comm, x, 4, MT_F32, 1) == MT_ERR_PEER);
    CHECK(strstr(mt_last_error(ctx), "recv(count 4, f32, from rank 1) on \"world\" (2 ranks): rank 1 has left"));
    return MT_SUCCESS;
}

static void test_receive_from_nobody(void **state) {
    (void)state;
    for (int how = FOR_DEVICE; how <= FROM_ID; how++) {
        job j = job_make((way)how, 2, receive_from_nobody);
        job_run(&j);
    }
}

#define MANY_CALLS 700

/* Many calls without a wait, of which one rank after the other makes all before the next one begins; messages, each of
   another size; and a graph. Nothing is refused. */
static mt_status call_often(job *j, mt_context *ctx, mt_comm *comm) {
    int rank = mt_comm_rank(comm), checked = !j->where.no_nccl_checks;
    mt_graph *graph = NULL;
    void *x, *y;
    CHECK((comm->nccl.channel != NULL) == checked && (comm->group != NULL) == checked);
    MT_TRY(mt_arena_alloc(ctx, 4096, &x));
    MT_TRY(mt_arena_alloc(ctx, 4096, &y));
    MT_TRY(mt_cuda_zero(ctx, x, 4096));
    MT_TRY(mt_barrier(ctx, comm));
    pause_for(0.1 * rank);
    for (int i = 0; i < MANY_CALLS; i++) {
        if (i % 5 == 4) MT_TRY(mt_broadcast(ctx, comm, x, x, 4, MT_F32, i % j->ranks));
        else MT_TRY(mt_all_reduce(ctx, comm, x, x, (size_t)(1 + i % 7), MT_F32, MT_SUM));
    }
    for (size_t i = 1; i < 100; i++) {
        if (rank == 0) MT_TRY(mt_send(ctx, comm, x, i, MT_F32, 1));
        if (rank == 1) MT_TRY(mt_recv(ctx, comm, y, i, MT_F32, 0));
        MT_TRY(mt_send_recv(ctx, comm, x, i, (rank + 1) % j->ranks, y, i, (rank + j->ranks - 1) % j->ranks, MT_F32));
    }
    MT_TRY(mt_graph_begin(ctx, comm));
    for (int i = 0; i < 100; i++) MT_TRY(mt_all_reduce(ctx, comm, x, y, 4, MT_F32, MT_SUM));
    MT_TRY(mt_graph_end(ctx, &graph));
    for (int i = 0; i < 3; i++) MT_TRY(mt_graph_launch(ctx, graph));
    MT_TRY(mt_context_synchronize(ctx));
    mt_graph_destroy(ctx, graph);
    MT_TRY(mt_barrier(ctx, comm));
    pause_for(0.05); /* what has been sent is compared */
    CHECK(!mti_channel_is_decided(comm->nccl.channel));
    /* the communicator is destroyed while these are on their way */
    for (int i = 0; i < 20; i++) MT_TRY(mt_all_reduce(ctx, comm, x, y, 4, MT_F32, MT_SUM));
    return MT_SUCCESS;
}

static void test_many_calls(void **state) {
    (void)state;
    for (int unchecked = 0; unchecked < 2; unchecked++)
        for (int how = FOR_DEVICE; how < WAYS; how++) {
            job j = job_make((way)how, 3, call_often);
            j.where.no_nccl_checks = unchecked;
            job_run(&j);
        }
}

/* Ranks call two communicators in different orders, each in a stream of its own. Each communicator has the right
   calls. */
static mt_status interleave(job *j, mt_context *ctx, mt_comm *comm) {
    int rank = mt_comm_rank(comm);
    mt_comm *other = NULL;
    mt_status status;
    void *x;
    (void)j;
    MT_TRY(mt_arena_alloc(ctx, 64, &x));
    MT_TRY(mt_cuda_zero(ctx, x, 64));
    MT_TRY(mt_comm_split(comm, 0, rank, &other));
    MT_TRY(mt_barrier(ctx, comm));
    MT_TRY(mt_barrier(ctx, other));
    for (int i = 0; i < 50; i++) {
        if (rank == 0) MT_TRY(mt_all_reduce(ctx, comm, x, x, 4, MT_F32, MT_SUM));
        MT_TRY(mt_overlap_begin(ctx, other, MT_STREAM_SECOND));
        status = mt_all_reduce(ctx, other, (float *)x + 8, (float *)x + 8, (size_t)(1 + i % 2), MT_F32, MT_SUM);
        MT_TRY(mt_overlap_end(ctx, 0, status));
        if (rank != 0) MT_TRY(mt_all_reduce(ctx, comm, x, x, 4, MT_F32, MT_SUM));
        MT_TRY(mt_overlap_wait(ctx, 0));
    }
    MT_TRY(mt_context_synchronize(ctx));
    mt_comm_destroy(other);
    return MT_SUCCESS;
}

static void test_two_orders(void **state) {
    job j = job_make(FOR_DEVICE, 2, interleave);
    (void)state;
    job_run(&j);
}

/* Without sockets the calls are not compared, and the logger says so. */
static void count_unchecked(void *user, mt_log_level level, const char *message) {
    if (level == MT_LOG_WARNING && strstr(message, "are not compared"))
        __atomic_add_fetch((int *)user, 1, __ATOMIC_SEQ_CST);
}

static mt_status call_unchecked(job *j, mt_context *ctx, mt_comm *comm) {
    void *x;
    (void)j;
    CHECK(!comm->nccl.channel);
    MT_TRY(mt_arena_alloc(ctx, 64, &x));
    MT_TRY(mt_cuda_zero(ctx, x, 64));
    MT_TRY(mt_all_reduce(ctx, comm, x, x, 4, MT_F32, MT_SUM));
    return mt_barrier(ctx, comm);
}

static void test_without_sockets(void **state) {
    struct rlimit before, few;
    int warnings = 0, probe = dup(0);
    job j = job_make(FOR_DEVICE, 3, call_unchecked);
    (void)state;
    j.where.logger.log = count_unchecked;
    j.where.logger.user = &warnings;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    close(probe);
    few = before;
    few.rlim_cur = (rlim_t)probe;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    job_launch(&j, 1);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(warnings, 3);
    nothing_left();
}

/* ---- what one rank cannot do, on ranks that share a GPU ---------------------------------------------------------- */

typedef struct failure {
    const char *call; /* the CUDA function that fails on rank 1 */
    int after, what;
    const char *name; /* in the message of the other ranks */
    int late;         /* 1: the others may have left the call before */
    mt_status status[RANKS_MAX];
    char text[RANKS_MAX][MT_ERROR_BYTES];
} failure;

static mt_status fail_alone(job *j, mt_context *ctx, mt_comm *comm) {
    failure *f = (failure *)j->result;
    int rank = mt_comm_rank(comm);
    void *x, *y;
    MT_TRY(mt_arena_alloc(ctx, BYTES, &x));
    MT_TRY(mt_arena_alloc(ctx, BYTES, &y));
    MT_TRY(mt_cuda_zero(ctx, x, BYTES));
    MT_TRY(mt_barrier(ctx, comm));
    if (rank == 1) mte::cuda_fail_after(f->call, f->after, cudaErrorLaunchFailure);
    f->status[rank] = one_call(ctx, comm, f->what, MT_F32, x, y);
    snprintf(f->text[rank], sizeof f->text[rank], "%s", mt_last_error(ctx));
    CHECK(mt_barrier(ctx, comm) == MT_ERR_PEER);
    return MT_SUCCESS;
}

/* The other ranks learn at once that rank 1 failed, and why. */
static void test_failure_of_one_rank_is_told(void **state) {
    static const failure cases[] = {
        {"cudaEventCreate", 0, REDUCE_SUM, "all_reduce", 0, {}, {}},
        {"cudaEventRecord", 0, REDUCE_SUM, "all_reduce", 0, {}, {}},
        {"cudaStreamWaitEvent", 0, REDUCE_SUM, "all_reduce", 0, {}, {}},
        {"cudaEventRecord", 1, REDUCE_SUM, "all_reduce", 0, {}, {}},
        {"cudaStreamWaitEvent", 2, REDUCE_SUM, "all_reduce", 1, {}, {}},
        {"a kernel launch", 0, SCATTER_SUM, "reduce_scatter", 0, {}, {}},
        {"cudaMemcpyAsync", 0, GATHER, "all_gather", 0, {}, {}},
        {"cudaMemcpyAsync", 0, BROADCAST, "broadcast", 0, {}, {}},
        {"cudaEventRecord", 0, RING, "send_recv", 0, {}, {}},
        {"cudaStreamWaitEvent", 0, RING, "send_recv", 0, {}, {}},
        {"cudaMemcpyAsync", 0, RING, "send_recv", 0, {}, {}},
        {"cudaEventRecord", 1, RING, "send_recv", 0, {}, {}},
        {"cudaStreamWaitEvent", 1, RING, "send_recv", 1, {}, {}},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        failure f = cases[i];
        job j = job_make(ON_ONE_GPU, 3, fail_alone);
        j.result = &f;
        assert_int_equal(job_launch(&j, 1), MT_SUCCESS);
        for (int r = 0; r < 3; r++) {
            mt_status wanted = r == 1 ? MT_ERR_SYSTEM : MT_ERR_PEER;
            if (r != 1 && (f.late || (f.what == RING && r == 2)) && f.status[r] == MT_SUCCESS)
                continue; /* its part of the call was complete before the failure */
            if (f.status[r] != wanted ||
                (r != 1 && (!strstr(f.text[r], f.name) || !strstr(f.text[r], "rank 1 failed") ||
                            !strstr(f.text[r], "unspecified launch failure"))))
                fail_msg("case %zu, rank %d: %s: %s", i, r, mt_status_name(f.status[r]), f.text[r]);
        }
    }
}

/* ---- registration ------------------------------------------------------------------------------------------------ */

#define WIDE 768 /* 768 x 768 floats are more than 2 MiB */

typedef struct registration {
    int symmetric, version, own_allocator, communicators, windows, registered;
} registration;

static void *plain_alloc(void *user, size_t bytes, size_t alignment) {
    void *p = NULL;
    (void)user, (void)alignment;
    return cudaMalloc(&p, bytes) == cudaSuccess ? p : NULL;
}

static void plain_free(void *user, void *p, size_t bytes) {
    (void)user, (void)bytes;
    cudaFree(p);
}

/* The grid is 2 x 2. The communicator of the tensor group registers the arena when it is symmetric, that of the data
   group registers the gradients. */
static mt_status register_all(job *j, mt_context *ctx, mt_comm *comm) {
    registration *r = (registration *)j->result;
    mt_grid_desc shape = {2, 2, 0, 1};
    mt_grid grid;
    mt_params *params = NULL;
    mt_param_desc what;
    mt_param *p;
    mt_tensor x;
    memset(&what, 0, sizeof what);
    what.name = "wide";
    what.rows = what.cols = WIDE;
    what.init_value = 1.0f;
    MT_TRY(mt_grid_create(comm, &shape, &grid));
    MT_TRY(mt_params_create(ctx, &grid, &params));
    MT_TRY(mt_params_add(ctx, params, &what, &p));
    MT_TRY(mt_params_init(ctx, params, 1));
    MT_TRY(mt_barrier(ctx, comm));
    if (mt_comm_rank(comm) == 0) {
        r->windows = mte::nccl_counts().windows;
        r->registered = mte::nccl_counts().registered;
    }
    MT_TRY(mt_barrier(ctx, comm));
    MT_TRY(mt_fill(ctx, p->grad, 0.5f));
    MT_TRY(mt_accumulate_gradients(ctx, params));
    MT_TRY(mt_sync_gradients(ctx, params));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, 64, &x));
    MT_TRY(mt_fill(ctx, x, 1.0f));
    MT_TRY(mt_all_reduce(ctx, grid.tp, x.data, x.data, 64, MT_F32, MT_SUM));
    mt_params_destroy(params); /* frees registered memory while the sum is in the stream */
    CHECK(mte::nccl_counts().windows <= r->windows);
    mt_grid_destroy(&grid);
    return MT_SUCCESS;
}

static void test_registration(void **state) {
    /* symmetric, version, own allocator; then, for 4 ranks: communicators created, windows, registrations */
    static const registration cases[] = {
        {0, 0, 0, 20, 4, 4},
        {1, 0, 0, 20, 8, 8},
        {1, NCCL_VERSION(2, 26, 2), 0, 20, 0, 8},
        {1, 0, 1, 20, 0, 0},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        registration r = cases[i];
        job j = job_make(FOR_DEVICE, 4, register_all);
        int windows = test_may_share() ? 0 : r.windows; /* none on one GPU */
        if (r.version && test_may_share()) continue;    /* with this version, ranks do not share a GPU */
        int before = mte::nccl_counts().created;
        mte::nccl_set_version(r.version);
        r.windows = r.registered = -1;
        j.result = &r;
        j.where.arena_symmetric = r.symmetric;
        j.where.arena_bytes = (size_t)3 << 20;
        if (r.own_allocator) j.where.allocator.alloc = plain_alloc;
        if (r.own_allocator) j.where.allocator.free = plain_free;
        job_run(&j);
        assert_int_equal(mte::nccl_counts().created - before, cases[i].communicators);
        assert_int_equal(r.windows, windows);
        assert_int_equal(r.registered, cases[i].registered);
    }
    mte::nccl_set_version(0);
}

/* The second registration of the same memory does nothing, with any communicator. A communicator that cannot deregister
   memory is broken. */
static mt_status register_twice(job *j, mt_context *ctx, mt_comm *comm) {
    const size_t bytes = (size_t)3 << 20, third = bytes / 3;
    int rank = mt_comm_rank(comm), registered[3];
    mt_comm *other;
    void *p;
    mt_tensor x;
    (void)j;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, 64, &x));
    MT_TRY(mt_fill(ctx, x, 1.0f));
    MT_TRY(mt_comm_split(comm, 0, rank, &other));
    MT_TRY(mt_context_alloc(ctx, bytes, &p));
    for (int i = 0; i < 3; i++) {
        if (i == 1) MT_TRY(mt_comm_register(ctx, comm, (char *)p + third, bytes - third));
        else MT_TRY(mt_comm_register(ctx, other, p, bytes));
        MT_TRY(mt_barrier(ctx, comm));
        registered[i] = mte::nccl_counts().registered;
        if (rank == 0 && i == 2) mte::nccl_keep_windows(true);
        MT_TRY(mt_barrier(ctx, comm));
    }
    CHECK(registered[1] == registered[0] && registered[2] == registered[0]);
    CHECK(mt_arena_register(NULL, comm) == MT_ERR_ARGUMENT && mt_arena_register(ctx, NULL) == MT_ERR_ARGUMENT);
    mt_context_free(ctx, p, bytes);
    CHECK(strstr(mt_last_error(ctx), "NCCL: internal error"));
    CHECK(mt_all_reduce(ctx, other, x.data, x.data, 64, MT_F32, MT_SUM) == MT_ERR_PEER);
    CHECK(strstr(mt_last_error(ctx), "failed with MT_ERR_SYSTEM"));
    mt_comm_destroy(other);
    return mt_all_reduce(ctx, comm, x.data, x.data, 64, MT_F32, MT_SUM); /* the other communicator works */
}

static void test_registered_twice(void **state) {
    job j = job_make(FOR_DEVICE, 2, register_twice);
    (void)state;
    if (test_may_share()) skip(); /* the fault is one of windows */
    job_run(&j);
    mte::nccl_keep_windows(false);
}
#endif

/* ---- memory of ranks that share a GPU over NCCL ------------------------------------------------------------------ */

/* Rank 1 frees memory while rank 0 waits for it in a collective on the same GPU. Such memory stays with the context,
   and becomes the next block of its size. */
static mt_status free_beside(job *j, mt_context *ctx, mt_comm *comm) {
    size_t before = mt_context_allocated(ctx);
    void *first, *other, *again;
    unsigned char bytes[64];
    (void)j;
    MT_TRY(mt_context_alloc(ctx, 4096, &first));
    CHECK(cudaMemset(first, 1, 4096) == cudaSuccess);
    MT_TRY(mt_barrier(ctx, comm));
    if (mt_comm_rank(comm) == 1) pause_for(0.05);
    mt_context_free(ctx, first, 4096);
    MT_TRY(mt_barrier(ctx, comm));
    MT_TRY(mt_context_alloc(ctx, 8192, &other));
    MT_TRY(mt_context_alloc(ctx, 4096, &again));
    CHECK(other != first && again == first);
    MT_TRY(get(ctx, again, bytes, sizeof bytes));
    for (size_t i = 0; i < sizeof bytes; i++) CHECK(bytes[i] == 0);
    mt_context_free(ctx, again, 4096);
    mt_context_free(ctx, other, 8192);
    CHECK(mt_context_allocated(ctx) == before);
    return mt_barrier(ctx, comm);
}

static void test_memory_of_ranks_that_share_a_gpu(void **state) {
    (void)state;
    if (!test_may_share() || mt_device_count(MT_DEVICE_CUDA) == 0) skip();
    for (int how = FOR_DEVICE; how <= FROM_ID; how++) {
        job j = job_make((way)how, 2, free_beside);
        job_run(&j);
    }
}

/* ---- what ranks were told, whose words travel in memory of the GPU ----------------------------------------------- */

static mt_status told(job *j, mt_context *ctx, mt_comm *comm) {
    int rank = mt_comm_rank(comm), odd = rank + 1 == j->ranks;
    mt_setting list[] = {{"--lr", "0.003"}, {"--data", odd ? "two" : "one"}};
    size_t allocated = mt_context_allocated(ctx);
    char words[64];
    snprintf(words, sizeof words, "told: --data is one on rank%s 0", j->ranks > 2 ? "s" : "");
    MT_TRY(mt_comm_compare(ctx, comm, "told", 0, list, 1));
    MT_TRY(mt_comm_compare(ctx, comm, "told", odd, list, 2));
    CHECK(mt_comm_compare(ctx, comm, "told", 0, list, 2) == MT_ERR_MISMATCH);
    CHECK(strstr(mt_last_error(ctx), words) && strstr(mt_last_error(ctx), ", but two on rank "));
    CHECK(mt_context_allocated(ctx) == allocated);
    return mt_comm_compare(ctx, comm, "told", 0, list, 1); /* the communicator still works */
}

static void test_ranks_that_were_told_different_things(void **state) {
    (void)state;
    need_gpus(2);
    for (int ranks = 2; ranks <= 3 && has_gpus(ranks); ranks++)
        for (int how = FOR_DEVICE; how < WAYS; how++) {
            job j = job_make((way)how, ranks, told);
            job_run(&j);
        }
}

static void test_different_things_on_one_gpu(void **state) {
    (void)state;
    for (int ranks = 2; ranks <= 3; ranks++)
        for (int how = ON_CPU; how <= ON_ONE_GPU; how++) {
            job j = job_make((way)how, ranks, told);
            job_run(&j);
        }
}

/* ---- ranks of other versions ------------------------------------------------------------------------------------- */

/* Without the comparison of calls the creation does not communicate, and the first split compares the versions. */
static mt_status meet_another_version(job *j, mt_context *ctx, mt_comm *comm) {
    int number = mt_version() - patch_of_rank, r = j->other_version == 1 ? 1 : j->other_version - 1;
    int patches[2] = {j->other_version == 1 ? OTHER_PATCH : PATCH, j->other_version == 1 ? PATCH : OTHER_PATCH};
    mt_comm *part = NULL;
    char words[200];
    CHECK((comm != NULL) == j->where.no_nccl_checks);
    CHECK(j->made[mt_comm_rank(ctx->world)] == (comm ? MT_SUCCESS : MT_ERR_MISMATCH));
    if (comm) CHECK(mt_comm_split(comm, 0, 0, &part) == MT_ERR_MISMATCH && !part);
    snprintf(
        words, sizeof words,
        "\"world\": rank 0 is of megatron.h %d.%d.%d, but rank %d of %d.%d.%d: build all ranks with the same headers",
        number / 1000000, number / 1000 % 1000, patches[0], r, number / 1000000, number / 1000 % 1000, patches[1]);
    CHECK(strstr(mt_last_error(ctx), words));
    return MT_SUCCESS;
}

/* A rank that says another version is refused on every rank, in each way to create a communicator. */
static void test_ranks_of_other_versions(void **state) {
    (void)state;
    assert_int_equal(sizeof(mti_member), 56);
    assert_int_equal(offsetof(mti_member, version), 0);
    need_gpus(2);
    for (int ranks = 2; ranks <= 3 && has_gpus(ranks); ranks++)
        for (int how = FOR_DEVICE; how < WAYS; how++)
            for (int i = 0; i < 4; i++) {
                job j = job_make((way)how, ranks, meet_another_version);
                j.other_version = i % 2 ? 1 : ranks;
                j.where.no_nccl_checks = i / 2;
                job_run(&j);
            }
}

/* ---- attention over context ranks -------------------------------------------------------------------------------- */

enum { CP_BATCH = 2, CP_CHUNK = 16, CP_GROUPS = 2, CP_MEMBERS = 2, CP_DIM = 64 };

typedef struct cp_tensors {
    mt_tensor q, k, v, out, lse, dout, dq, dk, dv;
} cp_tensors;

/* The kind of communication, of which odd ones have a zigzag; the type; and the scores: with dropout, of documents with
   a window, or with ALiBi, a soft cap and padding. */
typedef struct cp_case {
    int way;
    mt_dtype dtype;
    int scores;
} cp_case;

static mt_status cp_new(mt_context *ctx, mt_dtype dtype, int64_t tokens, cp_tensors *t) {
    const int64_t width = CP_GROUPS * CP_MEMBERS * CP_DIM, keys = CP_GROUPS * CP_DIM;
    mt_arena_request memory[] = {{&t->q, dtype, tokens, width},
                                 {&t->k, dtype, tokens, keys},
                                 {&t->v, dtype, tokens, keys},
                                 {&t->out, dtype, tokens, width},
                                 {&t->dout, dtype, tokens, width},
                                 {&t->dq, dtype, tokens, width},
                                 {&t->dk, dtype, tokens, keys},
                                 {&t->dv, dtype, tokens, keys},
                                 {&t->lse, MT_F32, CP_GROUPS * CP_MEMBERS, tokens}};
    return mt_arena_tensors(ctx, memory, 9);
}

/* Copies this rank's rows of whole sequences. */
static mt_status cp_rows(mt_context *ctx, mt_comm *comm, int halves, mt_tensor whole, mt_tensor own) {
    const int64_t seq = whole.rows / CP_BATCH, chunk = own.rows / CP_BATCH / halves;
    for (int half = 0; half < halves; half++) {
        int64_t number = half ? 2 * mt_comm_size(comm) - 1 - mt_comm_rank(comm) : mt_comm_rank(comm);
        mt_tensor from = mt_tensor_rows(whole, number * chunk, chunk);
        from = mt_tensor_make(from.data, from.dtype, CP_BATCH, chunk * whole.cols);
        from.ld = seq * whole.cols;
        MT_TRY(mt_copy(ctx, from,
                       mt_tensor_reshape(mt_tensor_rows(own, half * CP_BATCH * chunk, CP_BATCH * chunk), CP_BATCH,
                                         chunk * whole.cols)));
    }
    return MT_SUCCESS;
}

/* Whether the rows of this rank are nearly those of the whole. */
static mt_status cp_near(mt_context *ctx, mt_comm *comm, int halves, const char *what, mt_tensor whole, mt_tensor own) {
    const int64_t n = own.rows * own.cols;
    mt_tensor want, as[2];
    float *x = (float *)malloc((size_t)(2 * n) * sizeof *x);
    double most = 0, off = 0;
    MT_TRY(mt_arena_tensor(ctx, own.dtype, own.rows, own.cols, &want));
    MT_TRY(cp_rows(ctx, comm, halves, whole, want));
    for (int i = 0; i < 2; i++) {
        MT_TRY(mt_arena_tensor(ctx, MT_F32, own.rows, own.cols, &as[i]));
        MT_TRY(mt_convert(ctx, i ? want : own, as[i]));
        MT_TRY(mt_download(ctx, as[i], x + i * n));
    }
    for (int64_t i = 0; i < n; i++) {
        most = test_larger(most, fabsf(x[n + i]));
        off = test_larger(off, fabsf(x[n + i] - x[i]));
    }
    free(x);
    if (off <= 0.02 * most) return MT_SUCCESS;
    fprintf(stderr, "%s is off by %g, the largest element is %g\n", what, off, most);
    return MT_ERR_DATA;
}

static mt_status cp_upload(mt_context *ctx, mt_dtype dtype, int64_t n, const void *x, const void **out) {
    mt_tensor t;
    MT_TRY(mt_arena_tensor(ctx, dtype, 1, n, &t));
    *out = t.data;
    return mt_upload(ctx, x, t);
}

static mt_status cp_scores(mt_context *ctx, int scores, mt_attention_desc *s) {
    const int32_t tokens = (int32_t)(s->batch * s->seq), documents[] = {0, 21, 50, tokens};
    const int32_t lengths[CP_BATCH] = {(int32_t)s->seq, (int32_t)s->seq - 11};
    float slopes[CP_GROUPS * CP_MEMBERS];
    if (scores == 0) s->dropout.p = 0.25f, s->dropout.at.global_cols = CP_GROUPS * CP_MEMBERS;
    if (scores == 1) {
        s->scores.window = 20;
        s->documents = 3;
        return cp_upload(ctx, MT_I32, 4, documents, (const void **)&s->cu_seqlens);
    }
    if (scores != 2) return MT_SUCCESS;
    s->scores.alibi = 1, s->scores.softcap = 3.0f;
    for (int i = 0; i < CP_GROUPS * CP_MEMBERS; i++) slopes[i] = 0.5f / (float)(1 + i);
    MT_TRY(cp_upload(ctx, MT_F32, CP_GROUPS * CP_MEMBERS, slopes, (const void **)&s->scores.alibi_slopes));
    return cp_upload(ctx, MT_I32, CP_BATCH, lengths, (const void **)&s->lengths);
}

static mt_status cp_attention(job *j, mt_context *ctx, mt_comm *comm) {
    const cp_case *c = (const cp_case *)j->result;
    const int halves = 1 + c->way % 2;
    const mt_context_parallel_desc how = {(mt_cp_comm_type)(MT_CP_P2P + c->way / 2), halves == 1, 0, 0};
    const int64_t seq = 2 * CP_CHUNK * j->ranks;
    cp_tensors all, own;
    mt_attention_desc s;
    mt_tensor f;
    memset(&s, 0, sizeof s);
    s.batch = CP_BATCH, s.seq = seq, s.groups = CP_GROUPS, s.heads_per_group = CP_MEMBERS, s.head_dim = CP_DIM;
    MT_TRY(cp_scores(ctx, c->scores, &s));
    MT_TRY(cp_new(ctx, c->dtype, CP_BATCH * seq, &all));
    MT_TRY(cp_new(ctx, c->dtype, CP_BATCH * seq / j->ranks, &own));
    mt_tensor *const given[] = {&all.q, &all.k, &all.v, &all.dout}, *const mine[] = {&own.q, &own.k, &own.v, &own.dout};
    for (int i = 0; i < 4; i++) {
        mt_random at = {};
        at.seed = 7 + (uint64_t)i, at.global_cols = given[i]->cols;
        MT_TRY(mt_arena_tensor(ctx, MT_F32, given[i]->rows, given[i]->cols, &f));
        MT_TRY(mt_random_normal(ctx, f, 1.0f, at));
        MT_TRY(mt_convert(ctx, f, *given[i]));
        MT_TRY(cp_rows(ctx, comm, halves, *given[i], *mine[i]));
    }
    MT_TRY(mt_dot_product_attention_forward(ctx, &s, all.q, all.k, all.v, all.out, all.lse));
    MT_TRY(mt_dot_product_attention_backward(ctx, &s, all.q, all.k, all.v, all.out, all.lse, all.dout, all.dq, all.dk,
                                             all.dv));
    MT_TRY(mt_context_parallel_attention_forward(ctx, comm, &how, &s, own.q, own.k, own.v, own.out, own.lse));
    MT_TRY(mt_context_parallel_attention_backward(ctx, comm, &how, &s, own.q, own.k, own.v, own.out, own.lse, own.dout,
                                                  own.dq, own.dk, own.dv));
    MT_TRY(cp_near(ctx, comm, halves, "out", all.out, own.out));
    MT_TRY(cp_near(ctx, comm, halves, "dq", all.dq, own.dq));
    MT_TRY(cp_near(ctx, comm, halves, "dk", all.dk, own.dk));
    return cp_near(ctx, comm, halves, "dv", all.dv, own.dv);
}

static void attend_over_context(way how, int ranks, cp_case c) {
    job j = job_make(how, ranks, cp_attention);
    j.where.arena_bytes = 1 << 24;
    j.result = &c;
    job_run(&j);
}

static void test_attention_over_context_ranks(void **state) {
    (void)state;
    need_gpus(2);
    for (int way = 0; way < 6; way++)
        for (int ranks = 2; ranks <= (way % 2 ? 4 : 2) && has_gpus(ranks); ranks += 2) {
            static const mt_dtype dtypes[] = {MT_BF16, MT_F16, MT_F32};
            cp_case c = {way, dtypes[(way + ranks / 4) % 3], (way / 2 + ranks / 2) % 3};
            attend_over_context(FOR_DEVICE, ranks, c);
        }
}

static void test_attention_over_context_ranks_on_one_gpu(void **state) {
    (void)state;
    for (int way = 0; way < 6; way++) {
        cp_case c = {way, way % 2 ? MT_F16 : MT_BF16, way % 3};
        attend_over_context(ON_ONE_GPU, 2, c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention_over_context_ranks),
        cmocka_unit_test(test_attention_over_context_ranks_on_one_gpu),
        cmocka_unit_test(test_collectives),
        cmocka_unit_test(test_collectives_in_invariant_mode),
        cmocka_unit_test(test_collectives_on_one_gpu),
        cmocka_unit_test(test_long_sums_in_invariant_mode),
        cmocka_unit_test(test_long_sums_on_one_gpu),
        cmocka_unit_test(test_split),
        cmocka_unit_test(test_split_on_one_gpu),
        cmocka_unit_test(test_split_of_a_split),
        cmocka_unit_test(test_split_of_a_split_on_one_gpu),
        cmocka_unit_test(test_no_communicator_for_one),
        cmocka_unit_test(test_a_call_without_memory),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_context_destroyed_first),
        cmocka_unit_test(test_wait_for_peers),
        cmocka_unit_test(test_wait_for_peers_on_one_gpu),
        cmocka_unit_test(test_memory_of_ranks_that_share_a_gpu),
        cmocka_unit_test(test_ranks_that_were_told_different_things),
        cmocka_unit_test(test_different_things_on_one_gpu),
        cmocka_unit_test(test_ranks_of_other_versions),
        cmocka_unit_test(test_streams_wait),
        cmocka_unit_test(test_streams_wait_on_one_gpu),
        cmocka_unit_test(test_warning_of_one_queue),
        cmocka_unit_test(test_one_rank_collectives),
        cmocka_unit_test(test_one_rank_sends_to_itself),
        cmocka_unit_test(test_one_rank_splits),
        cmocka_unit_test(test_one_rank_waits),
        cmocka_unit_test(test_one_rank_records),
        cmocka_unit_test(test_one_rank_of_the_caller),
        cmocka_unit_test(test_one_rank_outlives_its_context),
        cmocka_unit_test(test_one_rank_registers),
        cmocka_unit_test(test_one_rank_is_aborted_by_the_watchdog),
        cmocka_unit_test(test_one_rank_in_a_stream_that_is_late),
        cmocka_unit_test(test_ids_that_lead_nowhere),
#if defined(MT_CUDA_ENGINE)
        cmocka_unit_test(test_silent_rank),
        cmocka_unit_test(test_silent_rank_in_a_group),
        cmocka_unit_test(test_two_that_hang),
        cmocka_unit_test(test_asynchronous_error),
        cmocka_unit_test(test_rank_that_leaves),
        cmocka_unit_test(test_first_call_without_a_peer),
        cmocka_unit_test(test_calls_without_a_peer),
        cmocka_unit_test(test_pauses),
        cmocka_unit_test(test_launch_without_a_peer),
        cmocka_unit_test(test_destroy_before_a_graph),
        cmocka_unit_test(test_destroy_waits_for_nobody_for_ever),
        cmocka_unit_test(test_silent_rank_beside_computation),
        cmocka_unit_test(test_odd_calls),
        cmocka_unit_test(test_receive_from_nobody),
        cmocka_unit_test(test_many_calls),
        cmocka_unit_test(test_two_orders),
        cmocka_unit_test(test_without_sockets),
        cmocka_unit_test(test_failure_of_one_rank_is_told),
        cmocka_unit_test(test_registration),
        cmocka_unit_test(test_registered_twice),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
