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

/* How the keys and values of other context ranks get to the queries, by Megatron-LM's names (cp_comm_type). */
typedef enum mt_cp_comm_type {
    MT_CP_AUTO = 0,       /* see docs/context.md */
    MT_CP_P2P = 1,        /* a ring: each rank sends what it has to the next one, while it computes */
    MT_CP_ALL_GATHER = 2, /* each rank gathers all keys and values first */
    MT_CP_A2A = 3         /* each rank gets all tokens of some heads (Ulysses, arXiv 2309.14509) */
} mt_cp_comm_type;
#define MT_CP_COMM_TYPE_WORDS "MT_CP_AUTO MT_CP_P2P MT_CP_ALL_GATHER MT_CP_A2A" /* see mt_check_enum */

/* Attention of sequences of which each of n ranks has a part, for mt_context_parallel_attention_forward. A sequence has
   2 n chunks, and rank r has the chunks r and 2 n - 1 - r, so that all ranks have equally much to do under a causal
   mask (zigzag). q, k and v of a rank have the rows [2, batch, seq / (2 n)]: chunk r of each sequence, then chunk
   2 n - 1 - r of each. With `contiguous`, a rank has chunk r of n, and the rows are [batch, seq / n]. One rank has the
   rows [batch, seq]. See mt_context_parallel_token. */
typedef struct mt_context_parallel_desc {
    mt_cp_comm_type comm_type; /* 0: MT_CP_AUTO */
    int contiguous;            /* 1: rank r has the tokens [r seq / n, (r + 1) seq / n) of each sequence */
    /* 1: k and v have the rows [batch, kv_seq] on each rank, the same on all of them, as of a memory that is not
       divided. Then nothing is communicated, comm_type has no effect, and dk and dv are terms of sums over the ranks */
    int whole_keys;
    /* Only in invariant mode: runs on 1, 2, 4, ..., or V_c context ranks give the same bits. V_c is a power of two.
       With any number n of ranks the tokens are those of V_c ranks: rank r has those of the ranks r V_c / n to
       (r + 1) V_c / n - 1, one after the other, also if n is 1. Keys and values are gathered, and whole_keys must be 0.
       0: 1 */
    int invariant;
} mt_context_parallel_desc;

/* Returns which token of a batch of whole sequences [batch, seq] is row `row` of context rank `rank` of `size` ranks:
   token i is number i % seq of sequence i / seq. So a program fills the rows of a rank:
       for (row = 0; row < batch * seq / size; row++) {
           i = mt_context_parallel_token(context, rank, size, batch, seq, row);
           ids[row] = all_ids[i];
           targets[row] = all_targets[i];
           positions[row] = i % seq;
       }
   Shift the targets of whole sequences, not those of a rank: the token after the last one of a chunk is on another
   rank. rank and size are cp_rank and cp_size of mt_grid. context NULL: all of its fields 0. It does not communicate.
   Returns -1 if an argument is out of range, if 2 * size (with `contiguous` size, and with `invariant` V_c instead of
   size) does not divide seq, or if size does not divide V_c. */
MT_API int64_t mt_context_parallel_token(const mt_context_parallel_desc *context, int rank, int size, int64_t batch,
                                         int64_t seq, int64_t row);
