/* ---- kernels load and store eight elements of any float type at once --------------------------------------------- */

#pragma once
#include "views.cuh"

#if MT_HAS_CUDA
extern "C++" {

struct __align__(16) mti_words {
    uint32_t w[4];
};

/* These two functions load and store 16 bytes with one instruction. nvcc may otherwise load and store the four words of
   an mti_words one by one. */
static __device__ __forceinline__ mti_words mti_load_words(const void *from) {
    uint4 u = *(const uint4 *)from;
    mti_words p;
    p.w[0] = u.x, p.w[1] = u.y, p.w[2] = u.z, p.w[3] = u.w;
    return p;
}

static __device__ __forceinline__ void mti_store_words(void *to, const mti_words &p) {
    *(uint4 *)to = make_uint4(p.w[0], p.w[1], p.w[2], p.w[3]);
}

/* mti_unpack converts eight 16-bit values to f32, mti_pack converts back. The first value is in the low half of
   w[0]. */
static __device__ __forceinline__ void mti_unpack(int dtype, const mti_words &p, float *x) {
    MT_DEVICE_UNROLL
    for (int j = 0; j < 4; j++) {
        if (dtype == MT_BF16) {
            x[2 * j] = __uint_as_float(p.w[j] << 16);
            x[2 * j + 1] = __uint_as_float(p.w[j] & 0xffff0000u);
        } else {
            x[2 * j] = __half2float(__ushort_as_half((unsigned short)(p.w[j] & 0xffffu)));
            x[2 * j + 1] = __half2float(__ushort_as_half((unsigned short)(p.w[j] >> 16)));
        }
    }
}

static __device__ __forceinline__ mti_words mti_pack(int dtype, const float *x) {
    mti_words p;
    MT_DEVICE_UNROLL
    for (int j = 0; j < 4; j++) {
        unsigned low, high;
        if (dtype == MT_BF16) {
            __nv_bfloat162 both = __floats2bfloat162_rn(x[2 * j], x[2 * j + 1]); /* one instruction since sm_80 */
            low = __bfloat16_as_ushort(both.x), high = __bfloat16_as_ushort(both.y);
        } else {
            __half2 both = __floats2half2_rn(x[2 * j], x[2 * j + 1]);
            low = __half_as_ushort(both.x), high = __half_as_ushort(both.y);
        }
        p.w[j] = low | high << 16;
    }
    return p;
}

/* mti_load loads n <= MTI_VECTOR elements, starting at (row, col), and sets the rest of x to 0. mti_store stores n
   elements. With WIDE, whole vectors are aligned to 16 bytes. */
template <bool WIDE, int TYPE = MTI_ANY_TYPE>
static __device__ __forceinline__ void mti_load(const mti_view &v, int64_t row, int64_t col, int n, float *x) {
    if (WIDE && n == MTI_VECTOR) {
        int64_t i = row * v.ld + col;
        if (mti_type_of<TYPE>(v) == MT_F32) {
            float4 a = *(const float4 *)((const float *)v.data + i),
                   b = *(const float4 *)((const float *)v.data + i + 4);
            x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
        } else {
            mti_unpack(mti_type_of<TYPE>(v), mti_load_words((const uint16_t *)v.data + i), x);
        }
        return;
    }
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR; j++) x[j] = j < n ? mti_get<TYPE>(v, row, col + j) : 0.0f;
}

template <bool WIDE, int TYPE = MTI_ANY_TYPE>
static __device__ __forceinline__ void mti_store(const mti_view &v, int64_t row, int64_t col, int n, const float *x) {
    if (WIDE && n == MTI_VECTOR) {
        int64_t i = row * v.ld + col;
        /* Behind a loop nvcc splits a store of 16 bytes into four, but not that of __stwb. With types that are known at
           run time, __stwb needs registers that some kernels do not have. */
        if (mti_type_of<TYPE>(v) == MT_F32) {
            float4 *to = (float4 *)((float *)v.data + i);
            float4 low = make_float4(x[0], x[1], x[2], x[3]), high = make_float4(x[4], x[5], x[6], x[7]);
            if (TYPE == MTI_ANY_TYPE) to[0] = low, to[1] = high;
            else __stwb(to, low), __stwb(to + 1, high);
        } else {
            mti_words p = mti_pack(mti_type_of<TYPE>(v), x);
            uint16_t *to = (uint16_t *)v.data + i;
            if (TYPE == MTI_ANY_TYPE) mti_store_words(to, p);
            else __stwb((uint4 *)to, make_uint4(p.w[0], p.w[1], p.w[2], p.w[3]));
        }
        return;
    }
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR; j++)
        if (j < n) mti_put<TYPE>(v, row, col + j, x[j]);
}

/* A vector as it lies in memory, or as f32 for MTI_ANY_TYPE. mti_fetch only loads it, so a thread can have the loads of
   several vectors under way before mti_values converts the first one. A vector in 16 bits takes 4 registers, and 8 when
   it is converted. n and WIDE are those of mti_load. */
template <int TYPE> struct mti_fetched {
    static const int size = TYPE == MT_BF16 || TYPE == MT_F16 ? 2 : 4; /* of an element, in bytes */
    mti_words words[size / 2];
};

template <bool WIDE, int TYPE>
static __device__ __forceinline__ void mti_fetch(const mti_view &v, int64_t row, int64_t col, int n,
                                                 mti_fetched<TYPE> &out) {
    const int size = mti_fetched<TYPE>::size;
    const uint16_t *from = (const uint16_t *)v.data + (row * v.ld + col); /* with size 2 */
    if (size == 4) {
        float x[MTI_VECTOR];
        mti_load<WIDE, TYPE>(v, row, col, n, x);
        MT_DEVICE_UNROLL
        for (int j = 0; j < MTI_VECTOR; j++) out.words[j * size / 16].w[j % 4] = __float_as_uint(x[j]);
    } else if (WIDE && n == MTI_VECTOR) {
        out.words[0] = mti_load_words(from);
    } else {
        MT_DEVICE_UNROLL
        for (int j = 0; j < MTI_VECTOR / 2; j++)
            out.words[0].w[j] = (2 * j < n ? from[2 * j] : 0u) | (2 * j + 1 < n ? (uint32_t)from[2 * j + 1] << 16 : 0u);
    }
}

template <int TYPE> static __device__ __forceinline__ void mti_values(const mti_fetched<TYPE> &in, float *x) {
    const int size = mti_fetched<TYPE>::size;
    if (size == 2) mti_unpack(TYPE, in.words[0], x);
    MT_DEVICE_UNROLL
    for (int j = 0; j < MTI_VECTOR && size == 4; j++) x[j] = __uint_as_float(in.words[j * size / 16].w[j % 4]);
}

/* x += the values of a vector. */
template <int TYPE> static __device__ __forceinline__ void mti_add_values(const mti_fetched<TYPE> &in, float *x) {
    float z[MTI_VECTOR];
    mti_values(in, z);
    for (int j = 0; j < MTI_VECTOR; j++) x[j] += z[j];
}

/* Whether kernels may load and store the vectors of a view 16 bytes at a time. True for a view that the caller left
   out. */
static int mti_is_wide(mt_tensor t) {
    size_t size = mt_dtype_size(t.dtype);
    if (!t.data) return 1;
    return (uintptr_t)t.data % 16 == 0 && (t.rows <= 1 || (size_t)mt_tensor_ld(t) * size % 16 == 0);
}

/* How a kernel accesses its views. `type` is their type if all have the same type and are wide, otherwise
   MTI_ANY_TYPE. */
struct mti_access {
    int type, wide;
};

template <typename... Views> static mti_access mti_access_of(mt_tensor first, Views... more) {
    const mt_tensor views[] = {first, more...};
    mti_access how = {(int)first.dtype, 1};
    for (const mt_tensor &v : views) {
        if (v.data && (int)v.dtype != how.type) how.type = MTI_ANY_TYPE;
        how.wide = how.wide && mti_is_wide(v);
    }
    if (!how.wide) how.type = MTI_ANY_TYPE;
    return how;
}

/* mti_by_type calls f(mti_constant<type>()), so that f can launch the kernel with this template argument. The kernel
   with MTI_ANY_TYPE serves mixed types and views that are not wide. */
template <int VALUE> struct mti_constant { static const int value = VALUE; };

template <typename Launch> static mt_status mti_by_type(int type, const Launch &f) {
    switch (type) {
    case MT_F32: return f(mti_constant<MT_F32>());
    case MT_BF16: return f(mti_constant<MT_BF16>());
    case MT_F16: return f(mti_constant<MT_F16>());
    default: return f(mti_constant<MTI_ANY_TYPE>());
    }
}

/* Calls f(mti_constant<kind>()), with 0 <= kind < COUNT. */
template <int COUNT, int FIRST = 0, typename Launch> static mt_status mti_by_kind(int kind, const Launch &f) {
    if (kind == FIRST || FIRST + 1 == COUNT) return f(mti_constant<FIRST>());
    return mti_by_kind<COUNT, (FIRST + 1 < COUNT ? FIRST + 1 : FIRST)>(kind, f);
}

/* The number of vectors that a thread fetches before it computes the first one. Two of 16 bits have the bytes of one of
   f32. */
template <int TYPE> struct mti_ahead { static const int value = TYPE == MT_BF16 || TYPE == MT_F16 ? 2 : 1; };

} /* extern "C++" */
#endif
