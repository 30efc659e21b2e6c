/* ---- overlap of communication with computation, for authors of layers -------------------------------------------- */

#pragma once
#include "trace.h"

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
#define MT_OVERLAP_TICKETS 8
#define MT_OVERLAP_TICKET_THIRD MT_OVERLAP_TICKETS

MT_API mt_status mt_overlap_begin(mt_context *ctx, const mt_comm *comm, mt_stream stream);
MT_API mt_status mt_overlap_end(mt_context *ctx, int ticket, mt_status status);
MT_API mt_status mt_overlap_wait(mt_context *ctx, int ticket);
MT_API mt_status mt_overlap_wait_all(mt_context *ctx);

MT_API int mt_overlap_is_planned(const mt_context *ctx); /* 1: on a GPU, or planned for a GPU on MT_DEVICE_META */

/* As mt_comm_split, for groups whose collectives overlap in this stream. Over NCCL, each thread block of a collective
   takes a multiprocessor of the GPU from the kernels beside it. So a collective of the new group has at most
   mt_nccl_options.second_ctas or third_ctas of them. On other communicators, and with MT_STREAM_NONE, the call is
   mt_comm_split. mt_grid_create calls it for the tensor and the data group. Errors: as mt_comm_split, and
   MT_ERR_ARGUMENT (no such stream). */
MT_API mt_status mt_comm_split_for(mt_comm *comm, int color, int key, mt_stream stream, mt_comm **out);

/* Returns the most multiprocessors that the collectives of overlaps take by these limits, from mt_overlap_end until
   mt_overlap_wait. mt_gemm then chooses an algorithm for the others. 0: none, or NCCL has no limit. */
MT_API int mt_overlap_multiprocessors(const mt_context *ctx);
