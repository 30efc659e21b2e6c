/* ---- language model: embedding and layers ------------------------------------------------------------------------ */

#pragma once
#include "model.h"
#include "gpt.h"
#include "../comm/conjugates.h"
#include "../ops/embedding.h"
#include "../blocks/layer.c"

#define MTI_LAYERS_MAX (1 << 17)

static mt_status mti_model_sizes_check(mt_context *ctx, const char *function, const mt_language_model_desc *d) {
    MT_TRY(mt_check_integer(ctx, function, NULL, "vocab", d->vocab, 1, INT32_MAX));
    MT_TRY(mt_check_integer(ctx, function, NULL, "layers", d->layers, 1, MTI_LAYERS_MAX));
    MT_TRY(mt_check_integer(ctx, function, NULL, "max_seq", d->max_seq, 1, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, NULL, "token_types", d->token_types, 0, INT32_MAX));
    MT_TRY(mt_check_integer(ctx, function, NULL, "recompute_layers", d->recompute_layers, 0, d->layers));
    MT_TRY(mt_check_float(ctx, function, NULL, "embedding_dropout", d->embedding_dropout, MT_FLOAT_PROBABILITY));
    if (!d->padded_vocab) return MT_SUCCESS;
    return mt_check_integer(ctx, function, NULL, "padded_vocab", d->padded_vocab, d->vocab, INT32_MAX);
}

static mt_status mti_model_check(mt_context *ctx, const char *function, const mt_grid *grid,
                                 const mt_language_model_desc *d) {
    MT_TRY(mti_model_sizes_check(ctx, function, d));
    if (d->layer.max_seq && d->layer.max_seq != d->max_seq)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: layer.max_seq is %lld, must be 0 or max_seq %lld", function,
                       (long long)d->layer.max_seq, (long long)d->max_seq);
    if (d->layer.dropout.layer_number)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: layer.dropout.layer_number is %lld, must be 0: the model numbers its layers", function,
                       (long long)d->layer.dropout.layer_number);
    if (d->recompute_layers && d->layer.recompute == MT_RECOMPUTE_NONE)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: recompute_layers is %lld, must be 0 with MT_RECOMPUTE_NONE", function,
                       (long long)d->recompute_layers);
    if (d->layers % grid->pp_size != 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %lld layers cannot be divided over %d pipeline stages", function,
                       (long long)d->layers, grid->pp_size);
    if (grid->pp_size > 1 && mt_context_arena_symmetric(ctx))
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: %d pipeline stages do not use their arenas alike, as "
                       "mt_context_desc.arena_symmetric promises",
                       function, grid->pp_size);
    return MT_SUCCESS;
}

/* See mti_log_batch. */
static void mti_model_log_batch(mt_context *ctx, const mt_language_model *m, const mt_batch *batch) {
    mti_log_batch(ctx, m->cp, &m->layers[0].attention.context, batch);
}

static int mti_model_is_first(const mt_language_model *m) { return m->grid->pp_rank == 0; }
static int mti_model_is_last(const mt_language_model *m) { return m->grid->pp_rank + 1 == m->grid->pp_size; }

/* Adds a table that every tensor rank has whole: of positions, or of token types. */
static mt_status mti_model_table(mt_context *ctx, mt_params *params, const mt_language_model *m, const char *name,
                                 int64_t rows, mt_param **out) {
    const mt_transformer_layer_desc *l = &m->desc.layer;
    mt_param_desc p;
    memset(&p, 0, sizeof p);
    p.name = name;
    p.rows = rows;
    p.cols = l->hidden;
    p.init_std = mt_or_default(l->init.std, 0.02f);
    p.weight_decay = 1;
    p.sequence_partial = l->sequence_parallel;
    return mt_params_add(ctx, params, &p, out);
}

/* Creates the token embedding, which is on the first stage and, for a tied head, also on the last one, and what is
   added to it on the first stage. */
static mt_status mti_model_embedding(mt_context *ctx, mt_params *params, mt_language_model *m) {
    const mt_language_model_desc *d = &m->desc;
    mt_embedding_desc e;
    if (!mti_model_is_first(m) && (!mti_model_is_last(m) || !d->tied_head)) return MT_SUCCESS;
    memset(&e, 0, sizeof e);
    e.vocab = d->vocab;
    e.padded_vocab = d->padded_vocab;
    e.features = d->layer.hidden;
    e.init_std = d->layer.init.std;
    e.sequence_parallel = d->layer.sequence_parallel;
    e.shared = d->tied_head;
    MT_TRY(mt_vocab_parallel_embedding_create(ctx, params, "embedding.word_embeddings", &e, &m->tokens));
    if (!mti_model_is_first(m)) return MT_SUCCESS;
    if (d->layer.scores.rotary_base <= 0.0f && !d->layer.scores.alibi)
        MT_TRY(mti_model_table(ctx, params, m, "embedding.position_embeddings.weight", d->max_seq, &m->positions));
    if (d->token_types)
        MT_TRY(
            mti_model_table(ctx, params, m, "embedding.tokentype_embeddings.weight", d->token_types, &m->token_types));
    if (!d->embedding_norm) return MT_SUCCESS;
    return mti_layer_norm(ctx, params, "embedding", "layernorm", &d->layer, &m->embedding_norm);
}

/* Creates the layers of this stage. While it does, m->desc.layer is the desc of the current layer. */
static mt_status mti_model_layers(mt_context *ctx, mt_params *params, mt_language_model *m) {
    int64_t recomputed = m->desc.recompute_layers ? m->desc.recompute_layers : m->local_layers, i;
    mt_recompute recompute = m->desc.layer.recompute;
    char name[MT_NAME_MAX];
    void *memory;
    MT_TRY(mt_params_buffer(ctx, params, (size_t)m->local_layers * sizeof *m->layers, 1, &memory));
    m->layers = (mt_transformer_layer *)memory;
    for (i = 0; i < m->local_layers; i++) {
        m->desc.layer.dropout.layer_number = m->first_layer + i;
        m->desc.layer.recompute = i < recomputed ? recompute : MT_RECOMPUTE_NONE;
        snprintf(name, sizeof name, "%s.layers.%lld", m->desc.is_encoder ? "encoder" : "decoder",
                 (long long)(m->first_layer + i));
        MT_TRY(mt_transformer_layer_create(ctx, params, name, &m->desc.layer, &m->layers[i]));
    }
    m->desc.layer.recompute = recompute;
    m->desc.layer.dropout.layer_number = 0;
    return MT_SUCCESS;
}

/* Creates the parts of a model whose desc mti_model_check has accepted. */
static mt_status mti_model_create(mt_context *ctx, mt_params *params, const mt_language_model_desc *desc,
                                  mt_language_model *m) {
    mt_transformer_layer_desc *l = &m->desc.layer;
    mt_context_parallel_desc context;
    m->desc = *desc;
    m->grid = mt_params_grid(params);
    context = mt_parallel_get_options(ctx).context;
    m->cp = mti_context_group(params, &context);
    m->local_layers = desc->layers / m->grid->pp_size;
    m->first_layer = m->grid->pp_rank * m->local_layers;
    l->max_seq = l->scores.rotary_base > 0.0f ? desc->max_seq : 0;
    if (l->init.output_std == 0.0f)
        l->init.output_std = mt_or_default(l->init.std, 0.02f) / sqrtf(2.0f * (float)desc->layers);
    if (l->init.std == (float)MT_ZERO && l->init.output_std == 0.0f) l->init.output_std = (float)MT_ZERO;
    MT_TRY(mti_model_embedding(ctx, params, m));
    MT_TRY(mti_model_layers(ctx, params, m));
    if (!mti_model_is_last(m) || l->norm.placement == MT_POST_LN) return MT_SUCCESS;
    return mti_layer_norm(ctx, params, desc->is_encoder ? "encoder" : "decoder", "final_layernorm", l, &m->final_norm);
}

MT_API mt_status mt_language_model_create(mt_context *ctx, mt_params *params, const mt_language_model_desc *desc,
                                          mt_language_model *out) {
    static const char *const function = "mt_language_model_create";
    size_t mark;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    MT_TRY(mti_model_check(ctx, function, mt_params_grid(params), desc));
    mark = mt_params_mark(params);
    memset(out, 0, sizeof *out);
    return mt_create_end(params, mark, out, sizeof *out, mti_model_create(ctx, params, desc, out));
}

static mt_status mti_model_saved_create(mt_context *ctx, const char *function, const mt_language_model *model,
                                        mt_language_model_saved *out) {
    void *memory;
    if (out) memset(out, 0, sizeof *out);
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!model || !model->layers || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function, out ? "the model was not created" : "out is NULL");
    memory = mt_host_alloc((size_t)model->local_layers * sizeof *out->layers);
    if (!memory) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for %lld layers", (long long)model->local_layers);
    out->layers = (mt_transformer_layer_saved *)memory;
    return MT_SUCCESS;
}

MT_API mt_status mt_language_model_saved_create(mt_context *ctx, const mt_language_model *model,
                                                mt_language_model_saved *out) {
    return mti_model_saved_create(ctx, "mt_language_model_saved_create", model, out);
}

MT_API void mt_language_model_saved_destroy(mt_language_model_saved *saved) {
    if (!saved) return;
    mt_host_free(saved->layers);
    memset(saved, 0, sizeof *saved);
}

static mti_row_dropout mti_model_dropout(const mt_language_model *m, const mt_batch *batch, int64_t rows,
                                         int training) {
    return mti_row_dropout_of(&m->layers[0].attention, batch, training ? m->desc.embedding_dropout : 0.0f,
                              m->desc.layers, 3, m->desc.layer.sequence_parallel, rows);
}

/* Returns the row of a token among those of this context rank, or -1 when another rank has it. */
static int64_t mti_model_row(const mt_language_model *m, const mt_batch *batch, int64_t sequence, int64_t position) {
    const mti_seq_chunks c = mti_seq_chunks_of(m->cp, &m->layers[0].attention.context, batch->seq);
    int chunk;
    if (!m->cp) return sequence * batch->seq + position;
    for (chunk = 0; chunk < c.count; chunk++) {
        const int64_t i = position - mti_chunk_token(&c, chunk);
        if (i >= 0 && i < c.chunk) return (chunk * batch->sequences + sequence) * c.chunk + i;
    }
    return -1;
}

/* Adds up rows of which one context rank has a number, and the others zero. */
static mt_status mti_model_sum_context(mt_context *ctx, const mt_language_model *m, mt_tensor rows) {
    if (!m->cp) return MT_SUCCESS;
    MT_TRY(mt_declare(ctx, m->cp, rows, MT_PARTIAL));
    return mt_reduce_from_tensor_region_forward(ctx, m->cp, rows);
}

/* Writes the position of each of this rank's rows. */
static mt_status mti_model_positions(mt_context *ctx, const mt_language_model *m, const mt_batch *batch, int64_t rows,
                                     int32_t *ids) {
    const mti_token_rows t = mti_token_rows_of(&m->layers[0].attention, batch, m->desc.layer.sequence_parallel, rows);
    int64_t row, count, token;
    for (row = 0; row < rows; row += count) {
        count = mti_token_run(&t, row, rows, &token);
        MT_TRY(mt_position_ids(ctx, token, batch->seq, batch->cu_seqlens, batch->documents, ids + row, count));
    }
    return MT_SUCCESS;
}

/* *out becomes an array with the row of the table for each of this rank's rows: the position of the token in its
   sequence, or its type. The array is in the arena, or a part of batch->token_types. */
static mt_status mti_model_table_ids(mt_context *ctx, const mt_language_model *m, const mt_batch *batch,
                                     const mt_param *table, int64_t rows, const int32_t **out) {
    int64_t first = m->desc.layer.sequence_parallel ? m->grid->tp_rank * rows : 0;
    int types = table == m->token_types;
    mt_tensor ids = mt_none();
    if (types && batch->token_types) {
        *out = batch->token_types + first;
        return MT_SUCCESS;
    }
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, rows, &ids));
    *out = (const int32_t *)ids.data;
    /* sequences of 1 token: all types are 0 */
    if (types) return mt_position_ids(ctx, 0, 1, NULL, 0, (int32_t *)ids.data, rows);
    return mti_model_positions(ctx, m, batch, rows, (int32_t *)ids.data);
}

/* Returns the context group when its ranks have the same tokens, as in inference with a cache; otherwise NULL. */
static mt_comm *mti_model_same_tokens(const mt_language_model *m) { return m->cp ? NULL : m->grid->cp; }

/* Tells check mode what the ids of calls are, until mti_ids_end, where it does not know: the same on the tensor ranks
   or, with is_split 1, those of this rank's rows, and others on the data and context ranks. */
static mt_status mti_ids_begin(mt_context *ctx, const mt_language_model *m, const int32_t *ids, int64_t rows,
                               int is_split) {
    const mt_grid *grid = m->grid;
    mt_tensor t = mt_tensor_make(ids, MT_I32, rows, 1);
    mt_placement tp = mt_placement_of(ctx, grid->tp, t), dp = mt_placement_of(ctx, grid->dp_cp, t);
    if (tp == MT_UNDECLARED || tp == MT_REPLICATED) tp = is_split ? MT_SPLIT_ROWS : MT_REPLICATED;
    MT_TRY(mt_check_view(ctx, grid->tp, t, tp));
    MT_TRY(mt_check_view(ctx, grid->dp_cp, t, dp));
    return mt_check_view(ctx, mti_model_same_tokens(m), t, MT_REPLICATED);
}

static mt_status mti_ids_end(mt_context *ctx, mt_status status) {
    return mt_check_view_end(ctx, mt_check_view_end(ctx, mt_check_view_end(ctx, status)));
}

/* Adds the rows of a table to x. Does nothing when the model does not have the table. */
static mt_status mti_model_add_table(mt_context *ctx, const mt_language_model *m, const mt_batch *batch,
                                     const mt_param *table, mt_tensor x) {
    size_t mark = mt_arena_mark(ctx);
    const int32_t *ids;
    if (!table) return MT_SUCCESS;
    MT_TRY(mti_model_table_ids(ctx, m, batch, table, x.rows, &ids));
    MT_TRY(mti_ids_begin(ctx, m, ids, x.rows, m->desc.layer.sequence_parallel));
    MT_TRY(mti_ids_end(ctx, mt_embedding_forward(ctx, table->value, 0, ids, 1.0f, x)));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

static mt_status mti_model_embed_tokens(mt_context *ctx, const mt_language_model *m, const int32_t *ids, int64_t tokens,
                                        mt_tensor x) {
    MT_TRY(mti_ids_begin(ctx, m, ids, tokens, 0));
    return mti_ids_end(ctx, mt_vocab_parallel_embedding_forward(ctx, &m->tokens, ids, tokens, x));
}

/* Computes the sum of the embeddings of tokens, positions and token types. */
static mt_status mti_model_embed_sum(mt_context *ctx, const mt_language_model *m, const mt_batch *batch,
                                     const int32_t *ids, mt_tensor x) {
    MT_TRY(mti_model_embed_tokens(ctx, m, ids, mti_batch_tokens(m->cp, batch), x));
    MT_TRY(mti_model_add_table(ctx, m, batch, m->positions, x));
    return mti_model_add_table(ctx, m, batch, m->token_types, x);
}

/* Computes x, the sum of the embeddings with norm and dropout. */
static mt_status mti_model_embed(mt_context *ctx, const mt_language_model *m, const mt_batch *batch, const int32_t *ids,
                                 mt_tensor x, mt_language_model_saved *saved) {
    const mti_row_dropout dropout = mti_model_dropout(m, batch, x.rows, saved != NULL);
    if (m->embedding_norm.weight) {
        size_t mark = mt_arena_mark(ctx);
        mt_tensor sum;
        MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, x.cols, &sum));
        MT_TRY(mti_model_embed_sum(ctx, m, batch, ids, sum));
        MT_TRY(mt_norm_layer_forward(ctx, &m->embedding_norm, sum, x, saved ? &saved->embedding_norm : NULL));
        if (!saved) mt_arena_release(ctx, mark);
    } else {
        MT_TRY(mti_model_embed_sum(ctx, m, batch, ids, x));
    }
    if (dropout.dropout.p > 0.0f) MT_TRY(mti_rows_drop(ctx, &dropout, x, mt_none(), mt_none()));
    return saved ? mt_hash_log_activation(ctx, "embedding", 0, "output", x, m->desc.layer.sequence_parallel, NULL)
                 : MT_SUCCESS;
}

/* *out becomes memory for the next activation or gradient [rows, hidden]: `spare`, a tensor that is no longer needed,
   or new memory in the arena when spare is mt_none(). */
static mt_status mti_model_room(mt_context *ctx, const mt_language_model *m, mt_tensor spare, int64_t rows,
                                mt_tensor *out) {
    *out = spare;
    if (spare.data) return MT_SUCCESS;
    return mt_arena_tensor(ctx, m->layers[0].attention.proj.weight->value.dtype, rows, m->desc.layer.hidden, out);
}

/* Returns the number of this rank's rows of a batch that mti_model_call_check has accepted. */
static int64_t mti_model_rows(const mt_language_model *m, const mt_batch *batch) {
    const mti_seq_chunks c = mti_seq_chunks_of(m->cp, &m->layers[0].attention.context, batch->seq);
    return batch->sequences * c.count * c.chunk / (m->desc.layer.sequence_parallel ? m->grid->tp_size : 1);
}

/* Copies the numbers of this context rank's tokens, of those of all tokens of the batch, to own. Tokens behind the end
   of a sequence get the numbers of its first ones. */
static mt_status mti_model_own_numbers(mt_context *ctx, const mt_language_model *m, const mt_batch *batch,
                                       const int32_t *all, mt_tensor own) {
    const mti_seq_chunks c = mti_seq_chunks_of(m->cp, &m->layers[0].attention.context, batch->seq);
    const mt_tensor from = mt_tensor_make(all, MT_I32, batch->sequences, batch->seq);
    const int64_t rows = batch->sequences * c.chunk;
    int i;
    for (i = 0; i < c.count; i++) {
        const mt_tensor to = mt_tensor_make((const int32_t *)own.data + i * rows, MT_I32, batch->sequences, c.chunk);
        const int64_t first = mt_min(mti_chunk_token(&c, i), batch->seq), n = mt_min(c.chunk, batch->seq - first);
        if (n > 0) MT_TRY(mt_copy(ctx, mt_tensor_cols(from, first, n), mt_tensor_cols(to, 0, n)));
        if (n < c.chunk) MT_TRY(mt_copy(ctx, mt_tensor_cols(from, 0, c.chunk - n), mt_tensor_cols(to, n, c.chunk - n)));
    }
    return MT_SUCCESS;
}

/* *ids becomes the numbers of the tokens that this rank computes in a call with a cache. Context ranks may have the
   same, where sequences have padding. */
static mt_status mti_model_cached_numbers(mt_context *ctx, const mt_language_model *m, const mt_batch *batch,
                                          const int32_t **ids) {
    mt_tensor own;
    if (!m->cp) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, mti_model_rows(m, batch), &own));
    mt_check_pause(ctx);
    MT_TRY(mt_check_resume(ctx, mti_model_own_numbers(ctx, m, batch, *ids, own)));
    *ids = (const int32_t *)own.data;
    return mt_declare_meant(ctx, own);
}

/* Computes x, the sum of the embeddings of tokens and of positions that follow those in the cache. */
static mt_status mti_model_embed_cached(mt_context *ctx, const mt_language_model *m, const mt_batch *batch,
                                        const int32_t *ids, const mt_gpt_cache *cache, mt_tensor x) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor all;
    const int32_t *positions;
    MT_TRY(mti_model_cached_numbers(ctx, m, batch, &ids));
    MT_TRY(mti_model_embed_tokens(ctx, m, ids, x.rows, x));
    if (m->positions) {
        MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, batch->sequences * batch->seq, &all));
        MT_TRY(mt_kv_cache_positions(ctx, &cache->layers[0], batch->sequences, batch->seq, (int32_t *)all.data));
        positions = (const int32_t *)all.data;
        MT_TRY(mti_model_cached_numbers(ctx, m, batch, &positions));
        MT_TRY(mti_ids_begin(ctx, m, positions, x.rows, 0));
        MT_TRY(mti_ids_end(ctx, mt_embedding_forward(ctx, m->positions->value, 0, positions, 1.0f, x)));
    }
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Returns what the activations of a model are over the tensor group. */
static mt_placement mti_model_placement(const mt_language_model *m) {
    return m->desc.layer.sequence_parallel ? MT_SPLIT_ROWS : MT_REPLICATED;
}

/* Tells check mode what an activation from the stage before is. */
static mt_status mti_model_received(mt_context *ctx, const mt_language_model *m, mt_tensor input) {
    MT_TRY(mt_declare_received(ctx, m->grid, input, mti_model_placement(m), MT_SPLIT_ROWS));
    return m->cp ? MT_SUCCESS : mt_declare(ctx, m->grid->cp, input, MT_REPLICATED);
}

/* Runs this stage: the embedding (on the first stage; the others begin with `input`), the layers and the final norm. *y
   [rows, hidden] is the result: `output` or, when output is mt_none(), a tensor in the arena. Inference alternates
   between two tensors for the activations; training keeps all of them. cache is for inference with a GPT, or NULL. */
static mt_status mti_model_forward(mt_context *ctx, const mt_language_model *m, const mt_batch *batch,
                                   const int32_t *ids, const mt_gpt_cache *cache, mt_tensor input, mt_tensor output,
                                   mt_language_model_saved *saved, mt_tensor *y) {
    int64_t rows = mti_model_rows(m, batch), i;
    mt_tensor x = input, next, spare = mt_none(), last = m->final_norm.weight ? mt_none() : output;
    mti_model_log_batch(ctx, m, batch);
    if (input.data) MT_TRY(mti_model_received(ctx, m, input));
    else {
        MT_TRY(mti_model_room(ctx, m, spare, rows, &x));
        MT_TRY(MT_RANGE("embedding forward", cache ? mti_model_embed_cached(ctx, m, batch, ids, cache, x)
                                                   : mti_model_embed(ctx, m, batch, ids, x, saved)));
    }
    for (i = 0; i < m->local_layers; i++) {
        MT_TRY(mti_model_room(ctx, m, i + 1 == m->local_layers && last.data ? last : spare, rows, &next));
        if (cache) MT_TRY(mt_transformer_layer_cached_forward(ctx, &m->layers[i], batch, &cache->layers[i], x, next));
        else MT_TRY(mt_transformer_layer_forward(ctx, &m->layers[i], batch, x, next, saved ? &saved->layers[i] : NULL));
        if (!saved && x.data != input.data) spare = x;
        x = next;
    }
    *y = x;
    if (!m->final_norm.weight) return MT_SUCCESS;
    MT_TRY(mti_model_room(ctx, m, output.data ? output : spare, rows, y));
    return mt_norm_layer_forward(ctx, &m->final_norm, x, *y, saved ? &saved->final_norm : NULL);
}

/* Checks the model and the batch. */
static mt_status mti_model_call_check(mt_context *ctx, const char *function, const mt_language_model *m,
                                      const mt_batch *batch) {
    int64_t rows;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!m || !m->layers) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the model was not created", function);
    MT_TRY(mt_check_param(ctx, function, m->layers[0].attention.proj.weight));
    if (m->positions) MT_TRY(mt_check_param(ctx, function, m->positions));
    if (m->token_types) MT_TRY(mt_check_param(ctx, function, m->token_types));
    MT_TRY(mti_batch_check(ctx, function, "batch", batch, m->desc.max_seq));
    MT_TRY(mti_batch_scores_check(ctx, function, &m->layers[0].attention, batch));
    if (batch->token_types && !m->desc.token_types)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the batch has token_types, and the model has none", function);
    MT_TRY(mti_parts_check(ctx, function, "batch", m->cp, &m->layers[0].attention.context, batch));
    return mt_sequence_rows(ctx, function, m->grid->tp, m->desc.layer.sequence_parallel, mti_batch_tokens(m->cp, batch),
                            &rows);
}

/* Checks the tensor t at the start (input, dinput) or at the end (output, doutput) of this stage. t must be mt_none()
   when `none` is 1, and otherwise [rows, hidden]. */
static mt_status mti_model_boundary(mt_context *ctx, const char *function, const mt_language_model *m,
                                    const mt_batch *batch, int none, const char *name, mt_tensor t) {
    if (none != !t.data)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: stage %d of %d %s %s; functions with \"stage\" in their names are for pipelines", function,
                       m->grid->pp_rank, m->grid->pp_size, none ? "takes no" : "needs", name);
    if (none) return MT_SUCCESS;
    return mt_check_activation(ctx, function, m->layers[0].attention.proj.weight, name, t, mti_model_rows(m, batch),
                               m->desc.layer.hidden);
}

/* Checks what the forward of a model reads. output_none says whether output must be mt_none(). */
static mt_status mti_model_forward_check(mt_context *ctx, const char *function, const mt_language_model *m,
                                         const mt_batch *batch, const int32_t *ids, mt_tensor input, mt_tensor output,
                                         int output_none, const mt_language_model_saved *saved) {
    int64_t tokens;
    MT_TRY(mti_model_call_check(ctx, function, m, batch));
    MT_TRY(mt_check_float(ctx, function, NULL, "backward_scale", batch->backward_scale, MT_FLOAT_FINITE));
    tokens = mti_batch_tokens(m->cp, batch);
    if (saved) MT_TRY(mt_check_tokens(ctx, function, tokens));
    MT_TRY(mti_model_boundary(ctx, function, m, batch, mti_model_is_first(m), "input", input));
    MT_TRY(mti_model_boundary(ctx, function, m, batch, output_none, "output", output));
    if (batch->token_types) MT_TRY(mt_ids_check(ctx, "token type", batch->token_types, tokens, m->desc.token_types, 0));
    return mt_ids_check(ctx, "token id", ids, tokens, m->desc.vocab, 0);
}

/* Checks that saved, which may be NULL, comes from the function `creator`. */
static mt_status mti_model_saved_check(mt_context *ctx, const char *function, const char *creator,
                                       const mt_language_model_saved *saved) {
    if (!saved || saved->layers) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved was not created with %s", function, creator);
}

/* Begins a forward whose arguments were checked, ids included. */
static mt_status mti_model_begin_forward(mt_context *ctx, mt_language_model_saved *saved, size_t *mark) {
    *mark = mt_arena_mark(ctx);
    if (saved) saved->ids = NULL;
    return mt_layers_trust_ids(ctx, 1);
}

/* Ends a forward. Releases the arena after an error and in inference; otherwise notes what backward needs. */
static mt_status mti_model_end_forward(mt_context *ctx, size_t mark, mt_status status, const mt_batch *batch,
                                       const int32_t *ids, mt_language_model_saved *saved) {
    mt_layers_trust_ids(ctx, 0);
    if (status != MT_SUCCESS || !saved) {
        mt_arena_release(ctx, mark);
        return status;
    }
    saved->batch = *batch;
    saved->ids = ids;
    return MT_SUCCESS;
}

MT_API mt_status mt_language_model_forward(mt_context *ctx, const mt_language_model *model, const mt_batch *batch,
                                           const int32_t *ids, mt_tensor input, mt_tensor output,
                                           mt_language_model_saved *saved) {
    static const char *const function = "mt_language_model_forward";
    mt_tensor y;
    size_t mark;
    mt_status status;
    MT_TRY(mti_model_forward_check(ctx, function, model, batch, ids, input, output, 0, saved));
    MT_TRY(mti_model_saved_check(ctx, function, "mt_language_model_saved_create", saved));
    MT_TRY(mt_check_sent(ctx, function, model->grid->tp, model->desc.layer.sequence_parallel, "input", input, "output",
                         output));
    MT_TRY(mt_check_apart(ctx, function, "input", input, "output", output));
    MT_TRY(mti_model_begin_forward(ctx, saved, &mark));
    status = mti_model_forward(ctx, model, batch, ids, NULL, input, output, saved, &y);
    return mti_model_end_forward(ctx, mark, status, batch, ids, saved);
}

/* The argument of mti_table_rows. */
typedef struct mti_table_call {
    mt_tensor dx;
    const int32_t *ids; /* of the rows of dx */
} mti_table_call;

/* An operator for mt_sum_over_tokens: adds the gradient of a table for some rows of dx. */
static mt_status mti_table_rows(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor dtable,
                                mt_tensor none) {
    const mti_table_call *c = (const mti_table_call *)arg;
    (void)none;
    return mt_embedding_backward(ctx, mt_tensor_rows(c->dx, first, count), 0, c->ids + first, dtable);
}

/* Adds to the gradient of the first `used` rows of a table; the others are not in the batch. Does nothing when the
   model does not have the table. */
static mt_status mti_model_table_backward(mt_context *ctx, const mt_language_model *m, const mt_batch *batch,
                                          const mt_param *table, int64_t used, mt_tensor dx) {
    mti_table_call call;
    if (!table) return MT_SUCCESS;
    MT_TRY(mti_model_table_ids(ctx, m, batch, table, dx.rows, &call.ids));
    call.dx = dx;
    MT_TRY(mti_ids_begin(ctx, m, call.ids, dx.rows, m->desc.layer.sequence_parallel));
    return mti_ids_end(ctx, mt_sum_over_tokens(ctx, m->grid->tp, m->desc.layer.sequence_parallel, mti_table_rows, &call,
                                               dx.rows, mt_tensor_rows(table->grad, 0, used), mt_none()));
}

/* dx is the gradient of the embedding's output. The call overwrites it. */
static mt_status mti_model_embed_backward(mt_context *ctx, const mt_language_model *m,
                                          const mt_language_model_saved *saved, mt_tensor dx) {
    const mt_batch *batch = &saved->batch;
    const int64_t tokens = mti_batch_tokens(m->cp, batch);
    const mti_row_dropout dropout = mti_model_dropout(m, batch, dx.rows, 1);
    if (dropout.dropout.p > 0.0f) MT_TRY(mti_rows_drop_backward(ctx, &dropout, dx, 0, dx.rows, dx, mt_none()));
    if (m->embedding_norm.weight)
        MT_TRY(mt_norm_layer_backward(ctx, &m->embedding_norm, dx, mt_none(), dx, &saved->embedding_norm));
    MT_TRY(mti_model_table_backward(ctx, m, batch, m->positions, batch->seq, dx));
    MT_TRY(mti_model_table_backward(ctx, m, batch, m->token_types, m->desc.token_types, dx));
    MT_TRY(mti_ids_begin(ctx, m, saved->ids, tokens, 0));
    return mti_ids_end(ctx, mt_vocab_parallel_embedding_backward(ctx, &m->tokens, saved->ids, tokens, dx));
}

/* Returns the last parameter of a layer that may have no bias. */
static const mt_param *mti_last_of(const mt_param *weight, const mt_param *bias) { return bias ? bias : weight; }

/* Computes *dy, the gradient of the last layer's output. The final norm may overwrite doutput when `scratch` is 1. */
static mt_status mti_model_norm_backward(mt_context *ctx, const mt_language_model *m, mt_tensor doutput, int scratch,
                                         const mt_language_model_saved *saved, mt_tensor *dy) {
    const mt_norm_layer *norm = &m->final_norm;
    *dy = doutput;
    if (!norm->weight) return MT_SUCCESS;
    if (!scratch) MT_TRY(mti_model_room(ctx, m, mt_none(), doutput.rows, dy));
    MT_TRY(mt_norm_layer_backward(ctx, norm, doutput, mt_none(), *dy, &saved->final_norm));
    return mt_gradients_final(ctx, norm->weight, mti_last_of(norm->weight, norm->bias));
}

/* Runs the backward of this stage. The gradients of a layer are final after its backward. Those of the embeddings are
   never declared final here: mt_sync_gradients sums them. When scratch is 1, doutput is overwritten. */
static mt_status mti_model_backward(mt_context *ctx, const mt_language_model *m, mt_tensor doutput, int scratch,
                                    mt_tensor dinput, const mt_language_model_saved *saved) {
    mt_tensor dy, next, spare = mt_none();
    int64_t i;
    mti_model_log_batch(ctx, m, &saved->batch);
    if (!mti_model_is_last(m))
        MT_TRY(mt_declare_received(ctx, m->grid, doutput, mti_model_placement(m), MT_SPLIT_ROWS));
    MT_TRY(mti_model_norm_backward(ctx, m, doutput, scratch, saved, &dy));
    for (i = m->local_layers; i-- > 0;) {
        const mt_transformer_layer *layer = &m->layers[i];
        MT_TRY(mti_model_room(ctx, m, i == 0 && dinput.data ? dinput : spare, dy.rows, &next));
        MT_TRY(mt_transformer_layer_backward(ctx, layer, dy, next, &saved->layers[i]));
        MT_TRY(
            mt_gradients_final(ctx, layer->input_norm.weight, mti_last_of(layer->mlp.fc2.weight, layer->mlp.fc2.bias)));
        if (scratch || dy.data != doutput.data) spare = dy;
        dy = next;
    }
    if (!mti_model_is_first(m)) return MT_SUCCESS;
    return MT_RANGE("embedding backward", mti_model_embed_backward(ctx, m, saved, dy));
}

/* Checks what the backward of a model reads. doutput_none says whether doutput must be mt_none(). */
static mt_status mti_model_backward_check(mt_context *ctx, const char *function, const mt_language_model *m,
                                          mt_tensor doutput, int doutput_none, mt_tensor dinput,
                                          const mt_language_model_saved *saved) {
    MT_TRY(mti_model_call_check(ctx, function, m, &saved->batch));
    MT_TRY(mti_model_boundary(ctx, function, m, &saved->batch, doutput_none, "doutput", doutput));
    MT_TRY(mti_model_boundary(ctx, function, m, &saved->batch, mti_model_is_first(m), "dinput", dinput));
    return mt_check_linear_gradients(ctx, function, &m->layers[0].attention.proj);
}

MT_API mt_status mt_language_model_backward(mt_context *ctx, const mt_language_model *model, mt_tensor doutput,
                                            mt_tensor dinput, mt_language_model_saved *saved) {
    static const char *const function = "mt_language_model_backward";
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved || !saved->ids) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved holds no forward", function);
    MT_TRY(mti_model_backward_check(ctx, function, model, doutput, 0, dinput, saved));
    MT_TRY(mt_check_sent(ctx, function, model->grid->tp, model->desc.layer.sequence_parallel, "doutput", doutput,
                         "dinput", dinput));
    MT_TRY(mt_check_apart(ctx, function, "doutput", doutput, "dinput", dinput));
    mark = mt_arena_mark(ctx);
    MT_TRY(mt_layers_trust_ids(ctx, 1));
    status = mti_model_backward(ctx, model, doutput, 0, dinput, saved);
    mt_layers_trust_ids(ctx, 0);
    mt_arena_release(ctx, mark);
    saved->ids = NULL;
    return status;
}

/* Runs the stages one after the other in inference. On the last stage *x becomes the output of the model. cache is
   for a GPT, or NULL. */
static mt_status mti_model_infer(mt_context *ctx, const mt_language_model *m, const mt_batch *batch, const int32_t *ids,
                                 const mt_gpt_cache *cache, mt_tensor *x) {
    int stage = m->grid->pp_rank;
    mt_tensor input = mt_none(), output = mt_none();
    size_t n = (size_t)(mti_model_rows(m, batch) * m->desc.layer.hidden);
    if (!mti_model_is_first(m)) {
        MT_TRY(mti_model_room(ctx, m, input, mti_model_rows(m, batch), &input));
        MT_TRY(mt_recv(ctx, m->grid->pp, input.data, n, input.dtype, stage - 1));
    }
    if (!mti_model_is_last(m)) MT_TRY(mti_model_room(ctx, m, output, mti_model_rows(m, batch), &output));
    MT_TRY(mti_model_forward(ctx, m, batch, ids, cache, input, output, NULL, x));
    return mti_model_is_last(m) ? MT_SUCCESS : mt_send(ctx, m->grid->pp, x->data, n, x->dtype, stage + 1);
}

/* *room becomes the tensor in which the last stage computes logits: `logits` or, with several stages, a contiguous
   tensor in the arena, which mti_model_share sends. */
static mt_status mti_model_share_room(mt_context *ctx, const mt_language_model *m, mt_tensor logits, mt_tensor *room) {
    *room = logits;
    if (m->grid->pp_size == 1 || !logits.data) return MT_SUCCESS;
    return mt_arena_tensor(ctx, logits.dtype, logits.rows, logits.cols, room);
}

/* Copies the room of the last stage to the logits of every stage. */
static mt_status mti_model_share(mt_context *ctx, const mt_language_model *m, mt_tensor room, mt_tensor logits) {
    size_t n = (size_t)(room.rows * room.cols);
    if (m->grid->pp_size == 1 || !logits.data) return MT_SUCCESS;
    MT_TRY(mt_broadcast(ctx, m->grid->pp, room.data, room.data, n, room.dtype, m->grid->pp_size - 1));
    return mt_copy(ctx, room, logits);
}

/* An output head with its loss, and what its forward keeps: those of GPT, and the two of BERT. */
typedef struct mti_output {
    const mt_column_parallel_linear *head;
    const mt_cross_entropy_desc *loss;
    mt_linear_saved *head_saved; /* NULL: inference */
    mt_cross_entropy_saved *loss_saved;
    mt_tensor loss_scale;
    float forward_scale; /* not 0: forward also computes the gradient of the loss, with this scale */
} mti_output;

static mti_output mti_output_of(const mt_column_parallel_linear *head, const mt_cross_entropy_desc *loss,
                                mt_linear_saved *head_saved, mt_cross_entropy_saved *loss_saved, const mt_batch *batch,
                                float forward_scale) {
    mti_output o;
    o.head = head;
    o.loss = loss;
    o.head_saved = head_saved;
    o.loss_saved = loss_saved;
    o.loss_scale = batch->loss_scale;
    o.forward_scale = forward_scale;
    return o;
}

static mt_tensor mti_as_column(mt_tensor row) { return mt_tensor_make(row.data, row.dtype, row.cols, 1); }

/* *logits = this rank's columns of the logits, in the arena. Their rows are a multiple of 64 elements apart, whatever
   the vocabulary: cuBLASLt then reads and writes them without copies, and kernels load whole vectors. Nothing reads or
   writes the columns between the rows. */
static mt_status mti_output_room(mt_context *ctx, const mti_output *o, mt_dtype dtype, int64_t rows,
                                 mt_tensor *logits) {
    MT_TRY(mt_arena_tensor(ctx, dtype, rows, mt_round_up(o->head->local_features, 64), logits));
    *logits = mt_tensor_cols(*logits, 0, o->head->local_features);
    return MT_SUCCESS;
}

/* Returns 1 if forward also computes the gradient of the loss. */
static int mti_output_in_one_pass(const mti_output *o) { return o->head_saved && o->forward_scale != 0.0f; }

/* Computes the loss. When backward follows, o->loss_saved->logits becomes the logits, or their gradient. */
static mt_status mti_output_loss(mt_context *ctx, const mti_output *o, mt_tensor logits, const int32_t *targets,
                                 mt_tensor loss) {
    if (!mti_output_in_one_pass(o))
        return MT_RANGE("loss forward", mt_vocab_parallel_cross_entropy_forward(ctx, o->head->tp, o->loss, logits,
                                                                                targets, loss, o->loss_saved));
    memset(o->loss_saved, 0, sizeof *o->loss_saved);
    o->loss_saved->logits = logits;
    return MT_RANGE("loss forward and backward",
                    mt_vocab_parallel_cross_entropy_forward_backward(ctx, o->head->tp, o->loss, logits, targets,
                                                                     o->loss_scale, o->forward_scale, loss));
}

/* Computes the logits of x, and their loss. */
static mt_status mti_output_forward(mt_context *ctx, const mti_output *o, mt_tensor x, const int32_t *targets,
                                    mt_tensor loss) {
    mt_tensor logits;
    MT_TRY(mti_output_room(ctx, o, x.dtype, loss.cols, &logits));
    MT_TRY(MT_RANGE("head forward", mt_parallel_linear_forward(ctx, o->head, x, logits, o->head_saved)));
    return mti_output_loss(ctx, o, logits, targets, loss);
}

/* Computes dx, the gradient of scale * sum(loss). */
static mt_status mti_output_backward(mt_context *ctx, const mti_output *o, float scale, mt_tensor dx) {
    if (!mti_output_in_one_pass(o))
        MT_TRY(MT_RANGE("loss backward", mt_vocab_parallel_cross_entropy_backward(
                                             ctx, o->head->tp, o->loss, o->loss_scale, scale, o->loss_saved)));
    MT_TRY(mt_hash_log_activation(ctx, o->head->name, 0, "output_grad", o->loss_saved->logits, 0, o->head->weight));
    return MT_RANGE("head backward",
                    mt_parallel_linear_backward(ctx, o->head, o->loss_saved->logits, dx, o->head_saved));
}

/* Creates the output head of a vocabulary. With m->desc.tied_head it has the weight of the token embedding. */
static mt_status mti_output_create(mt_context *ctx, mt_params *params, const mt_language_model *m, int no_bias,
                                   int sequence_parallel, mt_column_parallel_linear *out) {
    const mt_transformer_layer_desc *l = &m->desc.layer;
    mt_linear_desc d;
    memset(&d, 0, sizeof d);
    d.in_features = l->hidden;
    d.out_features = m->desc.vocab;
    d.split.padded_out_features = m->desc.padded_vocab;
    d.no_bias = no_bias;
    if (m->desc.tied_head) d.weight = m->tokens.weight;
    else d.init_std = l->init.std;
    d.sequence_parallel = sequence_parallel;
    return mt_column_parallel_linear_create(ctx, params, "output_layer", &d, out);
}
