/* ---- the first values of parameters ------------------------------------------------------------------------------ */

#pragma once
#include "grid.c"
#include "sharding.c"
#include "memory.c"
#include "guard.c"

static int mti_is_scattered(const mt_params *params); /* buckets.c */

/* Tells check mode that the gradients are sums over all ranks that have a part of them. */
static mt_status mti_declare_synced(mt_context *ctx, const mt_params *params) {
    int i;
    for (i = 0; i < params->count; i++) {
        const mt_param *p = params->list[i];
        if (!mti_is_scattered(params)) MT_TRY(mt_declare(ctx, params->grid->dp_cp, p->grad, MT_REPLICATED));
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
        MT_TRY(mt_check_replica(ctx, params->grid->dp_cp, what, p->name, t));
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
    MT_KEEP(status, mt_check_replicas(ctx, params->grid->dp_cp, where)); /* the other groups wait for it */
    MT_KEEP(status, mt_check_replicas(ctx, params->grid->pp, where));
    return status;
}

static mt_status mti_params_squares(mt_context *ctx, mt_params *params); /* sync.c */

/* Notes the virtual context ranks of the registry's grid, in invariant mode, and how many of them this rank is. */
static mt_status mti_context_ranks_set(mt_context *ctx, const mt_params *params) {
    static const char *const function = "mt_params_init";
    const int size = params->grid->cp_size;
    mti_parallel *p;
    MT_TRY(mti_parallel_open(ctx, &p));
    MT_TRY(mti_cp_layout_check(ctx, function, &p->options.context, size));
    if (mt_context_invariant(ctx) && p->options.context.invariant == 0 && size > 1)
        return mt_fail(
            ctx, MT_ERR_SHAPE,
            "%s: 1 virtual context rank (mt_parallel_options.context.invariant is 0) cannot be split over %d", function,
            size);
    p->context_ranks = p->options.context.invariant;
    p->context_shards = p->context_ranks / size;
    return MT_SUCCESS;
}

static mt_status mti_params_place(mt_context *ctx, mt_params *params) {
    int64_t elements;
    mt_status status;
    MT_TRY(mti_context_ranks_set(ctx, params));
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
    MT_TRY(mti_params_list(params->ctx, params));
    MT_TRY(mti_params_declare(ctx, params));
    MT_TRY(mt_arena_register(ctx, params->grid->tp));
    if (params->grads)
        MT_TRY(mt_comm_register(ctx, params->grid->dp_cp, params->grads, (size_t)params->elements * sizeof(float)));
    if (params->buckets.ranks == 1 || !params->values) return MT_SUCCESS;
    return mt_comm_register(ctx, params->grid->dp_cp, params->values, mti_params_bytes(params, params->elements));
}

/* Returns the FNV-1a hash of a name. A parameter's random numbers depend on it, and not on what was created before. */
static uint64_t mti_name_hash(const char *name) {
    uint64_t h = 14695981039346656037u;
    for (; *name; name++) h = (h ^ (uint64_t)(unsigned char)*name) * 1099511628211u;
    return h;
}

/* Returns the random numbers of a run for an optimizer step (see mt_random). Step 0 is the initialisation. */
static mt_random mti_param_random(const mt_param *p, mti_shard_run run, uint64_t seed, uint64_t step) {
    mt_random at;
    memset(&at, 0, sizeof at);
    at.seed = seed;
    at.subsequence = mti_name_hash(p->name) + step;
    at.first_row = p->desc.placement == MT_SPLIT_COLS ? 0 : run.global;
    at.first_col = p->desc.placement == MT_SPLIT_COLS ? run.global : 0;
    at.global_cols = p->desc.cols;
    return at;
}

static mt_status mti_param_init(mt_context *ctx, const mt_param *p, uint64_t seed) {
    int64_t i = 0;
    mti_shard_run run;
    while (mti_run_next(p, p->tp_rank, &i, &run)) {
        mt_tensor view = mti_run_view(p, p->value, run);
        mt_random at = mti_param_random(p, run, seed, 0);
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
   is what the caller has bound of parameter i. Returns a view [1, n] of a piece and writes its offset to *at, or
   returns mt_none() when there is no such piece. */
static mt_tensor mti_memory(const mt_params *params, int kind, int piece, int64_t *at) {
    const mt_param *p = piece < 0 ? NULL : params->list[piece];
    if (p) {
        const mti_home *home = mti_home_of(p);
        *at = home->offset;
        return home->bound[kind] ? mti_bound_view(p, kind, 0, p->value.rows * p->value.cols) : mt_none();
    }
    *at = 0;
    if (kind == MTI_IN_VALUES)
        return params->values ? mt_tensor_make(params->values, params->dtype, 1, params->elements) : mt_none();
    if (params->grads) return mt_tensor_f32(params->grads, 1, params->gradients);
    *at = params->elements;
    return params->lookups ? mt_tensor_f32(params->lookups, 1, params->gradients - params->elements) : mt_none();
}

/* Fills the values with zeros, padding included. */
static mt_status mti_values_zero(mt_context *ctx, const mt_params *params) {
    int64_t at;
    int i;
    for (i = -1; i < params->count; i++) {
        mt_tensor piece = mti_memory(params, MTI_IN_VALUES, i, &at);
        if (piece.data) MT_TRY(mti_zero(ctx, piece));
    }
    return MT_SUCCESS;
}
