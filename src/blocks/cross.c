/* ---- parallel cross-attention ------------------------------------------------------------------------------------ */

#pragma once
#include "cross.h"
#include "attention.c"

/* Refuses what depends on the distance of a query and a key, which have positions in different sequences. */
static mt_status mti_cross_scores_check(mt_context *ctx, const char *function, const char *name,
                                        const mt_scores_desc *s) {
    const char *field = NULL;
    MT_TRY(mt_scores_check(ctx, function, name, s));
    if (s->rotary_base > 0.0f) field = "rotary_base";
    if (s->rotary_form != MT_ROTARY_HALVES) field = "rotary_form";
    if (s->rotary_dim != 0) field = "rotary_dim";
    if (s->window > 0) field = "window";
    if (s->alibi) field = "alibi";
    if (!field) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "%s: '%s': scores.%s is set, must be 0: queries and keys of cross-attention are of different "
                   "sequences",
                   function, name, field);
}

/* shards is that of mti_heads_check. */
static mt_status mti_cross_desc_check(mt_context *ctx, const char *function, const char *name,
                                      const mt_cross_attention_desc *d, int shards) {
    MT_TRY(mt_check_integer(ctx, function, name, "hidden", d->hidden, 1, INT32_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "heads", d->heads, 1, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "kv_heads", d->kv_heads, 0, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "kv_hidden", d->kv_hidden, 0, INT32_MAX));
    MT_TRY(mt_check_float(ctx, function, name, "dropout", d->dropout, MT_FLOAT_PROBABILITY));
    MT_TRY(mt_check_integer(ctx, function, name, "layer_number", d->layer_number, 0, INT64_MAX));
    MT_TRY(mti_cross_scores_check(ctx, function, name, &d->scores));
    MT_TRY(mti_init_check(ctx, function, name, &d->init));
    return mti_heads_check(ctx, function, name, d->hidden, d->heads, d->kv_heads, shards);
}

/* Makes the layers. out->desc, out->head_dim and out->pieces are set. */
static mt_status mti_cross_create(mt_context *ctx, mt_params *params, const char *name, mt_cross_attention *out) {
    const mt_cross_attention_desc *d = &out->desc;
    mti_origin from = mti_from_registry(params);
    mt_linear_desc query, key_value, proj;
    mti_heads h;
    h.heads = d->heads;
    h.kv_heads = d->kv_heads;
    h.head_dim = out->head_dim;
    h.pieces = out->pieces;
    query = mti_attention_linear(d->hidden, d->no_bias, d->sequence_parallel, d->init.std, d->add_to_dx);
    key_value = mti_attention_linear(d->kv_hidden, d->no_bias, d->sequence_parallel, d->init.std, d->add_to_dmemory);
    proj = mti_attention_linear(0, d->no_bias, d->sequence_parallel, d->init.output_std, 0);
    proj.skip_bias_add = d->skip_bias_add;
    MT_TRY(mti_attention_separate(ctx, &from, name, &h, &query, &key_value, &out->query, out->key_value));
    MT_TRY(mti_attention_proj(ctx, &from, name, &h, proj, &out->proj));
    out->groups = out->proj.local_features / out->proj.desc.unit;
    out->first_group = out->proj.weight->tp_rank * out->groups;
    return MT_SUCCESS;
}

MT_API mt_status mt_cross_attention_create(mt_context *ctx, mt_params *params, const char *name,
                                           const mt_cross_attention_desc *desc, mt_cross_attention *out) {
    static const char *const function = "mt_cross_attention_create";
    mt_cross_attention_desc d;
    char full[MT_NAME_MAX];
    size_t mark;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    MT_TRY(mt_layer_name(ctx, params, name, full));
    name = full;
    d = *desc;
    if (!d.kv_heads) d.kv_heads = d.heads;
    if (!d.kv_hidden) d.kv_hidden = d.hidden;
    MT_TRY(mti_cross_desc_check(ctx, function, name, &d, mt_params_shards(params)));
    d.scores.mask = MT_MASK_BIDIRECTIONAL;
    mark = mt_params_mark(params);
    memset(out, 0, sizeof *out);
    out->desc = d;
    out->head_dim = d.hidden / d.heads;
    out->pieces = mti_group_pieces(d.heads, d.kv_heads, mt_params_shards(params));
    out->context = mt_parallel_get_options(ctx).context;
    out->cp = mti_context_group(params, &out->context);
    return mt_create_end(params, mark, out, sizeof *out, mti_cross_create(ctx, params, name, out));
}

/* `groups` is the number of groups of a rank. */
static mt_attention_desc mti_cross_rank(const mt_cross_attention *a, int64_t groups, int tp_rank, const mt_batch *batch,
                                        const mt_batch *memory_batch) {
    int64_t all = a->desc.kv_heads * a->pieces;
    mt_attention_desc s =
        mti_rank_attention(groups, tp_rank, all, a->desc.heads / all, a->head_dim, MT_QKV_SEPARATE, batch);
    s.kv_seq = memory_batch->seq;
    mti_batch_scores(memory_batch, s.dropout.at.first_col, &s);
    return s;
}

static mt_attention_desc mti_cross_desc(const mt_cross_attention *a, const mt_batch *batch,
                                        const mt_batch *memory_batch, int training) {
    mt_attention_desc s = mti_cross_rank(a, a->groups, a->proj.weight->tp_rank, batch, memory_batch);
    mti_attention_dropout(&s, mt_batch_dropout(batch, training ? a->desc.dropout : 0.0f, a->desc.layer_number, 3));
    s.scores = a->desc.scores;
    return s;
}

/* The tokens of the memory on this context rank. */
static int64_t mti_cross_keys(const mt_cross_attention *a, const mt_batch *batch) {
    return mti_batch_tokens(a->context.whole_keys ? NULL : a->cp, batch);
}

/* The tensors of core attention, or their gradients, are an array of four: queries, keys, values and outputs. */
#define MTI_CROSS_OUT 3

/* Returns the number of columns that a query group has in tensor number i. */
static int64_t mti_cross_width(const mt_attention_desc *desc, int i) {
    return i == 0 || i == MTI_CROSS_OUT ? mti_out_width(desc) : desc->head_dim;
}

/* Returns the columns of desc->groups groups of tensor number i. first is the number of the first group. */
static mt_tensor mti_cross_cols(const mt_attention_desc *desc, const mt_tensor *t, int i, int64_t first) {
    return mti_attention_cols(desc, t[i], first, mti_cross_width(desc, i));
}

/* Runs core attention on one virtual shard. desc and first are from mti_attention_shard; the tensors are those of the
   whole rank. */
static mt_status mti_cross_shard_forward(mt_context *ctx, const mt_cross_attention *a, const mt_attention_desc *desc,
                                         int64_t first, const mt_tensor *t, mt_tensor lse) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor in[MTI_CROSS_OUT], out, to;
    int i;
    if (desc->groups == 0) return MT_SUCCESS;
    for (i = 0; i < MTI_CROSS_OUT; i++) MT_TRY(mt_invariant_input(ctx, mti_cross_cols(desc, t, i, first), &in[i]));
    out = mti_cross_cols(desc, t, MTI_CROSS_OUT, first);
    MT_TRY(mt_invariant_output(ctx, out, &to));
    lse = mti_attention_lse(desc, lse, first);
    MT_TRY(a->cp ? mt_context_parallel_attention_forward(ctx, a->cp, &a->context, desc, in[0], in[1], in[2], to, lse)
                 : mt_dot_product_attention_forward(ctx, desc, in[0], in[1], in[2], to, lse));
    MT_TRY(mt_invariant_store(ctx, to, out));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

static mt_status mti_cross_core_forward(mt_context *ctx, const mt_cross_attention *a, const mt_attention_desc *desc,
                                        const mt_cross_attention_saved *saved) {
    mt_tensor t[MTI_CROSS_OUT + 1] = {saved->q, saved->k, saved->v, saved->out};
    int s, shards = a->proj.weight->shards;
    int64_t first;
    for (s = 0; s < shards && desc->groups > 0; s++) {
        mt_attention_desc part = mti_attention_shard(desc, a->groups, s, shards, &first);
        MT_TRY(mti_cross_shard_forward(ctx, a, &part, first, t, saved->lse));
    }
    return mti_attention_zero_rest(ctx, desc, saved->out, mti_out_width(desc));
}

/* d has the gradients of the tensors t. */
static mt_status mti_cross_shard_backward(mt_context *ctx, const mt_cross_attention *a, const mt_attention_desc *desc,
                                          int64_t first, const mt_tensor *t, mt_tensor lse, const mt_tensor *d) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor in[MTI_CROSS_OUT + 1], to[MTI_CROSS_OUT], dout;
    int i;
    if (desc->groups == 0) return MT_SUCCESS;
    for (i = 0; i <= MTI_CROSS_OUT; i++) MT_TRY(mt_invariant_input(ctx, mti_cross_cols(desc, t, i, first), &in[i]));
    MT_TRY(mt_invariant_input(ctx, mti_cross_cols(desc, d, MTI_CROSS_OUT, first), &dout));
    for (i = 0; i < MTI_CROSS_OUT; i++) MT_TRY(mt_invariant_output(ctx, mti_cross_cols(desc, d, i, first), &to[i]));
    lse = mti_attention_lse(desc, lse, first);
    MT_TRY(a->cp ? mt_context_parallel_attention_backward(ctx, a->cp, &a->context, desc, in[0], in[1], in[2],
                                                          in[MTI_CROSS_OUT], lse, dout, to[0], to[1], to[2])
                 : mt_dot_product_attention_backward(ctx, desc, in[0], in[1], in[2], in[MTI_CROSS_OUT], lse, dout,
                                                     to[0], to[1], to[2]));
    for (i = 0; i < MTI_CROSS_OUT; i++) MT_TRY(mt_invariant_store(ctx, to[i], mti_cross_cols(desc, d, i, first)));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

static mt_status mti_cross_core_backward(mt_context *ctx, const mt_cross_attention *a, const mt_attention_desc *desc,
                                         const mt_cross_attention_saved *saved, const mt_tensor *d) {
    mt_tensor t[MTI_CROSS_OUT + 1] = {saved->q, saved->k, saved->v, saved->out};
    int i, s, shards = a->proj.weight->shards;
    int64_t first;
    for (s = 0; s < shards && desc->groups > 0; s++) {
        mt_attention_desc part = mti_attention_shard(desc, a->groups, s, shards, &first);
        MT_TRY(mti_cross_shard_backward(ctx, a, &part, first, t, saved->lse, d));
    }
    for (i = 0; i < MTI_CROSS_OUT; i++) MT_TRY(mti_attention_zero_rest(ctx, desc, d[i], mti_cross_width(desc, i)));
    return MT_SUCCESS;
}

/* Allocates the outputs of core attention, saved->out and saved->lse. For inference, saved->lse is mt_none(). */
static mt_status mti_cross_room(mt_context *ctx, const mt_attention_desc *desc, mt_cross_attention_saved *saved,
                                int training) {
    saved->lse = mt_none();
    MT_TRY(mt_arena_tensor(ctx, saved->q.dtype, saved->q.rows, saved->q.cols, &saved->out));
    if (!training) return MT_SUCCESS;
    return mt_arena_tensor(ctx, MT_F32, desc->groups * desc->heads_per_group, saved->q.rows, &saved->lse);
}

static void mti_cross_log_queries(mt_context *ctx, const mt_cross_attention *a, const mt_batch *batch) {
    mti_log_batch(ctx, a->cp, &a->context, batch);
}

/* Of a memory that each context rank has, context rank 0 logs the tensors: keys, values and its terms of their
   gradients. */
static void mti_cross_log_keys(mt_context *ctx, const mt_cross_attention *a, const mt_batch *memory_batch) {
    mti_log_batch(ctx, a->context.whole_keys ? NULL : a->cp, &a->context, memory_batch);
    if (a->context.whole_keys && mt_comm_rank(a->cp) > 0) mt_hash_log_parts(ctx, a->cp, NULL, 0, 0);
}

/* Computes queries, keys and values. The tokens of x come last, because what follows logs them. */
static mt_status mti_cross_inputs(mt_context *ctx, const mt_cross_attention *a, const mt_batch *batch, mt_tensor x,
                                  const mt_batch *memory_batch, mt_tensor memory, mt_cross_attention_saved *saved,
                                  int training) {
    mt_tensor kv[2] = {saved->k, saved->v};
    mti_cross_log_keys(ctx, a, memory_batch);
    MT_TRY(mt_parallel_linear_forward_shared(ctx, a->key_value, 2, &memory, kv, training ? &saved->memory_in : NULL));
    mti_cross_log_queries(ctx, a, batch);
    return mt_parallel_linear_forward(ctx, &a->query, x, saved->q, training ? &saved->query_in : NULL);
}

/* With recompute_core, only saved->q, k and v stay in the arena. */
static mt_status mti_cross_forward(mt_context *ctx, const mt_cross_attention *a, const mt_batch *batch, mt_tensor x,
                                   const mt_batch *memory_batch, mt_tensor memory, mt_tensor y,
                                   mt_cross_attention_saved *saved, int training) {
    mt_attention_desc desc = mti_cross_desc(a, batch, memory_batch, training);
    int64_t queries = mti_batch_tokens(a->cp, batch), keys = mti_cross_keys(a, memory_batch);
    size_t mark;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, queries, a->query.local_features, &saved->q));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, keys, a->key_value[0].local_features, &saved->k));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, keys, a->key_value[1].local_features, &saved->v));
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_cross_room(ctx, &desc, saved, training));
    MT_TRY(mti_cross_inputs(ctx, a, batch, x, memory_batch, memory, saved, training));
    MT_TRY(mti_cross_core_forward(ctx, a, &desc, saved));
    if (training)
        MT_TRY(mt_hash_log_activation(ctx, a->proj.name, 1, "core_attention.output", saved->out, 0, a->proj.weight));
    MT_TRY(mt_parallel_linear_forward(ctx, &a->proj, saved->out, y, training ? &saved->proj_in : NULL));
    if (a->desc.recompute_core) mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Checks the parameters and the two batches. */
static mt_status mti_cross_batches_check(mt_context *ctx, const char *function, const mt_cross_attention *a,
                                         const mt_batch *batch, const mt_batch *memory_batch) {
    char memory[64];
    mt_attention_desc s;
    MT_TRY(mt_check_param(ctx, function, a->proj.weight));
    MT_TRY(mti_batch_check(ctx, function, "batch", batch, 0));
    snprintf(memory, sizeof memory, "%s: memory_batch", function); /* begins the message */
    MT_TRY(mti_batch_check(ctx, function, "memory_batch", memory_batch, 0));
    if (batch->sequences != memory_batch->sequences)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: batch has %lld sequences, memory_batch %lld", function,
                       (long long)batch->sequences, (long long)memory_batch->sequences);
    if (batch->first_sequence != memory_batch->first_sequence)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: first_sequence of batch is %lld, that of memory_batch %lld", function,
                       (long long)batch->first_sequence, (long long)memory_batch->first_sequence);
    if (batch->cu_seqlens || memory_batch->cu_seqlens)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s has cu_seqlens; cross-attention has no packed documents", function,
                       batch->cu_seqlens ? "batch" : "memory_batch");
    MT_TRY(mti_parts_check(ctx, function, "batch", a->cp, &a->context, batch));
    if (!a->context.whole_keys)
        MT_TRY(mti_parts_check(ctx, function, "memory_batch", a->cp, &a->context, memory_batch));
    s = mti_cross_rank(a, a->desc.kv_heads * a->pieces, 0, batch, memory_batch);
    return mti_scores_check(ctx, memory, &s);
}

static mt_status mti_cross_forward_check(mt_context *ctx, const char *function, const mt_cross_attention *a,
                                         const mt_batch *batch, mt_tensor x, const mt_batch *memory_batch,
                                         mt_tensor memory, mt_tensor y) {
    int sp = a->desc.sequence_parallel;
    MT_TRY(mti_cross_batches_check(ctx, function, a, batch, memory_batch));
    MT_TRY(mti_tokens_check(ctx, function, &a->proj, mti_batch_tokens(a->cp, batch), "x", x, a->desc.hidden));
    MT_TRY(mti_tokens_check(ctx, function, &a->proj, mti_cross_keys(a, memory_batch), "memory", memory,
                            a->desc.kv_hidden));
    MT_TRY(mti_tokens_check(ctx, function, &a->proj, mti_batch_tokens(a->cp, batch), "y", y, a->desc.hidden));
    MT_TRY(mt_check_sent(ctx, function, a->proj.tp, sp, "x", x, "y", y));
    MT_TRY(mt_check_sent(ctx, function, a->proj.tp, sp, "memory", memory, "y", y));
    MT_TRY(mt_check_apart(ctx, function, "x", x, "y", y));
    return mt_check_apart(ctx, function, "memory", memory, "y", y);
}

MT_API mt_status mt_cross_attention_forward(mt_context *ctx, const mt_cross_attention *attention, const mt_batch *batch,
                                            mt_tensor x, const mt_batch *memory_batch, mt_tensor memory, mt_tensor y,
                                            mt_cross_attention_saved *saved) {
    static const char *const function = "mt_cross_attention_forward";
    mt_cross_attention_saved local;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!attention) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: attention is NULL", function);
    MT_TRY(mti_cross_forward_check(ctx, function, attention, batch, x, memory_batch, memory, y));
    mark = mt_arena_mark(ctx);
    status = MT_RANGE("cross-attention forward", mti_cross_forward(ctx, attention, batch, x, memory_batch, memory, y,
                                                                   saved ? saved : &local, saved != NULL));
    if (status == MT_SUCCESS && saved) {
        saved->batch = *batch;
        saved->memory_batch = *memory_batch;
    } else mt_arena_release(ctx, mark);
    return status;
}

/* Adds to the gradients of query, key and value, and computes dmemory and dx. d has the gradients of queries, keys and
   values. */
static mt_status mti_cross_inputs_backward(mt_context *ctx, const mt_cross_attention *a, const mt_tensor *d,
                                           mt_tensor dx, mt_tensor dmemory, const mt_cross_attention_saved *saved) {
    int i;
    mti_cross_log_keys(ctx, a, &saved->memory_batch);
    for (i = 0; i < 2; i++)
        MT_TRY(
            mt_hash_log_activation(ctx, a->key_value[i].name, 0, "output_grad", d[1 + i], 0, a->key_value[i].weight));
    MT_TRY(mt_parallel_linear_backward_shared(ctx, a->key_value, 2, d + 1, &dmemory, &saved->memory_in));
    mti_cross_log_queries(ctx, a, &saved->batch);
    MT_TRY(mt_hash_log_activation(ctx, a->query.name, 0, "output_grad", d[0], 0, a->query.weight));
    return mt_parallel_linear_backward(ctx, &a->query, d[0], dx, &saved->query_in);
}

/* With recompute_core: computes out and lse of *saved again. */
static mt_status mti_cross_core_again(mt_context *ctx, const mt_cross_attention *a, const mt_attention_desc *desc,
                                      mt_cross_attention_saved *saved) {
    mt_status status;
    MT_TRY(mti_cross_room(ctx, desc, saved, 1));
    mt_trace_recompute(ctx, 1);
    status = mti_cross_core_forward(ctx, a, desc, saved);
    mt_trace_recompute(ctx, 0);
    saved->proj_in.x = saved->out;
    return status;
}

static mt_status mti_cross_backward(mt_context *ctx, const mt_cross_attention *a, mt_tensor dy, mt_tensor dx,
                                    mt_tensor dmemory, const mt_cross_attention_saved *saved) {
    mt_attention_desc desc = mti_cross_desc(a, &saved->batch, &saved->memory_batch, 1);
    mt_cross_attention_saved again = *saved;
    mt_tensor d[MTI_CROSS_OUT + 1];
    mti_cross_log_queries(ctx, a, &saved->batch);
    if (a->desc.recompute_core) {
        MT_TRY(mti_cross_core_again(ctx, a, &desc, &again));
        saved = &again;
    }
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->q.rows, saved->q.cols, &d[0]));
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->k.rows, saved->k.cols, &d[1]));
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->v.rows, saved->v.cols, &d[2]));
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->out.rows, saved->out.cols, &d[MTI_CROSS_OUT]));
    MT_TRY(mt_parallel_linear_backward(ctx, &a->proj, dy, d[MTI_CROSS_OUT], &saved->proj_in));
    MT_TRY(mti_cross_core_backward(ctx, a, &desc, saved, d));
    return mti_cross_inputs_backward(ctx, a, d, dx, dmemory, saved);
}

/* Checks, before anything is added to a gradient, that saved is of a forward with the same sizes. */
static mt_status mti_cross_saved_check(mt_context *ctx, const char *function, const mt_cross_attention *a,
                                       const mt_cross_attention_saved *s) {
    int64_t queries = mti_batch_tokens(a->cp, &s->batch), keys = mti_cross_keys(a, &s->memory_batch);
    const mt_param *w = a->proj.weight;
    MT_TRY(mt_check_activation(ctx, function, w, "saved.q", s->q, queries, a->query.local_features));
    MT_TRY(mt_check_activation(ctx, function, w, "saved.k", s->k, keys, a->key_value[0].local_features));
    MT_TRY(mt_check_activation(ctx, function, w, "saved.v", s->v, keys, a->key_value[1].local_features));
    MT_TRY(mti_tokens_check(ctx, function, &a->proj, mti_batch_tokens(a->cp, &s->batch), "saved.query_in.x",
                            s->query_in.x, a->desc.hidden));
    MT_TRY(mti_tokens_check(ctx, function, &a->proj, mti_cross_keys(a, &s->memory_batch), "saved.memory_in.x",
                            s->memory_in.x, a->desc.kv_hidden));
    if (a->desc.recompute_core) return MT_SUCCESS;
    return mt_check_activation(ctx, function, w, "saved.out", s->out, queries, a->proj.local_features);
}

/* Checks that dx or dmemory overlaps neither what backward reads nor bias.grad. */
static mt_status mti_cross_apart(mt_context *ctx, const char *function, const mt_cross_attention_saved *saved,
                                 mt_tensor dy, const char *name, mt_tensor d) {
    MT_TRY(mt_check_apart(ctx, function, "dy", dy, name, d));
    MT_TRY(mt_check_apart(ctx, function, "bias.grad", saved->memory_batch.bias.grad, name, d));
    MT_TRY(mt_check_apart(ctx, function, "saved.query_in.x", saved->query_in.x, name, d));
    return mt_check_apart(ctx, function, "saved.memory_in.x", saved->memory_in.x, name, d);
}

static mt_status mti_cross_backward_check(mt_context *ctx, const char *function, const mt_cross_attention *a,
                                          mt_tensor dy, mt_tensor dx, mt_tensor dmemory,
                                          const mt_cross_attention_saved *saved) {
    int sp = a->desc.sequence_parallel;
    const mt_batch *keys = &saved->memory_batch;
    MT_TRY(mti_cross_batches_check(ctx, function, a, &saved->batch, keys));
    MT_TRY(mti_tokens_check(ctx, function, &a->proj, mti_batch_tokens(a->cp, &saved->batch), "dy", dy, a->desc.hidden));
    if (dx.data)
        MT_TRY(mti_tokens_check(ctx, function, &a->proj, mti_batch_tokens(a->cp, &saved->batch), "dx", dx,
                                a->desc.hidden));
    if (dmemory.data)
        MT_TRY(
            mti_tokens_check(ctx, function, &a->proj, mti_cross_keys(a, keys), "dmemory", dmemory, a->desc.kv_hidden));
    MT_TRY(mt_check_sent(ctx, function, a->proj.tp, sp, "dy", dy, "dx", dx));
    MT_TRY(mt_check_sent(ctx, function, a->proj.tp, sp, "dy", dy, "dmemory", dmemory));
    MT_TRY(mt_check_apart(ctx, function, "bias.grad", keys->bias.grad, "dy", dy));
    MT_TRY(mti_cross_apart(ctx, function, saved, dy, "dx", dx));
    MT_TRY(mti_cross_apart(ctx, function, saved, dy, "dmemory", dmemory));
    MT_TRY(mt_check_apart(ctx, function, "dx", dx, "dmemory", dmemory));
    return mti_cross_saved_check(ctx, function, a, saved);
}

MT_API mt_status mt_cross_attention_backward(mt_context *ctx, const mt_cross_attention *attention, mt_tensor dy,
                                             mt_tensor dx, mt_tensor dmemory, const mt_cross_attention_saved *saved) {
    static const char *const function = "mt_cross_attention_backward";
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!attention || !saved)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, attention ? "saved" : "attention");
    MT_TRY(mti_cross_backward_check(ctx, function, attention, dy, dx, dmemory, saved));
    MT_TRY(mt_check_linear_gradients(ctx, function, &attention->proj));
    MT_TRY(mt_defer_weight_gradients(ctx));
    mark = mt_arena_mark(ctx);
    status = mt_defer_weight_gradients_end(
        ctx, MT_RANGE("cross-attention backward", mti_cross_backward(ctx, attention, dy, dx, dmemory, saved)));
    mt_arena_release(ctx, mark);
    return status;
}
