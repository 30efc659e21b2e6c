/* ---- weights of other models ------------------------------------------------------------------------------------- */

#pragma once
#include "weights.h"
#include "../comm/system.h"

static int mti_qkv_sizes_ok(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols) {
    return heads > 0 && kv_heads > 0 && head_dim > 0 && cols > 0 && heads % kv_heads == 0 && heads <= INT32_MAX &&
           head_dim <= INT32_MAX / heads && cols <= INT32_MAX;
}

MT_API mt_status mt_qkv_from_separate(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols, const float *q,
                                      const float *k, const float *v, float *qkv) {
    size_t row, queries;
    int64_t g;
    if (!mti_qkv_sizes_ok(heads, kv_heads, head_dim, cols)) return MT_ERR_SHAPE;
    if (!q || !k || !v || !qkv) return MT_ERR_ARGUMENT;
    row = (size_t)(head_dim * cols);
    queries = row * (size_t)(heads / kv_heads);
    for (g = 0; g < kv_heads; g++, q += queries, k += row, v += row, qkv += queries + 2 * row) {
        memcpy(qkv, q, queries * sizeof *qkv);
        memcpy(qkv + queries, k, row * sizeof *qkv);
        memcpy(qkv + queries + row, v, row * sizeof *qkv);
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_qkv_to_separate(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols, const float *qkv,
                                    float *q, float *k, float *v) {
    size_t row, queries;
    int64_t g;
    if (!mti_qkv_sizes_ok(heads, kv_heads, head_dim, cols)) return MT_ERR_SHAPE;
    if (!q || !k || !v || !qkv) return MT_ERR_ARGUMENT;
    row = (size_t)(head_dim * cols);
    queries = row * (size_t)(heads / kv_heads);
    for (g = 0; g < kv_heads; g++, q += queries, k += row, v += row, qkv += queries + 2 * row) {
        memcpy(q, qkv, queries * sizeof *qkv);
        memcpy(k, qkv + queries, row * sizeof *qkv);
        memcpy(v, qkv + queries + row, row * sizeof *qkv);
    }
    return MT_SUCCESS;
}

/* Copies `pairs` to `halves`, or back. Both are [heads * head_dim, cols]. */
static mt_status mti_rotary_convert(int64_t heads, int64_t head_dim, int64_t rotary_dim, int64_t cols,
                                    const float *pairs, const float *halves, float *to) {
    int64_t turned = rotary_dim ? rotary_dim : head_dim, h, i;
    size_t row;
    if (!mti_qkv_sizes_ok(heads, heads, head_dim, cols) || turned < 0 || turned > head_dim || turned % 2 != 0)
        return MT_ERR_SHAPE;
    if ((!pairs && !halves) || !to) return MT_ERR_ARGUMENT;
    row = (size_t)cols;
    for (h = 0; h < heads; h++)
        for (i = 0; i < head_dim; i++) {
            int64_t half = i >= turned ? i : i / 2 + i % 2 * (turned / 2); /* row i of pairs is this row of halves */
            size_t in_pairs = (size_t)(h * head_dim + i) * row, in_halves = (size_t)(h * head_dim + half) * row;
            if (pairs) memcpy(to + in_halves, pairs + in_pairs, row * sizeof *to);
            else memcpy(to + in_pairs, halves + in_halves, row * sizeof *to);
        }
    return MT_SUCCESS;
}

MT_API mt_status mt_rotary_halves_from_pairs(int64_t heads, int64_t head_dim, int64_t rotary_dim, int64_t cols,
                                             const float *pairs, float *halves) {
    return mti_rotary_convert(heads, head_dim, rotary_dim, cols, pairs, NULL, halves);
}

MT_API mt_status mt_rotary_pairs_from_halves(int64_t heads, int64_t head_dim, int64_t rotary_dim, int64_t cols,
                                             const float *halves, float *pairs) {
    return mti_rotary_convert(heads, head_dim, rotary_dim, cols, NULL, halves, pairs);
}
