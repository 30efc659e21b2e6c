/* ---- products with bias and activation --------------------------------------------------------------------------- */

#pragma once
#include "linear.h"
#include "authors.h"
#include "fill.cuh"
#include "gemm.c"
#include "bias.cuh"
#include "activation.c"

static mt_status mti_linear_forward(mt_context *ctx, mt_tensor x, mt_tensor weight, mt_tensor bias, mt_tensor y) {
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1.0f, x, weight, 0.0f, y));
    return bias.data ? mt_bias_forward(ctx, y, bias) : MT_SUCCESS;
}

static mt_status mti_linear_activation_forward(mt_context *ctx, mt_activation kind, mt_tensor x, mt_tensor weight,
                                               mt_tensor bias, mt_tensor h, mt_tensor y) {
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1.0f, x, weight, 0.0f, h));
    return mt_activation_forward(ctx, kind, h, bias, y);
}

/* dact = dy weight, then dh = dact * act'(h). */
static mt_status mti_linear_activation_backward(mt_context *ctx, mt_activation kind, mt_tensor dy, mt_tensor weight,
                                                mt_tensor h, mt_tensor dh, mt_tensor dbias) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor dact;
    mt_status status;
    MT_TRY(mt_arena_tensor(ctx, dh.dtype, dy.rows, weight.cols, &dact));
    status = mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1.0f, dy, weight, 0.0f, dact);
    if (status == MT_SUCCESS) status = mt_activation_backward(ctx, kind, h, dact, dh, dbias);
    mt_arena_release(ctx, mark);
    return status;
}

static mt_status mti_linear_gradients(mt_context *ctx, mt_tensor dy, mt_tensor x, float beta, mt_tensor dweight,
                                      mt_tensor dbias) {
    if (dbias.data) MT_TRY(mt_bias_backward(ctx, dy, dbias));
    return mt_gemm(ctx, MT_TRANS, MT_NO_TRANS, 1.0f, dy, x, beta, dweight);
}

#include "linear.cuh"

/* Evaluates `fused` if the options of the context ask for products with an epilogue, otherwise `separate`. The rule of
   the whole was applied before, so those of the separate operators are not. */
#if MT_HAS_CUDA
#define MTI_FUSED(ctx, fused, separate)                                                                                \
    (mt_check_pause(ctx), mt_check_resume(ctx, mt_context_device(ctx) == MT_DEVICE_CUDA &&                             \
                                                       mt_gemm_get_options(ctx).epilogue != MT_EPILOGUE_SEPARATE       \
                                                   ? (fused)                                                           \
                                                   : (separate)))
#else
#define MTI_FUSED(ctx, fused, separate) (mt_check_pause(ctx), mt_check_resume(ctx, separate))
#endif

/* clang-format off */
static const mti_table mti_linear_forward_table = {"mt_linear_forward",
    {"weight x bias y", "RRRR RrRr rRcc cc-P RP-P PR-P ccPP RPPP PRPP", "rrRr"}, {
    {"weight", "mk", MT_ARG_FLOAT, MT_ARG_IN, NULL},
    {"x", "nk", MT_ARG_FLOAT, MT_ARG_IN, NULL},
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT, "x weight"},
    {"bias", "1m", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL, NULL}}};

static const mti_table mti_linear_activation_forward_table = {"mt_linear_activation_forward",
    {"weight x bias h y", "RRRRR RrRrr rRccc", "rrRrr"}, {
    {"weight", "ik", MT_ARG_FLOAT, MT_ARG_IN, NULL},
    {"x", "nk", MT_ARG_FLOAT, MT_ARG_IN, NULL},
    {"y", "jm", MT_ARG_FLOAT, MT_ARG_OUT, "h x weight"},
    {"h", "ni", MT_ARG_FLOAT, MT_ARG_OUT, "x weight"},
    {"bias", "1A", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL, NULL}}};

static const mti_table mti_linear_activation_backward_table = {"mt_linear_activation_backward",
    {"weight dy h dh(h) dbias", "RRRRR RrrrP cRccc rcRPP RPRPP PRRPP", "rrrrP"}, {
    {"weight", "mk", MT_ARG_FLOAT, MT_ARG_IN, NULL},
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT, NULL},
    {"h", "nA", MT_ARG_FLOAT, MT_ARG_IN, NULL},
    {"dh", "nA", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT, "dy h weight"},
    {"dbias", "1A", MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_GRADIENT | MT_ARG_SUM | MT_ARG_OPTIONAL, NULL}}};

static const mti_table mti_linear_gradients_table = {"mt_linear_gradients",
    {"dweight dy x dbias", "RRRR rcRc cRcR PrrP PPRP PRPR", "rrrP"}, {
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT, NULL},
    {"x", "nk", MT_ARG_FLOAT, MT_ARG_IN, NULL},
    {"dweight", "mk", MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_GRADIENT | MT_ARG_PRODUCT | MT_ARG_SUM, "dy x"},
    {"dbias", "1m", MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_GRADIENT | MT_ARG_SUM | MT_ARG_OPTIONAL, "dy"}}};
/* clang-format on */

MT_API mt_status mt_linear_forward(mt_context *ctx, mt_tensor x, mt_tensor weight, mt_tensor bias, mt_tensor y) {
    mt_tensor *views[] = {&weight, &x, &y, &bias};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_linear_forward_table, views, NULL));
    MT_TRY(mt_parts_agree(ctx, op.name, weight, bias));
    MT_TRY(mt_parts_agree(ctx, op.name, weight, x));
    MT_TRY(mti_apply_rule(&op));
    return MTI_FUSED(ctx, mti_cuda_linear_forward(ctx, x, weight, bias, y),
                     mti_linear_forward(ctx, x, weight, bias, y));
}

/* The rule of mt_linear_activation_forward. When x and weight are split by columns, each rank has a term of h, and the
   activation of a term is none of their sum: the message then names the calls that compute it. */
static mt_status mti_linear_activation_rule(const mti_operator *op) {
    static const mt_rule products = {"weight x y h bias", "RR*** rR*** Rr*** cc***", "rr***"};
    mt_context *ctx = op->ctx;
    mt_status status = mti_apply_rule(op);
    char message[MT_ERROR_BYTES];
    if (status != MT_ERR_ARGUMENT || !strstr(mt_last_error(ctx), "split by columns")) return status;
    snprintf(message, sizeof message, "%s", mt_last_error(ctx));
    if (mti_apply(op, &products, 2)) return mt_fail(ctx, status, "%s", message);
    return mt_fail(ctx, status,
                   "%.*s: x and weight are split by columns, so each rank has a term of their product: call "
                   "mt_linear_forward, mt_reduce_from_tensor_region_forward and mt_activation_forward instead",
                   (int)strcspn(message, ":"), message);
}

MT_API mt_status mt_linear_activation_forward(mt_context *ctx, mt_activation kind, mt_tensor x, mt_tensor weight,
                                              mt_tensor bias, mt_tensor h, mt_tensor y) {
    const int64_t width = mti_activation_width(kind, y.cols);
    mt_tensor *views[] = {&weight, &x, &y, &h, &bias};
    mti_operator op;
    MT_TRY(mti_expect_activation(ctx, "mt_linear_activation_forward", kind));
    MT_TRY(mti_accept(&op, ctx, &mti_linear_activation_forward_table, views, &width));
    MT_TRY(mt_tensor_check(ctx, op.name, "h", h, MT_ARG_FLOAT, y.rows, width)); /* the size that y needs */
    MT_TRY(mt_parts_agree(ctx, op.name, weight, bias));
    MT_TRY(mti_linear_activation_rule(&op));
    MT_TRY(mti_expect_gates(ctx, op.name, kind, h, "bias", bias));
    return MTI_FUSED(ctx, mti_cuda_linear_activation_forward(ctx, kind, x, weight, bias, h, y),
                     mti_linear_activation_forward(ctx, kind, x, weight, bias, h, y));
}

MT_API mt_status mt_linear_activation_backward(mt_context *ctx, mt_activation kind, mt_tensor dy, mt_tensor weight,
                                               mt_tensor h, mt_tensor dh, mt_tensor dbias) {
    const int64_t width = mti_activation_width(kind, weight.cols);
    mt_tensor *views[] = {&weight, &dy, &h, &dh, &dbias};
    mti_operator op;
    MT_TRY(mti_expect_activation(ctx, "mt_linear_activation_backward", kind));
    MT_TRY(mti_accept(&op, ctx, &mti_linear_activation_backward_table, views, &width));
    MT_TRY(mti_expect_gates(ctx, op.name, kind, h, "dbias", dbias));
    MT_TRY(mti_apply_rule(&op));
    return MTI_FUSED(ctx, mti_cuda_linear_activation_backward(ctx, kind, dy, weight, h, dh, dbias),
                     mti_linear_activation_backward(ctx, kind, dy, weight, h, dh, dbias));
}

MT_API mt_status mt_linear_gradients_beta(mt_context *ctx, mt_tensor dy, mt_tensor x, float beta, mt_tensor dweight,
                                          mt_tensor dbias) {
    mt_tensor *views[] = {&dy, &x, &dweight, &dbias};
    mti_operator op;
    mti_operands(&op, ctx, &mti_linear_gradients_table, views, NULL);
    if (beta == 0.0f) op.args[2].use &= ~MT_ARG_IN;
    MT_TRY(mti_check(&op));
    MT_TRY(mt_parts_agree(ctx, op.name, dweight, dbias));
    MT_TRY(mti_apply_rule(&op));
    return MTI_FUSED(ctx, mti_cuda_linear_gradients(ctx, dy, x, beta, dweight, dbias),
                     mti_linear_gradients(ctx, dy, x, beta, dweight, dbias));
}

MT_API mt_status mt_linear_gradients(mt_context *ctx, mt_tensor dy, mt_tensor x, mt_tensor dweight, mt_tensor dbias) {
    return mt_linear_gradients_beta(ctx, dy, x, 1.0f, dweight, dbias);
}
