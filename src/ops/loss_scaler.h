/* ---- loss scaling ------------------------------------------------------------------------------------------------ */

#pragma once
#include "../comm/context.h"

/* Gradients of MT_F16 activations vanish below 6e-8 and overflow above 65504. So the loss is multiplied by a large
   scale (arXiv 1710.03740, section 3.2). The scale grows after growth_interval good steps in a row. It shrinks when
   gradients are not finite (an overflow), as in Megatron's DynamicGradScaler. A step looks like this:
       MT_TRY(mt_gpt_backward(ctx, &gpt, scaler.scale / tokens, &saved));
       MT_TRY(mt_sync_gradients(ctx, params));
       MT_TRY(mt_grad_norm(ctx, params, &norm));
       float unscale = mt_loss_scaler_update(&scaler, &norm);
       if (unscale > 0) MT_TRY(mt_optimizer_step(ctx, &optimizer, lr, unscale * mt_clip_coefficient(norm, 1.0f)));
   Every rank has the same norm and so the same scale: either all ranks take the step or none does. A skipped step
   changes no parameter. MT_BF16 and MT_F32 need no scale. With initial_scale 1 and growth 1 a scaler only skips and
   counts the steps that are not finite. */
typedef struct mt_loss_scaler_desc {
    float initial_scale;   /* 0: 2^32 */
    float min_scale;       /* 0: 1 */
    float growth, backoff; /* factors by which the scale grows and shrinks; 0: 2 and 1/2 */
    int growth_interval;   /* good steps in a row before the scale grows; 0: 1000 */
    int hysteresis;        /* n: the scale shrinks at the n-th overflow since it grew, and at each later one; 0: 2 */
} mt_loss_scaler_desc;

/* The whole state of a scaler. A checkpoint saves this struct (mt_training_state.scaler). */
typedef struct mt_loss_scaler {
    mt_loss_scaler_desc desc;
    float scale;     /* multiply the loss by it */
    int good_steps;  /* in a row */
    int overflows;   /* since the scale last grew */
    int64_t skipped; /* skipped steps in total */
} mt_loss_scaler;

/* Creates a scaler; it needs no destroy. desc NULL: the defaults. Scales that are powers of two, such as the defaults,
   do not change the digits of a gradient. MT_ERR_ARGUMENT: a value is out of range. */
MT_API mt_status mt_loss_scaler_create(mt_context *ctx, const mt_loss_scaler_desc *desc, mt_loss_scaler *out);

/* Updates the scale. Call it after mt_grad_norm and before mt_optimizer_step. Divides *norm by the scale of this step
   and sets the scale of the next step. Returns 1 / the scale of this step; multiply the grad_scale of mt_optimizer_step
   by it. Returns 0 when the norm is not finite: skip the step. When scaler or norm is NULL, returns 0 and changes
   nothing. */
MT_API float mt_loss_scaler_update(mt_loss_scaler *scaler, float *norm);

/* Returns the factor that clips a gradient of this norm to max_norm: min(1, max_norm / (norm + 1e-6)), or 1 when
   max_norm <= 0. Check first that the norm is finite: clipping does not remove infinities or NaN. */
MT_API float mt_clip_coefficient(float norm, float max_norm);
