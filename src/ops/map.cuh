/* ---- elementwise kernels ----------------------------------------------------------------------------------------- */

#pragma once
#include "vector_loads.cuh"
#include "../comm/hash.c"

#if MT_HAS_CUDA
extern "C++" {

/* Calls op.run<WIDE>(row, col, n) for each vector of n <= MTI_VECTOR neighbours of a matrix. A thread owns every (grid
   size)-th vector in the order of memory, so that neighbouring threads access neighbouring memory. The kernel uses no
   shared memory and no barrier. */
template <bool WIDE, typename Op>
static __global__ void __launch_bounds__(256) mti_map_kernel(Op op, int64_t rows, int64_t cols) {
    int64_t per_row = (cols + MTI_VECTOR - 1) / MTI_VECTOR, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < rows * per_row; i += step) {
        int64_t row = mt_divide(i, per_row), col = (i - row * per_row) * MTI_VECTOR;
        op.template run<WIDE>(row, col, mti_vector_size(cols, col));
    }
}

/* The largest grid. The items that it does not cover are those of a loop: in the kernel, or in MTI_LAUNCH_BLOCKS. */
#ifndef MTI_GRID_MAX
#define MTI_GRID_MAX 65535
#endif

/* The number of blocks for `items` items, with per_block items each. At least 1, at most MTI_GRID_MAX. */
static unsigned mti_grid(int64_t items, int64_t per_block) {
    int64_t blocks = (items + per_block - 1) / per_block;
    return (unsigned)(blocks < 1 ? 1 : blocks > MTI_GRID_MAX ? MTI_GRID_MAX : blocks);
}

/* Launches a kernel whose blocks own one item each. One launch has at most MTI_GRID_MAX blocks; for more items the
   kernel is launched again. The kernel's first parameter is the number of the item that block 0 owns. A loop over the
   items in the kernel would need more registers than norms and the cross-entropy have. */
#define MTI_LAUNCH_BLOCKS(kernel, items, block, shared_bytes, stream, ...)                                             \
    for (int64_t mti_first = 0; mti_first < (items); mti_first += MTI_GRID_MAX)                                        \
    MT_LAUNCH_KERNEL(kernel, mti_grid((items)-mti_first, 1), block, shared_bytes, stream, mti_first, __VA_ARGS__)

/* Launches mti_map_kernel. `wide` says that mti_is_wide holds for all views of op. */
template <typename Op>
static mt_status mti_map(mt_context *ctx, const char *name, const Op &op, int wide, int64_t rows, int64_t cols) {
    int64_t items = rows * ((cols + MTI_VECTOR - 1) / MTI_VECTOR);
    unsigned block = (unsigned)mt_min(256, mt_round_up(items, 32)), grid = mti_grid(items, 256);
    if (items == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    if (wide) MT_LAUNCH_KERNEL((mti_map_kernel<true, Op>), grid, block, 0, mt_context_stream(ctx), op, rows, cols);
    else MT_LAUNCH_KERNEL((mti_map_kernel<false, Op>), grid, block, 0, mt_context_stream(ctx), op, rows, cols);
    return mt_cuda_launched(ctx, name);
}

/* Divides numbers in [0, items) by `by`, with a multiplication and a shift where `items` is below 2^31. With 2^s the
   smallest power of two that is at least `by`, factor is 2^(31 + s) / by, rounded up. i * factor / 2^(31 + s) is then
   less than 1 / by above i / by, so its integer part is that of i / by (Granlund and Montgomery, PLDI 1994). */
struct mti_divider {
    int64_t by;
    uint32_t factor; /* 0: divide in 64 bits */
    int shift;
};

static mti_divider mti_divider_of(int64_t by, int64_t items) {
    mti_divider d = {by, 0, 31};
    if (items >= (int64_t)1 << 31 || by >= (int64_t)1 << 31) return d;
    while ((int64_t)1 << (d.shift - 31) < by) d.shift++;
    d.factor = (uint32_t)((((uint64_t)1 << d.shift) + (uint64_t)by - 1) / (uint64_t)by);
    return d;
}

static __device__ __forceinline__ int64_t mti_divide_by(int64_t i, const mti_divider &d) {
    return d.factor ? (int64_t)((uint64_t)(uint32_t)i * d.factor >> d.shift) : i / d.by;
}

template <bool WIDE, typename Op>
static __device__ __forceinline__ void mti_map_vector(const Op &op, int64_t row, int64_t col, int n) {
    typename Op::input in;
    op.template fetch<WIDE>(row, col, n, in);
    op.template finish<WIDE>(row, col, n, in);
}

/* mti_map_kernel for operators that are bound by memory. The op has its type as a template argument, and two halves:
   op.fetch<WIDE>(row, col, n, in) only loads, and op.finish<WIDE>(row, col, n, in) computes and stores. A thread
   fetches AHEAD vectors before it finishes the first one. They are a block apart, so that each load of a warp is
   contiguous. A group with the end of a row or of the matrix is computed one vector at a time, and so is
   MTI_ANY_TYPE.

   An H200 issues 6.8 instructions in the time in which it moves a byte at 85 % of its copy rate. The first number
   counts the instructions of a thread that computes one group, per element, in bf16 on sm_90. The second number is 6.8
   times the bytes that an element moves. Measured: kernels in this table within their budget reach 0.87 to 1.03 of a
   copy, with dropout 0.73. GELU by erf without a bias, with 33 of 27, reaches 0.75. Filling f32 (0.45) and converting
   to f32 (0.75) stay below: each store instruction of a thread writes 16 bytes, half a sector, and the next one the
   other half.
     y = a + b           12 of 41    bias                   10 of 27    conversion to f32           8 of 41
     bias and GELU       24 of 41    bias and erf GELU      35 of 41    bias and SwiGLU            27 of 68
     bias and ReLU       14 of 41    bias, squared ReLU     15 of 41    bias and tanh              27 of 41
     fill                 7 of 14    rotary embeddings      20 of 27
     y = a * b           12 of 41    times a row            11 of 27    times a column             11 of 27
     sigmoid             18 of 27    SiLU                   18 of 27    sigmoid gate               21 of 41
     sigmoid, backward   24 of 41    SiLU, backward         25 of 41    sigmoid gate, backward     29 of 68
     bias, dropout and add     39 of 41    (51 in rows that do not begin at a multiple of four elements)
   The addition needs 40 registers, so an SM has 6 blocks with 96 KiB of loads in flight. */
template <int TYPE, bool WIDE, int AHEAD, typename Op>
static __global__ void __launch_bounds__(256)
    mti_map_ahead_kernel(Op op, int64_t rows, int64_t cols, mti_divider per_row) {
    int64_t items = rows * per_row.by, step = (int64_t)gridDim.x * blockDim.x * AHEAD;
    int64_t first = (int64_t)blockIdx.x * blockDim.x * AHEAD + threadIdx.x;
    for (; first < items; first += step) {
        int64_t row[AHEAD], col[AHEAD];
        int whole = TYPE != MTI_ANY_TYPE && first + (int64_t)(AHEAD - 1) * blockDim.x < items;
        MT_DEVICE_UNROLL
        for (int a = 0; a < AHEAD; a++) {
            int64_t i = first + (int64_t)a * blockDim.x;
            row[a] = mti_divide_by(i, per_row);
            col[a] = (i - row[a] * per_row.by) * MTI_VECTOR;
            whole = whole && col[a] + MTI_VECTOR <= cols;
        }
        if (whole) {
            typename Op::input in[AHEAD];
            MT_DEVICE_UNROLL
            for (int a = 0; a < AHEAD; a++) op.template fetch<true>(row[a], col[a], MTI_VECTOR, in[a]);
            MT_DEVICE_UNROLL
            for (int a = 0; a < AHEAD; a++) op.template finish<true>(row[a], col[a], MTI_VECTOR, in[a]);
            continue;
        }
        MT_DEVICE_UNROLL
        for (int a = 0; a < AHEAD; a++) {
            int n = mti_vector_size(cols, col[a]);
            if (first + (int64_t)a * blockDim.x >= items) break;
            mti_map_vector<WIDE>(op, row[a], col[a], n);
        }
    }
}

/* Launches mti_map_ahead_kernel. `wide` says that mti_is_wide holds for all views of op. With a TYPE other than
   MTI_ANY_TYPE it always does. */
template <int TYPE, int AHEAD = mti_ahead<TYPE>::value, typename Op>
static mt_status mti_map_ahead(mt_context *ctx, const char *name, const Op &op, int wide, int64_t rows, int64_t cols) {
    int64_t per_row = (cols + MTI_VECTOR - 1) / MTI_VECTOR, items = rows * per_row;
    unsigned block = (unsigned)mt_min(256, mt_round_up(items, 32)), grid = mti_grid(items, 256 * AHEAD);
    if (items == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    if (wide)
        MT_LAUNCH_KERNEL((mti_map_ahead_kernel<TYPE, true, AHEAD, Op>), grid, block, 0, mt_context_stream(ctx), op,
                         rows, cols, mti_divider_of(per_row, items + (int64_t)256 * AHEAD));
    else
        MT_LAUNCH_KERNEL((mti_map_ahead_kernel<TYPE, TYPE != MTI_ANY_TYPE, AHEAD, Op>), grid, block, 0,
                         mt_context_stream(ctx), op, rows, cols, mti_divider_of(per_row, items + (int64_t)256 * AHEAD));
    return mt_cuda_launched(ctx, name);
}

} /* extern "C++" */
#endif
