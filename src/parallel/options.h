/* ---- options of the layers --------------------------------------------------------------------------------------- */

#pragma once
#include "grid.h"
#include "../comm/overlap.h"

/* Kinds of communication that overlap with computation on MT_DEVICE_CUDA. Layers communicate on a second stream, and
   parameter gradients are summed on a third stream. By default all kinds overlap; a bit in
   mt_parallel_options.no_overlap turns one kind off. The results have the same bits either way. In invariant mode and
   on other devices nothing overlaps. */
typedef enum mt_overlap {
    /* column-parallel backward: the input gradient is reduced while weight gradients are computed: that of the layer
       and, in a block without sequence parallelism, that of the row-parallel layer behind it (fc2, proj). With
       sequence parallelism, x is also gathered while the input gradient is computed */
    MT_OVERLAP_COLUMN_BACKWARD = 1,
    /* row-parallel forward: a chunk of tokens is reduced while the next chunk is multiplied */
    MT_OVERLAP_ROW_FORWARD = 2,
    /* sequence parallelism: a chunk of tokens is gathered while the chunk before it is multiplied */
    MT_OVERLAP_ALL_GATHER = 4,
    /* gradients that are final are summed over the data group while the backward goes on, see
       mt_sync_gradients_begin */
    MT_OVERLAP_GRADIENTS = 8,
    MT_OVERLAP_ALL = 15
} mt_overlap;

#define MT_OVERLAP_CHUNKS_MAX MT_OVERLAP_TICKETS /* 8 */

/* Options of the layers of a context. Zero-initialised means the defaults. */
typedef struct mt_parallel_options {
    int no_overlap; /* bits of mt_overlap: the kinds that do not overlap on MT_DEVICE_CUDA; 0: all overlap */
    /* number of chunks into which a layer cuts the tokens that it communicates, at most MT_OVERLAP_CHUNKS_MAX. With
       sequence parallelism a chunk has all tokens of some ranks, so there are at most t chunks. Each chunk is a
       separate GEMM, also when nothing overlaps. Invariant mode always uses one chunk. 0: on MT_DEVICE_CUDA one chunk
       for each 1024 tokens, at most 4, or 2 with sequence parallelism; on other devices one chunk */
    int overlap_chunks;
    /* 1: a transformer layer works on two halves of a batch in turn, so that the reduction of one half overlaps with
       the computation of the other (Domino, arXiv 2409.15241). Outputs and gradients have the bits of two
       micro-batches with overlap_chunks 1: the first sequences / 2 sequences, and the others. overlap_chunks has no
       effect on these layers. Nothing overlaps on MT_DEVICE_CPU, or with the bits MT_OVERLAP_ROW_FORWARD and
       MT_OVERLAP_COLUMN_BACKWARD in no_overlap. The option itself has no effect in a tensor group of one, with sequence
       parallelism, in invariant mode, with a key/value cache, and for a batch of one sequence or with cu_seqlens. 0: a
       layer works on the whole batch */
    int interleave;
    /* On several context ranks (mt_grid_desc.cp): how keys and values travel, and which tokens a rank has. In invariant
       mode `invariant` also acts on one. Attention reads it when it is created, and mt_params_init does: set it before
       the first layer. `invariant` cannot change after mt_params_init (MT_ERR_ARGUMENT). With whole_keys the memory of
       cross-attention is whole on each context rank; self-attention does not read whole_keys */
    mt_context_parallel_desc context;
} mt_parallel_options;

/* mt_parallel_set_options sets the options of the layers of ctx; options NULL: the defaults. Do not call it between a
   forward and its backward. All ranks of a tensor group need the same options, because they decide how many collectives
   there are. mt_parallel_get_options returns the options, or the defaults when none were set.
   Errors: MT_ERR_ARGUMENT (a value is out of range), MT_ERR_MEMORY. */
MT_API mt_status mt_parallel_set_options(mt_context *ctx, const mt_parallel_options *options);
MT_API mt_parallel_options mt_parallel_get_options(const mt_context *ctx);
