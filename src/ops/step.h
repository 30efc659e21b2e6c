/* ---- a training step that does not wait -------------------------------------------------------------------------- */

#pragma once
#include "loss_scaler.h"

/* The numbers of AdamW that change from step to step, see mt_adamw. */
typedef struct mt_adamw_values {
    float lr, grad_scale;
    int64_t step;
    int32_t skip; /* not 0: the step changes nothing */
} mt_adamw_values;

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
