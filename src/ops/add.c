/* ---- sums and type conversions ----------------------------------------------------------------------------------- */

#pragma once
#include "rows.c"
#include "copy.c"
#include "add.cuh"

typedef struct mti_add {
    mt_tensor a, b, y;
} mti_add;

static void mti_cpu_add(void *data, int thread, int64_t first, int64_t last) {
    const mti_add *s = (const mti_add *)data;
    float room[2][MTI_BLOCK];
    int64_t i, j, n;
    (void)thread;
    for (i = first; i < last; i++) {
        mti_stripe p = mti_stripe_of(s->y.cols, i);
        for (j = p.col; j < p.col + p.cols; j += n) {
            mt_tensor a, b, y;
            n = mt_min(MTI_BLOCK, p.col + p.cols - j);
            a = mti_f32_read(s->a, p.row, 1, j, n, room[0]);
            b = mti_f32_read(s->b, p.row, 1, j, n, room[1]);
            y = mti_f32_place(s->y, p.row, 1, j, n, room[0]);
            mti_row_add(mti_row(a, 0), mti_row(b, 0), mti_row(y, 0), n);
            mti_f32_write(y, s->y, p.row, j);
        }
    }
}

MT_API mt_status mt_convert(mt_context *ctx, mt_tensor x, mt_tensor y) {
    mt_arg args[] = {{"x", &x, x.rows, x.cols, MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_MOVED | MTI_AS_IS},
                     {"y", &y, x.rows, x.cols, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, "mt_convert", args, MTI_COUNT(args)));
    MT_TRY(mti_expect_same_or_apart(ctx, "mt_convert", x, y));
    MT_TRY(mti_begin(&op, ctx, "mt_convert", args, MTI_COUNT(args)));
    return mti_end(&op, MTI_RUN(&op, mti_cuda_convert(ctx, x, y),
                                x.dtype == y.dtype ? mti_cpu_copy(ctx, x, y) : mti_cpu_convert(ctx, x, y)));
}

MT_API mt_status mt_add(mt_context *ctx, mt_tensor a, mt_tensor b, mt_tensor y) {
    mt_arg args[] = {{"y", &y, y.rows, y.cols, MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS},
                     {"a", &a, y.rows, y.cols, MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_MOVED | MTI_AS_IS},
                     {"b", &b, y.rows, y.cols, MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_MOVED | MTI_AS_IS}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, "mt_add", args, MTI_COUNT(args)));
    MT_TRY(mti_begin(&op, ctx, "mt_add", args, MTI_COUNT(args)));
    mti_add s = {a, b, y};
    return mti_end(&op,
                   MTI_RUN(&op, mti_cuda_add(ctx, a, b, y), mti_cpu_stripes(ctx, y.rows, y.cols, mti_cpu_add, &s)));
}
