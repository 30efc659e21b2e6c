/* ---- element by element, for authors of blocks ------------------------------------------------------------------- */

#pragma once
#include "../comm/context.h"

/* These operators compute products, sigmoid, SiLU and a gate. All views are [rows, cols], except row and its gradient
   drow [1, cols] (one factor per feature), and col and its gradient dcol [rows, 1] (one factor per token).
   multiply:     y = a * b
   multiply_row: y = x * row. backward: dx = dy * row, drow += sum over the rows of dy * x
   multiply_col: y = x * col. backward: dx = dy * col, dcol = sum over the columns of dy * x
   sigmoid:      y = 1 / (1 + exp(-x)). backward: dx = dy * sigmoid'(x)
   silu:         y = x * sigmoid(x). backward: dx = dy * silu'(x)
   sigmoid_gate: y = sigmoid(gate) * x, as in GLU (arXiv 1612.08083) and in the output gate of attention (arXiv
                 2505.06708). backward: dx = dy * sigmoid(gate), dgate = dy * x * sigmoid'(gate)
   dx, drow and dcol are optional in mt_multiply_*_backward. y, dx and dgate may be any input of the same shape. drow
   and dcol must not overlap another argument (MT_ERR_ARGUMENT).

   dcol sums over the columns of the views that you pass, and drow over their rows. When x is split by columns between
   tensor ranks (the output of a column-parallel layer), dcol is a partial sum: sum it over the tensor group with
   mt_all_reduce before you use it. When x is split by rows (sequence parallelism), dcol is complete and drow is a
   partial sum: mt_sync_gradients sums it over the tensor group when the parameter of row has sequence_partial. */
MT_API mt_status mt_multiply(mt_context *ctx, mt_tensor a, mt_tensor b, mt_tensor y);
MT_API mt_status mt_multiply_row_forward(mt_context *ctx, mt_tensor x, mt_tensor row, mt_tensor y);
MT_API mt_status mt_multiply_row_backward(mt_context *ctx, mt_tensor x, mt_tensor row, mt_tensor dy, mt_tensor dx,
                                          mt_tensor drow);
MT_API mt_status mt_multiply_col_forward(mt_context *ctx, mt_tensor x, mt_tensor col, mt_tensor y);
MT_API mt_status mt_multiply_col_backward(mt_context *ctx, mt_tensor x, mt_tensor col, mt_tensor dy, mt_tensor dx,
                                          mt_tensor dcol);
MT_API mt_status mt_sigmoid_forward(mt_context *ctx, mt_tensor x, mt_tensor y);
MT_API mt_status mt_sigmoid_backward(mt_context *ctx, mt_tensor x, mt_tensor dy, mt_tensor dx);
MT_API mt_status mt_silu_forward(mt_context *ctx, mt_tensor x, mt_tensor y);
MT_API mt_status mt_silu_backward(mt_context *ctx, mt_tensor x, mt_tensor dy, mt_tensor dx);
MT_API mt_status mt_sigmoid_gate_forward(mt_context *ctx, mt_tensor gate, mt_tensor x, mt_tensor y);
MT_API mt_status mt_sigmoid_gate_backward(mt_context *ctx, mt_tensor gate, mt_tensor x, mt_tensor dy, mt_tensor dgate,
                                          mt_tensor dx);
