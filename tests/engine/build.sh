#!/bin/sh
# Builds the engine's own test in several variants; programs go to MTE_BUILD_DIR (default: build/engine).
#
#   sh tests/engine/build.sh [VARIANT...]
#
#   fast      -O2
#   asan      AddressSanitizer and UndefinedBehaviorSanitizer
#   checked   the checker of check.cpp
#   ucontext  as fast, fibers by ucontext instead of our own context switch
#
# CUDA's headers are looked for in $CUDA_HOME, /usr/local/cuda and the nvidia packages of Python; without them the
# exit status is 77.  Environment: CXX (c++).
set -eu
cd "$(dirname "$0")"
build=${MTE_BUILD_DIR:-../../build/engine}
cxx=${CXX:-c++}

python_includes() {
    python3 -c 'import glob, sys
for where in sys.path:
    for folder in glob.glob(where + "/nvidia/*/include"): print(folder)' 2>/dev/null || true
}

# One folder where all headers are, or the folders of Python's packages, which hold a part each.
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

# What a kernel copies with memcpy, the checker has to see; with gcc engine.h does this.
show_copies() {
    if ! command -v objcopy >/dev/null; then return; fi
    for name in memcpy memmove memset; do objcopy --redefine-sym "$name=__tsan_$name" "$1"; done
}

# variant "flags of everything" "flags of kernels" "flags of the linker"
build_variant() {
    folder=$build/$1
    mkdir -p "$folder"
    for part in core runtime check; do
        # shellcheck disable=SC2086
        "$cxx" -std=c++17 $warnings $2 $cuda -c "$part.cpp" -o "$folder/$part.o"
    done
    # shellcheck disable=SC2086
    "$cxx" -std=c++17 $warnings $2 $3 $cuda -I. -include engine.h -x c++ -c test_engine.cu -o "$folder/test_engine.o"
    if [ "$1" = checked ]; then show_copies "$folder/test_engine.o"; fi
    # shellcheck disable=SC2086
    "$cxx" $4 "$folder"/*.o -o "$folder/test_engine" -lpthread
}

sanitize="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
if [ $# = 0 ]; then set -- fast asan checked ucontext; fi
for variant in "$@"; do
    case $variant in
    fast) build_variant fast "-O2 -g" "" "" ;;
    asan) build_variant asan "-O1 -g $sanitize" "" "$sanitize" ;;
    checked) build_variant checked "-O2 -g -DMTE_CHECK" "-fsanitize=thread" "" ;;
    ucontext) build_variant ucontext "-O2 -g -DMTE_UCONTEXT" "" "" ;;
    *) echo "no variant is called $variant" >&2; exit 2 ;;
    esac
done
