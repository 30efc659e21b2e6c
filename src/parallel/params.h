/* ---- parameters -------------------------------------------------------------------------------------------------- */

#pragma once
#include "grid.h"
#include "../check/placements.h"

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
   cols], contiguous. They are valid after mt_params_init, or after mt_params_bind of all values; callers may read and
   write them (grad in a step that begins with mt_params_zero_grad_lazy: after mt_param_touch_grad). When an optimizer
   has masters (16-bit parameters without stochastic_rounding), its next step overwrites what was written to value: also
   write the master, with mt_optimizer_scatter and MT_MASTER. In invariant mode value and grad hold the rank's virtual
   shards one after the other, each of them contiguous. A matrix that is split by columns is then [shards * rows,
   local_features / shards]. */
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
   Call it after adding all parameters. Values and gradients are bound before mt_params_init, and exp_avg, exp_avg_sq
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

/* Does the same, but does not write the zeros of the weights of linear layers. They count as zero, and the first
   product of a backward that would add to such a gradient writes it instead. That saves a fill, and the read of one
   product. All calls that take the registry, or the parameter, see zeros where nothing was written: mt_sync_gradients,
   the norm, the optimizer, mt_param_gather, the hash log. With the built-in products and on a GPU the results have the
   same bits, except that an element of a gradient may be -0 where it would be +0. That takes a sum of products that
   underflows; norm and optimizer give the same bits for both. oneDNN and CBLAS may round a product that they write
   differently from one that they add.
   In such a step, a program that reads or writes param->grad of such a weight itself (with its own code, an operator of
   mt_kernels.cuh, a collective, or a layer of tensors that has it as its dw) first calls mt_param_touch_grad, unless
   a backward of the layer, mt_sync_gradients or mt_grad_norm came before. So does a program that writes all
   gradients by hand. Otherwise it reads what the memory held before, or what it has written is lost. In check mode
   the memory holds NaN until then. mt_check_gradient includes mt_param_touch_grad. A program that cannot say who
   reads its gradients calls mt_params_zero_grad.
   With CUDA graphs, the zeros that are left out are filled in before a recording, at its end, and before a launch. So
   record the products in the graph that has this call.
   MT_ERR_ARGUMENT: the parameters have no memory yet, or ctx is not the context of the registry. */
MT_API mt_status mt_params_zero_grad_lazy(mt_context *ctx, mt_params *params);

/* Fills the gradient of a parameter with zeros if it counts as zero and nothing has written it since
   mt_params_zero_grad_lazy. Otherwise it does nothing. Afterwards the memory of param->grad is the gradient, which the
   program may read, overwrite and add to. MT_ERR_ARGUMENT: param is NULL. */
MT_API mt_status mt_param_touch_grad(mt_context *ctx, const mt_param *param);

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

/* What a registry has. The parameters belong to the registry: they are valid until mt_params_destroy. */
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
