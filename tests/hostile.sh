#!/bin/sh
# Calls every public function with hostile arguments (hostile_calls.c). hostile_calls.py writes the calls from the
# declarations in the headers, so a new function is called, too.
#
#   sh tests/hostile.sh [PART...]    plain: without a sanitizer; gcc, clang: with AddressSanitizer and
#                                    UndefinedBehaviorSanitizer; by default all of them. clang's finds NULL + n.
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
build=${MT_BUILD_DIR:-build}/hostile
mkdir -p "$build" || exit 1
build=$(cd "$build" && pwd)
check_log=$build/check.log check_lines=40
# A size of many GB must not be reserved, because the sanitizer would fill its shadow.
ASAN_OPTIONS=allocator_may_return_null=1:detect_leaks=0:max_allocation_size_mb=1024
UBSAN_OPTIONS=print_stacktrace=1
export ASAN_OPTIONS UBSAN_OPTIONS

table() { python3 tests/hostile_calls.py >"$build/hostile_calls_table.h"; }

# The table has as many functions as the headers have declarations.
complete() {
    for header in mt_comm.h mt_kernels.cuh mt_parallel.h megatron.h; do
        sed '/the API ends here/q' $header
    done | grep -c '^MT_API ' >"$build/declared"
    grep -c '^static void call_' "$build/hostile_calls_table.h" >"$build/called"
    echo "$(cat "$build/declared") declarations, $(cat "$build/called") calls"
    cmp "$build/declared" "$build/called"
}

# Without a limit, the system may promise more memory than it has, and fill it for minutes.
calls_without_a_sanitizer() {
    find_implementation "$build"
    # shellcheck disable=SC2086  # a list of flags
    "$CC" -O0 -I. -Itests -I"$build" $declarations tests/hostile_calls.c "$implementation" -o "$build/plain" -lm \
        -lpthread && (ulimit -v 4000000 && "$build/plain")
}

# -O0 compiles faster, and removes no undefined behaviour before it is seen.
calls() {
    # shellcheck disable=SC2086  # a list of flags
    "$1" -O0 $SANITIZE -c -I. tests/package/implementation.c -o "$build/$1.o" &&
        "$1" -O0 $SANITIZE -I. -Itests -I"$build" $DECLARATIONS_ONLY tests/hostile_calls.c "$build/$1.o" \
            -o "$build/$1" -lm -lpthread && "$build/$1"
}

works() {
    echo 'int main(void) { return 0; }' >"$build/empty.c"
    # shellcheck disable=SC2086  # a list of flags
    "$1" $SANITIZE "$build/empty.c" -o "$build/empty" && "$build/empty"
}

[ $# -gt 0 ] || set -- plain gcc clang
if ! have_command python3; then
    skip "hostile calls: no python3 here"
    closing_line
    exit 77
fi
check "a call of each public function is written" table
check "no declaration is left out" complete
for part in "$@"; do
    case $part in
    plain) check "hostile calls" calls_without_a_sanitizer ;;
    gcc | clang)
        if have_command "$part" && works "$part" >/dev/null 2>&1; then
            check "hostile calls with the sanitizers of $part" calls "$part"
        else
            leave_out "$part: not here, or without sanitizers"
        fi ;;
    *) echo "no part is called $part" >&2; exit 2 ;;
    esac
done
closing_line
[ "$failed" -eq 0 ]
