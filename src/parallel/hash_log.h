/* ---- hash log: which tensor differs between two runs ------------------------------------------------------------- */

#pragma once
#include "params.h"

/* A log for debugging (docs/invariance.md). While a context has a log, linear layers, norm layers and the blocks of
   megatron.h log the tensors that they compute in training (forward with saved, backward). For each tensor of a step
   the log has one line: a name, and a hash of the bits of the whole tensor. The hash does not depend on how ranks and
   micro-batches split the tensor. In invariant mode two runs that split the same step differently therefore write the
   same lines. When they do not, the first line that differs names the tensor in which the runs first differ.
   The name is that of a layer with .output, .input_grad or .output_grad. The log costs time, host memory for the names,
   and a few collectives for each flush. */
typedef struct mt_hash_log mt_hash_log;

/* Creates the log of a context. A context has at most one; a second is MT_ERR_ARGUMENT. Destroy the log before the
   context. grid must outlive the log. mt_hash_log_destroy accepts NULL. */
MT_API mt_status mt_hash_log_create(mt_context *ctx, const mt_grid *grid, mt_hash_log **out);
MT_API void mt_hash_log_destroy(mt_hash_log *log);

/* Sets first_token, the position in the global batch of the first token that the next calls work on. The blocks of
   megatron.h that take an mt_batch call this function themselves. In a loop around other layers, call it before each
   micro-batch. Does nothing without a log. */
MT_API void mt_hash_log_tokens(mt_context *ctx, int64_t first_token);

/* Log what layers do not log themselves:
     mt_hash_log_shard  a tensor shaped like a parameter's shard: its value, its gradient (after mt_sync_gradients) or a
                        moment. The line is named by the parameter's name and the suffix, such as "", ".grad" or
                        ".exp_avg".
     mt_hash_log_value  a number that every rank has, such as the loss. */
MT_API mt_status mt_hash_log_shard(mt_context *ctx, mt_hash_log *log, const mt_param *param, const char *suffix,
                                   mt_tensor shard);
MT_API mt_status mt_hash_log_value(mt_context *ctx, mt_hash_log *log, const char *name, float value);

/* Receives a line. differs is 1 when ranks that should have equal copies of the tensor do not. */
typedef void (*mt_hash_line)(void *user, const char *name, uint64_t hash, int differs);

/* Calls `line` on every rank once for each tensor, in the order in which the tensors were first computed, and empties
   the log. Call it at the end of a step. Collective over the tensor, data and pipeline groups. With several stages the
   lines come in the order in which a single stage would write them, provided that all stages call mt_hash_log_value for
   the same names in the same order. */
MT_API mt_status mt_hash_log_flush(mt_context *ctx, mt_hash_log *log, mt_hash_line line, void *user);
