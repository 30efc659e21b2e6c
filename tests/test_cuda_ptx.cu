/* test_cuda_ptx.cu - tests the wrappers of PTX instructions against the layouts in the PTX manual (9.7). Run it
   first on a new GPU (sm_80 or later).
     On a GPU:       nvcc -std=c++17 -O2 -arch=native -I. tests/test_cuda_ptx.cu -lcublasLt
     Without a GPU:  the engine in tests/engine/ runs the same file on a CPU, which tests the engine's models of them.
  */

#define MEGATRON_IMPLEMENTATION
#include "mt_kernels.cuh"

#include "mt_test.h"

#include <math.h>

#define CUDA_OK(call)                                                                                                  \
    do {                                                                                                               \
        cudaError_t got_ = (call);                                                                                     \
        if (got_ != cudaSuccess) fail_msg("%s: %s", #call, cudaGetErrorString(got_));                                  \
    } while (0)

static void *to_gpu(const void *host, size_t bytes) {
    void *p = NULL;
    CUDA_OK(cudaMalloc(&p, bytes));
    CUDA_OK(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice));
    return p;
}

/* Copies a kernel's results to the host and frees the device memory. */
static void from_gpu(void *host, void *p, size_t bytes) {
    CUDA_OK(cudaGetLastError());
    CUDA_OK(cudaDeviceSynchronize());
    CUDA_OK(cudaMemcpy(host, p, bytes, cudaMemcpyDeviceToHost));
    CUDA_OK(cudaFree(p));
}

/* ---- cp.async ---------------------------------------------------------------------------------------------------- */

#define COPIES 17 /* copies of 0 to 16 bytes */

/* Thread t copies t bytes, and zeros up to 16. */
static __global__ void copy_kernel(const unsigned char *from, unsigned char *to) {
    MT_SHARED(mti_words, room, COPIES);
    int t = (int)threadIdx.x;
    for (int i = 0; i < 4; i++) room[t].w[i] = 0xffffffffu;
    mti_cp_async16(&room[t], from + 16 * t, t);
    mti_cp_async_commit();
    mti_cp_async_wait<0>();
    *(mti_words *)(to + 16 * t) = room[t];
}

static void test_cp_async(void **state) {
    unsigned char from[16 * COPIES], to[16 * COPIES];
    (void)state;
    for (size_t i = 0; i < sizeof from; i++) from[i] = (unsigned char)(1 + i % 251);
    unsigned char *in = (unsigned char *)to_gpu(from, sizeof from), *out = (unsigned char *)to_gpu(from, sizeof from);
    MT_LAUNCH_KERNEL(copy_kernel, 1, COPIES, 0, 0, in, out);
    from_gpu(to, out, sizeof to);
    CUDA_OK(cudaFree(in));
    for (int i = 0; i < 16 * COPIES; i++) assert_int_equal(to[i], i % 16 < i / 16 ? from[i] : 0);
}

/* A wait for all groups except the last makes the data of the earlier groups available, and after a barrier also that
   of other threads. */
static __global__ void groups_kernel(const mti_words *from, mti_words *to) {
    MT_SHARED(mti_words, first, 32);
    MT_SHARED(mti_words, second, 32);
    int t = (int)threadIdx.x;
    mti_cp_async16(&first[t], from + t, 16);
    mti_cp_async_commit();
    mti_cp_async16(&second[t], from + 32 + t, 16);
    mti_cp_async_commit();
    mti_cp_async_wait<1>();
    __syncthreads();
    to[t] = first[31 - t];
    mti_cp_async_wait<0>();
    __syncthreads();
    to[32 + t] = second[31 - t];
}

static void test_cp_async_groups(void **state) {
    mti_words from[64], to[64];
    (void)state;
    for (uint32_t i = 0; i < 64; i++)
        for (uint32_t j = 0; j < 4; j++) from[i].w[j] = 4 * i + j;
    mti_words *in = (mti_words *)to_gpu(from, sizeof from), *out = (mti_words *)to_gpu(from, sizeof from);
    MT_LAUNCH_KERNEL(groups_kernel, 1, 32, 0, 0, in, out);
    from_gpu(to, out, sizeof to);
    CUDA_OK(cudaFree(in));
    for (int i = 0; i < 64; i++) assert_memory_equal(&to[i], &from[i / 32 * 32 + 31 - i % 32], sizeof to[i]);
}

/* ---- ldmatrix ---------------------------------------------------------------------------------------------------- */

#define PITCH 24 /* elements per row: 48 bytes */

/* Four matrices of 8 rows lie below each other. Lane l passes the address of row l. */
static __global__ void ldmatrix_kernel(const uint16_t *from, uint32_t *to, int trans) {
    MT_SHARED(mti_words, room, 32 * PITCH / 8);
    uint16_t *tile = (uint16_t *)room;
    int lane = (int)threadIdx.x;
    uint32_t r[4];
    for (int c = 0; c < PITCH / 8; c++)
        room[lane * (PITCH / 8) + c] = ((const mti_words *)from)[lane * (PITCH / 8) + c];
    __syncthreads();
    if (trans) mti_ldmatrix_x4_trans(r, tile + lane * PITCH + 8);
    else mti_ldmatrix_x4(r, tile + lane * PITCH + 8);
    for (int i = 0; i < 4; i++) to[lane * 4 + i] = r[i];
}

static void ldmatrix(int trans) {
    uint16_t from[32 * PITCH];
    uint32_t to[128];
    for (int i = 0; i < 32 * PITCH; i++) from[i] = (uint16_t)i;
    uint16_t *in = (uint16_t *)to_gpu(from, sizeof from);
    uint32_t *out = (uint32_t *)to_gpu(from, sizeof to);
    MT_LAUNCH_KERNEL(ldmatrix_kernel, 1, 32, 0, 0, in, out, trans);
    from_gpu(to, out, sizeof to);
    CUDA_OK(cudaFree(in));
    for (int i = 0; i < 256; i++) { /* half i % 2 of register i / 2 % 4 of lane i / 8 */
        int lane = i / 8, matrix = i / 2 % 4, row = lane / 4, col = lane % 4 * 2 + i % 2;
        int expected = (matrix * 8 + (trans ? col : row)) * PITCH + 8 + (trans ? row : col);
        assert_int_equal(to[i / 2] >> (i % 2 * 16) & 0xffff, expected);
    }
}

static void test_ldmatrix(void **state) {
    (void)state;
    ldmatrix(0);
}

static void test_ldmatrix_trans(void **state) {
    (void)state;
    ldmatrix(1);
}

/* ---- mma --------------------------------------------------------------------------------------------------------- */

static __global__ void mma_kernel(const uint32_t *a, const uint32_t *b, float *d, int bf16) {
    int lane = (int)threadIdx.x;
    uint32_t x[4], y[2];
    float acc[4];
    for (int i = 0; i < 4; i++) x[i] = a[lane * 4 + i], acc[i] = d[lane * 4 + i];
    for (int i = 0; i < 2; i++) y[i] = b[lane * 2 + i];
    if (bf16) mti_mma_16816_bf16(acc, x, y);
    else mti_mma_16816_f16(acc, x, y);
    for (int i = 0; i < 4; i++) d[lane * 4 + i] = acc[i];
}

/* Small integers are exact in both 16-bit types, and so are sums of their products. */
static uint16_t small(int x, int bf16) { return bf16 ? mti_f32_to_bf16((float)x) : mti_f32_to_f16((float)x); }
static int a_of(int row, int k) { return (row * 7 + k * 3) % 13 - 6; }
static int b_of(int k, int col) { return (k * 5 + col * 11) % 17 - 8; }
static int c_of(int row, int col) { return row * 8 + col; }

static void mma(int bf16) {
    uint16_t a[32 * 8], b[32 * 4];
    float d[32 * 4];
    for (int i = 0; i < 32 * 8; i++) { /* names as in the manual: groupID and threadID_in_group */
        int group = i / 8 / 4, thread = i / 8 % 4, e = i % 8;
        int row = e < 2 || (e >= 4 && e < 6) ? group : group + 8, col = thread * 2 + (e & 1) + (e < 4 ? 0 : 8);
        a[i] = small(a_of(row, col), bf16);
    }
    for (int i = 0; i < 32 * 4; i++) {
        int group = i / 4 / 4, thread = i / 4 % 4, e = i % 4;
        b[i] = small(b_of(thread * 2 + (e & 1) + (e < 2 ? 0 : 8), group), bf16);
        d[i] = (float)c_of(e < 2 ? group : group + 8, thread * 2 + (e & 1));
    }
    uint32_t *on_a = (uint32_t *)to_gpu(a, sizeof a), *on_b = (uint32_t *)to_gpu(b, sizeof b);
    float *on_d = (float *)to_gpu(d, sizeof d);
    MT_LAUNCH_KERNEL(mma_kernel, 1, 32, 0, 0, on_a, on_b, on_d, bf16);
    from_gpu(d, on_d, sizeof d);
    CUDA_OK(cudaFree(on_a));
    CUDA_OK(cudaFree(on_b));
    for (int i = 0; i < 32 * 4; i++) {
        int group = i / 4 / 4, thread = i / 4 % 4, e = i % 4, row = e < 2 ? group : group + 8,
            col = thread * 2 + (e & 1);
        int expected = c_of(row, col);
        for (int k = 0; k < 16; k++) expected += a_of(row, k) * b_of(k, col);
        assert_int_equal((int)d[i], expected);
    }
}

static void test_mma_bf16(void **state) {
    (void)state;
    mma(1);
}

static void test_mma_f16(void **state) {
    (void)state;
    mma(0);
}

/* ---- ex2 --------------------------------------------------------------------------------------------------------- */

static __global__ void ex2_kernel(const float *x, float *y, int n) {
    int i = (int)threadIdx.x;
    if (i < n) y[i] = mti_ex2(x[i]);
}

static void test_ex2(void **state) {
    float x[512], y[512];
    (void)state;
    for (int i = 0; i < 512; i++) x[i] = -140.0f + (float)i * 0.53f;
    x[0] = -INFINITY, x[1] = INFINITY, x[2] = 0.0f, x[3] = -126.0f, x[4] = 10.0f;
    float *on_x = (float *)to_gpu(x, sizeof x), *on_y = (float *)to_gpu(x, sizeof y);
    MT_LAUNCH_KERNEL(ex2_kernel, 1, 512, 0, 0, on_x, on_y, 512);
    from_gpu(y, on_y, sizeof y);
    CUDA_OK(cudaFree(on_x));
    for (int i = 0; i < 512; i++) {
        double expected = x[i] < -126.0f ? 0.0 : exp2((double)x[i]), error = fabs((double)y[i] - expected);
        if (x[i] >= 128.0f) assert_true(isinf(y[i]) && y[i] > 0);
        else if (!(error <= 0x1p-22 * expected))
            fail_msg("2^%.9g is %.9g, expected %.9g", (double)x[i], (double)y[i], expected);
    }
    assert_true(y[0] == 0.0f && y[2] == 1.0f);
}

/* ---- reciprocal -------------------------------------------------------------------------------------------------- */

static __global__ void reciprocal_kernel(const float *x, float *y, int n) {
    int i = (int)threadIdx.x;
    if (i < n) y[i] = mti_reciprocal(x[i]);
}

static void test_reciprocal(void **state) {
    float x[512], y[512];
    (void)state;
    for (int i = 0; i < 512; i++) x[i] = ldexpf(1.0f + (float)i / 512, i / 2 - 126) * (i % 3 ? 1.0f : -1.0f);
    x[0] = INFINITY, x[1] = -INFINITY, x[2] = 1.0f, x[3] = NAN, x[4] = 1e-40f;
    float *on_x = (float *)to_gpu(x, sizeof x), *on_y = (float *)to_gpu(x, sizeof y);
    MT_LAUNCH_KERNEL(reciprocal_kernel, 1, 512, 0, 0, on_x, on_y, 512);
    from_gpu(y, on_y, sizeof y);
    CUDA_OK(cudaFree(on_x));
    for (int i = 5; i < 512; i++) {
        double expected = 1.0 / (double)x[i], error = fabs((double)y[i] - expected);
        if (fabs(expected) < 0x1p-126) assert_true(y[i] == 0.0f);
        else if (!(error <= 0x1p-23 * fabs(expected)))
            fail_msg("1 / %.9g is %.9g, expected %.9g", (double)x[i], (double)y[i], expected);
    }
    assert_true(y[0] == 0.0f && y[1] == 0.0f && y[2] == 1.0f && isnan(y[3]) && isinf(y[4]));
}

/* ---- wgmma ------------------------------------------------------------------------------------------------------- */

#define DEPTH 64 /* of the products: rows of 128 bytes, 4 instructions */

/* Whether the kernels below run: the GPU has compute capability 9.0, and nvcc has compiled them for sm_90a. */
static int hopper(void) {
    int device = 0, major = 0, minor = 0;
    cudaFuncAttributes attributes;
    CUDA_OK(cudaGetDevice(&device));
    CUDA_OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CUDA_OK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    CUDA_OK(cudaFuncGetAttributes(&attributes, (const void *)mti_hopper_probe_kernel));
    return major == 9 && minor == 0 && attributes.sharedSizeBytes >= 4096;
}
/* MT_TEST_HOPPER: the program has code for sm_90a, which the driver must take */
#define NEEDS_HOPPER                                                                                                   \
    (void)state;                                                                                                       \
    if (!hopper()) {                                                                                                   \
        assert_null(getenv("MT_TEST_HOPPER"));                                                                         \
        skip();                                                                                                        \
    }

/* Writes element i of row r of a tile, as the PTX manual has the 128-byte swizzle: 64 elements of 8 rows take 1024
   bytes. `stride` bytes behind them are those of the next 8 rows, `lead` bytes behind them the next 64 of these
   rows. */
static __device__ void put(unsigned char *tile, int lead, int stride, int r, int i, uint16_t x) {
    int at = i / 64 * lead + r / 8 * stride + r % 8 * 128 + i % 64 * 2;
    *(uint16_t *)(tile + (at ^ (at >> 7 & 7) << 4)) = x;
}

/* The accumulators of a thread: element e of d[j] is row row_of(t, e), column col_of(t, j, e). */
static __device__ int row_of(int t, int e) { return t / 32 * 16 + t % 32 / 4 + e / 2 * 8; }
static __device__ int col_of(int t, int j, int e) { return j * 8 + t % 4 * 2 + e % 2; }

/* d [128, N] = a [128, 64] b [64, N] + (add ? d : 0): two warpgroups, with 64 rows each. b is [N, 64] in shared memory,
   or with TransB [64, N]. With RS, a comes from registers. */
template <int N, bool BF16, int TransB, bool RS>
static __global__ void wgmma_kernel(const uint16_t *a, const uint16_t *b, float *d, int add, int lead, int stride) {
#if MTI_SM90A
    MT_DYN_SHARED(unsigned char, room);
    unsigned char *at = mti_align_1024(room), *bt = at + 16 * stride;
    int t = (int)threadIdx.x;
    float acc[N / 8][4];
    uint32_t ra[DEPTH / 16][4];
    for (int i = t; i < 128 * DEPTH; i += 256) put(at, 0, stride, i / DEPTH, i % DEPTH, a[i]);
    for (int i = t; i < N * DEPTH; i += 256) { /* b [64, N] */
        int k = i / N, n = i % N;
        put(bt, lead, stride, TransB ? k : n, TransB ? n : k, b[i]);
    }
    mti_fence_proxy_async();
    MT_DEVICE_UNROLL
    for (int j = 0; j < N / 8; j++)
        for (int e = 0; e < 4; e++) acc[j][e] = d[row_of(t, e) * N + col_of(t, j, e)];
    MT_DEVICE_UNROLL
    for (int x = 0; x < DEPTH / 16; x++)
        for (int r = 0; r < 4; r++) /* the layout of mma.sync */
            ra[x][r] = *(const uint32_t *)(a + row_of(t, r % 2 * 2) * DEPTH + x * 16 + r / 2 * 8 + t % 4 * 2);
    __syncthreads();
    uint64_t ad = mti_wgmma_tile(at + t / 128 * 8 * stride, 16, (unsigned)stride);
    uint64_t bd = mti_wgmma_tile(bt, TransB ? (unsigned)lead : 16, (unsigned)stride);
    mti_wgmma_fence();
    MT_DEVICE_UNROLL
    for (int x = 0; x < DEPTH / 16; x++) {
        uint64_t here = bd + (uint64_t)((TransB ? x * 2 * stride : x * 32) / 16);
        if constexpr (RS) mti_wgmma_rs<N, BF16, TransB>(acc, ra[x], here, x > 0 || add);
        else mti_wgmma_ss<N, BF16, TransB>(acc, ad + (uint64_t)(x * 32 / 16), here, x > 0 || add);
    }
    mti_wgmma_commit();
    mti_wgmma_wait<0>();
    MT_DEVICE_UNROLL
    for (int j = 0; j < N / 8; j++)
        for (int e = 0; e < 4; e++) d[row_of(t, e) * N + col_of(t, j, e)] = acc[j][e];
#else
    (void)a, (void)b, (void)d, (void)add, (void)lead, (void)stride;
#endif
}

/* `gap`: bytes between groups of 8 rows. */
template <int N, bool BF16, int TransB, bool RS> static void wgmma(int add, int gap) {
    static uint16_t a[128 * DEPTH], b[DEPTH * 256];
    static float d[128 * 256];
    int stride = 1024 + gap, lead = TransB ? DEPTH / 8 * stride : 0;
    int bytes = MTI_ALIGN_1024_BYTES + 16 * stride + (TransB ? (N + 63) / 64 * lead : N / 8 * stride);
    for (int i = 0; i < 128 * DEPTH; i++) a[i] = small(a_of(i / DEPTH, i % DEPTH), BF16);
    for (int i = 0; i < DEPTH * N; i++) b[i] = small(b_of(i / N, i % N), BF16);
    for (int i = 0; i < 128 * N; i++) d[i] = (float)c_of(i / N, i % N);
    uint16_t *on_a = (uint16_t *)to_gpu(a, sizeof a), *on_b = (uint16_t *)to_gpu(b, sizeof b);
    float *on_d = (float *)to_gpu(d, sizeof d);
    CUDA_OK(cudaFuncSetAttribute((const void *)wgmma_kernel<N, BF16, TransB, RS>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    MT_LAUNCH_KERNEL((wgmma_kernel<N, BF16, TransB, RS>), 1, 256, bytes, 0, on_a, on_b, on_d, add, lead, stride);
    from_gpu(d, on_d, sizeof d);
    CUDA_OK(cudaFree(on_a));
    CUDA_OK(cudaFree(on_b));
    for (int i = 0; i < 128 * N; i++) {
        int expected = add ? c_of(i / N, i % N) : 0;
        for (int k = 0; k < DEPTH; k++) expected += a_of(i / N, k) * b_of(k, i % N);
        if ((int)d[i] != expected) fail_msg("row %d, column %d: %g, expected %d", i / N, i % N, (double)d[i], expected);
    }
}

template <int N> static void wgmma_all(void) {
    wgmma<N, true, 0, false>(1, 0), wgmma<N, true, 1, false>(0, 0), wgmma<N, false, 0, false>(0, 0);
    wgmma<N, false, 1, false>(1, 0), wgmma<N, true, 0, true>(0, 0), wgmma<N, true, 1, true>(1, 0);
    wgmma<N, false, 0, true>(1, 0), wgmma<N, false, 1, true>(0, 0);
    wgmma<N, true, 0, false>(1, 1024), wgmma<N, true, 1, false>(1, 1024);
}

static void test_wgmma_64(void **state) {
    NEEDS_HOPPER;
    wgmma_all<64>();
}

static void test_wgmma_96(void **state) {
    NEEDS_HOPPER;
    wgmma_all<96>();
}

static void test_wgmma_128(void **state) {
    NEEDS_HOPPER;
    wgmma_all<128>();
}

static void test_wgmma_192(void **state) {
    NEEDS_HOPPER;
    wgmma_all<192>();
}

static void test_wgmma_256(void **state) {
    NEEDS_HOPPER;
    wgmma_all<256>();
}

/* The product of a [64, 64] tile with its transpose, and in a second group twice this product. The first wait is for
   the first group. */
static __global__ void wgmma_groups_kernel(const uint16_t *a, float *d) {
#if MTI_SM90A
    MT_DYN_SHARED(unsigned char, room);
    unsigned char *tile = mti_align_1024(room);
    int t = (int)threadIdx.x;
    float first[8][4], second[8][4];
    for (int i = t; i < 64 * DEPTH; i += 128) put(tile, 0, 1024, i / DEPTH, i % DEPTH, a[i]);
    mti_fence_proxy_async();
    __syncthreads();
    uint64_t td = mti_wgmma_tile(tile, 16, 1024);
    mti_wgmma_fence();
    MT_DEVICE_UNROLL
    for (int x = 0; x < 4; x++) mti_wgmma_ss<64, true, 0>(first, td + (uint64_t)(2 * x), td + (uint64_t)(2 * x), x > 0);
    mti_wgmma_commit();
    MT_DEVICE_UNROLL
    for (int x = 0; x < 8; x++)
        mti_wgmma_ss<64, true, 0>(second, td + (uint64_t)(x % 4 * 2), td + (uint64_t)(x % 4 * 2), x > 0);
    mti_wgmma_commit();
    mti_wgmma_wait<1>();
    MT_DEVICE_UNROLL
    for (int j = 0; j < 8; j++)
        for (int e = 0; e < 4; e++) d[row_of(t, e) * 64 + col_of(t, j, e)] = first[j][e];
    mti_wgmma_wait<0>();
    MT_DEVICE_UNROLL
    for (int j = 0; j < 8; j++)
        for (int e = 0; e < 4; e++) d[(64 + row_of(t, e)) * 64 + col_of(t, j, e)] = second[j][e];
#else
    (void)a, (void)d;
#endif
}

static void test_wgmma_groups(void **state) {
    static uint16_t a[64 * DEPTH];
    static float d[128 * 64];
    NEEDS_HOPPER;
    for (int i = 0; i < 64 * DEPTH; i++) a[i] = small(a_of(i / DEPTH, i % DEPTH), 1);
    uint16_t *on_a = (uint16_t *)to_gpu(a, sizeof a);
    float *on_d = (float *)to_gpu(d, sizeof d);
    MT_LAUNCH_KERNEL(wgmma_groups_kernel, 1, 128, MTI_ALIGN_1024_BYTES + 64 * 128, 0, on_a, on_d);
    from_gpu(d, on_d, sizeof d);
    CUDA_OK(cudaFree(on_a));
    for (int i = 0; i < 128 * 64; i++) {
        int expected = 0;
        for (int k = 0; k < DEPTH; k++) expected += a_of(i / 64 % 64, k) * a_of(i % 64, k);
        assert_int_equal((int)d[i], i < 64 * 64 ? expected : 2 * expected);
    }
}

/* ---- mbarriers, named barriers, registers ------------------------------------------------------------------------ */

#define HANDED 40 /* rows of 128 numbers, through a ring of 3 */

/* The first warpgroup copies rows to a ring, and two others read them backwards. The second adds what the third has
   read before it, which it gets through named barriers. */
static __global__ void __launch_bounds__(384, 1) handover_kernel(const int *from, int *to) {
#if MTI_SM90A
    MT_SHARED(uint64_t, barriers, 6);
    MT_SHARED(int4, ring, 3 * 32);
    MT_SHARED(int, other, 128);
    int t = (int)threadIdx.x % 128, group = (int)threadIdx.x / 128, sum = 0;
    if (threadIdx.x < 3) mti_mbarrier_init(barriers + t, 32), mti_mbarrier_init(barriers + 3 + t, 256);
    __syncthreads();
    if (group == 0) {
        mti_setmaxnreg_dec<24>();
        for (int i = 0; i < HANDED && t < 32; i++) {
            mti_mbarrier_wait(barriers + 3 + i % 3, (unsigned)(i / 3 + 1) & 1);
            mti_cp_async16(ring + i % 3 * 32 + t, from + i * 128 + t * 4, 16);
            mti_cp_async_commit();
            mti_cp_async_wait<0>();
            mti_mbarrier_arrive(barriers + i % 3);
        }
        return;
    }
    mti_setmaxnreg_inc<240>();
    for (int i = 0; i < HANDED; i++) {
        mti_mbarrier_wait(barriers + i % 3, (unsigned)(i / 3) & 1);
        sum += ((const int *)(ring + i % 3 * 32))[127 - t];
        mti_mbarrier_arrive(barriers + 3 + i % 3);
        if (group == 2) {
            if (i > 0) mti_named_sync(2, 256);
            other[t] = sum;
            mti_named_arrive(1, 256);
        } else {
            mti_named_sync(1, 256);
            to[i * 128 + t] = sum + other[127 - t];
            if (i < HANDED - 1) mti_named_arrive(2, 256);
        }
    }
#else
    (void)from, (void)to;
#endif
}

static void test_handover(void **state) {
    static int from[HANDED * 128], to[HANDED * 128];
    NEEDS_HOPPER;
    for (int i = 0; i < HANDED * 128; i++) from[i] = (i * 7919 + 13) % 1000;
    int *in = (int *)to_gpu(from, sizeof from), *out = (int *)to_gpu(to, sizeof to);
    MT_LAUNCH_KERNEL(handover_kernel, 1, 384, 0, 0, in, out);
    from_gpu(to, out, sizeof to);
    CUDA_OK(cudaFree(in));
    for (int t = 0; t < 128; t++)
        for (int i = 0, sum = 0; i < HANDED; i++) {
            sum += from[i * 128 + 127 - t] + from[i * 128 + t];
            assert_int_equal(to[i * 128 + t], sum);
        }
}

/* ---- the code that the program has ------------------------------------------------------------------------------- */

static int hopper_built(mt_device device) {
    mt_context_desc desc = {};
    mt_context *ctx = NULL;
    int built = -1, again = -1;
    desc.device = device;
    assert_int_equal(mt_context_create(NULL, &desc, &ctx), MT_SUCCESS);
    assert_int_equal(mti_hopper_built(ctx, &built), MT_SUCCESS);
    assert_int_equal(mti_hopper_built(ctx, &again), MT_SUCCESS);
    assert_int_equal(built, again);
    mt_context_destroy(ctx);
    return built;
}

static void test_hopper_built(void **state) {
    (void)state;
    assert_int_equal(hopper_built(MT_DEVICE_CUDA), hopper());
#if defined(MT_CUDA_ENGINE)
    mte::set_ptx_arch(80); /* a program for sm_80 */
    assert_int_equal(hopper(), 0);
    assert_int_equal(hopper_built(MT_DEVICE_CUDA), 0);
    mte::set_ptx_arch(90);
#endif
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cp_async),  cmocka_unit_test(test_cp_async_groups),
        cmocka_unit_test(test_ldmatrix),  cmocka_unit_test(test_ldmatrix_trans),
        cmocka_unit_test(test_mma_bf16),  cmocka_unit_test(test_mma_f16),
        cmocka_unit_test(test_ex2),       cmocka_unit_test(test_reciprocal),
        cmocka_unit_test(test_wgmma_64),  cmocka_unit_test(test_wgmma_96),
        cmocka_unit_test(test_wgmma_128), cmocka_unit_test(test_wgmma_192),
        cmocka_unit_test(test_wgmma_256), cmocka_unit_test(test_wgmma_groups),
        cmocka_unit_test(test_handover),  cmocka_unit_test(test_hopper_built),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
