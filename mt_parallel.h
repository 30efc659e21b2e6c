/* mt_parallel.h - process grid, parallel parameters, column- and row-parallel linear, vocabulary-parallel embedding and
   cross-entropy, gradient sync and norm, AdamW.

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

   Rooms of the implementation: >>grid >>params >>linear >>vocab >>sync >>optimizer                                        */

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

/* A parameter of this rank. value and grad are shards [local rows, local cols], contiguous, fp32, valid after
   mt_params_init; read and write them freely. */
typedef struct mt_param {
    mt_param_desc desc; /* desc.name points to name */
    char name[MT_NAME_MAX];
    mt_tensor value, grad;
    int tensor_rank, tensor_size;
} mt_param;

typedef struct mt_params mt_params; /* opaque: the registry */

/* grid must outlive the registry. ctx is the one that all its parameters live on. */
MT_API mt_status mt_params_create(mt_context *ctx, const mt_grid *grid, mt_params **out);
MT_API void mt_params_destroy(mt_params *params); /* frees values, gradients, descriptions; NULL is allowed */
MT_API mt_status mt_params_add(mt_context *ctx, mt_params *params, const mt_param_desc *desc, mt_param **out);

/* Allocates values and gradients (one piece of memory each) and fills the values by global element with the given seed: any
   split starts from the same model. Afterwards no parameter can be added. A second call fills again. */
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
   shard is param->value, param->grad or any tensor of their shape (optimizer state). Scratch comes from the arena. */
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
    mt_linear_desc desc;
    mt_param *weight, *bias; /* bias is NULL with no_bias */
    mt_comm *tensor;
    int64_t local_features;
} mt_column_parallel_linear;

typedef struct mt_row_parallel_linear {
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

/* logits [tokens, local vocabulary] as an output head without gather_output leaves them; targets [tokens]; loss [1, tokens].
   One collective over `tensor`: an all-gather of four scalars per token. backward turns the saved logits, in place, into
   scale * dloss[i] * dlogits (dloss [1, tokens] or mt_none() for ones). */
MT_API mt_status mt_vocab_parallel_cross_entropy_forward(mt_context *ctx, mt_comm *tensor, const mt_cross_entropy_desc *desc,
                                                         mt_tensor logits, const int32_t *targets, mt_tensor loss,
                                                         mt_cross_entropy_saved *saved);
MT_API mt_status mt_vocab_parallel_cross_entropy_backward(mt_context *ctx, mt_comm *tensor,
                                                          const mt_cross_entropy_desc *desc, mt_tensor dloss, float scale,
                                                          const mt_cross_entropy_saved *saved);

/* ---- gradients ---------------------------------------------------------------------------------------------------- */

/* After the last backward of a step: sums sequence_partial gradients over the tensor group (one all-reduce), shared
   embeddings over the embedding group, and everything over the data group (one all-reduce). */
MT_API mt_status mt_sync_gradients(mt_context *ctx, mt_params *params);

/* *norm = L2 norm of the whole model's gradient, each element counted once; one all-reduce of a scalar over the model group.
   Call it after mt_sync_gradients. Not finite when a gradient is not. */
MT_API mt_status mt_grad_norm(mt_context *ctx, mt_params *params, float *norm);

/* The factor that clips a gradient of this norm to max_norm: min(1, max_norm / (norm + 1e-6)), 1 when max_norm <= 0. Look
   first whether the norm is finite: no factor mends a gradient that is not. */
MT_API float mt_clip_coefficient(float norm, float max_norm);

/* ---- optimizer ---------------------------------------------------------------------------------------------------- */

typedef struct mt_optimizer_desc {
    float beta1, beta2;  /* 0: 0.9, 0.999 */
    float eps;           /* 0: 1e-8 */
    float weight_decay;  /* of parameters with desc.weight_decay; 0: none */
} mt_optimizer_desc;

typedef struct mt_optimizer {
    mt_optimizer_desc desc;
    mt_params *params;
    float *m, *v;     /* first and second moments, see mt_optimizer_moments */
    int64_t elements; /* of m and of v */
    int64_t step;     /* steps done */
} mt_optimizer;

MT_API mt_status mt_optimizer_create(mt_context *ctx, mt_params *params, const mt_optimizer_desc *desc, mt_optimizer *out);
MT_API void mt_optimizer_destroy(mt_context *ctx, mt_optimizer *optimizer); /* a zero-initialised one is allowed */

/* The moments of a parameter: shards like its value, to read, write, gather and scatter. */
MT_API mt_status mt_optimizer_moments(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param, mt_tensor *m,
                                      mt_tensor *v);

/* One AdamW step with gradients scaled by grad_scale (the clip coefficient, 1 / loss scale, ...). */
MT_API mt_status mt_optimizer_step(mt_context *ctx, mt_optimizer *optimizer, float lr, float grad_scale);

/* Learning rate of step 0, 1, ...: linear warm-up over `warmup` steps to lr, then a cosine down to min_lr at `total`. */
MT_API float mt_cosine_schedule(int64_t step, int64_t warmup, int64_t total, float lr, float min_lr);

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
    float *values, *grads;     /* NULL until mt_params_init */
    int64_t elements, partial; /* the first `partial` elements are the sequence_partial parameters */
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
    MT_TRY(mti_host_new(ctx, sizeof **out, &memory));
    *out = (mt_params *)memory;
    (*out)->ctx = ctx;
    (*out)->grid = grid;
    return MT_SUCCESS;
}

MT_API void mt_params_destroy(mt_params *params) {
    mt_context *ctx;
    int i;
    if (!params) return;
    ctx = params->ctx;
    mti_params_free_buffers(params);
    mt_context_free(ctx, params->values, (size_t)params->elements * sizeof(float));
    mt_context_free(ctx, params->grads, (size_t)params->elements * sizeof(float));
    for (i = 0; i < params->count; i++) mti_host_free(params->list[i]);
    mti_host_free(params->list);
    mti_host_free(params);
}

/* One of the `parts` blocks of a split dimension: `count` features that start at `local` in the shard of `rank` and at
   `global` in the whole; the rest of the block, up to `size`, is padding. */
typedef struct mti_block {
    int64_t local, global, count, size;
} mti_block;

static int64_t mti_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* The share of a dimension of n features that each of `ranks` ranks holds, padding included. */
static int64_t mti_local_features(int64_t n, int64_t parts, int64_t unit, int ranks) {
    return parts * mti_ceil_div(n / parts / unit, ranks) * unit;
}

static mti_block mti_split_block(int64_t n, int64_t parts, int64_t local_features, int rank, int64_t index) {
    mti_block b;
    int64_t whole = n / parts;
    b.size = local_features / parts;
    b.local = index * b.size;
    b.global = index * whole + rank * b.size;
    b.count = whole - rank * b.size;
    if (b.count > b.size) b.count = b.size;
    if (b.count < 0) {
        b.count = 0;
        b.global = index * whole;
    }
    return b;
}

/* The blocks of a parameter; a replicated one is a single block of all its rows. */
static int64_t mti_param_blocks(const mt_param *p) { return p->desc.placement == MT_REPLICATED ? 1 : p->desc.parts; }

static mti_block mti_param_block(const mt_param *p, int rank, int64_t index) {
    int by_cols = p->desc.placement == MT_SPLIT_COLS;
    if (p->desc.placement == MT_REPLICATED) return mti_split_block(p->desc.rows, 1, p->desc.rows, 0, 0);
    return mti_split_block(by_cols ? p->desc.cols : p->desc.rows, p->desc.parts, by_cols ? p->value.cols : p->value.rows,
                           rank, index);
}

static mt_tensor mti_param_block_view(const mt_param *p, mt_tensor shard, mti_block b) {
    return p->desc.placement == MT_SPLIT_COLS ? mt_tensor_cols(shard, b.local, b.count)
                                              : mt_tensor_rows(shard, b.local, b.count);
}

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
    if (d->rows < 1 || d->cols < 1 || d->rows > INT64_MAX / 16 / d->cols)
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

MT_API mt_status mt_params_add(mt_context *ctx, mt_params *params, const mt_param_desc *desc, mt_param **out) {
    mt_param *p;
    void *memory;
    int64_t rows, cols;
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
    rows = desc->rows;
    cols = desc->cols;
    if (desc->placement == MT_SPLIT_ROWS) rows = mti_local_features(rows, p->desc.parts, p->desc.unit, p->tensor_size);
    if (desc->placement == MT_SPLIT_COLS) cols = mti_local_features(cols, p->desc.parts, p->desc.unit, p->tensor_size);
    p->value = mt_tensor_f32(NULL, rows, cols);
    p->grad = p->value;
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
static int64_t mti_param_slot(const mt_param *p) { return mti_round_up(p->value.rows * p->value.cols, 16); }

/* The slots of all parameters together. */
static mt_status mti_params_sum(mt_context *ctx, const mt_params *params, int64_t *sum) {
    int i;
    for (*sum = 0, i = 0; i < params->count; i++) {
        int64_t slot = mti_param_slot(params->list[i]);
        if (slot > INT64_MAX / 16 - *sum)
            return mti_fail(ctx, MT_ERR_MEMORY, "mt_params_init: the parameters up to '%s' have more than %lld elements",
                            params->list[i]->name, (long long)(INT64_MAX / 16));
        *sum += slot;
    }
    return MT_SUCCESS;
}

/* Gives every parameter its place. Those whose gradients are summed over the tensor group come first, in one piece. */
static mt_status mti_params_place(mt_context *ctx, mt_params *params) {
    void *values, *grads;
    int64_t at;
    int i, pass;
    MT_TRY(mti_params_sum(ctx, params, &at));
    MT_TRY(mt_context_alloc(ctx, (size_t)at * sizeof(float), &values));
    if (mt_context_alloc(ctx, (size_t)at * sizeof(float), &grads) != MT_SUCCESS) {
        mt_context_free(ctx, values, (size_t)at * sizeof(float));
        return MT_ERR_MEMORY;
    }
    params->values = (float *)values;
    params->grads = (float *)grads;
    params->elements = at;
    for (at = 0, pass = 0; pass < 2; pass++) {
        for (i = 0; i < params->count; i++) {
            mt_param *p = params->list[i];
            if ((p->desc.sequence_partial != 0) != (pass == 0)) continue;
            p->value.data = params->values + at;
            p->grad.data = params->grads + at;
            at += mti_param_slot(p);
        }
        if (pass == 0) params->partial = at;
    }
    return MT_SUCCESS;
}

/* FNV-1a, so that a parameter's random stream depends on its name and not on what was created before it. */
static uint64_t mti_name_stream(const char *name) {
    uint64_t h = 14695981039346656037u;
    for (; *name; name++) h = (h ^ (uint64_t)(unsigned char)*name) * 1099511628211u;
    return h;
}

static mt_status mti_param_init(mt_context *ctx, const mt_param *p, uint64_t seed) {
    int64_t i;
    for (i = 0; i < mti_param_blocks(p); i++) {
        mti_block b = mti_param_block(p, p->tensor_rank, i);
        mt_tensor view = mti_param_block_view(p, p->value, b);
        mt_random at;
        if (b.count == 0) continue;
        at.seed = seed;
        at.stream = mti_name_stream(p->name);
        at.first_row = p->desc.placement == MT_SPLIT_COLS ? 0 : b.global;
        at.first_col = p->desc.placement == MT_SPLIT_COLS ? b.global : 0;
        at.global_cols = p->desc.cols;
        if (p->desc.init_std > 0.0f) MT_TRY(mt_random_normal(ctx, view, p->desc.init_std, at));
        else MT_TRY(mt_fill(ctx, view, p->desc.init_value));
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_params_init(mt_context *ctx, mt_params *params, uint64_t seed) {
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || params->count == 0)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_params_init: %s", params ? "there are no parameters" : "params is NULL");
    if (!params->values) MT_TRY(mti_params_place(ctx, params));
    MT_TRY(mt_fill(ctx, mt_tensor_f32(params->values, 1, params->elements), 0.0f));
    for (i = 0; i < params->count; i++) MT_TRY(mti_param_init(ctx, params->list[i], seed));
    return mt_params_zero_grad(ctx, params);
}

static mt_status mti_params_ready(mt_context *ctx, const mt_params *params, const char *function) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (params && params->values) return MT_SUCCESS;
    return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function, params ? "call mt_params_init first" : "params is NULL");
}

MT_API mt_status mt_params_zero_grad(mt_context *ctx, mt_params *params) {
    MT_TRY(mti_params_ready(ctx, params, "mt_params_zero_grad"));
    return mt_fill(ctx, mt_tensor_f32(params->grads, 1, params->elements), 0.0f);
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

/* Copies between a block of a shard and its place in the whole tensor on the host; row by row where that is not contiguous. */
static mt_status mti_block_copy(mt_context *ctx, mt_tensor block, float *host, int64_t host_ld, int to_host) {
    int64_t i, step = host_ld == block.cols ? block.rows : 1;
    if (block.cols == 0) return MT_SUCCESS;
    for (i = 0; i < block.rows; i += step) {
        mt_tensor rows = mt_tensor_rows(block, i, step);
        if (to_host) MT_TRY(mt_download(ctx, rows, host + i * host_ld));
        else MT_TRY(mt_upload(ctx, host + i * host_ld, rows));
    }
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

static mt_status mti_shard_check(mt_context *ctx, const char *function, const mt_param *p, mt_tensor shard,
                                 const float *global) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!p || !shard.data || !global)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, !p ? "param" : global ? "shard" : "global");
    if (shard.dtype != MT_F32) return mti_fail(ctx, MT_ERR_DTYPE, "%s: the shard is not f32", function);
    if (shard.rows != p->value.rows || shard.cols != p->value.cols || mti_ld(shard) != shard.cols)
        return mti_fail(ctx, MT_ERR_SHAPE, "%s: the shard of '%s' is [%lld, %lld], contiguous; got [%lld, %lld], ld %lld",
                        function, p->name, (long long)p->value.rows, (long long)p->value.cols, (long long)shard.rows,
                        (long long)shard.cols, (long long)mti_ld(shard));
    return MT_SUCCESS;
}

MT_API mt_status mt_param_scatter(mt_context *ctx, const mt_param *param, const float *global, mt_tensor shard) {
    float *host;
    MT_TRY(mti_shard_check(ctx, "mt_param_scatter", param, shard, global));
    memcpy(&host, &global, sizeof host); /* only read: mti_shard_copy serves both directions */
    return mti_shard_copy(ctx, param, param->tensor_rank, shard, host, 0);
}

static mt_status mti_param_gather(mt_context *ctx, mt_params *params, const mt_param *p, mt_tensor shard, float *global) {
    mt_tensor all;
    int r;
    if (p->desc.placement == MT_REPLICATED || p->tensor_size == 1) return mti_shard_copy(ctx, p, 0, shard, global, 1);
    MT_TRY(mt_arena_tensor(ctx, MT_F32, shard.rows * p->tensor_size, shard.cols, &all));
    MT_TRY(mt_all_gather(ctx, params->grid->tensor, shard.data, all.data, (size_t)(shard.rows * shard.cols), MT_F32));
    for (r = 0; r < p->tensor_size; r++)
        MT_TRY(mti_shard_copy(ctx, p, r, mt_tensor_rows(all, r * shard.rows, shard.rows), global, 1));
    return MT_SUCCESS;
}

MT_API mt_status mt_param_gather(mt_context *ctx, mt_params *params, const mt_param *param, mt_tensor shard, float *global) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_params_ready(ctx, params, "mt_param_gather"));
    MT_TRY(mti_shard_check(ctx, "mt_param_gather", param, shard, global));
    mark = mt_arena_mark(ctx);
    status = mti_param_gather(ctx, params, param, shard, global);
    mt_arena_release(ctx, mark);
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

/* Columns of x [tokens, n] that belong to this rank: a view where that is one piece, else a copy in the arena. */
static mt_status mti_local_slice(mt_context *ctx, const mt_param *p, mt_tensor x, int64_t local_features, mt_tensor *out) {
    int64_t i;
    mti_block b = mti_split_block(x.cols, p->desc.parts, local_features, p->tensor_rank, 0);
    if (p->desc.parts == 1 && b.count == local_features) {
        *out = mt_tensor_cols(x, b.global, b.count);
        return MT_SUCCESS;
    }
    MT_TRY(mt_arena_tensor(ctx, MT_F32, x.rows, local_features, out));
    MT_TRY(mt_fill(ctx, *out, 0.0f));
    for (i = 0; i < p->desc.parts; i++) {
        b = mti_split_block(x.cols, p->desc.parts, local_features, p->tensor_rank, i);
        MT_TRY(mt_copy(ctx, mt_tensor_cols(x, b.global, b.count), mt_tensor_cols(*out, b.local, b.count)));
    }
    return MT_SUCCESS;
}

/* The inverse: local [tokens, local_features], contiguous, of every rank -> y [tokens, n], padding left out. */
static mt_status mti_gather_features(mt_context *ctx, mt_comm *tensor, const mt_param *p, mt_tensor local, mt_tensor y) {
    mt_tensor all;
    int64_t i;
    int r;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, local.rows * p->tensor_size, local.cols, &all));
    MT_TRY(mt_all_gather(ctx, tensor, local.data, all.data, (size_t)(local.rows * local.cols), MT_F32));
    for (r = 0; r < p->tensor_size; r++)
        for (i = 0; i < p->desc.parts; i++) {
            mti_block b = mti_split_block(y.cols, p->desc.parts, local.cols, r, i);
            mt_tensor from = mt_tensor_rows(all, r * local.rows, local.rows);
            MT_TRY(mt_copy(ctx, mt_tensor_cols(from, b.local, b.count), mt_tensor_cols(y, b.global, b.count)));
        }
    return MT_SUCCESS;
}

/* x of all tokens: x itself, or under sequence parallelism gathered into the arena. */
static mt_status mti_all_tokens(mt_context *ctx, mt_comm *tensor, int sequence_parallel, mt_tensor x, mt_tensor *out) {
    *out = x;
    if (!sequence_parallel || mt_comm_size(tensor) == 1) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, x.rows * mt_comm_size(tensor), x.cols, out));
    return mt_gather_from_sequence_region(ctx, tensor, x, *out);
}

/* Where partial sums [tokens, n] go before mti_reduce_tokens: y itself, or the arena under sequence parallelism. */
static mt_status mti_partial_tokens(mt_context *ctx, mt_comm *tensor, int sequence_parallel, mt_tensor y, mt_tensor *out) {
    *out = y;
    if (!sequence_parallel || mt_comm_size(tensor) == 1) return MT_SUCCESS;
    return mt_arena_tensor(ctx, MT_F32, y.rows * mt_comm_size(tensor), y.cols, out);
}

/* Sums the partial results of all ranks into y: all-reduce, or reduce-scatter under sequence parallelism. */
static mt_status mti_reduce_tokens(mt_context *ctx, mt_comm *tensor, int sequence_parallel, mt_tensor partial, mt_tensor y) {
    if (sequence_parallel) return mt_reduce_scatter_to_sequence_region(ctx, tensor, partial, y);
    return mt_reduce_from_tensor_region_forward(ctx, tensor, y);
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
    out->local_features = out->weight->value.rows;
    return MT_SUCCESS;
}

static mt_status mti_column_forward(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor x, mt_tensor y) {
    mt_tensor all, local = y;
    int gather = layer->desc.gather_output && mt_comm_size(layer->tensor) > 1;
    MT_TRY(mti_all_tokens(ctx, layer->tensor, layer->desc.sequence_parallel, x, &all));
    if (gather) MT_TRY(mt_arena_tensor(ctx, MT_F32, all.rows, layer->local_features, &local));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1.0f, all, layer->weight->value, 0.0f, local));
    if (layer->bias && !layer->desc.skip_bias_add) MT_TRY(mt_bias_forward(ctx, local, layer->bias->value));
    return gather ? mti_gather_features(ctx, layer->tensor, layer->weight, local, y) : MT_SUCCESS;
}

/* The checks that forward and backward share; in is what the caller calls x or dx, out what it calls y or dy. */
static mt_status mti_column_check(mt_context *ctx, const char *function, const mt_column_parallel_linear *layer,
                                  const char *in_name, mt_tensor in, const char *out_name, mt_tensor out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_expect_weight(ctx, function, layer ? layer->weight : NULL));
    MT_TRY(mti_expect_shape(ctx, function, in_name, in, in.rows, layer->desc.in_features));
    return mti_expect_shape(ctx, function, out_name, out, mti_tokens(layer->tensor, layer->desc.sequence_parallel, in.rows),
                      layer->desc.gather_output ? layer->desc.out_features : layer->local_features);
}

MT_API mt_status mt_column_parallel_linear_forward(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor x,
                                                   mt_tensor y, mt_linear_saved *saved) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_column_check(ctx, "mt_column_parallel_linear_forward", layer, "x", x, "y", y));
    MT_TRY(mti_expect_travel(ctx, "mt_column_parallel_linear_forward", layer->tensor, layer->desc.sequence_parallel, "x", x,
                             "y", mt_none()));
    mark = mt_arena_mark(ctx);
    status = mti_column_forward(ctx, layer, x, y);
    mt_arena_release(ctx, mark);
    if (status == MT_SUCCESS && saved) saved->x = x;
    return status;
}

/* The input gradient and its reduction come before the weight gradient, which needs no communication: a backend that can
   overlap the two will. */
static mt_status mti_column_backward(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor dy, mt_tensor dx,
                                     mt_tensor x) {
    int sp = layer->desc.sequence_parallel;
    mt_tensor local = dy, partial, all;
    if (layer->desc.gather_output) MT_TRY(mti_local_slice(ctx, layer->weight, dy, layer->local_features, &local));
    if (dx.data) {
        MT_TRY(mti_partial_tokens(ctx, layer->tensor, sp, dx, &partial));
        MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1.0f, local, layer->weight->value, 0.0f, partial));
        if (sp) MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, layer->tensor, partial, dx));
        else MT_TRY(mt_copy_to_tensor_region_backward(ctx, layer->tensor, dx));
    }
    if (layer->bias && !layer->desc.skip_bias_add) MT_TRY(mt_bias_backward(ctx, local, layer->bias->grad));
    MT_TRY(mti_all_tokens(ctx, layer->tensor, sp, x, &all));
    return mt_gemm(ctx, MT_TRANS, MT_NO_TRANS, 1.0f, local, all, 1.0f, layer->weight->grad);
}

MT_API mt_status mt_column_parallel_linear_backward(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor dy,
                                                    mt_tensor dx, const mt_linear_saved *saved) {
    static const char *const function = "mt_column_parallel_linear_backward";
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved) return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_column_check(ctx, function, layer, "saved->x", saved->x, "dy", dy));
    if (dx.data) MT_TRY(mti_expect_shape(ctx, function, "dx", dx, saved->x.rows, layer->desc.in_features));
    MT_TRY(mti_expect_travel(ctx, function, layer->tensor, layer->desc.sequence_parallel, "saved->x", saved->x, "dx", dx));
    mark = mt_arena_mark(ctx);
    status = mti_column_backward(ctx, layer, dy, dx, saved->x);
    mt_arena_release(ctx, mark);
    return status;
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
    out->local_features = out->weight->value.cols;
    return MT_SUCCESS;
}

static mt_status mti_row_check(mt_context *ctx, const char *function, const mt_row_parallel_linear *layer,
                               const char *in_name, mt_tensor in, const char *out_name, mt_tensor out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_expect_weight(ctx, function, layer ? layer->weight : NULL));
    MT_TRY(mti_expect_shape(ctx, function, in_name, in, mti_tokens(layer->tensor, layer->desc.sequence_parallel, out.rows),
                      layer->desc.input_is_parallel ? layer->local_features : layer->desc.in_features));
    return mti_expect_shape(ctx, function, out_name, out, out.rows, layer->desc.out_features);
}

static mt_status mti_row_forward(mt_context *ctx, const mt_row_parallel_linear *layer, mt_tensor x, mt_tensor y) {
    int sp = layer->desc.sequence_parallel;
    mt_tensor local = x, partial;
    if (!layer->desc.input_is_parallel) MT_TRY(mti_local_slice(ctx, layer->weight, x, layer->local_features, &local));
    MT_TRY(mti_partial_tokens(ctx, layer->tensor, sp, y, &partial));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1.0f, local, layer->weight->value, 0.0f, partial));
    MT_TRY(mti_reduce_tokens(ctx, layer->tensor, sp, partial, y));
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
    mt_arena_release(ctx, mark);
    if (status == MT_SUCCESS && saved) saved->x = x;
    return status;
}

static mt_status mti_row_backward(mt_context *ctx, const mt_row_parallel_linear *layer, mt_tensor dy, mt_tensor dx,
                                  mt_tensor x) {
    int gather = !layer->desc.input_is_parallel && mt_comm_size(layer->tensor) > 1;
    mt_tensor all, local = dx;
    if (layer->bias && !layer->desc.skip_bias_add) MT_TRY(mt_bias_backward(ctx, dy, layer->bias->grad));
    MT_TRY(mti_all_tokens(ctx, layer->tensor, layer->desc.sequence_parallel, dy, &all));
    if (dx.data) {
        if (gather) MT_TRY(mt_arena_tensor(ctx, MT_F32, all.rows, layer->local_features, &local));
        MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1.0f, all, layer->weight->value, 0.0f, local));
        if (gather) MT_TRY(mti_gather_features(ctx, layer->tensor, layer->weight, local, dx));
    }
    if (!layer->desc.input_is_parallel) MT_TRY(mti_local_slice(ctx, layer->weight, x, layer->local_features, &x));
    return mt_gemm(ctx, MT_TRANS, MT_NO_TRANS, 1.0f, all, x, 1.0f, layer->weight->grad);
}

MT_API mt_status mt_row_parallel_linear_backward(mt_context *ctx, const mt_row_parallel_linear *layer, mt_tensor dy,
                                                 mt_tensor dx, const mt_linear_saved *saved) {
    static const char *const function = "mt_row_parallel_linear_backward";
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved) return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_row_check(ctx, function, layer, "saved->x", saved->x, "dy", dy));
    if (dx.data) MT_TRY(mti_expect_shape(ctx, function, "dx", dx, saved->x.rows, saved->x.cols));
    MT_TRY(mti_expect_travel(ctx, function, layer->tensor, layer->desc.sequence_parallel, "dy", dy, "dx", mt_none()));
    mark = mt_arena_mark(ctx);
    status = mti_row_backward(ctx, layer, dy, dx, saved->x);
    mt_arena_release(ctx, mark);
    return status;
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
    MT_TRY(mti_expect_shape(ctx, function, what, y, rows, layer->desc.features));
    return mt_ids_check(ctx, "token id", ids, tokens, layer->desc.vocab, 0);
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
    if (status == MT_SUCCESS)
        status = mt_embedding_forward(ctx, layer->weight->value, layer->first_row, ids, 0.0f, partial);
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

static mt_cross_entropy_shape mti_cross_entropy_shape(mt_comm *tensor, const mt_cross_entropy_desc *desc,
                                                      int64_t local_cols) {
    mt_cross_entropy_shape shape;
    shape.vocab = desc->vocab;
    shape.first_col = mt_comm_rank(tensor) * local_cols;
    shape.label_smoothing = desc->label_smoothing;
    shape.ignore_index = desc->ignore_index;
    return shape;
}

static mt_status mti_cross_entropy_check(mt_context *ctx, const char *function, mt_comm *tensor,
                                         const mt_cross_entropy_desc *desc, mt_tensor logits) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!tensor || !desc) return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, tensor ? "desc" : "tensor");
    if (desc->vocab < 1 || !(desc->label_smoothing >= 0.0f && desc->label_smoothing < 1.0f))
        return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: vocab %lld, label_smoothing %g", function, (long long)desc->vocab,
                        (double)desc->label_smoothing);
    return mti_expect_shape(ctx, function, "logits", logits, logits.rows, mti_ceil_div(desc->vocab, mt_comm_size(tensor)));
}

/* Four scalars per token meet in one all-gather (Megatron-LM uses three all-reduces: maximum, target, sum). */
static mt_status mti_cross_entropy_forward(mt_context *ctx, mt_comm *tensor, const mt_cross_entropy_shape *shape,
                                           mt_tensor logits, const int32_t *targets, mt_tensor loss, mt_tensor lse) {
    int ranks = mt_comm_size(tensor);
    mt_tensor all, own;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, logits.rows * ranks, 4, &all));
    own = mt_tensor_rows(all, mt_comm_rank(tensor) * logits.rows, logits.rows);
    MT_TRY(mt_cross_entropy_stats(ctx, shape, logits, targets, own));
    MT_TRY(mt_all_gather(ctx, tensor, own.data, all.data, (size_t)logits.rows * 4, MT_F32));
    return mt_cross_entropy_combine(ctx, shape, all, ranks, targets, loss, lse);
}

MT_API mt_status mt_vocab_parallel_cross_entropy_forward(mt_context *ctx, mt_comm *tensor, const mt_cross_entropy_desc *desc,
                                                         mt_tensor logits, const int32_t *targets, mt_tensor loss,
                                                         mt_cross_entropy_saved *saved) {
    static const char *const function = "mt_vocab_parallel_cross_entropy_forward";
    mt_cross_entropy_shape shape;
    mt_tensor lse;
    size_t keep, mark;
    mt_status status;
    MT_TRY(mti_cross_entropy_check(ctx, function, tensor, desc, logits));
    MT_TRY(mti_expect_shape(ctx, function, "loss", loss, 1, logits.rows));
    shape = mti_cross_entropy_shape(tensor, desc, logits.cols);
    MT_TRY(mt_ids_check(ctx, "target", targets, logits.rows, desc->vocab, mti_ignore_index(&shape)));
    keep = mt_arena_mark(ctx);
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 2, logits.rows, &lse));
    mark = mt_arena_mark(ctx);
    status = mti_cross_entropy_forward(ctx, tensor, &shape, logits, targets, loss, lse);
    mt_arena_release(ctx, saved && status == MT_SUCCESS ? mark : keep);
    if (status != MT_SUCCESS || !saved) return status;
    saved->logits = logits;
    saved->lse = lse;
    saved->targets = targets;
    return MT_SUCCESS;
}

MT_API mt_status mt_vocab_parallel_cross_entropy_backward(mt_context *ctx, mt_comm *tensor,
                                                          const mt_cross_entropy_desc *desc, mt_tensor dloss, float scale,
                                                          const mt_cross_entropy_saved *saved) {
    static const char *const function = "mt_vocab_parallel_cross_entropy_backward";
    mt_cross_entropy_shape shape;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved) return mti_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_cross_entropy_check(ctx, function, tensor, desc, saved->logits));
    shape = mti_cross_entropy_shape(tensor, desc, saved->logits.cols);
    return mt_cross_entropy_backward(ctx, &shape, saved->logits, saved->targets, saved->lse, dloss, scale);
}

/* ---- >>sync ------------------------------------------------------------------------------------------------------- */

MT_API mt_status mt_sync_gradients(mt_context *ctx, mt_params *params) {
    const mt_grid *grid;
    int i;
    MT_TRY(mti_params_ready(ctx, params, "mt_sync_gradients"));
    grid = params->grid;
    if (params->partial > 0)
        MT_TRY(mt_all_reduce(ctx, grid->tensor, params->grads, params->grads, (size_t)params->partial, MT_F32, MT_SUM));
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

static mt_status mti_grad_norm(mt_context *ctx, mt_params *params, float *norm) {
    mt_tensor sum;
    float squares;
    int i;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, 1, &sum));
    MT_TRY(mt_fill(ctx, sum, 0.0f));
    for (i = 0; i < params->count; i++)
        if (mti_counts_in_norm(params->grid, params->list[i]))
            MT_TRY(mt_sum_of_squares(ctx, params->list[i]->grad, sum));
    MT_TRY(mt_all_reduce(ctx, params->grid->model, sum.data, sum.data, 1, MT_F32, MT_SUM));
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

/* ---- >>optimizer -------------------------------------------------------------------------------------------------- */

static mt_status mti_optimizer_check(mt_context *ctx, const mt_optimizer_desc *d) {
    if (d->beta1 >= 0.0f && d->beta1 < 1.0f && d->beta2 >= 0.0f && d->beta2 < 1.0f && d->eps > 0.0f &&
        d->weight_decay >= 0.0f)
        return MT_SUCCESS;
    return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_optimizer_create: beta1 %g, beta2 %g, eps %g, weight_decay %g",
                    (double)d->beta1, (double)d->beta2, (double)d->eps, (double)d->weight_decay);
}

MT_API mt_status mt_optimizer_create(mt_context *ctx, mt_params *params, const mt_optimizer_desc *desc, mt_optimizer *out) {
    mt_optimizer_desc d;
    size_t bytes;
    void *m, *v;
    MT_TRY(mti_params_ready(ctx, params, "mt_optimizer_create"));
    if (!out) return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_optimizer_create: out is NULL");
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    d.beta1 = mti_default(d.beta1, 0.9f);
    d.beta2 = mti_default(d.beta2, 0.999f);
    d.eps = mti_default(d.eps, 1e-8f);
    MT_TRY(mti_optimizer_check(ctx, &d));
    memset(out, 0, sizeof *out);
    bytes = (size_t)params->elements * sizeof(float);
    MT_TRY(mt_context_alloc(ctx, bytes, &m));
    if (mt_context_alloc(ctx, bytes, &v) != MT_SUCCESS) {
        mt_context_free(ctx, m, bytes);
        return MT_ERR_MEMORY;
    }
    out->desc = d;
    out->params = params;
    out->elements = params->elements;
    out->m = (float *)m;
    out->v = (float *)v;
    return MT_SUCCESS;
}

MT_API void mt_optimizer_destroy(mt_context *ctx, mt_optimizer *optimizer) {
    size_t bytes;
    if (!ctx || !optimizer || !optimizer->params) return;
    bytes = (size_t)optimizer->elements * sizeof(float);
    mt_context_free(ctx, optimizer->m, bytes);
    mt_context_free(ctx, optimizer->v, bytes);
    memset(optimizer, 0, sizeof *optimizer);
}

/* The part of `moments` (m or v) that belongs to a parameter of the optimizer's registry. */
static mt_tensor mti_moment(const mt_optimizer *optimizer, const mt_param *p, float *moments) {
    mt_tensor t = p->value;
    t.data = moments + ((const float *)p->value.data - optimizer->params->values);
    return t;
}

MT_API mt_status mt_optimizer_moments(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param, mt_tensor *m,
                                      mt_tensor *v) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!optimizer || !optimizer->params || !param || !m || !v)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_optimizer_moments: %s", !param ? "param is NULL" :
                        !m || !v ? "m or v is NULL" : "no optimizer");
    if (mt_params_find(optimizer->params, param->name) != param)
        return mti_fail(ctx, MT_ERR_ARGUMENT, "mt_optimizer_moments: '%s' is not of this optimizer's registry", param->name);
    *m = mti_moment(optimizer, param, optimizer->m);
    *v = mti_moment(optimizer, param, optimizer->v);
    return MT_SUCCESS;
}

MT_API mt_status mt_optimizer_step(mt_context *ctx, mt_optimizer *optimizer, float lr, float grad_scale) {
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
        MT_TRY(mt_adamw_step(ctx, &hyper, p->value, p->grad, mti_moment(optimizer, p, optimizer->m),
                             mti_moment(optimizer, p, optimizer->v)));
    }
    optimizer->step = hyper.step;
    return MT_SUCCESS;
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
