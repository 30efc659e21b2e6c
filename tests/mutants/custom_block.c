/* custom_block.c - the block of examples/02_custom_block.c, for mutants of that file: without and with sequence
   parallelism. */

#define CUSTOM_BLOCK_NO_MAIN
#include "02_custom_block.c"

#define MUTANTS_VARIANTS 2

static const mt_grid_desc program_grid = {.tp = 4};

#include "mutants.h"

static mt_status program(mt_context *ctx, const mt_grid *grid, mt_params *params, mutants_result *result) {
    const settings s = {.sequence_parallel = mutants_variant};
    mt_optimizer adamw;
    block b;
    (void)grid;
    MT_TRY(block_create(ctx, params, s.sequence_parallel, &b));
    MT_TRY(mt_params_init(ctx, params, 1234));
    MT_TRY(mt_optimizer_create(ctx, params, NULL, &adamw));
    for (int step = 0; step < 2; step++) {
        float loss;
        MT_TRY(train_step(ctx, &b, params, &adamw, &s, &loss));
        MT_TRY(mutants_loss(ctx, result, mt_tensor_f32(&loss, 1, 1), 1));
        MT_TRY(mutants_gradients(ctx, result, params));
    }
    mt_optimizer_destroy(ctx, &adamw);
    return MT_SUCCESS;
}
