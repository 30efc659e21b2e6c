/* cross.c - an encoder and a decoder of the layers of this library, for mutants of mt_cross_attention: without and with
   sequence parallelism, on 2 tensor and 2 data ranks. The decoder adds the biases of its blocks itself. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#define MUTANTS_VARIANTS 2 /* the second one has sequence parallelism */

static const mt_grid_desc program_grid = {.tp = 2};

#include "batch.h"
#include "mutants.h"

enum { SOURCE = 12, TARGET = 8, SEQUENCES = 4, STEPS = 2, VOCAB = 40, HIDDEN = 32, HEADS = 4 };
#define SCALE (1.0f / (SEQUENCES * TARGET)) /* 1 / tokens of the global batch */

typedef struct model {
    const mt_grid *grid;
    int sp;
    mt_vocab_parallel_embedding table;
    mt_transformer_layer encoder;
    mt_norm_layer norm, mlp_norm;
    mt_cross_attention cross;
    mt_mlp mlp;
    mt_column_parallel_linear head;
} model;

/* The tensors of this rank's tokens, and what the layers keep. */
typedef struct saved {
    mutants_batch source, target;
    mt_batch source_batch, target_batch;
    mt_tensor e, memory, x, n, x1, n1, y, logits, loss;
    mt_transformer_layer_saved encoder;
    mt_norm_saved norm, mlp_norm;
    mt_cross_attention_saved cross;
    mt_mlp_saved mlp;
    mt_linear_saved head;
} saved;

static mt_status create(mt_context *ctx, mt_params *params, model *m) {
    const int sp = mutants_variant;
    mt_embedding_desc table = {.vocab = VOCAB, .features = HIDDEN, .init_std = 1, .sequence_parallel = sp};
    mt_transformer_layer_desc encoder = {.hidden = HIDDEN, .heads = HEADS, .ffn = 48, .sequence_parallel = sp};
    mt_norm_layer_desc norm = {.features = HIDDEN, .sequence_parallel = sp};
    mt_cross_attention_desc cross = {.hidden = HIDDEN, .heads = HEADS, .dropout = 0.1f, .layer_number = 1};
    mt_mlp_desc mlp = {.hidden = HIDDEN, .init.std = 0.2f, .init.output_std = 0.2f};
    mt_linear_desc head = {.in_features = HIDDEN, .out_features = VOCAB, .init_std = 0.3f, .sequence_parallel = sp};
    encoder.scores.mask = MT_MASK_BIDIRECTIONAL;
    encoder.dropout.hidden = encoder.dropout.attention = 0.1f;
    cross.kv_heads = 2;
    cross.init.std = cross.init.output_std = 0.3f;
    cross.sequence_parallel = sp;
    cross.skip_bias_add = 1;
    mlp.sequence_parallel = sp;
    mlp.skip_bias_add = 1;
    m->sp = sp;
    MT_TRY(mt_vocab_parallel_embedding_create(ctx, params, "embedding", &table, &m->table));
    MT_TRY(mt_transformer_layer_create(ctx, params, "encoder", &encoder, &m->encoder));
    MT_TRY(mt_norm_layer_create(ctx, params, "norm", &norm, &m->norm));
    MT_TRY(mt_cross_attention_create(ctx, params, "cross", &cross, &m->cross));
    MT_TRY(mt_norm_layer_create(ctx, params, "mlp_norm", &norm, &m->mlp_norm));
    MT_TRY(mt_mlp_create(ctx, params, "mlp", &mlp, &m->mlp));
    MT_TRY(mt_column_parallel_linear_create(ctx, params, "head", &head, &m->head));
    return mt_params_init(ctx, params, 1234);
}

/* The dropout of an activation of this rank's tokens. */
static mt_dropout hidden_dropout(const model *m, const saved *s, int site) {
    mt_dropout d = mt_batch_dropout(&s->target_batch, 0.1f, 2, site);
    d.at.first_row = (uint64_t)(s->target.first_token + (m->sp ? m->grid->tp_rank * s->x.rows : 0));
    d.at.global_cols = HIDDEN;
    return d;
}

static mt_batch batch_of(const mutants_batch *b, int64_t seq) {
    mt_batch batch = {.sequences = b->sequences, .seq = seq, .first_sequence = b->first_sequence, .seed = 5};
    batch.step = (uint64_t)b->step;
    return batch;
}

/* Makes the data of a step, and the tensors. */
static mt_status prepare(mt_context *ctx, const model *m, int step, saved *s) {
    const int ranks = m->sp ? m->grid->tp_size : 1;
    mutants_batch *b[] = {&s->source, &s->target};
    MT_TRY(mutants_batch_create(ctx, m->grid, 2 * step, 0, SEQUENCES, SOURCE, VOCAB, b[0]));
    MT_TRY(mutants_batch_create(ctx, m->grid, 2 * step + 1, 0, SEQUENCES, TARGET, VOCAB, b[1]));
    for (int i = 0; i < 2; i++) {
        MT_TRY(mt_declare(ctx, m->grid->tp, b[i]->ids, MT_REPLICATED));
        MT_TRY(mt_declare(ctx, m->grid->dp, b[i]->ids, MT_SPLIT_ROWS));
        MT_TRY(mt_declare(ctx, m->grid->tp, b[i]->targets, MT_REPLICATED));
        MT_TRY(mt_declare(ctx, m->grid->dp, b[i]->targets, MT_SPLIT_ROWS));
    }
    s->source_batch = batch_of(&s->source, SOURCE);
    s->target_batch = batch_of(&s->target, TARGET);
    mt_arena_request memory[] = {{&s->e, MT_F32, s->source.tokens / ranks, HIDDEN},
                                 {&s->memory, MT_F32, s->source.tokens / ranks, HIDDEN},
                                 {&s->x, MT_F32, s->target.tokens / ranks, HIDDEN},
                                 {&s->n, MT_F32, s->target.tokens / ranks, HIDDEN},
                                 {&s->x1, MT_F32, s->target.tokens / ranks, HIDDEN},
                                 {&s->n1, MT_F32, s->target.tokens / ranks, HIDDEN},
                                 {&s->y, MT_F32, s->target.tokens / ranks, HIDDEN},
                                 {&s->logits, MT_F32, s->target.tokens, m->head.local_features},
                                 {&s->loss, MT_F32, 1, s->target.tokens}};
    return mt_arena_tensors(ctx, memory, 9);
}

/* s->logits becomes the gradient of the logits. */
static mt_status forward(mt_context *ctx, const model *m, saved *s) {
    const mt_cross_entropy_desc desc = {.vocab = VOCAB};
    const int32_t *source = (const int32_t *)s->source.ids.data, *target = (const int32_t *)s->target.ids.data;
    MT_TRY(mt_vocab_parallel_embedding_forward(ctx, &m->table, source, s->source.tokens, s->e));
    MT_TRY(mt_transformer_layer_forward(ctx, &m->encoder, &s->source_batch, s->e, s->memory, &s->encoder));
    MT_TRY(mt_vocab_parallel_embedding_forward(ctx, &m->table, target, s->target.tokens, s->x));
    MT_TRY(mt_norm_layer_forward(ctx, &m->norm, s->x, s->n, &s->norm));
    MT_TRY(mt_cross_attention_forward(ctx, &m->cross, &s->target_batch, s->n, &s->source_batch, s->memory, s->x1,
                                      &s->cross));
    MT_TRY(mt_bias_dropout_add_forward(ctx, s->x1, m->cross.proj.bias->value, s->x, hidden_dropout(m, s, 0), s->x1));
    MT_TRY(mt_norm_layer_forward(ctx, &m->mlp_norm, s->x1, s->n1, &s->mlp_norm));
    MT_TRY(mt_mlp_forward(ctx, &m->mlp, s->n1, s->y, &s->mlp));
    MT_TRY(mt_bias_dropout_add_forward(ctx, s->y, m->mlp.fc2.bias->value, s->x1, hidden_dropout(m, s, 1), s->y));
    MT_TRY(mt_parallel_linear_forward(ctx, &m->head, s->y, s->logits, &s->head));
    return mt_vocab_parallel_cross_entropy_forward_backward(
        ctx, m->head.tp, &desc, s->logits, (const int32_t *)s->target.targets.data, mt_none(), SCALE, s->loss);
}

static mt_status backward(mt_context *ctx, const model *m, const saved *s) {
    mt_tensor dy, dx1, dz, dn, de, dmemory;
    mt_arena_request memory[] = {{&dy, MT_F32, s->x.rows, HIDDEN},      {&dx1, MT_F32, s->x.rows, HIDDEN},
                                 {&dz, MT_F32, s->x.rows, HIDDEN},      {&dn, MT_F32, s->x.rows, HIDDEN},
                                 {&de, MT_F32, s->memory.rows, HIDDEN}, {&dmemory, MT_F32, s->memory.rows, HIDDEN}};
    MT_TRY(mt_arena_tensors(ctx, memory, 6));
    MT_TRY(mt_parallel_linear_backward(ctx, &m->head, s->logits, dy, &s->head));
    MT_TRY(mt_bias_dropout_add_backward(ctx, dy, hidden_dropout(m, s, 1), dz, m->mlp.fc2.bias->grad));
    MT_TRY(mt_mlp_backward(ctx, &m->mlp, dz, dn, &s->mlp));
    MT_TRY(mt_norm_layer_backward(ctx, &m->mlp_norm, dn, dy, dx1, &s->mlp_norm));
    MT_TRY(mt_bias_dropout_add_backward(ctx, dx1, hidden_dropout(m, s, 0), dz, m->cross.proj.bias->grad));
    MT_TRY(mt_cross_attention_backward(ctx, &m->cross, dz, dn, dmemory, &s->cross));
    MT_TRY(mt_norm_layer_backward(ctx, &m->norm, dn, dx1, dx1, &s->norm));
    MT_TRY(mt_vocab_parallel_embedding_backward(ctx, &m->table, (const int32_t *)s->target.ids.data, s->target.tokens,
                                                dx1));
    MT_TRY(mt_transformer_layer_backward(ctx, &m->encoder, dmemory, de, &s->encoder));
    return mt_vocab_parallel_embedding_backward(ctx, &m->table, (const int32_t *)s->source.ids.data, s->source.tokens,
                                                de);
}

static mt_status train_step(mt_context *ctx, mt_params *params, const model *m, int step, mt_optimizer *adamw,
                            mutants_result *result) {
    size_t mark = mt_arena_mark(ctx);
    saved s;
    float norm;
    memset(&s, 0, sizeof s);
    MT_TRY(prepare(ctx, m, step, &s));
    MT_TRY(mt_params_zero_grad(ctx, params));
    MT_TRY(forward(ctx, m, &s));
    MT_TRY(mutants_loss(ctx, result, s.loss, SCALE));
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
    model m = {.grid = grid};
    MT_TRY(create(ctx, params, &m));
    MT_TRY(mt_optimizer_create(ctx, params, &desc, &adamw));
    for (int step = 0; step < STEPS && status == MT_SUCCESS; step++)
        status = train_step(ctx, params, &m, step, &adamw, result);
    mt_optimizer_destroy(ctx, &adamw);
    return status;
}
