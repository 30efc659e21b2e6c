/* ---- column- and row-parallel linear (arXiv 1909.08053, section 3) ----------------------------------------------- */

#pragma once
#include "params.h"

/* What only few column-parallel layers need of the dimension that is split: padding and copies, see mt_param_desc. All
   fields may be 0. */
typedef struct mt_split_desc {
    /* out_features with padding of your own, see mt_param_desc.padded_features. With mt_linear_desc.weight the layer
       has the padding of this weight, and padded_out_features must be 0 or the same (MT_ERR_SHAPE); 0: none */
    int64_t padded_out_features;
    /* Keys and values that several ranks need. y has a rank's pieces in order. Not for layers of tensors in your own
       memory (MT_ERR_ARGUMENT), because nothing sums the gradients of their copies */
    int64_t copies, copied;
} mt_split_desc;

/* Y = X W^T + b with W [out_features, in_features]. A column-parallel layer contains f: its backward all-reduces dx. A
   row-parallel layer contains g: its forward all-reduces y. Do not call f or g yourself around or between these layers.
   By default (everything zero except the sizes) a layer has a bias and no sequence parallelism, y of a column-parallel
   layer stays split, and x of a row-parallel layer is not split. */
typedef struct mt_linear_desc {
    int64_t in_features, out_features; /* global */
    /* How the split dimension is cut: see mt_param_desc, which has the values for QKV. With 2 parts one layer computes
       gate and up of SwiGLU, and y is this rank's [gate | up] (for invariant mode see parts_by_shard). 0: 1, for
       both */
    int64_t parts, unit;
    float init_std; /* standard deviation of the initial weight; MT_ERR_ARGUMENT with `weight`; MT_ZERO: 0; 0: 0.02 */
    int no_bias;
    /* 1: the caller adds layer->bias->value to y, and adds the sum of the rows of dy to layer->bias->grad, as in a
       fused operator. The bias of a row-parallel layer is added once, after the reduction. With sequence_parallel the
       bias gradient of a row-parallel layer covers only this rank's rows; mt_sync_gradients sums it over the tensor
       group. MT_ERR_ARGUMENT with no_bias */
    int skip_bias_add;
    /* 1: y is [tokens, out_features] on every rank (column only). It is read in each call: layer->desc.gather_output
       may change between calls, but not between a forward and its backward */
    int gather_output;
    /* 1: x is already split, as a column-parallel layer leaves it (row only). 0: x is whole, each rank takes its
       columns, and backward all-gathers dx */
    int input_is_parallel;
    int sequence_parallel; /* 1: x (column) is [tokens / t, in]; y (row) is [tokens / t, out] */
    /* advanced */
    /* Only for invariant mode (mt_parallel.h, "invariant mode", has virtual shards) with parts > 1, for a
       column-parallel layer without gather_output or a row-parallel layer with input_is_parallel. The columns of y or
       x are then gate and up of the first virtual shard, gate and up of the second, and so on. 1: confirms that your
       code handles this order; changes no result. 0: create returns MT_ERR_ARGUMENT */
    int parts_by_shard;
    mt_param *weight; /* column only: another layer's weight, to share it (tied output head); NULL: its own */
    /* 1: backward adds the input gradient to dx instead of overwriting dx, for instance when several layers read x. dx
       gets the same bits as from an mt_add after the call. The sum over ranks is complete before it is added. It is
       read in each call: layer->desc.add_to_dx may change between calls. The hash log has dx after the addition */
    int add_to_dx;
    mt_split_desc split; /* column only */
} mt_linear_desc;

/* A column-parallel or a row-parallel layer, as its create function says. local_features is this rank's share of the
   split dimension, padding included: the columns of y (column-parallel) or of x (row-parallel). */
typedef struct mt_parallel_linear {
    char name[MT_NAME_MAX];
    mt_linear_desc desc;
    mt_param *weight, *bias; /* NAME.weight, NAME.bias; bias is NULL with no_bias */
    mt_comm *tp;
    int64_t local_features;
} mt_parallel_linear;

/* Names for declarations, which say of which kind a layer is meant to be. */
typedef mt_parallel_linear mt_column_parallel_linear;
typedef mt_parallel_linear mt_row_parallel_linear;

/* x is a view of the caller's memory. Its content must not change before backward has returned. */
typedef struct mt_linear_saved {
    mt_tensor x;
} mt_linear_saved;

/* Create a layer and its parameters. Column-parallel: W is split over its rows. Row-parallel: W is split over its
   columns.
   Errors: MT_ERR_ARGUMENT (a field of desc is out of range, is for layers of the other kind or has no effect; in
   invariant mode several parts without parts_by_shard, where it is needed), MT_ERR_SHAPE (a shared weight has another
   shape, placement, parts, unit or padding, or copies). mt_params_destroy frees the parameters; a layer needs no
   destroy. */
MT_API mt_status mt_column_parallel_linear_create(mt_context *ctx, mt_params *params, const char *name,
                                                  const mt_linear_desc *desc, mt_parallel_linear *out);
MT_API mt_status mt_row_parallel_linear_create(mt_context *ctx, mt_params *params, const char *name,
                                               const mt_linear_desc *desc, mt_parallel_linear *out);

/* forward computes y from x. backward computes dx from dy, and adds to the gradients of weight and bias. dx and dy have
   the shapes of x and y. When dx is mt_none(), it is not computed. saved NULL: inference. The head of mt_parallel.h
   says which tensors must be contiguous and which may overlap. On GPUs communication overlaps with the products
   (mt_parallel_set_options).
   Column-parallel: x [tokens, in] -> y [tokens, local_features], or [tokens, out] with gather_output; dy is
   then the same on every rank. Communication: backward all-reduces dx (f). gather_output adds an all-gather of
   y. With sequence_parallel x is [tokens / t, in]: forward and backward each all-gather it, and backward
   reduce-scatters dx.
   Row-parallel: x [tokens, local_features], or [tokens, in] without input_is_parallel -> y [tokens, out]. The bias is
   added once, after the reduction. Communication: forward all-reduces y (g). Without input_is_parallel, backward
   all-gathers dx. With sequence_parallel y is [tokens / t, out]: forward reduce-scatters it, and backward all-gathers
   dy. */
MT_API mt_status mt_parallel_linear_forward(mt_context *ctx, const mt_parallel_linear *layer, mt_tensor x, mt_tensor y,
                                            mt_linear_saved *saved);
MT_API mt_status mt_parallel_linear_backward(mt_context *ctx, const mt_parallel_linear *layer, mt_tensor dy,
                                             mt_tensor dx, const mt_linear_saved *saved);

/* The tensors of a linear layer in your own memory. w and b have the shape of mt_shard_size and are contiguous: w is
   split like a matrix [out_features, in_features], by rows (column-parallel) or by columns (row-parallel). The bias of
   a column-parallel layer is split like a vector [1, out_features], by columns; that of a row-parallel layer is whole.
   dw and db are their gradients, MT_F32, in the same shapes. In invariant mode each tensor has the rank's virtual
   shards one after the other (see mt_param). */
typedef struct mt_linear_tensors {
    mt_tensor w, b; /* b is mt_none(): no bias */
    /* backward adds to them; mt_none() when there is no backward. A backward without dw, or without db where b is set,
       is MT_ERR_ARGUMENT (with skip_bias_add a layer needs no db) */
    mt_tensor dw, db;
} mt_linear_tensors;

/* Create a layer of tensors in your own memory, without a registry. All functions of layers take it, and compute the
   same bits as for a layer of a registry. These functions fill params, an array of two. The layer points into
   params, and uses tp and the memory of the tensors: all must outlive it. *tensors and name are copied. The layer needs
   no destroy. tp is the tensor group. name, for messages and the hash log, may be NULL: then nothing is logged.
   desc has the meaning that it has for a layer of a registry, except for the bias, and that in_features and
   out_features may be 0: then the split dimension has no padding. b mt_none() means no bias. desc.no_bias may be 0, but
   1 with a bias is MT_ERR_ARGUMENT. desc NULL: the defaults.
       mt_linear_tensors t = {.w = w, .b = b, .dw = dw, .db = db};      mt_param params[2];
       mt_parallel_linear fc1;         mt_linear_desc whole = {.gather_output = 1};   // y [tokens, out] on every rank
       MT_TRY(mt_column_parallel_linear_from_tensors(ctx, grid.tp, "fc1", &whole, &t, params, &fc1));
       MT_TRY(mt_parallel_linear_forward(ctx, &fc1, x, y, &saved));
       MT_TRY(mt_parallel_linear_backward(ctx, &fc1, dy, dx, &saved));
   The caller sums the gradients over the data group. With sequence_parallel, db of a row-parallel layer is the sum over
   this rank's rows, and the caller also sums it over the tensor group. No communication.
   Errors: MT_ERR_SHAPE (a tensor has another shape than desc says or is not contiguous, parts * unit does not divide
   the split dimension or, in invariant mode, t does not divide V), MT_ERR_DTYPE (w and b differ in type, or dw or db is
   not MT_F32), MT_ERR_ARGUMENT (a pointer or w is NULL, db comes without b, or a field of desc is out of range, has no
   effect, or is for the create functions: init_std, weight). */
MT_API mt_status mt_column_parallel_linear_from_tensors(mt_context *ctx, mt_comm *tp, const char *name,
                                                        const mt_linear_desc *desc, const mt_linear_tensors *tensors,
                                                        mt_param *params, mt_parallel_linear *out);
MT_API mt_status mt_row_parallel_linear_from_tensors(mt_context *ctx, mt_comm *tp, const char *name,
                                                     const mt_linear_desc *desc, const mt_linear_tensors *tensors,
                                                     mt_param *params, mt_parallel_linear *out);
