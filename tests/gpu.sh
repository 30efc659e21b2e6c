#!/bin/sh
# The CUDA tests on a real GPU: what tests/cuda.sh executes on a CPU, built by nvcc.
#
#   sh tests/gpu.sh             one line per program, closing line "N passed, N failed, N skipped"; 77: there is no GPU
#   sh tests/gpu.sh --build     only builds them, for any GPU from sm_80 on, which takes none
#
# First what the engine cannot vouch for, the wrapper of each PTX instruction and each epilogue of cuBLASLt; then everything else, with
# ranks that share the GPU. Needs nvcc, cuBLASLt and NCCL.
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
build=${MT_BUILD_DIR:-build}/gpu
mkdir -p "$build" || exit 1
build=$(cd "$build" && pwd)
check_log=$build/check.log check_lines=40

# gpu_build PROGRAM [FLAGS [LIBRARIES]]
gpu_build() {
    # shellcheck disable=SC2086  # lists of flags
    nvcc -std=c++17 -O2 $arch -I. ${2:-} "tests/$1.cu" -o "$build/$1" -lcublasLt ${3:-}
}

gpu_test() { gpu_build "$@" && timeout -k 10 600 "$build/$1"; }

# Programs that use nothing but what the headers declare share the implementation: it takes longer to build than they do.
gpu_implementation() { nvcc -x cu -std=c++17 -O2 $arch -I. -c tests/package/implementation.c -o "$build/implementation.o"; }
shared() { "$1" "$2" "$DECLARATIONS_ONLY" "$build/implementation.o"; }

if [ "${1:-}" = --build ]; then
    have_command nvcc || { echo "nvcc is not here, nothing was built"; exit 77; }
    each=gpu_build arch="-gencode arch=compute_80,code=compute_80" # the driver makes the rest
else
    each=gpu_test arch=-arch=native
    need_gpu "$build" "nothing was tested"
fi
check "the wrappers of PTX instructions" $each test_cuda_ptx
check "the implementation builds" gpu_implementation
check "GEMM, its epilogues and the choice of algorithms" shared $each test_cuda_gemm
check "operators, contexts and collectives against the CPU" $each test_cuda
check "attention on tensor cores against the CPU" $each test_cuda_flash
check "several GPUs in one process" shared $each test_cuda_devices
check "NCCL" $each test_cuda_nccl "" -lnccl
check "ranks that are processes" $each test_cuda_processes -DMT_USE_NCCL -lnccl
check "a GPT on ranks that share the GPU, as on the CPU; overlap; invariant mode" shared $each test_cuda_gpt
check "checkpoints of a GPT" shared $each test_cuda_checkpoint
closing_line
[ "$failed" -eq 0 ]
