/* ---- sums of gradients over the ranks ---------------------------------------------------------------------------- */

#pragma once
#include "sync.h"
#include "gradients.c"
#include "buckets.c"

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
    MT_TRY(mti_span_open(ctx, params, MTI_IN_GRADS, 0, params->partial, 0, params->partial, &run));
    MT_TRY(mt_all_reduce(ctx, params->grid->tp, run, run, n, MT_F32, MT_SUM));
    return mti_span_close(ctx, params, MTI_IN_GRADS, run, 0, 0, params->partial);
}

/* Returns the sums of the copied features of a unit, in sums [virtual shards, units * features of all columns]. */
static mt_tensor mti_copied_sums(const mt_param *p, mt_tensor sums, mti_shard_run run) {
    int64_t n = p->grad.rows * p->grad.cols / p->local_features * p->desc.copied;
    return mt_tensor_cols(mt_tensor_rows(sums, run.shard, 1), run.global / p->desc.unit * n, n);
}

/* Adds this rank's copies of p's gradient to the sums of their units, or copies the sums of shard 0 to them. */
static mt_status mti_copied_pass(mt_context *ctx, const mt_param *p, mt_tensor sums, int add) {
    int64_t i = 0;
    mti_shard_run run;
    while (mti_run_next(p, p->tp_rank, &i, &run)) {
        mt_tensor grad = mti_run_view(p, p->grad, run), sum;
        if (!run.copied) continue;
        if (!add) run.shard = 0;
        sum = mti_copied_sums(p, sums, run);
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

/* In invariant mode, sums over the context ranks: before other micro-batches are added, so that the order does not
   depend on the number of ranks. */
static mt_status mti_sync_context(mt_context *ctx, mt_params *params) {
    const size_t lookups = (size_t)(params->gradients - params->elements);
    mt_comm *cp = params->grid->cp;
    int64_t lo, hi;
    if (!mt_context_invariant(ctx) || params->grid->cp_size == 1) return MT_SUCCESS;
    for (hi = params->elements; hi > 0; hi = lo) {
        lo = mti_bucket_low(params, hi);
        MT_TRY(mti_bucket_sum(ctx, params, cp, lo, hi));
    }
    if (lookups == 0) return MT_SUCCESS;
    return mt_all_reduce(ctx, cp, params->lookups, params->lookups, lookups, MT_F32, MT_SUM);
}

/* Sums over the tensor group what each rank has computed only a part of. Parts of tokens come before the sum over the
   context ranks, because tensor ranks divide the tokens of a context rank, and copies come after it. */
static mt_status mti_sync_tensor_ranks(mt_context *ctx, mt_params *params) {
    MT_TRY(mti_sync_partial(ctx, params));
    MT_TRY(mti_sync_context(ctx, params));
    return mti_sync_copies(ctx, params);
}

/* The finished subtrees form a binary counter: micro-batch n (from 0) joins as many subtrees as n has trailing one
   bits, so at most log2(n) subtrees are kept. All sums over micro-batches use this function, as sums over virtual
   shards use mti_shard_tree. Makes the gradients zero for the next micro-batch. */
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
    MT_TRY(mti_gradients_fill(ctx, params, 0, params->count));
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
        int early = mti_param_offset(p) >= b->early;
        if (early && !p->final) return;
        if (early) b->final = mti_param_offset(p);
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
    MT_TRY(mti_deferred_check(ctx, function, params));
    for (i = first->index; i <= last->index; i++) {
        if (params->list[i]->final)
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "%s: the gradient of '%s' was final already: mt_sync_gradients_begin comes "
                           "before the last backward of a step",
                           function, params->list[i]->name);
        params->list[i]->final = 1;
    }
    MT_TRY(mti_gradients_fill(ctx, params, first->index, last->index + 1)); /* the sums read them */
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

/* Returns a group over which mt_sync_gradients would sum the gradient of p although it is a sum already, or NULL. */
static const mt_comm *mti_summed_already(mt_context *ctx, const mt_param *p) {
    const mt_grid *grid = p->registry->grid;
    const mt_comm *const groups[] = {grid->dp, grid->cp, p->desc.sequence_partial ? grid->tp : NULL,
                                     p->desc.shared_embedding ? grid->embedding : NULL};
    int i;
    for (i = 0; i < 4; i++)
        if (groups[i] && mt_placement_of(ctx, groups[i], p->grad) == MT_REPLICATED) return groups[i];
    return NULL;
}

/* In check mode, refuses to sum a gradient over a group on which it is a sum already. */
static mt_status mti_sums_check(mt_context *ctx, const char *function, mt_params *params) {
    int i;
    if (!mt_check_mode(ctx) || !mti_gradients_known(ctx, params)) return MT_SUCCESS;
    for (i = 0; i < params->count; i++) {
        const mt_param *p = params->list[i];
        const mt_comm *group = mti_summed_already(ctx, p);
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
    MT_TRY(mti_deferred_check(ctx, function, params));
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
    MT_TRY(mti_gradients_fill(ctx, params, 0, params->count));
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
    for (i = 0; i < params->count; i++)
        MT_TRY(mt_declare(ctx, params->grid->dp_cp, params->list[i]->grad, MT_REPLICATED));
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
    int64_t first = mti_param_offset(p) + ((const float *)grad.data - (const float *)p->grad.data);
    int64_t end = first + grad.rows * grad.cols;
    mti_stretch s;
    if (!mti_is_scattered(params)) {
        mti_square_add(list, grad, out);
        return;
    }
    for (s = mti_share_next(params, first, end); s.count > 0; s = mti_share_after(params, s, end))
        mti_square_add(list, mt_tensor_f32((float *)p->grad.data + (s.at - mti_param_offset(p)), 1, s.count), out);
}

/* Adds the gradient of parameter i, or this rank's share of it, with the columns of mti_sum_squares. */
static void mti_squares_of(const mt_params *params, int i, mti_square_list *list) {
    const mt_param *p = params->list[i];
    int64_t out = !mti_counts_in_norm(params->grid, p), k = 0;
    mti_shard_run run;
    if (p->desc.copies == 1) mti_squares_of_rows(params, p, p->grad, out, list);
    while (p->desc.copies > 1 && mti_run_next(p, p->tp_rank, &k, &run))
        mti_squares_of_rows(params, p, mti_run_view(p, p->grad, run), out || !run.counts, list);
}

/* Adds the virtual shards of the gradient of parameter i, with the columns of mti_sum_squares_invariant. */
static void mti_squares_of_shards(const mt_params *params, int i, mti_square_list *list) {
    const mt_param *p = params->list[i];
    int s, columns = params->count + 1, column = mti_counts_in_norm(params->grid, p) ? i : params->count;
    int64_t first = (int64_t)p->tp_rank * p->shards * columns, k = 0;
    mti_shard_run run;
    for (s = 0; p->desc.copies == 1 && s < p->shards; s++)
        mti_square_add(list, mti_param_shard(p, p->grad, s), first + (int64_t)s * columns + column);
    while (p->desc.copies > 1 && mti_run_next(p, p->tp_rank, &k, &run))
        mti_square_add(list, mti_run_view(p, p->grad, run),
                       first + (int64_t)run.shard * columns + (run.counts ? column : params->count));
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
    if (mti_is_scattered(params))
        MT_TRY(mt_all_reduce(ctx, params->grid->dp_cp, sums.data, sums.data, 2, MT_F32, MT_SUM));
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
