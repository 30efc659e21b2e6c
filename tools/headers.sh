#!/bin/sh
# Writes the four headers from src/: puts each file in the place of the #include that names it first.
#
#   sh tools/headers.sh             writes the headers that have changed, and prints their names
#   sh tools/headers.sh --check     writes nothing; when a header is not what src/ gives, says where to edit src/
#   sh tools/headers.sh --lines     prints a table: each line of a header, a tab, the line of src/ that it comes from
#
# Needs a POSIX shell and awk.
set -u
cd "$(dirname "$0")/.." || exit 1
headers='mt_comm.h mt_kernels.cuh mt_parallel.h megatron.h'

case ${1-} in
'' | --check | --lines) ;;
*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' tools/headers.sh >&2; exit 2 ;;
esac

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# Writes the headers to the folder $work, and the table of lines to $work/lines.
generate() {
    # shellcheck disable=SC2086
    awk -v work="$work" '
    function fail(text) { print text > "/dev/stderr"; failed = 1; exit 1 }

    # "ops/../comm/hash.c" becomes "comm/hash.c"
    function simple(path) {
        while (sub(/[^\/.]+\/\.\.\//, "", path)) {}
        return path
    }

    # A blank line after a blank line is left out.
    function put(line, path, number) {
        if (line == "" && blank) return
        blank = line == ""
        print line > (work "/" header)
        print header ":" ++written "\t" path ":" number > (work "/lines")
    }

    # Puts the text of a file into the header. The four headers include each other, so these lines stay.
    function put_file(path, from, folder, line, number, name, status) {
        folder = path
        sub(/[^\/]*$/, "", folder)
        while ((status = (getline line < path)) > 0) {
            number++
            if (line == "#pragma once") continue
            name = line
            if (!sub(/^#include "/, "", name)) { put(line, path, number); continue }
            sub(/".*/, "", name)
            if (name in is_header) { put(line, path, number); continue }
            name = simple(folder name)
            if (name in taken) continue
            taken[name] = path
            put("", path, number)
            put_file(name, path ":" number)
            put("", path, number)
        }
        if (status < 0) fail(from ": " path " cannot be read")
        if (number == 0) fail(from ": " path " is empty")
        close(path)
    }

    BEGIN {
        for (i = 1; i < ARGC; i++) is_header[ARGV[i]] = 1
        for (i = 1; i < ARGC; i++) {
            header = ARGV[i]
            written = blank = 0
            put_file("src/" header, "tools/headers.sh")
        }
        for (path in taken) print path > (work "/taken")
    }
    ' $headers
}

# Every file of src/ is in a header.
# shellcheck disable=SC2086
all_taken() {
    find src -name '*.h' -o -name '*.c' -o -name '*.cuh' | sort >"$work/files"
    { cat "$work/taken"; printf 'src/%s\n' $headers; } | sort | comm -13 - "$work/files" >"$work/left"
    [ ! -s "$work/left" ] || { sed 's|$|: no file of src/ includes it|' "$work/left" >&2; return 1; }
}

# different HEADER: says where it differs from what src/ gives, at most 10 times.
different() {
    diff "$1" "$work/$1" | awk -v header="$1" -v lines="$work/lines" '
        /^[0-9]/ && count++ < 10 {
            split($0, side, /[acd]/)
            split(side[1], at, ","); split(side[2], to, ",")
            want[header ":" to[1]] = 1; order[count] = header ":" to[1]; here[count] = header ":" at[1]
        }
        END {
            while ((getline < lines) > 0) if ($1 in want) source[$1] = $2
            for (i = 1; i in order; i++)
                print here[i] ": is not what src/ gives: edit " source[order[i]] ", then run sh tools/headers.sh"
        }'
}

generate && all_taken || exit 1
if [ "${1-}" = --lines ]; then cat "$work/lines"; exit; fi
status=0
for header in $headers; do
    cmp -s "$work/$header" "$header" && continue
    if [ "${1-}" = --check ]; then different "$header"; status=1; continue; fi
    cat "$work/$header" >"$header" || exit 1
    echo "$header"
done
exit $status
