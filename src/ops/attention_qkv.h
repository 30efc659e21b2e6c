/* ---- attention on a tensor qkv and on a key/value cache, for authors of attention -------------------------------- */

#pragma once
#include "attention.h"
#include "kv_cache.h"

/* Attention with queries, keys and values in one tensor, as a column-parallel layer computes them. These functions
   compute what mt_dot_product_attention_forward and mt_dot_product_attention_backward compute from columns of qkv.
     qkv, dqkv       [batch * seq, groups * (heads_per_group + 2) * head_dim]; the order of the columns is
                     desc->qkv_layout
     out, lse, dout  as in mt_dot_product_attention_forward
   backward overwrites dqkv, and adds to desc->bias.grad. dout must not overlap out.
   Errors: those of mt_dot_product_attention_forward and mt_dot_product_attention_backward, and MT_ERR_SHAPE (kv_seq is
   neither 0 nor seq). */
MT_API mt_status mt_attention_forward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor qkv, mt_tensor out,
                                      mt_tensor lse);
MT_API mt_status mt_attention_backward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor qkv, mt_tensor out,
                                       mt_tensor lse, mt_tensor dout, mt_tensor dqkv);

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
   Both read the five sizes of desc, qkv_layout, lengths and part. append also reads the rotary fields of scores, and
   attention the others and alibi_slopes. scores.mask must be MT_MASK_CAUSAL. kv_seq, dropout, cu_seqlens and bias must
   not be set.
   A call may have a part of the new tokens, such as those of a context rank: desc->part.seq is the number of new tokens
   of a whole sequence, and the call has the desc->seq tokens from part.first_query on. Then lengths counts the new
   tokens of the whole sequence. Token i is token part.first_query + i of them, and what is said of position and keys
   counts from there. Tokens from part.seq on are padding. The other fields of part must be 0 (MT_ERR_UNSUPPORTED).
   In append heads_per_group may be 0: then qkv has only keys and values, [batch * seq, groups * 2 * head_dim].
   Attention reads the keys and values in their own type. On a CPU, calls with at most MT_KV_DECODE_QUERIES queries for
   each key/value head (seq * heads_per_group) read each key and value once, without a copy. Longer calls, and all calls
   in invariant mode, compute blocks of scores as mt_attention_forward does, also with bf16 operands. A row of out then
   has the same bits as in mt_attention_forward of the whole sequence. For a GPU, docs/gpus.md says which kernel runs.
   Errors: MT_ERR_UNSUPPORTED (a field is set that must not be; attention on a GPU: as in mt_attention_forward, or
   max_seq is 2^30 or more), MT_ERR_SHAPE (max_seq is below 1, keys or values are not contiguous, part is out of range,
   or attention with heads_per_group 0), MT_ERR_DTYPE (keys
   and values do not have the type of qkv), MT_ERR_DATA (on a CPU: a length is out of range, or a sequence would have
   more than max_seq tokens). A GPU does not check lengths. With wrong lengths its results are undefined, but it
   accesses no memory outside the tensors. */
#define MT_KV_DECODE_QUERIES 16
MT_API mt_status mt_kv_cache_append(mt_context *ctx, const mt_attention_desc *desc, mt_tensor table, mt_tensor qkv,
                                    const mt_kv_cache *cache);
MT_API mt_status mt_kv_cache_attention(mt_context *ctx, const mt_attention_desc *desc, mt_tensor qkv,
                                       const mt_kv_cache *cache, mt_tensor out);

/* For blocks that use a key/value cache. ids [batch * seq] is in memory of the context's device.
   check:     checks desc and max_seq and, on a CPU, desc->lengths and cache->lengths. It does not read keys and values.
              Call it before the block communicates, with a desc of all groups of the model, so that all ranks return
              the same error. `where` is the name of the calling function, for the error message.
   positions: ids[b * seq + i] = min(lengths[b] + i, max_seq - 1), the position of token i of sequence b, as
              mt_embedding_forward needs it for a table of positions. */
MT_API mt_status mt_kv_cache_check(mt_context *ctx, const char *where, const mt_attention_desc *desc,
                                   const mt_kv_cache *cache);
MT_API mt_status mt_kv_cache_positions(mt_context *ctx, const mt_kv_cache *cache, int64_t batch, int64_t seq,
                                       int32_t *ids);
