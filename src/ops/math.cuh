/* ---- functions of one number, on a GPU --------------------------------------------------------------------------- */

#pragma once
#include "system.h"

#if MT_HAS_CUDA
extern "C++" {

/* Kernels whose result is rounded to 16 bits pass fast = true. Then GPUs compute e^x and a / b approximately, with a
   relative error of at most 2^-23 (2 + 1.2 |x|) for e^x and 2^-22 for a / b. Results below FLT_MIN may become 0. In f32
   results fast is false. */
static __device__ __forceinline__ float mti_cuda_exp(int fast, float x) { return fast ? __expf(x) : expf(x); }

static __device__ __forceinline__ float mti_cuda_quotient(int fast, float a, float b) {
    return fast ? __fdividef(a, b) : a / b;
}

/* Phi(x) = 0.5 (1 + erf(x / sqrt(2))), as e S(u) with u = 1 / (1 + 0.3 |x|) in the left tail. S is fitted like that of
   mti_normal_cdf, for |x| <= 14. Its relative error is 8.3e-6. e is e^(-x^2 / 2). */
static __device__ __forceinline__ float mti_cuda_normal_cdf(float x, float e) {
    float u = __fdividef(1.0f, 1.0f + 0.3f * fabsf(x)), s = -0.0770946381f * u + 0.216028721f;
    s = s * u - 0.0169386918f;
    s = s * u + 0.144191494f;
    s = s * u + 0.113743084f;
    s = s * u + 0.120074132f;
    s = e * (s * u);
    return x < 0.0f ? s : 1.0f - s;
}

} /* extern "C++" */
#endif
