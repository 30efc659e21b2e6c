#!/bin/sh
# Builds and runs the tests: installs what is missing, then runs CTest. See usage below and tests/README.md.
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh

usage() {
    cat <<'END'
sh tests/run.sh [--variants | --all] [--strict] [--repeat N] [--load] [PATTERN...]

  PATTERN      only the tests whose name contains one of these regular expressions
  --variants   instead of everything once: the same in other ways, with sanitizers, each GEMM library, nvcc, on an Arm
               processor in QEMU, and others
  --all        both, with all combinations instead of a sample, and the planted bugs
  --strict     what could not be tested is a failure (also: MT_TEST_STRICT=1), except what needs nvcc or a GPU; the
               headers of CUDA are expected, unless MT_TEST_WITHOUT names nvcc
  --repeat N   builds once and runs the tests N times. Prints the totals of each round, and at the end the tests that
               failed in each round. The last line has the totals of all rounds
  --load       beside the tests, one process per core computes without a pause: no verdict may depend on the time that
               a test gets

What is missing on Debian or Ubuntu is installed first, as root or with a sudo that does not ask; a C compiler is enough
to run the test programs without the rest. Environment:

  MT_INSTALL=no           install nothing
  MT_TEST_WITHOUT="..."   behave as if these were not there: cmake dnnl openblas openmpi clang aarch64 nvcc ...
  MT_BUILD_DIR=build      where programs and logs go
  CC, CXX                 compilers (cc, c++)

The last line is "N passed, N failed, N skipped", counting test cases and, elsewhere, checks.
END
}

strict=${MT_TEST_STRICT:-0} tests=quick bench=OFF pattern='' times='' rounds=1 loaded=no
while [ $# -gt 0 ]; do
    case $1 in
    --variants) tests=variants ;;
    --all) tests=all bench=ON ;;
    --strict) strict=1 ;;
    --repeat)
        case ${2:-} in
        '' | 0* | *[!0-9]*) echo "--repeat ${2:-}: expected a number of rounds, 1 or more" >&2; exit 2 ;;
        esac
        rounds=$2
        shift
        ;;
    --load) loaded=yes ;;
    --help) usage; exit 0 ;;
    -*) usage >&2; exit 2 ;;
    *) pattern="$pattern${pattern:+|}$1" ;;
    esac
    shift
done
build=${MT_BUILD_DIR:-build}
jobs=$(nproc 2>/dev/null || echo 2)
mkdir -p "$build" || exit 1
build=$(cd "$build" && pwd)
rm -rf "$build/left_out" "$build/not_expected" "$build/rounds" "$build/load"
mkdir "$build/rounds" || exit 1
export CC CXX

# ---- rounds, and the load beside them --------------------------------------------------------------------------------

running='' # the processes of CTest: its session

# Ends the load, and after a signal also CTest with its tests.
end_all() {
    [ -z "$running" ] || kill -s TERM -- "-$running" 2>/dev/null || kill -s TERM "$running" 2>/dev/null
    # shellcheck disable=SC2046  # a list of ids
    [ ! -s "$build/load" ] || kill -s KILL $(cat "$build/load") 2>/dev/null
    wait
    rm -f "$build/load"
}
trap end_all EXIT
trap 'exit 1' HUP INT TERM

# Computes until this script ends, however it ends.
compute() {
    while kill -0 $$ 2>/dev/null; do
        i=0
        while [ $i -lt 20000 ]; do i=$((i + 1)); done
    done
}

start_load() {
    [ $loaded = yes ] || return 0
    echo "load: $jobs processes that compute, as many as there are cores"
    for _ in $(seq "$jobs"); do
        compute &
        echo $! >>"$build/load"
    done
}

# in_rounds FUNCTION: calls it for each round. It adds to the totals, and writes the names of the tests that failed to
# $build/rounds/NUMBER.failed.
in_rounds() {
    start_load
    round=0
    while [ $round -lt "$rounds" ]; do
        round=$((round + 1)) p=$passed f=$failed s=$skipped
        $1
        [ "$rounds" = 1 ] ||
            echo "round $round of $rounds: $((passed - p)) passed, $((failed - f)) failed, $((skipped - s)) skipped"
    done
    [ "$rounds" = 1 ] || for each in $(seq "$rounds"); do
        names=$(paste -s -d ' ' "$build/rounds/$each.failed" 2>/dev/null)
        [ -z "$names" ] || echo "failed in round $each: $names"
    done
}

# ---- with CMake ------------------------------------------------------------------------------------------------------

# Hides from CMake what MT_TEST_WITHOUT hides: CMake does not search for a path that is OFF. -U removes the result of an
# earlier run.
cmake_options() {
    for pair in libdnnl-dev:ONEDNN libopenblas-dev:CBLAS; do
        variable=MEGATRON_${pair#*:}_INCLUDE
        if have_package "${pair%:*}"; then echo "-U$variable"; else echo "-D$variable=OFF"; fi
    done
    have_command "$CXX" || echo "-DCMAKE_CXX_COMPILER=NOTFOUND"
    if have_command ccache; then echo "-UMEGATRON_CCACHE"; else echo "-DMEGATRON_CCACHE=OFF"; fi
}

with_cmake() {
    rm -rf "$build"/tests/test_* "$build/engine" # otherwise a program that no longer builds would pass
    # shellcheck disable=SC2046  # a list of options
    cmake -S . -B "$build" -G "Unix Makefiles" -DCMAKE_C_COMPILER="$CC" -DMEGATRON_TESTS=$tests \
        -DMEGATRON_BUILD_EXAMPLES=OFF -DMEGATRON_BUILD_BENCH=$bench $(cmake_options) >"$build/configure.log" 2>&1 ||
        { show_log "$build/configure.log"; failed=1; return; }
    not_expected='^$' # without nvcc, CUDA is not expected either
    ! hidden nvcc || not_expected='^CUDA: '
    sed -n 's/^-- left out: //p' "$build/configure.log" >"$build/not_here"
    grep "$not_expected" "$build/not_here" >"$build/not_expected"
    grep -v "$not_expected" "$build/not_here" >"$build/left_out"
    start=$(now)
    cmake --build "$build" -j "$jobs" -- -k >"$build/build.log" 2>&1 || { show_ends "$build/build.log"; failed=1; }
    built=$((($(now) - start) / 1000)) start=$(now)
    echo "built in $built s"
    in_rounds run_ctest
    times="wall time: build $built s, tests $((($(now) - start) / 1000)) s"
}

# CTest runs in the background, so that a signal ends the script at once, and in a session of its own, so that its tests
# end with it.
run_ctest() {
    before=$failed log=$build/Testing/Temporary
    rm -f "$log/LastTestsFailed.log"
    # One more than there are cores, because some tests wait for most of their time.
    # shellcheck disable=SC2046  # a list of options
    (cd "$build" && exec $(command -v setsid) ctest -j $((jobs + 1)) --output-on-failure \
        $([ $tests != variants ] || echo -L '^variant$') ${pattern:+-R "$pattern"}) &
    running=$!
    wait $running
    code=$? running=''
    summary "$log/LastTest.log"
    [ $code -eq 0 ] || [ "$failed" -gt "$before" ] || failed=$((failed + 1))
    cp "$log/LastTest.log" "$build/rounds/$round.log"
    sed 's/^[0-9]*://' "$log/LastTestsFailed.log" >"$build/rounds/$round.failed" 2>/dev/null
}

# Counts the cases of test programs and scripts, lists what was skipped, and prints the tests that took longest.
summary() {
    awk -f tests/summary.awk "$1" >"$build/summary" || failed=$((failed + 1))
    tally "$build/summary"
    sed -n 's/^skip: //p' "$build/summary" >>"$build/left_out"
    echo "The slowest tests:"
    sed -n 's/^time: //p' "$build/summary" | sort -rn | head -n 20
}

# Prints what was left out, a line for each reason. A reason that several tests have names them all.
reasons() {
    awk 'match($0, /^in [^:]*: /) {
            why = substr($0, RLENGTH + 1)
            if (!(why in tests)) order[++n] = why
            tests[why] = tests[why] (tests[why] == "" ? "" : ", ") substr($0, 4, RLENGTH - 5)
            next }
        { print "  " $0 }
        END { for (i = 1; i <= n; i++) print "  in " tests[order[i]] ": " order[i] }' "$build/left_out"
}

# ---- without CMake: only the test programs, one after the other ------------------------------------------------------

with_cc() {
    echo "CMake and make: not here, $CC alone builds the test programs, and nothing else is tested" >"$build/left_out"
    began=$(now)
    in_rounds run_programs
    times="wall time: build and tests $((($(now) - began) / 1000)) s"
}

run_programs() {
    for source in tests/test_*.c; do
        name=$(basename "$source" .c) log=$build/$(basename "$source").log start=$(now)
        echo "$name" | grep -E -q -e "${pattern:-.}" || continue
        [ "$round" -gt 1 ] || rm -f "$build/$name" # one of an earlier run
        { [ "$round" -gt 1 ] || "$CC" -O1 -g -I. "$source" -o "$build/$name" -lm -lpthread; } >"$log" 2>&1 &&
            "$build/$name" >>"$log" 2>&1
        code=$?
        ok=$(grep -c '^\[       OK \]' "$log") bad=$(grep -c '^\[  FAILED  \] [a-z]' "$log")
        out=$(grep -c '^\[  SKIPPED \] [a-z]' "$log")
        [ $code -eq 0 ] || [ $code -eq 77 ] || [ "$bad" -gt 0 ] || bad=1
        passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + out))
        line "$([ "$bad" = 0 ] && echo ok || echo FAIL)" "$name" "$start" "$ok passed"
        [ "$bad" = 0 ] || { show_log "$log"; echo "$name" >>"$build/rounds/$round.failed"; }
    done
}

# ---- everything ------------------------------------------------------------------------------------------------------

# shellcheck disable=SC2046  # a word, or none
ensure_packages build-essential cmake libdnnl-dev libopenblas-dev clang clang-format ccache locales \
    openmpi-bin libopenmpi-dev \
    $([ $tests = quick ] || echo pkg-config gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user) # only for variants
have_library libc stdio.h m || { echo "No working C compiler: $CC"; failed=1; closing_line; exit 1; }
echo "$("$CC" --version | head -n 1); $jobs cores; tests: $tests"
if have_command cmake && have_command make; then with_cmake; else with_cc; fi
if [ -s "$build/left_out" ]; then
    awk '!seen[$0]++' "$build/left_out" >"$build/left_out.once" && mv "$build/left_out.once" "$build/left_out"
    echo "Left out$([ "$strict" = 0 ] || echo ", which is a failure with --strict"):"
    reasons
    skipped=$((skipped + $(grep -vc '^in ' "$build/left_out"))) # skips in tests are already counted
    [ "$strict" = 0 ] || [ "$failed" -gt 0 ] || failed=1
fi
[ ! -s "$build/not_expected" ] || echo "Left out, which is no failure: $(cat "$build/not_expected")"
[ -z "$times" ] || echo "$times"
closing_line
[ "$failed" -eq 0 ]
