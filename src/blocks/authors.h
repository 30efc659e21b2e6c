/* ---- attention, norms and dropout, for authors of blocks --------------------------------------------------------- */

#pragma once
#include "batch.h"
#include "../parallel/linear.h"
#include "../parallel/norm.h"

/* Returns the mt_dropout of probability p for a block of your own. When batch is NULL, it drops nothing. Set three
   fields of the result: at.first_row and at.first_col to the place in the global tensor where this rank's tensor
   begins, and at.global_cols to the number of columns of the global tensor (see mt_random). The global tensor has the
   tokens of the whole global batch: at.first_row is batch->first_sequence * batch->seq, plus tp_rank times the rows of
   this rank's tensor under sequence parallelism. Each (seed, step, layer,
   site) has random numbers of its own, for step < 2^44, layer < 2^18 and site < 4.
   The transformer layer with layer_number n uses (layer, site) = (n, 0) for attention probabilities, (n, 1) for the
   output of attention and (n, 2) for the output of the MLP. Cross-attention uses (n, 3) for its probabilities. A GPT,
   BERT or language model with L layers has the layer numbers 0 to L - 1, and uses (L, 3) for the embedding. Blocks of
   your own beside it therefore need numbers greater than L. Two models in one program draw the same masks, unless their
   batches have different seeds. */
MT_API mt_dropout mt_batch_dropout(const mt_batch *batch, float p, int64_t layer, int site);

/* Returns the desc that mt_core_attention_forward and mt_core_attention_backward need for the output of the layer `qkv`
   on this rank. The layer's parts and unit say which layout it computes: MT_QKV_PER_GROUP with 1 part and the unit
   (heads_per_group + 2) * head_dim, MT_QKV_CONCATENATED, with one query head per group, with 3 parts and the unit
   head_dim. The field `groups` counts only this rank's non-empty groups. scores is zero: the mask is causal. lengths,
   cu_seqlens and the bias are those of batch. dropout.at has this rank's first_row, first_col and global_cols, and
   dropout.p is 0. To use dropout, copy p, at.seed, at.subsequence and at.offset from the result of mt_batch_dropout
   into dropout. When a pointer is NULL, the layer has copies, or the parts and the unit are others, all fields of the
   result are 0, and every call with it fails. For three layers (MT_QKV_SEPARATE) fill the desc yourself. */
MT_API mt_attention_desc mt_core_attention_desc(const mt_column_parallel_linear *qkv, int64_t head_dim,
                                                const mt_batch *batch);

/* Run mt_attention_forward and mt_attention_backward on the groups of this rank, without rotary, for your own blocks.
   For shards pass weight->shards of the column-parallel layer that computed qkv. Outside invariant mode this number is
   1. In invariant mode it is the number of virtual shards on this rank, and core attention runs once for each of them.
   desc->groups counts only this rank's non-empty groups. all_groups below counts the empty ones, too.
     qkv, dqkv  [tokens, all_groups * (heads_per_group + 2) * head_dim]: virtual shard by virtual shard, each with the
                columns of its groups in the order of desc->qkv_layout. With MT_QKV_SEPARATE: the output of the layer
                of queries, then of keys, then of values
     out, dout  [tokens, all_groups * heads_per_group * head_dim]
     lse        [desc->groups * heads_per_group, tokens]; may be mt_none() in forward
   The columns of empty groups come last. forward sets these columns of out to zero, and backward those of dqkv.
   MT_ERR_SHAPE: the columns are not a whole number of groups, shards does not divide all_groups, or a group is empty
   and qkv_layout is not MT_QKV_PER_GROUP. */
MT_API mt_status mt_core_attention_forward(mt_context *ctx, const mt_attention_desc *desc, int shards, mt_tensor qkv,
                                           mt_tensor out, mt_tensor lse);
MT_API mt_status mt_core_attention_backward(mt_context *ctx, const mt_attention_desc *desc, int shards, mt_tensor qkv,
                                            mt_tensor out, mt_tensor lse, mt_tensor dout, mt_tensor dqkv);

/* QK-norm (arXiv 2302.05442; q_layernorm and k_layernorm of Megatron-LM) normalises each query head and each key head.
   All query heads have one gain, and all key heads have another. create uses desc for both norm layers: desc->features
   is the head size. `layer` is the layer that computes qkv in the layout MT_QKV_PER_GROUP. Its desc.unit must be the
   size of a query group, (heads_per_group + 2) * head size; from it create computes the number of query groups.
   qkv and dqkv have the layout of qkv in mt_core_attention_forward and are contiguous. No communication.
     forward   replaces the queries and keys in qkv by their normalised values. saved keeps copies of the original ones
               in the arena. When saved is NULL, forward is inference.
     backward  replaces the gradients of the normalised queries and keys in dqkv by those of the original ones, and adds
               to the gradients of the parameters.
   MT_ERR_ARGUMENT: desc->groups is not 0, or layer was not created. MT_ERR_SHAPE: layer->desc.unit is not a multiple of
   the head size or is less than 3 * head size, the layer has several parts, or qkv or dqkv has another layout or is not
   contiguous. */
typedef struct mt_qk_norm {
    mt_norm_layer q, k; /* NAME.q_layernorm.*, NAME.k_layernorm.* */
    int64_t unit;       /* columns of a query group */
} mt_qk_norm;

typedef struct mt_qk_norm_saved {
    mt_norm_saved q, k;
} mt_qk_norm_saved;

MT_API mt_status mt_qk_norm_create(mt_context *ctx, mt_params *params, const char *name, const mt_norm_layer_desc *desc,
                                   const mt_column_parallel_linear *layer, mt_qk_norm *out);
MT_API mt_status mt_qk_norm_forward(mt_context *ctx, const mt_qk_norm *norm, mt_tensor qkv, mt_qk_norm_saved *saved);
MT_API mt_status mt_qk_norm_backward(mt_context *ctx, const mt_qk_norm *norm, mt_tensor dqkv,
                                     const mt_qk_norm_saved *saved);
