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

/* The same for rows that are longer than what one call has, such as a vocabulary that is split over ranks. */
typedef struct mt_softmax_shard_desc {
    int64_t vocab;     /* columns of a whole row, without padding */
    int64_t first_col; /* index in the whole row of the shard's first column */
    int log;           /* 1: log-softmax */
} mt_softmax_shard_desc;

/* forward: call stats on each shard, gather all stats with mt_all_gather, then call forward on each shard.
   backward: call sums on each shard, add up the sums of all shards, then call backward on each shard.
   The views of a shard are [rows, columns of the shard]. Columns whose index in the whole row is `vocab` or more are
   padding: whatever they hold, they do not count, and y and dx are 0 there, for log-softmax, too.
   stats:    stats [rows, 2], MT_F32 = for each row the maximum m of the shard's x (-infinity if all columns are
             padding), and the sum of e^(x - m).
   forward:  y from x and gathered [shards * rows, 2], MT_F32: the stats of shard 0, 1, ... in this order, for 1 to 1024
             shards. It joins them in the order of mt_all_reduce. y may be x.
   sums:     sums [rows, 1], MT_F32 = for each row the sum of the shard's y dy, or with `log` of its dy; y is then not
             read, and may be mt_none().
   backward: dx from y, dy and the sums over all shards. dx may be dy.
   MT_ERR_SHAPE: vocab or first_col is out of range. MT_ERR_ARGUMENT: shards is. */
MT_API mt_status mt_softmax_shard_stats(mt_context *ctx, const mt_softmax_shard_desc *desc, mt_tensor x,
                                        mt_tensor stats);
MT_API mt_status mt_softmax_shard_forward(mt_context *ctx, const mt_softmax_shard_desc *desc, mt_tensor x,
                                          mt_tensor gathered, int shards, mt_tensor y);
MT_API mt_status mt_softmax_shard_sums(mt_context *ctx, const mt_softmax_shard_desc *desc, mt_tensor y, mt_tensor dy,
                                       mt_tensor sums);
MT_API mt_status mt_softmax_shard_backward(mt_context *ctx, const mt_softmax_shard_desc *desc, mt_tensor y,
                                           mt_tensor dy, mt_tensor sums, mt_tensor dx);
