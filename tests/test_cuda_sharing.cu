/* test_cuda_sharing.cu - tests how NCCL shares a GPU with the library: the creation of communicators, and the
   end of collectives that hang.
     On GPUs:       nvcc -std=c++17 -O2 -arch=native -I. tests/test_cuda_sharing.cu -lcublasLt -lnccl
                    Ranks need a GPU each; with fewer GPUs the cases are skipped.
     Without GPUs:  the engine in tests/engine/ runs the same file on a CPU. Only there it tests the faults that the
                    stand-in for NCCL causes. */

#define MT_USE_NCCL
#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test.h"

#if defined(MT_CUDA_ENGINE)
namespace mte {
struct NcclCounts {
    int created, alive, registered, windows, threads, calls;
};
NcclCounts nccl_counts();
void nccl_silence(int device, int after);
void nccl_reset_faults();
void nccl_allocate_in_creation(bool on);
} // namespace mte
#endif

#define SHORT 0.2 /* the timeout of ranks that wait in vain */

/* ---- ranks with a GPU each --------------------------------------------------------------------------------------- */

typedef struct job job;
struct job {
    int ranks;
    mt_context_desc where; /* device and ordinal are set here */
    mt_status (*body)(job *j, mt_context *ctx, mt_comm *comm);
    mt_status created[8]; /* what mt_comm_create_for has returned */
    char text[8][MT_ERROR_BYTES];
    mt_grid_desc shape;
};

static job job_make(int ranks, mt_status (*body)(job *j, mt_context *ctx, mt_comm *comm)) {
    job j;
    memset(&j, 0, sizeof j);
    j.ranks = ranks;
    j.body = body;
    j.where.arena_bytes = (size_t)4 << 20;
    if (mt_device_count(MT_DEVICE_CUDA) < ranks) skip();
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
    where.ordinal = rank;
    MT_TRY(mt_context_create(world, &where, &ctx));
    status = j->created[rank] = mt_comm_create_for(ctx, world, &comm);
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

/* The program's own communicator hangs, which the library does not abort: freeing memory does not wait for it, and a
   split that hangs behind it is aborted as soon as the program aborts its own. */
static void test_frees_beside_a_communicator_that_hangs(void **state) {
    ncclComm_t callers[2];
    mt_context *ctx[2] = {NULL, NULL};
    mt_comm *comm[2] = {NULL, NULL};
    mt_context_desc where;
    void *block;
    int warnings = 0;
    (void)state;
    if (mt_device_count(MT_DEVICE_CUDA) < 2) skip();
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_CUDA;
    where.arena_bytes = 1 << 20;
    where.no_nccl_checks = 1;
    where.logger.log = count_warning;
    where.logger.user = &warnings;
    assert_int_equal(ncclCommInitAll(callers, 2, NULL), ncclSuccess);
    for (int r = 0; r < 2; r++) {
        where.ordinal = r;
        assert_int_equal(mt_context_create(NULL, &where, &ctx[r]), MT_SUCCESS);
        assert_int_equal(mt_comm_create_nccl(ctx[r], callers[r], SHORT, &comm[r]), MT_SUCCESS);
    }
    assert_int_equal(mt_context_alloc(ctx[0], 4096, &block), MT_SUCCESS);
    for (int call = 0; call < 2; call++) { /* the first one connects the ranks, the second never arrives at rank 1 */
        if (call == 1) mte::nccl_silence(1, 0);
        assert_int_equal(ncclGroupStart(), ncclSuccess);
        for (int r = 0; r < 2; r++) {
            void *x = ctx[r]->arena;
            assert_int_equal(cudaSetDevice(r), cudaSuccess);
            assert_int_equal(cudaMemsetAsync(x, 0, 64, ctx[r]->stream), cudaSuccess);
            assert_int_equal(ncclAllReduce(x, x, 4, ncclFloat32, ncclSum, callers[r], ctx[r]->stream), ncclSuccess);
        }
        assert_int_equal(ncclGroupEnd(), ncclSuccess);
    }
    comm[0]->nccl.busy = 1; /* as after a call of the library */
    comm[0]->nccl.stream = ctx[0]->stream;
    assert_int_equal(mt_context_synchronize(ctx[0]), MT_ERR_TIMEOUT);
    mt_context_free(ctx[0], block, 4096);
    assert_int_equal(warnings, 1);
    for (int r = 0; r < 2; r++) mt_comm_destroy(comm[r]);
    for (int r = 0; r < 2; r++) ncclCommAbort(callers[r]);
    for (int r = 0; r < 2; r++) mt_context_destroy(ctx[r]);
    assert_int_equal(warnings, 1);
    mte::nccl_reset_faults();
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kernels_are_loaded_first),
#if defined(MT_CUDA_ENGINE)
        cmocka_unit_test(test_creation_that_allocates),
        cmocka_unit_test(test_three_that_hang),
        cmocka_unit_test(test_frees_beside_a_communicator_that_hangs),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
