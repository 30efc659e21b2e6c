/* ---- GPT --------------------------------------------------------------------------------------------------------- */

#pragma once
#include "gpt.h"
#include "model.c"
#include "../comm/context.c"

static mt_language_model_desc mti_gpt_model(const mt_gpt_desc *d) {
    mt_language_model_desc m;
    memset(&m, 0, sizeof m);
    m.vocab = d->vocab;
    m.layers = d->layers;
    m.max_seq = d->max_seq;
    m.layer = d->layer;
    m.tied_head = !d->untied_head;
    m.recompute_layers = d->recompute_layers;
    m.embedding_dropout = d->embedding_dropout;
    m.padded_vocab = d->padded_vocab;
    return m;
}

MT_API mt_status mt_gpt_create(mt_context *ctx, mt_params *params, const mt_gpt_desc *desc, mt_gpt *out) {
    static const char *const function = "mt_gpt_create";
    mt_language_model_desc m;
    size_t mark;
    mt_status status;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    m = mti_gpt_model(desc);
    MT_TRY(mti_model_check(ctx, function, mt_params_grid(params), &m));
    MT_TRY(mt_check_float(ctx, function, NULL, "label_smoothing", desc->label_smoothing, MT_FLOAT_PROBABILITY));
    mark = mt_params_mark(params);
    memset(out, 0, sizeof *out);
    status = mti_model_create(ctx, params, &m, &out->model);
    if (status == MT_SUCCESS && mti_model_is_last(&out->model))
        status = mti_output_create(ctx, params, &out->model, 1, desc->layer.sequence_parallel, &out->head);
    out->desc = *desc;
    out->desc.layer = out->model.desc.layer;
    out->loss.vocab = desc->vocab;
    out->loss.padded_vocab = desc->padded_vocab;
    out->loss.label_smoothing = desc->label_smoothing;
    out->loss.ignore_index = desc->ignore_index;
    return mt_create_end(params, mark, out, sizeof *out, status);
}

MT_API mt_status mt_gpt_saved_create(mt_context *ctx, const mt_gpt *gpt, mt_gpt_saved *out) {
    if (out) memset(out, 0, sizeof *out);
    return mti_model_saved_create(ctx, "mt_gpt_saved_create", gpt ? &gpt->model : NULL, out ? &out->model : NULL);
}

MT_API void mt_gpt_saved_destroy(mt_gpt_saved *saved) {
    if (!saved) return;
    mt_language_model_saved_destroy(&saved->model);
    memset(saved, 0, sizeof *saved);
}

static mti_output mti_gpt_output(const mt_gpt *gpt, const mt_batch *batch, mt_gpt_saved *saved) {
    return mti_output_of(&gpt->head, &gpt->loss, saved ? &saved->head : NULL, saved ? &saved->loss : NULL, batch,
                         batch->backward_scale);
}

/* Runs this stage and, on the last stage, the head and the loss. */
static mt_status mti_gpt_forward(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                 const int32_t *targets, mt_tensor input, mt_tensor output, mt_tensor loss,
                                 mt_gpt_saved *saved) {
    mti_output out = mti_gpt_output(gpt, batch, saved);
    mt_tensor x;
    MT_TRY(mti_model_forward(ctx, &gpt->model, batch, ids, NULL, input, output, saved ? &saved->model : NULL, &x));
    if (!mti_model_is_last(&gpt->model)) return MT_SUCCESS;
    MT_TRY(mti_output_forward(ctx, &out, x, targets, loss));
    return saved ? mt_hash_log_activation(ctx, "loss", 0, "output", mti_as_column(loss), 0, NULL) : MT_SUCCESS;
}

static mt_status mti_gpt_run_forward(mt_context *ctx, const char *function, const mt_gpt *gpt, const mt_batch *batch,
                                     const int32_t *ids, const int32_t *targets, mt_tensor input, mt_tensor output,
                                     mt_tensor loss, mt_gpt_saved *saved) {
    const mt_language_model *m = gpt ? &gpt->model : NULL;
    mt_language_model_saved *kept = saved ? &saved->model : NULL;
    int64_t tokens;
    size_t mark;
    mt_status status;
    MT_TRY(mti_model_forward_check(ctx, function, m, batch, ids, input, output, m && m->grid && mti_model_is_last(m),
                                   kept));
    MT_TRY(mti_model_saved_check(ctx, function, "mt_gpt_saved_create", kept));
    tokens = mti_batch_tokens(m->cp, batch);
    if (mti_model_is_last(m)) MT_TRY(mt_tensor_check(ctx, function, "loss", loss, MT_ARG_F32, 1, tokens));
    MT_TRY(mt_ids_check(ctx, "target", targets, tokens, gpt->desc.vocab, mt_ignore_index(gpt->loss.ignore_index)));
    MT_TRY(mti_model_begin_forward(ctx, kept, &mark));
    status = mti_gpt_forward(ctx, gpt, batch, ids, targets, input, output, loss, saved);
    return mti_model_end_forward(ctx, mark, status, batch, ids, kept);
}

MT_API mt_status mt_gpt_stage_forward(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                      const int32_t *targets, mt_tensor input, mt_tensor output, mt_tensor loss,
                                      mt_gpt_saved *saved) {
    return mti_gpt_run_forward(ctx, "mt_gpt_stage_forward", gpt, batch, ids, targets, input, output, loss, saved);
}

MT_API mt_status mt_gpt_forward(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                const int32_t *targets, mt_tensor loss, mt_gpt_saved *saved) {
    return mti_gpt_run_forward(ctx, "mt_gpt_forward", gpt, batch, ids, targets, mt_none(), mt_none(), loss, saved);
}

/* Runs the backward of the head, on the last stage, and of this stage. */
static mt_status mti_gpt_backward(mt_context *ctx, const mt_gpt *gpt, float scale, mt_tensor doutput, mt_tensor dinput,
                                  mt_gpt_saved *saved) {
    mti_output out = mti_gpt_output(gpt, &saved->model.batch, saved);
    int last = mti_model_is_last(&gpt->model);
    mt_tensor dy = doutput;
    mti_model_log_batch(ctx, &gpt->model, &saved->model.batch);
    if (last) {
        MT_TRY(mti_model_room(ctx, &gpt->model, mt_none(), saved->head.x.rows, &dy));
        MT_TRY(mti_output_backward(ctx, &out, scale, dy));
        if (gpt->desc.untied_head) MT_TRY(mt_gradients_final(ctx, gpt->head.weight, gpt->head.weight));
    }
    return mti_model_backward(ctx, &gpt->model, dy, last, dinput, &saved->model);
}

/* Checks, before a backward, that saved holds a forward, and that its gradient of the loss has this scale. */
static mt_status mti_saved_check(mt_context *ctx, const char *function, const char *name, float scale,
                                 const mt_language_model_saved *saved) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved || !saved->ids) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved holds no forward", function);
    if (saved->batch.backward_scale != 0.0f && scale != saved->batch.backward_scale)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is %.9g, must be %.9g, the backward_scale of the batch", function,
                       name, (double)scale, (double)saved->batch.backward_scale);
    return MT_SUCCESS;
}

static mt_status mti_gpt_run_backward(mt_context *ctx, const char *function, const mt_gpt *gpt, float scale,
                                      mt_tensor doutput, mt_tensor dinput, mt_gpt_saved *saved) {
    const mt_language_model *m = gpt ? &gpt->model : NULL;
    size_t mark;
    mt_status status;
    MT_TRY(mti_saved_check(ctx, function, "scale", scale, saved ? &saved->model : NULL));
    MT_TRY(mti_model_backward_check(ctx, function, m, doutput, m && m->grid && mti_model_is_last(m), dinput,
                                    &saved->model));
    MT_TRY(mt_check_micro_batch(ctx, function, m->layers[0].attention.proj.weight, saved->model.batch.first_sequence));
    mark = mt_arena_mark(ctx);
    MT_TRY(mt_layers_trust_ids(ctx, 1));
    status = mti_gpt_backward(ctx, gpt, scale, doutput, dinput, saved);
    mt_layers_trust_ids(ctx, 0);
    mt_arena_release(ctx, mark);
    saved->model.ids = NULL;
    return status;
}

MT_API mt_status mt_gpt_stage_backward(mt_context *ctx, const mt_gpt *gpt, float scale, mt_tensor doutput,
                                       mt_tensor dinput, mt_gpt_saved *saved) {
    return mti_gpt_run_backward(ctx, "mt_gpt_stage_backward", gpt, scale, doutput, dinput, saved);
}

MT_API mt_status mt_gpt_backward(mt_context *ctx, const mt_gpt *gpt, float scale, mt_gpt_saved *saved) {
    return mti_gpt_run_backward(ctx, "mt_gpt_backward", gpt, scale, mt_none(), mt_none(), saved);
}

/* *position becomes that of a sequence's last valid token, or 0 when its length is 0. */
static mt_status mti_last_position(mt_context *ctx, const mt_batch *batch, int64_t sequence, int64_t *position) {
    int32_t length = (int32_t)batch->seq;
    if (batch->lengths) MT_TRY(mt_download(ctx, mt_tensor_make(batch->lengths + sequence, MT_I32, 1, 1), &length));
    *position = mt_max(0, mt_min(length, batch->seq) - 1);
    return MT_SUCCESS;
}

/* *out becomes the rows of all tokens of the batch, of which context ranks have parts in x. */
static mt_status mti_gpt_gather_rows(mt_context *ctx, const mt_language_model *m, const mt_batch *batch, mt_tensor x,
                                     mt_tensor *out) {
    mti_seq_chunks c = mti_seq_chunks_of(m->cp, &m->layers[0].attention.context, batch->seq);
    const int64_t rows = batch->sequences * c.chunk;
    mt_tensor all, from, to;
    int64_t first, n;
    int i;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows * c.size, x.cols, &all));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, batch->sequences * batch->seq, x.cols, out));
    MT_TRY(mt_all_gather(ctx, m->cp, x.data, all.data, (size_t)(x.rows * x.cols), x.dtype));
    to = mt_tensor_reshape(*out, batch->sequences, batch->seq * x.cols); /* sequences are rows of these views */
    for (c.rank = 0; c.rank < c.size; c.rank++)
        for (i = 0; i < c.count; i++) {
            first = mt_min(mti_chunk_token(&c, i), batch->seq);
            n = mt_min(c.chunk, batch->seq - first);
            from = mt_tensor_rows(all, c.rank * x.rows + i * rows, rows);
            from = mt_tensor_reshape(from, batch->sequences, c.chunk * x.cols);
            if (n > 0)
                MT_TRY(
                    mt_copy(ctx, mt_tensor_cols(from, 0, n * x.cols), mt_tensor_cols(to, first * x.cols, n * x.cols)));
        }
    return MT_SUCCESS;
}

/* *out becomes x when n is x.rows, and otherwise the rows of the n sequences' last valid tokens, or those of all
   tokens, on every context rank. */
static mt_status mti_gpt_pick_rows(mt_context *ctx, const mt_language_model *m, const mt_batch *batch, mt_tensor x,
                                   int64_t n, mt_tensor *out) {
    int64_t i, position, row;
    *out = x;
    if (n == x.rows && (!m->cp || n != batch->sequences)) return MT_SUCCESS;
    if (n != batch->sequences) {
        mt_check_pause(ctx);
        MT_TRY(mt_check_resume(ctx, mti_gpt_gather_rows(ctx, m, batch, x, out)));
        MT_TRY(mt_declare(ctx, m->grid->cp, *out, MT_REPLICATED));
        return mt_declare(ctx, m->grid->tp, *out, MT_REPLICATED);
    }
    MT_TRY(mt_arena_tensor(ctx, x.dtype, n, x.cols, out));
    if (m->cp) MT_TRY(mt_fill(ctx, *out, 0.0f));
    for (i = 0; i < n; i++) {
        MT_TRY(mti_last_position(ctx, batch, i, &position));
        row = mti_model_row(m, batch, i, position);
        if (row >= 0) MT_TRY(mt_copy(ctx, mt_tensor_rows(x, row, 1), mt_tensor_rows(*out, i, 1)));
    }
    return mti_model_sum_context(ctx, m, *out);
}

/* Computes the logits from x, the output of the model m on the last stage. */
static mt_status mti_gpt_head_logits(mt_context *ctx, const mt_gpt *gpt, const mt_language_model *m,
                                     const mt_batch *batch, mt_tensor x, mt_tensor logits) {
    int before, divided;
    mt_status status;
    MT_TRY(mt_gather_tokens(ctx, gpt->head.tp, m->desc.layer.sequence_parallel, x, &x));
    divided = m->cp && logits.rows == x.rows;
    MT_TRY(mti_gpt_pick_rows(ctx, m, batch, x, logits.rows, &x));
    before = mt_rows_are_sequences(ctx, !divided);
    status = mt_column_parallel_linear_product(ctx, &gpt->head, x, 1, logits);
    mt_rows_are_sequences(ctx, before);
    return status;
}

/* The last stage computes the logits and broadcasts them to the others. m is the model, or with a cache that of
   mti_gpt_cached_model. Without a cache, `cache` is NULL. logits may be mt_none(). */
static mt_status mti_gpt_logits(mt_context *ctx, const mt_gpt *gpt, const mt_language_model *m, const mt_batch *batch,
                                const int32_t *ids, const mt_gpt_cache *cache, mt_tensor logits) {
    mt_tensor x, room;
    MT_TRY(mti_model_infer(ctx, m, batch, ids, cache, &x));
    MT_TRY(mti_model_share_room(ctx, m, logits, &room));
    if (mti_model_is_last(m) && logits.data) MT_TRY(mti_gpt_head_logits(ctx, gpt, m, batch, x, room));
    return mti_model_share(ctx, m, room, logits);
}

MT_API mt_status mt_gpt_logits(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                               mt_tensor logits) {
    static const char *const function = "mt_gpt_logits";
    int64_t tokens;
    size_t mark;
    mt_status status;
    MT_TRY(mti_model_call_check(ctx, function, gpt ? &gpt->model : NULL, batch));
    tokens = mti_batch_tokens(gpt->model.cp, batch);
    MT_TRY(mt_tensor_check(ctx, function, "logits", logits, MT_ARG_FLOAT,
                           logits.rows == batch->sequences ? batch->sequences : tokens, gpt->desc.vocab));
    MT_TRY(mt_ids_check(ctx, "token id", ids, tokens, gpt->desc.vocab, 0));
    mark = mt_arena_mark(ctx);
    status = mti_gpt_logits(ctx, gpt, &gpt->model, batch, ids, NULL, logits);
    mt_arena_release(ctx, mark);
    return status;
}

/* The bytes of the keys, or of the values, of a layer. -1: too many. */
static int64_t mti_gpt_cache_layer_bytes(const mt_gpt *gpt, int64_t sequences, int64_t max_seq) {
    const mt_self_attention *a = &gpt->model.layers[0].attention;
    int64_t rows = mt_size_mul(mt_size_mul(sequences, mt_self_attention_cache_groups(a)), max_seq);
    int64_t bytes = mt_size_mul(mt_size_mul(rows, a->head_dim), (int64_t)mt_dtype_size(a->proj.weight->value.dtype));
    return bytes < 0 || bytes > INT64_MAX / 2 ? -1 : (int64_t)mt_align_up((size_t)bytes);
}

MT_API int64_t mt_gpt_cache_bytes(const mt_gpt *gpt, int64_t sequences, int64_t max_seq) {
    if (!gpt || !gpt->model.layers || sequences < 0 || max_seq < 0) return -1;
    if (max_seq == 0) max_seq = gpt->desc.max_seq;
    return mt_size_mul(mti_gpt_cache_layer_bytes(gpt, sequences, max_seq), 2 * gpt->model.local_layers);
}

/* Allocates the memory of a cache, and makes the views of its layers. */
static mt_status mti_gpt_cache_fill(mt_context *ctx, const mt_gpt *gpt, mt_gpt_cache *c) {
    const mt_self_attention *a = &gpt->model.layers[0].attention;
    mt_dtype dtype = a->proj.weight->value.dtype;
    int64_t rows = c->sequences * mt_self_attention_cache_groups(a) * c->max_seq, i;
    size_t part = c->bytes / (size_t)(2 * c->local_layers);
    void *memory;
    c->layers = (mt_kv_cache *)mt_host_alloc((size_t)c->local_layers * sizeof *c->layers);
    if (!c->layers) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for %lld layers", (long long)c->local_layers);
    MT_TRY(mt_context_alloc(ctx, (size_t)c->sequences * sizeof *c->lengths, &memory));
    c->lengths = (int32_t *)memory;
    MT_TRY(mt_context_alloc(ctx, c->bytes, &c->memory));
    for (i = 0; i < c->local_layers; i++) {
        const char *keys = (const char *)c->memory + 2 * (size_t)i * part;
        c->layers[i].keys = mt_tensor_make(keys, dtype, rows, a->head_dim);
        c->layers[i].values = mt_tensor_make(keys + part, dtype, rows, a->head_dim);
        c->layers[i].max_seq = c->max_seq;
        c->layers[i].lengths = c->lengths;
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_gpt_cache_create(mt_context *ctx, const mt_gpt *gpt, int64_t sequences, int64_t max_seq,
                                     mt_gpt_cache *out) {
    static const char *const function = "mt_gpt_cache_create";
    int64_t bytes;
    mt_status status;
    if (out) memset(out, 0, sizeof *out);
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!gpt || !gpt->model.layers || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function, out ? "the model was not created" : "out is NULL");
    MT_TRY(mt_check_param(ctx, function, gpt->model.layers[0].attention.proj.weight));
    MT_TRY(mt_check_integer(ctx, function, NULL, "sequences", sequences, 1, INT32_MAX));
    MT_TRY(mt_check_integer(ctx, function, NULL, "max_seq", max_seq, 0, mt_min(gpt->desc.max_seq, INT32_MAX)));
    if (gpt->desc.layer.scores.mask != MT_MASK_CAUSAL)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: the layers have a mask other than MT_MASK_CAUSAL", function);
    bytes = mt_gpt_cache_bytes(gpt, sequences, max_seq);
    if (bytes < 0 || (uint64_t)bytes > SIZE_MAX / 2)
        return mt_fail(ctx, MT_ERR_MEMORY, "%s: %lld sequences of %lld tokens need too many bytes", function,
                       (long long)sequences, (long long)(max_seq ? max_seq : gpt->desc.max_seq));
    out->sequences = sequences;
    out->max_seq = max_seq ? max_seq : gpt->desc.max_seq;
    out->local_layers = gpt->model.local_layers;
    out->bytes = (size_t)bytes;
    status = mti_gpt_cache_fill(ctx, gpt, out);
    if (status != MT_SUCCESS) mt_gpt_cache_destroy(ctx, out);
    return status;
}

MT_API void mt_gpt_cache_destroy(mt_context *ctx, mt_gpt_cache *cache) {
    if (!cache) return;
    mt_host_free(cache->layers);
    mt_context_free(ctx, cache->memory, cache->bytes);
    mt_context_free(ctx, cache->lengths, (size_t)cache->sequences * sizeof *cache->lengths);
    memset(cache, 0, sizeof *cache);
}

static mt_status mti_gpt_cache_created(mt_context *ctx, const char *function, const mt_gpt_cache *cache) {
    if (cache && cache->layers) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the cache was not created with mt_gpt_cache_create", function);
}

MT_API mt_status mt_gpt_cache_set_length(mt_context *ctx, const mt_gpt_cache *cache, int64_t sequence, int64_t length) {
    static const char *const function = "mt_gpt_cache_set_length";
    int32_t value = (int32_t)length;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_gpt_cache_created(ctx, function, cache));
    MT_TRY(mt_check_integer(ctx, function, NULL, "sequence", sequence, 0, cache->sequences - 1));
    MT_TRY(mt_check_integer(ctx, function, NULL, "length", length, 0, cache->max_seq));
    return mt_upload(ctx, &value, mt_tensor_make(cache->lengths + sequence, MT_I32, 1, 1));
}

/* Returns the context group when its ranks divide the tokens of a call with a cache, otherwise NULL. */
static mt_comm *mti_prefill_group(const mt_language_model *m, const mt_batch *batch) {
    const int64_t padded = mti_seq_chunks_of(m->cp, &m->layers[0].attention.context, batch->seq).seq;
    const int ranks = mt_comm_size(m->cp);
    return batch->seq >= (int64_t)MT_PREFILL_TOKENS * ranks && padded <= m->desc.max_seq && padded / ranks < batch->seq
               ? m->cp
               : NULL;
}

/* Checks what a call with a cache reads. *m becomes a copy of the model for it, in which each tensor rank has all
   tokens, or those of its context rank. The layers do the same to themselves. */
static mt_status mti_gpt_cached_model(mt_context *ctx, const char *function, const mt_gpt *gpt, const mt_batch *batch,
                                      const int32_t *ids, const mt_gpt_cache *cache, mt_language_model *m) {
    const mt_self_attention *a;
    if (!gpt) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: gpt is NULL", function);
    *m = gpt->model;
    m->desc.layer.sequence_parallel = m->tokens.desc.sequence_parallel = 0;
    m->cp = NULL;
    MT_TRY(mti_model_call_check(ctx, function, m, batch));
    MT_TRY(mti_gpt_cache_created(ctx, function, cache));
    a = &m->layers[0].attention;
    if (batch->sequences != cache->sequences || m->local_layers != cache->local_layers)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: the batch has %lld sequences and this stage %lld layers, the cache has %lld and %lld",
                       function, (long long)batch->sequences, (long long)m->local_layers, (long long)cache->sequences,
                       (long long)cache->local_layers);
    MT_TRY(mti_cache_check(ctx, function, a, batch, &cache->layers[0]));
    m->cp = mti_prefill_group(&gpt->model, batch);
    return mt_ids_check(ctx, "token id", ids, batch->sequences * batch->seq, m->desc.vocab, 0);
}

/* Adds the new tokens of each sequence to `lengths`, which are those of the cache or a copy of them. A call that has
   succeeded on this rank ends with this: the cache has the tokens. */
static mt_status mti_gpt_cache_advance(mt_context *ctx, const mt_batch *batch, const mt_gpt_cache *cache,
                                       int32_t *lengths) {
    return mt_kv_cache_advance(ctx, cache->max_seq, batch->sequences, batch->seq, batch->lengths, lengths);
}

MT_API mt_status mt_gpt_cached_logits(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                                      const mt_gpt_cache *cache, mt_tensor logits) {
    static const char *const function = "mt_gpt_cached_logits";
    mt_language_model m;
    size_t mark;
    int before;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_gpt_cached_model(ctx, function, gpt, batch, ids, cache, &m));
    if (logits.data)
        MT_TRY(mt_tensor_check(ctx, function, "logits", logits, MT_ARG_FLOAT,
                               logits.rows == batch->sequences ? logits.rows : batch->sequences * batch->seq,
                               gpt->desc.vocab));
    mark = mt_arena_mark(ctx);
    before = mt_rows_are_sequences(ctx, !m.cp);
    status = mti_gpt_logits(ctx, gpt, &m, batch, ids, cache, logits);
    mt_rows_are_sequences(ctx, before);
    if (status == MT_SUCCESS) status = mti_gpt_cache_advance(ctx, batch, cache, cache->lengths);
    mt_arena_release(ctx, mark);
    return status;
}

/* Draws from the logits in f32 of x, the outputs of the model on the last stage. */
static mt_status mti_gpt_draw(mt_context *ctx, const mt_gpt *gpt, const mt_sample_desc *desc, mt_tensor x,
                              int32_t *ids) {
    const int before = mt_rows_are_sequences(ctx, 1);
    mt_tensor logits;
    mt_status status = mt_arena_tensor(ctx, MT_F32, x.rows, gpt->head.local_features, &logits);
    if (status == MT_SUCCESS) status = mt_column_parallel_linear_product(ctx, &gpt->head, x, 0, logits);
    mt_rows_are_sequences(ctx, before);
    MT_TRY(status);
    return mt_vocab_parallel_sample(ctx, gpt->head.tp, gpt->desc.vocab, gpt->desc.padded_vocab, desc, logits, ids);
}

/* *out becomes the number of tokens that each sequence has in the cache after the call. */
static mt_status mti_gpt_next_positions(mt_context *ctx, const mt_batch *batch, const mt_gpt_cache *cache,
                                        const int32_t **out) {
    mt_tensor held = mt_tensor_make(cache->lengths, MT_I32, 1, cache->sequences), next;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, cache->sequences, &next));
    MT_TRY(mt_copy(ctx, held, next));
    *out = (const int32_t *)next.data;
    return mti_gpt_cache_advance(ctx, batch, cache, (int32_t *)next.data);
}

/* When a logit is NaN, the last stage still shares the ids: that of the row is -1, from which the others have the same
   error. */
static mt_status mti_gpt_sample(mt_context *ctx, const mt_gpt *gpt, const mt_language_model *m, const mt_batch *batch,
                                const int32_t *ids, const mt_gpt_cache *cache, const mt_sample_desc *desc,
                                mt_tensor next) {
    mt_sample_desc s = *desc;
    mt_status status = MT_SUCCESS;
    mt_tensor x, room;
    if (!s.positions) MT_TRY(mti_gpt_next_positions(ctx, batch, cache, &s.positions));
    MT_TRY(mti_model_infer(ctx, m, batch, ids, cache, &x));
    if (mti_model_is_last(m)) MT_TRY(mti_gpt_pick_rows(ctx, m, batch, x, batch->sequences, &x));
    MT_TRY(mti_model_share_room(ctx, m, next, &room));
    if (mti_model_is_last(m)) status = mti_gpt_draw(ctx, gpt, &s, x, (int32_t *)room.data);
    if (status != MT_SUCCESS && status != MT_ERR_DATA) return status;
    MT_TRY(mti_model_share(ctx, m, room, next));
    if (!mti_model_is_last(m))
        status = mt_ids_check(ctx, "sampled id", (const int32_t *)next.data, next.cols, gpt->desc.vocab, 0);
    return status == MT_SUCCESS ? mti_gpt_cache_advance(ctx, batch, cache, cache->lengths) : status;
}

MT_API mt_status mt_gpt_sample(mt_context *ctx, const mt_gpt *gpt, const mt_batch *batch, const int32_t *ids,
                               const mt_gpt_cache *cache, const mt_sample_desc *desc, int32_t *next_ids) {
    static const char *const function = "mt_gpt_sample";
    mt_language_model m;
    mt_tensor next;
    size_t mark;
    int before;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mt_sample_check(ctx, function, desc));
    MT_TRY(mti_gpt_cached_model(ctx, function, gpt, batch, ids, cache, &m));
    next = mt_tensor_make(next_ids, MT_I32, 1, batch->sequences);
    MT_TRY(mt_tensor_check(ctx, function, "next_ids", next, MT_ARG_ANY, 1, batch->sequences));
    mark = mt_arena_mark(ctx);
    before = mt_rows_are_sequences(ctx, !m.cp);
    status = mti_gpt_sample(ctx, gpt, &m, batch, ids, cache, desc, next);
    mt_rows_are_sequences(ctx, before);
    mt_arena_release(ctx, mark);
    return status;
}
