/* ---- communicators over NCCL: ranks with a GPU each -------------------------------------------------------------- */

#pragma once
#include "context.h"

/* A communicator over NCCL belongs to one context on MT_DEVICE_CUDA. Groups split from it belong to the same context.
   Destroy these communicators before the context, and in the same order on every rank. See docs/gpus.md, "Communicators
   over NCCL".

   A collective returns as soon as its work is in the context's stream. Only mt_barrier waits until the work is done.
   When a rank is late or gone, the other ranks get MT_ERR_TIMEOUT or MT_ERR_PEER from a collective or from the call
   that waits for the stream (such as mt_context_synchronize), at most timeout_s, and half a second to learn who is
   missing, after this call has begun to wait.

   NCCL does not compare the calls of ranks, so the library does, unless mt_context_desc.no_nccl_checks is set. The
   ranks tell rank 0 of the communicator their calls over TCP, in large groups through other ranks. The calls do not
   wait for it. They listen at the interface that NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY select. When
   calls differ, or a rank has left whose call is missing, every rank gets MT_ERR_MISMATCH or MT_ERR_PEER, usually a few
   milliseconds later: from its next call on the communicator, or from the call that waits for the stream. Until then
   results may be wrong, and calls that differ just before mt_comm_destroy may pass without an error. The calls that a
   graph records are compared while they are recorded. When the ranks cannot connect, or have no memory for the calls,
   every rank logs a warning with the reason, and calls that differ time out or give undefined results.

   The library's own NCCL communicators are blocking, so NCCL starts no thread for a collective. A call may wait for
   peers inside NCCL, for example while NCCL connects the ranks in the first calls. A context with such communicators
   has one thread, the watchdog, which aborts a call that lasts longer than timeout_s. Otherwise it sleeps. Another
   thread, the comparer, sends and compares the calls.

   After MT_ERR_MISMATCH, MT_ERR_TIMEOUT or MT_ERR_PEER, destroy the communicator and all other communicators of the
   context that had work in the stream: every other call on them fails. The library aborts the NCCL communicators that
   it made. It never aborts or destroys the caller's ncclComm_t: call ncclCommAbort after mt_comm_destroy and before
   mt_context_destroy.

   NCCL adds in its own order and rounds bf16 and f16 at each rank. For floats in invariant mode, and for MT_MAX of
   floats in any mode, the library uses NCCL only to move the data. It then reduces the data itself, in the tree that
   communicators without NCCL use (see "collectives"). Such a reduction works for up to 64 ranks and takes up to 4 MiB
   of the arena during the call. */
struct ncclComm; /* ncclComm_t is struct ncclComm * */
typedef struct mt_nccl_id {
    char bytes[128];
} mt_nccl_id; /* an ncclUniqueId: one rank makes it, all ranks use it */

/* Creates a communicator with the same ranks as `world`, over NCCL where possible. ctx is this rank's context. *out has
   the name and the timeout of world; the caller destroys it, and world stays usable. Collective over world, which comes
   from mt_world_from_env, mt_launch, mt_comm_create_local, mt_comm_create_mpi or mt_comm_create_transport, or was split
   from such a communicator.
   Ranks that are threads: *out is over NCCL when NCCL is built and each rank has its own GPU. Otherwise *out is a new
   group of threads, like world. With NCCL 2.30 or later and NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment, ranks that
   share a GPU are over NCCL, too: this is for tests, see docs/gpus.md, "Several ranks on one GPU over NCCL".
   Processes over MPI, and ranks over a transport of the program: *out is over NCCL when NCCL is built and all contexts
   are on GPUs. Each process then needs its own GPU, or that variable, or NCCL fails. Otherwise *out is like world.
   Processes without MPI: *out is over NCCL. The ranks connect through NCCL_COMM_ID=host:port, an environment variable
   that mt_world_from_env sets when it can (see docs/many-ranks.md, "Launchers").
   Errors: MT_ERR_ARGUMENT (world is over NCCL or meta; processes without MPI: NCCL_COMM_ID is not set),
   MT_ERR_UNSUPPORTED (processes without MPI: the context is not on a GPU, or NCCL is not built), and those of
   mt_comm_split and mt_comm_create_nccl_id. */
MT_API mt_status mt_comm_create_for(mt_context *ctx, mt_comm *world, mt_comm **out);

/* Creates a communicator from the caller's ncclComm_t, which must be for the GPU of ctx. Collective, because the ranks
   exchange their versions and addresses; with mt_context_desc.no_nccl_checks the call does not communicate, and the
   first mt_comm_split compares the versions. The ncclComm_t stays the caller's and must outlive *out. It may be
   blocking or non-blocking. With a blocking ncclComm_t, this call, the first collectives and mt_comm_split wait without
   a timeout while NCCL connects to the peers. With a non-blocking one NCCL starts a thread for each collective. Groups
   that are split from *out are the library's own. timeout_s <= 0: MT_TIMEOUT_DEFAULT.
   Errors: as mt_comm_create_nccl_id. */
MT_API mt_status mt_comm_create_nccl(mt_context *ctx, struct ncclComm *nccl, double timeout_s, mt_comm **out);

/* Creates a communicator of `ranks` threads or processes from an id, as ncclCommInitRank does. Collective: each rank
   waits for all others. Call mt_nccl_unique_id on one rank and send the id to the others. Or set NCCL_COMM_ID=host:port
   in the environment and call mt_nccl_unique_id on every rank: all get the same id. A group of one makes no NCCL
   communicator; a larger one makes two, of which the first only serves to create the second and its splits.
   timeout_s <= 0: MT_TIMEOUT_DEFAULT.
   Errors: MT_ERR_ARGUMENT, MT_ERR_UNSUPPORTED (NCCL is not built), MT_ERR_MISMATCH (a rank is of another version of
   megatron.h), MT_ERR_MEMORY, MT_ERR_TIMEOUT, MT_ERR_PEER, MT_ERR_SYSTEM (CUDA or NCCL failed). */
MT_API mt_status mt_nccl_unique_id(mt_context *ctx, mt_nccl_id *out);
MT_API mt_status mt_comm_create_nccl_id(mt_context *ctx, const mt_nccl_id *id, int ranks, int rank, double timeout_s,
                                        mt_comm **out);
