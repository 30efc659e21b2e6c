/* mt_parallel.h - process grid, parallel parameters, column- and row-parallel linear, vocabulary-parallel embedding and
   cross-entropy, gradient sync and norm, loss scaling, AdamW.

   Do this (every rank; ctx from mt_comm.h):
       mt_grid grid;        mt_grid_desc shape = {.tensor = 8};             // data parallel over the rest
       mt_params *params;   MT_TRY(mt_grid_create(world, &shape, &grid));
                            MT_TRY(mt_params_create(ctx, &grid, &params));
       mt_column_parallel_linear fc; mt_linear_desc d = {.in_features = 1024, .out_features = 4096};
                            MT_TRY(mt_column_parallel_linear_create(ctx, params, "fc", &d, &fc));
                            MT_TRY(mt_params_init(ctx, params, 1234));      // allocates and fills all of them
       ... forward, backward ...
                            MT_TRY(mt_sync_gradients(ctx, params));

   Layers are small structs in the caller's memory that hold parameters only; there is nothing to destroy but the registry
   (mt_params), which owns values and gradients. What backward needs is in an explicit `saved`, whose tensors lie in the
   arena until the caller releases them; forward with saved == NULL is inference and leaves nothing behind.
   Backward adds to parameter gradients and overwrites activation gradients.

   Views may have ld > cols but for what is sent between tensor ranks, when there are several: y of a row-parallel layer and
   of an embedding, dx of a column-parallel one, and under sequence parallelism x of a column-parallel layer and dy of the
   others. Those must be contiguous (MT_ERR_SHAPE, before anything is computed).

   Sizes that the tensor group does not divide are padded with zeros that stay zero (their gradients are zero). Global
   shapes never include padding.

   It does not: know what a transformer is, run your loop, average losses: mt_sync_gradients sums over the data group, so
   scale your loss by 1 / (tokens of the whole global batch).

   Rooms of the implementation: >>grid >>invariant >>params >>hash-log >>linear >>vocab >>sync >>loss-scaler >>optimizer   */

#include "mt_kernels.cuh" /* outside the guard: an implementation wanted later reaches the lower floors too */

#ifndef MT_PARALLEL_H
#define MT_PARALLEL_H

#ifdef __cplusplus
extern "C" {
#endif

/* ---- process grid ------------------------------------------------------------------------------------------------- */

/* Megatron's rank order, tensor fastest, then data, then pipeline: rank = t + tensor * (d + data * p). */
typedef struct mt_grid_desc {
    int tensor;   /* 0: 1 */
    int data;     /* 0: what the other two leave of the world */
    int pipeline; /* 0: 1 */
} mt_grid_desc;

typedef enum mt_group {
    MT_GROUP_TENSOR = 0,
    MT_GROUP_DATA = 1,
    MT_GROUP_PIPELINE = 2,
    MT_GROUP_MODEL = 3,    /* tensor x pipeline: the ranks that hold one copy of the model */
    MT_GROUP_EMBEDDING = 4 /* first and last pipeline stage, which share tied embeddings; empty for stages between */
} mt_group;

/* The communicators of one rank. embedding is NULL on the stages between. Filled by mt_grid_create; read freely. */
typedef struct mt_grid {
    mt_comm *world; /* the caller's */
    mt_comm *tensor, *data, *pipeline, *model, *embedding;
    int tensor_size, data_size, pipeline_size;
    int tensor_rank, data_rank, pipeline_rank;
} mt_grid;

/* The ranks of `rank`'s group, in order, without communicating: ranks [world_size] is filled, *count set.
   Returns MT_ERR_ARGUMENT / MT_ERR_SHAPE for a grid that does not fit world_size; desc may hold zeros. */
MT_API mt_status mt_grid_ranks(const mt_grid_desc *desc, int world_size, mt_group group, int rank, int *ranks, int *count);

/* Collective over world. Errors are kept in world. world must outlive the grid, the grid must outlive what is built on it. */
MT_API mt_status mt_grid_create(mt_comm *world, const mt_grid_desc *desc, mt_grid *out);
MT_API void mt_grid_destroy(mt_grid *grid); /* a zero-initialised grid is allowed */

/* ---- invariant mode ------------------------------------------------------------------------------------------------ */

/* With mt_context_desc.invariant = V, a power of two, a training step computes the same bits - loss, gradients, their norm,
   weights, optimizer state - on every grid of 1, 2, 4, ..., V tensor ranks x 1, 2, 4, ..., V_d data ranks, with and without
   sequence parallelism. Every layer works as V virtual shards of the same shapes, whatever the number of ranks; a rank of t
   has V / t of them. Partial results meet in the tree ((0+1)+(2+3))+..., first in a rank, then by mt_all_reduce across ranks.
   Micro-batches meet in such a tree, too (mt_accumulate_gradients). What differs from the default:
     - split dimensions are padded to V shards; kv_heads must be at least V (MT_ERR_SHAPE);
     - training calls need a multiple of V tokens (MT_ERR_SHAPE), and micro-batches of the same size on every grid:
       mt_invariant_micro_batch says which;
     - a rank's features are those of its virtual shards one after the other: with two parts (SwiGLU) the columns between a
       column- and a row-parallel layer are gate, up, gate, up, ... Call operators of your own between the two once for each
       shard, on mt_shard_cols;
     - GEMMs are V times narrower, and the registry holds log2(V_d / data ranks) more gradients.
   It covers the layers of mt_parallel.h and the blocks of megatron.h, each used once between two mt_accumulate_gradients. A
   block that multiplies with mt_gemm itself, or sums over tokens (mt_bias_backward, mt_norm_backward), is as it was.
   The same bits need the same program, GEMM library, mt_context_desc.threads and kind of processor. A sum over micro-batches
   of your own, like the mean loss, is as invariant when made with mt_tree_sum. */

/* The columns of t [tokens, local features] that belong to one of a rank's `shards` virtual shards (mt_param.shards); t itself
   when its data is NULL. */
MT_API mt_tensor mt_shard_cols(mt_tensor t, int shard, int shards);

/* The number of sequences in a micro-batch for a step of so many, when V_d is data_shards: there are as many micro-batches as
   the largest power of two up to V_d that divides sequences, and no more data ranks are possible. */
MT_API int64_t mt_invariant_micro_batch(int data_shards, int64_t sequences);

/* The first row of x becomes the sum of all rows, in the tree in which mt_all_reduce joins ranks; the others are used up. */
MT_API mt_status mt_tree_sum(mt_context *ctx, mt_tensor x);

/* ---- parameters --------------------------------------------------------------------------------------------------- */

#define MT_NAME_MAX 96

typedef enum mt_placement {
    MT_REPLICATED = 0,
    MT_SPLIT_ROWS = 1, /* over the tensor group */
    MT_SPLIT_COLS = 2
} mt_placement;

/* What a parameter is, before it has memory. */
typedef struct mt_param_desc {
    const char *name;       /* unique in the registry; copied */
    int64_t rows, cols;     /* global shape; a vector is [1, n], a bias of a column-parallel layer [1, out] */
    mt_placement placement;
    int64_t parts;          /* the split dimension is this many equal blocks, each split by itself (2: [gate; up]); 0: 1 */
    int64_t unit;           /* features of the split dimension that stay together on one rank (a query group); 0: 1 */
    float init_std;         /* N(0, init_std^2) by global element ... */
    float init_value;       /* ... or, when init_std is 0, this constant */
    int weight_decay;       /* 1: the optimizer decays it (matrices); 0: biases, norms */
    int sequence_partial;   /* 1: each tensor rank saw only its own tokens: the gradient is summed over the tensor group */
    int shared_embedding;   /* 1: lives on first and last pipeline stage, gradients summed over the embedding group */
} mt_param_desc;

/* A parameter of this rank. value, in the registry's type, and grad, MT_F32, are shards [local rows, local cols], contiguous,
   valid after mt_params_init; read and write them freely. In invariant mode they hold the `shards` virtual shards of this rank
   one after the other, each contiguous: a matrix split by columns is then [shards * rows, local_features / shards]. */
typedef struct mt_param {
    mt_param_desc desc; /* desc.name points to name */
    char name[MT_NAME_MAX];
    mt_tensor value, grad;
    int tensor_rank, tensor_size;
    int shards;             /* V / tensor_size in invariant mode when the parameter is split, else 1 */
    int64_t local_features; /* of the split dimension, padding included; rows when it is not split */
} mt_param;

typedef struct mt_params mt_params; /* opaque: the registry */

/* grid must outlive the registry. ctx is the one that all its parameters live on. */
MT_API mt_status mt_params_create(mt_context *ctx, const mt_grid *grid, mt_params **out);
MT_API void mt_params_destroy(mt_params *params); /* frees values, gradients, descriptions; NULL is allowed */

/* The type of the model: MT_F32 (the default), MT_BF16 or MT_F16. Every parameter has it, and so have the activations and their
   gradients: what layers take, give, save and send between ranks. Gradients of parameters, statistics and the loss are MT_F32,
   and so is what the optimizer keeps. In invariant mode partial sums travel as MT_F32, and are rounded where they end.
   Before the first parameter is added. */
MT_API mt_status mt_params_set_dtype(mt_context *ctx, mt_params *params, mt_dtype dtype);
MT_API mt_dtype mt_params_dtype(const mt_params *params);

MT_API mt_status mt_params_add(mt_context *ctx, mt_params *params, const mt_param_desc *desc, mt_param **out);

/* Allocates values and gradients (one piece of memory each) and fills the values by global element with the given seed, drawn
   in f32 and rounded: any split starts from the same model. Afterwards no parameter can be added. A second call fills again.
   Over NCCL every rank of the data group calls it. */
MT_API mt_status mt_params_init(mt_context *ctx, mt_params *params, uint64_t seed);
MT_API mt_status mt_params_zero_grad(mt_context *ctx, mt_params *params);

MT_API const mt_grid *mt_params_grid(const mt_params *params);
MT_API int mt_params_count(const mt_params *params);
MT_API mt_param *mt_params_at(const mt_params *params, int index);            /* NULL when out of range */
MT_API mt_param *mt_params_find(const mt_params *params, const char *name);   /* NULL when there is none */
MT_API int64_t mt_params_elements(const mt_params *params);                   /* of this rank, padding included */
MT_API int64_t mt_params_global_elements(const mt_params *params);            /* of the model (this stage), no padding */

/* Between a parameter's shard and the whole unsharded tensor in host memory, float [rows, cols] without padding. scatter
   takes this rank's part of `global` (no communication). gather is collective over the tensor group: every rank gets all.
   shard is param->value, param->grad or any tensor of their shape (optimizer state), of any float type: it is widened and
   rounded on the way. Scratch comes from the arena. */
MT_API mt_status mt_param_scatter(mt_context *ctx, const mt_param *param, const float *global, mt_tensor shard);
MT_API mt_status mt_param_gather(mt_context *ctx, mt_params *params, const mt_param *param, mt_tensor shard, float *global);

/* ---- column- and row-parallel linear (arXiv 1909.08053, section 3) -------------------------------------------------- */

/* Y = X W^T + b, W [out_features, in_features]. Zero-initialised but for the sizes means: bias, input not split, output
   split (column) or reduced (row), no sequence parallelism. */
typedef struct mt_linear_desc {
    int64_t in_features, out_features; /* global */
    int64_t parts, unit;   /* as in mt_param_desc, of the split dimension */
    float init_std;        /* 0: 0.02 */
    int no_bias;
    int skip_bias_add;     /* 1: the caller adds layer->bias, and its gradient, itself (to fuse it with what follows) */
    int gather_output;     /* column: y is [tokens, out_features] on every rank */
    int input_is_parallel; /* row: x is already split over its columns, as a column-parallel layer leaves it */
    int sequence_parallel; /* column: x is [tokens / t, in]; row: y is [tokens / t, out] */
    mt_param *weight;      /* column: use this parameter instead of an own one (a tied output head); NULL: own */
} mt_linear_desc;

/* local_features is this rank's share of the split dimension, padding included: columns of y (column) or of x (row). */
typedef struct mt_column_parallel_linear {
    char name[MT_NAME_MAX];
    mt_linear_desc desc;
    mt_param *weight, *bias; /* bias is NULL with no_bias */
    mt_comm *tensor;
    int64_t local_features;
} mt_column_parallel_linear;

typedef struct mt_row_parallel_linear {
    char name[MT_NAME_MAX];
    mt_linear_desc desc;
    mt_param *weight, *bias;
    mt_comm *tensor;
    int64_t local_features;
} mt_row_parallel_linear;

/* Holds views of the caller's x: it must stay as it is until backward. */
typedef struct mt_linear_saved {
    mt_tensor x;
} mt_linear_saved;

/* Column-parallel: W is split over its rows. x [tokens, in] -> y [tokens, local_features], or [tokens, out] with gather_output.
   Forward f is the identity; backward all-reduces dx. With sequence_parallel x [tokens / t, in] is all-gathered in forward,
   gathered again in backward, and dx is reduce-scattered. dx may be mt_none(): not wanted, nothing is communicated for it. */
MT_API mt_status mt_column_parallel_linear_create(mt_context *ctx, mt_params *params, const char *name,
                                                  const mt_linear_desc *desc, mt_column_parallel_linear *out);
MT_API mt_status mt_column_parallel_linear_forward(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor x,
                                                   mt_tensor y, mt_linear_saved *saved);
MT_API mt_status mt_column_parallel_linear_backward(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor dy,
                                                    mt_tensor dx, const mt_linear_saved *saved);

/* Row-parallel: W is split over its columns. x [tokens, local_features] (or [tokens, in] without input_is_parallel) -> y
   [tokens, out], all-reduced (g); the bias is added once, after the reduction. With sequence_parallel y [tokens / t, out] is
   reduce-scattered, and backward all-gathers dy. */
MT_API mt_status mt_row_parallel_linear_create(mt_context *ctx, mt_params *params, const char *name,
                                               const mt_linear_desc *desc, mt_row_parallel_linear *out);
MT_API mt_status mt_row_parallel_linear_forward(mt_context *ctx, const mt_row_parallel_linear *layer, mt_tensor x,
                                                mt_tensor y, mt_linear_saved *saved);
MT_API mt_status mt_row_parallel_linear_backward(mt_context *ctx, const mt_row_parallel_linear *layer, mt_tensor dy,
                                                 mt_tensor dx, const mt_linear_saved *saved);

/* ---- vocabulary-parallel embedding and cross-entropy ---------------------------------------------------------------- */

typedef struct mt_embedding_desc {
    int64_t vocab, features;
    float init_std;        /* 0: 0.02 */
    int sequence_parallel; /* y is [tokens / t, features], reduce-scattered */
    int shared;            /* 1: the output head uses the same weight (see mt_linear_desc.weight) */
} mt_embedding_desc;

typedef struct mt_vocab_parallel_embedding {
    mt_embedding_desc desc;
    mt_param *weight;   /* [vocab, features], rows split */
    mt_comm *tensor;
    int64_t first_row;  /* of this rank's shard */
} mt_vocab_parallel_embedding;

/* ids [tokens], each in [0, vocab), else MT_ERR_DATA. forward: y = rows of the table, one all-reduce (g).
   backward: dtable += dy by ids. ids must be the same array contents in both. */
MT_API mt_status mt_vocab_parallel_embedding_create(mt_context *ctx, mt_params *params, const char *name,
                                                    const mt_embedding_desc *desc, mt_vocab_parallel_embedding *out);
MT_API mt_status mt_vocab_parallel_embedding_forward(mt_context *ctx, const mt_vocab_parallel_embedding *layer,
                                                     const int32_t *ids, int64_t tokens, mt_tensor y);
MT_API mt_status mt_vocab_parallel_embedding_backward(mt_context *ctx, const mt_vocab_parallel_embedding *layer,
                                                      const int32_t *ids, int64_t tokens, mt_tensor dy);

typedef struct mt_cross_entropy_desc {
    int64_t vocab;         /* global, without padding */
    float label_smoothing; /* PyTorch's: (1 - a) * nll + a * mean over the global vocabulary; 0 <= a < 1 */
    int32_t ignore_index;  /* targets equal to it have loss 0 and gradient 0; 0 stands for PyTorch's -100 */
} mt_cross_entropy_desc;

typedef struct mt_cross_entropy_saved {
    mt_tensor logits, lse;
    const int32_t *targets;
} mt_cross_entropy_saved;

/* logits [tokens, local vocabulary], of any float type, as an output head without gather_output leaves them; targets
   [tokens]; loss [1, tokens], MT_F32 as all between the two.
   One collective over `tensor`: an all-gather of four scalars per token (and virtual shard). backward turns the saved logits,
   in place, into scale * dloss[i] * dlogits (dloss [1, tokens] or mt_none() for ones). */
MT_API mt_status mt_vocab_parallel_cross_entropy_forward(mt_context *ctx, mt_comm *tensor, const mt_cross_entropy_desc *desc,
                                                         mt_tensor logits, const int32_t *targets, mt_tensor loss,
                                                         mt_cross_entropy_saved *saved);
MT_API mt_status mt_vocab_parallel_cross_entropy_backward(mt_context *ctx, mt_comm *tensor,
                                                          const mt_cross_entropy_desc *desc, mt_tensor dloss, float scale,
                                                          const mt_cross_entropy_saved *saved);

/* Both in one call, for a loop that knows dloss and scale beforehand: loss, and the logits' gradient in their place. Where one
   rank has the whole vocabulary, the logits are read once. */
MT_API mt_status mt_vocab_parallel_cross_entropy_forward_backward(mt_context *ctx, mt_comm *tensor,
                                                                  const mt_cross_entropy_desc *desc, mt_tensor logits,
                                                                  const int32_t *targets, mt_tensor dloss, float scale,
                                                                  mt_tensor loss);

/* ---- gradients ---------------------------------------------------------------------------------------------------- */

/* After the backward of every micro-batch, the last one included. In invariant mode the gradients of micro-batches meet in a
   fixed tree, whose unfinished subtrees, at most log2(V_d / data ranks) times the gradients, are the registry's; param->grad is
   zero afterwards, until mt_sync_gradients. MT_ERR_SHAPE for more than V_d / data ranks of them. Not needed when a step has one
   micro-batch only; does nothing without the mode, where backward has added everything up already. */
MT_API mt_status mt_accumulate_gradients(mt_context *ctx, mt_params *params);

/* After the last backward of a step: sums sequence_partial gradients over the tensor group (one all-reduce), shared
   embeddings over the embedding group, and everything over the data group (one all-reduce). In invariant mode the number of
   micro-batches must be a power of two (MT_ERR_SHAPE), and sequence_partial gradients are summed for each of them. */
MT_API mt_status mt_sync_gradients(mt_context *ctx, mt_params *params);

/* *norm = L2 norm of the whole model's gradient, each element counted once; one all-reduce of a scalar over the model group; in
   invariant mode one of V numbers for each parameter over the tensor group, and of a scalar over the pipeline group.
   Call it after mt_sync_gradients. Not finite when a gradient is not. */
MT_API mt_status mt_grad_norm(mt_context *ctx, mt_params *params, float *norm);

/* The factor that clips a gradient of this norm to max_norm: min(1, max_norm / (norm + 1e-6)), 1 when max_norm <= 0. Look
   first whether the norm is finite: no factor mends a gradient that is not. */
MT_API float mt_clip_coefficient(float norm, float max_norm);

/* ---- loss scaling --------------------------------------------------------------------------------------------------- */

/* Gradients of MT_F16 activations vanish below 6e-8 and overflow above 65504: the loss is multiplied by a scale, as large as
   goes well (arXiv 1710.03740, section 3.2). It grows after so many good steps in a row and shrinks when a gradient is not
   finite, as Megatron's DynamicGradScaler:
       MT_TRY(mt_gpt_backward(ctx, &gpt, scaler.scale / tokens, &saved));
       MT_TRY(mt_sync_gradients(ctx, params));
       MT_TRY(mt_grad_norm(ctx, params, &norm));
       float unscale = mt_loss_scaler_update(&scaler, &norm);
       if (unscale > 0) MT_TRY(mt_optimizer_step(ctx, &optimizer, lr, unscale * mt_clip_coefficient(norm, 1.0f)));
   Every rank has the same norm, and so the same scale: all take the step, or none. MT_BF16 needs no scale. */
typedef struct mt_loss_scaler_desc {
    float initial_scale;  /* 0: 2^32 */
    float min_scale;      /* 0: 1 */
    float growth, backoff; /* 0: 2 and 1/2 */
    int growth_interval;  /* good steps in a row until it grows; 0: 1000 */
    int hysteresis;       /* overflows, since it grew last, until it shrinks; 0: 2 */
} mt_loss_scaler_desc;

/* All there is to save for a checkpoint. */
typedef struct mt_loss_scaler {
    mt_loss_scaler_desc desc;
    float scale;       /* to multiply the loss by */
    int good_steps;    /* in a row */
    int overflows;     /* since it grew last */
    int64_t skipped;   /* steps, all in all */
} mt_loss_scaler;

/* desc may be NULL. Factors that are powers of two, as the defaults are, change no digit of a gradient. */
MT_API mt_status mt_loss_scaler_create(mt_context *ctx, const mt_loss_scaler_desc *desc, mt_loss_scaler *out);

/* After mt_grad_norm: *norm becomes that of the true gradient. Returns the factor that undoes the scale of this step, for the
   grad_scale of mt_optimizer_step; 0 when the norm is not finite: leave the step out. Then sets the scale of the next. */
MT_API float mt_loss_scaler_update(mt_loss_scaler *scaler, float *norm);

/* ---- optimizer ---------------------------------------------------------------------------------------------------- */

typedef struct mt_optimizer_desc {
    float beta1, beta2;  /* 0: 0.9, 0.999 */
    float eps;           /* 0: 1e-8 */
    float weight_decay;  /* of parameters with desc.weight_decay; 0: none */
    int stochastic_rounding; /* 1: of 16-bit parameters no master is kept, see mt_adamw: 14 bytes for each instead of 18 */
    uint64_t seed;       /* of that: element e of a parameter's step n takes word e of stream (FNV-1a of its name) + n */
} mt_optimizer_desc;

typedef struct mt_optimizer {
    mt_optimizer_desc desc;
    mt_params *params;
    float *m, *v;     /* first and second moments, see mt_optimizer_moments */
    float *master;    /* what 16-bit parameters are the rounded copy of, or NULL, see mt_optimizer_master */
    int64_t elements; /* of m, of v, and of master */
    int64_t step;     /* steps done */
} mt_optimizer;

/* Masters start as the parameters are: create the optimizer when they have their values. */
MT_API mt_status mt_optimizer_create(mt_context *ctx, mt_params *params, const mt_optimizer_desc *desc, mt_optimizer *out);
MT_API void mt_optimizer_destroy(mt_context *ctx, mt_optimizer *optimizer); /* a zero-initialised one is allowed */

/* The moments of a parameter: shards like its value, to read, write, gather and scatter. */
MT_API mt_status mt_optimizer_moments(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param, mt_tensor *m,
                                      mt_tensor *v);

/* What the next step updates: the parameter's master, or its value where that has none. Who writes a master writes the value,
   too, and the other way round. */
MT_API mt_status mt_optimizer_master(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                     mt_tensor *master);

/* One AdamW step with gradients scaled by grad_scale (the clip coefficient, 1 / loss scale, ...). Masters are updated and
   parameters rounded in one pass. */
MT_API mt_status mt_optimizer_step(mt_context *ctx, mt_optimizer *optimizer, float lr, float grad_scale);

/* Learning rate of step 0, 1, ...: linear warm-up over `warmup` steps to lr, then a cosine down to min_lr at `total`. */
MT_API float mt_cosine_schedule(int64_t step, int64_t warmup, int64_t total, float lr, float min_lr);

/* ---- hash log: which tensor differs between two runs ---------------------------------------------------------------- */

/* While a context has a hash log, the linear layers and the blocks of megatron.h that train on it (forward with saved,
   backward) log what they compute: each tensor's bits, unsharded and of the whole step, become one number that does not depend
   on how the tensor is split over ranks and micro-batches. In invariant mode two splits write the same lines; the first that
   differs names the tensor in which they part. Names are a layer's, with .output, .input_grad or .output_grad.
   For debugging: it takes time, host memory for the names, and two collectives for each flush. */
typedef struct mt_hash_log mt_hash_log;

/* One log for each context (MT_ERR_ARGUMENT for a second). Destroy it before the context; NULL is allowed. */
MT_API mt_status mt_hash_log_create(mt_context *ctx, const mt_grid *grid, mt_hash_log **out);
MT_API void mt_hash_log_destroy(mt_hash_log *log);

/* Where in the global batch the tokens of the next calls begin. Blocks that take an mt_batch say it themselves; a loop of your
   own around layers that do not says it before each micro-batch. Does nothing without a log. */
MT_API void mt_hash_log_tokens(mt_context *ctx, int64_t first_token);

/* What the layers cannot know of: a tensor of a parameter (its gradient after mt_sync_gradients, its value, a moment) as
   PARAMETER and suffix (".grad", "", ".exp_avg"), and a number that every rank has. */
MT_API mt_status mt_hash_log_shard(mt_context *ctx, mt_hash_log *log, const mt_param *param, const char *suffix,
                                   mt_tensor shard);
MT_API mt_status mt_hash_log_value(mt_context *ctx, mt_hash_log *log, const char *name, float value);

/* differs: ranks that should hold the same tensor do not. */
typedef void (*mt_hash_line)(void *user, const char *name, uint64_t hash, int differs);

/* At the end of a step: calls line for every tensor, in the order in which they were first computed, on every rank, and
   empties the log. Collective over the tensor and data group. */
MT_API mt_status mt_hash_log_flush(mt_context *ctx, mt_hash_log *log, mt_hash_line line, void *user);

#ifdef __cplusplus
}
#endif

#endif /* MT_PARALLEL_H */

/* ================================================== the API ends here ============================================== */

#if defined(MEGATRON_IMPLEMENTATION) && !defined(MT_PARALLEL_IMPLEMENTED)
#define MT_PARALLEL_IMPLEMENTED

#include <math.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- >>grid ------------------------------------------------------------------------------------------------------- */

/* sizes[0..2] = tensor, data, pipeline with the zeros of desc resolved. Writes a sentence into text when they do not fit. */
static mt_status mti_grid_sizes(const mt_grid_desc *desc, int world, int sizes[3], char *text, size_t text_bytes) {
    int tensor = desc->tensor ? desc->tensor : 1, pipeline = desc->pipeline ? desc->pipeline : 1, data = desc->data;
    int64_t model = (int64_t)tensor * pipeline;
    if (desc->tensor < 0 || desc->data < 0 || desc->pipeline < 0 || world < 1) {
        snprintf(text, text_bytes, "mt_grid: tensor %d, data %d, pipeline %d on %d ranks: sizes must not be negative",
                 desc->tensor, desc->data, desc->pipeline, world);
        return MT_ERR_ARGUMENT;
    }
    if (!data && world % model == 0) data = (int)(world / model);
    if (!data || model > world || model * data != world) {
        snprintf(text, text_bytes, "mt_grid: tensor %d x data %d x pipeline %d does not make %d ranks", tensor, data,
                 pipeline, world);
        return MT_ERR_SHAPE;
    }
    sizes[0] = tensor;
    sizes[1] = data;
    sizes[2] = pipeline;
    return MT_SUCCESS;
}

static void mti_grid_coordinates(const int sizes[3], int rank, int at[3]) {
    at[0] = rank % sizes[0];
    at[1] = rank / sizes[0] % sizes[1];
    at[2] = rank / sizes[0] / sizes[1];
}

static int mti_grid_end_stage(const int sizes[3], const int at[3]) { return at[2] == 0 || at[2] == sizes[2] - 1; }

/* Whether ranks a and b are in one group of this kind. */
static int mti_grid_together(const int sizes[3], mt_group group, int a, int b) {
    int x[3], y[3];
    mti_grid_coordinates(sizes, a, x);
    mti_grid_coordinates(sizes, b, y);
    switch (group) {
    case MT_GROUP_TENSOR: return x[1] == y[1] && x[2] == y[2];
    case MT_GROUP_DATA: return x[0] == y[0] && x[2] == y[2];
    case MT_GROUP_PIPELINE: return x[0] == y[0] && x[1] == y[1];
    case MT_GROUP_MODEL: return x[1] == y[1];
    case MT_GROUP_EMBEDDING:
        return x[0] == y[0] && x[1] == y[1] && mti_grid_end_stage(sizes, x) && mti_grid_end_stage(sizes, y);
    }
    return 0;
}

MT_API mt_status mt_grid_ranks(const mt_grid_desc *desc, int world_size, mt_group group, int rank, int *ranks, int *count) {
    char text[160];
    int sizes[3], r;
    if (!desc || !ranks || !count || group < MT_GROUP_TENSOR || group > MT_GROUP_EMBEDDING) return MT_ERR_ARGUMENT;
    *count = 0;
    MT_TRY(mti_grid_sizes(desc, world_size, sizes, text, sizeof text));
    if (rank < 0 || rank >= world_size) return MT_ERR_ARGUMENT;
    for (r = 0; r < world_size; r++)
        if (mti_grid_together(sizes, group, rank, r)) ranks[(*count)++] = r;
    return MT_SUCCESS;
}

/* One communicator of the grid: by split, or on a meta world by counting. *out stays NULL for a rank in no such group. */
static mt_status mti_grid_group(mt_comm *world, const int sizes[3], mt_group group, const char *name, mt_comm **out) {
    int rank = mt_comm_rank(world), first = -1, size = 0, index = 0, r;
    for (r = 0; r < mt_comm_size(world); r++) {
        if (!mti_grid_together(sizes, group, rank, r)) continue;
        if (first < 0) first = r;
        if (r < rank) index++;
        size++;
    }
    if (!mt_comm_is_meta(world)) MT_TRY(mt_comm_split(world, first, rank, out));
    else if (size > 0) MT_TRY(mt_comm_create_meta(size, index, out));
    if (*out) mt_comm_set_name(*out, name);
    return MT_SUCCESS;
}

static mt_status mti_grid_groups(mt_grid *grid, const int sizes[3]) {
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_TENSOR, "tensor", &grid->tensor));
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_DATA, "data", &grid->data));
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_PIPELINE, "pipeline", &grid->pipeline));
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_MODEL, "model", &grid->model));
    return mti_grid_group(grid->world, sizes, MT_GROUP_EMBEDDING, "embedding", &grid->embedding);
}

MT_API mt_status mt_grid_create(mt_comm *world, const mt_grid_desc *desc, mt_grid *out) {
    static const mt_grid_desc defaults = {0, 0, 0};
    char text[160];
    int sizes[3], at[3];
    mt_status status;
    if (!world) return MT_ERR_ARGUMENT;
    if (!out) return mti_comm_keep_error(world, MT_ERR_ARGUMENT, "mt_grid_create: out is NULL");
    memset(out, 0, sizeof *out);
    status = mti_grid_sizes(desc ? desc : &defaults, mt_comm_size(world), sizes, text, sizeof text);
    if (status != MT_SUCCESS) return mti_comm_keep_error(world, status, text);
    mti_grid_coordinates(sizes, mt_comm_rank(world), at);
    out->world = world;
    out->tensor_size = sizes[0];
    out->data_size = sizes[1];
    out->pipeline_size = sizes[2];
    out->tensor_rank = at[0];
    out->data_rank = at[1];
    out->pipeline_rank = at[2];
    status = mti_grid_groups(out, sizes);
    if (status != MT_SUCCESS) mt_grid_destroy(out);
    return status;
}

MT_API void mt_grid_destroy(mt_grid *grid) {
    if (!grid) return;
    mt_comm_destroy(grid->embedding);
    mt_comm_destroy(grid->model);
    mt_comm_destroy(grid->pipeline);
    mt_comm_destroy(grid->data);
    mt_comm_destroy(grid->tensor);
    memset(grid, 0, sizeof *grid);
}

/* ---- >>invariant --------------------------------------------------------------------------------------------------- */

/* Virtual shards that this rank of the tensor group holds. */
static int mti_shards(const mt_context *ctx, const mt_comm *tensor) {
    return ctx->invariant ? ctx->invariant / mt_comm_size(tensor) : 1;
}

static mt_status mti_expect_shards(mt_context *ctx, const char *function, const mt_comm *tensor) {
    if (!ctx->invariant || ctx->invariant % mt_comm_size(tensor) == 0) return MT_SUCCESS;
    return mti_fail(ctx, MT_ERR_SHAPE, "%s: %d virtual shards (mt_context_desc.invariant) cannot be split over %d tensor ranks",
                    function, ctx->invariant, mt_comm_size(tensor));
}

MT_API mt_tensor mt_shard_cols(mt_tensor t, int shard, int shards) {
    return t.data ? mt_tensor_cols(t, t.cols / shards * shard, t.cols / shards) : t;
}

/* Writes (not adds) what virtual shard `shard` of this rank contributes to a sum. */
typedef mt_status (*mti_leaf)(mt_context *ctx, const void *arg, int shard, mt_tensor out);

/* The one way in which partial results meet: out = sum over shards [first, first + count), a power of two, in the tree
   ((0+1)+(2+3))+... that mt_all_reduce continues across ranks. Scratch: log2(count) tensors like out. */
static mt_status mti_shard_tree(mt_context *ctx, mti_leaf leaf, const void *arg, int first, int count, mt_tensor out) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor other;
    if (count == 1) return leaf(ctx, arg, first, out);
    MT_TRY(mti_shard_tree(ctx, leaf, arg, first, count / 2, out));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, out.rows, out.cols, &other));
    MT_TRY(mti_shard_tree(ctx, leaf, arg, first + count / 2, count / 2, other));
    MT_TRY(mt_add(ctx, out, other, out));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

MT_API mt_status mt_tree_sum(mt_context *ctx, mt_tensor x) {
    int64_t step, i;
    MT_TRY(mti_expect_f32(ctx, "mt_tree_sum", "x", x));
    for (step = 1; step < x.rows; step *= 2)
        for (i = 0; i + step < x.rows; i += 2 * step)
            MT_TRY(mt_add(ctx, mt_tensor_rows(x, i, 1), mt_tensor_rows(x, i + step, 1), mt_tensor_rows(x, i, 1)));
    return MT_SUCCESS;
}

/* A GEMM library may take another path, with other bits, for another leading dimension or alignment: in invariant mode every
   operand is contiguous and aligned, by a copy where it is not. */
static int mti_is_canonical(const mt_context *ctx, mt_tensor t) {
    if (!ctx->invariant) return 1;
    if (ctx->device == MT_DEVICE_META) return 0; /* to plan for the rank that needs most copies */
    return (t.rows <= 1 || mti_ld(t) == t.cols) && (uintptr_t)t.data % MTI_ALIGNMENT == 0;
}

/* Where the canonical form of something that is going to be written will be. */
static mt_status mti_canonical_room(mt_context *ctx, mt_tensor t, mt_tensor *out) {
    *out = t;
    if (!mti_is_canonical(ctx, t)) return mt_arena_tensor(ctx, t.dtype, t.rows, t.cols, out);
    if (ctx->invariant) out->ld = t.cols; /* of one row, too */
    return MT_SUCCESS;
}

/* Brings it to its place. */
static mt_status mti_canonical_done(mt_context *ctx, mt_tensor room, mt_tensor t) {
    return room.data == t.data ? MT_SUCCESS : mt_copy(ctx, room, t);
}

/* The canonical form of what is read. */
static mt_status mti_canonical(mt_context *ctx, mt_tensor t, mt_tensor *out) {
    MT_TRY(mti_canonical_room(ctx, t, out));
    return mti_canonical_done(ctx, t, *out);
}

/* c = op(a) op(b) + beta c, beta 0 or 1. */
static mt_status mti_gemm(mt_context *ctx, mt_transpose trans_a, mt_transpose trans_b, mt_tensor a, mt_tensor b, float beta,
                          mt_tensor c) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor out;
    MT_TRY(mti_canonical(ctx, a, &a));
    MT_TRY(mti_canonical(ctx, b, &b));
    MT_TRY(beta == 0.0f ? mti_canonical_room(ctx, c, &out) : mti_canonical(ctx, c, &out));
    MT_TRY(mt_gemm(ctx, trans_a, trans_b, 1.0f, a, b, beta, out));
    MT_TRY(mti_canonical_done(ctx, out, c));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Adds what rows [first, first + count) of a token-wise operator contribute to gradients [n, h] (b may be mt_none()). */
typedef mt_status (*mti_token_operator)(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor a,
                                        mt_tensor b);

typedef struct mti_token_sum {
    mti_token_operator op;
    const void *arg;
    int64_t rows;   /* tokens of a virtual shard */
    int64_t a_rows; /* rows of the first gradient; the second's follow */
} mti_token_sum;

static mt_status mti_token_leaf(mt_context *ctx, const void *arg, int shard, mt_tensor out) {
    const mti_token_sum *s = (const mti_token_sum *)arg;
    mt_tensor b = mt_none();
    if (s->a_rows < out.rows) b = mt_tensor_rows(out, s->a_rows, out.rows - s->a_rows);
    MT_TRY(mt_fill(ctx, out, 0.0f));
    return s->op(ctx, s->arg, shard * s->rows, s->rows, mt_tensor_rows(out, 0, s->a_rows), b);
}

/* Gradients that are sums over tokens: V virtual shards of the tokens, of which a rank has V / t under sequence parallelism,
   and all without. Otherwise one pass, straight into the gradients. */
static mt_status mti_sum_over_tokens(mt_context *ctx, mt_comm *tensor, int sequence_parallel, mti_token_operator op,
                                     const void *arg, int64_t rows, mt_tensor a, mt_tensor b) {
    int shards = sequence_parallel ? mti_shards(ctx, tensor) : ctx->invariant;
    mti_token_sum sum;
    mt_tensor out;
    size_t mark = mt_arena_mark(ctx);
    if (!ctx->invariant) return op(ctx, arg, 0, rows, a, b);
    sum.op = op;
    sum.arg = arg;
    sum.rows = rows / shards;
    sum.a_rows = a.rows;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, a.rows + b.rows, a.cols, &out));
    MT_TRY(mti_shard_tree(ctx, mti_token_leaf, &sum, 0, shards, out));
    MT_TRY(mt_add(ctx, a, mt_tensor_rows(out, 0, a.rows), a));
    if (b.data) MT_TRY(mt_add(ctx, b, mt_tensor_rows(out, a.rows, b.rows), b));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Training in invariant mode splits the tokens of a call into V virtual shards. */
static mt_status mti_expect_token_shards(mt_context *ctx, const char *function, int64_t tokens) {
    if (!ctx->invariant || tokens % ctx->invariant == 0) return MT_SUCCESS;
    return mti_fail(ctx, MT_ERR_SHAPE, "%s: %lld tokens cannot be split into %d virtual shards (mt_context_desc.invariant)",
                    function, (long long)tokens, ctx->invariant);
}

MT_API int64_t mt_invariant_micro_batch(int data_shards, int64_t sequences) {
    int64_t parts = 1;
    while (2 * parts <= data_shards && sequences % (2 * parts) == 0) parts *= 2;
    return sequences / parts;
}

/* ---- >>params ----------------------------------------------------------------------------------------------------- */

/* Memory that lives as long as the registry: host structs (layers of a model) and device tables (rotary). */
typedef struct mti_buffer {
    void *data;
    size_t bytes;
    int on_host;
    struct mti_buffer *next;
} mti_buffer;

struct mt_params {
    mt_context *ctx;
    const mt_grid *grid;
    mt_param **list;
    int count, capacity;
    mt_dtype dtype;            /* of values */
    void *values;              /* NULL until mt_params_init */
    float *grads;
    int64_t elements, partial; /* the first `partial` elements are the sequence_partial parameters */
    float *subtrees;           /* invariant mode: [levels, elements], sums of 1, 2, 4, ... micro-batches */
    int levels;                /* of the tree over the micro-batches of a rank */
    int64_t micro_batches;     /* accumulated in this step */
    mti_buffer *buffers;
};

static mt_status mti_host_new(mt_context *ctx, size_t bytes, void **out) {
    *out = mti_host_alloc(bytes);
    return *out ? MT_SUCCESS : mti_fail(ctx, MT_ERR_MEMORY, "no memory for %zu bytes", bytes);
}

static void mti_params_free_buffers(mt_params *params) {
    while (params->buffers) {
        mti_buffer *buffer = params->buffers;
        params->buffers = buffer->next;
        if (buffer->on_host) mti_host_free(buffer->data);
        else mt_context_free(params->ctx, buffer->data, buffer->bytes);
        mti_host_free(buffer);
    }
}

MT_API mt_status mt_params_create(mt_context *ctx, const mt_grid *grid, mt_params **out) {
    void *memory;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!grid || !grid->tensor || !out)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_params_create: %s", out ? "the grid was not created" : "out is NULL");
    *out = NULL;
    MT_TRY(mti_expect_shards(ctx, "mt_params_create", grid->tensor));
    if (ctx->invariant && ctx->invariant_data % grid->data_size != 0)
        return mti_fail(ctx, MT_ERR_SHAPE, "mt_params_create: %d virtual data shards (mt_context_desc.invariant_data) cannot "
                        "be split over %d data ranks", ctx->invariant_data, grid->data_size);
    MT_TRY(mt_gemm_prepare(ctx));
    MT_TRY(mti_host_new(ctx, sizeof **out, &memory));
    *out = (mt_params *)memory;
    (*out)->ctx = ctx;
    (*out)->grid = grid;
    return MT_SUCCESS;
}

MT_API mt_status mt_params_set_dtype(mt_context *ctx, mt_params *params, mt_dtype dtype) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || params->count > 0)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_params_set_dtype: %s", params ? "there are parameters already" :
                        "params is NULL");
    if (!mti_is_float(dtype))
        return mti_fail(ctx, MT_ERR_DTYPE, "mt_params_set_dtype: parameters cannot be %s, but f32, bf16 or f16",
                        mt_dtype_name(dtype));
    params->dtype = dtype;
    return MT_SUCCESS;
}

MT_API mt_dtype mt_params_dtype(const mt_params *params) { return params ? params->dtype : MT_F32; }

static size_t mti_params_bytes(const mt_params *params, int64_t elements) {
    return (size_t)elements * mt_dtype_size(params->dtype);
}

MT_API void mt_params_destroy(mt_params *params) {
    mt_context *ctx;
    int i;
    if (!params) return;
    ctx = params->ctx;
    mti_params_free_buffers(params);
    mt_context_free(ctx, params->values, mti_params_bytes(params, params->elements));
    mt_context_free(ctx, params->grads, (size_t)params->elements * sizeof(float));
    mt_context_free(ctx, params->subtrees, (size_t)(params->elements * params->levels) * sizeof(float));
    for (i = 0; i < params->count; i++) mti_host_free(params->list[i]);
    mti_host_free(params->list);
    mti_host_free(params);
}

/* One of the `parts` blocks of a shard: `count` features that start at `local` in the shard and at `global` in the whole;
   the rest of the block, up to `size`, is padding. */
typedef struct mti_block {
    int shard; /* which of the rank's */
    int64_t local, global, count, size;
} mti_block;

static int64_t mti_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* The share of a dimension of n features that each of so many shards holds, padding included. */
static int64_t mti_shard_features(int64_t n, int64_t parts, int64_t unit, int shards) {
    return parts * mti_ceil_div(n / parts / unit, shards) * unit;
}

static int64_t mti_split_dimension(const mt_param *p) {
    return p->desc.placement == MT_SPLIT_COLS ? p->desc.cols : p->desc.rows;
}

/* The blocks of a parameter on a rank, shard by shard; a replicated one is a single block of all its rows. */
static int64_t mti_param_blocks(const mt_param *p) { return p->desc.parts * p->shards; }

static mti_block mti_param_block(const mt_param *p, int rank, int64_t index) {
    int64_t whole = mti_split_dimension(p) / p->desc.parts, part = index % p->desc.parts, before;
    mti_block b;
    if (p->desc.placement == MT_REPLICATED) rank = 0;
    b.shard = (int)(index / p->desc.parts);
    b.size = p->local_features / p->shards / p->desc.parts;
    b.local = part * b.size;
    before = mti_min(whole, ((int64_t)rank * p->shards + b.shard) * b.size);
    b.global = part * whole + before;
    b.count = mti_min(b.size, whole - before);
    return b;
}

/* A virtual shard of a parameter's value, gradient or moments. */
static mt_tensor mti_param_shard(const mt_param *p, mt_tensor t, int shard) {
    int64_t features = p->local_features / p->shards;
    int64_t rows = p->desc.placement == MT_SPLIT_COLS ? p->desc.rows : features;
    int64_t cols = p->desc.placement == MT_SPLIT_COLS ? features : p->desc.cols;
    return mt_tensor_rows(mt_tensor_make(t.data, t.dtype, rows * p->shards, cols), rows * shard, rows);
}

static mt_tensor mti_param_block_view(const mt_param *p, mt_tensor t, mti_block b) {
    t = mti_param_shard(p, t, b.shard);
    return p->desc.placement == MT_SPLIT_COLS ? mt_tensor_cols(t, b.local, b.count) : mt_tensor_rows(t, b.local, b.count);
}

/* The columns of local [tokens, local features] that are a block of p's split dimension. */
static mt_tensor mti_block_cols(const mt_param *p, mt_tensor local, mti_block b) {
    return mt_tensor_cols(local, b.shard * (p->local_features / p->shards) + b.local, b.count);
}

#define MTI_PARAM_ELEMENTS ((int64_t)1 << 48) /* so that padding to 1024 shards does not leave int64_t */

static mt_status mti_param_check(mt_context *ctx, const mt_params *params, const mt_param_desc *d) {
    int64_t n = d->placement == MT_SPLIT_COLS ? d->cols : d->rows, parts = d->parts ? d->parts : 1;
    int64_t unit = d->unit ? d->unit : 1;
    if (!d->name || !d->name[0] || strlen(d->name) >= MT_NAME_MAX)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_params_add: the name '%.100s' must have 1 to %d characters",
                        d->name ? d->name : "(NULL)", MT_NAME_MAX - 1);
    if (params->values)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_params_add: '%s' comes after mt_params_init", d->name);
    if (mt_params_find(params, d->name))
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_params_add: there is already a parameter '%s'", d->name);
    if (d->placement < MT_REPLICATED || d->placement > MT_SPLIT_COLS)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_params_add: '%s' has placement %d", d->name, (int)d->placement);
    if (d->sequence_partial && d->placement != MT_REPLICATED)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_params_add: '%s' is sequence_partial and split (placement %d)", d->name,
                        (int)d->placement);
    if (d->rows < 1 || d->cols < 1 || d->rows > MTI_PARAM_ELEMENTS / d->cols)
        return mti_fail(ctx, MT_ERR_SHAPE, "mt_params_add: '%s' has shape [%lld, %lld]", d->name, (long long)d->rows,
                        (long long)d->cols);
    if (!(d->init_std >= 0.0f))
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_params_add: '%s' has init_std %g", d->name, (double)d->init_std);
    if (parts < 1 || unit < 1 || n % parts != 0 || n / parts % unit != 0)
        return mti_fail(ctx, MT_ERR_SHAPE, "mt_params_add: %lld features of '%s' are not %lld parts of units of %lld",
                        (long long)n, d->name, (long long)parts, (long long)unit);
    return MT_SUCCESS;
}

static mt_status mti_params_reserve(mt_context *ctx, mt_params *params) {
    int capacity = params->capacity ? 2 * params->capacity : 64;
    void *memory;
    if (params->count < params->capacity) return MT_SUCCESS;
    MT_TRY(mti_host_new(ctx, (size_t)capacity * sizeof *params->list, &memory));
    if (params->list) {
        memcpy(memory, params->list, (size_t)params->count * sizeof *params->list);
        mti_host_free(params->list);
    }
    params->list = (mt_param **)memory;
    params->capacity = capacity;
    return MT_SUCCESS;
}

/* This rank's share. A vector split by columns is one row whatever its shards. */
static void mti_param_shape(const mt_params *params, mt_param *p) {
    const mt_param_desc *d = &p->desc;
    int split = d->placement != MT_REPLICATED;
    int64_t rows, cols;
    p->shards = split ? mti_shards(params->ctx, params->grid->tensor) : 1;
    p->local_features = split ? p->shards * mti_shard_features(mti_split_dimension(p), d->parts, d->unit,
                                                               p->shards * p->tensor_size) : d->rows;
    rows = d->placement != MT_SPLIT_COLS ? p->local_features : d->rows > 1 ? p->shards * d->rows : 1;
    cols = d->placement != MT_SPLIT_COLS ? d->cols : d->rows > 1 ? p->local_features / p->shards : p->local_features;
    p->value = mt_tensor_make(NULL, params->dtype, rows, cols);
    p->grad = mt_tensor_make(NULL, MT_F32, rows, cols);
}

MT_API mt_status mt_params_add(mt_context *ctx, mt_params *params, const mt_param_desc *desc, mt_param **out) {
    mt_param *p;
    void *memory;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || !desc || !out) return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_params_add: params, desc or out is NULL");
    MT_TRY(mti_param_check(ctx, params, desc));
    MT_TRY(mti_params_reserve(ctx, params));
    MT_TRY(mti_host_new(ctx, sizeof *p, &memory));
    p = (mt_param *)memory;
    p->desc = *desc;
    memcpy(p->name, desc->name, strlen(desc->name) + 1);
    p->desc.name = p->name;
    if (!p->desc.parts) p->desc.parts = 1;
    if (!p->desc.unit) p->desc.unit = 1;
    p->tensor_rank = params->grid->tensor_rank;
    p->tensor_size = params->grid->tensor_size;
    mti_param_shape(params, p);
    params->list[params->count++] = p;
    *out = p;
    return MT_SUCCESS;
}

/* Ends the creation of a layer: when it failed, the parameters added since `count` are taken out again, and the layer,
   which points to them, is cleared. */
static mt_status mti_params_keep(mt_params *params, int count, void *layer, size_t layer_bytes,
                                 mt_status status) {
    while (status != MT_SUCCESS && params->count > count)
        mti_host_free(params->list[--params->count]);
    if (status != MT_SUCCESS) memset(layer, 0, layer_bytes);
    return status;
}

/* Elements of a parameter's shard in the registry's memory, rounded up so that each starts on a 64-byte boundary. */
static int64_t mti_param_slot(const mt_param *p) {
    return mti_round_up(p->value.rows * p->value.cols, (int64_t)(MTI_ALIGNMENT / mt_dtype_size(p->value.dtype)));
}

/* The slots of all parameters together. */
static mt_status mti_params_sum(mt_context *ctx, const mt_params *params, int64_t *sum) {
    int i;
    for (*sum = 0, i = 0; i < params->count; i++) {
        int64_t slot = mti_param_slot(params->list[i]);
        if (slot > INT64_MAX / 256 - *sum)
            return mti_fail(ctx, MT_ERR_MEMORY, "mt_params_init: the parameters up to '%s' have more than %lld elements",
                            params->list[i]->name, (long long)(INT64_MAX / 256));
        *sum += slot;
    }
    return MT_SUCCESS;
}

static mt_status mti_params_alloc(mt_context *ctx, mt_params *params, int64_t elements) {
    size_t bytes = (size_t)elements * sizeof(float), value_bytes = mti_params_bytes(params, elements), more;
    void *values = NULL, *grads = NULL, *subtrees = NULL;
    mt_status status;
    while (params->grid->data_size << params->levels < ctx->invariant_data) params->levels++;
    more = bytes * (size_t)params->levels;
    status = mt_context_alloc(ctx, value_bytes, &values);
    if (status == MT_SUCCESS) status = mt_context_alloc(ctx, bytes, &grads);
    if (status == MT_SUCCESS && more > 0) status = mt_context_alloc(ctx, more, &subtrees);
    if (status != MT_SUCCESS) {
        mt_context_free(ctx, grads, bytes);
        mt_context_free(ctx, values, value_bytes);
        return status;
    }
    params->values = values;
    params->grads = (float *)grads;
    params->subtrees = (float *)subtrees;
    params->elements = elements;
    return MT_SUCCESS;
}

/* Gives every parameter its place. Those whose gradients are summed over the tensor group come first, in one piece. */
static mt_status mti_params_place(mt_context *ctx, mt_params *params) {
    int64_t at;
    int i, pass;
    MT_TRY(mti_params_sum(ctx, params, &at));
    MT_TRY(mti_params_alloc(ctx, params, at));
    for (at = 0, pass = 0; pass < 2; pass++) {
        for (i = 0; i < params->count; i++) {
            mt_param *p = params->list[i];
            if ((p->desc.sequence_partial != 0) != (pass == 0)) continue;
            p->value.data = (char *)params->values + mti_params_bytes(params, at);
            p->grad.data = params->grads + at;
            at += mti_param_slot(p);
        }
        if (pass == 0) params->partial = at;
    }
    return mti_comm_register(ctx, params->grid->data, params->grads, (size_t)params->elements * sizeof(float));
}

/* FNV-1a, so that a parameter's random stream depends on its name and not on what was created before it. */
static uint64_t mti_name_stream(const char *name) {
    uint64_t h = 14695981039346656037u;
    for (; *name; name++) h = (h ^ (uint64_t)(unsigned char)*name) * 1099511628211u;
    return h;
}

/* Random numbers for a block: step 0 is initialisation. */
static mt_random mti_param_random(const mt_param *p, mti_block b, uint64_t seed, uint64_t step) {
    mt_random at;
    at.seed = seed;
    at.stream = mti_name_stream(p->name) + step;
    at.first_row = p->desc.placement == MT_SPLIT_COLS ? 0 : b.global;
    at.first_col = p->desc.placement == MT_SPLIT_COLS ? b.global : 0;
    at.global_cols = p->desc.cols;
    return at;
}

static mt_status mti_param_init(mt_context *ctx, const mt_param *p, uint64_t seed) {
    int64_t i;
    for (i = 0; i < mti_param_blocks(p); i++) {
        mti_block b = mti_param_block(p, p->tensor_rank, i);
        mt_tensor view = mti_param_block_view(p, p->value, b);
        mt_random at = mti_param_random(p, b, seed, 0);
        if (b.count == 0) continue;
        if (p->desc.init_std > 0.0f) MT_TRY(mt_random_normal(ctx, view, p->desc.init_std, at));
        else MT_TRY(mt_fill(ctx, view, p->desc.init_value));
    }
    return MT_SUCCESS;
}

/* Zero is the same bits in every type, and slots are whole words: as f32 it needs no scratch memory. */
static mt_status mti_params_zero(mt_context *ctx, const mt_params *params) {
    int64_t words = (int64_t)(mti_params_bytes(params, params->elements) / sizeof(float));
    return mt_fill(ctx, mt_tensor_make(params->values, MT_F32, 1, words), 0.0f);
}

MT_API mt_status mt_params_init(mt_context *ctx, mt_params *params, uint64_t seed) {
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || params->count == 0)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_params_init: %s", params ? "there are no parameters" : "params is NULL");
    if (!params->values) MT_TRY(mti_params_place(ctx, params));
    MT_TRY(mti_params_zero(ctx, params));
    for (i = 0; i < params->count; i++) MT_TRY(mti_param_init(ctx, params->list[i], seed));
    return mt_params_zero_grad(ctx, params);
}

static mt_status mti_params_ready(mt_context *ctx, const mt_params *params, const char *function) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || !params->values)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function, params ? "call mt_params_init first" : "params is NULL");
    if (ctx->invariant == params->ctx->invariant && ctx->invariant_data == params->ctx->invariant_data) return MT_SUCCESS;
    return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: the registry was made with invariant %d, %d, the context has %d, %d", function,
                    params->ctx->invariant, params->ctx->invariant_data, ctx->invariant, ctx->invariant_data);
}

static mt_tensor mti_gradients(const mt_params *params) { return mt_tensor_f32(params->grads, 1, params->elements); }

MT_API mt_status mt_params_zero_grad(mt_context *ctx, mt_params *params) {
    MT_TRY(mti_params_ready(ctx, params, "mt_params_zero_grad"));
    params->micro_batches = 0;
    return mt_fill(ctx, mti_gradients(params), 0.0f);
}

MT_API const mt_grid *mt_params_grid(const mt_params *params) { return params ? params->grid : NULL; }
MT_API int mt_params_count(const mt_params *params) { return params ? params->count : 0; }

MT_API mt_param *mt_params_at(const mt_params *params, int index) {
    return index >= 0 && index < mt_params_count(params) ? params->list[index] : NULL;
}

MT_API mt_param *mt_params_find(const mt_params *params, const char *name) {
    int i;
    for (i = 0; name && i < mt_params_count(params); i++)
        if (strcmp(params->list[i]->name, name) == 0) return params->list[i];
    return NULL;
}

MT_API int64_t mt_params_elements(const mt_params *params) {
    int64_t n = 0;
    int i;
    for (i = 0; i < mt_params_count(params); i++) n += params->list[i]->value.rows * params->list[i]->value.cols;
    return n;
}

MT_API int64_t mt_params_global_elements(const mt_params *params) {
    int64_t n = 0;
    int i;
    for (i = 0; i < mt_params_count(params); i++) n += params->list[i]->desc.rows * params->list[i]->desc.cols;
    return n;
}

/* What is not f32 is converted in the arena. */
static mt_status mti_rows_copy(mt_context *ctx, mt_tensor rows, float *host, int to_host) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor f32 = rows;
    int half = rows.dtype != MT_F32;
    if (half) MT_TRY(mt_arena_tensor(ctx, MT_F32, rows.rows, rows.cols, &f32));
    if (half && to_host) MT_TRY(mt_convert(ctx, rows, f32));
    MT_TRY(to_host ? mt_download(ctx, f32, host) : mt_upload(ctx, host, f32));
    if (half && !to_host) MT_TRY(mt_convert(ctx, f32, rows));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Copies between a block of a shard and its place in the whole tensor on the host; row by row where that is not contiguous. */
static mt_status mti_block_copy(mt_context *ctx, mt_tensor block, float *host, int64_t host_ld, int to_host) {
    int64_t i, step = host_ld == block.cols ? block.rows : 1;
    if (block.cols == 0) return MT_SUCCESS;
    for (i = 0; i < block.rows; i += step)
        MT_TRY(mti_rows_copy(ctx, mt_tensor_rows(block, i, step), host + i * host_ld, to_host));
    return MT_SUCCESS;
}

static mt_status mti_shard_copy(mt_context *ctx, const mt_param *p, int rank, mt_tensor shard, float *global, int to_host) {
    int64_t i;
    for (i = 0; i < mti_param_blocks(p); i++) {
        mti_block b = mti_param_block(p, rank, i);
        int64_t offset = p->desc.placement == MT_SPLIT_COLS ? b.global : b.global * p->desc.cols;
        MT_TRY(mti_block_copy(ctx, mti_param_block_view(p, shard, b), global + offset, p->desc.cols, to_host));
    }
    return MT_SUCCESS;
}

/* A shard of p, and something in host memory that goes with it. */
static mt_status mti_shard_check(mt_context *ctx, const char *function, const mt_param *p, mt_tensor shard,
                                 const char *host_name, const void *host) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!p || !shard.data || !host)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, !p ? "param" : host ? "shard" : host_name);
    if (!mti_is_float(shard.dtype))
        return mti_fail(ctx, MT_ERR_DTYPE, "%s: the shard is %s, must be f32, bf16 or f16", function,
                        mt_dtype_name(shard.dtype));
    if (shard.rows != p->value.rows || shard.cols != p->value.cols || mti_ld(shard) != shard.cols)
        return mti_fail(ctx, MT_ERR_SHAPE, "%s: the shard of '%s' is [%lld, %lld], contiguous; got [%lld, %lld], ld %lld",
                        function, p->name, (long long)p->value.rows, (long long)p->value.cols, (long long)shard.rows,
                        (long long)shard.cols, (long long)mti_ld(shard));
    return MT_SUCCESS;
}

MT_API mt_status mt_param_scatter(mt_context *ctx, const mt_param *param, const float *global, mt_tensor shard) {
    float *host;
    size_t mark;
    mt_status status;
    MT_TRY(mti_shard_check(ctx, "mt_param_scatter", param, shard, "global", global));
    mark = mt_arena_mark(ctx);
    memcpy(&host, &global, sizeof host); /* only read: mti_shard_copy serves both directions */
    status = mti_shard_copy(ctx, param, param->tensor_rank, shard, host, 0);
    mt_arena_release(ctx, mark);
    return status;
}

static mt_status mti_param_gather(mt_context *ctx, mt_params *params, const mt_param *p, mt_tensor shard, float *global) {
    mt_tensor all;
    int r;
    if (p->desc.placement == MT_REPLICATED || p->tensor_size == 1) return mti_shard_copy(ctx, p, 0, shard, global, 1);
    MT_TRY(mt_arena_tensor(ctx, shard.dtype, shard.rows * p->tensor_size, shard.cols, &all));
    MT_TRY(mt_all_gather(ctx, params->grid->tensor, shard.data, all.data, (size_t)(shard.rows * shard.cols), shard.dtype));
    for (r = 0; r < p->tensor_size; r++)
        MT_TRY(mti_shard_copy(ctx, p, r, mt_tensor_rows(all, r * shard.rows, shard.rows), global, 1));
    return MT_SUCCESS;
}

MT_API mt_status mt_param_gather(mt_context *ctx, mt_params *params, const mt_param *param, mt_tensor shard, float *global) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_params_ready(ctx, params, "mt_param_gather"));
    MT_TRY(mti_shard_check(ctx, "mt_param_gather", param, shard, "global", global));
    mark = mt_arena_mark(ctx);
    status = mti_param_gather(ctx, params, param, shard, global);
    mt_arena_release(ctx, mark);
    return status;
}

/* ---- >>hash-log ---------------------------------------------------------------------------------------------------- */

#define MTI_LOG_NAME (MT_NAME_MAX + 32)

/* split: over which axes (tensor, data) the ranks hold different parts of the tensor, rather than copies of it. */
typedef struct mti_log_entry {
    char name[MTI_LOG_NAME];
    uint64_t hash;
    int split[2], differs;
} mti_log_entry;

struct mt_hash_log {
    mt_context *ctx;
    const mt_grid *grid;
    mti_log_entry *entries;
    int count, capacity, last; /* last: the entry found last; steps repeat, so the next one follows it */
    int64_t first_token;       /* of the call that is going on, in the global batch */
};

MT_API mt_status mt_hash_log_create(mt_context *ctx, const mt_grid *grid, mt_hash_log **out) {
    void *memory;
    if (out) *out = NULL;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!grid || !grid->tensor || !out || ctx->hash_log)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_hash_log_create: %s", !out ? "out is NULL" :
                        ctx->hash_log ? "the context has a hash log" : "the grid was not created");
    MT_TRY(mti_host_new(ctx, sizeof **out, &memory));
    *out = ctx->hash_log = (mt_hash_log *)memory;
    (*out)->ctx = ctx;
    (*out)->grid = grid;
    return MT_SUCCESS;
}

MT_API void mt_hash_log_destroy(mt_hash_log *log) {
    if (!log) return;
    log->ctx->hash_log = NULL;
    mti_host_free(log->entries);
    mti_host_free(log);
}

/* The entry of this name, new if there is none. */
static mt_status mti_log_entry_of(mt_context *ctx, mt_hash_log *log, const char *name, mti_log_entry **out) {
    int i;
    for (i = 1; i <= log->count; i++) {
        int at = (log->last + i) % log->count;
        if (strcmp(log->entries[at].name, name) != 0) continue;
        log->last = at;
        *out = &log->entries[at];
        return MT_SUCCESS;
    }
    if (log->count == log->capacity) {
        int capacity = log->capacity ? 2 * log->capacity : 256;
        void *memory;
        MT_TRY(mti_host_new(ctx, (size_t)capacity * sizeof **out, &memory));
        if (log->entries) memcpy(memory, log->entries, (size_t)log->count * sizeof **out);
        mti_host_free(log->entries);
        log->entries = (mti_log_entry *)memory;
        log->capacity = capacity;
    }
    log->last = log->count++;
    *out = &log->entries[log->last];
    memset(*out, 0, sizeof **out);
    snprintf((*out)->name, sizeof (*out)->name, "%s", name);
    return MT_SUCCESS;
}

MT_API void mt_hash_log_tokens(mt_context *ctx, int64_t first_token) {
    if (ctx && ctx->hash_log) ctx->hash_log->first_token = first_token > 0 ? first_token : 0;
}

/* Logs an activation [tokens, n]: its rows are a part of the tokens under sequence parallelism; its columns the local features
   of `cols`, or everything when that is NULL. The line is called `name` without its last `up` parts, and `what`. */
static mt_status mti_log(mt_context *ctx, const char *name, int up, const char *what, mt_tensor t, int sequence_parallel,
                         const mt_param *cols) {
    mt_hash_log *log = ctx->hash_log;
    mti_log_entry *entry;
    char full[MTI_LOG_NAME];
    int length, row_split;
    int64_t i, row;
    if (!log || !t.data) return MT_SUCCESS;
    for (length = (int)strlen(name); length > 0 && up > 0;) up -= name[--length] == '.';
    snprintf(full, sizeof full, "%.*s.%s", length, name, what);
    MT_TRY(mti_log_entry_of(ctx, log, full, &entry));
    row_split = sequence_parallel && log->grid->tensor_size > 1;
    entry->split[0] = cols != NULL || row_split;
    entry->split[1] = 1;
    row = log->first_token + (row_split ? log->grid->tensor_rank * t.rows : 0);
    if (!cols) return mt_hash(ctx, t, row, 0, t.cols, &entry->hash);
    for (i = 0; i < mti_param_blocks(cols); i++) {
        mti_block b = mti_param_block(cols, cols->tensor_rank, i);
        MT_TRY(mt_hash(ctx, mti_block_cols(cols, t, b), row, b.global, mti_split_dimension(cols), &entry->hash));
    }
    return MT_SUCCESS;
}

static mt_status mti_log_check(mt_context *ctx, const char *function, const mt_hash_log *log) {
    if (!ctx) return MT_ERR_ARGUMENT;
    return log ? MT_SUCCESS : mti_fail(ctx, MT_ERR_ARGUMENT, "%s: log is NULL", function);
}

MT_API mt_status mt_hash_log_shard(mt_context *ctx, mt_hash_log *log, const mt_param *param, const char *suffix,
                                   mt_tensor shard) {
    char name[MTI_LOG_NAME];
    mti_log_entry *entry;
    int64_t i;
    MT_TRY(mti_shard_check(ctx, "mt_hash_log_shard", param, shard, "log", log));
    snprintf(name, sizeof name, "%s%.31s", param->name, suffix ? suffix : "");
    MT_TRY(mti_log_entry_of(ctx, log, name, &entry));
    entry->split[0] = param->desc.placement != MT_REPLICATED;
    for (i = 0; i < mti_param_blocks(param); i++) {
        mti_block b = mti_param_block(param, param->tensor_rank, i);
        int by_cols = param->desc.placement == MT_SPLIT_COLS;
        MT_TRY(mt_hash(ctx, mti_param_block_view(param, shard, b), by_cols ? 0 : b.global, by_cols ? b.global : 0,
                       param->desc.cols, &entry->hash));
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_hash_log_value(mt_context *ctx, mt_hash_log *log, const char *name, float value) {
    mti_log_entry *entry;
    uint32_t bits;
    MT_TRY(mti_log_check(ctx, "mt_hash_log_value", log));
    if (!name) return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_hash_log_value: name is NULL");
    MT_TRY(mti_log_entry_of(ctx, log, name, &entry));
    memcpy(&bits, &value, sizeof bits);
    entry->hash += mti_hash_element(0, bits);
    return MT_SUCCESS;
}

/* What ranks tell each other of an entry. */
typedef struct mti_log_part {
    uint64_t hash;
    uint64_t differs;
} mti_log_part;

/* Joins what the ranks of one axis have: parts are added; copies are one, or, when they differ, a hash of them all. */
static void mti_log_join_entry(mti_log_entry *entry, int axis, const mti_log_part *parts, int ranks, int stride) {
    uint64_t sum = parts[0].hash, mixed = sum;
    int r, same = 1;
    for (r = 0; r < ranks; r++) entry->differs |= parts[r * stride].differs != 0;
    for (r = 1; r < ranks; r++) {
        uint64_t h = parts[r * stride].hash;
        same &= h == parts[0].hash;
        sum += h;
        mixed = mti_hash_element(mixed + h, (uint32_t)r);
    }
    entry->hash = entry->split[axis] ? sum : same ? parts[0].hash : mixed;
    entry->differs |= !entry->split[axis] && !same;
}

static mt_status mti_log_exchange(mt_context *ctx, mt_hash_log *log, mt_comm *comm, mti_log_part *parts) {
    int64_t words = log->count * (int64_t)(sizeof *parts / sizeof(int32_t));
    mt_tensor own, all;
    int i;
    for (i = 0; i < log->count; i++) {
        parts[i].hash = log->entries[i].hash;
        parts[i].differs = (uint64_t)log->entries[i].differs;
    }
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, words, &own));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, mt_comm_size(comm), words, &all));
    MT_TRY(mt_upload(ctx, parts, own));
    MT_TRY(mt_all_gather(ctx, comm, own.data, all.data, (size_t)words, MT_I32));
    return mt_download(ctx, all, parts);
}

static mt_status mti_log_join(mt_context *ctx, mt_hash_log *log, mt_comm *comm, int axis) {
    int ranks = mt_comm_size(comm), i;
    mti_log_part *parts;
    void *memory;
    mt_status status;
    MT_TRY(mti_host_new(ctx, (size_t)log->count * (size_t)ranks * sizeof *parts, &memory));
    parts = (mti_log_part *)memory;
    status = mti_log_exchange(ctx, log, comm, parts);
    for (i = 0; status == MT_SUCCESS && i < log->count; i++)
        mti_log_join_entry(&log->entries[i], axis, parts + i, ranks, log->count);
    mti_host_free(memory);
    return status;
}

MT_API mt_status mt_hash_log_flush(mt_context *ctx, mt_hash_log *log, mt_hash_line line, void *user) {
    size_t mark;
    mt_status status;
    int i;
    MT_TRY(mti_log_check(ctx, "mt_hash_log_flush", log));
    if (!line) return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_hash_log_flush: line is NULL");
    if (log->count == 0) return MT_SUCCESS;
    mark = mt_arena_mark(ctx);
    status = mti_log_join(ctx, log, log->grid->tensor, 0);
    if (status == MT_SUCCESS) status = mti_log_join(ctx, log, log->grid->data, 1);
    mt_arena_release(ctx, mark);
    for (i = 0; status == MT_SUCCESS && i < log->count; i++)
        line(user, log->entries[i].name, log->entries[i].hash, log->entries[i].differs);
    log->count = log->last = 0;
    return status;
}

/* ---- >>linear ----------------------------------------------------------------------------------------------------- */

/* What a layer sends or receives must be contiguous, which is found out before anything is computed: `in` travels under
   sequence parallelism, `out`, which may be mt_none(), always. */
static mt_status mti_expect_travel(mt_context *ctx, const char *function, mt_comm *tensor, int sequence_parallel,
                                   const char *in_name, mt_tensor in, const char *out_name, mt_tensor out) {
    int in_ok = !sequence_parallel || in.rows <= 1 || mti_ld(in) == in.cols;
    mt_tensor bad = in_ok ? out : in;
    if (mt_comm_size(tensor) == 1 || (in_ok && (out.rows <= 1 || mti_ld(out) == out.cols))) return MT_SUCCESS;
    return mti_fail(ctx, MT_ERR_SHAPE, "%s: %s [%lld, %lld] has ld %lld; it is sent between %d ranks and must be contiguous",
                    function, in_ok ? out_name : in_name, (long long)bad.rows, (long long)bad.cols, (long long)bad.ld,
                    mt_comm_size(tensor));
}

/* A view of exactly [rows, cols], in the type of the layer's weight: an activation or its gradient. */
static mt_status mti_expect_like(mt_context *ctx, const char *function, const mt_param *weight, const char *name, mt_tensor t,
                                 int64_t rows, int64_t cols) {
    MT_TRY(mti_expect_float_shape(ctx, function, name, t, rows, cols));
    if (t.dtype == weight->value.dtype) return MT_SUCCESS;
    return mti_fail(ctx, MT_ERR_DTYPE, "%s: %s is %s, '%s' is %s", function, name, mt_dtype_name(t.dtype), weight->name,
                    mt_dtype_name(weight->value.dtype));
}

static mt_status mti_expect_weight(mt_context *ctx, const char *function, const mt_param *weight) {
    if (weight && weight->value.data) return MT_SUCCESS;
    return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function,
                    weight ? "call mt_params_init before the first forward" : "the layer was not created");
}

/* NAME.SUFFIX into a buffer of MT_NAME_MAX, or an error that shows what does not fit. */
static mt_status mti_join_name(mt_context *ctx, char *out, const char *name, const char *suffix) {
    int n = name ? snprintf(out, MT_NAME_MAX, "%s.%s", name, suffix) : -1;
    if (n > 0 && n < MT_NAME_MAX) return MT_SUCCESS;
    return mti_fail(ctx, MT_ERR_ARGUMENT, "the parameter name '%.100s.%s' must have at most %d characters",
                    name ? name : "(NULL)", suffix, MT_NAME_MAX - 1);
}

static mt_status mti_add_param(mt_context *ctx, mt_params *params, const char *name, const char *suffix,
                               mt_param_desc desc, mt_param **out) {
    char full[MT_NAME_MAX];
    MT_TRY(mti_join_name(ctx, full, name, suffix));
    desc.name = full;
    return mt_params_add(ctx, params, &desc, out);
}

static mt_status mti_linear_check(mt_context *ctx, const char *function, const mt_params *params, const char *name,
                                  const mt_linear_desc *d, const void *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || !name || !d || !out)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function,
                        !params ? "params" : !name ? "name" : !d ? "desc" : "out");
    if (d->in_features < 1 || d->out_features < 1 || d->parts < 0 || d->unit < 0 || !(d->init_std >= 0.0f))
        return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' has in_features %lld, out_features %lld, parts %lld, unit %lld, "
                        "init_std %g", function, name, (long long)d->in_features, (long long)d->out_features,
                        (long long)d->parts, (long long)d->unit, (double)d->init_std);
    return MT_SUCCESS;
}

static float mti_default(float value, float otherwise) { return value == 0.0f ? otherwise : value; }

/* The weight and the bias of a linear layer, split as the layer says. */
static mt_status mti_linear_params(mt_context *ctx, mt_params *params, const char *name, const mt_linear_desc *d,
                                   mt_placement placement, mt_param **weight, mt_param **bias) {
    mt_param_desc w, b;
    memset(&w, 0, sizeof w);
    w.rows = d->out_features;
    w.cols = d->in_features;
    w.placement = placement;
    w.parts = d->parts;
    w.unit = d->unit;
    w.init_std = mti_default(d->init_std, 0.02f);
    w.weight_decay = 1;
    memset(&b, 0, sizeof b);
    b.rows = 1;
    b.cols = d->out_features;
    if (placement == MT_SPLIT_ROWS) {
        b.placement = MT_SPLIT_COLS;
        b.parts = d->parts;
        b.unit = d->unit;
    } else {
        b.sequence_partial = d->sequence_parallel;
    }
    *weight = d->weight;
    *bias = NULL;
    if (!d->weight) MT_TRY(mti_add_param(ctx, params, name, "weight", w, weight));
    if (!d->no_bias) MT_TRY(mti_add_param(ctx, params, name, "bias", b, bias));
    return MT_SUCCESS;
}

/* Whether local features are the global ones, in their order and without padding. */
static int mti_is_whole(const mt_param *p) {
    return p->tensor_size == 1 && p->local_features == mti_split_dimension(p) && (p->desc.parts == 1 || p->shards == 1);
}

/* Columns of x [tokens, n] that belong to this rank: a view where that is one piece, else a copy in the arena. */
static mt_status mti_local_slice(mt_context *ctx, const mt_param *p, mt_tensor x, mt_tensor *out) {
    int64_t i, blocks = mti_param_blocks(p);
    mti_block first = mti_param_block(p, p->tensor_rank, 0), last = mti_param_block(p, p->tensor_rank, blocks - 1);
    if (mti_is_whole(p) || (p->desc.parts == 1 && last.count == last.size)) {
        *out = mt_tensor_cols(x, first.global, p->local_features);
        return MT_SUCCESS;
    }
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, p->local_features, out));
    MT_TRY(mt_fill(ctx, *out, 0.0f));
    for (i = 0; i < blocks; i++) {
        mti_block b = mti_param_block(p, p->tensor_rank, i);
        MT_TRY(mt_copy(ctx, mt_tensor_cols(x, b.global, b.count), mti_block_cols(p, *out, b)));
    }
    return MT_SUCCESS;
}

/* The inverse: local [tokens, local features], contiguous, of every rank -> y [tokens, n], padding left out. */
static mt_status mti_gather_features(mt_context *ctx, mt_comm *tensor, const mt_param *p, mt_tensor local, mt_tensor y) {
    mt_tensor all;
    int64_t i;
    int r;
    MT_TRY(mt_arena_tensor(ctx, local.dtype, local.rows * p->tensor_size, local.cols, &all));
    MT_TRY(mt_all_gather(ctx, tensor, local.data, all.data, (size_t)(local.rows * local.cols), local.dtype));
    for (r = 0; r < p->tensor_size; r++)
        for (i = 0; i < mti_param_blocks(p); i++) {
            mti_block b = mti_param_block(p, r, i);
            mt_tensor from = mt_tensor_rows(all, r * local.rows, local.rows);
            MT_TRY(mt_copy(ctx, mti_block_cols(p, from, b), mt_tensor_cols(y, b.global, b.count)));
        }
    return MT_SUCCESS;
}

/* x of all tokens: x itself, or under sequence parallelism gathered into the arena. */
static mt_status mti_all_tokens(mt_context *ctx, mt_comm *tensor, int sequence_parallel, mt_tensor x, mt_tensor *out) {
    *out = x;
    if (!sequence_parallel || mt_comm_size(tensor) == 1) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows * mt_comm_size(tensor), x.cols, out));
    return mt_gather_from_sequence_region(ctx, tensor, x, *out);
}

/* Where partial sums [tokens, n] go before mti_reduce_tokens: y itself, or the arena under sequence parallelism, and for 16-bit
   types in invariant mode: there sums stay f32 until the last one, since ranks and virtual shards must meet in the same way. */
static mt_status mti_partial_tokens(mt_context *ctx, mt_comm *tensor, int sequence_parallel, mt_tensor y, mt_tensor *out) {
    int ranks = sequence_parallel ? mt_comm_size(tensor) : 1;
    *out = y;
    if (ranks == 1 && (!ctx->invariant || y.dtype == MT_F32)) return MT_SUCCESS;
    return mt_arena_tensor(ctx, ctx->invariant ? MT_F32 : y.dtype, y.rows * ranks, y.cols, out);
}

/* -- tokens in chunks, so that one chunk is multiplied while another one is communicated -- */

#define MTI_CHUNK_TOKENS 1024
#define MTI_CHUNKS 4

/* A chunk is, under sequence parallelism, some rows of every rank: pieces [0, pieces) of it. Tokens that do not travel are one
   chunk. The cut does not depend on what overlaps, so that the GEMMs, and their bits, do not either. */
typedef struct mti_chunks {
    int count, pieces;
    int64_t rows; /* of a piece, in all chunks */
} mti_chunks;

static mti_chunks mti_chunks_of(const mt_context *ctx, mt_comm *tensor, int sequence_parallel, int travel, int64_t rows) {
    int ranks = mt_comm_size(tensor), pieces = sequence_parallel ? ranks : 1;
    int64_t count = ctx->overlap_chunks;
    mti_chunks c;
    if (count == 0) count = ctx->planned == MT_DEVICE_CUDA ? mti_min(rows * pieces / MTI_CHUNK_TOKENS, MTI_CHUNKS) : 1;
    if (ranks == 1 || !travel || ctx->invariant) count = 1;
    c.count = (int)mti_max(mti_min(count, rows), 1);
    c.pieces = c.count == 1 ? 1 : pieces;
    c.rows = c.count == 1 ? rows * pieces : rows;
    return c;
}

static int64_t mti_chunk_first(const mti_chunks *c, int chunk) { return c->rows * chunk / c->count; }

static int64_t mti_chunk_rows(const mti_chunks *c, int chunk) {
    return mti_chunk_first(c, chunk + 1) - mti_chunk_first(c, chunk);
}

static mt_tensor mti_piece(const mti_chunks *c, mt_tensor t, int chunk, int piece) {
    return mt_tensor_rows(t, piece * c->rows + mti_chunk_first(c, chunk), mti_chunk_rows(c, chunk));
}

/* The rows of all ranks into `all`, a chunk for each ticket; x itself where there is nothing to gather. */
static mt_status mti_gather_chunks(mt_context *ctx, mt_comm *tensor, int sequence_parallel, const mti_chunks *c, mt_tensor x,
                                   mt_tensor *all) {
    int i;
    if (c->count == 1) return mti_all_tokens(ctx, tensor, sequence_parallel, x, all);
    *all = x;
    if (!sequence_parallel) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows * mt_comm_size(tensor), x.cols, all));
    for (i = 0; i < c->count; i++) {
        int64_t first = mti_chunk_first(c, i), rows = mti_chunk_rows(c, i);
        MT_TRY(mt_overlap_begin(ctx, tensor, MT_OVERLAP_ALL_GATHER));
        MT_TRY(mt_overlap_end(ctx, i, mt_gather_rows_from_sequence_region(ctx, tensor, x, *all, first, rows)));
    }
    return MT_SUCCESS;
}

/* Sums the partial results of all ranks into y: all-reduce, or reduce-scatter under sequence parallelism. */
static mt_status mti_reduce_tokens(mt_context *ctx, mt_comm *tensor, int sequence_parallel, mt_tensor partial, mt_tensor y) {
    mt_tensor sum = y;
    if (partial.dtype != y.dtype && sequence_parallel) MT_TRY(mt_arena_tensor(ctx, MT_F32, y.rows, y.cols, &sum));
    else if (partial.dtype != y.dtype) sum = partial;
    if (sequence_parallel) MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, tensor, partial, sum));
    else MT_TRY(mt_reduce_from_tensor_region_forward(ctx, tensor, sum));
    return sum.dtype != y.dtype ? mt_convert(ctx, sum, y) : MT_SUCCESS;
}

/* The same for one of several chunks. */
static mt_status mti_reduce_chunk(mt_context *ctx, mt_comm *tensor, int sequence_parallel, const mti_chunks *c, int chunk,
                                  mt_tensor partial, mt_tensor y) {
    int64_t first = mti_chunk_first(c, chunk), rows = mti_chunk_rows(c, chunk);
    if (c->count == 1) return mti_reduce_tokens(ctx, tensor, sequence_parallel, partial, y);
    if (sequence_parallel) return mt_reduce_scatter_rows_to_sequence_region(ctx, tensor, partial, y, first, rows);
    return mt_reduce_rows_from_tensor_region(ctx, tensor, y, first, rows);
}

static int64_t mti_tokens(mt_comm *tensor, int sequence_parallel, int64_t rows) {
    return sequence_parallel ? rows * mt_comm_size(tensor) : rows;
}

/* The inverse: the rows that a rank holds of so many tokens. */
static mt_status mti_rows(mt_context *ctx, const char *function, mt_comm *tensor, int sequence_parallel, int64_t tokens,
                          int64_t *rows) {
    int ranks = sequence_parallel ? mt_comm_size(tensor) : 1;
    *rows = tokens / ranks;
    if (tokens >= 0 && tokens % ranks == 0) return MT_SUCCESS;
    return mti_fail(ctx, MT_ERR_SHAPE, "%s: %lld tokens cannot be split over %d tensor ranks", function, (long long)tokens,
                    ranks);
}

MT_API mt_status mt_column_parallel_linear_create(mt_context *ctx, mt_params *params, const char *name,
                                                  const mt_linear_desc *desc, mt_column_parallel_linear *out) {
    static const char *const function = "mt_column_parallel_linear_create";
    int count;
    MT_TRY(mti_linear_check(ctx, function, params, name, desc, out));
    if (desc->weight && (desc->weight->desc.rows != desc->out_features || desc->weight->desc.cols != desc->in_features ||
                         desc->weight->desc.placement != MT_SPLIT_ROWS))
        return mti_fail(ctx, MT_ERR_SHAPE, "%s: '%s' is [%lld, %lld], the shared weight '%s' is [%lld, %lld], placement %d",
                        function, name, (long long)desc->out_features, (long long)desc->in_features, desc->weight->name,
                        (long long)desc->weight->desc.rows, (long long)desc->weight->desc.cols,
                        (int)desc->weight->desc.placement);
    if (desc->weight && (desc->weight->desc.parts != (desc->parts ? desc->parts : 1) ||
                         desc->weight->desc.unit != (desc->unit ? desc->unit : 1)))
        return mti_fail(ctx, MT_ERR_SHAPE, "%s: '%s' has %lld parts of units of %lld, the shared weight '%s' %lld of %lld",
                        function, name, (long long)(desc->parts ? desc->parts : 1), (long long)(desc->unit ? desc->unit : 1),
                        desc->weight->name, (long long)desc->weight->desc.parts, (long long)desc->weight->desc.unit);
    memset(out, 0, sizeof *out);
    count = params->count;
    MT_TRY(mti_params_keep(params, count, out, sizeof *out,
                           mti_linear_params(ctx, params, name, desc, MT_SPLIT_ROWS, &out->weight, &out->bias)));
    out->desc = *desc;
    out->tensor = params->grid->tensor;
    out->local_features = out->weight->local_features;
    snprintf(out->name, sizeof out->name, "%s", name);
    return MT_SUCCESS;
}

/* The bias operator `op` on y or dy, with the bias or its gradient. */
static mt_status mti_column_bias(mt_context *ctx, const mt_param *bias, mt_tensor y,
                                 mt_status (*op)(mt_context *ctx, mt_tensor y, mt_tensor bias), int backward) {
    mt_tensor b = backward ? bias->grad : bias->value;
    int s;
    for (s = 0; s < bias->shards; s++)
        MT_TRY(op(ctx, mt_shard_cols(y, s, bias->shards), mt_shard_cols(b, s, bias->shards)));
    return MT_SUCCESS;
}

/* y [tokens, local features] = x W^T + bias, which may be NULL */
static mt_status mti_column_product(mt_context *ctx, const mt_param *w, const mt_param *bias, mt_tensor x, mt_tensor y) {
    int s;
    if (!ctx->invariant) return mt_linear_forward(ctx, x, w->value, bias ? bias->value : mt_none(), y);
    MT_TRY(mti_canonical(ctx, x, &x)); /* once for all shards */
    for (s = 0; s < w->shards; s++)
        MT_TRY(mti_gemm(ctx, MT_NO_TRANS, MT_TRANS, x, mti_param_shard(w, w->value, s), 0.0f, mt_shard_cols(y, s, w->shards)));
    return bias ? mti_column_bias(ctx, bias, y, mt_bias_forward, 0) : MT_SUCCESS;
}

/* A product whose inner dimension is the split one: each shard of W [rows, cols] gives a partial sum. */
typedef struct mti_partial {
    const mt_param *weight;
    mt_transpose trans; /* of W */
    mt_tensor x;        /* [tokens, local features] */
} mti_partial;

static mt_status mti_partial_leaf(mt_context *ctx, const void *arg, int shard, mt_tensor out) {
    const mti_partial *p = (const mti_partial *)arg;
    const mt_param *w = p->weight;
    return mti_gemm(ctx, MT_NO_TRANS, p->trans, mt_shard_cols(p->x, shard, w->shards), mti_param_shard(w, w->value, shard),
                    0.0f, out);
}

/* out = x op(W), what this rank contributes to the sum over the tensor group. */
static mt_status mti_partial_product(mt_context *ctx, const mt_param *w, mt_transpose trans, mt_tensor x, mt_tensor out) {
    mti_partial p;
    p.weight = w;
    p.trans = trans;
    p.x = x;
    return mti_shard_tree(ctx, mti_partial_leaf, &p, 0, w->shards, out);
}

static const mt_param *mti_column_own_bias(const mt_column_parallel_linear *layer) {
    return layer->desc.skip_bias_add ? NULL : layer->bias;
}

/* The activation behind a column-parallel layer, where one operator computes both: y becomes h, and out act(h + bias). */
typedef struct mti_activation_after {
    mt_activation kind;
    mt_tensor bias, out;
} mti_activation_after;

static mt_status mti_column_piece(mt_context *ctx, const mt_column_parallel_linear *layer, const mti_activation_after *act,
                                  mt_tensor x, mt_tensor y, mt_tensor out) {
    if (act) return mt_linear_activation_forward(ctx, act->kind, x, layer->weight->value, act->bias, y, out);
    return mti_column_product(ctx, layer->weight, mti_column_own_bias(layer), x, y);
}

static mt_status mti_column_forward(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor x, mt_tensor y,
                                    const mti_activation_after *act) {
    mt_tensor all, local = y;
    int gather = layer->desc.gather_output && !mti_is_whole(layer->weight), sp = layer->desc.sequence_parallel, i, j;
    mti_chunks c = mti_chunks_of(ctx, layer->tensor, sp, sp, x.rows);
    MT_TRY(mti_gather_chunks(ctx, layer->tensor, sp, &c, x, &all));
    if (gather) MT_TRY(mt_arena_tensor(ctx, y.dtype, all.rows, layer->local_features, &local));
    for (i = 0; i < c.count; i++) {
        MT_TRY(mt_overlap_wait(ctx, i));
        for (j = 0; j < c.pieces; j++)
            MT_TRY(mti_column_piece(ctx, layer, act, mti_piece(&c, all, i, j), mti_piece(&c, local, i, j),
                                    act ? mti_piece(&c, act->out, i, j) : mt_none()));
    }
    return gather ? mti_gather_features(ctx, layer->tensor, layer->weight, local, y) : MT_SUCCESS;
}

/* Checked, act may be NULL. */
static mt_status mti_column_run(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor x, mt_tensor y,
                                const mti_activation_after *act) {
    size_t mark = mt_arena_mark(ctx);
    mt_status status = mti_column_forward(ctx, layer, x, y, act);
    MT_KEEP(status, mt_overlap_wait_all(ctx)); /* before the arena is used again */
    mt_arena_release(ctx, mark);
    return status;
}

/* The checks that forward and backward share; in is what the caller calls x or dx, out what it calls y or dy. */
static mt_status mti_column_check(mt_context *ctx, const char *function, const mt_column_parallel_linear *layer,
                                  const char *in_name, mt_tensor in, const char *out_name, mt_tensor out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_expect_weight(ctx, function, layer ? layer->weight : NULL));
    MT_TRY(mti_expect_like(ctx, function, layer->weight, in_name, in, in.rows, layer->desc.in_features));
    return mti_expect_like(ctx, function, layer->weight, out_name, out,
                           mti_tokens(layer->tensor, layer->desc.sequence_parallel, in.rows),
                           layer->desc.gather_output ? layer->desc.out_features : layer->local_features);
}

MT_API mt_status mt_column_parallel_linear_forward(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor x,
                                                   mt_tensor y, mt_linear_saved *saved) {
    MT_TRY(mti_column_check(ctx, "mt_column_parallel_linear_forward", layer, "x", x, "y", y));
    MT_TRY(mti_expect_travel(ctx, "mt_column_parallel_linear_forward", layer->tensor, layer->desc.sequence_parallel, "x", x,
                             "y", mt_none()));
    MT_TRY(mti_column_run(ctx, layer, x, y, NULL));
    if (!saved) return MT_SUCCESS;
    saved->x = x;
    return mti_log(ctx, layer->name, 0, "output", y, 0, layer->desc.gather_output ? NULL : layer->weight);
}

/* dW += dy^T x, dy [tokens, local features], and the gradient of the bias, which may be NULL */
static mt_status mti_column_weight_gradient(mt_context *ctx, const mt_param *w, const mt_param *bias, mt_tensor dy,
                                            mt_tensor x) {
    int s;
    if (!ctx->invariant) return mt_linear_gradients(ctx, dy, x, w->grad, bias ? bias->grad : mt_none());
    if (bias) MT_TRY(mti_column_bias(ctx, bias, dy, mt_bias_backward, 1));
    MT_TRY(mti_canonical(ctx, x, &x));
    for (s = 0; s < w->shards; s++)
        MT_TRY(mti_gemm(ctx, MT_TRANS, MT_NO_TRANS, mt_shard_cols(dy, s, w->shards), x, 1.0f, mti_param_shard(w, w->grad, s)));
    return MT_SUCCESS;
}

/* dx = dy W, whose reduction, ticket 0, is on its way. */
static mt_status mti_column_input_gradient(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor dy,
                                           mt_tensor dx) {
    int sp = layer->desc.sequence_parallel;
    mt_tensor partial;
    MT_TRY(mti_partial_tokens(ctx, layer->tensor, sp, dx, &partial));
    MT_TRY(mti_partial_product(ctx, layer->weight, MT_NO_TRANS, dy, partial));
    MT_TRY(mt_overlap_begin(ctx, layer->tensor, MT_OVERLAP_COLUMN_BACKWARD));
    return mt_overlap_end(ctx, 0, mti_reduce_tokens(ctx, layer->tensor, sp, partial, dx)); /* f backward */
}

/* The input is gathered, ticket 1, under the GEMM of its gradient; that is reduced under the GEMM of the weight's gradient. */
static mt_status mti_column_backward(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor dy, mt_tensor dx,
                                     mt_tensor x) {
    mt_tensor local = dy, all;
    if (layer->desc.gather_output) MT_TRY(mti_local_slice(ctx, layer->weight, dy, &local));
    MT_TRY(mt_overlap_begin(ctx, layer->tensor, layer->desc.sequence_parallel ? MT_OVERLAP_COLUMN_BACKWARD : 0));
    MT_TRY(mt_overlap_end(ctx, 1, mti_all_tokens(ctx, layer->tensor, layer->desc.sequence_parallel, x, &all)));
    if (dx.data) MT_TRY(mti_column_input_gradient(ctx, layer, local, dx));
    MT_TRY(mt_overlap_wait(ctx, 1));
    return mti_column_weight_gradient(ctx, layer->weight, mti_column_own_bias(layer), local, all);
}

MT_API mt_status mt_column_parallel_linear_backward(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor dy,
                                                    mt_tensor dx, const mt_linear_saved *saved) {
    static const char *const function = "mt_column_parallel_linear_backward";
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved) return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_column_check(ctx, function, layer, "saved->x", saved->x, "dy", dy));
    if (dx.data) MT_TRY(mti_expect_like(ctx, function, layer->weight, "dx", dx, saved->x.rows, layer->desc.in_features));
    MT_TRY(mti_expect_travel(ctx, function, layer->tensor, layer->desc.sequence_parallel, "saved->x", saved->x, "dx", dx));
    mark = mt_arena_mark(ctx);
    status = mti_column_backward(ctx, layer, dy, dx, saved->x);
    MT_KEEP(status, mt_overlap_wait_all(ctx)); /* before the arena is used again */
    mt_arena_release(ctx, mark);
    if (status != MT_SUCCESS) return status;
    return mti_log(ctx, layer->name, 0, "input_grad", dx, layer->desc.sequence_parallel, NULL);
}

MT_API mt_status mt_row_parallel_linear_create(mt_context *ctx, mt_params *params, const char *name,
                                               const mt_linear_desc *desc, mt_row_parallel_linear *out) {
    static const char *const function = "mt_row_parallel_linear_create";
    int count;
    MT_TRY(mti_linear_check(ctx, function, params, name, desc, out));
    if (desc->weight || desc->gather_output)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' sets %s, which is for column-parallel layers", function, name,
                        desc->weight ? "weight" : "gather_output");
    memset(out, 0, sizeof *out);
    count = params->count;
    MT_TRY(mti_params_keep(params, count, out, sizeof *out,
                           mti_linear_params(ctx, params, name, desc, MT_SPLIT_COLS, &out->weight, &out->bias)));
    out->desc = *desc;
    out->tensor = params->grid->tensor;
    out->local_features = out->weight->local_features;
    snprintf(out->name, sizeof out->name, "%s", name);
    return MT_SUCCESS;
}

static mt_status mti_row_check(mt_context *ctx, const char *function, const mt_row_parallel_linear *layer,
                               const char *in_name, mt_tensor in, const char *out_name, mt_tensor out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_expect_weight(ctx, function, layer ? layer->weight : NULL));
    MT_TRY(mti_expect_like(ctx, function, layer->weight, in_name, in,
                           mti_tokens(layer->tensor, layer->desc.sequence_parallel, out.rows),
                           layer->desc.input_is_parallel ? layer->local_features : layer->desc.in_features));
    return mti_expect_like(ctx, function, layer->weight, out_name, out, out.rows, layer->desc.out_features);
}

/* A chunk is reduced under the GEMM of the next one. */
static mt_status mti_row_forward(mt_context *ctx, const mt_row_parallel_linear *layer, mt_tensor x, mt_tensor y) {
    int sp = layer->desc.sequence_parallel, i, j;
    mti_chunks c = mti_chunks_of(ctx, layer->tensor, sp, 1, y.rows);
    mt_tensor local = x, partial;
    if (!layer->desc.input_is_parallel) MT_TRY(mti_local_slice(ctx, layer->weight, x, &local));
    MT_TRY(mti_partial_tokens(ctx, layer->tensor, sp, y, &partial));
    for (i = 0; i < c.count; i++) {
        for (j = 0; j < c.pieces; j++)
            MT_TRY(mti_partial_product(ctx, layer->weight, MT_TRANS, mti_piece(&c, local, i, j), mti_piece(&c, partial, i, j)));
        MT_TRY(mt_overlap_begin(ctx, layer->tensor, c.count > 1 ? MT_OVERLAP_ROW_FORWARD : 0));
        MT_TRY(mt_overlap_end(ctx, i, mti_reduce_chunk(ctx, layer->tensor, sp, &c, i, partial, y)));
    }
    MT_TRY(mt_overlap_wait_all(ctx));
    return layer->bias && !layer->desc.skip_bias_add ? mt_bias_forward(ctx, y, layer->bias->value) : MT_SUCCESS;
}

MT_API mt_status mt_row_parallel_linear_forward(mt_context *ctx, const mt_row_parallel_linear *layer, mt_tensor x,
                                                mt_tensor y, mt_linear_saved *saved) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_row_check(ctx, "mt_row_parallel_linear_forward", layer, "x", x, "y", y));
    MT_TRY(mti_expect_travel(ctx, "mt_row_parallel_linear_forward", layer->tensor, 0, "x", x, "y", y));
    mark = mt_arena_mark(ctx);
    status = mti_row_forward(ctx, layer, x, y);
    MT_KEEP(status, mt_overlap_wait_all(ctx));
    mt_arena_release(ctx, mark);
    if (status != MT_SUCCESS || !saved) return status;
    saved->x = x;
    return mti_log(ctx, layer->name, 0, "output", y, layer->desc.sequence_parallel, NULL);
}

/* The activation before a row-parallel layer, where the gradient is taken through it, too. */
typedef struct mti_activation_before {
    mt_activation kind;
    mt_tensor h, dbias;
} mti_activation_before;

/* dx [tokens, local features] = dy W; with act, and h for its h, through the activation. */
static mt_status mti_row_input_gradient(mt_context *ctx, const mt_param *w, const mti_activation_before *act, mt_tensor dy,
                                        mt_tensor h, mt_tensor dx) {
    int s;
    if (act) return mt_linear_activation_backward(ctx, act->kind, dy, w->value, h, dx, act->dbias);
    for (s = 0; s < w->shards; s++)
        MT_TRY(mti_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, dy, mti_param_shard(w, w->value, s), 0.0f,
                        mt_shard_cols(dx, s, w->shards)));
    return MT_SUCCESS;
}

/* dW += dy^T x */
static mt_status mti_row_weight_gradient(mt_context *ctx, const mt_param *w, mt_tensor dy, mt_tensor x) {
    int s;
    for (s = 0; s < w->shards; s++)
        MT_TRY(mti_gemm(ctx, MT_TRANS, MT_NO_TRANS, dy, mt_shard_cols(x, s, w->shards), 1.0f, mti_param_shard(w, w->grad, s)));
    return MT_SUCCESS;
}

/* mti_token_operator: the bias gradient of some rows of dy, which is arg. */
static mt_status mti_row_bias_gradient(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor dbias,
                                       mt_tensor none) {
    (void)none;
    return mt_bias_backward(ctx, mt_tensor_rows(*(const mt_tensor *)arg, first, count), dbias);
}

static mt_status mti_row_backward(mt_context *ctx, const mt_row_parallel_linear *layer, mt_tensor dy, mt_tensor dx,
                                  mt_tensor x, const mti_activation_before *act) {
    int sp = layer->desc.sequence_parallel, gather = !layer->desc.input_is_parallel && !mti_is_whole(layer->weight), i, j;
    mti_chunks c = mti_chunks_of(ctx, layer->tensor, sp, sp, dy.rows);
    mt_tensor all, local = dx;
    MT_TRY(mti_gather_chunks(ctx, layer->tensor, sp, &c, dy, &all));
    if (layer->bias && !layer->desc.skip_bias_add)
        MT_TRY(mti_sum_over_tokens(ctx, layer->tensor, sp, mti_row_bias_gradient, &dy, dy.rows, layer->bias->grad, mt_none()));
    if (!layer->desc.input_is_parallel) MT_TRY(mti_local_slice(ctx, layer->weight, x, &x));
    if (gather && dx.data) MT_TRY(mt_arena_tensor(ctx, dx.dtype, all.rows, layer->local_features, &local));
    MT_TRY(mti_canonical(ctx, all, &all)); /* once for all shards */
    for (i = 0; i < c.count; i++) {
        MT_TRY(mt_overlap_wait(ctx, i));
        for (j = 0; j < c.pieces && dx.data; j++)
            MT_TRY(mti_row_input_gradient(ctx, layer->weight, act, mti_piece(&c, all, i, j),
                                          act ? mti_piece(&c, act->h, i, j) : mt_none(), mti_piece(&c, local, i, j)));
    }
    MT_TRY(mti_row_weight_gradient(ctx, layer->weight, all, x));
    return gather && dx.data ? mti_gather_features(ctx, layer->tensor, layer->weight, local, dx) : MT_SUCCESS;
}

/* Checked, act may be NULL. */
static mt_status mti_row_run_backward(mt_context *ctx, const mt_row_parallel_linear *layer, mt_tensor dy, mt_tensor dx,
                                      mt_tensor x, const mti_activation_before *act) {
    size_t mark = mt_arena_mark(ctx);
    mt_status status = mti_row_backward(ctx, layer, dy, dx, x, act);
    MT_KEEP(status, mt_overlap_wait_all(ctx));
    mt_arena_release(ctx, mark);
    return status;
}

MT_API mt_status mt_row_parallel_linear_backward(mt_context *ctx, const mt_row_parallel_linear *layer, mt_tensor dy,
                                                 mt_tensor dx, const mt_linear_saved *saved) {
    static const char *const function = "mt_row_parallel_linear_backward";
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved) return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_row_check(ctx, function, layer, "saved->x", saved->x, "dy", dy));
    if (dx.data) MT_TRY(mti_expect_like(ctx, function, layer->weight, "dx", dx, saved->x.rows, saved->x.cols));
    MT_TRY(mti_expect_travel(ctx, function, layer->tensor, layer->desc.sequence_parallel, "dy", dy, "dx", mt_none()));
    if (layer->bias && !layer->desc.skip_bias_add)
        MT_TRY(mti_expect_token_shards(ctx, function, mti_tokens(layer->tensor, layer->desc.sequence_parallel, dy.rows)));
    MT_TRY(mti_row_run_backward(ctx, layer, dy, dx, saved->x, NULL));
    return mti_log(ctx, layer->name, 0, "input_grad", dx, 0, layer->desc.input_is_parallel ? layer->weight : NULL);
}

/* ---- >>vocab ------------------------------------------------------------------------------------------------------ */

MT_API mt_status mt_vocab_parallel_embedding_create(mt_context *ctx, mt_params *params, const char *name,
                                                    const mt_embedding_desc *desc, mt_vocab_parallel_embedding *out) {
    mt_param_desc w;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || !desc || !out)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_vocab_parallel_embedding_create: params, desc or out is NULL");
    if (desc->vocab < 1 || desc->vocab > INT32_MAX || desc->features < 1)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_vocab_parallel_embedding_create: vocab %lld, features %lld",
                        (long long)desc->vocab, (long long)desc->features);
    memset(out, 0, sizeof *out);
    memset(&w, 0, sizeof w);
    w.rows = desc->vocab;
    w.cols = desc->features;
    w.placement = MT_SPLIT_ROWS;
    w.init_std = mti_default(desc->init_std, 0.02f);
    w.weight_decay = 1;
    w.shared_embedding = desc->shared;
    MT_TRY(mti_add_param(ctx, params, name, "weight", w, &out->weight));
    out->desc = *desc;
    out->tensor = params->grid->tensor;
    out->first_row = params->grid->tensor_rank * out->weight->value.rows;
    return MT_SUCCESS;
}

static mt_status mti_embedding_check(mt_context *ctx, const char *function, const mt_vocab_parallel_embedding *layer,
                                     const int32_t *ids, int64_t tokens, const char *what, mt_tensor y) {
    int64_t rows = 0;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_expect_weight(ctx, function, layer ? layer->weight : NULL));
    MT_TRY(mti_rows(ctx, function, layer->tensor, layer->desc.sequence_parallel, tokens, &rows));
    MT_TRY(mti_expect_like(ctx, function, layer->weight, what, y, rows, layer->desc.features));
    return ctx->ids_checked ? MT_SUCCESS : mt_ids_check(ctx, "token id", ids, tokens, layer->desc.vocab, 0);
}

/* One summand is the row, the others are 0: their sum is exact in any order. But 0 + -0 is 0, so in invariant mode a single
   rank adds a 0, too. */
static mt_status mti_embedding_lookup(mt_context *ctx, const mt_vocab_parallel_embedding *layer, const int32_t *ids,
                                      mt_tensor y) {
    if (ctx->invariant) MT_TRY(mt_fill(ctx, y, 0.0f));
    return mt_embedding_forward(ctx, layer->weight->value, layer->first_row, ids, ctx->invariant ? 1.0f : 0.0f, y);
}

MT_API mt_status mt_vocab_parallel_embedding_forward(mt_context *ctx, const mt_vocab_parallel_embedding *layer,
                                                     const int32_t *ids, int64_t tokens, mt_tensor y) {
    size_t mark;
    mt_tensor partial;
    mt_status status;
    MT_TRY(mti_embedding_check(ctx, "mt_vocab_parallel_embedding_forward", layer, ids, tokens, "y", y));
    MT_TRY(mti_expect_travel(ctx, "mt_vocab_parallel_embedding_forward", layer->tensor, 0, "", y, "y", y));
    mark = mt_arena_mark(ctx);
    status = mti_partial_tokens(ctx, layer->tensor, layer->desc.sequence_parallel, y, &partial);
    if (status == MT_SUCCESS) status = mti_embedding_lookup(ctx, layer, ids, partial);
    if (status == MT_SUCCESS)
        status = mti_reduce_tokens(ctx, layer->tensor, layer->desc.sequence_parallel, partial, y);
    mt_arena_release(ctx, mark);
    return status;
}

MT_API mt_status mt_vocab_parallel_embedding_backward(mt_context *ctx, const mt_vocab_parallel_embedding *layer,
                                                      const int32_t *ids, int64_t tokens, mt_tensor dy) {
    size_t mark;
    mt_tensor all;
    mt_status status;
    MT_TRY(mti_embedding_check(ctx, "mt_vocab_parallel_embedding_backward", layer, ids, tokens, "dy", dy));
    MT_TRY(mti_expect_travel(ctx, "mt_vocab_parallel_embedding_backward", layer->tensor, layer->desc.sequence_parallel, "dy",
                             dy, "", mt_none()));
    mark = mt_arena_mark(ctx);
    status = mti_all_tokens(ctx, layer->tensor, layer->desc.sequence_parallel, dy, &all);
    if (status == MT_SUCCESS) status = mt_embedding_backward(ctx, all, layer->first_row, ids, layer->weight->grad);
    mt_arena_release(ctx, mark);
    return status;
}

/* Of virtual shard `shard` of this rank. */
static mt_cross_entropy_shape mti_cross_entropy_shape(mt_comm *tensor, const mt_cross_entropy_desc *desc,
                                                      int64_t shard_cols, int shard, int shards) {
    mt_cross_entropy_shape shape;
    shape.vocab = desc->vocab;
    shape.first_col = ((int64_t)mt_comm_rank(tensor) * shards + shard) * shard_cols;
    shape.label_smoothing = desc->label_smoothing;
    shape.ignore_index = desc->ignore_index;
    return shape;
}

static mt_status mti_cross_entropy_check(mt_context *ctx, const char *function, mt_comm *tensor,
                                         const mt_cross_entropy_desc *desc, mt_tensor logits) {
    int shards;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!tensor || !desc) return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, tensor ? "desc" : "tensor");
    if (desc->vocab < 1 || !(desc->label_smoothing >= 0.0f && desc->label_smoothing < 1.0f))
        return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: vocab %lld, label_smoothing %g", function, (long long)desc->vocab,
                        (double)desc->label_smoothing);
    MT_TRY(mti_expect_shards(ctx, function, tensor));
    shards = mti_shards(ctx, tensor);
    return mti_expect_float_shape(ctx, function, "logits", logits, logits.rows,
                                  shards * mti_shard_features(desc->vocab, 1, 1, shards * mt_comm_size(tensor)));
}

/* Four scalars per token and shard meet in one all-gather (Megatron-LM uses three all-reduces: maximum, target, sum). */
static mt_status mti_cross_entropy_forward(mt_context *ctx, mt_comm *tensor, const mt_cross_entropy_desc *desc,
                                           mt_tensor logits, const int32_t *targets, mt_tensor loss, mt_tensor lse) {
    int s, shards = mti_shards(ctx, tensor), all_shards = shards * mt_comm_size(tensor);
    int64_t rows = logits.rows, cols = logits.cols / shards;
    mt_cross_entropy_shape shape;
    mt_tensor all, own;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, rows * all_shards, 4, &all));
    own = mt_tensor_rows(all, mt_comm_rank(tensor) * shards * rows, shards * rows);
    for (s = 0; s < shards; s++) {
        shape = mti_cross_entropy_shape(tensor, desc, cols, s, shards);
        MT_TRY(mt_cross_entropy_stats(ctx, &shape, mt_shard_cols(logits, s, shards), targets,
                                      mt_tensor_rows(own, s * rows, rows)));
    }
    MT_TRY(mt_all_gather(ctx, tensor, own.data, all.data, (size_t)(shards * rows) * 4, MT_F32));
    return mt_cross_entropy_combine(ctx, &shape, all, all_shards, targets, loss, lse);
}

/* What forward is given. */
static mt_status mti_cross_entropy_expect(mt_context *ctx, const char *function, mt_comm *tensor,
                                          const mt_cross_entropy_desc *desc, mt_tensor logits, const int32_t *targets,
                                          mt_tensor loss) {
    MT_TRY(mti_cross_entropy_check(ctx, function, tensor, desc, logits));
    MT_TRY(mti_expect_shape(ctx, function, "loss", loss, 1, logits.rows));
    if (ctx->ids_checked) return MT_SUCCESS;
    return mt_ids_check(ctx, "target", targets, logits.rows, desc->vocab, mti_ignore_index(desc->ignore_index));
}

MT_API mt_status mt_vocab_parallel_cross_entropy_forward(mt_context *ctx, mt_comm *tensor, const mt_cross_entropy_desc *desc,
                                                         mt_tensor logits, const int32_t *targets, mt_tensor loss,
                                                         mt_cross_entropy_saved *saved) {
    static const char *const function = "mt_vocab_parallel_cross_entropy_forward";
    mt_tensor lse;
    size_t keep, mark;
    mt_status status;
    MT_TRY(mti_cross_entropy_expect(ctx, function, tensor, desc, logits, targets, loss));
    keep = mt_arena_mark(ctx);
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 2, logits.rows, &lse));
    mark = mt_arena_mark(ctx);
    status = mti_cross_entropy_forward(ctx, tensor, desc, logits, targets, loss, lse);
    mt_arena_release(ctx, saved && status == MT_SUCCESS ? mark : keep);
    if (status != MT_SUCCESS || !saved) return status;
    saved->logits = logits;
    saved->lse = lse;
    saved->targets = targets;
    return MT_SUCCESS;
}

static mt_status mti_cross_entropy_backward(mt_context *ctx, mt_comm *tensor, const mt_cross_entropy_desc *desc,
                                            mt_tensor logits, const int32_t *targets, mt_tensor lse, mt_tensor dloss,
                                            float scale) {
    int s, shards = mti_shards(ctx, tensor);
    for (s = 0; s < shards; s++) {
        mt_cross_entropy_shape shape = mti_cross_entropy_shape(tensor, desc, logits.cols / shards, s, shards);
        MT_TRY(mt_cross_entropy_backward(ctx, &shape, mt_shard_cols(logits, s, shards), targets, lse, dloss, scale));
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_vocab_parallel_cross_entropy_backward(mt_context *ctx, mt_comm *tensor,
                                                          const mt_cross_entropy_desc *desc, mt_tensor dloss, float scale,
                                                          const mt_cross_entropy_saved *saved) {
    static const char *const function = "mt_vocab_parallel_cross_entropy_backward";
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved) return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_cross_entropy_check(ctx, function, tensor, desc, saved->logits));
    return mti_cross_entropy_backward(ctx, tensor, desc, saved->logits, saved->targets, saved->lse, dloss, scale);
}

MT_API mt_status mt_vocab_parallel_cross_entropy_forward_backward(mt_context *ctx, mt_comm *tensor,
                                                                  const mt_cross_entropy_desc *desc, mt_tensor logits,
                                                                  const int32_t *targets, mt_tensor dloss, float scale,
                                                                  mt_tensor loss) {
    static const char *const function = "mt_vocab_parallel_cross_entropy_forward_backward";
    mt_tensor lse;
    size_t mark;
    mt_status status;
    MT_TRY(mti_cross_entropy_expect(ctx, function, tensor, desc, logits, targets, loss));
    if (dloss.data) MT_TRY(mti_expect_shape(ctx, function, "dloss", dloss, 1, logits.rows));
    if (mt_comm_size(tensor) == 1 && mti_shards(ctx, tensor) == 1) {
        mt_cross_entropy_shape whole = mti_cross_entropy_shape(tensor, desc, logits.cols, 0, 1);
        return mt_cross_entropy_forward_backward(ctx, &whole, logits, targets, dloss, scale, loss);
    }
    mark = mt_arena_mark(ctx);
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 2, logits.rows, &lse));
    status = mti_cross_entropy_forward(ctx, tensor, desc, logits, targets, loss, lse);
    if (status == MT_SUCCESS) status = mti_cross_entropy_backward(ctx, tensor, desc, logits, targets, lse, dloss, scale);
    mt_arena_release(ctx, mark);
    return status;
}

/* ---- >>sync ------------------------------------------------------------------------------------------------------- */

/* The subtree of gradients that 2^level micro-batches made. */
static mt_tensor mti_gradient_level(const mt_params *params, int level) {
    return mt_tensor_f32(params->subtrees + level * params->elements, 1, params->elements);
}

/* Sums of each tensor rank's own tokens become sums of all. */
static mt_status mti_sync_partial(mt_context *ctx, mt_params *params) {
    if (params->partial == 0) return MT_SUCCESS;
    return mt_all_reduce(ctx, params->grid->tensor, params->grads, params->grads, (size_t)params->partial, MT_F32, MT_SUM);
}

/* A binary counter: micro-batch n joins as many finished subtrees as n has trailing ones, so that at most log2(n) wait. The
   one mechanism for the batch, as mti_shard_tree is for what one call computes. */
MT_API mt_status mt_accumulate_gradients(mt_context *ctx, mt_params *params) {
    int64_t n, level;
    MT_TRY(mti_params_ready(ctx, params, "mt_accumulate_gradients"));
    if (!ctx->invariant) return MT_SUCCESS;
    n = params->micro_batches;
    if (n >= (int64_t)1 << params->levels)
        return mti_fail(ctx, MT_ERR_SHAPE, "mt_accumulate_gradients: more than %lld micro-batches on each of %d data ranks; "
                        "mt_context_desc.invariant_data is %d", (long long)n, params->grid->data_size, ctx->invariant_data);
    MT_TRY(mti_sync_partial(ctx, params));
    for (level = 0; n >> level & 1; level++)
        MT_TRY(mt_add(ctx, mti_gradient_level(params, (int)level), mti_gradients(params), mti_gradients(params)));
    params->micro_batches++;
    if (level == params->levels) return MT_SUCCESS; /* that is all there can be */
    MT_TRY(mt_copy(ctx, mti_gradients(params), mti_gradient_level(params, (int)level)));
    return mt_fill(ctx, mti_gradients(params), 0.0f);
}

/* The micro-batches of this rank, in params->grads. */
static mt_status mti_join_micro_batches(mt_context *ctx, mt_params *params) {
    int64_t n = params->micro_batches;
    int level = 0;
    if (n == 0) return mti_sync_partial(ctx, params); /* one micro-batch, or not in invariant mode */
    if ((n & (n - 1)) != 0)
        return mti_fail(ctx, MT_ERR_SHAPE, "mt_sync_gradients: %lld micro-batches on this rank; in invariant mode their number "
                        "must be a power of two", (long long)n);
    while ((int64_t)1 << level < n) level++;
    params->micro_batches = 0;
    if (level == params->levels) return MT_SUCCESS;
    return mt_copy(ctx, mti_gradient_level(params, level), mti_gradients(params));
}

MT_API mt_status mt_sync_gradients(mt_context *ctx, mt_params *params) {
    const mt_grid *grid;
    int i;
    MT_TRY(mti_params_ready(ctx, params, "mt_sync_gradients"));
    grid = params->grid;
    MT_TRY(mti_join_micro_batches(ctx, params));
    for (i = 0; grid->embedding && i < params->count; i++) {
        mt_tensor grad = params->list[i]->grad;
        if (!params->list[i]->desc.shared_embedding) continue;
        MT_TRY(mt_all_reduce(ctx, grid->embedding, grad.data, grad.data, (size_t)(grad.rows * grad.cols), MT_F32, MT_SUM));
    }
    return mt_all_reduce(ctx, grid->data, params->grads, params->grads, (size_t)params->elements, MT_F32, MT_SUM);
}

/* Whether this rank's copy of a parameter is the one that counts towards the norm. */
static int mti_counts_in_norm(const mt_grid *grid, const mt_param *p) {
    if (p->desc.placement == MT_REPLICATED && grid->tensor_rank != 0) return 0;
    return !(p->desc.shared_embedding && grid->pipeline_size > 1 && grid->pipeline_rank == grid->pipeline_size - 1);
}

/* Adds the squares of every parameter into sums [1, 1]. */
static mt_status mti_sum_squares(mt_context *ctx, mt_params *params, mt_tensor sums) {
    int i;
    for (i = 0; i < params->count; i++)
        if (mti_counts_in_norm(params->grid, params->list[i]))
            MT_TRY(mt_sum_of_squares(ctx, params->list[i]->grad, sums));
    return mt_all_reduce(ctx, params->grid->model, sums.data, sums.data, 1, MT_F32, MT_SUM);
}

/* The same in invariant mode: a number for every parameter and each of the V virtual shards, which only one rank of the tensor
   group knows, so that the all-reduce is exact; then a tree over the shards. Parameters are added one after the other. */
static mt_status mti_sum_squares_invariant(mt_context *ctx, mt_params *params, mt_tensor sums) {
    int i, s, v = ctx->invariant;
    mt_tensor all;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, v, params->count, &all));
    MT_TRY(mt_fill(ctx, all, 0.0f));
    for (i = 0; i < params->count; i++) {
        const mt_param *p = params->list[i];
        for (s = 0; s < p->shards && mti_counts_in_norm(params->grid, p); s++)
            MT_TRY(mt_sum_of_squares(ctx, mti_param_shard(p, p->grad, s),
                                     mt_tensor_cols(mt_tensor_rows(all, p->tensor_rank * p->shards + s, 1), i, 1)));
    }
    MT_TRY(mt_all_reduce(ctx, params->grid->tensor, all.data, all.data, (size_t)v * (size_t)params->count, MT_F32, MT_SUM));
    MT_TRY(mt_tree_sum(ctx, all));
    MT_TRY(mt_sum(ctx, mt_tensor_rows(all, 0, 1), sums));
    return mt_all_reduce(ctx, params->grid->pipeline, sums.data, sums.data, 1, MT_F32, MT_SUM);
}

static mt_status mti_grad_norm(mt_context *ctx, mt_params *params, float *norm) {
    mt_tensor sum;
    float squares;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, 1, &sum));
    MT_TRY(mt_fill(ctx, sum, 0.0f));
    MT_TRY(ctx->invariant ? mti_sum_squares_invariant(ctx, params, sum) : mti_sum_squares(ctx, params, sum));
    MT_TRY(mt_download(ctx, sum, &squares));
    *norm = (float)sqrt((double)squares);
    return MT_SUCCESS;
}

MT_API mt_status mt_grad_norm(mt_context *ctx, mt_params *params, float *norm) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_params_ready(ctx, params, "mt_grad_norm"));
    if (!norm) return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_grad_norm: norm is NULL");
    mark = mt_arena_mark(ctx);
    status = mti_grad_norm(ctx, params, norm);
    mt_arena_release(ctx, mark);
    return status;
}

MT_API float mt_clip_coefficient(float norm, float max_norm) {
    float c = max_norm / (norm + 1e-6f);
    return max_norm > 0.0f && c < 1.0f ? c : 1.0f;
}

/* ---- >>loss-scaler ------------------------------------------------------------------------------------------------- */

static mt_status mti_loss_scaler_check(mt_context *ctx, const mt_loss_scaler_desc *d) {
    if (d->min_scale > 0.0f && d->initial_scale >= d->min_scale && d->initial_scale <= FLT_MAX && d->growth >= 1.0f &&
        d->growth <= FLT_MAX && d->backoff > 0.0f && d->backoff <= 1.0f && d->growth_interval > 0 && d->hysteresis > 0)
        return MT_SUCCESS;
    return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_loss_scaler_create: initial_scale %g, min_scale %g, growth %g, backoff %g, "
                    "growth_interval %d, hysteresis %d", (double)d->initial_scale, (double)d->min_scale, (double)d->growth,
                    (double)d->backoff, d->growth_interval, d->hysteresis);
}

MT_API mt_status mt_loss_scaler_create(mt_context *ctx, const mt_loss_scaler_desc *desc, mt_loss_scaler *out) {
    mt_loss_scaler_desc d;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!out) return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_loss_scaler_create: out is NULL");
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    d.initial_scale = mti_default(d.initial_scale, 4294967296.0f);
    d.min_scale = mti_default(d.min_scale, 1.0f);
    d.growth = mti_default(d.growth, 2.0f);
    d.backoff = mti_default(d.backoff, 0.5f);
    if (!d.growth_interval) d.growth_interval = 1000;
    if (!d.hysteresis) d.hysteresis = 2;
    MT_TRY(mti_loss_scaler_check(ctx, &d));
    memset(out, 0, sizeof *out);
    out->desc = d;
    out->scale = d.initial_scale;
    return MT_SUCCESS;
}

static void mti_loss_scaler_shrink(mt_loss_scaler *s) {
    s->skipped++;
    s->good_steps = 0;
    if (++s->overflows < s->desc.hysteresis) return;
    s->scale *= s->desc.backoff;
    if (s->scale < s->desc.min_scale) s->scale = s->desc.min_scale;
}

static void mti_loss_scaler_grow(mt_loss_scaler *s) {
    if (++s->good_steps < s->desc.growth_interval) return;
    s->good_steps = s->overflows = 0;
    if (s->scale * s->desc.growth <= FLT_MAX) s->scale *= s->desc.growth;
}

MT_API float mt_loss_scaler_update(mt_loss_scaler *scaler, float *norm) {
    float unscale = 1.0f / scaler->scale;
    *norm *= unscale;
    if (!(*norm <= FLT_MAX)) {
        mti_loss_scaler_shrink(scaler);
        return 0.0f;
    }
    mti_loss_scaler_grow(scaler);
    return unscale;
}

/* ---- >>optimizer -------------------------------------------------------------------------------------------------- */

static mt_status mti_optimizer_check(mt_context *ctx, const mt_params *params, const mt_optimizer_desc *d) {
    if (d->stochastic_rounding && params->dtype == MT_F32)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_optimizer_create: stochastic_rounding is for bf16 and f16 parameters, these "
                        "are f32");
    if (d->beta1 >= 0.0f && d->beta1 < 1.0f && d->beta2 >= 0.0f && d->beta2 < 1.0f && d->eps > 0.0f &&
        d->weight_decay >= 0.0f)
        return MT_SUCCESS;
    return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_optimizer_create: beta1 %g, beta2 %g, eps %g, weight_decay %g",
                    (double)d->beta1, (double)d->beta2, (double)d->eps, (double)d->weight_decay);
}

/* n elements for each parameter's gradient: m, v or masters. */
static mt_status mti_optimizer_alloc(mt_context *ctx, mt_optimizer *optimizer, float **out) {
    void *memory;
    MT_TRY(mt_context_alloc(ctx, (size_t)optimizer->elements * sizeof(float), &memory));
    *out = (float *)memory;
    return MT_SUCCESS;
}

/* The part of `state` (m, v or masters) that belongs to a parameter of the optimizer's registry. */
static mt_tensor mti_optimizer_shard(const mt_optimizer *optimizer, const mt_param *p, float *state) {
    mt_tensor t = p->grad;
    t.data = state + ((const float *)p->grad.data - optimizer->params->grads);
    return t;
}

static mt_tensor mti_optimizer_master(const mt_optimizer *optimizer, const mt_param *p) {
    return optimizer->master ? mti_optimizer_shard(optimizer, p, optimizer->master) : mt_none();
}

static mt_status mti_optimizer_memory(mt_context *ctx, mt_optimizer *optimizer) {
    int i, masters = optimizer->params->dtype != MT_F32 && !optimizer->desc.stochastic_rounding;
    MT_TRY(mti_optimizer_alloc(ctx, optimizer, &optimizer->m));
    MT_TRY(mti_optimizer_alloc(ctx, optimizer, &optimizer->v));
    if (masters) MT_TRY(mti_optimizer_alloc(ctx, optimizer, &optimizer->master));
    for (i = 0; masters && i < optimizer->params->count; i++) {
        const mt_param *p = optimizer->params->list[i];
        MT_TRY(mt_convert(ctx, p->value, mti_optimizer_master(optimizer, p)));
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_optimizer_create(mt_context *ctx, mt_params *params, const mt_optimizer_desc *desc, mt_optimizer *out) {
    mt_optimizer_desc d;
    mt_status status;
    MT_TRY(mti_params_ready(ctx, params, "mt_optimizer_create"));
    if (!out) return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_optimizer_create: out is NULL");
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    d.beta1 = mti_default(d.beta1, 0.9f);
    d.beta2 = mti_default(d.beta2, 0.999f);
    d.eps = mti_default(d.eps, 1e-8f);
    MT_TRY(mti_optimizer_check(ctx, params, &d));
    memset(out, 0, sizeof *out);
    out->desc = d;
    out->params = params;
    out->elements = params->elements;
    status = mti_optimizer_memory(ctx, out);
    if (status != MT_SUCCESS) mt_optimizer_destroy(ctx, out);
    return status;
}

MT_API void mt_optimizer_destroy(mt_context *ctx, mt_optimizer *optimizer) {
    size_t bytes;
    if (!ctx || !optimizer || !optimizer->params) return;
    bytes = (size_t)optimizer->elements * sizeof(float);
    mt_context_free(ctx, optimizer->m, bytes);
    mt_context_free(ctx, optimizer->v, bytes);
    mt_context_free(ctx, optimizer->master, bytes);
    memset(optimizer, 0, sizeof *optimizer);
}

static mt_status mti_optimizer_shard_check(mt_context *ctx, const char *function, const mt_optimizer *optimizer,
                                           const mt_param *param, const char *name, const mt_tensor *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!param || !out) return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, param ? name : "param");
    if (!optimizer || !optimizer->params) return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: no optimizer", function);
    if (mt_params_find(optimizer->params, param->name) == param) return MT_SUCCESS;
    return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' is not of this optimizer's registry", function, param->name);
}

MT_API mt_status mt_optimizer_moments(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param, mt_tensor *m,
                                      mt_tensor *v) {
    MT_TRY(mti_optimizer_shard_check(ctx, "mt_optimizer_moments", optimizer, param, "m or v",
                                     m && v ? m : NULL));
    *m = mti_optimizer_shard(optimizer, param, optimizer->m);
    *v = mti_optimizer_shard(optimizer, param, optimizer->v);
    return MT_SUCCESS;
}

MT_API mt_status mt_optimizer_master(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                     mt_tensor *master) {
    MT_TRY(mti_optimizer_shard_check(ctx, "mt_optimizer_master", optimizer, param, "master", master));
    *master = optimizer->master ? mti_optimizer_master(optimizer, param) : param->value;
    return MT_SUCCESS;
}

/* A view of the master, which may not be there. */
static mt_tensor mti_block_of_any(const mt_param *p, mt_tensor t, mti_block b) {
    return t.data ? mti_param_block_view(p, t, b) : t;
}

/* Block by block: those know their place in the whole parameter, and padding stays the zero that it is. */
static mt_status mti_optimizer_update(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *p, mt_adamw *hyper) {
    mt_tensor m = mti_optimizer_shard(optimizer, p, optimizer->m), v = mti_optimizer_shard(optimizer, p, optimizer->v);
    mt_tensor master = mti_optimizer_master(optimizer, p);
    int64_t i;
    mt_random at;
    for (i = 0; i < mti_param_blocks(p); i++) {
        mti_block b = mti_param_block(p, p->tensor_rank, i);
        if (b.count == 0) continue;
        at = mti_param_random(p, b, optimizer->desc.seed, (uint64_t)hyper->step);
        hyper->stochastic_rounding = optimizer->desc.stochastic_rounding ? &at : NULL;
        MT_TRY(mt_adamw_step(ctx, hyper, mti_param_block_view(p, p->value, b), mti_block_of_any(p, master, b),
                             mti_param_block_view(p, p->grad, b), mti_param_block_view(p, m, b),
                             mti_param_block_view(p, v, b)));
    }
    return MT_SUCCESS;
}

static mt_status mti_optimizer_step(mt_context *ctx, mt_optimizer *optimizer, float lr, float grad_scale) {
    mt_adamw hyper;
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!optimizer || !optimizer->params) return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_optimizer_step: no optimizer");
    hyper.lr = lr;
    hyper.beta1 = optimizer->desc.beta1;
    hyper.beta2 = optimizer->desc.beta2;
    hyper.eps = optimizer->desc.eps;
    hyper.grad_scale = grad_scale;
    hyper.step = optimizer->step + 1;
    for (i = 0; i < optimizer->params->count; i++) {
        const mt_param *p = optimizer->params->list[i];
        hyper.weight_decay = p->desc.weight_decay ? optimizer->desc.weight_decay : 0.0f;
        MT_TRY(mti_optimizer_update(ctx, optimizer, p, &hyper));
    }
    optimizer->step = hyper.step;
    return MT_SUCCESS;
}

MT_API mt_status mt_optimizer_step(mt_context *ctx, mt_optimizer *optimizer, float lr, float grad_scale) {
    return MTI_RANGE("optimizer step", mti_optimizer_step(ctx, optimizer, lr, grad_scale));
}

MT_API float mt_cosine_schedule(int64_t step, int64_t warmup, int64_t total, float lr, float min_lr) {
    double progress;
    if (step < warmup) return (float)((double)lr * (double)(step + 1) / (double)warmup);
    if (step >= total) return min_lr;
    progress = (double)(step - warmup) / (double)(total - warmup);
    return (float)((double)min_lr + 0.5 * ((double)lr - (double)min_lr) * (1.0 + cos(3.14159265358979323846 * progress)));
}

#ifdef __cplusplus
}
#endif

#endif /* MEGATRON_IMPLEMENTATION */
