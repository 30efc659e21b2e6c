/* ---- defaults ---------------------------------------------------------------------------------------------------- */

#pragma once
#include "api.h"

/* Structs named mt_..._desc may be zero-initialised. "0: x" in the comment of a field means that 0 selects x. In
   the following fields, MT_ZERO means the number zero:
       beta1, beta2, eps                mt_optimizer_desc. Without beta1, AdamW is RMSProp with weight decay
       init_std, std, output_std        of layers, blocks and models (mt_init_desc): the first weights are 0
       scale                            mt_scores_desc: each query sees the mean of its values
       top_p                            mt_sample_desc: only the first token is kept
       ignore_index                     of the cross-entropy and of models: targets of 0 have no loss
   In the other fields zero is no useful value, and MT_ZERO is refused as out of range; in a norm, for instance, an eps
   of 0 divides by zero when all features are equal. Fields without "0: x", such as weight_decay, temperature, dropout
   and seed, take 0 as it is. mt_or_default returns the number that such a field means. */
#define MT_ZERO INT32_MIN
