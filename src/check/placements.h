/* ---- placements: what the ranks of a group hold ------------------------------------------------------------------ */

#pragma once
#include "../comm/context.h"

/* How a tensor is distributed over the ranks of a group. The names are those of PyTorch's DTensor: Replicate, Shard(0),
   Shard(1), Partial. A parameter of a registry has one of the first three (mt_param_desc.placement). */
typedef enum mt_placement {
    MT_REPLICATED = 0, /* every rank has the same values */
    MT_SPLIT_ROWS = 1, /* every rank has its own rows, or rows of its own tokens */
    MT_SPLIT_COLS = 2, /* every rank has its own columns */
    MT_PARTIAL = 3,    /* every rank has a term of a sum over the ranks; the sum has not been computed yet */
    MT_UNDECLARED = 4  /* nothing is known */
} mt_placement;

/* "replicated", "split by rows", "split by columns", "partial" or "not known", as messages say it. */
MT_API const char *mt_placement_name(mt_placement placement);

/* Check mode (mt_context_desc.check) finds wrong parallel programs before they compute anything. The context keeps the
   placement of every tensor that the library writes, for each group of more than one rank (at most 6 groups). A call
   whose inputs do not fit together returns MT_ERR_ARGUMENT and computes nothing. The message names the call and its
   layer, the operand, what it is and where it became so, what it must be, and the call that makes it so. See
   docs/checking.md for the rules.
   Most mistakes need only a context on MT_DEVICE_META, one rank of mt_comm_create_meta, and one step.

   mt_declare says what a tensor is that the library has not written, such as inputs, or memory that a kernel of the
   caller has filled. It replaces what was known about t. Calls accept a tensor that is MT_UNDECLARED, but not memory of
   the arena that nothing has written and that was not declared. mt_placement_of returns what is known about t, for the
   group `comm`; it is MT_UNDECLARED when check mode is off, when nothing is known, and when the parts of t differ.
   With comm NULL and MT_UNDECLARED, mt_declare forgets what is known about t in all groups. In a group of one it only
   says that the program has written t, and when check mode is off, it does nothing. Errors: MT_ERR_ARGUMENT (placement
   is out of range, or comm is NULL with another placement, or t is a parameter of another placement), MT_ERR_MEMORY. */
MT_API mt_status mt_declare(mt_context *ctx, const mt_comm *comm, mt_tensor t, mt_placement placement);
MT_API mt_placement mt_placement_of(const mt_context *ctx, const mt_comm *comm, mt_tensor t);
