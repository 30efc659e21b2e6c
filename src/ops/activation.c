/* ---- activations ------------------------------------------------------------------------------------------------- */

#pragma once
#include "bias.h"
#include "math.cuh"
#include "rows.c"
#include "map.cuh"
#include "columns.cuh"
#include "numbers.c"
#include "operator.c"

/* Gate and up are the columns of h, and of its bias or of the gradient of that. */
static mt_status mti_expect_gates(mt_context *ctx, const char *where, mt_activation kind, mt_tensor h,
                                  const char *bias_name, mt_tensor bias) {
    if (kind != MT_SWIGLU) return MT_SUCCESS;
    MT_TRY(mt_parts_check(ctx, where, "h", h, 2));
    return mt_parts_check(ctx, where, bias_name, bias, 2);
}

static mt_status mti_expect_activation(mt_context *ctx, const char *where, mt_activation kind) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mt_check_enum(ctx, where, NULL, "kind", (int)kind, MT_ACTIVATION_WORDS));
    return mti_numbers_agree(ctx, where, "kind", mt_none(), 1, 1, (double)kind);
}

/* The number of columns of h if y has `cols` columns. */
static int64_t mti_activation_width(mt_activation kind, int64_t cols) {
    return kind == MT_SWIGLU ? mt_size_mul(2, cols) : cols;
}

/* The formulas below give no NaN for finite x, and keep the precision of 1 - sigmoid where sigmoid is close to 1.
   `least` is that of mti_exp_to_88. low and high are numbers of mti_unknown, too. */

/* e^-2u as a power of two, where 0.5 x (1 + tanh u) = x / (1 + e^-2u). Its exponent is below 126 for |x| <= 10. */
MT_INLINE float mti_gelu_tanh_exponent(float x) { return x * (-2.30220819f - 0.102943242f * (x * x)); }

/* low is -10 and least -127. Below low, the result is that of low, -1.2e-37. */
MT_INLINE float mti_gelu_tanh(float x, float low, float least) {
    float t = x < low ? low : x, z = mti_gelu_tanh_exponent(t);
    return t / (1.0f + mti_exp2(z < least ? least : z));
}

/* Outside of [low, high] = [-10, 10], the slope is 0 or 1. */
MT_INLINE float mti_gelu_tanh_slope(float x, float low, float high) {
    float above = x < low ? low : x, t = above > high ? high : above;
    float e = mti_exp2(mti_gelu_tanh_exponent(t)), s = 1.0f / (1.0f + e);
    return s * (1.0f + t * (1.59576917f + 0.214064449f * (t * t)) * (e * s));
}

MT_INLINE float mti_gelu_erf(float x, float least) {
    return x * mti_normal_cdf(x, mti_exp_to_88(-0.5f * x * x, least));
}

MT_INLINE float mti_gelu_erf_slope(float x, float least) {
    float e = mti_exp_to_88(-0.5f * x * x, least);
    return mti_normal_cdf(x, e) + x * (0.398942280f * e);
}

/* Below least, the result is that of least, -5e-37. */
MT_INLINE float mti_silu(float x, float least) {
    float t = x < least ? least : x;
    return t / (1.0f + mti_exp_to_88(-t, least));
}

static MT_HOST_DEVICE float mti_relu(float x) { return x < 0.0f ? 0.0f : x; } /* NaN stays NaN */

/* The same, for loops on a CPU that compute with the result. */
MT_INLINE float mti_relu_masked(float x) { return mti_select(x < 0.0f, 0.0f, x); }

/* 1 or 0, and NaN for NaN. Bit masks select the result, as in mti_exp. 0x3f800000 are the bits of 1. */
MT_INLINE MT_HOST_DEVICE float mti_relu_slope(float x) {
    uint32_t positive = 0u - (uint32_t)(x > 0.0f), number = 0u - (uint32_t)(x == x);
    return mt_f32_from_bits((0x3f800000u & positive) | (mt_f32_bits(x) & ~number));
}

/* 1 - tanh(x)^2 = 4 e / (1 + e)^2 with e = e^-2|x|. Nothing cancels, and the relative error is at most 3.2e-7 where the
   slope is above 1e-37. */
MT_INLINE float mti_tanh_slope(float x, float least) {
    float e = mti_exp_to_88(-2.0f * mti_abs(x), least), s = 1.0f / (1.0f + e);
    return 4.0f * e * (s * s);
}

static void mti_gelu_tanh_row(const float *h, float *y, int64_t n) {
    float low = mti_unknown(-10.0f), least = mti_unknown(-127.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = mti_gelu_tanh(h[j], low, least);
}

static void mti_gelu_erf_row(const float *h, float *y, int64_t n) {
    float least = mti_unknown(-88.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = mti_gelu_erf(h[j], least);
}

static void mti_squared_relu_row(const float *h, float *y, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float x = mti_relu_masked(h[j]);
        y[j] = x * x;
    }
}

static void mti_relu_row(const float *h, float *y, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = mti_relu(h[j]);
}

static void mti_tanh_row(const float *h, float *y, int64_t n) {
    float least = mti_unknown(-88.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = mti_tanh(h[j], least);
}

static void mti_swiglu_row(const float *gate, const float *up, float *y, int64_t n) {
    float least = mti_unknown(-88.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = mti_silu(gate[j], least) * up[j];
}

static void mti_gelu_tanh_backward_row(const float *h, const float *dy, float *dh, int64_t n) {
    float low = mti_unknown(-10.0f), high = mti_unknown(10.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) dh[j] = dy[j] * mti_gelu_tanh_slope(h[j], low, high);
}

static void mti_gelu_erf_backward_row(const float *h, const float *dy, float *dh, int64_t n) {
    float least = mti_unknown(-88.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) dh[j] = dy[j] * mti_gelu_erf_slope(h[j], least);
}

static void mti_squared_relu_backward_row(const float *h, const float *dy, float *dh, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) dh[j] = dy[j] * (2.0f * mti_relu_masked(h[j]));
}

static void mti_relu_backward_row(const float *h, const float *dy, float *dh, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) dh[j] = dy[j] * mti_relu_slope(h[j]);
}

static void mti_tanh_backward_row(const float *h, const float *dy, float *dh, int64_t n) {
    float least = mti_unknown(-88.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) dh[j] = dy[j] * mti_tanh_slope(h[j], least);
}

/* gate is limited to at least -80, so that e^-gate does not overflow. */
static void mti_swiglu_backward_row(const float *gate, const float *up, const float *dy, float *dgate, float *dup,
                                    int64_t n) {
    float least = mti_unknown(-88.0f), low = mti_unknown(-80.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float g = gate[j] < low ? low : gate[j], u = up[j], d = dy[j];
        float e = mti_exp_to_88(-g, least);
        float s = 1.0f / (1.0f + e);
        dgate[j] = d * u * s * (1.0f + g * (e * s));
        dup[j] = d * g * s;
    }
}

typedef struct mti_activate {
    mt_activation kind;
    mt_tensor h, bias, y;
} mti_activate;

/* The columns of a block where several streams are read, and how many blocks ahead memory is fetched. */
#define MTI_ACTIVATION_BLOCK 256
#define MTI_ACTIVATION_AHEAD 4

/* Moves a place ahead, in the columns [first, last) of `rows` rows. Returns 0 if there is no whole block. */
static int mti_activation_ahead(int64_t *i, int64_t *j, int64_t rows, int64_t first, int64_t last) {
    *j += MTI_ACTIVATION_AHEAD * MTI_ACTIVATION_BLOCK;
    if (*j >= last) *j -= last - first, ++*i;
    return *i < rows && *j >= first && *j + MTI_ACTIVATION_BLOCK <= last;
}

/* Begins to load a block into the cache. The processor itself is late with several streams, between exponentials. */
static void mti_activation_fetch(mt_tensor t, int64_t i, int64_t j) {
    const char *x = (const char *)mti_bytes_at(t, i, j);
    int64_t at, bytes = MTI_ACTIVATION_BLOCK * (int64_t)mt_dtype_size(t.dtype);
    for (at = 0; at < bytes; at += 64) MTI_PREFETCH(x + at);
}

/* Processes n <= MTI_BLOCK columns of row i, from j on, so that the bias, the activation and the column sums
   read the cache instead of memory. For MT_SWIGLU, h[0] is gate and h[1] is up. y is computed from the sum of h and
   bias before it is rounded. */
static void mti_activation_block(const mti_activate *f, int64_t i, int64_t j, int64_t n) {
    float room[4][MTI_BLOCK], *h[2] = {NULL, NULL}, *y;
    mt_tensor out = mti_f32_place(f->y, i, 1, j, n, room[0]);
    int part;
    for (part = 0; part < (f->kind == MT_SWIGLU ? 2 : 1); part++) {
        int64_t col = j + part * f->y.cols;
        mt_tensor in = mti_f32_read(f->h, i, 1, col, n, room[1 + part]);
        h[part] = mti_row(in, 0);
        if (!f->bias.data) continue;
        mti_row_add(h[part], mti_row(mti_f32_read(f->bias, 0, 1, col, n, room[3]), 0), h[part], n);
        mti_f32_write(in, f->h, i, col);
    }
    y = mti_row(out, 0);
    if (f->kind == MT_GELU_TANH) mti_gelu_tanh_row(h[0], y, n);
    else if (f->kind == MT_GELU_ERF) mti_gelu_erf_row(h[0], y, n);
    else if (f->kind == MT_SQUARED_RELU) mti_squared_relu_row(h[0], y, n);
    else if (f->kind == MT_RELU) mti_relu_row(h[0], y, n);
    else if (f->kind == MT_TANH) mti_tanh_row(h[0], y, n);
    else mti_swiglu_row(h[0], h[1], y, n);
    mti_f32_write(out, f->y, i, j);
}

static void mti_cpu_activation_forward(void *data, int thread, int64_t first, int64_t last) {
    const mti_activate *f = (const mti_activate *)data;
    int64_t i, j, n = f->y.cols, block = f->kind == MT_SWIGLU ? MTI_ACTIVATION_BLOCK : MTI_BLOCK;
    (void)thread;
    for (i = first; i < last; i++)
        for (j = 0; j < n; j += block) {
            int64_t row = i, col = j;
            if (f->kind == MT_SWIGLU && mti_activation_ahead(&row, &col, last, 0, n)) {
                mti_activation_fetch(f->h, row, col);
                mti_activation_fetch(f->h, row, col + n);
            }
            mti_activation_block(f, i, j, mt_min(block, n - j));
        }
}

typedef struct mti_activation_slopes {
    mt_activation kind;
    mt_tensor h, dy, dh, dbias;
} mti_activation_slopes;

/* The same for n <= MTI_ACTIVATION_BLOCK columns of backward. All of h is read before dh is written: dh may be h. */
static void mti_activation_backward_block(const mti_activation_slopes *b, int64_t i, int64_t j, int64_t n) {
    float room[5][MTI_ACTIVATION_BLOCK], *h[2] = {NULL, NULL}, *dh[2] = {NULL, NULL};
    float *dy = mti_row(mti_f32_read(b->dy, i, 1, j, n, room[0]), 0);
    mt_tensor out[2];
    int part, parts = b->kind == MT_SWIGLU ? 2 : 1;
    for (part = 0; part < parts; part++) {
        h[part] = mti_row(mti_f32_read(b->h, i, 1, j + part * b->dy.cols, n, room[1 + part]), 0);
        out[part] = mti_f32_place(b->dh, i, 1, j + part * b->dy.cols, n, room[3 + part]);
        dh[part] = mti_row(out[part], 0);
    }
    if (b->kind == MT_GELU_TANH) mti_gelu_tanh_backward_row(h[0], dy, dh[0], n);
    else if (b->kind == MT_GELU_ERF) mti_gelu_erf_backward_row(h[0], dy, dh[0], n);
    else if (b->kind == MT_SQUARED_RELU) mti_squared_relu_backward_row(h[0], dy, dh[0], n);
    else if (b->kind == MT_RELU) mti_relu_backward_row(h[0], dy, dh[0], n);
    else if (b->kind == MT_TANH) mti_tanh_backward_row(h[0], dy, dh[0], n);
    else mti_swiglu_backward_row(h[0], h[1], dy, dh[0], dh[1], n);
    for (part = 0; part < parts; part++) {
        int64_t col = j + part * b->dy.cols;
        float *dbias = b->dbias.data ? mti_row(b->dbias, 0) + col : NULL;
        if (dbias) mti_row_add(dbias, dh[part], dbias, n);
        mti_f32_write(out[part], b->dh, i, col);
    }
}

/* A range of columns of dh and dbias. */
static void mti_cpu_activation_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_activation_slopes *b = (const mti_activation_slopes *)data;
    int64_t i, j;
    (void)thread;
    for (i = 0; i < b->dy.rows; i++)
        for (j = first; j < last; j += MTI_ACTIVATION_BLOCK) {
            int64_t row = i, col = j;
            if (mti_activation_ahead(&row, &col, b->dy.rows, first, last)) {
                mti_activation_fetch(b->h, row, col);
                mti_activation_fetch(b->dy, row, col);
                if (b->kind == MT_SWIGLU) mti_activation_fetch(b->h, row, col + b->dy.cols);
            }
            mti_activation_backward_block(b, i, j, mt_min(MTI_ACTIVATION_BLOCK, last - j));
        }
}

#include "activation.cuh"

/* clang-format off */
static const mti_table mti_activation_forward_table = {"mt_activation_forward", {"h bias y", "RRR rRr ccc", NULL}, {
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, "h"},
    {"h", "nA", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"bias", "1A", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL | MTI_AS_IS, NULL}}};

static const mti_table mti_activation_backward_table = {"mt_activation_backward",
    {"dy h dh(h) dbias", "RRRR rrrP cccc PRPP", NULL}, {
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MTI_AS_IS, NULL},
    {"h", "nA", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"dh", "nA", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MTI_AS_IS, "dy"},
    {"dbias", "1A", MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_GRADIENT | MT_ARG_SUM | MT_ARG_OPTIONAL, NULL}}};
/* clang-format on */

MT_API mt_status mt_activation_forward(mt_context *ctx, mt_activation kind, mt_tensor h, mt_tensor bias, mt_tensor y) {
    const int64_t width = mti_activation_width(kind, y.cols);
    mt_tensor *views[] = {&y, &h, &bias};
    mti_operator op;
    MT_TRY(mti_expect_activation(ctx, "mt_activation_forward", kind));
    mti_operands(&op, ctx, &mti_activation_forward_table, views, &width);
    if (bias.data) op.args[1].use |= MT_ARG_OUT; /* h += bias */
    MT_TRY(mti_check(&op));
    MT_TRY(mti_expect_gates(ctx, op.name, kind, h, "bias", bias));
    MT_TRY(mti_begin(&op));
    mti_activate f = {kind, h, bias, y};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_activation_forward(ctx, kind, h, bias, y),
                                mti_cpu_rows(ctx, y.rows, y.cols, mti_cpu_activation_forward, &f)));
}

MT_API mt_status mt_activation_backward(mt_context *ctx, mt_activation kind, mt_tensor h, mt_tensor dy, mt_tensor dh,
                                        mt_tensor dbias) {
    const int64_t width = mti_activation_width(kind, dy.cols);
    mt_tensor *views[] = {&dy, &h, &dh, &dbias};
    mti_operator op;
    MT_TRY(mti_expect_activation(ctx, "mt_activation_backward", kind));
    MT_TRY(mti_accept(&op, ctx, &mti_activation_backward_table, views, &width));
    MT_TRY(mti_expect_gates(ctx, op.name, kind, h, "dbias", dbias));
    MT_TRY(mti_begin(&op));
    mti_activation_slopes b = {kind, h, dy, dh, dbias};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_activation_backward(ctx, kind, h, dy, dh, dbias),
                                mti_cpu_columns(ctx, dy.rows, dy.cols, mti_cpu_activation_backward, &b)));
}
