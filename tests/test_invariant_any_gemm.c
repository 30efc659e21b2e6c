/* test_invariant_any_gemm.c - runs test_invariant.c with a GEMM that rounds differently for every size, leading
   dimension and alignment, instead of the GEMM library of the other tests.
       cc -std=gnu17 -O2 -I. tests/test_invariant_any_gemm.c -lpthread -lm */

#undef MT_USE_ONEDNN
#undef MT_USE_CBLAS
#define MT_USE_CBLAS
#define MT_CBLAS_HEADER "tests/adversarial_blas.h"
#define SMALL_MODELS_ONLY 1

#include "test_invariant.c"
