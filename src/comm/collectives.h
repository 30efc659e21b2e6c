/* ---- collectives ------------------------------------------------------------------------------------------------- */

#pragma once
#include "context.h"

/* The collectives compute what NCCL's do. Buffers are in the memory of the context's device. Counts are in elements.
   Reductions add in a fixed binary tree over the ranks, ((0+1)+(2+3))+..., so the same inputs always give the same
   bits, on every rank. Over NCCL, NCCL chooses the order; see "communicators over NCCL".
   On a CPU a collective returns when its result is in recvbuf. On a GPU it returns when its work is in the context's
   stream; only mt_barrier waits until this work is done. Without NCCL, the threads wait on the host for each other.
   Buffers may overlap only in place, by NCCL's rule: all_reduce and broadcast when sendbuf == recvbuf; all_gather when
   sendbuf == recvbuf + rank * sendcount; reduce_scatter when recvbuf == sendbuf + rank * recvcount.
   Errors:
   MT_ERR_ARGUMENT, MT_ERR_DTYPE (reduction of MT_U8)
   MT_ERR_MISMATCH     ranks made different calls
   MT_ERR_TIMEOUT      a rank did not call in time
   MT_ERR_PEER         a rank left the group or failed
   MT_ERR_UNSUPPORTED  the ranks are not connected (see mt_world_from_env), or are over MPI or over a transport of the
                       program with contexts on GPUs;
                       this process was forked after comm was created;
                       on GPUs also: a reduction in the tree over more than 64 ranks, or between GPUs of this process
                       that cannot access each other's memory
   MT_ERR_MEMORY       over NCCL: the arena is too small for the scratch memory of the call
   MT_ERR_SYSTEM       CUDA or NCCL failed; an error of work in the stream is returned by a later call of this rank,
                       at the latest by one that waits for the stream
   When one rank gets MT_ERR_MISMATCH, MT_ERR_TIMEOUT or MT_ERR_PEER, every rank of the group gets one of these three
   in its current or next call. The message names the calls and, where they are known, the ranks. The communicator can
   then only be destroyed. A rank that gets MT_ERR_ARGUMENT or MT_ERR_DTYPE has not joined the call, and may call again.
   The others wait for it, and get one of the three errors when it makes another call, leaves or is late. */
typedef enum mt_op { MT_SUM = 0, MT_MAX = 1 } mt_op;

MT_API mt_status mt_all_reduce(mt_context *ctx, mt_comm *comm, const void *sendbuf, void *recvbuf, size_t count,
                               mt_dtype dtype, mt_op op);
MT_API mt_status mt_all_gather(mt_context *ctx, mt_comm *comm, const void *sendbuf, void *recvbuf, size_t sendcount,
                               mt_dtype dtype);
MT_API mt_status mt_reduce_scatter(mt_context *ctx, mt_comm *comm, const void *sendbuf, void *recvbuf, size_t recvcount,
                                   mt_dtype dtype, mt_op op);
MT_API mt_status mt_broadcast(mt_context *ctx, mt_comm *comm, const void *sendbuf, void *recvbuf, size_t count,
                              mt_dtype dtype, int root);
MT_API mt_status mt_barrier(mt_context *ctx, mt_comm *comm);

/* Point to point. A send and its receive have the same count and dtype, else both return MT_ERR_MISMATCH. On a CPU a
   call returns when its buffers may be reused. On a GPU it returns as soon as its work is in the stream: only later
   work in the stream may reuse the buffers. mt_send_recv sends to dst and receives from src at the same time, so rings
   and pipelines do not deadlock. Its buffers must not overlap. When dst and src are this rank itself, the call copies,
   and the buffers may be the same. dst == -1 sends nothing and ignores sendcount; src == -1 receives nothing and
   ignores recvcount. When the other rank is in a collective of the same communicator, both get an error: between
   threads MT_ERR_MISMATCH at once, over MPI and over a transport of the program MT_ERR_TIMEOUT. */
MT_API mt_status mt_send(mt_context *ctx, mt_comm *comm, const void *sendbuf, size_t count, mt_dtype dtype, int dst);
MT_API mt_status mt_recv(mt_context *ctx, mt_comm *comm, void *recvbuf, size_t count, mt_dtype dtype, int src);
MT_API mt_status mt_send_recv(mt_context *ctx, mt_comm *comm, const void *sendbuf, size_t sendcount, int dst,
                              void *recvbuf, size_t recvcount, int src, mt_dtype dtype);
