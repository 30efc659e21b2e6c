/* ---- for authors of blocks --------------------------------------------------------------------------------------- */

#pragma once
#include "linear.h"
#include "../ops/bias.h"

/* The blocks of megatron.h are made of layers, operators and these functions. docs/blocks.md shows how to write a
   block. tp is the tensor group, mt_params_grid(params)->tp. `function` is the name of the calling function, for the
   error message. Add a new parameter with mt_params_add. Set sequence_partial for a replicated parameter whose gradient
   covers only this rank's tokens (sequence parallelism) or heads (a gain per head). */

/* For the create function of a block. mt_check_integer, mt_check_size, mt_check_enum and mt_check_float in
   mt_kernels.cuh check the fields of a desc.
     mt_create_check  returns MT_ERR_ARGUMENT when an argument is NULL. The message names the argument.
     mt_layer_name    writes the name of the block to out, which has MT_NAME_MAX characters: a copy of `name` or, when
                      `name` is NULL, the next layer.N. Give the layers of the block names of their own, that begin with
                      it (mt_param_name). N is counted from the names of parameters. A block without parameters, or
                      whose create failed, uses no N. MT_ERR_ARGUMENT: `name` is empty or does not fit, or is NULL with
                      several pipeline stages.
     mt_param_name    writes NAME.SUFFIX to out, which has MT_NAME_MAX characters. MT_ERR_ARGUMENT: it does not fit.
     mt_params_mark   returns a mark for mt_create_end: how many parameters and buffers (mt_params_buffer) the registry
                      has. Call it before the block adds its first parameter or buffer.
     mt_create_end    returns `status`. Before it returns an error, it removes the parameters and buffers that were
                      added after the mark, and fills the block_bytes bytes of *block with zeros. */
MT_API mt_status mt_create_check(mt_context *ctx, const char *function, const mt_params *params, const void *desc,
                                 const void *out);
MT_API mt_status mt_layer_name(mt_context *ctx, const mt_params *params, const char *name, char *out);
MT_API mt_status mt_param_name(mt_context *ctx, char *out, const char *name, const char *suffix);
MT_API size_t mt_params_mark(const mt_params *params);
MT_API mt_status mt_create_end(mt_params *params, size_t mark, void *block, size_t block_bytes, mt_status status);

/* Adds a parameter. The registry owns *out: it is valid until mt_params_destroy, or until mt_create_end removes it.
   mt_params_init allocates its value and gradient, unless they are bound (mt_params_bind).
   MT_ERR_ARGUMENT: the name is empty, taken or too long, or NULL with several pipeline stages, another field is out of
   range, or mt_params_init or mt_params_bind was already called.
   MT_ERR_SHAPE: rows or cols is not positive, unit is negative, rows * cols is above 2^48, parts * unit does not divide
   the split dimension, or padded_features breaks a rule of its comment. */
MT_API mt_status mt_params_add(mt_context *ctx, mt_params *params, const mt_param_desc *desc, mt_param **out);

/* Allocates zeroed memory: with on_host 1 host memory (for structs), with on_host 0 memory of the context's device (for
   tables). mt_params_destroy frees it, and so does mt_create_end after an error. */
MT_API mt_status mt_params_buffer(mt_context *ctx, mt_params *params, size_t bytes, int on_host, void **out);

/* Returns the grid that mt_params_create got. */
MT_API const mt_grid *mt_params_grid(const mt_params *params);

/* Returns the number of equal shards into which every split dimension is divided: V in invariant mode, otherwise t. */
MT_API int mt_params_shards(const mt_params *params);

/* Checks for the beginning of a call, before it computes anything. mt_kernels.cuh has more: mt_args_check,
   mt_tensor_check, and mt_check_apart for views that must not overlap.
     mt_check_param       MT_ERR_ARGUMENT: param is NULL, or mt_params_init was not called.
     mt_check_gradient    For a backward. MT_ERR_ARGUMENT: nothing may be added to the gradient of param now, because it
                          was not zeroed, is synchronised or was used already, or was declared final. Call it before you
                          add to param->grad yourself, or do anything before the backward of a layer that cannot be
                          undone. It does mt_param_touch_grad, too. param NULL: nothing is checked.
     mt_check_linear_gradients
                          The same for the weight of a linear layer and the bias that it adds itself, when the layer's
                          backward adds to them: it does no mt_param_touch_grad.
     mt_check_micro_batch For the backward of a whole model, in invariant mode, before it adds to a gradient. `sequence`
                          is the batch's first_sequence. MT_ERR_ARGUMENT: the gradients have another micro-batch, for
                          which mt_accumulate_gradients was not called.
     mt_check_activation  MT_ERR_SHAPE: t is not [rows, cols]. MT_ERR_DTYPE: t has another type than `weight`.
     mt_check_sent        MT_ERR_SHAPE: a tensor that is sent to other tensor ranks is not contiguous. `in` is sent only
                          under sequence parallelism, `out` always. Either may be mt_none().
     mt_check_tokens      MT_ERR_SHAPE: in invariant mode, `tokens` is not a multiple of V for each virtual context
                          rank. Only training calls need it. */
MT_API mt_status mt_check_param(mt_context *ctx, const char *function, const mt_param *param);
MT_API mt_status mt_check_gradient(mt_context *ctx, const char *function, const mt_param *param);
MT_API mt_status mt_check_linear_gradients(mt_context *ctx, const char *function, const mt_parallel_linear *layer);
MT_API mt_status mt_check_micro_batch(mt_context *ctx, const char *function, const mt_param *param, int64_t sequence);
MT_API mt_status mt_check_activation(mt_context *ctx, const char *function, const mt_param *weight, const char *name,
                                     mt_tensor t, int64_t rows, int64_t cols);
MT_API mt_status mt_check_sent(mt_context *ctx, const char *function, mt_comm *tp, int sequence_parallel,
                               const char *in_name, mt_tensor in, const char *out_name, mt_tensor out);
MT_API mt_status mt_check_tokens(mt_context *ctx, const char *function, int64_t tokens);

/* trust = 1 turns off the checks of token ids (embedding) and targets (cross-entropy); trust = 0 turns them on again.
   A block that has checked the ids itself turns off these checks, so that each id is checked once. Without a check, an
   id or a target that is out of range is no error: see mt_embedding_forward and mt_cross_entropy_stats. Errors:
   MT_ERR_ARGUMENT, MT_ERR_MEMORY. */
MT_API mt_status mt_layers_trust_ids(mt_context *ctx, int trust);

/* Hide weight gradients of a block behind its reductions. Between these calls, the backward of a row-parallel layer may
   leave its weight gradient for later. The next backward of a column-parallel layer computes it while its own dx is
   reduced, and mt_defer_weight_gradients_end computes what is left. Until then the dy and the saved.x of the
   row-parallel layer must stay as they are. The gradients have the same bits. Weight gradients are computed at once on
   a CPU, with sequence parallelism, without input_is_parallel, and in invariant mode.
   Pairs of calls may stand inside each other. status: that of the calls between; after an error nothing more is
   computed. mt_defer_weight_gradients_end returns it, or its own error. Errors: MT_ERR_ARGUMENT (an end without a
   begin), MT_ERR_MEMORY, and those of the products. */
MT_API mt_status mt_defer_weight_gradients(mt_context *ctx);
MT_API mt_status mt_defer_weight_gradients_end(mt_context *ctx, mt_status status);

/* Let a block compute while a reduction of a layer is in flight. After mt_layers_hold_reduction with slot 0 or 1, two
   kinds of calls return before their reduction over the tensor group is done: the forward of row-parallel layers that
   add no bias, and the backward of column-parallel layers without add_to_dx. Slot -1 ends this for later calls.
   mt_layers_wait_reduction waits for what was begun in a slot. Until then nothing may read or write the y or the dx of
   the call, or release its memory. A transformer layer waits for its reductions, and ends the hold as slot -1 does; do
   not call models while it is on. After an error, wait for both slots. A call that holds its reduction cuts no tokens
   into chunks. With sequence parallelism, and while there is a hash log, calls wait for their reductions.
   Errors: MT_ERR_ARGUMENT (no such slot), MT_ERR_MEMORY, MT_ERR_SYSTEM (CUDA failed). */
MT_API mt_status mt_layers_hold_reduction(mt_context *ctx, int slot);
MT_API mt_status mt_layers_wait_reduction(mt_context *ctx, int slot);

/* Convert between the tokens of the tensor group and the rows on this rank. Under sequence parallelism rows = tokens /
   t; otherwise rows = tokens.
     mt_sequence_tokens  returns the tokens for a number of rows, or -1 when int64_t overflows.
     mt_sequence_rows    writes the rows for a number of tokens. MT_ERR_SHAPE: t does not divide tokens.
     mt_gather_tokens    under sequence parallelism, all-gathers x [rows, n] into *all [tokens, n], in the arena.
                         Otherwise *all is x. */
MT_API int64_t mt_sequence_tokens(mt_comm *tp, int sequence_parallel, int64_t rows);
MT_API mt_status mt_sequence_rows(mt_context *ctx, const char *function, mt_comm *tp, int sequence_parallel,
                                  int64_t tokens, int64_t *rows);
MT_API mt_status mt_gather_tokens(mt_context *ctx, mt_comm *tp, int sequence_parallel, mt_tensor x, mt_tensor *all);

/* Allocates several tensors from the arena. Calls mt_arena_tensor for each entry of the list, in order. */
typedef struct mt_arena_request {
    mt_tensor *out;
    mt_dtype dtype;
    int64_t rows, cols;
} mt_arena_request;
MT_API mt_status mt_arena_tensors(mt_context *ctx, const mt_arena_request *list, int count);

/* Returns a view [rows, cols] of the elements of t. When t is not contiguous, or has another number of elements,
   returns a view of -1 rows, which every call refuses. */
MT_API mt_tensor mt_tensor_reshape(mt_tensor t, int64_t rows, int64_t cols);

/* Adds a sum over tokens to one or two parameter gradients, for instance of a bias or a table of positions. a and b are
   the gradients, MT_F32; b has as many columns as a, or is mt_none(). rows is the number of rows on this rank. op(ctx,
   arg, first, count, a, b) must add the contribution of rows [first, first + count) to its own arguments a and b. By
   default op is called once, with all rows, and a and b are the gradients themselves. In invariant mode it is called
   once for each virtual shard of the tokens, with scratch memory as a and b; each virtual context rank has V of them.
   In this mode operators refuse to sum over tokens into a gradient (MT_ERR_ARGUMENT): with V > 1 into that of a
   parameter that is MT_REPLICATED, and with V_c > 1 into any. See docs/invariance.md.
   MT_ERR_SHAPE, in invariant mode: the tokens are not a multiple of V for each virtual context rank. */
typedef mt_status (*mt_token_operator)(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor a,
                                       mt_tensor b);
MT_API mt_status mt_sum_over_tokens(mt_context *ctx, mt_comm *tp, int sequence_parallel, mt_token_operator op,
                                    const void *arg, int64_t rows, mt_tensor a, mt_tensor b);

/* are 1: in the next calls the rows of tensors are not tokens but sequences, such as those of a pooler, or tokens that
   every context rank has. In invariant mode virtual context ranks (mt_context_parallel_desc.invariant) do not divide
   them. are 0: they are tokens of this context rank. Returns what it was, for the call that ends this; make it also
   after an error. Does nothing, and returns 0, if ctx is NULL or has no layers yet. */
MT_API int mt_rows_are_sequences(mt_context *ctx, int are);

/* Returns a view of the columns of t [tokens, local features] that belong to virtual shard number `shard` of this rank,
   see the chapter "invariant mode". shards is the number of virtual shards on this rank (mt_param.shards). When t.data
   is NULL, returns t. When shard is not in [0, shards), or `shards` does not divide the columns, returns a view of -1
   rows, which every call refuses. */
MT_API mt_tensor mt_shard_cols(mt_tensor t, int shard, int shards);

/* Use these functions when a block calls an operator on one virtual shard (mt_shard_cols). The bits of the operator's
   result may depend on the leading dimension and the alignment of its tensors. In invariant mode *out is therefore a
   contiguous, aligned tensor in the arena. When t itself is contiguous and aligned, and outside invariant mode, *out is
   t.
     mt_invariant_input   *out is the tensor to read instead of t, with the content of t.
     mt_invariant_output  *out is the tensor to write instead of t; its content is undefined.
     mt_invariant_store   copies out, the result of mt_invariant_output, to t after the operator has run. */
MT_API mt_status mt_invariant_input(mt_context *ctx, mt_tensor t, mt_tensor *out);
MT_API mt_status mt_invariant_output(mt_context *ctx, mt_tensor t, mt_tensor *out);
MT_API mt_status mt_invariant_store(mt_context *ctx, mt_tensor out, mt_tensor t);

/* paused = 1: layers and blocks log nothing in the context's hash log until a call with paused = 0. A block that
   recomputes a forward in its backward calls it, so that each tensor is logged once. Does nothing without a log. */
MT_API void mt_hash_log_pause(mt_context *ctx, int paused);

/* As mt_hash_log_tokens, which it follows, on context ranks: rows are the tokens of this rank of `sequences` sequences
   of `seq` tokens each, see mt_context_parallel_token. With sequences 0, rows are logged only on other ranks. The next
   mt_hash_log_tokens ends it. Does nothing without a log. */
MT_API void mt_hash_log_parts(mt_context *ctx, const mt_comm *cp, const mt_context_parallel_desc *context,
                              int64_t sequences, int64_t seq);

/* Logs an activation t [tokens, n] in the context's hash log. Does nothing without a log, or when name is "". With
   sequence_parallel t is [tokens / t, n], this rank's rows. When every rank has all columns of t, cols is NULL. When
   the columns are split over tensor ranks, cols is a parameter whose split dimension is split in the same way, such as
   the layer's weight; t must have cols->local_features columns (MT_ERR_SHAPE).
   The line is named PREFIX.WHAT. PREFIX is `name` (of a parameter or a layer) without its last `up` components, where
   components are separated by dots: "l.0.fc1.weight" with up 2 is "l.0". */
MT_API mt_status mt_hash_log_activation(mt_context *ctx, const char *name, int up, const char *what, mt_tensor t,
                                        int sequence_parallel, const mt_param *cols);

/* Declares that the gradients of the parameters from first to last, in the registry's order, are final: nothing more is
   added to them in this step. mt_gpt_backward calls it for its layers. In a loop of your own it is optional; call it in
   the same order on every rank. mt_sync_gradients also sums gradients that were not declared final. Without
   mt_sync_gradients_begin it does nothing.
   Do not add to a gradient that was declared final: its sum may already be under way, and the addition may be lost. The
   backward of a layer that would add to it is MT_ERR_ARGUMENT.
   MT_ERR_ARGUMENT: a gradient is declared final twice in one step, or first comes after last, or the two are in
   different registries. */
MT_API mt_status mt_gradients_final(mt_context *ctx, const mt_param *first, const mt_param *last);

/* In check mode, says what t is, which another stage has sent: tp over the tensor group and dp over the data group.
   MT_UNDECLARED: replicated or split by rows. It changes nothing over a group where t is known. mt_pipeline_run and the
   models of megatron.h call it; call it after an mt_recv of your own. Errors: MT_ERR_ARGUMENT (tp or dp is out of
   range, or tp is MT_PARTIAL, which mt_send refuses over the tensor group), MT_ERR_MEMORY. */
MT_API mt_status mt_declare_received(mt_context *ctx, const mt_grid *grid, mt_tensor t, mt_placement tp,
                                     mt_placement dp);

/* Run `count` layers of one kind, in arrays with one entry for each layer, that share f or g.
     column-parallel  The layers read the same x: x, dx and saved have one entry for all layers. Forward gathers x once
                      (sequence_parallel), and backward writes the sum of the layers' input gradients to dx and reduces
                      it once.
     row-parallel     The outputs are added: y = the sum of x[i] W[i]^T + b[i]. y and dy have one entry for all layers.
                      Forward reduces y once, and backward gathers dy once (sequence_parallel).
   A dx that is mt_none() is not computed.
       MT_TRY(mt_parallel_linear_forward_shared(ctx, fc1, 2, &x, h, &saved));      // column-parallel
       MT_TRY(mt_parallel_linear_forward_shared(ctx, fc2, 2, h, &y, saved_2));     // row-parallel
   MT_ERR_ARGUMENT: a list is NULL, count is below 1, a column-parallel layer has gather_output, a row-parallel layer
   has no input_is_parallel, or the layers differ in kind, tensor group, sequence_parallel or, when they are
   column-parallel, add_to_dx. */
MT_API mt_status mt_parallel_linear_forward_shared(mt_context *ctx, const mt_parallel_linear *layers, int count,
                                                   const mt_tensor *x, const mt_tensor *y, mt_linear_saved *saved);
MT_API mt_status mt_parallel_linear_backward_shared(mt_context *ctx, const mt_parallel_linear *layers, int count,
                                                    const mt_tensor *dy, const mt_tensor *dx,
                                                    const mt_linear_saved *saved);

/* Allocates `count` tensors [tokens, local_features] from the arena, one for each of the layers: y or dy of
   column-parallel layers, x or dx of row-parallel ones. The type and the number of tokens are those of `like`, which is
   x or dx of column-parallel layers, and y or dy of row-parallel ones: it has tokens rows, or tokens / t with
   sequence_parallel. MT_ERR_ARGUMENT: as for the functions above. */
MT_API mt_status mt_parallel_linear_tensors(mt_context *ctx, const mt_parallel_linear *layers, int count,
                                            mt_tensor like, mt_tensor *out);

/* Computes a column-parallel forward for inference. x has all tokens, even with sequence_parallel: x [tokens, in] -> y
   [tokens, local_features], or [tokens, out] when the argument gather_output is 1. desc.gather_output is ignored. Adds
   the bias, except with skip_bias_add. y may be of another float type than x.
   Communication: none, or an all-gather of y with gather_output. */
MT_API mt_status mt_column_parallel_linear_product(mt_context *ctx, const mt_parallel_linear *layer, mt_tensor x,
                                                   int gather_output, mt_tensor y);

/* These functions apply an activation to the output h of a column-parallel layer. They call mt_activation_forward or
   mt_activation_backward, in invariant mode once for each virtual shard. h is [tokens, local_features], or [tokens,
   out_features] with gather_output. y, dy and dh have the shape of h, except that with MT_SWIGLU y and dy have half the
   columns. With skip_bias_add, forward first adds the layer's bias to h in place, and backward also adds to the bias's
   gradient. dh may be h. No communication.
   MT_ERR_ARGUMENT: the layer has a bias, gather_output and skip_bias_add, so that h is whole but the bias is split. */
MT_API mt_status mt_column_parallel_activation_forward(mt_context *ctx, const mt_parallel_linear *layer,
                                                       mt_activation kind, mt_tensor h, mt_tensor y);
MT_API mt_status mt_column_parallel_activation_backward(mt_context *ctx, const mt_parallel_linear *layer,
                                                        mt_activation kind, mt_tensor h, mt_tensor dy, mt_tensor dh);

/* Run a linear layer and the activation next to it in one call. The two are one fused operator when
   mt_gemm_options.epilogue allows it and the column-parallel layer has skip_bias_add or no_bias, and no
   gather_output. Otherwise the call runs the linear layer and mt_column_parallel_activation_forward or _backward. A
   fused forward does not write NAME.output to the hash log.
     forward (column-parallel):  h = x W^T + b [tokens, local_features], y = act(h).
     backward (row-parallel):    dy is the gradient of the row-parallel layer's output. dh [tokens,
       before->local_features] is the gradient of h, the output of the column-parallel layer `before`. Adds to the
       gradients of the row-parallel layer's weight and bias. When `before` has skip_bias_add, also adds to the gradient
       of the bias of `before`.
   MT_ERR_ARGUMENT (backward): the row-parallel layer has no input_is_parallel or has add_to_dx, or `before` has
   gather_output. */
MT_API mt_status mt_column_parallel_linear_activation_forward(mt_context *ctx, const mt_parallel_linear *layer,
                                                              mt_activation kind, mt_tensor x, mt_tensor h, mt_tensor y,
                                                              mt_linear_saved *saved);
MT_API mt_status mt_row_parallel_linear_activation_backward(mt_context *ctx, const mt_parallel_linear *layer,
                                                            const mt_parallel_linear *before, mt_activation kind,
                                                            mt_tensor dy, mt_tensor h, mt_tensor dh,
                                                            const mt_linear_saved *saved);
