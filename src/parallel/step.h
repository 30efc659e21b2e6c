/* ---- a step that does not wait ----------------------------------------------------------------------------------- */

#pragma once
#include "optimizer.h"

/* A training step that keeps its numbers in memory of the device. mt_grad_norm waits for the device, because the loop
   needs the norm; here the device decides, and the loop only reads results when it wants to print them:
       mt_step step;
       MT_TRY(mt_step_create(ctx, &optimizer, NULL, 1.0f, &step));
       for (n = 1; n <= steps; n++) {
           MT_TRY(mt_params_zero_grad(ctx, params));
           MT_TRY(mt_step_begin(ctx, &step, lr, n));
           batch.random_offset = mt_step_random_offset(&step);           // new dropout masks in every step
           batch.loss_scale = mt_step_loss_scale(&step);                 // for MT_F16
           ... forward, and backward with 1.0f / tokens ...
           MT_TRY(mt_sync_gradients(ctx, params));
           MT_TRY(mt_step_update(ctx, &step, mt_none()));
           if (n % 10 == 0) MT_TRY(mt_step_read(ctx, &step, &values));   // waits
       }
       mt_step_destroy(ctx, &step);
   The parameters have the same bits as with mt_grad_norm, mt_loss_scaler_update, mt_clip_coefficient and
   mt_optimizer_step, if the loss scale is a power of two. A step whose norm is not finite changes no parameter. On a
   GPU, a step with a wrong token id changes the parameters. mt_step_read, or another call that waits, then returns
   MT_ERR_DATA (see mt_ids_check): go back to a checkpoint. Over NCCL the timeout of a communicator must be longer than
   all steps between two reads. The step can be recorded as a CUDA graph (mt_graph_begin in mt_comm.h), without
   mt_step_begin and mt_step_read. */
typedef struct mt_step {
    mt_optimizer *optimizer;
    mt_step_values *values; /* in memory of the device */
} mt_step;

/* scaler is the state to begin with; it is copied. NULL: no loss scale. max_norm as in mt_clip_coefficient. The caller
   owns *out, and destroys it before the context. optimizer must outlive *out. Load a checkpoint before mt_step_create,
   which copies optimizer->step, too. Between mt_step_create and mt_step_destroy do not call mt_optimizer_step. Errors:
   MT_ERR_ARGUMENT (scaler is out of range, or max_norm is not finite), MT_ERR_MEMORY, MT_ERR_SYSTEM (CUDA failed). */
MT_API mt_status mt_step_create(mt_context *ctx, mt_optimizer *optimizer, const mt_loss_scaler *scaler, float max_norm,
                                mt_step *out);
MT_API void mt_step_destroy(mt_context *ctx, mt_step *step); /* NULL and a zero-initialised struct are allowed */

/* Sets the learning rate of the step, and random_offset to number << 20, so that dropout draws what it draws with
   mt_batch.step = number. Leave mt_batch.step 0, because the two are added. The call waits for the GPU only as an
   mt_upload does. MT_ERR_ARGUMENT: lr is not finite, number >= 2^44. */
MT_API mt_status mt_step_begin(mt_context *ctx, const mt_step *step, float lr, uint64_t number);

/* Computes the norm of the gradients, decides (mt_step_decide), and does the step of the optimizer. Call it after
   mt_sync_gradients. loss [1, 1], MT_F32, in memory of the device, is optional. It must be the same on all ranks of all
   pipeline stages. A step whose loss is not finite is skipped, too. Does not wait. The communication is that of
   mt_grad_norm and mt_optimizer_step, and so are the errors. A skipped step counts as a use of the gradients. */
MT_API mt_status mt_step_update(mt_context *ctx, const mt_step *step, mt_tensor loss);

/* Waits for the device, and copies the numbers of the last step to *out: its norm, whether it was skipped, and the loss
   scaler, for a checkpoint. Sets optimizer->step; call it before mt_checkpoint_save. */
MT_API mt_status mt_step_read(mt_context *ctx, const mt_step *step, mt_step_values *out);

/* Return what mt_batch.random_offset and mt_batch.loss_scale [1, 1] need. The memory belongs to *step, which
   mt_step_create has made. For NULL and a zero-initialised struct: NULL and mt_none(). */
MT_API const uint64_t *mt_step_random_offset(const mt_step *step);
MT_API mt_tensor mt_step_loss_scale(const mt_step *step);

/* Returns the learning rate of a step, counted from 0: linear warm-up to lr over `warmup` steps, then a cosine down to
   min_lr at step `total` and min_lr from there on. A negative step or warmup counts as 0. */
MT_API float mt_cosine_schedule(int64_t step, int64_t warmup, int64_t total, float lr, float min_lr);

/* The same with a linear decay instead of the cosine, as for BERT. */
MT_API float mt_linear_schedule(int64_t step, int64_t warmup, int64_t total, float lr, float min_lr);
