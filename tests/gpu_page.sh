#!/bin/sh
# Writes what tests/gpu.sh found, from the folder of its state: OUT/page.md, OUT/results.csv, OUT/logs.tar.gz.
#
#   sh tests/gpu_page.sh STATE OUT [BYTES]        BYTES: logs.tar.gz has no more (16000000)
#
# STATE has a folder for each stage. In it the file items names what the stage runs, one a line. Each NAME that has run
# has NAME.result with a line "VERDICT|SECONDS|DETAIL" and NAME.log; an item of the benchmark has its rows in NAME.csv.
# NAME.gpu has the state of the GPU before and after it. test/PROGRAM/ and nccl/PROGRAM/ have the same files of the
# cases that ran alone, and PROGRAM.names beside it the names of all cases. STAGE/asked says why what was asked for has
# not run.
set -u
cd "$(dirname "$0")/.." || exit 1
LC_ALL=C
export LC_ALL
mkdir -p "$2" || exit 1
state=$1 out=$(cd "$2" && pwd) most_packed=${3:-16000000}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
predictions=tests/bench/predictions.csv

result() { cat "$state/$1.result" 2>/dev/null; }
first() { echo "${1%%|*}"; }
detail() { echo "$1" | sed 's/^[^|]*|[^|]*|//'; }

# The most telling lines of a log: those with an error; without one, the last lines that are not the harness's.
errors_of() {
    grep -v '^\[' "$1" 2>/dev/null | grep -v '^ *$' >"$work/lines"
    grep -n -i -B 1 'error\|fatal\|invalid\|hazard\|undefined\|failed\|cannot' "$work/lines" | head -n 6 \
        | sed 's/^[0-9]*[:-]//' >"$work/telling"
    [ -s "$work/telling" ] || tail -n 6 "$work/lines" >"$work/telling"
    sed -e '/^--$/d' -e 's/^\(.\{160\}\).*/\1 .../' -e 's/^/        /' "$work/telling"
}

# ---- verdicts --------------------------------------------------------------------------------------------------------

# cases_of STAGE PROGRAM: adds the cases that ran alone, and returns in said how they ended
cases_of() {
    bad=0 good=0 unrun=0 alone=0
    : >"$work/bad"
    while read -r name; do
        grep -q "^\[ *\(OK\|SKIPPED\) \] $name\( .*\)\{0,1\}$" "$state/$1/$2.log" && continue
        one=$(result "$1/$2/$name")
        case $one in
        '') unrun=$((unrun + 1)) ;;
        passed* | skipped*) good=$((good + 1)) ;;
        *) bad=$((bad + 1)); echo "$name" >>"$work/bad" ;;
        esac
        took=${one#*|}
        alone=$((alone + ${took%%|*} + 0))
    done <"$state/$1/$2.names"
}

# Seconds that the program needed for the cases that it completed.
printed() { awk '/^\[.* s\)$/ { sub(/^.*\(/, ""); sum += $1 } END { print int(sum) }' "$state/$1/$2.log"; }

# judge_test STAGE PROGRAM: the verdict of a program from its run as a whole and from its cases alone. A program that
# was killed although all of its cases pass alone passes when the cases together need as long as the time limit.
judge_test() {
    whole=$(result "$1/$2") verdict=$(first "$whole") said=$(detail "$whole")
    : >"$work/bad"
    case $verdict in passed | skipped | '') return ;; esac
    [ -s "$state/$1/$2.names" ] || return
    cases_of "$1" "$2"
    if [ $bad -gt 0 ]; then
        said="$said; cases that fail alone: $bad"
    elif [ $unrun -gt 0 ]; then
        :
    elif [ "$verdict" = hung ] && [ $(($(printed "$1" "$2") + alone)) -ge "$(echo "$said" | tr -cd 0-9)" ]; then
        verdict=passed said="case by case: as a whole it takes longer than the limit"
        return
    else
        said="$said; alone, all cases pass"
    fi
    [ $unrun -eq 0 ] || said="$said; $unrun cases have not run alone: $(cat "$state/$1/asked")"
}

count() {
    case $1 in
    passed) passed=$((passed + 1)) ;;
    skipped | '') skipped=$((skipped + 1)) ;;
    *) failed=$((failed + 1)) ;;
    esac
}

# Adds an item that has failed, with the errors in its log, to the list of failures.
add_failure() {
    echo "- $1: $2"
    errors_of "$3"
} >>"$work/failures"

# add_test STAGE PROGRAM
add_test() {
    judge_test "$1" "$2"
    ok=$(grep -c '^\[       OK \]' "$state/$1/$2.log" 2>/dev/null)
    : "${ok:=0}"
    [ "$verdict" != passed ] || [ -n "$said" ] || said="$ok cases"
    case $verdict in
    failed | hung | crashed)
        if [ -s "$work/bad" ]; then
            echo "- $1 $2: $verdict, $said" >>"$work/failures"
            while read -r name; do
                one=$(result "$1/$2/$name")
                add_failure "$2, $name: $(first "$one")" "$(detail "$one")" "$state/$1/$2/$name.log"
            done <"$work/bad"
        else
            add_failure "$1 $2" "$verdict, $said" "$state/$1/$2.log"
        fi
        ;;
    esac
}

# Prints the table of a stage, counts its verdicts, and adds what has failed and what has not run to the lists. Of a
# stage that no command has named, only what has run.
stage_table() {
    asked=$(cat "$state/$1/asked" 2>/dev/null)
    [ -n "$asked" ] || echo "- $1: not asked for" >>"$work/not_run"
    [ -n "$asked" ] || ls "$state/$1"/*.result >/dev/null 2>&1 || return
    [ -s "$state/$1/items" ] || { echo "- $1: its items are not known; $asked" >>"$work/not_run"; return; }
    printf '\n## %s\n\n| | verdict | s | |\n|---|---|---|---|\n' "$2"
    while read -r item; do
        all=$(result "$1/$item") verdict=$(first "$(result "$1/$item")") said=$(detail "$all")
        seconds=${all#*|} seconds=${seconds%%|*}
        [ "$item" != list ] || [ "$verdict" != passed ] || continue # a list is no result
        [ -n "$verdict$asked" ] || continue
        case $1:$item:$verdict in
        nccl:version:passed) said=$(tail -n 1 "$state/nccl/version.log") ;;
        nccl:version:failed) add_failure "$1 $item" "$verdict, $said" "$state/$1/$item.log" ;;
        test:* | nccl:*) add_test "$1" "$item" ;;
        *:failed | *:hung | *:crashed) add_failure "$1 $item" "$verdict, $said" "$state/$1/$item.log" ;;
        esac
        if [ -z "$verdict" ]; then
            said="not run: $asked"
            echo "- $1 $item: $said" >>"$work/not_run"
        fi
        count "$verdict"
        echo "| $item | ${verdict:-not run} | $seconds | $said |"
    done <"$state/$1/items"
}

# ---- benchmarks ------------------------------------------------------------------------------------------------------

# rows STAGE...: those of the items that the stages have
rows() {
    for each in "$@"; do
        while read -r item; do
            [ "$item" = list ] || cat "$state/$each/$item.csv" 2>/dev/null
        done <"$state/$each/items"
    done 2>/dev/null | grep '^[A-Za-z0-9_.-]*,"'
}

# Joins the rows of the benchmark with the predictions and the peer's rows of the same item and name.
kernel_table() {
    grep '^[A-Za-z0-9_.-]*,"' "$predictions" >"$work/predictions" 2>/dev/null
    awk -f tests/gpu_kernels.awk part=predictions "$work/predictions" part=peers "$work/peers" part=ours "$work/ours"
}

kernels() {
    rows limits bench rest >"$work/ours"
    rows peers rest-peers >"$work/peers"
    { echo "item,name,median,min,max,unit,us,ratio,versus"; cat "$work/ours" "$work/peers"; } >"$out/results.csv"
    cat <<END

## Kernels

Of limit: the fraction of the limit that the benchmark has for the row. Predicted: the range of this fraction in
$predictions; better and worse are more than 10 % outside. Peer/ours: the time of the fastest peer
over that of the library.

END
    echo "| item | name | us | measured | limit | of limit | predicted | verdict | peer us | peer/ours |"
    echo "|---|---|---|---|---|---|---|---|---|---|"
    kernel_table
    cat /dev/null "$state"/bench/*.log "$state"/rest/*.log "$state"/*peers/*.log 2>/dev/null |
        sed -n 's/^# \(.*: not measured: .*\)/Not measured: \1/p'
}

# The times of attention beside those with the other order of blocks.
orders() {
    rows bench | grep '^attention,' >"$work/usual"
    rows order >"$work/other"
    [ -s "$work/other" ] && [ -s "$work/usual" ] || return 0
    printf '\n## Order of the blocks of attention\n\nHead by head, over sections of heads, the library'"'"'s order.\n\n'
    echo "| name | us | head by head, us | ratio |"
    echo "|---|---|---|---|"
    sed 's/"\([^"]*\)"/\n\1\n/' "$work/usual" "$work/other" | awk '
        NR % 3 == 2 { name = $0 }
        NR % 3 == 0 {
            split($0, field, ","); us = field[6]
            if (name in usual && usual[name] > 0)
                printf "| %s | %.1f | %.1f | %.2f |\n", name, usual[name], us, us / usual[name]
            else usual[name] = us
        }'
}

# What ncu says of each kernel, in short.
profiles() {
    grep -q 'Compute (SM) Throughput' "$state/profile/attention.log" 2>/dev/null || return 0
    printf '\n## Under ncu\n\n'
    echo "| kernel | time | of compute | of memory | registers | occupancy |"
    echo "|---|---|---|---|---|---|"
    awk 'function end() { if (kernel != "") printf "| %s | %s | %s %% | %s %% | %s | %s %% |\n", kernel, us, sm, memory,
             registers, occupancy; kernel = us = sm = memory = registers = occupancy = "" }
        /^  [A-Za-z_].*\(.*Context/ { end(); kernel = $0; sub(/^ */, "", kernel); sub(/\(.*/, "", kernel) }
        /^ *Duration / { us = $NF " " $(NF - 1) }
        /Compute \(SM\) Throughput/ { sm = $NF } /^ *Memory Throughput +%/ { memory = $NF }
        /Registers Per Thread/ { registers = $NF } /Achieved Occupancy/ { occupancy = $NF }
        END { end() }' "$state/profile/attention.log"
}

# The range of each reading of the GPU during benchmarks, and the items during which something slowed it down.
clocks() {
    ls "$state"/*/*.gpu >/dev/null 2>&1 || { echo "GPU during benchmarks: no readings by nvidia-smi"; return; }
    awk -F', *' '
        { name = FILENAME; sub(/^.*\//, "", name); sub(/\.gpu$/, "", name) }
        { for (i = 2; i <= 5; i++) if ($i ~ /^[0-9.]+$/) {
            if (!(i in low) || $i + 0 < low[i]) low[i] = $i + 0
            if (!(i in high) || $i + 0 > high[i]) high[i] = $i + 0 } }
        $1 == "after" && ($6 == "Active" || $7 == "Active" || $8 == "Active") {
            slow = slow (slow == "" ? "" : ", ") name ($6 == "Active" ? " (power cap)" : "") \
                ($7 == "Active" ? " (hardware slowdown)" : "") ($8 == "Active" ? " (thermal)" : "")
        }
        END {
            printf "GPU during benchmarks: SM clock %s to %s MHz, ", low[2], high[2]
            printf "memory clock %s to %s MHz, ", low[3], high[3]
            printf "%s to %s degrees C, %s to %s W; slowed down after: %s\n", low[4], high[4], low[5], high[5],
                slow == "" ? "none" : slow
        }' "$state"/*/*.gpu
}

# ---- the page --------------------------------------------------------------------------------------------------------

# cut_long FOLDER MOST: cuts files of more than MOST bytes in the middle
cut_long() {
    find "$1" -type f -size +$(($2 / 512)) | while read -r file; do
        { head -c $(($2 / 2)) "$file"
            printf '\n... cut: %d bytes in all ...\n' "$(wc -c <"$file")"
            tail -c $(($2 / 2)) "$file"; } >"$work/cut"
        mv "$work/cut" "$file"
    done
}

# Packs the folder $work/logs. Fails when that takes too many bytes.
pack() {
    tar -C "$work" -czf "$work/logs.tar.gz" logs && [ "$(wc -c <"$work/logs.tar.gz")" -le "$most_packed" ] &&
        mv "$work/logs.tar.gz" "$out/logs.tar.gz"
}

# Packs the state, with long logs cut. When that is too much even with short logs, packs only the page, the results, and
# up to 1000 logs of what has failed.
pack_logs() {
    for most in 262144 65536 16384 4096; do
        rm -rf "$work/logs"
        cp -R "$state" "$work/logs" || return 1
        cut_long "$work/logs" $most
        ! pack || return 0
    done
    rm -rf "$work/logs"
    mkdir "$work/logs"
    cp "$out/page.md" "$work/logs"
    (cd "$state" && find . -name '*.result' && find . -name '*.result' -exec grep -L '^passed\|^skipped' {} + |
        head -n 1000 | sed 's/result$/log/') | tar -C "$state" -cf - -T - 2>/dev/null | tar -C "$work/logs" -xf -
    cut_long "$work/logs" 4096
    pack
}

passed=0 failed=0 skipped=0
: >"$work/failures"
: >"$work/not_run"
{
    stage_table build Builds
    stage_table test Tests
    stage_table nccl "Several ranks on this GPU, over NCCL"
    stage_table sanitize compute-sanitizer
    stage_table limits "Limits of the GPU"
    stage_table bench "Items of the benchmark"
    stage_table order "Attention in another order of blocks"
    stage_table profile "Attention under ncu"
    stage_table peers "PyTorch on the same GPU"
    stage_table rest "Other items of the benchmark"
    stage_table rest-peers "Other items in PyTorch"
} >"$work/tables"
{
    echo "# megatron.h on a GPU"
    echo
    date -u '+Written %Y-%m-%d %H:%M:%S UTC.'
    echo
    sed 's/^/- /' "$state/machine" 2>/dev/null
    cat /dev/null "$state"/*peers/*.log 2>/dev/null | sed -n 's/^# \(PyTorch .*\)/- peer: \1/p' | sort -u
    echo "- $(clocks)"
    printf '\n## Failures\n\n'
    if [ -s "$work/failures" ]; then cat "$work/failures"; else echo "None."; fi
    cat "$work/tables"
    kernels
    orders
    profiles
    printf '\n## Not run\n\n'
    if [ -s "$work/not_run" ]; then cat "$work/not_run"; else echo "Nothing."; fi
    echo
    echo "$passed passed, $failed failed, $skipped skipped"
} >"$work/page" || exit 1
cp "$work/page" "$out/page.md" || exit 1
rm -f "$out/logs.tar.gz"
pack_logs || echo "the logs were not packed" >&2
