#!/bin/sh
# Builds each example with the command in its first lines and runs it, train_gpt for only 3 steps.
#
#   sh tests/examples.sh [NAME]      one line per command, closing line "N passed, N failed, N skipped"
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
build=${MT_BUILD_DIR:-build}/examples
mkdir -p "$build" || exit 1
build=$(cd "$build" && pwd)
check_log=$build/${1:-all}.log

# Each example has the commands that build it in its first lines: cc ... -o NAME ... [&& ./NAME ARGUMENTS]
example_commands() { sed -n '1,30s/^[^A-Za-z]*\(cc .* -o .*\)$/\1/p' "$1" | sed 's|[ ]*\*/.*||'; }

# The arguments to run it with: those of its command, but only few steps of training.
example_arguments() {
    case $1:$2 in
    train_gpt:*) echo "--steps 3" ;;
    *"&& ./"*) echo "$2" | sed 's|.*&& \./[^ ]*||' ;;
    esac
}

# run_example NAME COMMAND: commands with a GEMM library run only in the full matrix
run_example() {
    title=$1
    case $2 in
    *-DMT_USE_*) in_full || return ;;
    esac
    case $2 in
    *-ldnnl*) title="$1, oneDNN"; have_package libdnnl-dev || { leave_out "$title: not here"; return; } ;;
    *-lopenblas*) title="$1, OpenBLAS"; have_package libopenblas-dev || { leave_out "$title: not here"; return; } ;;
    esac
    compile=$(echo "${2%%&&*}" | sed "s|^cc |$CC |; s| -o [^ ]*| -o $build/$1|")
    # shellcheck disable=SC2046  # arguments
    check "$title" sh -c "$compile && exec \"\$@\"" sh "$build/$1" $(example_arguments "$1" "$2")
}

# Compiles without the implementation: its #includes would hide one that the example lacks.
includes_what_it_uses() {
    # shellcheck disable=SC2086  # a list of flags
    "$CC" -Wall -Wextra -Werror -I. $DECLARATIONS_ONLY -fsyntax-only "$1"
}

for source in examples/*.c; do
    case ${1:-} in
    "" | "$(basename "$source" .c)") ;;
    *) continue ;;
    esac
    check "$(basename "$source" .c) includes what it uses" includes_what_it_uses "$source"
    commands=$(example_commands "$source")
    [ -n "$commands" ] || { echo "  FAIL  $source: its first lines do not build it"; failed=$((failed + 1)); }
    while read -r command; do
        [ -z "$command" ] || run_example "$(basename "$source" .c)" "$command"
    done <<END
$commands
END
done
closing_line
[ "$failed" -eq 0 ]
