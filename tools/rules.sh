#!/bin/sh
# Writes the table of the rules of all operators, for docs/checking.md, from the tables of the operators.
#
#   sh tools/rules.sh              prints the table
#   sh tools/rules.sh --write      puts it into docs/checking.md, between the lines <!-- rules --> and <!-- end -->
#
# CC is the compiler of tools/rules.c, which prints the table: cc by default.
set -u
cd "$(dirname "$0")/.." || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

table() { "${CC:-cc}" -w -I. tools/rules.c -o "$work/rules" -lm -lpthread && "$work/rules"; }

case ${1-} in
'') table ;;
--write)
    table >"$work/table" || exit 1
    awk -v table="$work/table" '
        /^<!-- end -->$/ { inside = 0 }
        !inside { print }
        /^<!-- rules -->$/ { inside = 1; while ((getline line < table) > 0) print line }' \
        docs/checking.md >"$work/page" && cat "$work/page" >docs/checking.md
    ;;
*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' tools/rules.sh >&2; exit 2 ;;
esac
