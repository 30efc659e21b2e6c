/* ---- weighted sums, on a GPU ------------------------------------------------------------------------------------- */

#pragma once
#include "scale_add.h"
#include "map.cuh"

#if MT_HAS_CUDA
extern "C++" {

template <int TYPE> struct mti_scale_add_op { /* y = a x + b y */
    struct input {
        mti_fetched<TYPE> x, y;
        float a, b;
    };
    mti_view x, y;
    float a, b;
    const float *a_factor, *b_factor;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(x, row, col, n, in.x);
        if (b != 0.0f) mti_fetch<WIDE>(y, row, col, n, in.y);
        in.a = a_factor ? a * *a_factor : a;
        in.b = b_factor ? b * *b_factor : b;
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &in) const {
        float v[MTI_VECTOR], w[MTI_VECTOR] = {};
        mti_values(in.x, v);
        if (b != 0.0f) mti_values(in.y, w);
        for (int j = 0; j < MTI_VECTOR; j++) v[j] = b != 0.0f ? in.a * v[j] + in.b * w[j] : in.a * v[j];
        mti_store<WIDE, TYPE>(y, row, col, n, v);
    }
};

static mt_status mti_cuda_scale_add(mt_context *ctx, float a, mt_tensor a_factor, mt_tensor x, float b,
                                    mt_tensor b_factor, mt_tensor y) {
    mti_access how = mti_access_of(x, y);
    return mti_by_type(how.type, [&](auto type) {
        mti_scale_add_op<type.value> op = {
            mti_view_of(x), mti_view_of(y), a, b, (const float *)a_factor.data, (const float *)b_factor.data};
        return mti_map_ahead<type.value>(ctx, "mt_scale_add", op, how.wide, y.rows, y.cols);
    });
}

} /* extern "C++" */
#endif
