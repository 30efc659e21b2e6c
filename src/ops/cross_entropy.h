/* ---- cross-entropy over a vocabulary shard, for authors of losses ------------------------------------------------ */

#pragma once
#include "../comm/context.h"

/* For the logits x of a token, loss = lse(x) - x[target], where lse(x) = log(sum of exp(x)). With label smoothing a, as
   PyTorch defines it, loss = (1 - a) (lse(x) - x[target]) + a (lse(x) - mean(x)). A token whose target is ignore_index
   has loss 0 and gradient 0. */
typedef struct mt_cross_entropy_shard_desc {
    int64_t vocab;         /* size of the whole vocabulary, without padding */
    int64_t first_col;     /* index in the vocabulary of the shard's first column */
    float label_smoothing; /* a, 0 <= a < 1 */
    int32_t ignore_index;  /* target of tokens without a loss; MT_ZERO: 0; 0: -100, as in PyTorch */
} mt_cross_entropy_shard_desc;

/* Call stats on each shard, gather all stats with mt_all_gather, then call combine and backward on each shard. logits
   is [tokens, columns of the shard]. targets holds, for each token, an index in the whole vocabulary or ignore_index;
   check it with mt_ids_check. For a target that is out of range, its logit counts as 0, and the gradient has no one-hot
   term. Columns whose index in the vocabulary is `vocab` or more are padding: they do not count, and their gradient
   is 0.
   stats:    stats [tokens, 4] = for each token the maximum of the shard's x (-inf if all columns are padding), the sum
             of exp(x - maximum), the logit of the target (0 if another shard has it) and the sum of x.
   combine:  loss [1, tokens] and lse [2, tokens] from gathered [shards * tokens, 4], the stats of shard 0, 1, ... in
             this order, for 1 to 1024 shards. It adds the shards in the order of mt_all_reduce. Row 0 of lse is the
             maximum m, row 1 is log(sum of exp(x - m)). lse(x) is the sum of the two rows; two numbers are more precise
             than their rounded sum.
   backward: logits[i] = scale * dloss[i] * (softmax - smoothed one-hot) for token i, in place. dloss [1, tokens] is
             optional: mt_none() means 1 for every token. With dloss [1, 1], its element counts for every token.
   For 16-bit logits, a GPU computes e^d with an approximate function. Its relative error is at most 2^-22 (1 + |d|),
   where d is the difference of a logit to the maximum, or to lse(x) in backward. */
MT_API mt_status mt_cross_entropy_stats(mt_context *ctx, const mt_cross_entropy_shard_desc *desc, mt_tensor logits,
                                        const int32_t *targets, mt_tensor stats);
MT_API mt_status mt_cross_entropy_combine(mt_context *ctx, const mt_cross_entropy_shard_desc *desc, mt_tensor gathered,
                                          int shards, const int32_t *targets, mt_tensor loss, mt_tensor lse);
MT_API mt_status mt_cross_entropy_backward(mt_context *ctx, const mt_cross_entropy_shard_desc *desc, mt_tensor logits,
                                           const int32_t *targets, mt_tensor lse, mt_tensor dloss, float scale);

/* Does stats, combine and backward in one call, for a single shard that holds the whole vocabulary (first_col is 0). It
   writes loss [1, tokens] and replaces logits by their gradient as backward does. dloss is optional. */
MT_API mt_status mt_cross_entropy_forward_backward(mt_context *ctx, const mt_cross_entropy_shard_desc *desc,
                                                   mt_tensor logits, const int32_t *targets, mt_tensor dloss,
                                                   float scale, mt_tensor loss);
