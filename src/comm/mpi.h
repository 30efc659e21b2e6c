/* ---- communicators over MPI: ranks that are processes, on CPUs --------------------------------------------------- */

#pragma once
#include "context.h"

/* Creates a communicator over MPI for contexts on CPUs, in a program that calls MPI itself. mt_world_from_env does this
   for all other programs. mpi_comm is the address of the caller's MPI_Comm. The library duplicates the MPI_Comm; the
   original stays the caller's. timeout_s <= 0: MT_TIMEOUT_DEFAULT. Collective over the MPI_Comm. Call it after
   MPI_Init_thread with MPI_THREAD_FUNNELED or more. Make this call and all calls on *out from the thread that may call
   MPI.

   When a rank has left or failed, or MPI returns an error, the others get MT_ERR_PEER at once. When a rank is killed,
   stopped or stuck, they get MT_ERR_TIMEOUT after timeout_s. After an error in the middle of a transfer, MPI may still
   hold the buffers of the call: do not free them, do not call MPI_Finalize, and end the process (MPI_Abort is allowed).
   See docs/many-ranks.md, "Communicators over MPI".

   Errors (there is no communicator yet that could have a message): MT_ERR_UNSUPPORTED (not built: compile with mpicc
   -DMT_USE_MPI; more than 1024 ranks; or this process was forked from a rank without exec, which is found on Linux as
   long as it has one thread), MT_ERR_ARGUMENT (NULL, MPI_COMM_NULL, MPI not initialized or already finalized),
   MT_ERR_MISMATCH (a rank is of another version of megatron.h), MT_ERR_TIMEOUT (a rank did not call in time),
   MT_ERR_MEMORY, MT_ERR_SYSTEM (MPI failed). A sentence about versions or a fork goes to stderr. */
MT_API mt_status mt_comm_create_mpi(const void *mpi_comm, double timeout_s, mt_comm **out);
