/* library.c - the models of megatron.h, for mutants of the headers: pipelines of 1 or 2 stages of a GPT or a BERT. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

enum { SEQUENCES = 4, SEQ = 8, HIDDEN = 32, HEADS = 4, VOCAB = 61, STEPS = 2 }; /* SEQUENCES: of a step, on all ranks */

typedef enum kind { GPT, LLAMA, POST_LN, BERT } kind;

/* What is trained. */
typedef struct variant {
    kind model;
    int sequence_parallel;
    mt_grid_desc grid;
} variant;

static const variant variants[] = {{GPT, 0, {.tp = 2}},  {LLAMA, 1, {.tp = 2}},        {POST_LN, 1, {.tp = 4}},
                                   {BERT, 0, {.tp = 2}}, {GPT, 0, {.tp = 2, .pp = 2}}, {BERT, 1, {.tp = 2, .pp = 2}}};

#define MUTANTS_VARIANTS ((int)(sizeof variants / sizeof *variants))
#define program_grid variants[mutants_variant].grid

#include "mutants.h"

typedef struct model {
    mt_gpt gpt;
    mt_bert bert;
    mt_gpt_saved gpt_saved[SEQUENCES]; /* of each slot */
    mt_bert_saved bert_saved[SEQUENCES];
    mt_params *params;
    int is_bert;
    int first; /* this data rank's first sequence */
    int step;
    int32_t ids[SEQUENCES][SEQ + 1], types[SEQUENCES][SEQ], order[SEQUENCES], lengths[SEQUENCES];
    mt_tensor loss[SEQUENCES], sop_loss[SEQUENCES]; /* of each micro-batch */
} model;

static mt_transformer_layer_desc layer_desc(void) {
    const variant *v = &variants[mutants_variant];
    mt_transformer_layer_desc d = {.hidden = HIDDEN, .heads = HEADS, .ffn = 48};
    d.dropout.attention = d.dropout.hidden = 0.1f;
    d.sequence_parallel = v->sequence_parallel;
    if (v->model == POST_LN || v->model == BERT) d.norm.placement = MT_POST_LN;
    if (v->model == BERT) d.activation = MT_GELU_ERF;
    if (v->model != LLAMA) return d;
    d.kv_heads = 2;
    d.norm.kind = MT_RMS_NORM;
    d.activation = MT_SWIGLU;
    d.scores.rotary_base = 100;
    d.no_bias = 1;
    return d;
}

static mt_status create(mt_context *ctx, mt_params *params, model *m) {
    mt_gpt_desc gpt = {.vocab = VOCAB, .layers = 2, .max_seq = SEQ, .layer = layer_desc(), .embedding_dropout = 0.1f};
    mt_bert_desc bert = {.vocab = VOCAB, .layers = 2, .max_seq = SEQ, .layer = layer_desc(), .embedding_dropout = 0.1f};
    gpt.untied_head = variants[mutants_variant].model == LLAMA;
    if (m->is_bert) MT_TRY(mt_bert_create(ctx, params, &bert, &m->bert));
    else MT_TRY(mt_gpt_create(ctx, params, &gpt, &m->gpt));
    for (int i = 0; i < SEQUENCES; i++) {
        if (m->is_bert) MT_TRY(mt_bert_saved_create(ctx, &m->bert, &m->bert_saved[i]));
        else MT_TRY(mt_gpt_saved_create(ctx, &m->gpt, &m->gpt_saved[i]));
        MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, SEQ, &m->loss[i]));
        MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, 1, &m->sop_loss[i]));
    }
    return mt_params_init(ctx, params, 1234);
}

static void make_data(model *m) {
    for (int s = 0; s < SEQUENCES; s++) {
        for (int i = 0; i <= SEQ; i++) m->ids[s][i] = (7 * s + i * i + 3 * i) % VOCAB;
        for (int i = 0; i < SEQ; i++) m->types[s][i] = i >= SEQ / 2;
        m->order[s] = s % 2;
        m->lengths[s] = SEQ - s % 2;
    }
}

static mt_batch batch_of(model *m, int sequence) {
    mt_batch b = {.sequences = 1, .seq = SEQ, .first_sequence = sequence, .seed = 5, .step = (uint64_t)m->step};
    if (m->is_bert) b.lengths = &m->lengths[sequence];
    if (m->is_bert) b.token_types = m->types[sequence];
    return b;
}

static mt_status forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    model *m = (model *)user;
    const int s = m->first + a->micro_batch;
    const mt_batch batch = batch_of(m, s);
    if (m->is_bert)
        return mt_bert_stage_forward(ctx, &m->bert, &batch, m->ids[s], m->ids[s] + 1, &m->order[s], input, output,
                                     m->loss[a->micro_batch], m->sop_loss[a->micro_batch], &m->bert_saved[a->slot]);
    return mt_gpt_stage_forward(ctx, &m->gpt, &batch, m->ids[s], m->ids[s] + 1, input, output, m->loss[a->micro_batch],
                                &m->gpt_saved[a->slot]);
}

static mt_status backward(mt_context *ctx, void *user, const mt_action *a, mt_tensor doutput, mt_tensor dinput) {
    model *m = (model *)user;
    const float scale = 1.0f / (SEQUENCES * SEQ), sop_scale = 1.0f / SEQUENCES;
    if (m->is_bert)
        MT_TRY(mt_bert_stage_backward(ctx, &m->bert, scale, sop_scale, doutput, dinput, &m->bert_saved[a->slot]));
    else MT_TRY(mt_gpt_stage_backward(ctx, &m->gpt, scale, doutput, dinput, &m->gpt_saved[a->slot]));
    return mt_accumulate_gradients(ctx, m->params);
}

static mt_status losses(mt_context *ctx, const mt_grid *grid, const model *m, int micro_batches,
                        mutants_result *result) {
    float sum = 0;
    if (mt_context_device(ctx) == MT_DEVICE_META) return MT_SUCCESS;
    for (int i = 0; i < micro_batches && grid->pp_rank == grid->pp_size - 1; i++)
        for (int t = 0; t < SEQ; t++) sum += ((float *)m->loss[i].data)[t];
    return mutants_loss(ctx, result, mt_tensor_f32(&sum, 1, 1), 1.0f / (SEQUENCES * SEQ));
}

static mt_status train(mt_context *ctx, const mt_grid *grid, model *m, mutants_result *result) {
    const int sp = variants[mutants_variant].sequence_parallel;
    const mt_pipeline_stage stage = {
        .rows = sp ? SEQ / grid->tp_size : SEQ, .cols = HIDDEN, .forward = forward, .backward = backward, .user = m};
    const int micro_batches = SEQUENCES / grid->dp_size;
    mt_action actions[6 * SEQUENCES];
    mt_optimizer adamw;
    float norm;
    int count;
    m->first = grid->dp_rank * micro_batches;
    MT_TRY(mt_optimizer_create(ctx, m->params, NULL, &adamw));
    MT_TRY(mt_pipeline_schedule(MT_SCHEDULE_1F1B, grid->pp_size, grid->pp_rank, micro_batches, actions, 6 * SEQUENCES,
                                &count));
    for (m->step = 0; m->step < STEPS; m->step++) {
        MT_TRY(mt_params_zero_grad(ctx, m->params));
        MT_TRY(mt_pipeline_run(ctx, grid, &stage, actions, count));
        MT_TRY(losses(ctx, grid, m, micro_batches, result));
        MT_TRY(mt_sync_gradients(ctx, m->params));
        MT_TRY(mutants_gradients(ctx, result, m->params));
        MT_TRY(mt_grad_norm(ctx, m->params, &norm));
        MT_TRY(mt_optimizer_step(ctx, &adamw, 1e-2f, 1.0f));
    }
    mt_optimizer_destroy(ctx, &adamw);
    return MT_SUCCESS;
}

static mt_status program(mt_context *ctx, const mt_grid *grid, mt_params *params, mutants_result *result) {
    model *m = (model *)calloc(1, sizeof *m);
    mt_status status;
    if (!m) return MT_ERR_MEMORY;
    m->params = params;
    m->is_bert = variants[mutants_variant].model == BERT;
    make_data(m);
    status = create(ctx, params, m);
    if (status == MT_SUCCESS) status = train(ctx, grid, m, result);
    for (int i = 0; i < SEQUENCES; i++) mt_gpt_saved_destroy(&m->gpt_saved[i]);
    for (int i = 0; i < SEQUENCES; i++) mt_bert_saved_destroy(&m->bert_saved[i]);
    free(m);
    return status;
}
