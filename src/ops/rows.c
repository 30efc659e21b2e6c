/* ---- loops over one row, and reductions over a row in a block of threads ----------------------------------------- */

#pragma once
#include "16bit.c"

/* Unrolled, because gcc would call memset or `rep stos`, which takes longer than the sum of a short row. */
MT_INLINE void mti_lanes_clear(float *lanes) {
    int l;
    MTI_UNROLL
    for (l = 0; l < MTI_PARTIALS / 2; l++) lanes[l] = lanes[l + MTI_PARTIALS / 2] = 0.0f;
}

/* Returns the sum of the MTI_PARTIALS partial sums in lanes, added as a binary tree. Overwrites lanes. The loops have
   constant lengths, so that each of them becomes a few vector instructions. */
static float mti_lanes_sum(float *lanes) {
    int l;
    for (l = 0; l < MTI_PARTIALS / 2; l++) lanes[l] += lanes[l + MTI_PARTIALS / 2];
    for (l = 0; l < MTI_PARTIALS / 4; l++) lanes[l] += lanes[l + MTI_PARTIALS / 4];
    for (l = 0; l < MTI_PARTIALS / 8; l++) lanes[l] += lanes[l + MTI_PARTIALS / 8];
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

static float mti_row_sum(const float *x, int64_t n) {
    float lanes[MTI_PARTIALS];
    int64_t j;
    int l;
    mti_lanes_clear(lanes);
    for (j = 0; j + MTI_PARTIALS <= n; j += MTI_PARTIALS)
        for (l = 0; l < MTI_PARTIALS; l++) lanes[l] += x[j + l];
    for (l = 0; j + l < n; l++) lanes[l] += x[j + l];
    return mti_lanes_sum(lanes);
}

/* Adds the products of a part of two rows to lanes. All parts but the last one have a multiple of MTI_PARTIALS columns,
   so the sums do not depend on the parts. */
MT_INLINE void mti_lanes_dot(float *lanes, const float *x, const float *y, int64_t n) {
    int64_t j;
    int l;
    for (j = 0; j + MTI_PARTIALS <= n; j += MTI_PARTIALS)
        for (l = 0; l < MTI_PARTIALS; l++) lanes[l] += x[j + l] * y[j + l];
    for (l = 0; j + l < n; l++) lanes[l] += x[j + l] * y[j + l];
}

static float mti_row_dot(const float *x, const float *y, int64_t n) {
    float lanes[MTI_PARTIALS];
    mti_lanes_clear(lanes);
    mti_lanes_dot(lanes, x, y, n);
    return mti_lanes_sum(lanes);
}

static float mti_row_max(const float *x, int64_t n) {
    float lanes[MTI_PARTIALS];
    int64_t j;
    int l;
    for (l = 0; l < MTI_PARTIALS; l++) lanes[l] = -(float)INFINITY;
    for (j = 0; j + MTI_PARTIALS <= n; j += MTI_PARTIALS)
        for (l = 0; l < MTI_PARTIALS; l++) lanes[l] = lanes[l] > x[j + l] ? lanes[l] : x[j + l];
    for (l = 0; j + l < n; l++) lanes[l] = lanes[l] > x[j + l] ? lanes[l] : x[j + l];
    for (l = 0; l < MTI_PARTIALS / 2; l++)
        lanes[l] = lanes[l] > lanes[l + MTI_PARTIALS / 2] ? lanes[l] : lanes[l + MTI_PARTIALS / 2];
    for (l = 0; l < MTI_PARTIALS / 4; l++)
        lanes[l] = lanes[l] > lanes[l + MTI_PARTIALS / 4] ? lanes[l] : lanes[l + MTI_PARTIALS / 4];
    for (l = 1; l < MTI_PARTIALS / 4; l++) lanes[0] = lanes[0] > lanes[l] ? lanes[0] : lanes[l];
    return lanes[0];
}

/* x = e^(x - shift) for whole vectors: n is a multiple of MTI_PARTIALS. No x is above shift. Returns the sum. */
static float mti_row_exp(float *x, float shift, int64_t n) {
    float lanes[MTI_PARTIALS], least = mti_unknown(-127.0f);
    int64_t j;
    int l;
    mti_lanes_clear(lanes);
    for (j = 0; j < n; j += MTI_PARTIALS)
        for (l = 0; l < MTI_PARTIALS; l++) {
            x[j + l] = mti_exp_below(x[j + l] - shift, least);
            lanes[l] += x[j + l];
        }
    return mti_lanes_sum(lanes);
}

/* Begins to load MTI_PARTIALS columns of `rows` rows, from column j on, into L1. */
MT_INLINE void mti_prefetch_columns(mt_tensor t, int rows, int64_t j) {
    int64_t half = MTI_PARTIALS / 2 * (int64_t)mt_dtype_size(t.dtype);
    int r;
    for (r = 0; r < rows; r++) {
        const char *x = (const char *)mti_bytes_at(t, r, j);
        MTI_PREFETCH(x);
        MTI_PREFETCH(x + half);
    }
}

static void mti_row_fill(float *y, float value, int64_t n) {
    int64_t j;
    for (j = 0; j < n; j++) y[j] = value;
}

static void mti_row_add(const float *a, const float *b, float *y, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) y[j] = a[j] + b[j];
}

static void mti_row_scale(float *y, float factor, int64_t n) {
    int64_t j;
    for (j = 0; j < n; j++) y[j] *= factor;
}
