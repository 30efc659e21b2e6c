#!/bin/sh
# Tests examples/paper.c: the parameters and the memory of the models against formulas, the predictions for the paper's
# machine, and the commands that the program lists.
#
#   sh tests/paper.sh          one line per check, closing line "N passed, N failed, N skipped"
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
build=${MT_BUILD_DIR:-build}/paper
mkdir -p "$build" || exit 1
build=$(cd "$build" && pwd)
check_log=$build/check.log check_lines=200
output=$build/output.txt

# gpt LAYERS HIDDEN, bert LAYERS HIDDEN: the number of parameters. A layer has 12 h^2 weights and 13 h biases and norms.
# A GPT also has 50257 tokens, 1024 positions and a norm; a BERT 30522 tokens, 512 positions, 2 token types, a norm, the
# head of its loss, which has a product, a norm and a bias per token, a pooler, and the head of the sentence order.
layers() { echo $(($1 * (12 * $2 * $2 + 13 * $2))); }
gpt() { echo $(($(layers "$1" "$2") + (50257 + 1024 + 2) * $2)); }
bert() { echo $(($(layers "$1" "$2") + (30522 + 512 + 2 + 2) * $2 + 2 * ($2 * $2 + $2) + 4 * $2 + 2 + 30522)); }

parameters() {
    {
        echo "GPT-2 355M $(gpt 24 1024)"
        echo "GPT-2 1.2B $(gpt 40 1536)"
        echo "GPT-2 2.5B $(gpt 54 1920)"
        echo "GPT-2 4.2B $(gpt 64 2304)"
        echo "GPT-2 8.3B $(gpt 72 3072)"
        echo "BERT 336M $(bert 24 1024)"
        echo "BERT 1.3B $(bert 24 2048)"
        echo "BERT 3.9B $(bert 48 2560)"
    } >"$build/parameters.txt"
    awk '/^Parameters/ { inside = 1 } /^$/ { inside = 0 } inside && /B|M/ && NF > 6 { print $1, $2, $3 }' "$output" |
        diff "$build/parameters.txt" -
}

# page NUMBER: a page of the output
page() { awk -v page="$1" '/^====/ { n++ } n == page' "$output"; }

# The fit gives the 39 TFLOP/s of the paper, below the peak.
fitted() {
    page 1 | awk '
        /^  products / { rate = $2; wrong = !(rate > 39 && rate < 130) }
        /^FLOP\/s/ { inside = 1 }
        inside && $2 == "1.2B" { found = $6 }
        END { print rate " TFLOP/s give " found; exit !(!wrong && rate && found == "39.0") }'
}

# columns TITLE: the predictions of a table of page 1
columns() {
    page 1 | awk -v title="$1" '
        index($0, title) == 1 { inside = 1 }
        /^$/ { inside = 0 }
        inside && $1 == "GPT-2" { print $6 }'
}

# falls SIGN: each number of the input is smaller than the one before it; with SIGN -1, greater
falls() {
    awk -v sign="$1" '
        { print; x = sign * $1 }
        NR > 1 && x >= last { wrong = 1 }
        { last = x }
        END { exit wrong || NR < 3 }'
}

# As in the paper, more data ranks and more heads are slower, and more GPUs are faster.
ordered() {
    columns "Weak scaling: the same" | falls 1 && columns "Weak scaling with" | falls 1 && columns "Strong" | falls -1
}

# Parameters, gradients and the optimizer have 18 bytes for each parameter. The paper's 1.2B model fits a GPU of 32 GB.
memory() {
    for number in 1 2; do page $number | awk '
        /^Memory/ { inside = 1 }
        /^$/ { inside = 0 }
        inside && $1 == "GPT-2" {
            print
            bytes = 18e6 * millions[$2] / $3 / 2 ^ 30
            if (!(bytes > 0) || $5 + $6 < bytes - 0.1 || $5 + $6 > bytes * 1.02 || $7 < 1 || $7 > 6) wrong = 1
            if ($8 - $5 - $6 - $7 > 0.2 || $8 - $5 - $6 - $7 < -0.2 || $9 != ($8 * 2 ^ 30 <= limit ? "yes" : "no"))
                wrong = 1
            if ($2 == "1.2B" && $9 != "yes") wrong = 1
            rows++
        }
        BEGIN {
            millions["355M"] = 354.8; millions["1.2B"] = 1212; millions["2.5B"] = 2488.6
            millions["4.2B"] = 4196.9; millions["8.3B"] = 8314.1; limit = '$((number == 1 ? 32 : 80))'e9
        }
        END { exit wrong || rows != 7 }' || return 1
    done
}

# A bound on the mean error of times and rates (20.6 when this was written), and on that of parameters and FLOPs (2.5).
# Each of the 14 steps counts once.
mean_error() {
    tail -n 1 "$output" | awk '
        { print; exit !(/^mean absolute error/ && $4 > 0 && $4 < 25 && $7 == 14 && $11 > 0 && $11 < 4) }'
    [ "$(page 1 | grep -c '%  again$')" = 5 ] || return 1
    ! page 2 | grep '%  again$'
}

# listed NAME: the commands of the output that begin with NAME
listed() { sed -n "s/^    \($1.*\)/\1/p" "$output"; }

# little NUMBER...: int32 of 8 bits and zeros, or as in the format of printf
little() { for number in "$@"; do printf '%b\000\000\000' "\\0$(printf %o "$number")"; done; }

# A token file of 65536 zeros for train_gpt, and one for train_bert in which every token begins a sentence.
token_files() {
    { printf '\210\330\064\001\001\000\000\000\000\000\001\000' && head -c 132084 /dev/zero; } >gpt.bin
    {
        printf '\210\330\064\001\001\000\000\000\000\000\001\000' && little 0 0 1 0 101 102 103
        head -c 132056 /dev/zero && head -c 65536 /dev/zero | tr '\000' '\003'
    } >bert.bin
}

# Runs each command that trains, with --dry-run and without the GPU, and without the checkpoint, for which a dry run
# goes through all parameters.
dry_runs() (
    cd "$build" || exit 1
    token_files
    { listed 'gpt=' && listed 'bert='; listed train_ | sed 's/$/ --dry-run/'; } |
        sed 's/--device cuda//; s/--checkpoint [^ ]*//' >commands.sh
    [ "$(grep -c dry-run commands.sh)" -ge 8 ] && PATH=$build:$PATH sh -eu commands.sh >dry.txt || exit 1
    cat dry.txt
    grep -q '^GPT: 72 layers, hidden 3072, heads 24, .* 8 x tensor, 64 x data' dry.txt &&
        grep -q '^GPT: 24 layers, hidden 1024, heads 16, .* 354823168 parameters' dry.txt &&
        grep -q '^BERT, post-LN: 24 layers' dry.txt && grep -q '^BERT, pre-LN: 48 layers' dry.txt
)

# The flags of the commands are those of the programs, and the item of the benchmark exists.
flags_exist() {
    for program in train_gpt train_bert eval_gpt 04_generate; do
        "$build/$program" --help >"$build/help.txt" || return 1
        [ -n "$(listed $program)" ] || return 1
        for flag in $(listed $program | grep -o ' --[a-z-]*'); do
            grep -qe "^  $flag " "$build/help.txt" || { echo "$program has no $flag"; return 1; }
        done
    done
    listed 'sh tests' | grep -qx 'sh tests/bench/bench.sh --device cuda --only scaling' &&
        grep -q '{"scaling", ' tests/bench/bench_cuda.cu
}

build_programs() {
    for program in train_gpt train_bert eval_gpt 04_generate; do
        # shellcheck disable=SC2086  # a list of flags
        "$CC" -O0 -I. $declarations "examples/$program.c" -o "$build/$program" "$implementation" -lm -lpthread ||
            return 1
    done
}

runs() { "$build/paper" >"$output" && cat "$output" && ! grep -i 'nan\|inf ' "$output"; }

find_implementation "$build"
# shellcheck disable=SC2086  # a list of flags
check "paper builds without a warning" "$CC" -std=c11 -O2 -Wall -Wextra -Werror -I. $declarations examples/paper.c \
    -o "$build/paper" "$implementation" -lm -lpthread
check "paper runs" runs
check "paper: the parameters of eight models" parameters
check "paper: the fitted constant gives 39 TFLOP/s" fitted
check "paper: the order of the predictions" ordered
check "paper: the memory of a GPU" memory
check "paper: the mean error" mean_error
check "the programs of the listed commands build" build_programs
check "paper: the listed commands that train, in a dry run" dry_runs
check "paper: the flags of the listed commands" flags_exist
closing_line
[ "$failed" -eq 0 ]
