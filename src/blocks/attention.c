/* ---- parallel self-attention ------------------------------------------------------------------------------------- */

#pragma once
#include "attention_cached.c"
#include "../parallel/hash_log.h"

/* Allocates the outputs of core attention, saved->out and saved->lse. For inference, saved->lse is mt_none(). */
static mt_status mti_attention_room(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                    mt_self_attention_saved *saved, int training) {
    int64_t tokens = saved->qkv.rows;
    saved->lse = mt_none();
    MT_TRY(mt_arena_tensor(ctx, saved->qkv.dtype, tokens, a->proj.local_features, &saved->out));
    if (!training) return MT_SUCCESS;
    return mt_arena_tensor(ctx, MT_F32, desc->groups * desc->heads_per_group, tokens, &saved->lse);
}

/* Sets *layers to the layers that compute queries, keys and values. Returns their number. */
static int mti_qkv_layers(const mt_self_attention *a, const mt_column_parallel_linear **layers) {
    int separate = a->desc.qkv_layout == MT_QKV_SEPARATE;
    *layers = separate ? a->separate : &a->qkv;
    return separate ? 3 : 1;
}

/* Returns the number of layers that compute queries, keys and values, and sets *layers to the first one and cols[i] to
   the columns of qkv (or dqkv) of each. */
static int mti_attention_layers(const mt_self_attention *a, mt_tensor qkv, const mt_column_parallel_linear **layers,
                                mt_tensor cols[3]) {
    int i, count = mti_qkv_layers(a, layers);
    int64_t first = 0;
    for (i = 0; i < count; i++) {
        cols[i] = mt_tensor_cols(qkv, first, (*layers)[i].local_features);
        first += (*layers)[i].local_features;
    }
    return count;
}

/* Logs the gradients of queries, keys and values. */
static mt_status mti_attention_log(mt_context *ctx, const mt_column_parallel_linear *layers, int count,
                                   const mt_tensor *dqkv) {
    int i;
    if (count == 1)
        return mt_hash_log_activation(ctx, layers->name, 1, "core_attention.input_grad", *dqkv, 0, layers->weight);
    for (i = 0; i < count; i++)
        MT_TRY(mt_hash_log_activation(ctx, layers[i].name, 0, "output_grad", dqkv[i], 0, layers[i].weight));
    return MT_SUCCESS;
}

/* Computes y from x with a cache. */
static mt_status mti_attention_cached(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                      const mt_kv_cache *cache, mt_tensor x, mt_tensor y) {
    const mt_column_parallel_linear *layers;
    mt_tensor qkv, out, cols[3];
    int count;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, a->groups * mti_qkv_width(desc), &qkv));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, a->proj.local_features, &out));
    count = mti_attention_layers(a, qkv, &layers, cols);
    MT_TRY(mt_parallel_linear_forward_shared(ctx, layers, count, &x, cols, NULL));
    MT_TRY(mti_attention_core_cached(ctx, a, desc, cache, qkv, out));
    return mt_parallel_linear_forward(ctx, &a->proj, out, y, NULL);
}

/* With recompute_core, only saved->qkv stays in the arena. */
static mt_status mti_attention_forward(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                       mt_tensor x, mt_tensor y, mt_self_attention_saved *saved, int training) {
    const mt_column_parallel_linear *layers;
    mt_tensor cols[3];
    size_t mark;
    int count;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, desc->batch * desc->seq / mt_comm_size(a->cp), a->groups * mti_qkv_width(desc),
                           &saved->qkv));
    count = mti_attention_layers(a, saved->qkv, &layers, cols);
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_attention_room(ctx, a, desc, saved, training));
    MT_TRY(mt_parallel_linear_forward_shared(ctx, layers, count, &x, cols, training ? &saved->qkv_in : NULL));
    MT_TRY(mti_attention_rotate(ctx, a, desc, mt_rotary_forward, saved->qkv));
    MT_TRY(mti_attention_core_forward(ctx, a, desc, saved));
    if (training)
        MT_TRY(mt_hash_log_activation(ctx, a->proj.name, 1, "core_attention.output", saved->out, 0, a->proj.weight));
    MT_TRY(mt_parallel_linear_forward(ctx, &a->proj, saved->out, y, training ? &saved->proj_in : NULL));
    if (a->desc.recompute_core) mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Checks what a batch says of the scores. s is a desc for all heads of the model on every rank, so all ranks return the
   same error. */
static mt_status mti_scores_check(mt_context *ctx, const char *function, const mt_attention_desc *s) {
    int64_t heads = s->groups * s->heads_per_group;
    if (s->bias.heads > 1 && s->bias.heads != heads)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: bias.heads is %lld, must be 1 or the %lld heads of the model", function,
                       (long long)s->bias.heads, (long long)heads);
    if (mt_context_invariant(ctx) && s->bias.grad.data && heads > 1 && s->bias.heads != heads)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: bias.grad in invariant mode needs bias.heads %lld, the heads of the model; it is %lld",
                       function, (long long)heads, (long long)s->bias.heads);
    return mt_attention_check(ctx, function, s);
}

static mt_status mti_batch_scores_check(mt_context *ctx, const char *function, const mt_self_attention *a,
                                        const mt_batch *batch) {
    int64_t groups = a->desc.kv_heads * a->pieces;
    mt_attention_desc s =
        mti_rank_attention(groups, 0, groups, a->desc.heads / groups, a->head_dim, a->desc.qkv_layout, batch);
    return mti_scores_check(ctx, function, &s);
}

/* Checks an activation that has `tokens` tokens, or with sequence parallelism this rank's share of them. */
static mt_status mti_tokens_check(mt_context *ctx, const char *function, const mt_row_parallel_linear *proj,
                                  int64_t tokens, const char *name, mt_tensor t, int64_t cols) {
    int64_t rows = 0;
    MT_TRY(mt_sequence_rows(ctx, function, proj->tp, proj->desc.sequence_parallel, tokens, &rows));
    return mt_check_activation(ctx, function, proj->weight, name, t, rows, cols);
}

/* Checks that context ranks can have equal parts of the sequences. */
static mt_status mti_parts_check(mt_context *ctx, const char *function, const char *name, const mt_comm *cp,
                                 const mt_context_parallel_desc *context, const mt_batch *batch) {
    const mti_seq_chunks c = mti_seq_chunks_of(cp, context, batch->seq);
    const int chunks = c.count * c.size, ranks = context->invariant > c.size ? context->invariant : c.size;
    if (batch->seq % chunks == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s.seq is %lld, must be a multiple of %d, for %d context ranks", function,
                   name, (long long)batch->seq, chunks, ranks);
}

/* Checks the parameters, the batch and two activations: x and y, or dy and dx. For attention and the whole layer. */
static mt_status mti_block_check(mt_context *ctx, const char *function, const mt_self_attention *a,
                                 const mt_batch *batch, const char *in_name, mt_tensor in, const char *out_name,
                                 mt_tensor out) {
    MT_TRY(mt_check_param(ctx, function, a->proj.weight));
    MT_TRY(mti_batch_check(ctx, function, "batch", batch, a->rotary.data ? a->desc.max_seq : 0));
    MT_TRY(mti_batch_scores_check(ctx, function, a, batch));
    MT_TRY(mt_check_apart(ctx, function, "bias.grad", batch->bias.grad, in_name, in));
    MT_TRY(mt_check_apart(ctx, function, "bias.grad", batch->bias.grad, out_name, out));
    MT_TRY(mti_parts_check(ctx, function, "batch", a->cp, &a->context, batch));
    MT_TRY(mti_tokens_check(ctx, function, &a->proj, mti_batch_tokens(a->cp, batch), in_name, in, a->desc.hidden));
    return mti_tokens_check(ctx, function, &a->proj, mti_batch_tokens(a->cp, batch), out_name, out, a->desc.hidden);
}

MT_API mt_status mt_self_attention_forward(mt_context *ctx, const mt_self_attention *attention, const mt_batch *batch,
                                           mt_tensor x, mt_tensor y, mt_self_attention_saved *saved) {
    static const char *const function = "mt_self_attention_forward";
    mt_attention_desc desc;
    mt_self_attention_saved local;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!attention) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: attention is NULL", function);
    MT_TRY(mti_block_check(ctx, function, attention, batch, "x", x, "y", y));
    MT_TRY(mt_check_sent(ctx, function, attention->proj.tp, attention->desc.sequence_parallel, "x", x, "y", y));
    MT_TRY(mt_check_apart(ctx, function, "x", x, "y", y));
    desc = mti_attention_desc(attention, batch, saved != NULL);
    mti_log_batch(ctx, attention->cp, &attention->context, batch);
    mark = mt_arena_mark(ctx);
    status = MT_RANGE("attention forward",
                      mti_attention_forward(ctx, attention, &desc, x, y, saved ? saved : &local, saved != NULL));
    if (status == MT_SUCCESS && saved) saved->batch = *batch;
    else mt_arena_release(ctx, mark);
    return status;
}

/* Checks desc and the numbers of a cache, with a desc of all groups of the model, and the shapes of the cache on this
   rank. */
static mt_status mti_cache_check(mt_context *ctx, const char *function, const mt_self_attention *a,
                                 const mt_batch *batch, const mt_kv_cache *cache) {
    int64_t groups = a->desc.kv_heads * a->pieces, rows;
    mt_attention_desc s =
        mti_rank_attention(groups, 0, groups, a->desc.heads / groups, a->head_dim, a->desc.qkv_layout, batch);
    s.scores.mask = a->desc.scores.mask;
    MT_TRY(mt_kv_cache_check(ctx, function, &s, cache));
    if (a->rotary.data && cache->max_seq > a->desc.max_seq)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: the cache has max_seq %lld, must be at most that of the layer, %lld",
                       function, (long long)cache->max_seq, (long long)a->desc.max_seq);
    rows = mt_size_mul(mt_size_mul(batch->sequences, mt_self_attention_cache_groups(a)), cache->max_seq);
    if (rows == 0) return MT_SUCCESS;
    MT_TRY(mt_check_activation(ctx, function, a->proj.weight, "keys", cache->keys, rows, a->head_dim));
    return mt_check_activation(ctx, function, a->proj.weight, "values", cache->values, rows, a->head_dim);
}

/* In inference with a cache each tensor rank has all tokens. Clears what divides them in a copy of the struct of a
   layer. */
static void mti_attention_whole_tokens(mt_self_attention *a) {
    int i;
    a->desc.sequence_parallel = a->qkv.desc.sequence_parallel = a->proj.desc.sequence_parallel = 0;
    for (i = 0; i < 3; i++) a->separate[i].desc.sequence_parallel = 0;
    a->cp = NULL;
}

/* Sets the context group of `a`, a copy of the layer, when x has the tokens of one context rank and not all of them.
   Returns the batch that x is checked with: that of the caller or, for a part of the tokens, *padded, whose sequences
   the context ranks divide. */
static const mt_batch *mti_cached_tokens(const mt_self_attention *layer, const mt_batch *batch, mt_tensor x,
                                         mt_self_attention *a, mt_batch *padded) {
    mti_seq_chunks c;
    if (mt_comm_size(layer->cp) == 1 || !batch || batch->seq < 1 || batch->seq > INT32_MAX) return batch;
    c = mti_seq_chunks_of(layer->cp, &layer->context, batch->seq);
    if (x.rows == mt_size_mul(batch->sequences, batch->seq)) return batch;
    if (x.rows != mt_size_mul(batch->sequences, c.count * c.chunk)) return batch;
    a->cp = layer->cp;
    *padded = *batch;
    padded->seq = c.seq;
    return padded;
}

MT_API int64_t mt_self_attention_cache_groups(const mt_self_attention *attention) {
    if (!attention || attention->pieces < 1) return 0;
    return mti_used_groups(attention->groups, attention->first_group, attention->desc.kv_heads * attention->pieces);
}

MT_API mt_status mt_self_attention_cached_forward(mt_context *ctx, const mt_self_attention *attention,
                                                  const mt_batch *batch, const mt_kv_cache *cache, mt_tensor x,
                                                  mt_tensor y) {
    static const char *const function = "mt_self_attention_cached_forward";
    mt_self_attention a;
    mt_attention_desc desc;
    mt_batch padded;
    const mt_batch *checked;
    size_t mark;
    int before;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!attention) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: attention is NULL", function);
    a = *attention;
    mti_attention_whole_tokens(&a);
    checked = mti_cached_tokens(attention, batch, x, &a, &padded);
    MT_TRY(mti_block_check(ctx, function, &a, checked, "x", x, "y", y));
    MT_TRY(mti_cache_check(ctx, function, &a, batch, cache));
    MT_TRY(mt_check_sent(ctx, function, a.proj.tp, 0, "x", x, "y", y));
    MT_TRY(mt_check_apart(ctx, function, "x", x, "y", y));
    desc = mti_attention_desc(&a, batch, 0);
    mark = mt_arena_mark(ctx);
    before = mt_rows_are_sequences(ctx, !a.cp);
    status = MT_RANGE("attention forward", mti_attention_cached(ctx, &a, &desc, cache, x, y));
    mt_rows_are_sequences(ctx, before);
    mt_arena_release(ctx, mark);
    return status;
}

/* With recompute_core: computes out and lse of *saved again. */
static mt_status mti_attention_core_again(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                          mt_self_attention_saved *saved) {
    mt_status status;
    MT_TRY(mti_attention_room(ctx, a, desc, saved, 1));
    mt_trace_recompute(ctx, 1);
    status = mti_attention_core_forward(ctx, a, desc, saved);
    mt_trace_recompute(ctx, 0);
    saved->proj_in.x = saved->out;
    return status;
}

static mt_status mti_attention_backward(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                        mt_tensor dy, mt_tensor dx, const mt_self_attention_saved *saved) {
    mt_self_attention_saved again = *saved;
    const mt_column_parallel_linear *layers;
    mt_tensor dout, dqkv, cols[3];
    int count;
    if (a->desc.recompute_core) {
        MT_TRY(mti_attention_core_again(ctx, a, desc, &again));
        saved = &again;
    }
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->out.rows, saved->out.cols, &dout));
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->qkv.rows, saved->qkv.cols, &dqkv));
    MT_TRY(mt_parallel_linear_backward(ctx, &a->proj, dy, dout, &saved->proj_in));
    MT_TRY(mti_attention_core_backward(ctx, a, desc, saved, dout, dqkv));
    count = mti_attention_layers(a, dqkv, &layers, cols);
    MT_TRY(mti_attention_log(ctx, layers, count, cols));
    return mt_parallel_linear_backward_shared(ctx, layers, count, cols, &dx, &saved->qkv_in);
}

/* Checks, before anything is added to a gradient, that saved is of a forward with the same sizes. */
static mt_status mti_attention_saved_check(mt_context *ctx, const char *function, const mt_self_attention *a,
                                           const mt_self_attention_saved *saved) {
    int64_t tokens = mti_batch_tokens(a->cp, &saved->batch),
            width = a->proj.local_features + 2 * a->groups * a->head_dim;
    MT_TRY(mt_check_activation(ctx, function, a->proj.weight, "saved.qkv", saved->qkv, tokens, width));
    if (a->desc.recompute_core) return MT_SUCCESS;
    return mt_check_activation(ctx, function, a->proj.weight, "saved.out", saved->out, tokens, a->proj.local_features);
}

/* Checks, before anything is computed, that the layers may add to their gradients. */
static mt_status mti_attention_gradients(mt_context *ctx, const char *function, const mt_self_attention *a) {
    const mt_column_parallel_linear *layers;
    int i, count = mti_qkv_layers(a, &layers);
    for (i = 0; i < count; i++) MT_TRY(mt_check_linear_gradients(ctx, function, &layers[i]));
    return mt_check_linear_gradients(ctx, function, &a->proj);
}

MT_API mt_status mt_self_attention_backward(mt_context *ctx, const mt_self_attention *attention, mt_tensor dy,
                                            mt_tensor dx, const mt_self_attention_saved *saved) {
    static const char *const function = "mt_self_attention_backward";
    mt_attention_desc desc;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!attention || !saved)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, attention ? "saved" : "attention");
    MT_TRY(
        mti_block_check(ctx, function, attention, &saved->batch, "dy", dy, dx.data ? "dx" : "dy", dx.data ? dx : dy));
    MT_TRY(mt_check_sent(ctx, function, attention->proj.tp, attention->desc.sequence_parallel, "dy", dy, "dx", dx));
    MT_TRY(mt_check_apart(ctx, function, "dy", dy, "dx", dx));
    MT_TRY(mt_check_apart(ctx, function, "saved.qkv_in.x", saved->qkv_in.x, "dx", dx));
    MT_TRY(mti_attention_saved_check(ctx, function, attention, saved));
    MT_TRY(mti_attention_gradients(ctx, function, attention));
    desc = mti_attention_desc(attention, &saved->batch, 1);
    mti_log_batch(ctx, attention->cp, &attention->context, &saved->batch);
    MT_TRY(mt_defer_weight_gradients(ctx));
    mark = mt_arena_mark(ctx);
    status = mt_defer_weight_gradients_end(
        ctx, MT_RANGE("attention backward", mti_attention_backward(ctx, attention, &desc, dy, dx, saved)));
    mt_arena_release(ctx, mark);
    return status;
}
