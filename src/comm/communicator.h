/* ---- communicators ----------------------------------------------------------------------------------------------- */

#pragma once
#include "context.h"

/* Timeouts are in seconds. A rank that waits counts only the time in which its own process runs. If its process is
   stopped (Ctrl-Z, SIGSTOP, a suspended job), the whole stop counts as at most an eighth of the timeout and at most
   2 s. See docs/many-ranks.md, "When a rank dies". */
#define MT_TIMEOUT_DEFAULT 600.0

/* Creates `ranks` (1 to 1024) communicators that form one group of threads of this process, as ncclCommInitAll does.
   comms is an array of `ranks` pointers: the thread of rank r uses and destroys comms[r]. A group of one does not
   communicate. timeout_s <= 0: MT_TIMEOUT_DEFAULT.
   Errors: MT_ERR_ARGUMENT, MT_ERR_MEMORY. */
MT_API mt_status mt_comm_create_local(int ranks, double timeout_s, mt_comm **comms);

/* Creates a communicator for contexts on MT_DEVICE_META: rank `rank` of a group of `size`, whose other ranks do not
   exist. Its collectives check their arguments and count calls and bytes (mt_comm_ledger) but move nothing.
   Errors: MT_ERR_ARGUMENT, MT_ERR_MEMORY. */
MT_API mt_status mt_comm_create_meta(int size, int rank, mt_comm **out);

/* Splits comm into groups, as MPI_Comm_split does. Ranks with the same color form a group, ordered by key, then by rank
   in comm. color < 0 gives *out = NULL. The new group has the timeout of comm. Collective over comm. A meta
   communicator cannot be split: use mt_comm_create_meta. Errors: MT_ERR_MEMORY, and those of a collective. */
MT_API mt_status mt_comm_split(mt_comm *comm, int color, int key, mt_comm **out);

/* Destroys a communicator: this rank leaves the group. Peers that still wait for this rank get MT_ERR_PEER. NULL is
   allowed. When ranks are threads, the call does not wait. Over NCCL it waits for the communicator's work in the
   stream, at most for the timeout. A communicator from mt_comm_create_mpi or mt_comm_create_transport and the groups
   split from it belong together: only the call that destroys the last of them waits. It waits until every other rank
   has also destroyed its last one, at most for the timeout, or for 2 s after an error. */
MT_API void mt_comm_destroy(mt_comm *comm);

/* Properties of a communicator. mt_comm_last_error returns the message of the last error, or "" when no call has
   failed. The strings belong to comm. When comm is NULL, the rank is 0, the size 1, the name "" and the message "the
   communicator is NULL". */
MT_API int mt_comm_rank(const mt_comm *comm);
MT_API int mt_comm_size(const mt_comm *comm);
MT_API void mt_comm_set_name(mt_comm *comm, const char *name); /* used in messages; keeps 15 characters */
MT_API const char *mt_comm_name(const mt_comm *comm);
MT_API const char *mt_comm_last_error(const mt_comm *comm);

/* Returns the number of this rank among the ranks of its machine, from 0, for choosing a GPU. For threads it is the
   rank in the world. Over MPI it counts the ranks with the same processor name. For other processes of
   mt_world_from_env it is the launcher's local rank, or the rank when the launcher sets none. mt_comm_split and
   mt_comm_create_for pass the number on. After mt_comm_create_nccl, mt_comm_create_nccl_id and
   mt_comm_create_transport it is the rank. */
MT_API int mt_comm_local_rank(const mt_comm *comm);
