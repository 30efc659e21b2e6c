/* test_comm.c - tests contexts, communicators, collectives and the conjugate functions of mt_comm.h, without faults.
   Every result of a collective is compared bit for bit with a reference computed from the definition. */

#define MEGATRON_IMPLEMENTATION
#include "mt_comm.h"
#include "mt_test.h"

#include <limits.h>

static mt_context_desc small(void) {
    mt_context_desc d;
    memset(&d, 0, sizeof d);
    d.arena_bytes = (size_t)1 << 20;
    return d;
}

/* `bytes` is the size of `user` if the ranks write there, else 0. */
static mt_status run_ranks_with(int ranks, mt_rank_function f, void *user, size_t bytes) {
    mt_launch_desc d;
    memset(&d, 0, sizeof d);
    d.ranks = ranks;
    d.timeout_s = TEST_NEVER_OVER;
    return test_run(&d, f, user, bytes);
}

static mt_status run_ranks(int ranks, mt_rank_function f, void *user) { return run_ranks_with(ranks, f, user, 0); }

/* ---- reference --------------------------------------------------------------------------------------------------- */

/* Element i of a rank's input in experiment `salt`. */
static uint64_t word(uint64_t salt, int rank, size_t i) {
    uint64_t state = salt * 1000003u + (uint64_t)rank * 0x123456789u + (uint64_t)i * 0x9e3779b9u;
    return test_random(&state);
}

static float word_f32(uint64_t salt, int rank, size_t i) {
    uint64_t state = word(salt, rank, i);
    return test_float(&state);
}

/* Uses the library's conversion, which test_kernels_16bit.c compares with the definition of both formats. */
static uint16_t to_half(mt_dtype dtype, float x) {
    uint16_t h;
    mt_f32_to_16bit(dtype, &x, &h, 1);
    return h;
}

static uint16_t word_half(mt_dtype dtype, uint64_t salt, int rank, size_t i) {
    return to_half(dtype, word_f32(salt, rank, i));
}

static void fill(void *buf, mt_dtype dtype, uint64_t salt, int rank, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) {
        if (dtype == MT_F32) ((float *)buf)[i] = word_f32(salt, rank, i);
        if (mt_dtype_is_16bit(dtype)) ((uint16_t *)buf)[i] = word_half(dtype, salt, rank, i);
        if (dtype == MT_I32) ((uint32_t *)buf)[i] = (uint32_t)word(salt, rank, i);
        if (dtype == MT_U8) ((uint8_t *)buf)[i] = (uint8_t)word(salt, rank, i);
    }
}

/* Returns 1 if got[0, n) are elements [first, first + n) of a rank's input. */
static int is_input(const void *got, mt_dtype dtype, uint64_t salt, int rank, size_t first, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) {
        uint64_t w = word(salt, rank, first + i);
        float f = word_f32(salt, rank, first + i);
        if (dtype == MT_F32 && memcmp((const float *)got + i, &f, 4)) return 0;
        if (mt_dtype_is_16bit(dtype) && ((const uint16_t *)got)[i] != to_half(dtype, f)) return 0;
        if (dtype == MT_I32 && ((const uint32_t *)got)[i] != (uint32_t)w) return 0;
        if (dtype == MT_U8 && ((const uint8_t *)got)[i] != (uint8_t)w) return 0;
    }
    return 1;
}

/* Sums in the library's order: ((0+1)+(2+3))+..., split at the largest power of two below the number of ranks. */
static int halve(int ranks) {
    int half = 1;
    while (2 * half < ranks) half *= 2;
    return half;
}

static float tree_f32(mt_dtype dtype, uint64_t salt, int first, int ranks, size_t i, mt_op op) {
    float a, b;
    uint16_t h;
    if (ranks == 1 && dtype == MT_F32) return word_f32(salt, first, i);
    if (ranks == 1) {
        h = word_half(dtype, salt, first, i);
        mt_f32_from_16bit(dtype, &h, &a, 1);
        return a;
    }
    a = tree_f32(dtype, salt, first, halve(ranks), i, op);
    b = tree_f32(dtype, salt, first + halve(ranks), ranks - halve(ranks), i, op);
    return op == MT_SUM ? a + b : a > b ? a : b;
}

static uint32_t tree_i32(uint64_t salt, int ranks, size_t i, mt_op op) {
    uint32_t sum = 0;
    int32_t max = INT32_MIN;
    int r;
    for (r = 0; r < ranks; r++) {
        uint32_t w = (uint32_t)word(salt, r, i);
        sum += w;
        if ((int32_t)w > max) max = (int32_t)w;
    }
    return op == MT_SUM ? sum : (uint32_t)max;
}

static int is_reduced(const void *got, mt_dtype dtype, uint64_t salt, int ranks, size_t first, size_t n, mt_op op) {
    size_t i;
    for (i = 0; i < n; i++) {
        float f = dtype == MT_I32 ? 0 : tree_f32(dtype, salt, 0, ranks, first + i, op);
        if (dtype == MT_F32 && memcmp((const float *)got + i, &f, 4)) return 0;
        /* the sum is rounded once */
        if (mt_dtype_is_16bit(dtype) && ((const uint16_t *)got)[i] != to_half(dtype, f)) return 0;
        if (dtype == MT_I32 && ((const uint32_t *)got)[i] != tree_i32(salt, ranks, first + i, op)) return 0;
    }
    return 1;
}

/* ---- collectives: sizes x counts x dtypes x ops x in and out of place -------------------------------------------- */

static const size_t counts[] = {0, 1, 3, 17, 1000, 10007, 100003};
static const mt_dtype dtypes[] = {MT_F32, MT_BF16, MT_F16, MT_I32, MT_U8};
static const int sizes[] = {1, 2, 3, 4, 8};
#define COUNTOF(a) (sizeof(a) / sizeof *(a))

typedef struct experiment {
    mt_context *ctx;
    mt_comm *comm;
    void *a, *b; /* ranks * count elements each */
    size_t count, element;
    mt_dtype dtype;
    int in_place, rank, ranks;
    uint64_t salt;
} experiment;

static mt_status try_all_reduce(experiment *e, mt_op op) {
    void *recv = e->in_place ? e->a : e->b;
    fill(e->a, e->dtype, e->salt, e->rank, e->count);
    MT_TRY(mt_all_reduce(e->ctx, e->comm, e->a, recv, e->count, e->dtype, op));
    CHECK(is_reduced(recv, e->dtype, e->salt, e->ranks, 0, e->count, op));
    CHECK(e->in_place || is_input(e->a, e->dtype, e->salt, e->rank, 0, e->count));
    return MT_SUCCESS;
}

static mt_status try_reduce_scatter(experiment *e, mt_op op) {
    size_t mine = e->count * (size_t)e->rank;
    void *recv = e->in_place ? (char *)e->a + mine * e->element : e->b;
    fill(e->a, e->dtype, e->salt, e->rank, e->count * (size_t)e->ranks);
    MT_TRY(mt_reduce_scatter(e->ctx, e->comm, e->a, recv, e->count, e->dtype, op));
    CHECK(is_reduced(recv, e->dtype, e->salt, e->ranks, mine, e->count, op));
    if (e->in_place) CHECK(is_input(e->a, e->dtype, e->salt, e->rank, 0, mine));
    else CHECK(is_input(e->a, e->dtype, e->salt, e->rank, 0, e->count * (size_t)e->ranks));
    return MT_SUCCESS;
}

static mt_status try_all_gather(experiment *e) {
    void *send = e->in_place ? (char *)e->b + e->count * (size_t)e->rank * e->element : e->a;
    int r;
    fill(send, e->dtype, e->salt, e->rank, e->count);
    MT_TRY(mt_all_gather(e->ctx, e->comm, send, e->b, e->count, e->dtype));
    for (r = 0; r < e->ranks; r++)
        CHECK(is_input((char *)e->b + e->count * (size_t)r * e->element, e->dtype, e->salt, r, 0, e->count));
    return MT_SUCCESS;
}

static mt_status try_broadcast(experiment *e) {
    int root = (int)(e->salt % (uint64_t)e->ranks);
    void *recv = e->in_place ? e->a : e->b;
    fill(e->a, e->dtype, e->salt, e->rank, e->count);
    MT_TRY(mt_broadcast(e->ctx, e->comm, e->rank == root ? e->a : NULL, recv, e->count, e->dtype, root));
    CHECK(is_input(recv, e->dtype, e->salt, root, 0, e->count));
    return MT_SUCCESS;
}

static mt_status try_all_to_all(experiment *e) {
    size_t all = e->count * (size_t)e->ranks;
    int r;
    fill(e->a, e->dtype, e->salt, e->rank, all);
    MT_TRY(mt_all_to_all(e->ctx, e->comm, e->a, e->b, e->count, e->dtype));
    for (r = 0; r < e->ranks; r++)
        CHECK(is_input((char *)e->b + e->count * (size_t)r * e->element, e->dtype, e->salt, r,
                       e->count * (size_t)e->rank, e->count));
    CHECK(is_input(e->a, e->dtype, e->salt, e->rank, 0, all));
    return MT_SUCCESS;
}

/* The elements that a rank sends another one: at most e->count, none for one pair in four. */
static size_t count_of(const experiment *e, int from, int to) {
    uint64_t w = word(e->salt + 77, from, (size_t)to);
    return w % 4 == 0 ? 0 : (size_t)(w >> 8) % (e->count + 1);
}

/* The buffers end behind the last block. */
static mt_status try_all_to_all_v(experiment *e) {
    size_t sends[8], recvs[8], first = 0, skip = 0;
    int r, s;
    for (r = 0; r < e->ranks; r++) sends[r] = count_of(e, e->rank, r), first += sends[r];
    for (r = 0; r < e->ranks; r++) recvs[r] = count_of(e, r, e->rank);
    fill(e->a, e->dtype, e->salt, e->rank, first);
    MT_TRY(mt_all_to_all_v(e->ctx, e->comm, e->a, sends, e->b, recvs, e->dtype));
    CHECK(is_input(e->a, e->dtype, e->salt, e->rank, 0, first));
    for (r = 0, first = 0; r < e->ranks; first += recvs[r++]) {
        for (s = 0, skip = 0; s < e->rank; s++) skip += count_of(e, r, s);
        CHECK(is_input((char *)e->b + first * e->element, e->dtype, e->salt, r, skip, recvs[r]));
    }
    return MT_SUCCESS;
}

static mt_status try_everything(experiment *e) {
    e->salt++;
    MT_TRY(try_all_gather(e));
    if (!e->in_place) MT_TRY(try_all_to_all(e));
    if (!e->in_place) MT_TRY(try_all_to_all_v(e));
    MT_TRY(try_broadcast(e));
    if (e->dtype == MT_U8) return MT_SUCCESS;
    MT_TRY(try_all_reduce(e, MT_SUM));
    MT_TRY(try_all_reduce(e, MT_MAX));
    MT_TRY(try_reduce_scatter(e, MT_SUM));
    return try_reduce_scatter(e, MT_MAX);
}

static mt_status sweep_rank(mt_comm *world, void *user) {
    mt_context_desc d = small();
    experiment e;
    size_t c, t;
    mt_status status = MT_SUCCESS;
    (void)user;
    memset(&e, 0, sizeof e);
    e.comm = world;
    e.rank = mt_comm_rank(world);
    e.ranks = mt_comm_size(world);
    MT_TRY(mt_context_create(world, &d, &e.ctx));
    for (c = 0; c < COUNTOF(counts) - !test_all(); c++) {
        e.count = counts[c];
        /* of the exact size, so that AddressSanitizer sees an access beyond the end */
        e.a = malloc(4 * counts[c] * (size_t)e.ranks + 4);
        e.b = malloc(4 * counts[c] * (size_t)e.ranks + 4);
        for (t = 0; t < COUNTOF(dtypes) && status == MT_SUCCESS; t++) {
            e.dtype = dtypes[t];
            e.element = mt_dtype_size(e.dtype);
            for (e.in_place = 0; e.in_place < 2 && status == MT_SUCCESS; e.in_place++) status = try_everything(&e);
        }
        free(e.a);
        free(e.b);
    }
    MT_KEEP(status, mt_barrier(e.ctx, world));
    mt_context_destroy(e.ctx);
    return status;
}

static void test_collectives(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < COUNTOF(sizes); i++) assert_int_equal(run_ranks(sizes[i], sweep_rank, NULL), MT_SUCCESS);
    for (i = 5; i < 8; i++) assert_int_equal(run_ranks((int)i, sweep_rank, NULL), MT_SUCCESS);
}

/* ---- order of additions, repeatability --------------------------------------------------------------------------- */

typedef struct order_case {
    float input[8], result[8][3];
} order_case;

static mt_status order_rank(mt_comm *world, void *user) {
    order_case *o = (order_case *)user;
    int rank = mt_comm_rank(world), k;
    mt_context_desc d = small();
    mt_context *ctx;
    mt_status status = MT_SUCCESS;
    MT_TRY(mt_context_create(world, &d, &ctx));
    for (k = 0; k < 3; k++) {
        o->result[rank][k] = o->input[rank];
        MT_KEEP(status, mt_all_reduce(ctx, world, &o->result[rank][k], &o->result[rank][k], 1, MT_F32, MT_SUM));
    }
    mt_context_destroy(ctx);
    return status;
}

/* Inputs whose sum depends on the order of the additions. */
static void test_tree_order(void **state) {
    const float x[8] = {1, 1e8f, -1e8f, 1,
                        3, 0.5f, -2,    0.25f}; /* a split into equal halves gives other sums for 3, 5, 6 and 7 ranks */
    float want[9];
    volatile float v01 = x[0] + x[1], v23 = x[2] + x[3], v45 = x[4] + x[5], v67 = x[6] + x[7], v0123 = v01 + v23,
                   v4567 = v45 + v67, v012 = v01 + x[2], v456 = v45 + x[6];
    int n, r, k;
    (void)state;
    want[2] = v01;
    want[3] = v012;
    want[4] = v0123;
    want[5] = v0123 + x[4];
    want[6] = v0123 + v45;
    want[7] = v0123 + v456;
    want[8] = v0123 + v4567;
    assert_true(want[4] != ((x[0] + x[1]) + x[2]) + x[3]); /* the inputs distinguish the orders */
    for (n = 2; n <= 8; n++) {
        order_case o;
        memset(&o, 0, sizeof o);
        memcpy(o.input, x, sizeof x);
        assert_int_equal(run_ranks_with(n, order_rank, &o, sizeof o), MT_SUCCESS);
        for (r = 0; r < n; r++)
            for (k = 0; k < 3; k++) assert_memory_equal(&o.result[r][k], &want[n], 4);
    }
}

static mt_status nan_rank(mt_comm *world, void *user) {
    const uint32_t bits = 0x7fc00000u;
    float nan_value;
    int rank = mt_comm_rank(world), size = mt_comm_size(world), i;
    mt_context_desc d = small();
    mt_context *ctx;
    float x[8];
    mt_status status;
    (void)user;
    MT_TRY(mt_context_create(world, &d, &ctx));
    memcpy(&nan_value, &bits, 4);
    for (i = 0; i < 8; i++) x[i] = i == rank ? nan_value : (float)rank;
    status = mt_all_reduce(ctx, world, x, x, 8, MT_F32, MT_MAX);
    mt_context_destroy(ctx);
    MT_TRY(status);
    for (i = 0; i < 8; i++) CHECK(i < size ? x[i] != x[i] : x[i] == (float)(size - 1));
    return MT_SUCCESS;
}

static void test_max_keeps_nan(void **state) {
    (void)state;
    assert_int_equal(run_ranks(2, nan_rank, NULL), MT_SUCCESS);
    assert_int_equal(run_ranks(5, nan_rank, NULL), MT_SUCCESS);
}

/* ---- refused all_to_all ------------------------------------------------------------------------------------------ */

static mt_status refuse(mt_context *ctx, mt_status status, const char *words) {
    CHECK(status == MT_ERR_ARGUMENT && strstr(mt_last_error(ctx), words));
    return MT_SUCCESS;
}

/* A rank that is refused has not joined the call, and may call again. */
static mt_status argument_rank(mt_comm *world, void *user) {
    mt_context_desc d = small();
    size_t rank = (size_t)mt_comm_rank(world), ones[2] = {1, 1}, own[2] = {1, 1}, huge[2] = {SIZE_MAX / 2, 1};
    float a[4] = {1, 2, 3, 4}, b[4] = {0};
    mt_context *ctx;
    (void)user;
    own[rank] = 2;
    MT_TRY(mt_context_create(world, &d, &ctx));
    MT_TRY(refuse(ctx, mt_all_to_all_v(ctx, world, a, NULL, b, ones, MT_F32), "mt_all_to_all_v: sendcounts is NULL"));
    MT_TRY(refuse(ctx, mt_all_to_all_v(ctx, world, a, ones, b, NULL, MT_F32), "mt_all_to_all_v: recvcounts is NULL"));
    MT_TRY(refuse(ctx, mt_all_to_all_v(ctx, world, a, own, b, ones, MT_F32),
                  " sends 2 elements to itself, and receives 1"));
    MT_TRY(refuse(ctx, mt_all_to_all_v(ctx, world, a, ones, b, huge, MT_F32),
                  "recvcounts[0] is 9223372036854775807, more"));
    MT_TRY(refuse(ctx, mt_all_to_all_v(ctx, world, NULL, ones, b, ones, MT_F32), "sendbuf is NULL, count is 2"));
    MT_TRY(refuse(ctx, mt_all_to_all(ctx, world, a, a, 2, MT_F32), "overlap"));
    MT_TRY(refuse(ctx, mt_all_to_all(ctx, world, a, a + 2, 2, MT_F32), "overlap"));
    MT_TRY(refuse(ctx, mt_all_to_all(ctx, world, a, b, SIZE_MAX / 2, MT_F32), "count is "));
    MT_TRY(mt_all_to_all(ctx, world, a, b, 2, MT_F32));
    CHECK(b[0] == a[2 * rank] && b[3] == a[2 * rank + 1]);
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

static void test_all_to_all_arguments(void **state) {
    (void)state;
    assert_int_equal(run_ranks(2, argument_rank, NULL), MT_SUCCESS);
}

/* ---- ledger, meta ------------------------------------------------------------------------------------------------ */

static mt_status everything_once(mt_context *ctx, mt_comm *comm, void *a, void *b) {
    int size = mt_comm_size(comm), rank = mt_comm_rank(comm), r;
    size_t sends[8] = {0}, recvs[8] = {0};
    MT_TRY(mt_all_reduce(ctx, comm, a, a, 10, MT_F32, MT_SUM));
    MT_TRY(mt_all_reduce(ctx, comm, a, b, 5, MT_I32, MT_MAX));
    MT_TRY(mt_all_gather(ctx, comm, a, b, 7, MT_F32));
    MT_TRY(mt_reduce_scatter(ctx, comm, a, b, 3, MT_F32, MT_SUM));
    MT_TRY(mt_broadcast(ctx, comm, a, b, 9, MT_U8, 0));
    MT_TRY(mt_all_to_all(ctx, comm, a, b, 2, MT_BF16));
    for (r = 0; r < size; r++) sends[r] = (size_t)(rank + 1), recvs[r] = (size_t)(r + 1);
    MT_TRY(mt_all_to_all_v(ctx, comm, a, sends, b, recvs, MT_F16));
    MT_TRY(mt_barrier(ctx, comm));
    MT_TRY(mt_send_recv(ctx, comm, a, 6, (rank + 1) % size, b, 6, (rank + size - 1) % size, MT_F32));
    if (size == 1) return MT_SUCCESS;
    if (rank == 0) return mt_send(ctx, comm, a, 2, MT_U8, 1);
    return rank == 1 ? mt_recv(ctx, comm, b, 2, MT_U8, 0) : MT_SUCCESS;
}

static mt_status check_ledger(const mt_comm *comm) {
    mt_ledger l = mt_comm_ledger(comm);
    uint64_t n = (uint64_t)mt_comm_size(comm), rank = (uint64_t)mt_comm_rank(comm), k;
    if (n == 1) {
        for (k = 0; k < MT_COLLECTIVE_COUNT; k++) CHECK(l.calls[k] == 0 && l.bytes[k] == 0);
        return MT_SUCCESS;
    }
    CHECK(l.calls[MT_ALL_REDUCE] == 2 && l.bytes[MT_ALL_REDUCE] == 60);
    CHECK(l.calls[MT_ALL_GATHER] == 1 && l.bytes[MT_ALL_GATHER] == n * 28);
    CHECK(l.calls[MT_REDUCE_SCATTER] == 1 && l.bytes[MT_REDUCE_SCATTER] == n * 12);
    CHECK(l.calls[MT_BROADCAST] == 1 && l.bytes[MT_BROADCAST] == 9);
    CHECK(l.calls[MT_ALL_TO_ALL] == 1 && l.bytes[MT_ALL_TO_ALL] == n * 4);
    CHECK(l.calls[MT_ALL_TO_ALL_V] == 1 && l.bytes[MT_ALL_TO_ALL_V] == n * (rank + 1) * 2);
    CHECK(l.calls[MT_BARRIER] == 1 && l.bytes[MT_BARRIER] == 0);
    CHECK(l.calls[MT_SEND] == 1 + (rank == 0) && l.bytes[MT_SEND] == 24 + (rank == 0 ? 2 : 0));
    CHECK(l.calls[MT_RECV] == 1 + (rank == 1) && l.bytes[MT_RECV] == 24 + (rank == 1 ? 2 : 0));
    return MT_SUCCESS;
}

static mt_status ledger_rank(mt_comm *world, void *user) {
    mt_context_desc d = small();
    mt_context *ctx;
    float a[64] = {0}, b[64] = {0};
    mt_status status;
    (void)user;
    MT_TRY(mt_context_create(world, &d, &ctx));
    status = everything_once(ctx, world, a, b);
    MT_KEEP(status, check_ledger(world));
    if (status == MT_SUCCESS && mt_all_reduce(ctx, world, NULL, a, 4, MT_F32, MT_SUM) != MT_ERR_ARGUMENT)
        status = MT_ERR_DATA;
    MT_KEEP(status, check_ledger(world)); /* a failed call is not counted */
    mt_comm_ledger_reset(world);
    if (mt_comm_ledger(world).calls[MT_ALL_REDUCE]) status = MT_ERR_DATA;
    mt_context_destroy(ctx);
    return status;
}

static void test_ledger(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < COUNTOF(sizes); i++) assert_int_equal(run_ranks(sizes[i], ledger_rank, NULL), MT_SUCCESS);
}

static void test_meta(void **state) {
    mt_context_desc d = small();
    mt_context *ctx;
    mt_comm *comm, *one;
    mt_ledger l;
    mt_tensor x, y;
    (void)state;
    d.device = MT_DEVICE_META;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_comm_create_meta(4, 1, &comm));
    assert_int_equal(mt_comm_size(comm), 4);
    assert_int_equal(mt_comm_rank(comm), 1);
    assert_true(mt_comm_is_meta(comm));
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(comm, &d, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_tensor(ctx, MT_F32, 1 << 20, 1 << 12, &x)); /* 16 GiB, not allocated */
    ASSERT_STATUS(ctx, MT_SUCCESS, everything_once(ctx, comm, x.data, (char *)x.data + 4096));
    l = mt_comm_ledger(comm);
    assert_int_equal(l.calls[MT_ALL_REDUCE], 2);
    assert_int_equal(l.bytes[MT_ALL_GATHER], 4 * 28);
    assert_int_equal(l.calls[MT_RECV], 2);
    y = mt_tensor_make(x.data, MT_F32, 1 << 20, 1 << 14);
    mt_arena_reset_peak(ctx);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_gather_from_tensor_region(ctx, comm, x, y));
    assert_int_equal(mt_comm_ledger(comm).bytes[MT_ALL_GATHER], 4 * 28 + (UINT64_C(4) << 34));
    assert_true(mt_arena_peak(ctx) >= (size_t)5 << 34); /* x and the gathered parts */
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_comm_create_meta(1, 0, &one));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_reduce(ctx, one, x.data, y.data, 10, MT_F32, MT_SUM));
    assert_int_equal(mt_comm_ledger(one).calls[MT_ALL_REDUCE], 0);
    mt_comm_destroy(one);
    mt_context_destroy(ctx);
    mt_comm_destroy(comm);
}

/* A meta context works on a real communicator of one rank and accesses no data. */
static void test_meta_alone(void **state) {
    mt_context_desc d = small();
    mt_context *ctx;
    mt_comm *comm;
    float a = 1, b = 2;
    (void)state;
    d.device = MT_DEVICE_META;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_comm_create_local(1, 0, &comm));
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_reduce(ctx, comm, &a, &b, 1, MT_F32, MT_SUM));
    assert_true(b == 2);
    mt_context_destroy(ctx);
    mt_comm_destroy(comm);
}

/* Threads whose contexts have no data: every call meets, is compared and counted, and moves nothing. */
static mt_status meta_thread(mt_comm *world, void *user) {
    mt_context_desc d = small();
    mt_context *ctx;
    mt_comm *half;
    int64_t mine = mt_comm_rank(world), all[8];
    float a[128], b[128];
    mt_status status;
    int i;
    (void)user;
    d.device = MT_DEVICE_META;
    for (i = 0; i < 128; i++) a[i] = b[i] = (float)mine;
    MT_TRY(mt_context_create(world, &d, &ctx));
    MT_TRY(everything_once(ctx, world, a, b));
    MT_TRY(check_ledger(world));
    for (i = 0; i < 128; i++) CHECK(a[i] == (float)mine && b[i] == (float)mine);
    CHECK(!mt_comm_is_meta(world));
    MT_TRY(mt_comm_gather_host(ctx, world, &mine, sizeof mine, all)); /* host memory is real */
    for (i = 0; i < mt_comm_size(world); i++) CHECK(all[i] == i);
    MT_TRY(check_ledger(world)); /* is not counted */
    MT_TRY(mt_comm_split(world, (int)mine % 2, 0, &half));
    MT_TRY(mt_all_reduce(ctx, half, a, a, 4, MT_F32, MT_SUM));
    mt_comm_destroy(half);
    if (mt_comm_size(world) > 1) {
        status =
            mine == 1 ? mt_all_gather(ctx, world, a, b, 4, MT_F32) : mt_all_reduce(ctx, world, a, b, 4, MT_F32, MT_SUM);
        CHECK(status == MT_ERR_MISMATCH && strstr(mt_last_error(ctx), "rank 1 called all_gather(count 4, f32)"));
    }
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

/* Rank 1 alone has no data: the others must not read its memory. */
static mt_status mixed_thread(mt_comm *world, void *user) {
    mt_context_desc d = small();
    mt_context *ctx;
    int kind = *(int *)user, rank = mt_comm_rank(world);
    float a[4] = {1, 2, 3, 4};
    mt_status status;
    if (rank == 1) d.device = MT_DEVICE_META;
    MT_TRY(mt_context_create(world, &d, &ctx));
    if (kind == 0) status = mt_all_reduce(ctx, world, a, a, 4, MT_F32, MT_SUM);
    else if (rank == 2) status = MT_ERR_MISMATCH;
    else if (rank == kind - 1) status = mt_send(ctx, world, a, 4, MT_F32, 1 - rank);
    else status = mt_recv(ctx, world, a, 4, MT_F32, 1 - rank);
    CHECK(status == MT_ERR_MISMATCH);
    if (rank < 2) CHECK(strstr(mt_last_error(ctx), "rank 1 is on MT_DEVICE_META, rank 0 is not"));
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

/* Processes have no contexts without data. */
static mt_status meta_process(mt_comm *world, void *user) {
    mt_context_desc d = small();
    mt_context *ctx;
    float a[4] = {0};
    (void)user;
    d.device = MT_DEVICE_META;
    MT_TRY(mt_context_create(world, &d, &ctx));
    CHECK(mt_all_reduce(ctx, world, a, a, 4, MT_F32, MT_SUM) == MT_ERR_ARGUMENT);
    CHECK(strstr(mt_last_error(ctx),
                 "which \"world\" (3 ranks) does not work with: use threads (mt_launch) or mt_comm_create_meta"));
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

static void test_meta_threads(void **state) {
    size_t i;
    int kind;
    (void)state;
    if (TEST_OVER_MESSAGES) {
        assert_int_equal(run_ranks(3, meta_process, NULL), MT_SUCCESS);
        return;
    }
    for (i = 0; i < COUNTOF(sizes); i++)
        if (sizes[i] <= 8) assert_int_equal(run_ranks(sizes[i], meta_thread, NULL), MT_SUCCESS);
    for (kind = 0; kind < 3; kind++) assert_int_equal(run_ranks(3, mixed_thread, &kind), MT_SUCCESS);
}

/* Each rank gets the bytes of all. */
static mt_status gather_host_rank(mt_comm *world, void *user) {
    mt_context_desc d = small();
    mt_context *ctx;
    char mine[3], all[64];
    int i, size = mt_comm_size(world);
    (void)user;
    MT_TRY(mt_context_create(world, &d, &ctx));
    memset(mine, 'a' + mt_comm_rank(world), sizeof mine);
    MT_TRY(mt_comm_gather_host(ctx, world, mine, sizeof mine, all));
    for (i = 0; i < 3 * size; i++) CHECK(all[i] == 'a' + i / 3);
    CHECK(mt_comm_ledger(world).calls[MT_ALL_GATHER] == 0);
    CHECK(mt_comm_gather_host(NULL, world, mine, 3, all) == MT_ERR_ARGUMENT);
    CHECK(mt_comm_gather_host(ctx, NULL, mine, 3, all) == MT_ERR_ARGUMENT);
    CHECK(mt_comm_gather_host(ctx, world, NULL, 3, all) == MT_ERR_ARGUMENT);
    CHECK(mt_comm_gather_host(ctx, world, mine, 3, NULL) == MT_ERR_ARGUMENT);
    CHECK(mt_comm_gather_host(ctx, world, mine, 0, all) == MT_ERR_ARGUMENT);
    CHECK(strstr(mt_last_error(ctx), "mt_comm_gather_host: 0 bytes"));
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

static void test_gather_host(void **state) {
    mt_context_desc d = small();
    mt_context *ctx;
    mt_comm *comm;
    char mine[2] = {7, 8}, all[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    (void)state;
    assert_int_equal(run_ranks(1, gather_host_rank, NULL), MT_SUCCESS);
    assert_int_equal(run_ranks(5, gather_host_rank, NULL), MT_SUCCESS);
    d.device = MT_DEVICE_META;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_comm_create_meta(4, 2, &comm));
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(comm, &d, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_comm_gather_host(ctx, comm, mine, 2, all));
    assert_true(all[4] == 7 && all[5] == 8 && all[0] == 0 && all[7] == 0); /* the others do not exist */
    mt_context_destroy(ctx);
    mt_comm_destroy(comm);
}

/* ---- split ------------------------------------------------------------------------------------------------------- */

static mt_status in_group(mt_context *ctx, mt_comm *group, int member) {
    int n = mt_comm_size(group), r;
    int all[8];
    MT_TRY(mt_all_gather(ctx, group, &member, all, 1, MT_I32));
    for (r = 0; r < n; r++) CHECK(r == mt_comm_rank(group) ? all[r] == member : all[r] != member);
    return MT_SUCCESS;
}

/* Splits 8 ranks into a 4 x 2 grid, then in reverse order, then into a group of some ranks only, then splits a
   group. */
static mt_status split_body(mt_context *ctx, mt_comm *world, mt_comm **g) {
    int rank = mt_comm_rank(world), size = mt_comm_size(world);
    int value = rank, all[8], i;
    MT_TRY(mt_comm_split(world, rank / 2, rank, &g[0]));
    CHECK(mt_comm_size(g[0]) == 2 && mt_comm_rank(g[0]) == rank % 2);
    MT_TRY(in_group(ctx, g[0], rank));
    MT_TRY(mt_comm_split(world, rank % 2, 0, &g[1]));
    CHECK(mt_comm_size(g[1]) == 4 && mt_comm_rank(g[1]) == rank / 2);
    MT_TRY(in_group(ctx, g[1], rank));
    MT_TRY(mt_comm_split(world, 7, -rank, &g[2]));
    CHECK(mt_comm_size(g[2]) == size && mt_comm_rank(g[2]) == size - 1 - rank);
    MT_TRY(mt_all_gather(ctx, g[2], &value, all, 1, MT_I32));
    for (i = 0; i < size; i++) CHECK(all[i] == size - 1 - i);
    MT_TRY(mt_comm_split(world, rank >= 5 ? 3 : -1, 0, &g[3]));
    CHECK((g[3] == NULL) == (rank < 5));
    if (g[3]) {
        CHECK(mt_comm_size(g[3]) == 3 && mt_comm_rank(g[3]) == rank - 5);
        MT_TRY(in_group(ctx, g[3], rank));
    }
    MT_TRY(mt_comm_split(g[1], mt_comm_rank(g[1]), 0, &g[4])); /* one group per rank */
    CHECK(mt_comm_size(g[4]) == 1);
    MT_TRY(mt_all_reduce(ctx, g[4], &value, &value, 1, MT_I32, MT_SUM));
    CHECK(value == rank && mt_comm_ledger(g[4]).calls[MT_ALL_REDUCE] == 0);
    MT_TRY(mt_comm_split(g[4], 5, 5, &g[5]));
    CHECK(mt_comm_size(g[5]) == 1);
    return MT_SUCCESS;
}

static mt_status split_rank(mt_comm *world, void *user) {
    mt_comm *g[6] = {NULL, NULL, NULL, NULL, NULL, NULL};
    mt_context_desc d = small();
    mt_context *ctx;
    mt_status status;
    int i, leak = user != NULL;
    MT_TRY(mt_context_create(world, &d, &ctx));
    status = split_body(ctx, world, g);
    /* in a different order on each rank */
    for (i = 0; !leak && i < 6; i++) mt_comm_destroy(g[(i + mt_comm_rank(world)) % 6]);
    mt_context_destroy(ctx);
    return status;
}

static void test_split(void **state) {
    int leak = 1;
    (void)state;
    assert_int_equal(run_ranks(8, split_rank, NULL), MT_SUCCESS);
    /* the launcher frees communicators that the ranks leave */
    assert_int_equal(run_ranks(8, split_rank, &leak), MT_SUCCESS);
}

/* Without GPUs, mt_comm_create_for returns a communicator of the same group. */
static mt_status create_for_rank(mt_comm *world, void *user) {
    mt_context_desc d = small();
    mt_context *ctx;
    mt_comm *same = NULL, *meta = NULL;
    float x = 1;
    (void)user;
    MT_TRY(mt_context_create(world, &d, &ctx));
    MT_TRY(mt_comm_create_for(ctx, world, &same));
    CHECK(same != world && mt_comm_rank(same) == mt_comm_rank(world) && mt_comm_size(same) == mt_comm_size(world));
    CHECK(strcmp(mt_comm_name(same), "world") == 0);
    MT_TRY(mt_all_reduce(ctx, same, &x, &x, 1, MT_F32, MT_SUM));
    CHECK(x == (float)mt_comm_size(world));
    mt_comm_destroy(same);
    CHECK(mt_comm_create_for(NULL, world, &same) == MT_ERR_ARGUMENT && !same);
    CHECK(strstr(mt_comm_last_error(world), "ctx is NULL"));
    CHECK(mt_comm_create_for(ctx, NULL, &same) == MT_ERR_ARGUMENT &&
          mt_comm_create_for(ctx, world, NULL) == MT_ERR_ARGUMENT);
    MT_TRY(mt_comm_create_meta(2, 0, &meta));
    CHECK(mt_comm_create_for(ctx, meta, &same) == MT_ERR_ARGUMENT);
    mt_comm_destroy(meta);
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

static void test_create_for(void **state) {
    (void)state;
    assert_int_equal(run_ranks(1, create_for_rank, NULL), MT_SUCCESS);
    assert_int_equal(run_ranks(3, create_for_rank, NULL), MT_SUCCESS);
}

/* A C compiler builds no NCCL. The error message says how to build it. */
static void test_nccl_is_not_built(void **state) {
    mt_context_desc d = small();
    mt_context *ctx;
    mt_nccl_id id;
    mt_comm *comm = (mt_comm *)(void *)&id;
    (void)state;
    memset(&id, 0, sizeof id);
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
    assert_int_equal(mt_nccl_unique_id(ctx, &id), MT_ERR_UNSUPPORTED);
    assert_int_equal(mt_comm_create_nccl_id(ctx, &id, 2, 0, 0, &comm), MT_ERR_UNSUPPORTED);
    assert_null(comm);
    assert_int_equal(mt_comm_create_nccl(ctx, NULL, 0, &comm), MT_ERR_UNSUPPORTED);
    assert_non_null(strstr(mt_last_error(ctx), "-DMT_USE_NCCL"));
    mt_context_destroy(ctx);
}

static void test_names(void **state) {
    mt_comm *comms[3];
    int r;
    (void)state;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_comm_create_local(3, 1.0, comms));
    assert_string_equal(mt_comm_name(comms[2]), "world");
    mt_comm_set_name(comms[2], "a name that is much too long");
    assert_string_equal(mt_comm_name(comms[2]), "a name that is ");
    mt_comm_set_name(comms[2], NULL);
    assert_string_equal(mt_comm_name(comms[2]), "");
    assert_string_equal(mt_comm_last_error(comms[2]), "");
    for (r = 0; r < 3; r++) mt_comm_destroy(comms[(r + 1) % 3]);
    mt_comm_destroy(NULL);
    for (r = 0; r < MT_COLLECTIVE_COUNT; r++) assert_int_equal(strlen(mt_collective_name((mt_collective)r)) > 3, 1);
    assert_string_equal(mt_status_name(MT_ERR_PEER), "MT_ERR_PEER");
    assert_string_equal(mt_status_string(MT_ERR_SHAPE), "shapes do not fit together");
    assert_string_equal(mt_dtype_name(MT_U8), "u8");
}

/* ---- point to point ---------------------------------------------------------------------------------------------- */

static mt_status ring_body(mt_context *ctx, mt_comm *world, size_t count, float *a, float *b) {
    int n = mt_comm_size(world), rank = mt_comm_rank(world), next = (rank + 1) % n, last = (rank + n - 1) % n, k;
    fill(a, MT_F32, count, rank, count);
    for (k = 1; k <= n; k++) { /* after n steps every rank has its own data again */
        MT_TRY(mt_send_recv(ctx, world, a, count, next, b, count, last, MT_F32));
        CHECK(is_input(b, MT_F32, count, (rank + n * 2 - k) % n, 0, count));
        if (count) memcpy(a, b, count * 4);
    }
    return MT_SUCCESS;
}

/* A pipeline: rank r receives from r - 1 and sends to r + 1. The first and the last rank have one neighbour each. */
static mt_status pipe_body(mt_context *ctx, mt_comm *world, size_t count, float *a, float *b) {
    int n = mt_comm_size(world), rank = mt_comm_rank(world), k;
    for (k = 0; k < 5; k++) {
        fill(a, MT_F32, 77 + (uint64_t)k, rank, count);
        MT_TRY(mt_send_recv(ctx, world, a, count, rank + 1 < n ? rank + 1 : -1, b, count, rank - 1, MT_F32));
        if (rank > 0) CHECK(is_input(b, MT_F32, 77 + (uint64_t)k, rank - 1, 0, count));
    }
    for (k = 0; k < 5; k++) { /* two sends in a row arrive in order */
        fill(a, MT_F32, 99 + (uint64_t)k, 0, count);
        if (rank == 0 && n > 1) MT_TRY(mt_send(ctx, world, a, count, MT_F32, n - 1));
        if (rank == n - 1 && n > 1) {
            MT_TRY(mt_recv(ctx, world, b, count, MT_F32, 0));
            CHECK(is_input(b, MT_F32, 99 + (uint64_t)k, 0, 0, count));
        }
    }
    return MT_SUCCESS;
}

static mt_status p2p_rank(mt_comm *world, void *user) {
    mt_context_desc d = small();
    mt_context *ctx;
    size_t i;
    mt_status status = MT_SUCCESS;
    (void)user;
    MT_TRY(mt_context_create(world, &d, &ctx));
    for (i = 0; i < COUNTOF(counts) && status == MT_SUCCESS; i++) {
        float *a = (float *)malloc(4 * counts[i] + 4), *b = (float *)malloc(4 * counts[i] + 4);
        status = ring_body(ctx, world, counts[i], a, b);
        MT_KEEP(status, pipe_body(ctx, world, counts[i], a, b));
        free(a);
        free(b);
    }
    mt_context_destroy(ctx);
    return status;
}

static void test_p2p(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < COUNTOF(sizes); i++) assert_int_equal(run_ranks(sizes[i], p2p_rank, NULL), MT_SUCCESS);
}

/* ---- conjugates -------------------------------------------------------------------------------------------------- */

#define TOKENS 24
#define WIDTH 48

typedef mt_status (*region)(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y);

static mt_status region_f(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    memcpy(y.data, x.data, (size_t)(x.rows * x.cols) * 4);
    return mt_copy_to_tensor_region_forward(ctx, comm, y);
}

static mt_status region_f_back(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    memcpy(y.data, x.data, (size_t)(x.rows * x.cols) * 4);
    return mt_copy_to_tensor_region_backward(ctx, comm, y);
}

static mt_status region_g(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    memcpy(y.data, x.data, (size_t)(x.rows * x.cols) * 4);
    return mt_reduce_from_tensor_region_forward(ctx, comm, y);
}

static mt_status region_g_back(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    memcpy(y.data, x.data, (size_t)(x.rows * x.cols) * 4);
    return mt_reduce_from_tensor_region_backward(ctx, comm, y);
}

static double dot(const float *a, const float *b, size_t n) {
    double sum = 0;
    size_t i;
    for (i = 0; i < n; i++) sum += (double)a[i] * (double)b[i];
    return sum;
}

/* Sums a double over the ranks. It gathers the bytes with mt_all_gather (MT_I32), which is exact and not the call under
   test. */
static mt_status total(mt_context *ctx, mt_comm *comm, double mine, double *sum) {
    double all[8];
    int r;
    MT_TRY(mt_all_gather(ctx, comm, &mine, all, 2, MT_I32));
    for (*sum = 0, r = 0; r < mt_comm_size(comm); r++) *sum += all[r];
    return MT_SUCCESS;
}

/* Checks <f(x), y> = <x, f*(y)>, summed over the ranks. A tensor that is split or partial has weight 1; a tensor that
   is the same on every rank has weight 1 / size. Integers make the sums exact. */
static mt_status adjoint(mt_context *ctx, mt_comm *comm, region f, region back, int64_t xr, int64_t xc, int x_same,
                         int64_t yr, int64_t yc, int y_same) {
    float x[TOKENS * WIDTH], y[TOKENS * WIDTH], fx[TOKENS * WIDTH], by[TOKENS * WIDTH];
    size_t nx = (size_t)(xr * xc), ny = (size_t)(yr * yc), i;
    int rank = mt_comm_rank(comm);
    double left, right, n = mt_comm_size(comm);
    for (i = 0; i < nx; i++) x[i] = (float)(word(1, x_same ? 0 : rank, i) % 17) - 8;
    for (i = 0; i < ny; i++) y[i] = (float)(word(2, y_same ? 0 : rank, i) % 17) - 8;
    MT_TRY(f(ctx, comm, mt_tensor_f32(x, xr, xc), mt_tensor_f32(fx, yr, yc)));
    MT_TRY(back(ctx, comm, mt_tensor_f32(y, yr, yc), mt_tensor_f32(by, xr, xc)));
    MT_TRY(total(ctx, comm, dot(fx, y, ny) / (y_same ? n : 1), &left));
    MT_TRY(total(ctx, comm, dot(x, by, nx) / (x_same ? n : 1), &right));
    CHECK(left - right < 1e-6 && right - left < 1e-6);
    CHECK(left != 0);
    return MT_SUCCESS;
}

static mt_status conjugate_values(mt_context *ctx, mt_comm *comm) {
    int64_t n = mt_comm_size(comm), rank = mt_comm_rank(comm), part = WIDTH / n, i, j;
    float x[TOKENS * WIDTH], y[TOKENS * WIDTH], z[TOKENS * WIDTH];
    mt_tensor whole = mt_tensor_f32(x, TOKENS, WIDTH), columns = mt_tensor_f32(y, TOKENS, part);
    mt_tensor rows = mt_tensor_f32(y, TOKENS / n, WIDTH), back = mt_tensor_f32(z, TOKENS, WIDTH);
    for (i = 0; i < TOKENS * WIDTH; i++) x[i] = (float)i;
    MT_TRY(mt_scatter_to_tensor_region(ctx, comm, whole, columns));
    for (i = 0; i < TOKENS; i++)
        for (j = 0; j < part; j++) CHECK(y[i * part + j] == x[i * WIDTH + rank * part + j]);
    MT_TRY(mt_gather_from_tensor_region(ctx, comm, columns, back));
    CHECK(!memcmp(x, z, sizeof x));
    MT_TRY(mt_scatter_to_sequence_region(ctx, comm, whole, rows));
    CHECK(!memcmp(y, x + rank * TOKENS / n * WIDTH, sizeof x / (size_t)n));
    memset(z, 0, sizeof z);
    MT_TRY(mt_gather_from_sequence_region(ctx, comm, rows, back));
    CHECK(!memcmp(x, z, sizeof x));
    MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, comm, whole, rows));
    for (i = 0; i < TOKENS / n * WIDTH; i++) CHECK(y[i] == (float)n * x[rank * TOKENS / n * WIDTH + i]);
    CHECK(mt_arena_mark(ctx) == 0);
    return MT_SUCCESS;
}

static mt_status conjugate_adjoints(mt_context *ctx, mt_comm *comm) {
    int64_t n = mt_comm_size(comm);
    MT_TRY(adjoint(ctx, comm, region_f, region_f_back, TOKENS, WIDTH, 1, TOKENS, WIDTH, 0));
    MT_TRY(adjoint(ctx, comm, region_g, region_g_back, TOKENS, WIDTH, 0, TOKENS, WIDTH, 1));
    MT_TRY(adjoint(ctx, comm, mt_scatter_to_tensor_region, mt_gather_from_tensor_region, TOKENS, WIDTH, 1, TOKENS,
                   WIDTH / n, 0));
    MT_TRY(adjoint(ctx, comm, mt_gather_from_tensor_region, mt_scatter_to_tensor_region, TOKENS, WIDTH / n, 0, TOKENS,
                   WIDTH, 1));
    MT_TRY(adjoint(ctx, comm, mt_scatter_to_sequence_region, mt_gather_from_sequence_region, TOKENS, WIDTH, 1,
                   TOKENS / n, WIDTH, 0));
    MT_TRY(adjoint(ctx, comm, mt_gather_from_sequence_region, mt_reduce_scatter_to_sequence_region, TOKENS / n, WIDTH,
                   0, TOKENS, WIDTH, 0));
    return adjoint(ctx, comm, mt_reduce_scatter_to_sequence_region, mt_gather_from_sequence_region, TOKENS, WIDTH, 0,
                   TOKENS / n, WIDTH, 0);
}

/* What a whole call and its chunks give: y of a reduce-scatter, of a gather and of an all-reduce. */
typedef struct chunked {
    mt_tensor whole, part, y[3], want[3];
} chunked;

/* Fills the operands, with blocks of rows x 5, and runs the whole calls. */
static mt_status chunked_open(mt_context *ctx, mt_comm *comm, int64_t rows, chunked *c) {
    int size = mt_comm_size(comm);
    MT_TRY(mt_arena_tensor(ctx, MT_F32, rows * size, 5, &c->whole));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, rows, 5, &c->part));
    for (int i = 0; i < 3; i++) {
        MT_TRY(mt_arena_tensor(ctx, MT_F32, i == 1 ? rows * size : rows, 5, &c->y[i]));
        MT_TRY(mt_arena_tensor(ctx, MT_F32, c->y[i].rows, 5, &c->want[i]));
        memset(c->y[i].data, 0x55, (size_t)c->y[i].rows * 5 * sizeof(float));
    }
    fill(c->whole.data, MT_F32, 1, mt_comm_rank(comm), (size_t)(size * rows * 5));
    fill(c->part.data, MT_F32, 2, mt_comm_rank(comm), (size_t)rows * 5);
    memcpy(c->y[2].data, c->part.data, (size_t)rows * 5 * sizeof(float));
    memcpy(c->want[2].data, c->part.data, (size_t)rows * 5 * sizeof(float));
    MT_TRY(mt_declare(ctx, NULL, c->whole, MT_UNDECLARED)); /* check mode does not see who has written them */
    MT_TRY(mt_declare(ctx, NULL, c->part, MT_UNDECLARED));
    MT_TRY(mt_declare(ctx, NULL, c->y[2], MT_UNDECLARED));
    MT_TRY(mt_declare(ctx, NULL, c->want[2], MT_UNDECLARED));
    MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, comm, c->whole, c->want[0]));
    MT_TRY(mt_gather_from_sequence_region(ctx, comm, c->part, c->want[1]));
    return mt_reduce_from_tensor_region_forward(ctx, comm, c->want[2]);
}

/* Chunks of the ranks' parts, and of rows, give the values of the whole calls. All chunks together count as one call in
   the ledger. Large blocks are not sent with the headers. */
static mt_status in_chunks(mt_context *ctx, mt_comm *comm, int64_t rows, int count) {
    int size = mt_comm_size(comm);
    mt_ledger before = mt_comm_ledger(comm), by_one, by_chunks;
    chunked c;
    MT_TRY(chunked_open(ctx, comm, rows, &c));
    by_one = mt_comm_ledger(comm);
    for (int i = 0; i < count; i++) { /* on a CPU, begin and end do nothing */
        int first = size * i / count, ranks = size * (i + 1) / count - first;
        int64_t row = rows * i / count, n = rows * (i + 1) / count - row;
        MT_TRY(mt_overlap_begin(ctx, comm, MT_STREAM_SECOND));
        MT_TRY(mt_reduce_scatter_ranks_to_sequence_region(ctx, comm, c.whole, c.y[0], first, ranks));
        MT_TRY(mt_gather_ranks_from_sequence_region(ctx, comm, c.part, c.y[1], first, ranks));
        MT_TRY(mt_overlap_end(ctx, i, mt_reduce_rows_from_tensor_region(ctx, comm, c.y[2], row, n)));
        MT_TRY(mt_overlap_wait(ctx, i));
    }
    MT_TRY(mt_overlap_wait_all(ctx));
    by_chunks = mt_comm_ledger(comm);
    for (int i = 0; i < 3; i++)
        CHECK(memcmp(c.y[i].data, c.want[i].data, (size_t)c.y[i].rows * 5 * sizeof(float)) == 0);
    for (int i = 0; i < MT_COLLECTIVE_COUNT; i++) {
        CHECK(by_chunks.calls[i] - by_one.calls[i] == by_one.calls[i] - before.calls[i]);
        CHECK(by_chunks.bytes[i] - by_one.bytes[i] == by_one.bytes[i] - before.bytes[i]);
    }
    return MT_SUCCESS;
}

/* A chunk writes the blocks of its ranks alone. In place, this rank's part is its block of the whole tensor. */
static mt_status one_chunk(mt_context *ctx, mt_comm *comm, int rows) {
    int size = mt_comm_size(comm), rank = mt_comm_rank(comm), first = size / 2, n = 5 * rows;
    mt_tensor whole, part;
    float *all;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, rows * size, 5, &whole));
    all = (float *)whole.data;
    part = mt_tensor_rows(whole, rows * rank, rows);
    for (int i = 0; i < n * size; i++) all[i] = i / n == rank ? (float)(n * rank + i % n) : -1.0f;
    MT_TRY(mt_declare(ctx, NULL, whole, MT_UNDECLARED));
    MT_TRY(mt_gather_ranks_from_sequence_region(ctx, comm, part, whole, first, size - first));
    for (int i = 0; i < n * size; i++) CHECK(all[i] == (i / n == rank || i / n >= first ? (float)i : -1.0f));
    for (int i = 0; i < n * size; i++) all[i] = (float)i;
    MT_TRY(mt_declare(ctx, NULL, whole, MT_UNDECLARED));
    MT_TRY(mt_reduce_scatter_ranks_to_sequence_region(ctx, comm, whole, part, first, size - first));
    for (int i = 0; i < n * size; i++) CHECK(all[i] == (float)(i / n == rank && rank >= first ? i * size : i));
    return MT_SUCCESS;
}

/* The memory that the last collective of this rank has written, as it tells the layers. */
static __thread const char *written;
static __thread size_t written_bytes;

static void keep_written(mt_context *ctx, const void *data, size_t bytes, int gone) {
    (void)ctx;
    if (!gone && bytes) written = (const char *)data, written_bytes = bytes;
}

static mt_status chunks_tell(mt_context *ctx, mt_comm *comm) {
    int size = mt_comm_size(comm), first = size - 1;
    size_t block = 45 * sizeof(float);
    chunked c;
    if (size == 1) return MT_SUCCESS;
    MT_TRY(chunked_open(ctx, comm, 9, &c));
    mt_context_set_forget(ctx, keep_written);
    MT_TRY(mt_gather_ranks_from_sequence_region(ctx, comm, c.part, c.y[1], first, 1));
    CHECK(written == (char *)c.y[1].data + block * (size_t)first && written_bytes == block);
    written = NULL;
    MT_TRY(mt_reduce_scatter_ranks_to_sequence_region(ctx, comm, c.whole, c.y[0], first, 1));
    CHECK(written == (mt_comm_rank(comm) == first ? (char *)c.y[0].data : NULL));
    mt_context_set_forget(ctx, NULL);
    return MT_SUCCESS;
}

/* On every rank x and y overlap, and not as in place. A rank whose block is not in the chunk sees it, too. */
static mt_status chunks_overlap(mt_context *ctx, mt_comm *comm) {
    int size = mt_comm_size(comm), other = (mt_comm_rank(comm) + 1) % size;
    mt_tensor whole;
    if (size == 1) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 3 * size, 5, &whole));
    MT_TRY(mt_declare(ctx, NULL, whole, MT_UNDECLARED));
    CHECK(mt_gather_ranks_from_sequence_region(ctx, comm, mt_tensor_rows(whole, 3 * other, 3), whole, 0, 1) ==
          MT_ERR_ARGUMENT);
    CHECK(strstr(mt_last_error(ctx), "overlap"));
    return mt_reduce_scatter_ranks_to_sequence_region(ctx, comm, whole, mt_tensor_rows(whole, 3 * other, 3), 0, 1) ==
                   MT_ERR_ARGUMENT
               ? MT_SUCCESS
               : MT_ERR_DATA;
}

static mt_status chunks_refused(mt_context *ctx, mt_comm *comm) {
    int size = mt_comm_size(comm);
    chunked c;
    MT_TRY(chunked_open(ctx, comm, 9, &c));
    CHECK(mt_overlap_end(ctx, 0, MT_ERR_DATA) == MT_ERR_DATA);
    CHECK(mt_gather_ranks_from_sequence_region(ctx, comm, c.part, c.y[1], size, 1) == MT_ERR_ARGUMENT);
    CHECK(strstr(mt_last_error(ctx), "mt_gather_ranks_from_sequence_region: ranks ["));
    CHECK(mt_gather_ranks_from_sequence_region(ctx, comm, c.part, c.y[1], 0, 0) == MT_ERR_ARGUMENT);
    CHECK(mt_gather_ranks_from_sequence_region(ctx, comm, c.part, c.y[1], 1, INT_MAX) == MT_ERR_ARGUMENT);
    CHECK(mt_reduce_scatter_ranks_to_sequence_region(ctx, comm, c.whole, c.y[0], -1, 2) == MT_ERR_ARGUMENT);
    CHECK(mt_reduce_rows_from_tensor_region(ctx, comm, c.y[2], 0, 10) == MT_ERR_SHAPE);
    CHECK(strstr(mt_last_error(ctx), "rows [0, 0 + 10) of 9"));
    CHECK(mt_reduce_scatter_ranks_to_sequence_region(ctx, comm, c.part, c.y[0], 0, 1) ==
          (size == 1 ? MT_SUCCESS : MT_ERR_SHAPE));
    CHECK(mt_overlap_begin(ctx, NULL, 1) == MT_ERR_ARGUMENT);
    return MT_SUCCESS;
}

static mt_status conjugate_rank(mt_comm *world, void *user) {
    mt_context_desc d = small();
    mt_context *ctx;
    mt_status status;
    (void)user;
    MT_TRY(mt_context_create(world, &d, &ctx));
    status = conjugate_values(ctx, world);
    MT_KEEP(status, conjugate_adjoints(ctx, world));
    MT_KEEP(status, chunks_refused(ctx, world));
    MT_KEEP(status, chunks_overlap(ctx, world));
    MT_KEEP(status, chunks_tell(ctx, world));
    for (int count = 1; count <= mt_comm_size(world) && count <= 3; count++)
        for (int large = 0; large < 2; large++) {
            size_t mark = mt_arena_mark(ctx);
            MT_KEEP(status, in_chunks(ctx, world, large ? 1001 : 9, count));
            MT_KEEP(status, one_chunk(ctx, world, large ? 1001 : 3));
            mt_arena_release(ctx, mark);
        }
    mt_context_destroy(ctx);
    return status;
}

static void test_conjugates(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < COUNTOF(sizes); i++) assert_int_equal(run_ranks(sizes[i], conjugate_rank, NULL), MT_SUCCESS);
}

/* With one rank and in place, nothing is moved or counted, and the arena is not used. */
static void test_conjugates_alone(void **state) {
    mt_context_desc d = small();
    mt_context *ctx;
    mt_comm *comm;
    float x[6] = {1, 2, 3, 4, 5, 6};
    mt_tensor t = mt_tensor_f32(x, 2, 3);
    (void)state;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_comm_create_local(1, 0, &comm));
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(comm, &d, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_copy_to_tensor_region_backward(ctx, comm, t));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_reduce_from_tensor_region_forward(ctx, comm, t));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_scatter_to_tensor_region(ctx, comm, t, t));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_gather_from_tensor_region(ctx, comm, t, t));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_scatter_to_sequence_region(ctx, comm, t, t));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_gather_from_sequence_region(ctx, comm, t, t));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_reduce_scatter_to_sequence_region(ctx, comm, t, t));
    assert_true(x[0] == 1 && x[5] == 6);
    assert_int_equal(mt_arena_peak(ctx), 0);
    assert_int_equal(mt_comm_ledger(comm).calls[MT_ALL_GATHER], 0);
    mt_context_destroy(ctx);
    mt_comm_destroy(comm);
}

/* ---- context ----------------------------------------------------------------------------------------------------- */

typedef struct counting {
    long blocks, bytes, allowed;
    int misaligned;
} counting;

static void *count_alloc(void *user, size_t bytes, size_t alignment) {
    counting *c = (counting *)user;
    void *p = NULL;
    if (c->allowed-- <= 0) return NULL;
    c->blocks++;
    c->bytes += (long)bytes;
    return posix_memalign(&p, alignment, bytes) ? NULL : p;
}

static void count_free(void *user, void *ptr, size_t bytes) {
    counting *c = (counting *)user;
    c->blocks--;
    c->bytes -= (long)bytes;
    free(ptr);
}

typedef struct logged {
    int lines;
    char last[1200];
} logged;

static void keep_log(void *user, mt_log_level level, const char *message) {
    logged *l = (logged *)user;
    if (level == MT_LOG_ERROR) l->lines++;
    snprintf(l->last, sizeof l->last, "%s", message);
}

static void test_allocator(void **state) {
    counting c = {0, 0, 1000, 0};
    mt_context_desc d = small();
    mt_context *ctx;
    void *p, *q;
    int i;
    (void)state;
    d.allocator.alloc = count_alloc;
    d.allocator.free = count_free;
    d.allocator.user = &c;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_context_alloc(ctx, 100, &p));
    assert_int_equal((uintptr_t)p % 64, 0);
    for (i = 0; i < 100; i++) assert_int_equal(((char *)p)[i], 0);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_context_alloc(ctx, 0, &q));
    assert_true(mt_context_allocated(ctx) >= 100);
    mt_context_free(ctx, p, 100);
    mt_context_free(ctx, q, 0);
    mt_context_free(ctx, NULL, 5);
    assert_int_equal(mt_context_allocated(ctx), 0);
    c.allowed = 0;
    ASSERT_STATUS(ctx, MT_ERR_MEMORY, mt_context_alloc(ctx, 12345, &p));
    assert_null(p);
    assert_non_null(strstr(mt_last_error(ctx), "12345"));
    mt_context_destroy(ctx);
    assert_int_equal(c.blocks, 0);
    assert_int_equal(c.bytes, 0);
    c.allowed = 0; /* no memory for the arena */
    ASSERT_STATUS(NULL, MT_ERR_MEMORY, mt_context_create(NULL, &d, &ctx));
    assert_null(ctx);
    assert_int_equal(c.blocks, 0);
}

/* Records what the end function of a slot sees: its number (read from its memory), the order of the calls, and whether
   the context still works. */
static int ended[4];

static void end_slot(mt_context *ctx, void *memory) {
    void *p;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_alloc(ctx, 64, &p));
    memset(p, 1, 64);
    ended[++ended[0]] = *(int *)memory;
}

static void test_slots(void **state) {
    static const mt_slot slots[] = {MT_SLOT_PARALLEL, MT_SLOT_USER, MT_SLOT_KERNELS};
    mt_context_desc d = small();
    mt_context *ctx, *other;
    void *memory;
    int i, k;
    (void)state;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &other));
    for (i = 0; i < 3; i++) {
        assert_null(mt_context_slot(ctx, slots[i]));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_context_slot_create(ctx, slots[i], 100, end_slot, &memory));
        assert_ptr_equal(mt_context_slot(ctx, slots[i]), memory);
        for (k = 0; k < 100; k++) assert_int_equal(((char *)memory)[k], 0);
        *(int *)memory = (int)slots[i];
        assert_null(mt_context_slot(other, slots[i]));
    }
    ASSERT_STATUS(other, MT_SUCCESS, mt_context_slot_create(other, MT_SLOT_USER, 0, NULL, &memory));
    assert_non_null(memory);
    ASSERT_STATUS(ctx, MT_ERR_ARGUMENT, mt_context_slot_create(ctx, MT_SLOT_USER, 4, NULL, &memory));
    assert_non_null(strstr(mt_last_error(ctx), "slot 3 has been created"));
    assert_null(memory);
    ASSERT_STATUS(ctx, MT_ERR_ARGUMENT, mt_context_slot_create(ctx, MT_SLOT_COUNT, 4, NULL, &memory));
    ASSERT_STATUS(ctx, MT_ERR_ARGUMENT, mt_context_slot_create(ctx, MT_SLOT_MODEL, 4, NULL, NULL));
    assert_int_equal(mt_context_slot_create(NULL, MT_SLOT_MODEL, 4, NULL, &memory), MT_ERR_ARGUMENT);
    ASSERT_STATUS(ctx, MT_ERR_MEMORY, mt_context_slot_create(ctx, MT_SLOT_MODEL, SIZE_MAX / 2, end_slot, &memory));
    assert_null(mt_context_slot(ctx, MT_SLOT_MODEL));
    assert_null(mt_context_slot(ctx, MT_SLOT_COUNT));
    assert_null(mt_context_slot(NULL, MT_SLOT_USER));
    assert_int_equal(mt_arena_available(NULL), 0);
    mt_arena_region(NULL, 0, 0, 0);
    assert_int_not_equal(mt_cuda_enter(NULL), MT_SUCCESS);
    assert_int_not_equal(mt_cuda_launched(NULL, "kernel"), MT_SUCCESS);
    assert_int_not_equal(mt_cuda_zero(NULL, NULL, 0), MT_SUCCESS);
    assert_int_not_equal(mt_cuda_fetch(NULL, NULL, NULL, 0), MT_SUCCESS);
    mt_context_destroy(ctx);
    mt_context_destroy(other);
    assert_int_equal(ended[0], 3);
    assert_int_equal(ended[1], MT_SLOT_USER);
    assert_int_equal(ended[2], MT_SLOT_PARALLEL);
    assert_int_equal(ended[3], MT_SLOT_KERNELS);
}

static void test_version(void **state) {
    mt_status (*create)(mt_comm * world, const mt_context_desc *desc, mt_context **out) = mt_context_create;
    mt_context_desc d = small();
    mt_context *ctx = (mt_context *)&d;
    mt_comm *comm;
    (void)state;
    assert_int_equal(mt_version(), MT_VERSION_NUMBER);
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_comm_create_local(1, 0, &comm));
    ASSERT_STATUS(NULL, MT_ERR_UNSUPPORTED, mt_context_create_version(12034056, comm, (mt_context_desc *)8, &ctx));
    assert_null(ctx);
    assert_non_null(strstr(mt_comm_last_error(comm), "megatron.h 12.34.56, the implementation"));
    assert_non_null(strstr(mt_comm_last_error(comm), " is " MT_VERSION ":"));
    ASSERT_STATUS(NULL, MT_ERR_UNSUPPORTED, mt_context_create_version(MT_VERSION_NUMBER + 1, NULL, NULL, NULL));
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create_version(mt_version(), comm, &d, &ctx));
    mt_context_destroy(ctx);
    ASSERT_STATUS(NULL, MT_SUCCESS, create(comm, &d, &ctx));
    mt_context_destroy(ctx);
    mt_comm_destroy(comm);
}

/* The services of a context for operators and layers. */
static void test_services(void **state) {
    logged log = {0, ""};
    mt_context_desc d = small();
    mt_context *ctx, *meta;
    mt_tensor t;
    void *p;
    size_t left, peak;
    (void)state;
    d.threads = 3;
    d.arena_symmetric = 1;
    d.logger.log = keep_log;
    d.logger.user = &log;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
    d.device = MT_DEVICE_META;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &meta));
    assert_int_equal(mt_context_threads(ctx), 3);
    assert_int_equal(mt_context_arena_symmetric(ctx), 1);
    assert_int_equal(mt_context_planned(ctx), MT_DEVICE_CPU);
    assert_int_equal(mt_context_planned(meta), MT_DEVICE_CPU);
    assert_true(mt_context_has_data(ctx) && !mt_context_has_data(meta) && mt_context_has_data(NULL));
    assert_int_equal(mt_context_ordinal(ctx), 0);
    assert_int_equal(mt_overlap_is_planned(ctx), 0);
    mt_log(ctx, MT_LOG_WARNING, "a warning");
    assert_string_equal(log.last, "a warning");
    assert_int_equal(log.lines, 0);
    assert_int_equal(mt_fail(ctx, MT_ERR_DATA, "%d of %s", 7, "x"), MT_ERR_DATA);
    assert_string_equal(mt_last_error(ctx), "7 of x");
    assert_string_equal(log.last, "7 of x");
    assert_int_equal(mt_fail(NULL, MT_ERR_DATA, "nobody"), MT_ERR_DATA);
    assert_int_equal(mt_comm_fail(NULL, MT_ERR_DATA, "nobody"), MT_ERR_DATA);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_tensor(ctx, MT_F32, 4, 33, &t));
    assert_int_equal(mt_tensor_is_aligned(ctx, t), 1);
    assert_int_equal(mt_tensor_is_aligned(ctx, mt_tensor_rows(t, 1, 2)), 0);
    assert_int_equal(mt_tensor_is_aligned(ctx, mt_tensor_cols(t, 0, 32)), 0);
    assert_int_equal(mt_tensor_is_aligned(ctx, mt_tensor_rows(mt_tensor_cols(t, 0, 32), 0, 1)), 1);
    assert_int_equal(mt_tensor_is_aligned(meta, mt_tensor_make(NULL, MT_F32, 1, 1)), 0);
    peak = mt_arena_peak(ctx);
    left = mt_arena_available(ctx);
    ASSERT_STATUS(ctx, MT_ERR_MEMORY, mt_arena_alloc(ctx, left + 1, &p));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_alloc(ctx, left, &p));
    assert_int_equal(mt_arena_available(ctx), 0);
    assert_int_equal(mt_arena_peak(ctx), peak + left);
    mt_arena_set_peak(ctx, peak);
    assert_int_equal(mt_arena_peak(ctx), peak);
    ASSERT_STATUS(ctx, MT_ERR_UNSUPPORTED, mt_cuda_enter(ctx));
    ASSERT_STATUS(ctx, MT_ERR_ARGUMENT, mt_comm_register(ctx, NULL, p, 64));
    ASSERT_STATUS(ctx, MT_ERR_ARGUMENT, mt_arena_register(ctx, NULL));
    mt_context_destroy(meta);
    mt_context_destroy(ctx);
}

/* What the last calls have told the function of mt_context_set_forget. */
static struct {
    const void *data;
    size_t bytes;
    int gone, calls;
} forgotten;

static void keep_forgotten(mt_context *ctx, const void *data, size_t bytes, int gone) {
    (void)ctx;
    forgotten.gone = gone;
    forgotten.data = data;
    forgotten.bytes = bytes;
    forgotten.calls++;
}

static void expect_forgotten(const void *data, size_t bytes, int gone) {
    assert_int_equal(forgotten.calls, 1);
    assert_int_equal(forgotten.gone, gone);
    assert_ptr_equal(forgotten.data, data);
    assert_int_equal(forgotten.bytes, bytes);
    forgotten.calls = 0;
}

static void test_forgotten_memory(void **state) {
    for (int meta = 0; meta < 2; meta++) {
        mt_context *ctx = test_context(meta ? MT_DEVICE_META : MT_DEVICE_CPU, 1);
        mt_comm *alone;
        float own[8] = {0};
        void *p, *q;
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_comm_create_local(1, 0, &alone));
        mt_context_set_forget(NULL, keep_forgotten);
        mt_context_set_forget(ctx, keep_forgotten);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_alloc(ctx, 100, &p));
        expect_forgotten(p, 128, 1);
        assert_true(mt_arena_has(ctx, p) && mt_arena_has(ctx, (char *)p + 127));
        assert_false(mt_arena_has(ctx, own) || mt_arena_has(ctx, NULL) || mt_arena_has(NULL, p));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_context_alloc(ctx, 64, &q));
        assert_false(mt_arena_has(ctx, q));
        mt_context_free(ctx, q, 64);
        expect_forgotten(q, 64, 1);
        mt_declare_forget(ctx, own, sizeof own);
        expect_forgotten(own, sizeof own, 1);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_reduce(ctx, alone, own, own, 4, MT_F32, MT_SUM));
        assert_int_equal(forgotten.calls, 0);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_reduce(ctx, alone, own, own + 4, 4, MT_F32, MT_SUM));
        expect_forgotten(own + 4, 16, 0);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_gather(ctx, alone, own, own, 4, MT_F32));
        expect_forgotten(own, 16, 0);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_send_recv(ctx, alone, own, 2, 0, own + 4, 2, 0, MT_F32));
        expect_forgotten(own + 4, 8, 0);
        mt_context_set_forget(ctx, NULL);
        mt_declare_forget(ctx, own, sizeof own);
        assert_int_equal(forgotten.calls, 0);
        mt_comm_destroy(alone);
        mt_context_destroy(ctx);
    }
    (void)state;
}

/* Messages of tests are judged by mt_test_message.h. A context of a test judges its own, and the case then fails. A
   message has no control characters, whatever is in a name. */
static void test_messages_are_one_sentence(void **state) {
    static const char *const good[] = {
        "mt_gemm: k is 3, must be 4",
        "mt_add after \"fc. mt_x: \": a is partial over \"tp\" (4 ranks) since mt_gemm at fc1, must be replicated: "
        "call "
        "mt_copy_to_tensor_region_backward before",
        "mt_arena_alloc: 8 bytes do not fit: 0 of 0 in use; set mt_context_desc.arena_bytes to at least 64",
        "barrier on \"world\" (3 ranks): rank 2 failed with MT_ERR_DATA (mt_x: loss is 1.5, which is no good)",
        "mt_gather: rows [4, 4 + 6) of 9 are not the rank's",
        "a.json: JSON, byte 7: it does not begin with '. '",
    };
    static const struct {
        const char *text, *fault;
    } bad[] = {
        {"", "empty"},
        {"mt_x: a is 1, must be 2.", "ends with"},
        {": a is 1", "begins"},
        {"mt_x: a is 1, must be ", "ends with"},
        {"mt_x: a is 1\nmt_x: b is 2", "one line"},
        {"mt_x: '(null)' is NULL", "prints NULL"},
        {"mt_x: a is 1 (of 2 ranks", "bracket"},
        {"mt_x: a is 1 of 2 ranks)", "bracket"},
        {"mt_x: : a is 1", "between two marks"},
        {"mt_x:: a is 1", "between two marks"},
        {"mt_x: a is 1,, must be 2", "between two marks"},
        {"mt_x: a is  1", "between two marks"},
        {"mt_x: a is 1 , must be 2", "between two marks"},
        {"mt_x: a is 1. Call mt_y before", "more than one sentence"},
        {"mt_x: a is is 1", "twice in a row"},
        {"mt_x: mt_x: a is 1", "another message"},
        {"mt_x: cannot start, mt_y: a is 1", "another message"},
        {"mt_x: rank 2 failed: MT_ERR_DATA: a is 1", "a status"},
        {"mt_x: rank 2 failed (MT_ERR_DATA: a is 1)", "a status"},
        {"barrier on \"w\" (3 ranks): rank 1 calls late: all_gather on \"w\" (3 ranks): rank 2 has left", "another"},
        {"mt_x: a is 1: call mt_y before: call mt_z after", "says twice"},
    };
    mt_context *ctx = test_context(MT_DEVICE_CPU, 1);
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        const char *fault = test_message_fault(good[i]);
        if (fault) fail_msg("%s: %s", good[i], fault);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const char *fault = test_message_fault(bad[i].text);
        if (!fault || !strstr(fault, bad[i].fault)) fail_msg("%s: %s", bad[i].text, fault ? fault : "taken");
    }
    mt_fail(ctx, MT_ERR_DATA, "mt_x: '%s' is bad", "a\tb\x7f\n");
    assert_string_equal(mt_last_error(ctx), "mt_x: 'a?b?"
                                            "?' is bad");
    assert_int_equal(*cm_complaints_(), 0);
    mt_fail(ctx, MT_ERR_DATA, "mt_x: a is 1. Call mt_y before");
    assert_int_equal(*cm_complaints_(), 1);
    *cm_complaints_() = 0;
    mt_context_destroy(ctx);
}

/* Host memory is zero-filled, also when it was used and freed before. */
static void test_host_memory(void **state) {
    static const size_t bytes[] = {1, 24, 1000, 100000};
    (void)state;
    for (int i = 0; i < 64; i++) {
        size_t n = bytes[i % 4];
        unsigned char *p = (unsigned char *)mt_host_alloc(n);
        assert_non_null(p);
        for (size_t k = 0; k < n; k++) assert_int_equal(p[k], 0);
        memset(p, 0xff, n);
        mt_host_free(p);
    }
    assert_null(mt_host_alloc(SIZE_MAX / 2));
}

static void test_invariant_sizes(void **state) {
    mt_context_desc d = small();
    mt_context *ctx;
    (void)state;
    for (int i = 0; i < 2; i++) {
        d.invariant = i ? 4 : 0;
        d.invariant_data = i ? 8 : 0;
        ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
        assert_int_equal(mt_context_invariant(ctx), d.invariant);
        assert_int_equal(mt_context_invariant_data(ctx), d.invariant_data);
        mt_context_destroy(ctx);
    }
    assert_int_equal(mt_context_invariant(NULL), 0);
    assert_int_equal(mt_context_invariant_data(NULL), 0);
}

/* This program has no CUDA: the functions for operators on a GPU touch no memory. */
static void test_cuda_is_not_built(void **state) {
    mt_context_desc d = small();
    (void)state;
    for (int i = 0; i < 2; i++) {
        char from[8] = "1234567", to[8] = "abcdefg";
        mt_context *ctx;
        d.device = i ? MT_DEVICE_META : MT_DEVICE_CPU;
        ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
        ASSERT_STATUS(ctx, MT_ERR_UNSUPPORTED, mt_cuda_enter(ctx));
        ASSERT_STATUS(ctx, MT_ERR_UNSUPPORTED, mt_cuda_launched(ctx, "kernel"));
        ASSERT_STATUS(ctx, MT_ERR_UNSUPPORTED, mt_cuda_zero(ctx, to, sizeof to));
        ASSERT_STATUS(ctx, MT_ERR_UNSUPPORTED, mt_cuda_copy_rows(ctx, to, 4, from, 4, 2, 2));
        ASSERT_STATUS(ctx, MT_ERR_UNSUPPORTED, mt_cuda_copy_rows(ctx, to, 4, from, 4, 2, 0));
        ASSERT_STATUS(ctx, MT_ERR_UNSUPPORTED, mt_cuda_check_memory(ctx, "f", "to", to, sizeof to));
        ASSERT_STATUS(ctx, MT_ERR_UNSUPPORTED, mt_cuda_wait_peers(ctx));
        ASSERT_STATUS(ctx, MT_ERR_UNSUPPORTED, mt_cuda_fetch(ctx, to, from, sizeof to));
        assert_string_equal(to, "abcdefg");
        assert_int_equal(mt_device_count(MT_DEVICE_CUDA), 0);
        mt_context_destroy(ctx);
    }
}

static void test_numbers(void **state) {
    static const float floats[] = {0.1f, -3.4028235e38f, 1e-45f, 16777217.0f, -0.0f, 2.5f};
    static const char *const not_whole[] = {"", "-1", "+1", " 1", "1 ", "1.0", "0x1", "256", "18446744073709551616"};
    char text[32], comma[] = "-1,5e-07", word[] = "-nan(0x8)";
    uint64_t value = 99;
    size_t i;
    (void)state;
    for (i = 0; i < sizeof floats / sizeof *floats; i++)
        assert_true(strtof(mt_f32_digits(floats[i], text), NULL) == floats[i]);
    mt_decimal_point(comma);
    assert_string_equal(comma, "-1.5e-07");
    mt_decimal_point(word);
    assert_string_equal(word, "-nan(0x8)");
    assert_true(mt_parse_whole("255", 255, &value) && value == 255);
    assert_true(mt_parse_whole("007", 255, &value) && value == 7);
    assert_true(mt_parse_whole("18446744073709551615", UINT64_MAX, &value) && value == UINT64_MAX);
    for (i = 0; i < sizeof not_whole / sizeof *not_whole; i++)
        assert_int_equal(mt_parse_whole(not_whole[i], 255, &value), 0);
    assert_true(value == UINT64_MAX);
    assert_true(mt_size_mul(INT64_MAX / 7, 7) == INT64_MAX / 7 * 7 && mt_size_mul(INT64_MAX / 7 + 1, 7) == -1);
    assert_true(mt_size_mul(INT64_MAX, 0) == 0 && mt_size_mul(-1, 0) == -1 && mt_size_mul(0, -1) == -1);
    assert_true(mt_round_up(17, 8) == 24 && mt_round_up(16, 8) == 16 && mt_align_up(1) == MT_ALIGNMENT);
}

static void test_context_arguments(void **state) {
    logged log = {0, ""};
    mt_context_desc d = small();
    mt_context *ctx;
    mt_comm *comm;
    (void)state;
    d.logger.log = keep_log;
    d.logger.user = &log;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_comm_create_local(1, 0, &comm));
    d.device = (mt_device)9;
    ASSERT_STATUS(NULL, MT_ERR_UNSUPPORTED, mt_context_create(comm, &d, &ctx));
    assert_non_null(
        strstr(mt_comm_last_error(comm), "device is 9, must be MT_DEVICE_CPU, MT_DEVICE_CUDA or MT_DEVICE_META"));
    assert_string_equal(log.last, mt_comm_last_error(comm));
    d = small();
    d.device = MT_DEVICE_META;
    d.planned = MT_DEVICE_META; /* a meta device cannot be planned for */
    ASSERT_STATUS(NULL, MT_ERR_UNSUPPORTED, mt_context_create(comm, &d, &ctx));
    assert_non_null(
        strstr(mt_comm_last_error(comm), "planned is MT_DEVICE_META, must be MT_DEVICE_CPU or MT_DEVICE_CUDA"));
    d.device = MT_DEVICE_CPU; /* which ignores `planned` */
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(comm, &d, &ctx));
    mt_context_destroy(ctx);
    d = small();
    d.allocator.alloc = count_alloc;
    ASSERT_STATUS(NULL, MT_ERR_ARGUMENT, mt_context_create(comm, &d, &ctx));
    d = small();
    d.stream = (struct CUstream_st *)&log;
    ASSERT_STATUS(NULL, MT_ERR_ARGUMENT, mt_context_create(comm, &d, &ctx));
    assert_non_null(strstr(mt_comm_last_error(comm), "stream is set, but device is MT_DEVICE_CPU"));
    d.device = MT_DEVICE_META;
    ASSERT_STATUS(NULL, MT_ERR_ARGUMENT, mt_context_create(comm, &d, &ctx));
    assert_non_null(strstr(mt_comm_last_error(comm), "stream is set, but device is MT_DEVICE_META"));
    d = small();
    d.threads = -3;
    ASSERT_STATUS(NULL, MT_ERR_ARGUMENT, mt_context_create(comm, &d, &ctx));
    assert_non_null(strstr(mt_comm_last_error(comm), "threads is -3, must be from 0 to 1024"));
    d.threads = 1025;
    ASSERT_STATUS(NULL, MT_ERR_ARGUMENT, mt_context_create(comm, &d, &ctx));
    assert_non_null(strstr(mt_comm_last_error(comm), "threads is 1025"));
    ASSERT_STATUS(NULL, MT_ERR_ARGUMENT, mt_context_create(comm, &d, NULL));
    d = small();
    d.logger.log = keep_log;
    d.logger.user = &log;
    log.lines = 0;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(comm, &d, &ctx));
    assert_string_equal(mt_last_error(ctx), "");
    assert_int_equal(mt_context_device(ctx), MT_DEVICE_CPU);
    ASSERT_STATUS(ctx, MT_ERR_DTYPE, mt_all_reduce(ctx, comm, &d, &d, 1, MT_U8, MT_SUM));
    assert_int_equal(log.lines, 1); /* one line per error */
    assert_string_equal(log.last, mt_last_error(ctx));
    assert_string_equal(log.last, mt_comm_last_error(comm));
    mt_context_destroy(ctx);
    mt_context_destroy(NULL);
    mt_comm_destroy(comm);
}

static void test_arena(void **state) {
    mt_context_desc d = small();
    mt_context *ctx;
    size_t mark;
    void *p, *q;
    mt_tensor t, part;
    (void)state;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_alloc(ctx, 1, &p));
    mark = mt_arena_mark(ctx);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_tensor(ctx, MT_F32, 5, 7, &t));
    assert_int_equal((uintptr_t)t.data % 64, 0);
    assert_true((char *)t.data >= (char *)p + 1);
    memset(t.data, 1, 5 * 7 * 4);
    part = mt_tensor_cols(mt_tensor_rows(t, 2, 3), 4, 2);
    assert_ptr_equal(part.data, (float *)t.data + 2 * 7 + 4);
    assert_int_equal(part.rows, 3);
    assert_int_equal(part.cols, 2);
    assert_int_equal(part.ld, 7);
    mt_arena_release(ctx, mark);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_alloc(ctx, 4, &q));
    assert_ptr_equal(q, t.data);
    assert_int_equal(mt_arena_peak(ctx), 64 + 192);
    mt_arena_reset_peak(ctx);
    assert_int_equal(mt_arena_peak(ctx), 128);
    ASSERT_STATUS(ctx, MT_ERR_MEMORY, mt_arena_alloc(ctx, (size_t)1 << 20, &p));
    assert_null(p);
    assert_non_null(strstr(mt_last_error(ctx), "1048704")); /* 128 + 1 MiB would have been enough */
    ASSERT_STATUS(ctx, MT_ERR_MEMORY, mt_arena_alloc(ctx, SIZE_MAX, &p));
    ASSERT_STATUS(ctx, MT_ERR_ARGUMENT, mt_arena_tensor(ctx, MT_F32, -1, 7, &t));
    ASSERT_STATUS(ctx, MT_ERR_ARGUMENT, mt_arena_alloc(ctx, 4, NULL));
    mt_context_destroy(ctx);
}

static size_t arena_offset(mt_context *ctx, const void *arena, size_t bytes) {
    void *p;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_alloc(ctx, bytes, &p));
    return (size_t)((char *)p - (const char *)arena);
}

#define MOST_ITEMS 300

/* What the ranges of one mt_parallel_for were. */
typedef struct items {
    int64_t count, grain;
    int threads;
    int times[MOST_ITEMS], by[MOST_ITEMS]; /* how often an item was computed, and by which number */
    int ranges[8];                         /* number of ranges of a thread */
    int bad;                               /* number of ranges that do not begin or end where they must */
} items;

static void count_items(void *data, int thread, int64_t first, int64_t last) {
    items *x = (items *)data;
    int64_t i;
    if (thread < 0 || thread >= x->threads || first >= last || last > x->count || first % x->grain ||
        (last - first < x->grain && last != x->count)) {
        __atomic_add_fetch(&x->bad, 1, __ATOMIC_RELAXED);
        return;
    }
    x->ranges[thread]++;
    for (i = first; i < last; i++) {
        x->times[i]++;
        x->by[i] = thread;
    }
}

/* Checks one call: each item is computed once, in ranges that begin at multiples of the grain. */
static void expect_items(mt_context *ctx, int threads, int64_t count, int64_t grain) {
    items x;
    int64_t i;
    int t;
    memset(&x, 0, sizeof x);
    x.count = count;
    x.grain = grain;
    x.threads = threads;
    mt_parallel_for(ctx, count, grain, count_items, &x);
    assert_int_equal(x.bad, 0);
    for (i = 0; i < MOST_ITEMS; i++) assert_int_equal(x.times[i], i < count);
    for (t = 0; t < 8; t++) assert_in_range(x.ranges[t], 0, 1);
    for (t = 0; t < threads && count == threads * grain; t++) assert_int_equal(x.ranges[t], 1);
    for (i = 1; i < count; i++) assert_true(x.by[i] >= x.by[i - 1]);
}

static void test_parallel_for(void **state) {
    static const int64_t grains[] = {1, 2, 16, 1000};
    int threads, g, round, rounds = SANITIZED ? 200 : 5000;
    int64_t count;
    (void)state;
    expect_items(NULL, 1, 100, 16);
    for (threads = 1; threads <= 5; threads++) {
        mt_context_desc d = small();
        mt_context *ctx;
        d.threads = threads;
        ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
        for (g = 0; g < 4; g++)
            for (count = 0; count < MOST_ITEMS; count += 1 + count / 3) expect_items(ctx, threads, count, grains[g]);
        expect_items(ctx, threads, 16 * threads, 16);
        expect_items(ctx, threads, -1, 1);
        for (round = 0; round < rounds; round++) expect_items(ctx, threads, 7, 1);
        mt_context_destroy(ctx);
    }
}

static void test_arena_region(void **state) {
    static const size_t firsts[] = {0, 640}, unused = 4096;
    mt_context_desc d = small();
    mt_context *ctx;
    void *arena;
    size_t all;
    (void)state;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
    all = mt_arena_available(ctx);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_alloc(ctx, 64, &arena));
    mt_arena_region(ctx, 128, 256, 1024);
    assert_int_equal(mt_arena_available(ctx), all - 1024);
    assert_int_equal(arena_offset(ctx, arena, 64), 128);
    assert_int_equal(arena_offset(ctx, arena, 64), 192); /* the region is full */
    assert_int_equal(arena_offset(ctx, arena, 64), 1024);
    mt_arena_release(ctx, 192);
    assert_int_equal(arena_offset(ctx, arena, 128), 1024); /* does not fit */
    assert_int_equal(arena_offset(ctx, arena, 64), 1152);
    mt_arena_region(ctx, 0, 128, 1024);
    assert_int_equal(arena_offset(ctx, arena, 64), 0);
    for (int i = 0; i < 2; i++) { /* end == 0: no region, whatever top is */
        mt_arena_region(ctx, firsts[i], 0, unused);
        assert_int_equal(mt_arena_available(ctx), all - firsts[i]);
        assert_int_equal(arena_offset(ctx, arena, 64), firsts[i]);
        assert_int_equal(arena_offset(ctx, arena, 64), firsts[i] + 64);
        mt_arena_release(ctx, 0);
        assert_int_equal(arena_offset(ctx, arena, 64), 0);
    }
    mt_context_destroy(ctx);
}

/* A region or a top behind the arena: nothing is available, and an allocation says so. */
static void test_arena_region_behind_arena(void **state) {
    mt_context_desc d = small();
    mt_context *ctx;
    void *p;
    size_t all;
    (void)state;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
    all = mt_arena_available(ctx);
    mt_arena_region(ctx, all + 64, 0, 0);
    assert_int_equal(mt_arena_available(ctx), 0);
    ASSERT_STATUS(ctx, MT_ERR_MEMORY, mt_arena_alloc(ctx, 64, &p));
    assert_null(p);
    mt_arena_region(ctx, 0, 64, all + 64);
    assert_int_equal(mt_arena_available(ctx), 0);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_alloc(ctx, 64, &p)); /* the region itself is inside */
    ASSERT_STATUS(ctx, MT_ERR_MEMORY, mt_arena_alloc(ctx, 64, &p));
    assert_null(p);
    mt_arena_region(ctx, all + 64, all + 256, 0);
    ASSERT_STATUS(ctx, MT_ERR_MEMORY, mt_arena_alloc(ctx, 64, &p));
    mt_arena_region(ctx, all, 0, 0);
    assert_int_equal(mt_arena_available(ctx), 0);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_alloc(ctx, 0, &p));
    mt_context_destroy(ctx);
}

/* ---- launch ------------------------------------------------------------------------------------------------------ */

typedef struct roll_call {
    pthread_t thread[8];
    int seen[8], cores[8];
} roll_call;

static mt_status here_rank(mt_comm *world, void *user) {
    roll_call *roll = (roll_call *)user;
    int rank = mt_comm_rank(world);
    roll->thread[rank] = pthread_self();
    roll->seen[rank]++;
    roll->cores[rank] = mti_allowed_cores(NULL, 0);
    return MT_SUCCESS;
}

static void test_launch(void **state) {
    roll_call roll;
    mt_launch_desc d;
    int cores = mti_allowed_cores(NULL, 0), r;
    (void)state;
    memset(&roll, 0, sizeof roll);
    memset(&d, 0, sizeof d);
    assert_int_equal(mt_launch(NULL, here_rank, &roll), MT_SUCCESS);
    /* with one rank, the caller's thread runs it and is not pinned */
    assert_true(pthread_equal(roll.thread[0], pthread_self()));
    assert_int_equal(roll.cores[0], cores);
    d.ranks = 8;
    assert_int_equal(mt_launch(&d, here_rank, &roll), MT_SUCCESS);
    for (r = 1; r < 8; r++) assert_int_equal(roll.seen[r], 1);
    assert_int_equal(roll.cores[3], cores >= 8 ? 1 : cores);
    d.ranks = 2;
    assert_int_equal(mt_launch(&d, here_rank, &roll), MT_SUCCESS);
    if (MTI_CAN_PIN) assert_int_equal(roll.cores[1], cores >= 2 ? 1 : cores);
    d.no_pinning = 1;
    assert_int_equal(mt_launch(&d, here_rank, &roll), MT_SUCCESS);
    assert_int_equal(roll.cores[1], cores);
    d.no_pinning = 0;
    d.cores_per_rank = 2;
    assert_int_equal(mt_launch(&d, here_rank, &roll), MT_SUCCESS);
    if (MTI_CAN_PIN) assert_int_equal(roll.cores[1], cores >= 4 ? 2 : cores);
    d.cores_per_rank = -1;
    assert_int_equal(mt_launch(&d, here_rank, &roll), MT_ERR_ARGUMENT);
    assert_int_equal(mti_allowed_cores(NULL, 0), cores);
}

/* ---- comparing the arguments of ranks ---------------------------------------------------------------------------- */

#define TOLD_RANKS 8

typedef struct told {
    int ranks, groups; /* rank r is in group r % groups */
    int odd;           /* rank with a different value; -1: none */
    int kind;          /* what differs, see told_settings */
    mt_status status[TOLD_RANKS];
    char text[TOLD_RANKS][MT_ERROR_BYTES];
} told;

enum { OTHER_VALUE, OTHER_NAME, ONE_MORE, LONG_VALUES, TWO_ODD, TOLD_KINDS };

static int told_settings(const told *t, int rank, mt_setting *list, char *value, size_t bytes) {
    static const mt_setting usual[] = {{"--lr", "0.003"}, {"--data", "one"}, {"--empty", ""}};
    int odd = rank == t->odd, count = 3;
    memcpy(list, usual, sizeof usual);
    if (t->groups > 1 && rank % t->groups) list[2].value = "of another group";
    if (odd && t->kind == OTHER_VALUE) list[1].value = "two";
    if (odd && t->kind == OTHER_NAME) list[1].name = "--text";
    if (odd && t->kind == ONE_MORE) list[count++] = usual[0];
    if (t->kind == TWO_ODD && (odd || rank == t->odd + 2)) list[1].value = odd ? "two" : "three";
    if (t->kind != LONG_VALUES) return count;
    memset(value, 'x', bytes - 1);
    memcpy(value + bytes - 10, odd ? "odd one" : "usual one", 8);
    value[bytes - 1] = 0;
    list[2].value = value;
    return count;
}

static mt_status told_rank(mt_comm *world, void *user) {
    told *t = (told *)user;
    mt_context_desc d = small();
    mt_context *ctx;
    mt_setting list[4];
    char value[5000];
    int rank = mt_comm_rank(world), count = told_settings(t, rank, list, value, sizeof value);
    float x = 1;
    MT_TRY(mt_context_create(world, &d, &ctx));
    t->status[rank] = mt_comm_compare(ctx, world, "told", rank % t->groups, list, count);
    snprintf(t->text[rank], sizeof t->text[rank], "%s", mt_last_error(ctx));
    CHECK(mt_context_allocated(ctx) == 0);
    if (t->odd < 0 && t->ranks > 1) CHECK(mt_comm_ledger(world).bytes[MT_ALL_GATHER] == 16 * (uint64_t)t->ranks);
    if (t->odd < 0) CHECK(mt_comm_ledger(world).calls[MT_ALL_GATHER] == (t->ranks > 1));
    MT_TRY(mt_all_reduce(ctx, world, &x, &x, 1, MT_F32, MT_SUM)); /* the communicator still works */
    CHECK(x == (float)t->ranks);
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

/* words: every rank's message contains all of them; NULL: nothing differs. */
static void told_expect(int ranks, int groups, int odd, int kind, const char *words) {
    static told t;
    int r;
    memset(&t, 0, sizeof t);
    t.ranks = ranks;
    t.groups = groups;
    t.odd = odd;
    t.kind = kind;
    assert_int_equal(run_ranks_with(ranks, told_rank, &t, sizeof t), MT_SUCCESS);
    for (r = 0; r < ranks; r++) {
        assert_int_equal(t.status[r], words ? MT_ERR_MISMATCH : MT_SUCCESS);
        assert_string_equal(t.text[r], t.text[0]);
        if (words && !test_has_words(t.text[r], words)) fail_msg("'%s' is not all in '%s'", words, t.text[r]);
    }
}

static void test_compare(void **state) {
    static const int counts[] = {1, 2, 3, 8};
    size_t i;
    (void)state;
    for (i = 0; i < COUNTOF(counts); i++) told_expect(counts[i], 1, -1, OTHER_VALUE, NULL);
    told_expect(8, 2, -1, OTHER_VALUE, NULL);
    told_expect(8, 8, 3, OTHER_VALUE, NULL); /* each rank is alone in its group: differences are allowed */
    told_expect(2, 1, 1, OTHER_VALUE, "told: --data is one on rank 0, but two on rank 1 of \"world\" (2 ranks)");
    told_expect(2, 1, 0, OTHER_VALUE, "told: --data is two on rank 0, but one on rank 1 of");
    told_expect(8, 1, 2, OTHER_VALUE, "--data is one on ranks 0, 1, 3, 4, 5, 6, 7, but two on rank 2 of");
    told_expect(8, 2, 5, OTHER_VALUE, "--data is one on ranks 1, 3, 7, but two on rank 5 of");
    told_expect(4, 1, 1, OTHER_NAME, "told: --data one on ranks 0, 2, 3, but --text one on rank 1 of");
    told_expect(4, 1, 3, ONE_MORE, "told: nothing more on ranks 0, 1, 2, but --lr 0.003 on rank 3 of");
    told_expect(4, 1, 0, ONE_MORE, "told: --lr 0.003 on rank 0, but nothing more on ranks 1, 2, 3 of");
    told_expect(3, 1, 2, LONG_VALUES, "told: --empty is ...xxxx|xusual o|, but ...xxxx|xodd one|on rank 2 of");
    told_expect(4, 1, 1, TWO_ODD, "told: --data is one on ranks 0, 2, but two on rank 1 of");
}

static void test_compare_arguments(void **state) {
    mt_setting list[2] = {{"a", "1"}, {"b", NULL}};
    mt_context_desc d = small();
    mt_context *ctx;
    mt_comm *comm;
    (void)state;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_comm_create_meta(4, 1, &comm));
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(comm, &d, &ctx));
    assert_int_equal(mt_comm_compare(NULL, comm, "x", 0, list, 1), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_compare(ctx, NULL, "x", 0, list, 1), MT_ERR_ARGUMENT);
    assert_non_null(strstr(mt_last_error(ctx), "mt_comm_compare: comm is NULL"));
    assert_int_equal(mt_comm_compare(ctx, comm, NULL, 0, list, 1), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_compare(ctx, comm, "x", 0, NULL, 1), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_compare(ctx, comm, "x", 0, list, -1), MT_ERR_ARGUMENT);
    assert_int_equal(mt_comm_compare(ctx, comm, "x", 0, list, 2), MT_ERR_ARGUMENT);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_comm_compare(ctx, comm, "x", 0, list, 1)); /* one rank: nothing to compare */
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_comm_compare(ctx, comm, "x", 0, NULL, 0));
    assert_int_equal(mt_comm_ledger(comm).calls[MT_ALL_GATHER], 0);
    mt_context_destroy(ctx);
    mt_comm_destroy(comm);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_collectives),
        cmocka_unit_test(test_tree_order),
        cmocka_unit_test(test_max_keeps_nan),
        cmocka_unit_test(test_all_to_all_arguments),
        cmocka_unit_test(test_ledger),
        cmocka_unit_test(test_meta),
        cmocka_unit_test(test_meta_alone),
        cmocka_unit_test(test_meta_threads),
        cmocka_unit_test(test_gather_host),
        cmocka_unit_test(test_split),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_create_for),
        cmocka_unit_test(test_nccl_is_not_built),
        cmocka_unit_test(test_p2p),
        cmocka_unit_test(test_conjugates),
        cmocka_unit_test(test_conjugates_alone),
        cmocka_unit_test(test_allocator),
        cmocka_unit_test(test_slots),
        cmocka_unit_test(test_version),
        cmocka_unit_test(test_services),
        cmocka_unit_test(test_forgotten_memory),
        cmocka_unit_test(test_messages_are_one_sentence),
        cmocka_unit_test(test_host_memory),
        cmocka_unit_test(test_invariant_sizes),
        cmocka_unit_test(test_cuda_is_not_built),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_context_arguments),
        cmocka_unit_test(test_parallel_for),
        cmocka_unit_test(test_arena),
        cmocka_unit_test(test_arena_region),
        cmocka_unit_test(test_arena_region_behind_arena),
        cmocka_unit_test(test_launch),
        cmocka_unit_test(test_compare),
        cmocka_unit_test(test_compare_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
