/* ---- weighted sums ----------------------------------------------------------------------------------------------- */

#pragma once
#include "../comm/context.h"

/* y = a * x + b * y, computed in f32 and rounded once. x and y [rows, cols] have float types, which may differ, and y
   may be x. a is multiplied by the element of a_factor [1, 1], MT_F32, unless a_factor is mt_none(), and b by that of
   b_factor: a factor that a GPU has computed needs no wait. If b is 0, y and b_factor are not read; x is always read.
   A moving average of weights is mt_scale_add(ctx, 1 - decay, mt_none(), weight, decay, mt_none(), average).
   The gradient of x is a * dy, mt_scale_add(ctx, a, a_factor, dy, 0, mt_none(), dx), and that of the old y is b * dy.
   MT_ERR_ARGUMENT: a or b is not finite; y overlaps x without being x; y overlaps a factor. */
MT_API mt_status mt_scale_add(mt_context *ctx, float a, mt_tensor a_factor, mt_tensor x, float b, mt_tensor b_factor,
                              mt_tensor y);
