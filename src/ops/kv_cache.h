/* ---- key/value cache --------------------------------------------------------------------------------------------- */

#pragma once
#include "attention.h"

/* The keys and values of earlier tokens in one attention layer, for inference. The cache has room for max_seq positions
   of each of `batch` sequences. The key at position p of sequence b and group g is row (b * groups + g) * max_seq + p
   of keys, and its value is the same row of values. The caller owns the memory of keys, values and lengths. */
typedef struct mt_kv_cache {
    mt_tensor keys, values; /* [batch * groups * max_seq, head_dim], contiguous, both of the type of qkv */
    int64_t max_seq;        /* at least 1 */
    /* [batch], in memory of the context's device: how many tokens of each sequence the cache holds before a call, 0 to
       max_seq. append and attention do not change it. After the last layer the caller adds the new tokens to it, with
       mt_kv_cache_advance */
    const int32_t *lengths;
} mt_kv_cache;

/* append:    turns the queries and keys of qkv in place, as mt_rotary_forward does, and copies the keys and values to
              the cache. Token i of sequence b has the position lengths[b] + i, where lengths is that of the cache.
              table is [max_seq, R], with the max_seq of the cache and R as in mt_rotary_forward, or mt_none() for a
              model without rotary position embedding.
   attention: out [batch * seq, heads * head_dim] = the attention of the queries in qkv to the keys and values in the
              cache. Call append first, which adds the keys and values of qkv. Query i of sequence b sees the keys
              0 ... lengths[b] + i, or with a window the last desc->scores.window of them.
   desc->seq is the number of new tokens of each sequence: 1 for a step that adds one token, the length of the longest
   prompt for prompts. desc->lengths has the number of new tokens of each sequence, 0 to seq (NULL: all have seq). The
   rows of qkv after these are not read. Their rows of out become 0. A sequence with 0 new tokens keeps its cache.
   Both read the five sizes of desc, qkv_layout and lengths. append also reads the rotary fields of scores, and
   attention the others and alibi_slopes. scores.mask must be MT_MASK_CAUSAL. kv_seq, dropout, cu_seqlens and bias must
   not be set.
   Attention reads the keys and values in their own type. On a CPU, calls with at most MT_KV_DECODE_QUERIES queries for
   each key/value head (seq * heads_per_group) read each key and value once, without a copy. Longer calls, and all calls
   in invariant mode, compute blocks of scores as mt_attention_forward does. A row of out then has the same bits as in
   mt_attention_forward of the whole sequence. For a GPU, docs/gpus.md says which kernel runs.
   Errors: MT_ERR_UNSUPPORTED (a field is set that must not be; attention on a GPU: as in mt_attention_forward, or
   max_seq is 2^30 or more), MT_ERR_SHAPE (max_seq is below 1, or keys or values are not contiguous), MT_ERR_DTYPE (keys
   and values do not have the type of qkv), MT_ERR_DATA (on a CPU: a length is out of range, or a sequence would have
   more than max_seq tokens). A GPU does not check lengths. With wrong lengths its results are undefined, but it
   accesses no memory outside the tensors. */
#define MT_KV_DECODE_QUERIES 16
MT_API mt_status mt_kv_cache_append(mt_context *ctx, const mt_attention_desc *desc, mt_tensor table, mt_tensor qkv,
                                    const mt_kv_cache *cache);
MT_API mt_status mt_kv_cache_attention(mt_context *ctx, const mt_attention_desc *desc, mt_tensor qkv,
                                       const mt_kv_cache *cache, mt_tensor out);
