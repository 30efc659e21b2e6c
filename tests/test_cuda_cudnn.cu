/* test_cuda_cudnn.cu - tests attention by cuDNN (MT_USE_CUDNN): which calls it computes, out and lse against the CPU
   backend in f32, the library's own backward after it, its plans, and CUDA graphs.
     On a GPU:       nvcc -std=c++17 -O2 -arch=native -I. tests/test_cuda_cudnn.cu -lcublasLt -lcudnn
     Without a GPU:  the engine in tests/engine/ runs the same file on a CPU, with a stand-in for cuDNN. Only there it
                     makes calls of cuDNN fail, and counts them. */

#define MEGATRON_IMPLEMENTATION
#if !defined(MT_USE_CUDNN)
#define MT_USE_CUDNN
#endif
#include "mt_kernels.cuh"

#include "mt_test_cuda.h"

#include <math.h>

#if defined(MT_CUDA_ENGINE)
#include "runtime.h"
namespace mte {
struct CudnnCounts {
    int handles, descriptors, plans, calls;
};
CudnnCounts cudnn_counts();
void cudnn_refuse(int status);
} // namespace mte
#endif

#define GAP 8

/* How queries, keys and values lie in memory. APART: three tensors, whose rows are not the same distance apart. */
typedef enum form { PER_GROUP, CONCATENATED, APART } form;

typedef struct config {
    int64_t batch, seq, groups, per_group, dim;
    form in;
    mt_dtype type;
    mt_mask mask;
} config;

typedef struct call {
    mt_attention_desc s;
    form in;
    mt_tensor qkv, q, k, v, out, lse, dout, dqkv, dq, dk, dv;
} call;

static const char *describe(const config *c) {
    static char text[160];
    snprintf(text, sizeof text, "%s, head_dim %d, %s, batch %d, seq %d, %d groups of %d, form %d",
             mt_dtype_name(c->type), (int)c->dim, c->mask == MT_MASK_CAUSAL ? "causal" : "bidirectional", (int)c->batch,
             (int)c->seq, (int)c->groups, (int)c->per_group, (int)c->in);
    return text;
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

/* A tensor of NaN, with `gap` elements between its rows. */
static mt_tensor tensor_new(mt_dtype type, int64_t rows, int64_t cols, int64_t gap) {
    mt_tensor whole;
    OK(mt_arena_tensor(gpu, type, rows, cols + gap, &whole));
    OK(mt_fill(gpu, whole, NAN));
    return mt_tensor_cols(whole, 0, cols);
}

static mt_tensor noise(mt_dtype type, int64_t rows, int64_t cols, int64_t gap, uint64_t seed) {
    float *x = (float *)malloc((size_t)(rows * cols) * sizeof *x);
    mt_tensor f, t = tensor_new(type, rows, cols, gap);
    size_t mark = mt_arena_mark(gpu);
    for (int64_t i = 0; i < rows * cols; i++) x[i] = 2.0f * test_float(&seed);
    OK(mt_arena_tensor(gpu, MT_F32, rows, cols, &f));
    OK(mt_upload(gpu, x, f));
    OK(mt_convert(gpu, f, t));
    mt_arena_release(gpu, mark);
    free(x);
    return t;
}

static mt_tensor on_cpu(mt_tensor like) {
    mt_tensor t;
    OK(mt_arena_tensor(cpu, MT_F32, like.rows, like.cols, &t));
    return t;
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

static call call_new(const config *c) {
    int64_t heads = c->groups * c->per_group, tokens = c->batch * c->seq, width = heads * c->dim;
    int64_t kv = c->groups * c->dim;
    call k;
    memset(&k, 0, sizeof k);
    k.in = c->in;
    k.s.batch = c->batch, k.s.seq = c->seq, k.s.groups = c->groups, k.s.heads_per_group = c->per_group;
    k.s.head_dim = c->dim;
    k.s.scores.mask = c->mask;
    k.s.qkv_layout = c->in == PER_GROUP ? MT_QKV_PER_GROUP : MT_QKV_CONCATENATED;
    if (c->in == APART) {
        k.q = noise(c->type, tokens, width, 8, 1), k.k = noise(c->type, tokens, kv, 16, 3);
        k.v = noise(c->type, tokens, kv, 0, 4);
        k.dq = tensor_new(c->type, tokens, width, GAP), k.dk = tensor_new(c->type, tokens, kv, GAP);
        k.dv = tensor_new(c->type, tokens, kv, GAP);
    } else {
        k.qkv = noise(c->type, tokens, width + 2 * kv, GAP, 1);
        k.dqkv = tensor_new(c->type, tokens, width + 2 * kv, GAP);
    }
    k.out = tensor_new(c->type, tokens, width, 24);
    k.lse = tensor_new(MT_F32, heads, tokens, c->batch == 2 || c->seq == 33 ? GAP : 0);
    k.dout = noise(c->type, tokens, width, GAP, 2);
    return k;
}

static mt_status forward(mt_context *ctx, const call *k) {
    if (k->in == APART) return mt_dot_product_attention_forward(ctx, &k->s, k->q, k->k, k->v, k->out, k->lse);
    return mt_attention_forward(ctx, &k->s, k->qkv, k->out, k->lse);
}

static mt_status backward(mt_context *ctx, const call *k) {
    if (k->in == APART)
        return mt_dot_product_attention_backward(ctx, &k->s, k->q, k->k, k->v, k->out, k->lse, k->dout, k->dq, k->dk,
                                                 k->dv);
    return mt_attention_backward(ctx, &k->s, k->qkv, k->out, k->lse, k->dout, k->dqkv);
}

/* The same call as the table of kernels sees it. */
static mti_attention seen(const call *k, int backwards) {
    mt_attention_desc s = mti_attention_defaults(&k->s);
    mti_attention a = mti_attention_resolve(gpu, &s, k->out, k->lse);
    if (backwards) a.dout = k->dout;
    if (k->in != APART) mti_attention_fused(&a, k->qkv, backwards ? k->dqkv : mt_none());
    else a.q_step = s.heads_per_group * s.head_dim, a.q = k->q, a.k = k->k, a.v = k->v;
    mti_attention_simplify(&a.desc);
    return a;
}

/* The row of the table that runs a call. */
static const char *row_of(const call *k, int backwards, int capability) {
    mti_attention a = seen(k, backwards);
    OK(mti_cudnn_prepare(&a));
    return mti_attention_choose(&a, capability, 90, 0)->name;
}

/* ---- against the CPU --------------------------------------------------------------------------------------------- */

/* Compares head by head: see `near` in test_cuda_flash.cu. */
static void near(const config *c, const char *what, mt_tensor got, mt_tensor expected, double noise) {
    double roundoff = c->type == MT_BF16 ? 1.0 / 256 : 1.0 / 2048;
    float *x = download(gpu, got), *y = (float *)expected.data;
    for (int64_t i = 0; i < got.rows * got.cols; i += c->dim) {
        double error = 0, size = 0, bound;
        for (int64_t d = 0; d < c->dim; d++) {
            error += ((double)x[i + d] - (double)y[i + d]) * ((double)x[i + d] - (double)y[i + d]);
            size += (double)y[i + d] * (double)y[i + d];
        }
        bound = (c->dim < 64 ? 3 : 2) * roundoff * sqrt(size) + noise;
        if (!(sqrt(error) <= bound))
            fail_msg("%s: %s, row %lld, column %lld: off by %g, %g is allowed, size %g", describe(c), what,
                     (long long)(i / got.cols), (long long)(i % got.cols), sqrt(error), bound, sqrt(size));
    }
    free(x);
}

static void near_lse(const config *c, mt_tensor got, mt_tensor expected) {
    float *x = download(gpu, got), *y = (float *)expected.data;
    for (int64_t i = 0; i < got.rows * got.cols; i++)
        if (!(fabsf(x[i] - y[i]) <= 1e-5f))
            fail_msg("%s: lse %lld is %.9g, on the CPU %.9g", describe(c), (long long)i, (double)x[i], (double)y[i]);
    free(x);
}

static void gap_untouched(const char *what, mt_tensor t) {
    int64_t gap = mt_tensor_ld(t) - t.cols;
    float *x = download(gpu, mt_tensor_cols(mt_tensor_make(t.data, t.dtype, t.rows, t.cols + gap), t.cols, gap));
    for (int64_t i = 0; i < t.rows * gap; i++)
        if (!isnan(x[i])) fail_msg("%s: something was written behind row %lld", what, (long long)(i / gap));
    free(x);
}

/* The forward of cuDNN and the backward of the library against the CPU's, which get the GPU's out and lse. */
static void against_cpu(config c) {
    size_t mark = mt_arena_mark(gpu), host_mark = mt_arena_mark(cpu);
    double noise = (double)c.dim * 6e-8 + sqrt((double)c.seq) / 33554432.0, size = 2.0 * sqrt((double)c.dim);
    call k = call_new(&c), h = k;
    h.qkv = k.qkv.data ? widened(k.qkv) : k.qkv;
    if (c.in == APART) h.q = widened(k.q), h.k = widened(k.k), h.v = widened(k.v);
    h.out = on_cpu(k.out), h.lse = on_cpu(k.lse), h.dout = widened(k.dout);
    h.dqkv = on_cpu(k.dqkv), h.dq = on_cpu(k.dq), h.dk = on_cpu(k.dk), h.dv = on_cpu(k.dv);
    assert_string_equal(row_of(&k, 0, 90), "cudnn");
    OK(forward(gpu, &k));
    OK(backward(gpu, &k));
    ASSERT_STATUS(cpu, MT_SUCCESS, forward(cpu, &h));
    near(&c, "out", k.out, h.out, 1e-6 * size);
    near_lse(&c, k.lse, h.lse);
    gap_untouched("out", k.out);
    gap_untouched("lse", k.lse);
    h.out = widened(k.out), h.lse = widened(k.lse);
    ASSERT_STATUS(cpu, MT_SUCCESS, backward(cpu, &h));
    if (c.in == APART) {
        near(&c, "dq", k.dq, h.dq, noise * size);
        near(&c, "dk", k.dk, h.dk, noise * size);
        near(&c, "dv", k.dv, h.dv, noise * size);
    } else near(&c, "dqkv", k.dqkv, h.dqkv, noise * size);
    mt_arena_release(gpu, mark);
    mt_arena_release(cpu, host_mark);
}

static void test_causal(void **state) {
    (void)state;
    against_cpu({2, 70, 2, 1, 64, PER_GROUP, MT_BF16, MT_MASK_CAUSAL});
    against_cpu({1, 130, 3, 1, 128, CONCATENATED, MT_F16, MT_MASK_CAUSAL});
    against_cpu({3, 40, 1, 1, 96, APART, MT_BF16, MT_MASK_CAUSAL});
}

static void test_bidirectional(void **state) {
    (void)state;
    against_cpu({2, 70, 2, 1, 64, CONCATENATED, MT_F16, MT_MASK_BIDIRECTIONAL});
    against_cpu({1, 33, 2, 1, 72, PER_GROUP, MT_BF16, MT_MASK_BIDIRECTIONAL});
    against_cpu({3, 40, 1, 1, 32, APART, MT_BF16, MT_MASK_BIDIRECTIONAL});
}

/* Several query heads share a key. With one group, those of MT_QKV_PER_GROUP are the same distance apart. */
static void test_groups(void **state) {
    (void)state;
    against_cpu({2, 50, 2, 3, 64, CONCATENATED, MT_BF16, MT_MASK_CAUSAL});
    against_cpu({2, 50, 2, 2, 96, APART, MT_F16, MT_MASK_CAUSAL});
    against_cpu({2, 50, 1, 4, 64, PER_GROUP, MT_BF16, MT_MASK_BIDIRECTIONAL});
}

static void test_scale(void **state) {
    config c = {2, 40, 2, 1, 64, CONCATENATED, MT_BF16, MT_MASK_CAUSAL};
    size_t mark = mt_arena_mark(gpu), host_mark = mt_arena_mark(cpu);
    call k = call_new(&c), h = k;
    (void)state;
    h.qkv = widened(k.qkv), h.out = on_cpu(k.out), h.lse = on_cpu(k.lse);
    for (int i = 0; i < 2; i++) { /* the same plan */
        k.s.scores.scale = h.s.scores.scale = i ? 0.3f : 0.05f;
        OK(forward(gpu, &k));
        ASSERT_STATUS(cpu, MT_SUCCESS, forward(cpu, &h));
        near(&c, "out", k.out, h.out, 2e-5);
        near_lse(&c, k.lse, h.lse);
    }
    mt_arena_release(gpu, mark);
    mt_arena_release(cpu, host_mark);
}

static int differ(mt_tensor a, mt_tensor b) {
    float *x = download(gpu, a), *y = download(gpu, b);
    int result = memcmp(x, y, (size_t)(a.rows * a.cols) * sizeof *x) != 0;
    free(x);
    free(y);
    return result;
}

/* Without lse, and with an lse that cuDNN cannot write where it is, out has the same bits. */
static void test_lse(void **state) {
    config c = {1, 40, 2, 1, 64, CONCATENATED, MT_BF16, MT_MASK_CAUSAL};
    size_t mark = mt_arena_mark(gpu);
    call a = call_new(&c), b = a;
    mt_tensor whole;
    (void)state;
    OK(forward(gpu, &a));
    b.out = tensor_new(c.type, b.out.rows, b.out.cols, 24);
    b.lse = mt_none();
    assert_string_equal(row_of(&b, 0, 90), "cudnn");
    OK(forward(gpu, &b));
    assert_false(differ(a.out, b.out));
    OK(mt_arena_tensor(gpu, MT_F32, 1, 2 * 40 + 1, &whole));
    b.lse = mt_tensor_make((float *)whole.data + 1, MT_F32, 2, 40);
    OK(forward(gpu, &b));
    assert_false(differ(a.out, b.out) || differ(a.lse, b.lse));
    mt_arena_release(gpu, mark);
}

/* ---- which calls ------------------------------------------------------------------------------------------------- */

static void test_other_rows(void **state) {
    static const struct {
        const char *row;
        config c;
    } cases[] = {{"cudnn", {1, 64, 2, 1, 64, PER_GROUP, MT_BF16, MT_MASK_CAUSAL}},
                 {"cudnn", {1, 64, 2, 1, 256, PER_GROUP, MT_F16, MT_MASK_BIDIRECTIONAL}},
                 {"plain", {1, 64, 2, 1, 64, PER_GROUP, MT_F32, MT_MASK_CAUSAL}},
                 {"plain", {1, 64, 2, 1, 60, PER_GROUP, MT_BF16, MT_MASK_CAUSAL}},
                 {"flash_64", {1, 1, 2, 1, 64, PER_GROUP, MT_BF16, MT_MASK_CAUSAL}},
                 {"flash_64", {1, 64, 2, 2, 64, PER_GROUP, MT_BF16, MT_MASK_CAUSAL}},
                 {"cudnn", {1, 64, 2, 2, 64, CONCATENATED, MT_BF16, MT_MASK_CAUSAL}},
                 {"plain", {1, 16, 1, 1, 264, CONCATENATED, MT_BF16, MT_MASK_CAUSAL}}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t mark = mt_arena_mark(gpu);
        call k = call_new(&cases[i].c);
        assert_string_equal(row_of(&k, 0, 90), cases[i].row);
        assert_string_not_equal(row_of(&k, 1, 90), "cudnn");
        assert_string_not_equal(row_of(&k, 0, 75), "cudnn");
        mt_arena_release(gpu, mark);
    }
}

/* Each option of a call that another row computes. */
static void test_options(void **state) {
    static const int32_t number = 64;
    static const float slope = 1.0f;
    config c = {1, 64, 2, 1, 64, CONCATENATED, MT_BF16, MT_MASK_CAUSAL};
    (void)state;
    for (int i = 0; i < 14; i++) {
        size_t mark = mt_arena_mark(gpu);
        call k = call_new(&c);
        if (i == 0) k.s.scores.window = 64; /* hides nothing */
        if (i == 1) k.s.scores.window = 63;
        if (i == 2) k.s.scores.softcap = 10.0f;
        if (i == 3) k.s.scores.alibi = 1, k.s.scores.alibi_slopes = &slope; /* not read */
        if (i == 4) k.s.scores.scale = -0.1f;
        if (i == 5) k.s.dropout.p = 0.1f;
        if (i == 6) k.s.lengths = &number;
        if (i == 7) k.s.cu_seqlens = &number, k.s.documents = 1;
        if (i == 8) k.s.bias.value = k.lse;
        if (i == 9) k.s.kv_seq = 96;
        if (i == 10) k.out = tensor_new(MT_F32, k.out.rows, k.out.cols, 0);
        if (i == 11) k.qkv = mt_tensor_cols(tensor_new(MT_BF16, 64, 1 + k.qkv.cols, 7), 1, k.qkv.cols);
        if (i == 12) k.out = mt_tensor_cols(tensor_new(MT_BF16, 64, k.out.cols, 3), 0, k.out.cols);
        if (i == 13) k.qkv.ld = (int64_t)1 << 26;
        if (strcmp(row_of(&k, 0, 90), "cudnn") == 0 && i != 0) fail_msg("option %d: cudnn", i);
        if (i == 0) assert_string_equal(row_of(&k, 0, 90), "cudnn");
        mt_arena_release(gpu, mark);
    }
}

/* In invariant mode bits must not depend on the batch. */
static void test_invariant(void **state) {
    config c = {1, 64, 2, 1, 64, CONCATENATED, MT_BF16, MT_MASK_CAUSAL};
    mt_context *old = gpu;
    mt_context_desc where;
    (void)state;
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_CUDA;
    where.arena_bytes = (size_t)16 << 20;
    where.invariant = 1;
    OK(mt_context_create(NULL, &where, &gpu));
    call k = call_new(&c);
    assert_string_equal(row_of(&k, 0, 90), "flash_64");
    mt_context_destroy(gpu);
    gpu = old;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* The scratch memory of a context on a GPU is what a context on MT_DEVICE_META plans. */
static void test_arena(void **state) {
    config c = {3, 40, 2, 1, 64, CONCATENATED, MT_BF16, MT_MASK_CAUSAL};
    size_t mark = mt_arena_mark(gpu), before, planned;
    call k = call_new(&c), m = k;
    mt_context_desc where;
    mt_context *meta;
    void *rest;
    (void)state;
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_META;
    where.planned = MT_DEVICE_CUDA;
    OK(mt_context_create(NULL, &where, &meta));
    OK(mt_arena_tensor(meta, MT_BF16, k.qkv.rows, k.qkv.cols, &m.qkv));
    OK(mt_arena_tensor(meta, MT_BF16, k.out.rows, k.out.cols, &m.out));
    OK(mt_arena_tensor(meta, MT_F32, k.lse.rows, k.lse.cols, &m.lse));
    before = mt_arena_mark(meta);
    ASSERT_STATUS(meta, MT_SUCCESS, forward(meta, &m));
    planned = mt_arena_peak(meta) - before;
    mt_context_destroy(meta);
    assert_true(planned > MTI_CUDNN_WORKSPACE);
    OK(forward(gpu, &k));
    before = mt_arena_mark(gpu);
    OK(mt_arena_alloc(gpu, gpu->arena_bytes - before - planned, &rest));
    OK(forward(gpu, &k));
    OK(mt_arena_alloc(gpu, 1, &rest));
    ASSERT_STATUS(gpu, MT_ERR_MEMORY, forward(gpu, &k));
    mt_arena_release(gpu, mark);
}

/* ---- plans, with the stand-in for cuDNN -------------------------------------------------------------------------- */

#if defined(MT_CUDA_ENGINE)
static const config small = {1, 16, 1, 1, 32, CONCATENATED, MT_BF16, MT_MASK_CAUSAL};

static mt_context *context_new(void) {
    mt_context_desc where;
    mt_context *ctx;
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_CUDA;
    where.arena_bytes = (size_t)16 << 20;
    OK(mt_context_create(NULL, &where, &ctx));
    return ctx;
}

/* A shape that cuDNN refuses goes to the next row, and cuDNN is not asked again. */
static void test_refused(void **state) {
    static const int statuses[] = {
        CUDNN_STATUS_NOT_SUPPORTED_SHAPE, CUDNN_STATUS_BAD_PARAM, CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED,
        CUDNN_STATUS_INTERNAL_ERROR_UNEXPECTED_VALUE, CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED};
    static const mt_status expected[] = {MT_SUCCESS, MT_SUCCESS, MT_SUCCESS, MT_ERR_SYSTEM, MT_ERR_MEMORY};
    mt_context *old = gpu;
    (void)state;
    for (int i = 0; i < 5; i++) {
        gpu = context_new();
        call k = call_new(&small);
        int calls = mte::cudnn_counts().calls, descriptors = mte::cudnn_counts().descriptors;
        mte::cudnn_refuse(statuses[i]);
        ASSERT_STATUS(gpu, expected[i], forward(gpu, &k));
        mte::cudnn_refuse(0);
        assert_int_equal(mte::cudnn_counts().descriptors, descriptors);
        OK(forward(gpu, &k));
        assert_int_equal(mte::cudnn_counts().calls, expected[i] == MT_SUCCESS ? calls : calls + 1);
        assert_string_equal(row_of(&k, 0, 90), expected[i] == MT_SUCCESS ? "flash_64" : "cudnn");
        if (expected[i] == MT_SUCCESS) OK(backward(gpu, &k));
        mt_context_destroy(gpu);
    }
    gpu = old;
}

/* Each call of cuDNN fails once. The same call of the library then succeeds, with the same bits. */
static void test_failures(void **state) {
    static const char *const calls[] = {"cudnnCreate", "cudnnBackendCreateDescriptor", "cudnnBackendFinalize",
                                        "cudaMalloc", "cudnnBackendExecute"};
    mt_context *old = gpu;
    mte::CudnnCounts before = mte::cudnn_counts();
    (void)state;
    for (int i = 0; i < 5; i++)
        for (int after = 0;; after++) {
            int failed;
            gpu = context_new();
            call a = call_new(&small), b = call_new(&small);
            mte::cuda_fail_after(calls[i], after, cudaErrorMemoryAllocation);
            mt_status status = forward(gpu, &a);
            failed = !mte::call_will_fail();
            mte::cuda_fail_after(NULL, 0, cudaSuccess);
            if (failed) assert_int_equal(status, i < 4 ? MT_ERR_MEMORY : MT_ERR_SYSTEM);
            else ASSERT_STATUS(gpu, MT_SUCCESS, status);
            OK(forward(gpu, &a));
            OK(forward(gpu, &b));
            assert_false(differ(a.out, b.out) || differ(a.lse, b.lse));
            mt_context_destroy(gpu);
            assert_int_equal(mte::cudnn_counts().descriptors, before.descriptors);
            assert_int_equal(mte::cudnn_counts().handles, before.handles);
            if (!failed) break;
        }
    gpu = old;
}

static void forward_of(config c) {
    size_t mark = mt_arena_mark(gpu);
    call k = call_new(&c);
    OK(forward(gpu, &k));
    mt_arena_release(gpu, mark);
}

/* A context keeps the plans of the shapes that it has used last. */
static void test_plans(void **state) {
    mt_context *old = gpu;
    config c = small;
    int plans, descriptors = 0;
    (void)state;
    gpu = context_new();
    plans = mte::cudnn_counts().plans;
    for (int i = 0; i < MTI_CUDNN_PLANS + 10; i++) {
        c.seq = 2 + i;
        forward_of(c);
        c.seq = 2; /* used again and again */
        forward_of(c);
        assert_int_equal(mte::cudnn_counts().plans, plans += 2); /* the second one needs too much workspace */
        if (i == MTI_CUDNN_PLANS - 1) descriptors = mte::cudnn_counts().descriptors;
        if (i >= MTI_CUDNN_PLANS) assert_int_equal(mte::cudnn_counts().descriptors, descriptors);
    }
    c.seq = 3; /* has been replaced */
    forward_of(c);
    assert_int_equal(mte::cudnn_counts().plans, plans + 2);
    mt_context_destroy(gpu);
    gpu = old;
}

/* ---- CUDA graphs ------------------------------------------------------------------------------------------------- */

/* A step whose plan is made while it is recorded. Later shapes do not replace the plan. */
static void test_graph(void **state) {
    mt_context *old = gpu;
    mt_graph *graph = NULL;
    config c = small;
    float *x;
    (void)state;
    gpu = context_new();
    call a = call_new(&small), b = call_new(&small);
    OK(mt_context_synchronize(gpu));
    OK(mt_graph_begin(gpu, NULL));
    OK(forward(gpu, &a));
    OK(mt_graph_end(gpu, &graph));
    x = download(gpu, a.out);
    assert_true(isnan(x[0])); /* it was only recorded */
    free(x);
    for (int i = 0; i < MTI_CUDNN_PLANS + 1; i++) {
        c.seq = 20 + i;
        forward_of(c);
    }
    OK(mt_graph_launch(gpu, graph));
    OK(forward(gpu, &b));
    assert_false(differ(a.out, b.out) || differ(a.lse, b.lse));
    mt_graph_destroy(gpu, graph);
    mt_context_destroy(gpu);
    gpu = old;
}

/* While a step is recorded, no plan can be replaced. */
static void test_graph_of_new_shapes(void **state) {
    mt_context *old = gpu;
    mt_graph *graph = NULL;
    config c = small;
    call k;
    mte::CudnnCounts before = mte::cudnn_counts();
    (void)state;
    gpu = context_new();
    for (int i = 0; i < MTI_CUDNN_PLANS; i++) {
        c.seq = 20 + i;
        forward_of(c);
    }
    k = call_new(&small);
    OK(mt_context_synchronize(gpu));
    OK(mt_graph_begin(gpu, NULL));
    ASSERT_STATUS(gpu, MT_ERR_UNSUPPORTED, forward(gpu, &k));
    assert_non_null(strstr(mt_last_error(gpu), "must have run once before"));
    OK(mt_graph_end(gpu, &graph));
    mt_graph_destroy(gpu, graph);
    OK(forward(gpu, &k));
    mt_context_destroy(gpu);
    assert_int_equal(mte::cudnn_counts().descriptors, before.descriptors);
    gpu = old;
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_causal),
        cmocka_unit_test(test_bidirectional),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_scale),
        cmocka_unit_test(test_lse),
        cmocka_unit_test(test_other_rows),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_invariant),
        cmocka_unit_test(test_arena),
#if defined(MT_CUDA_ENGINE)
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_failures),
        cmocka_unit_test(test_plans),
        cmocka_unit_test(test_graph),
        cmocka_unit_test(test_graph_of_new_shapes),
#endif
    };
    return cmocka_run_group_tests(tests, open_contexts, close_contexts);
}
