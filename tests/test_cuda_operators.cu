/* test_cuda_operators.cu - the operators of test_operators.c on a GPU: values, types, refusals, in place.
     On a GPU:       nvcc -std=c++20 -O2 -arch=native -I. -Itests tests/test_cuda_operators.cu -lcublasLt
     Without a GPU:  the engine in tests/engine/ runs the same file on a CPU. */

#define OPERATORS_ON_GPU
#include "test_operators.c"
