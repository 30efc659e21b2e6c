/* ---- data types and tensor views --------------------------------------------------------------------------------- */

#pragma once
#include "api.h"

/* Collectives can move all five types and reduce all except MT_U8. A reduction of MT_BF16 or MT_F16 adds in float and
   rounds the sum once; over NCCL, NCCL rounds at each rank. The operators of mt_kernels.cuh take matrices of the three
   float types. */
typedef enum mt_dtype { MT_F32 = 0, MT_BF16 = 1, MT_F16 = 2, MT_I32 = 3, MT_U8 = 4 } mt_dtype;
#define MT_DTYPE_WORDS "MT_F32 MT_BF16 MT_F16 MT_I32 MT_U8" /* see mt_check_enum in mt_kernels.cuh */

MT_API size_t mt_dtype_size(mt_dtype dtype);      /* bytes per element; 0 for an unknown type */
MT_API const char *mt_dtype_name(mt_dtype dtype); /* "f32", "bf16", ... */

/* A view of a row-major matrix. It does not own the memory. Element (i, j) is data[i * ld + j]. Activations are
   [tokens, features]. Weights are [out_features, in_features], as in PyTorch. A vector is one row. */
typedef struct mt_tensor {
    void *data;
    int64_t rows, cols;
    int64_t ld; /* leading dimension in elements, >= cols; 0: cols */
    mt_dtype dtype;
} mt_tensor;

/* Views of contiguous memory (ld == cols). */
MT_API mt_tensor mt_tensor_make(const void *data, mt_dtype dtype, int64_t rows, int64_t cols);
MT_API mt_tensor mt_tensor_f32(const float *data, int64_t rows, int64_t cols);

/* Returns a view of rows or columns [first, first + count) of t, without a copy. The caller must keep the range inside
   t: these functions do not check it. A negative first or count, or an offset beyond int64_t, gives a view with
   rows == -1. Every call that gets such a view returns MT_ERR_SHAPE. */
MT_API mt_tensor mt_tensor_rows(mt_tensor t, int64_t first, int64_t count);
MT_API mt_tensor mt_tensor_cols(mt_tensor t, int64_t first, int64_t count);
