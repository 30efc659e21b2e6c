/* bert_block.c - an encoder with post-norm layers of the column- and row-parallel layers of mt_parallel.h, and a
   classifier of the first token whose weights every rank has. 2 tensor and 2 data ranks. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

static const mt_grid_desc program_grid = {.tp = 2};

#include "batch.h"
#include "mutants.h"

enum { SEQ = 16, SEQUENCES = 8, STEPS = 2, LAYERS = 2, VOCAB = 40, CLASSES = 3 };
enum { HIDDEN = 32, HEADS = 4, HEAD = HIDDEN / HEADS, FFN = 4 * HIDDEN };
#define SCALE (1.0f / SEQUENCES) /* 1 / sequences of the global batch */

typedef struct layer {
    mt_column_parallel_linear qkv, fc1;
    mt_row_parallel_linear proj, fc2;
    mt_param *gain, *bias, *mlp_gain, *mlp_bias;
} layer;

typedef struct model {
    mt_vocab_parallel_embedding table;
    mt_param *positions, *gain, *bias, *pooler, *pooler_bias, *head, *head_bias;
    layer layers[LAYERS];
} model;

typedef struct layer_saved {
    mt_linear_saved qkv_in, proj_in, fc1_in, fc2_in;
    mt_tensor qkv, core, lse, sum, stats, n, h, a, sum1, stats1;
} layer_saved;

typedef struct saved {
    layer_saved layers[LAYERS];
    mt_tensor x, stats;                 /* of the norm of the embedding */
    mt_tensor first, pooled, h, logits; /* of the head, a row for each sequence */
} saved;

/* ---- parameters -------------------------------------------------------------------------------------------------- */

static mt_status add_layer(mt_context *ctx, mt_params *params, const char *names[4], const char *name, layer *l) {
    mt_param_desc gain = {.rows = 1, .cols = HIDDEN, .init_value = 1};
    mt_param_desc bias = {.rows = 1, .cols = HIDDEN, .init_std = 0.1f};
    mt_linear_desc qkv = {.in_features = HIDDEN, .out_features = 3 * HIDDEN, .unit = 3 * HEAD, .init_std = 0.2f};
    mt_linear_desc proj = {.in_features = HIDDEN, .out_features = HIDDEN, .unit = HEAD, .init_std = 0.2f};
    mt_linear_desc fc1 = {.in_features = HIDDEN, .out_features = FFN, .init_std = 0.2f};
    mt_linear_desc fc2 = {.in_features = FFN, .out_features = HIDDEN, .init_std = 0.1f};
    proj.input_is_parallel = 1;
    proj.skip_bias_add = 1;
    fc1.skip_bias_add = 1;
    fc2.input_is_parallel = 1;
    fc2.skip_bias_add = 1;
    MT_TRY(mt_column_parallel_linear_create(ctx, params, names[0], &qkv, &l->qkv));
    MT_TRY(mt_row_parallel_linear_create(ctx, params, names[1], &proj, &l->proj));
    MT_TRY(mutants_param(ctx, params, name, "attention_norm.weight", gain, &l->gain));
    MT_TRY(mutants_param(ctx, params, name, "attention_norm.bias", bias, &l->bias));
    MT_TRY(mt_column_parallel_linear_create(ctx, params, names[2], &fc1, &l->fc1));
    MT_TRY(mt_row_parallel_linear_create(ctx, params, names[3], &fc2, &l->fc2));
    MT_TRY(mutants_param(ctx, params, name, "mlp_norm.weight", gain, &l->mlp_gain));
    return mutants_param(ctx, params, name, "mlp_norm.bias", bias, &l->mlp_bias);
}

static mt_status add_params(mt_context *ctx, mt_params *params, model *m) {
    const char *names[LAYERS][4] = {{"layers.0.qkv", "layers.0.proj", "layers.0.fc1", "layers.0.fc2"},
                                    {"layers.1.qkv", "layers.1.proj", "layers.1.fc1", "layers.1.fc2"}};
    mt_embedding_desc table = {.vocab = VOCAB, .features = HIDDEN, .init_std = 1};
    mt_param_desc positions = {.rows = SEQ, .cols = HIDDEN, .init_std = 0.5f};
    mt_param_desc gain = {.rows = 1, .cols = HIDDEN, .init_value = 1};
    mt_param_desc bias = {.rows = 1, .cols = HIDDEN, .init_std = 0.1f};
    mt_param_desc pooler = {.rows = HIDDEN, .cols = HIDDEN, .init_std = 0.2f};
    mt_param_desc head = {.rows = CLASSES, .cols = HIDDEN, .init_std = 0.5f};
    mt_param_desc head_bias = {.rows = 1, .cols = CLASSES, .init_std = 0.1f};
    MT_TRY(mt_vocab_parallel_embedding_create(ctx, params, "embedding", &table, &m->table));
    MT_TRY(mutants_param(ctx, params, "positions", "weight", positions, &m->positions));
    MT_TRY(mutants_param(ctx, params, "embedding_norm", "weight", gain, &m->gain));
    MT_TRY(mutants_param(ctx, params, "embedding_norm", "bias", bias, &m->bias));
    MT_TRY(add_layer(ctx, params, names[0], "layers.0", &m->layers[0]));
    MT_TRY(add_layer(ctx, params, names[1], "layers.1", &m->layers[1]));
    MT_TRY(mutants_param(ctx, params, "pooler", "weight", pooler, &m->pooler));
    MT_TRY(mutants_param(ctx, params, "pooler", "bias", bias, &m->pooler_bias));
    MT_TRY(mutants_param(ctx, params, "head", "weight", head, &m->head));
    MT_TRY(mutants_param(ctx, params, "head", "bias", head_bias, &m->head_bias));
    return mt_params_init(ctx, params, 1234);
}

/* ---- a layer ----------------------------------------------------------------------------------------------------- */

static mt_dropout hidden_dropout(const mutants_batch *b, int site) {
    mt_dropout d = {.p = 0.1f};
    d.at.seed = 7;
    d.at.subsequence = (uint64_t)(100 * b->step + site);
    d.at.first_row = b->first_token;
    d.at.global_cols = HIDDEN;
    return d;
}

/* This rank's heads. */
static mt_attention_desc attention_of(const mt_grid *grid, const mutants_batch *b) {
    mt_attention_desc d = {.batch = b->sequences, .seq = SEQ, .heads_per_group = 1, .head_dim = HEAD};
    d.groups = HEADS / grid->tp_size;
    d.scores.mask = MT_MASK_BIDIRECTIONAL;
    return d;
}

static mt_status layer_tensors(mt_context *ctx, const layer *l, const mt_attention_desc *d, int64_t tokens,
                               layer_saved *s) {
    mt_arena_request memory[] = {{&s->qkv, MT_F32, tokens, l->qkv.local_features},
                                 {&s->core, MT_F32, tokens, l->proj.local_features},
                                 {&s->lse, MT_F32, d->groups, tokens},
                                 {&s->sum, MT_F32, tokens, HIDDEN},
                                 {&s->stats, MT_F32, tokens, 2},
                                 {&s->n, MT_F32, tokens, HIDDEN},
                                 {&s->h, MT_F32, tokens, l->fc1.local_features},
                                 {&s->a, MT_F32, tokens, l->fc2.local_features},
                                 {&s->sum1, MT_F32, tokens, HIDDEN},
                                 {&s->stats1, MT_F32, tokens, 2}};
    return mt_arena_tensors(ctx, memory, 10);
}

/* n = norm(x + dropout(attention(x))), y = norm(n + dropout(mlp(n))) */
static mt_status layer_forward(mt_context *ctx, const mt_grid *grid, const model *m, int number, const mutants_batch *b,
                               mt_tensor x, mt_tensor y, layer_saved *s) {
    const layer *l = &m->layers[number];
    mt_attention_desc d = attention_of(grid, b);
    mt_tensor z;
    MT_TRY(layer_tensors(ctx, l, &d, b->tokens, s));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b->tokens, HIDDEN, &z));
    MT_TRY(mt_parallel_linear_forward(ctx, &l->qkv, x, s->qkv, &s->qkv_in));
    MT_TRY(mt_attention_forward(ctx, &d, s->qkv, s->core, s->lse));
    MT_TRY(mt_parallel_linear_forward(ctx, &l->proj, s->core, z, &s->proj_in));
    MT_TRY(mt_bias_dropout_add_forward(ctx, z, l->proj.bias->value, x, hidden_dropout(b, 2 * number), s->sum));
    MT_TRY(mt_norm_forward(ctx, MT_LAYER_NORM, s->sum, l->gain->value, l->bias->value, 1e-5f, s->n, s->stats));
    MT_TRY(mt_parallel_linear_forward(ctx, &l->fc1, s->n, s->h, &s->fc1_in));
    MT_TRY(mt_activation_forward(ctx, MT_GELU_ERF, s->h, l->fc1.bias->value, s->a));
    MT_TRY(mt_parallel_linear_forward(ctx, &l->fc2, s->a, z, &s->fc2_in));
    MT_TRY(mt_bias_dropout_add_forward(ctx, z, l->fc2.bias->value, s->n, hidden_dropout(b, 2 * number + 1), s->sum1));
    return mt_norm_forward(ctx, MT_LAYER_NORM, s->sum1, l->mlp_gain->value, l->mlp_bias->value, 1e-5f, y, s->stats1);
}

/* Replaces dx, the gradient of y, by that of x. */
static mt_status layer_backward(mt_context *ctx, const mt_grid *grid, const model *m, int number,
                                const mutants_batch *b, mt_tensor dx, const layer_saved *s) {
    const layer *l = &m->layers[number];
    mt_attention_desc d = attention_of(grid, b);
    mt_tensor dz, dn, da, dh, dcore, dqkv;
    mt_arena_request memory[] = {{&dz, MT_F32, b->tokens, HIDDEN},          {&dn, MT_F32, b->tokens, HIDDEN},
                                 {&da, MT_F32, b->tokens, s->a.cols},       {&dh, MT_F32, b->tokens, s->h.cols},
                                 {&dcore, MT_F32, b->tokens, s->core.cols}, {&dqkv, MT_F32, b->tokens, s->qkv.cols}};
    MT_TRY(mt_arena_tensors(ctx, memory, 6));
    MT_TRY(mt_norm_backward(ctx, MT_LAYER_NORM, s->sum1, l->mlp_gain->value, s->stats1, dx, mt_none(), dx,
                            l->mlp_gain->grad, l->mlp_bias->grad));
    MT_TRY(mt_bias_dropout_add_backward(ctx, dx, hidden_dropout(b, 2 * number + 1), dz, l->fc2.bias->grad));
    MT_TRY(mt_parallel_linear_backward(ctx, &l->fc2, dz, da, &s->fc2_in));
    MT_TRY(mt_activation_backward(ctx, MT_GELU_ERF, s->h, da, dh, l->fc1.bias->grad));
    MT_TRY(mt_parallel_linear_backward(ctx, &l->fc1, dh, dn, &s->fc1_in));
    MT_TRY(mt_add(ctx, dn, dx, dn));
    MT_TRY(mt_norm_backward(ctx, MT_LAYER_NORM, s->sum, l->gain->value, s->stats, dn, mt_none(), dn, l->gain->grad,
                            l->bias->grad));
    MT_TRY(mt_bias_dropout_add_backward(ctx, dn, hidden_dropout(b, 2 * number), dz, l->proj.bias->grad));
    MT_TRY(mt_parallel_linear_backward(ctx, &l->proj, dz, dcore, &s->proj_in));
    MT_TRY(mt_attention_backward(ctx, &d, s->qkv, s->core, s->lse, dcore, dqkv));
    MT_TRY(mt_parallel_linear_backward(ctx, &l->qkv, dqkv, dx, &s->qkv_in));
    return mt_add(ctx, dx, dn, dx);
}

/* ---- embedding --------------------------------------------------------------------------------------------------- */

/* x = dropout(norm(table[ids] + positions)) */
static mt_status embedding_forward(mt_context *ctx, const model *m, const mutants_batch *b, mt_tensor x, saved *s) {
    mt_tensor places;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, b->tokens, 1, &places));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b->tokens, HIDDEN, &s->x));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b->tokens, 2, &s->stats));
    MT_TRY(mt_position_ids(ctx, b->first_token, SEQ, NULL, 0, (int32_t *)places.data, b->tokens));
    MT_TRY(mt_vocab_parallel_embedding_forward(ctx, &m->table, (const int32_t *)b->ids.data, b->tokens, s->x));
    MT_TRY(mt_embedding_forward(ctx, m->positions->value, 0, (const int32_t *)places.data, 1, s->x));
    MT_TRY(mt_norm_forward(ctx, MT_LAYER_NORM, s->x, m->gain->value, m->bias->value, 1e-5f, x, s->stats));
    return mt_bias_dropout_add_forward(ctx, x, mt_none(), mt_none(), hidden_dropout(b, 2 * LAYERS), x);
}

static mt_status embedding_backward(mt_context *ctx, const model *m, const mutants_batch *b, mt_tensor dx,
                                    const saved *s) {
    mt_tensor places;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, b->tokens, 1, &places));
    MT_TRY(mt_position_ids(ctx, b->first_token, SEQ, NULL, 0, (int32_t *)places.data, b->tokens));
    MT_TRY(mt_bias_dropout_add_backward(ctx, dx, hidden_dropout(b, 2 * LAYERS), dx, mt_none()));
    MT_TRY(mt_norm_backward(ctx, MT_LAYER_NORM, s->x, m->gain->value, s->stats, dx, mt_none(), dx, m->gain->grad,
                            m->bias->grad));
    MT_TRY(mt_embedding_backward(ctx, dx, 0, (const int32_t *)places.data, m->positions->grad));
    return mt_vocab_parallel_embedding_backward(ctx, &m->table, (const int32_t *)b->ids.data, b->tokens, dx);
}

/* ---- head -------------------------------------------------------------------------------------------------------- */

/* The first token of each sequence, as a view. */
static mt_tensor first_tokens(mt_tensor x, int64_t sequences) {
    x.rows = sequences;
    x.ld = SEQ * HIDDEN;
    return x;
}

/* The class of a sequence is its first token modulo CLASSES. */
static mt_status classes_of(mt_context *ctx, const mutants_batch *b, mt_tensor *classes) {
    int32_t host[SEQUENCES];
    MT_TRY(mt_arena_tensor(ctx, MT_I32, b->sequences, 1, classes));
    for (int i = 0; i < b->sequences; i++) host[i] = mutants_token(b->step, b->first_sequence + i, 0, VOCAB) % CLASSES;
    return mt_upload(ctx, host, *classes);
}

/* loss [1, sequences], and s->logits, which becomes its gradient times SCALE. Every tensor rank computes the same. */
static mt_status head_forward(mt_context *ctx, const model *m, const mutants_batch *b, mt_tensor x, mt_tensor classes,
                              mt_tensor loss, saved *s) {
    mt_cross_entropy_shard_desc d = {.vocab = CLASSES};
    mt_arena_request memory[] = {{&s->h, MT_F32, b->sequences, HIDDEN},
                                 {&s->pooled, MT_F32, b->sequences, HIDDEN},
                                 {&s->logits, MT_F32, b->sequences, CLASSES}};
    MT_TRY(mt_arena_tensors(ctx, memory, 3));
    s->first = first_tokens(x, b->sequences);
    MT_TRY(mt_linear_forward(ctx, s->first, m->pooler->value, mt_none(), s->h));
    MT_TRY(mt_activation_forward(ctx, MT_TANH, s->h, m->pooler_bias->value, s->pooled));
    MT_TRY(mt_linear_forward(ctx, s->pooled, m->head->value, m->head_bias->value, s->logits));
    return mt_cross_entropy_forward_backward(ctx, &d, s->logits, (const int32_t *)classes.data, mt_none(), SCALE, loss);
}

/* Computes dx: it is 0 for all tokens except the first ones. */
static mt_status head_backward(mt_context *ctx, const model *m, const mutants_batch *b, mt_tensor dx, const saved *s) {
    mt_tensor dpooled, dh;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b->sequences, HIDDEN, &dpooled));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b->sequences, HIDDEN, &dh));
    MT_TRY(mt_linear_gradients(ctx, s->logits, s->pooled, m->head->grad, m->head_bias->grad));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, s->logits, m->head->value, 0, dpooled));
    MT_TRY(mt_activation_backward(ctx, MT_TANH, s->h, dpooled, dh, m->pooler_bias->grad));
    MT_TRY(mt_linear_gradients(ctx, dh, s->first, m->pooler->grad, mt_none()));
    MT_TRY(mt_fill(ctx, dx, 0));
    return mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dh, m->pooler->value, 0, first_tokens(dx, b->sequences));
}

/* ---- training ---------------------------------------------------------------------------------------------------- */

/* Forward and backward. loss [1, sequences] of this data rank. */
static mt_status forward_backward(mt_context *ctx, const mt_grid *grid, const model *m, int step, mt_tensor *loss) {
    mt_tensor x[LAYERS + 1], dx, classes;
    mutants_batch b;
    saved s;
    MT_TRY(mutants_batch_create(ctx, grid, step, 0, SEQUENCES, SEQ, VOCAB, &b));
    MT_TRY(classes_of(ctx, &b, &classes));
    MT_TRY(mt_declare(ctx, grid->tp, b.ids, MT_REPLICATED));
    MT_TRY(mt_declare(ctx, grid->dp, b.ids, MT_SPLIT_ROWS));
    MT_TRY(mt_declare(ctx, grid->tp, classes, MT_REPLICATED));
    MT_TRY(mt_declare(ctx, grid->dp, classes, MT_SPLIT_ROWS));
    for (int i = 0; i <= LAYERS; i++) MT_TRY(mt_arena_tensor(ctx, MT_F32, b.tokens, HIDDEN, &x[i]));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b.tokens, HIDDEN, &dx));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, b.sequences, loss));
    MT_TRY(embedding_forward(ctx, m, &b, x[0], &s));
    for (int i = 0; i < LAYERS; i++) MT_TRY(layer_forward(ctx, grid, m, i, &b, x[i], x[i + 1], &s.layers[i]));
    MT_TRY(head_forward(ctx, m, &b, x[LAYERS], classes, *loss, &s));
    MT_TRY(head_backward(ctx, m, &b, dx, &s));
    for (int i = LAYERS; i-- > 0;) MT_TRY(layer_backward(ctx, grid, m, i, &b, dx, &s.layers[i]));
    return embedding_backward(ctx, m, &b, dx, &s);
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
    mt_optimizer_desc desc = {.eps = 1e-5f, .weight_decay = 0.1f};
    MT_TRY(mt_optimizer_create(ctx, params, &desc, adamw));
    for (int step = 0; step < STEPS; step++) MT_TRY(train_step(ctx, grid, params, m, step, adamw, result));
    return MT_SUCCESS;
}

static mt_status program(mt_context *ctx, const mt_grid *grid, mt_params *params, mutants_result *result) {
    mt_optimizer adamw = {.step = 0};
    mt_status status;
    model m;
    MT_TRY(add_params(ctx, params, &m));
    status = train(ctx, grid, params, &m, &adamw, result);
    mt_optimizer_destroy(ctx, &adamw);
    return status;
}
