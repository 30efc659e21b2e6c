/* 01_mlp - puts a tensor-parallel MLP into a program that has its own buffers and its own loop.

   cc -O3 -march=native -I. examples/01_mlp.c -o 01_mlp -lm -lpthread && ./01_mlp

   The program fits an MLP to a fixed function with plain gradient descent. The calls of megatron.h are marked (1) to
   (5); the buffers, the loss and the update stay the program's own. On another number of ranks (./01_mlp 4) the losses
   are the same up to rounding, because the model does not depend on the split. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 256, HIDDEN = 64, STEPS = 200 };

/* What the program has without megatron.h: data, loss and update. */
static void make_data(float *x, float *target) {
    for (int i = 0; i < TOKENS * HIDDEN; i++) {
        x[i] = sinf(0.37f * (float)i) + cosf(0.11f * (float)(i % 997));
        target[i] = 0.5f * x[i] * x[i] - 0.25f * x[(i + 1) % (TOKENS * HIDDEN)];
    }
}

static float squared_error(const float *y, const float *target, float *dy) {
    double loss = 0;
    for (int i = 0; i < TOKENS * HIDDEN; i++) {
        float error = y[i] - target[i];
        loss += 0.5 * error * error / TOKENS;
        dy[i] = error / TOKENS;
    }
    return (float)loss;
}

static void descend(mt_params *params, float rate) {
    for (int i = 0; i < mt_params_count(params); i++) {
        mt_param *p = mt_params_at(params, i);
        float *value = p->value.data, *grad = p->grad.data;
        for (int64_t j = 0; j < p->value.rows * p->value.cols; j++) value[j] -= rate * grad[j];
    }
}

typedef struct buffers {
    float x[TOKENS * HIDDEN], target[TOKENS * HIDDEN], y[TOKENS * HIDDEN], dy[TOKENS * HIDDEN], dx[TOKENS * HIDDEN];
} buffers;

static mt_status step(mt_context *ctx, mt_params *params, const mt_mlp *mlp, buffers *b, float *loss) {
    mt_mlp_saved saved;
    size_t mark = mt_arena_mark(ctx);
    MT_TRY(mt_params_zero_grad(ctx, params));
    /* (4) forward on views of the program's buffers; every rank has the same x and gets the same y */
    MT_TRY(mt_mlp_forward(ctx, mlp, mt_tensor_f32(b->x, TOKENS, HIDDEN), mt_tensor_f32(b->y, TOKENS, HIDDEN), &saved));
    *loss = squared_error(b->y, b->target, b->dy);
    /* (5) backward adds to the gradients of the parameters and writes dx; then the tensors of saved are released */
    MT_TRY(
        mt_mlp_backward(ctx, mlp, mt_tensor_f32(b->dy, TOKENS, HIDDEN), mt_tensor_f32(b->dx, TOKENS, HIDDEN), &saved));
    mt_arena_release(ctx, mark);
    descend(params, 0.05f);
    return MT_SUCCESS;
}

static mt_status fit(mt_context *ctx, mt_params *params, const mt_mlp *mlp, int speaks) {
    buffers *b = malloc(sizeof *b);
    mt_status status = b ? MT_SUCCESS : MT_ERR_MEMORY;
    if (b) make_data(b->x, b->target);
    for (int i = 0; status == MT_SUCCESS && i < STEPS; i++) {
        float loss = 0;
        status = step(ctx, params, mlp, b, &loss);
        if (speaks && (i % 40 == 0 || i == STEPS - 1)) printf("step %3d  loss %.6f\n", i, (double)loss);
    }
    free(b);
    return status;
}

/* Every rank, which is a thread here, runs this function. */
static mt_status rank_main(mt_comm *world, void *user) {
    mt_context *ctx = NULL;
    mt_params *params = NULL;
    mt_grid grid = {0};
    mt_grid_desc shape = {.tp = mt_comm_size(world)};
    mt_mlp_desc desc = {.hidden = HIDDEN}; /* the defaults: ffn = 4 * hidden, GeLU, biases */
    mt_mlp mlp;
    (void)user;
    mt_status status = mt_context_create(world, NULL, &ctx);                 /* (1) on the CPU */
    if (status == MT_SUCCESS) status = mt_grid_create(world, &shape, &grid); /* (2) all ranks split the MLP */
    if (status == MT_SUCCESS) status = mt_params_create(ctx, &grid, &params);
    if (status == MT_SUCCESS) status = mt_mlp_create(ctx, params, "mlp", &desc, &mlp); /* (3) this rank's shard */
    if (status == MT_SUCCESS) status = mt_params_init(ctx, params, 1234);
    if (status == MT_SUCCESS) status = fit(ctx, params, &mlp, mt_comm_rank(world) == 0);
    if (status == MT_SUCCESS && mt_comm_rank(world) == 0)
        printf("%d ranks, %lld of %lld parameters here, %llu all-reduces in %d steps\n", mt_comm_size(world),
               (long long)mt_params_elements(params), (long long)mt_params_global_elements(params),
               (unsigned long long)mt_comm_ledger(grid.tp).calls[MT_ALL_REDUCE], STEPS);
    mt_params_destroy(params);
    mt_grid_destroy(&grid);
    mt_context_destroy(ctx);
    return status;
}

int main(int argc, char **argv) {
    mt_launch_desc launch = {.ranks = argc > 1 ? atoi(argv[1]) : 2};
    if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        printf("usage: 01_mlp [RANKS]      number of tensor parallel ranks, 2 by default\n");
        return 0;
    }
    if (launch.ranks < 1 || argc > 2) {
        fprintf(stderr, "01_mlp: '%s' is not a number of ranks, see --help\n", argv[argc > 2 ? 2 : 1]);
        return 2;
    }
    return mt_launch(&launch, rank_main, NULL) == MT_SUCCESS ? 0 : 1;
}
