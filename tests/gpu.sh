#!/bin/sh
# The CUDA tests on a real GPU: what tests/cuda.sh executes on a CPU, built by nvcc.
#
#   sh tests/gpu.sh                      one line per program, closing line "N passed, N failed, N skipped"; 77: there
#                                        is no GPU
#   sh tests/gpu.sh --build [OBJECT]     only builds them, without optimization, for any GPU from sm_80 on; needs no
#                                        GPU. OBJECT: an implementation that nvcc has built
#
# The first programs test what the engine replaces by code of its own: the wrapper of each PTX instruction, and each
# epilogue of cuBLASLt. The others follow, with ranks that share the GPU. Needs nvcc and cuBLASLt. Without NCCL the
# programs that use it are left out: a "skip" line says so, they count as skipped, and the exit status is that of the
# others.
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

# The programs in `shared` use only what the headers declare, so they are linked to one build of the implementation,
# which takes longer to build than they do. Those in `own` and `with_nccl` compile the implementation themselves.
own="test_cuda_ptx test_cuda test_cuda_flash"
with_nccl="test_cuda_nccl test_cuda_processes"
shared="test_cuda_gemm test_cuda_devices test_cuda_gpt test_cuda_checkpoint test_cuda_custom_block test_cuda_plain"
implementation=$build/implementation.o

# gpu_build NAME: a program, or the implementation
gpu_build() {
    libraries=-lcublasLt more=
    case $1 in
    implementation)
        # shellcheck disable=SC2086  # a list of flags
        nvcc $flags -I. -x cu -c tests/package/implementation.c -o "$implementation"
        return ;;
    test_cuda_nccl) libraries="-lcublasLt -lnccl" ;;
    test_cuda_processes) more=-DMT_USE_NCCL libraries="-lcublasLt -lnccl" ;;
    *) case " $shared " in *" $1 "*) more="$DECLARATIONS_ONLY $implementation" ;; esac ;;
    esac
    # shellcheck disable=SC2086  # lists of flags
    nvcc $flags -I. $more "tests/$1.cu" -o "$build/$1" $libraries
}

# Does nvcc compile and link a program with NCCL? MT_TEST_WITHOUT=nccl hides it.
have_nccl() {
    hidden nccl && return 1
    printf '#include <nccl.h>\nint main() { int version; return ncclGetVersion(&version); }\n' >"$build/probe_nccl.cpp"
    nvcc "$build/probe_nccl.cpp" -o "$build/probe_nccl" -lnccl >"$build/probe_nccl.log" 2>&1
}

# Builds as many at a time as there are cores.
gpu_build_all() {
    started=0
    for name in "$@"; do
        gpu_build "$name" >"$build/$name.log" 2>&1 &
        started=$((started + 1))
        [ $((started % jobs)) -ne 0 ] || wait
    done
    wait
}

# gpu_test NAME: runs a program that gpu_build has built; of the implementation, checks that it was built
gpu_test() {
    cat "$build/$1.log"
    if [ "$1" = implementation ]; then [ -f "$implementation" ]; else timeout -k 10 600 "$build/$1"; fi
}

if [ "${1:-}" = --build ]; then
    have_command nvcc || { echo "nvcc is not here, nothing was built"; exit 77; }
    each=gpu_build
    flags="-std=c++17 -O0 $(nvcc_fast) -gencode arch=compute_80,code=compute_80" # the driver compiles the PTX
    implementation=${2:-$implementation}
    have_nccl || with_nccl=
else
    need_gpu "$build" "nothing was tested"
    each=gpu_test flags="-std=c++17 -O2 -arch=native" jobs=$(nproc 2>/dev/null || echo 2) start=$(now)
    # shellcheck disable=SC2086  # lists of names
    (cd "$build" && rm -f $own $with_nccl $shared implementation.o)
    have_nccl || with_nccl=
    # shellcheck disable=SC2086
    gpu_build_all implementation $own $with_nccl
    # shellcheck disable=SC2086
    gpu_build_all $shared
    echo "built in $((($(now) - start) / 1000)) s"
fi
check "the wrappers of PTX instructions" $each test_cuda_ptx
[ -n "${2:-}" ] || check "the implementation builds" $each implementation
check "GEMM, its epilogues and the choice of algorithms" $each test_cuda_gemm
check "operators, contexts and collectives against the CPU" $each test_cuda
check "attention on tensor cores against the CPU" $each test_cuda_flash
check "several GPUs in one process" $each test_cuda_devices
if [ -n "$with_nccl" ]; then
    check "NCCL" $each test_cuda_nccl
    check "ranks that are processes" $each test_cuda_processes
else
    leave_out "NCCL: nvcc finds no nccl.h and libnccl here"
    leave_out "ranks that are processes: they meet over NCCL, which is not here"
fi
check "a GPT on ranks that share the GPU, as on the CPU; overlap; invariant mode" $each test_cuda_gpt
check "checkpoints of a GPT" $each test_cuda_checkpoint
check "the block of examples/02_custom_block.c, as on the CPU" $each test_cuda_custom_block
check "plain calls, as the layers of a registry" $each test_cuda_plain
closing_line
[ "$failed" -eq 0 ]
