#!/bin/sh
# shellcheck disable=SC2317  # check calls functions
# shellcheck disable=SC2086,SC2016  # lists of flags and numbers; programs for other shells
# Tests communicators over MPI, whose ranks are processes: under Open MPI's mpirun, through shared memory and TCP, also
# between two machines made of network namespaces; and with ranks that are killed, stopped, sleep, return or fail.
#
#   sh tests/mpi.sh [PART...]      one line per check, closing line "N passed, N failed, N skipped"
#
# Parts: builds (needed by the others), all_tests, sanitizers, training, faults, two_machines; default: all of them.
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
build=${MT_BUILD_DIR:-build}/mpi
mkdir -p "$build" || exit 1
build=$(cd "$build" && pwd)
check_log=$build/check-${1:-all}.log check_lines=40
warnings="-Wall -Wextra -Wpedantic -Wconversion -Werror"
tcp="--mca btl tcp,self"
# Allows Open MPI to run as root and with more ranks than cores. Ranks are not bound: those of two jobs would share
# cores.
OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM OMPI_MCA_rmaps_base_oversubscribe \
    OMPI_MCA_hwloc_base_binding_policy

# ---- building ------------------------------------------------------------------------------------------------------

# mpi.h may have warnings
mpi_flags() { for folder in $(mpicc --showme:incdirs); do echo "-isystem $folder"; done; }

# program NAME SOURCE FLAGS...
program() {
    name=$1 source=$2
    shift 2
    # shellcheck disable=SC2046,SC2086  # lists of flags
    "$CC" -g "$@" $warnings -I. -Itests $(mpi_flags) "$source" -o "$build/$name" $(mpicc --showme:link) -lm -lpthread
}

# dialect COMPILER LANGUAGE STANDARD FLAGS: compiles the implementation; FLAGS name the folders of mpi.h
dialect() {
    printf '#define MT_USE_MPI\n#define MEGATRON_IMPLEMENTATION\n#include "megatron.h"\n' >"$build/dialect.c"
    # shellcheck disable=SC2086
    "$1" -x "$2" "-std=$3" $warnings -Wsign-conversion -Wshadow -S -I. $4 "$build/dialect.c" -o /dev/null
}

# all_dialects FLAGS
all_dialects() {
    for compiler in "$CC" clang; do
        have_command "$compiler" || continue
        in_full || { dialect "$compiler" c c99 "$1" && dialect "$compiler" c++ c++11 "$1" || return 1; continue; }
        for standard in c99 gnu11; do dialect "$compiler" c $standard "$1" || return 1; done
        for standard in c++11 c++17; do dialect "$compiler" c++ $standard "$1" || return 1; done
    done
}

links_as_cpp() {
    printf '#define MT_USE_MPI\n#define MEGATRON_IMPLEMENTATION\n#include "megatron.h"\nint main() { return 0; }\n' \
        >"$build/cpp.c"
    # shellcheck disable=SC2046
    "$CXX" -x c++ -I. $(mpi_flags) "$build/cpp.c" -o "$build/cpp" -x none $(mpicc --showme:link) -lm -lpthread &&
        "$build/cpp"
}

# faulty with the headers of another version
other_version() {
    mkdir -p "$build/other" || return 1
    sed 's/^#define MT_VERSION_PATCH .*/#define MT_VERSION_PATCH 99/' mt_comm.h >"$build/other/mt_comm.h"
    program other_version tests/mpi/faulty.c -O1 -DMT_USE_MPI "-I$build/other"
}

# Is nothing newer than the last build of all programs, in which no check failed? CMake runs this part before the parts
# of quick tests, and again before those of variants.
is_built() {
    [ "$how" = "$(cat "$build/built" 2>/dev/null)" ] || return 1
    ! find mt_*.h mt_*.cuh megatron.h examples tests/*.h tests/*.sh tests/*.c tests/mpi -newer "$build/built" |
        grep -q .
}

builds() {
    for mpich in /usr/include/*/mpich /usr/include/mpich /usr/include/mpich-*; do
        [ ! -f "$mpich/mpi.h" ] || break
    done
    how="$CC $CXX ${MT_TEST_ALL:-0} $mpich"
    if is_built; then
        check "the programs are built" test -x "$build/train_gpt"
        return
    fi
    rm -f "$build/built"
    echo "$how" >"$build/building" # before the compiler reads the sources
    build_all
    [ "$failed" -gt 0 ] || mv "$build/building" "$build/built"
}

build_all() {
    check "the headers with Open MPI's mpi.h, C99 to C++17, without a warning" all_dialects "$(mpi_flags)"
    if [ -f "$mpich/mpi.h" ]; then
        check "the same with MPICH's, whose MPI_Comm is an int" all_dialects "-isystem $mpich"
    else
        skip "MPICH's mpi.h: not here"
    fi
    for name in comm faults comm_stress mpi replicas; do
        check "test_$name builds" program "test_$name" "tests/mpi/test_$name.c" -O1
    done
    check "test_comm builds in check mode" program checked_comm tests/mpi/test_comm.c -O1 -DMT_USE_MPI= \
        -include tests/check_all.h
    check "the implementation as C++ links with MPI's C library alone" links_as_cpp
    check "faulty builds" program faulty tests/mpi/faulty.c -O1 -DMT_USE_MPI
    check "faulty of another version builds" other_version
    check "train_gpt builds" program train_gpt examples/train_gpt.c -O1 -std=gnu11 -DMT_USE_MPI -Wno-error \
        tests/kill_at.c "$KILL_AT,--wrap=MPI_Isend"
}

# ---- running -------------------------------------------------------------------------------------------------------

# run RANKS OPTIONS PROGRAM ARGUMENTS...: a job that hangs ends after ten minutes, with the status 124
# Each job has a TMPDIR of its own: of two jobs that begin at once, one may fail to create Open MPI's folder there.
run() {
    ranks=$1 options=$2
    shift 2
    session=$(mktemp -d) || return 1
    # shellcheck disable=SC2086  # a list of options
    TMPDIR=$session timeout -k 10 600 mpirun $options -n "$ranks" "$@"
    ended=$?
    rm -rf "$session"
    return $ended
}

# tests_over HOW OPTIONS
tests_over() {
    check "contexts, collectives, splits, messages, conjugates, over $1" run 8 "$2" "$build/test_comm"
    check "large messages, grids, many groups and worlds, their ends, over $1" run 4 "$2" "$build/test_mpi"
}

checked_comm() {
    for level in 1 2; do MT_TEST_CHECK=$level run 8 "" "$build/checked_comm" || return 1; done
}

# Prints leaks of memory that the library, not MPI, allocated. Two tests leave memory to MPI on purpose.
our_leaks() {
    awk '/ leak of / { block = ""; ours = meant = 0; inside = 1 }
        inside { block = block "\n" $0 }
        / #1 .* in (mti?_|counting_|test_|new_)/ { ours = 1 }
        / in test_(nobody_comes|slow_end) / { meant = 1 }
        /^ *$/ { if (inside && ours && !meant) print block; inside = 0 }' "$1"
}

# sanitized PROGRAM RANKS: leaks are checked separately, because a broken communicator may leave memory to MPI (see
# mt_comm_create_mpi). Each rank reports to a file of its own, PROGRAM_asan.report.PID: lines of ranks that write to one
# file at once mix.
sanitized() {
    # shellcheck disable=SC2086
    program "$1_asan" "tests/mpi/$1.c" -O1 $SANITIZE -Wno-error || return 1
    rm -f "$build/$1_asan".report.*
    (export LSAN_OPTIONS=exitcode=0 UBSAN_OPTIONS=print_stacktrace=1
    ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1:allocator_may_return_null=1
    export ASAN_OPTIONS=$ASAN_OPTIONS:log_path=$build/$1_asan.report
    run "$2" "" "$build/$1_asan" >"$build/$1_asan.log" 2>&1) && return
    tail -n 60 "$build/$1_asan.log"
    for report in "$build/$1_asan".report.*; do head -n 60 "$report"; done
    return 1
}

no_leak() {
    grep -q 'PASSED' "$build/$1_asan.log" && cat "$build/$1_asan".report.* >"$build/$1_asan.reports" &&
        our_leaks "$build/$1_asan.reports" | fail_on_output
}

# ---- training ------------------------------------------------------------------------------------------------------

small="--steps 10 --hidden 64 --layers 2 --seq 32 --batch 4 --eval-interval 5 --sample 10"

# Prints a log without its column of speed.
losses() { cut -d, -f1,2,3,5,6 "$1"; }

# same_losses RANKS FLAGS...
same_losses() {
    ranks=$1
    shift
    rm -f "$build/threads.csv" "$build/processes.csv"
    # shellcheck disable=SC2086  # a list of flags
    timeout -k 10 600 "$build/train_gpt" $small "$@" --no-pinning --log "$build/threads.csv" >"$build/threads.out" &&
        run "$ranks" "" "$build/train_gpt" $small "$@" --log "$build/processes.csv" >"$build/processes.out" ||
        return 1
    [ "$(wc -l <"$build/threads.csv")" -gt 10 ] && losses "$build/threads.csv" >"$build/threads.losses" &&
        losses "$build/processes.csv" | cmp - "$build/threads.losses" || return 1
    # rank 0 prints what the threads print, and the other ranks print nothing
    grep -v 'tokens/s' "$build/threads.out" >"$build/threads.text"
    grep -v 'tokens/s' "$build/processes.out" | cmp - "$build/threads.text"
}

# told_otherwise RANKS VALUES SPLIT FLAGS...: only rank 1 has FLAGS. The message of each rank must contain VALUES; no
# step is run and nothing is written.
told_otherwise() {
    ranks=$1 values=$2 split=$3
    shift 3
    log=$build/told.log
    rm -rf "$build/told.d" && mkdir "$build/told.d" && echo "as it was" >"$build/told.d/log.csv" || return 1
    flags="$small $split --data README.md --log $build/told.d/log.csv --checkpoint $build/told.d/c"
    run "$ranks" "$recovery" sh -c 'flags=$1; shift; [ "$OMPI_COMM_WORLD_RANK" = 1 ] || set --
        "$0" $flags "$@"; echo "rank $OMPI_COMM_WORLD_RANK exits with $?"' "$build/train_gpt" "$flags" "$@" >"$log" 2>&1
    [ "$(grep -c "^rank [0-$((ranks - 1))] of $ranks: MT_ERR_MISMATCH: train_gpt: $values" "$log")" = "$ranks" ] &&
        [ "$(grep -c '^rank [0-9] exits with 1$' "$log")" = "$ranks" ] && ! grep -q '^step' "$log" &&
        [ "$(cat "$build/told.d/log.csv")" = "as it was" ] && [ ! -e "$build/told.d/c" ] && return 0
    cat "$log"
    return 1
}

told_by_flags() {
    told_otherwise 2 '--lr is 0.003 on rank 0, but 0.004 on rank 1 of "world" (2 ranks)' "--tp 2" --lr 0.004 &&
        told_otherwise 2 '--lr is 0.003 on rank 0, but 0.0030000000000000005 on rank 1 of' "--tp 2" \
            --lr 0.0030000000000000005 &&
        told_otherwise 2 '--seed is 1234 on rank 0, but 9000000000000000 on rank 1 of' "--tp 1 --dp 2" --seed 9e15 &&
        told_otherwise 4 '--dropout is 0 on ranks 0, 2, 3, but 0.1 on rank 1 of' "--tp 2 --dp 2" --dropout 0.1 &&
        told_otherwise 2 '--activation is gelu on rank 0, but swiglu on rank 1 of' "--tp 1 --pp 2" \
            --activation swiglu &&
        told_otherwise 2 '--tp is 2 on rank 0, but 1 on rank 1 of' "--tp 2" --tp 1 --dp 2
}

# A file of the same size that differs in one byte is refused. The same file by another path is accepted, and so are
# other settings that may differ.
told_by_data() {
    sed 's/megatron/Megatron/' README.md >"$build/other.md"
    told_otherwise 2 '--data is [0-9]* tokens with hash [0-9a-f]* on rank 0, but [0-9]* tokens with hash' \
        "--tp 1 --dp 2" --data "$build/other.md" || return 1
    cp README.md "$build/other.md"
    run 2 "" sh -c '[ "$OMPI_COMM_WORLD_RANK" = 0 ] ||
            set -- "$@" --data "$0.md" --timeout 30 --no-pinning --log "$0.csv"
        exec "${0%/*}/train_gpt" "$@"' "$build/other" $small --dp 2 --tp 1 --data README.md
}

# What all ranks refuse is printed once.
told_once() {
    for wrong in "--layers 4 --init-from tests/golden/gpt2_hf" "--heads 5"; do
        run 2 "" "$build/train_gpt" --data README.md $wrong >"$build/once.log" 2>&1 && return 1
        grep 'train_gpt: ' "$build/once.log" >"$build/once"
        [ "$(wc -l <"$build/once")" = 1 ] && grep -q 'has 2 layers$\|multiple of heads 5' "$build/once" && continue
        cat "$build/once.log"
        return 1
    done
}

# A checkpoint's model that only one rank refuses is an error of all ranks, which has both reasons.
told_by_one() {
    rm -rf "$build/link" && ln -s "$PWD/tests/golden/gpt2_hf" "$build/link" || return 1
    seq 5000 >"$build/digits" # the vocabulary of the model has 61 tokens
    run 2 "" sh -c '[ "$OMPI_COMM_WORLD_RANK" = 0 ] || cd "$0" || exit 2
        exec "$@"' "$build" "$build/train_gpt" --data "$build/digits" --init-from link >"$build/once.log" 2>&1 &&
        return 1
    [ "$(grep -c '^rank [01] of 2: MT_ERR_MISMATCH: .*reason.*link: has neither.*none' "$build/once.log")" = 2 ] ||
        { cat "$build/once.log"; return 1; }
}

# ---- faults --------------------------------------------------------------------------------------------------------

# The timeout of calls that wait for a lost rank, in seconds. See patiently.
patience=4
recovery="--enable-recovery --mca orte_abort_on_non_zero_status 0" # mpirun does not kill the survivors

# faulty FAULT CALL OPTIONS: rank 2 of 4 has the fault. The timeout of calls is waited for only when nobody says so.
faulty() {
    log=$build/faulty-$1-$2.log limit=$patience
    case $1 in return | fail) limit=3600 ;; esac
    (run 4 "$3" sh -c '"$@"; code=$?; echo "rank $OMPI_COMM_WORLD_RANK exits with $code"; exit $code' sh \
        "$build/faulty" "$1" 2 "$2" $limit >"$log" 2>&1 </dev/null
    echo "mpirun exits with $?" >>"$log") &
}

# told FAULT CALL RANK MESSAGE: expects this message from the rank, and its exit status 1, or mpirun's, which ended it.
# Sets ran_out to 1 when the rank has said otherwise that a timeout, its own or that of another rank, was over.
told() {
    log=$build/faulty-$1-$2.log
    if ! grep -q "^rank $3 of 4: $4" "$log"; then
        ! grep -q "^rank $3 of 4: .*waited [0-9.]* s" "$log" || ran_out=1
    elif grep -q -e "^rank $3 exits with 1" -e "^mpirun exits with 1$" "$log"; then
        return 0
    fi
    echo "$1, $2: rank $3 did not say \"$4\", or exit with 1:"
    cat "$log"
    return 1
}

late() {
    echo "MT_ERR_TIMEOUT: $1.* on \"world\" (4 ranks): waited $patience.00 s for rank 2, whose last call here was $1"
}

all_told() { # FAULT CALL SENTENCE
    told "$1" "$2" 0 "$3" && told "$1" "$2" 1 "$3" && told "$1" "$2" 3 "$3"
}

all_late() { # FAULT CALL NAME
    all_told "$1" "$2" "$(late "$3")"
}

# patiently JOB CHECK...: a rank that a busy machine stops for longer than the timeout is also waited for. Then a rank
# says something else of a timeout (CHECK sets ran_out), and JOB runs again, with twice the timeout. Any other failure
# is one at once.
patiently() {
    job_again=$1 first_patience=$patience verdict=0
    shift
    until ran_out=0 && "$@" >"$build/patience.log" 2>&1; do
        patience=$((2 * patience))
        if [ $ran_out = 0 ] || [ $patience -gt 128 ]; then
            verdict=1
            break
        fi
        eval "$job_again"
        wait
    done
    [ $patience = $first_patience ] || cat "$build/patience.log"
    patience=$first_patience
    return $verdict
}

# said SENTENCE: makes the log of a job in which rank 0 says this
said() { printf 'rank 0 of 4: %s\nrank 0 exits with 1\n' "$1" >"$build/faulty-none-barrier.log"; }

# repeated SENTENCE: is a job repeated in which rank 0 says this, and not that its peer is gone?
repeated() {
    said "$1"
    patiently 'said "MT_ERR_PEER: barrier: rank 2 is gone"' told none barrier 0 "MT_ERR_PEER: barrier: rank 2 is gone"
}

repeats_timeouts_only() {
    repeated "MT_ERR_TIMEOUT: barrier: waited 4.00 s for rank 1" &&
        repeated "MT_ERR_PEER: barrier: calls after this communicator failed (barrier: waited 4.00 s for rank 1)" &&
        ! repeated "MT_ERR_PEER: barrier: rank 1 is gone" &&
        ! repeated "MT_ERR_MISMATCH: barrier: rank 1 calls split" &&
        ! patiently 'said "MT_ERR_PEER"' told none barrier 3 MT_ERR_PEER && [ $patience = 4 ]
}

# Three ranks wait for rank 2, and all four processes are stopped for longer than the timeout. No rank may report
# another one as lost.
stopped_job() {
    log=$build/stopped-job.log ids=$build/stopped-job.ids
    rm -f "$ids" "$ids.until"
    : >"$log"
    FAULTY_UNTIL=$ids.until run 4 "" sh -c 'echo $$ >>"$0"; exec "$@"' "$ids" "$build/faulty" work 2 barrier \
        $patience >"$log" 2>&1 </dev/null &
    job=$!
    wait_for grep -q works "$log"
    # a longer stop is as good
    kill -STOP $(cat "$ids") && sleep $((patience + 1)) && kill -CONT $(cat "$ids")
    stopped=$?
    touch "$ids.until"
    wait $job && [ $stopped = 0 ] && echo "every rank is done" >>"$log"
}
stopped_told() {
    cat "$build/stopped-job.log"
    ! grep -q '^rank [0-3] of 4: MT_ERR_.*waited [0-9.]* s' "$build/stopped-job.log" || ran_out=1
    grep -q '^every rank is done$' "$build/stopped-job.log"
}

# Runs several jobs at once, because they wait most of the time.
start_faults() {
    faulty kill all_reduce "$recovery"
    faulty kill large "$recovery"
    faulty kill group "$recovery"
    faulty stop all_gather ""
    faulty stop broadcast "$tcp"
    wait
    faulty sleep barrier ""
    faulty sleep reduce_scatter "$tcp"
    faulty kill ring "$recovery $tcp"
    faulty return all_reduce "$recovery"
    faulty fail broadcast "$recovery $tcp"
    stopped_job &
    wait
}

group_told() { # the ranks of the other group wait for rank 2 at the end
    sum='all_reduce(count 100, f32, sum) on "even" (2 ranks)'
    told kill group 0 "MT_ERR_TIMEOUT: $sum: waited $patience.00 s for rank 1" &&
        told kill group 1 'MT_ERR_TIMEOUT: waited [1-9][.0-9]* s at the end for rank \(0, \)*2' &&
        told kill group 3 'MT_ERR_TIMEOUT: waited [1-9][.0-9]* s at the end for rank \(0, \)*2'
}

ring_told() { # the neighbours wait for rank 2, and rank 0 for them; the first one that times out informs the others
    told kill ring 1 'MT_ERR_[TP].*: send_recv(count 9000 to rank [0-3], count 9000 from rank [0-3]' &&
        told kill ring 3 'MT_ERR_[TP].*: send_recv(' && told kill ring 0 'MT_ERR_[TP].*: send_recv('
}

cause="rank 2 failed with MT_ERR_DATA (loss is 17, which is no good)"
failed_told() {
    all_told fail broadcast "MT_ERR_PEER: broadcast.*$cause" && told fail broadcast 2 "MT_ERR_DATA: loss is 17"
}

# Without these options, mpirun ends the job when a signal kills a rank, long before the timeout.
mpirun_ends() {
    run 4 "" "$build/faulty" kill 2 all_reduce 3600 >"$build/ended.log" 2>&1
    code=$?
    cat "$build/ended.log"
    [ $code -ne 0 ] && [ $code -ne 124 ] && ! grep MT_ERR_TIMEOUT "$build/ended.log"
}

# Rank 1 of a training run is killed from outside, when the run has made steps.
killed_trainer() {
    rm -f "$build/pid"
    : >"$build/trainer.log"
    (wait_for grep -q '^step ' "$build/trainer.log"; kill -9 "$(cat "$build/pid")") &
    # shellcheck disable=SC2016
    run 4 "$recovery" sh -c '[ "$OMPI_COMM_WORLD_RANK" != 1 ] || echo $$ >"$0"; exec "$@"' "$build/pid" \
        "$build/train_gpt" --tp 4 --steps 1000000 --eval-interval 0 --timeout 8 \
        >"$build/trainer.log" 2>&1
    code=$?
    wait
    [ $code -ne 124 ] && [ "$(grep -c '^rank [023] of 4: MT_ERR_[TP]' "$build/trainer.log")" = 3 ] && return 0
    echo "mpirun exits with $code"
    tail -n 40 "$build/trainer.log"
    return 1
}

long_run="--data README.md --tp 2 --pp 2 --layers 2 --hidden 32 --heads 4 --seq 32 --batch 4 --steps 200 --warmup 4
    --dropout 0.1 --sample 0 --eval-interval 0 --timeout 8"

# The victim kills itself (kill_at.c), the other ranks write their exit status.
# shellcheck disable=SC2016
lives='victim=$1; shift; [ "$OMPI_COMM_WORLD_RANK" != "$victim" ] || { MT_KILL_CALL=$0 exec "$@"; }
    "$@"; echo "rank $OMPI_COMM_WORLD_RANK exits with $?"'

# interrupted NAME VICTIM CALL: resumes the run from its checkpoint. The victim kills itself at this call, and every
# other rank reports an error and exits with a status that is not 0.
interrupted() {
    log=$build/$1.log
    run 4 "$recovery" sh -c "$lives" "$3" "$2" "$build/train_gpt" $long_run --checkpoint "$build/$1" \
        --save-interval 1 --resume >"$log" 2>&1
    code=$?
    [ "$(grep -c '^rank [0-3] of 4: MT_ERR_[TP]' "$log")" -ge 3 ] &&
        [ "$(grep -c '^rank [0-3] exits with 1$' "$log")" = 3 ] && [ $code -ne 124 ] && return 0
    echo "rank $2, killed at its call $3: mpirun exits with $code"
    cat "$log"
    return 1
}

# killed_5_times NAME VICTIM: kills one rank after the other, often in a save, because the run saves after each step.
# Each kill comes after 2 to 15 % of the calls that change files or send a message in an uninterrupted run, so the fifth
# one also comes before the end.
killed_5_times() {
    kills=0
    start_drawing
    random=$((random + $2))
    rm -rf "${build:?}/$1"
    while [ $kills -lt 5 ]; do
        victim=$((($2 + kills) % 4))
        draw 1000
        all=$(cat "$build/calls.$victim")
        interrupted "$1" $victim $((all * (20 + drawn * 130 / 1000) / 1000)) || return 1
        kills=$((kills + 1))
    done
    run 4 "" "$build/train_gpt" $long_run --checkpoint "$build/$1" --resume >/dev/null &&
        diff -r "$build/whole/step-00000200" "$build/$1/step-00000200"
}

# Two runs at once, because they wait most of the time. The last checkpoint is that of an uninterrupted run.
resumed_after_kills() {
    rm -rf "$build/whole"
    run 4 "" sh -c 'MT_KILL_COUNT=$0.$OMPI_COMM_WORLD_RANK exec "$@"' "$build/calls" "$build/train_gpt" $long_run \
        --checkpoint "$build/whole" --save-interval 1 >/dev/null || return 1
    killed_5_times first 0 >"$build/first.out" 2>&1 &
    other=$!
    killed_5_times second 2
    second=$?
    wait $other
    first=$?
    cat "$build/first.out"
    [ $first = 0 ] && [ $second = 0 ]
}

# Rank 3 is of another version: the ranks say so, and none of them begins to work.
versions_told() {
    log=$build/versions.log
    ! run 3 "" "$build/faulty" work 0 barrier 2 : -n 1 "$build/other_version" work 0 barrier 2 >"$log" 2>&1 \
        </dev/null && ! grep -q works "$log" &&
        grep -q 'MT_ERR_MISMATCH: rank 0 is of megatron.h [0-9.]*, but rank 3 of [0-9]*[.][0-9]*[.]99:' "$log" && return
    cat "$log"
    return 1
}

faults() {
    check "a failure in which no timeout was over is not repeated" repeats_timeouts_only
    start_faults
    check "a rank of another version: the ranks say which, and none of them begins" versions_told
    check "killed (-9): every survivor says for whom it waited, in which call" \
        patiently 'faulty kill all_reduce "$recovery"' all_late kill all_reduce all_reduce
    check "killed, others in a large all_reduce" \
        patiently 'faulty kill large "$recovery"' all_late kill large all_reduce
    check "killed, others in another group" patiently 'faulty kill group "$recovery"' group_told
    check "killed, others in a ring, over TCP" patiently 'faulty kill ring "$recovery $tcp"' ring_told
    check "stopped (-STOP)" patiently 'faulty stop all_gather ""' all_late stop all_gather all_gather
    check "stopped, over TCP" patiently 'faulty stop broadcast "$tcp"' all_late stop broadcast broadcast
    check "all stopped for longer than the timeout, and continued" patiently 'stopped_job &' stopped_told
    check "sleeping in its own code" patiently 'faulty sleep barrier ""' all_late sleep barrier barrier
    check "sleeping, others in a reduce_scatter, over TCP" \
        patiently 'faulty sleep reduce_scatter "$tcp"' all_late sleep reduce_scatter reduce_scatter
    check "returned early" all_told return all_reduce "MT_ERR_PEER: all_reduce.* rank 2 returned from its function"
    check "failed: every other rank says why, over TCP" failed_told
    check "killed, and mpirun ends the job" mpirun_ends
    check "train_gpt, a rank killed from outside" killed_trainer
    in_full || return 0
    check "train_gpt, killed 10 times and resumed, has the checkpoint of a run that was not" resumed_after_kills
}

# ---- two machines made of network namespaces -------------------------------------------------------------------------

near=mtn$$a far=mtn$$b
trap 'ip netns del $near 2>/dev/null; ip netns del $far 2>/dev/null' EXIT
trap 'exit 1' HUP INT TERM

# Creates two machines, or prints why this is not possible.
machines() {
    [ "$(id -u)" = 0 ] || { echo "not root"; return 1; }
    if ! have_command ip || ! have_command unshare; then
        echo "no ip, or no unshare"
        return 1
    fi
    { ip netns add $near && ip netns add $far && ip link add veth0 netns $near type veth peer name veth0 netns $far &&
        ip -n $near addr add 10.99.7.1/24 dev veth0 && ip -n $far addr add 10.99.7.2/24 dev veth0 &&
        for each in $near $far; do ip -n $each link set lo up && ip -n $each link set veth0 up || return 1; done &&
        ip netns exec $near unshare -u true; } 2>&1 | tail -n 1
    ip -n $far link show dev veth0 up >/dev/null 2>&1
}

# between RANKS PROGRAM ARGUMENTS...: runs half of the ranks on each machine; mpirun starts its daemon as it would by
# ssh
between() {
    ranks=$1
    shift
    # shellcheck disable=SC2016
    printf '#!/bin/sh\nshift\nexec ip netns exec %s unshare -u sh -c '\''hostname far; exec sh -c "$*"'\'' sh "$@"\n' \
        $far >"$build/agent"
    chmod +x "$build/agent"
    # shellcheck disable=SC2016
    ip netns exec $near unshare -u sh -c 'hostname near; exec timeout -k 10 600 "$@"' sh mpirun $tcp \
        --mca plm_rsh_agent "$build/agent" --mca btl_tcp_if_include 10.99.7.0/24 --mca oob_tcp_if_include 10.99.7.0/24 \
        --host 10.99.7.1:$((ranks / 2)),10.99.7.2:$((ranks / 2)) -n "$ranks" "$@"
}

# Checks by the host names that each machine has two ranks.
spread() {
    between 4 sh -c 'echo "$(hostname)"; exec "$@"' sh "$build/faulty" none 0 large 20 >"$build/spread.log" 2>&1 ||
        return 1
    [ "$(grep -c '^near$' "$build/spread.log")" = 2 ] && [ "$(grep -c '^far$' "$build/spread.log")" = 2 ]
}

trains_between() {
    same_losses 4 --tp 2 --dp 2 || return 1
    rm -f "$build/processes.csv"
    # shellcheck disable=SC2086
    between 4 "$build/train_gpt" $small --tp 2 --dp 2 --log "$build/processes.csv" || return 1
    losses "$build/processes.csv" | cmp - "$build/threads.losses"
}

# Do two ranks report errors? Those of the near machine can be read while the cable is cut.
says_twice() { [ "$(grep -c '^rank [0-3] of 4: MT_ERR_[TP]' "$1")" -ge 2 ]; }

# Interrupts the connection while ranks communicate.
cut_cable() {
    # mpirun needs it at the end, to reach its daemon
    : >"$build/cut.log"
    (wait_for grep -q '^step ' "$build/cut.log"; ip -n $far link set veth0 down
    wait_for says_twice "$build/cut.log"; ip -n $far link set veth0 up) &
    between 4 "$build/train_gpt" --tp 4 --steps 1000000 --eval-interval 0 --timeout 8 >"$build/cut.log" 2>&1
    code=$?
    wait
    [ $code -ne 0 ] && [ $code -ne 124 ] && says_twice "$build/cut.log" && return 0
    echo "mpirun exits with $code"
    tail -n 40 "$build/cut.log"
    return 1
}

two_machines() {
    if ! why=$(machines); then
        leave_out "two machines: no network namespaces here: $why"
        return
    fi
    check "two machines: a program runs on both" spread
    check "two machines: large messages, grids, many groups" between 4 "$build/test_mpi"
    check "two machines: train_gpt has the losses of threads" trains_between
    check "two machines: the cable is cut" cut_cable
}

# ---- everything ----------------------------------------------------------------------------------------------------

all_tests() {
    tests_over "shared memory" ""
    check "every mistake of a rank, or of two together" run 4 "" "$build/test_faults"
    check "thousands of random collectives in random groups" run 8 "" "$build/test_comm_stress"
    check "values that differ on a rank are named" run 4 "" "$build/test_replicas"
    check "contexts, collectives and the rest, in check mode" checked_comm
    ! in_full || tests_over TCP "$tcp"
}

sanitizers() {
    check "large messages, groups, ends: address, undefined behaviour" sanitized test_mpi 4
    check "the same, no leak of ours" no_leak test_mpi
    check "every mistake: address, undefined behaviour" sanitized test_faults 4
}

training() {
    check "train_gpt: ranks that were given different flags do not begin, and say which" told_by_flags
    check "train_gpt: the same of their data, whose path may differ" told_by_data
    check "train_gpt: what all ranks refuse is printed once" told_once
    check "train_gpt: what one rank refuses, all ranks say" told_by_one
    check "train_gpt: the losses of 4 threads, to the last bit" same_losses 4 --tp 4
    check "train_gpt: the same, 2 x 2, sequence parallel, invariant" \
        same_losses 4 --tp 2 --dp 2 --sequence-parallel --invariant 4
    check "train_gpt: the same, in check mode, which also compares values" same_losses 4 --tp 2 --dp 2 --check 2
    in_full || return 0
    check "train_gpt: the same, 2 stages of 2 tensor ranks" same_losses 4 --tp 2 --pp 2
    check "train_gpt: the same, 2 stages, 2 data ranks that share the optimizer, GPipe" \
        same_losses 4 --tp 1 --pp 2 --dp 2 --use-distributed-optimizer --schedule gpipe
}

ensure_packages openmpi-bin libopenmpi-dev
if have_package openmpi-bin && have_package libopenmpi-dev && mpirun --version 2>/dev/null | grep -q 'Open MPI'; then
    [ $# -gt 0 ] || set -- builds all_tests sanitizers training faults two_machines
    for part in "$@"; do $part; done
else
    leave_out "MPI: no mpirun and mpicc of Open MPI here (openmpi-bin libopenmpi-dev)"
fi
closing_line
exit $((failed > 0))
