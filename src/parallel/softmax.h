/* ---- softmax over a split vocabulary, for authors of losses ------------------------------------------------------ */

#pragma once
#include "../comm/context.h"

/* Softmax and log-softmax over the vocabulary, for losses of your own. logits, y, dy and dx are [tokens, local
   vocabulary]; their float types may differ, such as 16-bit logits and y in MT_F32. The chapter "vocabulary-parallel
   embedding and cross-entropy" says how the vocabulary is split.
   forward:  y from the logits, as mt_softmax_forward and mt_log_softmax_forward from whole rows. y may be logits.
   backward: dx from y of forward and the gradient dy, as mt_softmax_backward and mt_log_softmax_backward. dx may be dy.
   vocab is the size of the whole vocabulary without padding, and padded_vocab is that of mt_cross_entropy_desc.
   Padding does not count, whatever it holds, and y and dx are 0 there, also for log-softmax: a sum over the columns of
   products of y and dy has no terms of the padding. Logits are never gathered.
   For instance, distillation has the loss KL(p_t || p_s) = sum of p_t (log p_t - log p_s) over the vocabulary, with the
   softmax p_t of a teacher's logits. Its gradient with respect to log p_s is -p_t: give dy = -p_t, times what the loss
   is multiplied by, to mt_vocab_parallel_log_softmax_backward.
   Communication: forward all-gathers two floats for each token over tp, in invariant mode for each token and virtual
   shard. backward all-reduces one float for each token. In invariant mode the bits do not depend on the split.
   MT_ERR_ARGUMENT: vocab or padded_vocab is out of range. */
MT_API mt_status mt_vocab_parallel_softmax_forward(mt_context *ctx, mt_comm *tp, int64_t vocab, int64_t padded_vocab,
                                                   mt_tensor logits, mt_tensor y);
MT_API mt_status mt_vocab_parallel_softmax_backward(mt_context *ctx, mt_comm *tp, int64_t vocab, int64_t padded_vocab,
                                                    mt_tensor y, mt_tensor dy, mt_tensor dx);
MT_API mt_status mt_vocab_parallel_log_softmax_forward(mt_context *ctx, mt_comm *tp, int64_t vocab,
                                                       int64_t padded_vocab, mt_tensor logits, mt_tensor y);
MT_API mt_status mt_vocab_parallel_log_softmax_backward(mt_context *ctx, mt_comm *tp, int64_t vocab,
                                                        int64_t padded_vocab, mt_tensor y, mt_tensor dy, mt_tensor dx);
