/* test_pack.c - tests packed weights: products with them against products without, which products use them, and that
   no copy is older than its weight. It is built once per GEMM library. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"
#include "mt_test_ranks.h"
#include "mt_reference.h"
#include "mt_test_scratch.h"

#define BUILT_IN (strcmp(mt_gemm_library(), "built-in") == 0)
#define CBLAS (strcmp(mt_gemm_library(), "CBLAS") == 0)
#define TRY_OK(ctx, call) ASSERT_STATUS(ctx, MT_SUCCESS, call)

/* A matrix of random numbers in (-1, 1). */
static mt_tensor matrix(mt_dtype dtype, int64_t rows, int64_t cols, int64_t pad) {
    mt_tensor from = ref_random(rows, cols, 0, 1, 0), t;
    t = mt_tensor_make(ref_bytes((size_t)(rows * (cols + pad)) * mt_dtype_size(dtype)), dtype, rows, cols + pad);
    t = mt_tensor_cols(t, 0, cols);
    OK(mt_convert(ref.ctx, from, t));
    return t;
}

/* Writes to a matrix behind the library's back. */
static void overwrite(mt_tensor t) {
    for (int64_t i = 0; i < t.rows; i++)
        memset((char *)t.data + (size_t)(i * mt_tensor_ld(t)) * mt_dtype_size(t.dtype), 0,
               (size_t)t.cols * mt_dtype_size(t.dtype));
}

static mt_tensor result(mt_dtype dtype, int64_t rows, int64_t cols) {
    return mt_tensor_make(ref_bytes((size_t)(rows * cols) * mt_dtype_size(dtype)), dtype, rows, cols);
}

static size_t bytes_of(mt_tensor t) { return (size_t)(t.rows * t.cols) * mt_dtype_size(t.dtype); }

/* Compares two contiguous results of products with inner size k. The sum of k absolute values below 1 is at most k. */
static void expect_close(mt_tensor got, mt_tensor want, int64_t k) {
    mt_tensor x = result(MT_F32, got.rows, got.cols), y = result(MT_F32, got.rows, got.cols);
    double allowed = (2 + sqrt((double)k)) * 1.2e-7 * 0.5 * (double)k, ulp = got.dtype == MT_F32 ? 0 : 1.0 / 128;
    if (BUILT_IN || CBLAS) {
        assert_memory_equal(got.data, want.data, bytes_of(got));
        return;
    }
    OK(mt_convert(ref.ctx, got, x));
    OK(mt_convert(ref.ctx, want, y));
    for (int64_t i = 0; i < x.rows * x.cols; i++) {
        double a = (double)((float *)x.data)[i], b = (double)((float *)y.data)[i];
        if (!(fabs(a - b) <= allowed + ulp * fabs(b))) fail_msg("element %ld is %g, must be %g", (long)i, a, b);
    }
}

/* Packs w, and returns 1 if there is a packed copy then. */
static int pack(mt_context *ctx, mt_tensor w) {
    size_t before = mt_context_allocated(ctx);
    TRY_OK(ctx, mt_gemm_pack(ctx, w));
    return mt_context_allocated(ctx) > before;
}

/* y = x w^T, packed and not packed. The packed copy is used: w is overwritten. oneDNN may take only an x without
   padding. */
static void try_product(int threads, mt_dtype type, mt_dtype y_type, int64_t m, int64_t n, int64_t k, int64_t pad) {
    mt_context *ctx = test_context(MT_DEVICE_CPU, threads);
    mt_tensor x = matrix(type, m, k, pad), w = matrix(type, n, k, 2 * pad);
    mt_tensor y = result(y_type, m, n), z = result(y_type, m, n);
    TRY_OK(ctx, mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1, x, w, 0, y));
    if (pack(ctx, w)) {
        TRY_OK(ctx, mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1, x, w, 0, z));
        expect_close(z, y, k);
        overwrite(w);
        TRY_OK(ctx, mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1, x, w, 0, y));
        if (BUILT_IN || (pad == 0 && m <= 256)) assert_memory_equal(y.data, z.data, bytes_of(y));
    } else {
        assert_false(BUILT_IN);
        TRY_OK(ctx, mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1, x, w, 0, z));
        assert_memory_equal(y.data, z.data, bytes_of(y));
    }
    mt_context_destroy(ctx);
    ref_release();
}

static void test_products(void **state) {
    static const int64_t sizes[][3] = {{9, 64, 64},    {12, 33, 70},    {70, 192, 300}, {128, 768, 96},  {33, 130, 513},
                                       {200, 64, 140}, {256, 320, 100}, {300, 128, 64}, {17, 2112, 390}, {40, 97, 1}};
    static const mt_dtype types[][2] = {{MT_F32, MT_F32}, {MT_BF16, MT_BF16}, {MT_BF16, MT_F32}, {MT_F16, MT_F16}};
    (void)state;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (size_t t = 0; t < sizeof types / sizeof *types; t++)
            for (int threads = 1; threads <= 3; threads++)
                for (int64_t pad = 0; pad <= 1; pad++)
                    try_product(threads, types[t][0], types[t][1], sizes[s][0], sizes[s][1], sizes[s][2], pad);
}

/* With few rows, as in decoding, products read the weight itself, and have the same bits with a packed copy. */
static void test_few_rows(void **state) {
    (void)state;
    for (int64_t m = 1; m <= 8; m++) {
        mt_tensor x = matrix(MT_F32, m, 96, 0), w = matrix(MT_F32, 192, 96, 0);
        mt_tensor y = result(MT_F32, m, 192), z = result(MT_F32, m, 192);
        OK(mt_gemm(ref.ctx, MT_NO_TRANS, MT_TRANS, 1, x, w, 0, y));
        pack(ref.ctx, w);
        OK(mt_gemm(ref.ctx, MT_NO_TRANS, MT_TRANS, 1, x, w, 0, z));
        assert_memory_equal(y.data, z.data, bytes_of(y));
        mt_gemm_unpack(ref.ctx, w);
    }
}

/* A product that must not use the copy of a weight that has changed gives the same as in a context without copies. */
static void expect_unpacked(mt_context *plain, mt_transpose ta, mt_transpose tb, float alpha, mt_tensor a, mt_tensor b,
                            float beta) {
    int64_t m = ta ? a.cols : a.rows, n = tb ? b.rows : b.cols;
    mt_tensor y = result(MT_F32, m, n), z = result(MT_F32, m, n);
    memset(y.data, 0, bytes_of(y));
    memset(z.data, 0, bytes_of(z));
    OK(mt_gemm(ref.ctx, ta, tb, alpha, a, b, beta, y));
    TRY_OK(plain, mt_gemm(plain, ta, tb, alpha, a, b, beta, z));
    assert_memory_equal(y.data, z.data, bytes_of(y));
}

static void test_other_products(void **state) {
    enum { M = 40, N = 192, K = 192 };
    mt_context *plain = test_context(MT_DEVICE_CPU, 1);
    mt_tensor x = matrix(MT_F32, M, K, 0), w = matrix(MT_F32, N, K, 0), t = matrix(MT_F32, K, M, 0), v = w;
    mt_tensor half = mt_tensor_cols(x, 0, K / 2);
    (void)state;
    v.rows = N / 2, v.cols = v.ld = K / 2; /* another matrix in the same memory */
    pack(ref.ctx, w);
    for (int64_t i = 0; i < N * K; i++) ((float *)w.data)[i] *= -0.5f; /* behind the library's back */
    expect_unpacked(plain, MT_NO_TRANS, MT_TRANS, 2, x, w, 0);
    expect_unpacked(plain, MT_NO_TRANS, MT_TRANS, 1, x, w, 1);
    expect_unpacked(plain, MT_NO_TRANS, MT_NO_TRANS, 1, x, w, 0);
    expect_unpacked(plain, MT_TRANS, MT_TRANS, 1, t, w, 0);
    expect_unpacked(plain, MT_NO_TRANS, MT_TRANS, 1, x, mt_tensor_rows(w, 0, N / 2), 0);
    expect_unpacked(plain, MT_NO_TRANS, MT_TRANS, 1, x, mt_tensor_rows(w, 64, N - 64), 0);
    expect_unpacked(plain, MT_NO_TRANS, MT_TRANS, 1, half, mt_tensor_cols(w, 0, K / 2), 0);
    expect_unpacked(plain, MT_NO_TRANS, MT_TRANS, 1, half, v, 0);
    mt_gemm_unpack(ref.ctx, w);
    pack(ref.ctx, mt_tensor_rows(mt_tensor_cols(w, 0, K / 2), 0, N / 2));
    for (int64_t i = 0; i < N * K; i++) ((float *)w.data)[i] += 1;
    expect_unpacked(plain, MT_NO_TRANS, MT_TRANS, 1, half, v, 0); /* differs only in ld */
    mt_context_destroy(plain);
}

/* The result may be other columns of the matrix in which the weight is. */
static void test_result_beside_the_weight(void **state) {
    mt_context *plain = test_context(MT_DEVICE_CPU, 1);
    mt_tensor all = matrix(MT_F32, 64, 160, 0), w = mt_tensor_cols(all, 0, 96), c = mt_tensor_cols(all, 96, 64);
    mt_tensor x = matrix(MT_F32, 64, 96, 0), y = result(MT_F32, 64, 64), z = result(MT_F32, 64, 64);
    (void)state;
    pack(ref.ctx, w);
    OK(mt_gemm(ref.ctx, MT_NO_TRANS, MT_TRANS, 1, x, w, 0, c));
    TRY_OK(plain, mt_gemm(plain, MT_NO_TRANS, MT_TRANS, 1, x, w, 0, z));
    TRY_OK(plain, mt_copy(plain, c, y));
    assert_memory_equal(y.data, z.data, bytes_of(y));
    mt_context_destroy(plain);
}

/* ---- writes ------------------------------------------------------------------------------------------------------ */

enum { FILL, COPY, UPLOAD, GEMM, ADD, RANDOM, ADAMW, LIST, UNPACK, WRITES };

/* Writes to w, or to a part of it, with an operator. */
static void write_to(int how, mt_tensor w) {
    mt_tensor last = mt_tensor_cols(mt_tensor_rows(w, w.rows - 1, 1), w.cols - 1, 1);
    mt_tensor other = matrix(MT_F32, w.rows, w.cols, 0), m = ref_filled(w.rows, w.cols, 0, 0);
    mt_tensor v = ref_filled(w.rows, w.cols, 0, 0), square = matrix(MT_F32, w.cols, w.cols, 0);
    mt_adamw hyper = {.lr = 0.1f, .beta1 = 0.9f, .beta2 = 0.99f, .eps = 1e-8f, .grad_scale = 1, .step = 1};
    mt_adamw_tensor one = {.param = w, .master = mt_none(), .grad = other, .m = m, .v = v};
    mt_random at = {.seed = 1, .global_cols = w.cols};
    mt_multi_tensor *list;
    switch (how) {
    case FILL: OK(mt_fill(ref.ctx, last, 0.0f)); return;
    case COPY: OK(mt_copy(ref.ctx, other, w)); return;
    case UPLOAD: OK(mt_upload(ref.ctx, other.data, w)); return;
    case GEMM: OK(mt_gemm(ref.ctx, MT_NO_TRANS, MT_NO_TRANS, 1, other, square, 1, w)); return;
    case ADD: OK(mt_add(ref.ctx, w, other, w)); return;
    case RANDOM: OK(mt_random_normal(ref.ctx, mt_tensor_rows(w, 0, 1), 1, at)); return;
    case ADAMW: OK(mt_adamw_step(ref.ctx, &hyper, w, mt_none(), other, m, v)); return;
    case LIST:
        OK(mt_multi_tensor_create_adamw(ref.ctx, &one, 1, 0, &list));
        OK(mt_multi_tensor_adamw(ref.ctx, list, &hyper, NULL));
        mt_multi_tensor_destroy(ref.ctx, list);
        return;
    default: mt_gemm_unpack(ref.ctx, last);
    }
}

static void test_writes(void **state) {
    mt_context *plain = test_context(MT_DEVICE_CPU, 1);
    (void)state;
    for (int how = 0; how < WRITES; how++) {
        mt_tensor x = matrix(MT_F32, 20, 64, 0), w = matrix(MT_F32, 64, 64, 0), other = matrix(MT_F32, 64, 64, 0);
        size_t before = mt_context_allocated(ref.ctx), one;
        pack(ref.ctx, other);
        one = mt_context_allocated(ref.ctx);
        pack(ref.ctx, w);
        write_to(how, w);
        expect_unpacked(plain, MT_NO_TRANS, MT_TRANS, 1, x, w, 0);
        assert_int_equal(mt_context_allocated(ref.ctx), one); /* the other copy is still there */
        mt_gemm_unpack(ref.ctx, other);
        assert_int_equal(mt_context_allocated(ref.ctx), before);
        ref_release();
    }
    mt_context_destroy(plain);
}

/* ---- memory, contexts and errors --------------------------------------------------------------------------------- */

typedef struct counted {
    int left; /* allocations that still succeed; -1: all */
    size_t held;
} counted;

static void *counted_alloc(void *user, size_t bytes, size_t alignment) {
    counted *c = (counted *)user;
    void *ptr = NULL;
    if (c->left == 0 || posix_memalign(&ptr, alignment, bytes) != 0) return NULL;
    if (c->left > 0) c->left--;
    c->held += bytes;
    return ptr;
}

static void counted_free(void *user, void *ptr, size_t bytes) {
    ((counted *)user)->held -= bytes;
    free(ptr);
}

static mt_context *counted_context(counted *c, int check) {
    mt_context_desc d = {
        .arena_bytes = 1 << 20, .check = check, .allocator = {counted_alloc, counted_free, c}, .threads = 1};
    mt_context *ctx = NULL;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
    return ctx;
}

/* Copies are freed once: when they are replaced, by mt_gemm_unpack, and with the context. Each context has its own. */
static void test_memory(void **state) {
    counted c = {-1, 0}, e = {-1, 0};
    mt_context *ctx = counted_context(&c, 0), *other = counted_context(&e, 1);
    mt_tensor w = matrix(MT_F32, 100, 70, 0), v = matrix(MT_BF16, 70, 64, 0);
    size_t before = c.held, without = e.held, packed;
    int packs = pack(ctx, w);
    (void)state;
    packed = c.held;
    if (BUILT_IN) assert_true(packed - before >= 100 * 70 * 4 && packed - before <= 128 * 70 * 4 + 64);
    pack(ctx, w);
    assert_int_equal(c.held, packed);
    pack(other, w);
    pack(other, v);
    mt_gemm_unpack(ctx, w);
    mt_gemm_unpack(ctx, w);
    mt_gemm_unpack(NULL, w);
    assert_int_equal(c.held, before);
    if (packs) assert_true(packed > before && e.held > without); /* other still has its copies */
    pack(ctx, w);
    mt_context_destroy(ctx);
    mt_context_destroy(other);
    assert_true(c.held == 0 && e.held == 0);
}

static void test_memory_that_runs_out(void **state) {
    counted c = {-1, 0};
    mt_context *ctx = counted_context(&c, 0), *plain = test_context(MT_DEVICE_CPU, 1);
    mt_tensor x = matrix(MT_F32, 20, 64, 0), w = matrix(MT_F32, 64, 64, 0);
    mt_tensor y = result(MT_F32, 20, 64), z = result(MT_F32, 20, 64);
    size_t before = c.held;
    int packs = pack(ctx, w);
    (void)state;
    OK(mt_fill(ref.ctx, w, 2.0f)); /* of another context */
    c.left = 0;
    ASSERT_STATUS(ctx, packs ? MT_ERR_MEMORY : MT_SUCCESS, mt_gemm_pack(ctx, w));
    assert_int_equal(c.held, before);
    TRY_OK(ctx, mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1, x, w, 0, y)); /* the old copy is not used */
    TRY_OK(plain, mt_gemm(plain, MT_NO_TRANS, MT_TRANS, 1, x, w, 0, z));
    assert_memory_equal(y.data, z.data, bytes_of(y));
    mt_context_destroy(ctx);
    mt_context_destroy(plain);
}

/* A meta context counts the memory of a CPU, and reads no data. Where packing has no use, nothing is allocated. */
static void test_meta_and_refusals(void **state) {
    mt_context *cpu = test_context(MT_DEVICE_CPU, 2), *meta = test_context(MT_DEVICE_META, 2), *ctx = NULL;
    mt_context_desc d = {.invariant = 2, .arena_bytes = 1 << 16};
    mt_tensor x = matrix(MT_F32, 40, 320, 0), w = matrix(MT_F32, 200, 320, 0), y = result(MT_F32, 40, 200), bad = w;
    size_t before[2] = {mt_context_allocated(cpu), mt_context_allocated(meta)};
    (void)state;
    assert_int_equal(pack(cpu, w), pack(meta, w));
    assert_int_equal(mt_context_allocated(cpu) - before[0], mt_context_allocated(meta) - before[1]);
    TRY_OK(cpu, mt_gemm(cpu, MT_NO_TRANS, MT_TRANS, 1, x, w, 0, y));
    TRY_OK(meta, mt_gemm(meta, MT_NO_TRANS, MT_TRANS, 1, x, w, 0, y));
    assert_int_equal(mt_arena_peak(cpu), mt_arena_peak(meta));
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
    assert_false(pack(ctx, w)); /* in invariant mode */
    mt_context_destroy(ctx);
    assert_int_equal(mt_gemm_pack(NULL, w), MT_ERR_ARGUMENT);
    bad.data = NULL;
    ASSERT_STATUS(cpu, MT_ERR_ARGUMENT, mt_gemm_pack(cpu, bad));
    bad = w, bad.dtype = MT_I32;
    ASSERT_STATUS(cpu, MT_ERR_DTYPE, mt_gemm_pack(cpu, bad));
    bad = w, bad.ld = 3;
    ASSERT_STATUS(cpu, MT_ERR_SHAPE, mt_gemm_pack(cpu, bad));
    bad = w, bad.ld = (int64_t)1 << 32;
    ASSERT_STATUS(cpu, MT_ERR_UNSUPPORTED, mt_gemm_pack(cpu, bad));
    assert_false(pack(cpu, mt_tensor_rows(w, 0, 0)));
    mt_context_destroy(cpu);
    mt_context_destroy(meta);
}

/* ---- registries -------------------------------------------------------------------------------------------------- */

enum { SEQ = 32, VOCAB = 96, HIDDEN = 64 };

typedef struct model {
    test_rank r;
    mt_gpt gpt;
    mt_optimizer adam;
    float *logits, *again;
    int32_t ids[SEQ];
} model;

typedef struct job {
    int tp, threads;
    mt_dtype dtype;
} job;

static mt_status model_open(mt_comm *world, const job *j, model *m) {
    mt_context_desc where = {.threads = j->threads, .arena_bytes = (size_t)16 << 20};
    mt_gpt_desc d = {.vocab = VOCAB, .layers = 2, .max_seq = SEQ, .layer = {.hidden = HIDDEN, .heads = 4}};
    mt_data_parallel_desc share = {.sharded_optimizer = 1};
    memset(m, 0, sizeof *m);
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = j->tp}, &where, &m->r));
    MT_TRY(mt_params_set_dtype(m->r.ctx, m->r.params, j->dtype));
    MT_TRY(mt_params_set_data_parallel(m->r.ctx, m->r.params, &share));
    MT_TRY(mt_gpt_create(m->r.ctx, m->r.params, &d, &m->gpt));
    for (int i = 0; i < SEQ; i++) m->ids[i] = 7 * i % VOCAB;
    m->logits = test_floats(&m->r, SEQ * VOCAB, 0);
    m->again = test_floats(&m->r, SEQ * VOCAB, 0);
    return MT_SUCCESS;
}

static mt_status logits(model *m, float *out) {
    mt_batch batch = {.sequences = 1, .seq = SEQ};
    size_t mark = mt_arena_mark(m->r.ctx);
    mt_tensor y;
    MT_TRY(mt_arena_tensor(m->r.ctx, mt_params_dtype(m->r.params), SEQ, VOCAB, &y));
    MT_TRY(mt_gpt_logits(m->r.ctx, &m->gpt, &batch, m->ids, y));
    MT_TRY(mt_convert(m->r.ctx, y, mt_tensor_f32(out, SEQ, VOCAB)));
    mt_arena_release(m->r.ctx, mark);
    return MT_SUCCESS;
}

static void unpack_all(model *m) {
    for (int i = 0; i < mt_params_count(m->r.params); i++)
        mt_gemm_unpack(m->r.ctx, mt_params_at(m->r.params, i)->value);
}

/* The logits are those of the present values. `exactly`: to the last bit. */
static mt_status expect_fresh(model *m, const char *after, int exactly) {
    double allowed = exactly ? 0 : mt_params_dtype(m->r.params) == MT_F32 ? 1e-5 : 0.03;
    MT_TRY(logits(m, m->logits));
    unpack_all(m);
    MT_TRY(logits(m, m->again));
    for (int i = 0; i < SEQ * VOCAB; i++) {
        double a = (double)m->logits[i], b = (double)m->again[i];
        if (fabs(a - b) <= allowed) continue;
        fprintf(stderr, "after %s: logit %d is %g, must be %g\n", after, i, a, b);
        return MT_ERR_DATA;
    }
    return MT_SUCCESS;
}

/* Writes all values through each function that does so, with packed weights: none of them may be used afterwards. */
static mt_status model_writes(model *m, mt_context *other) {
    mt_context *ctx = m->r.ctx;
    mt_params *params = m->r.params;
    float *host = test_noise(&m->r, VOCAB * 4 * HIDDEN, 77, 0.1f);
    MT_TRY(mt_params_pack(ctx, params));
    MT_TRY(expect_fresh(m, "packing", BUILT_IN || CBLAS));
    MT_TRY(mt_params_pack(ctx, params));
    MT_TRY(mt_params_zero_grad(ctx, params));
    MT_TRY(mt_sync_gradients(ctx, params));
    MT_TRY(mt_optimizer_step(ctx, &m->adam, 0.5f, 1.0f));
    MT_TRY(expect_fresh(m, "mt_optimizer_step", 1));
    MT_TRY(mt_params_pack(ctx, params));
    MT_TRY(mt_params_init(other, params, 99));
    MT_TRY(expect_fresh(m, "mt_params_init", 1));
    MT_TRY(mt_params_pack(ctx, params));
    for (int i = 0; i < mt_params_count(params); i++)
        MT_TRY(mt_param_scatter(other, mt_params_at(params, i), host, mt_params_at(params, i)->value));
    MT_TRY(expect_fresh(m, "mt_param_scatter", 1));
    MT_TRY(mt_params_init(ctx, params, 5));
    MT_TRY(mt_params_pack(ctx, params));
    for (int i = 0; i < mt_params_count(params); i++)
        MT_TRY(mt_optimizer_scatter(other, &m->adam, mt_params_at(params, i), MT_MASTER, host));
    return expect_fresh(m, "mt_optimizer_scatter", 1);
}

static mt_status model_rank(mt_comm *world, void *user) {
    const job *j = (const job *)user;
    mt_optimizer_desc how = {.weight_decay = 0.5f};
    mt_context_desc where = {.arena_bytes = (size_t)16 << 20, .threads = 1};
    mt_context *other = NULL;
    mt_status status;
    size_t before;
    model m;
    MT_TRY(model_open(world, j, &m));
    MT_TRY(mt_context_create(world, &where, &other));
    MT_TRY(mt_params_init(m.r.ctx, m.r.params, 1234));
    MT_TRY(mt_optimizer_create(m.r.ctx, m.r.params, &how, &m.adam));
    before = mt_context_allocated(m.r.ctx);
    MT_TRY(mt_params_pack(m.r.ctx, m.r.params));
    if (BUILT_IN && mt_context_allocated(m.r.ctx) == before) return MT_ERR_DATA;
    unpack_all(&m);
    if (mt_context_allocated(m.r.ctx) != before) return MT_ERR_DATA;
    status = model_writes(&m, other);
    if (status != MT_SUCCESS) fprintf(stderr, "%s %s\n", mt_last_error(m.r.ctx), mt_last_error(other));
    mt_optimizer_destroy(m.r.ctx, &m.adam);
    mt_context_destroy(other);
    test_rank_close(&m.r);
    return status;
}

static void test_registries(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int tp = 1; tp <= 2 && tp <= ranks; tp++)
            for (int threads = 1; threads <= 2; threads++) {
                job j = {tp, threads, threads == 2 && tp == ranks ? MT_BF16 : MT_F32};
                test_launch(ranks, model_rank, &j);
            }
}

/* A checkpoint that is loaded drops the packed weights. mt_params_destroy frees them. */
static void test_load_and_destroy(void **state) {
    job j = {1, 1, MT_F32};
    mt_training_state at = {.step = 1};
    mt_checkpoint_desc d = {.directory = in_scratch("run")};
    mt_checkpoint *c = NULL;
    mt_context *other = test_context(MT_DEVICE_CPU, 1);
    mt_comm *world = NULL;
    size_t before;
    model m;
    (void)state;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_comm_create_local(1, 60.0, &world));
    ASSERT_STATUS(NULL, MT_SUCCESS, model_open(world, &j, &m));
    before = mt_context_allocated(m.r.ctx);
    REFUSED(m.r.ctx, MT_ERR_ARGUMENT, "call mt_params_init first", mt_params_pack(m.r.ctx, m.r.params));
    TRY_OK(m.r.ctx, mt_params_init(m.r.ctx, m.r.params, 1));
    REFUSED(other, MT_ERR_ARGUMENT, "the context that mt_params_create got", mt_params_pack(other, m.r.params));
    REFUSED(other, MT_ERR_ARGUMENT, "params is NULL", mt_params_pack(other, NULL));
    assert_int_equal(mt_params_pack(NULL, m.r.params), MT_ERR_ARGUMENT);
    TRY_OK(m.r.ctx, mt_checkpoint_create(m.r.ctx, m.r.params, &d, &c));
    TRY_OK(m.r.ctx, mt_checkpoint_save(m.r.ctx, c, &at));
    TRY_OK(m.r.ctx, mt_params_init(m.r.ctx, m.r.params, 2));
    TRY_OK(m.r.ctx, mt_params_pack(m.r.ctx, m.r.params));
    TRY_OK(m.r.ctx, mt_checkpoint_load(m.r.ctx, c, 1, &at));
    TRY_OK(m.r.ctx, expect_fresh(&m, "mt_checkpoint_load", 1));
    TRY_OK(m.r.ctx, mt_params_pack(m.r.ctx, m.r.params));
    mt_checkpoint_destroy(m.r.ctx, c);
    mt_params_destroy(m.r.params);
    m.r.params = NULL;
    assert_true(mt_context_allocated(m.r.ctx) <= before);
    mt_context_destroy(other);
    test_rank_close(&m.r);
    mt_comm_destroy(world);
    forget("run");
}

static int open_folder(void **state) {
    (void)state;
    return scratch_open("test_pack");
}

static int close_folder(void **state) {
    (void)state;
    return scratch_close();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        REF_TEST(test_products),
        REF_TEST(test_few_rows),
        REF_TEST(test_other_products),
        REF_TEST(test_result_beside_the_weight),
        REF_TEST(test_writes),
        REF_TEST(test_memory),
        REF_TEST(test_memory_that_runs_out),
        REF_TEST(test_meta_and_refusals),
        cmocka_unit_test(test_registries),
        cmocka_unit_test(test_load_and_destroy),
    };
    return cmocka_run_group_tests_name("pack", tests, open_folder, close_folder);
}
