/* ---- the memory of a registry ------------------------------------------------------------------------------------ */

#pragma once
#include "params.c"

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
    b->ranks = b->desc.sharded_optimizer ? mt_comm_size(params->grid->dp_cp) : 1;
    unit = mti_param_unit(params->dtype) * b->ranks;
    if (b->desc.bucket_bytes == 0) size = mt_max(40000000, (int64_t)mt_comm_size(params->grid->dp_cp) * 1000000);
    *elements = mt_round_up(*elements, unit);
    b->size = mt_round_up(mt_max(mt_min(size, *elements), 1), unit);
}

/* Returns 0, 1 or 2: where a parameter lies. Those whose gradients are summed over the tensor group as a whole come
   first, in one piece. Those whose gradients are summed over the embedding group, or which have copies, follow, and
   then all others. */
static int mti_param_third(const mt_param *p) {
    int before = p->desc.shared_embedding || p->desc.copies > 1;
    return p->desc.sequence_partial ? 0 : before ? 1 : 2;
}

/* Gives every parameter its offset. */
static void mti_params_order(mt_params *params) {
    int64_t at = 0;
    int i, pass;
    for (pass = 0; pass < 3; pass++) {
        for (i = 0; i < params->count; i++) {
            const mt_param *p = params->list[i];
            if (mti_param_third(p) != pass) continue;
            mti_home_of(p)->offset = at;
            at += mti_param_slot(p);
        }
        if (pass == 0) params->partial = at;
        if (pass == 1) params->buckets.early = at;
    }
}

/* Returns the first element, lo, of the bucket [lo, hi). Backward runs through the layers from the last to the first,
   and so through the places from their end. Buckets are therefore cut from the end. They cut through parameters, so
   that all ranks have equal shares of a bucket. */
static int64_t mti_bucket_low(const mt_params *params, int64_t hi) { return mt_max(hi - params->buckets.size, 0); }

/* Returns where the elements [lo, hi) are in one piece of memory, without a gap, or NULL. */
static void *mti_span_find(const mt_params *params, int kind, int64_t lo, int64_t hi) {
    int64_t size = kind == MTI_IN_VALUES ? (int64_t)mt_dtype_size(params->dtype) : (int64_t)sizeof(float), found = 0;
    char *own = kind == MTI_IN_VALUES ? (char *)params->values : (char *)params->grads;
    uintptr_t begin = 0;
    int i;
    if (own) return own + lo * size;
    for (i = 0; i < params->count; i++) {
        const mt_param *p = params->list[i];
        int64_t offset = mti_home_of(p)->offset, n = p->value.rows * p->value.cols;
        int64_t overlap = mt_min(hi, offset + n) - mt_max(lo, offset);
        uintptr_t at = (uintptr_t)mti_home_of(p)->bound[kind] - (uintptr_t)((offset - lo) * size);
        if (overlap <= 0) continue;
        if (found > 0 && at != begin) return NULL;
        begin = at;
        found += overlap;
    }
    return found == hi - lo ? (void *)begin : NULL;
}

/* Copies the elements [from, to) between the memory that the caller has bound and `run`, which begins at offset lo.
   Does nothing where the two are the same memory. */
static mt_status mti_span_copy(mt_context *ctx, const mt_params *params, int kind, void *run, int64_t lo, int64_t from,
                               int64_t to, int to_run) {
    int i;
    for (i = 0; params->bound_count[kind] > 0 && i < params->count; i++) {
        const mt_param *p = params->list[i];
        int64_t offset = mti_home_of(p)->offset;
        int64_t first = mt_max(from, offset), end = mt_min(to, offset + p->value.rows * p->value.cols);
        mt_tensor mine, there;
        if (!mti_home_of(p)->bound[kind] || end <= first) continue;
        mine = there = mti_bound_view(p, kind, first - offset, end - first);
        there.data = (char *)run + (first - lo) * (int64_t)mt_dtype_size(mine.dtype);
        if (mine.data == there.data) continue;
        MT_TRY(to_run ? mt_copy(ctx, mine, there) : mt_copy(ctx, there, mine));
    }
    return MT_SUCCESS;
}

/* Sets *run to memory with the elements [lo, hi) in their order, for a collective. It is the memory of the values or
   the gradients where that is in one piece. Otherwise it is the registry's, and has copies of the elements [from, to).
   mti_span_close copies the results back. */
static mt_status mti_span_open(mt_context *ctx, const mt_params *params, int kind, int64_t lo, int64_t hi, int64_t from,
                               int64_t to, void **run) {
    *run = mti_span_find(params, kind, lo, hi);
    if (!*run) *run = params->room;
    return mti_span_copy(ctx, params, kind, *run, lo, from, to, 1);
}

static mt_status mti_span_close(mt_context *ctx, const mt_params *params, int kind, void *run, int64_t lo, int64_t from,
                                int64_t to) {
    return mti_span_copy(ctx, params, kind, run, lo, from, to, 0);
}

/* Returns the number of elements of the room: those of the largest collective on memory that is not in one piece. */
static int64_t mti_room_elements(const mt_params *params) {
    int64_t hi, lo, most = 0;
    int kind;
    if (params->grid->tp_size > 1 && !mti_span_find(params, MTI_IN_GRADS, 0, params->partial)) most = params->partial;
    for (kind = MTI_IN_VALUES; kind <= MTI_IN_GRADS && mt_comm_size(params->grid->dp_cp) > 1; kind++) {
        if (params->bound_count[kind] < params->count || (kind == MTI_IN_VALUES && params->buckets.ranks == 1))
            continue;
        for (hi = params->elements; hi > 0; hi = lo) {
            lo = mti_bucket_low(params, hi);
            if (!mti_span_find(params, kind, lo, hi)) most = mt_max(most, hi - lo);
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
        if (!home->bound[MTI_IN_VALUES])
            p->value.data = (char *)params->values + mti_params_bytes(params, home->offset);
        if (!home->bound[MTI_IN_GRADS]) p->grad.data = params->grads + home->offset;
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
        MT_TRY(mt_declare_parameter(ctx, p->name, g->tp, g->dp_cp, p->value, p->grad, placement, parts, partial));
        MT_TRY(
            mt_declare_parameter(ctx, p->name, g->tp, g->dp_cp, mt_none(), p->lookup_grad, placement, parts, partial));
    }
    return MT_SUCCESS;
}
