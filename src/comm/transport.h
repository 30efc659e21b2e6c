/* ---- communicators over a transport of the program, for authors of transports ------------------------------------ */

#pragma once
#include "context.h"

/* A transport moves bytes between ranks that are processes or threads: over sockets, shared memory, or a library that
   mt_comm.h does not know. The program writes two functions. From them the library makes every collective, send, split
   and error message. Reductions add in the tree of the other transports, so their results have the same bits.

   Each two ranks have a stream of bytes in each direction. Bytes arrive once, and in the order in which they were sent.
   The functions do not wait for other ranks, as send(2) and recv(2) with MSG_DONTWAIT do not:
   send   takes the first of the `bytes` bytes at `data` for rank `peer`, and stores in *moved how many. They will
          arrive, whatever this rank does next, and the library may overwrite `data`. *moved == 0: it takes none now
   recv   stores the next bytes from rank `peer` at `data`, at most `bytes`, and their number in *moved. *moved == 0:
          none have arrived yet
   state is the pointer that mt_comm_create_transport got. peer is another rank of that communicator, also in calls on
   groups that are split from it. bytes is at least 1, and *moved is 0 before the call.

   Errors. Both return MT_SUCCESS. Any other status ends the stream: the function is not called for this peer again, and
   calls that need the stream fail. MT_ERR_TIMEOUT stays MT_ERR_TIMEOUT, every other status becomes MT_ERR_PEER, and the
   message names the transport. When the other rank is gone, return MT_ERR_PEER, from recv after the last bytes.

   Threads. The functions are called only inside calls on the communicator and on its groups, by the thread that makes
   the call, so never twice at a time with one state. Memory that several states share is the transport's to lock. The
   functions must not call the library with these communicators, and must not throw. */
typedef struct mt_transport {
    const char *name; /* for messages */
    mt_status (*send)(void *state, int peer, const void *data, size_t bytes, size_t *moved);
    mt_status (*recv)(void *state, int peer, void *data, size_t bytes, size_t *moved);
} mt_transport;

/* Creates a communicator of `ranks` (1 to 1024) threads or processes over a transport, for contexts on CPUs.
   Collective: each rank waits for all others. *transport, its name and state stay the caller's and must outlive *out
   and the groups split from it. timeout_s <= 0: MT_TIMEOUT_DEFAULT. A group of one does not use the transport.

   *out works like a communicator over MPI: the ranks compare their calls; a rank that leaves or fails tells the others,
   which get MT_ERR_PEER at once; the library ends waits after the timeout; and the last mt_comm_destroy waits for the
   other ranks. Afterwards the transport is not used. After an error the library no longer uses the buffers of the call,
   but a stream to a rank that was sent a part of a message ends. On GPUs, pass *out to mt_comm_create_for. See
   docs/many-ranks.md, "A transport of your own".

   Errors (there is no communicator yet that could have a message): MT_ERR_ARGUMENT (NULL, ranks, rank), MT_ERR_MEMORY,
   MT_ERR_MISMATCH (the ranks have different numbers of ranks, or versions of megatron.h), MT_ERR_TIMEOUT (a rank did
   not call in time), MT_ERR_PEER (the transport failed). The sentences of the last three go to stderr. */
MT_API mt_status mt_comm_create_transport(const mt_transport *transport, void *state, int ranks, int rank,
                                          double timeout_s, mt_comm **out);
