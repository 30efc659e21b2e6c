/* ---- wrappers of PTX instructions of compute capability 9.0 ------------------------------------------------------ */

#pragma once
#include "ptx.cuh"

#if MT_HAS_CUDA
extern "C++" {

/* Only code for sm_90a has these instructions: nvcc refuses them for -arch=sm_90 and for older and newer GPUs. A kernel
   that uses them has an empty body where MTI_SM90A is 0. mti_hopper_built tells the host whether the program has the
   other bodies. With -G accumulators are in memory, and with -rdc=true nvcc ignores setmaxnreg, so these builds have
   none. */
#if defined(MT_CUDA_ENGINE) || !defined(__CUDA_ARCH__) ||                                                              \
    (defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(__CUDACC_DEBUG__) && !defined(__CUDACC_RDC__))
#define MTI_SM90A 1
#else
#define MTI_SM90A 0
#endif

#define MTI_ALIGN_1024_BYTES 896 /* see mti_align_1024 */

#if !defined(MT_CUDA_ENGINE) /* tests/engine/ defines these functions itself */
#if MTI_SM90A
#define MTI_PTX_SM90A(...) asm volatile(__VA_ARGS__)
#else
#define MTI_PTX_SM90A(...) __trap()
#endif

/* ---- warpgroups: 128 threads, from a multiple of 128 on ---- */

/* Returns the first multiple of 1024 in shared memory from p on. MT_DYN_SHARED is 128-byte aligned, so a kernel with
   tiles is launched with MTI_ALIGN_1024_BYTES more. A declared alignment of 1024 would be kept, but nvcc would then pad
   the static shared memory of all kernels of the program to multiples of it. */
template <typename T> static __device__ __forceinline__ T *mti_align_1024(T *p) {
    return (T *)((unsigned char *)p + (0u - mti_shared_address(p)) % 1024);
}

/* The descriptor of a tile in shared memory for wgmma. Rows of the tile are 128 bytes, and 16-byte piece c of row r
   lies at piece c ^ r % 8. The tile starts at a multiple of 1024 bytes. `stride`: bytes from 8 rows to the next 8.
   `lead`: bytes from 128 bytes of a row to the next 128, which only a transposed operand b uses. To advance the tile by
   x bytes inside its rows, or by whole groups of 8 rows, add x / 16 to the descriptor. */
static __device__ __forceinline__ uint64_t mti_wgmma_tile(const void *tile, unsigned lead, unsigned stride) {
    return (uint64_t)1 << 62 | (uint64_t)(stride >> 4) << 32 | (uint64_t)(lead >> 4) << 16 |
           (mti_shared_address(tile) & 0x3ffff) >> 4;
}

/* Before the first mti_wgmma_ss or mti_wgmma_rs, and after each other access to their registers. */
static __device__ __forceinline__ void mti_wgmma_fence() { MTI_PTX_SM90A("wgmma.fence.sync.aligned;" ::: "memory"); }
/* Ends a group: the products since the last one. */
static __device__ __forceinline__ void mti_wgmma_commit() {
    MTI_PTX_SM90A("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until at most `Pending` groups are not complete. Until then, the registers and tiles of a product must not be
   used. */
template <int Pending> static __device__ __forceinline__ void mti_wgmma_wait() {
    MTI_PTX_SM90A("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/* The operands of a product: ten registers whose numbers begin with t, and the registers of accumulators. */
#define MTI_TEN(t) "%" t "0, %" t "1, %" t "2, %" t "3, %" t "4, %" t "5, %" t "6, %" t "7, %" t "8, %" t "9, "
#define MTI_D1(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define MTI_D4(i) MTI_D1(i), MTI_D1(i + 1), MTI_D1(i + 2), MTI_D1(i + 3)
#define MTI_D8(i) MTI_D4(i), MTI_D4(i + 4)
#define MTI_R32 MTI_TEN("") MTI_TEN("1") MTI_TEN("2") "%30, %31"
#define MTI_R48 MTI_TEN("") MTI_TEN("1") MTI_TEN("2") MTI_TEN("3") "%40, %41, %42, %43, %44, %45, %46, %47"
#define MTI_R64 MTI_TEN("") MTI_TEN("1") MTI_TEN("2") MTI_TEN("3") MTI_TEN("4") MTI_TEN("5") "%60, %61, %62, %63"
#define MTI_R90                                                                                                        \
    MTI_TEN("") MTI_TEN("1") MTI_TEN("2") MTI_TEN("3") MTI_TEN("4") MTI_TEN("5") MTI_TEN("6") MTI_TEN("7") MTI_TEN("8")
#define MTI_R96 MTI_R90 "%90, %91, %92, %93, %94, %95"
#define MTI_R128 MTI_R90 MTI_TEN("9") MTI_TEN("10") MTI_TEN("11") "%120, %121, %122, %123, %124, %125, %126, %127"
#define MTI_WGMMA(n, type, d, add, operands)                                                                           \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type       \
    " {" d "}, " operands ";\n}"
/* One product: `add` and `operands` name the operands behind the accumulators. */
#define MTI_WGMMA_SS(n, regs, add, operands, ...)                                                                      \
    if constexpr (N == n && BF16)                                                                                      \
        MTI_PTX_SM90A(MTI_WGMMA(#n, "bf16", regs, add, operands)                                                       \
                      : __VA_ARGS__                                                                                    \
                      : "l"(a), "l"(b), "r"(add_d), "n"(TransB));                                                      \
    if constexpr (N == n && !BF16)                                                                                     \
    MTI_PTX_SM90A(MTI_WGMMA(#n, "f16", regs, add, operands) : __VA_ARGS__ : "l"(a), "l"(b), "r"(add_d), "n"(TransB))
#define MTI_WGMMA_RS(n, regs, add, operands, ...)                                                                      \
    if constexpr (N == n && BF16)                                                                                      \
        MTI_PTX_SM90A(MTI_WGMMA(#n, "bf16", regs, add, operands)                                                       \
                      : __VA_ARGS__                                                                                    \
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add_d), "n"(TransB));                  \
    if constexpr (N == n && !BF16)                                                                                     \
    MTI_PTX_SM90A(MTI_WGMMA(#n, "f16", regs, add, operands)                                                            \
                  : __VA_ARGS__                                                                                        \
                  : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add_d), "n"(TransB))

/* d [64, N] = a [64, 16] b [16, N] + (add_d ? d : 0), asynchronously. The accumulators of warp w of the group are rows
   16 w to 16 w + 15, as mma.sync has them: d[j][e] is row lane / 4 + e / 2 * 8, column j * 8 + lane % 4 * 2 + e % 2.
   a and b are descriptors; a has rows of K. TransB 0: b has rows of K, [N][16]; 1: it has rows of N, [16][N]. */
template <int N, bool BF16, int TransB>
static __device__ __forceinline__ void mti_wgmma_ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, int add_d) {
    static_assert(N == 64 || N == 96 || N == 128 || N == 192 || N == 256, "no such product");
    MTI_WGMMA_SS(64, MTI_R32, "%34", "%32, %33, p, 1, 1, 0, %35", MTI_D8(0));
    MTI_WGMMA_SS(96, MTI_R48, "%50", "%48, %49, p, 1, 1, 0, %51", MTI_D8(0), MTI_D4(8));
    MTI_WGMMA_SS(128, MTI_R64, "%66", "%64, %65, p, 1, 1, 0, %67", MTI_D8(0), MTI_D8(8));
    MTI_WGMMA_SS(192, MTI_R96, "%98", "%96, %97, p, 1, 1, 0, %99", MTI_D8(0), MTI_D8(8), MTI_D8(16));
    MTI_WGMMA_SS(256, MTI_R128, "%130", "%128, %129, p, 1, 1, 0, %131", MTI_D8(0), MTI_D8(8), MTI_D8(16), MTI_D8(24));
}

/* The same with a in registers, as mma.sync has it. */
template <int N, bool BF16, int TransB>
static __device__ __forceinline__ void mti_wgmma_rs(float (&d)[N / 8][4], const uint32_t *a, uint64_t b, int add_d) {
    static_assert(N == 64 || N == 96 || N == 128 || N == 192 || N == 256, "no such product");
    MTI_WGMMA_RS(64, MTI_R32, "%37", "{%32, %33, %34, %35}, %36, p, 1, 1, %38", MTI_D8(0));
    MTI_WGMMA_RS(96, MTI_R48, "%53", "{%48, %49, %50, %51}, %52, p, 1, 1, %54", MTI_D8(0), MTI_D4(8));
    MTI_WGMMA_RS(128, MTI_R64, "%69", "{%64, %65, %66, %67}, %68, p, 1, 1, %70", MTI_D8(0), MTI_D8(8));
    MTI_WGMMA_RS(192, MTI_R96, "%101", "{%96, %97, %98, %99}, %100, p, 1, 1, %102", MTI_D8(0), MTI_D8(8), MTI_D8(16));
    MTI_WGMMA_RS(256, MTI_R128, "%133", "{%128, %129, %130, %131}, %132, p, 1, 1, %134", MTI_D8(0), MTI_D8(8),
                 MTI_D8(16), MTI_D8(24));
}
#undef MTI_TEN
#undef MTI_D1
#undef MTI_D4
#undef MTI_D8
#undef MTI_R32
#undef MTI_R48
#undef MTI_R64
#undef MTI_R90
#undef MTI_R96
#undef MTI_R128
#undef MTI_WGMMA
#undef MTI_WGMMA_SS
#undef MTI_WGMMA_RS

/* Sets the registers of each thread of a warpgroup: inc waits until other warpgroups have released enough of them. */
template <int Registers> static __device__ __forceinline__ void mti_setmaxnreg_inc() {
    static_assert(Registers >= 24 && Registers <= 256 && Registers % 8 == 0, "no such number of registers");
    MTI_PTX_SM90A("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers> static __device__ __forceinline__ void mti_setmaxnreg_dec() {
    static_assert(Registers >= 24 && Registers <= 256 && Registers % 8 == 0, "no such number of registers");
    MTI_PTX_SM90A("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

/* ---- shared memory between threads ---- */

/* Lets later products of other threads read what this thread has written to shared memory: after the writes (and after
   mti_cp_async_wait), before the arrival or barrier that tells the other threads. */
static __device__ __forceinline__ void mti_fence_proxy_async() {
    MTI_PTX_SM90A("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Barrier `id` (1 to 15) of the block completes when `threads` threads, in whole warps, have called one of these. */
static __device__ __forceinline__ void mti_named_sync(int id, int threads) {
    MTI_PTX_SM90A("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
static __device__ __forceinline__ void mti_named_arrive(int id, int threads) {
    MTI_PTX_SM90A("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* A phase of a barrier in shared memory completes when mti_mbarrier_arrive has been called `count` times in it. The
   barrier b is initialised once, by one thread, and used after a barrier of the block. */
static __device__ __forceinline__ void mti_mbarrier_init(uint64_t *b, unsigned count) {
    MTI_PTX_SM90A("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mti_shared_address(b)), "r"(count) : "memory");
}
static __device__ __forceinline__ void mti_mbarrier_arrive(uint64_t *b) {
    MTI_PTX_SM90A("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mti_shared_address(b)) : "memory");
}
/* Waits until the phase with this parity, the present one or the one before it, is complete. The first phase has parity
   0, so a wait for parity 1 of a new barrier does not wait. */
static __device__ __forceinline__ void mti_mbarrier_wait(uint64_t *b, unsigned parity) {
    uint32_t complete = 1;
    do
        MTI_PTX_SM90A(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(complete)
            : "r"(mti_shared_address(b)), "r"(parity)
            : "memory");
    while (!complete);
}
#undef MTI_PTX_SM90A
#endif

/* ---- whether the program has code for sm_90a ---- */

/* Never launched. Code for sm_90a has 4096 bytes of shared memory. Other code has none, or what the driver reserves and
   nvcc pads. */
static __global__ void mti_hopper_probe_kernel(int *x) {
#if MTI_SM90A
    MT_SHARED(int, room, 1024);
    room[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = room[threadIdx.x ^ 1];
#else
    (void)x;
#endif
}

/* Sets *built to whether the kernels with these instructions run on the GPU of the context: compute capability 9.0, and
   nvcc has compiled the program for sm_90a. The context asks the driver once. MT_DEVICE_META plans for a program that
   has this code. */
static mt_status mti_hopper_built(mt_context *ctx, int *built) {
    cudaFuncAttributes attributes;
    mti_kernels *k;
    *built = mt_context_compute_capability(ctx) == 90;
    if (!*built || mt_context_device(ctx) == MT_DEVICE_META) return MT_SUCCESS;
    MT_TRY(mti_kernels_open(ctx, &k));
    if (!k->hopper) {
        MT_TRY(mt_cuda_enter(ctx));
        MT_CUDA_TRY(ctx, cudaFuncGetAttributes(&attributes, (const void *)mti_hopper_probe_kernel));
        k->hopper = attributes.sharedSizeBytes >= 4096 ? 1 : -1;
    }
    *built = k->hopper > 0;
    return MT_SUCCESS;
}

} /* extern "C++" */
#endif
