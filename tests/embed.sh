#!/bin/sh
# Tests examples/embed.c with a small BERT of Hugging Face: its vectors against those of transformers (golden/embed/).
#
#   sh tests/embed.sh          one line per check, closing line "N passed, N failed, N skipped"
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
build=${MT_BUILD_DIR:-build}/embed
mkdir -p "$build" || exit 1
build=$(cd "$build" && pwd)
check_log=$build/check.log check_lines=40
model=tests/golden/bert_hf ids=tests/golden/embed/ids.txt vectors=tests/golden/embed/vectors.txt

# near FILE FILE: the same number of vectors, and the same numbers up to 1e-6
near() {
    [ "$(wc -l <"$1")" -eq "$(wc -l <"$2")" ] && paste -d ' ' "$1" "$2" | awk '
        { n = NF / 2; for (i = 1; i <= n; i++) { d = $i - $(i + n); if (d < 0) d = -d; if (d > most) most = d } }
        END { print NR " vectors of " n ", largest difference " most; exit !(NR > 0 && n > 1 && most < 1e-6) }'
}

# embeds NAME FLAG...: writes the vectors to NAME.txt
embeds() {
    name=$1
    shift
    "$build/embed" "$model" "$@" <$ids >"$build/$name.txt"
}

every_split() {
    for flags in "--tp 1" "--tp 2 --batch 1" "--tp 3 --batch 2" "--tp 8" "--tp 4 --batch 4096"; do
        # shellcheck disable=SC2086  # a list of flags
        embeds split $flags && near "$build/split.txt" $vectors || return 1
    done
    embeds file --tp 4 --batch 4096 --ids $ids && cmp "$build/file.txt" "$build/split.txt"
}

# Without normalisation, the direction of a vector is the same.
not_normalised() {
    embeds plain --normalize 0 || return 1
    near "$build/plain.txt" $vectors && return 1
    awk '{ s = 0; for (i = 1; i <= NF; i++) s += $i * $i
           for (i = 1; i <= NF; i++) printf "%.9g%s", $i / sqrt(s), i < NF ? " " : "\n" }' \
        "$build/plain.txt" >"$build/divided.txt"
    near "$build/divided.txt" $vectors
}

# The end of the file has the numbers.
to_a_file() {
    embeds none --out "$build/vectors.safetensors" && [ ! -s "$build/none.txt" ] || return 1
    rows=$(($(wc -l <$vectors))) columns=$(($(head -n 1 $vectors | wc -w)))
    grep -aq "\"embeddings\":{\"dtype\":\"F32\",\"shape\":\[$rows,$columns\]" "$build/vectors.safetensors" || return 1
    tail -c $((rows * columns * 4)) "$build/vectors.safetensors" | od -An -v -tf4 -w$((columns * 4)) >"$build/file.txt"
    near "$build/file.txt" $vectors
}

# refused MESSAGE INPUT ARGUMENT...: expects an exit status that is not 0, this message in one line, and no output
refused() {
    words=$1 input=$2
    shift 2
    if printf '%b' "$input" | "$build/embed" "$@" >"$build/output" 2>"$build/sentence"; then
        echo "not refused: $*"
        return 1
    fi
    cat "$build/sentence"
    [ ! -s "$build/output" ] && [ "$(wc -l <"$build/sentence")" -eq 1 ] && grep -q -- "$words" "$build/sentence"
}

# An encoder with another pooling, and one without a tensor.
other_models() {
    rm -rf "$build/cls" "$build/renamed"
    cp -r $model "$build/cls" && mkdir "$build/cls/1_Pooling" && cp -r $model "$build/renamed" || return 1
    echo '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}' >"$build/cls/1_Pooling/config.json"
    refused "pooling_mode_mean_tokens is false" "1\n" "$build/cls" || return 1
    echo '{"pooling_mode_max_tokens": true}' >"$build/cls/1_Pooling/config.json"
    refused "pooling_mode_max_tokens is true" "1\n" "$build/cls" || return 1
    sed 's/layer\.0\.attention\.self\.key\.weight/layer.0.attention.self.kez.weight/' $model/model.safetensors \
        >"$build/renamed/model.safetensors"
    refused "attention.self.ke[yz].weight" "1\n" "$build/renamed" --tp 4
}

# overwritten NAME TENSOR BYTE: a copy of the model in which each byte of this tensor is BYTE, an escape of printf
overwritten() {
    rm -rf "${build:?}/$1"
    cp -r $model "$build/$1" || return 1
    file=$build/$1/model.safetensors
    header=$(od -An -tu8 -N8 "$file" | tr -d ' ')
    # shellcheck disable=SC2046  # two numbers
    set -- "$3" $(head -c $((header + 8)) "$file" | tail -c "$header" | tr '{}' '\n\n' |
        grep -A 1 "\"$2\":\$" | sed -n 's/.*"data_offsets":\[\([0-9]*\),\([0-9]*\)\].*/\1 \2/p')
    [ $# -eq 3 ] || return 1
    dd if=/dev/zero bs=1 count=$(($3 - $2)) status=none | tr '\0' "$1" |
        dd of="$file" bs=1 seek=$((8 + header + $2)) conv=notrunc status=none
}

# Bytes of 7f are numbers of 3.4e38, so the vectors become infinite; bytes of ff are NaN.
not_finite() {
    norm=bert.encoder.layer.1.output.LayerNorm.weight
    overwritten huge $norm '\177' && overwritten nan $norm '\377' || return 1
    refused "^embed: sentence 1: number [0-9]* of its vector is infinite, must be finite" "1 2 3\n4\n" "$build/huge" \
        --normalize 0 &&
        refused "^embed: sentence 1: number [0-9]* of its vector is nan, must be finite" "1 2 3\n4\n" "$build/huge" \
            --out "$build/huge.safetensors" && [ ! -e "$build/huge.safetensors" ] &&
        refused "element 0 of '$norm' is nan, must be a finite number" "1 2 3\n" "$build/nan"
}

refusals() {
    other_models || return 1
    refused "usage: embed DIR" "" &&
        refused "has neither model.safetensors nor its index" "1\n" "$build/nonexistent" &&
        refused "model_type is 'gpt2', must be bert" "1\n" tests/golden/gpt2_hf &&
        refused "nonexistent: No such file" "" $model --ids "$build/nonexistent" &&
        refused "the input has no sentence" "" $model &&
        refused "sentence 2: 'x 3': expected a number from 0 to 60" "1\n2 x 3\n" $model &&
        refused "sentence 1: '61': expected a number from 0 to 60" "61\n" $model &&
        refused "sentence 1: '-1': expected a number from 0 to 60" "-1\n" $model &&
        refused "sentence 2 has 0 tokens, must have 1 to 12" "1\n\n2\n" $model &&
        refused "sentence 1 has 13 tokens, must have 1 to 12" "1 2 3 4 5 6 7 8 9 10 11 12 13" $model &&
        refused "batch 0: expected a whole number from 1 to 4096" "1\n" $model --batch 0 &&
        refused "unknown flag '--nonsense'" "1\n" $model --nonsense 1
}

find_implementation "$build"
# shellcheck disable=SC2086  # a list of flags
check "embed builds" "$CC" -O2 -I. $declarations examples/embed.c -o "$build/embed" "$implementation" -lm -lpthread
check "embed: the vectors of transformers, on 1, 2, 3, 4 and 8 ranks" every_split
check "embed: vectors that are not normalised" not_normalised
check "embed: vectors in a safetensors file" to_a_file
check "embed: what it refuses" refusals
check "embed: no vector that is not finite" not_finite
closing_line
[ "$failed" -eq 0 ]
