/* ---- BERT -------------------------------------------------------------------------------------------------------- */

#pragma once
#include "bert.h"
#include "gpt.c"
#include "../comm/conjugates.h"

static mt_language_model_desc mti_bert_model(const mt_bert_desc *d) {
    mt_language_model_desc m;
    memset(&m, 0, sizeof m);
    m.vocab = d->vocab;
    m.layers = d->layers;
    m.max_seq = d->max_seq;
    m.layer = d->layer;
    m.layer.scores.mask = MT_MASK_BIDIRECTIONAL;
    m.is_encoder = 1;
    m.token_types = d->token_types ? d->token_types : 2;
    m.embedding_norm = d->layer.norm.placement == MT_POST_LN;
    m.tied_head = 1;
    m.recompute_layers = d->recompute_layers;
    m.embedding_dropout = d->embedding_dropout;
    m.padded_vocab = d->padded_vocab;
    return m;
}

/* Creates a column-parallel layer of a head, whose output every rank gets whole. */
static mt_status mti_bert_dense(mt_context *ctx, mt_params *params, const mt_bert *bert, const char *name,
                                int sequence_parallel, mt_column_parallel_linear *out) {
    const mt_transformer_layer_desc *l = &bert->desc.layer;
    mt_linear_desc d;
    memset(&d, 0, sizeof d);
    d.in_features = d.out_features = l->hidden;
    d.gather_output = 1;
    d.sequence_parallel = sequence_parallel;
    d.init_std = l->init.std;
    return mt_column_parallel_linear_create(ctx, params, name, &d, out);
}

/* Creates the pooler and the sentence-order head. */
static mt_status mti_bert_binary(mt_context *ctx, mt_params *params, mt_bert *bert) {
    mt_linear_desc d;
    memset(&d, 0, sizeof d);
    d.in_features = bert->desc.layer.hidden;
    d.out_features = 2;
    d.init_std = bert->desc.layer.init.std;
    MT_TRY(mti_bert_dense(ctx, params, bert, "pooler.dense", 0, &bert->pooler));
    return mt_column_parallel_linear_create(ctx, params, "binary_head", &d, &bert->binary_head);
}

/* Creates the heads, which begin with all tokens: lm_dense gathers them under sequence parallelism. */
static mt_status mti_bert_heads(mt_context *ctx, mt_params *params, mt_bert *bert) {
    mt_transformer_layer_desc l = bert->desc.layer;
    MT_TRY(mti_bert_dense(ctx, params, bert, "lm_head.dense", l.sequence_parallel, &bert->lm_dense));
    l.sequence_parallel = 0;
    MT_TRY(mti_layer_norm(ctx, params, "lm_head", "layer_norm", &l, &bert->lm_norm));
    MT_TRY(mti_output_create(ctx, params, &bert->model, 0, 0, &bert->head));
    return bert->desc.no_binary_head ? MT_SUCCESS : mti_bert_binary(ctx, params, bert);
}

MT_API mt_status mt_bert_create(mt_context *ctx, mt_params *params, const mt_bert_desc *desc, mt_bert *out) {
    static const char *const function = "mt_bert_create";
    mt_language_model_desc m;
    size_t mark;
    mt_status status;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    m = mti_bert_model(desc);
    MT_TRY(mti_model_check(ctx, function, mt_params_grid(params), &m));
    if (desc->layer.activation == MT_SWIGLU)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: layer.activation is MT_SWIGLU, which the masked-LM head cannot use; use "
                       "mt_language_model_create and a head of your own",
                       function);
    mark = mt_params_mark(params);
    memset(out, 0, sizeof *out);
    status = mti_model_create(ctx, params, &m, &out->model);
    out->desc = *desc;
    out->desc.layer = out->model.desc.layer;
    out->desc.token_types = m.token_types;
    out->loss.vocab = desc->vocab;
    out->loss.padded_vocab = desc->padded_vocab;
    out->loss.ignore_index = desc->ignore_index;
    out->sop_loss.vocab = 2; /* its ignore_index is -100, because 0 is a class */
    if (out->model.grid->cp_rank > 0) out->sop_loss.ignore_index = MT_ZERO; /* see mti_bert_order */
    if (status == MT_SUCCESS && mti_model_is_last(&out->model)) status = mti_bert_heads(ctx, params, out);
    return mt_create_end(params, mark, out, sizeof *out, status);
}

MT_API mt_status mt_bert_saved_create(mt_context *ctx, const mt_bert *bert, mt_bert_saved *out) {
    if (out) memset(out, 0, sizeof *out);
    return mti_model_saved_create(ctx, "mt_bert_saved_create", bert ? &bert->model : NULL, out ? &out->model : NULL);
}

MT_API void mt_bert_saved_destroy(mt_bert_saved *saved) {
    if (!saved) return;
    mt_language_model_saved_destroy(&saved->model);
    memset(saved, 0, sizeof *saved);
}

/* Computes *y [tokens, hidden], the input of the masked-LM logits, from x, the output of the model. */
static mt_status mti_bert_lm_hidden(mt_context *ctx, const mt_bert *bert, mt_tensor x, int64_t tokens,
                                    mt_bert_saved *saved, mt_tensor *y) {
    int64_t hidden = bert->desc.layer.hidden;
    mt_tensor h, act;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, tokens, hidden, &h));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, tokens, hidden, &act));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, tokens, hidden, y));
    MT_TRY(mt_column_parallel_linear_activation_forward(ctx, &bert->lm_dense, bert->desc.layer.activation, x, h, act,
                                                        saved ? &saved->lm_dense : NULL));
    if (saved) saved->lm_h = h;
    return mt_norm_layer_forward(ctx, &bert->lm_norm, act, *y, saved ? &saved->lm_norm : NULL);
}

/* Returns a view of the first tokens of sequences in x, which has the tokens of this context rank or, with
   sequence_parallel, those of this tensor rank. *first becomes the number of the first of these sequences. Context rank
   0 has the first tokens of all. */
static mt_tensor mti_first_tokens(const mt_language_model *m, const mt_batch *batch, mt_tensor x, int64_t *first) {
    int64_t begin = m->desc.layer.sequence_parallel ? m->grid->tp_rank * x.rows : 0;
    int64_t apart = mti_seq_chunks_of(m->cp, &m->layers[0].attention.context, batch->seq).chunk, end;
    mt_tensor view;
    *first = (begin + apart - 1) / apart;
    end = mt_min(batch->sequences, (begin + x.rows + apart - 1) / apart);
    if (end <= *first || m->grid->cp_rank > 0) return mt_none();
    view = mt_tensor_rows(x, *first * apart - begin, 1);
    view.rows = end - *first;
    view.ld = (x.ld ? x.ld : x.cols) * apart;
    return view;
}

/* Adds the first tokens in x to the rows of their sequences in y [sequences, hidden], or back when to_x is 1. */
static mt_status mti_add_first_tokens(mt_context *ctx, const mt_language_model *m, const mt_batch *batch, mt_tensor x,
                                      mt_tensor y, int to_x) {
    int64_t first;
    mt_tensor tokens = mti_first_tokens(m, batch, x, &first), rows;
    if (!tokens.data) return MT_SUCCESS;
    rows = mt_tensor_rows(y, first, tokens.rows);
    MT_TRY(mt_check_view(ctx, m->grid->tp, rows, m->desc.layer.sequence_parallel ? MT_SPLIT_ROWS : MT_UNDECLARED));
    return mt_check_view_end(ctx, mt_add(ctx, tokens, rows, to_x ? tokens : rows));
}

/* Computes *pooled [sequences, hidden] from x, the output of the model. Under sequence parallelism each rank has the
   first tokens of some sequences, and the sum over the ranks has all of them. Of the context ranks only rank 0 has
   first tokens: the others get them with to_all 1; otherwise theirs are zero, see mti_bert_order. */
static mt_status mti_bert_pool(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, mt_tensor x, int to_all,
                               mt_bert_saved *saved, mt_tensor *pooled) {
    const mt_grid *grid = bert->model.grid;
    int64_t n = batch->sequences, hidden = bert->desc.layer.hidden;
    mt_tensor tokens, h;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, n, hidden, &tokens));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, n, hidden, &h));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, n, hidden, pooled));
    MT_TRY(mt_fill(ctx, tokens, 0.0f));
    MT_TRY(mti_add_first_tokens(ctx, &bert->model, batch, x, tokens, 0));
    if (bert->desc.layer.sequence_parallel || bert->model.cp)
        MT_TRY(mt_declare(ctx, grid->dp_cp, tokens, mt_placement_of(ctx, grid->dp_cp, x)));
    if (bert->desc.layer.sequence_parallel) {
        MT_TRY(mt_declare(ctx, grid->tp, tokens, MT_PARTIAL));
        MT_TRY(mt_reduce_from_tensor_region_forward(ctx, grid->tp, tokens));
    }
    if (to_all) MT_TRY(mti_model_sum_context(ctx, &bert->model, tokens));
    MT_TRY(mt_column_parallel_linear_activation_forward(ctx, &bert->pooler, MT_TANH, tokens, h, *pooled,
                                                        saved ? &saved->pooler : NULL));
    if (saved) saved->pooled_h = h;
    return MT_SUCCESS;
}

static mti_output mti_bert_lm_output(const mt_bert *bert, const mt_batch *batch, mt_bert_saved *saved) {
    return mti_output_of(&bert->head, &bert->loss, saved ? &saved->head : NULL, saved ? &saved->loss : NULL, batch,
                         batch->backward_scale);
}

static mti_output mti_bert_sop_output(const mt_bert *bert, const mt_batch *batch, mt_bert_saved *saved) {
    return mti_output_of(&bert->binary_head, &bert->sop_loss, saved ? &saved->binary_head : NULL,
                         saved ? &saved->sop_loss : NULL, batch, 0.0f);
}

/* *out becomes the order of the sequences that this context rank computes with. Those of rank 0 count. The others have
   no first tokens: their orders are all 0, which their sop_loss ignores. All of them take the same arena memory. */
static mt_status mti_bert_order(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, const int32_t *order,
                                const int32_t **out) {
    mt_tensor ids;
    *out = order;
    if (!bert->model.cp) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, batch->sequences, &ids));
    if (bert->model.grid->cp_rank == 0) return MT_SUCCESS;
    *out = (const int32_t *)ids.data;
    MT_TRY(mt_position_ids(ctx, 0, 1, NULL, 0, (int32_t *)ids.data, batch->sequences)); /* sequences of 1 token */
    return mt_declare(ctx, bert->model.grid->dp_cp, mt_tensor_make(ids.data, MT_I32, batch->sequences, 1),
                      MT_SPLIT_ROWS);
}

/* The rows that the hash log gets now are sequences, which count on context rank 0. */
static void mti_bert_log_sequences(mt_context *ctx, const mt_bert *bert, const mt_batch *batch) {
    mt_hash_log_tokens(ctx, batch->first_sequence);
    if (bert->model.grid->cp_rank > 0) mt_hash_log_parts(ctx, bert->model.cp, NULL, 0, 0);
}

/* Computes the loss of the sentence order. The rows of its tensors are sequences, also in the hash log. */
static mt_status mti_bert_sop_loss(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, mt_tensor x,
                                   const int32_t *order, mt_tensor loss, mt_bert_saved *saved) {
    mti_output out = mti_bert_sop_output(bert, batch, saved);
    mt_tensor pooled;
    mti_bert_log_sequences(ctx, bert, batch);
    MT_TRY(mti_bert_order(ctx, bert, batch, order, &order));
    MT_TRY(mti_bert_pool(ctx, bert, batch, x, 0, saved, &pooled));
    MT_TRY(mti_output_forward(ctx, &out, pooled, order, loss));
    return saved ? mt_hash_log_activation(ctx, "sop_loss", 0, "output", mti_as_column(loss), 0, NULL) : MT_SUCCESS;
}

static mt_status mti_bert_sop_forward(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, mt_tensor x,
                                      const int32_t *order, mt_tensor loss, mt_bert_saved *saved) {
    const int before = mt_rows_are_sequences(ctx, 1);
    const mt_status status = mti_bert_sop_loss(ctx, bert, batch, x, order, loss, saved);
    mt_rows_are_sequences(ctx, before);
    return status;
}

/* Runs this stage and, on the last stage, the heads and the losses. */
static mt_status mti_bert_forward(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, const int32_t *ids,
                                  const int32_t *targets, const int32_t *order, mt_tensor input, mt_tensor output,
                                  mt_tensor lm_loss, mt_tensor sop_loss, mt_bert_saved *saved) {
    mti_output out = mti_bert_lm_output(bert, batch, saved);
    mt_tensor x, y;
    MT_TRY(mti_model_forward(ctx, &bert->model, batch, ids, NULL, input, output, saved ? &saved->model : NULL, &x));
    if (!mti_model_is_last(&bert->model)) return MT_SUCCESS;
    MT_TRY(mti_bert_lm_hidden(ctx, bert, x, mti_batch_tokens(bert->model.cp, batch), saved, &y));
    MT_TRY(mti_output_forward(ctx, &out, y, targets, lm_loss));
    if (saved) MT_TRY(mt_hash_log_activation(ctx, "lm_loss", 0, "output", mti_as_column(lm_loss), 0, NULL));
    return bert->desc.no_binary_head ? MT_SUCCESS : mti_bert_sop_forward(ctx, bert, batch, x, order, sop_loss, saved);
}

/* Checks targets and losses. Without a binary head there must be none of the sentence order. */
static mt_status mti_bert_loss_check(mt_context *ctx, const char *function, const mt_bert *bert, const mt_batch *batch,
                                     const int32_t *targets, const int32_t *order, mt_tensor lm_loss,
                                     mt_tensor sop_loss) {
    int64_t tokens = mti_batch_tokens(bert->model.cp, batch);
    int last = mti_model_is_last(&bert->model);
    if (last) MT_TRY(mt_tensor_check(ctx, function, "lm_loss", lm_loss, MT_ARG_F32, 1, tokens));
    MT_TRY(mt_ids_check(ctx, "target", targets, tokens, bert->desc.vocab, mt_ignore_index(bert->loss.ignore_index)));
    if (bert->desc.no_binary_head) {
        if (!order && !sop_loss.data) return MT_SUCCESS;
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: there is a %s, and the model has no_binary_head", function,
                       order ? "sentence_order" : "sop_loss");
    }
    if (last) MT_TRY(mt_tensor_check(ctx, function, "sop_loss", sop_loss, MT_ARG_F32, 1, batch->sequences));
    return mt_ids_check(ctx, "sentence order", order, batch->sequences, 2, mt_ignore_index(0));
}

static mt_status mti_bert_run_forward(mt_context *ctx, const char *function, const mt_bert *bert, const mt_batch *batch,
                                      const int32_t *ids, const int32_t *targets, const int32_t *order, mt_tensor input,
                                      mt_tensor output, mt_tensor lm_loss, mt_tensor sop_loss, mt_bert_saved *saved) {
    const mt_language_model *m = bert ? &bert->model : NULL;
    mt_language_model_saved *kept = saved ? &saved->model : NULL;
    size_t mark;
    mt_status status;
    MT_TRY(mti_model_forward_check(ctx, function, m, batch, ids, input, output, m && m->grid && mti_model_is_last(m),
                                   kept));
    MT_TRY(mti_model_saved_check(ctx, function, "mt_bert_saved_create", kept));
    MT_TRY(mti_bert_loss_check(ctx, function, bert, batch, targets, order, lm_loss, sop_loss));
    MT_TRY(mti_model_begin_forward(ctx, kept, &mark));
    status = mti_bert_forward(ctx, bert, batch, ids, targets, order, input, output, lm_loss, sop_loss, saved);
    return mti_model_end_forward(ctx, mark, status, batch, ids, kept);
}

MT_API mt_status mt_bert_stage_forward(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, const int32_t *ids,
                                       const int32_t *targets, const int32_t *sentence_order, mt_tensor input,
                                       mt_tensor output, mt_tensor lm_loss, mt_tensor sop_loss, mt_bert_saved *saved) {
    return mti_bert_run_forward(ctx, "mt_bert_stage_forward", bert, batch, ids, targets, sentence_order, input, output,
                                lm_loss, sop_loss, saved);
}

MT_API mt_status mt_bert_forward(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, const int32_t *ids,
                                 const int32_t *targets, const int32_t *sentence_order, mt_tensor lm_loss,
                                 mt_tensor sop_loss, mt_bert_saved *saved) {
    return mti_bert_run_forward(ctx, "mt_bert_forward", bert, batch, ids, targets, sentence_order, mt_none(), mt_none(),
                                lm_loss, sop_loss, saved);
}

/* Computes dx [rows, hidden], the gradient of the model's output through the masked-LM head. */
static mt_status mti_bert_lm_backward(mt_context *ctx, const mt_bert *bert, float scale, mt_tensor dx,
                                      mt_bert_saved *saved) {
    mti_output out = mti_bert_lm_output(bert, &saved->model.batch, saved);
    mt_tensor dy, dh = saved->lm_h;
    MT_TRY(mt_arena_tensor(ctx, dx.dtype, dh.rows, dh.cols, &dy));
    MT_TRY(mti_output_backward(ctx, &out, scale, dy));
    MT_TRY(mt_norm_layer_backward(ctx, &bert->lm_norm, dy, mt_none(), dy, &saved->lm_norm));
    MT_TRY(
        mt_column_parallel_activation_backward(ctx, &bert->lm_dense, bert->desc.layer.activation, saved->lm_h, dy, dh));
    return mt_parallel_linear_backward(ctx, &bert->lm_dense, dh, dx, &saved->lm_dense);
}

/* Adds the gradient of the model's output through the pooler to dx. */
static mt_status mti_bert_sop_gradients(mt_context *ctx, const mt_bert *bert, float scale, mt_tensor dx,
                                        mt_bert_saved *saved) {
    const mt_batch *batch = &saved->model.batch;
    mti_output out = mti_bert_sop_output(bert, batch, saved);
    mt_tensor dy, dh = saved->pooled_h;
    mti_bert_log_sequences(ctx, bert, batch);
    MT_TRY(mt_arena_tensor(ctx, dx.dtype, dh.rows, dh.cols, &dy));
    MT_TRY(mti_output_backward(ctx, &out, scale, dy));
    MT_TRY(mt_column_parallel_activation_backward(ctx, &bert->pooler, MT_TANH, saved->pooled_h, dy, dh));
    MT_TRY(mt_parallel_linear_backward(ctx, &bert->pooler, dh, dy, &saved->pooler));
    return mti_add_first_tokens(ctx, &bert->model, batch, dx, dy, 1);
}

static mt_status mti_bert_sop_backward(mt_context *ctx, const mt_bert *bert, float scale, mt_tensor dx,
                                       mt_bert_saved *saved) {
    const int before = mt_rows_are_sequences(ctx, 1);
    const mt_status status = mti_bert_sop_gradients(ctx, bert, scale, dx, saved);
    mt_rows_are_sequences(ctx, before);
    return status;
}

/* Runs the backward of the heads, on the last stage, and of this stage. */
static mt_status mti_bert_backward(mt_context *ctx, const mt_bert *bert, float lm_scale, float sop_scale,
                                   mt_tensor doutput, mt_tensor dinput, mt_bert_saved *saved) {
    const mt_batch *batch = &saved->model.batch;
    int last = mti_model_is_last(&bert->model);
    mt_tensor dy = doutput;
    mti_model_log_batch(ctx, &bert->model, batch);
    if (last) {
        MT_TRY(mti_model_room(ctx, &bert->model, mt_none(), mti_model_rows(&bert->model, batch), &dy));
        MT_TRY(mti_bert_lm_backward(ctx, bert, lm_scale, dy, saved));
        if (!bert->desc.no_binary_head) MT_TRY(mti_bert_sop_backward(ctx, bert, sop_scale, dy, saved));
        MT_TRY(mt_gradients_final(ctx, bert->lm_dense.weight,
                                  bert->desc.no_binary_head ? bert->head.bias : bert->binary_head.bias));
    }
    return mti_model_backward(ctx, &bert->model, dy, last, dinput, &saved->model);
}

static mt_status mti_bert_run_backward(mt_context *ctx, const char *function, const mt_bert *bert, float lm_scale,
                                       float sop_scale, mt_tensor doutput, mt_tensor dinput, mt_bert_saved *saved) {
    const mt_language_model *m = bert ? &bert->model : NULL;
    size_t mark;
    mt_status status;
    MT_TRY(mti_saved_check(ctx, function, "lm_scale", lm_scale, saved ? &saved->model : NULL));
    MT_TRY(mti_model_backward_check(ctx, function, m, doutput, m && m->grid && mti_model_is_last(m), dinput,
                                    &saved->model));
    MT_TRY(mt_check_micro_batch(ctx, function, m->layers[0].attention.proj.weight, saved->model.batch.first_sequence));
    mark = mt_arena_mark(ctx);
    MT_TRY(mt_layers_trust_ids(ctx, 1));
    status = mti_bert_backward(ctx, bert, lm_scale, sop_scale, doutput, dinput, saved);
    mt_layers_trust_ids(ctx, 0);
    mt_arena_release(ctx, mark);
    saved->model.ids = NULL;
    return status;
}

MT_API mt_status mt_bert_stage_backward(mt_context *ctx, const mt_bert *bert, float lm_scale, float sop_scale,
                                        mt_tensor doutput, mt_tensor dinput, mt_bert_saved *saved) {
    return mti_bert_run_backward(ctx, "mt_bert_stage_backward", bert, lm_scale, sop_scale, doutput, dinput, saved);
}

MT_API mt_status mt_bert_backward(mt_context *ctx, const mt_bert *bert, float lm_scale, float sop_scale,
                                  mt_bert_saved *saved) {
    return mti_bert_run_backward(ctx, "mt_bert_backward", bert, lm_scale, sop_scale, mt_none(), mt_none(), saved);
}

static mt_status mti_bert_sop_logits(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, mt_tensor x,
                                     mt_tensor logits) {
    const int before = mt_rows_are_sequences(ctx, 1);
    mt_tensor y;
    mt_status status = mti_bert_pool(ctx, bert, batch, x, 1, NULL, &y);
    if (status == MT_SUCCESS) status = mt_column_parallel_linear_product(ctx, &bert->binary_head, y, 1, logits);
    mt_rows_are_sequences(ctx, before);
    return status;
}

/* Computes the logits from x, the output of the model on the last stage. */
static mt_status mti_bert_head_logits(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, mt_tensor x,
                                      mt_tensor lm_logits, mt_tensor sop_logits) {
    mt_tensor y;
    if (lm_logits.data) {
        MT_TRY(mti_bert_lm_hidden(ctx, bert, x, mti_batch_tokens(bert->model.cp, batch), NULL, &y));
        MT_TRY(mt_column_parallel_linear_product(ctx, &bert->head, y, 1, lm_logits));
    }
    return sop_logits.data ? mti_bert_sop_logits(ctx, bert, batch, x, sop_logits) : MT_SUCCESS;
}

/* The last stage computes the logits and broadcasts them to the others. */
static mt_status mti_bert_logits(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, const int32_t *ids,
                                 mt_tensor lm_logits, mt_tensor sop_logits) {
    const mt_language_model *m = &bert->model;
    mt_tensor x, lm_room, sop_room;
    MT_TRY(mti_model_infer(ctx, m, batch, ids, NULL, &x));
    MT_TRY(mti_model_share_room(ctx, m, lm_logits, &lm_room));
    MT_TRY(mti_model_share_room(ctx, m, sop_logits, &sop_room));
    if (mti_model_is_last(m)) MT_TRY(mti_bert_head_logits(ctx, bert, batch, x, lm_room, sop_room));
    MT_TRY(mti_model_share(ctx, m, lm_room, lm_logits));
    return mti_model_share(ctx, m, sop_room, sop_logits);
}

MT_API mt_status mt_bert_logits(mt_context *ctx, const mt_bert *bert, const mt_batch *batch, const int32_t *ids,
                                mt_tensor lm_logits, mt_tensor sop_logits) {
    static const char *const function = "mt_bert_logits";
    int64_t tokens;
    size_t mark;
    mt_status status;
    MT_TRY(mti_model_call_check(ctx, function, bert ? &bert->model : NULL, batch));
    tokens = mti_batch_tokens(bert->model.cp, batch);
    if (lm_logits.data)
        MT_TRY(mt_tensor_check(ctx, function, "lm_logits", lm_logits, MT_ARG_FLOAT, tokens, bert->desc.vocab));
    if (sop_logits.data && bert->desc.no_binary_head)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: there are sop_logits, and the model has no_binary_head", function);
    if (sop_logits.data)
        MT_TRY(mt_tensor_check(ctx, function, "sop_logits", sop_logits, MT_ARG_FLOAT, batch->sequences, 2));
    if (batch->token_types)
        MT_TRY(mt_ids_check(ctx, "token type", batch->token_types, tokens, bert->desc.token_types, 0));
    MT_TRY(mt_ids_check(ctx, "token id", ids, tokens, bert->desc.vocab, 0));
    mark = mt_arena_mark(ctx);
    status = mti_bert_logits(ctx, bert, batch, ids, lm_logits, sop_logits);
    mt_arena_release(ctx, mark);
    return status;
}
