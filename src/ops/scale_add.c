/* ---- weighted sums ----------------------------------------------------------------------------------------------- */

#pragma once
#include "scale_add.h"
#include "numbers.c"
#include "operator.c"
#include "scale_add.cuh"

/* The arguments of the loop. A factor is mt_none() or an element in the memory of the device. */
typedef struct mti_scale_add {
    float a, b; /* b 0: y is not read */
    mt_tensor a_factor, b_factor, x, y;
} mti_scale_add;

static float mti_factor(float host, mt_tensor device) { return device.data ? host * *(float *)device.data : host; }

static void mti_cpu_scale_add(void *data, int thread, int64_t first, int64_t last) {
    const mti_scale_add *s = (const mti_scale_add *)data;
    const float a = mti_factor(s->a, s->a_factor), b = mti_factor(s->b, s->b_factor);
    float room[2][MTI_BLOCK];
    int64_t i, j, k, n;
    (void)thread;
    for (i = first; i < last; i++) {
        mti_stripe p = mti_stripe_of(s->y.cols, i);
        for (j = p.col; j < p.col + p.cols; j += n) {
            n = mt_min(MTI_BLOCK, p.col + p.cols - j);
            mt_tensor block = s->b == 0.0f ? mti_f32_place(s->y, p.row, 1, j, n, room[1])
                                           : mti_f32_read(s->y, p.row, 1, j, n, room[1]);
            const float *x = mti_row(mti_f32_read(s->x, p.row, 1, j, n, room[0]), 0);
            float *y = mti_row(block, 0);
            if (s->b == 0.0f) {
                MT_INDEPENDENT
                for (k = 0; k < n; k++) y[k] = a * x[k];
            } else {
                MT_INDEPENDENT
                for (k = 0; k < n; k++) y[k] = a * x[k] + b * y[k];
            }
            mti_f32_write(block, s->y, p.row, j);
        }
    }
}

/* clang-format off */
static const mti_table mti_scale_add_table = {"mt_scale_add",
    {"x a_factor b_factor y", "RRRR rRRr cRRc PRRP", NULL}, {
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_MOVED | MTI_AS_IS, "=x a_factor b_factor"},
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_MOVED | MTI_AS_IS, NULL},
    {"a_factor", "11", MT_ARG_F32, MT_ARG_IN | MT_ARG_OPTIONAL, NULL},
    {"b_factor", "11", MT_ARG_F32, MT_ARG_IN | MT_ARG_OPTIONAL, NULL}}};
/* clang-format on */

MT_API mt_status mt_scale_add(mt_context *ctx, float a, mt_tensor a_factor, mt_tensor x, float b, mt_tensor b_factor,
                              mt_tensor y) {
    mt_tensor *views[] = {&y, &x, &a_factor, &b_factor};
    mti_operator op;
    mti_operands(&op, ctx, &mti_scale_add_table, views, NULL);
    if (b != 0.0f) op.args[0].use |= MT_ARG_IN;
    MT_TRY(mti_check(&op));
    MT_TRY(mti_expect_finite(ctx, op.name, "a", a));
    MT_TRY(mti_expect_finite(ctx, op.name, "b", b));
    MT_TRY(mti_numbers_agree(ctx, op.name, "a or b", mt_none(), 1, 2, (double)a, (double)b));
    if (b == 0.0f) b_factor = mt_none();
    MT_TRY(mti_begin(&op));
    mti_scale_add s = {a, b, a_factor, b_factor, x, y};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_scale_add(ctx, a, a_factor, x, b, b_factor, y),
                                mti_cpu_stripes(ctx, y.rows, y.cols, mti_cpu_scale_add, &s)));
}
