/* after - before.cu with tensor parallelism over several GPUs (./after 2), with its own streams and ncclComm_t.

   nvcc -O3 -arch=native -I. examples/05_own_weights/after.cu -o after -lcublasLt -lnccl && ./after

   The text is generated sums. docs/own-weights.md says how before.cu and after.cu differ. */

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

enum { TOKENS = 64, VOCAB = 128, STEPS = 40 };

#define CUDA(call) (call) == cudaSuccess ? (void)0 : (fprintf(stderr, "%s: no success\n", #call), exit(1))
#define MT(m, call) (call) == MT_SUCCESS ? (void)0 : (fprintf(stderr, "%s\n", mt_last_error((m)->ctx)), exit(1))

/* ---- kernels: one thread computes one element of the first argument, which has n elements ------------------------ */

static __device__ int element() { return (int)(blockIdx.x * blockDim.x + threadIdx.x); }

/* x [TOKENS, cols] = the rows `ids` of the table. Rows from first on are here; the others are 0. */
static __global__ void embed(float *x, int n, const int *ids, const float *table, int cols, int first, int rows) {
    int i = element();
    int row = i < n ? ids[i / cols] - first : 0;
    if (i < n) x[i] = row >= 0 && row < rows ? table[row * cols + i % cols] : 0.0f;
}

static __global__ void embed_backward(float *dtable, int n, const int *ids, const float *dx, int cols, int first) {
    int i = element();
    for (int t = 0; i < n && t < TOKENS; t++)
        if (ids[t] == first + i / cols) dtable[i] += dx[t * cols + i % cols];
}

/* y [TOKENS, out] = x [TOKENS, in] w^T, with w [out, in] */
static __global__ void matmul(float *y, int n, const float *x, const float *w, int in, int out) {
    int i = element();
    float sum = 0;
    for (int j = 0; i < n && j < in; j++) sum += x[i / out * in + j] * w[i % out * in + j];
    if (i < n) y[i] = sum;
}

/* dx [TOKENS, in] = dy [TOKENS, out] w */
static __global__ void input_gradient(float *dx, int n, const float *dy, const float *w, int in, int out) {
    int i = element();
    float sum = 0;
    for (int o = 0; i < n && o < out; o++) sum += dy[i / in * out + o] * w[o * in + i % in];
    if (i < n) dx[i] = sum;
}

/* dw [out, in] = dy^T x */
static __global__ void weight_gradient(float *dw, int n, const float *dy, const float *x, int in, int out) {
    int i = element();
    float sum = 0;
    for (int t = 0; i < n && t < TOKENS; t++) sum += dy[t * out + i / in] * x[t * in + i % in];
    if (i < n) dw[i] = sum;
}

/* dbias [n] = the sum of the rows of dy [TOKENS, n] */
static __global__ void bias_gradient(float *dbias, int n, const float *dy) {
    int i = element();
    float sum = 0;
    for (int t = 0; i < n && t < TOKENS; t++) sum += dy[t * n + i];
    if (i < n) dbias[i] = sum;
}

/* y += x + bias; bias may be NULL */
static __global__ void add(float *y, int n, const float *x, const float *bias, int cols) {
    int i = element();
    if (i < n) y[i] += x[i] + (bias ? bias[i % cols] : 0.0f);
}

/* a = squared_relu(h + bias) */
static __global__ void activate(float *a, int n, const float *h, const float *bias, int cols) {
    int i = element();
    if (i < n) a[i] = h[i] + bias[i % cols] > 0 ? (h[i] + bias[i % cols]) * (h[i] + bias[i % cols]) : 0.0f;
}

static __global__ void activate_backward(float *da, int n, const float *h, const float *bias, int cols) {
    int i = element();
    if (i < n) da[i] *= h[i] + bias[i % cols] > 0 ? 2 * (h[i] + bias[i % cols]) : 0.0f;
}

static __global__ void adamw(float *w, int n, const float *grad, float *m, float *v, float lr, int step) {
    int i = element();
    if (i >= n) return;
    m[i] = 0.9f * m[i] + 0.1f * grad[i];
    v[i] = 0.99f * v[i] + 0.01f * grad[i] * grad[i];
    float mean = m[i] / (1.0f - powf(0.9f, (float)step)), square = v[i] / (1.0f - powf(0.99f, (float)step));
    w[i] -= lr * (mean / (sqrtf(square) + 1e-8f) + 0.01f * w[i]);
}

/* ---- buffers: all weights are one allocation, and so are the gradients and each of the two moments --------------- */

enum { WTE, W1, B1, W2, B2, WEIGHTS };

struct config {
    int hidden, ffn, vocab; /* vocab: rows of the table of tokens, which is also the weight of the head */
};

struct tensor {
    int rows, cols;
};

struct model {
    config c;
    cudaStream_t stream;
    mt_context *ctx;
    mt_comm *tp;
    int weights, *ids, *targets;
    float *w[WEIGHTS], *dw[WEIGHTS], *m, *v, *x, *h, *a, *y, *logits, *losses, *dx, *da, *dy;
};

static std::vector<tensor> list_weights(const config &c) {
    return {{c.vocab, c.hidden}, {c.ffn, c.hidden}, {c.ffn, 1}, {c.hidden, c.ffn}, {c.hidden, 1}};
}

static float *allocate(int count) {
    float *memory = NULL;
    CUDA(cudaMalloc((void **)&memory, (size_t)count * sizeof(float)));
    CUDA(cudaMemset(memory, 0, (size_t)count * sizeof(float)));
    return memory;
}

static std::vector<float> first_values(int count, int is_bias, unsigned *state) {
    std::vector<float> values((size_t)count);
    for (float &value : values) {
        *state = *state * 1664525u + 1013904223u;
        value = is_bias ? 0.0f : 0.7f * ((float)(*state >> 8) / 16777216.0f - 0.5f);
    }
    return values;
}

static void create(model *m) {
    const mt_placement split[WEIGHTS] = {MT_SPLIT_ROWS, MT_SPLIT_ROWS, MT_SPLIT_ROWS, MT_SPLIT_COLS, MT_REPLICATED};
    const int ranks = mt_comm_size(m->tp), rank = mt_comm_rank(m->tp);
    std::vector<tensor> whole = list_weights(m->c);
    m->c.ffn /= ranks, m->c.vocab /= ranks;
    std::vector<tensor> list = list_weights(m->c);
    unsigned state = 1337;
    m->weights = 0;
    for (const tensor &t : list) m->weights += t.rows * t.cols;
    m->w[0] = allocate(m->weights), m->dw[0] = allocate(m->weights);
    m->m = allocate(m->weights), m->v = allocate(m->weights);
    float **hidden[] = {&m->x, &m->y, &m->dx, &m->dy}, **ffn[] = {&m->h, &m->a, &m->da};
    for (float **each : hidden) *each = allocate(TOKENS * m->c.hidden);
    for (float **each : ffn) *each = allocate(TOKENS * m->c.ffn);
    m->logits = allocate(TOKENS * m->c.vocab), m->losses = allocate(TOKENS);
    m->ids = (int *)allocate(TOKENS), m->targets = (int *)allocate(TOKENS);
    for (int i = 0; i < WEIGHTS; i++) {
        const int size = list[i].rows * list[i].cols;
        if (i + 1 < WEIGHTS) m->w[i + 1] = m->w[i] + size, m->dw[i + 1] = m->dw[i] + size;
        const mt_shard shard = {whole[i].rows, whole[i].cols, split[i], 1, 1, rank, ranks, 0};
        std::vector<float> all = first_values(whole[i].rows * whole[i].cols, i == B1 || i == B2, &state), values(size);
        MT(m, mt_shard_copy(&shard, MT_F32, 0, all.data(), values.data()));
        CUDA(cudaMemcpy(m->w[i], values.data(), size * sizeof(float), cudaMemcpyHostToDevice));
    }
}

static void destroy(model *m) {
    void *all[] = {m->w[0],   m->dw[0],  m->m,  m->v,  m->x,  m->h,   m->a,      m->y,
                   m->logits, m->losses, m->dx, m->da, m->dy, m->ids, m->targets};
    for (void *each : all) CUDA(cudaFree(each));
}

/* ---- model and loop ---------------------------------------------------------------------------------------------- */

static int blocks(int n) { return (n + 127) / 128; }

static void forward(model *m) {
    const int C = m->c.hidden, F = m->c.ffn, V = m->c.vocab, TC = TOKENS * C, TF = TOKENS * F, TV = TOKENS * V;
    embed<<<blocks(TC), 128, 0, m->stream>>>(m->x, TC, m->ids, m->w[WTE], C, V * mt_comm_rank(m->tp), V);
    MT(m, mt_reduce_from_tensor_region_forward(m->ctx, m->tp, mt_tensor_f32(m->x, TOKENS, C)));
    matmul<<<blocks(TF), 128, 0, m->stream>>>(m->h, TF, m->x, m->w[W1], C, F);
    activate<<<blocks(TF), 128, 0, m->stream>>>(m->a, TF, m->h, m->w[B1], F);
    matmul<<<blocks(TC), 128, 0, m->stream>>>(m->y, TC, m->a, m->w[W2], F, C);
    MT(m, mt_reduce_from_tensor_region_forward(m->ctx, m->tp, mt_tensor_f32(m->y, TOKENS, C)));
    add<<<blocks(TC), 128, 0, m->stream>>>(m->y, TC, m->x, m->w[B2], C);
    matmul<<<blocks(TV), 128, 0, m->stream>>>(m->logits, TV, m->y, m->w[WTE], C, V);
    mt_cross_entropy_desc desc = {};
    desc.vocab = VOCAB;
    mt_tensor logits = mt_tensor_f32(m->logits, TOKENS, V), losses = mt_tensor_f32(m->losses, 1, TOKENS);
    MT(m, mt_vocab_parallel_cross_entropy_forward_backward(m->ctx, m->tp, &desc, logits, m->targets, mt_none(),
                                                           1.0f / TOKENS, losses));
}

static void backward(model *m) {
    const int C = m->c.hidden, F = m->c.ffn, V = m->c.vocab, TC = TOKENS * C, TF = TOKENS * F;
    input_gradient<<<blocks(TC), 128, 0, m->stream>>>(m->dy, TC, m->logits, m->w[WTE], C, V);
    MT(m, mt_copy_to_tensor_region_backward(m->ctx, m->tp, mt_tensor_f32(m->dy, TOKENS, C)));
    weight_gradient<<<blocks(V * C), 128, 0, m->stream>>>(m->dw[WTE], V * C, m->logits, m->y, C, V);
    bias_gradient<<<blocks(C), 128, 0, m->stream>>>(m->dw[B2], C, m->dy);
    weight_gradient<<<blocks(C * F), 128, 0, m->stream>>>(m->dw[W2], C * F, m->dy, m->a, F, C);
    input_gradient<<<blocks(TF), 128, 0, m->stream>>>(m->da, TF, m->dy, m->w[W2], F, C);
    activate_backward<<<blocks(TF), 128, 0, m->stream>>>(m->da, TF, m->h, m->w[B1], F);
    bias_gradient<<<blocks(F), 128, 0, m->stream>>>(m->dw[B1], F, m->da);
    weight_gradient<<<blocks(F * C), 128, 0, m->stream>>>(m->dw[W1], F * C, m->da, m->x, C, F);
    input_gradient<<<blocks(TC), 128, 0, m->stream>>>(m->dx, TC, m->da, m->w[W1], C, F);
    MT(m, mt_copy_to_tensor_region_backward(m->ctx, m->tp, mt_tensor_f32(m->dx, TOKENS, C)));
    add<<<blocks(TC), 128, 0, m->stream>>>(m->dx, TC, m->dy, nullptr, C);
    embed_backward<<<blocks(V * C), 128, 0, m->stream>>>(m->dw[WTE], V * C, m->ids, m->dx, C, V * mt_comm_rank(m->tp));
}

/* The tokens of a step, which are characters of consecutive sums, and the tokens that follow them. */
static void next_batch(int step, int *ids, int *targets) {
    char text[2 * TOKENS], *end = text;
    for (int i = 8 * step; end - text <= TOKENS; i++)
        end += snprintf(end, 16, "%d+%d=%d\n", i % 100, i * i % 100, i % 100 + i * i % 100);
    for (int i = 0; i < TOKENS; i++) ids[i] = text[i], targets[i] = text[i + 1];
}

static void train(int rank, int ranks, ncclUniqueId id) {
    model m = {};
    mt_context_desc where = {};
    ncclComm_t nccl;
    CUDA(cudaSetDevice(rank));
    m.c = config{16, 64, VOCAB};
    CUDA(cudaStreamCreate(&m.stream));
    if (ncclCommInitRank(&nccl, ranks, id, rank) != ncclSuccess) exit(1);
    where.device = MT_DEVICE_CUDA, where.ordinal = rank, where.stream = m.stream, where.arena_bytes = 1 << 20;
    MT(&m, mt_context_create(NULL, &where, &m.ctx));
    MT(&m, mt_comm_create_nccl(m.ctx, nccl, 60.0, &m.tp));
    create(&m);
    printf("rank %d: %d bytes of weights\n", rank, 4 * m.weights);
    for (int step = 1; step <= STEPS; step++) {
        int ids[TOKENS], targets[TOKENS];
        float losses[TOKENS];
        double loss = 0;
        next_batch(step, ids, targets);
        CUDA(cudaMemcpyAsync(m.ids, ids, sizeof ids, cudaMemcpyHostToDevice, m.stream));
        CUDA(cudaMemcpyAsync(m.targets, targets, sizeof targets, cudaMemcpyHostToDevice, m.stream));
        forward(&m);
        backward(&m);
        adamw<<<blocks(m.weights), 128, 0, m.stream>>>(m.w[0], m.weights, m.dw[0], m.m, m.v, 3e-3f, step);
        MT(&m, mt_download(m.ctx, mt_tensor_f32(m.losses, 1, TOKENS), losses));
        for (float each : losses) loss += each / TOKENS;
        if (rank == 0) printf("step %2d  loss %.7f\n", step, loss);
    }
    destroy(&m);
    mt_comm_destroy(m.tp);
    ncclCommDestroy(nccl);
    mt_context_destroy(m.ctx);
    CUDA(cudaStreamDestroy(m.stream));
}

/* --help is no mistake. */
static int usage(const char *text, const char *argument) {
    const int helps = strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0;
    fprintf(helps ? stdout : stderr, "usage: %s\n", text);
    return helps ? 0 : 2;
}

int main(int argc, char **argv) {
    const int ranks = argc > 1 ? atoi(argv[1]) : 2;
    if (argc > 1 && (argv[1][0] < '0' || argv[1][0] > '9')) return usage("after [RANKS]", argv[1]);
    ncclUniqueId id;
    std::vector<std::thread> threads;
    if (ranks < 1 || 64 % ranks != 0) return fprintf(stderr, "%d ranks do not divide 64 features\n", ranks), 1;
    if (ncclGetUniqueId(&id) != ncclSuccess) return fprintf(stderr, "ncclGetUniqueId failed\n"), 1;
    for (int rank = 0; rank < ranks; rank++) threads.emplace_back(train, rank, ranks, id);
    for (std::thread &thread : threads) thread.join();
    return 0;
}
