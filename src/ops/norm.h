/* ---- normalisation ----------------------------------------------------------------------------------------------- */

#pragma once
#include "../comm/context.h"

typedef enum mt_norm_kind {
    /* (x - mean(x)) * rstd * gain + bias, with rstd = 1 / sqrt(var(x) + eps): arXiv 1607.06450 */
    MT_LAYER_NORM = 0,
    /* x * rstd * gain, with rstd = 1 / sqrt(mean(x^2) + eps): arXiv 1910.07467. bias and dbias must be mt_none() */
    MT_RMS_NORM = 1
} mt_norm_kind;
#define MT_NORM_WORDS "MT_LAYER_NORM MT_RMS_NORM" /* see mt_check_enum */

/* Normalises each row. x, y, dy, dresidual and dx are [tokens, h]. gain, bias, dgain and dbias are [1, h].
   forward:  y = norm(x). stats [tokens, 2] = mean and rstd of each row, for backward. RMSNorm writes 0 as the mean.
             bias and stats are optional. y may be x.
   backward: dx = dresidual + the gradient of x through the norm. dgain and dbias += their gradients. x is the input of
             forward. dresidual is the gradient of x through the residual connection around the norm. dresidual and
             dbias are optional. dx may be dy or dresidual. */
MT_API mt_status mt_norm_forward(mt_context *ctx, mt_norm_kind kind, mt_tensor x, mt_tensor gain, mt_tensor bias,
                                 float eps, mt_tensor y, mt_tensor stats);
MT_API mt_status mt_norm_backward(mt_context *ctx, mt_norm_kind kind, mt_tensor x, mt_tensor gain, mt_tensor stats,
                                  mt_tensor dy, mt_tensor dresidual, mt_tensor dx, mt_tensor dgain, mt_tensor dbias);
