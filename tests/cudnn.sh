#!/bin/sh
# Makes plans for attention with cuDNN itself (MT_USE_CUDNN), without a GPU: for a description of one, and with a
# stand-in for the driver. Shows that cuDNN has engines for the graphs of the library. No kernel runs.
#
#   sh tests/cudnn.sh         one line per check, closing line "N passed, N failed, N skipped"
#
# Needs a C++ compiler, the headers of CUDA and cuDNN and cuDNN 9.10 or later, as the CUDA Toolkit or Python's packages
# have them. Without cuDNN it is skipped.
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
build=${MT_BUILD_DIR:-build}/cudnn
mkdir -p "$build" || exit 1
build=$(cd "$build" && pwd)
check_log=$build/check.log check_lines=100
cuda=${CUDA_HOME:-/usr/local/cuda}

# The driver is where the program looks for libcuda.so.1, and nowhere else.
builds_driver() {
    mkdir -p "$build/driver" && "$CC" -std=c99 -O1 -Wall -Wextra -Werror -fPIC -shared -Wl,-soname,libcuda.so.1 \
        tests/engine/driver.c -o "$build/driver/libcuda.so.1" -ldl
}

# Only what makes plans is linked: the program uses one file of src/, not the headers.
builds_program() {
    for part in core runtime check; do
        "$CXX" -std=c++17 -O1 -w -isystem "$cuda/include" -c "tests/engine/$part.cpp" -o "$build/$part.o" || return 1
    done
    "$CXX" -std=c++17 -O1 -ffunction-sections -w -include tests/engine/engine.h -Itests/engine -I. \
            -isystem "$cuda/include" -isystem "$build/libs/include" -x c++ -c tests/engine/test_cudnn_plans.cu \
            -o "$build/plans.o" &&
        (cd "$build" && "$CXX" plans.o core.o runtime.o check.o -Wl,--gc-sections -o plans -Llibs/lib \
            -Wl,-rpath,"$build/libs/lib" -lcudnn -lpthread -ldl)
}

makes_plans() {
    folders=$build/driver:$(dirname "$(readlink -f "$build/libs/lib/libcudnn.so")"):$cuda/lib64
    echo "cuDNN in $folders"
    LD_LIBRARY_PATH=$folders timeout 600 "$build/plans" >"$build/plans.log" 2>&1
    code=$?
    cat "$build/plans.log"
    [ $code -eq 0 ] || { echo "exit code $code"; return 1; }
}

find_cuda_libraries "$build/libs" >"$build/libraries" 2>&1
version=$(sed -n 's/^cudnn \([0-9.]*\):.*/\1/p' "$build/libraries")
if ! [ -f "$cuda/include/cuda_runtime.h" ] || [ -z "$version" ] ||
    ! echo "$version" | awk -F . '{ exit !($1 > 9 || ($1 == 9 && $2 >= 10)) }'; then
    skip "cuDNN from 9.10 on, or the headers of CUDA: not here, no plan was made"
else
    check "the stand-in for the driver builds" builds_driver
    check "the program that makes plans builds with cuDNN $version" builds_program
    if [ "$failed" -eq 0 ]; then
        check "cuDNN makes the plans of attention" makes_plans
        tally "$build/plans.log"
    fi
fi
closing_line
[ "$failed" -eq 0 ]
