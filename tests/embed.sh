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

# near FILE FILE [TOLERANCE]: the same number of vectors, and the same numbers up to 1e-6, or this tolerance
near() {
    [ "$(wc -l <"$1")" -eq "$(wc -l <"$2")" ] && paste -d ' ' "$1" "$2" | awk -v tolerance="${3:-1e-6}" '
        { n = NF / 2; for (i = 1; i <= n; i++) { d = $i - $(i + n); if (d < 0) d = -d; if (d > most) most = d } }
        END { print NR " vectors of " n ", largest difference " most; exit !(NR > 0 && n > 1 && most < tolerance) }'
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

# 140 sentences of 8 tokens at a time take more memory than the default arena has, 256 MiB, because of 32768 features in
# the MLP. The last call has fewer sentences.
plans_its_memory() {
    # shellcheck disable=SC2086  # a list of flags
    "$CC" -O2 -I. $declarations examples/train_bert.c -o "$build/train_bert" "$implementation" -lm -lpthread &&
        rm -rf "$build/wide" && "$build/train_bert" --data LICENSE --layers 1 --hidden 8 --heads 2 --ffn 32768 \
        --seq 8 --batch 1 --placement post-ln --steps 1 --eval-interval 0 --tp 1 --checkpoint "$build/wide" \
        >/dev/null || return 1
    awk 'BEGIN { for (i = 0; i < 150; i++) print 1, 2, 3, 4, 5, 6, 7, i }' >"$build/many.txt"
    "$build/embed" "$build/wide" --tp 1 --batch 140 --ids "$build/many.txt" >"$build/at_once.txt" &&
        "$build/embed" "$build/wide" --tp 2 --batch 9 --ids "$build/many.txt" >"$build/in_parts.txt" &&
        [ "$(wc -l <"$build/at_once.txt")" -eq 150 ] && near "$build/at_once.txt" "$build/in_parts.txt"
}

# A checkpoint of train_bert, with the names of the library and with those of transformers.
of_train_bert() {
    for placement in pre-ln post-ln; do
        rm -rf "$build/run" && "$build/train_bert" --data LICENSE --layers 1 --hidden 16 --heads 2 --seq 8 --batch 2 \
            --placement $placement --steps 1 --eval-interval 0 --checkpoint "$build/run" >/dev/null || return 1
        for tp in 1 2; do
            printf '1 2 3\n4\n' | "$build/embed" "$build/run" --tp $tp >"$build/run.$tp.txt" || return 1
        done
        [ "$(wc -l <"$build/run.1.txt")" -eq 2 ] && near "$build/run.1.txt" "$build/run.2.txt" || return 1
    done
}

# A pipe or a device is not replaced by a file.
to_no_file() {
    rm -f "$build/pipe" "$build/null" && mkfifo "$build/pipe" && ln -s /dev/null "$build/null" || return 1
    for out in "$build/pipe" "$build/null" "$build"; do
        refused "embed: $out: is not a regular file" "1\n" $model --out "$out" && [ ! -e "$out.tmp" ] || return 1
    done
    [ -p "$build/pipe" ] && [ -L "$build/null" ] && rm "$build/pipe" "$build/null"
}

# stays FILE MESSAGE ARGUMENT...: --out FILE is refused with this message, and the file stays as it was
stays() {
    file=$1 words=$2
    shift 2
    cp "$file" "$build/before" && refused "$words" "1\n" "$@" --out "$file" && cmp "$file" "$build/before"
}

# The input and the files of the model are not replaced, also by way of a link.
to_no_file_of_its_own() {
    encoder pooling '{}' && mkdir "$build/pooling/2_Normalize" && echo '{}' >"$build/pooling/2_Normalize/config.json" &&
        modules pooling sentence_transformers.models.Transformer "" sentence_transformers.models.Pooling 1_Pooling \
            sentence_transformers.models.Normalize 2_Normalize || return 1
    for name in model.safetensors config.json modules.json 1_Pooling/config.json 2_Normalize/config.json; do
        stays "$build/pooling/$name" "^embed: --out .*/$name is the same file as the model's .*/$name$" \
            "$build/pooling" || return 1
    done
    rm -f "$build/link" && ln -s pooling/model.safetensors "$build/link" && cp $ids "$build/ids" || return 1
    stays "$build/link" "link is the same file as the model's" "$build/pooling" && [ -L "$build/link" ] &&
        stays "$build/ids" "^embed: --out .* is the same file as --ids" $model --ids "$build/ids" || return 1
    "$build/embed" $model --out "$build/ids" <"$build/ids" 2>"$build/sentence" && return 1
    grep -q "is the same file as /dev/stdin" "$build/sentence" && cmp "$build/ids" $ids || return 1
    [ ! -e "$build/run" ] || rm -r "$build/run"
    mkdir "$build/run" && cp -r $model "$build/run/step-00000001" && cp -r $model "$build/run/step-00000002" || return 1
    stays "$build/run/step-00000001/model.safetensors" "is the same file as the model's" "$build/run" || return 1
    embeds none --out "$build/pooling/vectors.safetensors" && [ -s "$build/pooling/vectors.safetensors" ]
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

# encoder FOLDER [JSON]: makes a model with this config.json of a Pooling in 1_Pooling
encoder() {
    rm -rf "${build:?}/$1" && cp -r $model "$build/$1" || return 1
    [ $# -eq 1 ] || { mkdir "$build/$1/1_Pooling" && echo "$2" >"$build/$1/1_Pooling/config.json"; }
}

# modules FOLDER TYPE PATH [TYPE PATH]...: writes modules.json
modules() {
    folder=$build/$1 separator='[' n=0
    shift
    while [ $# -gt 0 ]; do
        printf '%s{"idx": %s, "name": "%s", "path": "%s", "type": "%s"}' "$separator" $n $n "$2" "$1"
        separator=,
        n=$((n + 1))
        shift 2
    done >"$folder/modules.json"
    echo ']' >>"$folder/modules.json"
}

# pools MODE: the vectors of the encoder are those of the mode, whose numbers are up to 11 without normalisation
pools() {
    "$build/embed" "$build/pooling" --normalize 0 --tp 2 <$ids >"$build/pooling.txt" &&
        near "$build/pooling.txt" "tests/golden/embed/$1.txt" 1e-5 && return 0
    echo "not $1: $(cat "$build/pooling/1_Pooling/config.json")"
    return 1
}

# pooled MODE JSON...: an encoder with each of these files has the vectors of the mode
pooled() {
    mode=$1
    shift
    for json in "$@"; do encoder pooling "$json" && pools "$mode" || return 1; done
}

no_mean='"pooling_mode_mean_tokens": false'

# The forms of sentence-transformers since 5.4, and those before.
modes_of_pooling() {
    for mode in cls max mean mean_sqrt_len_tokens weightedmean lasttoken; do
        older=${mode%_tokens}_tokens
        case $mode in lasttoken) older=lasttoken ;; esac
        pooled "$mode" "{\"embedding_dimension\": 32, \"pooling_mode\": \"$mode\", \"include_prompt\": true}" \
            "{\"pooling_mode\": [\"$mode\"]}" \
            "{\"pooling_mode_cls_token\": true, \"pooling_mode\": \"$mode\"}" || return 1
        case $mode in mean) continue ;; cls) older=cls_token ;; esac
        pooled "$mode" "{\"word_embedding_dimension\": 32, \"pooling_mode_$older\": true, $no_mean}" || return 1
    done
    pooled mean '{}' '{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false}'
}

refused_pooling() {
    words=$1
    shift
    for json in "$@"; do encoder pooling "$json" && refused "$words" "1\n" "$build/pooling" || return 1; done
}

other_pooling() {
    at=pooling/1_Pooling/config.json
    refused_pooling "$at: pooling_mode_cls_token is true and pooling_mode_mean_tokens is true or missing" \
        '{"pooling_mode_cls_token": true}' \
        '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}' &&
        refused_pooling "pooling_mode_lasttoken is true and pooling_mode_max_tokens is true, this program has one" \
            "{\"pooling_mode_max_tokens\": true, \"pooling_mode_lasttoken\": true, $no_mean}" &&
        refused_pooling "pooling_mode_mean_tokens is false, and no other mode" '{"pooling_mode_mean_tokens": false}' &&
        refused_pooling "pooling_mode is a list of 'cls', 'mean'" '{"pooling_mode": ["cls", "mean"]}' \
            '{"pooling_mode": ["cls", "mean", "max"]}' &&
        refused_pooling "pooling_mode is 'attention', must be mean, cls" '{"pooling_mode": "attention"}' \
            '{"pooling_mode": ["attention"]}' &&
        refused_pooling "pooling_mode: a string is missing" '{"pooling_mode": []}' '{"pooling_mode": null}' \
            '{"pooling_mode": {"0": "cls"}}' '{"pooling_mode": true}' &&
        refused_pooling "include_prompt is false" '{"pooling_mode": "mean", "include_prompt": false}' &&
        refused_pooling "the embedding has 33 features, the model has 32" '{"word_embedding_dimension": 33}' \
            '{"embedding_dimension": 33, "pooling_mode": "cls"}' &&
        refused_pooling "$at: JSON, byte 0" 'no JSON' '[]'
}

# The folder of the pooling is that of modules.json. Names of classes are those of sentence-transformers 2 to 6.
modules_of_an_encoder() {
    old=sentence_transformers.models new=sentence_transformers.sentence_transformer.modules.pooling
    for classes in "$old.Transformer $old.Pooling $old.Normalize" \
        "sentence_transformers.base.modules.transformer.Transformer $new.Pooling \
            sentence_transformers.base.modules.normalize.Normalize"; do
        # shellcheck disable=SC2086  # a list of words
        set -- $classes
        encoder pooling '{"pooling_mode": "max"}' && mkdir "$build/pooling/own" &&
            echo '{"pooling_mode": "cls"}' >"$build/pooling/own/config.json" || return 1
        modules pooling "$1" "" "$2" own && pools cls || return 1
        modules pooling "$1" "" "$2" 1_Pooling "$3" 2_Normalize && pools max || return 1
        mkdir "$build/pooling/2_Normalize" && echo '{"module_input_name": "sentence_embedding"}' \
            >"$build/pooling/2_Normalize/config.json" && pools max || return 1
    done
}

refused_modules() {
    words=$1
    shift
    modules pooling "$@" && refused "$words" "1\n" "$build/pooling"
}

other_modules() {
    old=sentence_transformers.models
    first="$old.Transformer" second="$old.Pooling" third="$old.Normalize"
    encoder pooling '{}' && mkdir "$build/pooling/2_Normalize" || return 1
    refused_modules "modules.json: module 3 is '$old.Dense', this program has Transformer, Pooling and" \
        $first "" $second 1_Pooling $old.Dense 2_Dense &&
        refused_modules "module 3 is '$old.Dense'" $first "" $second 1_Pooling $old.Dense 2_Dense $third 3_Normalize &&
        refused_modules "module 4 is '$old.Dense'" $first "" $second 1_Pooling $third "" $old.Dense 2_Dense &&
        refused_modules "module 2 is '$old.WeightedLayerPooling'" $first "" $old.WeightedLayerPooling 1_W &&
        refused_modules "module 2 is ''" $first "" && refused_modules "module 1 is '$second'" $second 1_Pooling &&
        refused_modules "module 2 is 'mine.Pooling'" $first "" mine.Pooling 1_Pooling &&
        refused_modules "module 1 is 'sentence_transformers.sparse_encoder.models.SpladePooling'" \
            sentence_transformers.sparse_encoder.models.SpladePooling "" &&
        refused_modules "module 2 is '$third'" $first "" $third "" $second 1_Pooling &&
        refused_modules "the Transformer is in '0_Transformer', must be" $first 0_Transformer $second 1_Pooling &&
        refused_modules "the Pooling has no folder" $first "" $second "" &&
        refused_modules "pooling/3_Pooling/config.json: cannot open it" $first "" $second 3_Pooling &&
        refused_modules "cannot open it" $first "" $second ../pooling/1_Pooling || return 1
    echo '{"module_input_name": "token_embeddings"}' >"$build/pooling/2_Normalize/config.json"
    refused_modules "module_input_name is 'token_embeddings', must be 'sentence_embedding'" \
        $first "" $second 1_Pooling $third 2_Normalize || return 1
    for json in '{}' '[]' '[1]' '["Transformer"]' 'x'; do
        echo "$json" >"$build/pooling/modules.json"
        refused "pooling/modules.json: " "1\n" "$build/pooling" || return 1
    done
}

# The files of an encoder are read only from its folder.
links_out_of_an_encoder() {
    rm -rf "$build/elsewhere" && mkdir "$build/elsewhere" &&
        echo '{"pooling_mode": "cls"}' >"$build/elsewhere/config.json" &&
        encoder pooling && ln -s ../elsewhere "$build/pooling/1_Pooling" || return 1
    refused "1_Pooling/config.json: cannot open it" "1\n" "$build/pooling" &&
        encoder pooling '{}' && ln -sf ../../elsewhere/config.json "$build/pooling/1_Pooling/config.json" || return 1
    refused "1_Pooling/config.json: is a link that leads out of its folder" "1\n" "$build/pooling" &&
        encoder pooling '{}' && ln -s ../elsewhere/config.json "$build/pooling/modules.json" || return 1
    refused "modules.json: is a link that leads out of its folder" "1\n" "$build/pooling" || return 1
    encoder pooling && mkfifo "$build/pooling/modules.json" || return 1
    refused "modules.json: is not a regular file" "1\n" "$build/pooling"
}

# max_seq_length limits a sentence. Outputs that are not those of the tokens are refused.
transformer_of_an_encoder() {
    encoder pooling '{}' || return 1
    config=$build/pooling/sentence_bert_config.json
    echo '{"max_seq_length": 3, "do_lower_case": true, "transformer_task": "feature-extraction"}' >"$config"
    printf '1 2 3\n4\n' | "$build/embed" "$build/pooling" >"$build/output" &&
        refused "sentence 2 has 4 tokens, must have 1 to 3" "1 2 3\n1 2 3 4\n" "$build/pooling" || return 1
    echo '{"max_seq_length": null}' >"$config"
    pools mean || return 1
    echo '{"max_seq_length": 512}' >"$config"
    pools mean && refused "has 13 tokens, must have 1 to 12" "1 1 1 1 1 1 1 1 1 1 1 1 1" "$build/pooling" || return 1
    echo '{"transformer_task": "sequence-classification"}' >"$config"
    refused "transformer_task is 'sequence-classification', must be 'feature-extraction'" "1\n" "$build/pooling"
}

# An encoder without a tensor.
other_models() {
    encoder renamed || return 1
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

# A NUL does not end the input, wherever it is, and a read that fails is not its end.
broken_inputs() {
    for input in '1\0 2\n3\n4\n' '\0001\n2\n' '1\n2\n\000' '1\n\000\n2\n' '1 \000\n'; do
        refused "expected a number from 0 to 60" "$input" $model || return 1
    done
    refused "embed: cannot read tests: Is a directory" "" $model --ids tests
}

# What has no end is refused: a device, a pipe without a writer, and a pipe and a file that are too long.
endless_inputs() {
    long=$build/long
    rm -f "$long" "$build/pipe"
    mkfifo "$build/pipe" && : >"$long" && truncate -s 1073741825 "$long" || return 1
    refused "embed: cannot read /dev/zero: it is not a regular file" "" $model --ids /dev/zero &&
        refused "embed: cannot read $build/pipe: it is not a regular file" "" $model --ids "$build/pipe" &&
        refused "embed: cannot read $long: it has more than 1073741824 bytes" "" $model --ids "$long" || return 1
    rm -f "$long"
    yes 1 | "$build/embed" $model >"$build/output" 2>"$build/sentence" && return 1
    cat "$build/sentence"
    [ ! -s "$build/output" ] && grep -q "cannot read the standard input: it has more than 1073741824" "$build/sentence"
}

refusals() {
    other_models || return 1
    refused "usage: embed DIR" "" &&
        refused "has neither model.safetensors nor its index" "1\n" "$build/nonexistent" &&
        refused "model_type is 'gpt2', must be bert" "1\n" tests/golden/gpt2_hf &&
        refused "cannot read $build/nonexistent: No such file" "" $model --ids "$build/nonexistent" &&
        refused "the input has no sentence" "" $model &&
        refused "standard input: sentence 2: 'x 3': expected a number from 0 to 60, as token 2" "1\n2 x 3\n" $model &&
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
check "embed: sentences that need more than 256 MiB" plans_its_memory
check "embed: a checkpoint of train_bert" of_train_bert
check "embed: what is no file is not replaced by one" to_no_file
check "embed: the input and the files of the model are not replaced" to_no_file_of_its_own
check "embed: each mode of pooling of sentence-transformers" modes_of_pooling
check "embed: a pooling that it does not have is refused by name" other_pooling
check "embed: the modules of an encoder, and the folder of its pooling" modules_of_an_encoder
check "embed: a module that it does not have is refused by name" other_modules
check "embed: links out of the folder of an encoder are not followed" links_out_of_an_encoder
check "embed: the length of sentences, and the outputs, of an encoder" transformer_of_an_encoder
check "embed: a NUL, and a read that fails" broken_inputs
check "embed: an input without an end" endless_inputs
check "embed: what it refuses" refusals
check "embed: no vector that is not finite" not_finite
closing_line
[ "$failed" -eq 0 ]
