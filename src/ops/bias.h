/* ---- bias and activations ---------------------------------------------------------------------------------------- */

#pragma once
#include "../comm/context.h"

/* forward:  y [tokens, n] += bias [1, n]
   backward: dbias [1, n] += column sums of dy [tokens, n] */
MT_API mt_status mt_bias_forward(mt_context *ctx, mt_tensor y, mt_tensor bias);
MT_API mt_status mt_bias_backward(mt_context *ctx, mt_tensor dy, mt_tensor dbias);

typedef enum mt_activation {
    MT_GELU_TANH = 0,    /* 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): GPT-2 */
    MT_GELU_ERF = 1,     /* 0.5 x (1 + erf(x / sqrt(2))): BERT, arXiv 1606.08415 */
    MT_SWIGLU = 2,       /* silu(gate) * up, for h = [gate | up]: arXiv 2002.05202 */
    MT_SQUARED_RELU = 3, /* max(x, 0)^2, whose slope is 2 max(x, 0): Primer, arXiv 2109.08668; Nemotron */
    MT_RELU = 4,         /* max(x, 0), whose slope is 1 for x > 0, otherwise 0: the Transformer, arXiv 1706.03762 */
    MT_TANH = 5          /* tanh(x): the pooler of BERT, arXiv 1810.04805 */
} mt_activation;

/* The number of activations: they are the values from 0 to MT_ACTIVATION_COUNT - 1. */
#define MT_ACTIVATION_COUNT 6
#define MT_ACTIVATION_WORDS "MT_GELU_TANH MT_GELU_ERF MT_SWIGLU MT_SQUARED_RELU MT_RELU MT_TANH" /* see mt_check_enum */

/* forward:  h [tokens, w] += bias [1, w] (optional), then y [tokens, f] = act(h)
   backward: dh [tokens, w] = dy [tokens, f] * act'(h), dbias [1, w] += column sums of dh (optional). h is as forward
             left it, with the bias added. dh may be h.
   w is f, or 2 f for MT_SWIGLU. */
MT_API mt_status mt_activation_forward(mt_context *ctx, mt_activation kind, mt_tensor h, mt_tensor bias, mt_tensor y);
MT_API mt_status mt_activation_backward(mt_context *ctx, mt_activation kind, mt_tensor h, mt_tensor dy, mt_tensor dh,
                                        mt_tensor dbias);
