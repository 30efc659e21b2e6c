// test_engine.cu - tests the engine: small kernels and host programs against results computed on the host, and planted
// bugs that the engine must report.
//
//     test_engine               every case without its bug: must pass under every schedule, in every build
//     test_engine --bug NAME    the case with its bug planted: must fail in the builds that claim to see the bug
//     test_engine --list        the bugs, and for each the builds that claim to see it
//
// A case is a function of `bug`. It must succeed with bug == false, so a failure with bug == true is due to the bug.

#include "core.h"

#include <array>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

// ---- what the cases share ------------------------------------------------------------------------------------------

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                    \
            return false;                                                                                              \
        }                                                                                                              \
    } while (0)

#define CUDA(call) CHECK((call) == cudaSuccess)

template <class T> struct Buffer {
    T *p = nullptr;
    size_t count;

    explicit Buffer(size_t n) : count(n) { cudaMalloc(reinterpret_cast<void **>(&p), n * sizeof(T)); }
    explicit Buffer(const std::vector<T> &from) : Buffer(from.size()) {
        cudaMemcpy(p, from.data(), count * sizeof(T), cudaMemcpyHostToDevice);
    }
    ~Buffer() { cudaFree(p); }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;

    std::vector<T> download() const {
        std::vector<T> to(count);
        cudaDeviceSynchronize();
        cudaMemcpy(to.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost);
        return to;
    }
};

struct Stream {
    cudaStream_t s = nullptr;
    explicit Stream(unsigned flags = cudaStreamNonBlocking) { cudaStreamCreateWithFlags(&s, flags); }
    ~Stream() { cudaStreamDestroy(s); }
};

struct Event {
    cudaEvent_t e = nullptr;
    Event() { cudaEventCreateWithFlags(&e, cudaEventDisableTiming); }
    ~Event() { cudaEventDestroy(e); }
};

template <class T> struct Pinned {
    T *p = nullptr;
    explicit Pinned(size_t n) { cudaMallocHost(reinterpret_cast<void **>(&p), n * sizeof(T)); }
    ~Pinned() { cudaFreeHost(p); }
};

// Small integers: sums of their products are exact in every order of summation.
static std::vector<float> numbers(size_t n, int seed = 0) {
    std::vector<float> v(n);
    for (size_t i = 0; i < n; i++) v[i] = (float)((int)(i * 7 + (size_t)seed * 3) % 9 - 4);
    return v;
}

static bool launched() { return cudaPeekAtLastError() == cudaSuccess; }

static unsigned blocks_for(size_t n, unsigned threads) { return (unsigned)((n + threads - 1) / threads); }

// ---- reductions, shared memory, warps ------------------------------------------------------------------------------

__device__ static float warp_sum(float v, unsigned mask) {
    for (int lanes = 16; lanes; lanes /= 2) v += __shfl_xor_sync(mask, v, lanes);
    return v;
}

__global__ static void row_sums(float *sums, const float *x, int columns, bool bug, unsigned mask) {
    MT_SHARED(float, partial, 32);
    unsigned lane = threadIdx.x % 32;
    float sum = 0.0f;
    for (int i = (int)threadIdx.x; i < columns; i += (int)blockDim.x)
        sum += x[blockIdx.x * (unsigned)columns + (unsigned)i];
    sum = warp_sum(sum, mask);
    if (lane == 0) partial[threadIdx.x / 32] = sum;
    if (!bug) __syncthreads();
    sum = warp_sum(lane < blockDim.x / 32 ? partial[lane] : 0.0f, mask);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

static bool row_sums_case(unsigned threads, int columns, bool bug, unsigned mask) {
    const int rows = 3;
    std::vector<float> x = numbers((size_t)rows * (size_t)columns);
    Buffer<float> input(x);
    Buffer<float> sums(rows);
    MT_LAUNCH_KERNEL(row_sums, rows, threads, 0, nullptr, sums.p, input.p, columns, bug, mask);
    CHECK(launched());
    std::vector<float> got = sums.download();
    for (int r = 0; r < rows; r++) {
        float expected = 0.0f;
        for (int c = 0; c < columns; c++) expected += x[(size_t)(r * columns + c)];
        CHECK(got[(size_t)r] == expected);
    }
    return true;
}

static bool missing_syncthreads(bool bug) {
    return row_sums_case(128, 1000, bug, 0xffffffffu) && row_sums_case(256, 37, bug, 0xffffffffu);
}

static bool wrong_shuffle_mask(bool bug) { return row_sums_case(64, 77, false, bug ? 0x0000ffffu : 0xffffffffu); }

// Every lane writes a word and reads the word that its neighbour wrote. The bug: no __syncwarp between them.
__global__ static void rotate_in_warp(float *out, const float *in, bool bug) {
    MT_SHARED(float, s, 64);
    s[threadIdx.x] = in[threadIdx.x];
    if (!bug) __syncwarp();
    out[threadIdx.x] = s[threadIdx.x / 32 * 32 + (threadIdx.x + 1) % 32];
}

static bool missing_syncwarp(bool bug) {
    std::vector<float> x = numbers(64);
    Buffer<float> in(x);
    Buffer<float> out(64);
    MT_LAUNCH_KERNEL(rotate_in_warp, 1, 64, 0, nullptr, out.p, in.p, bug);
    std::vector<float> got = out.download();
    for (size_t i = 0; i < 64; i++) CHECK(got[i] == x[i / 32 * 32 + (i + 1) % 32]);
    return true;
}

// The bug: no barrier between two uses of the same shared array.
__global__ static void prefix_sums(float *out, const float *in, bool bug) {
    MT_SHARED(float, s, 128);
    unsigned i = threadIdx.x;
    s[i] = in[i];
    __syncthreads();
    for (unsigned distance = 1; distance < 128; distance *= 2) {
        float sum = s[i] + (i >= distance ? s[i - distance] : 0.0f);
        if (!bug) __syncthreads();
        s[i] = sum;
        __syncthreads();
    }
    out[i] = s[i];
}

static bool shared_reused_too_early(bool bug) {
    std::vector<float> x = numbers(128);
    Buffer<float> in(x);
    Buffer<float> out(128);
    MT_LAUNCH_KERNEL(prefix_sums, 1, 128, 0, nullptr, out.p, in.p, bug);
    std::vector<float> got = out.download();
    float sum = 0.0f;
    for (size_t i = 0; i < 128; i++) CHECK(got[i] == (sum += x[i]));
    return true;
}

// Transposes in tiles of odd pitch. The bug: threads outside the matrix do not write their element, but it is read.
__global__ static void transpose(float *out, const float *in, int rows, int columns, bool bug) {
    MT_SHARED(float, tile, 16 * 17);
    unsigned tx = threadIdx.x;
    unsigned ty = threadIdx.y;
    int row = (int)(blockIdx.y * 16 + ty);
    int column = (int)(blockIdx.x * 16 + tx);
    bool inside = row < rows && column < columns;
    if (inside) tile[ty * 17 + tx] = in[row * columns + column];
    __syncthreads();
    row = (int)(blockIdx.x * 16 + ty);
    column = (int)(blockIdx.y * 16 + tx);
    bool wanted = row < columns && column < rows;
    if (bug) wanted = row < columns && column <= rows && row * rows + column < rows * columns;
    if (wanted) out[row * rows + column] = tile[tx * 17 + ty];
}

static bool unwritten_shared_memory(bool bug) {
    const int rows = 37;
    const int columns = 21;
    std::vector<float> x = numbers(rows * columns);
    Buffer<float> in(x);
    Buffer<float> out(rows * columns);
    MT_LAUNCH_KERNEL(transpose, dim3(2, 3), dim3(16, 16), 0, nullptr, out.p, in.p, rows, columns, bug);
    std::vector<float> got = out.download();
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) CHECK(got[(size_t)(c * rows + r)] == x[(size_t)(r * columns + c)]);
    return true;
}

__global__ static void write_shared(float *out, int count) {
    MT_SHARED(float, s, 32);
    if ((int)threadIdx.x < count) s[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x % 32];
}

static bool shared_array_overrun(bool bug) {
    Buffer<float> out(64);
    MT_LAUNCH_KERNEL(write_shared, 1, 64, 0, nullptr, out.p, bug ? 33 : 32);
    for (float v : out.download()) CHECK(v == 1.0f);
    return true;
}

__global__ static void dynamic_shared(float *out, unsigned count) {
    MT_DYN_SHARED(float, s);
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) s[i] = (float)i;
    __syncthreads();
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) out[i] = s[count - 1 - i];
}

static bool dynamic_shared_case(unsigned count, int attribute_device, int launch_device) {
    size_t bytes = count * sizeof(float);
    if (attribute_device >= 0) {
        CUDA(cudaSetDevice(attribute_device));
        CUDA(cudaFuncSetAttribute((const void *)dynamic_shared, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)bytes));
    }
    CUDA(cudaSetDevice(launch_device));
    Buffer<float> out(count);
    MT_LAUNCH_KERNEL(dynamic_shared, 1, 96, bytes, nullptr, out.p, count);
    bool fine = cudaGetLastError() == cudaSuccess && out.download()[1] == (float)(count - 2);
    CUDA(cudaSetDevice(0));
    CHECK(fine);
    return true;
}

static bool too_much_shared_memory(bool bug) { return dynamic_shared_case(25000, bug ? -1 : 0, 0); }
static bool shared_limit_of_another_device(bool bug) { return dynamic_shared_case(20000, bug ? 0 : 1, 1); }

// Threads may exit before a barrier. The bug: they wait at another barrier instead.
__global__ static void half_barrier(float *out, bool bug) {
    MT_SHARED(float, s, 64);
    if (threadIdx.x >= 64 && !bug) return;
    if (threadIdx.x < 64) {
        s[threadIdx.x] = (float)threadIdx.x;
        __syncthreads();
        out[threadIdx.x] = s[63 - threadIdx.x];
    } else {
        __syncthreads();
    }
}

static bool divergent_barrier(bool bug) {
    Buffer<float> out(64);
    MT_LAUNCH_KERNEL(half_barrier, 1, 96, 0, nullptr, out.p, bug);
    CHECK(out.download()[5] == 58.0f);
    return launched();
}

__global__ static void half_warp(float *out, bool bug) {
    if (threadIdx.x < 16) __syncwarp(bug ? 0xffffffffu : 0x0000ffffu);
    else __syncwarp(0xffff0000u);
    __syncthreads();
    out[threadIdx.x] = 1.0f;
}

static bool warp_disagrees(bool bug) {
    Buffer<float> out(32);
    MT_LAUNCH_KERNEL(half_warp, 1, 32, 0, nullptr, out.p, bug);
    CHECK(out.download()[31] == 1.0f);
    return launched();
}

__global__ static void barrier_and_warp(float *out, bool bug) {
    if (threadIdx.x < 16 || !bug) __syncwarp();
    if (threadIdx.x >= 16 || !bug) __syncthreads();
    out[threadIdx.x] = 1.0f;
}

static bool threads_wait_for_each_other(bool bug) {
    Buffer<float> out(64);
    MT_LAUNCH_KERNEL(barrier_and_warp, 1, 64, 0, nullptr, out.p, bug);
    CHECK(out.download()[63] == 1.0f);
    return launched();
}

__global__ static void warp_functions(int *out) {
    int lane = (int)threadIdx.x;
    bool odd = lane % 2 != 0;
    unsigned all = 0xffffffffu;
    int right = __ballot_sync(all, odd) == 0xaaaaaaaau && __any_sync(all, odd) && !__all_sync(all, odd);
    right = right && __reduce_add_sync(all, lane) == 496 && __reduce_max_sync(all, lane) == 31;
    right = right && __reduce_min_sync(all, lane - 5) == -5 && __reduce_or_sync(all, 1u << lane) == all;
    right = right && __reduce_and_sync(all, 3u) == 3u && __reduce_xor_sync(all, (unsigned)lane) == 0;
    right = right && __shfl_sync(all, lane, 7) == 7 && __shfl_up_sync(all, lane, 3) == (lane < 3 ? lane : lane - 3);
    right = right && __shfl_down_sync(all, 2.0 * lane, 1, 8) == 2.0 * (lane % 8 == 7 ? lane : lane + 1);
    right = right && __shfl_xor_sync(all, (long long)lane, 1) == (lane ^ 1);
    unsigned mine = lane < 16 ? 0xffffu : 0xffff0000u;
    right = right && __popc(__ballot_sync(mine, 1)) == 16 && __syncthreads_count(odd) == 16;
    right = right && min(lane, 3) <= 3 && max(0.5f, (float)lane) >= 0.5f && __fdividef(1.0f, 4.0f) == 0.25f;
    right = right && __clz(1 << lane) == 31 - lane && __ffs(1 << lane) == lane + 1 &&
            __brev(1u << lane) == 0x80000000u >> lane;
    right = right && __float_as_int(1.0f) == 0x3f800000 && fabsf(rsqrtf(4.0f) * __expf(0.0f) - 0.5f) < 1e-6f;
    right = right && __syncthreads_or(lane == 3) && !__syncthreads_and(lane == 3);
    out[lane] = right;
}

static bool warp_functions_case(bool) {
    Buffer<int> out(32);
    MT_LAUNCH_KERNEL(warp_functions, 1, 32, 0, nullptr, out.p);
    for (int right : out.download()) CHECK(right);
    return launched();
}

// ---- global memory -------------------------------------------------------------------------------------------------

__global__ static void scale(float *out, const float *in, float factor, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) out[i] = factor * in[i];
}

static void launch_scale(float *out, const float *in, float factor, int n, cudaStream_t stream) {
    MT_LAUNCH_KERNEL(scale, blocks_for((size_t)n, 64), 64, 0, stream, out, in, factor, n);
}

// Scales four floats at a time. clang's UndefinedBehaviorSanitizer checks each access to a member; gcc's also checks
// copies of a float4.
__global__ static void scale_vectors(float *out, const float *in, int n, int vectors) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < vectors) {
        const float4 *from = reinterpret_cast<const float4 *>(in) + i;
        float4 *to = reinterpret_cast<float4 *>(out) + i;
        to->x = 2.0f * from->x;
        to->y = 2.0f * from->y;
        to->z = 2.0f * from->z;
        to->w = 2.0f * from->w;
    }
    int tail = 4 * vectors + i;
    if (tail < n) out[tail] = 2.0f * in[tail];
}

static bool scale_vectors_case(int n, int vectors, int shift) {
    std::vector<float> x = numbers((size_t)(n + shift));
    Buffer<float> in(x);
    Buffer<float> out((size_t)(n + shift));
    CUDA(cudaMemset(out.p, 0, out.count * sizeof(float)));
    MT_LAUNCH_KERNEL(scale_vectors, blocks_for((size_t)n, 32), 32, 0, nullptr, out.p + shift, in.p + shift, n, vectors);
    std::vector<float> got = out.download();
    for (int i = shift; i < n + shift; i++) CHECK(got[(size_t)i] == 2.0f * x[(size_t)i]);
    return launched();
}

static bool vector_tail_past_the_end(bool bug) { return scale_vectors_case(101, bug ? 26 : 25, 0); }
static bool misaligned_vector(bool bug) { return scale_vectors_case(96, 24, bug ? 1 : 4); }

__global__ static void histogram(int *counts, const int *values, int n, bool bug) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    if (bug) counts[values[i]] += 1;
    else atomicAdd(&counts[values[i]], 1);
}

static bool race_between_blocks(bool bug) {
    std::vector<int> values(500);
    for (size_t i = 0; i < values.size(); i++) values[i] = (int)(i % 7);
    Buffer<int> in(values);
    Buffer<int> counts(7);
    CUDA(cudaMemset(counts.p, 0, 7 * sizeof(int)));
    MT_LAUNCH_KERNEL(histogram, 500, 1, 0, nullptr, counts.p, in.p, 500, bug);
    std::vector<int> got = counts.download();
    for (int i = 0; i < 7; i++) CHECK(got[(size_t)i] == (i < 3 ? 72 : 71));
    return launched();
}

// Each block stores a partial sum; the last block to arrive adds all of them.
__global__ static void sum_by_last_block(float *total, float *partial, unsigned *arrived, const float *in, bool bug) {
    MT_SHARED(unsigned, ticket, 1);
    float sum = warp_sum(in[blockIdx.x * 32 + threadIdx.x], 0xffffffffu);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sum;
        if (!bug) __threadfence();
        ticket[0] = atomicInc(arrived, gridDim.x - 1);
    }
    __syncthreads();
    if (ticket[0] != gridDim.x - 1) return;
    sum = warp_sum(threadIdx.x < gridDim.x ? partial[threadIdx.x] : 0.0f, 0xffffffffu);
    if (threadIdx.x == 0) *total = sum;
}

static bool missing_threadfence(bool bug) {
    std::vector<float> x = numbers(10 * 32);
    Buffer<float> in(x);
    Buffer<float> partial(10);
    Buffer<float> total(1);
    Buffer<unsigned> arrived(std::vector<unsigned>{0});
    for (int repeat = 0; repeat < 2; repeat++)
        MT_LAUNCH_KERNEL(sum_by_last_block, 10, 32, 0, nullptr, total.p, partial.p, arrived.p, in.p, bug);
    float expected = 0.0f;
    for (float v : x) expected += v;
    CHECK(total.download()[0] == expected && arrived.download()[0] == 0);
    return launched();
}

__global__ static void all_atomics(int *i, unsigned *u, unsigned long long *l, float *f, double *d, __nv_bfloat16 *h) {
    int t = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    atomicAdd(&i[0], t);
    atomicMax(&i[1], t);
    atomicMin(&i[2], -t);
    atomicSub(&i[3], 1);
    atomicOr(&u[0], 1u << (t % 32));
    atomicAnd(&u[1], ~(1u << (t % 32)));
    atomicXor(&u[2], 1u);
    atomicExch(&u[3], 9u);
    atomicCAS(&u[4], 0u, 5u);
    atomicAdd(l, 1);
    atomicAdd(f, 1);
    atomicAdd(d, 0.5);
    atomicAdd(h, __float2bfloat16(1.0f));
}

static bool all_atomics_case(bool) {
    Buffer<int> i(std::vector<int>{0, 0, 0, 0});
    Buffer<unsigned> u(std::vector<unsigned>{0, ~0u, 0, 0, 0});
    Buffer<unsigned long long> l(std::vector<unsigned long long>{1ull << 40});
    Buffer<float> f(std::vector<float>{0.0f});
    Buffer<double> d(std::vector<double>{0.0});
    Buffer<__nv_bfloat16> h(std::vector<__nv_bfloat16>{__float2bfloat16(0.0f)});
    MT_LAUNCH_KERNEL(all_atomics, 2, 50, 0, nullptr, i.p, u.p, l.p, f.p, d.p, h.p);
    CHECK(i.download() == (std::vector<int>{4950, 99, -99, -100}));
    CHECK(u.download() == (std::vector<unsigned>{~0u, 0, 0, 9, 5}));
    CHECK(l.download()[0] == (1ull << 40) + 100 && f.download()[0] == 100.0f && d.download()[0] == 50.0);
    CHECK(__bfloat162float(h.download()[0]) == 100.0f);
    return launched();
}

// Stores that a sanitizer may miss: the result of a function, a structure, and memcpy.
__global__ static void store_everyhow(__nv_bfloat16 *b, __half *h, float4 *v, float4 *w, const float4 *in, int n) {
    for (int i = 0; i < n; i++) b[i] = __float2bfloat16_rn(in[i].x);
    for (int i = 0; i < n; i++) h[i] = __float2half_rn(in[i].y);
    for (int i = 0; i < n; i++) v[i] = in[i];
    memcpy(w, in, sizeof *w * (size_t)n);
}

static bool stores_are_seen(bool) {
    const int n = 5;
    std::vector<float> x = numbers(4 * n);
    Buffer<float> in(x);
    Buffer<float> v(4 * n);
    Buffer<float> w(4 * n);
    Buffer<__nv_bfloat16> b(n);
    Buffer<__half> h(n);
    MT_LAUNCH_KERNEL(store_everyhow, 1, 1, 0, nullptr, b.p, h.p, (float4 *)v.p, (float4 *)w.p, (const float4 *)in.p, n);
    CHECK(v.download() == x && w.download() == x);
    CHECK(__bfloat162float(b.download()[4]) == x[16] && __half2float(h.download()[4]) == x[17]);
    return launched();
}

static bool unwritten_device_memory(bool bug) {
    Buffer<float> in(100);
    Buffer<float> out(100);
    if (!bug) CUDA(cudaMemset(in.p, 0, 100 * sizeof(float)));
    launch_scale(out.p, in.p, 3.0f, 100, nullptr);
    for (float v : out.download()) CHECK(v == 0.0f);
    return launched();
}

static bool use_after_free(bool bug) {
    Buffer<float> out(10);
    Buffer<float> kept(numbers(10));
    float *in = nullptr;
    {
        Buffer<float> freed(numbers(10));
        in = bug ? freed.p : kept.p;
    }
    launch_scale(out.p, in, 1.0f, 10, nullptr);
    CHECK(out.download() == numbers(10));
    return launched();
}

struct TwoPointers {
    float *out;
    const float *in;
};

// The engine cannot check pointers inside a structure at the launch, only when they are used.
__global__ static void scale_struct(TwoPointers p, int n) {
    if ((int)threadIdx.x < n) p.out[threadIdx.x] = 2.0f * p.in[threadIdx.x];
}

static bool host_pointer_in_struct(bool bug) {
    std::vector<float> x = numbers(20);
    Buffer<float> in(x);
    Buffer<float> out(20);
    MT_LAUNCH_KERNEL(scale_struct, 1, 32, 0, nullptr, TwoPointers{out.p, bug ? x.data() : in.p}, 20);
    CHECK(out.download()[3] == 2.0f * x[3]);
    return launched();
}

static bool host_pointer_to_kernel(bool bug) {
    std::vector<float> x = numbers(20);
    Buffer<float> in(x);
    Buffer<float> out(20);
    launch_scale(out.p, bug ? x.data() : in.p, 2.0f, 20, nullptr);
    CHECK(out.download()[3] == 2.0f * x[3]);
    return launched();
}

static bool host_reads_device_memory(bool bug) {
    std::vector<float> x = numbers(20);
    Buffer<float> in(x);
    CUDA(cudaDeviceSynchronize());
    float v = bug ? *(volatile float *)(in.p + 3) : in.download()[3];
    CHECK(v == x[3]);
    return true;
}

static bool freed_twice(bool bug) {
    void *p = nullptr;
    CUDA(cudaMalloc(&p, 100));
    CUDA(cudaFree(p));
    if (bug) CUDA(cudaFree(p));
    return true;
}

static bool missing_peer_access(bool bug) {
    std::vector<float> x = numbers(20);
    Buffer<float> in(x);
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaSetDevice(1));
    cudaError_t enabled = bug ? cudaSuccess : cudaDeviceEnablePeerAccess(0, 0);
    Buffer<float> out(20);
    launch_scale(out.p, in.p, 2.0f, 20, nullptr);
    float got = out.download()[3];
    if (!bug) CUDA(cudaDeviceDisablePeerAccess(0));
    CUDA(cudaSetDevice(0));
    CHECK(enabled == cudaSuccess && got == 2.0f * x[3]);
    return launched();
}

// ---- cp.async, ldmatrix, mma ---------------------------------------------------------------------------------------

// c[m, n] = a[m, k] b, where b is [n, k], or [k, n] when Transposed. A block of two warps computes 32 x 16, in steps of
// 16 along k, with two buffers: one is filled while the other is multiplied.

enum { tile_m = 32, tile_n = 16, tile_k = 16, pitch = 24 };

__device__ static void mma(float *d, const uint32_t *a, const uint32_t *b, __nv_bfloat16) {
    mti_mma_16816_bf16(d, a, b);
}
__device__ static void mma(float *d, const uint32_t *a, const uint32_t *b, __half) { mti_mma_16816_f16(d, a, b); }

// Copies eight elements; writes zeros outside the matrix.
template <class T> __device__ void fetch(T *to, const T *matrix, int row, int column, int rows, int columns) {
    bool inside = row < rows && column < columns;
    mti_cp_async16(to, inside ? matrix + (size_t)row * (size_t)columns + column : matrix, inside ? 16 : 0);
}

template <class T, bool Transposed>
__device__ void fetch_tiles(T *a_tile, T *b_tile, const T *a, const T *b, int m, int n, int k, int step) {
    int row = (int)threadIdx.x / 2;
    int column = (int)threadIdx.x % 2 * 8;
    int m0 = (int)blockIdx.y * tile_m;
    int n0 = (int)blockIdx.x * tile_n;
    int k0 = step * tile_k;
    fetch(a_tile + row * pitch + column, a, m0 + row, k0 + column, m, k);
    if (threadIdx.x < 32) {
        T *to = b_tile + row * pitch + column;
        if (Transposed) fetch(to, b, k0 + row, n0 + column, k, n);
        else fetch(to, b, n0 + row, k0 + column, n, k);
    }
    mti_cp_async_commit();
}

template <class T, bool Transposed> __device__ void multiply_tiles(float (*c)[4], const T *a_tile, const T *b_tile) {
    int lane = (int)threadIdx.x % 32;
    int warp = (int)threadIdx.x / 32;
    uint32_t a[4];
    uint32_t b[4];
    mti_ldmatrix_x4(a, a_tile + (warp * 16 + lane % 16) * pitch + lane / 16 * 8);
    if (Transposed) mti_ldmatrix_x4_trans(b, b_tile + (lane / 8 % 2 * 8 + lane % 8) * pitch + lane / 16 * 8);
    else mti_ldmatrix_x4(b, b_tile + (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 8);
    mma(c[0], a, b, T());
    mma(c[1], a, b + 2, T());
}

template <class T, bool Transposed>
__global__ void gemm(float *out, const T *a, const T *b, int m, int n, int k, bool bug) {
    MT_SHARED(T, a_tiles, 2 * tile_m * pitch);
    MT_SHARED(T, b_tiles, 2 * tile_n * pitch);
    float c[2][4] = {};
    int steps = (k + tile_k - 1) / tile_k;
    fetch_tiles<T, Transposed>(a_tiles, b_tiles, a, b, m, n, k, 0);
    for (int step = 0; step < steps; step++) {
        int now = step % 2;
        int next = 1 - now;
        T *next_a = a_tiles + next * tile_m * pitch;
        T *next_b = b_tiles + next * tile_n * pitch;
        if (step + 1 < steps) fetch_tiles<T, Transposed>(next_a, next_b, a, b, m, n, k, step + 1);
        if (step + 1 < steps || bug) mti_cp_async_wait<1>();
        else mti_cp_async_wait<0>();
        __syncthreads();
        multiply_tiles<T, Transposed>(c, a_tiles + now * tile_m * pitch, b_tiles + now * tile_n * pitch);
        __syncthreads();
    }
    int lane = (int)threadIdx.x % 32;
    for (int i = 0; i < 8; i++) {
        int row = (int)blockIdx.y * tile_m + (int)threadIdx.x / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
        int column = (int)blockIdx.x * tile_n + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (row < m && column < n) out[row * n + column] = c[i / 4][i % 4];
    }
}

static __nv_bfloat16 element(float v, __nv_bfloat16) { return __float2bfloat16(v); }
static __half element(float v, __half) { return __float2half(v); }

template <class T> static std::vector<T> elements(const std::vector<float> &v) {
    std::vector<T> to;
    for (float f : v) to.push_back(element(f, T()));
    return to;
}

template <class T, bool Transposed> static bool gemm_case(int m, int n, int k, bool bug) {
    std::vector<float> a = numbers((size_t)(m * k), 1);
    std::vector<float> b = numbers((size_t)(n * k), 2);
    Buffer<T> device_a(elements<T>(a));
    Buffer<T> device_b(elements<T>(b));
    Buffer<float> out((size_t)(m * n));
    dim3 grid(blocks_for((size_t)n, (unsigned)tile_n), blocks_for((size_t)m, (unsigned)tile_m));
    MT_LAUNCH_KERNEL((gemm<T, Transposed>), grid, 64, 0, nullptr, out.p, device_a.p, device_b.p, m, n, k, bug);
    std::vector<float> got = out.download();
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float sum = 0.0f;
            for (int l = 0; l < k; l++) sum += a[(size_t)(i * k + l)] * b[(size_t)(Transposed ? l * n + j : j * k + l)];
            CHECK(got[(size_t)(i * n + j)] == sum);
        }
    return launched();
}

static bool missing_copy_wait(bool bug) {
    return gemm_case<__nv_bfloat16, false>(32, 16, 64, bug) && gemm_case<__half, true>(45, 24, 40, bug) &&
           gemm_case<__nv_bfloat16, true>(33, 40, 24, bug) && gemm_case<__half, false>(7, 9, 8, bug);
}

__global__ static void copy_shifted(float *out, const float *in, int shift) {
    MT_SHARED(float, s, 128);
    mti_cp_async16(&s[threadIdx.x * 4], in + threadIdx.x * 4 + shift, 16);
    mti_cp_async_commit();
    mti_cp_async_wait<0>();
    for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = s[threadIdx.x * 4 + i];
}

static bool copy_shifted_case(int shift, size_t elements_there) {
    std::vector<float> x = numbers(elements_there);
    Buffer<float> in(x);
    Buffer<float> out(128);
    MT_LAUNCH_KERNEL(copy_shifted, 1, 32, 0, nullptr, out.p, in.p, shift);
    CHECK(out.download()[9] == x[(size_t)(9 + shift)]);
    return launched();
}

static bool misaligned_async_copy(bool bug) { return copy_shifted_case(bug ? 1 : 4, 256); }
static bool async_copy_out_of_range(bool bug) { return copy_shifted_case(0, bug ? 126 : 128); }

__global__ static void load_matrices(uint32_t *out, bool bug) {
    MT_SHARED(uint32_t, s, 128);
    for (unsigned i = 0; i < 4; i++) s[threadIdx.x * 4 + i] = threadIdx.x * 4 + i;
    __syncwarp();
    uint32_t r[4] = {};
    if (!bug || threadIdx.x < 31) mti_ldmatrix_x4(r, s + threadIdx.x * 4);
    for (unsigned i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = r[i];
}

static bool ldmatrix_without_all_lanes(bool bug) {
    Buffer<uint32_t> out(128);
    MT_LAUNCH_KERNEL(load_matrices, 1, 32, 0, nullptr, out.p, bug);
    std::vector<uint32_t> got = out.download();
    for (uint32_t lane = 0; lane < 32; lane++)
        for (uint32_t i = 0; i < 4; i++) CHECK(got[lane * 4 + i] == i * 32 + lane);
    return launched();
}

// ---- streams, events, copies ---------------------------------------------------------------------------------------

// One stream produces, the other consumes.
static bool two_streams(bool wait, bool record_on_producer) {
    const int n = 200;
    std::vector<float> x = numbers(n);
    Buffer<float> in(x);
    Buffer<float> middle(n);
    Buffer<float> out(n);
    Stream producer;
    Stream consumer;
    Event produced;
    CUDA(cudaMemset(middle.p, 0, n * sizeof(float)));
    CUDA(cudaDeviceSynchronize());
    launch_scale(middle.p, in.p, 2.0f, n, producer.s);
    CUDA(cudaEventRecord(produced.e, record_on_producer ? producer.s : consumer.s));
    if (wait) CUDA(cudaStreamWaitEvent(consumer.s, produced.e, 0));
    launch_scale(out.p, middle.p, 3.0f, n, consumer.s);
    CUDA(cudaStreamSynchronize(consumer.s));
    std::vector<float> got = out.download();
    for (size_t i = 0; i < n; i++) CHECK(got[i] == 6.0f * x[i]);
    return launched();
}

static bool missing_stream_wait(bool bug) { return two_streams(!bug, true); }
static bool event_on_the_wrong_stream(bool bug) { return two_streams(true, !bug); }

// The default stream is ordered with blocking streams, but not with non-blocking ones.
static bool default_stream_does_not_order(bool bug) {
    const int n = 50;
    Buffer<float> in(numbers(n));
    Buffer<float> out(n);
    Stream stream(bug ? cudaStreamNonBlocking : cudaStreamDefault);
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaMemsetAsync(in.p, 0, n * sizeof(float), nullptr));
    launch_scale(out.p, in.p, 2.0f, n, stream.s);
    CUDA(cudaMemsetAsync(in.p, 0xff, n * sizeof(float), nullptr));
    for (float v : out.download()) CHECK(v == 0.0f);
    return launched();
}

static bool pinned_source_reused(bool bug) {
    const size_t n = 64;
    Pinned<float> staging(n);
    Buffer<float> first(n);
    Buffer<float> second(n);
    Stream stream;
    for (size_t i = 0; i < n; i++) staging.p[i] = 1.0f;
    CUDA(cudaMemcpyAsync(first.p, staging.p, n * sizeof(float), cudaMemcpyHostToDevice, stream.s));
    if (!bug) CUDA(cudaStreamSynchronize(stream.s));
    for (size_t i = 0; i < n; i++) staging.p[i] = 2.0f;
    CUDA(cudaMemcpyAsync(second.p, staging.p, n * sizeof(float), cudaMemcpyHostToDevice, stream.s));
    CUDA(cudaStreamSynchronize(stream.s));
    CHECK(first.download()[0] == 1.0f && second.download()[0] == 2.0f);
    return true;
}

static bool result_read_too_early(bool bug) {
    Pinned<float> result(4);
    Buffer<float> from(std::vector<float>{1.0f, 2.0f, 3.0f, 4.0f});
    Stream stream;
    Event copied;
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaMemcpyAsync(result.p, from.p, 16, cudaMemcpyDeviceToHost, stream.s));
    CUDA(cudaEventRecord(copied.e, stream.s));
    if (!bug) CUDA(cudaEventSynchronize(copied.e));
    CHECK(result.p[2] == 3.0f);
    return true;
}

static bool wrong_copy_kind(bool bug) {
    Buffer<float> from(numbers(4));
    float to[4] = {};
    CUDA(cudaMemcpy(to, from.p, sizeof to, bug ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost));
    CHECK(to[1] == numbers(4)[1]);
    return true;
}

static bool copy_past_the_end(bool bug) {
    Buffer<float> to(4);
    float from[8] = {1.0f, 2.0f, 3.0f, 4.0f};
    CUDA(cudaMemcpy(to.p, from, bug ? 20 : 16, cudaMemcpyHostToDevice));
    CHECK(to.download()[3] == 4.0f);
    return true;
}

static bool destroyed_stream_used(bool bug) {
    Buffer<float> p(4);
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));
    if (bug) CUDA(cudaStreamDestroy(stream));
    CUDA(cudaMemsetAsync(p.p, 0, 16, stream));
    if (!bug) CUDA(cudaStreamDestroy(stream));
    CHECK(p.download()[0] == 0.0f);
    return true;
}

static bool cuda_inside_host_function(bool bug) {
    struct Record {
        bool bug;
        int calls;
    };
    Record record = {bug, 0};
    Stream stream;
    cudaHostFn_t function = [](void *argument) {
        Record *r = static_cast<Record *>(argument);
        r->calls++;
        size_t available;
        size_t total;
        if (r->bug) cudaMemGetInfo(&available, &total);
    };
    CUDA(cudaLaunchHostFunc(stream.s, function, &record));
    CUDA(cudaStreamSynchronize(stream.s));
    CHECK(record.calls == 1);
    return true;
}

static bool copies_in_two_dimensions(bool) {
    std::vector<float> x = numbers(6 * 10);
    Buffer<float> in(x);
    Buffer<float> out(3 * 10);
    CUDA(cudaMemcpy2DAsync(out.p, 12, in.p + 2, 24, 12, 10, cudaMemcpyDeviceToDevice, nullptr));
    std::vector<float> got = out.download();
    for (size_t r = 0; r < 10; r++)
        for (size_t c = 0; c < 3; c++) CHECK(got[r * 3 + c] == x[r * 6 + 2 + c]);
    size_t most = 0x7fffffff;
    CUDA(cudaMemcpy2DAsync(out.p, most, in.p, most, 12, 1, cudaMemcpyDeviceToDevice, nullptr));
    for (int row = 0; row < 2; row++) {
        size_t to = row ? most + 1 : 12, from = row ? 12 : most + 1;
        CHECK(cudaMemcpy2DAsync(out.p, to, in.p, from, 12, 1, cudaMemcpyDefault, nullptr) ==
              cudaErrorInvalidPitchValue);
        CHECK(cudaMemcpy2D(out.p, to, in.p, from, 12, 1, cudaMemcpyDefault) == cudaErrorInvalidPitchValue);
    }
    CHECK(cudaMemcpy2D(out.p, 12, in.p, 8, 12, 1, cudaMemcpyDefault) == cudaErrorInvalidPitchValue);
    cudaGetLastError();
    return true;
}

static bool polling_makes_progress(bool) {
    Buffer<float> p(4);
    Stream stream;
    Event done;
    CUDA(cudaMemsetAsync(p.p, 0, 16, stream.s));
    CUDA(cudaEventRecord(done.e, stream.s));
    int polls = 0;
    while (cudaEventQuery(done.e) == cudaErrorNotReady) CHECK(++polls < 1000);
    while (cudaStreamQuery(stream.s) == cudaErrorNotReady) CHECK(++polls < 1000);
    return launched();
}

// ---- graphs --------------------------------------------------------------------------------------------------------

struct Graph {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ~Graph() {
        if (exec) cudaGraphExecDestroy(exec);
        if (graph) cudaGraphDestroy(graph);
    }
    cudaError_t end(cudaStream_t stream) {
        cudaError_t error = cudaStreamEndCapture(stream, &graph);
        return error == cudaSuccess ? cudaGraphInstantiate(&exec, graph, 0) : error;
    }
};

static void scale_on(Stream &stream, Buffer<float> &out, Buffer<float> &in, float factor) {
    launch_scale(out.p, in.p, factor, (int)out.count, stream.s);
}

static cudaError_t wait_for(Stream &stream, Stream &other, Event &event) {
    cudaError_t error = cudaEventRecord(event.e, other.s);
    return error == cudaSuccess ? cudaStreamWaitEvent(stream.s, event.e, 0) : error;
}

__global__ static void scale_by(float *out, const float *in, const float *factor, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) out[i] = *factor * in[i];
}

__global__ static void add(float *out, const float *a, const float *b, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) out[i] = a[i] + b[i];
}

// work[3] = 12 in, over two streams that fork and join.
static bool capture_fork(Graph *graph, Stream &s, Stream &side, Buffer<float> &in, Buffer<float> *work, bool bug) {
    Event forked, joined;
    CUDA(cudaStreamBeginCapture(s.s, cudaStreamCaptureModeGlobal));
    scale_on(s, work[0], in, 2.0f);
    CUDA(wait_for(side, s, forked));
    scale_on(side, work[1], work[0], 2.0f);
    scale_on(s, work[2], work[0], 4.0f);
    if (bug) CUDA(cudaEventRecord(joined.e, s.s)); // the node that adds does not depend on the side stream
    else CUDA(cudaEventRecord(joined.e, side.s));
    CUDA(cudaStreamWaitEvent(s.s, joined.e, 0));
    MT_LAUNCH_KERNEL(add, 1, 64, 0, s.s, work[3].p, work[1].p, work[2].p, (int)in.count);
    CUDA(wait_for(s, side, joined));
    CUDA(graph->end(s.s));
    return launched();
}

// Each launch reads what the memory has then, and nothing runs while the streams are captured.
static bool missing_graph_edge(bool bug) {
    const int n = 40;
    Stream s, side;
    Pinned<float> x(n);
    Buffer<float> in(n), work[4] = {Buffer<float>(n), Buffer<float>(n), Buffer<float>(n), Buffer<float>(n)};
    Graph graph;
    for (Buffer<float> &b : work) CUDA(cudaMemset(b.p, 0, n * sizeof(float)));
    CUDA(cudaDeviceSynchronize());
    CHECK(capture_fork(&graph, s, side, in, work, bug));
    long before = mte::kernels_replayed();
    CHECK(work[0].download()[3] == 0.0f);
    size_t nodes = 0;
    CUDA(cudaGraphGetNodes(graph.graph, nullptr, &nodes));
    CHECK(nodes == 4);
    for (int launch = 1; launch <= 3; launch++) {
        for (int i = 0; i < n; i++) x.p[i] = (float)(launch * i);
        CUDA(cudaMemcpyAsync(in.p, x.p, n * sizeof(float), cudaMemcpyHostToDevice, s.s));
        CUDA(cudaGraphLaunch(graph.exec, s.s));
        CUDA(cudaMemcpyAsync(x.p, work[3].p, n * sizeof(float), cudaMemcpyDeviceToHost, s.s));
        CUDA(cudaStreamSynchronize(s.s));
        for (int i = 0; i < n; i++) CHECK(x.p[i] == 12.0f * (float)(launch * i));
        CHECK(mte::kernels_replayed() == before + 4 * launch);
    }
    return launched();
}

// Arguments are captured by value. A number that changes from launch to launch must be in memory of the device.
static bool graph_keeps_arguments(bool bug) {
    const int n = 40;
    Stream s;
    Buffer<float> in(numbers(n)), out(n), factor(std::vector<float>{2.0f});
    Graph graph;
    int launches = 0;
    float now = 2.0f;
    long before = mte::kernels_replayed();
    CUDA(cudaDeviceSynchronize());
    mte::on_launch([&](const char *) { launches++; });
    CUDA(cudaStreamBeginCapture(s.s, cudaStreamCaptureModeGlobal));
    if (bug) scale_on(s, out, in, now);
    else MT_LAUNCH_KERNEL(scale_by, 1, 64, 0, s.s, out.p, in.p, factor.p, n);
    CUDA(graph.end(s.s));
    for (now = 3.0f; now < 6.0f; now++) {
        CUDA(cudaMemcpyAsync(factor.p, &now, sizeof now, cudaMemcpyHostToDevice, s.s));
        CUDA(cudaGraphLaunch(graph.exec, s.s));
        CHECK(out.download()[5] == now * numbers(n)[5]);
    }
    mte::on_launch(nullptr);
    CHECK(launches == 1 && mte::kernels_replayed() == before + 3);
    return launched();
}

static bool graph_uses_freed_memory(bool bug) {
    Stream s;
    Buffer<float> out(20);
    Graph graph;
    auto in = std::make_unique<Buffer<float>>(numbers(20));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaStreamBeginCapture(s.s, cudaStreamCaptureModeGlobal));
    scale_on(s, out, *in, 2.0f);
    CUDA(graph.end(s.s));
    if (bug) in.reset();
    CUDA(cudaGraphLaunch(graph.exec, s.s));
    CHECK(out.download()[3] == 2.0f * numbers(20)[3]);
    return launched();
}

// Launches of one executable graph are ordered. Two executable graphs in two streams are not.
static bool graphs_in_two_streams(bool bug) {
    Stream s, other;
    Buffer<float> x(numbers(20)), y(20);
    Graph graph, second;
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaStreamBeginCapture(s.s, cudaStreamCaptureModeGlobal));
    scale_on(s, y, x, 2.0f);
    scale_on(s, x, y, 3.0f);
    CUDA(graph.end(s.s));
    CUDA(cudaGraphInstantiate(&second.exec, graph.graph, 0));
    CUDA(cudaGraphLaunch(graph.exec, s.s));
    CUDA(cudaGraphLaunch(bug ? second.exec : graph.exec, other.s));
    CHECK(x.download()[3] == 36.0f * numbers(20)[3]);
    return launched();
}

// ---- devices, ranks, errors ----------------------------------------------------------------------------------------

static bool looks_like_sm_90(bool) {
    int value = 0;
    CUDA(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 3));
    CHECK(value == 9);
    CUDA(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    CHECK(value == 227 * 1024);
    cudaDeviceProp properties;
    CUDA(cudaGetDeviceProperties(&properties, 0));
    CHECK(properties.multiProcessorCount == 132 && properties.major == 9);
    CHECK(cudaSetDevice(99) == cudaErrorInvalidDevice && cudaGetLastError() == cudaErrorInvalidDevice);
    CHECK(cudaGetLastError() == cudaSuccess && !strcmp(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory"));
    void *p = nullptr;
    CHECK(cudaMalloc(&p, (size_t)1 << 45) == cudaErrorMemoryAllocation && !p);
    cudaGetLastError();
    MT_LAUNCH_KERNEL(scale, 1, 2048, 0, nullptr, nullptr, nullptr, 1.0f, 0);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
    return true;
}

// Two ranks, which are host threads with a device and a stream each, add their vectors in one operation.
struct SumOfRanks {
    mte::Rendezvous *rendezvous = nullptr;
    std::array<float *, 2> vectors = {};
    static constexpr size_t count = 10;

    void run() {
        for (size_t i = 0; i < count; i++) {
            float sum = 0.0f;
            for (float *v : vectors) sum += v[i];
            for (float *v : vectors) v[i] = sum;
        }
    }

    void join(int rank, float *vector, cudaStream_t stream) {
        mte::Guard guard;
        if (!rendezvous) rendezvous = mte::rendezvous_new(2, "sum of ranks", [this] { run(); });
        vectors[(size_t)rank] = vector;
        mte::enqueue_rendezvous(stream, rendezvous);
    }
};

static bool one_rank(SumOfRanks *sum, int rank, bool absent) {
    CUDA(cudaSetDevice(rank));
    std::vector<float> x = numbers(SumOfRanks::count, rank);
    Buffer<float> vector(x);
    Stream stream;
    CUDA(cudaDeviceSynchronize());
    launch_scale(vector.p, vector.p, 2.0f, (int)SumOfRanks::count, stream.s);
    if (absent) return true;
    sum->join(rank, vector.p, stream.s);
    launch_scale(vector.p, vector.p, 3.0f, (int)SumOfRanks::count, stream.s);
    CUDA(cudaStreamSynchronize(stream.s));
    std::vector<float> other = numbers(SumOfRanks::count, 1 - rank);
    std::vector<float> got = vector.download();
    for (size_t i = 0; i < x.size(); i++) CHECK(got[i] == 6.0f * (x[i] + other[i]));
    return launched();
}

static bool rank_does_not_come(bool bug) {
    SumOfRanks sum;
    bool fine[2] = {};
    std::thread other([&] { fine[1] = one_rank(&sum, 1, bug); });
    std::thread first([&] { fine[0] = one_rank(&sum, 0, false); });
    other.join();
    first.join();
    return fine[0] && fine[1];
}

#include "test_hopper.h"

// ---- the list ------------------------------------------------------------------------------------------------------

struct Case {
    const char *name;
    bool (*run)(bool bug);
    const char *seen_by; // builds that claim to see the bug; NULL: the case has no bug
};

#define EVERY "fast asan checked"
#define CASE(name, seen_by)                                                                                            \
    { #name, name, seen_by }

static const Case cases[] = {
    CASE(missing_syncthreads, EVERY),
    CASE(shared_reused_too_early, EVERY),
    CASE(missing_syncwarp, EVERY),
    CASE(wrong_shuffle_mask, EVERY),
    CASE(warp_disagrees, EVERY),
    CASE(divergent_barrier, EVERY),
    CASE(threads_wait_for_each_other, EVERY),
    CASE(unwritten_shared_memory, EVERY),
    CASE(unwritten_device_memory, EVERY),
    CASE(shared_array_overrun, EVERY),
    CASE(too_much_shared_memory, EVERY),
    CASE(shared_limit_of_another_device, EVERY),
    CASE(vector_tail_past_the_end, "asan checked"),
    CASE(misaligned_vector, "asan"),
    CASE(race_between_blocks, "checked"),
    CASE(missing_threadfence, "checked"),
    CASE(missing_copy_wait, EVERY),
    CASE(misaligned_async_copy, EVERY),
    CASE(async_copy_out_of_range, EVERY),
    CASE(ldmatrix_without_all_lanes, EVERY),
    CASE(no_proxy_fence, EVERY),
    CASE(late_proxy_fence, EVERY),
    CASE(no_copy_wait, EVERY),
    CASE(no_full_wait, EVERY),
    CASE(stale_parity, EVERY),
    CASE(no_empty_wait, EVERY),
    CASE(early_empty_arrival, EVERY),
    CASE(no_wgmma_wait, EVERY),
    CASE(short_wgmma_wait, EVERY),
    CASE(no_commit, EVERY),
    CASE(accumulator_written, EVERY),
    CASE(register_overwritten, EVERY),
    CASE(no_wgmma_fence, EVERY),
    CASE(wrong_swizzle, EVERY),
    CASE(rows_of_the_other_warpgroup, EVERY),
    CASE(warp_missing, EVERY),
    CASE(warp_exits, EVERY),
    CASE(descriptors_differ, EVERY),
    CASE(tile_not_aligned, EVERY),
    CASE(mbarrier_not_initialised, EVERY),
    CASE(mbarrier_init_unordered, EVERY),
    CASE(mbarrier_count_too_small, EVERY),
    CASE(mbarrier_count_too_large, EVERY),
    CASE(mbarrier_overwritten, EVERY),
    CASE(registers_not_released, EVERY),
    CASE(more_registers_by_dec, EVERY),
    CASE(fewer_registers_by_inc, EVERY),
    CASE(registers_of_three_warps, EVERY),
    CASE(registers_twice_too_many, EVERY),
    CASE(exit_with_products, EVERY),
    CASE(stores_without_proxy_fence, "checked"),
    CASE(store_before_the_wait, EVERY),
    CASE(store_unordered_with_product, "checked"),
    CASE(ring_without_full_wait, EVERY),
    CASE(ring_without_empty_wait, EVERY),
    CASE(ring_without_syncwarp, "checked"),
    CASE(ring_arrives_before_store, EVERY),
    CASE(same_phase_twice, EVERY),
    CASE(phase_over_by_two, EVERY),
    CASE(named_barrier_of_too_many, EVERY),
    CASE(named_barrier_counts_differ, EVERY),
    CASE(named_barrier_without_sync, EVERY),
    CASE(named_barrier_without_sync_back, EVERY),
    CASE(named_barrier_entered_twice, EVERY),
    CASE(named_barrier_of_one_lane, EVERY),
    CASE(named_barrier_without_waiters, EVERY),
    CASE(use_after_free, EVERY),
    CASE(freed_twice, EVERY),
    CASE(host_pointer_to_kernel, EVERY),
    CASE(host_pointer_in_struct, "checked"),
    CASE(host_reads_device_memory, EVERY),
    CASE(missing_peer_access, EVERY),
    CASE(missing_stream_wait, EVERY),
    CASE(event_on_the_wrong_stream, EVERY),
    CASE(default_stream_does_not_order, EVERY),
    CASE(pinned_source_reused, EVERY),
    CASE(result_read_too_early, EVERY),
    CASE(wrong_copy_kind, EVERY),
    CASE(copy_past_the_end, EVERY),
    CASE(destroyed_stream_used, EVERY),
    CASE(cuda_inside_host_function, EVERY),
    CASE(missing_graph_edge, EVERY),
    CASE(graph_keeps_arguments, EVERY),
    CASE(graph_uses_freed_memory, EVERY),
    CASE(graphs_in_two_streams, "checked"),
    CASE(rank_does_not_come, EVERY),
    CASE(warp_functions_case, nullptr),
    CASE(all_atomics_case, nullptr),
    CASE(stores_are_seen, nullptr),
    CASE(copies_in_two_dimensions, nullptr),
    CASE(polling_makes_progress, nullptr),
    CASE(looks_like_sm_90, nullptr),
};

static bool run_case(const Case &c, bool bug) {
    bool fine = c.run(bug);
    fine = cudaDeviceSynchronize() == cudaSuccess && fine;
    cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) fprintf(stderr, "%s: %s\n", c.name, cudaGetErrorString(error));
    return fine && error == cudaSuccess;
}

static int run_all() {
    int failed = 0;
    for (const Case &c : cases) {
        int errors_before = mte::errors();
        bool fine = run_case(c, false) && mte::errors() == errors_before;
        if (!fine) fprintf(stderr, "%s failed\n", c.name);
        failed += !fine;
    }
    return failed != 0;
}

static int run_bug(const std::string &name) {
    for (const Case &c : cases)
        if (c.name == name) return run_case(c, true) && mte::errors() == 0 ? 0 : 1;
    fprintf(stderr, "no bug is called %s\n", name.c_str());
    return 2;
}

static int list() {
    for (const Case &c : cases)
        if (c.seen_by) printf("%s %s\n", c.name, c.seen_by);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 1) return run_all();
    if (argc == 2 && !strcmp(argv[1], "--list")) return list();
    if (argc == 3 && !strcmp(argv[1], "--bug")) return run_bug(argv[2]);
    fprintf(stderr, "usage: test_engine [--list | --bug NAME]\n");
    return 2;
}
