/* megatron.h - Megatron-style parallel transformer building blocks for your own training loop, in C. Header-only.

   Do this:
       #define MEGATRON_IMPLEMENTATION      // in exactly one file of your program: a .c, .cpp or .cu
       #include "megatron.h"                // the other files need only this line
       cc -O3 -march=native -I. yours.c -lm -lpthread          (add -DMT_USE_ONEDNN -ldnnl for a fast GEMM)
       nvcc -O3 -arch=native -I. -DMT_USE_NCCL yours.cu -lcublasLt -lnccl   (on GPUs, see docs/gpus.md)

   This program trains a small GPT on 2 ranks. examples/01_mlp.c also shows how to destroy every object.

    #define MEGATRON_IMPLEMENTATION                           // in exactly one file of the program
    #include "megatron.h"
    #include <stdio.h>
    static mt_status train(mt_comm *world, void *tokens) {    // every rank runs this: here, a thread
        mt_context *ctx; mt_grid grid; mt_params *params; mt_gpt gpt; mt_gpt_saved saved; mt_optimizer adam;
        mt_grid_desc shape = {.tp = 2};                   // 2-way tensor parallel; data parallel over the rest
        mt_gpt_desc model = {.vocab = 10, .layers = 2, .max_seq = 4, .layer = {.hidden = 64, .heads = 4}};
        mt_batch batch = {.sequences = 1, .seq = 4}; int32_t *ids = tokens; float loss[4];
        MT_TRY(mt_context_create(world, NULL, &ctx));         // NULL: on the CPU, with the defaults
        MT_TRY(mt_grid_create(world, &shape, &grid)); MT_TRY(mt_params_create(ctx, &grid, &params));
        MT_TRY(mt_gpt_create(ctx, params, &model, &gpt));     // this rank's shard of the weights
        MT_TRY(mt_params_init(ctx, params, 1234));            // the same model on any number of ranks
        MT_TRY(mt_gpt_saved_create(ctx, &gpt, &saved)); MT_TRY(mt_optimizer_create(ctx, params, NULL, &adam));
        for (size_t step = 0, mark = mt_arena_mark(ctx); step < 50; step++, mt_arena_release(ctx, mark)) {
            MT_TRY(mt_params_zero_grad(ctx, params));
            MT_TRY(mt_gpt_forward(ctx, &gpt, &batch, ids, ids + 1, mt_tensor_f32(loss, 1, 4), &saved));
            MT_TRY(mt_gpt_backward(ctx, &gpt, 1.0f / 4, &saved));        // 1 / tokens of all data parallel ranks
            MT_TRY(mt_sync_gradients(ctx, params));                      // summed over the data parallel ranks
            MT_TRY(mt_optimizer_step(ctx, &adam, 3e-3f, 1.0f));          // AdamW: learning rate 0.003, gradients * 1
            if (mt_comm_rank(world) == 0) printf("%2zu: %.4f\n", step, (loss[0] + loss[1] + loss[2] + loss[3]) / 4.0);
        }
        return MT_SUCCESS;
    }
    int main(void) { int32_t pi[] = {3, 1, 4, 1, 5}; mt_launch_desc d = {.ranks = 2}; return mt_launch(&d, train, pi); }

   The library has four headers. Each includes those below it in this list and works without those above it:
       megatron.h       self- and cross-attention, MLP, transformer layer, GPT, BERT, checkpoints (this header)
       mt_parallel.h    process grid, parameters, column- and row-parallel linear, vocabulary-parallel embedding and
                        loss, AdamW, pipelines, checkpoints
       mt_kernels.cuh   the operators, forward and backward
       mt_comm.h        contexts, communicators, collectives, Megatron's conjugates f and g, mt_launch
   In each header the chapters for users come first. Behind them are the chapters whose titles end in "for authors of
   ...": read them when you write such things of your own.

   Step by step. A program does this in this order. Each step names its calls, and the header and the section of its
   comments to read.
    1. Start the ranks: as threads with mt_launch, or as processes of mpirun, torchrun or Slurm with mt_world_from_env
       (mt_comm.h, "launch").
    2. Create a context on each rank, with the device, the threads and the arena: mt_context_create (mt_comm.h,
       "context").
    3. Arrange the ranks in tensor, data and pipeline groups: mt_grid_create (mt_parallel.h, "process grid").
    4. Create the registry of the parameters, and set their type: mt_params_create, mt_params_set_dtype (mt_parallel.h,
       "parameters").
    5. Create the model: mt_gpt_create (megatron.h, "GPT"), mt_bert_create (megatron.h, "BERT"), layers
       (megatron.h, "transformer layer"), or linear layers of a block of your own (mt_parallel.h, "column- and
       row-parallel linear").
    6. Give the weights their values: mt_params_init draws them, mt_checkpoint_import reads a model of Hugging Face
       (mt_parallel.h, "checkpoints").
    7. Create the optimizer: mt_optimizer_create (mt_parallel.h, "optimizer"). With f16, mt_step_create also keeps the
       loss scale (mt_parallel.h, "a step that does not wait").
    8. For each micro-batch, describe its sequences in an mt_batch (megatron.h, "batch"), and call the forward and the
       backward of the model. Release the arena.
    9. Sum the gradients over the ranks, and clip them by their norm: mt_sync_gradients, mt_grad_norm (mt_parallel.h,
       "gradients"). Then call mt_optimizer_step and, for the next step, mt_params_zero_grad.
   10. Save and resume: mt_gpt_checkpoint_create (megatron.h, "checkpoints of a GPT"), mt_checkpoint_save and
       mt_checkpoint_load (mt_parallel.h, "checkpoints").

   If the program
       is wrong, or hangs       check 1 or 2 in mt_context_desc (docs/checking.md); find the first tensor that differs
                                between two runs (mt_parallel.h, "hash log")
       does not fit             sequence_parallel and recompute (megatron.h, "transformer layer"), a sharded_optimizer
                                (mt_parallel.h, "parameters"), stages (mt_parallel.h, "pipeline")
       is too slow              docs/performance.md, docs/gpus.md; CUDA graphs (mt_comm.h, "CUDA graphs")
       needs a bigger machine   processes over NCCL or MPI (docs/many-ranks.md); predict memory and step time first
                                (docs/planning.md)
       must give the same bits  on any number of ranks: invariant in mt_context_desc (mt_parallel.h, "invariant mode")
       generates text           a key/value cache and sampling (docs/inference.md)
       has layers of its own    f and g (mt_comm.h, "the conjugates f and g"), the operators of mt_kernels.cuh, the
                                chapters for authors at the end of each header, docs/blocks.md
       keeps its own buffers    mt_params_bind (mt_parallel.h, "parameters"), or layers of your tensors without a
                                registry (docs/own-weights.md)

   A transformer layer communicates as in Megatron-LM (arXiv 1909.08053): forward does 2 all-reduces of [tokens,
   hidden], and backward does 2. With sequence parallelism (arXiv 2205.05198) a layer does all-gathers and
   reduce-scatters instead. Every communicator counts its collectives and their bytes (mt_comm_ledger).

   The library does not own your loop, your tensors or your process. It has no globals, and it never exits or aborts.
   It opens only checkpoints, and the safetensors and JSON files that you name. It allocates no memory after setup
   (create functions, mt_params_init, mt_params_bind, mt_params_pack, mt_graph_end), except while the files of a
   checkpoint are open, and for a hash log (mt_hash_log), which is for debugging.

   Shapes:  Activations are [tokens, features]. When each sequence has seq tokens, the token at position p of sequence
            s is row s * seq + p. Weights are [out, in], as in PyTorch. t is the number of tensor parallel ranks. With
            sequence parallelism a block's input and output are [tokens / t, features] on each tensor rank: rank r has
            the tokens / t rows that begin at row r * tokens / t. t must then divide tokens; otherwise a call returns
            MT_ERR_SHAPE.
   Descs:   Structs named mt_..._desc may be zero-initialised. "0: x" in the comment of a field means that 0 selects x.
            Where the comment names MT_ZERO, this constant sets the field to zero (mt_comm.h, "defaults").
   Memory:  The registry (mt_params) owns the parameters and their gradients. A block is a struct in your memory and
            needs no destroy. Forward keeps what backward needs in a `saved` struct: tensors in the context's arena, and
            views of your tensors. Do not release, free or change any of them before backward has returned.
   Types:   A model is f32, or bf16 or f16 after mt_params_set_dtype (mt_parallel.h). Parameter gradients, master
            weights and the loss are always f32.
   Errors:  Every call that can fail returns an mt_status. MT_TRY(call) makes the calling function return the status if
            it is an error. mt_last_error(ctx) returns a message with the offending values. Blocks return the errors of
            the layers and operators in them, which the heads of mt_parallel.h and mt_kernels.cuh list. The comment of
            a function says only what is special to it. After an error of a create function, the registry is as before.
   Threads: One thread of a rank calls the library. It has a context, communicators and a registry of its own; the
            context has the threads that compute on a CPU.
   Macros:  mt_comm.h lists those that configure the implementation. */

#include "mt_parallel.h" /* outside the guard: a second #include may add the implementation */

#ifndef MEGATRON_H
#define MEGATRON_H

#ifdef __cplusplus
extern "C" {
#endif

#include "blocks/batch.h"
#include "blocks/mlp.h"
#include "blocks/attention.h"
#include "blocks/cross.h"
#include "blocks/layer.h"
#include "models/model.h"
#include "models/gpt.h"
#include "models/bert.h"
#include "models/flops.h"
#include "models/checkpoint.h"
#include "blocks/authors.h"
#include "blocks/weights.h"

#ifdef __cplusplus
}
#endif

#endif /* MEGATRON_H */

/* ================================================== the API ends here ============================================= */

#if defined(MEGATRON_IMPLEMENTATION) && !defined(MEGATRON_IMPLEMENTED)
#define MEGATRON_IMPLEMENTED

#ifdef __cplusplus
extern "C" {
#endif

#include "blocks/mlp.c"
#include "blocks/attention_layers.c"
#include "blocks/attention_core.c"
#include "blocks/attention_cached.c"
#include "blocks/attention.c"
#include "blocks/cross.c"
#include "blocks/layer.c"
#include "blocks/weights.c"
#include "models/model.c"
#include "models/gpt.c"
#include "models/bert.c"
#include "models/flops.c"
#include "models/checkpoint.c"
#include "models/names.c"
#include "models/config.c"
#include "models/layer_types.c"
#include "models/config_values.c"
#include "models/metadata.c"

#ifdef __cplusplus
}
#endif

#endif /* MEGATRON_IMPLEMENTATION */
