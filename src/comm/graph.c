/* ---- CUDA graphs ------------------------------------------------------------------------------------------------- */

#pragma once
#include "graph.h"
#include "nccl.c"

struct mt_graph {
    mt_graph *next;             /* in the list mt_context.graphs */
    mt_comm *comm;              /* the ranks that launch together; NULL: this rank alone */
    uint64_t number;            /* of the graph, among those that comm has recorded */
    struct CUgraphExec_st *run; /* NULL: rank 0 of comm has it, the device is MT_DEVICE_META, or the graph is lost */
    int lost;                   /* 1: a communicator that the graph may use has failed or has been destroyed */
};

/* Returns the communicator whose ranks record one graph together; NULL: this rank records alone. */
static mt_comm *mti_graph_recorders(const mt_context *ctx, mt_comm *comm) {
    int together = ctx->device == MT_DEVICE_CUDA && comm && comm->size > 1 && comm->transport->are_threads;
    return together ? comm : NULL;
}

#if MT_HAS_CUDA
static mt_status mti_cuda_capture(mt_context *ctx) {
    MT_TRY(mt_cuda_enter(ctx));
    MT_CUDA_TRY(ctx, cudaStreamBeginCapture(ctx->stream, cudaStreamCaptureModeThreadLocal));
    ctx->captures = 1;
    if (ctx->turns) __atomic_store_n(&ctx->turns->captured, 1, __ATOMIC_RELEASE);
    return MT_SUCCESS;
}

static void mti_cuda_captured(mt_context *ctx) {
    ctx->captures = 0;
    if (ctx->turns) __atomic_store_n(&ctx->turns->captured, 0, __ATOMIC_RELEASE);
}

/* Ends a capture that has not ended, and discards it. Of the ranks that record together only rank 0 can do this; CUDA
   then reports that streams have not been joined. */
static void mti_cuda_drop(mt_context *ctx) {
    mti_group *g = ctx->turns;
    cudaGraph_t graph = NULL;
    if (!ctx->captures) return;
    if (g && !ctx->has_turn) ctx->has_turn = mti_flag_wait(g, &g->turn, 1);
    if (cudaStreamEndCapture(ctx->compute_stream, &graph) != cudaSuccess) cudaGetLastError();
    if (graph) cudaGraphDestroy(graph);
    mti_cuda_captured(ctx);
}

/* After a recording of several ranks that has failed: waits until rank 0 has ended the capture, because this rank's
   stream is captured until then. The rank does not wait before it needs its stream, so that it can first leave groups
   in which rank 0 may wait for it. */
static void mti_graph_await_end(mt_context *ctx) {
    if (!ctx->turns || ctx->recording) return;
    mti_flag_wait(ctx->turns, &ctx->turns->captured, 0);
    mti_group_release(ctx->turns);
    ctx->turns = NULL;
}

/* Ends the capture of this rank's stream, and makes a graph that can run. */
static mt_status mti_cuda_capture_end(mt_context *ctx, struct CUgraphExec_st **run) {
    cudaGraph_t graph = NULL;
    mt_status status;
    MT_TRY(mt_cuda_enter(ctx));
    status = mti_cuda_check(ctx, cudaStreamEndCapture(ctx->stream, &graph), "cudaStreamEndCapture");
    mti_cuda_captured(ctx);
    if (status == MT_SUCCESS)
        status = mti_cuda_check(ctx, cudaGraphInstantiateWithFlags(run, graph, 0), "cudaGraphInstantiateWithFlags");
    if (graph) cudaGraphDestroy(graph);
    return status;
}

#if MTI_NCCL
/* Makes all graphs of a context unusable, because a communicator is about to end. A graph that runs is freed when it
   has ended ("cudaGraphExecDestroy", CUDA Runtime API). */
static void mti_graphs_lose(mt_context *ctx) {
    mt_graph *graph;
    mti_cuda_drop(ctx);
    for (graph = ctx->graphs; graph; graph = graph->next) {
        if (graph->run && cudaGraphExecDestroy(graph->run) != cudaSuccess) cudaGetLastError();
        graph->run = NULL;
        graph->lost = 1;
    }
}
#endif

static mt_status mti_cuda_graph_launch(mt_context *ctx, const mti_call *call) {
    MT_TRY(mt_cuda_enter(ctx));
    MT_CUDA_TRY(ctx, cudaGraphLaunch(call->run, ctx->stream));
    mti_nccl_launched(ctx);
    return MT_SUCCESS;
}

static void mti_cuda_graph_destroy(mt_context *ctx, mt_graph *graph) {
    if (mti_has_no_gpu(ctx) || !mti_cuda_quiet(ctx, ctx->stuck ? 0 : MTI_CUDA_PATIENCE)) return;
    if (graph->run && cudaGraphExecDestroy(graph->run) != cudaSuccess) cudaGetLastError();
}
#else
static mt_status mti_cuda_capture(mt_context *ctx) { return (void)ctx, MT_ERR_UNSUPPORTED; }
static void mti_cuda_drop(mt_context *ctx) { (void)ctx; }
static void mti_graph_await_end(mt_context *ctx) { (void)ctx; }
static mt_status mti_cuda_capture_end(mt_context *ctx, struct CUgraphExec_st **run) {
    return (void)ctx, (void)run, MT_ERR_UNSUPPORTED;
}
static mt_status mti_cuda_graph_launch(mt_context *ctx, const mti_call *call) {
    return (void)ctx, (void)call, MT_ERR_UNSUPPORTED;
}
static void mti_cuda_graph_destroy(mt_context *ctx, mt_graph *graph) { (void)ctx, (void)graph; }
#endif

/* After a recording has ended or failed. */
static void mti_graph_forget(mt_context *ctx) {
    mti_turn_give(ctx);
    ctx->recorders = NULL;
    ctx->recording = 0;
    if (ctx->turns && !__atomic_load_n(&ctx->turns->captured, __ATOMIC_ACQUIRE)) mti_graph_await_end(ctx);
}

/* Rank 0's part of mt_graph_begin of several ranks: begins the capture of its stream. */
static mt_status mti_graph_first(mt_context *ctx, mt_comm *comm) {
    MT_TRY(mti_turn_take(ctx));
    MT_TRY(mti_cuda_capture(ctx));
    return mti_cuda_record(ctx, &mti_slot_of(comm->group, 0)->done);
}

/* The part of the other ranks: their streams join the capture by the event of rank 0. */
static mt_status mti_graph_join(mt_context *ctx, mt_comm *comm) {
    const mti_slot *first = mti_slot_of(comm->group, 0);
    if (comm->rank == 0 || first->failed) return MT_SUCCESS;
    MT_TRY(mti_turn_take(ctx));
    return mti_cuda_await(ctx, &first->done);
}

/* Rank 0's part of mt_graph_end of several ranks: its stream comes after the streams of all ranks. */
static mt_status mti_graph_close(mt_context *ctx, mt_comm *comm, int discards, struct CUgraphExec_st **run) {
    mt_status status = MT_SUCCESS;
    int r;
    for (r = 1; r < comm->size; r++) {
        const mti_slot *slot = mti_slot_of(comm->group, r);
        discards |= slot->failed;
        if (!slot->failed) MT_KEEP(status, mti_cuda_await(ctx, &slot->done));
    }
    if (!discards && status == MT_SUCCESS) return mti_cuda_capture_end(ctx, run);
    mti_cuda_drop(ctx);
    return status;
}

/* After the second meeting: all ranks fail when one has. status: of this rank */
static mt_status mti_graph_all(mt_context *ctx, mt_comm *comm, const mti_call *call, mt_status status) {
    int r;
    for (r = 0; r < comm->size && status == MT_SUCCESS; r++)
        if (mti_slot_of(comm->group, r)->failed)
            status =
                mti_refuse(ctx, comm, MT_ERR_PEER, "%s on \"%s\" (%d ranks): rank %d has failed, or discards the graph",
                           mti_call_name(call->kind), comm->name, comm->size, r);
    mti_meet(comm); /* `failed` may change now */
    return status;
}

/* A capture begins only after the first meeting: before, a rank may still put events of the last collective into its
   stream. */
static mt_status mti_graph_begin_all(mt_context *ctx, mt_comm *comm) {
    mti_call call = mti_call_make(MTI_GRAPH_BEGIN, NULL, NULL, 0, MT_U8);
    mti_slot *mine = mti_slot_of(comm->group, comm->rank);
    mt_status status = MT_SUCCESS;
    MT_TRY(mti_enter(ctx, comm, &call));
    if (comm->rank == 0) status = mti_graph_first(ctx, comm);
    mine->failed = status != MT_SUCCESS;
    mti_turn_give(ctx);
    mti_meet(comm);
    if (status == MT_SUCCESS) status = mti_graph_join(ctx, comm);
    if (comm->rank != 0) mine->failed = status != MT_SUCCESS; /* the others read that of rank 0 now */
    mti_turn_give(ctx);
    mti_exit(comm);
    MT_TRY(mti_graph_all(ctx, comm, &call, status));
    status = mti_turn_take(ctx);
    return status != MT_SUCCESS ? mti_break_failed(ctx, comm, &call, status) : MT_SUCCESS;
}

/* run NULL: this rank discards the graph. */
static mt_status mti_graph_end_all(mt_context *ctx, mt_comm *comm, struct CUgraphExec_st **run) {
    mti_call call = mti_call_make(MTI_GRAPH_END, NULL, NULL, 0, MT_U8);
    mti_slot *mine = mti_slot_of(comm->group, comm->rank);
    mt_status status;
    MT_TRY(mti_enter(ctx, comm, &call));
    status = mti_turn_take(ctx);
    if (status == MT_SUCCESS) status = mti_cuda_record(ctx, &mine->done);
    mine->failed = !run || status != MT_SUCCESS;
    mti_turn_give(ctx);
    mti_meet(comm);
    if (comm->rank == 0) {
        MT_KEEP(status, mti_graph_close(ctx, comm, mine->failed, run));
        mine->failed |= status != MT_SUCCESS;
    }
    mti_exit(comm);
    if (!run && status == MT_SUCCESS) return mti_meet(comm), MT_SUCCESS;
    return mti_graph_all(ctx, comm, &call, status);
}

static mt_status mti_graph_check(mt_context *ctx, const char *function, int recording) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (ctx->device == MT_DEVICE_CPU)
        return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: the context is on MT_DEVICE_CPU; only MT_DEVICE_CUDA has graphs",
                       function);
    MT_TRY(mti_check_gpu(ctx));
    if (ctx->recording != recording)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the context %s", function,
                       recording ? "does not record: call mt_graph_begin before" : "records already");
    if (ctx->stream != ctx->compute_stream || ctx->planned_stream != MT_STREAM_NONE)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the last mt_overlap_begin has no mt_overlap_end", function);
    return MT_SUCCESS;
}

/* Calls the function of mt_context_set_graph_border. Later work in the compute stream comes after all overlaps. */
static mt_status mti_graph_settle(mt_context *ctx) {
    mt_status status = ctx->border ? ctx->border(ctx) : MT_SUCCESS;
    MT_KEEP(status, mt_overlap_wait_all(ctx));
    MT_KEEP(status, mt_overlap_wait(ctx, MT_OVERLAP_TICKET_THIRD));
    return status;
}

static mt_status mti_graph_begin(mt_context *ctx, mt_comm *comm) {
    mt_comm *recorders = mti_graph_recorders(ctx, comm);
    mt_status status = MT_SUCCESS;
    if (recorders && ctx->nccl)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "mt_graph_begin: \"%s\" is not over NCCL, but the context has communicators over NCCL: pass one "
                       "of them, or NULL",
                       comm->name);
    MT_TRY(mti_graph_settle(ctx));
    mti_graph_await_end(ctx);
    ctx->recorders = recorders;
    if (recorders) recorders->graphs++;
    ctx->turns = ctx->recorders ? comm->group : NULL;
    if (ctx->turns) __atomic_add_fetch(&ctx->turns->references, 1, __ATOMIC_RELAXED);
    ctx->recording = 1;
    if (ctx->recorders) status = mti_graph_begin_all(ctx, comm);
    else if (ctx->device == MT_DEVICE_CUDA) status = mti_cuda_capture(ctx);
    if (status == MT_SUCCESS) return MT_SUCCESS;
    mti_cuda_drop(ctx);
    mti_graph_forget(ctx);
    return status;
}

MT_API mt_status mt_graph_begin(mt_context *ctx, mt_comm *comm) {
    int before = mti_hold();
    mt_status status = mti_graph_check(ctx, "mt_graph_begin", 0);
    if (status == MT_SUCCESS) status = mti_graph_begin(ctx, comm);
    mti_release(before);
    return status;
}

static mt_status mti_graph_is_lost(mt_context *ctx, const char *function) {
    return mt_fail(ctx, MT_ERR_PEER, "%s: a communicator has failed or has been destroyed since the graph was recorded",
                   function);
}

static mt_status mti_graph_end(mt_context *ctx, mt_graph **out) {
    mt_graph *graph = out ? (mt_graph *)mt_host_alloc(sizeof *graph) : NULL;
    mt_status status = MT_SUCCESS, settled = mti_graph_settle(ctx);
    int wanted = graph && settled == MT_SUCCESS;
    if (graph) graph->comm = ctx->recorders;
    if (graph && graph->comm) graph->number = graph->comm->graphs;
    if (ctx->recorders) status = mti_graph_end_all(ctx, ctx->recorders, wanted ? &graph->run : NULL);
    else if (ctx->device == MT_DEVICE_CUDA && wanted)
        status = ctx->captures ? mti_cuda_capture_end(ctx, &graph->run) : mti_graph_is_lost(ctx, "mt_graph_end");
    mti_cuda_drop(ctx); /* does nothing when the capture has ended */
    mti_graph_forget(ctx);
    if (out && !graph) status = mt_fail(ctx, MT_ERR_MEMORY, "mt_graph_end: no memory for the graph");
    MT_KEEP(status, settled);
    if (status != MT_SUCCESS || !graph) {
        mt_host_free(graph);
        return status;
    }
    graph->next = ctx->graphs;
    ctx->graphs = *out = graph;
    return MT_SUCCESS;
}

MT_API mt_status mt_graph_end(mt_context *ctx, mt_graph **out) {
    int before = mti_hold();
    mt_status status = mti_graph_check(ctx, "mt_graph_end", 1);
    if (out) *out = NULL;
    if (status == MT_SUCCESS) status = mti_graph_end(ctx, out);
    mti_release(before);
    return status;
}

static mt_status mti_graph_launch(mt_context *ctx, const mt_graph *graph) {
    mti_call call = mti_call_make(MTI_GRAPH_LAUNCH, NULL, NULL, graph->number, MT_U8);
    call.run = graph->run;
    if (graph->lost) return mti_graph_is_lost(ctx, "mt_graph_launch");
    MT_TRY(mti_graph_settle(ctx));
    if (graph->comm) return mti_local_collective(ctx, graph->comm, &call);
    if (!graph->run) return MT_SUCCESS; /* MT_DEVICE_META */
    return mti_cuda_graph_launch(ctx, &call);
}

MT_API mt_status mt_graph_launch(mt_context *ctx, mt_graph *graph) {
    int before = mti_hold();
    mt_status status = mti_graph_check(ctx, "mt_graph_launch", 0);
    if (status == MT_SUCCESS && !graph) status = mt_fail(ctx, MT_ERR_ARGUMENT, "mt_graph_launch: graph is NULL");
    if (status == MT_SUCCESS) status = MT_RANGE("graph", mti_graph_launch(ctx, graph));
    mti_release(before);
    return status;
}

MT_API void mt_graph_destroy(mt_context *ctx, mt_graph *graph) {
    mt_graph **at;
    if (!ctx || !graph) return;
    if (ctx->device == MT_DEVICE_CUDA) mti_cuda_graph_destroy(ctx, graph);
    for (at = &ctx->graphs; *at && *at != graph;) at = &(*at)->next;
    if (*at) *at = graph->next;
    mt_host_free(graph);
}
