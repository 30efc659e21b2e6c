#!/bin/sh
# Builds the stand-ins for CUDA's libraries with their test, and runs the test under every schedule of streams:
#
#   sh tests/engine/build_standins.sh [FLAGS...]      FLAGS go to the compiler, for example -fsanitize=address,undefined
#
# Needs a C++17 compiler and CUDA's headers, but no GPU and none of CUDA's libraries. -DMTE_CHECK in FLAGS also finds
# reads of unwritten memory and races between streams. Environment: CXX, CUDA_HOME, MT_BUILD_DIR (build), MTE_SCHEDULES
# ("eager lazy random greedy"). The last line is "N passed, N failed, N skipped", the sum over all schedules.
set -u
here=$(cd "$(dirname "$0")" && pwd)
cxx=${CXX:-g++}
cuda=${CUDA_HOME:-/usr/local/cuda}
out=${MT_BUILD_DIR:-$here/../../build}/standins
log=$out/log

skip() {
    echo "skipped: $1"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
}

command -v "$cxx" >/dev/null || skip "no C++ compiler ($cxx)"
for header in cublasLt.h nccl.h; do
    [ -f "$cuda/include/$header" ] || skip "no $header in $cuda/include"
done
for source in core.cpp runtime.cpp check.cpp; do
    [ -f "$here/$source" ] || skip "no $source beside this script"
done

mkdir -p "$out" || exit 1
warnings="-Wall -Wextra -Wshadow"
objects=
for source in core runtime check blaslt nccl test_standins; do
    # shellcheck disable=SC2086  # the warnings are several words
    "$cxx" -std=c++17 -g -O1 -pthread $warnings "$@" -isystem "$cuda/include" -c "$here/$source.cpp" \
        -o "$out/$source.o" || exit 1
    objects="$objects $source.o"
done
# shellcheck disable=SC2086  # the objects are several words
(cd "$out" && "$cxx" -pthread "$@" $objects -o test_standins) || exit 1

status=0
: >"$log"
for schedule in ${MTE_SCHEDULES:-eager lazy random greedy}; do
    echo "== MTE_STREAMS=$schedule"
    MTE_STREAMS=$schedule "$out/test_standins" >"$out/log.$schedule" 2>"$out/errors.$schedule"
    code=$?
    cat "$out/log.$schedule"
    [ "$code" -eq 0 ] || { cat "$out/errors.$schedule"; status=1; }
    # A run that crashed has no closing line.
    tail -n 1 "$out/log.$schedule" | grep ' passed, ' >>"$log" ||
        { echo "0 passed, 1 failed, 0 skipped" >>"$log"; status=1; }
done
awk '{ p += $1; f += $3; s += $5 } END { printf "%d passed, %d failed, %d skipped\n", p, f, s }' "$log"
exit $status
