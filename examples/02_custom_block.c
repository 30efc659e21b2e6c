/* 02_custom_block - a block of your own from f, g and the parallel linears: attention and MLP side by side.

   cc -O3 -march=native -I. examples/02_custom_block.c -o 02_custom_block -lm -lpthread && ./02_custom_block

   GPT-J and PaLM compute y = x + attention(LN(x)) + MLP(LN(x)). Both halves read the same LN(x) and their outputs meet
   in one sum, so one g (all-reduce) forward and one f (all-reduce) backward serve both: 2 all-reduces per layer and
   step where the sequential layer of megatron.h needs 4. Run it with ./02_custom_block 1, 2 or 4 ranks: same losses. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SEQUENCES = 4, SEQ = 32, TOKENS = SEQUENCES * SEQ, HIDDEN = 64, HEADS = 4, FFN = 256, STEPS = 60 };

typedef struct block {
    mt_param *gain, *bias; /* of the norm */
    mt_column_parallel_linear qkv, fc1;
    mt_row_parallel_linear proj, fc2; /* their weights; the reduction they share is done here */
    mt_attention_shape attention;
    mt_comm *tp;
} block;

typedef struct block_saved {
    mt_tensor x, stats, norm, qkv, out, lse, h, act;
    mt_linear_saved qkv_in, fc1_in;
} block_saved;

static mt_status block_create(mt_context *ctx, mt_params *params, block *b) {
    mt_param_desc gain = {.name = "norm.weight", .rows = 1, .cols = HIDDEN, .init_value = 1};
    mt_param_desc bias = {.name = "norm.bias", .rows = 1, .cols = HIDDEN};
    mt_linear_desc qkv = {
        .in_features = HIDDEN, .out_features = 3 * HIDDEN, .unit = 3 * HIDDEN / HEADS, .init_std = 0.1f};
    mt_linear_desc fc1 = {.in_features = HIDDEN, .out_features = FFN, .skip_bias_add = 1, .init_std = 0.1f};
    mt_linear_desc proj = {.in_features = HIDDEN,
                           .out_features = HIDDEN,
                           .unit = HIDDEN / HEADS,
                           .input_is_parallel = 1,
                           .no_bias = 1,
                           .init_std = 0.1f};
    mt_linear_desc fc2 = {
        .in_features = FFN, .out_features = HIDDEN, .input_is_parallel = 1, .no_bias = 1, .init_std = 0.1f};
    MT_TRY(mt_params_add(ctx, params, &gain, &b->gain));
    MT_TRY(mt_params_add(ctx, params, &bias, &b->bias));
    MT_TRY(mt_column_parallel_linear_create(ctx, params, "qkv", &qkv, &b->qkv));
    MT_TRY(mt_column_parallel_linear_create(ctx, params, "fc1", &fc1, &b->fc1));
    MT_TRY(mt_row_parallel_linear_create(ctx, params, "proj", &proj, &b->proj));
    MT_TRY(mt_row_parallel_linear_create(ctx, params, "fc2", &fc2, &b->fc2));
    b->tp = mt_params_grid(params)->tp;
    b->attention = (mt_attention_shape){.batch = SEQUENCES,
                                        .seq = SEQ,
                                        .groups = b->qkv.local_features / qkv.unit,
                                        .heads_per_group = 1,
                                        .head_dim = HIDDEN / HEADS};
    return MT_SUCCESS;
}

static mt_status block_forward(mt_context *ctx, const block *b, mt_tensor x, mt_tensor y, block_saved *s) {
    s->x = x;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, TOKENS, 2, &s->stats));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, TOKENS, HIDDEN, &s->norm));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, TOKENS, b->qkv.local_features, &s->qkv));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, TOKENS, b->proj.local_features, &s->out));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, b->attention.groups, TOKENS, &s->lse));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, TOKENS, b->fc1.local_features, &s->h));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, TOKENS, b->fc2.local_features, &s->act));
    MT_TRY(mt_norm_forward(ctx, MT_LAYER_NORM, x, b->gain->value, b->bias->value, 1e-5f, s->norm, s->stats));
    MT_TRY(mt_copy_to_tensor_region_forward(ctx, b->tp, s->norm)); /* f: identity */
    MT_TRY(mt_column_parallel_linear_forward(ctx, &b->qkv, s->norm, s->qkv, &s->qkv_in));
    MT_TRY(mt_attention_forward(ctx, &b->attention, s->qkv, s->out, s->lse));
    MT_TRY(mt_column_parallel_linear_forward(ctx, &b->fc1, s->norm, s->h, &s->fc1_in));
    MT_TRY(mt_activation_forward(ctx, MT_GELU_TANH, s->h, b->fc1.bias->value, s->act));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1, s->out, b->proj.weight->value, 0, y));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1, s->act, b->fc2.weight->value, 1, y)); /* both partial sums */
    MT_TRY(mt_reduce_from_tensor_region_forward(ctx, b->tp, y));                        /* g: the one all-reduce */
    return mt_add(ctx, x, y, y);
}

/* dy [TOKENS, HIDDEN] -> dx, and the gradients of all parameters. */
static mt_status block_backward(mt_context *ctx, const block *b, mt_tensor dy, mt_tensor dx, const block_saved *s) {
    mt_tensor dout, dqkv, dact, dnorm;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, TOKENS, s->out.cols, &dout));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, TOKENS, s->qkv.cols, &dqkv));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, TOKENS, s->act.cols, &dact));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, TOKENS, HIDDEN, &dnorm));
    MT_TRY(mt_reduce_from_tensor_region_backward(ctx, b->tp, dy)); /* g: identity */
    MT_TRY(mt_gemm(ctx, MT_TRANS, MT_NO_TRANS, 1, dy, s->out, 1, b->proj.weight->grad));
    MT_TRY(mt_gemm(ctx, MT_TRANS, MT_NO_TRANS, 1, dy, s->act, 1, b->fc2.weight->grad));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dy, b->proj.weight->value, 0, dout));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dy, b->fc2.weight->value, 0, dact));
    MT_TRY(mt_attention_backward(ctx, &b->attention, s->qkv, s->out, s->lse, dout, dqkv));
    MT_TRY(mt_activation_backward(ctx, MT_GELU_TANH, s->h, dact, s->h, b->fc1.bias->grad)); /* s->h is now dh */
    MT_TRY(mt_column_parallel_linear_backward(ctx, &b->qkv, dqkv, mt_none(), &s->qkv_in));  /* weights only */
    MT_TRY(mt_column_parallel_linear_backward(ctx, &b->fc1, s->h, mt_none(), &s->fc1_in));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dqkv, b->qkv.weight->value, 0, dnorm));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, s->h, b->fc1.weight->value, 1, dnorm));
    MT_TRY(mt_copy_to_tensor_region_backward(ctx, b->tp, dnorm)); /* f: the one all-reduce */
    return mt_norm_backward(ctx, MT_LAYER_NORM, s->x, b->gain->value, s->stats, dnorm, dy, dx, b->gain->grad,
                            b->bias->grad);
}

/* One step towards predicting each token's predecessor; a toy task that attention can solve and an MLP alone cannot. */
static mt_status train_step(mt_context *ctx, const block *b, mt_params *params, mt_optimizer *adamw, float *loss) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor x, y, dx;
    block_saved saved;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, TOKENS, HIDDEN, &x));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, TOKENS, HIDDEN, &y));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, TOKENS, HIDDEN, &dx));
    float *in = x.data, *out = y.data;
    for (int i = 0; i < TOKENS * HIDDEN; i++) in[i] = sinf(0.013f * (float)(i % 4001) * (float)(1 + i % 7));
    MT_TRY(mt_params_zero_grad(ctx, params));
    MT_TRY(block_forward(ctx, b, x, y, &saved));
    double sum = 0;
    for (int i = 0; i < TOKENS * HIDDEN; i++) { /* out becomes dy */
        float target = i / HIDDEN % SEQ == 0 ? 0 : in[i - HIDDEN], error = out[i] - target;
        sum += 0.5 * error * error / TOKENS;
        out[i] = error / TOKENS;
    }
    *loss = (float)sum;
    MT_TRY(block_backward(ctx, b, y, dx, &saved));
    mt_arena_release(ctx, mark);
    return mt_optimizer_step(ctx, adamw, 3e-3f, 1);
}

static mt_status run(mt_comm *world, mt_context *ctx, mt_params *params, mt_optimizer *adamw) {
    block b;
    float loss = 0;
    MT_TRY(block_create(ctx, params, &b));
    MT_TRY(mt_params_init(ctx, params, 1234));
    MT_TRY(mt_optimizer_create(ctx, params, NULL, adamw));
    for (int step = 0; step < STEPS; step++) {
        mt_comm_ledger_reset(b.tp);
        MT_TRY(train_step(ctx, &b, params, adamw, &loss));
        if (mt_comm_rank(world) == 0 && (step % 10 == 0 || step == STEPS - 1))
            printf("step %2d  loss %.5f\n", step, (double)loss);
    }
    if (mt_comm_rank(world) == 0)
        printf("%d ranks, %llu all-reduces per step\n", mt_comm_size(world),
               (unsigned long long)mt_comm_ledger(b.tp).calls[MT_ALL_REDUCE]);
    return MT_SUCCESS;
}

static mt_status rank_main(mt_comm *world, void *user) {
    mt_context *ctx = NULL;
    mt_params *params = NULL;
    mt_optimizer adamw = {0};
    mt_grid grid = {0};
    mt_grid_desc shape = {.tp = mt_comm_size(world)};
    (void)user;
    mt_status status = mt_context_create(world, NULL, &ctx);
    if (status == MT_SUCCESS) status = mt_grid_create(world, &shape, &grid);
    if (status == MT_SUCCESS) status = mt_params_create(ctx, &grid, &params);
    if (status == MT_SUCCESS) status = run(world, ctx, params, &adamw);
    mt_optimizer_destroy(ctx, &adamw);
    mt_params_destroy(params);
    mt_grid_destroy(&grid);
    mt_context_destroy(ctx);
    return status;
}

int main(int argc, char **argv) {
    mt_launch_desc launch = {.ranks = argc > 1 ? atoi(argv[1]) : 2};
    if (launch.ranks < 1) {
        fprintf(stderr, "02_custom_block: '%s' is no number of ranks\n", argv[1]);
        return 1;
    }
    return mt_launch(&launch, rank_main, NULL) == MT_SUCCESS ? 0 : 1;
}
