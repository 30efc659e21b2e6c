/* test_kernels.c - tests every operator except mt_gemm: forward against double precision, backward against central
   differences of the double-precision function, random numbers against Random123's vectors, and the refusal of bad
   input.

   Tolerances. fp32 rounds each operation to 2^-24 = 6e-8 relative. ELEMENT (4e-7 of the value and of the size of the
   terms, here about 1) allows about six roundings: operators with a few operations per element. SUM (2e-6) is for
   results that contain sums of up to a few hundred terms of order one. Both are thousands of times smaller than the
   effect of one wrong element. */

#define MEGATRON_IMPLEMENTATION
#include "mt_kernels.cuh"
#include "mt_test.h"
#include "mt_reference.h"

#define ELEMENT 4e-7
#define SUM 2e-6

static mt_tensor null_data(mt_tensor t) {
    t.data = NULL;
    return t;
}

static mt_tensor as_vector(float *x, int64_t n) { return mt_tensor_f32(x, 1, n); }

static int same_bits(mt_tensor a, mt_tensor b) {
    int64_t i;
    for (i = 0; i < a.rows; i++)
        if (memcmp(ref_row(a, i), ref_row(b, i), (size_t)a.cols * sizeof(float))) return 0;
    return 1;
}

static double *accumulated(const double *base, const double *gradient, size_t n) { return ref_plus(base, gradient, n); }

/* ---- empty inputs ------------------------------------------------------------------------------------------------ */

/* With zero columns, an operator accesses no row, whatever their number. */
static void test_rows_without_columns(void **state) {
    float memory[16] = {0}, one = 1;
    int32_t ids[1] = {0};
    uint64_t hash = 7;
    mt_tensor t = mt_tensor_f32(memory, INT64_MAX, 0), half = with_dtype(t, MT_BF16), row = mt_tensor_f32(memory, 1, 0);
    mt_tensor sum = mt_tensor_f32(&one, 1, 1);
    mt_dropout drop = {{0}, 0.5f};
    mt_random at = {0};
    mt_adamw hyper = {.beta1 = 0.9f, .beta2 = 0.9f, .step = 1};
    mt_attention_desc s = {.seq = INT32_MAX, .groups = 1, .heads_per_group = 1, .head_dim = 2};
    (void)state;
    OK(mt_fill(ref.ctx, t, 1));
    OK(mt_fill(ref.ctx, half, 1));
    OK(mt_copy(ref.ctx, t, t));
    OK(mt_convert(ref.ctx, half, mt_tensor_f32(NULL, INT64_MAX, 0)));
    OK(mt_add(ref.ctx, half, t, t));
    OK(mt_upload(ref.ctx, NULL, t));
    OK(mt_download(ref.ctx, t, NULL));
    OK(mt_hash(ref.ctx, t, INT64_MAX, INT64_MAX, INT64_MAX, &hash));
    OK(mt_sum(ref.ctx, t, sum));
    OK(mt_sum_of_squares(ref.ctx, half, sum));
    assert_true(hash == 7 && one == 1.0f);
    OK(mt_bias_forward(ref.ctx, t, row));
    OK(mt_bias_backward(ref.ctx, t, row));
    OK(mt_activation_forward(ref.ctx, MT_SWIGLU, t, row, t));
    OK(mt_activation_backward(ref.ctx, MT_GELU_ERF, t, t, t, row));
    OK(mt_random_normal(ref.ctx, t, 1, at));
    OK(mt_bias_dropout_add_forward(ref.ctx, t, row, t, drop, t));
    OK(mt_bias_dropout_add_backward(ref.ctx, t, drop, t, row));
    OK(mt_rotary_table(ref.ctx, 10000, t));
    OK(mt_embedding_forward(ref.ctx, row, 0, ids, 1, t));
    OK(mt_embedding_backward(ref.ctx, t, 0, ids, row));
    OK(mt_adamw_step(ref.ctx, &hyper, t, mt_none(), t, t, t));
    OK(mt_attention_forward(ref.ctx, &s, mt_tensor_f32(memory, 0, 6), mt_tensor_f32(memory, 0, 2), mt_none()));
    s.seq = INT64_MAX;
    t = mt_tensor_f32(memory, 0, 6);
    ASSERT_REFUSED(MT_ERR_SHAPE, ": seq is 9223372036854775807, must be from 1 to 2147483647",
                   mt_attention_forward(ref.ctx, &s, t, t, mt_none()));
}

/* mt_tensor_rows and mt_tensor_cols with ranges that no view can have. */
static void test_views_that_cannot_be(void **state) {
    static const int64_t bad[][2] = {{-1, 1}, {0, -1}, {INT64_MAX, 1}, {INT64_MIN, INT64_MAX}};
    mt_tensor t = ref_random(5, 5, 0, 1, 0), huge = mt_tensor_f32((const float *)t.data, 7, 5);
    size_t i;
    (void)state;
    for (i = 0; i < sizeof bad / sizeof *bad; i++) {
        ASSERT_REFUSED(MT_ERR_SHAPE, "[-1, 5]", mt_fill(ref.ctx, mt_tensor_rows(t, bad[i][0], bad[i][1]), 0));
        ASSERT_REFUSED(MT_ERR_SHAPE, "[-1, ", mt_fill(ref.ctx, mt_tensor_cols(t, bad[i][0], bad[i][1]), 0));
    }
    huge.ld = INT64_MAX;
    ASSERT_REFUSED(MT_ERR_SHAPE, "[-1, 5]", mt_fill(ref.ctx, mt_tensor_rows(huge, 2, 1), 0));
    ASSERT_REFUSED(MT_ERR_SHAPE, "ld 9223372036854775807", mt_fill(ref.ctx, huge, 0));
    OK(mt_fill(ref.ctx, mt_tensor_rows(t, 5, 0), 0));
    OK(mt_fill(ref.ctx, mt_tensor_cols(t, 0, 5), 0));
}

/* ---- moving and filling ----------------------------------------------------------------------------------------- */

static void test_fill_copy_add(void **state) {
    mt_tensor x = ref_random(5, 37, 3, 1, 0), b = ref_random(5, 37, 0, 1, 0), y = ref_guarded(5, 37, 2);
    double *vx = ref_values(x), *vb = ref_values(b), *sum = ref_plus(vx, vb, 5 * 37), *sevens = ref_doubles(5 * 37);
    int i;
    (void)state;
    for (i = 0; i < 5 * 37; i++) sevens[i] = 7;
    OK(mt_fill(ref.ctx, y, 7));
    ASSERT_CLOSE(y, sevens, 0, 0);
    OK(mt_copy(ref.ctx, x, y));
    assert_true(same_bits(x, y));
    OK(mt_copy(ref.ctx, y, y));
    assert_true(same_bits(x, y));
    OK(mt_add(ref.ctx, x, b, y));
    ASSERT_CLOSE(y, sum, 0, 6e-8); /* one rounding */
    OK(mt_add(ref.ctx, x, b, x));
    assert_true(same_bits(x, y));
    OK(mt_add(ref.ctx, y, y, y));
    for (i = 0; i < 5 * 37; i++) sum[i] *= 2;
    ASSERT_CLOSE(y, sum, 0, 6e-8);
}

/* One element of a type with the value of `value`, and the bits of element i of a tensor of that type. */
static uint32_t bits_of_value(mt_dtype dtype, float value) {
    uint16_t half;
    if (dtype == MT_F32) return mt_f32_bits(value);
    mt_f32_to_16bit(dtype, &value, &half, 1);
    return half;
}

static uint32_t bits_at(mt_tensor t, int64_t i) {
    return t.dtype == MT_F32 ? ((const uint32_t *)t.data)[i] : ((const uint16_t *)t.data)[i];
}

/* Elements in the view have the bits of value, those between its rows have 0x55 in each byte. */
static void assert_filled(mt_tensor t, float value) {
    uint32_t inside = bits_of_value(t.dtype, value), outside = t.dtype == MT_F32 ? 0x55555555u : 0x5555u;
    for (int64_t i = 0; i < t.rows * t.ld; i++) assert_int_equal(bits_at(t, i), i % t.ld < t.cols ? inside : outside);
}

/* Rows of several stripes, of which threads get parts. -0 is not filled as zero. */
static void test_fill_and_copy_long_rows(void **state) {
    static const int64_t shapes[][3] = {{1, 40000, 40000}, {3, 4096, 4096}, {3, 9001, 9004}};
    static const mt_dtype dtypes[] = {MT_F32, MT_BF16, MT_F16};
    static const float values[] = {0.0f, -0.0f, 2.5f};
    (void)state;
    for (int s = 0; s < 9; s++) {
        const int64_t *shape = shapes[s / 3];
        size_t bytes = (size_t)(shape[0] * shape[2]) * mt_dtype_size(dtypes[s % 3]);
        mt_tensor x = mt_tensor_make(malloc(bytes), dtypes[s % 3], shape[0], shape[1]), y = x;
        y.data = malloc(bytes);
        x.ld = y.ld = shape[2];
        for (int v = 0; v < 3; v++) {
            memset(x.data, 0x55, bytes);
            memset(y.data, 0x55, bytes);
            OK(mt_fill(ref.ctx, x, values[v]));
            assert_filled(x, values[v]);
            OK(mt_copy(ref.ctx, x, y));
            assert_filled(y, values[v]);
        }
        free(x.data);
        free(y.data);
    }
}

static void test_upload_download(void **state) {
    mt_tensor y = ref_guarded(3, 5, 4);
    float host[15], back[15];
    uint8_t bytes[6] = {1, 2, 3, 4, 5, 6}, room[8] = {0};
    int32_t ints[4] = {1, -2, 3, -4}, ints_back[4];
    mt_tensor u8 = mt_tensor_make(room, MT_U8, 2, 3), i32 = mt_tensor_make(ints, MT_I32, 2, 2);
    int i;
    (void)state;
    for (i = 0; i < 15; i++) host[i] = (float)i;
    OK(mt_upload(ref.ctx, host, y));
    assert_true(ref_row(y, 2)[1] == 11.0f);
    OK(mt_download(ref.ctx, y, back));
    assert_memory_equal(host, back, sizeof host);
    u8.ld = 4;
    OK(mt_upload(ref.ctx, bytes, u8));
    assert_true(room[2] == 3 && room[3] == 0 && room[4] == 4 && room[6] == 6);
    OK(mt_download(ref.ctx, i32, ints_back));
    assert_memory_equal(ints, ints_back, sizeof ints);
}

/* Sums are accumulated in double, so they keep what float would lose: 1e8 plus a thousand ones. A long tensor is summed
   in parts. */
static void test_sums(void **state) {
    static const int shapes[][2] = {{11, 133}, {3, 70001}, {50021, 7}};
    mt_tensor out = ref_filled(1, 1, 0, 0.5f), big = ref_filled(3, 401, 1, 1);
    int i, k;
    (void)state;
    for (k = 0; k < 3; k++) {
        mt_tensor x = ref_random(shapes[k][0], shapes[k][1], 5, 1, 0.1f);
        double *v = ref_values(x), sum = 0.5, squares = 0.5;
        for (i = 0; i < shapes[k][0] * shapes[k][1]; i++) {
            sum += v[i];
            squares += v[i] * v[i];
        }
        OK(mt_fill(ref.ctx, out, 0.5f));
        OK(mt_sum(ref.ctx, x, out));
        ASSERT_CLOSE(out, &sum, 1e-15, 6e-8); /* only the last rounding */
        OK(mt_fill(ref.ctx, out, 0.5f));
        OK(mt_sum_of_squares(ref.ctx, x, out));
        ASSERT_CLOSE(out, &squares, 1e-15, 6e-8);
    }
    ref_row(big, 0)[0] = 1e8f;
    ref_row(big, 2)[400] = -1e8f;
    OK(mt_fill(ref.ctx, out, 0));
    OK(mt_sum(ref.ctx, big, out));
    assert_true(ref_row(out, 0)[0] == 1201.0f);
}

/* ---- scalar functions through the operators that use them ------------------------------------------------------- */

/* exp: the cross-entropy gradient with lse 0 and no target is scale * exp(x). 1.5e-7 is 2.5 units in the last place. */
static void test_exp_sweep(void **state) {
    mt_cross_entropy_shard_desc s = {40000, 0, 0, 0};
    mt_tensor x = ref_guarded(1, 40000, 0), lse = ref_filled(2, 1, 0, 0);
    int32_t target = 77777;
    double *want = ref_doubles(40000);
    int i;
    (void)state;
    for (i = 0; i < 40000; i++) {
        float v =
            i < 30000 ? -87.3f + 176.0f * (float)i / 30000.0f : (float)ldexp((double)test_float(&ref.random), -i % 160);
        ref_row(x, 0)[i] = v > 88.7f ? 88.7f : v;
        want[i] = exp((double)ref_row(x, 0)[i]);
    }
    OK(mt_cross_entropy_backward(ref.ctx, &s, x, &target, lse, mt_none(), 1));
    ASSERT_CLOSE(x, want, 0, 1.5e-7);
}

static void test_exp_ends(void **state) {
    static const float in[] = {0.0f,  -0.0f, 1e-45f,  -1e-45f, 88.7228f, 88.73f, 89,
                               1e10f, 3e38f, -87.33f, -87.4f,  -104,     -1e10f, -3e38f};
    mt_cross_entropy_shard_desc s = {16, 0, 0, 0};
    mt_tensor x = ref_filled(1, 16, 0, 0), lse = ref_filled(2, 1, 0, 0);
    int32_t target = 77;
    float *y = ref_row(x, 0);
    (void)state;
    memcpy(y, in, sizeof in);
    y[14] = INFINITY;
    y[15] = -INFINITY;
    OK(mt_cross_entropy_backward(ref.ctx, &s, x, &target, lse, mt_none(), 1));
    assert_true(y[0] == 1 && y[1] == 1 && y[2] == 1 && y[3] == 1);
    assert_true(fabs((double)y[4] / exp((double)in[4]) - 1) < 1.5e-7);
    assert_true(y[5] == INFINITY && y[6] == INFINITY && y[7] == INFINITY && y[8] == INFINITY && y[14] == INFINITY);
    assert_true(fabs((double)y[9] / exp((double)in[9]) - 1) < 1.5e-7);
    assert_true(y[10] == 0 && y[11] == 0 && y[12] == 0 && y[13] == 0 && y[15] == 0);
    y[0] = NAN;
    y[1] = ref_row(ref_guarded(1, 1, 0), 0)[0]; /* a NaN with a payload */
    OK(mt_cross_entropy_backward(ref.ctx, &s, x, &target, lse, mt_none(), 1));
    assert_true(y[0] != y[0] && y[1] != y[1]);
}

/* The exponentials of the statistics: those of numbers far below the maximum are 0, and a NaN with a payload stays
   NaN. */
static void test_exp_of_statistics(void **state) {
    static const float in[] = {-200, -104, -1e10f, -3e38f, -INFINITY, 0, 88, -1e-45f};
    mt_cross_entropy_shard_desc s = {8, 0, 0, 0};
    mt_tensor x = ref_guarded(1, 8, 0), stats = ref_guarded(1, 4, 0);
    int32_t target = 0;
    int i;
    (void)state;
    for (i = 0; i < 8; i++) {
        memcpy(ref_row(x, 0), in, sizeof in);
        ref_row(x, 0)[6] = i & 1 ? 88.0f : -3.0f;
        OK(mt_cross_entropy_stats(ref.ctx, &s, x, &target, stats));
        if (i & 1) assert_true(ref_row(stats, 0)[1] == 1);
        else assert_true(fabs((double)ref_row(stats, 0)[1] - (2 + exp(-3))) < 5e-7);
        ref_row(x, 0)[i] = ref_row(ref_guarded(1, 1, 0), 0)[0];
        OK(mt_cross_entropy_stats(ref.ctx, &s, x, &target, stats));
        assert_true(ref_row(stats, 0)[1] != ref_row(stats, 0)[1]);
    }
}

/* Checks an activation and its slope. gelu(x) = x Phi(x) has one rounding of the result, 3e-7 from the error of erf or
   of the exponent where Phi is of order one, and in the left tail, where tanh's exponent is large, the relative
   rounding of this exponent. */
static void check_activation_at(mt_activation kind, float in) {
    float h[2] = {0}, y[1], dy[1] = {1}, dh[2];
    double x = (double)in, want = ref_activation(kind, x), e = x > 1 ? 1e-4 * x : 1e-4, slope;
    mt_tensor hv = as_vector(h, kind == MT_SWIGLU ? 2 : 1), dhv = as_vector(dh, kind == MT_SWIGLU ? 2 : 1);
    h[0] = in;
    h[1] = 1;
    if (fabs(x) > 1e4) e = 0; /* the slope is exactly 0 or 1 */
    slope = e > 0 ? (ref_activation(kind, x + e) - ref_activation(kind, x - e)) / (2 * e) : x > 0;
    OK(mt_activation_forward(ref.ctx, kind, hv, mt_none(), as_vector(y, 1)));
    OK(mt_activation_backward(ref.ctx, kind, hv, as_vector(dy, 1), dhv, mt_none()));
    if (!(fabs((double)y[0] - want) <= 1.2e-7 * fabs(want) + 2e-7 * fmin(fabs(x), 4) + 1.5e-45))
        fail_msg("activation %d of %.9g is %.9g, must be %.9g", (int)kind, x, (double)y[0], want);
    /* three terms of size up to 1.1, and the error of the differences */
    if (!(fabs((double)dh[0] - slope) <= 1.5e-6 + 1e-8))
        fail_msg("slope of activation %d at %.9g is %.9g, must be %.9g", (int)kind, x, (double)dh[0], slope);
}

static void test_activation_sweep(void **state) {
    static const float ends[] = {0,      -0.0f, 1e-45f, -1e-45f, 1e-38f, -1e-38f, 9.99f, -9.99f, 10.1f,
                                 -10.1f, 20,    -20,    79.f,    -79.0f, 81,      -81,   88,     -88,
                                 1e4f,   -1e4f, 1e13f,  -1e13f,  1e20f,  -1e20f,  3e38f, -3e38f};
    int kind, i;
    (void)state;
    for (kind = 0; kind < 3; kind++) {
        for (i = -6000; i <= 6000; i++) check_activation_at((mt_activation)kind, (float)i * 0.0021f);
        for (i = 0; i < 2000; i++)
            check_activation_at((mt_activation)kind, (float)ldexp((double)test_float(&ref.random), -i % 140));
        for (i = 0; i < (int)(sizeof ends / sizeof *ends); i++) check_activation_at((mt_activation)kind, ends[i]);
    }
}

/* A NaN with a payload stays NaN. */
static void test_activation_of_nan(void **state) {
    mt_tensor h = ref_guarded(1, 66, 0), y = ref_filled(1, 33, 0, 0), dy = ref_filled(1, 33, 0, 1);
    mt_tensor dh = ref_filled(1, 66, 0, 0);
    int kind, i;
    (void)state;
    for (kind = 0; kind < MT_ACTIVATION_COUNT; kind++) {
        mt_tensor in = mt_tensor_cols(h, 0, kind == MT_SWIGLU ? 66 : 33);
        mt_tensor out = mt_tensor_cols(dh, 0, kind == MT_SWIGLU ? 66 : 33);
        OK(mt_activation_forward(ref.ctx, (mt_activation)kind, in, mt_none(), y));
        OK(mt_activation_backward(ref.ctx, (mt_activation)kind, in, dy, out, mt_none()));
        for (i = 0; i < 33; i++)
            if (!isnan(ref_row(y, 0)[i]) || !isnan(ref_row(dh, 0)[i])) fail_msg("activation %d hides a NaN", kind);
    }
}

/* Near 0 the exact activation is 0.5 x. Nothing may be lost to cancellation there. */
static void test_activation_near_zero(void **state) {
    int kind, i;
    (void)state;
    for (kind = 0; kind < 3; kind++)
        for (i = 0; i < 1000; i++) {
            float h[2] = {0, 1}, y;
            double want;
            h[0] = (float)ldexp((double)test_float(&ref.random), -10 - i % 100);
            want = ref_activation((mt_activation)kind, (double)h[0]);
            OK(mt_activation_forward(ref.ctx, (mt_activation)kind, as_vector(h, kind == MT_SWIGLU ? 2 : 1), mt_none(),
                                     as_vector(&y, 1)));
            assert_true(fabs((double)y - want) <= 3e-7 * fabs(want));
        }
}

/* The product of two floats is exact in double, so the value and the slope are the exact ones, rounded once. */
static void test_squared_relu(void **state) {
    static const float ends[] = {0, -0.0f, 1e-45f, -1e-45f, 1e-30f, -1e-30f, 1.8e19f, -1.8e19f, 3e38f, -3e38f};
    enum { n = 10000 };
    mt_tensor h = ref_guarded(1, n, 0), y = ref_guarded(1, n, 0), dy = ref_random(1, n, 0, 2, 0);
    mt_tensor dh = ref_guarded(1, n, 0);
    int i;
    (void)state;
    for (i = 0; i < n; i++) ref_row(h, 0)[i] = (float)ldexp((double)test_float(&ref.random), i % 80 - 40);
    memcpy(ref_row(h, 0), ends, sizeof ends);
    OK(mt_activation_forward(ref.ctx, MT_SQUARED_RELU, h, mt_none(), y));
    OK(mt_activation_backward(ref.ctx, MT_SQUARED_RELU, h, dy, dh, mt_none()));
    for (i = 0; i < n; i++) {
        double x = (double)ref_row(h, 0)[i], relu = x > 0 ? x : 0;
        float want = (float)(relu * relu), slope = (float)((double)ref_row(dy, 0)[i] * (2 * relu));
        if (fabs(x) > 1e38) continue; /* 2 x is infinite in float; checked below */
        if (ref_row(y, 0)[i] != want || ref_row(dh, 0)[i] != slope)
            fail_msg("squared ReLU of %.9g is %.9g, must be %.9g; its gradient is %.9g, must be %.9g", x,
                     (double)ref_row(y, 0)[i], (double)want, (double)ref_row(dh, 0)[i], (double)slope);
    }
    assert_true(ref_row(y, 0)[8] == INFINITY && ref_row(y, 0)[9] == 0 && ref_row(dh, 0)[9] == 0);
    ref_row(h, 0)[0] = NAN;
    ref_row(h, 0)[1] = INFINITY;
    ref_row(h, 0)[2] = -INFINITY;
    OK(mt_activation_forward(ref.ctx, MT_SQUARED_RELU, h, mt_none(), y));
    OK(mt_activation_backward(ref.ctx, MT_SQUARED_RELU, h, dy, dh, mt_none()));
    assert_true(ref_row(y, 0)[0] != ref_row(y, 0)[0] && ref_row(dh, 0)[0] != ref_row(dh, 0)[0]);
    assert_true(ref_row(y, 0)[1] == INFINITY && ref_row(y, 0)[2] == 0 && ref_row(dh, 0)[2] == 0);
    ASSERT_REFUSED(MT_ERR_ARGUMENT,
                   "kind is -1, must be MT_GELU_TANH, MT_GELU_ERF, MT_SWIGLU, MT_SQUARED_RELU, MT_RELU or MT_TANH",
                   mt_activation_forward(ref.ctx, (mt_activation)-1, h, mt_none(), y));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "kind is 6, must be MT_GELU_TANH",
                   mt_activation_forward(ref.ctx, (mt_activation)MT_ACTIVATION_COUNT, h, mt_none(), y));
}

/* Value and slope of ReLU are exact. At 0 the slope is 0. */
static void test_relu(void **state) {
    static const float in[] = {0, -0.0f, 1e-45f, -1e-45f, 1e-38f, -1e-38f, 1, -1, 3e38f, -3e38f, INFINITY, -INFINITY};
    enum { n = 1000 };
    mt_tensor h = ref_random(1, n, 0, 2, 0), y = ref_guarded(1, n, 0), dy = ref_random(1, n, 0, 2, 0);
    mt_tensor dh = ref_guarded(1, n, 0);
    float *x = ref_row(h, 0), *value = ref_row(y, 0), *slope = ref_row(dh, 0);
    int i;
    (void)state;
    memcpy(x, in, sizeof in);
    OK(mt_activation_forward(ref.ctx, MT_RELU, h, mt_none(), y));
    OK(mt_activation_backward(ref.ctx, MT_RELU, h, dy, dh, mt_none()));
    for (i = 0; i < n; i++) {
        float up = ref_row(dy, 0)[i];
        if (value[i] != (x[i] > 0 ? x[i] : 0) || slope[i] != (x[i] > 0 ? up : 0))
            fail_msg("ReLU of %.9g is %.9g; its gradient is %.9g for dy %.9g", (double)x[i], (double)value[i],
                     (double)slope[i], (double)up);
    }
    for (i = 0; i < n; i++) x[i] = i & 1 ? NAN : -NAN;
    OK(mt_activation_forward(ref.ctx, MT_RELU, h, mt_none(), y));
    OK(mt_activation_backward(ref.ctx, MT_RELU, h, dy, dh, mt_none()));
    for (i = 0; i < n; i++) assert_true(value[i] != value[i] && slope[i] != slope[i]);
}

/* tanh is within 1.6e-7 of its value, and its slope within 3.2e-7 of its value. Below FLT_MIN the slope may be 0. */
static void test_tanh(void **state) {
    enum { n = 100000 };
    mt_tensor h = ref_guarded(1, n, 0), y = ref_guarded(1, n, 0), one = ref_filled(1, n, 0, 1);
    mt_tensor dh = ref_guarded(1, n, 0);
    float *x = ref_row(h, 0), *value = ref_row(y, 0), *slope = ref_row(dh, 0);
    double worst = 0, worst_slope = 0;
    int i;
    (void)state;
    for (i = 0; i < n; i++) x[i] = (float)ldexp((double)test_float(&ref.random), i & 1 ? i / 2 % 7 : i / 2 % 180 - 130);
    for (i = 0; i < 100; i++) x[i] = 0.625f + (float)(i - 50) * 6e-8f; /* the formula changes at 0.625 */
    x[100] = 1e-45f, x[101] = INFINITY, x[102] = -INFINITY, x[103] = FLT_MAX, x[104] = -FLT_MAX;
    x[105] = 0, x[106] = -0.0f, x[107] = NAN;
    OK(mt_activation_forward(ref.ctx, MT_TANH, h, mt_none(), y));
    OK(mt_activation_backward(ref.ctx, MT_TANH, h, one, dh, mt_none()));
    for (i = 0; i < n; i++) {
        double want = tanh((double)x[i]), want_slope = 1 / cosh((double)x[i]) / cosh((double)x[i]);
        if (!(fabsf(x[i]) > 0)) continue;
        worst = test_larger(worst, fabs((double)value[i] / want - 1));
        assert_true(fabsf(value[i]) <= 1 && slope[i] >= 0);
        if (want_slope > 1e-37) worst_slope = test_larger(worst_slope, fabs((double)slope[i] / want_slope - 1));
        else assert_true(slope[i] <= 1.1e-37f);
    }
    if (!(worst <= 1.6e-7 && worst_slope <= 3.2e-7))
        fail_msg("tanh is off by %.3g of its value, its slope by %.3g", worst, worst_slope);
    assert_true(value[101] == 1 && value[102] == -1 && slope[101] == 0 && slope[102] == 0 && slope[103] == 0);
    assert_true(value[105] == 0 && !signbit(value[105]) && value[106] == 0 && signbit(value[106]) && slope[106] == 1);
    assert_true(value[107] != value[107] && slope[107] != slope[107]);
}

/* exp is within two units in the last place, 1.2e-7. Phi is within 9e-8, so erf(x) = 2 Phi(sqrt(2) x) - 1 is within
   1.8e-7. For x < 0, Phi is also within 4e-7 of its value, plus the effect of rounding x^2 / 2 on e^(-x^2 / 2). */
static void test_exp_and_normal(void **state) {
    double worst_exp = 0, worst = 0, worst_left = 0;
    int i;
    (void)state;
    for (i = -1000000; i <= 1000000; i++) {
        float y = (float)i * 8.7e-5f, x = (float)i * 1.29e-5f;
        double want = 0.5 * erfc(-(double)x / sqrt(2.0)),
               error = fabs((double)mti_normal_cdf(x, mti_exp(-0.5f * x * x)) - want);
        worst_exp = test_larger(worst_exp, fabs((double)mti_exp(y) / exp((double)y) - 1));
        worst_exp = test_larger(worst_exp, fabs((double)mti_exp_to_88(y, mti_unknown(-88.0f)) / exp((double)y) - 1));
        worst = test_larger(worst, error);
        if (x < 0) worst_left = test_larger(worst_left, error / want / (1 + (double)x * (double)x * 0.15));
    }
    if (!(worst_exp <= 1.2e-7 && worst <= 9e-8 && worst_left <= 4e-7))
        fail_msg("exp is off by %.3g of its value, Phi by %.3g, and on the left by %.3g of it", worst_exp, worst,
                 worst_left);
}

/* sqrt. With beta1 = beta2 = eps = 0 and lr = 1, AdamW subtracts g / sqrt(g^2), which is 1 or -1. */
static void test_sqrt_sweep(void **state) {
    mt_adamw h = {1, 0, 0, 0, 0, 1, 1, NULL};
    mt_tensor p = ref_filled(1, 20000, 0, 0), g = ref_guarded(1, 20000, 0), m = ref_filled(1, 20000, 0, 0);
    mt_tensor v = ref_filled(1, 20000, 0, 0);
    double *want = ref_doubles(20000);
    int i;
    (void)state;
    for (i = 0; i < 20000; i++) {
        double x = ldexp(1 + (double)(float)(i % 997) / 997, i % 120 - 58); /* g^2 from 2^-116 to 2^124 */
        ref_row(g, 0)[i] = (float)(i & 1 ? x : -x);
        want[i] = i & 1 ? -1 : 1;
    }
    OK(mt_adamw_step(ref.ctx, &h, p, mt_none(), g, m, v));
    ASSERT_CLOSE(p, want, 0, 2.4e-7); /* square, root, quotient: four roundings */
}

/* ---- bias and activations --------------------------------------------------------------------------------------- */

static void test_bias(void **state) {
    static const int64_t shapes[][2] = {{1, 1}, {1, 33}, {2, 16}, {3, 40}, {4, 7}, {5, 100}, {13, 65}, {0, 9}};
    size_t s;
    (void)state;
    for (s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        int64_t t = shapes[s][0], n = shapes[s][1], i, j;
        mt_tensor y = ref_random(t, n, 3, 1, 0), bias = ref_random(1, n, 0, 1, 0), dbias = ref_random(1, n, 0, 1, 0);
        double *want = ref_values(y), *db = ref_values(dbias);
        for (i = 0; i < t; i++)
            for (j = 0; j < n; j++) db[j] += want[i * n + j];
        OK(mt_bias_backward(ref.ctx, y, dbias));
        ASSERT_CLOSE(dbias, db, ELEMENT * (double)(t + 1), 0);
        for (i = 0; i < t; i++)
            for (j = 0; j < n; j++) want[i * n + j] += (double)ref_row(bias, 0)[j];
        OK(mt_bias_forward(ref.ctx, y, bias));
        ASSERT_CLOSE(y, want, 6e-8, 6e-8);
        ref_release();
    }
}

typedef struct act_case {
    mt_activation kind;
    int64_t t, f, w;
    const double *dy;
} act_case;

/* x: h [t, w], followed by bias [w] */
static void act_values(const double *x, const act_case *c, double *y) {
    int64_t i, j;
    const double *bias = x + c->t * c->w;
    for (i = 0; i < c->t; i++)
        for (j = 0; j < c->f; j++) {
            double gate = x[i * c->w + j] + bias[j];
            y[i * c->f + j] = ref_activation(c->kind, gate);
            if (c->kind == MT_SWIGLU) y[i * c->f + j] *= x[i * c->w + c->f + j] + bias[c->f + j];
        }
}

static double act_objective(const double *x, const void *user) {
    const act_case *c = (const act_case *)user;
    double *y = (double *)malloc((size_t)(c->t * c->f) * sizeof *y), dot;
    act_values(x, c, y);
    dot = ref_dot(y, c->dy, (size_t)(c->t * c->f));
    free(y);
    return dot;
}

/* Moves h + bias away from 0, where ReLU has no derivative. */
static void leave_the_kink(mt_tensor h, mt_tensor bias) {
    int64_t i, j;
    for (i = 0; i < h.rows; i++)
        for (j = 0; j < h.cols; j++)
            if (fabsf(ref_row(h, i)[j] + ref_row(bias, 0)[j]) < 1e-3f) ref_row(h, i)[j] += 0.01f;
}

static void try_activation(mt_activation kind, int64_t t, int64_t f, int with_bias, int in_place) {
    int64_t w = kind == MT_SWIGLU ? 2 * f : f;
    mt_tensor h = ref_random(t, w, 3, 3, 0), bias = with_bias ? ref_random(1, w, 0, 1, 0) : ref_filled(1, w, 0, 0);
    mt_tensor y = ref_guarded(t, f, 1), dy = ref_random(t, f, 2, 1, 0), dbias = ref_random(1, w, 0, 1, 0), dh;
    size_t nh = (size_t)(t * w), nw = (size_t)w;
    double *x = ref_doubles(nh + nw), *want = ref_doubles((size_t)(t * f)), *before = ref_values(dbias), *g, *shifted;
    act_case c = {kind, t, f, w, NULL};
    size_t i;
    c.dy = ref_values(dy);
    if (kind == MT_RELU) leave_the_kink(h, bias);
    ref_read(h, x);
    ref_read(bias, x + nh);
    act_values(x, &c, want);
    g = ref_gradient(act_objective, &c, x, nh + nw);
    shifted = ref_doubles(nh);
    for (i = 0; i < nh; i++) shifted[i] = x[i] + x[nh + i % nw];
    OK(mt_activation_forward(ref.ctx, kind, h, with_bias ? bias : mt_none(), y));
    ASSERT_CLOSE(y, want, 8 * ELEMENT, ELEMENT); /* values up to 12 */
    ASSERT_CLOSE(h, shifted, 0, 6e-8);
    dh = in_place ? h : ref_guarded(t, w, 5);
    OK(mt_activation_backward(ref.ctx, kind, h, dy, dh, with_bias ? dbias : mt_none()));
    ASSERT_CLOSE(dh, g, SUM, ELEMENT);
    if (with_bias) ASSERT_CLOSE(dbias, accumulated(before, g + nh, nw), SUM * (double)(t + 1), ELEMENT);
    else ASSERT_CLOSE(dbias, before, 0, 0);
    ref_release();
}

static void test_activation(void **state) {
    int kind, i;
    (void)state;
    for (kind = 0; kind < MT_ACTIVATION_COUNT; kind++)
        for (i = 0; i < 4; i++) {
            try_activation((mt_activation)kind, 1, 1, i & 1, i >> 1);
            try_activation((mt_activation)kind, 3, 37, i & 1, i >> 1);
            try_activation((mt_activation)kind, 7, 64, i & 1, i >> 1);
        }
}

/* Rows longer than a block of columns. */
static void test_activation_wide(void **state) {
    int kind;
    (void)state;
    for (kind = 0; kind < MT_ACTIVATION_COUNT; kind++) {
        int64_t f = 2500, w = kind == MT_SWIGLU ? 5000 : 2500, j;
        mt_tensor h = ref_random(2, w, 0, 3, 0), bias = ref_random(1, w, 0, 1, 0), y = ref_guarded(2, f, 0);
        double *x = ref_doubles((size_t)(3 * w)), *want = ref_doubles((size_t)(2 * f));
        mt_tensor dy = ref_filled(2, f, 0, 1), dbias = ref_filled(1, w, 0, 0), dh = ref_guarded(2, w, 0);
        act_case c = {MT_GELU_TANH, 2, 2500, 0, NULL};
        c.kind = (mt_activation)kind;
        c.w = w;
        ref_read(h, x);
        ref_read(bias, x + 2 * w);
        act_values(x, &c, want);
        OK(mt_activation_forward(ref.ctx, (mt_activation)kind, h, bias, y));
        ASSERT_CLOSE(y, want, 8 * ELEMENT, ELEMENT);
        OK(mt_activation_backward(ref.ctx, (mt_activation)kind, h, dy, dh, dbias));
        for (j = 0; j < w; j++)
            assert_true(fabsf(ref_row(dbias, 0)[j] - (ref_row(dh, 0)[j] + ref_row(dh, 1)[j])) <= 1e-6f);
        ref_release();
    }
}

/* ---- normalisation ---------------------------------------------------------------------------------------------- */

typedef struct norm_case {
    mt_norm_kind kind;
    int64_t t, n;
    double eps;
    const double *dy;
} norm_case;

/* x: x [t, n], followed by gain [n] and bias [n] */
static void norm_values(const double *x, const norm_case *c, double *y, double *stats) {
    const double *gain = x + c->t * c->n, *bias = gain + c->n;
    int64_t i, j;
    for (i = 0; i < c->t; i++) {
        double mean = 0, var = 0;
        for (j = 0; j < c->n && c->kind == MT_LAYER_NORM; j++) mean += x[i * c->n + j] / (double)c->n;
        for (j = 0; j < c->n; j++) var += pow(x[i * c->n + j] - mean, 2) / (double)c->n;
        for (j = 0; j < c->n; j++) y[i * c->n + j] = (x[i * c->n + j] - mean) / sqrt(var + c->eps) * gain[j] + bias[j];
        if (stats) stats[2 * i] = mean;
        if (stats) stats[2 * i + 1] = 1 / sqrt(var + c->eps);
    }
}

static double norm_objective(const double *x, const void *user) {
    const norm_case *c = (const norm_case *)user;
    double *y = (double *)malloc((size_t)(c->t * c->n) * sizeof *y), dot;
    norm_values(x, c, y, NULL);
    dot = ref_dot(y, c->dy, (size_t)(c->t * c->n));
    free(y);
    return dot;
}

/* alias: 0 none, 1 dx is dy, 2 dx is dresidual */
static void try_norm(mt_norm_kind kind, int64_t t, int64_t n, int with_bias, int with_residual, int alias) {
    mt_tensor x = ref_random(t, n, 3, 2, 0.5f), gain = ref_random(1, n, 0, 1, 0.2f);
    mt_tensor bias = with_bias ? ref_random(1, n, 0, 1, 0) : ref_filled(1, n, 0, 0), y = ref_guarded(t, n, 1);
    mt_tensor stats = ref_guarded(t, 2, 2), dy = ref_random(t, n, 2, 1, 0), residual = ref_random(t, n, 4, 1, 0), dx;
    mt_tensor dgain = ref_random(1, n, 0, 1, 0), dbias = ref_random(1, n, 0, 1, 0), none = mt_none();
    size_t nx = (size_t)(t * n), nn = (size_t)n;
    double *v = ref_doubles(nx + 2 * nn), *want = ref_doubles(nx), *want_stats = ref_doubles((size_t)(2 * t)), *g;
    double *dg = ref_values(dgain), *db = ref_values(dbias), *zero = ref_doubles(nx);
    norm_case c = {kind, t, n, (double)1e-5f, NULL};
    c.dy = ref_values(dy);
    ref_read(x, v);
    ref_read(gain, v + nx);
    ref_read(bias, v + nx + nn);
    norm_values(v, &c, want, want_stats);
    OK(mt_norm_forward(ref.ctx, kind, x, gain, with_bias ? bias : none, 1e-5f, y, stats));
    ASSERT_CLOSE(y, want, 2 * ELEMENT, 2 * ELEMENT);
    ASSERT_CLOSE(stats, want_stats, ELEMENT, 2 * ELEMENT);
    OK(mt_norm_forward(ref.ctx, kind, x, gain, with_bias ? bias : none, 1e-5f, y, none));
    ASSERT_CLOSE(y, want, 2 * ELEMENT, 2 * ELEMENT);
    g = ref_gradient(norm_objective, &c, v, nx + 2 * nn);
    dx = alias == 1 ? dy : alias == 2 ? residual : ref_guarded(t, n, 5);
    zero = with_residual ? ref_plus(g, ref_values(residual), nx) : g;
    OK(mt_norm_backward(ref.ctx, kind, x, gain, stats, dy, with_residual ? residual : none, dx, dgain,
                        with_bias ? dbias : none));
    ASSERT_CLOSE(dx, zero, SUM, SUM);
    ASSERT_CLOSE(dgain, accumulated(dg, g + nx, nn), SUM * (double)(t + 1), 0);
    if (with_bias) ASSERT_CLOSE(dbias, accumulated(db, g + nx + nn, nn), SUM * (double)(t + 1), 0);
    else ASSERT_CLOSE(dbias, db, 0, 0);
    ref_release();
}

static void test_norm(void **state) {
    static const int64_t shapes[][2] = {{1, 2}, {1, 40}, {3, 31}, {4, 32}, {2, 33}, {9, 100}, {0, 8}};
    size_t s;
    (void)state;
    for (s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        int64_t t = shapes[s][0], n = shapes[s][1];
        try_norm(MT_LAYER_NORM, t, n, 1, 0, 0);
        try_norm(MT_LAYER_NORM, t, n, 1, 1, 0);
        try_norm(MT_LAYER_NORM, t, n, 0, 1, 1);
        try_norm(MT_LAYER_NORM, t, n, 1, 1, 2);
        try_norm(MT_RMS_NORM, t, n, 0, 0, 0);
        try_norm(MT_RMS_NORM, t, n, 0, 1, 2);
        try_norm(MT_RMS_NORM, t, n, 0, 0, 1);
    }
}

/* y may be x. A mean of 1000 times the spread costs only its rounding (1000 * 2^-24 of a spread of 1). */
static void test_norm_offset(void **state) {
    mt_tensor x = ref_random(3, 200, 1, 1, 1000), gain = ref_filled(1, 200, 0, 1), y;
    double *v = ref_doubles(3 * 200 + 400), *want = ref_doubles(600);
    norm_case c = {MT_LAYER_NORM, 3, 200, (double)1e-5f, NULL};
    (void)state;
    ref_read(x, v);
    ref_read(gain, v + 600);
    norm_values(v, &c, want, NULL);
    y = x;
    OK(mt_norm_forward(ref.ctx, MT_LAYER_NORM, x, gain, mt_none(), 1e-5f, y, mt_none()));
    ASSERT_CLOSE(y, want, 2e-4, 0);
}

/* ---- random numbers --------------------------------------------------------------------------------------------- */

/* The known-answer vectors of Random123 1.09 (tests/kat_vectors). */
static void test_philox(void **state) {
    static const uint32_t in[3][6] = {{0, 0, 0, 0, 0, 0},
                                      {~0u, ~0u, ~0u, ~0u, ~0u, ~0u},
                                      {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0}};
    static const uint32_t want[3][4] = {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                        {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
                                        {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
    uint32_t out[4], check[4], counter[4], key[2];
    int i, j;
    (void)state;
    for (i = 0; i < 3; i++) {
        mt_philox4x32(in[i], in[i] + 4, out);
        assert_memory_equal(out, want[i], sizeof out);
        ref_philox(in[i], in[i] + 4, check);
        assert_memory_equal(check, want[i], sizeof out);
    }
    for (i = 0; i < 1000; i++) {
        for (j = 0; j < 4; j++) counter[j] = (uint32_t)test_random(&ref.random);
        for (j = 0; j < 2; j++) key[j] = (uint32_t)test_random(&ref.random);
        mt_philox4x32(counter, key, out);
        ref_philox(counter, key, check);
        assert_memory_equal(out, check, sizeof out);
    }
}

/* mt_random_words in blocks against one word at a time, also across 2^32 and from every lane. */
static void test_random_words(void **state) {
    static const int64_t starts[] = {
        0, 1, 2, 3, 251, 252, 253, ((int64_t)1 << 34) - 130, ((int64_t)1 << 34) - 3, (int64_t)1 << 60};
    uint32_t room[MTI_WORDS_ROOM];
    mt_random at = {0x123456789abcdef0u, 0xfedcba9876543210u, 0, 0, 1, NULL};
    size_t s;
    int64_t n, i;
    (void)state;
    for (s = 0; s < sizeof starts / sizeof *starts; s++)
        for (n = 1; n <= MTI_WORDS; n += n < 10 ? 1 : 11) {
            const uint32_t *w = mti_random_words(at, starts[s], n, room);
            for (i = 0; i < n; i++) assert_int_equal(w[i], ref_word(at, (uint64_t)(starts[s] + i)));
        }
}

/* Box-Muller, written from its definition. The system's cos and sin differ by at most one unit in double's last
   place. */
static double ref_normal(mt_random at, uint64_t e) {
    double u1 = ((double)ref_word(at, e & ~(uint64_t)1) + 0.5) / 4294967296.0,
           u2 = ((double)ref_word(at, e | 1) + 0.5) / 4294967296.0;
    double angle = 2 * 3.14159265358979323846 * u2, radius = sqrt(-2 * log(u1));
    return radius * (e & 1 ? sin(angle) : cos(angle));
}

static void test_normal_values(void **state) {
    static const int64_t shapes[][5] = {{1, 1, 0, 0, 1},      {3, 7, 0, 0, 7},     {5, 9, 2, 3, 17},
                                        {2, 600, 1, 1, 1001}, {4, 253, 0, 5, 300}, {300, 999, 2, 1, 1001}};
    size_t s;
    (void)state;
    for (s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        const int64_t *k = shapes[s];
        mt_random at = {99, 7, 0, 0, 0, NULL};
        mt_tensor y = ref_guarded(k[0], k[1], 3);
        double *want = ref_doubles((size_t)(k[0] * k[1]));
        int64_t i, j;
        at.first_row = k[2];
        at.first_col = k[3];
        at.global_cols = k[4];
        for (i = 0; i < k[0]; i++)
            for (j = 0; j < k[1]; j++) want[i * k[1] + j] = 0.25 * ref_normal(at, ref_element(at, i, j));
        OK(mt_random_normal(ref.ctx, y, 0.25f, at));
        ASSERT_CLOSE(y, want, 1e-16, 6.1e-8);
        ref_release();
    }
}

/* Every part of a tensor gets the numbers that it has in the whole. */
static void test_normal_split(void **state) {
    mt_random at = {5, 6, 0, 0, 301, NULL};
    mt_tensor whole = ref_guarded(20, 301, 0);
    int trial;
    (void)state;
    OK(mt_random_normal(ref.ctx, whole, 1, at));
    for (trial = 0; trial < 50; trial++) {
        int64_t r0 = (int64_t)test_below(&ref.random, 20), c0 = (int64_t)test_below(&ref.random, 301);
        int64_t r = 1 + (int64_t)test_below(&ref.random, (size_t)(20 - r0)),
                c = 1 + (int64_t)test_below(&ref.random, (size_t)(301 - c0));
        mt_tensor part = ref_guarded(r, c, 3);
        at.first_row = r0;
        at.first_col = c0;
        OK(mt_random_normal(ref.ctx, part, 1, at));
        assert_true(same_bits(part, mt_tensor_cols(mt_tensor_rows(whole, r0, r), c0, c)));
    }
}

/* One million numbers: mean within 5 / sqrt(n), variance within 5 sqrt(2 / n), kurtosis within 5 sqrt(24 / n), no
   visible correlation between neighbours (which share their words) or between streams. */
static void test_normal_statistics(void **state) {
    const int n = 1000000;
    mt_random at = {1, 2, 0, 0, 1000, NULL}, other = {1, 3, 0, 0, 1000, NULL};
    mt_tensor y = ref_guarded(1000, 1000, 0), z = ref_guarded(1000, 1000, 0);
    double mean = 0, var = 0, kurt = 0, next = 0, cross = 0;
    float *a = ref_row(y, 0), *b = ref_row(z, 0);
    int i;
    (void)state;
    OK(mt_random_normal(ref.ctx, y, 1, at));
    OK(mt_random_normal(ref.ctx, z, 1, other));
    for (i = 0; i < n; i++) {
        double v = (double)a[i];
        mean += v / n;
        var += v * v / n;
        kurt += v * v * v * v / n;
        next += v * (double)a[(i + 1) % n] / n;
        cross += v * (double)b[i] / n;
    }
    assert_true(fabs(mean) < 0.005 && fabs(var - 1) < 0.0071 && fabs(kurt - 3) < 0.0245 * 3);
    assert_true(fabs(next) < 0.005 && fabs(cross) < 0.005);
}

/* ---- bias, dropout, residual ------------------------------------------------------------------------------------ */

/* alias: 0 none, 1 y is x, 2 y is residual */
static void try_dropout(int64_t t, int64_t n, float p, int with_bias, int with_residual, int alias) {
    mt_tensor x = ref_random(t, n, 3, 1, 0), bias = ref_random(1, n, 0, 1, 0), residual = ref_random(t, n, 1, 1, 0), y,
              dx;
    mt_tensor dy = ref_random(t, n, 2, 1, 0), dbias = ref_random(1, n, 0, 1, 0), none = mt_none();
    mt_dropout d = {{11, 22, 3, 5, 0, NULL}, 0};
    double *want = ref_doubles((size_t)(t * n)), *want_dx = ref_doubles((size_t)(t * n)), *db = ref_values(dbias);
    int64_t i, j;
    d.p = p;
    d.at.global_cols = n + 6;
    for (i = 0; i < t; i++)
        for (j = 0; j < n; j++) {
            double keep = ref_keep(d, ref_element(d.at, i, j));
            double v = (double)ref_row(x, i)[j] + (with_bias ? (double)ref_row(bias, 0)[j] : 0);
            want[i * n + j] = keep * v + (with_residual ? (double)ref_row(residual, i)[j] : 0);
            want_dx[i * n + j] = keep * (double)ref_row(dy, i)[j];
            if (with_bias) db[j] += want_dx[i * n + j];
        }
    y = alias == 1 ? x : alias == 2 ? residual : ref_guarded(t, n, 4);
    dx = alias == 0 ? ref_guarded(t, n, 4) : dy;
    OK(mt_bias_dropout_add_forward(ref.ctx, x, with_bias ? bias : none, with_residual ? residual : none, d, y));
    ASSERT_CLOSE(y, want, ELEMENT, ELEMENT);
    OK(mt_bias_dropout_add_backward(ref.ctx, dy, d, dx, with_bias ? dbias : none));
    ASSERT_CLOSE(dx, want_dx, 0, 1.3e-7); /* one rounding of the factor, one of the product */
    ASSERT_CLOSE(dbias, db, ELEMENT * (double)(t + 1), ELEMENT);
    ref_release();
}

static void test_bias_dropout_add(void **state) {
    static const float p[] = {0, 0.1f, 0.5f, 0.99f, 1e-9f};
    int i, form;
    (void)state;
    for (i = 0; i < 5; i++)
        for (form = 0; form < 4; form++) {
            try_dropout(1, 1, p[i], form & 1, form >> 1, 0);
            try_dropout(5, 37, p[i], form & 1, form >> 1, 0);
            try_dropout(4, 64, p[i], form & 1, form >> 1, 1);
            try_dropout(3, 611, p[i], form & 1, form >> 1, form >> 1 ? 2 : 0);
            try_dropout(0, 5, p[i], form & 1, form >> 1, 0);
        }
}

/* At the threshold: a word equal to p * 2^32 is kept, a word that is smaller by half a unit is dropped. */
static void test_dropout_threshold(void **state) {
    mt_dropout d = {{3, 4, 0, 0, 1, NULL}, 0};
    float x = 1, y;
    int64_t e;
    int equal = 0, below = 0;
    (void)state;
    for (e = 0; e < 200000; e++) {
        uint32_t w = ref_word(d.at, (uint64_t)e);
        int at_equal = w >= 0x80000000u && (w & 255) == 0, at_below = w < 0x400000u; /* p has at most 24 bits */
        if (!at_equal && !at_below) continue;
        d.p = at_equal ? (float)((double)w / 4294967296.0) : (float)(((double)w + 0.5) / 4294967296.0);
        d.at.first_row = e;
        OK(mt_bias_dropout_add_forward(ref.ctx, as_vector(&x, 1), mt_none(), mt_none(), d, as_vector(&y, 1)));
        assert_true(at_equal ? y > 0 : y == 0);
        equal += at_equal;
        below += at_below;
    }
    assert_true(equal > 100 && below > 100);
}

/* The rate is within five standard deviations. A part of a tensor drops what the whole drops. Another stream drops
   other elements. */
static void test_dropout_rate(void **state) {
    mt_dropout d = {{3, 4, 0, 0, 1001, NULL}, 0.3f};
    mt_tensor x = ref_filled(1000, 1001, 0, 1), y = ref_guarded(1000, 1001, 0), part = ref_guarded(500, 444, 0),
              z = ref_guarded(1000, 1001, 0);
    int64_t i, dropped = 0, same = 0, n = 1000 * 1001;
    float keep = (float)(1 / (1 - (double)0.3f));
    (void)state;
    OK(mt_bias_dropout_add_forward(ref.ctx, x, mt_none(), mt_none(), d, y));
    d.at.subsequence = 5;
    OK(mt_bias_dropout_add_forward(ref.ctx, x, mt_none(), mt_none(), d, z));
    for (i = 0; i < n; i++) {
        float v = ref_row(y, 0)[i];
        assert_true(v == 0 || v == keep);
        dropped += v == 0;
        same += v == ref_row(z, 0)[i];
    }
    assert_true(fabs((double)dropped / (double)n - 0.3) < 5 * sqrt(0.21 / (double)n));
    assert_true(fabs((double)same / (double)n - 0.58) < 5 * sqrt(0.58 * 0.42 / (double)n));
    d.at.subsequence = 4;
    d.at.first_row = 321;
    d.at.first_col = 555;
    OK(mt_bias_dropout_add_forward(ref.ctx, mt_tensor_cols(mt_tensor_rows(x, 0, 500), 0, 444), mt_none(), mt_none(), d,
                                   part));
    assert_true(same_bits(part, mt_tensor_cols(mt_tensor_rows(y, 321, 500), 555, 444)));
}

/* An offset is added to subsequence when the operator runs. It may carry into the upper word. */
static void test_random_offset(void **state) {
    uint64_t offset = 0x123456789abu;
    mt_dropout moved = {{3, 0xffffffff00000005u, 0, 0, 301, &offset}, 0.3f}, plain = moved;
    mt_tensor x = ref_random(7, 301, 0, 1, 0), y = ref_guarded(7, 301, 0), z = ref_guarded(7, 301, 0);
    (void)state;
    for (; offset < 0x123456789aeu; offset++) {
        plain.at.subsequence = moved.at.subsequence + offset;
        plain.at.offset = NULL;
        OK(mt_bias_dropout_add_forward(ref.ctx, x, mt_none(), mt_none(), plain, y));
        OK(mt_bias_dropout_add_forward(ref.ctx, x, mt_none(), mt_none(), moved, z));
        assert_true(same_bits(y, z));
        OK(mt_random_normal(ref.ctx, y, 1, plain.at));
        OK(mt_random_normal(ref.ctx, z, 1, moved.at));
        assert_true(same_bits(y, z));
    }
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

static mt_attention_desc attention(int64_t batch, int64_t seq, int64_t groups, int64_t members, int64_t dim,
                                   mt_mask mask) {
    mt_attention_desc s;
    memset(&s, 0, sizeof s);
    s.batch = batch;
    s.seq = seq;
    s.groups = groups;
    s.heads_per_group = members;
    s.head_dim = dim;
    s.scores.mask = mask;
    return s;
}

/* Scores are of order one here, so probabilities, and sums weighted by them, are correct to a few roundings. Gradients
   of keys and values are sums over all queries and heads of the group. */
static void try_attention(mt_attention_desc s, int differences) {
    int64_t t = s.batch * s.seq, w = ref_qkv_cols(&s), h = ref_heads(&s), o = h * s.head_dim;
    mt_tensor qkv = ref_random(t, w, 3, 1.5f, 0), out = ref_guarded(t, o, 1), lse = ref_guarded(h, t, 2),
              again = ref_guarded(t, o, 0);
    mt_tensor dout = ref_random(t, o, 2, 1, 0), dqkv = ref_guarded(t, w, 5);
    double *v = ref_values(qkv), *want = ref_doubles((size_t)(t * o)), *want_lse = ref_doubles((size_t)(h * t)),
           *g = ref_doubles((size_t)(t * w));
    ref_attention r;
    double terms = sqrt((double)(s.seq * s.heads_per_group));
    size_t i;
    memset(&r, 0, sizeof r);
    r.s = s;
    r.dout = ref_values(dout);
    ref_attention_forward(&s, v, want, want_lse);
    OK(mt_attention_forward(ref.ctx, &s, qkv, out, lse));
    ASSERT_CLOSE(out, want, 1e-6, ELEMENT);
    ASSERT_CLOSE(lse, want_lse, 1e-6, ELEMENT);
    OK(mt_attention_forward(ref.ctx, &s, qkv, again, mt_none()));
    assert_true(same_bits(out, again));
    ref_attention_backward(&r, v, g);
    if (differences) {
        double *d = ref_gradient(ref_attention_objective, &r, v, (size_t)(t * w));
        for (i = 0; i < (size_t)(t * w); i++) assert_true(fabs(d[i] - g[i]) < 1e-6);
    }
    OK(mt_attention_backward(ref.ctx, &s, qkv, out, lse, dout, dqkv));
    ASSERT_CLOSE(dqkv, g, 1e-6 * (1 + terms), ELEMENT);
    ref_release();
}

static void test_attention(void **state) {
    int mask;
    (void)state;
    for (mask = 0; mask < 2; mask++) {
        try_attention(attention(1, 1, 1, 1, 1, (mt_mask)mask), 1);
        try_attention(attention(1, 1, 2, 1, 8, (mt_mask)mask), 1);
        try_attention(attention(2, 7, 3, 1, 5, (mt_mask)mask), 1);
        try_attention(attention(2, 9, 2, 3, 4, (mt_mask)mask), 1);
        try_attention(attention(1, 13, 1, 4, 6, (mt_mask)mask), 1);
        try_attention(attention(3, 16, 2, 1, 16, (mt_mask)mask), 1);
        try_attention(attention(0, 16, 2, 1, 16, (mt_mask)mask), 0);
    }
}

/* Sequence lengths around and beyond the panel of query rows. */
static void test_attention_panels(void **state) {
    int mask;
    (void)state;
    for (mask = 0; mask < 2; mask++) {
        try_attention(attention(1, MTI_KEYS - 1, 1, 1, 8, (mt_mask)mask), 0);
        try_attention(attention(1, MTI_KEYS, 2, 1, 8, (mt_mask)mask), 0);
        try_attention(attention(2, MTI_KEYS + 1, 1, 2, 12, (mt_mask)mask), 0);
        try_attention(attention(1, 3 * MTI_KEYS + 17, 1, 2, 24, (mt_mask)mask), 0);
    }
}

static void test_attention_padding(void **state) {
    static const int32_t small[] = {0, 1, 5, 9}, big[] = {0, 3, MTI_KEYS - 28, MTI_KEYS + 2, MTI_KEYS + 30};
    int mask;
    (void)state;
    for (mask = 0; mask < 2; mask++) {
        mt_attention_desc s = attention(4, 9, 2, 2, 4, (mt_mask)mask),
                          l = attention(5, MTI_KEYS + 30, 1, 2, 8, (mt_mask)mask);
        s.lengths = small;
        l.lengths = big;
        try_attention(s, 1);
        try_attention(l, 0);
    }
}

/* Values at masked positions have no influence, not even NaN. A sequence without keys gives zeros. */
static void test_attention_masked_garbage(void **state) {
    static const int32_t lengths[] = {0, 4};
    mt_attention_desc s = attention(2, 6, 1, 2, 4, MT_MASK_BIDIRECTIONAL);
    mt_tensor qkv = ref_random(12, 16, 0, 1, 0), out = ref_guarded(12, 8, 0), lse = ref_guarded(2, 12, 0),
              dout = ref_random(12, 8, 0, 1, 0);
    mt_tensor dqkv = ref_guarded(12, 16, 0);
    int64_t i, j;
    (void)state;
    s.lengths = lengths;
    for (i = 10; i < 12; i++)
        for (j = 8; j < 16; j++) ref_row(qkv, i)[j] = NAN; /* keys and values of the padding */
    OK(mt_attention_forward(ref.ctx, &s, qkv, out, lse));
    OK(mt_attention_backward(ref.ctx, &s, qkv, out, lse, dout, dqkv));
    for (i = 0; i < 12; i++) {
        for (j = 0; j < 8; j++) assert_true(i < 6 ? ref_row(out, i)[j] == 0 : ref_row(out, i)[j] == ref_row(out, i)[j]);
        for (j = 0; j < 16; j++) assert_true(ref_row(dqkv, i)[j] == ref_row(dqkv, i)[j]);
        for (j = 0; j < 16 && i < 6; j++) assert_true(ref_row(dqkv, i)[j] == 0);
        for (j = 8; j < 16 && i >= 10; j++) assert_true(ref_row(dqkv, i)[j] == 0);
    }
    assert_true(ref_row(lse, 1)[3] == -INFINITY && fabsf(ref_row(lse, 1)[7]) < 100);
}

static void test_attention_dropout(void **state) {
    static const float p[] = {0.1f, 0.5f, 0.9f};
    static const int32_t lengths[] = {3, 0, 8};
    int i, mask;
    (void)state;
    for (i = 0; i < 3; i++)
        for (mask = 0; mask < 2; mask++) {
            mt_attention_desc s = attention(3, 9, 2, 2, 4, (mt_mask)mask),
                              l = attention(1, MTI_KEYS + 130, 1, 2, 8, (mt_mask)mask);
            s.dropout.p = l.dropout.p = p[i];
            s.dropout.at.seed = l.dropout.at.seed = 42;
            s.dropout.at.subsequence = l.dropout.at.subsequence = 17;
            s.dropout.at.first_row = 5;
            s.dropout.at.first_col = l.dropout.at.first_col = 3;
            s.dropout.at.global_cols = l.dropout.at.global_cols = 12;
            try_attention(s, 1);
            s.lengths = lengths;
            try_attention(s, 1);
            if (i < 2) try_attention(l, 0); /* with p = 0.9, values are ten times as large and need another tolerance */
        }
}

static void test_attention_scale(void **state) {
    mt_attention_desc s = attention(1, 11, 2, 1, 7, MT_MASK_CAUSAL);
    (void)state;
    s.scores.scale = 0.9f;
    try_attention(s, 1);
    s.scores.scale = -0.3f;
    try_attention(s, 1);
}

/* Scores of several hundred: the maximum is subtracted before the exponential. */
static void test_attention_large_scores(void **state) {
    mt_attention_desc s = attention(1, 40, 1, 1, 8, MT_MASK_CAUSAL);
    mt_tensor qkv = ref_random(40, 24, 0, 20, 0), out = ref_guarded(40, 8, 0), lse = ref_guarded(1, 40, 0);
    double *want = ref_doubles(40 * 8), *want_lse = ref_doubles(40);
    (void)state;
    ref_attention_forward(&s, ref_values(qkv), want, want_lse);
    OK(mt_attention_forward(ref.ctx, &s, qkv, out, lse));
    ASSERT_CLOSE(out, want, 1e-3, 0); /* scores up to 1000 are accurate to 1000 * 2^-22, and values are up to 20 */
    ASSERT_CLOSE(lse, want_lse, 1e-6, 4e-7);
}

/* A shard of the heads and sequences gives the bits of the whole, with the same shapes and random elements. */
static void test_attention_split(void **state) {
    mt_attention_desc s = attention(4, 33, 3, 2, 8, MT_MASK_CAUSAL), part = attention(2, 33, 1, 2, 8, MT_MASK_CAUSAL);
    mt_tensor qkv = ref_random(132, 96, 0, 1, 0), out = ref_guarded(132, 48, 0), piece = ref_guarded(66, 16, 0);
    (void)state;
    s.dropout.p = part.dropout.p = 0.2f;
    s.dropout.at.global_cols = part.dropout.at.global_cols = 6;
    part.dropout.at.first_row = 2;
    part.dropout.at.first_col = 4;
    OK(mt_attention_forward(ref.ctx, &s, qkv, out, mt_none()));
    OK(mt_attention_forward(ref.ctx, &part, mt_tensor_cols(mt_tensor_rows(qkv, 66, 66), 64, 32), piece, mt_none()));
    assert_true(same_bits(piece, mt_tensor_cols(mt_tensor_rows(out, 66, 66), 32, 16)));
}

/* Returns qkv with the columns of the layout `from` in the order of the layout `to`. */
static mt_tensor in_layout(mt_attention_desc s, mt_tensor qkv, mt_qkv_layout from, mt_qkv_layout to) {
    mt_tensor y = ref_guarded(qkv.rows, qkv.cols, 3);
    mt_attention_desc f = s, t = s;
    int64_t i, a;
    int part;
    f.qkv_layout = from;
    t.qkv_layout = to;
    for (i = 0; i < qkv.rows; i++)
        for (a = 0; a < ref_heads(&s); a++)
            for (part = 0; part < 3; part++)
                memcpy(ref_row(y, i) + ref_col(&t, a, part), ref_row(qkv, i) + ref_col(&f, a, part),
                       (size_t)s.head_dim * sizeof(float));
    return y;
}

/* Rotary and attention, forward and backward, with the columns in another order: the bits of the layout per group. */
static void try_layout(mt_attention_desc s, mt_qkv_layout layout) {
    int64_t t = s.batch * s.seq, w = ref_qkv_cols(&s), h = ref_heads(&s), o = h * s.head_dim;
    mt_tensor qkv[2], out[2], lse[2], dqkv[2], dout = ref_random(t, o, 2, 1, 0),
                                               table = ref_guarded(s.seq, s.head_dim, 0);
    int i;
    OK(mt_rotary_table(ref.ctx, 100, table));
    qkv[0] = ref_random(t, w, 0, 1.5f, 0);
    qkv[1] = in_layout(s, qkv[0], MT_QKV_PER_GROUP, layout);
    for (i = 0; i < 2; i++) {
        s.qkv_layout = i == 0 ? MT_QKV_PER_GROUP : layout;
        out[i] = ref_guarded(t, o, 1);
        lse[i] = ref_guarded(h, t, 2);
        dqkv[i] = ref_guarded(t, w, 5);
        OK(mt_rotary_forward(ref.ctx, &s, table, qkv[i]));
        OK(mt_attention_forward(ref.ctx, &s, qkv[i], out[i], lse[i]));
        OK(mt_attention_backward(ref.ctx, &s, qkv[i], out[i], lse[i], dout, dqkv[i]));
        OK(mt_rotary_backward(ref.ctx, &s, table, dqkv[i]));
    }
    assert_true(same_bits(qkv[0], in_layout(s, qkv[1], layout, MT_QKV_PER_GROUP)));
    assert_true(same_bits(out[0], out[1]) && same_bits(lse[0], lse[1]));
    assert_true(same_bits(dqkv[0], in_layout(s, dqkv[1], layout, MT_QKV_PER_GROUP)));
    ref_release();
}

static void test_attention_layouts(void **state) {
    static const int32_t lengths[] = {5, 0, 8};
    int mask, layout;
    (void)state;
    for (mask = 0; mask < 2; mask++)
        for (layout = MT_QKV_CONCATENATED; layout <= MT_QKV_SEPARATE; layout++) {
            mt_attention_desc one = attention(2, 9, 3, 1, 4, (mt_mask)mask),
                              gqa = attention(3, 8, 2, 3, 6, (mt_mask)mask),
                              mqa = attention(1, MTI_KEYS + 9, 1, 4, 8, (mt_mask)mask);
            gqa.lengths = lengths;
            gqa.dropout.p = 0.3f;
            gqa.dropout.at.global_cols = 6;
            try_layout(one, (mt_qkv_layout)layout);
            try_layout(gqa, (mt_qkv_layout)layout);
            try_layout(mqa, (mt_qkv_layout)layout);
            one.qkv_layout = gqa.qkv_layout = mqa.qkv_layout = (mt_qkv_layout)layout;
            try_attention(one, 1);
            try_attention(gqa, 1);
            try_attention(mqa, 0);
        }
}

static void test_attention_same_bits(void **state) {
    mt_attention_desc s = attention(2, 150, 2, 2, 16, MT_MASK_CAUSAL);
    mt_tensor qkv = ref_random(300, 128, 0, 1, 0), out = ref_guarded(300, 64, 0), lse = ref_guarded(4, 300, 0),
              dout = ref_random(300, 64, 0, 1, 0);
    mt_tensor a = ref_guarded(300, 128, 0), b = ref_guarded(300, 128, 0);
    (void)state;
    OK(mt_attention_forward(ref.ctx, &s, qkv, out, lse));
    OK(mt_attention_backward(ref.ctx, &s, qkv, out, lse, dout, a));
    OK(mt_attention_backward(ref.ctx, &s, qkv, out, lse, dout, b));
    assert_true(same_bits(a, b));
}

/* Memory is a panel of rows, not seq x seq. A meta context counts the same amount. Too little memory is an error that
   writes nothing. */
static void test_attention_memory(void **state) {
    mt_attention_desc s = attention(1, 2048, 1, 1, 8, MT_MASK_CAUSAL);
    mt_tensor qkv = ref_random(2048, 24, 0, 1, 0), out = ref_random(2048, 8, 0, 1, 0),
              lse = ref_random(1, 2048, 0, 1, 0), dout = ref_random(2048, 8, 0, 1, 0);
    mt_tensor dqkv = ref_random(2048, 24, 0, 1, 0);
    mt_context_desc d;
    mt_context *meta = NULL, *tiny = NULL;
    uint64_t hash = ref_hash();
    (void)state;
    memset(&d, 0, sizeof d);
    d.arena_bytes = 100000;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &tiny));
    d.device = MT_DEVICE_META;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &meta));
    ASSERT_STATUS(tiny, MT_ERR_MEMORY, mt_attention_forward(tiny, &s, qkv, out, lse));
    ASSERT_STATUS(tiny, MT_ERR_MEMORY, mt_attention_backward(tiny, &s, qkv, out, lse, dout, dqkv));
    ASSERT_STATUS(meta, MT_SUCCESS, mt_attention_forward(meta, &s, qkv, out, lse));
    ASSERT_STATUS(meta, MT_SUCCESS, mt_attention_backward(meta, &s, qkv, out, lse, dout, dqkv));
    assert_true(hash == ref_hash());
    assert_int_equal(mt_arena_mark(tiny), 0);
    OK(mt_attention_forward(ref.ctx, &s, qkv, out, lse));
    OK(mt_attention_backward(ref.ctx, &s, qkv, out, lse, dout, dqkv));
    assert_int_equal(mt_arena_peak(meta), mt_arena_peak(ref.ctx));
    assert_true(mt_arena_peak(ref.ctx) < (size_t)8 << 20); /* seq x seq alone would be 16 MiB */
    mt_context_destroy(meta);
    mt_context_destroy(tiny);
}

/* ---- rotary ----------------------------------------------------------------------------------------------------- */

static void test_rotary_table(void **state) {
    mt_tensor table = ref_guarded(300, 10, 2);
    double *want = ref_doubles(3000);
    int i, j;
    (void)state;
    for (i = 0; i < 300; i++)
        for (j = 0; j < 5; j++) {
            want[i * 10 + j] = cos(i * pow(10000, -j / 5.0));
            want[i * 10 + 5 + j] = sin(i * pow(10000, -j / 5.0));
        }
    OK(mt_rotary_table(ref.ctx, 10000, table));
    ASSERT_CLOSE(table, want, 1e-12, 6e-8);
}

/* Compares with a product of complex numbers. Values, and features from rotary_dim on, are not rotated. Backward is the
   inverse of forward and its transpose. */
static void try_rotary(mt_rotary_form form, int64_t head_dim, int64_t rotary_dim) {
    mt_attention_desc s = attention(2, 5, 2, 3, head_dim, MT_MASK_CAUSAL);
    int64_t turned = rotary_dim ? rotary_dim : head_dim, cols = 10 * head_dim, half = turned / 2, i, a, j, part;
    mt_tensor table = ref_guarded(5, turned, 1), qkv = ref_random(10, cols, 4, 1, 0), original = ref_copy(qkv, 0), back,
              g = ref_random(10, cols, 0, 1, 0);
    double *want = ref_values(qkv), *vg = ref_values(g), *vx = ref_values(qkv);
    size_t n;
    s.scores.rotary_form = form;
    s.scores.rotary_dim = rotary_dim;
    OK(mt_rotary_table(ref.ctx, 100, table));
    for (i = 0; i < 10; i++)
        for (a = 0; a < 6; a++)
            for (part = 0; part < 2; part++) {
                double *x = want + i * cols + ref_col(&s, a, (int)part);
                if (part == 1 && a % 3 != 0) continue; /* a group has one key: count it once */
                for (j = 0; j < half; j++) {
                    double *re = form == MT_ROTARY_PAIRS ? x + 2 * j : x + j, *im = re + 1, was = *re;
                    double angle = (double)(i % 5) * pow(100, -(double)j / (double)half);
                    if (form != MT_ROTARY_PAIRS) im = re + half;
                    *re = was * cos(angle) - *im * sin(angle);
                    *im = was * sin(angle) + *im * cos(angle);
                }
            }
    OK(mt_rotary_forward(ref.ctx, &s, table, qkv));
    ASSERT_CLOSE(qkv, want, ELEMENT, 0);
    back = ref_copy(qkv, 0);
    OK(mt_rotary_backward(ref.ctx, &s, table, g));
    n = (size_t)(10 * cols);
    assert_true(fabs(ref_dot(want, vg, n) - ref_dot(vx, ref_values(g), n)) < 1e-5); /* <R x, g> = <x, R' g> */
    OK(mt_rotary_backward(ref.ctx, &s, table, back));
    ASSERT_CLOSE(back, ref_values(original), 2 * ELEMENT, 0);
    ref_release();
}

static void test_rotary(void **state) {
    static const int64_t dims[][2] = {{6, 0}, {6, 6}, {6, 4}, {6, 2}, {7, 4}, {40, 32}, {64, 0}};
    (void)state;
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
        for (int form = MT_ROTARY_HALVES; form <= MT_ROTARY_PAIRS; form++)
            try_rotary((mt_rotary_form)form, dims[i][0], dims[i][1]);
}

/* A document has the bits that it has alone, and so has its part in each sequence. */
static void test_rotary_documents(void **state) {
    static const int32_t ends[] = {0, 3, 3, 4, 9, 14}, parts[] = {0, 3, 4, 7, 9, 14}; /* 2 sequences of 7 tokens */
    int i, d;
    (void)state;
    for (i = 0; i < 12; i++) {
        mt_attention_desc s = attention(2, 7, 2, 2, 8, MT_MASK_CAUSAL), own;
        mt_tensor table = ref_guarded(7, 8, 1), qkv = ref_random(14, 64, 3, 1, 0), alone = ref_copy(qkv, 2);
        s.qkv_layout = (mt_qkv_layout)(i % 3), s.scores.rotary_form = (mt_rotary_form)(i / 3 % 2);
        OK(mt_rotary_table(ref.ctx, 100, table));
        own = s, own.batch = 1;
        s.cu_seqlens = ends, s.documents = 5;
        OK((i < 6 ? mt_rotary_forward : mt_rotary_backward)(ref.ctx, &s, table, qkv));
        for (d = 0; d < 5; d++) {
            mt_tensor rows = mt_tensor_rows(alone, parts[d], parts[d + 1] - parts[d]);
            own.seq = rows.rows;
            OK((i < 6 ? mt_rotary_forward : mt_rotary_backward)(ref.ctx, &own, mt_tensor_rows(table, 0, own.seq),
                                                                rows));
        }
        for (d = 0; d < 14; d++) assert_memory_equal(ref_row(qkv, d), ref_row(alone, d), 64 * sizeof(float));
        ref_release();
    }
}

/* ---- embedding -------------------------------------------------------------------------------------------------- */

static void check_embedding(int cols) {
    static const int32_t ids[] = {3, 10, 3, 9, 16, 2, -5, 14, 3, 100};
    static const float betas[] = {0, 1, 0.5f};
    mt_tensor table = ref_random(12, cols, 2, 1, 0), dtable = ref_random(12, cols, 1, 1, 0),
              dy = ref_random(10, cols, 3, 1, 0);
    double *want = ref_doubles((size_t)(10 * cols)), *grad = ref_values(dtable);
    int b, i, j;
    for (b = 0; b < 3; b++) {
        mt_tensor y = b == 0 ? ref_guarded(10, cols, 1) : ref_random(10, cols, 1, 1, 0);
        for (i = 0; i < 10; i++)
            for (j = 0; j < cols; j++) {
                double here = ids[i] >= 3 && ids[i] < 15 ? (double)ref_row(table, ids[i] - 3)[j] : 0;
                want[i * cols + j] = here + (b ? (double)betas[b] * (double)ref_row(y, i)[j] : 0);
            }
        OK(mt_embedding_forward(ref.ctx, table, 3, ids, betas[b], y));
        ASSERT_CLOSE(y, want, 1.3e-7, 6e-8);
    }
    for (i = 0; i < 10; i++)
        for (j = 0; j < cols && ids[i] >= 3 && ids[i] < 15; j++)
            grad[(ids[i] - 3) * cols + j] += (double)ref_row(dy, i)[j];
    OK(mt_embedding_backward(ref.ctx, dy, 3, ids, dtable));
    ASSERT_CLOSE(dtable, grad, ELEMENT, ELEMENT);
    ref_release();
}

/* The second table has rows of more than one block. */
static void test_embedding(void **state) {
    (void)state;
    check_embedding(19);
    check_embedding(1100);
}

static void test_ids(void **state) {
    int32_t ids[7] = {0, 4, 3, -100, 2, 5, -1};
    mt_context *ctx = ref.ctx;
    (void)state;
    OK(mt_ids_check(ctx, "token id", ids, 3, 5, 0));
    OK(mt_ids_check(ctx, "target", ids, 5, 5, -100));
    OK(mt_ids_check(ctx, "target", NULL, 0, 5, -100));
    ASSERT_REFUSED(MT_ERR_DATA, "target -100 at index 3 is not in [0, 5)", mt_ids_check(ctx, "target", ids, 5, 5, 0));
    ASSERT_REFUSED(MT_ERR_DATA, "token id 5 at index 5", mt_ids_check(ctx, "token id", ids, 7, 5, -100));
    ASSERT_REFUSED(MT_ERR_DATA, "token id -1 at index 0", mt_ids_check(ctx, "token id", ids + 6, 1, 5, 0));
    OK(mt_ids_check(ctx, "target", ids + 6, 1, 5, -1));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "ids is NULL, must hold 3", mt_ids_check(ctx, "token id", NULL, 3, 5, 0));
    ASSERT_REFUSED(MT_ERR_SHAPE, "the count of ids is -3", mt_ids_check(ctx, "token id", ids, -3, 5, 0));
}

static void test_position_ids(void **state) {
    int32_t positions[9], *volatile nothing = NULL;
    mt_context *ctx = ref.ctx;
    int i;
    (void)state;
    OK(mt_position_ids(ctx, 8, 5, NULL, 0, positions, 9));
    for (i = 0; i < 9; i++) assert_int_equal(positions[i], (8 + i) % 5);
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "seq is 0, must be from 1 to 2147483647",
                   mt_position_ids(ctx, 8, 0, NULL, 0, positions, 9));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "first_token is -1, must be from 0 to",
                   mt_position_ids(ctx, -1, 5, NULL, 0, positions, 9));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "ids is NULL", mt_position_ids(ctx, 0, 5, NULL, 0, nothing, 9));
}

/* Three sequences of 7 tokens. Document 0 ends inside of the first one, 1 is empty, 2 goes on in the second one, where
   it begins again at 0, 3 ends with it, and 4 is the third one with a rest that no sequence has. */
static void test_position_ids_of_documents(void **state) {
    static const int32_t documents[] = {0, 4, 4, 9, 14, 25},
                         want[] = {0, 1, 2, 3, 0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6};
    static const int32_t late[] = {1, 20}, unsorted[] = {0, 7, 5, 21};
    int32_t ids[21];
    int first, count;
    (void)state;
    for (first = 0; first < 21; first++)
        for (count = 0; count <= 21 - first; count++) {
            memset(ids, -1, sizeof ids);
            OK(mt_position_ids(ref.ctx, first, 7, documents, 5, ids, count));
            assert_memory_equal(ids, want + first, (size_t)count * sizeof *ids);
            if (count < 21) assert_int_equal(ids[count], -1);
        }
    OK(mt_position_ids(ref.ctx, 4, 7, documents, 5, ids, 21)); /* up to the last token */
    ASSERT_REFUSED(MT_ERR_DATA, "mt_position_ids: cu_seqlens[5] is 25; the numbers must ascend from 0 to at least 26",
                   mt_position_ids(ref.ctx, 5, 7, documents, 5, ids, 21));
    ASSERT_REFUSED(MT_ERR_DATA, "cu_seqlens[0] is 1", mt_position_ids(ref.ctx, 0, 7, late, 1, ids, 1));
    ASSERT_REFUSED(MT_ERR_DATA, "cu_seqlens[2] is 5", mt_position_ids(ref.ctx, 0, 7, unsorted, 3, ids, 1));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "documents is 0, but cu_seqlens is set",
                   mt_position_ids(ref.ctx, 0, 7, documents, 0, ids, 1));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "documents is 2, but cu_seqlens is NULL",
                   mt_position_ids(ref.ctx, 0, 7, NULL, 2, ids, 1));
}

/* ---- cross-entropy ---------------------------------------------------------------------------------------------- */

typedef struct xent_case {
    int64_t t, vocab;
    double smoothing;
    const int32_t *targets;
    const double *dloss;
} xent_case;

/* PyTorch's definition: cross-entropy against (1 - a) one-hot + a / vocab. */
static double xent_token(const double *x, const xent_case *c, int64_t i) {
    double top = x[0], sum = 0, loss = 0;
    int64_t j;
    if (c->targets[i] == -100) return 0;
    for (j = 1; j < c->vocab; j++) top = x[j] > top ? x[j] : top;
    for (j = 0; j < c->vocab; j++) sum += exp(x[j] - top);
    for (j = 0; j < c->vocab; j++) {
        double wanted = c->smoothing / (double)c->vocab + (j == c->targets[i] ? 1 - c->smoothing : 0);
        loss -= wanted * ((x[j] - top) - log(sum));
    }
    return loss;
}

static double xent_objective(const double *x, const void *user) {
    const xent_case *c = (const xent_case *)user;
    double total = 0;
    int64_t i;
    for (i = 0; i < c->t; i++) total += c->dloss[i] * xent_token(x + i * c->vocab, c, i);
    return total;
}

/* Splits the vocabulary into `shards` equal shards, the last ones padded. `scale` is the size of the logits.
   with_dloss: 0 none, 1 one for each token, 2 one for all */
static void try_xent(int64_t t, int64_t vocab, int shards, double smoothing, float scale, int with_dloss) {
    int64_t width = (vocab + shards - 1) / shards + 3, i, j;
    mt_tensor parts[9], stats, gathered = ref_guarded(shards * t, 4, 0), loss = ref_guarded(1, t, 0),
                               lse = ref_guarded(2, t, 0);
    mt_tensor dloss = ref_random(1, t, 0, 1, 0), given = with_dloss == 2 ? mt_tensor_cols(dloss, 0, 1) : dloss;
    int32_t *targets = (int32_t *)ref_bytes((size_t)t * sizeof *targets);
    double *x = ref_doubles((size_t)(t * vocab)), *want = ref_doubles((size_t)t), *dl = ref_values(dloss), *g;
    mt_cross_entropy_shard_desc desc;
    xent_case c;
    int s;
    memset(&desc, 0, sizeof desc);
    memset(&c, 0, sizeof c);
    desc.vocab = c.vocab = vocab;
    c.t = t;
    c.targets = targets;
    c.dloss = dl;
    desc.label_smoothing = (float)smoothing;
    c.smoothing = (double)desc.label_smoothing;
    for (i = 0; i < t; i++) targets[i] = i % 5 == 3 ? -100 : (int32_t)test_below(&ref.random, (size_t)vocab);
    if (t > 1) targets[1] = (int32_t)vocab - 1;
    for (i = t; i-- > 0;) dl[i] = 0.5 * (with_dloss ? dl[with_dloss == 2 ? 0 : i] : 1);
    for (s = 0; s < shards; s++) {
        desc.first_col = s * width;
        parts[s] = ref_random(t, width, 2, scale, 0);
        for (i = 0; i < t; i++)
            for (j = 0; j < width; j++) {
                if (s * width + j < vocab) x[i * vocab + s * width + j] = (double)ref_row(parts[s], i)[j];
                else ref_row(parts[s], i)[j] = NAN; /* padding has no effect, whatever it contains */
            }
        stats = mt_tensor_rows(gathered, s * t, t);
        OK(mt_cross_entropy_stats(ref.ctx, &desc, parts[s], targets, stats));
    }
    for (i = 0; i < t; i++) want[i] = xent_token(x + i * vocab, &c, i);
    OK(mt_cross_entropy_combine(ref.ctx, &desc, gathered, shards, targets, loss, lse));
    ASSERT_CLOSE(loss, want, smoothing > 0 ? 1e-6 * (double)fmaxf(1, scale) : 1e-6, 2.4e-7);
    g = ref_gradient(xent_objective, &c, x, (size_t)(t * vocab));
    for (s = 0; s < shards; s++) {
        desc.first_col = s * width;
        OK(mt_cross_entropy_backward(ref.ctx, &desc, parts[s], targets, lse, with_dloss ? given : mt_none(), 0.5f));
        for (i = 0; i < t; i++)
            for (j = 0; j < width; j++) {
                double got = (double)ref_row(parts[s], i)[j],
                       at = s * width + j < vocab ? g[i * vocab + s * width + j] : 0;
                if (!(fabs(got - at) <= 6e-7 * fabs(dl[i]) + 2e-8) || (targets[i] == -100 && got != 0) ||
                    (s * width + j >= vocab && got != 0))
                    fail_msg("shard %d of %d: gradient[%ld, %ld] is %.9g, must be %.9g", s, shards, (long)i, (long)j,
                             got, at);
            }
    }
    ref_check_guards();
    ref_release();
}

static void test_cross_entropy(void **state) {
    static const double smoothing[] = {0, 0.1, 0.75};
    int shards, a;
    (void)state;
    for (shards = 1; shards <= 9; shards++)
        for (a = 0; a < 3; a++) {
            try_xent(1, 30, shards, smoothing[a], 4, 0);
            try_xent(6, 67, shards, smoothing[a], 4, 1);
            try_xent(11, 130, shards, smoothing[a], 1, shards & 1);
        }
    try_xent(2, 5000, 2, 0, 5, 1);
    try_xent(7, 40, 2, 0.1, 4, 2);
    try_xent(0, 10, 2, 0, 5, 1);
    try_xent(3, 1, 1, 0.1, 5, 1);
}

/* Logits in the thousands, as in Megatron's test. Without smoothing, the loss is accurate to 1e-6 plus its own
   rounding. */
static void test_cross_entropy_large_logits(void **state) {
    int shards;
    (void)state;
    for (shards = 1; shards <= 8; shards++) {
        try_xent(12, 85, shards, 0, 1000, 0);
        try_xent(12, 85, shards, 0.1, 1000, 0);
    }
}

/* Columns that a model masks with -inf have probability 0 and gradient 0: a whole block, and a whole shard. */
static void test_cross_entropy_masked(void **state) {
    mt_cross_entropy_shard_desc s = {2600, 0, 0, 0};
    mt_tensor x = ref_filled(1, 2600, 0, 0), stats = ref_guarded(2, 4, 0), loss = ref_guarded(1, 1, 0),
              lse = ref_guarded(2, 1, 0);
    int32_t target = 2000;
    double want = log(1300.0);
    int64_t j;
    (void)state;
    for (j = 0; j < 1300; j++) ref_row(x, 0)[j] = -INFINITY;
    OK(mt_cross_entropy_stats(ref.ctx, &s, x, &target, mt_tensor_rows(stats, 0, 1)));
    OK(mt_cross_entropy_combine(ref.ctx, &s, mt_tensor_rows(stats, 0, 1), 1, &target, loss, lse));
    ASSERT_CLOSE(loss, &want, 1e-6, 0);
    OK(mt_cross_entropy_stats(ref.ctx, &s, mt_tensor_cols(x, 0, 1300), &target, mt_tensor_rows(stats, 0, 1)));
    s.first_col = 1300;
    OK(mt_cross_entropy_stats(ref.ctx, &s, mt_tensor_cols(x, 1300, 1300), &target, mt_tensor_rows(stats, 1, 1)));
    OK(mt_cross_entropy_combine(ref.ctx, &s, stats, 2, &target, loss, lse));
    ASSERT_CLOSE(loss, &want, 1e-6, 0);
    s.first_col = 0;
    OK(mt_cross_entropy_backward(ref.ctx, &s, x, &target, lse, mt_none(), 1));
    assert_true(ref_row(x, 0)[7] == 0 && fabs((double)ref_row(x, 0)[1999] - 1 / 1300.0) < 1e-9);
    ref_row(x, 0)[2500] = NAN; /* NaN logits of a diverged model must give a NaN loss */
    OK(mt_cross_entropy_stats(ref.ctx, &s, x, &target, mt_tensor_rows(stats, 0, 1)));
    OK(mt_cross_entropy_combine(ref.ctx, &s, mt_tensor_rows(stats, 0, 1), 1, &target, loss, lse));
    assert_true(ref_row(loss, 0)[0] != ref_row(loss, 0)[0]);
}

/* stats as documented: maximum, sum of exponentials, the target's logit if it is in this shard, sum. A shard of padding
   has (-inf, 0, 0, 0). */
static void test_cross_entropy_stats(void **state) {
    mt_cross_entropy_shard_desc s = {10, 5, 0, 0};
    mt_tensor x = ref_random(3, 5, 0, 1, 0), stats = ref_guarded(3, 4, 0);
    int32_t targets[3] = {7, 2, -100};
    double want[12] = {0};
    int i, j;
    (void)state;
    for (i = 0; i < 3; i++) {
        want[4 * i] = -9;
        for (j = 0; j < 5; j++) want[4 * i] = fmax(want[4 * i], (double)ref_row(x, i)[j]);
        for (j = 0; j < 5; j++) want[4 * i + 1] += exp((double)ref_row(x, i)[j] - want[4 * i]);
        for (j = 0; j < 5; j++) want[4 * i + 3] += (double)ref_row(x, i)[j];
    }
    want[2] = (double)ref_row(x, 0)[2];
    OK(mt_cross_entropy_stats(ref.ctx, &s, x, targets, stats));
    ASSERT_CLOSE(stats, want, ELEMENT, ELEMENT);
    s.first_col = 10;
    OK(mt_cross_entropy_stats(ref.ctx, &s, x, targets, stats));
    for (i = 0; i < 12; i++) want[i] = i % 4 ? 0 : -INFINITY;
    ASSERT_CLOSE(stats, want, 0, 0);
}

/* ---- optimizer -------------------------------------------------------------------------------------------------- */

static void test_adamw(void **state) {
    static const float wd[] = {0, 0.1f};
    int k, step, i;
    (void)state;
    for (k = 0; k < 2; k++) {
        mt_tensor p = ref_random(3, 43, 1, 1, 0), m = ref_filled(3, 43, 2, 0), v = ref_filled(3, 43, 3, 0), g;
        double *wp = ref_values(p), *wm = ref_doubles(129), *wv = ref_doubles(129), *vg;
        mt_adamw h = {1e-2f, 0.9f, 0.95f, 1e-8f, 0, 0.25f, 0, NULL};
        h.weight_decay = wd[k];
        for (step = 1; step <= 30; step++) {
            h.step = step;
            g = ref_random(3, 43, 0, 1, 0);
            vg = ref_values(g);
            for (i = 0; i < 129; i++) {
                double grad = (double)h.grad_scale * vg[i], mhat, vhat;
                wp[i] -= (double)h.lr * (double)h.weight_decay * wp[i];
                wm[i] = (double)h.beta1 * wm[i] + (1 - (double)h.beta1) * grad;
                wv[i] = (double)h.beta2 * wv[i] + (1 - (double)h.beta2) * grad * grad;
                mhat = wm[i] / (1 - pow((double)h.beta1, step));
                vhat = wv[i] / (1 - pow((double)h.beta2, step));
                wp[i] -= (double)h.lr * mhat / (sqrt(vhat) + (double)h.eps);
            }
            OK(mt_adamw_step(ref.ctx, &h, p, mt_none(), g, m, v));
        }
        ASSERT_CLOSE(p, wp, 30 * 1e-7, 0); /* one rounding a step */
        ASSERT_CLOSE(m, wm, ELEMENT, ELEMENT);
        ASSERT_CLOSE(v, wv, ELEMENT, 4 * ELEMENT);
    }
}

static void test_bad_lists_of_tensors(void **state) {
    mt_adamw h = {1e-2f, 0.9f, 0.95f, 1e-8f, 0, 1, 1, NULL};
    mt_tensor x = ref_filled(2, 5, 0, 1), out = ref_filled(1, 3, 0, 0);
    mt_adamw_tensor a = {x, {0}, x, x, x, 0, {0, 0, 0, 0, 5, NULL}}, wrong;
    mt_square_tensor s = {x, 2}, negative = {x, -1};
    mt_multi_tensor *adamw = NULL, *squares = NULL, *none = NULL;
    mt_random at = {1, 1, 0, 0, 5, NULL};
    (void)state;
    OK(mt_multi_tensor_create_adamw(ref.ctx, &a, 1, 0, &adamw));
    OK(mt_multi_tensor_create_squares(ref.ctx, &s, 1, &squares));
    ASSERT_STATUS(ref.ctx, MT_ERR_ARGUMENT, mt_multi_tensor_create_adamw(ref.ctx, NULL, 1, 0, &none));
    ASSERT_STATUS(ref.ctx, MT_ERR_ARGUMENT, mt_multi_tensor_create_adamw(ref.ctx, &a, -1, 0, &none));
    ASSERT_STATUS(ref.ctx, MT_ERR_ARGUMENT, mt_multi_tensor_create_adamw(ref.ctx, &a, 1, 0, NULL));
    ASSERT_STATUS(ref.ctx, MT_ERR_ARGUMENT,
                  mt_multi_tensor_create_adamw(ref.ctx, &a, 1, 1, &none)); /* f32 is not rounded */
    ASSERT_STATUS(ref.ctx, MT_ERR_ARGUMENT, mt_multi_tensor_create_squares(ref.ctx, &negative, 1, &none));
    wrong = a;
    wrong.m = mt_tensor_cols(x, 0, 4);
    ASSERT_STATUS(ref.ctx, MT_ERR_SHAPE, mt_multi_tensor_create_adamw(ref.ctx, &wrong, 1, 0, &none));
    wrong = a;
    wrong.master = x;
    ASSERT_STATUS(ref.ctx, MT_ERR_DTYPE, mt_multi_tensor_create_adamw(ref.ctx, &wrong, 1, 0, &none));
    ASSERT_STATUS(ref.ctx, MT_ERR_ARGUMENT, mt_multi_tensor_adamw(ref.ctx, NULL, &h, NULL));
    ASSERT_STATUS(ref.ctx, MT_ERR_ARGUMENT, mt_multi_tensor_adamw(ref.ctx, squares, &h, NULL));
    ASSERT_STATUS(ref.ctx, MT_ERR_ARGUMENT, mt_multi_tensor_sum_of_squares(ref.ctx, adamw, out));
    ASSERT_STATUS(ref.ctx, MT_ERR_ARGUMENT,
                  mt_multi_tensor_sum_of_squares(ref.ctx, squares, mt_tensor_cols(out, 0, 2)));
    h.stochastic_rounding = &at;
    ASSERT_STATUS(ref.ctx, MT_ERR_ARGUMENT, mt_multi_tensor_adamw(ref.ctx, adamw, &h, NULL));
    h.stochastic_rounding = NULL;
    h.step = 0;
    ASSERT_STATUS(ref.ctx, MT_ERR_ARGUMENT, mt_multi_tensor_adamw(ref.ctx, adamw, &h, NULL));
    assert_null(none);
    OK(mt_multi_tensor_sum_of_squares(ref.ctx, squares, out));
    assert_true(ref_row(out, 0)[2] == 10.0f && ref_row(out, 0)[1] == 0.0f);
    mt_multi_tensor_destroy(ref.ctx, adamw);
    mt_multi_tensor_destroy(ref.ctx, squares);
    mt_multi_tensor_destroy(ref.ctx, NULL);
}

/* With zero gradients, only weight decay changes the parameters. Denormal and huge moments stay finite. */
static void test_adamw_edges(void **state) {
    mt_adamw h = {0.1f, 0.9f, 0.999f, 1e-8f, 0, 1, 1, NULL};
    mt_tensor p = ref_filled(1, 40, 0, 1), g = ref_filled(1, 40, 0, 0), m = ref_filled(1, 40, 0, 0),
              v = ref_filled(1, 40, 0, 0);
    int i;
    (void)state;
    ref_row(g, 0)[3] = 1e-22f;
    ref_row(g, 0)[4] = 1e18f;
    ref_row(g, 0)[5] = NAN;
    OK(mt_adamw_step(ref.ctx, &h, p, mt_none(), g, m, v));
    for (i = 0; i < 40; i++) {
        float got = ref_row(p, 0)[i];
        if (i == 4) assert_true(fabsf(got - 0.9f) < 1e-6f);
        else if (i == 5) assert_true(got != got);
        else assert_true(got == 1.0f);
    }
}

/* ---- what is refused -------------------------------------------------------------------------------------------- */

static void test_bad_memory(void **state) {
    mt_context *ctx = ref.ctx;
    mt_tensor x = ref_random(3, 4, 1, 1, 0), y = ref_random(3, 5, 0, 1, 0), z = ref_random(2, 4, 0, 1, 0),
              one = ref_random(1, 1, 0, 1, 0);
    mt_tensor bad_ld = x;
    float host[12];
    (void)state;
    bad_ld.ld = 3;
    assert_int_equal(mt_fill(NULL, x, 1), MT_ERR_ARGUMENT);
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_fill: y is [3, 4] but its data is NULL", mt_fill(ctx, null_data(x), 1));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_fill: y is [3, 4] with ld 3", mt_fill(ctx, bad_ld, 1));
    ASSERT_REFUSED(MT_ERR_DTYPE, "mt_fill: y is i32, must be f32", mt_fill(ctx, with_dtype(x, MT_I32), 1));
    ASSERT_REFUSED(MT_ERR_DTYPE, "mt_fill: y is u8, must be f32, bf16 or f16", mt_fill(ctx, with_dtype(x, MT_U8), 1));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_copy: x is [3, 4], y is [3, 5]", mt_copy(ctx, x, y));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_copy: x is [3, 4], y is [2, 4]", mt_copy(ctx, x, z));
    ASSERT_REFUSED(MT_ERR_DTYPE, "mt_copy: x is i32 and y is f32", mt_copy(ctx, with_dtype(x, MT_I32), y));
    ASSERT_REFUSED(MT_ERR_DTYPE, "mt_copy: x is f32 and y is f16", mt_copy(ctx, x, with_dtype(y, MT_F16)));
    assert_int_equal(mt_copy(NULL, x, y), MT_ERR_ARGUMENT);
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_add: a is [3, 4], must be [3, 5]", mt_add(ctx, x, y, y));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_add: b is [2, 4], must be [3, 4]", mt_add(ctx, x, z, x));
    assert_int_equal(mt_add(NULL, x, x, x), MT_ERR_ARGUMENT);
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_upload: host is NULL, must hold 12", mt_upload(ctx, NULL, x));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_download: host is NULL, must hold 12", mt_download(ctx, x, NULL));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_upload: y is [3, 4] with ld 3", mt_upload(ctx, host, bad_ld));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_download: x is [3, 4] with ld 3", mt_download(ctx, bad_ld, host));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_sum: out is [3, 4], must be [1, 1]", mt_sum(ctx, x, x));
    ASSERT_REFUSED(MT_ERR_DTYPE, "mt_sum_of_squares: x is u8", mt_sum_of_squares(ctx, with_dtype(x, MT_U8), one));
    assert_int_equal(mt_sum(NULL, x, one), MT_ERR_ARGUMENT);
}

static void test_bad_elementwise(void **state) {
    mt_context *ctx = ref.ctx;
    mt_tensor x = ref_random(3, 4, 0, 1, 0), y = ref_random(3, 4, 0, 1, 0), wide = ref_random(3, 8, 0, 1, 0),
              row = ref_random(1, 4, 0, 1, 0);
    mt_tensor row5 = ref_random(1, 5, 0, 1, 0), none = mt_none();
    (void)state;
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_bias_forward: bias is [1, 5], must be [1, 4]", mt_bias_forward(ctx, x, row5));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_bias_forward: bias is [3, 4], must be [1, 4]", mt_bias_forward(ctx, x, y));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_bias_forward: bias is [0, 0], must be [1, 4]", mt_bias_forward(ctx, x, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_bias_backward: dbias is [1, 5]", mt_bias_backward(ctx, x, row5));
    assert_int_equal(mt_bias_forward(NULL, x, row), MT_ERR_ARGUMENT);
    assert_int_equal(mt_bias_backward(NULL, x, row), MT_ERR_ARGUMENT);
    ASSERT_REFUSED(MT_ERR_ARGUMENT,
                   "kind is 9, must be MT_GELU_TANH, MT_GELU_ERF, MT_SWIGLU, MT_SQUARED_RELU, MT_RELU or MT_TANH",
                   mt_activation_forward(ctx, (mt_activation)9, x, none, y));
    ASSERT_REFUSED(MT_ERR_SHAPE, "h is [3, 8], must be [3, 4]",
                   mt_activation_forward(ctx, MT_GELU_TANH, wide, none, y));
    ASSERT_REFUSED(MT_ERR_SHAPE, "h is [3, 4], must be [3, 8]", mt_activation_forward(ctx, MT_SWIGLU, x, none, y));
    ASSERT_REFUSED(MT_ERR_SHAPE, "bias is [1, 4], must be [1, 8]", mt_activation_forward(ctx, MT_SWIGLU, wide, row, y));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "y [3, 4] and h [3, 4] overlap",
                   mt_activation_forward(ctx, MT_GELU_ERF, x, none, x));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "kind is -1, must be MT_GELU_TANH, ",
                   mt_activation_backward(ctx, (mt_activation)-1, x, y, x, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "dh is [3, 8], must be [3, 4]",
                   mt_activation_backward(ctx, MT_GELU_ERF, x, y, wide, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "h is [3, 4], must be [3, 8]",
                   mt_activation_backward(ctx, MT_SWIGLU, x, y, wide, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "dbias is [1, 5], must be [1, 4]",
                   mt_activation_backward(ctx, MT_GELU_ERF, x, y, x, row5));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "dh [3, 4] and dy [3, 4] overlap",
                   mt_activation_backward(ctx, MT_GELU_ERF, x, y, y, none));
    assert_int_equal(mt_activation_forward(NULL, MT_GELU_ERF, x, none, y), MT_ERR_ARGUMENT);
    assert_int_equal(mt_activation_backward(NULL, MT_GELU_ERF, x, y, x, none), MT_ERR_ARGUMENT);
}

static void test_bad_norm(void **state) {
    mt_context *ctx = ref.ctx;
    mt_tensor x = ref_random(3, 4, 0, 1, 0), y = ref_random(3, 4, 0, 1, 0), g = ref_random(1, 4, 0, 1, 0),
              g5 = ref_random(1, 5, 0, 1, 0);
    mt_tensor st = ref_random(3, 2, 0, 1, 0), st4 = ref_random(4, 2, 0, 1, 0), wide = ref_random(3, 5, 0, 1, 0),
              none = mt_none();
    (void)state;
#define FORWARD(kind, x, gain, bias, eps, y, stats) mt_norm_forward(ctx, kind, x, gain, bias, eps, y, stats)
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "kind is 2, must be MT_LAYER_NORM or MT_RMS_NORM",
                   FORWARD((mt_norm_kind)2, x, g, none, 0, y, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "gain is [1, 5], must be [1, 4]", FORWARD(MT_LAYER_NORM, x, g5, none, 0, y, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "bias is [1, 5], must be [1, 4]", FORWARD(MT_LAYER_NORM, x, g, g5, 0, y, none));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "RMSNorm has no bias", FORWARD(MT_RMS_NORM, x, g, g, 0, y, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "y is [3, 5], must be [3, 4]", FORWARD(MT_LAYER_NORM, x, g, none, 0, wide, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "stats is [4, 2], must be [3, 2]", FORWARD(MT_LAYER_NORM, x, g, none, 0, y, st4));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "eps is -1, must be at least 0 and finite",
                   FORWARD(MT_LAYER_NORM, x, g, none, -1, y, none));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "eps is ", FORWARD(MT_LAYER_NORM, x, g, none, NAN, y, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "x is [3, 0], needs columns",
                   FORWARD(MT_LAYER_NORM, mt_tensor_cols(x, 0, 0), g, none, 0, y, none));
    assert_int_equal(mt_norm_forward(NULL, MT_LAYER_NORM, x, g, none, 0, y, none), MT_ERR_ARGUMENT);
#undef FORWARD
#define BACKWARD(kind, gain, stats, dy, dres, dx, dgain, dbias)                                                        \
    mt_norm_backward(ctx, kind, x, gain, stats, dy, dres, dx, dgain, dbias)
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "kind is -1, must be MT_LAYER_NORM or MT_RMS_NORM",
                   BACKWARD((mt_norm_kind)-1, g, st, y, none, y, g, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "gain is [1, 5]", BACKWARD(MT_LAYER_NORM, g5, st, y, none, y, g, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "stats is [4, 2]", BACKWARD(MT_LAYER_NORM, g, st4, y, none, y, g, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "stats is [0, 0]", BACKWARD(MT_LAYER_NORM, g, none, y, none, y, g, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "dy is [3, 5]", BACKWARD(MT_LAYER_NORM, g, st, wide, none, y, g, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "dresidual is [3, 5]", BACKWARD(MT_LAYER_NORM, g, st, y, wide, y, g, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "dx is [3, 5]", BACKWARD(MT_LAYER_NORM, g, st, y, none, wide, g, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "dgain is [1, 5]", BACKWARD(MT_LAYER_NORM, g, st, y, none, y, g5, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "dbias is [1, 5]", BACKWARD(MT_LAYER_NORM, g, st, y, none, y, g, g5));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "RMSNorm has no bias", BACKWARD(MT_RMS_NORM, g, st, y, none, y, g, g));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "dx [3, 4] and x [3, 4] overlap",
                   BACKWARD(MT_LAYER_NORM, g, st, y, none, x, g, none));
    assert_int_equal(mt_norm_backward(NULL, MT_LAYER_NORM, x, g, st, y, none, y, g, none), MT_ERR_ARGUMENT);
#undef BACKWARD
}

static void test_bad_random(void **state) {
    mt_context *ctx = ref.ctx;
    mt_tensor x = ref_random(3, 4, 0, 1, 0), y = ref_random(3, 4, 0, 1, 0), wide = ref_random(3, 5, 0, 1, 0),
              row5 = ref_random(1, 5, 0, 1, 0);
    mt_random at = {1, 2, 0, 0, 4, NULL}, bad = at;
    mt_dropout d = {{1, 2, 0, 0, 4, NULL}, 0.5f}, off;
    mt_tensor none = mt_none();
    (void)state;
    memset(&off, 0, sizeof off);
#define NORMAL(std, at) mt_random_normal(ctx, x, std, at)
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "std is inf", NORMAL(INFINITY, at));
    bad.global_cols = 3;
    ASSERT_REFUSED(MT_ERR_SHAPE, "is not inside a tensor of 3 columns", NORMAL(1, bad));
    bad.global_cols = 0;
    ASSERT_REFUSED(MT_ERR_SHAPE, "is not inside a tensor of 0 columns", NORMAL(1, bad));
    bad = at;
    bad.first_col = 1;
    ASSERT_REFUSED(MT_ERR_SHAPE, "at row 0, column 1", NORMAL(1, bad));
    bad.first_col = -1;
    ASSERT_REFUSED(MT_ERR_SHAPE, "column -1", NORMAL(1, bad));
    bad = at;
    bad.first_row = -1;
    ASSERT_REFUSED(MT_ERR_SHAPE, "at row -1", NORMAL(1, bad));
    bad.first_row = INT64_MAX / 4;
    ASSERT_REFUSED(MT_ERR_SHAPE, "no 64-bit element number", NORMAL(1, bad));
    bad.first_row = INT64_MAX - 1;
    ASSERT_REFUSED(MT_ERR_SHAPE, "no 64-bit element number", NORMAL(1, bad));
    ASSERT_REFUSED(MT_ERR_DTYPE, "y is u8", mt_random_normal(ctx, with_dtype(x, MT_U8), 1, at));
    assert_int_equal(mt_random_normal(NULL, x, 1, at), MT_ERR_ARGUMENT);
#define FORWARD(bias, residual, d, y) mt_bias_dropout_add_forward(ctx, x, bias, residual, d, y)
    d.p = 1;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "dropout.p is 1,", FORWARD(none, none, d, y));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "dropout.p is 1,", mt_bias_dropout_add_backward(ctx, x, d, y, none));
    d.p = -0.1f;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "dropout.p is -0.1,", FORWARD(none, none, d, y));
    d.p = NAN;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "dropout.p is ", FORWARD(none, none, d, y));
    d.p = 0.5f;
    d.at.global_cols = 2;
    ASSERT_REFUSED(MT_ERR_SHAPE, "not inside a tensor of 2 columns", FORWARD(none, none, d, y));
    ASSERT_REFUSED(MT_ERR_SHAPE, "not inside a tensor of 2 columns", mt_bias_dropout_add_backward(ctx, x, d, y, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "bias is [1, 5]", FORWARD(row5, none, off, y));
    ASSERT_REFUSED(MT_ERR_SHAPE, "residual is [3, 5]", FORWARD(none, wide, off, y));
    ASSERT_REFUSED(MT_ERR_SHAPE, "y is [3, 5]", FORWARD(none, none, off, wide));
    ASSERT_REFUSED(MT_ERR_SHAPE, "dx is [3, 5]", mt_bias_dropout_add_backward(ctx, x, off, wide, none));
    ASSERT_REFUSED(MT_ERR_SHAPE, "dbias is [1, 5]", mt_bias_dropout_add_backward(ctx, x, off, y, row5));
    OK(FORWARD(none, none, off, y)); /* a zero-initialised dropout is off */
    assert_int_equal(mt_bias_dropout_add_forward(NULL, x, none, none, off, y), MT_ERR_ARGUMENT);
    assert_int_equal(mt_bias_dropout_add_backward(NULL, x, off, y, none), MT_ERR_ARGUMENT);
#undef NORMAL
#undef FORWARD
}

/* The last message must be `expected`, and nothing else. Without a context there is no message. */
#define CHECK_REFUSED(status, expected, check, ...)                                                                    \
    do {                                                                                                               \
        ASSERT_REFUSED(status, expected, check(ref.ctx, __VA_ARGS__));                                                 \
        assert_string_equal(mt_last_error(ref.ctx), expected);                                                         \
        assert_int_equal(check(NULL, __VA_ARGS__), status);                                                            \
    } while (0)

/* mt_check_integer and the other checks of one field, at their limits. */
static void test_checks_of_fields(void **state) {
    static const float infinite[] = {INFINITY, -INFINITY, NAN};
    char text[MT_WORD_MAX];
    (void)state;
#define INTEGER(status, expected, ...) CHECK_REFUSED(status, expected, mt_check_integer, "f", __VA_ARGS__)
    INTEGER(MT_ERR_ARGUMENT, "f: 'a': n is 0, must be from 1 to 3", "a", "n", 0, 1, 3);
    INTEGER(MT_ERR_ARGUMENT, "f: n is 4, must be from 1 to 3", NULL, "n", 4, 1, 3);
    INTEGER(MT_ERR_ARGUMENT, "f: n is 2, must be 0 or 1", NULL, "n", 2, 0, 1);
    INTEGER(MT_ERR_ARGUMENT, "f: n is 0, must be from 1 to -9223372036854775808", NULL, "n", 0, 1, INT64_MIN);
    INTEGER(MT_ERR_ARGUMENT, "f: n is -9223372036854775808, must be at least -1", NULL, "n", INT64_MIN, -1, INT64_MAX);
#undef INTEGER
    OK(mt_check_integer(ref.ctx, "f", NULL, "n", 1, 1, 3));
    OK(mt_check_integer(ref.ctx, "f", NULL, "n", 3, 1, 3));
    OK(mt_check_integer(NULL, "f", NULL, "n", INT64_MAX, 0, INT64_MAX));
    CHECK_REFUSED(MT_ERR_SHAPE, "f: 'a': n is 0, must be at least 1", mt_check_size, "f", "a", "n", 0, 1, INT64_MAX);
    OK(mt_check_size(ref.ctx, "f", "a", "n", 1, 1, 1));
#define ENUM(expected, ...) CHECK_REFUSED(MT_ERR_ARGUMENT, expected, mt_check_enum, "f", __VA_ARGS__)
    ENUM("f: 'a': k is 3, must be A, BC or D", "a", "k", 3, "A BC D");
    ENUM("f: k is -1, must be A or BC", NULL, "k", -1, "A BC");
    ENUM("f: k is 1, must be A", NULL, "k", 1, "A");
#undef ENUM
    for (int i = 0; i < 3; i++) OK(mt_check_enum(ref.ctx, "f", NULL, "k", i, "A BC D"));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "k is 6",
                   mt_check_enum(ref.ctx, "f", NULL, "k", MT_ACTIVATION_COUNT, MT_ACTIVATION_WORDS));
#define FLOAT(expected, ...) CHECK_REFUSED(MT_ERR_ARGUMENT, expected, mt_check_float, "f", "a", "x", __VA_ARGS__)
    FLOAT("f: 'a': x is -1.4013e-45, must be at least 0 and finite", -1e-45f, MT_FLOAT_AT_LEAST_0);
    FLOAT("f: 'a': x is 0, must be above 0 and finite", 0.0f, MT_FLOAT_ABOVE_0);
    FLOAT("f: 'a': x is 1, must be at least 0 and below 1", 1.0f, MT_FLOAT_PROBABILITY);
    FLOAT("f: 'a': x is -0.5, must be at least 0 and below 1", -0.5f, MT_FLOAT_PROBABILITY);
    FLOAT("f: 'a': x is inf, must be finite", INFINITY, MT_FLOAT_FINITE);
    FLOAT("f: 'a': mt_float_range is 4, must be from 0 to 3", 0.0f, (mt_float_range)4);
#undef FLOAT
    for (int range = MT_FLOAT_FINITE; range <= MT_FLOAT_PROBABILITY; range++)
        for (int i = 0; i < 3; i++)
            ASSERT_REFUSED(MT_ERR_ARGUMENT, "f: x is ",
                           mt_check_float(ref.ctx, "f", NULL, "x", infinite[i], (mt_float_range)range));
    OK(mt_check_float(ref.ctx, "f", NULL, "x", -FLT_MAX, MT_FLOAT_FINITE));
    OK(mt_check_float(ref.ctx, "f", NULL, "x", -0.0f, MT_FLOAT_AT_LEAST_0));
    OK(mt_check_float(ref.ctx, "f", NULL, "x", FLT_MAX, MT_FLOAT_AT_LEAST_0));
    OK(mt_check_float(ref.ctx, "f", NULL, "x", 1e-45f, MT_FLOAT_ABOVE_0));
    OK(mt_check_float(ref.ctx, "f", NULL, "x", 0.0f, MT_FLOAT_PROBABILITY));
    OK(mt_check_float(ref.ctx, "f", NULL, "x", 0.99999994f, MT_FLOAT_PROBABILITY));
#define WORD(expected, words, value) (mt_enum_word(words, value, text), assert_string_equal(text, expected))
    WORD("A", "A BC D", 0);
    WORD("BC", "A BC D", 1);
    WORD("D", "A BC D", 2);
    WORD("3", "A BC D", 3);
    WORD("-1", "A BC D", -1);
    WORD("abcdefghijklmnopqrstuvwxyzabcde", "abcdefghijklmnopqrstuvwxyzabcdefgh", 0);
#undef WORD
}

static void test_bad_attention(void **state) {
    mt_context *ctx = ref.ctx;
    mt_attention_desc good = attention(2, 3, 2, 2, 4, MT_MASK_CAUSAL), s = good;
    mt_tensor qkv = ref_random(6, 32, 0, 1, 0), out = ref_random(6, 16, 0, 1, 0), lse = ref_random(4, 6, 0, 1, 0),
              dout = ref_random(6, 16, 0, 1, 0);
    mt_tensor dqkv = ref_random(6, 32, 0, 1, 0), none = mt_none();
    int32_t lengths[2] = {3, 4};
    (void)state;
#define FORWARD(s, qkv, out, lse) mt_attention_forward(ctx, s, qkv, out, lse)
#define WITH(field, value, status, words)                                                                              \
    do {                                                                                                               \
        s = good;                                                                                                      \
        s.field = value;                                                                                               \
        ASSERT_REFUSED(status, words, FORWARD(&s, qkv, out, lse));                                                     \
        ASSERT_REFUSED(status, words, mt_attention_backward(ctx, &s, qkv, out, lse, dout, dqkv));                      \
    } while (0)
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "desc is NULL", FORWARD(NULL, qkv, out, lse));
    WITH(batch, -2, MT_ERR_SHAPE, ": batch is -2, must be at least 0");
    WITH(batch, 3, MT_ERR_SHAPE, "qkv is [6, 32], must be [9, 32]");
    WITH(seq, 0, MT_ERR_SHAPE, ": seq is 0, must be from 1 to 2147483647");
    WITH(groups, 0, MT_ERR_SHAPE, ": groups is 0, must be at least 1");
    WITH(groups, INT64_MAX / 3, MT_ERR_SHAPE, "have too many columns");
    WITH(heads_per_group, 0, MT_ERR_SHAPE, "heads_per_group is 0, must be from 1 to 9223372036854775805");
    WITH(heads_per_group, INT64_MAX, MT_ERR_SHAPE, "heads_per_group is 9223372036854775807, must be from 1 to");
    WITH(head_dim, 0, MT_ERR_SHAPE, ": head_dim is 0, must be at least 1");
    WITH(head_dim, 5, MT_ERR_SHAPE, "qkv is [6, 32], must be [6, 40]");
    WITH(scores.mask, (mt_mask)2, MT_ERR_ARGUMENT,
         ": scores.mask is 2, must be MT_MASK_CAUSAL or MT_MASK_BIDIRECTIONAL");
    WITH(qkv_layout, (mt_qkv_layout)3, MT_ERR_ARGUMENT,
         ": qkv_layout is 3, must be MT_QKV_PER_GROUP, MT_QKV_CONCATENATED or MT_QKV_SEPARATE");
    WITH(qkv_layout, (mt_qkv_layout)-1, MT_ERR_ARGUMENT,
         ": qkv_layout is -1, must be MT_QKV_PER_GROUP, MT_QKV_CONCATENATED or MT_QKV_SEPARATE");
    WITH(scores.scale, NAN, MT_ERR_ARGUMENT, "scale is ");
    WITH(dropout.p, 1.0f, MT_ERR_ARGUMENT, "dropout.p is 1");
    WITH(dropout.p, 0.5f, MT_ERR_SHAPE, "not inside a tensor of 0 columns");
    WITH(lengths, lengths, MT_ERR_DATA, "lengths[1] is 4, must be in [0, 3]");
    lengths[1] = 3;
    lengths[0] = -1;
    WITH(lengths, lengths, MT_ERR_DATA, "lengths[0] is -1");
    good.dropout.p = 0.5f;
    good.dropout.at.global_cols = 4;
    WITH(dropout.at.first_row, INT64_MAX / 16, MT_ERR_SHAPE, "a probability has no 64-bit element number");
    good.dropout.p = 0;
    ASSERT_REFUSED(MT_ERR_SHAPE, "out is [6, 32], must be [6, 16]", FORWARD(&good, qkv, dqkv, lse));
    ASSERT_REFUSED(MT_ERR_SHAPE, "lse is [6, 16], must be [4, 6]", FORWARD(&good, qkv, out, dout));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "out [6, 16] and qkv [6, 32] overlap",
                   FORWARD(&good, qkv, mt_tensor_cols(qkv, 0, 16), lse));
    assert_int_equal(mt_attention_forward(NULL, &good, qkv, out, lse), MT_ERR_ARGUMENT);
#define BACKWARD(out, lse, dout, dqkv) mt_attention_backward(ctx, &good, qkv, out, lse, dout, dqkv)
    ASSERT_REFUSED(MT_ERR_SHAPE, "lse is [0, 0], must be [4, 6]", BACKWARD(out, none, dout, dqkv));
    ASSERT_REFUSED(MT_ERR_SHAPE, "dout is [6, 32]", BACKWARD(out, lse, dqkv, dqkv));
    ASSERT_REFUSED(MT_ERR_SHAPE, "dqkv is [6, 16]", BACKWARD(out, lse, dout, dout));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "dout [6, 16] and out [6, 16] overlap", BACKWARD(out, lse, out, dqkv));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "dqkv [6, 32] and qkv [6, 32] overlap", BACKWARD(out, lse, dout, qkv));
    assert_int_equal(mt_attention_backward(NULL, &good, qkv, out, lse, dout, dqkv), MT_ERR_ARGUMENT);
#undef FORWARD
#undef WITH
#undef BACKWARD
}

static void test_bad_rotary(void **state) {
    static const int32_t ends[] = {0, 2, 5};
    mt_context *ctx = ref.ctx;
    mt_attention_desc s = attention(2, 3, 2, 2, 4, MT_MASK_CAUSAL), odd = attention(2, 3, 2, 2, 3, MT_MASK_CAUSAL);
    mt_tensor qkv = ref_random(6, 32, 0, 1, 0), table = ref_random(3, 4, 0, 1, 0), wrong = ref_random(3, 6, 0, 1, 0),
              odd_qkv = ref_random(6, 24, 0, 1, 0);
    (void)state;
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_rotary_table: the number of columns is 3, must be even",
                   mt_rotary_table(ctx, 10, mt_tensor_cols(table, 0, 3)));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "base is 0, must be above 0 and finite", mt_rotary_table(ctx, 0, table));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "base is inf, must be above 0 and finite", mt_rotary_table(ctx, INFINITY, table));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_rotary_forward: table is [3, 6], must be [3, 4]",
                   mt_rotary_forward(ctx, &s, wrong, qkv));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_rotary_backward: table is [3, 6], must be [3, 4]",
                   mt_rotary_backward(ctx, &s, wrong, qkv));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_rotary_forward: qkv is [3, 4], must be [6, 32]",
                   mt_rotary_forward(ctx, &s, table, table));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_rotary_backward: dqkv is [3, 4]", mt_rotary_backward(ctx, &s, table, table));
    ASSERT_REFUSED(MT_ERR_SHAPE, "head_dim is 3, must be even", mt_rotary_forward(ctx, &odd, table, odd_qkv));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "desc is NULL", mt_rotary_backward(ctx, NULL, table, qkv));
    s.qkv_layout = (mt_qkv_layout)3;
    ASSERT_REFUSED(
        MT_ERR_ARGUMENT,
        "mt_rotary_forward: qkv_layout is 3, must be MT_QKV_PER_GROUP, MT_QKV_CONCATENATED or MT_QKV_SEPARATE",
        mt_rotary_forward(ctx, &s, table, qkv));
    s.qkv_layout = MT_QKV_PER_GROUP;
    s.scores.rotary_form = (mt_rotary_form)2;
    ASSERT_REFUSED(MT_ERR_ARGUMENT,
                   "mt_rotary_forward: scores.rotary_form is 2, must be MT_ROTARY_HALVES or MT_ROTARY_PAIRS",
                   mt_rotary_forward(ctx, &s, table, qkv));
    s.scores.rotary_form = MT_ROTARY_PAIRS;
    s.scores.rotary_dim = 6;
    ASSERT_REFUSED(MT_ERR_SHAPE, "scores.rotary_dim is 6, must be from 0 to 4", mt_rotary_forward(ctx, &s, table, qkv));
    s.scores.rotary_dim = -2;
    ASSERT_REFUSED(MT_ERR_SHAPE, "scores.rotary_dim is -2, must be from 0 to 4",
                   mt_rotary_backward(ctx, &s, table, qkv));
    s.scores.rotary_dim = 3;
    ASSERT_REFUSED(MT_ERR_SHAPE, "scores.rotary_dim is 3, must be even", mt_rotary_forward(ctx, &s, table, qkv));
    s.scores.rotary_dim = 2;
    ASSERT_REFUSED(MT_ERR_SHAPE, "table is [3, 4], must be [3, 2]", mt_rotary_forward(ctx, &s, table, qkv));
    s.scores.rotary_dim = 0;
    s.cu_seqlens = ends, s.documents = 2;
    ASSERT_REFUSED(MT_ERR_DATA,
                   "mt_rotary_forward: cu_seqlens[2] is 5; the numbers must ascend from 0 to 6, the tokens",
                   mt_rotary_forward(ctx, &s, table, qkv));
    s.documents = 0;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_rotary_backward: documents is 0", mt_rotary_backward(ctx, &s, table, qkv));
    s.documents = 2, s.kv_seq = 4;
    ASSERT_REFUSED(MT_ERR_SHAPE, "with cu_seqlens, kv_seq 4 must be seq 3", mt_rotary_forward(ctx, &s, table, qkv));
    s.cu_seqlens = NULL, s.documents = 0;
    OK(mt_rotary_forward(ctx, &s, table, qkv)); /* kv_seq is not read */
    assert_int_equal(mt_rotary_table(NULL, 10, table), MT_ERR_ARGUMENT);
    assert_int_equal(mt_rotary_forward(NULL, &s, table, qkv), MT_ERR_ARGUMENT);
}

static void test_bad_embedding(void **state) {
    mt_context *ctx = ref.ctx;
    mt_tensor table = ref_random(5, 4, 0, 1, 0), y = ref_random(3, 4, 0, 1, 0), wide = ref_random(3, 6, 0, 1, 0);
    int32_t ids[3] = {0, 1, 2};
    (void)state;
    ASSERT_REFUSED(MT_ERR_SHAPE, "table is [5, 4], y is [3, 6]: widths differ",
                   mt_embedding_forward(ctx, table, 0, ids, 0, wide));
    ASSERT_REFUSED(MT_ERR_SHAPE, "dtable is [5, 4], dy is [3, 6]: widths",
                   mt_embedding_backward(ctx, wide, 0, ids, table));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "first_row is -1", mt_embedding_forward(ctx, table, -1, ids, 0, y));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "first_row is -1", mt_embedding_backward(ctx, y, -1, ids, table));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "ids is NULL, must hold 3", mt_embedding_forward(ctx, table, 0, NULL, 0, y));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "ids is NULL, must hold 3", mt_embedding_backward(ctx, y, 0, NULL, table));
    ASSERT_REFUSED(MT_ERR_DTYPE, "table is i32", mt_embedding_forward(ctx, with_dtype(table, MT_I32), 0, ids, 0, y));
    assert_int_equal(mt_embedding_forward(NULL, table, 0, ids, 0, y), MT_ERR_ARGUMENT);
    assert_int_equal(mt_embedding_backward(NULL, y, 0, ids, table), MT_ERR_ARGUMENT);
}

static void test_bad_cross_entropy(void **state) {
    mt_context *ctx = ref.ctx;
    mt_tensor x = ref_random(3, 5, 0, 1, 0), stats = ref_random(3, 4, 0, 1, 0), loss = ref_random(1, 3, 0, 1, 0),
              lse = ref_random(2, 3, 0, 1, 0);
    mt_tensor four = ref_random(1, 4, 0, 1, 0);
    mt_cross_entropy_shard_desc good = {5, 0, 0, 0}, s;
    int32_t t[3] = {0, 1, 2};
    (void)state;
#define WITH(field, value, status, words)                                                                              \
    do {                                                                                                               \
        s = good;                                                                                                      \
        s.field = value;                                                                                               \
        ASSERT_REFUSED(status, words, mt_cross_entropy_stats(ctx, &s, x, t, stats));                                   \
        ASSERT_REFUSED(status, words, mt_cross_entropy_combine(ctx, &s, stats, 1, t, loss, lse));                      \
        ASSERT_REFUSED(status, words, mt_cross_entropy_backward(ctx, &s, x, t, lse, mt_none(), 1));                    \
    } while (0)
    WITH(vocab, 0, MT_ERR_SHAPE, ": vocab is 0, must be at least 1");
    WITH(first_col, -1, MT_ERR_SHAPE, ": first_col is -1, must be at least 0");
    WITH(label_smoothing, 1, MT_ERR_ARGUMENT, ": label_smoothing is 1, must be at least 0 and below 1");
    WITH(label_smoothing, -0.5f, MT_ERR_ARGUMENT, "label_smoothing is -0.5");
    WITH(label_smoothing, NAN, MT_ERR_ARGUMENT, "label_smoothing is ");
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "desc is NULL", mt_cross_entropy_stats(ctx, NULL, x, t, stats));
    ASSERT_REFUSED(MT_ERR_SHAPE, "stats is [1, 4], must be [3, 4]", mt_cross_entropy_stats(ctx, &good, x, t, four));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "targets is NULL", mt_cross_entropy_stats(ctx, &good, x, NULL, stats));
    ASSERT_REFUSED(MT_ERR_DTYPE, "logits is u8", mt_cross_entropy_stats(ctx, &good, with_dtype(x, MT_U8), t, stats));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "shards is 0", mt_cross_entropy_combine(ctx, &good, stats, 0, t, loss, lse));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "shards is 1025, must be 1 to 1024",
                   mt_cross_entropy_combine(ctx, &good, stats, 1025, t, loss, lse));
    ASSERT_REFUSED(MT_ERR_SHAPE, "gathered is [3, 4], must be [6, 4]",
                   mt_cross_entropy_combine(ctx, &good, stats, 2, t, loss, lse));
    ASSERT_REFUSED(MT_ERR_SHAPE, "lse is [1, 4], must be [2, 3]",
                   mt_cross_entropy_combine(ctx, &good, stats, 1, t, loss, four));
    ASSERT_REFUSED(MT_ERR_SHAPE, "loss is [3, 5], must be [1, 5]",
                   mt_cross_entropy_combine(ctx, &good, stats, 1, t, x, lse));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "targets is NULL", mt_cross_entropy_combine(ctx, &good, stats, 1, NULL, loss, lse));
    ASSERT_REFUSED(MT_ERR_SHAPE, "lse is [1, 4], must be [2, 3]",
                   mt_cross_entropy_backward(ctx, &good, x, t, four, mt_none(), 1));
    ASSERT_REFUSED(MT_ERR_SHAPE, "dloss is [1, 4], must be [1, 3]",
                   mt_cross_entropy_backward(ctx, &good, x, t, lse, four, 1));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "targets is NULL",
                   mt_cross_entropy_backward(ctx, &good, x, NULL, lse, mt_none(), 1));
    assert_int_equal(mt_cross_entropy_stats(NULL, &good, x, t, stats), MT_ERR_ARGUMENT);
    assert_int_equal(mt_cross_entropy_combine(NULL, &good, stats, 1, t, loss, lse), MT_ERR_ARGUMENT);
    assert_int_equal(mt_cross_entropy_backward(NULL, &good, x, t, lse, mt_none(), 1), MT_ERR_ARGUMENT);
#undef WITH
}

static void test_bad_adamw(void **state) {
    mt_context *ctx = ref.ctx;
    mt_tensor p = ref_random(3, 5, 0, 1, 0), g = ref_random(3, 5, 0, 1, 0), m = ref_random(3, 5, 0, 1, 0),
              v = ref_random(3, 5, 0, 1, 0), o = ref_random(3, 4, 0, 1, 0), o5 = ref_random(3, 5, 0, 1, 0);
    mt_tensor half = with_dtype(p, MT_BF16);
    mt_random at = {1, 2, 0, 0, 4, NULL};
    mt_adamw good = {1, 0.9f, 0.9f, 1e-8f, 0, 1, 1, NULL}, h;
    (void)state;
#define WITH(field, value, words)                                                                                      \
    do {                                                                                                               \
        h = good;                                                                                                      \
        h.field = value;                                                                                               \
        ASSERT_REFUSED(MT_ERR_ARGUMENT, words, mt_adamw_step(ctx, &h, p, mt_none(), g, m, v));                         \
        ASSERT_REFUSED(MT_ERR_ARGUMENT, words, mt_adamw_check(ctx, &h));                                               \
    } while (0)
    OK(mt_adamw_check(ctx, &good));
    WITH(step, 0, "step is 0, counts from 1");
    WITH(beta1, 1, ": beta1 is 1, must be at least 0 and below 1");
    WITH(beta1, -0.5f, "beta1 is -0.5");
    WITH(beta2, 1.5f, ": beta2 is 1.5, must be at least 0 and below 1");
    WITH(beta2, NAN, "beta2 is ");
    WITH(eps, -1, ": eps is -1, must be at least 0 and finite");
    WITH(lr, NAN, "lr is ");
    WITH(weight_decay, INFINITY, "weight_decay is inf");
    WITH(grad_scale, NAN, "grad_scale is ");
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "hyper is NULL", mt_adamw_step(ctx, NULL, p, mt_none(), g, m, v));
    ASSERT_REFUSED(MT_ERR_SHAPE, "grad is [3, 4], must be [3, 5]", mt_adamw_step(ctx, &good, p, mt_none(), o, m, v));
    ASSERT_REFUSED(MT_ERR_SHAPE, "m is [3, 4], must be [3, 5]", mt_adamw_step(ctx, &good, p, mt_none(), g, o, v));
    ASSERT_REFUSED(MT_ERR_SHAPE, "v is [3, 4], must be [3, 5]", mt_adamw_step(ctx, &good, p, mt_none(), g, m, o));
    ASSERT_REFUSED(MT_ERR_DTYPE, "param is i32", mt_adamw_step(ctx, &good, with_dtype(p, MT_I32), mt_none(), g, m, v));
    ASSERT_REFUSED(MT_ERR_DTYPE, "master is f16", mt_adamw_step(ctx, &good, half, with_dtype(g, MT_F16), g, m, v));
    ASSERT_REFUSED(MT_ERR_SHAPE, "master is [3, 4], must be [3, 5]", mt_adamw_step(ctx, &good, half, o, g, m, v));
    ASSERT_REFUSED(MT_ERR_DTYPE, "param is f32 and has a master", mt_adamw_step(ctx, &good, p, o5, g, m, v));
    h = good;
    h.stochastic_rounding = &at;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "is bf16 and has a master", mt_adamw_step(ctx, &h, half, o5, g, m, v));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "is f32 and has none", mt_adamw_step(ctx, &h, p, mt_none(), g, m, v));
    ASSERT_REFUSED(MT_ERR_SHAPE, "4 columns", mt_adamw_step(ctx, &h, half, mt_none(), g, m, v));
    assert_int_equal(mt_adamw_step(NULL, &good, p, mt_none(), g, m, v), MT_ERR_ARGUMENT);
#undef WITH
}

/* ---- helpers for authors of operators and blocks ----------------------------------------------------------------- */

static void test_args(void **state) {
    mt_context *ctx = ref.ctx;
    mt_tensor x = ref_random(3, 5, 2, 1, 0), bias = mt_none();
    mt_arg args[] = {{"x", &x, 3, 5, MT_ARG_FLOAT, MT_ARG_IN_OUT},
                     {"bias", &bias, 1, 5, MT_ARG_F32, MT_ARG_IN | MT_ARG_OPTIONAL}};
    mt_tensor good = x, row = ref_random(1, 5, 0, 1, 0);
    (void)state;
    OK(mt_args_check(ctx, "f", args, 2));
    bias = row;
    OK(mt_args_check(ctx, "f", args, 2));
    x = with_dtype(good, MT_F16);
    OK(mt_args_check(ctx, "f", args, 2));
    bias = with_dtype(row, MT_BF16);
    ASSERT_REFUSED(MT_ERR_DTYPE, "f: bias is bf16, must be f32", mt_args_check(ctx, "f", args, 2));
    bias = x = with_dtype(good, MT_I32);
    ASSERT_REFUSED(MT_ERR_DTYPE, "f: x is i32, must be f32, bf16 or f16", mt_args_check(ctx, "f", args, 2));
    args[0].type = MT_ARG_ANY;
    OK(mt_args_check(ctx, "f", args, 1));
    x = good;
    ASSERT_REFUSED(MT_ERR_DTYPE, "f: bias is i32", mt_args_check(ctx, "f", args, 2));
    bias = good;
    ASSERT_REFUSED(MT_ERR_SHAPE, "f: bias is [3, 5], must be [1, 5]", mt_args_check(ctx, "f", args, 2));
    args[1].use = MT_ARG_IN;
    bias = mt_tensor_f32(NULL, 1, 5);
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "f: bias is [1, 5] but its data is NULL", mt_args_check(ctx, "f", args, 2));
    x.ld = 4;
    ASSERT_REFUSED(MT_ERR_SHAPE, "f: x is [3, 5] with ld 4, which is not a valid shape",
                   mt_args_check(ctx, "f", args, 2));
    assert_int_equal(mt_args_check(NULL, "f", args, 2), MT_ERR_ARGUMENT);
    OK(mt_tensor_check(ctx, "g", "w", good, MT_ARG_F32, 3, 5));
    ASSERT_REFUSED(MT_ERR_SHAPE, "g: w is [3, 5], must be [5, 3]",
                   mt_tensor_check(ctx, "g", "w", good, MT_ARG_FLOAT, 5, 3));
    assert_int_equal(mt_tensor_check(NULL, "g", "w", good, MT_ARG_ANY, 3, 5), MT_ERR_ARGUMENT);
}

static void test_hash_element(void **state) {
    mt_tensor x = ref_random(3, 5, 2, 1, 0);
    uint64_t hash = 0, want = 0;
    uint32_t bits;
    int i;
    (void)state;
    for (i = 0; i < 15; i++) {
        memcpy(&bits, ref_row(x, i / 5) + i % 5, sizeof bits);
        want += mt_hash_element((uint64_t)(7 + i / 5) * 9 + (uint64_t)(2 + i % 5), bits);
    }
    OK(mt_hash(ref.ctx, x, 7, 2, 9, &hash));
    assert_true(hash == want);
    OK(mt_hash_add(ref.ctx, mt_tensor_make(x.data, MT_I32, 0, 5), 7, 2, 9, &hash));
    x.dtype = MT_I32;
    OK(mt_hash_add(ref.ctx, x, 7, 2, 9, &hash));
    assert_true(hash == 2 * want);
    assert_true(mt_hash_element(1, 2) != mt_hash_element(2, 1));
    assert_int_equal(mt_ignore_index(0), -100);
    assert_int_equal(mt_ignore_index(5), 5);
    assert_int_equal(mt_ignore_index(MT_ZERO), 0);
    assert_int_equal(mt_ignore_index(INT32_MAX), INT32_MAX);
}

/* ---- meta contexts ---------------------------------------------------------------------------------------------- */

/* On a meta context, every operator succeeds with addresses that must not be dereferenced, and refuses what it refuses
   on the CPU. */
static mt_context *meta_context(void) {
    mt_context_desc d;
    mt_context *c = NULL;
    memset(&d, 0, sizeof d);
    d.device = MT_DEVICE_META;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &c));
    return c;
}

#define NEW(t, dtype, rows, cols) ASSERT_STATUS(c, MT_SUCCESS, mt_arena_tensor(c, dtype, rows, cols, &t))
#define FINE(call) ASSERT_STATUS(c, MT_SUCCESS, call)

/* Elementwise operators, those of linear layers, and sums. */
static void test_meta_of_products(void **state) {
    mt_context *c = meta_context();
    mt_tensor x, y, z, half, row, drow, col, dcol, weight;
    uint64_t hash = 5;
    size_t used;
    (void)state;
    NEW(x, MT_F32, 6, 16);
    NEW(y, MT_F32, 6, 16);
    NEW(z, MT_F32, 6, 16);
    NEW(half, MT_BF16, 6, 16);
    NEW(row, MT_F32, 1, 16);
    NEW(col, MT_F32, 6, 1);
    NEW(drow, MT_F32, 1, 16);
    NEW(dcol, MT_F32, 6, 1);
    NEW(weight, MT_F32, 16, 16);
    used = mt_arena_mark(c);
    FINE(mt_convert(c, x, half));
    FINE(mt_hash(c, half, 0, 0, 16, &hash));
    assert_true(hash == 5);
    FINE(mt_tree_sum(c, x));
    FINE(mt_multiply(c, x, half, y));
    FINE(mt_multiply_row_forward(c, x, row, y));
    FINE(mt_multiply_row_backward(c, half, row, x, y, drow));
    FINE(mt_multiply_col_forward(c, x, col, y));
    FINE(mt_multiply_col_backward(c, x, col, half, y, dcol));
    FINE(mt_sigmoid_forward(c, x, half));
    FINE(mt_sigmoid_backward(c, x, half, y));
    FINE(mt_silu_forward(c, half, half));
    FINE(mt_silu_backward(c, x, y, y));
    FINE(mt_sigmoid_gate_forward(c, x, half, y));
    FINE(mt_sigmoid_gate_backward(c, x, half, y, z, y));
    FINE(mt_linear_forward(c, x, weight, row, half));
    FINE(mt_linear_activation_forward(c, MT_GELU_ERF, half, weight, row, y, z));
    FINE(mt_linear_activation_backward(c, MT_GELU_ERF, half, weight, y, z, row));
    FINE(mt_linear_gradients(c, half, x, weight, row));
    ASSERT_STATUS(c, MT_ERR_SHAPE, mt_multiply(c, x, row, y));
    ASSERT_STATUS(c, MT_ERR_DTYPE, mt_multiply_row_backward(c, x, row, x, y, mt_tensor_rows(half, 0, 1)));
    ASSERT_STATUS(c, MT_ERR_DTYPE, mt_linear_gradients(c, x, x, mt_tensor_rows(half, 0, 6), mt_none()));
    assert_int_equal(mt_arena_mark(c), used);
    mt_context_destroy(c);
}

/* Memory, a product, biases, activations, norms, dropout and the optimizer. */
static void test_meta(void **state) {
    mt_context *c = meta_context();
    mt_tensor x, y, z, row, st, one;
    mt_dropout off;
    mt_random at = {1, 2, 0, 0, 16, NULL};
    mt_adamw h = {1, 0.9f, 0.9f, 1e-8f, 0, 1, 1, NULL};
    float host[96];
    size_t used;
    (void)state;
    memset(&off, 0, sizeof off);
    NEW(x, MT_F32, 6, 16);
    NEW(y, MT_F32, 6, 16);
    NEW(z, MT_F32, 6, 16);
    NEW(row, MT_F32, 1, 16);
    NEW(st, MT_F32, 6, 2);
    NEW(one, MT_F32, 1, 1);
    used = mt_arena_mark(c);
    FINE(mt_fill(c, x, 1));
    FINE(mt_copy(c, x, y));
    FINE(mt_add(c, x, y, z));
    FINE(mt_sum(c, x, one));
    FINE(mt_sum_of_squares(c, x, one));
    FINE(mt_upload(c, host, x));
    host[0] = host[95] = 1;
    FINE(mt_download(c, x, host));
    assert_true(host[0] == 0 && host[95] == 0);
    FINE(mt_gemm(c, MT_NO_TRANS, MT_TRANS, 1, x, y, 0, mt_tensor_f32((float *)z.data, 6, 6)));
    FINE(mt_bias_forward(c, x, row));
    FINE(mt_bias_backward(c, x, row));
    FINE(mt_activation_forward(c, MT_GELU_ERF, x, row, y));
    FINE(mt_activation_backward(c, MT_GELU_ERF, x, y, x, row));
    FINE(mt_norm_forward(c, MT_LAYER_NORM, x, row, row, 1e-5f, y, st));
    FINE(mt_norm_backward(c, MT_LAYER_NORM, x, row, st, y, z, z, row, row));
    FINE(mt_random_normal(c, x, 1, at));
    FINE(mt_bias_dropout_add_forward(c, x, row, y, off, z));
    FINE(mt_bias_dropout_add_backward(c, x, off, x, row));
    FINE(mt_adamw_step(c, &h, x, mt_none(), y, z, x));
    ASSERT_STATUS(c, MT_ERR_SHAPE, mt_add(c, x, row, z));
    assert_int_equal(mt_arena_mark(c), used);
    mt_context_destroy(c);
}

/* Attention, rotary embeddings, ids, and the cross-entropy. */
static void test_meta_of_sequences(void **state) {
    mt_context *c = meta_context();
    mt_tensor x, y, z, logits, loss, qkv, out, lse, table;
    mt_attention_desc s = attention(2, 3, 2, 2, 4, MT_MASK_CAUSAL);
    mt_cross_entropy_shard_desc ce = {32, 0, 0, 0};
    /* volatile: otherwise compilers warn about the address */
    int32_t *volatile no_memory = (int32_t *)(uintptr_t)64, *ids = no_memory;
    size_t used;
    (void)state;
    s.lengths = ids;
    NEW(x, MT_F32, 6, 16);
    NEW(y, MT_F32, 6, 16);
    NEW(z, MT_F32, 6, 16);
    NEW(logits, MT_F32, 6, 32);
    NEW(loss, MT_F32, 1, 6);
    NEW(qkv, MT_F32, 6, 32);
    NEW(out, MT_F32, 6, 16);
    NEW(lse, MT_F32, 4, 6);
    NEW(table, MT_F32, 3, 4);
    used = mt_arena_mark(c);
    FINE(mt_attention_forward(c, &s, qkv, out, lse));
    FINE(mt_attention_backward(c, &s, qkv, out, lse, x, logits));
    FINE(mt_rotary_table(c, 100, table));
    FINE(mt_rotary_forward(c, &s, table, qkv));
    FINE(mt_rotary_backward(c, &s, table, qkv));
    FINE(mt_ids_check(c, "id", ids, 6, 5, 0));
    FINE(mt_position_ids(c, 0, 3, NULL, 0, ids, 6));
    FINE(mt_position_ids(c, 0, 3, ids, 2, ids, 6));
    FINE(mt_embedding_forward(c, x, 0, ids, 0, y));
    FINE(mt_embedding_backward(c, y, 0, ids, x));
    FINE(mt_cross_entropy_stats(c, &ce, logits, ids, mt_tensor_f32((float *)z.data, 6, 4)));
    FINE(mt_cross_entropy_combine(c, &ce, mt_tensor_f32((float *)z.data, 6, 4), 1, ids, loss,
                                  mt_tensor_rows(lse, 0, 2)));
    FINE(mt_cross_entropy_backward(c, &ce, logits, ids, mt_tensor_rows(lse, 0, 2), mt_none(), 1));
    FINE(mt_cross_entropy_forward_backward(c, &ce, logits, ids, mt_none(), 1, loss));
    ASSERT_STATUS(c, MT_ERR_SHAPE, mt_attention_forward(c, &s, x, out, lse));
    assert_int_equal(mt_arena_mark(c), used);
    mt_context_destroy(c);
}
#undef NEW
#undef FINE

/* ---- element-wise operators -------------------------------------------------------------------------------------- */

/* Each operator's definition, in double. */
static double pointwise_value(int kind, double x, double other) {
    double s = 1 / (1 + exp(-x));
    return kind < 3 ? x * other : kind == 3 ? s : kind == 4 ? x * s : other * s;
}

static mt_status pointwise_forward(int kind, mt_tensor x, mt_tensor other, mt_tensor y) {
    switch (kind) {
    case 0: return mt_multiply(ref.ctx, x, other, y);
    case 1: return mt_multiply_row_forward(ref.ctx, x, other, y);
    case 2: return mt_multiply_col_forward(ref.ctx, x, other, y);
    case 3: return mt_sigmoid_forward(ref.ctx, x, y);
    case 4: return mt_silu_forward(ref.ctx, x, y);
    default: return mt_sigmoid_gate_forward(ref.ctx, x, other, y);
    }
}

typedef struct pointwise_case {
    int kind;
    mt_dtype dtype;
    mt_tensor whole[5], x, other, y, dy, dx;   /* views of `whole`: unaligned, with gaps between the rows */
    mt_tensor at, factor, up, out, grad, sums; /* in f32, without gaps; `sums` holds the sums of drow or dcol */
} pointwise_case;

static mt_tensor pointwise_noise(mt_tensor view, float scale, uint64_t *seed) {
    mt_tensor f;
    OK(mt_arena_tensor(ref.ctx, MT_F32, view.rows, view.cols, &f));
    for (int64_t i = 0; i < view.rows * view.cols; i++) ((float *)f.data)[i] = scale * test_float(seed);
    OK(mt_convert(ref.ctx, f, view));
    OK(mt_convert(ref.ctx, view, f)); /* the rounded values */
    return f;
}

static void pointwise_create(pointwise_case *c, int kind, mt_dtype dtype, int64_t rows, int64_t cols) {
    static const float extremes[] = {30, -30, 90, -90};
    uint64_t seed = 3 + (uint64_t)kind;
    c->kind = kind;
    c->dtype = dtype;
    for (int i = 0; i < 5; i++) {
        OK(mt_arena_tensor(ref.ctx, dtype, rows, cols + 2, &c->whole[i]));
        OK(mt_fill(ref.ctx, c->whole[i], 7.0f));
    }
    c->x = mt_tensor_cols(c->whole[0], 1, cols);
    c->other = mt_tensor_cols(mt_tensor_rows(c->whole[1], 0, kind == 1 ? 1 : rows), 1, kind == 2 ? 1 : cols);
    c->y = mt_tensor_cols(c->whole[2], 1, cols);
    c->dy = mt_tensor_cols(c->whole[3], 1, cols);
    c->dx = mt_tensor_cols(c->whole[4], 1, cols);
    c->at = pointwise_noise(c->x, 4, &seed);
    for (int i = 0; i < 4 && i < rows * cols; i++) ((float *)c->at.data)[i] = extremes[i];
    OK(mt_convert(ref.ctx, c->at, c->x));
    c->factor = pointwise_noise(c->other, 1, &seed);
    c->up = pointwise_noise(c->dy, 1, &seed);
    OK(mt_arena_tensor(ref.ctx, MT_F32, rows, cols, &c->out));
    OK(mt_arena_tensor(ref.ctx, MT_F32, rows, cols, &c->grad));
    OK(mt_arena_tensor(ref.ctx, MT_F32, kind == 1 ? 1 : rows, kind == 2 ? 1 : cols, &c->sums));
}

/* Computes dx, and in c->sums the value of drow, dcol (of the same type as the tensors) or the gradient of the tensor
   that a gate scales. sums == 0: without drow or dcol. */
static void pointwise_backward(pointwise_case *c, mt_tensor x, mt_tensor dy, mt_tensor dx, int sums) {
    mt_tensor dcol = mt_tensor_cols(c->whole[2], 0, 1), scaled = mt_tensor_cols(c->whole[2], 0, c->x.cols);
    OK(mt_fill(ref.ctx, c->sums, 0.5f)); /* a parameter's gradient is accumulated, an activation's is overwritten */
    if (c->kind == 0) OK(mt_multiply(ref.ctx, dy, c->other, dx));
    if (c->kind == 1) OK(mt_multiply_row_backward(ref.ctx, x, c->other, dy, dx, sums ? c->sums : mt_none()));
    if (c->kind == 2) OK(mt_multiply_col_backward(ref.ctx, x, c->other, dy, dx, sums ? dcol : mt_none()));
    if (c->kind == 2 && sums) OK(mt_convert(ref.ctx, dcol, c->sums));
    if (c->kind == 3) OK(mt_sigmoid_backward(ref.ctx, x, dy, dx));
    if (c->kind == 4) OK(mt_silu_backward(ref.ctx, x, dy, dx));
    if (c->kind == 5) OK(mt_sigmoid_gate_backward(ref.ctx, x, c->other, dy, dx, scaled));
    if (c->kind == 5) OK(mt_convert(ref.ctx, scaled, c->sums));
}

/* The error of the f32 result, and half a unit in the last place for rounding it once. */
static double pointwise_digits(mt_dtype dtype) {
    return 1e-6 + (dtype == MT_F32 ? 0 : dtype == MT_BF16 ? 1.0 / 256 : 1.0 / 2048);
}

/* The same where the result is zero or subnormal in its format. */
static double pointwise_least(mt_dtype dtype) { return dtype == MT_F16 ? 3e-8 : 1e-30; }

/* Values against double precision, gradients against central differences of it. */
static void pointwise_values(const pointwise_case *c) {
    const float *at = c->at.data, *factor = c->factor.data, *up = c->up.data, *out = c->out.data, *grad = c->grad.data;
    double digits = pointwise_digits(c->dtype), h = 1e-5;
    int64_t cols = c->x.cols;
    for (int64_t i = 0; i < c->x.rows * cols; i++) {
        double a = (double)at[i], b = (double)factor[c->kind == 1 ? i % cols : c->kind == 2 ? i / cols : i];
        double want = pointwise_value(c->kind, a, b);
        double slope = (pointwise_value(c->kind, a + h, b) - pointwise_value(c->kind, a - h, b)) / (2 * h);
        if (fabs((double)out[i] - want) > digits * fabs(want) + pointwise_least(c->dtype))
            fail_msg("kind %d, %s: y[%lld] is %.9g, expected %.9g", c->kind, mt_dtype_name(c->dtype), (long long)i,
                     (double)out[i], want);
        if (fabs((double)grad[i] - slope * (double)up[i]) > digits * fabs(slope * (double)up[i]) + 1e-6)
            fail_msg("kind %d, %s: dx[%lld] is %.9g, expected %.9g", c->kind, mt_dtype_name(c->dtype), (long long)i,
                     (double)grad[i], slope * (double)up[i]);
    }
}

/* drow and dcol against sums in double, and the gradient of the tensor that a gate scales. drow is f32 for every
   type. */
static void pointwise_sums(const pointwise_case *c) {
    const float *at = c->at.data, *up = c->up.data, *sums = c->sums.data;
    int64_t cols = c->x.cols;
    for (int64_t j = 0; j < c->sums.rows * c->sums.cols && c->kind == 5; j++) {
        double want = (double)up[j] / (1 + exp(-(double)at[j]));
        if (fabs((double)sums[j] - want) > pointwise_digits(c->dtype) * fabs(want) + pointwise_least(c->dtype))
            fail_msg("gate, %s: gradient %lld of [%lld, %lld] is %.9g, expected %.9g", mt_dtype_name(c->dtype),
                     (long long)j, (long long)c->x.rows, (long long)cols, (double)sums[j], want);
    }
    for (int64_t j = 0; j < c->sums.rows * c->sums.cols && c->kind != 5; j++) {
        double want = c->kind == 1 ? 0.5 : 0, size = 0.5;
        for (int64_t i = 0; i < c->x.rows * cols; i++) {
            if ((c->kind == 1 ? i % cols : i / cols) != j) continue;
            want += (double)up[i] * (double)at[i];
            size += fabs((double)up[i] * (double)at[i]);
        }
        if (fabs((double)sums[j] - want) > (c->kind == 2 ? pointwise_digits(c->dtype) * fabs(want) : 0) + 1e-6 * size)
            fail_msg("kind %d, %s: sum %lld of [%lld, %lld] is %.9g, expected %.9g", c->kind, mt_dtype_name(c->dtype),
                     (long long)j, (long long)c->x.rows, (long long)cols, (double)sums[j], want);
    }
}

static void assert_same_tensor(mt_tensor view, mt_tensor expected) {
    size_t mark = mt_arena_mark(ref.ctx);
    mt_tensor f;
    OK(mt_arena_tensor(ref.ctx, MT_F32, view.rows, view.cols, &f));
    OK(mt_convert(ref.ctx, view, f));
    assert_memory_equal(f.data, expected.data, (size_t)(f.rows * f.cols) * sizeof(float));
    mt_arena_release(ref.ctx, mark);
}

/* The bits do not change when a result is also an operand, or when an optional result is omitted. */
static void pointwise_in_place(pointwise_case *c) {
    mt_tensor sums;
    OK(mt_arena_tensor(ref.ctx, MT_F32, c->sums.rows, c->sums.cols, &sums));
    OK(mt_copy(ref.ctx, c->sums, sums));
    OK(mt_copy(ref.ctx, c->x, c->y));
    OK(pointwise_forward(c->kind, c->y, c->other, c->y));
    assert_same_tensor(c->y, c->out);
    OK(mt_copy(ref.ctx, c->dy, c->dx));
    pointwise_backward(c, c->x, c->dx, c->dx, 1);
    assert_same_tensor(c->dx, c->grad);
    assert_same_tensor(c->sums, sums);
    OK(mt_copy(ref.ctx, c->x, c->dx));
    pointwise_backward(c, c->dx, c->dy, c->dx, 1);
    assert_same_tensor(c->dx, c->grad);
    assert_same_tensor(c->sums, sums);
    OK(mt_fill(ref.ctx, c->dx, 7.0f));
    pointwise_backward(c, c->x, c->dy, c->dx, 0);
    assert_same_tensor(c->dx, c->grad);
    if (c->kind == 1 || c->kind == 2) pointwise_backward(c, c->x, c->dy, mt_none(), 1);
    if (c->kind == 1 || c->kind == 2) assert_same_tensor(c->sums, sums);
}

static void pointwise(int kind, mt_dtype dtype, int64_t rows, int64_t cols) {
    size_t mark = mt_arena_mark(ref.ctx);
    pointwise_case c;
    pointwise_create(&c, kind, dtype, rows, cols);
    OK(pointwise_forward(kind, c.x, c.other, c.y));
    OK(mt_convert(ref.ctx, c.y, c.out));
    pointwise_backward(&c, c.x, c.dy, c.dx, 1);
    OK(mt_convert(ref.ctx, c.dx, c.grad));
    pointwise_values(&c);
    if (kind == 1 || kind == 2 || kind == 5) pointwise_sums(&c);
    pointwise_in_place(&c);
    OK(mt_convert(ref.ctx, mt_tensor_cols(c.whole[4], cols + 1, 1), mt_tensor_f32(c.out.data, rows, 1)));
    /* columns beside dx stay unchanged */
    for (int64_t i = 0; i < rows; i++) assert_true(((float *)c.out.data)[i] == 7);
    mt_arena_release(ref.ctx, mark);
}

/* Vectors and their remainders, four rows at a time and their remainders, and rows longer than a block of columns. */
static void test_pointwise(void **state) {
    static const int64_t shapes[][2] = {{1, 1}, {3, 5}, {4, 32}, {7, 1}, {6, 67}, {9, 1029}, {1, 2048}, {70, 8}};
    static const mt_dtype dtypes[] = {MT_F32, MT_BF16, MT_F16};
    (void)state;
    for (int i = 0; i < 8 * 3 * 6; i++) pointwise(i % 6, dtypes[i / 6 % 3], shapes[i / 18][0], shapes[i / 18][1]);
}

/* An empty sum is 0. */
static void test_pointwise_without_columns(void **state) {
    float data[3] = {7, 7, 7}, factors[3] = {1, 2, 3};
    mt_tensor none = mt_tensor_f32(NULL, 3, 0);
    (void)state;
    OK(mt_multiply_col_backward(ref.ctx, none, mt_tensor_f32(factors, 3, 1), none, none, mt_tensor_f32(data, 3, 1)));
    for (int i = 0; i < 3; i++) assert_true(data[i] == 0);
}

/* Views of the rows of one matrix, [3, 16] in f32: each row of them is 64 bytes. */
static void test_check_apart(void **state) {
    float data[48] = {0};
    mt_tensor all = mt_tensor_f32(data, 3, 16), left = mt_tensor_cols(all, 0, 8), right = mt_tensor_cols(all, 8, 8);
    mt_tensor middle = mt_tensor_cols(all, 7, 2), half = right, one = mt_tensor_rows(right, 1, 1);
    (void)state;
    half.dtype = MT_BF16; /* 8 columns in the first half of those of `right` */
    half.ld = 32;
    one.ld = 0;
    OK(mt_check_apart(ref.ctx, "f", "a", left, "b", right));
    OK(mt_check_apart(ref.ctx, "f", "a", right, "b", left));
    OK(mt_check_apart(ref.ctx, "f", "a", left, "b", half));
    OK(mt_check_apart(ref.ctx, "f", "a", left, "b", one));
    OK(mt_check_apart(ref.ctx, "f", "a", half, "b", mt_tensor_cols(all, 12, 4)));
    OK(mt_check_apart(ref.ctx, "f", "a", mt_tensor_rows(all, 0, 1), "b", mt_tensor_rows(all, 1, 2)));
    OK(mt_check_apart(ref.ctx, "f", "a", all, "b", mt_none()));
    OK(mt_check_apart(ref.ctx, "f", "a", all, "b", mt_tensor_cols(all, 3, 0)));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "f: a [3, 8] and b [3, 2] overlap",
                   mt_check_apart(ref.ctx, "f", "a", left, "b", middle));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "f: a [3, 2] and b [3, 8] overlap",
                   mt_check_apart(ref.ctx, "f", "a", middle, "b", right));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "overlap", mt_check_apart(ref.ctx, "f", "a", half, "b", right));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "overlap",
                   mt_check_apart(ref.ctx, "f", "a", half, "b", mt_tensor_cols(all, 11, 4)));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "overlap", mt_check_apart(ref.ctx, "f", "a", right, "b", one));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "overlap",
                   mt_check_apart(ref.ctx, "f", "a", mt_tensor_rows(all, 2, 1), "b", mt_tensor_cols(all, 15, 1)));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "overlap",
                   mt_check_apart(ref.ctx, "f", "a", mt_tensor_rows(all, 2, 1), "b", mt_tensor_rows(right, 2, 1)));
    half.ld = 16; /* its second row is in the columns of `left` */
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "overlap", mt_check_apart(ref.ctx, "f", "a", left, "b", half));
    assert_int_equal(mt_check_apart(NULL, "f", "a", left, "b", right), MT_ERR_ARGUMENT);
}

/* Outputs that begin behind the first element of an input */
static void test_partial_overlap_refused(void **state) {
    float data[64] = {0}, more[16] = {0};
    mt_tensor x = mt_tensor_f32(data, 4, 4), y = mt_tensor_f32(data + 1, 4, 4), z = mt_tensor_f32(more, 4, 4);
    mt_tensor wide = mt_tensor_f32(data + 32, 4, 8), stats = mt_tensor_f32(more, 4, 2);
    (void)state;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_gemm: c [4, 4] and a [4, 4] overlap",
                   mt_gemm(ref.ctx, MT_NO_TRANS, MT_NO_TRANS, 1, x, z, 0, y));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_gemm: c [4, 4] and b [4, 4] overlap",
                   mt_gemm(ref.ctx, MT_NO_TRANS, MT_NO_TRANS, 1, z, x, 0, y));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_linear_forward: y [4, 4] and x [4, 4] overlap",
                   mt_linear_forward(ref.ctx, x, z, mt_none(), y));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_activation_forward: y [4, 4] and h [4, 8] overlap",
                   mt_activation_forward(ref.ctx, MT_SWIGLU, wide, mt_none(), mt_tensor_cols(wide, 4, 4)));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_activation_backward: dh [4, 4] and dy [4, 4] overlap",
                   mt_activation_backward(ref.ctx, MT_GELU_ERF, z, x, y, mt_none()));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_norm_backward: dx [4, 4] and x [4, 4] overlap",
                   mt_norm_backward(ref.ctx, MT_RMS_NORM, x, mt_tensor_f32(more, 1, 4), stats, z, mt_none(), y,
                                    mt_tensor_f32(more + 8, 1, 4), mt_none()));
    ASSERT_REFUSED(
        MT_ERR_ARGUMENT, "mt_multiply_row_backward: drow [1, 4] and x [4, 4] overlap",
        mt_multiply_row_backward(ref.ctx, x, mt_tensor_rows(z, 0, 1), z, mt_none(), mt_tensor_rows(x, 3, 1)));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_sigmoid_gate_backward: dgate [4, 4] and dx [4, 4] overlap",
                   mt_sigmoid_gate_backward(ref.ctx, z, z, z, x, y));
    for (int i = 0; i < 64; i++) assert_true(data[i] == 0);
}

static void test_partial_overlap_of_linear_refused(void **state) {
    float data[64] = {0}, more[32] = {0};
    mt_tensor x = mt_tensor_f32(data, 4, 4), y = mt_tensor_f32(data + 1, 4, 4), row = mt_tensor_rows(x, 3, 1);
    mt_tensor z = mt_tensor_f32(more, 4, 4), w = mt_tensor_f32(more + 16, 4, 4), none = mt_none();
    (void)state;
#define APART(words, call) ASSERT_REFUSED(MT_ERR_ARGUMENT, words, call)
    APART("mt_linear_forward: y [4, 4] and weight", mt_linear_forward(ref.ctx, z, x, none, y));
    APART("mt_linear_activation_forward: h [4, 4] and x",
          mt_linear_activation_forward(ref.ctx, MT_GELU_TANH, x, z, none, y, w));
    APART("mt_linear_activation_forward: h [4, 4] and weight",
          mt_linear_activation_forward(ref.ctx, MT_GELU_TANH, z, x, none, y, w));
    APART("mt_linear_activation_forward: y [4, 4] and h",
          mt_linear_activation_forward(ref.ctx, MT_GELU_TANH, z, w, none, x, y));
    APART("mt_linear_activation_forward: y [4, 4] and x",
          mt_linear_activation_forward(ref.ctx, MT_GELU_TANH, x, z, none, w, y));
    APART("mt_linear_activation_forward: y [4, 4] and weight",
          mt_linear_activation_forward(ref.ctx, MT_GELU_TANH, z, x, none, w, y));
    APART("mt_linear_activation_backward: dh [4, 4] and dy",
          mt_linear_activation_backward(ref.ctx, MT_GELU_TANH, x, z, w, y, none));
    APART("mt_linear_activation_backward: dh [4, 4] and h",
          mt_linear_activation_backward(ref.ctx, MT_GELU_TANH, z, w, x, y, none));
    APART("mt_linear_activation_backward: dh [4, 4] and weight",
          mt_linear_activation_backward(ref.ctx, MT_GELU_TANH, z, x, w, y, none));
    APART("mt_linear_gradients: dweight [4, 4] and dy", mt_linear_gradients(ref.ctx, x, z, y, none));
    APART("mt_linear_gradients: dweight [4, 4] and x", mt_linear_gradients(ref.ctx, z, x, y, none));
    APART("mt_linear_gradients: dbias [1, 4] and dy", mt_linear_gradients(ref.ctx, x, z, w, row));
    for (int i = 0; i < 64; i++) assert_true(data[i] == 0);
}

/* mt_copy and mt_convert accept the same view, with any ld if it has one row, and views that are apart. */
static void test_partial_overlap_of_rows_refused(void **state) {
    static const int32_t ids[4] = {0};
    static const mt_cross_entropy_shard_desc desc = {.vocab = 4};
    float data[64] = {0}, more[32] = {0};
    mt_tensor x = mt_tensor_f32(data, 4, 4), y = mt_tensor_f32(data + 1, 4, 4), row = mt_tensor_rows(x, 3, 1);
    mt_tensor z = mt_tensor_f32(more, 4, 4), w = mt_tensor_f32(more + 16, 4, 4), none = mt_none(), wide = x;
    mt_tensor gain = mt_tensor_f32(more, 1, 4), sum = mt_tensor_f32(data + 32, 1, 4), stats = mt_tensor_f32(more, 4, 2);
    (void)state;
    wide.ld = 8; /* begins where x does, but has other rows */
    OK(mt_copy(ref.ctx, x, x));
    OK(mt_convert(ref.ctx, x, x));
    OK(mt_copy(ref.ctx, mt_tensor_rows(wide, 0, 1), mt_tensor_rows(x, 0, 1)));
    OK(mt_copy(ref.ctx, mt_tensor_rows(x, 0, 2), mt_tensor_rows(x, 2, 2)));
    APART("mt_copy: y [4, 4] and x", mt_copy(ref.ctx, x, y));
    APART("mt_copy: y [4, 4] and x", mt_copy(ref.ctx, x, wide));
    APART("mt_copy: y [4, 4] and x", mt_copy(ref.ctx, wide, x));
    APART("mt_convert: y [4, 4] and x", mt_convert(ref.ctx, x, y));
    APART("mt_convert: y [4, 4] and x", mt_convert(ref.ctx, x, with_dtype(x, MT_BF16)));
    APART("mt_bias_backward: dbias [1, 4] and dy", mt_bias_backward(ref.ctx, x, row));
    APART("mt_embedding_forward: y [4, 4] and table", mt_embedding_forward(ref.ctx, x, 0, ids, 0, y));
    APART("mt_embedding_backward: dtable [4, 4] and dy", mt_embedding_backward(ref.ctx, x, 0, ids, y));
    APART("mt_cross_entropy_stats: stats [4, 4] and logits", mt_cross_entropy_stats(ref.ctx, &desc, x, ids, y));
#define NORM(x, dy, dx, dgain, dbias)                                                                                  \
    mt_norm_backward(ref.ctx, MT_LAYER_NORM, x, gain, stats, dy, none, dx, dgain, dbias)
    APART("mt_norm_backward: dgain [1, 4] and x", NORM(x, z, w, row, none));
    APART("mt_norm_backward: dgain [1, 4] and dy", NORM(z, x, w, row, sum));
    APART("mt_norm_backward: dgain [1, 4] and dx", NORM(z, w, x, row, sum));
    APART("mt_norm_backward: dbias [1, 4] and x", NORM(x, z, w, sum, row));
    APART("mt_norm_backward: dbias [1, 4] and dy", NORM(z, x, w, sum, row));
    APART("mt_norm_backward: dbias [1, 4] and dx", NORM(z, w, x, sum, row));
#undef NORM
#undef APART
    for (int i = 0; i < 64; i++) assert_true(data[i] == 0);
}

static void test_pointwise_refuses(void **state) {
    float data[12] = {0}, more[12] = {0};
    mt_tensor x = mt_tensor_f32(data, 3, 4), row = mt_tensor_f32(data, 1, 4), col = mt_tensor_f32(data, 3, 1);
    mt_tensor other = mt_tensor_f32(more, 3, 4), narrow = mt_tensor_f32(more, 3, 1);
    (void)state;
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_multiply: b is [1, 4], must be [3, 4]", mt_multiply(ref.ctx, x, row, x));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_multiply_row_forward: row is [3, 1], must be [1, 4]",
                   mt_multiply_row_forward(ref.ctx, x, col, x));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_multiply_col_forward: col is [1, 4], must be [3, 1]",
                   mt_multiply_col_forward(ref.ctx, x, row, x));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_multiply_row_backward: drow is [3, 1], must be [1, 4]",
                   mt_multiply_row_backward(ref.ctx, x, row, x, mt_none(), col));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_multiply_row_backward: drow [1, 4] and row [1, 4] overlap",
                   mt_multiply_row_backward(ref.ctx, other, row, other, mt_none(), row));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_multiply_row_backward: drow [1, 4] and dy [1, 4] overlap",
                   mt_multiply_row_backward(ref.ctx, mt_tensor_rows(other, 0, 1), mt_tensor_rows(other, 1, 1), row,
                                            mt_tensor_rows(other, 2, 1), row));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_multiply_col_backward: dcol [3, 1] and col [3, 1] overlap",
                   mt_multiply_col_backward(ref.ctx, other, col, other, mt_none(), col));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_multiply_col_backward: dcol [3, 1] and dy [3, 1] overlap",
                   mt_multiply_col_backward(ref.ctx, narrow, mt_tensor_cols(other, 1, 1), col, narrow, col));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_multiply_col_backward: dcol [3, 1] and dx [3, 1] overlap",
                   mt_multiply_col_backward(ref.ctx, narrow, mt_tensor_cols(other, 1, 1), narrow, col, col));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_sigmoid_forward: x is [1, 4], must be [3, 4]",
                   mt_sigmoid_forward(ref.ctx, row, x));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_silu_backward: dy is [1, 4], must be [3, 4]",
                   mt_silu_backward(ref.ctx, x, row, x));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_sigmoid_gate_forward: gate is [1, 4], must be [3, 4]",
                   mt_sigmoid_gate_forward(ref.ctx, row, x, x));
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_sigmoid_gate_backward: dgate is [1, 4], must be [3, 4]",
                   mt_sigmoid_gate_backward(ref.ctx, x, x, x, row, x));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_sigmoid_gate_backward: dgate [3, 4] and dx [3, 4] overlap",
                   mt_sigmoid_gate_backward(ref.ctx, x, x, x, x, x));
    assert_int_equal(mt_multiply(NULL, x, x, x), MT_ERR_ARGUMENT);
}

static const struct CMUnitTest tests[] = {
    REF_TEST(test_rows_without_columns),
    REF_TEST(test_views_that_cannot_be),
    REF_TEST(test_fill_copy_add),
    REF_TEST(test_fill_and_copy_long_rows),
    REF_TEST(test_upload_download),
    REF_TEST(test_sums),
    REF_TEST(test_exp_sweep),
    REF_TEST(test_exp_ends),
    REF_TEST(test_exp_of_statistics),
    REF_TEST(test_activation_sweep),
    REF_TEST(test_activation_near_zero),
    REF_TEST(test_activation_of_nan),
    REF_TEST(test_squared_relu),
    REF_TEST(test_relu),
    REF_TEST(test_tanh),
    REF_TEST(test_exp_and_normal),
    REF_TEST(test_sqrt_sweep),
    REF_TEST(test_bias),
    REF_TEST(test_activation),
    REF_TEST(test_activation_wide),
    REF_TEST(test_norm),
    REF_TEST(test_norm_offset),
    REF_TEST(test_philox),
    REF_TEST(test_random_words),
    REF_TEST(test_normal_values),
    REF_TEST(test_normal_split),
    REF_TEST(test_normal_statistics),
    REF_TEST(test_bias_dropout_add),
    REF_TEST(test_dropout_rate),
    REF_TEST(test_random_offset),
    REF_TEST(test_dropout_threshold),
    REF_TEST(test_attention),
    REF_TEST(test_attention_panels),
    REF_TEST(test_attention_padding),
    REF_TEST(test_attention_masked_garbage),
    REF_TEST(test_attention_dropout),
    REF_TEST(test_attention_scale),
    REF_TEST(test_attention_large_scores),
    REF_TEST(test_attention_split),
    REF_TEST(test_attention_layouts),
    REF_TEST(test_attention_same_bits),
    REF_TEST(test_attention_memory),
    REF_TEST(test_rotary_table),
    REF_TEST(test_rotary),
    REF_TEST(test_rotary_documents),
    REF_TEST(test_embedding),
    REF_TEST(test_ids),
    REF_TEST(test_position_ids),
    REF_TEST(test_position_ids_of_documents),
    REF_TEST(test_cross_entropy),
    REF_TEST(test_cross_entropy_large_logits),
    REF_TEST(test_cross_entropy_masked),
    REF_TEST(test_cross_entropy_stats),
    REF_TEST(test_adamw),
    REF_TEST(test_adamw_edges),
    REF_TEST(test_bad_memory),
    REF_TEST(test_bad_elementwise),
    REF_TEST(test_bad_norm),
    REF_TEST(test_bad_random),
    REF_TEST(test_checks_of_fields),
    REF_TEST(test_bad_attention),
    REF_TEST(test_bad_rotary),
    REF_TEST(test_bad_embedding),
    REF_TEST(test_bad_cross_entropy),
    REF_TEST(test_bad_adamw),
    REF_TEST(test_bad_lists_of_tensors),
    REF_TEST(test_args),
    REF_TEST(test_pointwise),
    REF_TEST(test_pointwise_refuses),
    REF_TEST(test_check_apart),
    REF_TEST(test_partial_overlap_refused),
    REF_TEST(test_partial_overlap_of_linear_refused),
    REF_TEST(test_partial_overlap_of_rows_refused),
    REF_TEST(test_pointwise_without_columns),
    REF_TEST(test_hash_element),
    REF_TEST(test_meta),
    REF_TEST(test_meta_of_sequences),
    REF_TEST(test_meta_of_products),
};

int main(void) { return cmocka_run_group_tests(tests, NULL, NULL); }
