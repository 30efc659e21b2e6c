/* ---- the ledger: calls and bytes of a communicator --------------------------------------------------------------- */

#pragma once
#include "context.h"

typedef enum mt_collective {
    MT_ALL_REDUCE = 0,
    MT_ALL_GATHER = 1,
    MT_REDUCE_SCATTER = 2,
    MT_BROADCAST = 3,
    MT_SEND = 4,
    MT_RECV = 5,
    MT_BARRIER = 6,
    MT_ALL_TO_ALL = 7,
    MT_ALL_TO_ALL_V = 8,
    MT_COLLECTIVE_COUNT = 9
} mt_collective;

MT_API const char *mt_collective_name(mt_collective kind); /* "all_reduce", ... */

/* The ledger counts this rank's successful calls and their bytes, per kind, since the communicator was created or the
   ledger was reset. The bytes of a call are those of the whole logical tensor: count * element size for all_reduce,
   broadcast, send and recv; size * sendcount * element size for all_gather; size * recvcount * element size for
   reduce_scatter; size * count * element size for all_to_all; and what the rank sends, also to itself, for
   all_to_all_v. mt_send_recv counts as a send and a recv. The ledger of a group of one stays zero. */
typedef struct mt_ledger {
    uint64_t calls[MT_COLLECTIVE_COUNT];
    uint64_t bytes[MT_COLLECTIVE_COUNT];
} mt_ledger;

MT_API mt_ledger mt_comm_ledger(const mt_comm *comm);
MT_API void mt_comm_ledger_reset(mt_comm *comm);
