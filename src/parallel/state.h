/* ---- optimizer state, for authors of checkpoints ----------------------------------------------------------------- */

#pragma once
#include "optimizer.h"

/* Writes views of a parameter's moments to *m and *v: MT_F32, shaped like its gradient. Callers may read, write, gather
   and scatter them (mt_param_gather). MT_ERR_UNSUPPORTED: the optimizer is sharded; use mt_optimizer_read,
   mt_optimizer_gather and mt_optimizer_scatter. */
MT_API mt_status mt_optimizer_moments(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                      mt_tensor *m, mt_tensor *v);

/* Writes a view of a parameter's f32 master, or of its value when it has no master, to *master. A program that writes
   to a master or to its parameter's value must write the same to the other. MT_ERR_UNSUPPORTED as above. */
MT_API mt_status mt_optimizer_master(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                     mt_tensor *master);

/* The states that an optimizer keeps of a parameter: first moment, second moment, master. The names are those of
   PyTorch and Megatron. */
typedef enum mt_optimizer_state { MT_EXP_AVG = 0, MT_EXP_AVG_SQ = 1, MT_MASTER = 2 } mt_optimizer_state;

/* Copies a state of a parameter to `shard`, which is MT_F32 and shaped like param->grad. For a parameter without a
   master, MT_MASTER is its value. Collective over the data group when the optimizer is sharded. */
MT_API mt_status mt_optimizer_read(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                   mt_optimizer_state state, mt_tensor shard);

/* Copies between a state of a parameter and the whole tensor in host memory, as mt_param_gather and mt_param_scatter
   do. gather is collective over the tensor group and, when the optimizer is sharded, over the data group. scatter does
   not communicate; call it on every data rank with the same `global`. Scattering MT_MASTER also writes the parameter's
   value, rounded to its type. MT_ERR_DATA as in mt_param_scatter: an element is too large for the value's type. */
MT_API mt_status mt_optimizer_gather(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                     mt_optimizer_state state, float *global);
MT_API mt_status mt_optimizer_scatter(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                      mt_optimizer_state state, const float *global);
