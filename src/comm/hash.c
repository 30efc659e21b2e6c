/* ---- hashes ------------------------------------------------------------------------------------------------------ */

#pragma once
#include "16bit.c"

/* The hash of one element: the finalizer of splitmix64 (Steele et al., OOPSLA 2014). */
MT_INLINE MT_HOST_DEVICE uint64_t mt_hash_word(uint64_t element, uint32_t bits) {
    uint64_t z = element * 0x9e3779b97f4a7c15u + (uint64_t)bits * 0xd1b54a32d192ed03u + 1;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

typedef struct mti_hash {
    mt_tensor x;
    int64_t first_row, first_col, global_cols;
    uint64_t sum;
} mti_hash;

/* Adds the hash of a range of rows to sum. The total is a sum of integers, so the order is free. */
static void mti_cpu_hash(void *data, int thread, int64_t first, int64_t last) {
    mti_hash *h = (mti_hash *)data;
    mt_tensor x = h->x;
    uint64_t sum = 0;
    int64_t i, j;
    (void)thread;
    for (i = first; i < last; i++) {
        uint64_t e = ((uint64_t)h->first_row + (uint64_t)i) * (uint64_t)h->global_cols + (uint64_t)h->first_col;
        const void *row = mt_tensor_rows(x, i, 1).data;
        if (mt_dtype_size(x.dtype) == 4)
            for (j = 0; j < x.cols; j++) sum += mt_hash_word(e + (uint64_t)j, ((const uint32_t *)row)[j]);
        else
            for (j = 0; j < x.cols; j++) sum += mt_hash_word(e + (uint64_t)j, ((const uint16_t *)row)[j]);
    }
    __atomic_add_fetch(&h->sum, sum, __ATOMIC_RELAXED);
}

#if MT_HAS_CUDA
extern "C++" {

/* i / n, computed in 32 bits if both fit. GPUs have no instruction for integer division, and a 64-bit division takes
   several times as many instructions as a 32-bit one. */
static __device__ __forceinline__ int64_t mt_divide(int64_t i, int64_t n) {
    return (uint64_t)(i | n) >> 32 ? i / n : (int64_t)((uint32_t)i / (uint32_t)n);
}

/* *sum += the hashes of all elements. A thread owns every (grid size)-th element. A warp adds its 32 sums and then adds
   the total with one atomicAdd. Integer sums do not depend on the order. The kernel uses no shared memory and no
   barrier. Instructions limit it, not memory: on sm_90 68 for an f32 element, which moves 4 bytes (budget: 27), or 82
   when it divides in 64 bits. Most of them are 64-bit multiplications, and compute the row of the element. */
static __global__ void __launch_bounds__(256)
    mti_hash_kernel(const void *data, int64_t ld, int is_32_bit, int64_t rows, int64_t cols, int64_t first_row,
                    int64_t first_col, int64_t global_cols, unsigned long long *sum) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    unsigned long long mine = 0;
    for (; i < rows * cols; i += step) {
        int64_t row = mt_divide(i, cols), col = i - row * cols, at = row * ld + col;
        uint32_t bits = is_32_bit ? ((const uint32_t *)data)[at] : ((const uint16_t *)data)[at];
        mine += mt_hash_word((uint64_t)((first_row + row) * global_cols + first_col + col), bits);
    }
    for (int o = 16; o > 0; o >>= 1) mine += __shfl_xor_sync(0xffffffffu, mine, o);
    if (threadIdx.x % 32 == 0) atomicAdd(sum, mine);
}

static mt_status mti_cuda_hash_add(mt_context *ctx, const mti_hash *h, uint64_t *sum) {
    const int64_t most = 65535, blocks = (h->x.rows * h->x.cols + 1023) / 1024;
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_hash_kernel, (unsigned)(blocks < most ? blocks : most), 256, 0, ctx->stream, h->x.data,
                     mt_tensor_ld(h->x), mt_dtype_size(h->x.dtype) == 4, h->x.rows, h->x.cols, h->first_row,
                     h->first_col, h->global_cols, (unsigned long long *)sum);
    return mt_cuda_launched(ctx, "mti_hash_kernel");
}

} /* extern "C++" */
#else
static mt_status mti_cuda_hash_add(mt_context *ctx, const mti_hash *h, uint64_t *sum) {
    return (void)ctx, (void)h, (void)sum, MT_ERR_UNSUPPORTED;
}
#endif

static mt_status mti_hash_check(mt_context *ctx, mt_tensor x, const uint64_t *sum) {
    size_t size = mt_dtype_size(x.dtype);
    if (size < 2) return mt_fail(ctx, MT_ERR_DTYPE, "mt_hash_add: x is %s", mt_dtype_name(x.dtype));
    if (!sum || !mt_context_has_data(ctx))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_hash_add: %s", sum ? "the context has no data" : "sum is NULL");
    if (x.rows < 0 || x.cols < 0 || mt_tensor_ld(x) < x.cols ||
        mt_size_mul(mt_size_mul(x.rows, mt_tensor_ld(x)), 8) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "mt_hash_add: x is [%lld, %lld] with ld %lld, which is not a valid shape",
                       (long long)x.rows, (long long)x.cols, (long long)x.ld);
    if (!x.data || (uintptr_t)x.data % size)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_hash_add: the data of x is NULL, or not aligned to its elements");
    return MT_SUCCESS;
}

MT_API mt_status mt_hash_add(mt_context *ctx, mt_tensor x, int64_t first_row, int64_t first_col, int64_t global_cols,
                             uint64_t *sum) {
    mti_hash h;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (x.rows == 0 || x.cols == 0) return MT_SUCCESS;
    MT_TRY(mti_hash_check(ctx, x, sum));
    h.x = x;
    h.first_row = first_row;
    h.first_col = first_col;
    h.global_cols = global_cols;
    h.sum = 0;
    if (ctx->device == MT_DEVICE_CUDA) return mti_cuda_hash_add(ctx, &h, sum);
    mt_parallel_for(ctx, x.rows, 16384 / x.cols + 1, mti_cpu_hash, &h);
    *sum += h.sum;
    return MT_SUCCESS;
}
