/* ---- language model: embedding and layers ------------------------------------------------------------------------ */

#pragma once
#include "../parallel/vocab.h"
#include "../blocks/layer.h"

/* The part that GPT and BERT have in common: an embedding (tokens, learned positions, token types, norm, dropout),
   layers, and a final norm. Its output is hidden states, [tokens, hidden]. mt_gpt and mt_bert below add heads and
   losses to it. Use it alone for an encoder, or for a model with heads of your own. */
typedef struct mt_language_model_desc {
    int64_t vocab, layers, max_seq; /* max_seq: tokens of the longest sequence */
    /* Describes every layer. Leave layer.dropout.layer_number and layer.max_seq 0 (otherwise MT_ERR_ARGUMENT): create
       sets them in each layer. When init.output_std is 0, it becomes init.std / sqrt(2 * layers). init.std is also that
       of the embeddings. With rotary or ALiBi there are no learned positions */
    mt_transformer_layer_desc layer;
    /* advanced */
    /* 1: the names of the layers and of the final norm begin with "encoder", as in Megatron-LM's BERT; 0: with
       "decoder" */
    int is_encoder;
    int64_t token_types; /* number of token types, see mt_batch.token_types; 0: the model has no token types */
    int embedding_norm;  /* 1: the sum of the embeddings is normalised, before the dropout */
    /* 1: an output head uses the weight of the token embedding, which is therefore also on the last pipeline stage */
    int tied_head;
    /* layer.recompute applies to the first recompute_layers layers of each stage; must be 0 with MT_RECOMPUTE_NONE
       (MT_ERR_ARGUMENT). 0: to all layers */
    int64_t recompute_layers;
    float embedding_dropout; /* of the sum of the embeddings */
    /* rows of the token embedding with padding of your own, such as 50304 for a vocab of 50257; see mt_embedding_desc.
       0: none */
    int64_t padded_vocab;
} mt_language_model_desc;

/* This rank's shard of the model or, on a grid with several pipeline stages, of its stage. Every stage has the same
   number of layers. The first stage has the embeddings. The last stage has the final norm and, with tied_head, a second
   copy of the token embedding; mt_sync_gradients adds up the gradients of the two copies. Members that a stage does not
   have are zero. STACK below is "encoder" with is_encoder, and otherwise "decoder". */
typedef struct mt_language_model {
    mt_language_model_desc desc;
    mt_vocab_parallel_embedding tokens; /* embedding.word_embeddings.weight */
    mt_param *positions;                /* embedding.position_embeddings.weight [max_seq, hidden]; may be NULL */
    mt_param *token_types;              /* embedding.tokentype_embeddings.weight [token_types, hidden]; may be NULL */
    mt_norm_layer embedding_norm;       /* embedding.layernorm.*; weight is NULL without embedding_norm */
    mt_transformer_layer *layers;       /* layers[i]: STACK.layers.<first_layer + i>.*; the registry owns the array */
    int64_t first_layer, local_layers;  /* global number of layers[0]; number of layers of this stage */
    mt_norm_layer final_norm;           /* STACK.final_layernorm.*; weight is NULL with MT_POST_LN */
    const mt_grid *grid;
    mt_comm *cp; /* grid->cp; NULL: each rank has whole sequences */
} mt_language_model;

/* What one forward keeps for its backward: tensors in the arena, until the caller's mt_arena_release, and the pointers
   of the call. It can be used again after its backward. Several forwards may be in flight, each with a `saved` of its
   own. */
typedef struct mt_language_model_saved {
    mt_transformer_layer_saved *layers; /* [local_layers], from mt_language_model_saved_create */
    mt_batch batch;
    const int32_t *ids; /* the ids of the forward that waits for its backward; NULL: none waits */
    mt_norm_saved embedding_norm, final_norm;
} mt_language_model_saved;

/* create adds the parameters of this rank's stage to the registry, which owns them; out needs no destroy. saved_create
   allocates host memory, which saved_destroy frees. Errors: MT_ERR_SHAPE (`layers` is not a multiple of the number of
   stages, or hidden, heads and kv_heads break a rule of mt_self_attention_desc), MT_ERR_ARGUMENT (a value is out of
   range, or there are several stages and mt_context_desc.arena_symmetric is set), MT_ERR_MEMORY. */
MT_API mt_status mt_language_model_create(mt_context *ctx, mt_params *params, const mt_language_model_desc *desc,
                                          mt_language_model *out);
MT_API mt_status mt_language_model_saved_create(mt_context *ctx, const mt_language_model *model,
                                                mt_language_model_saved *out);
/* saved may be NULL or zero-initialised. */
MT_API void mt_language_model_saved_destroy(mt_language_model_saved *saved);

/* Let tokens be batch->sequences * batch->seq. forward computes output [tokens, hidden] from ids [tokens]. backward
   reads doutput, the gradient of output, and adds to the gradients of the parameters; it does not change doutput. With
   sequence_parallel output and doutput are [tokens / t, hidden], this rank's rows. They have the model's type. ids are
   in memory of the context's device, the same on every tensor rank, and must not change until backward. On a grid with
   one stage, input and dinput are mt_none(). When saved is NULL, forward is evaluation, without dropout. Call backward
   once for each forward with saved.
   With several pipeline stages, call both functions in those of your mt_pipeline_stage (see mt_gpt_stage_forward). On
   every stage but the first, input is the output of the stage before, and dinput becomes its gradient; input must not
   change until backward. output and doutput are given on every stage, also on the last one.
   When t > 1, output and dinput must be contiguous; with sequence_parallel input and doutput, too (MT_ERR_SHAPE).
   output must not overlap input, nor dinput doutput (MT_ERR_ARGUMENT).
   Communication over the tensor group: forward does 1 all-reduce for the embedding and 2 for each layer of the stage,
   and backward does 2 for each layer. With sequence_parallel forward does 1 reduce-scatter for the embedding, and 2
   all-gathers and 2 reduce-scatters for each layer; backward does 4 all-gathers and 2 reduce-scatters for each layer,
   and 1 all-gather for the embedding. For recomputation see mt_recompute. After mt_sync_gradients_begin, backward also
   sums gradients over the data group, as mt_gpt_backward does.
   MT_ERR_SHAPE: batch->seq is greater than max_seq. MT_ERR_DATA: an id or a token type is out of range; on a GPU a
   later call returns it, see mt_ids_check. MT_ERR_ARGUMENT: saved holds no forward. */
MT_API mt_status mt_language_model_forward(mt_context *ctx, const mt_language_model *model, const mt_batch *batch,
                                           const int32_t *ids, mt_tensor input, mt_tensor output,
                                           mt_language_model_saved *saved);
MT_API mt_status mt_language_model_backward(mt_context *ctx, const mt_language_model *model, mt_tensor doutput,
                                            mt_tensor dinput, mt_language_model_saved *saved);
