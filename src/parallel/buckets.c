/* ---- buckets of gradients ---------------------------------------------------------------------------------------- */

#pragma once
#include "init.c"

/* Returns 1 when a data rank has only the sums of its share. In invariant mode every rank has all sums, because the
   norm is added up parameter by parameter. */
static int mti_is_scattered(const mt_params *params) {
    return params->buckets.ranks > 1 && !mt_context_invariant(params->ctx);
}

/* Sums the bucket [lo, hi) over a group, with an all-reduce. */
static mt_status mti_bucket_sum(mt_context *ctx, const mt_params *params, mt_comm *group, int64_t lo, int64_t hi) {
    void *run;
    MT_TRY(mti_span_open(ctx, params, MTI_IN_GRADS, lo, hi, lo, hi, &run));
    MT_TRY(mt_all_reduce(ctx, group, run, run, (size_t)(hi - lo), MT_F32, MT_SUM));
    return mti_span_close(ctx, params, MTI_IN_GRADS, run, lo, lo, hi);
}

/* The group over which mt_sync_gradients sums. In invariant mode the sums over the context ranks come before. */
static mt_comm *mti_sum_group(const mt_params *params) {
    return mt_context_invariant(params->ctx) ? params->grid->dp : params->grid->dp_cp;
}

/* Sums the bucket [lo, hi) over the data group, with an all-reduce or a reduce-scatter. */
static mt_status mti_bucket_reduce(mt_context *ctx, const mt_params *params, int64_t lo, int64_t hi) {
    mt_comm *data = mti_sum_group(params);
    int64_t share = (hi - lo) / params->buckets.ranks, first = share * mt_comm_rank(data);
    float *grads;
    void *run;
    if (mt_comm_size(data) == 1) return MT_SUCCESS;
    if (!mti_is_scattered(params)) return mti_bucket_sum(ctx, params, data, lo, hi);
    MT_TRY(mti_span_open(ctx, params, MTI_IN_GRADS, lo, hi, lo, hi, &run));
    grads = (float *)run;
    MT_TRY(mt_reduce_scatter(ctx, data, grads, grads + first, (size_t)share, MT_F32, MT_SUM));
    return mti_span_close(ctx, params, MTI_IN_GRADS, run, lo, lo + first, lo + first + share);
}

/* Starts the sums of all buckets that begin at `from` or later and were not started yet. */
static mt_status mti_buckets_send(mt_context *ctx, mt_params *params, int64_t from) {
    mti_buckets *b = &params->buckets;
    while (b->sent > 0 && mti_bucket_low(params, b->sent) >= from) {
        int64_t hi = b->sent;
        b->sent = mti_bucket_low(params, hi);
        MT_TRY(mti_overlap_begin(ctx, mti_sum_group(params), MT_OVERLAP_GRADIENTS));
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
        first = share * mt_comm_rank(params->grid->dp_cp);
        MT_TRY(mti_span_open(ctx, params, kind, lo, hi, lo + first, lo + first + share, &run));
        MT_TRY(mt_all_gather(ctx, params->grid->dp_cp, (char *)run + first * size, run, (size_t)share, dtype));
        MT_TRY(mti_span_close(ctx, params, kind, run, lo, lo, hi));
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
        int64_t first = lo + (b->ranks > 1 ? share * mt_comm_rank(params->grid->dp_cp) : 0);
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

static int64_t mti_param_offset(const mt_param *p) { return mti_home_of(p)->offset; }

static mti_stretch mti_param_share(const mt_param *p) {
    int64_t at = mti_param_offset(p);
    return mti_share_next(p->registry, at, at + p->grad.rows * p->grad.cols);
}
