/* ---- BERT -------------------------------------------------------------------------------------------------------- */

#pragma once
#include "model.h"

/* A BERT (arXiv 1810.04805) as in Megatron-LM: embeddings of tokens, positions (not with rotary or ALiBi) and token
   types, layers without a causal mask, and two heads with a loss each.
   - masked LM: y = norm(act(x W + b)) for each token, then logits with the weight of the token embedding and a bias of
     their own. act is layer.activation, and norm is layer.norm.kind.
   - sentence order: logits of 2 classes for each sequence, pooled W2 + b2 with pooled = tanh(x W1 + b1), the pooler,
     where x is the output for the first token of the sequence. The original BERT trains this head for the prediction
     of the next sentence, and ALBERT (arXiv 1909.11942) and Megatron-LM for the order of sentences.
   The heads have biases also with layer.no_bias.
   layer.norm.placement selects the norms (arXiv 1909.08053, figure 7). With MT_POST_LN, as in the original BERT, the
   sum of the embeddings has a norm and there is no final norm. With the others there is a final norm, and the sum of
   the embeddings has none. */
typedef struct mt_bert_desc {
    int64_t vocab, layers, max_seq; /* max_seq: tokens of the longest sequence */
    /* Describes every layer, as in mt_gpt_desc. layer.scores.mask is not read: tokens see all valid tokens of their
       sequence. The original BERT has MT_POST_LN, MT_GELU_ERF and norm.eps 1e-12. MT_SWIGLU is MT_ERR_ARGUMENT */
    mt_transformer_layer_desc layer;
    int no_binary_head; /* 1: without pooler and sentence order, as Megatron-LM's --bert-no-binary-head */
    /* advanced */
    int64_t token_types;      /* see mt_batch.token_types; 0: 2 */
    int64_t recompute_layers; /* as in mt_language_model_desc */
    float embedding_dropout;  /* of the sum of the embeddings */
    int32_t ignore_index;     /* as in mt_gpt_desc, for targets; an order of sentences is ignored when it is -100 */
    int64_t padded_vocab;     /* as in mt_gpt_desc; also for the bias of the logits */
} mt_bert_desc;

/* This rank's shard of the model or of its pipeline stage. The last stage has the heads; on the others their members
   are zero. lm_dense and pooler are column-parallel with gather_output: a rank computes hidden / t columns, and every
   rank gets all of them. */
typedef struct mt_bert {
    mt_bert_desc desc;
    mt_language_model model;               /* its names begin with "encoder" */
    mt_column_parallel_linear lm_dense;    /* lm_head.dense.* [hidden, hidden] */
    mt_norm_layer lm_norm;                 /* lm_head.layer_norm.* */
    mt_column_parallel_linear head;        /* its weight is model.tokens.weight; output_layer.bias [1, vocab] */
    mt_column_parallel_linear pooler;      /* pooler.dense.* [hidden, hidden]; weight is NULL with no_binary_head */
    mt_column_parallel_linear binary_head; /* binary_head.* [2, hidden]; weight is NULL with no_binary_head */
    mt_cross_entropy_desc loss, sop_loss;
} mt_bert;

/* What one forward keeps for its backward, as mt_language_model_saved. */
typedef struct mt_bert_saved {
    mt_language_model_saved model;
    mt_linear_saved lm_dense, head, pooler, binary_head;
    mt_norm_saved lm_norm;
    mt_tensor lm_h, pooled_h; /* the outputs of lm_dense and pooler, before their activations */
    mt_cross_entropy_saved loss, sop_loss;
} mt_bert_saved;

/* mt_bert_create adds the parameters of this rank's stage to the registry, which owns them; out needs no destroy.
   mt_bert_saved_create allocates host memory, which mt_bert_saved_destroy frees. Errors: those of
   mt_language_model_create; MT_ERR_ARGUMENT for MT_SWIGLU. */
MT_API mt_status mt_bert_create(mt_context *ctx, mt_params *params, const mt_bert_desc *desc, mt_bert *out);
MT_API mt_status mt_bert_saved_create(mt_context *ctx, const mt_bert *bert, mt_bert_saved *out);
MT_API void mt_bert_saved_destroy(mt_bert_saved *saved); /* NULL and a zero-initialised struct are allowed */

/* Computes both losses, on a grid with one pipeline stage. With more stages use mt_bert_stage_forward.
   ids, targets [sequences * seq] and sentence_order [sequences] are in memory of the context's device. They are the
   same on every tensor rank, and must not change until backward. ids is the text with its masks. targets has the
   original token where a token is to be predicted, and -100 (or your ignore_index) elsewhere. sentence_order has the
   class of each sequence, 0 or 1, or -100. lm_loss is [1, sequences * seq] and sop_loss [1, sequences], both MT_F32.
   With no_binary_head, sentence_order must be NULL and sop_loss mt_none() (MT_ERR_ARGUMENT). batch->lengths masks
   padding, and batch->token_types has the segment of each token. When saved is NULL, forward is evaluation, without
   dropout.
   On c context ranks ids, targets and lm_loss [1, sequences * seq / c] are those of this rank (see
   mt_context_parallel_token); sentence_order is the same on all of them. Context rank 0 has the first tokens of the
   sequences: its sop_loss counts, and that of the others is 0.
   Communication over the tensor group: that of mt_gpt_forward, and 1 all-gather of [tokens, hidden], the output of
   lm_dense. The sentence order adds 1 all-gather of [sequences, hidden] and 1 of 4 floats per sequence; with
   sequence_parallel also 1 all-reduce of [sequences, hidden], which gives every rank the first token of each sequence.
   Errors: those of mt_gpt_forward. */
MT_API mt_status mt_bert_forward(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, const int32_t *ids,
                                 const int32_t *targets, const int32_t *sentence_order, mt_tensor lm_loss,
                                 mt_tensor sop_loss, mt_bert_saved *saved);

/* Adds the gradient of lm_scale * sum(lm_loss) + sop_scale * sum(sop_loss) to the gradient of every parameter. lm_scale
   is usually 1 / (targets of the whole global batch that are not ignored), and sop_scale 1 / (its sequences). With
   no_binary_head, sop_scale is not used. batch->loss_scale multiplies both, and batch->backward_scale is the lm_scale.
   Call mt_bert_backward once for each forward: it overwrites tensors of saved, which afterwards holds no forward.
   Communication over the tensor group: that of mt_gpt_backward, and 1 all-reduce of [tokens, hidden] for the logits.
   The sentence order adds 2 all-reduces of [sequences, hidden].
   MT_ERR_ARGUMENT: saved holds no forward, or its batch has a backward_scale, and lm_scale is another number. After the
   second of these, saved still holds the forward. */
MT_API mt_status mt_bert_backward(mt_context *ctx, const mt_bert *bert, float lm_scale, float sop_scale,
                                  mt_bert_saved *saved);

/* mt_bert_forward and mt_bert_backward for one stage of a pipeline. input, output, doutput and dinput have the rules of
   mt_gpt_stage_forward. All stages pass the same batch, ids, targets, sentence_order and scales. The last stage writes
   the losses; on the others lm_loss and sop_loss may be mt_none(). */
MT_API mt_status mt_bert_stage_forward(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, const int32_t *ids,
                                       const int32_t *targets, const int32_t *sentence_order, mt_tensor input,
                                       mt_tensor output, mt_tensor lm_loss, mt_tensor sop_loss, mt_bert_saved *saved);
MT_API mt_status mt_bert_stage_backward(mt_context *ctx, const mt_bert *bert, float lm_scale, float sop_scale,
                                        mt_tensor doutput, mt_tensor dinput, mt_bert_saved *saved);

/* Computes logits, without dropout: lm_logits [sequences * seq, vocab] and sop_logits [sequences, 2], of any float
   type. One of them may be mt_none(), on every rank alike. Collective over the tensor and the pipeline group, as
   mt_gpt_logits: every rank gets the whole logits. On c context ranks lm_logits are [sequences * seq / c, vocab], and
   sop_logits need 1 all-reduce over the context group. Errors: those of mt_gpt_logits; MT_ERR_ARGUMENT (sop_logits with
   no_binary_head). */
MT_API mt_status mt_bert_logits(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, const int32_t *ids,
                                mt_tensor lm_logits, mt_tensor sop_logits);
