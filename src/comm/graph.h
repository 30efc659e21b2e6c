/* ---- CUDA graphs: a step that is recorded once ------------------------------------------------------------------- */

#pragma once
#include "context.h"

/* A training step starts hundreds of kernels, and each start costs the host a few microseconds. A CUDA graph records
   the step once, and then starts all of it with one call:
       mt_graph *graph = NULL;
       for (n = 0; n < steps; n++) {
           ... mt_upload the token ids; mt_step_begin (mt_parallel.h) ...
           if (n == 0) MT_TRY(run_step(...));                        // forward, backward, mt_step_update; see below
           if (n == 1) {
               MT_TRY(mt_graph_begin(ctx, comm));
               status = run_step(...);                               // only recorded: the GPU does nothing
               MT_KEEP(status, mt_graph_end(ctx, status == MT_SUCCESS ? &graph : NULL));
               MT_TRY(status);
           }
           if (n > 0) MT_TRY(mt_graph_launch(ctx, graph));           // runs what was recorded
       }
       mt_graph_destroy(ctx, graph);
   A launch computes the same bits as the calls would. It uses the addresses and the numbers that the recorded calls
   got. So a number that changes from step to step must be in memory of the device: upload it before the launch. A
   launch overwrites the arena memory that the recorded calls took, also when its mark has been released since. Do not
   keep other data there across a launch. Run the step once before you record it, because the first run chooses the
   algorithms of products by measurement, allocates their workspace, and connects the ranks of NCCL.

   comm contains all ranks that the step communicates with. It may be NULL for one rank, and over NCCL, where each rank
   records and launches a graph of its own. Ranks that are threads without NCCL, for instance on one GPU, record one
   graph together: there mt_graph_begin, mt_graph_end and mt_graph_launch are collectives of comm. Only one of these
   ranks records at a time; the library switches between them when a rank waits in a collective, a send or a receive.
   An error of a collective that they record breaks comm, too.

   Between mt_graph_begin and mt_graph_end the host cannot wait for the GPU, upload or allocate. MT_ERR_UNSUPPORTED is
   returned by mt_context_synchronize, mt_upload, mt_download, mt_context_alloc, mt_barrier, and every call that needs
   one of them, such as mt_grad_norm (use mt_step_update) and mt_hash. The recording goes on; work that such a call has
   put into the stream before it fails is a part of it. Do not free memory, and do not create or destroy communicators
   there. The ledgers count the recorded calls, not the launches. mt_graph_begin, mt_graph_end and mt_graph_launch wait
   for all overlaps, as mt_overlap_wait does.

   Only MT_DEVICE_CUDA records graphs; MT_ERR_UNSUPPORTED on a CPU. On MT_DEVICE_META recorded calls are planned like
   others, and a launch does nothing. */
typedef struct mt_graph mt_graph; /* opaque */

/* mt_graph_begin: MT_ERR_ARGUMENT (this context already records; an overlap has not ended).
   mt_graph_end: out NULL discards what was recorded, as after an error. The caller owns *out, and destroys it before
     ctx and before the communicators and the memory that the recorded calls used.
     When one rank of a common graph discards it, the others get MT_ERR_PEER, and comm stays usable. MT_ERR_ARGUMENT
     (this context does not record; an overlap has not ended: then the recording goes on).
   mt_graph_launch: puts the work into the context's stream and does not wait. A launch runs after earlier work in the
     stream, also after an earlier launch. MT_ERR_PEER: a communicator over NCCL of ctx has failed or has been destroyed
     since the recording; destroy the graph. MT_ERR_ARGUMENT (this context records; graph is NULL).
   mt_graph_destroy: waits for this rank's stream; graph may be NULL. Ranks of a common graph destroy it after
     their last launch, in any order.
   All: MT_ERR_SYSTEM (CUDA failed), MT_ERR_MEMORY, and the errors of a collective where they are one. */
MT_API mt_status mt_graph_begin(mt_context *ctx, mt_comm *comm);
MT_API mt_status mt_graph_end(mt_context *ctx, mt_graph **out);
MT_API mt_status mt_graph_launch(mt_context *ctx, mt_graph *graph);
MT_API void mt_graph_destroy(mt_context *ctx, mt_graph *graph);
