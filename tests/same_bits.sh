#!/bin/sh
# Compares the bits that this tree computes with those of another revision: a change that only moves code must keep
# them.
#
#   sh tests/same_bits.sh REVISION        one line per run, closing line "N passed, N failed, N skipped"
#
# Both revisions of examples/train_gpt.c train the same small models on the same file. The hash log of every tensor in
# every step must be the same, and so must losses, norms and learning rates. The CUDA runs use the engine
# (tests/engine/), if CUDA's headers are installed.
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
revision=${1:?usage: sh tests/same_bits.sh REVISION}
build=${MT_BUILD_DIR:-build}/same_bits
mkdir -p "$build" && build=$(cd "$build" && pwd) || exit 1
check_log=$build/check.log check_lines=40
cuda=${CUDA_HOME:-/usr/local/cuda}

# Writes the text for both revisions, long enough for four sequences of validation.
write_data() {
    awk 'BEGIN {
        for (i = 1; i <= 4000; i++) { x = (x * 75 + 74) % 65537; printf "%d%s", x, i % 9 ? " of " : ".\n" }
    }' >"$build/data.txt"
}

extract() {
    rm -rf "$build/before" && mkdir "$build/before" && git archive "$revision" | tar -x -C "$build/before"
}

# build_cpu TREE NAME
build_cpu() { "$CC" -O2 -I"$1" "$1/examples/train_gpt.c" -o "$build/$2-cpu" -lm -lpthread; }

# build_engine TREE NAME: builds train_gpt over NCCL with the engine of the same tree
build_engine() {
    mkdir -p "$build/$2-objects"
    for part in core runtime check blaslt nccl; do
        "$CXX" -std=c++17 -O2 -isystem "$cuda/include" -c "$1/tests/engine/$part.cpp" \
            -o "$build/$2-objects/$part.o" || return 1
    done
    "$CXX" -std=c++17 -O1 -w -DMT_USE_NCCL -isystem "$cuda/include" -I"$1/tests/engine" \
        -include "$1/tests/engine/engine.h" -I"$1" -x c++ -c "$1/examples/train_gpt.c" \
        -o "$build/$2-objects/train_gpt.o" &&
        "$CXX" "$build/$2-objects"/*.o -o "$build/$2-engine" -lpthread
}

# run PROGRAM NAME FLAGS: writes the logs NAME.hash and NAME.csv, the latter without its speed
run() {
    rm -f "$build/$2.hash" "$build/$2.log"
    # shellcheck disable=SC2086  # a list of flags
    timeout 600 "$build/$1" --data "$build/data.txt" --log "$build/$2.log" --hash-log "$build/$2.hash" $common $3 ||
        return 1
    awk -F, -v OFS=, '
        NR == 1 { for (i = 1; i <= NF; i++) if ($i == "tokens_per_s") speed = i }
        { $speed = ""; print }' "$build/$2.log" >"$build/$2.csv"
}

# Prints a hash log without the gradient norms that are NaN: the bits of a NaN depended on the split until 0.5.0.
hashes_of() {
    awk -F '[, ]' 'NR == FNR { if ($3 == "nan" || $3 == "-nan") skipped[$1] = 1; next }
        !($2 == "grad_norm" && $1 in skipped)' "$build/$1.csv" "$build/$1.hash"
}

# same DEVICE FLAGS: runs both revisions and compares
same() {
    run "before-$1" before "$2" && run "after-$1" after "$2" || return 1
    diff "$build/before.csv" "$build/after.csv" && [ -s "$build/after.hash" ] || return 1
    hashes_of before >"$build/before.hashes"
    hashes_of after | diff "$build/before.hashes" - | head -n 20 | fail_on_output
}

# runs DEVICE: runs each line of its input
runs() {
    while read -r flags; do
        case $flags in
        "" | \#*) ;;
        *) check "$1: $flags" same "$1" "$flags" ;;
        esac
    done
}

# Training in f16 skips 13 steps, until the loss scale is small enough.
common="--no-pinning --layers 2 --hidden 32 --heads 4 --seq 16 --batch 4 --steps 4 --warmup 1 --eval-interval 2
    --sample 0"

check "the data" write_data
check "revision $revision" extract
check "its train_gpt" build_cpu "$build/before" before
check "this tree's train_gpt" build_cpu . after
runs cpu <<'RUNS'
--tp 1 --dropout 0.1
--tp 2 --dropout 0.1
--tp 2 --heads 8 --kv-heads 2 --rotary --activation swiglu --rmsnorm --untied
--tp 2 --dp 2 --dropout 0.1 --micro-batch 1
--tp 2 --sequence-parallel --dropout 0.1 --label-smoothing 0.1
--tp 2 --pp 2 --micro-batch 1 --dropout 0.1
--pp 2 --dp 2 --schedule gpipe --use-distributed-optimizer
--tp 2 --recompute selective --dropout 0.1
--tp 2 --sequence-parallel --recompute full --dropout 0.1
--tp 2 --dtype bf16 --dropout 0.1
--tp 2 --dp 2 --dtype f16 --use-distributed-optimizer --steps 18
--tp 2 --pp 2 --sequence-parallel --dtype bf16 --recompute full
--invariant 4 --tp 1 --dropout 0.1
--invariant 4 --tp 2 --dp 2 --sequence-parallel --dropout 0.1
--invariant 4 --tp 2 --pp 2 --dtype bf16
--invariant 4 --tp 4 --dtype f16 --steps 18
RUNS

if [ -f "$cuda/include/cublasLt.h" ] && [ -f "$cuda/include/nccl.h" ] && have_command "$CXX"; then
    check "its train_gpt for the engine" build_engine "$build/before" before
    check "this tree's train_gpt for the engine" build_engine . after
    common="$common --device cuda"
    runs engine <<'RUNS'
--tp 1 --dropout 0.1
--tp 2 --sequence-parallel --dropout 0.1
--tp 2 --dp 2 --use-distributed-optimizer --rotary --activation swiglu --rmsnorm --untied
--tp 2 --pp 2 --recompute full
--tp 2 --dtype bf16 --dropout 0.1
--hidden 128 --heads 2 --tp 2 --dtype bf16 --dropout 0.1 --steps 2
--tp 2 --dtype f16 --sequence-parallel --steps 18
--invariant 4 --tp 2 --dp 2
--invariant 4 --tp 2 --dtype bf16
RUNS
else
    skip "CUDA on the engine: the headers of CUDA, cuBLASLt and NCCL are not in $cuda/include (CUDA_HOME)"
fi
closing_line
[ $failed -eq 0 ]
