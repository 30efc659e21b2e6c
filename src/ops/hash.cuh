/* ---- hash of a tensor, on a GPU ---------------------------------------------------------------------------------- */

#pragma once
#include "system.h"

#if MT_HAS_CUDA
static mt_status mti_cuda_hash(mt_context *ctx, mt_tensor x, int64_t first_row, int64_t first_col, int64_t global_cols,
                               uint64_t *hash) {
    size_t mark = mt_arena_mark(ctx);
    void *memory = NULL;
    uint64_t sum = 0;
    if (x.rows == 0 || x.cols == 0) return MT_SUCCESS;
    MT_TRY(mt_arena_alloc(ctx, sizeof sum, &memory));
    MT_TRY(mt_cuda_zero(ctx, memory, sizeof sum));
    MT_TRY(mt_hash_add(ctx, x, first_row, first_col, global_cols, (uint64_t *)memory));
    MT_TRY(mt_cuda_fetch(ctx, &sum, memory, sizeof sum));
    mt_arena_release(ctx, mark);
    *hash += sum;
    return MT_SUCCESS;
}
#endif
