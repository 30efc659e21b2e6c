/* ---- weights of other models, for authors of importers ----------------------------------------------------------- */

#pragma once
#include "../comm/status.h"

/* Values of mt_tensor_name.part in the table of a model of transformer layers. This row is for files that have the
   queries of each layer in a tensor of their own:
       {"layers.#.wq.weight", "decoder.layers.#.self_attention.linear_qkv.weight", MT_PART_QUERY, 0}
   QUERY, KEY, VALUE  of self_attention.linear_qkv.*; with MT_QKV_SEPARATE, of self_attention.query.*, key.* and value.*
                      In the file the heads follow one another. With rotary positions, queries and keys are in halves
                      in the file (MT_ROTARY_HALVES)
   QUERY_PAIRS, KEY_PAIRS  the same for files in pairs (MT_ROTARY_PAIRS), such as Meta's Llama
   GATE, UP           of mlp.linear_fc1.* with MT_SWIGLU */
typedef enum mt_layer_part {
    MT_PART_QUERY = 1,
    MT_PART_KEY = 2,
    MT_PART_VALUE = 3,
    MT_PART_QUERY_PAIRS = 4,
    MT_PART_KEY_PAIRS = 5,
    MT_PART_GATE = 6,
    MT_PART_UP = 7
} mt_layer_part;

/* Copies between a QKV weight [(heads + 2 * kv_heads) * head_dim, cols] of the layout MT_QKV_PER_GROUP and separate
   weights q [heads * head_dim, cols], k and v [kv_heads * head_dim, cols]. For a bias cols is 1. All are unsharded and
   contiguous, in host memory, and must not overlap. Errors: MT_ERR_SHAPE (a size is not positive or too large, or heads
   is not a multiple of kv_heads), MT_ERR_ARGUMENT (a pointer is NULL). */
MT_API mt_status mt_qkv_from_separate(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols, const float *q,
                                      const float *k, const float *v, float *qkv);
MT_API mt_status mt_qkv_to_separate(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols, const float *qkv,
                                    float *q, float *k, float *v);

/* Copy a weight [heads * head_dim, cols] of queries or of keys between models with MT_ROTARY_PAIRS and
   MT_ROTARY_HALVES. In each head, rows 2 i and 2 i + 1 of `pairs` are rows i and i + R / 2 of `halves`, for i < R / 2,
   with R = rotary_dim, or head_dim if this is 0. The other rows are equal. When the queries and keys of a model are
   converted, and its values are left as they are, it computes the same with the other form, up to rounding. For a bias
   cols is 1. `pairs` and `halves` are unsharded and contiguous, in host memory, and must not overlap. Convert the
   separate weights of mt_qkv_to_separate. Errors: MT_ERR_SHAPE (a size is not positive or too large, or R is odd or
   greater than head_dim), MT_ERR_ARGUMENT (a pointer is NULL). */
MT_API mt_status mt_rotary_halves_from_pairs(int64_t heads, int64_t head_dim, int64_t rotary_dim, int64_t cols,
                                             const float *pairs, float *halves);
MT_API mt_status mt_rotary_pairs_from_halves(int64_t heads, int64_t head_dim, int64_t rotary_dim, int64_t cols,
                                             const float *halves, float *pairs);
