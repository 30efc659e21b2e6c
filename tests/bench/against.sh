#!/bin/sh
# Compares the speed of this tree with that of another revision: runs the benchmarks of both in turns.
#
#   sh tests/bench/against.sh REVISION [ROUNDS [ITEM...]]      default: 5 rounds of the items layer and collectives
#
# Each tree's tests/bench/bench.c is built with its own headers and the same flags. For each row the script prints the
# median, smallest and largest of the rounds' ratios new / old, and the median figures. A ratio below 1 means that this
# tree is faster.
set -u
cd "$(dirname "$0")/../.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
revision=${1:?usage: sh tests/bench/against.sh REVISION [ROUNDS [ITEM...]]} rounds=${2:-5}
shift $(($# > 2 ? 2 : $#))
[ $# -gt 0 ] || set -- layer collectives
build=${MT_BUILD_DIR:-build}/against
mkdir -p "$build" && build=$(cd "$build" && pwd) || exit 1

# build_bench TREE NAME
build_bench() {
    # shellcheck disable=SC2046  # a list of flags
    "$CC" -O3 -march=native -I"$1" "$1/tests/bench/bench.c" -o "$build/$2" $(fastest_gemm) -lm -lpthread
}

rm -rf "$build/tree" && mkdir "$build/tree" && git archive "$revision" | tar -x -C "$build/tree" &&
    build_bench "$build/tree" old && build_bench . new || exit 1
: >"$build/rows.csv"
: >"$build/notes.txt"
round=0
while [ $round -lt "$rounds" ]; do
    round=$((round + 1))
    [ $((round % 2)) = 0 ] && order="old new" || order="new old"
    for which in $order; do
        for item in "$@"; do
            "$build/$which" --csv --seconds "${MT_BENCH_SECONDS:-1}" --only "$item" 2>>"$build/notes.txt" |
                sed -n "s/^\($item,.*\)/$which,$round,\1/p"
        done
    done
done >>"$build/rows.csv"
# A line is TREE,ROUND, and then a row of --csv. Only rows that both trees have are compared. The ratio of a rate is
# inverted, so that below 1 always means faster.
python3 - "$build/rows.csv" <<'END'
import csv, statistics, sys
rows = {}
for which, round, item, name, median, low, high, unit, *rest in csv.reader(open(sys.argv[1])):
    if median and unit:
        rows.setdefault((item, name, unit), {}).setdefault(which, {})[round] = float(median)
print("%-14s %-52s %7s %7s %7s %12s %12s" % ("item", "name", "new/old", "least", "most", "old", "new"))
for (item, name, unit), both in rows.items():
    old, new = both.get("old", {}), both.get("new", {})
    ratios = [(old[r] / new[r] if "/s" in unit else new[r] / old[r])
              for r in old if r in new and old[r] > 0 and new[r] > 0]
    if ratios:
        print("%-14s %-52s %7.3f %7.3f %7.3f %9.4g %s %9.4g %s" % (
            item, name[:52], statistics.median(ratios), min(ratios), max(ratios),
            statistics.median(old.values()), unit, statistics.median(new.values()), unit))
END
