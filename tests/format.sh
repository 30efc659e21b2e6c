#!/bin/sh
# Checks the format of all code and scripts: lines of at most 120 columns, and .clang-format for C, C++ and CUDA.
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

# files PATTERN: those below this folder whose path matches the pattern, a regular expression of find; of hidden
# folders only those in .ci
files() {
    find . -path "./build*" -prune -o -name '.?*' ! -name .ci -prune -o -type f -regex "$1" -print
}
sources() { files '.*\.\(h\|c\|cu\|cuh\|cpp\)'; }
scripts() { files '.*\.\(sh\|py\|awk\|pl\|cmake\)\|.*/CMakeLists\.txt\|\./\.ci/run'; }

# columns FOLDER, formatted FOLDER: print what is wrong in the files below it
columns() {
    (cd "$1" && { sources; scripts; } |
        xargs awk 'length($0) > 120 { print FILENAME ":" FNR ": " length($0) " columns" }') | fail_on_output
}
formatted() { (cd "$1" && sources | xargs clang-format --dry-run -Werror 2>&1 | grep error) | fail_on_output; }

# finds CHECK FILE...: CHECK finds the faults that were planted in these files of the folder $work/CHECK, and no others
finds() {
    "$1" "$work/$1" >"$work/found" 2>&1 && { echo "$1 finds nothing"; return 1; }
    cat "$work/found"
    sed 's/:.*//' "$work/found" | sort -u >"$work/files"
    shift
    printf './%s\n' "$@" | sort | diff - "$work/files"
}

comment_of() {
    awk -v columns="$1" 'BEGIN { s = "// "; while (length(s) < columns) s = s "x"; print "int i;"; print s }'
}

finds_columns() {
    mkdir -p "$work/columns/.ci" || return 1
    for file in narrow.c narrow.sh; do comment_of 120 >"$work/columns/$file"; done
    set -- wide.h wide.c wide.cu wide.cuh wide.cpp wide.sh wide.py wide.awk wide.pl wide.cmake CMakeLists.txt .ci/run
    for file in "$@"; do comment_of 121 >"$work/columns/$file"; done
    finds columns "$@"
}

finds_format() {
    mkdir "$work/formatted" && cp .clang-format "$work/formatted" || return 1
    printf 'int f(int a) {\n    a++;\n    return a;\n}\n' >"$work/formatted/indented.c"
    printf 'int f(int a) {\n  a++;\n  return a;\n}\n' >"$work/formatted/crooked.c"
    finds formatted crooked.c
}

check "lines of at most 120 columns" columns .
check "one of 121 columns is found, one of 120 is not" finds_columns
case $(hidden clang-format || clang-format --version 2>/dev/null) in
*'version 14.'*)
    check "clang-format 14 would change nothing" formatted .
    check "a file that it would change is found" finds_format
    ;;
*) leave_out "clang-format 14 is not here" ;;
esac
closing_line
[ $failed -eq 0 ]
