/* context.c - a GPT over context ranks: each has a part of every sequence. 2 tensor and 2 context ranks. In variant 0
   the parts are in zigzag, and mt_context_parallel_attention_* sends the keys around. In variant 1 they are contiguous,
   and layer 1 has an attention of its own: it gathers all keys, and its queries see those up to their own. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

static const mt_grid_desc program_grid = {.tp = 2, .cp = 2};

#define MUTANTS_VARIANTS 2
#include "mutants.h"
#include "batch.h"

enum { SEQ = 16, STEPS = 3, LAYERS = 2, VOCAB = 40, HIDDEN = 32, FFN = 48, HEADS = 4, HEAD = HIDDEN / HEADS };
enum { MOST = 2 * SEQ }; /* tokens */

typedef struct layer {
    mt_param *attention_gain, *q, *k, *v, *proj, *mlp_gain, *up, *down;
} layer;

typedef struct model {
    mt_param *table, *positions, *gain, *head;
    layer layers[LAYERS];
} model;

/* The tokens of this context rank. `tokens` of them are rows; ids, targets and positions are [rows, 1]. */
typedef struct batch {
    int64_t step, sequences, rows, chunk; /* chunk: rows that follow each other in a sequence */
    mt_context_parallel_desc layout;
    mt_tensor ids, targets, positions;
} batch;

typedef struct layer_saved {
    mt_tensor x, stats, n, q, k, v, core, lse, all_k, all_v, x1, stats1, n1, h, a;
} layer_saved;

typedef struct saved {
    layer_saved layers[LAYERS];
    mt_tensor x, stats, n, logits, lse; /* of the head */
} saved;

/* Whether a layer gathers all keys itself. */
static int is_own(int number) { return mutants_variant == 1 && number == 1; }

/* ---- parameters -------------------------------------------------------------------------------------------------- */

static mt_status add_gain(mt_context *ctx, mt_params *params, const char *name, const char *suffix, mt_param **out) {
    mt_param_desc gain = {.rows = 1, .cols = HIDDEN, .init_value = 1};
    return mutants_param(ctx, params, name, suffix, gain, out);
}

static mt_status add_layer(mt_context *ctx, mt_params *params, const char *name, layer *l) {
    mt_param_desc qkv = {.rows = HIDDEN, .cols = HIDDEN, .unit = HEAD, .init_std = 0.3f};
    mt_param_desc proj = {.rows = HIDDEN, .cols = HIDDEN, .unit = HEAD, .init_std = 0.2f};
    mt_param_desc up = {.rows = FFN, .cols = HIDDEN, .init_std = 0.2f};
    mt_param_desc down = {.rows = HIDDEN, .cols = FFN, .init_std = 0.2f};
    qkv.placement = MT_SPLIT_ROWS;  /* column-parallel */
    proj.placement = MT_SPLIT_COLS; /* row-parallel */
    up.placement = MT_SPLIT_ROWS;
    down.placement = MT_SPLIT_COLS;
    MT_TRY(add_gain(ctx, params, name, "attention_norm.weight", &l->attention_gain));
    MT_TRY(mutants_param(ctx, params, name, "q.weight", qkv, &l->q));
    MT_TRY(mutants_param(ctx, params, name, "k.weight", qkv, &l->k));
    MT_TRY(mutants_param(ctx, params, name, "v.weight", qkv, &l->v));
    MT_TRY(mutants_param(ctx, params, name, "proj.weight", proj, &l->proj));
    MT_TRY(add_gain(ctx, params, name, "mlp_norm.weight", &l->mlp_gain));
    MT_TRY(mutants_param(ctx, params, name, "up.weight", up, &l->up));
    return mutants_param(ctx, params, name, "down.weight", down, &l->down);
}

static mt_status add_params(mt_context *ctx, mt_params *params, model *m) {
    mt_param_desc table = {.rows = VOCAB, .cols = HIDDEN, .init_std = 1};
    mt_param_desc positions = {.rows = SEQ, .cols = HIDDEN, .init_std = 1};
    mt_param_desc head = {.rows = VOCAB, .cols = HIDDEN, .init_std = 0.2f};
    table.placement = MT_SPLIT_ROWS; /* by vocabulary */
    head.placement = MT_SPLIT_ROWS;
    MT_TRY(mutants_param(ctx, params, "embedding", "weight", table, &m->table));
    MT_TRY(mutants_param(ctx, params, "positions", "weight", positions, &m->positions));
    MT_TRY(add_layer(ctx, params, "layers.0", &m->layers[0]));
    MT_TRY(add_layer(ctx, params, "layers.1", &m->layers[1]));
    MT_TRY(add_gain(ctx, params, "final_norm", "weight", &m->gain));
    MT_TRY(mutants_param(ctx, params, "head", "weight", head, &m->head));
    return mt_params_init(ctx, params, 1234);
}

/* ---- tokens, dropout and attention ------------------------------------------------------------------------------- */

static mt_status upload(mt_context *ctx, const mt_grid *grid, const int32_t *host, int64_t rows, mt_tensor *out) {
    MT_TRY(mt_arena_tensor(ctx, MT_I32, rows, 1, out));
    MT_TRY(mt_declare(ctx, grid->tp, *out, MT_REPLICATED));
    MT_TRY(mt_declare(ctx, grid->cp, *out, MT_SPLIT_ROWS));
    return mt_upload(ctx, host, *out);
}

/* Makes the rows of this rank from whole sequences. */
static mt_status batch_create(mt_context *ctx, const mt_grid *grid, int step, batch *b) {
    int32_t ids[MOST], targets[MOST], positions[MOST];
    memset(b, 0, sizeof *b);
    b->step = step;
    b->sequences = mutants_variant == 1 ? 1 : 2;
    b->rows = b->sequences * SEQ / grid->cp_size;
    b->layout.contiguous = mutants_variant == 1;
    b->chunk = grid->cp_size == 1 ? SEQ : SEQ / grid->cp_size / (b->layout.contiguous ? 1 : 2);
    for (int64_t row = 0; row < b->rows; row++) {
        const int64_t i = mt_context_parallel_token(&b->layout, grid->cp_rank, grid->cp_size, b->sequences, SEQ, row);
        ids[row] = mutants_token(step, i / SEQ, i % SEQ, VOCAB);
        targets[row] = mutants_token(step, i / SEQ, i % SEQ + 1, VOCAB);
        positions[row] = (int32_t)(i % SEQ);
        if (i < 5) targets[row] = -100; /* no loss: context rank 0 has fewer tokens that count */
    }
    MT_TRY(upload(ctx, grid, ids, b->rows, &b->ids));
    MT_TRY(upload(ctx, grid, targets, b->rows, &b->targets));
    return upload(ctx, grid, positions, b->rows, &b->positions);
}

/* 1 / number of tokens of all ranks that have a loss. */
static float scale_of(const mt_grid *grid, const batch *b) {
    (void)grid; /* for a mutant */
    return 1.0f / (float)(b->sequences * SEQ - 5);
}

/* The dropout of the rows [row, row + chunk) of an activation. */
static mt_dropout dropout_of(const mt_grid *grid, const batch *b, int site, int64_t row) {
    mt_dropout d = {.p = 0.1f};
    d.at.seed = 7;
    d.at.subsequence = (uint64_t)(100 * b->step + site);
    d.at.first_row = mt_context_parallel_token(&b->layout, grid->cp_rank, grid->cp_size, b->sequences, SEQ, row);
    d.at.global_cols = HIDDEN;
    return d;
}

/* out = x + dropout(y) */
static mt_status drop_add(mt_context *ctx, const mt_grid *grid, const batch *b, int site, mt_tensor y, mt_tensor x,
                          mt_tensor out) {
    for (int64_t row = 0; row < b->rows; row += b->chunk)
        MT_TRY(mt_bias_dropout_add_forward(ctx, mt_tensor_rows(y, row, b->chunk), mt_none(),
                                           mt_tensor_rows(x, row, b->chunk), dropout_of(grid, b, site, row),
                                           mt_tensor_rows(out, row, b->chunk)));
    return MT_SUCCESS;
}

static mt_status drop_backward(mt_context *ctx, const mt_grid *grid, const batch *b, int site, mt_tensor dx,
                               mt_tensor dy) {
    for (int64_t row = 0; row < b->rows; row += b->chunk)
        MT_TRY(mt_bias_dropout_add_backward(ctx, mt_tensor_rows(dx, row, b->chunk), dropout_of(grid, b, site, row),
                                            mt_tensor_rows(dy, row, b->chunk), mt_none()));
    return MT_SUCCESS;
}

/* This rank's heads of whole sequences. */
static mt_attention_desc attention_of(const mt_grid *grid, const batch *b) {
    mt_attention_desc d = {.batch = b->sequences, .seq = SEQ, .head_dim = HEAD, .heads_per_group = 1};
    d.groups = HEADS / grid->tp_size;
    return d;
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* Attention of this rank's queries to the keys up to their own. A sequence is one part of a context rank after the
   other. */
static mt_attention_desc own_attention(const mt_grid *grid, const batch *b) {
    mt_attention_desc d = attention_of(grid, b);
    d.seq = b->rows;
    d.kv_seq = (grid->cp_rank + 1) * b->rows; /* the last query and the last key have the same position */
    return d;
}

static mt_status own_forward(mt_context *ctx, const mt_grid *grid, const batch *b, layer_saved *s) {
    mt_attention_desc d = own_attention(grid, b);
    mt_arena_request memory[] = {{&s->all_k, MT_F32, SEQ, s->k.cols}, {&s->all_v, MT_F32, SEQ, s->v.cols}};
    MT_TRY(mt_arena_tensors(ctx, memory, 2));
    MT_TRY(mt_gather_from_sequence_region(ctx, grid->cp, s->k, s->all_k)); /* all-gather */
    MT_TRY(mt_gather_from_sequence_region(ctx, grid->cp, s->v, s->all_v));
    return mt_dot_product_attention_forward(ctx, &d, s->q, mt_tensor_rows(s->all_k, 0, d.kv_seq),
                                            mt_tensor_rows(s->all_v, 0, d.kv_seq), s->core, s->lse);
}

static mt_status own_backward(mt_context *ctx, const mt_grid *grid, const batch *b, mt_tensor dcore, mt_tensor dq,
                              mt_tensor dk, mt_tensor dv, const layer_saved *s) {
    mt_attention_desc d = own_attention(grid, b);
    mt_tensor all_dk, all_dv;
    mt_arena_request memory[] = {{&all_dk, MT_F32, SEQ, dk.cols}, {&all_dv, MT_F32, SEQ, dv.cols}};
    MT_TRY(mt_arena_tensors(ctx, memory, 2));
    MT_TRY(mt_fill(ctx, all_dk, 0));
    MT_TRY(mt_fill(ctx, all_dv, 0));
    MT_TRY(mt_dot_product_attention_backward(ctx, &d, s->q, mt_tensor_rows(s->all_k, 0, d.kv_seq),
                                             mt_tensor_rows(s->all_v, 0, d.kv_seq), s->core, s->lse, dcore, dq,
                                             mt_tensor_rows(all_dk, 0, d.kv_seq), mt_tensor_rows(all_dv, 0, d.kv_seq)));
    MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, grid->cp, all_dk, dk)); /* reduce-scatter */
    return mt_reduce_scatter_to_sequence_region(ctx, grid->cp, all_dv, dv);
}

static mt_status core_forward(mt_context *ctx, const mt_grid *grid, int number, const batch *b, layer_saved *s) {
    mt_attention_desc d = attention_of(grid, b);
    if (is_own(number)) return own_forward(ctx, grid, b, s);
    return mt_context_parallel_attention_forward(ctx, grid->cp, &b->layout, &d, s->q, s->k, s->v, s->core, s->lse);
}

static mt_status core_backward(mt_context *ctx, const mt_grid *grid, int number, const batch *b, mt_tensor dcore,
                               mt_tensor dq, mt_tensor dk, mt_tensor dv, const layer_saved *s) {
    mt_attention_desc d = attention_of(grid, b);
    if (is_own(number)) return own_backward(ctx, grid, b, dcore, dq, dk, dv, s);
    return mt_context_parallel_attention_backward(ctx, grid->cp, &b->layout, &d, s->q, s->k, s->v, s->core, s->lse,
                                                  dcore, dq, dk, dv);
}

/* x1 = x + dropout(g(attention(f(norm(x))))) */
static mt_status attention_forward(mt_context *ctx, const mt_grid *grid, const model *m, int number, const batch *b,
                                   mt_tensor x, layer_saved *s) {
    const layer *l = &m->layers[number];
    const int64_t cols = l->q->value.rows;
    mt_tensor y;
    mt_arena_request memory[] = {
        {&s->stats, MT_F32, b->rows, 2},         {&s->n, MT_F32, b->rows, HIDDEN},  {&s->q, MT_F32, b->rows, cols},
        {&s->k, MT_F32, b->rows, cols},          {&s->v, MT_F32, b->rows, cols},    {&s->core, MT_F32, b->rows, cols},
        {&s->lse, MT_F32, cols / HEAD, b->rows}, {&s->x1, MT_F32, b->rows, HIDDEN}, {&y, MT_F32, b->rows, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, memory, 9));
    s->x = x;
    MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, x, l->attention_gain->value, mt_none(), 1e-5f, s->n, s->stats));
    MT_TRY(mt_copy_to_tensor_region_forward(ctx, grid->tp, s->n)); /* f */
    MT_TRY(mt_linear_forward(ctx, s->n, l->q->value, mt_none(), s->q));
    MT_TRY(mt_linear_forward(ctx, s->n, l->k->value, mt_none(), s->k));
    MT_TRY(mt_linear_forward(ctx, s->n, l->v->value, mt_none(), s->v));
    MT_TRY(core_forward(ctx, grid, number, b, s));
    MT_TRY(mt_linear_forward(ctx, s->core, l->proj->value, mt_none(), y));
    MT_TRY(mt_reduce_from_tensor_region_forward(ctx, grid->tp, y)); /* g */
    return drop_add(ctx, grid, b, number, y, x, s->x1);
}

/* Replaces dx, the gradient of x1, by that of x. */
static mt_status attention_backward(mt_context *ctx, const mt_grid *grid, const model *m, int number, const batch *b,
                                    mt_tensor dx, const layer_saved *s) {
    const layer *l = &m->layers[number];
    const int64_t cols = s->q.cols;
    mt_tensor dy, dcore, dq, dk, dv, dn;
    mt_arena_request memory[] = {{&dy, MT_F32, b->rows, HIDDEN}, {&dcore, MT_F32, b->rows, cols},
                                 {&dq, MT_F32, b->rows, cols},   {&dk, MT_F32, b->rows, cols},
                                 {&dv, MT_F32, b->rows, cols},   {&dn, MT_F32, b->rows, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, memory, 6));
    MT_TRY(drop_backward(ctx, grid, b, number, dx, dy));
    MT_TRY(mt_linear_gradients(ctx, dy, s->core, l->proj->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dy, l->proj->value, 0, dcore));
    MT_TRY(core_backward(ctx, grid, number, b, dcore, dq, dk, dv, s));
    MT_TRY(mt_linear_gradients(ctx, dq, s->n, l->q->grad, mt_none()));
    MT_TRY(mt_linear_gradients(ctx, dk, s->n, l->k->grad, mt_none()));
    MT_TRY(mt_linear_gradients(ctx, dv, s->n, l->v->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dq, l->q->value, 0, dn));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dk, l->k->value, 1, dn));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dv, l->v->value, 1, dn));
    MT_TRY(mt_copy_to_tensor_region_backward(ctx, grid->tp, dn)); /* f */
    return mt_norm_backward(ctx, MT_RMS_NORM, s->x, l->attention_gain->value, s->stats, dn, dx, dx,
                            l->attention_gain->grad, mt_none());
}

/* ---- MLP --------------------------------------------------------------------------------------------------------- */

/* y = x1 + g(mlp(f(norm(x1)))) */
static mt_status mlp_forward(mt_context *ctx, const mt_grid *grid, const model *m, int number, const batch *b,
                             mt_tensor y, layer_saved *s) {
    const layer *l = &m->layers[number];
    mt_tensor sum;
    mt_arena_request memory[] = {{&s->stats1, MT_F32, b->rows, 2},
                                 {&s->n1, MT_F32, b->rows, HIDDEN},
                                 {&s->h, MT_F32, b->rows, l->up->value.rows},
                                 {&s->a, MT_F32, b->rows, l->up->value.rows},
                                 {&sum, MT_F32, b->rows, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, memory, 5));
    MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, s->x1, l->mlp_gain->value, mt_none(), 1e-5f, s->n1, s->stats1));
    MT_TRY(mt_copy_to_tensor_region_forward(ctx, grid->tp, s->n1)); /* f */
    MT_TRY(mt_linear_forward(ctx, s->n1, l->up->value, mt_none(), s->h));
    MT_TRY(mt_activation_forward(ctx, MT_GELU_ERF, s->h, mt_none(), s->a));
    MT_TRY(mt_linear_forward(ctx, s->a, l->down->value, mt_none(), sum));
    MT_TRY(mt_reduce_from_tensor_region_forward(ctx, grid->tp, sum)); /* g */
    return mt_add(ctx, s->x1, sum, y);
}

/* Replaces dx, the gradient of y, by that of x1. */
static mt_status mlp_backward(mt_context *ctx, const mt_grid *grid, const model *m, int number, const batch *b,
                              mt_tensor dx, const layer_saved *s) {
    const layer *l = &m->layers[number];
    mt_tensor da, dh, dn;
    mt_arena_request memory[] = {
        {&da, MT_F32, b->rows, s->a.cols}, {&dh, MT_F32, b->rows, s->h.cols}, {&dn, MT_F32, b->rows, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, memory, 3));
    MT_TRY(mt_linear_gradients(ctx, dx, s->a, l->down->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dx, l->down->value, 0, da));
    MT_TRY(mt_activation_backward(ctx, MT_GELU_ERF, s->h, da, dh, mt_none()));
    MT_TRY(mt_linear_gradients(ctx, dh, s->n1, l->up->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dh, l->up->value, 0, dn));
    MT_TRY(mt_copy_to_tensor_region_backward(ctx, grid->tp, dn)); /* f */
    return mt_norm_backward(ctx, MT_RMS_NORM, s->x1, l->mlp_gain->value, s->stats1, dn, dx, dx, l->mlp_gain->grad,
                            mt_none());
}

/* ---- embedding and head ------------------------------------------------------------------------------------------ */

static mt_status embedding_forward(mt_context *ctx, const mt_grid *grid, const model *m, const batch *b, mt_tensor x) {
    int64_t first_row = grid->tp_rank * m->table->value.rows;
    mt_tensor of_positions;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b->rows, HIDDEN, &of_positions));
    MT_TRY(mt_embedding_forward(ctx, m->table->value, first_row, (const int32_t *)b->ids.data, 0, x));
    MT_TRY(mt_reduce_from_tensor_region_forward(ctx, grid->tp, x)); /* g */
    MT_TRY(mt_embedding_forward(ctx, m->positions->value, 0, (const int32_t *)b->positions.data, 0, of_positions));
    return mt_add(ctx, x, of_positions, x);
}

static mt_status embedding_backward(mt_context *ctx, const mt_grid *grid, const model *m, const batch *b,
                                    mt_tensor dx) {
    int64_t first_row = grid->tp_rank * m->table->value.rows;
    MT_TRY(mt_embedding_backward(ctx, dx, 0, (const int32_t *)b->positions.data, m->positions->grad));
    return mt_embedding_backward(ctx, dx, first_row, (const int32_t *)b->ids.data, m->table->grad);
}

static mt_cross_entropy_shard_desc vocabulary_of(const mt_grid *grid, const model *m) {
    mt_cross_entropy_shard_desc d = {.vocab = VOCAB};
    d.first_col = grid->tp_rank * m->head->value.rows;
    return d;
}

/* loss [1, rows] = the cross-entropy of this rank's tokens */
static mt_status head_forward(mt_context *ctx, const mt_grid *grid, const model *m, const batch *b, mt_tensor x,
                              mt_tensor loss, saved *s) {
    const int32_t *targets = (const int32_t *)b->targets.data;
    mt_cross_entropy_shard_desc d = vocabulary_of(grid, m);
    mt_tensor part, all;
    mt_arena_request memory[] = {{&s->stats, MT_F32, b->rows, 2},
                                 {&s->n, MT_F32, b->rows, HIDDEN},
                                 {&s->logits, MT_F32, b->rows, m->head->value.rows},
                                 {&s->lse, MT_F32, 2, b->rows},
                                 {&part, MT_F32, b->rows, 4},
                                 {&all, MT_F32, grid->tp_size * b->rows, 4}};
    MT_TRY(mt_arena_tensors(ctx, memory, 6));
    s->x = x;
    MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, x, m->gain->value, mt_none(), 1e-5f, s->n, s->stats));
    MT_TRY(mt_copy_to_tensor_region_forward(ctx, grid->tp, s->n)); /* f */
    MT_TRY(mt_linear_forward(ctx, s->n, m->head->value, mt_none(), s->logits));
    MT_TRY(mt_cross_entropy_stats(ctx, &d, s->logits, targets, part));
    MT_TRY(mt_all_gather(ctx, grid->tp, part.data, all.data, (size_t)b->rows * 4, MT_F32)); /* all-gather */
    return mt_cross_entropy_combine(ctx, &d, all, grid->tp_size, targets, loss, s->lse);
}

static mt_status head_backward(mt_context *ctx, const mt_grid *grid, const model *m, const batch *b, mt_tensor dx,
                               const saved *s) {
    const int32_t *targets = (const int32_t *)b->targets.data;
    mt_cross_entropy_shard_desc d = vocabulary_of(grid, m);
    mt_tensor dn;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b->rows, HIDDEN, &dn));
    MT_TRY(mt_cross_entropy_backward(ctx, &d, s->logits, targets, s->lse, mt_none(), scale_of(grid, b)));
    MT_TRY(mt_linear_gradients(ctx, s->logits, s->n, m->head->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, s->logits, m->head->value, 0, dn));
    MT_TRY(mt_copy_to_tensor_region_backward(ctx, grid->tp, dn)); /* f */
    return mt_norm_backward(ctx, MT_RMS_NORM, s->x, m->gain->value, s->stats, dn, mt_none(), dx, m->gain->grad,
                            mt_none());
}

/* ---- training ---------------------------------------------------------------------------------------------------- */

/* Forward and backward. loss [1, rows] of this rank. */
static mt_status forward_backward(mt_context *ctx, const mt_grid *grid, const model *m, const batch *b,
                                  mt_tensor *loss) {
    mt_tensor x[LAYERS + 1], dx;
    saved s;
    for (int i = 0; i <= LAYERS; i++) MT_TRY(mt_arena_tensor(ctx, MT_F32, b->rows, HIDDEN, &x[i]));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b->rows, HIDDEN, &dx));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, b->rows, loss));
    MT_TRY(embedding_forward(ctx, grid, m, b, x[0]));
    for (int i = 0; i < LAYERS; i++) {
        MT_TRY(attention_forward(ctx, grid, m, i, b, x[i], &s.layers[i]));
        MT_TRY(mlp_forward(ctx, grid, m, i, b, x[i + 1], &s.layers[i]));
    }
    MT_TRY(head_forward(ctx, grid, m, b, x[LAYERS], *loss, &s));
    MT_TRY(head_backward(ctx, grid, m, b, dx, &s));
    for (int i = LAYERS; i-- > 0;) {
        MT_TRY(mlp_backward(ctx, grid, m, i, b, dx, &s.layers[i]));
        MT_TRY(attention_backward(ctx, grid, m, i, b, dx, &s.layers[i]));
    }
    return embedding_backward(ctx, grid, m, b, dx);
}

static mt_status train_step(mt_context *ctx, const mt_grid *grid, mt_params *params, const model *m, int step,
                            mt_optimizer *adamw, mutants_result *result) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor loss;
    float norm;
    batch b;
    MT_TRY(batch_create(ctx, grid, step, &b));
    MT_TRY(mt_params_zero_grad(ctx, params));
    MT_TRY(forward_backward(ctx, grid, m, &b, &loss));
    MT_TRY(mutants_loss(ctx, result, loss, scale_of(grid, &b)));
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
    MT_TRY(add_params(ctx, params, &m));
    status = train(ctx, grid, params, &m, &adamw, result);
    mt_optimizer_destroy(ctx, &adamw);
    mt_arena_release(ctx, mark);
    return status;
}
