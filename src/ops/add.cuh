/* ---- sums and type conversions, on a GPU ------------------------------------------------------------------------- */

#pragma once
#include "map.cuh"

#if MT_HAS_CUDA
extern "C++" {

template <int TYPE> struct mti_add_op { /* y = a + b */
    struct input {
        mti_fetched<TYPE> a, b;
    };
    mti_view a, b, y;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(a, row, col, n, in.a);
        mti_fetch<WIDE>(b, row, col, n, in.b);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &in) const {
        float x[MTI_VECTOR];
        mti_values(in.a, x);
        mti_add_values(in.b, x);
        mti_store<WIDE, TYPE>(y, row, col, n, x);
    }
};

static mt_status mti_cuda_add(mt_context *ctx, mt_tensor a, mt_tensor b, mt_tensor y) {
    mti_access how = mti_access_of(a, b, y);
    return mti_by_type(how.type, [&](auto type) {
        mti_add_op<type.value> op = {mti_view_of(a), mti_view_of(b), mti_view_of(y)};
        return mti_map_ahead<type.value>(ctx, "mt_add", op, how.wide, y.rows, y.cols);
    });
}

template <int FROM, int TO> struct mti_convert_op { /* y = x. Both types are MTI_ANY_TYPE, or none. */
    struct input {
        mti_fetched<FROM> x;
    };
    mti_view x, y;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(x, row, col, n, in.x);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &in) const {
        float v[MTI_VECTOR];
        mti_values(in.x, v);
        mti_store<WIDE, TO>(y, row, col, n, v);
    }
};

static mt_status mti_cuda_convert(mt_context *ctx, mt_tensor x, mt_tensor y) {
    mti_access from = mti_access_of(x), to = mti_access_of(y);
    int wide = from.wide && to.wide;
    return mti_by_type(from.type, [&](auto a) {
        return mti_by_type(to.type, [&](auto b) {
            const bool any = a.value == MTI_ANY_TYPE || b.value == MTI_ANY_TYPE;
            mti_convert_op<any ? MTI_ANY_TYPE : a.value, any ? MTI_ANY_TYPE : b.value> op = {mti_view_of(x),
                                                                                             mti_view_of(y)};
            return mti_map_ahead < any ? MTI_ANY_TYPE : a.value, 2 > (ctx, "mt_convert", op, wide, y.rows, y.cols);
        });
    });
}

} /* extern "C++" */
#endif
