#!/bin/sh
# Builds and runs the benchmark of a device.
#
#   sh tests/bench/bench.sh [--device cpu|cuda] [ARGUMENTS]      cpu: bench.c (the default); cuda: bench_cuda.cu
#
# ARGUMENTS are the program's, see --help. On cuda each item runs as a process of its own, of at most MT_BENCH_SECONDS
# (120; 480 for the item scaling), so that a crash costs one item. With several GPUs the program is built with NCCL,
# where a program with it links. Then follow rows of PyTorch, when it is installed: peer_pytorch_cuda.py, also one
# process for each item; not with --tiny. With --csv all rows form one CSV. The last line names what has failed; the
# exit status is then 1, and 77 where there is no GPU.
set -u
cd "$(dirname "$0")/../.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
build=${MT_BUILD_DIR:-build}/bench
mkdir -p "$build" || exit 1
build=$(cd "$build" && pwd)
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

# Prints the flags for NCCL, or on stderr why it is not used. It must be 2.19 or later, as in mt_comm.h.
nccl_flags() {
    printf '%s\n' '#include <nccl.h>' '#if NCCL_VERSION_CODE < NCCL_VERSION(2, 19, 0)' '#error "older than NCCL 2.19"' \
        '#endif' 'int main() { int version; return ncclGetVersion(&version); }' >"$build/nccl.cpp"
    # shellcheck disable=SC2086  # a list of flags
    if nvcc "$build/nccl.cpp" -o "$build/nccl" $libraries -lnccl >"$build/nccl.log" 2>&1; then
        echo "-DMT_USE_NCCL -lnccl"
    else
        why=$(grep -m 1 -i 'error\|cannot find' "$build/nccl.log") || why="a program with it does not link"
        echo "# without NCCL: $why" >&2
    fi
}

bench_cuda() {
    items=
    flags="$*"
    while [ $# -gt 0 ]; do
        case $1 in
        --only) items=${2:-} ;;
        esac
        shift
    done
    (need_gpu "$build" "nothing was measured") >"$build/gpu"
    code=$?
    cat "$build/gpu" >&2
    [ $code -eq 0 ] || exit $code
    find_nvcc # need_gpu has found it, but in another shell
    libraries=$(cublas_flags "$build/cuda")
    # The ranks of an item have a GPU each, if there are several.
    [ "$("$build/probe" count)" -eq 1 ] || libraries="$libraries $(nccl_flags)"
    # shellcheck disable=SC2086  # a list of flags
    nvcc -O3 -std=c++17 -arch=native -I. tests/bench/bench_cuda.cu -o "$build/bench_cuda" $libraries || exit 1
    # shellcheck disable=SC2086  # a list of flags
    case " $flags " in
    *" --list "* | *" --help "*) exec "$build/bench_cuda" $flags ;;
    esac
    failed="" rows=0 peer=tests/bench/peer_pytorch_cuda.py
    for item in ${items:-$("$build/bench_cuda" --list)}; do
        # shellcheck disable=SC2086  # a list of flags
        run_item "$item" "$build/bench_cuda" $flags --only "$item"
    done
    case " $flags " in
    *" --tiny "*) ;;
    *) peers ;;
    esac
    [ -z "$failed" ] || { echo "bench.sh: failed:$failed" >&2; exit 1; }
}

# run_item NAME COMMAND...: prints the rows, also of a command that fails later, and the head only the first time
run_item() {
    name=$1
    shift
    seconds=120
    [ "$name" != scaling ] || seconds=480
    timeout -k 5 "${MT_BENCH_SECONDS:-$seconds}" "$@" >"$build/item.txt"
    code=$?
    grep -v "$([ $rows -eq 0 ] && echo '^$' || echo '^item,name\|^# ')" "$build/item.txt"
    rows=1
    case $code in
    0) ;;
    77) return 77 ;;
    *) echo "bench.sh: $name: status $code" >&2 && failed="$failed $name" ;;
    esac
}

# The items that PyTorch has, too. The first one says when there is no PyTorch.
peers() {
    have_command python3 || return 0
    case " $flags " in
    *" --csv "*) ;;
    *) rows=0 && echo ;;
    esac
    quick=$(echo " $flags " | grep -o -e ' --quick ')
    for item in $(python3 $peer --list); do
        [ -z "$items" ] || [ "$items" = "$item" ] || continue
        # shellcheck disable=SC2086  # a flag, or none
        run_item "PyTorch:$item" python3 $peer $quick --only "$item" || [ $? -ne 77 ] || return 0
    done
}

case $device in
cpu) bench_cpu "$@" ;;
cuda) bench_cuda "$@" ;;
*) echo "bench.sh: --device is '$device', must be cpu or cuda" >&2; exit 2 ;;
esac
