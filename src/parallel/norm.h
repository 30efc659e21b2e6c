/* ---- norm -------------------------------------------------------------------------------------------------------- */

#pragma once
#include "params.h"
#include "../ops/norm.h"

/* LayerNorm or RMSNorm. Every tensor rank has the whole gain and bias. By default the layer normalises whole tokens.
   With groups > 0 ("per head") it normalises each head in this rank's query groups separately. Under sequence
   parallelism, and per head, gain and bias are sequence_partial: a rank computes their gradients from its own tokens or
   heads, and mt_sync_gradients sums them. */
typedef struct mt_norm_layer_desc {
    int64_t features;      /* number of features that are normalised together: hidden, or per head the head size */
    int64_t groups;        /* per head: number of query groups, over all tensor ranks, below 2^31; 0: whole tokens */
    mt_norm_kind kind;     /* 0: MT_LAYER_NORM */
    float eps;             /* 0: 1e-5 */
    int sequence_parallel; /* 1: x is [tokens / t, features]; MT_ERR_ARGUMENT with groups > 0 */
} mt_norm_layer_desc;

typedef struct mt_norm_layer {
    mt_norm_layer_desc desc;
    mt_param *weight, *bias; /* NAME.weight, NAME.bias [1, features]; bias is NULL for MT_RMS_NORM */
    mt_comm *tp;
    int64_t local_groups; /* per head: query groups on this rank, padding included; otherwise 0 */
} mt_norm_layer;

/* x is a view of the caller's memory. Its content must not change before backward has returned. stats lies in the
   arena: [rows of x, 2], or per head [rows of x * heads in a row, 2]. */
typedef struct mt_norm_saved {
    mt_tensor x, stats;
} mt_norm_saved;

/* x, y, dy, dx [tokens, features], or [tokens / t, features] with sequence_parallel. dx = dresidual + the gradient
   through the norm. dresidual may be mt_none(). dx may be the same memory as dy or dresidual. saved == NULL: inference.
   Per head, x, y, dy, dx are [tokens * local_groups, n * features], with one row for each token and query group. A row
   holds n heads of the group side by side: those that this layer normalises. For example, in a contiguous qkv
   [tokens, local_groups * unit], with unit = (heads_per_group + 2) * head_dim, this view holds the queries:
       mt_tensor_cols(mt_tensor_reshape(qkv, tokens * local_groups, unit), 0, heads_per_group * head_dim)
   No communication, except in backward per head in invariant mode with virtual context ranks: 1 all-reduce over the
   tensor group. The hash log gets NAME.output and NAME.input_grad, except per head.
   Error of create: MT_ERR_ARGUMENT (a field of desc is out of range, or groups is set with sequence_parallel). */
MT_API mt_status mt_norm_layer_create(mt_context *ctx, mt_params *params, const char *name,
                                      const mt_norm_layer_desc *desc, mt_norm_layer *out);
MT_API mt_status mt_norm_layer_forward(mt_context *ctx, const mt_norm_layer *layer, mt_tensor x, mt_tensor y,
                                       mt_norm_saved *saved);
MT_API mt_status mt_norm_layer_backward(mt_context *ctx, const mt_norm_layer *layer, mt_tensor dy, mt_tensor dresidual,
                                        mt_tensor dx, const mt_norm_saved *saved);
