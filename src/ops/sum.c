/* ---- sums over rows ---------------------------------------------------------------------------------------------- */

#pragma once
#include "multi_tensor.h"
#include "operator.c"
#include "sum.cuh"

static double mti_lanes_sum_double(double *lanes) {
    int half, l;
    for (half = MTI_PARTIALS / 2; half > 0; half /= 2)
        for (l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

static void mti_lanes_add(double *lanes, const float *x, int64_t n) {
    int64_t j;
    int l;
    for (j = 0; j + MTI_PARTIALS <= n; j += MTI_PARTIALS)
        for (l = 0; l < MTI_PARTIALS; l++) lanes[l] += (double)x[j + l];
    for (l = 0; j + l < n; l++) lanes[l] += (double)x[j + l];
}

static void mti_lanes_add_squares(double *lanes, const float *x, int64_t n) {
    int64_t j;
    int l;
    for (j = 0; j + MTI_PARTIALS <= n; j += MTI_PARTIALS)
        for (l = 0; l < MTI_PARTIALS; l++) lanes[l] += (double)x[j + l] * (double)x[j + l];
    for (l = 0; j + l < n; l++) lanes[l] += (double)x[j + l] * (double)x[j + l];
}

/* A sum is that of at most MTI_SUM_PARTS parts, added in order. A part is a number of stripes with about MTI_GRAIN
   elements or more. The parts depend on the shape only, so the bits do not depend on the number of threads. */
#define MTI_SUM_PARTS 64
typedef struct mti_sum_parts {
    mt_tensor x;
    int squares;
    int64_t stripes, each; /* of x, and of a part */
    double sums[MTI_SUM_PARTS];
} mti_sum_parts;

/* Adds n numbers of a row, or their squares, from `col` on. */
static void mti_lanes_add_row(double *lanes, const mti_sum_parts *s, int64_t row, int64_t col, int64_t n) {
    float room[MTI_BLOCK];
    int64_t j, count;
    for (j = 0; j < n; j += count) {
        const float *x = room;
        count = s->x.dtype == MT_F32 ? n : mt_min(MTI_BLOCK, n - j);
        if (s->x.dtype == MT_F32) x = mti_row(s->x, row) + col;
        else mti_cpu_load(s->x, row, col + j, count, room);
        if (s->squares) mti_lanes_add_squares(lanes, x, count);
        else mti_lanes_add(lanes, x, count);
    }
}

static double mti_sum_of_part(const mti_sum_parts *s, int64_t part) {
    double lanes[MTI_PARTIALS] = {0};
    int64_t i = part * s->each, last = mt_min(i + s->each, s->stripes), count;
    for (; i < last; i += count) {
        mti_stripe p = mti_stripes_of_row(s->x.cols, i, last, &count);
        mti_lanes_add_row(lanes, s, p.row, p.col, p.cols);
    }
    return mti_lanes_sum_double(lanes);
}

static void mti_cpu_sum_parts(void *data, int thread, int64_t first, int64_t last) {
    mti_sum_parts *s = (mti_sum_parts *)data;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) s->sums[i] = mti_sum_of_part(s, i);
}

static void mti_cpu_sum(mt_context *ctx, mt_tensor x, int squares, mt_tensor out) {
    mti_sum_parts s;
    double sum = 0.0;
    int64_t i, parts, least = MTI_GRAIN / mt_max(mt_min(MTI_STRIPE_COLS, x.cols), 1) + 1;
    s.x = x;
    s.squares = squares;
    s.stripes = x.rows * mti_stripes(x.cols);
    s.each = mt_max(least, (s.stripes + MTI_SUM_PARTS - 1) / MTI_SUM_PARTS);
    parts = (s.stripes + s.each - 1) / s.each;
    mt_parallel_for(ctx, parts, 1, mti_cpu_sum_parts, &s);
    for (i = 0; i < parts; i++) sum += s.sums[i];
    *(float *)out.data = (float)((double)*(float *)out.data + sum);
}

/* clang-format off */
static const mti_table mti_sum_table = {"mt_sum", {"x out", "RR rP cP PP", NULL}, {
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"out", "11", MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_SUM, NULL}}};

static const mti_table mti_sum_of_squares_table = {"mt_sum_of_squares", {"x out", "RR rP cP", NULL}, {
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"out", "11", MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_SUM, NULL}}};

/* The rows of x, and row 0, which becomes their sum. */
static const mti_table mti_tree_sum_table = {"mt_tree_sum", {"x sum", "RR rP cc PP", NULL}, {
    {"x", "nm", MT_ARG_F32, MT_ARG_IN, NULL},
    {"sum", "1m", MT_ARG_F32, MT_ARG_OUT, NULL}}};
/* clang-format on */

static mt_status mti_sum(mt_context *ctx, const mti_table *table, mt_tensor x, int squares, mt_tensor out) {
    mt_tensor *views[] = {&x, &out};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, table, views, NULL));
    MT_TRY(mti_begin(&op));
    return mti_end(&op, MTI_RUN(&op, mti_cuda_sum(ctx, x, squares, out), mti_cpu_sum(ctx, x, squares, out)));
}

MT_API mt_status mt_sum(mt_context *ctx, mt_tensor x, mt_tensor out) { return mti_sum(ctx, &mti_sum_table, x, 0, out); }

MT_API mt_status mt_sum_of_squares(mt_context *ctx, mt_tensor x, mt_tensor out) {
    return mti_sum(ctx, &mti_sum_of_squares_table, x, 1, out);
}

/* On the meta device, where x may have any number of rows, the additions are one entry. */
static void mti_trace_tree_sum(mt_context *ctx, mt_tensor x) {
    mt_trace_entry e;
    memset(&e, 0, sizeof e);
    e.name = "mt_tree_sum";
    e.bytes = 12.0 * (double)(x.rows - 1) * (double)x.cols; /* each addition reads two rows and writes one */
    mt_trace_add(ctx, &e);
}

/* Row 0 is the sum of all rows. The others are no longer what they were. */
static mt_status mti_tree_sum_rule(mt_context *ctx, mt_tensor x) {
    mt_tensor sum = mt_tensor_rows(x, 0, 1), *views[] = {&x, &sum};
    mti_operator op;
    if (x.rows == 1) return MT_SUCCESS;
    mti_operands(&op, ctx, &mti_tree_sum_table, views, NULL);
    MT_TRY(mti_apply_rule(&op));
    return mt_declare(ctx, NULL, mt_tensor_rows(x, 1, x.rows - 1), MT_UNDECLARED);
}

MT_API mt_status mt_tree_sum(mt_context *ctx, mt_tensor x) {
    int64_t step, i;
    MT_TRY(mt_tensor_check(ctx, "mt_tree_sum", "x", x, MT_ARG_F32, x.rows, x.cols));
    if (mti_is_empty(x)) return MT_SUCCESS;
    if (!mt_context_has_data(ctx)) {
        mti_trace_tree_sum(ctx, x);
        return mti_tree_sum_rule(ctx, x);
    }
    for (step = 1; step < x.rows; step *= 2)
        for (i = 0; i + step < x.rows; i += 2 * step)
            MT_TRY(mt_add(ctx, mt_tensor_rows(x, i, 1), mt_tensor_rows(x, i + step, 1), mt_tensor_rows(x, i, 1)));
    return mti_tree_sum_rule(ctx, x);
}
