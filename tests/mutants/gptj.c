/* gptj.c - a GPT as GPT-J: attention and MLP of a layer read the same norm and share f and g. Rotary embedding, a
   vocabulary-parallel embedding and an untied vocabulary-parallel head; 2 tensor and 2 data ranks, 2 micro-batches. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

static const mt_grid_desc program_grid = {.tp = 2};

#include "batch.h"
#include "mutants.h"

enum { SEQ = 16, SEQUENCES = 4, MICRO_BATCHES = 2, STEPS = 3, LAYERS = 2, VOCAB = 40 };
enum { HIDDEN = 32, HEADS = 4, HEAD = HIDDEN / HEADS, ROTARY = 4, FFN = 4 * HIDDEN };

#define SCALE (1.0f / (MICRO_BATCHES * SEQUENCES * SEQ)) /* 1 / tokens of the global batch */

typedef struct layer {
    mt_param *gain, *bias, *qkv, *proj, *proj_bias, *fc1, *fc1_bias, *fc2, *fc2_bias;
} layer;

typedef struct model {
    mt_param *table, *gain, *bias, *head, *head_bias;
    layer layers[LAYERS];
    mt_tensor rotary;
} model;

typedef struct layer_saved {
    mt_tensor x, stats, n, qkv, core, lse, h, a;
} layer_saved;

typedef struct saved {
    layer_saved layers[LAYERS];
    mt_tensor x, stats, n, logits, lse; /* of the head */
} saved;

/* ---- parameters -------------------------------------------------------------------------------------------------- */

static mt_status add_layer(mt_context *ctx, mt_params *params, const char *name, layer *l) {
    mt_param_desc gain = {.rows = 1, .cols = HIDDEN, .init_value = 1};
    mt_param_desc bias = {.rows = 1, .cols = HIDDEN, .init_std = 0.1f};
    mt_param_desc qkv = {.rows = 3 * HIDDEN, .cols = HIDDEN, .unit = 3 * HEAD, .init_std = 0.2f, .weight_decay = 1};
    mt_param_desc proj = {.rows = HIDDEN, .cols = HIDDEN, .unit = HEAD, .init_std = 0.2f, .weight_decay = 1};
    mt_param_desc fc1 = {.rows = FFN, .cols = HIDDEN, .init_std = 0.2f, .weight_decay = 1};
    mt_param_desc fc1_bias = {.rows = 1, .cols = FFN, .init_std = 0.1f};
    mt_param_desc fc2 = {.rows = HIDDEN, .cols = FFN, .init_std = 0.1f, .weight_decay = 1};
    qkv.placement = MT_SPLIT_ROWS;  /* column-parallel */
    proj.placement = MT_SPLIT_COLS; /* row-parallel */
    fc1.placement = MT_SPLIT_ROWS;
    fc1_bias.placement = MT_SPLIT_COLS;
    fc2.placement = MT_SPLIT_COLS;
    MT_TRY(mutants_param(ctx, params, name, "norm.weight", gain, &l->gain));
    MT_TRY(mutants_param(ctx, params, name, "norm.bias", bias, &l->bias));
    MT_TRY(mutants_param(ctx, params, name, "qkv.weight", qkv, &l->qkv));
    MT_TRY(mutants_param(ctx, params, name, "proj.weight", proj, &l->proj));
    MT_TRY(mutants_param(ctx, params, name, "proj.bias", bias, &l->proj_bias));
    MT_TRY(mutants_param(ctx, params, name, "fc1.weight", fc1, &l->fc1));
    MT_TRY(mutants_param(ctx, params, name, "fc1.bias", fc1_bias, &l->fc1_bias));
    MT_TRY(mutants_param(ctx, params, name, "fc2.weight", fc2, &l->fc2));
    return mutants_param(ctx, params, name, "fc2.bias", bias, &l->fc2_bias);
}

static mt_status add_params(mt_context *ctx, mt_params *params, model *m) {
    mt_param_desc table = {.rows = VOCAB, .cols = HIDDEN, .init_std = 1, .weight_decay = 1};
    mt_param_desc gain = {.rows = 1, .cols = HIDDEN, .init_value = 1};
    mt_param_desc bias = {.rows = 1, .cols = HIDDEN, .init_std = 0.1f};
    mt_param_desc head = {.rows = VOCAB, .cols = HIDDEN, .init_std = 0.2f, .weight_decay = 1};
    mt_param_desc head_bias = {.rows = 1, .cols = VOCAB, .init_std = 0.1f};
    table.placement = MT_SPLIT_ROWS; /* by vocabulary */
    head.placement = MT_SPLIT_ROWS;
    head_bias.placement = MT_SPLIT_COLS;
    MT_TRY(mutants_param(ctx, params, "embedding", "weight", table, &m->table));
    MT_TRY(add_layer(ctx, params, "layers.0", &m->layers[0]));
    MT_TRY(add_layer(ctx, params, "layers.1", &m->layers[1]));
    MT_TRY(mutants_param(ctx, params, "final_norm", "weight", gain, &m->gain));
    MT_TRY(mutants_param(ctx, params, "final_norm", "bias", bias, &m->bias));
    MT_TRY(mutants_param(ctx, params, "head", "weight", head, &m->head));
    MT_TRY(mutants_param(ctx, params, "head", "bias", head_bias, &m->head_bias));
    return mt_params_init(ctx, params, 1234);
}

/* ---- dropout and attention --------------------------------------------------------------------------------------- */

/* The dropout of an activation [tokens, HIDDEN]; layer LAYERS is the embedding. */
static mt_dropout hidden_dropout(const mutants_batch *b, int layer) {
    mt_dropout d = {.p = 0.1f};
    d.at.seed = 7;
    d.at.subsequence = (uint64_t)(100 * b->step + layer);
    d.at.first_row = b->first_token;
    d.at.global_cols = HIDDEN;
    return d;
}

/* This rank's heads. */
static mt_attention_desc attention_of(const mt_grid *grid, const mutants_batch *b, int layer) {
    mt_attention_desc d = {.batch = b->sequences, .seq = SEQ, .heads_per_group = 1, .head_dim = HEAD};
    d.groups = HEADS / grid->tp_size;
    d.scores.rotary_form = MT_ROTARY_PAIRS;
    d.scores.rotary_dim = ROTARY;
    d.dropout.p = 0.1f;
    d.dropout.at.seed = 7;
    d.dropout.at.subsequence = (uint64_t)(100 * b->step + 50 + layer);
    d.dropout.at.first_row = b->first_sequence;
    d.dropout.at.first_col = grid->tp_rank * d.groups;
    d.dropout.at.global_cols = HEADS;
    return d;
}

/* ---- a layer ----------------------------------------------------------------------------------------------------- */

static mt_status layer_tensors(mt_context *ctx, const layer *l, const mt_attention_desc *d, int64_t tokens,
                               layer_saved *s) {
    mt_arena_request memory[] = {{&s->stats, MT_F32, tokens, 2},
                                 {&s->n, MT_F32, tokens, HIDDEN},
                                 {&s->qkv, MT_F32, tokens, l->qkv->value.rows},
                                 {&s->core, MT_F32, tokens, l->proj->value.cols},
                                 {&s->lse, MT_F32, d->groups, tokens},
                                 {&s->h, MT_F32, tokens, l->fc1->value.rows},
                                 {&s->a, MT_F32, tokens, l->fc2->value.cols}};
    return mt_arena_tensors(ctx, memory, 7);
}

/* y = x + dropout(g(attention(f(norm(x))) + mlp(f(norm(x)))) + biases) */
static mt_status layer_forward(mt_context *ctx, const mt_grid *grid, const model *m, int number, const mutants_batch *b,
                               mt_tensor x, mt_tensor y, layer_saved *s) {
    const layer *l = &m->layers[number];
    mt_attention_desc d = attention_of(grid, b, number);
    mt_comm *tp = grid->tp;
    mt_tensor mlp;
    MT_TRY(layer_tensors(ctx, l, &d, b->tokens, s));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b->tokens, HIDDEN, &mlp));
    s->x = x;
    MT_TRY(mt_norm_forward(ctx, MT_LAYER_NORM, x, l->gain->value, l->bias->value, 1e-5f, s->n, s->stats));
    MT_TRY(mt_copy_to_tensor_region_forward(ctx, tp, s->n)); /* f */
    MT_TRY(mt_linear_forward(ctx, s->n, l->qkv->value, mt_none(), s->qkv));
    MT_TRY(mt_rotary_forward(ctx, &d, m->rotary, s->qkv));
    MT_TRY(mt_attention_forward(ctx, &d, s->qkv, s->core, s->lse));
    MT_TRY(mt_linear_forward(ctx, s->core, l->proj->value, mt_none(), y));
    MT_TRY(mt_linear_forward(ctx, s->n, l->fc1->value, mt_none(), s->h));
    MT_TRY(mt_activation_forward(ctx, MT_GELU_TANH, s->h, l->fc1_bias->value, s->a));
    MT_TRY(mt_linear_forward(ctx, s->a, l->fc2->value, mt_none(), mlp));
    MT_TRY(mt_add(ctx, y, mlp, y));
    MT_TRY(mt_reduce_from_tensor_region_forward(ctx, tp, y)); /* g */
    MT_TRY(mt_bias_forward(ctx, y, l->proj_bias->value));
    return mt_bias_dropout_add_forward(ctx, y, l->fc2_bias->value, x, hidden_dropout(b, number), y);
}

/* Computes dx, the gradient of x, from dy, and adds to the gradients of the layer. */
static mt_status layer_backward(mt_context *ctx, const mt_grid *grid, const model *m, int number,
                                const mutants_batch *b, mt_tensor dy, mt_tensor dx, const layer_saved *s) {
    const layer *l = &m->layers[number];
    mt_attention_desc d = attention_of(grid, b, number);
    mt_comm *tp = grid->tp;
    mt_tensor dsum, dcore, dqkv, da, dh, dn;
    mt_arena_request memory[] = {{&dsum, MT_F32, b->tokens, HIDDEN},      {&dcore, MT_F32, b->tokens, s->core.cols},
                                 {&dqkv, MT_F32, b->tokens, s->qkv.cols}, {&da, MT_F32, b->tokens, s->a.cols},
                                 {&dh, MT_F32, b->tokens, s->h.cols},     {&dn, MT_F32, b->tokens, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, memory, 6));
    MT_TRY(mt_bias_dropout_add_backward(ctx, dy, hidden_dropout(b, number), dsum, l->fc2_bias->grad));
    MT_TRY(mt_bias_backward(ctx, dsum, l->proj_bias->grad));
    MT_TRY(mt_reduce_from_tensor_region_backward(ctx, tp, dsum)); /* g */
    MT_TRY(mt_linear_gradients(ctx, dsum, s->a, l->fc2->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dsum, l->fc2->value, 0, da));
    MT_TRY(mt_activation_backward(ctx, MT_GELU_TANH, s->h, da, dh, l->fc1_bias->grad));
    MT_TRY(mt_linear_gradients(ctx, dh, s->n, l->fc1->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dh, l->fc1->value, 0, dn));
    MT_TRY(mt_linear_gradients(ctx, dsum, s->core, l->proj->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dsum, l->proj->value, 0, dcore));
    MT_TRY(mt_attention_backward(ctx, &d, s->qkv, s->core, s->lse, dcore, dqkv));
    MT_TRY(mt_rotary_backward(ctx, &d, m->rotary, dqkv));
    MT_TRY(mt_linear_gradients(ctx, dqkv, s->n, l->qkv->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dqkv, l->qkv->value, 1, dn));
    MT_TRY(mt_copy_to_tensor_region_backward(ctx, tp, dn)); /* f */
    return mt_norm_backward(ctx, MT_LAYER_NORM, s->x, l->gain->value, s->stats, dn, dy, dx, l->gain->grad,
                            l->bias->grad);
}

/* ---- embedding and head ------------------------------------------------------------------------------------------ */

static mt_status embedding_forward(mt_context *ctx, const mt_grid *grid, const model *m, const mutants_batch *b,
                                   mt_tensor x) {
    int64_t first_row = grid->tp_rank * m->table->value.rows;
    MT_TRY(mt_embedding_forward(ctx, m->table->value, first_row, (const int32_t *)b->ids.data, 0, x));
    MT_TRY(mt_reduce_from_tensor_region_forward(ctx, grid->tp, x)); /* g */
    return mt_bias_dropout_add_forward(ctx, x, mt_none(), mt_none(), hidden_dropout(b, LAYERS), x);
}

static mt_status embedding_backward(mt_context *ctx, const mt_grid *grid, const model *m, const mutants_batch *b,
                                    mt_tensor dx) {
    int64_t first_row = grid->tp_rank * m->table->value.rows;
    MT_TRY(mt_bias_dropout_add_backward(ctx, dx, hidden_dropout(b, LAYERS), dx, mt_none()));
    MT_TRY(mt_reduce_from_tensor_region_backward(ctx, grid->tp, dx)); /* g */
    return mt_embedding_backward(ctx, dx, first_row, (const int32_t *)b->ids.data, m->table->grad);
}

static mt_cross_entropy_shard_desc vocabulary_of(const mt_grid *grid, const model *m) {
    mt_cross_entropy_shard_desc d = {.vocab = VOCAB};
    d.first_col = grid->tp_rank * m->head->value.rows;
    return d;
}

static mt_status head_tensors(mt_context *ctx, const model *m, int64_t tokens, saved *s) {
    mt_arena_request memory[] = {{&s->stats, MT_F32, tokens, 2},
                                 {&s->n, MT_F32, tokens, HIDDEN},
                                 {&s->logits, MT_F32, tokens, m->head->value.rows},
                                 {&s->lse, MT_F32, 2, tokens}};
    return mt_arena_tensors(ctx, memory, 4);
}

/* loss [1, tokens] = the cross-entropy of this data rank's tokens */
static mt_status head_forward(mt_context *ctx, const mt_grid *grid, const model *m, const mutants_batch *b, mt_tensor x,
                              mt_tensor loss, saved *s) {
    const int32_t *targets = (const int32_t *)b->targets.data;
    mt_cross_entropy_shard_desc d = vocabulary_of(grid, m);
    mt_comm *tp = grid->tp;
    mt_tensor part, all;
    MT_TRY(head_tensors(ctx, m, b->tokens, s));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b->tokens, 4, &part));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, grid->tp_size * b->tokens, 4, &all));
    s->x = x;
    MT_TRY(mt_norm_forward(ctx, MT_LAYER_NORM, x, m->gain->value, m->bias->value, 1e-5f, s->n, s->stats));
    MT_TRY(mt_copy_to_tensor_region_forward(ctx, tp, s->n)); /* f */
    MT_TRY(mt_linear_forward(ctx, s->n, m->head->value, m->head_bias->value, s->logits));
    MT_TRY(mt_cross_entropy_stats(ctx, &d, s->logits, targets, part));
    MT_TRY(mt_all_gather(ctx, tp, part.data, all.data, (size_t)b->tokens * 4, MT_F32)); /* all-gather */
    return mt_cross_entropy_combine(ctx, &d, all, grid->tp_size, targets, loss, s->lse);
}

/* Computes dx of the loss times `scale`. */
static mt_status head_backward(mt_context *ctx, const mt_grid *grid, const model *m, const mutants_batch *b,
                               float scale, mt_tensor dx, const saved *s) {
    const int32_t *targets = (const int32_t *)b->targets.data;
    mt_cross_entropy_shard_desc d = vocabulary_of(grid, m);
    mt_tensor dn;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b->tokens, HIDDEN, &dn));
    MT_TRY(mt_cross_entropy_backward(ctx, &d, s->logits, targets, s->lse, mt_none(), scale));
    MT_TRY(mt_linear_gradients(ctx, s->logits, s->n, m->head->grad, m->head_bias->grad));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, s->logits, m->head->value, 0, dn));
    MT_TRY(mt_copy_to_tensor_region_backward(ctx, grid->tp, dn)); /* f */
    return mt_norm_backward(ctx, MT_LAYER_NORM, s->x, m->gain->value, s->stats, dn, mt_none(), dx, m->gain->grad,
                            m->bias->grad);
}

/* ---- training ---------------------------------------------------------------------------------------------------- */

/* For a mutant: the tokens of data rank 0, as those of this one. */
static inline mt_status first_batch(mt_context *ctx, const mt_grid *grid, int step, int micro, mutants_batch *b) {
    int32_t ids[SEQUENCES * SEQ];
    MT_TRY(mutants_batch_create(ctx, grid, step, micro, SEQUENCES, SEQ, VOCAB, b));
    for (int shift = 0; shift < 2; shift++) {
        for (int64_t i = 0; i < b->tokens; i++)
            ids[i] = mutants_token(step, micro * SEQUENCES + i / SEQ, i % SEQ + shift, VOCAB);
        MT_TRY(mt_upload(ctx, ids, shift ? b->targets : b->ids));
    }
    return MT_SUCCESS;
}

/* Forward and backward of a micro-batch. Adds the sum of its losses to total [1, 1]. */
static mt_status micro_batch(mt_context *ctx, const mt_grid *grid, const model *m, int step, int micro,
                             mt_tensor total) {
    mt_tensor x[LAYERS + 1], dx, loss;
    mutants_batch b;
    saved s;
    MT_TRY(mutants_batch_create(ctx, grid, step, micro, SEQUENCES, SEQ, VOCAB, &b));
    MT_TRY(mt_declare(ctx, grid->tp, b.ids, MT_REPLICATED));
    MT_TRY(mt_declare(ctx, grid->dp, b.ids, MT_SPLIT_ROWS));
    MT_TRY(mt_declare(ctx, grid->tp, b.targets, MT_REPLICATED));
    MT_TRY(mt_declare(ctx, grid->dp, b.targets, MT_SPLIT_ROWS));
    for (int i = 0; i <= LAYERS; i++) MT_TRY(mt_arena_tensor(ctx, MT_F32, b.tokens, HIDDEN, &x[i]));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b.tokens, HIDDEN, &dx));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, b.tokens, &loss));
    MT_TRY(embedding_forward(ctx, grid, m, &b, x[0]));
    for (int i = 0; i < LAYERS; i++) MT_TRY(layer_forward(ctx, grid, m, i, &b, x[i], x[i + 1], &s.layers[i]));
    MT_TRY(head_forward(ctx, grid, m, &b, x[LAYERS], loss, &s));
    MT_TRY(mt_sum(ctx, loss, total));
    MT_TRY(head_backward(ctx, grid, m, &b, SCALE, dx, &s));
    for (int i = LAYERS; i-- > 0;) MT_TRY(layer_backward(ctx, grid, m, i, &b, dx, dx, &s.layers[i]));
    return embedding_backward(ctx, grid, m, &b, dx);
}

static mt_status train_step(mt_context *ctx, const mt_grid *grid, mt_params *params, const model *m, int step,
                            mt_optimizer *adamw, mutants_result *result) {
    size_t mark = mt_arena_mark(ctx), kept;
    mt_tensor total;
    float norm;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, 1, &total));
    MT_TRY(mt_fill(ctx, total, 0));
    kept = mt_arena_mark(ctx);
    MT_TRY(mt_params_zero_grad(ctx, params));
    for (int micro = 0; micro < MICRO_BATCHES; micro++) {
        MT_TRY(micro_batch(ctx, grid, m, step, micro, total));
        mt_arena_release(ctx, kept);
    }
    MT_TRY(mutants_loss(ctx, result, total, SCALE));
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
    size_t mark = mt_arena_mark(ctx);
    mt_optimizer adamw = {.step = 0};
    mt_status status;
    model m;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, SEQ, ROTARY, &m.rotary));
    MT_TRY(mt_rotary_table(ctx, 10000, m.rotary));
    MT_TRY(add_params(ctx, params, &m));
    status = train(ctx, grid, params, &m, &adamw, result);
    mt_optimizer_destroy(ctx, &adamw);
    mt_arena_release(ctx, mark);
    return status;
}
