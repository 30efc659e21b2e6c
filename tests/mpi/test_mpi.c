/* test_mpi.c - tests what only communicators over MPI have, against known data: the caller's MPI_Comm, messages that
   are sent in several pieces, many groups, grids, two worlds at once, the end of a run. test_comm.c, test_faults.c and
   test_comm_stress.c test the rest; they are run over MPI, too. Start with 4 ranks. Every rank is a process with its
   own assertions. */

#include <stdlib.h>

static int allocations, alive; /* blocks of the library: no new ones after a world is created, and 0 at the end */
static void *counting_calloc(size_t count, size_t bytes) {
    allocations++, alive++;
    return (calloc)(count, bytes);
}
static int counting_memalign(void **out, size_t alignment, size_t bytes) {
    allocations++, alive++;
    return (posix_memalign)(out, alignment, bytes);
}
static void counting_free(void *memory) {
    alive -= memory != NULL;
    (free)(memory);
}
#define calloc(count, bytes) counting_calloc(count, bytes)
#define posix_memalign(out, alignment, bytes) counting_memalign(out, alignment, bytes)
#define free counting_free /* also renames the member of an allocator, consistently in all places */

#define MT_USE_MPI
#define MEGATRON_IMPLEMENTATION
#include "mt_parallel.h"
#undef calloc
#undef posix_memalign
#undef free
#define MT_TEST_OVER_MPI
#include "mt_test.h"

#include <sys/wait.h>

/* ---- between the library and MPI, by MPI's profiling interface --------------------------------------------------- */

static double slow;   /* seconds that this rank sleeps while the messages of a call are being sent */
static int pretends;  /* 1: MPI is not initialised yet, and supports no threads */
static int finalized; /* number of MPI_Finalize calls since then */

static int asked; /* number of calls that ask MPI about a communicator */

int MPI_Comm_rank(MPI_Comm comm, int *rank) { return asked++, PMPI_Comm_rank(comm, rank); }
int MPI_Comm_size(MPI_Comm comm, int *size) { return asked++, PMPI_Comm_size(comm, size); }

int MPI_Testsome(int count, MPI_Request requests[], int *done, int indices[], MPI_Status statuses[]) {
    struct timespec nap = mti_timespec(slow);
    slow = 0;
    nanosleep(&nap, NULL);
    return PMPI_Testsome(count, requests, done, indices, statuses);
}

int MPI_Initialized(int *flag) {
    if (!pretends) return PMPI_Initialized(flag);
    *flag = 0;
    return MPI_SUCCESS;
}

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
    if (!pretends) return PMPI_Init_thread(argc, argv, required, provided);
    *provided = MPI_THREAD_SINGLE;
    return MPI_SUCCESS;
}

int MPI_Finalize(void) { return pretends ? finalized++, MPI_SUCCESS : PMPI_Finalize(); }

/* ------------------------------------------------------------------------------------------------------------------ */

static int me, ranks;

static mt_context *new_context(mt_comm *world) {
    mt_context_desc small = {.arena_bytes = (size_t)1 << 20};
    mt_context *ctx = NULL;
    assert_int_equal(mt_context_create(world, &small, &ctx), MT_SUCCESS);
    return ctx;
}

static mt_comm *new_world(MPI_Comm theirs, double timeout_s) {
    mt_comm *world = NULL;
    assert_int_equal(mt_comm_create_mpi(&theirs, timeout_s, &world), MT_SUCCESS);
    assert_non_null(world);
    return world;
}

/* ---- the caller's communicator ----------------------------------------------------------------------------------- */

/* The ranks are those of the caller's communicator, not of MPI_COMM_WORLD. Its messages and the library's are separate.
   The communicator is unchanged at the end. */
static void test_callers(void **state) {
    MPI_Comm theirs, near;
    MPI_Errhandler before, after;
    MPI_Request request;
    mt_comm *world;
    mt_context *ctx;
    int32_t all[4], mine = me, hello = 1000 + me, heard = 0, unequal, local, i;
    (void)state;
    MPI_Comm_split(MPI_COMM_WORLD, 0, -me, &theirs);
    MPI_Comm_get_errhandler(theirs, &before);
    MPI_Irecv(&heard, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, theirs, &request);
    world = new_world(theirs, TEST_NEVER_OVER);
    ctx = new_context(world);
    assert_int_equal(mt_comm_size(world), ranks);
    assert_int_equal(mt_comm_rank(world), ranks - 1 - me);
    MPI_Comm_split_type(theirs, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &near);
    MPI_Comm_rank(near, &local);
    MPI_Comm_free(&near);
    assert_int_equal(mt_comm_local_rank(world), local);
    assert_string_equal(mt_comm_name(world), "world");
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_gather(ctx, world, &mine, all, 1, MT_I32));
    for (i = 0; i < ranks; i++) assert_int_equal(all[i], ranks - 1 - i);
    mt_context_destroy(ctx);
    mt_comm_destroy(world);
    assert_int_equal(heard, 0);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Send(&hello, 1, MPI_INT, (ranks - me) % ranks, 7, theirs); /* to the next rank of `theirs` */
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    assert_int_equal(heard, 1000 + (me + 1) % ranks);
    MPI_Comm_get_errhandler(theirs, &after);
    assert_true(before == after);
    MPI_Comm_compare(theirs, MPI_COMM_WORLD, &unequal);
    assert_int_equal(unequal, MPI_SIMILAR);
    MPI_Errhandler_free(&before);
    MPI_Errhandler_free(&after);
    MPI_Comm_free(&theirs);
}

static void test_arguments(void **state) {
    MPI_Comm theirs = MPI_COMM_WORLD, null = MPI_COMM_NULL;
    mt_comm *world = (mt_comm *)(void *)&theirs;
    (void)state;
    assert_int_equal(mt_comm_create_mpi(&theirs, 1, NULL), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_create_mpi(NULL, 1, &world), MT_ERR_ARGUMENT);
    assert_null(world);
    assert_int_equal(mt_comm_create_mpi(&null, 1, &world), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_create_mpi(&theirs, strtod("nan", NULL), &world), MT_ERR_ARGUMENT);
}

/* A group of one rank can be freed, and does not use MPI. */
static void test_alone(void **state) {
    mt_comm *world = new_world(MPI_COMM_SELF, 1);
    mt_context *ctx = new_context(world);
    float x = 3, y = 0;
    (void)state;
    assert_int_equal(mt_comm_size(world), 1);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_reduce(ctx, world, &x, &y, 1, MT_F32, MT_SUM));
    assert_true(y == 3 && mt_comm_ledger(world).calls[MT_ALL_REDUCE] == 0);
    mt_context_destroy(ctx);
    mt_comm_destroy(world);
}

/* The other ranks do not take part in the creation. */
static void test_nobody_comes(void **state) {
    MPI_Comm theirs;
    mt_comm *world = NULL;
    (void)state;
    MPI_Comm_dup(MPI_COMM_WORLD, &theirs);
    if (me != 1) assert_int_equal(mt_comm_create_mpi(&theirs, 0.3, &world), MT_ERR_TIMEOUT);
    assert_null(world);
    MPI_Barrier(MPI_COMM_WORLD); /* `theirs` is not freed: its duplication has not ended */
}

/* Only contexts on the CPU are allowed: MPI cannot access the memory of others. */
static void test_device(void **state) {
    mt_comm *world = new_world(MPI_COMM_WORLD, TEST_NEVER_OVER);
    mt_context *ctx = new_context(world);
    float x = 1;
    (void)state;
    ctx->device = MT_DEVICE_CUDA; /* this program cannot create such a context */
    assert_int_equal(mti_link_call(ctx, world, &(mti_call){.kind = MT_BARRIER}), MT_ERR_UNSUPPORTED);
    assert_non_null(strstr(mt_last_error(ctx), "barrier: \"world\" (4 ranks) is over MPI"));
    assert_non_null(strstr(mt_last_error(ctx), "use mt_comm_create_for"));
    ctx->device = MT_DEVICE_META;
    assert_int_equal(mt_all_reduce(ctx, world, &x, &x, 1, MT_F32, MT_SUM), MT_ERR_ARGUMENT);
    ctx->device = MT_DEVICE_CPU;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_reduce(ctx, world, &x, &x, 1, MT_F32, MT_SUM));
    assert_true(x == 4);
    mt_context_destroy(ctx);
    mt_comm_destroy(world);
}

/* ---- more than fits into one piece, or one message --------------------------------------------------------------- */

static uint32_t element(int rank, size_t i) { return (uint32_t)((i + 1) * 2654435761u) ^ (uint32_t)(rank * 40503); }

static void fill(uint32_t *x, int rank, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = element(rank, i);
}

static uint32_t sum_of(size_t i) {
    uint32_t sum = 0;
    for (int r = 0; r < ranks; r++) sum += element(r, i);
    return sum;
}

static void large_reductions(mt_context *ctx, mt_comm *world, uint32_t *a, uint32_t *b, size_t n) {
    fill(a, me, n);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_reduce(ctx, world, a, b, n, MT_I32, MT_SUM));
    for (size_t i = 0; i < n; i++)
        if (b[i] != sum_of(i)) fail_msg("all_reduce: element %zu of %zu", i, n);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_reduce(ctx, world, a, a, n, MT_I32, MT_SUM));
    assert_memory_equal(a, b, n * 4);
    n /= (size_t)ranks;
    fill(a, me, n * (size_t)ranks);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_reduce_scatter(ctx, world, a, b, n, MT_I32, MT_SUM));
    for (size_t i = 0; i < n; i++)
        if (b[i] != sum_of(n * (size_t)me + i)) fail_msg("reduce_scatter: element %zu of %zu", i, n);
}

/* The elements that a rank sends another one. */
static size_t block_of(size_t n, int from, int to) { return from == to ? 1 : (from + to) % 3 ? n : n / 3; }

static void large_blocks(mt_context *ctx, mt_comm *world, const uint32_t *a, uint32_t *b, size_t n) {
    size_t sends[16], recvs[16], at = 0;
    assert_true(ranks <= 16);
    for (int r = 0; r < ranks; r++) sends[r] = block_of(n, me, r), recvs[r] = block_of(n, r, me);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_to_all_v(ctx, world, a, sends, b, recvs, MT_I32));
    for (int r = 0; r < ranks; at += recvs[r++]) {
        size_t first = 0;
        for (int to = 0; to < me; to++) first += block_of(n, r, to);
        for (size_t i = 0; i < recvs[r]; i++)
            if (b[at + i] != element(r, first + i)) fail_msg("all_to_all_v: element %zu of rank %d", i, r);
    }
}

static void large_copies(mt_context *ctx, mt_comm *world, uint32_t *a, uint32_t *b, size_t n) {
    int next = (me + 1) % ranks, last = (me + ranks - 1) % ranks;
    fill(a, me, n);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_broadcast(ctx, world, a, b, n, MT_I32, 2));
    for (size_t i = 0; i < n; i++)
        if (b[i] != element(2, i)) fail_msg("broadcast: element %zu of %zu", i, n);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_send_recv(ctx, world, a, n, next, b, n, last, MT_I32));
    for (size_t i = 0; i < n; i++)
        if (b[i] != element(last, i)) fail_msg("send_recv: element %zu of %zu", i, n);
    ASSERT_STATUS(ctx, MT_SUCCESS,
                  mt_send_recv(ctx, world, a, n, me ^ 1, b, n, me ^ 1, MT_I32)); /* the same peer in both directions */
    for (size_t i = 0; i < n; i++)
        if (b[i] != element(me ^ 1, i)) fail_msg("exchange: element %zu of %zu", i, n);
    n /= (size_t)ranks;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_gather(ctx, world, a, b, n, MT_I32));
    for (size_t i = 0; i < n * (size_t)ranks; i++)
        if (b[i] != element((int)(i / n), i % n)) fail_msg("all_gather: element %zu of %zu", i, n);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_to_all(ctx, world, a, b, n, MT_I32));
    for (size_t i = 0; i < n * (size_t)ranks; i++)
        if (b[i] != element((int)(i / n), n * (size_t)me + i % n)) fail_msg("all_to_all: element %zu of %zu", i, n);
    large_blocks(ctx, world, a, b, n);
}

static void test_large(void **state) {
    static const size_t bytes[] = {MTI_LINK_SCRATCH, MTI_LINK_MESSAGE};
    mt_comm *world = new_world(MPI_COMM_WORLD, TEST_NEVER_OVER);
    mt_context *ctx = new_context(world);
    size_t most = 4 * (MTI_LINK_MESSAGE + 4096);
    uint32_t *a = (uint32_t *)malloc(most), *b = (uint32_t *)malloc(most);
    int before = allocations;
    (void)state;
    assert_true(a && b);
    for (int k = 0; k < 2; k++) {
        size_t n = bytes[k] / 4;
        for (int more = -1; more <= 1; more++) large_reductions(ctx, world, a, b, (k ? n / 2 : n) + (size_t)(4 * more));
        large_copies(ctx, world, a, b, n - 4);
        large_copies(ctx, world, a, b, n + 4);
    }
    large_copies(ctx, world, a, b, 4 * (bytes[1] / 4 + 36)); /* blocks larger than a message */
    assert_int_equal(allocations, before);
    free(a);
    free(b);
    mt_context_destroy(ctx);
    mt_comm_destroy(world);
}

/* Every message size around the number of bytes that fit in the header message. */
static void test_small(void **state) {
    mt_comm *world = new_world(MPI_COMM_WORLD, TEST_NEVER_OVER);
    mt_context *ctx = new_context(world);
    static uint32_t a[2048], b[2048];
    int before = allocations;
    (void)state;
    for (size_t n = MTI_LINK_SMALL / 4 - 8; n < MTI_LINK_SMALL / 4 + 9; n += 4) {
        large_reductions(ctx, world, a, b, n);
        large_copies(ctx, world, a, b, n);
    }
    assert_int_equal(allocations, before);
    mt_context_destroy(ctx);
    mt_comm_destroy(world);
}

/* ---- groups ------------------------------------------------------------------------------------------------------ */

/* Compares the members of a group with the description of the grid. */
static void check_group(mt_context *ctx, const mt_grid_desc *shape, mt_group group, mt_comm *comm) {
    int expected[4], count = 0;
    int32_t all[4], mine = me;
    assert_int_equal(mt_grid_ranks(shape, ranks, group, me, expected, &count), MT_SUCCESS);
    if (!comm) assert_true(count == 0);
    if (!comm) return;
    assert_int_equal(mt_comm_size(comm), count);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_gather(ctx, comm, &mine, all, 1, MT_I32));
    for (int i = 0; i < count; i++) assert_int_equal(all[i], expected[i]);
}

static void test_grids(void **state) {
    static const mt_grid_desc shapes[] = {{.tp = 4},          {.tp = 2},          {.tp = 1},
                                          {.tp = 2, .pp = 2}, {.tp = 1, .pp = 4}, {.tp = 1, .pp = 2},
                                          {.cp = 4},          {.cp = 2},          {.tp = 2, .cp = 2}};
    mt_comm *world = new_world(MPI_COMM_WORLD, TEST_NEVER_OVER);
    mt_context *ctx = new_context(world);
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        mt_grid grid;
        assert_int_equal(mt_grid_create(world, &shapes[i], &grid), MT_SUCCESS);
        check_group(ctx, &shapes[i], MT_GROUP_TENSOR, grid.tp);
        check_group(ctx, &shapes[i], MT_GROUP_DATA, grid.dp);
        check_group(ctx, &shapes[i], MT_GROUP_PIPELINE, grid.pp);
        check_group(ctx, &shapes[i], MT_GROUP_MODEL, grid.model);
        check_group(ctx, &shapes[i], MT_GROUP_EMBEDDING, grid.embedding);
        check_group(ctx, &shapes[i], MT_GROUP_CONTEXT, grid.cp);
        check_group(ctx, &shapes[i], MT_GROUP_DATA_CONTEXT, grid.dp_cp);
        mt_grid_destroy(&grid);
    }
    mt_context_destroy(ctx);
    mt_comm_destroy(world);
}

/* Groups are created and destroyed, at different times on different ranks. Their numbers are not reused. */
static void test_many_groups(void **state) {
    mt_comm *world = new_world(MPI_COMM_WORLD, TEST_NEVER_OVER), *kept[8] = {NULL};
    mt_context *ctx = new_context(world);
    (void)state;
    for (int k = 0; k < 400; k++) {
        int32_t one = 1, sum = 0;
        int color = (me * 7 + k) % 3 - (k % 5 == 0), slot = (me + k) % 8;
        mt_comm_destroy(kept[slot]);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_comm_split(world, color, k % 2 ? me : -me, &kept[slot]));
        if (!kept[slot]) continue;
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_reduce(ctx, kept[slot], &one, &sum, 1, MT_I32, MT_SUM));
        assert_int_equal(sum, mt_comm_size(kept[slot]));
    }
    assert_true(world->link->port->references <= 9);
    for (int k = 0; k < 8; k++) mt_comm_destroy(kept[k]);
    mt_context_destroy(ctx);
    mt_comm_destroy(world);
}

/* A tag can number a limited number of groups. The next one is refused. */
static void test_last_group(void **state) {
    mt_comm *world = new_world(MPI_COMM_WORLD, TEST_NEVER_OVER), *group = NULL;
    mti_port *port = world->link->port;
    (void)state;
    if (me == 2) port->next = port->last_tag / 4 - 1;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_comm_split(world, 0, 0, &group));
    assert_true(mti_link_tag(group->link, MTI_LINK_DATA) <= port->last_tag);
    mt_comm_destroy(group);
    assert_int_equal(mt_comm_split(world, 0, 0, &group), MT_ERR_UNSUPPORTED);
    assert_non_null(strstr(mt_comm_last_error(world), "more than the tags"));
    mt_comm_destroy(world);
}

/* Two worlds of the same ranks, used alternately, destroyed in another order than created. */
static void test_two_worlds(void **state) {
    mt_comm *a = new_world(MPI_COMM_WORLD, TEST_NEVER_OVER), *b = new_world(MPI_COMM_WORLD, TEST_NEVER_OVER);
    mt_context *ctx = new_context(NULL);
    (void)state;
    for (int32_t k = 0; k < 50; k++) {
        int32_t x = me + k, y = -me - k;
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_reduce(ctx, k % 2 ? a : b, &x, &x, 1, MT_I32, MT_MAX));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_reduce(ctx, k % 2 ? b : a, &y, &y, 1, MT_I32, MT_MAX));
        assert_true(x == ranks - 1 + k && y == -k);
    }
    mt_comm_destroy(a);
    mt_comm_destroy(b);
    mt_context_destroy(ctx);
}

/* Many worlds: each is freed. */
static void test_many_worlds(void **state) {
    int before = alive;
    (void)state;
    for (int k = 0; k < 300; k++) {
        mt_comm *world = new_world(MPI_COMM_WORLD, TEST_NEVER_OVER), *group = NULL;
        ASSERT_STATUS(NULL, MT_SUCCESS, mt_comm_split(world, k % 2 ? 0 : me / 2, 0, &group));
        if (k % 3) mt_comm_destroy(world); /* the group is destroyed after its world */
        mt_comm_destroy(group);
        if (k % 3 == 0) mt_comm_destroy(world);
    }
    assert_int_equal(alive, before);
}

/* A call on one group does not match a call on another, even if both groups have the same ranks. */
static mt_status other_group(mt_comm *world, void *user) {
    mt_context *ctx;
    mt_comm *pair = NULL;
    mt_status status;
    (void)user;
    MT_TRY(mt_context_create(world, &(mt_context_desc){.arena_bytes = 4096}, &ctx));
    MT_TRY(mt_comm_split(world, mt_comm_rank(world) < 2, 0, &pair));
    world->group->timeout = pair->group->timeout = 0.3; /* only of the barrier: a rank may come late to the split */
    status = mt_barrier(ctx, mt_comm_rank(world) == 0 ? pair : world);
    CHECK(status == MT_ERR_TIMEOUT || status == MT_ERR_PEER);
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

/* ---- ends -------------------------------------------------------------------------------------------------------- */

static void test_other_group(void **state) {
    mt_launch_desc d = {.ranks = 4, .timeout_s = TEST_NEVER_OVER, .logger = {test_quiet, NULL}};
    (void)state;
    assert_int_equal(test_run(&d, other_group, NULL, 0), MT_SUCCESS);
}

/* A rank leaves right after a split, before other ranks have used the new group. They still learn of it. */
static mt_status leaves_early(mt_comm *world, void *user) {
    mt_context *ctx;
    mt_comm *group = NULL;
    struct timespec nap = mti_timespec(mt_comm_rank(world) == 0 ? 0.02 : 0);
    mt_status status;
    (void)user;
    MT_TRY(mt_context_create(world, &(mt_context_desc){.arena_bytes = 4096}, &ctx));
    MT_TRY(mt_comm_split(world, 0, 0, &group));
    nanosleep(&nap, NULL);
    status = mt_comm_rank(world) == 2 ? MT_ERR_IO : mt_barrier(ctx, group);
    CHECK(mt_comm_rank(world) == 2 || status == MT_ERR_PEER);
    CHECK(mt_comm_rank(world) == 2 || strstr(mt_last_error(ctx), "rank 2 failed with MT_ERR_IO"));
    mt_context_destroy(ctx);
    return status;
}

static void test_leaves_early(void **state) {
    mt_launch_desc d = {.ranks = 4, .timeout_s = TEST_NEVER_OVER, .logger = {test_quiet, NULL}};
    (void)state;
    for (int k = 0; k < 20; k++)
        assert_int_equal(test_run(&d, leaves_early, NULL, 0), MT_ERR_IO); /* the same status on all ranks */
}

/* Ranks leave a group, or break it, while this rank is still in the split that creates it. */
static mt_status slow_split(mt_comm *world, void *user) {
    int size = *(const int *)user, rank = mt_comm_rank(world), mine = rank < size;
    mt_context *ctx;
    mt_comm *group = NULL;
    mt_status status = MT_SUCCESS;
    MT_TRY(mt_context_create(world, &(mt_context_desc){.arena_bytes = 4096}, &ctx));
    MT_TRY(mt_barrier(ctx, world));
    if (rank == 0) slow = 0.1;
    MT_TRY(mt_comm_split(world, mine ? 0 : -1, 0, &group));
    if (mine && rank < size - 1) status = mt_barrier(ctx, group); /* the last of them leaves at once */
    mt_comm_destroy(group);
    CHECK(!mine || rank == size - 1 || status == MT_ERR_PEER);
    status = mt_barrier(ctx, world); /* the world still works */
    mt_context_destroy(ctx);
    return status;
}

static void test_slow_split(void **state) {
    mt_launch_desc d = {.ranks = 4, .timeout_s = TEST_NEVER_OVER, .logger = {test_quiet, NULL}};
    (void)state;
    for (int k = 0; k < 4; k++) {
        int size = 2 + k % 3;
        assert_int_equal(test_run(&d, slow_split, &size, sizeof size), MT_SUCCESS);
    }
}

typedef struct ending {
    double nap, timeout; /* of rank 3, and with which the others wait for it */
} ending;

/* A rank that has finished waits for the others, but only for the timeout. A late rank gets an error. */
static mt_status slow_end(mt_comm *world, void *user) {
    const ending *e = (const ending *)user;
    struct timespec nap = mti_timespec(mt_comm_rank(world) == 3 ? e->nap : 0);
    if (mt_comm_rank(world) != 3) world->link->port->timeout = e->timeout;
    nanosleep(&nap, NULL);
    return MT_SUCCESS;
}

/* When the others are so slow that rank 3 is not late, it sleeps longer. */
static void test_slow_end(void **state) {
    ending e = {0.4, TEST_NEVER_OVER};
    mt_launch_desc d = {.ranks = 4, .timeout_s = TEST_NEVER_OVER, .logger = {test_quiet, NULL}};
    (void)state;
    assert_int_equal(test_run(&d, slow_end, &e, 0), MT_SUCCESS);
    e.timeout = 0.1;
    while (test_run(&d, slow_end, &e, 0) != MT_ERR_TIMEOUT && e.nap < 60) e.nap *= 2;
    assert_true(e.nap < 60);
}

static void keep_text(void *user, mt_log_level level, const char *message) {
    (void)level;
    snprintf((char *)user, 256, "%s", message);
}

static void test_threads_not_allowed(void **state) {
    char text[256] = "";
    mt_launch_desc d = {.logger = {keep_text, text}};
    (void)state;
    pretends = 1;
    assert_int_equal(mti_mpi_world(&d, slow_end, NULL), MT_ERR_UNSUPPORTED);
    pretends = 0;
    assert_string_equal(text, "mt_world_from_env: this MPI allows no threads: MPI_Init_thread provides 0, not "
                              "MPI_THREAD_FUNNELED (1)");
    assert_int_equal(finalized, 1);
}

/* A process that rank 1 forks is no rank: it returns from the function without a word to MPI. */
typedef struct forking {
    pid_t parent, child;
} forking;

static mt_status forks(mt_comm *world, void *user) {
    forking *f = (forking *)user;
    mt_context *ctx = new_context(world);
    mt_comm *pair = NULL, *out = NULL;
    float x = 1;
    MT_TRY(mt_comm_split(world, mt_comm_rank(world) / 2, 0, &pair));
    if (mt_comm_rank(world) == 1) {
        fflush(NULL);
        f->child = fork();
        if (f->child == 0) {
            alarm(600); /* ends a process that hangs */
            CHECK(mt_all_reduce(ctx, pair, &x, &x, 1, MT_F32, MT_SUM) == MT_ERR_UNSUPPORTED);
            CHECK(strstr(mt_last_error(ctx), "was forked"));
            CHECK(mt_send(ctx, world, &x, 1, MT_F32, 0) == MT_ERR_UNSUPPORTED);
            CHECK(mt_comm_split(world, 0, 0, &out) == MT_ERR_UNSUPPORTED && !out);
            mt_comm_destroy(pair);
            mt_context_destroy(ctx);
            return MT_ERR_IO;
        }
    }
    MT_TRY(mt_all_reduce(ctx, pair, &x, &x, 1, MT_F32, MT_SUM));
    MT_TRY(mt_all_reduce(ctx, world, &x, &x, 1, MT_F32, MT_SUM));
    mt_comm_destroy(pair);
    mt_context_destroy(ctx);
    return x == 8 ? MT_SUCCESS : MT_ERR_DATA;
}

static void test_forked(void **state) {
    forking f = {getpid(), -1};
    mt_launch_desc d = {.ranks = 4, .logger = {test_quiet, NULL}};
    mt_status status = mti_mpi_world(&d, forks, &f);
    int code = 0;
    (void)state;
    if (getpid() != f.parent) _exit(status == MT_ERR_IO ? 0 : 1);
    assert_int_equal(status, MT_SUCCESS);
    if (f.child < 0) return;
    assert_int_equal(waitpid(f.child, &code, 0), f.child);
    assert_true(WIFEXITED(code));
    assert_int_equal(WEXITSTATUS(code), 0);
}

static mt_status never(mt_comm *world, void *user) {
    (void)world;
    ++*(int *)user;
    return MT_SUCCESS;
}

/* In a forked process: 0, or the number of the check that fails. */
static int connects_nowhere(FILE *said) {
    const mt_launch_desc d = {.ranks = 4};
    MPI_Comm theirs[] = {MPI_COMM_WORLD, MPI_COMM_SELF};
    char numbers[64], text[2048];
    int calls = 0;
    alarm(60); /* ends a process that hangs */
    asked = 0;
    if (dup2(fileno(said), 2) != 2) return 1;
    for (int i = 0; i < 2; i++) {
        mt_comm *world = (mt_comm *)(void *)&calls;
        if (mt_comm_create_mpi(&theirs[i], 1, &world) != MT_ERR_UNSUPPORTED || world) return 2;
    }
    if (mti_mpi_world(&d, never, &calls) != MT_ERR_UNSUPPORTED || calls != 0) return 3;
    if (asked != 0) return 4;
    rewind(said);
    text[fread(text, 1, sizeof text - 1, said)] = '\0';
    snprintf(numbers, sizeof numbers, "process %ld was forked from process %ld,", (long)getpid(), (long)getppid());
    if (!strstr(text, "mt_comm_create_mpi: process ") || !strstr(text, "mt_world_from_env: process ")) return 5;
    return strstr(text, numbers) ? 0 : 6;
}

/* A process that a rank forks, and a child of it, cannot connect to the ranks, whether or not the rank has a world. The
   rank still can. */
static void test_forked_before_it_connects(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        mt_comm *world = i % 2 ? new_world(MPI_COMM_WORLD, TEST_NEVER_OVER) : NULL;
        FILE *said = tmpfile();
        int code = 0;
        pid_t child;
        assert_non_null(said);
        fflush(NULL);
        child = fork();
        if (child == 0 && i >= 2 && (child = fork()) != 0)
            _exit(waitpid(child, &code, 0) == child && WIFEXITED(code) ? WEXITSTATUS(code) : 99);
        if (child == 0) _exit(connects_nowhere(said));
        assert_int_equal(waitpid(child, &code, 0), child);
        assert_true(WIFEXITED(code));
        assert_int_equal(WEXITSTATUS(code), 0);
        fclose(said);
        mt_comm_destroy(world);
        mt_comm_destroy(new_world(MPI_COMM_WORLD, TEST_NEVER_OVER));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_callers),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_nobody_comes),
        cmocka_unit_test(test_device),
        cmocka_unit_test(test_large),
        cmocka_unit_test(test_small),
        cmocka_unit_test(test_grids),
        cmocka_unit_test(test_many_groups),
        cmocka_unit_test(test_last_group),
        cmocka_unit_test(test_two_worlds),
        cmocka_unit_test(test_many_worlds),
        cmocka_unit_test(test_leaves_early),
        cmocka_unit_test(test_slow_end),
        cmocka_unit_test(test_other_group),
        cmocka_unit_test(test_slow_split),
        cmocka_unit_test(test_threads_not_allowed),
        cmocka_unit_test(test_forked),
        cmocka_unit_test(test_forked_before_it_connects),
    };
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
