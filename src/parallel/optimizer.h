/* ---- optimizer --------------------------------------------------------------------------------------------------- */

#pragma once
#include "params.h"
#include "../ops/multi_tensor.h"

typedef struct mt_optimizer_desc {
    float beta1, beta2; /* MT_ZERO: 0; 0: 0.9, 0.999 */
    float eps;          /* 0: 1e-8. MT_ZERO: 0; an element whose gradients have all been 0 then becomes NaN */
    float weight_decay; /* of the parameters that have mt_param_desc.weight_decay; 0: none */
    /* advanced */
    /* 1: 16-bit parameters are rounded stochastically (see mt_adamw) and have no f32 master. Parameter, gradient and
       state take 14 bytes per parameter instead of 18. MT_ERR_ARGUMENT for f32 parameters */
    int stochastic_rounding;
    /* seed of stochastic_rounding. Step n (1, 2, ...) uses the subsequence (FNV-1a hash of the parameter's name) + n,
       with one random word for each global element (see mt_random). Ignored without stochastic_rounding */
    uint64_t seed;
} mt_optimizer_desc;

typedef struct mt_optimizer {
    mt_optimizer_desc desc;
    mt_params *params;
    /* first and second moments, and f32 masters of 16-bit parameters, see mt_optimizer_moments and mt_optimizer_master.
       NULL: there are none, or mt_params_bind has bound those of all parameters */
    float *m, *v, *master;
    /* floats in each of m, v and master that is not NULL; with a sharded optimizer, those of this rank */
    int64_t elements;
    int64_t step;            /* steps done */
    mt_multi_tensor *update; /* this rank's share of the parameters and of their state */
    int uses_bound;          /* 1: mt_params_bind has bound state that this optimizer uses */
} mt_optimizer;

/* Creates an optimizer and allocates the state that is not bound. Masters are copied from the parameters, so call it
   after mt_params_init, or after mt_params_bind has bound all values. desc may be NULL. Collective over the grid's
   world, whose ranks compare desc: if it differs, every rank returns MT_ERR_MISMATCH. params must outlive the
   optimizer. Other errors: MT_ERR_ARGUMENT (the parameters have no values yet; a field of desc is out of range; bound
   state with a sharded optimizer; bound state that another optimizer uses, which is not destroyed yet; bound master
   with stochastic_rounding), MT_ERR_MEMORY. */
MT_API mt_status mt_optimizer_create(mt_context *ctx, mt_params *params, const mt_optimizer_desc *desc,
                                     mt_optimizer *out);
MT_API void mt_optimizer_destroy(mt_context *ctx, mt_optimizer *optimizer); /* a zero-initialised one is allowed */

/* Performs one AdamW step (mt_adamw) with the gradients multiplied by grad_scale, for instance clip coefficient / loss
   scale. Updates masters and rounds parameters in one pass. When the optimizer is sharded, each data rank updates its
   share, and an all-gather for each bucket brings all parameters to every data rank. With the same gradients and
   grad_scale, the parameters have the same bits as with an unsharded optimizer.
   MT_ERR_ARGUMENT, and nothing has changed: lr or grad_scale is not finite (mt_adamw_check); mt_sync_gradients was not
   called, as in mt_grad_norm; a step has used these gradients already, see mt_params_zero_grad. */
MT_API mt_status mt_optimizer_step(mt_context *ctx, mt_optimizer *optimizer, float lr, float grad_scale);
