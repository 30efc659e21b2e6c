/* ---- fill, on a GPU ---------------------------------------------------------------------------------------------- */

#pragma once
#include "map.cuh"

#if MT_HAS_CUDA
extern "C++" {

template <int TYPE> struct mti_fill_op {
    struct input {};
    mti_view y;
    float value;
    template <bool WIDE> __device__ void fetch(int64_t, int64_t, int, input &) const {}
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &) const {
        float x[MTI_VECTOR];
        for (int j = 0; j < MTI_VECTOR; j++) x[j] = value;
        mti_store<WIDE, TYPE>(y, row, col, n, x);
    }
};

static mt_status mti_cuda_fill(mt_context *ctx, mt_tensor y, float value) {
    mti_access how = mti_access_of(y);
    if (y.rows * y.cols == 0) return MT_SUCCESS;
    if (mt_f32_bits(value) == 0 && (y.rows == 1 || mt_tensor_ld(y) == y.cols))
        return mt_cuda_zero(ctx, y.data, (size_t)(y.rows * y.cols) * mt_dtype_size(y.dtype));
    return mti_by_type(how.type, [&](auto type) {
        mti_fill_op<type.value> op = {mti_view_of(y), value};
        return mti_map_ahead<type.value>(ctx, "mt_fill", op, how.wide, y.rows, y.cols);
    });
}

} /* extern "C++" */
#endif
