/* ---- bias -------------------------------------------------------------------------------------------------------- */

#pragma once
#include "bias.h"
#include "columns.c"
#include "operator.c"
#include "bias.cuh"

/* y and bias, or dy and dbias */
typedef struct mti_bias {
    mt_tensor y, bias;
} mti_bias;

static void mti_cpu_bias_forward(void *data, int thread, int64_t first, int64_t last) {
    const mti_bias *b = (const mti_bias *)data;
    float room[2][MTI_BLOCK];
    int64_t i, j, n;
    (void)thread;
    for (j = 0; j < b->y.cols; j += n) {
        mt_tensor bias, y;
        n = mt_min(MTI_BLOCK, b->y.cols - j);
        bias = mti_f32_read(b->bias, 0, 1, j, n, room[0]);
        for (i = first; i < last; i++) {
            y = mti_f32_read(b->y, i, 1, j, n, room[1]);
            mti_row_add(mti_row(y, 0), mti_row(bias, 0), mti_row(y, 0), n);
            mti_f32_write(y, b->y, i, j);
        }
    }
}

static void mti_cpu_bias_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_bias *b = (const mti_bias *)data;
    (void)thread;
    mti_cpu_column_sums(mt_tensor_cols(b->y, first, last - first), mt_tensor_cols(b->bias, first, last - first));
}

/* clang-format off */
static const mti_table mti_bias_forward_table = {"mt_bias_forward", {"y bias", "RR rR cc PP", NULL}, {
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_IN_OUT | MTI_AS_IS, NULL},
    {"bias", "1m", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL}}};

static const mti_table mti_bias_backward_table = {"mt_bias_backward", {"dy dbias", "RR rP cc PP", NULL}, {
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MTI_AS_IS, NULL},
    {"dbias", "1m", MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_GRADIENT | MT_ARG_SUM, "dy"}}};
/* clang-format on */

MT_API mt_status mt_bias_forward(mt_context *ctx, mt_tensor y, mt_tensor bias) {
    mt_tensor *views[] = {&y, &bias};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_bias_forward_table, views, NULL));
    MT_TRY(mti_begin(&op));
    mti_bias b = {y, bias};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_bias_forward(ctx, y, bias),
                                mti_cpu_rows(ctx, y.rows, y.cols, mti_cpu_bias_forward, &b)));
}

MT_API mt_status mt_bias_backward(mt_context *ctx, mt_tensor dy, mt_tensor dbias) {
    mt_tensor *views[] = {&dy, &dbias};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_bias_backward_table, views, NULL));
    MT_TRY(mti_begin(&op));
    mti_bias b = {dy, dbias};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_bias_backward(ctx, dy, dbias),
                                mti_cpu_columns(ctx, dy.rows, dy.cols, mti_cpu_bias_backward, &b)));
}
