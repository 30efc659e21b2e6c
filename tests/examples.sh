#!/bin/sh
# Builds each example with the command in its first lines and runs it, train_gpt and train_bert for only
# 3 steps, eval_gpt on a small text, and runs it again in check mode 1 and in check mode 2. 04_generate and train_gpt
# must write the same text on 1 and 2 ranks. 05_own_weights is two programs: their losses must agree, and few of their
# lines may differ.
#
#   sh tests/examples.sh [NAME]      one line per command, closing line "N passed, N failed, N skipped"
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
build=${MT_BUILD_DIR:-build}/examples
mkdir -p "$build" || exit 1
build=$(cd "$build" && pwd)
check_log=$build/${1:-all}.log
answers=$(mktemp -d) || exit 1 # of this run alone: other parts run at the same time
trap 'rm -rf "$answers"' EXIT
trap 'exit 1' HUP INT TERM

# Each example has the commands that build it in its first lines: cc ... -o NAME ... [&& ./NAME ARGUMENTS]
example_commands() { sed -n '1,30s/^[^A-Za-z]*\(cc .* -o .*\)$/\1/p' "$1" | sed 's|[ ]*\*/.*||'; }

# The arguments to run it with: those of its command, but only few steps of training.
example_arguments() {
    case $1:$2 in
    train_gpt:* | train_bert:*) echo "--steps 3" ;;
    04_generate:*) echo "--init-from tests/golden/gpt2_hf --ids 1,2,3" ;;
    embed:*) echo "tests/golden/bert_hf --ids tests/golden/embed/ids.txt" ;;
    eval_gpt:*) echo "--init-from tests/golden/gpt2_hf --data tests/golden/eval/text.bin" ;;
    *"&& ./"*) echo "$2" | sed 's|.*&& \./[^ ]*||' ;;
    esac
}

# shared FILE: sets `declarations` and `implementation` as find_implementation does, but 01_mlp has all of its own
shared() {
    find_implementation "$build"
    case $1 in 01_mlp) declarations='' implementation=-lm ;; esac
}

# run_example NAME COMMAND: commands with a GEMM library run only in the full matrix
run_example() {
    title=$1
    case $2 in
    *-DMT_USE_*) in_full || return ;;
    esac
    case $2 in
    *-ldnnl*) title="$1, oneDNN"; have_package libdnnl-dev || { leave_out "$title: not here"; return; } ;;
    *-lopenblas*) title="$1, OpenBLAS"; have_package libopenblas-dev || { leave_out "$title: not here"; return; } ;;
    esac
    shared "$1"
    compile=$(echo "${2%%&&*}" | sed "s|^cc |$CC $declarations |; s| -o [^ ]*| -o $build/$1 $implementation|")
    # shellcheck disable=SC2046  # arguments
    check "$title" sh -c "$compile && exec \"\$@\"" sh "$build/$1" $(example_arguments "$1" "$2")
}

# Compiles without the implementation: its #includes would hide one that the example lacks.
includes_what_it_uses() {
    # shellcheck disable=SC2086  # a list of flags
    "$CC" -Wall -Wextra -Werror -I. $DECLARATIONS_ONLY -fsyntax-only "$1"
}

# asks_for_help COMMAND...: --help and -h print the usage, wherever they are; a flag that the program does not have, and
# one without its value, have the status 2 and a message.
asks_for_help() {
    for flag in --help -h; do
        "$@" $flag </dev/null >"$answers/help" 2>"$answers/help.err" || { echo "$* $flag: status $?"; return 1; }
        grep -q '^usage: ' "$answers/help" && [ ! -s "$answers/help.err" ] || { echo "$* $flag" && return 1; }
    done
    misused "$@" --nonsense || return 1
    grep -q -- '--tp' "$answers/help" || return 0
    "$@" --tp 1 --help >"$answers/help" && grep -q '^usage: ' "$answers/help" && misused "$@" --tp &&
        misused "$@" --nonsense 1 && misused "$@" --tp x
}

misused() {
    "$@" </dev/null >"$answers/misused" 2>"$answers/misused.err"
    misuse=$?
    cat "$answers/misused.err"
    [ $misuse -eq 2 ] && [ ! -s "$answers/misused" ] && [ -s "$answers/misused.err" ] ||
        { echo "$*: status $misuse" && return 1; }
}

# ---- 05_own_weights ------------------------------------------------------------------------------------------------

own=examples/05_own_weights

# own_build NAME SOURCE: compiles SOURCE with the command in the first lines of the example NAME.c
own_build() {
    shared "$1"
    [ "$1" = after ] || declarations='' implementation=-lm
    compile=$(example_commands "$own/$1.c" | sed "s|&&.*||; s|^cc |$CC $declarations |; s| $own/$1.c | $2 |
        s| -o [^ ]*| -o $2.out $implementation|")
    [ -n "$compile" ] && sh -c "$compile"
}

# The lines of a program without comments that have a line of their own, and without blank lines.
code_of() { awk '/^ *\/\*/ { comment = 1 } !comment && NF; /\*\// { comment = 0 }' "$1"; }

# At most 40 lines of code of after.c are not in before.c. These are the lines that diff marks with ">". Lines that
# before.c has and after.c has not do not count.
own_changes() {
    for name in before after; do code_of "$own/$name.c" >"$build/$name.code"; done
    diff "$build/before.code" "$build/after.code" >"$build/own.diff"
    cat "$build/own.diff"
    changed=$(grep -c '^>' "$build/own.diff")
    echo "$changed lines of $(wc -l <"$build/after.code") are changed or new"
    [ "$changed" -gt 10 ] && [ "$changed" -le 40 ]
}

# same_losses FILE FILE: both have the same steps, at least 40, and the losses of a step differ by at most 1e-6
same_losses() {
    for file in "$1" "$2"; do grep '^step' "$file" >"$file.steps"; done
    paste "$1.steps" "$2.steps" | awk '
        { d = $4 - $8; if (d < 0) d = -d; if (d > most) most = d; if ($2 != $6 || NF != 8 || !($4 > 0)) wrong = 1 }
        NR == 1 { first = $4 }
        END { print NR " steps, largest difference " most
              exit !(NR >= 40 && !wrong && most <= 1e-6 && $4 < first / 2) }'
}

# own_memory RANKS: what each rank must print. Per layer and rank, the products have 12 * 32 * 32 / RANKS weights and
# (3 * 32 + 128) / RANKS biases. The table of 112 tokens is split, and the rest is whole on each rank: positions, biases
# after the reduction, norms. Activations are for 128 tokens.
own_memory() {
    weights=$((32 * 32 + 2 * 6 * 32 + 2 * 32 + (112 * 32 + 2 * (12 * 32 * 32 + 3 * 32 + 128)) / $1))
    kept=$((128 * ((3 + 2 * 3 + 1) * 32 + 2 * (2 + 2) + 2 + (2 * (3 * 32 + 4 * 32 + 32 + 2 * 128) + 112) / $1)))
    rank=0
    while [ $rank -lt "$1" ]; do
        echo "rank $rank: $((4 * weights)) bytes of weights, $((4 * kept)) of activations"
        rank=$((rank + 1))
    done
}

# own_ranks RANKS: the losses of before.c, in the memory of the shards
own_ranks() {
    "$build/own_after.c.out" "$1" >"$build/own_after.txt" || return 1
    same_losses "$build/own_before.txt" "$build/own_after.txt" || return 1
    grep '^rank' "$build/own_after.txt" | sort >"$build/own_memory.txt"
    own_memory "$1" | diff - "$build/own_memory.txt"
}

own_error() {
    "$build/own_after.c.out" 3 >"$build/own_error.txt" 2>&1 && return 1
    grep '3 ranks do not divide 4 heads' "$build/own_error.txt" && ! grep '^step' "$build/own_error.txt"
}

# A file that cannot be read is named: one that is not there, a directory, which can be opened, a device without an end
# and a pipe without a writer.
own_files() {
    rm -f "$build/pipe" && mkfifo "$build/pipe" || return 1
    for file in nonexistent tests /dev/zero "$build/pipe"; do
        for program in "$build/own_before.c.out" "$build/own_after.c.out 1"; do
            # shellcheck disable=SC2086  # a list of words
            $program $file >"$build/own_error.txt" 2>&1 && return 1
            grep "^$file: " "$build/own_error.txt" && ! grep '^step' "$build/own_error.txt" || return 1
        done
    done
}

own_before() {
    cp "$own/before.c" "$build/own_before.c" && own_build before "$build/own_before.c" || return 1
    "$build/own_before.c.out" >"$build/own_before.txt" && cat "$build/own_before.txt" || return 1
    grep -qx "$(own_memory 1 | sed 's/^rank 0: //')" "$build/own_before.txt"
}

own_after() { cp "$own/after.c" "$build/own_after.c" && own_build after "$build/own_after.c"; }

# Check mode refuses nothing, on either level.
own_checked() {
    find_implementation "$build"
    # shellcheck disable=SC2086  # a list of flags
    "$CC" -O2 -I. $declarations -include tests/check_all.h "$own/after.c" -o "$build/own_checked" "$implementation" \
        -lm -lpthread || return 1
    for check in 1 2; do
        MT_TEST_CHECK=$check "$build/own_checked" 2 >"$build/own_checked.txt" || return 1
        same_losses "$build/own_before.txt" "$build/own_checked.txt" || return 1
    done
}

# own_with_checks FILE: after.c with the lines of checks.h, and with the mistake of FILE, is compiled to own_checks
own_with_checks() {
    sed -e '/^static void create(model/i static void declare_weight(model *m, const mt_shard *shard, int i, int l);' \
        -e '/^static void create(model/i static void declare_zero(model *m);' \
        -e '/^static double forward(model/i #include "examples/05_own_weights/checks.h"' \
        -e '/mt_shard_copy(&shard, MT_F32/a declare_weight(m, \&shard, i, l);' \
        -e '/memset(m->da\[0\]/a declare_zero(m);' "$1" >"$build/own_checks.c"
    # shellcheck disable=SC2086  # a list of flags
    "$CC" -O1 -I. $declarations -include tests/check_all.h "$build/own_checks.c" -o "$build/own_checks" \
        "$implementation" -lm -lpthread
}

# With the lines of checks.h, check mode accepts after.c, and refuses it without one of the calls of f and g, with rows
# of Q, K and V that are split as one block, and with a bias before g.
own_checks() {
    find_implementation "$build"
    own_with_checks "$own/after.c" || return 1
    MT_TEST_CHECK=2 "$build/own_checks" 2 >"$build/own_checks.txt" || return 1
    same_losses "$build/own_before.txt" "$build/own_checks.txt" || return 1
    count=0
    for line in $(grep -n 'tensor_region_\|QKV_B ? 3 : 1\|PROJ_W\], NULL' "$own/after.c" | sed 's/:.*//'); do
        sed "${line}s/QKV_B ? 3 : 1/QKV_B ? 1 : 1/; ${line}s/.*tensor_region_.*//
            ${line}s/PROJ_W\], NULL/PROJ_W], w[PROJ_B]/" "$own/after.c" >"$build/own_wrong.c"
        own_with_checks "$build/own_wrong.c" || return 1
        MT_TEST_CHECK=1 "$build/own_checks" 2 >"$build/own_wrong.txt" 2>&1
        grep 'is partial over\|is replicated over\|are 3 parts' "$build/own_wrong.txt" || return 1
        count=$((count + 1))
    done
    [ $count -eq 8 ]
}

# Without one of the calls of f and g, or with rows of Q, K and V that are split as one block, the losses differ.
own_mistakes() {
    count=0
    for line in $(grep -n 'tensor_region_\|QKV_B ? 3 : 1' "$own/after.c" | sed 's/:.*//'); do
        sed "${line}s/QKV_B ? 3 : 1/QKV_B ? 1 : 1/; ${line}s/.*tensor_region_.*//" "$own/after.c" >"$build/own_wrong.c"
        "$CC" -O1 -I. $DECLARATIONS_ONLY "$build/own_wrong.c" "$build/implementation.o" -o "$build/own_wrong" -lm \
            -lpthread && "$build/own_wrong" 2 >"$build/own_wrong.txt" || return 1
        same_losses "$build/own_before.txt" "$build/own_wrong.txt" && { echo "without line $line"; return 1; }
        count=$((count + 1))
    done
    [ $count -eq 7 ]
}

own_weights() {
    for name in before after; do
        check "05_own_weights/$name includes what it uses" includes_what_it_uses "$own/$name.c"
    done
    check "05_own_weights: after.c changes at most 40 lines of code" own_changes
    check "05_own_weights/before" own_before
    check "05_own_weights/after builds" own_after
    for ranks in 1 2 4; do
        check "05_own_weights/after: the losses of before.c on $ranks ranks, memory of a shard" own_ranks $ranks
    done
    check "05_own_weights/after: 3 ranks, which do not divide 4 heads, are an error" own_error
    check "05_own_weights: a file that cannot be read" own_files
    for name in before after; do
        check "05_own_weights/$name: --help, and a flag that it does not have" asks_for_help "$build/own_$name.c.out"
    done
    check "05_own_weights/after in check mode" own_checked
    check "05_own_weights/after with checks.h: mistakes are refused" own_checks
    in_full || return
    check "implementation" "$CC" -O1 -I. -c tests/package/implementation.c -o "$build/implementation.o"
    check "05_own_weights: without one of its changes the losses differ" own_mistakes
}

# ---- 04_generate and the texts of train_gpt -----------------------------------------------------------------------

# Both programs write 60 tokens, which are more than the 12 positions of the model, and 16 of the trained one.
generate() { "$build/04_generate" --init-from tests/golden/gpt2_hf --ids 1,2,3 --tokens 60 "$@" 2>&1; }
train_and_write() {
    "$build/train_gpt" --data LICENSE --layers 1 --hidden 16 --heads 2 --seq 16 --batch 2 --steps 3 --sample 60 \
        --prompt The --eval-interval 0 "$@" 2>&1 | sed -n '/^continuation/,$p'
}

# same_text COMMAND FLAGS AND FLAGS: the command writes the same with both
same_text() {
    command=$1 first=
    shift
    while [ "$1" != AND ]; do first="$first $1" && shift; done
    shift
    # shellcheck disable=SC2086  # a list of flags
    "$command" $first >"$build/text.1" && "$command" "$@" >"$build/text.2" || return 1
    diff "$build/text.1" "$build/text.2" && [ "$(wc -c <"$build/text.1")" -gt 60 ]
}

other_text() { ! same_text "$@" >/dev/null && [ -s "$build/text.1" ] && [ -s "$build/text.2" ]; }

texts() {
    for command in generate train_and_write; do
        same_text $command --temperature 0 --tp 1 AND --temperature 0 --tp 2 &&
            same_text $command --top-k 1 AND --temperature 0 &&
            same_text $command --top-p 1e-6 AND --temperature 0 &&
            same_text $command --top-p 0 AND --temperature 0 &&
            same_text $command --top-p 1e-300 --top-k 9 AND --temperature 0 &&
            same_text $command --top-k 5 --top-p 0.9 --tp 1 AND --top-k 5 --top-p 0.9 --tp 2 &&
            same_text $command --top-k 100000 AND --top-p 1 &&
            other_text $command --top-k 5 AND --temperature 0 || return 1
    done
    same_text generate --top-k 1 --seed 5 AND --temperature 0 && other_text generate --top-k 5 AND --top-k 5 --seed 2
}

texts_are_refused() {
    for flags in "--top-k -1" "--top-k 1.5" "--top-p 1.5" "--top-p -0.1" "--top-p x" "--temperature -1"; do
        for command in "04_generate --init-from tests/golden/gpt2_hf" "train_gpt --data LICENSE"; do
            # shellcheck disable=SC2086  # a list of flags
            "$build"/$command $flags >"$build/text.1" 2>"$build/text.2" && return 1
            grep -q -- "$flags: expected a" "$build/text.2" && [ ! -s "$build/text.1" ] || return 1
        done
    done
}

# With any number of threads on each rank, the hashes of all tensors are the same: the example has the built-in GEMM.
trains_with_threads() {
    for flags in "--dropout 0.1" "--tp 2 --dtype bf16 --dropout 0.1" "--tp 2 --invariant 2"; do
        for threads in 1 2 3; do
            # shellcheck disable=SC2086  # a list of flags
            "$build/train_gpt" --data LICENSE --layers 2 --hidden 96 --heads 4 --seq 128 --batch 4 --steps 3 \
                --eval-interval 0 --threads $threads --hash-log "$build/hashes.$threads" $flags >"$build/text.1" 2>&1 ||
                return 1
        done
        [ -s "$build/hashes.1" ] && cmp "$build/hashes.1" "$build/hashes.2" &&
            cmp "$build/hashes.1" "$build/hashes.3" || return 1
    done
}

# ---- check mode ----------------------------------------------------------------------------------------------------

# The settings that an example runs with in check mode $check, a line for each run.
checked_settings() {
    case $1 in
    01_mlp) echo 2 ;;
    02_custom_block) printf '%s\n' 4 "2 sequence_parallel bf16" "2 invariant" ;;
    train_gpt | train_bert)
        for split in "--dp 2 --sequence-parallel --use-distributed-optimizer" "--pp 2 --recompute full"; do
            echo "--check $check --data LICENSE --layers 2 --hidden 32 --heads 4 --seq 16 --batch 4 --steps 2" \
                "--dropout 0.1 --eval-interval 1 $split"
        done ;;
    *) echo "$(example_arguments "$1" "") --tp 2" ;;
    esac
}

# checked_runs NAME PROGRAM: both levels of check mode refuse nothing
checked_runs() {
    for check in 1 2; do
        checked_settings "$1" >"$build/$1.settings"
        while read -r settings; do
            # shellcheck disable=SC2086  # a list of arguments
            MT_TEST_CHECK=$check "$2" $settings </dev/null >"$build/$1.txt" || return 1
            case $1 in
            train_*) grep -q "; check mode $check\$" "$build/$1.txt" || { echo "not checked" && return 1; } ;;
            esac
        done <"$build/$1.settings"
    done
}

# Check mode refuses no example. --check turns it on, and a header in programs without this flag.
checked() {
    find_implementation "$build"
    program=$build/$1.checked
    case $1 in
    train_*) program=$build/$1 ;;
    *) # shellcheck disable=SC2086  # a list of flags
        "$CC" -O2 -I. $declarations -include tests/check_all.h "examples/$1.c" -o "$program" "$implementation" -lm \
            -lpthread || return 1 ;;
    esac
    checked_runs "$1" "$program"
}

# The tables in docs/checking.md are what train_gpt prints. "..." stands for lines that are left out.
tables() {
    grep '^\$ build/train_gpt ' docs/checking.md >"$build/tables"
    [ "$(wc -l <"$build/tables")" -eq 2 ] || return 1
    while read -r _ _ flags; do
        # shellcheck disable=SC2086  # a list of flags
        "$build/train_gpt" $flags >"$build/table" </dev/null || return 1
        awk -v command="\$ build/train_gpt $flags" '$0 == command { inside = 1; next } /^```/ { inside = 0 }
            inside && $0 != "..."' docs/checking.md >"$build/shown"
        diff "$build/shown" "$build/table" | grep '^<' && return 1
        [ "$(wc -l <"$build/shown")" -gt 20 ] || return 1
    done <"$build/tables"
}

# ---- all examples --------------------------------------------------------------------------------------------------

for source in examples/*.c; do
    case ${1:-} in
    "" | "$(basename "$source" .c)") ;;
    *) continue ;;
    esac
    check "$(basename "$source" .c) includes what it uses" includes_what_it_uses "$source"
    commands=$(example_commands "$source")
    [ -n "$commands" ] || { echo "  FAIL  $source: its first lines do not build it"; failed=$((failed + 1)); }
    while read -r command; do
        [ -z "$command" ] || run_example "$(basename "$source" .c)" "$command"
    done <<END
$commands
END
    check "$(basename "$source" .c): --help, and a flag that it does not have" \
        asks_for_help "$build/$(basename "$source" .c)"
    case $source in
    */paper.c) ;; # plans only: always in check mode
    *) check "$(basename "$source" .c) in check mode" checked "$(basename "$source" .c)" ;;
    esac
done
case ${1:-} in
"" | 05_own_weights) own_weights ;;
esac
case ${1:-} in
"" | train_gpt) check "train_gpt --check prints the tables of docs/checking.md" tables ;;
esac
if [ $# -eq 0 ]; then
    check "04_generate, train_gpt: the same text on 1 and 2 ranks, with --top-k, --top-p and --temperature" texts
    for script in text_to_bin figures; do
        if have_command python3; then
            check "$script.py: --help, and a flag that it does not have" asks_for_help python3 "examples/$script.py"
        else
            leave_out "$script.py: no python3 here"
        fi
    done
    check "train_gpt: the same hashes with 1, 2 and 3 threads on each rank" trains_with_threads
    check "04_generate, train_gpt: wrong --top-k, --top-p and --temperature are refused" texts_are_refused
fi
closing_line
[ "$failed" -eq 0 ]
