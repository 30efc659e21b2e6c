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

/* Overlaps communication with computation on a GPU:
       MT_TRY(mt_overlap_begin(ctx, comm, MT_STREAM_SECOND));
       MT_TRY(mt_overlap_end(ctx, 0, mt_all_reduce(ctx, comm, x, x, n, MT_F32, MT_SUM)));      // ticket 0
       ...                                       // calls here run at the same time; they must not use x
       MT_TRY(mt_overlap_wait(ctx, 0));          // later calls see the sum in x
   Between mt_overlap_begin and mt_overlap_end, all work of ctx goes into another stream of the context, and
   mt_context_stream returns that stream. The work runs after what is already in the context's own stream.
   mt_overlap_end gives the work a number of your choice, the ticket; mt_overlap_wait makes later calls wait for the
   work with this ticket. mt_overlap_end returns `status` when this is an error; the overlap ends in any case. For
   buffers in the arena, take the mark before begin and release it after the wait. When work overlaps, mt_arena_release
   between begin and end is ignored: what was taken there is released with the mark from before begin.
   On other devices, in invariant mode and when comm is a group of one, the same calls are allowed, but nothing
   overlaps. A wait for a ticket without work does nothing.
   Errors: MT_ERR_ARGUMENT (no such stream; begin was called twice without end; while work overlaps, the ticket of
   mt_overlap_end is not one of its stream), MT_ERR_SYSTEM (CUDA failed).

   The second stream has the tickets 0 to MT_OVERLAP_TICKETS - 1, and mt_overlap_wait_all waits for all of them. The
   third stream is for longer transfers, for which the second stream should not wait. Its only ticket is
   MT_OVERLAP_TICKET_THIRD, and only mt_overlap_wait waits for it. */
typedef enum mt_stream {
    MT_STREAM_NONE = 0, /* no overlap: the context's own stream */
    MT_STREAM_SECOND = 1,
    MT_STREAM_THIRD = 2
} mt_stream;

#define MT_OVERLAP_TICKETS 8
#define MT_OVERLAP_TICKET_THIRD MT_OVERLAP_TICKETS

MT_API mt_status mt_overlap_begin(mt_context *ctx, const mt_comm *comm, mt_stream stream);
MT_API mt_status mt_overlap_end(mt_context *ctx, int ticket, mt_status status);
MT_API mt_status mt_overlap_wait(mt_context *ctx, int ticket);
MT_API mt_status mt_overlap_wait_all(mt_context *ctx);
MT_API int mt_overlap_is_planned(const mt_context *ctx); /* 1: on a GPU, or planned for a GPU on MT_DEVICE_META */
