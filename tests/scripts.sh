#!/bin/sh
# Checks the scripts that a user runs by hand, with stand-ins for what this machine may lack: nvcc, programs for a GPU,
# PyTorch. Checks the options of tests/run.sh with stand-ins for CMake and CTest.
#
#   sh tests/scripts.sh PART...        one line per check, closing line "N passed, N failed, N skipped"
#
# Parts: gpu, the benchmark of a GPU; cpu, the benchmark of the CPU; runner, the rounds and the load of tests/run.sh.
# tests/gpu_rehearsal.sh checks tests/gpu.sh.
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
engine=${MT_BUILD_DIR:-build}/engine/fast
engine=$(cd "$engine" 2>/dev/null && pwd)
work=$(mktemp -d) || exit 1
check_log=$work/check.log
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# nvcc's stand-in writes programs that do nothing. The benchmark is $STANDIN_BENCH, or two of its lines. The probe finds
# $STANDIN_GPUS GPUs (1). With STANDIN_NCCL=no, programs that use NCCL do not compile.
make_nvcc() {
    cat >"$work/nvcc" <<'END'
#!/bin/sh
echo "$*" >>"$(dirname "$0")/nvcc.txt"
out=''
while [ $# -gt 0 ]; do
    case $1 in
    --help) exit 0 ;;
    -o) out=$2; shift ;;
    esac
    shift
done
case $out in
*/nccl) [ "${STANDIN_NCCL:-yes}" = yes ] || { echo 'nccl.cpp:3: error: an old NCCL' >&2; exit 1; } ;;
esac
case $out in
*/bench_cuda) cp "$STANDIN_BENCH" "$out" ;;
*/probe)
    gpus=${STANDIN_GPUS:-1}
    printf '#!/bin/sh\n[ $# -eq 0 ] && echo "a stand-in, sm_90, %s of them" || echo %s\n' "$gpus" "$gpus" >"$out"
    ;;
*) echo '#!/bin/sh' >"$out" ;;
esac
chmod +x "$out"
END
    cat >"$work/benchmark" <<'END'
#!/bin/sh
[ "$1" != --list ] || { echo layer; echo crash; echo norm; exit; }
echo "# a stand-in" >&2
echo 'item,name,median,min,max,unit,us,ratio,versus'
echo "${4:-none}"',"h 64, s 16",1,1,1,TFLOP/s,2,0.5,"large GEMM"'
[ "${4:-}" != crash ] || kill -SEGV $$
END
    chmod +x "$work/nvcc"
}

# PyTorch's: every call does nothing, and takes 2 ms between CUDA events.
make_pytorch() {
    mkdir "$work/python"
    cat >"$work/python/torch.py" <<'END'
import sys
from unittest.mock import MagicMock
torch = MagicMock(__version__="of a stand-in")
torch.cuda.Event.return_value.elapsed_time.return_value = 2.0
sys.modules["torch"] = torch
END
}

# with_standins SETTINGS... COMMAND
with_standins() {
    env PATH="$work:$PATH" MT_TEST_WITHOUT='' MT_BUILD_DIR="$work" PYTHONPATH="$work/python" \
        PYTHONDONTWRITEBYTECODE=1 "$@"
}

# Reads a CSV: as many columns in each row as the head names, numbers in columns 3 to 5, and rows whose names have each
# of the words.
is_csv() {
    cat "$1"
    python3 - "$@" <<'END'
import csv, sys
with open(sys.argv[1], newline="") as file:
    head, *rows = csv.reader(file)
wrong = [row for row in rows if len(row) != len(head)]
assert head[:6] == ["item", "name", "median", "min", "max", "unit"], head
assert not wrong, wrong
assert rows and all(0 < float(low) <= float(median) <= float(high) for _, _, median, low, high, *_ in rows)
for word in sys.argv[2:]:
    assert any(word in row[1] for row in rows), word
END
}

# Expects the rows of the stand-in for the benchmark, whose item `crash` crashes after its row, and those of the peer,
# PyTorch. With --only there are the rows of one item. NCCL is for several GPUs.
csv_of_a_gpu() {
    bench="sh tests/bench/bench.sh --device cuda --csv --quick"
    # shellcheck disable=SC2086  # a command
    with_standins STANDIN_BENCH="$work/benchmark" $bench >"$work/gpu.csv" 2>"$work/gpu.err" && return 1
    cat "$work/gpu.err"
    [ "$(tail -n 1 "$work/gpu.err")" = "bench.sh: failed: crash" ] || return 1
    grep -q -e " -L$work/bench/cuda/lib " "$work/nvcc.txt" && [ -d "$work/bench/cuda/lib" ] || return 1
    is_csv "$work/gpu.csv" "h 64, s 16" "h 8192, s 8192, forward + backward" "GPT-2 124M, gradient norm" || return 1
    [ "$(grep -c 'h 64, s 16' "$work/gpu.csv")" -eq 3 ] || return 1
    ! grep -v '^item,name\|^[a-z0-9-]*,"' "$work/gpu.csv" || return 1
    ! grep -e -lnccl "$work/nvcc.txt" || return 1
    # shellcheck disable=SC2086
    with_standins STANDIN_BENCH="$work/benchmark" STANDIN_GPUS=2 STANDIN_NCCL=no $bench --only norm \
        >"$work/gpu.csv" 2>"$work/gpu.err" || return 1
    grep "^# without NCCL: nccl.cpp:3: error: an old NCCL$" "$work/gpu.err" || return 1
    ! grep -e -DMT_USE_NCCL "$work/nvcc.txt" || return 1
    # shellcheck disable=SC2086
    with_standins STANDIN_BENCH="$work/benchmark" STANDIN_GPUS=2 $bench --only norm >"$work/gpu.csv" || return 1
    grep -e " -DMT_USE_NCCL -lnccl$" "$work/nvcc.txt" || return 1
    is_csv "$work/gpu.csv" "h 64, s 16" "bf16 RMSNorm backward, h 4096" && ! grep '^layer' "$work/gpu.csv"
}

# The same with the benchmark itself, on the engine. With tiny shapes the peer does not run.
csv_of_the_engine() {
    with_standins STANDIN_BENCH="$engine/bench_cuda" sh tests/bench/bench.sh --device cuda --csv --tiny --only layer \
        >"$work/tiny.csv" && is_csv "$work/tiny.csv" "epilogues measured"
}

# Programs read what the items plan and scaling write. train_gpt predicts a step from the rates of small matrices.
rows_of_the_cpu() {
    bench="$work/bench/bench --tiny --seconds 0.1"
    $bench --only scaling >"$work/scaling.txt" || return 1
    cat "$work/scaling.txt"
    python3 - "$work/scaling.txt" <<'END' || return 1
import sys
sys.dont_write_bytecode = True
sys.path.append("examples")
import figures
for kind in "weak", "strong":
    runs = figures.read_bench(sys.argv[1], kind)
    assert list(runs) == [1, 2, 4, 8], runs
    assert all(run.efficiency > 0 and 1 <= run.cores <= n for n, run in runs.items()), runs
END
    for name in "weak, TP=2 x DP=2" "heads 16, TP=2" "heads 24, TP=2" "heads 32, TP=2"; do
        grep "^$name, .* efficiency on " "$work/scaling.txt" || return 1
    done
    $bench --only plan --machine "$work/machine.txt" || return 1
    find_implementation "$work"
    # shellcheck disable=SC2086  # a list of flags
    "$CC" -O0 -I. $declarations examples/train_gpt.c -o "$work/train_gpt" "$implementation" -lm -lpthread || return 1
    dry_run="$work/train_gpt --dry-run --data LICENSE --sample 0 --tp 2"
    $dry_run --machine "$work/machine.txt" >"$work/dry.txt" || return 1
    cat "$work/dry.txt"
    grep "^time of a step on this machine, 2 ranks at once: [0-9.]* s, " "$work/dry.txt"
}

csv_of_the_cpu() {
    (MT_BUILD_DIR=$work sh tests/bench/bench.sh --csv --quick --only memory) >"$work/memory.csv" &&
        is_csv "$work/memory.csv" "TP=2" &&
        "$work/bench/bench" --csv --quick --seconds 0.1 --only bandwidth >"$work/bandwidth.csv" &&
        is_csv "$work/bandwidth.csv" "AdamW"
}

gpu() {
    make_nvcc
    have_command python3 || { leave_out "the CSV of benchmarks: no python3 here to read it"; return; }
    make_pytorch
    check "bench.sh --device cuda --csv, and PyTorch's rows, are one CSV" csv_of_a_gpu
    [ ! -x "$engine/bench_cuda" ] || check "bench_cuda --csv on the engine" csv_of_the_engine
}

cpu() {
    have_command python3 || { leave_out "the CSV of benchmarks: no python3 here to read it"; return; }
    check "bench.sh --csv is a CSV" csv_of_the_cpu
    check "figures.py reads the item scaling, train_gpt --dry-run the machine of the item plan" rows_of_the_cpu
}

# ---- tests/run.sh ----------------------------------------------------------------------------------------------------

# CTest's stand-in reports two cases, of which the second fails in the rounds $STANDIN_FAILS. It writes its arguments,
# and the ids of the load that it finds alive. In the round $STANDIN_HANGS it writes to the pipe "begun" and goes on for
# ever.
make_ctest() {
    mkdir "$work/run" && mkfifo "$work/begun" || return 1
    printf '#!/bin/sh\necho "$*" >>"%s"\n' "$work/cmake.txt" >"$work/cmake"
    cat >"$work/ctest" <<'END'
#!/bin/sh
work=$(dirname "$0") log=Testing/Temporary
echo "$*" >>"$work/ctest.txt"
round=$(wc -l <"$work/ctest.txt")
for id in $(cat load 2>/dev/null); do ! kill -0 "$id" || echo "$id"; done >>"$work/loads.$round"
mkdir -p $log
verdict=OK
case " ${STANDIN_FAILS:-} " in *" $round "*) verdict=FAILED ;; esac
{
    echo "1/2 Testing: test_one"
    echo "[       OK ] case_one"
    echo "Test Passed."
    echo "2/2 Testing: test_two"
    [ $verdict = FAILED ] || echo "[       OK ] case_two"
    [ $verdict = OK ] || echo "[  FAILED  ] case_two"
    echo "Test $([ $verdict = OK ] && echo Passed || echo Failed)."
} >$log/LastTest.log
[ "$round" != "${STANDIN_HANGS:-}" ] || { echo $$ >"$work/begun"; exec sleep 1000; }
[ $verdict = OK ] || { echo "2:test_two" >$log/LastTestsFailed.log; exit 8; }
END
    chmod +x "$work/cmake" "$work/ctest"
}

# run_sh SETTINGS... -- OPTIONS...: replaces this shell by tests/run.sh
run_sh() {
    rm -rf "$work/ctest.txt" "$work"/loads.* "$work/run/load" "$work/run/rounds"
    settings=
    while [ "$1" != -- ]; do settings="$settings $1"; shift; done
    shift
    # shellcheck disable=SC2086  # a list of settings
    exec env PATH="$work:$PATH" MT_BUILD_DIR="$work/run" MT_INSTALL=no MT_TEST_WITHOUT='' $settings sh tests/run.sh "$@"
}

# says FILE LINE...: the file has exactly these lines about rounds, and the last one is the totals of all
says() {
    cat "$1"
    file=$1
    shift
    printf '%s\n' "$@" >"$work/expected"
    grep -e '^round ' -e '^failed in round ' -e '^[0-9]* passed, ' "$file" | diff "$work/expected" -
}

# How many processes of the load did CTest see in each round? One per core, the same in each round.
had_load() {
    for each in "$@"; do
        [ "$(wc -l <"$work/loads.$each")" = "$(nproc)" ] && cmp "$work/loads.$1" "$work/loads.$each" || return 1
    done
}

# Fails when one of the processes is there, except one that nobody has waited for.
all_ended() {
    for each in "$@"; do
        case $(sed 's/.*) //' "/proc/$each/stat" 2>/dev/null) in
        '' | Z*) ;;
        *) echo "process $each is still there"; return 1 ;;
        esac
    done
}

# A failure in one round fails the whole. The tests run as often as is asked, and are built once.
counts_rounds() {
    rm -f "$work/cmake.txt"
    (run_sh STANDIN_FAILS=2 -- --repeat 3 --load --variants one two) >"$work/out.txt" 2>&1 && return 1
    says "$work/out.txt" "round 1 of 3: 2 passed, 0 failed, 0 skipped" "round 2 of 3: 1 passed, 1 failed, 0 skipped" \
        "round 3 of 3: 2 passed, 0 failed, 0 skipped" "failed in round 2: test_two" "5 passed, 1 failed, 0 skipped" &&
        [ "$(grep -c -e "^-j [0-9]* --output-on-failure -L ^variant\$ -R one|two\$" "$work/ctest.txt")" = 3 ] &&
        [ "$(grep -c -e --build "$work/cmake.txt")" = 1 ] && had_load 1 2 3 || return 1
    # shellcheck disable=SC2046  # a list of ids
    all_ended $(cat "$work/loads.1") || return 1
    (run_sh -- --repeat 2) >"$work/out.txt" 2>&1 || return 1
    says "$work/out.txt" "round 1 of 2: 2 passed, 0 failed, 0 skipped" "round 2 of 2: 2 passed, 0 failed, 0 skipped" \
        "4 passed, 0 failed, 0 skipped" && [ ! -s "$work/loads.1" ] && ! grep '^load' "$work/out.txt" || return 1
    (run_sh -- --load) >"$work/out.txt" 2>&1 || return 1
    says "$work/out.txt" "2 passed, 0 failed, 0 skipped" && had_load 1
}

wrong_rounds() {
    for number in 0 -1 1.5 x 010 ''; do
        (run_sh -- --repeat "$number") >"$work/out.txt" 2>&1 && return 1
        [ "$(cat "$work/out.txt")" = "--repeat $number: expected a number of rounds, 1 or more" ] || return 1
    done
    (run_sh -- --repeat) >"$work/out.txt" 2>&1
    [ $? = 2 ] && (run_sh -- --help) | grep -q -e '--repeat N'
}

# A signal that comes in the second round ends the tests and the load with the script. After SIGKILL, for which a script
# can do nothing, the load sees that the script is gone.
signals_end_it() {
    for signal in TERM HUP KILL; do # in the background a shell ignores SIGINT
        (run_sh STANDIN_HANGS=2 -- --repeat 3 --load) >"$work/out.txt" 2>&1 &
        script=$!
        read -r hanging <"$work/begun"
        kill -s $signal $script
        wait $script && return 1
        # shellcheck disable=SC2046  # a list of ids
        [ $signal != KILL ] || { kill "$hanging"; until all_ended $(cat "$work/loads.2"); do sleep 0.1; done; }
        # shellcheck disable=SC2046
        had_load 1 2 && until all_ended "$hanging"; do sleep 0.1; done && all_ended $(cat "$work/loads.2") || return 1
    done
}

runner() {
    make_ctest || return
    check "run.sh --repeat N --load: a round that fails fails the whole; the load runs beside all rounds" counts_rounds
    check "run.sh --repeat refuses what is no number" wrong_rounds
    check "run.sh: no test and no process of the load is left after a signal" signals_end_it
}

[ $# -gt 0 ] || { sed -n '5,8s/^# *//p' "$0" >&2; exit 2; }
for part in "$@"; do $part; done
closing_line
[ "$failed" -eq 0 ]
