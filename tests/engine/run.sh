#!/bin/sh
# Tests the engine: builds test_engine in every variant, runs all its cases under many schedules, and checks that each
# planted bug is seen by every build that claims to see it, under at least one schedule.
#
#   sh tests/engine/run.sh [VARIANT...]        (variants and environment: see build.sh)
set -u
cd "$(dirname "$0")" || exit 1
build=${MTE_BUILD_DIR:-../../build/engine}
mkdir -p "$build" || exit 1
log=$build/run.log
passed=0
failed=0
skipped=0

finish() {
    echo "$passed passed, $failed failed, $skipped skipped"
    if [ "$failed" = 0 ]; then exit 0; else exit 1; fi
}

# The schedules under which a planted bug runs, one after the other, until it is seen.
bug_schedules='MTE_STREAMS=eager
MTE_STREAMS=lazy
MTE_STREAMS=greedy
MTE_THREADS=lifo
MTE_PROTECT=1
MTE_THREADS=random,MTE_STREAMS=random,MTE_BLOCKS=random,MTE_SEED=1'

# Prints the schedules of a variant: every order of threads with every order of streams and blocks. cp.async, wgmma and
# protection alternate. The checker needs late copies. The checker and the sanitizers are slow and depend less on the
# schedule, so they run a quarter of the schedules. Without the full matrix (MT_TEST_ALL=1) all variants do.
schedules() {
    number=0
    for threads in fifo lifo random; do
        for streams in eager lazy random greedy; do
            for blocks in fifo lifo random; do
                number=$((number + 1))
                if [ "$1:${MT_TEST_ALL:-0}" != fast:1 ] && [ $((number % 4)) != 0 ]; then continue; fi
                case $((number % 3)) in 0) copies=late ;; 1) copies=early ;; *) copies=random ;; esac
                if [ "$1" = checked ]; then copies=late; fi
                case $((number % 5)) in 0) products=late ;; 1 | 2) products=early ;; *) products=random ;; esac
                orders="MTE_THREADS=$threads,MTE_STREAMS=$streams,MTE_BLOCKS=$blocks,MTE_CP=$copies"
                echo "$orders,MTE_WGMMA=$products,MTE_SEED=$number,MTE_PROTECT=$((number % 2))"
            done
        done
    done
}

# run_with PATIENCE SCHEDULE PROGRAM FLAGS...: after PATIENCE seconds without progress, the engine reports a deadlock
run_with() {
    patience=$1 settings=$(echo "$2" | tr , ' ')
    shift 2
    # shellcheck disable=SC2086
    timeout 600 env MTE_PATIENCE="$patience" $settings "$@" >"$log" 2>&1
}

# Runs all cases without bugs, under every schedule of the variant.
test_variant() {
    count=0
    begin=$(date +%s)
    for schedule in $(schedules "$1"); do
        count=$((count + 1))
        if run_with 300 "$schedule" "$build/$1/test_engine"; then continue; fi
        echo "FAIL  $1: all cases, with $schedule"
        head -n 20 "$log"
        failed=$((failed + 1))
        return
    done
    echo "ok    $1: all cases under $count schedules, $(($(date +%s) - begin)) s"
    passed=$((passed + 1))
}

# Sets `how` to the first schedule under which the variant sees the bug, or to nothing.
find_bug() {
    how=
    for schedule in $bug_schedules; do
        if run_with 1 "$schedule" "$build/$1/test_engine" --bug "$2"; then continue; fi
        how=$schedule
        return
    done
}

claims() { case " $2 " in *" $1 "*) true ;; *) false ;; esac; }

# test_bug BUG "variants that claim to see it"
test_bug() {
    seen=
    missed=
    for variant in $variants; do
        find_bug "$variant" "$1"
        if [ -n "$how" ]; then
            case $how in MTE_STREAMS=eager) seen="$seen $variant" ;; *) seen="$seen $variant ($how)" ;; esac
        elif claims "$variant" "$2"; then
            missed="$missed $variant"
        fi
    done
    if [ -z "$missed" ]; then
        echo "ok    bug $1: seen by$seen"
        passed=$((passed + 1))
    else
        echo "FAIL  bug $1: seen by${seen:- nobody}, missed by$missed"
        failed=$((failed + 1))
    fi
}

# ucontext differs from fast only in the fibers: it is not tested with the bugs.
all_variants=${*:-fast asan checked ucontext}
variants=
for variant in $all_variants; do
    sh build.sh "$variant" >"$log" 2>&1
    status=$?
    if [ $status = 77 ]; then
        echo "skip  engine: $(cat "$log")"
        skipped=1
        finish
    fi
    if [ $status != 0 ]; then
        echo "FAIL  $variant does not build"
        head -n 40 "$log"
        failed=$((failed + 1))
        continue
    fi
    test_variant "$variant"
    if [ "$variant" != ucontext ]; then variants="$variants $variant"; fi
done

if [ -z "$variants" ]; then finish; fi
"$build/${variants##* }/test_engine" --list >"$build/bugs"
while read -r bug builds; do test_bug "$bug" "$builds"; done <"$build/bugs"
finish
