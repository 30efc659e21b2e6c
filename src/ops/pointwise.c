/* ---- products and gates, element by element ---------------------------------------------------------------------- */

#pragma once
#include "pointwise.h"
#include "rows.cuh"
#include "map.cuh"
#include "columns.c"
#include "columns.cuh"
#include "operator.c"

/* What an operator computes from its inputs a and b. */
typedef enum mti_pointwise {
    MTI_MULTIPLY,      /* a * b */
    MTI_MULTIPLY_ROW,  /* a * b, b is one row */
    MTI_MULTIPLY_COL,  /* a * b, b is one column */
    MTI_SIGMOID,       /* sigmoid(a) */
    MTI_SIGMOID_SLOPE, /* sigmoid'(a) * b */
    MTI_SILU,          /* silu(a) */
    MTI_SILU_SLOPE,    /* silu'(a) * b */
    MTI_SIGMOID_GATE   /* sigmoid(a) * b */
} mti_pointwise;

MT_INLINE MT_HOST_DEVICE float mti_sigmoid(float x) { return 1.0f / (1.0f + mti_exp(-x)); }

/* y = a * b. In this function and in the other functions of one row below, a result may be an input. */
MT_INLINE MT_HOST_DEVICE void mti_multiply_row(const float *a, const float *b, float *y, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = a[j] * b[j];
}

MT_INLINE MT_HOST_DEVICE void mti_scale_row(const float *x, float factor, float *y, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = x[j] * factor;
}

MT_INLINE MT_HOST_DEVICE void mti_sigmoid_row(const float *x, float *y, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = mti_sigmoid(x[j]);
}

/* The slope of sigmoid is sigmoid(x) * (1 - sigmoid(x)). The second factor is computed as sigmoid(-x), because the
   subtraction would lose digits. */
MT_INLINE MT_HOST_DEVICE void mti_sigmoid_backward_row(const float *x, const float *dy, float *dx, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) dx[j] = dy[j] * (mti_sigmoid(x[j]) * mti_sigmoid(-x[j]));
}

MT_INLINE MT_HOST_DEVICE void mti_silu_backward_row(const float *x, const float *dy, float *dx, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) dx[j] = dy[j] * (mti_sigmoid(x[j]) * (1.0f + x[j] * mti_sigmoid(-x[j])));
}

MT_INLINE MT_HOST_DEVICE void mti_sigmoid_gate_row(const float *gate, const float *x, float *y, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = x[j] * mti_sigmoid(gate[j]);
}

/* Computes dgate and dx. It reads element j of all inputs before it writes element j of a result, because a result may
   be an input. */
MT_INLINE MT_HOST_DEVICE void mti_gate_backward_row(const float *gate, const float *x, const float *dy, float *dgate,
                                                    float *dx, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float opened = mti_sigmoid(gate[j]), up = dy[j];
        float slope = up * x[j] * (opened * mti_sigmoid(-gate[j]));
        dgate[j] = slope;
        dx[j] = up * opened;
    }
}

/* y = kind(a, b) for n elements: a whole row on a CPU, a vector on a GPU. For MTI_MULTIPLY_COL, b[0] is the factor of
   all n elements. */
MT_INLINE MT_HOST_DEVICE void mti_pointwise_row(mti_pointwise kind, const float *a, const float *b, float *y,
                                                int64_t n) {
    switch (kind) {
    case MTI_MULTIPLY_COL: mti_scale_row(a, b[0], y, n); break;
    case MTI_SIGMOID: mti_sigmoid_row(a, y, n); break;
    case MTI_SIGMOID_SLOPE: mti_sigmoid_backward_row(a, b, y, n); break;
    case MTI_SILU: mti_sigmoid_gate_row(a, a, y, n); break; /* SiLU(a) = a * sigmoid(a) */
    case MTI_SILU_SLOPE: mti_silu_backward_row(a, b, y, n); break;
    case MTI_SIGMOID_GATE: mti_sigmoid_gate_row(a, b, y, n); break;
    default: mti_multiply_row(a, b, y, n); break;
    }
}

typedef struct mti_pointwise_of {
    mti_pointwise kind;
    mt_tensor a, b, y;
} mti_pointwise_of;

static void mti_cpu_pointwise(void *data, int thread, int64_t first, int64_t last) {
    const mti_pointwise_of *p = (const mti_pointwise_of *)data;
    float room[3][MTI_BLOCK];
    int64_t i, j, n;
    (void)thread;
    for (i = first; i < last; i++)
        for (j = 0; j < p->y.cols; j += n) {
            mt_tensor a, b, y;
            n = mt_min(MTI_BLOCK, p->y.cols - j);
            a = mti_f32_read(p->a, i, 1, j, n, room[0]);
            if (p->kind == MTI_MULTIPLY_COL) b = mti_f32_read(p->b, i, 1, 0, 1, room[1]);
            else b = mti_f32_read(p->b, p->kind == MTI_MULTIPLY_ROW ? 0 : i, 1, j, n, room[1]);
            y = mti_f32_place(p->y, i, 1, j, n, room[2]);
            mti_pointwise_row(p->kind, mti_row(a, 0), mti_row(b, 0), mti_row(y, 0), n);
            mti_f32_write(y, p->y, i, j);
        }
}

/* The backward of a product or of a gate. `factor` is row, col or gate, and dfactor its gradient. */
typedef struct mti_product_slopes {
    mt_tensor x, factor, dy, dx, dfactor;
} mti_product_slopes;

static void mti_cpu_multiply_col_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_product_slopes *b = (const mti_product_slopes *)data;
    float room[3][MTI_BLOCK], lanes[MTI_PARTIALS], factor, sum;
    int64_t i, j, n;
    (void)thread;
    for (i = first; i < last; i++) {
        mt_tensor dfactor = mti_f32_place(b->dfactor, i, 1, 0, 1, &sum);
        mti_cpu_load(b->factor, i, 0, 1, &factor);
        mti_lanes_clear(lanes);
        for (j = 0; j < b->dy.cols; j += n) {
            mt_tensor dx;
            float *dy, *x;
            n = mt_min(MTI_BLOCK, b->dy.cols - j);
            dy = mti_row(mti_f32_read(b->dy, i, 1, j, n, room[0]), 0);
            x = mti_row(mti_f32_read(b->x, i, 1, j, n, room[1]), 0);
            mti_lanes_dot(lanes, dy, x, n);
            if (!b->dx.data) continue;
            dx = mti_f32_place(b->dx, i, 1, j, n, room[2]);
            mti_scale_row(dy, factor, mti_row(dx, 0), n);
            mti_f32_write(dx, b->dx, i, j);
        }
        mti_row(dfactor, 0)[0] = mti_lanes_sum(lanes);
        mti_f32_write(dfactor, b->dfactor, i, 0);
    }
}

static void mti_cpu_gate_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_product_slopes *b = (const mti_product_slopes *)data;
    float room[5][MTI_BLOCK];
    int64_t i, j, n;
    (void)thread;
    for (i = first; i < last; i++)
        for (j = 0; j < b->dy.cols; j += n) {
            mt_tensor gate, x, dy, dgate, dx;
            n = mt_min(MTI_BLOCK, b->dy.cols - j);
            gate = mti_f32_read(b->factor, i, 1, j, n, room[0]);
            x = mti_f32_read(b->x, i, 1, j, n, room[1]);
            dy = mti_f32_read(b->dy, i, 1, j, n, room[2]);
            dgate = mti_f32_place(b->dfactor, i, 1, j, n, room[3]);
            dx = mti_f32_place(b->dx, i, 1, j, n, room[4]);
            mti_gate_backward_row(mti_row(gate, 0), mti_row(x, 0), mti_row(dy, 0), mti_row(dgate, 0), mti_row(dx, 0),
                                  n);
            mti_f32_write(dgate, b->dfactor, i, j);
            mti_f32_write(dx, b->dx, i, j);
        }
}

/* Computes dx and drow for rows [i, i + 4), or as many as there are, and columns [j, j + n), with n <= MTI_BLOCK. The
   products dy * x stay in L1 until they are added to drow. dx of a row is written when the row has been read, because
   it may be x, row or dy. It may be row only where there is one row. */
static void mti_multiply_row_backward_block(const mti_product_slopes *b, int64_t i, int64_t j, int64_t n) {
    float products[4 * MTI_BLOCK], room[4][MTI_BLOCK], *sums = mti_row(b->dfactor, 0) + j;
    float *row = mti_row(mti_f32_read(b->factor, 0, 1, j, n, room[0]), 0);
    int64_t r, rows = mt_min(4, b->dy.rows - i);
    for (r = 0; r < rows; r++) {
        float *dy = mti_row(mti_f32_read(b->dy, i + r, 1, j, n, room[1]), 0);
        mt_tensor dx = mti_f32_place(b->dx, i + r, 1, j, n, room[3]);
        mti_multiply_row(dy, mti_row(mti_f32_read(b->x, i + r, 1, j, n, room[2]), 0), products + r * MTI_BLOCK, n);
        if (!dx.data) continue;
        mti_multiply_row(dy, row, mti_row(dx, 0), n);
        mti_f32_write(dx, b->dx, i + r, j);
    }
    if (rows == 4) mti_add_rows4(products, MTI_BLOCK, sums, n);
    for (r = 0; r < rows && rows < 4; r++) mti_row_add(sums, products + r * MTI_BLOCK, sums, n);
}

/* A range of columns of dx and drow. */
static void mti_cpu_multiply_row_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_product_slopes *b = (const mti_product_slopes *)data;
    int64_t i, j;
    (void)thread;
    for (i = 0; i < b->dy.rows; i += 4)
        for (j = first; j < last; j += MTI_BLOCK) mti_multiply_row_backward_block(b, i, j, mt_min(MTI_BLOCK, last - j));
}

#include "pointwise.cuh"

/* clang-format off */
/* The tables of operators with one result, which is first, and one or two inputs. */
static const mti_table mti_multiply_table = {"mt_multiply", {"a b y", "RRR rrr ccc PRP RPP", NULL}, {
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, NULL},
    {"a", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_MOVED | MTI_AS_IS, NULL},
    {"b", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_MOVED | MTI_AS_IS, NULL}}};

static const mti_table mti_multiply_row_forward_table = {"mt_multiply_row_forward",
    {"x row y", "RRR rRr ccc PRP", NULL}, {
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, NULL},
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_MOVED | MTI_AS_IS, NULL},
    {"row", "1m", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL}}};

static const mti_table mti_multiply_col_forward_table = {"mt_multiply_col_forward",
    {"x col y", "RRR rrr cRc PRP", NULL}, {
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, NULL},
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_MOVED | MTI_AS_IS, NULL},
    {"col", "n1", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL}}};

static const mti_table mti_sigmoid_forward_table = {"mt_sigmoid_forward", {"x y", "RR rr cc", NULL}, {
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, NULL},
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL}}};

static const mti_table mti_sigmoid_backward_table = {"mt_sigmoid_backward", {"x dy dx(x)", "RRR rrr ccc RPP", NULL}, {
    {"dx", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MTI_AS_IS, NULL},
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MTI_AS_IS, NULL}}};

static const mti_table mti_silu_forward_table = {"mt_silu_forward", {"x y", "RR rr cc", NULL}, {
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, NULL},
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL}}};

static const mti_table mti_silu_backward_table = {"mt_silu_backward", {"x dy dx(x)", "RRR rrr ccc RPP", NULL}, {
    {"dx", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MTI_AS_IS, NULL},
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MTI_AS_IS, NULL}}};

static const mti_table mti_sigmoid_gate_forward_table = {"mt_sigmoid_gate_forward",
    {"gate x y", "RRR rrr ccc RPP", NULL}, {
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, NULL},
    {"gate", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL}}};

/* The rules of two backward operators, which have a second table for calls without the last operand. */
#define MTI_MULTIPLY_ROW_RULE {"dy x row dx(x) drow(row)", "RRRRR rrRrP ccccc PRRPP RPRRP", NULL}
#define MTI_MULTIPLY_COL_RULE {"dy x col dx(x) dcol(col)", "RRRRR rrrrr ccRcP PRRPP RPRRP", NULL}

static const mti_table mti_multiply_row_backward_table = {"mt_multiply_row_backward", MTI_MULTIPLY_ROW_RULE, {
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MTI_AS_IS, NULL},
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"row", "1m", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"dx", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MT_ARG_OPTIONAL | MTI_AS_IS, NULL},
    {"drow", "1m", MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_GRADIENT | MT_ARG_SUM | MT_ARG_OPTIONAL, "*"}}};

/* The same without drow. */
static const mti_table mti_multiply_row_alone_table = {"mt_multiply_row_backward", MTI_MULTIPLY_ROW_RULE, {
    {"dx", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MTI_AS_IS, NULL},
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MT_ARG_MOVED | MTI_AS_IS, NULL},
    {"row", "1m", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL}}};

/* dcol is first, because it is also written if x has no columns. */
static const mti_table mti_multiply_col_backward_table = {"mt_multiply_col_backward", MTI_MULTIPLY_COL_RULE, {
    {"dcol", "n1", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MT_ARG_OPTIONAL | MTI_AS_IS, "dy x col dx"},
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MTI_AS_IS, NULL},
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"col", "n1", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"dx", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MT_ARG_OPTIONAL | MTI_AS_IS, NULL}}};

/* The same without dcol. */
static const mti_table mti_multiply_col_alone_table = {"mt_multiply_col_backward", MTI_MULTIPLY_COL_RULE, {
    {"dx", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MTI_AS_IS, NULL},
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MT_ARG_MOVED | MTI_AS_IS, NULL},
    {"col", "n1", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL}}};

static const mti_table mti_sigmoid_gate_backward_table = {"mt_sigmoid_gate_backward",
    {"dy gate x dgate(gate) dx(x)", "RRRRR rrrrr ccccc PRRPP RRPPR", NULL}, {
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MTI_AS_IS, NULL},
    {"gate", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"dgate", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MTI_AS_IS, "dx"},
    {"dx", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MTI_AS_IS, NULL}}};
/* clang-format on */

/* y = kind(a, b); b is mt_none() if the kind has no b. */
static mt_status mti_run_pointwise(mt_context *ctx, const mti_table *table, mti_pointwise kind, mt_tensor a,
                                   mt_tensor b, mt_tensor y) {
    mt_tensor *views[] = {&y, &a, &b};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, table, views, NULL));
    MT_TRY(mti_begin(&op));
    mti_pointwise_of p = {kind, a, b, y};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_pointwise(ctx, op.name, kind, a, b, y),
                                mti_cpu_rows(ctx, y.rows, y.cols, mti_cpu_pointwise, &p)));
}

MT_API mt_status mt_multiply(mt_context *ctx, mt_tensor a, mt_tensor b, mt_tensor y) {
    return mti_run_pointwise(ctx, &mti_multiply_table, MTI_MULTIPLY, a, b, y);
}

MT_API mt_status mt_multiply_row_forward(mt_context *ctx, mt_tensor x, mt_tensor row, mt_tensor y) {
    return mti_run_pointwise(ctx, &mti_multiply_row_forward_table, MTI_MULTIPLY_ROW, x, row, y);
}

MT_API mt_status mt_multiply_row_backward(mt_context *ctx, mt_tensor x, mt_tensor row, mt_tensor dy, mt_tensor dx,
                                          mt_tensor drow) {
    mt_tensor *views[] = {&dy, &x, &row, &dx, &drow};
    mti_operator op;
    mti_operands(&op, ctx, &mti_multiply_row_backward_table, views, NULL);
    MT_TRY(mt_args_check(ctx, op.name, op.args, op.views));
    if (!drow.data && !dx.data) return MT_SUCCESS;
    if (!drow.data) return mti_run_pointwise(ctx, &mti_multiply_row_alone_table, MTI_MULTIPLY_ROW, dy, row, dx);
    MT_TRY(mti_expect_all_apart(&op));
    MT_TRY(mti_begin(&op));
    mti_product_slopes b = {x, row, dy, dx, drow};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_multiply_row_backward(ctx, x, row, dy, dx, drow),
                                mti_cpu_columns(ctx, dy.rows, dy.cols, mti_cpu_multiply_row_backward, &b)));
}

MT_API mt_status mt_multiply_col_forward(mt_context *ctx, mt_tensor x, mt_tensor col, mt_tensor y) {
    return mti_run_pointwise(ctx, &mti_multiply_col_forward_table, MTI_MULTIPLY_COL, x, col, y);
}

MT_API mt_status mt_multiply_col_backward(mt_context *ctx, mt_tensor x, mt_tensor col, mt_tensor dy, mt_tensor dx,
                                          mt_tensor dcol) {
    mt_tensor *views[] = {&dcol, &dy, &x, &col, &dx};
    mti_operator op;
    mti_operands(&op, ctx, &mti_multiply_col_backward_table, views, NULL);
    MT_TRY(mt_args_check(ctx, op.name, op.args, op.views));
    if (!dcol.data && !dx.data) return MT_SUCCESS;
    if (!dcol.data) return mti_run_pointwise(ctx, &mti_multiply_col_alone_table, MTI_MULTIPLY_COL, dy, col, dx);
    MT_TRY(mti_expect_all_apart(&op));
    MT_TRY(mti_begin(&op));
    mti_product_slopes b = {x, col, dy, dx, dcol};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_multiply_col_backward(ctx, x, col, dy, dx, dcol),
                                mti_cpu_rows(ctx, dy.rows, dy.cols, mti_cpu_multiply_col_backward, &b)));
}

MT_API mt_status mt_sigmoid_forward(mt_context *ctx, mt_tensor x, mt_tensor y) {
    return mti_run_pointwise(ctx, &mti_sigmoid_forward_table, MTI_SIGMOID, x, mt_none(), y);
}

MT_API mt_status mt_sigmoid_backward(mt_context *ctx, mt_tensor x, mt_tensor dy, mt_tensor dx) {
    return mti_run_pointwise(ctx, &mti_sigmoid_backward_table, MTI_SIGMOID_SLOPE, x, dy, dx);
}

MT_API mt_status mt_silu_forward(mt_context *ctx, mt_tensor x, mt_tensor y) {
    return mti_run_pointwise(ctx, &mti_silu_forward_table, MTI_SILU, x, mt_none(), y);
}

MT_API mt_status mt_silu_backward(mt_context *ctx, mt_tensor x, mt_tensor dy, mt_tensor dx) {
    return mti_run_pointwise(ctx, &mti_silu_backward_table, MTI_SILU_SLOPE, x, dy, dx);
}

MT_API mt_status mt_sigmoid_gate_forward(mt_context *ctx, mt_tensor gate, mt_tensor x, mt_tensor y) {
    return mti_run_pointwise(ctx, &mti_sigmoid_gate_forward_table, MTI_SIGMOID_GATE, gate, x, y);
}

MT_API mt_status mt_sigmoid_gate_backward(mt_context *ctx, mt_tensor gate, mt_tensor x, mt_tensor dy, mt_tensor dgate,
                                          mt_tensor dx) {
    mt_tensor *views[] = {&dy, &gate, &x, &dgate, &dx};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_sigmoid_gate_backward_table, views, NULL));
    MT_TRY(mti_begin(&op));
    mti_product_slopes b = {x, gate, dy, dx, dgate};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_gate_backward(ctx, gate, x, dy, dgate, dx),
                                mti_cpu_rows(ctx, dy.rows, dy.cols, mti_cpu_gate_backward, &b)));
}
