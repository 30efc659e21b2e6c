/* ---- elementwise kernels that also sum over the rows ------------------------------------------------------------- */

#pragma once
#include "rows.c"

/* out [1, n] += the sum of the four rows of x [4, n]. Adding four rows at a time reads and writes `out` less often. */
static void mti_add_rows4(const float *x, int64_t ld, float *out, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) out[j] += (x[j] + x[ld + j]) + (x[2 * ld + j] + x[3 * ld + j]);
}

/* out [1, n] += the sums of the columns of x [rows, n]. */
static void mti_cpu_column_sums(mt_tensor x, mt_tensor out) {
    float room[4 * MTI_BLOCK];
    int64_t i, j, n, rows;
    for (j = 0; j < x.cols; j += n) {
        float *sums = mti_row(out, 0) + j;
        n = x.dtype == MT_F32 ? x.cols : mt_min(MTI_BLOCK, x.cols - j);
        for (i = 0; i < x.rows; i += rows) {
            mt_tensor block;
            rows = i + 4 <= x.rows ? 4 : 1;
            block = mti_f32_read(x, i, rows, j, n, room);
            if (rows == 4) mti_add_rows4(mti_row(block, 0), mt_tensor_ld(block), sums, n);
            else mti_row_add(sums, mti_row(block, 0), sums, n);
        }
    }
}
