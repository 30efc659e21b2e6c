/* ---- transformer layer ------------------------------------------------------------------------------------------- */

#pragma once
#include "attention.h"
#include "../parallel/norm.h"

/* Selects the places of the two norms of a layer. LN is the norm (mt_norm_kind) and D is dropout.
   MT_PRE_LN            x1 = x + D(attn(LN(x))), y = x1 + D(mlp(LN(x1))): GPT-2, Llama, and what arXiv 1909.08053
                        recommends for BERT (figure 7b)
   MT_POST_LN           x1 = LN(x + D(attn(x))), y = LN(x1 + D(mlp(x1))): the original BERT (figure 7a)
   MT_RESIDUAL_POST_LN  n = LN(x), x1 = n + D(attn(n)), m = LN(x1), y = m + D(mlp(m)): Megatron's
                        --apply-residual-connection-post-layernorm */
typedef enum mt_ln_placement { MT_PRE_LN = 0, MT_POST_LN = 1, MT_RESIDUAL_POST_LN = 2 } mt_ln_placement;
#define MT_LN_PLACEMENT_WORDS "MT_PRE_LN MT_POST_LN MT_RESIDUAL_POST_LN" /* see mt_check_enum */

/* Selects the activations that forward does not keep and backward computes again (arXiv 2205.05198; Megatron's
   --recompute-granularity). The results have the same bits in each mode, because dropout draws the same masks again.
   docs/performance.md lists the memory that each mode takes.
   MT_RECOMPUTE_NONE       none
   MT_RECOMPUTE_SELECTIVE  those of core attention. Backward computes them from qkv, without communication
   MT_RECOMPUTE_FULL       all. Backward runs forward again from the input of the layer, but without the last product,
                           fc2, and its reduction. Forward and backward of a layer together then do 5 all-reduces
                           instead of 4; with sequence_parallel, 8 all-gathers and 5 reduce-scatters instead of 6 and 4.
                           With MT_POST_LN backward also repeats fc2: 6 all-reduces, or 8 all-gathers and 6
                           reduce-scatters */
typedef enum mt_recompute { MT_RECOMPUTE_NONE = 0, MT_RECOMPUTE_SELECTIVE = 1, MT_RECOMPUTE_FULL = 2 } mt_recompute;
#define MT_RECOMPUTE_WORDS "MT_RECOMPUTE_NONE MT_RECOMPUTE_SELECTIVE MT_RECOMPUTE_FULL" /* see mt_check_enum */

/* The two norms of a layer. */
typedef struct mt_layer_norms {
    mt_norm_kind kind;         /* 0: MT_LAYER_NORM */
    float eps;                 /* 0: 1e-5 */
    mt_ln_placement placement; /* 0: MT_PRE_LN */
} mt_layer_norms;

/* The dropout of a layer. */
typedef struct mt_layer_dropout {
    float attention, hidden; /* of attention probabilities; of the outputs of attention and MLP */
    int64_t layer_number;    /* selects the masks; give each layer a number of its own */
} mt_layer_dropout;

typedef struct mt_transformer_layer_desc {
    int64_t hidden, heads;
    int64_t kv_heads, ffn; /* query groups (0: heads); inner width of the MLP (0: 4 * hidden) */
    mt_layer_norms norm;
    mt_activation activation; /* 0: MT_GELU_TANH */
    mt_scores_desc scores;    /* mask, rotary, window, ALiBi of attention, see mt_self_attention_desc */
    int64_t max_seq;          /* tokens of the longest sequence; must be 0 without rotary (MT_ERR_ARGUMENT) */
    mt_layer_dropout dropout;
    int no_bias; /* 1: qkv, proj, fc1 and fc2 have no bias; a LayerNorm still has one */
    /* advanced */
    mt_qkv_layout qkv_layout; /* see mt_self_attention_desc; 0: MT_QKV_PER_GROUP */
    int sequence_parallel;    /* 1: x and y are [tokens / t, hidden] */
    mt_recompute recompute;   /* 0: MT_RECOMPUTE_NONE */
    mt_init_desc init;        /* of the weights of attention and MLP */
} mt_transformer_layer_desc;

typedef struct mt_transformer_layer {
    mt_transformer_layer_desc desc;
    /* The first and the second LN of mt_ln_placement: NAME.input_layernorm.* and NAME.pre_mlp_layernorm.*, the names of
       Megatron-LM. With MT_PRE_LN and MT_RESIDUAL_POST_LN, input_norm normalises the input of attention, and mlp_norm
       that of the MLP. With MT_POST_LN each follows its block: input_norm normalises x + D(attn(x)), and mlp_norm
       normalises x1 + D(mlp(x1)), so its output is y */
    mt_norm_layer input_norm, mlp_norm;
    mt_self_attention attention; /* NAME.self_attention.* */
    mt_mlp mlp;                  /* NAME.mlp.* */
    mt_comm *tp;                 /* the tensor group */
} mt_transformer_layer;

/* What the norms and blocks of a layer save. */
typedef struct mt_transformer_layer_tensors {
    mt_norm_saved input_norm, mlp_norm;
    mt_self_attention_saved attention;
    mt_mlp_saved mlp;
} mt_transformer_layer_tensors;

/* With MT_RECOMPUTE_FULL, only x and batch are valid after forward. */
typedef struct mt_transformer_layer_saved {
    mt_tensor x; /* the layer's input, in the caller's memory */
    mt_batch batch;
    int count;                             /* of parts: 2 where mt_parallel_options.interleave has an effect, or 1 */
    mt_transformer_layer_tensors parts[2]; /* of the whole batch, or of its two halves */
} mt_transformer_layer_saved;

/* Forward computes y from x. Backward computes dx from dy, and adds to the gradients of the parameters. x, y, dx, dy
   are [tokens, hidden], or [tokens / t, hidden] with sequence_parallel. y must not overlap x, and dx must overlap
   neither dy nor x (MT_ERR_ARGUMENT). None of them may be mt_none(). When t > 1, y and dx must be contiguous; with
   sequence_parallel x and dy, too (MT_ERR_SHAPE). x must not change until backward has returned. The tensors of saved
   are in the arena until the caller's mt_arena_release. When saved is NULL, forward is inference, without dropout.
   Backward uses the batch of forward.
   Communication over the tensor group: forward does 2 all-reduces of [tokens, hidden], and backward does 2. With
   mt_parallel_options.interleave it is 4 of half the tokens each. With
   sequence_parallel forward does 2 all-gathers and 2 reduce-scatters, and backward does 4 all-gathers and 2
   reduce-scatters. With MT_RECOMPUTE_FULL backward does more, see mt_recompute.
   Errors of create: MT_ERR_ARGUMENT (a field of desc is out of range), and those of the create functions of its
   parts. */
MT_API mt_status mt_transformer_layer_create(mt_context *ctx, mt_params *params, const char *name,
                                             const mt_transformer_layer_desc *desc, mt_transformer_layer *out);
MT_API mt_status mt_transformer_layer_forward(mt_context *ctx, const mt_transformer_layer *layer, const mt_batch *batch,
                                              mt_tensor x, mt_tensor y, mt_transformer_layer_saved *saved);
MT_API mt_status mt_transformer_layer_backward(mt_context *ctx, const mt_transformer_layer *layer, mt_tensor dy,
                                               mt_tensor dx, const mt_transformer_layer_saved *saved);

/* Inference with a key/value cache: mt_self_attention_cached_forward with the norms, residuals and MLP of the layer.
   batch, cache, x, y and the errors are as there. Communication: 2 all-reduces over the tensor group, and for a share
   of the tokens that of attention over the context group. */
MT_API mt_status mt_transformer_layer_cached_forward(mt_context *ctx, const mt_transformer_layer *layer,
                                                     const mt_batch *batch, const mt_kv_cache *cache, mt_tensor x,
                                                     mt_tensor y);
