/* test_cuda_sharing.cu - tests how NCCL shares a GPU with the library: the order of its sums, the thread blocks of a
   collective and the products beside it, the priorities and workspaces of streams, memory that it registers, the
   creation of communicators, and the end of collectives that hang.
     On GPUs:       nvcc -std=c++17 -O2 -arch=native -I. tests/test_cuda_sharing.cu -lcublasLt -lnccl
                    Ranks need a GPU each; with fewer GPUs the cases are skipped.
     Without GPUs:  the engine in tests/engine/ runs the same file on a CPU. Only there it tests the faults that the
                    stand-in for NCCL causes. */

#define MT_USE_NCCL
#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_gpus.h"
#include "mt_test.h"

#if defined(MT_CUDA_ENGINE)
#include "runtime.h"
namespace mte {
struct NcclCounts {
    int created, alive, registered, windows, threads, calls;
};
NcclCounts nccl_counts();
void nccl_silence(int device, int after);
void nccl_reset_faults();
void nccl_refuse_windows(bool on);
void nccl_allocate_in_creation(bool on);
int nccl_max_ctas(ncclComm *comm);
} // namespace mte
#endif

#define SHORT 0.2 /* the timeout of ranks that wait in vain */
#define NVLS "NCCL_NVLS_ENABLE"

/* ---- ranks with a GPU each --------------------------------------------------------------------------------------- */

typedef struct job job;
struct job {
    int ranks;
    mt_context_desc where; /* device and ordinal are set here */
    mt_status (*body)(job *j, mt_context *ctx, mt_comm *comm);
    mt_status created[8]; /* what mt_comm_create_for has returned */
    char text[8][MT_ERROR_BYTES];
    mt_grid_desc shape;
    mt_gemm_choice choice;
    int registered, windows;
    int environment_stays[8]; /* a new variable would move what other threads may read */
};

static int has_gpus(int ranks) { return test_enough_gpus(ranks, mt_device_count(MT_DEVICE_CUDA)); }

static job job_make(int ranks, mt_status (*body)(job *j, mt_context *ctx, mt_comm *comm)) {
    job j;
    memset(&j, 0, sizeof j);
    j.ranks = ranks;
    j.body = body;
    j.where.arena_bytes = (size_t)4 << 20;
    if (!has_gpus(ranks)) skip();
    return j;
}

static mt_status job_rank(mt_comm *world, void *user) {
    job *j = (job *)user;
    int rank = mt_comm_rank(world);
    mt_context_desc where = j->where;
    mt_context *ctx = NULL;
    mt_comm *comm = NULL;
    mt_status status;
    where.device = MT_DEVICE_CUDA;
    where.ordinal = test_gpu_of(rank);
    MT_TRY(mt_context_create(world, &where, &ctx));
    char **const variables = environ;
    status = j->created[rank] = mt_comm_create_for(ctx, world, &comm);
    j->environment_stays[rank] = environ == variables;
    snprintf(j->text[rank], sizeof j->text[rank], "%s", mt_last_error(ctx));
    if (status == MT_SUCCESS && j->body) status = j->body(j, ctx, comm);
    mt_comm_destroy(comm);
    mt_context_destroy(ctx);
    return status;
}

static mt_status job_launch(job *j) {
    mt_launch_desc d;
    memset(&d, 0, sizeof d);
    d.ranks = j->ranks;
    d.no_pinning = 1;
    d.timeout_s = TEST_NEVER_OVER;
    return mt_launch(&d, job_rank, j);
}

static void job_run(job *j) { assert_int_equal(job_launch(j), MT_SUCCESS); }

/* ---- variables of the environment -------------------------------------------------------------------------------- */

/* A variable of the environment, as it was before a test. */
typedef struct variable {
    const char *name;
    int set;
    char value[64];
} variable;

static variable variable_take(const char *name) {
    variable v = {name, getenv(name) != NULL, ""};
    if (v.set) snprintf(v.value, sizeof v.value, "%s", getenv(name));
    unsetenv(name);
    return v;
}

static void variable_give_back(const variable *v) {
    if (v->set) setenv(v->name, v->value, 1);
    else unsetenv(v->name);
}

/* ---- the order of sums ------------------------------------------------------------------------------------------- */

static void test_nvls_is_off_where_sums_are_in_order(void **state) {
    static const struct {
        int deterministic, invariant;
        const char *before, *after;
        mt_status status;
    } cases[] = {
        {0, 0, NULL, "2", MT_SUCCESS},     {1, 0, NULL, "0", MT_SUCCESS}, {0, 2, NULL, "0", MT_SUCCESS},
        {1, 0, "0", "0", MT_SUCCESS},      {0, 0, "1", "1", MT_SUCCESS},  {0, 2, "1", "1", MT_SUCCESS},
        {1, 0, "1", "1", MT_ERR_ARGUMENT}, {0, 0, "2", "2", MT_SUCCESS},  {1, 2, "2", "0", MT_SUCCESS},
    };
    variable nvls;
    (void)state;
    if (!has_gpus(2)) skip();
    nvls = variable_take(NVLS);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        job j = job_make(2, NULL);
        j.where.nccl.deterministic = cases[i].deterministic;
        j.where.invariant = cases[i].invariant;
        const char *before = cases[i].before, *after = cases[i].after;
        mt_status status = cases[i].status;
        if (test_may_share() && strcmp(after, "2") == 0) after = "0"; /* off for ranks that share a GPU */
        if (test_may_share() && strcmp(after, "0") != 0) status = MT_ERR_ARGUMENT;
        unsetenv(NVLS);
        if (before) setenv(NVLS, before, 1);
        job_launch(&j);
        assert_int_equal(j.created[0], status);
        assert_string_equal(getenv(NVLS), after);
#if defined(MT_CUDA_ENGINE)
        assert_true(j.environment_stays[0] && j.environment_stays[1]);
#endif
        if (status != MT_SUCCESS)
            assert_true(test_has_words(j.text[0], cases[i].deterministic ? NVLS
                                                      "|mt_context_desc.nccl.deterministic needs 0"
                                                                         : NVLS "|NCCL_MULTI_RANK_GPU_ENABLE needs 0"));
    }
    variable_give_back(&nvls);
}

/* A communicator of the program is taken when it was made without NVLS. */
static void test_nvls_of_the_callers_communicator(void **state) {
    static const char *const values[] = {NULL, "1", "0"};
    variable nvls;
    (void)state;
    if (!has_gpus(2)) skip();
    nvls = variable_take(NVLS);
    for (int i = 0; i < 3; i++) {
        ncclComm_t callers[2];
        mt_context *ctx = NULL;
        mt_comm *comm = NULL;
        mt_context_desc where;
        memset(&where, 0, sizeof where);
        where.device = MT_DEVICE_CUDA;
        where.arena_bytes = 1 << 20;
        where.no_nccl_checks = 1;
        where.nccl.deterministic = 1;
        if (values[i]) setenv(NVLS, values[i], 1);
        test_make_callers(callers, 2, 1);
        assert_int_equal(mt_context_create(NULL, &where, &ctx), MT_SUCCESS);
        assert_int_equal(mt_comm_create_nccl(ctx, callers[0], SHORT, &comm), i < 2 ? MT_ERR_ARGUMENT : MT_SUCCESS);
        if (i < 2) assert_true(test_has_words(mt_last_error(ctx), NVLS "|where it is") && !comm);
        mt_comm_destroy(comm);
        mt_context_destroy(ctx);
        for (int r = 0; r < 2; r++) ncclCommAbort(callers[r]);
    }
    variable_give_back(&nvls);
}

/* ---- registered memory ------------------------------------------------------------------------------------------- */

#if defined(MT_CUDA_ENGINE)
static mt_status register_one(job *j, mt_context *ctx, mt_comm *comm) {
    const size_t bytes = (size_t)3 << 20;
    mt_tensor x;
    void *p;
    MT_TRY(mt_context_alloc(ctx, bytes, &p));
    MT_TRY(mt_comm_register(ctx, comm, p, bytes));
    x = mt_tensor_f32((const float *)p, 1, 64);
    MT_TRY(mt_fill(ctx, x, 1.0f));
    MT_TRY(mt_all_reduce(ctx, comm, x.data, x.data, 64, MT_F32, MT_SUM));
    MT_TRY(mt_barrier(ctx, comm));
    if (mt_comm_rank(comm) == 0) j->windows = mte::nccl_counts().windows;
    if (mt_comm_rank(comm) == 0) j->registered = mte::nccl_counts().registered;
    MT_TRY(mt_barrier(ctx, comm));
    mt_context_free(ctx, p, bytes);
    return MT_SUCCESS;
}

/* Windows open NVLS: without it, and where NCCL gives none, memory is registered as a buffer. */
static void test_windows(void **state) {
    static const struct {
        int deterministic, invariant, refused, windows;
    } cases[] = {{0, 0, 0, 2}, {1, 0, 0, 0}, {0, 2, 0, 0}, {0, 0, 1, 0}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        variable nvls = variable_take(NVLS);
        job j = job_make(2, register_one);
        j.where.nccl.deterministic = cases[i].deterministic;
        j.where.invariant = cases[i].invariant;
        mte::nccl_refuse_windows(cases[i].refused);
        job_run(&j);
        mte::nccl_refuse_windows(false);
        assert_int_equal(j.windows, test_may_share() ? 0 : cases[i].windows); /* none where ranks may share a GPU */
        assert_int_equal(j.registered, 2);
        variable_give_back(&nvls);
    }
    assert_int_equal(mte::nccl_counts().registered, 0);
}
#endif

/* ---- thread blocks of collectives, and products beside them ------------------------------------------------------ */

static mt_status overlap_in(mt_context *ctx, mt_comm *comm, mt_stream stream, int ticket, void *x) {
    MT_TRY(mt_overlap_begin(ctx, comm, stream));
    return mt_overlap_end(ctx, ticket, mt_all_reduce(ctx, comm, x, x, 4, MT_F32, MT_SUM));
}

/* The limit that a field of mt_nccl_options stands for. */
static int limit_of(int field, int usual) { return field < 0 ? 0 : field > 0 ? field : usual; }

#if defined(MT_CUDA_ENGINE)
/* Ranks that share a GPU have at most 4 thread blocks. */
static int blocks_of(int limit) { return test_may_share() && (limit == 0 || limit > 4) ? 4 : limit; }
#endif

static mt_status limits(job *j, mt_context *ctx, mt_comm *comm) {
    int second = limit_of(j->where.nccl.second_ctas, 16), third = limit_of(j->where.nccl.third_ctas, 8);
    mt_grid grid;
    mt_comm *none = comm;
    void *x, *y;
    MT_TRY(mt_arena_alloc(ctx, 64, &x));
    MT_TRY(mt_arena_alloc(ctx, 64, &y));
    MT_TRY(mt_cuda_zero(ctx, x, 64));
    MT_TRY(mt_cuda_zero(ctx, y, 64));
    MT_TRY(mt_grid_create(comm, &j->shape, &grid));
#if defined(MT_CUDA_ENGINE)
    CHECK(mte::nccl_max_ctas(comm->nccl.handle) == blocks_of(0));
    CHECK(mte::nccl_max_ctas(grid.model->nccl.handle) == blocks_of(0));
    CHECK(mte::nccl_max_ctas(grid.tp->nccl.handle) == blocks_of(second));
    CHECK(mte::nccl_max_ctas(grid.dp->nccl.handle) == blocks_of(third));
#endif
    CHECK(mt_comm_split_for(comm, 0, 0, (mt_stream)3, &none) == MT_ERR_ARGUMENT && !none);
    CHECK(mt_overlap_multiprocessors(NULL) == 0 && mt_overlap_multiprocessors(ctx) == 0);
    MT_TRY(overlap_in(ctx, grid.tp, MT_STREAM_SECOND, 0, x));
    CHECK(mt_overlap_multiprocessors(ctx) == second);
    MT_TRY(overlap_in(ctx, grid.tp, MT_STREAM_SECOND, 1, x)); /* behind the other one: not at the same time */
    CHECK(mt_overlap_multiprocessors(ctx) == second);
    MT_TRY(overlap_in(ctx, grid.dp, MT_STREAM_THIRD, MT_OVERLAP_TICKET_THIRD, y));
    CHECK(mt_overlap_multiprocessors(ctx) == second + third);
    MT_TRY(mt_overlap_wait(ctx, 0));
    CHECK(mt_overlap_multiprocessors(ctx) == second + third);
    MT_TRY(mt_overlap_wait(ctx, 1));
    CHECK(mt_overlap_multiprocessors(ctx) == third);
    MT_TRY(mt_overlap_wait(ctx, MT_OVERLAP_TICKET_THIRD));
    CHECK(mt_overlap_multiprocessors(ctx) == 0);
    MT_TRY(mt_context_synchronize(ctx));
    mt_grid_destroy(&grid);
    return MT_SUCCESS;
}

static void test_limits(void **state) {
    static const int cases[][2] = {{0, 0}, {5, 7}, {-1, -1}};
    (void)state;
    for (int i = 0; i < 3; i++) {
        job j = job_make(4, limits);
        j.shape.tp = 2;
        j.where.nccl.second_ctas = cases[i][0];
        j.where.nccl.third_ctas = cases[i][1];
        job_run(&j);
    }
}

static void test_limits_refused(void **state) {
    mt_context *ctx = NULL;
    mt_context_desc where;
    (void)state;
    memset(&where, 0, sizeof where);
    where.nccl.second_ctas = -2;
    assert_int_equal(mt_context_create(NULL, &where, &ctx), MT_ERR_ARGUMENT);
    where.nccl.second_ctas = 0;
    where.nccl.third_ctas = -2;
    assert_int_equal(mt_context_create(NULL, &where, &ctx), MT_ERR_ARGUMENT);
}

static mt_status fill_noise(mt_context *ctx, mt_tensor t, uint64_t seed) {
    size_t n = (size_t)(t.rows * t.cols);
    float *values = (float *)malloc(n * sizeof *values);
    mt_status status;
    if (!values) return MT_ERR_MEMORY;
    for (size_t i = 0; i < n; i++) values[i] = test_float(&seed);
    status = mt_upload(ctx, values, t);
    free(values);
    return status;
}

#define SHAPES 8 /* of products; cuBLASLt proposes other algorithms for each */

typedef struct matrices {
    mt_tensor a, b, c, d; /* [320, 96], [96, 256], twice [320, 256] */
} matrices;

static mt_status matrices_make(mt_context *ctx, matrices *m) {
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 320, 96, &m->a));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 96, 256, &m->b));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 320, 256, &m->c));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 320, 256, &m->d));
    MT_TRY(fill_noise(ctx, m->a, 1));
    MT_TRY(fill_noise(ctx, m->b, 2));
    return mt_fill(ctx, m->d, 0.0f);
}

/* y = a b of the first rows. *shape: y, as it is for this shape */
static mt_status product(mt_context *ctx, const matrices *m, int i, mt_tensor y, mt_tensor *shape) {
    *shape = mt_tensor_rows(y, 0, y.rows - 8 * i);
    return mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1.0f, mt_tensor_rows(m->a, 0, shape->rows), m->b, 0.0f, *shape);
}

/* *hash = of the products of all shapes; *targets = the number of those that were for fewer multiprocessors. */
static mt_status products(mt_context *ctx, const matrices *m, uint64_t *hash, int *targets) {
    *hash = 0;
    *targets = 0;
    for (int i = 0; i < SHAPES; i++) {
        mt_tensor y;
        uint64_t each = 0;
        MT_TRY(product(ctx, m, i, m->c, &y));
        MT_TRY(mt_hash(ctx, y, 0, 0, y.cols, &each));
        *hash = *hash * 31 + each;
#if defined(MT_CUDA_ENGINE)
        if (mte::gemm_last().target) CHECK(mte::gemm_last().target == 132 - 16);
        *targets += mte::gemm_last().target > 0;
#endif
    }
    return MT_SUCCESS;
}

/* Products beside a collective have the bits of those without one, the first time and later, with both choices. Only
   rank 0 multiplies, so that the last product is its own. */
static mt_status beside(job *j, mt_context *ctx, mt_comm *comm) {
    mt_gemm_options options = {j->choice, MT_EPILOGUE_SEPARATE};
    uint64_t first = 0, now = 0;
    int rank = mt_comm_rank(comm), targets = 0;
    matrices m;
    mt_comm *part;
    void *x;
    MT_TRY(mt_gemm_set_options(ctx, &options));
    MT_TRY(mt_comm_split_for(comm, 0, rank, MT_STREAM_SECOND, &part));
    MT_TRY(mt_arena_alloc(ctx, 64, &x));
    MT_TRY(mt_cuda_zero(ctx, x, 64));
    MT_TRY(matrices_make(ctx, &m));
    for (int time = 0; time < 3; time++) { /* the last time alone */
        int overlaps = time < 2;
        if (overlaps) MT_TRY(overlap_in(ctx, part, MT_STREAM_SECOND, 0, x));
        if (rank == 0) MT_TRY(products(ctx, &m, &now, &targets));
        MT_TRY(mt_overlap_wait(ctx, 0));
        if (time == 0) first = now;
        CHECK(now == first);
#if defined(MT_CUDA_ENGINE)
        CHECK(rank > 0 || (targets > 0) == (overlaps && options.choice == MT_GEMM_MEASURED));
#endif
    }
    mt_comm_destroy(part);
    return MT_SUCCESS;
}

static void test_products_beside_a_collective(void **state) {
    static const mt_gemm_choice choices[] = {MT_GEMM_MEASURED, MT_GEMM_HEURISTIC};
    (void)state;
    for (int i = 0; i < 2; i++) {
        job j = job_make(2, beside);
        j.choice = choices[i];
        job_run(&j);
    }
}

/* Two products at the same time, each with a workspace that cuBLASLt overwrites. */
static mt_status two_products(job *j, mt_context *ctx, mt_comm *comm) {
    matrices m;
    uint64_t alone, together = 0;
    size_t allocated;
    int targets;
    (void)j;
    MT_TRY(matrices_make(ctx, &m));
    MT_TRY(products(ctx, &m, &alone, &targets));
    allocated = mt_context_allocated(ctx);
    for (int i = 0; i < SHAPES; i++) {
        mt_tensor y, z;
        uint64_t first = 0, second = 0;
        MT_TRY(mt_overlap_begin(ctx, comm, MT_STREAM_SECOND));
        MT_TRY(mt_overlap_end(ctx, 0, product(ctx, &m, i, m.d, &z)));
        MT_TRY(product(ctx, &m, i, m.c, &y));
        MT_TRY(mt_overlap_wait(ctx, 0));
        MT_TRY(mt_hash(ctx, y, 0, 0, y.cols, &first));
        MT_TRY(mt_hash(ctx, z, 0, 0, z.cols, &second));
        CHECK(first == second);
        together = together * 31 + first;
    }
    CHECK(together == alone);
    CHECK(mt_context_allocated(ctx) == allocated + ((size_t)32 << 20)); /* one workspace more */
    return MT_SUCCESS;
}

static void test_products_in_two_streams(void **state) {
    job j = job_make(2, two_products);
    (void)state;
    job_run(&j);
}

/* ---- priorities -------------------------------------------------------------------------------------------------- */

static void test_priorities(void **state) {
    (void)state;
    if (mt_device_count(MT_DEVICE_CUDA) < 1) skip();
    for (int i = 0; i < 4; i++) {
        mt_context *ctx = NULL;
        mt_context_desc where;
        int lowest, highest, second, third;
        memset(&where, 0, sizeof where);
        where.device = MT_DEVICE_CUDA;
        where.arena_bytes = 1 << 20;
        where.nccl.second_is_normal = i & 1;
        where.nccl.third_is_high = i >> 1;
        assert_int_equal(mt_context_create(NULL, &where, &ctx), MT_SUCCESS);
        assert_int_equal(cudaDeviceGetStreamPriorityRange(&lowest, &highest), cudaSuccess);
        assert_int_equal(cudaStreamGetPriority(ctx->second_stream, &second), cudaSuccess);
        assert_int_equal(cudaStreamGetPriority(ctx->third_stream, &third), cudaSuccess);
        assert_int_equal(second, i & 1 ? lowest : highest);
        assert_int_equal(third, i >> 1 ? highest : lowest);
        mt_context_destroy(ctx);
    }
}

/* ---- ranks that are threads -------------------------------------------------------------------------------------- */

static mt_status module_loading(mt_comm *world, void *user) {
    if (mt_comm_rank(world) == 0) snprintf((char *)user, 16, "%s", getenv("CUDA_MODULE_LOADING"));
    return MT_SUCCESS;
}

/* Kernels are loaded before ranks that are threads wait for each other, unless the program says otherwise. */
static void test_kernels_are_loaded_first(void **state) {
    variable loading = variable_take("CUDA_MODULE_LOADING");
    mt_launch_desc d;
    char value[16];
    (void)state;
    memset(&d, 0, sizeof d);
    d.ranks = 2;
    assert_int_equal(mt_launch(&d, module_loading, value), MT_SUCCESS);
    assert_string_equal(value, "EAGER");
    setenv("CUDA_MODULE_LOADING", "LAZY", 1);
    assert_int_equal(mt_launch(&d, module_loading, value), MT_SUCCESS);
    assert_string_equal(value, "LAZY");
    variable_give_back(&loading);
}

#if defined(MT_CUDA_ENGINE)
static mt_status grids(job *j, mt_context *ctx, mt_comm *comm) {
    mt_grid grid;
    mt_comm *odd = NULL;
    void *x;
    MT_TRY(mt_arena_alloc(ctx, 64, &x));
    MT_TRY(mt_cuda_zero(ctx, x, 64));
    MT_TRY(mt_grid_create(comm, &j->shape, &grid));
    MT_TRY(mt_all_reduce(ctx, grid.tp, x, x, 4, MT_F32, MT_SUM));
    MT_TRY(mt_comm_split(comm, mt_comm_rank(comm) % 2 ? 0 : -1, 0, &odd)); /* only some ranks are in the group */
    if (odd) MT_TRY(mt_all_reduce(ctx, odd, x, x, 4, MT_F32, MT_SUM));
    MT_TRY(mt_barrier(ctx, comm));
    mt_comm_destroy(odd);
    mt_grid_destroy(&grid);
    return MT_SUCCESS;
}

/* A rank that has its communicator waits for those that still create it, and allocate, before it calls a collective. */
static void test_creation_that_allocates(void **state) {
    job j = job_make(4, grids);
    (void)state;
    j.shape.tp = 2;
    mte::nccl_allocate_in_creation(true);
    job_run(&j);
    mte::nccl_allocate_in_creation(false);
}

/* ---- collectives that hang --------------------------------------------------------------------------------------- */

#define HANGING 3 /* communicators */

static int has_ended; /* atomic: rank 0 has ended its wait */

/* The calls of rank 1 on all communicators never arrive. It waits until rank 0 has given up. */
static mt_status hang(job *j, mt_context *ctx, mt_comm *comm) {
    mt_comm *part[HANGING];
    int rank = mt_comm_rank(comm);
    mt_status status;
    void *x;
    (void)j;
    MT_TRY(mt_arena_alloc(ctx, 64, &x));
    MT_TRY(mt_cuda_zero(ctx, x, 64));
    for (int i = 0; i < HANGING; i++) MT_TRY(mt_comm_split(comm, 0, rank, &part[i]));
    for (int i = 0; i < HANGING; i++) MT_TRY(mt_all_reduce(ctx, part[i], x, x, 4, MT_F32, MT_SUM));
    MT_TRY(mt_barrier(ctx, comm));
    if (rank == 1) mte::nccl_silence(1, 0);
    for (int i = 0; i < HANGING; i++) MT_TRY(mt_all_reduce(ctx, part[i], x, x, 4, MT_F32, MT_SUM));
    while (rank == 1 && !__atomic_load_n(&has_ended, __ATOMIC_ACQUIRE)) usleep(1000);
    for (int i = 0; i < HANGING; i++) part[i]->nccl.timeout = SHORT;
    status = mt_context_synchronize(ctx);
    for (int i = 0; i < HANGING && rank == 0; i++) CHECK(part[i]->nccl.broken == MT_ERR_TIMEOUT);
    if (rank == 0) __atomic_store_n(&has_ended, 1, __ATOMIC_RELEASE);
    for (int i = HANGING; i-- > 0;) mt_comm_destroy(part[i]);
    return rank == 0 ? status : MT_SUCCESS;
}

/* The stand-in's abort of one waits behind the kernel of another one that hangs: aborts must come together. */
static void test_three_that_hang(void **state) {
    job j = job_make(2, hang);
    (void)state;
    has_ended = 0;
    j.where.no_nccl_checks = 1;
    assert_int_equal(job_launch(&j), MT_ERR_TIMEOUT);
    mte::nccl_reset_faults();
    while (mte::nccl_counts().alive > 0) usleep(1000); /* aborts may go on behind the program */
}

static void count_warning(void *user, mt_log_level level, const char *message) {
    if (level == MT_LOG_WARNING && strstr(message, "is not freed: a stream")) ++*(int *)user;
}

/* The program's own communicator hangs, which the library does not abort: freeing memory does not wait for it, neither
   before the communicator is destroyed nor after. When the program has aborted it, memory is freed again. */
static void test_frees_beside_a_communicator_that_hangs(void **state) {
    ncclComm_t callers[2];
    mt_context *ctx[2] = {NULL, NULL};
    mt_comm *comm[2] = {NULL, NULL};
    mt_context_desc where;
    void *block[2];
    int warnings = 0;
    (void)state;
    if (!has_gpus(2)) skip();
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_CUDA;
    where.arena_bytes = 1 << 20;
    where.no_nccl_checks = 1;
    where.logger.log = count_warning;
    where.logger.user = &warnings;
    test_make_callers(callers, 2, 1);
    for (int r = 0; r < 2; r++) {
        where.ordinal = test_gpu_of(r);
        assert_int_equal(mt_context_create(NULL, &where, &ctx[r]), MT_SUCCESS);
        assert_int_equal(mt_comm_create_nccl(ctx[r], callers[r], SHORT, &comm[r]), MT_SUCCESS);
    }
    for (int i = 0; i < 2; i++) assert_int_equal(mt_context_alloc(ctx[0], 4096, &block[i]), MT_SUCCESS);
    for (int call = 0; call < 2; call++) { /* the first one connects the ranks, the second never arrives at rank 1 */
        if (call == 1) mte::nccl_silence(1, 0);
        assert_int_equal(ncclGroupStart(), ncclSuccess);
        for (int r = 0; r < 2; r++) {
            void *x = ctx[r]->arena;
            assert_int_equal(cudaSetDevice(test_gpu_of(r)), cudaSuccess);
            assert_int_equal(cudaMemsetAsync(x, 0, 64, ctx[r]->stream), cudaSuccess);
            assert_int_equal(ncclAllReduce(x, x, 4, ncclFloat32, ncclSum, callers[r], ctx[r]->stream), ncclSuccess);
        }
        assert_int_equal(ncclGroupEnd(), ncclSuccess);
    }
    comm[0]->nccl.busy = 1; /* as after a call of the library */
    comm[0]->nccl.stream = ctx[0]->stream;
    assert_int_equal(mt_context_synchronize(ctx[0]), MT_ERR_TIMEOUT);
    mt_context_free(ctx[0], block[0], 4096);
    assert_int_equal(warnings, 1);
    for (int r = 0; r < 2; r++) mt_comm_destroy(comm[r]);
    mt_context_free(ctx[0], block[1], 4096);
    assert_int_equal(warnings, 2);
    for (int r = 0; r < 2; r++) ncclCommAbort(callers[r]);
    for (int r = 0; r < 2; r++) mt_context_destroy(ctx[r]);
    assert_int_equal(warnings, 2);
    mte::nccl_reset_faults();
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nvls_is_off_where_sums_are_in_order),
        cmocka_unit_test(test_nvls_of_the_callers_communicator),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_limits_refused),
        cmocka_unit_test(test_products_beside_a_collective),
        cmocka_unit_test(test_products_in_two_streams),
        cmocka_unit_test(test_priorities),
        cmocka_unit_test(test_kernels_are_loaded_first),
#if defined(MT_CUDA_ENGINE)
        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_creation_that_allocates),
        cmocka_unit_test(test_three_that_hang),
        cmocka_unit_test(test_frees_beside_a_communicator_that_hangs),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
