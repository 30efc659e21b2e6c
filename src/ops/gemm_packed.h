/* ---- GEMM: packed weights, for authors of layers ----------------------------------------------------------------- */

#pragma once
#include "../comm/context.h"

/* Creates cuBLASLt's handle and a workspace of 32 MiB on a GPU. Without this call, the first product creates them.
   mt_params_create (mt_parallel.h) calls it for you. Products in an overlap have a workspace of their own: call this
   function there, too, between mt_overlap_begin and mt_overlap_end. On other devices it does nothing. */
MT_API mt_status mt_gemm_prepare(mt_context *ctx);

/* mt_gemm_pack makes a packed copy of weight [out, in], for products x weight^T of inference. A GEMM library on a CPU
   copies parts of a weight into a layout of its own in every product; with few tokens this takes a large part of the
   time. Later calls of mt_gemm with this context read the packed copy instead of weight when all of these hold:
     - a is not transposed, b is transposed, alpha is 1 and beta is 0, as in mt_linear_forward;
     - b is weight, with the same data, type, rows, cols and ld; a view of some of its rows is another matrix;
     - with oneDNN, a has the type of weight, c this type or MT_F32, and an f32 product has at most 256 rows, because
       more rows are as fast without packing. oneDNN 2 also needs an a without padding: its ld is its cols.
   Products with the few rows of decoding read weight itself, as they do without packing. mt_params_pack (mt_parallel.h)
   packs the weights of a model. It is the usual way to call this function.
   Size of the copy: for the built-in loop, 4 in bytes for each of the out features, rounded up to a multiple of at most
   32 features. For oneDNN, as many bytes as weight, with out and in rounded up to the blocks of oneDNN (in version 2.6
   with AVX-512 to multiples of 64 and 16). It is allocated with mt_context_alloc, so a dry run (MT_DEVICE_META) counts
   it. The context owns the copy, until mt_gemm_unpack or until it is destroyed. weight itself is still needed.
   A copy must not be older than its weight. Each operator of this header that writes to memory of weight drops the
   copy, if it runs with this context; products then read weight again. After anything else has written to weight, such
   as your own code, another context or a collective, call mt_gemm_pack again. Call mt_gemm_unpack before you free
   weight.
   Results: those of mt_gemm without packing. With the built-in loop they have the same bits, with oneDNN they may round
   differently.
   The call does nothing where packing has no use: on a GPU, with CBLAS, in invariant mode, and where oneDNN has no
   layout of its own for this type and processor.
   Errors: MT_ERR_MEMORY, and MT_ERR_UNSUPPORTED (a size is above 2^31 - 1). weight then has no packed copy. */
MT_API mt_status mt_gemm_pack(mt_context *ctx, mt_tensor weight);

/* Drops the packed copies of all matrices that share memory with weight, if there are any. ctx may be NULL. */
MT_API void mt_gemm_unpack(mt_context *ctx, mt_tensor weight);
