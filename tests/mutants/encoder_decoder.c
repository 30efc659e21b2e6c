/* encoder_decoder.c - a translation model: an encoder, and a decoder with self-attention, cross-attention and an MLP.
   The heads of cross-attention share one key and one value (multi-query attention): each tensor rank computes some of
   their features, and gathers the others. Without and with sequence parallelism, on 2 tensor and 2 data ranks. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#define MUTANTS_VARIANTS 2 /* the second one has sequence parallelism */

static const mt_grid_desc program_grid = {.tp = 2};

#include "batch.h"
#include "mutants.h"

enum { SOURCE = 12, TARGET = 8, SEQUENCES = 4, STEPS = 2, VOCAB = 40 }; /* SOURCE, TARGET: tokens of a sequence */
enum { HIDDEN = 32, HEADS = 4, HEAD = HIDDEN / HEADS, FFN = 64 };
enum { SITES = 6 };                         /* of dropout */
#define SCALE (1.0f / (SEQUENCES * TARGET)) /* 1 / tokens of the global batch */

typedef struct self_attention {
    mt_param *gain, *qkv, *proj, *proj_bias;
} self_attention;

typedef struct cross_attention {
    mt_param *gain, *q, *q_bias, *kv[2], *proj, *proj_bias; /* kv: of keys and of values */
} cross_attention;

typedef struct mlp {
    mt_param *gain, *fc1, *fc1_bias, *fc2, *fc2_bias;
} mlp;

typedef struct model {
    const mt_grid *grid;
    int sp; /* 1: between the blocks a tensor rank has its own tokens */
    mt_param *table, *encoder_gain, *gain;
    self_attention encoder, decoder;
    cross_attention cross;
    mlp encoder_mlp, decoder_mlp;
} model;

/* x: the input of the block, of this rank's tokens; n, memory, kv: of all tokens */
typedef struct saved {
    mt_tensor x, stats, n, qkv, core, lse, memory, kv[2], h, a;
} saved;

typedef struct step_saved {
    mutants_batch source, target;
    saved encoder, encoder_mlp, encoder_norm, decoder, cross, decoder_mlp, head;
    mt_tensor logits, lse;
} step_saved;

/* ---- parameters -------------------------------------------------------------------------------------------------- */

/* Adds a gain or a bias of all features. With sequence parallelism a rank computes the part of its gradient that its
   own tokens add. */
static mt_status add_row(mt_context *ctx, mt_params *params, const model *m, const char *name, const char *suffix,
                         mt_param **out) {
    mt_param_desc row = {.rows = 1, .cols = HIDDEN};
    row.sequence_partial = m->sp;
    if (strstr(suffix, "norm")) row.init_value = 1;
    else row.init_std = 0.1f;
    return mutants_param(ctx, params, name, suffix, row, out);
}

static mt_status add_weight(mt_context *ctx, mt_params *params, const char *name, const char *suffix, int64_t rows,
                            int64_t cols, int64_t unit, mt_placement placement, mt_param **out) {
    mt_param_desc weight = {.rows = rows, .cols = cols, .unit = unit, .placement = placement, .init_std = 0.2f};
    return mutants_param(ctx, params, name, suffix, weight, out);
}

static mt_status add_self(mt_context *ctx, mt_params *params, const model *m, const char *name, self_attention *l) {
    MT_TRY(add_row(ctx, params, m, name, "norm.weight", &l->gain));
    MT_TRY(add_weight(ctx, params, name, "qkv.weight", 3 * HIDDEN, HIDDEN, 3 * HEAD, MT_SPLIT_ROWS, &l->qkv));
    MT_TRY(add_weight(ctx, params, name, "proj.weight", HIDDEN, HIDDEN, HEAD, MT_SPLIT_COLS, &l->proj));
    return add_row(ctx, params, m, name, "proj.bias", &l->proj_bias);
}

static mt_status add_cross(mt_context *ctx, mt_params *params, const model *m, const char *name, cross_attention *l) {
    MT_TRY(add_row(ctx, params, m, name, "norm.weight", &l->gain));
    MT_TRY(add_weight(ctx, params, name, "q.weight", HIDDEN, HIDDEN, HEAD, MT_SPLIT_ROWS, &l->q));
    MT_TRY(add_weight(ctx, params, name, "q.bias", 1, HIDDEN, HEAD, MT_SPLIT_COLS, &l->q_bias));
    MT_TRY(add_weight(ctx, params, name, "k.weight", HEAD, HIDDEN, 1, MT_SPLIT_ROWS, &l->kv[0]));
    MT_TRY(add_weight(ctx, params, name, "v.weight", HEAD, HIDDEN, 1, MT_SPLIT_ROWS, &l->kv[1]));
    MT_TRY(add_weight(ctx, params, name, "proj.weight", HIDDEN, HIDDEN, HEAD, MT_SPLIT_COLS, &l->proj));
    return add_row(ctx, params, m, name, "proj.bias", &l->proj_bias);
}

static mt_status add_mlp(mt_context *ctx, mt_params *params, const model *m, const char *name, mlp *l) {
    MT_TRY(add_row(ctx, params, m, name, "norm.weight", &l->gain));
    MT_TRY(add_weight(ctx, params, name, "fc1.weight", FFN, HIDDEN, 1, MT_SPLIT_ROWS, &l->fc1));
    MT_TRY(add_weight(ctx, params, name, "fc1.bias", 1, FFN, 1, MT_SPLIT_COLS, &l->fc1_bias));
    MT_TRY(add_weight(ctx, params, name, "fc2.weight", HIDDEN, FFN, 1, MT_SPLIT_COLS, &l->fc2));
    return add_row(ctx, params, m, name, "fc2.bias", &l->fc2_bias);
}

static mt_status add_params(mt_context *ctx, mt_params *params, model *m) {
    MT_TRY(add_weight(ctx, params, "embedding", "weight", VOCAB, HIDDEN, 1, MT_SPLIT_ROWS, &m->table));
    MT_TRY(add_self(ctx, params, m, "encoder.attention", &m->encoder));
    MT_TRY(add_mlp(ctx, params, m, "encoder.mlp", &m->encoder_mlp));
    MT_TRY(add_row(ctx, params, m, "encoder", "norm.weight", &m->encoder_gain));
    MT_TRY(add_self(ctx, params, m, "decoder.attention", &m->decoder));
    MT_TRY(add_cross(ctx, params, m, "decoder.cross", &m->cross));
    MT_TRY(add_mlp(ctx, params, m, "decoder.mlp", &m->decoder_mlp));
    MT_TRY(add_row(ctx, params, m, "decoder", "norm.weight", &m->gain));
    return mt_params_init(ctx, params, 1234);
}

/* ---- tokens and dropout ------------------------------------------------------------------------------------------ */

/* The number of this rank's tokens. */
static int64_t rows_of(const model *m, const mutants_batch *b) {
    return m->sp ? b->tokens / m->grid->tp_size : b->tokens;
}

/* Returns a tensor of all tokens that goes with own, which is that of this rank's tokens: itself, or another one. */
static mt_status all_of(mt_context *ctx, const model *m, const mutants_batch *b, mt_tensor own, mt_tensor *all) {
    *all = own;
    return m->sp ? mt_arena_tensor(ctx, MT_F32, b->tokens, HIDDEN, all) : MT_SUCCESS;
}

/* The opposite. */
static mt_status own_of(mt_context *ctx, const model *m, const mutants_batch *b, mt_tensor all, mt_tensor *own) {
    *own = all;
    return m->sp ? mt_arena_tensor(ctx, MT_F32, rows_of(m, b), HIDDEN, own) : MT_SUCCESS;
}

static mt_dropout hidden_dropout(const model *m, const mutants_batch *b, int site) {
    mt_dropout d = {.p = 0.1f};
    d.at.seed = 7;
    d.at.subsequence = (uint64_t)(SITES * b->step + site);
    d.at.first_row = b->first_token + (m->sp ? m->grid->tp_rank * rows_of(m, b) : 0);
    d.at.global_cols = HIDDEN;
    return d;
}

/* ---- self-attention ---------------------------------------------------------------------------------------------- */

/* This rank's heads. */
static mt_attention_desc self_of(const model *m, const mutants_batch *b, mt_mask mask) {
    mt_attention_desc d = {.batch = b->sequences, .heads_per_group = 1, .head_dim = HEAD, .scores.mask = mask};
    d.seq = b->tokens / b->sequences;
    d.groups = HEADS / m->grid->tp_size;
    return d;
}

/* y = x + dropout(attention(norm(x)) + bias) */
static mt_status self_forward(mt_context *ctx, const model *m, const self_attention *l, const mutants_batch *b,
                              mt_mask mask, int site, mt_tensor x, mt_tensor y, saved *s) {
    mt_attention_desc d = self_of(m, b, mask);
    mt_tensor own, all;
    mt_arena_request memory[] = {{&s->stats, MT_F32, rows_of(m, b), 2},
                                 {&s->n, MT_F32, b->tokens, HIDDEN},
                                 {&s->qkv, MT_F32, b->tokens, l->qkv->value.rows},
                                 {&s->core, MT_F32, b->tokens, l->proj->value.cols},
                                 {&s->lse, MT_F32, d.groups, b->tokens}};
    MT_TRY(mt_arena_tensors(ctx, memory, 5));
    MT_TRY(own_of(ctx, m, b, s->n, &own));
    MT_TRY(all_of(ctx, m, b, y, &all));
    s->x = x;
    MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, x, l->gain->value, mt_none(), 1e-5f, own, s->stats));
    if (m->sp) MT_TRY(mt_gather_from_sequence_region(ctx, m->grid->tp, own, s->n));
    else MT_TRY(mt_copy_to_tensor_region_forward(ctx, m->grid->tp, s->n));
    MT_TRY(mt_linear_forward(ctx, s->n, l->qkv->value, mt_none(), s->qkv));
    MT_TRY(mt_attention_forward(ctx, &d, s->qkv, s->core, s->lse));
    MT_TRY(mt_linear_forward(ctx, s->core, l->proj->value, mt_none(), all));
    if (m->sp) MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, m->grid->tp, all, y));
    else MT_TRY(mt_reduce_from_tensor_region_forward(ctx, m->grid->tp, y));
    return mt_bias_dropout_add_forward(ctx, y, l->proj_bias->value, x, hidden_dropout(m, b, site), y);
}

/* Replaces dx, the gradient of y, by that of x. */
static mt_status self_backward(mt_context *ctx, const model *m, const self_attention *l, const mutants_batch *b,
                               mt_mask mask, int site, mt_tensor dx, const saved *s) {
    mt_attention_desc d = self_of(m, b, mask);
    mt_tensor own, all, dcore, dqkv, dn;
    mt_arena_request memory[] = {{&own, MT_F32, rows_of(m, b), HIDDEN},
                                 {&dcore, MT_F32, b->tokens, s->core.cols},
                                 {&dqkv, MT_F32, b->tokens, s->qkv.cols},
                                 {&dn, MT_F32, b->tokens, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, memory, 4));
    MT_TRY(all_of(ctx, m, b, own, &all));
    MT_TRY(mt_bias_dropout_add_backward(ctx, dx, hidden_dropout(m, b, site), own, l->proj_bias->grad));
    if (m->sp) MT_TRY(mt_gather_from_sequence_region(ctx, m->grid->tp, own, all));
    else MT_TRY(mt_reduce_from_tensor_region_backward(ctx, m->grid->tp, all));
    MT_TRY(mt_linear_gradients(ctx, all, s->core, l->proj->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, all, l->proj->value, 0, dcore));
    MT_TRY(mt_attention_backward(ctx, &d, s->qkv, s->core, s->lse, dcore, dqkv));
    MT_TRY(mt_linear_gradients(ctx, dqkv, s->n, l->qkv->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dqkv, l->qkv->value, 0, dn));
    if (!m->sp) own = dn;
    if (m->sp) MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, m->grid->tp, dn, own));
    else MT_TRY(mt_copy_to_tensor_region_backward(ctx, m->grid->tp, dn));
    return mt_norm_backward(ctx, MT_RMS_NORM, s->x, l->gain->value, s->stats, own, dx, dx, l->gain->grad, mt_none());
}

/* ---- cross-attention --------------------------------------------------------------------------------------------- */

/* This rank's heads, which have the same key and value. */
static mt_attention_desc cross_of(const model *m, const mutants_batch *b) {
    mt_attention_desc d = {.batch = b->sequences, .seq = TARGET, .kv_seq = SOURCE, .groups = 1, .head_dim = HEAD};
    d.heads_per_group = HEADS / m->grid->tp_size;
    d.scores.mask = MT_MASK_BIDIRECTIONAL;
    d.dropout.p = 0.1f;
    d.dropout.at.seed = 7;
    d.dropout.at.subsequence = (uint64_t)(SITES * b->step + 5);
    d.dropout.at.first_row = b->first_sequence;
    d.dropout.at.first_col = m->grid->tp_rank * d.heads_per_group;
    d.dropout.at.global_cols = HEADS;
    return d;
}

/* Computes this rank's features of the key and the value of each token, and gathers the others. */
static mt_status keys_forward(mt_context *ctx, const model *m, const cross_attention *l, saved *s) {
    for (int i = 0; i < 2; i++) {
        mt_tensor own;
        MT_TRY(mt_arena_tensor(ctx, MT_F32, s->memory.rows, l->kv[i]->value.rows, &own));
        MT_TRY(mt_arena_tensor(ctx, MT_F32, s->memory.rows, HEAD, &s->kv[i]));
        MT_TRY(mt_linear_forward(ctx, s->memory, l->kv[i]->value, mt_none(), own));
        MT_TRY(mt_gather_from_tensor_region(ctx, m->grid->tp, own, s->kv[i]));
    }
    return MT_SUCCESS;
}

/* Between this call and two of mt_check_view_end, keys and values are those of this rank's heads. */
static mt_status keys_of_rank(mt_context *ctx, const model *m, const saved *s) {
    MT_TRY(mt_check_view(ctx, m->grid->tp, s->kv[0], MT_SPLIT_COLS));
    return mt_check_view(ctx, m->grid->tp, s->kv[1], MT_SPLIT_COLS);
}

/* y = x + dropout(attention(norm(x), memory) + bias). memory: the output of the encoder for this rank's tokens. */
static mt_status cross_forward(mt_context *ctx, const model *m, const cross_attention *l, const mutants_batch *b,
                               const mutants_batch *source, mt_tensor x, mt_tensor memory, mt_tensor y, saved *s) {
    mt_attention_desc d = cross_of(m, b);
    mt_tensor own, all;
    mt_arena_request tensors[] = {{&s->stats, MT_F32, rows_of(m, b), 2},
                                  {&s->n, MT_F32, b->tokens, HIDDEN},
                                  {&s->qkv, MT_F32, b->tokens, l->q->value.rows},
                                  {&s->core, MT_F32, b->tokens, l->proj->value.cols},
                                  {&s->lse, MT_F32, d.heads_per_group, b->tokens}};
    MT_TRY(mt_arena_tensors(ctx, tensors, 5));
    MT_TRY(own_of(ctx, m, b, s->n, &own));
    MT_TRY(all_of(ctx, m, b, y, &all));
    MT_TRY(all_of(ctx, m, source, memory, &s->memory));
    s->x = x;
    MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, x, l->gain->value, mt_none(), 1e-5f, own, s->stats));
    if (m->sp) MT_TRY(mt_gather_from_sequence_region(ctx, m->grid->tp, own, s->n));
    else MT_TRY(mt_copy_to_tensor_region_forward(ctx, m->grid->tp, s->n));
    if (m->sp) MT_TRY(mt_gather_from_sequence_region(ctx, m->grid->tp, memory, s->memory));
    else MT_TRY(mt_copy_to_tensor_region_forward(ctx, m->grid->tp, s->memory));
    MT_TRY(mt_linear_forward(ctx, s->n, l->q->value, l->q_bias->value, s->qkv));
    MT_TRY(keys_forward(ctx, m, l, s));
    MT_TRY(keys_of_rank(ctx, m, s));
    MT_TRY(mt_dot_product_attention_forward(ctx, &d, s->qkv, s->kv[0], s->kv[1], s->core, s->lse));
    MT_TRY(mt_check_view_end(ctx, mt_check_view_end(ctx, MT_SUCCESS)));
    MT_TRY(mt_linear_forward(ctx, s->core, l->proj->value, mt_none(), all));
    if (m->sp) MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, m->grid->tp, all, y));
    else MT_TRY(mt_reduce_from_tensor_region_forward(ctx, m->grid->tp, y));
    return mt_bias_dropout_add_forward(ctx, y, l->proj_bias->value, x, hidden_dropout(m, b, 2), y);
}

/* d: what this rank's heads add to the gradients of keys and values. Computes dmemory. */
static mt_status keys_backward(mt_context *ctx, const model *m, const cross_attention *l, const mt_tensor *d,
                               mt_tensor dmemory, const saved *s) {
    mt_tensor all = dmemory;
    if (m->sp) MT_TRY(mt_arena_tensor(ctx, MT_F32, s->memory.rows, HIDDEN, &all));
    for (int i = 0; i < 2; i++) {
        mt_tensor own;
        MT_TRY(mt_arena_tensor(ctx, MT_F32, d[i].rows, l->kv[i]->value.rows, &own));
        MT_TRY(mt_reduce_from_tensor_region_forward(ctx, m->grid->tp, d[i])); /* the sum over all heads */
        MT_TRY(mt_scatter_to_tensor_region(ctx, m->grid->tp, d[i], own));
        MT_TRY(mt_linear_gradients(ctx, own, s->memory, l->kv[i]->grad, mt_none()));
        MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, own, l->kv[i]->value, i, all));
    }
    if (m->sp) return mt_reduce_scatter_to_sequence_region(ctx, m->grid->tp, all, dmemory);
    return mt_copy_to_tensor_region_backward(ctx, m->grid->tp, dmemory);
}

/* The backward of core attention. dqkv is the gradient of the queries. */
static mt_status cross_core_backward(mt_context *ctx, const model *m, const mutants_batch *b, mt_tensor dcore,
                                     mt_tensor dqkv, const mt_tensor *dkv, const saved *s) {
    mt_attention_desc d = cross_of(m, b);
    MT_TRY(keys_of_rank(ctx, m, s));
    MT_TRY(mt_dot_product_attention_backward(ctx, &d, s->qkv, s->kv[0], s->kv[1], s->core, s->lse, dcore, dqkv, dkv[0],
                                             dkv[1]));
    MT_TRY(mt_check_view_end(ctx, mt_check_view_end(ctx, MT_SUCCESS)));
    MT_TRY(mt_declare(ctx, m->grid->tp, dkv[0], MT_PARTIAL)); /* the other ranks have other heads of the same key */
    return mt_declare(ctx, m->grid->tp, dkv[1], MT_PARTIAL);
}

/* Replaces dx, the gradient of y, by that of x, and computes dmemory. */
static mt_status cross_backward(mt_context *ctx, const model *m, const cross_attention *l, const mutants_batch *b,
                                mt_tensor dx, mt_tensor dmemory, const saved *s) {
    mt_tensor own, all, dcore, dqkv, dkv[2], dn;
    mt_arena_request tensors[] = {{&own, MT_F32, rows_of(m, b), HIDDEN},   {&dcore, MT_F32, b->tokens, s->core.cols},
                                  {&dqkv, MT_F32, b->tokens, s->qkv.cols}, {&dkv[0], MT_F32, s->memory.rows, HEAD},
                                  {&dkv[1], MT_F32, s->memory.rows, HEAD}, {&dn, MT_F32, b->tokens, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, tensors, 6));
    MT_TRY(all_of(ctx, m, b, own, &all));
    MT_TRY(mt_bias_dropout_add_backward(ctx, dx, hidden_dropout(m, b, 2), own, l->proj_bias->grad));
    if (m->sp) MT_TRY(mt_gather_from_sequence_region(ctx, m->grid->tp, own, all));
    else MT_TRY(mt_reduce_from_tensor_region_backward(ctx, m->grid->tp, all));
    MT_TRY(mt_linear_gradients(ctx, all, s->core, l->proj->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, all, l->proj->value, 0, dcore));
    MT_TRY(cross_core_backward(ctx, m, b, dcore, dqkv, dkv, s));
    MT_TRY(keys_backward(ctx, m, l, dkv, dmemory, s));
    MT_TRY(mt_linear_gradients(ctx, dqkv, s->n, l->q->grad, l->q_bias->grad));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dqkv, l->q->value, 0, dn));
    if (!m->sp) own = dn;
    if (m->sp) MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, m->grid->tp, dn, own));
    else MT_TRY(mt_copy_to_tensor_region_backward(ctx, m->grid->tp, dn));
    return mt_norm_backward(ctx, MT_RMS_NORM, s->x, l->gain->value, s->stats, own, dx, dx, l->gain->grad, mt_none());
}

/* ---- MLP --------------------------------------------------------------------------------------------------------- */

/* y = x + dropout(mlp(norm(x)) + bias) */
static mt_status mlp_forward(mt_context *ctx, const model *m, const mlp *l, const mutants_batch *b, int site,
                             mt_tensor x, mt_tensor y, saved *s) {
    mt_tensor own, all;
    mt_arena_request memory[] = {{&s->stats, MT_F32, rows_of(m, b), 2},
                                 {&s->n, MT_F32, b->tokens, HIDDEN},
                                 {&s->h, MT_F32, b->tokens, l->fc1->value.rows},
                                 {&s->a, MT_F32, b->tokens, l->fc2->value.cols}};
    MT_TRY(mt_arena_tensors(ctx, memory, 4));
    MT_TRY(own_of(ctx, m, b, s->n, &own));
    MT_TRY(all_of(ctx, m, b, y, &all));
    s->x = x;
    MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, x, l->gain->value, mt_none(), 1e-5f, own, s->stats));
    if (m->sp) MT_TRY(mt_gather_from_sequence_region(ctx, m->grid->tp, own, s->n));
    else MT_TRY(mt_copy_to_tensor_region_forward(ctx, m->grid->tp, s->n));
    MT_TRY(mt_linear_forward(ctx, s->n, l->fc1->value, mt_none(), s->h));
    MT_TRY(mt_activation_forward(ctx, MT_SQUARED_RELU, s->h, l->fc1_bias->value, s->a));
    MT_TRY(mt_linear_forward(ctx, s->a, l->fc2->value, mt_none(), all));
    if (m->sp) MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, m->grid->tp, all, y));
    else MT_TRY(mt_reduce_from_tensor_region_forward(ctx, m->grid->tp, y));
    return mt_bias_dropout_add_forward(ctx, y, l->fc2_bias->value, x, hidden_dropout(m, b, site), y);
}

/* Replaces dx, the gradient of y, by that of x. */
static mt_status mlp_backward(mt_context *ctx, const model *m, const mlp *l, const mutants_batch *b, int site,
                              mt_tensor dx, const saved *s) {
    mt_tensor own, all, da, dh, dn;
    mt_arena_request memory[] = {{&own, MT_F32, rows_of(m, b), HIDDEN},
                                 {&da, MT_F32, b->tokens, s->a.cols},
                                 {&dh, MT_F32, b->tokens, s->h.cols},
                                 {&dn, MT_F32, b->tokens, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, memory, 4));
    MT_TRY(all_of(ctx, m, b, own, &all));
    MT_TRY(mt_bias_dropout_add_backward(ctx, dx, hidden_dropout(m, b, site), own, l->fc2_bias->grad));
    if (m->sp) MT_TRY(mt_gather_from_sequence_region(ctx, m->grid->tp, own, all));
    else MT_TRY(mt_reduce_from_tensor_region_backward(ctx, m->grid->tp, all));
    MT_TRY(mt_linear_gradients(ctx, all, s->a, l->fc2->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, all, l->fc2->value, 0, da));
    MT_TRY(mt_activation_backward(ctx, MT_SQUARED_RELU, s->h, da, dh, l->fc1_bias->grad));
    MT_TRY(mt_linear_gradients(ctx, dh, s->n, l->fc1->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dh, l->fc1->value, 0, dn));
    if (!m->sp) own = dn;
    if (m->sp) MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, m->grid->tp, dn, own));
    else MT_TRY(mt_copy_to_tensor_region_backward(ctx, m->grid->tp, dn));
    return mt_norm_backward(ctx, MT_RMS_NORM, s->x, l->gain->value, s->stats, own, dx, dx, l->gain->grad, mt_none());
}

/* ---- embedding and head ------------------------------------------------------------------------------------------ */

/* x: of this rank's tokens */
static mt_status embedding_forward(mt_context *ctx, const model *m, const mutants_batch *b, int site, mt_tensor x) {
    const int64_t first_row = m->grid->tp_rank * m->table->value.rows;
    mt_tensor all;
    MT_TRY(all_of(ctx, m, b, x, &all));
    MT_TRY(mt_embedding_forward(ctx, m->table->value, first_row, (const int32_t *)b->ids.data, 0, all));
    if (m->sp) MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, m->grid->tp, all, x));
    else MT_TRY(mt_reduce_from_tensor_region_forward(ctx, m->grid->tp, x));
    return mt_bias_dropout_add_forward(ctx, x, mt_none(), mt_none(), hidden_dropout(m, b, site), x);
}

static mt_status embedding_backward(mt_context *ctx, const model *m, const mutants_batch *b, int site, mt_tensor dx) {
    const int64_t first_row = m->grid->tp_rank * m->table->value.rows;
    mt_tensor all;
    MT_TRY(all_of(ctx, m, b, dx, &all));
    MT_TRY(mt_bias_dropout_add_backward(ctx, dx, hidden_dropout(m, b, site), dx, mt_none()));
    if (m->sp) MT_TRY(mt_gather_from_sequence_region(ctx, m->grid->tp, dx, all));
    else MT_TRY(mt_reduce_from_tensor_region_backward(ctx, m->grid->tp, all));
    return mt_embedding_backward(ctx, all, first_row, (const int32_t *)b->ids.data, m->table->grad);
}

static mt_cross_entropy_shard_desc vocabulary_of(const model *m) {
    mt_cross_entropy_shard_desc d = {.vocab = VOCAB};
    d.first_col = m->grid->tp_rank * m->table->value.rows;
    return d;
}

/* loss [1, tokens]: the cross-entropy of this data rank's tokens. The head is the table of the embedding. */
static mt_status head_forward(mt_context *ctx, const model *m, mt_tensor x, mt_tensor loss, step_saved *s) {
    const mutants_batch *b = &s->target;
    const int32_t *targets = (const int32_t *)b->targets.data;
    mt_cross_entropy_shard_desc d = vocabulary_of(m);
    mt_tensor own, part, parts;
    mt_arena_request memory[] = {{&s->head.stats, MT_F32, rows_of(m, b), 2},
                                 {&s->head.n, MT_F32, b->tokens, HIDDEN},
                                 {&s->logits, MT_F32, b->tokens, m->table->value.rows},
                                 {&s->lse, MT_F32, 2, b->tokens},
                                 {&part, MT_F32, b->tokens, 4},
                                 {&parts, MT_F32, m->grid->tp_size * b->tokens, 4}};
    MT_TRY(mt_arena_tensors(ctx, memory, 6));
    MT_TRY(own_of(ctx, m, b, s->head.n, &own));
    s->head.x = x;
    MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, x, m->gain->value, mt_none(), 1e-5f, own, s->head.stats));
    if (m->sp) MT_TRY(mt_gather_from_sequence_region(ctx, m->grid->tp, own, s->head.n));
    else MT_TRY(mt_copy_to_tensor_region_forward(ctx, m->grid->tp, s->head.n));
    MT_TRY(mt_linear_forward(ctx, s->head.n, m->table->value, mt_none(), s->logits));
    MT_TRY(mt_cross_entropy_stats(ctx, &d, s->logits, targets, part));
    MT_TRY(mt_all_gather(ctx, m->grid->tp, part.data, parts.data, (size_t)b->tokens * 4, MT_F32));
    return mt_cross_entropy_combine(ctx, &d, parts, m->grid->tp_size, targets, loss, s->lse);
}

/* Computes dx of this rank's tokens. */
static mt_status head_backward(mt_context *ctx, const model *m, mt_tensor dx, const step_saved *s) {
    const mutants_batch *b = &s->target;
    mt_cross_entropy_shard_desc d = vocabulary_of(m);
    mt_tensor own, dn;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b->tokens, HIDDEN, &dn));
    MT_TRY(own_of(ctx, m, b, dn, &own));
    MT_TRY(mt_cross_entropy_backward(ctx, &d, s->logits, (const int32_t *)b->targets.data, s->lse, mt_none(), SCALE));
    MT_TRY(mt_linear_gradients(ctx, s->logits, s->head.n, m->table->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, s->logits, m->table->value, 0, dn));
    if (m->sp) MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, m->grid->tp, dn, own));
    else MT_TRY(mt_copy_to_tensor_region_backward(ctx, m->grid->tp, dn));
    return mt_norm_backward(ctx, MT_RMS_NORM, s->head.x, m->gain->value, s->head.stats, own, mt_none(), dx,
                            m->gain->grad, mt_none());
}

/* ---- training ---------------------------------------------------------------------------------------------------- */

static mt_status make_batch(mt_context *ctx, const model *m, int step, int64_t seq, mutants_batch *b) {
    MT_TRY(mutants_batch_create(ctx, m->grid, step, 0, SEQUENCES, seq, VOCAB, b));
    MT_TRY(mt_declare(ctx, m->grid->tp, b->ids, MT_REPLICATED));
    MT_TRY(mt_declare(ctx, m->grid->dp, b->ids, MT_SPLIT_ROWS));
    MT_TRY(mt_declare(ctx, m->grid->tp, b->targets, MT_REPLICATED));
    return mt_declare(ctx, m->grid->dp, b->targets, MT_SPLIT_ROWS);
}

/* Encoder and decoder. memory: the output of the encoder for this rank's tokens. */
static mt_status forward(mt_context *ctx, const model *m, mt_tensor memory, mt_tensor loss, step_saved *s) {
    mt_tensor x[3], y[4];
    for (int i = 0; i < 3; i++) MT_TRY(mt_arena_tensor(ctx, MT_F32, rows_of(m, &s->source), HIDDEN, &x[i]));
    for (int i = 0; i < 4; i++) MT_TRY(mt_arena_tensor(ctx, MT_F32, rows_of(m, &s->target), HIDDEN, &y[i]));
    MT_TRY(embedding_forward(ctx, m, &s->source, 0, x[0]));
    MT_TRY(self_forward(ctx, m, &m->encoder, &s->source, MT_MASK_BIDIRECTIONAL, 1, x[0], x[1], &s->encoder));
    MT_TRY(mlp_forward(ctx, m, &m->encoder_mlp, &s->source, 2, x[1], x[2], &s->encoder_mlp));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, x[2].rows, 2, &s->encoder_norm.stats));
    s->encoder_norm.x = x[2];
    MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, x[2], m->encoder_gain->value, mt_none(), 1e-5f, memory,
                           s->encoder_norm.stats));
    MT_TRY(embedding_forward(ctx, m, &s->target, 0, y[0]));
    MT_TRY(self_forward(ctx, m, &m->decoder, &s->target, MT_MASK_CAUSAL, 1, y[0], y[1], &s->decoder));
    MT_TRY(cross_forward(ctx, m, &m->cross, &s->target, &s->source, y[1], memory, y[2], &s->cross));
    MT_TRY(mlp_forward(ctx, m, &m->decoder_mlp, &s->target, 3, y[2], y[3], &s->decoder_mlp));
    return head_forward(ctx, m, y[3], loss, s);
}

static mt_status backward(mt_context *ctx, const model *m, const step_saved *s) {
    mt_tensor dx, dy;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, rows_of(m, &s->source), HIDDEN, &dx));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, rows_of(m, &s->target), HIDDEN, &dy));
    MT_TRY(head_backward(ctx, m, dy, s));
    MT_TRY(mlp_backward(ctx, m, &m->decoder_mlp, &s->target, 3, dy, &s->decoder_mlp));
    MT_TRY(cross_backward(ctx, m, &m->cross, &s->target, dy, dx, &s->cross));
    MT_TRY(self_backward(ctx, m, &m->decoder, &s->target, MT_MASK_CAUSAL, 1, dy, &s->decoder));
    MT_TRY(embedding_backward(ctx, m, &s->target, 0, dy));
    MT_TRY(mt_norm_backward(ctx, MT_RMS_NORM, s->encoder_norm.x, m->encoder_gain->value, s->encoder_norm.stats, dx,
                            mt_none(), dx, m->encoder_gain->grad, mt_none()));
    MT_TRY(mlp_backward(ctx, m, &m->encoder_mlp, &s->source, 2, dx, &s->encoder_mlp));
    MT_TRY(self_backward(ctx, m, &m->encoder, &s->source, MT_MASK_BIDIRECTIONAL, 1, dx, &s->encoder));
    return embedding_backward(ctx, m, &s->source, 0, dx);
}

static mt_status train_step(mt_context *ctx, mt_params *params, const model *m, int step, mt_optimizer *adamw,
                            mutants_result *result) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor memory, loss;
    step_saved s;
    float norm;
    MT_TRY(make_batch(ctx, m, 2 * step, SOURCE, &s.source));
    MT_TRY(make_batch(ctx, m, 2 * step + 1, TARGET, &s.target));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, rows_of(m, &s.source), HIDDEN, &memory));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, s.target.tokens, &loss));
    MT_TRY(mt_params_zero_grad(ctx, params));
    MT_TRY(forward(ctx, m, memory, loss, &s));
    MT_TRY(mutants_loss(ctx, result, loss, SCALE));
    MT_TRY(backward(ctx, m, &s));
    MT_TRY(mt_sync_gradients(ctx, params));
    MT_TRY(mutants_gradients(ctx, result, params));
    MT_TRY(mt_grad_norm(ctx, params, &norm));
    MT_TRY(mt_optimizer_step(ctx, adamw, 1e-3f, mt_clip_coefficient(norm, 1)));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

static mt_status program(mt_context *ctx, const mt_grid *grid, mt_params *params, mutants_result *result) {
    mt_optimizer_desc desc = {.eps = 1e-5f};
    mt_optimizer adamw = {.step = 0};
    mt_status status = MT_SUCCESS;
    model m = {.grid = grid, .sp = mutants_variant};
    MT_TRY(add_params(ctx, params, &m));
    MT_TRY(mt_optimizer_create(ctx, params, &desc, &adamw));
    for (int step = 0; step < STEPS && status == MT_SUCCESS; step++)
        status = train_step(ctx, params, &m, step, &adamw, result);
    mt_optimizer_destroy(ctx, &adamw);
    return status;
}
