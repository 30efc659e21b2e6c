#!/bin/sh
# Draws the floors of src/ and the rooms on each, for docs/architecture.md: from the highest floor to the lowest, with
# the header that each floor becomes a part of. A room is a file, or the files of one name.
#
#   sh tools/rooms.sh              prints the picture
#   sh tools/rooms.sh --write      puts it into docs/architecture.md
#
# The order of the floors is that of the table in src/README.md.
set -u
cd "$(dirname "$0")/.." || exit 1

picture() {
    # shellcheck disable=SC2016
    floors=$(sed -n 's/^| `\([a-z]*\)\/` |.*/\1/p' src/README.md)
    for floor in $floors; do
        header=$(grep -l "^#include \"$floor/" src/megatron.h src/mt_*.h src/mt_kernels.cuh | head -n 1)
        for file in src/"$floor"/*; do
            room=${file##*/}
            echo "${header#src/} $floor ${room%.*}"
        done
    done | awk '
        function end_line() { if (text != "") lines[++count] = sprintf("%-14s  %-9s  %s", from, name, text) }
        function end_floor(i) {
            for (i = 1; i <= rooms; i++) {
                if (length(text list[i]) > 90) { end_line(); from = name = text = "" }
                text = text (text == "" ? "" : "  ") list[i]
            }
            end_line()
            first[++floors] = last + 1; last = count; ends[floors] = count
            text = ""; rooms = 0
        }
        $2 != floor { if (floor) end_floor(); floor = $2; from = $1; name = $2 "/"; split("", seen) }
        !($3 in seen) { seen[$3]; list[++rooms] = $3 }
        END { end_floor(); for (f = floors; f; f--) for (i = first[f]; i <= ends[f]; i++) print lines[i] }'
}

case ${1-} in
'') picture ;;
--write)
    trap 'rm -f docs/picture.tmp docs/architecture.tmp' EXIT
    trap 'exit 1' HUP INT TERM
    picture >docs/picture.tmp || exit 1
    awk '
        /^```/ && inside { inside = 0 }
        !inside { print }
        /^```rooms$/ { inside = 1; while ((getline line < "docs/picture.tmp") > 0) print line }' \
        docs/architecture.md >docs/architecture.tmp && cat docs/architecture.tmp >docs/architecture.md
    ;;
*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' tools/rooms.sh >&2; exit 2 ;;
esac
