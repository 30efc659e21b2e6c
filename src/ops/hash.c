/* ---- hash of a tensor -------------------------------------------------------------------------------------------- */

#pragma once
#include "operator.c"
#include "hash.cuh"

MT_API uint64_t mt_hash_element(uint64_t element, uint32_t bits) { return mt_hash_word(element, bits); }

/* clang-format off */
static const mti_table mti_hash_table = {"mt_hash", {NULL, NULL, NULL}, {
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL}}};
/* clang-format on */

MT_API mt_status mt_hash(mt_context *ctx, mt_tensor x, int64_t first_row, int64_t first_col, int64_t global_cols,
                         uint64_t *hash) {
    mt_tensor *views[] = {&x};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_hash_table, views, NULL));
    MT_TRY(mt_check_integer(ctx, "mt_hash", NULL, "first_row", first_row, 0, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, "mt_hash", NULL, "first_col", first_col, 0, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, "mt_hash", NULL, "global_cols", global_cols, 0, INT64_MAX));
    if (!hash) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_hash: hash is NULL");
    MT_TRY(mti_begin(&op));
    return mti_end(&op,
                   MTI_CHOOSE(&op, mti_cuda_hash(ctx, x, first_row, first_col, global_cols, hash),
                              op.on_cpu ? mt_hash_add(ctx, x, first_row, first_col, global_cols, hash) : MT_SUCCESS));
}
