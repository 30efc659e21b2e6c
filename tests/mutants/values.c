/* values.c - a GPT for mutants whose calls fit together, and whose values are wrong: learned positions, ALiBi, grouped
   queries (all ranks have their keys and values), padding, label smoothing, weights of a file, micro-batches with slots
   of their own, and an evaluation. Without and with sequence parallelism, on 2 tensor and 2 data ranks. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#define MUTANTS_VARIANTS 2 /* the second one has sequence parallelism */

static const mt_grid_desc program_grid = {.tp = 2};

#include "batch.h"
#include "mutants.h"

enum { SEQ = 16, SEQUENCES = 4, STEPS = 3, VOCAB = 40, HIDDEN = 32, FFN = 48, EVAL = 90 };
enum { HEADS = 4, GROUPS = 2, HEAD = HIDDEN / HEADS, KV = GROUPS * HEAD };
#define SCALE (1.0f / (SEQUENCES * SEQ)) /* 1 / tokens of the global batch of a step */

typedef struct model {
    const mt_grid *grid;
    int sp;
    mt_param *table, *places, *gain, *q, *kv, *proj, *mlp_gain, *fc1, *fc2, *last_gain, *head;
    mt_tensor slopes; /* [1, this rank's heads] */
} model;

/* What the forward of a micro-batch keeps. x, x1 and x2 are of this rank's tokens. */
typedef struct saved {
    mutants_batch b;
    mt_tensor lengths, positions, x, stats, n, q, kv, core, lse, x1, stats1, n1, h, a, x2, stats2, n2, logits, loss_lse;
} saved;

/* ---- parameters -------------------------------------------------------------------------------------------------- */

static mt_status add(mt_context *ctx, mt_params *params, const char *name, int64_t rows, int64_t cols,
                     mt_placement placement, int partial, mt_param **out) {
    mt_param_desc d = {.rows = rows, .cols = cols, .placement = placement, .sequence_partial = partial};
    d.name = name;
    if (rows == 1) d.init_value = 1;
    else d.init_std = 0.3f;
    return mt_params_add(ctx, params, &d, out);
}

/* A value of a file: element i of tensor number `tensor`. */
static float file_value(int tensor, int64_t i) { return 0.4f * sinf((float)(i * i % 977 + 13 * i + 71 * tensor)); }

/* Loads this rank's shard of a tensor of the file. */
static mt_status load(mt_context *ctx, const mt_grid *grid, int tensor, const mt_param *p) {
    const mt_shard shard = {.rows = p->desc.rows,
                            .cols = p->desc.cols,
                            .placement = p->desc.placement,
                            .tp_rank = grid->tp_rank,
                            .tp_size = grid->tp_size};
    const int64_t n = p->desc.rows * p->desc.cols;
    float *whole = (float *)malloc((size_t)n * 2 * sizeof *whole);
    mt_status status;
    if (!whole) return MT_ERR_MEMORY;
    for (int64_t i = 0; i < n; i++) whole[i] = file_value(tensor, i);
    status = mt_shard_copy(&shard, MT_F32, 0, whole, whole + n);
    if (status == MT_SUCCESS) status = mt_upload(ctx, whole + n, p->value);
    free(whole);
    return status;
}

/* The random words of a weight with HIDDEN columns. */
static mt_random words(int seed, int subsequence, int64_t first_row) {
    mt_random at = {.seed = (uint64_t)seed, .subsequence = (uint64_t)subsequence, .global_cols = HIDDEN};
    at.first_row = first_row;
    return at;
}

static mt_status create(mt_context *ctx, mt_params *params, model *m) {
    const mt_grid *grid = m->grid;
    const int sp = m->sp;
    MT_TRY(add(ctx, params, "embedding.weight", VOCAB, HIDDEN, MT_SPLIT_ROWS, 0, &m->table));
    MT_TRY(add(ctx, params, "positions.weight", 2 * SEQ, HIDDEN, MT_REPLICATED, sp, &m->places));
    MT_TRY(add(ctx, params, "norm.weight", 1, HIDDEN, MT_REPLICATED, sp, &m->gain));
    MT_TRY(add(ctx, params, "q.weight", HIDDEN, HIDDEN, MT_SPLIT_ROWS, 0, &m->q));
    MT_TRY(add(ctx, params, "kv.weight", 2 * KV, HIDDEN, MT_REPLICATED, 1, &m->kv));
    MT_TRY(add(ctx, params, "proj.weight", HIDDEN, HIDDEN, MT_SPLIT_COLS, 0, &m->proj));
    MT_TRY(add(ctx, params, "mlp_norm.weight", 1, HIDDEN, MT_REPLICATED, sp, &m->mlp_gain));
    MT_TRY(add(ctx, params, "fc1.weight", FFN, HIDDEN, MT_SPLIT_ROWS, 0, &m->fc1));
    MT_TRY(add(ctx, params, "fc2.weight", HIDDEN, FFN, MT_SPLIT_COLS, 0, &m->fc2));
    MT_TRY(add(ctx, params, "last_norm.weight", 1, HIDDEN, MT_REPLICATED, sp, &m->last_gain));
    MT_TRY(add(ctx, params, "head.weight", VOCAB, HIDDEN, MT_SPLIT_ROWS, 0, &m->head));
    MT_TRY(mt_params_init(ctx, params, 1234));
    MT_TRY(load(ctx, grid, 1, m->q));
    MT_TRY(load(ctx, grid, 2, m->proj));
    MT_TRY(load(ctx, grid, 3, m->places));
    MT_TRY(mt_random_normal(ctx, m->fc1->value, 0.3f, words(9, 77, grid->tp_rank * m->fc1->value.rows)));
    MT_TRY(mt_random_normal(ctx, m->kv->value, 0.3f, words(9, 78, 0)));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, HEADS / grid->tp_size, &m->slopes));
    return mt_alibi_slopes(ctx, HEADS, grid->tp_rank * m->slopes.cols, m->slopes);
}

/* ---- for mutants ------------------------------------------------------------------------------------------------- */

/* Adds n to each id. */
static inline mt_status shift(mt_context *ctx, mt_tensor ids, int n) {
    int32_t own[SEQUENCES * SEQ];
    for (int64_t i = 0; i < ids.rows; i++)
        own[i] = mt_context_has_data(ctx) ? (((const int32_t *)ids.data)[i] + n) % VOCAB : 0;
    return mt_upload(ctx, own, ids);
}

/* Writes the targets, and the ids, of data rank 0. */
static inline mt_status targets_of_first(mt_context *ctx, const mt_grid *grid, int step, int micro, mutants_batch *b) {
    int32_t own[SEQUENCES * SEQ];
    for (int64_t i = 0; i < b->tokens; i++)
        own[i] = mutants_token(step, micro * grid->dp_size + i / SEQ, i % SEQ + 1, VOCAB);
    return mt_upload(ctx, own, b->targets);
}

static inline mt_status batch_of_first(mt_context *ctx, const mt_grid *grid, int step, int micro, mutants_batch *b) {
    int32_t own[SEQUENCES * SEQ];
    for (int64_t i = 0; i < b->tokens; i++)
        own[i] = mutants_token(step, micro * grid->dp_size + i / SEQ, i % SEQ, VOCAB);
    MT_TRY(mt_upload(ctx, own, b->ids));
    return targets_of_first(ctx, grid, step, micro, b);
}

/* ---- a micro-batch ----------------------------------------------------------------------------------------------- */

static int64_t rows_of(const model *m, const mutants_batch *b) {
    return m->sp ? b->tokens / m->grid->tp_size : b->tokens;
}

/* The first of this rank's tokens in the batch of its data rank. */
static int64_t first_of(const model *m, const mutants_batch *b) { return m->sp ? m->grid->tp_rank * rows_of(m, b) : 0; }

static mt_status read_batch(mt_context *ctx, const model *m, int step, int micro, saved *s) {
    int32_t lengths[SEQUENCES];
    mutants_batch *b = &s->b;
    MT_TRY(mutants_batch_create(ctx, m->grid, step, micro, m->grid->dp_size, SEQ, VOCAB, b));
    MT_TRY(mt_declare(ctx, m->grid->tp, b->ids, MT_REPLICATED));
    MT_TRY(mt_declare(ctx, m->grid->dp, b->ids, MT_SPLIT_ROWS));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, b->sequences, 1, &s->lengths));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, rows_of(m, b), 1, &s->positions));
    for (int64_t i = 0; i < b->sequences; i++) lengths[i] = (int32_t)(SEQ - (b->first_sequence + i) % 3);
    MT_TRY(mt_upload(ctx, lengths, s->lengths));
    return mt_position_ids(ctx, first_of(m, b), SEQ, NULL, 0, (int32_t *)s->positions.data, s->positions.rows);
}

static mt_dropout dropout_of(const model *m, const saved *s, int site) {
    mt_dropout d = {.p = s->b.step >= EVAL ? 0 : 0.1f};
    d.at.seed = 7;
    d.at.subsequence = (uint64_t)(100 * s->b.step + site);
    d.at.first_row = s->b.first_token + first_of(m, &s->b);
    d.at.global_cols = HIDDEN;
    return d;
}

static mt_attention_desc attention_of(const model *m, const saved *s) {
    mt_attention_desc d = {.batch = s->b.sequences, .seq = SEQ, .heads_per_group = HEADS / GROUPS, .head_dim = HEAD};
    d.groups = GROUPS / m->grid->tp_size;
    d.lengths = (const int32_t *)s->lengths.data;
    d.scores.alibi = 1;
    d.scores.alibi_slopes = (const float *)m->slopes.data;
    d.scores.scale = 1.0f / sqrtf((float)HEAD);
    d.dropout.p = s->b.step >= EVAL ? 0 : 0.1f;
    d.dropout.at.seed = 7;
    d.dropout.at.subsequence = (uint64_t)(100 * s->b.step + 50);
    d.dropout.at.first_row = s->b.first_sequence;
    d.dropout.at.first_col = m->grid->tp_rank * d.groups * d.heads_per_group;
    d.dropout.at.global_cols = HEADS;
    return d;
}

static mt_cross_entropy_shard_desc vocabulary_of(const model *m) {
    mt_cross_entropy_shard_desc d = {.vocab = VOCAB, .label_smoothing = 0.1f};
    d.first_col = m->grid->tp_rank * m->head->value.rows;
    return d;
}

static mt_status tensors(mt_context *ctx, const model *m, saved *s) {
    const int64_t tokens = s->b.tokens, rows = rows_of(m, &s->b), heads = m->q->value.rows;
    mt_arena_request memory[] = {{&s->x, MT_F32, rows, HIDDEN},
                                 {&s->stats, MT_F32, rows, 2},
                                 {&s->n, MT_F32, tokens, HIDDEN},
                                 {&s->q, MT_F32, tokens, heads},
                                 {&s->kv, MT_F32, tokens, 2 * KV},
                                 {&s->core, MT_F32, tokens, heads},
                                 {&s->lse, MT_F32, heads / HEAD, tokens},
                                 {&s->x1, MT_F32, rows, HIDDEN},
                                 {&s->stats1, MT_F32, rows, 2},
                                 {&s->n1, MT_F32, tokens, HIDDEN},
                                 {&s->h, MT_F32, tokens, m->fc1->value.rows},
                                 {&s->a, MT_F32, tokens, m->fc1->value.rows},
                                 {&s->x2, MT_F32, rows, HIDDEN},
                                 {&s->stats2, MT_F32, rows, 2},
                                 {&s->n2, MT_F32, tokens, HIDDEN},
                                 {&s->logits, MT_F32, tokens, m->head->value.rows},
                                 {&s->loss_lse, MT_F32, 2, tokens}};
    return mt_arena_tensors(ctx, memory, (int)(sizeof memory / sizeof *memory));
}

/* ---- into and out of the split products -------------------------------------------------------------------------- */

static mt_status enter(mt_context *ctx, const model *m, mt_tensor own, mt_tensor all) {
    if (m->sp) return mt_gather_from_sequence_region(ctx, m->grid->tp, own, all);
    MT_TRY(mt_copy(ctx, own, all));
    return mt_copy_to_tensor_region_forward(ctx, m->grid->tp, all);
}

static mt_status leave(mt_context *ctx, const model *m, mt_tensor all, mt_tensor own) {
    if (m->sp) return mt_reduce_scatter_to_sequence_region(ctx, m->grid->tp, all, own);
    MT_TRY(mt_copy(ctx, all, own));
    return mt_reduce_from_tensor_region_forward(ctx, m->grid->tp, own);
}

static mt_status enter_backward(mt_context *ctx, const model *m, mt_tensor all, mt_tensor own) {
    if (m->sp) return mt_reduce_scatter_to_sequence_region(ctx, m->grid->tp, all, own);
    MT_TRY(mt_copy(ctx, all, own));
    return mt_copy_to_tensor_region_backward(ctx, m->grid->tp, own);
}

static mt_status leave_backward(mt_context *ctx, const model *m, mt_tensor own, mt_tensor all) {
    if (m->sp) return mt_gather_from_sequence_region(ctx, m->grid->tp, own, all);
    MT_TRY(mt_copy(ctx, own, all));
    return mt_reduce_from_tensor_region_backward(ctx, m->grid->tp, all);
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* This rank's group of keys, or of values, in what all ranks have. */
static mt_tensor own_group(const model *m, mt_tensor kv, int first) {
    return mt_tensor_cols(kv, first + m->grid->tp_rank * KV / m->grid->tp_size, KV / m->grid->tp_size);
}

static mt_status core_forward(mt_context *ctx, const model *m, saved *s) {
    const mt_attention_desc d = attention_of(m, s);
    const mt_tensor k = own_group(m, s->kv, 0), v = own_group(m, s->kv, KV);
    MT_TRY(mt_check_view(ctx, m->grid->tp, k, MT_SPLIT_COLS));
    MT_TRY(mt_check_view(ctx, m->grid->tp, v, MT_SPLIT_COLS));
    return mt_check_view_end(
        ctx, mt_check_view_end(ctx, mt_dot_product_attention_forward(ctx, &d, s->q, k, v, s->core, s->lse)));
}

static mt_status attention_forward(mt_context *ctx, const model *m, saved *s) {
    mt_tensor own, y;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, s->x.rows, HIDDEN, &own));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, s->b.tokens, HIDDEN, &y));
    MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, s->x, m->gain->value, mt_none(), 1e-5f, own, s->stats));
    MT_TRY(enter(ctx, m, own, s->n));
    MT_TRY(mt_linear_forward(ctx, s->n, m->q->value, mt_none(), s->q));
    MT_TRY(mt_linear_forward(ctx, s->n, m->kv->value, mt_none(), s->kv));
    MT_TRY(core_forward(ctx, m, s));
    MT_TRY(mt_linear_forward(ctx, s->core, m->proj->value, mt_none(), y));
    MT_TRY(leave(ctx, m, y, own));
    return mt_bias_dropout_add_forward(ctx, own, mt_none(), s->x, dropout_of(m, s, 1), s->x1);
}

static mt_status mlp_forward(mt_context *ctx, const model *m, saved *s) {
    mt_tensor own, y;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, s->x.rows, HIDDEN, &own));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, s->b.tokens, HIDDEN, &y));
    MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, s->x1, m->mlp_gain->value, mt_none(), 1e-5f, own, s->stats1));
    MT_TRY(enter(ctx, m, own, s->n1));
    MT_TRY(mt_linear_forward(ctx, s->n1, m->fc1->value, mt_none(), s->h));
    MT_TRY(mt_activation_forward(ctx, MT_GELU_TANH, s->h, mt_none(), s->a));
    MT_TRY(mt_linear_forward(ctx, s->a, m->fc2->value, mt_none(), y));
    MT_TRY(leave(ctx, m, y, own));
    return mt_bias_dropout_add_forward(ctx, own, mt_none(), s->x1, dropout_of(m, s, 2), s->x2);
}

static mt_status embedding_forward(mt_context *ctx, const model *m, saved *s) {
    const int32_t *ids = (const int32_t *)s->b.ids.data;
    mt_tensor all;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, s->b.tokens, HIDDEN, &all));
    MT_TRY(mt_embedding_forward(ctx, m->table->value, m->grid->tp_rank * m->table->value.rows, ids, 0, all));
    MT_TRY(leave(ctx, m, all, s->x));
    MT_TRY(mt_embedding_forward(ctx, m->places->value, 0, (const int32_t *)s->positions.data, 1, s->x));
    return mt_bias_dropout_add_forward(ctx, s->x, mt_none(), mt_none(), dropout_of(m, s, 0), s->x);
}

/* loss [1, tokens] */
static mt_status head_forward(mt_context *ctx, const model *m, saved *s, mt_tensor loss) {
    const mt_cross_entropy_shard_desc d = vocabulary_of(m);
    const int32_t *targets = (const int32_t *)s->b.targets.data;
    mt_comm *tp = m->grid->tp;
    mt_tensor own, part, all;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, s->x.rows, HIDDEN, &own));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, s->b.tokens, 4, &part));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, m->grid->tp_size * s->b.tokens, 4, &all));
    MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, s->x2, m->last_gain->value, mt_none(), 1e-5f, own, s->stats2));
    MT_TRY(enter(ctx, m, own, s->n2));
    MT_TRY(mt_linear_forward(ctx, s->n2, m->head->value, mt_none(), s->logits));
    MT_TRY(mt_cross_entropy_stats(ctx, &d, s->logits, targets, part));
    MT_TRY(mt_all_gather(ctx, tp, part.data, all.data, (size_t)s->b.tokens * 4, MT_F32));
    return mt_cross_entropy_combine(ctx, &d, all, m->grid->tp_size, targets, loss, s->loss_lse);
}

/* Adds the losses of a micro-batch to total [1, 1]. */
static mt_status forward(mt_context *ctx, const model *m, saved *s, mt_tensor total) {
    mt_tensor loss;
    MT_TRY(tensors(ctx, m, s));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, s->b.tokens, &loss));
    MT_TRY(embedding_forward(ctx, m, s));
    MT_TRY(attention_forward(ctx, m, s));
    MT_TRY(mlp_forward(ctx, m, s));
    MT_TRY(head_forward(ctx, m, s, loss));
    return mt_sum(ctx, loss, total);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

static mt_status head_backward(mt_context *ctx, const model *m, const saved *s, mt_tensor dx) {
    const mt_cross_entropy_shard_desc d = vocabulary_of(m);
    mt_tensor dn, own;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, s->b.tokens, HIDDEN, &dn));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, s->x.rows, HIDDEN, &own));
    MT_TRY(mt_cross_entropy_backward(ctx, &d, s->logits, (const int32_t *)s->b.targets.data, s->loss_lse, mt_none(),
                                     SCALE));
    MT_TRY(mt_linear_gradients(ctx, s->logits, s->n2, m->head->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, s->logits, m->head->value, 0, dn));
    MT_TRY(enter_backward(ctx, m, dn, own));
    return mt_norm_backward(ctx, MT_RMS_NORM, s->x2, m->last_gain->value, s->stats2, own, mt_none(), dx,
                            m->last_gain->grad, mt_none());
}

static mt_status mlp_backward(mt_context *ctx, const model *m, const saved *s, mt_tensor dx) {
    mt_tensor own, dy, da, dh, dn;
    mt_arena_request memory[] = {{&own, MT_F32, s->x.rows, HIDDEN},
                                 {&dy, MT_F32, s->b.tokens, HIDDEN},
                                 {&da, MT_F32, s->b.tokens, s->a.cols},
                                 {&dh, MT_F32, s->b.tokens, s->h.cols},
                                 {&dn, MT_F32, s->b.tokens, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, memory, 5));
    MT_TRY(mt_bias_dropout_add_backward(ctx, dx, dropout_of(m, s, 2), own, mt_none()));
    MT_TRY(leave_backward(ctx, m, own, dy));
    MT_TRY(mt_linear_gradients(ctx, dy, s->a, m->fc2->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dy, m->fc2->value, 0, da));
    MT_TRY(mt_activation_backward(ctx, MT_GELU_TANH, s->h, da, dh, mt_none()));
    MT_TRY(mt_linear_gradients(ctx, dh, s->n1, m->fc1->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dh, m->fc1->value, 0, dn));
    MT_TRY(enter_backward(ctx, m, dn, own));
    return mt_norm_backward(ctx, MT_RMS_NORM, s->x1, m->mlp_gain->value, s->stats1, own, dx, dx, m->mlp_gain->grad,
                            mt_none());
}

/* dkv gets this rank's terms of the gradient of all keys and values. */
static mt_status core_backward(mt_context *ctx, const model *m, const saved *s, mt_tensor dcore, mt_tensor dq,
                               mt_tensor dkv) {
    const mt_attention_desc d = attention_of(m, s);
    const mt_tensor k = own_group(m, s->kv, 0), v = own_group(m, s->kv, KV);
    const mt_tensor dk = own_group(m, dkv, 0);
    const mt_tensor dv = own_group(m, dkv, KV);
    MT_TRY(mt_fill(ctx, dkv, 0));
    MT_TRY(mt_check_view(ctx, m->grid->tp, k, MT_SPLIT_COLS));
    MT_TRY(mt_check_view(ctx, m->grid->tp, v, MT_SPLIT_COLS));
    MT_TRY(
        mt_check_view_end(ctx, mt_check_view_end(ctx, mt_dot_product_attention_backward(ctx, &d, s->q, k, v, s->core,
                                                                                        s->lse, dcore, dq, dk, dv))));
    return mt_declare(ctx, m->grid->tp, dkv, MT_PARTIAL);
}

static mt_status attention_backward(mt_context *ctx, const model *m, const saved *s, mt_tensor dx) {
    mt_tensor own, dy, dcore, dq, dkv, dn;
    mt_arena_request memory[] = {{&own, MT_F32, s->x.rows, HIDDEN},        {&dy, MT_F32, s->b.tokens, HIDDEN},
                                 {&dcore, MT_F32, s->b.tokens, s->q.cols}, {&dq, MT_F32, s->b.tokens, s->q.cols},
                                 {&dkv, MT_F32, s->b.tokens, 2 * KV},      {&dn, MT_F32, s->b.tokens, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, memory, 6));
    MT_TRY(mt_bias_dropout_add_backward(ctx, dx, dropout_of(m, s, 1), own, mt_none()));
    MT_TRY(leave_backward(ctx, m, own, dy));
    MT_TRY(mt_linear_gradients(ctx, dy, s->core, m->proj->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dy, m->proj->value, 0, dcore));
    MT_TRY(core_backward(ctx, m, s, dcore, dq, dkv));
    MT_TRY(mt_linear_gradients(ctx, dq, s->n, m->q->grad, mt_none()));
    MT_TRY(mt_linear_gradients(ctx, dkv, s->n, m->kv->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dq, m->q->value, 0, dn));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dkv, m->kv->value, 1, dn));
    MT_TRY(enter_backward(ctx, m, dn, own));
    return mt_norm_backward(ctx, MT_RMS_NORM, s->x, m->gain->value, s->stats, own, dx, dx, m->gain->grad, mt_none());
}

static mt_status embedding_backward(mt_context *ctx, const model *m, const saved *s, mt_tensor dx) {
    mt_tensor all;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, s->b.tokens, HIDDEN, &all));
    MT_TRY(mt_bias_dropout_add_backward(ctx, dx, dropout_of(m, s, 0), dx, mt_none()));
    MT_TRY(mt_embedding_backward(ctx, dx, 0, (const int32_t *)s->positions.data, m->places->grad));
    MT_TRY(leave_backward(ctx, m, dx, all));
    return mt_embedding_backward(ctx, all, m->grid->tp_rank * m->table->value.rows, (const int32_t *)s->b.ids.data,
                                 m->table->grad);
}

static mt_status backward(mt_context *ctx, const model *m, const saved *s) {
    mt_tensor dx;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, s->x.rows, HIDDEN, &dx));
    MT_TRY(head_backward(ctx, m, s, dx));
    MT_TRY(mlp_backward(ctx, m, s, dx));
    MT_TRY(attention_backward(ctx, m, s, dx));
    return embedding_backward(ctx, m, s, dx);
}

/* ---- training and evaluation ------------------------------------------------------------------------------------- */

/* A micro-batch has a sequence of each data rank. All forwards come before all backwards, as in a pipeline. */
static mt_status train_step(mt_context *ctx, const model *m, mt_params *params, int step, mt_optimizer *adamw,
                            mutants_result *result) {
    const size_t mark = mt_arena_mark(ctx);
    const int count = SEQUENCES / m->grid->dp_size;
    saved s[SEQUENCES];
    float norm, lr = 1e-2f * (float)(step + 1);
    mt_tensor total;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, 1, &total));
    MT_TRY(mt_fill(ctx, total, 0));
    MT_TRY(mt_params_zero_grad(ctx, params));
    for (int i = 0; i < count; i++) {
        MT_TRY(read_batch(ctx, m, step, i, &s[i]));
        MT_TRY(forward(ctx, m, &s[i], total));
    }
    for (int i = 0; i < count; i++) MT_TRY(backward(ctx, m, &s[i]));
    MT_TRY(mutants_loss(ctx, result, total, SCALE));
    MT_TRY(mt_sync_gradients(ctx, params));
    MT_TRY(mutants_gradients(ctx, result, params));
    MT_TRY(mt_grad_norm(ctx, params, &norm));
    MT_TRY(mt_optimizer_step(ctx, adamw, lr, mt_clip_coefficient(norm, 0.1f)));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* The mean loss of other sequences, which all ranks get. */
static mt_status evaluate(mt_context *ctx, const model *m, mutants_result *result) {
    const float scale = m->grid->dp_rank == 0 ? 1.0f / SEQ : 0; /* the other data ranks have the same loss */
    const size_t mark = mt_arena_mark(ctx);
    mt_tensor total;
    float sum;
    saved s;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, 1, &total));
    MT_TRY(mt_fill(ctx, total, 0));
    for (int i = 0; i < SEQUENCES / m->grid->dp_size; i++) {
        MT_TRY(read_batch(ctx, m, EVAL, i, &s));
        MT_TRY(forward(ctx, m, &s, total));
    }
    MT_TRY(mt_all_reduce(ctx, m->grid->dp, total.data, total.data, 1, MT_F32, MT_SUM));
    MT_TRY(mt_download(ctx, total, &sum));
    MT_TRY(mutants_loss(ctx, result, total, scale / SEQUENCES));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

static mt_status program(mt_context *ctx, const mt_grid *grid, mt_params *params, mutants_result *result) {
    const mt_optimizer_desc desc = {.eps = 1e-4f, .beta1 = 0.9f};
    const size_t mark = mt_arena_mark(ctx);
    mt_optimizer adamw = {.step = 0};
    model m = {.grid = grid, .sp = mutants_variant};
    mt_status status;
    MT_TRY(create(ctx, params, &m));
    MT_TRY(mt_optimizer_create(ctx, params, &desc, &adamw));
    status = evaluate(ctx, &m, result);
    for (int step = 0; status == MT_SUCCESS && step < STEPS; step++)
        status = train_step(ctx, &m, params, step, &adamw, result);
    mt_optimizer_destroy(ctx, &adamw);
    mt_arena_release(ctx, mark);
    return status;
}
