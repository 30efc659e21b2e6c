#!/bin/sh
# Says which line of src/ a line of a header comes from.
#
#   cc ... 2>&1 | sh tools/source_lines.sh           copies its input with names and numbers of lines in src/
#   sh tools/source_lines.sh mt_comm.h:1234 ...      prints the line of src/ for each argument
#
# In the input, "mt_comm.h:1234" and "mt_comm.h(1234)" are lines of a header, with or without a folder in front.
set -u
tools=$(cd "$(dirname "$0")" && pwd) || exit 1

lines=$(mktemp) || exit 1
trap 'rm -f "$lines"' EXIT
trap 'exit 1' HUP INT TERM
sh "$tools/headers.sh" --lines >"$lines" || exit 1

if [ $# -gt 0 ]; then printf '%s\n' "$@"; else cat; fi | awk -v lines="$lines" '
    BEGIN { while ((getline line < lines) > 0) { split(line, pair, "\t"); source[pair[1]] = pair[2] } }

    # A compiler names a line in one of two ways: "folder/mt_comm.h:12" and "folder/mt_comm.h(12)".
    {
        rest = $0
        text = ""
        while (match(rest, /[^ \t(,:]*(mt_comm\.h|mt_parallel\.h|megatron\.h|mt_kernels\.cuh)[:(][0-9]+/)) {
            found = substr(rest, RSTART, RLENGTH)
            key = found
            sub(/.*\//, "", key)
            closing = sub(/\(/, ":", key)
            if (key in source) {
                at = source[key]
                if (closing) sub(/:/, "(", at)
            } else at = found
            text = text substr(rest, 1, RSTART - 1) at
            rest = substr(rest, RSTART + RLENGTH)
        }
        print text rest
    }'
