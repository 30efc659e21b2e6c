/* mt_comm.h - contexts, communicators, collectives, and Megatron's conjugate functions f and g. This is the lowest of
   the four headers of megatron.h: it includes none of the others.

   Do this:
       #define MEGATRON_IMPLEMENTATION      // in exactly one file of your program
       #include "megatron.h"                // or only "mt_comm.h"
   Every other file has only the #include. The code is C99 and C++11. It needs POSIX threads: link with -lpthread -lm.

   Two ranks, which are threads of this process, sum a vector:
       static mt_status rank_main(mt_comm *world, void *user) {
           float x[4] = {1, 2, 3, 4};
           mt_context *ctx; MT_TRY(mt_context_create(world, NULL, &ctx));
           mt_status s = mt_all_reduce(ctx, world, x, x, 4, MT_F32, MT_SUM);
           mt_context_destroy(ctx); return s; }
       int main(void) { mt_launch_desc d = {.ranks = 2}; return mt_launch(&d, rank_main, NULL); }

   To run ranks as processes, on one machine or many, call mt_world_from_env instead of mt_launch and start the program
   with torchrun, srun or mpirun. Without a launcher the same program runs its ranks as threads.

   The chapters for users come first. The chapters behind them, "for authors of ...", are for programs with operators,
   layers or transports of their own.

   The library starts no processes, keeps no global state, and never calls exit or abort. A rank that waits for another
   rank spins briefly and then sleeps.

   CUDA: put #define MEGATRON_IMPLEMENTATION and the #include into one .cu file and compile this file with nvcc. Your
         other C and C++ files need no CUDA Toolkit to compile. Link with -lcudart.
   NCCL: compile the .cu file with nvcc -DMT_USE_NCCL, or write #define MT_USE_NCCL before its #include.
   MPI:  compile the file with MEGATRON_IMPLEMENTATION with mpicc -DMT_USE_MPI, or write #define MT_USE_MPI before its
         #include. Your other files need no mpi.h.

   Config macros, all optional. None of them changes a public struct. MT_API has an effect in every file, the others
   only in the file with MEGATRON_IMPLEMENTATION:
       MT_API              linkage of the public functions (default: extern)
       MT_USE_ONEDNN       GEMM through oneDNN            link with -ldnnl       (see mt_kernels.cuh)
       MT_USE_CBLAS        GEMM through CBLAS             link with -lopenblas or another BLAS (see mt_kernels.cuh)
       MT_USE_NVTX         NVTX ranges for each block and collective, for Nsight; needs only CUDA Toolkit headers
       MT_USE_NCCL         collectives between GPUs       link with -lnccl       (2.19 or later; with nvcc only)
       MT_USE_CUDNN        attention on GPUs by cuDNN     link with -lcudnn      (9.10 or later; see docs/gpus.md)
       MT_USE_MPI          collectives between processes  compile with mpicc     (MPI 3.0 or later)

   Errors. Every call that can fail returns an mt_status: MT_SUCCESS is 0, errors are negative. The context keeps a
   message with the offending values (mt_last_error). When a call has no context argument, its communicator keeps the
   message (mt_comm_last_error). A call that has neither returns only the status. A call that refuses its arguments
   changes nothing, except that it may set *out to NULL or fill it with zeros.

   Threads. A rank uses its context and its communicators from one thread at a time. All ranks of a communicator call
   the same collectives in the same order. Contexts in one process are independent of each other.
   Cancelled threads and C++ exceptions: see mt_launch.

   fork(). The new process is no rank of the old one's groups: calls on a communicator with other ranks, and all calls
   with a context on a GPU, return MT_ERR_UNSUPPORTED there. So do writes to a safetensors file, or to a directory of
   checkpoints, that the old process has begun or locked. Other work with a context on a CPU succeeds, in a group of
   one. The new process may create contexts and communicators of its own, for example with mt_launch. Destroying what it
   has inherited frees memory and does nothing else, so the old process does not notice. */

#ifndef MT_COMM_H
#define MT_COMM_H

#include "comm/api.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "comm/version.h"
#include "comm/status.h"
#include "comm/defaults.h"
#include "comm/tensor.h"
#include "comm/context.h"
#include "comm/communicator.h"
#include "comm/nccl.h"
#include "comm/mpi.h"
#include "comm/ledger.h"
#include "comm/collectives.h"
#include "comm/compare.h"
#include "check/placements.h"
#include "comm/conjugates.h"
#include "comm/trace.h"
#include "comm/graph.h"
#include "comm/launch.h"
#include "comm/overlap.h"
#include "comm/transport.h"
#include "comm/authors.h"
#include "check/authors.h"

#ifdef __cplusplus
}
#endif

#endif /* MT_COMM_H */

/* ================================================== the API ends here ============================================= */

#if defined(MEGATRON_IMPLEMENTATION) && !defined(MT_COMM_IMPLEMENTED)
#define MT_COMM_IMPLEMENTED

#include "comm/system.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "comm/types.h"
#include "comm/status.c"
#include "comm/cuda.c"
#include "comm/threads.c"
#include "comm/cuda_ends.c"
#include "comm/workers.c"
#include "comm/context.c"
#include "comm/16bit.c"
#include "comm/hash.c"
#include "comm/trace.c"
#include "comm/collectives.c"
#include "comm/alone.c"
#include "comm/thread_calls.c"
#include "comm/nccl_calls.c"
#include "comm/nccl_comparer.c"
#include "comm/nccl_secret.c"
#include "comm/nccl_interfaces.c"
#include "comm/nccl_listeners.c"
#include "comm/nccl_watchdog.c"
#include "comm/nccl.c"
#include "comm/links.c"
#include "comm/mpi.c"
#include "comm/streams.c"
#include "comm/compare.c"
#include "comm/conjugates.c"
#include "comm/graph.c"
#include "comm/launch.c"
#include "check/placements.c"
#include "check/declarations.c"
#include "check/rules.c"
#include "check/places.c"
#include "check/moves.c"
#include "check/replicas.c"
#include "check/hooks.c"

#ifdef __cplusplus
}
#endif

#endif /* MEGATRON_IMPLEMENTATION */
