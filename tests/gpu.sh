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
#                nccl       the tests of several ranks with 2 to 8 ranks on this GPU, over NCCL 2.30 or later
#                sanitize   compute-sanitizer on the wrappers of PTX instructions and on attention
#                limits     the limits of the GPU, with which the benchmark compares its figures
#                bench      the items of the benchmark that say most, and products in pieces, products beside a kernel
#                           that takes multiprocessors, and attention 20 times, for its bits
#                order      attention that starts its blocks head by head, beside the order that the library has
#                profile    attention under ncu
#                peers      the same as bench in PyTorch, with attention by flash and by cuDNN
#                rest       the other items of the benchmark, then the same in PyTorch
#                page       only writes the page again
#                Without a STAGE: all, in this order. A stage builds the programs that it runs.
#                sitting    all, for one sitting of 10 minutes: first the parts that matter most, each with a time limit
#                           of its own (see sit), then what they had no time for
#   --seconds N  the command ends within N seconds (570). What has not run by then is "not run: out of time", and the
#                next command with this stage goes on with it. What has a result does not run again, unless a file of
#                its program has changed. When nothing is left, a command only writes the page.
#   --quick      5 samples of each figure of the benchmark instead of 15
#   --built      runs the programs in build/gpu as they are: they were built with --build sm_90 on another machine
#   --again      forgets the results of the stages first
#   --out DIR    the folder of page.md, results.csv (all rows of the benchmarks) and logs.tar.gz (build/gpu/out). Each
#                result is also added to as_it_came.txt there, with its rows or the end of its log, for when the machine
#                is taken away
#
# The state, with all results and logs, is build/gpu/state. The page follows every command, also after a signal, and
# shows the whole state. What a machine without GPU can do before a sitting on a borrowed one, with programs and NCCL
# in build/gpu/travel, and the sitting:
#
#   python3 tests/gpu_nccl.py build/gpu/travel 90
#   sh tests/gpu.sh --build sm_90
#   sh tests/gpu.sh --built sitting      # on the machine with the GPU; again for what had no time
#
# The NCCL of build/gpu/travel comes first in the stage nccl, and the version that a program has really loaded is
# printed and checked. With an older NCCL, or none, this stage is left out.
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
all_stages="build test nccl sanitize limits bench order profile peers rest rest-peers"
sitting=no seconds=570 out='' stages='' object='' only_build=no quick='' again=no built=no
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
    build | test | nccl | sanitize | limits | bench | order | profile | peers | page) stages="$stages $1" ;;
    sitting) stages=$all_stages sitting=yes ;;
    rest) stages="$stages rest rest-peers" ;;
    --help) sed -n '2,/^set/s/^# \{0,1\}//p' tests/gpu.sh; exit 0 ;;
    *) sed -n '4,/^set/s/^# \{0,1\}//p' tests/gpu.sh >&2; exit 2 ;;
    esac
    shift
done
stages=${stages:-$all_stages}
build=${MT_BUILD_DIR:-build}/gpu
mkdir -p "$build/state" || exit 1
build=$(cd "$build" && pwd)
travel=$build/travel
state=$build/state running=$build/running out=${out:-$build/out}
last_deadline=$((began + seconds - 8)) # the page takes the rest
deadline=$last_deadline
jobs=$(nproc 2>/dev/null || echo 2) most_seconds=${MT_GPU_LIMIT:-90}
check_log=$build/check.log check_lines=40

tests="test_cuda_ptx test_cuda_flash test_cuda_gemm test_cuda_kv_cache test_cuda test_cuda_operators test_cuda_router \
test_cuda_gpt test_cuda_checkpoint test_cuda_custom_block test_cuda_plain test_cuda_devices test_cuda_graph \
test_cuda_nccl test_cuda_processes test_cuda_sharing"
# These programs use only what the headers declare, so they are linked to one build of the implementation, which takes
# longer to build than they do. The others compile the implementation themselves.
shared="test_cuda_gemm test_cuda_gpt test_cuda_checkpoint test_cuda_custom_block test_cuda_plain \
test_cuda_devices test_cuda_graph bench_cuda"
# The same with an implementation that has NCCL.
shared_nccl="test_cuda_gpt_nccl test_cuda_devices_nccl"
with_nccl="test_cuda_nccl test_cuda_processes test_cuda_sharing $shared_nccl nccl_version implementation_nccl"
# What the stage nccl runs, and the programs of the stages nccl and order.
on_one_gpu="test_cuda_sharing test_cuda_devices_nccl test_cuda_gpt_nccl test_cuda_processes test_cuda_nccl"
more_programs="implementation_nccl nccl_version $shared_nccl bench_cuda_order"
implementation=${object:-$build/implementation.o}
# The items of the stages bench and peers, in this order. The stages rest and rest-peers have all others.
first_items="norm layer attention attention-plain dropout pieces beside repeat add bias activation cross-entropy gpt2"

# among WORD LIST
among() {
    case " $2 " in *" $1 "*) return 0 ;; esac
    return 1
}

# ---- building --------------------------------------------------------------------------------------------------------

source_of() {
    case $1 in
    implementation*) echo tests/package/implementation.c ;;
    bench_cuda*) echo tests/bench/bench_cuda.cu ;;
    nccl_version) echo tests/gpu_nccl_version.cpp ;;
    *_nccl) if among "$1" "$shared_nccl"; then echo "tests/${1%_nccl}.cu"; else echo "tests/$1.cu"; fi ;;
    *) echo "tests/$1.cu" ;;
    esac
}

# object_of PROGRAM: prints the name of the implementation to which the program is linked, if any
object_of() {
    if among "$1" "$shared"; then echo implementation; elif among "$1" "$shared_nccl"; then echo implementation_nccl; fi
}

# Copies the headers to $build/order, with sections of one head: then the blocks of attention start head by head.
other_order() {
    mkdir -p "$build/order" && cp ./*.h ./*.cuh "$build/order" &&
        sed 's/^#define MTI_FLASH_SECTION .*/#define MTI_FLASH_SECTION ((int64_t)1)/' mt_kernels.cuh \
            >"$build/order/mt_kernels.cuh" && ! cmp -s mt_kernels.cuh "$build/order/mt_kernels.cuh"
}

# gpu_build NAME COMMAND...: runs nvcc, after the words of COMMAND, to build a program or an implementation
gpu_build() {
    name=$1
    shift
    # shellcheck disable=SC2086  # lists of flags
    set -- "$@" nvcc $flags
    [ "$name" != bench_cuda_order ] || { other_order && set -- "$@" -I"$build/order"; } || return
    set -- "$@" -I. -I"$build/libs/include"
    case $name:$(object_of "$name") in
    *:implementation) set -- "$@" $DECLARATIONS_ONLY "$implementation" ;;
    *:implementation_nccl) set -- "$@" $DECLARATIONS_ONLY -DMT_USE_NCCL "$build/implementation_nccl.o" ;;
    test_cuda_processes:* | implementation_nccl:*) set -- "$@" -DMT_USE_NCCL ;;
    esac
    case $name in
    implementation) set -- "$@" -x cu -c "$(source_of "$name")" -o "$implementation" ;;
    implementation_nccl) set -- "$@" -x cu -c "$(source_of "$name")" -o "$build/$name.o" ;;
    *)
        set -- "$@" "$(source_of "$name")" -o "$build/$name" -L"$build/libs/lib" -Xlinker -rpath \
            -Xlinker "$build/libs/lib" -lcublasLt
        ! among "$name" "$with_nccl" || set -- "$@" -lnccl -ldl
        ;;
    esac
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

# flags_for ARCHITECTURE: prints nvcc's flags. -lineinfo is for compute-sanitizer. For sm_90 there is also code for
# sm_90a, whose kernels use wgmma, where nvcc can make it.
flags_for() {
    special="-gencode arch=compute_90a,code=sm_90a"
    # shellcheck disable=SC2086  # two words
    if [ "$1" = sm_90 ] && nvcc --dryrun $special -c tests/test_cuda_ptx.cu -o /dev/null >/dev/null 2>&1; then
        set -- "-gencode arch=compute_90,code=sm_90 $special"
    else
        set -- "-arch=$1"
    fi
    echo "-std=c++17 -O3 -lineinfo $1"
}

# Packs the programs into $travel, which also has the NCCL that travels.
pack_programs() {
    # shellcheck disable=SC2046  # a list of names
    mkdir -p "$travel" && (cd "$build" && tar -cf - $(for program in $tests $more_programs bench_cuda; do
        [ ! -f "$program" ] || echo "$program"
    done)) | xz -3 --lzma2=preset=3,dict=256MiB >"$travel/programs.tar.xz" || return 1
    du -ak "$travel"
    [ "$(du -sk "$travel" | cut -f 1)" -lt 57344 ] # with the tree, 64 MiB may travel
}

only_build() {
    find_nvcc || { echo "nvcc is not here, nothing was built"; exit 77; }
    programs="$tests bench_cuda"
    flags="-std=c++17 -O0 $(nvcc_fast nvcc) -gencode arch=compute_80,code=compute_80" # the driver compiles the PTX
    case $object in
    sm_*)
        flags=$(flags_for "$object") object='' implementation=$build/implementation.o
        programs="$programs $more_programs"
        rm -f "$travel/programs.tar.xz"
        ;;
    esac
    find_libraries
    for program in $([ -n "$object" ] || echo implementation) $programs; do
        find_missing "$program"
        if [ -n "$missing" ]; then
            leave_out "$program: nvcc finds no header and library of ${missing}here"
        else
            check "$program builds" gpu_build "$program"
        fi
    done
    [ "$programs" = "$tests bench_cuda" ] || check "the programs are packed, and are small enough" pack_programs
    closing_line
    [ "$failed" -eq 0 ]
    exit
}

# unxz FILE: prints what it holds
unxz_file() {
    xz -dc "$1" 2>/dev/null ||
        python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer)' "$1"
}

# unpack_programs: those of an older package must not stay
unpack_programs() {
    for program in $tests $more_programs bench_cuda; do rm -f "${build:?}/$program"; done
    unxz_file "$travel/programs.tar.xz" | tar -C "$build" -xf -
}

unpack_nccl() {
    rm -rf "$build/nccl"
    mkdir "$build/nccl" && unxz_file "$travel/libnccl.so.2.xz" >"$build/nccl/libnccl.so.2" &&
        ln -s libnccl.so.2 "$build/nccl/libnccl.so"
}

# Unpacks what has travelled, if it is not what was unpacked before: programs with --built, and NCCL.
unpack() {
    packages="$built $(cksum "$travel"/*.xz 2>/dev/null)"
    [ "$packages" != "$(cat "$build/unpacked" 2>/dev/null)" ] || return 0
    rm -f "$build/unpacked"
    if [ $built = yes ] && [ -e "$travel/programs.tar.xz" ]; then
        unpack_programs || { echo "the programs cannot be unpacked"; return 1; }
    fi
    if [ -e "$travel/libnccl.so.2.xz" ]; then unpack_nccl || { echo "NCCL cannot be unpacked"; return 1; }; fi
    echo "$packages" >"$build/unpacked"
}

# Builds what has no result yet. What lacks a library is left out.
build_one() {
    find_missing "$1"
    if [ -n "$missing" ]; then
        record build "$1" skipped "${missing}is not here"
    elif [ "$built" = yes ]; then
        if [ -f "$build/$1" ] || [ "${1%_nccl}" = implementation ]; then
            record build "$1" passed "on another machine"
        else
            record build "$1" skipped "it was not built on the other machine"
        fi
    elif [ -z "$(object_of "$1")" ] || [ "$(verdict_of "build/$(object_of "$1")")" = passed ]; then
        gpu_build "$1" run_one build "$1" 300 5
    elif [ -n "$(verdict_of "build/$(object_of "$1")")" ]; then
        record build "$1" skipped "the implementation is not built"
    fi
}

# Removes the results of a program, because it is built anew.
forget() {
    rm -rf "$state/build/$1".* "$state/test/$1" "$state/test/$1".* "$state/sanitize"/*."$1".*
    rm -rf "$state/nccl/$1" "$state/nccl/$1".*
    [ "$1" != bench_cuda ] || rm -f "$state/limits"/*.* "$state/bench"/*.* "$state/rest"/*.* "$state/profile"/*.*
    [ "$1" != bench_cuda_order ] || rm -f "$state/order"/*.*
    [ "$1" != nccl_version ] || rm -f "$state/nccl/version".*
    for each in test nccl sanitize limits bench order profile rest; do
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
        if [ -n "$(object_of "$program")" ]; then second="$second $program"; else first="$first $program"; fi
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
    limits | bench | order | rest | *peers) limited "$limit" "$@" >"$base.csv" 2>"$base.log" ;;
    *) limited "$limit" "$@" >"$base.log" 2>&1 ;;
    esac
    took=$(($(date +%s) - since))
    judge
    if [ $cut = yes ] && [ "$verdict" = hung ] && [ "$code" != stuck ]; then
        { echo "  cut     $stage, $item, after $took s" && tail -n 30 "$base.log"; } >>"$out/as_it_came.txt"
        return 1
    fi
    echo "$verdict|$took|$detail" >"$base.result"
    say
}

# Prints a result, and adds it to the file that is left when the machine is taken away.
say() {
    case $stage in
    */*) set -- "${stage%%/*}" "${stage#*/}, $item" ;;
    *) set -- "$stage" "$item" ;;
    esac
    printf '  %-8s%-11s%s, %s s%s\n' "$verdict" "$1" "$2" "$took" "${detail:+: $detail}" | tee "$running/line.$1.$item"
    {
        cat "$running/line.$1.$item"
        [ "$item" = list ] || grep '^[A-Za-z0-9_.-]*,"' "$state/$stage/$item.csv" 2>/dev/null
        case $stage:$verdict in
        nccl:passed | profile:*) tail -n 60 "$state/$stage/$item.log" 2>/dev/null ;;
        *:failed | *:hung | *:crashed) tail -n 30 "$state/$stage/$item.log" 2>/dev/null ;;
        esac
    } >>"$out/as_it_came.txt"
    rm -f "$running/line.$1.$item"
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
    limits:*:passed | bench:*:passed | order:*:passed | rest:*:passed | *peers:*:passed)
        grep -q '^[A-Za-z0-9_.-]*,"' "$base.csv" || verdict=failed detail="no rows"
        ;;
    nccl:*:passed | nccl/*:*:passed)
        ! grep -q 'skipped: .* ranks need' "$base.log" || verdict=failed detail="the ranks could not share the GPU"
        ;;
    profile:*:failed)
        ! grep -q 'LibraryNotLoaded\|ERR_NVGPUCTRPERM' "$base.log" ||
            verdict=skipped detail="ncu reads no counters here"
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

one_case() { run_one "$test_stage/$program" "$1" "$most_seconds" 10 env MT_TEST_CASE="=$1" "$build/$program"; }

# Runs each case of $program that has not passed with the others.
by_case() {
    base=$state/$test_stage/$program cases=''
    names=$base.names
    [ "$(left)" -gt 10 ] || return 1
    [ -s "$names" ] || {
        limited 20 env MT_TEST_LIST=1 "$build/$program" >"$running/names" 2>/dev/null
        grep -x '[A-Za-z0-9_]*' "$running/names" >"$names"
    }
    while read -r name; do
        grep -q "^\[ *\(OK\|SKIPPED\) \] $name\( .*\)\{0,1\}$" "$base.log" || cases="$cases $name"
    done <"$names"
    # shellcheck disable=SC2086  # a list of names
    together "$at_a_time" one_case $cases
    for name in $cases; do [ -e "$state/$test_stage/$program/$name.result" ] || return 1; done
    : >"$state/$test_stage/$program.by_case"
}

# tested STAGE PROGRAM: has the program run, and where it failed, each of its cases?
tested() {
    case $(verdict_of "$1/$2") in
    passed | skipped) return 0 ;;
    '') return 1 ;;
    esac
    [ "$1.$2" = nccl.version ] || [ -e "$state/$1/$2.by_case" ]
}

test_one() {
    can_run "$test_stage" "$1" "$1" || return
    code=''
    run_one "$test_stage" "$1" "$most_seconds" 10 "$build/$1"
    [ "$code" != stuck ] || : >"$state/$test_stage/$1.by_case" # its cases would be stuck, too
}

# test_programs STAGE N PROGRAM...: N at a time
test_programs() {
    test_stage=$1 at_a_time=$2
    shift 2
    together "$at_a_time" test_one "$@"
    for program in "$@"; do
        tested "$test_stage" "$program" || [ -z "$(verdict_of "$test_stage/$program")" ] || by_case
    done
}

# Prints the version of the NCCL that has travelled, if any.
nccl_version() { [ ! -e "$travel/version" ] || cut -d ' ' -f 1 "$travel/version"; }

# Several ranks on this GPU, as threads and as processes. Each stream has a queue of its own: behind a kernel that waits
# for one of another rank, that other one would never start. One program at a time, for the processes share the GPU in
# slices of time.
nccl_programs() {
    can_run nccl version nccl_version || return
    libraries=${LD_LIBRARY_PATH:-}
    export LD_LIBRARY_PATH="$build/nccl:$build/libs/lib${libraries:+:$libraries}"
    # shellcheck disable=SC2046  # a number or nothing
    run_one nccl version 30 5 "$build/nccl_version" $(nccl_version)
    case $(verdict_of nccl/version) in
    passed)
        export NCCL_MULTI_RANK_GPU_ENABLE=1 CUDA_DEVICE_MAX_CONNECTIONS=32
        # shellcheck disable=SC2086  # a list of names
        test_programs nccl 1 $on_one_gpu
        unset NCCL_MULTI_RANK_GPU_ENABLE CUDA_DEVICE_MAX_CONNECTIONS
        ;;
    '') ;;
    *) for name in $on_one_gpu; do record nccl "$name" skipped "there is no NCCL with which ranks share a GPU"; done ;;
    esac
    export LD_LIBRARY_PATH="$libraries"
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

# Attention whose blocks start head by head, and attention under ncu: a launch of each kernel.
bench_order() {
    # shellcheck disable=SC2086  # a flag or nothing
    ! can_run order attention bench_cuda_order || bench_one order attention "$most_seconds" 10 \
        "$build/bench_cuda_order" --csv $quick --only attention
}

profile() {
    have_command ncu || { record profile attention skipped "ncu is not here"; return; }
    ! can_run profile attention bench_cuda || run_one profile attention "$most_seconds" 20 ncu --clock-control none \
        --section SpeedOfLight --section Occupancy --section LaunchStats --section WarpStateStats \
        --filter-mode per-launch-config --launch-count 1 --kernel-name 'regex:flash|hopper|attention' \
        "$build/bench_cuda" --quick --arena 8 --only repeat
}

bench_limits() {
    ! can_run limits limits bench_cuda || bench_one limits limits "$most_seconds" 10 "$build/bench_cuda" --csv $quick \
        --only limits
}

# bench_items bench|rest [ITEM...]
bench_items() {
    can_run bench list bench_cuda || return
    run_one bench list 20 5 "$build/bench_cuda" --list
    stage_of_items=$1
    shift
    [ $# -gt 0 ] && only=" $* " || only=''
    set -- "$stage_of_items"
    for each in $(items "$1"); do
        case ${only:-" $each "} in *" $each "*) ;; *) continue ;; esac
        [ "$each" = list ] ||
            bench_one "$1" "$each" "$most_seconds" 10 "$build/bench_cuda" --csv $quick --only "$each"
    done
}

# bench_peers peers|rest-peers [ITEM...]
bench_peers() {
    stage_of_items=$1
    shift
    [ $# -gt 0 ] && only=" $* " || only=''
    set -- "$stage_of_items"
    peer=tests/bench/peer_pytorch_cuda.py
    stamp=$(cksum <$peer)
    [ "$stamp" = "$(cat "$state/peers.stamp" 2>/dev/null)" ] || rm -rf "$state/peers" "$state/rest-peers"
    echo "$stamp" >"$state/peers.stamp"
    have_command python3 || { record peers list skipped "python3 is not here"; return; }
    run_one peers list 60 10 python3 $peer --list
    for each in $(items "$1"); do
        case ${only:-" $each "} in *" $each "*) ;; *) continue ;; esac
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
        echo "implementation $tests bench_cuda $more_programs"
        ;;
    test) echo "$tests" ;;
    nccl) echo "version $on_one_gpu" ;;
    order | profile) echo attention ;;
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
        case $1 in test | nccl) tested "$1" "$each" || return 1 ;; esac
    done
}

# Prints a guess of the seconds that the stages need on 16 cores and an H100.
plan() {
    sum=0 line=''
    for name in $stages; do
        case $name in
        build) guess=240 ;;
        test) guess=200 ;;
        nccl) guess=120 ;;
        order) guess=15 ;;
        profile) guess=30 ;;
        sanitize) guess=90 ;;
        limits) guess=20 ;;
        bench) guess=190 ;;
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

# run_stage STAGE [NAME...]: of the stages test, bench and peers maybe only some names
run_stage() {
    stage_of_command=$1
    shift
    # shellcheck disable=SC2046,SC2086  # lists of names
    case $stage_of_command in
    build) build_programs $(items build) ;;
    test)
        [ $# -gt 0 ] || set -- $tests
        build_programs implementation "$@"
        test_programs test 4 "$@"
        ;;
    nccl) build_programs implementation_nccl nccl_version $on_one_gpu; nccl_programs ;;
    sanitize) build_programs test_cuda_ptx test_cuda_flash; sanitize_programs ;;
    limits) build_programs implementation bench_cuda; bench_limits ;;
    order) build_programs bench_cuda_order; bench_order ;;
    profile) build_programs implementation bench_cuda; profile ;;
    bench | rest)
        build_programs implementation bench_cuda
        bench_items "$stage_of_command" "$@"
        ;;
    *peers) bench_peers "$stage_of_command" "$@" ;;
    esac
}

# part SECONDS STAGE [NAME...]: runs a part of a sitting, for at most so many seconds. What it has no time for has no
# result, and runs at the end of the sitting if there is time.
part() {
    deadline=$(($(date +%s) + $1))
    [ "$deadline" -lt "$last_deadline" ] || deadline=$last_deadline
    shift
    [ "$(left)" -le 10 ] || run_stage "$@"
    deadline=$last_deadline
}

# What a sitting is for, in the order in which it matters.
sit() {
    part 300 build
    part 90 test test_cuda test_cuda_custom_block test_cuda_nccl test_cuda_flash
    part 120 nccl
    part 60 sanitize
    part 25 limits
    part 60 bench norm layer attention attention-plain dropout
    part 20 bench pieces
    part 25 order
    part 20 bench beside
    part 20 test test_cuda_ptx
    part 40 bench repeat
    part 60 peers attention
    part 45 profile
    part 90 peers norm layer attention-plain dropout
}

run_stages() {
    [ $again = no ] || begin_anew
    plan
    [ $sitting = no ] || sit
    for stage_of_all in $stages; do run_stage "$stage_of_all"; done
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
    echo "code: $flags"
    echo "NCCL brought along: $(nccl_version)"
    echo "compute-sanitizer: $(command -v compute-sanitizer || echo not in PATH)"
    echo "host: $(uname -sm), $jobs cores"
    echo "revision: $(git describe --always --dirty 2>/dev/null || echo unknown)"
}

[ $only_build = no ] || only_build
rm -rf "$running"
mkdir "$running" && mkdir -p "$out" || exit 1
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
unpack || exit 1
users_libraries=${LD_LIBRARY_PATH:-} # also those of PyTorch
if [ $built = yes ]; then # programs that were built elsewhere need no NCCL here but the one that has travelled
    export LD_LIBRARY_PATH="$build/libs/lib${users_libraries:+:$users_libraries}:$build/nccl"
    [ ! -e "$build/nccl/libnccl.so.2" ] || no_library=$(echo "$no_library" | sed 's/ *nccl//')
fi
case $flags in *compute_90a*) export MT_TEST_HOPPER=1 ;; esac # its code must be the one that runs
describe >"$state/machine"
cat "$state/machine"
run_stages
finish 0 "out of time"
