/* ---- weight gradients that wait for an all-reduce to hide ------------------------------------------------------- */

#pragma once
#include "gradients.c"
#include "invariant.c"

/* Computes dW += dy^T x. */
static mt_status mti_row_weight_gradient(mt_context *ctx, const mt_param *w, mt_tensor dy, mt_tensor x) {
    const float beta = mti_gradient_beta(w);
    int s;
    mti_gradient_added(w);
    for (s = 0; s < w->shards; s++)
        MT_TRY(mti_weight_product(ctx, dy, mt_shard_cols(x, s, w->shards), beta, mti_param_shard(w, w->grad, s)));
    mti_gradient_written(w);
    return MT_SUCCESS;
}

/* Computes the weight gradients that were left for later. */
static mt_status mti_deferred_run(mt_context *ctx) {
    mti_parallel *p = mti_parallel_of(ctx);
    int count = p ? p->deferred.count : 0, i;
    if (p) p->deferred.count = 0;
    for (i = 0; i < count; i++) {
        const mti_deferred_product *d = &p->deferred.list[i];
        MT_TRY(mti_row_weight_gradient(ctx, d->weight, d->dy, d->x));
    }
    return MT_SUCCESS;
}

/* Computes dW += dy^T x of a row-parallel layer, or leaves it for later. stays: whether dy and x stay as they are until
   mt_defer_weight_gradients_end. */
static mt_status mti_weight_gradient_later(mt_context *ctx, int stays, const mt_param *weight, mt_tensor dy,
                                           mt_tensor x) {
    mti_parallel *p = mti_parallel_of(ctx);
    mti_deferred *d = p ? &p->deferred : NULL;
    mti_deferred_product *last;
    if (!d || !d->depth || !stays || d->count == MTI_DEFERRED_MOST || !mt_overlap_is_planned(ctx) ||
        mt_context_invariant(ctx))
        return mti_row_weight_gradient(ctx, weight, dy, x);
    last = &d->list[d->count++];
    last->weight = weight;
    last->dy = dy;
    last->x = x;
    return MT_SUCCESS;
}

MT_API mt_status mt_defer_weight_gradients(mt_context *ctx) {
    mti_parallel *p;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_parallel_open(ctx, &p));
    p->deferred.depth++;
    return MT_SUCCESS;
}

MT_API mt_status mt_defer_weight_gradients_end(mt_context *ctx, mt_status status) {
    mti_parallel *p = ctx ? mti_parallel_of(ctx) : NULL;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!p || p->deferred.depth == 0)
        return status != MT_SUCCESS ? status
                                    : mt_fail(ctx, MT_ERR_ARGUMENT,
                                              "mt_defer_weight_gradients_end: call mt_defer_weight_gradients first");
    if (status == MT_SUCCESS) status = mti_deferred_run(ctx);
    p->deferred.count = 0;
    p->deferred.depth--;
    return status;
}
