#!/bin/sh
# Tests the tests: plants known bugs into a copy of the headers, one at a time. For each bug, the test that is meant to
# find it must fail.
#
#   sh tests/planted.sh [-v] [LIST...]     LIST: tests/planted/LIST.txt, by default all of them; -v: a line for each bug
#   sh tests/planted.sh --places           only checks that each bug of all lists can be planted, and that the headers
#                                          with all bugs compile in C and C++; takes seconds
#
# A bug that is not found is a failure. So is a bug whose old text is no longer in the headers: after a change of the
# library, adapt the list. A list is plain text:
#
#   bug  what is wrong, in a few words
#   run  test_parallel                     the program that must fail: tests/test_parallel.c, or .cu on the engine
#   case test_row_parallel                 part of the names of the test cases to run; without this line all of them
#   in   mti_row_forward                   the function or structure with the old text, if the text is not unique
#   -    y = x + bias;                     the old text, which must occur exactly once in the four headers
#   +    y = x;                            the new text; without this line it is empty
#
# White space in the old text matches any white space and comments. Several lines of - or + are joined. An old text that
# ends in ; or } is a statement: it becomes `if (planted) { new } else { old }`. Any other old text is an expression: it
# becomes `(planted ? (new) : (old))`. Where neither fits, use the word PLANTED in the new text: it is 1 for this bug
# and 0 for the others, and the new text replaces the old text as it is. So all bugs are compiled at once, and
# MT_PLANTED=NUMBER in the environment selects one of them.
#
# With two lines `run`, each with its `case`, both programs must find the bug.
#
# Settings may precede the program's name (run MTE_STREAMS=lazy test_cuda_nccl), and so may a build:
# asan/test_safetensors is built with the address and undefined behaviour sanitizers, checked/test_cuda with the
# engine's checker, and bf16/test_attention for the processor of the machine, without AMX, if it has AVX512-BF16. In
# tiles/test_attention, the same processors emulate AMX. Instead of `run`, `split` and `line` use the hash log: the logs
# of train_gpt on one rank and with the flags of `split` must first differ in `line`.
#
# Each program must pass without a bug. With a bug it must fail within MT_PLANTED_LIMIT seconds (20), or four times its
# time without a bug if this is longer; a timeout counts as a failure, too. Some bugs are races, which a test does not
# lose each time: a bug that was not found is tried again, three times in all. -v prints how often a bug was tried.
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
work=$(mktemp -d) || exit 1
check_log=$work/check.log check_lines=40
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
limit=${MT_PLANTED_LIMIT:-20}
bugs_in_all_lists=1554
jobs=$(nproc 2>/dev/null || echo 2)
cuda=${CUDA_HOME:-/usr/local/cuda}
ASAN_OPTIONS=allocator_may_return_null=1
MT_TEST_ALL=0 # the tests of "everything once" must find the bugs
export ASAN_OPTIONS MT_TEST_ALL
model="--invariant 4 --data README.md --layers 2 --hidden 32 --heads 8 --kv-heads 4 --seq 16 --batch 4 --dropout 0.1
    --steps 2 --warmup 0 --sample 0 --eval-interval 0"
tab=$(printf '\t')

# ---- building ------------------------------------------------------------------------------------------------------

source_of() { # the file of a program, without its build
    case $1 in
    train_gpt) echo examples/train_gpt.c ;;
    *) ls "tests/${1#*/}.c" "tests/${1#*/}.cu" 2>/dev/null ;;
    esac
}

on_the_engine() {
    case $(source_of "$1") in
    *.cu) return 0 ;;
    esac
    return 1
}

# cpu_object FLAGS SOURCE OUT
cpu_object() {
    # shellcheck disable=SC2086  # lists of flags
    "$CC" $1 -w -I"$work" -Itests/planted -c "$2" -o "$3"
}

# cpu_program FLAGS PROGRAM [OBJECT]
cpu_program() {
    cpu_object "$1" "$(source_of "$2")" "$work/$2.o" || return 1
    # shellcheck disable=SC2086  # a list of flags
    "$CC" $1 "$work/$2.o" ${3:-} -o "$work/$2" -lm -lpthread
}

# Programs that use nothing private are linked to one build of the implementation.
build_cpu() {
    case $1 in
    asan/*) cpu_program "-O1 $SANITIZE" "$1" ;;
    bf16/*) cpu_program "-O1 -march=native -U__AMX_TILE__ -U__AMXTILE__" "$1" ;;
    tiles/*) cpu_program "-O1 -march=native -include tests/amx_emulated.h" "$1" ;;
    *_any_gemm) cpu_program "-O1 -idirafter ." "$1" ;; # with a GEMM of their own
    *) cpu_program "-O1 -Werror=implicit $DECLARATIONS_ONLY" "$1" "$work/implementation.o" || cpu_program -O1 "$1" ;;
    esac
}

engine_build() {
    case $1 in
    checked/*) echo checked ;;
    *) echo fast ;;
    esac
}

engine_flags() {
    case $1 in
    checked) echo "-O1 -DMTE_CHECK" ;;
    *) echo "-O1" ;;
    esac
}

# The parts of the engine; that of cuDNN where its header is.
engine_parts() { echo core runtime check blaslt nccl "$([ ! -f "$cuda/include/cudnn.h" ] || echo cudnn)"; }

engine_objects() {
    for part in $(engine_parts); do
        # shellcheck disable=SC2046  # a list of flags
        "$CXX" -std=c++17 $(engine_flags "$1") -O2 -w -isystem "$cuda/include" -c "tests/engine/$part.cpp" \
            -o "$work/$1/$part.o" || return 1
    done
}

build_on_the_engine() {
    build=$(engine_build "$1") more=
    [ "$build" = fast ] || more=-fsanitize=thread
    # shellcheck disable=SC2046,SC2086  # lists of flags
    "$CXX" -std=c++17 $(engine_flags $build) -w $more -isystem "$cuda/include" -Itests/engine \
        -include tests/engine/engine.h -I"$work" -Itests/planted -I. -x c++ -c "$(source_of "$1")" -o "$work/$1.o" \
        || return 1
    # shellcheck disable=SC2046  # names of files
    (cd "$work/$build" && "$CXX" "$work/$1.o" $(for part in $(engine_parts); do echo "$part.o"; done) -o "$work/$1" \
        -lpthread)
}

build_program() {
    if on_the_engine "$1"; then build_on_the_engine "$1"; else build_cpu "$1"; fi >"$work/$1.log" 2>&1
}

# in_lanes COMMAND: runs COMMAND once for each core, in parallel, with the number of the core in $lane. All of these
# processes read the same list. Each of them works on the items that it can `take`; an item can be taken once.
in_lanes() {
    rm -rf "$work/taken"
    mkdir "$work/taken"
    lane=0
    while [ $lane -lt "$jobs" ]; do
        "$1" &
        lane=$((lane + 1))
    done
    wait
}
take() { mkdir "$work/taken/$1" 2>"$work/mkdir.$lane"; }

build_lane() {
    while read -r program; do
        take "$(echo "$program" | tr / .)" && build_program "$program"
    done <"$work/programs"
}

# Builds what the programs need, then the programs, as many at a time as there are cores.
build_all() {
    mkdir -p "$work/asan" "$work/bf16" "$work/tiles" "$work/fast" "$work/checked" "$work/tmp"
    while read -r program; do
        if on_the_engine "$program"; then engine_build "$program"; else echo implementation; fi
    done <"$work/programs" | sort -u >"$work/builds"
    while read -r build; do
        case $build in
        implementation) cpu_object -O1 tests/package/implementation.c "$work/implementation.o" & ;;
        *) engine_objects "$build" & ;;
        esac
    done <"$work/builds"
    wait
    in_lanes build_lane
}

# ---- running -------------------------------------------------------------------------------------------------------

# The time limit of a program with a bug: more than its time without, in case the machine is busy.
seconds_for() {
    awk -F "$tab" -v key="$1 $2 $3" -v least="$limit" '$1 == key { t = 4 * $2 }
        END { print (t > least ? t : least) }' "$work/seconds"
}

# run_with NUMBER SECONDS PROGRAM SETTINGS CASE: returns its status; 124 or 137: it timed out
run_with() {
    settings=$4
    [ "$settings" != - ] || settings=
    [ "$5" = - ] || settings="$settings MT_TEST_CASE=$5"
    # A bug that makes the engine hang is found sooner. Without a bug, a busy machine must not look like a hang.
    [ "$1" = 0 ] || settings="MTE_PATIENCE=2 $settings"
    # A program that fails does not remove its files, so they go to a folder that is removed at the end.
    # shellcheck disable=SC2086  # a list of assignments
    timeout -k 2 "$2" env MT_PLANTED="$1" TMPDIR="$work/tmp" $settings "$work/$3" >"$work/run.$lane" 2>&1 </dev/null
}

# train NUMBER LOG FLAGS
train() {
    # shellcheck disable=SC2086  # lists of flags
    MT_PLANTED=$1 timeout -k 2 "$limit" "$work/train_gpt" $model $3 --hash-log "$2" >"$work/run.$lane" 2>&1 </dev/null
}

# first_difference NUMBER SPLIT: prints the first line, without its hash, of one rank's log that the log of the split
# lacks. Fails if train_gpt fails, or writes no log.
first_difference() {
    train "$1" "$work/one.$1" "--tp 1" && train "$1" "$work/split.$1" "$2" || return 1
    [ -s "$work/one.$1" ] && [ -s "$work/split.$1" ] || return 1
    diff "$work/one.$1" "$work/split.$1" | sed -n 's/^< \([0-9]* [^ ]*\) .*/\1/p' | head -n 1
}

# how_found NUMBER PROGRAM SETTINGS CASE LINE SPLIT: prints how the bug was found, or fails and prints why it was not
how_found() {
    if [ "$5" != - ]; then
        found=$(first_difference "$1" "$6") || { echo "train_gpt failed: $(tail -n 1 "$work/run.$lane")"; return 1; }
        echo "the logs first differ in '$found', meant is '$5'"
        [ "$found" = "$5" ]
        return
    fi
    run_with "$1" "$(seconds_for "$2" "$3" "$4")" "$2" "$3" "$4"
    code=$?
    case $code in
    0) echo "$2 passes"; return 1 ;;
    77 | 125 | 126 | 127) echo "$2 cannot be run"; return 1 ;;
    124 | 137) echo "$2 does not end" ;;
    *) echo "$2 fails" ;;
    esac
}

# Tries the bugs that this process can take.
try_lane() {
    while IFS=$tab read -r number list title program settings case line split; do
        take "$number.$(echo "$program" | tr / .)" || continue
        start=$(now)
        outcome=FAIL
        for tries in 1 2 3; do
            how=$(how_found "$number" "$program" "$settings" "$case" "$line" "$split") && outcome=ok && break
        done
        printf '%s\t%s\t%s\t%s, try %d, %s ms\n' "$list" $outcome "$title" "$how" "$tries" $(($(now) - start)) \
            >>"$work/outcomes.$lane"
    done <"$work/bugs"
}

# pass PROGRAM SETTINGS CASE: runs a program without a bug, which must pass
pass() {
    run_with 0 $((10 * limit)) "$1" "$2" "$3"
    code=$?
    [ $code -eq 0 ] || { echo "exit code $code"; cat "$work/run.$lane"; }
    return $code
}

pass_lane() {
    number=0 check_log=$work/check.$lane
    while IFS=$tab read -r program settings case; do
        number=$((number + 1))
        take "$number" || continue
        check "no bug: $program passes$(echo " $settings $case" | sed 's/ -//g')" pass "$program" "$settings" "$case"
        printf '%s\t%s\n' "$program $settings $case" "$check_time" >>"$work/seconds.$lane"
    done <"$work/passes" >"$work/passed.$lane"
}

# shellcheck disable=SC2317  # check calls it
compiles() { "$@" -fsyntax-only -I"$work" -Itests/planted tests/package/implementation.c; }
all_have_places() { ! awk -F "$tab" '$1 == 0 { print $2 ": " $3 ": " $4 }' "$work/bugs" | grep .; }
has_built() { cat "$work/$1.log"; [ -x "$work/$1" ]; }
# number_is ACTUAL EXPECTED: notices a bug or a program that was lost because a lane died or the disk was full
number_is() { [ "$1" -eq "$2" ] || { echo "$1, not $2"; return 1; }; }
no_difference() {
    difference=$(first_difference 0 "$1") || { echo "train_gpt failed: $(tail -n 1 "$work/run.$lane")"; return 1; }
    [ -z "$difference" ] || { echo "the logs first differ in '$difference'"; return 1; }
}

# ---- everything ----------------------------------------------------------------------------------------------------

# Keeps only the bugs that can be tried on this machine.
leave_engine_out() {
    while IFS=$tab read -r number list title program rest; do
        if [ "$number" = 0 ] || ! on_the_engine "$program"; then
            printf '%s\t%s\t%s\t%s\t%s\n' "$number" "$list" "$title" "$program" "$rest"
        fi
    done <"$work/bugs" >"$work/bugs.here"
    awk -F "$tab" 'NR == FNR { here[$1 $2 $3]; next } !(($1 $2 $3) in here) { print $2 }' "$work/bugs.here" \
        "$work/bugs" | sort -u >"$work/left_out"
    while read -r list; do
        skip "planted bugs of $list on the engine: no headers of CUDA, cuBLASLt and NCCL in $cuda/include (CUDA_HOME)"
    done <"$work/left_out"
    mv "$work/bugs.here" "$work/bugs"
}

has_bf16() { "$CC" -march=native -dM -E -x c /dev/null 2>/dev/null | grep -q __AVX512BF16__; }
leave_bf16_out() {
    skip "planted bugs in products of bf16: the processor or the compiler has no AVX512-BF16"
    awk -F "$tab" '$1 == 0 || $4 !~ /^(bf16|tiles)\//' "$work/bugs" >"$work/bugs.here" &&
        mv "$work/bugs.here" "$work/bugs"
}

# Prints the line of a list, the bugs that were not found, and with -v the others.
report_list() {
    missed=$(awk -F "$tab" -v list="$1" '$1 == list && $2 == "FAIL"' "$work/outcomes" | wc -l)
    found=$(awk -F "$tab" -v list="$1" '$1 == list && $2 == "ok"' "$work/outcomes" | wc -l)
    passed=$((passed + found)) failed=$((failed + missed))
    outcome=ok
    [ "$missed" -eq 0 ] || outcome=FAIL
    printf '  %-4s  %s: %d of %d bugs found\n' $outcome "$1" "$found" $((found + missed))
    awk -F "$tab" -v list="$1" -v all="$verbose" '$1 == list && ($2 == "FAIL" || all) {
        printf "        %-4s  %s: %s\n", $2, $3, $4 }' "$work/outcomes"
}

verbose=0 places=0 lists=
for argument in "$@"; do
    case $argument in
    -v) verbose=1 ;;
    --places) places=1 ;;
    *) lists="$lists tests/planted/$argument.txt" ;;
    esac
done
if ! have_command perl; then
    skip "planted bugs: need perl"
    closing_line
    exit 0
fi
# shellcheck disable=SC2086  # a list of files
perl tests/planted/plant.pl "$work" ${lists:-tests/planted/*.txt} >"$work/bugs" || exit 1
[ -n "$lists" ] || check "the lists have $bugs_in_all_lists bugs" number_is "$(wc -l <"$work/bugs")" $bugs_in_all_lists
if [ $places = 1 ]; then
    check "the headers have the old text of each bug once" all_have_places
    check "the headers with the bugs compile in C" compiles "$CC" -x c
    ! have_command "$CXX" || check "the headers with the bugs compile in C++" compiles "$CXX" -x c++
    closing_line
    exit $((failed > 0))
fi
if [ ! -f "$cuda/include/cublasLt.h" ] || [ ! -f "$cuda/include/nccl.h" ] || ! have_command "$CXX"; then
    leave_engine_out
fi
! grep -Eq "$tab(bf16|tiles)/" "$work/bugs" || has_bf16 || leave_bf16_out
awk -F "$tab" -v OFS="$tab" '$1 == 0 { print $2, "FAIL", $3, $4 }' "$work/bugs" >"$work/outcomes"
awk -F "$tab" '$1 > 0' "$work/bugs" >"$work/bugs.here" && mv "$work/bugs.here" "$work/bugs"
cut -f 4 "$work/bugs" | sort -u >"$work/programs"
build_all
while read -r program; do
    [ -x "$work/$program" ] || check "$program with the bugs in it builds" has_built "$program"
done <"$work/programs"
if [ "$failed" -gt 0 ]; then
    closing_line
    exit 1
fi
cut -f 4-6 "$work/bugs" | grep -v '^train_gpt' | sort -u >"$work/passes"
: >"$work/seconds.0"
in_lanes pass_lane
cat "$work"/seconds.* >"$work/seconds"
cat "$work"/passed.* >"$work/passed"
# Most lines say that a program passes. Without -v they are left out, so that a failure can be seen among them.
if [ $verbose = 1 ]; then cat "$work/passed"; else grep -v '^  ok ' "$work/passed"; fi
check "each program was run without a bug" \
    number_is "$(grep -c '^  \(ok  \|FAIL\)  ' "$work/passed")" "$(wc -l <"$work/passes")"
passed=$((passed + $(grep -c '^  ok ' "$work/passed"))) failed=$((failed + $(grep -c '^  FAIL ' "$work/passed")))
cut -f 8 "$work/bugs" | grep -v '^-$' | sort -u >"$work/splits"
while read -r split; do
    check "no bug: the hash log of $split is that of one rank" no_difference "$split"
done <"$work/splits"
: >"$work/outcomes.0"
in_lanes try_lane
cat "$work"/outcomes.* >"$work/tried"
check "each bug was tried" number_is "$(wc -l <"$work/tried")" "$(wc -l <"$work/bugs")"
cat "$work/tried" >>"$work/outcomes"
cut -f 1 "$work/outcomes" | sort -u >"$work/lists"
while read -r list; do report_list "$list"; done <"$work/lists"
closing_line
[ "$failed" -eq 0 ]
