/* ---- gradients --------------------------------------------------------------------------------------------------- */

#pragma once
#include "params.h"

/* In invariant mode, adds up the gradients of the micro-batches of a step in a binary tree. When this rank has several
   micro-batches in a step, call it after the backward of each of them, including the last. For a single micro-batch the
   call is optional. Outside invariant mode it does nothing, because backward already adds to the gradients. Read
   param->grad only after mt_sync_gradients. For the tree the registry keeps log2(V_d / data ranks) further copies of
   the gradients.
   A call that is missing between two micro-batches makes the backward of the second MT_ERR_ARGUMENT, in mt_pipeline_run
   and, when mt_batch.first_sequence differs, in mt_gpt_backward and mt_bert_backward. When it is missing after the last
   of several, mt_sync_gradients is MT_ERR_ARGUMENT. A loop around other layers that never calls it is not found,
   because a layer may be used twice in one micro-batch.
   MT_ERR_SHAPE: this rank has more than V_d / data ranks micro-batches. MT_ERR_ARGUMENT: the gradients are synchronised
   or used already. */
MT_API mt_status mt_accumulate_gradients(mt_context *ctx, mt_params *params);

/* Sums the gradients over ranks. Call it after the last backward of a step. First it sums sequence_partial gradients
   over the tensor group (one all-reduce), the gradients of copies over the tensor group (mt_param_desc.copies; one
   all-reduce for each parameter, in scratch memory of the arena), and shared embeddings over the embedding group (one
   all-reduce each). Then it sums all gradients over the data group, with one all-reduce for each bucket. With a sharded
   optimizer it uses reduce-scatters over the data group: param->grad then holds the sum only in this rank's share of
   each bucket (see mt_gather_gradients).
   In invariant mode, the sums over the tensor and the context group are computed once for each micro-batch (in
   mt_accumulate_gradients), those over the data group do not contain the context ranks, and shared embeddings are
   summed last. All sums are all-reduces, even with a sharded optimizer.
   MT_ERR_SHAPE, in invariant mode: the number of micro-batches is not a power of two.
   MT_ERR_ARGUMENT: the gradients are synchronised or used already, or were never zeroed (see mt_params_zero_grad); in
   invariant mode, the last of several micro-batches was not accumulated. After another error, such as that of a
   collective, the gradients are undefined: call mt_params_zero_grad and do the step again. */
MT_API mt_status mt_sync_gradients(mt_context *ctx, mt_params *params);

/* Overlaps the sums over the data group with the last backward of a step. Optional; call it before that backward (see
   Megatron-LM's is_last_microbatch). A bucket is then summed as soon as its gradients are final (mt_gradients_final),
   on MT_DEVICE_CUDA at the same time as the backward. mt_sync_gradients sums the remaining buckets and waits. The sums
   have the same bits as without this call. In invariant mode it does nothing. mt_params_zero_grad cancels it. With
   mt_pipeline_run call it in mt_pipeline_stage.backward, before the backward of the last micro-batch.
   MT_ERR_ARGUMENT: called twice without mt_sync_gradients or mt_params_zero_grad in between, or after mt_sync_gradients
   without mt_params_zero_grad. */
MT_API mt_status mt_sync_gradients_begin(mt_context *ctx, mt_params *params);

/* Makes param->grad the whole sum on every rank. Call it after mt_sync_gradients when a program with a sharded
   optimizer reads gradients; other programs do not need it. Communication: an all-gather of all gradients (MT_F32) over
   the data group, one for each bucket. Without a sharded optimizer, and in invariant mode, it does nothing, because
   param->grad already is the whole sum. MT_ERR_ARGUMENT: mt_sync_gradients was not called. */
MT_API mt_status mt_gather_gradients(mt_context *ctx, mt_params *params);

/* *norm = the L2 norm of the whole model's gradient, the same on every rank. Call it after mt_sync_gradients, before or
   after the step of the optimizer. An element with copies on several ranks is counted once, but if any copy is not
   finite, the norm is not finite. When all copies of an element are alike, they do not change whether the norm is
   infinite or NaN. A NaN norm always has the bits of NAN (math.h), however the model is split. A sharded optimizer adds
   the squares in another order than an unsharded one, so the last digits of the norm may differ between the two.
   Communication: an all-reduce of two floats over the model group and, with a sharded optimizer, one over the data
   group. In invariant mode: an all-reduce of V * (number of parameters + 1) floats over the tensor group; over the
   pipeline group a send to the next stage, a broadcast and an all-reduce, each of one float.
   MT_ERR_ARGUMENT, before any communication: mt_sync_gradients was not called, but has something to sum: with several
   data ranks; for a sequence_partial parameter with several tensor ranks; for one with copies; for a shared embedding
   with several pipeline stages, or in invariant mode; or for accumulated micro-batches. A stage in the middle of a
   pipeline does not know the shared embedding: it gets MT_ERR_PEER or MT_ERR_TIMEOUT. */
MT_API mt_status mt_grad_norm(mt_context *ctx, mt_params *params, float *norm);
