/* ---- cross-attention --------------------------------------------------------------------------------------------- */

#pragma once
#include "batch.h"
#include "mlp.h"

/* Attention with queries from x, and keys and values from another sequence, `memory`: in the decoder of arXiv
   1706.03762 the output of the encoder (CrossAttention of Megatron-LM). A query sees all valid keys of its sequence.
   There is no causal mask and no rotary. A mask or a bias can be given, see mt_cross_attention_forward.
   The heads are split over the tensor ranks: the layers of queries, keys and values are column-parallel, core attention
   runs on this rank's query groups, and the projection is row-parallel.
   hidden must be a multiple of heads, and heads a multiple of kv_heads. heads must be at least t, and in invariant mode
   at least V. Otherwise create returns MT_ERR_SHAPE. kv_heads need not be a multiple of t (V): the last ranks then have
   empty groups. When it is less than t (V), each group is divided into pieces. Both are as in mt_self_attention with
   MT_QKV_PER_GROUP.
   Communication over the tensor group: forward does 1 all-reduce, of y. Backward does 2: one of dx, and one of dmemory
   for keys and values together. With sequence_parallel forward does 2 all-gathers (x, memory) and 1 reduce-scatter (y),
   and backward does 3 all-gathers (dy, x, memory) and 2 reduce-scatters (dx, dmemory). A gradient that is mt_none() is
   not reduced. */
typedef struct mt_cross_attention_desc {
    int64_t hidden, heads;
    int64_t kv_heads;     /* number of query groups; 0: heads */
    int64_t kv_hidden;    /* features of memory; 0: hidden */
    float dropout;        /* of attention probabilities */
    int64_t layer_number; /* selects the dropout masks. It may be that of a self-attention in the same layer */
    int no_bias;          /* 1: query, key, value and proj have no bias */
    /* advanced */
    mt_scores_desc scores; /* only softcap and scale; the others must be 0 (MT_ERR_ARGUMENT) */
    int skip_bias_add;     /* as in mt_mlp_desc, for proj.bias */
    int sequence_parallel; /* 1: x and y are [queries / t, hidden], and memory is [keys / t, kv_hidden] */
    int recompute_core;    /* 1: backward runs core attention again, and saved does not keep out and lse */
    mt_init_desc init;     /* of query, key and value, and of proj */
    int add_to_dx;         /* 1: backward adds to dx, see mt_linear_desc */
    int add_to_dmemory;    /* the same for dmemory, to sum it over the layers that read one memory */
} mt_cross_attention_desc;

typedef struct mt_cross_attention {
    mt_cross_attention_desc desc;
    mt_column_parallel_linear query;               /* NAME.query.*, from x */
    mt_column_parallel_linear key_value[2];        /* NAME.key.* and NAME.value.*, from memory */
    mt_row_parallel_linear proj;                   /* NAME.linear_proj.* */
    int64_t pieces, head_dim, groups, first_group; /* as in mt_self_attention */
    mt_comm *cp;                                   /* as in mt_self_attention */
    mt_context_parallel_desc context;              /* mt_parallel_options.context when it was created */
} mt_cross_attention;

typedef struct mt_cross_attention_saved {
    mt_batch batch, memory_batch; /* of forward; its arrays must not change until backward */
    mt_linear_saved query_in, memory_in, proj_in;
    /* q, out [queries, proj.local_features], k, v [keys, key_value[i].local_features], lse [n, queries], where n is the
       number of query heads in this rank's non-empty groups. With recompute_core, out and lse are not valid after
       forward. */
    mt_tensor q, k, v, out, lse;
} mt_cross_attention_saved;

/* Forward computes y from x and memory. Backward computes dx and dmemory from dy, and adds to the gradients of the
   parameters.
     x, y, dx, dy     [queries, hidden], with queries = batch->sequences * batch->seq
     memory, dmemory  [keys, kv_hidden], with keys = memory_batch->sequences * memory_batch->seq
   With sequence_parallel each rank has 1 / t of these rows, and t must divide queries and keys. On c context ranks a
   rank has 1 / c of the queries and of the keys, see mt_context_parallel_token. With whole_keys in
   mt_parallel_options.context each of them has all keys of the same memory. dmemory is then this rank's term of a sum
   over the context ranks: pass it on to the backward of what made the memory, whose parameter gradients
   mt_sync_gradients adds up. batch is that of the
   tokens of x, and memory_batch that of memory, such as the encoder's. Sequence i of one belongs to sequence i of the
   other. Of their fields:
     sequences, first_sequence  must be the same in both
     seq                        of batch is the number of queries of a sequence, of memory_batch that of its keys
     lengths                    of memory_batch: the first lengths[i] keys of sequence i are valid. With length 0, core
                                attention returns zeros. lengths of batch has no effect: padded queries also get a row
                                of y
     bias                       of memory_batch: the bias or mask of these scores, with its gradient. bias.value is
                                [bias.batch * bias.heads * seq of batch, seq of memory_batch]. That
                                of batch has no effect
     seed, step, random_offset  of batch select the dropout masks; those of memory_batch have no effect
     cu_seqlens                 must be NULL in both (MT_ERR_ARGUMENT)
   The other fields have no effect. A probability is dropped by its index in [sequence, head, query, key], see
   mt_attention_desc. Inference (saved NULL) has no dropout. Backward uses the batches of forward.
   y must overlap neither x nor memory. dx and dmemory must not overlap each other, dy, x or memory (MT_ERR_ARGUMENT).
   x and memory may be the same tensor. When t > 1, y, dx and dmemory must be contiguous; with sequence_parallel x,
   memory and dy, too (MT_ERR_SHAPE). x and memory must not change until backward has returned. The tensors of saved are
   in the arena until the caller's mt_arena_release. When dx or dmemory is mt_none(), backward does not compute it.
   MT_ERR_SHAPE: the batches have different numbers of sequences. MT_ERR_ARGUMENT: their first_sequence differs.
   Errors of create: MT_ERR_ARGUMENT (a field of desc is out of range; the limit of hidden and kv_hidden is 2^31 - 1),
   MT_ERR_SHAPE (see mt_cross_attention_desc), and those of the linear layers. */
MT_API mt_status mt_cross_attention_create(mt_context *ctx, mt_params *params, const char *name,
                                           const mt_cross_attention_desc *desc, mt_cross_attention *out);
MT_API mt_status mt_cross_attention_forward(mt_context *ctx, const mt_cross_attention *attention, const mt_batch *batch,
                                            mt_tensor x, const mt_batch *memory_batch, mt_tensor memory, mt_tensor y,
                                            mt_cross_attention_saved *saved);
MT_API mt_status mt_cross_attention_backward(mt_context *ctx, const mt_cross_attention *attention, mt_tensor dy,
                                             mt_tensor dx, mt_tensor dmemory, const mt_cross_attention_saved *saved);
