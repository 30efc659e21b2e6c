/* ---- LayerNorm and RMSNorm --------------------------------------------------------------------------------------- */

#pragma once
#include "norm.h"
#include "rows.c"
#include "numbers.c"
#include "operator.c"
#include "norm.cuh"

static mt_status mti_expect_norm(mt_context *ctx, const char *where, mt_norm_kind kind, mt_tensor x,
                                 const char *bias_name, mt_tensor bias) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mt_check_enum(ctx, where, NULL, "kind", (int)kind, MT_NORM_WORDS));
    if (x.cols == 0) return mt_fail(ctx, MT_ERR_SHAPE, "%s: x is [%lld, 0], needs columns", where, (long long)x.rows);
    if (kind == MT_RMS_NORM && bias.data)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is [%lld, %lld], but RMSNorm has no bias: pass mt_none()", where,
                       bias_name, (long long)bias.rows, (long long)bias.cols);
    return MT_SUCCESS;
}

typedef struct mti_norm {
    mt_norm_kind kind;
    mt_tensor x, gain, bias, y, stats;
    float eps;
    mt_tensor rooms; /* a block for each thread, if x or y has a 16-bit type */
} mti_norm;

#define MTI_NORM_BLOCK 4 /* rows that a loop works on at once: their sums are independent, and gain is read once */

/* sums[r] = the sum of row r of x or, if `squares`, a constant, that of (x - shift[r])^2. `rows` is a constant up to
   MTI_NORM_BLOCK. With squares, it also loads the rows of `next` into L1: processors do not do so for short rows. */
MT_INLINE void mti_norm_row_sums(mt_tensor x, int rows, int squares, const float *shift, mt_tensor next, float *sums) {
    float lanes[MTI_NORM_BLOCK][MTI_PARTIALS];
    int64_t ld = mt_tensor_ld(x), n = x.cols, j;
    const float *p = mti_row(x, 0);
    int r, l;
    for (r = 0; r < rows; r++) mti_lanes_clear(lanes[r]);
    for (j = 0; j + MTI_PARTIALS <= n; j += MTI_PARTIALS) {
        if (squares) mti_prefetch_columns(next, rows, j);
        for (r = 0; r < rows; r++)
            for (l = 0; l < MTI_PARTIALS; l++) {
                float d = p[r * ld + j + l] - (squares ? shift[r] : 0.0f);
                lanes[r][l] += squares ? d * d : d;
            }
    }
    for (r = 0; r < rows; r++) {
        for (l = 0; j + l < n; l++) {
            float d = p[r * ld + j + l] - (squares ? shift[r] : 0.0f);
            lanes[r][l] += squares ? d * d : d;
        }
        sums[r] = mti_lanes_sum(lanes[r]);
    }
}

/* y = (x - mean) * rstd * gain + bias, for `rows` rows, a constant. For RMSNorm, mean is 0. */
MT_INLINE void mti_norm_apply(mt_tensor x, int rows, const float *mean, const float *rstd, const float *gain,
                              const float *bias, mt_tensor y) {
    int64_t ld_x = mt_tensor_ld(x), ld_y = mt_tensor_ld(y), j;
    const float *p = mti_row(x, 0);
    float *out = mti_row(y, 0);
    int r;
    if (bias) {
        MT_INDEPENDENT
        for (j = 0; j < x.cols; j++) {
            MTI_UNROLL
            for (r = 0; r < rows; r++) out[r * ld_y + j] = (p[r * ld_x + j] - mean[r]) * rstd[r] * gain[j] + bias[j];
        }
    } else {
        MT_INDEPENDENT
        for (j = 0; j < x.cols; j++) {
            MTI_UNROLL
            for (r = 0; r < rows; r++) out[r * ld_y + j] = (p[r * ld_x + j] - mean[r]) * rstd[r] * gain[j];
        }
    }
}

/* Computes rows [i, i + rows). `rows` is a constant. The first loop reads the rows from memory, the others from L1. */
MT_INLINE void mti_norm_block(const mti_norm *f, int64_t i, int rows, float *room) {
    float mean[MTI_NORM_BLOCK] = {0}, rstd[MTI_NORM_BLOCK];
    int64_t n = f->x.cols;
    mt_tensor x = mti_f32_read(f->x, i, rows, 0, n, room), y = mti_f32_place(f->y, i, rows, 0, n, room);
    mt_tensor next = mt_tensor_rows(f->x, n <= MTI_BLOCK && i + 2 * rows <= f->x.rows ? i + rows : i, rows);
    int r;
    if (f->kind == MT_LAYER_NORM) mti_norm_row_sums(x, rows, 0, NULL, next, mean);
    for (r = 0; r < rows; r++) mean[r] /= (float)n;
    mti_norm_row_sums(x, rows, 1, mean, next, rstd);
    for (r = 0; r < rows; r++) rstd[r] = 1.0f / sqrtf(rstd[r] / (float)n + f->eps);
    mti_norm_apply(x, rows, mean, rstd, mti_row(f->gain, 0), mti_row(f->bias, 0), y);
    for (r = 0; r < rows && f->stats.data; r++) {
        mti_row(f->stats, i + r)[0] = mean[r];
        mti_row(f->stats, i + r)[1] = rstd[r];
    }
    mti_f32_write(y, f->y, i, 0);
}

/* The most rows of a block, so that they fit in L1. */
static int64_t mti_norm_rows(int64_t cols) { return cols <= MTI_BLOCK ? MTI_NORM_BLOCK : 1; }

static void mti_cpu_norm_forward(void *data, int thread, int64_t first, int64_t last) {
    const mti_norm *f = (const mti_norm *)data;
    int64_t i = first, most = mti_norm_rows(f->x.cols);
    float *room = mti_row(f->rooms, thread * most);
    for (; most > 1 && i + MTI_NORM_BLOCK <= last; i += MTI_NORM_BLOCK) mti_norm_block(f, i, MTI_NORM_BLOCK, room);
    for (; i < last; i++) mti_norm_block(f, i, 1, room);
}

static mt_status mti_norm_forward(mti_operator *op, mti_norm *f) {
    int narrow = f->x.dtype != MT_F32 || f->y.dtype != MT_F32;
    MT_TRY(mti_rooms(op, narrow ? mti_norm_rows(f->x.cols) : 0, f->x.cols, &f->rooms));
    if (op->on_cpu) mti_cpu_rows(op->ctx, f->x.rows, f->x.cols, mti_cpu_norm_forward, f);
    return MT_SUCCESS;
}

/* With g = dy * gain and xhat = (x - mean) * rstd: sums = (sum of g, sum of g * xhat). If `adds`, which is constant,
   dgain += dy * xhat. */
MT_INLINE void mti_norm_backward_sums(const float *x, float mean, float rstd, const float *gain, const float *dy,
                                      int adds, float *dgain, int64_t n, float sums[2]) {
    float g_lanes[MTI_PARTIALS], gx_lanes[MTI_PARTIALS];
    int64_t j;
    int l;
    mti_lanes_clear(g_lanes);
    mti_lanes_clear(gx_lanes);
    for (j = 0; j + MTI_PARTIALS <= n; j += MTI_PARTIALS) {
        MT_INDEPENDENT
        for (l = 0; l < MTI_PARTIALS; l++) {
            float xhat = (x[j + l] - mean) * rstd, g = dy[j + l] * gain[j + l];
            g_lanes[l] += g;
            gx_lanes[l] += g * xhat;
            if (adds) dgain[j + l] += dy[j + l] * xhat;
        }
    }
    for (l = 0; j + l < n; l++) {
        float xhat = (x[j + l] - mean) * rstd, g = dy[j + l] * gain[j + l];
        g_lanes[l] += g;
        gx_lanes[l] += g * xhat;
        if (adds) dgain[j + l] += dy[j + l] * xhat;
    }
    sums[0] = mti_lanes_sum(g_lanes);
    sums[1] = mti_lanes_sum(gx_lanes);
}

/* dx = rstd (g - mean(g) - xhat mean(g xhat)), plus dresidual if it is given. For RMSNorm, mean_g is 0. */
static void mti_norm_backward_apply(const float *x, float mean, float rstd, const float *gain, const float *dy,
                                    float mean_g, float mean_gx, const float *dresidual, float *dx, int64_t n) {
    int64_t j;
    if (dresidual) {
        MT_INDEPENDENT
        for (j = 0; j < n; j++)
            dx[j] = dresidual[j] + rstd * (dy[j] * gain[j] - mean_g - (x[j] - mean) * rstd * mean_gx);
    } else {
        MT_INDEPENDENT
        for (j = 0; j < n; j++) dx[j] = rstd * (dy[j] * gain[j] - mean_g - (x[j] - mean) * rstd * mean_gx);
    }
}

typedef struct mti_norm_slopes {
    mt_norm_kind kind;
    mt_tensor x, gain, stats, dy, dresidual, dx, dgain, dbias;
    int one_pass;    /* whoever computes a row of dx adds that row to dgain and dbias */
    mt_tensor rooms; /* three rows for each thread, if a view has a 16-bit type */
} mti_norm_slopes;

static float mti_norm_mean(const mti_norm_slopes *b, int64_t row) {
    return b->kind == MT_LAYER_NORM ? mti_row(b->stats, row)[0] : 0.0f;
}

#define MTI_NORM_COLS 512 /* columns of dgain and dbias that a thread sums at once: four rows of x and dy fit in L1 */

/* Adds n columns of rows [i, i + rows), from `first` on, to dgain and dbias, row after row. `rows` is a constant, up
   to 4. */
MT_INLINE void mti_norm_parameters_rows(const mti_norm_slopes *b, int64_t i, int rows, int64_t first, int64_t n) {
    float room[2][4 * MTI_NORM_COLS], mean[4], rstd[4];
    mt_tensor x_rows = mti_f32_read(b->x, i, rows, first, n, room[0]);
    mt_tensor dy_rows = mti_f32_read(b->dy, i, rows, first, n, room[1]);
    const float *x = mti_row(x_rows, 0), *dy = mti_row(dy_rows, 0);
    float *dgain = mti_row(b->dgain, 0) + first, *dbias = b->dbias.data ? mti_row(b->dbias, 0) + first : NULL;
    int64_t ld_x = mt_tensor_ld(x_rows), ld_dy = mt_tensor_ld(dy_rows), j;
    int r;
    for (r = 0; r < rows; r++) {
        mean[r] = mti_norm_mean(b, i + r);
        rstd[r] = mti_row(b->stats, i + r)[1];
    }
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float sum = dgain[j];
        MTI_UNROLL
        for (r = 0; r < rows; r++) sum += dy[r * ld_dy + j] * ((x[r * ld_x + j] - mean[r]) * rstd[r]);
        dgain[j] = sum;
    }
    if (!dbias) return;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float sum = dbias[j];
        MTI_UNROLL
        for (r = 0; r < rows; r++) sum += dy[r * ld_dy + j];
        dbias[j] = sum;
    }
}

/* A range of columns of dgain and dbias. */
static void mti_cpu_norm_parameters(void *data, int thread, int64_t first, int64_t last) {
    const mti_norm_slopes *b = (const mti_norm_slopes *)data;
    int64_t i, n, most = b->x.dtype == MT_F32 && b->dy.dtype == MT_F32 ? last - first : MTI_NORM_COLS;
    (void)thread;
    for (; first < last; first += n) {
        n = mt_min(most, last - first);
        for (i = 0; i + 4 <= b->x.rows; i += 4) mti_norm_parameters_rows(b, i, 4, first, n);
        for (; i < b->x.rows; i++) mti_norm_parameters_rows(b, i, 1, first, n);
    }
}

/* A range of rows of dx. */
static void mti_cpu_norm_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_norm_slopes *b = (const mti_norm_slopes *)data;
    const float *gain = mti_row(b->gain, 0);
    float *dgain = mti_row(b->dgain, 0), *dbias = mti_row(b->dbias, 0);
    int64_t i, n = b->x.cols;
    for (i = first; i < last; i++) {
        mt_tensor x_row = mti_f32_read(b->x, i, 1, 0, n, mti_row(b->rooms, 3 * thread));
        mt_tensor dy_row = mti_f32_read(b->dy, i, 1, 0, n, mti_row(b->rooms, 3 * thread + 1));
        mt_tensor residual = mti_f32_read(b->dresidual, i, 1, 0, n, mti_row(b->rooms, 3 * thread + 2));
        mt_tensor dx = mti_f32_place(b->dx, i, 1, 0, n, mti_row(b->rooms, 3 * thread));
        const float *x = mti_row(x_row, 0), *dy = mti_row(dy_row, 0);
        float mean = mti_norm_mean(b, i), rstd = mti_row(b->stats, i)[1], sums[2];
        if (b->one_pass) mti_norm_backward_sums(x, mean, rstd, gain, dy, 1, dgain, n, sums);
        else mti_norm_backward_sums(x, mean, rstd, gain, dy, 0, NULL, n, sums);
        if (b->one_pass && dbias) mti_row_add(dbias, dy, dbias, n);
        mti_norm_backward_apply(x, mean, rstd, gain, dy, b->kind == MT_LAYER_NORM ? sums[0] / (float)n : 0.0f,
                                sums[1] / (float)n, mti_row(residual, 0), mti_row(dx, 0), n);
        mti_f32_write(dx, b->dx, i, 0);
    }
}

/* With several threads, the parameters are first, because dx may be dy. */
static mt_status mti_norm_backward(mti_operator *op, mti_norm_slopes *b) {
    mt_tensor residual = b->dresidual;
    int narrow = b->x.dtype != MT_F32 || b->dy.dtype != MT_F32 || b->dx.dtype != MT_F32 ||
                 (residual.data && residual.dtype != MT_F32);
    MT_TRY(mti_rooms(op, narrow ? 3 : 0, b->x.cols, &b->rooms));
    if (!op->on_cpu) return MT_SUCCESS;
    b->one_pass = mt_context_threads(op->ctx) == 1;
    if (!b->one_pass) mti_cpu_columns(op->ctx, b->x.rows, b->x.cols, mti_cpu_norm_parameters, b);
    mti_cpu_rows(op->ctx, b->x.rows, b->x.cols, mti_cpu_norm_backward, b);
    return MT_SUCCESS;
}

/* clang-format off */
static const mti_table mti_norm_forward_table = {"mt_norm_forward", {"x gain bias y stats", "RRRRR rRRrr", NULL}, {
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"gain", "1m", MT_ARG_FLOAT, MT_ARG_IN, NULL},
    {"bias", "1m", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL, NULL},
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, NULL},
    {"stats", "n2", MT_ARG_F32, MT_ARG_OUT | MT_ARG_OPTIONAL, NULL}}};

static const mti_table mti_norm_backward_table = {"mt_norm_backward",
    {"x gain stats dy dresidual dx(x) dgain(gain) dbias", "RRRRRRRR rRrrrrPP RRRPPPPP", NULL}, {
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"gain", "1m", MT_ARG_FLOAT, MT_ARG_IN, NULL},
    {"dbias", "1m", MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_GRADIENT | MT_ARG_SUM | MT_ARG_OPTIONAL, "x dy dx"},
    {"stats", "n2", MT_ARG_F32, MT_ARG_IN, NULL},
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MTI_AS_IS, NULL},
    {"dresidual", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MT_ARG_OPTIONAL | MTI_AS_IS, NULL},
    {"dx", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MTI_AS_IS, "x"},
    {"dgain", "1m", MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_GRADIENT | MT_ARG_SUM, "x dy dx"}}};
/* clang-format on */

MT_API mt_status mt_norm_forward(mt_context *ctx, mt_norm_kind kind, mt_tensor x, mt_tensor gain, mt_tensor bias,
                                 float eps, mt_tensor y, mt_tensor stats) {
    mt_tensor *views[] = {&x, &gain, &bias, &y, &stats};
    mti_operator op;
    MT_TRY(mti_expect_norm(ctx, "mt_norm_forward", kind, x, "bias", bias));
    MT_TRY(mti_accept(&op, ctx, &mti_norm_forward_table, views, NULL));
    MT_TRY(mt_check_float(ctx, op.name, NULL, "eps", eps, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mti_numbers_agree(ctx, op.name, "kind or eps", mt_none(), 1, 2, (double)kind, (double)eps));
    MT_TRY(mti_begin(&op));
    mti_norm f = {kind, x, gain, bias, y, stats, eps, mt_none()};
    return mti_end(&op, MTI_CHOOSE(&op, mti_cuda_norm_forward(ctx, kind, x, gain, bias, eps, y, stats),
                                   mti_norm_forward(&op, &f)));
}

MT_API mt_status mt_norm_backward(mt_context *ctx, mt_norm_kind kind, mt_tensor x, mt_tensor gain, mt_tensor stats,
                                  mt_tensor dy, mt_tensor dresidual, mt_tensor dx, mt_tensor dgain, mt_tensor dbias) {
    mt_tensor *views[] = {&x, &gain, &dbias, &stats, &dy, &dresidual, &dx, &dgain};
    mti_operator op;
    MT_TRY(mti_expect_norm(ctx, "mt_norm_backward", kind, x, "dbias", dbias));
    MT_TRY(mti_accept(&op, ctx, &mti_norm_backward_table, views, NULL));
    MT_TRY(mti_begin(&op));
    mti_norm_slopes b = {kind, x, gain, stats, dy, dresidual, dx, dgain, dbias, 0, mt_none()};
    return mti_end(&op,
                   MTI_CHOOSE(&op, mti_cuda_norm_backward(ctx, kind, x, gain, stats, dy, dresidual, dx, dgain, dbias),
                              mti_norm_backward(&op, &b)));
}
