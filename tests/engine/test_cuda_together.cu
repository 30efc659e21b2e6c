/* Six test programs in one file, so that the kernels, which take a compiler most of the time, are compiled only once:
   test_cuda, whose small grids are then those of all six, and what needs private functions of mt_kernels.cuh. The
   program runs the test whose name it has: CMake links test_cuda_flash and the others to test_cuda. Each is also a
   program of its own, see gpu.sh. */

#include "core.h" // outside of the namespaces, as all headers

#define main test_cuda
#include "../test_cuda.cu"
#undef main

namespace flash {
#define main test_cuda_flash
#include "../test_cuda_flash.cu"
#undef main
#undef OK
} // namespace flash

namespace gemm {
#define main test_cuda_gemm
#include "../test_cuda_gemm.cu"
#undef main
#undef OK
} // namespace gemm

namespace operators {
#define main test_cuda_operators
#include "../test_cuda_operators.cu"
#undef main
} // namespace operators

namespace ptx {
#define main test_cuda_ptx
#include "../test_cuda_ptx.cu"
#undef main
} // namespace ptx

namespace router {
#define main test_cuda_router
#include "../test_cuda_router.cu"
#undef main
#undef OK
} // namespace router

int main(int argc, char **argv) {
    const char *slash = argc > 0 ? strrchr(argv[0], '/') : NULL, *name = slash ? slash + 1 : argc > 0 ? argv[0] : "";
    if (strcmp(name, "test_cuda_flash") == 0) return flash::test_cuda_flash();
    if (strcmp(name, "test_cuda_gemm") == 0) return gemm::test_cuda_gemm();
    if (strcmp(name, "test_cuda_operators") == 0) return operators::test_cuda_operators();
    if (strcmp(name, "test_cuda_ptx") == 0) return ptx::test_cuda_ptx();
    if (strcmp(name, "test_cuda_router") == 0) return router::test_cuda_router();
    return test_cuda();
}
