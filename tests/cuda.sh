#!/bin/sh
# Tests of CUDA that need no GPU, in addition to the programs tests/test_cuda*.cu: the examples on the engine
# (tests/engine/), which executes kernels and host code on the CPU, and the builds of nvcc.
#
#   sh tests/cuda.sh PART...        one line per check, closing line "N passed, N failed, N skipped"
#
# Parts: example, training, processes and benchmark run programs that CMake has built in $MT_BUILD_DIR/engine/fast; nvcc
# compiles with nvcc.
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
build=${MT_BUILD_DIR:-build}/cuda
mkdir -p "$build" || exit 1
build=$(cd "$build" && pwd)
check_log=$build/check-${1:-none}.log check_lines=40
cuda=${CUDA_HOME:-/usr/local/cuda}
engine=$(dirname "$build")/engine/fast

# examples/03_nccl on 2 GPUs has the losses of 01_mlp.
nccl_example() {
    find_implementation "$build"
    # shellcheck disable=SC2086  # a list of flags
    "$CC" -O2 -I. $declarations examples/01_mlp.c -o "$build/01_mlp" "$implementation" -lm -lpthread &&
        "$build/01_mlp" 2 >"$build/01_mlp.txt" &&
        "$engine/03_nccl" 2 >"$build/03_nccl.txt" && cat "$build/03_nccl.txt" || return 1
    paste "$build/01_mlp.txt" "$build/03_nccl.txt" | awk '
        $1 == "step" {
            n++; d = $4 - $8; if (d < 0) d = -d
            if ($2 != $6 || !($4 > 0) || d > 1e-4 * $4) wrong = 1
            next
        }
        { half = NF / 2; for (i = 1; i <= half; i++) if ($i != $(i + half)) wrong = 1; last = 1 }
        END { exit !(n == 6 && last && !wrong) }'
}

# examples/05_own_weights/after.cu on 1, 2 and 4 GPUs has the losses of before.cu up to 1e-6, and on each GPU the
# weights of a shard: all but 16 floats are split.
own_weights_example() {
    "$engine/05_before" >"$build/05_before.txt" || return 1
    grep -x "$(((2 * 16 * 64 + 64 + 128 * 16 + 16) * 4)) bytes of weights" "$build/05_before.txt" || return 1
    for gpus in 1 2 4; do
        "$engine/05_after" $gpus >"$build/05_after.txt" && cat "$build/05_after.txt" || return 1
        bytes=$((((2 * 16 * 64 + 64 + 128 * 16) / gpus + 16) * 4))
        [ "$(grep -c "^rank [0-3]: $bytes bytes of weights$" "$build/05_after.txt")" -eq $gpus ] || return 1
        for name in before after; do grep '^step' "$build/05_$name.txt" >"$build/05_$name.steps"; done
        paste "$build/05_before.steps" "$build/05_after.steps" | awk '
            { d = $4 - $8; if (d < 0) d = -d; if ($2 != $6 || NF != 8 || !($4 > 0) || d > 1e-6) wrong = 1 }
            NR == 1 { first = $4 }
            END { exit !(NR == 40 && !wrong && $8 < first / 1.2) }' || return 1
    done
}

# The examples for GPUs answer --help, and a flag that they do not have, before they look for a GPU.
examples_help() {
    for name in 03_nccl 05_before 05_after; do
        "$engine/$name" --help | grep '^usage: ' && "$engine/$name" -h | grep -q '^usage: ' || return 1
        "$engine/$name" --nonsense >"$build/misused"
        [ $? -eq 2 ] && [ ! -s "$build/misused" ] || { echo "$name --nonsense" && return 1; }
    done
}

# examples/eval_gpt.c on GPUs has PyTorch's sum of losses, within 1e-6 of it in f32 and 1e-2 in bf16, and in f32 the
# passages that are right.
evaluates_on_the_engine() {
    set -- "$engine/eval_gpt" --init-from tests/golden/gpt2_hf --no-pinning --device cuda --log "$build/eval.csv"
    for flags in "--tp 2 --dp 2" "--pp 2" "--tp 2 --sequence-parallel --dtype bf16"; do
        # shellcheck disable=SC2086  # a list of flags
        "$@" $flags --data tests/golden/eval/text.bin --stride 5 >"$build/eval.txt" && cat "$build/eval.txt" || return 1
        awk -v expected="$(sed -n 's/^text 12 5 //p' tests/golden/eval/expected.txt)" \
            -v allowed="$([ "$flags" = "${flags%bf16}" ] && echo 1e-6 || echo 1e-2)" '
            { if (sub(/.*sum of losses /, "")) { n++; d = $1 + 0 - expected; if (d < 0) d = -d } }
            END { exit !(n == 1 && expected > 0 && d <= allowed * expected) }' "$build/eval.txt" || return 1
        [ "$flags" = "${flags%bf16}" ] || continue
        # shellcheck disable=SC2086
        "$@" $flags --data tests/golden/eval/cloze.bin || return 1
        right=$(sed '1d; s/.*,//' "$build/eval.csv" | tr -d '\n')
        grep -qx "cloze 12 $right" tests/golden/eval/expected.txt || { echo "right: $right"; return 1; }
    done
}

bert_steps="--layers 2 --hidden 32 --heads 4 --seq 16 --batch 4 --steps 4 --no-pinning --data megatron.h"
few_steps="$bert_steps --sample 4"

# trains_on_the_engine PROGRAM FLAG...: a program of examples/ as it is, on two GPUs over NCCL. It has the losses of the
# CPU in f32, within 1e-5 of the loss, or 2e-2 in bf16 and f16.
trains_on_the_engine() {
    program=$1
    shift
    find_implementation "$build"
    # shellcheck disable=SC2086  # a list of flags
    "$CC" -O2 -I. $declarations "examples/$program.c" -o "$build/${program}_cpu" "$implementation" -lm -lpthread ||
        return 1
    "$build/${program}_cpu" "$@" --tp 2 --log "$build/cpu.csv" || return 1
    for dtype in f32 $(in_full && echo bf16 f16); do
        "$engine/$program" "$@" --tp 2 --device cuda --dtype $dtype --log "$build/$dtype.csv" || return 1
        paste -d , "$build/cpu.csv" "$build/$dtype.csv" >"$build/both.csv"
        awk -F, -v allowed="$([ $dtype = f32 ] && echo 1e-5 || echo 2e-2)" 'NR == 1 { half = NF / 2; next }
            { n++; d = $2 - $(2 + half); if (d < 0) d = -d; if (!($2 > 0) || d > allowed * $2) wrong = 1 }
            END { exit !(n == 4 && !wrong) }' "$build/both.csv" || { cat "$build/both.csv"; return 1; }
    done
}

# train_gpt for $steps steps on GPUs. NAME FLAG...: writes its output, log and checkpoints to NAME.txt, NAME.csv and
# NAME_run.
trains_some() {
    name=$1
    shift
    # shellcheck disable=SC2086
    "$engine/train_gpt" $few_steps --steps $steps --device cuda --eval-interval 2 "$@" --log "$build/$name.csv" \
        --checkpoint "$build/${name}_run" --save-interval $((steps / 2)) >"$build/$name.txt"
}

# The losses, norms and weights of two runs are the same.
same_runs() {
    for name in "$@"; do
        cut -d , -f 1-3,5- "$build/$name.csv" >"$build/$name.cut" || return 1
        [ "$(wc -l <"$build/$name.cut")" -eq $((steps + 1)) ] || return 1
    done
    cmp "$build/$1.cut" "$build/$2.cut" && diff -r "$build/$1_run/$last" "$build/$2_run/$last"
}

# Steps that are launched as a CUDA graph have the bits of steps that are not: over NCCL, with a pipeline, and on one
# rank, where f16 skips the first 13 steps. So has the second half of a run that is resumed there.
trains_as_a_graph() {
    for flags in "--tp 2 --dtype bf16 --dropout 0.1" "--pp 2 --micro-batch 1" "--tp 1 --dtype f16"; do
        steps=6
        [ "$flags" = "${flags%f16}" ] || steps=18
        last=$(printf 'step-%08d' $steps)
        echo "$steps steps, $flags"
        rm -rf "$build/calls_run" "$build/graph_run"
        # shellcheck disable=SC2086
        trains_some calls $flags && trains_some graph $flags --cuda-graph && same_runs calls graph || return 1
        rm -rf "$build/graph_run/$last"
        # shellcheck disable=SC2086
        trains_some graph $flags --cuda-graph --resume || return 1
        grep "going on after step $((steps / 2))," "$build/graph.txt" || return 1
        same_runs calls graph || return 1
    done
    skips=$(grep -c "step skipped" "$build/calls.txt")
    echo "f16: $skips of $steps steps skipped"
    [ "$skips" -gt 9 ] && [ "$skips" -lt 18 ] || return 1
    for flags in "--device cuda --hash-log $build/graph.hash" "--device cpu"; do
        # shellcheck disable=SC2086
        ! "$engine/train_gpt" $few_steps --cuda-graph $flags 2>"$build/refused.txt" || return 1
        cat "$build/refused.txt"
        grep "^train_gpt: --cuda-graph needs --device cuda, without --hash-log" "$build/refused.txt" || return 1
    done
}

# shellcheck disable=SC2086  # a list of flags
trains_as_processes() { sh tests/processes.sh "$engine/train_gpt" "$build/processes" $few_steps; }

# The shapes are tiny: this only checks that every item of the benchmark runs, as a process of its own, and prints rows
# of its own item. Ranks have a GPU each, or share one.
bench_on_the_engine() {
    rows=$build/bench_cuda.csv
    for item in $("$engine/bench_cuda" --list); do
        "$engine/bench_cuda" --tiny --csv --only "$item" >"$rows" && cat "$rows" || return 1
        lines=$(wc -l <"$rows")
        [ "$lines" -gt 1 ] && [ "$(grep -c "^$item,\"" "$rows")" -eq $((lines - 1)) ] || return 1
    done
    MTE_DEVICES=1 "$engine/bench_cuda" --tiny --csv --only scaling >"$rows" &&
        grep '^scaling,"weak, 8.3B, 1 of 4 layers, 8 ranks on 1 GPU, per GPU"' "$rows" || return 1
    # With all layers 2 ranks fit in these GPUs, but the one to compare with does not.
    said=$build/bench_cuda.txt
    MTE_DEVICES=2 MTE_MEMORY=68 "$engine/bench_cuda" --tiny --csv --only scaling >"$rows" 2>"$said" || return 1
    cat "$said"
    grep '^# scaling, 1.2B, 4 layers, 1 rank on 1 GPU: not measured with all layers: it takes ' "$said" &&
        grep '^scaling,"weak, 2.5B, 1 of 4 layers, 2 ranks on 2 GPUs, planned for a rank"' "$rows" &&
        ! grep '"1.2B, 4 layers' "$rows" || return 1
    ! "$engine/bench_cuda" --tiny --only none
}

# Writes the implementation as a user does, in a .cu file of two lines.
implementation() {
    printf '#define MEGATRON_IMPLEMENTATION\n#include "megatron.h"\n' >"$build/implementation.cu"
}

# Prints a table from the log of ptxas. For each kernel it has the largest number of registers and of bytes of spills
# over all architectures, and the architecture of each.
kernel_report() {
    sed -n -e "s/.*Compiling entry function '\([^']*\)' for '\([^']*\)'.*/K \1 \2/p" \
        -e 's/.* \([0-9]*\) bytes spill stores, \([0-9]*\) bytes spill loads.*/S \1 \2/p' \
        -e 's/.*Used \([0-9]*\) registers.*/R \1/p' "$1" | awk '
        $1 == "K" {
            name = $2; arch = $3
            if (!(name in registers)) { registers[name] = 0; spills[name] = 0; where[name] = "-" }
        }
        $1 == "S" && $2 + $3 > spills[name] { spills[name] = $2 + $3; where[name] = arch }
        $1 == "R" && $2 > registers[name] { registers[name] = $2; most[name] = arch }
        END { for (name in registers) print registers[name], most[name], spills[name], where[name], name }' \
        | c++filt | sort -k1,1nr -k5 | awk '
            BEGIN { printf "%9s  %-6s %6s  %-6s %s\n", "registers", "on", "spills", "on", "kernel" }
            { name = $0; for (i = 0; i < 4; i++) sub(/^[^ ]+ /, "", name)
              sub(/^void /, "", name)
              printf "%9d  %-6s %6d  %-6s %s\n", $1, $2, $3, $4, name }'
}

# Sums up this table in one line: the number of kernels, the largest number of registers, and the kernels that spill,
# with their bytes.
kernel_summary() {
    awk 'NR > 1 { n++; if ($1 > most) most = $1 }
        NR > 1 && $3 > 0 { name = $5; sub(/[<(].*/, "", name); spill = spill " " name "(" $3 ")" }
        END {
            spill = spill ? "none but" spill : "none"
            printf "%d kernels, at most %d registers, bytes of spills: %s\n", n, most, spill
        }' "$1"
}

in_list() {
    for each in $2; do
        [ "$each" = "$1" ] && return 0
    done
    return 1
}

# targets LAST ARCH...: prints nvcc's flags for machine code of each ARCH. It is made from the PTX of the first
# architecture of its family (80 for 86), and for families after LAST from the PTX of LAST.
targets() {
    last=$1
    shift
    for arch in "$@"; do
        base=$((arch / 10 * 10))
        [ "$base" -le "$last" ] || base=$last
        in_list "$base" "$archs" || base=$arch
        printf ' -gencode arch=compute_%s,code=sm_%s' "$base" "$arch"
    done
}

# Builds the implementation for every architecture that the toolkit knows. The optimized build counts registers and
# spills. It leaves out 80 and 90, whose machine code tests/sass.sh looks at, and 87, 88, 89, 103 and 121, whose kernels
# have no more registers and spills than those of 86, 100 and 120. It builds the families after 100 from the PTX of 100,
# which gives the same registers as their own PTX. A second build, without optimization, has the architectures that the
# first leaves out, and these families from their own PTX.
# Without the full matrix there is one build, without optimization, for the first architecture of each family.
builds_for_all() {
    implementation
    archs=$(nvcc --list-gpu-arch | sed -n 's/^compute_\([0-9]*\)$/\1/p')
    if ! in_full; then
        # shellcheck disable=SC2046,SC2086  # lists of flags
        nvcc -O0 $(nvcc_fast) -I. -Werror all-warnings \
            $(targets 999 $(echo "$archs" | grep -e '^75$' -e '0$' | grep -v '^[0-6].$' | grep -v '^70$')) \
            -c "$build/implementation.cu" -o "$build/implementation.o"
        return
    fi
    optimized=
    fast=
    for arch in $archs; do
        case $arch in
        [0-6]? | 7[0-4]) ;;
        80 | 87 | 88 | 89 | 90 | 103 | 121) fast="$fast $arch" ;;
        1[1-9]?) optimized="$optimized $arch" fast="$fast $arch" ;;
        *) optimized="$optimized $arch" ;;
        esac
    done
    # shellcheck disable=SC2046,SC2086  # lists of flags
    nvcc -O3 -I. -Werror all-warnings -Xptxas -v $(targets 100 $optimized) -fatbin "$build/implementation.cu" \
        -o "$build/implementation.fatbin" >"$build/registers.log" 2>&1 || { cat "$build/registers.log"; return 1; }
    # shellcheck disable=SC2046,SC2086
    nvcc -O0 $(nvcc_fast) -I. -Werror all-warnings $(targets 999 ${fast:-80}) -c "$build/implementation.cu" \
        -o "$build/implementation.o" || return 1
    kernel_report "$build/registers.log" >"$build/kernels.txt"
    kernel_summary "$build/kernels.txt" >"$build/kernels.summary"
    ! grep -B 2 '[1-9][0-9]* bytes spill' "$build/registers.log" | grep 'Compiling entry'
}

# Builds the implementation with NCCL, without optimization: it has the same kernels as without NCCL. Builds the example
# that creates its own communicator, and a C program.
builds_with_nccl() {
    [ -f "$cuda/include/nccl.h" ] || { echo "no nccl.h in $cuda/include"; return 1; }
    # shellcheck disable=SC2046  # a flag, or none
    nvcc -O0 $(nvcc_fast) -I. -Werror all-warnings -arch=sm_90 -DMT_USE_NCCL -c "$build/implementation.cu" \
            -o "$build/implementation_nccl.o" \
        && nvcc -O0 -I. -Werror all-warnings -arch=sm_90 $DECLARATIONS_ONLY examples/03_nccl.cu \
            "$build/implementation_nccl.o" -o "$build/03_nccl" -lcublasLt -lnccl \
        && nvcc -O0 -Werror all-warnings -arch=sm_90 examples/05_own_weights/before.cu -o "$build/05_before" \
        && nvcc -O0 -I. -Werror all-warnings -arch=sm_90 $DECLARATIONS_ONLY examples/05_own_weights/after.cu \
            "$build/implementation_nccl.o" -o "$build/05_after" -lcublasLt -lnccl \
        && links_from_c implementation_nccl.o -lnccl
}

# Links a C program with an object that nvcc has built, and runs it. Without a GPU, mt_context_create returns an error,
# which the program prints.
links_from_c() {
    cat >"$build/use.c" <<'END'
#include "megatron.h"
#include <stdio.h>
int main(void) {
    mt_comm *world = 0;
    mt_context *ctx = 0;
    mt_context_desc where = {.device = MT_DEVICE_CUDA};
    if (mt_comm_create_local(1, 0, &world) != MT_SUCCESS) return 1;
    mt_status status = mt_context_create(world, &where, &ctx);
    printf("%s: %s\n", mt_status_name(status), mt_comm_last_error(world));
    mt_context_destroy(ctx);
    mt_comm_destroy(world);
    mt_nccl_id id;
    if (mt_nccl_unique_id(0, &id) != MT_ERR_ARGUMENT) return 1;
    return status != MT_SUCCESS && status != MT_ERR_SYSTEM && status != MT_ERR_ARGUMENT;
}
END
    # shellcheck disable=SC2086  # none, or one
    "$CC" -I. "$build/use.c" "$build/$1" -o "$build/use" \
            -L"$cuda/lib64" -lcudart -lcublasLt ${2:-} -lstdc++ -lm -lpthread \
        && LD_LIBRARY_PATH="$cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$build/use"
}

# Compiles train_gpt with the command of docs/gpus.md, but with another output path, warnings as errors, and without
# optimization of kernels. With a GPU the program must train; without one it must name the CUDA call that failed.
builds_train_gpt() {
    line=$(sed -n 's/^\(nvcc .* examples\/train_gpt.c .* -o \)build\/train_gpt /\1"$build\/train_gpt" /p' docs/gpus.md)
    [ -n "$line" ] || { echo "docs/gpus.md does not say how to compile examples/train_gpt.c"; return 1; }
    echo "$line"
    eval "$line $(nvcc_fast) -Werror all-warnings" || return 1
    # shellcheck disable=SC2086  # a list of flags
    "$build/train_gpt" $few_steps --device cuda --dtype bf16 >"$build/train_gpt.log" 2>&1 && return 0
    grep 'cudaGetDeviceCount' "$build/train_gpt.log" || { cat "$build/train_gpt.log"; return 1; }
}

by_nvcc() {
    if in_full; then
        check "nvcc, every architecture from sm_75 on; optimized (without 80, 87 to 90, 103, 121) no kernel spills" \
            builds_for_all
    else
        check "nvcc, every family of architectures from sm_75 on" builds_for_all
    fi
    [ -s "$build/kernels.summary" ] && echo "         $(cat "$build/kernels.summary"), see $build/kernels.txt"
    check "a C program links against nvcc's object" links_from_c implementation.o
    check "tests/gpu.sh builds its programs" sh tests/gpu.sh --build "$build/implementation.o"
    check "with NCCL, too" builds_with_nccl
    check "train_gpt, compiled by nvcc" builds_train_gpt
    check "the tests and the benchmark of a GPU say that there is none" no_gpu_is_said
}

no_gpu_is_said() {
    [ -e /dev/nvidia0 ] && return 0 # there is one
    for command in "sh tests/gpu.sh" "sh tests/bench/bench.sh --device cuda --tiny"; do
        code=0
        $command >"$build/no_gpu.txt" 2>&1 || code=$?
        cat "$build/no_gpu.txt"
        [ $code -eq 77 ] && grep -i 'no gpu' "$build/no_gpu.txt" || return 1
    done
}

example() {
    check "examples/03_nccl on 2 GPUs has the losses of 01_mlp" nccl_example
    check "examples for GPUs: --help, and a flag that they do not have" examples_help
    check "examples/05_own_weights/after.cu on 1, 2 and 4 GPUs has the losses of before.cu" own_weights_example
    check "eval_gpt --device cuda has the results of PyTorch" evaluates_on_the_engine
}
training() {
    # shellcheck disable=SC2086  # a list of flags
    check "train_gpt --device cuda" trains_on_the_engine train_gpt $few_steps
    # shellcheck disable=SC2086
    check "train_bert --device cuda" trains_on_the_engine train_bert $bert_steps --eval-interval 2
    check "train_gpt --cuda-graph has the bits of calls without a graph" trains_as_a_graph
}
processes() {
    check "train_gpt as processes of torchrun, on one machine and two; killed and stopped ranks" trains_as_processes
}
benchmark() { check "the benchmark of a GPU runs" bench_on_the_engine; }

[ $# -gt 0 ] || { sed -n '5,8s/^# *//p' "$0" >&2; exit 2; }
for part in "$@"; do
    case $part in
    nvcc)
        if have_command nvcc; then by_nvcc; else skip "nvcc: not here, nothing was built for a GPU"; fi
        ;;
    *) $part ;;
    esac
done
closing_line
[ "$failed" -eq 0 ]
