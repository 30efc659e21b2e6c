/* ---- moving and filling ------------------------------------------------------------------------------------------ */

#pragma once
#include "../comm/context.h"

/* Returns the view with data == NULL, to pass for an optional argument that you leave out. */
MT_API mt_tensor mt_none(void);

/* Sets every element of y, which has a float type, to value. */
MT_API mt_status mt_fill(mt_context *ctx, mt_tensor y, float value);

/* y = x, of the same shape. In mt_copy, x and y have the same type, which may be any type. In mt_convert they have
   float types, which may differ. In both, y may be x. */
MT_API mt_status mt_copy(mt_context *ctx, mt_tensor x, mt_tensor y);
MT_API mt_status mt_convert(mt_context *ctx, mt_tensor x, mt_tensor y);

/* y = a + b, all of the same shape. y may be a or b. */
MT_API mt_status mt_add(mt_context *ctx, mt_tensor a, mt_tensor b, mt_tensor y);

/* mt_upload copies from host to y, mt_download from x to host. The view may have any type. host is a contiguous array
   of rows * cols elements of that type. When mt_upload returns, the caller may change host; the copy is in the
   context's stream, before the work of later calls. When mt_download returns, the copy is complete. On MT_DEVICE_META
   mt_upload does nothing and mt_download writes zeros. In check mode mt_download refuses floats that are a term of a
   sum over ranks: the program would take them for the sum. */
MT_API mt_status mt_upload(mt_context *ctx, const void *host, mt_tensor y);
MT_API mt_status mt_download(mt_context *ctx, mt_tensor x, void *host);

/* out [1, 1] += the sum of the elements of x. A CPU accumulates in double, and makes no f32 copy of x. A GPU adds
   groups of 8 consecutive elements of a row in fp32, then these sums in double. */
MT_API mt_status mt_sum(mt_context *ctx, mt_tensor x, mt_tensor out);

/* Adds the rows of x [rows, cols], MT_F32, in place. Row 0 becomes the sum of all rows; the other rows are undefined
   afterwards. It adds rows in the binary tree in which mt_all_reduce adds ranks, ((0+1)+(2+3))+.... Use it for your own
   sums over micro-batches, such as the mean loss. In invariant mode, the bits of these sums then do not depend on the
   number of ranks (see docs/invariance.md). */
MT_API mt_status mt_tree_sum(mt_context *ctx, mt_tensor x);
