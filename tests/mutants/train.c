/* train.c - the training steps of examples/train_gpt.c, for mutants of that file and of train.h: with data ranks, with
   pipeline stages and sequence parallelism, in invariant mode, and with a sharded optimizer. */

#define main train_gpt_main
#include "train_gpt.c"
#undef main

enum { DATA, PIPELINE, INVARIANT, SHARDED, VARIANTS };
static const mt_grid_desc grids[VARIANTS] = {{.tp = 2}, {.tp = 2, .pp = 2}, {.tp = 2}, {.tp = 2}};

#define MUTANTS_VARIANTS VARIANTS
#define program_grid grids[mutants_variant]

#include "mutants.h"

enum { TEXT_TOKENS = 512, ARENA = 4 << 20 };

/* The flags of a run on the ranks of grid, in the check mode of ctx. */
static options flags_of(mt_context *ctx, const mt_grid *grid) {
    options o = default_options();
    o.tp = grid->tp_size;
    o.dp = grid->dp_size;
    o.pp = grid->pp_size;
    o.check = mt_check_mode(ctx);
    o.layers = 2;
    o.hidden = 32;
    o.heads = 4;
    o.seq = 8;
    o.vocab = 64;
    o.batch = 8;
    o.micro_batch = 2;
    o.steps = 2;
    o.lr = 1e-2;
    o.dropout = 0.1;
    o.schedule = MT_SCHEDULE_1F1B;
    o.sequence_parallel = mutants_variant == PIPELINE;
    o.invariant = mutants_variant == INVARIANT ? 4 : 0;
    o.invariant_data = mutants_variant == INVARIANT ? 4 : 0;
    o.distributed_optimizer = mutants_variant == SHARDED;
    return o;
}

/* Trains with a context, a grid and a registry of its own. The loss is the one that rank 0 prints. */
static mt_status steps(trainer *t, mutants_result *result) {
    const options *o = &t->job->o;
    const int prints = t->grid.dp_rank == 0 && t->grid.pp_rank == 0;
    MT_TRY(start_steps(t));
    for (int step = 0; step < (int)o->steps; step++) {
        float losses[LOSSES], norm;
        MT_TRY(train_step(t, step, learning_rate(o, step), losses, &norm));
        MT_TRY(mutants_loss(t->ctx, result, prints ? mt_tensor_f32(losses, 1, LOSSES) : mt_none(), 1));
        MT_TRY(mt_gather_gradients(t->ctx, t->params));
        MT_TRY(mutants_gradients(t->ctx, result, t->params));
    }
    return MT_SUCCESS;
}

static mt_status program(mt_context *ctx, const mt_grid *grid, mt_params *params, mutants_result *result) {
    job *j = (job *)calloc(1, sizeof *j);
    int32_t *tokens = (int32_t *)malloc(TEXT_TOKENS * sizeof *tokens);
    mt_status status = j && tokens ? MT_SUCCESS : MT_ERR_MEMORY;
    trainer t;
    (void)params;
    memset(&t, 0, sizeof t);
    if (status == MT_SUCCESS) {
        for (int i = 0; i < TEXT_TOKENS; i++) tokens[i] = (i * i + 3 * i) / 5 % 64;
        for (int i = 0; i < MUTANTS_RANKS; i++) j->stages[i].arena = ARENA;
        j->o = flags_of(ctx, grid);
        j->data.tokens = tokens;
        j->data.count = TEXT_TOKENS;
        j->data.train = TEXT_TOKENS / 2;
        status = trainer_create(grid->world, j, mt_context_device(ctx), &t);
    }
    if (status == MT_SUCCESS) status = steps(&t, result);
    if (status != MT_SUCCESS && t.ctx) status = mt_fail(ctx, status, "%s", mt_last_error(t.ctx));
    trainer_destroy(&t);
    free(tokens);
    free(j);
    return status;
}
