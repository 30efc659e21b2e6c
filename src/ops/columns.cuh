/* ---- elementwise kernels that also sum over the rows ------------------------------------------------------------- */

#pragma once
#include "views.cuh"

#if MT_HAS_CUDA
extern "C++" {

/* A block has MTI_LANES x MTI_DEEP threads. It works on MTI_LANES * MTI_VECTOR columns and a strip of MTI_STRIP rows.
   Threads of one lane have the same columns and share the rows of the strip. The strips depend only on the number of
   rows, and their sums are added in order, so every GPU computes the same bits. */
#define MTI_LANES 32
#define MTI_DEEP 8
#define MTI_STRIP 64

/* Computes what one row adds to the sums of its columns. */
template <bool WIDE, int SUMS, typename Op>
static __device__ __forceinline__ void mti_columns_row(const Op &op, int64_t row, int64_t col, int n,
                                                       float (*sums)[MTI_VECTOR]) {
    typename Op::input in;
    op.template fetch<WIDE>(row, col, n, in);
    op.template finish<WIDE>(row, col, n, in, sums);
}

/* Computes SUMS column sums over the rows of each strip. op is in two halves, as for mti_map_ahead_kernel:
   op.finish<WIDE>(row, col, n, in, sums) adds to sums[s] what the row adds to sum s of its columns. The result is
   partial [strips, SUMS, cols].

   1. Each thread owns MTI_VECTOR columns and every MTI_DEEP-th row of the strip. It adds these rows in registers, in
      order. It fetches AHEAD rows before it finishes the first one.
   2. For each sum in turn, all threads write their values to shared [deep, lane, MTI_VECTOR]. Each thread then adds one
      column in the order of deep. The first barrier separates the writes from the reads. After the second barrier, the
      next sum may overwrite shared.
   Two blocks in the launch bounds let nvcc use more than 80 registers, instead of spilling some.

   Instructions per element in bf16 on sm_90 in the loop over groups, and the budget as at mti_map_ahead_kernel: column
   sums 3 of 14, GELU 25 of 41, erf GELU 31 of 41, SwiGLU 25 of 68, dropout 27 of 27, or 39 in rows that do not begin at
   a multiple of four elements. The column sums need 48 registers, so an SM has 5 blocks with 80 KiB of loads in flight.
   GELU needs 80 registers: 3 blocks with 48 KiB. The backward of squared ReLU has 10 of 41 instructions, that of ReLU
   12, that of tanh 18, and that of a product with a row 9. */
template <int TYPE, bool WIDE, int AHEAD, int SUMS, typename Op>
static __global__ void __launch_bounds__(MTI_LANES *MTI_DEEP, 2)
    mti_columns_kernel(Op op, int64_t rows, int64_t cols, float *partial) {
    MT_SHARED(float4, shared, MTI_DEEP * MTI_LANES * MTI_VECTOR / 4);
    int lane = (int)threadIdx.x % MTI_LANES, deep = (int)threadIdx.x / MTI_LANES;
    int64_t start = (int64_t)blockIdx.x * MTI_LANES * MTI_VECTOR, col = start + lane * MTI_VECTOR;
    int64_t first = (int64_t)blockIdx.y * MTI_STRIP;
    int n = col < cols ? mti_vector_size(cols, col) : 0, r = deep;
    int last = n == 0 ? 0 : rows - first < MTI_STRIP ? (int)(rows - first) : MTI_STRIP;
    float sums[SUMS][MTI_VECTOR] = {};
    for (; TYPE != MTI_ANY_TYPE && n == MTI_VECTOR && r + (AHEAD - 1) * MTI_DEEP < last; r += AHEAD * MTI_DEEP) {
        typename Op::input in[AHEAD];
        MT_DEVICE_UNROLL
        for (int a = 0; a < AHEAD; a++) op.template fetch<true>(first + r + a * MTI_DEEP, col, MTI_VECTOR, in[a]);
        MT_DEVICE_UNROLL
        for (int a = 0; a < AHEAD; a++)
            op.template finish<true>(first + r + a * MTI_DEEP, col, MTI_VECTOR, in[a], sums);
    }
    for (; r < last; r += MTI_DEEP) mti_columns_row<WIDE, SUMS>(op, first + r, col, n, sums);
    for (int s = 0; s < SUMS; s++) {
        float4 *to = shared + threadIdx.x * (MTI_VECTOR / 4);
        to[0] = make_float4(sums[s][0], sums[s][1], sums[s][2], sums[s][3]);
        to[1] = make_float4(sums[s][4], sums[s][5], sums[s][6], sums[s][7]);
        __syncthreads();
        float sum = 0.0f;
        for (int d = 0; d < MTI_DEEP; d++)
            sum += ((const float *)shared)[d * MTI_LANES * MTI_VECTOR + (int)threadIdx.x];
        if (start + threadIdx.x < cols) partial[((int64_t)blockIdx.y * SUMS + s) * cols + start + threadIdx.x] = sum;
        __syncthreads();
    }
}

/* first [1, cols] += the first sum over the strips, and second [1, cols] += the second one. blockIdx.y is the number of
   the sum. A block owns MTI_LANES columns. Each thread owns one column and every MTI_DEEP-th strip, and has eight loads
   in flight. The threads write their sums to shared [deep, lane]. The barrier separates these writes from the reads.
   The threads with deep 0 then add the sums in the order of deep. On sm_90: 10 instructions for a sum of 4 bytes
   (budget: 27). With many strips, latency limits the kernel instead: each thread waits for 8 loads at a time. */
static __global__ void __launch_bounds__(MTI_LANES *MTI_DEEP)
    mti_strips_kernel(const float *partial, int64_t strips, int64_t cols, mti_view first, mti_view second) {
    MT_SHARED(float, shared, MTI_DEEP *MTI_LANES);
    int lane = (int)threadIdx.x % MTI_LANES, deep = (int)threadIdx.x / MTI_LANES;
    int64_t col = (int64_t)blockIdx.x * MTI_LANES + lane, sums = gridDim.y, s = blockIdx.y;
    mti_view out = s == 0 ? first : second;
    float sum = 0.0f, next[8];
    for (int64_t i = deep; i < strips && col < cols; i += 8 * MTI_DEEP) {
        MT_DEVICE_UNROLL
        for (int j = 0; j < 8; j++) {
            int64_t strip = i + j * MTI_DEEP;
            next[j] = strip < strips ? partial[(strip * sums + s) * cols + col] : 0.0f;
        }
        MT_DEVICE_UNROLL
        for (int j = 0; j < 8; j++) sum += next[j];
    }
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (deep != 0 || col >= cols || !out.data) return;
    for (int d = 1; d < MTI_DEEP; d++) sum += shared[d * MTI_LANES + lane];
    mti_put(out, 0, col, mti_get(out, 0, col) + sum);
}

/* Adds sum s of partial [strips, sums, cols] to outs[s] [1, cols]. `sums` is 1 or 2. An outs[s] may be mt_none(). */
static mt_status mti_strips(mt_context *ctx, const char *name, const void *partial, int64_t strips, int sums,
                            int64_t cols, const mt_tensor *outs) {
    MT_LAUNCH_KERNEL(mti_strips_kernel, dim3((unsigned)((cols + MTI_LANES - 1) / MTI_LANES), (unsigned)sums),
                     MTI_LANES * MTI_DEEP, 0, mt_context_stream(ctx), (const float *)partial, strips, cols,
                     mti_view_of(outs[0]), mti_view_of(outs[sums - 1]));
    return mt_cuda_launched(ctx, name);
}

/* Launches mti_columns_kernel and adds sum s to outs[s], which may be mt_none(). Needs [strips, SUMS, cols] floats of
   scratch memory in the arena. */
template <int TYPE, int AHEAD, int SUMS, typename Op>
static mt_status mti_columns(mt_context *ctx, const char *name, const Op &op, int wide, int64_t rows, int64_t cols,
                             const mt_tensor *outs) {
    int64_t strips = (rows + MTI_STRIP - 1) / MTI_STRIP;
    dim3 grid((unsigned)((cols + MTI_LANES * MTI_VECTOR - 1) / (MTI_LANES * MTI_VECTOR)), (unsigned)strips);
    size_t mark = mt_arena_mark(ctx);
    void *memory = NULL;
    if (rows == 0 || cols == 0) return MT_SUCCESS;
    if (strips > 65535)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: %lld rows are more than %d on a GPU", name, (long long)rows,
                       65535 * MTI_STRIP);
    MT_TRY(mt_arena_alloc(ctx, (size_t)(strips * SUMS * cols) * sizeof(float), &memory));
    MT_TRY(mt_cuda_enter(ctx));
    if (wide)
        MT_LAUNCH_KERNEL((mti_columns_kernel<TYPE, true, AHEAD, SUMS, Op>), grid, MTI_LANES * MTI_DEEP, 0,
                         mt_context_stream(ctx), op, rows, cols, (float *)memory);
    else
        MT_LAUNCH_KERNEL((mti_columns_kernel<TYPE, TYPE != MTI_ANY_TYPE, AHEAD, SUMS, Op>), grid, MTI_LANES * MTI_DEEP,
                         0, mt_context_stream(ctx), op, rows, cols, (float *)memory);
    MT_TRY(mt_cuda_launched(ctx, name));
    MT_TRY(mti_strips(ctx, name, memory, strips, SUMS, cols, outs));
    mt_arena_release(ctx, mark); /* only later kernels of the same stream reuse this memory */
    return MT_SUCCESS;
}

} /* extern "C++" */
#endif
