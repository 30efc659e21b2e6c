/* ---- merging attention to different keys: kernels ---------------------------------------------------------------- */

#pragma once
#include "map.cuh"

#if MT_HAS_CUDA
extern "C++" {

struct mti_merge {
    mti_view out, lse, part_out, part_lse;
    int64_t heads, head_dim;
};

/* A warp owns a head of a row: all its lanes read both lse before the first one writes the merged one. */
static __global__ void __launch_bounds__(256) mti_merge_kernel(mti_merge m, int64_t items) {
    int64_t step = (int64_t)gridDim.x * (blockDim.x / 32), lane = threadIdx.x % 32;
    for (int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32; i < items; i += step) {
        int64_t row = mt_divide(i, m.heads), head = i - row * m.heads, col = head * m.head_dim;
        mti_merging w = mti_merging_of(mti_get<MT_F32>(m.lse, head, row), mti_get<MT_F32>(m.part_lse, head, row));
        for (int64_t d = lane; d < m.head_dim; d += 32)
            mti_put(m.out, row, col + d,
                    mti_merged(w, mti_get(m.out, row, col + d), mti_get(m.part_out, row, col + d)));
        __syncwarp();
        if (lane == 0) mti_put(m.lse, head, row, w.lse);
    }
}

static mt_status mti_cuda_attention_merge(mt_context *ctx, mt_tensor out, mt_tensor lse, mt_tensor part_out,
                                          mt_tensor part_lse) {
    mti_merge m = {mti_view_of(out),      mti_view_of(lse), mti_view_of(part_out),
                   mti_view_of(part_lse), lse.rows,         out.cols / mt_max(lse.rows, 1)};
    int64_t items = out.rows * lse.rows;
    if (items == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_merge_kernel, mti_grid(items, 8), 256, 0, mt_context_stream(ctx), m, items);
    return mt_cuda_launched(ctx, "mt_attention_merge");
}

} /* extern "C++" */
#endif
