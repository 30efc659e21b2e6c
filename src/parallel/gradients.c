/* ---- the state of the gradients ---------------------------------------------------------------------------------- */

#pragma once
#include "bind.c"

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

/* -- gradients that count as zero without zeros in their memory (mt_params_zero_grad_lazy) -- */

/* Returns what a product multiplies the gradient of p with before it adds to it: 0 when the memory has no zeros yet.
   The product must write all elements, and mti_gradient_written follows it. */
static float mti_gradient_beta(const mt_param *p) { return p->registry && mti_entry_of(p)->unwritten ? 0.0f : 1.0f; }

static void mti_gradient_written(const mt_param *p) {
    if (!p->registry || !mti_entry_of(p)->unwritten) return;
    mti_entry_of(p)->unwritten = 0;
    p->registry->unwritten--;
}

/* Fills the gradient of p with zeros when its memory has none yet. For check mode they were there before. */
static mt_status mti_gradient_fill(mt_context *ctx, const mt_param *p) {
    if (!p || !p->registry || !mti_entry_of(p)->unwritten) return MT_SUCCESS;
    mt_check_pause(ctx);
    MT_TRY(mt_check_resume(ctx, mt_fill(ctx, p->grad, 0.0f)));
    mti_gradient_written(p);
    return MT_SUCCESS;
}

/* The same for the parameters [first, end) of a registry. */
static mt_status mti_gradients_fill(mt_context *ctx, const mt_params *params, int first, int end) {
    int i;
    for (i = first; params->unwritten > 0 && i < end; i++) MT_TRY(mti_gradient_fill(ctx, params->list[i]));
    return MT_SUCCESS;
}

/* The mt_graph_border: a product must not write in a launch of a graph to which another launch has to add, and a fill
   must not be recorded without the zeroing to which it belongs, or the zeroing without the fill. */
static mt_status mti_gradients_border(mt_context *ctx) {
    const mt_params *params = mti_parallel_of(ctx)->registries;
    for (; params; params = params->next_registry) MT_TRY(mti_gradients_fill(ctx, params, 0, params->count));
    return MT_SUCCESS;
}

MT_API mt_status mt_param_touch_grad(mt_context *ctx, const mt_param *param) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!param) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_param_touch_grad: param is NULL");
    return mti_gradient_fill(ctx, param);
}

/* Returns 1 when zeroing leaves out the gradient of p: it is lazy, and the product of p's layer writes all elements. */
static int mti_is_left_out(const mt_params *params, const mt_param *p) {
    return params->lazy && mti_entry_of(p)->is_linear;
}

/* Fills the elements [lo, hi) of the registry's own gradients with zeros. */
static mt_status mti_grads_fill(mt_context *ctx, const mt_params *params, int64_t lo, int64_t hi) {
    return mt_fill(ctx, mt_tensor_f32(params->grads + lo, 1, hi - lo), 0.0f);
}

/* Fills the registry's own gradients with zeros, except those that are left out. */
static mt_status mti_own_grads_zero(mt_context *ctx, const mt_params *params) {
    int64_t at = 0;
    int i, third;
    for (third = 0; third < 3; third++) /* in the order of their offsets */
        for (i = 0; i < params->count; i++) {
            const mt_param *p = params->list[i];
            int64_t offset = mti_home_of(p)->offset;
            if (mti_param_third(p) != third || !mti_is_left_out(params, p)) continue;
            if (offset > at) MT_TRY(mti_grads_fill(ctx, params, at, offset));
            at = offset + mti_param_slot(p);
        }
    return at < params->gradients ? mti_grads_fill(ctx, params, at, params->gradients) : MT_SUCCESS;
}

/* Fills the gradients with zeros, except those that are left out. */
static mt_status mti_gradients_memory_zero(mt_context *ctx, const mt_params *params) {
    int64_t at;
    int i;
    if (params->grads) MT_TRY(mti_own_grads_zero(ctx, params));
    for (i = params->grads ? 0 : -1; i < params->count; i++) {
        mt_tensor piece = mti_memory(params, MTI_IN_GRADS, i, &at);
        if (piece.data && (i < 0 || !mti_is_left_out(params, params->list[i]))) MT_TRY(mti_zero(ctx, piece));
    }
    return MT_SUCCESS;
}

/* In check mode, a gradient that was left out holds NaN, so that a program that reads it without mt_param_touch_grad
   does not find the zeros of the step before. */
static mt_status mti_gradient_poison(mt_context *ctx, const mt_param *p) {
    if (!mt_check_mode(ctx) || !mt_context_has_data(ctx)) return MT_SUCCESS;
    mt_check_pause(ctx);
    return mt_check_resume(ctx, mt_fill(ctx, p->grad, NAN));
}

/* Makes all gradients zero. */
static mt_status mti_gradients_zero(mt_context *ctx, mt_params *params) {
    int i;
    MT_TRY(mti_gradients_memory_zero(ctx, params));
    MT_TRY(mt_check_mean_end(ctx, "mt_params_zero_grad", 0));
    params->unwritten = 0;
    for (i = 0; i < params->count; i++) {
        mti_entry *entry = mti_entry_of(params->list[i]);
        entry->unwritten = mti_is_left_out(params, &entry->param);
        params->unwritten += entry->unwritten;
    }
    for (i = 0; i < params->count; i++) {
        mti_entry *entry = mti_entry_of(params->list[i]);
        if (entry->unwritten) MT_TRY(mti_gradient_poison(ctx, &entry->param));
        MT_TRY(mt_declare_zero(ctx, entry->param.grad));
        MT_TRY(mt_declare_zero(ctx, entry->param.lookup_grad));
    }
    return MT_SUCCESS;
}

/* -- the state of all gradients -- */

/* Notes in p's registry that a layer adds to the gradient of p now. */
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

/* Refuses gradients of which a part was left for later (mt_defer_weight_gradients). */
static mt_status mti_deferred_check(mt_context *ctx, const char *function, const mt_params *params) {
    const mti_deferred *d = &mti_parallel_of(ctx)->deferred;
    int i;
    for (i = 0; i < d->count; i++)
        if (d->list[i].weight->registry == params)
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "%s: the product for the gradient of '%s' was left for later; call "
                           "mt_defer_weight_gradients_end at the end of the backward of its block",
                           function, d->list[i].weight->name);
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
    else if (mt_comm_size(grid->dp_cp) > 1)
        snprintf(text, bytes, "each of the %d data ranks has a part of its sum", mt_comm_size(grid->dp_cp));
    else return 0;
    return 1;
}

/* Checks that the gradients are the sums over all ranks and micro-batches. A call that only reads them may also come
   after a step of the optimizer. */
static mt_status mti_gradients_expect(mt_context *ctx, const char *function, mt_params *params, int only_reads) {
    char why[128];
    int i;
    if (!mti_gradients_known(ctx, params)) return MT_SUCCESS;
    if (params->state == MTI_GRADIENTS_SYNCHRONISED) return MT_SUCCESS;
    if (params->state == MTI_GRADIENTS_USED && only_reads) return MT_SUCCESS;
    MT_TRY(mti_gradients_open(ctx, function, params->list[0]));
    MT_TRY(mti_deferred_check(ctx, function, params));
    MT_TRY(mti_accumulated_check(ctx, function, params));
    for (i = 0; i < params->count; i++)
        if (mti_sync_reason(params, params->list[i], why, sizeof why))
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "%s: the gradient of '%s' is not synchronised: %s; call mt_sync_gradients after the last "
                           "backward",
                           function, params->list[i]->name, why);
    return MT_SUCCESS;
}

/* The same for a call that then reads the memory of the gradients. */
static mt_status mti_gradients_ready(mt_context *ctx, const char *function, mt_params *params, int only_reads) {
    MT_TRY(mti_gradients_expect(ctx, function, params, only_reads));
    return mti_gradients_fill(ctx, params, 0, params->count);
}

static mt_status mti_zero_grad(mt_context *ctx, mt_params *params, int lazy) {
    MT_TRY(mt_overlap_wait(ctx, MT_OVERLAP_TICKET_THIRD));
    params->buckets.begun = 0;
    params->micro_batches = 0;
    params->lazy = lazy;
    (void)mti_gradients_known(ctx, params); /* notes a recording */
    MT_TRY(mti_gradients_zero(ctx, params));
    mti_gradients_set(params, MTI_GRADIENTS_ZEROED);
    return mti_replicas_note(ctx, params, 0);
}

MT_API mt_status mt_params_zero_grad(mt_context *ctx, mt_params *params) {
    MT_TRY(mti_params_ready(ctx, params, "mt_params_zero_grad"));
    return mti_zero_grad(ctx, params, 0);
}

MT_API mt_status mt_params_zero_grad_lazy(mt_context *ctx, mt_params *params) {
    static const char *const function = "mt_params_zero_grad_lazy";
    MT_TRY(mti_params_ready(ctx, params, function));
    if (ctx != params->ctx)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: ctx is not the context that mt_params_create got", function);
    mt_context_set_graph_border(ctx, mti_gradients_border);
    return mti_zero_grad(ctx, params, 1);
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
