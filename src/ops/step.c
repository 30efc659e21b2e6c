/* ---- loss scale, norm, clipping and the decision of a step ------------------------------------------------------- */

#pragma once
#include "step.h"
#include "multi_tensor.h"
#include "operator.c"

MT_API const char *mt_loss_scaler_fault(const mt_loss_scaler_desc *d) {
    if (!d) return NULL;
    if (!(d->min_scale > 0.0f && 1.0f / d->min_scale <= FLT_MAX)) return "loss_scaler.min_scale";
    if (!(d->initial_scale >= d->min_scale && d->initial_scale <= FLT_MAX)) return "loss_scaler.initial_scale";
    if (!(d->growth >= 1.0f && d->growth <= FLT_MAX)) return "loss_scaler.growth";
    if (!(d->backoff > 0.0f && d->backoff <= 1.0f)) return "loss_scaler.backoff";
    if (d->growth_interval <= 0) return "loss_scaler.growth_interval";
    return d->hysteresis <= 0 ? "loss_scaler.hysteresis" : NULL;
}

#define MTI_SCALER_AT(member) offsetof(mt_loss_scaler_desc, member)
static const struct {
    const char *name, *wanted;
    size_t at; /* the place in mt_loss_scaler_desc */
    int whole; /* 1: an int; 0: a float */
} mti_scaler_fields[] = {
    {"loss_scaler.initial_scale", "at least min_scale and finite", MTI_SCALER_AT(initial_scale), 0},
    {"loss_scaler.min_scale", "above 0, and so large that 1 / min_scale is finite", MTI_SCALER_AT(min_scale), 0},
    {"loss_scaler.growth", "at least 1 and finite", MTI_SCALER_AT(growth), 0},
    {"loss_scaler.backoff", "above 0 and at most 1", MTI_SCALER_AT(backoff), 0},
    {"loss_scaler.growth_interval", "at least 1", MTI_SCALER_AT(growth_interval), 1},
    {"loss_scaler.hysteresis", "at least 1", MTI_SCALER_AT(hysteresis), 1}};
#undef MTI_SCALER_AT

/* Returns the place of the field in mti_scaler_fields, or -1. */
static int mti_scaler_field(const char *name) {
    int i = MTI_COUNT(mti_scaler_fields) - 1;
    while (i >= 0 && strcmp(mti_scaler_fields[i].name, name) != 0) i--;
    return i;
}

MT_API const char *mt_loss_scaler_wanted(const char *field) {
    int i = field ? mti_scaler_field(field) : -1;
    return i < 0 ? NULL : mti_scaler_fields[i].wanted;
}

static mt_status mti_loss_scaler_check(mt_context *ctx, const mt_loss_scaler_desc *d) {
    const char *fault = mt_loss_scaler_fault(d);
    char is[32];
    float x;
    int i, n;
    if (!fault) return MT_SUCCESS;
    i = mti_scaler_field(fault);
    memcpy(&x, (const char *)d + mti_scaler_fields[i].at, sizeof x);
    memcpy(&n, (const char *)d + mti_scaler_fields[i].at, sizeof n);
    if (mti_scaler_fields[i].whole) snprintf(is, sizeof is, "%d", n);
    else mt_f32_digits(x, is);
    return mti_field_fail(ctx, MT_ERR_ARGUMENT, "mt_loss_scaler_create", NULL, fault + strlen("loss_scaler."), is,
                          mti_scaler_fields[i].wanted);
}

MT_API mt_status mt_loss_scaler_create(mt_context *ctx, const mt_loss_scaler_desc *desc, mt_loss_scaler *out) {
    mt_loss_scaler_desc d;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_loss_scaler_create: out is NULL");
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (d.initial_scale == 0.0f) d.initial_scale = 4294967296.0f;
    if (d.min_scale == 0.0f) d.min_scale = 1.0f;
    if (d.growth == 0.0f) d.growth = 2.0f;
    if (d.backoff == 0.0f) d.backoff = 0.5f;
    if (!d.growth_interval) d.growth_interval = 1000;
    if (!d.hysteresis) d.hysteresis = 2;
    MT_TRY(mti_loss_scaler_check(ctx, &d));
    memset(out, 0, sizeof *out);
    out->desc = d;
    out->scale = d.initial_scale;
    return MT_SUCCESS;
}

/* Steps and scales are computed in double where nvcc could contract or approximate f32: a product, a quotient or a root
   of floats in double, rounded to float, has the bits of the f32 operation. */
static MT_HOST_DEVICE void mti_loss_scaler_shrink(mt_loss_scaler *s) {
    s->skipped++;
    s->good_steps = 0;
    if (++s->overflows < s->desc.hysteresis) return;
    s->scale *= s->desc.backoff;
    if (s->scale < s->desc.min_scale) s->scale = s->desc.min_scale;
}

static MT_HOST_DEVICE void mti_loss_scaler_grow(mt_loss_scaler *s) {
    if (++s->good_steps < s->desc.growth_interval) return;
    s->good_steps = s->overflows = 0;
    if (s->scale * s->desc.growth <= FLT_MAX) s->scale *= s->desc.growth;
}

static MT_HOST_DEVICE float mti_unscale(float scale) { return (float)(1.0 / (double)scale); }

static MT_HOST_DEVICE float mti_loss_scaler_update(mt_loss_scaler *scaler, float *norm) {
    float unscale = mti_unscale(scaler->scale);
    *norm = (float)((double)*norm * (double)unscale);
    if (!(*norm <= FLT_MAX)) {
        mti_loss_scaler_shrink(scaler);
        return 0.0f;
    }
    mti_loss_scaler_grow(scaler);
    return unscale;
}

MT_API float mt_loss_scaler_update(mt_loss_scaler *scaler, float *norm) {
    return scaler && norm ? mti_loss_scaler_update(scaler, norm) : 0.0f;
}

static MT_HOST_DEVICE float mti_clip_coefficient(float norm, float max_norm) {
    float sum = (float)((double)norm + (double)1e-6f), c = (float)((double)max_norm / (double)sum);
    return max_norm > 0.0f && c < 1.0f ? c : 1.0f;
}

MT_API float mt_clip_coefficient(float norm, float max_norm) { return mti_clip_coefficient(norm, max_norm); }

/* Copies that do not count must still be finite, or this copy of a parameter would differ from the others after the
   step. When they alone are not, the norm is NaN. Otherwise they do not change the norm, because a split without copies
   must give the same, also when it is infinite. The sign of a NaN depends on the order of operands, and so on the
   split, so every NaN becomes NAN. */
static MT_HOST_DEVICE float mti_norm_of_sums(float counted, float others) {
    const float largest = FLT_MAX;
    float norm = (float)sqrt((double)counted);
    if (norm != norm || (counted <= largest && !(others <= largest))) return NAN;
    return norm;
}

MT_API float mt_norm_of_sums(const float sums[2]) { return sums ? mti_norm_of_sums(sums[0], sums[1]) : 0.0f; }

/* The gradient of an infinite loss may be finite. */
static MT_HOST_DEVICE void mti_step_decide(float counted, float others, float loss, mt_step_values *v) {
    const float largest = FLT_MAX;
    float norm = mti_norm_of_sums(counted, others), worst = loss >= -largest && loss <= largest ? norm : NAN, unscale;
    v->loss = loss;
    v->norm = (float)((double)norm * (double)mti_unscale(v->scaler.scale));
    unscale = mti_loss_scaler_update(&v->scaler, &worst);
    v->adamw.lr = v->lr;
    v->adamw.skip = !(unscale > 0.0f);
    if (v->adamw.skip) return;
    v->adamw.grad_scale = (float)((double)unscale * (double)mti_clip_coefficient(v->norm, v->max_norm));
    v->adamw.step++;
}

#include "step.cuh"

static void mti_cpu_step_decide(mt_tensor sums, mt_tensor loss, mt_step_values *values) {
    const float *x = (const float *)sums.data;
    mti_step_decide(x[0], x[1], loss.data ? *(const float *)loss.data : 0.0f, values);
}

/* clang-format off */
static const mti_table mti_step_decide_table = {"mt_step_decide", {"sums loss", "RR", NULL}, {
    {"sums", "12", MT_ARG_F32, MT_ARG_IN, NULL},
    {"loss", "11", MT_ARG_F32, MT_ARG_IN | MT_ARG_OPTIONAL, NULL}}};
/* clang-format on */

MT_API mt_status mt_step_decide(mt_context *ctx, mt_tensor sums, mt_tensor loss, mt_step_values *values) {
    mt_tensor *views[] = {&sums, &loss};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_step_decide_table, views, NULL));
    if (!values) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: values is NULL", op.name);
    MT_TRY(mti_apply_rule(&op));
    MT_TRY(mti_begin_bare(&op, ctx, op.name));
    op.work.work = MT_WORK_OPTIMIZER;
    return mti_end(
        &op, MTI_RUN(&op, mti_cuda_step_decide(ctx, sums, loss, values), mti_cpu_step_decide(sums, loss, values)));
}
