/* test_cuda.cu - tests every operator of mt_kernels.cuh on MT_DEVICE_CUDA against the CPU backend.
     On a GPU:       nvcc -std=c++17 -O2 -arch=native -I. tests/test_cuda.cu -lcublasLt
     Without a GPU:  the engine in tests/engine/ runs the same file on a CPU. */

#define MEGATRON_IMPLEMENTATION
#define MTI_GRID_MAX 2     /* limit for one-dimensional grids: small tensors then need more than one grid */
#define MTI_RUN_BLOCKS 7   /* the same for the sums of an embedding's gradient */
#define MTI_NORM_TALL 1000 /* elements for each short strip in a tall one: small matrices have tall strips */
#include "megatron.h"

#include "mt_test_cuda.h"

#if defined(MT_CUDA_ENGINE)
#include "runtime.h"
#endif

#include <math.h>
#include <sys/mman.h>

#include <vector>

/* ---- the same tensor on both devices ----------------------------------------------------------------------------- */

typedef struct pair {
    mt_tensor cpu, gpu;
} pair;

static mt_dtype type; /* of activations and weights; statistics, moments and gradients of parameters are f32 */

#define BOTH(call_cpu, call_gpu)                                                                                       \
    do {                                                                                                               \
        ASSERT_STATUS(cpu, MT_SUCCESS, call_cpu);                                                                      \
        ASSERT_STATUS(gpu, MT_SUCCESS, call_gpu);                                                                      \
    } while (0)

/* `more`: elements between the rows; `shift`: elements from an aligned address to the first row. */
typedef struct layout {
    int64_t more, shift;
} layout;
static const layout dense = {0, 0}, wide = {8, 0}, odd = {3, 1};

static mt_tensor tensor_new(mt_context *ctx, mt_dtype dtype, int64_t rows, int64_t cols, layout l) {
    mt_tensor whole;
    OK(mt_arena_tensor(ctx, dtype, rows + 1, cols + l.more, &whole));
    return mt_tensor_cols(mt_tensor_rows(whole, 0, rows), l.shift, cols);
}

static pair pair_of(mt_dtype dtype, int64_t rows, int64_t cols, layout l) {
    pair p = {tensor_new(cpu, dtype, rows, cols, l), tensor_new(gpu, dtype, rows, cols, l)};
    return p;
}

static pair pair_new(int64_t rows, int64_t cols, layout l) { return pair_of(type, rows, cols, l); }
static pair pair_f32(int64_t rows, int64_t cols) { return pair_of(MT_F32, rows, cols, dense); }

static pair pair_fill(pair p, uint64_t seed, float scale) {
    int64_t n = p.cpu.rows * p.cpu.cols;
    float *x = (float *)malloc((size_t)(n + 1) * sizeof *x);
    pair f = pair_f32(p.cpu.rows, p.cpu.cols);
    for (int64_t i = 0; i < n; i++) x[i] = scale * test_float(&seed);
    OK(mt_upload(cpu, x, f.cpu));
    OK(mt_upload(gpu, x, f.gpu));
    BOTH(mt_convert(cpu, f.cpu, p.cpu), mt_convert(gpu, f.gpu, p.gpu));
    free(x);
    return p;
}

static pair pair_noise(int64_t rows, int64_t cols, layout l, uint64_t seed, float scale) {
    return pair_fill(pair_new(rows, cols, l), seed, scale);
}

static pair noise_f32(int64_t rows, int64_t cols, uint64_t seed, float scale) {
    return pair_fill(pair_f32(rows, cols), seed, scale);
}

static pair none(void) {
    pair p = {mt_none(), mt_none()};
    return p;
}

/* One unit in the last place of a 16-bit result. Both backends round the same sum, computed in slightly different
   ways. */
static double last_place(mt_dtype dtype) { return dtype == MT_F32 ? 0 : dtype == MT_BF16 ? 1.0 / 128 : 1.0 / 1024; }

/* Checks that the difference is at most `tolerance` times the largest element, or times `size` if that is larger, plus
   a unit in the last place of a 16-bit type. `size` is that of the terms whose difference an element is. */
static void same_terms(const char *what, pair p, double tolerance, double size) {
    int64_t n = p.cpu.rows * p.cpu.cols;
    float *a = download(cpu, p.cpu), *b = download(gpu, p.gpu);
    double most = size;
    for (int64_t i = 0; i < n; i++)
        if (isfinite(a[i])) most = fmax(most, fabs((double)a[i]));
    for (int64_t i = 0; i < n; i++) {
        double allowed = tolerance * most + (tolerance > 0 ? last_place(p.cpu.dtype) * fabs((double)a[i]) : 0);
        if (!(fabs((double)a[i] - (double)b[i]) <= allowed) && memcmp(&a[i], &b[i], sizeof a[i]) != 0)
            fail_msg("%s, %s: [%lld, %lld] of [%lld, %lld] is %.9g, on the CPU %.9g", what, mt_dtype_name(p.cpu.dtype),
                     (long long)(i / p.cpu.cols), (long long)(i % p.cpu.cols), (long long)p.cpu.rows,
                     (long long)p.cpu.cols, (double)b[i], (double)a[i]);
    }
    free(a);
    free(b);
}

static void same(const char *what, pair p, double tolerance) { same_terms(what, p, tolerance, 1e-30); }

static int32_t *ids_on_gpu(const int32_t *ids, int64_t n) {
    mt_tensor t;
    OK(mt_arena_tensor(gpu, MT_I32, 1, n, &t));
    OK(mt_upload(gpu, ids, t));
    return (int32_t *)t.data;
}

/* ---- shapes that every operator sees ----------------------------------------------------------------------------- */

typedef struct shape {
    int64_t rows, cols;
    layout l;
} shape;

static const shape shapes[] = {{1, 1, {0, 0}},   {1, 8, {0, 0}},    {3, 7, {0, 0}},    {5, 16, {3, 1}},
                               {70, 24, {8, 0}}, {2, 1000, {0, 0}}, {130, 33, {0, 0}}, {4, 264, {8, 8}}};
#define SHAPES (sizeof shapes / sizeof *shapes)

static void each_type(void (*f)(shape s), const shape *list, size_t count) {
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    for (size_t i = 0; i < 3 * count; i++) {
        size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
        type = types[i / count];
        f(list[i % count]);
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, on_gpu);
    }
}

static void each_shape(void (*f)(shape s)) { each_type(f, shapes, SHAPES); }

static void memory(shape s) {
    pair x = pair_noise(s.rows, s.cols, s.l, 1, 1.0f), y = pair_new(s.rows, s.cols, dense),
         z = pair_new(s.rows, s.cols, s.l);
    pair sum = noise_f32(1, 1, 4, 1.0f);
    uint64_t a = 5, b = 5;
    BOTH(mt_copy(cpu, x.cpu, y.cpu), mt_copy(gpu, x.gpu, y.gpu));
    same("mt_copy", y, 0);
    BOTH(mt_add(cpu, x.cpu, y.cpu, z.cpu), mt_add(gpu, x.gpu, y.gpu, z.gpu));
    same("mt_add", z, 0);
    BOTH(mt_sum(cpu, x.cpu, sum.cpu), mt_sum(gpu, x.gpu, sum.gpu));
    same("mt_sum", sum, 1e-6);
    BOTH(mt_sum_of_squares(cpu, x.cpu, sum.cpu), mt_sum_of_squares(gpu, x.gpu, sum.gpu));
    same("mt_sum_of_squares", sum, 1e-6);
    BOTH(mt_hash(cpu, x.cpu, 3, 2, s.cols + 5, &a), mt_hash(gpu, x.gpu, 3, 2, s.cols + 5, &b));
    assert_true(a == b && a != 5);
    BOTH(mt_fill(cpu, z.cpu, 2.5f), mt_fill(gpu, z.gpu, 2.5f));
    same("mt_fill", z, 0);
    BOTH(mt_fill(cpu, z.cpu, 0.0f), mt_fill(gpu, z.gpu, 0.0f));
    same("mt_fill with 0", z, 0);
}

static void bias(shape s) {
    pair y = pair_noise(s.rows, s.cols, s.l, 1, 1.0f), b = pair_noise(1, s.cols, dense, 2, 1.0f),
         db = noise_f32(1, s.cols, 3, 1.0f);
    BOTH(mt_bias_forward(cpu, y.cpu, b.cpu), mt_bias_forward(gpu, y.gpu, b.gpu));
    same("mt_bias_forward", y, 1e-7);
    BOTH(mt_bias_backward(cpu, y.cpu, db.cpu), mt_bias_backward(gpu, y.gpu, db.gpu));
    same("mt_bias_backward", db, 2e-6);
}

static void activation(shape s) {
    for (int kind = MT_GELU_TANH; kind < MT_ACTIVATION_COUNT; kind++)
        for (int with_bias = 0; with_bias < 2; with_bias++) {
            int64_t w = kind == MT_SWIGLU ? 2 * s.cols : s.cols;
            mt_activation k = (mt_activation)kind;
            pair h = pair_noise(s.rows, w, s.l, 1, 4.0f), b = with_bias ? pair_noise(1, w, dense, 2, 1.0f) : none();
            pair y = pair_new(s.rows, s.cols, s.l), dy = pair_noise(s.rows, s.cols, dense, 3, 1.0f),
                 dh = pair_new(s.rows, w, s.l);
            pair db = with_bias ? noise_f32(1, w, 4, 1.0f) : none();
            BOTH(mt_activation_forward(cpu, k, h.cpu, b.cpu, y.cpu),
                 mt_activation_forward(gpu, k, h.gpu, b.gpu, y.gpu));
            same("mt_activation_forward", y, 1e-6);
            same("h", h, 1e-6);
            BOTH(mt_activation_backward(cpu, k, h.cpu, dy.cpu, dh.cpu, db.cpu),
                 mt_activation_backward(gpu, k, h.gpu, dy.gpu, dh.gpu, db.gpu));
            same("mt_activation_backward", dh, 2e-6);
            if (with_bias) same("dbias", db, 3e-5);
        }
}

/* The size of the terms whose difference the gradient of a norm is: dy * gain * rstd, with |dy| and |gain| up to 1. */
static double largest_rstd(mt_tensor stats) {
    float *x = download(cpu, stats);
    double most = 0;
    for (int64_t i = 0; i < stats.rows; i++) most = fmax(most, (double)x[2 * i + 1]);
    free(x);
    return most;
}

static void norm(shape s) {
    for (int kind = MT_LAYER_NORM; kind <= MT_RMS_NORM; kind++)
        for (int residual = 0; residual < 2; residual++) {
            mt_norm_kind k = (mt_norm_kind)kind;
            pair x = pair_noise(s.rows, s.cols, s.l, 1, 2.0f), gain = pair_noise(1, s.cols, dense, 2, 1.0f);
            pair b = kind == MT_LAYER_NORM ? pair_noise(1, s.cols, dense, 3, 1.0f) : none(),
                 stats = pair_f32(s.rows, 2);
            pair y = pair_new(s.rows, s.cols, s.l), dy = pair_noise(s.rows, s.cols, s.l, 4, 1.0f);
            pair r = residual ? pair_noise(s.rows, s.cols, dense, 5, 1.0f) : none(), dx = pair_new(s.rows, s.cols, s.l);
            BOTH(mt_norm_forward(cpu, k, x.cpu, gain.cpu, b.cpu, 1e-5f, y.cpu, stats.cpu),
                 mt_norm_forward(gpu, k, x.gpu, gain.gpu, b.gpu, 1e-5f, y.gpu, stats.gpu));
            same("mt_norm_forward", y, 2e-6);
            same("stats", stats, 2e-6);
            pair dgain = noise_f32(1, s.cols, 6, 1.0f),
                 db = kind == MT_LAYER_NORM ? noise_f32(1, s.cols, 7, 1.0f) : none();
            BOTH(mt_norm_backward(cpu, k, x.cpu, gain.cpu, stats.cpu, dy.cpu, r.cpu, dx.cpu, dgain.cpu, db.cpu),
                 mt_norm_backward(gpu, k, x.gpu, gain.gpu, stats.gpu, dy.gpu, r.gpu, dx.gpu, dgain.gpu, db.gpu));
            same_terms("mt_norm_backward", dx, 5e-6, largest_rstd(stats.cpu));
            same("dgain", dgain, 2e-6);
            if (kind == MT_LAYER_NORM) same("dbias", db, 2e-6);
        }
}

/* Rows that do not fit into the registers of a thread, and, the last two, not into shared memory. */
static void test_wide_norm(void **state) {
    static const shape wide_rows[] = {{37, 1100, {0, 0}}, {3, 8301, {0, 0}}, {18, 8304, {8, 0}}, {17, 28816, {0, 0}}};
    (void)state;
    each_type(norm, wide_rows, 4);
}

/* The widths at which a row gets more threads or another kernel, and their neighbours: a row of a warp, of a block, of
   several strips, sums in registers and in shared memory, and rows of which a thread does not keep all vectors. The
   last ones have tall and short strips, and one row whose ld is odd. */
static void test_widths_of_norms(void **state) {
    static const shape widths[] = {{5, 255, {0, 0}},   {5, 256, {0, 0}},   {3, 257, {0, 0}},   {3, 264, {0, 0}},
                                   {6, 504, {8, 8}},   {3, 512, {0, 0}},   {3, 520, {0, 0}},   {3, 1023, {0, 0}},
                                   {5, 1024, {0, 0}},  {3, 1032, {0, 0}},  {34, 768, {0, 0}},  {2, 4096, {0, 0}},
                                   {2, 4104, {0, 0}},  {2, 6144, {0, 0}},  {2, 6152, {0, 0}},  {2, 8192, {0, 0}},
                                   {3, 8200, {8, 0}},  {2, 12288, {0, 0}}, {2, 12296, {0, 0}}, {1, 16383, {0, 0}},
                                   {2, 16384, {0, 0}}, {2, 16392, {0, 0}}, {3, 20000, {0, 0}}, {1, 20001, {0, 0}},
                                   {100, 24, {0, 0}},  {150, 72, {8, 0}},  {1, 40, {3, 0}},    {1, 64, {5, 0}}};
    (void)state;
    each_type(norm, widths, sizeof widths / sizeof *widths);
}

/* Views of different types in one call. */
static void test_norm_mixed_types(void **state) {
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    (void)state;
    for (int first = 0; first < 3; first++)
        for (int odd_one = 0; odd_one < 4; odd_one++) {
            size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
            mt_dtype most = types[first], other = types[(first + 1) % 3];
            pair x = pair_fill(pair_of(most, 19, 48, dense), 1, 2.0f), stats = pair_f32(19, 2);
            pair gain = pair_fill(pair_of(odd_one == 0 ? other : most, 1, 48, dense), 2, 1.0f),
                 bias = pair_fill(pair_of(odd_one == 1 ? other : most, 1, 48, dense), 3, 1.0f);
            pair y = pair_of(odd_one == 2 ? other : most, 19, 48, dense),
                 r = pair_fill(pair_of(odd_one == 3 ? other : most, 19, 48, dense), 5, 1.0f);
            pair dx = pair_of(most, 19, 48, dense), dgain = noise_f32(1, 48, 6, 1.0f),
                 dbias = noise_f32(1, 48, 7, 1.0f);
            BOTH(mt_norm_forward(cpu, MT_LAYER_NORM, x.cpu, gain.cpu, bias.cpu, 1e-5f, y.cpu, stats.cpu),
                 mt_norm_forward(gpu, MT_LAYER_NORM, x.gpu, gain.gpu, bias.gpu, 1e-5f, y.gpu, stats.gpu));
            same("mt_norm_forward", y, 2e-6);
            BOTH(mt_copy(cpu, x.cpu, dx.cpu), mt_copy(gpu, x.gpu, dx.gpu)); /* dx is also dy */
            BOTH(mt_norm_backward(cpu, MT_LAYER_NORM, x.cpu, gain.cpu, stats.cpu, dx.cpu, r.cpu, dx.cpu, dgain.cpu,
                                  dbias.cpu),
                 mt_norm_backward(gpu, MT_LAYER_NORM, x.gpu, gain.gpu, stats.gpu, dx.gpu, r.gpu, dx.gpu, dgain.gpu,
                                  dbias.gpu));
            same("mt_norm_backward", dx, 5e-6);
            same("dgain", dgain, 2e-6);
            same("dbias", dbias, 2e-6);
            mt_arena_release(cpu, on_cpu);
            mt_arena_release(gpu, on_gpu);
        }
}

static uint64_t hash_of(mt_tensor t) {
    uint64_t hash = 0;
    OK(mt_hash(gpu, t, 0, 0, t.cols, &hash));
    return hash;
}

/* A row has the same bits alone and among others, also in place. */
static void norm_of_rows(shape s) {
    pair x = pair_noise(s.rows, s.cols, s.l, 1, 2.0f), gain = pair_noise(1, s.cols, dense, 2, 1.0f);
    pair y = pair_new(s.rows, s.cols, s.l), alone = pair_new(s.rows, s.cols, s.l), stats = pair_f32(s.rows, 2);
    pair dy = pair_noise(s.rows, s.cols, s.l, 4, 1.0f), r = pair_noise(s.rows, s.cols, dense, 5, 1.0f);
    pair dx = pair_new(s.rows, s.cols, s.l), dgain = noise_f32(1, s.cols, 6, 1.0f);
    OK(mt_norm_forward(gpu, MT_LAYER_NORM, x.gpu, gain.gpu, gain.gpu, 1e-5f, y.gpu, stats.gpu));
    OK(mt_norm_backward(gpu, MT_LAYER_NORM, x.gpu, gain.gpu, stats.gpu, dy.gpu, r.gpu, dx.gpu, dgain.gpu, mt_none()));
    for (int64_t i = 0; i < s.rows; i++) {
        mt_tensor one = mt_tensor_rows(alone.gpu, i, 1), residual = mt_tensor_rows(r.gpu, i, 1);
        OK(mt_copy(gpu, mt_tensor_rows(x.gpu, i, 1), one));
        OK(mt_norm_forward(gpu, MT_LAYER_NORM, one, gain.gpu, gain.gpu, 1e-5f, one, mt_none()));
        assert_true(hash_of(one) == hash_of(mt_tensor_rows(y.gpu, i, 1)));
        OK(mt_norm_backward(gpu, MT_LAYER_NORM, mt_tensor_rows(x.gpu, i, 1), gain.gpu, mt_tensor_rows(stats.gpu, i, 1),
                            mt_tensor_rows(dy.gpu, i, 1), residual, residual, dgain.gpu, mt_none()));
        assert_true(hash_of(residual) == hash_of(mt_tensor_rows(dx.gpu, i, 1)));
    }
}

static void test_norm_rows(void **state) {
    static const shape list[] = {{19, 40, {0, 0}}, {7, 768, {8, 0}}, {3, 4096, {0, 0}}, {5, 333, {3, 1}}};
    (void)state;
    each_type(norm_of_rows, list, 4);
}

static mt_random place(int64_t cols) {
    mt_random at;
    memset(&at, 0, sizeof at);
    at.seed = 0x123456789abcdefu;
    at.subsequence = 0xfedcba987654321u;
    at.first_row = 5;
    at.first_col = 3;
    at.global_cols = cols + 10;
    return at;
}

/* The same random numbers, with a part of the subsequence in the GPU's memory. */
static mt_random with_offset(mt_random at) {
    static const uint64_t offset = 0x123456789abu;
    mt_tensor memory;
    OK(mt_arena_tensor(gpu, MT_I32, 1, 2, &memory));
    OK(mt_upload(gpu, &offset, memory));
    at.subsequence -= offset;
    at.offset = (const uint64_t *)memory.data;
    return at;
}

static void dropout(shape s) {
    pair x = pair_noise(s.rows, s.cols, s.l, 1, 1.0f), b = pair_noise(1, s.cols, dense, 2, 1.0f);
    pair r = pair_noise(s.rows, s.cols, dense, 3, 1.0f), y = pair_new(s.rows, s.cols, s.l);
    pair db = noise_f32(1, s.cols, 4, 1.0f);
    mt_dropout d, e;
    d.at = place(s.cols);
    for (int step = 0; step < 3; step++) {
        d.p = step ? 0.3f : 0.0f;
        if (step == 2) d.at.first_col = 8, d.at.global_cols = (s.cols + 11) / 4 * 4; /* rows begin at Philox blocks */
        e = d;
        e.at = with_offset(d.at);
        BOTH(mt_bias_dropout_add_forward(cpu, x.cpu, b.cpu, r.cpu, d, y.cpu),
             mt_bias_dropout_add_forward(gpu, x.gpu, b.gpu, r.gpu, e, y.gpu));
        same("mt_bias_dropout_add_forward", y, 1e-6);
        BOTH(mt_bias_dropout_add_backward(cpu, x.cpu, d, y.cpu, db.cpu),
             mt_bias_dropout_add_backward(gpu, x.gpu, e, y.gpu, db.gpu));
        same("mt_bias_dropout_add_backward", y, 1e-6);
        same("dbias", db, 2e-6);
    }
    BOTH(mt_random_normal(cpu, y.cpu, 0.5f, d.at), mt_random_normal(gpu, y.gpu, 0.5f, e.at));
    same("mt_random_normal", y, 1e-6);
}

/* Checks decisions in which way to round. Only a few of them may differ, because a float differs in its last places. */
static void mostly_same(const char *what, pair p) {
    int64_t n = p.cpu.rows * p.cpu.cols, differ = 0;
    float *a = download(cpu, p.cpu), *b = download(gpu, p.gpu);
    for (int64_t i = 0; i < n; i++) differ += a[i] != b[i];
    if (differ > 1 + n / 50) fail_msg("%s: %lld of %lld differ", what, (long long)differ, (long long)n);
    free(a);
    free(b);
}

static float rounded(float x) {
    volatile float y = x; /* keeps the host's compiler from contracting */
    return y;
}

/* Does a step of AdamW on the host, with each operation rounded on its own. The GPU must compute the same bits. */
static void adamw_on_host(const mt_adamw *h, float *p, const float *g, float *m, float *v, int64_t n) {
    double correction1 = 1 - pow((double)h->beta1, (double)h->step),
           correction2 = 1 - pow((double)h->beta2, (double)h->step);
    float rest1 = (float)(1 - (double)h->beta1), rest2 = (float)(1 - (double)h->beta2),
          root = (float)(1 / sqrt(correction2)), rate = (float)((double)h->lr / correction1),
          keep = (float)(1 - (double)h->lr * (double)h->weight_decay);
    for (int64_t i = 0; i < n; i++) {
        float s = rounded(h->grad_scale * g[i]), square = rounded(s * s);
        m[i] = rounded(rounded(h->beta1 * m[i]) + rounded(rest1 * s));
        v[i] = rounded(rounded(h->beta2 * v[i]) + rounded(rest2 * square));
        square = rounded(rounded(rounded(sqrtf(v[i])) * root) + h->eps);
        p[i] = rounded(rounded(keep * p[i]) - rounded(rounded(rate * m[i]) / square));
    }
}

static void same_bits(const char *what, const float *expected, mt_tensor t) {
    float *got = download(gpu, t);
    for (int64_t i = 0; i < t.rows * t.cols; i++)
        if (memcmp(got + i, expected + i, sizeof *got) != 0)
            fail_msg("%s: element %lld is %.9g instead of %.9g", what, (long long)i, (double)got[i],
                     (double)expected[i]);
    free(got);
}

static void adamw_bits(shape s) {
    mt_adamw h = {1e-2f, 0.9f, 0.99f, 1e-8f, 0.1f, 0.7f, 3, NULL};
    pair p = pair_of(MT_F32, s.rows, s.cols, s.l), g = noise_f32(s.rows, s.cols, 2, 1.0f);
    pair m = noise_f32(s.rows, s.cols, 3, 0.1f), v = pair_of(MT_F32, s.rows, s.cols, s.l);
    float *pp, *gg, *mm, *vv;
    OK(mt_copy(gpu, g.gpu, p.gpu));
    OK(mt_fill(gpu, v.gpu, 0.02f));
    pp = download(gpu, p.gpu), gg = download(gpu, g.gpu), mm = download(gpu, m.gpu), vv = download(gpu, v.gpu);
    adamw_on_host(&h, pp, gg, mm, vv, s.rows * s.cols);
    OK(mt_adamw_step(gpu, &h, p.gpu, mt_none(), g.gpu, m.gpu, v.gpu));
    same_bits("param", pp, p.gpu), same_bits("m", mm, m.gpu), same_bits("v", vv, v.gpu);
    free(pp), free(gg), free(mm), free(vv);
}

/* Parameters alone, with master weights, and with stochastic rounding. */
static void adamw(shape s) {
    const mt_random at = {11, 5, 2, 3, s.cols + 9, NULL}, on_gpu = with_offset(at);
    mt_adamw h = {1e-2f, 0.9f, 0.99f, 1e-8f, 0.1f, 0.7f, 3, NULL};
    for (int variant = 0; variant < (type == MT_F32 ? 1 : 3); variant++) {
        pair p = pair_noise(s.rows, s.cols, s.l, 1, 1.0f), g = noise_f32(s.rows, s.cols, 2, 1.0f);
        pair m = noise_f32(s.rows, s.cols, 3, 0.1f), v = pair_of(MT_F32, s.rows, s.cols, s.l);
        pair master = variant == 1 ? noise_f32(s.rows, s.cols, 4, 1.0f) : none();
        h.stochastic_rounding = variant == 2 ? &at : NULL;
        BOTH(mt_fill(cpu, v.cpu, 0.02f), mt_fill(gpu, v.gpu, 0.02f));
        OK(mt_adamw_step(cpu, &h, p.cpu, master.cpu, g.cpu, m.cpu, v.cpu));
        h.stochastic_rounding = variant == 2 ? &on_gpu : NULL;
        OK(mt_adamw_step(gpu, &h, p.gpu, master.gpu, g.gpu, m.gpu, v.gpu));
        same("param", p, 1e-6);
        if (type != MT_F32) mostly_same(variant == 2 ? "param, rounded stochastically" : "param", p);
        if (variant == 1) same("master", master, 1e-6);
        same("m", m, 1e-6);
        same("v", v, 1e-6);
    }
    if (type == MT_F32) adamw_bits(s);
}

/* ---- lists of tensors -------------------------------------------------------------------------------------------- */

static mt_tensor noise_on(mt_context *ctx, mt_dtype dtype, int64_t rows, int64_t cols, layout l, uint64_t seed) {
    mt_tensor t = tensor_new(ctx, dtype, rows, cols, l);
    mt_random at = {seed, 1, 0, 0, cols, NULL};
    OK(mt_random_normal(ctx, t, 1.0f, at));
    return t;
}

/* Makes tensor i of a list. The same i gives the same values. Every tenth tensor is empty, every seventh has gaps and
   no alignment, and tensor 5 has more elements than a block works on. */
static mt_adamw_tensor listed(mt_context *ctx, int i, int with_master) {
    static const layout layouts[] = {dense, wide, odd};
    int64_t rows = i % 10 == 9 ? 0 : 1 + i % 4, cols = i == 5 ? 8208 : 1 + i * 13 % 40;
    layout l = layouts[i % 7 == 6 ? 2 : i % 3 == 1];
    uint64_t seed = 100 * (uint64_t)i;
    mt_adamw_tensor t;
    memset(&t, 0, sizeof t);
    t.param = noise_on(ctx, type, rows, cols, l, seed);
    t.master = with_master ? noise_on(ctx, MT_F32, rows, cols, dense, seed + 1) : mt_none();
    t.grad = noise_on(ctx, MT_F32, rows, cols, l, seed + 2);
    t.m = noise_on(ctx, MT_F32, rows, cols, dense, seed + 3);
    t.v = tensor_new(ctx, MT_F32, rows, cols, dense);
    OK(mt_fill(ctx, t.v, 0.02f));
    t.weight_decay = i % 2;
    t.random.seed = 11, t.random.subsequence = 5 + (uint64_t)i, t.random.first_row = 2, t.random.first_col = i % 5;
    t.random.global_cols = cols + 9;
    return t;
}

static void same_bits_twice(mt_context *ctx, const char *what, int number, mt_tensor a, mt_tensor b) {
    float *x = download(ctx, a), *y = download(ctx, b);
    for (int64_t i = 0; i < a.rows * a.cols; i++)
        if (memcmp(x + i, y + i, sizeof *x) != 0)
            fail_msg("%s of tensor %d: element %lld is %.9g in a list, alone %.9g", what, number, (long long)i,
                     (double)x[i], (double)y[i]);
    free(x), free(y);
}

/* The numbers of a step in memory of the device. */
static const mt_adamw_values *values_on(mt_context *ctx, const mt_adamw *h, int skip) {
    mt_adamw_values values;
    mt_tensor memory;
    memset(&values, 0, sizeof values);
    values.lr = h->lr, values.grad_scale = h->grad_scale, values.step = h->step, values.skip = skip;
    OK(mt_arena_tensor(ctx, MT_I32, 1, (int64_t)(sizeof values / sizeof(int32_t)), &memory));
    OK(mt_upload(ctx, &values, memory));
    return (const mt_adamw_values *)memory.data;
}

/* Does step h, with its numbers as arguments or in memory, and then a step that is skipped. */
static void step_of_a_list(mt_context *ctx, const mt_multi_tensor *list, const mt_adamw *h, int in_memory) {
    mt_adamw other = *h;
    other.lr = 0.5f, other.grad_scale = 0.5f, other.step = 9;
    if (in_memory) OK(mt_multi_tensor_adamw(ctx, list, &other, values_on(ctx, h, 0)));
    else OK(mt_multi_tensor_adamw(ctx, list, h, NULL));
    OK(mt_multi_tensor_adamw(ctx, list, &other, values_on(ctx, &other, 1)));
}

/* A step of a list has the bits of a step of each tensor. how: 0 without masters, 1 with, 2 stochastic rounding */
static void adamw_of_a_list(mt_context *ctx, int count, int how) {
    mt_adamw h = {1e-2f, 0.9f, 0.99f, 1e-8f, 0.1f, 0.7f, 3, NULL};
    std::vector<mt_adamw_tensor> together, alone;
    mt_multi_tensor *list = NULL;
    for (int i = 0; i < count; i++) {
        together.push_back(listed(ctx, i, how == 1));
        alone.push_back(listed(ctx, i, how == 1));
    }
    OK(mt_multi_tensor_create_adamw(ctx, together.data(), count, how == 2, &list));
    step_of_a_list(ctx, list, &h, count < 20);
    for (int i = 0; i < count; i++) {
        mt_adamw_tensor a = together[i], b = alone[i];
        mt_adamw own = h;
        b.random.subsequence += 3;
        if (how == 2) own.stochastic_rounding = &b.random;
        if (!b.weight_decay) own.weight_decay = 0.0f;
        OK(mt_adamw_step(ctx, &own, b.param, b.master, b.grad, b.m, b.v));
        same_bits_twice(ctx, "param", i, a.param, b.param);
        same_bits_twice(ctx, "m", i, a.m, b.m);
        same_bits_twice(ctx, "v", i, a.v, b.v);
        if (how == 1) same_bits_twice(ctx, "master", i, a.master, b.master);
    }
    mt_multi_tensor_destroy(ctx, list);
}

/* Sums of squares of a list, in three columns, have the bits of sums one after the other. */
static void squares_of_a_list(mt_context *ctx, int count) {
    std::vector<mt_square_tensor> tensors;
    mt_tensor out = tensor_new(ctx, MT_F32, 1, 4, dense), expected = tensor_new(ctx, MT_F32, 1, 4, dense);
    mt_multi_tensor *list = NULL;
    OK(mt_fill(ctx, out, 0.5f));
    OK(mt_fill(ctx, expected, 0.5f));
    for (int i = 0; i < count; i++) {
        mt_square_tensor t = {listed(ctx, i, 0).grad, i * 5 % 3};
        tensors.push_back(t);
        OK(mt_sum_of_squares(ctx, t.x, mt_tensor_cols(expected, t.out, 1)));
    }
    OK(mt_multi_tensor_create_squares(ctx, tensors.data(), count, &list));
    OK(mt_multi_tensor_sum_of_squares(ctx, list, out));
    same_bits_twice(ctx, "sum of squares", count, out, expected);
    mt_multi_tensor_destroy(ctx, list);
}

static void lists(mt_context *ctx, int count) {
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    for (int t = 0; t < 3; t++)
        for (int how = 0; how < (t == 0 ? 1 : 3); how++) {
            size_t mark = mt_arena_mark(ctx);
            type = types[t];
            adamw_of_a_list(ctx, count, how);
            mt_arena_release(ctx, mark);
        }
    squares_of_a_list(ctx, count);
}

static void test_lists_of_tensors(void **state) {
    static const int counts[] = {0, 1, 12, 40};
    (void)state;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
        lists(cpu, counts[i]);
        lists(gpu, counts[i]);
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, on_gpu);
    }
}

/* The search for the tensor of a block takes three steps when there are more than 1024. */
static void test_long_lists(void **state) {
    size_t mark = mt_arena_mark(gpu);
    (void)state;
    type = MT_F32;
    squares_of_a_list(gpu, 1200);
    mt_arena_release(gpu, mark);
    adamw_of_a_list(gpu, 1200, 0);
    mt_arena_release(gpu, mark);
}

/* ---- a step that does not wait ----------------------------------------------------------------------------------- */

/* What a loop does on the host. */
static void decide_on_host(const float *sums, float loss, mt_step_values *v) {
    float scale = v->scaler.scale, worst = isfinite(loss) ? mt_norm_of_sums(sums) : NAN, unscale;
    v->loss = loss;
    v->norm = mt_norm_of_sums(sums) * (1.0f / scale);
    unscale = mt_loss_scaler_update(&v->scaler, &worst);
    v->adamw.lr = v->lr;
    v->adamw.skip = unscale == 0.0f;
    if (v->adamw.skip) return;
    v->adamw.grad_scale = unscale * mt_clip_coefficient(v->norm, v->max_norm);
    v->adamw.step++;
}

/* The bits of a NaN depend on the device. */
static int same_float(float a, float b) { return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b)); }

static void same_values(const mt_step_values *a, const mt_step_values *b, int step) {
    if (!same_float(a->norm, b->norm) || !same_float(a->loss, b->loss) ||
        memcmp(&a->scaler.scale, &b->scaler.scale, sizeof(float)) || a->scaler.good_steps != b->scaler.good_steps ||
        a->scaler.overflows != b->scaler.overflows || a->scaler.skipped != b->scaler.skipped ||
        a->adamw.skip != b->adamw.skip || a->adamw.step != b->adamw.step ||
        memcmp(&a->adamw.lr, &b->adamw.lr, sizeof(float)) ||
        (!a->adamw.skip && memcmp(&a->adamw.grad_scale, &b->adamw.grad_scale, sizeof(float))))
        fail_msg("step %d: norm %.9g, scale %.9g, grad_scale %.9g, skip %d; on the host %.9g, %.9g, %.9g, %d", step,
                 (double)a->norm, (double)a->scaler.scale, (double)a->adamw.grad_scale, (int)a->adamw.skip,
                 (double)b->norm, (double)b->scaler.scale, (double)b->adamw.grad_scale, (int)b->adamw.skip);
}

/* Decides 60 steps in the memory of the device. Some norms are infinite, NaN, zero or in need of clipping. */
static void decides(mt_context *ctx, float scale, float max_norm) {
    mt_loss_scaler_desc desc = {scale, 2.0f, 2.0f, 0.5f, 3, 2};
    mt_step_values host, device;
    mt_tensor sums, loss, memory;
    uint64_t seed = 7;
    memset(&host, 0, sizeof host);
    OK(mt_loss_scaler_create(ctx, &desc, &host.scaler));
    host.max_norm = max_norm;
    OK(mt_arena_tensor(ctx, MT_F32, 1, 2, &sums));
    OK(mt_arena_tensor(ctx, MT_F32, 1, 1, &loss));
    OK(mt_arena_tensor(ctx, MT_I32, 1, (int64_t)(sizeof host / sizeof(int32_t)), &memory));
    OK(mt_upload(ctx, &host, memory));
    for (int step = 0; step < 60; step++) {
        float x[2] = {fabsf(test_float(&seed)) * scale * scale * (step % 4 ? 3.0f : 1e-4f), fabsf(test_float(&seed))};
        float of = step % 17 == 16 ? (step % 2 ? (float)-INFINITY : (float)NAN) : step % 2 ? test_float(&seed) : 0.0f;
        if (step % 11 == 10) x[0] = step % 2 ? (float)INFINITY : (float)NAN;
        if (step % 13 == 12) x[1] = step % 2 ? (float)INFINITY : (float)NAN;
        if (step == 25) x[0] = 0.0f;
        OK(mt_upload(ctx, x, sums));
        OK(mt_upload(ctx, &of, loss));
        OK(mt_step_decide(ctx, sums, of == 0.0f ? mt_none() : loss, (mt_step_values *)memory.data));
        decide_on_host(x, of, &host);
        OK(mt_download(ctx, memory, &device));
        same_values(&device, &host, step);
    }
    if (host.scaler.skipped < 5 || host.adamw.step < 40) fail_msg("the cases are not mixed");
}

static void test_step_decide(void **state) {
    (void)state;
    for (int device = 0; device < 2; device++) {
        mt_context *ctx = device ? gpu : cpu;
        size_t mark = mt_arena_mark(ctx);
        decides(ctx, 65536.0f, 1.0f);
        decides(ctx, 77.7f, 0.3f); /* not a power of two */
        decides(ctx, 4.0f, 0.0f);
        mt_arena_release(ctx, mark);
    }
    ASSERT_STATUS(cpu, MT_ERR_ARGUMENT, mt_step_decide(cpu, pair_f32(1, 2).cpu, mt_none(), NULL));
    ASSERT_STATUS(cpu, MT_ERR_SHAPE, mt_step_decide(cpu, pair_f32(2, 2).cpu, mt_none(), NULL));
}

static void cross_entropy(shape s) {
    for (int variant = 0; variant < 3; variant++) {
        int shards = 1 + 2 * variant;
        mt_cross_entropy_shard_desc desc = {s.cols * shards - (s.cols > 3 ? 2 : 0), 0, variant ? 0.1f : 0.0f,
                                            variant == 1 ? MT_ZERO : 1};
        pair all = pair_f32(shards * s.rows, 4), loss = pair_f32(1, s.rows), lse = pair_f32(2, s.rows);
        pair logits[5], dloss = noise_f32(1, variant == 2 ? 1 : s.rows, 9, 1.0f);
        int32_t *targets = (int32_t *)malloc((size_t)s.rows * sizeof *targets), *on_gpu;
        for (int64_t i = 0; i < s.rows; i++) targets[i] = (int32_t)(i * 7 % desc.vocab);
        on_gpu = ids_on_gpu(targets, s.rows);
        for (int k = 0; k < shards; k++) {
            desc.first_col = k * s.cols;
            logits[k] = pair_noise(s.rows, s.cols, s.l, 20 + (uint64_t)k, 5.0f);
            BOTH(
                mt_cross_entropy_stats(cpu, &desc, logits[k].cpu, targets, mt_tensor_rows(all.cpu, k * s.rows, s.rows)),
                mt_cross_entropy_stats(gpu, &desc, logits[k].gpu, on_gpu, mt_tensor_rows(all.gpu, k * s.rows, s.rows)));
        }
        same("mt_cross_entropy_stats", all, 1e-6);
        BOTH(mt_cross_entropy_combine(cpu, &desc, all.cpu, shards, targets, loss.cpu, lse.cpu),
             mt_cross_entropy_combine(gpu, &desc, all.gpu, shards, on_gpu, loss.gpu, lse.gpu));
        same("mt_cross_entropy_combine", loss, 1e-6);
        same("lse", lse, 1e-6);
        for (int k = 0; k < shards; k++) {
            desc.first_col = k * s.cols;
            BOTH(
                mt_cross_entropy_backward(cpu, &desc, logits[k].cpu, targets, lse.cpu, k ? dloss.cpu : mt_none(), 0.3f),
                mt_cross_entropy_backward(gpu, &desc, logits[k].gpu, on_gpu, lse.gpu, k ? dloss.gpu : mt_none(), 0.3f));
            same("mt_cross_entropy_backward", logits[k], 2e-6);
        }
        free(targets);
    }
}

/* In double precision, from the logits x as they are stored. */
static void cross_entropy_expected(const mt_cross_entropy_shard_desc *desc, const float *x, int64_t cols,
                                   int32_t target, double factor, double *loss, float *gradient) {
    double top = -INFINITY, sum = 0, mean = 0, a = (double)desc->label_smoothing;
    for (int64_t j = 0; j < desc->vocab; j++) top = fmax(top, (double)x[j]);
    for (int64_t j = 0; j < desc->vocab; j++)
        sum += exp((double)x[j] - top), mean += (double)x[j] / (double)desc->vocab;
    *loss = log(sum) + (1 - a) * (top - (double)x[target]) + a * (top - mean);
    for (int64_t j = 0; j < cols; j++) {
        double hot = (j == target ? 1 - a : 0) + a / (double)desc->vocab;
        gradient[j] = j < desc->vocab ? (float)(factor * (exp((double)x[j] - top) / sum - hot)) : 0.0f;
    }
}

/* One call and the three separate calls, against double precision. On the CPU, one call has the bits of three. */
static void cross_entropy_at_once(shape s, float smoothing, int padding, int with_dloss) {
    mt_cross_entropy_shard_desc desc = {s.cols - (s.cols > padding ? padding : 0), 0, smoothing, padding ? 1 : MT_ZERO};
    pair x = pair_noise(s.rows, s.cols, s.l, 20, 5.0f), again = pair_new(s.rows, s.cols, s.l),
         stats = pair_f32(s.rows, 4);
    pair dloss = noise_f32(1, s.rows, 9, 1.0f), loss = pair_f32(1, s.rows), loss2 = pair_f32(1, s.rows);
    pair lse = pair_f32(2, s.rows), expected = pair_new(s.rows, s.cols, dense), losses = pair_f32(1, s.rows);
    float *host = download(cpu, x.cpu), *factor = download(cpu, dloss.cpu),
          *g = (float *)calloc((size_t)(s.rows * s.cols), 4);
    float *l = (float *)calloc((size_t)s.rows, 4);
    int32_t *targets = (int32_t *)malloc((size_t)s.rows * sizeof *targets), *on_gpu;
    if (!with_dloss) dloss = none();
    for (int64_t i = 0; i < s.rows; i++) {
        double value = 0;
        targets[i] = (int32_t)(i * 7 % desc.vocab);
        if (targets[i] == test_ignored(desc.ignore_index)) continue;
        cross_entropy_expected(&desc, host + i * s.cols, s.cols, targets[i],
                               0.3 * (with_dloss ? (double)factor[i] : 1.0), &value, g + i * s.cols);
        l[i] = (float)value;
    }
    on_gpu = ids_on_gpu(targets, s.rows);
    size_t mark = mt_arena_mark(cpu);
    mt_tensor f = tensor_new(cpu, MT_F32, s.rows, s.cols, dense);
    OK(mt_upload(cpu, g, f));
    OK(mt_convert(cpu, f, expected.cpu));
    mt_arena_release(cpu, mark);
    OK(mt_upload(cpu, l, losses.cpu));
    BOTH(mt_copy(cpu, x.cpu, again.cpu), mt_copy(gpu, x.gpu, again.gpu));
    BOTH(mt_cross_entropy_forward_backward(cpu, &desc, x.cpu, targets, dloss.cpu, 0.3f, loss.cpu),
         mt_cross_entropy_forward_backward(gpu, &desc, x.gpu, on_gpu, dloss.gpu, 0.3f, loss.gpu));
    for (int device = 0; device < 2; device++) {
        pair gradient = {expected.cpu, x.gpu}, value = {losses.cpu, loss.gpu};
        if (device == 0) {
            float *on_host = download(cpu, x.cpu), *loss_host = download(cpu, loss.cpu);
            mt_tensor moved = tensor_new(gpu, MT_F32, s.rows, s.cols, dense),
                      moved_loss = tensor_new(gpu, MT_F32, 1, s.rows, dense);
            OK(mt_upload(gpu, on_host, moved));
            OK(mt_upload(gpu, loss_host, moved_loss));
            gradient.gpu = moved;
            value.gpu = moved_loss;
            free(on_host);
            free(loss_host);
        }
        /* a gradient is a difference of probabilities, times 0.3 and dloss: 1 - 1 for a vocabulary of 1 */
        same_terms(device ? "one pass" : "one pass on the CPU", gradient, 2e-6, 0.3);
        same("loss", value, 1e-6);
    }
    BOTH(mt_cross_entropy_stats(cpu, &desc, again.cpu, targets, stats.cpu),
         mt_cross_entropy_stats(gpu, &desc, again.gpu, on_gpu, stats.gpu));
    BOTH(mt_cross_entropy_combine(cpu, &desc, stats.cpu, 1, targets, loss2.cpu, lse.cpu),
         mt_cross_entropy_combine(gpu, &desc, stats.gpu, 1, on_gpu, loss2.gpu, lse.gpu));
    BOTH(mt_cross_entropy_backward(cpu, &desc, again.cpu, targets, lse.cpu, dloss.cpu, 0.3f),
         mt_cross_entropy_backward(gpu, &desc, again.gpu, on_gpu, lse.gpu, dloss.gpu, 0.3f));
    for (int device = 0; device < 2; device++) {
        uint64_t a[2] = {0, 0}, b[2] = {0, 0};
        mt_context *ctx = device ? gpu : cpu;
        OK(mt_hash(ctx, device ? x.gpu : x.cpu, 0, 0, s.cols, &a[0]));
        OK(mt_hash(ctx, device ? again.gpu : again.cpu, 0, 0, s.cols, &b[0]));
        OK(mt_hash(ctx, device ? loss.gpu : loss.cpu, 0, 0, s.rows, &a[1]));
        OK(mt_hash(ctx, device ? loss2.gpu : loss2.cpu, 0, 0, s.rows, &b[1]));
#if !defined(MT_CUDA_ENGINE)
        if (device) continue; /* nvcc may contract the two kernels differently */
#endif
        if (memcmp(a, b, sizeof a) != 0)
            fail_msg("one pass and three calls differ on device %d, %s", device, mt_dtype_name(type));
    }
    free(host), free(factor), free(g), free(l), free(targets);
}

static void cross_entropy_one_pass(shape s) {
    for (int how = 0; how < 4; how++) {
        size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
        cross_entropy_at_once(s, how & 1 ? 0.1f : 0.0f, how & 2 ? 3 : 0, how & 1);
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, on_gpu);
    }
}

/* Rows too long for the shared memory of any GPU, even in 16 bits. */
static void test_wide_cross_entropy(void **state) {
    static const shape list[] = {{2, 20000, {0, 0}}, {3, 120003, {5, 0}}, {2, 120008, {0, 0}}};
    (void)state;
    for (int i = 0; i < 6; i++) {
        size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
        type = i & 1 ? MT_BF16 : MT_F32;
        cross_entropy_at_once(list[i / 2], 0.1f, 700, 1);
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, on_gpu);
    }
}

/* Every column is a target once, also the last ones, which are no whole vector. */
static void test_cross_entropy_targets(void **state) {
    static const shape list[] = {{48, 48, {0, 0}}, {45, 45, {3, 0}}, {9, 40, {8, 8}}};
    (void)state;
    each_type(cross_entropy_one_pass, list, 3);
}

/* Logits of which all but a few are -infinity, first in every part of a row that a thread sees; large logits; and a
   row that is ignored whatever it holds. */
static void masked(shape s) {
    mt_cross_entropy_shard_desc desc = {s.cols, 0, 0.0f, 1};
    int64_t n = s.rows * s.cols;
    float *x = (float *)malloc((size_t)n * sizeof *x);
    int32_t *targets = (int32_t *)malloc((size_t)s.rows * sizeof *targets), *on_gpu;
    pair f = pair_f32(s.rows, s.cols), logits = pair_new(s.rows, s.cols, s.l), again = pair_new(s.rows, s.cols, s.l);
    pair stats = pair_f32(s.rows, 4), loss = pair_f32(1, s.rows), lse = pair_f32(2, s.rows);
    for (int64_t i = 0; i < n; i++) {
        int64_t row = i / s.cols, col = i % s.cols;
        x[i] = row == 1 ? 400.0f + (float)(col % 37) : (float)(col % 7) - 3.0f;
        if (row == 0 && col < s.cols - 5) x[i] = -INFINITY;
        if (row == 2 && col % 3 == 0) x[i] = NAN;
    }
    for (int64_t i = 0; i < s.rows; i++) targets[i] = i == 2 ? 1 : (int32_t)(s.cols - 1 - i);
    on_gpu = ids_on_gpu(targets, s.rows);
    OK(mt_upload(cpu, x, f.cpu));
    OK(mt_upload(gpu, x, f.gpu));
    BOTH(mt_convert(cpu, f.cpu, logits.cpu), mt_convert(gpu, f.gpu, logits.gpu));
    BOTH(mt_copy(cpu, logits.cpu, again.cpu), mt_copy(gpu, logits.gpu, again.gpu));
    BOTH(mt_cross_entropy_forward_backward(cpu, &desc, logits.cpu, targets, mt_none(), 1.0f, loss.cpu),
         mt_cross_entropy_forward_backward(gpu, &desc, logits.gpu, on_gpu, mt_none(), 1.0f, loss.gpu));
    same("loss", loss, 1e-6);
    same("gradient", logits, 2e-6);
    BOTH(mt_cross_entropy_stats(cpu, &desc, again.cpu, targets, stats.cpu),
         mt_cross_entropy_stats(gpu, &desc, again.gpu, on_gpu, stats.gpu));
    pair two = {mt_tensor_cols(mt_tensor_rows(stats.cpu, 0, 2), 0, 2),
                mt_tensor_cols(mt_tensor_rows(stats.gpu, 0, 2), 0, 2)};
    same("maximum and sum", two, 1e-6);
    BOTH(mt_cross_entropy_combine(cpu, &desc, stats.cpu, 1, targets, loss.cpu, lse.cpu),
         mt_cross_entropy_combine(gpu, &desc, stats.gpu, 1, on_gpu, loss.gpu, lse.gpu));
    BOTH(mt_cross_entropy_backward(cpu, &desc, again.cpu, targets, lse.cpu, mt_none(), 1.0f),
         mt_cross_entropy_backward(gpu, &desc, again.gpu, on_gpu, lse.gpu, mt_none(), 1.0f));
    same("gradient of backward", again, 2e-6);
    free(x), free(targets);
}

static void test_cross_entropy_masked(void **state) {
    static const shape list[] = {{4, 40, {0, 0}}, {3, 45, {3, 1}}, {3, 17000, {0, 0}}};
    (void)state;
    each_type(masked, list, 3);
}

/* The statistics of a shard without columns. */
static void test_cross_entropy_without_columns(void **state) {
    const mt_cross_entropy_shard_desc desc = {8, 8, 0.1f, 0};
    const int32_t targets[] = {0, 3, 7};
    size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
    const int32_t *there = ids_on_gpu(targets, 3);
    pair x = pair_f32(3, 8), stats = pair_f32(3, 4);
    (void)state;
    type = MT_F32;
    BOTH(mt_cross_entropy_stats(cpu, &desc, mt_tensor_cols(x.cpu, 0, 0), targets, stats.cpu),
         mt_cross_entropy_stats(gpu, &desc, mt_tensor_cols(x.gpu, 0, 0), there, stats.gpu));
    same("mt_cross_entropy_stats", stats, 0);
    mt_arena_release(cpu, on_cpu);
    mt_arena_release(gpu, on_gpu);
}

/* Overwrites x, the second of four shards, with its gradient. Writes the hashes of its statistics and gradient. */
static void cross_entropy_hashes(mt_context *ctx, mt_tensor x, const int32_t *targets, uint64_t *hashes) {
    mt_cross_entropy_shard_desc desc = {4 * x.cols, x.cols, 0.1f, 0};
    mt_tensor stats = tensor_new(ctx, MT_F32, x.rows, 4, dense), loss = tensor_new(ctx, MT_F32, 1, x.rows, dense),
              lse = tensor_new(ctx, MT_F32, 2, x.rows, dense);
    OK(mt_cross_entropy_stats(ctx, &desc, x, targets, stats));
    OK(mt_cross_entropy_combine(ctx, &desc, stats, 1, targets, loss, lse));
    OK(mt_cross_entropy_backward(ctx, &desc, x, targets, lse, mt_none(), 1.0f));
    hashes[0] = hashes[1] = 0;
    OK(mt_hash(ctx, stats, 0, 0, 4, &hashes[0]));
    OK(mt_hash(ctx, x, 0, 0, x.cols, &hashes[1]));
}

/* In invariant mode a virtual shard whose rows are aligned has the bits of one whose rows are not. */
static void test_cross_entropy_of_virtual_shards(void **state) {
    enum { ROWS = 200, COLS = 83 };
    mt_context_desc where;
    mt_context *ctx;
    const layout padded = {5, 0}; /* 88 */
    int32_t targets[ROWS];
    (void)state;
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_CUDA;
    where.arena_bytes = (size_t)8 << 20;
    where.invariant = 4;
    OK(mt_context_create(NULL, &where, &ctx));
    for (int i = 0; i < ROWS; i++) targets[i] = i;
    for (int t = 0; t < 3; t++) {
        size_t mark = mt_arena_mark(gpu);
        type = (mt_dtype)t;
        pair aligned = pair_noise(ROWS, COLS, padded, 31, 10.0f), all = pair_noise(ROWS, 4 * COLS, dense, 32, 10.0f);
        mt_tensor other = mt_tensor_cols(all.gpu, COLS, COLS);
        uint64_t one[2], two[2];
        const int32_t *on_gpu = ids_on_gpu(targets, ROWS);
        OK(mt_copy(gpu, aligned.gpu, other));
        OK(mt_context_synchronize(gpu));
        cross_entropy_hashes(ctx, aligned.gpu, on_gpu, one);
        cross_entropy_hashes(ctx, other, on_gpu, two);
        if (one[0] != two[0]) fail_msg("%s: the statistics depend on the alignment", mt_dtype_name(type));
        if (one[1] != two[1]) fail_msg("%s: the gradients depend on the alignment", mt_dtype_name(type));
        mt_arena_release(gpu, mark);
    }
    mt_context_destroy(ctx);
}

/* Fills all rows of x, and one row on the CPU, with the same logits. The columns behind x, up to its leading dimension,
   get the value 7. */
static void fill_equal_rows(mt_tensor x, mt_tensor one) {
    size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
    pair row = pair_noise(1, x.cols, dense, 33, 8.0f);
    mt_tensor gap = x;
    OK(mt_copy(cpu, row.cpu, one));
    for (int64_t i = 0; i < x.rows; i++) OK(mt_copy(gpu, row.gpu, mt_tensor_rows(x, i, 1)));
    gap.data = (char *)x.data + (size_t)x.cols * mt_dtype_size(x.dtype);
    gap.rows = x.rows - 1;
    gap.cols = x.ld - x.cols;
    if (gap.cols > 0) OK(mt_fill(gpu, gap, 7.0f));
    OK(mt_context_synchronize(gpu));
    mt_arena_release(cpu, on_cpu);
    mt_arena_release(gpu, on_gpu);
}

static void check_equal_rows(const char *what, mt_tensor x, mt_tensor one) {
    pair first = {one, mt_tensor_rows(x, 0, 1)};
    same_terms(what, first, 2e-6, 0.3); /* a gradient is a difference of probabilities, times 0.3 */
    for (int64_t i = 1; i < x.rows; i++)
        if (hash_of(mt_tensor_rows(x, i, 1)) != hash_of(first.gpu))
            fail_msg("%s, %s, %lld columns, distance %lld: row %lld has other bits than row 0", what,
                     mt_dtype_name(x.dtype), (long long)x.cols, (long long)x.ld, (long long)i);
    for (int64_t i = 0; i < x.rows - 1; i++)
        for (int64_t j = x.cols; j < x.ld; j++) {
            mt_tensor element =
                mt_tensor_make((char *)x.data + (size_t)(i * x.ld + j) * mt_dtype_size(x.dtype), x.dtype, 1, 1);
            float *value = download(gpu, element);
            if (value[0] != 7.0f) fail_msg("%s wrote behind row %lld", what, (long long)i);
            free(value);
        }
}

/* Rows with an odd distance begin at every alignment. When all hold the same logits, they have the same statistics,
   loss and gradient, bit for bit. The memory begins with the first row and ends with the last one. */
static void cross_entropy_of_equal_rows(int64_t cols, int64_t ld, int64_t vocab, int64_t target) {
    enum { ROWS = 9 };
    mt_cross_entropy_shard_desc desc = {vocab, 0, 0.1f, 0};
    size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
    int32_t targets[ROWS];
    void *memory;
    for (int i = 0; i < ROWS; i++) targets[i] = (int32_t)target;
    assert_int_equal(cudaMalloc(&memory, (size_t)((ROWS - 1) * ld + cols) * mt_dtype_size(type)), cudaSuccess);
    mt_tensor x = mt_tensor_make(memory, type, ROWS, cols), one = tensor_new(cpu, type, 1, cols, dense);
    const int32_t *there = ids_on_gpu(targets, ROWS);
    pair loss = pair_f32(ROWS, 1), stats = pair_f32(ROWS, 4), lse = pair_f32(2, ROWS);
    mt_tensor loss_row = mt_tensor_make(loss.gpu.data, MT_F32, 1, ROWS);
    x.ld = ld;
    fill_equal_rows(x, one);
    OK(mt_cross_entropy_stats(gpu, &desc, x, there, stats.gpu));
    OK(mt_cross_entropy_stats(cpu, &desc, one, targets, mt_tensor_rows(stats.cpu, 0, 1)));
    check_equal_rows("statistics", stats.gpu, mt_tensor_rows(stats.cpu, 0, 1));
    OK(mt_cross_entropy_combine(gpu, &desc, stats.gpu, 1, there, loss_row, lse.gpu));
    OK(mt_cross_entropy_backward(gpu, &desc, x, there, lse.gpu, mt_none(), 0.3f));
    OK(mt_cross_entropy_forward_backward(cpu, &desc, one, targets, mt_none(), 0.3f, mt_tensor_rows(loss.cpu, 0, 1)));
    check_equal_rows("gradient from lse", x, one);
    fill_equal_rows(x, one);
    OK(mt_cross_entropy_forward_backward(gpu, &desc, x, there, mt_none(), 0.3f, loss_row));
    OK(mt_cross_entropy_forward_backward(cpu, &desc, one, targets, mt_none(), 0.3f, mt_tensor_rows(loss.cpu, 0, 1)));
    check_equal_rows("loss", loss.gpu, mt_tensor_rows(loss.cpu, 0, 1));
    check_equal_rows("gradient", x, one);
    assert_int_equal(cudaFree(memory), cudaSuccess);
    mt_arena_release(cpu, on_cpu);
    mt_arena_release(gpu, on_gpu);
}

/* Widths with no chunk (up to 23 columns), with one chunk, and with groups of one, two and four chunks. */
static void test_cross_entropy_alignments(void **state) {
    static const int64_t widths[] = {1, 2, 7, 16, 23, 24, 25, 33, 100, 1019, 17000};
    (void)state;
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
            int64_t cols = widths[i], vocab = cols > 3 && i % 2 ? cols - 3 : cols;
            type = (mt_dtype)t;
            cross_entropy_of_equal_rows(cols, cols | 1, vocab, vocab - 1);
            if (cols > 2000) continue;
            cross_entropy_of_equal_rows(cols, (cols | 1) + 2, vocab, vocab / 2);
            cross_entropy_of_equal_rows(cols, cols | 1, vocab, mt_min(vocab - 1, 5));
        }
}

static void test_cross_entropy_refuses(void **state) {
    mt_cross_entropy_shard_desc desc = {10, 0, 0.0f, 0};
    pair x = pair_f32(2, 8), loss = pair_f32(1, 2);
    int32_t targets[2] = {0, 1};
    (void)state;
    ASSERT_STATUS(cpu, MT_ERR_SHAPE,
                  mt_cross_entropy_forward_backward(cpu, &desc, x.cpu, targets, mt_none(), 1.0f, loss.cpu));
    assert_non_null(strstr(mt_last_error(cpu), "8 columns from 0 on are only a part of a vocabulary of 10"));
    desc.vocab = 8;
    desc.first_col = 1;
    ASSERT_STATUS(cpu, MT_ERR_SHAPE,
                  mt_cross_entropy_forward_backward(cpu, &desc, x.cpu, targets, mt_none(), 1.0f, loss.cpu));
}

static void embedding(shape s) {
    int64_t vocab = 9, tokens = s.rows;
    int32_t *ids = (int32_t *)malloc((size_t)tokens * sizeof *ids), *on_gpu;
    pair dtable = noise_f32(vocab, s.cols, 5, 1.0f), table = pair_noise(vocab, s.cols, dense, 1, 1.0f),
         y = pair_noise(tokens, s.cols, s.l, 2, 1.0f);
    /* some tokens belong to other shards: rows 2 to 10 are here */
    for (int64_t i = 0; i < tokens; i++) ids[i] = (int32_t)(i * i % 13);
    on_gpu = ids_on_gpu(ids, tokens);
    for (int step = 0; step < 2; step++) {
        BOTH(mt_embedding_forward(cpu, table.cpu, 2, ids, (float)step, y.cpu),
             mt_embedding_forward(gpu, table.gpu, 2, on_gpu, (float)step, y.gpu));
        same("mt_embedding_forward", y, 1e-7);
    }
    BOTH(mt_embedding_backward(cpu, y.cpu, 2, ids, dtable.cpu),
         mt_embedding_backward(gpu, y.gpu, 2, on_gpu, dtable.gpu));
    same("mt_embedding_backward", dtable, type == MT_F32 ? 0 : 1e-2);
    BOTH(mt_position_ids(cpu, 11, 7, NULL, 0, ids, tokens), mt_position_ids(gpu, 11, 7, NULL, 0, on_gpu, tokens));
    BOTH(mt_embedding_forward(cpu, table.cpu, 0, ids, 0.0f, y.cpu),
         mt_embedding_forward(gpu, table.gpu, 0, on_gpu, 0.0f, y.gpu));
    same("mt_position_ids", y, 0);
    free(ids);
}

#define TEST_EACH(name)                                                                                                \
    static void test_##name(void **state) {                                                                            \
        (void)state;                                                                                                   \
        each_shape(name);                                                                                              \
    }
TEST_EACH(memory)
TEST_EACH(bias)
TEST_EACH(activation)
TEST_EACH(norm)
TEST_EACH(dropout)
TEST_EACH(adamw)
TEST_EACH(cross_entropy)
TEST_EACH(cross_entropy_one_pass)
TEST_EACH(embedding)

/* ---- products and attention -------------------------------------------------------------------------------------- */

/* cuBLASLt may round alpha A B to the 16-bit type of C before it adds beta C (seen with small products on an H200). The
   parts of a divided k are added in this way, too. */
static double gemm_tolerance(mt_dtype c, int64_t k, float beta) {
    if (c == MT_F32) return 1e-5;
    return k > 1024 || beta != 0.0f ? last_place(c) / 2 : 1e-5;
}

static void test_gemm(void **state) {
    static const int64_t sizes[][3] = {{1, 1, 1}, {3, 5, 7},      {16, 8, 40},    {33, 24, 17},   {8, 64, 1},
                                       {5, 8, 0}, {1029, 72, 64}, {64, 1041, 72}, {65, 64, 1087}, {1025, 1026, 64}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int how = 0; how < 16 * 6; how++) {
            static const mt_dtype types[][3] = {{MT_F32, MT_F32, MT_F32},   {MT_BF16, MT_BF16, MT_BF16},
                                                {MT_BF16, MT_BF16, MT_F32}, {MT_F16, MT_F16, MT_F16},
                                                {MT_F16, MT_BF16, MT_F32},  {MT_F32, MT_F16, MT_BF16}};
            if (!test_takes(i * 16 * 6 + (size_t)how, 5)) continue;
            const mt_dtype *t = types[how / 16];
            int64_t m = sizes[i][0], n = sizes[i][1], k = sizes[i][2];
            mt_transpose ta = how & 1 ? MT_TRANS : MT_NO_TRANS, tb = how & 2 ? MT_TRANS : MT_NO_TRANS;
            layout l = how & 4 ? odd : dense;
            float beta = how & 8 ? 1.0f : 0.0f;
            size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
            pair a = pair_fill(pair_of(t[0], ta ? k : m, ta ? m : k, l), 1, 1.0f);
            pair b = pair_fill(pair_of(t[1], tb ? n : k, tb ? k : n, l), 2, 1.0f),
                 c = pair_fill(pair_of(t[2], m, n, l), 3, 1.0f);
            BOTH(mt_gemm(cpu, ta, tb, 0.5f, a.cpu, b.cpu, beta, c.cpu),
                 mt_gemm(gpu, ta, tb, 0.5f, a.gpu, b.gpu, beta, c.gpu));
            same("mt_gemm", c, gemm_tolerance(t[2], k, beta));
            mt_arena_release(cpu, on_cpu);
            mt_arena_release(gpu, on_gpu);
        }
}

/* With the plain kernels, because rows of 16-bit outputs are not aligned. */
static void attention(int64_t batch, int64_t seq, int64_t groups, int64_t per_group, int64_t dim, mt_mask mask,
                      int padded, float p, mt_qkv_layout qkv_layout) {
    mt_attention_desc s, on_gpu;
    int64_t heads = groups * per_group, tokens = batch * seq;
    int32_t lengths[4];
    memset(&s, 0, sizeof s);
    s.batch = batch, s.seq = seq, s.groups = groups, s.heads_per_group = per_group, s.head_dim = dim;
    s.scores.mask = mask;
    s.qkv_layout = qkv_layout;
    s.dropout.p = p;
    s.dropout.at = place(heads);
    for (int64_t b = 0; b < batch; b++) lengths[b] = (int32_t)(b == 1 ? 0 : seq - b);
    on_gpu = s;
    on_gpu.dropout.at = with_offset(s.dropout.at);
    if (padded) s.lengths = lengths, on_gpu.lengths = ids_on_gpu(lengths, batch);
    pair qkv = pair_noise(tokens, (heads + 2 * groups) * dim, wide, 1, 1.0f),
         out = pair_new(tokens, heads * dim, type == MT_F32 ? dense : odd);
    pair lse = pair_f32(heads, tokens), dout = pair_noise(tokens, heads * dim, odd, 2, 1.0f),
         dqkv = pair_new(tokens, (heads + 2 * groups) * dim, odd);
    pair table = pair_f32(seq, dim);
    if (dim % 2 == 0) {
        BOTH(mt_rotary_table(cpu, 100.0f, table.cpu), mt_rotary_table(gpu, 100.0f, table.gpu));
        same("mt_rotary_table", table, 1e-6);
        BOTH(mt_rotary_forward(cpu, &s, table.cpu, qkv.cpu), mt_rotary_forward(gpu, &on_gpu, table.gpu, qkv.gpu));
        same("mt_rotary_forward", qkv, 1e-6);
    }
    BOTH(mt_attention_forward(cpu, &s, qkv.cpu, out.cpu, lse.cpu),
         mt_attention_forward(gpu, &on_gpu, qkv.gpu, out.gpu, lse.gpu));
    same("mt_attention_forward", out, 5e-6);
    same("lse", lse, 5e-6);
    BOTH(mt_attention_backward(cpu, &s, qkv.cpu, out.cpu, lse.cpu, dout.cpu, dqkv.cpu),
         mt_attention_backward(gpu, &on_gpu, qkv.gpu, out.gpu, lse.gpu, dout.gpu, dqkv.gpu));
    same("mt_attention_backward", dqkv, 1e-5);
}

/* What changes the scores: bits of `what`. Separate views, more or fewer keys than queries, and each option alone and
   with the others. */
enum {
    KV_SEQ = 1,
    LENGTHS = 2,
    WINDOW = 4,
    SOFTCAP = 8,
    ALIBI = 16,
    DOCUMENTS = 32,
    BIAS = 64,
    SEEN = 128,
    DROP = 256,
    PART = 512
};

/* Sets what needs memory of the device, in `s` for the CPU and in *on_gpu for the GPU. Documents are for two sequences
   of 13 or 70 tokens, or of 40 of which a call has a part. */
static void attention_options(int what, mt_attention_desc *s, mt_attention_desc *on_gpu) {
    static const float slopes[] = {0.5f, 0.0f, 1.0f, 0.25f};
    static const int32_t lengths[] = {9, 0}, documents[] = {0, 4, 11, 11, 26}, longer[] = {0, 37, 45, 45, 140};
    static const int32_t whole[] = {0, 27, 30, 45, 80};
    int64_t rows = s->bias.batch * s->bias.heads * (what & PART ? s->part.seq : s->seq);
    int64_t n = what & PART ? s->part.kv_seq : s->kv_seq ? s->kv_seq : s->seq;
    pair bias = pair_noise(rows, n, odd, 5, 1.0f), seen = pair_of(MT_U8, rows, n, dense), slope = pair_f32(1, 4);
    *on_gpu = *s;
    on_gpu->dropout.at = with_offset(s->dropout.at);
    if (what & LENGTHS) s->lengths = lengths, on_gpu->lengths = ids_on_gpu(lengths, 2);
    if (what & DOCUMENTS) {
        s->cu_seqlens = what & PART ? whole : s->seq == 13 ? documents : longer;
        on_gpu->cu_seqlens = ids_on_gpu(s->cu_seqlens, 5);
    }
    if (what & DOCUMENTS) s->documents = on_gpu->documents = 4;
    if (what & ALIBI) {
        OK(mt_upload(gpu, slopes, slope.gpu));
        s->scores.alibi = on_gpu->scores.alibi = 1;
        s->scores.alibi_slopes = slopes, on_gpu->scores.alibi_slopes = (const float *)slope.gpu.data;
    }
    if (what & BIAS) s->bias.value = bias.cpu, on_gpu->bias.value = bias.gpu;
    if (what & SEEN) {
        for (int64_t i = 0; i < rows * n; i++) ((uint8_t *)seen.cpu.data)[i] = i / n != 3 && i * 7 % 11 < 7;
        OK(mt_upload(gpu, seen.cpu.data, seen.gpu));
        s->bias.value = seen.cpu, on_gpu->bias.value = seen.gpu;
    }
}

/* With some views that are aligned to whole vectors, and some that are not, or with all of them aligned. */
static void dot_product_attention(int what, mt_attention_desc s, int aligned) {
    mt_attention_desc on_gpu;
    layout odd_or_wide = aligned ? wide : odd;
    int64_t heads = s.groups * s.heads_per_group, width = heads * s.head_dim, kv_width = s.groups * s.head_dim;
    int64_t tokens = s.batch * s.seq, keys = s.batch * (s.kv_seq ? s.kv_seq : s.seq);
    s.dropout.p = what & DROP ? 0.2f : 0.0f;
    s.dropout.at = place(heads);
    s.scores.softcap = what & SOFTCAP ? 2.0f : 0.0f;
    attention_options(what, &s, &on_gpu);
    double tolerance = type == MT_F32 ? 1e-5 : 1e-3; /* out may be rounded to neighbours, which changes the gradients */
    pair q = pair_noise(tokens, width, odd_or_wide, 1, 1.0f), k = pair_noise(keys, kv_width, wide, 2, 1.0f),
         v = pair_noise(keys, kv_width, odd_or_wide, 3, 1.0f), out = pair_new(tokens, width, dense),
         lse = pair_f32(heads, tokens), dout = pair_noise(tokens, width, odd_or_wide, 4, 1.0f),
         dq = pair_new(tokens, width, odd), dk = pair_new(keys, kv_width, wide), dv = pair_new(keys, kv_width, odd),
         dbias = what & BIAS ? noise_f32(s.bias.value.rows, s.bias.value.cols, 6, 1.0f) : none();
    BOTH(mt_dot_product_attention_forward(cpu, &s, q.cpu, k.cpu, v.cpu, out.cpu, lse.cpu),
         mt_dot_product_attention_forward(gpu, &on_gpu, q.gpu, k.gpu, v.gpu, out.gpu, lse.gpu));
    same("mt_dot_product_attention_forward", out, 5e-6);
    same("lse", lse, 5e-6);
    s.bias.grad = dbias.cpu, on_gpu.bias.grad = dbias.gpu;
    BOTH(mt_dot_product_attention_backward(cpu, &s, q.cpu, k.cpu, v.cpu, out.cpu, lse.cpu, dout.cpu, dq.cpu, dk.cpu,
                                           dv.cpu),
         mt_dot_product_attention_backward(gpu, &on_gpu, q.gpu, k.gpu, v.gpu, out.gpu, lse.gpu, dout.gpu, dq.gpu,
                                           dk.gpu, dv.gpu));
    same("dq", dq, tolerance);
    same("dk", dk, tolerance);
    same("dv", dv, tolerance);
    if (what & BIAS) same("dbias", dbias, tolerance);
}

static void test_dot_product_attention(void **state) {
    (void)state;
    set_built_for(75);
    static const int sets[] = {0,
                               KV_SEQ,
                               LENGTHS,
                               WINDOW,
                               SOFTCAP,
                               ALIBI,
                               DOCUMENTS,
                               BIAS,
                               SEEN,
                               KV_SEQ | WINDOW | ALIBI | BIAS | DROP,
                               511 & ~(KV_SEQ | SEEN),
                               511 & ~(DOCUMENTS | BIAS),
                               PART,
                               PART | KV_SEQ | WINDOW | ALIBI | BIAS | DROP,
                               PART | SEEN | LENGTHS | SOFTCAP,
                               PART | DOCUMENTS | DROP};
    for (int i = 0; i < 16 * 16; i++) {
        static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
        size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
        int what = sets[i % 16], k = i / 16;
        mt_attention_desc s = {};
        type = types[(k + i) % 3];
        s.batch = 2, s.seq = 13, s.groups = 1 + k / 2 % 2, s.heads_per_group = 2, s.head_dim = 5 + k % 3 * 16;
        s.scores.mask = k & 1 ? MT_MASK_CAUSAL : MT_MASK_BIDIRECTIONAL;
        s.kv_seq = !(what & KV_SEQ) || what & DOCUMENTS ? 0 : k & 4 ? 9 : 37;
        if (what & PART) s.part.seq = 40, s.part.kv_seq = what & DOCUMENTS ? 40 : 41 + k;
        if (what & PART) s.part.first_query = 3 * (k % 9), s.part.first_key = k % 5;
        s.scores.window = what & WINDOW ? 5 : 0;
        s.bias.batch = k & 4 ? 2 : 1, s.bias.heads = k & 8 ? s.groups * 2 + (k & 2 ? 3 : 0) : 1;
        s.bias.first_head = k & 2;
        dot_product_attention(what, s, 0);
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, on_gpu);
    }
    set_built_for(0);
}

/* Heads of each shape of the plain kernels. There are several blocks of rows and several tiles, and the last ones are
   partly empty. Windows and documents begin in the middle of a tile. With fewer keys than queries, the first queries of
   a block see no key. */
static void test_tiles_of_attention(void **state) {
    static const struct {
        int64_t seq, kv_seq, groups, per_group, dim, window;
        int causal, what;
    } cases[] = {{70, 0, 1, 3, 64, 0, 1, DROP},
                 {33, 70, 1, 2, 33, 0, 1, DROP | ALIBI},
                 {70, 33, 2, 1, 80, 0, 1, DROP},
                 {65, 97, 1, 2, 1, 45, 0, SOFTCAP},
                 {70, 0, 1, 2, 200, 20, 1, BIAS},
                 {40, 50, 1, 2, 256, 11, 0, DROP | LENGTHS},
                 {70, 0, 1, 2, 96, 0, 1, DOCUMENTS},
                 {64, 64, 1, 1, 128, 0, 0, SEEN | SOFTCAP},
                 {130, 31, 1, 2, 32, 7, 1, 0},
                 {32, 129, 2, 2, 40, 33, 0, BIAS | DROP},
                 {70, 0, 2, 2, 160, 9, 0, DOCUMENTS},
                 {17, 66, 1, 3, 129, 0, 1, DROP | SOFTCAP},
                 {70, 90, 1, 3, 72, 30, 1, 511 & ~(DOCUMENTS | BIAS)}};
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    (void)state;
    set_built_for(75);
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
        size_t k = i / 2, on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
        mt_attention_desc s = {};
        type = types[(i + k) % 3];
        s.batch = 2, s.seq = cases[k].seq, s.kv_seq = cases[k].kv_seq;
        s.groups = cases[k].groups, s.heads_per_group = cases[k].per_group, s.head_dim = cases[k].dim;
        s.scores.mask = cases[k].causal ? MT_MASK_CAUSAL : MT_MASK_BIDIRECTIONAL, s.scores.window = cases[k].window;
        s.bias.batch = s.bias.heads = 1;
        dot_product_attention(cases[k].what, s, (int)(i & 1));
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, on_gpu);
    }
    set_built_for(0);
}

/* The bias and its gradient in a fused call, also of a bias that has more heads than the call. */
static void test_fused_bias(void **state) {
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    (void)state;
    for (int i = 0; i < 3 * 4; i++) {
        mt_attention_desc s = {}, on_gpu;
        size_t on_cpu = mt_arena_mark(cpu), mark = mt_arena_mark(gpu);
        type = types[i % 3];
        s.batch = 2, s.seq = 11, s.groups = 2, s.heads_per_group = 2, s.head_dim = 16;
        s.bias.batch = 1 + i / 3 % 2, s.bias.heads = i / 6 ? 6 : 1, s.bias.first_head = i / 6;
        pair qkv = pair_noise(22, 128, odd, 1, 1.0f), out = pair_new(22, 64, dense), lse = pair_f32(4, 22),
             dout = pair_noise(22, 64, wide, 2, 1.0f), dqkv = pair_new(22, 128, odd);
        attention_options(BIAS, &s, &on_gpu);
        pair dbias = noise_f32(s.bias.value.rows, 11, 6, 1.0f);
        s.bias.grad = dbias.cpu, on_gpu.bias.grad = dbias.gpu;
        BOTH(mt_attention_forward(cpu, &s, qkv.cpu, out.cpu, lse.cpu),
             mt_attention_forward(gpu, &on_gpu, qkv.gpu, out.gpu, lse.gpu));
        same("mt_attention_forward", out, 5e-6);
        BOTH(mt_attention_backward(cpu, &s, qkv.cpu, out.cpu, lse.cpu, dout.cpu, dqkv.cpu),
             mt_attention_backward(gpu, &on_gpu, qkv.gpu, out.gpu, lse.gpu, dout.gpu, dqkv.gpu));
        same("mt_attention_backward", dqkv, type == MT_F32 ? 1e-5 : 1e-3);
        same("dbias", dbias, type == MT_F32 ? 1e-5 : 1e-3);
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, mark);
    }
}

/* A NaN in a query stays one in its output, so that a loss scaler sees it. */
static void test_attention_keeps_nan(void **state) {
    mt_attention_desc s = {};
    float x[12];
    (void)state;
    type = MT_F32;
    s.batch = 1, s.seq = 4, s.groups = 1, s.heads_per_group = 1, s.head_dim = 1, s.scores.mask = MT_MASK_BIDIRECTIONAL;
    for (int i = 0; i < 12; i++) x[i] = i == 6 ? NAN : 1.0f;
    pair qkv = pair_new(4, 3, dense), out = pair_new(4, 1, dense), lse = pair_f32(1, 4);
    OK(mt_upload(cpu, x, qkv.cpu));
    OK(mt_upload(gpu, x, qkv.gpu));
    BOTH(mt_attention_forward(cpu, &s, qkv.cpu, out.cpu, lse.cpu),
         mt_attention_forward(gpu, &s, qkv.gpu, out.gpu, lse.gpu));
    float *a = download(cpu, out.cpu), *b = download(gpu, out.gpu), *c = download(gpu, lse.gpu);
    assert_true(isnan(a[2]) && isnan(b[2]) && isnan(c[2]));
    assert_true(a[1] == 1.0f && b[1] == 1.0f);
    free(a), free(b), free(c);
}

static void test_attention(void **state) {
    (void)state;
    for (int i = 0; i < 24; i++) {
        static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
        size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
        type = types[i / 8];
        mt_mask mask = i & 1 ? MT_MASK_CAUSAL : MT_MASK_BIDIRECTIONAL;
        attention(3, i % 8 < 4 ? 5 : 37, 1 + i % 3, 1 + i % 2, i % 8 < 4 ? 8 : 40, mask, i & 2, i & 4 ? 0.2f : 0.0f,
                  (mt_qkv_layout)(i / 3 % 3));
        attention(1, 1, 1, 1, 3, mask, 0, 0.0f, MT_QKV_PER_GROUP);
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, on_gpu);
    }
}

/* More vectors than the largest grid has threads, in rows that end within a vector. The bits depend on the shape and
   the values, not on the address. */
static void test_sum(void **state) {
    static const layout places[] = {{0, 0}, {7, 0}, {3, 1}};
    static const shape sizes[] = {{1021, 2065, {0, 0}}, {700, 24, {0, 0}}, {1, 5000, {0, 0}}};
    (void)state;
    for (size_t i = 0; i < 9; i++) {
        static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
        int64_t rows = sizes[i / 3].rows, cols = sizes[i / 3].cols;
        float first[2] = {0, 0}, *now;
        size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
        type = types[i % 3];
        pair x = pair_noise(rows, cols, dense, 1, 1.0f), sum = pair_f32(1, 2);
        for (size_t p = 0; p < 3; p++) {
            pair y = {x.cpu, tensor_new(gpu, type, rows, cols, places[p])};
            pair plain = {mt_tensor_cols(sum.cpu, 0, 1), mt_tensor_cols(sum.gpu, 0, 1)};
            pair squares = {mt_tensor_cols(sum.cpu, 1, 1), mt_tensor_cols(sum.gpu, 1, 1)};
            OK(mt_copy(gpu, x.gpu, y.gpu));
            BOTH(mt_fill(cpu, sum.cpu, 2000.0f), mt_fill(gpu, sum.gpu, 2000.0f));
            BOTH(mt_sum(cpu, y.cpu, plain.cpu), mt_sum(gpu, y.gpu, plain.gpu));
            same("mt_sum", plain, 1e-6);
            BOTH(mt_sum_of_squares(cpu, y.cpu, squares.cpu), mt_sum_of_squares(gpu, y.gpu, squares.gpu));
            same("mt_sum_of_squares", squares, 1e-6);
            now = download(gpu, sum.gpu);
            if (p == 0) memcpy(first, now, sizeof first);
            assert_memory_equal(first, now, sizeof first);
            free(now);
        }
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, on_gpu);
    }
}

/* Heads whose halves are whole vectors and heads whose halves are not, for aligned and unaligned data; forward and
   backward. */
/* Also with packed documents, one of which goes on in the second sequence, and with parts of sequences. */
static void test_rotary(void **state) {
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    static const int32_t packed[] = {0, 2, 2, 5, 9, 14}, whole[] = {0, 5, 5, 6, 17, 24};
    static const layout places[] = {{0, 0}, {8, 0}, {3, 1}};
    static const int64_t dims[][2] = {{2, 0}, {16, 0}, {20, 0}, {48, 0}, {64, 0}, {64, 16}, {48, 32}, {23, 14}};
    (void)state;
    for (int i = 0; i < 2 * 2 * 3 * 3 * 8; i++) {
        mt_attention_desc s, with_ids;
        size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
        memset(&s, 0, sizeof s);
        s.batch = 2, s.seq = 7, s.groups = 1 + i % 4 * 3, s.heads_per_group = 1 + i % 3,
        s.head_dim = dims[i / 9 % 8][0];
        s.scores.rotary_dim = dims[i / 9 % 8][1], s.scores.rotary_form = (mt_rotary_form)(i / 72 % 2);
        s.qkv_layout = (mt_qkv_layout)(i / 4 % 2);
        type = types[i % 3];
        if (i % 5 < 2) s.part.seq = 12, s.part.first_query = s.part.first_key = 4;
        with_ids = s;
        if (i >= 144) {
            s.cu_seqlens = s.part.seq ? whole : packed, with_ids.cu_seqlens = ids_on_gpu(s.cu_seqlens, 6);
            s.documents = with_ids.documents = 5;
        }
        pair qkv = pair_noise(14, s.groups * (s.heads_per_group + 2) * s.head_dim, places[i / 3 % 3], 1, 1.0f);
        pair table =
            pair_of(MT_F32, s.part.seq ? 12 : 7, s.scores.rotary_dim ? s.scores.rotary_dim : s.head_dim, places[i % 2]);
        BOTH(mt_rotary_table(cpu, 100.0f, table.cpu), mt_rotary_table(gpu, 100.0f, table.gpu));
        BOTH(mt_rotary_forward(cpu, &s, table.cpu, qkv.cpu), mt_rotary_forward(gpu, &with_ids, table.gpu, qkv.gpu));
        same("mt_rotary_forward", qkv, 1e-6);
        qkv = pair_noise(qkv.cpu.rows, qkv.cpu.cols, places[i / 3 % 3], 2, 1.0f); /* the same numbers again */
        BOTH(mt_rotary_backward(cpu, &s, table.cpu, qkv.cpu), mt_rotary_backward(gpu, &with_ids, table.gpu, qkv.gpu));
        same("mt_rotary_backward", qkv, 1e-6);
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, on_gpu);
    }
}

/* A GPU does not check cu_seqlens. Whatever the numbers are, a token has a position in its sequence. */
static void test_wrong_documents(void **state) {
    static const int32_t wrong[][4] = {
        {9, 9, 9, 9}, {-5, -9, INT32_MIN, 3}, {INT32_MAX, 0, INT32_MAX, 0}, {3, 12, 1, 5}};
    (void)state;
    type = MT_F32;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        mt_attention_desc s = {};
        size_t mark = mt_arena_mark(gpu);
        mt_tensor ids;
        int32_t host[14];
        pair qkv = pair_noise(14, 3 * 16, dense, 1, 1.0f), table = pair_f32(7, 16);
        s.batch = 2, s.seq = 7, s.groups = s.heads_per_group = 1, s.head_dim = 16;
        s.cu_seqlens = ids_on_gpu(wrong[i], 4), s.documents = 3;
        OK(mt_rotary_table(gpu, 100.0f, table.gpu));
        OK(mt_rotary_forward(gpu, &s, table.gpu, qkv.gpu));
        OK(mt_arena_tensor(gpu, MT_I32, 1, 14, &ids));
        OK(mt_position_ids(gpu, 0, 7, s.cu_seqlens, 3, (int32_t *)ids.data, 14));
        OK(mt_download(gpu, ids, host));
        for (int t = 0; t < 14; t++) assert_true(host[t] >= 0 && host[t] <= t % 7);
        mt_arena_release(gpu, mark);
    }
}

/* A length greater than the sequence counts as the whole sequence, and tokens of the next sequence are not read. With
   the plain kernels and on tensor cores. */
static void test_lengths_too_long(void **state) {
    int32_t exact[2] = {40, 40}, over[2] = {90, 1 << 30};
    (void)state;
    for (int i = 0; i < 4; i++) {
        mt_attention_desc s, t;
        size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
        memset(&s, 0, sizeof s);
        s.batch = 2, s.seq = 40, s.groups = 2, s.heads_per_group = 1, s.head_dim = 64;
        s.scores.mask = i & 2 ? MT_MASK_CAUSAL : MT_MASK_BIDIRECTIONAL;
        type = i & 1 ? MT_BF16 : MT_F32;
        t = s;
        s.lengths = exact, t.lengths = ids_on_gpu(over, 2);
        pair qkv = pair_noise(80, 384, dense, 1, 1.0f), out = pair_new(80, 128, dense), lse = pair_f32(2, 80);
        pair dout = pair_noise(80, 128, dense, 2, 1.0f), dqkv = pair_new(80, 384, dense);
        BOTH(mt_attention_forward(cpu, &s, qkv.cpu, out.cpu, lse.cpu),
             mt_attention_forward(gpu, &t, qkv.gpu, out.gpu, lse.gpu));
        same("mt_attention_forward", out, type == MT_F32 ? 5e-6 : 0.01);
        same("lse", lse, 5e-6);
        BOTH(mt_attention_backward(cpu, &s, qkv.cpu, out.cpu, lse.cpu, dout.cpu, dqkv.cpu),
             mt_attention_backward(gpu, &t, qkv.gpu, out.gpu, lse.gpu, dout.gpu, dqkv.gpu));
        same("mt_attention_backward", dqkv, type == MT_F32 ? 1e-5 : 0.02);
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, on_gpu);
    }
}

/* Operators with one item per token, with more tokens than the grid has blocks. */
static void test_many_tokens(void **state) {
    enum { TOKENS = 1100 };
    static int32_t a[TOKENS], b[TOKENS];
    mt_tensor on_gpu;
    size_t mark[2] = {mt_arena_mark(cpu), mt_arena_mark(gpu)};
    mt_cross_entropy_shard_desc s = {9, 0, 0.1f, 1};
    (void)state;
    type = MT_F32;
    OK(mt_arena_tensor(gpu, MT_I32, 1, TOKENS, &on_gpu));
    static const int32_t packed[] = {0, 2, 2, 40, 41, 999, 1200};
    const int32_t *documents[] = {packed, ids_on_gpu(packed, 7)};
    for (int i = 0; i < 2; i++) {
        BOTH(mt_position_ids(cpu, 3, 50, documents[0], 6, a, TOKENS),
             mt_position_ids(gpu, 3, 50, documents[1], 6, (int32_t *)on_gpu.data, TOKENS));
        if (i == 1)
            BOTH(mt_position_ids(cpu, 3, 5, NULL, 0, a, TOKENS),
                 mt_position_ids(gpu, 3, 5, NULL, 0, (int32_t *)on_gpu.data, TOKENS));
        OK(mt_download(gpu, on_gpu, b));
        assert_memory_equal(a, b, sizeof a);
    }
    const int32_t *ids = (const int32_t *)on_gpu.data;
    pair logits = noise_f32(TOKENS, 9, 1, 5.0f), stats = pair_f32(TOKENS, 4), loss = pair_f32(1, TOKENS);
    pair lse = pair_f32(2, TOKENS), table = pair_f32(TOKENS, 4), dtable = noise_f32(9, 4, 2, 1.0f);
    BOTH(mt_cross_entropy_stats(cpu, &s, logits.cpu, a, stats.cpu),
         mt_cross_entropy_stats(gpu, &s, logits.gpu, ids, stats.gpu));
    BOTH(mt_cross_entropy_combine(cpu, &s, stats.cpu, 1, a, loss.cpu, lse.cpu),
         mt_cross_entropy_combine(gpu, &s, stats.gpu, 1, ids, loss.gpu, lse.gpu));
    same("mt_cross_entropy_combine", loss, 1e-6);
    same("lse", lse, 1e-6);
    BOTH(mt_rotary_table(cpu, 100.0f, table.cpu), mt_rotary_table(gpu, 100.0f, table.gpu));
    same("mt_rotary_table", table, 1e-6);
    BOTH(mt_embedding_backward(cpu, table.cpu, 0, a, dtable.cpu),
         mt_embedding_backward(gpu, table.gpu, 0, ids, dtable.gpu));
    same("mt_embedding_backward", dtable, 2e-6);
    mt_arena_release(cpu, mark[0]);
    mt_arena_release(gpu, mark[1]);
}

/* ---- the backward of an embedding -------------------------------------------------------------------------------- */

typedef enum { ALL_EQUAL, DISTINCT, NATURAL, FEW } id_kind;

/* ids in [0, vocab). NATURAL: frequencies as in a text (Zipf). FEW: three ids, far apart, in turn. */
static void fill_ids(id_kind kind, int64_t vocab, int32_t *ids, int64_t n) {
    uint64_t seed = 11;
    for (int64_t i = 0; i < n; i++) {
        double u = 0.5 + 0.499 * (double)test_float(&seed);
        if (kind == ALL_EQUAL) ids[i] = (int32_t)(vocab - 1);
        if (kind == DISTINCT) ids[i] = (int32_t)(i * 7919 % vocab);
        if (kind == NATURAL) ids[i] = (int32_t)(pow((double)vocab, u) - 1);
        if (kind == FEW) ids[i] = (int32_t)(i % 3 * (vocab - 1) / 2);
    }
}

/* want [rows, cols] = the sum of dtable and the rows of dy, in double precision; size = the sum of absolute values */
static void embedding_sums(const float *dy, int64_t cols, int64_t first_row, int64_t rows, const int32_t *ids,
                           int64_t tokens, double *want, double *size) {
    for (int64_t k = 0; k < rows * cols; k++) want[k] = 0.5, size[k] = 0.5;
    for (int64_t i = 0; i < tokens; i++)
        for (int64_t j = 0; j < cols && ids[i] >= first_row && ids[i] < first_row + rows; j++) {
            want[(ids[i] - first_row) * cols + j] += (double)dy[i * cols + j];
            size[(ids[i] - first_row) * cols + j] += fabs((double)dy[i * cols + j]);
        }
}

/* Computes rows [first_row, first_row + rows) of dtable, which begins as 0.5, on the GPU. The caller frees it. */
static float *embedding_gradient(pair dy, int64_t first_row, int64_t rows, const int32_t *ids, layout l) {
    mt_tensor dtable = tensor_new(gpu, MT_F32, rows, dy.gpu.cols, l);
    OK(mt_fill(gpu, dtable, 0.5f));
    OK(mt_embedding_backward(gpu, dy.gpu, first_row, ids, dtable));
    return download(gpu, dtable);
}

/* Shard [first_row, first_row + rows) of a vocabulary: near double precision, twice the same bits, and the bits of the
   two halves of the shard. */
static void embedding_backward(id_kind kind, int64_t tokens, int64_t cols, int64_t first_row, int64_t rows,
                               int64_t vocab, layout l) {
    size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu), half = (size_t)(rows / 2 * cols);
    int64_t n = rows * cols;
    pair dy = pair_noise(tokens, cols, l, 3, 1.0f);
    int32_t *ids = (int32_t *)malloc((size_t)tokens * sizeof *ids);
    double *want = (double *)malloc((size_t)n * 2 * sizeof *want), *size = want + n;
    fill_ids(kind, vocab, ids, tokens);
    const int32_t *there = ids_on_gpu(ids, tokens);
    float *x = download(cpu, dy.cpu), *a = embedding_gradient(dy, first_row, rows, there, l),
          *b = embedding_gradient(dy, first_row, rows, there, l),
          *low = embedding_gradient(dy, first_row, rows / 2, there, l),
          *high = embedding_gradient(dy, first_row + rows / 2, rows - rows / 2, there, l);
    embedding_sums(x, cols, first_row, rows, ids, tokens, want, size);
    for (int64_t k = 0; k < n; k++)
        if (!(fabs((double)a[k] - want[k]) <= 4e-6 * size[k]))
            fail_msg("kind %d, %lld tokens, %lld columns, %s: [%lld, %lld] is %.9g, not %.9g", (int)kind,
                     (long long)tokens, (long long)cols, mt_dtype_name(type), (long long)(k / cols),
                     (long long)(k % cols), (double)a[k], want[k]);
    assert_memory_equal(a, b, (size_t)n * sizeof *a);
    assert_memory_equal(a, low, half * sizeof *a);
    assert_memory_equal(a + half, high, ((size_t)n - half) * sizeof *a);
    free(ids), free(want), free(x), free(a), free(b), free(low), free(high);
    mt_arena_release(cpu, on_cpu);
    mt_arena_release(gpu, on_gpu);
}

/* Token counts around one chunk (32), two chunks, the first count with two parts (256), the last count with chunks of
   32 (4096), and one that a block reads in more than one step (8192); with 17000 equal ids chunks have 128 tokens.
   Rows in one and in several parts. Columns of one and of several blocks, with and without whole vectors. */
static void test_embedding_backward(void **state) {
    static const int64_t tokens[] = {1,   31,  32,  33,  64,   65,   127,  128,  129,  255,  256,
                                     257, 287, 288, 289, 1023, 1025, 4096, 4097, 8800, 17000};
    (void)state;
    type = MT_F32;
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        for (int kind = ALL_EQUAL; kind <= FEW; kind++) {
            if (!test_takes(i * (FEW + 1) + (size_t)kind, 5)) continue;
            type = (mt_dtype)((i + (size_t)kind) % 3);
            embedding_backward((id_kind)kind, tokens[i], 8, 0, 200, 200, dense);
            if (tokens[i] <= 4097) embedding_backward((id_kind)kind, tokens[i], 9, 130, 500, 700, odd);
        }
    for (int kind = ALL_EQUAL; kind <= FEW; kind++)
        for (int t = MT_F32; t <= MT_F16; t++) {
            type = (mt_dtype)t;
            if (type == MT_F32) embedding_backward((id_kind)kind, 700, 1, 0, 70000, 70000, dense);
            embedding_backward((id_kind)kind, 700, 276, 256, 256, 700, wide);
            embedding_backward((id_kind)kind, 700, 275, 3, 255, 258, odd);
        }
}

/* Shards with the last ids that 32 bits have, and behind them, do not take negative ids for theirs. */
static void test_embedding_backward_of_last_ids(void **state) {
    static const int32_t ids[] = {INT32_MAX, INT32_MAX - 4, 0, -1, INT32_MIN, INT32_MIN + 1, -5, INT32_MAX};
    size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
    const int32_t *there = ids_on_gpu(ids, 8);
    (void)state;
    type = MT_F32;
    for (int64_t first = INT32_MAX - (int64_t)4; first <= INT32_MAX + (int64_t)2; first++) {
        pair dy = pair_noise(8, 8, dense, 1, 1.0f), dtable = noise_f32(9, 8, 2, 1.0f);
        BOTH(mt_embedding_backward(cpu, dy.cpu, first, ids, dtable.cpu),
             mt_embedding_backward(gpu, dy.gpu, first, there, dtable.gpu));
        same("mt_embedding_backward", dtable, 0);
    }
    mt_arena_release(cpu, on_cpu);
    mt_arena_release(gpu, on_gpu);
}

/* The sum of a row depends on its own tokens only, not on the others or on how many there are. */
static void test_embedding_backward_of_a_row(void **state) {
    enum { MOST = 3000, COLS = 8 };
    static int32_t ids[MOST];
    (void)state;
    type = MT_F32;
    for (int length = 1; length < 1000; length += length < 70 ? 1 : 71) {
        size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
        int64_t total = length + 40 + length;
        pair dy = pair_noise(length, COLS, dense, 3, 1.0f);
        mt_tensor more = tensor_new(gpu, MT_F32, total, COLS, dense);
        OK(mt_fill(gpu, more, 1.0f));
        for (int i = 0; i < length; i++) ids[i] = 4;
        float *alone = embedding_gradient(dy, 0, 8, ids_on_gpu(ids, length), dense);
        for (int i = 0, next = 0; i < total; i++) {
            int mine = next < length && (i >= 40 + next || i % 2);
            ids[i] = mine ? 4 : i % 7 > 3 ? i % 7 + 1 : i % 7;
            if (mine) OK(mt_copy(gpu, mt_tensor_rows(dy.gpu, next++, 1), mt_tensor_rows(more, i, 1)));
        }
        pair both = {more, more};
        float *among = embedding_gradient(both, 0, 8, ids_on_gpu(ids, total), dense);
        assert_memory_equal(alone + 4 * COLS, among + 4 * COLS, COLS * sizeof *alone);
        free(alone), free(among);
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, on_gpu);
    }
}

/* The most shards that mt_cross_entropy_combine joins, and one less: both fill the kernel's stack of subtrees. */
static void test_many_shards(void **state) {
    enum { SHARDS = 1024, TOKENS = 2 };
    static float x[SHARDS * TOKENS * 4];
    const int32_t targets[TOKENS] = {0, 1000};
    (void)state;
    for (int shards = SHARDS - 1; shards <= SHARDS; shards++) {
        size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
        mt_cross_entropy_shard_desc s = {shards, 0, 0.1f, 0};
        uint64_t seed = 7;
        for (int i = 0; i < shards * TOKENS; i++) { /* stats of one column each: maximum, sum, target, sum of x */
            float logit = 4.0f * test_float(&seed);
            x[4 * i] = x[4 * i + 3] = logit;
            x[4 * i + 1] = 1;
            x[4 * i + 2] = i / TOKENS == targets[i % TOKENS] ? logit : 0;
        }
        pair stats = pair_f32(shards * TOKENS, 4), loss = pair_f32(1, TOKENS), lse = pair_f32(2, TOKENS);
        BOTH(mt_upload(cpu, x, stats.cpu), mt_upload(gpu, x, stats.gpu));
        BOTH(mt_cross_entropy_combine(cpu, &s, stats.cpu, shards, targets, loss.cpu, lse.cpu),
             mt_cross_entropy_combine(gpu, &s, stats.gpu, shards, ids_on_gpu(targets, TOKENS), loss.gpu, lse.gpu));
        same("mt_cross_entropy_combine", loss, 1e-6);
        same("lse", lse, 1e-6);
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, on_gpu);
    }
}

/* A check does not wait. The next call that waits returns the error of the first failed check, and its first wrong id.
   It returns it once. */
static void test_ids(void **state) {
    enum { IDS = 9000 };
    static const int places[] = {0, 1, 1023, 1024, 4095, 4096, IDS - 2};
    static int32_t ids[IDS];
    size_t mark = mt_arena_mark(gpu);
    (void)state;
    for (int i = 0; i < IDS; i++) ids[i] = i % 10;
    OK(mt_ids_check(gpu, "id", ids_on_gpu(ids, IDS), IDS, 10, 0));
    OK(mt_context_synchronize(gpu));
    for (int k = 0; k < 7; k++) {
        mt_tensor x = tensor_new(gpu, MT_F32, 1, 1, dense);
        char wanted[64];
        float y = 0;
        uint64_t hash = 0;
        OK(mt_fill(gpu, x, 1.0f));
        ids[places[k]] = -1 - k;
        ids[IDS - 1] = 77;
        OK(mt_ids_check(gpu, "token id", ids_on_gpu(ids, IDS), IDS, 10, 0));
        OK(mt_ids_check(gpu, "target", ids_on_gpu(ids, IDS), IDS, 5, 0));
        ASSERT_STATUS(gpu, MT_ERR_DATA,
                      k % 3 == 0   ? mt_context_synchronize(gpu)
                      : k % 3 == 1 ? mt_download(gpu, x, &y)
                                   : mt_hash(gpu, x, 0, 0, 1, &hash));
        snprintf(wanted, sizeof wanted, "mt_ids_check: token id %d at index %d is not in [0, 10)", -1 - k, places[k]);
        assert_string_equal(mt_last_error(gpu), wanted);
        OK(mt_context_synchronize(gpu));
        OK(mt_download(gpu, x, &y));
        ids[places[k]] = ids[IDS - 1] = -100;
        OK(mt_ids_check(gpu, "target", ids_on_gpu(ids, IDS), IDS, 10, -100));
        OK(mt_context_synchronize(gpu));
        ids[places[k]] = ids[IDS - 1] = 0;
    }
    OK(mt_ids_check(gpu, "id", NULL, 0, 10, 0));
    mt_arena_release(gpu, mark);
}

/* Without a check, or after one that has failed, operators use no memory of a wrong id, and compute what a CPU does. */
static void test_wrong_ids(void **state) {
    const int32_t ids[] = {-1, 3, INT32_MAX, INT32_MIN, 9, 8};
    const int32_t *there = ids_on_gpu(ids, 6);
    mt_cross_entropy_shard_desc s = {9, 0, 0.1f, 0};
    (void)state;
    type = MT_F32;
    pair table = noise_f32(9, 8, 1, 1.0f), y = pair_f32(6, 8), dtable = noise_f32(9, 8, 2, 1.0f);
    pair logits = noise_f32(6, 9, 3, 4.0f), loss = pair_f32(1, 6);
    BOTH(mt_embedding_forward(cpu, table.cpu, 0, ids, 0.0f, y.cpu),
         mt_embedding_forward(gpu, table.gpu, 0, there, 0.0f, y.gpu));
    same("mt_embedding_forward", y, 0);
    BOTH(mt_embedding_backward(cpu, y.cpu, 0, ids, dtable.cpu),
         mt_embedding_backward(gpu, y.gpu, 0, there, dtable.gpu));
    same("mt_embedding_backward", dtable, 0);
    BOTH(mt_cross_entropy_forward_backward(cpu, &s, logits.cpu, ids, mt_none(), 1.0f, loss.cpu),
         mt_cross_entropy_forward_backward(gpu, &s, logits.gpu, there, mt_none(), 1.0f, loss.gpu));
    same("loss", loss, 1e-6);
    same("logits", logits, 2e-6);
}

/* The caller may change the host's memory after each upload. Small uploads do not wait for the stream until the copies
   of 2 MiB are under way; a large one does. */
static void test_uploads(void **state) {
    enum { UPLOADS = 60, COLS = 21000 };
    static float host[COLS], back[COLS], large[4 * COLS];
    size_t mark = mt_arena_mark(gpu);
    mt_tensor x[UPLOADS], all;
    (void)state;
    for (int i = 0; i < UPLOADS; i++) x[i] = tensor_new(gpu, MT_F32, i % 2 ? 3 : 1, i % 2 ? COLS / 3 : COLS, odd);
    OK(mt_context_synchronize(gpu));
    for (int i = 0; i < UPLOADS; i++) {
#if defined(MT_CUDA_ENGINE)
        long before = mte::host_waits();
#endif
        for (int j = 0; j < COLS; j++) host[j] = (float)(i * COLS + j);
        OK(mt_upload(gpu, host, x[i]));
#if defined(MT_CUDA_ENGINE)
        if (i < 21) assert_true(mte::host_waits() == before); /* three in each of seven sections */
#endif
    }
    for (int i = 0; i < UPLOADS; i++) {
        OK(mt_download(gpu, x[i], back));
        for (int j = 0; j < COLS; j++) assert_true(back[j] == (float)(i * COLS + j));
    }
    all = tensor_new(gpu, MT_F32, 4, COLS, wide);
    for (int j = 0; j < 4 * COLS; j++) large[j] = (float)j;
    OK(mt_upload(gpu, large, all));
    memset(large, 0, sizeof large);
    OK(mt_download(gpu, all, large));
    for (int j = 0; j < 4 * COLS; j++) assert_true(large[j] == (float)j);
    mt_arena_release(gpu, mark);
}

/* ---- contexts ---------------------------------------------------------------------------------------------------- */

static void test_context(void **state) {
    mt_context_desc where;
    mt_comm *world = NULL;
    mt_context *ctx = NULL;
    mt_tensor x, y;
    float host[4] = {1, 2, 3, 4}, back[4] = {0, 0, 0, 0};
    (void)state;
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_CUDA;
    where.arena_bytes = 1 << 16;
    where.ordinal = 99;
    ASSERT_STATUS(gpu, MT_SUCCESS, mt_comm_create_local(1, 0, &world));
    ASSERT_STATUS(gpu, MT_ERR_ARGUMENT, mt_context_create(world, &where, &ctx));
    assert_null(ctx);
    assert_non_null(strstr(mt_comm_last_error(world), "ordinal is 99"));
    where.ordinal = 0;
    where.stream = mt_context_stream(gpu); /* the caller's stream: two contexts share it */
    ASSERT_STATUS(gpu, MT_SUCCESS, mt_context_create(world, &where, &ctx));
    assert_ptr_equal(mt_context_stream(ctx), mt_context_stream(gpu));
    OK(mt_arena_tensor(ctx, MT_F32, 2, 2, &x));
    OK(mt_arena_tensor(ctx, MT_F32, 2, 2, &y));
    OK(mt_upload(ctx, host, x));
    OK(mt_all_reduce(ctx, world, x.data, y.data, 4, MT_F32, MT_SUM)); /* a group of one rank copies */
    OK(mt_context_synchronize(ctx));
    OK(mt_download(ctx, y, back));
    assert_memory_equal(host, back, sizeof host);
    mt_context_destroy(ctx);
    OK(mt_download(gpu, mt_tensor_make(NULL, MT_F32, 0, 0), back)); /* the stream still exists */
    mt_comm_destroy(world);
}

/* Copies 3 rows of 5 bytes between pitches of 7 and 11 bytes. Bytes between the rows keep their value. The call works
   in the context's stream: it copies what x has at that point, and the calls behind it see the copy. */
static void copy_rows(int from_host, int to_host) {
    enum { ROWS = 3, BYTES = 5, FROM = 7, TO = 11 };
    unsigned char x[ROWS * FROM], y[ROWS * TO], want[ROWS * TO];
    mt_tensor xs, ys;
    void *from = x, *to = y;
    for (int i = 0; i < ROWS * FROM; i++) x[i] = (unsigned char)(1 + i);
    for (int i = 0; i < ROWS * TO; i++) want[i] = y[i] = (unsigned char)(100 + i);
    for (int i = 0; i < ROWS * BYTES; i++) want[i / BYTES * TO + i % BYTES] = x[i / BYTES * FROM + i % BYTES];
    OK(mt_arena_tensor(gpu, MT_U8, 1, ROWS * FROM, &xs));
    OK(mt_arena_tensor(gpu, MT_U8, 1, ROWS * TO, &ys));
    OK(mt_upload(gpu, x, xs));
    OK(mt_upload(gpu, y, ys));
    if (!from_host) from = xs.data;
    if (!to_host) to = ys.data;
    OK(mt_cuda_copy_rows(gpu, to, TO, from, FROM, BYTES, ROWS));
    OK(mt_cuda_zero(gpu, xs.data, ROWS * FROM));
    if (to_host) OK(mt_context_synchronize(gpu));
    else OK(mt_cuda_fetch(gpu, y, ys.data, sizeof y));
    assert_memory_equal(y, want, sizeof want);
    OK(mt_cuda_fetch(gpu, x, xs.data, sizeof x));
    for (int i = 0; i < ROWS * FROM; i++) assert_int_equal(x[i], 0);
}

/* The GPU's memory and page-locked memory of the host are accepted, other memory is not, also where only the end is
   wrong. */
static void test_check_memory(void **state) {
    float values[4];
    void *mine, *locked, *small;
    cudaPointerAttributes where;
    (void)state;
    OK(mt_context_alloc(gpu, 256, &mine));
    OK(mt_cuda_check_memory(gpu, "f", "x", mine, 256));
    OK(mt_cuda_check_memory(gpu, "f", "x", (char *)mine + 4, 100));
    OK(mt_cuda_check_memory(gpu, "f", "x", values, 0));
    assert_int_equal(cudaMallocHost(&locked, 64), cudaSuccess);
    OK(mt_cuda_check_memory(gpu, "f", "x", locked, 64));
    assert_int_equal(cudaFreeHost(locked), cudaSuccess);
    memset(&where, 0, sizeof where);
    assert_int_equal(cudaPointerGetAttributes(&where, values), cudaSuccess);
    if (where.type == cudaMemoryTypeUnregistered) { /* on some machines a GPU can use all memory of the host */
        int pageable = 0;
        assert_int_equal(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0), cudaSuccess);
        if (!pageable) {
            ASSERT_STATUS(gpu, MT_ERR_ARGUMENT, mt_cuda_check_memory(gpu, "f", "x", values, sizeof values));
            assert_non_null(strstr(mt_last_error(gpu), "f: x is memory of the host, which GPU 0 cannot use"));
            assert_int_equal(cudaMalloc(&small, 64), cudaSuccess);
            ASSERT_STATUS(gpu, MT_ERR_ARGUMENT, mt_cuda_check_memory(gpu, "f", "x", small, (size_t)1 << 40));
            assert_int_equal(cudaFree(small), cudaSuccess);
        }
    }
    assert_int_equal(mt_cuda_check_memory(NULL, "f", "x", mine, 4), MT_ERR_ARGUMENT);
    mt_context_free(gpu, mine, 256);
}

/* cudaMemcpy2DAsync refuses pitches of 2 GiB and more. The system commits only the pages of `far` that are written. */
static void test_copy_rows_far_apart(void **state) {
    const size_t apart = (size_t)1 << 31, size = apart + 4096;
    char *far = (char *)mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char got[13] = "............";
    mt_tensor near;
    (void)state;
    assert_true(far != MAP_FAILED);
    memcpy(far, "first", 5);
    memcpy(far + apart, "other", 5);
    OK(mt_arena_tensor(gpu, MT_U8, 2, 6, &near));
    OK(mt_upload(gpu, "ABCDEFGHIJKL", near));
    OK(mt_cuda_copy_rows(gpu, near.data, 6, far, apart, 5, 2)); /* row by row */
    OK(mt_download(gpu, near, got));
    assert_string_equal(got, "firstFotherL");
    OK(mt_cuda_copy_rows(gpu, far + 8, apart, near.data, 6, 3, 2));
    OK(mt_context_synchronize(gpu));
    assert_memory_equal(far, "first\0\0\0fir", 12);
    assert_memory_equal(far + apart, "other\0\0\0oth", 12);
    OK(mt_cuda_copy_rows(gpu, near.data, 3 * apart, far + apart, 3 * apart, 2, 1)); /* one row */
    OK(mt_download(gpu, near, got));
    assert_string_equal(got, "otrstFotherL");
    OK(mt_cuda_copy_rows(gpu, near.data, 4, far, 4, 4, 3)); /* dense */
    OK(mt_download(gpu, near, got));
    assert_memory_equal(got, far, 12);
    assert_int_equal(munmap(far, size), 0);
}

static void test_copy_rows(void **state) {
    char x[8] = "1234567", y[8] = "abcdefg";
    mt_context_desc where;
    mt_context *meta;
    (void)state;
    for (int i = 0; i < 4; i++) copy_rows(i & 1, i >> 1);
    OK(mt_cuda_copy_rows(gpu, NULL, 0, NULL, 0, 5, 0)); /* nothing to copy */
    OK(mt_cuda_copy_rows(gpu, NULL, 0, NULL, 0, 0, 5));
    ASSERT_STATUS(gpu, MT_ERR_SYSTEM, mt_cuda_copy_rows(gpu, y, 2, x, 4, 3, 2)); /* the rows of y would overlap */
    assert_non_null(strstr(mt_last_error(gpu), "cudaMemcpy2DAsync"));
    assert_int_equal(mt_cuda_copy_rows(NULL, y, 4, x, 4, 3, 2), MT_ERR_ARGUMENT);
    assert_int_equal(mt_cuda_wait_peers(NULL), MT_ERR_ARGUMENT);
    OK(mt_cuda_wait_peers(gpu)); /* there are no peers */
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_META;
    where.arena_bytes = 1 << 10;
    ASSERT_STATUS(gpu, MT_SUCCESS, mt_context_create(NULL, &where, &meta));
    ASSERT_STATUS(meta, MT_PLANNED, mt_cuda_enter(meta));
    ASSERT_STATUS(meta, MT_PLANNED, mt_cuda_copy_rows(meta, y, 4, x, 4, 3, 2));
    ASSERT_STATUS(meta, MT_PLANNED, mt_cuda_zero(meta, y, 4));
    ASSERT_STATUS(meta, MT_PLANNED, mt_cuda_fetch(meta, y, x, 4));
    mt_context_destroy(meta);
    assert_string_equal(y, "abcdefg");
}

/* ---- collectives between ranks that are threads ------------------------------------------------------------------ */

#define RANKS_MAX 8
#define COUNT 48 /* a multiple of 1, 2, 3, 4 and 8 */
#define KINDS 8

typedef struct gathering {
    mt_device device;
    mt_dtype dtype;
    int shift; /* distance of the buffers from an aligned address, in elements */
    float results[RANKS_MAX][KINDS][RANKS_MAX * COUNT];
} gathering;

/* Fills with floats of the given type; for integer types, any bits are valid. */
static mt_status collectives_of(mt_comm *world, mt_context *ctx, gathering *g) {
    int rank = mt_comm_rank(world), ranks = mt_comm_size(world), kind = 0;
    mt_dtype type = g->dtype == MT_I32 ? MT_F32 : g->dtype;
    float noise[COUNT];
    uint64_t seed = 100 + (uint64_t)rank;
    mt_tensor x, y, out;
    for (int i = 0; i < COUNT; i++) noise[i] = test_float(&seed);
    MT_TRY(mt_arena_tensor(ctx, type, 1, COUNT + g->shift, &x));
    MT_TRY(mt_arena_tensor(ctx, type, 1, RANKS_MAX * COUNT + g->shift, &y));
    x = mt_tensor_cols(x, g->shift, COUNT);
    y = mt_tensor_cols(y, g->shift, RANKS_MAX * COUNT);
    MT_TRY(mt_upload(ctx, noise, x));
    for (kind = 0; kind < KINDS; kind++) {
        MT_TRY(mt_fill(ctx, y, -1.0f));
        switch (kind) {
        case 0: MT_TRY(mt_all_reduce(ctx, world, x.data, y.data, COUNT - 1, g->dtype, MT_SUM)); break;
        case 1: MT_TRY(mt_all_reduce(ctx, world, x.data, y.data, COUNT, g->dtype, MT_MAX)); break;
        case 2: MT_TRY(mt_reduce_scatter(ctx, world, x.data, y.data, (size_t)(COUNT / ranks), g->dtype, MT_SUM)); break;
        case 3: MT_TRY(mt_all_gather(ctx, world, x.data, y.data, COUNT, g->dtype)); break;
        case 4: MT_TRY(mt_broadcast(ctx, world, x.data, y.data, COUNT, g->dtype, ranks - 1)); break;
        case 5:
            MT_TRY(mt_send_recv(ctx, world, x.data, COUNT, (rank + 1) % ranks, y.data, COUNT,
                                (rank + ranks - 1) % ranks, g->dtype));
            break;
        case 6: MT_TRY(mt_all_to_all(ctx, world, x.data, y.data, (size_t)(COUNT / ranks), g->dtype)); break;
        default:
            out = mt_tensor_make(y.data, type, 4, COUNT / 4 * ranks);
            MT_TRY(mt_gather_from_tensor_region(ctx, world, mt_tensor_make(x.data, type, 4, COUNT / 4), out));
        }
        MT_TRY(mt_download(ctx, y, g->results[rank][kind]));
    }
    return MT_SUCCESS;
}

static mt_status collectives_rank(mt_comm *world, void *user) {
    gathering *g = (gathering *)user;
    mt_context_desc where;
    mt_context *ctx;
    mt_status status;
    memset(&where, 0, sizeof where);
    where.device = g->device;
    where.arena_bytes = 1 << 16;
    MT_TRY(mt_context_create(world, &where, &ctx)); /* all ranks use one GPU */
    status = collectives_of(world, ctx, g);
    mt_context_destroy(ctx);
    return status;
}

/* Collectives sum in the same tree on both devices, so the bits are equal. */
static void collectives(int ranks, mt_dtype dtype, int shift) {
    static gathering on_cpu, on_gpu;
    mt_launch_desc d;
    memset(&d, 0, sizeof d);
    memset(&on_cpu, 0, sizeof on_cpu);
    d.ranks = ranks;
    d.no_pinning = 1;
    on_cpu.dtype = dtype;
    on_cpu.shift = shift;
    on_gpu = on_cpu;
    on_gpu.device = MT_DEVICE_CUDA;
    OK(mt_launch(&d, collectives_rank, &on_cpu));
    OK(mt_launch(&d, collectives_rank, &on_gpu));
    for (int r = 0; r < ranks; r++)
        for (int kind = 0; kind < KINDS; kind++)
            if (memcmp(on_cpu.results[r][kind], on_gpu.results[r][kind], sizeof on_cpu.results[r][kind]) != 0)
                fail_msg("%d ranks, %s, shift %d, collective %d: rank %d has other bits than on the CPU", ranks,
                         mt_dtype_name(dtype), shift, kind, r);
}

static void test_collectives(void **state) {
    static const int sizes[] = {1, 2, 3, 4, 8};
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16, MT_I32};
    (void)state;
    for (int i = 0; i < 5; i++)
        for (int t = 0; t < 4; t++)
            for (int shift = 0; shift < 2; shift++) collectives(sizes[i], types[t], shift);
}

/* The third stream has a ticket of its own. mt_overlap_wait_all does not wait for it. */
static mt_status overlap_third(mt_context *ctx, mt_comm *world, mt_tensor x, mt_tensor y, mt_tensor z) {
    float back[300];
    for (int round = 0; round < 8; round++) {
        MT_TRY(mt_fill(ctx, x, (float)round));
        MT_TRY(mt_overlap_begin(ctx, world, MT_STREAM_THIRD));
        CHECK(mt_context_stream(ctx) == ctx->third_stream && ctx->third_stream != ctx->second_stream);
        if (round == 0) CHECK(mt_overlap_end(ctx, 0, MT_SUCCESS) == MT_ERR_ARGUMENT);
        if (round == 0) MT_TRY(mt_overlap_begin(ctx, world, MT_STREAM_THIRD));
        MT_TRY(mt_overlap_end(ctx, MT_OVERLAP_TICKET_THIRD, mt_copy(ctx, x, y)));
        MT_TRY(mt_overlap_begin(ctx, world, MT_STREAM_SECOND));
        CHECK(mt_context_stream(ctx) == ctx->second_stream);
        MT_TRY(mt_overlap_end(ctx, 0, mt_fill(ctx, z, 0.5f)));
        MT_TRY(mt_overlap_wait_all(ctx));
        CHECK(ctx->pending == 1u << MT_OVERLAP_TICKET_THIRD);
        MT_TRY(mt_add(ctx, z, z, z));
        MT_TRY(mt_overlap_wait(ctx, MT_OVERLAP_TICKET_THIRD));
        CHECK(ctx->pending == 0);
        MT_TRY(mt_add(ctx, y, z, z));
        MT_TRY(mt_download(ctx, z, back));
        for (int i = 0; i < 300; i++) CHECK(back[i] == 1.0f + (float)round);
    }
    return MT_SUCCESS;
}

/* Work on the second stream runs beside the work that follows, and is complete after the wait: x -> y on the second
   stream, y -> z on the first. */
static mt_status overlap_rank(mt_comm *world, void *user) {
    const int *off = (const int *)user;
    mt_stream stream = *off ? MT_STREAM_NONE : MT_STREAM_SECOND;
    mt_context_desc where;
    mt_context *ctx;
    mt_tensor x, y, z;
    float back[300];
    mt_status status;
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_CUDA;
    where.arena_bytes = 1 << 16;
    MT_TRY(mt_context_create(world, &where, &ctx));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 3, 100, &x));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 3, 100, &y));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 3, 100, &z));
    for (int round = 0; round < 8; round++) {
        CUstream_st *compute = mt_context_stream(ctx);
        MT_TRY(mt_fill(ctx, x, (float)round));
        MT_TRY(mt_overlap_begin(ctx, world, stream));
        CHECK((mt_context_stream(ctx) == compute) == (*off != 0));
        CHECK(*off || mt_overlap_begin(ctx, world, stream) == MT_ERR_ARGUMENT);
        MT_TRY(mt_overlap_end(ctx, round, mt_copy(ctx, x, y)));
        MT_TRY(mt_fill(ctx, z, -1.0f));
        if (round & 1) MT_TRY(mt_overlap_wait_all(ctx));
        else MT_TRY(mt_overlap_wait(ctx, round));
        MT_TRY(mt_add(ctx, x, y, z));
        MT_TRY(mt_download(ctx, z, back));
        for (int i = 0; i < 300; i++) CHECK(back[i] == 2.0f * (float)round);
    }
    if (*off == 0) MT_TRY(overlap_third(ctx, world, x, y, z));
    MT_TRY(mt_overlap_begin(ctx, world, stream));
    status = mt_overlap_end(ctx, MT_OVERLAP_TICKETS, MT_SUCCESS);
    CHECK(status == (*off ? MT_SUCCESS : MT_ERR_ARGUMENT));
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

static void test_overlap(void **state) {
    mt_launch_desc d;
    (void)state;
    memset(&d, 0, sizeof d);
    d.ranks = 2;
    d.no_pinning = 1;
    for (int off = 0; off <= 1; off++) OK(mt_launch(&d, overlap_rank, &off));
}

/* The end function of a slot on a GPU may use the streams, which are idle, and the arena. */
static void end_slot(mt_context *ctx, void *memory) {
    mt_tensor x;
    float back[3] = {0, 0, 0};
    OK(mt_arena_tensor(ctx, MT_F32, 1, 3, &x));
    OK(mt_fill(ctx, x, 2.5f));
    OK(mt_download(ctx, x, back));
    **(float **)memory += back[2];
}

static void test_slots(void **state) {
    mt_context_desc where;
    mt_context *ctx;
    void *memory;
    float sum = 0.0f;
    (void)state;
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_CUDA;
    where.arena_bytes = 1 << 16;
    OK(mt_context_create(NULL, &where, &ctx));
    OK(mt_gemm_prepare(ctx)); /* has a slot of its own */
    OK(mt_context_slot_create(ctx, MT_SLOT_USER, sizeof(float *), end_slot, &memory));
    *(float **)memory = &sum;
    mt_context_destroy(ctx);
    assert_true(sum == 2.5f);
}

static void pointwise(shape s) {
    pair x = pair_noise(s.rows, s.cols, s.l, 1, 4.0f), z = pair_noise(s.rows, s.cols, dense, 2, 1.0f);
    pair row = pair_noise(1, s.cols, s.l, 3, 1.0f), col = pair_noise(s.rows, 1, s.l, 4, 1.0f);
    pair y = pair_new(s.rows, s.cols, s.l), dx = pair_new(s.rows, s.cols, s.l);
    pair drow = noise_f32(1, s.cols, 5, 1.0f), dcol = pair_new(s.rows, 1, dense);
    BOTH(mt_multiply(cpu, x.cpu, z.cpu, y.cpu), mt_multiply(gpu, x.gpu, z.gpu, y.gpu));
    same("mt_multiply", y, 1e-6);
    BOTH(mt_multiply_row_forward(cpu, x.cpu, row.cpu, y.cpu), mt_multiply_row_forward(gpu, x.gpu, row.gpu, y.gpu));
    same("mt_multiply_row_forward", y, 1e-6);
    BOTH(mt_multiply_col_forward(cpu, x.cpu, col.cpu, y.cpu), mt_multiply_col_forward(gpu, x.gpu, col.gpu, y.gpu));
    same("mt_multiply_col_forward", y, 1e-6);
    BOTH(mt_multiply_row_backward(cpu, x.cpu, row.cpu, z.cpu, y.cpu, drow.cpu),
         mt_multiply_row_backward(gpu, x.gpu, row.gpu, z.gpu, y.gpu, drow.gpu));
    same("dx of mt_multiply_row_backward", y, 1e-6);
    same("drow", drow, 1e-5);
    BOTH(mt_multiply_col_backward(cpu, x.cpu, col.cpu, z.cpu, y.cpu, dcol.cpu),
         mt_multiply_col_backward(gpu, x.gpu, col.gpu, z.gpu, y.gpu, dcol.gpu));
    same("dx of mt_multiply_col_backward", y, 1e-6);
    same("dcol", dcol, 1e-5);
    BOTH(mt_sigmoid_forward(cpu, x.cpu, y.cpu), mt_sigmoid_forward(gpu, x.gpu, y.gpu));
    same("mt_sigmoid_forward", y, 1e-6);
    BOTH(mt_sigmoid_backward(cpu, x.cpu, z.cpu, y.cpu), mt_sigmoid_backward(gpu, x.gpu, z.gpu, y.gpu));
    same("mt_sigmoid_backward", y, 1e-6);
    BOTH(mt_silu_forward(cpu, x.cpu, y.cpu), mt_silu_forward(gpu, x.gpu, y.gpu));
    same("mt_silu_forward", y, 1e-6);
    BOTH(mt_silu_backward(cpu, x.cpu, z.cpu, y.cpu), mt_silu_backward(gpu, x.gpu, z.gpu, y.gpu));
    same("mt_silu_backward", y, 1e-6);
    BOTH(mt_sigmoid_gate_forward(cpu, x.cpu, z.cpu, y.cpu), mt_sigmoid_gate_forward(gpu, x.gpu, z.gpu, y.gpu));
    same("mt_sigmoid_gate_forward", y, 1e-6);
    BOTH(mt_sigmoid_gate_backward(cpu, x.cpu, z.cpu, y.cpu, dx.cpu, y.cpu), /* dx is in the memory of dy */
         mt_sigmoid_gate_backward(gpu, x.gpu, z.gpu, y.gpu, dx.gpu, y.gpu));
    same("dgate of mt_sigmoid_gate_backward", dx, 1e-6);
    same("dx of mt_sigmoid_gate_backward", y, 1e-6);
    BOTH(mt_multiply_row_backward(cpu, x.cpu, row.cpu, z.cpu, z.cpu, drow.cpu),
         mt_multiply_row_backward(gpu, x.gpu, row.gpu, z.gpu, z.gpu, drow.gpu));
    same("dx of mt_multiply_row_backward in the memory of dy", z, 1e-6);
    same("drow", drow, 1e-5);
    BOTH(mt_multiply_col_backward(cpu, x.cpu, col.cpu, y.cpu, x.cpu, dcol.cpu),
         mt_multiply_col_backward(gpu, x.gpu, col.gpu, y.gpu, x.gpu, dcol.gpu));
    same("dx of mt_multiply_col_backward in the memory of x", x, 1e-6);
    same("dcol", dcol, 1e-5);
    BOTH(mt_multiply_row_backward(cpu, x.cpu, row.cpu, y.cpu, mt_none(), drow.cpu),
         mt_multiply_row_backward(gpu, x.gpu, row.gpu, y.gpu, mt_none(), drow.gpu));
    same("drow alone", drow, 1e-5);
    BOTH(mt_multiply_col_backward(cpu, x.cpu, col.cpu, y.cpu, mt_none(), dcol.cpu),
         mt_multiply_col_backward(gpu, x.gpu, col.gpu, y.gpu, mt_none(), dcol.gpu));
    same("dcol alone", dcol, 1e-5);
}

/* More vectors than the two blocks of a grid fetch at once, ends of rows and of matrices within such a group, and
   strips of rows that end within one. */
static void test_ahead(void **state) {
    static const shape list[] = {{300, 40, {0, 0}}, {601, 20, {4, 0}}, {100, 264, {0, 0}}, {45, 2056, {8, 8}}};
    (void)state;
    each_type(memory, list, 4);
    each_type(bias, list, 4);
    each_type(activation, list, 2);
    each_type(dropout, list, 4);
    each_type(pointwise, list, 2);
}

static __global__ void divide_kernel(int64_t *numbers, mti_divider by) {
    numbers[threadIdx.x] = mti_divide_by(numbers[threadIdx.x], by);
}

/* Numbers around multiples of the divisor, below 2^31, where a multiplication replaces the division, and above. */
static void test_divider(void **state) {
    static const int64_t divisors[] = {1, 2, 3, 5, 7, 8, 96, 257, 1000, 65535, 65537, 2147483647, (int64_t)1 << 33};
    static const int64_t items[] = {1000, 2147483647, (int64_t)1 << 31, (int64_t)1 << 45};
    enum { N = 64 };
    int64_t numbers[N], quotients[N];
    uint64_t seed = 1;
    mt_tensor on_gpu;
    size_t mark = mt_arena_mark(gpu);
    (void)state;
    OK(mt_arena_tensor(gpu, MT_I32, 1, 2 * N, &on_gpu));
    for (size_t k = 0; k < 13 * 4; k++) {
        int64_t by = divisors[k / 4], most = items[k % 4] - 1;
        for (int i = 0; i < N; i++) {
            int64_t at = (int64_t)((double)(test_float(&seed) + 1) * 0.5 * (double)most) / by * by + i % 3 - 1;
            numbers[i] = i < 3 ? most - i : at < 0 ? 0 : at > most ? most : at;
        }
        OK(mt_upload(gpu, numbers, on_gpu));
        OK(mt_cuda_enter(gpu));
        MT_LAUNCH_KERNEL(divide_kernel, 1, N, 0, mt_context_stream(gpu), (int64_t *)on_gpu.data,
                         mti_divider_of(by, items[k % 4]));
        OK(mt_cuda_launched(gpu, "divide_kernel"));
        OK(mt_download(gpu, on_gpu, quotients));
        for (int i = 0; i < N; i++)
            if (quotients[i] != numbers[i] / by)
                fail_msg("%lld / %lld is %lld", (long long)numbers[i], (long long)by, (long long)quotients[i]);
    }
    mt_arena_release(gpu, mark);
}

/* Every operator that has kernels of each type, with views of x, y and a third view of different types. */
static void mixed(mt_dtype tx, mt_dtype ty, mt_dtype tz, int64_t cols) {
    pair x = pair_fill(pair_of(tx, 70, cols, wide), 1, 3.0f), z = pair_fill(pair_of(tz, 70, cols, dense), 2, 1.0f),
         y = pair_of(ty, 70, cols, dense);
    pair row = pair_fill(pair_of(tz, 1, cols, dense), 3, 1.0f), col = pair_fill(pair_of(tz, 70, 1, dense), 3, 1.0f);
    pair db = noise_f32(1, cols, 4, 1.0f), half = {mt_tensor_cols(y.cpu, 0, 8), mt_tensor_cols(y.gpu, 0, 8)};
    mt_dropout d = {place(cols), 0.3f};
    BOTH(mt_convert(cpu, x.cpu, y.cpu), mt_convert(gpu, x.gpu, y.gpu));
    same("mt_convert", y, 0);
    BOTH(mt_add(cpu, x.cpu, z.cpu, y.cpu), mt_add(gpu, x.gpu, z.gpu, y.gpu));
    same("mt_add", y, 1e-7);
    BOTH(mt_bias_forward(cpu, y.cpu, row.cpu), mt_bias_forward(gpu, y.gpu, row.gpu));
    same("mt_bias_forward", y, 1e-7);
    BOTH(mt_bias_dropout_add_forward(cpu, x.cpu, row.cpu, z.cpu, d, y.cpu),
         mt_bias_dropout_add_forward(gpu, x.gpu, row.gpu, z.gpu, d, y.gpu));
    same("mt_bias_dropout_add_forward", y, 1e-6);
    BOTH(mt_bias_dropout_add_backward(cpu, x.cpu, d, y.cpu, db.cpu),
         mt_bias_dropout_add_backward(gpu, x.gpu, d, y.gpu, db.gpu));
    same("mt_bias_dropout_add_backward", y, 1e-6);
    BOTH(mt_activation_forward(cpu, MT_GELU_TANH, x.cpu, row.cpu, y.cpu),
         mt_activation_forward(gpu, MT_GELU_TANH, x.gpu, row.gpu, y.gpu));
    same("mt_activation_forward", y, 1e-6);
    BOTH(mt_activation_backward(cpu, MT_GELU_ERF, x.cpu, z.cpu, y.cpu, db.cpu),
         mt_activation_backward(gpu, MT_GELU_ERF, x.gpu, z.gpu, y.gpu, db.gpu));
    same("mt_activation_backward", y, 2e-6);
    BOTH(mt_activation_forward(cpu, MT_SWIGLU, mt_tensor_cols(x.cpu, 0, 16), mt_none(), half.cpu),
         mt_activation_forward(gpu, MT_SWIGLU, mt_tensor_cols(x.gpu, 0, 16), mt_none(), half.gpu));
    same("mt_activation_forward of SwiGLU", half, 1e-6);
    BOTH(mt_sigmoid_gate_forward(cpu, x.cpu, z.cpu, y.cpu), mt_sigmoid_gate_forward(gpu, x.gpu, z.gpu, y.gpu));
    same("mt_sigmoid_gate_forward", y, 1e-6);
    BOTH(mt_multiply_col_forward(cpu, x.cpu, col.cpu, y.cpu), mt_multiply_col_forward(gpu, x.gpu, col.gpu, y.gpu));
    same("mt_multiply_col_forward", y, 1e-6);
    BOTH(mt_multiply_row_backward(cpu, x.cpu, row.cpu, z.cpu, y.cpu, db.cpu),
         mt_multiply_row_backward(gpu, x.gpu, row.gpu, z.gpu, y.gpu, db.gpu));
    same("mt_multiply_row_backward", y, 1e-6);
    same("sums over the rows", db, 3e-5);
}

static void test_mixed_types(void **state) {
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    (void)state;
    for (int i = 0; i < 2 * 27; i++) {
        size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
        mixed(types[i / 2 % 3], types[i / 6 % 3], types[i / 18], i % 2 ? 40 : 27);
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, on_gpu);
    }
}

/* Elements between the rows keep their values. */
static void test_padding_is_kept(void **state) {
    static const int64_t cols[] = {16, 21};
    (void)state;
    for (int i = 0; i < 6; i++) {
        static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
        size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
        int64_t n = cols[i / 3];
        type = types[i % 3];
        pair whole = pair_new(40, 24, dense), bias = pair_noise(1, n, dense, 1, 1.0f);
        mt_tensor y = mt_tensor_cols(whole.gpu, 0, n);
        OK(mt_fill(gpu, whole.gpu, 7.0f));
        OK(mt_fill(gpu, y, 2.0f));
        OK(mt_bias_forward(gpu, y, bias.gpu));
        OK(mt_silu_forward(gpu, y, y));
        OK(mt_activation_backward(gpu, MT_GELU_TANH, y, pair_noise(40, n, wide, 2, 1.0f).gpu, y, mt_none()));
        float *x = download(gpu, whole.gpu);
        for (int64_t k = 0; k < 40 * 24; k++) assert_true((x[k] == 7.0f) == (k % 24 >= n));
        free(x);
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, on_gpu);
    }
}

/* In double precision. slope: the derivative. For MT_SWIGLU this is SiLU. */
static double exact_activation(int kind, double x, int slope) {
    double u = kind == MT_GELU_TANH ? 2 * sqrt(2 / M_PI) * (x + 0.044715 * x * x * x) : x, s = 1 / (1 + exp(-u));
    if (kind == MT_SQUARED_RELU) return x < 0 ? 0 : slope ? 2 * x : x * x;
    if (kind == MT_RELU) return x <= 0 ? 0 : slope ? 1 : x;
    if (kind == MT_TANH) return slope ? 1 / cosh(x) / cosh(x) : tanh(x);
    if (kind == MT_GELU_ERF) {
        double cdf = 0.5 * erfc(-x / sqrt(2));
        return slope ? cdf + x * exp(-0.5 * x * x) / sqrt(2 * M_PI) : x * cdf;
    }
    if (kind == MT_GELU_TANH && slope) return s + x * s * (1 - s) * 2 * sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
    return slope ? s + x * s * (1 - s) : x * s;
}

/* The error before rounding is at most `relative` times the exact value, plus `least`. Rounding to 16 bits adds half a
   unit in the last place. */
static void check_exact(const char *what, int kind, int slope, const float *x, mt_tensor y, double relative,
                        double least) {
    float *got = download(gpu, y);
    for (int64_t i = 0; i < y.rows * y.cols; i++) {
        double exact = exact_activation(kind, (double)x[i], slope), error = relative * fabs(exact) + least;
        error += 0.5 * last_place(y.dtype) * (fabs(exact) + error) + (y.dtype == MT_F16 ? 3e-8 : 0);
        if (!(fabs((double)got[i] - exact) <= error))
            fail_msg("%s of kind %d, %s: %.9g gives %.9g instead of %.9g", what, kind, mt_dtype_name(y.dtype),
                     (double)x[i], (double)got[i], exact);
    }
    free(got);
}

/* 16-bit results use approximate functions, f32 results accurate ones. In the tails, the rounding of x before e^x adds
   to the error. */
static void test_activations_in_double(void **state) {
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    (void)state;
    for (int i = 0; i < 3 * MT_ACTIVATION_COUNT; i++) {
        mt_activation kind = (mt_activation)(i / 3);
        int f32 = i % 3 == 0;
        size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
        type = types[i % 3];
        pair x = pair_noise(64, 256, dense, 1, f32 ? 4.0f : 12.0f);
        mt_tensor one = tensor_new(gpu, type, 64, 256, dense), y = tensor_new(gpu, type, 64, 256, dense), h = x.gpu;
        float *values = download(gpu, x.gpu);
        OK(mt_fill(gpu, one, 1.0f));
        if (kind == MT_SWIGLU) { /* up is 1, so y is SiLU(gate); its gradient dh lies beside that of up */
            h = tensor_new(gpu, type, 64, 512, dense);
            OK(mt_fill(gpu, h, 1.0f));
            OK(mt_copy(gpu, x.gpu, mt_tensor_cols(h, 0, 256)));
        }
        OK(mt_activation_forward(gpu, kind, h, mt_none(), y));
        check_exact("mt_activation_forward", kind, 0, values, y, f32 ? 4e-6 : 4e-5, f32 ? 1e-7 : 1e-30);
        OK(mt_activation_backward(gpu, kind, h, one, h, mt_none()));
        check_exact("mt_activation_backward", kind, 1, values, mt_tensor_cols(h, 0, 256), f32 ? 4e-6 : 4e-5,
                    f32 ? 3e-7 : 2e-6);
        if (kind == MT_SWIGLU) {
            OK(mt_silu_forward(gpu, x.gpu, y));
            check_exact("mt_silu_forward", kind, 0, values, y, f32 ? 4e-6 : 4e-5, f32 ? 1e-7 : 1e-30);
            OK(mt_silu_backward(gpu, x.gpu, one, y));
            check_exact("mt_silu_backward", kind, 1, values, y, f32 ? 4e-6 : 4e-5, f32 ? 3e-7 : 2e-6);
        }
        free(values);
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, on_gpu);
    }
}

/* The wide rows have more vectors than a block has threads. */
static void test_pointwise(void **state) {
    static const shape wide_rows[] = {{5, 5000, {8, 0}}, {3, 5001, {3, 1}}};
    float ones[3] = {1, 1, 1}, sums[3];
    (void)state;
    each_shape(pointwise);
    each_type(pointwise, wide_rows, 2);
    mt_tensor none = mt_tensor_f32(NULL, 3, 0), dcol = tensor_new(gpu, MT_F32, 3, 1, dense);
    OK(mt_upload(gpu, ones, dcol));
    OK(mt_multiply_col_backward(gpu, none, tensor_new(gpu, MT_F32, 3, 1, dense), none, none, dcol));
    OK(mt_download(gpu, dcol, sums));
    for (int i = 0; i < 3; i++) assert_true(sums[i] == 0); /* an empty sum */
}

/* ---- sampling ---------------------------------------------------------------------------------------------------- */

#define SAMPLING(temperature, top_k, top_p)                                                                            \
    { temperature, top_k, top_p, 12345, 0, NULL, 3, NULL }
static const mt_sample_desc samplings[] = {
    SAMPLING(0.0f, 0, 0.0f),  SAMPLING(1.0f, 0, 0.0f),    SAMPLING(0.7f, 5, 0.0f),
    SAMPLING(1.3f, 40, 0.9f), SAMPLING(1.0f, 1, 0.5f),    SAMPLING(5.0f, 0, 0.5f),
    SAMPLING(2.0f, 0, 0.99f), SAMPLING(0.1f, 1000, 1.0f), SAMPLING(1.0f, 40, MT_ZERO)};

/* Draws from three shards, of which the last has padding, as the CPU does. The candidates have the same bits. */
static void draws(pair *logits, const mt_sample_desc *given, int64_t vocab) {
    int64_t rows = logits[0].cpu.rows, cols = logits[0].cpu.cols, k = mt_sample_count(given, cols);
    mt_sample_desc on_cpu = *given, on_gpu = *given;
    pair all = pair_f32(3 * rows, 2 * k);
    int32_t *ids = (int32_t *)malloc((size_t)rows * sizeof *ids), *positions = (int32_t *)calloc((size_t)rows, 4);
    int32_t *got = (int32_t *)malloc((size_t)rows * sizeof *got), *there;
    uint64_t *sequences = (uint64_t *)calloc((size_t)rows, sizeof *sequences);
    mt_tensor room, y;
    for (int64_t i = 0; i < rows; i++) sequences[i] = (uint64_t)i << 33 | 5, positions[i] = (int32_t)(i * 7);
    OK(mt_arena_tensor(gpu, MT_U8, 1, rows * 8, &room));
    OK(mt_upload(gpu, sequences, room));
    on_cpu.sequences = sequences, on_gpu.sequences = (const uint64_t *)room.data;
    on_cpu.positions = positions, on_gpu.positions = ids_on_gpu(positions, rows);
    for (int s = 0; s < 3; s++) {
        BOTH(
            mt_sample_candidates(cpu, &on_cpu, vocab, s * cols, logits[s].cpu, mt_tensor_rows(all.cpu, s * rows, rows)),
            mt_sample_candidates(gpu, &on_gpu, vocab, s * cols, logits[s].gpu,
                                 mt_tensor_rows(all.gpu, s * rows, rows)));
        y = mt_tensor_rows(all.gpu, s * rows, rows);
        float *bits = (float *)malloc((size_t)(rows * 2 * k) * sizeof *bits);
        OK(mt_download(gpu, y, bits));
        for (int64_t i = 0; i < rows * 2 * k; i++) {
            const float *want = (const float *)mt_tensor_rows(all.cpu, s * rows, rows).data + i;
            int both_nan = i % (2 * k) < k && isnan(bits[i]) && isnan(*want);
            if (!both_nan && memcmp(&bits[i], want, sizeof *want) != 0)
                fail_msg("%s, T %g, top_k %d, top_p %g: shard %d has another candidate %d", mt_dtype_name(type),
                         (double)given->temperature, (int)given->top_k, (double)given->top_p, s, (int)i);
        }
        free(bits);
    }
    there = ids_on_gpu(positions, rows);
    mt_status wrong = mt_sample_ids(cpu, &on_cpu, vocab, all.cpu, 3, ids);
    assert_true(wrong == MT_SUCCESS || wrong == MT_ERR_DATA);
    OK(mt_sample_ids(gpu, &on_gpu, vocab, all.gpu, 3, there));
    OK(mt_download(gpu, mt_tensor_make(there, MT_I32, 1, rows), got));
    for (int64_t i = 0; i < rows; i++)
        if (got[i] != ids[i])
            fail_msg("%s, T %g, top_k %d, top_p %g: row %d draws %d, on the CPU %d", mt_dtype_name(type),
                     (double)given->temperature, (int)given->top_k, (double)given->top_p, (int)i, got[i], ids[i]);
    free(ids), free(positions), free(got), free(sequences);
}

static void sampling(shape s) {
    for (size_t d = 0; d < sizeof samplings / sizeof *samplings; d++) {
        size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
        pair logits[3];
        for (int k = 0; k < 3; k++) logits[k] = pair_noise(s.rows, s.cols, s.l, 50 + (uint64_t)k, d % 2 ? 4.0f : 15.0f);
        draws(logits, &samplings[d], 3 * s.cols - (s.cols > 3 ? s.cols / 2 + s.cols * (int64_t)(d % 2) : 0));
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, on_gpu);
    }
}

static void test_sampling(void **state) {
    static const shape list[] = {{3, 5003, {3, 1}}, {1, 2112, {0, 0}}};
    (void)state;
    each_type(sampling, shapes, SHAPES);
    each_type(sampling, list, 2);
}

/* Rows of equal logits, of zeros of both signs, of infinities, and with a NaN. */
static void special_sampling(shape s) {
    for (size_t d = 0; d < sizeof samplings / sizeof *samplings; d++) {
        size_t on_cpu = mt_arena_mark(cpu), on_gpu = mt_arena_mark(gpu);
        float *x = (float *)malloc((size_t)(s.rows * s.cols) * sizeof *x);
        pair logits[3], f = pair_f32(s.rows, s.cols);
        for (int k = 0; k < 3; k++) {
            logits[k] = pair_new(s.rows, s.cols, s.l);
            for (int64_t i = 0; i < s.rows * s.cols; i++) {
                int64_t row = i / s.cols, col = i % s.cols;
                x[i] = row == 0 ? 1.5f : row == 1 ? (col % 2 ? 0.0f : -0.0f) : (float)(col % 3);
                if (row == 2 && col % 5) x[i] = -INFINITY;
                if (row == 3) x[i] = col == s.cols - 1 && k == 1 ? INFINITY : -INFINITY;
                if (row == 4) x[i] = col < s.cols / 3 * 2 ? 50.0f : 0.0f;
                if (row == 4 && k == 2 && col == s.cols - 1) x[i] = NAN;
                if (row == 5) x[i] = -INFINITY;
            }
            BOTH(mt_upload(cpu, x, f.cpu), mt_upload(gpu, x, f.gpu));
            BOTH(mt_convert(cpu, f.cpu, logits[k].cpu), mt_convert(gpu, f.gpu, logits[k].gpu));
        }
        draws(logits, &samplings[d], 3 * s.cols);
        free(x);
        mt_arena_release(cpu, on_cpu);
        mt_arena_release(gpu, on_gpu);
    }
}

static void test_special_sampling(void **state) {
    static const shape list[] = {{6, 300, {0, 0}}, {6, 37, {3, 1}}, {6, 3000, {0, 0}}};
    (void)state;
    each_type(special_sampling, list, 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_bias),
        cmocka_unit_test(test_activation),
        cmocka_unit_test(test_norm),
        cmocka_unit_test(test_pointwise),
        cmocka_unit_test(test_dropout),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_lists_of_tensors),
        cmocka_unit_test(test_long_lists),
        cmocka_unit_test(test_step_decide),
        cmocka_unit_test(test_cross_entropy),
        cmocka_unit_test(test_embedding),
        cmocka_unit_test(test_embedding_backward),
        cmocka_unit_test(test_embedding_backward_of_last_ids),
        cmocka_unit_test(test_embedding_backward_of_a_row),
        cmocka_unit_test(test_gemm),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_dot_product_attention),
        cmocka_unit_test(test_tiles_of_attention),
        cmocka_unit_test(test_fused_bias),
        cmocka_unit_test(test_attention_keeps_nan),
        cmocka_unit_test(test_ids),
        cmocka_unit_test(test_wrong_ids),
        cmocka_unit_test(test_uploads),
        cmocka_unit_test(test_context),
        cmocka_unit_test(test_check_memory),
        cmocka_unit_test(test_copy_rows),
        cmocka_unit_test(test_copy_rows_far_apart),
        cmocka_unit_test(test_collectives),
        cmocka_unit_test(test_overlap),
        cmocka_unit_test(test_slots),
        cmocka_unit_test(test_wide_norm),
        cmocka_unit_test(test_widths_of_norms),
        cmocka_unit_test(test_norm_mixed_types),
        cmocka_unit_test(test_norm_rows),
        cmocka_unit_test(test_cross_entropy_one_pass),
        cmocka_unit_test(test_wide_cross_entropy),
        cmocka_unit_test(test_cross_entropy_targets),
        cmocka_unit_test(test_cross_entropy_masked),
        cmocka_unit_test(test_cross_entropy_without_columns),
        cmocka_unit_test(test_cross_entropy_of_virtual_shards),
        cmocka_unit_test(test_cross_entropy_alignments),
        cmocka_unit_test(test_cross_entropy_refuses),
        cmocka_unit_test(test_sampling),
        cmocka_unit_test(test_special_sampling),
        cmocka_unit_test(test_many_tokens),
        cmocka_unit_test(test_many_shards),
        cmocka_unit_test(test_sum),
        cmocka_unit_test(test_rotary),
        cmocka_unit_test(test_wrong_documents),
        cmocka_unit_test(test_lengths_too_long),
        cmocka_unit_test(test_ahead),
        cmocka_unit_test(test_divider),
        cmocka_unit_test(test_mixed_types),
        cmocka_unit_test(test_padding_is_kept),
        cmocka_unit_test(test_activations_in_double),
    };
    return cmocka_run_group_tests(tests, open_contexts, close_contexts);
}
