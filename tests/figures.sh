#!/bin/sh
# Tests examples/figures.py: what it reads, also from the output of examples/paper.c and from the results of the
# benchmark, and what it draws.
#
#   sh tests/figures.sh        one line per check, closing line "N passed, N failed, N skipped"
#
# Drawing needs the package matplotlib of PyPI, which is installed in a virtual environment in the build directory.
# Where it cannot be installed, drawing is skipped.
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
build=${MT_BUILD_DIR:-build}/figures
mkdir -p "$build" || exit 1
build=$(cd "$build" && pwd)
check_log=$build/check.log
PYTHONDONTWRITEBYTECODE=1 PAPER_TXT=$build/paper.txt
export PYTHONDONTWRITEBYTECODE PAPER_TXT

paper() {
    find_implementation "$build"
    # shellcheck disable=SC2086  # a list of flags
    "$CC" -O0 -I. $declarations examples/paper.c -o "$build/paper" "$implementation" -lm -lpthread &&
        "$build/paper" >"$PAPER_TXT"
}

figures() {
    if ! have_command python3; then
        leave_out "figures.py: no python3 here"
        return
    fi
    check "paper runs" paper
    check "figures.py: logs, tables of paper.c, results of the benchmark, refusals" \
        python3 tests/test_figures.py Reading
    if hidden matplotlib || ! find_python "$build/python" matplotlib >"$build/python.log" 2>&1; then
        leave_out "figures.py draws: matplotlib is not here, and could not be installed"
        return
    fi
    check "figures.py: curves and bars, files" "$python" tests/test_figures.py Drawing
}

figures
closing_line
[ "$failed" -eq 0 ]
