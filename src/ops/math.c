/* ---- functions of one number ------------------------------------------------------------------------------------- */

#pragma once
#include "system.h"

#define MTI_PARTIALS 32 /* partial sums of a reduction; fixed, so that every processor adds in the same order */
#define MTI_BLOCK 1024  /* columns that several small loops process one after the other while they are in L1 */

/* a if `first` is 1, b if it is 0, by a bit mask. gcc does not move arithmetic that may trap out of a branch, so it
   would vectorise ?: between computed floats on AVX-512 only. */
MT_INLINE float mti_select(int first, float a, float b) {
    uint32_t mask = 0u - (uint32_t)first;
    return mt_f32_from_bits((mt_f32_bits(a) & mask) | (mt_f32_bits(b) & ~mask));
}

MT_INLINE float mti_abs(float x) { return mt_f32_from_bits(mt_f32_bits(x) & 0x7fffffffu); }

/* e^r - 1 = r + r^2 q(r) for |r| <= 0.348. The coefficients of q are fitted by weighted least squares (Lawson) for the
   smallest relative error of e^r, 3.2e-9. */
MT_INLINE MT_HOST_DEVICE float mti_exp_part(float r) {
    float q = 1.38140109e-3f * r + 8.36900063e-3f;
    q = q * r + 4.16684151e-2f;
    q = q * r + 1.66665182e-1f;
    q = q * r + 4.9999994e-1f;
    return q * (r * r) + r;
}

/* e^x. A multiple of ln 2 is subtracted from x, so that |r| <= 0.348. ln 2 is split into two parts for this (Cody and
   Waite). Adding 1.5 * 2^23 to x / ln 2 rounds it to an integer, which is in the low bits of t.
   Results below FLT_MIN become 0, exp(-inf) = 0, exp(inf) = inf, and NaN stays NaN. Bit masks select the results at
   both ends of the range, see mti_select. */
MT_INLINE MT_HOST_DEVICE float mti_exp(float x) {
    const float round = 12582912.0f;
    float t = x * 1.44269504f + round;
    float n = t - round;
    float y = mti_exp_part((x - n * 0.693359375f) + n * 2.12194440e-4f) + 1.0f;
    uint32_t bits, fits;
    bits = (mt_f32_bits(y) + (mt_f32_bits(t) << 23)) & ((uint32_t)(x < -87.33654f) - 1u);
    fits = 0u - (uint32_t)(x <= 88.72283f);
    return mt_f32_from_bits((bits & fits) | (mt_f32_bits(x + (float)INFINITY) & ~fits));
}

/* Returns x, which the compiler then does not know. Where ?: limits the argument of a formula to a constant, gcc
   computes the formula for the constant, too, and branches between the results, so that the loop does not vectorise. */
static float mti_unknown(float x) {
    volatile float y = x;
    return y;
}

/* e^x for x <= 88, in fewer instructions than mti_exp and with the same error. Results below FLT_MIN are denormal or 0.
   `least` is mti_unknown(-88.0f), which a caller gets before its loop. The number that rounds is 1.5 * 2^23 + 127, so
   that the low bits of t are the exponent with its bias. They are 0 for x = -88. */
MT_INLINE float mti_exp_to_88(float x, float least) {
    const float round = 12583039.0f;
    float from = x < least ? least : x, t = from * 1.44269504f + round, n = t - round;
    float power = mt_f32_from_bits(mt_f32_bits(t) << 23);
    return mti_exp_part((from - n * 0.693359375f) + n * 2.12194440e-4f) * power + power;
}

/* 2^x for -127 <= x <= 127, with a relative error of at most 1.8e-7. It is 2^n 2^r with an integer n and |r| <= 0.5.
   2^r = 1 + r q(r), where q is fitted like that of mti_exp_part, with a relative error of 9.4e-8. 2^-127 is 0, 2^0 is
   1, and NaN stays NaN. `round` is that of mti_exp_to_88. */
MT_INLINE float mti_exp2(float x) {
    const float round = 12583039.0f;
    float t = x + round, r = x - (t - round), q = 1.32694072e-3f * r + 9.67129413e-3f;
    q = q * r + 5.55071123e-2f;
    q = q * r + 2.40222469e-1f;
    q = q * r + 6.93147004e-1f;
    return (q * r + 1.0f) * mt_f32_from_bits(mt_f32_bits(t) << 23);
}

/* e^x for x that is at most 0, up to rounding, in fewer instructions than mti_exp_to_88. Roundings of x / ln 2 add an
   absolute error of at most 1e-7 |x| e^x to that of mti_exp2. e^-inf is 0. `least` is mti_unknown(-127.0f). */
MT_INLINE float mti_exp_below(float x, float least) {
    float e = x * 1.44269504f;
    return mti_exp2(e < least ? least : e);
}

/* Phi(x) = 0.5 (1 + erf(x / sqrt(2))). e is e^(-x^2 / 2), which the callers have computed already.
   |x| < 1:  0.5 + x P(x^2). The relative error of P is 7e-10.
   |x| >= 1: the tail 0.5 erfc(|x| / sqrt(2)) = e S(u) with u = 1 / (1 + 0.33 |x|). The relative error of S is 1e-8
   where e is not 0. Nothing cancels in the left tail.
   P and S are fitted like q in mti_exp. The error of erf is at most 1.5e-7. */
MT_INLINE float mti_normal_cdf(float x, float e) {
    float size = mti_abs(x), z = x * x, u = 1.0f / (1.0f + 0.33f * size);
    float p = -7.65420828e-6f * z + 1.13486371e-4f, s = 4.34392653e-2f * u - 1.37640953e-1f, tail;
    p = p * z - 1.18632999e-3f;
    s = s * u + 1.07992314e-1f;
    p = p * z + 9.97332297e-3f;
    s = s * u + 6.87360205e-3f;
    p = p * z - 6.64903596e-2f;
    s = s * u + 1.00570522e-1f;
    p = p * z + 3.98942292e-1f;
    s = s * u + 1.15344465e-1f;
    s = s * u + 1.31830275e-1f;
    s = s * u + 1.31644055e-1f;
    tail = e * (s * u);
    tail = mti_select(x < 0.0f, tail, 1.0f - tail);
    p = 0.5f + x * p;
    return mti_select(size < 1.0f, p, tail);
}

/* tanh(x), with the sign of x, where u = |x| and e = e^-2u:
   u < 0.625:  u + u^3 P(u^2). P is fitted like q in mti_exp, with a relative error of 4.4e-9.
   u >= 0.625: 1 - 2 e / (1 + e), which is 1 for large u and infinity.
   The relative error of tanh is at most 1.6e-7. NaN stays NaN, and -0 stays -0. `least` is that of mti_exp_to_88. */
MT_INLINE float mti_tanh(float x, float least) {
    float u = mti_abs(x), z = u * u, e = mti_exp_to_88(-2.0f * u, least);
    float large = 1.0f - 2.0f * e / (1.0f + e), p = -5.70498451e-3f * z + 2.06390849e-2f;
    p = p * z - 5.37397143e-2f;
    p = p * z + 1.33314422e-1f;
    p = p * z - 3.33332819e-1f;
    p = u + u * (z * p);
    return mt_f32_from_bits(mt_f32_bits(mti_select(u < 0.625f, p, large)) | (mt_f32_bits(x) & 0x80000000u));
}

/* sqrt(x) for x >= 0. The sqrt of libm sets errno, which keeps loops from vectorising. This function estimates 1 /
   sqrt(x) from the bits of x, then takes two Newton steps and one Heron step. It scales small x up first, so that no
   intermediate result is denormal. */
MT_INLINE float mti_sqrt(float x) {
    int tiny = x < 1e-20f;
    float up = mti_select(tiny, 18446744073709551616.0f, 1.0f);   /* 2^64 */
    float down = mti_select(tiny, 2.3283064365386963e-10f, 1.0f); /* 2^-32 */
    float v = x * up;
    float y = mt_f32_from_bits(0x5f3759dfu - (mt_f32_bits(v) >> 1));
    float s;
    y = y * (1.5f - (0.5f * v * y) * y);
    y = y * (1.5f - (0.5f * v * y) * y);
    s = v * y;
    s = 0.5f * (s + v / s) * down;
    return mti_select((x > 0.0f) & (x <= FLT_MAX), s, x);
}
