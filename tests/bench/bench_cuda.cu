/* bench_cuda - measures the library on a GPU: memory-bound operators, GEMM, attention, layers. Not a test.

   nvcc -O3 -std=c++17 -arch=native -I. tests/bench/bench_cuda.cu -o bench_cuda -lcublasLt && ./bench_cuda

   ./bench_cuda     measures everything, in some minutes; ./bench_cuda --help lists the flags
   tests/bench/README.md explains the rows.

   It first measures the limits of the same GPU: a large copy and a large bf16 GEMM. Each figure is the median of
   samples between CUDA events around repeated calls, after a warm-up. A ratio compares a figure with its limit. For a
   memory-bound operator this is a copy of as many bytes, whose samples alternate with the operator's. The exit status
   is 77 when there is no GPU. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include <cublasLt.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <string>
#include <vector>

#define NO_GPU 77

static struct options {
    int csv, samples, tiny; /* tiny: small shapes, which only show that everything runs */
    std::string only;
} opt = {0, 15, 0, ""};

static mt_comm *world;
static mt_context *ctx;
static mt_grid grid;

#define DO(call)                                                                                                       \
    do {                                                                                                               \
        mt_status status_ = (call);                                                                                    \
        if (status_ != MT_SUCCESS) {                                                                                   \
            fprintf(stderr, "bench_cuda: %s: %s\n", mt_status_name(status_), mt_last_error(ctx));                      \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
#define CUDA(call)                                                                                                     \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        if (error_ != cudaSuccess) {                                                                                   \
            fprintf(stderr, "bench_cuda: %s: %s\n", #call, cudaGetErrorString(error_));                                \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* ---- time and table ---------------------------------------------------------------------------------------------- */

typedef std::function<void()> work;

struct timing {
    double median, low, high; /* seconds of one call */
};

static timing timing_of(std::vector<double> samples) {
    std::sort(samples.begin(), samples.end());
    for (double &s : samples) s = std::max(s, 1e-9); /* no division by 0 when the clock stands still */
    return {samples[samples.size() / 2], samples.front(), samples.back()};
}

/* Returns the seconds of one call of f, from one sample of `reps` calls. */
static double sample(const work &f, int reps) {
    static cudaEvent_t begin, end;
    float ms = 0;
    if (!begin) CUDA(cudaEventCreate(&begin));
    if (!end) CUDA(cudaEventCreate(&end));
    CUDA(cudaEventRecord(begin, mt_context_stream(ctx)));
    for (int i = 0; i < reps; i++) f();
    CUDA(cudaEventRecord(end, mt_context_stream(ctx)));
    CUDA(cudaEventSynchronize(end));
    CUDA(cudaEventElapsedTime(&ms, begin, end));
    return ms * 1e-3 / reps;
}

/* Warms f up, and returns the number of calls with which a sample takes at least 5 ms. */
static int calls_of(const work &f) {
    f();
    double once = sample(f, 3);
    return opt.tiny || once <= 0 ? 1 : (int)std::min(1000.0, std::max(1.0, 5e-3 / once));
}

static timing measure(const work &f) {
    int reps = calls_of(f);
    std::vector<double> samples;
    for (int i = 0; i < opt.samples; i++) samples.push_back(sample(f, reps));
    return timing_of(samples);
}

/* Measures f. Samples of f and g alternate; *ratio becomes the median of the time of g over that of f, pair by pair. */
static timing measure_beside(const work &f, const work &g, double *ratio) {
    int f_reps = calls_of(f), g_reps = calls_of(g);
    std::vector<double> samples, ratios;
    for (int i = 0; i < opt.samples; i++) {
        samples.push_back(sample(f, f_reps));
        ratios.push_back(sample(g, g_reps) / std::max(samples.back(), 1e-9));
    }
    *ratio = timing_of(ratios).median;
    return timing_of(samples);
}

static bool wanted(const char *item, const char *title) {
    if (!opt.only.empty() && opt.only != item) return false;
    if (!opt.csv) printf("\n[%s] %s\n", item, title);
    return true;
}

/* Prints a row. amount is the number of floating-point operations or bytes of a call, in the unit's prefix. */
static void row(const char *item, const std::string &name, timing t, double amount, const char *unit, double ratio,
                const char *versus) {
    double rate = amount / t.median, low = amount / t.high, high = amount / t.low;
    if (opt.csv)
        printf("%s,\"%s\",%.6g,%.6g,%.6g,%s,%.6g,%.4f,\"%s\"\n", item, name.c_str(), rate, low, high, unit,
               t.median * 1e6, ratio, versus);
    else
        printf("%-58s %9.1f %9.1f -%8.1f %-8s %11.1f us %7.3f  %s\n", name.c_str(), rate, low, high, unit,
               t.median * 1e6, ratio, versus);
    fflush(stdout);
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

static uint64_t stream_number = 1;

static mt_tensor noise(mt_dtype dtype, int64_t rows, int64_t cols, float std = 1.0f) {
    mt_tensor t;
    mt_random at = {1, stream_number++, 0, 0, cols};
    DO(mt_arena_tensor(ctx, dtype, rows, cols, &t));
    DO(mt_random_normal(ctx, t, std, at));
    return t;
}

static double bytes(mt_tensor t) { return (double)t.rows * (double)t.cols * (double)mt_dtype_size(t.dtype); }

static size_t other_arena;          /* bytes of the arena of a second context */
static double copy_rate, gemm_rate; /* the limits: bytes, floating-point operations per second */

/* ---- limits ------------------------------------------------------------------------------------------------------ */

static void item_limits() {
    int64_t n = opt.tiny ? 64 : 8192, megabytes = opt.tiny ? 1 : 2048;
    size_t mark = mt_arena_mark(ctx);
    mt_tensor x = noise(MT_F32, megabytes, 1 << 18, 1.0f), y = noise(MT_F32, megabytes, 1 << 18, 1.0f);
    timing t = measure([&] {
        CUDA(cudaMemcpyAsync(y.data, x.data, (size_t)bytes(x), cudaMemcpyDeviceToDevice, mt_context_stream(ctx)));
    });
    copy_rate = 2 * bytes(x) / t.median;
    bool shown = wanted("limits", "what this GPU does at most, measured here");
    if (shown) row("limits", "copy, " + std::to_string(megabytes) + " MiB", t, 2e-9 * bytes(x), "GB/s", 1, "itself");
    mt_arena_release(ctx, mark);
    mt_tensor a = noise(MT_BF16, n, n), b = noise(MT_BF16, n, n), c = noise(MT_BF16, n, n);
    t = measure([&] { DO(mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1.0f, a, b, 0.0f, c)); });
    gemm_rate = 2.0 * n * n * n / t.median;
    if (shown) row("limits", "bf16 GEMM, " + std::to_string(n) + "^3", t, 2e-12 * n * n * n, "TFLOP/s", 1, "itself");
    mt_arena_release(ctx, mark);
}

/* ---- memory-bound operators -------------------------------------------------------------------------------------- */

/* moved is the number of bytes read and written, counting each tensor once. Each tensor is larger than the caches. */
static void memory_row(const std::string &name, double moved, const work &f) {
    size_t mark = mt_arena_mark(ctx);
    void *from, *to;
    double ratio;
    size_t half = (size_t)(moved / 2) / 256 * 256;
    DO(mt_arena_alloc(ctx, half, &from));
    DO(mt_arena_alloc(ctx, half, &to));
    timing t = measure_beside(
        f, [&] { CUDA(cudaMemcpyAsync(to, from, half, cudaMemcpyDeviceToDevice, mt_context_stream(ctx))); }, &ratio);
    row("memory", name, t, 1e-9 * moved, "GB/s", ratio, "copy of as many bytes");
    mt_arena_release(ctx, mark);
}

static void memory_of_type(mt_dtype dtype) {
    int64_t tokens = opt.tiny ? 9 : 16384, h = opt.tiny ? 40 : 4096;
    size_t mark = mt_arena_mark(ctx);
    std::string type = std::string(mt_dtype_name(dtype)) + " ";
    mt_tensor x = noise(dtype, tokens, h), y = noise(dtype, tokens, h), z = noise(dtype, tokens, h);
    mt_tensor wide = noise(dtype, tokens, 2 * h), dwide = noise(dtype, tokens, 2 * h), stats = noise(MT_F32, tokens, 2);
    mt_tensor gain = noise(dtype, 1, h), b = noise(dtype, 1, h), dgain = noise(MT_F32, 1, h), db = noise(MT_F32, 1, h);
    double one = bytes(x);
    mt_tensor col = noise(dtype, tokens, 1), dcol = noise(dtype, tokens, 1);
    mt_dropout drop = {{1, 2, 0, 0, h}, 0.1f};
    memory_row(type + "add", 3 * one, [&] { DO(mt_add(ctx, x, y, z)); });
    memory_row(type + "bias", 2 * one, [&] { DO(mt_bias_forward(ctx, x, b)); });
    memory_row(type + "bias backward", one, [&] { DO(mt_bias_backward(ctx, x, db)); });
    memory_row(type + "bias + GELU", 3 * one, [&] { DO(mt_activation_forward(ctx, MT_GELU_TANH, x, b, y)); });
    memory_row(type + "bias + GELU backward", 3 * one,
               [&] { DO(mt_activation_backward(ctx, MT_GELU_TANH, x, y, z, db)); });
    memory_row(type + "SwiGLU", 3 * one, [&] { DO(mt_activation_forward(ctx, MT_SWIGLU, wide, mt_none(), y)); });
    memory_row(type + "SwiGLU backward", 5 * one,
               [&] { DO(mt_activation_backward(ctx, MT_SWIGLU, wide, y, dwide, mt_none())); });
    memory_row(type + "LayerNorm", 2 * one,
               [&] { DO(mt_norm_forward(ctx, MT_LAYER_NORM, x, gain, b, 1e-5f, y, stats)); });
    memory_row(type + "LayerNorm backward", 3 * one,
               [&] { DO(mt_norm_backward(ctx, MT_LAYER_NORM, x, gain, stats, y, mt_none(), z, dgain, db)); });
    memory_row(type + "RMSNorm", 2 * one,
               [&] { DO(mt_norm_forward(ctx, MT_RMS_NORM, x, gain, mt_none(), 1e-5f, y, stats)); });
    memory_row(type + "RMSNorm backward", 3 * one,
               [&] { DO(mt_norm_backward(ctx, MT_RMS_NORM, x, gain, stats, y, mt_none(), z, dgain, mt_none())); });
    memory_row(type + "bias + dropout + add", 3 * one, [&] { DO(mt_bias_dropout_add_forward(ctx, x, b, y, drop, z)); });
    memory_row(type + "dropout backward", 2 * one,
               [&] { DO(mt_bias_dropout_add_backward(ctx, x, drop, y, mt_none())); });
    memory_row(type + "multiply", 3 * one, [&] { DO(mt_multiply(ctx, x, y, z)); });
    memory_row(type + "multiply by a row, backward", 3 * one,
               [&] { DO(mt_multiply_row_backward(ctx, x, gain, y, z, dgain)); });
    memory_row(type + "multiply by a column, backward", 3 * one,
               [&] { DO(mt_multiply_col_backward(ctx, x, col, y, z, dcol)); });
    memory_row(type + "sigmoid", 2 * one, [&] { DO(mt_sigmoid_forward(ctx, x, z)); });
    memory_row(type + "sigmoid backward", 3 * one, [&] { DO(mt_sigmoid_backward(ctx, x, y, z)); });
    memory_row(type + "SiLU backward", 3 * one, [&] { DO(mt_silu_backward(ctx, x, y, z)); });
    mt_arena_release(ctx, mark);
}

/* Rotary embedding reads and writes the queries and keys, which are two thirds of qkv with MHA. */
static void memory_of_rotary(mt_dtype dtype) {
    int64_t tokens = opt.tiny ? 9 : 16384, h = opt.tiny ? 40 : 4096, dim = opt.tiny ? 20 : 128,
            seq = opt.tiny ? 9 : 2048;
    size_t mark = mt_arena_mark(ctx);
    mt_tensor qkv = noise(dtype, tokens, 3 * h), table = noise(MT_F32, seq, dim);
    mt_attention_desc s;
    memset(&s, 0, sizeof s);
    s.batch = tokens / seq, s.seq = seq, s.groups = h / dim, s.heads_per_group = 1, s.head_dim = dim;
    DO(mt_rotary_table(ctx, 10000.0f, table));
    memory_row(std::string(mt_dtype_name(dtype)) + " rotary", 4.0 / 3.0 * bytes(qkv),
               [&] { DO(mt_rotary_forward(ctx, &s, table, qkv)); });
    mt_arena_release(ctx, mark);
}

/* Returns ids with the frequencies of words: the k-th most frequent id is 1 / k as frequent as the first (Zipf).
   *distinct becomes the number of different ids. */
static int32_t *zipf_ids(int64_t vocab, int64_t tokens, size_t *distinct) {
    std::vector<int32_t> ids;
    uint64_t state = 1;
    mt_tensor t;
    for (int64_t i = 0; i < tokens; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        ids.push_back((int32_t)std::pow((double)vocab, (double)(state >> 11) / (double)(1ull << 53)) - 1);
    }
    *distinct = std::set<int32_t>(ids.begin(), ids.end()).size();
    DO(mt_arena_tensor(ctx, MT_I32, 1, tokens, &t));
    DO(mt_upload(ctx, ids.data(), t));
    return (int32_t *)t.data;
}

static void memory_of_vocabulary() {
    int64_t tokens = opt.tiny ? 5 : 8192, h = opt.tiny ? 24 : 4096, vocab = opt.tiny ? 100 : 50304;
    size_t mark = mt_arena_mark(ctx);
    mt_tensor table = noise(MT_BF16, vocab, h), y = noise(MT_BF16, tokens, h), dtable = noise(MT_F32, vocab, h);
    mt_tensor logits = noise(MT_BF16, tokens, vocab), loss = noise(MT_F32, 1, tokens);
    mt_cross_entropy_shard_desc desc = {vocab, 0, 0.0f, 0};
    size_t distinct;
    int32_t *ids, *words = zipf_ids(vocab, tokens, &distinct);
    DO(mt_arena_alloc(ctx, (size_t)tokens * sizeof *ids, (void **)&ids));
    DO(mt_position_ids(ctx, 0, vocab, ids, tokens));
    memory_row("bf16 embedding", 2 * bytes(y), [&] { DO(mt_embedding_forward(ctx, table, 0, ids, 0.0f, y)); });
    memory_row("bf16 embedding backward, distinct ids", 5 * bytes(y),
               [&] { DO(mt_embedding_backward(ctx, y, 0, ids, dtable)); });
    memory_row("bf16 embedding backward, Zipf's ids", bytes(y) + 8.0 * (double)distinct * (double)h,
               [&] { DO(mt_embedding_backward(ctx, y, 0, words, dtable)); });
    memory_row("bf16 cross-entropy, forward and backward", 2 * bytes(logits),
               [&] { DO(mt_cross_entropy_forward_backward(ctx, &desc, logits, ids, mt_none(), 1e-6f, loss)); });
    mt_arena_release(ctx, mark);
}

static void memory_of_optimizer() {
    int64_t n = opt.tiny ? 1000 : 64 << 20;
    size_t mark = mt_arena_mark(ctx);
    mt_adamw step;
    memset(&step, 0, sizeof step);
    step.lr = 1e-6f, step.beta1 = 0.9f, step.beta2 = 0.95f, step.eps = 1e-8f, step.grad_scale = 1.0f, step.step = 1;
    mt_tensor p = noise(MT_BF16, 1, n), master = noise(MT_F32, 1, n), g = noise(MT_F32, 1, n), m = noise(MT_F32, 1, n);
    mt_tensor v = noise(MT_F32, 1, n), sum = noise(MT_F32, 1, 1);
    DO(mt_fill(ctx, v, 1.0f));
    memory_row("AdamW, bf16 with f32 master", (2 + 7 * 4) * (double)n,
               [&] { DO(mt_adamw_step(ctx, &step, p, master, g, m, v)); });
    memory_row("sum of squares, f32", bytes(g), [&] { DO(mt_sum_of_squares(ctx, g, sum)); });
    mt_arena_release(ctx, mark);
}

static void item_memory() {
    if (!wanted("memory", "operators that move more than they compute")) return;
    memory_of_type(MT_BF16);
    memory_of_type(MT_F32);
    memory_of_rotary(MT_BF16);
    memory_of_rotary(MT_F32);
    memory_of_vocabulary();
    memory_of_optimizer();
}

/* ---- GEMM -------------------------------------------------------------------------------------------------------- */

struct shape {
    const char *name;
    int64_t hidden, heads, seq, sequences;
};

/* The layers of arXiv 1909.08053, table 1, with 8 sequences of 1024 tokens, and larger ones. */
static const shape shapes[] = {{"1.2B of the paper", 1536, 16, 1024, 8}, {"2.5B of the paper", 1920, 20, 1024, 8},
                               {"4.2B of the paper", 2304, 24, 1024, 8}, {"8.3B of the paper", 3072, 32, 1024, 8},
                               {"h 4096, s 2048", 4096, 32, 2048, 4},    {"h 4096, s 8192", 4096, 32, 8192, 1},
                               {"h 8192, s 2048", 8192, 64, 2048, 4},    {"h 8192, s 8192", 8192, 64, 8192, 1}};

static std::vector<shape> the_shapes() {
    if (opt.tiny) return {{"tiny", 64, 1, 24, 2}};
    return std::vector<shape>(std::begin(shapes), std::end(shapes));
}

/* Returns the seconds of the fastest of the algorithms that cuBLASLt's heuristic offers for C = op(A) op(B) + beta C.
   It calls cuBLASLt itself, not mt_gemm. */
static double best_algorithm(mt_transpose ta, mt_transpose tb, mt_tensor a, mt_tensor b, float beta, mt_tensor c) {
    cublasLtHandle_t lt;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t la, lb, lc;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found[32];
    cublasOperation_t first = tb == MT_TRANS ? CUBLAS_OP_T : CUBLAS_OP_N,
                      second = ta == MT_TRANS ? CUBLAS_OP_T : CUBLAS_OP_N;
    size_t room = (size_t)32 << 20, mark = mt_arena_mark(ctx);
    float alpha = 1.0f;
    void *workspace;
    int count = 0;
    double best = 1e30;
    auto type = [](mt_tensor t) { return t.dtype == MT_F32 ? CUDA_R_32F : CUDA_R_16BF; };
    DO(mt_arena_alloc(ctx, room, &workspace));
    cublasLtCreate(&lt);
    cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first);
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second);
    cublasLtMatrixLayoutCreate(&la, type(b), (uint64_t)b.cols, (uint64_t)b.rows, b.ld);
    cublasLtMatrixLayoutCreate(&lb, type(a), (uint64_t)a.cols, (uint64_t)a.rows, a.ld);
    cublasLtMatrixLayoutCreate(&lc, type(c), (uint64_t)c.cols, (uint64_t)c.rows, c.ld);
    cublasLtMatmulPreferenceCreate(&preference);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room);
    cublasLtMatmulAlgoGetHeuristic(lt, desc, la, lb, lc, lc, preference, 32, found, &count);
    for (int i = 0; i < count; i++) {
        if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
        double seconds = measure([&] {
                             cublasLtMatmul(lt, desc, &alpha, b.data, la, a.data, lb, &beta, c.data, lc, c.data, lc,
                                            &found[i].algo, workspace, found[i].workspaceSize, mt_context_stream(ctx));
                         }).median;
        best = std::min(best, seconds);
    }
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatrixLayoutDestroy(lc), cublasLtMatrixLayoutDestroy(lb), cublasLtMatrixLayoutDestroy(la);
    cublasLtMatmulDescDestroy(desc);
    cublasLtDestroy(lt);
    mt_arena_release(ctx, mark);
    return best;
}

static void gemm_row(const std::string &name, mt_transpose ta, mt_transpose tb, mt_tensor a, mt_tensor b, float beta,
                     mt_tensor c) {
    double k = (double)(ta == MT_TRANS ? a.rows : a.cols);
    double flop = 2.0 * (double)c.rows * (double)c.cols * k;
    timing t = measure([&] { DO(mt_gemm(ctx, ta, tb, 1.0f, a, b, beta, c)); });
    double best = best_algorithm(ta, tb, a, b, beta, c);
    row("gemm", name, t, 1e-12 * flop, "TFLOP/s", best / t.median, "cuBLASLt's fastest of 32");
}

static void item_gemm() {
    if (!wanted("gemm", "the GEMMs of a layer, bf16, weight gradients into f32")) return;
    for (const shape &s : the_shapes()) {
        const struct {
            const char *name;
            int64_t in, out;
        } products[] = {{"qkv", s.hidden, 3 * s.hidden},
                        {"proj", s.hidden, s.hidden},
                        {"fc1", s.hidden, 4 * s.hidden},
                        {"fc2", 4 * s.hidden, s.hidden}};
        for (const auto &p : products) {
            size_t mark = mt_arena_mark(ctx);
            int64_t tokens = s.seq * s.sequences;
            mt_tensor x = noise(MT_BF16, tokens, p.in), w = noise(MT_BF16, p.out, p.in),
                      y = noise(MT_BF16, tokens, p.out);
            mt_tensor dw = noise(MT_F32, p.out, p.in);
            std::string name = std::string(s.name) + ", " + p.name;
            gemm_row(name + " forward", MT_NO_TRANS, MT_TRANS, x, w, 0.0f, y);
            gemm_row(name + " input gradient", MT_NO_TRANS, MT_NO_TRANS, y, w, 0.0f, x);
            gemm_row(name + " weight gradient", MT_TRANS, MT_NO_TRANS, y, x, 1.0f, dw);
            mt_arena_release(ctx, mark);
        }
    }
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* For each head, forward has two products of 2 seq^2 head_dim operations, and backward has five. A causal mask halves
   them. */
static void attention_rows(int64_t seq, int64_t head_dim, mt_mask mask) {
    int64_t sequences = opt.tiny ? 1 : 16384 / seq, heads = opt.tiny ? 2 : 2048 / head_dim;
    size_t mark = mt_arena_mark(ctx);
    mt_attention_desc s;
    memset(&s, 0, sizeof s);
    s.batch = sequences, s.seq = seq, s.groups = heads, s.heads_per_group = 1, s.head_dim = head_dim, s.mask = mask;
    int64_t tokens = sequences * seq, width = heads * head_dim;
    mt_tensor qkv = noise(MT_BF16, tokens, 3 * width), dqkv = noise(MT_BF16, tokens, 3 * width);
    mt_tensor out = noise(MT_BF16, tokens, width), dout = noise(MT_BF16, tokens, width),
              lse = noise(MT_F32, heads, tokens);
    double flop = 4.0 * (double)tokens * (double)seq * (double)width * (mask == MT_MASK_CAUSAL ? 0.5 : 1.0);
    std::string name = "head size " + std::to_string(head_dim) + ", s " + std::to_string(seq) +
                       (mask == MT_MASK_CAUSAL ? ", causal" : "");
    timing t = measure([&] { DO(mt_attention_forward(ctx, &s, qkv, out, lse)); });
    row("attention", name + ", forward", t, 1e-12 * flop, "TFLOP/s", flop / gemm_rate / t.median, "large GEMM");
    t = measure([&] { DO(mt_attention_backward(ctx, &s, qkv, out, lse, dout, dqkv)); });
    flop *= 2.5;
    row("attention", name + ", backward", t, 1e-12 * flop, "TFLOP/s", flop / gemm_rate / t.median, "large GEMM");
    mt_arena_release(ctx, mark);
}

static void item_attention() {
    if (!wanted("attention", "bf16, MHA, 16384 tokens, 2048 features")) return;
    for (int64_t head_dim : {64, 96, 128})
        for (int64_t seq : opt.tiny ? std::vector<int64_t>{33} : std::vector<int64_t>{2048, 8192}) {
            attention_rows(seq, head_dim, MT_MASK_CAUSAL);
            attention_rows(seq, head_dim, MT_MASK_BIDIRECTIONAL);
        }
}

/* ---- layers ------------------------------------------------------------------------------------------------------ */

/* Operations are counted as in bench.c: 72 tokens hidden^2 for the GEMMs, and the causal half of attention's products.
   Recomputation does not count. */
static void layer_row(const shape &s, const std::string &how) {
    size_t mark = mt_arena_mark(ctx);
    mt_params *params;
    mt_transformer_layer layer;
    mt_transformer_layer_desc d;
    memset(&d, 0, sizeof d);
    d.hidden = s.hidden, d.heads = s.heads;
    DO(mt_params_create(ctx, &grid, &params));
    DO(mt_params_set_dtype(ctx, params, MT_BF16));
    DO(mt_transformer_layer_create(ctx, params, "layer", &d, &layer));
    DO(mt_params_init(ctx, params, 1));
    int64_t tokens = s.seq * s.sequences;
    mt_tensor x = noise(MT_BF16, tokens, s.hidden), y = noise(MT_BF16, tokens, s.hidden),
              dy = noise(MT_BF16, tokens, s.hidden);
    mt_tensor dx = noise(MT_BF16, tokens, s.hidden);
    mt_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.sequences = s.sequences, batch.seq = s.seq;
    double n = (double)tokens, h = (double)s.hidden;
    double flop = 72 * n * h * h + 6 * n * (double)(s.seq + 1) * h;
    timing t = measure([&] {
        size_t inner = mt_arena_mark(ctx);
        mt_transformer_layer_saved saved;
        DO(mt_transformer_layer_forward(ctx, &layer, &batch, x, y, &saved));
        DO(mt_transformer_layer_backward(ctx, &layer, dy, dx, &saved));
        mt_arena_release(ctx, inner);
    });
    row("layer", s.name + how + ", forward + backward", t, 1e-12 * flop, "TFLOP/s", flop / gemm_rate / t.median,
        "large GEMM");
    mt_params_destroy(params);
    mt_arena_release(ctx, mark);
}

/* The same in another context on the same stream, with another option for epilogues. */
static void layer_row_with(const shape &s, mt_epilogue epilogue, const std::string &how) {
    mt_context *separate = ctx, *other = NULL;
    mt_context_desc where;
    mt_gemm_options options;
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_CUDA;
    where.arena_bytes = other_arena;
    where.stream = mt_context_stream(ctx);
    memset(&options, 0, sizeof options);
    options.epilogue = epilogue;
    DO(mt_context_create(world, &where, &other));
    DO(mt_gemm_set_options(other, &options));
    ctx = other;
    layer_row(s, how);
    mt_context_destroy(other);
    ctx = separate;
}

static void item_layer() {
    if (!wanted("layer", "one pre-LN GPT layer, bf16, one rank, no dropout")) return;
    for (const shape &s : the_shapes()) {
        layer_row(s, "");
        if (!opt.tiny && (s.hidden < 3072 || s.hidden > 4096 || s.seq > 2048)) continue; /* two shapes are enough */
        layer_row_with(s, MT_EPILOGUE_FUSED, ", epilogues fused");
        layer_row_with(s, MT_EPILOGUE_MEASURED, ", epilogues measured");
    }
}

/* ---- main -------------------------------------------------------------------------------------------------------- */

static int usage(int code) {
    printf("bench_cuda [--quick] [--tiny] [--csv] [--only limits|memory|gemm|attention|layer]\n"
           "  --quick   5 samples of each instead of 15\n  --tiny    shapes that only show that everything runs\n"
           "  --csv     lines item,name,median,min,max,unit,us,ratio,versus; comments go to stderr\n");
    return code;
}

static int parse(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        std::string a = argv[i];
        if (a == "--csv") opt.csv = 1;
        else if (a == "--quick") opt.samples = 5;
        else if (a == "--tiny") opt.tiny = 1, opt.samples = 1;
        else if (a == "--only" && i + 1 < argc) opt.only = argv[++i];
        else return usage(a == "--help" ? 0 : 2);
    }
    return -1;
}

int main(int argc, char **argv) {
    mt_context_desc where;
    mt_grid_desc one = {1, 1, 1};
    cudaDeviceProp gpu;
    size_t memory = 0, all = 0;
    int code = parse(argc, argv), devices = 0;
    if (code >= 0) return code;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("bench_cuda: no GPU here, nothing was measured\n");
        return NO_GPU;
    }
    CUDA(cudaMemGetInfo(&memory, &all));
    CUDA(cudaGetDeviceProperties(&gpu, 0));
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_CUDA;
    where.arena_bytes = opt.tiny ? (size_t)256 << 20 : memory / 10 * 8;
    other_arena = opt.tiny ? (size_t)256 << 20 : memory / 10;
    if (mt_comm_create_local(1, 0, &world) != MT_SUCCESS || mt_context_create(world, &where, &ctx) != MT_SUCCESS ||
        mt_grid_create(world, &one, &grid) != MT_SUCCESS) {
        fprintf(stderr, "bench_cuda: %s\n", world ? mt_comm_last_error(world) : "no communicator");
        return 1;
    }
    fprintf(opt.csv ? stderr : stdout, "# %s, %d SMs, %.0f GiB, CUDA %d; megatron.h %s; %d samples\n", gpu.name,
            gpu.multiProcessorCount, (double)all / (1 << 30), CUDART_VERSION, MT_VERSION, opt.samples);
    if (opt.csv) printf("item,name,median,min,max,unit,us,ratio,versus\n");
    item_limits();
    item_memory();
    item_gemm();
    item_attention();
    item_layer();
    mt_grid_destroy(&grid);
    mt_context_destroy(ctx);
    mt_comm_destroy(world);
    return 0;
}
