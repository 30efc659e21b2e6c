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

/* Operators over a list of tensors, with a few launches for the whole list (the multi_tensor_apply of NVIDIA's Apex).
   A list is made once and used in every step. It keeps the addresses, not the data, of its tensors, which must stay
   where they are until mt_multi_tensor_destroy.
   mt_multi_tensor_create_adamw makes a list for mt_multi_tensor_adamw, with `count` tensors. With stochastic_rounding 1
   each of them has a `random`.
   mt_multi_tensor_create_squares makes a list for mt_multi_tensor_sum_of_squares.
   Both copy the array `tensors`. On a GPU they also allocate with mt_context_alloc, copy a table to the GPU, and wait
   for the stream. count may be 0. The caller owns the list, and destroys it before the context. Errors:
   MT_ERR_ARGUMENT, MT_ERR_SHAPE, MT_ERR_DTYPE, MT_ERR_MEMORY, MT_ERR_SYSTEM; *out is then unchanged. */
typedef struct mt_multi_tensor mt_multi_tensor;
typedef struct mt_adamw_tensor {
    mt_tensor param, master, grad, m, v; /* as in mt_adamw_step */
    int weight_decay;                    /* 1: mt_adamw.weight_decay applies; 0: no weight decay */
    mt_random random;                    /* step n takes the random words of subsequence random.subsequence + n */
} mt_adamw_tensor;
typedef struct mt_square_tensor {
    mt_tensor x; /* MT_F32 */
    int64_t out; /* the column of `out` to which the squares of x are added */
} mt_square_tensor;
MT_API mt_status mt_multi_tensor_create_adamw(mt_context *ctx, const mt_adamw_tensor *tensors, int count,
                                              int stochastic_rounding, mt_multi_tensor **out);
MT_API mt_status mt_multi_tensor_create_squares(mt_context *ctx, const mt_square_tensor *tensors, int count,
                                                mt_multi_tensor **out);
MT_API void mt_multi_tensor_destroy(mt_context *ctx, mt_multi_tensor *list); /* NULL is allowed */

/* Does the step of mt_adamw_step for every tensor of the list, with the same bits. hyper->stochastic_rounding must be
   NULL, because the list says how to round. `values` may be NULL. Otherwise it is in memory of the context's device.
   When the step runs on the device, it takes lr, grad_scale and step from there, and does nothing if skip is not 0.
   Those of hyper are then not used, but still checked. What is in memory of the device is not checked.
   MT_ERR_ARGUMENT: stochastic_rounding is not NULL, the list is of another kind, or mt_adamw_check refuses hyper. */
typedef struct mt_adamw_values {
    float lr, grad_scale;
    int64_t step;
    int32_t skip; /* not 0: the step changes nothing */
} mt_adamw_values;
MT_API mt_status mt_multi_tensor_adamw(mt_context *ctx, const mt_multi_tensor *list, const mt_adamw *hyper,
                                       const mt_adamw_values *values);

/* Does mt_sum_of_squares for every tensor of the list, in its order and with the same bits: out [1, n] in MT_F32 gets
   out[0][tensor.out] += sum of squares. MT_ERR_ARGUMENT: a list of another kind, or a tensor.out that is not in [0, n).
   Scratch memory comes from the arena. */
MT_API mt_status mt_multi_tensor_sum_of_squares(mt_context *ctx, const mt_multi_tensor *list, mt_tensor out);
