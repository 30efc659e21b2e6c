/* mt_parallel.h - process grid, parallel parameters, column- and row-parallel linear, vocabulary-parallel embedding and
   cross-entropy, gradient sync and norm, AdamW, pipelines, checkpoints.

   Do this (every rank; world and ctx are from mt_comm.h):
       mt_grid grid;        mt_grid_desc shape = {.tp = 8};             // data ranks: world size / 8
       mt_params *params;   MT_TRY(mt_grid_create(world, &shape, &grid));
                            MT_TRY(mt_params_create(ctx, &grid, &params));
       mt_column_parallel_linear fc; mt_linear_desc d = {.in_features = 1024, .out_features = 4096};
                            MT_TRY(mt_column_parallel_linear_create(ctx, params, "fc", &d, &fc));
                            MT_TRY(mt_params_init(ctx, params, 1234));      // allocates and fills all parameters
       ... forward, backward ...                  // optional: mt_sync_gradients_begin before the last backward
                            MT_TRY(mt_sync_gradients(ctx, params));

   Layers are small structs in the caller's memory. They need no destroy, because the registry (mt_params) owns their
   parameters. Values and gradients may be in memory of the caller (mt_params_bind). Forward keeps what backward needs
   in a `saved` struct: tensors in the arena, and views of tensors that the caller passed (x, ids, targets). The caller
   must not release (mt_arena_release), free or change any of them before backward has returned. With saved == NULL
   forward is inference and keeps nothing. A forward with `saved` does not need to have a backward; see mt_arena_mark
   for a loop that decides later. Backward adds to parameter gradients and overwrites activation gradients.

   A registry knows what was done with its gradients. In each step they are zeroed (mt_params_zero_grad), added to (by
   backward; in invariant mode also mt_accumulate_gradients), summed over ranks (mt_sync_gradients), and used (by one
   step of the optimizer). A call in another order is MT_ERR_ARGUMENT before it touches or sends data. The message names
   a parameter and the call that is missing. Ranks that have nothing to sum do not need mt_sync_gradients. A program may
   also write to param->grad by hand, which the registry does not see. From the first call on that is recorded in a CUDA
   graph, nothing is refused: the step that runs before it is checked. Layers of tensors have no registry.

   Names: A create function gets the layer's name. The parameters are then called NAME.weight and so on. The name of a
   parameter decides its random numbers (mt_params_init) and is its key in checkpoints. With name NULL a layer is called
   layer.N, and a parameter without a layer param.N: layer.0, layer.1, ... in the order of creation. N is one more than
   the largest N in use in the registry. A program that changes the order of creation thus gets other random numbers and
   cannot load its old checkpoints. With several pipeline stages NULL is MT_ERR_ARGUMENT, because each stage has a
   registry of its own: the stages would use the same names, and draw the same numbers. A name is on one stage only,
   except that of a shared embedding. (With mt_context_desc.check == 2, mt_params_init and mt_params_bind compare the
   names of the first and the last stage.)

   An output must not overlap an input or another output, and dx must not overlap a tensor of `saved`, except where a
   comment allows it. Most such overlaps are MT_ERR_ARGUMENT; with the others the results are undefined.

   Communication is inside the layers: a column-parallel layer contains Megatron's conjugate f, and a row-parallel layer
   contains g. Code between the two layers does not need to communicate. mt_comm.h also has f and g as separate
   functions.

   Shapes: t is the number of tensor ranks. "local features" are this rank's share of a split dimension. Global shapes
   never include padding. A dimension that t does not divide is padded with zeros. The padding stays zero, because its
   gradients are zero. A vocabulary that you have padded yourself has its size in a field beside the true size, see
   mt_embedding_desc.padded_vocab.

   A tensor may be a view with ld > cols. But a tensor that the call sends to other tensor ranks must be contiguous;
   otherwise the call returns MT_ERR_SHAPE before it computes anything. Layers send:
       always                        y of a row-parallel layer and of an embedding, dx of a column-parallel layer
       with sequence parallelism     also x of a column-parallel layer, dy of a row-parallel layer and of an embedding

   This header has no transformer (megatron.h has one), does not run your loop and does not average losses.
   mt_sync_gradients sums over the data group, so scale your loss by 1 / (tokens of the whole global batch). The library
   opens only checkpoints, and the safetensors and JSON files that you name.

   Structs named mt_..._desc may be zero-initialised. "0: x" in the comment of a field means that 0 selects x. Where
   the comment names MT_ZERO, this constant sets the field to zero (mt_comm.h, "defaults").

   Errors: A call with a context can return MT_ERR_ARGUMENT (a NULL pointer, a value or a combination of fields that is
   not allowed), MT_ERR_SHAPE, MT_ERR_DTYPE and MT_ERR_MEMORY. Calls that compute can also return the errors of the
   operators (see the head of mt_kernels.cuh). Calls that communicate can also return those of the collectives (see
   mt_comm.h). mt_last_error(ctx) has the message. The comment of a function says only what is special to it. The create
   functions of layers, which add parameters, also return the errors of mt_params_add. After an error of a create
   function, the registry is as before.

   Sections of the implementation: >>options >>grid >>invariant >>params >>sharding >>memory >>guard >>init >>settings
   >>bind >>gradients >>scatter >>hash-log >>linear >>linear-tensors >>norm >>vocab >>sample >>buckets >>sync
   >>optimizer >>pipeline >>json >>files >>safetensors >>fields >>checkpoint >>save >>load >>plan */

/* This #include is outside the guard, so that a second #include of this file, with MEGATRON_IMPLEMENTATION, also
   reaches mt_kernels.cuh and mt_comm.h. */
#include "mt_kernels.cuh"

#ifndef MT_PARALLEL_H
#define MT_PARALLEL_H

#ifdef __cplusplus
extern "C" {
#endif

/* ---- process grid ------------------------------------------------------------------------------------------------ */

/* The sizes of the process grid. Ranks are in Megatron's order: rank = tp_rank + tp * (dp_rank + dp * pp_rank). */
typedef struct mt_grid_desc {
    int tp; /* tensor parallel ranks; 0: 1 */
    int dp; /* data parallel ranks; 0: world size / (tp * pp) */
    int pp; /* pipeline stages; 0: 1 */
} mt_grid_desc;

typedef enum mt_group {
    MT_GROUP_TENSOR = 0,
    MT_GROUP_DATA = 1,
    MT_GROUP_PIPELINE = 2,
    MT_GROUP_MODEL = 3,    /* tensor x pipeline: the ranks that hold one copy of the model */
    MT_GROUP_EMBEDDING = 4 /* first and last pipeline stage, which share tied embeddings; empty on other stages */
} mt_group;

/* This rank's communicators and its place in the grid. mt_grid_create fills it; callers only read it. embedding is NULL
   on the stages between the first and the last. */
typedef struct mt_grid {
    mt_comm *world; /* owned by the caller */
    mt_comm *tp, *dp, *pp, *model, *embedding;
    int tp_size, dp_size, pp_size;
    int tp_rank, dp_rank, pp_rank;
} mt_grid;

/* Lists the group of kind `group` that contains `rank`. Writes its ranks to ranks, in ascending order, and their number
   to *count. ranks must have space for world_size entries. No communication.
   Errors, without a message: MT_ERR_ARGUMENT (a size is negative, or rank is out of range), MT_ERR_SHAPE (tp * dp * pp
   is not world_size or, when dp is 0, tp * pp does not divide world_size). */
MT_API mt_status mt_grid_ranks(const mt_grid_desc *desc, int world_size, mt_group group, int rank, int *ranks,
                               int *count);

/* Creates the communicators of the groups that contain this rank. desc NULL: the defaults. world must outlive the grid,
   and the grid must outlive everything that is created from it. Collective over world. Errors: those of mt_grid_ranks
   and mt_comm_split; world keeps the message (mt_comm_last_error). */
MT_API mt_status mt_grid_create(mt_comm *world, const mt_grid_desc *desc, mt_grid *out);
MT_API void mt_grid_destroy(mt_grid *grid); /* a zero-initialised grid is allowed */

/* ---- invariant mode ---------------------------------------------------------------------------------------------- */

/* mt_context_desc.invariant = V, a power of two, turns invariant mode on; 0 turns it off. In this mode a training step
   computes the same bits on every grid with 1, 2, 4, ..., V tensor ranks, 1, 2, 4, ..., V_d data ranks and any number
   of pipeline stages, with and without sequence parallelism. V_d is mt_context_desc.invariant_data, by default V. "The
   same bits" applies to the loss, the gradients, their norm, the weights and the optimizer state.
   Every split dimension is divided into V virtual shards of the same size, with padding where necessary. Each of t
   tensor ranks has V / t of them.
   docs/invariance.md says how this works, what it costs, and which blocks of your own it covers.

   The mode has these rules:
     tokens           The number of tokens in a training call (forward with saved, and its backward) must be a multiple
                      of V; otherwise MT_ERR_SHAPE.
     heads            Attention must have at least V query heads; otherwise MT_ERR_SHAPE.
     micro-batches    A micro-batch must have mt_invariant_micro_batch sequences. Call mt_accumulate_gradients after the
                      backward of each micro-batch. Use each layer only once in a micro-batch.
     parts > 1        In a layer with several parts (mt_linear_desc.parts), each virtual shard has its share of every
                      part. With the parts gate and up, the columns of a rank are gate and up of its first shard, then
                      gate and up of its second shard, and so on. Call mt_column_parallel_activation_forward, or call
                      your own operator once for each shard (mt_shard_cols), and set mt_linear_desc.parts_by_shard.
                      Without parts_by_shard the layer's create returns MT_ERR_ARGUMENT. */

/* Returns a view of the columns of t [tokens, local features] that belong to virtual shard number `shard` of this rank.
   shards is the number of virtual shards on this rank (mt_param.shards). When t.data is NULL, returns t. When shard is
   not in [0, shards), or `shards` does not divide the columns, returns a view of -1 rows, which every call refuses. */
MT_API mt_tensor mt_shard_cols(mt_tensor t, int shard, int shards);

/* Returns the number of sequences in a micro-batch of invariant mode. `sequences` is the number of sequences in the
   whole step, on all data ranks together, and data_shards is V_d (mt_context_invariant_data). A step has n
   micro-batches of sequences / n sequences, where n is the largest power of two that is at most V_d and divides
   `sequences`. At most n data ranks can share the step. Data rank d of D runs micro-batches d * n / D to (d + 1) * n /
   D - 1, in this order. Micro-batch i has the sequences / n sequences from i * sequences / n on. */
MT_API int64_t mt_invariant_micro_batch(int data_shards, int64_t sequences);

/* ---- options of the layers --------------------------------------------------------------------------------------- */

/* Kinds of communication that overlap with computation on MT_DEVICE_CUDA. Layers communicate on a second stream, and
   parameter gradients are summed on a third stream. By default all kinds overlap; a bit in
   mt_parallel_options.no_overlap turns one kind off. The results have the same bits either way. In invariant mode and
   on other devices nothing overlaps. */
typedef enum mt_overlap {
    /* column-parallel backward: the input gradient is reduced while the weight gradient is computed. With sequence
       parallelism, x is also gathered while the input gradient is computed */
    MT_OVERLAP_COLUMN_BACKWARD = 1,
    /* row-parallel forward: a chunk of tokens is reduced while the next chunk is multiplied */
    MT_OVERLAP_ROW_FORWARD = 2,
    /* sequence parallelism: a chunk of tokens is gathered while the chunk before it is multiplied */
    MT_OVERLAP_ALL_GATHER = 4,
    /* gradients that are final are summed over the data group while the backward goes on, see
       mt_sync_gradients_begin */
    MT_OVERLAP_GRADIENTS = 8,
    MT_OVERLAP_ALL = 15
} mt_overlap;

#define MT_OVERLAP_CHUNKS_MAX MT_OVERLAP_TICKETS /* 8 */

/* Options of the layers of a context. Zero-initialised means the defaults. */
typedef struct mt_parallel_options {
    int no_overlap; /* bits of mt_overlap: the kinds that do not overlap on MT_DEVICE_CUDA; 0: all overlap */
    /* number of chunks into which a layer cuts the tokens that it communicates, at most MT_OVERLAP_CHUNKS_MAX. Each
       chunk is a separate GEMM, also when nothing overlaps. Invariant mode always uses one chunk. 0: on MT_DEVICE_CUDA
       one chunk for each 1024 tokens, at most 4; on other devices one chunk */
    int overlap_chunks;
} mt_parallel_options;

/* mt_parallel_set_options sets the options of the layers of ctx; options NULL: the defaults. Do not call it between a
   forward and its backward. mt_parallel_get_options returns the options, or the defaults when none were set.
   Errors: MT_ERR_ARGUMENT (a value is out of range), MT_ERR_MEMORY. */
MT_API mt_status mt_parallel_set_options(mt_context *ctx, const mt_parallel_options *options);
MT_API mt_parallel_options mt_parallel_get_options(const mt_context *ctx);

/* trust = 1 turns off the checks of token ids (embedding) and targets (cross-entropy); trust = 0 turns them on again.
   A block that has checked the ids itself turns off these checks, so that each id is checked once. Without a check, an
   id or a target that is out of range is no error: see mt_embedding_forward and mt_cross_entropy_stats. Errors:
   MT_ERR_ARGUMENT, MT_ERR_MEMORY. */
MT_API mt_status mt_layers_trust_ids(mt_context *ctx, int trust);

/* ---- parameters -------------------------------------------------------------------------------------------------- */

#define MT_NAME_MAX 96

#define MT_PLACEMENT_WORDS "MT_REPLICATED MT_SPLIT_ROWS MT_SPLIT_COLS" /* see mt_check_enum */

/* Describes a parameter: its global shape, how it is split, and its first values. */
typedef struct mt_param_desc {
    const char *name;   /* unique in the registry; copied; NULL: param.0, param.1, ... (see "Names" above) */
    int64_t rows, cols; /* global shape; a vector is [1, n], a bias of a column-parallel layer [1, out] */
    mt_placement placement;
    /* number of equal blocks in the split dimension, at most 65536. Each block is split over the ranks separately, so
       that one product computes several branches: with the 2 parts [gate; up], each rank has its share of gate and its
       share of up (for invariant mode see mt_linear_desc.parts_by_shard); 0: 1 */
    int64_t parts;
    /* number of neighbouring features that stay on one rank; 0: 1. The layouts of QKV (mt_qkv_layout), with D features
       per head and n query heads per group:
         MT_QKV_PER_GROUP     parts 1, unit (n + 2) * D: whole query groups stay together
         MT_QKV_CONCATENATED  parts 3, unit D: each rank has [its queries; its keys; its values]; n is 1, as parts are
                              equal
         MT_QKV_SEPARATE      parts 1, unit n * D for the queries, and unit D for the keys and for the values */
    int64_t unit;
    float init_std;   /* the first values are from N(0, init_std^2), see mt_params_init; 0: all are init_value */
    float init_value; /* the first value of every element when init_std is 0; MT_ERR_ARGUMENT when both are set */
    int weight_decay; /* 1: the optimizer decays it (matrices); 0: it does not (biases, norms) */
    /* advanced */
    /* The size of the split dimension with padding of your own at its end. Each of t ranks then has padded_features / t
       of it, rounded up to whole units, as when you split a padded matrix into t equal parts. rows and cols are without
       padding, and so are the tensors of mt_param_gather, mt_param_scatter and checkpoints. mt_params_init sets the
       padding to 0, and layers leave its gradient 0. It must be at least the size without padding and a multiple of
       unit, and needs a split parameter with one part. 0: no padding of your own */
    int64_t padded_features;
    /* 1: a tensor rank computes only the part of the gradient that its own tokens (sequence parallelism) or its own
       heads (a gain per head) contribute. mt_sync_gradients sums the parts over the tensor group. For MT_REPLICATED
       only */
    int sequence_partial;
    /* 1: the first and the last pipeline stage have it under the same name; the embedding group sums its gradient. The
       name decides the first values, so two names would begin with different ones: check mode 2 refuses them, also when
       all elements are init_value */
    int shared_embedding;
    /* Each unit is divided into `copies` pieces, and a piece stays on one rank. The last `copied` features of the unit
       are in every piece. The features before them are shared out, so their number must be a multiple of copies.
       mt_self_attention_desc says how keys and values that several ranks need are copied in this way. A rank
       computes only its part of the gradient of a copy. mt_sync_gradients sums the parts over the tensor group, so all
       copies stay equal. In whole tensors, in checkpoints, in the norm and in the hash log each feature counts once.
       With more than one copy, the parameter must be a matrix that is split by rows or a vector that is split, with
       one part, no padded_features and at most 65536 pieces (MT_ERR_ARGUMENT). 0: 1 */
    int64_t copies;
    int64_t copied; /* must be 0 with one copy */
} mt_param_desc;

/* A parameter on this rank. value (in the registry's type) and grad (MT_F32) are this rank's shard [local rows, local
   cols], contiguous. They are valid after mt_params_init, or after mt_params_bind of all values; callers may read
   and write them. When an optimizer has masters (16-bit parameters without stochastic_rounding), its next step
   overwrites what was written to value: also write the master, with mt_optimizer_scatter and MT_MASTER. In invariant
   mode value and grad hold the rank's virtual shards one after the other, each of them contiguous. A matrix that is
   split by columns is then [shards * rows, local_features / shards]. */
typedef struct mt_param {
    mt_param_desc desc; /* desc.name points to name */
    char name[MT_NAME_MAX];
    mt_tensor value, grad;
    /* the part of a shared embedding's gradient that comes from the lookup; mt_sync_gradients adds it to grad. Only in
       invariant mode with one pipeline stage; otherwise mt_none() */
    mt_tensor lookup_grad;
    int tp_rank, tp_size;
    int shards;             /* virtual shards on this rank: V / tp_size if split and in invariant mode, otherwise 1 */
    int64_t local_features; /* size of the split dimension on this rank, padding included; rows if not split */
    struct mt_params *registry; /* NULL for a layer of tensors, see mt_linear_tensors */
    int index;                  /* in the registry, see mt_params_at */
    int final;                  /* 1: nothing more is added to grad in this step, see mt_gradients_final */
} mt_param;

typedef struct mt_params mt_params; /* opaque: the registry */

/* Creates an empty registry. Its values and gradients come from ctx's allocator, unless mt_params_bind binds them. ctx
   and grid must outlive it.
   MT_ERR_SHAPE, in invariant mode: the tensor ranks do not divide V, or the data ranks do not divide V_d. */
MT_API mt_status mt_params_create(mt_context *ctx, const mt_grid *grid, mt_params **out);
MT_API void mt_params_destroy(mt_params *params); /* frees all parameters and buffers; NULL is allowed */

/* Sets the type of parameters, activations and activation gradients, in memory and when ranks send them: MT_F32 (the
   default), MT_BF16 or MT_F16. Parameter gradients, statistics, the loss and the optimizer's state are always MT_F32.
   In invariant mode ranks send partial sums as MT_F32, and only the last sum is rounded.
   MT_ERR_ARGUMENT: a parameter was already added. MT_ERR_DTYPE: dtype is another type. */
MT_API mt_status mt_params_set_dtype(mt_context *ctx, mt_params *params, mt_dtype dtype);
MT_API mt_dtype mt_params_dtype(const mt_params *params);

/* How data parallel ranks share the work. */
typedef struct mt_data_parallel_desc {
    /* size of a gradient bucket in bytes, rounded up so that all data ranks have equal shares. One collective sums one
       bucket. With NCCL the bits of the sums depend on this size; otherwise they do not. 0: 160 MB, or 4 MB for each
       data rank if that is more, as in Megatron-LM (MB: 10^6 bytes) */
    size_t bucket_bytes;
    /* 1: each data rank keeps only its share of the optimizer's state (ZeRO-1, arXiv 1910.02054; Megatron-LM's
       distributed optimizer). With d data ranks, parameter, gradient and state take 6 + 12 / d bytes per 16-bit
       parameter and 8 + 8 / d bytes per f32 parameter. See mt_sync_gradients */
    int sharded_optimizer;
} mt_data_parallel_desc;

/* Sets how data ranks share the work. Give every rank of a pipeline stage the same desc. MT_ERR_ARGUMENT:
   mt_params_init or mt_params_bind was already called. */
MT_API mt_status mt_params_set_data_parallel(mt_context *ctx, mt_params *params, const mt_data_parallel_desc *desc);

/* Adds a parameter. The registry owns *out. mt_params_init allocates its value and gradient, unless they are bound
   (mt_params_bind).
   MT_ERR_ARGUMENT: the name is empty, taken or too long, or NULL with several pipeline stages, another field is out of
   range, or mt_params_init or mt_params_bind was already called.
   MT_ERR_SHAPE: rows or cols is not positive, unit is negative, rows * cols is above 2^48, parts * unit does not divide
   the split dimension, or padded_features breaks a rule of its comment. */
MT_API mt_status mt_params_add(mt_context *ctx, mt_params *params, const mt_param_desc *desc, mt_param **out);

/* Sets mt_param_desc.weight_decay of a parameter, for instance of one that the create function of a layer has added.
   Those functions let weights and embeddings decay, but not biases and norms. 1: the optimizer decays the parameter; 0:
   it does not. Call it on every rank, before mt_params_init and mt_params_bind, which compare it between ranks.
   MT_ERR_ARGUMENT: weight_decay is not 0 or 1, or mt_params_init or mt_params_bind was already called. */
MT_API mt_status mt_param_set_weight_decay(mt_context *ctx, mt_param *param, int weight_decay);

/* Memory of the caller for the parameters of this rank. Each pointer is a buffer for one kind of memory, on the
   context's device. NULL: this kind is not bound, and the registry or the optimizer allocates it. Every buffer has the
   same number of elements and the same offsets. */
typedef struct mt_params_memory {
    void *values;   /* in the registry's type */
    float *grads;   /* parameter gradients are always MT_F32 */
    float *exp_avg; /* the optimizer's state, see mt_optimizer_state */
    float *exp_avg_sq;
    float *master;    /* for 16-bit parameters */
    int64_t elements; /* number of elements in each buffer that is not NULL */
    /* mt_params_count offsets, in elements: where each parameter begins in every buffer, in the order of mt_params_at.
       Read only during the call. There may be gaps, and any order is allowed. A parameter has value.rows * value.cols
       elements. NULL: one parameter after the other, without gaps */
    const int64_t *offsets;
} mt_params_memory;

/* mt_params_bind puts values, gradients or optimizer state of all parameters into memory of the caller:
       mt_params_memory m = {.values = weights, .grads = gradients, .elements = mt_params_elements(params)};
       MT_TRY(mt_params_bind(ctx, params, &m));        // weights may already have their values
   Call it after the last mt_params_add. Values and gradients are bound before mt_params_init, and exp_avg, exp_avg_sq
   and master before mt_optimizer_create. You may bind the kinds in several calls. With memory NULL the call only
   compares the ranks and, when all values are bound, allocates the rest.
   mt_param_bind does the same for one parameter, without communication. For mt_param_bind, elements is the size of each
   buffer, and offsets has one entry or is NULL. After the last mt_param_bind, call mt_params_bind with memory NULL, or
   mt_params_init.

   When all values are bound, mt_params_init is optional. The call of mt_params_bind that binds the last value allocates
   gradients that are not bound, so bind gradients in that call or before. mt_params_bind writes to no bound memory:
   call mt_params_zero_grad before the first backward. Without mt_params_init, the values are those that the memory has,
   and the padding of parameters that the tensor ranks do not divide must be zero. mt_params_init overwrites bound
   values with initial values and sets bound gradients to zero. mt_optimizer_create sets bound moments to zero and
   copies masters from the values. Only one optimizer at a time can use bound state: another mt_optimizer_create is
   MT_ERR_ARGUMENT until mt_optimizer_destroy.

   The caller owns the memory and frees it after mt_params_destroy. It must be aligned to its elements, and GPUs are
   faster when each parameter is aligned to 16 bytes. All calls of the registry work on bound memory. The results have
   the same bits as without it, except that outside invariant mode a GPU may choose other kernels for the products of
   parameters that are not aligned to 16 bytes. Bound memory is not registered with NCCL. A collective over
   parameters that are not adjacent in memory copies them to a buffer of the registry. The buffer is as large as the
   largest such collective (mt_data_parallel_desc.bucket_bytes). When a kind is bound for some parameters only, the
   registry still allocates this kind for all.

   After mt_params_bind or mt_params_init, do not change value.data or grad.data by hand: the next call returns
   MT_ERR_ARGUMENT. When this happens on some ranks only, the others get MT_ERR_PEER or MT_ERR_TIMEOUT in a call that
   communicates.

   Communication: mt_params_bind is collective over the grid's world. It compares what mt_params_init compares (except
   the seed), and which kinds of each parameter are bound. When something differs, or the ranks do not all have the
   same error, every rank returns MT_ERR_MISMATCH. A call that fails has bound and written nothing. MT_ERR_ARGUMENT: a
   parameter does not fit into a buffer; bound memory overlaps or is not aligned; the GPU cannot use it
   (mt_cuda_check_memory); a kind is bound already, or the call comes too late; exp_avg, exp_avg_sq or master with a
   sharded optimizer; master with f32 parameters. MT_ERR_MEMORY: on this rank; other ranks may have succeeded. */
MT_API mt_status mt_params_bind(mt_context *ctx, mt_params *params, const mt_params_memory *memory);
MT_API mt_status mt_param_bind(mt_context *ctx, mt_param *param, const mt_params_memory *memory);

/* Allocates all values in one block of memory and all gradients in another, except those that are bound
   (mt_params_bind). Draws the values from the seed and sets the gradients to zero. A value depends only on the seed,
   the parameter's name and the element's position in the whole tensor, so every split starts from the same model.
   16-bit values are rounded from f32. No parameter can be added afterwards. A second call initialises values and
   gradients again.
   Collective over the grid's world, whose ranks compare their settings (mt_comm_compare). All ranks need the same seed,
   mt_context_desc.invariant and invariant_data, and mt_context_desc.check is 2 on all of them or on none. The ranks of
   a pipeline stage need the same parameters in the same order, the same dtype and the same mt_data_parallel_desc. If
   something differs, every rank returns MT_ERR_MISMATCH with a message that names it, and nothing has changed. With
   mt_context_desc.check == 2, this also holds for the first and the last stage of a pipeline: a name that both have
   must be shared_embedding on both, and each shared_embedding must be on both, under one name, with the same shape,
   first values and weight_decay, and in the same order.
   MT_ERR_ARGUMENT: the registry has no parameters. */
MT_API mt_status mt_params_init(mt_context *ctx, mt_params *params, uint64_t seed);

/* Sets all gradients to zero, and begins a new count of micro-batches. Call it before the first micro-batch of a step,
   also when you write all gradients by hand: until then, after a step of the optimizer, mt_sync_gradients, or
   mt_params_bind without mt_params_init, calls that add to the gradients or sum them are MT_ERR_ARGUMENT.
   MT_ERR_ARGUMENT: the parameters have no memory yet. */
MT_API mt_status mt_params_zero_grad(mt_context *ctx, mt_params *params);

/* Packs the weights of the linear layers for inference, with mt_gemm_pack (mt_kernels.cuh): the weights that the create
   functions of linear layers and of blocks have added to the registry or taken from another layer, such as a tied head.
   On a CPU with oneDNN or the built-in loop, forward products with few tokens are then faster, such as those of a BERT
   with a short text or of a prompt. Call it after the values are final, for instance after mt_checkpoint_import:
       MT_TRY(mt_checkpoint_import(ctx, checkpoint, directory));
       MT_TRY(mt_params_pack(ctx, params));
   Each rank packs its own shards. Not collective.
   Memory: about as much again as the weights that it packs, in f32 with the built-in loop (mt_gemm_pack has the
   formula); mt_params_destroy frees it. A dry run counts it.
   The registry drops packed weights when it writes their values: in mt_params_init, a step of the optimizer,
   mt_param_scatter, mt_optimizer_scatter of masters, and when a checkpoint is loaded. So does every operator of
   mt_kernels.cuh that writes to a weight with this context. The results stay right, and products read the values as
   before. Call mt_params_pack again to pack the new values. After something else has written values, such as your own
   code, another context or a collective, you must call it again before the next product.
   Bias vectors, embeddings and layers of tensors (mt_linear_tensors) are not packed. Pack the weight of a product of
   your own with mt_gemm_pack. It does nothing on a GPU, with CBLAS and in invariant mode.
   MT_ERR_ARGUMENT: the parameters have no memory yet, or ctx is not the context of the registry. MT_ERR_MEMORY: nothing
   is packed then. */
MT_API mt_status mt_params_pack(mt_context *ctx, mt_params *params);

/* What a registry has. mt_params_grid returns the grid that mt_params_create got. The parameters belong to the
   registry: they are valid until mt_params_destroy, or until mt_create_end removes them. */
MT_API const mt_grid *mt_params_grid(const mt_params *params);
MT_API int mt_params_count(const mt_params *params);
MT_API mt_param *mt_params_at(const mt_params *params, int index);          /* NULL when out of range */
MT_API mt_param *mt_params_find(const mt_params *params, const char *name); /* NULL when there is none */
MT_API int64_t mt_params_elements(const mt_params *params);                 /* of this rank, padding included */
MT_API int64_t mt_params_global_elements(const mt_params *params);          /* of this pipeline stage, no padding */

/* Copies between a shard and the whole tensor. `global` is the whole tensor in host memory, float [rows, cols] without
   padding. scatter writes this rank's part of `global` to shard, without communication. gather writes the whole tensor
   to `global` on every rank; it is collective over the tensor group. shard is param->value, param->grad or a tensor of
   the same shape (optimizer state). It may have any float type; values are widened or rounded. Scratch memory comes
   from the arena. MT_ERR_DATA, before scatter writes anything: a finite element is too large for the shard's type. */
MT_API mt_status mt_param_scatter(mt_context *ctx, const mt_param *param, const float *global, mt_tensor shard);
MT_API mt_status mt_param_gather(mt_context *ctx, mt_params *params, const mt_param *param, mt_tensor shard,
                                 float *global);

/* How a matrix is split over the tensor ranks, for programs that keep their weights without a registry. The registry
   splits a parameter with the same values of these fields in the same way. */
typedef struct mt_shard {
    int64_t rows, cols;     /* of the whole matrix, with padding of your own; a vector is [1, n] */
    mt_placement placement; /* 0: MT_REPLICATED */
    int64_t parts, unit;    /* as in mt_param_desc; 0: 1 */
    int tp_rank;            /* the tensor rank that has the shard */
    int tp_size;            /* number of tensor ranks; 0: 1 */
    int invariant;          /* mt_context_desc.invariant of the context that computes with the shard; 0: off */
} mt_shard;

/* Writes the shape of the shard to *rows and *cols, padding included. It is the shape of mt_param.value. Needs neither
   a context nor a communicator, so that a program can plan its memory before it creates anything. No communication.
   Errors, without a message: MT_ERR_ARGUMENT (a pointer is NULL, placement or invariant is out of range, tp_rank is not
   in [0, tp_size), parts is negative or above 65536, or parts or unit is above 1 with MT_REPLICATED), MT_ERR_SHAPE
   (rows or cols is not positive, unit is negative, rows * cols is above 2^48, parts * unit does not divide the split
   dimension, or tp_size does not divide `invariant`). */
MT_API mt_status mt_shard_size(const mt_shard *shard, int64_t *rows, int64_t *cols);

/* Copies between a whole matrix and a shard of it, both contiguous and in host memory. With to_whole 0, `from` is the
   whole matrix [rows, cols] and `to` is the shard, with the shape of mt_shard_size. Padding that the split adds becomes
   zero. With to_whole 1, `from` is the shard and `to` the whole matrix; only the shard's elements are written,
   so one call for each tensor rank writes the whole matrix. from and to must not overlap. No communication.
   Errors, without a message: those of mt_shard_size, MT_ERR_ARGUMENT (from and to overlap), MT_ERR_DTYPE. */
MT_API mt_status mt_shard_copy(const mt_shard *shard, mt_dtype dtype, int to_whole, const void *from, void *to);

/* A weight of a program without a registry: its shard in the program's memory, and its gradient (NULL: none). Both are
   contiguous and have the shape of mt_shard_size. */
typedef struct mt_own_weight {
    const char *name; /* for messages; copied */
    mt_shard shard;
    mt_dtype dtype; /* of value; 0: MT_F32 */
    void *value;
    float *grad;
} mt_own_weight;

/* Tells check mode what `count` weights of the program are, for programs that keep them in their own buffers. Over
   tp a weight is what its shard says, and over dp, which may be NULL, it is replicated. A bias may be [n, 1]
   or [1, n]. From then on, check mode also follows what calls write to memory of the program (mt_check_track). When
   check mode is off, it only says to invariant mode which gradients every rank of tp has whole, so that this refuses
   sums into them as into those of a registry (docs/invariance.md). Call it again when the memory of a weight changes,
   and mt_declare_forget before it is freed. Errors: MT_ERR_ARGUMENT (list or a name or value is NULL, count is
   negative), those of mt_shard_size, MT_ERR_MEMORY. See docs/own-weights.md, "Check mode". */
MT_API mt_status mt_declare_shards(mt_context *ctx, const mt_comm *tp, const mt_comm *dp, const mt_own_weight *list,
                                   int count);

/* ---- column- and row-parallel linear (arXiv 1909.08053, section 3) ----------------------------------------------- */

/* Y = X W^T + b with W [out_features, in_features]. A column-parallel layer contains f: its backward all-reduces dx. A
   row-parallel layer contains g: its forward all-reduces y. Do not call f or g yourself around or between these layers.
   By default (everything zero except the sizes) a layer has a bias and no sequence parallelism, y of a column-parallel
   layer stays split, and x of a row-parallel layer is not split. */
typedef struct mt_linear_desc {
    int64_t in_features, out_features; /* global */
    /* parts and unit of the split dimension, as in mt_param_desc, which lists those of the layouts of QKV. With 2 parts
       one layer computes gate and up of SwiGLU, and y is this rank's [gate | up] (for invariant mode see
       parts_by_shard); 0: 1 */
    int64_t parts, unit;
    float init_std; /* standard deviation of the initial weight; MT_ERR_ARGUMENT with `weight`; MT_ZERO: 0; 0: 0.02 */
    int no_bias;
    /* 1: the caller adds layer->bias->value to y, and adds to layer->bias->grad the sum of the rows of its gradient, as
       in a fused operator. The bias of a row-parallel layer is added once, after the reduction. With sequence_parallel
       a row-parallel layer's gradient is the sum over this rank's rows; mt_sync_gradients sums it over the tensor
       group. MT_ERR_ARGUMENT with no_bias */
    int skip_bias_add;
    /* 1: y is [tokens, out_features] on every rank (column only). It is read in each call: layer->desc.gather_output
       may change between calls, but not between a forward and its backward */
    int gather_output;
    int input_is_parallel; /* 1: x is already split, as a column-parallel layer leaves it (row only) */
    int sequence_parallel; /* 1: x (column) is [tokens / t, in]; y (row) is [tokens / t, out] */
    /* advanced */
    /* Only for invariant mode with parts > 1, when y (column) or x (row) is split: without gather_output, or with
       input_is_parallel. The columns are then gate and up of the first virtual shard, gate and up of the second, and so
       on. 1: your code expects this order; it changes nothing else. 0: create returns MT_ERR_ARGUMENT */
    int parts_by_shard;
    mt_param *weight; /* column only: another layer's weight, to share it (tied output head); NULL: its own */
    /* 1: backward adds the input gradient to dx instead of overwriting dx, for instance when several layers read x. dx
       gets the same bits as from an mt_add after the call. The sum over ranks is complete before it is added. It is
       read in each call: layer->desc.add_to_dx may change between calls. The hash log has dx after the addition */
    int add_to_dx;
    /* column only: out_features with padding of your own, see mt_param_desc.padded_features. With `weight` the layer
       has the padding of this weight, and padded_out_features must be 0 or the same (MT_ERR_SHAPE); 0: none */
    int64_t padded_out_features;
    /* column only: of the units of out_features, see mt_param_desc. A rank's columns of y are piece by piece. Not for
       layers of tensors in your own memory (MT_ERR_ARGUMENT), because nothing sums the gradients of their copies */
    int64_t copies, copied;
} mt_linear_desc;

/* local_features is this rank's share of the split dimension, padding included: the columns of y (column-parallel) or
   of x (row-parallel). */
typedef struct mt_column_parallel_linear {
    char name[MT_NAME_MAX];
    mt_linear_desc desc;
    mt_param *weight, *bias; /* NAME.weight, NAME.bias; bias is NULL with no_bias */
    mt_comm *tp;
    int64_t local_features;
} mt_column_parallel_linear;

typedef struct mt_row_parallel_linear {
    char name[MT_NAME_MAX];
    mt_linear_desc desc;
    mt_param *weight, *bias; /* as above */
    mt_comm *tp;
    int64_t local_features;
} mt_row_parallel_linear;

/* x is a view of the caller's memory. Its content must not change before backward has returned. */
typedef struct mt_linear_saved {
    mt_tensor x;
} mt_linear_saved;

/* Column-parallel: W is split over its rows. x [tokens, in] -> y [tokens, local_features], or [tokens, out] with
   gather_output. dy has the shape of y; with gather_output it is the whole gradient, equal on every rank. backward adds
   to the gradients of weight and bias. When dx is mt_none(), it is not computed.
   Communication: backward all-reduces dx (f). gather_output adds an all-gather of y. With sequence_parallel x is
   [tokens / t, in]: forward and backward each all-gather it, and backward reduce-scatters dx.
   Errors of create: MT_ERR_ARGUMENT (a field of desc is out of range, is for row-parallel layers or has no effect; in
   invariant mode without gather_output, several parts without parts_by_shard), MT_ERR_SHAPE (a shared weight has
   another shape, placement, parts, unit or padding). */
MT_API mt_status mt_column_parallel_linear_create(mt_context *ctx, mt_params *params, const char *name,
                                                  const mt_linear_desc *desc, mt_column_parallel_linear *out);
MT_API mt_status mt_column_parallel_linear_forward(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor x,
                                                   mt_tensor y, mt_linear_saved *saved);
MT_API mt_status mt_column_parallel_linear_backward(mt_context *ctx, const mt_column_parallel_linear *layer,
                                                    mt_tensor dy, mt_tensor dx, const mt_linear_saved *saved);

/* Row-parallel: W is split over its columns. x [tokens, local_features], or [tokens, in] without input_is_parallel -> y
   [tokens, out]. The bias is added once, after the reduction. backward adds to the gradients of weight and bias. When
   dx is mt_none(), it is not computed.
   Communication: forward all-reduces y (g). Without input_is_parallel, backward all-gathers dx. With sequence_parallel
   y is [tokens / t, out]: forward reduce-scatters it, and backward all-gathers dy.
   Error of create: MT_ERR_ARGUMENT (a field of desc is out of range, is for column-parallel layers or has no effect; in
   invariant mode with input_is_parallel, several parts without parts_by_shard). */
MT_API mt_status mt_row_parallel_linear_create(mt_context *ctx, mt_params *params, const char *name,
                                               const mt_linear_desc *desc, mt_row_parallel_linear *out);
MT_API mt_status mt_row_parallel_linear_forward(mt_context *ctx, const mt_row_parallel_linear *layer, mt_tensor x,
                                                mt_tensor y, mt_linear_saved *saved);
MT_API mt_status mt_row_parallel_linear_backward(mt_context *ctx, const mt_row_parallel_linear *layer, mt_tensor dy,
                                                 mt_tensor dx, const mt_linear_saved *saved);

/* The tensors of a linear layer in your own memory. w and b have the shape of mt_shard_size and are contiguous: w is
   split like a matrix [out_features, in_features], by rows (column-parallel) or by columns (row-parallel). The bias of
   a column-parallel layer is split like a vector [1, out_features], by columns; that of a row-parallel layer is whole.
   dw and db are their gradients, MT_F32, in the same shapes. In invariant mode each tensor has the rank's virtual
   shards one after the other (see mt_param). */
typedef struct mt_linear_tensors {
    mt_tensor w, b; /* b is mt_none(): no bias */
    /* backward adds to them; mt_none() when there is no backward. A backward without dw, or without db where b is set,
       is MT_ERR_ARGUMENT (with skip_bias_add a layer needs no db) */
    mt_tensor dw, db;
} mt_linear_tensors;

/* Create a layer of tensors in your own memory, without a registry. All functions of layers take it, and compute the
   same bits as for a layer of a registry. These functions fill params, an array of two. The layer points into
   params, and uses tp and the memory of the tensors: all must outlive it. *tensors and name are copied. The layer needs
   no destroy. tp is the tensor group. name, for messages and the hash log, may be NULL: then nothing is logged.
   desc has the meaning that it has for a layer of a registry, except for the bias, and that in_features and
   out_features may be 0: then the split dimension has no padding. b mt_none() means no bias. desc.no_bias may be 0, but
   1 with a bias is MT_ERR_ARGUMENT. desc NULL: the defaults.
   The caller sums the gradients over the data group. With sequence_parallel, db of a row-parallel layer is the sum over
   this rank's rows, and the caller also sums it over the tensor group. No communication.
   Errors: MT_ERR_SHAPE (a tensor has another shape than desc says or is not contiguous, parts * unit does not divide
   the split dimension or, in invariant mode, t does not divide V), MT_ERR_DTYPE (w and b differ in type, or dw or db is
   not MT_F32), MT_ERR_ARGUMENT (a pointer or w is NULL, db comes without b, or a field of desc is out of range, has no
   effect, or is for the create functions: init_std, weight). */
MT_API mt_status mt_column_parallel_linear_from_tensors(mt_context *ctx, mt_comm *tp, const char *name,
                                                        const mt_linear_desc *desc, const mt_linear_tensors *tensors,
                                                        mt_param *params, mt_column_parallel_linear *out);
MT_API mt_status mt_row_parallel_linear_from_tensors(mt_context *ctx, mt_comm *tp, const char *name,
                                                     const mt_linear_desc *desc, const mt_linear_tensors *tensors,
                                                     mt_param *params, mt_row_parallel_linear *out);

/* Plain calls: a column- or row-parallel linear on tensors in your own memory. Each call is that of a layer from
   mt_column_parallel_linear_from_tensors or mt_row_parallel_linear_from_tensors: the shapes of x, y, dy and dx, what
   may overlap, the communication and the errors are those of the layer. desc is read in each call. Pass the same desc
   to forward and backward; only add_to_dx may differ, and forward ignores it. w, b, dw, db are those of
   mt_linear_tensors. b mt_none() means no bias. desc.no_bias may be 0, but 1 with a bias is MT_ERR_ARGUMENT. dx may be
   mt_none(): it is not computed. Backward adds to dw and db, and overwrites dx, or with add_to_dx adds to it. It needs
   dw (MT_ERR_ARGUMENT). With db mt_none() it computes no bias gradient, also when forward had b. saved NULL: inference.
   Nothing is logged.
       mt_linear_desc whole = {.gather_output = 1};                // y [tokens, out] on every rank
       MT_TRY(mt_column_parallel_forward(ctx, grid.tp, x, w, b, y, &whole, &saved));
       MT_TRY(mt_column_parallel_backward(ctx, grid.tp, dy, w, dx, dw, db, &whole, &saved)); */
MT_API mt_status mt_column_parallel_forward(mt_context *ctx, mt_comm *tp, mt_tensor x, mt_tensor w, mt_tensor b,
                                            mt_tensor y, const mt_linear_desc *desc, mt_linear_saved *saved);
MT_API mt_status mt_column_parallel_backward(mt_context *ctx, mt_comm *tp, mt_tensor dy, mt_tensor w, mt_tensor dx,
                                             mt_tensor dw, mt_tensor db, const mt_linear_desc *desc,
                                             const mt_linear_saved *saved);
MT_API mt_status mt_row_parallel_forward(mt_context *ctx, mt_comm *tp, mt_tensor x, mt_tensor w, mt_tensor b,
                                         mt_tensor y, const mt_linear_desc *desc, mt_linear_saved *saved);
MT_API mt_status mt_row_parallel_backward(mt_context *ctx, mt_comm *tp, mt_tensor dy, mt_tensor w, mt_tensor dx,
                                          mt_tensor dw, mt_tensor db, const mt_linear_desc *desc,
                                          const mt_linear_saved *saved);

/* Run `count` column-parallel layers that read the same x. The layers share f: forward gathers x once
   (sequence_parallel), and backward writes the sum of the layers' input gradients to dx and reduces it once. layers, y
   and dy are arrays with one entry for each layer; saved is one struct for all layers. When dx is mt_none(), it is not
   computed.
   MT_ERR_ARGUMENT: a layer has gather_output, or the layers differ in tensor group, sequence_parallel or add_to_dx. */
MT_API mt_status mt_column_parallel_linear_forward_shared(mt_context *ctx, const mt_column_parallel_linear *layers,
                                                          int count, mt_tensor x, const mt_tensor *y,
                                                          mt_linear_saved *saved);
MT_API mt_status mt_column_parallel_linear_backward_shared(mt_context *ctx, const mt_column_parallel_linear *layers,
                                                           int count, const mt_tensor *dy, mt_tensor dx,
                                                           const mt_linear_saved *saved);

/* Run `count` row-parallel layers and add their outputs: y = the sum of x[i] W[i]^T + b[i] over the layers. The layers
   share g: forward reduces y once, and backward gathers dy once (sequence_parallel). layers, x, dx and saved are arrays
   with one entry for each layer. When dx[i] is mt_none(), it is not computed.
   MT_ERR_ARGUMENT: a layer has no input_is_parallel, or the layers differ in tensor group or sequence_parallel. */
MT_API mt_status mt_row_parallel_linear_forward_shared(mt_context *ctx, const mt_row_parallel_linear *layers, int count,
                                                       const mt_tensor *x, mt_tensor y, mt_linear_saved *saved);
MT_API mt_status mt_row_parallel_linear_backward_shared(mt_context *ctx, const mt_row_parallel_linear *layers,
                                                        int count, mt_tensor dy, const mt_tensor *dx,
                                                        const mt_linear_saved *saved);

/* Allocate `count` tensors [tokens, local_features] from the arena, one for each of the layers. The type and the number
   of tokens are those of `like`, which has tokens rows, or tokens / t with sequence_parallel.
     mt_column_parallel_linear_tensors  allocates y or dy; like is x or dx.
     mt_row_parallel_linear_tensors     allocates x or dx; like is y or dy.
   MT_ERR_ARGUMENT: as for the _shared functions above. */
MT_API mt_status mt_column_parallel_linear_tensors(mt_context *ctx, const mt_column_parallel_linear *layers, int count,
                                                   mt_tensor like, mt_tensor *out);
MT_API mt_status mt_row_parallel_linear_tensors(mt_context *ctx, const mt_row_parallel_linear *layers, int count,
                                                mt_tensor like, mt_tensor *out);

/* Computes a column-parallel forward for inference. x has all tokens, even with sequence_parallel: x [tokens, in] -> y
   [tokens, local_features], or [tokens, out] when the argument gather_output is 1. desc.gather_output is ignored. Adds
   the bias, except with skip_bias_add. y may be of another float type than x.
   Communication: none, or an all-gather of y with gather_output. */
MT_API mt_status mt_column_parallel_linear_product(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor x,
                                                   int gather_output, mt_tensor y);

/* These functions apply an activation to the output h of a column-parallel layer. They call mt_activation_forward or
   mt_activation_backward, in invariant mode once for each virtual shard. h is [tokens, local_features], or [tokens,
   out_features] with gather_output. y, dy and dh have the shape of h, except that with MT_SWIGLU y and dy have half the
   columns. With skip_bias_add, forward first adds the layer's bias to h in place, and backward also adds to the bias's
   gradient. dh may be h. No communication.
   MT_ERR_ARGUMENT: the layer has a bias, gather_output and skip_bias_add, so that h is whole but the bias is split. */
MT_API mt_status mt_column_parallel_activation_forward(mt_context *ctx, const mt_column_parallel_linear *layer,
                                                       mt_activation kind, mt_tensor h, mt_tensor y);
MT_API mt_status mt_column_parallel_activation_backward(mt_context *ctx, const mt_column_parallel_linear *layer,
                                                        mt_activation kind, mt_tensor h, mt_tensor dy, mt_tensor dh);

/* Run a linear layer and the activation next to it in one call. The two are one fused operator when
   mt_gemm_options.epilogue allows it and the column-parallel layer has skip_bias_add or no_bias, and no
   gather_output. Otherwise the call runs the linear layer and mt_column_parallel_activation_forward or _backward. A
   fused forward does not write NAME.output to the hash log.
     forward (column-parallel):  h = x W^T + b [tokens, local_features], y = act(h).
     backward (row-parallel):    dy is the gradient of the row-parallel layer's output. dh [tokens,
       before->local_features] is the gradient of h, the output of the column-parallel layer `before`. Adds to the
       gradients of the row-parallel layer's weight and bias. When `before` has skip_bias_add, also adds to the gradient
       of the bias of `before`.
   MT_ERR_ARGUMENT (backward): the row-parallel layer has no input_is_parallel or has add_to_dx, or `before` has
   gather_output. */
MT_API mt_status mt_column_parallel_linear_activation_forward(mt_context *ctx, const mt_column_parallel_linear *layer,
                                                              mt_activation kind, mt_tensor x, mt_tensor h, mt_tensor y,
                                                              mt_linear_saved *saved);
MT_API mt_status mt_row_parallel_linear_activation_backward(mt_context *ctx, const mt_row_parallel_linear *layer,
                                                            const mt_column_parallel_linear *before, mt_activation kind,
                                                            mt_tensor dy, mt_tensor h, mt_tensor dh,
                                                            const mt_linear_saved *saved);

/* ---- norm -------------------------------------------------------------------------------------------------------- */

/* LayerNorm or RMSNorm. Every tensor rank has the whole gain and bias. By default the layer normalises whole tokens.
   With groups > 0 ("per head") it normalises each head in this rank's query groups separately. Under sequence
   parallelism, and per head, gain and bias are sequence_partial: a rank computes their gradients from its own tokens or
   heads, and mt_sync_gradients sums them. */
typedef struct mt_norm_layer_desc {
    int64_t features;      /* number of features that are normalised together: hidden, or per head the head size */
    int64_t groups;        /* per head: number of query groups, over all tensor ranks, below 2^31; 0: whole tokens */
    mt_norm_kind kind;     /* 0: MT_LAYER_NORM */
    float eps;             /* 0: 1e-5 */
    int sequence_parallel; /* 1: x is [tokens / t, features]; MT_ERR_ARGUMENT with groups > 0 */
} mt_norm_layer_desc;

typedef struct mt_norm_layer {
    mt_norm_layer_desc desc;
    mt_param *weight, *bias; /* NAME.weight, NAME.bias [1, features]; bias is NULL for MT_RMS_NORM */
    mt_comm *tp;
    int64_t local_groups; /* per head: query groups on this rank, padding included; otherwise 0 */
} mt_norm_layer;

/* x is a view of the caller's memory. Its content must not change before backward has returned. stats lies in the
   arena: [rows of x, 2], or per head [rows of x * heads in a row, 2]. */
typedef struct mt_norm_saved {
    mt_tensor x, stats;
} mt_norm_saved;

/* x, y, dy, dx [tokens, features], or [tokens / t, features] with sequence_parallel. dx = dresidual + the gradient
   through the norm. dresidual may be mt_none(). dx may be the same memory as dy or dresidual. saved == NULL: inference.
   Per head, x, y, dy, dx are [tokens * local_groups, n * features], with one row for each token and query group. A row
   holds n heads of the group side by side: those that this layer normalises. For example, in a contiguous qkv
   [tokens, local_groups * unit], with unit = (heads_per_group + 2) * head_dim, this view holds the queries:
       mt_tensor_cols(mt_tensor_reshape(qkv, tokens * local_groups, unit), 0, heads_per_group * head_dim)
   No communication. The hash log gets NAME.output and NAME.input_grad, except per head.
   Error of create: MT_ERR_ARGUMENT (a field of desc is out of range, or groups is set with sequence_parallel). */
MT_API mt_status mt_norm_layer_create(mt_context *ctx, mt_params *params, const char *name,
                                      const mt_norm_layer_desc *desc, mt_norm_layer *out);
MT_API mt_status mt_norm_layer_forward(mt_context *ctx, const mt_norm_layer *layer, mt_tensor x, mt_tensor y,
                                       mt_norm_saved *saved);
MT_API mt_status mt_norm_layer_backward(mt_context *ctx, const mt_norm_layer *layer, mt_tensor dy, mt_tensor dresidual,
                                        mt_tensor dx, const mt_norm_saved *saved);

/* ---- for authors of blocks --------------------------------------------------------------------------------------- */

/* The blocks of megatron.h are made of layers, operators and these functions. docs/blocks.md shows how to write a
   block. tp is the tensor group, mt_params_grid(params)->tp. `function` is the name of the calling function, for the
   error message. Add a new parameter with mt_params_add. Set sequence_partial for a replicated parameter whose gradient
   covers only this rank's tokens (sequence parallelism) or heads (a gain per head). */

/* For the create function of a block. mt_check_integer, mt_check_size, mt_check_enum and mt_check_float in
   mt_kernels.cuh check the fields of a desc.
     mt_create_check  returns MT_ERR_ARGUMENT when an argument is NULL. The message names the argument.
     mt_layer_name    writes the name of the block to out, which has MT_NAME_MAX characters: a copy of `name` or, when
                      `name` is NULL, the next layer.N. Give the layers of the block names of their own, that begin with
                      it (mt_param_name). N is counted from the names of parameters. A block without parameters, or
                      whose create failed, uses no N. MT_ERR_ARGUMENT: `name` is empty or does not fit, or is NULL with
                      several pipeline stages.
     mt_param_name    writes NAME.SUFFIX to out, which has MT_NAME_MAX characters. MT_ERR_ARGUMENT: it does not fit.
     mt_params_mark   returns a mark for mt_create_end: how many parameters and buffers (mt_params_buffer) the registry
                      has. Call it before the block adds its first parameter or buffer.
     mt_create_end    returns `status`. Before it returns an error, it removes the parameters and buffers that were
                      added after the mark, and fills the block_bytes bytes of *block with zeros. */
MT_API mt_status mt_create_check(mt_context *ctx, const char *function, const mt_params *params, const void *desc,
                                 const void *out);
MT_API mt_status mt_layer_name(mt_context *ctx, const mt_params *params, const char *name, char *out);
MT_API mt_status mt_param_name(mt_context *ctx, char *out, const char *name, const char *suffix);
MT_API size_t mt_params_mark(const mt_params *params);
MT_API mt_status mt_create_end(mt_params *params, size_t mark, void *block, size_t block_bytes, mt_status status);

/* Allocates zeroed memory: with on_host 1 host memory (for structs), with on_host 0 memory of the context's device (for
   tables). mt_params_destroy frees it, and so does mt_create_end after an error. */
MT_API mt_status mt_params_buffer(mt_context *ctx, mt_params *params, size_t bytes, int on_host, void **out);

/* Returns the number of equal shards into which every split dimension is divided: V in invariant mode, otherwise t. */
MT_API int mt_params_shards(const mt_params *params);

/* Checks for the beginning of a call, before it computes anything. mt_kernels.cuh has more: mt_args_check,
   mt_tensor_check, and mt_check_apart for views that must not overlap.
     mt_check_param       MT_ERR_ARGUMENT: param is NULL, or mt_params_init was not called.
     mt_check_gradient    For a backward. MT_ERR_ARGUMENT: nothing may be added to the gradient of param now, because it
                          was not zeroed, is synchronised or was used already, or was declared final. Call it before you
                          add to param->grad yourself, or do anything before the backward of a layer that cannot be
                          undone. param NULL: nothing is checked.
     mt_check_micro_batch For the backward of a whole model, in invariant mode, before it adds to a gradient. `sequence`
                          is the batch's first_sequence. MT_ERR_ARGUMENT: the gradients have another micro-batch, for
                          which mt_accumulate_gradients was not called.
     mt_check_activation  MT_ERR_SHAPE: t is not [rows, cols]. MT_ERR_DTYPE: t has another type than `weight`.
     mt_check_sent        MT_ERR_SHAPE: a tensor that is sent to other tensor ranks is not contiguous. `in` is sent only
                          under sequence parallelism, `out` always. Either may be mt_none().
     mt_check_tokens      MT_ERR_SHAPE: in invariant mode, V does not divide `tokens`. Only training calls need it. */
MT_API mt_status mt_check_param(mt_context *ctx, const char *function, const mt_param *param);
MT_API mt_status mt_check_gradient(mt_context *ctx, const char *function, const mt_param *param);
MT_API mt_status mt_check_micro_batch(mt_context *ctx, const char *function, const mt_param *param, int64_t sequence);
MT_API mt_status mt_check_activation(mt_context *ctx, const char *function, const mt_param *weight, const char *name,
                                     mt_tensor t, int64_t rows, int64_t cols);
MT_API mt_status mt_check_sent(mt_context *ctx, const char *function, mt_comm *tp, int sequence_parallel,
                               const char *in_name, mt_tensor in, const char *out_name, mt_tensor out);
MT_API mt_status mt_check_tokens(mt_context *ctx, const char *function, int64_t tokens);

/* Convert between the tokens of the tensor group and the rows on this rank. Under sequence parallelism rows = tokens /
   t; otherwise rows = tokens.
     mt_sequence_tokens  returns the tokens for a number of rows, or -1 when int64_t overflows.
     mt_sequence_rows    writes the rows for a number of tokens. MT_ERR_SHAPE: t does not divide tokens.
     mt_gather_tokens    under sequence parallelism, all-gathers x [rows, n] into *all [tokens, n], in the arena.
                         Otherwise *all is x. */
MT_API int64_t mt_sequence_tokens(mt_comm *tp, int sequence_parallel, int64_t rows);
MT_API mt_status mt_sequence_rows(mt_context *ctx, const char *function, mt_comm *tp, int sequence_parallel,
                                  int64_t tokens, int64_t *rows);
MT_API mt_status mt_gather_tokens(mt_context *ctx, mt_comm *tp, int sequence_parallel, mt_tensor x, mt_tensor *all);

/* Allocates several tensors from the arena. Calls mt_arena_tensor for each entry of the list, in order. */
typedef struct mt_arena_request {
    mt_tensor *out;
    mt_dtype dtype;
    int64_t rows, cols;
} mt_arena_request;
MT_API mt_status mt_arena_tensors(mt_context *ctx, const mt_arena_request *list, int count);

/* Returns a view [rows, cols] of the elements of t. When t is not contiguous, or has another number of elements,
   returns a view of -1 rows, which every call refuses. */
MT_API mt_tensor mt_tensor_reshape(mt_tensor t, int64_t rows, int64_t cols);

/* Adds a sum over tokens to one or two parameter gradients, for instance of a bias or a table of positions. a and b are
   the gradients, MT_F32; b has as many columns as a, or is mt_none(). rows is the number of rows on this rank. op(ctx,
   arg, first, count, a, b) must add the contribution of rows [first, first + count) to its own arguments a and b. By
   default op is called once, with all rows, and a and b are the gradients themselves. In invariant mode it is called
   once for each virtual shard of the tokens, with scratch memory as a and b. In this mode, with V > 1, operators refuse
   to sum into the gradient of a parameter that is MT_REPLICATED (MT_ERR_ARGUMENT): see docs/invariance.md.
   MT_ERR_SHAPE, in invariant mode: V does not divide the tokens. */
typedef mt_status (*mt_token_operator)(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor a,
                                       mt_tensor b);
MT_API mt_status mt_sum_over_tokens(mt_context *ctx, mt_comm *tp, int sequence_parallel, mt_token_operator op,
                                    const void *arg, int64_t rows, mt_tensor a, mt_tensor b);

/* Use these functions when a block calls an operator on one virtual shard (mt_shard_cols). The bits of the operator's
   result may depend on the leading dimension and the alignment of its tensors. In invariant mode *out is therefore a
   contiguous, aligned tensor in the arena. When t itself is contiguous and aligned, and outside invariant mode, *out is
   t.
     mt_invariant_input   *out is the tensor to read instead of t, with the content of t.
     mt_invariant_output  *out is the tensor to write instead of t; its content is undefined.
     mt_invariant_store   copies out, the result of mt_invariant_output, to t after the operator has run. */
MT_API mt_status mt_invariant_input(mt_context *ctx, mt_tensor t, mt_tensor *out);
MT_API mt_status mt_invariant_output(mt_context *ctx, mt_tensor t, mt_tensor *out);
MT_API mt_status mt_invariant_store(mt_context *ctx, mt_tensor out, mt_tensor t);

/* Logs an activation t [tokens, n] in the context's hash log. Does nothing without a log, or when name is "". With
   sequence_parallel t is [tokens / t, n], this rank's rows. When every rank has all columns of t, cols is NULL. When
   the columns are split over tensor ranks, cols is a parameter whose split dimension is split in the same way, such as
   the layer's weight; t must have cols->local_features columns (MT_ERR_SHAPE).
   The line is named PREFIX.WHAT. PREFIX is `name` (of a parameter or a layer) without its last `up` components, where
   components are separated by dots: "l.0.fc1.weight" with up 2 is "l.0". */
MT_API mt_status mt_hash_log_activation(mt_context *ctx, const char *name, int up, const char *what, mt_tensor t,
                                        int sequence_parallel, const mt_param *cols);

/* ---- vocabulary-parallel embedding and cross-entropy ------------------------------------------------------------- */

typedef struct mt_embedding_desc {
    int64_t vocab, features;
    float init_std;        /* standard deviation of the initial table; MT_ZERO: 0; 0: 0.02 */
    int sequence_parallel; /* 1: y is [tokens / t, features] */
    /* 1: the output head uses the same weight. On one pipeline stage, set mt_linear_desc.weight of the head to it. With
       several stages, create the embedding with the same name and desc on the first and on the last stage: both copies
       get the same initial values, and mt_sync_gradients sums their gradients */
    int shared;
    /* advanced */
    /* rows of the table with padding of your own, such as 50304 for a vocab of 50257. Each of t tensor ranks has
       padded_vocab / t of them, rounded up. Set it also in the output head (mt_linear_desc.padded_out_features) and
       in mt_cross_entropy_desc. Ids must still be below vocab. The rows from vocab on may hold any finite numbers: they
       do not enter the loss or a gradient, and their own gradient is 0. Checkpoints have the rows of vocab only; they
       load with any padding. 0: no padding of your own */
    int64_t padded_vocab;
} mt_embedding_desc;

typedef struct mt_vocab_parallel_embedding {
    mt_embedding_desc desc;
    mt_param *weight; /* NAME.weight [vocab, features], split over its rows */
    mt_comm *tp;
    int64_t first_row; /* token id of the first row of this rank's shard */
} mt_vocab_parallel_embedding;

/* forward: row i of y [tokens, features] is row ids[i] of the whole table. backward: adds row i of dy to row ids[i] of
   the gradient. ids [tokens] are in memory of the context's device, and must be the same in both calls.
   Communication: forward all-reduces y (g). With sequence_parallel y and dy are [tokens / t, features]: forward
   reduce-scatters y, and backward all-gathers dy.
   Errors: MT_ERR_ARGUMENT of create (a field of desc is out of range), MT_ERR_DATA (an id is not in [0, vocab); on a
   GPU a later call returns it, see mt_ids_check). */
MT_API mt_status mt_vocab_parallel_embedding_create(mt_context *ctx, mt_params *params, const char *name,
                                                    const mt_embedding_desc *desc, mt_vocab_parallel_embedding *out);
MT_API mt_status mt_vocab_parallel_embedding_forward(mt_context *ctx, const mt_vocab_parallel_embedding *layer,
                                                     const int32_t *ids, int64_t tokens, mt_tensor y);
MT_API mt_status mt_vocab_parallel_embedding_backward(mt_context *ctx, const mt_vocab_parallel_embedding *layer,
                                                      const int32_t *ids, int64_t tokens, mt_tensor dy);

typedef struct mt_cross_entropy_desc {
    int64_t vocab;         /* global, without padding */
    float label_smoothing; /* a in (1 - a) * nll + a * mean of -log p over vocab, as in PyTorch; 0 <= a < 1 */
    /* a target of this value has loss 0 and gradient 0; MT_ZERO: targets of 0; 0: -100, as in PyTorch */
    int32_t ignore_index;
    /* total columns of the logits over all ranks, with padding of your own: each rank has padded_vocab / t, rounded up
       (see mt_embedding_desc). Logits with another number of columns are MT_ERR_SHAPE. The columns from vocab on do not
       enter the loss, whatever they hold, and their gradient is 0; 0: none */
    int64_t padded_vocab;
} mt_cross_entropy_desc;

typedef struct mt_cross_entropy_saved {
    mt_tensor logits; /* the view that was passed; backward overwrites it with its gradient */
    /* [2, tokens], the same on every rank: for each token the maximum m of its logits over the whole vocabulary, and
       log(sum of exp(x - m)). The sum of the two is the token's log-sum-exp */
    mt_tensor lse;
    const int32_t *targets;
} mt_cross_entropy_saved;

/* Logits of your own: the vocabulary is split in order. Each of t ranks has n = vocab / t columns, rounded up, and rank
   r has the logits of the ids [r n, (r + 1) n). Those of ids from vocab on are padding. They are at the end of the last
   ranks, and a rank may have only padding: with vocab 5 and t = 4, n is 2, rank 2 has one column of padding, and rank 3
   has two. With padded_vocab, n is padded_vocab / t, rounded up. In invariant mode with V virtual shards, a rank has
   V / t shards of vocab / V columns each, rounded up. mt_shard_size returns this number in every mode, as the rows of a
   matrix [vocab, 1] with MT_SPLIT_ROWS. */

/* forward computes loss [1, tokens] from logits [tokens, local vocabulary] and targets [tokens]. The logits are the
   output of a column-parallel head without gather_output. targets are in memory of the context's device. saved keeps
   views of logits and targets, and the tensor lse, which lies in the arena. logits and targets must not change before
   backward. backward overwrites the saved logits with the gradient of the sum of scale * dloss[i] * loss[i] over the
   tokens. dloss is [1, tokens], or [1, 1] for all tokens alike; mt_none() means all ones. logits may be of any float
   type; loss, dloss and lse are MT_F32.
   Communication: forward all-gathers four floats for each token over tp, in invariant mode for each token and virtual
   shard.
   MT_ERR_DATA: a target is neither in [0, vocab) nor ignore_index; on a GPU a later call returns it, see mt_ids_check.
   MT_ERR_ARGUMENT: a field of desc is out of range. */
MT_API mt_status mt_vocab_parallel_cross_entropy_forward(mt_context *ctx, mt_comm *tp,
                                                         const mt_cross_entropy_desc *desc, mt_tensor logits,
                                                         const int32_t *targets, mt_tensor loss,
                                                         mt_cross_entropy_saved *saved);
MT_API mt_status mt_vocab_parallel_cross_entropy_backward(mt_context *ctx, mt_comm *tp,
                                                          const mt_cross_entropy_desc *desc, mt_tensor dloss,
                                                          float scale, const mt_cross_entropy_saved *saved);

/* Runs forward and backward in one call, for a loop that knows dloss and scale before the forward. Writes loss and
   overwrites the logits with their gradient. With one tensor rank, outside invariant mode, it reads the logits only
   once. */
MT_API mt_status mt_vocab_parallel_cross_entropy_forward_backward(mt_context *ctx, mt_comm *tp,
                                                                  const mt_cross_entropy_desc *desc, mt_tensor logits,
                                                                  const int32_t *targets, mt_tensor dloss, float scale,
                                                                  mt_tensor loss);

/* Draws a token for each row of logits [rows, local vocabulary], of any float type: the output of a column-parallel
   head without gather_output, split as described above. desc says how to draw: see mt_sample_desc in mt_kernels.cuh.
   vocab is the size of the whole vocabulary without padding, and padded_vocab is that of mt_cross_entropy_desc. Padding
   is never drawn. logits do not change. Every rank passes the same desc, and gets the same ids [rows], in memory of the
   context's device. When the logits have the same bits on every split, as in invariant mode, so do the ids. A CUDA
   graph can record the call: pass the positions in desc->positions, because desc->position is fixed in the graph.
   Communication: one all-gather over tp. Each rank sends 8 bytes, a logit and an id, for each row and candidate. A row
   has 1 candidate at temperature 0, with top_k 1, and without top_k and top_p. With top_k it has the smaller of top_k
   and the local vocabulary. With top_p alone all logits of the row are candidates. The arena holds the candidates of
   all ranks.
   Errors: MT_ERR_ARGUMENT (a field of desc, vocab or padded_vocab is out of range), MT_ERR_DATA on every rank (a logit
   is NaN; the id is then -1, and on a GPU a later call returns the error: see mt_ids_check). */
MT_API mt_status mt_vocab_parallel_sample(mt_context *ctx, mt_comm *tp, int64_t vocab, int64_t padded_vocab,
                                          const mt_sample_desc *desc, mt_tensor logits, int32_t *ids);

/* ---- gradients --------------------------------------------------------------------------------------------------- */

/* In invariant mode, adds up the gradients of the micro-batches of a step in a binary tree. When this rank has several
   micro-batches in a step, call it after the backward of each of them, including the last. For a single micro-batch the
   call is optional. Outside invariant mode it does nothing, because backward already adds to the gradients. Read
   param->grad only after mt_sync_gradients. For the tree the registry keeps log2(V_d / data ranks) further copies of
   the gradients.
   A call that is missing between two micro-batches makes the backward of the second MT_ERR_ARGUMENT, in mt_pipeline_run
   and, when mt_batch.first_sequence differs, in mt_gpt_backward and mt_bert_backward. When it is missing after the last
   of several, mt_sync_gradients is MT_ERR_ARGUMENT. A loop around other layers that never calls it is not found,
   because a layer may be used twice in one micro-batch.
   MT_ERR_SHAPE: this rank has more than V_d / data ranks micro-batches. MT_ERR_ARGUMENT: the gradients are synchronised
   or used already. */
MT_API mt_status mt_accumulate_gradients(mt_context *ctx, mt_params *params);

/* Sums the gradients over ranks. Call it after the last backward of a step. First it sums sequence_partial gradients
   over the tensor group (one all-reduce), the gradients of copies over the tensor group (mt_param_desc.copies; one
   all-reduce for each parameter, in scratch memory of the arena), and shared embeddings over the embedding group (one
   all-reduce each). Then it sums all gradients over the data group, with one all-reduce for each bucket. With a sharded
   optimizer it uses reduce-scatters over the data group: param->grad then holds the sum only in this rank's share of
   each bucket (see mt_gather_gradients).
   In invariant mode, the sums over the tensor group are computed once for each micro-batch (in
   mt_accumulate_gradients).
   Shared embeddings are summed last. All sums are all-reduces, even with a sharded optimizer.
   MT_ERR_SHAPE, in invariant mode: the number of micro-batches is not a power of two.
   MT_ERR_ARGUMENT: the gradients are synchronised or used already, or were never zeroed (see mt_params_zero_grad); in
   invariant mode, the last of several micro-batches was not accumulated. After another error, such as that of a
   collective, the gradients are undefined: call mt_params_zero_grad and do the step again. */
MT_API mt_status mt_sync_gradients(mt_context *ctx, mt_params *params);

/* Overlaps the sums over the data group with the last backward of a step. Optional; call it before that backward (see
   Megatron-LM's is_last_microbatch). A bucket is then summed as soon as its gradients are final (mt_gradients_final),
   on MT_DEVICE_CUDA at the same time as the backward. mt_sync_gradients sums the remaining buckets and waits. The sums
   have the same bits as without this call. In invariant mode it does nothing. mt_params_zero_grad cancels it. With
   mt_pipeline_run call it in mt_pipeline_stage.backward, before the backward of the last micro-batch.
   MT_ERR_ARGUMENT: called twice without mt_sync_gradients or mt_params_zero_grad in between, or after mt_sync_gradients
   without mt_params_zero_grad. */
MT_API mt_status mt_sync_gradients_begin(mt_context *ctx, mt_params *params);

/* Declares that the gradients of the parameters from first to last, in the registry's order, are final: nothing more is
   added to them in this step. mt_gpt_backward calls it for its layers. In a loop of your own it is optional; call it in
   the same order on every rank. mt_sync_gradients also sums gradients that were not declared final. Without
   mt_sync_gradients_begin it does nothing.
   Do not add to a gradient that was declared final: its sum may already be under way, and the addition may be lost. The
   backward of a layer that would add to it is MT_ERR_ARGUMENT.
   MT_ERR_ARGUMENT: a gradient is declared final twice in one step, or first comes after last, or the two are in
   different registries. */
MT_API mt_status mt_gradients_final(mt_context *ctx, const mt_param *first, const mt_param *last);

/* Makes param->grad the whole sum on every rank. Call it after mt_sync_gradients when a program with a sharded
   optimizer reads gradients; other programs do not need it. Communication: an all-gather of all gradients (MT_F32) over
   the data group, one for each bucket. Without a sharded optimizer, and in invariant mode, it does nothing, because
   param->grad already is the whole sum. MT_ERR_ARGUMENT: mt_sync_gradients was not called. */
MT_API mt_status mt_gather_gradients(mt_context *ctx, mt_params *params);

/* *norm = the L2 norm of the whole model's gradient, the same on every rank. Call it after mt_sync_gradients, before or
   after the step of the optimizer. An element with copies on several ranks is counted once, but if any copy is not
   finite, the norm is not finite. When all copies of an element are alike, they do not change whether the norm is
   infinite or NaN. A NaN norm always has the bits of NAN (math.h), however the model is split. A sharded optimizer adds
   the squares in another order than an unsharded one, so the last digits of the norm may differ between the two.
   Communication: an all-reduce of two floats over the model group and, with a sharded optimizer, one over the data
   group. In invariant mode: an all-reduce of V * (number of parameters + 1) floats over the tensor group; over the
   pipeline group a send to the next stage, a broadcast and an all-reduce, each of one float.
   MT_ERR_ARGUMENT, before any communication: mt_sync_gradients was not called, but has something to sum: with several
   data ranks; for a sequence_partial parameter with several tensor ranks; for one with copies; for a shared embedding
   with several pipeline stages, or in invariant mode; or for accumulated micro-batches. A stage in the middle of a
   pipeline does not know the shared embedding: it gets MT_ERR_PEER or MT_ERR_TIMEOUT. */
MT_API mt_status mt_grad_norm(mt_context *ctx, mt_params *params, float *norm);

/* ---- optimizer --------------------------------------------------------------------------------------------------- */

typedef struct mt_optimizer_desc {
    float beta1, beta2; /* MT_ZERO: 0; 0: 0.9, 0.999 */
    float eps;          /* 0: 1e-8. MT_ZERO: 0; an element whose gradients have all been 0 then becomes NaN */
    float weight_decay; /* of the parameters that have mt_param_desc.weight_decay; 0: none */
    /* advanced */
    /* 1: 16-bit parameters are rounded stochastically (see mt_adamw) and have no f32 master. Parameter, gradient and
       state take 14 bytes per parameter instead of 18. MT_ERR_ARGUMENT for f32 parameters */
    int stochastic_rounding;
    /* seed of stochastic_rounding. Step n (1, 2, ...) uses the subsequence (FNV-1a hash of the parameter's name) + n,
       with one random word for each global element (see mt_random). Ignored without stochastic_rounding */
    uint64_t seed;
} mt_optimizer_desc;

typedef struct mt_optimizer {
    mt_optimizer_desc desc;
    mt_params *params;
    /* first and second moments, and f32 masters of 16-bit parameters, see mt_optimizer_moments and mt_optimizer_master.
       NULL: there are none, or mt_params_bind has bound those of all parameters */
    float *m, *v, *master;
    /* floats in each of m, v and master that is not NULL; with a sharded optimizer, those of this rank */
    int64_t elements;
    int64_t step;            /* steps done */
    mt_multi_tensor *update; /* this rank's share of the parameters and of their state */
    int uses_bound;          /* 1: mt_params_bind has bound state that this optimizer uses */
} mt_optimizer;

/* Creates an optimizer and allocates the state that is not bound. Masters are copied from the parameters, so call it
   after mt_params_init, or after mt_params_bind has bound all values. desc may be NULL. Collective over the grid's
   world, whose ranks compare desc: if it differs, every rank returns MT_ERR_MISMATCH. params must outlive the
   optimizer. Other errors: MT_ERR_ARGUMENT (the parameters have no values yet; a field of desc is out of range; bound
   state with a sharded optimizer; bound state that another optimizer uses, which is not destroyed yet; bound master
   with stochastic_rounding), MT_ERR_MEMORY. */
MT_API mt_status mt_optimizer_create(mt_context *ctx, mt_params *params, const mt_optimizer_desc *desc,
                                     mt_optimizer *out);
MT_API void mt_optimizer_destroy(mt_context *ctx, mt_optimizer *optimizer); /* a zero-initialised one is allowed */

/* Writes views of a parameter's moments to *m and *v: MT_F32, shaped like its gradient. Callers may read, write, gather
   and scatter them (mt_param_gather). MT_ERR_UNSUPPORTED: the optimizer is sharded; use mt_optimizer_read,
   mt_optimizer_gather and mt_optimizer_scatter. */
MT_API mt_status mt_optimizer_moments(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                      mt_tensor *m, mt_tensor *v);

/* Writes a view of a parameter's f32 master, or of its value when it has no master, to *master. A program that writes
   to a master or to its parameter's value must write the same to the other. MT_ERR_UNSUPPORTED as above. */
MT_API mt_status mt_optimizer_master(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                     mt_tensor *master);

/* The states that an optimizer keeps of a parameter: first moment, second moment, master. The names are those of
   PyTorch and Megatron. */
typedef enum mt_optimizer_state { MT_EXP_AVG = 0, MT_EXP_AVG_SQ = 1, MT_MASTER = 2 } mt_optimizer_state;

/* Copies a state of a parameter to `shard`, which is MT_F32 and shaped like param->grad. For a parameter without a
   master, MT_MASTER is its value. Collective over the data group when the optimizer is sharded. */
MT_API mt_status mt_optimizer_read(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                   mt_optimizer_state state, mt_tensor shard);

/* Copies between a state of a parameter and the whole tensor in host memory, as mt_param_gather and mt_param_scatter
   do. gather is collective over the tensor group and, when the optimizer is sharded, over the data group. scatter does
   not communicate; call it on every data rank with the same `global`. Scattering MT_MASTER also writes the parameter's
   value, rounded to its type. MT_ERR_DATA as in mt_param_scatter: an element is too large for the value's type. */
MT_API mt_status mt_optimizer_gather(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                     mt_optimizer_state state, float *global);
MT_API mt_status mt_optimizer_scatter(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                      mt_optimizer_state state, const float *global);

/* Performs one AdamW step (mt_adamw) with the gradients multiplied by grad_scale, for instance clip coefficient / loss
   scale. Updates masters and rounds parameters in one pass. When the optimizer is sharded, each data rank updates its
   share, and an all-gather for each bucket brings all parameters to every data rank. With the same gradients and
   grad_scale, the parameters have the same bits as with an unsharded optimizer.
   MT_ERR_ARGUMENT, and nothing has changed: lr or grad_scale is not finite (mt_adamw_check); mt_sync_gradients was not
   called, as in mt_grad_norm; a step has used these gradients already, see mt_params_zero_grad. */
MT_API mt_status mt_optimizer_step(mt_context *ctx, mt_optimizer *optimizer, float lr, float grad_scale);

/* ---- a step that does not wait ----------------------------------------------------------------------------------- */

/* A training step that keeps its numbers in memory of the device. mt_grad_norm waits for the device, because the loop
   needs the norm; here the device decides, and the loop only reads results when it wants to print them:
       mt_step step;
       MT_TRY(mt_step_create(ctx, &optimizer, NULL, 1.0f, &step));
       for (n = 1; n <= steps; n++) {
           MT_TRY(mt_params_zero_grad(ctx, params));
           MT_TRY(mt_step_begin(ctx, &step, lr, n));
           batch.random_offset = mt_step_random_offset(&step);           // new dropout masks in every step
           batch.loss_scale = mt_step_loss_scale(&step);                 // for MT_F16
           ... forward, and backward with 1.0f / tokens ...
           MT_TRY(mt_sync_gradients(ctx, params));
           MT_TRY(mt_step_update(ctx, &step, mt_none()));
           if (n % 10 == 0) MT_TRY(mt_step_read(ctx, &step, &values));   // waits
       }
       mt_step_destroy(ctx, &step);
   The parameters have the same bits as with mt_grad_norm, mt_loss_scaler_update, mt_clip_coefficient and
   mt_optimizer_step, if the loss scale is a power of two. A step whose norm is not finite changes no parameter. On a
   GPU, a step with a wrong token id changes the parameters. mt_step_read, or another call that waits, then returns
   MT_ERR_DATA (see mt_ids_check): go back to a checkpoint. Over NCCL the timeout of a communicator must be longer than
   all steps between two reads. The step can be recorded as a CUDA graph (mt_graph_begin in mt_comm.h), without
   mt_step_begin and mt_step_read. */
typedef struct mt_step {
    mt_optimizer *optimizer;
    mt_step_values *values; /* in memory of the device */
} mt_step;

/* scaler is the state to begin with; it is copied. NULL: no loss scale. max_norm as in mt_clip_coefficient. The caller
   owns *out, and destroys it before the context. optimizer must outlive *out. Load a checkpoint before mt_step_create,
   which copies optimizer->step, too. Between mt_step_create and mt_step_destroy do not call mt_optimizer_step. Errors:
   MT_ERR_ARGUMENT (scaler is out of range, or max_norm is not finite), MT_ERR_MEMORY, MT_ERR_SYSTEM (CUDA failed). */
MT_API mt_status mt_step_create(mt_context *ctx, mt_optimizer *optimizer, const mt_loss_scaler *scaler, float max_norm,
                                mt_step *out);
MT_API void mt_step_destroy(mt_context *ctx, mt_step *step); /* NULL and a zero-initialised struct are allowed */

/* Sets the learning rate of the step, and random_offset to number << 20, so that dropout draws what it draws with
   mt_batch.step = number. Leave mt_batch.step 0, because the two are added. The call waits for the GPU only as an
   mt_upload does. MT_ERR_ARGUMENT: lr is not finite, number >= 2^44. */
MT_API mt_status mt_step_begin(mt_context *ctx, const mt_step *step, float lr, uint64_t number);

/* Computes the norm of the gradients, decides (mt_step_decide), and does the step of the optimizer. Call it after
   mt_sync_gradients. loss [1, 1], MT_F32, in memory of the device, is optional. It must be the same on all ranks of all
   pipeline stages. A step whose loss is not finite is skipped, too. Does not wait. The communication is that of
   mt_grad_norm and mt_optimizer_step, and so are the errors. A skipped step counts as a use of the gradients. */
MT_API mt_status mt_step_update(mt_context *ctx, const mt_step *step, mt_tensor loss);

/* Waits for the device, and copies the numbers of the last step to *out: its norm, whether it was skipped, and the loss
   scaler, for a checkpoint. Sets optimizer->step; call it before mt_checkpoint_save. */
MT_API mt_status mt_step_read(mt_context *ctx, const mt_step *step, mt_step_values *out);

/* Return what mt_batch.random_offset and mt_batch.loss_scale [1, 1] need. The memory belongs to *step, which
   mt_step_create has made. For NULL and a zero-initialised struct: NULL and mt_none(). */
MT_API const uint64_t *mt_step_random_offset(const mt_step *step);
MT_API mt_tensor mt_step_loss_scale(const mt_step *step);

/* Returns the learning rate of a step, counted from 0: linear warm-up to lr over `warmup` steps, then a cosine down to
   min_lr at step `total` and min_lr from there on. A negative step or warmup counts as 0. */
MT_API float mt_cosine_schedule(int64_t step, int64_t warmup, int64_t total, float lr, float min_lr);

/* The same with a linear decay instead of the cosine, as for BERT. */
MT_API float mt_linear_schedule(int64_t step, int64_t warmup, int64_t total, float lr, float min_lr);

/* ---- pipeline: stages, several micro-batches in flight ----------------------------------------------------------- */

/* A schedule is the list of actions of one stage in one step. mt_pipeline_schedule makes it, or you write it yourself.
   mt_pipeline_run runs it. The schedules below run the micro-batches in ascending order, both forward and backward.
   Their names are Megatron's (core/pipeline_parallel/schedules.py).
     1F1B           PipeDream-flush (arXiv 2104.04473, section 2.2.1). A stage first runs one forward for each stage
                    after it, then one forward and one backward in turn. On stage number `stage` (from 0), at most
                    min(stages - stage, micro_batches) micro-batches are in flight
     GPIPE          all forwards, then all backwards (arXiv 1811.06965). All micro-batches are in flight
     FORWARD_ONLY   for evaluation
   With equal stages, 1F1B and GPIPE take the same time, that of micro_batches + stages - 1 forwards and backwards. The
   bubble is (stages - 1) / micro_batches of the ideal time. */
typedef enum mt_schedule { MT_SCHEDULE_1F1B = 0, MT_SCHEDULE_GPIPE = 1, MT_SCHEDULE_FORWARD_ONLY = 2 } mt_schedule;

/* After a forward, a stage sends its output to the next stage. After a backward, it sends its input gradient to the
   previous stage. The last two kinds send and receive in one call. They are for two neighbours that both send at the
   same time: with separate calls each would wait for the other. */
typedef enum mt_action_kind {
    MT_FORWARD = 0,
    MT_BACKWARD = 1,
    MT_SEND_FORWARD = 2,
    MT_RECV_FORWARD = 3,
    MT_SEND_BACKWARD = 4,
    MT_RECV_BACKWARD = 5,
    MT_SEND_FORWARD_RECV_BACKWARD = 6,
    MT_SEND_BACKWARD_RECV_FORWARD = 7
} mt_action_kind;

/* A slot holds what one micro-batch in flight keeps: its input and its activations. A micro-batch occupies its slot
   from the time when its input is received until its backward is done. */
typedef struct mt_action {
    int micro_batch, slot;           /* what the action computes or sends; in MT_RECV_...: what it receives */
    int recv_micro_batch, recv_slot; /* what the last two kinds receive; otherwise equal to micro_batch, slot */
    mt_action_kind kind;
} mt_action;

/* Writes the actions of stage number `stage` (from 0), at most 6 for each micro-batch, and their number to *count.
   capacity is the number of entries in actions. actions NULL: writes only the number. No communication.
   MT_ERR_ARGUMENT: schedule, stages, stage or micro_batches is out of range. MT_ERR_SHAPE: there are more than
   `capacity` actions. */
MT_API mt_status mt_pipeline_schedule(mt_schedule schedule, int stages, int stage, int micro_batches,
                                      mt_action *actions, int capacity, int *count);

/* Returns the number of slots that the actions use. */
MT_API int mt_pipeline_slots(const mt_action *actions, int count);

/* The functions that mt_pipeline_run calls for a stage. forward computes output from input, which is the output of the
   previous stage. backward computes dinput from doutput, which is the gradient of this stage's output. The pointer
   backward may be NULL when no action is MT_BACKWARD. On the first stage input and dinput are mt_none(). On the last
   stage output and doutput are mt_none(). mt_pipeline_run owns the memory of these four tensors. input stays valid
   until the backward of its micro-batch is done; the others are valid only during the call. */
typedef struct mt_pipeline_stage {
    int64_t rows, cols; /* of the four tensors: [tokens, hidden]; with sequence parallelism [tokens / t, hidden] */
    mt_dtype dtype;     /* of the four tensors: mt_params_dtype */
    mt_status (*forward)(mt_context *ctx, void *user, const mt_action *action, mt_tensor input, mt_tensor output);
    mt_status (*backward)(mt_context *ctx, void *user, const mt_action *action, mt_tensor doutput, mt_tensor dinput);
    void *user; /* passed to both functions */
} mt_pipeline_stage;

/* Runs the actions of this rank's stage. Every rank of the pipeline group calls it with the actions of its own stage.
   What a forward leaves in the arena stays there until the backward of its micro-batch is done. Every forward must
   allocate what the first one did, in the same order. On return the arena is as before the call. docs/many-ranks.md
   says how large the arena must be, and gives the rules for a list of actions that you write yourself.
   Communication: for each micro-batch, one send of [rows, cols] to the next stage after the forward, and one to the
   previous stage after the backward. The ledger of grid->pp counts them. In check mode, what is sent must be replicated
   or split by rows over the tensor group.
   MT_ERR_ARGUMENT: an action breaks a rule. The message has the action's number, and no action has run. MT_ERR_SHAPE:
   a forward leaves more in the arena than the first one. When one stage returns an error, the others wait until that
   rank destroys its communicators or the timeout passes. */
MT_API mt_status mt_pipeline_run(mt_context *ctx, const mt_grid *grid, const mt_pipeline_stage *stage,
                                 const mt_action *actions, int count);

/* In check mode, says what t is, which another stage has sent: tp over the tensor group and dp over the data group.
   MT_UNDECLARED: replicated or split by rows. It changes nothing over a group where t is known. mt_pipeline_run and the
   models of megatron.h call it; call it after an mt_recv of your own. Errors: MT_ERR_ARGUMENT (tp or dp is out of
   range, or tp is MT_PARTIAL, which mt_send refuses over the tensor group), MT_ERR_MEMORY. */
MT_API mt_status mt_declare_received(mt_context *ctx, const mt_grid *grid, mt_tensor t, mt_placement tp,
                                     mt_placement dp);

/* ---- hash log: which tensor differs between two runs ------------------------------------------------------------- */

/* A log for debugging (docs/invariance.md). While a context has a log, linear layers, norm layers and the blocks of
   megatron.h log the tensors that they compute in training (forward with saved, backward). For each tensor of a step
   the log has one line: a name, and a hash of the bits of the whole tensor. The hash does not depend on how ranks and
   micro-batches split the tensor. In invariant mode two runs that split the same step differently therefore write the
   same lines. When they do not, the first line that differs names the tensor in which the runs first differ.
   The name is that of a layer with .output, .input_grad or .output_grad. The log costs time, host memory for the names,
   and a few collectives for each flush. */
typedef struct mt_hash_log mt_hash_log;

/* Creates the log of a context. A context has at most one; a second is MT_ERR_ARGUMENT. Destroy the log before the
   context. grid must outlive the log. mt_hash_log_destroy accepts NULL. */
MT_API mt_status mt_hash_log_create(mt_context *ctx, const mt_grid *grid, mt_hash_log **out);
MT_API void mt_hash_log_destroy(mt_hash_log *log);

/* Sets first_token, the position in the global batch of the first token that the next calls work on. The blocks of
   megatron.h that take an mt_batch call this function themselves. In a loop around other layers, call it before each
   micro-batch. Does nothing without a log. */
MT_API void mt_hash_log_tokens(mt_context *ctx, int64_t first_token);

/* paused = 1: layers and blocks log nothing until a call with paused = 0. A block that recomputes a forward in its
   backward calls it, so that each tensor is logged once. Does nothing without a log. */
MT_API void mt_hash_log_pause(mt_context *ctx, int paused);

/* Log what layers do not log themselves:
     mt_hash_log_shard  a tensor shaped like a parameter's shard: its value, its gradient (after mt_sync_gradients) or a
                        moment. The line is named by the parameter's name and the suffix, such as "", ".grad" or
                        ".exp_avg".
     mt_hash_log_value  a number that every rank has, such as the loss. */
MT_API mt_status mt_hash_log_shard(mt_context *ctx, mt_hash_log *log, const mt_param *param, const char *suffix,
                                   mt_tensor shard);
MT_API mt_status mt_hash_log_value(mt_context *ctx, mt_hash_log *log, const char *name, float value);

/* Receives a line. differs is 1 when ranks that should have equal copies of the tensor do not. */
typedef void (*mt_hash_line)(void *user, const char *name, uint64_t hash, int differs);

/* Calls `line` on every rank once for each tensor, in the order in which the tensors were first computed, and empties
   the log. Call it at the end of a step. Collective over the tensor, data and pipeline groups. With several stages the
   lines come in the order in which a single stage would write them, provided that all stages call mt_hash_log_value for
   the same names in the same order. */
MT_API mt_status mt_hash_log_flush(mt_context *ctx, mt_hash_log *log, mt_hash_line line, void *user);

/* ---- safetensors files ------------------------------------------------------------------------------------------- */

/* A file in the format of github.com/huggingface/safetensors. Opening it reads and checks the header. The data of a
   tensor are read later, when the program uses them. mt_safetensors_open refuses the files that the format's reference
   library refuses, and also files with duplicate keys, NUL characters, or tensors of more than MT_SAFETENSORS_DIMS
   dimensions.
   The file stays open and mapped into memory until mt_safetensors_close, and must not change in that time. When another
   program truncates it, mt_safetensors_read and the functions that load checkpoints return MT_ERR_IO, but a program
   that reads mt_safetensors_tensor.data itself gets SIGBUS, as with any mapping. */
typedef struct mt_safetensors mt_safetensors; /* opaque */

#define MT_SAFETENSORS_DIMS 8
#define MT_PATH_MAX 1024 /* characters of a path DIRECTORY/NAME with its NUL; a longer path is MT_ERR_ARGUMENT */

/* A tensor of a file. The struct and its pointers belong to the file: they are valid until mt_safetensors_close. */
typedef struct mt_safetensors_tensor {
    const char *name;  /* UTF-8 */
    const char *dtype; /* as in the file: "F32", "BF16", "I64", ... */
    int dims;
    int64_t shape[MT_SAFETENSORS_DIMS];
    const void *data; /* little-endian, not necessarily aligned */
    int64_t bytes;
    const mt_safetensors *file;
} mt_safetensors_tensor;

/* Opens a file. MT_ERR_IO: it cannot be read. MT_ERR_DATA: it is not a valid safetensors file. The message names the
   file and the reason. */
MT_API mt_status mt_safetensors_open(mt_context *ctx, const char *path, mt_safetensors **out);
MT_API void mt_safetensors_close(mt_safetensors *file); /* NULL is allowed */
MT_API int mt_safetensors_count(const mt_safetensors *file);
MT_API const mt_safetensors_tensor *mt_safetensors_at(const mt_safetensors *file, int index); /* in order of names */
MT_API const mt_safetensors_tensor *mt_safetensors_find(const mt_safetensors *file,
                                                        const char *name); /* NULL: there is none */

/* Returns the value of a key of "__metadata__", or NULL when there is none. The string is valid until
   mt_safetensors_close. */
MT_API const char *mt_safetensors_metadata(const mt_safetensors *file, const char *key);

/* Writes the elements of a tensor of type F32, F64, BF16 or F16 as floats to out, in host memory; F64 is rounded.
   MT_ERR_DTYPE: the tensor is of another type. MT_ERR_DATA: a finite F64 element is too large for a float. MT_ERR_IO:
   the tensor cannot be read, or the file was truncated since it was opened. After the last two errors the content of
   out is undefined. */
MT_API mt_status mt_safetensors_read(mt_context *ctx, const mt_safetensors_tensor *tensor, float *out);

/* Writes `bytes` bytes of a tensor of any type, from byte `at` of its data on, to out, as they are in the file.
   MT_ERR_ARGUMENT: the tensor does not have these bytes. MT_ERR_IO: as for mt_safetensors_read. */
MT_API mt_status mt_safetensors_read_bytes(mt_context *ctx, const mt_safetensors_tensor *tensor, int64_t at,
                                           int64_t bytes, void *out);

/* Writes a file in the same format:
       mt_setting about[] = {{"format", "pt"}, {"step", "100"}};
       int64_t shape[] = {4, 6};
       mt_safetensors_writer *w;  MT_TRY(mt_safetensors_create(ctx, "x.safetensors", about, 2, &w));
                                  MT_TRY(mt_safetensors_add(ctx, w, "weight", "F32", 2, shape));
                                  MT_TRY(mt_safetensors_write(ctx, w, weight, 4 * 6 * sizeof *weight));
                                  MT_TRY(mt_safetensors_finish(ctx, w));
                                  mt_safetensors_destroy(w);
   The header precedes the data, so add every tensor before the first write. The data are written to PATH.tmp; finish
   renames it to PATH. Until finish has succeeded, PATH is as before. The first write creates PATH.tmp and locks it
   (flock): a second writer of the same PATH, also of another process, gets MT_ERR_IO until the first one is finished or
   destroyed. A PATH.tmp that a killed run has left is replaced. The metadata begin with a checksum of the file, as
   those of a checkpoint do. */
typedef struct mt_safetensors_writer mt_safetensors_writer; /* opaque */

/* create:  metadata: `count` names and values, UTF-8; NULL if count is 0. mt_field_text writes a number as text.
   add:     a tensor of a type of the format ("F32", "BF16", "I64", ...), with 0 to MT_SAFETENSORS_DIMS dimensions.
   write:   appends bytes of the tensors, little-endian, in the order of their adds, without gaps. One call may have a
            part of a tensor, or several tensors.
   finish:  synchronises the file with the disk (fsync) and renames it to PATH.
   destroy: frees the writer. Without a finish before, it removes PATH.tmp. NULL is allowed.
   Strings are copied. MT_ERR_ARGUMENT: a type or a shape is not one of the format, a tensor is added after a write,
   or more or fewer bytes were written than the tensors have. MT_ERR_DATA, at the first write or at finish: a name is
   given twice or is not UTF-8. MT_ERR_UNSUPPORTED: the header has more than 100000000 bytes. MT_ERR_IO: the file cannot
   be written, another writer writes it, or PATH is a directory, a pipe, a device or a link to one (also /dev/stdout).
   MT_ERR_UNSUPPORTED: this process was forked from the one that began it. */
MT_API mt_status mt_safetensors_create(mt_context *ctx, const char *path, const mt_setting *metadata, int count,
                                       mt_safetensors_writer **out);
MT_API mt_status mt_safetensors_add(mt_context *ctx, mt_safetensors_writer *writer, const char *name, const char *dtype,
                                    int dims, const int64_t *shape);
MT_API mt_status mt_safetensors_write(mt_context *ctx, mt_safetensors_writer *writer, const void *data, size_t bytes);
MT_API mt_status mt_safetensors_finish(mt_context *ctx, mt_safetensors_writer *writer);
MT_API void mt_safetensors_destroy(mt_safetensors_writer *writer);

/* The open files of one model: DIRECTORY/STEM.safetensors or, when there is no such file, the files that
   DIRECTORY/STEM.safetensors.index.json names, as Hugging Face shards a model. MT_ERR_IO: there is neither the file nor
   the index. MT_ERR_DATA: a tensor is in two files, the index and the files disagree, or a newer version of this
   library wrote a file. DIRECTORY may come from elsewhere, so links in it are not followed, except those to a file
   beside the link and those of Hugging Face's cache (../../blobs/HASH): another one is MT_ERR_IO. mt_safetensors_open
   and DIRECTORY itself follow links. STEM may have at most 40 characters. The pointers that mt_safetensors_set_find and
   mt_safetensors_set_file return are valid until mt_safetensors_set_close. */
typedef struct mt_safetensors_set mt_safetensors_set; /* opaque */

MT_API mt_status mt_safetensors_set_open(mt_context *ctx, const char *directory, const char *stem,
                                         mt_safetensors_set **out);
MT_API void mt_safetensors_set_close(mt_safetensors_set *set);                                  /* NULL is allowed */
MT_API const mt_safetensors *mt_safetensors_set_file(const mt_safetensors_set *set, int index); /* NULL: no such file */
MT_API const mt_safetensors_tensor *mt_safetensors_set_find(const mt_safetensors_set *set,
                                                            const char *name); /* NULL: there is none */

/* ---- named values in files --------------------------------------------------------------------------------------- */

/* The type of mt_field.value. */
typedef enum mt_field_kind {
    MT_FIELD_I64 = 0,  /* int64_t */
    MT_FIELD_U64 = 1,  /* uint64_t */
    MT_FIELD_INT = 2,  /* int */
    MT_FIELD_F32 = 3,  /* float, finite */
    MT_FIELD_F64 = 4,  /* double, finite */
    MT_FIELD_BOOL = 5, /* int: 0 or 1 */
    MT_FIELD_TEXT = 6  /* char[bytes], UTF-8, ends with a NUL */
} mt_field_kind;

/* A variable of the caller that is written to a file or read from one. When kind, low and high are 0, it is an int64_t
   of any value. mt_checkpoint_save and the functions that read fields refuse a float or double that is not finite. */
typedef struct mt_field {
    const char *name;
    mt_field_kind kind;
    void *value;
    int64_t low, high; /* MT_FIELD_I64, MT_FIELD_INT: smallest and largest value that is accepted; both 0: any */
    size_t bytes;      /* MT_FIELD_TEXT: the size of the array */
    int must_match;    /* checkpoints only. 1: load refuses a file with another value; 0: load reads the value */
    int nullable;      /* JSON only. 1: null leaves the value as it is; 0: null is MT_ERR_DATA */
} mt_field;

#define MT_FIELD_TEXT_MAX 32

/* Writes the value of a numeric field as text, as it is in the metadata of a file. The text has enough digits to read
   back the same value, and a decimal point in every locale. For MT_FIELD_TEXT, and when field or its value is NULL, the
   text is empty. */
MT_API void mt_field_text(const mt_field *field, char text[MT_FIELD_TEXT_MAX]);

/* Reads each field from the entry of the same name in a file's metadata. Ignores must_match.
   MT_ERR_DATA: there is no such entry, it is not a value of the field's kind and range, or it is a text that is longer
   than the field's array. The message names the file, the field, its value and what the value must be. After an error
   some fields may already have been written. MT_ERR_ARGUMENT: a field has no name, no value or an unknown kind,
   or is a text of 0 bytes. */
MT_API mt_status mt_safetensors_fields(mt_context *ctx, const mt_safetensors *file, const mt_field *fields, int count);

/* Returns MT_ERR_DATA with the message "FILE: its metadata has NAME 'VALUE', must be WANTED". VALUE is what the
   metadata has under `name`; without such an entry the message is "FILE: its metadata has no NAME". Use it to refuse a
   value that mt_safetensors_fields accepts. */
MT_API mt_status mt_safetensors_refuse(mt_context *ctx, const mt_safetensors *file, const char *name,
                                       const char *wanted);

/* Reads fields from the file DIRECTORY/NAME, a JSON object or list. A field that the object does not have stays as
   it is. Other members of the object are ignored. The field "a.b" is member b of the object that is member a, "a.b.c"
   member c of that, and "a.0" is the first element of the list that is member a. The file may be a list if a field is
   named "0" or "0.a", which is member a of its first element. A text that is longer than its array is truncated. Whole
   numbers must not be negative. NAME may have directories, such as "a/b.json". Links out of DIRECTORY are not followed,
   see mt_safetensors_set_open.
   When there is no such file, *exists becomes 0 and nothing is read; when exists is NULL, a missing file is MT_ERR_IO.
   MT_ERR_IO: the file cannot be read. MT_ERR_DATA: it is not JSON, an object has a key twice, a value is not of its
   field's kind or range, or member a is neither an object nor null although a field is named "a.b" (with a field "a.0"
   it may also be a list). After an error some fields may already have been written. MT_ERR_ARGUMENT: a field has no
   name, no value or an unknown kind, or is a text of 0 bytes. */
MT_API mt_status mt_json_read(mt_context *ctx, const char *directory, const char *name, const mt_field *fields,
                              int count, int *exists);

/* The same for a text in memory. `where` is what messages call it. With ctx NULL there is no message. */
MT_API mt_status mt_json_parse(mt_context *ctx, const char *where, const char *text, const mt_field *fields, int count);

/* Finds a member of the JSON object `text`: its value is text[*from] to text[*to - 1]. Returns 0 when the object has no
   such member or is not well-formed. Only the outermost members are found. */
MT_API int mt_json_find(const char *text, const char *name, size_t *from, size_t *to);

/* Reads the file DIRECTORY/NAME, a JSON object or list of at most `most` bytes. *text ends with a NUL; free it with
   mt_host_free. exists and the errors are those of mt_json_read; without a file, and after an error, *text is NULL. */
MT_API mt_status mt_json_text(mt_context *ctx, const char *directory, const char *name, size_t most, char **text,
                              int *exists);

/* A value in a text of JSON, or what is left of one: text[0] to text[bytes - 1]. */
typedef struct mt_json_part {
    const char *text;
    size_t bytes;
} mt_json_part;

/* Goes through the members of an object or the elements of a list, one in each call. *rest is the object or list before
   the first call, and what follows the member after each. *value becomes the value. name becomes the name of a member,
   or the text of an element that is a string, truncated to bytes - 1 bytes; for other elements it is empty. Returns 0
   at the end, for other values, and where the text is not well-formed. */
MT_API int mt_json_next(mt_json_part *rest, char *name, size_t bytes, mt_json_part *value);

/* ---- checkpoints ------------------------------------------------------------------------------------------------- */

/* Saves and loads the parameters of a registry, the state of its optimizer, and the training state of a loop:
       mt_checkpoint *c;        mt_checkpoint_desc d = {.directory = "runs/a", .optimizer = &adam};
                                MT_TRY(mt_checkpoint_create(ctx, params, &d, &c));
       mt_training_state s = {.step = 100};            // the same on every rank
                                MT_TRY(mt_checkpoint_save(ctx, c, &s));        // runs/a/step-00000100
                                MT_TRY(mt_checkpoint_load(ctx, c, 100, &s));   // in another run, on any grid

   A checkpoint is a directory on a file system that all ranks see: DIRECTORY/step-00000100. Its tensors are whole, not
   sharded, and load on any tensor x data x pipeline grid. With one pipeline stage its files are:
     model.safetensors      the parameters in the registry's type; training state and fields are in its __metadata__
     optimizer.safetensors  for each parameter P: P.exp_avg, P.exp_avg_sq and, if it has a master, P.master, all F32
     config.json            if the format writes one (mt_checkpoint_format.config)
     generation_config.json beside config.json, if load or import has read one: a JSON object of at most 1 MiB.
                            What is read through a link named step-N is not copied
   With 4 stages, model.safetensors becomes model-00001-of-00004.safetensors, ..., and model.safetensors.index.json, as
   Hugging Face shards a model; the same holds for the optimizer. A parameter that the first and the last stage share is
   in the first stage's file.

   The model's files have the registry's names, shapes and layouts, unless mt_checkpoint_desc.table has others. With a
   table, load and import also read files with the names of the registry. The optimizer's files always have the
   registry's names and layouts.

   Versions: each file has the version of the library that wrote it. The library reads files of its own version and of
   older ones. A file of a newer version, even a newer patch, is MT_ERR_DATA with a message that has both versions.
   mt_checkpoint_load refuses files without a version; mt_checkpoint_import reads them, because other programs write
   such files.

   Safety: a save writes to DIRECTORY/.step-00000100.tmp, synchronises every file and directory with the disk, and then
   renames the directory. If the run is killed at any moment, the older checkpoints are intact, and the new one is
   either complete or not there. Each file has a checksum of all its bytes.

   Locking: only one run at a time can write to a directory. A checkpoint locks the file DIRECTORY/.lock (flock) at its
   first save, or in mt_checkpoint_lock, and holds the lock until mt_checkpoint_destroy or the end of the process. On a
   file system without locks nothing is locked. */
typedef struct mt_checkpoint mt_checkpoint; /* opaque */

/* Flags of a row of an mt_tensor_table. */
typedef enum mt_tensor_flags {
    /* the file has the tensor as [in, out]; parts are then columns of it. No effect on a parameter of one row */
    MT_TENSOR_TRANSPOSED = 1,
    /* an import may lack the tensor: its parameter keeps its value, and import logs a warning. MT_ERR_ARGUMENT: the
       parameter has no value yet; call mt_params_init before. mt_checkpoint_load needs all tensors */
    MT_TENSOR_OPTIONAL = 2,
    /* files may have the whole parameter again under this name, in the layout of its other row, as those of a tied head
       may. Save does not write the tensor. Load and import refuse one with other values (MT_ERR_DATA), and read it when
       the tensor of the other row is missing. part must be 0 in both rows */
    MT_TENSOR_COPY = 4
} mt_tensor_flags;

/* A row of an mt_tensor_table. */
typedef struct mt_tensor_name {
    const char *file;  /* name of the tensor in a file, at most MT_NAME_MAX characters; one '#' may stand for a number
   */
    const char *param; /* name of the parameter, with the same '#'. NULL: load and import ignore the tensor */
    int part;          /* a number that mt_checkpoint_format.part explains; 0: the whole parameter */
    int flags;         /* sum of mt_tensor_flags */
} mt_tensor_name;

/* Load and import also accept this ending in place of the table's, for example "x.gamma" for "x.weight". */
typedef struct mt_tensor_alias {
    const char *ending;     /* in the files, such as "gamma" */
    const char *stands_for; /* in the table, such as "weight" */
} mt_tensor_alias;

/* A table of the names and layouts that parameters have in files of another program. One table serves save, load and
   import. This one is for a program whose layers are called layers.0, layers.1, ...:
       static const mt_tensor_name names[] = {{"net.embed.weight", "embedding.weight", 0, 0},
                                              {"net.h.#.fc.weight", "layers.#.up.weight", 0, MT_TENSOR_TRANSPOSED},
                                              {"net.h.#.q.weight", "layers.#.qk.weight", 1, 0},  // part 1 and
                                              {"net.h.#.k.weight", "layers.#.qk.weight", 2, 0},  // part 2 of qk
                                              {"net.h.#.mask", NULL, 0, 0}};                     // is ignored
       static const mt_tensor_table table = {names, 5, "net.", NULL, 0};
   A parameter may have several rows: each of their tensors has one part of it. A tensor may have several rows: it has
   their parts one below the other, in the order of the table. All parameters of one tensor must be on one pipeline
   stage. A parameter without a row has its own name in the file. A row whose parameter the registry does not have is
   not used. */
typedef struct mt_tensor_table {
    const mt_tensor_name *names; /* [count] */
    int count;
    /* a beginning of names in `names`, such as "net.". Load and import also read files in which no name has it. Rows
       that do not begin with it, such as "lm_head.weight", keep their names. NULL: none */
    const char *prefix;
    const mt_tensor_alias *aliases; /* [alias_count] */
    int alias_count;
} mt_tensor_table;

/* A part of a parameter: of every `unit` rows, the `rows` rows from row `first` on. For example, unit 8, first 2 and
   rows 3 are the rows 2, 3, 4, 10, 11, 12, 18, ... A parameter of one row, such as a bias, counts as one row for each
   element. All parts of a parameter have the same unit, and together they have all its rows, once.
   With zip, the rows of the part have another order in the file. They are divided into groups of zip_unit rows. The
   first |zip| rows of a group are two halves in the parameter and pairs in the file: rows i and i + zip / 2 of the
   parameter are rows 2 i and 2 i + 1 of the file. The other rows keep their places. A negative zip is the reverse:
   pairs in the parameter, halves in the file. */
typedef struct mt_tensor_part {
    int64_t unit, first, rows; /* rows 0: the row of the table is not used for this parameter */
    int64_t zip_unit, zip;     /* zip must be even; 0: the same order */
} mt_tensor_part;

/* A format describes the model of a checkpoint. megatron.h has one for its GPT (mt_gpt_checkpoint_create). Every
   function is optional (NULL), and none may communicate. Their argument `model` is mt_checkpoint_desc.model. */
typedef struct mt_checkpoint_format {
    /* Adds metadata. Called with index 0, 1, ...: returns the name of that entry and writes its value. Returns NULL
       when there are no more entries. */
    const char *(*metadata)(const void *model, int index, char value[MT_FIELD_TEXT_MAX]);
    /* Writes the text of config.json to text, and returns its length, as snprintf does; 0: no file. given is the
       config.json that load or import has read last, or NULL; keep its members that the format does not know. bytes is
       4096 more than the length of given. */
    int (*config)(const void *model, const char *given, char *text, size_t bytes);
    /* Returns an error when the files in the directory are not of this model. load and import call it before they read
       tensors. */
    mt_status (*check)(mt_context *ctx, const void *model, const char *directory, const mt_safetensors_set *files);
    /* Explains a number `part` of the table, which is not 0: writes to *out what part of the parameter it is. On entry
       *out is zero; leave it so when the parameter has no such part, and the row is not used. Without this function
       every part must be 0 (MT_ERR_ARGUMENT). */
    void (*part)(const void *model, const mt_param *param, int part, mt_tensor_part *out);
} mt_checkpoint_format;

typedef struct mt_checkpoint_desc {
    /* directory of the run's checkpoints; save creates it, but not its parent; the string is copied. NULL: the
       checkpoint can only import */
    const char *directory;
    mt_optimizer *optimizer; /* must outlive the checkpoint; NULL: parameters only */
    int keep;                /* save keeps so many of the newest checkpoints, and removes the others; 0: 2 */
    /* advanced */
    /* variables of the program that are saved and loaded with the parameters. The array is copied, but its names and
       values must outlive the checkpoint */
    const mt_field *fields;
    int field_count;
    const mt_tensor_table *table;       /* must outlive the checkpoint; NULL: the registry's names and layouts */
    const mt_checkpoint_format *format; /* is copied; NULL: none */
    const void *model;                  /* passed to the format's functions; MT_ERR_ARGUMENT without a format */
} mt_checkpoint_desc;

#define MT_NOTE_MAX 1024

/* What a loop needs to resume, in addition to parameters and optimizer. The library uses only step; it stores the other
   fields and gives them back. */
typedef struct mt_training_state {
    int64_t step;           /* steps done, at most 2^48; names the checkpoint */
    uint64_t seed;          /* of weights, batches and dropout */
    int64_t position;       /* in the data, in a unit that the loop chooses, at most 2^62 */
    mt_loss_scaler scaler;  /* all zeros without a scaler */
    char note[MT_NOTE_MAX]; /* a text that the loop chooses, such as its flags; UTF-8 */
} mt_training_state;

/* Creates a checkpoint; opens and writes no file. Allocates host memory for the largest unsharded parameter in f32
   (twice with a table that changes layouts), and 1 KiB of device memory. params must have all its parameters, and
   outlive the checkpoint. Load and import allocate parameters that have no memory yet, as mt_params_init does; an
   import that lacks tensors (MT_TENSOR_OPTIONAL) and a save need mt_params_init or one of them before. Not collective.
   MT_ERR_ARGUMENT: the registry has no parameters; a value of desc is out of range (the limit of directory is
   MT_PATH_MAX - 128 characters); the optimizer is of another registry; a field has no name or no value, or its name is
   already used by another field or by the library's metadata; a row breaks a rule of mt_tensor_table, the parts of a
   parameter do not have each of its rows once, or the parts of a tensor have different widths. */
MT_API mt_status mt_checkpoint_create(mt_context *ctx, mt_params *params, const mt_checkpoint_desc *desc,
                                      mt_checkpoint **out);
MT_API void mt_checkpoint_destroy(mt_context *ctx, mt_checkpoint *checkpoint); /* NULL is allowed */

/* Creates the directory if it is missing, locks it and tries to write to it. The first save does the same; call this
   function to get an error before the training begins. It is collective over the grid's world, and so are save, load
   and import: when one rank fails, every rank returns the same status and message. MT_ERR_IO: the directory cannot be
   written, or another run (or another mt_checkpoint of this run) holds the lock. MT_ERR_UNSUPPORTED: this process was
   forked from the one that holds the lock; save returns it, too. */
MT_API mt_status mt_checkpoint_lock(mt_context *ctx, mt_checkpoint *checkpoint);

/* Saves a checkpoint of step state->step. Collective over the grid's world, as load and import are. The ranks compare
   state, fields and the optimizer's step: when they differ, every rank returns MT_ERR_MISMATCH, whose message has both
   values and their ranks, and nothing is written. Removes the oldest checkpoints, so that desc.keep of them remain, and
   the files that a killed save has left behind. When something cannot be removed, save logs a warning, and the next
   save tries again. A symbolic link is removed, but not its target. On MT_DEVICE_META no file is touched.
   MT_ERR_IO: no space, no permission, a checkpoint of this step or a later one exists, or another run holds the lock.
   MT_ERR_DATA: the note, a text or a name is not UTF-8, or an element of a parameter or of the optimizer's state is
   not finite; the message names the tensor. MT_ERR_ARGUMENT: state, fields or the optimizer's step on some
   rank are not what mt_checkpoint_load accepts, or the last step of a sharded optimizer failed before the data ranks
   had gathered the parameters; mt_checkpoint_load makes them complete. After an error the older checkpoints are still
   there.
   While one rank of each pipeline stage writes, the others wait in a collective. The timeout of the world
   (mt_launch_desc.timeout_s) must exceed the time that a rank takes to write its files.
   The arena needs memory for the largest parameter, unsharded and padded, twice: once in the parameters' type and once
   in f32; with a sharded optimizer, twice in f32. */
MT_API mt_status mt_checkpoint_save(mt_context *ctx, mt_checkpoint *checkpoint, const mt_training_state *state);

/* Loads the checkpoint of a step, which may have been saved on another grid. Collective over the grid's world. Before
   it writes the first parameter, it checks the names, shapes and types (F32, F64, BF16 or F16) of all tensors, their
   values, the checksums, mt_checkpoint_format.check, the training state and the fields. No tensor may be missing, and
   none may be unknown that the table does not ignore. A tensor may have another type than its parameter. Its elements
   must be finite, and stay finite when they are rounded to the parameter's type; so 1e5 is refused for MT_F16. The
   ranks compare what they have read: MT_ERR_MISMATCH when the training state, or the size or checksum of a file,
   differs between them, for example because they load different steps.
   With an optimizer, f32 parameters are then loaded from the masters in the files, if there are any, and masters that
   the files do not have become copies of the loaded parameters.
   MT_ERR_IO, MT_ERR_DATA: the message names the file and the reason. MT_ERR_MEMORY: the arena has no memory for the
   largest shard in f32, which 16-bit parameters and sharded optimizers need. MT_ERR_UNSUPPORTED: on MT_DEVICE_META.
   After an error nothing has changed, with one exception: when the disk fails or another program truncates a file after
   the checks have passed (MT_ERR_IO), some parameters may already have been loaded. */
MT_API mt_status mt_checkpoint_load(mt_context *ctx, mt_checkpoint *checkpoint, int64_t step, mt_training_state *state);

/* Loads only the parameters, and copies them to the masters. Moments and training state stay as they are. directory has
   model.safetensors or its index, from a checkpoint or from another program. Fields with must_match are compared when
   the file has them; the program's variables stay as they are. Collective and errors as for mt_checkpoint_load. */
MT_API mt_status mt_checkpoint_import(mt_context *ctx, mt_checkpoint *checkpoint, const char *directory);

/* Writes the step of the newest checkpoint in the directory to *step, or -1 when there is no checkpoint or no
   directory. With comm it is collective: the first rank looks, and every rank of comm gets its result. comm NULL: not
   collective. */
MT_API mt_status mt_checkpoint_latest(mt_context *ctx, mt_comm *comm, const char *directory, int64_t *step);

/* Writes the path of a checkpoint, DIRECTORY/step-00000100 for step 100, to path, which has `bytes` characters.
   MT_ERR_ARGUMENT: it does not fit with its NUL. */
MT_API mt_status mt_checkpoint_path(mt_context *ctx, const char *directory, int64_t step, char *path, size_t bytes);

/* ---- the time of a step on a machine that you do not have -------------------------------------------------------- */

/* A machine has the rates that determine the time of the entries of a trace (mt_trace in mt_comm.h). It is read from a
   text. Each line has a key and its values; # begins a comment. Rates are per second. They are those of one rank,
   except `network`, which is that of a node.
       name       TEXT                  to show
       gemm       TYPE M N K FLOPS      the product of an [M, K] and a [K, N] matrix
       gemm       TYPE * * * FLOPS      products of every shape, used if no line with a shape has their type
       attention  NAME TYPE FLOPS
       memory     NAME TYPE BYTES       operators that read and write memory, and the optimizer
       operator   SECONDS               is added to the time of each operator, for its launch; without this line 0
       node       RANKS                 ranks in a node, which have consecutive numbers; without this line 1
       link       BYTES SECONDS         between ranks of a node: bytes each way, and latency
       network    BYTES SECONDS         between nodes: bytes each way of a whole node, and latency
       overlap    0 or 1                0: mt_overlap_begin overlaps nothing; without this line 1
       peak       TYPE FLOPS            for mt_machine_peak
       capacity   BYTES                 memory of a rank, for mt_machine_capacity
   TYPE is f32, bf16, f16 or *, which means any type; integers count as f32. NAME is the name of an operator in the
   trace, such as mt_norm_forward, or *, which means any. When several lines fit, the one that names the operator
   counts. When several of these are left, the one that names the type counts, and of equal lines the last one.

   An entry takes this time, where n ranks communicate B bytes (as in mt_ledger) with bandwidth W and latency L:
       product                     FLOPs / rate; if no line has its shape, at least bytes / rate of memory
       attention                   FLOPs / rate, at least bytes / rate of memory
       other operators             bytes / rate
       all_reduce                  2 (n - 1) / n B / W + 2 L ceil(log2 n)
       all_gather, reduce_scatter  (n - 1) / n B / W + L ceil(log2 n)
       broadcast, barrier          B / W + L ceil(log2 n)
       send, recv                  B / W + L
   A shape without a line gets its rate from the lines that have shapes and its type: the logarithm of the rate is their
   mean, in which a line of the shape M', N', K' weighs 1 / d^4, where d^2 is the sum of the squares of ln(M / M'),
   ln(N / N') and ln(K / K').
   A group is inside a node if its span (mt_comm_set_span) is less than RANKS. W and L are then those of the link. For
   other groups L is that of the network, and W is that of the link or, if this is less, q / RANKS of the network. Here
   q is the number of ranks that the group has in a node. The other ranks of the node use the rest of the network. */
typedef struct mt_machine mt_machine;

/* mt_machine_read reads the text from a file, mt_machine_create from memory. The caller destroys *out. A text has at
   most 1 MiB. Errors: MT_ERR_ARGUMENT, MT_ERR_DATA (the message names the line), MT_ERR_IO, MT_ERR_MEMORY. */
MT_API mt_status mt_machine_read(mt_context *ctx, const char *path, mt_machine **out);
MT_API mt_status mt_machine_create(mt_context *ctx, const char *text, mt_machine **out);
MT_API void mt_machine_destroy(mt_machine *machine);                      /* NULL is allowed */
MT_API const char *mt_machine_name(const mt_machine *machine);            /* "" if the text has none */
MT_API double mt_machine_peak(const mt_machine *machine, mt_dtype dtype); /* FLOP/s; 0 if the text has none */
MT_API double mt_machine_capacity(const mt_machine *machine);             /* bytes; 0 if the text has none */

/* Predicts the seconds of one entry by itself; 0 for the entries of overlaps. Errors: MT_ERR_ARGUMENT (also: a field of
   *entry is not valid), MT_ERR_DATA (the machine has no rate for the entry). */
MT_API mt_status mt_machine_seconds(mt_context *ctx, const mt_machine *machine, const mt_trace_entry *entry,
                                    double *seconds);

/* Where the time of a rank goes in one step, in seconds. The parts from gemm to bubble add up to `seconds`. */
typedef struct mt_step_time {
    double seconds; /* of the step: the same for all stages */
    double gemm, attention, memory, optimizer;
    double communication; /* in which the rank only communicates, or waits for work in another stream */
    double bubble;        /* in which the rank waits for other stages */
    double overlapped;    /* of work in other streams, for which the rank did not wait; not a part of `seconds` */
    /* FLOPs of products and attention that the rank computes, with padding of heads, ffn and vocabulary and with copies
       of key/value heads. `flops` is without recomputation, `recomputed` is the recomputation alone. For the
       utilization of a model (MFU) take mt_gpt_flops or mt_bert_flops of megatron.h, which count the model alone. */
    double flops, recomputed;
} mt_step_time;

/* Predicts the time of one step. traces[s] is the trace of a rank of pipeline stage s, for `stages` stages. Without a
   pipeline there is one trace. out has `stages` elements: out[s] is the time of that rank. Stages wait for each other
   in messages and in collectives that have ranks of several stages. Not predicted: reading data, waits of the host,
   ranks that are slower than others, and two streams that share a network. ctx may be any context; it gets the message
   of an error. After an error, *out is undefined. Errors: MT_ERR_DATA (the machine has no rate for an entry),
   MT_ERR_ARGUMENT (also: an entry is not valid; a stage waits for a message or a collective in which other stages do
   not take part), MT_ERR_MEMORY. */
MT_API mt_status mt_plan_step(mt_context *ctx, const mt_machine *machine, const mt_trace *traces, int stages,
                              mt_step_time *out);

#ifdef __cplusplus
}
#endif

#endif /* MT_PARALLEL_H */

/* ================================================== the API ends here ============================================= */

#if defined(MEGATRON_IMPLEMENTATION) && !defined(MT_PARALLEL_IMPLEMENTED)
#define MT_PARALLEL_IMPLEMENTED

#include <dirent.h>
#include <fcntl.h>
#include <float.h>
#include <math.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* With -std=c99 the system headers do not declare these functions. glibc defines __USE_MISC when it does declare them.
   _GNU_SOURCE is no test for this, because OpenBLAS's header may define it after the system headers were read. */
#if !defined(__cplusplus) && !defined(__USE_MISC)
int fsync(int fd);
ssize_t pread(int fd, void *data, size_t bytes, off_t at);
int openat(int directory, const char *name, int flags, ...);
int unlinkat(int directory, const char *name, int flags);
DIR *fdopendir(int fd);
ssize_t readlink(const char *path, char *to, size_t bytes);
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- >>options --------------------------------------------------------------------------------------------------- */

/* A sum over rows that an operator has computed outside of mt_sum_over_tokens, in the arena. What is in memory of the
   program is not known: it may be freed and used for something else. */
typedef struct mti_noted_sum {
    uintptr_t from, to; /* its memory */
    size_t product;     /* bytes of the product that it is; 0: it is none */
    char where[48];     /* the operator */
} mti_noted_sum;

/* A gradient of mt_declare_shards that every tensor rank has whole. */
typedef struct mti_own_gradient {
    mt_tensor grad;
    char name[MT_NAME_MAX];
    struct mti_own_gradient *next;
} mti_own_gradient;

#define MTI_NOTED_SUMS 32

/* What mti_guarded_sum_check knows. The oldest of more than MTI_NOTED_SUMS sums is forgotten. */
typedef struct mti_guard {
    mt_params *registries;
    mti_own_gradient *own;
    mti_noted_sum sums[MTI_NOTED_SUMS];
    int count, oldest;
    int over_tokens; /* 1 while mt_sum_over_tokens runs */
} mti_guard;

/* The content of the context's slot MT_SLOT_PARALLEL. */
typedef struct mti_parallel {
    mt_parallel_options options;
    int trust_ids;
    mt_hash_log *hash_log; /* NULL: off */
    int64_t backwards;     /* backwards that mt_pipeline_run has begun in this context */
    int64_t micro_batch;   /* number of the backward that mt_pipeline_run runs now; 0: none */
    mti_guard guard;       /* invariant mode */
} mti_parallel;

static mti_parallel *mti_parallel_of(const mt_context *ctx) {
    return (mti_parallel *)mt_context_slot(ctx, MT_SLOT_PARALLEL);
}

static void mti_parallel_destroy(mt_context *ctx, void *memory) {
    mti_own_gradient *own = ((mti_parallel *)memory)->guard.own;
    mt_context_set_forget(ctx, NULL);
    while (own) {
        mti_own_gradient *next = own->next;
        mt_host_free(own);
        own = next;
    }
}

static mt_status mti_parallel_open(mt_context *ctx, mti_parallel **out) {
    void *memory = NULL;
    *out = mti_parallel_of(ctx);
    if (*out) return MT_SUCCESS;
    MT_TRY(mt_context_slot_create(ctx, MT_SLOT_PARALLEL, sizeof **out, mti_parallel_destroy, &memory));
    *out = (mti_parallel *)memory;
    return MT_SUCCESS;
}

MT_API mt_status mt_parallel_set_options(mt_context *ctx, const mt_parallel_options *options) {
    mt_parallel_options o;
    mti_parallel *p;
    if (!ctx) return MT_ERR_ARGUMENT;
    memset(&o, 0, sizeof o);
    if (options) o = *options;
    if (o.no_overlap & ~MT_OVERLAP_ALL)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_parallel_set_options: no_overlap is %d, must be bits of mt_overlap",
                       o.no_overlap);
    MT_TRY(mt_check_integer(ctx, "mt_parallel_set_options", NULL, "overlap_chunks", o.overlap_chunks, 0,
                            MT_OVERLAP_CHUNKS_MAX));
    MT_TRY(mti_parallel_open(ctx, &p));
    p->options = o;
    return MT_SUCCESS;
}

MT_API mt_parallel_options mt_parallel_get_options(const mt_context *ctx) {
    const mti_parallel *p = mti_parallel_of(ctx);
    mt_parallel_options defaults;
    memset(&defaults, 0, sizeof defaults);
    return p ? p->options : defaults;
}

MT_API mt_status mt_layers_trust_ids(mt_context *ctx, int trust) {
    mti_parallel *p;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_parallel_open(ctx, &p));
    p->trust_ids = trust != 0;
    return MT_SUCCESS;
}

static int mti_ids_are_trusted(const mt_context *ctx) {
    const mti_parallel *p = mti_parallel_of(ctx);
    return p && p->trust_ids;
}

static mt_hash_log *mti_hash_log_of(const mt_context *ctx) {
    const mti_parallel *p = mti_parallel_of(ctx);
    return p ? p->hash_log : NULL;
}

/* Calls mt_overlap_begin with the stream for this kind of mt_overlap, or with MT_STREAM_NONE when the options turn the
   kind off or when kind is 0. */
static mt_status mti_overlap_begin(mt_context *ctx, const mt_comm *comm, int kind) {
    mt_stream stream = kind == MT_OVERLAP_GRADIENTS ? MT_STREAM_THIRD : MT_STREAM_SECOND;
    int overlaps = (kind & ~mt_parallel_get_options(ctx).no_overlap) != 0;
    return mt_overlap_begin(ctx, comm, overlaps ? stream : MT_STREAM_NONE);
}

/* ---- >>grid ------------------------------------------------------------------------------------------------------ */

/* Writes the tensor, data and pipeline sizes to sizes, with the zeros of desc resolved. When they do not fit `world`
   ranks, writes the error message to text. */
static mt_status mti_grid_sizes(const mt_grid_desc *desc, int world, int sizes[3], char *text, size_t text_bytes) {
    int tp = desc->tp ? desc->tp : 1, pipeline = desc->pp ? desc->pp : 1, data = desc->dp;
    int64_t model = (int64_t)tp * pipeline;
    const char *const names[] = {"tp", "dp", "pp", "world_size"};
    const int values[] = {desc->tp, desc->dp, desc->pp, world};
    int i;
    for (i = 0; i < 4; i++) {
        int least = i == 3;
        if (values[i] >= least) continue;
        snprintf(text, text_bytes, "mt_grid: %s is %d, must be at least %d", names[i], values[i], least);
        return MT_ERR_ARGUMENT;
    }
    if (!data && world % model == 0) data = (int)(world / model);
    if (!data || model > world || model * data != world) {
        snprintf(text, text_bytes, "mt_grid: tp %d x dp %d x pp %d is not %d ranks", tp, data, pipeline, world);
        return MT_ERR_SHAPE;
    }
    sizes[0] = tp;
    sizes[1] = data;
    sizes[2] = pipeline;
    return MT_SUCCESS;
}

/* Writes the tensor, data and pipeline rank of `rank` to at. */
static void mti_grid_coordinates(const int sizes[3], int rank, int at[3]) {
    at[0] = rank % sizes[0];
    at[1] = rank / sizes[0] % sizes[1];
    at[2] = rank / sizes[0] / sizes[1];
}

static int mti_grid_end_stage(const int sizes[3], const int at[3]) { return at[2] == 0 || at[2] == sizes[2] - 1; }

/* Returns 1 when ranks a and b are in the same group of this kind. */
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

MT_API mt_status mt_grid_ranks(const mt_grid_desc *desc, int world_size, mt_group group, int rank, int *ranks,
                               int *count) {
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

/* Creates one communicator of the grid: with mt_comm_split, or with mt_comm_create_meta on a meta world. *out stays
   NULL when this rank is in no group of this kind. */
static mt_status mti_grid_group(mt_comm *world, const int sizes[3], mt_group group, const char *name, mt_comm **out) {
    int rank = mt_comm_rank(world), first = -1, last = -1, size = 0, index = 0, r;
    for (r = 0; r < mt_comm_size(world); r++) {
        if (!mti_grid_together(sizes, group, rank, r)) continue;
        if (first < 0) first = r;
        if (r < rank) index++;
        last = r;
        size++;
    }
    if (!mt_comm_is_meta(world)) MT_TRY(mt_comm_split(world, first, rank, out));
    else if (size > 0) MT_TRY(mt_comm_create_meta(size, index, out));
    if (size > 1) mt_comm_set_span(*out, last - first);
    if (*out) mt_comm_set_name(*out, name);
    return MT_SUCCESS;
}

static mt_status mti_grid_groups(mt_grid *grid, const int sizes[3]) {
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_TENSOR, "tensor", &grid->tp));
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_DATA, "data", &grid->dp));
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_PIPELINE, "pipeline", &grid->pp));
    MT_TRY(mti_grid_group(grid->world, sizes, MT_GROUP_MODEL, "model", &grid->model));
    return mti_grid_group(grid->world, sizes, MT_GROUP_EMBEDDING, "embedding", &grid->embedding);
}

MT_API mt_status mt_grid_create(mt_comm *world, const mt_grid_desc *desc, mt_grid *out) {
    static const mt_grid_desc defaults = {0, 0, 0};
    char text[160];
    int sizes[3], at[3];
    mt_status status;
    if (!world) return MT_ERR_ARGUMENT;
    if (!out) return mt_comm_fail(world, MT_ERR_ARGUMENT, "mt_grid_create: out is NULL");
    memset(out, 0, sizeof *out);
    status = mti_grid_sizes(desc ? desc : &defaults, mt_comm_size(world), sizes, text, sizeof text);
    if (status != MT_SUCCESS) return mt_comm_fail(world, status, text);
    mti_grid_coordinates(sizes, mt_comm_rank(world), at);
    out->world = world;
    out->tp_size = sizes[0];
    out->dp_size = sizes[1];
    out->pp_size = sizes[2];
    out->tp_rank = at[0];
    out->dp_rank = at[1];
    out->pp_rank = at[2];
    status = mti_grid_groups(out, sizes);
    if (status != MT_SUCCESS) mt_grid_destroy(out);
    return status;
}

MT_API void mt_grid_destroy(mt_grid *grid) {
    if (!grid) return;
    mt_comm_destroy(grid->embedding);
    mt_comm_destroy(grid->model);
    mt_comm_destroy(grid->pp);
    mt_comm_destroy(grid->dp);
    mt_comm_destroy(grid->tp);
    memset(grid, 0, sizeof *grid);
}

/* ---- >>invariant ------------------------------------------------------------------------------------------------- */

/* Returns the number of virtual shards on a rank of the tensor group; 1 outside invariant mode. */
static int mti_shards(const mt_context *ctx, const mt_comm *tp) {
    return mt_context_invariant(ctx) ? mt_context_invariant(ctx) / mt_comm_size(tp) : 1;
}

static mt_status mti_expect_shards(mt_context *ctx, const char *function, const mt_comm *tp) {
    if (!mt_context_invariant(ctx) || mt_context_invariant(ctx) % mt_comm_size(tp) == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE,
                   "%s: %d virtual shards (mt_context_desc.invariant) cannot be split over %d tensor ranks", function,
                   mt_context_invariant(ctx), mt_comm_size(tp));
}

MT_API mt_tensor mt_shard_cols(mt_tensor t, int shard, int shards) {
    if (!t.data) return t;
    if (shard < 0 || shard >= shards || t.cols % shards != 0) return mt_tensor_rows(t, 0, -1);
    return mt_tensor_cols(t, t.cols / shards * shard, t.cols / shards);
}

/* Writes to out, without adding, what virtual shard `shard` of this rank contributes to a sum. */
typedef mt_status (*mti_leaf)(mt_context *ctx, const void *arg, int shard, mt_tensor out);

/* Computes out = the sum of leaf over the shards [first, first + count), where count is a power of two. All sums over
   virtual shards in a call use this function. Its order of additions is the tree ((0+1)+(2+3))+..., which mt_all_reduce
   continues across ranks. Scratch memory: log2(count) tensors like out. */
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

/* Returns 1 when a GEMM may use t as it is. With another leading dimension or alignment, a GEMM library may choose
   another kernel, which gives other bits. In invariant mode every operand is therefore contiguous and aligned; others
   are copied. */
static int mti_is_canonical(const mt_context *ctx, mt_tensor t) {
    return !mt_context_invariant(ctx) || mt_tensor_is_aligned(ctx, t);
}

MT_API mt_status mt_invariant_output(mt_context *ctx, mt_tensor t, mt_tensor *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_invariant_output: out is NULL");
    *out = t;
    if (!mti_is_canonical(ctx, t)) return mt_arena_tensor(ctx, t.dtype, t.rows, t.cols, out);
    if (mt_context_invariant(ctx)) out->ld = t.cols; /* one row is contiguous with any ld */
    return MT_SUCCESS;
}

MT_API mt_status mt_invariant_store(mt_context *ctx, mt_tensor room, mt_tensor t) {
    if (!ctx) return MT_ERR_ARGUMENT;
    return room.data == t.data ? MT_SUCCESS : mt_copy(ctx, room, t);
}

MT_API mt_status mt_invariant_input(mt_context *ctx, mt_tensor t, mt_tensor *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_invariant_input: out is NULL");
    MT_TRY(mt_invariant_output(ctx, t, out));
    return mt_invariant_store(ctx, t, *out);
}

/* Computes c = op(a) op(b) + beta c, where beta is 0 or 1. In invariant mode it copies operands that are not contiguous
   and aligned. */
static mt_status mti_gemm(mt_context *ctx, mt_transpose trans_a, mt_transpose trans_b, mt_tensor a, mt_tensor b,
                          float beta, mt_tensor c) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor out;
    MT_TRY(mt_invariant_input(ctx, a, &a));
    MT_TRY(mt_invariant_input(ctx, b, &b));
    MT_TRY(beta == 0.0f ? mt_invariant_output(ctx, c, &out) : mt_invariant_input(ctx, c, &out));
    MT_TRY(mt_gemm(ctx, trans_a, trans_b, 1.0f, a, b, beta, out));
    MT_TRY(mt_invariant_store(ctx, out, c));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* The argument of mti_sum_leaf. */
typedef struct mti_shard_sum {
    mt_token_operator op;
    const void *arg;
    int64_t rows;   /* rows of each virtual shard */
    int64_t a_rows; /* rows of the first gradient in out; those of the second follow */
} mti_shard_sum;

/* The mti_leaf of mti_sum_over_shards: out = what op adds for one virtual shard. */
static mt_status mti_sum_leaf(mt_context *ctx, const void *arg, int shard, mt_tensor out) {
    const mti_shard_sum *s = (const mti_shard_sum *)arg;
    mt_tensor b = mt_none();
    if (s->a_rows < out.rows) b = mt_tensor_rows(out, s->a_rows, out.rows - s->a_rows);
    MT_TRY(mt_fill(ctx, out, 0.0f));
    return s->op(ctx, s->arg, shard * s->rows, s->rows, mt_tensor_rows(out, 0, s->a_rows), b);
}

/* Adds to a and b the sum over the virtual shards of what op adds for each shard. b may be mt_none(). */
static mt_status mti_sum_over_shards(mt_context *ctx, mt_token_operator op, const void *arg, int64_t rows, int shards,
                                     mt_tensor a, mt_tensor b) {
    mti_shard_sum sum;
    mt_tensor out;
    size_t mark = mt_arena_mark(ctx);
    mti_parallel *p;
    mt_status status;
    int before;
    MT_TRY(mti_parallel_open(ctx, &p));
    sum.op = op;
    sum.arg = arg;
    sum.rows = rows;
    sum.a_rows = a.rows;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, a.rows + b.rows, a.cols, &out));
    before = p->guard.over_tokens;
    p->guard.over_tokens = 1;
    status = mti_shard_tree(ctx, mti_sum_leaf, &sum, 0, shards, out);
    p->guard.over_tokens = before;
    MT_TRY(status);
    MT_TRY(mt_add(ctx, a, mt_tensor_rows(out, 0, a.rows), a));
    if (b.data) MT_TRY(mt_add(ctx, b, mt_tensor_rows(out, a.rows, b.rows), b));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

MT_API mt_status mt_sum_over_tokens(mt_context *ctx, mt_comm *tp, int sequence_parallel, mt_token_operator op,
                                    const void *arg, int64_t rows, mt_tensor a, mt_tensor b) {
    int shards;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!op) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_sum_over_tokens: op is NULL");
    if (!mt_context_invariant(ctx)) return op(ctx, arg, 0, rows, a, b);
    MT_TRY(mt_check_tokens(ctx, "mt_sum_over_tokens", mt_sequence_tokens(tp, sequence_parallel, rows)));
    shards = sequence_parallel ? mti_shards(ctx, tp) : mt_context_invariant(ctx);
    return mti_sum_over_shards(ctx, op, arg, rows / shards, shards, a, b);
}

MT_API mt_status mt_check_tokens(mt_context *ctx, const char *function, int64_t tokens) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!mt_context_invariant(ctx) || tokens % mt_context_invariant(ctx) == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE,
                   "%s: %lld tokens cannot be split into %d virtual shards (mt_context_desc.invariant)", function,
                   (long long)tokens, mt_context_invariant(ctx));
}

MT_API int64_t mt_invariant_micro_batch(int data_shards, int64_t sequences) {
    int64_t parts = 1;
    while (2 * parts <= data_shards && sequences % (2 * parts) == 0) parts *= 2;
    return sequences / parts;
}

/* ---- >>params ---------------------------------------------------------------------------------------------------- */

/* Memory that lives as long as the registry, such as the layers of a model (host) or rotary tables (device). */
typedef struct mti_buffer {
    void *data;
    size_t bytes;
    int on_host;
    size_t mark; /* value of mt_params_mark before this buffer was added */
    struct mti_buffer *next;
} mti_buffer;

/* The gradient buckets of a registry, see >>buckets. size, early, final and sent count elements of the registry's
   memory. */
typedef struct mti_buckets {
    mt_data_parallel_desc desc;
    /* data ranks that share the optimizer's state; 1: every rank has all of it */
    int ranks;
    /* size of each bucket except the last one, which is at the beginning of the memory and may be smaller */
    int64_t size;
    /* gradients below this element are summed over the tensor or embedding group first, so their buckets cannot be sent
       early */
    int64_t early;
    int begun;     /* 1: mt_sync_gradients_begin was called for this step */
    int waits_for; /* all parameters from this index on have final gradients or lie below `early` */
    int64_t final; /* all gradients from this element on are final */
    int64_t sent;  /* the sums of all gradients from this element on have been started */
} mti_buckets;

/* The kinds of memory that a parameter has. The last three are those of mt_optimizer_state, in its order. */
enum { MTI_IN_VALUES = 0, MTI_IN_GRADS = 1, MTI_IN_STATES = 2, MTI_KINDS = 5 };

static const char *const mti_kind_names[] = {"values", "grads", "exp_avg", "exp_avg_sq", "master"};

/* Where a parameter lies. Places number the elements of all parameters, with padding for alignment; buckets, shares
   and the sums over groups are ranges of places. Memory that the registry or the optimizer has allocated has the places
   in their order. */
typedef struct mti_home {
    int64_t place;          /* of the first element */
    void *bound[MTI_KINDS]; /* memory of the caller (mt_params_bind); NULL: of the registry or the optimizer */
    const void *value, *grad, *lookup; /* value.data, grad.data and lookup_grad.data, as the registry has set them */
} mti_home;

/* Where a registry is in a step. Only the calls of the library change it. A program may also write to param->grad by
   hand, after mt_params_zero_grad. A launch of a CUDA graph changes gradients, too, which the registry does not see.
   From the first recorded call on the state is therefore no longer known, and nothing is refused (mt_params.recorded).
   The step that runs once before the recording is checked. */
typedef enum mti_gradient_state {
    MTI_GRADIENTS_UNDEFINED = 0, /* not zeroed since mt_params_bind, or since a sum over ranks has failed */
    MTI_GRADIENTS_ZEROED = 1,    /* zeroed or accumulated, and no layer has added to them since */
    MTI_GRADIENTS_ADDED = 2,
    MTI_GRADIENTS_SYNCHRONISED = 3,
    MTI_GRADIENTS_USED = 4 /* by a step of the optimizer */
} mti_gradient_state;

/* What mt_params_add allocates. */
typedef struct mti_entry {
    mt_param param;
    mti_home home;
    int is_linear; /* 1: the weight of a linear layer */
} mti_entry;

struct mt_params {
    mt_context *ctx;
    const mt_grid *grid;
    mt_param **list;
    int count, capacity;
    mt_dtype dtype;             /* type of the values */
    int bound_count[MTI_KINDS]; /* number of parameters whose memory of this kind is bound */
    int is_bound;               /* 1: mt_params_bind was called */
    int has_optimizer;          /* 1: mt_optimizer_create was called */
    int bound_in_use;           /* 1: an optimizer uses bound state */
    int placed;                 /* 1: all parameters have values and gradients */
    int torn;                   /* 1: values that a sharded optimizer has updated are not gathered */
    void *values;               /* [elements]; NULL: the caller has the values of all parameters */
    float *grads;               /* [elements]; NULL: the caller has the gradients of all parameters */
    float *lookups;             /* [gradients - elements]; behind grads if there are grads */
    float *room;                /* [room_elements], for collectives on bound memory that is not in one piece */
    int64_t room_elements;
    int64_t elements, partial; /* the first `partial` elements are the sequence_partial parameters */
    mti_buckets buckets;
    int64_t gradients;        /* `elements`, and those of all lookup_grad */
    float *subtrees;          /* invariant mode: [levels, gradients], sums of 1, 2, 4, ... micro-batches */
    int levels;               /* levels of the tree over the micro-batches of a rank */
    int64_t micro_batches;    /* micro-batches accumulated in this step */
    mti_gradient_state state; /* of all gradients */
    int recorded;             /* 1: a call that changes or reads the state was recorded in a CUDA graph */
    const mt_param *added;    /* with MTI_GRADIENTS_ADDED: the first parameter to whose gradient a layer has added */
    /* the micro-batch whose gradients are added: of mt_pipeline_run (positive) or mt_check_micro_batch (negative) */
    int64_t micro_batch;      /* 0: not known */
    mt_multi_tensor *squares; /* the gradients, for the norm */
    mti_buffer *buffers;      /* the newest first */
    int buffer_count;
    mt_params *next_guarded; /* see mti_parallel.guarded */
};

static mt_status mti_host_new(mt_context *ctx, size_t bytes, void **out) {
    *out = mt_host_alloc(bytes);
    return *out ? MT_SUCCESS : mt_fail(ctx, MT_ERR_MEMORY, "no memory for %zu bytes", bytes);
}

MT_API mt_status mt_create_check(mt_context *ctx, const char *function, const mt_params *params, const void *desc,
                                 const void *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (params && desc && out) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, !params ? "params" : desc ? "out" : "desc");
}

/* Writes a copy of name to out or, when name is NULL, the automatic name KIND.N. N comes from the names in the registry
   instead of a counter, so it is as before when a create function fails and removes its parameters. */
static mt_status mti_name(mt_context *ctx, const char *function, const mt_params *params, const char *name,
                          const char *kind, char *out) {
    size_t length = strlen(kind);
    int next = 0, i;
    if (name && (!name[0] || strlen(name) >= MT_NAME_MAX))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the name '%.100s' must have 1 to %d characters", function, name,
                       MT_NAME_MAX - 1);
    if (name) {
        memmove(out, name, strlen(name) + 1);
        return MT_SUCCESS;
    }
    if (params->grid->pp_size > 1)
        return mt_fail(
            ctx, MT_ERR_ARGUMENT,
            "%s: name is NULL, but on a grid with %d pipeline stages every layer and parameter needs a name: "
            "each stage counts from %s.0, and equal names draw equal random numbers",
            function, params->grid->pp_size, kind);
    for (i = 0; i < params->count; i++) {
        const char *digit = params->list[i]->name + length + 1;
        int n = 0;
        if (strncmp(params->list[i]->name, kind, length) != 0 || digit[-1] != '.') continue;
        for (; *digit >= '0' && *digit <= '9' && n < 100000000; digit++) n = 10 * n + (*digit - '0');
        if (digit[-1] != '.' && !(*digit >= '0' && *digit <= '9') && n >= next) next = n + 1;
    }
    snprintf(out, MT_NAME_MAX, "%s.%d", kind, next);
    return MT_SUCCESS;
}

MT_API mt_status mt_layer_name(mt_context *ctx, const mt_params *params, const char *name, char *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || !out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_layer_name: %s is NULL", params ? "out" : "params");
    return mti_name(ctx, "mt_layer_name", params, name, "layer", out);
}

/* Frees the newest buffer. */
static void mti_params_free_buffer(mt_params *params) {
    mti_buffer *buffer = params->buffers;
    params->buffers = buffer->next;
    params->buffer_count--;
    if (buffer->on_host) mt_host_free(buffer->data);
    else mt_context_free(params->ctx, buffer->data, buffer->bytes);
    mt_host_free(buffer);
}

MT_API size_t mt_params_mark(const mt_params *params) {
    return params ? (size_t)params->count + (size_t)params->buffer_count : 0;
}

MT_API mt_status mt_params_buffer(mt_context *ctx, mt_params *params, size_t bytes, int on_host, void **out) {
    mti_buffer *buffer;
    void *memory;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_params_buffer: %s is NULL", params ? "out" : "params");
    MT_TRY(mti_host_new(ctx, sizeof *buffer, &memory));
    buffer = (mti_buffer *)memory;
    status = on_host ? mti_host_new(ctx, bytes, &buffer->data) : mt_context_alloc(ctx, bytes, &buffer->data);
    if (status != MT_SUCCESS) {
        mt_host_free(buffer);
        return status;
    }
    buffer->bytes = bytes;
    buffer->on_host = on_host;
    buffer->mark = mt_params_mark(params);
    buffer->next = params->buffers;
    params->buffers = buffer;
    params->buffer_count++;
    *out = buffer->data;
    return MT_SUCCESS;
}

MT_API mt_status mt_params_create(mt_context *ctx, const mt_grid *grid, mt_params **out) {
    mti_parallel *options; /* opened here, so that no step has to allocate it */
    void *memory;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!grid || !grid->tp || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_params_create: %s", out ? "the grid was not created" : "out is NULL");
    *out = NULL;
    MT_TRY(mti_expect_shards(ctx, "mt_params_create", grid->tp));
    if (mt_context_invariant(ctx) && mt_context_invariant_data(ctx) % grid->dp_size != 0)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "mt_params_create: %d virtual data shards (mt_context_desc.invariant_data) cannot "
                       "be split over %d data ranks",
                       mt_context_invariant_data(ctx), grid->dp_size);
    MT_TRY(mti_parallel_open(ctx, &options));
    MT_TRY(mt_gemm_prepare(ctx));
    MT_TRY(mti_host_new(ctx, sizeof **out, &memory));
    *out = (mt_params *)memory;
    (*out)->ctx = ctx;
    (*out)->grid = grid;
    mt_check_group(ctx, grid->pp);
    return MT_SUCCESS;
}

/* Refuses a dtype that must be that of floats. */
static mt_status mti_float_dtype_fail(mt_context *ctx, mt_status status, const char *function, const char *field,
                                      mt_dtype dtype) {
    char word[MT_WORD_MAX];
    mt_enum_word(MT_DTYPE_WORDS, (int)dtype, word);
    return mt_fail(ctx, status, "%s: %s is %s, must be MT_F32, MT_BF16 or MT_F16", function, field, word);
}

MT_API mt_status mt_params_set_dtype(mt_context *ctx, mt_params *params, mt_dtype dtype) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || params->count > 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_params_set_dtype: %s",
                       params ? "there are parameters already" : "params is NULL");
    if (!mt_dtype_is_float(dtype))
        return mti_float_dtype_fail(ctx, MT_ERR_DTYPE, "mt_params_set_dtype", "dtype", dtype);
    params->dtype = dtype;
    return MT_SUCCESS;
}

MT_API mt_dtype mt_params_dtype(const mt_params *params) { return params ? params->dtype : MT_F32; }

MT_API mt_status mt_params_set_data_parallel(mt_context *ctx, mt_params *params, const mt_data_parallel_desc *desc) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || !desc || params->placed || params->is_bound)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_params_set_data_parallel: %s",
                       !params          ? "params is NULL"
                       : !desc          ? "desc is NULL"
                       : params->placed ? "comes after mt_params_init"
                                        : "comes after mt_params_bind");
    if (desc->bucket_bytes > SIZE_MAX / 4)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_params_set_data_parallel: bucket_bytes is %zu, must be at most %zu",
                       desc->bucket_bytes, SIZE_MAX / 4);
    params->buckets.desc = *desc;
    return MT_SUCCESS;
}

static size_t mti_params_bytes(const mt_params *params, int64_t elements) {
    return (size_t)elements * mt_dtype_size(params->dtype);
}

static mti_entry *mti_entry_of(const mt_param *p) { return (mti_entry *)(void *)p->registry->list[p->index]; }

static mti_home *mti_home_of(const mt_param *p) { return &mti_entry_of(p)->home; }

/* Drops the packed copies of all weights, whose values change. */
static void mti_params_unpack(const mt_params *params) {
    int i;
    for (i = 0; params->placed && i < params->count; i++) mt_gemm_unpack(params->ctx, params->list[i]->value);
}

/* Returns a view of `count` elements, from element `first` on, of what the caller has bound of a parameter. */
static mt_tensor mti_bound_view(const mt_param *p, int kind, int64_t first, int64_t count) {
    mt_dtype dtype = kind == MTI_IN_VALUES ? p->value.dtype : MT_F32;
    char *data = (char *)mti_home_of(p)->bound[kind] + first * (int64_t)mt_dtype_size(dtype);
    return mt_tensor_make(data, dtype, 1, count);
}

/* The number of bytes of the registry's own gradients. */
static size_t mti_grads_bytes(const mt_params *params) {
    int all = params->bound_count[MTI_IN_GRADS] == params->count;
    return (size_t)(params->gradients - (all ? params->elements : 0)) * sizeof(float);
}

static void mti_params_forget(mt_context *ctx, const mt_params *params); /* below */
static void mti_params_unguard(mt_context *ctx, const mt_params *params);

/* Frees values, gradients, subtrees and the room, as far as they are the registry's. */
static void mti_params_free(mt_context *ctx, mt_params *params) {
    void *grads = params->grads ? params->grads : params->lookups;
    mt_context_free(ctx, params->values, mti_params_bytes(params, params->elements));
    mt_context_free(ctx, grads, mti_grads_bytes(params));
    mt_context_free(ctx, params->subtrees, (size_t)(params->gradients * params->levels) * sizeof(float));
    mt_context_free(ctx, params->room, (size_t)params->room_elements * sizeof(float));
    mt_multi_tensor_destroy(ctx, params->squares);
    params->squares = NULL;
    params->values = NULL;
    params->grads = params->lookups = params->subtrees = params->room = NULL;
}

MT_API void mt_params_destroy(mt_params *params) {
    mt_context *ctx;
    int i;
    if (!params) return;
    ctx = params->ctx;
    /* collectives that still run use this memory */
    if (params->buckets.begun) mt_overlap_wait(ctx, MT_OVERLAP_TICKET_THIRD);
    mti_params_unpack(params);
    while (params->buffers) mti_params_free_buffer(params);
    if (params->placed) mti_params_forget(ctx, params);
    mti_params_unguard(ctx, params);
    mti_params_free(ctx, params);
    for (i = 0; i < params->count; i++) mt_host_free(params->list[i]);
    mt_host_free(params->list);
    mt_host_free(params);
}

/* ---- >>sharding: which elements of a parameter a shard has ------------------------------------------------------- */

/* One of the blocks of a virtual shard: one of its `parts` or, with copies, the own features or the copied features of
   a piece. Its `count` features start at `local` in the shard and at `global` in the whole dimension. The rest of the
   block, up to `size` features, is padding. */
typedef struct mti_block {
    int shard; /* index among this rank's virtual shards */
    int copy;  /* 1: another block, which counts, has the same features */
    int64_t local, global, count, size;
} mti_block;

static int64_t mti_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Returns how many of n features each of `shards` shards has, padding included. */
static int64_t mti_shard_features(int64_t n, int64_t parts, int64_t unit, int shards) {
    return parts * mti_ceil_div(n / parts / unit, shards) * unit;
}

/* Returns n with the caller's padding: `padded` features, or n when padded is 0. */
static int64_t mti_padded(int64_t n, int64_t padded) { return padded ? padded : n; }

/* How a matrix is split over the tensor ranks. */
typedef struct mti_sharding {
    int64_t rows, cols; /* of the whole matrix */
    mt_placement placement;
    int64_t parts, unit, copies, copied;
    int shards;    /* virtual shards on a rank */
    int64_t local; /* size of the split dimension on a rank, padding included; rows if not split */
} mti_sharding;

/* Returns the size of the dimension that is split. */
static int64_t mti_sharding_features(const mti_sharding *s) {
    return s->placement == MT_SPLIT_COLS ? s->cols : s->rows;
}

/* Returns how many features a piece of a unit has of its own, and with them how many it has. */
static int64_t mti_piece_own(const mti_sharding *s) { return (s->unit - s->copied) / s->copies; }
static int64_t mti_piece_features(const mti_sharding *s) { return mti_piece_own(s) + s->copied; }

/* Returns the split over `ranks` ranks, each with `shards` virtual shards. */
static mti_sharding mti_sharding_of(const mt_param_desc *d, int shards, int ranks) {
    mti_sharding s;
    int64_t n, unit;
    s.rows = d->rows;
    s.cols = d->cols;
    s.placement = d->placement;
    s.parts = d->parts ? d->parts : 1;
    s.unit = unit = d->unit ? d->unit : 1;
    s.copies = d->copies ? d->copies : 1;
    s.copied = d->copied;
    s.shards = d->placement == MT_REPLICATED ? 1 : shards;
    s.local = n = mti_sharding_features(&s);
    if (d->placement == MT_REPLICATED) return s;
    if (s.copies > 1) {
        unit = mti_piece_features(&s);
        n = n / s.unit * s.copies * unit;
    }
    s.local = s.shards * mti_shard_features(mti_padded(n, d->padded_features), s.parts, unit, s.shards * ranks);
    return s;
}

/* Writes the shape of a rank's shard. A vector that is split by columns is one row for any number of virtual shards. */
static void mti_sharding_shape(const mti_sharding *s, int64_t *rows, int64_t *cols) {
    int vector = s->rows == 1;
    *rows = s->placement != MT_SPLIT_COLS ? s->local : vector ? 1 : s->shards * s->rows;
    *cols = s->placement != MT_SPLIT_COLS ? s->cols : vector ? s->local : s->local / s->shards;
}

/* Returns the number of blocks on a rank. Blocks are ordered by shard. A replicated matrix is a single block with all
   its rows. With copies, each piece has two blocks. */
static int64_t mti_sharding_blocks(const mti_sharding *s) {
    return s->copies > 1 ? s->local / mti_piece_features(s) * 2 : s->parts * s->shards;
}

/* Returns block number `index` of tensor rank `rank`, with copies. The blocks are the own features of a piece, then its
   copied features. */
static mti_block mti_piece_block(const mti_sharding *s, int rank, int64_t index) {
    int64_t own = mti_piece_own(s), size = own + s->copied, pieces = s->local / s->shards / size, piece = index / 2;
    int64_t global = (int64_t)rank * s->shards * pieces + piece, unit = global / s->copies;
    mti_block b;
    b.shard = (int)(piece / pieces);
    b.size = index % 2 ? s->copied : own;
    b.local = piece % pieces * size + (index % 2 ? own : 0);
    b.copy = index % 2 && global % s->copies > 0;
    b.count = b.size;
    b.global = unit * s->unit + (index % 2 ? s->unit - s->copied : global % s->copies * own);
    if (unit < mti_sharding_features(s) / s->unit) return b;
    b.count = 0; /* padding */
    b.global = mti_sharding_features(s);
    return b;
}

/* Returns block number `index` of tensor rank `rank`. */
static mti_block mti_sharding_block(const mti_sharding *s, int rank, int64_t index) {
    int64_t whole = mti_sharding_features(s) / s->parts, part = index % s->parts, before;
    mti_block b;
    if (s->copies > 1) return mti_piece_block(s, rank, index);
    if (s->placement == MT_REPLICATED) rank = 0;
    b.copy = 0;
    b.shard = (int)(index / s->parts);
    b.size = s->local / s->shards / s->parts;
    b.local = part * b.size;
    before = mt_min(whole, ((int64_t)rank * s->shards + b.shard) * b.size);
    b.global = part * whole + before;
    b.count = mt_min(b.size, whole - before);
    return b;
}

/* Returns the view of virtual shard `shard` of t, which is a rank's shard. */
static mt_tensor mti_sharding_shard(const mti_sharding *s, mt_tensor t, int shard) {
    int64_t features = s->local / s->shards;
    int64_t rows = s->placement == MT_SPLIT_COLS ? s->rows : features;
    int64_t cols = s->placement == MT_SPLIT_COLS ? features : s->cols;
    return mt_tensor_rows(mt_tensor_make(t.data, t.dtype, rows * s->shards, cols), rows * shard, rows);
}

/* Returns the view of block b of t, which is a rank's shard. */
static mt_tensor mti_sharding_view(const mti_sharding *s, mt_tensor t, mti_block b) {
    t = mti_sharding_shard(s, t, b.shard);
    return s->placement == MT_SPLIT_COLS ? mt_tensor_cols(t, b.local, b.count) : mt_tensor_rows(t, b.local, b.count);
}

/* The same for a parameter p. t is a value, a gradient or a moment of p. */
static mti_sharding mti_param_sharding(const mt_param *p) {
    mti_sharding s;
    s.rows = p->desc.rows;
    s.cols = p->desc.cols;
    s.placement = p->desc.placement;
    s.parts = p->desc.parts;
    s.unit = p->desc.unit;
    s.copies = p->desc.copies;
    s.copied = p->desc.copied;
    s.shards = p->shards;
    s.local = p->local_features;
    return s;
}

static int64_t mti_split_dimension(const mt_param *p) {
    return p->desc.placement == MT_SPLIT_COLS ? p->desc.cols : p->desc.rows;
}

static int64_t mti_param_blocks(const mt_param *p) {
    mti_sharding s = mti_param_sharding(p);
    return mti_sharding_blocks(&s);
}

static mti_block mti_param_block(const mt_param *p, int rank, int64_t index) {
    mti_sharding s = mti_param_sharding(p);
    return mti_sharding_block(&s, rank, index);
}

static mt_tensor mti_param_shard(const mt_param *p, mt_tensor t, int shard) {
    mti_sharding s = mti_param_sharding(p);
    return mti_sharding_shard(&s, t, shard);
}

static mt_tensor mti_param_block_view(const mt_param *p, mt_tensor t, mti_block b) {
    mti_sharding s = mti_param_sharding(p);
    return mti_sharding_view(&s, t, b);
}

/* Returns the columns of local [tokens, local features] that belong to block b of p's split dimension. */
static mt_tensor mti_block_cols(const mt_param *p, mt_tensor local, mti_block b) {
    return mt_tensor_cols(local, b.shard * (p->local_features / p->shards) + b.local, b.count);
}

#define MTI_PARAM_ELEMENTS ((int64_t)1 << 48) /* padded to 1024 shards, they still fit in int64_t */
#define MTI_PARAM_PARTS 65536                 /* calls loop over the parts or pieces of a parameter */
#define MTI_SHARDS_MAX 1024                   /* of mt_context_desc.invariant */

static mt_status mti_padding_check(mt_context *ctx, const char *function, const mt_param_desc *d) {
    int64_t n = d->placement == MT_SPLIT_COLS ? d->cols : d->rows;
    int64_t other = d->placement == MT_SPLIT_COLS ? d->rows : d->cols;
    if (!d->padded_features) return MT_SUCCESS;
    if (d->placement == MT_REPLICATED || d->parts > 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s': padded_features is %lld, must be 0 %s", function, d->name,
                       (long long)d->padded_features,
                       d->parts > 1 ? "with several parts" : "with placement MT_REPLICATED");
    MT_TRY(mt_check_size(ctx, function, d->name, "padded_features", d->padded_features, n, MTI_PARAM_ELEMENTS / other));
    if (d->padded_features % mt_max(d->unit, 1) == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s': padded_features is %lld, must be a multiple of unit %lld", function,
                   d->name, (long long)d->padded_features, (long long)d->unit);
}

static mt_status mti_copies_check(mt_context *ctx, const char *function, const mt_param_desc *d) {
    int64_t copies = d->copies ? d->copies : 1, unit = d->unit ? d->unit : 1;
    int64_t n = d->placement == MT_SPLIT_COLS ? d->cols : d->rows;
    int64_t most = mt_min(MTI_PARAM_ELEMENTS / d->rows / d->cols, MTI_PARAM_PARTS / (n / unit));
    const char *without = d->placement == MT_REPLICATED                   ? "with placement MT_REPLICATED"
                          : d->placement == MT_SPLIT_COLS && d->rows != 1 ? "for a matrix with placement MT_SPLIT_COLS"
                          : d->parts > 1                                  ? "with several parts"
                          : d->padded_features                            ? "with padded_features"
                                                                          : NULL;
    if (copies == 1 && d->copied == 0) return MT_SUCCESS;
    if (copies == 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s': copied is %lld, must be 0 with one copy", function, d->name,
                       (long long)d->copied);
    if (without)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s': copies is %lld, must be 0 or 1 %s", function, d->name,
                       (long long)d->copies, without);
    MT_TRY(mt_check_integer(ctx, function, d->name, "copies", d->copies, 0, most));
    MT_TRY(mt_check_integer(ctx, function, d->name, "copied", d->copied, 1, unit));
    if ((unit - d->copied) % copies == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s': copies is %lld, must divide the %lld features that are not copied",
                   function, d->name, (long long)copies, (long long)(unit - d->copied));
}

/* Checks the fields that say how a parameter is split. ctx NULL: without a message. */
static mt_status mti_sharding_check(mt_context *ctx, const char *function, const mt_param_desc *d) {
    int64_t n = d->placement == MT_SPLIT_COLS ? d->cols : d->rows, parts = d->parts ? d->parts : 1;
    int64_t unit = d->unit ? d->unit : 1;
    MT_TRY(mt_check_size(ctx, function, d->name, "rows", d->rows, 1, INT64_MAX));
    MT_TRY(mt_check_size(ctx, function, d->name, "cols", d->cols, 1, INT64_MAX));
    MT_TRY(mt_check_enum(ctx, function, d->name, "placement", (int)d->placement, MT_PLACEMENT_WORDS));
    if (d->rows > MTI_PARAM_ELEMENTS / d->cols)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s' is [%lld, %lld], which is more than %lld elements", function,
                       d->name, (long long)d->rows, (long long)d->cols, (long long)MTI_PARAM_ELEMENTS);
    MT_TRY(mt_check_integer(ctx, function, d->name, "parts", d->parts, 0, MTI_PARAM_PARTS));
    MT_TRY(mt_check_size(ctx, function, d->name, "unit", d->unit, 0, INT64_MAX));
    if (n % parts != 0 || n / parts % unit != 0)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: %lld features of '%s' cannot be split into %lld parts of whole units of %lld", function,
                       (long long)n, d->name, (long long)parts, (long long)unit);
    if (d->placement == MT_REPLICATED && (parts > 1 || unit > 1))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s': %s is %lld, but placement is MT_REPLICATED", function, d->name,
                       parts > 1 ? "parts" : "unit", (long long)(parts > 1 ? parts : unit));
    MT_TRY(mti_copies_check(ctx, function, d));
    return mti_padding_check(ctx, function, d);
}

/* Checks that the descriptions of the parameters may still change. */
static mt_status mti_params_open_check(mt_context *ctx, const char *function, const mt_params *params,
                                       const char *name) {
    if (!params->placed && !params->is_bound) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' comes after %s", function, name,
                   params->is_bound ? "mt_params_bind" : "mt_params_init");
}

static mt_status mti_param_check(mt_context *ctx, const mt_params *params, const mt_param_desc *d) {
    MT_TRY(mti_params_open_check(ctx, "mt_params_add", params, d->name));
    if (mt_params_find(params, d->name))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_params_add: there is already a parameter '%s'", d->name);
    MT_TRY(mti_sharding_check(ctx, "mt_params_add", d));
    MT_TRY(mt_check_float(ctx, "mt_params_add", d->name, "init_std", d->init_std, MT_FLOAT_AT_LEAST_0));
    if (d->init_std > 0.0f && d->init_value != 0.0f)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_params_add: '%s': init_value is %g, must be 0 with init_std", d->name,
                       (double)d->init_value);
    if (d->sequence_partial && d->placement != MT_REPLICATED)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_params_add: '%s' is sequence_partial, but placement is %s", d->name,
                       d->placement == MT_SPLIT_ROWS ? "MT_SPLIT_ROWS" : "MT_SPLIT_COLS");
    return MT_SUCCESS;
}

/* Makes space for one more parameter in the list. */
static mt_status mti_params_reserve(mt_context *ctx, mt_params *params) {
    int capacity = params->capacity ? 2 * params->capacity : 64;
    void *memory;
    if (params->count < params->capacity) return MT_SUCCESS;
    MT_TRY(mti_host_new(ctx, (size_t)capacity * sizeof *params->list, &memory));
    if (params->list) {
        memcpy(memory, params->list, (size_t)params->count * sizeof *params->list);
        mt_host_free(params->list);
    }
    params->list = (mt_param **)memory;
    params->capacity = capacity;
    return MT_SUCCESS;
}

/* Sets the shapes of this rank's value and gradient. */
static void mti_param_shape(const mt_params *params, mt_param *p) {
    mti_sharding s = mti_sharding_of(&p->desc, mti_shards(params->ctx, params->grid->tp), p->tp_size);
    int64_t rows, cols;
    p->shards = s.shards;
    p->local_features = s.local;
    mti_sharding_shape(&s, &rows, &cols);
    p->value = mt_tensor_make(NULL, params->dtype, rows, cols);
    p->grad = mt_tensor_make(NULL, MT_F32, rows, cols);
}

MT_API mt_status mt_params_add(mt_context *ctx, mt_params *params, const mt_param_desc *desc, mt_param **out) {
    mt_param_desc named;
    mt_param *p;
    char name[MT_NAME_MAX];
    void *memory;
    MT_TRY(mt_create_check(ctx, "mt_params_add", params, desc, out));
    MT_TRY(mti_name(ctx, "mt_params_add", params, desc->name, "param", name));
    named = *desc;
    named.name = name;
    MT_TRY(mti_param_check(ctx, params, &named));
    MT_TRY(mti_params_reserve(ctx, params));
    MT_TRY(mti_host_new(ctx, sizeof(mti_entry), &memory)); /* its first member is the parameter */
    p = (mt_param *)memory;
    p->desc = named;
    memcpy(p->name, name, sizeof name);
    p->desc.name = p->name;
    if (!p->desc.parts) p->desc.parts = 1;
    if (!p->desc.unit) p->desc.unit = 1;
    if (!p->desc.copies) p->desc.copies = 1;
    p->tp_rank = params->grid->tp_rank;
    p->tp_size = params->grid->tp_size;
    p->registry = params;
    p->index = params->count;
    mti_param_shape(params, p);
    params->list[params->count++] = p;
    *out = p;
    return MT_SUCCESS;
}

MT_API mt_status mt_param_set_weight_decay(mt_context *ctx, mt_param *param, int weight_decay) {
    static const char *const function = "mt_param_set_weight_decay";
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!param) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: param is NULL", function);
    if (!param->registry)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' is of a layer of tensors", function, param->name);
    if (weight_decay != 0 && weight_decay != 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: weight_decay of '%s' is %d, must be 0 or 1", function, param->name,
                       weight_decay);
    MT_TRY(mti_params_open_check(ctx, function, param->registry, param->name));
    param->desc.weight_decay = weight_decay;
    return MT_SUCCESS;
}

/* Removes the newest parameter, which mt_param_bind may have bound. */
static void mti_params_remove_last(mt_params *params) {
    const mt_param *last = params->list[params->count - 1];
    int kind;
    for (kind = 0; kind < MTI_KINDS; kind++) params->bound_count[kind] -= mti_home_of(last)->bound[kind] != NULL;
    mt_host_free(params->list[--params->count]);
}

MT_API mt_status mt_create_end(mt_params *params, size_t mark, void *block, size_t block_bytes, mt_status status) {
    if (status == MT_SUCCESS) return status;
    while (mt_params_mark(params) > mark) { /* the newest is a buffer or a parameter */
        if (params->buffers && params->buffers->mark + 1 == mt_params_mark(params)) mti_params_free_buffer(params);
        else if (!params->placed && !params->is_bound) mti_params_remove_last(params);
        else break;
    }
    if (block) memset(block, 0, block_bytes);
    return status;
}

MT_API int mt_params_shards(const mt_params *params) {
    return params ? mti_shards(params->ctx, params->grid->tp) * params->grid->tp_size : 1;
}

/* ---- >>memory: the memory of a registry -------------------------------------------------------------------------- */

/* Returns a number of elements. Whatever starts at a multiple of it in the registry's memory is aligned to 64 bytes. */
static int64_t mti_param_unit(mt_dtype dtype) { return (int64_t)(MT_ALIGNMENT / mt_dtype_size(dtype)); }

/* Returns the number of elements that a parameter's shard occupies in the registry's memory, rounded up for
   alignment. */
static int64_t mti_param_slot(const mt_param *p) {
    return mt_round_up(p->value.rows * p->value.cols, mti_param_unit(p->value.dtype));
}

/* Returns 1 when a parameter has a lookup_grad. Two pipeline stages sum the head's and the lookup's gradient of a
   shared embedding separately and add them at the end. In invariant mode a single stage does the same, to get the same
   bits. */
static int mti_has_lookup_grad(const mt_params *params, const mt_param *p) {
    return mt_context_invariant(params->ctx) && p->desc.shared_embedding && params->grid->pp_size == 1;
}

/* Writes the sum of the slots of all parameters to *sum, and that of the slots of all lookup_grad to
   params->gradients. */
static mt_status mti_params_sum(mt_context *ctx, mt_params *params, int64_t *sum) {
    int i;
    params->gradients = 0;
    for (*sum = 0, i = 0; i < params->count; i++) {
        int64_t slot = mti_param_slot(params->list[i]);
        if (slot > INT64_MAX / 256 - *sum)
            return mt_fail(ctx, MT_ERR_MEMORY, "mt_params_init: the parameters up to '%s' have more than %lld elements",
                           params->list[i]->name, (long long)(INT64_MAX / 256));
        *sum += slot;
        if (mti_has_lookup_grad(params, params->list[i])) params->gradients += slot;
    }
    return MT_SUCCESS;
}

/* Sets the size of the buckets, and rounds *elements up. Both are multiples of a unit that makes the data ranks' shares
   of each bucket equal and aligned. */
static void mti_params_cut(mt_params *params, int64_t *elements) {
    mti_buckets *b = &params->buckets;
    int64_t size = (int64_t)(b->desc.bucket_bytes / sizeof(float)), unit;
    b->ranks = b->desc.sharded_optimizer ? params->grid->dp_size : 1;
    unit = mti_param_unit(params->dtype) * b->ranks;
    if (b->desc.bucket_bytes == 0) size = mt_max(40000000, (int64_t)params->grid->dp_size * 1000000);
    *elements = mt_round_up(*elements, unit);
    b->size = mt_round_up(mt_max(mt_min(size, *elements), 1), unit);
}

/* Gives every parameter its place. Parameters whose gradients are summed over the tensor group as a whole come first,
   in one piece. Those whose gradients are summed over the embedding group, or which have copies, follow, and then all
   others. */
static void mti_params_order(mt_params *params) {
    int64_t at = 0;
    int i, pass;
    for (pass = 0; pass < 3; pass++) {
        for (i = 0; i < params->count; i++) {
            const mt_param *p = params->list[i];
            int before = p->desc.shared_embedding || p->desc.copies > 1;
            if ((p->desc.sequence_partial ? 0 : before ? 1 : 2) != pass) continue;
            mti_home_of(p)->place = at;
            at += mti_param_slot(p);
        }
        if (pass == 0) params->partial = at;
        if (pass == 1) params->buckets.early = at;
    }
}

/* Returns the first place, lo, of the bucket [lo, hi). Backward runs through the layers from the last to the first, and
   so through the places from their end. Buckets are therefore cut from the end. They cut through parameters, so that
   all ranks have equal shares of a bucket. */
static int64_t mti_bucket_low(const mt_params *params, int64_t hi) { return mt_max(hi - params->buckets.size, 0); }

/* Returns where the places [lo, hi) are in one piece of memory, without a gap, or NULL. */
static void *mti_places_find(const mt_params *params, int kind, int64_t lo, int64_t hi) {
    int64_t size = kind == MTI_IN_VALUES ? (int64_t)mt_dtype_size(params->dtype) : (int64_t)sizeof(float), found = 0;
    char *own = kind == MTI_IN_VALUES ? (char *)params->values : (char *)params->grads;
    uintptr_t begin = 0;
    int i;
    if (own) return own + lo * size;
    for (i = 0; i < params->count; i++) {
        const mt_param *p = params->list[i];
        int64_t place = mti_home_of(p)->place, n = p->value.rows * p->value.cols;
        int64_t overlap = mt_min(hi, place + n) - mt_max(lo, place);
        uintptr_t at = (uintptr_t)mti_home_of(p)->bound[kind] - (uintptr_t)((place - lo) * size);
        if (overlap <= 0) continue;
        if (found > 0 && at != begin) return NULL;
        begin = at;
        found += overlap;
    }
    return found == hi - lo ? (void *)begin : NULL;
}

/* Copies the places [from, to) between the memory that the caller has bound and `run`, which begins at place lo. Does
   nothing where the two are the same memory. */
static mt_status mti_places_copy(mt_context *ctx, const mt_params *params, int kind, void *run, int64_t lo,
                                 int64_t from, int64_t to, int to_run) {
    int i;
    for (i = 0; params->bound_count[kind] > 0 && i < params->count; i++) {
        const mt_param *p = params->list[i];
        int64_t place = mti_home_of(p)->place;
        int64_t first = mt_max(from, place), end = mt_min(to, place + p->value.rows * p->value.cols);
        mt_tensor mine, there;
        if (!mti_home_of(p)->bound[kind] || end <= first) continue;
        mine = there = mti_bound_view(p, kind, first - place, end - first);
        there.data = (char *)run + (first - lo) * (int64_t)mt_dtype_size(mine.dtype);
        if (mine.data == there.data) continue;
        MT_TRY(to_run ? mt_copy(ctx, mine, there) : mt_copy(ctx, there, mine));
    }
    return MT_SUCCESS;
}

/* Sets *run to memory with the places [lo, hi) in their order, for a collective. It is the memory of the values or the
   gradients where that is in one piece. Otherwise it is the registry's, and has copies of the places [from, to).
   mti_places_close copies the results back. */
static mt_status mti_places_open(mt_context *ctx, const mt_params *params, int kind, int64_t lo, int64_t hi,
                                 int64_t from, int64_t to, void **run) {
    *run = mti_places_find(params, kind, lo, hi);
    if (!*run) *run = params->room;
    return mti_places_copy(ctx, params, kind, *run, lo, from, to, 1);
}

static mt_status mti_places_close(mt_context *ctx, const mt_params *params, int kind, void *run, int64_t lo,
                                  int64_t from, int64_t to) {
    return mti_places_copy(ctx, params, kind, run, lo, from, to, 0);
}

/* Returns the number of elements of the room: those of the largest collective on memory that is not in one piece. */
static int64_t mti_room_elements(const mt_params *params) {
    int64_t hi, lo, most = 0;
    int kind;
    if (params->grid->tp_size > 1 && !mti_places_find(params, MTI_IN_GRADS, 0, params->partial)) most = params->partial;
    for (kind = MTI_IN_VALUES; kind <= MTI_IN_GRADS && params->grid->dp_size > 1; kind++) {
        if (params->bound_count[kind] < params->count || (kind == MTI_IN_VALUES && params->buckets.ranks == 1))
            continue;
        for (hi = params->elements; hi > 0; hi = lo) {
            lo = mti_bucket_low(params, hi);
            if (!mti_places_find(params, kind, lo, hi)) most = mt_max(most, hi - lo);
        }
    }
    return most;
}

/* Allocates what the caller has not bound: values, gradients and, in invariant mode, the subtrees of
   mt_accumulate_gradients. Also allocates the room that bound memory needs. */
static mt_status mti_params_alloc(mt_context *ctx, mt_params *params) {
    int own_values = params->bound_count[MTI_IN_VALUES] < params->count;
    int own_grads = params->bound_count[MTI_IN_GRADS] < params->count;
    size_t bytes = mti_grads_bytes(params), more;
    void *values = NULL, *grads = NULL, *subtrees = NULL, *room = NULL;
    mt_status status = MT_SUCCESS;
    while (params->grid->dp_size << params->levels < mt_context_invariant_data(ctx)) params->levels++;
    more = (size_t)(params->gradients * params->levels) * sizeof(float);
    if (own_values) status = mt_context_alloc(ctx, mti_params_bytes(params, params->elements), &values);
    params->values = values;
    if (status == MT_SUCCESS && bytes > 0) status = mt_context_alloc(ctx, bytes, &grads);
    params->grads = own_grads ? (float *)grads : NULL;
    params->lookups = own_grads && grads ? params->grads + params->elements : (float *)grads;
    if (status == MT_SUCCESS && more > 0) status = mt_context_alloc(ctx, more, &subtrees);
    params->subtrees = (float *)subtrees;
    if (status == MT_SUCCESS) params->room_elements = mti_room_elements(params);
    if (status == MT_SUCCESS && params->room_elements > 0)
        status = mt_context_alloc(ctx, (size_t)params->room_elements * sizeof(float), &room);
    params->room = (float *)room;
    if (status != MT_SUCCESS) mti_params_free(ctx, params);
    return status;
}

/* Sets the views of all parameters, and keeps a copy of their addresses (mti_pointer_check). */
static void mti_params_point(mt_params *params) {
    int64_t behind = 0;
    int i;
    for (i = 0; i < params->count; i++) {
        mt_param *p = params->list[i];
        mti_home *home = mti_home_of(p);
        if (!home->bound[MTI_IN_VALUES]) p->value.data = (char *)params->values + mti_params_bytes(params, home->place);
        if (!home->bound[MTI_IN_GRADS]) p->grad.data = params->grads + home->place;
        if (mti_has_lookup_grad(params, p)) {
            p->lookup_grad = p->grad;
            p->lookup_grad.data = params->lookups + behind;
            behind += mti_param_slot(p);
        }
        home->value = p->value.data;
        home->grad = p->grad.data;
        home->lookup = p->lookup_grad.data;
    }
}

/* Tells check mode what the parameters and their gradients are. */
static mt_status mti_params_declare(mt_context *ctx, const mt_params *params) {
    const mt_grid *g = params->grid;
    int i;
    for (i = 0; i < params->count; i++) {
        const mt_param *p = params->list[i];
        const mt_placement placement = p->desc.placement;
        const int64_t parts = p->desc.parts ? p->desc.parts : 1;
        int partial = p->desc.sequence_partial || p->desc.copies > 1;
        MT_TRY(mt_declare_parameter(ctx, p->name, g->tp, g->dp, p->value, p->grad, placement, parts, partial));
        MT_TRY(mt_declare_parameter(ctx, p->name, g->tp, g->dp, mt_none(), p->lookup_grad, placement, parts, partial));
    }
    return MT_SUCCESS;
}

/* ---- >>guard: invariant mode refuses sums in an order that depends on the split ---------------------------------- */

/* Returns 1 when t, which is not empty, has bytes of `grad`, a gradient of a parameter. */
static int mti_is_in_gradient(const mt_context *ctx, mt_tensor t, mt_tensor grad) {
    uintptr_t from = (uintptr_t)t.data, of = (uintptr_t)grad.data;
    int64_t elements = (t.rows - 1) * mt_tensor_ld(t) + t.cols;
    if (grad.rows * grad.cols == 0 || !mt_context_has_address(ctx, t.data) || !mt_context_has_address(ctx, grad.data))
        return 0;
    return from < of + (size_t)(grad.rows * grad.cols) * sizeof(float) &&
           of < from + (size_t)elements * mt_dtype_size(t.dtype);
}

/* Returns 1 when t is in one virtual shard of a parameter's gradient `grad`, and a GEMM may use it as it is. */
static int mti_is_in_shard(const mt_context *ctx, const mt_param *p, mt_tensor grad, mt_tensor t) {
    size_t bytes = (size_t)(grad.rows * grad.cols) * sizeof(float) / (size_t)p->shards;
    size_t at = (size_t)((uintptr_t)t.data - (uintptr_t)grad.data);
    return mti_is_canonical(ctx, t) && at / bytes == (at + (size_t)(t.rows * t.cols) * sizeof(float) - 1) / bytes;
}

/* A gradient that the check knows, of a parameter or of the program. */
typedef struct mti_guarded {
    const char *name;
    const mt_param *param; /* NULL: every tensor rank has the gradient whole */
    mt_tensor grad;
} mti_guarded;

static mti_guarded mti_guarded_make(const char *name, const mt_param *p, mt_tensor grad) {
    mti_guarded g;
    g.name = name;
    g.param = p && p->desc.placement != MT_REPLICATED ? p : NULL;
    g.grad = grad;
    return g;
}

/* Returns 1 when t has bytes of a gradient that the check knows. */
static int mti_guarded_find(const mt_context *ctx, mt_tensor t, mti_guarded *out) {
    const mti_guard *guard = &mti_parallel_of(ctx)->guard;
    const mti_own_gradient *own;
    const mt_params *params;
    int i;
    if (!t.data || t.rows * t.cols == 0) return 0;
    for (params = guard->registries; params; params = params->next_guarded)
        for (i = 0; i < params->count; i++) {
            const mt_param *p = params->list[i];
            const int is_grad = mti_is_in_gradient(ctx, t, p->grad);
            if (!is_grad && !mti_is_in_gradient(ctx, t, p->lookup_grad)) continue;
            *out = mti_guarded_make(p->name, p, is_grad ? p->grad : p->lookup_grad);
            return 1;
        }
    for (own = guard->own; own && !mti_is_in_gradient(ctx, t, own->grad); own = own->next) continue;
    if (own) *out = mti_guarded_make(own->name, NULL, own->grad);
    return own != NULL;
}

/* Returns 0 when an operator adds up nothing in `sum`: its inputs have one row, and no more elements than the sum.
   mt_sum, for instance, adds up the elements of a row. */
static int mti_adds_up(const mt_arg *args, int count, mt_tensor sum) {
    int i;
    for (i = 0; i < count; i++) {
        const mt_tensor *t = args[i].view;
        if ((args[i].use & MT_ARG_IN_OUT) != MT_ARG_IN || !t->data) continue;
        if (t->rows > 1 || t->rows * t->cols > sum.rows * sum.cols) return 1;
    }
    return 0;
}

/* Refuses a sum that an operator adds to a gradient, when its order depends on the split. */
static mt_status mti_gradient_sum_check(mt_context *ctx, const char *where, const mt_arg *arg, const mti_guarded *g) {
    const mt_param *p = g->param;
    if (!p)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: %s is in the gradient of '%s', which every tensor rank has whole; in invariant mode call "
                       "%s in the function of mt_sum_over_tokens, with the memory that it gets, because otherwise the "
                       "bits depend on the split",
                       where, arg->name, g->name, where);
    /* the columns of a matrix are stored shard by shard, so only a shard is a matrix */
    if (!(arg->use & MT_ARG_PRODUCT) && (p->desc.placement != MT_SPLIT_COLS || p->desc.rows == 1)) return MT_SUCCESS;
    if (mti_is_in_shard(ctx, p, g->grad, *arg->view)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "%s: %s is in the gradient of '%s', but is not a contiguous, aligned part of one of its %d virtual "
                   "shards on this rank; in invariant mode call %s once for each shard, with the tensors of "
                   "mt_invariant_input and mt_invariant_output, because otherwise the bits depend on the split",
                   where, arg->name, g->name, p->shards, where);
}

static void mti_noted_sum_forget(mti_guard *guard, uintptr_t from, uintptr_t to) {
    int i = 0;
    while (i < guard->count) {
        if (guard->sums[i].from < to && from < guard->sums[i].to) guard->sums[i] = guard->sums[--guard->count];
        else i++;
    }
}

/* Returns 1 when the sum has elements of t. The gaps between the rows of t are not elements. */
static int mti_noted_sum_meets(const mti_noted_sum *s, mt_tensor t) {
    const size_t size = mt_dtype_size(t.dtype), row = (size_t)t.cols * size, step = (size_t)mt_tensor_ld(t) * size;
    const uintptr_t from = (uintptr_t)t.data;
    size_t at;
    if (s->to <= from || s->from >= from + (size_t)(t.rows - 1) * step + row) return 0;
    if (s->from <= from) return 1;
    at = (s->from - from) % step;
    return at < row || s->to - s->from > step - at;
}

/* Returns a sum that has elements of t, or NULL. */
static const mti_noted_sum *mti_noted_sum_find(const mti_guard *guard, mt_tensor t) {
    int i;
    for (i = 0; i < guard->count && t.data && t.rows * t.cols > 0; i++)
        if (mti_noted_sum_meets(&guard->sums[i], t)) return &guard->sums[i];
    return NULL;
}

/* Notes that t is a sum. t with gaps between its rows is left out, because what is in the gaps is another tensor. */
static void mti_noted_sum_add(mti_guard *guard, mt_tensor t, size_t product, const char *where) {
    mti_noted_sum s;
    memset(&s, 0, sizeof s);
    s.from = (uintptr_t)t.data;
    s.to = s.from + (size_t)(t.rows * t.cols) * mt_dtype_size(t.dtype);
    s.product = product;
    snprintf(s.where, sizeof s.where, "%s", where);
    mti_noted_sum_forget(guard, s.from, s.to);
    if ((t.rows > 1 && mt_tensor_ld(t) != t.cols) || t.rows * t.cols == 0) return;
    if (guard->count < MTI_NOTED_SUMS) guard->sums[guard->count++] = s;
    else {
        guard->sums[guard->oldest] = s;
        guard->oldest = (guard->oldest + 1) % MTI_NOTED_SUMS;
    }
}

/* The mt_forget_function of invariant mode. */
static void mti_guard_forget(mt_context *ctx, const void *data, size_t bytes, int gone) {
    mti_parallel *p = mti_parallel_of(ctx);
    uintptr_t from = (uintptr_t)data;
    mti_own_gradient **link = p ? &p->guard.own : NULL;
    if (!p) return;
    mti_noted_sum_forget(&p->guard, from, from + bytes);
    while (gone && *link) {
        mti_own_gradient *own = *link;
        uintptr_t at = (uintptr_t)own->grad.data;
        if (at < from || at >= from + bytes) {
            link = &own->next;
            continue;
        }
        *link = own->next;
        mt_host_free(own);
    }
}

/* Refuses to move a sum over rows into a gradient whose bits then depend on the split. `moved` has elements of s. */
static mt_status mti_gradient_move_check(mt_context *ctx, const char *where, const mt_arg *out, const mt_arg *moved,
                                         const mti_noted_sum *s, const mti_guarded *g) {
    const mt_param *p = g->param;
    if (!p)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: %s is in the gradient of '%s', which every tensor rank has whole, and %s has a sum of %s "
                       "over rows; in invariant mode call %s in the function of mt_sum_over_tokens, because otherwise "
                       "the bits depend on the split",
                       where, out->name, g->name, moved->name, s->where, s->where);
    if (s->product * (size_t)p->shards <= (size_t)(g->grad.rows * g->grad.cols) * sizeof(float)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "%s: %s is in the gradient of '%s', and %s has a product of %s that is larger than one of its %d "
                   "virtual shards on this rank; in invariant mode call %s once for each shard, with the tensors of "
                   "mt_invariant_input and mt_invariant_output, because otherwise the bits depend on the split",
                   where, out->name, g->name, moved->name, s->where, p->shards, s->where);
}

/* Follows the sum s of the operand `moved` to what an operator writes. */
static mt_status mti_noted_sum_moves(mt_context *ctx, const char *where, const mt_arg *args, int count,
                                     const mt_arg *moved, const mti_noted_sum *s) {
    const mti_noted_sum sum = *s;
    mti_guarded g;
    int i;
    for (i = 0; i < count; i++) {
        if (!(args[i].use & MT_ARG_OUT)) continue;
        if (mti_guarded_find(ctx, *args[i].view, &g))
            MT_TRY(mti_gradient_move_check(ctx, where, &args[i], moved, &sum, &g));
        else if (mt_arena_has(ctx, args[i].view->data))
            mti_noted_sum_add(&mti_parallel_of(ctx)->guard, *args[i].view, sum.product, sum.where);
    }
    return MT_SUCCESS;
}

/* Looks at a view that an operator sums into: refuses a sum into a gradient, or notes it. */
static mt_status mti_sum_begins(mt_context *ctx, const char *where, const mt_arg *arg, int adds_up) {
    mti_guard *guard = &mti_parallel_of(ctx)->guard;
    mt_tensor t = *arg->view;
    const mti_noted_sum *noted;
    mti_guarded g;
    if (mti_guarded_find(ctx, t, &g)) {
        if (!adds_up && !g.param && (arg->use & MT_ARG_SUM)) return MT_SUCCESS;
        return mti_gradient_sum_check(ctx, where, arg, &g);
    }
    if (guard->over_tokens || !adds_up || !(arg->use & MT_ARG_SUM) || !mt_arena_has(ctx, t.data)) return MT_SUCCESS;
    /* an operator that another one calls, or one that adds to a part */
    noted = (arg->use & MT_ARG_IN) ? mti_noted_sum_find(guard, t) : NULL;
    if (noted && noted->from <= (uintptr_t)t.data &&
        noted->to >= (uintptr_t)t.data + (size_t)(t.rows * t.cols) * mt_dtype_size(t.dtype))
        return MT_SUCCESS;
    mti_noted_sum_add(guard, t, arg->use & MT_ARG_PRODUCT ? (size_t)(t.rows * t.cols) * sizeof(float) : 0, where);
    return MT_SUCCESS;
}

/* The mt_sum_check of invariant mode. mt_sum_over_tokens and the layers sum into scratch memory or, for parameters that
   are split, into one virtual shard. */
static mt_status mti_guarded_sum_check(mt_context *ctx, const char *where, const mt_arg *args, int count) {
    mti_guard *guard = &mti_parallel_of(ctx)->guard;
    const mt_arg *moved = NULL;
    const mti_noted_sum *sum = NULL;
    int i;
    for (i = 0; i < count && !sum && !guard->over_tokens; i++)
        if ((args[i].use & MT_ARG_MOVED) && (sum = mti_noted_sum_find(guard, *args[i].view)) != NULL) moved = &args[i];
    if (sum) return mti_noted_sum_moves(ctx, where, args, count, moved, sum);
    for (i = 0; i < count; i++) {
        mt_tensor t = *args[i].view;
        if (!t.data || t.rows * t.cols == 0 || !(args[i].use & MT_ARG_OUT)) continue;
        if (!(args[i].use & MT_ARG_IN))
            mti_noted_sum_forget(guard, (uintptr_t)t.data,
                                 (uintptr_t)t.data +
                                     (size_t)((t.rows - 1) * mt_tensor_ld(t) + t.cols) * mt_dtype_size(t.dtype));
        if (args[i].use & (MT_ARG_SUM | MT_ARG_PRODUCT))
            MT_TRY(mti_sum_begins(ctx, where, &args[i], mti_adds_up(args, count, t)));
    }
    return MT_SUCCESS;
}

/* Sets the checks of invariant mode. With one virtual shard, no bits depend on the split, and *out is NULL. */
static mt_status mti_guard_open(mt_context *ctx, mti_guard **out) {
    mti_parallel *p;
    *out = NULL;
    if (mt_context_invariant(ctx) < 2) return MT_SUCCESS;
    MT_TRY(mti_parallel_open(ctx, &p));
    MT_TRY(mt_set_sum_check(ctx, mti_guarded_sum_check));
    mt_context_set_forget(ctx, mti_guard_forget);
    *out = &p->guard;
    return MT_SUCCESS;
}

/* From now on refuses sums into the gradients whose bits would depend on the split. */
static mt_status mti_params_guard(mt_context *ctx, mt_params *params) {
    mti_guard *guard;
    MT_TRY(mti_guard_open(ctx, &guard));
    if (!guard) return MT_SUCCESS;
    params->next_guarded = guard->registries;
    guard->registries = params;
    return MT_SUCCESS;
}

static void mti_params_unguard(mt_context *ctx, const mt_params *params) {
    mti_parallel *p = mti_parallel_of(ctx);
    mt_params **link = p ? &p->guard.registries : NULL;
    while (link && *link && *link != params) link = &(*link)->next_guarded;
    if (link && *link) *link = params->next_guarded;
}

/* The same for a gradient of the program. It replaces what was in the memory before. is_whole 1: every tensor rank has
   it whole; 0: sums into it are allowed. */
static mt_status mti_own_guard(mt_context *ctx, const char *name, mt_tensor grad, int is_whole) {
    mti_guard *guard;
    mti_own_gradient *own;
    MT_TRY(mti_guard_open(ctx, &guard));
    if (!guard || !grad.data) return MT_SUCCESS;
    mti_guard_forget(ctx, grad.data, (size_t)(grad.rows * grad.cols) * sizeof(float), 1);
    if (!is_whole) return MT_SUCCESS;
    own = (mti_own_gradient *)mt_host_alloc(sizeof *own);
    if (!own) return mt_fail(ctx, MT_ERR_MEMORY, "mt_declare_shards: no memory for the gradient of '%.100s'", name);
    own->grad = grad;
    snprintf(own->name, sizeof own->name, "%s", name);
    own->next = guard->own;
    guard->own = own;
    return MT_SUCCESS;
}

/* Drops what check mode knows about memory of the caller; mt_context_free does so for the registry's. */
static void mti_params_forget(mt_context *ctx, const mt_params *params) {
    int i;
    for (i = 0; i < params->count; i++) {
        const mt_param *p = params->list[i];
        size_t n = (size_t)(p->value.rows * p->value.cols);
        mt_declare_forget(ctx, p->value.data, n * mt_dtype_size(p->value.dtype));
        mt_declare_forget(ctx, p->grad.data, n * sizeof(float));
    }
}

/* ---- >>init: the first values of parameters ---------------------------------------------------------------------- */

static int mti_is_scattered(const mt_params *params); /* >>buckets */

/* Tells check mode that the gradients are sums over all ranks that have a part of them. */
static mt_status mti_declare_synced(mt_context *ctx, const mt_params *params) {
    int i;
    for (i = 0; i < params->count; i++) {
        const mt_param *p = params->list[i];
        if (!mti_is_scattered(params)) MT_TRY(mt_declare(ctx, params->grid->dp, p->grad, MT_REPLICATED));
        if (p->desc.placement == MT_REPLICATED) MT_TRY(mt_declare(ctx, params->grid->tp, p->grad, MT_REPLICATED));
    }
    return MT_SUCCESS;
}

/* Notes the values of the parameters for mt_check_replicas, or their gradients. */
static mt_status mti_replicas_note(mt_context *ctx, const mt_params *params, int gradients) {
    int i;
    if (mt_check_mode(ctx) != 2) return MT_SUCCESS;
    for (i = 0; i < params->count; i++) {
        const mt_param *p = params->list[i];
        const char *what = gradients ? "gradient" : "value";
        mt_tensor t = gradients ? p->grad : p->value;
        MT_TRY(mt_check_replica(ctx, params->grid->dp, what, p->name, t));
        if (p->desc.placement == MT_REPLICATED) MT_TRY(mt_check_replica(ctx, params->grid->tp, what, p->name, t));
        else if (!gradients && p->desc.copies <= 1) MT_TRY(mt_check_share(ctx, params->grid->tp, what, p->name, t));
    }
    return MT_SUCCESS;
}

/* Without data, only the gradients before their sums show that a tensor rank has not computed one. */
static mt_status mti_computed_note(mt_context *ctx, const mt_params *params) {
    int i;
    if (mt_check_mode(ctx) != 2 || mt_context_has_data(ctx)) return MT_SUCCESS;
    for (i = 0; i < params->count; i++) {
        const mt_param *p = params->list[i];
        if (p->desc.placement == MT_REPLICATED && !p->desc.sequence_partial && p->desc.copies <= 1)
            MT_TRY(mt_check_replica(ctx, params->grid->tp, "gradient", p->name, p->grad));
    }
    return MT_SUCCESS;
}

static mt_status mti_replicas_check(mt_context *ctx, const mt_params *params, const char *where) {
    mt_status status = mt_check_replicas(ctx, params->grid->tp, where);
    MT_KEEP(status, mt_check_replicas(ctx, params->grid->dp, where)); /* the other groups wait for it */
    MT_KEEP(status, mt_check_replicas(ctx, params->grid->pp, where));
    return status;
}

static mt_status mti_params_squares(mt_context *ctx, mt_params *params); /* >>sync */

static mt_status mti_params_place(mt_context *ctx, mt_params *params) {
    int64_t elements;
    mt_status status;
    MT_TRY(mti_params_sum(ctx, params, &elements));
    mti_params_cut(params, &elements);
    params->elements = elements;
    params->gradients += elements;
    mti_params_order(params);
    MT_TRY(mti_params_alloc(ctx, params));
    mti_params_point(params);
    status = mti_params_squares(ctx, params);
    if (status != MT_SUCCESS) mti_params_free(ctx, params);
    MT_TRY(status);
    params->placed = 1;
    MT_TRY(mti_params_guard(params->ctx, params));
    MT_TRY(mti_params_declare(ctx, params));
    MT_TRY(mt_arena_register(ctx, params->grid->tp));
    if (params->grads)
        MT_TRY(mt_comm_register(ctx, params->grid->dp, params->grads, (size_t)params->elements * sizeof(float)));
    if (params->buckets.ranks == 1 || !params->values) return MT_SUCCESS;
    return mt_comm_register(ctx, params->grid->dp, params->values, mti_params_bytes(params, params->elements));
}

/* Returns the FNV-1a hash of a name. A parameter's random numbers depend on it, and not on what was created before. */
static uint64_t mti_name_hash(const char *name) {
    uint64_t h = 14695981039346656037u;
    for (; *name; name++) h = (h ^ (uint64_t)(unsigned char)*name) * 1099511628211u;
    return h;
}

/* Returns the random numbers of a block for an optimizer step (see mt_random). Step 0 is the initialisation. */
static mt_random mti_param_random(const mt_param *p, mti_block b, uint64_t seed, uint64_t step) {
    mt_random at;
    memset(&at, 0, sizeof at);
    at.seed = seed;
    at.subsequence = mti_name_hash(p->name) + step;
    at.first_row = p->desc.placement == MT_SPLIT_COLS ? 0 : b.global;
    at.first_col = p->desc.placement == MT_SPLIT_COLS ? b.global : 0;
    at.global_cols = p->desc.cols;
    return at;
}

static mt_status mti_param_init(mt_context *ctx, const mt_param *p, uint64_t seed) {
    int64_t i;
    for (i = 0; i < mti_param_blocks(p); i++) {
        mti_block b = mti_param_block(p, p->tp_rank, i);
        mt_tensor view = mti_param_block_view(p, p->value, b);
        mt_random at = mti_param_random(p, b, seed, 0);
        if (b.count == 0) continue;
        if (p->desc.init_std <= 0.0f) {
            MT_TRY(mt_fill(ctx, view, p->desc.init_value));
            continue;
        }
        /* Ranks may have fewer rows than others, or the same copies, so their random words are not compared. */
        if (mt_check_mode(ctx)) MT_TRY(mt_fill(ctx, view, 1.0f)); /* noted as written, and not as zero */
        mt_check_pause(ctx);
        MT_TRY(mt_check_resume(ctx, mt_random_normal(ctx, view, p->desc.init_std, at)));
    }
    return MT_SUCCESS;
}

/* Fills t [1, n] with zeros. Zero has the same bits in every type. A fill of f32 words needs no scratch memory for a
   conversion. Bound 16-bit memory may begin or end in the middle of such a word. */
static mt_status mti_zero(mt_context *ctx, mt_tensor t) {
    int64_t head, words;
    if (t.dtype == MT_F32) return mt_fill(ctx, t, 0.0f);
    head = (uintptr_t)t.data % sizeof(float) == 0 ? 0 : 1;
    words = (t.cols - head) / 2;
    if (head > 0) MT_TRY(mt_fill(ctx, mt_tensor_cols(t, 0, head), 0.0f));
    MT_TRY(mt_fill(ctx, mt_tensor_make(mt_tensor_cols(t, head, 2 * words).data, MT_F32, 1, words), 0.0f));
    if (head + 2 * words == t.cols) return MT_SUCCESS;
    return mt_fill(ctx, mt_tensor_cols(t, t.cols - 1, 1), 0.0f);
}

/* The values or the gradients are in several pieces of memory. Piece -1 is what the registry has allocated, and piece i
   is what the caller has bound of parameter i. Returns a view [1, n] of a piece and writes its first place to *at, or
   returns mt_none() when there is no such piece. */
static mt_tensor mti_memory(const mt_params *params, int kind, int piece, int64_t *at) {
    const mt_param *p = piece < 0 ? NULL : params->list[piece];
    if (p) {
        const mti_home *home = mti_home_of(p);
        *at = home->place;
        return home->bound[kind] ? mti_bound_view(p, kind, 0, p->value.rows * p->value.cols) : mt_none();
    }
    *at = 0;
    if (kind == MTI_IN_VALUES)
        return params->values ? mt_tensor_make(params->values, params->dtype, 1, params->elements) : mt_none();
    if (params->grads) return mt_tensor_f32(params->grads, 1, params->gradients);
    *at = params->elements;
    return params->lookups ? mt_tensor_f32(params->lookups, 1, params->gradients - params->elements) : mt_none();
}

/* Fills the values, padding included, or the gradients with zeros. */
static mt_status mti_memory_zero(mt_context *ctx, const mt_params *params, int kind) {
    int64_t at;
    int i;
    for (i = -1; i < params->count; i++) {
        mt_tensor piece = mti_memory(params, kind, i, &at);
        if (piece.data) MT_TRY(mti_zero(ctx, piece));
    }
    return MT_SUCCESS;
}

/* ---- >>settings: what the ranks compare with mt_comm_compare ----------------------------------------------------- */

/* Sizes of the text of a setting's value, and of mti_param_text, in bytes. */
#define MTI_TOLD_VALUE 384
#define MTI_TOLD_MESSAGE 308 /* of an error; with its status in front, mt_comm_compare prints it whole */
#define MTI_PARAM_TEXT 208

typedef struct mti_told_list {
    mt_setting *list; /* `room` settings, followed by the memory for their values */
    int room, count;
} mti_told_list;

static mt_status mti_told_begin(mt_context *ctx, int room, mti_told_list *t) {
    void *memory;
    MT_TRY(mti_host_new(ctx, (size_t)room * (sizeof *t->list + MTI_TOLD_VALUE), &memory));
    t->list = (mt_setting *)memory;
    t->room = room;
    t->count = 0;
    return MT_SUCCESS;
}

/* Adds a setting whose value is a formatted text. name must be valid until mti_told_end. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static void
mti_told_add(mti_told_list *t, const char *name, const char *format, ...) {
    char *value = (char *)(t->list + t->room) + t->count * MTI_TOLD_VALUE;
    va_list args;
    va_start(args, format);
    vsnprintf(value, MTI_TOLD_VALUE, format, args);
    va_end(args);
    t->list[t->count].name = name;
    t->list[t->count++].value = value;
}

static void mti_told_add_f32(mti_told_list *t, const char *name, float x) {
    char text[32];
    mti_told_add(t, name, "%s", mt_f32_digits(x, text));
}

/* Compares the settings on all ranks that pass the same `group`, and frees the list. */
static mt_status mti_told_end(mt_context *ctx, const mt_params *params, const char *function, int group,
                              mti_told_list *t) {
    mt_status status = mt_comm_compare(ctx, params->grid->world, function, group, t->list, t->count);
    mt_host_free(t->list);
    return status;
}

/* Writes the shape, the first values and the weight decay of a parameter. */
static void mti_param_text(const mt_param *p, char text[MTI_PARAM_TEXT]) {
    const mt_param_desc *d = &p->desc;
    char deviation[32], value[32];
    snprintf(text, MTI_PARAM_TEXT,
             "[%lld, %lld], %s, parts %lld, unit %lld, init_std %s, init_value %s, weight_decay %d", (long long)d->rows,
             (long long)d->cols, mt_placement_name(d->placement), (long long)d->parts, (long long)d->unit,
             mt_f32_digits(d->init_std, deviation), mt_f32_digits(d->init_value, value), d->weight_decay);
}

static void mti_told_add_param(mti_told_list *t, const mt_param *p) {
    const mt_param_desc *d = &p->desc;
    const mti_home *home = mti_home_of(p);
    char text[MTI_PARAM_TEXT], bound[96];
    int kind, used = 0;
    bound[0] = 0;
    for (kind = 0; kind < MTI_KINDS; kind++)
        if (home->bound[kind])
            used += snprintf(bound + used, sizeof bound - (size_t)used, "%s %s", used ? "," : ", bound",
                             mti_kind_names[kind]);
    mti_param_text(p, text);
    mti_told_add(t, p->name,
                 "%s, sequence_partial %d, shared_embedding %d, padded_features %lld, copies %lld of %lld%s", text,
                 d->sequence_partial, d->shared_embedding, (long long)d->padded_features, (long long)d->copies,
                 (long long)d->copied, bound);
}

/* Tells the other ranks of an error of this rank, so that they do not wait for it. */
static void mti_told_add_error(mt_context *ctx, mti_told_list *t, mt_status mine) {
    if (mine == MT_SUCCESS) mti_told_add(t, "error", "none");
    else mti_told_add(t, "error", "%s (%.*s)", mt_status_name(mine), MTI_TOLD_MESSAGE, mt_last_error(ctx));
}

/* A parameter of the first or of the last stage. */
typedef struct mti_twin {
    uint64_t name;   /* the hash of its name */
    uint64_t shared; /* 1, 2, ...: it is the first, the second, ... shared_embedding of its stage; 0: it is none */
    char text[MTI_PARAM_TEXT];
} mti_twin;

/* Compares the parameters of this stage with those of the other end of the pipeline. A name that both have must be a
   shared embedding on both, and a shared embedding must have the same name on both. */
static mt_status mti_ends_compare(mt_context *ctx, const mt_params *params, const char *function, const mti_twin *other,
                                  uint64_t count) {
    const int is_first = params->grid->pp_rank == 0;
    const char *mine = is_first ? "the first" : "the last", *theirs = is_first ? "the last" : "the first";
    uint64_t j;
    int i;
    for (i = 0; i < params->count; i++) {
        const mt_param *p = params->list[i];
        const uint64_t name = mti_name_hash(p->name);
        const int shared = p->desc.shared_embedding;
        for (j = 0; j < count && other[j].name != name; j++) continue;
        if (j < count ? shared && other[j].shared : !shared) continue;
        if (j == count)
            return mt_fail(ctx, MT_ERR_MISMATCH,
                           "%s: '%s' is a shared_embedding of %s pipeline stage, but %s has no parameter of "
                           "this name: give both the same name, so that they begin with the same values",
                           function, p->name, mine, theirs);
        return mt_fail(ctx, MT_ERR_MISMATCH,
                       "%s: '%s' is on the first and on the last pipeline stage, but shared_embedding is not set on "
                       "%s: set it (mt_embedding_desc.shared), so that mt_sync_gradients sums the gradients of both, "
                       "or give one of them another name",
                       function, p->name,
                       !shared && !other[j].shared ? "both"
                       : shared                    ? theirs
                                                   : mine);
    }
    return MT_SUCCESS;
}

/* A shared embedding must have the same shape, first values and weight decay on both stages, and mt_sync_gradients must
   sum all of them in the same order. Those that this stage does not have are left out: the other one refuses them. own:
   the twins of this stage */
static mt_status mti_shared_compare(mt_context *ctx, const mt_params *params, const char *function, const mti_twin *own,
                                    const mti_twin *other, uint64_t count) {
    const int is_first = params->grid->pp_rank == 0;
    uint64_t j;
    int i, k;
    for (i = 0; i < params->count; i++) {
        for (j = 0; j < count && (!own[i].shared || other[j].shared != own[i].shared); j++) continue;
        for (k = 0; k < params->count && j < count && own[k].name != other[j].name; k++) continue;
        if (j == count || k == params->count || k < i) continue;
        if (k > i)
            return mt_fail(
                ctx, MT_ERR_MISMATCH,
                "%s: of the shared embeddings, '%s' comes before '%s' on the first pipeline stage, but after "
                "it on the last: add them in the same order, so that mt_sync_gradients sums each with its own",
                function, params->list[is_first ? i : k]->name, params->list[is_first ? k : i]->name);
        if (strcmp(own[i].text, other[j].text) != 0)
            return mt_fail(ctx, MT_ERR_MISMATCH,
                           "%s: the shared_embedding '%s' is %s on the first pipeline stage, but %s on the last",
                           function, params->list[i]->name, is_first ? own[i].text : other[j].text,
                           is_first ? other[j].text : own[i].text);
    }
    return MT_SUCCESS;
}

/* The first and the last stage of a pipeline compare their parameters. Other stages do nothing. */
static mt_status mti_ends_check(mt_context *ctx, const mt_params *params, const char *function) {
    mt_comm *ends = params->grid->embedding;
    const uint64_t mine = (uint64_t)params->count;
    uint64_t counts[2], most, shared = 0;
    mti_twin *list, *all, *other;
    void *memory;
    mt_status status;
    int i, rank;
    if (!ends || mt_comm_size(ends) != 2 || mt_comm_is_meta(ends)) return MT_SUCCESS;
    rank = mt_comm_rank(ends);
    MT_TRY(mt_comm_gather_host(ctx, ends, &mine, sizeof mine, counts));
    most = counts[0] > counts[1] ? counts[0] : counts[1];
    MT_TRY(mti_host_new(ctx, (size_t)(3 * most) * sizeof *list, &memory));
    list = (mti_twin *)memory;
    all = list + most;
    other = all + (rank == 0 ? most : 0);
    memset(list, 0, (size_t)most * sizeof *list);
    for (i = 0; i < params->count; i++) {
        list[i].name = mti_name_hash(params->list[i]->name);
        mti_param_text(params->list[i], list[i].text);
        list[i].shared = params->list[i]->desc.shared_embedding ? ++shared : 0;
    }
    status = mt_comm_gather_host(ctx, ends, list, (size_t)most * sizeof *list, all);
    if (status == MT_SUCCESS) status = mti_ends_compare(ctx, params, function, other, counts[1 - rank]);
    if (status == MT_SUCCESS) status = mti_shared_compare(ctx, params, function, list, other, counts[1 - rank]);
    mt_host_free(memory);
    return status;
}

/* With check 2, compares the two ends of a pipeline. All its ranks return an error of the ends. */
static mt_status mti_stages_check(mt_context *ctx, const mt_params *params, const char *function) {
    mti_told_list t;
    mt_status mine;
    if (mt_check_mode(ctx) != 2 || params->grid->pp_size == 1) return MT_SUCCESS;
    mine = mti_ends_check(ctx, params, function);
    MT_TRY(mti_told_begin(ctx, 1, &t));
    mti_told_add_error(ctx, &t, mine);
    MT_TRY(mti_told_end(ctx, params, function, 0, &t));
    return mine;
}

/* All ranks must make the same call, with the same seed (NULL: none) and invariant mode. The ranks of a pipeline stage
   must also have the same parameters and data parallelism. `mine` is the status of this rank so far. Returns it when
   all ranks have the same. */
static mt_status mti_params_compare(mt_context *ctx, const mt_params *params, const char *function,
                                    const uint64_t *seed, mt_status mine) {
    mti_told_list t;
    int i;
    MT_TRY(mti_told_begin(ctx, 6, &t));
    mti_told_add(&t, "call", "%s", function);
    if (seed) mti_told_add(&t, "seed", "%llu", (unsigned long long)*seed);
    mti_told_add(&t, "mt_context_desc.invariant", "%d", mt_context_invariant(ctx));
    mti_told_add(&t, "mt_context_desc.invariant_data", "%d", mt_context_invariant_data(ctx));
    mti_told_add(&t, "mt_context_desc.check", "%s", mt_check_mode(ctx) == 2 ? "2" : "not 2");
    mti_told_add_error(ctx, &t, mine);
    MT_TRY(mti_told_end(ctx, params, function, 0, &t));
    MT_TRY(mti_told_begin(ctx, params->count + 3, &t));
    mti_told_add(&t, "dtype", "%s", mt_dtype_name(params->dtype));
    mti_told_add(&t, "mt_data_parallel_desc.bucket_bytes", "%zu", params->buckets.desc.bucket_bytes);
    mti_told_add(&t, "mt_data_parallel_desc.sharded_optimizer", "%d", params->buckets.desc.sharded_optimizer);
    for (i = 0; i < params->count; i++) mti_told_add_param(&t, params->list[i]);
    MT_TRY(mti_told_end(ctx, params, function, params->grid->pp_rank, &t));
    return mine == MT_SUCCESS ? mti_stages_check(ctx, params, function) : mine;
}

/* Checks that the caller has not changed the address of a value or a gradient. */
static mt_status mti_pointer_check(mt_context *ctx, const char *function, const mt_param *p) {
    const mti_home *home = p->registry ? mti_home_of(p) : NULL; /* NULL: of a layer of tensors */
    const char *changed = !home                                 ? NULL
                          : p->value.data != home->value        ? "value"
                          : p->grad.data != home->grad          ? "grad"
                          : p->lookup_grad.data != home->lookup ? "lookup_grad"
                                                                : NULL;
    if (!changed) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "%s: %s.data of '%s' was changed by hand; mt_params_bind, before mt_params_init, puts parameters "
                   "into memory of yours",
                   function, changed, p->name);
}

static mt_status mti_pointers_check(mt_context *ctx, const char *function, const mt_params *params) {
    int i;
    for (i = 0; i < params->count; i++) MT_TRY(mti_pointer_check(ctx, function, params->list[i]));
    return MT_SUCCESS;
}

/* Compares the settings of the ranks, allocates values and gradients, and sets them to zero. */
static mt_status mti_params_begin(mt_context *ctx, mt_params *params, const char *function, const uint64_t *seed) {
    MT_TRY(mti_params_compare(ctx, params, function, seed, mti_pointers_check(ctx, function, params)));
    if (!params->placed) MT_TRY(mti_params_place(ctx, params));
    mti_params_unpack(params);
    MT_TRY(mti_memory_zero(ctx, params, MTI_IN_VALUES));
    return mt_params_zero_grad(ctx, params);
}

MT_API mt_status mt_params_init(mt_context *ctx, mt_params *params, uint64_t seed) {
    static const char *const function = "mt_params_init";
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || params->count == 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function, params ? "there are no parameters" : "params is NULL");
    MT_TRY(mti_params_begin(ctx, params, function, &seed));
    for (i = 0; i < params->count; i++) MT_TRY(mti_param_init(ctx, params->list[i], seed));
    return MT_SUCCESS;
}

/* ---- >>bind: parameters in memory of the caller ------------------------------------------------------------------ */

static char *mti_memory_of(const mt_params_memory *memory, int kind) {
    switch (kind) {
    case MTI_IN_VALUES: return (char *)memory->values;
    case MTI_IN_GRADS: return (char *)memory->grads;
    case MTI_IN_STATES + (int)MT_EXP_AVG: return (char *)memory->exp_avg;
    case MTI_IN_STATES + (int)MT_EXP_AVG_SQ: return (char *)memory->exp_avg_sq;
    default: return (char *)memory->master;
    }
}

/* Checks whether parameter p may be given memory of a kind now. */
static mt_status mti_bind_kind_check(mt_context *ctx, const char *function, const mt_param *p, int kind) {
    const mt_params *params = p->registry;
    const char *name = mti_kind_names[kind], *late = NULL;
    if (kind < MTI_IN_STATES && params->placed)
        late = "mt_params_init, or after the values of all parameters were bound";
    if (kind >= MTI_IN_STATES && params->has_optimizer) late = "mt_optimizer_create";
    if (mti_home_of(p)->bound[kind])
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the %s of '%s' are already bound", function, name, p->name);
    if (late) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s of '%s' comes after %s", function, name, p->name, late);
    if (kind >= MTI_IN_STATES && params->buckets.desc.sharded_optimizer && params->grid->dp_size > 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: %s cannot be bound, because the %d data ranks share the optimizer's state "
                       "(sharded_optimizer)",
                       function, name, params->grid->dp_size);
    if (kind == MTI_IN_STATES + (int)MT_MASTER && params->dtype == MT_F32)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: master is bound, but parameters are f32 and have no master",
                       function);
    return MT_SUCCESS;
}

/* Checks that `count` parameters from `first` on fit into buffers of memory->elements. */
static mt_status mti_bind_size_check(mt_context *ctx, const char *function, const mt_params *params, int first,
                                     int count, const mt_params_memory *memory) {
    int64_t at = 0, end = 0, n;
    int i, outside = -1;
    for (i = 0; i < count; i++) {
        const mt_param *p = params->list[first + i];
        n = p->value.rows * p->value.cols;
        if (memory->offsets) at = memory->offsets[i];
        if (at < 0 || at > INT64_MAX / 8 - n)
            return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the offset of '%s' is %lld", function, p->name, (long long)at);
        if (outside < 0 && at + n > memory->elements) outside = first + i;
        at += n;
        end = mt_max(end, at);
    }
    if (outside < 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "%s: the parameters need %lld elements, but mt_params_memory.elements is %lld; the first that does "
                   "not fit is '%s'",
                   function, (long long)end, (long long)memory->elements, params->list[outside]->name);
}

/* Bytes [begin, end) that are bound. */
typedef struct mti_bound_range {
    uintptr_t begin, end;
    const mt_param *param;
    int kind;
} mti_bound_range;

static int mti_bound_by_begin(const void *a, const void *b) {
    const mti_bound_range *x = (const mti_bound_range *)a, *y = (const mti_bound_range *)b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* Checks that all memory that is bound in a registry is apart. */
static mt_status mti_bind_apart_check(mt_context *ctx, const char *function, const mt_params *params) {
    mti_bound_range *all;
    mt_status status = MT_SUCCESS;
    void *memory;
    uintptr_t at;
    int i, kind, n = 0;
    MT_TRY(mti_host_new(ctx, (size_t)params->count * MTI_KINDS * sizeof *all, &memory));
    all = (mti_bound_range *)memory;
    for (i = 0; i < params->count * MTI_KINDS; i++) {
        const mt_param *p = params->list[i / MTI_KINDS];
        kind = i % MTI_KINDS;
        at = (uintptr_t)mti_home_of(p)->bound[kind];
        if (!at && mt_context_has_data(ctx) && kind == MTI_IN_VALUES)
            at = (uintptr_t)p->value.data; /* the registry's */
        if (!at && mt_context_has_data(ctx) && kind == MTI_IN_GRADS) at = (uintptr_t)p->grad.data;
        if (!at) continue;
        all[n].begin = at;
        all[n].end = all[n].begin + (uintptr_t)(p->value.rows * p->value.cols) *
                                        mt_dtype_size(kind == MTI_IN_VALUES ? p->value.dtype : MT_F32);
        all[n].param = p;
        all[n++].kind = kind;
    }
    qsort(all, (size_t)n, sizeof *all, mti_bound_by_begin);
    for (i = 1; i < n && status == MT_SUCCESS; i++)
        if (all[i].begin < all[i - 1].end)
            status = mt_fail(ctx, MT_ERR_ARGUMENT,
                             "%s: the %s of '%s' have %llu bytes, but the %s of '%s' begin %llu bytes behind their "
                             "beginning",
                             function, mti_kind_names[all[i - 1].kind], all[i - 1].param->name,
                             (unsigned long long)(all[i - 1].end - all[i - 1].begin), mti_kind_names[all[i].kind],
                             all[i].param->name, (unsigned long long)(all[i].begin - all[i - 1].begin));
    mt_host_free(memory);
    return status;
}

/* Sets or, with memory NULL, clears what is bound of a kind. */
static void mti_bind_set(mt_params *params, int first, int count, const mt_params_memory *memory, int kind) {
    int64_t at = 0, size = kind == MTI_IN_VALUES ? (int64_t)mt_dtype_size(params->dtype) : (int64_t)sizeof(float);
    int i;
    for (i = 0; i < count; i++) {
        mt_param *p = params->list[first + i];
        mti_home *home = mti_home_of(p);
        if (memory && memory->offsets) at = memory->offsets[i];
        home->bound[kind] = memory ? mti_memory_of(memory, kind) + at * size : NULL;
        if (kind == MTI_IN_VALUES) home->value = p->value.data = home->bound[kind];
        if (kind == MTI_IN_GRADS) home->grad = p->grad.data = home->bound[kind];
        at += p->value.rows * p->value.cols;
    }
    params->bound_count[kind] += memory ? count : -count;
}

/* Undoes mti_bind. */
static void mti_bind_undo(mt_params *params, int first, int count, const mt_params_memory *memory) {
    int kind;
    for (kind = 0; memory && kind < MTI_KINDS; kind++)
        if (mti_memory_of(memory, kind)) mti_bind_set(params, first, count, NULL, kind);
}

/* Binds memory of `count` parameters from `first` on, or nothing when there is an error. */
static mt_status mti_bind(mt_context *ctx, const char *function, mt_params *params, int first, int count,
                          const mt_params_memory *memory) {
    mt_status status;
    int i, kind;
    MT_TRY(mti_pointers_check(ctx, function, params));
    if (!memory) return MT_SUCCESS;
    MT_TRY(mti_bind_size_check(ctx, function, params, first, count, memory));
    for (kind = 0; kind < MTI_KINDS; kind++) {
        const char *data = mti_memory_of(memory, kind);
        size_t size = mt_dtype_size(kind == MTI_IN_VALUES ? params->dtype : MT_F32);
        if (!data) continue;
        if ((uintptr_t)data % size != 0)
            return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s %p is not aligned to its %zu-byte elements", function,
                           mti_kind_names[kind], (const void *)data, size);
        if (mt_context_device(ctx) == MT_DEVICE_CUDA)
            MT_TRY(mt_cuda_check_memory(ctx, function, mti_kind_names[kind], data, (size_t)memory->elements * size));
        for (i = first; i < first + count; i++) MT_TRY(mti_bind_kind_check(ctx, function, params->list[i], kind));
    }
    for (kind = 0; kind < MTI_KINDS; kind++)
        if (mti_memory_of(memory, kind)) mti_bind_set(params, first, count, memory, kind);
    status = mti_bind_apart_check(ctx, function, params);
    if (status != MT_SUCCESS) mti_bind_undo(params, first, count, memory);
    return status;
}

MT_API mt_status mt_params_bind(mt_context *ctx, mt_params *params, const mt_params_memory *memory) {
    static const char *const function = "mt_params_bind";
    mt_status mine, status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || params->count == 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function, params ? "there are no parameters" : "params is NULL");
    mine = mti_bind(ctx, function, params, 0, params->count, memory);
    status = mti_params_compare(ctx, params, function, NULL, mine);
    if (status != MT_SUCCESS && mine == MT_SUCCESS) mti_bind_undo(params, 0, params->count, memory);
    MT_TRY(status);
    if (!params->placed && params->bound_count[MTI_IN_VALUES] == params->count) status = mti_params_place(ctx, params);
    if (status == MT_SUCCESS) params->is_bound = 1;
    else if (!params->placed) mti_bind_undo(params, 0, params->count, memory);
    return status;
}

MT_API mt_status mt_param_bind(mt_context *ctx, mt_param *param, const mt_params_memory *memory) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (param && !param->registry)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_param_bind: '%s' is of a layer of tensors", param->name);
    if (!param || !memory)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_param_bind: %s is NULL", param ? "memory" : "param");
    return mti_bind(ctx, "mt_param_bind", param->registry, param->index, 1, memory);
}

/* Checks the registry of a call, whose parameters need not have memory yet. */
static mt_status mti_params_known(mt_context *ctx, const mt_params *params, const char *function) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || params->count == 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function, params ? "there are no parameters" : "params is NULL");
    if (mt_context_invariant(ctx) != mt_context_invariant(params->ctx) ||
        mt_context_invariant_data(ctx) != mt_context_invariant_data(params->ctx))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the registry was made with invariant %d, %d, the context has %d, %d",
                       function, mt_context_invariant(params->ctx), mt_context_invariant_data(params->ctx),
                       mt_context_invariant(ctx), mt_context_invariant_data(ctx));
    return mti_pointers_check(ctx, function, params);
}

static mt_status mti_params_ready(mt_context *ctx, const mt_params *params, const char *function) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || !params->placed)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function,
                       params ? "call mt_params_init first" : "params is NULL");
    return mti_params_known(ctx, params, function);
}

static mt_status mti_gradients_zero(mt_context *ctx, const mt_params *params) {
    int i;
    MT_TRY(mti_memory_zero(ctx, params, MTI_IN_GRADS));
    MT_TRY(mt_check_mean_end(ctx, "mt_params_zero_grad", 0));
    for (i = 0; i < params->count; i++) {
        MT_TRY(mt_declare_zero(ctx, params->list[i]->grad));
        MT_TRY(mt_declare_zero(ctx, params->list[i]->lookup_grad));
    }
    return MT_SUCCESS;
}

/* ---- >>gradients: the state of the gradients --------------------------------------------------------------------- */

static void mti_gradients_set(mt_params *params, mti_gradient_state state) {
    params->state = state;
    params->added = NULL;
    params->micro_batch = 0;
}

/* Returns 1 when the state is known, see mti_gradient_state. */
static int mti_gradients_known(const mt_context *ctx, mt_params *params) {
    if (mt_context_records(ctx)) params->recorded = 1;
    return !params->recorded;
}

/* Notes that a layer adds to the gradient of p now. */
static void mti_gradient_added(const mt_param *p) {
    mt_params *params = p->registry; /* NULL: of a layer of tensors */
    if (!params || params->state == MTI_GRADIENTS_ADDED) return;
    params->state = MTI_GRADIENTS_ADDED;
    params->added = p;
}

/* Refuses a call that needs gradients to which more may be added. p gives the message a name. */
static mt_status mti_gradients_open(mt_context *ctx, const char *function, const mt_param *p) {
    mti_gradient_state state = p->registry->state;
    const char *wrong = state == MTI_GRADIENTS_UNDEFINED
                            ? "was not set to zero since mt_params_bind, or since a sum over ranks failed; call "
                              "mt_params_zero_grad before the first backward of a step"
                        : state == MTI_GRADIENTS_SYNCHRONISED
                            ? "is synchronised already; call mt_sync_gradients once, after the last backward of a "
                              "step, and mt_params_zero_grad before the first backward of the next"
                        : state == MTI_GRADIENTS_USED
                            ? "was used by a step of the optimizer; call mt_params_zero_grad before the first backward "
                              "of the next step"
                            : NULL;
    if (!mti_gradients_known(ctx, p->registry)) return MT_SUCCESS;
    return wrong ? mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the gradient of '%s' %s", function, p->name, wrong) : MT_SUCCESS;
}

/* In invariant mode, refuses to add micro-batch number `micro_batch` (mt_params.micro_batch) to another one. */
static mt_status mti_micro_batch_check(mt_context *ctx, const char *function, const mt_param *p, int64_t micro_batch) {
    mt_params *params = p->registry;
    if (!mt_context_invariant(ctx) || micro_batch == 0 || !mti_gradients_known(ctx, params)) return MT_SUCCESS;
    if (params->state == MTI_GRADIENTS_ADDED && params->micro_batch != 0 && params->micro_batch != micro_batch)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: the gradient of '%s' has another micro-batch that is not accumulated; in invariant mode, "
                       "call mt_accumulate_gradients after the backward of each micro-batch",
                       function, params->added->name);
    params->micro_batch = micro_batch;
    return MT_SUCCESS;
}

/* Refuses gradients whose last micro-batch was not accumulated, although others were. */
static mt_status mti_accumulated_check(mt_context *ctx, const char *function, mt_params *params) {
    if (params->micro_batches == 0 || params->state != MTI_GRADIENTS_ADDED) return MT_SUCCESS;
    if (!mti_gradients_known(ctx, params)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "%s: the gradient of '%s' has a micro-batch that is not accumulated, after %lld that are; in "
                   "invariant mode, call mt_accumulate_gradients after the backward of each micro-batch, also of the "
                   "last",
                   function, params->added->name, (long long)params->micro_batches);
}

/* Writes to text why mt_sync_gradients has to sum the gradient of p. Returns 0 when it has nothing to do. */
static int mti_sync_reason(const mt_params *params, const mt_param *p, char *text, size_t bytes) {
    const mt_grid *grid = params->grid;
    if (params->micro_batches > 0 && params->levels > 0)
        snprintf(text, bytes, "its %lld accumulated micro-batches are not added up", (long long)params->micro_batches);
    else if (p->desc.sequence_partial && grid->tp_size > 1)
        snprintf(text, bytes, "it is sequence_partial, each of the %d tensor ranks has a part of its sum",
                 grid->tp_size);
    else if (p->desc.copies > 1)
        snprintf(text, bytes, "it has %lld copies, each of them has a part of its sum", (long long)p->desc.copies);
    else if (p->lookup_grad.data)
        snprintf(text, bytes, "it is a shared embedding, the part of the lookup is not added to that of the head");
    else if (p->desc.shared_embedding && grid->embedding && mt_comm_size(grid->embedding) > 1)
        snprintf(text, bytes, "it is a shared embedding, the first and the last pipeline stage have parts of its sum");
    else if (grid->dp_size > 1) snprintf(text, bytes, "each of the %d data ranks has a part of its sum", grid->dp_size);
    else return 0;
    return 1;
}

/* Checks that the gradients are the sums over all ranks and micro-batches. A call that only reads them may also come
   after a step of the optimizer. */
static mt_status mti_gradients_ready(mt_context *ctx, const char *function, mt_params *params, int only_reads) {
    char why[128];
    int i;
    if (!mti_gradients_known(ctx, params)) return MT_SUCCESS;
    if (params->state == MTI_GRADIENTS_SYNCHRONISED) return MT_SUCCESS;
    if (params->state == MTI_GRADIENTS_USED && only_reads) return MT_SUCCESS;
    MT_TRY(mti_gradients_open(ctx, function, params->list[0]));
    MT_TRY(mti_accumulated_check(ctx, function, params));
    for (i = 0; i < params->count; i++)
        if (mti_sync_reason(params, params->list[i], why, sizeof why))
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "%s: the gradient of '%s' is not synchronised: %s; call mt_sync_gradients after the last "
                           "backward",
                           function, params->list[i]->name, why);
    return MT_SUCCESS;
}

MT_API mt_status mt_params_zero_grad(mt_context *ctx, mt_params *params) {
    MT_TRY(mti_params_ready(ctx, params, "mt_params_zero_grad"));
    MT_TRY(mt_overlap_wait(ctx, MT_OVERLAP_TICKET_THIRD));
    params->buckets.begun = 0;
    params->micro_batches = 0;
    (void)mti_gradients_known(ctx, params); /* notes a recording */
    MT_TRY(mti_gradients_zero(ctx, params));
    mti_gradients_set(params, MTI_GRADIENTS_ZEROED);
    return mti_replicas_note(ctx, params, 0);
}

MT_API mt_status mt_params_pack(mt_context *ctx, mt_params *params) {
    static const char *const function = "mt_params_pack";
    mt_status status = MT_SUCCESS;
    int i;
    MT_TRY(mti_params_ready(ctx, params, function));
    if (ctx != params->ctx)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: ctx is not the context that mt_params_create got", function);
    mti_params_unpack(params);
    for (i = 0; status == MT_SUCCESS && i < params->count; i++)
        if (mti_entry_of(params->list[i])->is_linear) status = mt_gemm_pack(ctx, params->list[i]->value);
    if (status != MT_SUCCESS) mti_params_unpack(params);
    return status;
}

/* ---- >>scatter: whole tensors and shards of parameters ----------------------------------------------------------- */

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

/* Returns the smallest number that is infinite after it is rounded to a type. */
static float mti_too_large(mt_dtype dtype) {
    return dtype == MT_F16 ? 65520.0f : dtype == MT_BF16 ? 3.39617753e38f : (float)INFINITY;
}

/* Returns the index of the first element that a type cannot hold as a finite number, or n. */
static int64_t mti_unfit(const float *x, int64_t n, mt_dtype dtype) {
    float limit = mti_too_large(dtype);
    int64_t i = 0;
    while (i < n && fabsf(x[i]) < limit) i++; /* a NaN is not less */
    return i;
}

/* Returns MT_ERR_DATA for element `index` of a tensor, which has the value x. */
static mt_status mti_unfit_fail(mt_context *ctx, const char *where, const char *name, int64_t index, float x,
                                mt_dtype dtype) {
    char text[32], wanted[48] = "must be a finite number";
    if (isfinite(x)) snprintf(wanted, sizeof wanted, "too large for %s", mt_dtype_name(dtype));
    return mt_fail(ctx, MT_ERR_DATA, "%s: element %lld of '%.150s' is %s, %s", where, (long long)index, name,
                   mt_f32_digits(isnan(x) ? (float)NAN : x, text), wanted);
}

/* Refuses finite elements that a type cannot hold. It keeps infinities and NaN. */
static mt_status mti_narrow_check(mt_context *ctx, const char *function, const mt_param *p, const float *global,
                                  mt_dtype dtype) {
    int64_t n = p->desc.rows * p->desc.cols, i;
    if (dtype == MT_F32) return MT_SUCCESS;
    for (i = mti_unfit(global, n, dtype); i < n; i += 1 + mti_unfit(global + i + 1, n - i - 1, dtype))
        if (isfinite(global[i])) return mti_unfit_fail(ctx, function, p->name, i, global[i], dtype);
    return MT_SUCCESS;
}

/* Copies rows between the device and the host. Rows of another type than f32 are converted in the arena. */
static mt_status mti_rows_copy(mt_context *ctx, mt_tensor rows, float *host, int to_host) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor f32 = rows;
    int other = rows.dtype != MT_F32;
    if (other) MT_TRY(mt_arena_tensor(ctx, MT_F32, rows.rows, rows.cols, &f32));
    if (other && to_host) MT_TRY(mt_convert(ctx, rows, f32));
    if (to_host) mt_check_pause(ctx); /* a gradient may be a term of a sum that mt_sync_gradients computes later */
    MT_TRY(to_host ? mt_check_resume(ctx, mt_download(ctx, f32, host)) : mt_upload(ctx, host, f32));
    if (other && !to_host) MT_TRY(mt_convert(ctx, f32, rows));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Copies between a block of a shard and its place in the whole tensor on the host. Copies row by row where that place
   is not contiguous. */
static mt_status mti_block_copy(mt_context *ctx, mt_tensor block, float *host, int64_t host_ld, int to_host) {
    int64_t i, step = host_ld == block.cols ? block.rows : 1;
    if (block.cols == 0) return MT_SUCCESS;
    for (i = 0; i < block.rows; i += step)
        MT_TRY(mti_rows_copy(ctx, mt_tensor_rows(block, i, step), host + i * host_ld, to_host));
    return MT_SUCCESS;
}

/* Copies between the shard of tensor rank `rank` and the whole tensor on the host. */
static mt_status mti_shard_copy(mt_context *ctx, const mt_param *p, int rank, mt_tensor shard, float *global,
                                int to_host) {
    int64_t i;
    for (i = 0; i < mti_param_blocks(p); i++) {
        mti_block b = mti_param_block(p, rank, i);
        int64_t offset = p->desc.placement == MT_SPLIT_COLS ? b.global : b.global * p->desc.cols;
        MT_TRY(mti_block_copy(ctx, mti_param_block_view(p, shard, b), global + offset, p->desc.cols, to_host));
    }
    return MT_SUCCESS;
}

/* Checks a shard of p and another pointer, which the message calls host_name. */
static mt_status mti_shard_check(mt_context *ctx, const char *function, const mt_param *p, mt_tensor shard,
                                 const char *host_name, const void *host) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!p || !shard.data || !host)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, !p ? "param" : host ? "shard" : host_name);
    if (!mt_dtype_is_float(shard.dtype))
        return mt_fail(ctx, MT_ERR_DTYPE, "%s: the shard is %s, must be f32, bf16 or f16", function,
                       mt_dtype_name(shard.dtype));
    if (shard.rows != p->value.rows || shard.cols != p->value.cols || mt_tensor_ld(shard) != shard.cols)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: the shard of '%s' is [%lld, %lld], contiguous; got [%lld, %lld], ld %lld", function,
                       p->name, (long long)p->value.rows, (long long)p->value.cols, (long long)shard.rows,
                       (long long)shard.cols, (long long)mt_tensor_ld(shard));
    return MT_SUCCESS;
}

MT_API mt_status mt_param_scatter(mt_context *ctx, const mt_param *param, const float *global, mt_tensor shard) {
    float *host;
    size_t mark;
    mt_status status;
    MT_TRY(mti_shard_check(ctx, "mt_param_scatter", param, shard, "global", global));
    MT_TRY(mti_pointer_check(ctx, "mt_param_scatter", param));
    MT_TRY(mti_narrow_check(ctx, "mt_param_scatter", param, global, shard.dtype));
    if (param->registry) mt_gemm_unpack(param->registry->ctx, shard);
    mark = mt_arena_mark(ctx);
    memcpy(&host, &global, sizeof host); /* casts const away; with to_host 0, mti_shard_copy only reads host */
    status = mti_shard_copy(ctx, param, param->tp_rank, shard, host, 0);
    mt_arena_release(ctx, mark);
    return status;
}

static mt_status mti_param_gather(mt_context *ctx, mt_params *params, const mt_param *p, mt_tensor shard,
                                  float *global) {
    mt_tensor all;
    int r;
    if (p->desc.placement == MT_REPLICATED || p->tp_size == 1) return mti_shard_copy(ctx, p, 0, shard, global, 1);
    MT_TRY(mt_arena_tensor(ctx, shard.dtype, shard.rows * p->tp_size, shard.cols, &all));
    MT_TRY(mt_all_gather(ctx, params->grid->tp, shard.data, all.data, (size_t)(shard.rows * shard.cols), shard.dtype));
    for (r = 0; r < p->tp_size; r++)
        MT_TRY(mti_shard_copy(ctx, p, r, mt_tensor_rows(all, r * shard.rows, shard.rows), global, 1));
    return MT_SUCCESS;
}

MT_API mt_status mt_param_gather(mt_context *ctx, mt_params *params, const mt_param *param, mt_tensor shard,
                                 float *global) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_params_ready(ctx, params, "mt_param_gather"));
    MT_TRY(mti_shard_check(ctx, "mt_param_gather", param, shard, "global", global));
    mark = mt_arena_mark(ctx);
    status = mti_param_gather(ctx, params, param, shard, global);
    mt_arena_release(ctx, mark);
    return status;
}

/* Checks the desc of a shard and writes its split to *out. */
static mt_status mti_sharding_from(const mt_shard *shard, mti_sharding *out) {
    mt_param_desc d;
    int v, ranks;
    if (!shard) return MT_ERR_ARGUMENT;
    memset(&d, 0, sizeof d);
    d.name = "";
    d.rows = shard->rows;
    d.cols = shard->cols;
    d.placement = shard->placement;
    d.parts = shard->parts;
    d.unit = shard->unit;
    MT_TRY(mti_sharding_check(NULL, "", &d));
    v = shard->invariant;
    ranks = shard->tp_size ? shard->tp_size : 1;
    if (ranks < 1 || shard->tp_rank < 0 || shard->tp_rank >= ranks || v < 0 || v > MTI_SHARDS_MAX || (v & (v - 1)))
        return MT_ERR_ARGUMENT;
    if (v % ranks != 0) return MT_ERR_SHAPE;
    *out = mti_sharding_of(&d, v ? v / ranks : 1, ranks);
    return MT_SUCCESS;
}

MT_API mt_status mt_shard_size(const mt_shard *shard, int64_t *rows, int64_t *cols) {
    mti_sharding s;
    if (!rows || !cols) return MT_ERR_ARGUMENT;
    MT_TRY(mti_sharding_from(shard, &s));
    mti_sharding_shape(&s, rows, cols);
    return MT_SUCCESS;
}

static void mti_host_copy(mt_tensor from, mt_tensor to) {
    size_t size = mt_dtype_size(to.dtype), i;
    for (i = 0; to.cols > 0 && i < (size_t)to.rows; i++)
        memcpy((char *)to.data + i * (size_t)mt_tensor_ld(to) * size,
               (const char *)from.data + i * (size_t)mt_tensor_ld(from) * size, (size_t)to.cols * size);
}

/* Returns 1 when [a, a + a_bytes) and [b, b + b_bytes) overlap. */
static int mti_bytes_overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
    uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return x < y ? y - x < a_bytes : x - y < b_bytes;
}

MT_API mt_status mt_shard_copy(const mt_shard *shard, mt_dtype dtype, int to_whole, const void *from, void *to) {
    size_t size = mt_dtype_size(dtype), bytes, whole_bytes;
    mti_sharding s;
    mt_tensor whole, local;
    int64_t rows, cols, i;
    MT_TRY(mti_sharding_from(shard, &s));
    if (!from || !to) return MT_ERR_ARGUMENT;
    if (size == 0) return MT_ERR_DTYPE;
    mti_sharding_shape(&s, &rows, &cols);
    whole = mt_tensor_make(to_whole ? to : from, dtype, s.rows, s.cols);
    local = mt_tensor_make(to_whole ? from : to, dtype, rows, cols);
    bytes = (size_t)(rows * cols) * size;
    whole_bytes = (size_t)(s.rows * s.cols) * size;
    if (mti_bytes_overlap(whole.data, whole_bytes, local.data, bytes)) return MT_ERR_ARGUMENT;
    if (!to_whole) memset(to, 0, bytes);
    for (i = 0; i < mti_sharding_blocks(&s); i++) {
        mti_block b = mti_sharding_block(&s, shard->tp_rank, i);
        mt_tensor there = s.placement == MT_SPLIT_COLS ? mt_tensor_cols(whole, b.global, b.count)
                                                       : mt_tensor_rows(whole, b.global, b.count);
        mt_tensor here = mti_sharding_view(&s, local, b);
        mti_host_copy(to_whole ? here : there, to_whole ? there : here);
    }
    return MT_SUCCESS;
}

static mt_status mti_declare_shard(mt_context *ctx, const mt_comm *tp, const mt_comm *dp, const mt_own_weight *w) {
    int64_t rows, cols, parts = w->shard.parts ? w->shard.parts : 1;
    mt_placement placement = w->shard.placement;
    mt_tensor value, grad;
    mt_status status = mt_shard_size(&w->shard, &rows, &cols);
    if (status != MT_SUCCESS) return mt_fail(ctx, status, "mt_declare_shards: the shard of '%.100s'", w->name);
    value = mt_tensor_make(w->value, w->dtype, rows, cols);
    if (cols == 1) value = mt_tensor_make(w->value, w->dtype, 1, rows); /* a bias, which operators take in one row */
    if (cols == 1 && placement == MT_SPLIT_ROWS) placement = MT_SPLIT_COLS;
    grad = value;
    grad.data = w->grad;
    grad.dtype = MT_F32;
    if (!w->grad) grad = mt_none();
    MT_TRY(mti_own_guard(ctx, w->name, grad, placement == MT_REPLICATED));
    return mt_declare_parameter(ctx, w->name, tp, dp, value, grad, placement, parts, 0);
}

MT_API mt_status mt_declare_shards(mt_context *ctx, const mt_comm *tp, const mt_comm *dp, const mt_own_weight *list,
                                   int count) {
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (count < 0 || (count > 0 && !list))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_declare_shards: list is NULL, or count is %d", count);
    for (i = 0; i < count; i++)
        if (!list[i].name || !list[i].value)
            return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_declare_shards: %s of weight %d is NULL",
                           list[i].name ? "value" : "name", i);
    mt_check_track(ctx);
    for (i = 0; i < count; i++) MT_TRY(mti_declare_shard(ctx, tp, dp, &list[i]));
    return MT_SUCCESS;
}

/* ---- >>hash-log -------------------------------------------------------------------------------------------------- */

#define MTI_LOG_NAME (MT_NAME_MAX + 32)

/* A flush exchanges the lines of the stages in rounds of this many lines, so that its scratch memory does not depend on
   the number of lines. */
#define MTI_LOG_ROUND 64

typedef struct mti_log_entry {
    char name[MTI_LOG_NAME];
    uint64_t hash;
    /* split[axis], for the axes tensor and data: 1 when ranks have different parts of the tensor, 0 when they have
       copies */
    int split[2], differs;
    int order; /* position among the lines of all stages, see mti_log_lines */
} mti_log_entry;

struct mt_hash_log {
    mt_context *ctx;
    const mt_grid *grid;
    mti_log_entry *entries;
    /* last: index of the entry that was found last. Steps repeat, so the next search starts after it */
    int count, capacity, last;
    int64_t first_token; /* of the current call, in the global batch */
    int values;          /* calls of mt_hash_log_value so far; every stage makes all of them */
    int paused;
};

MT_API mt_status mt_hash_log_create(mt_context *ctx, const mt_grid *grid, mt_hash_log **out) {
    mti_parallel *p;
    void *memory;
    if (out) *out = NULL;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!grid || !grid->tp || !out || mti_hash_log_of(ctx))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_hash_log_create: %s",
                       !out                   ? "out is NULL"
                       : mti_hash_log_of(ctx) ? "the context has a hash log"
                                              : "the grid was not created");
    MT_TRY(mti_parallel_open(ctx, &p));
    MT_TRY(mti_host_new(ctx, sizeof **out, &memory));
    *out = p->hash_log = (mt_hash_log *)memory;
    (*out)->ctx = ctx;
    (*out)->grid = grid;
    return MT_SUCCESS;
}

MT_API void mt_hash_log_destroy(mt_hash_log *log) {
    if (!log) return;
    mti_parallel_of(log->ctx)->hash_log = NULL;
    mt_host_free(log->entries);
    mt_host_free(log);
}

/* Finds the entry of this name, or adds one. */
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
        mt_host_free(log->entries);
        log->entries = (mti_log_entry *)memory;
        log->capacity = capacity;
    }
    log->last = log->count++;
    *out = &log->entries[log->last];
    memset(*out, 0, sizeof **out);
    snprintf((*out)->name, sizeof(*out)->name, "%s", name);
    return MT_SUCCESS;
}

MT_API void mt_hash_log_tokens(mt_context *ctx, int64_t first_token) {
    mt_hash_log *log = mti_hash_log_of(ctx);
    if (log) log->first_token = first_token > 0 ? first_token : 0;
}

MT_API void mt_hash_log_pause(mt_context *ctx, int paused) {
    mt_hash_log *log = mti_hash_log_of(ctx);
    if (log) log->paused = paused != 0;
}

MT_API mt_status mt_hash_log_activation(mt_context *ctx, const char *name, int up, const char *what, mt_tensor t,
                                        int sequence_parallel, const mt_param *cols) {
    mt_hash_log *log = ctx ? mti_hash_log_of(ctx) : NULL;
    mti_log_entry *entry;
    char full[MTI_LOG_NAME];
    int length, row_split;
    int64_t i, row;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!name || !what)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_hash_log_activation: %s is NULL", name ? "what" : "name");
    if (!log || log->paused || !t.data || !name[0]) return MT_SUCCESS;
    MT_TRY(mt_tensor_check(ctx, "mt_hash_log_activation", what, t, MT_ARG_ANY, t.rows, t.cols));
    if (cols && t.cols != cols->local_features)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "mt_hash_log_activation: %s of '%s' has %lld columns, '%s' has %lld on a rank", what, name,
                       (long long)t.cols, cols->name, (long long)cols->local_features);
    row_split = sequence_parallel && log->grid->tp_size > 1;
    row = row_split ? mt_size_mul(log->grid->tp_rank, t.rows) : 0;
    if (row < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "mt_hash_log_activation: %s of '%s' has %lld rows, too many for %d ranks",
                       what, name, (long long)t.rows, log->grid->tp_size);
    if (log->first_token > INT64_MAX - row)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_hash_log_tokens: first_token is %lld, and its row %lld has no number",
                       (long long)log->first_token, (long long)row);
    row += log->first_token;
    for (length = (int)strlen(name); length > 0 && up > 0;) up -= name[--length] == '.';
    snprintf(full, sizeof full, "%.*s.%s", length, name, what);
    MT_TRY(mti_log_entry_of(ctx, log, full, &entry));
    entry->order = strstr(what, "_grad") != NULL;
    entry->split[0] = cols != NULL || row_split;
    entry->split[1] = 1;
    if (!cols) return mt_hash(ctx, t, row, 0, t.cols, &entry->hash);
    for (i = 0; i < mti_param_blocks(cols); i++) {
        mti_block b = mti_param_block(cols, cols->tp_rank, i);
        if (b.copy) continue;
        MT_TRY(mt_hash(ctx, mti_block_cols(cols, t, b), row, b.global, mti_split_dimension(cols), &entry->hash));
    }
    return MT_SUCCESS;
}

static mt_status mti_log_check(mt_context *ctx, const char *function, const mt_hash_log *log) {
    if (!ctx) return MT_ERR_ARGUMENT;
    return log ? MT_SUCCESS : mt_fail(ctx, MT_ERR_ARGUMENT, "%s: log is NULL", function);
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
    entry->order = 2 + 2 * log->values;
    for (i = 0; i < mti_param_blocks(param); i++) {
        mti_block b = mti_param_block(param, param->tp_rank, i);
        int by_cols = param->desc.placement == MT_SPLIT_COLS;
        if (b.copy) continue;
        MT_TRY(mt_hash(ctx, mti_param_block_view(param, shard, b), by_cols ? 0 : b.global, by_cols ? b.global : 0,
                       param->desc.cols, &entry->hash));
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_hash_log_value(mt_context *ctx, mt_hash_log *log, const char *name, float value) {
    mti_log_entry *entry;
    uint32_t bits;
    MT_TRY(mti_log_check(ctx, "mt_hash_log_value", log));
    if (!name) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_hash_log_value: name is NULL");
    MT_TRY(mti_log_entry_of(ctx, log, name, &entry));
    entry->order = 2 + 2 * ++log->values;
    memcpy(&bits, &value, sizeof bits);
    entry->hash += mt_hash_element(0, bits);
    return MT_SUCCESS;
}

/* What a rank sends of an entry. */
typedef struct mti_log_part {
    uint64_t hash;
    uint64_t differs;
} mti_log_part;

/* Joins the hashes that the ranks of one axis have of an entry. Hashes of parts are added. Hashes of copies should be
   equal; when they are not, sets differs, and the result is a hash of all of them. */
static void mti_log_join_entry(mti_log_entry *entry, int axis, const mti_log_part *parts, int ranks, int stride) {
    uint64_t sum = parts[0].hash, mixed = sum;
    int r, same = 1;
    for (r = 0; r < ranks; r++) entry->differs |= parts[r * stride].differs != 0;
    for (r = 1; r < ranks; r++) {
        uint64_t h = parts[r * stride].hash;
        same &= h == parts[0].hash;
        sum += h;
        mixed = mt_hash_element(mixed + h, (uint32_t)r);
    }
    entry->hash = entry->split[axis] ? sum : same ? parts[0].hash : mixed;
    entry->differs |= !entry->split[axis] && !same;
}

/* Gathers the hashes of all entries from all ranks of comm. */
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

/* Joins the hashes of all entries over one axis. comm is the group of that axis. */
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
    mt_host_free(memory);
    return status;
}

/* Gathers the entries of all stages, with space for `each` entries of a stage. Unused entries have an empty name. */
static mt_status mti_log_gather(mt_context *ctx, const mt_hash_log *log, int each, mti_log_entry *all) {
    int64_t words = MTI_LOG_ROUND * (int64_t)(sizeof *all / sizeof(int32_t));
    int rank = log->grid->pp_rank, stages = log->grid->pp_size, first, stage;
    mt_tensor own, every;
    memcpy(all + rank * each, log->entries, (size_t)log->count * sizeof *all);
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, words, &own));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, stages, words, &every));
    for (first = 0; first < each; first += MTI_LOG_ROUND) {
        MT_TRY(mt_upload(ctx, all + rank * each + first, own));
        MT_TRY(mt_all_gather(ctx, log->grid->pp, own.data, every.data, (size_t)words, MT_I32));
        for (stage = 0; stage < stages; stage++)
            MT_TRY(mt_download(ctx, mt_tensor_rows(every, stage, 1), all + stage * each + first));
    }
    return MT_SUCCESS;
}

/* Returns 1 when an entry before e, of another stage, is of the same tensor. When the two hashes are not equal, sets
   differs in that entry. */
static int mti_log_is_copy(mti_log_entry *all, mti_log_entry *e) {
    mti_log_entry *other;
    for (other = all; other < e; other++) {
        if (other->order != e->order || strcmp(other->name, e->name) != 0) continue;
        other->differs |= e->differs || other->hash != e->hash;
        return 1;
    }
    return 0;
}

/* Calls `line` in the order in which one stage with all layers would write the lines. What is computed in forward comes
   first, stage by stage. What is computed in backward follows, with the stages in reverse. Last come the lines that a
   loop adds: those between two calls of mt_hash_log_value are again in order of the stages. */
static void mti_log_lines(mti_log_entry *all, int stages, int each, mt_hash_line line, void *user) {
    int order, last = 0, i;
    for (i = stages * each; i-- > 0;) {
        if (all[i].name[0] && mti_log_is_copy(all, &all[i])) all[i].name[0] = '\0';
        last = all[i].order > last ? all[i].order : last;
    }
    for (order = 0; order <= last; order++)
        for (i = 0; i < stages * each; i++) {
            const mti_log_entry *e = &all[(order == 1 ? stages - 1 - i / each : i / each) * each + i % each];
            if (e->name[0] && e->order == order) line(user, e->name, e->hash, e->differs);
        }
}

/* Gathers the entries of all stages and calls `line` for each tensor. */
static mt_status mti_log_stages(mt_context *ctx, mt_hash_log *log, mt_hash_line line, void *user) {
    int stages = log->grid->pp_size, each = log->count;
    mt_tensor most;
    void *memory;
    mt_status status;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, 1, &most));
    MT_TRY(mt_upload(ctx, &each, most));
    MT_TRY(mt_all_reduce(ctx, log->grid->pp, most.data, most.data, 1, MT_I32, MT_MAX));
    MT_TRY(mt_download(ctx, most, &each));
    if (each < log->count) each = log->count; /* MT_DEVICE_META downloads 0 */
    each = (int)mt_round_up(each, MTI_LOG_ROUND);
    MT_TRY(mti_host_new(ctx, (size_t)stages * (size_t)each * sizeof(mti_log_entry), &memory));
    status = mti_log_gather(ctx, log, each, (mti_log_entry *)memory);
    if (status == MT_SUCCESS) mti_log_lines((mti_log_entry *)memory, stages, each, line, user);
    mt_host_free(memory);
    return status;
}

MT_API mt_status mt_hash_log_flush(mt_context *ctx, mt_hash_log *log, mt_hash_line line, void *user) {
    size_t mark;
    mt_status status;
    int i;
    MT_TRY(mti_log_check(ctx, "mt_hash_log_flush", log));
    if (!line) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_hash_log_flush: line is NULL");
    if (log->count == 0) return MT_SUCCESS;
    mark = mt_arena_mark(ctx);
    status = mti_log_join(ctx, log, log->grid->tp, 0);
    if (status == MT_SUCCESS) status = mti_log_join(ctx, log, log->grid->dp, 1);
    if (status == MT_SUCCESS && log->grid->pp_size > 1) status = mti_log_stages(ctx, log, line, user);
    else
        for (i = 0; status == MT_SUCCESS && i < log->count; i++)
            line(user, log->entries[i].name, log->entries[i].hash, log->entries[i].differs);
    mt_arena_release(ctx, mark);
    log->count = log->last = log->values = 0;
    return status;
}

/* ---- >>linear ---------------------------------------------------------------------------------------------------- */

MT_API mt_status mt_check_sent(mt_context *ctx, const char *function, mt_comm *tp, int sequence_parallel,
                               const char *in_name, mt_tensor in, const char *out_name, mt_tensor out) {
    int in_ok = !sequence_parallel || in.rows <= 1 || mt_tensor_ld(in) == in.cols;
    mt_tensor bad = in_ok ? out : in;
    if (mt_comm_size(tp) == 1 || (in_ok && (out.rows <= 1 || mt_tensor_ld(out) == out.cols))) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE,
                   "%s: %s [%lld, %lld] has ld %lld; it is sent between %d ranks and must be contiguous", function,
                   in_ok ? out_name : in_name, (long long)bad.rows, (long long)bad.cols, (long long)bad.ld,
                   mt_comm_size(tp));
}

MT_API mt_status mt_check_activation(mt_context *ctx, const char *function, const mt_param *weight, const char *name,
                                     mt_tensor t, int64_t rows, int64_t cols) {
    MT_TRY(mt_tensor_check(ctx, function, name, t, MT_ARG_FLOAT, rows, cols));
    if (!weight)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the parameter that gives %s its type is NULL", function, name);
    if (t.dtype == weight->value.dtype) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DTYPE, "%s: %s is %s, '%s' is %s", function, name, mt_dtype_name(t.dtype), weight->name,
                   mt_dtype_name(weight->value.dtype));
}

MT_API mt_status mt_check_param(mt_context *ctx, const char *function, const mt_param *weight) {
    if (weight && (weight->registry ? weight->registry->placed : weight->value.data != NULL))
        return mti_pointer_check(ctx, function, weight);
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function,
                   weight ? "call mt_params_init before the first forward" : "the layer was not created");
}

/* mt_check_param for the weight of a layer and its bias. bias may be NULL. */
static mt_status mti_check_params(mt_context *ctx, const char *function, const mt_param *weight, const mt_param *bias) {
    MT_TRY(mt_check_param(ctx, function, weight));
    return bias ? mti_pointer_check(ctx, function, bias) : MT_SUCCESS;
}

MT_API mt_status mt_check_gradient(mt_context *ctx, const char *function, const mt_param *p) {
    const mti_parallel *options = ctx ? mti_parallel_of(ctx) : NULL;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!p) return MT_SUCCESS;
    if (!p->grad.data) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the gradient of '%s' is NULL", function, p->name);
    if (!p->registry) return MT_SUCCESS;
    MT_TRY(mti_gradients_open(ctx, function, p));
    if (p->registry->buckets.begun && p->final)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: the gradient of '%s' was final already (mt_gradients_final), and its sum over the data "
                       "ranks may be under way; call mt_sync_gradients_begin before the last backward of a step",
                       function, p->name);
    return mti_micro_batch_check(ctx, function, p, options ? options->micro_batch : 0);
}

MT_API mt_status mt_check_micro_batch(mt_context *ctx, const char *function, const mt_param *p, int64_t sequence) {
    const mti_parallel *options = ctx ? mti_parallel_of(ctx) : NULL;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!p || !p->registry || (options && options->micro_batch)) return MT_SUCCESS;
    return mti_micro_batch_check(ctx, function, p, -1 - sequence);
}

MT_API mt_status mt_param_name(mt_context *ctx, char *out, const char *name, const char *suffix) {
    int n;
    if (!out || !suffix) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_param_name: %s is NULL", out ? "suffix" : "out");
    n = name ? snprintf(out, MT_NAME_MAX, "%s.%s", name, suffix) : -1;
    if (n > 0 && n < MT_NAME_MAX) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "the parameter name '%.100s.%s' must have at most %d characters",
                   name ? name : "(NULL)", suffix, MT_NAME_MAX - 1);
}

static mt_status mti_add_param(mt_context *ctx, mt_params *params, const char *name, const char *suffix,
                               mt_param_desc desc, mt_param **out) {
    char full[MT_NAME_MAX];
    MT_TRY(mt_param_name(ctx, full, name, suffix));
    desc.name = full;
    return mt_params_add(ctx, params, &desc, out);
}

/* Refuses a field that has no effect because of another field. */
static mt_status mti_linear_unused(mt_context *ctx, const char *function, const char *name, const mt_linear_desc *d) {
    const char *field = NULL, *why = NULL;
    if (d->skip_bias_add && d->no_bias) field = "skip_bias_add", why = "with no_bias there is no bias";
    if (d->init_std != 0.0f && d->weight) field = "init_std", why = "its weight is that of another layer";
    if (!field) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' sets %s, but %s", function, name, field, why);
}

/* Checks the desc of a linear layer. whole is 1 when the layer gathers its output or takes an input that is not
   split. */
static mt_status mti_linear_check(mt_context *ctx, const char *function, const char *name, const mt_linear_desc *d,
                                  int whole) {
    MT_TRY(mt_check_integer(ctx, function, name, "in_features", d->in_features, 1, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "out_features", d->out_features, 1, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "parts", d->parts, 0, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "unit", d->unit, 0, INT64_MAX));
    MT_TRY(mt_check_float(ctx, function, name, "init_std", mt_or_default(d->init_std, 1), MT_FLOAT_AT_LEAST_0));
    MT_TRY(mti_linear_unused(ctx, function, name, d));
    if (!mt_context_invariant(ctx) || d->parts < 2 || d->parts_by_shard || whole) return MT_SUCCESS;
    return mt_fail(
        ctx, MT_ERR_ARGUMENT,
        "%s: '%s' has %lld parts, which lie shard by shard in invariant mode: work on each virtual shard, and "
        "set parts_by_shard",
        function, name, (long long)d->parts);
}

/* Describes the weight and the bias of a linear layer. placement is that of the weight. */
static void mti_linear_describe(const mt_linear_desc *d, mt_placement placement, mt_param_desc *w, mt_param_desc *b) {
    memset(w, 0, sizeof *w);
    w->rows = d->out_features;
    w->cols = d->in_features;
    w->placement = placement;
    w->parts = d->parts;
    w->unit = d->unit;
    w->padded_features = d->padded_out_features;
    w->copies = d->copies;
    w->copied = d->copied;
    w->init_std = mt_or_default(d->init_std, 0.02f);
    w->weight_decay = 1;
    memset(b, 0, sizeof *b);
    b->rows = 1;
    b->cols = d->out_features;
    if (placement == MT_SPLIT_ROWS) {
        b->placement = MT_SPLIT_COLS;
        b->padded_features = d->weight ? d->weight->desc.padded_features : d->padded_out_features;
        b->parts = d->parts;
        b->unit = d->unit;
        b->copies = d->copies;
        b->copied = d->copied;
    } else {
        b->sequence_partial = d->sequence_parallel;
    }
}

/* Adds the weight and the bias of a linear layer. placement is that of the weight. */
static mt_status mti_linear_params(mt_context *ctx, mt_params *params, const char *name, const mt_linear_desc *d,
                                   mt_placement placement, mt_param **weight, mt_param **bias) {
    mt_param_desc w, b;
    mti_linear_describe(d, placement, &w, &b);
    *weight = d->weight;
    *bias = NULL;
    if (!d->weight) MT_TRY(mti_add_param(ctx, params, name, "weight", w, weight));
    if (!d->no_bias) MT_TRY(mti_add_param(ctx, params, name, "bias", b, bias));
    if ((*weight)->registry) mti_entry_of(*weight)->is_linear = 1;
    return MT_SUCCESS;
}

/* Returns 1 when the local features of p are the global features, in the same order and without padding. */
static int mti_is_whole(const mt_param *p) {
    return p->tp_size == 1 && p->local_features == mti_split_dimension(p) && (p->desc.parts == 1 || p->shards == 1);
}

/* In check mode, refuses a tensor that is known not to be replicated over the tensor group. */
static mt_status mti_replicated_check(mt_context *ctx, const mt_comm *tp, const char *what, mt_tensor t) {
    mt_placement is = mt_placement_of(ctx, tp, t);
    if (is == MT_UNDECLARED || is == MT_REPLICATED) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s is %s over \"tensor\" (%d ranks), must be replicated", what,
                   mt_placement_name(is), mt_comm_size(tp));
}

/* Sets *out to the columns of x [tokens, n] that belong to this rank. It is a view when they are one piece, and
   otherwise a copy in the arena. Call mt_check_view_end after the calls that read it. what: x, for messages */
static mt_status mti_local_slice(mt_context *ctx, const mt_comm *tp, const mt_param *p, const char *what, mt_tensor x,
                                 mt_tensor *out) {
    int64_t i, blocks = mti_param_blocks(p);
    mti_block first = mti_param_block(p, p->tp_rank, 0), last = mti_param_block(p, p->tp_rank, blocks - 1);
    MT_TRY(mti_replicated_check(ctx, tp, what, x));
    if (mti_is_whole(p) || (p->desc.parts == 1 && p->desc.copies == 1 && last.count == last.size)) {
        *out = mt_tensor_cols(x, first.global, p->local_features);
        return mt_check_view(ctx, tp, *out, MT_SPLIT_COLS); /* nothing in a group of one */
    }
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, p->local_features, out));
    MT_TRY(mt_fill(ctx, *out, 0.0f));
    for (i = 0; i < blocks; i++) {
        mti_block b = mti_param_block(p, p->tp_rank, i);
        if (b.copy) continue; /* y has these features from another rank, which gets their gradient */
        MT_TRY(mt_copy(ctx, mt_tensor_cols(x, b.global, b.count), mti_block_cols(p, *out, b)));
    }
    return mt_check_view(ctx, tp, *out, MT_SPLIT_COLS);
}

/* The inverse of mti_local_slice: gathers `local` [tokens, local features], which is contiguous, from all ranks into y
   [tokens, n], without the padding. */
static mt_status mti_gather_features(mt_context *ctx, mt_comm *tp, const mt_param *p, mt_tensor local, mt_tensor y) {
    mt_tensor all;
    int64_t i;
    int r;
    MT_TRY(mt_arena_tensor(ctx, local.dtype, local.rows * p->tp_size, local.cols, &all));
    MT_TRY(mt_all_gather(ctx, tp, local.data, all.data, (size_t)(local.rows * local.cols), local.dtype));
    for (r = 0; r < p->tp_size; r++)
        for (i = 0; i < mti_param_blocks(p); i++) {
            mti_block b = mti_param_block(p, r, i);
            mt_tensor from = mt_tensor_rows(all, r * local.rows, local.rows);
            if (b.copy) continue;
            MT_TRY(mt_copy(ctx, mti_block_cols(p, from, b), mt_tensor_cols(y, b.global, b.count)));
        }
    return MT_SUCCESS;
}

MT_API mt_status mt_gather_tokens(mt_context *ctx, mt_comm *tp, int sequence_parallel, mt_tensor x, mt_tensor *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_gather_tokens: out is NULL");
    *out = x;
    if (!sequence_parallel || mt_comm_size(tp) == 1) return MT_SUCCESS;
    MT_TRY(mt_tensor_check(ctx, "mt_gather_tokens", "x", x, MT_ARG_ANY, x.rows, x.cols));
    if (mt_sequence_tokens(tp, 1, x.rows) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "mt_gather_tokens: x has %lld rows, too many for %d ranks", (long long)x.rows,
                       mt_comm_size(tp));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, mt_sequence_tokens(tp, 1, x.rows), x.cols, out));
    return mt_gather_from_sequence_region(ctx, tp, x, *out);
}

/* Sets *out to the tensor for partial sums [tokens, n], which mti_reduce_tokens then reduces to y. It is y itself, or
   scratch memory in the arena under sequence parallelism and for 16-bit types in invariant mode. In invariant mode
   partial sums are f32 and only the last sum is rounded, so that sums over ranks and over virtual shards have the same
   bits. */
static mt_status mti_partial_tokens(mt_context *ctx, mt_comm *tp, int sequence_parallel, mt_tensor y, mt_tensor *out) {
    int ranks = sequence_parallel ? mt_comm_size(tp) : 1;
    *out = y;
    if (ranks == 1 && (!mt_context_invariant(ctx) || y.dtype == MT_F32)) return MT_SUCCESS;
    return mt_arena_tensor(ctx, mt_context_invariant(ctx) ? MT_F32 : y.dtype, y.rows * ranks, y.cols, out);
}

/* -- tokens in chunks: one chunk is multiplied while another is communicated -- */

#define MTI_CHUNK_TOKENS 1024
#define MTI_CHUNKS 4

/* How a call cuts its tokens into chunks. Under sequence parallelism a chunk has `pieces` pieces, one for each rank,
   with some of that rank's rows. Tokens that are not communicated are a single chunk. The cut does not depend on what
   overlaps, so neither do the GEMMs and their bits. */
typedef struct mti_chunks {
    int count, pieces;
    int64_t rows; /* rows of a piece, added up over all chunks */
} mti_chunks;

/* Cuts the tokens of a call. rows is the number of rows on this rank; travel is 0 when they are not communicated. */
static mti_chunks mti_chunks_of(const mt_context *ctx, mt_comm *tp, int sequence_parallel, int travel, int64_t rows) {
    int ranks = mt_comm_size(tp), pieces = sequence_parallel ? ranks : 1;
    int64_t count = mt_parallel_get_options(ctx).overlap_chunks;
    mti_chunks c;
    if (count == 0) count = mt_overlap_is_planned(ctx) ? mt_min(rows * pieces / MTI_CHUNK_TOKENS, MTI_CHUNKS) : 1;
    if (ranks == 1 || !travel || mt_context_invariant(ctx)) count = 1;
    c.count = (int)mt_max(mt_min(count, rows), 1);
    c.pieces = c.count == 1 ? 1 : pieces;
    c.rows = c.count == 1 ? rows * pieces : rows;
    return c;
}

static int64_t mti_chunk_first(const mti_chunks *c, int chunk) { return c->rows * chunk / c->count; }

static int64_t mti_chunk_rows(const mti_chunks *c, int chunk) {
    return mti_chunk_first(c, chunk + 1) - mti_chunk_first(c, chunk);
}

/* Returns the view of one piece of a chunk of t. */
static mt_tensor mti_piece(const mti_chunks *c, mt_tensor t, int chunk, int piece) {
    return mt_tensor_rows(t, piece * c->rows + mti_chunk_first(c, chunk), mti_chunk_rows(c, chunk));
}

/* Gathers the rows of all ranks into *all, with one ticket for each chunk. *all is x when there is nothing to
   gather. */
static mt_status mti_gather_chunks(mt_context *ctx, mt_comm *tp, int sequence_parallel, const mti_chunks *c,
                                   mt_tensor x, mt_tensor *all) {
    int i;
    if (c->count == 1) return mt_gather_tokens(ctx, tp, sequence_parallel, x, all);
    *all = x;
    if (!sequence_parallel) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows * mt_comm_size(tp), x.cols, all));
    for (i = 0; i < c->count; i++) {
        int64_t first = mti_chunk_first(c, i), rows = mti_chunk_rows(c, i);
        MT_TRY(mti_overlap_begin(ctx, tp, MT_OVERLAP_ALL_GATHER));
        MT_TRY(mt_overlap_end(ctx, i, mt_gather_rows_from_sequence_region(ctx, tp, x, *all, first, rows)));
    }
    return MT_SUCCESS;
}

/* Sums the partial results of all ranks into y with an all-reduce, or with a reduce-scatter under sequence parallelism.
   It is the forward of g, or with `backward` the backward of f. */
static mt_status mti_reduce_tokens(mt_context *ctx, mt_comm *tp, int sequence_parallel, int backward, mt_tensor partial,
                                   mt_tensor y) {
    mt_tensor sum = y;
    if (partial.dtype != y.dtype && sequence_parallel) MT_TRY(mt_arena_tensor(ctx, MT_F32, y.rows, y.cols, &sum));
    else if (partial.dtype != y.dtype) sum = partial;
    if (sequence_parallel) MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, tp, partial, sum));
    else if (backward) MT_TRY(mt_copy_to_tensor_region_backward(ctx, tp, sum));
    else MT_TRY(mt_reduce_from_tensor_region_forward(ctx, tp, sum));
    return sum.dtype != y.dtype ? mt_convert(ctx, sum, y) : MT_SUCCESS;
}

/* Does the same as mti_reduce_tokens for one chunk. */
static mt_status mti_reduce_chunk(mt_context *ctx, mt_comm *tp, int sequence_parallel, const mti_chunks *c, int chunk,
                                  mt_tensor partial, mt_tensor y) {
    int64_t first = mti_chunk_first(c, chunk), rows = mti_chunk_rows(c, chunk);
    if (c->count == 1) return mti_reduce_tokens(ctx, tp, sequence_parallel, 0, partial, y);
    if (sequence_parallel) return mt_reduce_scatter_rows_to_sequence_region(ctx, tp, partial, y, first, rows);
    return mt_reduce_rows_from_tensor_region(ctx, tp, y, first, rows);
}

MT_API int64_t mt_sequence_tokens(mt_comm *tp, int sequence_parallel, int64_t rows) {
    return sequence_parallel ? mt_size_mul(rows, mt_comm_size(tp)) : rows;
}

MT_API mt_status mt_sequence_rows(mt_context *ctx, const char *function, mt_comm *tp, int sequence_parallel,
                                  int64_t tokens, int64_t *rows) {
    int ranks = sequence_parallel ? mt_comm_size(tp) : 1;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!rows) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: rows is NULL", function);
    *rows = tokens / ranks;
    if (tokens >= 0 && tokens % ranks == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE, "%s: %lld tokens cannot be split over %d tensor ranks", function,
                   (long long)tokens, ranks);
}

/* Checks that a field, in which 0 means 1, has the value of the shared weight. */
static mt_status mti_shared_check(mt_context *ctx, const char *function, const char *name, const char *field,
                                  int64_t value, const mt_param *weight, int64_t shared) {
    if ((value ? value : 1) == shared) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s': %s is %lld, that of the shared weight '%s' is %lld", function, name,
                   field, (long long)value, weight->name, (long long)shared);
}

MT_API mt_status mt_column_parallel_linear_create(mt_context *ctx, mt_params *params, const char *name,
                                                  const mt_linear_desc *desc, mt_column_parallel_linear *out) {
    static const char *const function = "mt_column_parallel_linear_create";
    char full[MT_NAME_MAX];
    size_t mark;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    MT_TRY(mt_layer_name(ctx, params, name, full));
    name = full;
    MT_TRY(mti_linear_check(ctx, function, name, desc, desc->gather_output));
    if (desc->input_is_parallel)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' sets input_is_parallel, which is for row-parallel layers",
                       function, name);
    if (desc->weight && desc->weight->desc.placement != MT_SPLIT_ROWS)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s' shares the weight '%s', whose placement is not MT_SPLIT_ROWS",
                       function, name, desc->weight->name);
    if (desc->weight && (desc->weight->desc.rows != desc->out_features || desc->weight->desc.cols != desc->in_features))
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s' is [%lld, %lld], the shared weight '%s' is [%lld, %lld]", function,
                       name, (long long)desc->out_features, (long long)desc->in_features, desc->weight->name,
                       (long long)desc->weight->desc.rows, (long long)desc->weight->desc.cols);
    if (desc->weight) {
        MT_TRY(mti_shared_check(ctx, function, name, "parts", desc->parts, desc->weight, desc->weight->desc.parts));
        MT_TRY(mti_shared_check(ctx, function, name, "unit", desc->unit, desc->weight, desc->weight->desc.unit));
    }
    if (desc->weight && (desc->copies > 1 || desc->weight->desc.copies > 1))
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s' shares the weight '%s', and one of them has copies", function, name,
                       desc->weight->name);
    if (desc->weight && desc->padded_out_features &&
        desc->padded_out_features != mti_padded(desc->out_features, desc->weight->desc.padded_features))
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: '%s': padded_out_features is %lld, that of the shared weight '%s' is %lld", function, name,
                       (long long)desc->padded_out_features, desc->weight->name,
                       (long long)desc->weight->desc.padded_features);
    memset(out, 0, sizeof *out);
    mark = mt_params_mark(params);
    MT_TRY(mt_create_end(params, mark, out, sizeof *out,
                         mti_linear_params(ctx, params, name, desc, MT_SPLIT_ROWS, &out->weight, &out->bias)));
    out->desc = *desc;
    out->tp = params->grid->tp;
    out->local_features = out->weight->local_features;
    snprintf(out->name, sizeof out->name, "%s", name);
    return MT_SUCCESS;
}

/* Calls the bias operator op with y and the bias, or in backward with dy (as y) and the gradient of the bias. */
static mt_status mti_column_bias(mt_context *ctx, const mt_param *bias, mt_tensor y,
                                 mt_status (*op)(mt_context *ctx, mt_tensor y, mt_tensor bias), int backward) {
    mt_tensor b = backward ? bias->grad : bias->value;
    int s;
    for (s = 0; s < bias->shards; s++)
        MT_TRY(op(ctx, mt_shard_cols(y, s, bias->shards), mt_shard_cols(b, s, bias->shards)));
    return MT_SUCCESS;
}

/* Computes y [tokens, local features] = x W^T + bias. bias may be NULL. */
static mt_status mti_column_product(mt_context *ctx, const mt_param *w, const mt_param *bias, mt_tensor x,
                                    mt_tensor y) {
    int s;
    if (!mt_context_invariant(ctx)) return mt_linear_forward(ctx, x, w->value, bias ? bias->value : mt_none(), y);
    MT_TRY(mt_invariant_input(ctx, x, &x)); /* one copy for all shards */
    for (s = 0; s < w->shards; s++)
        MT_TRY(mti_gemm(ctx, MT_NO_TRANS, MT_TRANS, x, mti_param_shard(w, w->value, s), 0.0f,
                        mt_shard_cols(y, s, w->shards)));
    return bias ? mti_column_bias(ctx, bias, y, mt_bias_forward, 0) : MT_SUCCESS;
}

/* The layers of a call, either column-parallel or row-parallel. */
typedef struct mti_layers {
    const mt_column_parallel_linear *columns; /* NULL: the layers are in rows */
    const mt_row_parallel_linear *rows;
    int count;
} mti_layers;

static const mt_param *mti_layer_weight(const mti_layers *l, int i) {
    return l->columns ? l->columns[i].weight : l->rows[i].weight;
}

/* The products x op(W) whose inner dimension is the split dimension. Each virtual shard of W [rows, cols] gives one
   partial sum, to which all layers of the call add. */
typedef struct mti_partial {
    const mti_layers *layers;
    mt_transpose trans; /* of W */
    const mt_tensor *x; /* one for each layer: [tokens, local features] */
    /* the product is of one piece of x (mti_piece), given by chunk and piece; NULL: of all of x */
    const mti_chunks *of;
    int chunk, piece;
} mti_partial;

/* The mti_leaf of mti_partial_product. */
static mt_status mti_partial_leaf(mt_context *ctx, const void *arg, int shard, mt_tensor out) {
    const mti_partial *p = (const mti_partial *)arg;
    int i;
    for (i = 0; i < p->layers->count; i++) {
        const mt_param *w = mti_layer_weight(p->layers, i);
        mt_tensor x = p->of ? mti_piece(p->of, p->x[i], p->chunk, p->piece) : p->x[i];
        MT_TRY(mti_gemm(ctx, MT_NO_TRANS, p->trans, mt_shard_cols(x, shard, w->shards),
                        mti_param_shard(w, w->value, shard), i == 0 ? 0.0f : 1.0f, out));
    }
    return MT_SUCCESS;
}

/* Computes out = the sum of x op(W) over layers and virtual shards: what this rank contributes to the sum over the
   tensor group. */
static mt_status mti_partial_product(mt_context *ctx, const mti_partial *p, mt_tensor out) {
    return mti_shard_tree(ctx, mti_partial_leaf, p, 0, mti_layer_weight(p->layers, 0)->shards, out);
}

/* Returns the bias that the layer adds itself, or NULL. */
static const mt_param *mti_column_own_bias(const mt_column_parallel_linear *layer) {
    return layer->desc.skip_bias_add ? NULL : layer->bias;
}

/* The activation after a column-parallel layer, when one operator computes both: h = x W^T + bias, which is the layer's
   y, and out = act(h). bias may be mt_none(). */
typedef struct mti_activation_after {
    mt_activation kind;
    mt_tensor bias, out;
} mti_activation_after;

/* Computes one piece of a layer's output y and, with act, the same piece of the activation's output. */
static mt_status mti_column_piece(mt_context *ctx, const mt_column_parallel_linear *layer,
                                  const mti_activation_after *act, mt_tensor x, mt_tensor y, mt_tensor out) {
    if (act) return mt_linear_activation_forward(ctx, act->kind, x, layer->weight->value, act->bias, y, out);
    return mti_column_product(ctx, layer->weight, mti_column_own_bias(layer), x, y);
}

/* Computes y[i] [tokens, local features] of each layer from the same x. act may be NULL; with act there is one
   layer. */
static mt_status mti_column_forward(mt_context *ctx, const mti_layers *l, mt_tensor x, const mt_tensor *y,
                                    const mti_activation_after *act) {
    const mt_column_parallel_linear *first = l->columns;
    int sp = first->desc.sequence_parallel, i, j, k;
    mti_chunks c = mti_chunks_of(ctx, first->tp, sp, sp, x.rows);
    mt_tensor all;
    MT_TRY(mti_gather_chunks(ctx, first->tp, sp, &c, x, &all));
    for (i = 0; i < c.count; i++) {
        MT_TRY(mt_overlap_wait(ctx, i));
        for (k = 0; k < l->count; k++)
            for (j = 0; j < c.pieces; j++)
                MT_TRY(mti_column_piece(ctx, &l->columns[k], act, mti_piece(&c, all, i, j), mti_piece(&c, y[k], i, j),
                                        act ? mti_piece(&c, act->out, i, j) : mt_none()));
    }
    return MT_SUCCESS;
}

/* Computes the output of one layer, and gathers it with gather_output. */
static mt_status mti_column_gathered(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor x,
                                     mt_tensor y) {
    const mti_layers l = {layer, NULL, 1};
    mt_tensor local = y;
    if (!layer->desc.gather_output || mti_is_whole(layer->weight)) return mti_column_forward(ctx, &l, x, &y, NULL);
    MT_TRY(mt_arena_tensor(ctx, y.dtype, y.rows, layer->local_features, &local));
    MT_TRY(mti_column_forward(ctx, &l, x, &local, NULL));
    return mti_gather_features(ctx, layer->tp, layer->weight, local, y);
}

/* Ends a call: waits for its collectives and releases the arena to `mark`. */
static mt_status mti_linear_end(mt_context *ctx, size_t mark, mt_status status) {
    MT_KEEP(status, mt_overlap_wait_all(ctx)); /* collectives may still use the arena */
    mt_arena_release(ctx, mark);
    return status;
}

/* The checks that forward and backward share. `in` is x and `out` is y or dy; in_name and out_name are their names in
   messages. */
static mt_status mti_column_check(mt_context *ctx, const char *function, const mt_column_parallel_linear *layer,
                                  const char *in_name, mt_tensor in, const char *out_name, mt_tensor out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_check_params(ctx, function, layer ? layer->weight : NULL, layer ? layer->bias : NULL));
    MT_TRY(mt_check_activation(ctx, function, layer->weight, in_name, in, in.rows, layer->desc.in_features));
    return mt_check_activation(ctx, function, layer->weight, out_name, out,
                               mt_sequence_tokens(layer->tp, layer->desc.sequence_parallel, in.rows),
                               layer->desc.gather_output ? layer->desc.out_features : layer->local_features);
}

static mt_status mti_column_call_forward(mt_context *ctx, const char *function, const mt_column_parallel_linear *layer,
                                         mt_tensor x, mt_tensor y, mt_linear_saved *saved) {
    size_t mark;
    MT_TRY(mti_column_check(ctx, function, layer, "x", x, "y", y));
    MT_TRY(mt_check_sent(ctx, function, layer->tp, layer->desc.sequence_parallel, "x", x, "y", mt_none()));
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_linear_end(ctx, mark, mti_column_gathered(ctx, layer, x, y)));
    if (!saved) return MT_SUCCESS;
    saved->x = x;
    return mt_hash_log_activation(ctx, layer->name, 0, "output", y, 0,
                                  layer->desc.gather_output ? NULL : layer->weight);
}

MT_API mt_status mt_column_parallel_linear_forward(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor x,
                                                   mt_tensor y, mt_linear_saved *saved) {
    return mti_column_call_forward(ctx, "mt_column_parallel_linear_forward", layer, x, y, saved);
}

/* Computes dW += dy^T x with dy [tokens, local features], and adds to the gradient of the bias. bias may be NULL. */
static mt_status mti_column_weight_gradient(mt_context *ctx, const mt_param *w, const mt_param *bias, mt_tensor dy,
                                            mt_tensor x) {
    int s;
    mti_gradient_added(w);
    if (!mt_context_invariant(ctx)) return mt_linear_gradients(ctx, dy, x, w->grad, bias ? bias->grad : mt_none());
    if (bias) MT_TRY(mti_column_bias(ctx, bias, dy, mt_bias_backward, 1));
    MT_TRY(mt_invariant_input(ctx, x, &x));
    for (s = 0; s < w->shards; s++)
        MT_TRY(mti_gemm(ctx, MT_TRANS, MT_NO_TRANS, mt_shard_cols(dy, s, w->shards), x, 1.0f,
                        mti_param_shard(w, w->grad, s)));
    return MT_SUCCESS;
}

/* Computes dx = the sum of dy W over layers and ranks. The reduction may still run on return, under ticket 0. */
static mt_status mti_column_input_gradient(mt_context *ctx, const mti_layers *l, const mt_tensor *dy, mt_tensor dx) {
    const mt_column_parallel_linear *first = l->columns;
    int sp = first->desc.sequence_parallel;
    mti_partial p = {l, MT_NO_TRANS, dy, NULL, 0, 0};
    mt_tensor partial;
    MT_TRY(mti_partial_tokens(ctx, first->tp, sp, dx, &partial));
    MT_TRY(mti_partial_product(ctx, &p, partial));
    MT_TRY(mti_overlap_begin(ctx, first->tp, MT_OVERLAP_COLUMN_BACKWARD));
    return mt_overlap_end(ctx, 0, mti_reduce_tokens(ctx, first->tp, sp, 1, partial, dx));
}

/* Computes dx and adds to the parameter gradients. The gather of x (ticket 1) overlaps with the GEMMs of dx, and the
   reduction of dx (ticket 0) with the GEMMs of the weight gradients. With add_to_dx the reduction is in scratch memory,
   because it would otherwise also sum what dx has had before. */
static mt_status mti_column_backward(mt_context *ctx, const mti_layers *l, const mt_tensor *dy, mt_tensor dx,
                                     mt_tensor x) {
    const mt_column_parallel_linear *first = l->columns;
    int add = dx.data && first->desc.add_to_dx, i;
    mt_tensor all, sum = dx;
    if (add) MT_TRY(mt_arena_tensor(ctx, dx.dtype, dx.rows, dx.cols, &sum));
    MT_TRY(mti_overlap_begin(ctx, first->tp, first->desc.sequence_parallel ? MT_OVERLAP_COLUMN_BACKWARD : 0));
    MT_TRY(mt_overlap_end(ctx, 1, mt_gather_tokens(ctx, first->tp, first->desc.sequence_parallel, x, &all)));
    if (dx.data) MT_TRY(mti_column_input_gradient(ctx, l, dy, sum));
    MT_TRY(mt_overlap_wait(ctx, 1));
    for (i = 0; i < l->count; i++)
        MT_TRY(mti_column_weight_gradient(ctx, l->columns[i].weight, mti_column_own_bias(&l->columns[i]), dy[i], all));
    if (!add) return MT_SUCCESS;
    MT_TRY(mt_overlap_wait(ctx, 0));
    return mt_add(ctx, dx, sum, dx);
}

/* Computes the backward of one layer. With gather_output, dy is the gradient of the gathered output. */
static mt_status mti_column_backward_gathered(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor dy,
                                              mt_tensor dx, mt_tensor x) {
    const mti_layers l = {layer, NULL, 1};
    if (!layer->desc.gather_output) return mti_column_backward(ctx, &l, &dy, dx, x);
    MT_TRY(mti_local_slice(ctx, layer->tp, layer->weight, "mt_column_parallel_linear_backward: dy", dy, &dy));
    return mt_check_view_end(ctx, mti_column_backward(ctx, &l, &dy, dx, x));
}

/* Checks that the parameters of a layer have the gradients to which its backward adds. */
static mt_status mti_column_gradients(mt_context *ctx, const char *function, const mt_column_parallel_linear *layer) {
    MT_TRY(mt_check_gradient(ctx, function, layer->weight));
    return mt_check_gradient(ctx, function, mti_column_own_bias(layer));
}

static mt_status mti_column_call_backward(mt_context *ctx, const char *function, const mt_column_parallel_linear *layer,
                                          mt_tensor dy, mt_tensor dx, const mt_linear_saved *saved) {
    size_t mark;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_column_check(ctx, function, layer, "saved.x", saved->x, "dy", dy));
    MT_TRY(mti_column_gradients(ctx, function, layer));
    if (dx.data)
        MT_TRY(mt_check_activation(ctx, function, layer->weight, "dx", dx, saved->x.rows, layer->desc.in_features));
    MT_TRY(mt_check_sent(ctx, function, layer->tp, layer->desc.sequence_parallel, "saved.x", saved->x, "dx", dx));
    MT_TRY(mt_check_apart(ctx, function, "dx", dx, "saved.x", saved->x));
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_linear_end(ctx, mark, mti_column_backward_gathered(ctx, layer, dy, dx, saved->x)));
    return mt_hash_log_activation(ctx, layer->name, 0, "input_grad", dx, layer->desc.sequence_parallel, NULL);
}

MT_API mt_status mt_column_parallel_linear_backward(mt_context *ctx, const mt_column_parallel_linear *layer,
                                                    mt_tensor dy, mt_tensor dx, const mt_linear_saved *saved) {
    return mti_column_call_backward(ctx, "mt_column_parallel_linear_backward", layer, dy, dx, saved);
}

/* Checks layers that share f, and that the pointer `other` is not NULL. */
static mt_status mti_shared_columns(mt_context *ctx, const char *function, const mt_column_parallel_linear *layers,
                                    int count, const void *other) {
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!layers || !other || count < 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %d layers%s", function, count,
                       layers && other ? ", needs one" : ", a list is NULL");
    for (i = 0; i < count; i++) {
        MT_TRY(mti_check_params(ctx, function, layers[i].weight, layers[i].bias));
        if (layers[i].desc.gather_output || layers[i].desc.sequence_parallel != layers[0].desc.sequence_parallel ||
            !layers[i].desc.add_to_dx != !layers[0].desc.add_to_dx || layers[i].tp != layers[0].tp)
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "%s: '%s' and '%s' must have the same sequence_parallel, add_to_dx and tensor group, and no "
                           "gather_output",
                           function, layers[0].name, layers[i].name);
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_column_parallel_linear_forward_shared(mt_context *ctx, const mt_column_parallel_linear *layers,
                                                          int count, mt_tensor x, const mt_tensor *y,
                                                          mt_linear_saved *saved) {
    static const char *const function = "mt_column_parallel_linear_forward_shared";
    mti_layers l = {layers, NULL, count};
    size_t mark;
    int i;
    MT_TRY(mti_shared_columns(ctx, function, layers, count, y));
    for (i = 0; i < count; i++) MT_TRY(mti_column_check(ctx, function, &layers[i], "x", x, "y", y[i]));
    MT_TRY(mt_check_sent(ctx, function, layers[0].tp, layers[0].desc.sequence_parallel, "x", x, "y", mt_none()));
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_linear_end(ctx, mark, mti_column_forward(ctx, &l, x, y, NULL)));
    if (!saved) return MT_SUCCESS;
    saved->x = x;
    for (i = 0; i < count; i++)
        MT_TRY(mt_hash_log_activation(ctx, layers[i].name, 0, "output", y[i], 0, layers[i].weight));
    return MT_SUCCESS;
}

MT_API mt_status mt_column_parallel_linear_backward_shared(mt_context *ctx, const mt_column_parallel_linear *layers,
                                                           int count, const mt_tensor *dy, mt_tensor dx,
                                                           const mt_linear_saved *saved) {
    static const char *const function = "mt_column_parallel_linear_backward_shared";
    mti_layers l = {layers, NULL, count};
    size_t mark;
    int i, sp;
    MT_TRY(mti_shared_columns(ctx, function, layers, count, dy));
    if (!saved) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    sp = layers[0].desc.sequence_parallel;
    for (i = 0; i < count; i++) {
        MT_TRY(mti_column_check(ctx, function, &layers[i], "saved.x", saved->x, "dy", dy[i]));
        MT_TRY(mti_column_gradients(ctx, function, &layers[i]));
    }
    if (dx.data) MT_TRY(mt_check_activation(ctx, function, layers[0].weight, "dx", dx, saved->x.rows, saved->x.cols));
    MT_TRY(mt_check_sent(ctx, function, layers[0].tp, sp, "saved.x", saved->x, "dx", dx));
    MT_TRY(mt_check_apart(ctx, function, "dx", dx, "saved.x", saved->x));
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_linear_end(ctx, mark, mti_column_backward(ctx, &l, dy, dx, saved->x)));
    return mt_hash_log_activation(ctx, layers[0].name, 0, "input_grad", dx, sp, NULL);
}

MT_API mt_status mt_column_parallel_linear_tensors(mt_context *ctx, const mt_column_parallel_linear *layers, int count,
                                                   mt_tensor like, mt_tensor *out) {
    int64_t tokens;
    int i;
    MT_TRY(mti_shared_columns(ctx, "mt_column_parallel_linear_tensors", layers, count, out));
    tokens = mt_sequence_tokens(layers[0].tp, layers[0].desc.sequence_parallel, like.rows);
    for (i = 0; i < count; i++) MT_TRY(mt_arena_tensor(ctx, like.dtype, tokens, layers[i].local_features, &out[i]));
    return MT_SUCCESS;
}

/* Computes the local columns of the product and gathers those of all ranks into y. */
static mt_status mti_column_product_gathered(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor x,
                                             mt_tensor y) {
    mt_tensor local;
    MT_TRY(mt_arena_tensor(ctx, y.dtype, y.rows, layer->local_features, &local));
    MT_TRY(mti_column_product(ctx, layer->weight, mti_column_own_bias(layer), x, local));
    return mti_gather_features(ctx, layer->tp, layer->weight, local, y);
}

MT_API mt_status mt_column_parallel_linear_product(mt_context *ctx, const mt_column_parallel_linear *layer, mt_tensor x,
                                                   int gather_output, mt_tensor y) {
    static const char *const function = "mt_column_parallel_linear_product";
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_check_params(ctx, function, layer ? layer->weight : NULL, layer ? layer->bias : NULL));
    MT_TRY(mt_check_activation(ctx, function, layer->weight, "x", x, x.rows, layer->desc.in_features));
    MT_TRY(mt_tensor_check(ctx, function, "y", y, MT_ARG_FLOAT, x.rows,
                           gather_output ? layer->desc.out_features : layer->local_features));
    mark = mt_arena_mark(ctx);
    if (gather_output && !mti_is_whole(layer->weight)) status = mti_column_product_gathered(ctx, layer, x, y);
    else status = mti_column_product(ctx, layer->weight, mti_column_own_bias(layer), x, y);
    mt_arena_release(ctx, mark);
    return status;
}

/* Returns the bias that the layer leaves to the activation (skip_bias_add), or NULL. */
static const mt_param *mti_column_left(const mt_column_parallel_linear *layer) {
    return layer->desc.skip_bias_add ? layer->bias : NULL;
}

/* Returns the value of mti_column_left, or in backward its gradient. Without such a bias returns mt_none(). */
static mt_tensor mti_left_bias(const mt_column_parallel_linear *layer, int backward) {
    const mt_param *bias = mti_column_left(layer);
    if (!bias) return mt_none();
    return backward ? bias->grad : bias->value;
}

/* Returns the number of shards of h; the activation is called once for each. A gathered h is whole and in global order,
   so it is one shard. */
static int mti_activation_shards(const mt_column_parallel_linear *layer) {
    return layer->desc.gather_output ? 1 : layer->weight->shards;
}

/* Checks everything that the activation of a layer's output h reads or writes. y has the shape of the activation's
   output. */
static mt_status mti_activation_check(mt_context *ctx, const char *function, const mt_column_parallel_linear *layer,
                                      mt_activation kind, mt_tensor h, const char *y_name, mt_tensor y) {
    int64_t features, width = kind == MT_SWIGLU ? 2 : 1;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_check_params(ctx, function, layer ? layer->weight : NULL, layer ? layer->bias : NULL));
    MT_TRY(mt_check_enum(ctx, function, NULL, "kind", (int)kind, MT_ACTIVATION_WORDS));
    if (layer->desc.gather_output && mti_left_bias(layer, 0).data)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: '%s' has gather_output and skip_bias_add; its output is whole, but its bias is split",
                       function, layer->name);
    features = layer->desc.gather_output ? layer->desc.out_features : layer->local_features;
    if (features % (width * mti_activation_shards(layer)) != 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: the %lld features of '%s' in %d shards are not gate and up", function,
                       (long long)features, layer->name, mti_activation_shards(layer));
    MT_TRY(mt_check_activation(ctx, function, layer->weight, "h", h, h.rows, features));
    return mt_check_activation(ctx, function, layer->weight, y_name, y, h.rows, features / width);
}

MT_API mt_status mt_column_parallel_activation_forward(mt_context *ctx, const mt_column_parallel_linear *layer,
                                                       mt_activation kind, mt_tensor h, mt_tensor y) {
    int s, shards;
    MT_TRY(mti_activation_check(ctx, "mt_column_parallel_activation_forward", layer, kind, h, "y", y));
    shards = mti_activation_shards(layer);
    for (s = 0; s < shards; s++)
        MT_TRY(mt_activation_forward(ctx, kind, mt_shard_cols(h, s, shards),
                                     mt_shard_cols(mti_left_bias(layer, 0), s, shards), mt_shard_cols(y, s, shards)));
    return MT_SUCCESS;
}

MT_API mt_status mt_column_parallel_activation_backward(mt_context *ctx, const mt_column_parallel_linear *layer,
                                                        mt_activation kind, mt_tensor h, mt_tensor dy, mt_tensor dh) {
    static const char *const function = "mt_column_parallel_activation_backward";
    int s, shards;
    MT_TRY(mti_activation_check(ctx, function, layer, kind, h, "dy", dy));
    MT_TRY(mt_check_activation(ctx, function, layer->weight, "dh", dh, h.rows, h.cols));
    MT_TRY(mt_check_gradient(ctx, function, mti_column_left(layer)));
    if (mti_column_left(layer)) mti_gradient_added(layer->bias);
    shards = mti_activation_shards(layer);
    for (s = 0; s < shards; s++)
        MT_TRY(mt_activation_backward(ctx, kind, mt_shard_cols(h, s, shards), mt_shard_cols(dy, s, shards),
                                      mt_shard_cols(dh, s, shards), mt_shard_cols(mti_left_bias(layer, 1), s, shards)));
    return MT_SUCCESS;
}

MT_API mt_status mt_column_parallel_linear_activation_forward(mt_context *ctx, const mt_column_parallel_linear *layer,
                                                              mt_activation kind, mt_tensor x, mt_tensor h, mt_tensor y,
                                                              mt_linear_saved *saved) {
    static const char *const function = "mt_column_parallel_linear_activation_forward";
    mti_layers l = {layer, NULL, 1};
    mti_activation_after act;
    size_t mark;
    MT_TRY(mti_column_check(ctx, function, layer, "x", x, "h", h));
    MT_TRY(mti_activation_check(ctx, function, layer, kind, h, "y", y));
    if (mt_gemm_get_options(ctx).epilogue == MT_EPILOGUE_SEPARATE || layer->desc.gather_output ||
        mti_column_own_bias(layer)) {
        MT_TRY(mt_column_parallel_linear_forward(ctx, layer, x, h, saved));
        return mt_column_parallel_activation_forward(ctx, layer, kind, h, y);
    }
    MT_TRY(mt_check_sent(ctx, function, layer->tp, layer->desc.sequence_parallel, "x", x, "h", mt_none()));
    act.kind = kind;
    act.bias = mti_left_bias(layer, 0);
    act.out = y;
    mark = mt_arena_mark(ctx);
    if (saved) saved->x = x;
    return mti_linear_end(ctx, mark, mti_column_forward(ctx, &l, x, &h, &act));
}

MT_API mt_status mt_row_parallel_linear_create(mt_context *ctx, mt_params *params, const char *name,
                                               const mt_linear_desc *desc, mt_row_parallel_linear *out) {
    static const char *const function = "mt_row_parallel_linear_create";
    char full[MT_NAME_MAX];
    size_t mark;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    MT_TRY(mt_layer_name(ctx, params, name, full));
    name = full;
    MT_TRY(mti_linear_check(ctx, function, name, desc, !desc->input_is_parallel));
    if (desc->weight || desc->gather_output || desc->padded_out_features)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' sets %s, which is for column-parallel layers", function, name,
                       desc->weight          ? "weight"
                       : desc->gather_output ? "gather_output"
                                             : "padded_out_features");
    memset(out, 0, sizeof *out);
    mark = mt_params_mark(params);
    MT_TRY(mt_create_end(params, mark, out, sizeof *out,
                         mti_linear_params(ctx, params, name, desc, MT_SPLIT_COLS, &out->weight, &out->bias)));
    out->desc = *desc;
    out->tp = params->grid->tp;
    out->local_features = out->weight->local_features;
    snprintf(out->name, sizeof out->name, "%s", name);
    return MT_SUCCESS;
}

/* The checks that forward and backward share, see mti_column_check. */
static mt_status mti_row_check(mt_context *ctx, const char *function, const mt_row_parallel_linear *layer,
                               const char *in_name, mt_tensor in, const char *out_name, mt_tensor out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_check_params(ctx, function, layer ? layer->weight : NULL, layer ? layer->bias : NULL));
    MT_TRY(mt_check_activation(ctx, function, layer->weight, in_name, in,
                               mt_sequence_tokens(layer->tp, layer->desc.sequence_parallel, out.rows),
                               layer->desc.input_is_parallel ? layer->local_features : layer->desc.in_features));
    return mt_check_activation(ctx, function, layer->weight, out_name, out, out.rows, layer->desc.out_features);
}

/* Computes y = the sum of x W^T over layers and ranks, plus the biases. The reduction of a chunk overlaps with the
   GEMMs of the next chunk. */
static mt_status mti_row_forward(mt_context *ctx, const mti_layers *l, const mt_tensor *x, mt_tensor y) {
    const mt_row_parallel_linear *first = l->rows;
    int sp = first->desc.sequence_parallel, i;
    mti_chunks c = mti_chunks_of(ctx, first->tp, sp, 1, y.rows);
    mti_partial p = {l, MT_TRANS, x, &c, 0, 0};
    mt_tensor partial;
    MT_TRY(mti_partial_tokens(ctx, first->tp, sp, y, &partial));
    for (p.chunk = 0; p.chunk < c.count; p.chunk++) {
        for (p.piece = 0; p.piece < c.pieces; p.piece++)
            MT_TRY(mti_partial_product(ctx, &p, mti_piece(&c, partial, p.chunk, p.piece)));
        MT_TRY(mti_overlap_begin(ctx, first->tp, c.count > 1 ? MT_OVERLAP_ROW_FORWARD : 0));
        MT_TRY(mt_overlap_end(ctx, p.chunk, mti_reduce_chunk(ctx, first->tp, sp, &c, p.chunk, partial, y)));
    }
    MT_TRY(mt_overlap_wait_all(ctx));
    for (i = 0; i < l->count; i++)
        if (l->rows[i].bias && !l->rows[i].desc.skip_bias_add) MT_TRY(mt_bias_forward(ctx, y, l->rows[i].bias->value));
    return MT_SUCCESS;
}

/* Computes the output of one layer. Without input_is_parallel x is whole, and this rank takes its columns. */
static mt_status mti_row_sliced(mt_context *ctx, const mt_row_parallel_linear *layer, mt_tensor x, mt_tensor y) {
    const mti_layers l = {NULL, layer, 1};
    if (layer->desc.input_is_parallel) return mti_row_forward(ctx, &l, &x, y);
    MT_TRY(mti_local_slice(ctx, layer->tp, layer->weight, "mt_row_parallel_linear_forward: x", x, &x));
    return mt_check_view_end(ctx, mti_row_forward(ctx, &l, &x, y));
}

static mt_status mti_row_call_forward(mt_context *ctx, const char *function, const mt_row_parallel_linear *layer,
                                      mt_tensor x, mt_tensor y, mt_linear_saved *saved) {
    size_t mark;
    MT_TRY(mti_row_check(ctx, function, layer, "x", x, "y", y));
    MT_TRY(mt_check_sent(ctx, function, layer->tp, 0, "x", x, "y", y));
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_linear_end(ctx, mark, mti_row_sliced(ctx, layer, x, y)));
    if (!saved) return MT_SUCCESS;
    saved->x = x;
    return mt_hash_log_activation(ctx, layer->name, 0, "output", y, layer->desc.sequence_parallel, NULL);
}

MT_API mt_status mt_row_parallel_linear_forward(mt_context *ctx, const mt_row_parallel_linear *layer, mt_tensor x,
                                                mt_tensor y, mt_linear_saved *saved) {
    return mti_row_call_forward(ctx, "mt_row_parallel_linear_forward", layer, x, y, saved);
}

/* The activation before a row-parallel layer, when one operator computes the gradient through both. */
typedef struct mti_activation_before {
    mt_activation kind;
    mt_tensor h, dbias;
} mti_activation_before;

/* Computes dx [tokens, local features] = dy W. With act, dx is the gradient of h, the input of the activation. */
static mt_status mti_row_input_gradient(mt_context *ctx, const mt_row_parallel_linear *layer,
                                        const mti_activation_before *act, mt_tensor dy, mt_tensor h, mt_tensor dx) {
    const mt_param *w = layer->weight;
    size_t mark = mt_arena_mark(ctx);
    mt_tensor part = dx;
    int s;
    if (act && act->dbias.data) mti_gradient_added(w); /* the bias of the layer before it is in the same registry */
    if (act) return mt_linear_activation_backward(ctx, act->kind, dy, w->value, h, dx, act->dbias);
    if (layer->desc.add_to_dx) MT_TRY(mt_arena_tensor(ctx, dx.dtype, dx.rows, dx.cols, &part));
    for (s = 0; s < w->shards; s++)
        MT_TRY(mti_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, dy, mti_param_shard(w, w->value, s), 0.0f,
                        mt_shard_cols(part, s, w->shards)));
    if (layer->desc.add_to_dx) MT_TRY(mt_add(ctx, dx, part, dx));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Computes dW += dy^T x. */
static mt_status mti_row_weight_gradient(mt_context *ctx, const mt_param *w, mt_tensor dy, mt_tensor x) {
    int s;
    mti_gradient_added(w);
    for (s = 0; s < w->shards; s++)
        MT_TRY(mti_gemm(ctx, MT_TRANS, MT_NO_TRANS, dy, mt_shard_cols(x, s, w->shards), 1.0f,
                        mti_param_shard(w, w->grad, s)));
    return MT_SUCCESS;
}

/* The mt_token_operator for a bias: arg points to dy, and dbias += the sum of some rows of dy. */
static mt_status mti_row_bias_gradient(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor dbias,
                                       mt_tensor none) {
    (void)none;
    return mt_bias_backward(ctx, mt_tensor_rows(*(const mt_tensor *)arg, first, count), dbias);
}

/* Adds to the gradients of the biases that the layers add themselves. */
static mt_status mti_row_bias_gradients(mt_context *ctx, const mti_layers *l, mt_tensor dy) {
    int i;
    for (i = 0; i < l->count; i++) {
        const mt_row_parallel_linear *layer = &l->rows[i];
        if (!layer->bias || layer->desc.skip_bias_add) continue;
        mti_gradient_added(layer->bias);
        MT_TRY(mt_sum_over_tokens(ctx, layer->tp, layer->desc.sequence_parallel, mti_row_bias_gradient, &dy, dy.rows,
                                  layer->bias->grad, mt_none()));
    }
    return MT_SUCCESS;
}

/* Computes dx[i] [tokens, local features] of each layer and adds to the parameter gradients. dx[i] may be mt_none().
   act may be NULL; with act there is one layer. */
static mt_status mti_row_backward(mt_context *ctx, const mti_layers *l, mt_tensor dy, const mt_tensor *dx,
                                  const mt_linear_saved *saved, const mti_activation_before *act) {
    const mt_row_parallel_linear *first = l->rows;
    int sp = first->desc.sequence_parallel, i, j, k;
    mti_chunks c = mti_chunks_of(ctx, first->tp, sp, sp, dy.rows);
    mt_tensor all;
    MT_TRY(mti_gather_chunks(ctx, first->tp, sp, &c, dy, &all));
    MT_TRY(mti_row_bias_gradients(ctx, l, dy));
    MT_TRY(mt_invariant_input(ctx, all, &all)); /* one copy for all shards */
    for (i = 0; i < c.count; i++) {
        MT_TRY(mt_overlap_wait(ctx, i));
        for (k = 0; k < l->count; k++)
            for (j = 0; j < c.pieces && dx[k].data; j++)
                MT_TRY(mti_row_input_gradient(ctx, &l->rows[k], act, mti_piece(&c, all, i, j),
                                              act ? mti_piece(&c, act->h, i, j) : mt_none(),
                                              mti_piece(&c, dx[k], i, j)));
    }
    for (k = 0; k < l->count; k++) MT_TRY(mti_row_weight_gradient(ctx, l->rows[k].weight, all, saved[k].x));
    return MT_SUCCESS;
}

/* Computes the backward of one layer. x has this rank's columns. When is_whole is 1, dx is whole, and is gathered. */
static mt_status mti_row_backward_local(mt_context *ctx, const mt_row_parallel_linear *layer, mt_tensor dy,
                                        mt_tensor dx, mt_tensor x, int is_whole) {
    mt_row_parallel_linear part = *layer;
    const mti_layers l = {NULL, &part, 1};
    int gather = dx.data && is_whole && !mti_is_whole(layer->weight);
    mt_linear_saved sliced;
    mt_tensor local = dx, whole = dx;
    sliced.x = x;
    if (gather) {
        part.desc.add_to_dx = 0; /* the gathered gradient is added */
        MT_TRY(mt_arena_tensor(ctx, dx.dtype, x.rows, layer->local_features, &local));
        if (layer->desc.add_to_dx) MT_TRY(mt_arena_tensor(ctx, dx.dtype, dx.rows, dx.cols, &whole));
    }
    MT_TRY(mti_row_backward(ctx, &l, dy, &local, &sliced, NULL));
    if (!gather) return MT_SUCCESS;
    MT_TRY(mti_gather_features(ctx, layer->tp, layer->weight, local, whole));
    return layer->desc.add_to_dx ? mt_add(ctx, dx, whole, dx) : MT_SUCCESS;
}

/* Without input_is_parallel x and dx are whole: this rank takes its columns of x. */
static mt_status mti_row_backward_sliced(mt_context *ctx, const mt_row_parallel_linear *layer, mt_tensor dy,
                                         mt_tensor dx, mt_tensor x) {
    if (layer->desc.input_is_parallel) return mti_row_backward_local(ctx, layer, dy, dx, x, 0);
    MT_TRY(mti_local_slice(ctx, layer->tp, layer->weight, "mt_row_parallel_linear_backward: saved.x", x, &x));
    return mt_check_view_end(ctx, mti_row_backward_local(ctx, layer, dy, dx, x, 1));
}

/* Checks the arguments of the backward of one layer. */
static mt_status mti_row_backward_check(mt_context *ctx, const char *function, const mt_row_parallel_linear *layer,
                                        mt_tensor dy, mt_tensor dx, const mt_linear_saved *saved) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_row_check(ctx, function, layer, "saved.x", saved->x, "dy", dy));
    if (dx.data) MT_TRY(mt_check_activation(ctx, function, layer->weight, "dx", dx, saved->x.rows, saved->x.cols));
    MT_TRY(mt_check_sent(ctx, function, layer->tp, layer->desc.sequence_parallel, "dy", dy, "dx", mt_none()));
    MT_TRY(mt_check_apart(ctx, function, "dx", dx, "saved.x", saved->x));
    if (layer->desc.add_to_dx) MT_TRY(mt_check_apart(ctx, function, "dx", dx, "dy", dy));
    MT_TRY(mt_check_gradient(ctx, function, layer->weight));
    if (!layer->bias || layer->desc.skip_bias_add) return MT_SUCCESS;
    MT_TRY(mt_check_gradient(ctx, function, layer->bias));
    return mt_check_tokens(ctx, function, mt_sequence_tokens(layer->tp, layer->desc.sequence_parallel, dy.rows));
}

static mt_status mti_row_call_backward(mt_context *ctx, const char *function, const mt_row_parallel_linear *layer,
                                       mt_tensor dy, mt_tensor dx, const mt_linear_saved *saved) {
    size_t mark;
    MT_TRY(mti_row_backward_check(ctx, function, layer, dy, dx, saved));
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_linear_end(ctx, mark, mti_row_backward_sliced(ctx, layer, dy, dx, saved->x)));
    return mt_hash_log_activation(ctx, layer->name, 0, "input_grad", dx, 0,
                                  layer->desc.input_is_parallel ? layer->weight : NULL);
}

MT_API mt_status mt_row_parallel_linear_backward(mt_context *ctx, const mt_row_parallel_linear *layer, mt_tensor dy,
                                                 mt_tensor dx, const mt_linear_saved *saved) {
    return mti_row_call_backward(ctx, "mt_row_parallel_linear_backward", layer, dy, dx, saved);
}

/* Checks layers that share g, and that the pointer `other` is not NULL. */
static mt_status mti_shared_rows(mt_context *ctx, const char *function, const mt_row_parallel_linear *layers, int count,
                                 const void *other) {
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!layers || !other || count < 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %d layers%s", function, count,
                       layers && other ? ", needs one" : ", a list is NULL");
    for (i = 0; i < count; i++) {
        MT_TRY(mti_check_params(ctx, function, layers[i].weight, layers[i].bias));
        if (!layers[i].desc.input_is_parallel || layers[i].desc.sequence_parallel != layers[0].desc.sequence_parallel ||
            layers[i].tp != layers[0].tp)
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "%s: '%s' and '%s' must have the same sequence_parallel and tensor group, and "
                           "input_is_parallel",
                           function, layers[0].name, layers[i].name);
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_row_parallel_linear_tensors(mt_context *ctx, const mt_row_parallel_linear *layers, int count,
                                                mt_tensor like, mt_tensor *out) {
    int64_t tokens;
    int i;
    MT_TRY(mti_shared_rows(ctx, "mt_row_parallel_linear_tensors", layers, count, out));
    tokens = mt_sequence_tokens(layers[0].tp, layers[0].desc.sequence_parallel, like.rows);
    for (i = 0; i < count; i++) MT_TRY(mt_arena_tensor(ctx, like.dtype, tokens, layers[i].local_features, &out[i]));
    return MT_SUCCESS;
}

MT_API mt_status mt_row_parallel_linear_forward_shared(mt_context *ctx, const mt_row_parallel_linear *layers, int count,
                                                       const mt_tensor *x, mt_tensor y, mt_linear_saved *saved) {
    static const char *const function = "mt_row_parallel_linear_forward_shared";
    mti_layers l = {NULL, layers, count};
    size_t mark;
    int i;
    MT_TRY(mti_shared_rows(ctx, function, layers, count, x));
    for (i = 0; i < count; i++) MT_TRY(mti_row_check(ctx, function, &layers[i], "x", x[i], "y", y));
    MT_TRY(mt_check_sent(ctx, function, layers[0].tp, 0, "x", x[0], "y", y));
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_linear_end(ctx, mark, mti_row_forward(ctx, &l, x, y)));
    if (!saved) return MT_SUCCESS;
    for (i = 0; i < count; i++) saved[i].x = x[i];
    return mt_hash_log_activation(ctx, layers[0].name, 0, "output", y, layers[0].desc.sequence_parallel, NULL);
}

MT_API mt_status mt_row_parallel_linear_backward_shared(mt_context *ctx, const mt_row_parallel_linear *layers,
                                                        int count, mt_tensor dy, const mt_tensor *dx,
                                                        const mt_linear_saved *saved) {
    static const char *const function = "mt_row_parallel_linear_backward_shared";
    mti_layers l = {NULL, layers, count};
    size_t mark;
    int i;
    MT_TRY(mti_shared_rows(ctx, function, layers, count, dx));
    if (!saved) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    for (i = 0; i < count; i++) MT_TRY(mti_row_backward_check(ctx, function, &layers[i], dy, dx[i], &saved[i]));
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_linear_end(ctx, mark, mti_row_backward(ctx, &l, dy, dx, saved, NULL)));
    for (i = 0; i < count; i++)
        MT_TRY(mt_hash_log_activation(ctx, layers[i].name, 0, "input_grad", dx[i], 0, layers[i].weight));
    return MT_SUCCESS;
}

/* Computes dact, the gradient of the activation's output, and then dh, when one operator does not compute both. */
static mt_status mti_row_activation_separate(mt_context *ctx, const mt_row_parallel_linear *layer,
                                             const mt_column_parallel_linear *before, mt_activation kind, mt_tensor dy,
                                             mt_tensor h, mt_tensor dh, const mt_linear_saved *saved) {
    mt_tensor dact;
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, h.rows, layer->local_features, &dact));
    MT_TRY(mt_row_parallel_linear_backward(ctx, layer, dy, dact, saved));
    return mt_column_parallel_activation_backward(ctx, before, kind, h, dact, dh);
}

MT_API mt_status mt_row_parallel_linear_activation_backward(mt_context *ctx, const mt_row_parallel_linear *layer,
                                                            const mt_column_parallel_linear *before, mt_activation kind,
                                                            mt_tensor dy, mt_tensor h, mt_tensor dh,
                                                            const mt_linear_saved *saved) {
    static const char *const function = "mt_row_parallel_linear_activation_backward";
    mti_layers l = {NULL, layer, 1};
    mti_activation_before act;
    mt_status status;
    size_t mark;
    MT_TRY(mti_row_backward_check(ctx, function, layer, dy, mt_none(), saved));
    if (!before || !layer->desc.input_is_parallel || layer->desc.add_to_dx || before->desc.gather_output)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: '%s' needs input_is_parallel and must not have add_to_dx, and the layer before it must not "
                       "have gather_output",
                       function, layer->name);
    MT_TRY(mti_activation_check(ctx, function, before, kind, h, "saved.x", saved->x));
    MT_TRY(mt_check_activation(ctx, function, layer->weight, "dh", dh, h.rows, h.cols));
    MT_TRY(mt_check_gradient(ctx, function, mti_column_left(before)));
    mark = mt_arena_mark(ctx);
    if (mt_gemm_get_options(ctx).epilogue == MT_EPILOGUE_SEPARATE || mti_column_own_bias(before)) {
        status = mti_row_activation_separate(ctx, layer, before, kind, dy, h, dh, saved);
    } else {
        act.kind = kind;
        act.h = h;
        act.dbias = mti_left_bias(before, 1);
        status = mti_row_backward(ctx, &l, dy, &dh, saved, &act);
    }
    return mti_linear_end(ctx, mark, status);
}

/* ---- >>linear-tensors: layers of tensors in memory of the caller ------------------------------------------------- */

/* Checks one tensor of a layer; suffix is its name in mt_linear_tensors. */
static mt_status mti_own_check(mt_context *ctx, const char *function, const char *name, const char *suffix, mt_tensor t,
                               int type, int64_t rows, int64_t cols) {
    char full[MT_NAME_MAX + 4];
    snprintf(full, sizeof full, "%s%s%s", name, name[0] ? "." : "", suffix);
    MT_TRY(mt_tensor_check(ctx, function, full, t, type, rows, cols));
    if (rows <= 1 || mt_tensor_ld(t) == cols) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s [%lld, %lld] has ld %lld, must be contiguous", function, full,
                   (long long)rows, (long long)cols, (long long)t.ld);
}

/* Makes a parameter of a tensor and its gradient, each of which may be mt_none(). suffix is "w" or "b". */
static mt_status mti_own_param(mt_context *ctx, const char *function, mt_comm *tp, const char *name, const char *suffix,
                               const mt_param_desc *desc, mt_tensor value, mt_tensor grad, mt_param *out) {
    const char *grad_suffix = suffix[0] == 'w' ? "dw" : "db";
    mti_sharding s;
    int64_t rows, cols;
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%s%s%s", name, name[0] ? "." : "", suffix);
    out->desc = *desc;
    out->desc.name = out->name;
    if (!out->desc.parts) out->desc.parts = 1;
    if (!out->desc.unit) out->desc.unit = 1;
    if (!out->desc.copies) out->desc.copies = 1;
    MT_TRY(mti_sharding_check(ctx, function, &out->desc));
    out->tp_rank = mt_comm_rank(tp);
    out->tp_size = mt_comm_size(tp);
    s = mti_sharding_of(&out->desc, mti_shards(ctx, tp), out->tp_size);
    out->shards = s.shards;
    out->local_features = s.local;
    mti_sharding_shape(&s, &rows, &cols);
    if (value.data) MT_TRY(mti_own_check(ctx, function, name, suffix, value, MT_ARG_FLOAT, rows, cols));
    if (grad.data) MT_TRY(mti_own_check(ctx, function, name, grad_suffix, grad, MT_ARG_F32, rows, cols));
    out->value = value;
    out->grad = grad;
    return MT_SUCCESS;
}

/* Sets the fields of *d that the tensors give: no_bias, and the features when they are 0. */
static void mti_own_sizes(const mt_context *ctx, const mt_comm *tp, mt_placement placement, const mt_linear_tensors *t,
                          mt_linear_desc *d) {
    int columns = placement == MT_SPLIT_ROWS;                                        /* column-parallel */
    int ranks = mt_comm_size(tp), shards = t->w.rows == 1 ? 1 : mti_shards(ctx, tp); /* 1: mti_sharding_shape */
    if (!d->out_features) d->out_features = columns ? mt_size_mul(t->w.rows, ranks) : t->w.rows / shards;
    if (!d->in_features) d->in_features = columns ? t->w.cols : mt_size_mul(t->w.cols, (int64_t)shards * ranks);
    d->no_bias = !t->b.data && !t->db.data;
    if (d->no_bias) d->skip_bias_add = 0; /* in backward nothing but db says that there is a bias */
}

/* Checks the arguments of mt_..._parallel_linear_from_tensors and fills params. *d is the desc, completed from the
   tensors. placement is that of w. */
static mt_status mti_own_linear(mt_context *ctx, const char *function, mt_comm *tp, const char *name,
                                mt_placement placement, const mt_linear_tensors *t, mt_linear_desc *d,
                                mt_param *params) {
    const char *field = d->weight                                              ? "weight"
                        : d->init_std != 0.0f                                  ? "init_std"
                        : d->no_bias && (t->b.data || t->db.data)              ? "no_bias"
                        : placement == MT_SPLIT_ROWS && d->input_is_parallel   ? "input_is_parallel"
                        : placement == MT_SPLIT_COLS && d->gather_output       ? "gather_output"
                        : placement == MT_SPLIT_COLS && d->padded_out_features ? "padded_out_features"
                        : d->copies > 1                                        ? "copies"
                                                                               : NULL;
    int whole = placement == MT_SPLIT_ROWS ? d->gather_output : !d->input_is_parallel;
    mt_param_desc w, b;
    if (!t->w.data) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: w is NULL", function);
    if (field)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc sets %s, which does not go with the tensors", function, field);
    MT_TRY(mti_expect_shards(ctx, function, tp));
    mti_own_sizes(ctx, tp, placement, t, d);
    MT_TRY(mti_linear_check(ctx, function, name[0] ? name : "w", d, whole));
    mti_linear_describe(d, placement, &w, &b);
    MT_TRY(mti_own_param(ctx, function, tp, name, "w", &w, t->w, t->dw, &params[0]));
    if (d->no_bias) return MT_SUCCESS;
    MT_TRY(mti_own_param(ctx, function, tp, name, "b", &b, t->b, t->db, &params[1]));
    if (!t->b.data || t->b.dtype == t->w.dtype) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DTYPE, "%s: '%s' is %s, '%s' is %s", function, params[1].name, mt_dtype_name(t->b.dtype),
                   params[0].name, mt_dtype_name(t->w.dtype));
}

/* Checks the pointers, and sets *d to the desc or to the defaults. */
static mt_status mti_own_begin(mt_context *ctx, const char *function, const mt_comm *tp, const char **name,
                               const mt_linear_desc *desc, mt_linear_desc *d) {
    memset(d, 0, sizeof *d);
    if (desc) *d = *desc;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!tp) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: tp is NULL", function);
    if (!*name) *name = "";
    if (strlen(*name) > MT_NAME_MAX - 3)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the name '%.100s' must have at most %d characters", function, *name,
                       MT_NAME_MAX - 3);
    return MT_SUCCESS;
}

static mt_status mti_own_column(mt_context *ctx, const char *function, mt_comm *tp, const char *name,
                                const mt_linear_desc *desc, const mt_linear_tensors *t, mt_param *params,
                                mt_column_parallel_linear *out) {
    mt_linear_desc d;
    MT_TRY(mti_own_begin(ctx, function, tp, &name, desc, &d));
    MT_TRY(mti_own_linear(ctx, function, tp, name, MT_SPLIT_ROWS, t, &d, params));
    memset(out, 0, sizeof *out);
    out->desc = d;
    out->weight = &params[0];
    out->bias = d.no_bias ? NULL : &params[1];
    out->tp = tp;
    out->local_features = params[0].local_features;
    snprintf(out->name, sizeof out->name, "%s", name);
    return MT_SUCCESS;
}

static mt_status mti_own_row(mt_context *ctx, const char *function, mt_comm *tp, const char *name,
                             const mt_linear_desc *desc, const mt_linear_tensors *t, mt_param *params,
                             mt_row_parallel_linear *out) {
    mt_linear_desc d;
    MT_TRY(mti_own_begin(ctx, function, tp, &name, desc, &d));
    MT_TRY(mti_own_linear(ctx, function, tp, name, MT_SPLIT_COLS, t, &d, params));
    memset(out, 0, sizeof *out);
    out->desc = d;
    out->weight = &params[0];
    out->bias = d.no_bias ? NULL : &params[1];
    out->tp = tp;
    out->local_features = params[0].local_features;
    snprintf(out->name, sizeof out->name, "%s", name);
    return MT_SUCCESS;
}

static mt_status mti_from_tensors_check(mt_context *ctx, const char *function, const mt_linear_tensors *tensors,
                                        const mt_param *params, const void *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!tensors || !params || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function,
                       !tensors  ? "tensors"
                       : !params ? "params"
                                 : "out");
    if (tensors->db.data && !tensors->b.data) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: db comes without b", function);
    return MT_SUCCESS;
}

MT_API mt_status mt_column_parallel_linear_from_tensors(mt_context *ctx, mt_comm *tp, const char *name,
                                                        const mt_linear_desc *desc, const mt_linear_tensors *tensors,
                                                        mt_param *params, mt_column_parallel_linear *out) {
    static const char *const function = "mt_column_parallel_linear_from_tensors";
    MT_TRY(mti_from_tensors_check(ctx, function, tensors, params, out));
    return mti_own_column(ctx, function, tp, name, desc, tensors, params, out);
}

MT_API mt_status mt_row_parallel_linear_from_tensors(mt_context *ctx, mt_comm *tp, const char *name,
                                                     const mt_linear_desc *desc, const mt_linear_tensors *tensors,
                                                     mt_param *params, mt_row_parallel_linear *out) {
    static const char *const function = "mt_row_parallel_linear_from_tensors";
    MT_TRY(mti_from_tensors_check(ctx, function, tensors, params, out));
    return mti_own_row(ctx, function, tp, name, desc, tensors, params, out);
}

MT_API mt_status mt_column_parallel_forward(mt_context *ctx, mt_comm *tp, mt_tensor x, mt_tensor w, mt_tensor b,
                                            mt_tensor y, const mt_linear_desc *desc, mt_linear_saved *saved) {
    static const char *const function = "mt_column_parallel_forward";
    const mt_linear_tensors t = {w, b, mt_none(), mt_none()};
    mt_column_parallel_linear layer;
    mt_param params[2];
    MT_TRY(mti_own_column(ctx, function, tp, "", desc, &t, params, &layer));
    return mti_column_call_forward(ctx, function, &layer, x, y, saved);
}

MT_API mt_status mt_column_parallel_backward(mt_context *ctx, mt_comm *tp, mt_tensor dy, mt_tensor w, mt_tensor dx,
                                             mt_tensor dw, mt_tensor db, const mt_linear_desc *desc,
                                             const mt_linear_saved *saved) {
    static const char *const function = "mt_column_parallel_backward";
    const mt_linear_tensors t = {w, mt_none(), dw, db};
    mt_column_parallel_linear layer;
    mt_param params[2];
    MT_TRY(mti_own_column(ctx, function, tp, "", desc, &t, params, &layer));
    return mti_column_call_backward(ctx, function, &layer, dy, dx, saved);
}

MT_API mt_status mt_row_parallel_forward(mt_context *ctx, mt_comm *tp, mt_tensor x, mt_tensor w, mt_tensor b,
                                         mt_tensor y, const mt_linear_desc *desc, mt_linear_saved *saved) {
    static const char *const function = "mt_row_parallel_forward";
    const mt_linear_tensors t = {w, b, mt_none(), mt_none()};
    mt_row_parallel_linear layer;
    mt_param params[2];
    MT_TRY(mti_own_row(ctx, function, tp, "", desc, &t, params, &layer));
    return mti_row_call_forward(ctx, function, &layer, x, y, saved);
}

MT_API mt_status mt_row_parallel_backward(mt_context *ctx, mt_comm *tp, mt_tensor dy, mt_tensor w, mt_tensor dx,
                                          mt_tensor dw, mt_tensor db, const mt_linear_desc *desc,
                                          const mt_linear_saved *saved) {
    static const char *const function = "mt_row_parallel_backward";
    const mt_linear_tensors t = {w, mt_none(), dw, db};
    mt_row_parallel_linear layer;
    mt_param params[2];
    MT_TRY(mti_own_row(ctx, function, tp, "", desc, &t, params, &layer));
    return mti_row_call_backward(ctx, function, &layer, dy, dx, saved);
}

MT_API mt_status mt_arena_tensors(mt_context *ctx, const mt_arena_request *list, int count) {
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!list && count > 0) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_arena_tensors: list is NULL");
    for (i = 0; i < count; i++) MT_TRY(mt_arena_tensor(ctx, list[i].dtype, list[i].rows, list[i].cols, list[i].out));
    return MT_SUCCESS;
}

MT_API mt_tensor mt_tensor_reshape(mt_tensor t, int64_t rows, int64_t cols) {
    int64_t elements = mt_size_mul(rows, cols);
    if (elements < 0 || elements != mt_size_mul(t.rows, t.cols) || (t.rows > 1 && mt_tensor_ld(t) != t.cols))
        return mt_tensor_rows(t, 0, -1);
    return mt_tensor_make(t.data, t.dtype, rows, cols);
}

/* ---- >>norm ------------------------------------------------------------------------------------------------------ */

static mt_status mti_norm_desc_check(mt_context *ctx, const char *function, const char *name,
                                     const mt_norm_layer_desc *d) {
    MT_TRY(mt_check_integer(ctx, function, name, "features", d->features, 1, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "groups", d->groups, 0, INT32_MAX));
    MT_TRY(mt_check_enum(ctx, function, name, "kind", (int)d->kind, MT_NORM_WORDS));
    MT_TRY(mt_check_float(ctx, function, name, "eps", d->eps, MT_FLOAT_AT_LEAST_0));
    if (d->groups > 0 && d->sequence_parallel)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: '%s' has groups %lld and sequence_parallel; heads are split, and see all tokens", function,
                       name, (long long)d->groups);
    return MT_SUCCESS;
}

static mt_status mti_norm_params(mt_context *ctx, mt_params *params, const char *name, mt_norm_layer *layer) {
    mt_param_desc p;
    memset(&p, 0, sizeof p);
    p.rows = 1;
    p.cols = layer->desc.features;
    p.init_value = 1.0f;
    p.sequence_partial = layer->desc.sequence_parallel || layer->desc.groups > 0;
    MT_TRY(mti_add_param(ctx, params, name, "weight", p, &layer->weight));
    if (layer->desc.kind == MT_RMS_NORM) return MT_SUCCESS;
    p.init_value = 0.0f;
    return mti_add_param(ctx, params, name, "bias", p, &layer->bias);
}

MT_API mt_status mt_norm_layer_create(mt_context *ctx, mt_params *params, const char *name,
                                      const mt_norm_layer_desc *desc, mt_norm_layer *out) {
    static const char *const function = "mt_norm_layer_create";
    char full[MT_NAME_MAX];
    int shards;
    size_t mark;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    MT_TRY(mt_layer_name(ctx, params, name, full));
    name = full;
    MT_TRY(mti_norm_desc_check(ctx, function, name, desc));
    mark = mt_params_mark(params);
    shards = mti_shards(ctx, params->grid->tp);
    memset(out, 0, sizeof *out);
    out->desc = *desc;
    out->desc.eps = mt_or_default(desc->eps, 1e-5f);
    out->tp = params->grid->tp;
    out->local_groups = shards * mti_shard_features(desc->groups, 1, 1, shards * params->grid->tp_size);
    return mt_create_end(params, mark, out, sizeof *out, mti_norm_params(ctx, params, name, out));
}

/* The checks that forward and backward share. `in` is x or dy, `out` is y or dx. */
static mt_status mti_norm_layer_check(mt_context *ctx, const char *function, const mt_norm_layer *layer,
                                      const char *in_name, mt_tensor in, const char *out_name, mt_tensor out) {
    int64_t n, groups;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_check_params(ctx, function, layer ? layer->weight : NULL, layer ? layer->bias : NULL));
    n = layer->desc.features;
    groups = layer->local_groups;
    if (groups > 0 && (in.cols < n || in.cols % n != 0 || in.rows % groups != 0))
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: %s is [%lld, %lld], must have rows for %lld groups and whole heads of %lld features",
                       function, in_name, (long long)in.rows, (long long)in.cols, (long long)groups, (long long)n);
    MT_TRY(mt_check_activation(ctx, function, layer->weight, in_name, in, in.rows, groups > 0 ? in.cols : n));
    return mt_check_activation(ctx, function, layer->weight, out_name, out, in.rows, in.cols);
}

MT_API mt_status mt_norm_layer_forward(mt_context *ctx, const mt_norm_layer *layer, mt_tensor x, mt_tensor y,
                                       mt_norm_saved *saved) {
    mt_tensor stats = mt_none(), part = mt_none();
    int64_t head, heads, n;
    MT_TRY(mti_norm_layer_check(ctx, "mt_norm_layer_forward", layer, "x", x, "y", y));
    n = layer->desc.features;
    heads = x.cols / n;
    if (saved) MT_TRY(mt_arena_tensor(ctx, MT_F32, x.rows * heads, 2, &stats));
    for (head = 0; head < heads; head++) {
        if (saved) part = mt_tensor_rows(stats, head * x.rows, x.rows);
        MT_TRY(mt_norm_forward(ctx, layer->desc.kind, mt_tensor_cols(x, head * n, n), layer->weight->value,
                               layer->bias ? layer->bias->value : mt_none(), layer->desc.eps,
                               mt_tensor_cols(y, head * n, n), part));
    }
    if (!saved) return MT_SUCCESS;
    saved->x = x;
    saved->stats = stats;
    if (layer->desc.groups > 0) return MT_SUCCESS;
    return mt_hash_log_activation(ctx, layer->weight->name, 1, "output", y, layer->desc.sequence_parallel, NULL);
}

/* The arguments of a norm's backward. */
typedef struct mti_norm_call {
    const mt_norm_layer *layer;
    mt_tensor x, stats, dy, dresidual, dx;
} mti_norm_call;

/* Returns the view of `rows` rows of t, every step-th from row `first` on, and of `cols` columns from column `col`
   on. */
static mt_tensor mti_norm_view(mt_tensor t, int64_t first, int64_t step, int64_t rows, int64_t col, int64_t cols) {
    int64_t ld = mt_tensor_ld(t) * step;
    if (!t.data) return t;
    t = mt_tensor_cols(mt_tensor_rows(t, first, rows > 0), col, cols);
    t.rows = rows;
    t.ld = ld;
    return t;
}

/* Calls the backward for each head of some rows; first, step and rows are those of mti_norm_view. */
static mt_status mti_norm_heads(mt_context *ctx, const mti_norm_call *c, int64_t first, int64_t step, int64_t rows,
                                mt_tensor dgain, mt_tensor dbias) {
    int64_t n = c->layer->desc.features, heads = c->x.cols / n, h;
    for (h = 0; h < heads; h++)
        MT_TRY(mt_norm_backward(
            ctx, c->layer->desc.kind, mti_norm_view(c->x, first, step, rows, h * n, n), c->layer->weight->value,
            mti_norm_view(c->stats, h * c->x.rows + first, step, rows, 0, 2),
            mti_norm_view(c->dy, first, step, rows, h * n, n), mti_norm_view(c->dresidual, first, step, rows, h * n, n),
            mti_norm_view(c->dx, first, step, rows, h * n, n), dgain, dbias));
    return MT_SUCCESS;
}

/* The mt_token_operator of a norm over whole tokens. */
static mt_status mti_norm_tokens(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor dgain,
                                 mt_tensor dbias) {
    return mti_norm_heads(ctx, (const mti_norm_call *)arg, first, 1, count, dgain, dbias);
}

/* The mt_token_operator of a norm per head. It is called for virtual shard `shard` instead of tokens, and takes the
   shard's groups one after the other. */
static mt_status mti_norm_shard(mt_context *ctx, const void *arg, int64_t shard, int64_t one, mt_tensor dgain,
                                mt_tensor dbias) {
    const mti_norm_call *c = (const mti_norm_call *)arg;
    int64_t groups = c->layer->local_groups, each = groups / mti_shards(ctx, c->layer->tp), i;
    (void)one;
    for (i = 0; i < each; i++)
        MT_TRY(mti_norm_heads(ctx, c, shard * each + i, groups, c->x.rows / groups, dgain, dbias));
    return MT_SUCCESS;
}

/* Computes the backward of a norm per head. In invariant mode the gradients of gain and bias are sums over the virtual
   shards of the heads. */
static mt_status mti_norm_groups(mt_context *ctx, const mti_norm_call *c, mt_tensor dgain, mt_tensor dbias) {
    if (!mt_context_invariant(ctx)) return mti_norm_heads(ctx, c, 0, 1, c->x.rows, dgain, dbias);
    return mti_sum_over_shards(ctx, mti_norm_shard, c, 1, mti_shards(ctx, c->layer->tp), dgain, dbias);
}

MT_API mt_status mt_norm_layer_backward(mt_context *ctx, const mt_norm_layer *layer, mt_tensor dy, mt_tensor dresidual,
                                        mt_tensor dx, const mt_norm_saved *saved) {
    static const char *const function = "mt_norm_layer_backward";
    mti_norm_call call;
    mt_tensor dbias;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_norm_layer_check(ctx, function, layer, "dy", dy, "dx", dx));
    MT_TRY(mt_check_activation(ctx, function, layer->weight, "saved.x", saved->x, dy.rows, dy.cols));
    MT_TRY(mt_tensor_check(ctx, function, "saved.stats", saved->stats, MT_ARG_F32,
                           dy.rows * (dy.cols / layer->desc.features), 2));
    if (dresidual.data)
        MT_TRY(mt_check_activation(ctx, function, layer->weight, "dresidual", dresidual, dy.rows, dy.cols));
    MT_TRY(mt_check_gradient(ctx, function, layer->weight));
    MT_TRY(mt_check_gradient(ctx, function, layer->bias));
    if (layer->desc.groups == 0)
        MT_TRY(mt_check_tokens(ctx, function, mt_sequence_tokens(layer->tp, layer->desc.sequence_parallel, dy.rows)));
    call.layer = layer;
    call.x = saved->x;
    call.stats = saved->stats;
    call.dy = dy;
    call.dresidual = dresidual;
    call.dx = dx;
    dbias = layer->bias ? layer->bias->grad : mt_none();
    mti_gradient_added(layer->weight);
    if (layer->desc.groups > 0) return mti_norm_groups(ctx, &call, layer->weight->grad, dbias);
    MT_TRY(mt_sum_over_tokens(ctx, layer->tp, layer->desc.sequence_parallel, mti_norm_tokens, &call, dy.rows,
                              layer->weight->grad, dbias));
    return mt_hash_log_activation(ctx, layer->weight->name, 1, "input_grad", dx, layer->desc.sequence_parallel, NULL);
}

/* ---- >>vocab ----------------------------------------------------------------------------------------------------- */

MT_API mt_status mt_vocab_parallel_embedding_create(mt_context *ctx, mt_params *params, const char *name,
                                                    const mt_embedding_desc *desc, mt_vocab_parallel_embedding *out) {
    static const char *const function = "mt_vocab_parallel_embedding_create";
    char full[MT_NAME_MAX];
    mt_param_desc w;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    MT_TRY(mt_layer_name(ctx, params, name, full));
    MT_TRY(mt_check_integer(ctx, function, full, "vocab", desc->vocab, 1, INT32_MAX));
    MT_TRY(mt_check_integer(ctx, function, full, "features", desc->features, 1, INT64_MAX));
    MT_TRY(mt_check_float(ctx, function, full, "init_std", mt_or_default(desc->init_std, 1), MT_FLOAT_AT_LEAST_0));
    if (desc->padded_vocab)
        MT_TRY(mt_check_integer(ctx, function, full, "padded_vocab", desc->padded_vocab, desc->vocab, INT32_MAX));
    memset(out, 0, sizeof *out);
    memset(&w, 0, sizeof w);
    w.rows = desc->vocab;
    w.cols = desc->features;
    w.placement = MT_SPLIT_ROWS;
    w.padded_features = desc->padded_vocab;
    w.init_std = mt_or_default(desc->init_std, 0.02f);
    w.weight_decay = 1;
    w.shared_embedding = desc->shared;
    MT_TRY(mti_add_param(ctx, params, full, "weight", w, &out->weight));
    out->desc = *desc;
    out->tp = params->grid->tp;
    out->first_row = params->grid->tp_rank * out->weight->value.rows;
    return MT_SUCCESS;
}

/* The checks that forward and backward share. y is y or dy, and `what` is its name. */
static mt_status mti_embedding_check(mt_context *ctx, const char *function, const mt_vocab_parallel_embedding *layer,
                                     const int32_t *ids, int64_t tokens, const char *what, mt_tensor y) {
    int64_t rows = 0;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mt_check_param(ctx, function, layer ? layer->weight : NULL));
    MT_TRY(mt_sequence_rows(ctx, function, layer->tp, layer->desc.sequence_parallel, tokens, &rows));
    MT_TRY(mt_check_activation(ctx, function, layer->weight, what, y, rows, layer->desc.features));
    return mti_ids_are_trusted(ctx) ? MT_SUCCESS : mt_ids_check(ctx, "token id", ids, tokens, layer->desc.vocab, 0);
}

/* Writes the rows of the table that this rank has, and 0 for the others. One rank has the row and all others have 0, so
   the sum over ranks is exact in any order. The sum turns -0 into 0, because 0 + -0 is 0. In invariant mode a single
   rank must have the same bits, so it also adds the row to 0. */
static mt_status mti_embedding_lookup(mt_context *ctx, const mt_vocab_parallel_embedding *layer, const int32_t *ids,
                                      mt_tensor y) {
    if (mt_context_invariant(ctx)) MT_TRY(mt_fill(ctx, y, 0.0f));
    return mt_embedding_forward(ctx, layer->weight->value, layer->first_row, ids,
                                mt_context_invariant(ctx) ? 1.0f : 0.0f, y);
}

MT_API mt_status mt_vocab_parallel_embedding_forward(mt_context *ctx, const mt_vocab_parallel_embedding *layer,
                                                     const int32_t *ids, int64_t tokens, mt_tensor y) {
    size_t mark;
    mt_tensor partial;
    mt_status status;
    MT_TRY(mti_embedding_check(ctx, "mt_vocab_parallel_embedding_forward", layer, ids, tokens, "y", y));
    MT_TRY(mt_check_sent(ctx, "mt_vocab_parallel_embedding_forward", layer->tp, 0, "", y, "y", y));
    mark = mt_arena_mark(ctx);
    status = mti_partial_tokens(ctx, layer->tp, layer->desc.sequence_parallel, y, &partial);
    if (status == MT_SUCCESS) status = mti_embedding_lookup(ctx, layer, ids, partial);
    if (status == MT_SUCCESS) status = mti_reduce_tokens(ctx, layer->tp, layer->desc.sequence_parallel, 0, partial, y);
    mt_arena_release(ctx, mark);
    return status;
}

MT_API mt_status mt_vocab_parallel_embedding_backward(mt_context *ctx, const mt_vocab_parallel_embedding *layer,
                                                      const int32_t *ids, int64_t tokens, mt_tensor dy) {
    size_t mark;
    mt_tensor all;
    mt_status status;
    MT_TRY(mti_embedding_check(ctx, "mt_vocab_parallel_embedding_backward", layer, ids, tokens, "dy", dy));
    MT_TRY(mt_check_sent(ctx, "mt_vocab_parallel_embedding_backward", layer->tp, layer->desc.sequence_parallel, "dy",
                         dy, "", mt_none()));
    MT_TRY(mt_check_gradient(ctx, "mt_vocab_parallel_embedding_backward", layer->weight));
    mark = mt_arena_mark(ctx);
    status = mt_gather_tokens(ctx, layer->tp, layer->desc.sequence_parallel, dy, &all);
    if (status == MT_SUCCESS) mti_gradient_added(layer->weight);
    if (status == MT_SUCCESS)
        status =
            mt_embedding_backward(ctx, all, layer->first_row, ids,
                                  layer->weight->lookup_grad.data ? layer->weight->lookup_grad : layer->weight->grad);
    mt_arena_release(ctx, mark);
    return status;
}

/* Returns the desc of virtual shard `shard` of this rank. */
static mt_cross_entropy_shard_desc mti_cross_entropy_shard(mt_comm *tp, const mt_cross_entropy_desc *desc,
                                                           int64_t shard_cols, int shard, int shards) {
    mt_cross_entropy_shard_desc part;
    memset(&part, 0, sizeof part);
    part.vocab = desc->vocab;
    part.first_col = ((int64_t)mt_comm_rank(tp) * shards + shard) * shard_cols;
    part.label_smoothing = desc->label_smoothing;
    part.ignore_index = desc->ignore_index;
    return part;
}

/* The checks that forward and backward share. */
static mt_status mti_cross_entropy_check(mt_context *ctx, const char *function, mt_comm *tp,
                                         const mt_cross_entropy_desc *desc, mt_tensor logits) {
    int shards;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!tp || !desc) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, tp ? "desc" : "tp");
    MT_TRY(mt_check_integer(ctx, function, NULL, "vocab", desc->vocab, 1, INT32_MAX));
    MT_TRY(mt_check_float(ctx, function, NULL, "label_smoothing", desc->label_smoothing, MT_FLOAT_PROBABILITY));
    if (desc->padded_vocab)
        MT_TRY(mt_check_integer(ctx, function, NULL, "padded_vocab", desc->padded_vocab, desc->vocab, INT32_MAX));
    MT_TRY(mti_expect_shards(ctx, function, tp));
    shards = mti_shards(ctx, tp);
    MT_TRY(mt_tensor_check(
        ctx, function, "logits", logits, MT_ARG_FLOAT, logits.rows,
        shards * mti_shard_features(mti_padded(desc->vocab, desc->padded_vocab), 1, 1, shards * mt_comm_size(tp))));
    if (mt_size_mul(logits.rows, 32 * (int64_t)shards * mt_comm_size(tp)) >= 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %lld tokens of %lld shards have more scalars than can be counted",
                   function, (long long)logits.rows, (long long)shards * mt_comm_size(tp));
}

/* Computes loss and lse. One all-gather has four scalars for each token and shard. Megatron-LM uses three all-reduces:
   maximum, target, sum. */
static mt_status mti_cross_entropy_forward(mt_context *ctx, mt_comm *tp, const mt_cross_entropy_desc *desc,
                                           mt_tensor logits, const int32_t *targets, mt_tensor loss, mt_tensor lse) {
    int s, shards = mti_shards(ctx, tp), all_shards = shards * mt_comm_size(tp);
    int64_t rows = logits.rows, cols = logits.cols / shards;
    mt_cross_entropy_shard_desc part;
    mt_tensor all, own;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, rows * all_shards, 4, &all));
    own = mt_tensor_rows(all, mt_comm_rank(tp) * shards * rows, shards * rows);
    for (s = 0; s < shards; s++) {
        part = mti_cross_entropy_shard(tp, desc, cols, s, shards);
        MT_TRY(mt_cross_entropy_stats(ctx, &part, mt_shard_cols(logits, s, shards), targets,
                                      mt_tensor_rows(own, s * rows, rows)));
    }
    MT_TRY(mt_all_gather(ctx, tp, own.data, all.data, (size_t)(shards * rows) * 4, MT_F32));
    return mt_cross_entropy_combine(ctx, &part, all, all_shards, targets, loss, lse);
}

/* Checks the arguments of forward. */
static mt_status mti_cross_entropy_expect(mt_context *ctx, const char *function, mt_comm *tp,
                                          const mt_cross_entropy_desc *desc, mt_tensor logits, const int32_t *targets,
                                          mt_tensor loss) {
    MT_TRY(mti_cross_entropy_check(ctx, function, tp, desc, logits));
    MT_TRY(mt_tensor_check(ctx, function, "loss", loss, MT_ARG_F32, 1, logits.rows));
    if (mti_ids_are_trusted(ctx)) return MT_SUCCESS;
    return mt_ids_check(ctx, "target", targets, logits.rows, desc->vocab, mt_ignore_index(desc->ignore_index));
}

MT_API mt_status mt_vocab_parallel_cross_entropy_forward(mt_context *ctx, mt_comm *tp,
                                                         const mt_cross_entropy_desc *desc, mt_tensor logits,
                                                         const int32_t *targets, mt_tensor loss,
                                                         mt_cross_entropy_saved *saved) {
    static const char *const function = "mt_vocab_parallel_cross_entropy_forward";
    mt_tensor lse;
    size_t keep, mark;
    mt_status status;
    MT_TRY(mti_cross_entropy_expect(ctx, function, tp, desc, logits, targets, loss));
    keep = mt_arena_mark(ctx);
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 2, logits.rows, &lse));
    mark = mt_arena_mark(ctx);
    status = mti_cross_entropy_forward(ctx, tp, desc, logits, targets, loss, lse);
    mt_arena_release(ctx, saved && status == MT_SUCCESS ? mark : keep);
    if (status != MT_SUCCESS || !saved) return status;
    saved->logits = logits;
    saved->lse = lse;
    saved->targets = targets;
    return MT_SUCCESS;
}

/* Overwrites the logits with their gradient, one virtual shard after the other. */
static mt_status mti_cross_entropy_backward(mt_context *ctx, mt_comm *tp, const mt_cross_entropy_desc *desc,
                                            mt_tensor logits, const int32_t *targets, mt_tensor lse, mt_tensor dloss,
                                            float scale) {
    int s, shards = mti_shards(ctx, tp);
    for (s = 0; s < shards; s++) {
        mt_cross_entropy_shard_desc part = mti_cross_entropy_shard(tp, desc, logits.cols / shards, s, shards);
        MT_TRY(mt_cross_entropy_backward(ctx, &part, mt_shard_cols(logits, s, shards), targets, lse, dloss, scale));
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_vocab_parallel_cross_entropy_backward(mt_context *ctx, mt_comm *tp,
                                                          const mt_cross_entropy_desc *desc, mt_tensor dloss,
                                                          float scale, const mt_cross_entropy_saved *saved) {
    static const char *const function = "mt_vocab_parallel_cross_entropy_backward";
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_cross_entropy_check(ctx, function, tp, desc, saved->logits));
    return mti_cross_entropy_backward(ctx, tp, desc, saved->logits, saved->targets, saved->lse, dloss, scale);
}

MT_API mt_status mt_vocab_parallel_cross_entropy_forward_backward(mt_context *ctx, mt_comm *tp,
                                                                  const mt_cross_entropy_desc *desc, mt_tensor logits,
                                                                  const int32_t *targets, mt_tensor dloss, float scale,
                                                                  mt_tensor loss) {
    static const char *const function = "mt_vocab_parallel_cross_entropy_forward_backward";
    mt_tensor lse;
    size_t mark;
    mt_status status;
    MT_TRY(mti_cross_entropy_expect(ctx, function, tp, desc, logits, targets, loss));
    if (dloss.data)
        MT_TRY(mt_tensor_check(ctx, function, "dloss", dloss, MT_ARG_F32, 1, dloss.cols == 1 ? 1 : logits.rows));
    if (mt_comm_size(tp) == 1 && !mt_context_invariant(ctx)) {
        mt_cross_entropy_shard_desc whole = mti_cross_entropy_shard(tp, desc, logits.cols, 0, 1);
        return mt_cross_entropy_forward_backward(ctx, &whole, logits, targets, dloss, scale, loss);
    }
    mark = mt_arena_mark(ctx);
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 2, logits.rows, &lse));
    status = mti_cross_entropy_forward(ctx, tp, desc, logits, targets, loss, lse);
    if (status == MT_SUCCESS) status = mti_cross_entropy_backward(ctx, tp, desc, logits, targets, lse, dloss, scale);
    mt_arena_release(ctx, mark);
    return status;
}

/* ---- >>sample ---------------------------------------------------------------------------------------------------- */

static mt_status mti_sample_check(mt_context *ctx, const char *function, mt_comm *tp, int64_t vocab,
                                  int64_t padded_vocab, const mt_sample_desc *desc, mt_tensor logits) {
    int64_t shards;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!tp || !desc) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, tp ? "desc" : "tp");
    MT_TRY(mt_check_integer(ctx, function, NULL, "vocab", vocab, 1, INT32_MAX));
    if (padded_vocab) MT_TRY(mt_check_integer(ctx, function, NULL, "padded_vocab", padded_vocab, vocab, INT32_MAX));
    MT_TRY(mti_expect_shards(ctx, function, tp));
    shards = mti_shards(ctx, tp);
    return mt_tensor_check(
        ctx, function, "logits", logits, MT_ARG_FLOAT, logits.rows,
        shards * mti_shard_features(mti_padded(vocab, padded_vocab), 1, 1, (int)shards * mt_comm_size(tp)));
}

/* The columns of a rank have consecutive ids, also in invariant mode: the padding of its virtual shards is at the end
   of the vocabulary. So a rank is one shard. Ids are sent as they are, so the type of the all-gather is MT_I32. */
static mt_status mti_sample(mt_context *ctx, mt_comm *tp, int64_t vocab, const mt_sample_desc *desc, mt_tensor logits,
                            int32_t *ids) {
    int64_t rows = logits.rows, k = mt_sample_count(desc, logits.cols);
    mt_tensor all, own;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, mt_size_mul(rows, mt_comm_size(tp)), 2 * k, &all));
    own = mt_tensor_rows(all, mt_comm_rank(tp) * rows, rows);
    MT_TRY(mt_sample_candidates(ctx, desc, vocab, mt_comm_rank(tp) * logits.cols, logits, own));
    MT_TRY(mt_all_gather(ctx, tp, own.data, all.data, (size_t)(rows * 2 * k), MT_I32));
    MT_TRY(mt_sample_ids(ctx, desc, vocab, all, mt_comm_size(tp), ids));
    return mt_ids_check(ctx, "sampled id", ids, rows, vocab, 0);
}

MT_API mt_status mt_vocab_parallel_sample(mt_context *ctx, mt_comm *tp, int64_t vocab, int64_t padded_vocab,
                                          const mt_sample_desc *desc, mt_tensor logits, int32_t *ids) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_sample_check(ctx, "mt_vocab_parallel_sample", tp, vocab, padded_vocab, desc, logits));
    mark = mt_arena_mark(ctx);
    status = mti_sample(ctx, tp, vocab, desc, logits, ids);
    mt_arena_release(ctx, mark);
    return status;
}

/* ---- >>buckets --------------------------------------------------------------------------------------------------- */

/* Returns 1 when a data rank has only the sums of its share. In invariant mode every rank has all sums, because the
   norm is added up parameter by parameter. */
static int mti_is_scattered(const mt_params *params) {
    return params->buckets.ranks > 1 && !mt_context_invariant(params->ctx);
}

/* Sums the bucket [lo, hi) over the data group, with an all-reduce or a reduce-scatter. */
static mt_status mti_bucket_reduce(mt_context *ctx, const mt_params *params, int64_t lo, int64_t hi) {
    mt_comm *data = params->grid->dp;
    int64_t share = (hi - lo) / params->buckets.ranks, first = share * params->grid->dp_rank;
    float *grads;
    void *run;
    if (params->grid->dp_size == 1) return MT_SUCCESS;
    MT_TRY(mti_places_open(ctx, params, MTI_IN_GRADS, lo, hi, lo, hi, &run));
    grads = (float *)run;
    if (mti_is_scattered(params)) {
        MT_TRY(mt_reduce_scatter(ctx, data, grads, grads + first, (size_t)share, MT_F32, MT_SUM));
        return mti_places_close(ctx, params, MTI_IN_GRADS, run, lo, lo + first, lo + first + share);
    }
    MT_TRY(mt_all_reduce(ctx, data, grads, grads, (size_t)(hi - lo), MT_F32, MT_SUM));
    return mti_places_close(ctx, params, MTI_IN_GRADS, run, lo, lo, hi);
}

/* Starts the sums of all buckets that begin at `from` or later and were not started yet. */
static mt_status mti_buckets_send(mt_context *ctx, mt_params *params, int64_t from) {
    mti_buckets *b = &params->buckets;
    while (b->sent > 0 && mti_bucket_low(params, b->sent) >= from) {
        int64_t hi = b->sent;
        b->sent = mti_bucket_low(params, hi);
        MT_TRY(mti_overlap_begin(ctx, params->grid->dp, MT_OVERLAP_GRADIENTS));
        mt_check_pause(ctx);
        MT_TRY(mt_overlap_end(ctx, MT_OVERLAP_TICKET_THIRD,
                              mt_check_resume(ctx, mti_bucket_reduce(ctx, params, b->sent, hi))));
    }
    return MT_SUCCESS;
}

/* All-gathers the ranks' shares of every bucket of the gradients or the values. */
static mt_status mti_buckets_gather(mt_context *ctx, const mt_params *params, int kind) {
    mt_dtype dtype = kind == MTI_IN_VALUES ? params->dtype : MT_F32;
    int64_t hi, lo, share, first, size = (int64_t)mt_dtype_size(dtype);
    for (hi = params->elements; hi > 0; hi = lo) {
        void *run;
        lo = mti_bucket_low(params, hi);
        share = (hi - lo) / params->buckets.ranks;
        first = share * params->grid->dp_rank;
        MT_TRY(mti_places_open(ctx, params, kind, lo, hi, lo + first, lo + first + share, &run));
        MT_TRY(mt_all_gather(ctx, params->grid->dp, (char *)run + first * size, run, (size_t)share, dtype));
        MT_TRY(mti_places_close(ctx, params, kind, run, lo, lo, hi));
    }
    return MT_SUCCESS;
}

/* A stretch [at, at + count) of the registry's memory that is in this rank's share. Its optimizer state begins at
   element `state` of m, v and the masters. */
typedef struct mti_stretch {
    int64_t at, count, state;
} mti_stretch;

/* Returns the first stretch of [at, end) that is in this rank's share. count is 0 when there is none. */
static mti_stretch mti_share_next(const mt_params *params, int64_t at, int64_t end) {
    const mti_buckets *b = &params->buckets;
    mti_stretch s = {0, 0, 0};
    while (at < end && s.count <= 0) {
        int64_t hi =
            b->ranks > 1 ? params->elements - (params->elements - 1 - at) / b->size * b->size : params->elements;
        int64_t lo = b->ranks > 1 ? mti_bucket_low(params, hi) : 0, share = (hi - lo) / b->ranks;
        int64_t first = lo + (b->ranks > 1 ? share * params->grid->dp_rank : 0);
        s.at = mt_max(at, first);
        s.count = mt_min(end, first + share) - s.at;
        s.state = lo / b->ranks + s.at - first;
        at = hi;
    }
    if (s.count < 0) s.count = 0;
    return s;
}

static mti_stretch mti_share_after(const mt_params *params, mti_stretch s, int64_t end) {
    return mti_share_next(params, s.at + s.count, end);
}

static int64_t mti_param_place(const mt_param *p) { return mti_home_of(p)->place; }

static mti_stretch mti_param_share(const mt_param *p) {
    int64_t at = mti_param_place(p);
    return mti_share_next(p->registry, at, at + p->grad.rows * p->grad.cols);
}

/* ---- >>sync ------------------------------------------------------------------------------------------------------ */

/* What mti_gradient_level does with the gradients and the finished subtree of a level, which is the sum of the
   gradients of 2^level micro-batches. */
typedef enum mti_level_use { MTI_LEVEL_ADD, MTI_LEVEL_KEEP, MTI_LEVEL_TAKE } mti_level_use;

static mt_status mti_gradient_level(mt_context *ctx, const mt_params *params, int level, mti_level_use use) {
    int i;
    for (i = -1; i < params->count; i++) {
        int64_t at;
        mt_tensor grads = mti_memory(params, MTI_IN_GRADS, i, &at), sums = grads;
        if (!grads.data) continue;
        sums.data = params->subtrees + level * params->gradients + at;
        MT_TRY(use == MTI_LEVEL_ADD    ? mt_add(ctx, sums, grads, grads)
               : use == MTI_LEVEL_KEEP ? mt_copy(ctx, grads, sums)
                                       : mt_copy(ctx, sums, grads));
    }
    return MT_SUCCESS;
}

/* Sums the gradients of sequence_partial parameters over the tensor group. Buckets that are under way may be using the
   room. */
static mt_status mti_sync_partial(mt_context *ctx, mt_params *params) {
    size_t n = (size_t)params->partial;
    void *run;
    if (params->partial == 0 || params->grid->tp_size == 1) return MT_SUCCESS;
    if (params->room) MT_TRY(mt_overlap_wait(ctx, MT_OVERLAP_TICKET_THIRD));
    MT_TRY(mti_places_open(ctx, params, MTI_IN_GRADS, 0, params->partial, 0, params->partial, &run));
    MT_TRY(mt_all_reduce(ctx, params->grid->tp, run, run, n, MT_F32, MT_SUM));
    return mti_places_close(ctx, params, MTI_IN_GRADS, run, 0, 0, params->partial);
}

/* Returns the sums of the copied features of a unit, in sums [virtual shards, units * features of all columns]. */
static mt_tensor mti_copied_sums(const mt_param *p, mt_tensor sums, mti_block b) {
    int64_t n = p->grad.rows * p->grad.cols / p->local_features * p->desc.copied;
    return mt_tensor_cols(mt_tensor_rows(sums, b.shard, 1), b.global / p->desc.unit * n, n);
}

/* Adds this rank's copies of p's gradient to the sums of their units, or copies the sums of shard 0 to them. */
static mt_status mti_copied_pass(mt_context *ctx, const mt_param *p, mt_tensor sums, int add) {
    int64_t i;
    for (i = 1; i < mti_param_blocks(p); i += 2) {
        mti_block b = mti_param_block(p, p->tp_rank, i);
        mt_tensor grad = mti_param_block_view(p, p->grad, b), sum;
        if (b.count == 0) continue;
        if (!add) b.shard = 0;
        sum = mti_copied_sums(p, sums, b);
        grad = mt_tensor_f32((const float *)grad.data, 1, sum.cols);
        MT_TRY(add ? mt_add(ctx, sum, grad, sum) : mt_copy(ctx, sum, grad));
    }
    return MT_SUCCESS;
}

/* Sums the gradients of the copies of p: over the copies of a virtual shard, over the virtual shards of this rank, and
   over the tensor group. */
static mt_status mti_sync_copied(mt_context *ctx, const mt_param *p) {
    int64_t units = mti_split_dimension(p) / p->desc.unit;
    int64_t n = p->grad.rows * p->grad.cols / p->local_features * p->desc.copied * units;
    mt_tensor sums;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, p->shards, n, &sums));
    MT_TRY(mt_fill(ctx, sums, 0.0f));
    MT_TRY(mti_copied_pass(ctx, p, sums, 1));
    MT_TRY(mt_tree_sum(ctx, sums));
    MT_TRY(mt_all_reduce(ctx, p->registry->grid->tp, sums.data, sums.data, (size_t)n, MT_F32, MT_SUM));
    return mti_copied_pass(ctx, p, sums, 0);
}

static mt_status mti_sync_copies(mt_context *ctx, mt_params *params) {
    int i;
    for (i = 0; i < params->count; i++) {
        size_t mark = mt_arena_mark(ctx);
        if (params->list[i]->desc.copies > 1) MT_TRY(mti_sync_copied(ctx, params->list[i]));
        mt_arena_release(ctx, mark);
    }
    return MT_SUCCESS;
}

/* Sums over the tensor group what each rank has computed only a part of. */
static mt_status mti_sync_tensor_ranks(mt_context *ctx, mt_params *params) {
    MT_TRY(mti_sync_partial(ctx, params));
    return mti_sync_copies(ctx, params);
}

/* The finished subtrees form a binary counter: micro-batch n (from 0) joins as many subtrees as n has trailing one
   bits, so at most log2(n) subtrees are kept. All sums over micro-batches use this function, as sums over virtual
   shards use mti_shard_tree. Sets the gradients to zero for the next micro-batch. */
static mt_status mti_accumulate_gradients(mt_context *ctx, mt_params *params) {
    int64_t n = params->micro_batches, level;
    MT_TRY(mti_sync_tensor_ranks(ctx, params));
    for (level = 0; n >> level & 1; level++) MT_TRY(mti_gradient_level(ctx, params, (int)level, MTI_LEVEL_ADD));
    params->micro_batches++;
    if (level == params->levels) return MT_SUCCESS; /* this rank can have no more micro-batches */
    MT_TRY(mti_gradient_level(ctx, params, (int)level, MTI_LEVEL_KEEP));
    return mti_gradients_zero(ctx, params);
}

MT_API mt_status mt_accumulate_gradients(mt_context *ctx, mt_params *params) {
    static const char *const function = "mt_accumulate_gradients";
    mt_status status;
    MT_TRY(mti_params_ready(ctx, params, function));
    if (!mt_context_invariant(ctx)) return MT_SUCCESS;
    if (params->micro_batches >= (int64_t)1 << params->levels)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: more than %lld micro-batches on each of %d data ranks; mt_context_desc.invariant_data is "
                       "%d",
                       function, (long long)params->micro_batches, params->grid->dp_size,
                       mt_context_invariant_data(ctx));
    MT_TRY(mti_gradients_open(ctx, function, params->list[0]));
    mt_check_pause(ctx);
    status = mt_check_resume(ctx, mti_accumulate_gradients(ctx, params));
    mti_gradients_set(params, status == MT_SUCCESS ? MTI_GRADIENTS_ZEROED : MTI_GRADIENTS_UNDEFINED);
    return status;
}

/* Makes the gradients the sums over this rank's micro-batches. */
static mt_status mti_join_micro_batches(mt_context *ctx, mt_params *params) {
    int64_t n = params->micro_batches;
    int level = 0;
    if (n == 0) return mti_sync_tensor_ranks(ctx, params); /* mt_accumulate_gradients was not called */
    while ((int64_t)1 << level < n) level++;
    params->micro_batches = 0;
    if (level == params->levels) return MT_SUCCESS;
    return mti_gradient_level(ctx, params, level, MTI_LEVEL_TAKE);
}

MT_API mt_status mt_sync_gradients_begin(mt_context *ctx, mt_params *params) {
    mti_buckets *b;
    int i;
    MT_TRY(mti_params_ready(ctx, params, "mt_sync_gradients_begin"));
    b = &params->buckets;
    if (b->begun)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "mt_sync_gradients_begin: was called already, and mt_sync_gradients not since");
    MT_TRY(mti_gradients_open(ctx, "mt_sync_gradients_begin", params->list[0]));
    if (mt_context_invariant(ctx)) return MT_SUCCESS;
    for (i = 0; i < params->count; i++) params->list[i]->final = 0;
    b->begun = 1;
    b->waits_for = params->count;
    b->final = b->sent = params->elements;
    return MT_SUCCESS;
}

/* Moves `final` from the end of the memory to the last parameter whose gradient is not final. */
static void mti_buckets_advance(mt_params *params) {
    mti_buckets *b = &params->buckets;
    while (b->waits_for > 0) {
        const mt_param *p = params->list[b->waits_for - 1];
        int early = mti_param_place(p) >= b->early;
        if (early && !p->final) return;
        if (early) b->final = mti_param_place(p);
        b->waits_for--;
    }
}

MT_API mt_status mt_gradients_final(mt_context *ctx, const mt_param *first, const mt_param *last) {
    static const char *const function = "mt_gradients_final";
    mt_params *params;
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!first || !last || !first->registry || first->registry != last->registry || first->index > last->index)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' to '%s' are not parameters of one registry, in its order",
                       function, first ? first->name : "(NULL)", last ? last->name : "(NULL)");
    params = first->registry;
    MT_TRY(mti_params_ready(ctx, params, function));
    if (!params->buckets.begun) return MT_SUCCESS;
    for (i = first->index; i <= last->index; i++) {
        if (params->list[i]->final)
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "%s: the gradient of '%s' was final already: mt_sync_gradients_begin comes "
                           "before the last backward of a step",
                           function, params->list[i]->name);
        params->list[i]->final = 1;
    }
    mti_buckets_advance(params);
    return mti_buckets_send(ctx, params, params->buckets.final);
}

/* Adds the gradients of the head and of the lookup of a shared embedding, on one stage or on two. */
static mt_status mti_sync_embeddings(mt_context *ctx, mt_params *params) {
    mt_comm *embedding = params->grid->embedding;
    int i;
    for (i = 0; embedding && i < params->count; i++) {
        mt_tensor grad = params->list[i]->grad, lookup = params->list[i]->lookup_grad;
        if (!params->list[i]->desc.shared_embedding) continue;
        if (lookup.data) MT_TRY(mt_add(ctx, lookup, grad, grad));
        MT_TRY(mt_all_reduce(ctx, embedding, grad.data, grad.data, (size_t)(grad.rows * grad.cols), MT_F32, MT_SUM));
    }
    return MT_SUCCESS;
}

/* In invariant mode, adds the two parts of a shared embedding's gradient, the head's and the lookup's. Each part has
   been summed over all micro-batches before, including those of other data ranks, so that the bits do not depend on the
   number of data ranks. */
static mt_status mti_sync_lookups(mt_context *ctx, mt_params *params) {
    float *all = params->lookups;
    size_t lookups = (size_t)(params->gradients - params->elements);
    if (lookups > 0) MT_TRY(mt_all_reduce(ctx, params->grid->dp, all, all, lookups, MT_F32, MT_SUM));
    return mti_sync_embeddings(ctx, params);
}

/* In check mode, refuses to sum a gradient over a group on which it is a sum already. */
static mt_status mti_sums_check(mt_context *ctx, const char *function, mt_params *params) {
    const mt_grid *grid = params->grid;
    int i;
    if (!mt_check_mode(ctx) || !mti_gradients_known(ctx, params)) return MT_SUCCESS;
    for (i = 0; i < params->count; i++) {
        const mt_param *p = params->list[i];
        const mt_comm *group = mt_placement_of(ctx, grid->dp, p->grad) == MT_REPLICATED ? grid->dp : NULL;
        if (p->desc.sequence_partial && mt_placement_of(ctx, grid->tp, p->grad) == MT_REPLICATED) group = grid->tp;
        if (p->desc.shared_embedding && mt_placement_of(ctx, grid->embedding, p->grad) == MT_REPLICATED)
            group = grid->embedding;
        if (group)
            return mt_fail(
                ctx, MT_ERR_ARGUMENT,
                "%s: the gradient of '%s' is replicated over \"%s\" (%d ranks), so it is a sum already, which "
                "this call would multiply by %d: leave out the sum before",
                function, p->name, mt_comm_name(group), mt_comm_size(group), mt_comm_size(group));
    }
    return MT_SUCCESS;
}

static mt_status mti_sync_check(mt_context *ctx, mt_params *params) {
    static const char *const function = "mt_sync_gradients";
    int64_t n;
    MT_TRY(mti_params_ready(ctx, params, function));
    MT_TRY(mti_gradients_open(ctx, function, params->list[0]));
    MT_TRY(mti_accumulated_check(ctx, function, params));
    MT_TRY(mti_sums_check(ctx, function, params));
    n = params->micro_batches;
    if ((n & (n - 1)) == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE,
                   "%s: %lld micro-batches on this rank; in invariant mode their number must be a power of two",
                   function, (long long)n);
}

static mt_status mti_sync_gradients(mt_context *ctx, mt_params *params) {
    MT_TRY(mti_join_micro_batches(ctx, params));
    if (!mt_context_invariant(ctx)) MT_TRY(mti_sync_embeddings(ctx, params));
    if (!params->buckets.begun) params->buckets.sent = params->elements;
    MT_TRY(mti_buckets_send(ctx, params, 0));
    params->buckets.begun = 0;
    MT_TRY(mt_overlap_wait(ctx, MT_OVERLAP_TICKET_THIRD));
    return mt_context_invariant(ctx) ? mti_sync_lookups(ctx, params) : MT_SUCCESS;
}

MT_API mt_status mt_sync_gradients(mt_context *ctx, mt_params *params) {
    mt_status status;
    MT_TRY(mti_sync_check(ctx, params));
    MT_TRY(mti_computed_note(ctx, params));
    mt_check_pause(ctx);
    status = mt_check_resume(ctx, mti_sync_gradients(ctx, params));
    mti_gradients_set(params, status == MT_SUCCESS ? MTI_GRADIENTS_SYNCHRONISED : MTI_GRADIENTS_UNDEFINED);
    MT_TRY(status);
    MT_TRY(mti_declare_synced(ctx, params));
    if (!mti_is_scattered(params)) MT_TRY(mti_replicas_note(ctx, params, 1));
    return mti_replicas_check(ctx, params, "mt_sync_gradients");
}

MT_API mt_status mt_gather_gradients(mt_context *ctx, mt_params *params) {
    int i;
    MT_TRY(mti_params_ready(ctx, params, "mt_gather_gradients"));
    if (!mti_is_scattered(params)) return MT_SUCCESS;
    MT_TRY(mti_gradients_ready(ctx, "mt_gather_gradients", params, 1));
    mt_check_pause(ctx);
    MT_TRY(mt_check_resume(ctx, mti_buckets_gather(ctx, params, MTI_IN_GRADS)));
    for (i = 0; i < params->count; i++) MT_TRY(mt_declare(ctx, params->grid->dp, params->list[i]->grad, MT_REPLICATED));
    return MT_SUCCESS;
}

/* Returns 1 when this rank's copy of a parameter counts towards the norm. One copy of each parameter counts. */
static int mti_counts_in_norm(const mt_grid *grid, const mt_param *p) {
    if (p->desc.placement == MT_REPLICATED && grid->tp_rank != 0) return 0;
    return !(p->desc.shared_embedding && grid->pp_size > 1 && grid->pp_rank == grid->pp_size - 1);
}

/* The gradients whose squares make up the norm, in a list that grows. */
typedef struct mti_square_list {
    mt_square_tensor *tensors; /* NULL: only counts them */
    int count;
} mti_square_list;

static void mti_square_add(mti_square_list *list, mt_tensor x, int64_t out) {
    if (list->tensors) {
        list->tensors[list->count].x = x;
        list->tensors[list->count].out = out;
    }
    list->count++;
}

/* Adds `grad`, which is contiguous in the gradient of p, or this rank's share of it. out is its column. */
static void mti_squares_of_rows(const mt_params *params, const mt_param *p, mt_tensor grad, int64_t out,
                                mti_square_list *list) {
    int64_t first = mti_param_place(p) + ((const float *)grad.data - (const float *)p->grad.data);
    int64_t end = first + grad.rows * grad.cols;
    mti_stretch s;
    if (!mti_is_scattered(params)) {
        mti_square_add(list, grad, out);
        return;
    }
    for (s = mti_share_next(params, first, end); s.count > 0; s = mti_share_after(params, s, end))
        mti_square_add(list, mt_tensor_f32((float *)p->grad.data + (s.at - mti_param_place(p)), 1, s.count), out);
}

/* Adds the gradient of parameter i, or this rank's share of it, with the columns of mti_sum_squares. */
static void mti_squares_of(const mt_params *params, int i, mti_square_list *list) {
    const mt_param *p = params->list[i];
    int64_t out = !mti_counts_in_norm(params->grid, p), k;
    if (p->desc.copies == 1) mti_squares_of_rows(params, p, p->grad, out, list);
    for (k = 0; p->desc.copies > 1 && k < mti_param_blocks(p); k++) {
        mti_block b = mti_param_block(p, p->tp_rank, k);
        if (b.count > 0) mti_squares_of_rows(params, p, mti_param_block_view(p, p->grad, b), out || b.copy, list);
    }
}

/* Adds the virtual shards of the gradient of parameter i, with the columns of mti_sum_squares_invariant. */
static void mti_squares_of_shards(const mt_params *params, int i, mti_square_list *list) {
    const mt_param *p = params->list[i];
    int s, columns = params->count + 1, column = mti_counts_in_norm(params->grid, p) ? i : params->count;
    int64_t first = (int64_t)p->tp_rank * p->shards * columns, k;
    for (s = 0; p->desc.copies == 1 && s < p->shards; s++)
        mti_square_add(list, mti_param_shard(p, p->grad, s), first + (int64_t)s * columns + column);
    for (k = 0; p->desc.copies > 1 && k < mti_param_blocks(p); k++) {
        mti_block b = mti_param_block(p, p->tp_rank, k);
        if (b.count > 0)
            mti_square_add(list, mti_param_block_view(p, p->grad, b),
                           first + (int64_t)b.shard * columns + (b.copy ? params->count : column));
    }
}

static void mti_squares_of_all(const mt_params *params, mti_square_list *list) {
    int i;
    list->count = 0;
    for (i = 0; i < params->count; i++) {
        if (mt_context_invariant(params->ctx)) mti_squares_of_shards(params, i, list);
        else mti_squares_of(params, i, list);
    }
}

/* Makes the list of gradients for the norm. */
static mt_status mti_params_squares(mt_context *ctx, mt_params *params) {
    mti_square_list list;
    void *memory;
    mt_status status;
    memset(&list, 0, sizeof list);
    mti_squares_of_all(params, &list);
    MT_TRY(mti_host_new(ctx, (size_t)(list.count + 1) * sizeof *list.tensors, &memory));
    list.tensors = (mt_square_tensor *)memory;
    mti_squares_of_all(params, &list);
    status = mt_multi_tensor_create_squares(ctx, list.tensors, list.count, &params->squares);
    mt_host_free(memory);
    return status;
}

/* Writes two sums of squares to sums [1, 2]: of the gradients that count towards the norm, and of the copies that do
   not. */
static mt_status mti_sum_squares(mt_context *ctx, mt_params *params, mt_tensor sums) {
    MT_TRY(mt_multi_tensor_sum_of_squares(ctx, params->squares, sums));
    if (mti_is_scattered(params)) MT_TRY(mt_all_reduce(ctx, params->grid->dp, sums.data, sums.data, 2, MT_F32, MT_SUM));
    return mt_all_reduce(ctx, params->grid->model, sums.data, sums.data, 2, MT_F32, MT_SUM);
}

/* Adds the elements of x [1, n] to sum, one after the other and stage by stage, as one stage with all of them would. */
static mt_status mti_sum_over_stages(mt_context *ctx, const mt_grid *grid, mt_tensor x, mt_tensor sum) {
    int64_t i;
    int stage = grid->pp_rank, last = grid->pp_size - 1;
    if (stage > 0) MT_TRY(mt_recv(ctx, grid->pp, sum.data, 1, MT_F32, stage - 1));
    for (i = 0; i < x.cols; i++) MT_TRY(mt_add(ctx, sum, mt_tensor_cols(x, i, 1), sum));
    if (stage < last) MT_TRY(mt_send(ctx, grid->pp, sum.data, 1, MT_F32, stage + 1));
    return mt_broadcast(ctx, grid->pp, sum.data, sum.data, 1, MT_F32, last);
}

/* Does the same in invariant mode. Each of the V virtual shards has one number for each parameter, and one for all
   copies that do not count. Only one rank of the tensor group has a number that is not 0, so the all-reduce is exact. A
   tree adds the virtual shards; then the parameters are added in order, stage by stage. */
static mt_status mti_sum_squares_invariant(mt_context *ctx, mt_params *params, mt_tensor sums) {
    int v = mt_context_invariant(ctx), columns = params->count + 1;
    mt_tensor all;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, v, columns, &all));
    MT_TRY(mt_fill(ctx, all, 0.0f));
    MT_TRY(mt_multi_tensor_sum_of_squares(ctx, params->squares,
                                          mt_tensor_f32((float *)all.data, 1, (int64_t)v * columns)));
    MT_TRY(mt_all_reduce(ctx, params->grid->tp, all.data, all.data, (size_t)v * (size_t)columns, MT_F32, MT_SUM));
    MT_TRY(mt_tree_sum(ctx, all));
    MT_TRY(mt_sum(ctx, mt_tensor_cols(mt_tensor_rows(all, 0, 1), params->count, 1), mt_tensor_cols(sums, 1, 1)));
    MT_TRY(mti_sum_over_stages(ctx, params->grid, mt_tensor_cols(mt_tensor_rows(all, 0, 1), 0, params->count),
                               mt_tensor_cols(sums, 0, 1)));
    return mt_all_reduce(ctx, params->grid->pp, (float *)sums.data + 1, (float *)sums.data + 1, 1, MT_F32, MT_SUM);
}

/* Writes the two sums of squares that make up the norm of all gradients to sums [1, 2]. For check mode they are what
   mt_fill has made of them: no rule describes that one rank alone counts what all have. */
static mt_status mti_norm_sums_of(mt_context *ctx, mt_params *params, mt_tensor sums) {
    MT_TRY(mt_fill(ctx, sums, 0.0f));
    mt_check_pause(ctx);
    return mt_check_resume(ctx, mt_context_invariant(ctx) ? mti_sum_squares_invariant(ctx, params, sums)
                                                          : mti_sum_squares(ctx, params, sums));
}

static mt_status mti_grad_norm(mt_context *ctx, mt_params *params, float *norm) {
    mt_tensor sums;
    float squares[2];
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, 2, &sums));
    MT_TRY(mti_norm_sums_of(ctx, params, sums));
    MT_TRY(mt_download(ctx, sums, squares));
    *norm = mt_norm_of_sums(squares);
    return MT_SUCCESS;
}

MT_API mt_status mt_grad_norm(mt_context *ctx, mt_params *params, float *norm) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_params_ready(ctx, params, "mt_grad_norm"));
    if (!norm) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_grad_norm: norm is NULL");
    MT_TRY(mti_gradients_ready(ctx, "mt_grad_norm", params, 1));
    mark = mt_arena_mark(ctx);
    status = mti_grad_norm(ctx, params, norm);
    mt_arena_release(ctx, mark);
    return status;
}

/* ---- >>optimizer ------------------------------------------------------------------------------------------------- */

static mt_status mti_optimizer_check(mt_context *ctx, const mt_params *params, const mt_optimizer_desc *d) {
    static const char *const function = "mt_optimizer_create";
    MT_TRY(mt_check_float(ctx, function, NULL, "beta1", d->beta1, MT_FLOAT_PROBABILITY));
    MT_TRY(mt_check_float(ctx, function, NULL, "beta2", d->beta2, MT_FLOAT_PROBABILITY));
    MT_TRY(mt_check_float(ctx, function, NULL, "eps", d->eps, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mt_check_float(ctx, function, NULL, "weight_decay", d->weight_decay, MT_FLOAT_AT_LEAST_0));
    if (!d->stochastic_rounding || params->dtype != MT_F32) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: stochastic_rounding is for bf16 and f16 parameters, these are f32",
                   function);
}

/* Allocates m, v or the masters. */
static mt_status mti_optimizer_alloc(mt_context *ctx, mt_optimizer *optimizer, float **out) {
    void *memory;
    MT_TRY(mt_context_alloc(ctx, (size_t)optimizer->elements * sizeof(float), &memory));
    *out = (float *)memory;
    return MT_SUCCESS;
}

static int mti_has_masters(const mt_optimizer *optimizer) {
    return mt_params_dtype(optimizer->params) != MT_F32 && !optimizer->desc.stochastic_rounding;
}

/* Returns 1 when a parameter's value is the state. */
static int mti_state_is_value(const mt_optimizer *optimizer, mt_optimizer_state state) {
    return state == MT_MASTER && !mti_has_masters(optimizer);
}

/* Returns where element `at` of m, v or the masters is (mti_stretch.state). It must belong to p, because p's state may
   be in the caller's memory. */
static float *mti_state_at(const mt_optimizer *o, const mt_param *p, mt_optimizer_state state, int64_t at) {
    float *bound = (float *)mti_home_of(p)->bound[MTI_IN_STATES + (int)state];
    float *own = state == MT_EXP_AVG ? o->m : state == MT_EXP_AVG_SQ ? o->v : o->master;
    return bound ? bound + (at - mti_param_place(p)) : own + at; /* bound states are not sharded: `at` is a place */
}

/* Returns a parameter's state. This rank must have all of it. */
static mt_tensor mti_optimizer_shard(const mt_optimizer *o, const mt_param *p, mt_optimizer_state state) {
    mt_tensor t = p->grad;
    if (mti_state_is_value(o, state)) return p->value;
    t.data = mti_state_at(o, p, state, mti_param_place(p));
    return t;
}

/* Sets the moments that the caller has bound to zero, and copies masters from the values. */
static mt_status mti_optimizer_fill(mt_context *ctx, const mt_optimizer *o, const mt_param *p) {
    int64_t place = mti_param_place(p), n = p->grad.rows * p->grad.cols;
    mt_tensor value = mt_tensor_make(p->value.data, p->value.dtype, 1, n);
    mti_stretch s;
    int state;
    for (state = MT_EXP_AVG; state <= MT_EXP_AVG_SQ; state++)
        if (mti_home_of(p)->bound[MTI_IN_STATES + state])
            MT_TRY(mti_zero(ctx, mti_bound_view(p, MTI_IN_STATES + state, 0, n)));
    if (!mti_has_masters(o)) return MT_SUCCESS;
    for (s = mti_param_share(p); s.count > 0; s = mti_share_after(o->params, s, place + n))
        MT_TRY(mt_convert(ctx, mt_tensor_cols(value, s.at - place, s.count),
                          mt_tensor_f32(mti_state_at(o, p, MT_MASTER, s.state), 1, s.count)));
    return MT_SUCCESS;
}

/* Allocates m and v, and masters for 16-bit parameters without stochastic rounding, as far as the caller has not bound
   them, and fills them. */
static mt_status mti_optimizer_memory(mt_context *ctx, mt_optimizer *optimizer) {
    const mt_params *params = optimizer->params;
    mt_status status = MT_SUCCESS;
    float **own[3];
    int i;
    own[MT_EXP_AVG] = &optimizer->m;
    own[MT_EXP_AVG_SQ] = &optimizer->v;
    own[MT_MASTER] = &optimizer->master;
    for (i = MT_EXP_AVG; i <= (mti_has_masters(optimizer) ? MT_MASTER : MT_EXP_AVG_SQ); i++)
        if (params->bound_count[MTI_IN_STATES + i] < params->count) MT_TRY(mti_optimizer_alloc(ctx, optimizer, own[i]));
    mt_check_pause(ctx); /* a share is another part of a parameter on each data rank */
    for (i = 0; status == MT_SUCCESS && i < params->count; i++)
        status = mti_optimizer_fill(ctx, optimizer, params->list[i]);
    return mt_check_resume(ctx, status);
}

/* Returns 1 when the caller has bound a state of a parameter. */
static int mti_state_is_bound(const mt_params *params) {
    const int *bound = params->bound_count + MTI_IN_STATES;
    return bound[MT_EXP_AVG] + bound[MT_EXP_AVG_SQ] + bound[MT_MASTER] > 0;
}

/* Checks that the optimizer can use the states that the caller has bound. */
static mt_status mti_optimizer_bound(mt_context *ctx, const mt_params *params, const mt_optimizer_desc *d) {
    const int *bound = params->bound_count + MTI_IN_STATES;
    if (bound[MT_MASTER] > 0 && d->stochastic_rounding)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "mt_optimizer_create: memory is bound for the masters of %d parameters, but with "
                       "stochastic_rounding there are no masters",
                       bound[MT_MASTER]);
    if (params->bound_in_use)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "mt_optimizer_create: exp_avg, exp_avg_sq or master is bound, and another optimizer uses it; "
                       "call mt_optimizer_destroy for that one first");
    if (params->buckets.ranks == 1 || !mti_state_is_bound(params)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "mt_optimizer_create: exp_avg, exp_avg_sq or master is bound, but the %d data ranks share the "
                   "optimizer's state (sharded_optimizer)",
                   params->buckets.ranks);
}

/* All ranks must have the same desc. `mine` is as in mti_params_compare. */
static mt_status mti_optimizer_compare(mt_context *ctx, const mt_params *params, const mt_optimizer_desc *d,
                                       mt_status mine) {
    mti_told_list t;
    MT_TRY(mti_told_begin(ctx, 7, &t));
    mti_told_add_f32(&t, "beta1", d->beta1);
    mti_told_add_f32(&t, "beta2", d->beta2);
    mti_told_add_f32(&t, "eps", d->eps);
    mti_told_add_f32(&t, "weight_decay", d->weight_decay);
    mti_told_add(&t, "stochastic_rounding", "%d", d->stochastic_rounding);
    mti_told_add(&t, "seed", "%llu", (unsigned long long)d->seed);
    mti_told_add_error(ctx, &t, mine);
    MT_TRY(mti_told_end(ctx, params, "mt_optimizer_create", 0, &t));
    return mine;
}

static mt_status mti_optimizer_tensors(mt_context *ctx, mt_optimizer *o);

MT_API mt_status mt_optimizer_create(mt_context *ctx, mt_params *params, const mt_optimizer_desc *desc,
                                     mt_optimizer *out) {
    mt_optimizer_desc d;
    mt_status status;
    MT_TRY(mti_params_ready(ctx, params, "mt_optimizer_create"));
    if (!out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_optimizer_create: out is NULL");
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    d.beta1 = mt_or_default(d.beta1, 0.9f);
    d.beta2 = mt_or_default(d.beta2, 0.999f);
    d.eps = mt_or_default(d.eps, 1e-8f);
    MT_TRY(mti_optimizer_check(ctx, params, &d));
    MT_TRY(mti_optimizer_compare(ctx, params, &d, mti_optimizer_bound(ctx, params, &d)));
    memset(out, 0, sizeof *out);
    out->desc = d;
    out->params = params;
    out->elements = params->elements / params->buckets.ranks;
    status = mti_optimizer_memory(ctx, out);
    if (status == MT_SUCCESS) status = mti_optimizer_tensors(ctx, out);
    if (status == MT_SUCCESS) params->has_optimizer = 1;
    else mt_optimizer_destroy(ctx, out);
    if (status == MT_SUCCESS) params->bound_in_use = out->uses_bound = mti_state_is_bound(params);
    return status;
}

MT_API void mt_optimizer_destroy(mt_context *ctx, mt_optimizer *optimizer) {
    size_t bytes;
    if (!ctx || !optimizer || !optimizer->params) return;
    if (optimizer->uses_bound) optimizer->params->bound_in_use = 0;
    bytes = (size_t)optimizer->elements * sizeof(float);
    mt_context_free(ctx, optimizer->m, bytes);
    mt_context_free(ctx, optimizer->v, bytes);
    mt_context_free(ctx, optimizer->master, bytes);
    mt_multi_tensor_destroy(ctx, optimizer->update);
    memset(optimizer, 0, sizeof *optimizer);
}

static mt_status mti_optimizer_shard_check(mt_context *ctx, const char *function, const mt_optimizer *optimizer,
                                           const mt_param *param, const char *name, const void *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!param || !out) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, param ? name : "param");
    if (!optimizer || !optimizer->params) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: no optimizer", function);
    MT_TRY(mti_params_ready(ctx, optimizer->params, function));
    if (mt_params_find(optimizer->params, param->name) == param) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' is not of this optimizer's registry", function, param->name);
}

static mt_status mti_expect_unshared(mt_context *ctx, const char *function, const mt_optimizer *optimizer) {
    if (optimizer->params->buckets.ranks == 1) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_UNSUPPORTED,
                   "%s: %d data ranks share the optimizer's state (sharded_optimizer); use "
                   "mt_optimizer_read, _gather or _scatter",
                   function, optimizer->params->buckets.ranks);
}

MT_API mt_status mt_optimizer_moments(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                      mt_tensor *m, mt_tensor *v) {
    MT_TRY(mti_optimizer_shard_check(ctx, "mt_optimizer_moments", optimizer, param, "m or v", m && v ? m : NULL));
    MT_TRY(mti_expect_unshared(ctx, "mt_optimizer_moments", optimizer));
    *m = mti_optimizer_shard(optimizer, param, MT_EXP_AVG);
    *v = mti_optimizer_shard(optimizer, param, MT_EXP_AVG_SQ);
    return MT_SUCCESS;
}

MT_API mt_status mt_optimizer_master(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                     mt_tensor *master) {
    MT_TRY(mti_optimizer_shard_check(ctx, "mt_optimizer_master", optimizer, param, "master", master));
    MT_TRY(mti_expect_unshared(ctx, "mt_optimizer_master", optimizer));
    *master = mti_optimizer_shard(optimizer, param, MT_MASTER);
    return MT_SUCCESS;
}

#define MTI_STATE_WORDS "MT_EXP_AVG MT_EXP_AVG_SQ MT_MASTER"

/* Checks the arguments of a call that reads or writes a state. */
static mt_status mti_optimizer_state_check(mt_context *ctx, const char *function, const mt_optimizer *optimizer,
                                           const mt_param *param, mt_optimizer_state state, const void *other) {
    MT_TRY(mti_optimizer_shard_check(ctx, function, optimizer, param, "the tensor", other));
    return mt_check_enum(ctx, function, NULL, "state", (int)state, MTI_STATE_WORDS);
}

/* Copies between this rank's share of a parameter's state and the place of that share in `whole`, which has the
   parameter's shape. */
static mt_status mti_optimizer_copy(mt_context *ctx, const mt_optimizer *o, const mt_param *p, mt_optimizer_state state,
                                    mt_tensor whole, int to_whole) {
    int64_t first = mti_param_place(p), end = first + whole.rows * whole.cols;
    mti_stretch s;
    for (s = mti_param_share(p); s.count > 0; s = mti_share_after(p->registry, s, end)) {
        mt_tensor mine = mt_tensor_f32(mti_state_at(o, p, state, s.state), 1, s.count);
        mt_tensor place = mt_tensor_f32((float *)whole.data + (s.at - first), 1, s.count);
        MT_TRY(to_whole ? mt_copy(ctx, mine, place) : mt_copy(ctx, place, mine));
    }
    return MT_SUCCESS;
}

/* Sets *out to the whole state of a parameter. It is a view when this rank has all of it, and otherwise a tensor in the
   arena with the shares of all data ranks. These are added as integers, of which all but one are 0, so that every bit
   is kept. */
static mt_status mti_optimizer_whole(mt_context *ctx, const mt_optimizer *o, const mt_param *p,
                                     mt_optimizer_state state, mt_tensor *out) {
    const mt_params *params = p->registry;
    size_t count = (size_t)(p->grad.rows * p->grad.cols);
    *out = mt_none();
    if (mti_state_is_value(o, state) || params->buckets.ranks == 1) {
        *out = mti_optimizer_shard(o, p, state);
        return MT_SUCCESS;
    }
    MT_TRY(mt_arena_tensor(ctx, MT_F32, p->grad.rows, p->grad.cols, out));
    MT_TRY(mt_fill(ctx, *out, 0.0f));
    MT_TRY(mti_optimizer_copy(ctx, o, p, state, *out, 1));
    return mt_all_reduce(ctx, params->grid->dp, out->data, out->data, count, MT_I32, MT_SUM);
}

MT_API mt_status mt_optimizer_read(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                   mt_optimizer_state state, mt_tensor shard) {
    static const char *const function = "mt_optimizer_read";
    mt_tensor whole;
    size_t mark;
    mt_status status;
    MT_TRY(mti_optimizer_state_check(ctx, function, optimizer, param, state, shard.data));
    MT_TRY(mt_tensor_check(ctx, function, "shard", shard, MT_ARG_F32, param->grad.rows, param->grad.cols));
    mark = mt_arena_mark(ctx);
    status = mti_optimizer_whole(ctx, optimizer, param, state, &whole);
    if (status == MT_SUCCESS) status = mt_convert(ctx, whole, shard);
    mt_arena_release(ctx, mark);
    return status;
}

MT_API mt_status mt_optimizer_gather(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                     mt_optimizer_state state, float *global) {
    mt_tensor whole;
    size_t mark;
    mt_status status;
    MT_TRY(mti_optimizer_state_check(ctx, "mt_optimizer_gather", optimizer, param, state, global));
    mark = mt_arena_mark(ctx);
    status = mti_optimizer_whole(ctx, optimizer, param, state, &whole);
    if (status == MT_SUCCESS) status = mt_param_gather(ctx, optimizer->params, param, whole, global);
    mt_arena_release(ctx, mark);
    return status;
}

/* Writes this rank's part of `global` to a state of a parameter. */
static mt_status mti_optimizer_scatter(mt_context *ctx, const mt_optimizer *o, const mt_param *p,
                                       mt_optimizer_state state, const float *global) {
    int shared = !mti_state_is_value(o, state) && p->registry->buckets.ranks > 1;
    mt_tensor whole = shared ? mt_none() : mti_optimizer_shard(o, p, state);
    if (shared) MT_TRY(mt_arena_tensor(ctx, MT_F32, p->grad.rows, p->grad.cols, &whole));
    if (shared) MT_TRY(mt_fill(ctx, whole, 0.0f)); /* the scatter does not write the padding */
    MT_TRY(mt_param_scatter(ctx, p, global, whole));
    if (shared) MT_TRY(mti_optimizer_copy(ctx, o, p, state, whole, 0));
    if (state != MT_MASTER) return MT_SUCCESS;
    mt_gemm_unpack(p->registry->ctx, p->value);
    MT_TRY(mt_declare(ctx, NULL, whole, MT_UNDECLARED)); /* it may have pieces of several calls */
    return mt_convert(ctx, whole, p->value);
}

MT_API mt_status mt_optimizer_scatter(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                      mt_optimizer_state state, const float *global) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_optimizer_state_check(ctx, "mt_optimizer_scatter", optimizer, param, state, global));
    if (state == MT_MASTER) MT_TRY(mti_narrow_check(ctx, "mt_optimizer_scatter", param, global, param->value.dtype));
    mark = mt_arena_mark(ctx);
    status = mti_optimizer_scatter(ctx, optimizer, param, state, global);
    mt_arena_release(ctx, mark);
    return status;
}

/* Rows [row, row + rows) and columns [col, col + cols) of a block. Their state begins at element `state` of m, v and
   the masters. */
typedef struct mti_patch {
    int64_t row, rows, col, cols, state;
} mti_patch;

static mt_tensor mti_patch_view(const mt_param *p, mt_tensor t, mti_block b, mti_patch at) {
    return mt_tensor_cols(mt_tensor_rows(mti_param_block_view(p, t, b), at.row, at.rows), at.col, at.cols);
}

/* Returns the state of a patch, shaped like its gradient, or mt_none() when the value is the state. */
static mt_tensor mti_patch_state(const mt_optimizer *o, const mt_param *p, mt_optimizer_state state, mt_tensor grad,
                                 mti_patch at) {
    if (mti_state_is_value(o, state)) return mt_none();
    grad.data = mti_state_at(o, p, state, at.state);
    return grad;
}

/* The tensors that a step updates, in a list that grows. */
typedef struct mti_adamw_list {
    mt_adamw_tensor *tensors; /* NULL: only counts them */
    int count;
} mti_adamw_list;

/* Adds one patch. */
static void mti_optimizer_patch(const mt_optimizer *o, const mt_param *p, mti_block b, mti_patch at,
                                mti_adamw_list *list) {
    mt_adamw_tensor *t;
    int number = list->count++;
    if (!list->tensors) return;
    t = &list->tensors[number];
    t->param = mti_patch_view(p, p->value, b, at);
    t->grad = mti_patch_view(p, p->grad, b, at);
    t->master = mti_patch_state(o, p, MT_MASTER, t->grad, at);
    t->m = mti_patch_state(o, p, MT_EXP_AVG, t->grad, at);
    t->v = mti_patch_state(o, p, MT_EXP_AVG_SQ, t->grad, at);
    t->weight_decay = p->desc.weight_decay;
    t->random = mti_param_random(p, b, o->desc.seed, 0);
    t->random.first_row += at.row;
    t->random.first_col += at.col;
}

/* Returns the place at which a block of p's gradient begins. */
static int64_t mti_block_place(const mt_param *p, mt_tensor block) {
    return mti_param_place(p) + ((const float *)block.data - (const float *)p->grad.data);
}

/* Adds a stretch of a block as up to three patches: the rest of a row, whole rows, and the beginning of a row. Between
   the rows of a block there may be other columns. */
static void mti_optimizer_stretch(const mt_optimizer *o, const mt_param *p, mti_block b, mti_stretch s,
                                  mti_adamw_list *list) {
    mt_tensor block = mti_param_block_view(p, p->grad, b);
    int64_t ld = mt_tensor_ld(block), left, at = s.at - mti_block_place(p, block);
    mti_patch patch;
    for (left = s.count; left > 0;) {
        int64_t used;
        patch.row = at / ld;
        patch.col = at % ld;
        patch.rows = 1;
        patch.cols = mt_min(block.cols - patch.col, left);
        patch.state = s.state + s.count - left;
        if (patch.col == 0 && patch.cols == block.cols) patch.rows = (left - block.cols) / ld + 1;
        if (patch.cols > 0) mti_optimizer_patch(o, p, b, patch, list);
        used = patch.cols > 0 ? (patch.rows - 1) * ld + patch.cols : ld - patch.col;
        at += used;
        left -= used;
    }
}

/* Adds this rank's share of a parameter block by block. A block has a position in the whole parameter, which the random
   numbers need. It has no padding, which therefore stays zero. */
static void mti_optimizer_param(const mt_optimizer *o, const mt_param *p, mti_adamw_list *list) {
    mti_stretch s;
    int64_t i;
    for (i = 0; i < mti_param_blocks(p); i++) {
        mti_block b = mti_param_block(p, p->tp_rank, i);
        mt_tensor block = mti_param_block_view(p, p->grad, b);
        int64_t first = mti_block_place(p, block), end = first + (block.rows - 1) * mt_tensor_ld(block) + block.cols;
        if (b.count == 0) continue;
        for (s = mti_share_next(o->params, first, end); s.count > 0; s = mti_share_after(o->params, s, end))
            mti_optimizer_stretch(o, p, b, s, list);
    }
}

static void mti_optimizer_params(const mt_optimizer *o, mti_adamw_list *list) {
    int i;
    list->count = 0;
    for (i = 0; i < o->params->count; i++) mti_optimizer_param(o, o->params->list[i], list);
}

/* Makes the list of the tensors that a step updates. */
static mt_status mti_optimizer_tensors(mt_context *ctx, mt_optimizer *o) {
    mti_adamw_list list;
    void *memory;
    mt_status status;
    memset(&list, 0, sizeof list);
    mti_optimizer_params(o, &list);
    MT_TRY(mti_host_new(ctx, (size_t)(list.count + 1) * sizeof *list.tensors, &memory));
    list.tensors = (mt_adamw_tensor *)memory;
    mti_optimizer_params(o, &list);
    status = mt_multi_tensor_create_adamw(ctx, list.tensors, list.count, o->desc.stochastic_rounding, &o->update);
    mt_host_free(memory);
    return status;
}

/* Updates this rank's share of every parameter and, when the optimizer is sharded, gathers the values. */
static mt_status mti_optimizer_apply(mt_context *ctx, mt_optimizer *optimizer, const mt_adamw *hyper,
                                     const mt_adamw_values *values) {
    MT_TRY(mt_multi_tensor_adamw(ctx, optimizer->update, hyper, values));
    mti_gradients_set(optimizer->params, MTI_GRADIENTS_USED);
    return optimizer->params->torn ? mti_buckets_gather(ctx, optimizer->params, MTI_IN_VALUES) : MT_SUCCESS;
}

/* The update of a step. numbers: lr, grad_scale and step; with `values`, those in memory of the device are used
   instead. */
static mt_status mti_optimizer_update(mt_context *ctx, mt_optimizer *optimizer, const mt_adamw *numbers,
                                      const mt_adamw_values *values) {
    mt_adamw hyper = *numbers;
    hyper.beta1 = optimizer->desc.beta1;
    hyper.beta2 = optimizer->desc.beta2;
    hyper.eps = optimizer->desc.eps;
    hyper.weight_decay = optimizer->desc.weight_decay;
    optimizer->params->torn = optimizer->params->buckets.ranks > 1;
    mti_params_unpack(optimizer->params);
    mt_check_pause(ctx); /* with a sharded optimizer, data ranks update other parts of a parameter */
    MT_TRY(mt_check_resume(ctx, mti_optimizer_apply(ctx, optimizer, &hyper, values)));
    optimizer->params->torn = 0;
    return mti_replicas_check(ctx, optimizer->params, values ? "mt_step_update" : "mt_optimizer_step");
}

/* Notes a number of a step for mt_check_replicas. The values do not show that a rank of a sharded optimizer has another
   number: each rank updates its own shard, and then all ranks get it. */
static mt_status mti_number_note(mt_context *ctx, const mt_grid *grid, const char *what, float number) {
    MT_TRY(mt_check_number(ctx, grid->tp, what, number));
    MT_TRY(mt_check_number(ctx, grid->pp, what, number));
    return mt_check_number(ctx, grid->dp, what, number);
}

static mt_status mti_optimizer_step(mt_context *ctx, mt_optimizer *optimizer, float lr, float grad_scale) {
    mt_adamw numbers;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!optimizer || !optimizer->params) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_optimizer_step: no optimizer");
    MT_TRY(mti_params_ready(ctx, optimizer->params, "mt_optimizer_step"));
    MT_TRY(mti_gradients_ready(ctx, "mt_optimizer_step", optimizer->params, 0));
    memset(&numbers, 0, sizeof numbers);
    numbers.lr = lr;
    numbers.grad_scale = grad_scale;
    numbers.step = optimizer->step + 1;
    MT_TRY(mti_number_note(ctx, optimizer->params->grid, "lr", lr));
    MT_TRY(mti_number_note(ctx, optimizer->params->grid, "grad_scale", grad_scale));
    MT_TRY(mt_check_mean_end(ctx, "mt_optimizer_step", (double)grad_scale));
    MT_TRY(mti_optimizer_update(ctx, optimizer, &numbers, NULL));
    optimizer->step = numbers.step;
    return MT_SUCCESS;
}

MT_API mt_status mt_optimizer_step(mt_context *ctx, mt_optimizer *optimizer, float lr, float grad_scale) {
    return MT_RANGE("optimizer step", mti_optimizer_step(ctx, optimizer, lr, grad_scale));
}

/* -- a step that does not wait -- */

static mt_status mti_scaler_check(mt_context *ctx, const char *function, const mt_loss_scaler *scaler);

/* Returns the name of the first field of a scaler that is out of range, or NULL. */
static const char *mti_scaler_fault(const mt_loss_scaler *scaler) {
    const char *fault = mt_loss_scaler_fault(&scaler->desc);
    if (fault) return fault;
    if (!(scaler->scale >= scaler->desc.min_scale && scaler->scale <= FLT_MAX)) return "loss_scaler.scale";
    return scaler->good_steps < scaler->desc.growth_interval ? NULL : "loss_scaler.good_steps";
}

/* Takes a name that mti_scaler_fault has returned, and returns what this field must be. */
static const char *mti_scaler_wanted(const char *fault) {
    const char *wanted = mt_loss_scaler_wanted(fault);
    if (wanted) return wanted;
    return strcmp(fault, "loss_scaler.scale") == 0 ? "at least min_scale and finite" : "below growth_interval";
}

static mt_tensor mti_step_memory(const mt_step_values *values, size_t bytes) {
    return mt_tensor_make(values, MT_I32, 1, (int64_t)(bytes / sizeof(int32_t)));
}

MT_API mt_status mt_step_create(mt_context *ctx, mt_optimizer *optimizer, const mt_loss_scaler *scaler, float max_norm,
                                mt_step *out) {
    static const char *const function = "mt_step_create";
    mt_step_values first;
    mt_step step;
    void *memory;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!optimizer || !optimizer->params || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, out ? "optimizer" : "out");
    MT_TRY(mt_check_float(ctx, function, NULL, "max_norm", max_norm, MT_FLOAT_FINITE));
    memset(&first, 0, sizeof first);
    if (scaler) {
        MT_TRY(mti_scaler_check(ctx, function, scaler));
        first.scaler = *scaler;
    } else {
        mt_loss_scaler_desc none;
        memset(&none, 0, sizeof none);
        none.initial_scale = none.growth = 1.0f;
        MT_TRY(mt_loss_scaler_create(ctx, &none, &first.scaler));
    }
    first.max_norm = max_norm;
    first.adamw.step = optimizer->step;
    MT_TRY(mt_context_alloc(ctx, sizeof first, &memory));
    step.optimizer = optimizer;
    step.values = (mt_step_values *)memory;
    status = mt_upload(ctx, &first, mti_step_memory(step.values, sizeof first));
    if (status == MT_SUCCESS) *out = step;
    else mt_context_free(ctx, memory, sizeof first);
    return status;
}

MT_API void mt_step_destroy(mt_context *ctx, mt_step *step) {
    if (!ctx || !step || !step->values) return;
    mt_context_free(ctx, step->values, sizeof *step->values);
    memset(step, 0, sizeof *step);
}

static mt_status mti_step_check(mt_context *ctx, const char *function, const mt_step *step) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!step || !step->optimizer) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: no step", function);
    return mti_params_ready(ctx, step->optimizer->params, function);
}

/* random_offset and lr are the first fields. */
MT_API mt_status mt_step_begin(mt_context *ctx, const mt_step *step, float lr, uint64_t number) {
    mt_step_values first;
    MT_TRY(mti_step_check(ctx, "mt_step_begin", step));
    MT_TRY(mt_check_float(ctx, "mt_step_begin", NULL, "lr", lr, MT_FLOAT_FINITE));
    if (number >> 44)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_step_begin: number is %llu, must be below 2^44",
                       (unsigned long long)number);
    MT_TRY(mti_number_note(ctx, step->optimizer->params->grid, "lr", lr));
    number <<= 20;
    first.random_offset = number;
    first.lr = lr;
    return mt_upload(ctx, &first, mti_step_memory(step->values, offsetof(mt_step_values, max_norm)));
}

static mt_status mti_step_update(mt_context *ctx, const mt_step *step, mt_tensor loss) {
    mt_adamw numbers; /* not used, but valid */
    mt_tensor sums;
    size_t mark = mt_arena_mark(ctx);
    mt_status status = mt_arena_tensor(ctx, MT_F32, 1, 2, &sums);
    memset(&numbers, 0, sizeof numbers);
    numbers.step = 1;
    if (status == MT_SUCCESS) status = mti_norm_sums_of(ctx, step->optimizer->params, sums);
    if (status == MT_SUCCESS) status = mt_step_decide(ctx, sums, loss, step->values);
    mt_arena_release(ctx, mark);
    if (status != MT_SUCCESS) return status;
    return mti_optimizer_update(ctx, step->optimizer, &numbers, &step->values->adamw);
}

/* Refuses a loss that only some stages of a pipeline may have. */
static mt_status mti_loss_check(mt_context *ctx, const mt_grid *grid, mt_tensor loss) {
    if (!mt_check_mode(ctx) || !loss.data || grid->pp_size == 1 ||
        mt_placement_of(ctx, grid->pp, loss) == MT_REPLICATED)
        return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "mt_step_update: loss is not known over \"pipeline\" (%d ranks), must be replicated: only the last "
                   "stage computes it; call mt_broadcast before, or mt_declare if all stages have it",
                   grid->pp_size);
}

MT_API mt_status mt_step_update(mt_context *ctx, const mt_step *step, mt_tensor loss) {
    static const mt_rule rule = {"loss", "R", NULL};
    mt_operand operand;
    MT_TRY(mti_step_check(ctx, "mt_step_update", step));
    MT_TRY(mti_gradients_ready(ctx, "mt_step_update", step->optimizer->params, 0));
    operand.name = "loss";
    operand.t = loss;
    operand.use = 1;
    MT_TRY(mt_rule_check(ctx, "mt_step_update", &rule, &operand, 1));
    MT_TRY(mti_loss_check(ctx, step->optimizer->params->grid, loss));
    return MT_RANGE("optimizer step", mti_step_update(ctx, step, loss));
}

MT_API mt_status mt_step_read(mt_context *ctx, const mt_step *step, mt_step_values *out) {
    MT_TRY(mti_step_check(ctx, "mt_step_read", step));
    if (!out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_step_read: out is NULL");
    memset(out, 0, sizeof *out);
    MT_TRY(mt_download(ctx, mti_step_memory(step->values, sizeof *out), out));
    step->optimizer->step = out->adamw.step;
    return MT_SUCCESS;
}

MT_API const uint64_t *mt_step_random_offset(const mt_step *step) {
    return step && step->values ? &step->values->random_offset : NULL;
}

MT_API mt_tensor mt_step_loss_scale(const mt_step *step) {
    return step && step->values ? mt_tensor_f32(&step->values->scaler.scale, 1, 1) : mt_none();
}

/* Returns the learning rate of a step of the warm-up, or from `total` on, with *progress = -1. Otherwise *progress
   becomes the share of the decay that is done, in [0, 1). */
static float mti_schedule_ends(int64_t step, int64_t warmup, int64_t total, float lr, float min_lr, double *progress) {
    *progress = -1.0;
    if (step < 0) step = 0;
    if (warmup < 0) warmup = 0;
    if (step < warmup) return (float)((double)lr * (double)(step + 1) / (double)warmup);
    if (step >= total) return min_lr;
    *progress = (double)(step - warmup) / (double)(total - warmup);
    return lr;
}

MT_API float mt_cosine_schedule(int64_t step, int64_t warmup, int64_t total, float lr, float min_lr) {
    double progress;
    float end = mti_schedule_ends(step, warmup, total, lr, min_lr, &progress);
    if (progress < 0.0) return end;
    return (float)((double)min_lr +
                   0.5 * ((double)lr - (double)min_lr) * (1.0 + cos(3.14159265358979323846 * progress)));
}

MT_API float mt_linear_schedule(int64_t step, int64_t warmup, int64_t total, float lr, float min_lr) {
    double progress;
    float end = mti_schedule_ends(step, warmup, total, lr, min_lr, &progress);
    if (progress < 0.0) return end;
    return (float)((double)min_lr + ((double)lr - (double)min_lr) * (1.0 - progress));
}

/* ---- >>pipeline -------------------------------------------------------------------------------------------------- */

/* A list of actions that mt_pipeline_schedule writes. */
typedef struct mti_schedule {
    mt_action *actions; /* NULL: only counts them */
    int capacity, count, slots;
    int is_first, is_last; /* 1: this is the first or the last stage */
} mti_schedule;

/* Adds an action, except a send or receive on an end stage that has no neighbour there. */
static void mti_act(mti_schedule *s, mt_action_kind kind, int micro_batch, int received) {
    int goes_back = kind == MT_RECV_FORWARD || kind == MT_SEND_BACKWARD || kind == MT_SEND_BACKWARD_RECV_FORWARD;
    mt_action *a = s->actions && s->count < s->capacity ? &s->actions[s->count] : NULL;
    if (kind != MT_FORWARD && kind != MT_BACKWARD && (goes_back ? s->is_first : s->is_last))
        return; /* no such neighbour */
    s->count++;
    if (!a) return;
    a->kind = kind;
    a->micro_batch = micro_batch;
    a->slot = micro_batch % s->slots;
    a->recv_micro_batch = received;
    a->recv_slot = received % s->slots;
}

/* Lists the actions of n micro-batches. The first `warmup` run only forward. Then each further forward is followed by a
   backward, and the remaining backwards come last. This is Megatron's forward_backward_pipelining_without_interleaving.
   With warmup == n it is GPipe. */
static void mti_schedule_fill(mti_schedule *s, int warmup, int n, int backward) {
    int i;
    for (i = 0; i < warmup; i++) {
        mti_act(s, MT_RECV_FORWARD, i, i);
        mti_act(s, MT_FORWARD, i, i);
        mti_act(s, MT_SEND_FORWARD, i, i);
    }
    if (!backward) return;
    if (warmup < n) mti_act(s, MT_RECV_FORWARD, warmup, warmup);
    for (i = 0; warmup + i < n; i++) {
        mti_act(s, MT_FORWARD, warmup + i, warmup + i);
        mti_act(s, MT_SEND_FORWARD_RECV_BACKWARD, warmup + i, i);
        mti_act(s, MT_BACKWARD, i, i);
        if (warmup + i + 1 < n) mti_act(s, MT_SEND_BACKWARD_RECV_FORWARD, i, warmup + i + 1);
        else mti_act(s, MT_SEND_BACKWARD, i, i);
    }
    for (i = n - warmup; i < n; i++) {
        mti_act(s, MT_RECV_BACKWARD, i, i);
        mti_act(s, MT_BACKWARD, i, i);
        mti_act(s, MT_SEND_BACKWARD, i, i);
    }
}

MT_API mt_status mt_pipeline_schedule(mt_schedule schedule, int stages, int stage, int micro_batches,
                                      mt_action *actions, int capacity, int *count) {
    mti_schedule s;
    int warmup = micro_batches, backward = schedule != MT_SCHEDULE_FORWARD_ONLY;
    if (!count || schedule < MT_SCHEDULE_1F1B || schedule > MT_SCHEDULE_FORWARD_ONLY || stages < 1 || stage < 0 ||
        stage >= stages || micro_batches < 0 || micro_batches > INT32_MAX / 6)
        return MT_ERR_ARGUMENT;
    if (schedule == MT_SCHEDULE_1F1B && stages - stage - 1 < warmup) warmup = stages - stage - 1;
    memset(&s, 0, sizeof s);
    s.actions = actions;
    s.capacity = capacity;
    s.slots = !backward ? 1 : warmup < micro_batches ? warmup + 1 : micro_batches;
    s.is_first = stage == 0;
    s.is_last = stage == stages - 1;
    mti_schedule_fill(&s, warmup, micro_batches, backward);
    *count = s.count;
    return actions && capacity < s.count ? MT_ERR_SHAPE : MT_SUCCESS;
}

MT_API int mt_pipeline_slots(const mt_action *actions, int count) {
    int last = -1, i;
    for (i = 0; actions && i < count; i++) {
        if (actions[i].slot > last) last = actions[i].slot;
        if (actions[i].recv_slot > last) last = actions[i].recv_slot;
    }
    return last < INT32_MAX ? last + 1 : last; /* too many for mt_pipeline_run, which refuses them */
}

/* The state of mt_pipeline_run. */
typedef struct mti_pipeline {
    const mt_grid *grid;
    const mt_pipeline_stage *stage;
    /* inputs has one tensor for each slot. Tensors for a neighbour that does not exist are mt_none() */
    mt_tensor inputs, output, doutput, dinput;
    /* offsets in the arena: slot i has [base + i * kept, base + (i + 1) * kept), and all slots end at top */
    size_t base, kept, top;
    const char *first; /* the memory of slot 0 */
    /* measured: 1 when kept is known */
    int slots, measured;
} mti_pipeline;

/* Returns 1 when the forward of this backward was the last use of its slot. */
static int mti_pipeline_has_forward(const mt_action *actions, const mt_action *backward) {
    const mt_action *a = backward;
    while (a-- > actions) {
        if ((a->kind == MT_FORWARD || a->kind == MT_BACKWARD) && a->slot == backward->slot)
            return a->kind == MT_FORWARD && a->micro_batch == backward->micro_batch;
        if ((a->kind == MT_RECV_FORWARD || a->kind == MT_SEND_BACKWARD_RECV_FORWARD) && a->recv_slot == backward->slot)
            return 0;
    }
    return 0;
}

/* Returns what is wrong with action number i, or NULL. first: no forward has come before it. */
static const char *mti_pipeline_wrong(const mt_pipeline_stage *stage, const mt_action *actions, int count, int i,
                                      int first) {
    const mt_action *a = &actions[i];
    if (a->slot < 0 || a->slot >= count) return "slot must be at least 0 and below the number of actions";
    if (a->recv_slot < 0 || a->recv_slot >= count)
        return "recv_slot must be at least 0 and below the number of actions";
    if (a->kind == MT_FORWARD && first && a->slot != 0) return "the first forward must be in slot 0";
    if (a->kind == MT_BACKWARD && !stage->backward) return "stage.backward is NULL";
    if (a->kind == MT_BACKWARD && !mti_pipeline_has_forward(actions, a))
        return "this backward needs the forward of its micro-batch in its slot, and nothing else there since";
    return NULL;
}

#define MTI_ACTION_WORDS                                                                                               \
    "MT_FORWARD MT_BACKWARD MT_SEND_FORWARD MT_RECV_FORWARD MT_SEND_BACKWARD MT_RECV_BACKWARD "                        \
    "MT_SEND_FORWARD_RECV_BACKWARD MT_SEND_BACKWARD_RECV_FORWARD"

/* Checks the arguments of mt_pipeline_run, including each action. */
static mt_status mti_pipeline_check(mt_context *ctx, const mt_grid *grid, const mt_pipeline_stage *stage,
                                    const mt_action *actions, int count) {
    static const char *const function = "mt_pipeline_run";
    char word[MT_WORD_MAX];
    int i, forwards = 0;
    if (!grid || !grid->pp || !stage || !stage->forward || !actions)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function,
                       !grid || !grid->pp ? "the grid was not created"
                       : !stage           ? "stage is NULL"
                       : actions          ? "stage.forward is NULL"
                                          : "actions is NULL");
    MT_TRY(mt_check_integer(ctx, function, NULL, "stage.rows", stage->rows, 1, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, NULL, "stage.cols", stage->cols, 1, INT64_MAX));
    if (!mt_dtype_is_float(stage->dtype))
        return mti_float_dtype_fail(ctx, MT_ERR_ARGUMENT, function, "stage.dtype", stage->dtype);
    MT_TRY(mt_check_integer(ctx, function, NULL, "count", count, 0, INT64_MAX));
    if (mt_size_mul(mt_size_mul(stage->rows, stage->cols), 8 * mt_max(1, count)) < 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: [%lld, %lld] in up to %d slots is more than can be counted", function,
                       (long long)stage->rows, (long long)stage->cols, count);
    for (i = 0; i < count; i++) {
        const mt_action *a = &actions[i];
        const char *wrong;
        char field[32];
        snprintf(field, sizeof field, "actions[%d].kind", i);
        MT_TRY(mt_check_enum(ctx, function, NULL, field, (int)a->kind, MTI_ACTION_WORDS));
        wrong = mti_pipeline_wrong(stage, actions, count, i, !forwards);
        if (wrong) {
            mt_enum_word(MTI_ACTION_WORDS, (int)a->kind, word);
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "%s: action %d of %d: kind %s, micro-batch %d, slot %d, recv_slot %d: %s", function, i,
                           count, word, a->micro_batch, a->slot, a->recv_slot, wrong);
        }
        forwards += a->kind == MT_FORWARD;
    }
    return MT_SUCCESS;
}

/* Allocates the tensors that stages send. Each slot has its own input, because the backward needs it. One output,
   doutput and dinput is enough, because they are used immediately. */
static mt_status mti_pipeline_buffers(mt_context *ctx, mti_pipeline *p) {
    int64_t rows = p->stage->rows, cols = p->stage->cols;
    mt_dtype dtype = p->stage->dtype;
    int backward = p->stage->backward != NULL;
    p->inputs = p->output = p->doutput = p->dinput = mt_none();
    if (p->grid->pp_rank > 0) {
        MT_TRY(mt_arena_tensor(ctx, dtype, p->slots * rows, cols, &p->inputs));
        if (backward) MT_TRY(mt_arena_tensor(ctx, dtype, rows, cols, &p->dinput));
    }
    if (p->grid->pp_rank + 1 < p->grid->pp_size) {
        MT_TRY(mt_arena_tensor(ctx, dtype, rows, cols, &p->output));
        if (backward) MT_TRY(mt_arena_tensor(ctx, dtype, rows, cols, &p->doutput));
    }
    p->base = mt_arena_mark(ctx);
    return MT_SUCCESS;
}

static mt_tensor mti_pipeline_input(const mti_pipeline *p, int slot) {
    return p->inputs.data ? mt_tensor_rows(p->inputs, slot * p->stage->rows, p->stage->rows) : mt_none();
}

/* Stores how much of the arena the first forward has kept, and reserves as much for each other slot. */
static mt_status mti_pipeline_measure(mt_context *ctx, mti_pipeline *p) {
    void *others;
    p->kept = mt_arena_mark(ctx) - p->base;
    p->measured = 1;
    MT_TRY(mt_arena_alloc(ctx, (size_t)(p->slots - 1) * p->kept, &others));
    p->first = (const char *)others - p->kept;
    p->top = mt_arena_mark(ctx);
    return MT_SUCCESS;
}

/* Runs a forward whose allocations go to the region of its slot. */
static mt_status mti_pipeline_forward(mt_context *ctx, mti_pipeline *p, const mt_action *a) {
    size_t first = p->base + (size_t)a->slot * p->kept, end = first + p->kept;
    int keeps_too_much;
    if (p->measured) mt_arena_region(ctx, first, end, p->top);
    MT_TRY(p->stage->forward(ctx, p->stage->user, a, mti_pipeline_input(p, a->slot), p->output));
    if (!p->measured) return mti_pipeline_measure(ctx, p);
    keeps_too_much = mt_arena_mark(ctx) > end;
    mt_arena_region(ctx, p->top, 0, 0);
    if (!keeps_too_much) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE,
                   "mt_pipeline_run: micro-batch %d keeps more of the arena than the first, which kept %zu "
                   "bytes: they must have one size",
                   a->micro_batch, p->kept);
}

static mt_status mti_pipeline_backward(mt_context *ctx, mti_pipeline *p, const mt_action *a) {
    size_t mark = mt_arena_mark(ctx);
    mti_parallel *options;
    mt_status status;
    MT_TRY(mti_parallel_open(ctx, &options));
    options->micro_batch = ++options->backwards;
    status = p->stage->backward(ctx, p->stage->user, a, p->doutput, p->dinput);
    options->micro_batch = 0;
    if (status == MT_SUCCESS) mt_arena_release(ctx, mark);
    return status;
}

/* Checks what is sent to another stage: over the tensor group it must be complete. */
static mt_status mti_pipeline_complete(mt_context *ctx, const mti_pipeline *p, int backward) {
    static const mt_rule rules[2] = {{"output", "R r", "P"}, {"dinput", "R r", "P"}};
    mt_operand operand;
    operand.name = rules[backward].operands;
    operand.t = backward ? p->dinput : p->output;
    operand.use = 1;
    return mt_rule_check(ctx, "mt_pipeline_run", &rules[backward], &operand, 1);
}

/* Says what was received over one group. */
static mt_status mti_declare_received(mt_context *ctx, const mt_comm *comm, mt_tensor t, mt_placement placement) {
    if (mt_placement_of(ctx, comm, t) != MT_UNDECLARED) return MT_SUCCESS;
    return placement == MT_UNDECLARED ? mt_declare_complete(ctx, comm, t) : mt_declare(ctx, comm, t, placement);
}

MT_API mt_status mt_declare_received(mt_context *ctx, const mt_grid *grid, mt_tensor t, mt_placement tp,
                                     mt_placement dp) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!grid) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_declare_received: grid is NULL");
    if ((int)tp < 0 || tp > MT_UNDECLARED || tp == MT_PARTIAL)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_declare_received: tp is %d, must be a placement other than MT_PARTIAL",
                       (int)tp);
    if ((int)dp < 0 || dp > MT_UNDECLARED)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_declare_received: dp is %d, must be a placement", (int)dp);
    MT_TRY(mti_declare_received(ctx, grid->tp, t, tp));
    return mti_declare_received(ctx, grid->dp, t, dp);
}

static mt_status mti_pipeline_communicate(mt_context *ctx, const mti_pipeline *p, const mt_action *a) {
    mt_comm *comm = p->grid->pp;
    int next = p->grid->pp_rank + 1, before = p->grid->pp_rank - 1;
    mt_tensor input = mti_pipeline_input(p, a->recv_slot);
    size_t n = (size_t)(p->stage->rows * p->stage->cols);
    mt_dtype dtype = p->stage->dtype;
    switch (a->kind) {
    case MT_SEND_FORWARD: return mt_send(ctx, comm, p->output.data, n, dtype, next);
    case MT_RECV_FORWARD: return mt_recv(ctx, comm, input.data, n, dtype, before);
    case MT_SEND_BACKWARD: return mt_send(ctx, comm, p->dinput.data, n, dtype, before);
    case MT_RECV_BACKWARD: return mt_recv(ctx, comm, p->doutput.data, n, dtype, next);
    case MT_SEND_FORWARD_RECV_BACKWARD:
        return mt_send_recv(ctx, comm, p->output.data, n, next, p->doutput.data, n, next, dtype);
    case MT_SEND_BACKWARD_RECV_FORWARD:
        return mt_send_recv(ctx, comm, p->dinput.data, n, before, input.data, n, before, dtype);
    case MT_FORWARD:
    case MT_BACKWARD: break;
    }
    return MT_ERR_ARGUMENT; /* mti_pipeline_check has refused it */
}

/* Runs a forward or a backward, which must leave the slots of other micro-batches alone. */
static mt_status mti_pipeline_compute(mt_context *ctx, mti_pipeline *p, const mt_action *a) {
    size_t input = (size_t)(p->stage->rows * p->stage->cols) * mt_dtype_size(p->stage->dtype);
    mt_status status;
    mt_check_slots(ctx, 0, p->inputs.data, input, p->inputs.data ? p->slots : 0, a->slot);
    mt_check_slots(ctx, 1, p->first, p->kept, p->slots, a->slot);
    status = a->kind == MT_FORWARD ? mti_pipeline_forward(ctx, p, a) : mti_pipeline_backward(ctx, p, a);
    mt_check_slots(ctx, 0, NULL, 0, 0, 0);
    mt_check_slots(ctx, 1, NULL, 0, 0, 0);
    return status;
}

/* Runs one action. */
static mt_status mti_pipeline_act(mt_context *ctx, mti_pipeline *p, const mt_action *a) {
    if (a->kind == MT_FORWARD || a->kind == MT_BACKWARD) return mti_pipeline_compute(ctx, p, a);
    if (a->kind == MT_SEND_FORWARD || a->kind == MT_SEND_FORWARD_RECV_BACKWARD)
        MT_TRY(mti_pipeline_complete(ctx, p, 0));
    if (a->kind == MT_SEND_BACKWARD || a->kind == MT_SEND_BACKWARD_RECV_FORWARD)
        MT_TRY(mti_pipeline_complete(ctx, p, 1));
    MT_TRY(mti_pipeline_communicate(ctx, p, a));
    if (a->kind == MT_RECV_FORWARD || a->kind == MT_SEND_BACKWARD_RECV_FORWARD)
        return mt_declare_received(ctx, p->grid, mti_pipeline_input(p, a->recv_slot), MT_UNDECLARED, MT_UNDECLARED);
    if (a->kind == MT_RECV_BACKWARD || a->kind == MT_SEND_FORWARD_RECV_BACKWARD)
        return mt_declare_received(ctx, p->grid, p->doutput, MT_UNDECLARED, MT_UNDECLARED);
    return MT_SUCCESS;
}

MT_API mt_status mt_pipeline_run(mt_context *ctx, const mt_grid *grid, const mt_pipeline_stage *stage,
                                 const mt_action *actions, int count) {
    mti_pipeline p;
    mt_status status;
    size_t mark;
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_pipeline_check(ctx, grid, stage, actions, count));
    memset(&p, 0, sizeof p);
    p.grid = grid;
    p.stage = stage;
    p.slots = mt_pipeline_slots(actions, count);
    mark = mt_arena_mark(ctx);
    status = mti_pipeline_buffers(ctx, &p);
    for (i = 0; status == MT_SUCCESS && i < count; i++) status = mti_pipeline_act(ctx, &p, &actions[i]);
    mt_arena_region(ctx, mark, 0, 0);
    return status;
}

/* ---- >>json ------------------------------------------------------------------------------------------------------ */

#define MTI_JSON_DEPTH 64
#define MTI_TEXT_MAX ((size_t)100000000) /* bytes, as for the header of a safetensors file */

/* Reads a JSON text (RFC 8259) from front to back. After the first error every call fails, and the position stays. */
typedef struct mti_json {
    const unsigned char *start, *at, *end;
    const char *error;     /* what is wrong at `at`; NULL: no error so far */
    size_t named;          /* bytes of the field's name that name the value which is wrong; 0: all */
    struct mti_keys *keys; /* NULL, or where mti_json_skip lists the keys of all objects */
} mti_json;

static mti_json mti_json_begin(const void *text, size_t bytes) {
    mti_json j;
    j.start = j.at = (const unsigned char *)text;
    j.end = j.start + bytes;
    j.error = NULL;
    j.named = 0;
    j.keys = NULL;
    return j;
}

static int mti_json_fail(mti_json *j, const char *what) {
    if (!j->error) j->error = what;
    return 0;
}

/* Skips white space and returns the next character, or -1 at the end and after an error. */
static int mti_json_peek(mti_json *j) {
    while (j->at < j->end && (*j->at == ' ' || *j->at == '\t' || *j->at == '\n' || *j->at == '\r')) j->at++;
    return j->error || j->at == j->end ? -1 : *j->at;
}

/* Skips white space and the character c. When another character comes, the error is `what`. */
static int mti_json_take(mti_json *j, char c, const char *what) {
    if (mti_json_peek(j) != c) return mti_json_fail(j, what);
    j->at++;
    return 1;
}

/* Returns 1 when an object or array has another value after *count values. Its opening bracket has already been read.
   Reads the comma or the closing bracket. */
static int mti_json_next(mti_json *j, int *count, char close) {
    if (mti_json_peek(j) == close) {
        j->at++;
        return 0;
    }
    if (*count > 0 && !mti_json_take(j, ',', "a comma or a closing bracket is missing")) return 0;
    ++*count;
    return !j->error;
}

/* Returns the number of bytes of the character at p, or 0 when it is not well-formed (Unicode, table 3-7). */
static int mti_utf8_bytes(const unsigned char *p, const unsigned char *end) {
    int n = p[0] < 0x80 ? 1 : p[0] < 0xc2 ? 0 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : p[0] < 0xf5 ? 4 : 0, i;
    int low = p[0] == 0xe0 ? 0xa0 : p[0] == 0xf0 ? 0x90 : 0x80, high = p[0] == 0xed ? 0x9f : p[0] == 0xf4 ? 0x8f : 0xbf;
    if (end - p < n) return 0;
    if (n > 1 && (p[1] < low || p[1] > high)) return 0;
    for (i = 2; i < n; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    return n;
}

/* Writes a character as UTF-8 to out and returns the number of bytes. */
static int mti_utf8_encode(uint32_t c, char *out) {
    static const unsigned char first[] = {0, 0, 0xc0, 0xe0, 0xf0};
    int n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4, i;
    for (i = n - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3f));
    out[0] = (char)(first[n] | c);
    return n;
}

/* Reads four hexadecimal digits. */
static uint32_t mti_json_hex(mti_json *j) {
    uint32_t x = 0;
    int i;
    for (i = 0; i < 4; i++, j->at++) {
        int c = j->at < j->end ? *j->at : 0, digit = c >= '0' && c <= '9'                 ? c - '0'
                                                     : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                                                          : -1;
        if (digit < 0) return (uint32_t)mti_json_fail(j, "\\u is not followed by four hexadecimal digits");
        x = x << 4 | (uint32_t)digit;
    }
    return x;
}

/* Reads what follows a backslash and returns the character. */
static uint32_t mti_json_escape(mti_json *j) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    int c = j->at < j->end ? *j->at++ : 0;
    const char *found = c ? strchr(from, c) : NULL;
    uint32_t high, low;
    if (found) return (uint32_t)(unsigned char)to[found - from];
    if (c != 'u') return (uint32_t)mti_json_fail(j, "no such escape");
    high = mti_json_hex(j);
    if (high == 0 && !j->error) mti_json_fail(j, "a NUL character in a string");
    if (high < 0xd800 || high > 0xdfff) return high;
    if (high < 0xdc00 && j->end - j->at >= 2 && j->at[0] == '\\' && j->at[1] == 'u') {
        j->at += 2;
        low = mti_json_hex(j);
        if (low >= 0xdc00 && low <= 0xdfff) return 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
    }
    return (uint32_t)mti_json_fail(j, "half a surrogate pair");
}

/* Reads the next string and decodes it into out, as far as it fits into `capacity` bytes with a NUL. Returns the number
   of bytes of the whole decoded string, without the NUL. The quoted string in the text has at least two bytes more. */
static size_t mti_json_string(mti_json *j, char *out, size_t capacity) {
    size_t length = 0;
    char c[4];
    int n;
    if (capacity > 0) out[0] = 0;
    if (!mti_json_take(j, '"', "a string is missing")) return 0;
    while (!j->error && j->at < j->end && *j->at != '"') {
        if (*j->at == '\\') {
            j->at++;
            n = mti_utf8_encode(mti_json_escape(j), c);
        } else {
            n = mti_utf8_bytes(j->at, j->end);
            if (n == 0) mti_json_fail(j, "this is not UTF-8");
            else if (*j->at < 0x20) mti_json_fail(j, "a control character in a string");
            memcpy(c, j->at, (size_t)n);
            j->at += n;
        }
        if (j->error) break;
        if (length + (size_t)n < capacity) {
            memcpy(out + length, c, (size_t)n);
            out[length + (size_t)n] = 0;
        }
        length += (size_t)n;
    }
    if (!j->error && j->at == j->end) mti_json_fail(j, "a string does not end");
    if (j->error) return 0;
    j->at++;
    return length;
}

static int mti_json_digit(const mti_json *j) { return j->at < j->end && *j->at >= '0' && *j->at <= '9'; }

/* Reads a whole number from 0 to `most`, without sign, fraction or exponent. */
static uint64_t mti_json_up_to(mti_json *j, uint64_t most) {
    uint64_t x = 0;
    int first = mti_json_peek(j);
    if (first < '0' || first > '9') return (uint64_t)mti_json_fail(j, "a whole number is missing");
    if (first == '0') j->at++; /* no digit may follow a leading 0 */
    for (; first != '0' && mti_json_digit(j); j->at++) {
        uint64_t digit = (uint64_t)(*j->at - '0');
        if (x > (most - digit) / 10) return (uint64_t)mti_json_fail(j, "a number is too large");
        x = 10 * x + digit;
    }
    if (mti_json_digit(j) || (j->at < j->end && (*j->at == '.' || (*j->at | 32) == 'e')))
        return (uint64_t)mti_json_fail(j, "a number is not whole");
    return x;
}

static int64_t mti_json_whole(mti_json *j) { return (int64_t)mti_json_up_to(j, (uint64_t)INT64_MAX); }

/* The digits of a number without a point, for strtod. Every double lies exactly between two others at a number of at
   most 767 digits, so further digits only matter when one of them is not 0. */
#define MTI_DIGITS_MAX 768
typedef struct mti_digits {
    char text[MTI_DIGITS_MAX + 32]; /* has space for an exponent */
    int count, scale;               /* the number is text * 10^scale */
    int more;                       /* 1: a digit that was dropped is not 0 */
} mti_digits;

/* Appends the digits that follow. Zeros before the first other digit are left out. */
static void mti_json_digits(mti_json *j, int fraction, mti_digits *d) {
    if (!mti_json_digit(j)) mti_json_fail(j, "a digit is missing");
    for (; mti_json_digit(j); j->at++) {
        int begins = d->count > 0 || *j->at != '0', fits = d->count < MTI_DIGITS_MAX;
        if (begins && fits) d->text[d->count++] = (char)*j->at;
        else if (begins && *j->at != '0') d->more = 1;
        d->scale += fraction ? -(fits || !begins) : begins && !fits;
    }
}

/* Reads an exponent, if one comes next. */
static int mti_json_exponent(mti_json *j) {
    int exponent = 0, sign = 1;
    if (j->error || j->at == j->end || (*j->at | 32) != 'e') return 0;
    j->at++;
    if (j->at < j->end && (*j->at == '+' || *j->at == '-')) sign = *j->at++ == '-' ? -1 : 1;
    if (!mti_json_digit(j)) mti_json_fail(j, "a digit is missing");
    for (; mti_json_digit(j); j->at++)
        if (exponent < (int)MTI_TEXT_MAX) exponent = 10 * exponent + (*j->at - '0');
    return sign * exponent;
}

/* Reads a number, as the nearest double. strtod gets no point, which in its text would depend on the locale. */
static double mti_json_number(mti_json *j) {
    int negative = mti_json_peek(j) == '-', exponent, error = errno;
    mti_digits d;
    double x;
    d.count = d.scale = d.more = 0;
    if (negative) j->at++;
    if (j->at + 1 < j->end && j->at[0] == '0' && j->at[1] >= '0' && j->at[1] <= '9')
        mti_json_fail(j, "a number begins with 0");
    mti_json_digits(j, 0, &d);
    if (!j->error && j->at < j->end && *j->at == '.') {
        j->at++;
        mti_json_digits(j, 1, &d);
    }
    exponent = mti_json_exponent(j);
    if (j->error) return 0;
    if (d.more) d.scale--;
    snprintf(d.text + d.count, sizeof d.text - (size_t)d.count, "%se%d", d.more ? "1" : "", d.scale + exponent);
    x = d.count > 0 ? strtod(d.text, NULL) : 0;
    errno = error; /* strtod sets it for results that are subnormal or infinite */
    return negative ? -x : x;
}

/* Reads `word` if it comes next; returns 0 if not. */
static int mti_json_word(mti_json *j, const char *word) {
    size_t n = strlen(word);
    if (mti_json_peek(j) != word[0] || (size_t)(j->end - j->at) < n || memcmp(j->at, word, n) != 0) return 0;
    j->at += n;
    return 1;
}

static void mti_keys_read(mti_json *j, size_t object);

/* Skips a value of any kind. */
static void mti_json_skip(mti_json *j, int depth) {
    int c = mti_json_peek(j), count = 0, object = c == '{';
    size_t begin = (size_t)(j->at - j->start);
    if (c == '"') {
        mti_json_string(j, NULL, 0);
    } else if (object || c == '[') {
        if (depth >= MTI_JSON_DEPTH) mti_json_fail(j, "brackets are nested too deeply");
        else j->at++;
        while (mti_json_next(j, &count, object ? '}' : ']')) {
            if (object) mti_keys_read(j, begin);
            if (object) mti_json_take(j, ':', "a colon is missing");
            mti_json_skip(j, depth + 1);
        }
    } else if (c == '-' || (c >= '0' && c <= '9')) {
        mti_json_number(j);
    } else if (!mti_json_word(j, "true") && !mti_json_word(j, "false") && !mti_json_word(j, "null")) {
        mti_json_fail(j, "a value is missing");
    }
}

/* Checks that only white space is left. */
static void mti_json_end(mti_json *j) {
    if (mti_json_peek(j) >= 0) mti_json_fail(j, "something follows the end");
}

static mt_status mti_json_status(mt_context *ctx, const mti_json *j, const char *path, const char *what) {
    if (!j->error) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA, "%s: %s, byte %lld: %s", path, what, (long long)(j->at - j->start), j->error);
}

/* ---- >>files ----------------------------------------------------------------------------------------------------- */

/* The files are little-endian, and their numbers are copied to and from memory without conversion. */
#if defined(__BYTE_ORDER__) && defined(__ORDER_LITTLE_ENDIAN__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "mt_parallel.h: safetensors files are little-endian and this machine is not: its files would be byte-swapped"
#endif

static mt_status mti_io_error(mt_context *ctx, const char *path, const char *what, int error) {
    return mt_fail(ctx, MT_ERR_IO, "%s: cannot %s: %s", path, what, strerror(error));
}

/* Logs a failure that is no error, because the next save tries again. */
static void mti_io_warning(mt_context *ctx, const char *path, const char *what, int error) {
    char text[MT_PATH_MAX + 128];
    snprintf(text, sizeof text, "%s: cannot %s: %s", path, what, strerror(error));
    mt_log(ctx, MT_LOG_WARNING, text);
}

#if defined(O_CLOEXEC)
#define MTI_CLOEXEC O_CLOEXEC
#elif defined(__O_CLOEXEC) /* -std=c99 hides O_CLOEXEC */
#define MTI_CLOEXEC __O_CLOEXEC
#else
#define MTI_CLOEXEC 0
#endif

/* With these flags, open returns an error instead of following a link. */
#if defined(O_NOFOLLOW) && defined(O_DIRECTORY)
#define MTI_NOFOLLOW O_NOFOLLOW
#define MTI_DIRECTORY O_DIRECTORY
#elif defined(__O_NOFOLLOW) && defined(__O_DIRECTORY)
#define MTI_NOFOLLOW __O_NOFOLLOW
#define MTI_DIRECTORY __O_DIRECTORY
#else
#error                                                                                                                 \
    "mt_parallel.h: open has no O_NOFOLLOW and O_DIRECTORY here, so links in a checkpoint directory would be followed"
#endif

/* Calls open again when a signal has interrupted it. Returns -1 and sets errno as open does. */
static int mti_open(const char *path, int flags) {
    int fd;
    do fd = open(path, flags | MTI_CLOEXEC, 0666);
    while (fd < 0 && errno == EINTR);
    return fd;
}

/* Calls fsync again when a signal has interrupted it. Returns 0 or errno. */
static int mti_fsync(int fd) {
    int failed;
    do failed = fsync(fd) != 0;
    while (failed && errno == EINTR);
    return failed ? errno : 0;
}

/* Locks fd and returns 0 or errno. Tries for one second, because a process that was just killed keeps its lock until
   the system has freed its memory. */
static int mti_lock_wait(int fd) {
    struct timespec nap;
    int tries = 0, error = 0;
    nap.tv_sec = 0;
    nap.tv_nsec = 10000000;
    do {
        if (error == EWOULDBLOCK) nanosleep(&nap, NULL);
        error = flock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    } while (error == EINTR || (error == EWOULDBLOCK && ++tries < 100));
    return error;
}

/* Returns 1 when path is the file that is open as fd. */
static int mti_is_at(int fd, const char *path) {
    struct stat open_file, named;
    return fstat(fd, &open_file) == 0 && stat(path, &named) == 0 && open_file.st_dev == named.st_dev &&
           open_file.st_ino == named.st_ino;
}

/* Writes DIRECTORY/NAME to path. */
static mt_status mti_path(mt_context *ctx, const char *directory, const char *name, char *path, size_t bytes) {
    size_t n = strlen(directory), more = strlen(name);
    if (n + more + 2 > bytes)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%.200s.../%.200s: the path has more than %zu characters", directory, name,
                       bytes - 1);
    memcpy(path, directory, n);
    path[n] = '/';
    memcpy(path + n + 1, name, more + 1);
    return MT_SUCCESS;
}

static int mti_exists(const char *path) {
    struct stat info;
    return stat(path, &info) == 0;
}

/* A regular file that is open for reading. It is mapped only for the pointers that programs get. The library itself
   reads from fd, because a mapping of a truncated file raises SIGBUS. */
typedef struct mti_mapped {
    int fd;       /* -1: no file; data is memory that the caller owns */
    void *data;   /* NULL: not mapped, or an empty file */
    size_t bytes; /* size of the file when it was opened */
} mti_mapped;

static mt_status mti_mapped_file(mt_context *ctx, const char *path, int maps, mti_mapped *out) {
    struct stat info;
    void *data;
    if (fstat(out->fd, &info) != 0) return mti_io_error(ctx, path, "look at it", errno);
    if (!S_ISREG(info.st_mode)) return mt_fail(ctx, MT_ERR_IO, "%s: is not a regular file", path);
    out->bytes = (size_t)info.st_size;
    if (!maps || info.st_size == 0) return MT_SUCCESS;
    data = mmap(NULL, out->bytes, PROT_READ, MAP_PRIVATE, out->fd, 0);
    if (data == MAP_FAILED) return mti_io_error(ctx, path, "map it into memory", errno);
    out->data = data;
    return MT_SUCCESS;
}

static void mti_mapped_close(mti_mapped *map) {
    if (map->fd >= 0 && map->data) munmap(map->data, map->bytes);
    if (map->fd >= 0) close(map->fd);
    memset(map, 0, sizeof *map);
    map->fd = -1;
}

/* Takes fd, which open has returned, also after an error. */
static mt_status mti_mapped_take(mt_context *ctx, const char *path, int fd, int maps, mti_mapped *out) {
    mt_status status;
    memset(out, 0, sizeof *out);
    out->fd = fd;
    if (fd < 0) return mti_io_error(ctx, path, "open it", errno);
    status = mti_mapped_file(ctx, path, maps, out);
    if (status != MT_SUCCESS) mti_mapped_close(out);
    return status;
}

#define MTI_READ_FLAGS (O_RDONLY | O_NONBLOCK) /* opening a pipe must not wait for a writer */

/* Opens a file that the program has named. Links are followed. */
static mt_status mti_mapped_open(mt_context *ctx, const char *path, int maps, mti_mapped *out) {
    return mti_mapped_take(ctx, path, mti_open(path, MTI_READ_FLAGS), maps, out);
}

/* -- a folder that comes from elsewhere, such as a model that was downloaded or cloned --

   A link in it could lead to any file of the user, which this library would then read, and a save would copy. So a
   file of the folder must be in the folder. A link is followed only to a file beside it and, as in the cache of Hugging
   Face, from snapshots/REVISION/NAME to ../../blobs/HASH. Neither may be another link. */

/* As openat. A link is not followed: then it returns -1. */
static int mti_open_at(int at, const char *name, int flags) {
    int fd;
    do fd = openat(at, name, flags | MTI_NOFOLLOW | MTI_CLOEXEC);
    while (fd < 0 && errno == EINTR);
    return fd;
}

/* Closes `at`, and keeps errno. */
static void mti_close_at(int at) {
    int error = errno;
    if (at >= 0) close(at);
    errno = error;
}

/* Opens the directory that has the last component of *name, which is then *name. The directories in *name must not be
   links or "..". Returns -1 and sets errno as open does. */
static int mti_folder_of(const char *directory, const char **name) {
    int at = mti_open(directory, O_RDONLY | MTI_DIRECTORY), next;
    const char *slash;
    char part[256];
    for (; at >= 0 && (slash = strchr(*name, '/')) != NULL; at = next, *name = slash + 1) {
        size_t n = (size_t)(slash - *name);
        if (n >= sizeof part) n = 0;
        memcpy(part, *name, n);
        part[n] = 0;
        errno = EINVAL;
        next = n == 0 || strcmp(part, "..") == 0 ? -1 : mti_open_at(at, part, O_RDONLY | MTI_DIRECTORY);
        mti_close_at(at);
    }
    return at;
}

/* Returns the place of HASH in ../../blobs/HASH, where more ../ may precede for a file in a subfolder of a snapshot; 0
   for other texts. */
static size_t mti_blob_of(const char *to) {
    size_t up = 0;
    while (strncmp(to + up, "../", 3) == 0) up += 3;
    if (up < 6 || strncmp(to + up, "blobs/", 6) != 0) return 0;
    up += 6;
    return strspn(to + up, "0123456789abcdef") == strlen(to + up) && strlen(to + up) >= 40 ? up : 0;
}

/* Opens what a link in the directory `at` leads to, if such a link is followed. Changes `to`, the text of the link. */
static int mti_open_link(int at, char *to) {
    size_t hash = mti_blob_of(to);
    int blobs, fd;
    errno = ELOOP;
    if (hash == 0) return strchr(to, '/') ? -1 : mti_open_at(at, to, MTI_READ_FLAGS);
    to[hash - 1] = 0;
    blobs = mti_open_at(at, to, O_RDONLY | MTI_DIRECTORY);
    fd = blobs < 0 ? -1 : mti_open_at(blobs, to + hash, MTI_READ_FLAGS);
    mti_close_at(blobs);
    return fd;
}

/* Opens DIRECTORY/NAME, whose path is `path`, by the rule above. The directory itself may be a link. */
static mt_status mti_folder_open(mt_context *ctx, const char *directory, const char *name, const char *path, int maps,
                                 mti_mapped *out) {
    char to[MT_PATH_MAX];
    ssize_t length = readlink(path, to, sizeof to - 1);
    int at = mti_folder_of(directory, &name), fd = -1;
    if (length >= 0) to[length] = 0;
    if (at >= 0) fd = length >= 0 ? mti_open_link(at, to) : mti_open_at(at, name, MTI_READ_FLAGS);
    mti_close_at(at);
    if (fd >= 0 || errno != ELOOP) return mti_mapped_take(ctx, path, fd, maps, out);
    return mt_fail(ctx, MT_ERR_IO,
                   "%s: is a link that leads out of its folder, which is not followed: put the file itself there",
                   path);
}

/* Returns 1 when there is such a file or link. */
static int mti_folder_has(const char *path) {
    char to[1];
    return readlink(path, to, sizeof to) >= 0 || errno == EINVAL; /* EINVAL: it is no link */
}

#define MTI_READ_MAX ((size_t)1 << 30) /* bytes in one call of pread; some systems allow no more */

/* Reads the bytes [at, at + bytes), which the file had when it was opened. pread moves no file position, so ranks may
   share fd. */
static mt_status mti_mapped_read(mt_context *ctx, const char *path, const mti_mapped *map, size_t at, size_t bytes,
                                 void *out) {
    size_t done = 0;
    ssize_t n = 1;
    if (map->fd < 0 && bytes > 0) memcpy(out, (const unsigned char *)map->data + at, bytes);
    if (map->fd < 0) return MT_SUCCESS;
    while (done < bytes && n != 0) {
        size_t rest = bytes - done;
        n = pread(map->fd, (unsigned char *)out + done, rest < MTI_READ_MAX ? rest : MTI_READ_MAX, (off_t)(at + done));
        if (n < 0 && errno != EINTR) return mti_io_error(ctx, path, "read it", errno);
        if (n > 0) done += (size_t)n;
    }
    if (done == bytes) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_IO,
                   "%s: wanted %zu bytes at byte %zu, got %zu: it had %zu bytes when it was opened, "
                   "and was truncated since",
                   path, bytes, at, done, map->bytes);
}

/* Reads a whole JSON file of a folder, of at most `most` bytes. path is DIRECTORY/NAME. The caller frees *text, also
   after an error. */
static mt_status mti_text_read(mt_context *ctx, const char *directory, const char *name, const char *path, size_t most,
                               void **text, size_t *bytes) {
    mti_mapped file;
    mt_status status = MT_SUCCESS;
    *text = NULL;
    MT_TRY(mti_folder_open(ctx, directory, name, path, 0, &file));
    *bytes = file.bytes;
    if (file.bytes > most)
        status = mt_fail(ctx, MT_ERR_DATA, "%s: has %zu bytes, must be at most %zu", path, file.bytes, most);
    if (status == MT_SUCCESS) status = mti_host_new(ctx, file.bytes + 1, text);
    if (status == MT_SUCCESS) status = mti_mapped_read(ctx, path, &file, 0, file.bytes, *text);
    mti_mapped_close(&file);
    return status;
}

static uint64_t mti_load_word(const unsigned char *p) {
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

#define MTI_CHECKSUM_BASIS 14695981039346656037u

/* Adds a word to a checksum. A multiplication moves changes only to higher bits, so two changes in the highest bit
   would cancel. The xor with h >> 32 moves them down again. */
static uint64_t mti_checksum_word(uint64_t h, const unsigned char *p) {
    h = (h ^ mti_load_word(p)) * 1099511628211u;
    return h ^ h >> 32;
}

/* Continues the checksum h over more bytes. It is FNV-1a with words of 8 bytes instead of single bytes; the last word
   is padded with zeros. Each step is one-to-one in h and in the word, so a file in which one word has changed always
   has another checksum. */
static uint64_t mti_checksum(uint64_t h, const unsigned char *p, size_t bytes) {
    unsigned char rest[8] = {0};
    for (; bytes >= 8; p += 8, bytes -= 8) h = mti_checksum_word(h, p);
    if (bytes == 0) return h;
    memcpy(rest, p, bytes);
    return mti_checksum_word(h, rest);
}

/* The checksum is the first entry of a file's metadata, at a fixed place. It is computed with the digits 0 in its
   place. */
#define MTI_CHECKSUM_BEFORE "{\"__metadata__\":{\"checksum\":\""
#define MTI_CHECKSUM_DIGITS 16
#define MTI_CHECKSUM_AT (8 + sizeof MTI_CHECKSUM_BEFORE - 1)
#define MTI_CHECKSUM_FIRST 64 /* bytes at the beginning of a file that have the whole entry; a multiple of 8 */

/* A file that is written from front to back. */
typedef struct mti_file {
    int fd;            /* -1: not open */
    int error;         /* errno of the first call that failed; nothing is written after it */
    uint64_t checksum; /* of the bytes that were flushed from the buffer */
    size_t used;
    char path[MT_PATH_MAX];
    unsigned char buffer[1 << 16];
} mti_file;

static void mti_file_write(mti_file *f, const unsigned char *data, size_t bytes) {
    while (bytes > 0 && f->error == 0) {
        ssize_t done = write(f->fd, data, bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) {
            f->error = done < 0 ? errno : ENOSPC;
            return;
        }
        data += done;
        bytes -= (size_t)done;
    }
}

static void mti_file_flush(mti_file *f) {
    f->checksum = mti_checksum(f->checksum, f->buffer, f->used);
    mti_file_write(f, f->buffer, f->used);
    f->used = 0;
}

/* Appends bytes to the buffer, and flushes it when it is full. */
static void mti_file_put(mti_file *f, const void *data, size_t bytes) {
    const unsigned char *from = (const unsigned char *)data;
    while (bytes > 0) {
        size_t left = sizeof f->buffer - f->used, n = bytes < left ? bytes : left;
        memcpy(f->buffer + f->used, from, n);
        f->used += n;
        from += n;
        bytes -= n;
        if (f->used == sizeof f->buffer) mti_file_flush(f);
    }
}

static void mti_file_text(mti_file *f, const char *text) { mti_file_put(f, text, strlen(text)); }

static void mti_file_whole(mti_file *f, int64_t x) {
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)x);
    mti_file_text(f, text);
}

/* Writes a character of a JSON string as text. */
static const char *mti_json_escaped(char character, char escaped[8]) {
    unsigned char c = (unsigned char)character;
    if (c == '"' || c == '\\') snprintf(escaped, 8, "\\%c", c);
    else if (c < 0x20) snprintf(escaped, 8, "\\u%04x", c);
    else snprintf(escaped, 8, "%c", c);
    return escaped;
}

/* Writes a JSON string. */
static void mti_file_string(mti_file *f, const char *text) {
    char escaped[8];
    mti_file_text(f, "\"");
    for (; *text; text++) mti_file_text(f, mti_json_escaped(*text, escaped));
    mti_file_text(f, "\"");
}

static void mti_file_reset(mti_file *f) {
    f->fd = -1;
    f->error = 0;
    f->used = 0;
    f->checksum = MTI_CHECKSUM_BASIS;
}

/* Begins to write a new file. Neither the directory nor the file may be a link, and the file must not exist. */
static mt_status mti_file_begin(mt_context *ctx, mti_file *f, const char *directory, const char *name) {
    int at, error;
    mti_file_reset(f);
    MT_TRY(mti_path(ctx, directory, name, f->path, sizeof f->path));
    at = mti_open(directory, O_RDONLY | MTI_DIRECTORY | MTI_NOFOLLOW);
    if (at < 0) return mti_io_error(ctx, directory, "open the directory", errno);
    do f->fd = openat(at, name, O_WRONLY | O_CREAT | O_EXCL | MTI_NOFOLLOW | MTI_CLOEXEC, 0666);
    while (f->fd < 0 && errno == EINTR);
    error = errno;
    close(at);
    return f->fd < 0 ? mti_io_error(ctx, f->path, "create it", error) : MT_SUCCESS;
}

/* Writes the checksum to its place. */
static void mti_file_seal(mti_file *f) {
    char digits[MTI_CHECKSUM_DIGITS + 1];
    snprintf(digits, sizeof digits, "%016llx", (unsigned long long)f->checksum);
    if (f->error == 0 && lseek(f->fd, (off_t)MTI_CHECKSUM_AT, SEEK_SET) < 0) f->error = errno;
    mti_file_write(f, (const unsigned char *)digits, MTI_CHECKSUM_DIGITS);
}

/* Writes the rest of the file and synchronises it with the disk. sealed = 1: writes the checksum. */
static void mti_file_sync(mti_file *f, int sealed) {
    mti_file_flush(f);
    if (sealed) mti_file_seal(f);
    if (f->error == 0) f->error = mti_fsync(f->fd);
}

/* The same, and closes the file. */
static mt_status mti_file_end(mt_context *ctx, mti_file *f, int sealed) {
    mti_file_sync(f, sealed);
    if (close(f->fd) != 0 && errno != EINTR && f->error == 0)
        f->error = errno; /* EINTR: the file is closed, and fsync has succeeded */
    f->fd = -1;
    return f->error ? mti_io_error(ctx, f->path, "write it", f->error) : MT_SUCCESS;
}

/* Synchronises a directory, that is the names in it, with the disk. */
static mt_status mti_directory_sync(mt_context *ctx, const char *path) {
    int fd = mti_open(path, O_RDONLY), error = fd < 0 ? errno : mti_fsync(fd);
    if (fd >= 0) close(fd);
    if (fd >= 0 && error == EINVAL) return MT_SUCCESS; /* this file system does not synchronise directories */
    return error ? mti_io_error(ctx, path, "sync the directory", error) : MT_SUCCESS;
}

/* Synchronises the directory that path is in. */
static mt_status mti_parent_sync(mt_context *ctx, const char *path) {
    char parent[MT_PATH_MAX];
    char *slash;
    snprintf(parent, sizeof parent, "%s", path);
    slash = strrchr(parent, '/');
    if (slash) slash[slash == parent] = 0;
    return mti_directory_sync(ctx, slash ? parent : ".");
}

/* Creates a directory and synchronises its parent. */
static mt_status mti_directory_make(mt_context *ctx, const char *path) {
    if (mkdir(path, 0777) != 0) return mti_io_error(ctx, path, "create the directory", errno);
    return mti_parent_sync(ctx, path);
}

/* Removes the files in a directory and then the directory. This library creates no subdirectories: if there is one, it
   stays, and so does the directory. Links in the directory, or in its place, are removed, but not their targets.
   Failures are logged. */
static void mti_directory_remove(mt_context *ctx, const char *path) {
    char file[MT_PATH_MAX];
    struct dirent *entry;
    int fd = mti_open(path, O_RDONLY | MTI_DIRECTORY | MTI_NOFOLLOW), error = errno;
    DIR *d;
    if (fd < 0 && unlink(path) == 0) return; /* path was a file or a link */
    if (fd < 0) {
        mti_io_warning(ctx, path, "list the directory", error);
        return;
    }
    d = fdopendir(fd);
    if (!d) {
        mti_io_warning(ctx, path, "list the directory", errno);
        close(fd);
        return;
    }
    while ((entry = readdir(d)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (unlinkat(fd, entry->d_name, 0) == 0) continue;
        error = errno;
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        mti_io_warning(ctx, file, "remove it", error);
    }
    closedir(d);
    if (rmdir(path) != 0) mti_io_warning(ctx, path, "remove the directory", errno);
}

/* ---- >>safetensors ----------------------------------------------------------------------------------------------- */

#define MTI_HEADER_MAX 100000000 /* bytes; the limit of the format */

typedef struct mti_metadata {
    const char *key, *value;
} mti_metadata;

struct mt_safetensors {
    mt_safetensors_tensor *tensors; /* sorted by offset while the file is read, then by name */
    mti_metadata *metadata;
    int count, capacity, metadata_count, metadata_capacity;
    char *text; /* decoded strings, one after the other */
    size_t text_bytes, text_used;
    const unsigned char *data; /* the bytes after the header, mapped */
    int64_t data_bytes;
    mti_mapped map;
    char path[MT_PATH_MAX];
};

#define MTI_F64 100 /* beside the values of mt_dtype */

/* The types of the format. dtype is the mt_dtype or MTI_F64, or -1 when the library cannot convert the type. */
static const struct {
    const char *name;
    int bits;
    int dtype;
} mti_safetensors_dtypes[] = {{"F32", 32, MT_F32}, {"BF16", 16, MT_BF16},  {"F16", 16, MT_F16},    {"F64", 64, MTI_F64},
                              {"I64", 64, -1},     {"I32", 32, -1},        {"I16", 16, -1},        {"I8", 8, -1},
                              {"U64", 64, -1},     {"U32", 32, -1},        {"U16", 16, -1},        {"U8", 8, -1},
                              {"BOOL", 8, -1},     {"C64", 64, -1},        {"F8_E4M3", 8, -1},     {"F8_E5M2", 8, -1},
                              {"F8_E8M0", 8, -1},  {"F8_E4M3FNUZ", 8, -1}, {"F8_E5M2FNUZ", 8, -1}, {"F6_E2M3", 6, -1},
                              {"F6_E3M2", 6, -1},  {"F4", 4, -1}};

/* Returns the index of a type in mti_safetensors_dtypes, or -1. */
static int mti_safetensors_dtype(const char *name) {
    int i = (int)(sizeof mti_safetensors_dtypes / sizeof *mti_safetensors_dtypes);
    while (i-- > 0)
        if (strcmp(name, mti_safetensors_dtypes[i].name) == 0) return i;
    return -1;
}

/* Makes space for one more item in a list. */
static mt_status mti_reserve(mt_context *ctx, void **list, int count, int *capacity, size_t bytes) {
    int more = *capacity ? 2 * *capacity : 64;
    void *memory;
    if (count < *capacity) return MT_SUCCESS;
    MT_TRY(mti_host_new(ctx, (size_t)more * bytes, &memory));
    if (*list) memcpy(memory, *list, (size_t)count * bytes);
    mt_host_free(*list);
    *list = memory;
    *capacity = more;
    return MT_SUCCESS;
}

/* A key of an object of JSON. */
typedef struct mti_key {
    size_t object, at; /* where the object and the quoted key begin in the text */
    uint64_t hash;     /* of the decoded key */
} mti_key;

/* The keys of all objects of a text. */
typedef struct mti_keys {
    mt_context *ctx; /* NULL: without messages */
    mt_status status;
    mti_key *list;
    int count, capacity;
    char *room; /* for the longest key */
    size_t room_bytes;
} mti_keys;

/* Reads a key of the object that begins at byte `object`, and lists it when the reader lists keys. */
static void mti_keys_read(mti_json *j, size_t object) {
    mti_keys *k = j->keys;
    void *list;
    mti_key *key;
    mti_json_peek(j);
    if (!k || k->status != MT_SUCCESS) {
        mti_json_string(j, NULL, 0);
        return;
    }
    list = k->list;
    k->status = mti_reserve(k->ctx, &list, k->count, &k->capacity, sizeof *k->list);
    if (k->status != MT_SUCCESS) return;
    k->list = (mti_key *)list;
    key = &k->list[k->count++];
    key->object = object;
    key->at = (size_t)(j->at - j->start);
    key->hash =
        mti_checksum(MTI_CHECKSUM_BASIS, (const unsigned char *)k->room, mti_json_string(j, k->room, k->room_bytes));
}

static int mti_key_order(const void *a, const void *b) {
    const mti_key *x = (const mti_key *)a, *y = (const mti_key *)b;
    if (x->object != y->object) return x->object < y->object ? -1 : 1;
    if (x->hash != y->hash) return x->hash < y->hash ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

/* Refuses a text in which an object has a key twice: readers differ in which of the two values they take. The text is
   well-formed, or its error is found later. */
static mt_status mti_keys_once(mt_context *ctx, const char *path, const void *text, size_t bytes) {
    mti_json j = mti_json_begin(text, bytes);
    mti_keys k;
    void *room;
    int i = 1;
    memset(&k, 0, sizeof k);
    MT_TRY(mti_host_new(ctx, bytes + 1, &room));
    k.ctx = ctx;
    k.room = (char *)room;
    k.room_bytes = bytes + 1;
    j.keys = &k;
    mti_json_skip(&j, 0);
    if (k.count > 0) qsort(k.list, (size_t)k.count, sizeof *k.list, mti_key_order);
    while (i < k.count && (k.list[i].object != k.list[i - 1].object || k.list[i].hash != k.list[i - 1].hash)) i++;
    if (k.status == MT_SUCCESS && !j.error && i < k.count) {
        j.at = j.start + k.list[i].at;
        mti_json_string(&j, k.room, k.room_bytes);
        k.status = mt_fail(ctx, MT_ERR_DATA, "%s: JSON, byte %lld: the key '%.100s' is given twice in one object", path,
                           (long long)k.list[i].at, k.room);
    }
    mt_host_free(k.list);
    mt_host_free(k.room);
    return k.status;
}

/* Reads the next string and keeps it in s->text, which is large enough for all strings of the header
   (mti_json_string). */
static const char *mti_safetensors_string(mt_safetensors *s, mti_json *j) {
    char *text = s->text + s->text_used;
    size_t bytes = mti_json_string(j, text, s->text_bytes - s->text_used) + 1;
    if (!j->error) s->text_used += bytes;
    return text;
}

/* Reads __metadata__. */
static mt_status mti_safetensors_metadata(mt_context *ctx, mt_safetensors *s, mti_json *j) {
    int count = 0;
    void *list;
    mti_json_take(j, '{', "__metadata__ is not an object");
    while (mti_json_next(j, &count, '}')) {
        list = s->metadata;
        MT_TRY(mti_reserve(ctx, &list, s->metadata_count, &s->metadata_capacity, sizeof *s->metadata));
        s->metadata = (mti_metadata *)list;
        s->metadata[s->metadata_count].key = mti_safetensors_string(s, j);
        mti_json_take(j, ':', "a colon is missing");
        s->metadata[s->metadata_count++].value = mti_safetensors_string(s, j);
    }
    return MT_SUCCESS;
}

static void mti_safetensors_shape(mti_json *j, mt_safetensors_tensor *t) {
    int count = 0;
    mti_json_take(j, '[', "a shape is not an array");
    while (mti_json_next(j, &count, ']')) {
        int64_t size = mti_json_whole(j);
        if (t->dims == MT_SAFETENSORS_DIMS) mti_json_fail(j, "a shape has more than 8 dimensions");
        else t->shape[t->dims++] = size;
    }
}

static void mti_safetensors_offsets(mti_json *j, int64_t *begin, int64_t *end) {
    mti_json_take(j, '[', "data_offsets is not an array");
    *begin = mti_json_whole(j);
    mti_json_take(j, ',', "data_offsets are not two numbers");
    *end = mti_json_whole(j);
    mti_json_take(j, ']', "data_offsets are not two numbers");
}

/* Reads the members of one tensor. Skips unknown members, as the format's reference library does. */
static void mti_safetensors_members(mt_safetensors *s, mti_json *j, mt_safetensors_tensor *t, int64_t *begin,
                                    int64_t *end) {
    static const char *const names[] = {"dtype", "shape", "data_offsets"}, *const twice[] = {
                                                                               "dtype is given twice",
                                                                               "shape is given twice",
                                                                               "data_offsets is given twice"};
    int count = 0, seen = 0, i;
    mti_json_take(j, '{', "a tensor is not an object");
    while (mti_json_next(j, &count, '}')) {
        const char *member = mti_safetensors_string(s, j);
        mti_json_take(j, ':', "a colon is missing");
        if (j->error) return;
        for (i = 0; i < 3 && strcmp(member, names[i]) != 0; i++) continue;
        if (i < 3 && (seen & 1 << i)) mti_json_fail(j, twice[i]);
        seen |= 1 << i;
        if (i == 0) t->dtype = mti_safetensors_string(s, j);
        else if (i == 1) mti_safetensors_shape(j, t);
        else if (i == 2) mti_safetensors_offsets(j, begin, end);
        else mti_json_skip(j, 2);
    }
    if ((seen & 7) != 7) mti_json_fail(j, "a tensor has no dtype, shape or data_offsets");
}

/* Returns the bits of a tensor, or -1 when they are too many. `type` is an index in mti_safetensors_dtypes. */
static int64_t mti_shape_bits(int type, int dims, const int64_t *shape) {
    int64_t bits = mti_safetensors_dtypes[type].bits;
    int i;
    for (i = 0; i < dims; i++) {
        if (shape[i] > 0 && bits > INT64_MAX / shape[i]) return -1;
        bits *= shape[i];
    }
    return bits;
}

/* Checks that shape, type and offsets of a tensor fit together, and sets its data, bytes and file. */
static mt_status mti_safetensors_check(mt_context *ctx, const mt_safetensors *s, mt_safetensors_tensor *t,
                                       int64_t begin, int64_t end) {
    int type = mti_safetensors_dtype(t->dtype);
    int64_t bits;
    if (type < 0) return mt_fail(ctx, MT_ERR_DATA, "%s: '%.100s' has dtype '%.20s'", s->path, t->name, t->dtype);
    if (begin > end || end > s->data_bytes)
        return mt_fail(ctx, MT_ERR_DATA,
                       "%s: data_offsets [%lld, %lld] of '%.100s' in a file with %lld bytes of data%s", s->path,
                       (long long)begin, (long long)end, t->name, (long long)s->data_bytes,
                       begin > end ? "" : "; it may be truncated");
    bits = mti_shape_bits(type, t->dims, t->shape);
    if (bits < 0) return mt_fail(ctx, MT_ERR_DATA, "%s: the shape of '%.100s' overflows", s->path, t->name);
    if (bits % 8 != 0 || bits / 8 != end - begin)
        return mt_fail(ctx, MT_ERR_DATA,
                       "%s: '%.100s' has %lld bits by shape and dtype %s, and %lld bytes by data_offsets", s->path,
                       t->name, (long long)bits, t->dtype, (long long)(end - begin));
    t->data = s->data + begin;
    t->bytes = end - begin;
    t->file = s;
    return MT_SUCCESS;
}

static mt_status mti_safetensors_tensor(mt_context *ctx, mt_safetensors *s, mti_json *j, const char *name) {
    int64_t begin = 0, end = 0;
    void *list = s->tensors;
    mt_safetensors_tensor *t;
    MT_TRY(mti_reserve(ctx, &list, s->count, &s->capacity, sizeof *t));
    s->tensors = (mt_safetensors_tensor *)list;
    t = &s->tensors[s->count++];
    t->name = name;
    mti_safetensors_members(s, j, t, &begin, &end);
    return j->error ? MT_SUCCESS : mti_safetensors_check(ctx, s, t, begin, end);
}

/* Reads the header: __metadata__ and the tensors. */
static mt_status mti_safetensors_header(mt_context *ctx, mt_safetensors *s, mti_json *j) {
    int count = 0, metadata = 0;
    if (j->at == j->end || *j->at != '{') mti_json_fail(j, "it does not begin with '{'");
    else j->at++;
    while (mti_json_next(j, &count, '}')) {
        const char *name = mti_safetensors_string(s, j);
        mti_json_take(j, ':', "a colon is missing");
        if (j->error) break;
        if (strcmp(name, "__metadata__") != 0) MT_TRY(mti_safetensors_tensor(ctx, s, j, name));
        else if (metadata++) mti_json_fail(j, "__metadata__ is given twice");
        else MT_TRY(mti_safetensors_metadata(ctx, s, j));
    }
    mti_json_end(j);
    return mti_json_status(ctx, j, s->path, "header");
}

static int mti_tensor_by_data(const void *a, const void *b) {
    const mt_safetensors_tensor *x = (const mt_safetensors_tensor *)a, *y = (const mt_safetensors_tensor *)b;
    const char *p = (const char *)x->data, *q = (const char *)y->data;
    return p != q ? (p > q) - (p < q) : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static int mti_tensor_by_name(const void *a, const void *b) {
    return strcmp(((const mt_safetensors_tensor *)a)->name, ((const mt_safetensors_tensor *)b)->name);
}

static int mti_metadata_by_key(const void *a, const void *b) {
    return strcmp(((const mti_metadata *)a)->key, ((const mti_metadata *)b)->key);
}

/* Sorts the tensors by name, and checks that no name occurs twice. */
static mt_status mti_safetensors_names(mt_context *ctx, mt_safetensors *s) {
    int i;
    if (s->count > 0) qsort(s->tensors, (size_t)s->count, sizeof *s->tensors, mti_tensor_by_name);
    for (i = 1; i < s->count; i++)
        if (strcmp(s->tensors[i - 1].name, s->tensors[i].name) == 0)
            return mt_fail(ctx, MT_ERR_DATA, "%s: '%.100s' is given twice", s->path, s->tensors[i].name);
    return MT_SUCCESS;
}

/* Checks that every byte of the data belongs to exactly one tensor and that no name occurs twice. Sorts tensors and
   metadata by name. */
static mt_status mti_safetensors_sort(mt_context *ctx, mt_safetensors *s) {
    const unsigned char *end = s->data;
    int i;
    MT_TRY(mti_safetensors_names(ctx, s)); /* first, because two tensors of one name also overlap or leave a gap */
    if (s->count > 0) qsort(s->tensors, (size_t)s->count, sizeof *s->tensors, mti_tensor_by_data);
    for (i = 0; i < s->count; end += s->tensors[i++].bytes)
        if (s->tensors[i].data != end)
            return mt_fail(
                ctx, MT_ERR_DATA, "%s: '%.100s' begins at byte %lld of the data, but the tensor before it ends at %lld",
                s->path, s->tensors[i].name, (long long)((const unsigned char *)s->tensors[i].data - s->data),
                (long long)(end - s->data));
    if (end != s->data + s->data_bytes)
        return mt_fail(ctx, MT_ERR_DATA, "%s: its tensors have %lld bytes, its data %lld", s->path,
                       (long long)(end - s->data), (long long)s->data_bytes);
    MT_TRY(mti_safetensors_names(ctx, s));
    if (s->metadata_count > 0) qsort(s->metadata, (size_t)s->metadata_count, sizeof *s->metadata, mti_metadata_by_key);
    for (i = 1; i < s->metadata_count; i++)
        if (strcmp(s->metadata[i - 1].key, s->metadata[i].key) == 0)
            return mt_fail(ctx, MT_ERR_DATA, "%s: '%.100s' is given twice in __metadata__", s->path,
                           s->metadata[i].key);
    return MT_SUCCESS;
}

/* Reads and checks the header of s->map. */
static mt_status mti_safetensors_parse(mt_context *ctx, mt_safetensors *s) {
    uint64_t header;
    size_t size = s->map.bytes;
    void *memory;
    mti_json j;
    mt_status status;
    if (size < 8) return mt_fail(ctx, MT_ERR_DATA, "%s: %zu bytes are not a safetensors file", s->path, size);
    MT_TRY(mti_mapped_read(ctx, s->path, &s->map, 0, sizeof header, &header));
    if (header > MTI_HEADER_MAX || header > size - 8)
        return mt_fail(ctx, MT_ERR_DATA,
                       "%s: a header of %llu bytes (at most %d) in a file of %zu; it may be truncated", s->path,
                       (unsigned long long)header, MTI_HEADER_MAX, size);
    s->data = (const unsigned char *)s->map.data + 8 + header;
    s->data_bytes = (int64_t)(size - 8 - header);
    s->text_bytes = (size_t)header + 1;
    MT_TRY(mti_host_new(ctx, s->text_bytes, &memory));
    s->text = (char *)memory;
    MT_TRY(mti_host_new(ctx, header > 0 ? (size_t)header : 1, &memory));
    j = mti_json_begin(memory, (size_t)header);
    status = mti_mapped_read(ctx, s->path, &s->map, 8, (size_t)header, memory);
    if (status == MT_SUCCESS) status = mti_safetensors_header(ctx, s, &j);
    mt_host_free(memory);
    return status == MT_SUCCESS ? mti_safetensors_sort(ctx, s) : status;
}

/* Opens a file of a folder or, when directory is NULL, the file that the program has named `path`. */
static mt_status mti_safetensors_open(mt_context *ctx, const char *directory, const char *name, const char *path,
                                      mt_safetensors *s) {
    if (strlen(path) >= sizeof s->path)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_safetensors_open: a path of %zu characters", strlen(path));
    snprintf(s->path, sizeof s->path, "%s", path);
    if (directory) MT_TRY(mti_folder_open(ctx, directory, name, path, 1, &s->map));
    else MT_TRY(mti_mapped_open(ctx, path, 1, &s->map));
    return mti_safetensors_parse(ctx, s);
}

static mt_status mti_safetensors_new(mt_context *ctx, const char *directory, const char *name, const char *path,
                                     mt_safetensors **out) {
    void *memory;
    mt_status status;
    *out = NULL;
    MT_TRY(mti_host_new(ctx, sizeof **out, &memory));
    ((mt_safetensors *)memory)->map.fd = -1;
    status = mti_safetensors_open(ctx, directory, name, path, (mt_safetensors *)memory);
    if (status == MT_SUCCESS) *out = (mt_safetensors *)memory;
    else mt_safetensors_close((mt_safetensors *)memory);
    return status;
}

MT_API mt_status mt_safetensors_open(mt_context *ctx, const char *path, mt_safetensors **out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!path || !out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_safetensors_open: %s is NULL", path ? "out" : "path");
    return mti_safetensors_new(ctx, NULL, NULL, path, out);
}

MT_API void mt_safetensors_close(mt_safetensors *file) {
    if (!file) return;
    mti_mapped_close(&file->map);
    mt_host_free(file->tensors);
    mt_host_free(file->metadata);
    mt_host_free(file->text);
    mt_host_free(file);
}

MT_API int mt_safetensors_count(const mt_safetensors *file) { return file ? file->count : 0; }

MT_API const mt_safetensors_tensor *mt_safetensors_at(const mt_safetensors *file, int index) {
    return index >= 0 && index < mt_safetensors_count(file) ? &file->tensors[index] : NULL;
}

MT_API const mt_safetensors_tensor *mt_safetensors_find(const mt_safetensors *file, const char *name) {
    mt_safetensors_tensor key;
    if (!name || mt_safetensors_count(file) == 0) return NULL;
    key.name = name;
    return (const mt_safetensors_tensor *)bsearch(&key, file->tensors, (size_t)file->count, sizeof key,
                                                  mti_tensor_by_name);
}

MT_API const char *mt_safetensors_metadata(const mt_safetensors *file, const char *key) {
    mti_metadata wanted;
    const mti_metadata *found;
    if (!file || !key || file->metadata_count == 0) return NULL;
    wanted.key = key;
    found = (const mti_metadata *)bsearch(&wanted, file->metadata, (size_t)file->metadata_count, sizeof wanted,
                                          mti_metadata_by_key);
    return found ? found->value : NULL;
}

/* Reads bytes of a tensor. */
static mt_status mti_tensor_bytes(mt_context *ctx, const mt_safetensors_tensor *t, int64_t at, int64_t bytes,
                                  void *out) {
    const mti_mapped *map = &t->file->map;
    size_t first = (size_t)((const unsigned char *)t->data - (const unsigned char *)map->data);
    return mti_mapped_read(ctx, t->file->path, map, first + (size_t)at, (size_t)bytes, out);
}

/* Reads F64 elements, rounded to floats. */
static mt_status mti_f64_read(mt_context *ctx, const mt_safetensors_tensor *t, int64_t first, int64_t count,
                              float *out) {
    double block[1 << 11];
    int64_t i, k, n;
    for (i = 0; i < count; i += n) {
        n = mt_min(count - i, (int64_t)(sizeof block / sizeof *block));
        MT_TRY(mti_tensor_bytes(ctx, t, 8 * (first + i), 8 * n, block));
        for (k = 0; k < n; k++) {
            out[i + k] = (float)block[k];
            if (isinf(out[i + k]) && !isinf(block[k]))
                return mt_fail(ctx, MT_ERR_DATA, "%s: element %lld of '%.100s' is %g, too large for a float",
                               t->file->path, (long long)(first + i + k), t->name, block[k]);
        }
    }
    return MT_SUCCESS;
}

/* Returns the type of a tensor: an mt_dtype or MTI_F64, or -1 when the library cannot convert it. */
static int mti_tensor_type(const mt_safetensors_tensor *t) {
    return mti_safetensors_dtypes[mti_safetensors_dtype(t->dtype)].dtype;
}

/* Reads elements of a tensor as floats. */
static mt_status mti_elements_read(mt_context *ctx, const mt_safetensors_tensor *t, int64_t first, int64_t count,
                                   float *out) {
    unsigned char *from = (unsigned char *)out;
    int type = mti_tensor_type(t), bytes = type == MT_F32 ? 4 : 2;
    uint16_t bits[256];
    int64_t i, n;
    if (type == MTI_F64) return mti_f64_read(ctx, t, first, count, out);
    /* 16-bit values are read into the second half of out. Widening them from the front overwrites none that is still
       needed */
    if (type != MT_F32) from += bytes * count;
    MT_TRY(mti_tensor_bytes(ctx, t, bytes * first, bytes * count, from));
    for (i = 0; type != MT_F32 && i < count; i += n) {
        n = mt_min(count - i, (int64_t)(sizeof bits / sizeof *bits));
        memcpy(bits, from + 2 * i, (size_t)n * sizeof *bits);
        mt_f32_from_16bit((mt_dtype)type, bits, out + i, n);
    }
    return MT_SUCCESS;
}

static int64_t mti_tensor_elements(const mt_safetensors_tensor *t) {
    int64_t n = 1;
    int i;
    for (i = 0; i < t->dims; i++) n *= t->shape[i];
    return n;
}

MT_API mt_status mt_safetensors_read(mt_context *ctx, const mt_safetensors_tensor *tensor, float *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!tensor || !out || !tensor->file)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_safetensors_read: %s is NULL",
                       !tensor ? "tensor"
                       : !out  ? "out"
                               : "tensor.file");
    if (mti_tensor_type(tensor) < 0)
        return mt_fail(ctx, MT_ERR_DTYPE, "mt_safetensors_read: '%.100s' is %s, must be F32, F64, BF16 or F16",
                       tensor->name, tensor->dtype);
    return mti_elements_read(ctx, tensor, 0, mti_tensor_elements(tensor), out);
}

MT_API mt_status mt_safetensors_read_bytes(mt_context *ctx, const mt_safetensors_tensor *tensor, int64_t at,
                                           int64_t bytes, void *out) {
    static const char *const function = "mt_safetensors_read_bytes";
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!tensor || !out || !tensor->file)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, out ? "tensor" : "out");
    if (at < 0 || bytes < 0 || at > tensor->bytes || bytes > tensor->bytes - at)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %lld bytes from byte %lld of '%.100s', which has %lld bytes",
                       function, (long long)bytes, (long long)at, tensor->name, (long long)tensor->bytes);
    return mti_tensor_bytes(ctx, tensor, at, bytes, out);
}

enum { MTI_BLOCK_ELEMENTS = 1024 };

/* Returns MT_ERR_DATA when two tensors of the same shape differ in an element. Both have types that can be read. */
static mt_status mti_tensors_equal(mt_context *ctx, const mt_safetensors_tensor *copy, const mt_safetensors_tensor *t) {
    float x[MTI_BLOCK_ELEMENTS], y[MTI_BLOCK_ELEMENTS];
    int64_t elements = mti_tensor_elements(t), i, k, n;
    for (i = 0; i < elements; i += n) {
        n = mt_min(elements - i, (int64_t)MTI_BLOCK_ELEMENTS);
        MT_TRY(mti_elements_read(ctx, copy, i, n, x));
        MT_TRY(mti_elements_read(ctx, t, i, n, y));
        for (k = 0; k < n; k++)
            if (x[k] != y[k] && (x[k] == x[k] || y[k] == y[k]))
                return mt_fail(ctx, MT_ERR_DATA,
                               "%s: element %lld of '%.100s' is %g, but of '%.100s' %g; this model has one parameter "
                               "for both",
                               copy->file->path, (long long)(i + k), copy->name, (double)x[k], t->name, (double)y[k]);
    }
    return MT_SUCCESS;
}

/* Checks the bytes of a file against its checksum. *has is 1 when the file has a checksum; a file without one
   passes. */
static mt_status mti_safetensors_verify(mt_context *ctx, const mt_safetensors *s, int *has) {
    unsigned char block[1 << 14]; /* a multiple of 8, and at least MTI_CHECKSUM_FIRST */
    char wanted[MTI_CHECKSUM_DIGITS + 1] = "", digits[MTI_CHECKSUM_DIGITS + 1];
    uint64_t h = MTI_CHECKSUM_BASIS;
    size_t at, n;
    *has = s->map.bytes >= MTI_CHECKSUM_FIRST;
    for (at = 0; *has && at < s->map.bytes; at += n) {
        n = s->map.bytes - at < sizeof block ? s->map.bytes - at : sizeof block;
        MT_TRY(mti_mapped_read(ctx, s->path, &s->map, at, n, block));
        if (at == 0) {
            *has = memcmp(block + 8, MTI_CHECKSUM_BEFORE, sizeof MTI_CHECKSUM_BEFORE - 1) == 0;
            memcpy(wanted, block + MTI_CHECKSUM_AT, MTI_CHECKSUM_DIGITS);
            memset(block + MTI_CHECKSUM_AT, '0', MTI_CHECKSUM_DIGITS);
        }
        h = mti_checksum(h, block, n);
    }
    snprintf(digits, sizeof digits, "%016llx", (unsigned long long)h);
    if (!*has || memcmp(digits, wanted, MTI_CHECKSUM_DIGITS) == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA, "%s: its bytes are not those that were written: checksum %s, expected %s", s->path,
                   digits, wanted);
}

/* -- writing -- */

struct mt_safetensors_writer {
    mti_file file;
    char *header; /* the length of the text in 8 bytes, then the text; NULL when the file has it */
    size_t header_bytes, header_room;
    mt_status status;            /* of the header: no memory, or its check failed; of the creation of the file */
    int64_t data_bytes, written; /* of all tensors; of the file */
    int is_begun;                /* 1: the file has the header */
    pid_t process;               /* that has begun; a process forked from it may not touch the file */
    char path[MT_PATH_MAX];
};

/* Appends to the header. When there is no memory for it, mti_header_end returns the error. */
static void mti_header_put(mt_context *ctx, mt_safetensors_writer *w, const void *bytes, size_t count) {
    size_t room = w->header_room > 0 ? w->header_room : 4096;
    void *memory;
    while (room < w->header_bytes + count) room *= 2;
    if (room > w->header_room && w->status == MT_SUCCESS) {
        w->status = mti_host_new(ctx, room, &memory);
        if (w->status != MT_SUCCESS) return;
        if (w->header) memcpy(memory, w->header, w->header_bytes);
        mt_host_free(w->header);
        w->header = (char *)memory;
        w->header_room = room;
    }
    if (w->status != MT_SUCCESS) return;
    memcpy(w->header + w->header_bytes, bytes, count);
    w->header_bytes += count;
}

static void mti_header_text(mt_context *ctx, mt_safetensors_writer *w, const char *text) {
    mti_header_put(ctx, w, text, strlen(text));
}

static void mti_header_whole(mt_context *ctx, mt_safetensors_writer *w, int64_t x) {
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)x);
    mti_header_text(ctx, w, text);
}

static void mti_header_string(mt_context *ctx, mt_safetensors_writer *w, const char *text) {
    char escaped[8];
    mti_header_text(ctx, w, "\"");
    for (; *text; text++) mti_header_text(ctx, w, mti_json_escaped(*text, escaped));
    mti_header_text(ctx, w, "\"");
}

/* Begins a header with its metadata. mti_header_text(ctx, w, "}") ends the metadata. */
static void mti_header_begin(mt_context *ctx, mt_safetensors_writer *w) {
    static const char no_length[8] = {0};
    w->header_bytes = 0;
    w->status = MT_SUCCESS;
    w->data_bytes = w->written = 0;
    mti_header_put(ctx, w, no_length, sizeof no_length);
    mti_header_text(ctx, w, MTI_CHECKSUM_BEFORE "0000000000000000\"");
}

static void mti_header_member(mt_context *ctx, mt_safetensors_writer *w, const char *key, const char *value) {
    mti_header_text(ctx, w, ",");
    mti_header_string(ctx, w, key);
    mti_header_text(ctx, w, ":");
    mti_header_string(ctx, w, value);
}

/* Adds a tensor of so many bytes. */
static void mti_header_tensor(mt_context *ctx, mt_safetensors_writer *w, const char *name, const char *dtype, int dims,
                              const int64_t *shape, int64_t bytes) {
    int i;
    mti_header_text(ctx, w, ",");
    mti_header_string(ctx, w, name);
    mti_header_text(ctx, w, ":{\"dtype\":");
    mti_header_string(ctx, w, dtype);
    mti_header_text(ctx, w, ",\"shape\":[");
    for (i = 0; i < dims; i++) {
        if (i > 0) mti_header_text(ctx, w, ",");
        mti_header_whole(ctx, w, shape[i]);
    }
    mti_header_text(ctx, w, "],\"data_offsets\":[");
    mti_header_whole(ctx, w, w->data_bytes);
    w->data_bytes += bytes;
    mti_header_text(ctx, w, ",");
    mti_header_whole(ctx, w, w->data_bytes);
    mti_header_text(ctx, w, "]}");
}

static mt_status mti_header_end(mt_context *ctx, mt_safetensors_writer *w, const char *path) {
    uint64_t length;
    mti_header_text(ctx, w, "}");
    while (w->status == MT_SUCCESS && w->header_bytes % 8 != 0) mti_header_text(ctx, w, " "); /* aligns the data */
    MT_TRY(w->status);
    length = (uint64_t)w->header_bytes - 8;
    if (length > MTI_HEADER_MAX)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: a header of %llu bytes; at most %d are allowed", path,
                       (unsigned long long)length, MTI_HEADER_MAX);
    memcpy(w->header, &length, sizeof length);
    return MT_SUCCESS;
}

static void mti_header_free(mt_safetensors_writer *w) {
    mt_host_free(w->header);
    w->header = NULL;
    w->header_bytes = w->header_room = 0;
}

/* Writes the header to the file and frees it. */
static void mti_header_write(mt_safetensors_writer *w) {
    mti_file_put(&w->file, w->header, w->header_bytes);
    mti_header_free(w);
}

/* Reads the header as mt_safetensors_open does, which finds names that are given twice or are not UTF-8. */
static mt_status mti_header_check(mt_context *ctx, const mt_safetensors_writer *w) {
    void *memory;
    mt_safetensors *s;
    mt_status status;
    MT_TRY(mti_host_new(ctx, sizeof *s, &memory));
    s = (mt_safetensors *)memory;
    s->map.fd = -1;
    s->map.data = w->header;
    s->map.bytes = w->header_bytes + (size_t)w->data_bytes;
    memcpy(s->path, w->path, sizeof s->path);
    status = mti_safetensors_parse(ctx, s);
    mt_safetensors_close(s);
    return status;
}

/* Opens and locks what an earlier writer has left at path: *held is its descriptor, or -1 when there is none. Returns 0
   when another writer is still there. */
static int mti_leftover_lock(const char *path, int *held) {
    int busy = 0, at = 0;
    while (!busy && !at) {
        *held = mti_open(path, O_RDWR | O_NONBLOCK | MTI_NOFOLLOW);
        if (*held < 0) return 1;
        busy = mti_lock_wait(*held) == EWOULDBLOCK;
        at = mti_is_at(*held, path);
        if (!busy && !at) close(*held); /* its writer has just renamed or removed it */
    }
    if (busy) close(*held);
    return !busy;
}

/* Creates the file PATH.tmp in place of one that a killed run has left, and locks it until it is closed. Two writers
   would otherwise rename each other's files. */
static mt_status mti_writer_create(mt_context *ctx, mti_file *f) {
    int held, error = 0, alone = mti_leftover_lock(f->path, &held);
    if (alone) {
        unlink(f->path);
        f->fd = mti_open(f->path, O_WRONLY | O_CREAT | O_EXCL | MTI_NOFOLLOW);
        error = f->fd < 0 ? errno : mti_lock_wait(f->fd);
        if (held >= 0) close(held);
        alone = f->fd < 0 ? error != EEXIST : error != EWOULDBLOCK && mti_is_at(f->fd, f->path);
    }
    if (alone) return f->fd < 0 ? mti_io_error(ctx, f->path, "create it", error) : MT_SUCCESS;
    if (f->fd >= 0) close(f->fd);
    f->fd = -1;
    return mt_fail(ctx, MT_ERR_IO, "%s: another writer writes it", f->path);
}

/* A file is renamed to the path at last. That would remove a device, a pipe, or a link to one, such as /dev/stdout. */
static mt_status mti_writer_place(mt_context *ctx, const char *path) {
    struct stat info;
    if (stat(path, &info) != 0 || S_ISREG(info.st_mode)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_IO, "%s: is not a regular file, so no file can take its place", path);
}

/* Ends the header and creates the file with it. */
static mt_status mti_writer_open(mt_context *ctx, mt_safetensors_writer *w) {
    MT_TRY(mti_writer_place(ctx, w->path));
    MT_TRY(mti_header_end(ctx, w, w->path));
    MT_TRY(mti_header_check(ctx, w));
    mti_file_reset(&w->file);
    snprintf(w->file.path, sizeof w->file.path, "%.*s.tmp", MT_PATH_MAX - 5, w->path);
    MT_TRY(mti_writer_create(ctx, &w->file));
    w->is_begun = 1;
    w->process = getpid();
    mti_header_write(w);
    return MT_SUCCESS;
}

/* Opens the file at the first call. */
static mt_status mti_writer_begin(mt_context *ctx, mt_safetensors_writer *w) {
    if (w->is_begun && w->process != getpid())
        return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: process %ld writes it, from which this process %ld was forked",
                       w->path, (long)w->process, (long)getpid());
    if (!w->is_begun && w->status == MT_SUCCESS) w->status = mti_writer_open(ctx, w);
    return w->status;
}

MT_API mt_status mt_safetensors_create(mt_context *ctx, const char *path, const mt_setting *metadata, int count,
                                       mt_safetensors_writer **out) {
    static const char *const function = "mt_safetensors_create";
    void *memory;
    mt_safetensors_writer *w;
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!path || !out || (count > 0 && !metadata))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, !path ? "path" : out ? "metadata" : "out");
    *out = NULL;
    if (strlen(path) > MT_PATH_MAX - 5)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: a path of %zu characters", function, strlen(path));
    for (i = 0; i < count; i++)
        if (!metadata[i].name || !metadata[i].value)
            return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: metadata[%d] has no %s", function, i,
                           metadata[i].name ? "value" : "name");
    MT_TRY(mti_host_new(ctx, sizeof *w, &memory));
    w = (mt_safetensors_writer *)memory;
    w->file.fd = -1;
    snprintf(w->path, sizeof w->path, "%s", path);
    mti_header_begin(ctx, w);
    for (i = 0; i < count; i++) mti_header_member(ctx, w, metadata[i].name, metadata[i].value);
    mti_header_text(ctx, w, "}");
    *out = w;
    return MT_SUCCESS;
}

MT_API mt_status mt_safetensors_add(mt_context *ctx, mt_safetensors_writer *writer, const char *name, const char *dtype,
                                    int dims, const int64_t *shape) {
    static const char *const function = "mt_safetensors_add";
    int64_t bits;
    int type, i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!writer || !name || !dtype || (dims > 0 && !shape))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function,
                       !writer ? "writer"
                       : !name ? "name"
                       : dtype ? "shape"
                               : "dtype");
    if (writer->is_begun)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%.100s' comes after data; add all tensors first", function, name);
    type = mti_safetensors_dtype(dtype);
    if (type < 0) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%.100s' has dtype '%.20s'", function, name, dtype);
    if (dims < 0 || dims > MT_SAFETENSORS_DIMS)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%.100s' has %d dimensions, must have 0 to %d", function, name, dims,
                       MT_SAFETENSORS_DIMS);
    for (i = 0; i < dims; i++)
        if (shape[i] < 0)
            return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%.100s' has size %lld in dimension %d", function, name,
                           (long long)shape[i], i);
    bits = mti_shape_bits(type, dims, shape);
    if (bits < 0 || bits / 8 > INT64_MAX / 2 - writer->data_bytes)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the shape of '%.100s' overflows", function, name);
    if (bits % 8 != 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%.100s' has %lld bits, must have whole bytes", function, name,
                       (long long)bits);
    mti_header_tensor(ctx, writer, name, dtype, dims, shape, bits / 8);
    return writer->status;
}

MT_API mt_status mt_safetensors_write(mt_context *ctx, mt_safetensors_writer *writer, const void *data, size_t bytes) {
    static const char *const function = "mt_safetensors_write";
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!writer || (bytes > 0 && !data))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, writer ? "data" : "writer");
    if ((uint64_t)bytes > (uint64_t)(writer->data_bytes - writer->written))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %zu bytes, but the tensors of %s have %lld more", function, bytes,
                       writer->path, (long long)(writer->data_bytes - writer->written));
    MT_TRY(mti_writer_begin(ctx, writer));
    mti_file_put(&writer->file, data, bytes);
    writer->written += (int64_t)bytes;
    return writer->file.error ? mti_io_error(ctx, writer->file.path, "write it", writer->file.error) : MT_SUCCESS;
}

MT_API mt_status mt_safetensors_finish(mt_context *ctx, mt_safetensors_writer *writer) {
    static const char *const function = "mt_safetensors_finish";
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!writer) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: writer is NULL", function);
    if (writer->written < writer->data_bytes)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the tensors of %s have %lld bytes, but %lld were written", function,
                       writer->path, (long long)writer->data_bytes, (long long)writer->written);
    MT_TRY(mti_writer_begin(ctx, writer));
    if (writer->file.fd < 0) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s was finished before", function, writer->path);
    mti_file_sync(&writer->file, 1);
    if (writer->file.error) return mti_io_error(ctx, writer->file.path, "write it", writer->file.error);
    if (!mti_is_at(writer->file.fd, writer->file.path)) /* on a file system without locks */
        return mt_fail(ctx, MT_ERR_IO, "%s: another writer has replaced or removed it", writer->file.path);
    if (rename(writer->file.path, writer->path) != 0)
        return mti_io_error(ctx, writer->path, "rename a file to it", errno);
    close(writer->file.fd); /* now, because its lock has kept others away from the name */
    writer->file.fd = -1;
    return mti_parent_sync(ctx, writer->path);
}

MT_API void mt_safetensors_destroy(mt_safetensors_writer *writer) {
    if (!writer) return;
    if (writer->file.fd >= 0) {
        if (writer->process == getpid() && mti_is_at(writer->file.fd, writer->file.path)) unlink(writer->file.path);
        close(writer->file.fd);
    }
    mti_header_free(writer);
    mt_host_free(writer);
}

/* -- several files of one model -- */

/* metadata key of the version of the library that wrote a file */
#define MTI_VERSION_KEY "megatron"

struct mt_safetensors_set {
    mt_safetensors **files;
    int count, capacity;
    int64_t tensors;        /* in all files */
    char path[MT_PATH_MAX]; /* of the file, or of the index */
};

static void mti_set_close(mt_safetensors_set *b) {
    while (b->count > 0) mt_safetensors_close(b->files[--b->count]);
    mt_host_free(b->files);
    memset(b, 0, sizeof *b);
}

MT_API const mt_safetensors_tensor *mt_safetensors_set_find(const mt_safetensors_set *set, const char *name) {
    const mt_safetensors_tensor *found = NULL;
    int i;
    for (i = 0; set && i < set->count && !found; i++) found = mt_safetensors_find(set->files[i], name);
    return found;
}

MT_API const mt_safetensors *mt_safetensors_set_file(const mt_safetensors_set *set, int index) {
    return set && index >= 0 && index < set->count ? set->files[index] : NULL;
}

/* Returns a number that grows with the version "1.2.3", or -1 when text is not a version. */
static int64_t mti_version_number(const char *text) {
    int64_t number = 0, part;
    int i, digits;
    for (i = 0; i < 3; i++) {
        part = 0;
        for (digits = 0; *text >= '0' && *text <= '9' && digits < 6; digits++) part = 10 * part + (*text++ - '0');
        if (digits == 0 || *text++ != (i < 2 ? '.' : 0)) return -1;
        number = 1000000 * number + part;
    }
    return number;
}

/* Returns an error when a newer version of the library wrote the file. needed = 1: also when the file has no
   version. */
static mt_status mti_version_check(mt_context *ctx, const mt_safetensors *s, int needed) {
    const char *theirs = mt_safetensors_metadata(s, MTI_VERSION_KEY);
    int64_t number = theirs ? mti_version_number(theirs) : 0;
    if (!theirs && !needed) return MT_SUCCESS;
    if (!theirs) return mt_fail(ctx, MT_ERR_DATA, "%s: its metadata has no " MTI_VERSION_KEY, s->path);
    if (number < 0)
        return mt_fail(ctx, MT_ERR_DATA,
                       "%s: its metadata has " MTI_VERSION_KEY " '%.40s', must be a version such as " MT_VERSION,
                       s->path, theirs);
    if (number <= mti_version_number(MT_VERSION)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA,
                   "%s: was written by megatron.h %.40s, this is " MT_VERSION ": it reads files of "
                   "its own version and of older ones",
                   s->path, theirs);
}

/* Opens a file and adds it to the set. A tensor that is also in another file is an error. */
static mt_status mti_set_add(mt_context *ctx, mt_safetensors_set *b, const char *directory, const char *name) {
    char path[MT_PATH_MAX];
    void *list = b->files;
    mt_safetensors *added;
    mt_status status;
    int i;
    MT_TRY(mti_path(ctx, directory, name, path, sizeof path));
    MT_TRY(mti_reserve(ctx, &list, b->count, &b->capacity, sizeof *b->files));
    b->files = (mt_safetensors **)list;
    MT_TRY(mti_safetensors_new(ctx, directory, name, path, &b->files[b->count]));
    added = b->files[b->count];
    status = mti_version_check(ctx, added, 0);
    if (status != MT_SUCCESS) {
        mt_safetensors_close(added);
        return status;
    }
    for (i = 0; b->count > 0 && i < mt_safetensors_count(added); i++)
        if (mt_safetensors_set_find(b, mt_safetensors_at(added, i)->name)) {
            status = mt_fail(ctx, MT_ERR_DATA, "%s: '%.100s' is in another file, too", path,
                             mt_safetensors_at(added, i)->name);
            mt_safetensors_close(added);
            return status;
        }
    b->tensors += mt_safetensors_count(added);
    b->count++;
    return MT_SUCCESS;
}

static const char *mti_file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Handles one entry of an index: opens the file if it is not open yet, and checks that it has the tensor. */
static mt_status mti_set_entry(mt_context *ctx, mt_safetensors_set *b, const char *directory, const char *tensor,
                               const char *file) {
    int i;
    for (i = 0; i < b->count && strcmp(mti_file_name(b->files[i]->path), file) != 0; i++) continue;
    if (i == b->count) {
        if (!file[0] || strchr(file, '/') || file[0] == '.')
            return mt_fail(ctx, MT_ERR_DATA, "%s: '%.100s' is not the name of a file beside it", b->path, file);
        MT_TRY(mti_set_add(ctx, b, directory, file));
    }
    if (mt_safetensors_find(b->files[i], tensor)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA, "%s: '%.100s' is not in %.100s", b->path, tensor, file);
}

/* Reads the weight_map of an index. text is a buffer of `capacity` bytes, enough for any string of the index. */
static mt_status mti_set_entries(mt_context *ctx, mt_safetensors_set *b, const char *directory, mti_json *j, char *text,
                                 size_t capacity, int64_t *entries) {
    char file[256];
    int count = 0;
    mti_json_take(j, '{', "weight_map is not an object");
    while (mti_json_next(j, &count, '}')) {
        mti_json_string(j, text, capacity);
        mti_json_take(j, ':', "a colon is missing");
        if (mti_json_string(j, file, sizeof file) >= sizeof file) mti_json_fail(j, "the name of a file is too long");
        if (j->error) break;
        MT_TRY(mti_set_entry(ctx, b, directory, text, file));
        ++*entries;
    }
    return MT_SUCCESS;
}

/* Reads an index and opens its files. text and capacity are those of mti_set_entries. */
static mt_status mti_set_index(mt_context *ctx, mt_safetensors_set *b, const char *directory, mti_json *j, char *text,
                               size_t capacity) {
    int count = 0;
    int64_t entries = 0;
    mti_json_take(j, '{', "it does not begin with '{'");
    while (mti_json_next(j, &count, '}')) {
        mti_json_string(j, text, capacity);
        mti_json_take(j, ':', "a colon is missing");
        if (!j->error && strcmp(text, "weight_map") == 0)
            MT_TRY(mti_set_entries(ctx, b, directory, j, text, capacity, &entries));
        else mti_json_skip(j, 1);
    }
    mti_json_end(j);
    MT_TRY(mti_json_status(ctx, j, b->path, "JSON"));
    if (entries == b->tensors && entries > 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA, "%s: names %lld tensors, its files have %lld", b->path, (long long)entries,
                   (long long)b->tensors);
}

/* Opens the files of the index DIRECTORY/NAME, whose path is b->path. */
static mt_status mti_set_open_index(mt_context *ctx, mt_safetensors_set *b, const char *directory, const char *name) {
    void *json, *text = NULL;
    size_t bytes;
    mti_json j;
    mt_status status = mti_text_read(ctx, directory, name, b->path, MTI_TEXT_MAX, &json, &bytes);
    if (status == MT_SUCCESS) status = mti_host_new(ctx, bytes + 1, &text);
    if (status == MT_SUCCESS) status = mti_keys_once(ctx, b->path, json, bytes);
    if (status == MT_SUCCESS) {
        j = mti_json_begin(json, bytes);
        status = mti_set_index(ctx, b, directory, &j, (char *)text, bytes + 1);
    }
    mt_host_free(json);
    mt_host_free(text);
    return status;
}

/* Opens the single file or the files of the index. The caller closes b, also after an error. */
static mt_status mti_set_open(mt_context *ctx, const char *directory, const char *stem, mt_safetensors_set *b) {
    char name[64];
    memset(b, 0, sizeof *b);
    if (strlen(stem) > 40)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s/%.40s...: a stem has at most 40 characters", directory, stem);
    snprintf(name, sizeof name, "%s.safetensors", stem);
    MT_TRY(mti_path(ctx, directory, name, b->path, sizeof b->path));
    if (mti_folder_has(b->path)) return mti_set_add(ctx, b, directory, name);
    snprintf(name, sizeof name, "%s.safetensors.index.json", stem);
    MT_TRY(mti_path(ctx, directory, name, b->path, sizeof b->path));
    if (mti_folder_has(b->path)) return mti_set_open_index(ctx, b, directory, name);
    return mt_fail(ctx, MT_ERR_IO, "%s: has neither %s.safetensors nor its index", directory, stem);
}

MT_API mt_status mt_safetensors_set_open(mt_context *ctx, const char *directory, const char *stem,
                                         mt_safetensors_set **out) {
    void *memory;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!directory || !stem || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_safetensors_set_open: %s is NULL",
                       !directory ? "directory"
                       : !stem    ? "stem"
                                  : "out");
    *out = NULL;
    MT_TRY(mti_host_new(ctx, sizeof **out, &memory));
    status = mti_set_open(ctx, directory, stem, (mt_safetensors_set *)memory);
    if (status == MT_SUCCESS) *out = (mt_safetensors_set *)memory;
    else mt_safetensors_set_close((mt_safetensors_set *)memory);
    return status;
}

MT_API void mt_safetensors_set_close(mt_safetensors_set *set) {
    if (set) mti_set_close(set);
    mt_host_free(set);
}

/* ---- >>fields ---------------------------------------------------------------------------------------------------- */

/* Writes a number in scientific notation with `digits` digits after the decimal point, which is a point in every
   locale. */
static void mti_number_text(double x, int digits, char *text) {
    snprintf(text, MT_FIELD_TEXT_MAX, "%.*e", digits, x);
    if (strchr(text, 'e')) mt_decimal_point(text); /* no e: x is not finite */
}

MT_API void mt_field_text(const mt_field *field, char text[MT_FIELD_TEXT_MAX]) {
    int64_t i = 0;
    double d = 0;
    float x = 0;
    int n = 0;
    if (!text) return;
    text[0] = 0;
    if (!field || !field->value) return;
    switch (field->kind) {
    case MT_FIELD_F32:
        memcpy(&x, field->value, sizeof x);
        mti_number_text((double)x, 8, text);
        return;
    case MT_FIELD_F64:
        memcpy(&d, field->value, sizeof d);
        mti_number_text(d, 16, text);
        return;
    case MT_FIELD_INT:
    case MT_FIELD_BOOL:
        memcpy(&n, field->value, sizeof n);
        snprintf(text, MT_FIELD_TEXT_MAX, "%d", n);
        return;
    case MT_FIELD_I64:
    case MT_FIELD_U64:
        memcpy(&i, field->value, sizeof i);
        if (field->kind == MT_FIELD_U64) snprintf(text, MT_FIELD_TEXT_MAX, "%llu", (unsigned long long)i);
        else snprintf(text, MT_FIELD_TEXT_MAX, "%lld", (long long)i);
        return;
    case MT_FIELD_TEXT: return; /* may be longer than text; callers use the value itself */
    }
}

#define MTI_FIELD_WORDS "MT_FIELD_I64 MT_FIELD_U64 MT_FIELD_INT MT_FIELD_F32 MT_FIELD_F64 MT_FIELD_BOOL MT_FIELD_TEXT"

/* Checks that every field has a name, a value and a kind, and a text a size. */
static mt_status mti_fields_check(mt_context *ctx, const char *function, const mt_field *fields, int count) {
    int i;
    for (i = 0; i < count; i++) {
        const mt_field *f = &fields[i];
        if (!f->name || !f->name[0]) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: fields[%d] has no name", function, i);
        if (!f->value) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%.100s': value is NULL", function, f->name);
        MT_TRY(mt_check_enum(ctx, function, f->name, "kind", (int)f->kind, MTI_FIELD_WORDS));
        if (f->kind == MT_FIELD_TEXT && f->bytes == 0)
            return mt_check_integer(ctx, function, f->name, "bytes", 0, 1, INT64_MAX);
    }
    return MT_SUCCESS;
}

/* Writes a number to `value`, as a float or a double. Returns 0, and writes 0, when it is not in the range of the
   field's kind. */
static int mti_field_store_number(const mt_field *f, double number, void *value) {
    double limit = f->kind == MT_FIELD_F32 ? (double)FLT_MAX : DBL_MAX;
    int fits = number >= -limit && number <= limit;
    float x = f->kind == MT_FIELD_F32 && fits ? (float)number : 0.0f;
    if (!fits) number = 0;
    if (f->kind == MT_FIELD_F32) memcpy(value, &x, sizeof x);
    else memcpy(value, &number, sizeof number);
    return fits;
}

/* Writes a whole number, given as 64 bits, to `value`. Returns 0 when an int cannot hold it. */
static int mti_field_store_whole(const mt_field *f, uint64_t whole, void *value) {
    int n = (int)(int64_t)whole;
    if (f->kind == MT_FIELD_INT || f->kind == MT_FIELD_BOOL) memcpy(value, &n, sizeof n);
    else memcpy(value, &whole, sizeof whole);
    return (f->kind != MT_FIELD_INT && f->kind != MT_FIELD_BOOL) || n == (int64_t)whole;
}

/* Parses the text of a value and writes it to `value`. Returns 0 when it is not a value of the field's kind; `value`
   may then have changed. */
static int mti_field_parse(const mt_field *f, const char *text, void *value) {
    int negative = f->kind != MT_FIELD_U64 && *text == '-';
    uint64_t whole, most;
    if (f->kind == MT_FIELD_TEXT) {
        if (strlen(text) >= f->bytes) return 0;
        memcpy(value, text, strlen(text) + 1);
        return 1;
    }
    if (f->kind == MT_FIELD_F32 || f->kind == MT_FIELD_F64) {
        mti_json j = mti_json_begin(text, strlen(text));
        int fits = mti_field_store_number(f, mti_json_number(&j), value);
        mti_json_end(&j);
        return !j.error && fits;
    }
    most = f->kind == MT_FIELD_U64 ? UINT64_MAX : (uint64_t)INT64_MAX + (uint64_t)negative; /* -2^63, but not 2^63 */
    if (!mt_parse_whole(text + negative, most, &whole)) return 0;
    return mti_field_store_whole(f, negative ? 0 - whole : whole, value);
}

static int mti_field_in_range(const mt_field *f, const void *value) {
    int64_t x = 0, high = f->kind == MT_FIELD_BOOL ? 1 : f->high;
    int n;
    if (f->kind == MT_FIELD_I64) memcpy(&x, value, sizeof x);
    else if (f->kind == MT_FIELD_INT || f->kind == MT_FIELD_BOOL) {
        memcpy(&n, value, sizeof n);
        x = n;
    } else return 1;
    return (f->low == 0 && high == 0) || (x >= f->low && x <= high);
}

/* Returns 1 when the value of a field can be read again after it is written. */
static int mti_field_is_valid(const mt_field *f) {
    double d = 0;
    float x = 0;
    if (f->kind == MT_FIELD_TEXT) return memchr(f->value, 0, f->bytes) != NULL;
    if (f->kind == MT_FIELD_F32) memcpy(&x, f->value, sizeof x);
    if (f->kind == MT_FIELD_F64) memcpy(&d, f->value, sizeof d);
    return x >= -FLT_MAX && x <= FLT_MAX && d >= -DBL_MAX && d <= DBL_MAX && mti_field_in_range(f, f->value);
}

#define MTI_WANTED_MAX 80

/* Writes what the value of a field must be, for an error message. */
static void mti_field_wanted(const mt_field *f, char wanted[MTI_WANTED_MAX]) {
    int64_t low = f->low, high = f->high;
    if (low == 0 && high == 0) {
        low = f->kind == MT_FIELD_INT ? INT32_MIN : INT64_MIN;
        high = f->kind == MT_FIELD_INT ? INT32_MAX : INT64_MAX;
    }
    snprintf(wanted, MTI_WANTED_MAX, "a finite number");
    if (f->kind == MT_FIELD_U64)
        snprintf(wanted, MTI_WANTED_MAX, "a whole number from 0 to %llu", (unsigned long long)UINT64_MAX);
    else if (f->kind == MT_FIELD_TEXT) snprintf(wanted, MTI_WANTED_MAX, "a text of at most %zu bytes", f->bytes - 1);
    else if (f->kind == MT_FIELD_BOOL) snprintf(wanted, MTI_WANTED_MAX, "0 or 1");
    else if (f->kind == MT_FIELD_I64 || f->kind == MT_FIELD_INT)
        snprintf(wanted, MTI_WANTED_MAX, "a whole number from %lld to %lld", (long long)low, (long long)high);
}

MT_API mt_status mt_safetensors_refuse(mt_context *ctx, const mt_safetensors *file, const char *name,
                                       const char *wanted) {
    const char *value;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!file || !name || !wanted)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_safetensors_refuse: %s is NULL",
                       !file   ? "file"
                       : !name ? "name"
                               : "wanted");
    value = mt_safetensors_metadata(file, name);
    if (!value) return mt_fail(ctx, MT_ERR_DATA, "%s: its metadata has no %s", file->path, name);
    return mt_fail(ctx, MT_ERR_DATA, "%s: its metadata has %s '%.40s', must be %s", file->path, name, value, wanted);
}

/* Returns the error for a value that is not of the field's kind or range. */
static mt_status mti_field_refuse(mt_context *ctx, const mt_safetensors *file, const mt_field *f) {
    char wanted[MTI_WANTED_MAX];
    mti_field_wanted(f, wanted);
    return mt_safetensors_refuse(ctx, file, f->name, wanted);
}

MT_API mt_status mt_safetensors_fields(mt_context *ctx, const mt_safetensors *file, const mt_field *fields, int count) {
    const char *text;
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!file || (!fields && count > 0))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_safetensors_fields: %s is NULL", file ? "fields" : "file");
    MT_TRY(mti_fields_check(ctx, "mt_safetensors_fields", fields, count));
    for (i = 0; i < count; i++) {
        text = mt_safetensors_metadata(file, fields[i].name);
        if (!text || !mti_field_parse(&fields[i], text, fields[i].value) ||
            !mti_field_in_range(&fields[i], fields[i].value))
            return mti_field_refuse(ctx, file, &fields[i]);
    }
    return MT_SUCCESS;
}

/* Reads a JSON value into a field. */
static void mti_json_value(mti_json *j, const mt_field *f) {
    int fits = 1, on = 0;
    if (f->nullable && mti_json_word(j, "null")) return;
    if (f->kind == MT_FIELD_TEXT) mti_json_string(j, (char *)f->value, f->bytes);
    else if (f->kind == MT_FIELD_F32 || f->kind == MT_FIELD_F64)
        fits = mti_field_store_number(f, mti_json_number(j), f->value);
    else if (f->kind != MT_FIELD_BOOL)
        fits = mti_field_store_whole(f, mti_json_up_to(j, f->kind == MT_FIELD_U64 ? UINT64_MAX : (uint64_t)INT64_MAX),
                                     f->value);
    else if (mti_json_word(j, "true")) on = 1;
    else if (!mti_json_word(j, "false")) mti_json_fail(j, "true or false is missing");
    if (f->kind == MT_FIELD_BOOL) memcpy(f->value, &on, sizeof on);
    if (!fits) mti_json_fail(j, "a number is too large");
}

/* Returns 1 when there is a field for an element of the list whose elements are named `path`0, `path`1, ... */
static int mti_json_is_list(const char *path, const mt_field *fields, int fields_count) {
    size_t n = strlen(path);
    int i;
    for (i = 0; i < fields_count; i++)
        if (strncmp(fields[i].name, path, n) == 0 && fields[i].name[n] >= '0' && fields[i].name[n] <= '9') return 1;
    return 0;
}

static const mt_field *mti_json_members(mti_json *j, const char *path, const mt_field *fields, int fields_count);

/* Reads the elements of a list. The name of an element in messages and fields is `path` and its number. */
static const mt_field *mti_json_elements(mti_json *j, const char *path, const mt_field *fields, int fields_count) {
    char name[192];
    int count = 0, i;
    mti_json_take(j, '[', "it does not begin with '['");
    while (mti_json_next(j, &count, ']')) {
        snprintf(name, sizeof name, "%s%d", path, count - 1);
        for (i = 0; i < fields_count && strcmp(name, fields[i].name) != 0; i++) continue;
        if (i < fields_count) {
            mti_json_value(j, &fields[i]);
            if (j->error) return &fields[i];
        } else if (mti_json_peek(j) == '{' && !path[0]) {
            const mt_field *inner;
            snprintf(name, sizeof name, "%d.", count - 1);
            inner = mti_json_members(j, name, fields, fields_count);
            if (inner) return inner;
        } else mti_json_skip(j, 1);
    }
    return NULL;
}

/* Reads the members of an object whose name in messages and fields begins with `path`, as "a." */
static const mt_field *mti_json_members(mti_json *j, const char *path, const mt_field *fields, int fields_count) {
    char name[160];
    size_t begin = strlen(path);
    int count = 0, i;
    memcpy(name, path, begin);
    mti_json_take(j, '{', "it does not begin with '{'");
    while (mti_json_next(j, &count, '}')) {
        size_t length = begin + mti_json_string(j, name + begin, sizeof name - begin - 2);
        const mt_field *inner = NULL;
        mti_json_take(j, ':', "a colon is missing");
        if (mti_json_peek(j) == '[' && length < sizeof name - 3) {
            memcpy(name + length, ".", 2);
            i = mti_json_is_list(name, fields, fields_count);
            inner = i ? mti_json_elements(j, name, fields, fields_count) : NULL;
            if (inner) return inner;
            if (i) continue;
            name[length] = 0;
        }
        for (i = 0; i < fields_count; i++)
            if (length < sizeof name - 3 && strcmp(name, fields[i].name) == 0) break;
        if (i < fields_count) {
            mti_json_value(j, &fields[i]);
            if (j->error) return &fields[i];
            continue;
        }
        if (length < sizeof name - 3) {
            memcpy(name + length, ".", 2);
            for (i = 0; i < fields_count && strncmp(fields[i].name, name, length + 1) != 0; i++) continue;
        }
        if (i == fields_count) mti_json_skip(j, 1);
        else if (mti_json_peek(j) == '{') inner = mti_json_members(j, name, fields, fields_count);
        else if (!mti_json_word(j, "null")) {
            inner = &fields[i];
            j->named = length;
            i = mti_json_is_list(name, fields, fields_count);
            mti_json_fail(j, i ? "a list is missing" : "an object is missing");
        }
        if (inner) return inner;
    }
    return NULL;
}

/* Reads the fields of a JSON object or list. text is the whole file. */
static mt_status mti_json_object(mt_context *ctx, const char *path, const void *text, size_t bytes,
                                 const mt_field *fields, int fields_count) {
    mti_json j = mti_json_begin(text, bytes);
    int is_list = mti_json_peek(&j) == '[' && mti_json_is_list("", fields, fields_count);
    const mt_field *wrong;
    char value[MT_FIELD_TEXT_MAX];
    int i;
    MT_TRY(mti_keys_once(ctx, path, text, bytes));
    wrong = is_list ? mti_json_elements(&j, "", fields, fields_count) : mti_json_members(&j, "", fields, fields_count);
    mti_json_end(&j);
    if (wrong)
        return mt_fail(ctx, MT_ERR_DATA, "%s: JSON, byte %lld: %.*s: %s", path, (long long)(j.at - j.start),
                       (int)(j.named ? j.named : strlen(wrong->name)), wrong->name, j.error);
    MT_TRY(mti_json_status(ctx, &j, path, "JSON"));
    for (i = 0; i < fields_count; i++)
        if (!mti_field_in_range(&fields[i], fields[i].value)) {
            mt_field_text(&fields[i], value);
            return mt_fail(ctx, MT_ERR_DATA, "%s: %s is %s, must be from %lld to %lld", path, fields[i].name, value,
                           (long long)fields[i].low, (long long)fields[i].high);
        }
    return MT_SUCCESS;
}

/* Reads the bracket or the comma, and the member or element after it. Returns 0 at the end and after an error. */
static int mti_json_step(mti_json *j, char *name, size_t bytes, mt_json_part *value) {
    int c = mti_json_peek(j);
    if (c != '{' && c != '[' && c != ',') return 0;
    j->at++;
    c = mti_json_peek(j);
    value->text = (const char *)j->at;
    if (c == '"') mti_json_string(j, name, bytes);
    if (c == '"' && mti_json_peek(j) == ':') {
        j->at++;
        mti_json_peek(j);
        value->text = (const char *)j->at;
        mti_json_skip(j, 1);
    } else if (c != '"') mti_json_skip(j, 1);
    value->bytes = (size_t)((const char *)j->at - value->text);
    return !j->error;
}

MT_API int mt_json_next(mt_json_part *rest, char *name, size_t bytes, mt_json_part *value) {
    mti_json j;
    if (!rest || !rest->text || !name || bytes == 0 || !value) return 0;
    j = mti_json_begin(rest->text, rest->bytes);
    name[0] = 0;
    if (!mti_json_step(&j, name, bytes, value)) return 0;
    rest->bytes -= (size_t)((const char *)j.at - rest->text);
    rest->text = (const char *)j.at;
    return 1;
}

MT_API mt_status mt_json_parse(mt_context *ctx, const char *where, const char *text, const mt_field *fields,
                               int count) {
    if (!where || !text || (!fields && count > 0))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_json_parse: %s is NULL", !where ? "where" : !text ? "text" : "fields");
    MT_TRY(mti_fields_check(ctx, "mt_json_parse", fields, count));
    return mti_json_object(ctx, where, text, strlen(text), fields, count);
}

MT_API int mt_json_find(const char *text, const char *name, size_t *from, size_t *to) {
    mti_json j;
    char key[128];
    int count = 0, found = 0;
    if (!text || !name || !from || !to) return 0;
    j = mti_json_begin(text, strlen(text));
    mti_json_take(&j, '{', "it does not begin with '{'");
    while (mti_json_next(&j, &count, '}')) {
        size_t length = mti_json_string(&j, key, sizeof key), begin;
        mti_json_take(&j, ':', "a colon is missing");
        mti_json_peek(&j);
        begin = (size_t)(j.at - j.start);
        mti_json_skip(&j, 1);
        if (length >= sizeof key || strcmp(key, name) != 0) continue;
        found = 1;
        *from = begin;
        *to = (size_t)(j.at - j.start);
    }
    mti_json_end(&j);
    return found && !j.error;
}

/* Reads the text and the fields of a file. The caller frees *text, also after an error. */
static mt_status mti_json_file(mt_context *ctx, const char *directory, const char *name, size_t most,
                               const mt_field *fields, int count, void **text, int *exists) {
    char path[MT_PATH_MAX];
    size_t bytes;
    *text = NULL;
    MT_TRY(mti_path(ctx, directory, name, path, sizeof path));
    if (exists) *exists = mti_folder_has(path);
    if (exists && !*exists) return MT_SUCCESS;
    MT_TRY(mti_text_read(ctx, directory, name, path, most, text, &bytes));
    return mti_json_object(ctx, path, *text, bytes, fields, count);
}

MT_API mt_status mt_json_read(mt_context *ctx, const char *directory, const char *name, const mt_field *fields,
                              int count, int *exists) {
    void *text;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!directory || !name || (!fields && count > 0))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_json_read: %s is NULL",
                       !directory ? "directory"
                       : !name    ? "name"
                                  : "fields");
    MT_TRY(mti_fields_check(ctx, "mt_json_read", fields, count));
    status = mti_json_file(ctx, directory, name, MTI_TEXT_MAX, fields, count, &text, exists);
    mt_host_free(text);
    return status;
}

MT_API mt_status mt_json_text(mt_context *ctx, const char *directory, const char *name, size_t most, char **text,
                              int *exists) {
    void *memory;
    mt_status status;
    if (text) *text = NULL;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!directory || !name || !text)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_json_text: %s is NULL",
                       !directory ? "directory"
                       : !name    ? "name"
                                  : "text");
    status = mti_json_file(ctx, directory, name, most < MTI_TEXT_MAX ? most : MTI_TEXT_MAX, NULL, 0, &memory, exists);
    if (status == MT_SUCCESS) *text = (char *)memory;
    else mt_host_free(memory);
    return status;
}

/* ---- >>checkpoint ------------------------------------------------------------------------------------------------ */

/* Limits of numbers that are read from files, so that sums and products do not overflow. 2^48 steps of 1 us take nine
   years. */
#define MTI_STEPS_MAX ((int64_t)1 << 48)
#define MTI_POSITION_MAX ((int64_t)1 << 62)

enum { MTI_STATE_FIELDS = 13 };

/* Lists the fields of the training state, as they are in the metadata of files. A loss scaler of zeros means that the
   run has none. */
static void mti_state_fields(mt_training_state *s, mt_field *out) {
    mt_loss_scaler *l = &s->scaler;
    const mt_field list[MTI_STATE_FIELDS] = {
        {"step", MT_FIELD_I64, &s->step, 0, MTI_STEPS_MAX, 0, 0, 0},
        {"seed", MT_FIELD_U64, &s->seed, 0, 0, 0, 0, 0},
        {"position", MT_FIELD_I64, &s->position, 0, MTI_POSITION_MAX, 0, 0, 0},
        {"loss_scaler.initial_scale", MT_FIELD_F32, &l->desc.initial_scale, 0, 0, 0, 0, 0},
        {"loss_scaler.min_scale", MT_FIELD_F32, &l->desc.min_scale, 0, 0, 0, 0, 0},
        {"loss_scaler.growth", MT_FIELD_F32, &l->desc.growth, 0, 0, 0, 0, 0},
        {"loss_scaler.backoff", MT_FIELD_F32, &l->desc.backoff, 0, 0, 0, 0, 0},
        {"loss_scaler.growth_interval", MT_FIELD_INT, &l->desc.growth_interval, 0, INT32_MAX, 0, 0, 0},
        {"loss_scaler.hysteresis", MT_FIELD_INT, &l->desc.hysteresis, 0, INT32_MAX, 0, 0, 0},
        {"loss_scaler.scale", MT_FIELD_F32, &l->scale, 0, 0, 0, 0, 0},
        {"loss_scaler.good_steps", MT_FIELD_INT, &l->good_steps, 0, INT32_MAX, 0, 0, 0},
        {"loss_scaler.overflows", MT_FIELD_INT, &l->overflows, 0, INT32_MAX / 2, 0, 0, 0},
        {"loss_scaler.skipped", MT_FIELD_I64, &l->skipped, 0, MTI_STEPS_MAX, 0, 0, 0}};
    memcpy(out, list, sizeof list);
}

static mt_field mti_optimizer_field(mt_optimizer *optimizer) {
    const mt_field field = {"optimizer_step", MT_FIELD_I64, &optimizer->step, 0, MTI_STEPS_MAX, 0, 0, 0};
    return field;
}

/* Returns 1 when all fields of a scaler are 0. memcmp would also compare the padding of the struct, which the caller
   need not set. */
static int mti_scaler_is_none(const mt_loss_scaler *s) {
    const mt_loss_scaler_desc *d = &s->desc;
    return d->initial_scale == 0 && d->min_scale == 0 && d->growth == 0 && d->backoff == 0 && d->growth_interval == 0 &&
           d->hysteresis == 0 && s->scale == 0 && s->good_steps == 0 && s->overflows == 0 && s->skipped == 0;
}

/* Returns the name of a field of the loss scaler with a value that no run can produce, or NULL. */
static const char *mti_state_fault(const mt_training_state *state) {
    const mt_loss_scaler *scaler = &state->scaler;
    if (mti_scaler_is_none(scaler)) return NULL;
    return mti_scaler_fault(scaler);
}

/* Returns the field of this name, which is one of the list. */
static const mt_field *mti_state_field(const mt_field fields[MTI_STATE_FIELDS], const char *name) {
    while (strcmp(fields->name, name) != 0) fields++;
    return fields;
}

static mt_status mti_scaler_check(mt_context *ctx, const char *function, const mt_loss_scaler *scaler) {
    const char *fault = mti_scaler_fault(scaler);
    mt_field fields[MTI_STATE_FIELDS];
    const mt_field *field;
    mt_training_state state;
    char text[MT_FIELD_TEXT_MAX];
    if (!fault) return MT_SUCCESS;
    memset(&state, 0, sizeof state);
    state.scaler = *scaler;
    mti_state_fields(&state, fields);
    field = mti_state_field(fields, fault);
    if (field->kind == MT_FIELD_F32) mt_f32_digits(*(const float *)field->value, text);
    else mt_field_text(field, text);
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: scaler.%s%s is %s, must be %s", function,
                   mt_loss_scaler_wanted(fault) ? "desc." : "", fault + strlen("loss_scaler."), text,
                   mti_scaler_wanted(fault));
}

static mt_status mti_state_read(mt_context *ctx, const mt_safetensors *file, mt_training_state *state) {
    mt_field fields[MTI_STATE_FIELDS];
    const char *fault;
    mti_state_fields(state, fields);
    MT_TRY(mt_safetensors_fields(ctx, file, fields, MTI_STATE_FIELDS));
    fault = mti_state_fault(state);
    return fault ? mt_safetensors_refuse(ctx, file, fault, mti_scaler_wanted(fault)) : MT_SUCCESS;
}

/* -- names and layouts -- */

/* A part of a parameter in a tensor of a file. */
typedef struct mti_slice {
    int param, tensor; /* indices in the registry and in mti_table_map.tensors */
    int row;           /* of the table; -1: the parameter has no row */
    int next;          /* piece of the same tensor, below this one; -1: none */
    int64_t at, count; /* its first row in the tensor; its rows */
    mt_tensor_part part;
} mti_slice;

/* A tensor of a file. */
typedef struct mti_stored {
    int row;            /* the first of the table with its name; -1: the name is that of its parameter */
    int64_t number;     /* in the place of '#'; -1: none */
    int first;          /* its first piece */
    int64_t rows, cols; /* before it is transposed; a vector has cols 1 */
    int vector, transposed;
    int whole; /* 1: it is one parameter, as in the registry */
} mti_stored;

/* Which tensor of the files has which parts of the parameters of this rank's stage. */
typedef struct mti_table_map {
    const mt_tensor_table *table; /* NULL: names and layouts of the registry */
    mti_stored *tensors;          /* in the order of the files */
    mti_slice *pieces;            /* in the order of the parameters */
    int *begin;                   /* the first piece of each parameter, and at the end piece_count */
    int tensor_count, piece_count;
} mti_table_map;

/* -- a checkpoint -- */

struct mt_checkpoint {
    mt_params *params;
    int count; /* of params, when the checkpoint was created */
    mt_optimizer *optimizer;
    int keep;
    mt_checkpoint_format format; /* zeros: no format */
    const void *model;
    mti_table_map own, other; /* of the registry's names; of the table, empty without one */
    mt_field *fields;         /* a copy of mt_checkpoint_desc.fields */
    int field_count;
    /* whole: a parameter in host memory; spare: a tensor of a file that is not one whole parameter, or NULL */
    float *whole, *spare;
    int held;       /* the index of the parameter in whole, or of the tensor in spare; -1: none */
    char *given[2]; /* texts of the files mti_given_names that were loaded last, or NULL */
    void *exchange; /* device memory of MT_ERROR_BYTES, for mti_agree */
    /* file descriptor of the lock, on the first rank after mti_checkpoint_lock; otherwise -1 */
    int lock;
    pid_t process; /* that has taken the lock; a process forked from it may not write */
    char directory[MT_PATH_MAX];
    mt_safetensors_writer writer; /* its file also writes the JSON files */
};

/* Returns 1 when name is the pattern, with a number in the place of '#', which goes to *number (-1: there is none). */
static int mti_pattern_fits(const char *pattern, const char *name, int64_t *number) {
    const char *place = strchr(pattern, '#');
    size_t n = place ? (size_t)(place - pattern) : 0, digits;
    char text[32];
    uint64_t value;
    *number = -1;
    if (!place) return strcmp(pattern, name) == 0;
    if (strncmp(pattern, name, n) != 0) return 0;
    digits = strspn(name + n, "0123456789");
    if (digits == 0 || digits > 18 || (digits > 1 && name[n] == '0')) return 0;
    memcpy(text, name + n, digits);
    text[digits] = 0;
    if (!mt_parse_whole(text, (uint64_t)INT64_MAX, &value)) return 0;
    *number = (int64_t)value;
    return strcmp(place + 1, name + n + digits) == 0;
}

/* Writes the pattern with a number in the place of '#'. */
static void mti_pattern_text(const char *pattern, int64_t number, char *text, size_t bytes) {
    const char *place = strchr(pattern, '#');
    if (!place || number < 0) snprintf(text, bytes, "%s", pattern);
    else snprintf(text, bytes, "%.*s%lld%s", (int)(place - pattern), pattern, (long long)number, place + 1);
}

/* Returns 1 when a row describes a parameter or a part of it, and *number, when its name is `param`. */
static int mti_row_fits(const mt_tensor_table *table, int row, const char *param, int64_t *number) {
    const mt_tensor_name *n = &table->names[row];
    return n->param && !(n->flags & MT_TENSOR_COPY) && mti_pattern_fits(n->param, param, number);
}

/* Returns the row whose tensor a row with MT_TENSOR_COPY repeats, or -1. */
static int mti_row_original(const mt_tensor_table *table, int row) {
    int i;
    for (i = 0; i < table->count; i++)
        if (table->names[i].param && !(table->names[i].flags & MT_TENSOR_COPY) &&
            strcmp(table->names[i].param, table->names[row].param) == 0)
            return i;
    return -1;
}

/* Returns the file's name of a row; bare: without the prefix of the table. */
static const char *mti_row_file(const mt_tensor_table *table, int row, int bare) {
    const char *file = table->names[row].file;
    size_t n = bare && table->prefix ? strlen(table->prefix) : 0;
    return strncmp(file, table->prefix ? table->prefix : "", n) == 0 ? file + n : file;
}

/* Returns the first row of the table with the same file. */
static int mti_row_first(const mt_tensor_table *table, int row) {
    int first = 0;
    while (strcmp(table->names[first].file, table->names[row].file) != 0) first++;
    return first;
}

/* Returns 1 when another row of the table has the same file. */
static int mti_row_is_shared(const mt_tensor_table *table, int row) {
    int i;
    for (i = 0; i < table->count; i++)
        if (i != row && strcmp(table->names[i].file, table->names[row].file) == 0) return 1;
    return 0;
}

/* The rows and columns of a parameter in tables: a parameter of one row is a column. */
static int64_t mti_named_rows(const mt_param *p) { return p->desc.rows == 1 ? p->desc.cols : p->desc.rows; }
static int64_t mti_named_cols(const mt_param *p) { return p->desc.rows == 1 ? 1 : p->desc.cols; }

static mt_status mti_table_check(mt_context *ctx, const mt_tensor_table *table) {
    int i, original;
    if (!table->names || table->count <= 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_create: the table has %d names", table->count);
    for (i = 0; i < table->count; i++) {
        const mt_tensor_name *n = &table->names[i];
        if (!n->file || !n->file[0] || strlen(n->file) > MT_NAME_MAX)
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "mt_checkpoint_create: row %d of the table has no file, or one of more than %d characters",
                           i, MT_NAME_MAX);
        if (strchr(n->file, '#') != strrchr(n->file, '#'))
            return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_create: '%s' has two '#', must have one at most",
                           n->file);
        if (n->param && !strchr(n->param, '#') != !strchr(n->file, '#'))
            return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_create: only one of '%s' and '%s' has a number '#'",
                           n->file, n->param);
        if (!(n->flags & MT_TENSOR_COPY)) continue;
        original = n->param ? mti_row_original(table, i) : -1;
        if (original < 0 || n->part != 0 || table->names[original].part != 0)
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "mt_checkpoint_create: '%s' of the table has MT_TENSOR_COPY, but no other row has the whole "
                           "parameter",
                           n->file);
    }
    return MT_SUCCESS;
}

/* Checks that the part is a part of n rows. */
static int mti_part_is_valid(const mt_tensor_part *x, int64_t n) {
    int64_t zip = x->zip < 0 ? -x->zip : x->zip;
    if (x->unit <= 0 || n % x->unit != 0 || x->first < 0 || x->rows <= 0 || x->first > x->unit - x->rows) return 0;
    return zip == 0 || (zip % 2 == 0 && zip <= x->zip_unit && n / x->unit * x->rows % x->zip_unit == 0);
}

/* Adds a piece to the list of its tensor, which is made when there is none of this name. */
static void mti_map_join(mti_table_map *map, int k, int64_t number) {
    mti_slice *piece = &map->pieces[k];
    int row = piece->row < 0 ? -1 : mti_row_first(map->table, piece->row), *link;
    int t = piece->row >= 0 && mti_row_is_shared(map->table, piece->row) ? map->tensor_count - 1 : -1;
    while (t >= 0 && (map->tensors[t].row != row || map->tensors[t].number != number)) t--;
    if (t < 0) {
        t = map->tensor_count++;
        map->tensors[t].row = row;
        map->tensors[t].number = number;
        map->tensors[t].first = -1;
    }
    piece->tensor = t;
    for (link = &map->tensors[t].first; *link >= 0 && map->pieces[*link].row < piece->row;)
        link = &map->pieces[*link].next;
    piece->next = *link;
    *link = k;
}

/* Adds the piece of parameter i that a row of the table describes; row -1: the whole parameter. */
static mt_status mti_map_piece(mt_context *ctx, const mt_checkpoint *c, mti_table_map *map, int i, int row,
                               int64_t number) {
    const mt_param *p = c->params->list[i];
    int64_t n = mti_named_rows(p);
    mti_slice *piece = &map->pieces[map->piece_count];
    int part = row < 0 ? 0 : map->table->names[row].part;
    memset(piece, 0, sizeof *piece);
    piece->param = i;
    piece->row = row;
    piece->part.unit = piece->part.rows = part == 0 ? n : 0;
    if (part != 0 && !c->format.part)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "mt_checkpoint_create: '%s': table.names[%d].part is %d, must be 0 without "
                       "mt_checkpoint_format.part",
                       p->name, row, part);
    if (part != 0) (c->format.part)(c->model, p, part, &piece->part);
    if (piece->part.rows == 0) return MT_SUCCESS;
    if (!mti_part_is_valid(&piece->part, n))
        return mt_fail(
            ctx, MT_ERR_ARGUMENT,
            "mt_checkpoint_create: part %d of '%s' is rows from %lld on, %lld of each %lld, zip %lld of %lld, "
            "which the %lld rows cannot have",
            part, p->name, (long long)piece->part.first, (long long)piece->part.rows, (long long)piece->part.unit,
            (long long)piece->part.zip, (long long)piece->part.zip_unit, (long long)n);
    piece->count = n / piece->part.unit * piece->part.rows;
    mti_map_join(map, map->piece_count++, number);
    return MT_SUCCESS;
}

/* Checks that the pieces of a parameter have each of its rows once. */
static mt_status mti_map_covers(mt_context *ctx, const mt_checkpoint *c, const mti_table_map *map, int i) {
    const mti_slice *x = &map->pieces[map->begin[i]], *end = &map->pieces[map->piece_count], *y;
    int64_t unit = x->part.unit, rows = 0;
    int apart = 1;
    for (; x < end; x++) {
        rows += x->part.rows;
        if (x->part.unit != unit) apart = 0;
        for (y = x + 1; y < end; y++)
            if (x->part.first < y->part.first + y->part.rows && y->part.first < x->part.first + x->part.rows) apart = 0;
    }
    if (apart && rows == unit) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_create: the parts of '%s' in the table are not each row once",
                   c->params->list[i]->name);
}

/* Computes where the pieces of a tensor are in it, and its shape. */
static int mti_piece_transposed(const mti_table_map *map, const mti_slice *piece) {
    return piece->row >= 0 && (map->table->names[piece->row].flags & MT_TENSOR_TRANSPOSED);
}

static mt_status mti_map_finish(mt_context *ctx, const mt_checkpoint *c, mti_table_map *map, int t) {
    mti_stored *s = &map->tensors[t];
    const mt_param *first = c->params->list[map->pieces[s->first].param];
    const mti_slice *one = &map->pieces[s->first];
    int k, same = 1;
    s->cols = mti_named_cols(first);
    s->vector = first->desc.rows == 1;
    s->transposed = mti_piece_transposed(map, one) && !s->vector;
    for (k = s->first; k >= 0; k = map->pieces[k].next) {
        const mt_param *p = c->params->list[map->pieces[k].param];
        if (mti_piece_transposed(map, &map->pieces[k]) != mti_piece_transposed(map, one))
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "mt_checkpoint_create: the rows of '%s' in the table do not agree on MT_TENSOR_TRANSPOSED",
                           map->table->names[one->row].file);
        map->pieces[k].at = s->rows;
        s->rows += map->pieces[k].count;
        same = same && mti_named_cols(p) == s->cols && (p->desc.rows == 1) == s->vector;
    }
    s->whole = one->next < 0 && one->part.rows == one->part.unit && one->part.zip == 0 && !s->transposed;
    if (same) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_create: '%s' of the table has parts of different widths",
                   map->table->names[s->row].file);
}

/* Finds the tensors of the parameters of this stage. On entry *map is zero. */
static mt_status mti_map_build(mt_context *ctx, const mt_checkpoint *c, const mt_tensor_table *table,
                               mti_table_map *map) {
    int i, r, rows = table ? table->count : 0, pieces = 0;
    int64_t number;
    void *memory;
    map->table = table;
    if (table) MT_TRY(mti_table_check(ctx, table));
    for (i = 0; i < c->count; i++)
        for (r = -1; r < rows; r++) pieces += r < 0 || mti_row_fits(table, r, c->params->list[i]->name, &number);
    MT_TRY(mti_host_new(ctx, (size_t)pieces * sizeof *map->pieces, &memory));
    map->pieces = (mti_slice *)memory;
    MT_TRY(mti_host_new(ctx, (size_t)pieces * sizeof *map->tensors, &memory));
    map->tensors = (mti_stored *)memory;
    MT_TRY(mti_host_new(ctx, (size_t)(c->count + 1) * sizeof *map->begin, &memory));
    map->begin = (int *)memory;
    for (i = 0; i < c->count; i++) {
        map->begin[i] = map->piece_count;
        for (r = 0; r < rows; r++)
            if (mti_row_fits(table, r, c->params->list[i]->name, &number))
                MT_TRY(mti_map_piece(ctx, c, map, i, r, number));
        if (map->piece_count == map->begin[i]) MT_TRY(mti_map_piece(ctx, c, map, i, -1, -1));
        MT_TRY(mti_map_covers(ctx, c, map, i));
    }
    map->begin[c->count] = map->piece_count;
    for (i = 0; i < map->tensor_count; i++) MT_TRY(mti_map_finish(ctx, c, map, i));
    return MT_SUCCESS;
}

static void mti_map_free(mti_table_map *map) {
    mt_host_free(map->tensors);
    mt_host_free(map->pieces);
    mt_host_free(map->begin);
}

/* Returns the row of the parameter that is row r of a piece. */
static int64_t mti_slice_row(const mti_slice *x, int64_t r) {
    int64_t half = (x->part.zip < 0 ? -x->part.zip : x->part.zip) / 2, k = half ? r % x->part.zip_unit : 0;
    if (k < 2 * half) r += (x->part.zip > 0 ? k / 2 + k % 2 * half : k % half * 2 + k / half) - k;
    return r / x->part.rows * x->part.unit + x->part.first + r % x->part.rows;
}

/* Copies a piece between the whole parameter and a tensor of a file, in blocks of 32 x 32, which fit into the cache. */
static void mti_slice_copy(const mti_stored *s, const mti_slice *x, int to_file, float *param, float *tensor) {
    int64_t cols = s->cols, r, c, i, j;
    for (r = 0; r < x->count; r += 32)
        for (c = 0; c < cols; c += 32)
            for (i = r; i < mt_min(r + 32, x->count); i++) {
                float *ours = param + mti_slice_row(x, i) * cols;
                for (j = c; j < mt_min(c + 32, cols); j++) {
                    float *theirs = tensor + (s->transposed ? j * s->rows + x->at + i : (x->at + i) * cols + j);
                    if (to_file) *theirs = ours[j];
                    else ours[j] = *theirs;
                }
            }
}

static int64_t mti_largest_stored(const mti_table_map *map, int all) {
    int64_t most = 0;
    int t;
    for (t = 0; t < map->tensor_count; t++)
        if (all || !map->tensors[t].whole) most = mt_max(most, map->tensors[t].rows * map->tensors[t].cols);
    return most;
}

static mt_status mti_checkpoint_memory(mt_context *ctx, mt_checkpoint *c) {
    int64_t spare = mti_largest_stored(&c->other, 0);
    void *memory;
    MT_TRY(mti_host_new(ctx, (size_t)mti_largest_stored(&c->own, 1) * sizeof(float), &memory));
    c->whole = (float *)memory;
    if (spare > 0) MT_TRY(mti_host_new(ctx, (size_t)spare * sizeof(float), &memory));
    if (spare > 0) c->spare = (float *)memory;
    return mt_context_alloc(ctx, MT_ERROR_BYTES, &c->exchange);
}

/* Returns 1 when the name of a field is already in the metadata: from the library, the format, or one of the first
   `fields` fields. */
static int mti_field_is_taken(const mt_checkpoint *c, const char *name, int fields) {
    static const char *const own[] = {"checksum", "format", MTI_VERSION_KEY, "note", "optimizer_step"};
    mt_training_state none;
    mt_field state[MTI_STATE_FIELDS];
    const char *other;
    char value[MT_FIELD_TEXT_MAX];
    int i;
    for (i = 0; i < (int)(sizeof own / sizeof *own); i++)
        if (strcmp(name, own[i]) == 0) return 1;
    mti_state_fields(&none, state);
    for (i = 0; i < MTI_STATE_FIELDS; i++)
        if (strcmp(name, state[i].name) == 0) return 1;
    for (i = 0; c->format.metadata && (other = (c->format.metadata)(c->model, i, value)) != NULL; i++)
        if (strcmp(name, other) == 0) return 1;
    while (fields-- > 0)
        if (strcmp(name, c->fields[fields].name) == 0) return 1;
    return 0;
}

/* Copies the program's fields to c->fields and checks them. */
static mt_status mti_checkpoint_fields(mt_context *ctx, mt_checkpoint *c, const mt_checkpoint_desc *desc) {
    void *memory;
    int i;
    if (desc->field_count == 0) return MT_SUCCESS;
    MT_TRY(mti_host_new(ctx, (size_t)desc->field_count * sizeof *c->fields, &memory));
    c->fields = (mt_field *)memory;
    c->field_count = desc->field_count;
    memcpy(c->fields, desc->fields, (size_t)c->field_count * sizeof *c->fields);
    MT_TRY(mti_fields_check(ctx, "mt_checkpoint_create", c->fields, c->field_count));
    for (i = 0; i < c->field_count; i++) {
        const mt_field *f = &c->fields[i];
        if (mti_field_is_taken(c, f->name, i))
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "mt_checkpoint_create: fields[%d]: another field is also called '%.100s'", i, f->name);
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_checkpoint_create(mt_context *ctx, mt_params *params, const mt_checkpoint_desc *desc,
                                      mt_checkpoint **out) {
    static const char *const function = "mt_checkpoint_create";
    mt_checkpoint *c;
    void *memory;
    size_t end;
    mt_status status;
    MT_TRY(mti_params_known(ctx, params, function));
    if (!desc || (desc->directory && !desc->directory[0]) || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function,
                       !out   ? "out is NULL"
                       : desc ? "desc.directory is empty"
                              : "desc is NULL");
    *out = NULL;
    if (desc->directory && strlen(desc->directory) > MT_PATH_MAX - 128)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: directory has %zu characters, must have at most %d", function,
                       strlen(desc->directory), MT_PATH_MAX - 128);
    MT_TRY(mt_check_integer(ctx, function, NULL, "keep", desc->keep, 0, INT64_MAX));
    if (desc->optimizer && desc->optimizer->params != params)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the optimizer is not of this registry", function);
    if (desc->model && !desc->format)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: model is set, but format, which it is for, is NULL", function);
    if (desc->field_count < 0 || (desc->field_count > 0) != (desc->fields != NULL))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: field_count is %d, fields is %s", function, desc->field_count,
                       desc->fields ? "not NULL" : "NULL");
    MT_TRY(mti_host_new(ctx, sizeof *c, &memory));
    c = (mt_checkpoint *)memory;
    c->params = params;
    c->count = params->count;
    c->optimizer = desc->optimizer;
    c->keep = desc->keep ? desc->keep : 2;
    if (desc->format) c->format = *desc->format;
    c->model = desc->model;
    c->held = c->writer.file.fd = c->lock = -1;
    snprintf(c->directory, sizeof c->directory, "%s", desc->directory ? desc->directory : "");
    for (end = strlen(c->directory); end > 1 && c->directory[end - 1] == '/'; end--) c->directory[end - 1] = 0;
    status = mti_checkpoint_fields(ctx, c, desc);
    if (status == MT_SUCCESS) status = mti_map_build(ctx, c, NULL, &c->own);
    if (status == MT_SUCCESS && desc->table) status = mti_map_build(ctx, c, desc->table, &c->other);
    if (status == MT_SUCCESS) status = mti_checkpoint_memory(ctx, c);
    if (status == MT_SUCCESS) *out = c;
    else mt_checkpoint_destroy(ctx, c);
    return status;
}

MT_API void mt_checkpoint_destroy(mt_context *ctx, mt_checkpoint *checkpoint) {
    if (!ctx || !checkpoint) return;
    if (checkpoint->lock >= 0) close(checkpoint->lock);
    mt_context_free(ctx, checkpoint->exchange, MT_ERROR_BYTES);
    mti_header_free(&checkpoint->writer);
    mti_map_free(&checkpoint->own);
    mti_map_free(&checkpoint->other);
    mt_host_free(checkpoint->whole);
    mt_host_free(checkpoint->spare);
    mt_host_free(checkpoint->given[0]);
    mt_host_free(checkpoint->given[1]);
    mt_host_free(checkpoint->fields);
    mt_host_free(checkpoint);
}

/* ---- >>save: checkpoints are written ----------------------------------------------------------------------------- */

/* Returns the status of the first rank that failed, with its message, on every rank. exchange is device memory of
   MT_ERROR_BYTES. Collective: a rank that has failed must call it, too. */
static mt_status mti_agree(mt_context *ctx, mt_comm *comm, void *exchange, mt_status mine) {
    int rank = mt_comm_rank(comm), size = mt_comm_size(comm), worst;
    mt_tensor one = mt_tensor_make(exchange, MT_I32, 1, 1), all = mt_tensor_make(exchange, MT_U8, 1, MT_ERROR_BYTES);
    char text[MT_ERROR_BYTES];
    int32_t code = mine == MT_SUCCESS ? 0 : size - rank;
    if (size == 1) return mine;
    MT_TRY(mt_upload(ctx, &code, one));
    MT_TRY(mt_all_reduce(ctx, comm, exchange, exchange, 1, MT_I32, MT_MAX));
    MT_TRY(mt_download(ctx, one, &code));
    if (code <= 0 || code > size) return mine; /* no rank failed, or comm is a meta communicator */
    worst = size - code;
    memset(text, 0, sizeof text);
    memcpy(text, &mine, sizeof mine);
    snprintf(text + sizeof mine, sizeof text - sizeof mine, "%.*s", (int)(sizeof text - sizeof mine - 1),
             mt_last_error(ctx));
    MT_TRY(mt_upload(ctx, text, all));
    MT_TRY(mt_broadcast(ctx, comm, exchange, exchange, MT_ERROR_BYTES, MT_U8, worst));
    MT_TRY(mt_download(ctx, all, text));
    if (rank == worst) return mine;
    memcpy(&mine, text, sizeof mine);
    return mt_fail(ctx, mine, "%s", text + sizeof mine);
}

static const char *const mti_step_format = "step-%08lld";

MT_API mt_status mt_checkpoint_path(mt_context *ctx, const char *directory, int64_t step, char *path, size_t bytes) {
    char name[32];
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!directory || !path || step < 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_path: step %lld, directory or path is NULL",
                       (long long)step);
    snprintf(name, sizeof name, mti_step_format, (long long)step);
    return mti_path(ctx, directory, name, path, bytes);
}

/* Returns the step of a directory entry that is named like a checkpoint, or -1. */
static int64_t mti_step_of(const char *name) {
    uint64_t step;
    char same[32];
    if (strncmp(name, "step-", 5) != 0 || !mt_parse_whole(name + 5, (uint64_t)MTI_STEPS_MAX, &step)) return -1;
    snprintf(same, sizeof same, mti_step_format, (long long)step);
    return strcmp(same, name) == 0 ? (int64_t)step : -1;
}

static int mti_is_leftover(const char *name) {
    size_t n = strlen(name);
    return n > 9 && strncmp(name, ".step-", 6) == 0 && strcmp(name + n - 4, ".tmp") == 0;
}

/* Writes the step of the newest checkpoint below step `below` to *newest, or -1. Returns 0 or errno. */
static int mti_checkpoint_list(const char *directory, int64_t below, int64_t *newest) {
    struct dirent *entry;
    DIR *d = opendir(directory);
    *newest = -1;
    if (!d) return errno == ENOENT ? 0 : errno;
    while ((entry = readdir(d)) != NULL) {
        int64_t step = mti_step_of(entry->d_name);
        if (step < below && step > *newest) *newest = step;
    }
    closedir(d);
    return 0;
}

/* Removes what a killed save or a failed removal has left behind. */
static void mti_leftovers_remove(mt_context *ctx, const char *directory) {
    char path[MT_PATH_MAX];
    struct dirent *entry;
    DIR *d = opendir(directory);
    if (!d) mti_io_warning(ctx, directory, "list the directory", errno);
    while (d && (entry = readdir(d)) != NULL)
        if (mti_is_leftover(entry->d_name) &&
            snprintf(path, sizeof path, "%s/%s", directory, entry->d_name) < (int)sizeof path)
            mti_directory_remove(ctx, path);
    if (d) closedir(d);
}

static mt_status mti_checkpoint_newest(mt_context *ctx, const char *directory, int64_t *step) {
    int error = mti_checkpoint_list(directory, INT64_MAX, step);
    return error ? mti_io_error(ctx, directory, "list the directory", error) : MT_SUCCESS;
}

/* Gives the step of the first rank to every rank of comm, or the error of the first rank with one. */
static mt_status mti_step_share(mt_context *ctx, mt_comm *comm, mt_status status, int64_t *step) {
    mt_tensor exchange = mt_none();
    MT_TRY(mt_arena_tensor(ctx, MT_U8, 1, MT_ERROR_BYTES, &exchange));
    MT_TRY(mti_agree(ctx, comm, exchange.data, status));
    exchange.cols = (int64_t)sizeof *step;
    MT_TRY(mt_upload(ctx, step, exchange));
    MT_TRY(mt_broadcast(ctx, comm, exchange.data, exchange.data, sizeof *step, MT_U8, 0));
    return mt_download(ctx, exchange, step);
}

MT_API mt_status mt_checkpoint_latest(mt_context *ctx, mt_comm *comm, const char *directory, int64_t *step) {
    mt_status status = MT_SUCCESS;
    size_t mark;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!directory || !step)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_latest: %s is NULL", step ? "directory" : "step");
    *step = -1;
    if (!comm || mt_comm_rank(comm) == 0) status = mti_checkpoint_newest(ctx, directory, step);
    if (!comm || mt_comm_size(comm) == 1) return status;
    mark = mt_arena_mark(ctx);
    status = mti_step_share(ctx, comm, status, step);
    mt_arena_release(ctx, mark);
    return status;
}

/* Returns 1 when this stage writes a parameter. The first stage writes a parameter that several stages share. */
static int mti_param_is_ours(const mt_params *params, const mt_param *p) {
    return !p->desc.shared_embedding || params->grid->pp_rank == 0;
}

/* The numbers of the tensors that a file has of a parameter: MTI_VALUE for its value, and those of
   mt_optimizer_state. */
enum { MTI_VALUE = -1 };

/* A part of a checkpoint: for each number from first to last, the tensors of a map. */
typedef struct mti_part {
    const char *stem;
    const mti_table_map *map;
    int bare;    /* 1: names are without the prefix of the table */
    int lenient; /* 1: optional tensors may be missing */
    mt_dtype dtype;
    int first, last; /* MTI_VALUE, or a range of mt_optimizer_state */
} mti_part;

static mti_part mti_model_part(const mt_checkpoint *c) {
    mti_part part;
    part.stem = "model";
    part.map = c->other.table ? &c->other : &c->own;
    part.bare = part.lenient = 0;
    part.dtype = mt_params_dtype(c->params);
    part.first = part.last = MTI_VALUE;
    return part;
}

static mti_part mti_optimizer_part(const mt_checkpoint *c) {
    mti_part part;
    part.stem = "optimizer";
    part.map = &c->own;
    part.bare = part.lenient = 0;
    part.dtype = MT_F32;
    part.first = MT_EXP_AVG;
    part.last = mti_has_masters(c->optimizer) ? MT_MASTER : MT_EXP_AVG_SQ;
    return part;
}

/* The name and shape of a tensor in a file. */
typedef struct mti_layout {
    char name[MT_NAME_MAX + 32];
    int dims; /* 1 or 2 */
    int64_t shape[2];
} mti_layout;

static const mt_param *mti_stored_param(const mt_checkpoint *c, const mti_table_map *map, int t) {
    return c->params->list[map->pieces[map->tensors[t].first].param];
}

/* Returns the layout that tensor t of a part has in its file, for number `what`. */
static mti_layout mti_part_layout(const mt_checkpoint *c, const mti_part *part, int t, int what) {
    static const char *const suffixes[] = {".exp_avg", ".exp_avg_sq", ".master"};
    const mti_stored *s = &part->map->tensors[t];
    mti_layout l;
    if (s->row >= 0)
        mti_pattern_text(mti_row_file(part->map->table, s->row, part->bare), s->number, l.name, sizeof l.name);
    else
        snprintf(l.name, sizeof l.name, "%s%s", mti_stored_param(c, part->map, t)->name,
                 what == MTI_VALUE ? "" : suffixes[what]);
    l.dims = s->vector ? 1 : 2;
    l.shape[0] = s->transposed ? s->cols : s->rows;
    l.shape[1] = s->transposed ? s->rows : s->cols;
    return l;
}

static void mti_put_fields(mt_context *ctx, mt_safetensors_writer *w, const mt_field *fields, int count) {
    char text[MT_FIELD_TEXT_MAX];
    int i;
    for (i = 0; i < count; i++) {
        mt_field_text(&fields[i], text);
        mti_header_member(ctx, w, fields[i].name,
                          fields[i].kind == MT_FIELD_TEXT ? (const char *)fields[i].value : text);
    }
}

/* Writes the metadata. Hugging Face's transformers requires the entry "format". */
static void mti_put_metadata(mt_context *ctx, mt_checkpoint *c, const mt_training_state *state) {
    mt_safetensors_writer *w = &c->writer;
    mt_training_state copy = *state;
    mt_field fields[MTI_STATE_FIELDS];
    char text[MT_FIELD_TEXT_MAX];
    const char *name;
    int i;
    mti_header_begin(ctx, w);
    mti_header_member(ctx, w, "format", "pt");
    mti_header_member(ctx, w, MTI_VERSION_KEY, MT_VERSION);
    mti_state_fields(&copy, fields);
    mti_put_fields(ctx, w, fields, MTI_STATE_FIELDS);
    mti_header_member(ctx, w, "note", state->note);
    if (c->optimizer) {
        fields[0] = mti_optimizer_field(c->optimizer);
        mti_put_fields(ctx, w, fields, 1);
    }
    for (i = 0; c->format.metadata && (name = (c->format.metadata)(c->model, i, text)) != NULL; i++)
        mti_header_member(ctx, w, name, text);
    mti_put_fields(ctx, w, c->fields, c->field_count);
    mti_header_text(ctx, w, "}");
}

/* Makes the header of a part's file, without its end. */
static void mti_put_header(mt_context *ctx, mt_checkpoint *c, const mti_part *part, const mt_training_state *state) {
    const char *dtype = part->dtype == MT_F32 ? "F32" : part->dtype == MT_BF16 ? "BF16" : "F16";
    int what, t;
    mti_put_metadata(ctx, c, state);
    for (what = part->first; what <= part->last; what++)
        for (t = 0; t < part->map->tensor_count; t++) {
            const mti_stored *s = &part->map->tensors[t];
            mti_layout l = mti_part_layout(c, part, t, what);
            if (mti_param_is_ours(c->params, mti_stored_param(c, part->map, t)))
                mti_header_tensor(ctx, &c->writer, l.name, dtype, l.dims, l.shape,
                                  s->rows * s->cols * (int64_t)mt_dtype_size(part->dtype));
        }
}

/* Writes the name of a part's file: STEM.safetensors, or with several stages that of one stage. */
static void mti_part_name(char *name, size_t bytes, const char *stem, int stage, int stages) {
    if (stages == 1) snprintf(name, bytes, "%s.safetensors", stem);
    else snprintf(name, bytes, "%s-%05d-of-%05d.safetensors", stem, stage + 1, stages);
}

/* Creates this stage's file and writes its header. */
static mt_status mti_part_begin(mt_context *ctx, mt_checkpoint *c, const mti_part *part, const mt_training_state *state,
                                const char *directory) {
    char name[64], path[MT_PATH_MAX];
    mti_part_name(name, sizeof name, part->stem, c->params->grid->pp_rank, c->params->grid->pp_size);
    MT_TRY(mti_path(ctx, directory, name, path, sizeof path));
    mti_put_header(ctx, c, part, state);
    MT_TRY(mti_header_end(ctx, &c->writer, path));
    MT_TRY(mti_file_begin(ctx, &c->writer.file, directory, name));
    mti_header_write(&c->writer);
    return MT_SUCCESS;
}

/* Writes n elements. Rounding the values of a 16-bit parameter to 16 bits is exact. */
static void mti_put_elements(mt_checkpoint *c, const float *x, mt_dtype dtype, int64_t n) {
    uint16_t bits[256];
    int64_t i, count;
    if (dtype == MT_F32) {
        mti_file_put(&c->writer.file, x, (size_t)n * sizeof(float));
        return;
    }
    for (i = 0; i < n; i += count) {
        count = mt_min(n - i, (int64_t)(sizeof bits / sizeof *bits));
        mt_f32_to_16bit(dtype, x + i, bits, count);
        mti_file_put(&c->writer.file, bits, (size_t)count * sizeof *bits);
    }
}

/* Writes tensor t. MT_ERR_DATA: it has an element that is not finite, so that no run could load it. */
static mt_status mti_stored_put(mt_context *ctx, mt_checkpoint *c, const mti_part *part, int t, int what) {
    const mti_stored *s = &part->map->tensors[t];
    const float *x = s->whole ? c->whole : c->spare;
    int64_t n = s->rows * s->cols, bad = mti_unfit(x, n, MT_F32);
    mti_layout l = mti_part_layout(c, part, t, what);
    if (bad < n) return mti_unfit_fail(ctx, "mt_checkpoint_save", l.name, bad, x[bad], MT_F32);
    mti_put_elements(c, x, part->dtype, n);
    return MT_SUCCESS;
}

/* Gathers the parameters of tensor t, one after the other, and writes the tensor when `writes` is 1 and no write has
   failed, see mti_part_write. */
static mt_status mti_stored_write(mt_context *ctx, mt_checkpoint *c, const mti_part *part, int t, int what, int writes,
                                  mt_status *io) {
    const mti_stored *s = &part->map->tensors[t];
    int k;
    for (k = s->first; k >= 0; k = part->map->pieces[k].next) {
        const mti_slice *piece = &part->map->pieces[k];
        const mt_param *p = c->params->list[piece->param];
        if (c->held != piece->param)
            MT_TRY(what == MTI_VALUE ? mt_param_gather(ctx, c->params, p, p->value, c->whole)
                                     : mt_optimizer_gather(ctx, c->optimizer, p, (mt_optimizer_state)what, c->whole));
        c->held = piece->param;
        if (writes && !s->whole) mti_slice_copy(s, piece, 1, c->whole, c->spare);
    }
    if (writes && *io == MT_SUCCESS) *io = mti_stored_put(ctx, c, part, t, what);
    return MT_SUCCESS;
}

/* Gathers every tensor of a part and writes it when `writes` is 1. Collective: after an error with the file, *io, a
   rank still gathers. */
static mt_status mti_part_write(mt_context *ctx, mt_checkpoint *c, const mti_part *part, int writes, mt_status *io) {
    int what, t;
    for (what = part->first; what <= part->last; what++) {
        c->held = -1;
        for (t = 0; t < part->map->tensor_count; t++)
            if (mti_param_is_ours(c->params, mti_stored_param(c, part->map, t)))
                MT_TRY(mti_stored_write(ctx, c, part, t, what, writes, io));
    }
    return MT_SUCCESS;
}

static mt_status mti_part_save(mt_context *ctx, mt_checkpoint *c, const mti_part *part, const mt_training_state *state,
                               const char *directory, mt_status *io) {
    const mt_grid *g = c->params->grid;
    int writes = g->tp_rank == 0 && g->dp_rank == 0 && mt_context_has_data(ctx);
    mt_status status;
    if (writes && *io == MT_SUCCESS) *io = mti_part_begin(ctx, c, part, state, directory);
    status = mti_part_write(ctx, c, part, writes, io);
    if (c->writer.file.fd >= 0) MT_KEEP(*io, mti_file_end(ctx, &c->writer.file, 1));
    return status;
}

/* Locks a directory by a file in it, because on some network file systems the lock of a directory holds on one host
   only. The lock ends with the process, however that ends; the file stays. */
static mt_status mti_lock_take(mt_context *ctx, mt_checkpoint *c) {
    char path[MT_PATH_MAX];
    int error;
    MT_TRY(mti_path(ctx, c->directory, ".lock", path, sizeof path));
    c->lock = mti_open(path, O_RDWR | O_CREAT | MTI_NOFOLLOW);
    c->process = getpid();
    if (c->lock < 0) return mti_io_error(ctx, path, "open it", errno);
    error = mti_lock_wait(c->lock);
    /* locked, or the file system has no locks */
    if (!error || error == ENOLCK || error == ENOSYS || error == EOPNOTSUPP) return MT_SUCCESS;
    close(c->lock);
    c->lock = -1;
    if (error == EWOULDBLOCK) return mt_fail(ctx, MT_ERR_IO, "%s: another run writes to it", c->directory);
    return mti_io_error(ctx, path, "lock it", error);
}

/* Creates the directory, locks it, and tries to create a directory in it, as a save does. Called on the first rank;
   does nothing after it has succeeded once. */
static mt_status mti_checkpoint_lock(mt_context *ctx, mt_checkpoint *c) {
    char probe[MT_PATH_MAX];
    if (c->lock >= 0) return MT_SUCCESS;
    if (!mti_exists(c->directory)) MT_TRY(mti_directory_make(ctx, c->directory));
    MT_TRY(mti_lock_take(ctx, c));
    mti_leftovers_remove(ctx, c->directory);
    MT_TRY(mti_path(ctx, c->directory, ".step-probe.tmp", probe, sizeof probe));
    if (mkdir(probe, 0777) != 0) return mti_io_error(ctx, probe, "create the directory", errno);
    if (rmdir(probe) != 0) mti_io_warning(ctx, probe, "remove the directory", errno);
    return MT_SUCCESS;
}

/* Checks that the registry has the parameters that it had in mt_checkpoint_create. */
static mt_status mti_checkpoint_params(mt_context *ctx, const char *function, const mt_checkpoint *c) {
    if (c->params->count == c->count) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the registry had %d parameters in mt_checkpoint_create, and has %d",
                   function, c->count, c->params->count);
}

/* Checks that the checkpoint has a directory, and that no process from which this one was forked has locked it. */
static mt_status mti_directory_check(mt_context *ctx, const char *function, const mt_checkpoint *c) {
    if (c->lock >= 0 && c->process != getpid())
        return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: process %ld, from which this process %ld was forked, writes to %s",
                       function, (long)c->process, (long)getpid(), c->directory);
    if (c->directory[0]) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: mt_checkpoint_desc.directory is NULL, so this can only import", function);
}

MT_API mt_status mt_checkpoint_lock(mt_context *ctx, mt_checkpoint *checkpoint) {
    mt_status status = MT_SUCCESS;
    mt_comm *world;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!checkpoint) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_lock: checkpoint is NULL");
    MT_TRY(mti_directory_check(ctx, "mt_checkpoint_lock", checkpoint));
    world = checkpoint->params->grid->world;
    if (mt_comm_rank(world) == 0 && mt_context_has_data(ctx)) status = mti_checkpoint_lock(ctx, checkpoint);
    return mti_agree(ctx, world, checkpoint->exchange, status);
}

/* Returns the error for a field whose value load would refuse. */
static mt_status mti_save_refuse(mt_context *ctx, const mt_field *f, const char *wanted) {
    char text[MT_FIELD_TEXT_MAX];
    if (f->kind == MT_FIELD_TEXT)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_save: %.100s is '%.*s', must be %s", f->name,
                       (int)mt_min((int64_t)f->bytes, 40), (const char *)f->value, wanted);
    mt_field_text(f, text);
    return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_save: %.100s is %s, must be %s", f->name, text, wanted);
}

static mt_status mti_save_fields(mt_context *ctx, const mt_field *fields, int count) {
    char wanted[MTI_WANTED_MAX];
    int i;
    for (i = 0; i < count; i++) {
        if (mti_field_is_valid(&fields[i])) continue;
        mti_field_wanted(&fields[i], wanted);
        return mti_save_refuse(ctx, &fields[i], wanted);
    }
    return MT_SUCCESS;
}

/* Checks that load would accept every value that the metadata will have. */
static mt_status mti_save_values(mt_context *ctx, const mt_checkpoint *c, const mt_training_state *state) {
    mt_training_state copy = *state;
    mt_field fields[MTI_STATE_FIELDS];
    const char *fault;
    mti_state_fields(&copy, fields);
    MT_TRY(mti_save_fields(ctx, fields, MTI_STATE_FIELDS));
    fault = mti_state_fault(&copy);
    if (fault) return mti_save_refuse(ctx, mti_state_field(fields, fault), mti_scaler_wanted(fault));
    if (c->optimizer) {
        fields[0] = mti_optimizer_field(c->optimizer);
        MT_TRY(mti_save_fields(ctx, fields, 1));
    }
    return mti_save_fields(ctx, c->fields, c->field_count);
}

/* Adds the values of fields. A text is not copied. */
static void mti_told_add_fields(mti_told_list *t, const mt_field *fields, int count) {
    char text[MT_FIELD_TEXT_MAX];
    int i;
    for (i = 0; i < count; i++) {
        mt_field_text(&fields[i], text);
        mti_told_add(t, fields[i].name, "%s", text);
        if (fields[i].kind == MT_FIELD_TEXT) t->list[t->count - 1].value = (const char *)fields[i].value;
    }
}

/* Adds the training state and the optimizer's step (optimizer NULL: none). The state must be valid until
   mti_told_end. */
static void mti_told_add_state(mti_told_list *t, mt_training_state *state, mt_optimizer *optimizer) {
    mt_field fields[MTI_STATE_FIELDS];
    mti_state_fields(state, fields);
    mti_told_add_fields(t, fields, MTI_STATE_FIELDS);
    if (optimizer) {
        fields[0] = mti_optimizer_field(optimizer);
        mti_told_add_fields(t, fields, 1);
    }
    memset(fields, 0, sizeof *fields);
    fields[0].name = "note";
    fields[0].kind = MT_FIELD_TEXT;
    fields[0].value = state->note;
    mti_told_add_fields(t, fields, 1);
}

/* All ranks must save the same state and fields, because the files have those of one rank. */
static mt_status mti_save_compare(mt_context *ctx, const mt_checkpoint *c, const mt_training_state *state) {
    mt_training_state copy = *state;
    mti_told_list t;
    MT_TRY(mti_told_begin(ctx, MTI_STATE_FIELDS + 2 + c->field_count, &t));
    mti_told_add_state(&t, &copy, c->optimizer);
    mti_told_add_fields(&t, c->fields, c->field_count);
    return mti_told_end(ctx, c->params, "mt_checkpoint_save", 0, &t);
}

/* Locks the directory, checks that this step is newer than all checkpoints, and creates the directory `beside`. Called
   on the first rank before anything is written. */
static mt_status mti_save_prepare(mt_context *ctx, mt_checkpoint *c, int64_t step, const char *beside) {
    int64_t newest;
    if (c->lock >= 0) mti_leftovers_remove(ctx, c->directory);
    else MT_TRY(mti_checkpoint_lock(ctx, c));
    MT_TRY(mti_checkpoint_newest(ctx, c->directory, &newest));
    if (newest >= step)
        return mt_fail(ctx, MT_ERR_IO,
                       "%s: has a checkpoint of step %lld already; one of step %lld would not be its newest",
                       c->directory, (long long)newest, (long long)step);
    return mti_directory_make(ctx, beside);
}

/* Writes the path of the directory in which the checkpoint of a step is written, and to which it is renamed before it
   is removed. The path fits, because mt_checkpoint_create has checked the length of the directory. */
static void mti_beside(mt_context *ctx, const char *directory, int64_t step, char *path) {
    char name[48];
    snprintf(name, sizeof name, ".step-%08lld.tmp", (long long)step);
    mti_path(ctx, directory, name, path, MT_PATH_MAX);
}

/* Removes all checkpoints except the newest c->keep. Each is renamed first, so that a partly removed one never looks
   complete. Failures are only logged, because the new checkpoint is complete; the next save tries again. */
static void mti_save_prune(mt_context *ctx, const mt_checkpoint *c) {
    char path[MT_PATH_MAX], beside[MT_PATH_MAX];
    int64_t step = INT64_MAX;
    int i = 0, error;
    while (step >= 0) {
        error = mti_checkpoint_list(c->directory, step, &step);
        if (error) mti_io_warning(ctx, c->directory, "list the directory", error);
        if (step < 0 || i++ < c->keep) continue;
        mti_beside(ctx, c->directory, step, beside);
        mt_checkpoint_path(ctx, c->directory, step, path, sizeof path);
        if (rename(path, beside) == 0) mti_directory_remove(ctx, beside);
        else mti_io_warning(ctx, path, "rename it", errno);
    }
}

/* Writes the index of the files STEM-0000s-of-0000S.safetensors that the stages have written. */
static mt_status mti_index_write(mt_context *ctx, mti_file *f, const char *directory, const char *stem,
                                 mt_safetensors_set *b) {
    char name[64];
    int64_t bytes = 0;
    int i, k;
    for (i = 0; i < b->count; i++) bytes += b->files[i]->data_bytes;
    snprintf(name, sizeof name, "%s.safetensors.index.json", stem);
    MT_TRY(mti_file_begin(ctx, f, directory, name));
    mti_file_text(f, "{\n  \"metadata\": {\"total_size\": ");
    mti_file_whole(f, bytes);
    mti_file_text(f, "},\n  \"weight_map\": {");
    for (i = 0; i < b->count; i++)
        for (k = 0; k < mt_safetensors_count(b->files[i]); k++) {
            mti_file_text(f, i + k > 0 ? ",\n    " : "\n    ");
            mti_file_string(f, mt_safetensors_at(b->files[i], k)->name);
            mti_file_text(f, ": ");
            mti_file_string(f, mti_file_name(b->files[i]->path));
        }
    mti_file_text(f, "\n  }\n}\n");
    return mti_file_end(ctx, f, 0);
}

/* Opens the files that the stages have written, to check that they can be read: a name or the note may not be UTF-8, or
   a name may occur twice. With several stages, also writes their index. */
static mt_status mti_save_check(mt_context *ctx, mt_checkpoint *c, const char *directory, const char *stem) {
    char name[64];
    mt_safetensors_set b;
    mt_status status = MT_SUCCESS;
    int i, stages = c->params->grid->pp_size;
    memset(&b, 0, sizeof b);
    for (i = 0; i < stages && status == MT_SUCCESS; i++) {
        mti_part_name(name, sizeof name, stem, i, stages);
        status = mti_set_add(ctx, &b, directory, name);
    }
    if (status == MT_SUCCESS && stages > 1) status = mti_index_write(ctx, &c->writer.file, directory, stem, &b);
    mti_set_close(&b);
    return status;
}

#define MTI_GIVEN_MAX ((size_t)1 << 20) /* bytes */
#define MTI_CONFIG_MAX 4096             /* bytes of a config.json, in addition to those of the one that was loaded */

static const char *const mti_given_names[] = {"config.json", "generation_config.json"};

static mt_status mti_given_write(mt_context *ctx, mt_checkpoint *c, const char *directory, int which,
                                 const char *text) {
    MT_TRY(mti_file_begin(ctx, &c->writer.file, directory, mti_given_names[which]));
    mti_file_text(&c->writer.file, text);
    return mti_file_end(ctx, &c->writer.file, 0);
}

static mt_status mti_config_write(mt_context *ctx, mt_checkpoint *c, const char *directory) {
    int bytes = MTI_CONFIG_MAX + (c->given[0] ? (int)strlen(c->given[0]) : 0), length;
    void *text;
    mt_status status = MT_SUCCESS;
    if (!c->format.config) return MT_SUCCESS;
    MT_TRY(mti_host_new(ctx, (size_t)bytes, &text));
    length = (c->format.config)(c->model, c->given[0], (char *)text, (size_t)bytes);
    if (length >= bytes)
        status = mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: a config.json of %d bytes, at most %d are written", directory,
                         length, bytes - 1);
    else if (length > 0) status = mti_given_write(ctx, c, directory, 0, (const char *)text);
    if (status == MT_SUCCESS && length > 0 && c->given[1]) status = mti_given_write(ctx, c, directory, 1, c->given[1]);
    mt_host_free(text);
    return status;
}

/* Checks the files, writes the indexes and config.json, and renames the directory. Called on the first rank when all
   stages have written their files. */
static mt_status mti_save_publish(mt_context *ctx, mt_checkpoint *c, const char *final_path, const char *beside) {
    MT_TRY(mti_save_check(ctx, c, beside, "model"));
    if (c->optimizer) MT_TRY(mti_save_check(ctx, c, beside, "optimizer"));
    MT_TRY(mti_config_write(ctx, c, beside));
    MT_TRY(mti_directory_sync(ctx, beside));
    if (rename(beside, final_path) != 0) return mti_io_error(ctx, final_path, "rename a directory to it", errno);
    MT_TRY(mti_directory_sync(ctx, c->directory));
    mti_save_prune(ctx, c);
    return MT_SUCCESS;
}

/* Refuses to save values of which the data ranks have new and old parts. */
static mt_status mti_save_complete(mt_context *ctx, const mt_checkpoint *c) {
    if (!c->params->torn) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "mt_checkpoint_save: the parameters are not complete: the last step of the sharded optimizer failed "
                   "before each rank had the values that the other data ranks have updated; load an older checkpoint");
}

/* Saves in four steps, after each of which the ranks agree: check, prepare, write the files, publish. */
static mt_status mti_checkpoint_save(mt_context *ctx, mt_checkpoint *c, const mt_training_state *state,
                                     const char *final_path, const char *beside) {
    mt_comm *world = c->params->grid->world;
    int first = mt_comm_rank(world) == 0 && mt_context_has_data(ctx);
    mti_part model = mti_model_part(c), optimizer;
    mt_status status = mti_params_ready(ctx, c->params, "mt_checkpoint_save"), io = MT_SUCCESS;
    if (status == MT_SUCCESS) status = mti_checkpoint_params(ctx, "mt_checkpoint_save", c);
    if (status == MT_SUCCESS) status = mti_save_complete(ctx, c);
    if (status == MT_SUCCESS) status = mti_save_values(ctx, c, state);
    MT_TRY(mti_agree(ctx, world, c->exchange, status));
    MT_TRY(mti_save_compare(ctx, c, state));
    if (first) status = mti_save_prepare(ctx, c, state->step, beside);
    MT_TRY(mti_agree(ctx, world, c->exchange, status));
    status = mti_part_save(ctx, c, &model, state, beside, &io);
    if (c->optimizer && status == MT_SUCCESS) {
        optimizer = mti_optimizer_part(c);
        status = mti_part_save(ctx, c, &optimizer, state, beside, &io);
    }
    if (status == MT_SUCCESS) status = mti_agree(ctx, world, c->exchange, io);
    if (status == MT_SUCCESS)
        status = mti_agree(ctx, world, c->exchange, first ? mti_save_publish(ctx, c, final_path, beside) : MT_SUCCESS);
    return status;
}

MT_API mt_status mt_checkpoint_save(mt_context *ctx, mt_checkpoint *checkpoint, const mt_training_state *state) {
    char final_path[MT_PATH_MAX], beside[MT_PATH_MAX];
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!checkpoint || !state || state->step < 0 || !memchr(state->note, 0, sizeof state->note))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_save: %s",
                       !checkpoint       ? "checkpoint is NULL"
                       : !state          ? "state is NULL"
                       : state->step < 0 ? "step is negative"
                                         : "the note does not end");
    if (state->step > MTI_STEPS_MAX)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_checkpoint_save: step %lld, must be at most %lld",
                       (long long)state->step, (long long)MTI_STEPS_MAX);
    MT_TRY(mti_directory_check(ctx, "mt_checkpoint_save", checkpoint));
    MT_TRY(mt_checkpoint_path(ctx, checkpoint->directory, state->step, final_path, sizeof final_path));
    mti_beside(ctx, checkpoint->directory, state->step, beside);
    status = mti_checkpoint_save(ctx, checkpoint, state, final_path, beside);
    if (status != MT_SUCCESS && checkpoint->lock >= 0 && mti_exists(beside)) mti_directory_remove(ctx, beside);
    return status;
}

/* ---- >>load: checkpoints are read -------------------------------------------------------------------------------- */

/* The files that are loaded. */
typedef struct mti_source {
    mt_safetensors_set model, optimizer;
    const mti_table_map *map; /* of the names in the model's files */
    int bare, lenient;        /* see mti_part */
    int has_masters;
    char *given[2]; /* on the first rank: texts of the files mti_given_names, NULL: no such file */
} mti_source;

static int mti_shape_fits(const mti_layout *l, const mt_safetensors_tensor *t) {
    int dims = l->dims;
    if (t->dims == 2 && dims == 1 && t->shape[0] == 1) return t->shape[1] == l->shape[0]; /* a vector as one row */
    return t->dims == dims && t->shape[0] == l->shape[0] && (dims == 1 || t->shape[1] == l->shape[1]);
}

static void mti_shape_text(const int64_t *shape, int dims, char *text, size_t bytes) {
    size_t used = 0;
    int i;
    text[0] = 0;
    for (i = 0; i < dims && used < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%lld", i > 0 ? ", " : "", (long long)shape[i]);
}

/* Finds a tensor by its name in the table, or with another ending. */
static const mt_safetensors_tensor *mti_source_named(const mt_safetensors_set *b, const mti_part *part,
                                                     const char *name) {
    const mt_safetensors_tensor *found = mt_safetensors_set_find(b, name);
    const mt_tensor_table *table = part->map->table;
    char other[2 * MT_NAME_MAX + 64];
    size_t n = strlen(name), ending;
    int i;
    for (i = 0; !found && table && i < table->alias_count; i++) {
        ending = strlen(table->aliases[i].stands_for);
        if (ending > n || strcmp(name + n - ending, table->aliases[i].stands_for) != 0) continue;
        snprintf(other, sizeof other, "%.*s%s", (int)(n - ending), name, table->aliases[i].ending);
        found = mt_safetensors_set_find(b, other);
    }
    return found;
}

/* Finds the tensor that one with this name repeats (MT_TENSOR_COPY). NULL: the name is none of a copy, or the files do
   not have the other tensor. */
static const mt_safetensors_tensor *mti_source_original(const mt_safetensors_set *b, const mti_part *part,
                                                        const char *name) {
    const mt_tensor_table *table = part->map->table;
    char other[MT_NAME_MAX + 32];
    int64_t number;
    int i;
    for (i = 0; table && i < table->count; i++) {
        if (!(table->names[i].flags & MT_TENSOR_COPY)) continue;
        if (!mti_pattern_fits(mti_row_file(table, i, part->bare), name, &number)) continue;
        mti_pattern_text(mti_row_file(table, mti_row_original(table, i), part->bare), number, other, sizeof other);
        return mti_source_named(b, part, other);
    }
    return NULL;
}

/* Finds a tensor by its name in the table, with another ending, or by the name of a copy. */
static const mt_safetensors_tensor *mti_source_find(const mt_safetensors_set *b, const mti_part *part,
                                                    const char *name) {
    const mt_safetensors_tensor *found = mti_source_named(b, part, name);
    const mt_tensor_table *table = part->map->table;
    char copy[MT_NAME_MAX + 32];
    int64_t number;
    int i;
    for (i = 0; !found && table && i < table->count; i++) {
        if (!(table->names[i].flags & MT_TENSOR_COPY)) continue;
        if (!mti_pattern_fits(mti_row_file(table, mti_row_original(table, i), part->bare), name, &number)) continue;
        mti_pattern_text(mti_row_file(table, i, part->bare), number, copy, sizeof copy);
        found = mt_safetensors_set_find(b, copy);
    }
    return found;
}

static mti_part mti_source_part(const mt_checkpoint *c, const mti_source *s) {
    mti_part part = mti_model_part(c);
    part.map = s->map;
    part.bare = s->bare;
    part.lenient = s->lenient;
    return part;
}

/* Compares a tensor of the files with the one that it repeats, if it is a copy. */
static mt_status mti_source_copy_check(mt_context *ctx, const mt_safetensors_set *b, const mti_part *part,
                                       const mt_safetensors_tensor *t) {
    const mt_safetensors_tensor *original = mti_source_original(b, part, t->name);
    char theirs[192], ours[192];
    if (!original) return MT_SUCCESS;
    if (mti_safetensors_dtypes[mti_safetensors_dtype(t->dtype)].dtype < 0)
        return mt_fail(ctx, MT_ERR_DATA, "%s: '%s' is %s, must be F32, F64, BF16 or F16", b->path, t->name, t->dtype);
    if (t->dims == original->dims && memcmp(t->shape, original->shape, sizeof t->shape) == 0)
        return mti_tensors_equal(ctx, t, original);
    mti_shape_text(t->shape, t->dims, theirs, sizeof theirs);
    mti_shape_text(original->shape, original->dims, ours, sizeof ours);
    return mt_fail(ctx, MT_ERR_DATA, "%s: '%s' has shape [%s], but '%s' [%s]; this model has one parameter for both",
                   b->path, t->name, theirs, original->name, ours);
}

/* Compares all copies in the model's files, on the first rank. */
static mt_status mti_source_copies(mt_context *ctx, const mt_checkpoint *c, const mti_source *s) {
    mti_part part = mti_source_part(c, s);
    int i, k;
    if (mt_comm_rank(c->params->grid->world) != 0) return MT_SUCCESS;
    for (i = 0; i < s->model.count; i++)
        for (k = 0; k < mt_safetensors_count(s->model.files[i]); k++)
            MT_TRY(mti_source_copy_check(ctx, &s->model, &part, mt_safetensors_at(s->model.files[i], k)));
    return MT_SUCCESS;
}

/* Returns 1 when the files have no tensor t of a part, and need not have it. */
static int mti_source_lacks(const mt_checkpoint *c, const mt_safetensors_set *b, const mti_part *part, int t) {
    int row = part->map->tensors[t].row;
    mti_layout l;
    if (!part->lenient || row < 0 || !(part->map->table->names[row].flags & MT_TENSOR_OPTIONAL)) return 0;
    l = mti_part_layout(c, part, t, MTI_VALUE);
    return !mti_source_find(b, part, l.name);
}

/* Checks that the files have a tensor with this name and shape, of type F32, F64, BF16 or F16. */
static mt_status mti_source_check_tensor(mt_context *ctx, const mt_safetensors_set *b, const mti_part *part,
                                         const mti_layout *l) {
    const mt_safetensors_tensor *t = mti_source_find(b, part, l->name);
    char theirs[192], ours[64];
    if (!t) return mt_fail(ctx, MT_ERR_DATA, "%s: has no tensor '%s'", b->path, l->name);
    if (mti_tensor_type(t) < 0)
        return mt_fail(ctx, MT_ERR_DATA, "%s: '%s' is %s, must be F32, F64, BF16 or F16", b->path, l->name, t->dtype);
    if (mti_shape_fits(l, t)) return MT_SUCCESS;
    mti_shape_text(t->shape, t->dims, theirs, sizeof theirs);
    mti_shape_text(l->shape, l->dims, ours, sizeof ours);
    return mt_fail(ctx, MT_ERR_DATA, "%s: '%s' has shape [%s], this model's has [%s]", b->path, l->name, theirs, ours);
}

/* Checks that every tensor of a part is in the files and has the right shape and type. */
static mt_status mti_source_check_part(mt_context *ctx, const mt_checkpoint *c, const mt_safetensors_set *b,
                                       const mti_part *part) {
    mti_layout l;
    int what, t;
    for (what = part->first; what <= part->last; what++)
        for (t = 0; t < part->map->tensor_count; t++) {
            l = mti_part_layout(c, part, t, what);
            if (!mti_source_lacks(c, b, part, t)) MT_TRY(mti_source_check_tensor(ctx, b, part, &l));
            else if (!c->params->placed)
                return mt_fail(ctx, MT_ERR_ARGUMENT,
                               "%s: has no tensor '%s'; call mt_params_init first, as the parameter keeps its value",
                               b->path, l.name);
        }
    return MT_SUCCESS;
}

/* Returns 1 when `name` is that of a row with a parameter; bare = 1: without the prefix. With a prefix, rows that do
   not begin with it do not count. */
static int mti_table_has(const mt_tensor_table *table, const char *name, int bare) {
    size_t n = table->prefix ? strlen(table->prefix) : 0;
    int64_t number;
    int i;
    for (i = 0; i < table->count; i++)
        if (table->names[i].param && strncmp(table->names[i].file, n ? table->prefix : "", n) == 0 &&
            mti_pattern_fits(mti_row_file(table, i, bare), name, &number))
            return 1;
    return 0;
}

/* Returns 1 when a tensor of the files has a name of the table. It depends on the files alone, so all pipeline stages
   get the same answer. */
static int mti_files_have(const mt_safetensors_set *b, const mt_tensor_table *table, int bare) {
    int i, t;
    for (i = 0; i < b->count; i++)
        for (t = 0; t < mt_safetensors_count(b->files[i]); t++)
            if (mti_table_has(table, mt_safetensors_at(b->files[i], t)->name, bare)) return 1;
    return 0;
}

/* Returns 1 when the files have a tensor with the name of a parameter of this stage. */
static int mti_files_have_own(const mt_checkpoint *c, const mt_safetensors_set *b) {
    int i;
    for (i = 0; i < c->params->count; i++)
        if (mt_safetensors_set_find(b, c->params->list[i]->name)) return 1;
    return 0;
}

/* Finds out which names the files have: those of the table, those without its prefix, or those of the registry. */
static void mti_source_names(const mt_checkpoint *c, mti_source *s) {
    const mt_tensor_table *table;
    s->map = mti_model_part(c).map;
    s->bare = 0;
    table = s->map->table;
    if (!table || mti_files_have(&s->model, table, 0)) return;
    s->bare = table->prefix && mti_files_have(&s->model, table, 1);
    if (!s->bare && mti_files_have_own(c, &s->model)) s->map = &c->own;
}

/* Reads a text that save keeps. It is copied into every checkpoint, so it must be a file of the folder and a JSON
   object: a folder from elsewhere must not make a save publish another file of the user. */
static mt_status mti_given_read(mt_context *ctx, const char *directory, const char *name, char **out) {
    void *text;
    int exists;
    mt_status status = mti_json_file(ctx, directory, name, MTI_GIVEN_MAX, NULL, 0, &text, &exists);
    *out = (char *)text;
    return status;
}

/* Returns 1 when a component of path is a link that is named like a checkpoint. It may have come with the directory of
   checkpoints that it is in; a program has named links of other names itself. */
static int mti_behind_step_link(const char *path) {
    char part[MT_PATH_MAX], to[1];
    const char *name = path, *end;
    for (; *name && strlen(path) < sizeof part; name = end + (*end == '/')) {
        end = name + strcspn(name, "/");
        memcpy(part, path, (size_t)(end - path));
        part[end - path] = 0; /* without a slash at its end, which would follow the link */
        if (mti_step_of(part + (name - path)) >= 0 && readlink(part, to, sizeof to) >= 0) return 1;
    }
    return 0;
}

/* Reads the texts that save keeps, on the first rank. Without a directory, nothing is saved. The folder behind a link
   may be any folder of the user, so it is loaded, but none of its texts is copied. */
static mt_status mti_source_given(mt_context *ctx, const mt_checkpoint *c, const char *directory, mti_source *s) {
    char text[MT_PATH_MAX + 128];
    int i, keeps = c->format.config && c->directory[0] && mt_comm_rank(c->params->grid->world) == 0;
    if (keeps && mti_behind_step_link(directory)) {
        snprintf(text, sizeof text, "%s: is behind a link, so a save does not copy its config.json", directory);
        mt_log(ctx, MT_LOG_INFO, text);
        return MT_SUCCESS;
    }
    for (i = 0; keeps && i < 2; i++) MT_TRY(mti_given_read(ctx, directory, mti_given_names[i], &s->given[i]));
    return MT_SUCCESS;
}

static mt_status mti_source_open_model(mt_context *ctx, mt_checkpoint *c, const char *directory, mti_source *s) {
    mti_part part;
    MT_TRY(mti_set_open(ctx, directory, "model", &s->model));
    if (c->format.check) MT_TRY((c->format.check)(ctx, c->model, directory, &s->model));
    mti_source_names(c, s);
    part = mti_source_part(c, s);
    MT_TRY(mti_source_check_part(ctx, c, &s->model, &part));
    MT_TRY(mti_source_copies(ctx, c, s));
    return mti_source_given(ctx, c, directory, s);
}

/* Verifies the checksums; each file is read by one rank. needed = 1: a file without a checksum is an error. */
static mt_status mti_source_verify(mt_context *ctx, const mt_checkpoint *c, const mti_source *s, int needed) {
    mt_comm *world = c->params->grid->world;
    int i, has;
    for (i = mt_comm_rank(world); i < s->model.count + s->optimizer.count; i += mt_comm_size(world)) {
        const mt_safetensors *file = i < s->model.count ? s->model.files[i] : s->optimizer.files[i - s->model.count];
        MT_TRY(mti_safetensors_verify(ctx, file, &has));
        if (needed && !has) return mt_fail(ctx, MT_ERR_DATA, "%s: has no checksum, is not of a checkpoint", file->path);
    }
    return MT_SUCCESS;
}

/* Checks that the elements of a tensor are finite, and stay so when they are rounded to a type. */
static mt_status mti_source_check_values(mt_context *ctx, const mt_safetensors_tensor *t, mt_dtype dtype) {
    float block[1 << 11];
    int64_t elements = mti_tensor_elements(t), i, k, n;
    for (i = 0; i < elements; i += n) {
        n = mt_min(elements - i, (int64_t)(sizeof block / sizeof *block));
        MT_TRY(mti_elements_read(ctx, t, i, n, block));
        k = mti_unfit(block, n, dtype);
        if (k < n) return mti_unfit_fail(ctx, t->file->path, t->name, i + k, block[k], dtype);
    }
    return MT_SUCCESS;
}

/* Checks the values of a part. The ranks of a stage share the tensors. A master is rounded to the type of its
   parameter. */
static mt_status mti_source_check_numbers(mt_context *ctx, const mt_checkpoint *c, const mt_safetensors_set *b,
                                          const mti_part *part) {
    const mt_grid *g = c->params->grid;
    int ranks = g->dp_size * g->tp_size, rank = g->dp_rank * g->tp_size + g->tp_rank, what, t;
    mt_dtype dtype = mt_params_dtype(c->params);
    for (what = part->first; what <= part->last; what++)
        for (t = rank; t < part->map->tensor_count; t += ranks) {
            mti_layout l = mti_part_layout(c, part, t, what);
            int moment = what == MT_EXP_AVG || what == MT_EXP_AVG_SQ;
            if (!mti_source_lacks(c, b, part, t))
                MT_TRY(mti_source_check_values(ctx, mti_source_find(b, part, l.name), moment ? MT_F32 : dtype));
        }
    return MT_SUCCESS;
}

/* Returns 1 for a tensor that the table has without a parameter, and for a copy of one that the files have. */
static int mti_source_ignores(const mt_safetensors_set *b, const mti_part *part, const char *name) {
    const mt_tensor_table *table = part->map->table;
    int64_t number;
    int i;
    if (mti_source_original(b, part, name)) return 1;
    for (i = 0; table && i < table->count; i++)
        if (!table->names[i].param && mti_pattern_fits(mti_row_file(table, i, part->bare), name, &number)) return 1;
    return 0;
}

/* Returns an error that names a tensor that belongs to no parameter of this rank. */
static mt_status mti_source_name_extra(mt_context *ctx, const mt_checkpoint *c, const mt_safetensors_set *b,
                                       const mti_part *part) {
    mti_layout l;
    int f, k, t, what;
    for (f = 0; f < b->count; f++)
        for (k = 0; k < mt_safetensors_count(b->files[f]); k++) {
            const char *name = mt_safetensors_at(b->files[f], k)->name;
            int ours = mti_source_ignores(b, part, name);
            for (what = part->first; what <= part->last && !ours; what++)
                for (t = 0; t < part->map->tensor_count && !ours; t++) {
                    const mt_safetensors_tensor *found;
                    l = mti_part_layout(c, part, t, what);
                    found = mti_source_find(b, part, l.name);
                    ours = found && strcmp(found->name, name) == 0;
                }
            if (!ours) return mt_fail(ctx, MT_ERR_DATA, "%s: '%.100s' is not a parameter of this model", b->path, name);
        }
    return MT_SUCCESS;
}

/* Checks that the files have as many tensors as the parameters of all stages need. Collective over the pipeline
   group. */
static mt_status mti_source_count(mt_context *ctx, const mt_checkpoint *c, const mt_safetensors_set *b,
                                  const mti_part *part) {
    mt_comm *pipeline = c->params->grid->pp;
    int32_t wanted = 0;
    int64_t has = b->tensors;
    int i, k;
    for (i = 0; i < part->map->tensor_count; i++)
        if (mti_param_is_ours(c->params, mti_stored_param(c, part->map, i)) && !mti_source_lacks(c, b, part, i))
            wanted += part->last - part->first + 1;
    if (mt_comm_size(pipeline) > 1) {
        mt_tensor one = mt_tensor_make(c->exchange, MT_I32, 1, 1);
        MT_TRY(mt_upload(ctx, &wanted, one));
        MT_TRY(mt_all_reduce(ctx, pipeline, c->exchange, c->exchange, 1, MT_I32, MT_SUM));
        MT_TRY(mt_download(ctx, one, &wanted));
    }
    for (i = 0; i < b->count; i++)
        for (k = 0; k < mt_safetensors_count(b->files[i]); k++)
            has -= mti_source_ignores(b, part, mt_safetensors_at(b->files[i], k)->name);
    if (has == wanted) return MT_SUCCESS;
    if (mt_comm_size(pipeline) == 1) MT_TRY(mti_source_name_extra(ctx, c, b, part));
    return mt_fail(ctx, MT_ERR_DATA, "%s: has %lld tensors, the model %d", b->path, (long long)has, (int)wanted);
}

/* Reads parameter i into c->whole. */
static mt_status mti_source_read(mt_context *ctx, mt_checkpoint *c, const mt_safetensors_set *b, const mti_part *part,
                                 int i, int what) {
    int k;
    for (k = part->map->begin[i]; k < part->map->begin[i + 1]; k++) {
        const mti_slice *piece = &part->map->pieces[k];
        const mti_stored *s = &part->map->tensors[piece->tensor];
        mti_layout l = mti_part_layout(c, part, piece->tensor, what);
        if (s->whole || c->held != piece->tensor)
            MT_TRY(mt_safetensors_read(ctx, mti_source_find(b, part, l.name), s->whole ? c->whole : c->spare));
        if (s->whole) continue;
        c->held = piece->tensor;
        mti_slice_copy(s, piece, 0, c->whole, c->spare);
    }
    return MT_SUCCESS;
}

/* Returns 1 when the files lack a part of parameter i, which therefore keeps its value. One rank logs it. */
static int mti_source_keeps(mt_context *ctx, const mt_checkpoint *c, const mt_safetensors_set *b, const mti_part *part,
                            int i) {
    const mt_grid *g = c->params->grid;
    char text[MT_PATH_MAX + 512];
    mti_layout l;
    int k;
    for (k = part->map->begin[i]; k < part->map->begin[i + 1]; k++) {
        int t = part->map->pieces[k].tensor;
        if (!mti_source_lacks(c, b, part, t)) continue;
        l = mti_part_layout(c, part, t, MTI_VALUE);
        snprintf(text, sizeof text, "%s: has no tensor '%s'; '%s' keeps its value", b->path, l.name,
                 c->params->list[i]->name);
        if (g->tp_rank == 0 && g->dp_rank == 0) mt_log(ctx, MT_LOG_WARNING, text);
        return 1;
    }
    return 0;
}

/* Loads tensor number `what` of parameter i and writes it to its tensor number `as`. Every rank reads the whole tensor
   and takes its part; nothing is communicated. */
static mt_status mti_source_scatter(mt_context *ctx, mt_checkpoint *c, const mt_safetensors_set *b,
                                    const mti_part *part, int i, int what, int as) {
    const mt_param *p = c->params->list[i];
    MT_TRY(mti_source_read(ctx, c, b, part, i, what));
    if (as == MTI_VALUE) return mt_param_scatter(ctx, p, c->whole, p->value);
    return mt_optimizer_scatter(ctx, c->optimizer, p, (mt_optimizer_state)as, c->whole);
}

/* Loads all tensors. Parameters are loaded from the masters when the files have masters. Otherwise masters are loaded
   from the parameters. */
static mt_status mti_source_apply(mt_context *ctx, mt_checkpoint *c, const mti_source *s) {
    mti_part model = mti_source_part(c, s), optimizer = model;
    int masters = c->optimizer && !c->optimizer->desc.stochastic_rounding, i, what;
    int value = masters ? (int)MT_MASTER : (int)MTI_VALUE; /* scattering a master also writes its parameter */
    c->held = -1;
    if (s->optimizer.count > 0) optimizer = mti_optimizer_part(c);
    for (i = 0; i < c->params->count; i++) {
        if (masters && s->has_masters)
            MT_TRY(mti_source_scatter(ctx, c, &s->optimizer, &optimizer, i, MT_MASTER, value));
        else if (!mti_source_keeps(ctx, c, &s->model, &model, i))
            MT_TRY(mti_source_scatter(ctx, c, &s->model, &model, i, MTI_VALUE, value));
        for (what = MT_EXP_AVG; s->optimizer.count > 0 && what <= MT_EXP_AVG_SQ; what++)
            MT_TRY(mti_source_scatter(ctx, c, &s->optimizer, &optimizer, i, what, what));
    }
    return MT_SUCCESS;
}

/* The next save keeps the texts of the files that were loaded. */
static void mti_source_keep(mt_checkpoint *c, mti_source *s) {
    int i;
    for (i = 0; i < 2; i++) {
        mt_host_free(c->given[i]);
        c->given[i] = s->given[i];
        s->given[i] = NULL;
    }
}

static void mti_source_close(mti_source *s) {
    mti_set_close(&s->model);
    mti_set_close(&s->optimizer);
    mt_host_free(s->given[0]);
    mt_host_free(s->given[1]);
}

/* Opens and checks the optimizer's files. They have the masters of all parameters or of none. */
static mt_status mti_source_open_optimizer(mt_context *ctx, mt_checkpoint *c, const char *directory, mti_source *s) {
    mti_part part = mti_optimizer_part(c);
    mti_layout l = mti_part_layout(c, &part, 0, MT_MASTER);
    MT_TRY(mti_set_open(ctx, directory, part.stem, &s->optimizer));
    s->has_masters = mt_safetensors_set_find(&s->optimizer, l.name) != NULL;
    part.last = s->has_masters ? MT_MASTER : MT_EXP_AVG_SQ;
    return mti_source_check_part(ctx, c, &s->optimizer, &part);
}

/* Reads the training state and the optimizer's step from the first file. The state must be of step `wanted`. */
static mt_status mti_source_run(mt_context *ctx, const mti_source *s, int64_t wanted, mt_training_state *state,
                                mt_optimizer *optimizer) {
    const mt_safetensors *first = s->model.files[0];
    const char *note = mt_safetensors_metadata(first, "note");
    mt_field step = mti_optimizer_field(optimizer);
    memset(state, 0, sizeof *state);
    MT_TRY(mti_state_read(ctx, first, state));
    if (!note || strlen(note) >= sizeof state->note)
        return mt_fail(ctx, MT_ERR_DATA, "%s: its metadata has no note of at most %d bytes", first->path,
                       MT_NOTE_MAX - 1);
    memcpy(state->note, note, strlen(note) + 1);
    if (s->optimizer.count > 0) MT_TRY(mt_safetensors_fields(ctx, first, &step, 1));
    if (state->step == wanted) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA, "%s: its metadata has step '%lld', its directory %lld", first->path,
                   (long long)state->step, (long long)wanted);
}

/* Reads the training state, and checks that all files are of step `wanted` and of a version that can be read. */
static mt_status mti_source_state(mt_context *ctx, const mti_source *s, int64_t wanted, mt_training_state *state,
                                  mt_optimizer *optimizer) {
    const mt_safetensors *first = s->model.files[0];
    const char *step = mt_safetensors_metadata(first, "step"), *other;
    int i;
    MT_TRY(mti_source_run(ctx, s, wanted, state, optimizer));
    for (i = 0; i < s->model.count + s->optimizer.count; i++) {
        const mt_safetensors *file = i < s->model.count ? s->model.files[i] : s->optimizer.files[i - s->model.count];
        MT_TRY(mti_version_check(ctx, file, 1));
        other = mt_safetensors_metadata(file, "step");
        if (!other || strcmp(step, other) != 0)
            return mt_fail(ctx, MT_ERR_DATA, "%s: is of step %.24s, %s of %.24s", file->path, other ? other : "(none)",
                           mti_file_name(first->path), step);
    }
    return MT_SUCCESS;
}

/* Checks the program's fields without writing any. all = 1: every field must be there and valid, and those with
   must_match must match. all = 0: checks only fields with must_match that are there. */
static mt_status mti_source_fields(mt_context *ctx, const mt_checkpoint *c, const mti_source *s, int all) {
    const mt_safetensors *first = s->model.files[0];
    int i;
    for (i = 0; i < c->field_count; i++) {
        mt_field f = c->fields[i];
        const char *text = mt_safetensors_metadata(first, f.name);
        char ours[MT_FIELD_TEXT_MAX], theirs[MT_FIELD_TEXT_MAX], wanted[64];
        uint64_t value = 0;
        if (!all && (!text || !f.must_match)) continue;
        if (f.kind == MT_FIELD_TEXT) {
            if (!text || strlen(text) >= f.bytes) return mti_field_refuse(ctx, first, &f);
            if (!f.must_match || strncmp(text, (const char *)f.value, f.bytes) == 0) continue;
            snprintf(wanted, sizeof wanted, "'%.*s'", (int)mt_min((int64_t)f.bytes, 40), (const char *)f.value);
            return mt_safetensors_refuse(ctx, first, f.name, wanted);
        }
        mt_field_text(&f, ours);
        f.value = &value;
        MT_TRY(mt_safetensors_fields(ctx, first, &f, 1));
        mt_field_text(&f, theirs);
        if (f.must_match && strcmp(ours, theirs) != 0) return mt_safetensors_refuse(ctx, first, f.name, ours);
    }
    return MT_SUCCESS;
}

/* Writes the program's fields, after everything else has succeeded. */
static mt_status mti_source_take_fields(mt_context *ctx, const mt_checkpoint *c, const mti_source *s) {
    int i;
    for (i = 0; i < c->field_count; i++)
        if (!c->fields[i].must_match) MT_TRY(mt_safetensors_fields(ctx, s->model.files[0], &c->fields[i], 1));
    return MT_SUCCESS;
}

/* Checks that the arena has memory for the largest shard in f32. A scatter needs it for 16-bit parameters and for
   sharded optimizers. */
static mt_status mti_source_arena(mt_context *ctx, const mt_checkpoint *c) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor shard;
    int i;
    for (i = 0; i < c->params->count; i++) {
        const mt_tensor *value = &c->params->list[i]->value;
        if (value->dtype == MT_F32 && c->params->buckets.ranks <= 1) continue;
        MT_TRY(mt_arena_tensor(ctx, MT_F32, value->rows, value->cols, &shard));
        mt_arena_release(ctx, mark);
    }
    return MT_SUCCESS;
}

/* The optimizer's files, as mti_source_open_optimizer has found them. */
static mti_part mti_source_optimizer_part(const mt_checkpoint *c, const mti_source *s) {
    mti_part part = mti_optimizer_part(c);
    part.last = s->has_masters ? MT_MASTER : MT_EXP_AVG_SQ;
    return part;
}

/* Calls mti_source_check_numbers for each part. */
static mt_status mti_source_numbers(mt_context *ctx, const mt_checkpoint *c, const mti_source *s) {
    mti_part part = mti_source_part(c, s);
    MT_TRY(mti_source_check_numbers(ctx, c, &s->model, &part));
    if (s->optimizer.count == 0) return MT_SUCCESS;
    part = mti_source_optimizer_part(c, s);
    return mti_source_check_numbers(ctx, c, &s->optimizer, &part);
}

/* Opens and checks the files on this rank. state NULL: parameters only; otherwise state->step must be `step`. */
static mt_status mti_source_open(mt_context *ctx, mt_checkpoint *c, const char *directory, mti_source *s, int64_t step,
                                 mt_training_state *state, mt_optimizer *optimizer) {
    MT_TRY(mti_params_known(ctx, c->params, "mt_checkpoint_load"));
    MT_TRY(mti_checkpoint_params(ctx, "mt_checkpoint_load", c));
    MT_TRY(mti_source_arena(ctx, c));
    MT_TRY(mti_source_open_model(ctx, c, directory, s));
    if (state && c->optimizer) MT_TRY(mti_source_open_optimizer(ctx, c, directory, s));
    if (state) MT_TRY(mti_source_state(ctx, s, step, state, optimizer));
    MT_TRY(mti_source_fields(ctx, c, s, state != NULL));
    MT_TRY(mti_source_verify(ctx, c, s, state != NULL));
    return mti_source_numbers(ctx, c, s);
}

/* Calls mti_source_count for each part. Collective: called after mti_source_open has succeeded on every rank. */
static mt_status mti_source_counts(mt_context *ctx, mt_checkpoint *c, const mti_source *s) {
    mti_part part = mti_source_part(c, s);
    MT_TRY(mti_source_count(ctx, c, &s->model, &part));
    if (s->optimizer.count == 0) return MT_SUCCESS;
    part = mti_source_optimizer_part(c, s);
    return mti_source_count(ctx, c, &s->optimizer, &part);
}

/* All ranks must have read the same state from the same files: one whose file system lags may have seen others. */
static mt_status mti_load_compare(mt_context *ctx, const mt_checkpoint *c, const mti_source *s,
                                  mt_training_state *state, mt_optimizer *optimizer) {
    int i, files = s->model.count + s->optimizer.count;
    mti_told_list t;
    MT_TRY(mti_told_begin(ctx, MTI_STATE_FIELDS + 2 + files, &t));
    if (state) mti_told_add_state(&t, state, c->optimizer ? optimizer : NULL);
    for (i = 0; i < files; i++) {
        const mt_safetensors *file = i < s->model.count ? s->model.files[i] : s->optimizer.files[i - s->model.count];
        const char *checksum = mt_safetensors_metadata(file, "checksum");
        mti_told_add(&t, mti_file_name(file->path), "%zu bytes, checksum %.16s", file->map.bytes,
                     checksum ? checksum : "(none)");
    }
    return mti_told_end(ctx, c->params, state ? "mt_checkpoint_load" : "mt_checkpoint_import", 0, &t);
}

/* Checks everything first, then loads. state NULL: parameters only. */
static mt_status mti_checkpoint_load(mt_context *ctx, mt_checkpoint *c, const char *directory, int64_t step,
                                     mt_training_state *state) {
    mt_comm *world = c->params->grid->world;
    mt_training_state theirs;
    mt_optimizer steps;
    mti_source s;
    mt_status status;
    memset(&s, 0, sizeof s);
    memset(&steps, 0, sizeof steps);
    s.lenient = !state;
    status = mti_agree(ctx, world, c->exchange,
                       mti_source_open(ctx, c, directory, &s, step, state ? &theirs : NULL, &steps));
    if (status == MT_SUCCESS) status = mti_load_compare(ctx, c, &s, state ? &theirs : NULL, &steps);
    if (status == MT_SUCCESS) status = mti_agree(ctx, world, c->exchange, mti_source_counts(ctx, c, &s));
    if (status == MT_SUCCESS && !c->params->placed)
        status =
            mti_agree(ctx, world, c->exchange,
                      mti_params_begin(ctx, c->params, state ? "mt_checkpoint_load" : "mt_checkpoint_import", NULL));
    if (status == MT_SUCCESS) status = mti_agree(ctx, world, c->exchange, mti_source_apply(ctx, c, &s));
    if (status == MT_SUCCESS && state) status = mti_source_take_fields(ctx, c, &s);
    if (status == MT_SUCCESS) mti_source_keep(c, &s);
    mti_source_close(&s);
    if (status == MT_SUCCESS) c->params->torn = 0;
    if (status != MT_SUCCESS || !state) return status;
    *state = theirs;
    if (c->optimizer) c->optimizer->step = steps.step;
    return MT_SUCCESS;
}

static mt_status mti_load_check(mt_context *ctx, const char *function, const mt_checkpoint *c, const void *argument,
                                const char *name) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!c || !argument) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, c ? name : "checkpoint");
    if (mt_context_has_data(ctx)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: MT_DEVICE_META has no memory to load files into", function);
}

MT_API mt_status mt_checkpoint_load(mt_context *ctx, mt_checkpoint *checkpoint, int64_t step,
                                    mt_training_state *state) {
    char path[MT_PATH_MAX];
    MT_TRY(mti_load_check(ctx, "mt_checkpoint_load", checkpoint, state, "state"));
    MT_TRY(mti_directory_check(ctx, "mt_checkpoint_load", checkpoint));
    MT_TRY(mt_checkpoint_path(ctx, checkpoint->directory, step, path, sizeof path));
    return mti_checkpoint_load(ctx, checkpoint, path, step, state);
}

MT_API mt_status mt_checkpoint_import(mt_context *ctx, mt_checkpoint *checkpoint, const char *directory) {
    MT_TRY(mti_load_check(ctx, "mt_checkpoint_import", checkpoint, directory, "directory"));
    return mti_checkpoint_load(ctx, checkpoint, directory, -1, NULL);
}

/* ---- >>plan: the time of a step ---------------------------------------------------------------------------------- */

/* -- the text of a machine -- */

/* A rate of products, attention or memory, or a peak. */
typedef struct mti_rate {
    int key;         /* index in mti_machine_keys */
    char name[40];   /* of an operator; "": any */
    int dtype;       /* -1: any */
    double shape[3]; /* M, N, K; 0: any */
    double rate;
} mti_rate;

struct mt_machine {
    char name[96];
    double ranks_per_node, latency[2], bandwidth[2], operator_seconds, capacity, overlap; /* [0]: link, [1]: network */
    mti_rate *rates;
    int count, rates_capacity;
};

enum { MTI_GEMM_RATE, MTI_ATTENTION_RATE, MTI_MEMORY_RATE, MTI_PEAK_RATE, MTI_RATE_KINDS };

/* The keys. `values` has a letter for each value: t type, w name of an operator, n size or *, r rate (> 0), s seconds,
   i whole number, b 0 or 1. The first MTI_RATE_KINDS keys are rates. `at` is the place of the values of the others in
   mt_machine, one or two doubles. */
typedef struct mti_machine_key {
    const char *key, *values;
    size_t at[2];
} mti_machine_key;

#define MTI_AT_MACHINE(field) offsetof(mt_machine, field)
static const mti_machine_key mti_machine_keys[] = {
    {"gemm", "tnnnr", {0, 0}},
    {"attention", "wtr", {0, 0}},
    {"memory", "wtr", {0, 0}},
    {"peak", "tr", {0, 0}},
    {"operator", "s", {MTI_AT_MACHINE(operator_seconds), 0}},
    {"node", "i", {MTI_AT_MACHINE(ranks_per_node), 0}},
    {"link", "rs", {MTI_AT_MACHINE(bandwidth), MTI_AT_MACHINE(latency)}},
    {"network", "rs", {MTI_AT_MACHINE(bandwidth) + sizeof(double), MTI_AT_MACHINE(latency) + sizeof(double)}},
    {"overlap", "b", {MTI_AT_MACHINE(overlap), 0}},
    {"capacity", "r", {MTI_AT_MACHINE(capacity), 0}},
};
#define MTI_MACHINE_KEYS ((int)(sizeof mti_machine_keys / sizeof *mti_machine_keys))

/* The text that is read, at one of its lines. */
typedef struct mti_machine_text {
    const char *path, *at, *end; /* end: of the line, or of its comment */
    int line;
} mti_machine_text;

/* Reads the next word of the line. Returns its length, 0 at the end of the line. */
static size_t mti_machine_word(mti_machine_text *t, const char **word) {
    while (t->at < t->end && (*t->at == ' ' || *t->at == '\t' || *t->at == '\r')) t->at++;
    *word = t->at;
    while (t->at < t->end && *t->at != ' ' && *t->at != '\t' && *t->at != '\r') t->at++;
    return (size_t)(t->at - *word);
}

static int mti_machine_number(const char *word, size_t n, double *out) {
    mti_json j = mti_json_begin(word, n);
    *out = mti_json_number(&j);
    mti_json_end(&j);
    return !j.error && *out >= 0 && *out <= DBL_MAX;
}

/* Reads a value of the kind `letter` into *row, or into *number. Returns what it must be, or NULL. */
static const char *mti_machine_value(char letter, const char *word, size_t n, mti_rate *row, double *number) {
    int any = n == 1 && word[0] == '*', i;
    if (letter == 'w') {
        if (n >= sizeof row->name || memchr(word, 0, n)) return "a name of at most 39 characters";
        if (!any) memcpy(row->name, word, n);
        return NULL;
    }
    if (letter == 't') {
        row->dtype = -1;
        for (i = MT_F32; i <= MT_F16; i++)
            if (strlen(mt_dtype_name((mt_dtype)i)) == n && memcmp(mt_dtype_name((mt_dtype)i), word, n) == 0)
                row->dtype = i;
        return any || row->dtype >= 0 ? NULL : "f32, bf16, f16 or *";
    }
    *number = 0;
    if (letter == 'n' && any) return NULL;
    if (!mti_machine_number(word, n, number)) return letter == 'n' ? "a number above 0 or *" : "a number";
    if (letter == 'r' && !(*number > 0)) return "a number above 0";
    if (letter == 'n' && !(*number > 0)) return "a number above 0 or *";
    if (letter == 'i' && (*number < 1 || *number > INT32_MAX || *number != floor(*number)))
        return "a whole number from 1";
    return letter == 'b' && *number != 0 && *number != 1 ? "0 or 1" : NULL;
}

/* Reads the values of a key into `row` and `numbers`. */
static mt_status mti_machine_values(mt_context *ctx, mti_machine_text *t, const mti_machine_key *key, mti_rate *row,
                                    double numbers[4]) {
    const char *word, *wanted, *letter;
    size_t n;
    int count = 0;
    for (letter = key->values; *letter; letter++) {
        n = mti_machine_word(t, &word);
        if (n == 0)
            return mt_fail(ctx, MT_ERR_DATA, "%s, line %d: '%s' has %d values, must have %zu", t->path, t->line,
                           key->key, (int)(letter - key->values), strlen(key->values));
        wanted = mti_machine_value(*letter, word, n, row, &numbers[count]);
        if (wanted)
            return mt_fail(ctx, MT_ERR_DATA, "%s, line %d: '%s' has '%.*s', must be %s", t->path, t->line, key->key,
                           (int)(n < 40 ? n : 40), word, wanted);
        count += *letter != 'w' && *letter != 't';
    }
    n = mti_machine_word(t, &word);
    if (n == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA, "%s, line %d: '%.*s' follows the values of '%s'", t->path, t->line,
                   (int)(n < 40 ? n : 40), word, key->key);
}

static mt_status mti_machine_add_rate(mt_context *ctx, mt_machine *m, const mti_rate *rate) {
    void *list = m->rates;
    MT_TRY(mti_reserve(ctx, &list, m->count, &m->rates_capacity, sizeof *m->rates));
    m->rates = (mti_rate *)list;
    m->rates[m->count++] = *rate;
    return MT_SUCCESS;
}

/* The name of a machine is the rest of the line. */
static void mti_machine_named(mt_machine *m, const mti_machine_text *t) {
    const char *first = t->at, *end = t->end;
    while (first < end && (*first == ' ' || *first == '\t')) first++;
    while (end > first && (end[-1] == ' ' || end[-1] == '\t' || end[-1] == '\r')) end--;
    snprintf(m->name, sizeof m->name, "%.*s", (int)(end - first), first);
}

static mt_status mti_machine_line(mt_context *ctx, mt_machine *m, mti_machine_text *t) {
    const char *word;
    size_t n = mti_machine_word(t, &word);
    double numbers[4] = {0, 0, 0, 0};
    mti_rate row;
    int i;
    if (n == 0) return MT_SUCCESS;
    if (n == 4 && memcmp(word, "name", 4) == 0) return mti_machine_named(m, t), MT_SUCCESS;
    memset(&row, 0, sizeof row);
    for (i = 0; i < MTI_MACHINE_KEYS; i++) {
        const mti_machine_key *key = &mti_machine_keys[i];
        if (strlen(key->key) != n || memcmp(key->key, word, n) != 0) continue;
        MT_TRY(mti_machine_values(ctx, t, key, &row, numbers));
        if (i >= MTI_RATE_KINDS) {
            memcpy((char *)m + key->at[0], &numbers[0], sizeof(double));
            if (key->at[1]) memcpy((char *)m + key->at[1], &numbers[1], sizeof(double));
            return MT_SUCCESS;
        }
        row.key = i;
        if (i == MTI_GEMM_RATE) memcpy(row.shape, numbers, sizeof row.shape);
        if ((row.shape[0] > 0) != (row.shape[1] > 0) || (row.shape[0] > 0) != (row.shape[2] > 0))
            return mt_fail(ctx, MT_ERR_DATA, "%s, line %d: the shape of 'gemm' must be three numbers or * * *", t->path,
                           t->line);
        row.rate = numbers[i == MTI_GEMM_RATE ? 3 : 0];
        return mti_machine_add_rate(ctx, m, &row);
    }
    return mt_fail(ctx, MT_ERR_DATA, "%s, line %d: '%.*s' is no key of a machine", t->path, t->line,
                   (int)(n < 40 ? n : 40), word);
}

static mt_status mti_machine_lines(mt_context *ctx, const char *path, const char *text, size_t bytes, mt_machine *m) {
    mti_machine_text t;
    const char *end = text + bytes, *next;
    t.path = path;
    for (t.line = 1; text < end; t.line++, text = next + 1) {
        next = (const char *)memchr(text, '\n', (size_t)(end - text));
        if (!next) next = end;
        t.at = text;
        t.end = (const char *)memchr(text, '#', (size_t)(next - text));
        if (!t.end) t.end = next;
        MT_TRY(mti_machine_line(ctx, m, &t));
        if (next == end) break;
    }
    return MT_SUCCESS;
}

#define MTI_MACHINE_BYTES ((size_t)1 << 20)

static mt_status mti_machine_size(mt_context *ctx, const char *path, size_t bytes) {
    if (bytes <= MTI_MACHINE_BYTES) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA, "%s: has %zu bytes, must have at most %zu", path, bytes, MTI_MACHINE_BYTES);
}

static mt_status mti_machine_new(mt_context *ctx, const char *path, const char *text, size_t bytes, mt_machine **out) {
    void *memory;
    mt_machine *m;
    mt_status status;
    MT_TRY(mti_machine_size(ctx, path, bytes));
    MT_TRY(mti_host_new(ctx, sizeof *m, &memory));
    m = (mt_machine *)memory;
    m->ranks_per_node = 1;
    m->overlap = 1;
    status = mti_machine_lines(ctx, path, text, bytes, m);
    if (status == MT_SUCCESS) *out = m;
    else mt_machine_destroy(m);
    return status;
}

MT_API mt_status mt_machine_create(mt_context *ctx, const char *text, mt_machine **out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!text || !out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_machine_create: %s is NULL", text ? "out" : "text");
    *out = NULL;
    return mti_machine_new(ctx, "machine", text, strlen(text), out);
}

MT_API mt_status mt_machine_read(mt_context *ctx, const char *path, mt_machine **out) {
    mti_mapped file;
    void *text = NULL;
    mt_status status = MT_SUCCESS;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!path || !out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_machine_read: %s is NULL", path ? "out" : "path");
    *out = NULL;
    MT_TRY(mti_mapped_open(ctx, path, 0, &file));
    status = mti_machine_size(ctx, path, file.bytes);
    if (status == MT_SUCCESS) status = mti_host_new(ctx, file.bytes ? file.bytes : 1, &text);
    if (status == MT_SUCCESS) status = mti_mapped_read(ctx, path, &file, 0, file.bytes, text);
    if (status == MT_SUCCESS) status = mti_machine_new(ctx, path, (const char *)text, file.bytes, out);
    mt_host_free(text);
    mti_mapped_close(&file);
    return status;
}

MT_API void mt_machine_destroy(mt_machine *machine) {
    if (!machine) return;
    mt_host_free(machine->rates);
    mt_host_free(machine);
}

MT_API const char *mt_machine_name(const mt_machine *machine) { return machine ? machine->name : ""; }
MT_API double mt_machine_capacity(const mt_machine *machine) { return machine ? machine->capacity : 0; }

/* -- the time of one entry -- */

/* The rate of a kind for a name and a type; 0 if there is none. A line that names the operator counts before one that
   names only the type. Integers count as f32. */
static double mti_rate_of(const mt_machine *m, int key, const char *name, mt_dtype dtype) {
    double rate = 0;
    int i, best = -1;
    if (dtype > MT_F16) dtype = MT_F32;
    for (i = 0; i < m->count; i++) {
        const mti_rate *r = &m->rates[i];
        int fits = 2 * (r->name[0] != 0) + (r->dtype >= 0);
        if (r->key != key || r->shape[0] > 0) continue;
        if ((r->name[0] && strcmp(r->name, name) != 0) || (r->dtype >= 0 && r->dtype != (int)dtype)) continue;
        if (fits >= best) best = fits, rate = r->rate;
    }
    return rate;
}

MT_API double mt_machine_peak(const mt_machine *machine, mt_dtype dtype) {
    return machine ? mti_rate_of(machine, MTI_PEAK_RATE, "", dtype) : 0;
}

/* Has a line with a shape the type of this entry? `typed`: only lines that name the type. */
static int mti_has_shape(const mti_rate *r, const mt_trace_entry *e, int typed) {
    return r->key == MTI_GEMM_RATE && r->shape[0] > 0 && (r->dtype == (int)e->dtype || (!typed && r->dtype < 0));
}

/* The square of the distance between the logarithms of the shapes. */
static double mti_shape_distance(const mti_rate *r, const mt_trace_entry *e) {
    const double shape[3] = {(double)e->m, (double)e->n, (double)e->k};
    double square = 0;
    int d;
    for (d = 0; d < 3; d++) {
        double distance = log(shape[d] / r->shape[d]);
        square += distance * distance;
    }
    return square;
}

/* The rate of a product from the lines with shapes; 0 if there are none. *exact = a line has this shape. */
static double mti_shape_rate(const mt_machine *m, const mt_trace_entry *e, int *exact) {
    double sum = 0, weights = 0, rate = 0;
    int i, typed = 0;
    for (i = 0; i < m->count; i++) typed |= mti_has_shape(&m->rates[i], e, 1);
    *exact = 0;
    for (i = 0; i < m->count; i++) {
        double square, weight;
        if (!mti_has_shape(&m->rates[i], e, typed)) continue;
        square = mti_shape_distance(&m->rates[i], e);
        if (square < 1e-12) {
            *exact = 1;
            rate = m->rates[i].rate;
            continue;
        }
        weight = 1 / (square * square);
        sum += weight * log(m->rates[i].rate);
        weights += weight;
    }
    if (*exact) return rate;
    return weights > 0 ? exp(sum / weights) : 0;
}

/* The time of the FLOPs of an entry, but at least that of its bytes. */
static double mti_flops_seconds(const mt_machine *m, const mt_trace_entry *e, double rate) {
    double memory = mti_rate_of(m, MTI_MEMORY_RATE, e->name, e->dtype), seconds = e->flops / rate;
    return memory > 0 && e->bytes / memory > seconds ? e->bytes / memory : seconds;
}

/* A line for this shape was measured with its bytes, so they are not counted again. */
static double mti_gemm_seconds(const mt_machine *m, const mt_trace_entry *e) {
    double rate;
    int exact = 0;
    if (!(e->flops > 0)) return 0;
    rate = mti_shape_rate(m, e, &exact);
    if (exact) return e->flops / rate;
    if (!(rate > 0)) rate = mti_rate_of(m, MTI_GEMM_RATE, "", e->dtype);
    return rate > 0 ? mti_flops_seconds(m, e, rate) : -1;
}

static double mti_attention_seconds(const mt_machine *m, const mt_trace_entry *e) {
    double rate = mti_rate_of(m, MTI_ATTENTION_RATE, e->name, e->dtype);
    return rate > 0 ? mti_flops_seconds(m, e, rate) : -1;
}

static double mti_communication_seconds(const mt_machine *m, const mt_trace_entry *e) {
    double n = e->ranks, node = m->ranks_per_node, share = 1, steps = ceil(log2(n));
    int leaves = e->span >= m->ranks_per_node; /* 1: the group has ranks in other nodes */
    double bandwidth = m->bandwidth[0], latency = m->latency[leaves];
    if (leaves) {
        double together = floor(node * (n - 1) / e->span); /* ranks of the group in one node */
        double across = m->bandwidth[1] * (together > 1 ? together : 1) / node;
        if (across < bandwidth || node == 1) bandwidth = across;
    }
    if (!(bandwidth > 0)) return -1;
    switch (e->collective) {
    case MT_ALL_REDUCE: return 2 * ((n - 1) / n * e->bytes / bandwidth + steps * latency);
    case MT_ALL_GATHER:
    case MT_REDUCE_SCATTER: share = (n - 1) / n; break;
    case MT_SEND:
    case MT_RECV: steps = 1; break;
    case MT_BROADCAST:
    case MT_BARRIER:
    case MT_COLLECTIVE_COUNT: break;
    }
    return share * e->bytes / bandwidth + steps * latency;
}

/* The seconds of an entry; -1: the machine has no rate for it. */
static double mti_entry_seconds(const mt_machine *m, const mt_trace_entry *e) {
    double rate = 0, seconds = 0;
    switch (e->work) {
    case MT_WORK_GEMM: seconds = mti_gemm_seconds(m, e); break;
    case MT_WORK_ATTENTION: seconds = mti_attention_seconds(m, e); break;
    case MT_WORK_MEMORY:
    case MT_WORK_OPTIMIZER:
        rate = mti_rate_of(m, MTI_MEMORY_RATE, e->name, e->dtype);
        seconds = rate > 0 ? e->bytes / rate : -1;
        break;
    case MT_WORK_COMMUNICATION: return mti_communication_seconds(m, e);
    case MT_WORK_OVERLAP_BEGIN:
    case MT_WORK_OVERLAP_END:
    case MT_WORK_OVERLAP_WAIT:
    case MT_WORK_COUNT: return 0;
    }
    return seconds < 0 ? -1 : seconds + m->operator_seconds;
}

/* Refuses what the library does not write into a trace. */
static mt_status mti_trace_check(mt_context *ctx, const char *function, size_t at, const mt_trace_entry *e) {
    const char *wrong = NULL;
    if (e->work < MT_WORK_MEMORY || e->work >= MT_WORK_COUNT) wrong = "work";
    else if (!e->name) wrong = "name";
    else if (!(e->flops >= 0 && e->flops <= DBL_MAX)) wrong = "flops";
    else if (!(e->bytes >= 0 && e->bytes <= DBL_MAX)) wrong = "bytes";
    else if (e->work == MT_WORK_GEMM && (e->m < 0 || e->n < 0 || e->k < 0)) wrong = "m, n, k";
    else if (e->work == MT_WORK_COMMUNICATION && (e->ranks < 2 || e->span < e->ranks - 1)) wrong = "ranks, span";
    else if (e->collective < MT_ALL_REDUCE || e->collective >= MT_COLLECTIVE_COUNT) wrong = "collective";
    else if (e->stream < MT_STREAM_NONE || e->stream > MT_STREAM_THIRD) wrong = "stream";
    else if (e->ticket < 0 || e->ticket > MT_OVERLAP_TICKET_THIRD) wrong = "ticket";
    if (!wrong) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: entry %zu (%s): %s is not valid", function, at, e->name ? e->name : "",
                   wrong);
}

static mt_status mti_plan_seconds(mt_context *ctx, const char *function, const mt_machine *m, const mt_trace_entry *e,
                                  double *seconds) {
    const char *key = "memory";
    *seconds = mti_entry_seconds(m, e);
    if (*seconds >= 0) return MT_SUCCESS;
    *seconds = 0;
    if (e->work == MT_WORK_GEMM) key = "gemm";
    else if (e->work == MT_WORK_ATTENTION) key = "attention";
    else if (e->work == MT_WORK_COMMUNICATION) key = e->span >= m->ranks_per_node ? "network" : "link";
    return mt_fail(ctx, MT_ERR_DATA, "%s: machine '%s' has no '%s' for %s of %s%s", function, m->name, key, e->name,
                   mt_dtype_name(e->dtype), e->work == MT_WORK_COMMUNICATION ? " between the ranks" : "");
}

MT_API mt_status mt_machine_seconds(mt_context *ctx, const mt_machine *machine, const mt_trace_entry *entry,
                                    double *seconds) {
    static const char *const function = "mt_machine_seconds";
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!machine || !entry || !seconds)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function,
                       !machine ? "machine"
                       : entry  ? "seconds"
                                : "entry");
    MT_TRY(mti_trace_check(ctx, function, 0, entry));
    return mti_plan_seconds(ctx, function, machine, entry, seconds);
}

/* -- the time of a step: each stage has a clock, and one for each stream -- */

/* A stage while its trace is run. It stops at an entry for which it waits for other stages. */
typedef struct mti_stage_run {
    const mt_trace *trace;
    size_t at;         /* the next entry */
    double now;        /* the clock of the computation */
    double streams[3]; /* when the work in a stream ends */
    double tickets[MT_OVERLAP_TICKET_THIRD + 1];
    mt_stream stream;   /* of the entries that follow; MT_STREAM_NONE: they advance `now` */
    int stopped;        /* 1: at an entry that needs other stages */
    int sent, received; /* 1: this half of the entry is done */
    double done;        /* when the halves were done */
    mt_step_time *time;
} mti_stage_run;

typedef struct mti_step_run {
    mt_context *ctx;
    const mt_machine *machine;
    mti_stage_run *stages;
    int count;
    int ranks; /* number of ranks of a stage; 0: no stage needs another one */
} mti_step_run;

static int mti_is_message(const mt_trace_entry *e) {
    return e->work == MT_WORK_COMMUNICATION && (e->collective == MT_SEND || e->collective == MT_RECV);
}

/* Does the entry need other stages: a message between stages, or a collective whose group has ranks of several? */
static int mti_needs_stages(const mti_step_run *run, const mt_trace_entry *e) {
    return e->work == MT_WORK_COMMUNICATION && run->ranks > 0 && e->span >= run->ranks;
}

/* Advances the clock to `until`, when work in another stream ends. The difference counts as communication, whatever
   the work is. */
static void mti_stage_wait(mti_stage_run *s, double until) {
    if (until <= s->now) return;
    s->time->communication += until - s->now;
    s->time->overlapped -= until - s->now;
    s->now = until;
}

/* The time of an operator or a communication: in another stream, or in its part of the step. */
static void mti_stage_spend(mti_stage_run *s, mt_work work, double seconds) {
    mt_step_time *t = s->time;
    double *const parts[] = {&t->memory, &t->gemm, &t->attention, &t->optimizer, &t->communication};
    if (s->stream != MT_STREAM_NONE) {
        s->streams[s->stream] += seconds;
        t->overlapped += seconds;
        return;
    }
    *parts[work] += seconds; /* in the order of mt_work */
    s->now += seconds;
}

/* Adds an entry that needs no other stage. */
static mt_status mti_stage_add(const mti_step_run *run, mti_stage_run *s, const mt_trace_entry *e) {
    double seconds;
    MT_TRY(mti_plan_seconds(run->ctx, "mt_plan_step", run->machine, e, &seconds));
    if (e->recomputed) s->time->recomputed += e->flops;
    else s->time->flops += e->flops;
    if (e->work <= MT_WORK_COMMUNICATION) {
        mti_stage_spend(s, e->work, seconds);
    } else if (e->work == MT_WORK_OVERLAP_BEGIN) {
        s->stream = run->machine->overlap != 0 ? e->stream : MT_STREAM_NONE;
        if (s->streams[s->stream] < s->now) s->streams[s->stream] = s->now;
    } else if (e->work == MT_WORK_OVERLAP_END) {
        s->tickets[e->ticket] = s->stream == MT_STREAM_NONE ? 0 : s->streams[s->stream];
        s->stream = MT_STREAM_NONE;
    } else {
        mti_stage_wait(s, s->tickets[e->ticket]);
    }
    return MT_SUCCESS;
}

/* Runs a stage until it needs other stages, or to its end. */
static mt_status mti_stage_advance(const mti_step_run *run, mti_stage_run *s) {
    for (; s->at < s->trace->count; s->at++) {
        const mt_trace_entry *e = &s->trace->entries[s->at];
        MT_TRY(mti_trace_check(run->ctx, "mt_plan_step", s->at, e));
        if (mti_needs_stages(run, e)) {
            s->stopped = 1;
            s->sent = !mti_is_message(e) || e->to < 0;
            s->received = !mti_is_message(e) || e->from < 0;
            s->done = s->now;
            return MT_SUCCESS;
        }
        MT_TRY(mti_stage_add(run, s, e));
    }
    mti_stage_wait(s, s->streams[MT_STREAM_SECOND]);
    mti_stage_wait(s, s->streams[MT_STREAM_THIRD]);
    return MT_SUCCESS;
}

static const mt_trace_entry *mti_stage_entry(const mti_stage_run *s) {
    return s->stopped ? &s->trace->entries[s->at] : NULL;
}

/* Ends the entry at which the stage has stopped. `seconds` of it are communication, the rest is a wait. */
static void mti_stage_go_on(mti_stage_run *s, double done, double seconds) {
    double all = done - s->now;
    if (seconds > all) seconds = all;
    s->time->communication += seconds;
    s->time->bubble += all - seconds;
    s->now = done;
    s->stopped = 0;
    s->at++;
}

/* Delivers the message of stage `from`, if its receiver waits for it. Returns 1 if it does. */
static int mti_deliver(mti_step_run *run, int from, double seconds) {
    mti_stage_run *a = &run->stages[from], *b;
    const mt_trace_entry *sends = mti_stage_entry(a), *receives;
    double at;
    if (!sends || !mti_is_message(sends) || a->sent || sends->to >= run->count) return 0;
    b = &run->stages[sends->to];
    receives = mti_stage_entry(b);
    if (!receives || !mti_is_message(receives) || b->received || receives->from != from) return 0;
    at = (a->now > b->now ? a->now : b->now) + seconds;
    a->sent = b->received = 1;
    if (a->done < at) a->done = at;
    if (b->done < at) b->done = at;
    return 1;
}

/* Does the stage wait in this collective? */
static int mti_waits_in(const mti_stage_run *s, const mt_trace_entry *collective) {
    const mt_trace_entry *e = mti_stage_entry(s);
    return e && !mti_is_message(e) && e->collective == collective->collective && e->ranks == collective->ranks &&
           e->span == collective->span && e->bytes == collective->bytes;
}

/* Runs a collective for which as many stages wait as it has. Returns 1 if there are as many. */
static int mti_stages_meet(mti_step_run *run, const mt_trace_entry *e, double seconds) {
    int wanted = e->ranks < run->count ? e->ranks : run->count, there = 0, i;
    double at = 0;
    for (i = 0; i < run->count; i++) {
        if (!mti_waits_in(&run->stages[i], e)) continue;
        there++;
        if (run->stages[i].now > at) at = run->stages[i].now;
    }
    if (there < wanted) return 0;
    for (i = 0; i < run->count; i++)
        if (mti_waits_in(&run->stages[i], e)) mti_stage_go_on(&run->stages[i], at + seconds, seconds);
    return 1;
}

/* Does what can be done for the stages that have stopped. *progress = 1 if something was done. */
static mt_status mti_exchange(mti_step_run *run, int *progress) {
    int i;
    for (i = 0; i < run->count; i++) {
        mti_stage_run *s = &run->stages[i];
        const mt_trace_entry *e = mti_stage_entry(s);
        double seconds;
        if (!e) continue;
        MT_TRY(mti_plan_seconds(run->ctx, "mt_plan_step", run->machine, e, &seconds));
        if (!mti_is_message(e)) {
            if (mti_stages_meet(run, e, seconds)) *progress = 1;
            continue;
        }
        if (mti_deliver(run, i, seconds)) *progress = 1;
        if (s->sent && s->received) {
            mti_stage_go_on(s, s->done, seconds);
            *progress = 1;
        }
    }
    return MT_SUCCESS;
}

/* Runs all stages to their ends. */
static mt_status mti_step_run_all(mti_step_run *run) {
    int i, progress = 1, ended = 0;
    while (progress && ended < run->count) {
        progress = ended = 0;
        for (i = 0; i < run->count; i++) {
            mti_stage_run *s = &run->stages[i];
            size_t before = s->at;
            if (!s->stopped) MT_TRY(mti_stage_advance(run, s));
            progress |= s->at > before;
            ended += !s->stopped && s->at == s->trace->count;
        }
        if (ended < run->count) MT_TRY(mti_exchange(run, &progress));
    }
    if (ended == run->count) return MT_SUCCESS;
    for (i = 0; !run->stages[i].stopped; i++) {
    }
    return mt_fail(run->ctx, MT_ERR_ARGUMENT, "mt_plan_step: stage %d waits for other stages in entry %zu (%s)", i,
                   run->stages[i].at, mti_stage_entry(&run->stages[i])->name);
}

/* The number of ranks of a stage is the distance of two ranks of the pipeline group, the group with messages whose
   ranks are farthest apart. */
static int mti_stage_ranks(const mt_trace_entry *e, int before) {
    int distance = mti_is_message(e) && e->ranks > 1 ? e->span / (e->ranks - 1) : 0;
    return distance > before ? distance : before;
}

MT_API mt_status mt_plan_step(mt_context *ctx, const mt_machine *machine, const mt_trace *traces, int stages,
                              mt_step_time *out) {
    static const char *const function = "mt_plan_step";
    mti_step_run run;
    void *memory;
    double end = 0;
    mt_status status;
    int i;
    size_t j;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!machine || !traces || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function,
                       !machine ? "machine"
                       : traces ? "out"
                                : "traces");
    MT_TRY(mt_check_integer(ctx, function, NULL, "stages", stages, 1, INT32_MAX));
    MT_TRY(mti_host_new(ctx, (size_t)stages * sizeof *run.stages, &memory));
    memset(out, 0, (size_t)stages * sizeof *out);
    memset(&run, 0, sizeof run);
    run.ctx = ctx;
    run.machine = machine;
    run.stages = (mti_stage_run *)memory;
    run.count = stages;
    for (i = 0; i < stages; i++) {
        run.stages[i].trace = &traces[i];
        run.stages[i].time = &out[i];
        for (j = 0; stages > 1 && j < traces[i].count; j++)
            run.ranks = mti_stage_ranks(&traces[i].entries[j], run.ranks);
    }
    status = mti_step_run_all(&run);
    for (i = 0; i < stages; i++)
        if (run.stages[i].now > end) end = run.stages[i].now;
    for (i = 0; status == MT_SUCCESS && i < stages; i++) {
        out[i].bubble += end - run.stages[i].now;
        out[i].seconds = end;
    }
    mt_host_free(memory);
    return status;
}

#ifdef __cplusplus
}
#endif

#endif /* MEGATRON_IMPLEMENTATION */
