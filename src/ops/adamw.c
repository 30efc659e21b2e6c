/* ---- AdamW ------------------------------------------------------------------------------------------------------- */

#pragma once
#include "adamw.h"
#include "step.h"
#include "map.cuh"
#include "random_words.cuh"
#include "operator.c"

/* The factors of one step. As in torch.optim.AdamW, the bias corrections are in the step size and in the factor of the
   square root. */
typedef struct mti_adamw {
    float beta1, beta2, one_minus_beta1, one_minus_beta2, eps, grad_scale, keep, step_size, inverse_root2;
} mti_adamw;

MT_API mt_status mt_adamw_check(mt_context *ctx, const mt_adamw *h) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!h) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_adamw_step: hyper is NULL");
    if (h->step < 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_adamw_step: step is %lld, counts from 1", (long long)h->step);
    MT_TRY(mt_check_float(ctx, "mt_adamw_step", NULL, "beta1", h->beta1, MT_FLOAT_PROBABILITY));
    MT_TRY(mt_check_float(ctx, "mt_adamw_step", NULL, "beta2", h->beta2, MT_FLOAT_PROBABILITY));
    MT_TRY(mt_check_float(ctx, "mt_adamw_step", NULL, "eps", h->eps, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mti_expect_finite(ctx, "mt_adamw_step", "lr", h->lr));
    MT_TRY(mti_expect_finite(ctx, "mt_adamw_step", "weight_decay", h->weight_decay));
    return mti_expect_finite(ctx, "mt_adamw_step", "grad_scale", h->grad_scale);
}

/* Refuses a master for an f32 param, and stochastic rounding for an f32 param or with a master. */
static mt_status mti_expect_rounding(mt_context *ctx, const mt_random *round, mt_tensor param, mt_tensor master) {
    if (master.data && param.dtype == MT_F32)
        return mt_fail(ctx, MT_ERR_DTYPE, "mt_adamw_step: param is f32 and has a master, which is for bf16 and f16");
    if (!round) return MT_SUCCESS;
    if (master.data || param.dtype == MT_F32)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "mt_adamw_step: stochastic rounding is for bf16 and f16 without a master; param "
                       "is %s and has %s",
                       mt_dtype_name(param.dtype), master.data ? "a master" : "none");
    return mti_expect_random(ctx, "mt_adamw_step", *round, param.rows, param.cols);
}

/* x^n by squaring, with the same bits on every device. */
static MT_HOST_DEVICE double mti_power(double x, int64_t n) {
    double y = 1.0;
    for (; n > 0; n >>= 1, x *= x)
        if (n & 1) y *= x;
    return y;
}

/* Computes the factors of a step in double and rounds each of them once. */
static MT_HOST_DEVICE mti_adamw mti_adamw_resolve(const mt_adamw *h) {
    double correction1 = 1.0 - mti_power((double)h->beta1, h->step);
    double correction2 = 1.0 - mti_power((double)h->beta2, h->step);
    mti_adamw a;
    a.beta1 = h->beta1;
    a.beta2 = h->beta2;
    a.one_minus_beta1 = (float)(1.0 - (double)h->beta1);
    a.one_minus_beta2 = (float)(1.0 - (double)h->beta2);
    a.eps = h->eps;
    a.grad_scale = h->grad_scale;
    a.keep = (float)(1.0 - (double)h->lr * (double)h->weight_decay);
    a.step_size = (float)((double)h->lr / correction1);
    a.inverse_root2 = (float)(1.0 / sqrt(correction2));
    return a;
}

/* hyper with the values in memory of the device, if there are any. */
static MT_HOST_DEVICE mt_adamw mti_adamw_with(mt_adamw hyper, const mt_adamw_values *values) {
    if (!values) return hyper;
    hyper.lr = values->lr;
    hyper.grad_scale = values->grad_scale;
    hyper.step = values->step;
    return hyper;
}

static void mti_adamw_row(const mti_adamw a, float *param, const float *grad, float *m, float *v, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float g = a.grad_scale * grad[j];
        float first = a.beta1 * m[j] + a.one_minus_beta1 * g, second = a.beta2 * v[j] + a.one_minus_beta2 * (g * g);
        m[j] = first;
        v[j] = second;
        param[j] = a.keep * param[j] - a.step_size * first / (mti_sqrt(second) * a.inverse_root2 + a.eps);
    }
}

/* Updates a row of 16-bit parameters, up to MTI_WORDS_ROOM at a time. master is NULL if there is none. round is NULL
   for rounding to nearest. Otherwise it gives the random words, and e is the global element number of the first one. */
static void mti_adamw_16bit_row(const mti_adamw a, const mt_random *round, int64_t e, mt_dtype dtype, uint16_t *param,
                                float *master, const float *grad, float *m, float *v, int64_t n) {
    float room[MTI_WORDS_ROOM];
    uint32_t words[MTI_WORDS_ROOM];
    int64_t j, count;
    for (j = 0; j < n; j += count) {
        float *p = master ? master + j : room;
        count = mti_words_fit(e + j, n - j);
        if (!master) mt_f32_from_16bit(dtype, param + j, room, count);
        mti_adamw_row(a, p, grad + j, m + j, v + j, count);
        if (round) mti_round_row((int)dtype, room, mti_random_words(*round, e + j, count, words), count);
        mt_f32_to_16bit(dtype, p, param + j, count);
    }
}

typedef struct mti_adamw_loop {
    mti_adamw a;
    const mt_random *round;
    mt_tensor param, master, grad, m, v;
} mti_adamw_loop;

static void mti_adamw_stripe(const mti_adamw_loop *l, mti_stripe p) {
    const mt_random *round = l->round;
    const float *grad = mti_row(l->grad, p.row) + p.col;
    float *m = mti_row(l->m, p.row) + p.col, *v = mti_row(l->v, p.row) + p.col;
    if (l->param.dtype == MT_F32) mti_adamw_row(l->a, mti_row(l->param, p.row) + p.col, grad, m, v, p.cols);
    else
        mti_adamw_16bit_row(l->a, round, round ? mti_random_element(*round, p.row, p.col) : 0, l->param.dtype,
                            mti_row16(l->param, p.row) + p.col,
                            l->master.data ? mti_row(l->master, p.row) + p.col : NULL, grad, m, v, p.cols);
}

static void mti_adamw_stripes(void *data, int thread, int64_t first, int64_t last) {
    const mti_adamw_loop *l = (const mti_adamw_loop *)data;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) mti_adamw_stripe(l, mti_stripe_of(l->param.cols, i));
}

static void mti_cpu_adamw(mt_context *ctx, const mt_adamw *hyper, mt_tensor param, mt_tensor master, mt_tensor grad,
                          mt_tensor m, mt_tensor v) {
    mti_adamw_loop l = {mti_adamw_resolve(hyper), hyper->stochastic_rounding, param, master, grad, m, v};
    mti_cpu_stripes(ctx, param.rows, param.cols, mti_adamw_stripes, &l);
}

#include "adamw.cuh"

/* clang-format off */
static const mti_table mti_adamw_step_table = {"mt_adamw_step", {"param master grad m v", "RRRRR rrrrr ccccc", NULL}, {
    {"param", "nm", MT_ARG_FLOAT, MT_ARG_IN_OUT | MTI_AS_IS, NULL},
    {"master", "nm", MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_OPTIONAL, NULL},
    {"grad", "nm", MT_ARG_F32, MT_ARG_IN | MT_ARG_GRADIENT, NULL},
    {"m", "nm", MT_ARG_F32, MT_ARG_IN_OUT, NULL},
    {"v", "nm", MT_ARG_F32, MT_ARG_IN_OUT, NULL}}};
/* clang-format on */

MT_API mt_status mt_adamw_step(mt_context *ctx, const mt_adamw *hyper, mt_tensor param, mt_tensor master,
                               mt_tensor grad, mt_tensor m, mt_tensor v) {
    mt_tensor *views[] = {&param, &master, &grad, &m, &v};
    mti_operator op;
    MT_TRY(mt_adamw_check(ctx, hyper));
    MT_TRY(mti_accept(&op, ctx, &mti_adamw_step_table, views, NULL));
    MT_TRY(mti_expect_rounding(ctx, hyper->stochastic_rounding, param, master));
    MT_TRY(mti_begin(&op));
    op.work.work = MT_WORK_OPTIMIZER;
    if (master.data) op.work.bytes -= mti_view_bytes(param); /* is only written */
    return mti_end(&op,
                   MTI_RUN(&op,
                           hyper->stochastic_rounding ? mti_cuda_adamw<true>(ctx, hyper, param, master, grad, m, v)
                                                      : mti_cuda_adamw<false>(ctx, hyper, param, master, grad, m, v),
                           mti_cpu_adamw(ctx, hyper, param, master, grad, m, v)));
}
