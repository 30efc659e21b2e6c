/* ---- a training step that does not wait -------------------------------------------------------------------------- */

#pragma once
#include "adamw.h"
#include "loss_scaler.h"

/* The numbers of a training step that change from step to step. On a GPU they are in its memory, so the host need not
   wait for the norm before it starts the step, and a step that is recorded once (a CUDA graph) can run many times. */
typedef struct mt_step_values {
    uint64_t random_offset; /* for mt_random.offset */
    float lr;               /* of this step */
    float max_norm;         /* as in mt_clip_coefficient */
    mt_loss_scaler scaler;  /* scale is that of this step, and after mt_step_decide that of the next one */
    float loss;             /* after mt_step_decide: its argument */
    float norm;             /* after mt_step_decide: of the gradients, divided by the scale; or not finite */
    /* after mt_step_decide: of this step, but grad_scale only if skip is 0; step is the number of steps that were not
       skipped */
    mt_adamw_values adamw;
} mt_step_values;

/* Decides what a step does: computes the norm from `sums`, updates the loss scale as mt_loss_scaler_update does, clips
   as mt_clip_coefficient does, and writes values->loss, norm and adamw, all with the same bits as these functions.
   sums [1, 2], MT_F32: element 0 is the sum of squares of the gradients that count towards the norm. Element 1 is that
   of the other copies of gradients; it does not change the norm, but the step is skipped when it is not finite.
   loss [1, 1], MT_F32, is optional: without it, the loss counts as 0. When the norm or the loss is not finite,
   adamw.skip is 1, adamw.step does not change, and the scaler counts an overflow. `values` is in memory of the
   context's device. MT_ERR_ARGUMENT: values is NULL. */
MT_API mt_status mt_step_decide(mt_context *ctx, mt_tensor sums, mt_tensor loss, mt_step_values *values);

/* The norm that mt_step_decide computes from its two sums, before it divides by the scale. A NaN has the bits of NAN
   (math.h). sums NULL: 0. */
MT_API float mt_norm_of_sums(const float sums[2]);
