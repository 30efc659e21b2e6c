/* mlp.c - the step of examples/01_mlp.c, for mutants of that file. The program has its own buffers, its own loss and
   its own update. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

/* The number of parameters that the update changes: on the meta device there are no values. */
static int parameters(const mt_params *params) {
    return mt_context_device(params->ctx) == MT_DEVICE_META ? 0 : mt_params_count(params);
}

#define main mlp_main
#define mt_params_count parameters
#include "01_mlp.c"
#undef mt_params_count
#undef main

static const mt_grid_desc program_grid = {.tp = 4};

#include "mutants.h"

/* Says what the buffers are: the same on every rank. */
static mt_status declare(mt_context *ctx, const mt_grid *grid, buffers *b) {
    float *const all[] = {b->x, b->y, b->dy, b->dx};
    for (int i = 0; i < 4; i++) MT_TRY(mt_declare(ctx, grid->tp, mt_tensor_f32(all[i], TOKENS, HIDDEN), MT_REPLICATED));
    return MT_SUCCESS;
}

static mt_status steps(mt_context *ctx, const mt_grid *grid, mt_params *params, buffers *b, mutants_result *result) {
    const mt_mlp_desc desc = {.hidden = HIDDEN};
    mt_mlp mlp;
    MT_TRY(mt_mlp_create(ctx, params, "mlp", &desc, &mlp));
    MT_TRY(mt_params_init(ctx, params, 1234));
    make_data(b->x, b->target);
    MT_TRY(declare(ctx, grid, b));
    for (int i = 0; i < 2; i++) {
        float loss = 0;
        MT_TRY(step(ctx, params, &mlp, b, &loss));
        MT_TRY(mt_check_replicas(ctx, grid->tp, "step")); /* the program has no mt_sync_gradients */
        MT_TRY(mutants_loss(ctx, result, mt_tensor_f32(&loss, 1, 1), 1));
        MT_TRY(mutants_gradients(ctx, result, params));
    }
    return MT_SUCCESS;
}

static mt_status program(mt_context *ctx, const mt_grid *grid, mt_params *params, mutants_result *result) {
    buffers *b = (buffers *)calloc(1, sizeof *b);
    mt_status status = b ? steps(ctx, grid, params, b, result) : MT_ERR_MEMORY;
    mt_declare_forget(ctx, b, sizeof *b);
    free(b);
    return status;
}
