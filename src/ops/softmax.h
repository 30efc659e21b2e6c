/* ---- softmax and log-softmax ------------------------------------------------------------------------------------- */

#pragma once
#include "../comm/context.h"

/* forward, for each row of x:  softmax: y[j] = e^(x[j] - m) / s,  log-softmax: y[j] = (x[j] - m) - log s, where m is
   the maximum of the row and s = sum of e^(x[j] - m), as PyTorch's softmax(x, dim=-1) and log_softmax(x, dim=-1).
   backward, from y of forward:  softmax: dx[j] = y[j] (dy[j] - sum of y dy),
   log-softmax: dx[j] = dy[j] - e^y[j] (sum of dy).
   All views are [rows, cols]. Their float types may differ. y may be x, and dx may be dy.
   Special values give what PyTorch gives: a row with a NaN, with +infinity, or with nothing but -infinity has NaN in
   every column; in other rows -infinity has the softmax 0 and the log-softmax -infinity. Backward computes its formula
   also for values that are not finite.
   On a GPU, the exponentials for a 16-bit x, y or dx are approximate: e^d has a relative error of at most 2^-22 (1 +
   |d|). */
MT_API mt_status mt_softmax_forward(mt_context *ctx, mt_tensor x, mt_tensor y);
MT_API mt_status mt_softmax_backward(mt_context *ctx, mt_tensor y, mt_tensor dy, mt_tensor dx);
MT_API mt_status mt_log_softmax_forward(mt_context *ctx, mt_tensor x, mt_tensor y);
MT_API mt_status mt_log_softmax_backward(mt_context *ctx, mt_tensor y, mt_tensor dy, mt_tensor dx);
