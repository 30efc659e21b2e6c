/* ---- attention --------------------------------------------------------------------------------------------------- */

#pragma once
#include "random.h"

typedef enum mt_mask { MT_MASK_CAUSAL = 0, MT_MASK_BIDIRECTIONAL = 1 } mt_mask;
#define MT_MASK_WORDS "MT_MASK_CAUSAL MT_MASK_BIDIRECTIONAL" /* see mt_check_enum */

/* The order of queries, keys and values in the columns of qkv, and in the rows of the weights that compute it. A model
   has G query groups of n query heads, so A = G * n query heads, with D features each (n = heads_per_group, D =
   head_dim). The table gives the column (row of the weight) of feature d of query head a, and of the key and value of
   group g:
     layout               query                               key                     value
     MT_QKV_PER_GROUP     (a / n * (n + 2) + a % n) * D + d   (g * (n + 2) + n) * D + d   (g * (n + 2) + n + 1) * D + d
     MT_QKV_CONCATENATED  a * D + d                           (A + g) * D + d             (A + G + g) * D + d
     MT_QKV_SEPARATE      a * D + d                           g * D + d                   g * D + d
   MT_QKV_PER_GROUP     one weight, [q...q k v] for each group, as in Megatron-LM
   MT_QKV_CONCATENATED  one weight, [all queries; all keys; all values], as in GPT-2 and C programs that follow it
   MT_QKV_SEPARATE      three weights, as in Llama: the numbers are rows of the weight of queries, keys or values.
                        The outputs lie side by side in one tensor qkv, so for the operators below this layout is the
                        same as MT_QKV_CONCATENATED
   On a tensor rank G and A are the numbers of this rank's groups and heads. mt_self_attention_desc in megatron.h says
   how a weight of each layout is split. */
typedef enum mt_qkv_layout { MT_QKV_PER_GROUP = 0, MT_QKV_CONCATENATED = 1, MT_QKV_SEPARATE = 2 } mt_qkv_layout;
#define MT_QKV_LAYOUT_WORDS "MT_QKV_PER_GROUP MT_QKV_CONCATENATED MT_QKV_SEPARATE" /* see mt_check_enum */

/* The two features that rotary position embedding turns together, for i = 0 ... R / 2 - 1, where R is the number of
   features that it turns.
   MT_ROTARY_HALVES  i and i + R / 2: GPT-NeoX, Megatron-LM, and Llama in the files of Hugging Face
   MT_ROTARY_PAIRS   2 i and 2 i + 1: GPT-J, Megatron-LM with --rotary-interleaved, and Llama in the files of Meta
   mt_rotary_pairs_from_halves in megatron.h converts weights. */
typedef enum mt_rotary_form { MT_ROTARY_HALVES = 0, MT_ROTARY_PAIRS = 1 } mt_rotary_form;
#define MT_ROTARY_FORM_WORDS "MT_ROTARY_HALVES MT_ROTARY_PAIRS" /* see mt_check_enum */

/* How the scores of attention are computed from queries and keys. It is a part of mt_attention_desc, and of the descs
   of attention blocks and layers, which pass it on as it is. With all fields 0, attention is causal, without
   positions. */
typedef struct mt_scores_desc {
    mt_mask mask; /* 0: MT_MASK_CAUSAL; in cross-attention MT_MASK_BIDIRECTIONAL, which is the only one there */
    /* Base of rotary position embedding (arXiv 2104.09864), usually 10000. By default each head is turned as a whole
       and in halves, as in GPT-NeoX and Hugging Face's Llama; 0: no rotary. Operators take the table of
       mt_rotary_table instead, and mt_kv_cache_append refuses a base without a table (MT_ERR_ARGUMENT) */
    float rotary_base;
    /* advanced */
    mt_rotary_form rotary_form; /* 0: MT_ROTARY_HALVES */
    /* Only the first rotary_dim features of a head are turned: the head size times Megatron's --rotary-percent; 0: all
       of them */
    int64_t rotary_dim;
    /* Sliding window: a query at position p sees a key at position j only if |p - j| < window. With MT_MASK_CAUSAL
       these are the last `window` keys, as in Mistral (arXiv 2310.06825). 0: no window */
    int64_t window;
    /* Soft cap c of the scores: a score x becomes c * tanh(x / c), as in Gemma 2 (arXiv 2408.00118). It comes before
       ALiBi and the bias. 0: none */
    float softcap;
    /* 1: ALiBi (arXiv 2108.12409) adds -m * |p - j| to the score of a query at position p and a key at position j,
       where m is the slope of the head, see mt_alibi_slopes */
    int alibi;
    /* For operators: with alibi the slopes of the query heads of the call, at least 0, on the context's device; without
       it NULL (MT_ERR_ARGUMENT). Layers compute the slopes: in their desc it must be NULL */
    const float *alibi_slopes;
    float scale; /* factor of the products of queries and keys; MT_ZERO: 0; 0: 1 / sqrt(features of a head) */
} mt_scores_desc;

/* A bias that is added to the scores of attention, or a boolean mask of them, on the context's device. All fields may
   be 0: no bias. With `seq` queries and `kv_seq` keys in a sequence, value is [batch * heads * seq, kv_seq], and head a
   of a call reads head first_head + a of it, so it may hold the heads of all tensor ranks. The value for sequence b,
   head a and query i is in row (b * heads + first_head + a) * seq + i. An index that is shared counts as 0 there. */
typedef struct mt_attention_bias {
    /* Of a float type; -INFINITY masks a key. In MT_U8 it is a boolean mask: a query does not see the keys with 0.
       mt_none(), or a view of zeros as in a zero-initialised desc: no bias */
    mt_tensor value;
    mt_tensor grad;     /* optional, MT_F32, of the shape of value: backward adds the gradient of the bias to it */
    int64_t batch;      /* 1: all sequences share the bias; otherwise the number of sequences; 0: 1 */
    int64_t heads;      /* 1: all heads share the bias; otherwise the number of heads in it; 0: 1 */
    int64_t first_head; /* must be 0 in mt_batch, whose bias has the heads of the whole model (MT_ERR_ARGUMENT) */
} mt_attention_bias;

/* Which part of whole sequences a call has, such as that of a context rank: the queries [first_query, first_query +
   desc.seq) and the keys [first_key, first_key + desc.kv_seq) of sequences of `seq` queries and `kv_seq` keys. With all
   fields 0 a call has whole sequences. Everything that counts tokens then counts those of whole sequences: the mask,
   the window and ALiBi, lengths, cu_seqlens, the element numbers of dropout, and the rows and columns of the bias. The
   results for some keys are merged with those for others by mt_attention_merge. */
typedef struct mt_attention_part {
    int64_t seq;    /* queries of a whole sequence; 0: the call has whole sequences */
    int64_t kv_seq; /* keys of a whole sequence; 0: seq */
    int64_t first_query, first_key;
} mt_attention_part;

/* The sizes and options of scaled dot-product attention. Query heads form `groups` query groups. A group has
   heads_per_group query heads that share one key/value head. heads_per_group is 1 for MHA and more for GQA (arXiv
   2305.13245); groups is 1 for MQA.
   qkv is [batch * seq, groups * (heads_per_group + 2) * head_dim]. The token at position i of sequence b is row
   b * seq + i. The order of the columns is qkv_layout. Query head a is head a % heads_per_group of group a /
   heads_per_group. out and lse hold the query heads in this order. */
typedef struct mt_attention_desc {
    int64_t batch, seq, groups, heads_per_group, head_dim;
    mt_scores_desc scores;
    /* Key padding: `batch` lengths on the context's device, 0 <= lengths[b] <= seq. In sequence b the keys at positions
       >= lengths[b] are masked. For length 0, out and dqkv are 0. A CPU checks the range (MT_ERR_DATA), a GPU does
       not. NULL: no padding */
    const int32_t *lengths;
    /* Dropout of the probabilities. at.first_row is the global index of the first sequence, at.first_col the global
       index of the first query head, at.global_cols the number of query heads on all ranks together. The probability of
       sequence b, head a, query i and key j has the global element number
       (((first_row + b) * global_cols + first_col + a) * seq + i) * seq + j */
    mt_dropout dropout;
    mt_qkv_layout qkv_layout; /* of qkv and dqkv; 0: MT_QKV_PER_GROUP */
    /* advanced */
    /* Keys of a sequence; 0: seq. Other numbers are not for a tensor qkv (MT_ERR_SHAPE). lengths is then limited by
       kv_seq, and query i has the position i + kv_seq - seq among the keys: the last query and the last key have the
       same position. The mask, the window and ALiBi use this position, and element numbers of dropout count kv_seq keys
       for each query. */
    int64_t kv_seq;
    /* Packed sequences: the batch * seq tokens are `documents` documents, one after the other, and a query sees only
       keys of its own document. Document d has the tokens [cu_seqlens[d], cu_seqlens[d + 1]), so the array has
       documents + 1 ascending numbers, from 0 to batch * seq, on the context's device. A document also ends at the end
       of a sequence. A CPU checks the numbers (MT_ERR_DATA), a GPU does not. kv_seq must be 0 or seq. NULL: none.
       mt_rotary_forward and mt_rotary_backward read it, too */
    const int32_t *cu_seqlens;
    int64_t documents;
    mt_attention_bias bias; /* or a boolean mask; it is added to the scores */
    mt_attention_part part; /* with other than whole sequences */
} mt_attention_desc;

/* Attention of queries q to keys k and values v: self-attention, cross-attention, or attention to earlier keys.
   heads is groups * heads_per_group. desc->qkv_layout is not read.
     q, dq         [batch * seq, heads * head_dim]. The query at position i of sequence b is row b * seq + i
     k, v, dk, dv  [batch * kv_seq, groups * head_dim], in the same way
     out, dout     [batch * seq, heads * head_dim]
     lse           [heads, batch * seq]
   forward:  out = dropout(softmax(scale * q k^T, masked)) v. lse = the log of the sum of exponentials of the scaled
             scores. It is optional: only backward needs it. A query that sees no key has out = 0 and lse = -INFINITY.
   backward: dq, dk and dv = the gradients of q, k and v, and desc->bias.grad (optional) += the gradient of the bias.
             It takes the out and lse of forward and computes the probabilities again. A query that sees no key adds
             nothing to the gradients.
   Scratch memory grows linearly with seq. On GPUs from sm_80 on, bf16 and f16 with a head_dim that is a multiple of 8
   use tensor cores, at the cost of the next of 64, 96, 128, 192 and 256, if nvcc compiled the program for such a GPU
   (-arch=native). They skip tiles of keys that no query of a block sees, so a window or short documents make them
   faster. Other calls use a slower kernel without tensor cores, also those with a bias: see docs/gpus.md, also for
   MT_USE_CUDNN, with which cuDNN computes forward where it can.
   On a CPU the threads of the context share the work (mt_context_desc.threads), each with scratch memory of its own.
   The bits do not depend on their number. In forward a thread gets some blocks of 96 queries of a head, in backward
   some groups of a sequence. One thread computes the groups that add to the same elements of dbias.
   If q, k and v are bf16, in backward also dout, and the program is compiled for AVX512-BF16 (gcc or clang), then the
   products on a CPU have bf16 operands and sums in f32, as on tensor cores. A program that is compiled for AMX as well
   (-march=native on such a processor) multiplies in the tiles of AMX, if Linux permits it; then sums have another
   order. Probabilities and gradients of scores are rounded to bf16 before they are multiplied. The softmax and lse are
   computed in f32, and denormal bf16 numbers count as 0. A NaN or infinity in a row can reach the results of 31
   neighbouring rows that do not see it. Other calls on a CPU compute in f32.
   Forward does not read desc->bias.grad. Backward changes only the rows of this call's heads in it. Errors:
   MT_ERR_ARGUMENT (out of forward, or dq, dk or dv, overlaps another tensor of the call; in backward also: bias.grad
   does, or the bias is missing or is a boolean mask), MT_ERR_UNSUPPORTED (on a GPU: head_dim above 256, more than 65535
   heads or sequences; with cuDNN: a recorded step with more new shapes than there are plans). */
MT_API mt_status mt_dot_product_attention_forward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor q,
                                                  mt_tensor k, mt_tensor v, mt_tensor out, mt_tensor lse);
MT_API mt_status mt_dot_product_attention_backward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor q,
                                                   mt_tensor k, mt_tensor v, mt_tensor out, mt_tensor lse,
                                                   mt_tensor dout, mt_tensor dq, mt_tensor dk, mt_tensor dv);

/* slopes [1, n], MT_F32, becomes the slopes of the heads first_head to first_head + n - 1 of a model with `heads`
   heads, for mt_scores_desc.alibi_slopes. When `heads` is a power of 2, head h has the slope 2^(-8 (h + 1) / heads)
   (arXiv 2108.12409). Otherwise let m be the largest power of 2 below `heads`. The first m heads have the slopes of a
   model with m heads. Head m + k has the slope of head 2 k of a model with 2 m heads, as in the code of that paper.
   MT_ERR_ARGUMENT: heads is not in [1, 2^31), or the n heads are not in [0, heads). */
MT_API mt_status mt_alibi_slopes(mt_context *ctx, int64_t heads, int64_t first_head, mt_tensor slopes);

/* Rotary position embedding (arXiv 2104.09864) of the first R features of each head. R is desc->scores.rotary_dim, or
   head_dim if this is 0. R must be even. desc->scores.rotary_form selects the features that are rotated together: with
   MT_ROTARY_HALVES, feature i and feature i + R / 2 by the angle number i. The features from R on stay as they are.
   table:    table [seq, R]: row p holds the R / 2 cosines, then the R / 2 sines, of the angles p * base^(-2 i / R),
             i = 0 ... R / 2 - 1. It is the same for both forms.
   forward:  rotates the queries and keys of qkv in place. A token at position p uses row p of table.
   backward: rotates the gradients of the queries and keys in dqkv back, in place.
   The position of a token is its index in its sequence. With desc->cu_seqlens, it is the number of tokens before it in
   its document and its sequence: a document is rotated as if it were a sequence of its own, and one that goes on in the
   next sequence begins again at 0 there.
   forward and backward read the five sizes of desc, qkv_layout, rotary_form and rotary_dim of scores, cu_seqlens and
   documents. They do not read lengths, dropout or other fields of scores. Errors: MT_ERR_SHAPE (R is odd or is not in
   [0, head_dim], or cu_seqlens is set and kv_seq is neither 0 nor seq), MT_ERR_ARGUMENT, MT_ERR_DATA (cu_seqlens, on a
   CPU). */
MT_API mt_status mt_rotary_table(mt_context *ctx, float base, mt_tensor table);
MT_API mt_status mt_rotary_forward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor table, mt_tensor qkv);
MT_API mt_status mt_rotary_backward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor table, mt_tensor dqkv);
