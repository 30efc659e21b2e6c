/* ---- registry of parameters -------------------------------------------------------------------------------------- */

#pragma once
#include "params.h"
#include "invariant.c"
#include "../ops/gemm_packed.h"
#include "../ops/multi_tensor.h"

/* Memory that lives as long as the registry, such as the layers of a model (host) or rotary tables (device). */
typedef struct mti_buffer {
    void *data;
    size_t bytes;
    int on_host;
    size_t mark; /* value of mt_params_mark before this buffer was added */
    struct mti_buffer *next;
} mti_buffer;

/* The gradient buckets of a registry, see buckets.c. size, early, final and sent count elements of the registry's
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
    int64_t offset;         /* of the first element */
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
    int unwritten; /* 1: the gradient counts as zero, but its memory was not filled (mt_params_zero_grad_lazy) */
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
    int lazy;                 /* 1: the step began with mt_params_zero_grad_lazy */
    int unwritten;            /* number of parameters with mti_entry.unwritten */
    int recorded;             /* 1: a call that changes or reads the state was recorded in a CUDA graph */
    const mt_param *added;    /* with MTI_GRADIENTS_ADDED: the first parameter to whose gradient a layer has added */
    /* the micro-batch whose gradients are added: of mt_pipeline_run (positive) or mt_check_micro_batch (negative) */
    int64_t micro_batch;      /* 0: not known */
    mt_multi_tensor *squares; /* the gradients, for the norm */
    mti_buffer *buffers;      /* the newest first */
    int buffer_count;
    mt_params *next_registry; /* see mti_parallel.registries */
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
static void mti_params_unlist(mt_context *ctx, const mt_params *params);

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

/* Forgets the weight gradients of the registry that were left for later. */
static void mti_params_undefer(const mt_context *ctx, const mt_params *params) {
    mti_parallel *p = mti_parallel_of(ctx);
    mti_deferred *d = p ? &p->deferred : NULL;
    int i, kept = 0;
    for (i = 0; d && i < d->count; i++)
        if (d->list[i].weight->registry != params) d->list[kept++] = d->list[i];
    if (d) d->count = kept;
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
    mti_params_undefer(ctx, params);
    mti_params_unlist(ctx, params);
    mti_params_free(ctx, params);
    for (i = 0; i < params->count; i++) mt_host_free(params->list[i]);
    mt_host_free(params->list);
    mt_host_free(params);
}
