/* ---- elements of a tensor, on a GPU ------------------------------------------------------------------------------ */

#pragma once
#include "system.h"

#if MT_HAS_CUDA
extern "C++" {

/* A view as kernels see it. */
struct mti_view {
    char *data; /* NULL: an optional view that the caller left out */
    int64_t ld;
    int dtype;
};

static mti_view mti_view_of(mt_tensor t) {
    mti_view v;
    v.data = (char *)t.data;
    v.ld = mt_tensor_ld(t);
    v.dtype = (int)t.dtype;
    return v;
}

/* A thread works on a vector: MTI_VECTOR neighbours of a row. A vector has 16 bytes in a 16-bit type, and 32 bytes in
   f32. For views without 16-byte alignment and at the ends of rows, the same kernel works element by element. */
#define MTI_VECTOR 8

/* The number of elements of the vector that begins at col < cols. */
static __device__ __forceinline__ int mti_vector_size(int64_t cols, int64_t col) {
    return (int)(cols - col < MTI_VECTOR ? cols - col : MTI_VECTOR);
}

/* The template argument TYPE of the functions below is the mt_dtype of a view. With MTI_ANY_TYPE they read view.dtype.
   All threads take the same branch on it, but a load behind such a branch waits for the conversion of the load before
   it. So a kernel that is bound by memory passes the type. */
#define MTI_ANY_TYPE (-1)

template <int TYPE> static __device__ __forceinline__ int mti_type_of(const mti_view &v) {
    return TYPE == MTI_ANY_TYPE ? v.dtype : TYPE;
}

/* mti_get loads one element and widens it to f32. mti_put rounds x to the type of the view and stores it. */
template <int TYPE = MTI_ANY_TYPE>
static __device__ __forceinline__ float mti_get(const mti_view &v, int64_t row, int64_t col) {
    int64_t i = row * v.ld + col;
    if (mti_type_of<TYPE>(v) == MT_F32) return ((const float *)v.data)[i];
    if (mti_type_of<TYPE>(v) == MT_BF16) return __bfloat162float(((const __nv_bfloat16 *)v.data)[i]);
    return __half2float(((const __half *)v.data)[i]);
}

template <int TYPE = MTI_ANY_TYPE>
static __device__ __forceinline__ void mti_put(const mti_view &v, int64_t row, int64_t col, float x) {
    int64_t i = row * v.ld + col;
    if (mti_type_of<TYPE>(v) == MT_F32) ((float *)v.data)[i] = x;
    else if (mti_type_of<TYPE>(v) == MT_BF16) ((__nv_bfloat16 *)v.data)[i] = __float2bfloat16_rn(x);
    else ((__half *)v.data)[i] = __float2half_rn(x);
}

} /* extern "C++" */
#endif
