/* ---- key/value cache --------------------------------------------------------------------------------------------- */

#pragma once
#include "../comm/context.h"

/* The keys and values of earlier tokens in one attention layer, for inference. The cache has room for max_seq positions
   of each of `batch` sequences. The key at position p of sequence b and group g is row (b * groups + g) * max_seq + p
   of keys, and its value is the same row of values. The caller owns the memory of keys, values and lengths. */
typedef struct mt_kv_cache {
    mt_tensor keys, values; /* [batch * groups * max_seq, head_dim], contiguous, of the model's type */
    int64_t max_seq;        /* at least 1 */
    /* [batch], in memory of the context's device: how many tokens of each sequence the cache holds before a call, 0 to
       max_seq. The calls of layers do not change it. After the last layer the caller adds the new tokens to it, with
       mt_kv_cache_advance */
    const int32_t *lengths;
} mt_kv_cache;

/* Adds the new tokens of a step to the lengths of a cache: lengths[b] = min(lengths[b] + added[b], max_seq). added is
   the `lengths` of the step; NULL: `seq` new tokens of each sequence. A number below 0 counts as 0, and one above seq
   as seq. added [batch] and lengths [batch] are in memory of the context's device. lengths is the array that the caches
   of all layers share. Call it once, after the last layer. */
MT_API mt_status mt_kv_cache_advance(mt_context *ctx, int64_t max_seq, int64_t batch, int64_t seq, const int32_t *added,
                                     int32_t *lengths);
