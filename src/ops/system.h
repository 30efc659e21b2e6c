/* ---- what operators need of the compiler, and of a GEMM library -------------------------------------------------- */

#pragma once
#include "../comm/16bit.c"

#include <float.h>
#include <limits.h>
#include <math.h>

#if defined(__GNUC__) && !defined(__CUDACC__)
#if defined(__F16C__) || defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#endif

#if defined(MT_USE_ONEDNN) && defined(MT_USE_CBLAS)
#error "mt_kernels.cuh: define MT_USE_ONEDNN or MT_USE_CBLAS, not both"
#endif
#if defined(MT_USE_ONEDNN)
#include <dnnl.h>
#elif defined(MT_USE_CBLAS)
#if !defined(MT_CBLAS_HEADER)
#define MT_CBLAS_HEADER <cblas.h>
#endif
#include MT_CBLAS_HEADER
#endif

#if MT_HAS_CUDA
#include <cublasLt.h>
#endif
#if defined(MT_USE_CUDNN)
#if !MT_HAS_CUDA
#error "MT_USE_CUDNN: cuDNN works on GPUs; compile the implementation of mt_kernels.cuh with nvcc, as a .cu file"
#endif
#include <cudnn.h>
#if CUDNN_VERSION < 91000
#error "MT_USE_CUDNN needs cuDNN 9.10 or later"
#endif
#endif

/* Compilers vectorise the loops below without -ffast-math (see MT_INDEPENDENT in mt_comm.h). */
#if defined(__clang__)
#define MTI_UNROLL _Pragma("clang loop unroll(full)")
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed" /* -O0 and -O1 leave the loops scalar */
#elif defined(__GNUC__) && !defined(__CUDACC__)
#define MTI_UNROLL _Pragma("GCC unroll 16")
#else
#define MTI_UNROLL
#endif
#if MT_PREFER_512
#pragma GCC push_options
#pragma GCC target("prefer-vector-width=512")
#endif

/* Brings the line of the cache at an address into L1, or into L2. */
#if defined(__GNUC__)
#define MTI_PREFETCH(address) __builtin_prefetch(address)
#define MTI_PREFETCH_L2(address) __builtin_prefetch(address, 0, 2)
#else
#define MTI_PREFETCH(address) ((void)(address))
#define MTI_PREFETCH_L2(address) ((void)(address))
#endif
