/* megatron.h - Megatron-style parallel transformer building blocks for your own training loop, in C. Header-only.

   Do this:
       #define MEGATRON_IMPLEMENTATION      // in exactly one file of your program: a .c, .cpp or .cu
       #include "megatron.h"                // in every other file the #include alone
       cc -O3 -march=native -I. yours.c -lm -lpthread          (add -DMT_USE_ONEDNN -ldnnl for a fast GEMM)
       nvcc -O3 -I. -DMT_USE_NCCL yours.cu -lcublasLt -lnccl   (on GPUs: mt_context_desc.device = MT_DEVICE_CUDA)

   A tensor-parallel MLP, [tokens, hidden] -> [tokens, hidden]; every rank runs this (examples/01_mlp.c is the whole program):
       mt_context *ctx;   MT_TRY(mt_context_create(world, NULL, &ctx));      // NULL: CPU, defaults
       mt_grid grid;      mt_grid_desc shape = {.tensor = 2};                // data parallel over the rest of world
       mt_params *params; MT_TRY(mt_grid_create(world, &shape, &grid));
                          MT_TRY(mt_params_create(ctx, &grid, &params));
       mt_mlp mlp;        mt_mlp_desc desc = {.hidden = 1024};
                          MT_TRY(mt_mlp_create(ctx, params, "mlp", &desc, &mlp));   // this rank's shard of the weights
                          MT_TRY(mt_params_init(ctx, params, 1234));         // the same model on any number of ranks
       mt_mlp_saved saved;
       MT_TRY(mt_mlp_forward (ctx, &mlp, x, y, &saved));                     // x, y: views of your buffers; one all-reduce
       MT_TRY(mt_mlp_backward(ctx, &mlp, dy, dx, &saved));                   // one all-reduce; parameter gradients +=

   Four floors, each usable alone, includes go down only:
       megatron.h       attention, MLP, transformer layer, GPT                       (this page)
       mt_parallel.h    process grid, parameters, column/row-parallel linear, vocabulary-parallel embedding and loss, AdamW
       mt_kernels.cuh   the operators, forward and backward
       mt_comm.h        contexts, communicators, collectives, the conjugates f and g, mt_launch

   After Megatron-LM (arXiv 1909.08053): 2 all-reduces of [tokens, hidden] per layer forward, 2 backward, and no others; with
   sequence parallelism (arXiv 2205.05198) all-gathers and reduce-scatters instead. The ledger of a communicator counts them.

   It does not: own your loop, your tensors or your process; read files; keep globals; allocate after create; exit or abort.

   Shapes: activations [tokens, features] with token = sequence * seq + position, weights [out, in], as in PyTorch.
   Types: everything f32, or bf16 or f16 with f32 masters and gradients, after mt_params_set_dtype (see mt_parallel.h).
   Errors: every call returns mt_status; MT_TRY(call) passes it on; mt_last_error(ctx) is a sentence with the values.
   Threads: one context, one communicator, one registry per rank, and a rank is one thread. Config macros: see mt_comm.h.

   Rooms of the implementation: >>mlp >>attention >>layer >>gpt                   */

#include "mt_parallel.h" /* outside the guard: an implementation wanted later reaches the lower floors too */

#ifndef MEGATRON_H
#define MEGATRON_H

#define MT_VERSION_MAJOR 0
#define MT_VERSION_MINOR 3
#define MT_VERSION_PATCH 0
#define MT_VERSION "0.3.0"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- what a call works on ----------------------------------------------------------------------------------------- */

/* The tokens of one call: `sequences` sequences of `seq` tokens, on every tensor rank the same. Dropout masks are drawn by
   (seed, step, layer, global element), so they do not depend on tensor, data or micro-batch split as long as
   first_sequence is the index of this call's first sequence in the global batch. */
typedef struct mt_batch {
    int64_t sequences, seq;
    int64_t first_sequence;
    const int32_t *lengths; /* key padding: valid tokens of each sequence, [sequences], on the device; NULL: all */
    uint64_t seed, step;    /* dropout: same (seed, step), same masks; use a new step for each optimizer step */
} mt_batch;

/* ---- MLP ---------------------------------------------------------------------------------------------------------- */

/* Y = act(X A) B: A column-parallel, B row-parallel, no communication between (arXiv 1909.08053, eq. 3 and figure 3a). */
typedef struct mt_mlp_desc {
    int64_t hidden;
    int64_t ffn;                      /* inner width, of gate and of up each for MT_SWIGLU; 0: 4 * hidden */
    mt_activation activation;         /* default MT_GELU_TANH */
    int no_bias;
    int skip_bias_add;                /* 1: the caller adds mlp.fc2.bias itself, to fuse it with what follows */
    int sequence_parallel;            /* x and y are [tokens / t, hidden] */
    float init_std, output_init_std;  /* of fc1, of fc2; 0: 0.02 */
} mt_mlp_desc;

typedef struct mt_mlp {
    mt_mlp_desc desc;
    mt_column_parallel_linear fc1; /* parameters NAME.linear_fc1.weight, .bias; for SwiGLU its rows are [gate; up] */
    mt_row_parallel_linear fc2;    /* parameters NAME.linear_fc2.weight, .bias */
} mt_mlp;

typedef struct mt_mlp_saved {
    mt_linear_saved fc1, fc2;
    mt_tensor h; /* [tokens, local ffn] before the activation */
} mt_mlp_saved;

/* x, y, dx, dy [tokens, hidden] ([tokens / t, hidden] with sequence_parallel); y is written, not added to. x must stay as it
   is until backward. saved: arena memory until the caller's mt_arena_release; NULL: inference. dx may be mt_none(). */
MT_API mt_status mt_mlp_create(mt_context *ctx, mt_params *params, const char *name, const mt_mlp_desc *desc, mt_mlp *out);
MT_API mt_status mt_mlp_forward(mt_context *ctx, const mt_mlp *mlp, mt_tensor x, mt_tensor y, mt_mlp_saved *saved);
MT_API mt_status mt_mlp_backward(mt_context *ctx, const mt_mlp *mlp, mt_tensor dy, mt_tensor dx, const mt_mlp_saved *saved);

/* ---- self-attention ----------------------------------------------------------------------------------------------- */

/* Query groups are split over the tensor ranks (arXiv 1909.08053, figure 3b): QKV column-parallel, attention on this rank's
   heads, projection row-parallel. heads must be a multiple of kv_heads and hidden of heads; kv_heads at least the tensor
   size, and at least V in invariant mode. Where the split does not divide kv_heads, the last ranks hold empty groups. */
typedef struct mt_self_attention_desc {
    int64_t hidden, heads;
    int64_t kv_heads;                 /* query groups; 0: heads (MHA), fewer: GQA */
    mt_mask mask;                     /* default MT_MASK_CAUSAL */
    float rotary_base;                /* rotary position embedding with this base (10000); 0: none */
    int64_t max_seq;                  /* needed for rotary only: positions in its table */
    float dropout;                    /* of attention probabilities */
    int64_t layer;                    /* this layer's number: tells its dropout masks from those of other layers */
    int no_bias;
    int skip_bias_add;                /* 1: the caller adds attention.proj.bias itself */
    int sequence_parallel;            /* x and y are [tokens / t, hidden] */
    int recompute_core;               /* 1: core attention runs again in backward: saved keeps its qkv, not out and lse */
    float init_std, output_init_std;  /* of qkv, of proj; 0: 0.02 */
} mt_self_attention_desc;

typedef struct mt_self_attention {
    mt_self_attention_desc desc;
    mt_column_parallel_linear qkv; /* NAME.linear_qkv.*, rows per query group: its queries, its key, its value */
    mt_row_parallel_linear proj;   /* NAME.linear_proj.* */
    mt_tensor rotary;              /* [max_seq, head_dim] or none; memory of the registry */
    int64_t head_dim, groups;      /* groups: of this rank, empty ones included */
    int64_t first_group;           /* global index of this rank's first */
} mt_self_attention;

typedef struct mt_self_attention_saved {
    mt_batch batch; /* what forward worked on; its lengths must stay as they are until backward */
    mt_linear_saved qkv_in, proj_in;
    mt_tensor qkv, out, lse; /* [tokens, local qkv], [tokens, local heads * head_dim], [heads but empty ones, tokens]; out and
                                lse are gone with recompute_core */
} mt_self_attention_saved;

MT_API mt_status mt_self_attention_create(mt_context *ctx, mt_params *params, const char *name,
                                          const mt_self_attention_desc *desc, mt_self_attention *out);
MT_API mt_status mt_self_attention_forward(mt_context *ctx, const mt_self_attention *attention, const mt_batch *batch,
                                           mt_tensor x, mt_tensor y, mt_self_attention_saved *saved);
MT_API mt_status mt_self_attention_backward(mt_context *ctx, const mt_self_attention *attention, mt_tensor dy, mt_tensor dx,
                                            const mt_self_attention_saved *saved);

/* Between the grouped QKV weight [(heads + 2 kv_heads) * head_dim, cols] and separate q [heads * head_dim, cols], k and v
   [kv_heads * head_dim, cols], all in host memory, global; for a bias cols is 1. Plain copies, no errors but sizes. */
MT_API mt_status mt_qkv_from_separate(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols, const float *q,
                                      const float *k, const float *v, float *qkv);
MT_API mt_status mt_qkv_to_separate(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols, const float *qkv,
                                    float *q, float *k, float *v);

/* ---- transformer layer -------------------------------------------------------------------------------------------- */

/* Where the norms sit, D being dropout:
   MT_PRE_LN            x1 = x + D(attn(LN(x))), y = x1 + D(mlp(LN(x1))): GPT-2, and the rearranged order that the paper
                        recommends for BERT (arXiv 1909.08053, figure 7b)
   MT_POST_LN           x1 = LN(x + D(attn(x))), y = LN(x1 + D(mlp(x1))): original BERT (figure 7a)
   MT_RESIDUAL_POST_LN  n = LN(x), x1 = n + D(attn(n)), m = LN(x1), y = m + D(mlp(m)): Megatron's
                        --apply-residual-connection-post-layernorm */
typedef enum mt_ln_placement { MT_PRE_LN = 0, MT_POST_LN = 1, MT_RESIDUAL_POST_LN = 2 } mt_ln_placement;

/* What backward computes again instead of forward keeping it (arXiv 2205.05198; Megatron's --recompute-granularity). The bits
   are the same: dropout draws the same masks. A layer of MT_PRE_LN, MT_LAYER_NORM, MT_GELU_TANH and kv_heads == heads keeps,
   of n tokens until backward, with elements of e bytes, on each of t tensor ranks that divide its a heads and its ffn = 4 h,
   where r is n, or n / t with sequence_parallel, these bytes, its input included (the paper's 34 without its dropout masks):
   MT_RECOMPUTE_NONE       e h (4 r + 12 n / t) + 16 r + 4 n a / t
   MT_RECOMPUTE_SELECTIVE  e h (4 r + 11 n / t) + 16 r   core attention runs again, from qkv: no communication
   MT_RECOMPUTE_FULL       e h r                         the layer runs again, from its input, with its collectives but for the
                           MLP's last, whose result backward does not need (with MT_POST_LN it does): 5 all-reduces in all, or
                           8 all-gathers and 5 reduce-scatters */
typedef enum mt_recompute { MT_RECOMPUTE_NONE = 0, MT_RECOMPUTE_SELECTIVE = 1, MT_RECOMPUTE_FULL = 2 } mt_recompute;

typedef struct mt_transformer_layer_desc {
    int64_t hidden, heads;
    int64_t kv_heads, ffn;      /* 0: heads, 4 * hidden */
    mt_ln_placement placement;  /* default MT_PRE_LN */
    mt_norm_kind norm;          /* default MT_LAYER_NORM */
    float norm_eps;             /* 0: 1e-5 */
    mt_activation activation;   /* default MT_GELU_TANH */
    mt_mask mask;               /* default MT_MASK_CAUSAL */
    float rotary_base;          /* 0: none */
    int64_t max_seq;            /* for rotary */
    float attention_dropout, hidden_dropout;
    int64_t layer;              /* this layer's number, for its dropout masks */
    int no_bias;
    int sequence_parallel;      /* x and y are [tokens / t, hidden] */
    mt_recompute recompute;     /* default MT_RECOMPUTE_NONE */
    float init_std;             /* 0: 0.02 */
    float output_init_std;      /* of proj and fc2; 0: 0.02; GPT-2 uses 0.02 / sqrt(2 * layers) */
} mt_transformer_layer_desc;

typedef struct mt_norm {
    mt_param *weight, *bias; /* bias is NULL for RMSNorm */
    mt_norm_kind kind;
    float eps;
    mt_comm *tensor;
} mt_norm;

typedef struct mt_transformer_layer {
    mt_transformer_layer_desc desc;
    mt_norm input_norm, mlp_norm; /* NAME.input_layernorm.*, NAME.pre_mlp_layernorm.* */
    mt_self_attention attention;       /* NAME.self_attention.* */
    mt_mlp mlp;                   /* NAME.mlp.* */
    mt_comm *tensor;
} mt_transformer_layer;

/* One of the layer's two halves: norm, attention or MLP, dropout, residual. */
typedef struct mt_sublayer_saved {
    mt_tensor norm_in, stats;
} mt_sublayer_saved;

typedef struct mt_transformer_layer_saved {
    mt_tensor x; /* the layer's input, a view of the caller's; with MT_RECOMPUTE_FULL all there is, but for attention.batch */
    mt_sublayer_saved first, second;
    mt_self_attention_saved attention;
    mt_mlp_saved mlp;
} mt_transformer_layer_saved;

/* x, y, dx, dy [tokens, hidden] ([tokens / t, hidden] with sequence_parallel), all different memory, all wanted; x must stay as
   it is until backward. A training step does 4 all-reduces of [tokens, hidden] over the tensor group; with sequence_parallel 6
   all-gathers and 4 reduce-scatters (mt_recompute tells when it is more). Backward is for the batch that forward was given,
   which saved remembers. */
MT_API mt_status mt_transformer_layer_create(mt_context *ctx, mt_params *params, const char *name,
                                             const mt_transformer_layer_desc *desc, mt_transformer_layer *out);
MT_API mt_status mt_transformer_layer_forward(mt_context *ctx, const mt_transformer_layer *layer, const mt_batch *batch,
                                              mt_tensor x, mt_tensor y, mt_transformer_layer_saved *saved);
MT_API mt_status mt_transformer_layer_backward(mt_context *ctx, const mt_transformer_layer *layer, mt_tensor dy,
                                               mt_tensor dx, const mt_transformer_layer_saved *saved);

/* ---- GPT ---------------------------------------------------------------------------------------------------------- */

/* Token embedding + learned positions (none with rotary), layers, final norm (none with MT_POST_LN), output head tied to the
   token embedding or its own, cross-entropy. */
typedef struct mt_gpt_desc {
    int64_t vocab, layers, max_seq;
    mt_transformer_layer_desc layer; /* of every layer; its layer, max_seq, output_init_std (0.02 / sqrt(2 layers)) are set */
    int64_t recompute_layers; /* so many, the first ones of each stage, are recomputed as layer.recompute says; 0: all */
    int untied_head;
    float embedding_dropout;
    float label_smoothing;
    int32_t ignore_index;      /* targets equal to it do not count; 0 stands for PyTorch's -100 */
} mt_gpt_desc;

/* Of a pipeline, a stage has `local_layers` layers, which must come out even (MT_ERR_SHAPE), the first one the embeddings, the
   last one the final norm and the head. A tied embedding is on both, with the same values; mt_sync_gradients adds its
   gradients up. What a stage does not have is zero. */
typedef struct mt_gpt {
    mt_gpt_desc desc;
    mt_vocab_parallel_embedding tokens; /* embedding.word_embeddings.weight */
    mt_param *positions;                /* embedding.position_embeddings.weight [max_seq, hidden]; NULL with rotary */
    mt_transformer_layer *layers;       /* decoder.layers.<first_layer>.*, ...; memory of the registry */
    int64_t first_layer, local_layers;  /* of this stage */
    mt_norm final_norm;                 /* decoder.final_layernorm.*; weight is NULL with MT_POST_LN */
    mt_column_parallel_linear head;     /* output_layer.weight, or the embedding's */
    mt_cross_entropy_desc loss;
    const mt_grid *grid;
} mt_gpt;

/* What one forward leaves for its backward. Several may be in flight. */
typedef struct mt_gpt_saved {
    mt_transformer_layer_saved *layers; /* mt_gpt_saved_create */
    mt_batch batch;
    const int32_t *ids; /* NULL: there is no forward that waits for its backward */
    mt_tensor norm_in, stats;
    mt_linear_saved head;
    mt_cross_entropy_saved loss;
} mt_gpt_saved;

MT_API mt_status mt_gpt_create(mt_context *ctx, mt_params *params, const mt_gpt_desc *desc, mt_gpt *out);
MT_API mt_status mt_gpt_saved_create(mt_context *ctx, const mt_gpt *gpt, mt_gpt_saved *out);
MT_API void mt_gpt_saved_destroy(mt_gpt_saved *saved); /* a zero-initialised one is allowed */

/* For a grid of one pipeline stage, that is the whole model; with more see mt_gpt_stage_forward.
   ids, targets [sequences * seq] on the device, the same on every tensor rank, unchanged until backward; loss
   [1, sequences * seq] per token, 0 where ignored.
   Communication over the tensor group: 1 all-reduce for the embedding, 2 per layer, 1 all-gather of scalars for the loss.
   saved == NULL: evaluation. Errors: MT_ERR_DATA for ids and targets out of range, before anything is computed. */
MT_API mt_status mt_gpt_forward(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                const int32_t *targets, mt_tensor loss, mt_gpt_saved *saved);

/* Adds the gradient of scale * sum(loss) to every parameter's. 1 all-reduce for the head, 2 per layer. Once for each forward:
   it turns the logits into their gradient and leaves saved empty. After mt_sync_gradients_begin, buckets of gradients go over
   the data group as layers are done with them. */
MT_API mt_status mt_gpt_backward(mt_context *ctx, const mt_gpt *gpt, float scale, mt_gpt_saved *saved);

/* The same of one stage of a pipeline, for mt_pipeline_run: with it every stage sees the same batch, ids and targets.
   input, output and their gradients are [tokens, hidden], or [tokens / t, hidden] with sequence_parallel, in the model's type,
   and mt_none() where mt_pipeline_run gives none; input must stay as it is until backward. loss is written by the last stage
   and may be mt_none() on the others. Of a GPT with `slots` of `saved`:
       mt_status forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
           ... batch, ids, targets and loss of micro-batch a->micro_batch, unchanged until its backward ...
           return mt_gpt_stage_forward(ctx, &gpt, &batch, ids, targets, input, output, loss, &saved[a->slot]);
       }
       mt_status backward(mt_context *ctx, void *user, const mt_action *a, mt_tensor doutput, mt_tensor dinput) {
           MT_TRY(mt_gpt_stage_backward(ctx, &gpt, 1.0f / tokens, doutput, dinput, &saved[a->slot]));
           return mt_accumulate_gradients(ctx, params);
       } */
MT_API mt_status mt_gpt_stage_forward(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                      const int32_t *targets, mt_tensor input, mt_tensor output, mt_tensor loss,
                                      mt_gpt_saved *saved);
MT_API mt_status mt_gpt_stage_backward(mt_context *ctx, const mt_gpt *gpt, float scale, mt_tensor doutput, mt_tensor dinput,
                                       mt_gpt_saved *saved);

/* Inference, no dropout: logits [sequences * seq, vocab] of every token, or [sequences, vocab] of each sequence's last one (the
   last valid one where the batch has lengths); logits.rows decides which. On every tensor rank and every stage, which all call
   it. Of any float type: MT_F32 keeps what a 16-bit model rounds away. */
MT_API mt_status mt_gpt_logits(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                               mt_tensor logits);

#ifdef __cplusplus
}
#endif

#endif /* MEGATRON_H */

/* ================================================== the API ends here ============================================== */

#if defined(MEGATRON_IMPLEMENTATION) && !defined(MEGATRON_IMPLEMENTED)
#define MEGATRON_IMPLEMENTED

#ifdef __cplusplus
extern "C" {
#endif

/* ---- >>mlp -------------------------------------------------------------------------------------------------------- */

static mt_status mti_create_check(mt_context *ctx, const char *function, const mt_params *params, const char *name,
                                  const void *desc, const void *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (params && name && desc && out) return MT_SUCCESS;
    return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function,
                    !params ? "params" : !name ? "name" : !desc ? "desc" : "out");
}

static mt_status mti_mlp_create(mt_context *ctx, mt_params *params, const char *name, const mt_mlp_desc *d, mt_mlp *out) {
    char full[MT_NAME_MAX];
    mt_linear_desc fc1, fc2;
    int64_t parts = d->activation == MT_SWIGLU ? 2 : 1;
    memset(&fc1, 0, sizeof fc1);
    fc1.in_features = d->hidden;
    fc1.out_features = parts * d->ffn;
    fc1.parts = parts;
    fc1.no_bias = d->no_bias;
    fc1.skip_bias_add = 1; /* fused with the activation */
    fc1.sequence_parallel = d->sequence_parallel;
    fc1.init_std = d->init_std;
    memset(&fc2, 0, sizeof fc2);
    fc2.in_features = d->ffn;
    fc2.out_features = d->hidden;
    fc2.input_is_parallel = 1;
    fc2.no_bias = d->no_bias;
    fc2.skip_bias_add = d->skip_bias_add;
    fc2.sequence_parallel = d->sequence_parallel;
    fc2.init_std = d->output_init_std;
    MT_TRY(mti_join_name(ctx, full, name, "linear_fc1"));
    MT_TRY(mt_column_parallel_linear_create(ctx, params, full, &fc1, &out->fc1));
    MT_TRY(mti_join_name(ctx, full, name, "linear_fc2"));
    return mt_row_parallel_linear_create(ctx, params, full, &fc2, &out->fc2);
}

MT_API mt_status mt_mlp_create(mt_context *ctx, mt_params *params, const char *name, const mt_mlp_desc *desc, mt_mlp *out) {
    int count;
    MT_TRY(mti_create_check(ctx, "mt_mlp_create", params, name, desc, out));
    if (desc->hidden < 1 || desc->hidden > INT32_MAX || desc->ffn < 0 || desc->ffn > INT32_MAX ||
        desc->activation < MT_GELU_TANH || desc->activation > MT_SWIGLU)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_mlp_create: '%s' has hidden %lld, ffn %lld, activation %d", name,
                        (long long)desc->hidden, (long long)desc->ffn, (int)desc->activation);
    count = params->count;
    memset(out, 0, sizeof *out);
    out->desc = *desc;
    if (!desc->ffn) out->desc.ffn = 4 * desc->hidden;
    return mti_params_keep(params, count, out, sizeof *out, mti_mlp_create(ctx, params, name, &out->desc, out));
}

/* Rows of a view that may not be there. */
static mt_tensor mti_some_rows(mt_tensor t, int64_t first, int64_t count) {
    return t.data ? mt_tensor_rows(t, first, count) : t;
}

static mt_tensor mti_bias_value(const mt_param *bias) { return bias ? bias->value : mt_none(); }
static mt_tensor mti_bias_grad(const mt_param *bias) { return bias ? bias->grad : mt_none(); }

/* act = activation(h), h = x W1^T + bias: in one operator where epilogues are wanted. */
static mt_status mti_mlp_activation(mt_context *ctx, const mt_mlp *mlp, mt_tensor x, mt_tensor act, mt_mlp_saved *saved,
                                    int training) {
    int s, shards = mlp->fc1.weight->shards;
    if (ctx->epilogue != MT_EPILOGUE_SEPARATE) {
        mti_activation_after at_once = {mlp->desc.activation, mti_bias_value(mlp->fc1.bias), act};
        saved->fc1.x = x;
        return mti_column_run(ctx, &mlp->fc1, x, saved->h, &at_once);
    }
    MT_TRY(mt_column_parallel_linear_forward(ctx, &mlp->fc1, x, saved->h, training ? &saved->fc1 : NULL));
    for (s = 0; s < shards; s++)
        MT_TRY(mt_activation_forward(ctx, mlp->desc.activation, mt_shard_cols(saved->h, s, shards),
                                     mt_shard_cols(mti_bias_value(mlp->fc1.bias), s, shards), mt_shard_cols(act, s, shards)));
    return MT_SUCCESS;
}

/* y is mt_none() where only `saved` is wanted. */
static mt_status mti_mlp_forward(mt_context *ctx, const mt_mlp *mlp, mt_tensor x, mt_tensor y, mt_mlp_saved *saved,
                                 int training) {
    int64_t tokens = mti_tokens(mlp->fc1.tensor, mlp->desc.sequence_parallel, x.rows);
    mt_tensor act;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, tokens, mlp->fc1.local_features, &saved->h));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, tokens, mlp->fc2.local_features, &act));
    MT_TRY(mti_mlp_activation(ctx, mlp, x, act, saved, training));
    if (training) MT_TRY(mti_log(ctx, mlp->fc1.name, 1, "activation_func.output", act, 0, mlp->fc2.weight));
    saved->fc2.x = act;
    if (!y.data) return MT_SUCCESS;
    return mt_row_parallel_linear_forward(ctx, &mlp->fc2, act, y, training ? &saved->fc2 : NULL);
}

static mt_status mti_mlp_check(mt_context *ctx, const char *function, const mt_mlp *mlp, const char *in_name, mt_tensor in,
                               const char *out_name, mt_tensor out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!mlp) return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: mlp is NULL", function);
    MT_TRY(mti_expect_weight(ctx, function, mlp->fc1.weight));
    MT_TRY(mti_expect_like(ctx, function, mlp->fc1.weight, in_name, in, in.rows, mlp->desc.hidden));
    return mti_expect_like(ctx, function, mlp->fc1.weight, out_name, out, in.rows, mlp->desc.hidden);
}

MT_API mt_status mt_mlp_forward(mt_context *ctx, const mt_mlp *mlp, mt_tensor x, mt_tensor y, mt_mlp_saved *saved) {
    mt_mlp_saved local;
    size_t mark;
    mt_status status;
    MT_TRY(mti_mlp_check(ctx, "mt_mlp_forward", mlp, "x", x, "y", y));
    MT_TRY(mti_expect_travel(ctx, "mt_mlp_forward", mlp->fc1.tensor, mlp->desc.sequence_parallel, "x", x, "y", y));
    mark = mt_arena_mark(ctx);
    status = MTI_RANGE("mlp forward", mti_mlp_forward(ctx, mlp, x, y, saved ? saved : &local, saved != NULL));
    if (status != MT_SUCCESS || !saved) mt_arena_release(ctx, mark);
    return status;
}

/* dh from dy, through fc2 and the activation, with the gradients of fc2 and of fc1's bias. */
static mt_status mti_mlp_activation_backward(mt_context *ctx, const mt_mlp *mlp, mt_tensor dy, mt_tensor dh,
                                             const mt_mlp_saved *saved) {
    int s, shards = mlp->fc1.weight->shards;
    mt_tensor dact;
    if (ctx->epilogue != MT_EPILOGUE_SEPARATE) {
        mti_activation_before act = {mlp->desc.activation, saved->h, mti_bias_grad(mlp->fc1.bias)};
        return mti_row_run_backward(ctx, &mlp->fc2, dy, dh, saved->fc2.x, &act);
    }
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->h.rows, mlp->fc2.local_features, &dact));
    MT_TRY(mt_row_parallel_linear_backward(ctx, &mlp->fc2, dy, dact, &saved->fc2));
    for (s = 0; s < shards; s++)
        MT_TRY(mt_activation_backward(ctx, mlp->desc.activation, mt_shard_cols(saved->h, s, shards),
                                      mt_shard_cols(dact, s, shards), mt_shard_cols(dh, s, shards),
                                      mt_shard_cols(mti_bias_grad(mlp->fc1.bias), s, shards)));
    return MT_SUCCESS;
}

static mt_status mti_mlp_backward(mt_context *ctx, const mt_mlp *mlp, mt_tensor dy, mt_tensor dx, const mt_mlp_saved *saved) {
    mt_tensor dh;
    size_t mark;
    mt_status status;
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->h.rows, mlp->fc1.local_features, &dh));
    mark = mt_arena_mark(ctx);
    status = mti_mlp_activation_backward(ctx, mlp, dy, dh, saved);
    mt_arena_release(ctx, mark);
    if (status != MT_SUCCESS) return status;
    MT_TRY(mti_log(ctx, mlp->fc1.name, 1, "activation_func.input_grad", dh, 0, mlp->fc1.weight));
    return mt_column_parallel_linear_backward(ctx, &mlp->fc1, dh, dx, &saved->fc1);
}

MT_API mt_status mt_mlp_backward(mt_context *ctx, const mt_mlp *mlp, mt_tensor dy, mt_tensor dx, const mt_mlp_saved *saved) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_mlp_check(ctx, "mt_mlp_backward", mlp, "dy", dy, dx.data ? "dx" : "dy", dx.data ? dx : dy));
    if (!saved) return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_mlp_backward: saved is NULL");
    MT_TRY(mti_expect_like(ctx, "mt_mlp_backward", mlp->fc1.weight, "saved x", saved->fc1.x, dy.rows, mlp->desc.hidden));
    MT_TRY(mti_expect_travel(ctx, "mt_mlp_backward", mlp->fc1.tensor, mlp->desc.sequence_parallel, "dy", dy, "dx", dx));
    mark = mt_arena_mark(ctx);
    status = MTI_RANGE("mlp backward", mti_mlp_backward(ctx, mlp, dy, dx, saved));
    mt_arena_release(ctx, mark);
    return status;
}

/* ---- >>attention -------------------------------------------------------------------------------------------------- */

/* A random stream for each (step, layer, site): sites 0 probabilities, 1 and 2 the halves of a layer, 3 embedding. */
static mt_dropout mti_dropout(const mt_batch *batch, float p, int64_t layer, int site) {
    mt_dropout d;
    memset(&d, 0, sizeof d);
    d.at.seed = batch->seed;
    d.at.stream = (batch->step << 20) + ((uint64_t)layer << 2) + (uint64_t)site;
    d.p = p;
    return d;
}

static mt_status mti_batch_check(mt_context *ctx, const char *function, const mt_batch *batch, int64_t max_seq) {
    int64_t i;
    if (!batch) return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: batch is NULL", function);
    if (batch->sequences < 1 || batch->seq < 1 || batch->first_sequence < 0 ||
        batch->sequences > INT32_MAX / batch->seq || batch->first_sequence > INT64_MAX / batch->seq - batch->sequences)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: batch of %lld sequences of %lld tokens, first sequence %lld", function,
                        (long long)batch->sequences, (long long)batch->seq, (long long)batch->first_sequence);
    if (max_seq > 0 && batch->seq > max_seq)
        return mti_fail(ctx, MT_ERR_SHAPE, "%s: sequences of %lld tokens, max_seq is %lld", function, (long long)batch->seq,
                        (long long)max_seq);
    for (i = 0; batch->lengths && ctx->device == MT_DEVICE_CPU && i < batch->sequences; i++)
        if (batch->lengths[i] < 0 || batch->lengths[i] > batch->seq)
            return mti_fail(ctx, MT_ERR_DATA, "%s: lengths[%lld] is %ld, sequences have %lld tokens", function, (long long)i,
                            (long)batch->lengths[i], (long long)batch->seq);
    return MT_SUCCESS;
}

static int mti_probability(float p) { return p >= 0.0f && p < 1.0f; }

static mt_status mti_attention_check(mt_context *ctx, const char *name, const mt_self_attention_desc *d, int shards) {
    static const char *const function = "mt_self_attention_create";
    if (d->hidden < 1 || d->hidden > INT32_MAX || d->heads < 1 || d->kv_heads < 1 || d->max_seq < 0 ||
        d->max_seq > INT32_MAX || d->layer < 0 || !mti_probability(d->dropout) ||
        !(d->rotary_base >= 0.0f) || (d->mask != MT_MASK_CAUSAL && d->mask != MT_MASK_BIDIRECTIONAL))
        return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' has hidden %lld, heads %lld, kv_heads %lld, max_seq %lld, layer %lld, "
                        "dropout %g, rotary_base %g, mask %d", function, name, (long long)d->hidden, (long long)d->heads,
                        (long long)d->kv_heads, (long long)d->max_seq, (long long)d->layer, (double)d->dropout,
                        (double)d->rotary_base, (int)d->mask);
    if (d->hidden % d->heads != 0 || d->heads % d->kv_heads != 0)
        return mti_fail(ctx, MT_ERR_SHAPE, "%s: '%s': hidden %lld must be a multiple of heads %lld, heads of kv_heads %lld",
                        function, name, (long long)d->hidden, (long long)d->heads, (long long)d->kv_heads);
    if (d->kv_heads < shards)
        return mti_fail(ctx, MT_ERR_SHAPE, "%s: '%s': %lld kv_heads cannot be split over %d %s", function, name,
                        (long long)d->kv_heads, shards,
                        ctx->invariant ? "virtual shards (mt_context_desc.invariant)" : "tensor ranks");
    if (d->rotary_base > 0.0f && (d->max_seq < 1 || d->hidden / d->heads % 2 != 0))
        return mti_fail(ctx, MT_ERR_SHAPE, "%s: '%s': rotary needs max_seq (is %lld) and an even head size (is %lld)", function,
                        name, (long long)d->max_seq, (long long)(d->hidden / d->heads));
    return MT_SUCCESS;
}

/* Memory that goes with the registry: host structs or a table on the device. */
static mt_status mti_params_buffer(mt_context *ctx, mt_params *params, size_t bytes, int on_host, void **out) {
    mti_buffer *buffer;
    void *memory;
    mt_status status;
    MT_TRY(mti_host_new(ctx, sizeof *buffer, &memory));
    buffer = (mti_buffer *)memory;
    status = on_host ? mti_host_new(ctx, bytes, &buffer->data) : mt_context_alloc(ctx, bytes, &buffer->data);
    if (status != MT_SUCCESS) {
        mti_host_free(buffer);
        return status;
    }
    buffer->bytes = bytes;
    buffer->on_host = on_host;
    buffer->next = params->buffers;
    params->buffers = buffer;
    *out = buffer->data;
    return MT_SUCCESS;
}

static mt_status mti_attention_rotary(mt_context *ctx, mt_params *params, mt_self_attention *out) {
    void *table;
    out->rotary = mt_none();
    if (out->desc.rotary_base <= 0.0f) return MT_SUCCESS;
    MT_TRY(mti_params_buffer(ctx, params, (size_t)(out->desc.max_seq * out->head_dim) * sizeof(float), 0, &table));
    out->rotary = mt_tensor_f32((const float *)table, out->desc.max_seq, out->head_dim);
    return mt_rotary_table(ctx, out->desc.rotary_base, out->rotary);
}

static mt_status mti_attention_create(mt_context *ctx, mt_params *params, const char *name, mt_self_attention *out) {
    const mt_self_attention_desc *d = &out->desc;
    char full[MT_NAME_MAX];
    int64_t per_group = d->heads / d->kv_heads;
    mt_linear_desc qkv, proj;
    memset(&qkv, 0, sizeof qkv);
    qkv.in_features = d->hidden;
    qkv.out_features = (d->heads + 2 * d->kv_heads) * out->head_dim;
    qkv.unit = (per_group + 2) * out->head_dim;
    qkv.no_bias = d->no_bias;
    qkv.sequence_parallel = d->sequence_parallel;
    qkv.init_std = d->init_std;
    memset(&proj, 0, sizeof proj);
    proj.in_features = d->hidden;
    proj.out_features = d->hidden;
    proj.unit = per_group * out->head_dim;
    proj.input_is_parallel = 1;
    proj.no_bias = d->no_bias;
    proj.skip_bias_add = d->skip_bias_add;
    proj.sequence_parallel = d->sequence_parallel;
    proj.init_std = d->output_init_std;
    MT_TRY(mti_join_name(ctx, full, name, "linear_qkv"));
    MT_TRY(mt_column_parallel_linear_create(ctx, params, full, &qkv, &out->qkv));
    MT_TRY(mti_join_name(ctx, full, name, "linear_proj"));
    MT_TRY(mt_row_parallel_linear_create(ctx, params, full, &proj, &out->proj));
    out->groups = out->qkv.local_features / qkv.unit;
    out->first_group = params->grid->tensor_rank * out->groups;
    return mti_attention_rotary(ctx, params, out);
}

MT_API mt_status mt_self_attention_create(mt_context *ctx, mt_params *params, const char *name,
                                          const mt_self_attention_desc *desc, mt_self_attention *out) {
    mt_self_attention_desc d;
    int count;
    MT_TRY(mti_create_check(ctx, "mt_self_attention_create", params, name, desc, out));
    d = *desc;
    if (!d.kv_heads) d.kv_heads = d.heads;
    MT_TRY(mti_attention_check(ctx, name, &d, mti_shards(ctx, params->grid->tensor) * params->grid->tensor_size));
    count = params->count;
    memset(out, 0, sizeof *out);
    out->desc = d;
    out->head_dim = d.hidden / d.heads;
    return mti_params_keep(params, count, out, sizeof *out, mti_attention_create(ctx, params, name, out));
}

/* Only of the groups that are there: the empty ones, which fill up the split, take no part. */
static mt_attention_shape mti_attention_shape(const mt_self_attention *a, const mt_batch *batch, int training) {
    mt_attention_shape s;
    memset(&s, 0, sizeof s);
    s.batch = batch->sequences;
    s.seq = batch->seq;
    s.groups = mti_max(0, mti_min(a->groups, a->desc.kv_heads - a->first_group));
    s.heads_per_group = a->desc.heads / a->desc.kv_heads;
    s.head_dim = a->head_dim;
    s.mask = a->desc.mask;
    s.lengths = batch->lengths;
    s.dropout = mti_dropout(batch, training ? a->desc.dropout : 0.0f, a->desc.layer, 0);
    s.dropout.at.first_row = batch->first_sequence;
    s.dropout.at.first_col = a->first_group * s.heads_per_group;
    s.dropout.at.global_cols = a->desc.heads;
    return s;
}

/* The part of that which is a virtual shard; `*first` is its first group on this rank. */
static mt_attention_shape mti_attention_shard(const mt_self_attention *a, const mt_attention_shape *whole, int shard,
                                              int64_t *first) {
    int64_t each = a->groups / a->qkv.weight->shards;
    mt_attention_shape s = *whole;
    *first = mti_min(whole->groups, shard * each);
    s.groups = mti_min(each, whole->groups - *first);
    s.dropout.at.first_col += *first * s.heads_per_group;
    return s;
}

/* The columns of t that belong to the shape's groups from `first` on, `width` for each. */
static mt_tensor mti_attention_cols(const mt_attention_shape *shape, mt_tensor t, int64_t first, int64_t width) {
    return mt_tensor_cols(t, first * width, shape->groups * width);
}

/* Empty groups have zeros. */
static mt_status mti_attention_zero_rest(mt_context *ctx, const mt_attention_shape *shape, mt_tensor t, int64_t width) {
    int64_t used = shape->groups * width;
    return used == t.cols ? MT_SUCCESS : mt_fill(ctx, mt_tensor_cols(t, used, t.cols - used), 0.0f);
}

static mt_tensor mti_attention_lse(const mt_attention_shape *shape, mt_tensor lse, int64_t first) {
    return mti_some_rows(lse, first * shape->heads_per_group, shape->groups * shape->heads_per_group);
}

static mt_status mti_attention_shard_forward(mt_context *ctx, const mt_self_attention *a, const mt_attention_shape *whole,
                                             int shard, const mt_self_attention_saved *saved) {
    int64_t first;
    mt_attention_shape shape = mti_attention_shard(a, whole, shard, &first);
    mt_tensor out = mti_attention_cols(&shape, saved->out, first, a->proj.desc.unit), qkv, room;
    size_t mark = mt_arena_mark(ctx);
    if (shape.groups == 0) return MT_SUCCESS;
    MT_TRY(mti_canonical(ctx, mti_attention_cols(&shape, saved->qkv, first, a->qkv.desc.unit), &qkv));
    MT_TRY(mti_canonical_room(ctx, out, &room));
    MT_TRY(mt_attention_forward(ctx, &shape, qkv, room, mti_attention_lse(&shape, saved->lse, first)));
    MT_TRY(mti_canonical_done(ctx, room, out));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

static mt_status mti_attention_core_forward(mt_context *ctx, const mt_self_attention *a, const mt_attention_shape *shape,
                                            const mt_self_attention_saved *saved) {
    int s;
    MT_TRY(mti_attention_zero_rest(ctx, shape, saved->out, a->proj.desc.unit));
    if (shape->groups == 0) return MT_SUCCESS;
    for (s = 0; s < a->qkv.weight->shards; s++) MT_TRY(mti_attention_shard_forward(ctx, a, shape, s, saved));
    return MT_SUCCESS;
}

static mt_status mti_attention_shard_backward(mt_context *ctx, const mt_self_attention *a, const mt_attention_shape *whole,
                                              int shard, const mt_self_attention_saved *saved, mt_tensor dout,
                                              mt_tensor dqkv) {
    int64_t first, qkv_width = a->qkv.desc.unit, out_width = a->proj.desc.unit;
    mt_attention_shape shape = mti_attention_shard(a, whole, shard, &first);
    mt_tensor qkv, out, room;
    size_t mark = mt_arena_mark(ctx);
    if (shape.groups == 0) return MT_SUCCESS;
    MT_TRY(mti_canonical(ctx, mti_attention_cols(&shape, saved->qkv, first, qkv_width), &qkv));
    MT_TRY(mti_canonical(ctx, mti_attention_cols(&shape, saved->out, first, out_width), &out));
    MT_TRY(mti_canonical(ctx, mti_attention_cols(&shape, dout, first, out_width), &dout));
    dqkv = mti_attention_cols(&shape, dqkv, first, qkv_width);
    MT_TRY(mti_canonical_room(ctx, dqkv, &room));
    MT_TRY(mt_attention_backward(ctx, &shape, qkv, out, mti_attention_lse(&shape, saved->lse, first), dout, room));
    MT_TRY(mti_canonical_done(ctx, room, dqkv));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

static mt_status mti_attention_core_backward(mt_context *ctx, const mt_self_attention *a, const mt_attention_shape *shape,
                                             const mt_self_attention_saved *saved, mt_tensor dout, mt_tensor dqkv) {
    int s;
    MT_TRY(mti_attention_zero_rest(ctx, shape, dqkv, a->qkv.desc.unit));
    if (shape->groups == 0) return MT_SUCCESS;
    for (s = 0; s < a->qkv.weight->shards; s++)
        MT_TRY(mti_attention_shard_backward(ctx, a, shape, s, saved, dout, dqkv));
    if (!a->rotary.data) return MT_SUCCESS;
    return mt_rotary_backward(ctx, shape, mt_tensor_rows(a->rotary, 0, shape->seq),
                              mti_attention_cols(shape, dqkv, 0, a->qkv.desc.unit));
}

/* What core attention writes; no lse for inference. */
static mt_status mti_attention_room(mt_context *ctx, const mt_self_attention *a, const mt_attention_shape *shape,
                                    mt_self_attention_saved *saved, int training) {
    int64_t tokens = saved->qkv.rows;
    saved->lse = mt_none();
    MT_TRY(mt_arena_tensor(ctx, saved->qkv.dtype, tokens, a->proj.local_features, &saved->out));
    if (!training) return MT_SUCCESS;
    return mt_arena_tensor(ctx, MT_F32, shape->groups * shape->heads_per_group, tokens, &saved->lse);
}

static mt_status mti_attention_forward(mt_context *ctx, const mt_self_attention *a, const mt_attention_shape *shape,
                                       mt_tensor x, mt_tensor y, mt_self_attention_saved *saved, int training) {
    size_t mark;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, shape->batch * shape->seq, a->qkv.local_features, &saved->qkv));
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_attention_room(ctx, a, shape, saved, training));
    MT_TRY(mt_column_parallel_linear_forward(ctx, &a->qkv, x, saved->qkv, training ? &saved->qkv_in : NULL));
    if (a->rotary.data && shape->groups > 0)
        MT_TRY(mt_rotary_forward(ctx, shape, mt_tensor_rows(a->rotary, 0, shape->seq),
                                 mti_attention_cols(shape, saved->qkv, 0, a->qkv.desc.unit)));
    MT_TRY(mti_attention_core_forward(ctx, a, shape, saved));
    if (training) MT_TRY(mti_log(ctx, a->qkv.name, 1, "core_attention.output", saved->out, 0, a->proj.weight));
    MT_TRY(mt_row_parallel_linear_forward(ctx, &a->proj, saved->out, y, training ? &saved->proj_in : NULL));
    if (a->desc.recompute_core) mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

static mt_status mti_block_check(mt_context *ctx, const char *function, const mt_self_attention *a, const mt_batch *batch,
                                 const char *in_name, mt_tensor in, const char *out_name, mt_tensor out) {
    int64_t rows = 0;
    MT_TRY(mti_expect_weight(ctx, function, a->qkv.weight));
    MT_TRY(mti_batch_check(ctx, function, batch, a->rotary.data ? a->desc.max_seq : 0));
    MT_TRY(mti_rows(ctx, function, a->qkv.tensor, a->desc.sequence_parallel, batch->sequences * batch->seq, &rows));
    MT_TRY(mti_expect_like(ctx, function, a->qkv.weight, in_name, in, rows, a->desc.hidden));
    return mti_expect_like(ctx, function, a->qkv.weight, out_name, out, rows, a->desc.hidden);
}

MT_API mt_status mt_self_attention_forward(mt_context *ctx, const mt_self_attention *attention, const mt_batch *batch,
                                           mt_tensor x, mt_tensor y, mt_self_attention_saved *saved) {
    static const char *const function = "mt_self_attention_forward";
    mt_attention_shape shape;
    mt_self_attention_saved local;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!attention) return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: attention is NULL", function);
    MT_TRY(mti_block_check(ctx, function, attention, batch, "x", x, "y", y));
    MT_TRY(mti_expect_travel(ctx, function, attention->qkv.tensor, attention->desc.sequence_parallel, "x", x, "y", y));
    shape = mti_attention_shape(attention, batch, saved != NULL);
    mt_hash_log_tokens(ctx, batch->first_sequence * batch->seq);
    mark = mt_arena_mark(ctx);
    status = MTI_RANGE("attention forward",
                       mti_attention_forward(ctx, attention, &shape, x, y, saved ? saved : &local, saved != NULL));
    if (status == MT_SUCCESS && saved) saved->batch = *batch;
    else mt_arena_release(ctx, mark);
    return status;
}

static mt_status mti_attention_backward(mt_context *ctx, const mt_self_attention *a, const mt_attention_shape *shape,
                                        mt_tensor dy, mt_tensor dx, const mt_self_attention_saved *saved) {
    mt_self_attention_saved again = *saved;
    mt_tensor dout, dqkv;
    if (a->desc.recompute_core) {
        MT_TRY(mti_attention_room(ctx, a, shape, &again, 1));
        MT_TRY(mti_attention_core_forward(ctx, a, shape, &again));
        again.proj_in.x = again.out;
        saved = &again;
    }
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->out.rows, saved->out.cols, &dout));
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->qkv.rows, saved->qkv.cols, &dqkv));
    MT_TRY(mt_row_parallel_linear_backward(ctx, &a->proj, dy, dout, &saved->proj_in));
    MT_TRY(mti_attention_core_backward(ctx, a, shape, saved, dout, dqkv));
    MT_TRY(mti_log(ctx, a->qkv.name, 1, "core_attention.input_grad", dqkv, 0, a->qkv.weight));
    return mt_column_parallel_linear_backward(ctx, &a->qkv, dqkv, dx, &saved->qkv_in);
}

MT_API mt_status mt_self_attention_backward(mt_context *ctx, const mt_self_attention *attention, mt_tensor dy, mt_tensor dx,
                                            const mt_self_attention_saved *saved) {
    static const char *const function = "mt_self_attention_backward";
    mt_attention_shape shape;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!attention || !saved)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, attention ? "saved" : "attention");
    MT_TRY(mti_block_check(ctx, function, attention, &saved->batch, "dy", dy, dx.data ? "dx" : "dy", dx.data ? dx : dy));
    MT_TRY(mti_expect_travel(ctx, function, attention->qkv.tensor, attention->desc.sequence_parallel, "dy", dy, "dx", dx));
    shape = mti_attention_shape(attention, &saved->batch, 1);
    mt_hash_log_tokens(ctx, saved->batch.first_sequence * saved->batch.seq);
    mark = mt_arena_mark(ctx);
    status = MTI_RANGE("attention backward", mti_attention_backward(ctx, attention, &shape, dy, dx, saved));
    mt_arena_release(ctx, mark);
    return status;
}

static int mti_qkv_sizes_ok(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols) {
    return heads > 0 && kv_heads > 0 && head_dim > 0 && cols > 0 && heads % kv_heads == 0 && heads <= INT32_MAX &&
           head_dim <= INT32_MAX / heads && cols <= INT32_MAX;
}

MT_API mt_status mt_qkv_from_separate(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols, const float *q,
                                      const float *k, const float *v, float *qkv) {
    size_t row, queries;
    int64_t g;
    if (!mti_qkv_sizes_ok(heads, kv_heads, head_dim, cols)) return MT_ERR_SHAPE;
    if (!q || !k || !v || !qkv) return MT_ERR_ARGUMENT;
    row = (size_t)(head_dim * cols);
    queries = row * (size_t)(heads / kv_heads);
    for (g = 0; g < kv_heads; g++, q += queries, k += row, v += row, qkv += queries + 2 * row) {
        memcpy(qkv, q, queries * sizeof *qkv);
        memcpy(qkv + queries, k, row * sizeof *qkv);
        memcpy(qkv + queries + row, v, row * sizeof *qkv);
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_qkv_to_separate(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols, const float *qkv,
                                    float *q, float *k, float *v) {
    size_t row, queries;
    int64_t g;
    if (!mti_qkv_sizes_ok(heads, kv_heads, head_dim, cols)) return MT_ERR_SHAPE;
    if (!q || !k || !v || !qkv) return MT_ERR_ARGUMENT;
    row = (size_t)(head_dim * cols);
    queries = row * (size_t)(heads / kv_heads);
    for (g = 0; g < kv_heads; g++, q += queries, k += row, v += row, qkv += queries + 2 * row) {
        memcpy(q, qkv, queries * sizeof *qkv);
        memcpy(k, qkv + queries, row * sizeof *qkv);
        memcpy(v, qkv + queries + row, row * sizeof *qkv);
    }
    return MT_SUCCESS;
}

/* ---- >>layer ------------------------------------------------------------------------------------------------------ */

static mt_status mti_norm_create(mt_context *ctx, mt_params *params, const char *name, const char *suffix,
                                 const mt_transformer_layer_desc *d, mt_norm *out) {
    char full[MT_NAME_MAX];
    mt_param_desc p;
    memset(out, 0, sizeof *out);
    out->kind = d->norm;
    out->eps = mti_default(d->norm_eps, 1e-5f);
    out->tensor = params->grid->tensor;
    memset(&p, 0, sizeof p);
    p.rows = 1;
    p.cols = d->hidden;
    p.init_value = 1.0f;
    p.sequence_partial = d->sequence_parallel;
    MT_TRY(mti_join_name(ctx, full, name, suffix));
    MT_TRY(mti_add_param(ctx, params, full, "weight", p, &out->weight));
    if (d->norm == MT_RMS_NORM) return MT_SUCCESS;
    p.init_value = 0.0f;
    return mti_add_param(ctx, params, full, "bias", p, &out->bias);
}

/* stats is mt_none() for inference. */
static mt_status mti_norm_forward(mt_context *ctx, const mt_norm *norm, mt_tensor x, mt_tensor y, mt_tensor stats) {
    MT_TRY(mt_norm_forward(ctx, norm->kind, x, norm->weight->value, mti_bias_value(norm->bias), norm->eps, y, stats));
    if (!stats.data) return MT_SUCCESS;
    return mti_log(ctx, norm->weight->name, 1, "output", y, norm->weight->desc.sequence_partial, NULL);
}

/* What the backward of a norm works on, for mti_sum_over_tokens. */
typedef struct mti_norm_call {
    const mt_norm *norm;
    mt_tensor x, stats, dy, dresidual, dx;
} mti_norm_call;

static mt_status mti_norm_rows(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor dgain,
                               mt_tensor dbias) {
    const mti_norm_call *c = (const mti_norm_call *)arg;
    return mt_norm_backward(ctx, c->norm->kind, mt_tensor_rows(c->x, first, count), c->norm->weight->value,
                            mt_tensor_rows(c->stats, first, count), mt_tensor_rows(c->dy, first, count),
                            mti_some_rows(c->dresidual, first, count), mt_tensor_rows(c->dx, first, count), dgain, dbias);
}

static mt_status mti_norm_backward(mt_context *ctx, const mt_norm *norm, mt_tensor x, mt_tensor stats, mt_tensor dy,
                                   mt_tensor dresidual, mt_tensor dx) {
    mti_norm_call call;
    call.norm = norm;
    call.x = x;
    call.stats = stats;
    call.dy = dy;
    call.dresidual = dresidual;
    call.dx = dx;
    MT_TRY(mti_sum_over_tokens(ctx, norm->tensor, norm->weight->desc.sequence_partial, mti_norm_rows, &call, x.rows,
                               norm->weight->grad, mti_bias_grad(norm->bias)));
    return mti_log(ctx, norm->weight->name, 1, "input_grad", dx, norm->weight->desc.sequence_partial, NULL);
}

static mt_status mti_layer_blocks(mt_context *ctx, mt_params *params, const char *name, const mt_transformer_layer_desc *d,
                                  mt_transformer_layer *out) {
    char full[MT_NAME_MAX];
    mt_self_attention_desc a;
    mt_mlp_desc m;
    memset(&a, 0, sizeof a);
    a.hidden = d->hidden;
    a.heads = d->heads;
    a.kv_heads = d->kv_heads;
    a.mask = d->mask;
    a.rotary_base = d->rotary_base;
    a.max_seq = d->max_seq;
    a.dropout = d->attention_dropout;
    a.layer = d->layer;
    m.hidden = d->hidden;
    m.ffn = d->ffn;
    m.activation = d->activation;
    a.no_bias = m.no_bias = d->no_bias;
    a.skip_bias_add = m.skip_bias_add = 1; /* fused with dropout and residual */
    a.sequence_parallel = m.sequence_parallel = d->sequence_parallel;
    a.recompute_core = d->recompute == MT_RECOMPUTE_SELECTIVE;
    a.init_std = m.init_std = d->init_std;
    a.output_init_std = m.output_init_std = d->output_init_std;
    MT_TRY(mti_norm_create(ctx, params, name, "input_layernorm", d, &out->input_norm));
    MT_TRY(mti_join_name(ctx, full, name, "self_attention"));
    MT_TRY(mt_self_attention_create(ctx, params, full, &a, &out->attention));
    MT_TRY(mti_norm_create(ctx, params, name, "pre_mlp_layernorm", d, &out->mlp_norm));
    MT_TRY(mti_join_name(ctx, full, name, "mlp"));
    return mt_mlp_create(ctx, params, full, &m, &out->mlp);
}

MT_API mt_status mt_transformer_layer_create(mt_context *ctx, mt_params *params, const char *name,
                                             const mt_transformer_layer_desc *desc, mt_transformer_layer *out) {
    static const char *const function = "mt_transformer_layer_create";
    int count;
    MT_TRY(mti_create_check(ctx, function, params, name, desc, out));
    if (desc->placement < MT_PRE_LN || desc->placement > MT_RESIDUAL_POST_LN || !mti_probability(desc->hidden_dropout) ||
        desc->norm < MT_LAYER_NORM || desc->norm > MT_RMS_NORM || !(desc->norm_eps >= 0.0f) || desc->hidden < 1 ||
        desc->recompute < MT_RECOMPUTE_NONE || desc->recompute > MT_RECOMPUTE_FULL)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' has hidden %lld, placement %d, norm %d, norm_eps %g, "
                        "hidden_dropout %g, recompute %d", function, name, (long long)desc->hidden, (int)desc->placement,
                        (int)desc->norm, (double)desc->norm_eps, (double)desc->hidden_dropout, (int)desc->recompute);
    count = params->count;
    memset(out, 0, sizeof *out);
    out->desc = *desc;
    out->tensor = params->grid->tensor;
    return mti_params_keep(params, count, out, sizeof *out, mti_layer_blocks(ctx, params, name, desc, out));
}

/* The dropout of a half's output, whose rows are tokens of the global batch. */
static mt_dropout mti_row_dropout(const mt_batch *batch, float p, int64_t layer, int site, int sequence_parallel,
                                  mt_comm *tensor, int64_t rows, int64_t hidden) {
    mt_dropout d = mti_dropout(batch, p, layer, site);
    d.at.first_row = batch->first_sequence * batch->seq + (sequence_parallel ? mt_comm_rank(tensor) * rows : 0);
    d.at.global_cols = hidden;
    return d;
}

/* What a half works with, collected once: half 0 is attention, half 1 the MLP. */
typedef struct mti_half {
    const mt_transformer_layer *layer;
    const mt_batch *batch;
    const mt_norm *norm;
    const mt_param *bias; /* of the block's row-parallel linear, which leaves it to the half */
    mt_dropout dropout;
    int index;
} mti_half;

static mti_half mti_layer_half(const mt_transformer_layer *layer, const mt_batch *batch, int index, int64_t rows,
                               int training) {
    mti_half h;
    h.layer = layer;
    h.batch = batch;
    h.index = index;
    h.norm = index == 0 ? &layer->input_norm : &layer->mlp_norm;
    h.bias = index == 0 ? layer->attention.proj.bias : layer->mlp.fc2.bias;
    h.dropout = mti_row_dropout(batch, training ? layer->desc.hidden_dropout : 0.0f, layer->desc.layer, 1 + index,
                                layer->desc.sequence_parallel, layer->tensor, rows, layer->desc.hidden);
    return h;
}

static mt_status mti_half_block_forward(mt_context *ctx, const mti_half *h, mt_tensor x, mt_tensor y,
                                        mt_transformer_layer_saved *saved) {
    if (h->index == 0)
        return mt_self_attention_forward(ctx, &h->layer->attention, h->batch, x, y, saved ? &saved->attention : NULL);
    return mt_mlp_forward(ctx, &h->layer->mlp, x, y, saved ? &saved->mlp : NULL);
}

static mt_status mti_half_block_backward(mt_context *ctx, const mti_half *h, mt_tensor dy, mt_tensor dx,
                                         const mt_transformer_layer_saved *saved) {
    if (h->index == 0)
        return mt_self_attention_backward(ctx, &h->layer->attention, dy, dx, &saved->attention);
    return mt_mlp_backward(ctx, &h->layer->mlp, dy, dx, &saved->mlp);
}

/* y = residual + dropout(block(x) + bias); the block writes into y, so no buffer is needed between. Without y, the layer's own,
   only what the MLP keeps is computed. */
static mt_status mti_half_add(mt_context *ctx, const mti_half *h, mt_tensor x, mt_tensor residual, mt_tensor y,
                              mt_transformer_layer_saved *saved) {
    if (!y.data) return mti_mlp_forward(ctx, &h->layer->mlp, x, y, &saved->mlp, 1);
    MT_TRY(mti_half_block_forward(ctx, h, x, y, saved));
    MT_TRY(mt_bias_dropout_add_forward(ctx, y, mti_bias_value(h->bias), residual, h->dropout, y));
    if (!saved) return MT_SUCCESS;
    return mti_log(ctx, h->layer->mlp.fc1.name, 2, h->index == 0 ? "self_attn_bda.output" : "mlp_bda.output", y,
                   h->layer->desc.sequence_parallel, NULL);
}

static mt_status mti_half_forward(mt_context *ctx, const mti_half *h, mt_tensor x, mt_tensor y,
                                  mt_transformer_layer_saved *saved) {
    mt_sublayer_saved local, *s = saved ? (h->index == 0 ? &saved->first : &saved->second) : &local;
    mt_tensor inner;
    s->stats = mt_none();
    if (saved) MT_TRY(mt_arena_tensor(ctx, MT_F32, x.rows, 2, &s->stats));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, x.cols, &inner));
    if (h->layer->desc.placement == MT_POST_LN) {
        s->norm_in = inner;
        MT_TRY(mti_half_add(ctx, h, x, x, inner, saved));
        return mti_norm_forward(ctx, h->norm, inner, y, s->stats);
    }
    s->norm_in = x;
    MT_TRY(mti_norm_forward(ctx, h->norm, x, inner, s->stats));
    return mti_half_add(ctx, h, inner, h->layer->desc.placement == MT_PRE_LN ? x : inner, y, saved);
}

/* The gradient of dropout(block + bias), for mti_sum_over_tokens. */
typedef struct mti_drop_call {
    mt_dropout dropout;
    mt_tensor dy, dblock;
} mti_drop_call;

static mt_status mti_drop_rows(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor dbias,
                               mt_tensor none) {
    const mti_drop_call *c = (const mti_drop_call *)arg;
    mt_dropout dropout = c->dropout;
    (void)none;
    if (dropout.p <= 0.0f) return mt_bias_backward(ctx, mt_tensor_rows(c->dy, first, count), dbias);
    dropout.at.first_row += first;
    return mt_bias_dropout_add_backward(ctx, mt_tensor_rows(c->dy, first, count), dropout,
                                        mt_tensor_rows(c->dblock, first, count), dbias);
}

/* The gradient of dropout(block + bias) with respect to block; dy itself when nothing is dropped. */
static mt_status mti_half_drop_backward(mt_context *ctx, const mti_half *h, mt_tensor dy, mt_tensor *dblock) {
    mti_drop_call call;
    call.dropout = h->dropout;
    call.dy = call.dblock = dy;
    if (h->dropout.p > 0.0f) MT_TRY(mt_arena_tensor(ctx, dy.dtype, dy.rows, dy.cols, &call.dblock));
    *dblock = call.dblock;
    if (h->bias)
        return mti_sum_over_tokens(ctx, h->layer->tensor, h->layer->desc.sequence_parallel, mti_drop_rows, &call, dy.rows,
                                   h->bias->grad, mt_none());
    return h->dropout.p > 0.0f ? mt_bias_dropout_add_backward(ctx, dy, h->dropout, call.dblock, mt_none()) : MT_SUCCESS;
}

static mt_status mti_half_backward(mt_context *ctx, const mti_half *h, mt_tensor dy, mt_tensor dx,
                                   const mt_transformer_layer_saved *saved) {
    const mt_sublayer_saved *s = h->index == 0 ? &saved->first : &saved->second;
    mt_tensor dinner, dblock;
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, dy.rows, dy.cols, &dinner));
    if (h->layer->desc.placement == MT_POST_LN) {
        MT_TRY(mti_norm_backward(ctx, h->norm, s->norm_in, s->stats, dy, mt_none(), dinner));
        MT_TRY(mti_half_drop_backward(ctx, h, dinner, &dblock));
        MT_TRY(mti_half_block_backward(ctx, h, dblock, dx, saved));
        return mt_add(ctx, dx, dinner, dx);
    }
    MT_TRY(mti_half_drop_backward(ctx, h, dy, &dblock));
    MT_TRY(mti_half_block_backward(ctx, h, dblock, dinner, saved));
    if (h->layer->desc.placement == MT_PRE_LN)
        return mti_norm_backward(ctx, h->norm, s->norm_in, s->stats, dinner, dy, dx);
    MT_TRY(mt_add(ctx, dinner, dy, dinner));
    return mti_norm_backward(ctx, h->norm, s->norm_in, s->stats, dinner, mt_none(), dx);
}

static mt_status mti_layer_check(mt_context *ctx, const char *function, const mt_transformer_layer *layer,
                                 const mt_batch *batch, const char *in_name, mt_tensor in, const char *out_name,
                                 mt_tensor out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!layer) return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: layer is NULL", function);
    MT_TRY(mti_block_check(ctx, function, &layer->attention, batch, in_name, in, out_name, out));
    return mti_expect_travel(ctx, function, layer->tensor, layer->desc.sequence_parallel, in_name, in, out_name, out);
}

/* y is mt_none() where only `saved` is wanted. */
static mt_status mti_layer_forward(mt_context *ctx, const mt_transformer_layer *layer, const mt_batch *batch, mt_tensor x,
                                   mt_tensor y, mt_transformer_layer_saved *saved) {
    mti_half first = mti_layer_half(layer, batch, 0, x.rows, saved != NULL);
    mti_half second = mti_layer_half(layer, batch, 1, x.rows, saved != NULL);
    mt_tensor middle;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, x.cols, &middle));
    MT_TRY(mti_half_forward(ctx, &first, x, middle, saved));
    return mti_half_forward(ctx, &second, middle, y, saved);
}

MT_API mt_status mt_transformer_layer_forward(mt_context *ctx, const mt_transformer_layer *layer, const mt_batch *batch,
                                              mt_tensor x, mt_tensor y, mt_transformer_layer_saved *saved) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_layer_check(ctx, "mt_transformer_layer_forward", layer, batch, "x", x, "y", y));
    if (saved) MT_TRY(mti_expect_token_shards(ctx, "mt_transformer_layer_forward", batch->sequences * batch->seq));
    mark = mt_arena_mark(ctx);
    status = MTI_RANGE("layer forward", mti_layer_forward(ctx, layer, batch, x, y, saved));
    if (saved) saved->x = x;
    if (status != MT_SUCCESS || !saved || layer->desc.recompute == MT_RECOMPUTE_FULL) mt_arena_release(ctx, mark);
    return status;
}

/* What forward did not keep, from what it did. A second forward is not to be logged. */
static mt_status mti_layer_again(mt_context *ctx, const mt_transformer_layer *layer, mt_transformer_layer_saved *saved) {
    struct mt_hash_log *log = ctx->hash_log;
    mt_batch batch = saved->attention.batch;
    mt_tensor x = saved->x, y = mt_none();
    mt_status status;
    if (layer->desc.placement == MT_POST_LN) MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, x.cols, &y));
    ctx->hash_log = NULL;
    status = mti_layer_forward(ctx, layer, &batch, x, y, saved);
    ctx->hash_log = log;
    return status;
}

static mt_status mti_layer_backward(mt_context *ctx, const mt_transformer_layer *layer, mt_tensor dy, mt_tensor dx,
                                    const mt_transformer_layer_saved *saved) {
    mt_transformer_layer_saved again = *saved;
    mti_half first = mti_layer_half(layer, &saved->attention.batch, 0, dy.rows, 1);
    mti_half second = mti_layer_half(layer, &saved->attention.batch, 1, dy.rows, 1);
    mt_tensor dmiddle;
    size_t mark;
    if (layer->desc.recompute == MT_RECOMPUTE_FULL) {
        MT_TRY(MTI_RANGE("layer forward again", mti_layer_again(ctx, layer, &again)));
        saved = &again;
    }
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, dy.rows, dy.cols, &dmiddle));
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_half_backward(ctx, &second, dy, dmiddle, saved));
    mt_arena_release(ctx, mark);
    return mti_half_backward(ctx, &first, dmiddle, dx, saved);
}

MT_API mt_status mt_transformer_layer_backward(mt_context *ctx, const mt_transformer_layer *layer, mt_tensor dy,
                                               mt_tensor dx, const mt_transformer_layer_saved *saved) {
    static const char *const function = "mt_transformer_layer_backward";
    const mt_param *weight;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved) return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_layer_check(ctx, function, layer, &saved->attention.batch, "dy", dy, "dx", dx));
    weight = layer->attention.qkv.weight;
    MT_TRY(mti_expect_like(ctx, function, weight, "saved->x", saved->x, dy.rows, dy.cols));
    mark = mt_arena_mark(ctx);
    status = MTI_RANGE("layer backward", mti_layer_backward(ctx, layer, dy, dx, saved));
    mt_arena_release(ctx, mark);
    return status;
}

/* ---- >>gpt -------------------------------------------------------------------------------------------------------- */

static mt_status mti_gpt_check(mt_context *ctx, const mt_grid *grid, const mt_gpt_desc *d) {
    if (d->vocab < 1 || d->vocab > INT32_MAX || d->layers < 1 || d->layers > (1 << 17) || d->max_seq < 1 ||
        d->recompute_layers < 0 || d->recompute_layers > d->layers ||
        !mti_probability(d->embedding_dropout) || !(d->label_smoothing >= 0.0f && d->label_smoothing < 1.0f))
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_gpt_create: vocab %lld, layers %lld, max_seq %lld, embedding_dropout %g, "
                        "label_smoothing %g, recompute_layers %lld", (long long)d->vocab, (long long)d->layers,
                        (long long)d->max_seq, (double)d->embedding_dropout, (double)d->label_smoothing,
                        (long long)d->recompute_layers);
    if (d->layers % grid->pipeline_size != 0)
        return mti_fail(ctx, MT_ERR_SHAPE, "mt_gpt_create: %lld layers cannot be divided over %d pipeline stages",
                        (long long)d->layers, grid->pipeline_size);
    if (grid->pipeline_size > 1 && ctx->arena_symmetric)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_gpt_create: %d pipeline stages do not use their arenas alike, as "
                        "mt_context_desc.arena_symmetric promises", grid->pipeline_size);
    return MT_SUCCESS;
}

static int mti_gpt_is_first(const mt_gpt *gpt) { return gpt->grid->pipeline_rank == 0; }
static int mti_gpt_is_last(const mt_gpt *gpt) { return gpt->grid->pipeline_rank + 1 == gpt->grid->pipeline_size; }

static mt_status mti_gpt_embedding(mt_context *ctx, mt_params *params, mt_gpt *gpt) {
    const mt_transformer_layer_desc *l = &gpt->desc.layer;
    mt_embedding_desc e;
    mt_param_desc p;
    if (!mti_gpt_is_first(gpt) && (!mti_gpt_is_last(gpt) || gpt->desc.untied_head)) return MT_SUCCESS;
    memset(&e, 0, sizeof e);
    e.vocab = gpt->desc.vocab;
    e.features = l->hidden;
    e.init_std = l->init_std;
    e.sequence_parallel = l->sequence_parallel;
    e.shared = !gpt->desc.untied_head;
    MT_TRY(mt_vocab_parallel_embedding_create(ctx, params, "embedding.word_embeddings", &e, &gpt->tokens));
    if (l->rotary_base > 0.0f || !mti_gpt_is_first(gpt)) return MT_SUCCESS;
    memset(&p, 0, sizeof p);
    p.rows = gpt->desc.max_seq;
    p.cols = l->hidden;
    p.init_std = mti_default(l->init_std, 0.02f);
    p.weight_decay = 1;
    p.sequence_partial = l->sequence_parallel;
    return mti_add_param(ctx, params, "embedding", "position_embeddings.weight", p, &gpt->positions);
}

static mt_status mti_gpt_layers(mt_context *ctx, mt_params *params, mt_gpt *gpt) {
    int64_t recomputed = gpt->desc.recompute_layers ? gpt->desc.recompute_layers : gpt->local_layers, i;
    mt_recompute recompute = gpt->desc.layer.recompute;
    char name[MT_NAME_MAX];
    void *memory;
    MT_TRY(mti_params_buffer(ctx, params, (size_t)gpt->local_layers * sizeof *gpt->layers, 1, &memory));
    gpt->layers = (mt_transformer_layer *)memory;
    for (i = 0; i < gpt->local_layers; i++) {
        gpt->desc.layer.layer = gpt->first_layer + i;
        gpt->desc.layer.recompute = i < recomputed ? recompute : MT_RECOMPUTE_NONE;
        snprintf(name, sizeof name, "decoder.layers.%lld", (long long)(gpt->first_layer + i));
        MT_TRY(mt_transformer_layer_create(ctx, params, name, &gpt->desc.layer, &gpt->layers[i]));
    }
    gpt->desc.layer.recompute = recompute;
    return MT_SUCCESS;
}

static mt_status mti_gpt_create(mt_context *ctx, mt_params *params, mt_gpt *gpt) {
    const mt_transformer_layer_desc *l = &gpt->desc.layer;
    mt_linear_desc head;
    MT_TRY(mti_gpt_embedding(ctx, params, gpt));
    MT_TRY(mti_gpt_layers(ctx, params, gpt));
    if (!mti_gpt_is_last(gpt)) return MT_SUCCESS;
    if (l->placement != MT_POST_LN)
        MT_TRY(mti_norm_create(ctx, params, "decoder", "final_layernorm", l, &gpt->final_norm));
    memset(&head, 0, sizeof head);
    head.in_features = l->hidden;
    head.out_features = gpt->desc.vocab;
    head.no_bias = 1;
    head.init_std = l->init_std;
    head.sequence_parallel = l->sequence_parallel;
    head.weight = gpt->desc.untied_head ? NULL : gpt->tokens.weight;
    return mt_column_parallel_linear_create(ctx, params, "output_layer", &head, &gpt->head);
}

MT_API mt_status mt_gpt_create(mt_context *ctx, mt_params *params, const mt_gpt_desc *desc, mt_gpt *out) {
    int count;
    MT_TRY(mti_create_check(ctx, "mt_gpt_create", params, "gpt", desc, out));
    MT_TRY(mti_gpt_check(ctx, params->grid, desc));
    count = params->count;
    memset(out, 0, sizeof *out);
    out->desc = *desc;
    out->desc.layer.max_seq = desc->max_seq;
    if (desc->layer.output_init_std == 0.0f)
        out->desc.layer.output_init_std = mti_default(desc->layer.init_std, 0.02f) / sqrtf(2.0f * (float)desc->layers);
    out->loss.vocab = desc->vocab;
    out->loss.label_smoothing = desc->label_smoothing;
    out->loss.ignore_index = desc->ignore_index;
    out->grid = params->grid;
    out->local_layers = desc->layers / params->grid->pipeline_size;
    out->first_layer = params->grid->pipeline_rank * out->local_layers;
    return mti_params_keep(params, count, out, sizeof *out, mti_gpt_create(ctx, params, out));
}

MT_API mt_status mt_gpt_saved_create(mt_context *ctx, const mt_gpt *gpt, mt_gpt_saved *out) {
    void *memory;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!gpt || !gpt->layers || !out)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_gpt_saved_create: %s", out ? "the model was not created" : "out is NULL");
    MT_TRY(mti_host_new(ctx, (size_t)gpt->local_layers * sizeof *out->layers, &memory));
    memset(out, 0, sizeof *out);
    out->layers = (mt_transformer_layer_saved *)memory;
    return MT_SUCCESS;
}

MT_API void mt_gpt_saved_destroy(mt_gpt_saved *saved) {
    if (!saved) return;
    mti_host_free(saved->layers);
    memset(saved, 0, sizeof *saved);
}

static mt_dropout mti_gpt_dropout(const mt_gpt *gpt, const mt_batch *batch, int64_t rows, int training) {
    return mti_row_dropout(batch, training ? gpt->desc.embedding_dropout : 0.0f, gpt->desc.layers, 3,
                           gpt->desc.layer.sequence_parallel, gpt->grid->tensor, rows, gpt->desc.layer.hidden);
}

/* Position of each of this rank's rows. */
static mt_status mti_gpt_positions(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, int64_t rows, int32_t **out) {
    mt_tensor ids = mt_none();
    int64_t first = gpt->desc.layer.sequence_parallel ? gpt->grid->tensor_rank * rows : 0;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, rows, &ids));
    *out = (int32_t *)ids.data;
    return mt_position_ids(ctx, first, batch->seq, *out, rows);
}

static mt_status mti_gpt_embed(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids, mt_tensor x,
                               int training) {
    mt_dropout dropout = mti_gpt_dropout(gpt, batch, x.rows, training);
    MT_TRY(mt_vocab_parallel_embedding_forward(ctx, &gpt->tokens, ids, batch->sequences * batch->seq, x));
    if (gpt->positions) {
        size_t mark = mt_arena_mark(ctx);
        int32_t *positions;
        MT_TRY(mti_gpt_positions(ctx, gpt, batch, x.rows, &positions));
        MT_TRY(mt_embedding_forward(ctx, gpt->positions->value, 0, positions, 1.0f, x));
        mt_arena_release(ctx, mark);
    }
    if (dropout.p > 0.0f) MT_TRY(mt_bias_dropout_add_forward(ctx, x, mt_none(), mt_none(), dropout, x));
    return training ? mti_log(ctx, "embedding", 0, "output", x, gpt->desc.layer.sequence_parallel, NULL) : MT_SUCCESS;
}

/* Memory for the next activation: training keeps them all, and has no spare one. */
static mt_status mti_gpt_room(mt_context *ctx, const mt_gpt *gpt, mt_tensor spare, int64_t rows, mt_tensor *out) {
    *out = spare;
    if (spare.data) return MT_SUCCESS;
    return mt_arena_tensor(ctx, gpt->layers[0].attention.qkv.weight->value.dtype, rows, gpt->desc.layer.hidden, out);
}

/* This rank's rows of a call, known to come out even. */
static int64_t mti_gpt_rows(const mt_gpt *gpt, const mt_batch *batch) {
    return batch->sequences * batch->seq / (gpt->desc.layer.sequence_parallel ? gpt->grid->tensor_size : 1);
}

/* Embedding or input, layers, final norm: y [rows, hidden] is output, or in the arena. */
static mt_status mti_gpt_trunk(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids, mt_tensor input,
                               mt_tensor output, mt_gpt_saved *saved, mt_tensor *y) {
    int64_t rows = mti_gpt_rows(gpt, batch), i;
    mt_tensor x = input, next, spare = mt_none();
    mt_hash_log_tokens(ctx, batch->first_sequence * batch->seq);
    if (!input.data) {
        MT_TRY(mti_gpt_room(ctx, gpt, spare, rows, &x));
        MT_TRY(MTI_RANGE("embedding forward", mti_gpt_embed(ctx, gpt, batch, ids, x, saved != NULL)));
    }
    for (i = 0; i < gpt->local_layers; i++) {
        MT_TRY(mti_gpt_room(ctx, gpt, i + 1 == gpt->local_layers && output.data ? output : spare, rows, &next));
        MT_TRY(mt_transformer_layer_forward(ctx, &gpt->layers[i], batch, x, next, saved ? &saved->layers[i] : NULL));
        if (!saved && x.data != input.data) spare = x;
        x = next;
    }
    *y = x;
    if (!gpt->final_norm.weight) return MT_SUCCESS;
    MT_TRY(mti_gpt_room(ctx, gpt, spare, rows, y));
    if (saved) {
        saved->norm_in = x;
        MT_TRY(mt_arena_tensor(ctx, MT_F32, rows, 2, &saved->stats));
    }
    return mti_norm_forward(ctx, &gpt->final_norm, x, *y, saved ? saved->stats : mt_none());
}

/* ids and the batch, before anything is computed or communicated. */
static mt_status mti_gpt_call_check(mt_context *ctx, const char *function, const mt_gpt *gpt, const mt_batch *batch) {
    int64_t rows;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!gpt || !gpt->layers) return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: the model was not created", function);
    MT_TRY(mti_expect_weight(ctx, function, gpt->layers[0].attention.qkv.weight));
    MT_TRY(mti_batch_check(ctx, function, batch, gpt->desc.max_seq));
    return mti_rows(ctx, function, gpt->grid->tensor, gpt->desc.layer.sequence_parallel, batch->sequences * batch->seq, &rows);
}

/* input, output or their gradients: there, and of the right size, exactly where there is a stage on that side. */
static mt_status mti_gpt_boundary(mt_context *ctx, const char *function, const mt_gpt *gpt, const mt_batch *batch, int at_end,
                                  const char *name, mt_tensor t) {
    int none = at_end ? mti_gpt_is_last(gpt) : mti_gpt_is_first(gpt);
    if (none != !t.data)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: stage %d of %d %s %s; mt_gpt_stage_forward and mt_gpt_stage_backward are "
                        "for pipelines", function, gpt->grid->pipeline_rank, gpt->grid->pipeline_size,
                        none ? "takes no" : "needs", name);
    if (none) return MT_SUCCESS;
    return mti_expect_like(ctx, function, gpt->layers[0].attention.qkv.weight, name, t, mti_gpt_rows(gpt, batch),
                           gpt->desc.layer.hidden);
}

static mt_tensor mti_as_column(mt_tensor row) { return mt_tensor_make(row.data, row.dtype, row.cols, 1); }

static mt_status mti_gpt_forward(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                 const int32_t *targets, mt_tensor input, mt_tensor output, mt_tensor loss,
                                 mt_gpt_saved *saved) {
    mt_tensor x, logits;
    MT_TRY(mti_gpt_trunk(ctx, gpt, batch, ids, input, output, saved, &x));
    if (!mti_gpt_is_last(gpt)) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, batch->sequences * batch->seq, gpt->head.local_features, &logits));
    MT_TRY(MTI_RANGE("head forward",
                     mt_column_parallel_linear_forward(ctx, &gpt->head, x, logits, saved ? &saved->head : NULL)));
    MT_TRY(MTI_RANGE("loss forward",
                     mt_vocab_parallel_cross_entropy_forward(ctx, gpt->head.tensor, &gpt->loss, logits, targets, loss,
                                                             saved ? &saved->loss : NULL)));
    return saved ? mti_log(ctx, "loss", 0, "output", mti_as_column(loss), 0, NULL) : MT_SUCCESS;
}

static mt_status mti_gpt_forward_check(mt_context *ctx, const char *function, const mt_gpt *gpt, const mt_batch *batch,
                                       const int32_t *ids, const int32_t *targets, mt_tensor input, mt_tensor output,
                                       mt_tensor loss, const mt_gpt_saved *saved) {
    int64_t tokens;
    MT_TRY(mti_gpt_call_check(ctx, function, gpt, batch));
    tokens = batch->sequences * batch->seq;
    if (saved) MT_TRY(mti_expect_token_shards(ctx, function, tokens));
    if (saved && !saved->layers)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: saved was not created with mt_gpt_saved_create", function);
    MT_TRY(mti_gpt_boundary(ctx, function, gpt, batch, 0, "input", input));
    MT_TRY(mti_gpt_boundary(ctx, function, gpt, batch, 1, "output", output));
    if (mti_gpt_is_last(gpt)) MT_TRY(mti_expect_shape(ctx, function, "loss", loss, 1, tokens));
    MT_TRY(mt_ids_check(ctx, "token id", ids, tokens, gpt->desc.vocab, 0));
    return mt_ids_check(ctx, "target", targets, tokens, gpt->desc.vocab, mti_ignore_index(gpt->loss.ignore_index));
}

static mt_status mti_gpt_run_forward(mt_context *ctx, const char *function, const mt_gpt *gpt, const mt_batch *batch,
                                     const int32_t *ids, const int32_t *targets, mt_tensor input, mt_tensor output,
                                     mt_tensor loss, mt_gpt_saved *saved) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_gpt_forward_check(ctx, function, gpt, batch, ids, targets, input, output, loss, saved));
    mark = mt_arena_mark(ctx);
    if (saved) saved->ids = NULL;
    ctx->ids_checked = 1; /* which waits for a GPU */
    status = mti_gpt_forward(ctx, gpt, batch, ids, targets, input, output, loss, saved);
    ctx->ids_checked = 0;
    if (status != MT_SUCCESS || !saved) {
        mt_arena_release(ctx, mark);
        return status;
    }
    saved->batch = *batch;
    saved->ids = ids;
    return MT_SUCCESS;
}

MT_API mt_status mt_gpt_stage_forward(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                      const int32_t *targets, mt_tensor input, mt_tensor output, mt_tensor loss,
                                      mt_gpt_saved *saved) {
    return mti_gpt_run_forward(ctx, "mt_gpt_stage_forward", gpt, batch, ids, targets, input, output, loss, saved);
}

MT_API mt_status mt_gpt_forward(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                const int32_t *targets, mt_tensor loss, mt_gpt_saved *saved) {
    return mti_gpt_run_forward(ctx, "mt_gpt_forward", gpt, batch, ids, targets, mt_none(), mt_none(), loss, saved);
}

/* The gradient of the position table, for mti_sum_over_tokens. */
typedef struct mti_position_call {
    mt_tensor dx;
    int32_t *positions; /* of the rows of dx */
} mti_position_call;

static mt_status mti_position_rows(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor dtable,
                                   mt_tensor none) {
    const mti_position_call *c = (const mti_position_call *)arg;
    (void)none;
    return mt_embedding_backward(ctx, mt_tensor_rows(c->dx, first, count), 0, c->positions + first, dtable);
}

/* dx is the gradient of the embedding's output; it is used up. */
static mt_status mti_gpt_embed_backward(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                        mt_tensor dx) {
    mt_dropout dropout = mti_gpt_dropout(gpt, batch, dx.rows, 1);
    if (dropout.p > 0.0f) MT_TRY(mt_bias_dropout_add_backward(ctx, dx, dropout, dx, mt_none()));
    if (gpt->positions) {
        mti_position_call call;
        MT_TRY(mti_gpt_positions(ctx, gpt, batch, dx.rows, &call.positions));
        call.dx = dx;
        MT_TRY(mti_sum_over_tokens(ctx, gpt->grid->tensor, gpt->desc.layer.sequence_parallel, mti_position_rows, &call,
                                   dx.rows, mt_tensor_rows(gpt->positions->grad, 0, batch->seq), mt_none()));
    }
    return mt_vocab_parallel_embedding_backward(ctx, &gpt->tokens, ids, batch->sequences * batch->seq, dx);
}

/* Of a layer that may have no bias. */
static const mt_param *mti_last_of(const mt_param *weight, const mt_param *bias) { return bias ? bias : weight; }

/* From the loss to the last layer's output: dy, in the arena. */
static mt_status mti_gpt_head_backward(mt_context *ctx, const mt_gpt *gpt, const mt_gpt_saved *saved, mt_tensor *dy) {
    MT_TRY(mti_gpt_room(ctx, gpt, mt_none(), saved->head.x.rows, dy));
    MT_TRY(mti_log(ctx, gpt->head.name, 0, "output_grad", saved->loss.logits, 0, gpt->head.weight));
    MT_TRY(MTI_RANGE("head backward",
                     mt_column_parallel_linear_backward(ctx, &gpt->head, saved->loss.logits, *dy, &saved->head)));
    if (gpt->desc.untied_head) MT_TRY(mt_gradients_final(ctx, gpt->head.weight, gpt->head.weight));
    if (!gpt->final_norm.weight) return MT_SUCCESS;
    MT_TRY(mti_norm_backward(ctx, &gpt->final_norm, saved->norm_in, saved->stats, *dy, mt_none(), *dy));
    return mt_gradients_final(ctx, gpt->final_norm.weight, mti_last_of(gpt->final_norm.weight, gpt->final_norm.bias));
}

/* Each layer's gradients are final after its backward, but for those of an embedding, which the head may share. */
static mt_status mti_gpt_backward(mt_context *ctx, const mt_gpt *gpt, mt_tensor doutput, mt_tensor dinput,
                                  const mt_gpt_saved *saved) {
    mt_tensor dy = doutput, next, spare = mt_none();
    int64_t i;
    mt_hash_log_tokens(ctx, saved->batch.first_sequence * saved->batch.seq);
    if (mti_gpt_is_last(gpt)) MT_TRY(mti_gpt_head_backward(ctx, gpt, saved, &dy));
    for (i = gpt->local_layers; i-- > 0;) {
        const mt_transformer_layer *layer = &gpt->layers[i];
        MT_TRY(mti_gpt_room(ctx, gpt, i == 0 && dinput.data ? dinput : spare, dy.rows, &next));
        MT_TRY(mt_transformer_layer_backward(ctx, layer, dy, next, &saved->layers[i]));
        MT_TRY(mt_gradients_final(ctx, layer->input_norm.weight, mti_last_of(layer->mlp.fc2.weight, layer->mlp.fc2.bias)));
        if (dy.data != doutput.data) spare = dy;
        dy = next;
    }
    if (!mti_gpt_is_first(gpt)) return MT_SUCCESS;
    return MTI_RANGE("embedding backward", mti_gpt_embed_backward(ctx, gpt, &saved->batch, saved->ids, dy));
}

static mt_status mti_gpt_run_backward(mt_context *ctx, const char *function, const mt_gpt *gpt, float scale, mt_tensor doutput,
                                      mt_tensor dinput, mt_gpt_saved *saved) {
    size_t mark;
    mt_status status = MT_SUCCESS;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved || !saved->ids)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: saved holds no forward", function);
    MT_TRY(mti_gpt_call_check(ctx, function, gpt, &saved->batch));
    MT_TRY(mti_gpt_boundary(ctx, function, gpt, &saved->batch, 1, "doutput", doutput));
    MT_TRY(mti_gpt_boundary(ctx, function, gpt, &saved->batch, 0, "dinput", dinput));
    mark = mt_arena_mark(ctx);
    ctx->ids_checked = 1;
    if (mti_gpt_is_last(gpt))
        status = MTI_RANGE("loss backward", mt_vocab_parallel_cross_entropy_backward(ctx, gpt->head.tensor, &gpt->loss,
                                                                                     mt_none(), scale, &saved->loss));
    if (status == MT_SUCCESS) status = mti_gpt_backward(ctx, gpt, doutput, dinput, saved);
    ctx->ids_checked = 0;
    mt_arena_release(ctx, mark);
    saved->ids = NULL;
    return status;
}

MT_API mt_status mt_gpt_stage_backward(mt_context *ctx, const mt_gpt *gpt, float scale, mt_tensor doutput, mt_tensor dinput,
                                       mt_gpt_saved *saved) {
    return mti_gpt_run_backward(ctx, "mt_gpt_stage_backward", gpt, scale, doutput, dinput, saved);
}

MT_API mt_status mt_gpt_backward(mt_context *ctx, const mt_gpt *gpt, float scale, mt_gpt_saved *saved) {
    return mti_gpt_run_backward(ctx, "mt_gpt_backward", gpt, scale, mt_none(), mt_none(), saved);
}

/* The row of a sequence's last valid token. */
static mt_status mti_last_row(mt_context *ctx, const mt_batch *batch, int64_t sequence, int64_t *row) {
    int32_t length = (int32_t)batch->seq;
    if (batch->lengths) MT_TRY(mt_download(ctx, mt_tensor_make(batch->lengths + sequence, MT_I32, 1, 1), &length));
    *row = sequence * batch->seq + (length > 0 ? length - 1 : 0);
    return MT_SUCCESS;
}

/* All rows of x, or the last valid row of every sequence when n says so. */
static mt_status mti_gpt_pick_rows(mt_context *ctx, const mt_batch *batch, mt_tensor x, int64_t n, mt_tensor *out) {
    int64_t i, row = 0;
    *out = x;
    if (n == x.rows) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, n, x.cols, out));
    for (i = 0; i < n; i++) {
        MT_TRY(mti_last_row(ctx, batch, i, &row));
        MT_TRY(mt_copy(ctx, mt_tensor_rows(x, row, 1), mt_tensor_rows(*out, i, 1)));
    }
    return MT_SUCCESS;
}

/* On the last stage, from the output of the trunk. */
static mt_status mti_gpt_head_logits(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, mt_tensor x,
                                     mt_tensor logits) {
    int gather = !mti_is_whole(gpt->head.weight);
    mt_tensor local = logits;
    MT_TRY(mti_all_tokens(ctx, gpt->head.tensor, gpt->desc.layer.sequence_parallel, x, &x));
    MT_TRY(mti_gpt_pick_rows(ctx, batch, x, logits.rows, &x));
    if (gather) MT_TRY(mt_arena_tensor(ctx, logits.dtype, logits.rows, gpt->head.local_features, &local));
    MT_TRY(mti_column_product(ctx, gpt->head.weight, NULL, x, local));
    return gather ? mti_gather_features(ctx, gpt->head.tensor, gpt->head.weight, local, logits) : MT_SUCCESS;
}

/* From stage to stage, and the last one's logits to all of them. */
static mt_status mti_gpt_logits(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                mt_tensor logits) {
    int stage = gpt->grid->pipeline_rank, stages = gpt->grid->pipeline_size;
    mt_tensor input = mt_none(), output = mt_none(), all = logits, x;
    size_t n = (size_t)(mti_gpt_rows(gpt, batch) * gpt->desc.layer.hidden);
    if (!mti_gpt_is_first(gpt)) {
        MT_TRY(mti_gpt_room(ctx, gpt, input, mti_gpt_rows(gpt, batch), &input));
        MT_TRY(mt_recv(ctx, gpt->grid->pipeline, input.data, n, input.dtype, stage - 1));
    }
    if (!mti_gpt_is_last(gpt)) MT_TRY(mti_gpt_room(ctx, gpt, output, mti_gpt_rows(gpt, batch), &output));
    MT_TRY(mti_gpt_trunk(ctx, gpt, batch, ids, input, output, NULL, &x));
    if (!mti_gpt_is_last(gpt)) MT_TRY(mt_send(ctx, gpt->grid->pipeline, x.data, n, x.dtype, stage + 1));
    if (stages > 1) MT_TRY(mt_arena_tensor(ctx, logits.dtype, logits.rows, logits.cols, &all)); /* contiguous */
    if (mti_gpt_is_last(gpt)) MT_TRY(mti_gpt_head_logits(ctx, gpt, batch, x, all));
    if (stages == 1) return MT_SUCCESS;
    MT_TRY(mt_broadcast(ctx, gpt->grid->pipeline, all.data, all.data, (size_t)(all.rows * all.cols), all.dtype, stages - 1));
    return mt_copy(ctx, all, logits);
}

MT_API mt_status mt_gpt_logits(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                               mt_tensor logits) {
    static const char *const function = "mt_gpt_logits";
    int64_t tokens;
    size_t mark;
    mt_status status;
    MT_TRY(mti_gpt_call_check(ctx, function, gpt, batch));
    tokens = batch->sequences * batch->seq;
    MT_TRY(mti_expect_float_shape(ctx, function, "logits", logits,
                                  logits.rows == batch->sequences ? batch->sequences : tokens, gpt->desc.vocab));
    MT_TRY(mt_ids_check(ctx, "token id", ids, tokens, gpt->desc.vocab, 0));
    mark = mt_arena_mark(ctx);
    status = mti_gpt_logits(ctx, gpt, batch, ids, logits);
    mt_arena_release(ctx, mark);
    return status;
}

#ifdef __cplusplus
}
#endif

#endif /* MEGATRON_IMPLEMENTATION */
