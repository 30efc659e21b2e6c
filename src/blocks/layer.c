/* ---- the transformer layer --------------------------------------------------------------------------------------- */

#pragma once
#include "layer.h"
#include "attention.c"
#include "../parallel/options.h"

/* Creates the norm NAME.SUFFIX with the features, kind and eps of the layer. */
static mt_status mti_layer_norm(mt_context *ctx, mt_params *params, const char *name, const char *suffix,
                                const mt_transformer_layer_desc *d, mt_norm_layer *out) {
    char full[MT_NAME_MAX];
    mt_norm_layer_desc n;
    memset(&n, 0, sizeof n);
    n.features = d->hidden;
    n.kind = d->norm.kind;
    n.eps = d->norm.eps;
    n.sequence_parallel = d->sequence_parallel;
    MT_TRY(mt_param_name(ctx, full, name, suffix));
    return mt_norm_layer_create(ctx, params, full, &n, out);
}

/* Creates the norms and blocks in the order of forward. mti_model_backward relies on this order in the registry. */
static mt_status mti_layer_blocks(mt_context *ctx, mt_params *params, const char *name,
                                  const mt_transformer_layer_desc *d, mt_transformer_layer *out) {
    char full[MT_NAME_MAX];
    mt_self_attention_desc a;
    mt_mlp_desc m;
    memset(&a, 0, sizeof a);
    memset(&m, 0, sizeof m);
    a.hidden = d->hidden;
    a.heads = d->heads;
    a.kv_heads = d->kv_heads;
    a.scores = d->scores;
    a.max_seq = d->max_seq;
    a.dropout = d->dropout.attention;
    a.layer_number = d->dropout.layer_number;
    m.hidden = d->hidden;
    m.ffn = d->ffn;
    m.activation = d->activation;
    a.no_bias = m.no_bias = d->no_bias;
    a.skip_bias_add = m.skip_bias_add = !d->no_bias; /* the bias is added with dropout and residual */
    a.sequence_parallel = m.sequence_parallel = d->sequence_parallel;
    a.qkv_layout = d->qkv_layout;
    a.recompute_core = d->recompute == MT_RECOMPUTE_SELECTIVE;
    a.init = m.init = d->init;
    MT_TRY(mti_layer_norm(ctx, params, name, "input_layernorm", d, &out->input_norm));
    MT_TRY(mt_param_name(ctx, full, name, "self_attention"));
    MT_TRY(mt_self_attention_create(ctx, params, full, &a, &out->attention));
    MT_TRY(mti_layer_norm(ctx, params, name, "pre_mlp_layernorm", d, &out->mlp_norm));
    MT_TRY(mt_param_name(ctx, full, name, "mlp"));
    return mt_mlp_create(ctx, params, full, &m, &out->mlp);
}

/* Checks the fields that the layer uses itself, or passes to its blocks under another name. The blocks check the
   others. */
static mt_status mti_layer_desc_check(mt_context *ctx, const char *function, const char *name,
                                      const mt_transformer_layer_desc *d) {
    MT_TRY(mt_check_integer(ctx, function, name, "hidden", d->hidden, 1, INT32_MAX));
    MT_TRY(mt_check_enum(ctx, function, name, "norm.placement", (int)d->norm.placement, MT_LN_PLACEMENT_WORDS));
    MT_TRY(mt_check_enum(ctx, function, name, "norm.kind", (int)d->norm.kind, MT_NORM_WORDS));
    MT_TRY(mt_check_float(ctx, function, name, "norm.eps", d->norm.eps, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mt_check_float(ctx, function, name, "dropout.attention", d->dropout.attention, MT_FLOAT_PROBABILITY));
    MT_TRY(mt_check_float(ctx, function, name, "dropout.hidden", d->dropout.hidden, MT_FLOAT_PROBABILITY));
    MT_TRY(mt_check_enum(ctx, function, name, "recompute", (int)d->recompute, MT_RECOMPUTE_WORDS));
    return mti_init_check(ctx, function, name, &d->init);
}

MT_API mt_status mt_transformer_layer_create(mt_context *ctx, mt_params *params, const char *name,
                                             const mt_transformer_layer_desc *desc, mt_transformer_layer *out) {
    static const char *const function = "mt_transformer_layer_create";
    char full[MT_NAME_MAX];
    size_t mark;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    MT_TRY(mt_layer_name(ctx, params, name, full));
    name = full;
    MT_TRY(mti_layer_desc_check(ctx, function, name, desc));
    mark = mt_params_mark(params);
    memset(out, 0, sizeof *out);
    out->desc = *desc;
    out->tp = mt_params_grid(params)->tp;
    return mt_create_end(params, mark, out, sizeof *out, mti_layer_blocks(ctx, params, name, desc, out));
}

/* Which tokens of a batch the rows of a tensor are: all of them or, with sequence_parallel, those of this tensor rank.
   With context ranks these are not one after the other in the batch. */
typedef struct mti_token_rows {
    mti_seq_chunks chunks;
    int64_t sequences, seq, first; /* first: number of row 0 of the tensor among the tokens of this context rank */
} mti_token_rows;

static mti_token_rows mti_token_rows_of(const mt_self_attention *a, const mt_batch *batch, int sequence_parallel,
                                        int64_t rows) {
    mti_token_rows t;
    t.chunks = mti_seq_chunks_of(a->cp, &a->context, batch->seq);
    t.sequences = batch->sequences;
    t.seq = batch->seq;
    t.first = sequence_parallel ? mt_comm_rank(a->proj.tp) * rows : 0;
    return t;
}

/* Returns how many of the rows [row, end) follow each other in the batch. *token becomes the number of the first one
   there. */
static int64_t mti_token_run(const mti_token_rows *t, int64_t row, int64_t end, int64_t *token) {
    const int64_t i = t->first + row, chunk = t->chunks.chunk;
    *token = i;
    if (chunk == t->seq) return end - row;
    *token =
        i / chunk % t->sequences * t->seq + mti_chunk_token(&t->chunks, (int)(i / (t->sequences * chunk))) + i % chunk;
    return mt_min(end - row, chunk - i % chunk);
}

/* The dropout of such a tensor. */
typedef struct mti_row_dropout {
    mt_dropout dropout; /* of the first token of the batch */
    mti_token_rows rows;
} mti_row_dropout;

static mti_row_dropout mti_row_dropout_of(const mt_self_attention *a, const mt_batch *batch, float p, int64_t layer,
                                          int site, int sequence_parallel, int64_t rows) {
    mti_row_dropout d;
    d.dropout = mt_batch_dropout(batch, p, layer, site);
    d.dropout.at.first_row = batch->first_sequence * batch->seq;
    d.dropout.at.global_cols = a->desc.hidden;
    d.rows = mti_token_rows_of(a, batch, sequence_parallel, rows);
    return d;
}

/* As mti_token_run; *at becomes the dropout of the rows. */
static int64_t mti_dropout_run(const mti_row_dropout *d, int64_t row, int64_t end, mt_dropout *at) {
    int64_t token, count = mti_token_run(&d->rows, row, end, &token);
    *at = d->dropout;
    at->at.first_row += token;
    return count;
}

/* y = residual + dropout(y + bias). bias and residual may be mt_none(). */
static mt_status mti_rows_drop(mt_context *ctx, const mti_row_dropout *d, mt_tensor y, mt_tensor bias,
                               mt_tensor residual) {
    mt_status status = MT_SUCCESS;
    mt_dropout at;
    int64_t row, count;
    mt_check_scattered(ctx, d->rows.chunks.chunk < d->rows.seq);
    for (row = 0; row < y.rows && status == MT_SUCCESS; row += count) {
        const mt_tensor x = mt_tensor_rows(y, row, count = mti_dropout_run(d, row, y.rows, &at));
        status = mt_bias_dropout_add_forward(ctx, x, bias, mti_some_rows(residual, row, count), at, x);
    }
    mt_check_scattered(ctx, 0);
    return status;
}

/* dx = the gradient of dropout(x + bias), and dbias, which may be mt_none(), += its sum over the rows [first, end). */
static mt_status mti_rows_drop_backward(mt_context *ctx, const mti_row_dropout *d, mt_tensor dy, int64_t first,
                                        int64_t end, mt_tensor dx, mt_tensor dbias) {
    mt_status status = MT_SUCCESS;
    mt_dropout at;
    int64_t count;
    mt_check_scattered(ctx, d->rows.chunks.chunk < d->rows.seq);
    for (; first < end && status == MT_SUCCESS; first += count) {
        count = mti_dropout_run(d, first, end, &at);
        status = mt_bias_dropout_add_backward(ctx, mt_tensor_rows(dy, first, count), at,
                                              mt_tensor_rows(dx, first, count), dbias);
    }
    mt_check_scattered(ctx, 0);
    return status;
}

/* A sublayer of a transformer layer: a norm, a block, and bias, dropout and residual. Its forward and its backward have
   two parts: the first one ends with the reduction of the block, and the second one needs its result. */
typedef struct mti_sublayer {
    const mt_transformer_layer *layer;
    const mt_batch *batch;
    const mt_norm_layer *norm;
    const mt_param *bias; /* of the block's row-parallel layer, which has skip_bias_add; NULL: no bias */
    mti_row_dropout dropout;
    const mt_kv_cache *cache; /* NULL: attention has none */
    int index;                /* 0: attention; 1: MLP */
    mt_tensor inner;          /* what lies between the norm and the block, or its gradient */
} mti_sublayer;

static mti_sublayer mti_sublayer_of(const mt_transformer_layer *layer, const mt_batch *batch, int index, int64_t rows,
                                    int training) {
    mti_sublayer h;
    h.layer = layer;
    h.batch = batch;
    h.cache = NULL;
    h.index = index;
    h.inner = mt_none();
    h.norm = index == 0 ? &layer->input_norm : &layer->mlp_norm;
    h.bias = index == 0 ? layer->attention.proj.bias : layer->mlp.fc2.bias;
    h.dropout = mti_row_dropout_of(&layer->attention, batch, training ? layer->desc.dropout.hidden : 0.0f,
                                   layer->desc.dropout.layer_number, 1 + index, layer->desc.sequence_parallel, rows);
    return h;
}

static int mti_is_post_ln(const mti_sublayer *h) { return h->layer->desc.norm.placement == MT_POST_LN; }

/* Returns what the norm of a sublayer saves, or NULL without saved. */
static mt_norm_saved *mti_sublayer_norm(const mti_sublayer *h, mt_transformer_layer_tensors *saved) {
    return !saved ? NULL : h->index == 0 ? &saved->input_norm : &saved->mlp_norm;
}

/* When y is mt_none(), which is so only for the MLP, computes only the tensors that the MLP saves. */
static mt_status mti_sublayer_block_forward(mt_context *ctx, const mti_sublayer *h, mt_tensor x, mt_tensor y,
                                            mt_transformer_layer_tensors *saved) {
    if (!y.data) return mti_mlp_forward(ctx, &h->layer->mlp, x, y, &saved->mlp, 1);
    if (h->index == 0 && h->cache)
        return mt_self_attention_cached_forward(ctx, &h->layer->attention, h->batch, h->cache, x, y);
    if (h->index == 0)
        return mt_self_attention_forward(ctx, &h->layer->attention, h->batch, x, y, saved ? &saved->attention : NULL);
    return mt_mlp_forward(ctx, &h->layer->mlp, x, y, saved ? &saved->mlp : NULL);
}

static mt_status mti_sublayer_block_backward(mt_context *ctx, const mti_sublayer *h, mt_tensor dy, mt_tensor dx,
                                             const mt_transformer_layer_tensors *saved) {
    if (h->index == 0) return mt_self_attention_backward(ctx, &h->layer->attention, dy, dx, &saved->attention);
    return mt_mlp_backward(ctx, &h->layer->mlp, dy, dx, &saved->mlp);
}

/* The first part of forward, in the order of the placement (see mt_ln_placement): the norm, and the block. The block
   writes its output to y, or with MT_POST_LN to h->inner, so no other buffer is needed. */
static mt_status mti_sublayer_forward(mt_context *ctx, mti_sublayer *h, mt_tensor x, mt_tensor y,
                                      mt_transformer_layer_tensors *saved) {
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, x.cols, &h->inner));
    if (mti_is_post_ln(h)) return mti_sublayer_block_forward(ctx, h, x, h->inner, saved);
    MT_TRY(mt_norm_layer_forward(ctx, h->norm, x, h->inner, mti_sublayer_norm(h, saved)));
    return mti_sublayer_block_forward(ctx, h, h->inner, y, saved);
}

/* The second part: residual + dropout(the block's output + bias), and with MT_POST_LN the norm of it. */
static mt_status mti_sublayer_forward_end(mt_context *ctx, const mti_sublayer *h, mt_tensor x, mt_tensor y,
                                          mt_transformer_layer_tensors *saved) {
    mt_tensor out = mti_is_post_ln(h) ? h->inner : y;
    mt_tensor residual = h->layer->desc.norm.placement == MT_RESIDUAL_POST_LN ? h->inner : x;
    if (!y.data) return MT_SUCCESS;
    MT_TRY(mti_rows_drop(ctx, &h->dropout, out, mti_bias_value(h->bias), residual));
    if (saved)
        MT_TRY(mt_hash_log_activation(ctx, h->layer->mlp.fc1.name, 2,
                                      h->index == 0 ? "self_attn_bda.output" : "mlp_bda.output", out,
                                      h->layer->desc.sequence_parallel, NULL));
    return mti_is_post_ln(h) ? mt_norm_layer_forward(ctx, h->norm, out, y, mti_sublayer_norm(h, saved)) : MT_SUCCESS;
}

/* The argument of mti_drop_rows. */
typedef struct mti_drop_call {
    const mti_row_dropout *dropout;
    mt_tensor dy, dblock;
} mti_drop_call;

/* An operator for mt_sum_over_tokens: backward of dropout(block + bias) for some rows. Adds to dbias and, when p is not
   0, writes dblock. */
static mt_status mti_drop_rows(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor dbias,
                               mt_tensor none) {
    const mti_drop_call *c = (const mti_drop_call *)arg;
    (void)none;
    if (c->dropout->dropout.p <= 0.0f) return mt_bias_backward(ctx, mt_tensor_rows(c->dy, first, count), dbias);
    return mti_rows_drop_backward(ctx, c->dropout, c->dy, first, first + count, c->dblock, dbias);
}

/* Backward of dropout(block + bias): *dblock becomes the gradient of the block's output, which is dy itself without
   dropout. Adds to the gradient of the bias. */
static mt_status mti_sublayer_drop_backward(mt_context *ctx, const mti_sublayer *h, mt_tensor dy, mt_tensor *dblock) {
    mti_drop_call call;
    call.dropout = &h->dropout;
    call.dy = call.dblock = dy;
    if (h->dropout.dropout.p > 0.0f) MT_TRY(mt_arena_tensor(ctx, dy.dtype, dy.rows, dy.cols, &call.dblock));
    *dblock = call.dblock;
    if (h->bias)
        return mt_sum_over_tokens(ctx, h->layer->tp, h->layer->desc.sequence_parallel, mti_drop_rows, &call, dy.rows,
                                  h->bias->grad, mt_none());
    if (h->dropout.dropout.p <= 0.0f) return MT_SUCCESS;
    return mti_rows_drop_backward(ctx, &h->dropout, dy, 0, dy.rows, call.dblock, mt_none());
}

/* The first part of backward: what comes after the block, and the block. */
static mt_status mti_sublayer_backward(mt_context *ctx, mti_sublayer *h, mt_tensor dy, mt_tensor dx,
                                       mt_transformer_layer_tensors *saved) {
    mt_tensor dblock;
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, dy.rows, dy.cols, &h->inner));
    if (mti_is_post_ln(h))
        MT_TRY(mt_norm_layer_backward(ctx, h->norm, dy, mt_none(), h->inner, mti_sublayer_norm(h, saved)));
    MT_TRY(mti_sublayer_drop_backward(ctx, h, mti_is_post_ln(h) ? h->inner : dy, &dblock));
    return mti_sublayer_block_backward(ctx, h, dblock, mti_is_post_ln(h) ? dx : h->inner, saved);
}

/* The second part: what comes before the block. */
static mt_status mti_sublayer_backward_end(mt_context *ctx, const mti_sublayer *h, mt_tensor dy, mt_tensor dx,
                                           mt_transformer_layer_tensors *saved) {
    const mt_norm_saved *norm = mti_sublayer_norm(h, saved);
    if (mti_is_post_ln(h)) return mt_add(ctx, dx, h->inner, dx);
    if (h->layer->desc.norm.placement == MT_PRE_LN) return mt_norm_layer_backward(ctx, h->norm, h->inner, dy, dx, norm);
    MT_TRY(mt_add(ctx, h->inner, dy, h->inner));
    return mt_norm_layer_backward(ctx, h->norm, h->inner, mt_none(), dx, norm);
}

static mt_status mti_layer_check(mt_context *ctx, const char *function, const mt_transformer_layer *layer,
                                 const mt_batch *batch, const char *in_name, mt_tensor in, const char *out_name,
                                 mt_tensor out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!layer) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: layer is NULL", function);
    MT_TRY(mti_block_check(ctx, function, &layer->attention, batch, in_name, in, out_name, out));
    return mt_check_sent(ctx, function, layer->tp, layer->desc.sequence_parallel, in_name, in, out_name, out);
}

/* -- the two halves of a batch, in turn -- */

/* A call on a batch, or on a part of it: its sublayers, and what they read and write. */
typedef struct mti_layer_call {
    mt_batch batch;
    mti_sublayer sublayers[2];
    mt_tensor in, middle, out; /* in backward: dy, the gradient between the sublayers, and dx */
    mt_transformer_layer_tensors *saved;
    size_t mark; /* in backward: of the arena, for what a sublayer needs; 0: another part has memory behind it */
} mti_layer_call;

/* Returns the number of parts of a call: 2 with mt_parallel_options.interleave where it has an effect. */
static int mti_layer_calls(mt_context *ctx, const mt_transformer_layer *layer, const mt_batch *batch,
                           const mt_kv_cache *cache) {
    int alone = mt_comm_size(layer->tp) == 1 || layer->desc.sequence_parallel || mt_context_invariant(ctx) || cache ||
                layer->attention.cp;
    return !alone && batch->sequences > 1 && !batch->cu_seqlens && mt_parallel_get_options(ctx).interleave ? 2 : 1;
}

/* Returns the sequences [first, first + count) of a batch without cu_seqlens. */
static mt_batch mti_batch_range(const mt_batch *batch, int64_t first, int64_t count) {
    mt_batch part = *batch;
    int64_t rows = mt_max(batch->bias.heads, 1) * batch->seq; /* of the bias of a sequence */
    part.sequences = count;
    part.first_sequence += first;
    if (batch->lengths) part.lengths += first;
    if (batch->token_types) part.token_types += first * batch->seq;
    if (batch->bias.batch <= 1) return part;
    part.bias.batch = count;
    part.bias.value = mti_some_rows(batch->bias.value, first * rows, count * rows);
    part.bias.grad = mti_some_rows(batch->bias.grad, first * rows, count * rows);
    return part;
}

/* Fills part `index` of `count`. in and out are those of the whole call, [tokens, hidden] or, when the call is not
   divided, [tokens / t, hidden]; out may be mt_none(). */
static void mti_layer_call_of(const mt_transformer_layer *layer, const mt_batch *batch, int index, int count,
                              mt_tensor in, mt_tensor middle, mt_tensor out, mt_transformer_layer_saved *saved,
                              mti_layer_call *call) {
    int64_t begin = batch->sequences * index / count, end = batch->sequences * (index + 1) / count;
    int64_t first = count > 1 ? begin * batch->seq : 0, rows = count > 1 ? (end - begin) * batch->seq : in.rows;
    int i;
    call->batch = count > 1 ? mti_batch_range(batch, begin, end - begin) : *batch;
    call->in = mt_tensor_rows(in, first, rows);
    call->middle = mt_tensor_rows(middle, first, rows);
    call->out = mti_some_rows(out, first, rows);
    call->saved = saved ? &saved->parts[index] : NULL;
    call->mark = 0;
    for (i = 0; i < 2; i++) call->sublayers[i] = mti_sublayer_of(layer, &call->batch, i, rows, saved != NULL);
}

/* Begins a step of part `index` of `count`: its reduction, if any, goes into the slot of the part, and the hash log
   gets the place of its tokens. A call that is not divided waits for its reductions, also where the program holds its
   own. */
static mt_status mti_layer_call_begin(mt_context *ctx, const mti_layer_call *call, int index, int count) {
    if (count > 1) mt_hash_log_tokens(ctx, call->batch.first_sequence * call->batch.seq);
    return mt_layers_hold_reduction(ctx, count > 1 ? index : -1);
}

/* A step of a part in forward. 0: attention up to its reduction; 1: the end of attention, and the MLP up to its
   reduction; 2: the end of the MLP. */
static mt_status mti_layer_call_forward(mt_context *ctx, mti_layer_call *p, int step) {
    if (step == 0) return mti_sublayer_forward(ctx, &p->sublayers[0], p->in, p->middle, p->saved);
    if (step == 2) return mti_sublayer_forward_end(ctx, &p->sublayers[1], p->middle, p->out, p->saved);
    MT_TRY(mti_sublayer_forward_end(ctx, &p->sublayers[0], p->in, p->middle, p->saved));
    return mti_sublayer_forward(ctx, &p->sublayers[1], p->middle, p->out, p->saved);
}

/* A step in backward. 0: the MLP up to its reduction; 1: the end of the MLP, and attention up to its reduction; 2: the
   end of attention. */
static mt_status mti_layer_call_backward(mt_context *ctx, mti_layer_call *p, int step) {
    if (step == 0) return mti_sublayer_backward(ctx, &p->sublayers[1], p->in, p->middle, p->saved);
    if (step == 2) return mti_sublayer_backward_end(ctx, &p->sublayers[0], p->middle, p->out, p->saved);
    MT_TRY(mti_sublayer_backward_end(ctx, &p->sublayers[1], p->in, p->middle, p->saved));
    if (p->mark) mt_arena_release(ctx, p->mark);
    return mti_sublayer_backward(ctx, &p->sublayers[0], p->middle, p->out, p->saved);
}

/* Runs the steps of all parts in turn. While a part's reduction is in flight, the next part computes. */
static mt_status mti_layer_calls_run(mt_context *ctx, mti_layer_call *calls, int count,
                                     mt_status (*run)(mt_context *ctx, mti_layer_call *call, int step)) {
    int step, i;
    for (step = 0; step < 3; step++)
        for (i = 0; i < count; i++) {
            MT_TRY(mti_layer_call_begin(ctx, &calls[i], i, count));
            MT_TRY(mt_layers_wait_reduction(ctx, i));
            MT_TRY(run(ctx, &calls[i], step));
        }
    return MT_SUCCESS;
}

/* Ends a call, also after an error. */
static mt_status mti_layer_calls_end(mt_context *ctx, const mt_batch *batch, int count, mt_status status) {
    int i;
    if (count == 1) return status;
    for (i = 0; i < count; i++) MT_KEEP(status, mt_layers_wait_reduction(ctx, i));
    MT_KEEP(status, mt_layers_hold_reduction(ctx, -1));
    mt_hash_log_tokens(ctx, batch->first_sequence * batch->seq);
    return status;
}

/* When y is mt_none(), computes only the tensors of *saved. With MT_POST_LN y must not be mt_none(). cache may be
   NULL. */
static mt_status mti_layer_forward(mt_context *ctx, const mt_transformer_layer *layer, const mt_batch *batch,
                                   const mt_kv_cache *cache, mt_tensor x, mt_tensor y,
                                   mt_transformer_layer_saved *saved) {
    mti_layer_call calls[2];
    int count = mti_layer_calls(ctx, layer, batch, cache), i;
    mt_tensor middle;
    if (saved) saved->count = count;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, x.cols, &middle));
    for (i = 0; i < count; i++) {
        mti_layer_call_of(layer, batch, i, count, x, middle, y, saved, &calls[i]);
        calls[i].sublayers[0].cache = cache;
    }
    return mti_layer_calls_end(ctx, batch, count, mti_layer_calls_run(ctx, calls, count, mti_layer_call_forward));
}

MT_API mt_status mt_transformer_layer_forward(mt_context *ctx, const mt_transformer_layer *layer, const mt_batch *batch,
                                              mt_tensor x, mt_tensor y, mt_transformer_layer_saved *saved) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_layer_check(ctx, "mt_transformer_layer_forward", layer, batch, "x", x, "y", y));
    MT_TRY(mt_check_apart(ctx, "mt_transformer_layer_forward", "x", x, "y", y));
    if (saved)
        MT_TRY(mt_check_tokens(ctx, "mt_transformer_layer_forward", mti_batch_tokens(layer->attention.cp, batch)));
    mark = mt_arena_mark(ctx);
    status = MT_RANGE("layer forward", mti_layer_forward(ctx, layer, batch, NULL, x, y, saved));
    if (saved) saved->x = x, saved->batch = *batch;
    if (status != MT_SUCCESS || !saved || layer->desc.recompute == MT_RECOMPUTE_FULL) mt_arena_release(ctx, mark);
    return status;
}

/* As mti_attention_whole_tokens, for a layer. */
static void mti_layer_whole_tokens(mt_transformer_layer *layer) {
    mti_attention_whole_tokens(&layer->attention);
    layer->desc.sequence_parallel = layer->mlp.desc.sequence_parallel = 0;
    layer->mlp.fc1.desc.sequence_parallel = layer->mlp.fc2.desc.sequence_parallel = 0;
}

MT_API mt_status mt_transformer_layer_cached_forward(mt_context *ctx, const mt_transformer_layer *layer,
                                                     const mt_batch *batch, const mt_kv_cache *cache, mt_tensor x,
                                                     mt_tensor y) {
    static const char *const function = "mt_transformer_layer_cached_forward";
    mt_transformer_layer l;
    mt_batch padded;
    const mt_batch *checked;
    size_t mark;
    int before;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!layer) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: layer is NULL", function);
    l = *layer;
    mti_layer_whole_tokens(&l);
    checked = mti_cached_tokens(&layer->attention, batch, x, &l.attention, &padded);
    MT_TRY(mti_layer_check(ctx, function, &l, checked, "x", x, "y", y));
    MT_TRY(mt_check_apart(ctx, function, "x", x, "y", y));
    MT_TRY(mti_cache_check(ctx, function, &l.attention, batch, cache));
    mark = mt_arena_mark(ctx);
    before = mt_rows_are_sequences(ctx, !l.attention.cp);
    status = MT_RANGE("layer forward", mti_layer_forward(ctx, &l, batch, cache, x, y, NULL));
    mt_rows_are_sequences(ctx, before);
    mt_arena_release(ctx, mark);
    return status;
}

/* Runs forward again, and so computes all tensors of *saved from saved->x and saved->batch. The hash log is paused,
   because it has these tensors from the first forward. */
static mt_status mti_layer_again(mt_context *ctx, const mt_transformer_layer *layer,
                                 mt_transformer_layer_saved *saved) {
    mt_tensor x = saved->x, y = mt_none();
    mt_status status;
    if (layer->desc.norm.placement == MT_POST_LN) MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, x.cols, &y));
    mt_hash_log_pause(ctx, 1);
    mt_trace_recompute(ctx, 1);
    status = mti_layer_forward(ctx, layer, &saved->batch, NULL, x, y, saved);
    mt_trace_recompute(ctx, 0);
    mt_hash_log_pause(ctx, 0);
    return status;
}

static mt_status mti_layer_backward(mt_context *ctx, const mt_transformer_layer *layer, mt_tensor dy, mt_tensor dx,
                                    const mt_transformer_layer_saved *saved) {
    mt_transformer_layer_saved again = *saved;
    mti_layer_call calls[2];
    int count = saved->count, i;
    mt_tensor dmiddle;
    if (layer->desc.recompute == MT_RECOMPUTE_FULL)
        MT_TRY(MT_RANGE("layer forward again", mti_layer_again(ctx, layer, &again)));
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, dy.rows, dy.cols, &dmiddle));
    for (i = 0; i < count; i++) mti_layer_call_of(layer, &saved->batch, i, count, dy, dmiddle, dx, &again, &calls[i]);
    calls[0].mark = count > 1 ? 0 : mt_arena_mark(ctx);
    return mti_layer_calls_end(ctx, &saved->batch, count,
                               mti_layer_calls_run(ctx, calls, count, mti_layer_call_backward));
}

MT_API mt_status mt_transformer_layer_backward(mt_context *ctx, const mt_transformer_layer *layer, mt_tensor dy,
                                               mt_tensor dx, const mt_transformer_layer_saved *saved) {
    static const char *const function = "mt_transformer_layer_backward";
    const mt_param *weight;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_layer_check(ctx, function, layer, &saved->batch, "dy", dy, "dx", dx));
    MT_TRY(mt_check_apart(ctx, function, "dy", dy, "dx", dx));
    weight = layer->attention.proj.weight;
    MT_TRY(mt_check_activation(ctx, function, weight, "saved.x", saved->x, dy.rows, dy.cols));
    MT_TRY(mt_check_apart(ctx, function, "saved.x", saved->x, "dx", dx));
    if (saved->count != mti_layer_calls(ctx, layer, &saved->batch, NULL))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: mt_parallel_options.interleave has changed since forward", function);
    MT_TRY(mt_check_linear_gradients(ctx, function, &layer->attention.proj));
    mark = mt_arena_mark(ctx);
    status = MT_RANGE("layer backward", mti_layer_backward(ctx, layer, dy, dx, saved));
    mt_arena_release(ctx, mark);
    return status;
}
