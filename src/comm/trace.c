/* ---- the trace of a step ----------------------------------------------------------------------------------------- */

#pragma once
#include "trace.h"
#include "threads.c"

MT_API void mt_trace_free(mt_trace *trace) {
    if (!trace) return;
    mt_host_free(trace->entries);
    memset(trace, 0, sizeof *trace);
}

MT_API mt_status mt_context_take_trace(mt_context *ctx, mt_trace *out) {
    int lost;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_context_take_trace: out is NULL");
    lost = ctx->trace_lost;
    *out = ctx->trace;
    memset(&ctx->trace, 0, sizeof ctx->trace);
    ctx->trace_capacity = 0;
    ctx->trace_lost = 0;
    if (!lost) return MT_SUCCESS;
    mt_trace_free(out);
    return mt_fail(ctx, MT_ERR_MEMORY, "mt_context_take_trace: there was no memory for an entry");
}

/* Doubles the capacity of the trace. Returns 0 when there is no memory. */
static int mti_trace_grow(mt_context *ctx) {
    size_t capacity = ctx->trace_capacity ? 2 * ctx->trace_capacity : 256;
    mt_trace_entry *entries = (mt_trace_entry *)mt_host_alloc(capacity * sizeof *entries);
    if (!entries) return 0;
    if (ctx->trace.count) memcpy(entries, ctx->trace.entries, ctx->trace.count * sizeof *entries);
    mt_host_free(ctx->trace.entries);
    ctx->trace.entries = entries;
    ctx->trace_capacity = capacity;
    return 1;
}

MT_API void mt_trace_add(mt_context *ctx, const mt_trace_entry *entry) {
    mt_trace_entry *added;
    if (!ctx || !entry || ctx->device != MT_DEVICE_META || ctx->trace_lost) return;
    if (ctx->trace.count == ctx->trace_capacity && !mti_trace_grow(ctx)) {
        ctx->trace_lost = 1;
        return;
    }
    added = &ctx->trace.entries[ctx->trace.count++];
    *added = *entry;
    added->recomputed = ctx->recomputes > 0;
}

MT_API void mt_trace_recompute(mt_context *ctx, int recomputes) {
    if (ctx) ctx->recomputes += recomputes ? 1 : -1;
}

static void mti_trace_call(mt_context *ctx, const mt_comm *comm, const mti_call *call, mt_collective kind,
                           size_t bytes) {
    mt_trace_entry e;
    if (!mti_has_no_data(ctx)) return;
    memset(&e, 0, sizeof e);
    e.work = MT_WORK_COMMUNICATION;
    e.name = mti_call_name(call->kind);
    e.dtype = call->dtype;
    e.bytes = (double)bytes;
    e.ranks = comm->size;
    e.span = comm->span;
    e.collective = kind;
    e.to = kind == MT_SEND || kind == MT_RECV ? call->root : -1;
    e.from = kind == MT_SEND || kind == MT_RECV ? call->source : -1;
    mt_trace_add(ctx, &e);
}

static void mti_trace_overlap(mt_context *ctx, mt_work work, const char *name, mt_stream stream, int ticket) {
    mt_trace_entry e;
    memset(&e, 0, sizeof e);
    e.work = work;
    e.name = name;
    e.stream = stream;
    e.ticket = ticket;
    mt_trace_add(ctx, &e);
}
