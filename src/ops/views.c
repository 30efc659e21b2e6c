/* ---- rows of a tensor for loops, elements of a tensor for kernels ------------------------------------------------ */

#pragma once
#include "system.h"

static float *mti_row(mt_tensor t, int64_t row) { return t.data ? (float *)t.data + row * mt_tensor_ld(t) : NULL; }

static uint16_t *mti_row16(mt_tensor t, int64_t row) {
    return t.data ? (uint16_t *)t.data + row * mt_tensor_ld(t) : NULL;
}

/* The loop of an operator is a function that computes a range of rows or of columns, and a struct with its arguments.
   mti_cpu_rows and mti_cpu_columns run it on the threads of the context. A loop over rows computes rows of results. A
   loop over columns adds up columns: each thread adds all rows in order, so the bits do not depend on the number of
   threads. A range has at least MTI_GRAIN elements, because waking a thread takes as long as computing a few thousand.
   Ranges of columns begin at multiples of MTI_COLUMN_GRAIN, so that seldom two threads write to one cache line. */
#define MTI_GRAIN 16384
#define MTI_COLUMN_GRAIN 64

static void mti_cpu_rows(mt_context *ctx, int64_t rows, int64_t cols, mt_range_function work, void *data) {
    mt_parallel_for(ctx, rows, MTI_GRAIN / mt_max(cols, 1) + 1, work, data);
}

static void mti_cpu_columns(mt_context *ctx, int64_t rows, int64_t cols, mt_range_function work, void *data) {
    int64_t grain = mt_round_up(MTI_GRAIN / mt_max(rows, 1) + 1, MTI_COLUMN_GRAIN);
    mt_parallel_for(ctx, cols, grain, work, data);
}

/* The items of a loop over single elements are stripes, parts of rows, because a tensor may be one long row. */
#define MTI_STRIPE_COLS 4096
typedef struct mti_stripe {
    int64_t row, col, cols;
} mti_stripe;

/* The number of stripes of a row of n columns. */
static int64_t mti_stripes(int64_t n) { return (n + MTI_STRIPE_COLS - 1) / MTI_STRIPE_COLS; }

/* Item i of mti_cpu_stripes for a tensor with `cols` columns. */
static mti_stripe mti_stripe_of(int64_t cols, int64_t i) {
    int64_t stripes = mti_stripes(cols);
    mti_stripe p;
    p.row = i / stripes;
    p.col = i % stripes * MTI_STRIPE_COLS;
    p.cols = mt_min(MTI_STRIPE_COLS, cols - p.col);
    return p;
}

/* All stripes of [first, last) that are in the row of the first one, as one stripe. *count becomes their number. */
static mti_stripe mti_stripes_of_row(int64_t cols, int64_t first, int64_t last, int64_t *count) {
    int64_t stripes = mti_stripes(cols);
    mti_stripe p = mti_stripe_of(cols, first), end;
    *count = mt_min(stripes - first % stripes, last - first);
    end = mti_stripe_of(cols, first + *count - 1);
    p.cols = end.col + end.cols - p.col;
    return p;
}

static void mti_cpu_stripes(mt_context *ctx, int64_t rows, int64_t cols, mt_range_function work, void *data) {
    mti_cpu_rows(ctx, rows * mti_stripes(cols), mt_min(MTI_STRIPE_COLS, cols), work, data);
}
