/* ---- ranks with a GPU each, over NCCL ---------------------------------------------------------------------------- */

#pragma once
#include "nccl.h"
#include "nccl_listeners.c"
#include "nccl_watchdog.c"

/* A call puts its work into the context's current stream. The communicator is then busy until mt_cuda_wait_peers has
   seen this stream empty. Before the host waits for a stream, it calls mt_cuda_wait_peers, which polls the stream and
   the busy communicators until the timeout. So the host never waits for other ranks without a timeout, except inside a
   blocking ncclComm_t of the caller. Calls take their scratch memory from the arena.

   NCCL starts a thread for each group of calls on a non-blocking communicator, and none on a blocking one. So the
   communicators that carry collectives are blocking. NCCL documents an abort during the creation of a communicator only
   where the call is non-blocking. A split is non-blocking when its parent is, and its child may still be blocking. So
   mt_comm_create_nccl_id creates a non-blocking communicator, the opener, which carries no collective, and splits the
   blocking one from it. Later splits also use the opener. A blocking call may wait for peers inside NCCL: while NCCL
   connects the ranks in the first calls, when the queue of NCCL's work is full, when memory is registered, and when a
   group without an opener is split. A thread, the watchdog, aborts the communicator when such a call lasts longer than
   the timeout. The call then returns with an error.

   ncclConfig_t.splitShare stays 0. Communicators that share resources would run their collectives one after another,
   and the abort of one may make all of them unusable. */

#if MTI_NCCL
#define MTI_NCCL_SCRATCH ((size_t)4 << 20) /* most bytes of the arena that a reduction in the tree takes */

static mt_status mti_nccl_status(ncclResult_t result) {
    switch (result) {
    case ncclSuccess: return MT_SUCCESS;
    case ncclInvalidArgument:
    case ncclInvalidUsage: return MT_ERR_ARGUMENT;
    case ncclSystemError: /* usually a connection that the peer has closed */
    case ncclRemoteError: return MT_ERR_PEER;
    default: return MT_ERR_SYSTEM;
    }
}

static ncclDataType_t mti_nccl_type(mt_dtype dtype) {
    switch (dtype) {
    case MT_F32: return ncclFloat32;
    case MT_BF16: return ncclBfloat16;
    case MT_F16: return ncclFloat16;
    case MT_I32: return ncclInt32;
    case MT_U8: break;
    }
    return ncclUint8;
}

/* -- errors -- */

/* Writes the last call: all_reduce(count 4, f32, sum) on "tensor" (2 ranks). */
static void mti_nccl_say(mti_text *text, const mt_comm *comm) {
    mti_slot slot;
    memset(&slot, 0, sizeof slot);
    mti_slot_write(&slot, &comm->nccl.last);
    mti_say_call(text, &slot);
    mti_say(text, " on \"%s\" (%d ranks)", comm->name, comm->size);
}

/* Marks comm as broken: then only mt_comm_destroy works. The NCCL communicators of comm join those of `all`, if the
   library has created them. */
static mt_status mti_nccl_mark(mt_context *ctx, mt_comm *comm, mt_status status, const mti_text *text,
                               mti_aborts *all) {
    comm->nccl.broken = status;
    mti_channel_fail(comm, status, text->data);
    if (comm->nccl.twin) mti_break(comm->nccl.twin->group, MT_ERR_PEER, text, MTI_ANY);
    if (comm->nccl.home) mti_graphs_lose(comm->nccl.home); /* an abort waits for the graphs that use comm to end */
    if (comm->nccl.owned) {
        mti_aborts_add(all, comm->nccl.handle, comm->nccl.opener);
        comm->nccl.handle = comm->nccl.opener = NULL;
    }
    return mti_refuse(ctx, comm, status, "%s", text->data);
}

/* Breaks comm. The abort of its NCCL communicators ends their kernels in the stream. */
static mt_status mti_nccl_break(mt_context *ctx, mt_comm *comm, mt_status status, const mti_text *text) {
    mti_aborts *all = mti_aborts_new(1, comm->nccl.ordinal);
    status = mti_nccl_mark(ctx, comm, status, text, all);
    mti_aborts_run(all);
    return status;
}

/* Breaks all busy communicators, the one with the latest call first. After an abort the stream goes on: in another
   order, later calls in the stream would send the unfinished results of the aborted call to other ranks. */
static void mti_nccl_break_busy(mt_context *ctx, mt_status status, const mti_text *text) {
    mt_comm *comm, *latest;
    mti_aborts *all;
    int busy = 0;
    for (comm = ctx->nccl; comm; comm = comm->nccl.next) busy += comm->nccl.busy && !comm->nccl.broken;
    if (!busy) return;
    all = mti_aborts_new(busy, ctx->ordinal);
    do {
        latest = NULL;
        for (comm = ctx->nccl; comm; comm = comm->nccl.next)
            if (comm->nccl.busy && !comm->nccl.broken && (!latest || comm->nccl.number > latest->nccl.number))
                latest = comm;
        if (latest) mti_nccl_mark(ctx, latest, status, text, all);
    } while (latest);
    mti_aborts_run(all);
}

/* Breaks comm, and with ctx all busy communicators. ctx: NULL while comm is being destroyed */
static mt_status mti_nccl_give_up(mt_context *ctx, mt_comm *comm, mt_status status, const mti_text *text) {
    if (ctx) mti_nccl_break_busy(ctx, status, text);
    return comm->nccl.broken ? comm->nccl.broken : mti_nccl_break(ctx, comm, status, text);
}

#define MTI_NCCL_REASON 512 /* bytes of the text of mti_nccl_reason */

/* Writes what a result means, and what NCCL says of it, if anything. nccl may be NULL. */
static const char *mti_nccl_reason(ncclResult_t result, ncclComm_t nccl, char text[MTI_NCCL_REASON]) {
    const char *said = ncclGetLastError(nccl);
    const int n = said ? (int)strcspn(said, "\n") : 0;
    if (n > 0) snprintf(text, MTI_NCCL_REASON, "%.100s, \"%.*s\"", ncclGetErrorString(result), n < 400 ? n : 400, said);
    else snprintf(text, MTI_NCCL_REASON, "%.100s", ncclGetErrorString(result));
    return text;
}

static mt_status mti_nccl_fail(mt_context *ctx, mt_comm *comm, ncclResult_t result) {
    char reason[MTI_NCCL_REASON];
    mti_text text;
    text.used = 0;
    mti_nccl_say(&text, comm);
    mti_say(&text, ": rank %d: NCCL: %s", comm->rank, mti_nccl_reason(result, comm->nccl.handle, reason));
    return mti_nccl_give_up(ctx, comm, mti_nccl_status(result), &text);
}

/* Returns MT_ERR_TIMEOUT, or the error of a result about a busy communicator, and writes its message. All are asked at
   the same time. */
static mt_status mti_nccl_find_missing(mt_context *ctx, mti_text *text) {
    double start = mti_now();
    mt_comm *comm;
    int awaits = 1;
    for (comm = ctx->nccl; comm; comm = comm->nccl.next)
        if (comm->nccl.busy && !comm->nccl.broken) mti_channel_ask(comm);
    while (awaits) {
        for (comm = ctx->nccl, awaits = 0; comm; comm = comm->nccl.next) {
            mt_status status;
            if (!comm->nccl.busy || comm->nccl.broken) continue;
            status = mti_channel_error(comm, text);
            if (status != MT_SUCCESS) return status;
            awaits |= mti_channel_awaits(comm, start);
        }
        mti_rest(1, 0);
    }
    return MT_ERR_TIMEOUT;
}

/* Reports a timeout of the stream. Where no channel knows who is missing, the message has the last call of every busy
   communicator, because NCCL does not say which call hangs. */
static mt_status mti_nccl_late(mt_context *ctx, double waited) {
    mti_text text;
    mt_comm *comm;
    mt_status status;
    int said = 0;
    text.used = 0;
    status = mti_nccl_find_missing(ctx, &text);
    for (comm = ctx->nccl; comm && (said || !text.used); comm = comm->nccl.next) {
        if (!comm->nccl.busy) continue;
        if (said++) mti_say(&text, ", or ");
        mti_nccl_say(&text, comm);
    }
    if (said) mti_say(&text, ": waited %.2f s for peers", waited);
    mti_nccl_break_busy(ctx, status, &text);
    return status;
}

/* Reports a timeout of a call, or the result for which the watchdog has aborted it. */
static mt_status mti_nccl_call_late(mt_context *ctx, mt_comm *comm, double waited) {
    mti_text text;
    mt_status status;
    mti_channel_find_missing(comm);
    status = mti_channel_error(comm, &text);
    if (status != MT_SUCCESS) return mti_nccl_give_up(ctx, comm, status, &text);
    text.used = 0;
    mti_nccl_say(&text, comm);
    mti_say(&text, ": rank %d waited %.2f s for peers", comm->rank, waited);
    return mti_nccl_give_up(ctx, comm, MT_ERR_TIMEOUT, &text);
}

/* Returns the error of a result about comm, and breaks all busy communicators; MT_SUCCESS: there is none. */
static mt_status mti_nccl_obey(mt_context *ctx, mt_comm *comm) {
    mti_text text;
    mt_status status = mti_channel_error(comm, &text);
    return status == MT_SUCCESS ? MT_SUCCESS : mti_nccl_give_up(ctx, comm, status, &text);
}

/* -- waiting -- */

/* Waits, at most for the timeout, until a call on `handle` is complete. handle is one of the two of comm, and result is
   what the call has returned. ncclSuccess does not say that it is complete: NCCL 2.28.3 returns it from a split or a
   registration that is still in progress on a non-blocking communicator. So the handle is asked in any case. */
static mt_status mti_nccl_poll(mt_context *ctx, mt_comm *comm, struct ncclComm *handle, ncclResult_t result) {
    mti_stopwatch watch = mti_stopwatch_start(comm->nccl.timeout);
    double waited;
    while (result == ncclSuccess || result == ncclInProgress) {
        ncclResult_t asked = ncclCommGetAsyncError(handle, &result);
        if (asked != ncclSuccess) result = asked;
        if (result != ncclInProgress) break;
        waited = mti_waited(&watch);
        if (waited > comm->nccl.timeout || mti_channel_is_decided(comm->nccl.channel))
            return mti_nccl_call_late(ctx, comm, waited);
        mti_rest(waited, 1e-3);
    }
    return result == ncclSuccess ? MT_SUCCESS : mti_nccl_fail(ctx, comm, result);
}

/* Ends a call that mti_nccl_enter has begun. Waits for it when the handle is non-blocking, as a caller's ncclComm_t may
   be, and as all are with NCCL_COMM_BLOCKING=0 in the environment. */
static mt_status mti_nccl_settle(mt_context *ctx, mt_comm *comm, ncclResult_t result) {
    double late = mti_nccl_exit(comm);
    return late > 0 ? mti_nccl_call_late(ctx, comm, late) : mti_nccl_poll(ctx, comm, comm->nccl.handle, result);
}

/* Runs an expression that calls NCCL on the handle of comm. */
#define MTI_NCCL_RUN(ctx, comm, call) (mti_nccl_enter(comm), mti_nccl_settle(ctx, comm, call))

/* Returns an error that NCCL, or the channel, has found in a busy communicator after the call. */
static mt_status mti_nccl_ask(mt_context *ctx) {
    mt_comm *comm;
    for (comm = ctx->nccl; comm; comm = comm->nccl.next) {
        ncclResult_t state = ncclSuccess, asked;
        if (!comm->nccl.busy || comm->nccl.broken) continue;
        MT_TRY(mti_nccl_obey(ctx, comm));
        asked = ncclCommGetAsyncError(comm->nccl.handle, &state);
        if (asked != ncclSuccess) state = asked;
        if (state != ncclSuccess && state != ncclInProgress) return mti_nccl_fail(ctx, comm, state);
    }
    return MT_SUCCESS;
}

/* Returns 1 when comm has no work left. The caller has seen ctx->stream empty. */
static int mti_nccl_is_idle(const mt_context *ctx, const mt_comm *comm) {
    if (comm->nccl.stream == ctx->stream || cudaStreamQuery(comm->nccl.stream) == cudaSuccess) return 1;
    cudaGetLastError();
    return 0;
}

/* Waits for the context's stream if a communicator is busy, at most for the shortest timeout of the busy ones. */
static mt_status mti_nccl_wait(mt_context *ctx) {
    double timeout = -1, waited;
    mti_stopwatch watch;
    cudaError_t error;
    mt_comm *comm;
    for (comm = ctx->nccl; comm; comm = comm->nccl.next)
        if (comm->nccl.busy && (timeout < 0 || comm->nccl.timeout < timeout)) timeout = comm->nccl.timeout;
    if (timeout < 0) return MT_SUCCESS;
    watch = mti_stopwatch_start(timeout);
    for (;;) {
        error = cudaStreamQuery(ctx->stream);
        if (error == cudaErrorNotReady) cudaGetLastError(); /* clears cudaErrorNotReady */
        MT_TRY(mti_nccl_ask(ctx));
        if (error != cudaErrorNotReady) break;
        waited = mti_waited(&watch);
        if (waited > timeout) return mti_nccl_late(ctx, waited);
        mti_rest(waited, 1e-3);
    }
    MT_TRY(mti_cuda_check(ctx, error, "cudaStreamQuery"));
    for (comm = ctx->nccl; comm; comm = comm->nccl.next)
        if (comm->nccl.busy) comm->nccl.busy = !mti_nccl_is_idle(ctx, comm);
    return MT_SUCCESS;
}

/* After the launch of a graph, which may have work of every communicator. Its work is in the context's stream. */
static void mti_nccl_launched(mt_context *ctx) {
    mt_comm *comm;
    for (comm = ctx->nccl; comm; comm = comm->nccl.next) {
        if (comm->nccl.broken) continue;
        comm->nccl.busy = 1;
        comm->nccl.stream = ctx->stream;
        comm->nccl.last = mti_call_make(MTI_GRAPH_LAUNCH, NULL, NULL, 0, MT_U8);
    }
}

/* -- the order of sums -- */

static int mti_nccl_is_deterministic(const mt_context *ctx) {
    return ctx->nccl_options.deterministic || ctx->invariant;
}

/* Before NCCL makes a communicator: turns NVLS off, if sums must not depend on the run, or if ranks may share a GPU:
   NCCL 2.30 looks for these only in the last pair of ranks. Invariant mode adds by itself, so there a program may have
   asked for NVLS. */
static mt_status mti_nccl_fix_order(mt_context *ctx, const char *function) {
    const char *nvls = getenv(MTI_NVLS);
    int shares = mti_nccl_may_share();
    if (nvls && strcmp(nvls, "2") == 0) nvls = NULL;
    if ((!mti_nccl_is_deterministic(ctx) && !shares) || (nvls && strcmp(nvls, "0") == 0)) return MT_SUCCESS;
    if (nvls && !ctx->nccl_options.deterministic && !shares) return MT_SUCCESS;
    if (nvls)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: " MTI_NVLS " is %.32s in the environment, but %s", function, nvls,
                       ctx->nccl_options.deterministic ? "mt_context_desc.nccl.deterministic needs 0: sums of NVLS may "
                                                         "differ from run to run"
                                                       : "NCCL_MULTI_RANK_GPU_ENABLE needs 0");
    if (setenv(MTI_NVLS, "0", 1) == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SYSTEM, "%s: cannot set " MTI_NVLS " to 0 in the environment: %s", function,
                   strerror(errno));
}

/* A communicator of the program has been made already: it must have been made without NVLS. */
static mt_status mti_nccl_check_order(mt_context *ctx) {
    const char *nvls = getenv(MTI_NVLS);
    if (!ctx->nccl_options.deterministic || (nvls && strcmp(nvls, "0") == 0)) return MT_SUCCESS;
    return mt_fail(
        ctx, MT_ERR_ARGUMENT,
        "mt_comm_create_nccl: mt_context_desc.nccl.deterministic needs a communicator that was created with " MTI_NVLS
        "=0 in the environment, where it is %.32s",
        nvls ? nvls : "not set");
}

/* -- ranks that share a GPU -- */

#define MTI_NCCL_SHARED_CTAS 4 /* most thread blocks of a collective: 8 ranks with 3 of them at once take 96 */

/* The most thread blocks of a collective, 0: no limit. All blocks of ranks that share a GPU must fit into it at the
   same time, because they wait for each other. */
static int mti_nccl_ctas(const mt_comm *comm) {
    int most = comm->nccl.max_ctas;
    return mti_nccl_may_share() && (!most || most > MTI_NCCL_SHARED_CTAS) ? MTI_NCCL_SHARED_CTAS : most;
}

/* -- registration -- */

typedef struct mti_window {
    struct mti_window *next;
    mt_comm *comm;
    const char *memory;
    size_t bytes;
    void *buffer; /* the handle of ncclCommRegister; the other one is NULL */
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    ncclWindow_t window; /* the handle of ncclCommWindowRegister; the other one is NULL */
#endif
} mti_window;

/* Registers the memory of w: as a symmetric window where NCCL has them, and otherwise as a buffer. A window lets NCCL
   add with the kernels of NVLS, and its kernels need a GPU for each rank. NCCL also returns success, and no window,
   where it does not support one. */
static mt_status mti_window_begin(mt_context *ctx, mti_window *w, void *memory) {
    mt_comm *comm = w->comm;
    int version = 0, as_buffer = mti_nccl_is_deterministic(ctx) || mti_nccl_may_share();
    ncclGetVersion(&version);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    if (version >= NCCL_VERSION(2, 27, 0) && !as_buffer) {
        MT_TRY(MTI_NCCL_RUN(
            ctx, comm,
            ncclCommWindowRegister(comm->nccl.handle, memory, w->bytes, &w->window, NCCL_WIN_COLL_SYMMETRIC)));
        if (w->window) return MT_SUCCESS;
    }
#endif
    (void)as_buffer; /* NCCL before 2.27 */
    return MTI_NCCL_RUN(ctx, comm, ncclCommRegister(comm->nccl.handle, memory, w->bytes, &w->buffer));
}

/* Implements mt_comm_register. Results of NCCL are undefined when a buffer is in symmetric windows of several
   communicators. */
static mt_status mti_nccl_enlist(mt_context *ctx, mt_comm *comm, void *memory, size_t bytes) {
    const char *begin = (const char *)memory;
    mti_window *w;
    if (ctx->allocator.alloc != mti_cuda_alloc || bytes < MTI_NCCL_MEMORY) return MT_SUCCESS;
    for (w = ctx->windows; w; w = w->next)
        if (begin < w->memory + w->bytes && w->memory < begin + bytes) return MT_SUCCESS;
    w = (mti_window *)mt_host_alloc(sizeof *w);
    if (!w) return mt_fail(ctx, MT_ERR_MEMORY, "no memory to register %zu bytes with \"%s\"", bytes, comm->name);
    w->comm = comm;
    w->memory = begin;
    w->bytes = bytes;
    w->next = ctx->windows;
    ctx->windows = w;
    return mti_window_begin(ctx, w, memory);
}

/* Deregisters memory, and waits until this is done. After an error the communicator is broken. Both handles are NULL
   when the GPU or the system does not support registration. */
static void mti_window_end(mt_context *ctx, mti_window *w) {
    struct ncclComm *handle = w->comm->nccl.broken ? NULL : w->comm->nccl.handle;
    ncclResult_t result = ncclSuccess;
    if (!handle) { /* an abort deregisters */
        mti_watchdog_wait(w->comm);
        mt_host_free(w);
        return;
    }
    mti_nccl_enter(w->comm);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    if (w->window) result = ncclCommWindowDeregister(handle, w->window);
#endif
    if (w->buffer) result = ncclCommDeregister(handle, w->buffer);
    mti_nccl_settle(ctx, w->comm, result);
    mt_host_free(w);
}

/* Deregisters the windows of comm (NULL: of all communicators) that start at `memory` (NULL: at any address). */
static void mti_nccl_forget(mt_context *ctx, const mt_comm *comm, const void *memory) {
    mti_window **at = &ctx->windows, *w;
    while ((w = *at) != NULL) {
        if ((comm && w->comm != comm) || (memory && w->memory != memory)) {
            at = &w->next;
            continue;
        }
        *at = w->next;
        mti_window_end(ctx, w);
    }
}

/* -- beginning and end -- */

/* Creates a communicator without a handle. call: MTI_CREATE or MTI_SPLIT, for messages */
static mt_comm *mti_nccl_new(const mti_transport *transport, mt_context *ctx, int rank, int size, const char *name,
                             double timeout_s, int call) {
    mt_comm *comm = mti_comm_new(transport, rank, size, name);
    if (!comm) return NULL;
    comm->nccl.owned = 1;
    comm->nccl.timeout = timeout_s > 0 ? timeout_s : MT_TIMEOUT_DEFAULT;
    comm->nccl.ordinal = ctx->ordinal;
    comm->nccl.last.kind = call;
    return comm;
}

/* Finishes the creation of a communicator: adds comm to the context's list. Destroys comm if status is an error. */
static mt_status mti_nccl_begin(mt_context *ctx, mt_comm *comm, mt_status status, mt_comm **out) {
    comm->nccl.home = ctx;
    comm->nccl.next = ctx->nccl;
    ctx->nccl = comm;
    if (status == MT_SUCCESS) *out = comm;
    else mt_comm_destroy(comm);
    return status;
}

static void mti_nccl_unlink(mt_context *ctx, mt_comm *comm) {
    mt_comm **at;
    for (at = &ctx->nccl; *at != comm; at = &(*at)->nccl.next) continue;
    *at = comm->nccl.next;
}

static void mti_nccl_leave(mt_comm *comm, const char *reason) {
    mti_channel_append(comm, MTI_MESSAGE_LEFT, NULL,
                       reason); /* without memory, the others see that the connection ends */
}

static void mti_nccl_destroy(mt_comm *comm) {
    mti_nccl *n = &comm->nccl;
    if (mti_is_forked(comm->process)) {
        mti_channel_abandon(comm);
        mt_comm_destroy(n->twin);
        return;
    }
    if (cudaSetDevice(n->ordinal) != cudaSuccess) cudaGetLastError();
    if (n->home) {
        if (n->busy && !n->broken) mti_cuda_synchronize(n->home); /* an error is ignored: comm is destroyed */
        if (n->busy && n->broken && !mti_cuda_ends(n->stream, 0)) n->home->stuck = 1;
        if (n->recorded) mti_graphs_lose(n->home); /* NCCL waits for the graphs that use comm to end */
        mti_nccl_forget(n->home, comm, NULL);
        mti_nccl_unlink(n->home, comm);
    }
    mti_channel_close(comm);
    if (n->owned && n->handle && MTI_NCCL_RUN(NULL, comm, ncclCommFinalize(n->handle)) == MT_SUCCESS) {
        ncclCommDestroy(n->handle);
        n->handle = NULL; /* an error below must not abort it */
    }
    if (n->owned && n->opener && mti_nccl_poll(NULL, comm, n->opener, ncclCommFinalize(n->opener)) == MT_SUCCESS)
        ncclCommDestroy(n->opener);
    mti_watchdog_leave(comm);
    mt_comm_destroy(n->twin);
}

/* Detaches all communicators from a context that is being destroyed. They can still be destroyed afterwards. */
static void mti_nccl_close(mt_context *ctx) {
    if (!ctx->stuck) mti_nccl_forget(ctx, NULL, NULL);
    while (ctx->nccl) {
        ctx->nccl->nccl.home = NULL;
        ctx->nccl = ctx->nccl->nccl.next;
    }
}

/* -- collectives -- */

/* Returns 1 when a call inside an NCCL group has not failed. On a non-blocking communicator of the caller the call
   returns ncclInProgress, and so does ncclGroupEnd. */
static int mti_nccl_goes_on(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }

static ncclResult_t mti_nccl_pair(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    ncclDataType_t type = mti_nccl_type(call->dtype);
    struct ncclComm *handle = comm->nccl.handle;
    ncclResult_t result = ncclSuccess, end;
    ncclGroupStart(); /* ncclGroupEnd also returns the error of a call in the group */
    if (call->root >= 0) result = ncclSend(call->send, call->count, type, call->root, handle, ctx->stream);
    if (call->source >= 0 && mti_nccl_goes_on(result))
        result = ncclRecv(call->recv, call->recvcount, type, call->source, handle, ctx->stream);
    end = ncclGroupEnd();
    return mti_nccl_goes_on(result) ? end : result;
}

/* An all_gather or reduce_scatter of some ranks' blocks: one call per block, in one NCCL group. Rank r is the root of
   block r. */
static ncclResult_t mti_nccl_blocks(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    ncclDataType_t type = mti_nccl_type(call->dtype);
    ncclRedOp_t op = call->op == MT_MAX ? ncclMax : ncclSum;
    size_t apart = call->count * mt_dtype_size(call->dtype);
    struct ncclComm *handle = comm->nccl.handle;
    ncclResult_t result = ncclSuccess, end;
    int r;
    ncclGroupStart();
    for (r = call->first; r < call->first + call->ranks && mti_nccl_goes_on(result); r++) {
        if (call->kind == MT_ALL_GATHER)
            result = ncclBroadcast(call->send, (char *)call->recv + apart * (size_t)r, call->count, type, r, handle,
                                   ctx->stream);
        else
            result = ncclReduce((const char *)call->send + apart * (size_t)r, call->recv, call->count, type, op, r,
                                handle, ctx->stream);
    }
    end = ncclGroupEnd();
    return mti_nccl_goes_on(result) ? end : result;
}

/* Sends each rank its block, and receives one from each rank, also from this one, in one NCCL group. */
static ncclResult_t mti_nccl_all_to_all(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    ncclDataType_t type = mti_nccl_type(call->dtype);
    struct ncclComm *handle = comm->nccl.handle;
    size_t element = mt_dtype_size(call->dtype);
    const char *from = (const char *)call->send;
    char *to = (char *)call->recv;
    ncclResult_t result = ncclSuccess, end;
    int r;
    ncclGroupStart();
    for (r = 0; r < comm->size && mti_nccl_goes_on(result); r++) {
        size_t send = mti_count_at(call->sends, call->count, r), recv = mti_count_at(call->recvs, call->count, r);
        if (send > 0) result = ncclSend(from, send, type, r, handle, ctx->stream);
        if (recv > 0 && mti_nccl_goes_on(result)) result = ncclRecv(to, recv, type, r, handle, ctx->stream);
        from += send * element;
        to += recv * element;
    }
    end = ncclGroupEnd();
    return mti_nccl_goes_on(result) ? end : result;
}

/* Puts a call into the stream: calls the NCCL function for it. */
static ncclResult_t mti_nccl_issue(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    ncclDataType_t type = mti_nccl_type(call->dtype);
    ncclRedOp_t op = call->op == MT_MAX ? ncclMax : ncclSum;
    struct ncclComm *handle = comm->nccl.handle;
    if (call->ranks) return mti_nccl_blocks(ctx, comm, call);
    switch (call->kind) {
    case MT_ALL_REDUCE: return ncclAllReduce(call->send, call->recv, call->count, type, op, handle, ctx->stream);
    case MT_REDUCE_SCATTER:
        return ncclReduceScatter(call->send, call->recv, call->count, type, op, handle, ctx->stream);
    case MT_ALL_GATHER: return ncclAllGather(call->send, call->recv, call->count, type, handle, ctx->stream);
    case MT_BROADCAST: return ncclBroadcast(call->send, call->recv, call->count, type, call->root, handle, ctx->stream);
    case MT_ALL_TO_ALL:
    case MT_ALL_TO_ALL_V: return mti_nccl_all_to_all(ctx, comm, call);
    default: return mti_nccl_pair(ctx, comm, call);
    }
}

/* Returns 1 for reductions that the library does itself: of floats in invariant mode, where the order of additions is
   fixed, and MT_MAX of floats, which must keep a NaN. */
static int mti_nccl_is_ordered(const mt_context *ctx, const mti_call *call) {
    return mti_reduces(call) && call->dtype != MT_I32 && (ctx->invariant || call->op == MT_MAX);
}

/* Exchanges pieces between all ranks. With `out`: sends piece r to rank r, and stores every rank's copy of this rank's
   piece in `out`, n elements apart. Without `out`: sends this rank's result to all ranks, and stores their results in
   p->to. */
static ncclResult_t mti_nccl_exchange(mt_context *ctx, mt_comm *comm, const mti_call *call, const mti_pieces *p,
                                      char *out) {
    ncclDataType_t type = mti_nccl_type(call->dtype);
    struct ncclComm *handle = comm->nccl.handle;
    size_t mine = mti_piece_size(p, comm->rank), apart = (out ? p->n : p->stride) * p->element;
    ncclResult_t result = ncclSuccess, end;
    int r;
    ncclGroupStart();
    for (r = 0; r < comm->size && mti_nccl_goes_on(result); r++) {
        size_t theirs = mti_piece_size(p, r), send = out ? theirs : mine, recv = out ? mine : theirs;
        const char *from = out ? p->from + p->stride * p->element * (size_t)r : p->own;
        char *to = (out ? out : p->to) + apart * (size_t)r;
        if (r == comm->rank) continue;
        if (send > 0) result = ncclSend(from, send, type, r, handle, ctx->stream);
        if (recv > 0 && mti_nccl_goes_on(result)) result = ncclRecv(to, recv, type, r, handle, ctx->stream);
    }
    end = ncclGroupEnd();
    return mti_nccl_goes_on(result) ? end : result;
}

/* Reduces one chunk: gathers every rank's copy of this rank's piece in `scratch`, reduces the copies in the tree that
   the other transports use, and sends the result to all ranks if p->to is set. */
static mt_status mti_nccl_join(mt_context *ctx, mt_comm *comm, const mti_call *call, const mti_pieces *p,
                               char *scratch) {
    mti_cuda_buffers b;
    int r;
    MT_TRY(MTI_NCCL_RUN(ctx, comm, mti_nccl_exchange(ctx, comm, call, p, scratch)));
    b.ranks = comm->size;
    b.writers = 1;
    for (r = 0; r < comm->size; r++) b.send[r] = scratch + p->n * p->element * (size_t)r;
    b.send[comm->rank] = p->from + p->stride * p->element * (size_t)comm->rank;
    b.recv[0] = p->own;
    MT_TRY(mti_cuda_reduce_buffers(ctx, &b, mti_piece_size(p, comm->rank), call));
    return p->to ? MTI_NCCL_RUN(ctx, comm, mti_nccl_exchange(ctx, comm, call, p, NULL)) : MT_SUCCESS;
}

/* Runs the call in chunks. In each chunk, every rank gets a piece of at most `most` elements. */
static mt_status mti_nccl_chunks(mt_context *ctx, mt_comm *comm, const mti_call *call, size_t most, char *scratch) {
    size_t done = 0;
    mti_pieces p;
    while (done < call->count) {
        done += mti_pieces_next(comm, call, most, done, &p);
        MT_TRY(mti_nccl_join(ctx, comm, call, &p, scratch));
    }
    return MT_SUCCESS;
}

/* A reduction in the library's tree: NCCL only moves the data. *most: the elements of a piece; *bytes: of its scratch
   memory */
static mt_status mti_nccl_reduction(mt_context *ctx, mt_comm *comm, const mti_call *call, size_t *most, size_t *bytes) {
    size_t ranks = (size_t)comm->size, element = mt_dtype_size(call->dtype), line = MTI_LINE / element;
    size_t needed = call->kind == MT_REDUCE_SCATTER ? call->count : (call->count + ranks - 1) / ranks;
    MT_TRY(mti_cuda_check_ranks(ctx, comm, call));
    *most = mti_pieces_most(comm, call, MTI_NCCL_SCRATCH);
    needed = (needed + line - 1) / line * line;
    if (needed < *most) *most = needed;
    *bytes = *most * ranks * element;
    return MT_SUCCESS;
}

/* Waits until all ranks have arrived: an all-reduce of one element, and a wait for the stream. */
static mt_status mti_nccl_barrier(mt_context *ctx, mt_comm *comm, void *one) {
    MT_TRY(mt_cuda_zero(ctx, one, sizeof(int32_t)));
    MT_TRY(MTI_NCCL_RUN(ctx, comm, ncclAllReduce(one, one, 1, ncclInt32, ncclSum, comm->nccl.handle, ctx->stream)));
    return mti_cuda_synchronize(ctx);
}

/* Returns the error of a call that this communicator does not take. */
static mt_status mti_nccl_check(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    if (comm->nccl.home != ctx)
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_%s: \"%s\" (%d ranks, over NCCL) belongs to another context",
                          mti_call_name(call->kind), comm->name, comm->size);
    if (comm->nccl.broken)
        return mti_refuse(
            ctx, comm, MT_ERR_PEER, "%s on \"%s\" (%d ranks): rank %d calls after this communicator failed with %s",
            mti_call_name(call->kind), comm->name, comm->size, comm->rank, mt_status_name(comm->nccl.broken));
    return mt_cuda_enter(ctx);
}

/* Tells the channel the counts of an all_to_all_v: for each rank, what it gets and what it sends. */
static void mti_nccl_tell_counts(mt_comm *comm, const mti_call *call) {
    mti_call pair = mti_call_make(MT_ALL_TO_ALL_V, NULL, NULL, 0, call->dtype);
    int r;
    for (r = 0; r < comm->size && call->sends; r++) {
        if (r == comm->rank) continue;
        pair.root = pair.source = r;
        pair.count = call->sends[r];
        pair.recvcount = call->recvs[r];
        mti_channel_append(comm, MTI_MESSAGE_CALL, &pair, NULL);
    }
}

/* Begins a call, and tells the channel about it. */
static mt_status mti_nccl_call_begin(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    mti_channel_append(comm, MTI_MESSAGE_CALL, call, NULL);
    mti_nccl_tell_counts(comm, call);
    comm->nccl.last = *call;
    MT_TRY(mti_nccl_obey(ctx, comm));
    comm->nccl.number = ++ctx->nccl_calls;
    comm->nccl.stream = ctx->stream;
    comm->nccl.busy = 1;
    comm->nccl.recorded |= ctx->recording;
    return MT_SUCCESS;
}

/* Runs a call: as a barrier, as a reduction in the library's tree, or as one call of NCCL. A rank tells its call when
   it has the memory for it: otherwise the others would wait for a call that does not come, or count one too many. */
static mt_status mti_nccl_call(mt_context *ctx, mt_comm *comm, const mti_call *call) {
    size_t mark = mt_arena_mark(ctx), most = 0, bytes = call->kind == MT_BARRIER ? sizeof(int32_t) : 0;
    void *scratch = NULL;
    mt_status status;
    MT_TRY(mti_nccl_check(ctx, comm, call));
    if (mti_nccl_is_ordered(ctx, call)) MT_TRY(mti_nccl_reduction(ctx, comm, call, &most, &bytes));
    if (bytes) MT_TRY(mt_arena_alloc(ctx, bytes, &scratch));
    status = mti_nccl_call_begin(ctx, comm, call);
    if (status == MT_SUCCESS && call->kind == MT_BARRIER) status = mti_nccl_barrier(ctx, comm, scratch);
    else if (status == MT_SUCCESS && most) status = mti_nccl_chunks(ctx, comm, call, most, (char *)scratch);
    else if (status == MT_SUCCESS) status = MTI_NCCL_RUN(ctx, comm, mti_nccl_issue(ctx, comm, call));
    mt_arena_release(ctx, mark); /* the stream may still use it: later work in the same stream comes after that */
    return status;
}

/* -- splitting -- */

/* What the ranks tell each other before they create a communicator. Its size, and the place of the version, stay the
   same in all versions: NCCL gathers it, and other sizes would hang before the versions are compared. */
typedef struct mti_member {
    int32_t version; /* MT_VERSION_NUMBER */
    int32_t color, key;
    mti_listener listener;
} mti_member;

static mt_status mti_nccl_same_version(mt_context *ctx, const mt_comm *comm, const mti_member *all) {
    mti_text text;
    int r = 1;
    while (r < comm->size && all[r].version == all[0].version) r++;
    if (r >= comm->size) return MT_SUCCESS;
    text.used = 0;
    mti_say_versions(&text, all[0].version, r, all[r].version);
    return mt_fail(ctx, MT_ERR_MISMATCH, "\"%s\": %s", comm->name, text.data);
}

/* Gathers the members of all ranks in all [size], which holds this rank's member at the start. kind: MTI_SPLIT or
   MTI_CREATE, for the channel and for messages */
static mt_status mti_nccl_members(mt_context *ctx, mt_comm *comm, int kind, mti_member *all) {
    size_t mark = mt_arena_mark(ctx), bytes = sizeof *all, at = bytes * (size_t)comm->rank;
    mti_call call, named = mti_call_make(kind, NULL, NULL, 0, MT_U8);
    void *gathered = NULL;
    mt_status status;
    all[comm->rank].version = MT_VERSION_NUMBER;
    MT_TRY(mt_arena_alloc(ctx, bytes * (size_t)comm->size, &gathered));
    call = mti_call_make(MT_ALL_GATHER, (char *)gathered + at, gathered, bytes, MT_U8);
    status = mti_cuda_copy(ctx, (char *)gathered + at, (char *)all + at, bytes);
    if (status == MT_SUCCESS) status = mti_nccl_check(ctx, comm, &named);
    if (status == MT_SUCCESS) status = mti_nccl_call_begin(ctx, comm, &named);
    if (status == MT_SUCCESS) status = MTI_NCCL_RUN(ctx, comm, mti_nccl_issue(ctx, comm, &call));
    if (status == MT_SUCCESS) status = mti_cuda_fetch(ctx, all, gathered, bytes * (size_t)comm->size);
    mt_arena_release(ctx, mark);
    return status == MT_SUCCESS ? mti_nccl_same_version(ctx, comm, all) : status;
}

/* Returns the size of rank r's new group, and rank r's rank in it. Size 0: rank r has a negative color. */
static int mti_nccl_member(const mti_member *all, int ranks, int r, int *rank) {
    int32_t color = all[r].color, key = all[r].key;
    int size = 0, other;
    *rank = 0;
    for (other = 0; other < ranks && color >= 0; other++) {
        if (all[other].color != color) continue;
        *rank += all[other].key < key || (all[other].key == key && other < r);
        size++;
    }
    return size;
}

/* Connects the ranks of comm, a group of the ranks that `all` describes with this color. listener: of this rank */
static mt_status mti_nccl_connect(mt_context *ctx, mt_comm *comm, int color, const mti_member *all, int ranks,
                                  int listener) {
    mti_listener *listeners;
    mt_status status;
    int r, rank;
    if (ctx->no_nccl_checks) return MT_SUCCESS;
    listeners = (mti_listener *)calloc((size_t)comm->size, sizeof *listeners);
    for (r = 0; r < ranks && listeners; r++)
        if (all[r].color == color && mti_nccl_member(all, ranks, r, &rank)) listeners[rank] = all[r].listener;
    status = mti_channel_open(ctx, comm, listener, listeners);
    free(listeners);
    return status;
}

/* While the ranks create a communicator, NCCL allocates memory, and CUDA may let an allocation in one thread wait for a
   kernel in another one, on another GPU. A collective of a rank that is ahead would wait for the rank that allocates.
   So ranks that are threads wait for each other, without NCCL, before the first collective. */
static mt_status mti_nccl_line_up(mt_context *ctx, mt_comm *comm) {
    mt_comm *twin = comm->nccl.twin;
    mti_call call = mti_call_make(MTI_CREATE, NULL, NULL, 0, MT_U8);
    if (!twin) return MT_SUCCESS;
    MT_TRY((twin->transport->enter)(ctx, twin, &call));
    (twin->transport->exit)(twin);
    return MT_SUCCESS;
}

/* This rank has failed to split comm: the others do not wait for it. */
static void mti_nccl_leave_line(mt_context *ctx, mt_comm *comm) {
    mti_text text;
    if (!comm->nccl.twin) return;
    text.used = 0;
    mti_say(&text, "mt_comm_split of \"%s\": rank %d failed (%s)", comm->name, comm->rank, mt_last_error(ctx));
    mti_break(comm->nccl.twin->group, MT_ERR_PEER, &text, MTI_ANY);
}

/* The same after a split of comm. The group of *out, which may be NULL, gets its twin. */
static mt_status mti_nccl_line_up_split(mt_context *ctx, mt_comm *comm, int color, int key, mt_comm *out) {
    mt_comm *twin = comm->nccl.twin, *part = NULL;
    mt_status status;
    if (!twin) return MT_SUCCESS;
    status = (twin->transport->split)(twin, color < 0 ? -1 : color, key, &part);
    if (status != MT_SUCCESS) return mti_refuse(ctx, comm, status, "%s", twin->error);
    if (out && out->nccl.home) out->nccl.twin = part;
    else mt_comm_destroy(part);
    return MT_SUCCESS;
}

/* Splits the blocking handle of child, or nothing if child is NULL, from comm. Waits until both are ready. The handle
   of the child is valid only when the call on the parent has completed. */
static mt_status mti_nccl_carve(mt_context *ctx, mt_comm *comm, int color, int rank, mt_comm *child) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    struct ncclComm *opener = comm->nccl.opener, *none = NULL, **handle = child ? &child->nccl.handle : &none;
    int taken = child ? color : NCCL_SPLIT_NOCOLOR;
    config.blocking = 1;
    if (child && mti_nccl_ctas(child)) config.maxCTAs = mti_nccl_ctas(child);
    if (opener) MT_TRY(mti_nccl_poll(ctx, comm, opener, ncclCommSplit(opener, taken, rank, handle, &config)));
    else MT_TRY(MTI_NCCL_RUN(ctx, comm, ncclCommSplit(comm->nccl.handle, taken, rank, handle, &config)));
    return child ? mti_nccl_poll(ctx, child, *handle, ncclInProgress) : MT_SUCCESS;
}

/* mti_nccl_carve creates the groups of two or more ranks. If there is such a group, all ranks of comm must call it. */
static mt_status mti_nccl_divide(mt_context *ctx, mt_comm *comm, int color, const mti_member *all, const char *name,
                                 mt_comm **out) {
    mt_comm *child = NULL;
    mt_status status = MT_SUCCESS;
    int rank, ignored, r = 0, size = mti_nccl_member(all, comm->size, comm->rank, &rank);
    while (r < comm->size && mti_nccl_member(all, comm->size, r, &ignored) < 2) r++;
    if (size == 1) *out = mti_comm_new(&mti_alone, 0, 1, name);
    if (r == comm->size) return MT_SUCCESS;
    if (size > 1) child = mti_nccl_new(comm->transport, ctx, rank, size, name, comm->nccl.timeout, MTI_SPLIT);
    if (size > 1 && !child) return MT_SUCCESS; /* *out is NULL: mt_comm_split returns MT_ERR_MEMORY */
    if (child) child->nccl.max_ctas = comm->nccl.split_ctas;
    if (child) status = mti_watchdog_join(ctx, child);
    comm->nccl.last.kind = MTI_SPLIT;
    if (status == MT_SUCCESS) status = mti_nccl_carve(ctx, comm, color, rank, child);
    return child ? mti_nccl_begin(ctx, child, status, out) : status;
}

/* Ends a creation that has failed after `status`, or connects the ranks of the new communicator. */
static mt_status mti_nccl_finish(mt_context *ctx, mt_status status, int color, const mti_member *all, int ranks,
                                 int listener, mt_comm **out) {
    if (status == MT_SUCCESS && *out && (*out)->nccl.home)
        status = mti_nccl_connect(ctx, *out, color, all, ranks, listener);
    if (listener >= 0) close(listener);
    if (status == MT_SUCCESS) return status;
    mt_comm_destroy(*out);
    *out = NULL;
    return status;
}

/* Gathers the colors and keys of all ranks, and then creates the groups. */
static mt_status mti_nccl_split(mt_comm *comm, int color, int key, mt_comm **out) {
    mt_context *ctx = comm->nccl.home;
    mti_member *all;
    char name[32];
    mt_status status;
    int listener = -1;
    if (!ctx)
        return mti_refuse(NULL, comm, MT_ERR_ARGUMENT, "mt_comm_split: the context of \"%s\" has been destroyed",
                          comm->name);
    all = (mti_member *)calloc((size_t)comm->size, sizeof *all);
    if (!all) return mti_refuse(ctx, comm, MT_ERR_MEMORY, "mt_comm_split: no memory for %d colors", comm->size);
    if (color >= 0 && !ctx->no_nccl_checks) listener = mti_listener_open(&all[comm->rank].listener);
    all[comm->rank].color = color;
    all[comm->rank].key = key;
    if (snprintf(name, sizeof name, "%s/%d", comm->name, color) < 0) name[0] = '\0';
    status = mti_nccl_members(ctx, comm, MTI_SPLIT, all);
    if (status == MT_SUCCESS) status = mti_nccl_divide(ctx, comm, color, all, name, out);
    if (status == MT_SUCCESS) status = mti_nccl_line_up_split(ctx, comm, color, key, *out);
    else mti_nccl_leave_line(ctx, comm);
    status = mti_nccl_finish(ctx, status, color, all, comm->size, listener, out);
    free(all);
    return status == MT_SUCCESS ? status : mt_comm_fail(comm, status, mt_last_error(ctx));
}

static const mti_transport mti_over_nccl = {1,    0,    mti_peers_check, mti_nccl_call,  mti_nccl_call,
                                            NULL, NULL, mti_nccl_split,  mti_nccl_leave, mti_nccl_destroy};

/* -- creating -- */

static mt_status mti_nccl_check_context(mt_context *ctx, const char *function, const void *argument, const void *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!argument || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, out ? "its argument" : "out");
    if (ctx->device != MT_DEVICE_CUDA)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the context is on device %d; NCCL needs MT_DEVICE_CUDA", function,
                       (int)ctx->device);
    return mt_cuda_enter(ctx);
}

MT_API mt_status mt_nccl_unique_id(mt_context *ctx, mt_nccl_id *out) {
    ncclUniqueId id;
    ncclResult_t result;
    char reason[MTI_NCCL_REASON];
    MT_TRY(mti_nccl_check_context(ctx, "mt_nccl_unique_id", out, out));
    MT_TRY(mti_nccl_fix_order(ctx, "mt_nccl_unique_id"));
    result = ncclGetUniqueId(&id);
    if (result != ncclSuccess)
        return mt_fail(ctx, mti_nccl_status(result), "mt_nccl_unique_id: %s", mti_nccl_reason(result, NULL, reason));
    memcpy(out->bytes, id.internal, sizeof out->bytes);
    return MT_SUCCESS;
}

/* Tells the ranks of a new communicator each other's listeners, and connects them. Destroys *out on failure. */
static mt_status mti_nccl_meet(mt_context *ctx, mt_comm **out) {
    mt_comm *comm = *out;
    mti_member *all;
    mt_status status;
    int listener;
    if (ctx->no_nccl_checks || comm->size == 1) return MT_SUCCESS;
    all = (mti_member *)calloc((size_t)comm->size, sizeof *all);
    listener = all ? mti_listener_open(&all[comm->rank].listener) : -1;
    status = all ? mti_nccl_members(ctx, comm, MTI_CREATE, all)
                 : mt_fail(ctx, MT_ERR_MEMORY, "no memory for the addresses of %d ranks", comm->size);
    status = mti_nccl_finish(ctx, status, 0, all, comm->size, listener, out);
    free(all);
    return status;
}

/* Creates a communicator from an id, over NCCL also for one rank, as the tests need it. *out is NULL. twin: the ranks
   as threads, which *out then owns, or NULL */
static mt_status mti_nccl_create(mt_context *ctx, const mt_nccl_id *id, int ranks, int rank, double timeout_s,
                                 mt_comm *twin, mt_comm **out) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId unique;
    mt_comm *comm;
    mt_status status;
    comm = mti_nccl_new(&mti_over_nccl, ctx, rank, ranks, "world", timeout_s, MTI_CREATE);
    if (!comm) {
        mt_comm_destroy(twin);
        return mt_fail(ctx, MT_ERR_MEMORY, "mt_comm_create_nccl_id: no memory for the communicator");
    }
    comm->nccl.twin = twin;
    memcpy(unique.internal, id->bytes, sizeof id->bytes);
    config.blocking = 0;
    status = mti_watchdog_join(ctx, comm);
    if (status == MT_SUCCESS) {
        ncclResult_t result = ncclCommInitRankConfig(&comm->nccl.opener, ranks, unique, rank, &config);
        status = mti_nccl_poll(ctx, comm, comm->nccl.opener, result);
    }
    if (status == MT_SUCCESS) status = mti_nccl_carve(ctx, comm, 0, rank, comm);
    if (status == MT_SUCCESS) status = mti_nccl_line_up(ctx, comm);
    MT_TRY(mti_nccl_begin(ctx, comm, status, out));
    return mti_nccl_meet(ctx, out);
}

/* Implements mt_comm_create_nccl_id, and destroys the twin if it fails. */
static mt_status mti_nccl_from_id(mt_context *ctx, const mt_nccl_id *id, int ranks, int rank, double timeout_s,
                                  mt_comm *twin, mt_comm **out) {
    mt_status status = mti_nccl_fix_order(ctx, "mt_comm_create_nccl_id");
    if (status == MT_SUCCESS && ranks == 1) {
        *out = mti_comm_new(&mti_alone, 0, 1, "world");
        status = *out ? MT_SUCCESS : MT_ERR_MEMORY;
    } else if (status == MT_SUCCESS) return mti_nccl_create(ctx, id, ranks, rank, timeout_s, twin, out);
    mt_comm_destroy(twin);
    return status;
}

MT_API mt_status mt_comm_create_nccl_id(mt_context *ctx, const mt_nccl_id *id, int ranks, int rank, double timeout_s,
                                        mt_comm **out) {
    if (out) *out = NULL;
    MT_TRY(mti_nccl_check_context(ctx, "mt_comm_create_nccl_id", id, out));
    if (ranks < 1 || rank < 0 || rank >= ranks)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_comm_create_nccl_id: rank %d of %d ranks", rank, ranks);
    return mti_nccl_from_id(ctx, id, ranks, rank, timeout_s, NULL, out);
}

/* Creates a communicator over the caller's ncclComm_t, also for one rank, as above. *out is NULL. */
static mt_status mti_nccl_wrap(mt_context *ctx, struct ncclComm *nccl, int size, int rank, double timeout_s,
                               mt_comm **out) {
    mt_comm *comm = mti_nccl_new(&mti_over_nccl, ctx, rank, size, "world", timeout_s, MTI_CREATE);
    if (!comm) return mt_fail(ctx, MT_ERR_MEMORY, "mt_comm_create_nccl: no memory for the communicator");
    comm->nccl.handle = nccl;
    comm->nccl.owned = 0;
    MT_TRY(mti_nccl_begin(ctx, comm, MT_SUCCESS, out));
    return mti_nccl_meet(ctx, out);
}

MT_API mt_status mt_comm_create_nccl(mt_context *ctx, struct ncclComm *nccl, double timeout_s, mt_comm **out) {
    int size = 0, rank = 0, device = -1;
    ncclResult_t result;
    char reason[MTI_NCCL_REASON];
    if (out) *out = NULL;
    MT_TRY(mti_nccl_check_context(ctx, "mt_comm_create_nccl", nccl, out));
    MT_TRY(mti_nccl_check_order(ctx));
    result = ncclCommCount(nccl, &size);
    if (result == ncclSuccess) result = ncclCommUserRank(nccl, &rank);
    if (result == ncclSuccess) result = ncclCommCuDevice(nccl, &device);
    if (result != ncclSuccess)
        return mt_fail(ctx, mti_nccl_status(result), "mt_comm_create_nccl: %s", mti_nccl_reason(result, nccl, reason));
    if (device != ctx->ordinal)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "mt_comm_create_nccl: the communicator is on GPU %d, the context on GPU %d", device,
                       ctx->ordinal);
    if (size == 1) return (*out = mti_comm_new(&mti_alone, 0, 1, "world")) != NULL ? MT_SUCCESS : MT_ERR_MEMORY;
    return mti_nccl_wrap(ctx, nccl, size, rank, timeout_s, out);
}
#else /* not built */
#if MT_HAS_CUDA
static void mti_nccl_launched(mt_context *ctx) { (void)ctx; }
static mt_status mti_nccl_wait(mt_context *ctx) { return (void)ctx, MT_SUCCESS; }
static void mti_nccl_close(mt_context *ctx) { (void)ctx; }
static void mti_nccl_forget(mt_context *ctx, const mt_comm *comm, const void *memory) {
    (void)ctx, (void)comm, (void)memory;
}
#endif
static mt_status mti_nccl_unbuilt(mt_context *ctx, const char *function, mt_comm **out) {
    if (out) *out = NULL;
    if (!ctx) return MT_ERR_ARGUMENT;
    return mt_fail(ctx, MT_ERR_UNSUPPORTED,
                   "%s: NCCL is not built into this program: compile the implementation with nvcc, as a .cu file, with "
                   "-DMT_USE_NCCL, and link with -lnccl",
                   function);
}
static mt_status mti_nccl_from_id(mt_context *ctx, const mt_nccl_id *id, int ranks, int rank, double timeout_s,
                                  mt_comm *twin, mt_comm **out) {
    return (void)id, (void)ranks, (void)rank, (void)timeout_s, mt_comm_destroy(twin),
           mti_nccl_unbuilt(ctx, "mt_comm_create_for", out);
}
MT_API mt_status mt_nccl_unique_id(mt_context *ctx, mt_nccl_id *out) {
    return (void)out, mti_nccl_unbuilt(ctx, "mt_nccl_unique_id", NULL);
}
MT_API mt_status mt_comm_create_nccl_id(mt_context *ctx, const mt_nccl_id *id, int ranks, int rank, double timeout_s,
                                        mt_comm **out) {
    return (void)id, (void)ranks, (void)rank, (void)timeout_s, mti_nccl_unbuilt(ctx, "mt_comm_create_nccl_id", out);
}
MT_API mt_status mt_comm_create_nccl(mt_context *ctx, struct ncclComm *nccl, double timeout_s, mt_comm **out) {
    return (void)nccl, (void)timeout_s, mti_nccl_unbuilt(ctx, "mt_comm_create_nccl", out);
}
#endif

/* -- from threads, or processes, to NCCL -- */

/* What each rank tells the others when threads, or processes over MPI, create a communicator over NCCL. `status` and
   `id` are those of mt_nccl_unique_id; only rank 0 calls it. */
typedef struct mti_peer {
    int device, ordinal;
    int shares; /* mti_nccl_may_share. That of rank 0 counts, because NCCL may read the variable from a file */
    mt_status status;
    mt_nccl_id id;
} mti_peer;

/* Exchanges the places of all ranks. *first: the place of rank 0; *fit_nccl: 1 when all contexts are on GPUs, and no
   two threads use the same GPU, unless NCCL lets them. Processes are not compared, because each may number the GPUs in
   its own way; NCCL detects a GPU that two of them use. */
static mt_status mti_gather_peers(mt_context *ctx, mt_comm *local, const mti_peer *mine, mti_peer *first,
                                  int *fit_nccl) {
    mti_call call;
    int r, other;
    memset(&call, 0, sizeof call);
    call.kind = MTI_CREATE;
    call.dtype = MT_U8;
    call.count = sizeof *mine;
    call.send = mine;
    MT_TRY((local->transport->enter)(ctx, local, &call));
    *fit_nccl = 1;
    for (r = 0; r < local->size; r++) {
        const mti_peer *p = (const mti_peer *)mti_slot_of(local->group, r)->send;
        if (r == 0) *first = *p;
        if (p->device != (int)MT_DEVICE_CUDA) *fit_nccl = 0;
        for (other = 0; other < r && local->transport->are_threads && !first->shares; other++)
            if (((const mti_peer *)mti_slot_of(local->group, other)->send)->ordinal == p->ordinal) *fit_nccl = 0;
    }
    (local->transport->exit)(local);
    return MT_SUCCESS;
}

/* For threads, and for processes over MPI. Leaves *out NULL when NCCL is not built, or fit_nccl is 0. */
static mt_status mti_group_over_nccl(mt_context *ctx, mt_comm *world, mt_comm **out) {
    mti_peer mine, first;
    mt_comm *twin = NULL;
    int fit_nccl = 0;
    if (!MTI_NCCL) return MT_SUCCESS;
    memset(&mine, 0, sizeof mine);
    mine.device = (int)ctx->device;
    mine.ordinal = ctx->ordinal;
    if (world->rank == 0 && ctx->device == MT_DEVICE_CUDA) mine.status = mt_nccl_unique_id(ctx, &mine.id);
    mine.shares = mti_nccl_may_share();
    MT_TRY(mti_gather_peers(ctx, world, &mine, &first, &fit_nccl));
    if (!fit_nccl) return MT_SUCCESS;
    if (first.status != MT_SUCCESS)
        return world->rank == 0 ? first.status
                                : mti_refuse(ctx, world, MT_ERR_PEER, "mt_comm_create_for: rank 0 has no id from NCCL");
    if (world->transport->are_threads) MT_TRY((world->transport->split)(world, 0, world->rank, &twin));
    return mti_nccl_from_id(ctx, &first.id, world->size, world->rank, world->group->timeout, twin, out);
}

/* For processes without MPI. Each rank makes the same id, from NCCL_COMM_ID in the environment. */
static mt_status mti_processes_over_nccl(mt_context *ctx, mt_comm *world, mt_comm **out) {
    mt_nccl_id id;
    if (!MTI_NCCL || ctx->device != MT_DEVICE_CUDA)
        return mti_refuse_apart(ctx, world, "comm_create_for", (int)ctx->device);
    if (!getenv("NCCL_COMM_ID"))
        return mti_refuse(
            ctx, world, MT_ERR_ARGUMENT,
            "mt_comm_create_for: the %d ranks of \"%s\" do not know where to meet: set NCCL_COMM_ID to "
            "host:port, or MASTER_ADDR and MASTER_PORT, the same on all of them, on the machine of rank 0",
            world->size, world->name);
    MT_TRY(mt_nccl_unique_id(ctx, &id));
    return mt_comm_create_nccl_id(ctx, &id, world->size, world->rank, world->timeout, out);
}

/* Creates a communicator over NCCL with the ranks of world. Leaves *out NULL where NCCL is not used. */
static mt_status mti_over_nccl_for(mt_context *ctx, mt_comm *world, mt_comm **out) {
    if (world->transport == &mti_alone) return MT_SUCCESS;
    if (world->transport == &mti_apart) return mti_processes_over_nccl(ctx, world, out);
    if (world->transport->enter) return mti_group_over_nccl(ctx, world, out);
    return mti_refuse(ctx, world, MT_ERR_ARGUMENT,
                      "mt_comm_create_for: \"%s\" is not a communicator of a launcher or of threads", world->name);
}

/* Without NCCL, *out is split from world with the same ranks. */
static mt_status mti_comm_create_for(mt_context *ctx, mt_comm *world, mt_comm **out) {
    if (!ctx || !world || !out)
        return mti_refuse(ctx, world, MT_ERR_ARGUMENT, "mt_comm_create_for: %s is NULL",
                          !ctx     ? "ctx"
                          : !world ? "world"
                                   : "out");
    MT_TRY(mti_check_process(ctx, world, "comm_create_for"));
    MT_TRY(mti_over_nccl_for(ctx, world, out));
    if (*out) mti_adopt(world, *out);
    else MT_TRY(mt_comm_split(world, 0, world->rank, out));
    mt_comm_set_name(*out, world->name);
    (*out)->is_named = world->is_named;
    return MT_SUCCESS;
}

MT_API mt_status mt_comm_create_for(mt_context *ctx, mt_comm *world, mt_comm **out) {
    int before = mti_hold();
    mt_status status;
    if (out) *out = NULL;
    status = mti_comm_create_for(ctx, world, out);
    mti_release(before);
    return status;
}

MT_API mt_status mt_comm_register(mt_context *ctx, mt_comm *comm, void *memory, size_t bytes) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!comm) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_comm_register: comm is NULL");
    MT_TRY(mti_check_process(ctx, comm, "comm_register"));
#if MTI_NCCL
    if (comm->transport == &mti_over_nccl) return mti_nccl_enlist(ctx, comm, memory, bytes);
#endif
    return (void)memory, (void)bytes, MT_SUCCESS;
}

MT_API mt_status mt_arena_register(mt_context *ctx, mt_comm *comm) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!comm) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_arena_register: comm is NULL");
    return ctx->arena_symmetric ? mt_comm_register(ctx, comm, ctx->arena, ctx->arena_bytes) : MT_SUCCESS;
}
