/* ---- options of the layers --------------------------------------------------------------------------------------- */

#pragma once
#include "options.h"
#include "hash_log.h"
#include "authors.h"
#include "system.h"
#include "../ops/authors.h"
#include "../ops/system.h"

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
    mti_own_gradient *own;
    mti_noted_sum sums[MTI_NOTED_SUMS];
    int count, oldest;
    int over_tokens; /* 1 while mt_sum_over_tokens runs */
} mti_guard;

#define MTI_DEFERRED_MOST 4

/* The weight gradients of row-parallel layers that wait for a reduction to hide. Others are computed at once. */
typedef struct mti_deferred_product {
    const mt_param *weight;
    mt_tensor dy, x;
} mti_deferred_product;

typedef struct mti_deferred {
    mti_deferred_product list[MTI_DEFERRED_MOST];
    int count, depth; /* depth: calls of mt_defer_weight_gradients that have not ended */
} mti_deferred;

/* The content of the context's slot MT_SLOT_PARALLEL. */
typedef struct mti_parallel {
    mt_parallel_options options;
    int trust_ids;
    int hold;               /* 1 + the slot of mt_layers_hold_reduction; 0: none */
    mt_hash_log *hash_log;  /* NULL: off */
    int64_t backwards;      /* backwards that mt_pipeline_run has begun in this context */
    int64_t micro_batch;    /* number of the backward that mt_pipeline_run runs now; 0: none */
    mt_params *registries;  /* those whose parameters have memory */
    mti_guard guard;        /* invariant mode */
    int context_ranks;      /* V_c in invariant mode, of the newest registry; 0: 1 */
    int context_shards;     /* how many of these ranks this one is; 0: 1 */
    int rows_are_sequences; /* see mt_rows_are_sequences */
    mti_deferred deferred;
} mti_parallel;

static mti_parallel *mti_parallel_of(const mt_context *ctx) {
    return (mti_parallel *)mt_context_slot(ctx, MT_SLOT_PARALLEL);
}

static void mti_parallel_destroy(mt_context *ctx, void *memory) {
    mti_own_gradient *own = ((mti_parallel *)memory)->guard.own;
    mt_context_set_forget(ctx, NULL);
    mt_context_set_graph_border(ctx, NULL);
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

/* Whether a number of virtual context ranks is allowed. 0: none. */
static int mti_is_context_ranks(int ranks) { return ranks >= 0 && ranks <= 1024 && !(ranks & (ranks - 1)); }

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
    MT_TRY(mt_check_integer(ctx, "mt_parallel_set_options", NULL, "interleave", o.interleave, 0, 1));
    MT_TRY(mt_check_enum(ctx, "mt_parallel_set_options", NULL, "context.comm_type", (int)o.context.comm_type,
                         MT_CP_COMM_TYPE_WORDS));
    if (!mti_is_context_ranks(o.context.invariant))
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "mt_parallel_set_options: context.invariant is %d, must be 0 or a power of two up to 1024",
                       o.context.invariant);
    MT_TRY(mti_parallel_open(ctx, &p));
    if (p->context_ranks > 1 && o.context.invariant != p->context_ranks)
        return mt_fail(
            ctx, MT_ERR_ARGUMENT,
            "mt_parallel_set_options: context.invariant is %d, but parameters of this context have %d virtual "
            "context ranks",
            o.context.invariant, p->context_ranks);
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

/* The last tickets of the second stream are those of the slots. */
#define MTI_HOLD_SLOTS 2
#define MTI_HOLD_TICKET (MT_OVERLAP_TICKETS - MTI_HOLD_SLOTS)

MT_API mt_status mt_layers_hold_reduction(mt_context *ctx, int slot) {
    mti_parallel *p;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mt_check_integer(ctx, "mt_layers_hold_reduction", NULL, "slot", slot, -1, MTI_HOLD_SLOTS - 1));
    MT_TRY(mti_parallel_open(ctx, &p));
    p->hold = 1 + slot;
    return MT_SUCCESS;
}

MT_API mt_status mt_layers_wait_reduction(mt_context *ctx, int slot) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mt_check_integer(ctx, "mt_layers_wait_reduction", NULL, "slot", slot, 0, MTI_HOLD_SLOTS - 1));
    return mt_overlap_wait(ctx, MTI_HOLD_TICKET + slot);
}

/* Returns 1 when layers hold their reductions. Sequence parallelism needs their memory at once. */
static int mti_holds(const mt_context *ctx, int sequence_parallel) {
    const mti_parallel *p = mti_parallel_of(ctx);
    return p && p->hold && !sequence_parallel;
}

/* Returns the ticket of a reduction: that of the slot in which it is held, otherwise `chunk`. */
static int mti_reduction_ticket(const mt_context *ctx, int sequence_parallel, int chunk) {
    return mti_holds(ctx, sequence_parallel) ? MTI_HOLD_TICKET + mti_parallel_of(ctx)->hold - 1 : chunk;
}

/* Calls mt_overlap_begin with the stream for this kind of mt_overlap, or with MT_STREAM_NONE when the options turn the
   kind off or when kind is 0. */
static mt_status mti_overlap_begin(mt_context *ctx, const mt_comm *comm, int kind) {
    mt_stream stream = kind == MT_OVERLAP_GRADIENTS ? MT_STREAM_THIRD : MT_STREAM_SECOND;
    int overlaps = (kind & ~mt_parallel_get_options(ctx).no_overlap) != 0;
    return mt_overlap_begin(ctx, comm, overlaps ? stream : MT_STREAM_NONE);
}
