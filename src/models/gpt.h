/* ---- GPT --------------------------------------------------------------------------------------------------------- */

#pragma once
#include "model.h"

/* A GPT is a token embedding, learned positions (not with rotary or ALiBi), layers, a final norm (not with MT_POST_LN),
   an output head and cross-entropy. The output head has the weight of the token embedding unless untied_head is set. */
typedef struct mt_gpt_desc {
    int64_t vocab, layers, max_seq; /* max_seq: tokens of the longest sequence */
    /* Describes every layer. Leave dropout.layer_number and max_seq 0: mt_gpt_create sets them. When init.output_std
       is 0, it becomes init.std / sqrt(2 * layers). */
    mt_transformer_layer_desc layer;
    /* advanced */
    int64_t recompute_layers; /* as in mt_language_model_desc */
    int untied_head;          /* 1: the output head has a weight of its own */
    float embedding_dropout;  /* of the sum of token and position embedding */
    float label_smoothing;    /* see mt_cross_entropy_desc */
    /* targets of this value have loss 0 and gradient 0. Set MT_ZERO to ignore targets of 0. 0: -100, as in
       PyTorch */
    int32_t ignore_index;
    /* rows of the embedding and of the output head with padding of your own, such as 50304 for a vocab of 50257; see
       mt_embedding_desc. The logits of mt_gpt_logits and the tensors of checkpoints are without padding. 0: none */
    int64_t padded_vocab;
} mt_gpt_desc;

/* This rank's shard of the model or of its pipeline stage. The last stage has the head. A tied embedding is on the
   first and on the last stage; mt_sync_gradients adds up its two gradients. */
typedef struct mt_gpt {
    mt_gpt_desc desc;
    mt_language_model model;
    mt_column_parallel_linear head; /* its weight is model.tokens.weight, or output_layer.weight with untied_head */
    mt_cross_entropy_desc loss;
} mt_gpt;

/* What one forward keeps for its backward, as mt_language_model_saved. */
typedef struct mt_gpt_saved {
    mt_language_model_saved model;
    mt_linear_saved head;
    mt_cross_entropy_saved loss;
} mt_gpt_saved;

/* mt_gpt_create adds the parameters of this rank's stage to the registry, which owns them; out needs no destroy.
   mt_gpt_saved_create allocates host memory, which mt_gpt_saved_destroy frees. Errors: MT_ERR_SHAPE (`layers` is not a
   multiple of the number of stages, or hidden, heads and kv_heads break a rule of mt_self_attention_desc),
   MT_ERR_ARGUMENT (a value is out of range, or there are several stages and mt_context_desc.arena_symmetric is set),
   MT_ERR_MEMORY. */
MT_API mt_status mt_gpt_create(mt_context *ctx, mt_params *params, const mt_gpt_desc *desc, mt_gpt *out);
MT_API mt_status mt_gpt_saved_create(mt_context *ctx, const mt_gpt *gpt, mt_gpt_saved *out);
MT_API void mt_gpt_saved_destroy(mt_gpt_saved *saved); /* NULL and a zero-initialised struct are allowed */

/* Computes the loss of every token, on a grid with one pipeline stage. With more stages use mt_gpt_stage_forward.
   ids, targets [sequences * seq] are in memory of the context's device. They are the same on every tensor rank, and
   must not change until backward. loss is [1, sequences * seq], MT_F32. Give padding tokens the target -100, or your
   ignore_index: their loss is then 0. When saved is NULL, forward is evaluation, without dropout.
   Communication over the tensor group: 1 all-reduce for the embedding, and 2 for each layer. With sequence_parallel: 1
   reduce-scatter for the embedding, 2 all-gathers and 2 reduce-scatters for each layer, and 1 all-gather for the head.
   In both cases also 1 all-gather of 4 floats per token for the loss.
   MT_ERR_SHAPE: batch->seq is greater than max_seq. MT_ERR_ARGUMENT: batch->backward_scale is not finite. MT_ERR_DATA:
   an id or a target is out of range. After these errors, loss and saved are unchanged. A GPU does not wait for the
   check of ids: forward then returns MT_SUCCESS with useless results, and a later call returns MT_ERR_DATA (see
   mt_ids_check). */
MT_API mt_status mt_gpt_forward(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                const int32_t *targets, mt_tensor loss, mt_gpt_saved *saved);

/* Adds the gradient of scale * sum(loss) to the gradient of every parameter. scale is usually 1 / (tokens of the whole
   global batch). Call mt_gpt_backward once for each forward: it overwrites the saved logits, and afterwards saved
   holds no forward.
   Communication over the tensor group, without recomputation: 1 all-reduce for the head and 2 for each layer. With
   sequence_parallel: 1 all-gather and 1 reduce-scatter for the head, 4 all-gathers and 2 reduce-scatters for each
   layer, and 1 all-gather for the embedding. After mt_sync_gradients_begin, mt_gpt_backward also sums gradients over
   the data group, each bucket as soon as its gradients are final.
   MT_ERR_ARGUMENT: saved holds no forward, or its batch has a backward_scale, and scale is another number. After the
   second of these, saved still holds the forward. */
MT_API mt_status mt_gpt_backward(mt_context *ctx, const mt_gpt *gpt, float scale, mt_gpt_saved *saved);

/* mt_gpt_forward and mt_gpt_backward for one stage of a pipeline. The functions `forward` and `backward` of your
   mt_pipeline_stage call them with the tensors that they get from mt_pipeline_run: input, output, doutput and dinput
   are [tokens, hidden], or [tokens / t, hidden] with sequence_parallel, in the model's type. On the first stage input
   and dinput are mt_none(), and on the last stage output and doutput are mt_none(). input must not change until
   backward. All stages pass the same batch, ids, targets and scale. The last stage writes loss; on the others loss may
   be mt_none().
   An example with one mt_gpt_saved for each slot (see mt_pipeline_slots). The whole program is in docs/many-ranks.md,
   "Pipelines":
       mt_status forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
           ... batch, ids, targets and loss of micro-batch a->micro_batch; ids and targets live until its backward ...
           return mt_gpt_stage_forward(ctx, &gpt, &batch, ids, targets, input, output, loss, &saved[a->slot]);
       }
       mt_status backward(mt_context *ctx, void *user, const mt_action *a, mt_tensor doutput, mt_tensor dinput) {
           MT_TRY(mt_gpt_stage_backward(ctx, &gpt, 1.0f / tokens, doutput, dinput, &saved[a->slot]));
           return mt_accumulate_gradients(ctx, params);   // does nothing outside invariant mode
       } */
MT_API mt_status mt_gpt_stage_forward(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                      const int32_t *targets, mt_tensor input, mt_tensor output, mt_tensor loss,
                                      mt_gpt_saved *saved);
MT_API mt_status mt_gpt_stage_backward(mt_context *ctx, const mt_gpt *gpt, float scale, mt_tensor doutput,
                                       mt_tensor dinput, mt_gpt_saved *saved);

/* Computes logits, without dropout. The shape of logits says for which tokens: [sequences * seq, vocab] for all tokens,
   or [sequences, vocab] for the last token of each sequence. When the batch has lengths, this is the last valid token;
   for a sequence of length 0 it is the first one. logits may have any float type; in MT_F32 the logits of a 16-bit
   model are not rounded to 16 bits.
   Collective over the tensor and the pipeline group: all their ranks call it with the same batch and ids, and every
   rank gets the whole logits. On a GPU the call waits when it looks up the last tokens of a batch that has lengths.
   On c context ranks ids are the [sequences * seq / c] of this rank. logits [sequences * seq / c, vocab] are those of
   its tokens; every rank gets logits [sequences, vocab] of the last tokens, for which the call does 1 all-reduce over
   the context group.
   MT_ERR_SHAPE: batch->seq is greater than max_seq. MT_ERR_DATA: an id is out of range; on a GPU a later call returns
   it: see mt_ids_check. */
MT_API mt_status mt_gpt_logits(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                               mt_tensor logits);

/* The key/value cache of a GPT, for text generation: the keys and values of up to max_seq tokens of each of `sequences`
   sequences, in all layers of this rank's stage. A sequence is a slot for one text. It can begin a new text while the
   others go on. See docs/inference.md. */
typedef struct mt_gpt_cache {
    int64_t sequences, max_seq;
    int64_t local_layers; /* of this stage */
    mt_kv_cache *layers;  /* [local_layers], on the host. All of them have the same lengths */
    int32_t *lengths;     /* [sequences], on the context's device: how many tokens of each sequence are in the cache */
    void *memory;         /* of keys and values */
    size_t bytes;         /* of memory, see mt_gpt_cache_bytes */
} mt_gpt_cache;

/* mt_gpt_cache_create allocates the cache with mt_context_alloc, outside the arena. Call it after mt_params_init. All
   sequences are empty. max_seq is at most that of the model; 0: that of the model. On MT_DEVICE_META the bytes are only
   counted. mt_gpt_cache_destroy frees the cache, before its context is destroyed. *cache may be all zeros.
   mt_gpt_cache_bytes returns the bytes of keys and values on this rank:
       2 * layers of this stage * key/value heads of this rank * sequences * max_seq * head size * bytes of an element
   where each of the 2 * layers parts is rounded up to a multiple of 64 bytes. max_seq 0: that of the model. It returns
   -1 if an argument is out of range or the number is too large. `lengths` is not in this number: it takes 4 * sequences
   bytes, also rounded up.
   Errors: MT_ERR_ARGUMENT (sequences or max_seq is out of range), MT_ERR_UNSUPPORTED (the mask of the layers is not
   causal), MT_ERR_MEMORY. */
MT_API mt_status mt_gpt_cache_create(mt_context *ctx, const mt_gpt *gpt, int64_t sequences, int64_t max_seq,
                                     mt_gpt_cache *out);
MT_API void mt_gpt_cache_destroy(mt_context *ctx, mt_gpt_cache *cache);
MT_API int64_t mt_gpt_cache_bytes(const mt_gpt *gpt, int64_t sequences, int64_t max_seq);

/* Sets the number of tokens of one sequence, 0 to max_seq. 0 begins a new text in its slot. A smaller number than
   before removes the last tokens. A larger number adds positions with the keys and values that are in memory there:
   those of tokens that were removed earlier, or zeros. Every rank calls it, with the same arguments. It does not
   communicate. The other sequences do not change.
   Error: MT_ERR_ARGUMENT (the sequence or the length is out of range). */
MT_API mt_status mt_gpt_cache_set_length(mt_context *ctx, const mt_gpt_cache *cache, int64_t sequence, int64_t length);

/* Adds the tokens of the batch to the cache, and computes their logits, without dropout. A loop of generation calls it
   once with the prompts (prefill), and then with batch->seq = 1 for each step.
     batch     sequences is that of the cache. seq is the number of new tokens of each sequence. lengths has the number
               of valid new tokens of each sequence, 0 to seq (NULL: all are valid). So prompts may have different
               lengths, and a sequence with 0 stays as it is. cu_seqlens, documents and bias must not be set
               (MT_ERR_UNSUPPORTED). The other fields have no effect
     ids       [sequences * seq], as in mt_gpt_logits. Ids after the valid ones must be in [0, vocab). They have no
               effect
     logits    [sequences * seq, vocab] for all new tokens, or [sequences, vocab] for the last valid new token of each
               sequence, as in mt_gpt_logits. Rows of tokens that are not valid, and of sequences with 0 new tokens,
               have finite numbers without a meaning. mt_none(): no logits are computed
   The logits are those of mt_gpt_logits for the whole text, up to rounding. In invariant mode on a CPU with the
   built-in GEMM they have the bits of mt_gpt_logits, on every split and however the text is divided into calls. With
   virtual context ranks (context.invariant > 1) they have, in the same cases, bits of their own on every split.
   Collective over the tensor and the pipeline group, as mt_gpt_logits: all ranks pass the same batch and ids, and have
   caches of the same sizes. Communication over the tensor group: 1 all-reduce for the embedding and 2 for each layer of
   [sequences * seq, hidden], also with sequence_parallel, and 1 all-gather for the logits. On a pipeline, each stage
   sends [sequences * seq, hidden] to the next, and the last stage broadcasts the logits. On a GPU the call waits only
   to look up the last tokens of a batch that has lengths and more than one token for each sequence.
   All context ranks pass the same batch and ids and logits of the same shape, with caches of the same lengths, and get
   the same logits. c of them divide the tokens of a call whose seq is at least c * MT_PREFILL_TOKENS, as that of
   prompts is. The call is then collective over the context group, too: each layer does 1 all-gather of keys and values,
   and the call 1 all-reduce of the last tokens, or 1 all-gather of all tokens. Messages over the other groups are 1 / c
   as large. With a smaller seq, or where seq rounded up to what the ranks can divide is more than the model's max_seq,
   each rank computes all tokens, without communication over the context group.
   Errors: MT_ERR_ARGUMENT (the batch has another number of sequences than the cache, or the cache is of another model),
   MT_ERR_SHAPE (seq is greater than the model's max_seq), MT_ERR_DATA (an id is out of range, on a GPU as in
   mt_gpt_logits; on a CPU: a sequence would have more than max_seq tokens). After an error the lengths of the cache are
   as before. A GPU does not check the number of tokens: a sequence that gets too many has max_seq tokens afterwards,
   and its logits are undefined. */
#define MT_PREFILL_TOKENS 16
MT_API mt_status mt_gpt_cached_logits(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                      const mt_gpt_cache *cache, mt_tensor logits);

/* Adds the tokens of the batch to the cache, as mt_gpt_cached_logits does, and draws the next token of each sequence
   from the logits of its last valid new token. The logits are in f32, and are gathered only where
   mt_vocab_parallel_sample says so. desc says how to draw (see mt_sample_desc). The drawn token's position is
   desc->position plus desc->positions[i] or, when positions is NULL, plus the number of tokens of the sequence in the
   cache, with the new ones. When the cache no longer has the first tokens of a text, add their number: in
   desc->position if it is the same for all sequences, otherwise pass positions.
   next_ids [sequences] is in memory of the context's device. Every rank gets all of it. It may be the ids of the next
   call, with batch->seq 1, and also the ids of this call. The next_ids of sequences with 0 new tokens have no meaning,
   but are in [0, vocab).
   The tokens do not depend on the other sequences of the batch. They depend on the split only where rounding decides
   between two tokens. When the logits have the same bits on every split, as in invariant mode, the tokens are the same
   on every split.
   Collective over the groups of mt_gpt_cached_logits. Communication over the tensor group: that of
   mt_gpt_cached_logits, with the all-gather of mt_vocab_parallel_sample instead of that of the logits. The last stage
   of a pipeline broadcasts the ids to the others. On a GPU the call waits only where mt_gpt_cached_logits does.
   Errors: those of mt_gpt_cached_logits; MT_ERR_ARGUMENT (a field of desc is out of range); MT_ERR_DATA on every rank
   (a logit is NaN, on a GPU as in mt_vocab_parallel_sample). After an error the lengths of the cache are as before. */
MT_API mt_status mt_gpt_sample(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                               const mt_gpt_cache *cache, const mt_sample_desc *desc, int32_t *next_ids);
