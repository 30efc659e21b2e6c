/* ---- linear layers ----------------------------------------------------------------------------------------------- */

#pragma once
#include "bias.h"

/* The products of linear layers, with the bias, the activation or the bias gradient that belongs to each.
   forward:             y [tokens, out] = x [tokens, in] weight^T + bias [1, out] (optional). weight is [out, in].
   gradients:           dweight [out, in] += dy^T x and dbias [1, out] += column sums of dy [tokens, out] (optional).
   activation_forward:  h [tokens, w] = x [tokens, in] weight^T + bias [1, w] (optional), then y [tokens, f] = act(h).
                        weight is [w, in]. w is f, or 2 f for MT_SWIGLU.
   activation_backward: dh [tokens, w] = (dy weight) * act'(h) and dbias [1, w] += column sums of dh (optional). dy
                        [tokens, out] is the gradient of the output of the layer after the activation, and weight
                        [out, f] is that layer's weight. dh must not be h.

   By default each function calls two operators, so its results have the same bits as theirs, and it returns their
   errors. forward, activation_forward and activation_backward call mt_gemm, then mt_bias_forward, mt_activation_forward
   and mt_activation_backward respectively. gradients calls mt_bias_backward, then mt_gemm. In 16 bits the result of
   mt_gemm is rounded before the other operator reads it. On a GPU, mt_gemm_options.epilogue can replace the two
   operators by one call of cuBLASLt. */
MT_API mt_status mt_linear_forward(mt_context *ctx, mt_tensor x, mt_tensor weight, mt_tensor bias, mt_tensor y);
MT_API mt_status mt_linear_activation_forward(mt_context *ctx, mt_activation kind, mt_tensor x, mt_tensor weight,
                                              mt_tensor bias, mt_tensor h, mt_tensor y);
MT_API mt_status mt_linear_activation_backward(mt_context *ctx, mt_activation kind, mt_tensor dy, mt_tensor weight,
                                               mt_tensor h, mt_tensor dh, mt_tensor dbias);
MT_API mt_status mt_linear_gradients(mt_context *ctx, mt_tensor dy, mt_tensor x, mt_tensor dweight, mt_tensor dbias);
