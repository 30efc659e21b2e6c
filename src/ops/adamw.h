/* ---- optimizer --------------------------------------------------------------------------------------------------- */

#pragma once
#include "random.h"

/* AdamW with decoupled weight decay (arXiv 1711.05101, algorithm 2, as torch.optim.AdamW). With g = grad_scale * grad:
       m = beta1 * m + (1 - beta1) * g            mhat = m / (1 - beta1^step)
       v = beta2 * v + (1 - beta2) * g^2          vhat = v / (1 - beta2^step)
       param = (1 - lr * weight_decay) * param - lr * mhat / (sqrt(vhat) + eps) */
typedef struct mt_adamw {
    float lr, beta1, beta2, eps, weight_decay, grad_scale;
    int64_t step;                         /* number of this step, from 1 */
    const mt_random *stochastic_rounding; /* the random words for rounding a 16-bit param; NULL: to nearest even */
} mt_adamw;

/* Does one step: updates param, m and v, and master if it is given. All views have the same shape. m and v are zero
   before step 1. An MT_F32 param has no master: pass mt_none(). A 16-bit param can be updated in three ways:
   - With a master (MT_F32), the step updates master. param becomes a copy of it, rounded to nearest even.
   - Without a master, the step updates param and rounds it to nearest even. Updates below half a unit in the last place
     are lost.
   - Without a master and with stochastic_rounding, the step updates param and rounds it up or down at random. The mean
     over many roundings is exact, so small updates are kept on average. See docs/gpus.md.
   Errors: MT_ERR_DTYPE (an f32 param with a master), MT_ERR_ARGUMENT (stochastic_rounding with a master or an f32
   param; see also mt_adamw_check). */
MT_API mt_status mt_adamw_step(mt_context *ctx, const mt_adamw *hyper, mt_tensor param, mt_tensor master,
                               mt_tensor grad, mt_tensor m, mt_tensor v);
