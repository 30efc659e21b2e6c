/* ---- fill -------------------------------------------------------------------------------------------------------- */

#pragma once
#include "rows.c"
#include "operator.c"
#include "fill.cuh"

MT_API mt_tensor mt_none(void) { return mt_tensor_make(NULL, MT_F32, 0, 0); }

typedef struct mti_fill {
    mt_tensor y;
    float value;
} mti_fill;

/* memset, because it writes a long run of zeros to memory without reading the memory first. */
static void mti_cpu_fill(void *data, int thread, int64_t first, int64_t last) {
    const mti_fill *f = (const mti_fill *)data;
    int64_t i, j, count;
    uint16_t value16 = 0;
    (void)thread;
    if (f->y.dtype != MT_F32) mt_f32_to_16bit(f->y.dtype, &f->value, &value16, 1);
    for (i = first; i < last; i += count) {
        mti_stripe p = mti_stripes_of_row(f->y.cols, i, last, &count);
        void *y = mti_bytes_at(f->y, p.row, p.col);
        if (mt_f32_bits(f->value) == 0) memset(y, 0, (size_t)p.cols * mt_dtype_size(f->y.dtype));
        else if (f->y.dtype == MT_F32) mti_row_fill((float *)y, f->value, p.cols);
        else
            for (j = 0; j < p.cols; j++) ((uint16_t *)y)[j] = value16;
    }
}

/* clang-format off */
static const mti_table mti_fill_table = {"mt_fill", {NULL, NULL, NULL}, {
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, NULL}}};
/* clang-format on */

MT_API mt_status mt_fill(mt_context *ctx, mt_tensor y, float value) {
    mt_tensor *views[] = {&y};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_fill_table, views, NULL));
    MT_TRY(mti_start(&op));
    if (mt_check_mode(ctx)) MT_TRY(mt_declare_zero(ctx, y));
    if (mt_check_mode(ctx) && value != 0.0f) MT_TRY(mt_declare(ctx, NULL, y, MT_UNDECLARED));
    mti_fill f = {y, value};
    return mti_end(&op,
                   MTI_RUN(&op, mti_cuda_fill(ctx, y, value), mti_cpu_stripes(ctx, y.rows, y.cols, mti_cpu_fill, &f)));
}
