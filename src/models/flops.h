/* ---- FLOPs of a model -------------------------------------------------------------------------------------------- */

#pragma once
#include "gpt.h"
#include "bert.h"

/* Returns the floating-point operations of the model in one training step of `sequences` sequences with seq tokens:
   forward and backward of its products and of attention, counted as in a trace (mt_trace_entry.flops). They are those
   of the model alone. Padding of heads, ffn and vocabulary, copies of key/value heads and recomputation do not count,
   so the number depends neither on the split nor on padded_vocab and recompute. Divided by the seconds of a step, the
   number of ranks and the peak FLOP/s of a rank, it is the model FLOPs utilization (MFU) of arXiv 2204.02311, appendix
   B. The formula there also counts scores that mask and window exclude, so it gives more. Returns 0 when desc is NULL,
   or when heads, sequences or seq is below 1. */
MT_API double mt_gpt_flops(const mt_gpt_desc *desc, int64_t sequences, int64_t seq);
MT_API double mt_bert_flops(const mt_bert_desc *desc, int64_t sequences, int64_t seq);
