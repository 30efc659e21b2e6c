/* 03_nccl - puts the MLP of 01_mlp.c into a CUDA program that has its own streams, buffers and NCCL communicators.

   nvcc -O3 -arch=native -I. examples/03_nccl.cu -o 03_nccl -lcublasLt -lnccl && ./03_nccl

   The program has a thread for each GPU, calls ncclCommInitAll, and has kernels for its loss and its update. The calls
   of megatron.h are marked (1) to (6); they work in the program's streams. The program uses all GPUs of the machine, or
   the number that you give (./03_nccl 2). On any number of GPUs the losses are the same up to rounding. */

#define MEGATRON_IMPLEMENTATION
#define MT_USE_NCCL
#include "megatron.h"
#include <math.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <thread>
#include <vector>

enum { TOKENS = 256, HIDDEN = 64, STEPS = 200 };

/* What the program has without megatron.h: data, loss, update, and GPUs with their streams and communicators. */
static void make_data(float *x, float *target) {
    for (int i = 0; i < TOKENS * HIDDEN; i++) {
        x[i] = sinf(0.37f * (float)i) + cosf(0.11f * (float)(i % 997));
        target[i] = 0.5f * x[i] * x[i] - 0.25f * x[(i + 1) % (TOKENS * HIDDEN)];
    }
}

/* One thread computes the loss and the gradient of one token. */
static __global__ void squared_error(const float *y, const float *target, float *dy, float *loss) {
    int token = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    float sum = 0.0f;
    for (int i = token * HIDDEN; i < (token + 1) * HIDDEN; i++) {
        float error = y[i] - target[i];
        sum += 0.5f * error * error / TOKENS;
        dy[i] = error / TOKENS;
    }
    loss[token] = sum;
}

static __global__ void descend(float *value, const float *grad, int n, float rate) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) value[i] -= rate * grad[i];
}

struct gpu {
    int device;
    cudaStream_t stream;
    ncclComm_t comm;
    float *x, *target, *y, *dy, *dx, *loss;
};

static int gpu_open(gpu *g) {
    float **buffers[] = {&g->x, &g->target, &g->y, &g->dy, &g->dx, &g->loss};
    std::vector<float> x(TOKENS * HIDDEN), target(TOKENS * HIDDEN);
    size_t bytes = x.size() * sizeof(float);
    if (cudaSetDevice(g->device) != cudaSuccess || cudaStreamCreate(&g->stream) != cudaSuccess) return 0;
    for (float **buffer : buffers)
        if (cudaMalloc((void **)buffer, bytes) != cudaSuccess) return 0;
    make_data(x.data(), target.data());
    return cudaMemcpy(g->x, x.data(), bytes, cudaMemcpyHostToDevice) == cudaSuccess &&
           cudaMemcpy(g->target, target.data(), bytes, cudaMemcpyHostToDevice) == cudaSuccess;
}

static void gpu_close(gpu *g) {
    float *buffers[] = {g->x, g->target, g->y, g->dy, g->dx, g->loss};
    cudaSetDevice(g->device);
    for (float *buffer : buffers) cudaFree(buffer);
    cudaStreamDestroy(g->stream);
    if (g->comm) ncclCommDestroy(g->comm);
}

static mt_status step(mt_context *ctx, mt_params *params, const mt_mlp *mlp, const gpu *g) {
    mt_mlp_saved saved;
    size_t mark = mt_arena_mark(ctx);
    MT_TRY(mt_params_zero_grad(ctx, params));
    /* (5) forward on views of the program's buffers; every rank has the same x and gets the same y */
    MT_TRY(mt_mlp_forward(ctx, mlp, mt_tensor_f32(g->x, TOKENS, HIDDEN), mt_tensor_f32(g->y, TOKENS, HIDDEN), &saved));
    squared_error<<<TOKENS / 64, 64, 0, g->stream>>>(g->y, g->target, g->dy, g->loss);
    /* (6) backward adds to the gradients of the parameters and writes dx */
    MT_TRY(
        mt_mlp_backward(ctx, mlp, mt_tensor_f32(g->dy, TOKENS, HIDDEN), mt_tensor_f32(g->dx, TOKENS, HIDDEN), &saved));
    mt_arena_release(ctx, mark);
    for (int i = 0; i < mt_params_count(params); i++) {
        mt_param *p = mt_params_at(params, i);
        int n = (int)(p->value.rows * p->value.cols);
        descend<<<(n + 127) / 128, 128, 0, g->stream>>>((float *)p->value.data, (const float *)p->grad.data, n, 0.05f);
    }
    return MT_SUCCESS;
}

/* mt_download waits for the stream. It returns an error when a peer is gone; cudaStreamSynchronize would not return. */
static mt_status print_loss(mt_context *ctx, const gpu *g, int i) {
    std::vector<float> loss(TOKENS);
    double sum = 0;
    MT_TRY(mt_download(ctx, mt_tensor_f32(g->loss, 1, TOKENS), loss.data()));
    for (float each : loss) sum += each;
    printf("step %3d  loss %.6f\n", i, sum);
    return MT_SUCCESS;
}

static mt_status fit(mt_context *ctx, mt_params *params, const mt_mlp *mlp, const gpu *g, int speaks) {
    for (int i = 0; i < STEPS; i++) {
        MT_TRY(step(ctx, params, mlp, g));
        if (speaks && (i % 40 == 0 || i == STEPS - 1)) MT_TRY(print_loss(ctx, g, i));
    }
    return mt_context_synchronize(ctx);
}

/* Runs on a thread for each GPU. */
static void worker(gpu *g, int *failed) {
    mt_context *ctx = NULL;
    mt_comm *world = NULL;
    mt_params *params = NULL;
    mt_grid grid = {};
    mt_mlp mlp;
    mt_context_desc where = {};
    mt_grid_desc shape = {};
    mt_mlp_desc desc = {};
    where.device = MT_DEVICE_CUDA;
    where.ordinal = g->device;
    where.stream = g->stream;
    desc.hidden = HIDDEN;                                     /* the defaults: ffn = 4 * hidden, GeLU, biases */
    mt_status status = mt_context_create(NULL, &where, &ctx); /* (1) in the program's stream */
    /* (2) with the program's communicator; the timeout is 60 s */
    if (status == MT_SUCCESS) status = mt_comm_create_nccl(ctx, g->comm, 60.0, &world);
    shape.tp = mt_comm_size(world);
    if (status == MT_SUCCESS) status = mt_grid_create(world, &shape, &grid); /* (3) all ranks split the MLP */
    if (status == MT_SUCCESS) status = mt_params_create(ctx, &grid, &params);
    if (status == MT_SUCCESS) status = mt_mlp_create(ctx, params, "mlp", &desc, &mlp); /* (4) this rank's shard */
    if (status == MT_SUCCESS) status = mt_params_init(ctx, params, 1234);
    if (status == MT_SUCCESS) status = fit(ctx, params, &mlp, g, mt_comm_rank(world) == 0);
    if (status == MT_SUCCESS && mt_comm_rank(world) == 0)
        printf("%d ranks, %lld of %lld parameters here, %llu all-reduces in %d steps\n", mt_comm_size(world),
               (long long)mt_params_elements(params), (long long)mt_params_global_elements(params),
               (unsigned long long)mt_comm_ledger(grid.tp).calls[MT_ALL_REDUCE], STEPS);
    *failed = status != MT_SUCCESS;
    if (*failed) fprintf(stderr, "03_nccl: GPU %d: %s: %s\n", g->device, mt_status_name(status), mt_last_error(ctx));
    mt_params_destroy(params);
    mt_grid_destroy(&grid);
    mt_comm_destroy(world);
    if (*failed) { /* a peer may be gone: without the abort, mt_context_destroy would wait for it */
        ncclCommAbort(g->comm);
        g->comm = NULL;
    }
    mt_context_destroy(ctx);
}

int main(int argc, char **argv) {
    int count = 0;
    if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        printf("usage: 03_nccl [GPUS]      number of GPUs, all of the machine by default\n");
        return 0;
    }
    if (argc > 2 || (argc > 1 && atoi(argv[1]) < 1)) {
        fprintf(stderr, "03_nccl: '%s' is not a number of GPUs, see --help\n", argv[argc > 2 ? 2 : 1]);
        return 2;
    }
    if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
    if (argc > 1 && atoi(argv[1]) < count) count = atoi(argv[1]);
    std::vector<gpu> gpus((size_t)count);
    std::vector<ncclComm_t> comms(gpus.size());
    std::vector<int> failed(gpus.size());
    std::vector<std::thread> threads;
    if (count < 1 || ncclCommInitAll(comms.data(), count, NULL) != ncclSuccess) {
        fprintf(stderr, "03_nccl: no GPU, or no communicator between %d of them\n", count);
        return 1;
    }
    for (int i = 0; i < count; i++) {
        gpus[(size_t)i] = gpu{i, NULL, comms[(size_t)i], NULL, NULL, NULL, NULL, NULL, NULL};
        if (!gpu_open(&gpus[(size_t)i])) {
            fprintf(stderr, "03_nccl: no memory or no stream on GPU %d\n", i);
            return 1;
        }
    }
    for (size_t i = 0; i < gpus.size(); i++) threads.emplace_back(worker, &gpus[i], &failed[i]);
    for (std::thread &thread : threads) thread.join();
    for (gpu &g : gpus) gpu_close(&g);
    for (int each : failed)
        if (each) return 1;
    return 0;
}
