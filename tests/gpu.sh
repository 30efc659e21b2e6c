#!/bin/sh
# The CUDA tests and benchmarks on a real GPU, and one page that says what came out.
#
#   sh tests/gpu.sh [--out DIR] [--seconds N] [--quick] [--again] [--built] [STAGE...]
#                                        builds and runs everything; exits with 77 without a GPU
#   sh tests/gpu.sh --build [OBJECT]     only builds the programs, without optimization, for any GPU from sm_80 on;
#                                        needs no GPU. OBJECT: an implementation that nvcc has built
#   sh tests/gpu.sh --build sm_90        only builds the programs, as for a GPU sm_90 that this machine does not have
#
#   STAGE        build      all programs, for the GPU of this machine
#                test       the test programs; of one that fails, each case in a process of its own
#                sanitize   compute-sanitizer on the wrappers of PTX instructions and on attention
#                limits     the limits of the GPU, with which the benchmark compares its figures
#                bench      the items of the benchmark that say most, from additions to a training step
#                peers      the same in PyTorch
#                rest       the other items of the benchmark, then the same in PyTorch
#                page       only writes the page again
#                Without a STAGE: all, in this order. A stage builds the programs that it runs.
#   --seconds N  the command ends within N seconds (570). What has not run by then is "not run: out of time", and the
#                next command with this stage goes on with it. What has a result does not run again, unless a file of
#                its program has changed. When nothing is left, a command only writes the page.
#   --quick      5 samples of each figure of the benchmark instead of 15
#   --built      runs the programs in build/gpu as they are: they were built with --build sm_90 on another machine
#   --again      forgets the results of the stages first
#   --out DIR    the folder of page.md, results.csv (all rows of the benchmarks) and logs.tar.gz (build/gpu/out)
#
# The state, with all results and logs, is build/gpu/state. The page follows every command, also after a signal, and
# shows the whole state. These commands are for 30 minutes of a GPU, 10 for each. What the last one has no time for
# matters least.
#
#   sh tests/gpu.sh build test sanitize
#   sh tests/gpu.sh limits bench peers
#   sh tests/gpu.sh                      # what is left, then the rest
#
# Each program runs in a session of its own and is killed after a time limit, so a crash or a hang costs no other
# result. A process that SIGKILL does not end is left behind. The last line is "N passed, N failed, N skipped", and the
# exit status is 0 when nothing has failed. A missing library costs only the programs that need it. MT_GPU_LIBS names a
# folder with more libraries, with lib and include or flat. MT_GPU_LIMIT is the time limit of a test program, of a case
# and of an item of the benchmark, 90 s; PyTorch has twice as long.
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
unset MT_TEST_CASE MT_TEST_LIST
began=$(date +%s)
all_stages="build test sanitize limits bench peers rest rest-peers"
seconds=570 out='' stages='' object='' only_build=no quick='' again=no built=no
while [ $# -gt 0 ]; do
    case $1 in
    --build)
        only_build=yes object=${2:-}
        [ $# -lt 2 ] || shift
        ;;
    --out | --seconds)
        [ -n "${2:-}" ] || { echo "gpu.sh: $1 needs a value" >&2; exit 2; }
        if [ "$1" = --out ]; then out=$2; else seconds=$2; fi
        shift
        ;;
    --quick) quick=--quick ;;
    --again) again=yes ;;
    --built) built=yes ;;
    build | test | sanitize | limits | bench | peers | page) stages="$stages $1" ;;
    rest) stages="$stages rest rest-peers" ;;
    --help) sed -n '2,40s/^# \{0,1\}//p' tests/gpu.sh; exit 0 ;;
    *) sed -n '4,40s/^# \{0,1\}//p' tests/gpu.sh >&2; exit 2 ;;
    esac
    shift
done
stages=${stages:-$all_stages}
build=${MT_BUILD_DIR:-build}/gpu
mkdir -p "$build/state" || exit 1
build=$(cd "$build" && pwd)
state=$build/state running=$build/running out=${out:-$build/out}
deadline=$((began + seconds - 8)) # the page takes the rest
jobs=$(nproc 2>/dev/null || echo 2) most_seconds=${MT_GPU_LIMIT:-90}
check_log=$build/check.log check_lines=40

tests="test_cuda_ptx test_cuda_flash test_cuda_gemm test_cuda_kv_cache test_cuda test_cuda_operators test_cuda_gpt \
test_cuda_checkpoint test_cuda_custom_block test_cuda_plain test_cuda_devices test_cuda_graph test_cuda_nccl \
test_cuda_processes test_cuda_sharing"
# These programs use only what the headers declare, so they are linked to one build of the implementation, which takes
# longer to build than they do. The others compile the implementation themselves.
shared="test_cuda_gemm test_cuda_kv_cache test_cuda_gpt test_cuda_checkpoint test_cuda_custom_block test_cuda_plain \
test_cuda_devices test_cuda_graph bench_cuda"
with_nccl="test_cuda_nccl test_cuda_processes test_cuda_sharing"
implementation=${object:-$build/implementation.o}
# The items of the stages bench and peers, in this order. The stages rest and rest-peers have all others.
first_items="add bias activation norm cross-entropy attention layer gpt2"

# among WORD LIST
among() {
    case " $2 " in *" $1 "*) return 0 ;; esac
    return 1
}

# ---- building --------------------------------------------------------------------------------------------------------

source_of() {
    case $1 in
    implementation) echo tests/package/implementation.c ;;
    bench_cuda) echo tests/bench/bench_cuda.cu ;;
    *) echo "tests/$1.cu" ;;
    esac
}

# gpu_build NAME COMMAND...: runs nvcc, after the words of COMMAND, to build a program or the implementation
gpu_build() {
    name=$1
    shift
    # shellcheck disable=SC2086  # lists of flags
    set -- "$@" nvcc $flags -I. -I"$build/libs/include"
    # shellcheck disable=SC2086
    ! among "$name" "$shared" || set -- "$@" $DECLARATIONS_ONLY "$implementation"
    [ "$name" != test_cuda_processes ] || set -- "$@" -DMT_USE_NCCL
    if [ "$name" = implementation ]; then
        set -- "$@" -x cu -c "$(source_of "$name")" -o "$implementation"
    else
        set -- "$@" "$(source_of "$name")" -o "$build/$name" -L"$build/libs/lib" -Xlinker -rpath \
            -Xlinker "$build/libs/lib" -lcublasLt
        ! among "$name" "$with_nccl" || set -- "$@" -lnccl
    fi
    "$@"
}

# links LIBRARY HEADER CALL: does nvcc compile and link a program with it? MT_TEST_WITHOUT=nccl hides NCCL.
links() {
    ! hidden "${1%Lt}" || return 1
    printf '#include <%s>\nint main() { return %s != 0; }\n' "$2" "$3" >"$build/probe_$1.cpp"
    nvcc -I"$build/libs/include" "$build/probe_$1.cpp" -o "$build/probe_$1" -L"$build/libs/lib" "-l$1" \
        >"$build/probe_$1.log" 2>&1
}

# Finds the libraries. Sets no_library to those with which no program links.
find_libraries() {
    no_library=
    find_cuda_libraries "$build/libs" >"$build/libraries"
    links cublasLt cublasLt.h 'cublasLtGetVersion()' || no_library=cublasLt
    links nccl nccl.h 'ncclGetVersion((int *)0)' || no_library="$no_library nccl"
    for name in $no_library; do
        grep -q "^$name: not found" "$build/libraries" || {
            echo "$name: a program that uses it does not compile or link"
            grep -i error "$build/probe_$name.log" | head -n 2
        } >>"$build/libraries"
    done
}

# Sets missing to the libraries without which the program cannot be built.
find_missing() {
    missing=
    ! among cublasLt "$no_library" || missing="cuBLASLt "
    ! among "$1" "$with_nccl" || ! among nccl "$no_library" || missing="${missing}NCCL "
}

# flags_for ARCHITECTURE: prints nvcc's flags. -lineinfo is for compute-sanitizer.
flags_for() { echo "-std=c++17 -O3 -lineinfo -arch=$1"; }

only_build() {
    find_nvcc || { echo "nvcc is not here, nothing was built"; exit 77; }
    flags="-std=c++17 -O0 $(nvcc_fast nvcc) -gencode arch=compute_80,code=compute_80" # the driver compiles the PTX
    case $object in sm_*) flags=$(flags_for "$object") object='' implementation=$build/implementation.o ;; esac
    find_libraries
    for program in $([ -n "$object" ] || echo implementation) $tests bench_cuda; do
        find_missing "$program"
        if [ -n "$missing" ]; then
            leave_out "$program: nvcc finds no header and library of ${missing}here"
        else
            check "$program builds" gpu_build "$program"
        fi
    done
    closing_line
    [ "$failed" -eq 0 ]
    exit
}

# Builds what has no result yet. What lacks a library is left out.
build_one() {
    find_missing "$1"
    if [ -n "$missing" ]; then
        record build "$1" skipped "${missing}is not here"
    elif [ "$built" = yes ]; then
        if [ -f "$build/$1" ] || [ "$1" = implementation ]; then
            record build "$1" passed "on another machine"
        else
            record build "$1" skipped "it was not built on the other machine"
        fi
    elif ! among "$1" "$shared" || [ "$(verdict_of build/implementation)" = passed ]; then
        gpu_build "$1" run_one build "$1" 300 5
    elif [ -n "$(verdict_of build/implementation)" ]; then
        record build "$1" skipped "the implementation is not built"
    fi
}

# Removes the results of a program, because it is built anew.
forget() {
    rm -rf "$state/build/$1".* "$state/test/$1" "$state/test/$1".* "$state/sanitize"/*."$1".*
    [ "$1" != bench_cuda ] || rm -f "$state/limits"/*.* "$state/bench"/*.* "$state/rest"/*.*
    for each in test sanitize limits bench rest; do
        [ ! -e "$state/$each/asked" ] || echo "its program was built anew" >"$state/$each/asked"
    done
}

# Builds the programs, those first that do not need the implementation. A program's stamp stands for its files and
# flags.
build_programs() {
    mkdir -p "$state/build"
    common=$({ echo "$flags $no_library" && nvcc --version && cat "$build/libraries" ./*.h ./*.cuh tests/*.h; } | cksum)
    first='' second=''
    for program in "$@"; do
        stamp="$common $(cat "$(source_of "$program")" examples/02_custom_block.c | cksum)"
        [ $built = no ] || stamp="$stamp $(cksum "$build/$program" 2>/dev/null)"
        [ "$stamp" = "$(cat "$state/build/$program.stamp" 2>/dev/null)" ] || forget "$program"
        echo "$stamp" >"$state/build/$program.stamp"
        if among "$program" "$shared"; then second="$second $program"; else first="$first $program"; fi
    done
    # shellcheck disable=SC2086  # lists of names
    together "$jobs" build_one $first
    # shellcheck disable=SC2086
    together "$jobs" build_one $second
}

# ---- running ---------------------------------------------------------------------------------------------------------

left() { echo $((deadline - $(date +%s))); }

# limited LIMIT COMMAND...: runs the command in a session of its own, and kills it and its children after LIMIT seconds.
# Sets code: the exit status, or "stuck" when it is still there 8 s later, because the driver does not let SIGKILL end
# it. Such a process is left behind with what it has open, so its output must be a file: nobody could read a pipe to its
# end.
limited() {
    last=$(($(date +%s) + $1 + 8)) code='' pause=0.05
    # shellcheck disable=SC2016  # the variables of the inner shell; --foreground keeps one group
    setsid sh -c ': >"$0/$$"; [ ! -e "$0/stopped" ] || exit; timeout --foreground -k 5 "$@"; echo $? >"$0/code.$$"' \
        "$running" "$@" </dev/null &
    group=$!
    until [ -s "$running/code.$group" ] || [ "$(date +%s)" -ge $last ]; do
        sleep $pause
        pause=0.1
    done
    code=$(cat "$running/code.$group" 2>/dev/null)
    code=${code:-stuck}
    kill -s KILL -- "-$group" 2>/dev/null # also children that it has left behind
    rm -f "$running/$group" "$running/code.$group"
    [ "$code" != stuck ] || return 137
    return "$code"
}

# run_one STAGE NAME LIMIT NEED COMMAND...: runs the command for at most LIMIT seconds. Writes NAME.log, in the stages
# of the benchmark also NAME.csv (standard output), and NAME.result with a line "VERDICT|SECONDS|DETAIL". Does nothing
# when there is a result, or when fewer than NEED seconds are left. What is stopped because the time is up, or by a
# signal, has no result.
run_one() {
    stage=$1 item=$2 limit=$3 need=$4 base=$state/$1/$2 cut=no
    shift 4
    [ ! -e "$base.result" ] || return 0
    most=$(($(left) - 5))
    [ $most -ge "$need" ] || return 1
    [ "$limit" -le $most ] || limit=$most cut=yes
    mkdir -p "${base%/*}"
    since=$(date +%s)
    case $stage in
    limits | bench | rest | *peers) limited "$limit" "$@" >"$base.csv" 2>"$base.log" ;;
    *) limited "$limit" "$@" >"$base.log" 2>&1 ;;
    esac
    took=$(($(date +%s) - since))
    judge
    [ $cut = no ] || [ "$verdict" != hung ] || [ "$code" = stuck ] || return 1
    echo "$verdict|$took|$detail" >"$base.result"
    say
}

say() {
    case $stage in
    test/*) set -- test "${stage#*/}, $item" ;;
    *) set -- "$stage" "$item" ;;
    esac
    printf '  %-8s%-11s%s, %s s%s\n' "$verdict" "$1" "$2" "$took" "${detail:+: $detail}"
}

# Sets verdict and detail from the exit status.
judge() {
    verdict=failed detail="exit status $code"
    case $code in
    stuck) verdict=hung detail="SIGKILL did not end it after $limit s" ;;
    0) verdict=passed detail='' ;;
    77) verdict=skipped detail=$(grep '^[A-Za-z]' "$base.log" | tail -n 1 | cut -c 1-120) ;;
    124) verdict=hung detail="killed after $limit s" ;;
    126 | 127) detail="it cannot be started" ;;
    137) if [ $took -ge "$limit" ]; then verdict=hung detail="killed after $limit s"; else died_of 9; fi ;;
    129 | 1[3-9][0-9]) died_of $((code - 128)) ;;
    esac
    case $stage:$item:$verdict in
    *:list:passed) grep -q '^[A-Za-z0-9_.-]*$' "$base.csv" || verdict=failed detail="the list is empty" ;;
    limits:*:passed | bench:*:passed | rest:*:passed | *peers:*:passed)
        grep -q '^[A-Za-z0-9_.-]*,"' "$base.csv" || verdict=failed detail="no rows"
        ;;
    sanitize:*:hung) [ "$code" = stuck ] || verdict=skipped detail="not at its end after $limit s" ;;
    sanitize:*:failed)
        [ "$code" != 9 ] || detail="it reports errors"
        ! grep -q 'Device not supported' "$base.log" || verdict=skipped detail="it does not support this GPU"
        ;;
    esac
}

died_of() { verdict=crashed detail="signal $1 ($(kill -l "$1" 2>/dev/null))"; }

# record STAGE NAME VERDICT DETAIL: the result of what cannot run
record() {
    [ ! -e "$state/$1/$2.result" ] || return 0
    stage=$1 item=$2 verdict=$3 detail=$4 took=0
    mkdir -p "$state/$1"
    echo "$3|0|$4" >"$state/$1/$2.result"
    say
}

# together N FUNCTION NAME...: calls the function for each name, N at a time
together() {
    at_once=$1 function=$2 started=0
    shift 2
    for each in "$@"; do
        $function "$each" &
        workers="$workers $!"
        started=$((started + 1))
        [ $((started % at_once)) -ne 0 ] || wait_for_workers
    done
    wait_for_workers
}

# Waits for no other children: a program may be stuck.
workers=''
wait_for_workers() {
    # shellcheck disable=SC2086  # a list of ids
    [ -z "$workers" ] || wait $workers
    workers=''
}

# verdict_of STAGE/NAME: nothing without a result
verdict_of() { [ ! -e "$state/$1.result" ] || sed 's/|.*//' "$state/$1.result"; }

# can_run STAGE NAME PROGRAM: is the program built? When it cannot be built, records that NAME does not run.
can_run() {
    case $(verdict_of "build/$3") in
    passed) return 0 ;;
    '') ;; # the next command builds it
    *) record "$1" "$2" skipped "$3 is not built" ;;
    esac
    return 1
}

# ---- stages ----------------------------------------------------------------------------------------------------------

one_case() { run_one "test/$program" "$1" "$most_seconds" 10 env MT_TEST_CASE="=$1" "$build/$program"; }

# Runs each case of $program that has not passed with the others.
by_case() {
    names=$state/test/$program.names cases=''
    [ "$(left)" -gt 10 ] || return 1
    [ -s "$names" ] || {
        limited 20 env MT_TEST_LIST=1 "$build/$program" >"$running/names" 2>/dev/null
        grep -x '[A-Za-z0-9_]*' "$running/names" >"$names"
    }
    while read -r name; do
        grep -q "^\[ *\(OK\|SKIPPED\) \] $name\( .*\)\{0,1\}$" "$state/test/$program.log" || cases="$cases $name"
    done <"$names"
    # shellcheck disable=SC2086  # a list of names
    together 4 one_case $cases
    for name in $cases; do [ -e "$state/test/$program/$name.result" ] || return 1; done
    : >"$state/test/$program.by_case"
}

# Has the program run, and where it failed, each of its cases?
tested() {
    case $(verdict_of "test/$1") in
    passed | skipped) return 0 ;;
    '') return 1 ;;
    esac
    [ -e "$state/test/$1.by_case" ]
}

test_one() {
    can_run test "$1" "$1" || return
    code=''
    run_one test "$1" "$most_seconds" 10 "$build/$1"
    [ "$code" != stuck ] || : >"$state/test/$1.by_case" # its cases would be stuck, too
}

test_programs() {
    # shellcheck disable=SC2086  # a list of names
    together 4 test_one $tests
    for program in $tests; do
        tested "$program" || [ -z "$(verdict_of "test/$program")" ] || by_case
    done
}

sanitize_one() {
    program=${1#*.} tool=${1%%.*}
    can_run sanitize "$1" "$program" || return
    if [ "$program" = test_cuda_flash ]; then set -- "$1" env MT_TEST_CASE==test_short; fi
    name=$1
    shift
    run_one sanitize "$name" 90 30 "$@" "$sanitizer" --tool "$tool" --error-exitcode 9 "$build/$program"
}

sanitize_programs() {
    nvcc=$(command -v nvcc)
    sanitizer=''
    hidden compute-sanitizer || sanitizer=$(command -v compute-sanitizer ||
        ls "${nvcc%/bin/nvcc}/compute-sanitizer/compute-sanitizer" 2>/dev/null)
    for name in $(items sanitize); do
        [ -n "$sanitizer" ] || record sanitize "$name" skipped "compute-sanitizer is not here"
    done
    # shellcheck disable=SC2046  # a list of names
    [ -z "$sanitizer" ] || together 4 sanitize_one $(items sanitize)
}

# ask_gpu COLUMNS: only reads
ask_gpu() {
    have_command nvidia-smi || return
    limited 10 nvidia-smi --id=0 "--query-gpu=$1" --format=csv,noheader,nounits >"$running/answer" 2>/dev/null &&
        cat "$running/answer"
}

# read_gpu FILE WHEN: adds a line about the GPU: its clocks in MHz, degrees Celsius, watts, and what slows it down
read_gpu() {
    query=clocks.sm,clocks.mem,temperature.gpu,power.draw why=clocks_event_reasons
    line=$(ask_gpu "$query,$why.sw_power_cap,$why.hw_slowdown,$why.sw_thermal_slowdown") || # unknown to old drivers
        line=$(ask_gpu "$query") || return
    echo "$2, $line" >>"$1"
}

# bench_one STAGE NAME LIMIT NEED COMMAND...
bench_one() {
    { [ ! -e "$state/$1/$2.result" ] && [ "$(left)" -gt "$4" ]; } || return 0
    mkdir -p "$state/$1"
    rm -f "$state/$1/$2.gpu"
    read_gpu "$state/$1/$2.gpu" before
    run_one "$@"
    read_gpu "$state/$stage/$item.gpu" after
}

bench_limits() {
    ! can_run limits limits bench_cuda || bench_one limits limits "$most_seconds" 10 "$build/bench_cuda" --csv $quick \
        --only limits
}

# bench_items bench|rest
bench_items() {
    can_run bench list bench_cuda || return
    run_one bench list 20 5 "$build/bench_cuda" --list
    for each in $(items "$1"); do
        [ "$each" = list ] ||
            bench_one "$1" "$each" "$most_seconds" 10 "$build/bench_cuda" --csv $quick --only "$each"
    done
}

# bench_peers peers|rest-peers
bench_peers() {
    peer=tests/bench/peer_pytorch_cuda.py
    stamp=$(cksum <$peer)
    [ "$stamp" = "$(cat "$state/peers.stamp" 2>/dev/null)" ] || rm -rf "$state/peers" "$state/rest-peers"
    echo "$stamp" >"$state/peers.stamp"
    have_command python3 || { record peers list skipped "python3 is not here"; return; }
    run_one peers list 60 10 python3 $peer --list
    for each in $(items "$1"); do
        [ "$each" = list ] ||
            bench_one "$1" "$each" $((2 * most_seconds)) 30 env LD_LIBRARY_PATH="$users_libraries" \
                python3 $peer --rows $quick --only "$each"
    done
}

# listed bench|peers: prints the items that the program has
listed() { [ "$(verdict_of "$1/list")" != passed ] || grep -x '[A-Za-z0-9_.-]*' "$state/$1/list.csv"; }

without_first() {
    while read -r item_of_list; do
        among "$item_of_list" "limits $first_items" || echo "$item_of_list"
    done
}

# Prints the names of what a stage runs. bench and peers begin with the list of their items, without which the others
# are not known.
items() {
    case $1 in
    build)
        [ ! -e "$state/build/probe.result" ] || echo probe
        echo "implementation $tests bench_cuda"
        ;;
    test) echo "$tests" ;;
    sanitize) echo memcheck.test_cuda_ptx memcheck.test_cuda_flash racecheck.test_cuda_ptx racecheck.test_cuda_flash ;;
    limits) echo limits ;;
    bench | peers)
        echo list
        for item_of_list in $first_items; do listed "$1" | grep -x -e "$item_of_list"; done
        ;;
    rest) listed bench | without_first ;;
    rest-peers) listed peers | without_first ;;
    esac
}

# Has everything of the stage run? Of the rest this is known when bench and peers have run.
finished() {
    case $1 in rest*) { finished bench && finished peers; } || return 1 ;; esac
    for each in $(items "$1"); do
        [ -e "$state/$1/$each.result" ] || return 1
        [ "$1" != test ] || tested "$each" || return 1
    done
}

# Prints a guess of the seconds that the stages need on 16 cores and an H100.
plan() {
    sum=0 line=''
    for name in $stages; do
        case $name in
        build) guess=150 ;;
        test) guess=200 ;;
        sanitize) guess=90 ;;
        limits) guess=20 ;;
        bench) guess=160 ;;
        peers) guess=280 ;;
        rest) guess=320 ;;
        rest-peers) guess=280 ;;
        *) guess=0 ;;
        esac
        ! finished "$name" || guess=0
        sum=$((sum + guess)) line="$line${line:+, }$name $guess s"
    done
    echo "planned, by guess: $line; $sum s of $seconds s"
}

# Removes the results of the stages; of the builds only those that have failed.
begin_anew() {
    for name in $stages; do
        [ "$name" = build ] || rm -rf "${state:?}/$name"
    done
    among build "$stages" || return 0
    for name in $(items build); do
        [ "$(verdict_of "build/$name")" = passed ] || forget "$name"
    done
}

run_stages() {
    [ $again = no ] || begin_anew
    plan
    for stage_of_command in $stages; do
        # shellcheck disable=SC2046,SC2086  # lists of names
        case $stage_of_command in
        build) build_programs $(items build) ;;
        test) build_programs implementation $tests; test_programs ;;
        sanitize) build_programs test_cuda_ptx test_cuda_flash; sanitize_programs ;;
        limits) build_programs implementation bench_cuda; bench_limits ;;
        bench | rest)
            build_programs implementation bench_cuda
            bench_items "$stage_of_command"
            ;;
        *peers) bench_peers "$stage_of_command" ;;
        esac
    done
}

# ---- the command -----------------------------------------------------------------------------------------------------

# finish STATUS WHY: writes the page, the rows and the logs, prints the page, and ends. WHY something has not run.
finish() {
    trap '' HUP INT TERM
    for stage in $stages; do
        [ "$stage" = page ] || { mkdir -p "$state/$stage" && echo "$2" >"$state/$stage/asked"; }
    done
    for stage in $all_stages; do
        mkdir -p "$state/$stage"
        items "$stage" | tr ' ' '\n' >"$state/$stage/items"
    done
    sh tests/gpu_page.sh "$state" "$out" || exit 1
    cat "$out/page.md"
    [ "$1" -eq 0 ] || exit "$1"
    tail -n 1 "$out/page.md" | grep -q ' 0 failed,'
    exit
}

# stop STATUS: on a signal
stop() {
    trap '' HUP INT TERM
    : >"$running/stopped" # a program that has not begun does not begin
    for each in $workers; do kill -s KILL "$each" 2>/dev/null; done # they would write results
    for group in "$running"/[0-9]*; do kill -s KILL -- "-${group##*/}" 2>/dev/null; done
    echo "stopped by a signal"
    finish "$1" "stopped by a signal"
}

# Finds nvcc and the GPU, or ends: with 77 when there is none, with a page when it cannot be used.
find_gpu() {
    mkdir -p "$state/build"
    rm -f "$state/build/probe".*
    (need_gpu "$build" "nothing was tested" limited "$most_seconds") >"$build/gpu" 2>"$state/build/probe.log"
    code=$?
    [ $code -ne 0 ] || { rm -f "$state/build/probe.log"; find_nvcc; return; }
    cat "$build/gpu"
    [ $code -ne 77 ] || exit 77
    record build probe failed "$(tail -n 1 "$build/gpu")"
    finish 1 "$(tail -n 1 "$build/gpu")"
}

# Prints what the machine has.
describe() {
    echo "GPU: $(cat "$build/gpu")"
    line=$(ask_gpu driver_version,memory.total) && echo "driver, MiB of memory: $line"
    echo "nvcc: $(command -v nvcc), $(nvcc --version | sed -n 's/^.*release //p')"
    cat "$build/libraries"
    echo "compute-sanitizer: $(command -v compute-sanitizer || echo not in PATH)"
    echo "host: $(uname -sm), $jobs cores"
    echo "revision: $(git describe --always --dirty 2>/dev/null || echo unknown)"
}

[ $only_build = no ] || only_build
rm -rf "$running"
mkdir "$running" || exit 1
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 143' TERM
[ "$stages" != " page" ] || finish 0 ""
find_gpu
arch=$(sed -n 's/.*, \(sm_[0-9]*\),.*/\1/p' "$build/gpu")
flags=$(flags_for "${arch:-native}")
[ "$(cat "$build/gpu")" = "$(cat "$state/gpu" 2>/dev/null)" ] || rm -rf "${state:?}"
mkdir -p "$state"
cp "$build/gpu" "$state/gpu"
find_libraries
users_libraries=${LD_LIBRARY_PATH:-} # also those of PyTorch
[ $built = no ] || export LD_LIBRARY_PATH="$build/libs/lib${users_libraries:+:$users_libraries}"
describe >"$state/machine"
cat "$state/machine"
run_stages
finish 0 "out of time"
