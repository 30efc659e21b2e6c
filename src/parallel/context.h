/* ---- attention over context ranks, for authors of blocks --------------------------------------------------------- */

#pragma once
#include "grid.h"
#include "../ops/attention.h"

/* With mt_context_desc.check 2, notes what the ranks of cp must have alike in a call of attention, for the next
   comparison (see mt_check_replica): the numbers of the two descs, lengths and cu_seqlens. The functions below call it.
   A block that calls them in a pause of check mode calls it before. */
MT_API mt_status mt_context_parallel_agree(mt_context *ctx, const mt_comm *cp, const mt_context_parallel_desc *context,
                                           const mt_attention_desc *desc);

/* As mt_dot_product_attention_forward and _backward, for sequences of which the ranks of cp have parts. desc is that of
   the whole sequences: its seq and kv_seq are whole, as are lengths, cu_seqlens, the bias and the element numbers of
   dropout, and desc->part must be zero. With t = batch * seq / n tokens on each of n ranks:
     q, out, dout, dq  [t, heads * head_dim]
     k, v, dk, dv      [batch * kv_seq / n, groups * head_dim], with whole_keys [batch * kv_seq, groups * head_dim]
     lse               [heads, t]
   The rows are in the order of mt_context_parallel_desc, which also says how keys and values travel. context NULL: all
   of its fields 0. Scores for keys of other ranks are merged in MT_F32 (mt_attention_merge). The caller sums
   desc->bias.grad over the ranks of cp.
   Communication over cp: MT_CP_P2P sends k and v n - 1 times in forward; in backward it also sends their gradients n
   times, in MT_F32. MT_CP_ALL_GATHER gathers k and v, and in backward reduce-scatters their gradients.
   Errors: those of mt_dot_product_attention_forward and of the collectives. MT_ERR_SHAPE: n > 1, and 2 n (with
   `contiguous` n) does not divide seq or kv_seq. MT_ERR_ARGUMENT: desc->part is not zero, or a field of *context is
   out of range. */
MT_API mt_status mt_context_parallel_attention_forward(mt_context *ctx, mt_comm *cp,
                                                       const mt_context_parallel_desc *context,
                                                       const mt_attention_desc *desc, mt_tensor q, mt_tensor k,
                                                       mt_tensor v, mt_tensor out, mt_tensor lse);
MT_API mt_status mt_context_parallel_attention_backward(mt_context *ctx, mt_comm *cp,
                                                        const mt_context_parallel_desc *context,
                                                        const mt_attention_desc *desc, mt_tensor q, mt_tensor k,
                                                        mt_tensor v, mt_tensor out, mt_tensor lse, mt_tensor dout,
                                                        mt_tensor dq, mt_tensor dk, mt_tensor dv);
