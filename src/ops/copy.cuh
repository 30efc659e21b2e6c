/* ---- copies, on a GPU -------------------------------------------------------------------------------------------- */

#pragma once
#include "system.h"

#if MT_HAS_CUDA
extern "C++" {

static mt_status mti_cuda_copy_view(mt_context *ctx, mt_tensor x, mt_tensor y) {
    if (x.data == y.data) return MT_SUCCESS; /* the same view: see mti_expect_same_or_apart */
    size_t size = mt_dtype_size(x.dtype);
    return mt_cuda_copy_rows(ctx, y.data, (size_t)mt_tensor_ld(y) * size, x.data, (size_t)mt_tensor_ld(x) * size,
                             (size_t)x.cols * size, x.rows);
}

static mt_status mti_cuda_upload(mt_context *ctx, const void *host, mt_tensor y) {
    size_t size = mt_dtype_size(y.dtype);
    return mt_cuda_upload(ctx, y.data, (size_t)mt_tensor_ld(y) * size, host, (size_t)y.cols * size, y.rows);
}

/* Waits for peers first, because a copy to pageable memory would wait for them without a timeout. */
static mt_status mti_cuda_download(mt_context *ctx, mt_tensor x, void *host) {
    size_t size = mt_dtype_size(x.dtype), row = (size_t)x.cols * size;
    MT_TRY(mt_cuda_enter(ctx));
    MT_TRY(mt_cuda_wait_peers(ctx));
    MT_TRY(mt_cuda_copy_rows(ctx, host, row, x.data, (size_t)mt_tensor_ld(x) * size, row, x.rows));
    return mt_context_synchronize(ctx);
}

} /* extern "C++" */
#endif
