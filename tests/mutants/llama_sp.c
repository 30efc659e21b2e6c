/* llama_sp.c - a GPT as Llama with sequence parallelism: RMSNorm, rotary embedding, grouped queries, SwiGLU, no biases.
   Between the blocks each tensor rank has its own tokens. 2 tensor and 2 data ranks. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

static const mt_grid_desc program_grid = {.tp = 2};

#include "batch.h"
#include "mutants.h"

enum { SEQ = 16, SEQUENCES = 4, STEPS = 3, LAYERS = 2, VOCAB = 40, HIDDEN = 32, FFN = 48 };
enum { HEADS = 4, GROUPS = 2, HEAD = HIDDEN / HEADS, KV = GROUPS * HEAD };
#define SCALE (1.0f / (SEQUENCES * SEQ)) /* 1 / tokens of the global batch */

typedef struct layer {
    mt_param *attention_gain, *q, *k, *v, *proj, *mlp_gain, *gate_up, *down;
} layer;

typedef struct model {
    mt_param *table, *gain, *head;
    layer layers[LAYERS];
    mt_tensor rotary;
} model;

/* x, x1: of this rank's tokens; the others have all tokens. */
typedef struct layer_saved {
    mt_tensor x, stats, n, qkv, core, lse, x1, stats1, n1, h, a;
} layer_saved;

typedef struct saved {
    layer_saved layers[LAYERS];
    mt_tensor x, stats, n, logits, lse; /* of the head */
} saved;

/* ---- parameters -------------------------------------------------------------------------------------------------- */

/* Each rank computes the part of a gain's gradient that its own tokens add. */
static mt_status add_gain(mt_context *ctx, mt_params *params, const char *name, const char *suffix, mt_param **out) {
    mt_param_desc gain = {.rows = 1, .cols = HIDDEN, .init_value = 1};
    gain.sequence_partial = 1;
    return mutants_param(ctx, params, name, suffix, gain, out);
}

static mt_status add_layer(mt_context *ctx, mt_params *params, const char *name, layer *l) {
    mt_param_desc q = {.rows = HIDDEN, .cols = HIDDEN, .unit = HEAD * HEADS / GROUPS, .init_std = 0.3f};
    mt_param_desc kv = {.rows = KV, .cols = HIDDEN, .unit = HEAD, .init_std = 0.3f};
    mt_param_desc proj = {.rows = HIDDEN, .cols = HIDDEN, .unit = HEAD * HEADS / GROUPS, .init_std = 0.2f};
    mt_param_desc gate_up = {.rows = 2 * FFN, .cols = HIDDEN, .parts = 2, .init_std = 0.2f};
    mt_param_desc down = {.rows = HIDDEN, .cols = FFN, .init_std = 0.2f};
    q.placement = MT_SPLIT_ROWS; /* column-parallel */
    kv.placement = MT_SPLIT_ROWS;
    proj.placement = MT_SPLIT_COLS; /* row-parallel */
    gate_up.placement = MT_SPLIT_ROWS;
    down.placement = MT_SPLIT_COLS;
    MT_TRY(add_gain(ctx, params, name, "attention_norm.weight", &l->attention_gain));
    MT_TRY(mutants_param(ctx, params, name, "q.weight", q, &l->q));
    MT_TRY(mutants_param(ctx, params, name, "k.weight", kv, &l->k));
    MT_TRY(mutants_param(ctx, params, name, "v.weight", kv, &l->v));
    MT_TRY(mutants_param(ctx, params, name, "proj.weight", proj, &l->proj));
    MT_TRY(add_gain(ctx, params, name, "mlp_norm.weight", &l->mlp_gain));
    MT_TRY(mutants_param(ctx, params, name, "gate_up.weight", gate_up, &l->gate_up));
    return mutants_param(ctx, params, name, "down.weight", down, &l->down);
}

static mt_status add_params(mt_context *ctx, mt_params *params, model *m) {
    mt_param_desc table = {.rows = VOCAB, .cols = HIDDEN, .init_std = 1};
    mt_param_desc head = {.rows = VOCAB, .cols = HIDDEN, .init_std = 0.2f};
    table.placement = MT_SPLIT_ROWS; /* by vocabulary */
    head.placement = MT_SPLIT_ROWS;
    MT_TRY(mutants_param(ctx, params, "embedding", "weight", table, &m->table));
    MT_TRY(add_layer(ctx, params, "layers.0", &m->layers[0]));
    MT_TRY(add_layer(ctx, params, "layers.1", &m->layers[1]));
    MT_TRY(add_gain(ctx, params, "final_norm", "weight", &m->gain));
    MT_TRY(mutants_param(ctx, params, "head", "weight", head, &m->head));
    return mt_params_init(ctx, params, 1234);
}

/* ---- tokens, dropout and attention ------------------------------------------------------------------------------- */

/* The number of this rank's tokens. */
static int64_t rows_of(const mt_grid *grid, const mutants_batch *b) { return b->tokens / grid->tp_size; }

/* The dropout of an activation of this rank's tokens; sites 0 and 1 are in layer 0. */
static mt_dropout hidden_dropout(const mt_grid *grid, const mutants_batch *b, int site) {
    mt_dropout d = {.p = 0.1f};
    d.at.seed = 7;
    d.at.subsequence = (uint64_t)(100 * b->step + site);
    d.at.first_row = b->first_token + grid->tp_rank * rows_of(grid, b);
    d.at.global_cols = HIDDEN;
    return d;
}

/* This rank's heads. */
static mt_attention_desc attention_of(const mt_grid *grid, const mutants_batch *b) {
    mt_attention_desc d = {.batch = b->sequences, .seq = SEQ, .head_dim = HEAD, .qkv_layout = MT_QKV_SEPARATE};
    d.groups = GROUPS / grid->tp_size;
    d.heads_per_group = HEADS / GROUPS;
    return d;
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* Views of the queries, keys and values side by side. */
static void split_qkv(const layer *l, mt_tensor qkv, mt_tensor *q, mt_tensor *k, mt_tensor *v) {
    int64_t queries = l->q->value.rows, keys = l->k->value.rows;
    *q = mt_tensor_cols(qkv, 0, queries);
    *k = mt_tensor_cols(qkv, queries, keys);
    *v = mt_tensor_cols(qkv, queries + keys, keys);
}

/* x1 = x + dropout(reduce-scatter(attention(all-gather(norm(x))))) */
static mt_status attention_forward(mt_context *ctx, const mt_grid *grid, const model *m, int number,
                                   const mutants_batch *b, mt_tensor x, layer_saved *s) {
    const layer *l = &m->layers[number];
    const int64_t rows = rows_of(grid, b), heads = l->proj->value.cols;
    mt_attention_desc d = attention_of(grid, b);
    mt_comm *tp = grid->tp;
    mt_tensor own, y, q, k, v;
    mt_arena_request memory[] = {{&s->stats, MT_F32, rows, 2},
                                 {&s->n, MT_F32, b->tokens, HIDDEN},
                                 {&s->qkv, MT_F32, b->tokens, heads + 2 * l->k->value.rows},
                                 {&s->core, MT_F32, b->tokens, heads},
                                 {&s->lse, MT_F32, d.groups * d.heads_per_group, b->tokens},
                                 {&s->x1, MT_F32, rows, HIDDEN},
                                 {&own, MT_F32, rows, HIDDEN},
                                 {&y, MT_F32, b->tokens, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, memory, 8));
    split_qkv(l, s->qkv, &q, &k, &v);
    s->x = x;
    MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, x, l->attention_gain->value, mt_none(), 1e-5f, own, s->stats));
    MT_TRY(mt_gather_from_sequence_region(ctx, tp, own, s->n)); /* all-gather */
    MT_TRY(mt_linear_forward(ctx, s->n, l->q->value, mt_none(), q));
    MT_TRY(mt_linear_forward(ctx, s->n, l->k->value, mt_none(), k));
    MT_TRY(mt_linear_forward(ctx, s->n, l->v->value, mt_none(), v));
    MT_TRY(mt_rotary_forward(ctx, &d, m->rotary, s->qkv));
    MT_TRY(mt_attention_forward(ctx, &d, s->qkv, s->core, s->lse));
    MT_TRY(mt_linear_forward(ctx, s->core, l->proj->value, mt_none(), y));
    MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, tp, y, own)); /* reduce-scatter */
    return mt_bias_dropout_add_forward(ctx, own, mt_none(), x, hidden_dropout(grid, b, 2 * number), s->x1);
}

/* Replaces dx, the gradient of x1 for this rank's tokens, by that of x. */
static mt_status attention_backward(mt_context *ctx, const mt_grid *grid, const model *m, int number,
                                    const mutants_batch *b, mt_tensor dx, const layer_saved *s) {
    const layer *l = &m->layers[number];
    const int64_t rows = rows_of(grid, b);
    mt_attention_desc d = attention_of(grid, b);
    mt_comm *tp = grid->tp;
    mt_tensor own, dy, dcore, dqkv, dn, q, k, v;
    mt_arena_request memory[] = {{&own, MT_F32, rows, HIDDEN},
                                 {&dy, MT_F32, b->tokens, HIDDEN},
                                 {&dcore, MT_F32, b->tokens, s->core.cols},
                                 {&dqkv, MT_F32, b->tokens, s->qkv.cols},
                                 {&dn, MT_F32, b->tokens, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, memory, 5));
    split_qkv(l, dqkv, &q, &k, &v);
    MT_TRY(mt_bias_dropout_add_backward(ctx, dx, hidden_dropout(grid, b, 2 * number), own, mt_none()));
    MT_TRY(mt_gather_from_sequence_region(ctx, tp, own, dy)); /* all-gather */
    MT_TRY(mt_linear_gradients(ctx, dy, s->core, l->proj->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dy, l->proj->value, 0, dcore));
    MT_TRY(mt_attention_backward(ctx, &d, s->qkv, s->core, s->lse, dcore, dqkv));
    MT_TRY(mt_rotary_backward(ctx, &d, m->rotary, dqkv));
    MT_TRY(mt_linear_gradients(ctx, q, s->n, l->q->grad, mt_none()));
    MT_TRY(mt_linear_gradients(ctx, k, s->n, l->k->grad, mt_none()));
    MT_TRY(mt_linear_gradients(ctx, v, s->n, l->v->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, q, l->q->value, 0, dn));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, k, l->k->value, 1, dn));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, v, l->v->value, 1, dn));
    MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, tp, dn, own)); /* reduce-scatter */
    return mt_norm_backward(ctx, MT_RMS_NORM, s->x, l->attention_gain->value, s->stats, own, dx, dx,
                            l->attention_gain->grad, mt_none());
}

/* ---- MLP --------------------------------------------------------------------------------------------------------- */

/* y = x1 + dropout(reduce-scatter(mlp(all-gather(norm(x1))))) */
static mt_status mlp_forward(mt_context *ctx, const mt_grid *grid, const model *m, int number, const mutants_batch *b,
                             mt_tensor y, layer_saved *s) {
    const layer *l = &m->layers[number];
    const int64_t rows = rows_of(grid, b);
    mt_comm *tp = grid->tp;
    mt_tensor own, sum;
    mt_arena_request memory[] = {{&s->stats1, MT_F32, rows, 2},
                                 {&s->n1, MT_F32, b->tokens, HIDDEN},
                                 {&s->h, MT_F32, b->tokens, l->gate_up->value.rows},
                                 {&s->a, MT_F32, b->tokens, l->down->value.cols},
                                 {&own, MT_F32, rows, HIDDEN},
                                 {&sum, MT_F32, b->tokens, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, memory, 6));
    MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, s->x1, l->mlp_gain->value, mt_none(), 1e-5f, own, s->stats1));
    MT_TRY(mt_gather_from_sequence_region(ctx, tp, own, s->n1)); /* all-gather */
    MT_TRY(mt_linear_forward(ctx, s->n1, l->gate_up->value, mt_none(), s->h));
    MT_TRY(mt_activation_forward(ctx, MT_SWIGLU, s->h, mt_none(), s->a));
    MT_TRY(mt_linear_forward(ctx, s->a, l->down->value, mt_none(), sum));
    MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, tp, sum, own)); /* reduce-scatter */
    return mt_bias_dropout_add_forward(ctx, own, mt_none(), s->x1, hidden_dropout(grid, b, 2 * number + 1), y);
}

/* Replaces dx, the gradient of y for this rank's tokens, by that of x1. */
static mt_status mlp_backward(mt_context *ctx, const mt_grid *grid, const model *m, int number, const mutants_batch *b,
                              mt_tensor dx, const layer_saved *s) {
    const layer *l = &m->layers[number];
    mt_comm *tp = grid->tp;
    mt_tensor own, dy, da, dh, dn;
    mt_arena_request memory[] = {{&own, MT_F32, rows_of(grid, b), HIDDEN},
                                 {&dy, MT_F32, b->tokens, HIDDEN},
                                 {&da, MT_F32, b->tokens, s->a.cols},
                                 {&dh, MT_F32, b->tokens, s->h.cols},
                                 {&dn, MT_F32, b->tokens, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, memory, 5));
    MT_TRY(mt_bias_dropout_add_backward(ctx, dx, hidden_dropout(grid, b, 2 * number + 1), own, mt_none()));
    MT_TRY(mt_gather_from_sequence_region(ctx, tp, own, dy)); /* all-gather */
    MT_TRY(mt_linear_gradients(ctx, dy, s->a, l->down->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dy, l->down->value, 0, da));
    MT_TRY(mt_activation_backward(ctx, MT_SWIGLU, s->h, da, dh, mt_none()));
    MT_TRY(mt_linear_gradients(ctx, dh, s->n1, l->gate_up->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dh, l->gate_up->value, 0, dn));
    MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, tp, dn, own)); /* reduce-scatter */
    return mt_norm_backward(ctx, MT_RMS_NORM, s->x1, l->mlp_gain->value, s->stats1, own, dx, dx, l->mlp_gain->grad,
                            mt_none());
}

/* ---- embedding and head ------------------------------------------------------------------------------------------ */

/* x [this rank's tokens, HIDDEN] */
static mt_status embedding_forward(mt_context *ctx, const mt_grid *grid, const model *m, const mutants_batch *b,
                                   mt_tensor x) {
    int64_t first_row = grid->tp_rank * m->table->value.rows;
    mt_tensor all;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b->tokens, HIDDEN, &all));
    MT_TRY(mt_embedding_forward(ctx, m->table->value, first_row, (const int32_t *)b->ids.data, 0, all));
    MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, grid->tp, all, x)); /* reduce-scatter */
    return mt_bias_dropout_add_forward(ctx, x, mt_none(), mt_none(), hidden_dropout(grid, b, 2 * LAYERS), x);
}

static mt_status embedding_backward(mt_context *ctx, const mt_grid *grid, const model *m, const mutants_batch *b,
                                    mt_tensor dx) {
    int64_t first_row = grid->tp_rank * m->table->value.rows;
    mt_tensor all;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b->tokens, HIDDEN, &all));
    MT_TRY(mt_bias_dropout_add_backward(ctx, dx, hidden_dropout(grid, b, 2 * LAYERS), dx, mt_none()));
    MT_TRY(mt_gather_from_sequence_region(ctx, grid->tp, dx, all)); /* all-gather */
    return mt_embedding_backward(ctx, all, first_row, (const int32_t *)b->ids.data, m->table->grad);
}

static mt_cross_entropy_shard_desc vocabulary_of(const mt_grid *grid, const model *m) {
    mt_cross_entropy_shard_desc d = {.vocab = VOCAB};
    d.first_col = grid->tp_rank * m->head->value.rows;
    return d;
}

/* loss [1, tokens] = the cross-entropy of this data rank's tokens */
static mt_status head_forward(mt_context *ctx, const mt_grid *grid, const model *m, const mutants_batch *b, mt_tensor x,
                              mt_tensor loss, saved *s) {
    const int32_t *targets = (const int32_t *)b->targets.data;
    const int64_t rows = rows_of(grid, b);
    mt_cross_entropy_shard_desc d = vocabulary_of(grid, m);
    mt_comm *tp = grid->tp;
    mt_tensor own, part, all;
    mt_arena_request memory[] = {{&s->stats, MT_F32, rows, 2},
                                 {&s->n, MT_F32, b->tokens, HIDDEN},
                                 {&s->logits, MT_F32, b->tokens, m->head->value.rows},
                                 {&s->lse, MT_F32, 2, b->tokens},
                                 {&own, MT_F32, rows, HIDDEN},
                                 {&part, MT_F32, b->tokens, 4},
                                 {&all, MT_F32, grid->tp_size * b->tokens, 4}};
    MT_TRY(mt_arena_tensors(ctx, memory, 7));
    s->x = x;
    MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, x, m->gain->value, mt_none(), 1e-5f, own, s->stats));
    MT_TRY(mt_gather_from_sequence_region(ctx, tp, own, s->n)); /* all-gather */
    MT_TRY(mt_linear_forward(ctx, s->n, m->head->value, mt_none(), s->logits));
    MT_TRY(mt_cross_entropy_stats(ctx, &d, s->logits, targets, part));
    MT_TRY(mt_all_gather(ctx, tp, part.data, all.data, (size_t)b->tokens * 4, MT_F32)); /* all-gather */
    return mt_cross_entropy_combine(ctx, &d, all, grid->tp_size, targets, loss, s->lse);
}

/* Computes dx for this rank's tokens. */
static mt_status head_backward(mt_context *ctx, const mt_grid *grid, const model *m, const mutants_batch *b,
                               mt_tensor dx, const saved *s) {
    const int32_t *targets = (const int32_t *)b->targets.data;
    mt_cross_entropy_shard_desc d = vocabulary_of(grid, m);
    mt_tensor dn, own;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b->tokens, HIDDEN, &dn));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, rows_of(grid, b), HIDDEN, &own));
    MT_TRY(mt_cross_entropy_backward(ctx, &d, s->logits, targets, s->lse, mt_none(), SCALE));
    MT_TRY(mt_linear_gradients(ctx, s->logits, s->n, m->head->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, s->logits, m->head->value, 0, dn));
    MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, grid->tp, dn, own)); /* reduce-scatter */
    return mt_norm_backward(ctx, MT_RMS_NORM, s->x, m->gain->value, s->stats, own, mt_none(), dx, m->gain->grad,
                            mt_none());
}

/* ---- training ---------------------------------------------------------------------------------------------------- */

/* For a mutant: the tokens of data rank 0, as those of this one. */
static inline mt_status first_batch(mt_context *ctx, const mt_grid *grid, int step, mutants_batch *b) {
    int32_t ids[SEQUENCES * SEQ];
    MT_TRY(mutants_batch_create(ctx, grid, step, 0, SEQUENCES, SEQ, VOCAB, b));
    for (int shift = 0; shift < 2; shift++) {
        for (int64_t i = 0; i < b->tokens; i++) ids[i] = mutants_token(step, i / SEQ, i % SEQ + shift, VOCAB);
        MT_TRY(mt_upload(ctx, ids, shift ? b->targets : b->ids));
    }
    return MT_SUCCESS;
}

/* Forward and backward. loss [1, tokens] of this data rank. */
static mt_status forward_backward(mt_context *ctx, const mt_grid *grid, const model *m, int step, mt_tensor *loss) {
    mt_tensor x[LAYERS + 1], dx;
    mutants_batch b;
    saved s;
    MT_TRY(mutants_batch_create(ctx, grid, step, 0, SEQUENCES, SEQ, VOCAB, &b));
    MT_TRY(mt_declare(ctx, grid->tp, b.ids, MT_REPLICATED));
    MT_TRY(mt_declare(ctx, grid->dp, b.ids, MT_SPLIT_ROWS));
    MT_TRY(mt_declare(ctx, grid->tp, b.targets, MT_REPLICATED));
    MT_TRY(mt_declare(ctx, grid->dp, b.targets, MT_SPLIT_ROWS));
    for (int i = 0; i <= LAYERS; i++) MT_TRY(mt_arena_tensor(ctx, MT_F32, rows_of(grid, &b), HIDDEN, &x[i]));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, rows_of(grid, &b), HIDDEN, &dx));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, b.tokens, loss));
    MT_TRY(embedding_forward(ctx, grid, m, &b, x[0]));
    for (int i = 0; i < LAYERS; i++) {
        MT_TRY(attention_forward(ctx, grid, m, i, &b, x[i], &s.layers[i]));
        MT_TRY(mlp_forward(ctx, grid, m, i, &b, x[i + 1], &s.layers[i]));
    }
    MT_TRY(head_forward(ctx, grid, m, &b, x[LAYERS], *loss, &s));
    MT_TRY(head_backward(ctx, grid, m, &b, dx, &s));
    for (int i = LAYERS; i-- > 0;) {
        MT_TRY(mlp_backward(ctx, grid, m, i, &b, dx, &s.layers[i]));
        MT_TRY(attention_backward(ctx, grid, m, i, &b, dx, &s.layers[i]));
    }
    return embedding_backward(ctx, grid, m, &b, dx);
}

static mt_status train_step(mt_context *ctx, const mt_grid *grid, mt_params *params, const model *m, int step,
                            mt_optimizer *adamw, mutants_result *result) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor loss;
    float norm;
    MT_TRY(mt_params_zero_grad(ctx, params));
    MT_TRY(forward_backward(ctx, grid, m, step, &loss));
    MT_TRY(mutants_loss(ctx, result, loss, SCALE));
    MT_TRY(mt_sync_gradients(ctx, params));
    MT_TRY(mutants_gradients(ctx, result, params));
    MT_TRY(mt_grad_norm(ctx, params, &norm));
    MT_TRY(mt_optimizer_step(ctx, adamw, 1e-3f, mt_clip_coefficient(norm, 1)));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

static mt_status train(mt_context *ctx, const mt_grid *grid, mt_params *params, const model *m, mt_optimizer *adamw,
                       mutants_result *result) {
    mt_optimizer_desc desc = {.eps = 1e-5f};
    MT_TRY(mt_optimizer_create(ctx, params, &desc, adamw));
    for (int step = 0; step < STEPS; step++) MT_TRY(train_step(ctx, grid, params, m, step, adamw, result));
    return MT_SUCCESS;
}

static mt_status program(mt_context *ctx, const mt_grid *grid, mt_params *params, mutants_result *result) {
    size_t mark = mt_arena_mark(ctx);
    mt_optimizer adamw = {.step = 0};
    mt_status status;
    model m;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, SEQ, HEAD, &m.rotary));
    MT_TRY(mt_rotary_table(ctx, 10000, m.rotary));
    MT_TRY(add_params(ctx, params, &m));
    status = train(ctx, grid, params, &m, &adamw, result);
    mt_optimizer_destroy(ctx, &adamw);
    mt_arena_release(ctx, mark);
    return status;
}
