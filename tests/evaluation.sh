#!/bin/sh
# Tests evaluation from text to result: examples/text_to_bin.py, then examples/eval_gpt.c with a model of train_gpt.
#
#   sh tests/evaluation.sh [PART...]         one line per check, closing line "N passed, N failed, N skipped"
#
# Parts: text_to_bin, trained; default: both. The tests of tokenizers need the package tokenizers of PyPI, which is
# installed in a virtual environment in the build directory. Where it cannot be installed, they are skipped.
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
build=${MT_BUILD_DIR:-build}/evaluation
mkdir -p "$build" || exit 1
build=$(cd "$build" && pwd)
check_log=$build/check-${1:-all}.log check_lines=40
PYTHONDONTWRITEBYTECODE=1
export PYTHONDONTWRITEBYTECODE

# ---- text_to_bin.py ------------------------------------------------------------------------------------------------

text_to_bin() {
    if ! have_command python3; then
        leave_out "text_to_bin.py: no python3 here"
        return
    fi
    check "text_to_bin.py: rules of WikiText, words, passages, files, refusals" \
        python3 tests/test_text_to_bin.py Plain
    if hidden tokenizers || ! find_python "$build/python" tokenizers >"$build/python.log" 2>&1; then
        leave_out "text_to_bin.py with tokenizers: the package is not here, and could not be installed"
        return
    fi
    check "text_to_bin.py: BPE of GPT-2, tokenizer.json, WordPiece, last words" \
        "$python" tests/test_text_to_bin.py Tokenizers
}

# ---- a model of train_gpt ------------------------------------------------------------------------------------------

# evaluates NAME FLAG...: writes the result to NAME.txt
evaluates() {
    name=$1
    shift
    "$build/eval_gpt" --init-from "$build/run" --no-pinning "$@" >"$build/$name.txt" && cat "$build/$name.txt"
}

# The tokens, words, perplexity per word and per token of NAME.txt.
numbers_of() { sed -n 's/^perplexity \([^ ]*\) per word, \([0-9]*\) words, \([^ ]*\) per token, .*/\1 \2 \3/p' "$1"; }

# close_to NAME NAME TOLERANCE: the words are equal, and the perplexities differ at most by this part of them
close_to() {
    { numbers_of "$build/$1.txt"; numbers_of "$build/$2.txt"; } | awk -v most="$3" '
        function far(a, b) { return !(a > 0) || (a < b ? b - a : a - b) > most * a }
        NR == 1 { word = $1; words = $2; token = $3 }
        NR == 2 && !far(word, $1) && words == $2 && !far(token, $3) { same = 1 }
        END { exit !(NR == 2 && same) }'
}

trains() {
    rm -rf "$build/run"
    "$build/train_gpt" --data README.md --layers 2 --hidden 32 --heads 4 --seq 32 --batch 4 --steps 80 --warmup 4 \
        --sample 0 --eval-interval 0 --no-pinning --checkpoint "$build/run"
}

# The model has learned: a token of README.md has less than a quarter of the perplexity of 256 equal bytes. The words
# are the spaces between them, and one.
learned() {
    evaluates text --data README.md --stride 16 || return 1
    words=$(tr '\n' '\v' <README.md | sed 's/^[[:space:]]*//; s/[[:space:]]*$//' | tr -cd ' ' | wc -c)
    numbers_of "$build/text.txt" |
        awk -v words="$words" '$2 == words + 1 && $3 > 1 && $3 < 64 { ok = 1 } END { exit !ok }'
}

same_in_a_token_file() {
    python3 examples/text_to_bin.py wikitext --keep --tokenizer bytes --out "$build/text.bin" README.md &&
        evaluates bin --data "$build/text.bin" --stride 16 && close_to text bin 0
}

splits() {
    for split in "--tp 2 --dp 2" "--pp 2 --micro-batch 3" "--tp 4 --sequence-parallel"; do
        # shellcheck disable=SC2086  # a list of flags
        evaluates split --data README.md --stride 16 $split && close_to text split 1e-4 || return 1
    done
}

# A passage ends with the text that the model has seen most often after its beginning, or with a word that it has not.
cloze() {
    for last in "tensor parallel" "tensor parallel" "no xylophone"; do
        echo "{\"text\": \"with tensor parallel ranks $last\"}"
    done >"$build/cloze.jsonl"
    python3 examples/text_to_bin.py lambada --tokenizer bytes --out "$build/cloze.bin" "$build/cloze.jsonl" || return 1
    for split in "--tp 1" "--tp 2 --dp 2"; do
        # shellcheck disable=SC2086
        evaluates cloze $split --data "$build/cloze.bin" --log "$build/cloze.csv" || return 1
        grep -q '^accuracy .* of 3 passages, 28 tokens in their last words' "$build/cloze.txt" &&
            [ "$(sed -n '4s/.*,//p' "$build/cloze.csv")" = 0 ] || return 1
    done
}

trained() {
    find_implementation "$build"
    for name in train_gpt eval_gpt; do
        # shellcheck disable=SC2086  # a list of flags
        check "$name builds" "$CC" -O2 -I. $declarations examples/$name.c -o "$build/$name" "$implementation" -lm \
            -lpthread
    done
    check "a model of bytes is trained" trains
    check "eval_gpt: the perplexity of a text that the model has learned" learned
    check "eval_gpt: the same on other splits" splits
    if ! have_command python3; then
        leave_out "eval_gpt with files of text_to_bin.py: no python3 here"
        return
    fi
    check "eval_gpt: the same for a file of text_to_bin.py" same_in_a_token_file
    check "eval_gpt: a cloze test of text_to_bin.py" cloze
}

[ $# -gt 0 ] || set -- text_to_bin trained
for part in "$@"; do $part; done
closing_line
[ "$failed" -eq 0 ]
