/* ---- f, g and their forms for sequence parallelism --------------------------------------------------------------- */

#pragma once
#include "conjugates.h"
#include "collectives.c"

static int mti_has_elements(mt_tensor t) { return t.data && t.rows > 0 && t.cols > 0; }

/* Refuses a tensor that has an unknown dtype or a negative size, is not contiguous, or has no data. */
static mt_status mti_check_view(mt_context *ctx, mt_comm *comm, const char *name, const char *what, mt_tensor t) {
    MT_TRY(mti_check_home(ctx, comm, name));
    if (mt_dtype_size(t.dtype) == 0)
        return mti_refuse(ctx, comm, MT_ERR_DTYPE, "mt_%s: %s.dtype is %d, must be " MTI_DTYPES, name, what,
                          (int)t.dtype);
    if (t.rows < 0 || t.cols < 0 || (t.cols > 0 && t.rows > INT64_MAX / 8 / t.cols))
        return mti_refuse(ctx, comm, MT_ERR_SHAPE, "mt_%s: %s is [%lld, %lld], which is not a valid shape", name, what,
                          (long long)t.rows, (long long)t.cols);
    if (mt_tensor_ld(t) != t.cols && t.rows > 1)
        return mti_refuse(ctx, comm, MT_ERR_SHAPE, "mt_%s: %s [%lld, %lld] must be contiguous, but its ld is %lld",
                          name, what, (long long)t.rows, (long long)t.cols, (long long)t.ld);
    if (!t.data && t.rows > 0 && t.cols > 0 && ctx->device != MT_DEVICE_META)
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_%s: the data of %s [%lld, %lld] is NULL", name, what,
                          (long long)t.rows, (long long)t.cols);
    if (mti_has_elements(t) && mt_context_has_address(ctx, t.data) && (uintptr_t)t.data % mt_dtype_size(t.dtype))
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT,
                          "mt_%s: the data of %s, %p, is not aligned to its %zu-byte elements", name, what, t.data,
                          mt_dtype_size(t.dtype));
    return MT_SUCCESS;
}

/* Checks x and y: one is the whole tensor, the other this rank's part of its rows or columns. */
static mt_status mti_check_views(mt_context *ctx, mt_comm *comm, const char *name, mt_tensor x, mt_tensor y,
                                 int x_is_whole, int by_rows) {
    mt_tensor whole = x_is_whole ? x : y, part = x_is_whole ? y : x;
    int64_t row_parts, col_parts;
    MT_TRY(mti_check_view(ctx, comm, name, "x", x));
    MT_TRY(mti_check_view(ctx, comm, name, "y", y));
    if (x.dtype != y.dtype)
        return mti_refuse(ctx, comm, MT_ERR_DTYPE, "mt_%s: x is %s, y is %s", name, mt_dtype_name(x.dtype),
                          mt_dtype_name(y.dtype));
    row_parts = by_rows ? comm->size : 1;
    col_parts = by_rows ? 1 : comm->size;
    if (whole.rows % row_parts || whole.cols % col_parts || whole.rows / row_parts != part.rows ||
        whole.cols / col_parts != part.cols)
        return mti_refuse(ctx, comm, MT_ERR_SHAPE,
                          "mt_%s: x [%lld, %lld] and y [%lld, %lld] do not fit: %s must be one of %d equal parts of "
                          "the %s of %s",
                          name, (long long)x.rows, (long long)x.cols, (long long)y.rows, (long long)y.cols,
                          x_is_whole ? "y" : "x", comm->size, by_rows ? "rows" : "columns", x_is_whole ? "x" : "y");
    return MT_SUCCESS;
}

static size_t mti_elements(mt_tensor t) { return (size_t)t.rows * (size_t)t.cols; }

/* Copies a matrix between two tensors with different leading dimensions: a view of columns and a contiguous part. */
static mt_status mti_copy_columns(mt_context *ctx, mt_tensor to, mt_tensor from) {
    size_t size = mt_dtype_size(to.dtype), bytes = (size_t)to.cols * size;
    int64_t r;
    if (ctx->device == MT_DEVICE_CUDA)
        return mt_cuda_copy_rows(ctx, to.data, (size_t)mt_tensor_ld(to) * size, from.data,
                                 (size_t)mt_tensor_ld(from) * size, bytes, to.rows);
    if (ctx->device == MT_DEVICE_META) return MT_SUCCESS;
    for (r = 0; bytes && r < to.rows; r++)
        MT_TRY(mti_bytes_copy(ctx, mt_tensor_rows(to, r, 1).data, mt_tensor_rows(from, r, 1).data, bytes));
    return MT_SUCCESS;
}

static mt_tensor mti_dense(mt_tensor t) {
    t.ld = t.cols; /* a tensor of one row may have any ld */
    return t;
}

/* Evaluates `call` without further rules, and returns its status. name: of the call, without mt_ */
#define MTI_WITHOUT_CHECKS(ctx, comm, name, call)                                                                      \
    do {                                                                                                               \
        MT_TRY(MTI_HOOK(ctx, passed(ctx, comm, name)));                                                                \
        mti_checks_pause(ctx);                                                                                         \
        return mti_checks_resume(ctx, call);                                                                           \
    } while (0)

/* Applies the rule of a region and, if it fits, evaluates `call`. */
#define MTI_REGION(ctx, comm, where, is, becomes, is_gradient, x_name, x, y, call)                                     \
    do {                                                                                                               \
        MT_TRY(MTI_HOOK(ctx, region(ctx, comm, where, is, becomes, is_gradient, x_name, x, y)));                       \
        MTI_WITHOUT_CHECKS(ctx, comm, &(where)[3], call);                                                              \
    } while (0)

static mt_status mti_region_reduce(mt_context *ctx, mt_comm *comm, const char *where, int is_gradient,
                                   const char *x_name, mt_tensor t) {
    MT_TRY(mti_check_view(ctx, comm, where + 3, "the tensor", t));
    MTI_REGION(ctx, comm, where, 'P', 'R', is_gradient, x_name, t, t,
               mt_all_reduce(ctx, comm, t.data, t.data, mti_elements(t), t.dtype, MT_SUM));
}

MT_API mt_status mt_copy_to_tensor_region_forward(mt_context *ctx, mt_comm *comm, mt_tensor x) {
    MT_TRY(mti_check_view(ctx, comm, "copy_to_tensor_region_forward", "x", x));
    return MTI_HOOK(
        ctx, region(ctx, comm, "mt_copy_to_tensor_region_forward", 'R', 'R', 0, "x", x, mt_tensor_rows(x, 0, 0)));
}

MT_API mt_status mt_copy_to_tensor_region_backward(mt_context *ctx, mt_comm *comm, mt_tensor dx) {
    return mti_region_reduce(ctx, comm, "mt_copy_to_tensor_region_backward", 1, "dx", dx);
}

MT_API mt_status mt_reduce_from_tensor_region_forward(mt_context *ctx, mt_comm *comm, mt_tensor y) {
    return mti_region_reduce(ctx, comm, "mt_reduce_from_tensor_region_forward", 0, "y", y);
}

MT_API mt_status mt_reduce_from_tensor_region_backward(mt_context *ctx, mt_comm *comm, mt_tensor dy) {
    MT_TRY(mti_check_view(ctx, comm, "reduce_from_tensor_region_backward", "dy", dy));
    return MTI_HOOK(ctx, region(ctx, comm, "mt_reduce_from_tensor_region_backward", 'R', 'R', 1, "dy", dy,
                                mt_tensor_rows(dy, 0, 0)));
}

MT_API mt_status mt_scatter_to_tensor_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    MT_TRY(mti_check_views(ctx, comm, "scatter_to_tensor_region", x, y, 1, 0));
    MTI_REGION(ctx, comm, "mt_scatter_to_tensor_region", 'R', 'c', 0, "x", x, y,
               mti_copy_columns(ctx, mti_dense(y), mt_tensor_cols(mti_dense(x), y.cols * comm->rank, y.cols)));
}

/* Gathers the parts of all ranks in the arena, one after the other, and copies each part to its columns of y. */
static mt_status mti_gather_columns(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    mt_tensor parts;
    int r;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.cols ? x.rows * comm->size : 0, x.cols, &parts));
    MT_TRY(mt_all_gather(ctx, comm, x.data, parts.data, mti_elements(x), x.dtype));
    for (r = 0; x.cols && r < comm->size; r++)
        MT_TRY(mti_copy_columns(ctx, mt_tensor_cols(y, x.cols * r, x.cols), mt_tensor_rows(parts, x.rows * r, x.rows)));
    return MT_SUCCESS;
}

static mt_status mti_gather_from_tensor_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    size_t mark;
    mt_status status;
    if (comm->size == 1) return mt_all_gather(ctx, comm, x.data, y.data, mti_elements(x), x.dtype);
    mark = mt_arena_mark(ctx);
    status = mti_gather_columns(ctx, comm, mti_dense(x), mti_dense(y));
    mt_arena_release(ctx, mark);
    return status;
}

MT_API mt_status mt_gather_from_tensor_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    MT_TRY(mti_check_views(ctx, comm, "gather_from_tensor_region", x, y, 0, 0));
    MTI_REGION(ctx, comm, "mt_gather_from_tensor_region", 'c', 'R', 0, "x", x, y,
               mti_gather_from_tensor_region(ctx, comm, x, y));
}

MT_API mt_status mt_scatter_to_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    mt_tensor mine;
    MT_TRY(mti_check_views(ctx, comm, "scatter_to_sequence_region", x, y, 1, 1));
    mine = mt_tensor_rows(mti_dense(x), y.rows * comm->rank, y.rows);
    MTI_REGION(ctx, comm, "mt_scatter_to_sequence_region", 'R', 'r', 0, "x", x, y,
               mti_bytes_copy(ctx, y.data, mine.data, mti_elements(y) * mt_dtype_size(y.dtype)));
}

MT_API mt_status mt_gather_from_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    MT_TRY(mti_check_views(ctx, comm, "gather_from_sequence_region", x, y, 0, 1));
    MTI_REGION(ctx, comm, "mt_gather_from_sequence_region", 'r', 'R', 0, "x", x, y,
               mt_all_gather(ctx, comm, x.data, y.data, mti_elements(x), x.dtype));
}

MT_API mt_status mt_reduce_scatter_to_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y) {
    MT_TRY(mti_check_views(ctx, comm, "reduce_scatter_to_sequence_region", x, y, 1, 1));
    MTI_REGION(ctx, comm, "mt_reduce_scatter_to_sequence_region", 'P', 'r', 0, "x", x, y,
               mt_reduce_scatter(ctx, comm, x.data, y.data, mti_elements(y), x.dtype, MT_SUM));
}

/* -- in chunks -- */

static mt_status mti_check_rows(mt_context *ctx, mt_comm *comm, const char *name, mt_tensor part, int64_t first,
                                int64_t rows) {
    if (first >= 0 && rows >= 0 && first <= part.rows && rows <= part.rows - first) return MT_SUCCESS;
    return mti_refuse(ctx, comm, MT_ERR_SHAPE, "mt_%s: rows [%lld, %lld + %lld) of %lld", name, (long long)first,
                      (long long)first, (long long)rows, (long long)part.rows);
}

static mt_status mti_check_ranks(mt_context *ctx, mt_comm *comm, const char *name, int first, int ranks) {
    if (first >= 0 && ranks > 0 && first <= comm->size - ranks) return MT_SUCCESS;
    return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_%s: ranks [%d, %d + %d) of %d", name, first, first, ranks,
                      comm->size);
}

/* A call on the blocks of ranks [first, first + ranks). A block has as many elements as `part`. */
static mti_call mti_ranks_call(const mt_comm *comm, int kind, mt_tensor send, mt_tensor recv, mt_tensor part, int first,
                               int ranks) {
    mti_call call = mti_call_make(kind, send.data, recv.data, mti_elements(part), part.dtype);
    call.first = first;
    call.ranks = ranks == comm->size ? 0 : ranks;
    call.goes_on = first > 0;
    return call;
}

MT_API mt_status mt_gather_ranks_from_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y,
                                                      int first, int ranks) {
    mti_call call;
    MT_TRY(mti_check_views(ctx, comm, "gather_ranks_from_sequence_region", x, y, 0, 1));
    MT_TRY(mti_check_ranks(ctx, comm, "gather_ranks_from_sequence_region", first, ranks));
    call = mti_ranks_call(comm, MT_ALL_GATHER, x, y, x, first, ranks);
    MT_TRY(MTI_HOOK(ctx, ranks(ctx, comm, 1, "mt_gather_ranks_from_sequence_region", x, y, first, ranks)));
    MTI_WITHOUT_CHECKS(ctx, comm, "gather_ranks_from_sequence_region",
                       MT_RANGE("all_gather", mti_run_collective(ctx, comm, &call)));
}

MT_API mt_status mt_reduce_scatter_ranks_to_sequence_region(mt_context *ctx, mt_comm *comm, mt_tensor x, mt_tensor y,
                                                            int first, int ranks) {
    mti_call call;
    MT_TRY(mti_check_views(ctx, comm, "reduce_scatter_ranks_to_sequence_region", x, y, 1, 1));
    MT_TRY(mti_check_ranks(ctx, comm, "reduce_scatter_ranks_to_sequence_region", first, ranks));
    call = mti_ranks_call(comm, MT_REDUCE_SCATTER, x, y, y, first, ranks);
    MT_TRY(MTI_HOOK(ctx, ranks(ctx, comm, 0, "mt_reduce_scatter_ranks_to_sequence_region", x, y, first, ranks)));
    MTI_WITHOUT_CHECKS(ctx, comm, "reduce_scatter_ranks_to_sequence_region",
                       MT_RANGE("reduce_scatter", mti_run_collective(ctx, comm, &call)));
}

MT_API mt_status mt_reduce_rows_from_tensor_region(mt_context *ctx, mt_comm *comm, mt_tensor y, int64_t first,
                                                   int64_t rows) {
    void *data;
    mti_call call;
    MT_TRY(mti_check_view(ctx, comm, "reduce_rows_from_tensor_region", "y", y));
    MT_TRY(mti_check_rows(ctx, comm, "reduce_rows_from_tensor_region", y, first, rows));
    data = mt_tensor_rows(mti_dense(y), first, rows).data;
    call = mti_call_make(MT_ALL_REDUCE, data, data, (size_t)(rows * y.cols), y.dtype);
    call.goes_on = first > 0;
    MTI_REGION(ctx, comm, "mt_reduce_rows_from_tensor_region", 'P', 'R', 0, "y", mt_tensor_rows(y, first, rows),
               mt_tensor_rows(y, first, rows), MT_RANGE("all_reduce", mti_run_collective(ctx, comm, &call)));
}

/* -- overlap with the computation -- */

MT_API mt_status mt_overlap_begin(mt_context *ctx, const mt_comm *comm, mt_stream stream) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!comm || ctx->stream != ctx->compute_stream || ctx->planned_stream != MT_STREAM_NONE)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_overlap_begin: %s",
                       comm ? "the last one has not ended" : "comm is NULL");
    if (stream < MT_STREAM_NONE || stream > MT_STREAM_THIRD)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "mt_overlap_begin: stream is %d, must be MT_STREAM_NONE, MT_STREAM_SECOND or MT_STREAM_THIRD",
                       (int)stream);
    if (ctx->device == MT_DEVICE_CPU || comm->size == 1 || ctx->invariant || stream == MT_STREAM_NONE)
        return MT_SUCCESS;
    if (ctx->device == MT_DEVICE_META) {
        ctx->planned_stream = stream;
        mti_trace_overlap(ctx, MT_WORK_OVERLAP_BEGIN, "overlap_begin", stream, 0);
        return MT_SUCCESS;
    }
    ctx->forked_ctas = comm->nccl.max_ctas;
    return mti_cuda_fork(ctx, stream == MT_STREAM_THIRD ? ctx->third_stream : ctx->second_stream);
}

MT_API mt_status mt_overlap_end(mt_context *ctx, int ticket, mt_status status) {
    int third, low, high;
    if (!ctx || (ctx->stream == ctx->compute_stream && ctx->planned_stream == MT_STREAM_NONE))
        return status; /* nothing overlaps */
    third = ctx->planned_stream ? ctx->planned_stream == MT_STREAM_THIRD : ctx->stream == ctx->third_stream;
    low = third ? MT_OVERLAP_TICKET_THIRD : 0;
    high = third ? MT_OVERLAP_TICKET_THIRD : MT_OVERLAP_TICKETS - 1;
    if (ticket < low || ticket > high) {
        MT_KEEP(status,
                mt_fail(ctx, MT_ERR_ARGUMENT, "mt_overlap_end: ticket is %d, must be %d to %d", ticket, low, high));
        ticket = low; /* the overlap ends in any case */
    }
    if (ctx->planned_stream) {
        mti_trace_overlap(ctx, MT_WORK_OVERLAP_END, "overlap_end", ctx->planned_stream, ticket);
        ctx->planned_stream = MT_STREAM_NONE;
        ctx->pending |= 1u << ticket;
        return status;
    }
    MT_KEEP(status, mti_cuda_fork_end(ctx, ticket));
    return status;
}

MT_API mt_status mt_overlap_wait(mt_context *ctx, int ticket) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (ticket < 0 || ticket > MT_OVERLAP_TICKET_THIRD || !(ctx->pending >> ticket & 1u)) return MT_SUCCESS;
    if (ctx->device != MT_DEVICE_META) return mti_cuda_join(ctx, ticket);
    mti_trace_overlap(ctx, MT_WORK_OVERLAP_WAIT, "overlap_wait", MT_STREAM_NONE, ticket);
    ctx->pending &= ~(1u << ticket);
    return MT_SUCCESS;
}

MT_API mt_status mt_overlap_wait_all(mt_context *ctx) {
    mt_status status = MT_SUCCESS;
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    for (i = 0; i < MT_OVERLAP_TICKETS; i++) MT_KEEP(status, mt_overlap_wait(ctx, i));
    return status;
}

MT_API int mt_overlap_multiprocessors(const mt_context *ctx) {
    int second = 0, third = 0, i;
    for (i = 0; ctx && i < MT_OVERLAP_TICKETS; i++)
        if (ctx->pending >> i & 1u && ctx->ticket_ctas[i] > second) second = ctx->ticket_ctas[i];
    if (ctx && ctx->pending >> MT_OVERLAP_TICKET_THIRD & 1u) third = ctx->ticket_ctas[MT_OVERLAP_TICKET_THIRD];
    return second + third;
}

MT_API int mt_overlap_is_planned(const mt_context *ctx) { return ctx && ctx->planned == MT_DEVICE_CUDA; }
