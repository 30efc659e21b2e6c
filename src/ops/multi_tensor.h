/* ---- a step for many tensors, for authors of optimizers ---------------------------------------------------------- */

#pragma once
#include "adamw.h"
#include "step.h"

/* out [1, 1] += the sum of the squares of the elements of x, added as in mt_sum. */
MT_API mt_status mt_sum_of_squares(mt_context *ctx, mt_tensor x, mt_tensor out);

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
MT_API mt_status mt_multi_tensor_adamw(mt_context *ctx, const mt_multi_tensor *list, const mt_adamw *hyper,
                                       const mt_adamw_values *values);

/* Does mt_sum_of_squares for every tensor of the list, in its order and with the same bits: out [1, n] in MT_F32 gets
   out[0][tensor.out] += sum of squares. MT_ERR_ARGUMENT: a list of another kind, or a tensor.out that is not in [0, n).
   Scratch memory comes from the arena. */
MT_API mt_status mt_multi_tensor_sum_of_squares(mt_context *ctx, const mt_multi_tensor *list, mt_tensor out);

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
