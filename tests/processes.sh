#!/bin/sh
# Tests train_gpt as processes over NCCL, started with the environment of torchrun, on as many machines as NCCL sees.
#
#   sh tests/processes.sh PROGRAM FOLDER [FLAGS...]
#
# PROGRAM is examples/train_gpt.c with MT_USE_NCCL, built for GPUs or by tests/cuda.sh for the engine. It checks that
# losses are those of the same number of threads, to the last digit; that only rank 0 prints and writes; that when a
# rank is killed or stopped, every other one ends with one message and an exit status that is not 0;
# and that a run resumed from the last checkpoint has the bits of an uninterrupted run. Logs go to FOLDER.
set -u
program=$1 out=$2
shift 2
ranks=4 holder='' kills_itself='' kill_call=''
mkdir -p "$out" || exit 1

pid() { eval "echo \${pid_$1:-}"; }

# Kills the processes that `start` has started and that have not ended.
end_all() {
    for rank in 0 1 2 3; do
        [ -z "$(pid $rank)" ] || kill -s KILL "$(pid $rank)" 2>/dev/null
    done
    for rank in 0 1 2 3; do
        [ -z "$(pid $rank)" ] || wait "$(pid $rank)"
    done
}
trap 'exit 1' HUP INT TERM
trap 'end_all; [ -z "$holder" ] || kill $holder' EXIT

# ends RANK: waits for the rank and returns its exit status
ends() {
    process=$(pid "$1")
    eval "pid_$1="
    wait "$process"
}

fail() {
    echo "$1"
    shift
    for file in "$@"; do
        echo "-- $file:"
        head -n 20 "$file"
    done
    exit 1
}

# Sets port, on which NCCL will listen, and which a process holds until the end of this script: see mt_test_port.h.
hold_port() {
    printf '#include <stdio.h>\n#include "tests/mt_test_port.h"\nint main(void) {\n%s%s%s}\n' \
        'int held; printf("%d\n", test_take_port(0, &held));' 'fflush(stdout);' 'for (;;) pause();' >"$out/hold.c"
    "${CC:-cc}" -I. "$out/hold.c" -o "$out/hold" || exit 1
    rm -f "$out/port"
    "$out/hold" >"$out/port" &
    holder=$!
    until_there test -s "$out/port"
    port=$(cat "$out/port")
}

# start NAME MACHINES FLAGS...: one process per rank, in the background; sets pid_0, pid_1, ... The rank $kills_itself
# does so at its call $kill_call (kill_at.c).
start() {
    name=$1 here=$((ranks / $2))
    shift 2
    rank=0
    while [ $rank -lt $ranks ]; do
        call=0
        [ "$rank" != "$kills_itself" ] || call=$kill_call
        MT_KILL_CALL=$call RANK=$rank WORLD_SIZE=$ranks LOCAL_RANK=$((rank % here)) \
            NCCL_HOSTID=machine$((rank / here)) MASTER_ADDR=127.0.0.1 MASTER_PORT=$((port - 1)) \
            "$program" --device cuda --tp 2 --dp 2 "$@" \
            >"$out/$name.$rank.out" 2>"$out/$name.$rank.err" &
        eval "pid_$rank=$!"
        rank=$((rank + 1))
    done
}

# threads FLAGS...: runs with threads, to get the expected results of the processes
threads() {
    rm -f "$out/threads.csv"
    "$program" --device cuda --tp 2 --dp 2 "$@" --log "$out/threads.csv" >"$out/threads.out" 2>&1 ||
        fail "threads" "$out/threads.out"
}

same_losses() {
    cut -d , -f 1-3,5- "$out/threads.csv" >"$out/expected.csv" # without the tokens per second
    cut -d , -f 1-3,5- "$out/$1.csv" | cmp -s - "$out/expected.csv" ||
        fail "$1: other losses" "$out/expected.csv" "$out/$1.csv"
}

# Waits for all ranks. If one fails, prints the messages of every rank: the first to end is seldom the cause.
all_succeed() {
    bad=
    for rank in 0 1 2 3; do
        ends $rank || bad="$bad $rank"
    done
    [ -z "$bad" ] || fail "$name: fails on$bad" "$out/$name".*.err
}

# trains NAME MACHINES FLAGS...
trains() {
    start "$@" --log "$out/$1.csv"
    all_succeed
    for rank in 0 1 2 3; do
        [ ! -s "$out/$name.$rank.err" ] || fail "$name: rank $rank complains" "$out/$name.$rank.err"
        [ $rank = 0 ] || [ ! -s "$out/$name.$rank.out" ] || fail "$name: rank $rank prints" "$out/$name.$rank.out"
    done
    grep -q '^step ' "$out/$name.0.out" || fail "$name: rank 0 says nothing" "$out/$name.0.out"
    same_losses "$name"
    echo "$name: $ranks processes on $2 machine(s), the losses of $ranks threads"
}

# says NAME RANK SIGNAL: expects one message, of this rank, that names a collective and its communicator; a killed rank
# is detected at once, a stopped one may cause a timeout
says() {
    [ "$(wc -l <"$out/$1.err")" -eq 1 ] &&
        grep -q "^rank $2 of $ranks: MT_ERR_[A-Z]*: [a-z_]*.* on \"" "$out/$1.err" || return 1
    grep -q 'MT_ERR_PEER' "$out/$1.err" || { [ "$3" = STOP ] && grep -q 'MT_ERR_TIMEOUT' "$out/$1.err"; }
}

# lost SIGNAL VICTIM: checks the other ranks of one that gets the signal
lost() {
    for rank in 0 1 2 3; do
        [ $rank != "$2" ] || continue
        ends $rank && fail "$name: rank $rank succeeds" "$out/$name.$rank.err"
        says "$name.$rank" $rank "$1" || fail "$name: what rank $rank says" "$out/$name.$rank.err"
    done
    end_all
    echo "$name: $(cat "$out/$name".*.err | head -n 1)"
}

# until_there COMMAND...: repeats the command until it succeeds
until_there() {
    tries=0
    until "$@"; do
        tries=$((tries + 1))
        [ $tries -lt 6000 ] || fail "$name: it does not begin" "$out/$name.0.err"
        sleep 0.1
    done
}

# ran_out NAME VICTIM: does a rank say of a timeout something else than is expected when the victim is stopped?
ran_out() {
    for rank in 0 1 2 3; do
        [ $rank = "$2" ] || says "$1.$rank" $rank STOP || ! grep -q 'MT_ERR_TIMEOUT' "$out/$1.$rank.err" || return 0
    done
    return 1
}

# loses SIGNAL VICTIM FLAGS...: loses a rank in the middle of a long run. The timeout is waited for only when the rank
# is stopped. A slow machine needs a longer one: then a timeout is over that is not meant. Any other failure is one at
# once.
loses() {
    if [ "$1" = KILL ]; then
        loses_within 3600 "$@"
        return
    fi
    for timeout in 8 16 32 64; do
        (trap end_all EXIT && loses_within $timeout "$@") && return
        ran_out "$1-$2" "$2" || break
    done
    exit 1
}

# loses_within TIMEOUT SIGNAL VICTIM FLAGS...
loses_within() {
    timeout=$1 signal=$2 victim=$3
    shift 3
    start "$signal-$victim" 1 "$@" --steps 1000000 --timeout $timeout
    until_there grep -qs '^step ' "$out/$name.0.out"
    kill -s "$signal" "$(pid "$victim")"
    lost "$signal" "$victim"
}

# resumes VICTIM FLAGS...: a run that loses this rank is resumed, and must end with the files of an uninterrupted run
resumes() {
    victim=$1
    shift
    rm -rf "$out/whole" "$out/run"
    threads "$@" --steps 12 --checkpoint "$out/whole"
    kills_itself=$victim
    start "checkpoint-$victim" 1 "$@" --steps 12 --timeout 3600 --checkpoint "$out/run" --save-interval 1
    kills_itself=''
    lost KILL "$victim"
    [ -d "$out/run/step-00000003" ] && [ ! -d "$out/run/step-00000012" ] || fail "$name: not after 3 to 11 saves"
    start "resumed-$victim" 1 "$@" --steps 12 --checkpoint "$out/run" --resume
    all_succeed
    diff -r "$out/whole/step-00000012" "$out/run/step-00000012" || fail "$name: other files"
    echo "$name: the files of a run that lost nobody"
}

hold_port
threads "$@"
trains one-machine 1 "$@"
trains two-machines 2 "$@"
if command -v torchrun >/dev/null 2>&1; then
    torchrun --standalone --no-python --nproc-per-node $ranks "$program" --device cuda --tp 2 --dp 2 "$@" \
        --log "$out/torchrun.csv" >"$out/torchrun.out" 2>&1 || fail "torchrun" "$out/torchrun.out"
    same_losses torchrun
    echo "torchrun: the losses of $ranks threads"
else
    echo "torchrun is not here: its environment is, above"
fi
threads "$@" --tp 1 --pp 2 --use-distributed-optimizer
trains stages 1 "$@" --tp 1 --pp 2 --use-distributed-optimizer
loses KILL 2 "$@"
loses KILL 0 "$@"
loses STOP 1 "$@"
loses STOP 0 "$@"
kill_call=40 # in the fifth save: rank 2 makes 9 calls in each
resumes 2 "$@" --dp 1 --pp 2
