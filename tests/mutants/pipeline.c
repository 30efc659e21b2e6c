/* pipeline.c - a GPT on 2 pipeline stages of 2 tensor ranks: each stage has a block of attention and MLP. The first and
   the last stage share the embedding, and micro-batches run in the order of 1F1B. On one rank both blocks are on one
   stage. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

static const mt_grid_desc program_grid = {.tp = 2, .pp = 2};

#include "batch.h"
#include "mutants.h"

enum { SEQ = 16, SEQUENCES = 2, MICRO_BATCHES = 4, STEPS = 2, BLOCKS = 2, VOCAB = 40 };
enum { HIDDEN = 32, HEADS = 4, HEAD = HIDDEN / HEADS, FFN = 4 * HIDDEN };
#define SCALE (1.0f / (MICRO_BATCHES * SEQUENCES * SEQ)) /* 1 / tokens of the global batch */

typedef struct block {
    mt_param *gain, *bias, *qkv, *qkv_bias, *proj, *proj_bias;       /* attention */
    mt_param *mlp_gain, *mlp_bias, *fc1, *fc1_bias, *fc2, *fc2_bias; /* MLP */
} block;

typedef struct block_saved {
    mt_tensor x, stats, n, qkv, core, lse, x1, stats1, n1, h, a;
} block_saved;

/* What a micro-batch in flight keeps. */
typedef struct slot {
    mutants_batch batch;
    block_saved blocks[BLOCKS];
    mt_tensor x, stats, n, logits, lse; /* of the head */
} slot;

typedef struct model {
    const mt_grid *grid;
    int first_block, blocks; /* of this stage */
    int is_first, is_last;   /* stage */
    int step;
    mt_param *table, *positions, *gain, *bias; /* the table is on the first and on the last stage */
    block list[BLOCKS];
    slot slots[MICRO_BATCHES];
    mt_tensor total; /* [1, 1], the sum of the losses of a step */
} model;

/* ---- parameters -------------------------------------------------------------------------------------------------- */

static mt_status add_attention(mt_context *ctx, mt_params *params, const char *name, block *l) {
    mt_param_desc gain = {.rows = 1, .cols = HIDDEN, .init_value = 1};
    mt_param_desc bias = {.rows = 1, .cols = HIDDEN, .init_std = 0.1f};
    mt_param_desc qkv = {.rows = 3 * HIDDEN, .cols = HIDDEN, .unit = 3 * HEAD, .init_std = 0.2f};
    mt_param_desc qkv_bias = {.rows = 1, .cols = 3 * HIDDEN, .unit = 3 * HEAD, .init_std = 0.1f};
    mt_param_desc proj = {.rows = HIDDEN, .cols = HIDDEN, .unit = HEAD, .init_std = 0.2f};
    qkv.placement = MT_SPLIT_ROWS; /* column-parallel */
    qkv_bias.placement = MT_SPLIT_COLS;
    proj.placement = MT_SPLIT_COLS; /* row-parallel */
    MT_TRY(mutants_param(ctx, params, name, "attention_norm.weight", gain, &l->gain));
    MT_TRY(mutants_param(ctx, params, name, "attention_norm.bias", bias, &l->bias));
    MT_TRY(mutants_param(ctx, params, name, "qkv.weight", qkv, &l->qkv));
    MT_TRY(mutants_param(ctx, params, name, "qkv.bias", qkv_bias, &l->qkv_bias));
    MT_TRY(mutants_param(ctx, params, name, "proj.weight", proj, &l->proj));
    return mutants_param(ctx, params, name, "proj.bias", bias, &l->proj_bias);
}

static mt_status add_mlp(mt_context *ctx, mt_params *params, const char *name, block *l) {
    mt_param_desc gain = {.rows = 1, .cols = HIDDEN, .init_value = 1};
    mt_param_desc bias = {.rows = 1, .cols = HIDDEN, .init_std = 0.1f};
    mt_param_desc fc1 = {.rows = FFN, .cols = HIDDEN, .init_std = 0.2f};
    mt_param_desc fc1_bias = {.rows = 1, .cols = FFN, .init_std = 0.1f};
    mt_param_desc fc2 = {.rows = HIDDEN, .cols = FFN, .init_std = 0.1f};
    fc1.placement = MT_SPLIT_ROWS;
    fc1_bias.placement = MT_SPLIT_COLS;
    fc2.placement = MT_SPLIT_COLS;
    MT_TRY(mutants_param(ctx, params, name, "mlp_norm.weight", gain, &l->mlp_gain));
    MT_TRY(mutants_param(ctx, params, name, "mlp_norm.bias", bias, &l->mlp_bias));
    MT_TRY(mutants_param(ctx, params, name, "fc1.weight", fc1, &l->fc1));
    MT_TRY(mutants_param(ctx, params, name, "fc1.bias", fc1_bias, &l->fc1_bias));
    MT_TRY(mutants_param(ctx, params, name, "fc2.weight", fc2, &l->fc2));
    return mutants_param(ctx, params, name, "fc2.bias", bias, &l->fc2_bias);
}

/* Adds the parameters of this stage. */
static mt_status add_params(mt_context *ctx, mt_params *params, model *m) {
    static const char *const names[BLOCKS] = {"blocks.0", "blocks.1"};
    mt_param_desc table = {.rows = VOCAB, .cols = HIDDEN, .init_std = 0.3f};
    mt_param_desc positions = {.rows = SEQ, .cols = HIDDEN, .init_std = 0.3f};
    mt_param_desc gain = {.rows = 1, .cols = HIDDEN, .init_value = 1};
    mt_param_desc bias = {.rows = 1, .cols = HIDDEN, .init_std = 0.1f};
    table.placement = MT_SPLIT_ROWS; /* by vocabulary */
    table.shared_embedding = 1;
    if (m->is_first || m->is_last) MT_TRY(mutants_param(ctx, params, "embedding", "weight", table, &m->table));
    if (m->is_first) MT_TRY(mutants_param(ctx, params, "positions", "weight", positions, &m->positions));
    for (int i = 0; i < m->blocks; i++) {
        MT_TRY(add_attention(ctx, params, names[m->first_block + i], &m->list[i]));
        MT_TRY(add_mlp(ctx, params, names[m->first_block + i], &m->list[i]));
    }
    if (m->is_last) MT_TRY(mutants_param(ctx, params, "final_norm", "weight", gain, &m->gain));
    if (m->is_last) MT_TRY(mutants_param(ctx, params, "final_norm", "bias", bias, &m->bias));
    return mt_params_init(ctx, params, 1234);
}

/* ---- a block ----------------------------------------------------------------------------------------------------- */

/* The dropout of site 0 or 1 of a block. */
static mt_dropout hidden_dropout(const model *m, const mutants_batch *b, int number, int site) {
    mt_dropout d = {.p = 0.1f};
    d.at.seed = 7;
    d.at.subsequence = (uint64_t)(100 * b->step + 2 * (m->first_block + number) + site);
    d.at.first_row = b->first_token;
    d.at.global_cols = HIDDEN;
    return d;
}

/* This rank's heads. */
static mt_attention_desc attention_of(const model *m, const mutants_batch *b) {
    mt_attention_desc d = {.batch = b->sequences, .seq = SEQ, .heads_per_group = 1, .head_dim = HEAD};
    d.groups = HEADS / m->grid->tp_size;
    return d;
}

static mt_status block_tensors(mt_context *ctx, const block *l, const mt_attention_desc *d, int64_t tokens,
                               block_saved *s) {
    mt_arena_request memory[] = {{&s->stats, MT_F32, tokens, 2},
                                 {&s->n, MT_F32, tokens, HIDDEN},
                                 {&s->qkv, MT_F32, tokens, l->qkv->value.rows},
                                 {&s->core, MT_F32, tokens, l->proj->value.cols},
                                 {&s->lse, MT_F32, d->groups, tokens},
                                 {&s->x1, MT_F32, tokens, HIDDEN},
                                 {&s->stats1, MT_F32, tokens, 2},
                                 {&s->n1, MT_F32, tokens, HIDDEN},
                                 {&s->h, MT_F32, tokens, l->fc1->value.rows},
                                 {&s->a, MT_F32, tokens, l->fc2->value.cols}};
    return mt_arena_tensors(ctx, memory, 10);
}

/* s->x1 = x + dropout(g(attention(f(norm(x)))) + bias) */
static mt_status attention_forward(mt_context *ctx, const model *m, int number, const mutants_batch *b, mt_tensor x,
                                   block_saved *s) {
    const block *l = &m->list[number];
    mt_attention_desc d = attention_of(m, b);
    mt_comm *tp = m->grid->tp;
    MT_TRY(block_tensors(ctx, l, &d, b->tokens, s));
    s->x = x;
    MT_TRY(mt_norm_forward(ctx, MT_LAYER_NORM, x, l->gain->value, l->bias->value, 1e-5f, s->n, s->stats));
    MT_TRY(mt_copy_to_tensor_region_forward(ctx, tp, s->n)); /* f */
    MT_TRY(mt_linear_forward(ctx, s->n, l->qkv->value, l->qkv_bias->value, s->qkv));
    MT_TRY(mt_attention_forward(ctx, &d, s->qkv, s->core, s->lse));
    MT_TRY(mt_linear_forward(ctx, s->core, l->proj->value, mt_none(), s->x1));
    MT_TRY(mt_reduce_from_tensor_region_forward(ctx, tp, s->x1)); /* g */
    return mt_bias_dropout_add_forward(ctx, s->x1, l->proj_bias->value, x, hidden_dropout(m, b, number, 0), s->x1);
}

/* y = x1 + dropout(g(mlp(f(norm(x1)))) + bias) */
static mt_status mlp_forward(mt_context *ctx, const model *m, int number, const mutants_batch *b, mt_tensor y,
                             block_saved *s) {
    const block *l = &m->list[number];
    mt_comm *tp = m->grid->tp;
    MT_TRY(mt_norm_forward(ctx, MT_LAYER_NORM, s->x1, l->mlp_gain->value, l->mlp_bias->value, 1e-5f, s->n1, s->stats1));
    MT_TRY(mt_copy_to_tensor_region_forward(ctx, tp, s->n1)); /* f */
    MT_TRY(mt_linear_forward(ctx, s->n1, l->fc1->value, l->fc1_bias->value, s->h));
    MT_TRY(mt_activation_forward(ctx, MT_GELU_ERF, s->h, mt_none(), s->a));
    MT_TRY(mt_linear_forward(ctx, s->a, l->fc2->value, mt_none(), y));
    MT_TRY(mt_reduce_from_tensor_region_forward(ctx, tp, y)); /* g */
    return mt_bias_dropout_add_forward(ctx, y, l->fc2_bias->value, s->x1, hidden_dropout(m, b, number, 1), y);
}

/* Computes dx1, the gradient of x1, from dy. */
static mt_status mlp_backward(mt_context *ctx, const model *m, int number, const mutants_batch *b, mt_tensor dy,
                              mt_tensor dx1, const block_saved *s) {
    const block *l = &m->list[number];
    mt_comm *tp = m->grid->tp;
    mt_tensor dsum, da, dh, dn;
    mt_arena_request memory[] = {{&dsum, MT_F32, b->tokens, HIDDEN},
                                 {&da, MT_F32, b->tokens, s->a.cols},
                                 {&dh, MT_F32, b->tokens, s->h.cols},
                                 {&dn, MT_F32, b->tokens, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, memory, 4));
    MT_TRY(mt_bias_dropout_add_backward(ctx, dy, hidden_dropout(m, b, number, 1), dsum, l->fc2_bias->grad));
    MT_TRY(mt_reduce_from_tensor_region_backward(ctx, tp, dsum)); /* g */
    MT_TRY(mt_linear_gradients(ctx, dsum, s->a, l->fc2->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dsum, l->fc2->value, 0, da));
    MT_TRY(mt_activation_backward(ctx, MT_GELU_ERF, s->h, da, dh, mt_none()));
    MT_TRY(mt_linear_gradients(ctx, dh, s->n1, l->fc1->grad, l->fc1_bias->grad));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dh, l->fc1->value, 0, dn));
    MT_TRY(mt_copy_to_tensor_region_backward(ctx, tp, dn)); /* f */
    return mt_norm_backward(ctx, MT_LAYER_NORM, s->x1, l->mlp_gain->value, s->stats1, dn, dy, dx1, l->mlp_gain->grad,
                            l->mlp_bias->grad);
}

/* Computes dx, the gradient of x, from dx1. */
static mt_status attention_backward(mt_context *ctx, const model *m, int number, const mutants_batch *b, mt_tensor dx1,
                                    mt_tensor dx, const block_saved *s) {
    const block *l = &m->list[number];
    mt_attention_desc d = attention_of(m, b);
    mt_comm *tp = m->grid->tp;
    mt_tensor dsum, dcore, dqkv, dn;
    mt_arena_request memory[] = {{&dsum, MT_F32, b->tokens, HIDDEN},
                                 {&dcore, MT_F32, b->tokens, s->core.cols},
                                 {&dqkv, MT_F32, b->tokens, s->qkv.cols},
                                 {&dn, MT_F32, b->tokens, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, memory, 4));
    MT_TRY(mt_bias_dropout_add_backward(ctx, dx1, hidden_dropout(m, b, number, 0), dsum, l->proj_bias->grad));
    MT_TRY(mt_reduce_from_tensor_region_backward(ctx, tp, dsum)); /* g */
    MT_TRY(mt_linear_gradients(ctx, dsum, s->core, l->proj->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dsum, l->proj->value, 0, dcore));
    MT_TRY(mt_attention_backward(ctx, &d, s->qkv, s->core, s->lse, dcore, dqkv));
    MT_TRY(mt_linear_gradients(ctx, dqkv, s->n, l->qkv->grad, l->qkv_bias->grad));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dqkv, l->qkv->value, 0, dn));
    MT_TRY(mt_copy_to_tensor_region_backward(ctx, tp, dn)); /* f */
    return mt_norm_backward(ctx, MT_LAYER_NORM, s->x, l->gain->value, s->stats, dn, dx1, dx, l->gain->grad,
                            l->bias->grad);
}

/* ---- the first and the last stage -------------------------------------------------------------------------------- */

static mt_status embedding_forward(mt_context *ctx, const model *m, const mutants_batch *b, mt_tensor x) {
    const int64_t first_row = m->grid->tp_rank * m->table->value.rows;
    mt_tensor places;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, b->tokens, 1, &places));
    MT_TRY(mt_position_ids(ctx, b->first_token, SEQ, NULL, 0, (int32_t *)places.data, b->tokens));
    MT_TRY(mt_embedding_forward(ctx, m->table->value, first_row, (const int32_t *)b->ids.data, 0, x));
    MT_TRY(mt_reduce_from_tensor_region_forward(ctx, m->grid->tp, x)); /* g */
    return mt_embedding_forward(ctx, m->positions->value, 0, (const int32_t *)places.data, 1, x);
}

static mt_status embedding_backward(mt_context *ctx, const model *m, const mutants_batch *b, mt_tensor dx) {
    const int64_t first_row = m->grid->tp_rank * m->table->value.rows;
    mt_tensor places;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, b->tokens, 1, &places));
    MT_TRY(mt_position_ids(ctx, b->first_token, SEQ, NULL, 0, (int32_t *)places.data, b->tokens));
    MT_TRY(mt_embedding_backward(ctx, dx, 0, (const int32_t *)places.data, m->positions->grad));
    MT_TRY(mt_reduce_from_tensor_region_backward(ctx, m->grid->tp, dx)); /* g */
    return mt_embedding_backward(ctx, dx, first_row, (const int32_t *)b->ids.data, m->table->grad);
}

static mt_cross_entropy_shard_desc vocabulary_of(const model *m) {
    mt_cross_entropy_shard_desc d = {.vocab = VOCAB};
    d.first_col = m->grid->tp_rank * m->table->value.rows;
    return d;
}

/* Adds the losses of a micro-batch to m->total. The head is the table of the embedding. */
static mt_status head_forward(mt_context *ctx, const model *m, mt_tensor x, slot *s) {
    const mutants_batch *b = &s->batch;
    const int32_t *targets = (const int32_t *)b->targets.data;
    mt_cross_entropy_shard_desc d = vocabulary_of(m);
    mt_comm *tp = m->grid->tp;
    mt_tensor part, all, loss;
    mt_arena_request memory[] = {{&s->stats, MT_F32, b->tokens, 2},
                                 {&s->n, MT_F32, b->tokens, HIDDEN},
                                 {&s->logits, MT_F32, b->tokens, m->table->value.rows},
                                 {&s->lse, MT_F32, 2, b->tokens},
                                 {&part, MT_F32, b->tokens, 4},
                                 {&all, MT_F32, m->grid->tp_size * b->tokens, 4},
                                 {&loss, MT_F32, 1, b->tokens}};
    MT_TRY(mt_arena_tensors(ctx, memory, 7));
    s->x = x;
    MT_TRY(mt_norm_forward(ctx, MT_LAYER_NORM, x, m->gain->value, m->bias->value, 1e-5f, s->n, s->stats));
    MT_TRY(mt_copy_to_tensor_region_forward(ctx, tp, s->n)); /* f */
    MT_TRY(mt_linear_forward(ctx, s->n, m->table->value, mt_none(), s->logits));
    MT_TRY(mt_cross_entropy_stats(ctx, &d, s->logits, targets, part));
    MT_TRY(mt_all_gather(ctx, tp, part.data, all.data, (size_t)b->tokens * 4, MT_F32)); /* all-gather */
    MT_TRY(mt_cross_entropy_combine(ctx, &d, all, m->grid->tp_size, targets, loss, s->lse));
    return mt_sum(ctx, loss, m->total);
}

static mt_status head_backward(mt_context *ctx, const model *m, mt_tensor dx, const slot *s) {
    const mutants_batch *b = &s->batch;
    mt_cross_entropy_shard_desc d = vocabulary_of(m);
    mt_tensor dn;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b->tokens, HIDDEN, &dn));
    MT_TRY(mt_cross_entropy_backward(ctx, &d, s->logits, (const int32_t *)b->targets.data, s->lse, mt_none(), SCALE));
    MT_TRY(mt_linear_gradients(ctx, s->logits, s->n, m->table->grad, mt_none()));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, s->logits, m->table->value, 0, dn));
    MT_TRY(mt_copy_to_tensor_region_backward(ctx, m->grid->tp, dn)); /* f */
    return mt_norm_backward(ctx, MT_LAYER_NORM, s->x, m->gain->value, s->stats, dn, mt_none(), dx, m->gain->grad,
                            m->bias->grad);
}

/* ---- a stage ----------------------------------------------------------------------------------------------------- */

static mt_status stage_forward(mt_context *ctx, void *user, const mt_action *action, mt_tensor input,
                               mt_tensor output) {
    model *m = (model *)user;
    slot *s = &m->slots[action->slot];
    mutants_batch *b = &s->batch;
    mt_tensor x = input, y;
    MT_TRY(mutants_batch_create(ctx, m->grid, m->step, action->micro_batch, SEQUENCES, SEQ, VOCAB, b));
    MT_TRY(mt_declare(ctx, m->grid->tp, b->ids, MT_REPLICATED));
    MT_TRY(mt_declare(ctx, m->grid->tp, b->targets, MT_REPLICATED));
    if (m->is_first) MT_TRY(mt_arena_tensor(ctx, MT_F32, b->tokens, HIDDEN, &x));
    if (m->is_first) MT_TRY(embedding_forward(ctx, m, b, x));
    else MT_TRY(mt_declare(ctx, m->grid->tp, x, MT_REPLICATED));
    for (int i = 0; i < m->blocks; i++) {
        y = output;
        if (m->is_last || i + 1 < m->blocks) MT_TRY(mt_arena_tensor(ctx, MT_F32, b->tokens, HIDDEN, &y));
        MT_TRY(attention_forward(ctx, m, i, b, x, &s->blocks[i]));
        MT_TRY(mlp_forward(ctx, m, i, b, y, &s->blocks[i]));
        x = y;
    }
    return m->is_last ? head_forward(ctx, m, x, s) : MT_SUCCESS;
}

static mt_status stage_backward(mt_context *ctx, void *user, const mt_action *action, mt_tensor doutput,
                                mt_tensor dinput) {
    model *m = (model *)user;
    const slot *s = &m->slots[action->slot];
    const mutants_batch *b = &s->batch;
    mt_tensor dy = doutput, dx;
    if (m->is_last) MT_TRY(mt_arena_tensor(ctx, MT_F32, b->tokens, HIDDEN, &dy));
    if (m->is_last) MT_TRY(head_backward(ctx, m, dy, s));
    else MT_TRY(mt_declare(ctx, m->grid->tp, dy, MT_REPLICATED));
    for (int i = m->blocks; i-- > 0;) {
        dx = dinput;
        if (m->is_first || i > 0) MT_TRY(mt_arena_tensor(ctx, MT_F32, b->tokens, HIDDEN, &dx));
        MT_TRY(mlp_backward(ctx, m, i, b, dy, dy, &s->blocks[i]));
        MT_TRY(attention_backward(ctx, m, i, b, dy, dx, &s->blocks[i]));
        dy = dx;
    }
    return m->is_first ? embedding_backward(ctx, m, b, dy) : MT_SUCCESS;
}

/* ---- training ---------------------------------------------------------------------------------------------------- */

static mt_status train_step(mt_context *ctx, mt_params *params, model *m, const mt_action *actions, int count,
                            mt_optimizer *adamw, mutants_result *result) {
    mt_pipeline_stage stage = {.rows = SEQUENCES * SEQ, .cols = HIDDEN, .dtype = MT_F32};
    float norm;
    stage.forward = stage_forward;
    stage.backward = stage_backward;
    stage.user = m;
    MT_TRY(mt_fill(ctx, m->total, 0));
    MT_TRY(mt_params_zero_grad(ctx, params));
    MT_TRY(mt_pipeline_run(ctx, m->grid, &stage, actions, count));
    MT_TRY(mutants_loss(ctx, result, m->is_last ? m->total : mt_none(), SCALE));
    MT_TRY(mt_sync_gradients(ctx, params));
    MT_TRY(mutants_gradients(ctx, result, params));
    MT_TRY(mt_grad_norm(ctx, params, &norm));
    return mt_optimizer_step(ctx, adamw, 1e-3f, mt_clip_coefficient(norm, 1));
}

static mt_status train(mt_context *ctx, mt_params *params, model *m, mt_optimizer *adamw, mutants_result *result) {
    mt_optimizer_desc desc = {.eps = 1e-5f};
    mt_action actions[6 * MICRO_BATCHES];
    int count;
    MT_TRY(mt_optimizer_create(ctx, params, &desc, adamw));
    MT_TRY(mt_pipeline_schedule(MT_SCHEDULE_1F1B, m->grid->pp_size, m->grid->pp_rank, MICRO_BATCHES, actions,
                                6 * MICRO_BATCHES, &count));
    for (m->step = 0; m->step < STEPS; m->step++) MT_TRY(train_step(ctx, params, m, actions, count, adamw, result));
    return MT_SUCCESS;
}

static mt_status program(mt_context *ctx, const mt_grid *grid, mt_params *params, mutants_result *result) {
    size_t mark = mt_arena_mark(ctx);
    mt_optimizer adamw = {.step = 0};
    mt_status status;
    model m = {.grid = grid};
    m.blocks = BLOCKS / grid->pp_size;
    m.first_block = grid->pp_rank * m.blocks;
    m.is_first = grid->pp_rank == 0;
    m.is_last = grid->pp_rank + 1 == grid->pp_size;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, 1, &m.total));
    MT_TRY(add_params(ctx, params, &m));
    status = train(ctx, params, &m, &adamw, result);
    mt_optimizer_destroy(ctx, &adamw);
    mt_arena_release(ctx, mark);
    return status;
}
