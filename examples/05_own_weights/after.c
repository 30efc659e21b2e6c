/* after - before.c with tensor parallelism: heads, MLP and vocabulary are split over 1, 2 or 4 ranks (./after 4 FILE).

   cc -O3 -march=native -I. examples/05_own_weights/after.c -o after -lm -lpthread && ./after 2

   It trains on the file that the last argument names, or on generated sums. docs/own-weights.md says how
   before.c and after.c differ. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { LAYERS = 2, BATCH = 4, SEQ = 32, TOKENS = BATCH * SEQ, STEPS = 60, TEXT = 1 << 16 };

/* Rows vocab to padded_vocab - 1 of the token table are no tokens. */
typedef struct config {
    int hidden, heads, head_dim, ffn, vocab, padded_vocab;
} config;

/* ---- buffers: the weights are one allocation, and so are the gradients, the activations and their gradients ------ */

enum { WTE, WPE, QKV_W, PROJ_W, FC_W, FC2_W, QKV_B, PROJ_B, FC_B, FC2_B, LN1_B, LN2_B, LNF_B, LN1_G, LN2_G, LNF_G };
enum { X, LN1, LN1_S, QKV, ATT, HEADS, MID, LN2, LN2_S, FC, GELU, LNF, LNF_S, LOGITS, TENSORS = 16 };

typedef struct tensor {
    int layers, rows, cols; /* a [rows, cols] matrix for each layer */
} tensor;

/* The rows of QKV_W are those of all queries, then of all keys, then of all values. The head's weight is WTE. */
static void list_weights(const config *c, tensor *list) {
    const int C = c->hidden, A = c->heads * c->head_dim, F = c->ffn;
    const tensor all[TENSORS] = {
        [WTE] = {1, c->padded_vocab, C},
        [WPE] = {1, SEQ, C},
        [QKV_W] = {LAYERS, 3 * A, C},
        [PROJ_W] = {LAYERS, C, A},
        [FC_W] = {LAYERS, F, C},
        [FC2_W] = {LAYERS, C, F},
        [QKV_B] = {LAYERS, 3 * A, 1},
        [PROJ_B] = {LAYERS, C, 1},
        [FC_B] = {LAYERS, F, 1},
        [FC2_B] = {LAYERS, C, 1},
        [LN1_B] = {LAYERS, C, 1},
        [LN2_B] = {LAYERS, C, 1},
        [LNF_B] = {1, C, 1},
        [LN1_G] = {LAYERS, C, 1},
        [LN2_G] = {LAYERS, C, 1},
        [LNF_G] = {1, C, 1},
    };
    memcpy(list, all, sizeof all);
}

/* X is the input of a layer; the last one is the output. LN*_S are mean and 1 / deviation of each token. */
static void list_activations(const config *c, tensor *list) {
    const int C = c->hidden, A = c->heads * c->head_dim, F = c->ffn;
    const tensor all[TENSORS] = {
        [X] = {LAYERS + 1, TOKENS, C}, [LN1] = {LAYERS, TOKENS, C},
        [LN1_S] = {LAYERS, TOKENS, 2}, [QKV] = {LAYERS, TOKENS, 3 * A},
        [HEADS] = {LAYERS, TOKENS, A}, [ATT] = {LAYERS, TOKENS, c->heads * SEQ},
        [MID] = {LAYERS, TOKENS, C},   [LN2] = {LAYERS, TOKENS, C},
        [LN2_S] = {LAYERS, TOKENS, 2}, [FC] = {LAYERS, TOKENS, F},
        [GELU] = {LAYERS, TOKENS, F},  [LNF] = {1, TOKENS, C},
        [LNF_S] = {1, TOKENS, 2},      [LOGITS] = {1, TOKENS, c->padded_vocab},
    };
    memcpy(list, all, sizeof all);
}

/* How the weights are split. The others are whole on each rank. */
static const mt_placement split[TENSORS] = {
    [WTE] = MT_SPLIT_ROWS,  [QKV_W] = MT_SPLIT_ROWS,  [QKV_B] = MT_SPLIT_ROWS, [FC_W] = MT_SPLIT_ROWS,
    [FC_B] = MT_SPLIT_ROWS, [PROJ_W] = MT_SPLIT_COLS, [FC2_W] = MT_SPLIT_COLS};

/* Ends the program after an error. */
#define CHECK(m, call) ((call) == MT_SUCCESS ? (void)0 : (fprintf(stderr, "%s\n", mt_last_error((m)->ctx)), exit(1)))

/* w[l][i] is tensor i of layer l, in the buffer w[0][0]; dw, a and da are alike. */
typedef struct model {
    config c;
    mt_context *ctx;
    mt_comm *tp;
    int weights, activations; /* numbers of floats */
    float *w[LAYERS + 1][TENSORS], *dw[LAYERS + 1][TENSORS], *a[LAYERS + 1][TENSORS], *da[LAYERS + 1][TENSORS];
    float *moments; /* of AdamW: all first, then all second ones */
} model;

static int allocate(const tensor *list, float *to[LAYERS + 1][TENSORS]) {
    int total = 0, at = 0;
    for (int i = 0; i < TENSORS; i++) total += list[i].layers * list[i].rows * list[i].cols;
    float *buffer = calloc((size_t)total, sizeof(float));
    if (!buffer) exit(1);
    for (int i = 0; i < TENSORS; i++)
        for (int l = 0; l < list[i].layers; l++, at += list[i].rows * list[i].cols) to[l][i] = buffer + at;
    return total;
}

/* Returns the first values of weight i, which the caller frees: matrices uniform, biases 0, gains 1. */
static float *first_values(int i, int count, unsigned *state) {
    float *values = malloc((size_t)count * sizeof(float));
    if (!values) exit(1);
    for (int j = 0; j < count; j++) {
        *state = *state * 1664525u + 1013904223u;
        values[j] = i >= LN1_G ? 1.0f : i >= QKV_B ? 0.0f : 0.35f * ((float)(*state >> 8) / 16777216.0f - 0.5f);
    }
    return values;
}

static void create(model *m) {
    tensor weights[TENSORS], activations[TENSORS], whole[TENSORS];
    const int ranks = mt_comm_size(m->tp), rank = mt_comm_rank(m->tp);
    unsigned state = 1337;
    if (m->c.heads % ranks) fprintf(stderr, "%d ranks do not divide %d heads\n", ranks, m->c.heads), exit(1);
    list_weights(&m->c, whole);
    m->c.heads /= ranks, m->c.ffn /= ranks, m->c.padded_vocab /= ranks;
    list_weights(&m->c, weights);
    list_activations(&m->c, activations);
    m->weights = allocate(weights, m->w);
    m->activations = allocate(activations, m->a);
    allocate(weights, m->dw);
    allocate(activations, m->da);
    m->moments = calloc((size_t)m->weights * 2, sizeof(float));
    if (!m->moments) exit(1);
    for (int i = 0; i < TENSORS; i++)
        for (int l = 0; l < weights[i].layers; l++) {
            const tensor *t = &whole[i];
            const mt_shard shard = {t->rows, t->cols, split[i], i == QKV_W || i == QKV_B ? 3 : 1, 1, rank, ranks, 0};
            float *values = first_values(i, t->rows * t->cols, &state);
            CHECK(m, mt_shard_copy(&shard, MT_F32, 0, values, m->w[l][i]));
            free(values);
        }
}

static void destroy(model *m) {
    float *all[] = {m->w[0][0], m->dw[0][0], m->a[0][0], m->da[0][0], m->moments};
    for (int i = 0; i < 5; i++) free(all[i]);
}

/* ---- operators; gradients are added ------------------------------------------------------------------------------ */

static void embed(float *x, const int *ids, const float *wte, const float *wpe, const config *c) {
    const int C = c->hidden;
    for (int i = 0; i < TOKENS; i++)
        for (int j = 0; j < C; j++) {
            x[i * C + j] = ids[i] < 0 || ids[i] >= c->padded_vocab ? 0 : wte[ids[i] * C + j] + wpe[i % SEQ * C + j];
        }
}

static void embed_backward(const float *dx, const int *ids, float *dwte, float *dwpe, const config *c) {
    const int C = c->hidden;
    for (int i = 0; i < TOKENS; i++)
        for (int j = 0; j < C; j++) {
            dwpe[i % SEQ * C + j] += dx[i * C + j];
            if (ids[i] >= 0 && ids[i] < c->padded_vocab) dwte[ids[i] * C + j] += dx[i * C + j];
        }
}

static void layernorm(float *y, float *stats, const float *x, const float *gain, const float *bias, int n) {
    for (int i = 0; i < TOKENS; i++, x += n, y += n, stats += 2) {
        float mean = 0, square = 0;
        for (int j = 0; j < n; j++) mean += x[j] / (float)n;
        for (int j = 0; j < n; j++) square += (x[j] - mean) * (x[j] - mean) / (float)n;
        stats[0] = mean, stats[1] = 1.0f / sqrtf(square + 1e-5f);
        for (int j = 0; j < n; j++) y[j] = (x[j] - mean) * stats[1] * gain[j] + bias[j];
    }
}

static void layernorm_backward(float *dx, float *dgain, float *dbias, const float *dy, const float *x,
                               const float *stats, const float *gain, int n) {
    for (int i = 0; i < TOKENS; i++, x += n, dx += n, dy += n, stats += 2) {
        float sum = 0, product = 0;
        for (int j = 0; j < n; j++) {
            float normed = (x[j] - stats[0]) * stats[1];
            sum += gain[j] * dy[j] / (float)n, product += gain[j] * dy[j] * normed / (float)n;
            dgain[j] += dy[j] * normed, dbias[j] += dy[j];
        }
        for (int j = 0; j < n; j++)
            dx[j] += (gain[j] * dy[j] - sum - (x[j] - stats[0]) * stats[1] * product) * stats[1];
    }
}

/* y [TOKENS, out] = x [TOKENS, in] w^T + bias */
static void matmul(float *y, const float *x, const float *w, const float *bias, int in, int out) {
    for (int i = 0; i < TOKENS; i++)
        for (int o = 0; o < out; o++) {
            float sum = 0;
            for (int j = 0; j < in; j++) sum += x[i * in + j] * w[o * in + j];
            y[i * out + o] = bias ? sum + bias[o] : sum;
        }
}

static void matmul_backward(float *dx, float *dw, float *dbias, const float *dy, const float *x, const float *w, int in,
                            int out) {
    for (int i = 0; i < TOKENS; i++)
        for (int o = 0; o < out; o++) {
            const float d = dy[i * out + o];
            if (dbias) dbias[o] += d;
            for (int j = 0; j < in; j++) dx[i * in + j] += d * w[o * in + j];
            for (int j = 0; j < in; j++) dw[o * in + j] += d * x[i * in + j];
        }
}

/* Causal attention. Row i of qkv has all queries, all keys and all values of token i; p are the probabilities. */
static void attention(float *out, float *p, const float *qkv, const config *c) {
    const int D = c->head_dim, A = c->heads * D;
    for (int i = 0; i < TOKENS; i++)
        for (int h = 0; h < c->heads; h++) {
            const float *q = qkv + i * 3 * A + h * D, *first = qkv + i / SEQ * SEQ * 3 * A + A + h * D;
            float *row = p + (i * c->heads + h) * SEQ, *y = out + i * A + h * D, most = -INFINITY, sum = 0;
            for (int t = 0; t <= i % SEQ; t++) {
                float score = 0;
                for (int j = 0; j < D; j++) score += q[j] * first[t * 3 * A + j];
                row[t] = score / sqrtf((float)D);
                most = fmaxf(most, row[t]);
            }
            for (int t = 0; t <= i % SEQ; t++) sum += row[t] = expf(row[t] - most);
            memset(y, 0, (size_t)D * sizeof(float));
            for (int t = 0; t <= i % SEQ; t++) {
                row[t] /= sum;
                for (int j = 0; j < D; j++) y[j] += row[t] * first[t * 3 * A + A + j];
            }
        }
}

static void attention_backward(float *dqkv, const float *dout, const float *p, const float *qkv, const config *c) {
    const int D = c->head_dim, A = c->heads * D;
    for (int i = 0; i < TOKENS; i++)
        for (int h = 0; h < c->heads; h++) {
            const int at = i * 3 * A + h * D, first = i / SEQ * SEQ * 3 * A + A + h * D; /* of the query, of the keys */
            const float *row = p + (i * c->heads + h) * SEQ, *dy = dout + i * A + h * D;
            float mean = 0; /* of the gradients of the probabilities */
            for (int pass = 0; pass < 2; pass++)
                for (int t = 0; t <= i % SEQ; t++) {
                    const int key = first + t * 3 * A;
                    float dp = 0;
                    for (int j = 0; j < D; j++) dp += dy[j] * qkv[key + A + j];
                    if (pass == 0) {
                        mean += row[t] * dp;
                        continue;
                    }
                    const float ds = row[t] * (dp - mean) / sqrtf((float)D);
                    for (int j = 0; j < D; j++) {
                        dqkv[at + j] += ds * qkv[key + j];
                        dqkv[key + j] += ds * qkv[at + j];
                        dqkv[key + A + j] += row[t] * dy[j];
                    }
                }
        }
}

static void gelu(float *y, const float *x, int n) {
    for (int i = 0; i < n; i++)
        y[i] = 0.5f * x[i] * (1.0f + tanhf(0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
}

static void gelu_backward(float *dx, const float *dy, const float *x, int n) {
    for (int i = 0; i < n; i++) {
        const float t = tanhf(0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i]));
        const float slope = (1.0f - t * t) * 0.7978845608f * (1.0f + 3.0f * 0.044715f * x[i] * x[i]);
        dx[i] += dy[i] * 0.5f * (1.0f + t + x[i] * slope);
    }
}

/* ---- the model --------------------------------------------------------------------------------------------------- */

static void add(float *y, const float *x, const float *bias, int n) {
    for (int i = 0; i < TOKENS * n; i++) y[i] += bias ? x[i] + bias[i % n] : x[i];
}

static double forward(model *m, const int *ids, const int *targets) {
    const config *c = &m->c;
    const int C = c->hidden, A = c->heads * c->head_dim, F = c->ffn;
    float **w = m->w[0], **a = m->a[0], losses[TOKENS];
    double sum = 0;
    embed(a[X], ids, w[WTE], w[WPE], c);
    CHECK(m, mt_reduce_from_tensor_region_forward(m->ctx, m->tp, mt_tensor_f32(a[X], TOKENS, C)));
    for (int l = 0; l < LAYERS; l++) {
        w = m->w[l], a = m->a[l];
        float *y = m->a[l + 1][X];
        layernorm(a[LN1], a[LN1_S], a[X], w[LN1_G], w[LN1_B], C);
        matmul(a[QKV], a[LN1], w[QKV_W], w[QKV_B], C, 3 * A);
        attention(a[HEADS], a[ATT], a[QKV], c);
        matmul(a[MID], a[HEADS], w[PROJ_W], NULL, A, C);
        CHECK(m, mt_reduce_from_tensor_region_forward(m->ctx, m->tp, mt_tensor_f32(a[MID], TOKENS, C)));
        add(a[MID], a[X], w[PROJ_B], C);
        layernorm(a[LN2], a[LN2_S], a[MID], w[LN2_G], w[LN2_B], C);
        matmul(a[FC], a[LN2], w[FC_W], w[FC_B], C, F);
        gelu(a[GELU], a[FC], TOKENS * F);
        matmul(y, a[GELU], w[FC2_W], NULL, F, C);
        CHECK(m, mt_reduce_from_tensor_region_forward(m->ctx, m->tp, mt_tensor_f32(y, TOKENS, C)));
        add(y, a[MID], w[FC2_B], C);
    }
    w = m->w[0], a = m->a[0];
    layernorm(a[LNF], a[LNF_S], m->a[LAYERS][X], w[LNF_G], w[LNF_B], C);
    matmul(a[LOGITS], a[LNF], w[WTE], NULL, C, c->padded_vocab);
    const mt_cross_entropy_desc desc = {.vocab = c->vocab, .padded_vocab = mt_comm_size(m->tp) * c->padded_vocab};
    const mt_tensor y = mt_tensor_f32(a[LOGITS], TOKENS, c->padded_vocab), loss = mt_tensor_f32(losses, 1, TOKENS);
    CHECK(m, mt_vocab_parallel_cross_entropy_forward_backward(m->ctx, m->tp, &desc, y, targets, mt_none(),
                                                              1.0f / TOKENS, loss));
    for (int i = 0; i < TOKENS; i++) sum += losses[i];
    return sum / TOKENS;
}

static void backward(model *m, const int *ids) {
    const config *c = &m->c;
    const int C = c->hidden, A = c->heads * c->head_dim, F = c->ffn;
    float **w = m->w[0], **dw = m->dw[0], **a = m->a[0], **da = m->da[0];
    memset(m->dw[0][0], 0, (size_t)m->weights * sizeof(float));
    memset(m->da[0][0], 0, (size_t)m->activations * sizeof(float));
    matmul_backward(da[LNF], dw[WTE], NULL, a[LOGITS], a[LNF], w[WTE], C, c->padded_vocab);
    CHECK(m, mt_copy_to_tensor_region_backward(m->ctx, m->tp, mt_tensor_f32(da[LNF], TOKENS, C)));
    layernorm_backward(m->da[LAYERS][X], dw[LNF_G], dw[LNF_B], da[LNF], m->a[LAYERS][X], a[LNF_S], w[LNF_G], C);
    for (int l = LAYERS - 1; l >= 0; l--) {
        const float *dy = m->da[l + 1][X];
        w = m->w[l], dw = m->dw[l], a = m->a[l], da = m->da[l];
        add(da[MID], dy, NULL, C);
        matmul_backward(da[GELU], dw[FC2_W], dw[FC2_B], dy, a[GELU], w[FC2_W], F, C);
        gelu_backward(da[FC], da[GELU], a[FC], TOKENS * F);
        matmul_backward(da[LN2], dw[FC_W], dw[FC_B], da[FC], a[LN2], w[FC_W], C, F);
        CHECK(m, mt_copy_to_tensor_region_backward(m->ctx, m->tp, mt_tensor_f32(da[LN2], TOKENS, C)));
        layernorm_backward(da[MID], dw[LN2_G], dw[LN2_B], da[LN2], a[MID], a[LN2_S], w[LN2_G], C);
        add(da[X], da[MID], NULL, C);
        matmul_backward(da[HEADS], dw[PROJ_W], dw[PROJ_B], da[MID], a[HEADS], w[PROJ_W], A, C);
        attention_backward(da[QKV], da[HEADS], a[ATT], a[QKV], c);
        matmul_backward(da[LN1], dw[QKV_W], dw[QKV_B], da[QKV], a[LN1], w[QKV_W], C, 3 * A);
        CHECK(m, mt_copy_to_tensor_region_backward(m->ctx, m->tp, mt_tensor_f32(da[LN1], TOKENS, C)));
        layernorm_backward(da[X], dw[LN1_G], dw[LN1_B], da[LN1], a[X], a[LN1_S], w[LN1_G], C);
    }
    embed_backward(da[X], ids, dw[WTE], dw[WPE], c);
}

static void adamw(model *m, int step, float lr) {
    float *w = m->w[0][0], *g = m->dw[0][0], *m1 = m->moments, *m2 = m->moments + m->weights;
    const float fix1 = 1.0f - powf(0.9f, (float)step), fix2 = 1.0f - powf(0.99f, (float)step);
    for (int i = 0; i < m->weights; i++) {
        m1[i] = 0.9f * m1[i] + 0.1f * g[i];
        m2[i] = 0.99f * m2[i] + 0.01f * g[i] * g[i];
        w[i] -= lr * (m1[i] / fix1 / (sqrtf(m2[i] / fix2) + 1e-8f) + 0.01f * w[i]);
    }
}

/* ---- data and loop ----------------------------------------------------------------------------------------------- */

/* Fills text with tokens: printable characters, newlines, and one token for all other bytes. Returns their number. */
static int read_text(const char *path, int *text) {
    struct stat info;
    int is_file = path && stat(path, &info) == 0 && S_ISREG(info.st_mode); /* a pipe would wait for its writer */
    FILE *file = is_file ? fopen(path, "rb") : NULL;
    int count = 0, byte;
    char line[16];
    for (unsigned i = 1; !path && count < TEXT; i++) {
        const unsigned a = i % 100u, b = i * i % 100u;
        snprintf(line, sizeof line, "%u+%u=%u\n", a, b, a + b);
        for (int j = 0; line[j] && count < TEXT; j++) text[count++] = line[j] == '\n' ? 95 : line[j] - ' ';
    }
    while (file && count < TEXT && (byte = getc(file)) != EOF)
        text[count++] = byte == '\n' ? 95 : byte >= ' ' && byte < 127 ? byte - ' ' : 96;
    if (path && (!file || ferror(file))) {
        fprintf(stderr, "%s: cannot be read, or is not a regular file\n", path);
        exit(1);
    }
    if (file) fclose(file);
    return count;
}

static mt_status train(mt_comm *world, void *path) {
    model m = {.c = {.hidden = 32, .heads = 4, .head_dim = 8, .ffn = 128, .vocab = 97, .padded_vocab = 112}};
    int *text = malloc(TEXT * sizeof *text), count = text ? read_text(path, text) : 0;
    unsigned state = 42;
    if (count <= SEQ) {
        fprintf(stderr, "the text is too short\n");
        exit(1);
    }
    m.tp = world;
    mt_context_desc where = {.arena_bytes = 1 << 20};
    CHECK(&m, mt_context_create(world, &where, &m.ctx));
    create(&m);
    printf("rank %d: %d bytes of weights, %d of activations\n", mt_comm_rank(world), 4 * m.weights, 4 * m.activations);
    for (int step = 1; step <= STEPS; step++) {
        int ids[TOKENS], targets[TOKENS];
        for (int i = 0; i < TOKENS; i++) {
            if (i % SEQ == 0) state = state * 1664525u + 1013904223u;
            const int at = (int)((state >> 8) % (unsigned)(count - SEQ)) + i % SEQ;
            ids[i] = text[at] - mt_comm_rank(world) * m.c.padded_vocab, targets[i] = text[at + 1];
        }
        const double loss = forward(&m, ids, targets);
        backward(&m, ids);
        adamw(&m, step, 3e-3f);
        if (mt_comm_rank(world) == 0) printf("step %2d  loss %.7f\n", step, loss);
    }
    destroy(&m);
    mt_context_destroy(m.ctx);
    free(text);
    return 0;
}

/* --help is no mistake. */
static int usage(const char *text, const char *argument) {
    const int helps = strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0;
    fprintf(helps ? stdout : stderr, "usage: %s\n", text);
    return helps ? 0 : 2;
}

int main(int argc, char **argv) {
    mt_launch_desc launch = {.ranks = argc > 1 ? atoi(argv[1]) : 2};
    if (launch.ranks < 1) return usage("after [RANKS [FILE]]", argv[1]);
    return mt_launch(&launch, train, argc > 2 ? argv[2] : NULL);
}
