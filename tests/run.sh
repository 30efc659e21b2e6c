#!/bin/sh
# Tests everything there is to test on this machine; see usage below.
# shellcheck disable=SC2317  # shellcheck does not see what check calls
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh

usage() {
    cat <<'END'
sh tests/run.sh [--strict] [--quick] [STAGE...]

  stages       tests headers bisect checkpoints asan tsan mpi examples package cuda (default: all of them)
  --quick      tests and headers only
  --strict     what could not be tested is a failure (also: MT_TEST_STRICT=1)

What is missing on Debian or Ubuntu is installed first, as root or with a sudo that does not ask; a C compiler is enough to run
the tests without the rest. Environment:

  MT_INSTALL=no           install nothing
  MT_TEST_WITHOUT="..."   behave as if these were not there: cmake cmocka dnnl openblas openmpi clang pkg-config nvcc ...
  MT_BUILD_DIR=build      where programs and logs go
  CC, CXX                 compilers (cc, c++)

The last line is "N passed, N failed, N skipped", counting test cases and, elsewhere, checks.
END
}

strict=${MT_TEST_STRICT:-0}
stages=
for argument in "$@"; do
    case $argument in
    --strict) strict=1 ;;
    --quick) stages="tests headers" ;;
    --help) usage; exit 0 ;;
    tests | headers | bisect | checkpoints | asan | tsan | mpi | examples | package | cuda) stages="$stages $argument" ;;
    *) usage >&2; exit 2 ;;
    esac
done
stages=${stages:-tests headers bisect checkpoints asan tsan mpi examples package cuda}

# those with ranks that race if they can
tsan_tests="test_comm test_faults test_lost_ranks test_comm_stress test_train test_data_parallel test_pipeline"
per_gemm_tests="test_kernels test_gemm test_golden test_invariant" # built with each GEMM, see CMakeLists.txt
build=${MT_BUILD_DIR:-build}
jobs=$(nproc 2>/dev/null || echo 2)
mkdir -p "$build/logs" || exit 1
build=$(cd "$build" && pwd)
check_log=$build/logs/check.log

# ---- what is here --------------------------------------------------------------------------------------------------

set_up() {
    ensure_packages build-essential cmake libcmocka-dev libdnnl-dev libopenblas-dev pkg-config clang locales
    if ! have_library libc stdio.h m; then
        echo "No working C compiler: $CC"
        failed=1
        finish
    fi
    gemms=builtin # best first
    have_package libopenblas-dev && gemms="cblas $gemms"
    have_package libdnnl-dev && gemms="onednn $gemms"
    with_cmake=no
    have_command cmake && have_command make && with_cmake=yes
    cmocka_flags=-Itests/fallback
    have_package libcmocka-dev && cmocka_flags=-lcmocka
}

describe() {
    echo "$("$CC" --version | head -n 1); GEMM: $gemms; $jobs cores"
    [ "$with_cmake" = yes ] || leave_out "CMake and make: not here, the tests are built by $CC alone"
    [ $cmocka_flags = -lcmocka ] || leave_out "CMocka: not here, the tests use its stand-in tests/fallback/cmocka.h"
    have_package libdnnl-dev || leave_out "oneDNN: not here, its GEMM is not tested"
    have_package libopenblas-dev || leave_out "OpenBLAS: not here, the CBLAS GEMM is not tested"
}

# ---- building tests: a folder $dir/tests of programs, by CMake or, without it, by the compiler alone -----------------

# build_tests GEMM SANITIZER PROGRAMS: all of them when PROGRAMS is ""; sets $programs
build_tests() {
    echo "   building with $test_cc ..."
    mkdir -p "$dir"
    rm -rf "$dir/tests" # or a program that no longer builds would pass
    if [ "$with_cmake" = yes ]; then
        build_with_cmake "$@"
    else
        build_with_cc "$@"
    fi >"$dir/build.log" 2>&1
    build_code=$?
    [ $build_code -eq 0 ] || show_log "$dir/build.log"
    programs=$(cat "$dir/programs")
}

# What is not there is hidden from CMake, too: a path that is OFF is not searched for and does not count as found. -U forgets
# what an earlier run said.
cmake_options() {
    for pair in libcmocka-dev:CMOCKA libdnnl-dev:ONEDNN libopenblas-dev:CBLAS; do
        variable=MEGATRON_${pair#*:}_INCLUDE
        if have_package "${pair%:*}"; then echo "-U$variable"; else echo "-D$variable=OFF"; fi
    done
}

build_with_cmake() {
    # shellcheck disable=SC2046  # a list of options
    cmake -S . -B "$dir" -G "Unix Makefiles" -DCMAKE_C_COMPILER="$test_cc" -DMEGATRON_GEMM="$1" -DMEGATRON_SANITIZE="$2" \
        -DMEGATRON_BUILD_EXAMPLES=OFF -DMEGATRON_BUILD_BENCH=$([ -n "$2" ] && echo OFF || echo ON) $(cmake_options) || return 1
    (cd "$dir" && ctest -N) | sed -n 's/^ *Test *#[0-9]*: //p' >"$dir/programs"
    targets=all
    if [ -n "$3" ]; then
        targets=$(for program in $3; do grep -x "$program" "$dir/programs"; done)
        echo "$targets" >"$dir/programs"
    fi
    # shellcheck disable=SC2086  # a list of targets
    cmake --build "$dir" -j "$jobs" --target $targets -- -k
}

build_with_cc() {
    case $2 in
    address) flags="-O2 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" ;;
    thread) flags="-O2 -g -fno-omit-frame-pointer -fsanitize=thread" ;;
    *) flags="-O2 -g -Wall -Wextra -Wpedantic -Wconversion -Werror" ;;
    esac
    gemm=$1
    [ "$gemm" = auto ] && gemm=${gemms%% *}
    plain_programs "$2" "$3" >"$dir/programs"
    mkdir -p "$dir/tests"
    started=0
    while read -r program; do
        compile_test "$program" >"$dir/$program.log" 2>&1 &
        started=$((started + 1))
        [ $((started % jobs)) -ne 0 ] || wait
    done <"$dir/programs"
    wait
    while read -r program; do
        [ -x "$dir/tests/$program" ] || cat "$dir/$program.log"
    done <"$dir/programs" | awk '{ print } END { exit NR > 0 }'
}

# The names that CMakeLists.txt gives the programs: test_x, and test_x_GEMM for those built with each GEMM.
plain_programs() {
    for source in tests/test_*.c; do
        program=$(basename "$source" .c)
        [ -z "$2" ] || in_list "$program" "$2" || continue
        if [ -z "$1" ] && in_list "$program" "$per_gemm_tests"; then
            for each in $gemms; do echo "${program}_$each"; done
        else
            echo "$program"
        fi
    done
}

in_list() {
    case " $2 " in
    *" $1 "*) return 0 ;;
    esac
    return 1
}

compile_test() {
    source=$1 test_gemm=$gemm fast=
    for each in $gemms; do
        case $1 in
        *_"$each") source=${1%_"$each"} test_gemm=$each fast="-O3 -march=native -Wno-error" ;;
        esac
    done
    case $test_gemm in
    onednn) gemm_flags="-DMT_USE_ONEDNN -ldnnl" ;;
    cblas) gemm_flags="-DMT_USE_CBLAS -lopenblas" ;;
    *) gemm_flags= ;;
    esac
    # shellcheck disable=SC2086  # lists of flags
    "$test_cc" $flags $fast -I. "tests/$source.c" -o "$dir/tests/$1" $gemm_flags $cmocka_flags -lm -lpthread
}

# ---- running tests -------------------------------------------------------------------------------------------------

with_limit() {
    if command -v timeout >/dev/null 2>&1; then
        timeout -k 10 "$@"
    else
        shift
        "$@"
    fi
}

# run_program NAME LOG LIMIT COMMAND...: counts CMocka's test cases, or one where there are none
run_program() {
    name=$1 log=$2 limit=$3
    shift 3
    start=$(now)
    with_limit "$limit" "$@" >"$log" 2>&1 </dev/null
    code=$?
    runs=$(sed -n 's/.*\[==========\].*Running \([0-9][0-9]*\) test(s).*/\1/p' "$log" | awk '{ n += $1 } END { print n + 0 }')
    ok=$(grep -c '\[       OK \]' "$log")
    skips=$(sed -n 's/.*\[  SKIPPED \].* \([0-9][0-9]*\) test(s).*/\1/p' "$log" | awk '{ n += $1 } END { print n + 0 }')
    bad=$((runs - ok - skips))
    [ "$runs" -gt 0 ] || { runs=1; ok=$((code == 0)); bad=$((code != 0)); }
    [ $code -eq 0 ] || [ $bad -gt 0 ] || bad=1 # found by a sanitizer, or killed, when all tests were done
    passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + skips))
    [ "$skips" -eq 0 ] || left_out="$left_out  $stage, $name: $skips of its test cases
"
    if [ $bad -eq 0 ]; then
        line ok "$name" "$start" "$ok passed$([ "$skips" -eq 0 ] || echo ", $skips skipped")"
    else
        line FAIL "$name" "$start" "$ok passed, $bad failed$(explain_exit $code)"
        show_log "$log"
    fi
}

explain_exit() {
    case $1 in
    124 | 137) echo ", stopped after $limit s" ;;
    *) [ "$1" -lt 128 ] && echo ", exit code $1" || echo ", killed by signal $(($1 - 128))" ;;
    esac
}

# run_tests LIMIT [RUNNER...]
run_tests() {
    limit=$1
    shift
    [ -n "$programs" ] || { failed=$((failed + 1)); echo "  FAIL  no test programs"; }
    missing=0
    for program in $programs; do
        if [ -x "$dir/tests/$program" ]; then
            run_program "$program" "$build/logs/$stage-$program.log" "$limit" "$@" "$dir/tests/$program"
        else
            missing=$((missing + 1))
            echo "  FAIL  $program did not build"
        fi
    done
    # something else than a test
    [ $build_code -eq 0 ] || [ $missing -gt 0 ] || { missing=1; echo "  FAIL  the build"; }
    failed=$((failed + missing))
}

stage_tests() {
    test_cc=$CC
    build_tests auto "" ""
    run_tests 300
}

# ---- sanitizers: what a program asks for in vain is not their business, the tests do it on purpose --------------------

# A program with an overflow and a race when BAD is defined, to see whether a sanitizer works here, and finds them.
probe_source() {
    cat <<'END'
#include <pthread.h>
#include <stdlib.h>
static int shared;
static void *work(void *x) {
#ifdef BAD
    int i;
    for (i = 0; i < 1000; i++) shared++;
#endif
    return x;
}
int main(int argc, char **argv) {
    pthread_t thread;
    char *allocated = (char *)malloc((size_t)argc);
    volatile char *memory = allocated; /* or the optimizer removes the fault */
    (void)argv;
    pthread_create(&thread, NULL, work, NULL);
    work(NULL);
    pthread_join(thread, NULL);
#ifdef BAD
    memory[argc] = 1;
#endif
    memory[0] = 1;
    free(allocated);
    return shared < 0;
}
END
}

# find_sanitizer FLAGS: sets test_cc, and runner: some kernels lay out memory too randomly for a sanitizer, setarch -R helps
find_sanitizer() {
    probe_source >"$dir/probe.c"
    for test_cc in "$CC" gcc clang; do
        hidden "$test_cc" && continue
        "$test_cc" -O1 "$1" "$dir/probe.c" -o "$dir/good" -lpthread 2>/dev/null || continue
        "$test_cc" -O1 "$1" -DBAD "$dir/probe.c" -o "$dir/bad" -lpthread 2>/dev/null || continue
        for runner in env "setarch $(uname -m) -R"; do
            # shellcheck disable=SC2086  # a command and its arguments
            $runner "$dir/good" >/dev/null 2>&1 && ! $runner "$dir/bad" >/dev/null 2>&1 && return 0
        done
    done
    return 1
}

# stage_sanitizer NAME FLAGS PROGRAMS: with the built-in GEMM, because the libraries are not instrumented
stage_sanitizer() {
    mkdir -p "$dir"
    if find_sanitizer "$2"; then
        build_tests builtin "$1" "$3"
        # shellcheck disable=SC2086  # a command and its arguments
        run_tests 600 $runner
    else
        leave_out "$1 sanitizer: does not work with the compilers of this machine"
    fi
}

stage_asan() {
    ASAN_OPTIONS=allocator_may_return_null=1:detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1
    UBSAN_OPTIONS=print_stacktrace=1
    export ASAN_OPTIONS UBSAN_OPTIONS
    stage_sanitizer address -fsanitize=address,undefined ""
}

stage_tsan() {
    TSAN_OPTIONS=allocator_may_return_null=1:second_deadlock_stack=1
    export TSAN_OPTIONS
    stage_sanitizer thread -fsanitize=thread "$tsan_tests"
}

# ---- scripts -------------------------------------------------------------------------------------------------------

# stage_script NAME: runs tests/NAME.sh, which prints its own lines and a closing one. What it left out counts here, too.
stage_script() {
    sh "tests/$1.sh" | tee "$build/logs/$1.log" | grep -v '^[0-9]* passed, '
    tally "$build/logs/$1.log"
    missed=$(sed -n 's/^  skip  /  /p' "$build/logs/$1.log" | grep -v 'also with --strict')
    [ -z "$missed" ] || left_out="$left_out$missed
"
}

# ---- examples ------------------------------------------------------------------------------------------------------

# Each example names, in its first lines, the commands that build it: cc ... -o NAME ... [&& ./NAME ARGUMENTS]
example_commands() { sed -n '1,30s/^[^A-Za-z]*\(cc .* -o .*\)$/\1/p' "$1" | sed 's|[ ]*\*/.*||'; }

# What to run it with: as its command says, but do not train for long.
example_arguments() {
    case $1:$2 in
    train_gpt:*) echo "--steps 3" ;;
    *"&& ./"*) echo "$2" | sed 's|.*&& \./[^ ]*||' ;;
    esac
}

# run_example NAME COMMAND
run_example() {
    title=$1
    case $2 in
    *-ldnnl*) title="$1, oneDNN"; have_package libdnnl-dev || { leave_out "$title: not here"; return; } ;;
    *-lopenblas*) title="$1, OpenBLAS"; have_package libopenblas-dev || { leave_out "$title: not here"; return; } ;;
    esac
    compile=$(echo "${2%%&&*}" | sed "s|^cc |$CC |; s| -o [^ ]*| -o $dir/$1|")
    # shellcheck disable=SC2046  # arguments
    run_program "$title" "$build/logs/example-$1.log" 300 sh -c "$compile && exec \"\$@\"" sh "$dir/$1" \
        $(example_arguments "$1" "$2")
}

stage_examples() {
    mkdir -p "$dir"
    for source in examples/*.c; do
        example_commands "$source" >"$dir/commands"
        [ -s "$dir/commands" ] || { echo "  FAIL  $source: its first lines do not build it"; failed=$((failed + 1)); }
        while read -r command; do
            run_example "$(basename "$source" .c)" "$command"
        done <"$dir/commands"
    done
}

# ---- installed package ---------------------------------------------------------------------------------------------

# The header's version, which is the package's.
version() { sed -n 's/^#define MT_VERSION "\(.*\)"/\1/p' megatron.h; }

install_package() {
    rm -rf "$dir/prefix"
    cmake -S . -B "$dir/install" -DCMAKE_INSTALL_PREFIX="$dir/prefix" -DMEGATRON_BUILD_TESTS=OFF -DMEGATRON_BUILD_EXAMPLES=OFF \
        -DMEGATRON_BUILD_BENCH=OFF -DCMAKE_C_COMPILER="$CC" && cmake --build "$dir/install" --target install
}

# A project of somebody else's, in C and in C++.
consume_with_cmake() {
    rm -rf "${dir:?}/$1"
    # shellcheck disable=SC2046  # a list of options
    cmake -S tests/package -B "$dir/$1" -G "Unix Makefiles" -DMT_HOW="$1" -DMT_SOURCE="$PWD" -DMT_VERSION="$(version)" \
        -DCMAKE_PREFIX_PATH="$dir/prefix" -DCMAKE_C_COMPILER="$CC" -DCMAKE_CXX_COMPILER="$CXX" $(cmake_options) &&
        cmake --build "$dir/$1" -j "$jobs" && "$dir/$1/use_c" && "$dir/$1/use_cpp"
}

consume_with_pkg_config() {
    PKG_CONFIG_PATH=$dir/prefix/share/pkgconfig
    export PKG_CONFIG_PATH
    pkg-config --print-errors --exact-version="$(version)" megatron || return 1
    # shellcheck disable=SC2046  # lists of flags
    "$CC" $(pkg-config --cflags megatron) tests/package/implementation.c tests/package/use.c -o "$dir/use_c" \
        $(pkg-config --libs megatron) && "$dir/use_c" || return 1
    # shellcheck disable=SC2046
    "$CC" -c $(pkg-config --cflags megatron) tests/package/implementation.c -o "$dir/implementation.o" &&
        "$CXX" $(pkg-config --cflags megatron) "$dir/implementation.o" tests/package/use.cpp -o "$dir/use_cpp" \
            $(pkg-config --libs megatron) && "$dir/use_cpp"
}

stage_package() {
    mkdir -p "$dir"
    if [ "$with_cmake" = no ] || ! have_command "$CXX"; then
        leave_out "package: needs CMake, make and a C++ compiler"
        return
    fi
    check "cmake --install" install_package
    for how in find_package add_subdirectory FetchContent; do
        check "a project that uses it by $how, in C and C++" consume_with_cmake "$how"
    done
    if have_command pkg-config; then
        check "a program built with pkg-config, in C and C++" consume_with_pkg_config
    else
        leave_out "pkg-config: not here, megatron.pc was not tried"
    fi
}

# ---- everything ----------------------------------------------------------------------------------------------------

run_stage() {
    stage=$1 dir=$build/$1
    stage_start=$(now)
    case $stage in
    tests) echo "== tests, GEMM: ${gemms%% *}" && stage_tests ;;
    headers) echo "== headers" && stage_script check_headers ;;
    bisect) echo "== planted bugs, found by the hash log" && stage_script bisect ;;
    asan) echo "== tests, address, undefined behaviour and leak sanitizers" && stage_asan ;;
    tsan) echo "== communication and training tests, thread sanitizer" && stage_tsan ;;
    mpi) echo "== communicators over MPI, by processes" && stage_script mpi ;;
    examples) echo "== examples, each by the command in its first lines" && stage_examples ;;
    package) echo "== installed package" && stage_package ;;
    checkpoints) echo "== checkpoints: a fuzzer, Python's safetensors, signal 9" && stage_script checkpoints ;;
    cuda) echo "== CUDA, executed on the CPU and built by nvcc" && stage_script cuda ;;
    esac
    echo "   $((($(now) - stage_start) / 1000)) s"
}

finish() {
    code=$((failed > 0))
    if [ -n "$left_out" ]; then
        echo "Left out$([ "$strict" = 0 ] || echo ", which is a failure with --strict"):"
        printf '%s' "$left_out"
        [ "$strict" = 0 ] || code=1
    fi
    closing_line
    exit $code
}

# Those that keep one core busy run beside the others, and give way to them: ranks that meet many times a second would wait for
# a turn each time. What they print comes in one piece, after that.
beside() {
    check_log=$build/logs/beside-check.log passed=0 failed=0 skipped=0 left_out=
    for stage in $1; do
        run_stage "$stage"
    done
    printf '%s' "$left_out" >"$build/logs/beside.left_out"
    closing_line
}

set_up
describe
alone="" together=""
for stage in $stages; do
    case $stage in
    headers | bisect | checkpoints | examples | package) together="$together $stage" ;;
    *) alone="$alone $stage" ;;
    esac
done
: >"$build/logs/beside.left_out"
beside "$together" >"$build/logs/beside.out" 2>&1 </dev/null &
renice -n 19 -p $! >/dev/null 2>&1
for stage in $alone; do
    run_stage "$stage"
done
wait
grep -v '^[0-9]* passed, ' "$build/logs/beside.out"
tally "$build/logs/beside.out"
left_out=$left_out$(cat "$build/logs/beside.left_out"; echo .)
left_out=${left_out%.}
finish
