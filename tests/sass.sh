#!/bin/sh
# Compares the machine code that nvcc makes of the kernels, for sm_80 and sm_90, with the limits in tests/sass.txt. The
# first comment there describes them. Prints a table of all kernels; the head of tests/sass.awk describes its columns.
# Kernels over their budget of instructions are marked. For sm_90a, only the kernels in tests/hopper_kernels.cu are
# compiled: those that are empty for all other architectures. ptxas must not serialise their products.
#
#   sh tests/sass.sh                  one line per check, closing line "N passed, N failed, N skipped"
#   sh tests/sass.sh --self-test      only checks that these checks find what they are meant to find; needs no nvcc
#   sh tests/sass.sh --update         writes what it measures into tests/sass.txt; the rules there stay as they are
#
# Needs nvcc and cuobjdump. Takes cuobjdump from PATH, from $CUDA_HOME/bin, or from the package "triton" of PyPI, which
# it downloads (200 MB, once for a build folder) unless MT_INSTALL=no. MT_SASS_ARCHS=90 looks only at sm_90.
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
build=${MT_BUILD_DIR:-build}/sass
mkdir -p "$build" || exit 1
build=$(cd "$build" && pwd)
check_log=$build/check.log check_lines=100
archs=${MT_SASS_ARCHS:-80 90 90a}
list=$PWD/tests/sass.txt
newline='
'

# ---- tools ---------------------------------------------------------------------------------------------------------

# Downloads cuobjdump and the nvdisasm that it calls.
download_cuobjdump() {
    [ "${MT_INSTALL:-yes}" != no ] && have_command python3 || return 1
    mkdir -p "$build/triton" && rm -f "$build"/triton/*.whl || return 1
    python3 -m pip download --quiet --no-deps --dest "$build/triton" triton >"$build/triton/log" 2>&1 || return 1
    (cd "$build/triton" && python3 -c '
import glob, os, zipfile
wheel = zipfile.ZipFile(glob.glob("*.whl")[0])
for name in ("cuobjdump", "nvdisasm"):
    with open(name, "wb") as tool:
        tool.write(wheel.read("triton/backends/nvidia/bin/" + name))
    os.chmod(name, 0o755)' >>log 2>&1) && rm -f "$build"/triton/*.whl
}

# Appends the folder of cuobjdump to PATH. Fails if there is none.
find_cuobjdump() {
    hidden cuobjdump && return 1
    PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin:$build/triton
    export PATH
    have_command cuobjdump || download_cuobjdump
}

release() { nvcc --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p'; }

# ---- measuring -----------------------------------------------------------------------------------------------------

# compile ARCH: writes what `measure` reads
compile() {
    case $1 in
    *a) set -- "$1" tests/hopper_kernels.cu -w -Isrc -DMT_HAS_CUDA=1 ;;
    *) set -- "$1" tests/package/implementation.c ;;
    esac
    arch=$1
    shift
    nvcc -O3 -std=c++17 "-arch=sm_$arch" -cubin -Xptxas -v -I. -x cu "$@" -o "$build/$arch.cubin" \
        >"$build/$arch.log" 2>&1 || { cat "$build/$arch.log"; return 1; }
    set -- "$arch"
    cuobjdump -sass "$build/$1.cubin" >"$build/$1.sass" && cuobjdump -elf "$build/$1.cubin" >"$build/$1.elf"
}

# shellcheck disable=SC2094  # the pipeline reads one file and does not write it
# name_lines FILE: the names of the kernels of a disassembly, without result and parameters
name_lines() {
    sed -n 's/^[ \t]*Function : //p' "$1" >"$1.names"
    c++filt <"$1.names" | awk '{
            sub(/^void /, "")
            for (i = depth = 0; i++ < length($0);) {
                c = substr($0, i, 1)
                depth += (c == "<") - (c == ">")
                if (c == "(" && depth == 0) break
            }
            print substr($0, 1, i - 1)
        }' | paste -d ' ' "$1.names" - | sed 's/^/K /'
}

resource_lines() {
    awk '/Compiling entry function/ { split($0, part, "\047"); name = part[2] }
        name == "" { next }
        / bytes stack frame/ && stack == "" { stack = $1; spills = $5 + $9 }
        /Used [0-9]* registers/ {
            shared = 0
            for (i = 1; i <= NF; i++) {
                if ($i == "Used") registers = $(i + 1)
                if ($i ~ /^smem/) shared = $(i - 2)
            }
            print "R", name, registers, shared, stack, spills
            name = stack = ""
        }' "$1"
}

launch_and_branch_lines() {
    awk '/^\.nv\.info\./ { name = substr($1, 10) }
        /EIATTR_MAX_THREADS/ { wanted = 1 }
        wanted && $1 == "Value:" { print "T", name, hexadecimal($2) * hexadecimal($3) * hexadecimal($4); wanted = 0 }
        /Offset of Indirect Branch:/ { from = $5 }
        /Targets: 0x/ { sub(/.*Targets: /, ""); print "B", name, from, $0 }
        function hexadecimal(text,  i, value) {
            for (i = 3; i <= length(text); i++) value = 16 * value + index("123456789abcdef", substr(text, i, 1))
            return value
        }' "$1"
}

instruction_lines() {
    sed -n -e 's/^[ \t]*Function : /F /p' -e 's|^ */\*\([0-9a-f]*\)\*/ *\(.*[^ ]\) *;.*|I \1 \2|p' "$1"
}

# no_warning ARCH: ptxas says that it serialises products of a warpgroup in warnings C7510 to C7519, and in others that
# it ignores setmaxnreg
no_warning() { grep -e 'C751[0-9]' -e '[Ss]erializ' -e setmaxnreg "$build/$1.log" | fail_on_output; }

# of_interest ARCH: the head and the lines of the kernels that are meant to be compiled for this architecture
of_interest() { case $1 in *a) grep -e '^thrd ' -e ' mti_hopper_' ;; *) cat ;; esac; }

# measure ARCH: writes the table of an architecture
measure() {
    {
        name_lines "$build/$1.sass"
        resource_lines "$build/$1.log"
        launch_and_branch_lines "$build/$1.elf"
        instruction_lines "$build/$1.sass"
    } | awk -f tests/sass.awk | of_interest "$1" >"$build/$1.table" && [ "$(wc -l <"$build/$1.table")" -gt 1 ]
}

# ---- comparing -----------------------------------------------------------------------------------------------------

# with_tables PROGRAM [RELEASE]: runs an awk program on the list and the tables of all architectures. It has these
# functions:
#   read_rule()      in a line of the list, a rule: defines the next rule
#   rule_of(kernel)  the number of the first rule that matches; 0 if there is none
#   read_row()       in a line of a table: sets kernel and `is`, the measured values by column
with_tables() {
    tables=
    for arch in $archs; do tables="$tables arch=$arch $build/$arch.table"; done
    # shellcheck disable=SC2086  # lists of words
    awk -v list="$list" -v release="${2:-}" -v archs=" $archs " '
        function rest(from,  text, i) {
            text = $0
            for (i = 1; i < from; i++) sub(/^[ ]*[^ ]+[ ]+/, "", text)
            return text
        }
        function read_rule() {
            rules++
            wanted[rules] = $2; allowed[rules] = $3; moved[rules] = $4; accessed[rules] = $5
            pattern[rules] = rest(6)
        }
        function matches(text, glob,  part, n, i, at) {
            n = split(glob, part, "*")
            if (n == 1) return text == glob
            if (substr(text, 1, length(part[1])) != part[1]) return 0
            text = substr(text, length(part[1]) + 1)
            for (i = 2; i < n; i++) {
                if (!(at = index(text, part[i]))) return 0
                text = substr(text, at + length(part[i]))
            }
            return length(text) >= length(part[n]) && substr(text, length(text) - length(part[n]) + 1) == part[n]
        }
        function rule_of(kernel,  i) {
            for (i = 1; i <= rules; i++) if (matches(kernel, pattern[i])) return i
            return 0
        }
        function read_row(  i) {
            kernel = rest(columns)
            for (i = 1; i < columns; i++) is[column[i]] = $i
            is["ipb"] = is["bytes"] > 0 ? sprintf("%.2f", is["worst"] / is["bytes"]) : "-"
            if (is["mma"] > 0) is["ipb"] = "-" # of such a loop, the copies are a small part
        }
        # The value of a number of bytes in a rule, such as 2T+4. T is the size of the type in the name of the kernel.
        function bytes_of(text,  part, n, i, size, sum) {
            if (match(kernel, /[< ][012][,>]/)) size = substr(kernel, RSTART + 1, 1) == "0" ? 4 : 2
            n = split(text, part, "+")
            for (i = 1; i <= n; i++) sum += part[i] ~ /T$/ ? (part[i] == "T" ? 1 : part[i] + 0) * size : part[i]
            return sum
        }
        # Sets budget and per_element for rule r, and lacks to the first pass of the rule that the kernel does not have.
        function count(r,  bytes, pass, part, n, i) {
            budget = per_element = "-"
            lacks = ""
            if (!r || moved[r] == "-") return
            budget = sprintf("%.1f", 6.8 * bytes_of(moved[r]))
            split(is["passes"], pass, ",")
            n = split(accessed[r], bytes, ",")
            for (i = 1; i <= n; i++) {
                if (bytes[i] == "0") continue
                split(pass[i], part, "/")
                if (part[2] > 0) per_element += bytes_of(bytes[i]) * part[1] / part[2]
                else if (lacks == "") lacks = i
            }
            per_element = sprintf("%.1f", per_element)
        }
        FILENAME != list && $1 == "thrd" {
            columns = split($0, column, " ")
            head = substr($0, 1, length($0) - length(" kernel"))
            next
        }
        '"$1" "$list" $tables
}

# Prints the tables, and marks the kernels that are over their budget.
print_tables() {
    with_tables '
        FILENAME == list { if ($1 == "rule") read_rule(); next }
        arch != last { totals(); print "sm_" arch; last = arch; shown = n = kernels = 0 }
        {
            read_row()
            count(rule_of(kernel))
            over = budget != "-" && per_element + 0 > budget + 0
            n += over
            kernels++
            if (!shown++) print head, "per byte per element budget kernel"
            line = substr($0, 1, length($0) - length(kernel) - 1)
            printf "%s %8s %11s %6s %s%s\n", line, is["ipb"], per_element, budget, kernel, \
                over ? "   OVER its budget" : ""
        }
        END { totals() }
        function totals() { if (last) printf "sm_%s: %d kernels, %d over their budgets\n", last, kernels, n }'
}

# Prints how the tables differ for the worse from the list.
worse() {
    with_tables '
        function complain(text) { print "sm_" arch ", " kernel ": " text }
        function most(what, limit) {
            if (is[what] + 0 > limit + 0) complain(what " is " is[what] ", not at most " limit)
        }
        function least(what, limit) {
            if (is[what] + 0 < limit + 0) complain(what " is " is[what] ", not at least " limit)
        }
        FILENAME == list && $1 == "rule" { read_rule(); next }
        FILENAME == list && /^ *[0-9]/ { if (index(archs, " " $1 " ")) has[$1, rest(14)] = $0; next }
        FILENAME == list { next }
        {
            read_row()
            r = rule_of(kernel)
            if (!r) complain("no rule of tests/sass.txt matches")
            used[r] = 1
            count(r)
            if (lacks) complain("pass " lacks " of its rule moves no bytes")
            if (kernel ~ /^mti_hopper_/) of[arch, kernel] = 1
            least("bl", wanted[r])
            most("spill", allowed[r])
            if (!((arch, kernel) in has)) { complain("not in tests/sass.txt"); next }
            split(has[arch, kernel], limit, " ")
            delete has[arch, kernel]
            if (is["thrd"] != limit[2]) complain("has " is["thrd"] " threads, not " limit[2])
            least("bl", limit[3])
            most("local", limit[4])
            least("ld16", limit[5])
            most("ldn", limit[6])
            least("st16", limit[7])
            most("stn", limit[8])
            if (is["mma"] != limit[9]) complain("mma is " is["mma"] ", not " limit[9])
            most("mufu", limit[10])
            most("narrow", limit[11])
            if (limit[12] != is["ipb"] && (limit[12] == "-" || is["ipb"] == "-" || is["ipb"] + 0 > limit[12] + 0))
                complain(is["ipb"] " instructions per byte, not at most " limit[12])
        }
        END {
            for (key in has) { split(key, part, SUBSEP); print "sm_" part[1] ", " part[2] ": there is no such kernel" }
            for (key in of) {
                split(key, part, SUBSEP)
                if (index(archs, " 90a ") && !(("90a", part[2]) in of)) print part[2] ": not compiled for sm_90a"
            }
            for (i = 1; i <= rules; i++) if (!used[i]) print "the rule of " pattern[i] " is for no kernel"
        }'
}
no_worse() { worse | sort | fail_on_output; }

# Prints the list with the measured values.
updated() {
    with_tables '
        FILENAME == list { if (!/^( *[0-9]|nvcc )/) print; next }
        !said++ { print "nvcc " release }
        {
            read_row()
            printf "%4s %4s %2s %5s %4s %3s %4s %3s %4s %4s %6s %5s  | %s\n", arch, is["thrd"], is["bl"], \
                is["local"], is["ld16"], is["ldn"], is["st16"], is["stn"], is["mma"], is["mufu"], is["narrow"], \
                is["ipb"], kernel | "sort -k1,1n -k14"
        }' "$1"
}
update() { updated "$1" >"$build/new.txt" && [ -s "$build/new.txt" ] && cp "$build/new.txt" "$list"; }

# ---- the self test -------------------------------------------------------------------------------------------------

# Writes the disassembly of three kernels as cuobjdump prints it, the log of ptxas, and a list for them. The hot path of
# mti_a has 5 or 7 instructions, from 0030 to 0030 or to 0090, and 32 bytes. mti_b has no loop. mti_c has a loop of 3
# instructions and 16 bytes in a loop of 4 others and 32 bytes: with 8 bytes of an element in each, 2.5 instructions for
# an element.
make_fake() {
    build=$(mktemp -d) || exit 1
    trap 'rm -rf "$build"' EXIT
    check_log=$build/check.log archs=90 list=$build/list.txt
    cat >"$build/90.sass" <<'END2'
		Function : _Z5mti_aPf
        /*0000*/                   S2R R0, SR_TID.X ;                 /* 0x0 */
                                                                      /* 0x000fe20000000800 */
        /*0010*/                   LDG.E R1, desc[UR4][R2.64] ;       /* 0x0 */
        /*0020*/               @P1 BRA 0xa0 ;                         /* 0x0 */
        /*0030*/               @P2 BRA 0x50 ;                         /* 0x0 */
        /*0040*/                   LDG.E.128 R4, desc[UR4][R2.64] ;   /* 0x0 */
        /*0050*/                   FADD R4, R4, R4 ;                  /* 0x0 */
        /*0060*/                   STG.E.128 desc[UR4][R2.64], R4 ;   /* 0x0 */
        /*0070*/                   BRX R8 -0x80 ;                     /* 0x0 */
        /*0080*/                   MUFU.EX2 R4, R4 ;                  /* 0x0 */
        /*0090*/                   BRA 0x30 ;                         /* 0x0 */
        /*00a0*/                   EXIT ;                             /* 0x0 */
        /*00b0*/                   BRA 0xb0 ;                         /* 0x0 */
		Function : _Z5mti_bPfi
        /*0000*/                   HMMA.16816.F32 R4, R4, R8, RZ ;    /* 0x0 */
        /*0010*/                   LDGSTS.E.BYPASS.128 [R2], [R4] ;   /* 0x0 */
        /*0020*/                   EXIT ;                             /* 0x0 */
		Function : _Z5mti_cILi0EEvPf
        /*0000*/                   NOP ;                              /* 0x0 */
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;   /* 0x0 */
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;   /* 0x0 */
        /*0030*/                   LDG.E.128 R4, desc[UR4][R2.64] ;   /* 0x0 */
        /*0040*/                   FADD R4, R4, R4 ;                  /* 0x0 */
        /*0050*/               @P1 BRA 0x30 ;                         /* 0x0 */
        /*0060*/                   FADD R4, R4, R4 ;                  /* 0x0 */
        /*0070*/               @P2 BRA 0x10 ;                         /* 0x0 */
        /*0080*/                   EXIT ;                             /* 0x0 */
END2
    cat >"$build/90.elf" <<'END2'
.nv.info._Z5mti_aPf
		Offset of Indirect Branch: 0x70	 Number of targets: 2
		Targets: 0x30 0x80 
	Attribute:	EIATTR_MAX_THREADS
	Format:	EIFMT_SVAL
	Value:	0x100 0x1 0x1 
.nv.info._Z5mti_bPfi
	Attribute:	EIATTR_MAX_THREADS
	Value:	0x80 0x2 0x1 
.nv.info._Z5mti_cILi0EEvPf
	Attribute:	EIATTR_MAX_THREADS
	Value:	0x100 0x1 0x1 
END2
    for name in _Z5mti_aPf _Z5mti_bPfi _Z5mti_cILi0EEvPf; do
        echo "ptxas info    : Compiling entry function '$name' for 'sm_90'"
        echo "ptxas info    : Function properties for $name"
        echo "    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
        echo "ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem, 648 bytes cmem[0]"
    done >"$build/90.log"
    printf '%s\n' '# a comment' 'rule 6 0 0.1 0,4 mti_a*' 'rule 1 0 - - mti_b' 'rule 1 0 T 0,2T,T+4 mti_c*' >"$list"
    measure 90 && update 13.0
}

# says TEXTS CHANGE...: after these changes of the fake, FILE=SED_SCRIPT, `worse` prints a line with each text, and no
# others
says() {
    text=$1
    shift
    rm -rf "$build/save"
    mkdir "$build/save" && cp "$build"/90.* "$list" "$build/save" || return 1
    for change in "$@"; do
        sed "${change#*=}" "$build/save/${change%%=*}" >"$build/${change%%=*}"
        ! cmp -s "$build/save/${change%%=*}" "$build/${change%%=*}" || { echo "$change changes nothing"; return 1; }
    done
    measure 90 && worse >"$build/said"
    cp "$build"/save/* "$build"
    cat "$build/said"
    printf '%s' "${text:+$text$newline}" >"$build/texts"
    while read -r line; do grep -q -F -e "$line" "$build/said" || return 1; done <"$build/texts"
    [ "$(wc -l <"$build/said")" -eq "$(wc -l <"$build/texts")" ]
}

fake_is_measured() {
    cat "$build/90.table" "$list"
    [ "$(grep -A 3 '^nvcc' "$list" | tr -s ' ')" = "nvcc 13.0
 90 256 6 0 1 1 1 0 0 1 0 0.22 | mti_a
 90 256 6 0 1 0 0 0 1 0 0 - | mti_b
 90 256 6 0 3 0 0 0 0 0 0 0.19 | mti_c<0>" ] && cp "$list" "$build/once" && update 13.0 && cmp "$list" "$build/once"
}

# shows TEXT CHANGE: with this change of the rules, a sed script, the table of the fake has a line that ends with TEXT
shows() {
    cp "$list" "$build/rules" && sed "$2" "$build/rules" >"$list"
    print_tables >"$build/said"
    cp "$build/rules" "$list"
    cat "$build/said"
    tr -s ' ' <"$build/said" | grep -q -e " $1\$"
}

serialised_is_found() {
    no_warning 90 || return 1
    echo "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized" \
        >>"$build/90.log"
    ! no_warning 90
}

# The list has mti_hopper_d for both architectures, but the one for sm_90a is not compiled.
missing_is_found() {
    (
        archs="90 90a"
        sed 's/mti_b/mti_hopper_d/' "$build/90.table" >"$build/90b.table" && mv "$build/90b.table" "$build/90.table"
        sed '/mti_hopper_d/d' "$build/90.table" >"$build/90a.table"
        worse | grep -e '^mti_hopper_d: not compiled for sm_90a$'
    )
}

self_test() {
    check "what is measured in a small disassembly" fake_is_measured
    check "the list that was written is kept" says ""
    check "a kernel over its budget is marked" shows "0.9 0.7 mti_a OVER its budget" ""
    check "the passes of a kernel are added" shows "2.5 27.2 mti_c<0>" ""
    check "a kernel of two passes over its budget is marked" shows "2.5 2.0 mti_c<0> OVER its budget" '/mti_c/s/T/0.3/'
    check "a kernel of one pass is within this budget" shows "1.0 2.0 mti_c<0>" '/mti_c/s/T.*+4/0.3 0,2T/'
    check "a pass that the kernel does not have is found" says "mti_b: pass 2 of its rule moves no bytes" \
        'list.txt=/mti_b/s/- -/4 0,4/'
    check "a spill is found" says "mti_a: spill is 8, not at most 0" \
        '90.log=/aPf/,/stack/s/0 bytes spill stores/8 bytes spill stores/'
    check "an access to local memory is found" says "mti_a: local is 1, not at most 0" \
        '90.sass=s/S2R R0, SR_TID.X/STL [R1], R0     /'
    check "a narrower load is found" says "mti_b: ld16 is 0, not at least 1" \
        '90.sass=s/LDGSTS.E.BYPASS.128/NOP/'
    check "a narrow load more is found" says "mti_a: ldn is 2, not at most 1" \
        '90.sass=s/S2R R0, SR_TID.X/LD.E.64 R0, [R2]/'
    check "a narrower store is found" says "mti_a: st16 is 1, not at least 2" \
        'list.txt=s/^\(  90  256  6     0    1   1 \)   1\(.*mti_a$\)/\1   2\2/'
    check "a narrow access in the hot path is found" says "mti_a: narrow is 1, not at most 0" \
        '90.sass=s/MUFU.EX2 R4, R4 /LDG.E.U8 R4, [R2]/' \
        'list.txt=s/^\(  90  256  6     0    1   \)1\(.*mti_a$\)/\12\2/'
    check "fewer blocks are found" says "mti_b: bl is 5, not at least 6" '90.log=/bPfi/,/Used/s/Used 40/Used 48/'
    check "fewer blocks than a rule wants are found" says "mti_a: bl is 6, not at least 7" 'list.txt=s/^rule 6/rule 7/'
    check "a product less is found" says "mti_b: mma is 0, not 1
mti_b: 0.19 instructions per byte, not at most -" '90.sass=s/HMMA.16816.F32/HADD2/'
    check "more instructions are found" says "mti_a: 0.25 instructions per byte, not at most 0.22" \
        '90.sass=s|.*/[*]0050.*|&\n        /*0058*/ FMUL R4, R4, R4 ;|'
    check "a new kernel is found" says "mti_b: not in tests/sass.txt" 'list.txt=/^  90.* mti_b$/d'
    check "a lost kernel is found" says "mti_d: there is no such kernel" 'list.txt=s/^\(  90.*\)mti_b$/&\n\1mti_d/'
    check "a product that ptxas serialises is found" serialised_is_found
    check "a kernel that is missing for sm_90a is found" missing_is_found
    check "a kernel without a rule is found" says "mti_b: no rule" 'list.txt=/^rule.*mti_b$/d'
    check "a rule without a kernel is found" says "the rule of mti_d" 'list.txt=s/^rule.*mti_b$/&\nrule 1 0 - - mti_d/'
}

# ---- what was asked for --------------------------------------------------------------------------------------------

kernels() {
    have_command nvcc || { skip "nvcc: not here, there is no machine code to look at"; return; }
    if ! find_cuobjdump; then
        if hidden cuobjdump; then skip "cuobjdump: left out"; else leave_out "cuobjdump is not here"; fi
        return
    fi
    for arch in $archs; do
        check "the kernels compile for sm_$arch" compile "$arch"
        check "the machine code of sm_$arch can be read" measure "$arch"
        check "no products of sm_$arch are serialised" no_warning "$arch"
    done
    [ "$failed" -eq 0 ] || return
    if [ "${1:-}" = update ]; then
        check "tests/sass.txt has the measured values" update "$(release)"
    elif [ "$(release)" != "$(sed -n 's/^nvcc //p' "$list")" ]; then
        skip "the limits are those of nvcc $(sed -n 's/^nvcc //p' "$list"), this is nvcc $(release)"
        print_tables
        return
    fi
    print_tables
    check "each kernel is within its limits" no_worse
}

case ${1:-} in
'')
    check "the checks find what they are meant to find" sh tests/sass.sh --self-test
    kernels
    ;;
--self-test) make_fake; self_test ;;
--update) archs="80 90 90a"; kernels update ;;
*) sed -n '6,8s/^# *//p' "$0" >&2; exit 2 ;;
esac
closing_line
[ "$failed" -eq 0 ]
