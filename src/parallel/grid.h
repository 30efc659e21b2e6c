/* ---- process grid ------------------------------------------------------------------------------------------------ */

#pragma once
#include "../comm/context.h"

/* The sizes of the process grid. Ranks are in Megatron's order, tp-cp-dp-pp:
   rank = tp_rank + tp * (cp_rank + cp * (dp_rank + dp * pp_rank)). */
typedef struct mt_grid_desc {
    int tp; /* tensor parallel ranks; 0: 1 */
    int dp; /* data parallel ranks; 0: world size / (tp * cp * pp) */
    int pp; /* pipeline stages; 0: 1 */
    int cp; /* context parallel ranks, each of which has a part of every sequence; 0: 1 */
} mt_grid_desc;

typedef enum mt_group {
    MT_GROUP_TENSOR = 0,
    MT_GROUP_DATA = 1,
    MT_GROUP_PIPELINE = 2,
    MT_GROUP_MODEL = 3,     /* tensor x pipeline: the ranks that hold one copy of the model */
    MT_GROUP_EMBEDDING = 4, /* first and last pipeline stage, which share tied embeddings; empty on other stages */
    MT_GROUP_CONTEXT = 5,
    MT_GROUP_DATA_CONTEXT = 6 /* data x context */
} mt_group;

/* This rank's communicators and its place in the grid. mt_grid_create fills it; callers only read it. embedding is NULL
   on the stages between the first and the last. The ranks of dp_cp have the same parameters, and all tokens of a batch
   between them: they sum gradients and losses, and other comments call them data ranks. dp_cp is the communicator dp if
   cp_size is 1. This rank's number in it is cp_rank + cp_size * dp_rank. */
typedef struct mt_grid {
    mt_comm *world; /* owned by the caller */
    mt_comm *tp, *dp, *pp, *model, *embedding, *cp, *dp_cp;
    int tp_size, dp_size, pp_size, cp_size;
    int tp_rank, dp_rank, pp_rank, cp_rank;
} mt_grid;

/* Lists the group of kind `group` that contains `rank`. Writes its ranks to ranks, in ascending order, and their number
   to *count. ranks must have space for world_size entries. No communication.
   Errors, without a message: MT_ERR_ARGUMENT (a size is negative, or rank is out of range), MT_ERR_SHAPE (the product
   of the sizes is not world_size or, when dp is 0, that of the others does not divide world_size). */
MT_API mt_status mt_grid_ranks(const mt_grid_desc *desc, int world_size, mt_group group, int rank, int *ranks,
                               int *count);

/* Creates the communicators of the groups that contain this rank. desc NULL: the defaults. world must outlive the grid,
   and the grid must outlive everything that is created from it. Collective over world. Errors: those of mt_grid_ranks
   and mt_comm_split; world keeps the message (mt_comm_last_error). */
MT_API mt_status mt_grid_create(mt_comm *world, const mt_grid_desc *desc, mt_grid *out);
MT_API void mt_grid_destroy(mt_grid *grid); /* a zero-initialised grid is allowed */
