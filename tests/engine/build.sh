#!/bin/sh
# Builds the engine's own test (test_engine) in several variants. Programs go to MTE_BUILD_DIR (default: build/engine).
#
#   sh tests/engine/build.sh [VARIANT...]
#
#   fast      -O2
#   asan      AddressSanitizer and UndefinedBehaviorSanitizer
#   checked   the checker of check.cpp
#   ucontext  as fast, with fibers by ucontext instead of the engine's own context switch
#
# CUDA's headers are looked for in $CUDA_HOME, in /usr/local/cuda and in the nvidia packages of Python. Without them the
# exit status is 77. Environment: CXX (c++).
set -eu
cd "$(dirname "$0")"
# shellcheck source=tests/packages.sh
. ../packages.sh
build=${MTE_BUILD_DIR:-../../build/engine}

python_includes() {
    python3 -c 'import glob, sys
for where in sys.path:
    for folder in glob.glob(where + "/nvidia/*/include"): print(folder)' 2>/dev/null || true
}

# Prints -isystem options: one folder with all headers, or the folders of the Python packages, each with some of them.
cuda_flags() {
    for folder in "${CUDA_HOME:-/nowhere}/include" /usr/local/cuda/include; do
        if [ -f "$folder/cuda_runtime.h" ]; then
            echo "-isystem $folder"
            return
        fi
    done
    flags=
    found=no
    for folder in $(python_includes); do
        flags="$flags -isystem $folder"
        if [ -f "$folder/cuda_runtime.h" ]; then found=yes; fi
    done
    if [ $found = yes ]; then echo "$flags"; fi
}

cuda=$(cuda_flags)
if [ -z "$cuda" ]; then
    echo "CUDA's headers were not found"
    exit 77
fi

warnings="-Wall -Wextra -Werror"

# Makes the checker see what a kernel copies with memcpy (clang; for gcc, engine.h does this).
show_copies() {
    if ! command -v objcopy >/dev/null; then return; fi
    for name in memcpy memmove memset; do objcopy --redefine-sym "$name=__tsan_$name" "$1"; done
}

# build_variant NAME "flags of all files" "flags of kernels" "flags of the linker"
build_variant() {
    folder=$build/$1
    mkdir -p "$folder"
    for part in core runtime check; do
        # shellcheck disable=SC2086
        "$CXX" -std=c++17 $warnings $2 $cuda -c "$part.cpp" -o "$folder/$part.o"
    done
    # shellcheck disable=SC2086
    "$CXX" -std=c++17 $warnings $2 $3 $cuda -I. -include engine.h -x c++ -c test_engine.cu -o "$folder/test_engine.o"
    if [ "$1" = checked ]; then show_copies "$folder/test_engine.o"; fi
    # shellcheck disable=SC2086
    "$CXX" $4 "$folder"/*.o -o "$folder/test_engine" -lpthread
}

if [ $# = 0 ]; then set -- fast asan checked ucontext; fi
for variant in "$@"; do
    case $variant in
    fast) build_variant fast "-O2 -g" "" "" ;;
    asan) build_variant asan "-O1 $SANITIZE" "" "$SANITIZE" ;;
    checked) build_variant checked "-O2 -g -DMTE_CHECK" "-fsanitize=thread" "" ;;
    ucontext) build_variant ucontext "-O2 -g -DMTE_UCONTEXT" "" "" ;;
    *) echo "no variant is called $variant" >&2; exit 2 ;;
    esac
done
