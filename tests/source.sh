#!/bin/sh
# Checks that the headers are what tools/headers.sh writes from src/, what the scripts of tools/ say, and that each file
# of src/ compiles alone.
#
#   sh tests/source.sh         one line per check, closing line "N passed, N failed, N skipped"
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
headers='mt_comm.h mt_kernels.cuh mt_parallel.h megatron.h'

same_headers() { for header in $headers; do cmp "$header" "$copy/$header" || return 1; done; }

# A copy of what the scripts read, in $copy.
copy_project() {
    copy=$work/$1
    mkdir "$copy" || return 1
    # shellcheck disable=SC2086
    cp -r $headers src tools "$copy"
}

# refuses LINE...: headers.sh --check fails in the copy, and prints exactly these lines
refuses() {
    ! sh "$copy/tools/headers.sh" --check >"$work/said" 2>&1 || { echo "headers.sh --check succeeds"; return 1; }
    printf '%s\n' "$@" | diff - "$work/said"
}

# line_of TEXT FILE: the number of the only line of the file that contains the text
line_of() { grep -nF -e "$1" "$2" | sed 's/:.*//'; }

# ---- the headers -----------------------------------------------------------------------------------------------------

# same_with_awk COMMAND: the script's awk is the first one in PATH.
same_with_awk() {
    copy_project "$1" && rm "$copy"/*.h "$copy"/*.cuh && mkdir "$copy/bin" || return 1
    printf '#!/bin/sh\nexec %s "$@"\n' "$1" >"$copy/bin/awk" && chmod +x "$copy/bin/awk" || return 1
    PATH="$copy/bin:$PATH" sh "$copy/tools/headers.sh" && same_headers
}

# A line of a header is changed, one is lost, and one is new.
edited_header() {
    copy_project edited || return 1
    file=$copy/mt_kernels.cuh
    forward=$(line_of 'MT_API mt_status mt_bias_forward(mt_context *ctx, mt_tensor y, mt_tensor bias) {' "$file")
    backward=$(line_of 'MT_API mt_status mt_bias_backward(mt_context *ctx, mt_tensor dy, mt_tensor dbias) {' "$file")
    guard=$(line_of '#endif /* MT_KERNELS_CUH */' "$file")
    sed -e "${forward}s/\$/ \/* new *\//" -e "${backward}d" -e "${guard}a int new;" "$file" >"$copy/edited" &&
        mv "$copy/edited" "$file" || return 1
    say="is not what src/ gives: edit"
    then=", then run sh tools/headers.sh"
    set -- "$(line_of 'mt_status mt_bias_forward(mt_context *ctx, mt_tensor y, mt_tensor bias) {' src/ops/bias.c)" \
        "$(line_of 'mt_status mt_bias_backward(mt_context *ctx, mt_tensor dy, mt_tensor dbias) {' src/ops/bias.c)" \
        "$(line_of '#endif /* MT_KERNELS_CUH */' src/mt_kernels.cuh)"
    refuses "mt_kernels.cuh:$((guard + 1)): $say src/mt_kernels.cuh:$3$then" \
        "mt_kernels.cuh:$((forward + 1)): $say src/ops/bias.c:$1$then" \
        "mt_kernels.cuh:$backward: $say src/ops/bias.c:$2$then"
}

# After a file of src/ was edited, its header is stale until headers.sh has run, which changes this header alone.
edited_source() {
    copy_project stale || return 1
    echo "int new;" >>"$copy/src/parallel/grid.c"
    ! sh "$copy/tools/headers.sh" --check >"$work/said" 2>&1 || return 1
    grep "^mt_parallel.h:[0-9]*: is not what src/ gives: edit src/parallel/grid.c:[0-9]*, then" "$work/said" || return 1
    sh "$copy/tools/source_lines.sh" mt_parallel.h:1 2>&1 >/dev/null |
        grep "^mt_parallel.h: is not what src/ gives, so its lines may differ: run sh tools/headers.sh" || return 1
    [ "$(sh "$copy/tools/headers.sh")" = mt_parallel.h ] && [ -z "$(sh "$copy/tools/headers.sh")" ] || return 1
    grep -n '^int new;$' "$copy/mt_parallel.h" && sh "$copy/tools/headers.sh" --check
}

missing_source() {
    copy_project missing || return 1
    rm "$copy/src/ops/hash.c"
    at=$(line_of '"ops/hash.c"' src/mt_kernels.cuh)
    refuses "src/mt_kernels.cuh:$at: src/ops/hash.c cannot be read" && same_headers
}

# Nothing includes it, so it would be in no header.
unused_source() {
    copy_project unused || return 1
    echo "int unused;" >"$copy/src/ops/unused.c"
    refuses "src/ops/unused.c: no file of src/ includes it"
}

untitled_source() {
    copy_project untitled || return 1
    sed -i.bak 1d "$copy/src/ops/hash.c" && rm "$copy/src/ops/hash.c.bak" || return 1
    refuses "src/ops/hash.c:1: must be a heading: /* ---- TITLE ---- */" && same_headers
}

unknown_option() {
    copy_project option || return 1
    sh "$copy/tools/headers.sh" --chekc >"$work/said" 2>&1
    [ $? -eq 2 ] && grep -- --check "$work/said" && same_headers
}

# ---- the lines of src/ -----------------------------------------------------------------------------------------------

# A compiler's message about an error in src/ops/bias.c, in the header, names the line of src/.
compiler_message() {
    copy_project message || return 1
    echo 'static int wrong = nothing_of_this_name;' >>"$copy/src/ops/bias.c"
    sh "$copy/tools/headers.sh" && printf '#define MEGATRON_IMPLEMENTATION\n#include "megatron.h"\n' >"$copy/a.c"
    "$CC" -fsyntax-only "$copy/a.c" 2>&1 | sh "$copy/tools/source_lines.sh" >"$work/said"
    cat "$work/said"
    grep "^src/ops/bias.c:$(wc -l <"$copy/src/ops/bias.c"):.*nothing_of_this_name" "$work/said"
}

# Lines of headers are replaced wherever they are, in both notations; all else stays.
filtered() {
    from=$(line_of 'MT_API mt_status mt_gemm_prepare(mt_context *ctx) {' mt_kernels.cuh)
    to=src/ops/gemm.c:$(line_of 'MT_API mt_status mt_gemm_prepare(mt_context *ctx) {' src/ops/gemm.c)
    cat >"$work/in" <<END
In file included from /a/b/mt_kernels.cuh:$from,
mt_kernels.cuh($from): error: in mt_kernels.cuh:$from:7 and my_mt_kernels.cuh:$from
mt_kernels.cuh:99999999: mt_comm.h, megatron.h: and mt_other.h:$from; a\\tb %s
END
    sed -e "s|/a/b/mt_kernels.cuh:$from|$to|" -e "s|^mt_kernels.cuh($from|$(echo "$to" | sed 's/:/(/')|" \
        -e "s|in mt_kernels.cuh:$from|in $to|" "$work/in" >"$work/want"
    sh tools/source_lines.sh <"$work/in" | diff "$work/want" - &&
        [ "$(sh tools/source_lines.sh "mt_kernels.cuh:$from" mt_comm.h:1)" = "$(printf '%s\n' "$to" src/mt_comm.h:1)" ]
}

# Each line of the table says the same in the header and in src/, except for the lines that headers.sh writes: the first
# line, headings and blank lines.
lines_are_right() {
    sh tools/headers.sh --lines >"$work/lines" && awk -F '\t' '
        function text(at, part, line) {
            split(at, part, ":")
            if (!(part[1] in have)) {
                have[part[1]] = 1
                for (n = 1; (getline line < part[1]) > 0; n++) lines[part[1], n] = line
            }
            return lines[part[1], part[2]]
        }
        text($1) ~ "^/[*] (Generated|---- .* [(]src/[^ ]*[)] -)" || text($1) == "" { written++; next }
        text($1) != text($2) { print $0; bad = 1 }
        END { exit bad || NR - written < 10000 }' "$work/lines"
}

# ---- the files of src/ -----------------------------------------------------------------------------------------------

short_files() {
    find src -name '*.h' -o -name '*.c' -o -name '*.cuh' | sort | while read -r file; do
        lines=$(wc -l <"$file")
        [ "$lines" -le 1200 ] || echo "$file: $lines lines, more than 1200"
    done | fail_on_output
}

# The floors of src/, from the lowest. A file uses its own floor and those below.
# shellcheck disable=SC2016
floors=$(sed -n 's/^| `\([a-z]*\)\/` |.*/\1/p' src/README.md)

# Prints each #include in the folder $1 of a file on a floor above.
higher_includes() {
    below=''
    for floor in $floors; do
        below="$below $floor"
        for file in "$1/$floor"/*; do
            sed -n 's/^#include "\.\.\/\([a-z]*\)\/.*/\1/p' "$file" | while read -r used; do
                case " $below " in
                *" $used "*) ;;
                *) echo "$file: $floor/ is below $used/" ;;
                esac
            done
        done
    done
}

# Prints each line of the ground floor in the folder $1, without its comments, that names a function or a type that is
# declared above, or a group of the process grid: in code or in a string.
higher_names() {
    for floor in $floors; do
        [ "$floor" = comm ] || cat "$1/$floor"/*.h
    done | awk -v keep=1 -f tests/code_only.awk | grep -oE '(MT_API .*|struct |^\} )mt_[a-z0-9_]+ *[(;{]' |
        grep -oE 'mt_[a-z0-9_]+ *[(;{]$' | tr -d ' (;{' | sort -u >"$work/above"
    awk -v keep=1 -f tests/code_only.awk "$1"/comm/* | grep -nwF -f "$work/above"
    awk -v keep=1 -f tests/code_only.awk "$1"/comm/* | grep -nE '"(tensor|data|pipeline|model|embedding)"'
}

no_higher_floors() { { higher_includes src; higher_names src; } | fail_on_output; }

# In a copy, an #include, a call, a string and the name of a group are found, and a comment is not.
finds_higher_floors() {
    copy_project floors || return 1
    sed -i.bak 's/^#pragma once$/&\n#include "..\/parallel\/grid.c"/' "$copy/src/ops/bias.c" || return 1
    cat >>"$copy/src/comm/hash.c" <<'END'
/* mt_params_init
   mt_gemm */
static const char *bad1 = "call mt_params_zero_grad first"; // mt_gemm
static int bad2(const char *name) { return strcmp(name, "tensor") == 0; }
static mt_status bad3(mt_context *ctx) { return mt_bias_forward(ctx); }
static const mt_grid *bad4;
END
    { higher_includes "$copy/src"; higher_names "$copy/src"; } >"$work/found"
    cat "$work/found"
    [ "$(wc -l <"$work/found")" -eq 5 ] && grep "^$copy/src/ops/bias.c: ops/ is below parallel/$" "$work/found" &&
        grep -c 'bad[1-4]' "$work/found" | grep -x 4
}

# Prints each line of check mode in the folder $1 that decides by the name of an operand or of a call: it compares one
# with a string, or looks at a letter of it. What a tensor is follows from tables (MT_ARG_GRADIENT, for instance). A
# case of a rule and the name of a group mean something.
decides_by_names() {
    awk -v keep=1 -f tests/code_only.awk "$1"/check/* | grep -nE '(str[a-z]*cmp|strstr|strpbrk|memcmp) *\([^;]*"' |
        grep -vE '(cmp\(|->)(cases|(axis|comm)->name), "'
    awk -v keep=1 -f tests/code_only.awk "$1"/check/* |
        grep -nE "(name|by|where)\[[^]]*\] *[!=]=|\*[a-z_.>-]*(name|by|where) *[!=]="
    awk -v keep=1 -f tests/code_only.awk "$1"/comm/* | grep -nE 'str[a-z]* *\([^;]*x_name|x_name *\['
}

no_names() { decides_by_names src | fail_on_output; }

# In a copy, each way to do so is found, and a comment is not.
finds_names() {
    copy_project names || return 1
    cat >>"$copy/src/check/rules.c" <<'END'
/* strcmp(o->operand->name, "gathered") == 0, o->operand->name[0] == 'd' */
static int bad1(const mti_ruled *o) { return o->operand->name[0] == 'd'; }
static int bad2(const mti_ruled *o) { return *o->operand->name == 'd'; }
static int bad3(const mti_ruled *o) { return strcmp(o->operand->name, "gathered") == 0; }
static int bad4(const mti_ruled *o) { return o->known.by && strstr(o->known.by, "_backward") != NULL; }
static int good(const mti_axis *axis) { return strcmp(axis->name, "data") == 0; }
END
    echo "static int bad5(const char *x_name) { return x_name[0] == 'd'; }" >>"$copy/src/comm/conjugates.c"
    decides_by_names "$copy/src" >"$work/found"
    cat "$work/found"
    [ "$(wc -l <"$work/found")" -eq 5 ] && [ "$(grep -c 'bad[1-5]' "$work/found")" -eq 5 ]
}

# Prints each desc in the folder $1, and mt_batch, that has more than 14 fields. A struct in it counts as one.
long_descs() {
    for file in "$1"/*/*.h; do
        awk -f tests/code_only.awk "$file" | awk -v file="$file" '
            /^typedef struct mt_[a-z0-9_]+ \{/ { text = ""; inside = 1; next }
            inside && /^\} (mt_[a-z0-9_]+_desc|mt_batch);/ {
                gsub(/\([^()]*\)/, "", text)
                if (gsub(/[;,]/, "", text) > 14) { sub(/;.*/, "", $2); print file ": " $2 " has more than 14 fields" }
            }
            /^\}/ { inside = 0 }
            inside { text = text $0 }'
    done
}

short_descs() { long_descs src | fail_on_output; }

# In a copy, a desc with one field more than 14 is found, and one with 14 is not.
finds_long_descs() {
    copy_project descs || return 1
    cat >>"$copy/src/blocks/mlp.h" <<'END'
typedef struct mt_a_desc {
    int64_t a, b, c; /* d, e; f */
    int (*call)(int first, int second);
    mt_init_desc init;
    int i[2], j, k, l, m, n, o, p, q;
} mt_a_desc;
typedef struct mt_b_desc {
    int64_t a, b, c; /* d, e; f */
    int (*call)(int first, int second);
    mt_init_desc init;
    int i[2], j, k, l, m, n, o, p, q, r;
} mt_b_desc;
END
    [ "$(long_descs "$copy/src")" = "$copy/src/blocks/mlp.h: mt_b_desc has more than 14 fields" ]
}

# Prints each chapter for users in the headers in the folder $1 that stands behind one for authors.
late_chapters() {
    for header in $headers; do
        awk -v header="$header" '
            /^\/\* =+ the API ends here/ { exit }
            !/^\/\* ---- .* \(src\// { next }
            /for authors/ { authors = 1; next }
            authors { sub(/^\/\* ---- /, ""); sub(/ -* \*\/$/, ""); print header ": for users, behind authors: " $0 }' \
            "$1/$header"
    done
}

users_first() { late_chapters . | fail_on_output; }

# In a copy, a chapter for users that was moved to the end of its header is found.
finds_late_chapters() {
    copy_project chapters || return 1
    sed -i.bak -e '/"ops\/adamw.h"/d' -e 's/^#include "ops\/authors.h"$/&\n#include "ops\/adamw.h"/' \
        "$copy/src/mt_kernels.cuh" && sed -i.bak '/adamw.h/d' "$copy"/src/ops/*.h || return 1
    sh "$copy/tools/headers.sh" || return 1
    [ "$(late_chapters "$copy")" = "mt_kernels.cuh: for users, behind authors: optimizer (src/ops/adamw.h)" ]
}

# Prints the tables of operators that src/ops/tables.c does not have.
all_tables() {
    sed -n 's/^static const mti_table \(mti_[a-z_0-9]*\) = .*/\1/p' src/ops/*.c | grep -v _alone_table |
        while read -r table; do
            grep -q "&$table[,}]" src/ops/tables.c || echo "src/ops/tables.c does not have $table"
        done | fail_on_output
}

drawn() {
    sh tools/rooms.sh >"$work/picture" || return 1
    # shellcheck disable=SC2016
    sed -n '/^```rooms$/,/^```$/p' docs/architecture.md | sed '1d;$d' | diff - "$work/picture" ||
        { echo "sh tools/rooms.sh --write draws it"; return 1; }
}

# Compiles each .h and each .c file in a folder of src/ by itself.
alone() {
    for file in src/*/*.h src/*/*.c; do
        echo "#include \"$file\"" | "$CC" -Werror=implicit -I. -fsyntax-only -x c - && continue
        echo "$file does not compile alone"
        return 1
    done
}

# src/ is a library as well: a program may include src/megatron.h instead of the header that is generated from it.
from_src() {
    "$CC" -Wall -Wextra -Werror -I. -fsyntax-only -x c - <<'END'
#define MEGATRON_IMPLEMENTATION
#include "src/megatron.h"
END
}

check "the headers are what src/ gives" sh tools/headers.sh --check
for awk in mawk gawk original-awk 'gawk --posix' 'busybox awk'; do
    if have_command "${awk%% *}"; then check "the same with $awk" same_with_awk "$awk"; fi
done
check "an edited header: the place in src/ is named" edited_header
check "an edited file of src/: its header is stale, and no other is written" edited_source
check "a file that is not there is named, and nothing is written" missing_source
check "a file that no other includes is named" unused_source
check "a file without a heading is named" untitled_source
check "an unknown option has status 2" unknown_option
check "a compiler's message names the line of src/" compiler_message
check "source_lines.sh replaces lines of headers, and nothing else" filtered
check "the table of lines is right" lines_are_right
check "no file of src/ is longer than 1200 lines" short_files
check "a file uses no floor above its own, and the ground floor names nothing above" no_higher_floors
check "a file that does is found" finds_higher_floors
check "check mode does not decide by the names of operands and calls" no_names
check "code that does is found" finds_names
check "no desc has more than 14 fields, nor has mt_batch" short_descs
check "a desc that has more is found" finds_long_descs
check "in each header, no chapter for users stands behind one for authors" users_first
check "a chapter that does is found" finds_late_chapters
check "src/ops/tables.c has the table of every operator" all_tables
check "the picture of docs/architecture.md is that of src/" drawn
check "each file of src/ compiles alone" alone
check "a program can include src/megatron.h" from_src
closing_line
[ $failed -eq 0 ]
