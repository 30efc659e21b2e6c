/* ---- products with bias and activation --------------------------------------------------------------------------- */

#pragma once
#include "linear.h"
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

static mt_status mti_linear_gradients(mt_context *ctx, mt_tensor dy, mt_tensor x, mt_tensor dweight, mt_tensor dbias) {
    if (dbias.data) MT_TRY(mt_bias_backward(ctx, dy, dbias));
    return mt_gemm(ctx, MT_TRANS, MT_NO_TRANS, 1.0f, dy, x, 1.0f, dweight);
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

MT_API mt_status mt_linear_forward(mt_context *ctx, mt_tensor x, mt_tensor weight, mt_tensor bias, mt_tensor y) {
    static const char *const where = "mt_linear_forward";
    mt_arg args[] = {{"weight", &weight, weight.rows, weight.cols, MT_ARG_FLOAT, MT_ARG_IN},
                     {"x", &x, x.rows, weight.cols, MT_ARG_FLOAT, MT_ARG_IN},
                     {"y", &y, x.rows, weight.rows, MT_ARG_FLOAT, MT_ARG_OUT},
                     {"bias", &bias, 1, weight.rows, MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL}};
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mt_check_apart(ctx, where, "y", y, "x", x));
    MT_TRY(mt_check_apart(ctx, where, "y", y, "weight", weight));
    MT_TRY(mt_parts_agree(ctx, where, weight, bias));
    MT_TRY(mt_parts_agree(ctx, where, weight, x));
    MT_TRY(mti_apply_rule_of(ctx, where, args, MTI_COUNT(args)));
    return MTI_FUSED(ctx, mti_cuda_linear_forward(ctx, x, weight, bias, y),
                     mti_linear_forward(ctx, x, weight, bias, y));
}

/* The rule of mt_linear_activation_forward. When x and weight are split by columns, each rank has a term of h, and the
   activation of a term is none of their sum: the message then names the calls that compute it. */
static mt_status mti_linear_activation_rule(mt_context *ctx, const char *where, const mt_arg *args, int count) {
    static const mt_rule products = {"weight x y h bias", "RR*** rR*** Rr*** cc***", "rr***"};
    mt_status status = mti_apply_rule_of(ctx, where, args, count);
    char message[MT_ERROR_BYTES];
    if (status != MT_ERR_ARGUMENT || !strstr(mt_last_error(ctx), "split by columns")) return status;
    snprintf(message, sizeof message, "%s", mt_last_error(ctx));
    if (mti_apply_rule(ctx, where, &products, args, 2)) return mt_fail(ctx, status, "%s", message);
    return mt_fail(ctx, status,
                   "%.*s: x and weight are split by columns, so each rank has a term of their product: call "
                   "mt_linear_forward, mt_reduce_from_tensor_region_forward and mt_activation_forward instead",
                   (int)strcspn(message, ":"), message);
}

MT_API mt_status mt_linear_activation_forward(mt_context *ctx, mt_activation kind, mt_tensor x, mt_tensor weight,
                                              mt_tensor bias, mt_tensor h, mt_tensor y) {
    static const char *const where = "mt_linear_activation_forward";
    int64_t width = mti_activation_width(kind, y.cols);
    mt_arg args[] = {{"weight", &weight, weight.rows, weight.cols, MT_ARG_FLOAT, MT_ARG_IN},
                     {"x", &x, x.rows, weight.cols, MT_ARG_FLOAT, MT_ARG_IN},
                     {"y", &y, y.rows, y.cols, MT_ARG_FLOAT, MT_ARG_OUT},
                     {"h", &h, x.rows, weight.rows, MT_ARG_FLOAT, MT_ARG_OUT},
                     {"bias", &bias, 1, width, MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL},
                     {"h", &h, y.rows, width, MT_ARG_FLOAT, MT_ARG_OUT}}; /* the size that y needs */
    MT_TRY(mti_expect_activation(ctx, where, kind));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mt_check_apart(ctx, where, "h", h, "x", x));
    MT_TRY(mt_check_apart(ctx, where, "h", h, "weight", weight));
    MT_TRY(mt_check_apart(ctx, where, "y", y, "h", h));
    MT_TRY(mt_check_apart(ctx, where, "y", y, "x", x));
    MT_TRY(mt_check_apart(ctx, where, "y", y, "weight", weight));
    MT_TRY(mt_parts_agree(ctx, where, weight, bias));
    MT_TRY(mti_linear_activation_rule(ctx, where, args, MTI_COUNT(args) - 1));
    MT_TRY(mti_expect_gates(ctx, where, kind, h, "bias", bias));
    return MTI_FUSED(ctx, mti_cuda_linear_activation_forward(ctx, kind, x, weight, bias, h, y),
                     mti_linear_activation_forward(ctx, kind, x, weight, bias, h, y));
}

MT_API mt_status mt_linear_activation_backward(mt_context *ctx, mt_activation kind, mt_tensor dy, mt_tensor weight,
                                               mt_tensor h, mt_tensor dh, mt_tensor dbias) {
    static const char *const where = "mt_linear_activation_backward";
    int64_t width = mti_activation_width(kind, weight.cols);
    mt_arg args[] = {{"weight", &weight, weight.rows, weight.cols, MT_ARG_FLOAT, MT_ARG_IN},
                     {"dy", &dy, dy.rows, weight.rows, MT_ARG_FLOAT, MT_ARG_IN},
                     {"h", &h, dy.rows, width, MT_ARG_FLOAT, MT_ARG_IN},
                     {"dh", &dh, dy.rows, width, MT_ARG_FLOAT, MT_ARG_OUT},
                     {"dbias", &dbias, 1, width, MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_SUM | MT_ARG_OPTIONAL}};
    MT_TRY(mti_expect_activation(ctx, where, kind));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mt_check_apart(ctx, where, "dh", dh, "dy", dy));
    MT_TRY(mt_check_apart(ctx, where, "dh", dh, "h", h));
    MT_TRY(mt_check_apart(ctx, where, "dh", dh, "weight", weight));
    MT_TRY(mti_expect_gates(ctx, where, kind, h, "dbias", dbias));
    MT_TRY(mti_apply_rule_of(ctx, where, args, MTI_COUNT(args)));
    return MTI_FUSED(ctx, mti_cuda_linear_activation_backward(ctx, kind, dy, weight, h, dh, dbias),
                     mti_linear_activation_backward(ctx, kind, dy, weight, h, dh, dbias));
}

MT_API mt_status mt_linear_gradients(mt_context *ctx, mt_tensor dy, mt_tensor x, mt_tensor dweight, mt_tensor dbias) {
    static const char *const where = "mt_linear_gradients";
    mt_arg args[] = {{"dy", &dy, dy.rows, dy.cols, MT_ARG_FLOAT, MT_ARG_IN},
                     {"x", &x, dy.rows, x.cols, MT_ARG_FLOAT, MT_ARG_IN},
                     {"dweight", &dweight, dy.cols, x.cols, MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_PRODUCT | MT_ARG_SUM},
                     {"dbias", &dbias, 1, dy.cols, MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_SUM | MT_ARG_OPTIONAL}};
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mt_check_apart(ctx, where, "dweight", dweight, "dy", dy));
    MT_TRY(mt_check_apart(ctx, where, "dweight", dweight, "x", x));
    MT_TRY(mt_check_apart(ctx, where, "dbias", dbias, "dy", dy));
    MT_TRY(mt_parts_agree(ctx, where, dweight, dbias));
    MT_TRY(mti_apply_rule_of(ctx, where, args, MTI_COUNT(args)));
    return MTI_FUSED(ctx, mti_cuda_linear_gradients(ctx, dy, x, dweight, dbias),
                     mti_linear_gradients(ctx, dy, x, dweight, dbias));
}
