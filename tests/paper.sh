#!/bin/sh
# Tests examples/paper.c: the parameters of the models against a formula, and the predictions for the paper's machine.
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

# A bound on the mean error of times and rates (21.0 when this was written), and on that of parameters and FLOPs (2.5).
mean_error() {
    tail -n 1 "$output" | awk '
        { print; exit !(/^mean absolute error/ && $4 > 0 && $4 < 25 && $7 == 18 && $11 > 0 && $11 < 4) }'
}

runs() { "$build/paper" >"$output" && cat "$output" && ! grep -i 'nan\|inf ' "$output"; }

check "paper builds without a warning" "$CC" -std=c11 -O2 -Wall -Wextra -Werror -I. examples/paper.c -o "$build/paper" \
    -lm -lpthread
check "paper runs" runs
check "paper: the parameters of eight models" parameters
check "paper: the fitted constant gives 39 TFLOP/s" fitted
check "paper: the order of the predictions" ordered
check "paper: the mean error" mean_error
closing_line
[ "$failed" -eq 0 ]
