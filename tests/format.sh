#!/bin/sh
# Checks the format of all code and scripts: lines of at most 120 columns, and .clang-format for C, C++ and CUDA; and
# the subjects of commits: 1 to 72 characters.
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

# The last commit whose subject may have any length.
unlimited=c372daca3750eac4f380de7834de7d45f119a465

# has_commit FOLDER COMMIT: is it in the history of the checkout in this folder?
has_commit() { git -C "$1" merge-base --is-ancestor "$2" HEAD 2>/dev/null; }

# subjects FOLDER COMMIT: prints the commits after this one whose subject is empty or too long
subjects() {
    git -C "$1" -c log.showSignature=false log --encoding=UTF-8 --format='%h %s' "$2..HEAD" >"$work/commits" ||
        return 1
    awk '{
        subject = text = substr($0, length($1) + 2)
        gsub(/[\200-\277]/, "", text) # the further bytes of characters in UTF-8
        if (text == "" || length(text) > 72) print $1 ": " length(text) " characters: " subject
    }' "$work/commits" | fail_on_output
}

# subject_of COLUMNS
subject_of() { printf "%$1s" '' | tr ' ' x; }

# in_scratch ARGUMENT...: git in a repository of this script, without the settings of the user and of the machine
in_scratch() {
    GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 git -C "$work/scratch" -c user.name=nobody \
        -c user.email=nobody@example.org "$@"
}
commit_scratch() { in_scratch commit -q --allow-empty --allow-empty-message -m "$1"; }

# Commits at the limit, beyond it and without a subject, after one that may have any length.
finds_subjects() {
    mkdir "$work/scratch" && in_scratch init -q && commit_scratch "$(subject_of 200)" &&
        start=$(in_scratch rev-parse HEAD) || return 1
    commit_scratch "$(subject_of 72)" && commit_scratch "$(subject_of 71)$(printf '\303\274')" || return 1
    subjects "$work/scratch" "$start" || { echo "finds a subject of 72 characters"; return 1; }
    commit_scratch "$(subject_of 73)" && commit_scratch '' || return 1
    ! subjects "$work/scratch" "$start" >"$work/found" || { echo "finds nothing"; return 1; }
    printf '%s: 0 characters: \n%s: 73 characters: %s\n' "$(in_scratch rev-parse --short HEAD)" \
        "$(in_scratch rev-parse --short HEAD~1)" "$(subject_of 73)" | diff - "$work/found" || return 1
    ! has_commit "$work/scratch" "$unlimited" || { echo "finds a commit that is not there"; return 1; }
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
if have_command git; then
    # A hook of git sets GIT_DIR and others, which count more than the folder.
    # shellcheck disable=SC2046  # a list of names
    unset $(git rev-parse --local-env-vars)
    if has_commit . "$unlimited"; then
        check "subjects of commits have 1 to 72 characters" subjects . "$unlimited"
    else
        skip "subjects of commits: no checkout of git, or one without commit $unlimited"
    fi
    check "one of 73 characters is found, one of 72 is not" finds_subjects
else
    skip "subjects of commits: git is not here"
fi
closing_line
[ $failed -eq 0 ]
