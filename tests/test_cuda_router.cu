/* test_cuda_router.cu - the router of test_router.c on a GPU.
     On a GPU:       nvcc -std=c++20 -O2 -arch=native -I. -Itests tests/test_cuda_router.cu -lcublasLt
     Without a GPU:  the engine in tests/engine/ runs the same file on a CPU. */

#define ROUTER_ON_GPU
#include "test_router.c"
