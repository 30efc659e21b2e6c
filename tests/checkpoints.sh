#!/bin/sh
# Tests checkpoints against other programs: a fuzzer, Python's safetensors, and training runs that are killed.
#
#   sh tests/checkpoints.sh [PART...]        one line per check, closing line "N passed, N failed, N skipped"
#
# Parts: fuzzing, python_safetensors, in_transformers, generating, killing; default: all of them. MT_TEST_ALL=1 kills
# runs of each type. MT_FUZZ_RUNS is the number of inputs that the fuzzer tries (100000, in the full matrix 2000000).
# MT_TEST_SEED (1) selects these inputs, and where runs are killed. Python needs numpy and safetensors of PyPI, which
# are installed in a virtual environment in the build directory. A part whose packages cannot be installed is skipped,
# with a message. torch and transformers, for in_transformers, are not installed by this script: MT_PYTHON is an
# interpreter that has them (python3).
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
build=${MT_BUILD_DIR:-build}/checkpoints
mkdir -p "$build" || exit 1
build=$(cd "$build" && pwd)
check_log=$build/check-${1:-all}.log check_lines=40
runs=${MT_FUZZ_RUNS:-$(if in_full; then echo 2000000; else echo 100000; fi)}
find_implementation "$build"

# ---- the fuzzer ----------------------------------------------------------------------------------------------------

build_fuzzer() {
    for name in readers messages; do
        # shellcheck disable=SC2086  # a list of flags
        clang -O1 $SANITIZE -fsanitize=fuzzer -I. "tests/fuzz/fuzz_$name.c" -o "$build/fuzz_$name" -lm -lpthread ||
            return 1
    done
}

# fuzz NAME [SEEDS]: failing inputs are written to the build directory, as crash-... or timeout-...
fuzz() {
    corpus=$build/corpus_$1
    rm -rf "$corpus" && mkdir "$corpus" || return 1 # or other runs would decide what is tried
    echo "seed $test_seed"
    # shellcheck disable=SC2086  # a folder, or none
    "$build/fuzz_$1" -seed="$test_seed" -runs="$runs" -timeout=300 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix="$build/" "$corpus" ${2:-}
}

fuzzing() {
    if ! have_command clang || ! build_fuzzer >"$build/fuzzer.log" 2>&1; then
        why="no clang with libFuzzer here; test_safetensors and test_messages have the same inputs each time"
        leave_out "fuzzing: $why"
        return
    fi
    check "the readers of files, fuzzed $runs times, address and undefined behaviour sanitizers" \
        fuzz readers tests/fuzz/seeds
    check "the messages about calls over NCCL, in the same way" fuzz messages
}

# ---- transformers --------------------------------------------------------------------------------------------------

opened_by_transformers() {
    rm -rf "$build/transformers.d" && mkdir "$build/transformers.d" || return 1
    # shellcheck disable=SC2086  # a list of flags
    "$CC" -O1 -I. $declarations tests/transformers_peer.c -o "$build/transformers_peer" "$implementation" -lm \
        -lpthread &&
        PYTHONDONTWRITEBYTECODE=1 "${MT_PYTHON:-python3}" tests/transformers_peer.py "$build/transformers_peer" \
            "$build/transformers.d"
}

in_transformers() {
    if hidden transformers || ! "${MT_PYTHON:-python3}" -c 'import safetensors, torch, transformers' 2>/dev/null; then
        skip "transformers: ${MT_PYTHON:-python3} (MT_PYTHON) does not have it and torch"
        return
    fi
    check "transformers opens what we save, no tensor is missing, and the logits are ours" opened_by_transformers
}

# ---- Python's safetensors ------------------------------------------------------------------------------------------

with_python() {
    rm -rf "$build/peer.d" && mkdir "$build/peer.d" || return 1
    # shellcheck disable=SC2086  # a list of flags
    "$CC" -O1 -I. $declarations tests/checkpoints_peer.c -o "$build/peer" "$implementation" -lm -lpthread &&
        "$python" tests/checkpoints_peer.py "$build/peer" "$build/peer.d"
}

python_safetensors() {
    if ! have_command python3 || ! find_python "$build/python" numpy safetensors >"$build/python.log" 2>&1; then
        leave_out "Python's safetensors: no Python with numpy and safetensors here, and they could not be installed"
        return
    fi
    check "Python's safetensors opens ours, we open its, of mutated headers both say the same" with_python
}

# ---- train_gpt, killed ---------------------------------------------------------------------------------------------

model="--data README.md --layers 2 --hidden 32 --heads 4 --seq 32 --batch 4 --steps 40 --warmup 4 --dropout 0.1
    --sample 0 --eval-interval 0 --no-pinning"

# goes_on FLAGS -- SPLIT [SPLIT...]: kills a run again and again, each time resumed on the next split, until it is done.
# Its hash log, losses and norms must be those of an uninterrupted run. Then its last step is run again on the first
# split (for the same number of files), and its checkpoint must have the same bytes. Each kill comes after 1 to 8 saves
# and 1 to 40 calls more (kill_at.c). These calls are less than two saves, so 40 steps have at least three kills.
goes_on() {
    flags=
    while [ "$1" != -- ]; do
        flags="$flags $1"
        shift
    done
    shift
    rm -rf "$build/run" "$build/whole" "$build"/run.* "$build"/whole.*
    # shellcheck disable=SC2086  # lists of flags
    "$train_gpt" $model $flags $1 --hash-log "$build/whole.log" --log "$build/whole.csv" --checkpoint "$build/whole" \
        --save-interval 1 >/dev/null || return 1
    start_drawing
    kills=0 first=$1
    while :; do
        draw 8
        saves=$((1 + drawn))
        draw 40
        # shellcheck disable=SC2086
        MT_KILL_SAVES=$saves MT_KILL_CALL=$((1 + drawn)) "$train_gpt" $model $flags $1 --checkpoint "$build/run" \
            --save-interval 1 --resume --hash-log "$build/run.log" --log "$build/run.csv" >"$build/out.log" 2>&1
        code=$?
        [ $code -ne 0 ] || break
        [ $code -eq 137 ] || { cat "$build/out.log"; echo "exit code $code"; return 1; }
        echo "killed after $saves saves and $((1 + drawn)) calls: $1"
        kills=$((kills + 1))
        split=$1 # moves to the end of the list
        shift
        set -- "$@" "$split"
    done
    for run in whole run; do
        cut -d , -f 1-3 "$build/$run.csv" >"$build/$run.losses"
    done
    diff "$build/whole.log" "$build/run.log" && diff "$build/whole.losses" "$build/run.losses" &&
        [ $kills -ge 3 ] && [ "$(wc -l <"$build/run.log")" -gt 1000 ] && rm -r "$build/run/step-00000040" || return 1
    # shellcheck disable=SC2086
    "$train_gpt" $model $flags $first --checkpoint "$build/run" --resume >/dev/null &&
        diff -r "$build/whole/step-00000040" "$build/run/step-00000040"
}

whole_numbers() {
    {
        "$train_gpt" --help
        "$train_gpt" --seq 0
        "$train_gpt" --data README.md --seq 1048576
    } >"$build/numbers" 2>&1
    grep -q 'from 1 to 1048576$' "$build/numbers" &&
        grep -q 'too few for --seq 1048576 (needs 4194312)' "$build/numbers" &&
        ! grep 'e+0' "$build/numbers"
}

# Without --invariant, hashes differ between splits, so the run is resumed on the same split.
killing() {
    check "train_gpt writes whole numbers of a million and more without an exponent" whole_numbers
    for dtype in f32 $(in_full && echo bf16 f16); do
        check "train_gpt --dtype $dtype, killed and resumed until it is done, has the bits of a run that was not" \
            goes_on --dtype $dtype --tp 2 -- ""
        check "the same, each time on another split, --invariant 4" \
            goes_on --dtype $dtype --invariant 4 -- "--tp 2 --dp 2" "--tp 4" "--tp 1" "--tp 2 --pp 2" \
            "--tp 1 --dp 4 --use-distributed-optimizer" "--tp 2 --sequence-parallel" \
            "--tp 1 --dp 2 --pp 2 --use-distributed-optimizer"
    done
}

# ---- 04_generate ---------------------------------------------------------------------------------------------------

# same_tokens DIR FLAGS: compares the tokens on 1, 2 and 4 ranks
same_tokens() {
    for tp in 1 2 4; do
        "$build/generate" --init-from "$@" --tp $tp >"$build/tokens.$tp" || return 1
    done
    cat "$build/tokens.1"
    [ "$(wc -c <"$build/tokens.1")" -gt 45 ] && cmp "$build/tokens.1" "$build/tokens.2" &&
        cmp "$build/tokens.1" "$build/tokens.4"
}

of_hugging_face() {
    same_tokens tests/golden/gpt2_hf --ids 1,2,3 --seed 7 || return 1
    cp "$build/tokens.1" "$build/tokens.seven"
    same_tokens tests/golden/gpt2_hf_bare --ids 1,2,3 --seed 7 && cmp "$build/tokens.1" "$build/tokens.seven" &&
        same_tokens tests/golden/gpt2_hf --ids 1,2,3 --seed 8 && ! cmp -s "$build/tokens.1" "$build/tokens.seven" &&
        same_tokens tests/golden/gpt2_hf --ids 1,2,3 --temperature 0
}

# Each line of generate.txt: a model, a prompt, and the tokens that transformers writes after it.
as_transformers() {
    lines=0
    while read -r golden prompt tokens; do
        echo "$prompt,$tokens" | tr ',\n' '  ' >"$build/tokens" && echo >>"$build/tokens" || return 1
        count=$(echo "$tokens" | tr ',' '\n' | wc -l)
        for tp in 1 2 4; do
            "$build/generate" --init-from "tests/golden/$golden" --ids "$prompt" --tokens "$count" --temperature 0 \
                --tp $tp >"$build/tokens.$tp" && diff "$build/tokens" "$build/tokens.$tp" ||
                { echo "$golden, prompt $prompt, --tp $tp"; return 1; }
        done
        lines=$((lines + 1))
    done <tests/golden/generate.txt
    [ $lines -eq 12 ]
}

of_train_gpt() {
    rm -rf "$build/text"
    # shellcheck disable=SC2086  # a list of flags
    "$train_gpt" $model --tp 2 --checkpoint "$build/text" >/dev/null && same_tokens "$build/text" --prompt "The rank" &&
        grep -q '^The rank' "$build/tokens.1" && cp "$build/tokens.1" "$build/tokens.newest" &&
        same_tokens "$build/text/step-00000040" --prompt "The rank" && cmp "$build/tokens.1" "$build/tokens.newest"
}

# A prompt of 1050 tokens takes more memory than the default arena has, 256 MiB, because of 32768 features in the MLP.
# A prompt that is longer than max_seq begins with its last tokens.
plans_its_memory() {
    rm -rf "$build/wide"
    "$train_gpt" --data LICENSE --layers 1 --hidden 8 --heads 2 --ffn 32768 --seq 8 --max-seq 2100 --batch 1 --steps 1 \
        --sample 0 --eval-interval 0 --tp 1 --checkpoint "$build/wide" >/dev/null || return 1
    long=$(head -c 1050 LICENSE | tr '\n' ' ')
    for prompt in "$long" "$long$long$long"; do
        "$build/generate" --init-from "$build/wide" --prompt "$prompt" --tokens 2 --tp 1 >"$build/tokens" &&
            grep -q "^$long" "$build/tokens" || return 1
    done
    rm -rf "$build/wide"
}

# refused MESSAGE ARGUMENTS: expects an exit status that is not 0, this message and no token
refused() {
    words=$1
    shift
    if "$build/generate" "$@" >"$build/tokens" 2>"$build/sentence"; then
        echo "not refused: $*"
        return 1
    fi
    cat "$build/sentence"
    [ ! -s "$build/tokens" ] && grep -q -- "$words" "$build/sentence"
}

# A file that cannot be loaded is reported once, not by each rank.
refused_once() {
    rm -rf "$build/renamed" && cp -r tests/golden/gpt2_hf "$build/renamed" || return 1
    sed 's/h\.0\.ln_1\.weight/h.0.ln_9.weight/' tests/golden/gpt2_hf/model.safetensors \
        >"$build/renamed/model.safetensors"
    refused "has no tensor 'transformer.h.0.ln_1.weight'" --init-from "$build/renamed" --ids 1 --tp 4 &&
        [ "$(wc -l <"$build/sentence")" = 1 ]
}

# The flags are those of train_gpt and eval_gpt, and so are the messages.
help_and_defaults() {
    "$build/generate" --help >"$build/help" && cat "$build/help" || return 1
    for flag in init-from prompt ids tokens tp temperature top-k top-p seed help; do
        grep -q "^  --$flag " "$build/help" || return 1
    done
    grep -qx 'usage: 04_generate --init-from DIR \[flags\]' "$build/help" &&
        grep -q 'tensor parallel ranks (default 2)' "$build/help"
}

refusals() {
    mkdir -p "$build/empty"
    gpt2="--init-from tests/golden/gpt2_hf --ids 1"
    refused_once || return 1
    # shellcheck disable=SC2086  # a list of flags
    refused "^04_generate: --init-from DIR is missing, see --help$" --ids 1 &&
        refused "^04_generate: unexpected argument 'runs/a'; flags start with --, see --help$" runs/a --ids 1 &&
        refused "requires an argument" --init-from &&
        refused "nonexistent: has neither model.safetensors nor its index" --init-from "$build/nonexistent" &&
        refused "empty: has neither model.safetensors nor its index" --init-from "$build/empty" &&
        refused "vocabulary of 61 is not bytes; give the prompt with --ids" \
            --init-from tests/golden/gpt2_hf --prompt a &&
        refused "ids 1,61: expected numbers from 0 to 60 at number 2" $gpt2,61 &&
        refused "expected numbers from 0 to 60" $gpt2,-1 &&
        refused "expected numbers from 0 to 60" $gpt2,x &&
        refused "the prompt is empty" $gpt2 --ids "" &&
        refused "cannot be split over 5 tensor ranks" $gpt2 --tp 5 &&
        refused "--tp 0: expected a whole number from 1 to 1024" $gpt2 --tp 0 &&
        refused "--tp 1.5: expected a whole number" $gpt2 --tp 1.5 &&
        refused "--tokens 2000000: expected a whole number from 0 to 1048576" $gpt2 --tokens 2000000 &&
        refused "--temperature nan: expected a number from 0 to 100" $gpt2 --temperature nan &&
        refused "nonsense" $gpt2 --nonsense 1 &&
        refuses_the_shape
}

# A flag of train_gpt for the shape of a model is refused with one sentence.
refuses_the_shape() {
    for flag in "config gpt2-1.2b" "layers 2" "hidden 16" "heads 4" "kv-heads 4" "ffn 40" "seq 12" "max-seq 12" \
        "vocab 61" rotary alibi "window 0" "softcap 20" "activation gelu" rmsnorm untied; do
        want="04_generate: --${flag%% *}: the model in --init-from DIR has its own shape, see --help"
        # shellcheck disable=SC2086  # a list of flags
        refused "$want" $gpt2 --$flag && [ "$(cat "$build/sentence")" = "$want" ] || return 1
    done
}

generating() {
    # shellcheck disable=SC2086  # a list of flags
    "$CC" -O2 -I. $declarations examples/04_generate.c -o "$build/generate" "$implementation" -lm -lpthread || return
    check "04_generate: a GPT-2 of Hugging Face writes the same tokens on 1, 2 and 4 ranks" of_hugging_face
    check "04_generate: the most probable tokens of transformers, GPT-2 and Llama, on 1, 2 and 4 ranks" as_transformers
    check "04_generate: a model of train_gpt writes the same tokens on 1, 2 and 4 ranks" of_train_gpt
    check "04_generate: a prompt that needs more than 256 MiB" plans_its_memory
    check "04_generate: what it refuses" refusals
    check "04_generate: --help" help_and_defaults
}

[ $# -gt 0 ] || set -- fuzzing python_safetensors in_transformers generating killing
case $* in
*generating* | *killing*)
    train_gpt=$build/train_gpt
    # shellcheck disable=SC2086  # a list of flags
    check "train_gpt builds" "$CC" -O2 -I. $declarations examples/train_gpt.c tests/kill_at.c \
        -o "$train_gpt" $KILL_AT "$implementation" -lm -lpthread
    ;;
esac
for part in "$@"; do $part; done
closing_line
[ "$failed" -eq 0 ]
