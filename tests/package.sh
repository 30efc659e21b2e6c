#!/bin/sh
# Installs the package and uses it in other projects, in each supported way.
#
#   sh tests/package.sh      one line per check, closing line "N passed, N failed, N skipped"
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
build=${MT_BUILD_DIR:-build}/package
mkdir -p "$build" || exit 1
build=$(cd "$build" && pwd)
check_log=$build/check.log

# The version of the header, which is that of the package.
version() { sed -n 's/^#define MT_VERSION "\(.*\)"/\1/p' mt_comm.h; }

install_package() {
    rm -rf "$build/prefix"
    cmake -S . -B "$build/install" -DCMAKE_INSTALL_PREFIX="$build/prefix" -DMEGATRON_BUILD_TESTS=OFF \
        -DMEGATRON_BUILD_EXAMPLES=OFF \
        -DMEGATRON_BUILD_BENCH=OFF -DCMAKE_C_COMPILER="$CC" && cmake --build "$build/install" --target install
}

# Another project, in C and in C++.
consume_with_cmake() {
    rm -rf "${build:?}/$1"
    cmake -S tests/package -B "$build/$1" -G "Unix Makefiles" -DMT_HOW="$1" -DMT_SOURCE="$PWD" \
        -DMT_VERSION="$(version)" -DCMAKE_PREFIX_PATH="$build/prefix" -DCMAKE_C_COMPILER="$CC" \
        -DCMAKE_CXX_COMPILER="$CXX" &&
        cmake --build "$build/$1" && "$build/$1/use_c" && "$build/$1/use_cpp"
}

consume_with_pkg_config() {
    PKG_CONFIG_PATH=$build/prefix/share/pkgconfig
    export PKG_CONFIG_PATH
    pkg-config --print-errors --exact-version="$(version)" megatron || return 1
    # shellcheck disable=SC2046  # lists of flags
    "$CC" $(pkg-config --cflags megatron) tests/package/implementation.c tests/package/use.c -o "$build/use_c" \
        $(pkg-config --libs megatron) && "$build/use_c" || return 1
    # shellcheck disable=SC2046
    "$CC" -c $(pkg-config --cflags megatron) tests/package/implementation.c -o "$build/implementation.o" &&
        "$CXX" $(pkg-config --cflags megatron) "$build/implementation.o" tests/package/use.cpp -o "$build/use_cpp" \
            $(pkg-config --libs megatron) && "$build/use_cpp"
}

# A program that was compiled with headers of another version gets an error that names both versions.
refuse_another_version() {
    rm -rf "$build/other" && mkdir "$build/other" && cp ./*.h ./*.cuh "$build/other" || return 1
    sed 's/^#define MT_VERSION_PATCH .*/#define MT_VERSION_PATCH 987/' mt_comm.h >"$build/other/mt_comm.h"
    "$CC" -I. -c tests/package/implementation.c -o "$build/other/implementation.o" &&
        "$CC" -I"$build/other" -c tests/package/use.c -o "$build/other/use.o" &&
        "$CC" "$build/other/use.o" "$build/other/implementation.o" -o "$build/other/use" -lm -lpthread || return 1
    "$build/other/use" >"$build/other/log" 2>&1 && return 1
    cat "$build/other/log"
    grep -q "MT_ERR_UNSUPPORTED: .*\.987,.* $(version):" "$build/other/log"
}

if ! have_command cmake || ! have_command make || ! have_command "$CXX"; then
    leave_out "package: needs CMake, make and a C++ compiler"
else
    check "cmake --install" install_package
    check "headers and implementation of different versions are refused" refuse_another_version
    for how in find_package add_subdirectory FetchContent; do
        check "a project that uses it by $how, in C and C++" consume_with_cmake "$how"
    done
    if have_command pkg-config; then
        check "a program built with pkg-config, in C and C++" consume_with_pkg_config
    else
        leave_out "pkg-config: not here, megatron.pc was not tried"
    fi
fi
closing_line
[ "$failed" -eq 0 ]
