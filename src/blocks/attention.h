/* ---- self-attention ---------------------------------------------------------------------------------------------- */

#pragma once
#include "batch.h"
#include "mlp.h"
#include "../ops/kv_cache.h"
#include "../parallel/context.h"

/* A query group is one key/value head with its heads / kv_heads query heads. The groups are split over the tensor ranks
   (arXiv 1909.08053, figure 3b): QKV is column-parallel, core attention runs on this rank's groups, and the projection
   is row-parallel.
   hidden must be a multiple of heads, and heads a multiple of kv_heads. heads must be at least t, and in invariant
   mode (see mt_parallel.h) at least V = mt_context_desc.invariant. With rotary, rotary_dim must be even and at most
   hidden / heads, and max_seq must be set. Otherwise create returns MT_ERR_SHAPE. When kv_heads is not a multiple of t
   (in invariant mode, of V), the last ranks also have empty groups: padding, whose weights are zero.
   When kv_heads is less than t (in invariant mode, than V), each group is divided into pieces, which are split over the
   ranks instead of groups. A piece has some of the group's query heads and a copy of its key and value (copies and
   copied of mt_param_desc). mt_sync_gradients then does 1 more all-reduce for each weight and bias with copies, of all
   keys and values, and the all-reduces of these gradients over the data group do not overlap with backward.
   qkv_layout (mt_kernels.cuh) is the order of the rows of the QKV weight [(heads + 2 * kv_heads) * head size, hidden].
     MT_QKV_PER_GROUP     A rank has the rows of its groups, which are neighbours (unit = a query group).
     MT_QKV_CONCATENATED  A rank, and in invariant mode each virtual shard, has [its queries; its keys; its values]
                          (parts = 3, unit = head size). mt_param_scatter takes the whole weight [3 * hidden, hidden] of
                          a program with this layout as it is. kv_heads must be heads: MT_ERR_SHAPE.
     MT_QKV_SEPARATE      There are three layers, which share f, so the communication is the same. A rank has the rows
                          of its heads in each weight (unit = the query heads of a group, or the head size).
   With the last two, kv_heads must be a multiple of t (in invariant mode, of V). If kv_heads is less than t (V), heads
   must be a multiple instead. Otherwise create returns MT_ERR_SHAPE.
   The first values of a weight depend on its name and on the positions of its elements, so models of different layouts
   begin with different values. After the same weights are copied into each layout, the models compute the same outputs,
   up to rounding. */
typedef struct mt_self_attention_desc {
    int64_t hidden, heads;
    int64_t kv_heads; /* number of query groups: heads for MHA, fewer for GQA; 0: heads */
    /* mask, rotary, window, soft cap, ALiBi. rotary_form and rotary_dim must be 0 without rotary (MT_ERR_ARGUMENT) */
    mt_scores_desc scores;
    int64_t max_seq;      /* tokens of the longest sequence; must be 0 without rotary (MT_ERR_ARGUMENT) */
    float dropout;        /* of attention probabilities */
    int64_t layer_number; /* selects the dropout masks; give each layer a number of its own */
    int no_bias;          /* 1: qkv and proj have no bias */
    /* advanced */
    mt_qkv_layout qkv_layout; /* 0: MT_QKV_PER_GROUP */
    int skip_bias_add;        /* as in mt_mlp_desc, for proj.bias */
    int sequence_parallel;    /* 1: x and y are [tokens / t, hidden] */
    int recompute_core;       /* 1: backward runs core attention again, and saved does not keep out and lse */
    mt_init_desc init;        /* of qkv and proj */
    int add_to_dx;            /* 1: backward adds to dx, see mt_linear_desc */
} mt_self_attention_desc;

typedef struct mt_self_attention {
    mt_self_attention_desc desc;
    /* NAME.linear_qkv.*; the order of its rows is desc.qkv_layout; zero with MT_QKV_SEPARATE */
    mt_column_parallel_linear qkv;
    /* MT_QKV_SEPARATE: NAME.query.*, NAME.key.*, NAME.value.*; otherwise zero */
    mt_column_parallel_linear separate[3];
    mt_row_parallel_linear proj; /* NAME.linear_proj.* */
    mt_tensor rotary;            /* the table of mt_rotary_table, owned by the registry; mt_none(): no rotary */
    /* The slopes of this rank's n query heads (those in non-empty groups), [1, n], MT_F32, owned by the registry. You
       may write others there (see mt_upload). They must be at least 0: with another one, only its rank fails, on a CPU
       with MT_ERR_DATA. Checkpoints do not store slopes. mt_none(): no ALiBi, or no heads on this rank */
    mt_tensor alibi_slopes;
    mt_comm *cp;                      /* the context group; NULL: each rank has whole sequences */
    mt_context_parallel_desc context; /* mt_parallel_options.context when it was created */
    int64_t pieces;                   /* of each query group; 1 when there are enough groups */
    int64_t head_dim, groups;         /* groups: number of groups (or pieces) of this rank, empty ones included */
    int64_t first_group;              /* global index of this rank's first group (or piece) */
} mt_self_attention;

typedef struct mt_self_attention_saved {
    mt_batch batch; /* the batch of forward; the arrays that it points to must not change until backward */
    mt_linear_saved qkv_in, proj_in;
    /* qkv [tokens, local features of QKV], out [tokens, proj.local_features], lse [n, tokens], where n is the number of
       query heads in this rank's non-empty groups. With recompute_core, out and lse are not valid after forward. */
    mt_tensor qkv, out, lse;
} mt_self_attention_saved;

/* x, y, dx, dy, saved and the communication are as for mt_mlp_forward and mt_mlp_backward, with tokens =
   batch->sequences * batch->seq. With n context ranks (mt_grid_desc.cp), a rank has 1 / n of them, in the order of
   mt_context_parallel_desc; batch->seq, its lengths, documents and bias are those of whole sequences. Inference (saved
   NULL) has no dropout. Backward uses the batch of forward.
   MT_ERR_SHAPE: with rotary, batch->seq is greater than max_seq.
   Errors of create: MT_ERR_ARGUMENT (a field of desc is out of range; the limit of hidden and max_seq is 2^31 - 1),
   MT_ERR_SHAPE (see mt_self_attention_desc), and those of the linear layers. */
MT_API mt_status mt_self_attention_create(mt_context *ctx, mt_params *params, const char *name,
                                          const mt_self_attention_desc *desc, mt_self_attention *out);
MT_API mt_status mt_self_attention_forward(mt_context *ctx, const mt_self_attention *attention, const mt_batch *batch,
                                           mt_tensor x, mt_tensor y, mt_self_attention_saved *saved);
MT_API mt_status mt_self_attention_backward(mt_context *ctx, const mt_self_attention *attention, mt_tensor dy,
                                            mt_tensor dx, const mt_self_attention_saved *saved);

/* Inference with a key/value cache (see mt_kv_cache in mt_kernels.cuh): adds the keys and values of x to the cache, and
   computes y from x and the cache, without dropout.
     batch   seq is the number of new tokens of each sequence: 1 for a step of generation, the length of the longest
             prompt for prompts. lengths has the number of valid new tokens of each sequence (NULL: all are valid).
             cu_seqlens, documents and bias must not be set (MT_ERR_UNSUPPORTED). Other fields have no effect
     cache   keys and values are [sequences * n * max_seq, head size], contiguous, in the model's type, where n =
             mt_self_attention_cache_groups; mt_none() when n is 0. In invariant mode the rows of a virtual shard follow
             those of the one before. After its last layer the caller adds the new tokens to lengths
             (mt_kv_cache_advance)
     x, y    [sequences * seq, hidden] on every tensor rank, also with sequence_parallel, because the tokens of a step
             need not be a multiple of t. y must not overlap x. In y, rows of tokens that are not valid have no meaning
   On c context ranks, x and y have all tokens on each rank, or on each rank its share of them: [sequences * s / c,
   hidden], where s is seq, rounded up to a multiple of 2 c. (Of c with mt_parallel_options.context.contiguous; with V_c
   = context.invariant > 1, of 2 V_c or V_c.) The rows are those of mt_context_parallel_token for sequences of s tokens.
   Tokens from seq on are padding. batch is that of the whole sequences. Each rank gets all keys and values in its
   cache. The number of rows says which form it is: sequences * seq rows are all tokens. All context ranks choose the
   same form.
   Communication: 1 all-reduce over the tensor group. For a share of the tokens, also 1 all-gather of keys and values
   over the context group (in invariant mode one for each virtual shard).
   Errors: MT_ERR_UNSUPPORTED (the mask is not causal), MT_ERR_SHAPE (with rotary, the max_seq of the cache is greater
   than that of the layer), and those of mt_kv_cache_append. After an error, only keys and values at positions from
   lengths on may have changed.
   mt_self_attention_cache_groups returns n, the number of key/value heads of this rank. */
MT_API mt_status mt_self_attention_cached_forward(mt_context *ctx, const mt_self_attention *attention,
                                                  const mt_batch *batch, const mt_kv_cache *cache, mt_tensor x,
                                                  mt_tensor y);
MT_API int64_t mt_self_attention_cache_groups(const mt_self_attention *attention);

/* The tensors of attention in your own memory, see mt_linear_tensors. A group has n = heads / kv_heads query heads of D
   features. qkv and separate are split by rows, and proj by columns in units of n * D:
     MT_QKV_PER_GROUP     qkv, in units of (n + 2) * D
     MT_QKV_CONCATENATED  qkv, in 3 parts and units of D
     MT_QKV_SEPARATE      separate, the layers of queries (units of n * D), keys and values (units of D)
   qkv is ignored with MT_QKV_SEPARATE, and separate with the other layouts. kv_heads must be at least t, and in
   invariant mode at least V (MT_ERR_SHAPE), because here nothing sums the gradients of copies. */
typedef struct mt_self_attention_tensors {
    mt_linear_tensors qkv, separate[3], proj;
    /* the table [max_seq, R] of mt_rotary_table, MT_F32, where R is desc.scores.rotary_dim, or D if this is 0;
       mt_none() when desc.scores.rotary_base is 0 */
    mt_tensor rotary;
    /* [1, n], MT_F32: the slopes of this rank's n query heads, as mt_alibi_slopes computes them or others; mt_none()
       when desc.scores.alibi is 0. With alibi every rank passes memory, also one without heads (n is 0) */
    mt_tensor alibi_slopes;
} mt_self_attention_tensors;

/* Creates attention of tensors in your own memory, without a registry. mt_self_attention_forward,
   mt_self_attention_backward and mt_self_attention_cached_forward take it, and compute the same bits as for attention
   of a registry. It fills params, an array of 4, with MT_QKV_SEPARATE of 8. The block points into params, and uses tp
   and the memory of the tensors: all must outlive it, and params must not move. The struct may be copied. *tensors and
   name are copied. The block needs no destroy. tp is the tensor group. name, for messages and the hash log, may be
   NULL: then nothing is logged. No communication.
   desc means the same as for mt_self_attention_create, with two differences. A layer has a bias if its b is set;
   desc->no_bias 1 with such a b is MT_ERR_ARGUMENT. desc->init must be zero (MT_ERR_ARGUMENT), because you fill the
   weights.
   The caller sums dw and db over the data group. With sequence_parallel, proj.db is the sum over this rank's rows; the
   caller sums it over the tensor group.
   Errors: those of mt_self_attention_create and mt_column_parallel_linear_from_tensors. MT_ERR_ARGUMENT: rotary does
   not go with rotary_base, or alibi_slopes with alibi. MT_ERR_DTYPE: the layers have different types. A backward
   without dw, or without db where there is a bias, is MT_ERR_ARGUMENT; with skip_bias_add proj needs no db. After an
   error *out is zero, and calls with it are refused. */
MT_API mt_status mt_self_attention_from_tensors(mt_context *ctx, mt_comm *tp, const char *name,
                                                const mt_self_attention_desc *desc,
                                                const mt_self_attention_tensors *tensors, mt_param *params,
                                                mt_self_attention *out);
