/* ---- invariant mode ---------------------------------------------------------------------------------------------- */

#pragma once
#include "../comm/api.h"

/* mt_context_desc.invariant = V, a power of two, turns invariant mode on; 0 turns it off. In this mode a training step
   computes the same bits on every grid with 1, 2, 4, ..., V tensor ranks, 1, 2, 4, ..., V_d data ranks and any number
   of pipeline stages, with and without sequence parallelism. V_d is mt_context_desc.invariant_data, by default V. "The
   same bits" applies to the loss, the gradients, their norm, the weights and the optimizer state.
   Every split dimension is divided into V virtual shards of the same size, with padding where necessary. Each of t
   tensor ranks has V / t of them. With mt_parallel_options.context.invariant = V_c it computes the same bits on 1, 2,
   4, ..., V_c context ranks, too: each of n has the tokens of V_c / n virtual context ranks.
   docs/invariance.md says how this works, what it costs, and which blocks of your own it covers.

   The mode has these rules:
     tokens           The number of tokens in a training call (forward with saved, and its backward) must be a multiple
                      of V for each virtual context rank; otherwise MT_ERR_SHAPE.
     heads            Attention must have at least V query heads; otherwise MT_ERR_SHAPE.
     micro-batches    A micro-batch must have mt_invariant_micro_batch sequences. Call mt_accumulate_gradients after the
                      backward of each micro-batch. Use each layer only once in a micro-batch.
     parts > 1        In a layer with several parts (mt_linear_desc.parts), each virtual shard has its share of every
                      part. With the parts gate and up, the columns of a rank are gate and up of its first shard, then
                      gate and up of its second shard, and so on. Call mt_column_parallel_activation_forward, or call
                      your own operator once for each shard (mt_shard_cols), and set mt_linear_desc.parts_by_shard.
                      Without parts_by_shard the layer's create returns MT_ERR_ARGUMENT. */

/* Returns the number of sequences in a micro-batch of invariant mode. `sequences` is the number of sequences in the
   whole step, on all data ranks together, and data_shards is V_d (mt_context_invariant_data). A step has n
   micro-batches of sequences / n sequences, where n is the largest power of two that is at most V_d and divides
   `sequences`. At most n data ranks can share the step. Data rank d of D runs micro-batches d * n / D to (d + 1) * n /
   D - 1, in this order. Micro-batch i has the sequences / n sequences from i * sequences / n on. */
MT_API int64_t mt_invariant_micro_batch(int data_shards, int64_t sequences);
