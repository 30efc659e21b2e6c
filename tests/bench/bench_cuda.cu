/* bench_cuda - measures the library on a GPU: operators, attention, products, layers, training steps. Not a test.

   nvcc -O3 -std=c++17 -arch=native -I. tests/bench/bench_cuda.cu -o bench_cuda -lcublasLt && ./bench_cuda

   With several GPUs add -DMT_USE_NCCL and -lnccl: the ranks of the item scaling then communicate over NCCL.

   ./bench_cuda               measures everything, in some minutes; ./bench_cuda --help lists the flags
   ./bench_cuda --only norm   measures one item; ./bench_cuda --list lists the items
   tests/bench/README.md explains the rows.

   Data are random normal numbers. Each figure is the median of samples between CUDA events around repeated calls, after
   a warm-up. A ratio compares a figure with its limit, whose samples alternate with the figure's: a copy of as many
   bytes for a memory-bound operator, a large GEMM for attention and layers. The program says when a result is not
   finite, or has other bits when it is computed again, and then exits with 1. The exit status is 77 when there is no
   GPU. */

#define MEGATRON_IMPLEMENTATION
#include "mt_comm.h"

#include <cublasLt.h>

/* What the library has launched on this thread: kernels, products of cuBLASLt, copies and fills. Not counted on
   tests/engine, where the program is linked to another build of the library. */
static thread_local int64_t launched;

#ifdef __CUDACC__
#undef MT_LAUNCH_KERNEL
#define MT_LAUNCH_KERNEL(kernel, grid, block, shared_bytes, stream, ...)                                               \
    do {                                                                                                               \
        launched++;                                                                                                    \
        (kernel)<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__);                                          \
    } while (0)
#define cublasLtMatmul(...) (launched++, cublasLtMatmul(__VA_ARGS__))
#define cudaMemcpyAsync(...) (launched++, cudaMemcpyAsync(__VA_ARGS__))
#define cudaMemcpy2DAsync(...) (launched++, cudaMemcpy2DAsync(__VA_ARGS__))
#define cudaMemsetAsync(...) (launched++, cudaMemsetAsync(__VA_ARGS__))
#endif

#include "megatron.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <set>
#include <string>
#include <vector>

#define NO_GPU 77
#define ROW_SECONDS 0.5 /* the samples of a row take at most this long, unless three of them take longer */

static struct options {
    int csv, samples, tiny; /* tiny: small shapes, which only show that everything runs */
    size_t arena;           /* most bytes of the arena */
    std::string only;
} opt = {0, 15, 0, SIZE_MAX, ""};

/* Ranks are threads, and each has its own. */
static thread_local mt_comm *world;
static thread_local mt_context *ctx;
static thread_local mt_grid grid;
static size_t other_arena;   /* bytes of the arena of a second context */
static const char *item_now; /* name of the item that runs */
static int not_finite;       /* number of results that were not */
static int other_bits;       /* number of runs whose results have other bits than the first run's */

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

/* ---- time -------------------------------------------------------------------------------------------------------- */

typedef std::function<void()> work;

struct timing {
    double median, low, high; /* seconds of one call */
};

static timing timing_of(std::vector<double> samples) {
    std::sort(samples.begin(), samples.end());
    for (double &s : samples) s = std::max(s, 1e-9); /* no division by 0 when the clock stands still */
    return {samples[samples.size() / 2], samples.front(), samples.back()};
}

static double host_clock() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static cudaStream_t stream() { return mt_context_stream(ctx); }

/* Returns the seconds of one call of f, from one sample of `reps` calls. */
static double sample(const work &f, int reps) {
    static cudaEvent_t begin, end;
    float ms = 0;
    if (!begin) CUDA(cudaEventCreate(&begin));
    if (!end) CUDA(cudaEventCreate(&end));
    CUDA(cudaEventRecord(begin, stream()));
    for (int i = 0; i < reps; i++) f();
    CUDA(cudaEventRecord(end, stream()));
    CUDA(cudaEventSynchronize(end));
    CUDA(cudaEventElapsedTime(&ms, begin, end));
    return ms * 1e-3 / reps;
}

/* Warms f up, and returns the number of calls with which a sample takes at least 5 ms. */
static int calls_of(const work &f) {
    f();
    double once = opt.tiny ? 0 : sample(f, 3);
    return once <= 0 ? 1 : (int)std::min(1000.0, std::max(1.0, 5e-3 / once));
}

/* Should sample i be taken? The first samples began at `begin`, on the host's clock. */
static bool another(int i, double begin) { return i < opt.samples && (i < 3 || host_clock() - begin < ROW_SECONDS); }

static timing measure(const work &f) {
    int reps = calls_of(f);
    std::vector<double> samples;
    double begin = host_clock();
    for (int i = 0; another(i, begin); i++) samples.push_back(sample(f, reps));
    return timing_of(samples);
}

/* Measures f. Samples of f and g alternate; *ratio becomes the median of the time of g over that of f, pair by pair. */
static timing measure_beside(const work &f, const work &g, double *ratio) {
    int f_reps = calls_of(f), g_reps = calls_of(g);
    std::vector<double> samples, ratios;
    double begin = host_clock();
    for (int i = 0; another(i, begin); i++) {
        samples.push_back(sample(f, f_reps));
        ratios.push_back(sample(g, g_reps) / std::max(samples.back(), 1e-9));
    }
    *ratio = timing_of(ratios).median;
    return timing_of(samples);
}

/* Measures the time in which the host makes `calls` calls of f, for one of them. The GPU is idle before each sample. */
static timing measure_host(const work &f, int calls = 1) {
    std::vector<double> samples;
    double start = host_clock();
    f();
    for (int i = 0; another(i, start); i++) {
        CUDA(cudaStreamSynchronize(stream()));
        double begin = host_clock();
        for (int k = 0; k < calls; k++) f();
        samples.push_back((host_clock() - begin) / calls);
    }
    CUDA(cudaStreamSynchronize(stream()));
    return timing_of(samples);
}

/* ---- table ------------------------------------------------------------------------------------------------------- */

/* Prints a row of median, low and high, in the unit, and the time of a call in seconds. A ratio of 0: there is none. */
static void print_row(const std::string &name, double median, double low, double high, const char *unit, double seconds,
                      double ratio, const char *versus) {
    if (opt.csv) {
        printf("%s,\"%s\",%.6g,%.6g,%.6g,%s,%.6g,", item_now, name.c_str(), median, low, high, unit, seconds * 1e6);
        if (ratio > 0) printf("%.4f", ratio);
        printf(",\"%s\"\n", versus);
    } else {
        printf("%-64s %9.1f %9.1f -%8.1f %-8s %11.1f us ", name.c_str(), median, low, high, unit, seconds * 1e6);
        if (ratio > 0) printf("%7.3f  %s\n", ratio, versus);
        else printf("         %s\n", versus);
    }
    fflush(stdout);
}

/* amount is the number of floating-point operations or bytes of a call, in the unit's prefix. */
static void row(const std::string &name, timing t, double amount, const char *unit, double ratio, const char *versus) {
    print_row(name, amount / t.median, amount / t.high, amount / t.low, unit, t.median, ratio, versus);
}

/* Prints the host's time of a call of f, whose work takes `seconds` on the GPU, and the number of its launches. */
static void host_rows(const std::string &name, const work &f, double seconds) {
    timing t = measure_host(f);
    int64_t before = launched;
    f();
    double launches = (double)(launched - before);
    CUDA(cudaStreamSynchronize(stream()));
    print_row(name + ", host", t.median * 1e6, t.low * 1e6, t.high * 1e6, "us", t.median, t.median / seconds,
              "its time on the GPU, above");
    if (launches > 0) print_row(name + ", launches", launches, launches, launches, "launches", t.median, 0, "");
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

static uint64_t stream_number = 1;

static mt_tensor empty(mt_dtype dtype, int64_t rows, int64_t cols) {
    mt_tensor t;
    DO(mt_arena_tensor(ctx, dtype, rows, cols, &t));
    return t;
}

static mt_tensor noise(mt_dtype dtype, int64_t rows, int64_t cols, float std = 1.0f) {
    mt_tensor t = empty(dtype, rows, cols);
    mt_random at = {1, stream_number++, 0, 0, cols, NULL};
    DO(mt_random_normal(ctx, t, std, at));
    return t;
}

static double bytes(mt_tensor t) { return (double)t.rows * (double)t.cols * (double)mt_dtype_size(t.dtype); }

static std::string type_of(mt_dtype dtype) { return std::string(mt_dtype_name(dtype)) + " "; }

/* Says so when an element of t, the result of `name`, is infinite or not a number. */
static void check_finite(const std::string &name, mt_tensor t) {
    if (!t.data) return;
    size_t mark = mt_arena_mark(ctx);
    mt_tensor sum = empty(MT_F32, 1, 1);
    float value = 0;
    DO(mt_fill(ctx, sum, 0.0f));
    DO(mt_sum(ctx, t, sum));
    DO(mt_download(ctx, sum, &value));
    if (!std::isfinite(value))
        fprintf(stderr, "bench_cuda: %s, %s: NOT FINITE\n", item_now, name.c_str()), not_finite++;
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

/* ---- products by cuBLASLt itself --------------------------------------------------------------------------------- */

#define LT_WORKSPACE ((size_t)32 << 20)

/* C = op(A) op(B) + beta C by the fastest of the algorithms that cuBLASLt's heuristic offers, without the library. */
struct lt_product {
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t la, lb, lc;
    cublasLtMatmulHeuristicResult_t choice;
    mt_tensor a, b, c;
    float beta;
    void *workspace;
    int found;
};

static cublasLtHandle_t lt_handle() {
    static cublasLtHandle_t handle;
    if (!handle && cublasLtCreate(&handle) != CUBLAS_STATUS_SUCCESS) {
        fprintf(stderr, "bench_cuda: cublasLtCreate failed\n");
        exit(1);
    }
    return handle;
}

static bool lt_run(const lt_product &p, const cublasLtMatmulHeuristicResult_t &how) {
    const float alpha = 1.0f;
    return cublasLtMatmul(lt_handle(), p.desc, &alpha, p.b.data, p.la, p.a.data, p.lb, &p.beta, p.c.data, p.lc,
                          p.c.data, p.lc, &how.algo, p.workspace, how.workspaceSize, stream()) == CUBLAS_STATUS_SUCCESS;
}

static cudaDataType_t lt_type(mt_tensor t) {
    return t.dtype == MT_F32 ? CUDA_R_32F : t.dtype == MT_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

/* The layout of a tensor whose rows are `pieces` matrices, one after the other; of one matrix for all, when it does
   not move. */
static cublasLtMatrixLayout_t lt_layout(mt_tensor t, int pieces, bool moves) {
    cublasLtMatrixLayout_t layout;
    int64_t rows = moves ? t.rows / pieces : t.rows, stride = moves ? rows * t.ld : 0;
    int32_t count = pieces;
    cublasLtMatrixLayoutCreate(&layout, lt_type(t), (uint64_t)t.cols, (uint64_t)rows, t.ld);
    cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count);
    cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride);
    return layout;
}

/* Describes a product, with a workspace in the arena. pieces: the rows of a and c are as many products with b, in one
   batch */
static lt_product lt_describe(mt_transpose ta, mt_transpose tb, mt_tensor a, mt_tensor b, float beta, mt_tensor c,
                              cublasComputeType_t compute = CUBLAS_COMPUTE_32F, int pieces = 1) {
    lt_product p;
    cublasOperation_t first = tb == MT_TRANS ? CUBLAS_OP_T : CUBLAS_OP_N,
                      second = ta == MT_TRANS ? CUBLAS_OP_T : CUBLAS_OP_N;
    p.a = a, p.b = b, p.c = c, p.beta = beta, p.found = 0;
    DO(mt_arena_alloc(ctx, LT_WORKSPACE, &p.workspace));
    cublasLtMatmulDescCreate(&p.desc, compute, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(p.desc, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first);
    cublasLtMatmulDescSetAttribute(p.desc, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second);
    p.la = lt_layout(b, pieces, pieces == 1), p.lb = lt_layout(a, pieces, true), p.lc = lt_layout(c, pieces, true);
    return p;
}

/* Asks for the algorithms, the one first that cuBLASLt takes for the fastest. Returns how many there are. */
static int lt_ask(const lt_product &p, cublasLtMatmulHeuristicResult_t *found, int most) {
    cublasLtMatmulPreference_t preference;
    size_t room = LT_WORKSPACE;
    int count = 0;
    cublasLtMatmulPreferenceCreate(&preference);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room);
    cublasLtMatmulAlgoGetHeuristic(lt_handle(), p.desc, p.la, p.lb, p.lc, p.lc, preference, most, found, &count);
    cublasLtMatmulPreferenceDestroy(preference);
    return count;
}

/* Looks for the algorithm: the one with the shortest of three samples of at least 1 ms. One whose first sample takes
   1.5 times as long as the best one so far gets no others. */
static lt_product lt_fastest(mt_transpose ta, mt_transpose tb, mt_tensor a, mt_tensor b, float beta, mt_tensor c,
                             cublasComputeType_t compute = CUBLAS_COMPUTE_32F, int pieces = 1) {
    lt_product p = lt_describe(ta, tb, a, b, beta, c, compute, pieces);
    cublasLtMatmulHeuristicResult_t found[32];
    int count = lt_ask(p, found, 32);
    double best = 1e30;
    for (int i = 0; i < count; i++) {
        if (found[i].state != CUBLAS_STATUS_SUCCESS || !lt_run(p, found[i])) continue;
        work f = [&] { lt_run(p, found[i]); };
        double seconds = sample(f, 1);
        int reps = opt.tiny ? 1 : (int)std::min(1000.0, std::max(1.0, 1e-3 / std::max(seconds, 1e-6)));
        for (int k = 0; k < 3 && seconds < 1.5 * best; k++) seconds = std::min(seconds, sample(f, reps));
        if (seconds < best || !p.found) best = seconds, p.choice = found[i], p.found = 1;
    }
    return p;
}

static void lt_destroy(lt_product *p) {
    cublasLtMatrixLayoutDestroy(p->lc), cublasLtMatrixLayoutDestroy(p->lb), cublasLtMatrixLayoutDestroy(p->la);
    cublasLtMatmulDescDestroy(p->desc);
}

/* The limit of what computes: a bf16 product of this size, at the bottom of the arena while an item runs. */
static int64_t large() { return opt.tiny ? 64 : 8192; }

static lt_product limit_gemm;

static const lt_product &large_gemm() {
    if (!limit_gemm.found) {
        int64_t n = large();
        mt_tensor a = noise(MT_BF16, n, n), b = noise(MT_BF16, n, n);
        limit_gemm = lt_fastest(MT_NO_TRANS, MT_TRANS, a, b, 0.0f, empty(MT_BF16, n, n));
        if (!limit_gemm.found) fprintf(stderr, "bench_cuda: cuBLASLt has no bf16 GEMM\n"), exit(1);
    }
    return limit_gemm;
}

/* A row of `flop` operations whose limit is the rate of the large GEMM. Returns the seconds of a call. */
static double compute_row(const std::string &name, double flop, const work &f) {
    double ratio, n = (double)large();
    const lt_product &limit = large_gemm();
    timing t = measure_beside(
        f, [&] { lt_run(limit, limit.choice); }, &ratio);
    row(name, t, 1e-12 * flop, "TFLOP/s", ratio * flop / (2 * n * n * n), "large GEMM");
    return t.median;
}

/* A row of `moved` bytes, read and written, counting each tensor once. The limit is a copy of as many bytes by
   cudaMemcpy. out is a result of f, or mt_none(). Returns the seconds of a call. */
static double memory_row(const std::string &name, double moved, mt_tensor out, const work &f) {
    size_t mark = mt_arena_mark(ctx);
    int64_t rows = std::max((int64_t)1, (int64_t)(moved / 2) / (1 << 20));
    mt_tensor from = noise(MT_BF16, rows, opt.tiny ? 64 : 1 << 19), to = empty(MT_BF16, from.rows, from.cols);
    double ratio;
    f();
    check_finite(name, out);
    timing t = measure_beside(
        f, [&] { CUDA(cudaMemcpyAsync(to.data, from.data, (size_t)bytes(to), cudaMemcpyDeviceToDevice, stream())); },
        &ratio);
    row(name, t, 1e-9 * moved, "GB/s", ratio * moved / (2 * bytes(to)), "copy of as many bytes");
    mt_arena_release(ctx, mark);
    return t.median;
}

/* ---- limits ------------------------------------------------------------------------------------------------------ */

static __global__ void nothing(int) {}

/* y = x, 16 bytes at a time: each thread copies four, whose loads are all under way before the first store. */
static __global__ void copy_16_bytes(const uint4 *x, uint4 *y, int64_t count) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x * 4 + threadIdx.x;
    uint4 word[4];
    for (int k = 0; k < 4; k++)
        if (i + k * blockDim.x < count) word[k] = x[i + k * blockDim.x];
    for (int k = 0; k < 4; k++)
        if (i + k * blockDim.x < count) y[i + k * blockDim.x] = word[k];
}

/* Only reads: a thread writes if the bits of its words cancel out, which those of random data do not. */
static __global__ void read_16_bytes(const uint4 *x, uint32_t *out, int64_t count) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x * 4 + threadIdx.x;
    uint4 word[4];
    uint32_t bits = 1;
    for (int k = 0; k < 4; k++)
        if (i + k * blockDim.x < count) word[k] = x[i + k * blockDim.x];
    for (int k = 0; k < 4; k++)
        if (i + k * blockDim.x < count) bits += word[k].x ^ word[k].y ^ word[k].z ^ word[k].w;
    if (bits == 0) *out = bits;
}

static void limits_of_memory() {
    int64_t megabytes = opt.tiny ? 1 : 2048, count = megabytes << 16;
    size_t mark = mt_arena_mark(ctx);
    mt_tensor x = noise(MT_F32, megabytes, 1 << 18), y = empty(MT_F32, megabytes, 1 << 18), out = empty(MT_F32, 1, 1);
    std::string size = ", " + std::to_string(megabytes) + " MiB";
    double amount = 2e-9 * bytes(x), ratio;
    unsigned blocks = (unsigned)((count + 1023) / 1024);
    work copy = [&] { CUDA(cudaMemcpyAsync(y.data, x.data, (size_t)bytes(x), cudaMemcpyDeviceToDevice, stream())); };
    row("copy by cudaMemcpy" + size, measure(copy), amount, "GB/s", 1, "itself");
    timing t = measure_beside(
        [&] {
            MT_LAUNCH_KERNEL(copy_16_bytes, blocks, 256, 0, stream(), (const uint4 *)x.data, (uint4 *)y.data, count);
        },
        copy, &ratio);
    row("copy by a kernel, 16 bytes at a time" + size, t, amount, "GB/s", ratio, "cudaMemcpy");
    check_finite("copy", y);
    t = measure_beside(
        [&] {
            MT_LAUNCH_KERNEL(read_16_bytes, blocks, 256, 0, stream(), (const uint4 *)x.data, (uint32_t *)out.data,
                             count);
        },
        copy, &ratio);
    row("read by a kernel, 16 bytes at a time" + size, t, amount / 2, "GB/s", ratio / 2, "rate of cudaMemcpy");
    t = measure_beside([&] { CUDA(cudaMemsetAsync(y.data, 1, (size_t)bytes(y), stream())); }, copy, &ratio);
    row("write by cudaMemset" + size, t, amount / 2, "GB/s", ratio / 2, "rate of cudaMemcpy");
    mt_arena_release(ctx, mark);
}

static void limits_of_gemm() {
    const struct {
        const char *name;
        mt_dtype in, out;
        cublasComputeType_t compute;
    } products[] = {{"bf16 GEMM, ", MT_BF16, MT_BF16, CUBLAS_COMPUTE_32F},
                    {"bf16 GEMM into f32, ", MT_BF16, MT_F32, CUBLAS_COMPUTE_32F},
                    {"f16 GEMM, ", MT_F16, MT_F16, CUBLAS_COMPUTE_32F},
                    {"f32 GEMM by TF32, ", MT_F32, MT_F32, CUBLAS_COMPUTE_32F_FAST_TF32},
                    {"f32 GEMM, ", MT_F32, MT_F32, CUBLAS_COMPUTE_32F}};
    int64_t n = large();
    double flop = 2.0 * (double)(n * n) * (double)n;
    const lt_product &limit = large_gemm();
    for (const auto &p : products) {
        size_t mark = mt_arena_mark(ctx);
        double ratio;
        std::string name = p.name + std::to_string(n) + "^3";
        mt_tensor a = noise(p.in, n, n), b = noise(p.in, n, n);
        lt_product lt = lt_fastest(MT_NO_TRANS, MT_TRANS, a, b, 0.0f, empty(p.out, n, n), p.compute);
        if (lt.found) {
            timing t = measure_beside([&] { lt_run(lt, lt.choice); }, [&] { lt_run(limit, limit.choice); }, &ratio);
            row(name, t, 1e-12 * flop, "TFLOP/s", ratio, "large bf16 GEMM");
            check_finite(name, lt.c);
        } else fprintf(stderr, "bench_cuda: cuBLASLt has no %s\n", name.c_str());
        lt_destroy(&lt);
        mt_arena_release(ctx, mark);
    }
}

static void limits_of_launches() {
    work launch = [&] { MT_LAUNCH_KERNEL(nothing, 1, 32, 0, stream(), 0); };
    timing t = measure(launch);
    print_row("empty kernel, one after the other", t.median * 1e6, t.low * 1e6, t.high * 1e6, "us", t.median, 0, "");
    t = measure_host(launch, opt.tiny ? 2 : 200);
    print_row("launch of an empty kernel, host", t.median * 1e6, t.low * 1e6, t.high * 1e6, "us", t.median, 0, "");
    t = measure_host([&] {
        launch();
        CUDA(cudaStreamSynchronize(stream()));
    });
    print_row("empty kernel and waiting for it", t.median * 1e6, t.low * 1e6, t.high * 1e6, "us", t.median, 0, "");
}

static void limits_of_the_bus() {
    size_t mark = mt_arena_mark(ctx), size = opt.tiny ? 1 << 12 : (size_t)256 << 20;
    mt_tensor x = noise(MT_BF16, 1, (int64_t)size / 2);
    void *host;
    CUDA(cudaMallocHost(&host, size));
    work to_host = [&] { CUDA(cudaMemcpyAsync(host, x.data, size, cudaMemcpyDeviceToHost, stream())); };
    work to_gpu = [&] { CUDA(cudaMemcpyAsync(x.data, host, size, cudaMemcpyHostToDevice, stream())); };
    std::string name = ", pinned, " + std::to_string(size >> 20) + " MiB";
    row("from the GPU" + name, measure(to_host), 1e-9 * (double)size, "GB/s", 0, "");
    row("to the GPU" + name, measure(to_gpu), 1e-9 * (double)size, "GB/s", 0, "");
    CUDA(cudaFreeHost(host));
    mt_arena_release(ctx, mark);
}

static void item_limits() {
    limits_of_memory();
    limits_of_gemm();
    limits_of_launches();
    limits_of_the_bus();
}

/* ---- memory-bound operators -------------------------------------------------------------------------------------- */

/* The tensors are larger than any cache. */
static int64_t tokens_of_memory() { return opt.tiny ? 9 : 32768; }
static int64_t hidden_of_memory() { return opt.tiny ? 40 : 4096; }

static const mt_dtype two_types[] = {MT_BF16, MT_F32}, three_types[] = {MT_BF16, MT_F16, MT_F32};

static void item_add() {
    int64_t n = tokens_of_memory(), h = hidden_of_memory();
    for (mt_dtype dtype : three_types) {
        size_t mark = mt_arena_mark(ctx);
        mt_tensor x = noise(dtype, n, h), y = noise(dtype, n, h), z = empty(dtype, n, h);
        memory_row(type_of(dtype) + "add", 3 * bytes(x), z, [&] { DO(mt_add(ctx, x, y, z)); });
        mt_arena_release(ctx, mark);
    }
    mt_tensor wide = noise(MT_F32, n, h), narrow = noise(MT_BF16, n, h);
    double moved = bytes(wide) + bytes(narrow);
    memory_row("convert bf16 to f32", moved, wide, [&] { DO(mt_convert(ctx, narrow, wide)); });
    memory_row("convert f32 to bf16", moved, narrow, [&] { DO(mt_convert(ctx, wide, narrow)); });
    memory_row("f32 fill", bytes(wide), wide, [&] { DO(mt_fill(ctx, wide, 1.5f)); });
}

/* The bias is so small that repeated calls, which add it each time, do not change the data. */
static mt_tensor small_bias(mt_dtype dtype, int64_t cols) { return noise(dtype, 1, cols, 1e-7f); }

static void item_bias() {
    for (mt_dtype dtype : two_types) {
        size_t mark = mt_arena_mark(ctx);
        mt_tensor x = noise(dtype, tokens_of_memory(), hidden_of_memory()), b = small_bias(dtype, x.cols);
        mt_tensor db = noise(MT_F32, 1, x.cols);
        memory_row(type_of(dtype) + "bias", 2 * bytes(x), x, [&] { DO(mt_bias_forward(ctx, x, b)); });
        memory_row(type_of(dtype) + "bias backward", bytes(x), db, [&] { DO(mt_bias_backward(ctx, x, db)); });
        mt_arena_release(ctx, mark);
    }
}

/* Forward also writes h with the bias added: it reads and writes h, and writes y. */
static void activation_rows(mt_dtype dtype, mt_activation kind, const std::string &name) {
    std::string type = type_of(dtype), biased = type + "bias + " + name;
    int64_t n = tokens_of_memory(), h = hidden_of_memory(), w = kind == MT_SWIGLU ? 2 * h : h;
    size_t mark = mt_arena_mark(ctx);
    mt_tensor x = noise(dtype, n, w), y = noise(dtype, n, h), dx = empty(dtype, n, w), b = small_bias(dtype, w);
    mt_tensor db = noise(MT_F32, 1, w);
    memory_row(type + name, bytes(x) + bytes(y), y, [&] { DO(mt_activation_forward(ctx, kind, x, mt_none(), y)); });
    memory_row(biased, 2 * bytes(x) + bytes(y), y, [&] { DO(mt_activation_forward(ctx, kind, x, b, y)); });
    memory_row(type + name + " backward", 2 * bytes(x) + bytes(y), dx,
               [&] { DO(mt_activation_backward(ctx, kind, x, y, dx, mt_none())); });
    memory_row(biased + " backward", 2 * bytes(x) + bytes(y), dx,
               [&] { DO(mt_activation_backward(ctx, kind, x, y, dx, db)); });
    mt_arena_release(ctx, mark);
}

static void item_activation() {
    static const char *const names[MT_ACTIVATION_COUNT] = {"GELU",         "GELU by erf", "SwiGLU",
                                                           "squared ReLU", "ReLU",        "tanh"};
    for (mt_dtype dtype : two_types)
        for (int kind = 0; kind < MT_ACTIVATION_COUNT; kind++) activation_rows(dtype, (mt_activation)kind, names[kind]);
}

static void item_dropout() {
    for (mt_dtype dtype : two_types) {
        size_t mark = mt_arena_mark(ctx);
        int64_t n = tokens_of_memory(), h = hidden_of_memory();
        mt_tensor x = noise(dtype, n, h), y = noise(dtype, n, h), z = empty(dtype, n, h), b = noise(dtype, 1, h);
        mt_tensor db = noise(MT_F32, 1, h);
        mt_dropout drop = {{1, 2, 0, 0, h, NULL}, 0.1f};
        std::string type = type_of(dtype);
        memory_row(type + "bias + dropout + add", 3 * bytes(x), z,
                   [&] { DO(mt_bias_dropout_add_forward(ctx, x, b, y, drop, z)); });
        memory_row(type + "dropout backward", 2 * bytes(x), z,
                   [&] { DO(mt_bias_dropout_add_backward(ctx, x, drop, y, mt_none())); });
        memory_row(type + "bias + dropout backward", 2 * bytes(x), z,
                   [&] { DO(mt_bias_dropout_add_backward(ctx, x, drop, y, db)); });
        mt_arena_release(ctx, mark);
    }
}

static void norm_rows(mt_dtype dtype, mt_norm_kind kind, int64_t h) {
    size_t mark = mt_arena_mark(ctx);
    int64_t n = tokens_of_memory() * hidden_of_memory() / h;
    mt_tensor x = noise(dtype, n, h), dy = noise(dtype, n, h), y = empty(dtype, n, h), gain = noise(dtype, 1, h);
    mt_tensor dgain = noise(MT_F32, 1, h), stats = empty(MT_F32, n, 2), none = mt_none(), residual = noise(dtype, n, h);
    mt_tensor b = kind == MT_RMS_NORM ? none : noise(dtype, 1, h),
              db = kind == MT_RMS_NORM ? none : noise(MT_F32, 1, h);
    std::string name = type_of(dtype) + (kind == MT_RMS_NORM ? "RMSNorm" : "LayerNorm");
    std::string size = ", h " + std::to_string(h);
    memory_row(name + size, 2 * bytes(x), y, [&] { DO(mt_norm_forward(ctx, kind, x, gain, b, 1e-5f, y, stats)); });
    memory_row(name + " backward" + size, 3 * bytes(x), y,
               [&] { DO(mt_norm_backward(ctx, kind, x, gain, stats, dy, none, y, dgain, db)); });
    memory_row(name + " backward with residual" + size, 4 * bytes(x), y,
               [&] { DO(mt_norm_backward(ctx, kind, x, gain, stats, dy, residual, y, dgain, db)); });
    mt_arena_release(ctx, mark);
}

static void item_norm() {
    for (mt_dtype dtype : two_types)
        for (mt_norm_kind kind : {MT_LAYER_NORM, MT_RMS_NORM})
            for (int64_t h : opt.tiny ? std::vector<int64_t>{40} : std::vector<int64_t>{1024, 4096})
                norm_rows(dtype, kind, h);
}

static void embedding_rows(int64_t tokens, int64_t h) {
    int64_t vocab = opt.tiny ? 100 : 50304;
    size_t mark = mt_arena_mark(ctx), distinct;
    mt_tensor table = noise(MT_BF16, vocab, h), y = noise(MT_BF16, tokens, h), dtable = noise(MT_F32, vocab, h);
    int32_t *ids, *words = zipf_ids(vocab, tokens, &distinct);
    std::string size = ", h " + std::to_string(h);
    DO(mt_arena_alloc(ctx, (size_t)tokens * sizeof *ids, (void **)&ids));
    DO(mt_position_ids(ctx, 0, vocab, NULL, 0, ids, tokens));
    memory_row("bf16 embedding, distinct ids" + size, 2 * bytes(y), y,
               [&] { DO(mt_embedding_forward(ctx, table, 0, ids, 0.0f, y)); });
    memory_row("bf16 embedding, natural text" + size, 2 * bytes(y), y,
               [&] { DO(mt_embedding_forward(ctx, table, 0, words, 0.0f, y)); });
    memory_row("bf16 embedding backward, distinct ids" + size, 5 * bytes(y), dtable,
               [&] { DO(mt_embedding_backward(ctx, y, 0, ids, dtable)); });
    memory_row("bf16 embedding backward, natural text" + size, bytes(y) + 8.0 * (double)distinct * (double)h, dtable,
               [&] { DO(mt_embedding_backward(ctx, y, 0, words, dtable)); });
    mt_arena_release(ctx, mark);
}

static void item_embedding() {
    embedding_rows(opt.tiny ? 5 : 16384, opt.tiny ? 24 : 4096);
    if (!opt.tiny) embedding_rows(49152, 768);
}

/* Each call replaces the logits by their gradient, so only the first one reads normal numbers. */
static void cross_entropy_rows(int64_t vocab, int64_t ld) {
    int64_t tokens = opt.tiny ? 5 : 8192;
    size_t mark = mt_arena_mark(ctx), distinct;
    mt_tensor logits = noise(MT_BF16, tokens, ld), loss = empty(MT_F32, 1, tokens), stats = empty(MT_F32, tokens, 4);
    mt_cross_entropy_shard_desc desc = {vocab, 0, 0.0f, 0};
    const int32_t *targets = zipf_ids(vocab, tokens, &distinct);
    std::string name = ", vocabulary " + std::to_string(vocab);
    if (ld != vocab) name += ", ld " + std::to_string(ld);
    logits.cols = vocab;
    memory_row("bf16 cross-entropy forward" + name, bytes(logits), stats,
               [&] { DO(mt_cross_entropy_stats(ctx, &desc, logits, targets, stats)); });
    memory_row("bf16 cross-entropy forward + backward" + name, 2 * bytes(logits), loss, [&] {
        DO(mt_cross_entropy_forward_backward(ctx, &desc, logits, targets, mt_none(), (float)vocab / 16, loss));
    });
    mt_arena_release(ctx, mark);
}

static void item_cross_entropy() {
    cross_entropy_rows(opt.tiny ? 96 : 50304, opt.tiny ? 96 : 50304);
    cross_entropy_rows(opt.tiny ? 93 : 50257, opt.tiny ? 93 : 50257);
    cross_entropy_rows(opt.tiny ? 93 : 50257, opt.tiny ? 96 : 50304);
}

static void item_adamw() {
    int64_t n = opt.tiny ? 1000 : 128 << 20;
    mt_random words = {1, 7, 0, 0, n, NULL};
    mt_adamw step;
    memset(&step, 0, sizeof step);
    step.lr = 1e-6f, step.beta1 = 0.9f, step.beta2 = 0.95f, step.eps = 1e-8f, step.grad_scale = 1.0f, step.step = 1;
    mt_tensor p = noise(MT_BF16, 1, n), master = noise(MT_F32, 1, n), g = noise(MT_F32, 1, n), m = noise(MT_F32, 1, n);
    mt_tensor v = empty(MT_F32, 1, n), sum = noise(MT_F32, 1, 1);
    double count = (double)n;
    DO(mt_fill(ctx, v, 1.0f));
    memory_row("AdamW, bf16 with f32 master", (2 + 7 * 4) * count, p,
               [&] { DO(mt_adamw_step(ctx, &step, p, master, g, m, v)); });
    memory_row("AdamW, f32", 7 * 4 * count, master, [&] { DO(mt_adamw_step(ctx, &step, master, mt_none(), g, m, v)); });
    step.stochastic_rounding = &words;
    memory_row("AdamW, bf16 with stochastic rounding", (2 * 2 + 5 * 4) * count, p,
               [&] { DO(mt_adamw_step(ctx, &step, p, mt_none(), g, m, v)); });
    memory_row("f32 sum of squares", bytes(g), sum, [&] { DO(mt_sum_of_squares(ctx, g, sum)); });
    memory_row("bf16 sum of squares", bytes(p), sum, [&] { DO(mt_sum_of_squares(ctx, p, sum)); });
}

/* Rotary embedding reads and writes the queries and keys, which are two thirds of qkv with MHA. */
static void item_rotary() {
    int64_t tokens = tokens_of_memory(), h = hidden_of_memory(), dim = opt.tiny ? 20 : 128, seq = opt.tiny ? 9 : 2048;
    mt_tensor table = empty(MT_F32, seq, dim);
    mt_attention_desc s;
    memset(&s, 0, sizeof s);
    s.batch = tokens / seq, s.seq = seq, s.groups = h / dim, s.heads_per_group = 1, s.head_dim = dim;
    DO(mt_rotary_table(ctx, 10000.0f, table));
    for (mt_dtype dtype : two_types) {
        size_t mark = mt_arena_mark(ctx);
        mt_tensor qkv = noise(dtype, tokens, 3 * h);
        memory_row(type_of(dtype) + "rotary", 4.0 / 3.0 * bytes(qkv), qkv,
                   [&] { DO(mt_rotary_forward(ctx, &s, table, qkv)); });
        memory_row(type_of(dtype) + "rotary backward", 4.0 / 3.0 * bytes(qkv), qkv,
                   [&] { DO(mt_rotary_backward(ctx, &s, table, qkv)); });
        mt_arena_release(ctx, mark);
    }
}

/* mt_hash waits for its result. */
static void item_hash() {
    for (mt_dtype dtype : two_types) {
        size_t mark = mt_arena_mark(ctx);
        mt_tensor x = noise(dtype, 4 * tokens_of_memory(), hidden_of_memory());
        uint64_t hash = 0;
        memory_row(type_of(dtype) + "hash", bytes(x), mt_none(), [&] { DO(mt_hash(ctx, x, 0, 0, x.cols, &hash)); });
        mt_arena_release(ctx, mark);
    }
}

static void pointwise_rows(mt_dtype dtype) {
    int64_t n = tokens_of_memory(), h = hidden_of_memory();
    size_t mark = mt_arena_mark(ctx);
    mt_tensor x = noise(dtype, n, h), y = noise(dtype, n, h), z = noise(dtype, n, h);
    mt_tensor gate = noise(dtype, n, h), dgate = empty(dtype, n, h);
    mt_tensor gain = noise(dtype, 1, h), dgain = noise(MT_F32, 1, h), col = noise(dtype, n, 1),
              dcol = empty(dtype, n, 1);
    double one = bytes(x);
    std::string type = type_of(dtype);
    memory_row(type + "multiply", 3 * one, z, [&] { DO(mt_multiply(ctx, x, y, z)); });
    memory_row(type + "multiply by a row", 2 * one, z, [&] { DO(mt_multiply_row_forward(ctx, x, gain, z)); });
    memory_row(type + "multiply by a row, backward", 3 * one, z,
               [&] { DO(mt_multiply_row_backward(ctx, x, gain, y, z, dgain)); });
    memory_row(type + "multiply by a column", 2 * one, z, [&] { DO(mt_multiply_col_forward(ctx, x, col, z)); });
    memory_row(type + "multiply by a column, backward", 3 * one, z,
               [&] { DO(mt_multiply_col_backward(ctx, x, col, y, z, dcol)); });
    memory_row(type + "sigmoid", 2 * one, z, [&] { DO(mt_sigmoid_forward(ctx, x, z)); });
    memory_row(type + "sigmoid backward", 3 * one, z, [&] { DO(mt_sigmoid_backward(ctx, x, y, z)); });
    memory_row(type + "SiLU", 2 * one, z, [&] { DO(mt_silu_forward(ctx, x, z)); });
    memory_row(type + "SiLU backward", 3 * one, z, [&] { DO(mt_silu_backward(ctx, x, y, z)); });
    memory_row(type + "sigmoid gate", 3 * one, z, [&] { DO(mt_sigmoid_gate_forward(ctx, x, y, z)); });
    memory_row(type + "sigmoid gate backward", 5 * one, z,
               [&] { DO(mt_sigmoid_gate_backward(ctx, x, y, gate, dgate, z)); });
    mt_arena_release(ctx, mark);
}

static void item_pointwise() {
    for (mt_dtype dtype : two_types) pointwise_rows(dtype);
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* 16384 tokens, 2048 features of queries. For each head, forward has two products of 2 seq^2 head_dim operations, and
   backward has five. A causal mask halves them. */
static void attention_rows(mt_dtype dtype, int64_t seq, int64_t head_dim, int64_t per_group, mt_mask mask) {
    int64_t sequences = opt.tiny ? 1 : 16384 / seq, heads = opt.tiny ? 2 : 2048 / head_dim / per_group * per_group;
    size_t mark = mt_arena_mark(ctx);
    mt_attention_desc s;
    memset(&s, 0, sizeof s);
    s.batch = sequences, s.seq = seq, s.groups = heads / per_group, s.heads_per_group = per_group;
    s.head_dim = head_dim, s.scores.mask = mask;
    int64_t tokens = sequences * seq, width = heads * head_dim, wide = (heads + 2 * s.groups) * head_dim;
    mt_tensor qkv = noise(dtype, tokens, wide), dqkv = empty(dtype, tokens, wide), out = empty(dtype, tokens, width);
    mt_tensor dout = noise(dtype, tokens, width), lse = empty(MT_F32, heads, tokens);
    double flop = 4.0 * (double)tokens * (double)seq * (double)width * (mask == MT_MASK_CAUSAL ? 0.5 : 1.0);
    std::string name = "head size " + std::to_string(head_dim) + ", s " + std::to_string(seq);
    if (mask == MT_MASK_CAUSAL) name += ", causal";
    if (per_group > 1) name += ", " + std::to_string(per_group) + " heads per group";
    if (dtype != MT_BF16) name = type_of(dtype) + name;
    compute_row(name + ", forward", flop, [&] { DO(mt_attention_forward(ctx, &s, qkv, out, lse)); });
    check_finite(name, out);
    compute_row(name + ", backward", 2.5 * flop,
                [&] { DO(mt_attention_backward(ctx, &s, qkv, out, lse, dout, dqkv)); });
    check_finite(name + ", backward", dqkv);
    mt_arena_release(ctx, mark);
}

static void item_attention() {
    int64_t seq = opt.tiny ? 33 : 2048;
    for (int64_t head_dim : {128, 96, 64})
        for (mt_mask mask : {MT_MASK_CAUSAL, MT_MASK_BIDIRECTIONAL}) attention_rows(MT_BF16, seq, head_dim, 1, mask);
    for (int64_t head_dim : {256, 192, 80}) attention_rows(MT_BF16, seq, head_dim, 1, MT_MASK_CAUSAL);
    attention_rows(MT_F16, seq, 128, 1, MT_MASK_CAUSAL);
    attention_rows(MT_BF16, seq, 128, opt.tiny ? 2 : 4, MT_MASK_CAUSAL);
}

static void item_attention_lengths() {
    for (int64_t seq : opt.tiny ? std::vector<int64_t>{20} : std::vector<int64_t>{512, 1024, 4096, 8192, 16384}) {
        attention_rows(MT_BF16, seq, 128, 1, MT_MASK_CAUSAL);
        attention_rows(MT_BF16, seq, 64, 1, MT_MASK_CAUSAL);
    }
    attention_rows(MT_BF16, opt.tiny ? 20 : 8192, 128, 1, MT_MASK_BIDIRECTIONAL);
}

/* The kernels without tensor cores, which run f32, and head sizes that are no multiple of 8. */
static void item_attention_plain() {
    attention_rows(MT_BF16, opt.tiny ? 20 : 1024, 84, 1, MT_MASK_CAUSAL);
    attention_rows(MT_F32, opt.tiny ? 20 : 1024, 64, 1, MT_MASK_CAUSAL);
}

/* ---- attention with a key/value cache ---------------------------------------------------------------------------- */

/* The cache of one layer and a call with `seq` new tokens for each sequence. All sequences hold `held` tokens. */
struct cached {
    mt_attention_desc s;
    mt_kv_cache cache;
    mt_tensor qkv, out, table;
    std::string name;
};

static cached cached_of(mt_dtype dtype, int64_t batch, int64_t seq, int64_t held, int64_t groups, int64_t per_group,
                        int64_t head_dim) {
    std::vector<int32_t> host((size_t)batch, (int32_t)held);
    mt_tensor lengths = empty(MT_I32, 1, batch);
    cached c;
    memset(&c.s, 0, sizeof c.s);
    c.s.batch = batch, c.s.seq = seq, c.s.groups = groups, c.s.heads_per_group = per_group, c.s.head_dim = head_dim;
    c.cache.max_seq = held + seq;
    c.cache.keys = noise(dtype, batch * groups * c.cache.max_seq, head_dim);
    c.cache.values = noise(dtype, batch * groups * c.cache.max_seq, head_dim);
    DO(mt_upload(ctx, host.data(), lengths));
    c.cache.lengths = (const int32_t *)lengths.data;
    c.qkv = noise(dtype, batch * seq, groups * (per_group + 2) * head_dim);
    c.out = empty(dtype, batch * seq, groups * per_group * head_dim);
    c.table = empty(MT_F32, c.cache.max_seq, head_dim);
    DO(mt_rotary_table(ctx, 10000.0f, c.table));
    c.name = type_of(dtype) + std::to_string(batch) + " x " + std::to_string(held + seq) + " tokens, " +
             std::to_string(groups) + " groups of " + std::to_string(per_group) + ", head size " +
             std::to_string(head_dim);
    return c;
}

/* One new token for each sequence: attention reads all keys and values once. */
static void decode_row(mt_dtype dtype, int64_t batch, int64_t tokens, int64_t groups, int64_t per_group,
                       int64_t head_dim) {
    size_t mark = mt_arena_mark(ctx);
    cached c = cached_of(dtype, batch, 1, opt.tiny ? 299 : tokens - 1, groups, per_group, head_dim);
    memory_row(c.name, bytes(c.cache.keys) + bytes(c.cache.values), c.out,
               [&] { DO(mt_kv_cache_attention(ctx, &c.s, c.qkv, &c.cache, c.out)); });
    mt_arena_release(ctx, mark);
}

/* Prompts in an empty cache. Append reads qkv once, and writes the turned queries and keys, and the cache. */
static void prompt_rows(int64_t batch, int64_t seq, int64_t groups, int64_t per_group, int64_t head_dim) {
    size_t mark = mt_arena_mark(ctx);
    cached c = cached_of(MT_BF16, batch, opt.tiny ? 33 : seq, 0, groups, per_group, head_dim);
    double cache = bytes(c.cache.keys) + bytes(c.cache.values), tokens = (double)(c.s.batch * c.s.seq);
    memory_row("prompts, append, " + c.name, 2 * bytes(c.qkv) + cache / 2, c.qkv,
               [&] { DO(mt_kv_cache_append(ctx, &c.s, c.table, c.qkv, &c.cache)); });
    compute_row("prompts, attention, " + c.name, 2.0 * tokens * (double)c.s.seq * (double)c.out.cols,
                [&] { DO(mt_kv_cache_attention(ctx, &c.s, c.qkv, &c.cache, c.out)); });
    check_finite("prompts, " + c.name, c.out);
    mt_arena_release(ctx, mark);
}

static void item_decode() {
    int64_t batch = opt.tiny ? 2 : 16, groups = opt.tiny ? 1 : 8;
    for (int64_t per_group : {1, 4, 8}) decode_row(MT_BF16, batch, 8192, groups, per_group, 128);
    decode_row(MT_BF16, batch, 8192, groups, 4, 64);
    decode_row(MT_F16, batch, 8192, groups, 4, 128);
    decode_row(MT_F32, batch, 4096, groups, 4, 128);
    decode_row(MT_BF16, 1, 65536, groups, 4, 128);
    decode_row(MT_BF16, batch, 512, groups, 4, 128);
    prompt_rows(opt.tiny ? 1 : 8, 2048, groups, opt.tiny ? 2 : 4, 128);
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

struct shape {
    const char *name;
    int64_t hidden, heads, seq, sequences;
};

/* The layers of arXiv 1909.08053, table 1, with 8 sequences of 1024 tokens, and smaller and larger ones. */
static const shape usual[] = {{"h 1024, s 2048", 1024, 16, 2048, 4}, {"h 4096, s 2048", 4096, 32, 2048, 4}};
static const shape paper[] = {{"1.2B of the paper", 1536, 16, 1024, 8},
                              {"2.5B of the paper", 1920, 20, 1024, 8},
                              {"4.2B of the paper", 2304, 24, 1024, 8},
                              {"8.3B of the paper", 3072, 32, 1024, 8}};
static const shape big[] = {{"h 4096, s 8192", 4096, 32, 8192, 1},
                            {"h 8192, s 2048", 8192, 64, 2048, 4},
                            {"h 8192, s 8192", 8192, 64, 8192, 1}};

template <size_t N> static std::vector<shape> shapes_of(const shape (&list)[N]) {
    if (opt.tiny) return {{"tiny", 64, 1, 24, 2}};
    return std::vector<shape>(list, list + N);
}

static void gemm_row(const std::string &name, mt_transpose ta, mt_transpose tb, mt_tensor a, mt_tensor b, float beta,
                     mt_tensor c) {
    size_t mark = mt_arena_mark(ctx);
    double k = (double)(ta == MT_TRANS ? a.rows : a.cols), ratio;
    double flop = 2.0 * (double)c.rows * (double)c.cols * k;
    lt_product best = lt_fastest(ta, tb, a, b, beta, c);
    if (best.found) {
        timing t = measure_beside([&] { DO(mt_gemm(ctx, ta, tb, 1.0f, a, b, beta, c)); },
                                  [&] { lt_run(best, best.choice); }, &ratio);
        row(name, t, 1e-12 * flop, "TFLOP/s", ratio, "cuBLASLt's fastest of 32");
        check_finite(name, c);
    }
    lt_destroy(&best);
    mt_arena_release(ctx, mark);
}

static void gemm_rows(const std::vector<shape> &shapes) {
    for (const shape &s : shapes) {
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
            mt_tensor x = noise(MT_BF16, tokens, p.in), w = noise(MT_BF16, p.out, p.in, 0.02f);
            mt_tensor y = noise(MT_BF16, tokens, p.out), dx = empty(MT_BF16, tokens, p.in);
            mt_tensor dw = noise(MT_F32, p.out, p.in);
            std::string name = std::string(s.name) + ", " + p.name;
            gemm_row(name + " input gradient", MT_NO_TRANS, MT_NO_TRANS, y, w, 0.0f, dx);
            gemm_row(name + " weight gradient", MT_TRANS, MT_NO_TRANS, y, x, 1.0f, dw);
            gemm_row(name + " forward", MT_NO_TRANS, MT_TRANS, x, w, 0.0f, y);
            mt_arena_release(ctx, mark);
        }
    }
}

static void item_gemm() { gemm_rows(shapes_of(usual)); }
static void item_gemm_paper() { gemm_rows(shapes_of(paper)); }
static void item_gemm_big() { gemm_rows({shapes_of(big).back()}); } /* the others have products of the same shapes */

/* Runs f with another context on the same stream, which has this option for epilogues. */
static void with_epilogue(mt_epilogue epilogue, const work &f) {
    mt_context *before = ctx, *other = NULL;
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
    f();
    mt_context_destroy(other);
    ctx = before;
}

static const struct {
    mt_epilogue epilogue;
    const char *name;
} epilogues[] = {{MT_EPILOGUE_SEPARATE, ""},
                 {MT_EPILOGUE_FUSED, ", epilogues fused"},
                 {MT_EPILOGUE_MEASURED, ", epilogues measured"}};

static void linear_row(const std::string &name, double flop, mt_tensor out, const work &f, const work &product) {
    double ratio;
    f();
    check_finite(name, out);
    timing t = measure_beside(f, product, &ratio);
    row(name, t, 1e-12 * flop, "TFLOP/s", ratio, "the product alone");
}

/* The products of an MLP with what belongs to each: bias, GELU, its backward, gradient of the bias. */
static void linear_rows(int64_t h, const std::string &how) {
    int64_t n = opt.tiny ? 24 : 8192, f = 4 * h;
    size_t mark = mt_arena_mark(ctx);
    mt_tensor x = noise(MT_BF16, n, h), w1 = noise(MT_BF16, f, h, 0.02f), w2 = noise(MT_BF16, h, f, 0.02f);
    mt_tensor b1 = noise(MT_BF16, 1, f), pre = noise(MT_BF16, n, f), y = empty(MT_BF16, n, f),
              dh = empty(MT_BF16, n, f);
    mt_tensor dw = noise(MT_F32, f, h), db = noise(MT_F32, 1, f);
    std::string size = ", h " + std::to_string(h) + how;
    double flop = 2.0 * (double)n * (double)h * (double)f;
    work forward = [&] { DO(mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1.0f, x, w1, 0.0f, y)); };
    linear_row(
        "fc1 + bias" + size, flop, y, [&] { DO(mt_linear_forward(ctx, x, w1, b1, y)); }, forward);
    linear_row(
        "fc1 + bias + GELU" + size, flop, y,
        [&] { DO(mt_linear_activation_forward(ctx, MT_GELU_TANH, x, w1, b1, pre, y)); }, forward);
    linear_row(
        "fc2 input gradient + GELU backward + bias gradient" + size, flop, dh,
        [&] { DO(mt_linear_activation_backward(ctx, MT_GELU_TANH, x, w2, pre, dh, db)); },
        [&] { DO(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1.0f, x, w2, 0.0f, dh)); });
    linear_row(
        "fc1 weight gradient + bias gradient" + size, flop, dw, [&] { DO(mt_linear_gradients(ctx, dh, x, dw, db)); },
        [&] { DO(mt_gemm(ctx, MT_TRANS, MT_NO_TRANS, 1.0f, dh, x, 1.0f, dw)); });
    mt_arena_release(ctx, mark);
}

static void item_linear() {
    for (int64_t h : opt.tiny ? std::vector<int64_t>{32} : std::vector<int64_t>{1024, 4096})
        for (const auto &e : epilogues) with_epilogue(e.epilogue, [&] { linear_rows(h, e.name); });
}

/* ---- layers ------------------------------------------------------------------------------------------------------ */

/* A block with its registry, and its tensors [tokens, hidden]. */
struct block {
    shape s;
    mt_params *params;
    mt_tensor x, y, dy, dx;
    mt_batch batch;
    size_t mark;
    double n, h;
};

static block block_open(const shape &s) {
    block b;
    int64_t tokens = s.seq * s.sequences;
    b.s = s, b.n = (double)tokens, b.h = (double)s.hidden, b.mark = mt_arena_mark(ctx);
    memset(&b.batch, 0, sizeof b.batch);
    b.batch.sequences = s.sequences, b.batch.seq = s.seq;
    DO(mt_params_create(ctx, &grid, &b.params));
    DO(mt_params_set_dtype(ctx, b.params, MT_BF16));
    b.x = noise(MT_BF16, tokens, s.hidden), b.dy = noise(MT_BF16, tokens, s.hidden);
    b.y = empty(MT_BF16, tokens, s.hidden), b.dx = empty(MT_BF16, tokens, s.hidden);
    return b;
}

/* Measures step, which is forward and backward, and closes the block. */
static void block_rows(block *b, const std::string &name, double flop, const work &step, int host) {
    work f = [&] {
        size_t inner = mt_arena_mark(ctx);
        step();
        mt_arena_release(ctx, inner);
    };
    std::string full = b->s.name + name + ", forward + backward";
    f();
    check_finite(full, b->y);
    check_finite(full, b->dx);
    double seconds = compute_row(full, flop, f);
    if (host) host_rows(full, f, seconds);
    mt_params_destroy(b->params);
    mt_arena_release(ctx, b->mark);
}

static void mlp_rows(const shape &s) {
    block b = block_open(s);
    mt_mlp mlp;
    mt_mlp_desc d;
    memset(&d, 0, sizeof d);
    d.hidden = s.hidden;
    DO(mt_mlp_create(ctx, b.params, "mlp", &d, &mlp));
    DO(mt_params_init(ctx, b.params, 1));
    block_rows(
        &b, ", MLP", 48 * b.n * b.h * b.h,
        [&] {
            mt_mlp_saved saved;
            DO(mt_mlp_forward(ctx, &mlp, b.x, b.y, &saved));
            DO(mt_mlp_backward(ctx, &mlp, b.dy, b.dx, &saved));
        },
        1);
}

/* The same MLP of the functions for authors of blocks. */
static void composed_mlp_rows(const shape &s) {
    block b = block_open(s);
    mt_column_parallel_linear fc1;
    mt_row_parallel_linear fc2;
    mt_linear_desc d1, d2;
    memset(&d1, 0, sizeof d1), memset(&d2, 0, sizeof d2);
    d1.in_features = s.hidden, d1.out_features = 4 * s.hidden;
    d2.in_features = 4 * s.hidden, d2.out_features = s.hidden, d2.input_is_parallel = 1;
    DO(mt_column_parallel_linear_create(ctx, b.params, "fc1", &d1, &fc1));
    DO(mt_row_parallel_linear_create(ctx, b.params, "fc2", &d2, &fc2));
    DO(mt_params_init(ctx, b.params, 1));
    block_rows(
        &b, ", composed MLP", 48 * b.n * b.h * b.h,
        [&] {
            mt_linear_saved in, out;
            mt_tensor h, act, dh, dact;
            DO(mt_parallel_linear_tensors(ctx, &fc1, 1, b.x, &h));
            DO(mt_parallel_linear_tensors(ctx, &fc2, 1, b.y, &act));
            DO(mt_parallel_linear_forward_shared(ctx, &fc1, 1, &b.x, &h, &in));
            DO(mt_column_parallel_activation_forward(ctx, &fc1, MT_GELU_TANH, h, act));
            DO(mt_parallel_linear_forward_shared(ctx, &fc2, 1, &act, &b.y, &out));
            DO(mt_parallel_linear_tensors(ctx, &fc1, 1, b.dx, &dh));
            DO(mt_parallel_linear_tensors(ctx, &fc2, 1, b.dy, &dact));
            DO(mt_parallel_linear_backward_shared(ctx, &fc2, 1, &b.dy, &dact, &out));
            DO(mt_column_parallel_activation_backward(ctx, &fc1, MT_GELU_TANH, h, dact, dh));
            DO(mt_parallel_linear_backward_shared(ctx, &fc1, 1, &dh, &b.dx, &in));
        },
        1);
}

static void self_attention_rows(const shape &s) {
    block b = block_open(s);
    mt_self_attention attention;
    mt_self_attention_desc d;
    memset(&d, 0, sizeof d);
    d.hidden = s.hidden, d.heads = s.heads;
    DO(mt_self_attention_create(ctx, b.params, "attention", &d, &attention));
    DO(mt_params_init(ctx, b.params, 1));
    block_rows(
        &b, ", attention", 24 * b.n * b.h * b.h + 6 * b.n * (double)(s.seq + 1) * b.h,
        [&] {
            mt_self_attention_saved saved;
            DO(mt_self_attention_forward(ctx, &attention, &b.batch, b.x, b.y, &saved));
            DO(mt_self_attention_backward(ctx, &attention, b.dy, b.dx, &saved));
        },
        1);
}

/* Operations are counted as in bench.c: 72 tokens hidden^2 for the products, and the causal half of attention's.
   Recomputation does not count. */
static void layer_rows(const shape &s, const std::string &how, int host) {
    block b = block_open(s);
    mt_transformer_layer layer;
    mt_transformer_layer_desc d;
    memset(&d, 0, sizeof d);
    d.hidden = s.hidden, d.heads = s.heads;
    DO(mt_transformer_layer_create(ctx, b.params, "layer", &d, &layer));
    DO(mt_params_init(ctx, b.params, 1));
    block_rows(
        &b, how, 72 * b.n * b.h * b.h + 6 * b.n * (double)(s.seq + 1) * b.h,
        [&] {
            mt_transformer_layer_saved saved;
            DO(mt_transformer_layer_forward(ctx, &layer, &b.batch, b.x, b.y, &saved));
            DO(mt_transformer_layer_backward(ctx, &layer, b.dy, b.dx, &saved));
        },
        host);
}

static void item_block() {
    for (const shape &s : shapes_of(usual)) mlp_rows(s), composed_mlp_rows(s), self_attention_rows(s);
}

static void item_layer() {
    for (const shape &s : shapes_of(usual)) {
        layer_rows(s, "", 1);
        for (int e : {1, 2}) with_epilogue(epilogues[e].epilogue, [&] { layer_rows(s, epilogues[e].name, 0); });
    }
}

static void item_layer_paper() {
    for (const shape &s : shapes_of(paper)) layer_rows(s, "", 0);
}

static void item_layer_big() {
    for (const shape &s : shapes_of(big)) layer_rows(s, "", 0);
}

/* ---- GPT --------------------------------------------------------------------------------------------------------- */

struct gpt_model {
    mt_params *params;
    mt_gpt gpt;
    mt_gpt_saved saved;
    mt_optimizer optimizer;
    mt_step numbers;
    mt_batch batch;
    mt_tensor loss;
    int32_t *ids;
    int64_t tokens;
    double flop;
    size_t mark;
};

/* On all ranks of the grid. The batch has sequences of max_seq tokens. */
static void gpt_open(gpt_model *m, const mt_gpt_desc &d, int64_t sequences) {
    mt_optimizer_desc adamw;
    size_t distinct;
    memset(m, 0, sizeof *m), memset(&adamw, 0, sizeof adamw);
    m->mark = mt_arena_mark(ctx);
    adamw.beta2 = 0.95f, adamw.weight_decay = 0.1f;
    m->batch.sequences = sequences, m->batch.seq = d.max_seq;
    m->tokens = m->batch.sequences * m->batch.seq;
    m->batch.backward_scale = 1.0f / (float)m->tokens;
    DO(mt_params_create(ctx, &grid, &m->params));
    DO(mt_params_set_dtype(ctx, m->params, MT_BF16));
    DO(mt_gpt_create(ctx, m->params, &d, &m->gpt));
    DO(mt_params_init(ctx, m->params, 1));
    DO(mt_optimizer_create(ctx, m->params, &adamw, &m->optimizer));
    DO(mt_step_create(ctx, &m->optimizer, NULL, 1.0f, &m->numbers));
    DO(mt_gpt_saved_create(ctx, &m->gpt, &m->saved));
    m->ids = zipf_ids(d.vocab, m->tokens + 1, &distinct);
    m->loss = empty(MT_F32, 1, m->tokens);
    m->flop = 6.0 * (double)mt_params_global_elements(m->params) * (double)m->tokens +
              6.0 * (double)(m->tokens * (d.max_seq + 1)) * (double)(d.layer.hidden * d.layers);
}

static void gpt_close(gpt_model *m) {
    mt_gpt_saved_destroy(&m->saved);
    mt_step_destroy(ctx, &m->numbers);
    mt_optimizer_destroy(ctx, &m->optimizer);
    mt_params_destroy(m->params);
    mt_arena_release(ctx, m->mark);
}

static void gpt_gradients(gpt_model *m) {
    size_t mark = mt_arena_mark(ctx);
    DO(mt_gpt_forward(ctx, &m->gpt, &m->batch, m->ids, m->ids + 1, m->loss, &m->saved));
    DO(mt_gpt_backward(ctx, &m->gpt, m->batch.backward_scale, &m->saved));
    mt_arena_release(ctx, mark);
}

static void gpt_step(gpt_model *m) {
    DO(mt_params_zero_grad(ctx, m->params));
    gpt_gradients(m);
    DO(mt_sync_gradients(ctx, m->params));
    DO(mt_step_update(ctx, &m->numbers, mt_none()));
}

/* The same step as one launch of a CUDA graph. */
static void gpt_graph_rows(const std::string &name, gpt_model *m) {
    mt_graph *graph = NULL;
    DO(mt_graph_begin(ctx, NULL));
    gpt_step(m);
    DO(mt_graph_end(ctx, &graph));
    work launch = [&] {
        DO(mt_step_begin(ctx, &m->numbers, 1e-5f, 1));
        DO(mt_graph_launch(ctx, graph));
    };
    double seconds = compute_row(name + ", step as a graph", m->flop, launch);
    host_rows(name + ", step as a graph", launch, seconds);
    mt_graph_destroy(ctx, graph);
}

static void gpt2_open(gpt_model *m, int64_t padded_vocab) {
    mt_gpt_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = opt.tiny ? 93 : 50257, d.layers = opt.tiny ? 2 : 12, d.max_seq = opt.tiny ? 16 : 1024;
    d.layer.hidden = opt.tiny ? 32 : 768, d.layer.heads = opt.tiny ? 4 : 12, d.padded_vocab = padded_vocab;
    gpt_open(m, d, opt.tiny ? 2 : 16);
}

static void gpt_rows(int64_t padded_vocab) {
    gpt_model m;
    gpt2_open(&m, padded_vocab);
    std::string name = "GPT-2 124M, 16 x 1024 tokens, vocabulary " + std::to_string(m.gpt.desc.vocab);
    if (padded_vocab) name += " padded to " + std::to_string(padded_vocab);
    work step = [&] {
        DO(mt_step_begin(ctx, &m.numbers, 1e-5f, 1));
        gpt_step(&m);
    };
    step();
    check_finite(name, m.loss);
    double seconds = compute_row(name + ", step", m.flop, step);
    host_rows(name + ", step", step, seconds);
    timing t = measure(step);
    row(name + ", tokens", t, (double)m.tokens, "tokens/s", 0, "");
    DO(mt_params_zero_grad(ctx, m.params)); /* the rows above end with a step of the optimizer */
    seconds = compute_row(name + ", forward + backward", m.flop, [&] { gpt_gradients(&m); });
    host_rows(
        name + ", forward + backward", [&] { gpt_gradients(&m); }, seconds);
    gpt_graph_rows(name, &m);
    gpt_close(&m);
}

static void item_gpt2() {
    gpt_rows(0);
    gpt_rows(opt.tiny ? 96 : 50304);
}

/* The gradients are random numbers. The norm waits for its result. The step is a CUDA graph, because two steps with the
   same gradients are refused. */
static void item_optimizer() {
    gpt_model m;
    mt_graph *graph = NULL;
    float norm = 0;
    gpt2_open(&m, 0);
    for (int i = 0; i < mt_params_count(m.params); i++) {
        mt_random at = {1, stream_number++, 0, 0, mt_params_at(m.params, i)->grad.cols, NULL};
        DO(mt_random_normal(ctx, mt_params_at(m.params, i)->grad, 1e-3f, at));
    }
    double n = (double)m.optimizer.elements;
    work norm_of = [&] { DO(mt_grad_norm(ctx, m.params, &norm)); };
    DO(mt_graph_begin(ctx, NULL));
    DO(mt_optimizer_step(ctx, &m.optimizer, 1e-6f, 1.0f));
    DO(mt_graph_end(ctx, &graph));
    work step = [&] { DO(mt_graph_launch(ctx, graph)); };
    work zero = [&] { DO(mt_params_zero_grad(ctx, m.params)); };
    double seconds = memory_row("GPT-2 124M, gradient norm", 4 * n, mt_none(), norm_of);
    host_rows("GPT-2 124M, gradient norm", norm_of, seconds);
    seconds = memory_row("GPT-2 124M, AdamW, bf16 with f32 master", 30 * n, mt_params_at(m.params, 0)->value, step);
    mt_graph_destroy(ctx, graph);
    work zero_and_step = [&] {
        zero();
        DO(mt_optimizer_step(ctx, &m.optimizer, 1e-6f, 1.0f));
    };
    host_rows("GPT-2 124M, zero gradients and AdamW", zero_and_step, seconds);
    seconds = memory_row("GPT-2 124M, zero gradients", 4 * n, mt_none(), zero);
    host_rows("GPT-2 124M, zero gradients", zero, seconds);
    gpt_close(&m);
}

/* ---- ranks ------------------------------------------------------------------------------------------------------- */

static mt_status run_in(mt_comm *own, const mt_context_desc &where, const work &f) {
    mt_grid_desc shape = {mt_comm_size(own), 1, 1, 1};
    world = own;
    MT_TRY(mt_context_create(own, &where, &ctx));
    if (!mt_comm_is_meta(own)) MT_TRY(mt_comm_create_for(ctx, own, &world));
    MT_TRY(mt_grid_create(world, &shape, &grid));
    f();
    mt_grid_destroy(&grid);
    if (world != own) mt_comm_destroy(world);
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

/* Runs f as a rank of `own`, with a context and a grid of tensor ranks. After an error, what was created stays: the
   program then ends. */
static mt_status run_rank(mt_comm *own, const mt_context_desc &where, const work &f) {
    mt_comm *outer_world = world;
    mt_context *outer = ctx;
    mt_grid outer_grid = grid;
    mt_status status = run_in(own, where, f);
    world = outer_world, ctx = outer, grid = outer_grid;
    return status;
}

struct ranks_job {
    int gpus;
    size_t arena;
    const work *f;
};

static mt_status rank_main(mt_comm *own, void *user) {
    const ranks_job *job = (const ranks_job *)user;
    mt_context_desc where;
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_CUDA;
    where.ordinal = mt_comm_rank(own) % job->gpus;
    where.arena_bytes = job->arena;
    return run_rank(own, where, *job->f);
}

/* Runs f on `ranks` threads, each with a context that has an arena of this size, on `gpus` GPUs. The ranks communicate
   over NCCL when it is built in and each rank has a GPU of its own. */
static void as_ranks(int ranks, int gpus, size_t arena, const work &f) {
    ranks_job job = {gpus, arena, &f};
    mt_launch_desc d;
    memset(&d, 0, sizeof d);
    d.ranks = ranks, d.no_pinning = 1, d.timeout_s = 60;
    if (mt_launch(&d, rank_main, &job) != MT_SUCCESS) exit(1); /* it has printed why */
}

/* Measures f, which all ranks call, on the host's clock. A sample is the time of one of `calls` calls. `after` runs
   between the samples. */
static timing measure_ranks(int samples, int calls, const work &f, const work &after) {
    std::vector<double> seconds;
    for (int i = 0; i <= samples; i++) { /* the first is a warm-up */
        DO(mt_barrier(ctx, world));
        double begin = host_clock();
        for (int k = 0; k < calls; k++) f();
        DO(mt_context_synchronize(ctx));
        if (i > 0) seconds.push_back((host_clock() - begin) / calls);
        after();
    }
    return timing_of(seconds);
}

/* The ranks share the GPU. */
static void all_reduce_row(int ranks, int64_t size, mt_dtype dtype) {
    size_t mark = mt_arena_mark(ctx), count = (size_t)size / mt_dtype_size(dtype);
    mt_tensor from = noise(dtype, 1, (int64_t)count), to = empty(dtype, 1, (int64_t)count);
    work copy_once = [&] {
        CUDA(cudaMemcpyAsync(to.data, from.data, (size_t)size, cudaMemcpyDeviceToDevice, stream()));
    };
    timing copy = measure(copy_once), t = copy;
    as_ranks(ranks, 1, (count * 4 + (1 << 20)) * 4, [&] {
        mt_tensor x = empty(dtype, 1, (int64_t)count);
        mt_random at = {1, 5, 0, 0, (int64_t)count, NULL};
        DO(mt_random_normal(ctx, x, 1e-3f, at));
        timing mine = measure_ranks(
            opt.samples, opt.tiny ? 1 : 10,
            [&] { DO(mt_all_reduce(ctx, world, x.data, x.data, count, dtype, MT_SUM)); },
            [&] { DO(mt_fill(ctx, x, 1e-3f)); }); /* sums of sums would overflow */
        if (mt_comm_rank(world) == 0) t = mine;
    });
    row(type_of(dtype) + "all-reduce, " + std::to_string(ranks) + " ranks, " + std::to_string(size >> 10) + " KiB", t,
        1e-9 * (double)size, "GB/s", copy.median / t.median, "one copy of as many bytes");
    mt_arena_release(ctx, mark);
}

static void item_ranks() {
    for (int ranks : {2, 4})
        for (int64_t size : opt.tiny ? std::vector<int64_t>{4096} : std::vector<int64_t>{64 << 10, 4 << 20, 64 << 20})
            for (mt_dtype dtype : {MT_F32, MT_BF16}) all_reduce_row(ranks, size, dtype);
}

/* ---- products in pieces, and beside other kernels ---------------------------------------------------------------- */

static void found_or_end(const lt_product &p) {
    if (!p.found) fprintf(stderr, "bench_cuda: cuBLASLt has no such product\n"), exit(1);
}

/* The rows of a chunk in sequence parallelism come in pieces, one of each rank: as a product for each piece, as one
   batch, and as one product of all rows. */
static void pieces_rows(int64_t k, int64_t n) {
    int pieces = opt.tiny ? 4 : 32;
    int64_t rows = opt.tiny ? 8 : 256, all = pieces * rows;
    size_t mark = mt_arena_mark(ctx);
    mt_tensor a = noise(MT_BF16, all, k), w = noise(MT_BF16, n, k), c = empty(MT_BF16, all, n);
    lt_product whole = lt_fastest(MT_NO_TRANS, MT_TRANS, a, w, 0.0f, c),
               batch = lt_fastest(MT_NO_TRANS, MT_TRANS, a, w, 0.0f, c, CUBLAS_COMPUTE_32F, pieces),
               one = lt_fastest(MT_NO_TRANS, MT_TRANS, mt_tensor_rows(a, 0, rows), w, 0.0f, mt_tensor_rows(c, 0, rows));
    work as_whole = [&] { lt_run(whole, whole.choice); };
    std::string name = std::to_string(all) + " x " + std::to_string(k) + " x " + std::to_string(n) + ", ",
                some = std::to_string(pieces) + " of " + std::to_string(rows) + " rows";
    double flop = 2.0 * (double)all * (double)k * (double)n, ratio;
    found_or_end(whole), found_or_end(batch), found_or_end(one);
    row(name + "one product", measure(as_whole), 1e-12 * flop, "TFLOP/s", 1, "itself");
    timing t = measure_beside([&] { lt_run(batch, batch.choice); }, as_whole, &ratio);
    row(name + "a batch, " + some, t, 1e-12 * flop, "TFLOP/s", ratio, "one product");
    check_finite(name + "a batch", c);
    t = measure_beside(
        [&] {
            for (int i = 0; i < pieces; i++) {
                one.a = mt_tensor_rows(a, i * rows, rows), one.c = mt_tensor_rows(c, i * rows, rows);
                lt_run(one, one.choice);
            }
        },
        as_whole, &ratio);
    row(name + "products, " + some, t, 1e-12 * flop, "TFLOP/s", ratio, "one product");
    check_finite(name + "products", c);
    lt_destroy(&one), lt_destroy(&batch), lt_destroy(&whole);
    mt_arena_release(ctx, mark);
}

static void item_pieces() {
    int64_t h = opt.tiny ? 64 : 4096;
    pieces_rows(h, h / 2); /* fc1 and fc2 of one rank of 8, forward */
    pieces_rows(h / 2, h);
}

/* Takes a multiprocessor for each block, as a collective does: the block has all of its shared memory. */
static __global__ void spin(uint32_t *out, int64_t turns) {
    uint32_t x = threadIdx.x;
    for (int64_t i = 0; i < turns; i++) x = x * 1664525u + 1013904223u;
    if (x == 1) *out = x;
}

struct spinner {
    cudaStream_t stream;
    cudaEvent_t end;
    uint32_t *out;
    int blocks, shared;
    double turns; /* of a second */
};

static void spin_for(const spinner &s, double seconds) {
    int64_t turns = opt.tiny ? 1 : (int64_t)(seconds * s.turns);
    MT_LAUNCH_KERNEL(spin, (unsigned)s.blocks, 32, (size_t)s.shared, s.stream, s.out, turns);
    CUDA(cudaEventRecord(s.end, s.stream));
}

static spinner spinner_open() {
    spinner s = {nullptr, nullptr, nullptr, 1, 0, 1e8};
    void *out;
    double begin;
    DO(mt_arena_alloc(ctx, 256, &out)); /* what follows stays aligned as cuBLASLt wants it */
    s.out = (uint32_t *)out;
    CUDA(cudaDeviceGetAttribute(&s.shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    CUDA(cudaFuncSetAttribute((const void *)spin, cudaFuncAttributeMaxDynamicSharedMemorySize, s.shared));
    CUDA(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking));
    CUDA(cudaEventCreateWithFlags(&s.end, cudaEventDisableTiming));
    for (int i = 0; i < 2; i++) { /* the first is a warm-up */
        begin = host_clock();
        spin_for(s, 0.05);
        CUDA(cudaStreamSynchronize(s.stream));
    }
    s.turns *= 0.05 / std::max(host_clock() - begin, 1e-6);
    return s;
}

static void spinner_close(spinner *s) {
    CUDA(cudaEventDestroy(s->end));
    CUDA(cudaStreamDestroy(s->stream));
}

/* Measures f while the blocks spin. A sample counts only when they still spin at its end. */
static timing measure_beside_spinning(const spinner &s, const work &f) {
    int reps = calls_of(f);
    double spins = 0.02, begin = host_clock();
    std::vector<double> samples;
    for (int i = 0; another((int)samples.size(), begin) && i < 4 * opt.samples + 8; i++) {
        spin_for(s, spins);
        double seconds = sample(f, reps);
        bool still = cudaEventQuery(s.end) == cudaErrorNotReady;
        cudaGetLastError();
        CUDA(cudaStreamSynchronize(s.stream));
        if (still || opt.tiny) samples.push_back(seconds);
        else spins *= 2;
    }
    if (samples.empty()) fprintf(stderr, "bench_cuda: no product ended while other blocks spun\n"), exit(1);
    return timing_of(samples);
}

/* A product whose algorithm cuBLASLt proposes for this number of multiprocessors, while a kernel takes some of them. */
static void target_row(const spinner &s, const lt_product &whole, int target, double alone) {
    lt_product p = lt_describe(MT_NO_TRANS, MT_TRANS, whole.a, whole.b, 0.0f, whole.c);
    int32_t count = target;
    double flop = 2.0 * (double)p.a.rows * (double)p.a.cols * (double)p.b.rows;
    cublasLtMatmulDescSetAttribute(p.desc, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &count, sizeof count);
    p.found = lt_ask(p, &p.choice, 1);
    found_or_end(p);
    timing t = measure_beside_spinning(s, [&] { lt_run(p, p.choice); });
    row(std::to_string(s.blocks) + " multiprocessors taken, target " + std::to_string(target), t, 1e-12 * flop,
        "TFLOP/s", alone / t.median, "alone");
    lt_destroy(&p);
}

static void item_beside() {
    int64_t h = opt.tiny ? 64 : 4096, tokens = opt.tiny ? 32 : 8192;
    int multiprocessors = 0;
    size_t mark = mt_arena_mark(ctx);
    spinner s = spinner_open();
    lt_product whole = lt_fastest(MT_NO_TRANS, MT_TRANS, noise(MT_BF16, tokens, h), noise(MT_BF16, h, h), 0.0f,
                                  empty(MT_BF16, tokens, h));
    found_or_end(whole);
    CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    timing alone = measure([&] { lt_run(whole, whole.choice); });
    row("nothing beside", alone, 2e-12 * (double)tokens * (double)(h * h), "TFLOP/s", 1, "itself");
    for (int blocks : {16, 32})
        for (int less : {0, 16, 32}) {
            size_t inner = mt_arena_mark(ctx);
            s.blocks = blocks;
            target_row(s, whole, std::max(1, multiprocessors - less), alone.median);
            mt_arena_release(ctx, inner);
        }
    lt_destroy(&whole);
    spinner_close(&s);
    mt_arena_release(ctx, mark);
}

/* ---- the same bits each time ------------------------------------------------------------------------------------- */

static uint64_t hash_of(mt_tensor t) {
    uint64_t hash = 0;
    DO(mt_hash(ctx, t, 0, 0, t.cols, &hash));
    return hash;
}

/* Computes f 20 times. Before each time its results have other bits. */
static void repeat_row(const std::string &name, const std::vector<mt_tensor> &results, const work &f) {
    std::vector<uint64_t> first, now;
    int times = opt.tiny ? 2 : 20, differ = 0;
    double begin = host_clock();
    for (int i = 0; i < times; i++) {
        for (mt_tensor t : results) DO(mt_fill(ctx, t, (float)i));
        f();
        now.clear();
        for (mt_tensor t : results) now.push_back(hash_of(t));
        if (i == 0) first = now;
        differ += now != first;
    }
    print_row(name + ", other bits", differ, differ, differ, "runs", (host_clock() - begin) / times, 0, "");
    other_bits += differ;
    if (differ) fprintf(stderr, "bench_cuda: %s, %s: OTHER BITS in %d of %d\n", item_now, name.c_str(), differ, times);
}

static void repeat_attention(mt_dtype dtype, int64_t head_dim, int64_t per_group, mt_mask mask, float dropout) {
    int64_t seq = opt.tiny ? 33 : 2048, sequences = opt.tiny ? 1 : 4;
    int64_t heads = opt.tiny ? 2 : 2048 / head_dim / per_group * per_group, tokens = sequences * seq;
    size_t mark = mt_arena_mark(ctx);
    mt_attention_desc s;
    memset(&s, 0, sizeof s);
    s.batch = sequences, s.seq = seq, s.groups = heads / per_group, s.heads_per_group = per_group;
    s.head_dim = head_dim, s.scores.mask = mask;
    s.dropout.p = dropout, s.dropout.at.seed = 3, s.dropout.at.global_cols = heads;
    int64_t width = heads * head_dim, wide = (heads + 2 * s.groups) * head_dim;
    mt_tensor qkv = noise(dtype, tokens, wide), dqkv = empty(dtype, tokens, wide), out = empty(dtype, tokens, width);
    mt_tensor dout = noise(dtype, tokens, width), lse = empty(MT_F32, heads, tokens);
    std::string name = type_of(dtype) + "attention, head size " + std::to_string(head_dim);
    if (mask == MT_MASK_CAUSAL) name += ", causal";
    if (per_group > 1) name += ", " + std::to_string(per_group) + " heads per group";
    if (dropout > 0) name += ", dropout";
    repeat_row(name + ", forward", {out, lse}, [&] { DO(mt_attention_forward(ctx, &s, qkv, out, lse)); });
    repeat_row(name + ", backward", {dqkv}, [&] { DO(mt_attention_backward(ctx, &s, qkv, out, lse, dout, dqkv)); });
    mt_arena_release(ctx, mark);
}

static void item_repeat() {
    for (int64_t head_dim : {64, 96, 128, 256})
        for (mt_mask mask : {MT_MASK_CAUSAL, MT_MASK_BIDIRECTIONAL}) repeat_attention(MT_BF16, head_dim, 1, mask, 0);
    repeat_attention(MT_F16, 128, 1, MT_MASK_CAUSAL, 0);
    repeat_attention(MT_BF16, 128, opt.tiny ? 2 : 4, MT_MASK_CAUSAL, 0);
    repeat_attention(MT_BF16, 64, 1, MT_MASK_CAUSAL, 0.1f);
    repeat_attention(MT_BF16, 128, 1, MT_MASK_CAUSAL, 0.1f);
}

/* ---- scaling ----------------------------------------------------------------------------------------------------- */

/* arXiv 1909.08053: GPTs with about as many parameters for each of their ranks, and a batch of 8 sequences for all.
   Memory: a parameter takes 18 bytes (2 for the value; 4 each for gradient, master and both moments), which is 20 GiB
   for the 1.2 billion of one rank. Each layer keeps its input, 2 bytes x 8192 tokens x hidden: 0.9 GiB in 40 layers,
   3.4 GiB in 72. With logits and the work of a layer, and an arena of twice that (see scaling_plan), a rank with all
   layers is planned to take 24 to 26 GiB. With an eighth of the layers, the 8 ranks of 8.3B take 38 GiB of one GPU. */
static const struct {
    int ranks;
    int64_t layers;
} paper_splits[] = {{1, 40}, {2, 54}, {4, 64}, {8, 72}}; /* in the order of `paper` */

struct scaling_run {
    const char *how; /* the first words of its rows */
    shape s;
    int64_t all_layers;
    mt_gpt_desc gpt;
    int ranks, gpus;
    size_t arena, memory; /* bytes of a rank's arena, and all that a rank takes */
    timing t;
    double flop;
};

/* A model of the paper, with an eighth of its layers unless `full`. */
static scaling_run scaling_of(const char *how, size_t model, int full, int ranks) {
    scaling_run r;
    memset(&r, 0, sizeof r);
    r.how = how, r.s = paper[model], r.all_layers = paper_splits[model].layers, r.ranks = ranks;
    r.gpus = std::min(ranks, mt_device_count(MT_DEVICE_CUDA));
    if (opt.tiny) r.s.hidden = 64, r.s.heads = 8, r.s.seq = 16, r.s.sequences = 2, r.all_layers = 4;
    r.gpt.vocab = opt.tiny ? 93 : 50257, r.gpt.padded_vocab = opt.tiny ? 96 : 51200;
    r.gpt.layers = full ? r.all_layers : (r.all_layers + 4) / 8, r.gpt.max_seq = r.s.seq;
    r.gpt.layer.hidden = r.s.hidden, r.gpt.layer.heads = r.s.heads, r.gpt.layer.recompute = MT_RECOMPUTE_FULL;
    return r;
}

static void scaling_step(gpt_model *m) {
    DO(mt_step_begin(ctx, &m->numbers, 1e-5f, 1));
    gpt_step(m);
    DO(mt_barrier(ctx, world)); /* the slowest rank counts */
}

/* Plans a step. The arena is twice as large as a step needs, because the first step copies the operands of products to
   measure their algorithms. */
static void scaling_plan(scaling_run *r) {
    mt_comm *meta = NULL;
    mt_context_desc where;
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_META, where.planned = MT_DEVICE_CUDA;
    mt_status status = mt_comm_create_meta(r->ranks, 0, &meta);
    work plan = [&] {
        gpt_model m;
        gpt_open(&m, r->gpt, r->s.sequences);
        scaling_step(&m);
        r->arena = 2 * mt_arena_peak(ctx);
        r->memory = r->arena + mt_context_allocated(ctx) + ((size_t)64 << 20); /* workspace of cuBLASLt, small things */
        gpt_close(&m);
    };
    if (status == MT_SUCCESS) status = run_rank(meta, where, plan);
    if (status != MT_SUCCESS) fprintf(stderr, "bench_cuda: %s\n", mt_comm_last_error(meta)), exit(1);
    mt_comm_destroy(meta);
}

static std::string scaling_name(const scaling_run &r) {
    std::string name = r.how + std::string(r.s.name, 4) + ", " + std::to_string(r.gpt.layers);
    if (r.gpt.layers < r.all_layers) name += " of " + std::to_string(r.all_layers);
    name += " layers, " + std::to_string(r.ranks) + (r.ranks > 1 ? " ranks" : " rank");
    return name + " on " + std::to_string(r.gpus) + (r.gpus > 1 ? " GPUs" : " GPU");
}

/* Plans a step. Do the ranks fit in the memory of their GPUs? */
static bool scaling_fits(scaling_run *r) {
    size_t all, memory = 0, total = 0;
    scaling_plan(r);
    all = r->memory * (size_t)((r->ranks + r->gpus - 1) / r->gpus);
    CUDA(cudaMemGetInfo(&memory, &total));
    if (all <= memory) return true;
    fprintf(stderr, "# scaling, %s: not measured%s: it takes %.1f GiB of a GPU, %.1f GiB are free\n",
            scaling_name(*r).c_str(), r->gpt.layers == r->all_layers ? " with all layers" : "", (double)all / (1 << 30),
            (double)memory / (1 << 30));
    return false;
}

/* Adds the runs of a split: one rank or, on several, weak and strong scaling. Adds none, with a message, if one does
   not fit. */
static bool scaling_add(std::vector<scaling_run> *runs, size_t split, int full) {
    int ranks = paper_splits[split].ranks;
    std::vector<scaling_run> own;
    if (ranks == 1) own = {scaling_of("", split, full, 1)};
    else own = {scaling_of("weak, ", split, full, ranks), scaling_of("strong, ", 0, full, ranks)};
    for (scaling_run &r : own)
        if (!scaling_fits(&r)) return false;
    runs->insert(runs->end(), own.begin(), own.end());
    return true;
}

static void scaling_measure(scaling_run *r) {
    as_ranks(r->ranks, r->gpus, r->arena, [&] {
        gpt_model m;
        gpt_open(&m, r->gpt, r->s.sequences);
        timing t = measure_ranks(
            std::min(opt.samples, 5), 1, [&] { scaling_step(&m); }, [] {});
        if (mt_comm_rank(world) == 0) {
            check_finite(scaling_name(*r), m.loss);
            r->t = t, r->flop = m.flop;
        }
        gpt_close(&m);
    });
}

/* Prints the rows of a run; those of more ranks compare with one rank. */
static void scaling_rows(const scaling_run &r, const scaling_run &one) {
    std::string name = scaling_name(r);
    double rate = 1e-12 * r.flop / r.gpus, rate_of_one = 1e-12 * one.flop / one.t.median;
    double efficiency = r.ranks > 1 ? rate / r.t.median / rate_of_one : 0, gib = (double)r.memory / (1 << 30);
    print_row(name + ", step", 1e3 * r.t.median, 1e3 * r.t.low, 1e3 * r.t.high, "ms", r.t.median, 0, "");
    row(name + ", per GPU", r.t, rate, "TFLOP/s", efficiency, r.ranks > 1 ? "1.2B on one rank" : "");
    if (r.how == std::string("strong, ")) row(name + ", speed-up", r.t, one.t.median, "times", 0, "");
    print_row(name + ", planned for a rank", gib, gib, gib, "GiB", r.t.median, 0, "");
}

/* Measures runs of one depth. The first is that of one rank. */
static void scaling_at_depth(std::vector<scaling_run> runs) {
    for (const char *how : {"", "weak, ", "strong, "})
        for (scaling_run &r : runs) {
            if (r.how != std::string(how)) continue;
            scaling_measure(&r);
            scaling_rows(r, runs[0]);
        }
}

/* A split has all layers if each rank has a GPU and all runs of the split fit. Other splits have an eighth of them.
   Rows compare with one rank of the same depth, so without it no split has this depth. */
static void item_scaling() {
    std::vector<scaling_run> full, eighth;
    int devices = mt_device_count(MT_DEVICE_CUDA);
    for (size_t i = 0; i < sizeof paper_splits / sizeof *paper_splits; i++) {
        bool apart = paper_splits[i].ranks <= devices && (i == 0 || !full.empty());
        if (apart && scaling_add(&full, i, 1)) continue;
        if (i == 0) fprintf(stderr, "# scaling: no run has all layers, because the one to compare with does not fit\n");
        if (eighth.empty() && !scaling_add(&eighth, 0, 0)) break;
        if (i > 0) scaling_add(&eighth, i, 0);
    }
    scaling_at_depth(full);
    if (full.empty() || eighth.size() > 1) scaling_at_depth(eighth); /* not one rank that nothing compares with */
}

/* ---- main -------------------------------------------------------------------------------------------------------- */

/* What an item needs: the large GEMM to compare with, or the memory of the GPUs for its ranks. */
enum needs { NOTHING, LARGE_GEMM, WHOLE_MEMORY };

/* In the order of --list. */
static const struct {
    const char *name, *title;
    void (*run)();
    enum needs needs;
} items[] = {
    {"limits", "what this GPU does at most, measured here", item_limits, LARGE_GEMM},
    {"add", "additions and conversions", item_add, NOTHING},
    {"bias", "bias and its gradient", item_bias, NOTHING},
    {"activation", "activations, with and without a bias", item_activation, NOTHING},
    {"dropout", "dropout with bias and residual", item_dropout, NOTHING},
    {"norm", "LayerNorm and RMSNorm", item_norm, NOTHING},
    {"embedding", "lookup of 50304 ids, and its gradient", item_embedding, NOTHING},
    {"cross-entropy", "cross-entropy of 8192 tokens", item_cross_entropy, NOTHING},
    {"adamw", "AdamW and sums of squares, 128 Mi elements", item_adamw, NOTHING},
    {"rotary", "rotary position embedding", item_rotary, NOTHING},
    {"hash", "hashes", item_hash, NOTHING},
    {"pointwise", "operators of two tensors, element by element", item_pointwise, NOTHING},
    {"attention", "2048 features, 16384 tokens in sequences of 2048", item_attention, LARGE_GEMM},
    {"attention-lengths", "bf16, 2048 features, 16384 tokens, other sequences", item_attention_lengths, LARGE_GEMM},
    {"attention-plain", "the kernels without tensor cores", item_attention_plain, LARGE_GEMM},
    {"decode", "attention with a key/value cache: one new token for each sequence, and prompts", item_decode,
     LARGE_GEMM},
    {"gemm", "the products of a layer, bf16, 8192 tokens, weight gradients into f32", item_gemm, NOTHING},
    {"linear", "products with bias, GELU and gradients of the bias, bf16, 8192 tokens", item_linear, NOTHING},
    {"block", "MLP and attention, bf16, one rank", item_block, LARGE_GEMM},
    {"layer", "one pre-LN GPT layer, bf16, one rank, no dropout", item_layer, LARGE_GEMM},
    {"gpt2", "training step of GPT-2 124M, bf16, AdamW, clipped", item_gpt2, LARGE_GEMM},
    {"optimizer", "gradient norm and AdamW over all parameters of GPT-2 124M", item_optimizer, NOTHING},
    {"ranks", "ranks that are threads and share this GPU", item_ranks, NOTHING},
    {"pieces", "products of a chunk in sequence parallelism, bf16, weights of one rank of 8", item_pieces, NOTHING},
    {"beside", "a product, bf16, 8192 x 4096 x 4096, while a kernel takes multiprocessors", item_beside, NOTHING},
    {"repeat", "attention 20 times: how many runs have other bits than the first", item_repeat, NOTHING},
    {"scaling", "the paper's GPTs on 1 to 8 tensor parallel ranks, bf16, full recomputation", item_scaling,
     WHOLE_MEMORY},
    {"gemm-paper", "the products of the layers of the paper", item_gemm_paper, NOTHING},
    {"layer-paper", "the layers of the paper", item_layer_paper, LARGE_GEMM},
    {"gemm-big", "the products of large layers", item_gemm_big, NOTHING},
    {"layer-big", "large layers", item_layer_big, LARGE_GEMM}};

static int usage(int code) {
    printf("bench_cuda [--list] [--only ITEM] [--quick] [--tiny] [--arena GIB] [--csv]\n"
           "  --list    prints the items, in the order in which they run\n"
           "  --quick   5 samples of each instead of 15\n  --tiny    shapes that only show that everything runs\n"
           "  --arena   takes at most so many GiB, for a profiler that saves and restores the memory\n"
           "  --csv     lines item,name,median,min,max,unit,us,ratio,versus; comments go to stderr\n");
    return code;
}

static int list() {
    for (const auto &i : items) printf("%s\n", i.name);
    return 0;
}

static int parse(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        std::string a = argv[i];
        if (a == "--csv") opt.csv = 1;
        else if (a == "--quick") opt.samples = 5;
        else if (a == "--tiny") opt.tiny = 1, opt.samples = 1;
        else if (a == "--list") return list();
        else if (a == "--only" && i + 1 < argc) opt.only = argv[++i];
        else if (a == "--arena" && i + 1 < argc) opt.arena = (size_t)std::max(1, atoi(argv[++i])) << 30;
        else return usage(a == "--help" ? 0 : 2);
    }
    for (const auto &i : items)
        if (opt.only.empty() || opt.only == i.name) return -1;
    fprintf(stderr, "bench_cuda: --only is '%s', must be a line of --list\n", opt.only.c_str());
    return 2;
}

#ifdef MT_USE_NCCL
#define WITH_OR_WITHOUT_NCCL "with NCCL"
#else
#define WITH_OR_WITHOUT_NCCL "without NCCL"
#endif

static void print_head(int devices) {
    cudaDeviceProp gpu;
    std::string gpus = devices > 1 ? ", " + std::to_string(devices) + " GPUs " WITH_OR_WITHOUT_NCCL : "";
    CUDA(cudaGetDeviceProperties(&gpu, 0));
    fprintf(opt.csv ? stderr : stdout, "# %s, %d SMs, %.0f GiB%s, CUDA %d; megatron.h %s; %d samples\n", gpu.name,
            gpu.multiProcessorCount, (double)gpu.totalGlobalMem / (1 << 30), gpus.c_str(), CUDART_VERSION, MT_VERSION,
            opt.samples);
}

/* Creates the context, with an arena of 8 tenths of the free memory, or a small one for an item whose ranks need it. */
static void open_context(enum needs needs) {
    mt_context_desc where;
    mt_grid_desc one = {1, 1, 1, 1};
    size_t memory = 0, all = 0;
    CUDA(cudaMemGetInfo(&memory, &all));
    memset(&where, 0, sizeof where);
    where.device = MT_DEVICE_CUDA;
    memory = std::min(memory, opt.arena);
    where.arena_bytes = needs == WHOLE_MEMORY ? (size_t)1 << 20 : opt.tiny ? (size_t)256 << 20 : memory / 10 * 8;
    other_arena = opt.tiny ? (size_t)256 << 20 : memory / 10;
    if (mt_comm_create_local(1, 0, &world) != MT_SUCCESS || mt_context_create(world, &where, &ctx) != MT_SUCCESS ||
        mt_grid_create(world, &one, &grid) != MT_SUCCESS) {
        fprintf(stderr, "bench_cuda: %s\n", world ? mt_comm_last_error(world) : "no communicator");
        exit(1);
    }
}

static void close_context() {
    if (limit_gemm.found) lt_destroy(&limit_gemm);
    limit_gemm.found = 0;
    mt_grid_destroy(&grid);
    mt_context_destroy(ctx);
    mt_comm_destroy(world);
}

int main(int argc, char **argv) {
    int code = parse(argc, argv), devices = 0;
    if (code >= 0) return code;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("bench_cuda: no GPU here, nothing was measured\n");
        return NO_GPU;
    }
    print_head(devices);
    if (opt.csv) printf("item,name,median,min,max,unit,us,ratio,versus\n");
    for (const auto &i : items) {
        if (!opt.only.empty() && opt.only != i.name) continue;
        item_now = i.name;
        if (!opt.csv) printf("\n[%s] %s\n", i.name, i.title);
        open_context(i.needs);
        if (i.needs == LARGE_GEMM) large_gemm();
        i.run();
        close_context();
    }
    return not_finite > 0 || other_bits > 0;
}
