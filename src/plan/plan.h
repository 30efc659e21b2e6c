/* ---- the time of a step on a machine that you do not have -------------------------------------------------------- */

#pragma once
#include "../comm/trace.h"

/* A machine has the rates that determine the time of the entries of a trace (mt_trace in mt_comm.h). It is read from a
   text. Each line has a key and its values; # begins a comment. Rates are per second. They are those of one rank,
   except `network`, which is that of a node.
       name       TEXT                  to show
       gemm       TYPE M N K FLOPS      the product of an [M, K] and a [K, N] matrix
       gemm       TYPE * * * FLOPS      products of every shape, used if no line with a shape has their type
       attention  NAME TYPE FLOPS
       memory     NAME TYPE BYTES       operators that read and write memory, and the optimizer
       operator   SECONDS               is added to the time of each operator, for its launch; without this line 0
       node       RANKS                 ranks in a node, which have consecutive numbers; without this line 1
       link       BYTES SECONDS         between ranks of a node: bytes each way, and latency
       network    BYTES SECONDS         between nodes: bytes each way of a whole node, and latency
       overlap    0 or 1                0: mt_overlap_begin overlaps nothing; without this line 1
       peak       TYPE FLOPS            for mt_machine_peak
       capacity   BYTES                 memory of a rank, for mt_machine_capacity
   TYPE is f32, bf16, f16 or *, which means any type; integers count as f32. NAME is the name of an operator in the
   trace, such as mt_norm_forward, or *, which means any. When several lines fit, the one that names the operator
   counts. When several of these are left, the one that names the type counts, and of equal lines the last one.

   An entry takes this time, where n ranks communicate B bytes (as in mt_ledger) with bandwidth W and latency L:
       product                     FLOPs / rate; if no line has its shape, at least bytes / rate of memory
       attention                   FLOPs / rate, at least bytes / rate of memory
       other operators             bytes / rate
       all_reduce                  2 (n - 1) / n B / W + 2 L ceil(log2 n)
       all_gather, reduce_scatter  (n - 1) / n B / W + L ceil(log2 n)
       all_to_all, all_to_all_v    (n - 1) / n B / W + L in a node; otherwise the larger one of (q - 1) / n B / W for
                                   the link and (n - q) / n B RANKS / W for the network, plus L of the network
       broadcast, barrier          B / W + L ceil(log2 n)
       send, recv                  B / W + L
   A shape without a line gets its rate from the lines that have shapes and its type: the logarithm of the rate is their
   mean, in which a line of the shape M', N', K' weighs 1 / d^4, where d^2 is the sum of the squares of ln(M / M'),
   ln(N / N') and ln(K / K').
   A group is inside a node if its span (mt_comm_set_span) is less than RANKS. W and L are then those of the link. For
   other groups L is that of the network, and W is that of the link or, if this is less, q / RANKS of the network. Here
   q is the number of ranks that the group has in a node. The other ranks of the node use the rest of the network. */
typedef struct mt_machine mt_machine;

/* Reads a machine from a file; the caller destroys *out. A text has at most 1 MiB. Errors: MT_ERR_ARGUMENT, MT_ERR_DATA
   (the message names the line), MT_ERR_IO, MT_ERR_MEMORY. */
MT_API mt_status mt_machine_read(mt_context *ctx, const char *path, mt_machine **out);
MT_API void mt_machine_destroy(mt_machine *machine); /* NULL is allowed */

/* Where the time of a rank goes in one step, in seconds. The parts from gemm to bubble add up to `seconds`. */
typedef struct mt_step_time {
    double seconds; /* of the step: the same for all stages */
    double gemm, attention, memory, optimizer;
    double communication; /* in which the rank only communicates, or waits for work in another stream */
    double bubble;        /* in which the rank waits for other stages */
    double overlapped;    /* of work in other streams, for which the rank did not wait; not a part of `seconds` */
    /* FLOPs of products and attention that the rank computes, with padding of heads, ffn and vocabulary and with copies
       of key/value heads. `flops` is without recomputation, `recomputed` is the recomputation alone. For the
       utilization of a model (MFU) take mt_gpt_flops or mt_bert_flops of megatron.h, which count the model alone. */
    double flops, recomputed;
} mt_step_time;

/* Predicts the time of one step. traces[s] is the trace of a rank of pipeline stage s, for `stages` stages. Without a
   pipeline there is one trace. out has `stages` elements: out[s] is the time of that rank. Stages wait for each other
   in messages and in collectives that have ranks of several stages. Not predicted: reading data, waits of the host,
   ranks that are slower than others, and two streams that share a network. ctx may be any context; it gets the message
   of an error. After an error, *out is undefined. Errors: MT_ERR_DATA (the machine has no rate for an entry),
   MT_ERR_ARGUMENT (also: an entry is not valid; a stage waits for a message or a collective in which other stages do
   not take part), MT_ERR_MEMORY. */
MT_API mt_status mt_plan_step(mt_context *ctx, const mt_machine *machine, const mt_trace *traces, int stages,
                              mt_step_time *out);
