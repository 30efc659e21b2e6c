/* ---- the trace: what a step would do, on MT_DEVICE_META ---------------------------------------------------------- */

#pragma once
#include "ledger.h"

/* The streams of a context on a GPU. The layers overlap communication with computation in the second and the third, and
   mt_overlap_begin does so in a layer of your own. */
typedef enum mt_stream {
    MT_STREAM_NONE = 0, /* no overlap: the context's own stream */
    MT_STREAM_SECOND = 1,
    MT_STREAM_THIRD = 2
} mt_stream;

/* The kinds of work in a trace. They differ in what their time depends on. */
typedef enum mt_work {
    MT_WORK_MEMORY = 0,        /* an operator that mainly reads and writes memory: its bytes */
    MT_WORK_GEMM = 1,          /* a matrix product: its FLOPs and shape */
    MT_WORK_ATTENTION = 2,     /* scaled dot-product attention: its FLOPs */
    MT_WORK_OPTIMIZER = 3,     /* norm of the gradients and AdamW: its bytes */
    MT_WORK_COMMUNICATION = 4, /* a collective, a send or a receive: its bytes and group */
    MT_WORK_OVERLAP_BEGIN = 5, /* mt_overlap_begin, _end and _wait where they would overlap on a GPU */
    MT_WORK_OVERLAP_END = 6,
    MT_WORK_OVERLAP_WAIT = 7,
    MT_WORK_COUNT = 8
} mt_work;

/* One operator or communication. Fields that a kind of work does not have are 0. */
typedef struct mt_trace_entry {
    mt_work work;
    const char *name; /* of the function ("mt_gemm") or of the collective ("all_reduce"); must outlive the trace */
    mt_dtype dtype;   /* of the operands or of the buffer */
    /* Floating-point operations: two for each multiply-add of a product. Attention counts the scores that the mask and
       the window allow, for two products in forward and four in backward. That backward computes the scores again does
       not count. Key lengths and packed documents are data, so all keys count. */
    double flops;
    double bytes;    /* read plus written by an operator, without scratch memory; for communication as in mt_ledger */
    int64_t m, n, k; /* MT_WORK_GEMM: the product of an [m, k] and a [k, n] matrix */
    int recomputed;  /* 1: forward work that a backward does again, see mt_trace_recompute */
    int ranks, span; /* MT_WORK_COMMUNICATION: size of the group, and its span as in mt_comm_set_span */
    mt_collective collective;
    int to, from;     /* MT_SEND, MT_RECV: ranks of the group, -1: none. An mt_send_recv that sends is an MT_SEND */
    mt_stream stream; /* MT_WORK_OVERLAP_BEGIN: the stream of the entries until MT_WORK_OVERLAP_END */
    int ticket;       /* MT_WORK_OVERLAP_END, MT_WORK_OVERLAP_WAIT */
} mt_trace_entry;

typedef struct mt_trace {
    mt_trace_entry *entries; /* in the order of the calls */
    size_t count;
} mt_trace;

/* A context on MT_DEVICE_META appends an entry to its trace for each operator, and for each collective, send and
   receive in a group of more than one rank. Each chunk of a collective has an entry of its own. mt_context_take_trace
   moves the trace to *out, which the caller frees with mt_trace_free. The trace of the context is then empty. Before a
   step, take the trace and free it; after the step, take it again. On other devices *out is empty.
   Errors: MT_ERR_ARGUMENT; MT_ERR_MEMORY (there was no memory for an entry: *out is empty). */
MT_API mt_status mt_context_take_trace(mt_context *ctx, mt_trace *out);
MT_API void mt_trace_free(mt_trace *trace); /* NULL is allowed */
