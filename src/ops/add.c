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

/* clang-format off */
static const mti_table mti_convert_table = {"mt_convert", {"x y", "RR rr cc PP", NULL}, {
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_MOVED | MTI_AS_IS, NULL},
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, "=x"}}};

static const mti_table mti_add_table = {"mt_add", {"a b y", "RRR rrr ccc PPP", NULL}, {
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, NULL},
    {"a", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_MOVED | MTI_AS_IS, NULL},
    {"b", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_MOVED | MTI_AS_IS, NULL}}};
/* clang-format on */

MT_API mt_status mt_convert(mt_context *ctx, mt_tensor x, mt_tensor y) {
    mt_tensor *views[] = {&x, &y};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_convert_table, views, NULL));
    MT_TRY(mti_begin(&op));
    return mti_end(&op, MTI_RUN(&op, mti_cuda_convert(ctx, x, y),
                                x.dtype == y.dtype ? mti_cpu_copy(ctx, x, y) : mti_cpu_convert(ctx, x, y)));
}

MT_API mt_status mt_add(mt_context *ctx, mt_tensor a, mt_tensor b, mt_tensor y) {
    mt_tensor *views[] = {&y, &a, &b};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_add_table, views, NULL));
    MT_TRY(mti_begin(&op));
    mti_add s = {a, b, y};
    return mti_end(&op,
                   MTI_RUN(&op, mti_cuda_add(ctx, a, b, y), mti_cpu_stripes(ctx, y.rows, y.cols, mti_cpu_add, &s)));
}
