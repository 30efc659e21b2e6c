/* test_context_any_gemm.c - runs the tests of invariant mode in test_context.c with a GEMM that rounds differently for
   every size, leading dimension and alignment, instead of the GEMM library of the other tests.
       cc -std=gnu17 -O2 -I. tests/test_context_any_gemm.c -lpthread -lm */

#undef MT_USE_ONEDNN
#undef MT_USE_CBLAS
#define MT_USE_CBLAS
#define MT_CBLAS_HEADER "tests/adversarial_blas.h"
#define INVARIANT_MODE_ONLY 1

#include "test_context.c"
