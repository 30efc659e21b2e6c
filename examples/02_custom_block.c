/* 02_custom_block - a block of your own: attention with QK-norm and an output gate, in parallel with an MLP with
   squared ReLU.

   cc -O3 -march=native -I. examples/02_custom_block.c -o 02_custom_block -lm -lpthread && ./02_custom_block

   The block computes
       y = x + proj(sigmoid(gate(n)) * attention(q_norm(q(n)), k_norm(k(n)), v(n))) + fc2(relu(fc1(n))^2), n = norm(x).
   Its branches read the same n, so they share one f (identity forward, all-reduce backward). Their outputs are added,
   so they share one g (all-reduce forward, identity backward). The block therefore does 2 all-reduces of [tokens,
   hidden] per step; the sequential layer of megatron.h does 4. See docs/blocks.md.

   ./02_custom_block [RANKS] [bf16] [cuda] [invariant] [sequence_parallel] [hashes] trains the block, by default on 2
   ranks. The losses on 1, 2 and 4 ranks are equal up to rounding; with `invariant` they have the same bits. `hashes`
   prints the hash log of the last step.
   For CUDA: nvcc -x cu -std=c++20 -O3 -arch=native -I. examples/02_custom_block.c -o 02_custom_block -lcublasLt */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SEQUENCES = 4, SEQ = 32, TOKENS = SEQUENCES * SEQ, HIDDEN = 64, HEADS = 4, FFN = 256, STEPS = 60 };
enum { HEAD = HIDDEN / HEADS, UNIT = 3 * HEAD }; /* HEAD: columns of a head; UNIT: columns of its q, k and v together */

/* ---- the block --------------------------------------------------------------------------------------------------- */

enum { QKV, GATE, FC1 }; /* the layers in block.in, which read the same n */
enum { PROJ, FC2 };      /* the layers in block.out, whose outputs are added */

typedef struct block {
    mt_norm_layer norm;
    mt_qk_norm qk_norm;
    mt_column_parallel_linear in[3];
    mt_row_parallel_linear out[2];
} block;

typedef struct block_saved {
    mt_norm_saved norm;
    mt_qk_norm_saved qk_norm;
    mt_linear_saved in, out[2];
    mt_attention_desc heads;
    mt_tensor h[3], core, lse; /* h: the outputs of block.in */
} block_saved;

/* The unit of gate and proj is a head, so they are split as the output of attention. */
static mt_status create_layers(mt_context *ctx, mt_params *params, int sp, block *b) {
    mt_norm_layer_desc norm = {.features = HIDDEN, .sequence_parallel = sp};
    mt_norm_layer_desc per_head = {.features = HEAD, .kind = MT_RMS_NORM};
    mt_linear_desc qkv = {.in_features = HIDDEN, .out_features = HEADS * UNIT, .unit = UNIT, .sequence_parallel = sp};
    mt_linear_desc gate = {.in_features = HIDDEN, .out_features = HIDDEN, .unit = HEAD, .sequence_parallel = sp};
    mt_linear_desc fc1 = {.in_features = HIDDEN, .out_features = FFN, .sequence_parallel = sp};
    mt_linear_desc proj = gate, fc2 = {.in_features = FFN, .out_features = HIDDEN, .sequence_parallel = sp};
    proj.input_is_parallel = fc2.input_is_parallel = 1;
    MT_TRY(mt_norm_layer_create(ctx, params, "norm", &norm, &b->norm));
    MT_TRY(mt_column_parallel_linear_create(ctx, params, "qkv", &qkv, &b->in[QKV]));
    MT_TRY(mt_qk_norm_create(ctx, params, "attention", &per_head, &b->in[QKV], &b->qk_norm));
    MT_TRY(mt_column_parallel_linear_create(ctx, params, "gate", &gate, &b->in[GATE]));
    MT_TRY(mt_column_parallel_linear_create(ctx, params, "fc1", &fc1, &b->in[FC1]));
    MT_TRY(mt_row_parallel_linear_create(ctx, params, "proj", &proj, &b->out[PROJ]));
    return mt_row_parallel_linear_create(ctx, params, "fc2", &fc2, &b->out[FC2]);
}

/* sp = 1: sequence parallelism. After an error the registry is as before. */
static mt_status block_create(mt_context *ctx, mt_params *params, int sp, block *b) {
    size_t mark = mt_params_mark(params);
    return mt_create_end(params, mark, b, sizeof *b, create_layers(ctx, params, sp, b));
}

/* Computes y from x, and keeps in *s what backward needs. */
static mt_status block_forward(mt_context *ctx, const block *b, mt_tensor x, mt_tensor y, block_saved *s) {
    const mt_batch batch = {.sequences = SEQUENCES, .seq = SEQ};
    mt_tensor n, z[2]; /* z: the inputs of block.out */
    s->heads = mt_core_attention_desc(&b->in[QKV], HEAD, &batch);
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, HIDDEN, &n));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, s->heads.groups, TOKENS, &s->lse));
    MT_TRY(mt_parallel_linear_tensors(ctx, b->in, 3, x, s->h));
    MT_TRY(mt_parallel_linear_tensors(ctx, &b->out[PROJ], 1, y, &s->core));
    MT_TRY(mt_parallel_linear_tensors(ctx, b->out, 2, y, z));
    MT_TRY(mt_norm_layer_forward(ctx, &b->norm, x, n, &s->norm));
    MT_TRY(mt_parallel_linear_forward_shared(ctx, b->in, 3, &n, s->h, &s->in));
    MT_TRY(mt_qk_norm_forward(ctx, &b->qk_norm, s->h[QKV], &s->qk_norm));
    MT_TRY(mt_core_attention_forward(ctx, &s->heads, b->in[QKV].weight->shards, s->h[QKV], s->core, s->lse));
    MT_TRY(mt_hash_log_activation(ctx, "attention", 0, "output", s->core, 0, b->out[PROJ].weight));
    MT_TRY(mt_sigmoid_gate_forward(ctx, s->h[GATE], s->core, z[PROJ]));
    MT_TRY(mt_column_parallel_activation_forward(ctx, &b->in[FC1], MT_SQUARED_RELU, s->h[FC1], z[FC2]));
    MT_TRY(mt_parallel_linear_forward_shared(ctx, b->out, 2, z, &y, s->out)); /* g: the only all-reduce */
    return mt_add(ctx, x, y, y);
}

/* Computes dx from dy, and adds to the gradients of all parameters. */
static mt_status block_backward(mt_context *ctx, const block *b, mt_tensor dy, mt_tensor dx, const block_saved *s) {
    mt_tensor dh[3], dz[2];
    MT_TRY(mt_parallel_linear_tensors(ctx, b->in, 3, dx, dh));
    MT_TRY(mt_parallel_linear_tensors(ctx, b->out, 2, dy, dz));
    MT_TRY(mt_parallel_linear_backward_shared(ctx, b->out, 2, &dy, dz, s->out));
    MT_TRY(mt_sigmoid_gate_backward(ctx, s->h[GATE], s->core, dz[PROJ], dh[GATE], dz[PROJ]));
    MT_TRY(mt_core_attention_backward(ctx, &s->heads, b->in[QKV].weight->shards, s->h[QKV], s->core, s->lse, dz[PROJ],
                                      dh[QKV]));
    MT_TRY(mt_qk_norm_backward(ctx, &b->qk_norm, dh[QKV], &s->qk_norm));
    MT_TRY(mt_column_parallel_activation_backward(ctx, &b->in[FC1], MT_SQUARED_RELU, s->h[FC1], dz[FC2], dh[FC1]));
    MT_TRY(mt_parallel_linear_backward_shared(ctx, b->in, 3, dh, &dx, &s->in)); /* f: the only all-reduce */
    return mt_norm_layer_backward(ctx, &b->norm, dx, dy, dx, &s->norm);
}

/* ---- a loop that trains it --------------------------------------------------------------------------------------- */

typedef struct settings {
    int steps, cuda, invariant, hashes, sequence_parallel; /* steps: at most STEPS */
    mt_dtype dtype;
    float loss[STEPS];
} settings;

/* One training step. The block learns to output the predecessor of each token; an MLP without attention cannot. */
static mt_status train_step(mt_context *ctx, const block *b, mt_params *params, mt_optimizer *adamw, const settings *s,
                            float *loss) {
    static const float scale = 1.0f / TOKENS;
    const mt_grid *grid = mt_params_grid(params);
    const int64_t rows = s->sequence_parallel ? TOKENS / grid->tp_size : TOKENS;
    const int64_t first = s->sequence_parallel ? grid->tp_rank * rows : 0; /* this rank's first token */
    size_t mark = mt_arena_mark(ctx);
    mt_tensor x, y, dx, all, host_side;
    mt_arena_request memory[] = {{&x, s->dtype, rows, HIDDEN},
                                 {&y, s->dtype, rows, HIDDEN},
                                 {&dx, s->dtype, rows, HIDDEN},
                                 {&host_side, MT_F32, TOKENS, HIDDEN}};
    float in[TOKENS * HIDDEN], out[TOKENS * HIDDEN];
    double sum = 0;
    block_saved saved;
    MT_TRY(mt_arena_tensors(ctx, memory, 4));
    for (int i = 0; i < TOKENS * HIDDEN; i++) in[i] = sinf(0.013f * (float)(i % 4001) * (float)(1 + i % 7));
    MT_TRY(mt_upload(ctx, in, host_side));
    MT_TRY(mt_convert(ctx, mt_tensor_rows(host_side, first, rows), x));
    MT_TRY(mt_params_zero_grad(ctx, params));
    MT_TRY(block_forward(ctx, b, x, y, &saved));
    MT_TRY(mt_gather_tokens(ctx, grid->tp, s->sequence_parallel, y, &all));
    MT_TRY(mt_convert(ctx, all, host_side));
    MT_TRY(mt_download(ctx, host_side, out));
    for (int i = 0; i < TOKENS * HIDDEN; i++) { /* out becomes dy */
        float error = out[i] - (i / HIDDEN % SEQ == 0 ? 0 : in[i - HIDDEN]);
        sum += 0.5 * (double)(error * error * scale);
        out[i] = error * scale;
    }
    *loss = (float)sum;
    MT_TRY(mt_upload(ctx, out, host_side));
    MT_TRY(mt_convert(ctx, mt_tensor_rows(host_side, first, rows), y));
    MT_TRY(block_backward(ctx, b, y, dx, &saved));
    mt_arena_release(ctx, mark);
    MT_TRY(mt_sync_gradients(ctx, params)); /* sums the gains' gradients, which are of this rank's heads or tokens */
    return mt_optimizer_step(ctx, adamw, 3e-3f, 1);
}

static void print_hash(void *user, const char *name, uint64_t hash, int differs) {
    if (*(const int *)user == 0)
        printf("  %016llx %s%s\n", (unsigned long long)hash, name, differs ? ": ranks differ" : "");
}

static mt_status run(mt_comm *world, mt_context *ctx, mt_params *params, mt_optimizer *adamw, settings *s) {
    mt_comm *tp = mt_params_grid(params)->tp;
    mt_hash_log *log = NULL;
    int rank = mt_comm_rank(world);
    mt_status status = MT_SUCCESS;
    block b;
    float loss = 0;
    MT_TRY(mt_params_set_dtype(ctx, params, s->dtype));
    MT_TRY(block_create(ctx, params, s->sequence_parallel, &b));
    MT_TRY(mt_params_init(ctx, params, 1234));
    MT_TRY(mt_optimizer_create(ctx, params, NULL, adamw));
    for (int step = 0; step < s->steps && status == MT_SUCCESS; step++) {
        if (s->hashes && step == s->steps - 1) MT_TRY(mt_hash_log_create(ctx, mt_params_grid(params), &log));
        mt_comm_ledger_reset(tp);
        status = train_step(ctx, &b, params, adamw, s, &loss);
        if (rank == 0) s->loss[step] = loss;
        if (rank == 0 && (step % 10 == 0 || step == s->steps - 1)) printf("step %2d  loss %.5f\n", step, (double)loss);
    }
    if (status == MT_SUCCESS && rank == 0)
        printf("%d ranks, %llu all-reduces per step, the last one of the gains\n", mt_comm_size(world),
               (unsigned long long)mt_comm_ledger(tp).calls[MT_ALL_REDUCE]);
    if (status == MT_SUCCESS && log) status = mt_hash_log_flush(ctx, log, print_hash, &rank);
    mt_hash_log_destroy(log);
    return status;
}

static mt_status rank_main(mt_comm *world, void *user) {
    settings *s = (settings *)user;
    mt_context *ctx = NULL;
    mt_params *params = NULL;
    mt_optimizer adamw;
    mt_grid grid;
    mt_grid_desc shape;
    mt_context_desc where;
    memset(&adamw, 0, sizeof adamw);
    memset(&grid, 0, sizeof grid);
    memset(&shape, 0, sizeof shape);
    memset(&where, 0, sizeof where);
    shape.tp = mt_comm_size(world);
    where.device = s->cuda ? MT_DEVICE_CUDA : MT_DEVICE_CPU;
    where.invariant = s->invariant;
    mt_status status = mt_context_create(world, &where, &ctx);
    if (status == MT_SUCCESS) status = mt_grid_create(world, &shape, &grid);
    if (status == MT_SUCCESS) status = mt_params_create(ctx, &grid, &params);
    if (status == MT_SUCCESS) status = run(world, ctx, params, &adamw, s);
    mt_optimizer_destroy(ctx, &adamw);
    mt_params_destroy(params);
    mt_grid_destroy(&grid);
    mt_context_destroy(ctx);
    return status;
}

#ifndef CUSTOM_BLOCK_NO_MAIN /* tests/test_custom_block.c and test_cuda_custom_block.cu have their own main */
int main(int argc, char **argv) {
    settings s;
    mt_launch_desc launch;
    memset(&s, 0, sizeof s);
    memset(&launch, 0, sizeof launch);
    s.steps = STEPS;
    launch.ranks = 2;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            printf("usage: 02_custom_block [RANKS] [bf16] [cuda] [invariant] [hashes] [sequence_parallel]\n");
            return 0;
        }
        if (strcmp(argv[i], "bf16") == 0) s.dtype = MT_BF16;
        else if (strcmp(argv[i], "cuda") == 0) s.cuda = 1;
        else if (strcmp(argv[i], "invariant") == 0) s.invariant = HEADS;
        else if (strcmp(argv[i], "hashes") == 0) s.hashes = 1;
        else if (strcmp(argv[i], "sequence_parallel") == 0) s.sequence_parallel = 1;
        else launch.ranks = atoi(argv[i]);
        if (launch.ranks < 1) {
            fprintf(stderr, "02_custom_block: '%s' is neither a number of ranks nor a setting, see --help\n", argv[i]);
            return 2;
        }
    }
    return mt_launch(&launch, rank_main, &s) == MT_SUCCESS ? 0 : 1;
}
#endif
