// test_standins.cpp - tests the stand-ins for cuBLASLt and NCCL: their results against double precision, and that they
// refuse or report wrong calls. Also tests the rules of stream capture, and graphs.
//
// build_standins.sh runs it. It prints one line per case; the last line is "N passed, N failed, N skipped". A case
// fails when a CHECK fails, or when the engine reports an error that the case does not expect.
#include "runtime.h"

#include <cublasLt.h>
#include <cublas_api.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace mte {
void nccl_silence(int device, int after);
void nccl_fail_after(int device, int after, ncclResult_t result);
void nccl_fail(ncclComm_t comm, ncclResult_t result);
void nccl_reset_faults();
void nccl_set_version(int version);
void cuda_fail_after(const char *name, int after, cudaError_t error);
struct NcclCounts {
    int created, alive, registered, windows, threads, calls;
};
NcclCounts nccl_counts();
bool nccl_waits(ncclComm_t comm);
} // namespace mte

namespace {

// ---- the harness ----------------------------------------------------------------------------------------------------

int passed, failed, skipped;
std::atomic<int> failures;
const char *skip_reason;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            failures++;                                                                                                \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                    \
        }                                                                                                              \
    } while (0)

void conclude(const std::string &name) {
    if (skip_reason) skipped++;
    else if (failures) failed++;
    else passed++;
    if (skip_reason) printf("skipped  %s: %s\n", name.c_str(), skip_reason);
    else printf("%s  %s\n", failures ? "FAILED " : "ok     ", name.c_str());
    fflush(stdout);
}

void run_case(const std::string &name, const std::function<void()> &body) {
    failures = 0;
    skip_reason = nullptr;
    const int before = mte::errors();
    body();
    if (mte::errors() != before) {
        failures++;
        fprintf(stderr, "%s: %d errors reported\n", name.c_str(), mte::errors() - before);
    }
    conclude(name);
}

// A case in which the engine must report at least one error. This error does not make the program fail.
void run_reporting_case(const std::string &name, const std::function<void()> &body) {
    failures = 0;
    skip_reason = nullptr;
    const int before = mte::errors();
    body();
    if (mte::errors() == before && !skip_reason) {
        failures++;
        fprintf(stderr, "%s: nothing was reported\n", name.c_str());
    }
    conclude(name);
}

uint64_t random_state = 1;

uint64_t random_bits() {
    uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

double random_value() { return static_cast<double>(static_cast<int64_t>(random_bits())) / 9223372036854775808.0; }

// ---- cuBLASLt: matrices ---------------------------------------------------------------------------------------------

size_t size_of(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }

const char *name_of(cudaDataType_t type) { return type == CUDA_R_32F ? "f32" : type == CUDA_R_16BF ? "bf16" : "f16"; }

double epsilon_of(cudaDataType_t type) { return type == CUDA_R_32F ? 6e-8 : type == CUDA_R_16BF ? 4e-3 : 5e-4; }

double get(const void *base, cudaDataType_t type, size_t at) {
    if (type == CUDA_R_32F) return static_cast<const float *>(base)[at];
    if (type == CUDA_R_16BF) return __bfloat162float(static_cast<const __nv_bfloat16 *>(base)[at]);
    return __half2float(static_cast<const __half *>(base)[at]);
}

void put(void *base, cudaDataType_t type, size_t at, double value) {
    const float x = static_cast<float>(value);
    if (type == CUDA_R_32F) static_cast<float *>(base)[at] = x;
    else if (type == CUDA_R_16BF) static_cast<__nv_bfloat16 *>(base)[at] = __float2bfloat16(x);
    else static_cast<__half *>(base)[at] = __float2half(x);
}

constexpr unsigned char kGap = 0x5a;

// A random matrix on the device with its copy on the host, with gaps between its columns (or rows).
struct Matrix {
    cudaDataType_t type;
    size_t rows, cols, ld, batch, stride;
    bool row_major;
    std::vector<unsigned char> host;
    unsigned char *device = nullptr;

    Matrix(cudaDataType_t type_, size_t rows_, size_t cols_, size_t pad, bool row_major_ = false, size_t batch_ = 1)
        : type(type_), rows(rows_), cols(cols_), ld((row_major_ ? cols_ : rows_) + pad), batch(batch_),
          row_major(row_major_) {
        const size_t vectors = row_major ? rows : cols;
        stride = ld * vectors;
        host.assign(batch * stride * size_of(type), kGap);
        for (size_t z = 0; z < batch; z++)
            for (size_t c = 0; c < cols; c++)
                for (size_t r = 0; r < rows; r++) put(host.data(), type, at(z, r, c), random_value());
        CHECK(cudaMalloc(reinterpret_cast<void **>(&device), host.size()) == cudaSuccess);
        upload();
    }
    ~Matrix() { cudaFree(device); }
    Matrix(const Matrix &) = delete;
    Matrix &operator=(const Matrix &) = delete;

    size_t at(size_t z, size_t r, size_t c) const { return z * stride + (row_major ? r * ld + c : c * ld + r); }
    double value(size_t z, size_t r, size_t c) const { return get(host.data(), type, at(z, r, c)); }
    void upload() { CHECK(cudaMemcpy(device, host.data(), host.size(), cudaMemcpyHostToDevice) == cudaSuccess); }
    void download() { CHECK(cudaMemcpy(host.data(), device, host.size(), cudaMemcpyDeviceToHost) == cudaSuccess); }

    bool gaps_untouched() const {
        const size_t vectors = row_major ? rows : cols, length = row_major ? cols : rows, size = size_of(type);
        for (size_t v = 0; v < batch * vectors; v++)
            for (size_t byte = (v * ld + length) * size; byte < (v + 1) * ld * size; byte++)
                if (host[byte] != kGap) return false;
        return true;
    }

    cublasLtMatrixLayout_t layout() const {
        cublasLtMatrixLayout_t l = nullptr;
        const int32_t order = row_major ? CUBLASLT_ORDER_ROW : CUBLASLT_ORDER_COL, count = static_cast<int32_t>(batch);
        const int64_t offset = static_cast<int64_t>(stride);
        CHECK(cublasLtMatrixLayoutCreate(&l, type, rows, cols, static_cast<int64_t>(ld)) == CUBLAS_STATUS_SUCCESS);
        CHECK(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_ORDER, &order, sizeof order) == 0);
        if (batch == 1) return l;
        CHECK(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count) == 0);
        CHECK(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &offset,
                                               sizeof offset) == 0);
        return l;
    }
};

struct Shape {
    size_t m = 16, n = 24, k = 40, batch = 1, pad = 8;
    bool ta = false, tb = false, row_a = false, row_b = false, row_d = false;
    cudaDataType_t in = CUDA_R_32F, out = CUDA_R_32F;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    float alpha = 1.0f, beta = 0.0f;
    cublasComputeType_t compute = CUBLAS_COMPUTE_32F;

    bool bias() const { return (epilogue & 4) != 0; }
    bool gradient() const { return (epilogue & (16 | 256 | 512)) != 0; }
    bool aux() const { return (epilogue & 128) != 0; }
    bool dgelu() const { return (epilogue & 64) != 0; }
};

// Everything that one multiplication needs. A test of a refusal makes one part of it wrong.
struct Gemm {
    Shape s;
    cublasLtHandle_t handle = nullptr;
    cublasLtMatmulDesc_t desc = nullptr;
    cublasLtMatmulPreference_t preference = nullptr;
    Matrix a, b, c, d, aux, bias;
    cublasLtMatrixLayout_t la, lb, lc, ld;
    const void *pa, *pb, *pc;
    void *pd, *workspace = nullptr;
    unsigned char *memory = nullptr;
    size_t workspace_bytes = 1 << 16;
    const float *alpha, *beta;

    explicit Gemm(const Shape &shape)
        : s(shape), a(s.in, s.ta ? s.k : s.m, s.ta ? s.m : s.k, s.pad, s.row_a, s.batch),
          b(s.in, s.tb ? s.n : s.k, s.tb ? s.k : s.n, s.pad, s.row_b, s.batch),
          c(s.out, s.m, s.n, s.pad, s.row_d, s.batch), d(s.out, s.m, s.n, 2 * s.pad, s.row_d, s.batch),
          aux(s.out, s.m, s.n, s.pad, false, s.batch),
          bias(s.out, s.epilogue == CUBLASLT_EPILOGUE_BGRADB ? s.n : s.m, 1, 0), la(a.layout()), lb(b.layout()),
          lc(c.layout()), ld(d.layout()), pa(a.device), pb(b.device), pc(c.device), pd(d.device), alpha(&s.alpha),
          beta(&s.beta) {
        CHECK(cublasLtCreate(&handle) == CUBLAS_STATUS_SUCCESS);
        CHECK(cublasLtMatmulDescCreate(&desc, s.compute, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS);
        CHECK(cublasLtMatmulPreferenceCreate(&preference) == CUBLAS_STATUS_SUCCESS);
        CHECK(cudaMalloc(reinterpret_cast<void **>(&memory), workspace_bytes) == cudaSuccess);
        workspace = memory;
        set(CUBLASLT_MATMUL_DESC_TRANSA, static_cast<int32_t>(s.ta ? CUBLAS_OP_T : CUBLAS_OP_N));
        set(CUBLASLT_MATMUL_DESC_TRANSB, static_cast<int32_t>(s.tb ? CUBLAS_OP_T : CUBLAS_OP_N));
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, s.epilogue);
        if (s.bias() || s.gradient()) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.device);
        if (s.aux()) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.device);
        if (s.aux()) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<int64_t>(aux.ld));
        if (s.aux()) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, static_cast<int64_t>(aux.stride));
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(workspace_bytes));
    }
    ~Gemm() {
        for (cublasLtMatrixLayout_t l : {la, lb, lc, ld}) cublasLtMatrixLayoutDestroy(l);
        cublasLtMatmulDescDestroy(desc);
        cublasLtMatmulPreferenceDestroy(preference);
        cublasLtDestroy(handle);
        cudaFree(memory);
    }

    template <class T> void set(cublasLtMatmulDescAttributes_t attribute, T value) {
        CHECK(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof value) == CUBLAS_STATUS_SUCCESS);
    }
    template <class T> void prefer(cublasLtMatmulPreferenceAttributes_t attribute, T value) {
        CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value) ==
              CUBLAS_STATUS_SUCCESS);
    }
    template <class T>
    void set_layout(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, T value) {
        CHECK(cublasLtMatrixLayoutSetAttribute(layout, attribute, &value, sizeof value) == CUBLAS_STATUS_SUCCESS);
    }

    cublasStatus_t heuristic(std::vector<cublasLtMatmulHeuristicResult_t> *out) {
        int count = -1;
        out->resize(16);
        const cublasStatus_t status =
            cublasLtMatmulAlgoGetHeuristic(handle, desc, la, lb, lc, ld, preference, 16, out->data(), &count);
        out->resize(static_cast<size_t>(count < 0 ? 0 : count));
        return status;
    }

    cublasStatus_t run(const cublasLtMatmulAlgo_t *algo) {
        const cublasStatus_t status = cublasLtMatmul(handle, desc, alpha, pa, la, pb, lb, beta, pc, lc, pd, ld, algo,
                                                     workspace, workspace_bytes, nullptr);
        CHECK(cudaDeviceSynchronize() == cudaSuccess);
        return status;
    }

    cublasStatus_t run_first() {
        std::vector<cublasLtMatmulHeuristicResult_t> results;
        const cublasStatus_t status = heuristic(&results);
        return status == CUBLAS_STATUS_SUCCESS ? run(&results[0].algo) : status;
    }

    double op_a(size_t z, size_t i, size_t q) const { return s.ta ? a.value(z, q, i) : a.value(z, i, q); }
    double op_b(size_t z, size_t q, size_t j) const { return s.tb ? b.value(z, j, q) : b.value(z, q, j); }
};

double gelu(double x) { return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }

double gelu_slope(double x) {
    const double h = 1e-5;
    return (gelu(x + h) - gelu(x - h)) / (2 * h);
}

bool near(double got, double expected, double tolerance) {
    return fabs(got - expected) <= tolerance * (1 + fabs(expected));
}

// Computes one element in double precision: *before goes into the auxiliary matrix, the result after the epilogue into
// D.
void expected_element(const Gemm &g, const Matrix &aux, size_t z, size_t i, size_t j, double *before, double *after) {
    const Shape &s = g.s;
    double x = 0;
    for (size_t q = 0; q < s.k; q++) x += g.op_a(z, i, q) * g.op_b(z, q, j);
    x *= s.alpha;
    if (s.beta != 0) x += s.beta * g.c.value(z, i, j);
    if (s.bias()) x += g.bias.value(0, i, 0);
    *before = x;
    if (s.epilogue & 2) x = x > 0 ? x : 0;
    if (s.epilogue & 32) x = gelu(x);
    if (s.dgelu()) x *= gelu_slope(aux.value(z, i, j));
    *after = x;
}

void check_gradient(Gemm &g, double tolerance) {
    g.bias.download();
    for (size_t i = 0; i < g.bias.rows; i++) {
        double sum = 0, before, after;
        if (g.s.epilogue == CUBLASLT_EPILOGUE_BGRADA)
            for (size_t q = 0; q < g.s.k; q++) sum += g.op_a(0, i, q);
        if (g.s.epilogue == CUBLASLT_EPILOGUE_BGRADB)
            for (size_t q = 0; q < g.s.k; q++) sum += g.op_b(0, q, i);
        for (size_t j = 0; j < g.s.n && g.s.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD; j++) {
            expected_element(g, g.aux, 0, i, j, &before, &after);
            sum += after;
        }
        CHECK(near(g.bias.value(0, i, 0), sum, 4 * tolerance));
    }
}

// Runs every algorithm that the heuristic offers and compares everything with double precision.
void check_shape(const Shape &s) {
    Gemm g(s);
    std::vector<cublasLtMatmulHeuristicResult_t> results;
    CHECK(g.heuristic(&results) == CUBLAS_STATUS_SUCCESS);
    CHECK(!results.empty());
    const double tolerance = epsilon_of(s.out) * 4 + 1e-5 + (s.compute == CUBLAS_COMPUTE_32F_FAST_TF32 ? 1e-2 : 0);
    for (const cublasLtMatmulHeuristicResult_t &result : results) {
        CHECK(result.workspaceSize <= g.workspace_bytes && result.state == CUBLAS_STATUS_SUCCESS);
        CHECK(g.run(&result.algo) == CUBLAS_STATUS_SUCCESS);
        g.d.download();
        if (s.aux() && !s.dgelu()) g.aux.download();
        bool same = true, same_aux = true;
        for (size_t z = 0; z < s.batch; z++)
            for (size_t j = 0; j < s.n; j++)
                for (size_t i = 0; i < s.m; i++) {
                    double before, after;
                    expected_element(g, g.aux, z, i, j, &before, &after);
                    same = same && near(g.d.value(z, i, j), after, tolerance);
                    if (s.aux() && !s.dgelu()) same_aux = same_aux && near(g.aux.value(z, i, j), before, tolerance);
                }
        CHECK(same);
        CHECK(same_aux);
        CHECK(g.d.gaps_untouched() && g.aux.gaps_untouched());
        if (s.gradient()) check_gradient(g, tolerance);
    }
}

struct NamedEpilogue {
    const char *name;
    uint32_t value;
};

const NamedEpilogue epilogues[] = {
    {"DEFAULT", CUBLASLT_EPILOGUE_DEFAULT},   {"RELU", CUBLASLT_EPILOGUE_RELU},
    {"BIAS", CUBLASLT_EPILOGUE_BIAS},         {"RELU_BIAS", CUBLASLT_EPILOGUE_RELU_BIAS},
    {"GELU", CUBLASLT_EPILOGUE_GELU},         {"GELU_BIAS", CUBLASLT_EPILOGUE_GELU_BIAS},
    {"GELU_AUX", CUBLASLT_EPILOGUE_GELU_AUX}, {"GELU_AUX_BIAS", CUBLASLT_EPILOGUE_GELU_AUX_BIAS},
    {"DGELU", CUBLASLT_EPILOGUE_DGELU},       {"DGELU_BGRAD", CUBLASLT_EPILOGUE_DGELU_BGRAD},
    {"BGRADA", CUBLASLT_EPILOGUE_BGRADA},     {"BGRADB", CUBLASLT_EPILOGUE_BGRADB},
};

const cudaDataType_t type_pairs[][2] = {{CUDA_R_32F, CUDA_R_32F},
                                        {CUDA_R_16BF, CUDA_R_16BF},
                                        {CUDA_R_16BF, CUDA_R_32F},
                                        {CUDA_R_16F, CUDA_R_16F},
                                        {CUDA_R_16F, CUDA_R_32F}};

void check_epilogue(uint32_t epilogue, cudaDataType_t in, cudaDataType_t out) {
    for (int form = 0; form < 4; form++) {
        Shape s;
        s.epilogue = epilogue;
        s.in = in;
        s.out = out;
        s.ta = (form & 1) != 0;
        s.tb = (form & 2) != 0;
        if ((epilogue == CUBLASLT_EPILOGUE_BGRADA && s.ta) || (epilogue == CUBLASLT_EPILOGUE_BGRADB && !s.tb)) continue;
        check_shape(s);
        if (epilogue == CUBLASLT_EPILOGUE_BGRADA || epilogue == CUBLASLT_EPILOGUE_BGRADB) continue;
        s.alpha = 0.75f;
        if (!s.dgelu()) s.beta = -0.5f;
        if (!s.gradient()) s.batch = 2;
        check_shape(s);
    }
}

void check_orders(cudaDataType_t in, cudaDataType_t out) {
    for (int form = 0; form < 32; form++) {
        Shape s;
        s.in = in;
        s.out = out;
        s.ta = (form & 1) != 0;
        s.tb = (form & 2) != 0;
        s.row_a = (form & 4) != 0;
        s.row_b = (form & 8) != 0;
        s.row_d = (form & 16) != 0;
        s.beta = 0.25f;
        check_shape(s);
    }
}

void test_epilogues() {
    for (const NamedEpilogue &e : epilogues)
        for (const cudaDataType_t *types : type_pairs) {
            const std::string name =
                std::string("cublasLt ") + e.name + " " + name_of(types[0]) + " to " + name_of(types[1]);
            run_case(name, [&] { check_epilogue(e.value, types[0], types[1]); });
        }
    for (const cudaDataType_t *types : type_pairs)
        run_case(std::string("cublasLt all orders and transpositions, ") + name_of(types[0]) + " to " +
                     name_of(types[1]),
                 [&] { check_orders(types[0], types[1]); });
    run_case("cublasLt FAST_TF32", [] {
        Shape s;
        s.compute = CUBLAS_COMPUTE_32F_FAST_TF32;
        check_shape(s);
    });
    run_case("cublasLt odd sizes find an algorithm", [] {
        Shape s;
        s.m = s.n = s.k = 1;
        s.pad = 0;
        check_shape(s);
        s.m = 5;
        s.n = 3;
        s.k = 7;
        s.in = s.out = CUDA_R_16BF;
        check_shape(s);
    });
}

// ---- cuBLASLt: algorithms, workspace, memory ------------------------------------------------------------------------

std::vector<unsigned char> bits_of(Gemm &g, const cublasLtMatmulAlgo_t &algo) {
    CHECK(g.run(&algo) == CUBLAS_STATUS_SUCCESS);
    g.d.download();
    return g.d.host;
}

void test_algorithms() {
    run_case("cublasLt an algorithm gives the same bits again, another one other bits", [] {
        Shape s;
        s.k = 160;
        Gemm g(s);
        std::vector<cublasLtMatmulHeuristicResult_t> results;
        CHECK(g.heuristic(&results) == CUBLAS_STATUS_SUCCESS && results.size() == 8);
        std::set<std::vector<unsigned char>> different;
        for (const cublasLtMatmulHeuristicResult_t &result : results) {
            cublasLtMatmulAlgo_t copy;
            memcpy(&copy, &result.algo, sizeof copy);
            const std::vector<unsigned char> bits = bits_of(g, result.algo);
            CHECK(bits == bits_of(g, copy));
            different.insert(bits);
        }
        CHECK(different.size() == 5); // three of the algorithms have two tiles that round alike
    });
    run_case("cublasLt the heuristic's first choice depends on the shape", [] {
        std::set<int32_t> first;
        for (size_t m = 8; m <= 128; m += 8) {
            Shape s;
            s.m = m;
            Gemm g(s);
            std::vector<cublasLtMatmulHeuristicResult_t> results;
            CHECK(g.heuristic(&results) == CUBLAS_STATUS_SUCCESS);
            int32_t id = -1;
            CHECK(cublasLtMatmulAlgoConfigGetAttribute(&results[0].algo, CUBLASLT_ALGO_CONFIG_ID, &id, 4, nullptr) ==
                  0);
            first.insert(id);
        }
        CHECK(first.size() >= 3);
    });
    run_case("cublasLt AlgoCheck, AlgoInit, AlgoGetIds agree with the heuristic", [] {
        Gemm g((Shape()));
        int ids[8], count = 0;
        const cudaDataType_t f = CUDA_R_32F;
        CHECK(cublasLtMatmulAlgoGetIds(g.handle, CUBLAS_COMPUTE_32F, f, f, f, f, f, 8, ids, &count) ==
              CUBLAS_STATUS_SUCCESS);
        CHECK(count == 4);
        for (int i = 0; i < count; i++) {
            cublasLtMatmulAlgo_t algo;
            cublasLtMatmulHeuristicResult_t result = {};
            CHECK(cublasLtMatmulAlgoInit(g.handle, CUBLAS_COMPUTE_32F, f, f, f, f, f, ids[i], &algo) ==
                  CUBLAS_STATUS_SUCCESS);
            CHECK(cublasLtMatmulAlgoCheck(g.handle, g.desc, g.la, g.lb, g.lc, g.ld, &algo, &result) ==
                  CUBLAS_STATUS_SUCCESS);
            g.workspace_bytes = result.workspaceSize;
            CHECK(g.run(&algo) == CUBLAS_STATUS_SUCCESS);
        }
        CHECK(g.run(nullptr) == CUBLAS_STATUS_SUCCESS);
    });
}

void test_memory() {
    run_case("cublasLt the preference limits workspace and alignment", [] {
        Gemm g((Shape()));
        std::vector<cublasLtMatmulHeuristicResult_t> results;
        g.prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(0));
        CHECK(g.heuristic(&results) == CUBLAS_STATUS_SUCCESS && results.size() == 4);
        for (const cublasLtMatmulHeuristicResult_t &result : results) CHECK(result.workspaceSize == 0);
        g.prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(4));
        CHECK(g.heuristic(&results) == CUBLAS_STATUS_SUCCESS && results.size() == 2);
        g.prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(2));
        CHECK(g.heuristic(&results) == CUBLAS_STATUS_NOT_SUPPORTED && results.empty());
    });
    run_case("cublasLt the workspace is overwritten with NaN", [] {
        Gemm g((Shape()));
        CHECK(g.run_first() == CUBLAS_STATUS_SUCCESS);
        std::vector<unsigned char> bytes(g.workspace_bytes);
        CHECK(cudaMemcpy(bytes.data(), g.workspace, bytes.size(), cudaMemcpyDeviceToHost) == cudaSuccess);
        bool all = true;
        for (unsigned char byte : bytes) all = all && byte == 0xff;
        CHECK(all);
    });
    run_case("cublasLt D may be C, and C is not read when beta is 0", [] {
        Shape s;
        s.beta = 2.0f;
        Gemm g(s);
        g.pc = g.d.device;
        cublasLtMatrixLayoutDestroy(g.lc);
        g.lc = g.d.layout();
        std::vector<double> old;
        for (size_t j = 0; j < s.n; j++)
            for (size_t i = 0; i < s.m; i++) old.push_back(g.d.value(0, i, j));
        CHECK(g.run_first() == CUBLAS_STATUS_SUCCESS);
        g.d.download();
        for (size_t j = 0; j < s.n; j++)
            for (size_t i = 0; i < s.m; i++) {
                double sum = 2 * old[j * s.m + i];
                for (size_t q = 0; q < s.k; q++) sum += g.op_a(0, i, q) * g.op_b(0, q, j);
                CHECK(near(g.d.value(0, i, j), sum, 1e-5));
            }
        g.s.beta = 0.0f;
        g.pc = nullptr;
        CHECK(g.run_first() == CUBLAS_STATUS_SUCCESS);
    });
    run_reporting_case("cublasLt a matrix that ends behind its allocation is reported", [] {
        Gemm g((Shape()));
        g.pa = g.a.device + 64;
        CHECK(g.run_first() == CUBLAS_STATUS_SUCCESS);
    });
    run_reporting_case("cublasLt host memory is reported", [] {
        Gemm g((Shape()));
        alignas(256) static unsigned char host[1 << 16];
        g.pa = host;
        CHECK(g.run_first() == CUBLAS_STATUS_SUCCESS);
    });
    run_reporting_case("cublasLt D over A is refused and reported", [] {
        Gemm g((Shape()));
        g.pd = g.a.device;
        CHECK(g.run_first() == CUBLAS_STATUS_INVALID_VALUE);
    });
    run_reporting_case("cublasLt attributes that are not modelled are refused and reported", [] {
        Gemm g((Shape()));
        const void *scale = g.workspace;
        CHECK(cublasLtMatmulDescSetAttribute(g.desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &scale, sizeof scale) ==
              CUBLAS_STATUS_NOT_SUPPORTED);
    });
}

// ---- cuBLASLt: refusals ---------------------------------------------------------------------------------------------

void refused(const char *what, cublasStatus_t expected, const Shape &shape, const std::function<void(Gemm &)> &spoil) {
    run_case(std::string("cublasLt refuses ") + what, [&] {
        Gemm g(shape);
        std::vector<cublasLtMatmulHeuristicResult_t> results;
        spoil(g);
        CHECK(g.run_first() == expected);
        g.d.download();
        CHECK(g.d.gaps_untouched());
    });
}

// The heuristic finds an algorithm, but the call is refused.
void refused_later(const char *what, cublasStatus_t expected, const Shape &shape,
                   const std::function<void(Gemm &)> &spoil) {
    run_case(std::string("cublasLt refuses ") + what, [&] {
        Gemm g(shape);
        std::vector<cublasLtMatmulHeuristicResult_t> results;
        CHECK(g.heuristic(&results) == CUBLAS_STATUS_SUCCESS);
        cublasLtMatmulHeuristicResult_t widest = results[0];
        for (const cublasLtMatmulHeuristicResult_t &result : results)
            if (result.workspaceSize > widest.workspaceSize) widest = result;
        spoil(g);
        CHECK(g.run(&widest.algo) == expected);
    });
}

Shape with(uint32_t epilogue) {
    Shape s;
    s.epilogue = epilogue;
    s.tb = epilogue == CUBLASLT_EPILOGUE_BGRADB;
    return s;
}

Shape types(cudaDataType_t in, cudaDataType_t out) {
    Shape s;
    s.in = in;
    s.out = out;
    return s;
}

void test_refusals_of_problems() {
    const cublasStatus_t bad = CUBLAS_STATUS_INVALID_VALUE, no = CUBLAS_STATUS_NOT_SUPPORTED;
    const auto nothing = [](Gemm &) {};
    refused("a short ld of A", bad, Shape(),
            [](Gemm &g) { g.set_layout(g.la, CUBLASLT_MATRIX_LAYOUT_LD, int64_t(15)); });
    refused("a short ld of B", bad, Shape(),
            [](Gemm &g) { g.set_layout(g.lb, CUBLASLT_MATRIX_LAYOUT_LD, int64_t(39)); });
    refused("a short ld of C", bad, Shape(),
            [](Gemm &g) { g.set_layout(g.lc, CUBLASLT_MATRIX_LAYOUT_LD, int64_t(0)); });
    refused("a short ld of D", bad, Shape(),
            [](Gemm &g) { g.set_layout(g.ld, CUBLASLT_MATRIX_LAYOUT_LD, int64_t(-16)); });
    refused("an empty matrix", bad, Shape(),
            [](Gemm &g) { g.set_layout(g.la, CUBLASLT_MATRIX_LAYOUT_COLS, uint64_t(0)); });
    refused("inner sizes that differ", bad, Shape(),
            [](Gemm &g) { g.set_layout(g.la, CUBLASLT_MATRIX_LAYOUT_COLS, uint64_t(39)); });
    refused("a C of another shape", bad, Shape(),
            [](Gemm &g) { g.set_layout(g.lc, CUBLASLT_MATRIX_LAYOUT_COLS, uint64_t(23)); });
    refused("batch counts that differ", bad, Shape(),
            [](Gemm &g) { g.set_layout(g.la, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, int32_t(2)); });
    Shape batch;
    batch.batch = 2;
    refused("a batch that overlaps in D", bad, batch,
            [](Gemm &g) { g.set_layout(g.ld, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, int64_t(8)); });
    refused("an unknown order", no, Shape(),
            [](Gemm &g) { g.set_layout(g.la, CUBLASLT_MATRIX_LAYOUT_ORDER, int32_t(CUBLASLT_ORDER_COL32)); });
    refused("f32 to bf16", no, types(CUDA_R_32F, CUDA_R_16BF), nothing);
    refused("f16 to bf16", no, types(CUDA_R_16F, CUDA_R_16BF), nothing);
    refused("f64", no, Shape(), [](Gemm &g) { g.set_layout(g.la, CUBLASLT_MATRIX_LAYOUT_TYPE, CUDA_R_64F); });
    refused("A and B of different types", no, types(CUDA_R_16F, CUDA_R_32F),
            [](Gemm &g) { g.set_layout(g.lb, CUBLASLT_MATRIX_LAYOUT_TYPE, CUDA_R_16BF); });
    refused("C and D of different types", no, types(CUDA_R_16F, CUDA_R_32F),
            [](Gemm &g) { g.set_layout(g.lc, CUBLASLT_MATRIX_LAYOUT_TYPE, CUDA_R_16F); });
    refused("a compute type of f16", no, types(CUDA_R_16F, CUDA_R_16F),
            [](Gemm &g) { g.set(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, int32_t(CUBLAS_COMPUTE_16F)); });
    refused("TF32 of bf16", no, types(CUDA_R_16BF, CUDA_R_32F),
            [](Gemm &g) { g.set(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, int32_t(CUBLAS_COMPUTE_32F_FAST_TF32)); });
    refused("a scale type of f64", no, Shape(),
            [](Gemm &g) { g.set(CUBLASLT_MATMUL_DESC_SCALE_TYPE, int32_t(CUDA_R_64F)); });
    refused("alpha and beta on the device", no, Shape(),
            [](Gemm &g) { g.set(CUBLASLT_MATMUL_DESC_POINTER_MODE, int32_t(CUBLASLT_POINTER_MODE_DEVICE)); });
    refused("a transposed C", no, Shape(), [](Gemm &g) { g.set(CUBLASLT_MATMUL_DESC_TRANSC, int32_t(CUBLAS_OP_T)); });
}

void test_refusals_of_epilogues() {
    const cublasStatus_t bad = CUBLAS_STATUS_INVALID_VALUE, no = CUBLAS_STATUS_NOT_SUPPORTED;
    const auto nothing = [](Gemm &) {};
    for (const NamedEpilogue &e : epilogues) {
        if (e.value == CUBLASLT_EPILOGUE_DEFAULT) continue;
        Shape row = with(e.value);
        row.row_d = true;
        refused((std::string(e.name) + " on a row-major D").c_str(), no, row, nothing);
    }
    refused("an epilogue that is not modelled", no, with(CUBLASLT_EPILOGUE_RELU_AUX), nothing);
    const Shape aux = with(CUBLASLT_EPILOGUE_GELU_AUX);
    refused("an auxiliary ld not a multiple of 8", no, aux,
            [](Gemm &g) { g.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t(20)); });
    refused("a short auxiliary ld", bad, aux, [](Gemm &g) { g.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t(8)); });
    refused("a misaligned auxiliary pointer", no, aux,
            [](Gemm &g) { g.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, g.aux.device + 4); });
    refused("a null auxiliary pointer", bad, aux,
            [](Gemm &g) { g.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<void *>(nullptr)); });
    refused("an auxiliary type other than D's", no, aux,
            [](Gemm &g) { g.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, int32_t(CUDA_R_16BF)); });
    const Shape bias = with(CUBLASLT_EPILOGUE_BIAS);
    refused("a null bias", bad, bias,
            [](Gemm &g) { g.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<void *>(nullptr)); });
    refused("a bias type other than D's", no, bias,
            [](Gemm &g) { g.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t(CUDA_R_16F)); });
    refused("a bias off its element size", bad, bias,
            [](Gemm &g) { g.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias.device + 2); });
    Shape gradient_a = with(CUBLASLT_EPILOGUE_BGRADA), gradient_b = with(CUBLASLT_EPILOGUE_BGRADB);
    gradient_a.ta = true;
    gradient_b.tb = false;
    refused("BGRADA with a transposed A", no, gradient_a, nothing);
    refused("BGRADB without a transposed B", no, gradient_b, nothing);
    gradient_b.tb = true;
    gradient_b.alpha = 2.0f;
    refused("BGRADB with alpha not 1", no, gradient_b, nothing);
    Shape dgelu = with(CUBLASLT_EPILOGUE_DGELU);
    dgelu.beta = 1.0f;
    refused("DGELU with beta not 0", no, dgelu, nothing);
    dgelu = with(CUBLASLT_EPILOGUE_DGELU_BGRAD);
    dgelu.batch = 2;
    refused("a bias gradient of a batch", no, dgelu, nothing);
}

void test_refusals_of_calls() {
    const cublasStatus_t bad = CUBLAS_STATUS_INVALID_VALUE, no = CUBLAS_STATUS_NOT_SUPPORTED;
    refused_later("a null A", bad, Shape(), [](Gemm &g) { g.pa = nullptr; });
    refused_later("a null B", bad, Shape(), [](Gemm &g) { g.pb = nullptr; });
    refused_later("a null D", bad, Shape(), [](Gemm &g) { g.pd = nullptr; });
    refused_later("a null alpha", bad, Shape(), [](Gemm &g) { g.alpha = nullptr; });
    refused_later("a null C with beta not 0", bad, Shape(), [](Gemm &g) {
        g.s.beta = 1.0f;
        g.pc = nullptr;
    });
    refused_later("a workspace that is too small", bad, Shape(), [](Gemm &g) { g.workspace_bytes = 256; });
    refused_later("a null workspace", bad, Shape(), [](Gemm &g) { g.workspace = nullptr; });
    refused_later("a misaligned workspace", bad, Shape(), [](Gemm &g) {
        g.workspace = g.memory + 16;
        g.workspace_bytes -= 16;
    });
    refused_later("a misaligned A", no, Shape(), [](Gemm &g) { g.pa = g.a.device + 4; });
    refused_later("an algorithm for other types", bad, Shape(),
                  [](Gemm &g) { g.set(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, int32_t(CUBLAS_COMPUTE_32F_PEDANTIC)); });
    refused_later("an ld that the algorithm cannot use", no, Shape(),
                  [](Gemm &g) { g.set_layout(g.la, CUBLASLT_MATRIX_LAYOUT_LD, int64_t(17)); });
    run_case("cublasLt refuses null handles, descriptors, counts and a zeroed algorithm", [=] {
        Gemm g((Shape()));
        cublasLtMatmulHeuristicResult_t result;
        cublasLtMatmulAlgo_t zero = {};
        int count = 7;
        CHECK(cublasLtCreate(nullptr) == bad && cublasLtDestroy(nullptr) == bad);
        const auto ask = [&](cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, int requested) {
            return cublasLtMatmulAlgoGetHeuristic(handle, desc, g.la, g.lb, g.lc, g.ld, g.preference, requested,
                                                  &result, &count);
        };
        CHECK(ask(nullptr, g.desc, 1) == CUBLAS_STATUS_NOT_INITIALIZED && count == 0);
        CHECK(ask(g.handle, g.desc, 0) == bad && ask(g.handle, nullptr, 1) == bad);
        CHECK(g.run(&zero) == bad);
        CHECK(cublasLtMatrixLayoutCreate(nullptr, CUDA_R_32F, 1, 1, 1) == bad);
        CHECK(cublasLtMatrixLayoutDestroy(nullptr) == CUBLAS_STATUS_SUCCESS);
    });
    run_case("cublasLt refuses attributes of the wrong size, null or unknown", [=] {
        Gemm g((Shape()));
        const int64_t wide = 0;
        size_t written = 0;
        CHECK(cublasLtMatmulDescSetAttribute(g.desc, CUBLASLT_MATMUL_DESC_TRANSA, &wide, 8) == bad);
        CHECK(cublasLtMatmulDescSetAttribute(g.desc, CUBLASLT_MATMUL_DESC_TRANSA, nullptr, 4) == bad);
        CHECK(cublasLtMatmulDescSetAttribute(g.desc, static_cast<cublasLtMatmulDescAttributes_t>(99), &wide, 4) == bad);
        CHECK(cublasLtMatmulDescSetAttribute(g.desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &wide, 1) ==
              CUBLAS_STATUS_SUCCESS);
        CHECK(cublasLtMatmulDescGetAttribute(g.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, nullptr, 0, &written) == 0 &&
              written == 4);
        CHECK(cublasLtMatmulDescGetAttribute(g.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, nullptr, 0, nullptr) == bad);
    });
    run_case("cublasLt version and status names", [] {
        CHECK(cublasLtGetVersion() == CUBLAS_VERSION && cublasLtGetCudartVersion() == CUDART_VERSION);
        CHECK(!strcmp(cublasLtGetStatusName(CUBLAS_STATUS_NOT_SUPPORTED), "CUBLAS_STATUS_NOT_SUPPORTED"));
        CHECK(!strcmp(cublasGetStatusString(CUBLAS_STATUS_SUCCESS), "success"));
    });
}

// ---- NCCL: ranks ----------------------------------------------------------------------------------------------------

bool enough_devices(int ranks) {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess && count >= ranks) return true;
    skip_reason = "too few devices";
    return false;
}

struct Rank {
    int rank, size;
    ncclComm_t comm;
    cudaStream_t stream;
    ncclUniqueId id;
    bool destroy = true;
};

// Runs body on threads, each with its own device, stream and blocking communicator.
void on_ranks(int size, const std::function<void(Rank &)> &body, bool with_comm = true) {
    if (!enough_devices(size)) return;
    ncclUniqueId id;
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; rank++)
        threads.emplace_back([&, rank] {
            Rank r = {rank, size, nullptr, nullptr, id};
            CHECK(cudaSetDevice(rank) == cudaSuccess);
            CHECK(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking) == cudaSuccess);
            if (with_comm) CHECK(ncclCommInitRank(&r.comm, size, id, rank) == ncclSuccess);
            body(r);
            if (with_comm && r.destroy) CHECK(ncclCommDestroy(r.comm) == ncclSuccess);
            CHECK(cudaStreamDestroy(r.stream) == cudaSuccess);
        });
    for (std::thread &thread : threads) thread.join();
}

// Device memory of one rank.
template <class T> struct Buffer {
    T *p = nullptr;
    size_t count;

    explicit Buffer(size_t count_) : count(count_) {
        CHECK(cudaMalloc(reinterpret_cast<void **>(&p), count * sizeof(T)) == cudaSuccess);
    }
    explicit Buffer(const std::vector<T> &values) : Buffer(values.size()) { write(values); }
    ~Buffer() { cudaFree(p); }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;

    void write(const std::vector<T> &v) {
        CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
    }
    std::vector<T> read(cudaStream_t stream) const {
        std::vector<T> v(count);
        CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
        CHECK(cudaMemcpy(v.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
        return v;
    }
};

template <class T> T from(double x) { return static_cast<T>(x); }
template <> __half from<__half>(double x) { return __float2half(static_cast<float>(x)); }
template <> __nv_bfloat16 from<__nv_bfloat16>(double x) { return __float2bfloat16(static_cast<float>(x)); }

template <class T> bool same_bits(const std::vector<T> &x, const std::vector<T> &y) {
    return x.size() == y.size() && memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0;
}

// Small whole numbers, so that every type holds every result exactly.
double input(int rank, size_t i) { return 1 + static_cast<double>((static_cast<size_t>(rank) * 5 + i * 3) % 2); }

double reduced(int size, size_t i, ncclRedOp_t op, bool integer) {
    double sum = 0, product = 1, low = 1e9, high = -1e9;
    for (int rank = 0; rank < size; rank++) {
        const double x = input(rank, i);
        sum += x;
        product *= x;
        low = fmin(low, x);
        high = fmax(high, x);
    }
    if (op == ncclProd) return product;
    if (op == ncclMin) return low;
    if (op == ncclMax) return high;
    if (op == ncclAvg) return integer ? floor(sum / size) : sum / size;
    return sum;
}

// An unsigned 8-bit product of eight numbers wraps around.
template <class T> T expected_number(double x) { return sizeof(T) == 1 ? from<T>(fmod(x, 256)) : from<T>(x); }

template <class T> std::vector<T> inputs(int rank, size_t count) {
    std::vector<T> v;
    for (size_t i = 0; i < count; i++) v.push_back(from<T>(input(rank, i)));
    return v;
}

template <class T> std::vector<T> all_reduced(int size, size_t count, ncclRedOp_t op, bool integer) {
    std::vector<T> v;
    for (size_t i = 0; i < count; i++) v.push_back(expected_number<T>(reduced(size, i, op, integer)));
    return v;
}

template <class T> void check_reductions(const Rank &r, ncclDataType_t type, size_t count, ncclRedOp_t op) {
    const bool integer = std::is_integral<T>::value;
    const size_t size = static_cast<size_t>(r.size), mine = static_cast<size_t>(r.rank), total = count * size;
    const std::vector<T> all = all_reduced<T>(r.size, count, op, integer);
    const std::vector<T> every_block = all_reduced<T>(r.size, total, op, integer);
    Buffer<T> in(inputs<T>(r.rank, total)), out(count), place(inputs<T>(r.rank, count)), wide(inputs<T>(r.rank, total));
    CHECK(ncclAllReduce(in.p, out.p, count, type, op, r.comm, r.stream) == ncclSuccess);
    CHECK(same_bits(out.read(r.stream), all));
    CHECK(ncclAllReduce(place.p, place.p, count, type, op, r.comm, r.stream) == ncclSuccess);
    CHECK(same_bits(place.read(r.stream), all));
    const std::vector<T> block(&every_block[mine * count], &every_block[mine * count] + count);
    CHECK(ncclReduceScatter(in.p, out.p, count, type, op, r.comm, r.stream) == ncclSuccess);
    CHECK(same_bits(out.read(r.stream), block));
    CHECK(ncclReduceScatter(wide.p, wide.p + mine * count, count, type, op, r.comm, r.stream) == ncclSuccess);
    const std::vector<T> scattered = wide.read(r.stream);
    CHECK(memcmp(&scattered[mine * count], block.data(), count * sizeof(T)) == 0);
    const int root = r.size - 1;
    out.write(inputs<T>(0, count));
    CHECK(ncclReduce(in.p, r.rank == root ? out.p : nullptr, count, type, op, root, r.comm, r.stream) == ncclSuccess);
    CHECK(same_bits(out.read(r.stream), r.rank == root ? all : inputs<T>(0, count)));
}

template <class T> void check_movements(const Rank &r, ncclDataType_t type, size_t count) {
    const size_t size = static_cast<size_t>(r.size), mine = static_cast<size_t>(r.rank);
    Buffer<T> in(inputs<T>(r.rank, count)), gathered(count * size), out(count);
    std::vector<T> expected;
    for (int rank = 0; rank < r.size; rank++)
        for (const T &x : inputs<T>(rank, count)) expected.push_back(x);
    CHECK(ncclAllGather(in.p, gathered.p, count, type, r.comm, r.stream) == ncclSuccess);
    CHECK(same_bits(gathered.read(r.stream), expected));
    std::vector<T> place(count * size);
    const std::vector<T> own = inputs<T>(r.rank, count);
    memcpy(&place[mine * count], own.data(), count * sizeof(T));
    gathered.write(place);
    CHECK(ncclAllGather(gathered.p + mine * count, gathered.p, count, type, r.comm, r.stream) == ncclSuccess);
    CHECK(same_bits(gathered.read(r.stream), expected));
    const int root = r.size / 2;
    CHECK(ncclBroadcast(r.rank == root ? in.p : nullptr, out.p, count, type, root, r.comm, r.stream) == ncclSuccess);
    CHECK(same_bits(out.read(r.stream), inputs<T>(root, count)));
    CHECK(ncclBroadcast(in.p, in.p, count, type, root, r.comm, r.stream) == ncclSuccess);
    CHECK(same_bits(in.read(r.stream), inputs<T>(root, count)));
}

template <class T> void test_type(const char *name, ncclDataType_t type) {
    for (int size : {1, 2, 4, 8}) {
        run_case("nccl collectives of " + std::string(name) + " on " + std::to_string(size) + " ranks", [&] {
            on_ranks(size, [&](Rank &r) {
                for (size_t count : {size_t(1), size_t(37)}) {
                    for (ncclRedOp_t op : {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg})
                        check_reductions<T>(r, type, count, op);
                    check_movements<T>(r, type, count);
                }
            });
        });
    }
}

void test_collectives() {
    test_type<float>("f32", ncclFloat32);
    test_type<__nv_bfloat16>("bf16", ncclBfloat16);
    test_type<__half>("f16", ncclFloat16);
    test_type<int32_t>("i32", ncclInt32);
    test_type<uint8_t>("u8", ncclUint8);
    test_type<int64_t>("i64", ncclInt64);
    test_type<double>("f64", ncclFloat64);
}

// ---- NCCL: orders, groups, pairs ------------------------------------------------------------------------------------

// A sum has the same bits on all ranks and in every run, but not the bits of a sum in the order of the ranks.
void check_sum_order() {
    const int size = 4;
    const size_t count = 256;
    static std::vector<float> data[size], results[2][size];
    for (std::vector<float> &v : data) {
        v.clear();
        for (size_t i = 0; i < count; i++) v.push_back(static_cast<float>(random_value()));
    }
    on_ranks(size, [&](Rank &r) {
        for (std::vector<float>(&round)[size] : results) {
            Buffer<float> buffer(data[r.rank]);
            CHECK(ncclAllReduce(buffer.p, buffer.p, count, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
            round[r.rank] = buffer.read(r.stream);
        }
    });
    if (skip_reason) return;
    size_t unlike = 0;
    for (size_t i = 0; i < count; i++) {
        const float in_order = ((data[0][i] + data[1][i]) + data[2][i]) + data[3][i];
        CHECK(fabsf(results[0][0][i] - in_order) < 1e-5f);
        if (results[0][0][i] != in_order) unlike++;
    }
    CHECK(unlike > count / 16);
    for (int rank = 0; rank < size; rank++)
        CHECK(same_bits(results[0][rank], results[0][0]) && same_bits(results[1][rank], results[0][0]));
}

void check_ring(const Rank &r) {
    const size_t count = 33;
    const int next = (r.rank + 1) % r.size, previous = (r.rank + r.size - 1) % r.size;
    Buffer<float> out(inputs<float>(r.rank, count)), in(count);
    CHECK(ncclGroupStart() == ncclSuccess);
    CHECK(ncclSend(out.p, count, ncclFloat, next, r.comm, r.stream) == ncclSuccess);
    CHECK(ncclRecv(in.p, count, ncclFloat, previous, r.comm, r.stream) == ncclSuccess);
    CHECK(ncclGroupEnd() == ncclSuccess);
    CHECK(same_bits(in.read(r.stream), inputs<float>(previous, count)));
}

// Rank 1 receives and sends in one group. Its receive must not wait for its send.
void check_chain(const Rank &r) {
    const size_t count = 5;
    Buffer<float> one(inputs<float>(r.rank, count)), two(inputs<float>(r.rank, count));
    if (r.rank == 0) {
        CHECK(ncclSend(one.p, count, ncclFloat, 1, r.comm, r.stream) == ncclSuccess);
        CHECK(ncclSend(one.p, count, ncclFloat, 2, r.comm, r.stream) == ncclSuccess);
    } else if (r.rank == 1) {
        CHECK(ncclGroupStart() == ncclSuccess);
        CHECK(ncclRecv(one.p, count, ncclFloat, 0, r.comm, r.stream) == ncclSuccess);
        CHECK(ncclSend(two.p, count, ncclFloat, 2, r.comm, r.stream) == ncclSuccess);
        CHECK(ncclGroupEnd() == ncclSuccess);
        CHECK(same_bits(one.read(r.stream), inputs<float>(0, count)));
    } else {
        CHECK(ncclRecv(one.p, count, ncclFloat, 0, r.comm, r.stream) == ncclSuccess);
        CHECK(ncclRecv(two.p, count, ncclFloat, 1, r.comm, r.stream) == ncclSuccess);
        CHECK(same_bits(one.read(r.stream), inputs<float>(0, count)));
        CHECK(same_bits(two.read(r.stream), inputs<float>(1, count)));
    }
}

// Several messages between two ranks match in order. A message to the own rank needs its receive in the same group.
void check_messages(const Rank &r) {
    const size_t count = 3;
    Buffer<float> out(inputs<float>(r.rank, 4 * count)), in(4 * count);
    CHECK(ncclSend(out.p, count, ncclFloat, r.rank, r.comm, r.stream) == ncclInvalidUsage);
    CHECK(ncclGroupStart() == ncclSuccess);
    for (size_t i = 0; i < 3; i++) {
        CHECK(ncclSend(out.p + i * count, count, ncclFloat, 1 - r.rank, r.comm, r.stream) == ncclSuccess);
        CHECK(ncclRecv(in.p + i * count, count, ncclFloat, 1 - r.rank, r.comm, r.stream) == ncclSuccess);
    }
    CHECK(ncclSend(out.p + 3 * count, count, ncclFloat, r.rank, r.comm, r.stream) == ncclSuccess);
    CHECK(ncclRecv(in.p + 3 * count, count, ncclFloat, r.rank, r.comm, r.stream) == ncclSuccess);
    CHECK(ncclGroupEnd() == ncclSuccess);
    std::vector<float> expected = inputs<float>(1 - r.rank, 4 * count);
    const std::vector<float> own = inputs<float>(r.rank, 4 * count);
    for (size_t i = 3 * count; i < 4 * count; i++) expected[i] = own[i];
    CHECK(same_bits(in.read(r.stream), expected));
}

// One thread drives all ranks, with nested groups.
void check_one_thread(int size) {
    if (!enough_devices(size)) return;
    const size_t count = 19;
    std::vector<ncclComm_t> comms(static_cast<size_t>(size));
    std::vector<cudaStream_t> streams(static_cast<size_t>(size));
    std::vector<std::unique_ptr<Buffer<float>>> buffers;
    CHECK(ncclCommInitAll(comms.data(), size, nullptr) == ncclSuccess);
    for (int rank = 0; rank < size; rank++) {
        const size_t i = static_cast<size_t>(rank);
        int count_of = 0, rank_of = -1, device_of = -1;
        CHECK(cudaSetDevice(rank) == cudaSuccess && cudaStreamCreate(&streams[i]) == cudaSuccess);
        buffers.emplace_back(new Buffer<float>(inputs<float>(rank, count)));
        CHECK(ncclCommCount(comms[i], &count_of) == ncclSuccess && count_of == size);
        CHECK(ncclCommUserRank(comms[i], &rank_of) == ncclSuccess && rank_of == rank);
        CHECK(ncclCommCuDevice(comms[i], &device_of) == ncclSuccess && device_of == rank);
    }
    CHECK(ncclGroupStart() == ncclSuccess && ncclGroupStart() == ncclSuccess);
    for (size_t i = 0; i < comms.size(); i++)
        CHECK(ncclAllReduce(buffers[i]->p, buffers[i]->p, count, ncclFloat, ncclSum, comms[i], streams[i]) ==
              ncclSuccess);
    CHECK(ncclGroupEnd() == ncclSuccess && ncclGroupEnd() == ncclSuccess);
    for (size_t i = 0; i < comms.size(); i++)
        CHECK(same_bits(buffers[i]->read(streams[i]), all_reduced<float>(size, count, ncclSum, false)));
    for (size_t i = 0; i < comms.size(); i++) {
        CHECK(ncclCommFinalize(comms[i]) == ncclSuccess && ncclCommDestroy(comms[i]) == ncclSuccess);
        CHECK(cudaStreamDestroy(streams[i]) == cudaSuccess);
    }
    CHECK(cudaSetDevice(0) == cudaSuccess);
}

// A 2 x 2 grid: its row and column communicators are used in one group and on two streams.
void check_split(const Rank &r) {
    ncclComm_t row = nullptr, column = nullptr, nobody = r.comm;
    cudaStream_t other;
    int size = 0, rank = -1;
    CHECK(ncclCommSplit(r.comm, r.rank / 2, r.rank, &row, nullptr) == ncclSuccess);
    CHECK(ncclCommSplit(r.comm, r.rank % 2, -r.rank, &column, nullptr) == ncclSuccess);
    CHECK(ncclCommSplit(r.comm, r.rank == 3 ? NCCL_SPLIT_NOCOLOR : 0, 0, &nobody, nullptr) == ncclSuccess);
    CHECK((nobody == nullptr) == (r.rank == 3));
    CHECK(ncclCommCount(row, &size) == ncclSuccess && size == 2);
    CHECK(ncclCommUserRank(row, &rank) == ncclSuccess && rank == r.rank % 2);
    CHECK(ncclCommUserRank(column, &rank) == ncclSuccess && rank == 1 - r.rank / 2);
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess);
    Buffer<float> in(inputs<float>(r.rank, 4)), across(4), down(4);
    CHECK(ncclGroupStart() == ncclSuccess);
    CHECK(ncclAllReduce(in.p, across.p, 4, ncclFloat, ncclSum, row, r.stream) == ncclSuccess);
    CHECK(ncclAllReduce(in.p, down.p, 4, ncclFloat, ncclSum, column, other) == ncclSuccess);
    CHECK(ncclGroupEnd() == ncclSuccess);
    const std::vector<float> x = across.read(r.stream), y = down.read(other);
    for (size_t i = 0; i < 4; i++) {
        CHECK(x[i] == static_cast<float>(input(r.rank, i) + input(r.rank ^ 1, i)));
        CHECK(y[i] == static_cast<float>(input(r.rank, i) + input(r.rank ^ 2, i)));
    }
    CHECK(ncclCommDestroy(row) == ncclSuccess && ncclCommDestroy(column) == ncclSuccess);
    if (nobody) CHECK(ncclCommDestroy(nobody) == ncclSuccess);
    CHECK(cudaStreamDestroy(other) == cudaSuccess);
}

void test_groups() {
    run_case("nccl the order of a sum is not that of the ranks", check_sum_order);
    for (int size : {2, 4, 8})
        run_case("nccl a ring of " + std::to_string(size) + " sends and receives", [&] { on_ranks(size, check_ring); });
    run_case("nccl a receive in a group does not wait for the send beside it", [] { on_ranks(3, check_chain); });
    run_case("nccl messages match in order, and to oneself within a group", [] { on_ranks(2, check_messages); });
    for (int size : {1, 2, 8})
        run_case("nccl one thread, " + std::to_string(size) + " ranks, nested groups", [&] { check_one_thread(size); });
    run_case("nccl split into rows and columns, both in one group", [] { on_ranks(4, check_split); });
}

// ---- NCCL: non-blocking, refusals, faults ---------------------------------------------------------------------------

// Calls ncclCommGetAsyncError until the communicator is no longer busy. Returns its state; *busy is how often it was
// busy.
ncclResult_t settle(ncclComm_t comm, int *busy) {
    ncclResult_t state = ncclInProgress;
    for (*busy = 0; *busy < 100000; ++*busy) {
        CHECK(ncclCommGetAsyncError(comm, &state) == ncclSuccess);
        if (state != ncclInProgress) return state;
        std::this_thread::yield();
    }
    return state;
}

void check_non_blocking(Rank &r) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    int busy = 0;
    config.blocking = 0;
    Buffer<float> buffer(inputs<float>(r.rank, 8));
    CHECK(ncclCommInitRankConfig(&r.comm, r.size, r.id, r.rank, &config) == ncclInProgress);
    CHECK(ncclAllReduce(buffer.p, buffer.p, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclInvalidArgument);
    CHECK(settle(r.comm, &busy) == ncclSuccess && busy > 0);
    CHECK(ncclAllReduce(buffer.p, buffer.p, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclInProgress);
    // The call is not enqueued yet: the stream is idle and the data unchanged.
    CHECK(same_bits(buffer.read(r.stream), inputs<float>(r.rank, 8)));
    CHECK(settle(r.comm, &busy) == ncclSuccess && busy > 0);
    CHECK(same_bits(buffer.read(r.stream), all_reduced<float>(r.size, 8, ncclSum, false)));
    ncclComm_t child = nullptr;
    CHECK(ncclCommSplit(r.comm, 0, r.rank, &child, nullptr) == ncclSuccess);
    CHECK(child == nullptr && settle(r.comm, &busy) == ncclSuccess && child && settle(child, &busy) == ncclSuccess);
    CHECK(ncclCommFinalize(child) == ncclInProgress);
    CHECK(settle(child, &busy) == ncclSuccess && ncclCommDestroy(child) == ncclSuccess);
    CHECK(ncclCommDestroy(r.comm) == ncclSuccess);
}

void check_bad_arguments(Rank &r) {
    Buffer<float> b(8);
    b.write(inputs<float>(r.rank, 8));
    const auto all_reduce = [&](ncclDataType_t type, int op, ncclComm_t comm) {
        return ncclAllReduce(b.p, b.p, 8, type, static_cast<ncclRedOp_t>(op), comm, r.stream);
    };
    CHECK(all_reduce(ncclFloat, ncclSum, nullptr) == ncclInvalidArgument);
    CHECK(all_reduce(static_cast<ncclDataType_t>(77), ncclSum, r.comm) == ncclInvalidArgument);
    CHECK(all_reduce(ncclFloat, 9, r.comm) == ncclInvalidArgument);
    CHECK(ncclBroadcast(b.p, b.p, 8, ncclFloat, r.size, r.comm, r.stream) == ncclInvalidArgument);
    CHECK(ncclSend(b.p, 8, ncclFloat, -1, r.comm, r.stream) == ncclInvalidArgument);
    CHECK(ncclGroupEnd() == ncclInvalidUsage);
    CHECK(strstr(ncclGetLastError(nullptr), "not in a group") != nullptr);
    CHECK(ncclGroupStart() == ncclSuccess);
    CHECK(all_reduce(ncclFloat, ncclSum, r.comm) == ncclSuccess);
    CHECK(all_reduce(ncclFloat, 9, r.comm) == ncclInvalidArgument);
    CHECK(ncclGroupEnd() == ncclInvalidArgument);
    CHECK(same_bits(b.read(r.stream), inputs<float>(r.rank, 8)));
    CHECK(ncclAllReduce(nullptr, nullptr, 0, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
    CHECK(ncclCommCount(r.comm, nullptr) == ncclInvalidArgument);
    ncclComm_t none = nullptr;
    CHECK(ncclCommSplit(r.comm, -7, 0, &none, nullptr) == ncclInvalidArgument);
}

void check_bad_init() {
    ncclUniqueId id;
    ncclComm_t comm = nullptr;
    ncclComm_t pair[2] = {};
    const int twice[2] = {0, 0}, missing[2] = {0, 1000};
    ncclConfig_t zero = {}, config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 7;
    CHECK(ncclGetUniqueId(nullptr) == ncclInvalidArgument && ncclGetUniqueId(&id) == ncclSuccess);
    CHECK(ncclCommInitRank(&comm, 2, id, 2) == ncclInvalidArgument);
    CHECK(ncclCommInitRank(&comm, 0, id, 0) == ncclInvalidArgument);
    CHECK(ncclCommInitRank(nullptr, 1, id, 0) == ncclInvalidArgument);
    CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, &zero) == ncclInvalidArgument);
    CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, &config) == ncclInvalidArgument);
    memset(&id, 0, sizeof id);
    CHECK(ncclCommInitRank(&comm, 1, id, 0) == ncclInvalidArgument);
    CHECK(ncclCommInitAll(pair, 2, twice) == ncclInvalidUsage);
    CHECK(ncclCommInitAll(pair, 2, missing) == ncclInvalidArgument);
    CHECK(ncclCommInitAll(pair, 0, nullptr) == ncclInvalidArgument);
    CHECK(ncclCommDestroy(nullptr) == ncclSuccess && ncclCommAbort(nullptr) == ncclSuccess);
}

void check_shared_device() {
    ncclUniqueId id;
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; rank++)
        threads.emplace_back([id, rank] {
            ncclComm_t comm = nullptr;
            CHECK(cudaSetDevice(0) == cudaSuccess);
            CHECK(ncclCommInitRank(&comm, 2, id, rank) == ncclInvalidUsage && comm == nullptr);
        });
    for (std::thread &thread : threads) thread.join();
}

void check_memory(const Rank &r) {
    void *memory = nullptr, *plain = nullptr, *handle = nullptr;
    ncclWindow_t window = nullptr;
    CHECK(ncclMemAlloc(&memory, 5000) == ncclSuccess && cudaMalloc(&plain, 8192) == cudaSuccess);
    CHECK(ncclCommWindowRegister(r.comm, plain, 4096, &window, NCCL_WIN_COLL_SYMMETRIC) == ncclInvalidArgument);
    CHECK(ncclCommWindowRegister(r.comm, memory, 5001, &window, NCCL_WIN_COLL_SYMMETRIC) == ncclInvalidArgument);
    CHECK(ncclCommWindowRegister(r.comm, memory, 5000, &window, 6) == ncclInvalidArgument);
    CHECK(ncclCommWindowRegister(r.comm, memory, 5000, &window, NCCL_WIN_COLL_SYMMETRIC) == ncclSuccess);
    CHECK(mte::nccl_counts().windows >= 1 && mte::nccl_counts().alive >= 1);
    CHECK(ncclCommWindowDeregister(r.comm, window) == ncclSuccess &&
          ncclCommWindowDeregister(r.comm, nullptr) == ncclSuccess);
    CHECK(ncclCommRegister(r.comm, plain, 8192, &handle) == ncclSuccess);
    CHECK(ncclCommDeregister(r.comm, handle) == ncclSuccess &&
          ncclCommDeregister(r.comm, handle) == ncclInvalidArgument);
    CHECK(ncclCommRegister(r.comm, &handle, 8, &handle) == ncclInvalidArgument);
    CHECK(ncclMemFree(memory) == ncclSuccess && cudaFree(plain) == cudaSuccess);
}

bool stays_blocked(cudaStream_t stream) {
    for (int i = 0; i < 50; i++)
        if (cudaStreamQuery(stream) != cudaErrorNotReady) return false;
    return true;
}

// Threads that wait for each other, step by step.
struct Steps {
    std::atomic<int> step{0};
    void wait(int until) {
        while (step < until) std::this_thread::yield();
    }
};

// The first collective waits on the host until all ranks have called one: later ones do not.
void connect_all(const Rank &r) {
    Buffer<float> buffer(std::vector<float>(8));
    CHECK(ncclAllReduce(buffer.p, buffer.p, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
    CHECK(cudaStreamSynchronize(r.stream) == cudaSuccess);
}

// Ranks 0 and 1 call, rank 2 does not. Each abort frees only its own rank, including its memory.
void check_abort() {
    Steps steps;
    on_ranks(3, [&](Rank &r) {
        Buffer<float> buffer(inputs<float>(r.rank, 8));
        r.destroy = false;
        connect_all(r);
        if (r.rank == 2) {
            steps.wait(2);
            CHECK(ncclAllReduce(buffer.p, buffer.p, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
            CHECK(stays_blocked(r.stream));
            CHECK(ncclCommAbort(r.comm) == ncclSuccess && cudaStreamSynchronize(r.stream) == cudaSuccess);
            return;
        }
        CHECK(ncclAllReduce(buffer.p, buffer.p, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
        CHECK(stays_blocked(r.stream));
        steps.wait(r.rank);
        CHECK(stays_blocked(r.stream));
        CHECK(ncclCommAbort(r.comm) == ncclSuccess);
        CHECK(cudaStreamSynchronize(r.stream) == cudaSuccess);
        void *memory = nullptr;
        CHECK(cudaMalloc(&memory, 64) == cudaSuccess && cudaFree(memory) == cudaSuccess);
        CHECK(cudaDeviceSynchronize() == cudaSuccess);
        steps.step++;
    });
}

void check_abort_of_messages() {
    on_ranks(2, [&](Rank &r) {
        Buffer<float> buffer(inputs<float>(r.rank, 8)), first(std::vector<float>(8));
        r.destroy = false;
        if (r.rank == 0) CHECK(ncclRecv(first.p, 8, ncclFloat, 1, r.comm, r.stream) == ncclSuccess);
        if (r.rank == 1) CHECK(ncclSend(first.p, 8, ncclFloat, 0, r.comm, r.stream) == ncclSuccess);
        CHECK(cudaStreamSynchronize(r.stream) == cudaSuccess);
        if (r.rank == 0) CHECK(ncclRecv(buffer.p, 8, ncclFloat, 1, r.comm, r.stream) == ncclSuccess);
        if (r.rank == 0) CHECK(stays_blocked(r.stream));
        CHECK(ncclCommAbort(r.comm) == ncclSuccess && cudaStreamSynchronize(r.stream) == cudaSuccess);
        CHECK(same_bits(buffer.read(r.stream), inputs<float>(r.rank, 8)));
    });
}

// All ranks call an all-reduce, that of rank 0 behind a receive which never ends. The abort of rank 0 does not end the
// all-reduce of the others.
void check_abort_behind_a_message() {
    Steps calls, steps;
    on_ranks(3, [&](Rank &r) {
        Buffer<float> buffer(inputs<float>(r.rank, 8)), first(std::vector<float>(8));
        r.destroy = false;
        connect_all(r);
        if (r.rank == 0) CHECK(ncclRecv(first.p, 8, ncclFloat, 1, r.comm, r.stream) == ncclSuccess);
        if (r.rank == 1) CHECK(ncclSend(first.p, 8, ncclFloat, 0, r.comm, r.stream) == ncclSuccess);
        CHECK(cudaStreamSynchronize(r.stream) == cudaSuccess);
        if (r.rank == 0) CHECK(ncclRecv(first.p, 8, ncclFloat, 1, r.comm, r.stream) == ncclSuccess);
        CHECK(ncclAllReduce(buffer.p, buffer.p, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
        calls.step++;
        calls.wait(3);
        steps.wait(r.rank);
        CHECK(stays_blocked(r.stream));
        CHECK(ncclCommAbort(r.comm) == ncclSuccess && cudaStreamSynchronize(r.stream) == cudaSuccess);
        CHECK(same_bits(buffer.read(r.stream), inputs<float>(r.rank, 8)));
        steps.step++;
    });
}

// Rank 1 is silent after one call. Rank 1 and its peer wait until they abort.
void check_silence() {
    if (!enough_devices(2)) return;
    mte::nccl_silence(1, 1);
    on_ranks(2, [&](Rank &r) {
        Buffer<float> buffer(inputs<float>(r.rank, 8));
        r.destroy = false;
        CHECK(ncclAllReduce(buffer.p, buffer.p, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
        CHECK(cudaStreamSynchronize(r.stream) == cudaSuccess);
        CHECK(ncclAllReduce(buffer.p, buffer.p, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
        CHECK(stays_blocked(r.stream));
        CHECK(ncclCommAbort(r.comm) == ncclSuccess && cudaStreamSynchronize(r.stream) == cudaSuccess);
    });
    mte::nccl_reset_faults();
}

void check_async_error() {
    if (!enough_devices(2)) return;
    mte::nccl_fail_after(1, 1, ncclRemoteError);
    on_ranks(2, [&](Rank &r) {
        Buffer<float> buffer(inputs<float>(r.rank, 8));
        ncclResult_t state = ncclSuccess;
        r.destroy = false;
        connect_all(r);
        CHECK(ncclAllReduce(buffer.p, buffer.p, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
        CHECK(stays_blocked(r.stream));
        CHECK(ncclCommGetAsyncError(r.comm, &state) == ncclSuccess && state == ncclSuccess);
        CHECK(ncclCommGetAsyncError(r.comm, &state) == ncclSuccess &&
              state == (r.rank == 1 ? ncclRemoteError : ncclSuccess));
        if (r.rank == 0) mte::nccl_fail(r.comm, ncclSystemError);
        const ncclResult_t expected = r.rank == 0 ? ncclSystemError : ncclRemoteError;
        CHECK(ncclAllReduce(buffer.p, buffer.p, 8, ncclFloat, ncclSum, r.comm, r.stream) == expected);
        CHECK(ncclCommAbort(r.comm) == ncclSuccess && cudaStreamSynchronize(r.stream) == cudaSuccess);
    });
    mte::nccl_reset_faults();
}

// A peer never joins. The other rank sees "in progress" until it gives up.
void check_init_abort() {
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm = nullptr;
    ncclResult_t state = ncclSuccess;
    config.blocking = 0;
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    CHECK(ncclCommInitRankConfig(&comm, 2, id, 0, &config) == ncclInProgress);
    for (int i = 0; i < 100; i++) CHECK(ncclCommGetAsyncError(comm, &state) == ncclSuccess && state == ncclInProgress);
    CHECK(ncclCommDestroy(comm) == ncclInvalidArgument);
    CHECK(ncclCommAbort(comm) == ncclSuccess);
}

// Rank 0 makes a call that waits on the host for rank 1, which does not make it, until another thread aborts it.
using Waiting = std::function<ncclResult_t(const Rank &, float *)>;
void check_waiting_call(const Waiting &call) {
    on_ranks(2, [&](Rank &r) {
        void *memory = nullptr;
        r.destroy = r.rank == 1;
        CHECK(ncclMemAlloc(&memory, 4096) == ncclSuccess && cudaMemset(memory, 0, 4096) == cudaSuccess);
        CHECK(cudaDeviceSynchronize() == cudaSuccess);
        if (r.rank == 0) {
            std::atomic<bool> returned{false};
            std::thread watchdog([&] {
                while (!returned && !mte::nccl_waits(r.comm)) std::this_thread::yield();
                CHECK(!returned && ncclCommAbort(r.comm) == ncclSuccess);
            });
            CHECK(call(r, static_cast<float *>(memory)) == ncclInternalError);
            returned = true;
            watchdog.join();
            CHECK(cudaStreamSynchronize(r.stream) == cudaSuccess);
        }
        CHECK(ncclMemFree(memory) == ncclSuccess);
    });
    CHECK(mte::nccl_counts().alive == 0);
}

void test_waiting_calls() {
    const auto waits = [](const char *what, const Waiting &call) {
        run_case(std::string("nccl abort ends ") + what + " that waits for a peer", [&] { check_waiting_call(call); });
    };
    waits("a first collective",
          [](const Rank &r, float *x) { return ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r.comm, r.stream); });
    waits("a first send", [](const Rank &r, float *x) { return ncclSend(x, 8, ncclFloat, 1, r.comm, r.stream); });
    waits("a group of messages", [](const Rank &r, float *x) {
        CHECK(ncclGroupStart() == ncclSuccess);
        CHECK(ncclSend(x, 8, ncclFloat, 1, r.comm, r.stream) == ncclSuccess);
        CHECK(ncclRecv(x + 8, 8, ncclFloat, 1, r.comm, r.stream) == ncclSuccess);
        return ncclGroupEnd();
    });
    waits("a split", [](const Rank &r, float *) {
        ncclComm_t child = r.comm;
        const ncclResult_t result = ncclCommSplit(r.comm, 0, 0, &child, nullptr);
        CHECK(child == nullptr);
        return result;
    });
    waits("a window", [](const Rank &r, float *x) {
        ncclWindow_t window = nullptr;
        return ncclCommWindowRegister(r.comm, x, 4096, &window, NCCL_WIN_COLL_SYMMETRIC);
    });
}

// Only the split is non-blocking, not its child.
void check_blocking_child(Rank &r) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    Buffer<float> buffer(inputs<float>(r.rank, 8));
    ncclComm_t parent = nullptr, child = nullptr;
    int busy = 0;
    config.blocking = 0;
    CHECK(ncclCommInitRankConfig(&parent, r.size, r.id, r.rank, &config) == ncclInProgress);
    CHECK(settle(parent, &busy) == ncclSuccess);
    config.blocking = 1;
    CHECK(ncclCommSplit(parent, 0, r.rank, &child, &config) == ncclSuccess && child == nullptr);
    CHECK(settle(parent, &busy) == ncclSuccess && child != nullptr);
    const int before = mte::nccl_counts().threads;
    CHECK(ncclAllReduce(buffer.p, buffer.p, 8, ncclFloat, ncclSum, child, r.stream) == ncclSuccess);
    CHECK(same_bits(buffer.read(r.stream), all_reduced<float>(r.size, 8, ncclSum, false)));
    CHECK(mte::nccl_counts().threads == before);
    CHECK(ncclCommFinalize(child) == ncclSuccess && ncclCommDestroy(child) == ncclSuccess);
    CHECK(ncclCommAbort(parent) == ncclSuccess);
}

void test_misuse_of_handles() {
    run_reporting_case("nccl reports a communicator that is aborted twice, and one destroyed after its abort", [] {
        on_ranks(1, [](Rank &r) {
            r.destroy = false;
            CHECK(ncclCommAbort(r.comm) == ncclSuccess);
            const int before = mte::errors();
            CHECK(ncclCommAbort(r.comm) == ncclInvalidArgument);
            const int between = mte::errors();
            CHECK(ncclCommDestroy(r.comm) == ncclInvalidArgument);
            CHECK(before < between && between < mte::errors());
        });
    });
    run_reporting_case("nccl reports the abort of a blocking communicator that is being created", [] {
        ncclUniqueId id;
        ncclComm_t comm = nullptr;
        CHECK(ncclGetUniqueId(&id) == ncclSuccess);
        std::thread watchdog([&comm] {
            while (!__atomic_load_n(&comm, __ATOMIC_ACQUIRE)) std::this_thread::yield();
            CHECK(ncclCommAbort(comm) == ncclSuccess);
        });
        CHECK(ncclCommInitRank(&comm, 2, id, 0) == ncclInternalError);
        watchdog.join();
    });
}

void test_states() {
    for (int size : {1, 2, 4})
        run_case("nccl non-blocking on " + std::to_string(size) + " ranks",
                 [&] { on_ranks(size, check_non_blocking, false); });
    run_case("nccl bad arguments", [] { on_ranks(2, check_bad_arguments); });
    run_case("nccl bad initialisation", check_bad_init);
    run_case("nccl two ranks on one device", check_shared_device);
    run_case("nccl memory, registrations, windows", [] { on_ranks(2, check_memory); });
    run_case("nccl abort frees the rank that aborts", check_abort);
    run_case("nccl abort of a receive", check_abort_of_messages);
    run_case("nccl abort leaves the other ranks waiting", check_abort_behind_a_message);
    run_case("nccl a silent rank", check_silence);
    run_case("nccl an asynchronous error", check_async_error);
    run_case("nccl a peer that never joins", check_init_abort);
    run_case("nccl a blocking child of a non-blocking parent", [] { on_ranks(3, check_blocking_child, false); });
    test_waiting_calls();
    test_misuse_of_handles();
    run_case("nccl version and strings", [] {
        int version = 0;
        mte::nccl_set_version(NCCL_VERSION(2, 20, 1));
        CHECK(ncclGetVersion(&version) == ncclSuccess && version == NCCL_VERSION(2, 20, 1));
        mte::nccl_set_version(0);
        CHECK(ncclGetVersion(&version) == ncclSuccess && version == NCCL_VERSION_CODE);
        CHECK(!strcmp(ncclGetErrorString(ncclInProgress), "NCCL operation in progress"));
    });
}

// Reductions of buffers in symmetric windows. The buffer of rank 1 lies `shift` floats further than that of rank 0.
void check_window_offsets(int shift) {
    on_ranks(2, [shift](Rank &r) {
        void *memory = nullptr;
        ncclWindow_t window = nullptr;
        CHECK(ncclMemAlloc(&memory, 8192) == ncclSuccess);
        CHECK(cudaMemset(memory, 0, 8192) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess);
        CHECK(ncclCommWindowRegister(r.comm, memory, 8192, &window, NCCL_WIN_COLL_SYMMETRIC) == ncclSuccess);
        float *const x = static_cast<float *>(memory) + 8 + r.rank * shift;
        CHECK(ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
        // In place, the part of a rank lies at the offset of its block.
        float *const whole = static_cast<float *>(memory) + 512 + r.rank * shift;
        CHECK(ncclAllGather(whole + 8 * r.rank, whole, 8, ncclFloat, r.comm, r.stream) == ncclSuccess);
        CHECK(ncclReduceScatter(whole, whole + 8 * r.rank, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
        CHECK(cudaStreamSynchronize(r.stream) == cudaSuccess);
        CHECK(ncclCommWindowDeregister(r.comm, window) == ncclSuccess && ncclMemFree(memory) == ncclSuccess);
    });
}

void test_windows() {
    run_case("nccl windows with the same offsets", [] { check_window_offsets(0); });
    run_reporting_case("nccl reports other offsets in a window", [] { check_window_offsets(4); });
    run_reporting_case("nccl reports a buffer in a window on one rank only", [] {
        on_ranks(2, [](Rank &r) {
            void *memory = nullptr;
            ncclWindow_t window = nullptr;
            Buffer<float> outside(std::vector<float>(8));
            CHECK(ncclMemAlloc(&memory, 4096) == ncclSuccess && cudaMemset(memory, 0, 4096) == cudaSuccess);
            CHECK(cudaDeviceSynchronize() == cudaSuccess);
            CHECK(ncclCommWindowRegister(r.comm, memory, 4096, &window, NCCL_WIN_COLL_SYMMETRIC) == ncclSuccess);
            float *const x = r.rank ? outside.p : static_cast<float *>(memory);
            CHECK(ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
            CHECK(cudaStreamSynchronize(r.stream) == cudaSuccess);
            CHECK(ncclCommWindowDeregister(r.comm, window) == ncclSuccess && ncclMemFree(memory) == ncclSuccess);
        });
    });
    run_reporting_case("nccl reports windows of different sizes, and memory freed while registered", [] {
        on_ranks(2, [](Rank &r) {
            void *memory = nullptr;
            ncclWindow_t window = nullptr;
            CHECK(ncclMemAlloc(&memory, 8192) == ncclSuccess);
            const size_t bytes = r.rank ? 4096 : 8192;
            CHECK(ncclCommWindowRegister(r.comm, memory, bytes, &window, NCCL_WIN_COLL_SYMMETRIC) == ncclSuccess);
            CHECK(ncclMemFree(memory) == ncclSuccess);
        });
    });
    run_reporting_case("nccl reports a buffer in windows of two communicators, and a window that outlives its own", [] {
        on_ranks(2, [](Rank &r) {
            void *memory = nullptr;
            ncclWindow_t window = nullptr, other = nullptr;
            ncclComm_t comm = nullptr;
            CHECK(ncclMemAlloc(&memory, 8192) == ncclSuccess);
            CHECK(ncclCommSplit(r.comm, 0, r.rank, &comm, nullptr) == ncclSuccess);
            CHECK(ncclCommWindowRegister(r.comm, memory, 8192, &window, NCCL_WIN_COLL_SYMMETRIC) == ncclSuccess);
            const int before = mte::errors();
            CHECK(ncclCommWindowRegister(comm, memory, 4096, &other, NCCL_WIN_COLL_SYMMETRIC) == ncclSuccess);
            const int between = mte::errors();
            CHECK(ncclCommDestroy(comm) == ncclSuccess);
            CHECK(before < between && between < mte::errors());
            CHECK(ncclCommWindowDeregister(r.comm, window) == ncclSuccess && ncclMemFree(memory) == ncclSuccess);
        });
    });
    run_case("cudart returns the error that a test asked for, once", [] {
        mte::cuda_fail_after("cudaGetDeviceCount", 1, cudaErrorLaunchFailure);
        int n = 0;
        CHECK(cudaGetDeviceCount(&n) == cudaSuccess && cudaGetDeviceCount(&n) == cudaErrorLaunchFailure);
        CHECK(cudaGetLastError() == cudaErrorLaunchFailure && cudaGetDeviceCount(&n) == cudaSuccess);
    });
}

// Calls that all ranks make together, but with different arguments.
void test_mismatches() {
    using Body = std::function<ncclResult_t(const Rank &, float *, float *)>;
    const auto mismatch = [](const char *what, const Body &body) {
        run_reporting_case(std::string("nccl reports ") + what, [&] {
            on_ranks(2, [&](Rank &r) {
                Buffer<float> in(std::vector<float>(32)), out(std::vector<float>(32));
                CHECK(body(r, in.p, out.p) == ncclSuccess);
                CHECK(cudaStreamSynchronize(r.stream) == cudaSuccess);
            });
        });
    };
    mismatch("counts that differ", [](const Rank &r, float *in, float *out) {
        return ncclAllReduce(in, out, r.rank ? 8 : 9, ncclFloat, ncclSum, r.comm, r.stream);
    });
    mismatch("types that differ", [](const Rank &r, float *in, float *out) {
        return ncclAllReduce(in, out, 8, r.rank ? ncclFloat : ncclInt32, ncclSum, r.comm, r.stream);
    });
    mismatch("operations that differ", [](const Rank &r, float *in, float *out) {
        return ncclAllReduce(in, out, 8, ncclFloat, r.rank ? ncclSum : ncclMax, r.comm, r.stream);
    });
    mismatch("roots that differ", [](const Rank &r, float *in, float *out) {
        return ncclBroadcast(in, out, 8, ncclFloat, r.rank, r.comm, r.stream);
    });
    mismatch("collectives that differ", [](const Rank &r, float *in, float *out) {
        if (r.rank) return ncclAllGather(in, out, 8, ncclFloat, r.comm, r.stream);
        return ncclAllReduce(in, out, 8, ncclFloat, ncclSum, r.comm, r.stream);
    });
    mismatch("a message longer than its receive", [](const Rank &r, float *in, float *out) {
        if (r.rank) return ncclSend(in, 9, ncclFloat, 0, r.comm, r.stream);
        return ncclRecv(out, 8, ncclFloat, 1, r.comm, r.stream);
    });
    mismatch("buffers that overlap without being in place", [](const Rank &r, float *in, float *) {
        return ncclAllReduce(in, in + 4, 8, ncclFloat, ncclSum, r.comm, r.stream);
    });
    mismatch("a buffer that is too small", [](const Rank &r, float *in, float *out) {
        return ncclAllReduce(in, out, 33, ncclFloat, ncclSum, r.comm, r.stream);
    });
    run_reporting_case("nccl reports a null buffer, and one of another device", [] {
        on_ranks(2, [](Rank &r) {
            CHECK(cudaSetDevice(1 - r.rank) == cudaSuccess);
            Buffer<float> far(8);
            CHECK(cudaSetDevice(r.rank) == cudaSuccess);
            CHECK(ncclAllReduce(nullptr, far.p, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclInvalidArgument);
            CHECK(ncclAllReduce(far.p, far.p, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclInvalidArgument);
        });
    });
    run_reporting_case("nccl reports one thread that drives two ranks without a group", [] {
        if (!enough_devices(2)) return;
        ncclComm_t comms[2];
        CHECK(ncclCommInitAll(comms, 2, nullptr) == ncclSuccess);
        for (int grouped = 1; grouped >= 0; grouped--) {
            if (grouped) CHECK(ncclGroupStart() == ncclSuccess);
            for (int rank = 0; rank < 2; rank++) {
                CHECK(cudaSetDevice(rank) == cudaSuccess);
                Buffer<float> *buffer = new Buffer<float>(std::vector<float>(8));
                CHECK(ncclAllReduce(buffer->p, buffer->p, 8, ncclFloat, ncclSum, comms[rank], nullptr) == ncclSuccess);
            }
            if (grouped) CHECK(ncclGroupEnd() == ncclSuccess);
        }
        CHECK(ncclCommDestroy(comms[0]) == ncclSuccess && ncclCommDestroy(comms[1]) == ncclSuccess);
        CHECK(cudaSetDevice(0) == cudaSuccess);
    });
    run_reporting_case("nccl reports ncclMemFree of what ncclMemAlloc did not give", [] {
        void *plain = nullptr;
        CHECK(cudaMalloc(&plain, 64) == cudaSuccess);
        CHECK(ncclMemFree(plain) == ncclInvalidArgument && cudaFree(plain) == cudaSuccess);
    });
}

// ---- graphs ---------------------------------------------------------------------------------------------------------

cudaStream_t new_stream(unsigned flags = cudaStreamNonBlocking) {
    cudaStream_t stream = nullptr;
    CHECK(cudaStreamCreateWithFlags(&stream, flags) == cudaSuccess);
    return stream;
}

// Two streams, events, and bytes of device and pinned memory.
struct Capturing {
    cudaStream_t a = new_stream(), b = new_stream();
    cudaEvent_t event[2] = {};
    Buffer<unsigned char> x{std::vector<unsigned char>(8)}, y{std::vector<unsigned char>(8)};
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;

    Capturing() {
        for (cudaEvent_t &e : event) CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming) == cudaSuccess);
    }
    ~Capturing() {
        if (exec) CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
        if (graph) CHECK(cudaGraphDestroy(graph) == cudaSuccess);
        CHECK(cudaStreamDestroy(a) == cudaSuccess && cudaStreamDestroy(b) == cudaSuccess);
        for (cudaEvent_t e : event) CHECK(cudaEventDestroy(e) == cudaSuccess);
        cudaGetLastError();
    }
    cudaError_t begin(cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal) {
        return cudaStreamBeginCapture(a, mode);
    }
    cudaError_t end() { return cudaStreamEndCapture(a, &graph); }
    void end_good() { CHECK(end() == cudaSuccess && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess); }
    // Ends a capture that is invalid. Its streams can be used again.
    void end_invalid() {
        CHECK(end() == cudaErrorStreamCaptureInvalidated && !graph);
        CHECK(status(a) == cudaStreamCaptureStatusNone && status(b) == cudaStreamCaptureStatusNone);
        CHECK(set(x, 1, a) == cudaSuccess && cudaStreamSynchronize(a) == cudaSuccess);
    }
    cudaError_t launch(cudaStream_t stream) { return cudaGraphLaunch(exec, stream); }
    cudaError_t set(Buffer<unsigned char> &buffer, int value, cudaStream_t stream) {
        return cudaMemsetAsync(buffer.p, value, buffer.count, stream);
    }
    cudaError_t copy(cudaStream_t stream) { // y = x
        return cudaMemcpyAsync(y.p, x.p, x.count, cudaMemcpyDeviceToDevice, stream);
    }
    cudaError_t wait(cudaStream_t stream, cudaStream_t other, int which) {
        const cudaError_t error = cudaEventRecord(event[which], other);
        return error == cudaSuccess ? cudaStreamWaitEvent(stream, event[which], 0) : error;
    }
    size_t nodes() {
        size_t count = 99;
        CHECK(cudaGraphGetNodes(graph, nullptr, &count) == cudaSuccess);
        return count;
    }
    static cudaStreamCaptureStatus status(cudaStream_t stream) {
        cudaStreamCaptureStatus is = cudaStreamCaptureStatusInvalidated;
        CHECK(cudaStreamIsCapturing(stream, &is) == cudaSuccess);
        return is;
    }
};

void test_replays() {
    run_case("a captured stream runs nothing; each launch reads the memory as it is then", [] {
        Capturing c;
        std::vector<unsigned char> pageable(8, 3), back(8);
        CHECK(c.begin() == cudaSuccess && c.status(c.a) == cudaStreamCaptureStatusActive);
        CHECK(cudaMemcpyAsync(c.x.p, pageable.data(), 8, cudaMemcpyHostToDevice, c.a) == cudaSuccess);
        CHECK(c.copy(c.a) == cudaSuccess);
        CHECK(cudaMemcpyAsync(back.data(), c.y.p, 8, cudaMemcpyDeviceToHost, c.a) == cudaSuccess);
        c.end_good();
        CHECK(c.nodes() == 3 && c.status(c.a) == cudaStreamCaptureStatusNone && c.y.read(c.a)[7] == 0);
        for (unsigned char value = 4; value < 7; value++) {
            const long waits = mte::host_waits(), launches = mte::graph_launches();
            memset(pageable.data(), value, 8);
            CHECK(c.launch(c.a) == cudaSuccess);
            CHECK(mte::host_waits() == waits && mte::graph_launches() == launches + 1);
            CHECK(c.y.read(c.a)[7] == value && back[7] == value);
        }
    });
    run_case("a graph begins after what is in its stream, and what follows begins after it", [] {
        Capturing c;
        CHECK(c.begin() == cudaSuccess && c.wait(c.b, c.a, 0) == cudaSuccess && c.copy(c.b) == cudaSuccess);
        CHECK(c.wait(c.a, c.b, 1) == cudaSuccess);
        c.end_good();
        for (int value = 1; value < 4; value++) {
            CHECK(c.set(c.x, value, c.a) == cudaSuccess && c.launch(c.a) == cudaSuccess);
            CHECK(c.set(c.x, 77, c.a) == cudaSuccess);
            CHECK(c.y.read(c.a)[0] == value);
        }
    });
    run_case("launches of one graph in two streams run one after the other", [] {
        Capturing c;
        CHECK(c.begin() == cudaSuccess && c.copy(c.a) == cudaSuccess && c.set(c.x, 9, c.a) == cudaSuccess);
        c.end_good();
        CHECK(c.set(c.x, 5, c.a) == cudaSuccess && c.launch(c.a) == cudaSuccess && c.launch(c.b) == cudaSuccess);
        CHECK(cudaGraphUpload(c.exec, c.a) == cudaSuccess);
        CHECK(c.y.read(c.b)[0] == 9 && cudaStreamSynchronize(c.a) == cudaSuccess);
    });
    run_case("a launch begins after all of the launch before, also on other branches of the graph", [] {
        Capturing c;
        Buffer<unsigned char> z(std::vector<unsigned char>(8)), w(std::vector<unsigned char>(8));
        CHECK(c.begin() == cudaSuccess && c.wait(c.b, c.a, 0) == cudaSuccess && c.set(w, 1, c.a) == cudaSuccess);
        CHECK(cudaMemcpyAsync(z.p, c.x.p, 8, cudaMemcpyDeviceToDevice, c.b) == cudaSuccess);
        CHECK(c.wait(c.a, c.b, 1) == cudaSuccess);
        CHECK(cudaMemcpyAsync(c.y.p, z.p, 8, cudaMemcpyDeviceToDevice, c.a) == cudaSuccess);
        CHECK(c.set(c.x, 9, c.a) == cudaSuccess);
        c.end_good();
        for (int i = 0; i < 8; i++) {
            CHECK(c.set(c.x, 5, c.a) == cudaSuccess && c.launch(c.a) == cudaSuccess && c.launch(c.b) == cudaSuccess);
            CHECK(c.y.read(c.b)[0] == 9 && cudaStreamSynchronize(c.a) == cudaSuccess);
        }
    });
    run_case("a graph that is destroyed before it has run still runs", [] {
        Capturing c;
        CHECK(c.begin() == cudaSuccess && c.set(c.x, 6, c.a) == cudaSuccess && c.copy(c.a) == cudaSuccess);
        c.end_good();
        CHECK(c.launch(c.b) == cudaSuccess && cudaGraphExecDestroy(c.exec) == cudaSuccess);
        CHECK(cudaGraphDestroy(c.graph) == cudaSuccess);
        c.exec = nullptr;
        c.graph = nullptr;
        CHECK(c.y.read(c.b)[0] == 6);
    });
}

void test_nodes() {
    run_case("a host function and a product run once in each launch", [] {
        Gemm g((Shape()));
        Capturing c;
        int calls = 0;
        CHECK(c.begin() == cudaSuccess);
        CHECK(cudaLaunchHostFunc(
                  c.a, [](void *count) { ++*static_cast<int *>(count); }, &calls) == cudaSuccess);
        CHECK(cublasLtMatmul(g.handle, g.desc, g.alpha, g.pa, g.la, g.pb, g.lb, g.beta, g.pc, g.lc, g.pd, g.ld, nullptr,
                             nullptr, 0, c.a) == CUBLAS_STATUS_SUCCESS);
        c.end_good();
        const long products = mte::gemm_count();
        for (int i = 0; i < 3; i++) CHECK(c.launch(c.a) == cudaSuccess);
        CHECK(cudaStreamSynchronize(c.a) == cudaSuccess && calls == 3 && mte::gemm_count() == products + 3);
    });
    run_case("the nodes of a graph run on the devices of the streams that they were captured from", [] {
        if (!enough_devices(2)) return;
        Capturing c;
        CHECK(cudaSetDevice(1) == cudaSuccess);
        Buffer<unsigned char> far(std::vector<unsigned char>(8));
        const cudaStream_t stream = new_stream();
        CHECK(cudaSetDevice(0) == cudaSuccess);
        CHECK(c.begin() == cudaSuccess && c.set(c.x, 1, c.a) == cudaSuccess && c.wait(stream, c.a, 0) == cudaSuccess);
        CHECK(c.set(far, 2, stream) == cudaSuccess);
        cudaEvent_t joined;
        CHECK(cudaSetDevice(1) == cudaSuccess && cudaEventCreate(&joined) == cudaSuccess);
        CHECK(cudaEventRecord(joined, stream) == cudaSuccess && cudaSetDevice(0) == cudaSuccess);
        CHECK(cudaStreamWaitEvent(c.a, joined, 0) == cudaSuccess && c.set(c.x, 3, c.a) == cudaSuccess);
        c.end_good();
        CHECK(c.launch(c.a) == cudaSuccess && c.x.read(c.a)[0] == 3 && far.read(c.a)[0] == 2);
        CHECK(cudaStreamDestroy(stream) == cudaSuccess && cudaEventDestroy(joined) == cudaSuccess);
    });
}

// Captured streams, their order, and the end of a capture.
void test_captures() {
    run_case("cudaStreamGetCaptureInfo: the capture, and what the next node depends on", [] {
        Capturing c;
        cudaStreamCaptureStatus is;
        unsigned long long first = 0, second = 0;
        size_t count = 9;
        const cudaGraphNode_t *tail = nullptr;
        cudaGraphNode_t nodes[3];
        const auto info = [&](unsigned long long *id) {
#if CUDART_VERSION >= 13000
            return cudaStreamGetCaptureInfo(c.b, &is, id, nullptr, &tail, nullptr, &count);
#else
            return cudaStreamGetCaptureInfo(c.b, &is, id, nullptr, &tail, &count);
#endif
        };
        CHECK(info(&first) == cudaSuccess && is == cudaStreamCaptureStatusNone);
        CHECK(c.begin() == cudaSuccess && c.set(c.x, 1, c.a) == cudaSuccess && c.wait(c.b, c.a, 0) == cudaSuccess);
        CHECK(c.set(c.y, 1, c.b) == cudaSuccess && c.wait(c.b, c.a, 0) == cudaSuccess);
        CHECK(info(&first) == cudaSuccess && is == cudaStreamCaptureStatusActive && count == 2);
        const cudaGraphNode_t last = tail[1];
        CHECK(c.wait(c.a, c.b, 1) == cudaSuccess && c.end() == cudaSuccess && c.nodes() == 2);
        count = 3;
        CHECK(cudaGraphGetNodes(c.graph, nodes, &count) == cudaSuccess && count == 2 && nodes[1] == last && !nodes[2]);
        CHECK(cudaStreamBeginCapture(c.b, cudaStreamCaptureModeRelaxed) == cudaSuccess);
        CHECK(info(&second) == cudaSuccess && count == 0 && first != second);
        cudaGraph_t empty;
        CHECK(cudaStreamEndCapture(c.b, &empty) == cudaSuccess && cudaGraphDestroy(empty) == cudaSuccess);
    });
    run_case("a capture begins once, and not on the legacy default stream", [] {
        Capturing c;
        CHECK(c.end() == cudaErrorIllegalState);
        CHECK(c.begin(static_cast<cudaStreamCaptureMode>(7)) == cudaErrorInvalidValue);
        CHECK(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal) == cudaErrorStreamCaptureUnsupported);
        CHECK(c.begin() == cudaSuccess && c.begin() == cudaErrorIllegalState && c.end() == cudaSuccess);
    });
    run_case("a capture ends on the stream and, unless relaxed, in the thread where it began", [] {
        Capturing c;
        cudaError_t elsewhere = cudaSuccess;
        const auto end_elsewhere = [&] { std::thread([&] { elsewhere = c.end(); }).join(); };
        CHECK(c.begin() == cudaSuccess && c.wait(c.b, c.a, 0) == cudaSuccess);
        CHECK(cudaStreamEndCapture(c.b, &c.graph) == cudaErrorStreamCaptureUnmatched && !c.graph);
        c.end_invalid();
        CHECK(c.begin(cudaStreamCaptureModeThreadLocal) == cudaSuccess);
        end_elsewhere();
        CHECK(elsewhere == cudaErrorStreamCaptureWrongThread && !c.graph);
        c.end_invalid();
        CHECK(c.begin(cudaStreamCaptureModeRelaxed) == cudaSuccess);
        end_elsewhere();
        CHECK(elsewhere == cudaSuccess && c.graph);
    });
    run_case("work that is not joined is an error, a joined stream without work is not", [] {
        Capturing c;
        CHECK(c.begin() == cudaSuccess && c.wait(c.b, c.a, 0) == cudaSuccess && c.set(c.x, 1, c.b) == cudaSuccess);
        CHECK(c.wait(c.a, c.b, 1) == cudaSuccess && c.set(c.x, 2, c.b) == cudaSuccess);
        CHECK(c.end() == cudaErrorStreamCaptureUnjoined && !c.graph);
        CHECK(c.status(c.b) == cudaStreamCaptureStatusNone);
        CHECK(c.begin() == cudaSuccess && c.set(c.x, 1, c.a) == cudaSuccess && c.wait(c.b, c.a, 0) == cudaSuccess);
        CHECK(c.end() == cudaSuccess && c.nodes() == 1);
    });
}

// Dependencies that would leave a capture or enter it.
void test_isolation() {
    run_case("two captures do not merge", [] {
        Capturing c;
        CHECK(c.begin() == cudaSuccess);
        CHECK(cudaStreamBeginCapture(c.b, cudaStreamCaptureModeGlobal) == cudaSuccess);
        CHECK(c.wait(c.b, c.a, 0) == cudaErrorStreamCaptureMerge);
        CHECK(cudaStreamEndCapture(c.b, &c.graph) == cudaErrorStreamCaptureInvalidated);
        c.end_invalid();
    });
    run_case("a captured stream does not wait for an event from outside, nor others for an event of its capture", [] {
        Capturing c;
        for (int how = 0; how < 3; how++) { // no record, a record before the capture, a record in the last capture
            if (how == 1) CHECK(cudaEventRecord(c.event[0], c.b) == cudaSuccess);
            CHECK(c.begin() == cudaSuccess);
            CHECK(cudaStreamWaitEvent(c.a, c.event[0], 0) == cudaErrorStreamCaptureIsolation);
            c.end_invalid();
            CHECK(c.begin() == cudaSuccess && cudaEventRecord(c.event[0], c.a) == cudaSuccess);
            CHECK(c.end() == cudaSuccess && cudaGraphDestroy(c.graph) == cudaSuccess);
            c.graph = nullptr;
            CHECK(cudaStreamWaitEvent(c.b, c.event[0], 0) == cudaErrorCapturedEvent);
            CHECK(cudaEventQuery(c.event[0]) == cudaErrorCapturedEvent);
        }
        CHECK(c.wait(c.b, c.a, 0) == cudaSuccess && cudaEventSynchronize(c.event[0]) == cudaSuccess);
    });
    run_case("the legacy default stream is not used while a blocking stream is captured", [] {
        Capturing c;
        const cudaStream_t blocking = new_stream(cudaStreamDefault);
        cudaStreamCaptureStatus is;
        CHECK(c.begin() == cudaSuccess && c.set(c.x, 1, nullptr) == cudaSuccess && c.end() == cudaSuccess);
        CHECK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed) == cudaSuccess);
        CHECK(cudaStreamIsCapturing(nullptr, &is) == cudaErrorStreamCaptureImplicit);
        CHECK(Capturing::status(blocking) == cudaStreamCaptureStatusActive);
        CHECK(c.set(c.x, 1, nullptr) == cudaErrorStreamCaptureImplicit);
        CHECK(Capturing::status(blocking) == cudaStreamCaptureStatusInvalidated);
        cudaGraph_t graph;
        CHECK(cudaStreamEndCapture(blocking, &graph) == cudaErrorStreamCaptureInvalidated);
        CHECK(c.set(c.x, 1, nullptr) == cudaSuccess && cudaStreamDestroy(blocking) == cudaSuccess);
    });
    run_case("a stream of an invalid capture takes no operation", [] {
        Gemm g((Shape()));
        Capturing c;
        CHECK(c.begin() == cudaSuccess && c.wait(c.b, c.a, 0) == cudaSuccess);
        CHECK(cudaStreamSynchronize(c.b) == cudaErrorStreamCaptureUnsupported);
        CHECK(c.status(c.a) == cudaStreamCaptureStatusInvalidated);
        CHECK(c.set(c.x, 1, c.a) == cudaErrorStreamCaptureInvalidated);
        CHECK(c.copy(c.b) == cudaErrorStreamCaptureInvalidated);
        CHECK(c.wait(c.b, c.a, 0) == cudaErrorStreamCaptureInvalidated);
        CHECK(cublasLtMatmul(g.handle, g.desc, g.alpha, g.pa, g.la, g.pb, g.lb, g.beta, g.pc, g.lc, g.pd, g.ld, nullptr,
                             nullptr, 0, c.a) == CUBLAS_STATUS_EXECUTION_FAILED);
        c.end_invalid();
    });
}

// Calls that the host may not make during a capture.

using HostCall = std::function<cudaError_t(Capturing &)>;

// Calls in the thread of the capture, or in another one.
cudaError_t call_in(bool other_thread, const HostCall &call, Capturing &c) {
    cudaError_t error = cudaSuccess;
    if (other_thread) std::thread([&] { error = call(c); }).join();
    else error = call(c);
    return error;
}

cudaError_t allocate(Capturing &) {
    void *p = nullptr;
    const cudaError_t error = cudaMalloc(&p, 64);
    return error == cudaSuccess ? cudaFree(p) : error;
}

cudaError_t allocate_pinned(Capturing &) {
    void *p = nullptr;
    const cudaError_t error = cudaMallocHost(&p, 64);
    return error == cudaSuccess ? cudaFreeHost(p) : error;
}

// Memory that the first call of a kind that is permitted frees.
struct Spare {
    void *device = nullptr, *pinned = nullptr;
    int word = 0;
    cudaEvent_t idle = nullptr;
    Spare() {
        CHECK(cudaMalloc(&device, 64) == cudaSuccess && cudaMallocHost(&pinned, 64) == cudaSuccess);
        CHECK(cudaEventCreate(&idle) == cudaSuccess);
    }
};

void test_prohibited_calls() {
    const Spare spare;
    const std::vector<std::pair<const char *, HostCall>> never = {
        {"cudaStreamSynchronize of its stream", [](Capturing &c) { return cudaStreamSynchronize(c.a); }},
        {"cudaStreamQuery of its stream", [](Capturing &c) { return cudaStreamQuery(c.a); }},
        {"cudaDeviceSynchronize", [](Capturing &) { return cudaDeviceSynchronize(); }},
    };
    void *word = const_cast<int *>(&spare.word);
    const std::vector<std::pair<const char *, HostCall>> unsafe = {
        {"cudaMalloc", allocate},
        {"cudaFree", [&](Capturing &) { return cudaFree(spare.device); }},
        {"cudaMallocHost", allocate_pinned},
        {"cudaFreeHost", [&](Capturing &) { return cudaFreeHost(spare.pinned); }},
        {"cudaHostRegister", [=](Capturing &) { return cudaHostRegister(word, sizeof(int), 0); }},
        {"cudaHostUnregister", [=](Capturing &) { return cudaHostUnregister(word); }},
        {"cudaMemcpy", [=](Capturing &c) { return cudaMemcpy(word, c.x.p, 4, cudaMemcpyDefault); }},
        {"cudaStreamSynchronize of another stream", [](Capturing &c) { return cudaStreamSynchronize(c.b); }},
        {"cudaStreamQuery of another stream", [](Capturing &c) { return cudaStreamQuery(c.b); }},
        {"cudaEventQuery", [&](Capturing &) { return cudaEventQuery(spare.idle); }},
        {"cudaEventSynchronize", [&](Capturing &) { return cudaEventSynchronize(spare.idle); }},
    };
    const auto refused = cudaErrorStreamCaptureUnsupported;
    for (const auto &item : never)
        run_case(std::string("no mode of a capture permits ") + item.first, [&] {
            Capturing c;
            for (auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed}) {
                CHECK(c.begin(mode) == cudaSuccess && item.second(c) == refused);
                c.end_invalid();
            }
        });
    for (const auto &item : unsafe)
        run_case(std::string("a capture that is not relaxed prohibits ") + item.first, [&] {
            Capturing c;
            CHECK(c.begin(cudaStreamCaptureModeRelaxed) == cudaSuccess && item.second(c) == cudaSuccess);
            CHECK(c.end() == cudaSuccess && cudaGraphDestroy(c.graph) == cudaSuccess);
            for (auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal}) {
                CHECK(c.begin(mode) == cudaSuccess && item.second(c) == refused);
                c.end_invalid();
            }
            CHECK(c.begin() == cudaSuccess && call_in(true, item.second, c) == refused);
            c.end_invalid();
        });
    CHECK(cudaEventDestroy(spare.idle) == cudaSuccess);
}

// A call in the given mode of the thread.
cudaError_t allocate_as(cudaStreamCaptureMode mode, Capturing &c) {
    CHECK(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess && mode == cudaStreamCaptureModeGlobal);
    const cudaError_t error = allocate(c);
    CHECK(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess);
    return error;
}

void test_capture_modes() {
    const auto global = cudaStreamCaptureModeGlobal, local = cudaStreamCaptureModeThreadLocal,
               relaxed = cudaStreamCaptureModeRelaxed;
    struct Row {
        cudaStreamCaptureMode capture, thread;
        bool other_thread, permitted;
    };
    const Row rows[] = {
        {global, global, false, false}, {global, local, false, false},  {global, relaxed, false, true},
        {global, global, true, false},  {global, local, true, true},    {global, relaxed, true, true},
        {local, global, false, false},  {local, local, false, false},   {local, relaxed, false, true},
        {local, global, true, true},    {relaxed, global, false, true}, {relaxed, global, true, true},
    };
    for (const Row &row : rows) {
        const std::string name = "capture mode " + std::to_string(row.capture) + ", cudaMalloc of " +
                                 (row.other_thread ? "another" : "its") + " thread in mode " +
                                 std::to_string(row.thread);
        run_case(name, [&] {
            Capturing c;
            CHECK(c.begin(row.capture) == cudaSuccess);
            const cudaError_t error = call_in(
                row.other_thread, [&](Capturing &x) { return allocate_as(row.thread, x); }, c);
            CHECK(error == (row.permitted ? cudaSuccess : cudaErrorStreamCaptureUnsupported));
            if (row.permitted) CHECK(c.end() == cudaSuccess);
            else c.end_invalid();
        });
    }
}

void test_graph_handles() {
    run_case("injected errors of a capture and of a graph", [] {
        Capturing c;
        const auto fail = [](const char *name) { mte::cuda_fail_after(name, 0, cudaErrorMemoryAllocation); };
        fail("cudaStreamBeginCapture");
        CHECK(c.begin() == cudaErrorMemoryAllocation && c.status(c.a) == cudaStreamCaptureStatusNone);
        CHECK(c.begin() == cudaSuccess);
        fail("cudaStreamEndCapture");
        CHECK(c.end() == cudaErrorMemoryAllocation && !c.graph && c.status(c.a) == cudaStreamCaptureStatusNone);
        CHECK(c.begin() == cudaSuccess && c.set(c.x, 3, c.a) == cudaSuccess && c.end() == cudaSuccess);
        fail("cudaGraphInstantiate");
        CHECK(cudaGraphInstantiate(&c.exec, c.graph, 0) == cudaErrorMemoryAllocation && !c.exec);
        CHECK(cudaGraphInstantiate(&c.exec, c.graph, 0) == cudaSuccess);
        fail("cudaGraphLaunch");
        CHECK(c.launch(c.a) == cudaErrorMemoryAllocation && c.x.read(c.a)[0] == 0);
        CHECK(c.launch(c.a) == cudaSuccess && c.x.read(c.a)[0] == 3);
    });
    run_reporting_case("a graph that has been destroyed is reported", [] {
        Capturing c;
        CHECK(c.begin() == cudaSuccess && c.end() == cudaSuccess);
        const cudaGraph_t graph = c.graph;
        CHECK(cudaGraphDestroy(graph) == cudaSuccess);
        c.graph = nullptr;
        CHECK(cudaGraphInstantiate(&c.exec, graph, 0) == cudaErrorInvalidValue && !c.exec);
    });
    run_reporting_case("a stream that is destroyed while it is captured is reported", [] {
        Capturing c;
        CHECK(c.begin() == cudaSuccess);
        CHECK(cudaStreamDestroy(c.a) == cudaErrorStreamCaptureUnsupported);
        c.end_invalid();
    });
    run_case("a graph begun in one thread spans the streams of another", [] {
        Capturing c;
        CHECK(c.begin() == cudaSuccess && c.set(c.x, 4, c.a) == cudaSuccess);
        CHECK(cudaEventRecord(c.event[0], c.a) == cudaSuccess);
        std::thread([&] {
            CHECK(cudaStreamWaitEvent(c.b, c.event[0], 0) == cudaSuccess && c.copy(c.b) == cudaSuccess);
            CHECK(cudaEventRecord(c.event[1], c.b) == cudaSuccess);
        }).join();
        CHECK(cudaStreamWaitEvent(c.a, c.event[1], 0) == cudaSuccess && c.set(c.x, 5, c.a) == cudaSuccess);
        c.end_good();
        CHECK(c.launch(c.a) == cudaSuccess && c.y.read(c.a)[3] == 4 && c.x.read(c.a)[3] == 5);
    });
}

// ---- graphs with NCCL -----------------------------------------------------------------------------------------------

// Captures what body puts on the stream of a rank. The other ranks capture, too: each thread has its own capture.
struct RankGraph {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;

    RankGraph(const Rank &r, const std::function<void()> &body) {
        CHECK(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
        body();
        CHECK(cudaStreamEndCapture(r.stream, &graph) == cudaSuccess);
        CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    }
    ~RankGraph() { destroy(); }
    void destroy() {
        if (exec) CHECK(cudaGraphExecDestroy(exec) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
        exec = nullptr;
    }
    void launch(const Rank &r) { CHECK(cudaGraphLaunch(exec, r.stream) == cudaSuccess); }
};

// Three launches of a graph with two collectives, and an uncaptured collective after each.
void check_replayed_collectives(const Rank &r) {
    Buffer<float> x(std::vector<float>(4)), sum(std::vector<float>(4)), all(std::vector<float>(8)),
        other(std::vector<float>(4));
    RankGraph graph(r, [&] {
        CHECK(ncclAllReduce(x.p, sum.p, 4, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
        CHECK(ncclAllGather(sum.p, all.p, 4, ncclFloat, r.comm, r.stream) == ncclSuccess);
    });
    for (int launch = 1; launch <= 3; launch++) {
        const float mine = static_cast<float>(launch * (10 + r.rank));
        x.write(std::vector<float>(4, mine));
        graph.launch(r);
        CHECK(ncclAllReduce(sum.p, other.p, 4, ncclFloat, ncclMax, r.comm, r.stream) == ncclSuccess);
        const float want = static_cast<float>(launch * 21);
        CHECK(all.read(r.stream)[7 - 4 * static_cast<size_t>(r.rank)] == want && other.read(r.stream)[1] == want);
    }
}

// A group over two streams, which waits for both, and both wait for all of it: messages around a ring.
void check_replayed_group(const Rank &r) {
    const cudaStream_t side = new_stream();
    cudaEvent_t fork, join;
    CHECK(cudaEventCreate(&fork) == cudaSuccess && cudaEventCreate(&join) == cudaSuccess);
    const int next = (r.rank + 1) % r.size, before = (r.rank + r.size - 1) % r.size;
    Buffer<int32_t> given(std::vector<int32_t>(2)), out(std::vector<int32_t>(2)), in(std::vector<int32_t>(2)),
        copy(std::vector<int32_t>(2)), twice(std::vector<int32_t>(2));
    RankGraph graph(r, [&] {
        CHECK(cudaEventRecord(fork, r.stream) == cudaSuccess && cudaStreamWaitEvent(side, fork, 0) == cudaSuccess);
        CHECK(cudaMemcpyAsync(out.p, given.p, 8, cudaMemcpyDeviceToDevice, side) == cudaSuccess);
        CHECK(ncclGroupStart() == ncclSuccess);
        CHECK(ncclRecv(in.p, 2, ncclInt32, before, r.comm, r.stream) == ncclSuccess);
        CHECK(ncclSend(out.p, 2, ncclInt32, next, r.comm, side) == ncclSuccess);
        CHECK(ncclGroupEnd() == ncclSuccess);
        CHECK(cudaMemcpyAsync(copy.p, in.p, 8, cudaMemcpyDeviceToDevice, r.stream) == cudaSuccess);
        CHECK(cudaMemcpyAsync(twice.p, in.p, 8, cudaMemcpyDeviceToDevice, side) == cudaSuccess);
        CHECK(cudaEventRecord(join, side) == cudaSuccess && cudaStreamWaitEvent(r.stream, join, 0) == cudaSuccess);
    });
    for (int launch = 0; launch < 3; launch++) {
        given.write({100 * launch + r.rank, 7});
        graph.launch(r);
        const std::vector<int32_t> want = {100 * launch + before, 7};
        CHECK(copy.read(r.stream) == want && twice.read(r.stream) == want);
    }
    CHECK(cudaStreamDestroy(side) == cudaSuccess);
    CHECK(cudaEventDestroy(fork) == cudaSuccess && cudaEventDestroy(join) == cudaSuccess);
}

// One capture over the streams of all ranks, which are threads. Rank 0 launches the graph.
struct OneCapture {
    std::atomic<int> begun{0}, captured{0}, done{0};
    cudaEvent_t fork = nullptr;
    cudaEvent_t joins[2] = {};

    static void wait_until(const std::atomic<int> &count, int value) {
        while (count < value) std::this_thread::yield();
    }
    void check(const Rank &r) {
        Buffer<float> x(std::vector<float>(4, static_cast<float>(1 + r.rank)));
        cudaEvent_t &join = joins[r.rank];
        CHECK(cudaEventCreate(r.rank ? &join : &fork) == cudaSuccess);
        CHECK(cudaStreamSynchronize(r.stream) == cudaSuccess);
        if (r.rank == 0) {
            wait_until(begun, 1);
            CHECK(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
            CHECK(cudaEventRecord(fork, r.stream) == cudaSuccess);
        }
        begun++;
        wait_until(begun, 2);
        if (r.rank) CHECK(cudaStreamWaitEvent(r.stream, fork, 0) == cudaSuccess);
        CHECK(ncclAllReduce(x.p, x.p, 4, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
        if (r.rank) CHECK(cudaEventRecord(join, r.stream) == cudaSuccess);
        captured++;
        wait_until(captured, 2);
        if (r.rank == 0) launch(r);
        done++;
        wait_until(done, 2);
        CHECK(x.read(r.stream)[2] == 3.0f * 2 * 2);
        CHECK(cudaEventDestroy(r.rank ? join : fork) == cudaSuccess);
    }
    void launch(const Rank &r) {
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CHECK(cudaStreamWaitEvent(r.stream, joins[1], 0) == cudaSuccess);
        CHECK(cudaStreamEndCapture(r.stream, &graph) == cudaSuccess);
        CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
        for (int i = 0; i < 3; i++) CHECK(cudaGraphLaunch(exec, r.stream) == cudaSuccess);
        CHECK(cudaStreamSynchronize(r.stream) == cudaSuccess);
        CHECK(cudaGraphExecDestroy(exec) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
    }
};

// A non-blocking communicator records a call when its helper thread comes to it.
void check_replayed_non_blocking(Rank &r) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclResult_t state = ncclInProgress;
    const auto settle = [&] {
        for (state = ncclInProgress; state == ncclInProgress;)
            CHECK(ncclCommGetAsyncError(r.comm, &state) == ncclSuccess);
        CHECK(state == ncclSuccess);
    };
    CHECK(ncclCommInitRankConfig(&r.comm, r.size, r.id, r.rank, &config) == ncclInProgress);
    settle();
    Buffer<float> x(std::vector<float>(4, 1.0f));
    {
        RankGraph graph(r, [&] {
            CHECK(ncclAllReduce(x.p, x.p, 4, ncclFloat, ncclSum, r.comm, r.stream) == ncclInProgress);
            settle();
        });
        for (int launch = 0; launch < 3; launch++) graph.launch(r);
        CHECK(x.read(r.stream)[0] == 8.0f);
    }
    CHECK(ncclCommFinalize(r.comm) == ncclInProgress);
    settle();
    CHECK(ncclCommDestroy(r.comm) == ncclSuccess);
}

// One thread launches the graphs of two ranks, one after the other. It needs no group, because a launch does not wait.
void check_launches_of_one_thread() {
    if (!enough_devices(2)) return;
    ncclComm_t comms[2], alone;
    Rank ranks[2];
    std::unique_ptr<Buffer<float>> x[2];
    std::unique_ptr<RankGraph> graphs[2];
    CHECK(ncclCommInitAll(comms, 2, nullptr) == ncclSuccess && ncclCommInitAll(&alone, 1, nullptr) == ncclSuccess);
    const auto sum = [&](int i) {
        return ncclAllReduce(x[i]->p, x[i]->p, 8, ncclFloat, ncclSum, comms[i], ranks[i].stream);
    };
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(i) == cudaSuccess);
        ranks[i] = {i, 2, comms[i], new_stream(), {}};
        x[i] = std::make_unique<Buffer<float>>(std::vector<float>(8, 1.0f));
    }
    CHECK(ncclGroupStart() == ncclSuccess && sum(0) == ncclSuccess && sum(1) == ncclSuccess);
    CHECK(ncclGroupEnd() == ncclSuccess); // connects the ranks
    for (int i = 0; i < 2; i++)
        graphs[i] = std::make_unique<RankGraph>(ranks[i], [&] { CHECK(sum(i) == ncclSuccess); });
    graphs[0]->launch(ranks[0]);
    CHECK(cudaSetDevice(0) == cudaSuccess);
    Buffer<float> other(std::vector<float>(8));
    CHECK(ncclAllReduce(other.p, other.p, 8, ncclFloat, ncclSum, alone, nullptr) == ncclSuccess);
    graphs[1]->launch(ranks[1]);
    for (int i = 0; i < 2; i++) CHECK(x[i]->read(ranks[i].stream)[0] == 4.0f);
    for (int i = 0; i < 2; i++) {
        graphs[i].reset();
        x[i].reset();
        CHECK(ncclCommDestroy(comms[i]) == ncclSuccess && cudaStreamDestroy(ranks[i].stream) == cudaSuccess);
    }
    CHECK(ncclCommDestroy(alone) == ncclSuccess);
}

// Rank 0 launches a graph, rank 1 does not: the graph waits until rank 0 aborts.
void check_abort_of_graph(Rank &r) {
    Buffer<float> x(inputs<float>(r.rank, 8));
    RankGraph graph(r, [&] { CHECK(ncclAllReduce(x.p, x.p, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess); });
    r.destroy = false;
    if (r.rank == 0) graph.launch(r);
    if (r.rank == 0) CHECK(stays_blocked(r.stream));
    graph.destroy(); // it still runs
    CHECK(ncclCommAbort(r.comm) == ncclSuccess && cudaStreamSynchronize(r.stream) == cudaSuccess);
    CHECK(same_bits(x.read(r.stream), inputs<float>(r.rank, 8)));
}

void check_streams_of_a_group(const Rank &r) {
    const cudaStream_t side = new_stream();
    Buffer<float> x(std::vector<float>(4));
    cudaGraph_t graph[2];
    const auto group = [&] {
        CHECK(ncclGroupStart() == ncclSuccess);
        CHECK(ncclAllReduce(x.p, x.p, 4, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
        CHECK(ncclAllReduce(x.p, x.p, 4, ncclFloat, ncclSum, r.comm, side) == ncclSuccess);
        return ncclGroupEnd();
    };
    CHECK(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(group() == ncclInvalidUsage);
    CHECK(cudaStreamBeginCapture(side, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(group() == ncclInvalidUsage);
    CHECK(cudaStreamEndCapture(r.stream, &graph[0]) == cudaSuccess && cudaGraphDestroy(graph[0]) == cudaSuccess);
    CHECK(cudaStreamEndCapture(side, &graph[1]) == cudaSuccess && cudaGraphDestroy(graph[1]) == cudaSuccess);
    CHECK(cudaStreamDestroy(side) == cudaSuccess);
}

int free_port() {
    sockaddr_in a = {};
    socklen_t bytes = sizeof a;
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(bind(fd, reinterpret_cast<sockaddr *>(&a), sizeof a) == 0);
    CHECK(getsockname(fd, reinterpret_cast<sockaddr *>(&a), &bytes) == 0 && close(fd) == 0);
    return ntohs(a.sin_port);
}

// The same with ranks that are processes, for which the stand-in needs this schedule.
void check_processes() {
    const char *const streams = getenv("MTE_STREAMS");
    if (streams && strcmp(streams, "eager") != 0) return;
    const std::string address = "127.0.0.1:" + std::to_string(free_port());
    pid_t children[2];
    for (int rank = 0; rank < 2; rank++) {
        children[rank] = fork();
        if (children[rank] != 0) continue;
        Rank r = {rank, 2, nullptr, nullptr, {}};
        CHECK(setenv("NCCL_COMM_ID", address.c_str(), 1) == 0 && cudaSetDevice(rank) == cudaSuccess);
        r.stream = new_stream();
        CHECK(ncclGetUniqueId(&r.id) == ncclSuccess && ncclCommInitRank(&r.comm, 2, r.id, rank) == ncclSuccess);
        check_replayed_collectives(r);
        CHECK(ncclCommDestroy(r.comm) == ncclSuccess);
        _Exit(failures == 0 ? 0 : 1);
    }
    for (pid_t child : children) {
        int status = -1;
        CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    }
}

void test_nccl_graphs() {
    run_case("nccl: graphs with collectives, with other collectives in between",
             [] { on_ranks(2, check_replayed_collectives); });
    run_case("nccl: graphs with collectives of two processes", check_processes);
    run_case("nccl: a graph with a group of messages", [] { on_ranks(3, check_replayed_group); });
    run_case("nccl: one graph with the streams of all ranks", [] {
        OneCapture capture;
        on_ranks(2, [&](Rank &r) { capture.check(r); });
    });
    run_case("nccl: a graph with a call of a non-blocking communicator",
             [] { on_ranks(2, check_replayed_non_blocking, false); });
    run_case("nccl: one thread launches the graphs of two ranks", check_launches_of_one_thread);
    run_case("nccl: an abort frees a graph that waits for another rank", [] { on_ranks(2, check_abort_of_graph); });
    run_case("nccl: the streams of a group are all in one capture, or in none",
             [] { on_ranks(2, check_streams_of_a_group); });
    run_reporting_case("nccl reports graphs with calls that do not match", [] {
        on_ranks(2, [](Rank &r) {
            Buffer<float> x(std::vector<float>(8));
            RankGraph graph(r, [&] {
                const size_t count = r.rank ? 4 : 8;
                CHECK(ncclAllReduce(x.p, x.p, count, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
            });
            graph.launch(r);
            CHECK(cudaStreamSynchronize(r.stream) == cudaSuccess);
        });
    });
    run_reporting_case("nccl reports an abort that waits for a graph", [] {
        on_ranks(2, [](Rank &r) {
            Buffer<float> x(std::vector<float>(8));
            RankGraph graph(
                r, [&] { CHECK(ncclAllReduce(x.p, x.p, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess); });
            r.destroy = false;
            CHECK(ncclCommAbort(r.comm) == ncclSuccess);
        });
    });
    run_reporting_case("nccl reports a graph with a call of a communicator that is gone", [] {
        on_ranks(2, [](Rank &r) {
            Buffer<float> x(std::vector<float>(8));
            RankGraph graph(
                r, [&] { CHECK(ncclAllReduce(x.p, x.p, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess); });
            r.destroy = false;
            CHECK(ncclCommDestroy(r.comm) == ncclSuccess);
            graph.launch(r);
            CHECK(cudaStreamSynchronize(r.stream) == cudaSuccess);
        });
    });
}

// ---- order between the libraries, which only the checker sees -------------------------------------------------------

#ifdef MTE_CHECK

// Runs in a process of its own, because the checker reports each kind of error of whole operations only once.
void run_reporting_child(const std::string &name, const std::function<void()> &body) {
    failures = 0;
    skip_reason = nullptr;
    const pid_t child = fork();
    if (child == 0) {
        const int before = mte::errors();
        body();
        _Exit(failures == 0 && mte::errors() > before ? 0 : 1);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    conclude(name);
}

// A product on one stream is reduced on another stream, with or without an event between them.
void check_order(Rank &r, bool wait) {
    cudaStream_t other;
    cudaEvent_t event;
    Gemm g((Shape()));
    const size_t count = g.d.ld * g.d.cols;
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess);
    CHECK(cublasLtMatmul(g.handle, g.desc, g.alpha, g.pa, g.la, g.pb, g.lb, g.beta, g.pc, g.lc, g.pd, g.ld, nullptr,
                         nullptr, 0, other) == CUBLAS_STATUS_SUCCESS);
    CHECK(cudaEventRecord(event, other) == cudaSuccess);
    if (wait) CHECK(cudaStreamWaitEvent(r.stream, event, 0) == cudaSuccess);
    CHECK(ncclAllReduce(g.pd, g.pd, count, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(cudaStreamDestroy(other) == cudaSuccess && cudaEventDestroy(event) == cudaSuccess);
}

// A graph whose collective does or does not wait for the memset of another stream.
void check_order_in_graph(Rank &r, bool wait) {
    const cudaStream_t side = new_stream();
    cudaEvent_t fork, join;
    Buffer<float> x(std::vector<float>(8));
    CHECK(cudaEventCreate(&fork) == cudaSuccess && cudaEventCreate(&join) == cudaSuccess);
    RankGraph graph(r, [&] {
        CHECK(cudaEventRecord(fork, r.stream) == cudaSuccess && cudaStreamWaitEvent(side, fork, 0) == cudaSuccess);
        CHECK(cudaMemsetAsync(x.p, 0, 32, side) == cudaSuccess && cudaEventRecord(join, side) == cudaSuccess);
        if (wait) CHECK(cudaStreamWaitEvent(r.stream, join, 0) == cudaSuccess);
        CHECK(ncclAllReduce(x.p, x.p, 8, ncclFloat, ncclSum, r.comm, r.stream) == ncclSuccess);
        CHECK(cudaStreamWaitEvent(r.stream, join, 0) == cudaSuccess);
    });
    for (int launch = 0; launch < 3; launch++) graph.launch(r);
    CHECK(cudaStreamSynchronize(r.stream) == cudaSuccess && cudaStreamDestroy(side) == cudaSuccess);
    CHECK(cudaEventDestroy(fork) == cudaSuccess && cudaEventDestroy(join) == cudaSuccess);
}

void test_order() {
    run_case("a collective in a graph that waits for a node of another stream",
             [] { on_ranks(2, [](Rank &r) { check_order_in_graph(r, true); }); });
    run_reporting_child("a collective in a graph that does not wait for a node of another stream is reported",
                        [] { on_ranks(2, [](Rank &r) { check_order_in_graph(r, false); }); });
    run_case("a collective that waits for the product it reduces",
             [] { on_ranks(2, [](Rank &r) { check_order(r, true); }); });
    run_reporting_child("a collective that does not wait for the product it reduces is reported",
                        [] { on_ranks(2, [](Rank &r) { check_order(r, false); }); });
    run_reporting_child("a product of unwritten memory is reported", [] {
        Gemm g((Shape()));
        CHECK(cudaFree(g.a.device) == cudaSuccess);
        CHECK(cudaMalloc(reinterpret_cast<void **>(&g.a.device), g.a.host.size()) == cudaSuccess);
        g.pa = g.a.device;
        CHECK(g.run_first() == CUBLAS_STATUS_SUCCESS);
    });
    run_reporting_child("two products on two streams that share a workspace are reported", [] {
        Gemm g((Shape())), h((Shape()));
        cudaStream_t streams[2];
        for (cudaStream_t &stream : streams)
            CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
        for (int i = 0; i < 2; i++) {
            Gemm &x = i ? h : g;
            CHECK(cublasLtMatmul(x.handle, x.desc, x.alpha, x.pa, x.la, x.pb, x.lb, x.beta, x.pc, x.lc, x.pd, x.ld,
                                 nullptr, g.workspace, g.workspace_bytes, streams[i]) == CUBLAS_STATUS_SUCCESS);
        }
        CHECK(cudaDeviceSynchronize() == cudaSuccess);
        for (cudaStream_t stream : streams) CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    });
}

#else
void test_order() {}
#endif

} // namespace

int main() {
    test_epilogues();
    test_algorithms();
    test_memory();
    test_refusals_of_problems();
    test_refusals_of_epilogues();
    test_refusals_of_calls();
    test_collectives();
    test_groups();
    test_states();
    test_windows();
    test_mismatches();
    test_replays();
    test_nodes();
    test_captures();
    test_isolation();
    test_prohibited_calls();
    test_capture_modes();
    test_graph_handles();
    test_nccl_graphs();
    test_order();
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    fflush(nullptr);
    // _Exit, because exit() would turn every reported error into a failure, and many errors here are intended.
    _Exit(failed ? 1 : 0);
}
