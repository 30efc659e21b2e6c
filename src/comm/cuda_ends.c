/* ---- waits before memory of a GPU is freed ----------------------------------------------------------------------- */

#pragma once
#include "threads.c"

#if MT_HAS_CUDA
#define MTI_CUDA_PATIENCE 2.0 /* seconds in which a stream ends behind a collective that has failed */

/* Waits until the stream is empty. Returns 0 when it is not in time. */
static int mti_cuda_ends(struct CUstream_st *stream, double seconds) {
    mti_stopwatch watch = mti_stopwatch_start(seconds);
    double waited;
    while (cudaStreamQuery(stream) == cudaErrorNotReady) {
        waited = mti_waited(&watch);
        if (waited >= seconds) return cudaGetLastError(), 0;
        mti_rest(waited, 1e-3);
    }
    cudaGetLastError(); /* clears cudaErrorNotReady, or an error of the stream, which has ended */
    return 1;
}

/* Whether a collective has failed whose kernel may still be in a stream. */
static int mti_cuda_has_failed(const mt_context *ctx) {
    const mt_comm *comm = ctx->nccl;
    while (comm && !(comm->nccl.busy && comm->nccl.broken)) comm = comm->nccl.next;
    return comm != NULL;
}

/* Waits for all streams: as any other call, or, after a collective has failed, for `patience` seconds each. CUDA would
   wait without a timeout when memory is freed. Returns 0 when a stream does not end: then nothing that it may use can
   be freed. */
static int mti_cuda_quiet(mt_context *ctx, double patience) {
    struct CUstream_st *streams[3], *before = ctx->stream;
    int failed = ctx->stuck || mti_cuda_has_failed(ctx), i;
    if (ctx->recording) return 1;    /* what the host then frees is the program's to know */
    streams[0] = ctx->second_stream; /* before the compute stream, which may wait for it */
    streams[1] = ctx->third_stream;
    streams[2] = ctx->compute_stream;
    for (i = 0, ctx->stuck = 0; i < 3 && !ctx->stuck; i++) {
        ctx->stream = streams[i];
        if (!ctx->stream || (!failed && mti_cuda_synchronize(ctx) == MT_SUCCESS)) continue;
        failed = 1;
        ctx->stuck = !mti_cuda_ends(ctx->stream, patience);
    }
    ctx->stream = before;
    return !ctx->stuck;
}

/* Waits for all streams, and detaches the communicators over NCCL from the context. */
static void mti_cuda_idle(mt_context *ctx) {
    if (cudaSetDevice(ctx->ordinal) != cudaSuccess) { /* no such GPU: mti_cuda_open has failed with a message */
        cudaGetLastError();
        return;
    }
    mti_cuda_drop(ctx); /* the program has failed before mt_graph_end */
    mti_graph_forget(ctx);
    ctx->stream = ctx->compute_stream;
    mti_cuda_quiet(ctx, MTI_CUDA_PATIENCE);
    mti_nccl_close(ctx);
}

/* Prepares to free ptr: waits for the streams, and deregisters the memory from NCCL. Returns 0 when the memory must
   stay. */
static int mti_cuda_forget(mt_context *ctx, const void *ptr) {
    if (mti_cuda_quiet(ctx, ctx->stuck ? 0 : MTI_CUDA_PATIENCE)) {
        mti_nccl_forget(ctx, NULL, ptr);
        return 1;
    }
    mt_log(ctx, MT_LOG_WARNING,
           "memory of the GPU is not freed: a stream that may use it does not end. Has your ncclComm_t been aborted?");
    return 0;
}
#else
static int mti_cuda_forget(mt_context *ctx, const void *ptr) { return (void)ctx, (void)ptr, 1; }
static void mti_cuda_idle(mt_context *ctx) { (void)ctx; }
#endif
