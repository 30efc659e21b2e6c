/* ---- GEMM -------------------------------------------------------------------------------------------------------- */

#pragma once
#include "../comm/context.h"

typedef enum mt_transpose { MT_NO_TRANS = 0, MT_TRANS = 1 } mt_transpose;

/* C [m, n] = alpha op(A) op(B) + beta C, with op(A) [m, k] and op(B) [k, n]. op(A) is A, or A^T with MT_TRANS. With
   beta == 0, C is not read. On a CPU in f32, with random inputs, the tests measure that an element differs from the
   exact one by at most (2 + sqrt(k)) * 6e-8 times the sum of the absolute values of its k products.
   On a CPU, oneDNN reads a and b in 16 bits, without f32 copies, if all of these hold: they have the same type, C has
   this type or MT_F32, alpha is 1, and the processor has instructions for the type (AVX512-BF16 or AMX for bf16; f16
   needs oneDNN 3, and AVX512-FP16 or AMX-FP16). The sums are in f32, and the scratch memory is what oneDNN asks for.
   These instructions read denormal bf16 numbers as 0. All other 16-bit products have the same bits as products of f32
   copies. With oneDNN and CBLAS the scratch memory has these copies. The built-in loop copies only a 16-bit C.
   A product A B^T with few rows m, as in decoding, reads B once, in its own type. With one row, memory is the limit. It
   copies only a 16-bit A and C. "Few" is up to 8 rows, or 4 where oneDNN would read a and b in 16 bits. This needs gcc
   or clang, and k of at least 32.
   The threads of the context share a product (mt_context_desc.threads). A GEMM library computes each part on one
   thread. With the built-in loop, the bits of a row of C depend neither on m nor on the number of threads. With oneDNN
   and CBLAS they depend on neither for these few m, but a larger m may round differently, also in invariant mode, and
   so may another number of threads. With oneDNN the bits of 16-bit products also depend on the leading dimensions: for
   invariant mode see mt_invariant_input in mt_parallel.h.
   Error: MT_ERR_UNSUPPORTED (m, n, k or an ld is above 2^31 - 1). */
MT_API mt_status mt_gemm(mt_context *ctx, mt_transpose trans_a, mt_transpose trans_b, float alpha, mt_tensor a,
                         mt_tensor b, float beta, mt_tensor c);

/* Says how a context on a GPU chooses the cuBLASLt algorithm of a product. cuBLASLt's heuristic proposes algorithms for
   each shape (sizes, leading dimensions, types, transposes). The context chooses one in the first product of a shape
   and keeps it. MEASURED and HEURISTIC give the same bits.
   MEASURED:  the fastest of the proposals whose result has the same bits as that of the first one. The measurement
              uses free memory of the arena and waits for the stream. When it cannot run (see docs/gpus.md), the
              context takes the first proposal.
   HEURISTIC: the first proposal, without a measurement. */
typedef enum mt_gemm_choice { MT_GEMM_MEASURED = 0, MT_GEMM_HEURISTIC = 1 } mt_gemm_choice;

/* Says how a context on a GPU runs mt_linear_*. In 16 bits, SEPARATE and FUSED round differently.
   SEPARATE: a product, and separate kernels for bias, activation and bias gradient. Invariant mode always uses this.
   FUSED:    one product with a cuBLASLt epilogue. Products without such an epilogue use SEPARATE (see docs/gpus.md).
   MEASURED: for each shape, the faster of the two, measured in the first product of the shape. Two runs may therefore
             differ in the last bit. When the measurement cannot run (see docs/gpus.md), the shape uses SEPARATE. */
typedef enum mt_epilogue { MT_EPILOGUE_SEPARATE = 0, MT_EPILOGUE_FUSED = 1, MT_EPILOGUE_MEASURED = 2 } mt_epilogue;

/* Options for the products of a context. Zero-initialise for the defaults. */
typedef struct mt_gemm_options {
    mt_gemm_choice choice;
    mt_epilogue epilogue;
} mt_gemm_options;

/* mt_gemm_set_options sets the options; NULL restores the defaults. Call it before the first product: a shape that has
   already run keeps its algorithm. mt_gemm_get_options returns the options; in invariant mode, epilogue is always
   MT_EPILOGUE_SEPARATE. Errors: MT_ERR_ARGUMENT (an option is out of range), MT_ERR_MEMORY. */
MT_API mt_status mt_gemm_set_options(mt_context *ctx, const mt_gemm_options *options);
MT_API mt_gemm_options mt_gemm_get_options(const mt_context *ctx);

/* Returns the name of the GEMM library for MT_DEVICE_CPU: "oneDNN 2.6.3" (with its version), "CBLAS" or "built-in". The
   string is static. */
MT_API const char *mt_gemm_library(void);
