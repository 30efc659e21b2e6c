/* ---- bf16 and f16 ------------------------------------------------------------------------------------------------ */

#pragma once
#include "cuda.c"

/* Says that the iterations of the next loop are independent. Without it, compilers do not vectorize a loop whose input
   and output may be the same memory. */
#if defined(__CUDACC__)
#define MT_INDEPENDENT
#elif defined(__clang__)
#define MT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define MT_INDEPENDENT _Pragma("GCC ivdep")
#else
#define MT_INDEPENDENT
#endif

#if defined(__clang__) /* clang warns about each loop that it does not vectorize, even with -O0 */
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"
#endif

/* For Intel's processors with AVX-512, gcc takes vectors of 256 bits unless it is told to take longer ones. */
#if defined(__AVX512F__) && defined(__GNUC__) && __GNUC__ >= 11 && !defined(__clang__) &&                              \
    !defined(__INTEL_COMPILER) && !defined(__CUDACC__)
#define MT_PREFER_512 1
#pragma GCC push_options
#pragma GCC target("prefer-vector-width=512")
#else
#define MT_PREFER_512 0
#endif

#if defined(__GNUC__)
#define MT_INLINE static inline __attribute__((always_inline))
#else
#define MT_INLINE static inline
#endif

MT_INLINE MT_HOST_DEVICE uint32_t mt_f32_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

MT_INLINE MT_HOST_DEVICE float mt_f32_from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

MT_INLINE float mti_bf16_to_f32(uint16_t h) { return mt_f32_from_bits((uint32_t)h << 16); }

/* Rounds to nearest even: adds half of the last place of bf16, less one bit when this place is even, and drops the low
   16 bits. Beyond the largest bf16 the carry gives infinity. NaN keeps its top 16 bits and becomes quiet. */
MT_INLINE uint16_t mti_f32_to_bf16(float x) {
    uint32_t u = mt_f32_bits(x), rounded = u + 0x7fffu + ((u >> 16) & 1u);
    return (uint16_t)(((u & 0x7fffffffu) > 0x7f800000u ? u | 0x00400000u : rounded) >> 16);
}

/* The exponent biases of f32 and f16 differ by 112; infinity and NaN need another 112. For a denormal m * 2^-24 the
   code builds the normal float 2^-14 + m * 2^-24 and subtracts 2^-14. This function and mti_f32_to_f16 do the same
   float operations for every input, and their results do not depend on denormals of f32: compilers can vectorize them,
   and a CPU that flushes denormals to zero computes the same result. */
MT_INLINE float mti_f16_to_f32(uint16_t h) {
    uint32_t size = h & 0x7fffu, sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = size < 0x7c00u ? 112u : 224u, less = size < 0x0400u ? 0x38800000u : 0u; /* 2^-14 */
    exponent = size < 0x0400u ? 113u : exponent;
    return mt_f32_from_bits(mt_f32_bits(mt_f32_from_bits((size << 13) + (exponent << 23)) - mt_f32_from_bits(less)) |
                            sign);
}

/* `power` is the largest power of two that is not above |x|, or 2^-14, the smallest normal f16, if that is larger.
   Adding 2^13 * power rounds |x| to f16's last place, power * 2^-10. The low bits of the sum then hold |x| in units of
   this place: 1024 to 2048, or less for a denormal. 2^16 replaces every larger |x| and becomes infinity. So does 65520,
   which lies halfway between the largest f16 and 2^16. */
MT_INLINE uint16_t mti_f32_to_f16(float x) {
    uint32_t u = mt_f32_bits(x), size = u & 0x7fffffffu, sign = (u >> 16) & 0x8000u;
    uint32_t nan = size > 0x7f800000u ? 0x0200u | ((size >> 13) & 0x3ffu) : 0u;
    uint32_t finite = size < 0x47800000u ? size : 0x47800000u, below = finite & 0x7f800000u;
    uint32_t power = below > 0x38800000u ? below : 0x38800000u, shifted = power + (13u << 23);
    uint32_t count = mt_f32_bits(mt_f32_from_bits(finite) + mt_f32_from_bits(shifted)) - shifted;
    return (uint16_t)((((power - 0x38800000u) >> 13) + count) | nan | sign);
}

/* The same conversions by vector instructions, where the program is compiled for them. They give the same bits,
   also for NaN. These functions convert the first numbers, and return how many. */
#if defined(__F16C__) && defined(__GNUC__) && !defined(__CUDACC__)
#define MTI_HAS_F16C 1
#else
#define MTI_HAS_F16C 0
#endif
#if defined(__AVX512BF16__) && defined(__GNUC__) && !defined(__CUDACC__)
#define MT_HAS_AVX512_BF16 1
#else
#define MT_HAS_AVX512_BF16 0
#endif
#if MT_HAS_AVX512_BF16 && defined(__x86_64__) && defined(__linux__) &&                                                 \
    ((defined(__AMX_TILE__) && defined(__AMX_BF16__)) || (defined(__AMXTILE__) && defined(__AMXBF16__)))
#define MT_HAS_AMX_BF16 1
#else
#define MT_HAS_AMX_BF16 0
#endif

static int64_t mti_f16_to_f32_by_8(const uint16_t *x, float *y, int64_t n) {
    int64_t j = 0;
#if MTI_HAS_F16C
    for (; j + 8 <= n; j += 8)
        _mm256_storeu_ps(y + j, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(x + j))));
#endif
    (void)x, (void)y, (void)n;
    return j;
}

static int64_t mti_f32_to_f16_by_8(const float *x, uint16_t *y, int64_t n) {
    int64_t j = 0;
#if MTI_HAS_F16C
    for (; j + 8 <= n; j += 8)
        _mm_storeu_si128((__m128i *)(void *)(y + j),
                         _mm256_cvtps_ph(_mm256_loadu_ps(x + j), _MM_FROUND_TO_NEAREST_INT));
#endif
    (void)x, (void)y, (void)n;
    return j;
}

/* The instruction would round denormal numbers to 0, so the function ends before the first one. */
static int64_t mti_f32_to_bf16_by_16(const float *x, uint16_t *y, int64_t n) {
    int64_t j = 0;
#if MT_HAS_AVX512_BF16
    const __m512i exponent = _mm512_set1_epi32(0x7f800000), fraction = _mm512_set1_epi32(0x007fffff);
    for (; j + 16 <= n; j += 16) {
        __m512 v = _mm512_loadu_ps(x + j);
        __m512i u = _mm512_castps_si512(v);
        if (_mm512_mask_test_epi32_mask(_mm512_testn_epi32_mask(u, exponent), u, fraction)) break;
        _mm256_storeu_si256((__m256i *)(void *)(y + j), (__m256i)_mm512_cvtneps_pbh(v));
    }
#endif
    (void)x, (void)y, (void)n;
    return j;
}

MT_API void mt_f32_from_16bit(mt_dtype dtype, const uint16_t *x, float *y, int64_t n) {
    int64_t j, done;
    if (!x || !y) return;
    if (dtype == MT_BF16) {
        MT_INDEPENDENT
        for (j = 0; j < n; j++) y[j] = mti_bf16_to_f32(x[j]);
    } else {
        done = mti_f16_to_f32_by_8(x, y, n);
        MT_INDEPENDENT
        for (j = 0; j < n - done; j++) y[done + j] = mti_f16_to_f32(x[done + j]);
    }
}

MT_API void mt_f32_to_16bit(mt_dtype dtype, const float *x, uint16_t *y, int64_t n) {
    int64_t j, done;
    if (!x || !y) return;
    if (dtype == MT_BF16) {
        done = mti_f32_to_bf16_by_16(x, y, n);
        MT_INDEPENDENT
        for (j = 0; j < n - done; j++) y[done + j] = mti_f32_to_bf16(x[done + j]);
    } else {
        done = mti_f32_to_f16_by_8(x, y, n);
        MT_INDEPENDENT
        for (j = 0; j < n - done; j++) y[done + j] = mti_f32_to_f16(x[done + j]);
    }
}
