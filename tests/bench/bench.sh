#!/bin/sh
# Builds and runs the benchmark of a device.
#
#   sh tests/bench/bench.sh [--device cpu|cuda] [ARGUMENTS]      cpu: bench.c (the default); cuda: bench_cuda.cu
#
# ARGUMENTS are the program's, see --help. On cuda the same layers in PyTorch follow, when it is installed, as rows of
# the same CSV with --csv; not with --tiny, or with --only and another item. Exits with 77 where there is no GPU.
set -u
cd "$(dirname "$0")/../.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
build=${MT_BUILD_DIR:-build}/bench
mkdir -p "$build" || exit 1
device=cpu
if [ "${1:-}" = --device ]; then
    device=${2:-}
    shift 2
fi

bench_cpu() {
    # shellcheck disable=SC2046  # a list of flags
    "$CC" -O3 -march=native -I. tests/bench/bench.c -o "$build/bench" $(fastest_gemm) -lm -lpthread &&
        exec "$build/bench" "$@"
}

bench_cuda() {
    need_gpu "$build" "nothing was measured" >&2
    nvcc -O3 -std=c++17 -arch=native -I. tests/bench/bench_cuda.cu -o "$build/bench_cuda" -lcublasLt || exit 1
    "$build/bench_cuda" "$@" || exit
    peer_flags "$@" && have_command python3 || return 0
    case " $peer " in
    *" --rows "*) ;;
    *) echo ;;
    esac
    # shellcheck disable=SC2086  # a list of flags
    python3 tests/bench/peer_pytorch_cuda.py $peer || [ $? -eq 77 ]
}

# peer_flags ARGUMENTS: sets peer to the flags of the peer that measures the same; fails when nothing is to be compared
peer_flags() {
    peer=
    while [ $# -gt 0 ]; do
        case $1 in
        --csv) peer="$peer --rows" ;;
        --quick) peer="$peer --quick" ;;
        --tiny | --help) return 1 ;;
        --only) [ "${2:-}" = layer ] || return 1 ;;
        esac
        shift
    done
}

case $device in
cpu) bench_cpu "$@" ;;
cuda) bench_cuda "$@" ;;
*) echo "bench.sh: --device is '$device', must be cpu or cuda" >&2; exit 2 ;;
esac
