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
