/* ---- batch ------------------------------------------------------------------------------------------------------- */

#pragma once
#include "../ops/attention.h"

/* The tokens of one call: `sequences` sequences of `seq` tokens each. All tensor ranks pass the same batch. A dropout
   mask depends on seed, step, layer, and the element's index in the global batch (all sequences of a step). When each
   call sets first_sequence, the masks do not depend on the numbers of tensor ranks, data ranks and micro-batches. */
typedef struct mt_batch {
    int64_t sequences, seq;
    int64_t first_sequence; /* index of this call's first sequence in the global batch */
    /* [sequences], in memory of the context's device. The first lengths[i] tokens of sequence i are valid; attention
       masks the keys of the others. On a CPU a length that is not in [0, seq] is MT_ERR_DATA; a GPU does not check.
       NULL: all tokens are valid */
    const int32_t *lengths;
    uint64_t seed, step; /* of dropout; use a new step for each optimizer step */
    /* advanced */
    /* [sequences * seq], in memory of the context's device, for models with token types (BERT's segments): the type of
       each token; on c context ranks [sequences * seq / c], of this rank's tokens. It must not change until backward.
       MT_ERR_ARGUMENT for a model without token types. NULL: all 0 */
    const int32_t *token_types;
    /* A number in memory of the device that is added to the subsequence of dropout when the masks are drawn (see
       mt_random and mt_step_random_offset); the same number until backward has returned. With step << 20 in it, leave
       `step` 0. NULL: 0 */
    const uint64_t *random_offset;
    /* Packed documents, one after the other. cu_seqlens has documents + 1 ascending numbers, from 0 to sequences * seq,
       in memory of the context's device. Document d has the tokens cu_seqlens[d] to cu_seqlens[d + 1] - 1. The end of a
       sequence also ends a document: the rest is a document of its own. A token attends only to its document, and
       positions begin at 0 in each. Without dropout, a document has the outputs that it has alone. A CPU checks the
       numbers (MT_ERR_DATA), a GPU does not. They must not change until backward. NULL: a sequence is one document */
    const int32_t *cu_seqlens;
    int64_t documents; /* must be 0 without cu_seqlens (MT_ERR_ARGUMENT) */
    /* A bias that is added to the attention scores in every layer, or a boolean mask of them: value is
       [bias.batch * bias.heads * seq, seq], where bias.batch is 1 or `sequences`, and bias.heads is 1 or the number of
       query heads of the whole model (MT_ERR_SHAPE). All tensor and context ranks pass the whole bias. It must not
       change until backward. A rank adds to bias.grad the part of its layers, heads, tokens and sequences: sum it over
       the tensor, the context and the pipeline group, and over the data group if data ranks share the bias. bias.grad
       must overlap no other tensor of the call, and needs a value of a float type (MT_ERR_ARGUMENT). In invariant mode
       it needs bias.heads to be the number of heads (MT_ERR_ARGUMENT), and its bits are the same on every tensor split,
       but not with other numbers of data ranks, context ranks or stages */
    mt_attention_bias bias;
    /* [1, 1], MT_F32, in memory of the device: the gradients of all losses are multiplied by it (see
       mt_step_loss_scale). Backward reads it and, if backward_scale is set, forward, too. mt_none(): 1 */
    mt_tensor loss_scale;
    /* The scale of mt_gpt_backward, or the lm_scale of mt_bert_backward, if it is known before forward. Forward then
       also computes the gradient of the tokens' loss: with one tensor rank, outside invariant mode, the logits are read
       once instead of twice. On a CPU and in invariant mode, losses and gradients have the same bits as without it.
       On a GPU outside invariant mode they may differ by rounding. It must be finite (MT_ERR_ARGUMENT). Without effect
       when saved is NULL. 0: backward computes the gradient */
    float backward_scale;
} mt_batch;
