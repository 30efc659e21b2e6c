#!/bin/sh
# Checks the format of all C, C++ and CUDA code: lines of at most 120 columns, and what .clang-format says.
#
#   sh tests/format.sh        one line per check, closing line "N passed, N failed, N skipped"
#   clang-format -i FILE      writes it
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
work=$(mktemp -d) || exit 1
check_log=$work/log
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

sources() { find . -path "./build*" -prune -o -name .git -prune -o -type f -regex '.*\.\(h\|c\|cu\|cuh\|cpp\)' -print; }

columns() { sources | xargs awk 'length($0) > 120 { print FILENAME ":" FNR ": " length($0) " columns" }' | fail_on_output; }

formatted() { sources | xargs clang-format --dry-run -Werror 2>&1 | grep error | fail_on_output; }

check "lines of at most 120 columns" columns
case $(hidden clang-format || clang-format --version 2>/dev/null) in
*'version 14.'*) check "clang-format 14 would change nothing" formatted ;;
*) leave_out "clang-format 14 is not here" ;;
esac
closing_line
[ $failed -eq 0 ]
