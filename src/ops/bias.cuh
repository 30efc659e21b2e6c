/* ---- bias, on a GPU ---------------------------------------------------------------------------------------------- */

#pragma once
#include "bias.h"
#include "map.cuh"
#include "columns.cuh"

#if MT_HAS_CUDA
extern "C++" {

template <int TYPE> struct mti_bias_op { /* y += bias */
    struct input {
        mti_fetched<TYPE> y, bias;
    };
    mti_view y, bias;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(y, row, col, n, in.y);
        mti_fetch<WIDE>(bias, 0, col, n, in.bias);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &in) const {
        float x[MTI_VECTOR];
        mti_values(in.y, x);
        mti_add_values(in.bias, x);
        mti_store<WIDE, TYPE>(y, row, col, n, x);
    }
};

static mt_status mti_cuda_bias_forward(mt_context *ctx, mt_tensor y, mt_tensor bias) {
    mti_access how = mti_access_of(y, bias);
    return mti_by_type(how.type, [&](auto type) {
        mti_bias_op<type.value> op = {mti_view_of(y), mti_view_of(bias)};
        return mti_map_ahead<type.value>(ctx, "mt_bias_forward", op, how.wide, y.rows, y.cols);
    });
}

template <int TYPE> struct mti_value_op { /* column sums of dy */
    struct input {
        mti_fetched<TYPE> dy;
    };
    mti_view dy;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(dy, row, col, n, in.dy);
    }
    template <bool WIDE>
    __device__ void finish(int64_t, int64_t, int, const input &in, float (*sums)[MTI_VECTOR]) const {
        mti_add_values(in.dy, sums[0]);
    }
};

static mt_status mti_cuda_bias_backward(mt_context *ctx, mt_tensor dy, mt_tensor dbias) {
    mti_access how = mti_access_of(dy);
    return mti_by_type(how.type, [&](auto type) {
        mti_value_op<type.value> op = {mti_view_of(dy)};
        return mti_columns<type.value, 2 * mti_ahead<type.value>::value, 1>(ctx, "mt_bias_backward", op, how.wide,
                                                                            dy.rows, dy.cols, &dbias);
    });
}

} /* extern "C++" */
#endif
