/* mt_parallel.h - process grid, parallel parameters, column- and row-parallel linear, vocabulary-parallel embedding and
   cross-entropy, gradient sync and norm, AdamW, pipelines, checkpoints.

   Do this (every rank; world and ctx are from mt_comm.h):
       mt_grid grid;        mt_grid_desc shape = {.tp = 8};             // data ranks: world size / 8
       mt_params *params;   MT_TRY(mt_grid_create(world, &shape, &grid));
                            MT_TRY(mt_params_create(ctx, &grid, &params));
       mt_column_parallel_linear fc; mt_linear_desc d = {.in_features = 1024, .out_features = 4096};
                            MT_TRY(mt_column_parallel_linear_create(ctx, params, "fc", &d, &fc));
                            MT_TRY(mt_params_init(ctx, params, 1234));      // allocates and fills all parameters
       ... forward, backward ...                  // optional: mt_sync_gradients_begin before the last backward
                            MT_TRY(mt_sync_gradients(ctx, params));

   Layers are small structs in the caller's memory. They need no destroy, because the registry (mt_params) owns their
   parameters. Values and gradients may be in memory of the caller (mt_params_bind). Forward keeps what backward needs
   in a `saved` struct: tensors in the arena, and views of tensors that the caller passed (x, ids, targets). The caller
   must not release (mt_arena_release), free or change any of them before backward has returned. With saved == NULL
   forward is inference and keeps nothing. A forward with `saved` does not need to have a backward; see mt_arena_mark
   for a loop that decides later. Backward adds to parameter gradients and overwrites activation gradients.

   A registry knows what was done with its gradients. In each step they are zeroed (mt_params_zero_grad or
   mt_params_zero_grad_lazy), added to (by backward; in invariant mode also mt_accumulate_gradients), summed over ranks
   (mt_sync_gradients), and used (by one step of the optimizer). A call in another order is MT_ERR_ARGUMENT before it
   touches or sends data. The message names a parameter and the call that is missing. Ranks that have nothing to sum do
   not need mt_sync_gradients. A program may also write to param->grad by hand, which the registry does not see. From
   the first call on that is recorded in a CUDA graph, nothing is refused: the step that runs before it is checked.
   Layers of tensors have no registry.

   Names: A create function gets the layer's name. The parameters are then called NAME.weight and so on. The name of a
   parameter decides its random numbers (mt_params_init) and is its key in checkpoints. With name NULL a layer is called
   layer.N, and a parameter without a layer param.N: layer.0, layer.1, ... in the order of creation. N is one more than
   the largest N in use in the registry. A program that changes the order of creation thus gets other random numbers and
   cannot load its old checkpoints. With several pipeline stages NULL is MT_ERR_ARGUMENT, because each stage has a
   registry of its own: the stages would use the same names, and draw the same numbers. A name is on one stage only,
   except that of a shared embedding. (With mt_context_desc.check == 2, mt_params_init and mt_params_bind compare the
   names of the first and the last stage.)

   An output must not overlap an input or another output, and dx must not overlap a tensor of `saved`, except where a
   comment allows it. Most such overlaps are MT_ERR_ARGUMENT; with the others the results are undefined.

   Communication is inside the layers: a column-parallel layer contains Megatron's conjugate f, and a row-parallel layer
   contains g. Code between the two layers does not need to communicate. mt_comm.h also has f and g as separate
   functions.

   Shapes: t is the number of tensor ranks. "local features" are this rank's share of a split dimension. Global shapes
   never include padding. A dimension that t does not divide is padded with zeros. The padding stays zero, because its
   gradients are zero. A vocabulary that you have padded yourself has its size in a field beside the true size, see
   mt_embedding_desc.padded_vocab.

   A tensor may be a view with ld > cols. But a tensor that the call sends to other tensor ranks must be contiguous;
   otherwise the call returns MT_ERR_SHAPE before it computes anything. Layers send:
       always                        y of a row-parallel layer and of an embedding, dx of a column-parallel layer
       with sequence parallelism     also x of a column-parallel layer, dy of a row-parallel layer and of an embedding

   The chapters for users come first. Behind them are the chapters whose titles end in "for authors of ...": read them
   when you write such things of your own.

   This header has no transformer (megatron.h has one), does not run your loop and does not average losses.
   mt_sync_gradients sums over the data group, so scale your loss by 1 / (tokens of the whole global batch). The library
   opens only checkpoints, and the safetensors and JSON files that you name.

   Structs named mt_..._desc may be zero-initialised. "0: x" in the comment of a field means that 0 selects x. Where
   the comment names MT_ZERO, this constant sets the field to zero (mt_comm.h, "defaults").

   Errors: A call with a context can return MT_ERR_ARGUMENT (a NULL pointer, a value or a combination of fields that is
   not allowed), MT_ERR_SHAPE, MT_ERR_DTYPE and MT_ERR_MEMORY. Calls that compute can also return the errors of the
   operators (see the head of mt_kernels.cuh). Calls that communicate can also return those of the collectives (see
   mt_comm.h). mt_last_error(ctx) has the message. The comment of a function says only what is special to it. The create
   functions of layers, which add parameters, also return the errors of mt_params_add. After an error of a create
   function, the registry is as before. */

/* This #include is outside the guard, so that a second #include of this file, with MEGATRON_IMPLEMENTATION, also
   reaches mt_kernels.cuh and mt_comm.h. */
#include "mt_kernels.cuh"

#ifndef MT_PARALLEL_H
#define MT_PARALLEL_H

#ifdef __cplusplus
extern "C" {
#endif

#include "parallel/grid.h"
#include "parallel/invariant.h"
#include "parallel/options.h"
#include "parallel/params.h"
#include "parallel/linear.h"
#include "parallel/norm.h"
#include "parallel/vocab.h"
#include "parallel/sync.h"
#include "parallel/optimizer.h"
#include "parallel/step.h"
#include "parallel/pipeline.h"
#include "parallel/hash_log.h"
#include "files/checkpoint.h"
#include "plan/plan.h"
#include "parallel/authors.h"
#include "parallel/context.h"
#include "parallel/softmax.h"
#include "parallel/state.h"
#include "files/safetensors.h"
#include "files/fields.h"
#include "files/formats.h"
#include "plan/authors.h"

#ifdef __cplusplus
}
#endif

#endif /* MT_PARALLEL_H */

/* ================================================== the API ends here ============================================= */

#if defined(MEGATRON_IMPLEMENTATION) && !defined(MT_PARALLEL_IMPLEMENTED)
#define MT_PARALLEL_IMPLEMENTED

#include "parallel/system.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "parallel/options.c"
#include "parallel/grid.c"
#include "parallel/invariant.c"
#include "parallel/params.c"
#include "parallel/sharding.c"
#include "parallel/memory.c"
#include "parallel/guard.c"
#include "parallel/init.c"
#include "parallel/settings.c"
#include "parallel/bind.c"
#include "parallel/gradients.c"
#include "parallel/scatter.c"
#include "parallel/hash_log.c"
#include "parallel/linear.c"
#include "parallel/linear_tensors.c"
#include "parallel/norm.c"
#include "parallel/vocab.c"
#include "parallel/context.c"
#include "parallel/softmax.c"
#include "parallel/sample.c"
#include "parallel/buckets.c"
#include "parallel/sync.c"
#include "parallel/optimizer.c"
#include "parallel/pipeline.c"
#include "files/json.c"
#include "files/files.c"
#include "files/safetensors.c"
#include "files/fields.c"
#include "files/checkpoint.c"
#include "files/save.c"
#include "files/load.c"
#include "plan/plan.c"

#ifdef __cplusplus
}
#endif

#endif /* MEGATRON_IMPLEMENTATION */
