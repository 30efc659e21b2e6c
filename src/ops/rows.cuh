/* ---- reductions over a row in a block of threads ----------------------------------------------------------------- */

#pragma once
#include "vector_loads.cuh"

#if MT_HAS_CUDA
extern "C++" {

#define MTI_ROW_THREADS 256 /* maximum threads per block; narrow rows take fewer */

static unsigned mti_row_threads(int64_t cols) {
    return (unsigned)mt_min(MTI_ROW_THREADS, mt_round_up((cols + MTI_VECTOR - 1) / MTI_VECTOR, 32));
}

static __device__ __forceinline__ float mti_warp_sum(float x) {
    for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}

static __device__ __forceinline__ float mti_warp_max(float x) {
    for (int o = 16; o > 0; o >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}

/* Returns to every thread the sum of x over the threads with its threadIdx.y. If blockDim.x is 32, these are one warp,
   and `shared` is not used. Otherwise blockDim.y is 1. Each warp sums by shuffles and writes its result to shared [32].
   Then every warp sums these results. The barrier separates the writes from the reads. Before shared is used again,
   the threads must have passed another barrier. */
static __device__ __forceinline__ float mti_row_total(float x, float *shared) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
    x = mti_warp_sum(x);
    if (warps == 1) return x;
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return mti_warp_sum(lane < warps ? shared[lane] : 0.0f);
}

/* The same for the sums of a and of b over all threads of a block, with shared [64]. blockDim.y is 1. */
static __device__ __forceinline__ float2 mti_block_sums_once(float a, float b, float *shared) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
    a = mti_warp_sum(a);
    b = mti_warp_sum(b);
    if (lane == 0) {
        shared[warp] = a;
        shared[32 + warp] = b;
    }
    __syncthreads();
    a = lane < warps ? shared[lane] : 0.0f;
    b = lane < warps ? shared[32 + lane] : 0.0f;
    return make_float2(mti_warp_sum(a), mti_warp_sum(b));
}

/* mti_block_sums_once, and a barrier after which shared may be used again. */
static __device__ __forceinline__ float2 mti_block_sums(float a, float b, float *shared) {
    float2 sums = mti_block_sums_once(a, b, shared);
    __syncthreads();
    return sums;
}

/* The type of the rows of views with `cols` columns, as a template argument. MTI_ANY_TYPE also for rows that end within
   a vector, so that rows with a type have whole vectors only. */
template <typename... Views> static int mti_row_type(int64_t cols, Views... views) {
    return cols % MTI_VECTOR ? MTI_ANY_TYPE : mti_access_of(views...).type;
}

/* Functions for vector i of a row of this type. The comments of the kernels that use them count SASS instructions
   beside a budget: 6.8 for each byte moved. This is what an H200 has time for while it copies at 85 % of its best
   rate. */
template <int TYPE> static __device__ __forceinline__ int mti_row_vector_size(int64_t cols, int64_t i) {
    return TYPE == MTI_ANY_TYPE ? mti_vector_size(cols, i * MTI_VECTOR) : MTI_VECTOR;
}

template <int TYPE>
static __device__ __forceinline__ void mti_row_fetch(const mti_view &v, int64_t row, int64_t i, int64_t cols,
                                                     mti_fetched<TYPE> &out) {
    mti_fetch<TYPE != MTI_ANY_TYPE>(v, row, i * MTI_VECTOR, mti_row_vector_size<TYPE>(cols, i), out);
}

template <int TYPE>
static __device__ __forceinline__ void mti_row_store(const mti_view &v, int64_t row, int64_t i, int64_t cols,
                                                     const float *x) {
    mti_store<TYPE != MTI_ANY_TYPE, TYPE>(v, row, i * MTI_VECTOR, mti_row_vector_size<TYPE>(cols, i), x);
}

/* Sizes of the dynamic shared memory of a block. Every GPU from sm_75 on grants MTI_SHARED_LEAST bytes. mti_shared_most
   returns what this GPU grants. Both leave 2 KiB for the variables that kernels declare themselves. The size of the
   arena depends on MTI_SHARED_LEAST only, so that it can be planned without a GPU. */
#define MTI_SHARED_LEAST ((size_t)62 << 10)

static mt_status mti_shared_most(mt_context *ctx, size_t *bytes) {
    int most = 0;
    MT_CUDA_TRY(ctx, cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, mt_context_ordinal(ctx)));
    *bytes = (size_t)most - 2048;
    return MT_SUCCESS;
}

/* CUDA requires this call before a launch with more than 48 KiB of shared memory, with the variables that the kernel
   declares. It allows as much as the GPU grants, because all contexts of a GPU share the limit: another thread must not
   lower it before the launch. */
template <typename Kernel> static mt_status mti_shared_allow(mt_context *ctx, Kernel kernel, size_t bytes) {
    size_t most = 0;
    if (bytes <= ((size_t)48 << 10) - 2048) return MT_SUCCESS;
    MT_TRY(mti_shared_most(ctx, &most));
    MT_CUDA_TRY(ctx,
                cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)most));
    return MT_SUCCESS;
}

} /* extern "C++" */
#endif
