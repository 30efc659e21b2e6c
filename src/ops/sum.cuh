/* ---- sums over rows, on a GPU ------------------------------------------------------------------------------------ */

#pragma once
#include "vector_loads.cuh"
#include "../comm/hash.c"

#if MT_HAS_CUDA
extern "C++" {

#define MTI_SUM_BLOCKS 1024 /* maximum */

/* Returns to thread 0 the sum of x over the block, added as a binary tree. shared has one double for each thread. Each
   barrier separates writing a level of the tree from reading it. */
static __device__ __forceinline__ double mti_block_sum_double(double x, double *shared) {
    shared[threadIdx.x] = x;
    __syncthreads();
    for (int half = (int)blockDim.x / 2; half > 0; half /= 2) {
        if ((int)threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        __syncthreads();
    }
    return shared[0];
}

/* The number of blocks for a sum. Depends on the shape only, so that every GPU computes the same bits. */
static int64_t mti_sum_blocks(int64_t rows, int64_t cols) {
    int64_t vectors = rows * ((cols + MTI_VECTOR - 1) / MTI_VECTOR);
    return mt_min(MTI_SUM_BLOCKS, (vectors + 255) / 256);
}

/* Returns the sum of this thread's vectors, when `blocks` blocks of 256 threads sum x. A thread owns every (grid
   size)-th vector. It adds the eight elements of a vector pairwise in f32, then adds the sums of vectors in double: a
   double addition for each element would take longer than loading the element. The bits depend on the shape only,
   because the owner of a vector depends on the shape only. __fmul_rn keeps the compiler from contracting the square and
   an addition into one FMA. On sm_90: 11 instructions for an f32 element, which moves 4 bytes (budget: 27); 32
   registers. */
template <bool WIDE>
static __device__ __forceinline__ double mti_thread_sum(const mti_view &x, int64_t rows, int64_t cols, int squares,
                                                        int64_t block, int64_t blocks) {
    int64_t per_row = (cols + MTI_VECTOR - 1) / MTI_VECTOR;
    double sum = 0.0;
    for (int64_t i = block * 256 + threadIdx.x; i < rows * per_row; i += blocks * 256) {
        int64_t row = mt_divide(i, per_row), col = (i - row * per_row) * MTI_VECTOR;
        float c[MTI_VECTOR];
        mti_load<WIDE>(x, row, col, mti_vector_size(cols, col), c);
        for (int j = 0; j < MTI_VECTOR; j++) c[j] = squares ? __fmul_rn(c[j], c[j]) : c[j];
        sum += (double)(((c[0] + c[1]) + (c[2] + c[3])) + ((c[4] + c[5]) + (c[6] + c[7])));
    }
    return sum;
}

/* partial[block] = the sum of the vectors of the block. shared holds the sums of the threads. mti_block_sum_double has
   the barriers. */
template <bool WIDE>
static __global__ void __launch_bounds__(256)
    mti_sum_kernel(mti_view x, int64_t rows, int64_t cols, int squares, double *partial) {
    MT_SHARED(double, shared, 256);
    double sum = mti_thread_sum<WIDE>(x, rows, cols, squares, blockIdx.x, gridDim.x);
    sum = mti_block_sum_double(sum, shared);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

/* out [1, 1] += the sum of the partial sums. There is one block, and each thread owns every 256th partial sum. shared
   holds the sums of the threads. mti_block_sum_double has the barriers. */
static __global__ void __launch_bounds__(256) mti_sum_end_kernel(const double *partial, int blocks, mti_view out) {
    MT_SHARED(double, shared, 256);
    double sum = 0.0;
    for (int i = (int)threadIdx.x; i < blocks; i += 256) sum += partial[i];
    sum = mti_block_sum_double(sum, shared);
    if (threadIdx.x == 0) mti_put(out, 0, 0, (float)((double)mti_get(out, 0, 0) + sum));
}

static mt_status mti_cuda_sum(mt_context *ctx, mt_tensor x, int squares, mt_tensor out) {
    size_t mark = mt_arena_mark(ctx);
    unsigned blocks = (unsigned)mti_sum_blocks(x.rows, x.cols);
    void *partial = NULL;
    if (blocks == 0) return MT_SUCCESS;
    MT_TRY(mt_arena_alloc(ctx, MTI_SUM_BLOCKS * sizeof(double), &partial));
    MT_TRY(mt_cuda_enter(ctx));
    if (mti_is_wide(x))
        MT_LAUNCH_KERNEL(mti_sum_kernel<true>, blocks, 256, 0, mt_context_stream(ctx), mti_view_of(x), x.rows, x.cols,
                         squares, (double *)partial);
    else
        MT_LAUNCH_KERNEL(mti_sum_kernel<false>, blocks, 256, 0, mt_context_stream(ctx), mti_view_of(x), x.rows, x.cols,
                         squares, (double *)partial);
    MT_TRY(mt_cuda_launched(ctx, "mt_sum"));
    MT_LAUNCH_KERNEL(mti_sum_end_kernel, 1, 256, 0, mt_context_stream(ctx), (const double *)partial, (int)blocks,
                     mti_view_of(out));
    mt_arena_release(ctx, mark);
    return mt_cuda_launched(ctx, "mt_sum");
}

} /* extern "C++" */
#endif
