# shellcheck shell=sh disable=SC2034
# Read by tests/run.sh, the scripts beside it and .ci/run: prints one line per check, and the totals.

LC_ALL=C
export LC_ALL
passed=0 failed=0 skipped=0
check_log=/dev/null # the log of `check`; must be a file
left_out= # skipped checks that could have run with more packages, one per line

# Is the full matrix requested (MT_TEST_ALL=1)?
in_full() { [ "${MT_TEST_ALL:-0}" = 1 ]; }

# Random numbers: start_drawing, then `draw N` sets drawn to a number from 0 to N - 1. They depend only on the seed.
test_seed=${MT_TEST_SEED:-1}
start_drawing() {
    echo "MT_TEST_SEED=$test_seed"
    random=$test_seed
}
draw() {
    random=$(((random * 1103515245 + 12345) % 2147483648))
    drawn=$((random / 65536 % $1))
}

# A clock in milliseconds; in whole seconds where date has no %N.
now() {
    t=$(date +%s%3N)
    case $t in
    *[!0-9]*) echo "$(date +%s)000" ;;
    *) echo "$t" ;;
    esac
}

# wait_for COMMAND...: repeats the command until it succeeds, for at most ten minutes
wait_for() {
    tries=0
    until "$@"; do
        tries=$((tries + 1))
        [ $tries -lt 6000 ] || { echo "after ten minutes not yet: $*"; return 1; }
        sleep 0.1
    done
}

# line RESULT NAME START COUNT
line() {
    ms=$(($(now) - $3))
    printf '  %-4s  %-30s %7d.%d s  %s\n' "$1" "$2" $((ms / 1000)) $((ms % 1000 / 100)) "$4"
}

show_log() { sed 's/^/        /' "$1"; }

# show_ends FILE: prints a log; of a long one, only the beginning and the end
show_ends() {
    lines=$(wc -l <"$1") most=${check_lines:-200}
    if [ "$lines" -le "$most" ]; then
        show_log "$1"
    else
        head -n $((most / 4)) "$1" | sed 's/^/        /'
        echo "        ... $((lines - most / 4 - most / 2)) lines ..."
        tail -n $((most / 2)) "$1" | sed 's/^/        /'
    fi
}

# check TITLE COMMAND...: runs the command. When it fails, prints its output.
check() {
    title=$1 check_start=$(now)
    shift
    if "$@" >"$check_log" 2>&1 </dev/null; then
        passed=$((passed + 1)) outcome=ok
    else
        failed=$((failed + 1)) outcome=FAIL
    fi
    check_time=$((($(now) - check_start) / 1000))
    printf '  %-4s  %s%s\n' $outcome "$title" "$([ $check_time -lt 5 ] || echo ", $check_time s")"
    [ $outcome = ok ] || show_ends "$check_log"
}

# Copies its input, which is a list of errors, and fails if there was any.
fail_on_output() { awk '{ print } END { exit NR > 0 }'; }

# leave_out TITLE: reports a check that could not run because something is missing; --strict does not accept it
leave_out() {
    skipped=$((skipped + 1))
    printf '  skip  %s\n' "$1"
    left_out="$left_out  $1
"
}

# skip TITLE: reports a check that is not expected to run on every machine
skip() {
    skipped=$((skipped + 1))
    printf '  skip  %s (not a failure, also with --strict)\n' "$1"
}

# tally FILE: adds the totals of a script's output; without a closing line, the script did not finish
tally() {
    totals=$(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p' "$1" | tail -n 1)
    # shellcheck disable=SC2086  # three numbers
    set -- ${totals:-0 1 0}
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
}

closing_line() { echo "$passed passed, $failed failed, $skipped skipped"; }
