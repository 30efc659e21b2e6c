/* mt_kernels.cuh - the operators of a transformer, forward and backward, on the device of an mt_context.

   Do this:
       #define MEGATRON_IMPLEMENTATION      // in exactly one file of your program
       #include "mt_kernels.cuh"            // includes mt_comm.h; plain C99/C++11 unless nvcc compiles it
   and, for a fast GEMM, add  -DMT_USE_ONEDNN ... -ldnnl   or   -DMT_USE_CBLAS ... -lopenblas  to your compiler line.

   The comment above an operator states its formula, its shapes and where it differs from these rules:
     - Matrices are passed as mt_tensor, a row-major view (see mt_comm.h). Its leading dimension ld may exceed cols.
       Token ids, targets and lengths are int32_t arrays. These arrays and the data of views are in the memory of the
       context's device. Structs, the `host` of mt_upload and mt_download and the `hash` of mt_hash are in host memory.
     - Activations and their gradients, weights, tables, gains, biases and the matrices of a GEMM are MT_F32, MT_BF16 or
       MT_F16. The views of one call may have different types.
     - These are always MT_F32: statistics (stats, gathered, sums, lse, loss, dloss, the out of mt_sum), gradients of
       parameters (dweight, dbias, dgain, dtable, drow), and the master, grad, m and v of AdamW.
     - Scratch memory comes from the context's arena and is given back before the call returns.
     - 16-bit inputs are widened to fp32 when they are read. A 16-bit result is the fp32 result rounded once, to nearest
       even. NaN stays NaN; a value that is too large becomes infinity. For 16-bit results of activations, sigmoid, SiLU
       and the gate, a GPU computes the fp32 result with approximate functions. Its error is at most 4e-5 times the
       value, for slopes plus 2e-6. Rounding to f16 adds up to 4.9e-4 times the value. On a CPU, operators widen
       16-bit views block by block, in scratch memory that does not grow with the number of rows. Only these views have
       a whole f32 copy in it: the gain and bias of a norm, the bias of dropout, the table of rotary embeddings, the qkv
       of mt_kv_cache_append, the logits of mt_sample_candidates, and operands of mt_gemm where its comment says so.
       For each thread, attention has packed copies of the keys and values of one group of one sequence, also of f32
       views: in bf16 where it multiplies in bf16, otherwise in f32. In backward it also has their gradients, and those
       of the queries of one head, in f32, for 16-bit views.
     - Backward adds to the gradients of parameters (+=) and overwrites the gradients of activations (=).
     - To leave out an optional view, pass mt_none() (data == NULL). A view with rows == 0 or cols == 0 is allowed, and
       its data may be NULL.
     - An output must not overlap an input or another output. Most operators refuse it (MT_ERR_ARGUMENT); the others
       then compute undefined results. Where a comment says "y may be x", both may be the same view: the same memory,
       shape, ld and type.
     - Gradients of parameters are sums over tokens. A block of your own that supports invariant mode must compute
       them in the function that it passes to mt_sum_over_tokens (see docs/blocks.md).
     - Reductions run in a fixed order, so the same inputs give the same bits. Sums accumulate in fp32 or in double.
     - On MT_DEVICE_CUDA a call returns when its work is in the context's stream. mt_download, mt_hash and an mt_upload
       of more than MT_UPLOAD_BYTES (256 KiB) return when the work is done. The first GEMM of a shape may wait for the
       stream, too: see mt_gemm_choice. So may the first attention of a shape by cuDNN.
     - Any operator can return MT_ERR_ARGUMENT (a NULL pointer, a value out of range), MT_ERR_SHAPE, MT_ERR_DTYPE,
       MT_ERR_MEMORY (the arena is too small), MT_ERR_UNSUPPORTED (too large for a GPU) and MT_ERR_SYSTEM (CUDA failed).
       A call that waits for the stream can also return the errors of mt_context_synchronize. The comment above an
       operator lists its other errors. mt_last_error(ctx) has the message.
     - An operator checks its arguments before it writes. mt_linear_* run several operators one after the other: when a
       later one fails, the results of the earlier ones are already written.

   Operators do not communicate between ranks. On a CPU they run on the threads of the context (mt_parallel_for), with
   the same bits for any number of threads; mt_gemm has an exception.
   Operators allocate no memory and keep no state between calls, with two exceptions. A GEMM library may allocate
   memory. A context keeps the GEMM options and, on a GPU, cuBLASLt's handle, its workspace and the algorithms chosen so
   far. On a CPU with oneDNN it also keeps oneDNN's primitives for the last 64 shapes of 16-bit products. With
   MT_USE_CUDNN it keeps cuDNN's handle and its plans of attention for the last 64 shapes, and cuDNN may allocate
   memory.

   Macros for your compiler line: MT_USE_ONEDNN or MT_USE_CBLAS chooses the GEMM library for a CPU. With neither, a
   built-in loop computes GEMMs. oneDNN may have version 2 or 3 (tested: 2.6 and 3.2).
   MT_USE_CUDNN lets cuDNN compute the forward of attention on a GPU where it can (docs/gpus.md): link with -lcudnn.
   MT_CBLAS_HEADER names the header that declares cblas_sgemm, for instance '<mkl_cblas.h>' (default: <cblas.h>).

   The chapters for users come first. The chapters behind them, "for authors of ...", are for programs with operators,
   layers, losses, samplers or optimizers of their own.

   To add an operator, follow docs/adding-an-operator.md. For a short example, read src/ops/bias.c. */

#include "mt_comm.h" /* outside the guard: a second #include may come with MEGATRON_IMPLEMENTATION */

#ifndef MT_KERNELS_CUH
#define MT_KERNELS_CUH

#ifdef __cplusplus
extern "C" {
#endif

#include "ops/move.h"
#include "ops/gemm.h"
#include "ops/bias.h"
#include "ops/scale_add.h"
#include "ops/linear.h"
#include "ops/norm.h"
#include "ops/random.h"
#include "ops/attention.h"
#include "ops/kv_cache.h"
#include "ops/embedding.h"
#include "ops/softmax.h"
#include "ops/router.h"
#include "ops/sample.h"
#include "ops/adamw.h"
#include "ops/loss_scaler.h"
#include "ops/step.h"
#include "ops/pointwise.h"
#include "ops/gemm_packed.h"
#include "ops/attention_qkv.h"
#include "ops/cross_entropy.h"
#include "ops/softmax_shard.h"
#include "ops/sample_shard.h"
#include "ops/multi_tensor.h"
#include "ops/authors.h"

#ifdef __cplusplus
}
#endif

#endif /* MT_KERNELS_CUH */

/* ================================================== the API ends here ============================================= */

#if defined(MEGATRON_IMPLEMENTATION) && !defined(MT_KERNELS_IMPLEMENTED)
#define MT_KERNELS_IMPLEMENTED

#include "ops/system.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "ops/options.c"
#include "ops/check.c"
#include "ops/math.c"
#include "ops/math.cuh"
#include "ops/views.c"
#include "ops/views.cuh"
#include "ops/vector_loads.cuh"
#include "ops/16bit.c"
#include "ops/rows.c"
#include "ops/rows.cuh"
#include "ops/map.cuh"
#include "ops/columns.c"
#include "ops/columns.cuh"
#include "ops/random_words.c"
#include "ops/random_words.cuh"
#include "ops/panels.c"
#include "ops/amx.c"
#include "ops/ptx.cuh"
#include "ops/ptx_hopper.cuh"
#include "ops/tile.cuh"
#include "ops/numbers.c"
#include "ops/operator.c"
#include "ops/fill.cuh"
#include "ops/fill.c"
#include "ops/copy.cuh"
#include "ops/copy.c"
#include "ops/add.cuh"
#include "ops/add.c"
#include "ops/hash.cuh"
#include "ops/hash.c"
#include "ops/sum.cuh"
#include "ops/sum.c"
#include "ops/gemm.c"
#include "ops/bias.cuh"
#include "ops/bias.c"
#include "ops/activation.c"
#include "ops/linear.c"
#include "ops/norm.cuh"
#include "ops/norm.c"
#include "ops/random_normal.cuh"
#include "ops/random_normal.c"
#include "ops/dropout.c"
#include "ops/attention_desc.c"
#include "ops/attention_cpu.c"
#include "ops/attention_plain.cuh"
#include "ops/attention_flash.cuh"
#include "ops/attention_cudnn.cuh"
#include "ops/attention_hopper.cuh"
#include "ops/attention_hopper_back.cuh"
#include "ops/attention_choice.cuh"
#include "ops/attention.c"
#include "ops/attention_merge.c"
#include "ops/rotary.cuh"
#include "ops/rotary.c"
#include "ops/kv_cache.c"
#include "ops/kv_lengths.c"
#include "ops/ids.cuh"
#include "ops/ids.c"
#include "ops/embedding.cuh"
#include "ops/embedding.c"
#include "ops/cross_entropy.c"
#include "ops/softmax.c"
#include "ops/sample.c"
#include "ops/adamw.c"
#include "ops/multi_tensor.c"
#include "ops/step.c"
#include "ops/pointwise.c"
#include "ops/router.c"
#include "ops/scale_add.cuh"
#include "ops/scale_add.c"
#include "ops/tables.c"

#ifdef __cplusplus
}
#endif

#if defined(__clang__)
#pragma clang diagnostic pop
#endif
#if MT_PREFER_512
#pragma GCC pop_options
#endif

#endif /* MEGATRON_IMPLEMENTATION */
