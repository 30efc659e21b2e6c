/* ---- softmax of rows that are split over ranks, for authors of losses -------------------------------------------- */

#pragma once
#include "../comm/context.h"

/* Softmax and log-softmax for rows that are longer than what one call has, such as a vocabulary that is split over
   ranks. */
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
