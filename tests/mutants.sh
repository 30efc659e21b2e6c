#!/bin/sh
# Tests check mode with mutants: wrong programs, made of right ones by leaving out, doubling or exchanging a call, by
# flipping a flag, or by moving a statement. Each mutant runs on 4 ranks that compute, and on the meta device: first one
# rank, which knows the rules, then 4 ranks, which compare their calls. One that computes other losses or gradients than
# the right program must be refused on the meta device, with the right call named. What that accepts runs once more on 4
# ranks that compute, in check mode 2, which compares values. One that computes the same must be accepted every time.
#
#   sh tests/mutants.sh [-v] [PROGRAM...]    -v: a line for each mutant; PROGRAM: one of the list below
#
# There are two kinds, which are counted apart: in "call" a call, a flag or a statement is wrong; in "value" the calls
# fit together, and a value, a range or a number is wrong (the lists mutants/values*.txt; those of gptj and llama_sp
# were written after the checks that find such mistakes). A mutant of the second kind may be refused by check mode 2
# alone.
#
# The rules that make mutants are in mutants/mutate.pl, those made by hand in mutants/PROGRAM.txt. mutants/known.txt
# lists the mutants that are not found on the meta device, with the reason. The sources are programs in mutants/, the
# examples (an MLP, a block, the training steps of train_gpt), and parts of the library. Those of the sync and of the
# optimizer are not among them: check mode takes what they do as given, and does not find mistakes inside.
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/report.sh
. tests/report.sh
work=$(mktemp -d) || exit 1
check_log=$work/check.log
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
CC=${CC:-cc}
verbose=0 least=100 percent=98
[ "${1:-}" = -v ] && verbose=1 && shift
[ $# -eq 0 ] || least=1 percent=90
[ $# -gt 0 ] ||
    set -- gptj llama_sp pipeline context bert_block encoder_decoder mlp custom_block train library cross values

sources() {
    case $1 in
    mlp) echo examples/01_mlp.c ;;
    custom_block) echo examples/02_custom_block.c ;;
    train) echo examples/train.h examples/train_gpt.c ;;
    cross) echo tests/mutants/cross.c megatron.h:cross ;;
    library)
        echo mt_parallel.h:linear,linear_tensors,norm,vocab
        echo megatron.h:mlp,attention_layers,attention_core,attention,layer,model,gpt,bert
        ;;
    *) echo "tests/mutants/$1.c" ;;
    esac
}

lists() {
    case $1 in
    gptj | llama_sp | context) echo "tests/mutants/$1.txt tests/mutants/values_$1.txt" ;;
    *) echo "tests/mutants/$1.txt" ;;
    esac
}

# Makes the mutants of a program and runs them. Each line of results has: place, number and variant, what the mutant
# does (same, other, changes, fails), how it is taken (accepted, refused, unclear; -: it did not run) by one rank on the
# meta device, by 4 ranks there, and by check mode 2 on 4 ranks that compute, the distances of losses and of gradients,
# milliseconds on the meta device, title, message, kind, a message of any rank that is not one sentence (see
# mt_test_message.h) with what is wrong with it.
# shellcheck disable=SC2046  # lists of files
run_program() {
    mkdir "$work/$1" || return 1
    perl tests/mutants/mutate.pl "$work/$1" $(sources "$1") -- $(lists "$1") || return 1
    [ -f "$work/$1/$1.c" ] || cp "tests/mutants/$1.c" "$work/$1" || return 1
    "$CC" -O1 -w -I"$work/$1" -Itests/mutants -Iexamples -I. "$work/$1/$1.c" -o "$work/$1/$1" -lm -lpthread || return 1
    "$work/$1/$1" >"$work/$1/results" || { cat "$work/$1/results"; return 1; }
}

# Prints what is wrong: mutants that change something and are not refused, or not with the right call, unless they are
# known; mutants that change nothing and are refused; known ones that are found. A mutant that fails without check mode,
# too, must be refused in some way.
judge() {
    awk -F '\t' -v least="$least" -v percent="$percent" '
        function is_found(how) { return how == "refused" || ($3 == "fails" && how == "unclear") }
        FNR == NR { if ($0 !~ /^(#|$)/) known[$1 "\t" $2] = $3; next }
        {
            if ($13 != "") { print "not one sentence, " $13; bad = 1 }
            split($2, number, ".")
            m = $1 "\t" $10 "\t" number[1]
            key[m] = $1 "\t" $10
            seen[key[m]] = 1
            kind_of[m] = $12
            if ($3 == "changes" && $12 == "call") silent[m] = 1
            if ($3 == "same" && ($4 != "accepted" || $5 != "accepted" || $6 != "accepted")) alarm[m] = $0
            if ($9 > ms) ms = $9
            if ($3 != "changes" && $3 != "fails") next
            if ($12 == "value" && $3 == "changes") {
                value[m] = 1
                if ($4 == "accepted") value_alone[m] = 1
                if ($4 == "accepted" && $5 == "accepted") value_meta[m] = 1
                if ($4 == "accepted" && $5 == "accepted" && $6 == "accepted") value_lost[m] = $0
            }
            if ($12 == "value") next
            wrong[m] = 1
            if (is_found($4)) next
            hidden[m] = 1
            if (is_found($5)) next
            missed[m] = $0
            if (!is_found($6)) lost[m] = $0
        }
        END {
            for (m in value) {
                values++
                values_alone += !(m in value_alone)
                values_meta += !(m in value_meta)
                values_found += !(m in value_lost)
            }
            for (m in value_lost) {
                is_missed[key[m]] = 1
                if (known[key[m]] == "") { print "not found: " value_lost[m]; bad = 1 }
            }
            for (m in key) all += kind_of[m] == "call"
            for (m in wrong) {
                n++
                alone += !(m in hidden)
                found += !(m in missed)
                compared += !(m in lost)
                scales += m in missed && known[key[m]] == "other"
            }
            for (m in silent) { changes++; spoken += !(m in missed) }
            for (m in missed) {
                kind = known[key[m]]
                is_missed[key[m]] = 1
                if (kind == "") { print "not found: " missed[m]; bad = 1 }
                if (kind == "value" && (m in lost)) { print "not found by check = 2: " missed[m]; bad = 1 }
            }
            for (m in alarm) { print "refused, but right: " alarm[m]; bad = 1 }
            for (k in known)
                if (known[k] != "" && (k in seen) && !(k in is_missed)) { print "known, but found: " k; bad = 1 }
            printf "%d mutants: %d compute something else, %d fail in a run without check mode, too\n", all, changes,
                n - changes
            printf "%d of these %d are refused on the meta device (%.1f %%), in at most %.0f ms", found, n,
                n ? 100 * found / n : 0, ms
            printf "; %d by one rank alone\n", alone
            printf "of the %d that compute something else, %d are refused there (%.1f %%)\n", changes, spoken,
                changes ? 100 * spoken / changes : 0
            printf "%d are refused there or by comparing values (%.1f %%)\n", compared, n ? 100 * compared / n : 0
            printf "%d of those that are not are mistakes of other kinds than check mode is for;", scales
            printf " of the rest, %.1f %% are refused on the meta device\n",
                (n > scales ? 100 * found / (n - scales) : 0)
            if (values) {
                printf "%d mutants with wrong values: %d are refused by one rank alone, %d on the meta device,", values,
                    values_alone, values_meta
                printf " %d there or with check = 2 (%.1f %%)\n", values_found, 100 * values_found / values
                if (least > 1 && values_found < values * 0.92) { print "too few with wrong values"; bad = 1 }
            }
            if (n < least || found < n * percent / 100) { print "too few"; bad = 1 }
            exit bad
        }' tests/mutants/known.txt "$@"
}

# The figures that judge has printed are those of docs/checking.md.
figures_agree() {
    awk -F '[^0-9.]+' '
        / mutants: / { all = $1; silent = $2; wrong = $2 + $3 }
        / are refused on the meta device \(.* by one rank alone$/ { found = $1 " (" $3 " %)"; alone = $(NF - 1) }
        /^of the .* something else/ { spoken = $3 " (" $4 " %)" }
        / with wrong values: / { values = $1; value_alone = $2; value_meta = $3; value_found = $4 " (" $6 " %)" }
        END {
            print "| of " values " wrong programs with a wrong value | |"
            of = "| of these " values ", refused "
            print of "on the meta device by one rank alone | " value_alone " |"
            print of "on the meta device by 4 ranks, which compare their calls | " value_meta " |"
            print of "there, or with `check = 2` on 4 ranks that compute | " value_found " |"
            print "| of " all " wrong programs | |"
            print "or a run ends with an error | " wrong " |"
            print "refused on the meta device by one rank alone, in milliseconds | " alone " ("
            print "by 4 ranks, which compare their calls, in milliseconds | " found " |"
            print "of the " silent " of them that run without an error, refused there | " spoken " |"
        }' "$figures" >"$work/rows"
    cat "$figures" "$work/rows"
    while read -r row; do
        grep -qF "$row" docs/checking.md || { echo "not in docs/checking.md: $row"; return 1; }
    done <"$work/rows"
}

whole=0 figures=$work/figures results=
[ "$least" -eq 1 ] || whole=1
for program in "$@"; do
    check "mutants of $program" run_program "$program"
    results="$results $work/$program/results"
done
# shellcheck disable=SC2086  # a list of files
[ $verbose -eq 0 ] || cat $results
# shellcheck disable=SC2086
check "wrong programs are refused, right ones are not" judge $results
cp "$check_log" "$figures"
[ "$outcome" = FAIL ] || sed 's/^/        /' "$check_log"
[ $whole -eq 0 ] || check "docs/checking.md has these figures" figures_agree
closing_line
[ "$failed" -eq 0 ]
