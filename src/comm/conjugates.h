/* ---- the conjugates f and g: arXiv 1909.08053, figure 3 ---------------------------------------------------------- */

#pragma once
#include "context.h"

/* The functions have Megatron's names. Views must be contiguous (ld == cols). dx and dy are gradients. x and y have the
   same type: any type, except MT_U8 where values are summed. In a group of one, the functions with one view do nothing,
   and those with x and y copy x to y, unless y is x. Errors: MT_ERR_SHAPE (also when the split dimension is not a
   multiple of the number of ranks; there is no padding), MT_ERR_DTYPE, and those of a collective.

   f, copy_to_tensor_region:       forward: identity;             backward: all-reduce, in place.
   g, reduce_from_tensor_region:   forward: all-reduce, in place; backward: identity.
   The views have any shape. The identities only check their arguments; they exist so that code can follow the paper. */
MT_API mt_status mt_copy_to_tensor_region_forward(mt_context *ctx, mt_comm *comm, mt_tensor x);
MT_API mt_status mt_copy_to_tensor_region_backward(mt_context *ctx, mt_comm *comm, mt_tensor dx);
MT_API mt_status mt_reduce_from_tensor_region_forward(mt_context *ctx, mt_comm *comm, mt_tensor y);
MT_API mt_status mt_reduce_from_tensor_region_backward(mt_context *ctx, mt_comm *comm, mt_tensor dy);

/* These two split and join the last dimension (features). size is the number of ranks of comm. x and y must not
   overlap, except in a group of one. The backward of scatter is gather, and the backward of gather is scatter.
   scatter:  x [tokens, features] -> y [tokens, features / size], this rank's columns of x; no communication.
   gather:   x [tokens, features / size] -> y [tokens, features], an all-gather. It takes scratch memory of the size of
             y from the arena during the call. */
MT_API mt_status mt_scatter_to_tensor_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y);
MT_API mt_status mt_gather_from_tensor_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y);

/* These three split and join the first dimension (tokens), for sequence parallelism (arXiv 2205.05198, figure 4). One
   view has all tokens, the other tokens / size rows. The smaller view may be this rank's rows of the larger one: the
   call then works in place. Other overlaps are not allowed.
   scatter:         x [tokens, h] -> y [tokens / size, h], this rank's rows of x; no communication. Its backward is
                    gather.
   gather:          x [tokens / size, h] -> y [tokens, h], an all-gather. Its backward is reduce_scatter when the ranks
                    use y for different shards of a layer (tensor parallelism), or scatter when all ranks compute the
                    same from y.
   reduce_scatter:  x [tokens, h], each rank's partial sum -> y [tokens / size, h], this rank's rows of the sum. Its
                    backward is gather. */
MT_API mt_status mt_scatter_to_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y);
MT_API mt_status mt_gather_from_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y);
MT_API mt_status mt_reduce_scatter_to_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y);
