#!/bin/sh
# Tests README.md and docs/: the programs compile and learn, and every link has a target.
#
#   sh tests/docs.sh        one line per check, closing line "N passed, N failed, N skipped"
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
work=$(mktemp -d) || exit 1
check_log=$work/log
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# block NUMBER PAGE: a block of C
block() { awk -v number="$1" '/^```c$/ { n++; inside = n == number; next } /^```/ { inside = 0 } inside' "$2"; }

# program_of PAGE: the first block of C
program_of() { block 1 "$1"; }

# The program at the head of megatron.h.
header_program() {
    awk '/^    #define MEGATRON_IMPLEMENTATION/ { inside = 1 }
        inside { sub(/^    /, ""); print }
        /^int main/ { exit }' megatron.h
}

# The program is short, the same in both places, compiles without a warning, and its loss falls below a tenth.
first_program() {
    program_of README.md >"$work/loop.c" && header_program >"$work/header.c" || return 1
    diff "$work/loop.c" "$work/header.c" || return 1
    [ "$(wc -l <"$work/loop.c")" -lt 25 ] || { wc -l "$work/loop.c"; return 1; }
    "$CC" -std=c99 -O2 -Wall -Wextra -Werror -I. "$work/loop.c" -o "$work/loop" -lm -lpthread &&
        "$work/loop" >"$work/loop.txt" || return 1
    awk 'NR == 1 { first = $2 }
        END { print NR " steps: " first " -> " $2; exit !(NR == 50 && first > 1 && $2 > 0 && $2 < first / 10) }' \
        "$work/loop.txt"
}

# builds NAME
builds() {
    find_implementation "$work"
    # shellcheck disable=SC2086  # a list of flags
    "$CC" -std=c99 -O2 -Wall -Wextra -Werror -I. $declarations "$work/$1.c" -o "$work/$1" "$implementation" -lm \
        -lpthread
}

# The program with its own weights has the same losses and input gradients on 1, 2 and 4 ranks, up to rounding.
own_weights_program() {
    program_of docs/own-weights.md >"$work/own.c"
    builds own || return 1
    for ranks in 1 2 4; do
        "$work/own" $ranks >"$work/own$ranks.txt" || return 1
        paste "$work/own1.txt" "$work/own$ranks.txt" | awk '
            function distance(a, b) { return a < b ? b - a : a - b }
            distance($4, $10) > 1e-5 * $4 || distance($6, $12) > 1e-5 || $2 != $8 || NF != 12 { wrong = 1 }
            NR == 1 { first = $4 }
            END { print NR " steps: " first " -> " $10; exit !(NR == 100 && !wrong && $10 > 0 && $10 < first / 10) }' ||
            return 1
    done
    "$work/own" 3 && return 1
    return 0
}

# The program of docs/checking.md prints what the page says.
checking_program() {
    program_of docs/checking.md >"$work/checking.c"
    builds checking || return 1
    awk '/^It prints:$/ { prints = 1 } /^```/ && prints { if (inside) exit; inside = 1; next } inside' \
        docs/checking.md >"$work/checking.txt"
    "$work/checking" | diff "$work/checking.txt" -
}

# So does its program that compares values.
comparing_program() {
    sed -n '/^## What rules cannot see$/,$p' docs/checking.md >"$work/comparing.md"
    program_of "$work/comparing.md" >"$work/comparing.c"
    builds comparing || return 1
    awk '/^On 2 ranks it prints:$/ { prints = 1 } /^```/ && prints { if (inside) exit; inside = 1; next } inside' \
        "$work/comparing.md" >"$work/comparing.txt"
    "$work/comparing" | diff "$work/comparing.txt" -
}

# The fragments of docs/checking.md work in its program: the listener is told of its calls, the rule of an operator of
# one's own refuses a part of a sum, and ranks without data run.
checking_fragments() {
    page=docs/checking.md
    program_of $page | sed '/^int main/,$d' >"$work/fragments.c"
    block 2 $page | sed '/^\.\.\./,$d' >>"$work/fragments.c"
    {
        echo 'static mt_status my_bias(mt_context *ctx, mt_tensor y, mt_tensor bias) {'
        echo '    mt_tensor x = y, dy = y, dx = y;'
        sed -n '/^## Rules of your own$/,/^## /p' $page | grep '^    '
        printf '    return MT_SUCCESS;\n}\n'
    } >>"$work/fragments.c"
    block 3 $page | sed 's/^int main/static int all_ranks/; s|^    \.\.\. .*|    mt_context *ctx;\n    (void)user;\n\
    MT_TRY(mt_context_create(world, \&where, \&ctx));\n    mt_context_destroy(ctx);\n    return MT_SUCCESS;|' \
        >>"$work/fragments.c"
    program_of $page | sed -n '/^int main/,$p' | sed "/mt_grid_create/a\\
        $(block 2 $page | sed '1,/^\.\.\./d')
        /mt_params_destroy/i\\
    mt_tensor y = mt_tensor_f32((float *)64, 4, 4), bias = mt_tensor_f32((float *)1024, 1, 4);\\
    MT_TRY(mt_declare(ctx, grid.tp, y, MT_PARTIAL));\\
    MT_TRY(mt_declare(ctx, grid.tp, bias, MT_REPLICATED));\\
    printf(\"own %s\", my_bias(ctx, y, bias) ? mt_last_error(ctx) : \"accepted\");\\
    printf(\", %d\\\\n\", all_ranks());" >>"$work/fragments.c"
    builds fragments && "$work/fragments" >"$work/fragments.txt" || return 1
    grep -qx 'mt_linear_forward fc1.weight: y \[8, 16\] c' "$work/fragments.txt" &&
        grep -qx 'mt_linear_gradients fc2.weight: dweight \[16, 16\] c' "$work/fragments.txt" &&
        grep -q '^own my_bias.*: y is partial over "tensor" (2 ranks) since mt_declare, must be .*, 0$' \
            "$work/fragments.txt" && return 0
    cat "$work/fragments.txt"
    return 1
}

# docs/checking.md has the table of rules that tools/rules.sh prints, which knows every array of rules in src/ops/.
checking_rules() {
    for rules in $(sed -n 's/^static const mt_rule \(mti_[a-z_]*\)\[.*/\1/p' src/ops/*.c); do
        grep -q "&$rules\[" tools/rules.c || { echo "tools/rules.c does not have $rules"; return 1; }
    done
    CC=$CC sh tools/rules.sh >"$work/rules.txt" || return 1
    [ "$(grep -c '^| `mt_' "$work/rules.txt")" -gt 50 ] || { echo "too few rules found"; return 1; }
    sed -n '/^<!-- rules -->$/,/^<!-- end -->$/p' docs/checking.md | sed '1d;$d' | diff - "$work/rules.txt" ||
        { echo "sh tools/rules.sh --write writes the table of docs/checking.md"; return 1; }
}

# The table of communication in docs/checking.md has every region function, collective and message of mt_comm.h.
checking_communication() {
    sed -n '/^Communication changes/,/^## Dropout/p' docs/checking.md | grep '^|' >"$work/communication.md"
    sed -nE 's/^MT_API mt_status (mt_[a-z_]+)\(mt_context \*ctx, (const )?mt_comm \*comm,.*/\1/p' mt_comm.h |
        grep -E 'region|^mt_(all_|reduce_scatter|broadcast|send|recv)' | sort -u >"$work/communication.txt"
    [ "$(wc -l <"$work/communication.txt")" -gt 15 ] || { echo "too few functions found"; return 1; }
    while IFS= read -r name; do
        grep -qF "\`$name\`" "$work/communication.md" || { echo "missing: $name"; return 1; }
    done <"$work/communication.txt"
}

# The ring of docs/context.md has the results of attention to all keys.
context_program() {
    program_of docs/context.md >"$work/ring.c"
    builds ring || return 1
    for ranks in 1 2 3 4; do
        "$work/ring" $ranks >"$work/ring.txt" || return 1
        tr -d , <"$work/ring.txt" | awk -v ranks=$ranks '
            { for (i = 4; i <= 10; i += 2) if ($i > 5e-6) wrong = 1 }
            END { exit wrong || NR != ranks }' || { cat "$work/ring.txt"; return 1; }
    done
}

# The pipeline of docs/many-ranks.md learns. The losses of its micro-batches are the same on 1, 2 and 4 stages, up
# to rounding.
pipeline_program() {
    sed -n '/^## Pipelines$/,$p' docs/many-ranks.md >"$work/pipelines.md"
    program_of "$work/pipelines.md" >"$work/pipe.c"
    builds pipe || return 1
    for stages in 1 2 4; do
        "$work/pipe" $stages >"$work/pipe$stages.txt" || return 1
        paste "$work/pipe1.txt" "$work/pipe$stages.txt" | awk '
            function distance(a, b) { return a < b ? b - a : a - b }
            { for (i = 2; i <= 5; i++) if (!(distance($i, $(i + 5)) <= 1e-4)) wrong = 1 }
            NF != 10 || $1 != $6 { wrong = 1 }
            NR == 1 { first = $2 }
            END { print NR " steps: " first " -> " $7; exit !(NR == 40 && !wrong && $7 > 0 && $7 < first / 3) }' ||
            return 1
    done
}

# So does the program over a transport of its own, whose ranks are processes. It is short.
transport_program() {
    sed -n '/^## A transport of your own$/,$p' docs/many-ranks.md >"$work/transport.md"
    program_of "$work/transport.md" >"$work/transport.c"
    [ "$(wc -l <"$work/transport.c")" -le 60 ] || { wc -l "$work/transport.c"; return 1; }
    sed -i.bak '1i\
#define _DEFAULT_SOURCE
' "$work/transport.c"
    builds transport && "$work/transport" >"$work/transport.txt" || return 1
    awk 'NR == 1 { first = $2 }
        END { print NR " steps: " first " -> " $2; exit !(NR == 50 && first > 0.1 && $2 > 0 && $2 < first / 10) }' \
        "$work/transport.txt"
}

# links_of PAGE: the targets of all [text](target) outside code
links_of() {
    awk '/^```/ { code = !code; next } !code' "$1" | tr '\n' ' ' | grep -o ']([^)]*)' | sed 's/^](//; s/)$//'
}

# anchors_of PAGE: the link names of a page's headings
anchors_of() { grep '^#' "$1" | tr 'A-Z ' 'a-z-' | sed 's/^#*-//; s/[^a-z0-9_-]//g'; }

# check_link PAGE LINK: LINK is a file, a heading, or both
check_link() {
    case $2 in http://* | https://*) return ;; esac
    target=$(dirname "$1")/${2%%#*}
    [ -n "${2%%#*}" ] || target=$1
    [ -e "$target" ] || { echo "$1: $2 is not there"; return; }
    case $2 in *#*) anchors_of "$target" | grep -qx -e "${2#*#}" || echo "$1: $2: no such heading" ;; esac
}

links() {
    for page in README.md docs/*.md tests/README.md tests/bench/README.md; do
        links_of "$page" | while read -r link; do check_link "$page" "$link"; done
    done | fail_on_output
}

# README.md links to every chapter, and every chapter ends with commands to run.
chapters() {
    [ "$(wc -l <README.md)" -le 200 ] || { wc -l README.md; return 1; }
    for page in docs/*.md; do
        grep -q "($page)" README.md || echo "README.md has no link to $page"
        awk '/^## Run it/ { run = 1 } run && /^```sh/ { sh = 1 } END { exit !sh }' "$page" ||
            echo "$page does not end with 'Run it'"
    done | fail_on_output
}

check "the first program is the same in README.md and megatron.h, compiles and learns" first_program
check "the program of docs/own-weights.md computes the same on 1, 2 and 4 ranks" own_weights_program
check "the ring of docs/context.md computes the same as one rank on 1 to 4 ranks" context_program
check "the pipeline of docs/many-ranks.md computes the same on 1, 2 and 4 stages" pipeline_program
check "the program of docs/many-ranks.md with a transport of its own learns" transport_program
check "the program of docs/checking.md prints what the page says" checking_program
check "the program of docs/checking.md that compares values prints what the page says" comparing_program
check "the fragments of docs/checking.md work in its program" checking_fragments
check "docs/checking.md has the rules of the tables of operators" checking_rules
check "docs/checking.md has every function of mt_comm.h that communicates" checking_communication
# The page "step by step" at the head of megatron.h, with a blank for each line break.
steps() {
    awk '/^   Step by step/ { inside = 1 } /^   A transformer layer communicates/ { exit } inside' "${1:-megatron.h}"
}

# step_chapters [FILE]: a line HEADER|CHAPTER for each chapter that the page names
step_chapters() {
    steps "${1:-megatron.h}" | tr -s '\n ' '  ' | grep -oE '[a-z_]+\.(h|cuh), "[^"]*"' | sed 's/, "/|/; s/"$//'
}

# Each chapter that the page names is in its header, each function is declared, each page of docs/ exists.
step_by_step() {
    [ "$(steps | wc -l)" -le 60 ] || { echo "the page has $(steps | wc -l) lines"; return 1; }
    step_chapters "${1:-megatron.h}" | while IFS='|' read -r header chapter; do
        grep -q "^/\* ---- $chapter" "$header" || echo "$header has no chapter \"$chapter\""
    done >"$work/steps"
    for name in $(steps "${1:-megatron.h}" | grep -oE '\bmt_[a-z_]+\b' | sort -u); do
        grep -qE "^(MT_API .*)?[a-z_ ]*\*?$name\(|^\} $name;" mt_comm.h mt_kernels.cuh mt_parallel.h megatron.h ||
            case $name in mt_parallel | mt_kernels | mt_comm) ;; *) echo "$name is not declared" ;; esac
    done >>"$work/steps"
    for page in $(steps "${1:-megatron.h}" | grep -oE 'docs/[a-z-]+\.md'); do
        [ -f "$page" ] || echo "no $page"
    done >>"$work/steps"
    cat "$work/steps"
    [ "$(step_chapters "${1:-megatron.h}" | wc -l)" -ge 15 ] && [ ! -s "$work/steps" ]
}

# A chapter, a function and a page that do not exist are found.
step_by_step_finds() {
    sed 's/"process grid"/"process gird"/; s/mt_sync_gradients,/mt_synk_gradients,/; s|docs/planning.md|docs/plan.md|' \
        megatron.h >"$work/steps.h"
    step_by_step "$work/steps.h" && return 1
    [ "$(wc -l <"$work/steps")" -eq 3 ]
}

check "links lead to files and headings" links
check "README.md leads to every chapter, which ends with something to run" chapters
check "the steps at the head of megatron.h lead to chapters, functions and pages" step_by_step
check "one that leads to none is found" step_by_step_finds
closing_line
[ $failed -eq 0 ]
