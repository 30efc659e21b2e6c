#!/bin/sh
# Checks properties of the four headers that test programs cannot check: that they compile in every supported dialect,
# alone and included twice, and add no name, macro, symbol, mutable data or exit to the program that includes them.
#
#   sh tests/check_headers.sh [PART...]        one line per check, closing line "N passed, N failed, N skipped"
#
# Parts: text, gcc, clang, programs, sanitized (programs with sanitizers), nvcc, and planted: the checks must find
# faults that are planted into a copy of the headers. Default: all of them.
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
headers="mt_comm.h mt_kernels.cuh mt_parallel.h megatron.h" # from the lowest to the highest
programs=$(echo examples/*.h examples/*.c examples/*.cu examples/*/*.c examples/*/*.cu tests/*.h tests/*.c tests/*.cu \
    tests/bench/*.c tests/bench/*.cu)
warnings="-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Werror -Wfatal-errors"
sources=$PWD/tests/package
H=$PWD # the headers under test
work=$(mktemp -d) || exit 1
check_log=$work/log check_lines=40
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# ---- text ----------------------------------------------------------------------------------------------------------

# code_only HEADER [strings]: removes comments and empties strings and characters (unless `strings`); keeps line numbers
code_only() { awk -v keep="${2:-}" -f tests/code_only.awk "$1"; }

check_unfinished() {
    for header in $headers; do
        awk -v f="$header" '/TODO|FIXME|XXX|HACK/ { print f ":" FNR ": " $0 }' "$H/$header"
    done | fail_on_output
}

# Also looks at the tests and examples.
check_function_length() {
    for file in $headers $programs; do
        [ ! -f "$H/$file" ] || code_only "$H/$file" | awk -v f="$file" '
            /\).*\{[ \t]*$/ && !start { start = FNR; head = $0 }
            /^\}/ && start { n = FNR - start + 1; if (n > 70) print f ":" start ": " n " lines: " head; start = 0 }'
    done | fail_on_output
}

# Each header may include only lower headers and system headers.
check_floors() {
    below=
    for header in $headers; do
        code_only "$H/$header" strings | sed -n 's/^[ \t]*#[ \t]*include[ \t]*"\([^"]*\)".*/\1/p' |
            while read -r included; do
                case " $below " in
                *" $included "*) ;;
                *) echo "$header includes $included" ;;
                esac
            done
        below="$below $header"
    done | fail_on_output
}

# Prints the fields of opaque structures that a higher header uses, through any name that it declares as a pointer to
# such a structure. A structure that the interface itself defines further down is not opaque.
private_fields() {
    opaque=none
    for header in $headers; do
        code_only "$H/$header" >"$work/code"
        pointers=$(grep -oE "\b($opaque) \*(const )?[a-z_]+" "$work/code" | sed 's/.*[* ]/|/' | sort -u | tr -d '\n')
        sed -nE "s/.*(\b(none$pointers)->[a-z0-9_]*).*/$header: a field of an opaque structure: \1/p" "$work/code"
        opaque=$opaque$(awk '
            /MEGATRON_IMPLEMENTATION/ { exit }
            /^typedef struct mt_[a-z_]+ mt_[a-z_]+;/ && $3 ";" == $4 { names[$3] }
            /^struct mt_[a-z_]+ \{/ { delete names[$2] }
            END { for (name in names) printf "|%s", name }' "$work/code")
    done
}

# A header uses no private name of another header, and no field of its opaque structures: what it needs from a lower
# header is public there, so that authors of blocks can use it, too.
check_private() {
    {
        for header in $headers; do
            code_only "$H/$header" | tr -c 'A-Za-z0-9_' '\n' | grep -E '^(mti|MTI)_' | sort -u | sed "s/$/ $header/"
        done | awk '$1 in where { print $2 " and " where[$1] " have the private name " $1 } { where[$1] = $2 }'
        private_fields
    } | fail_on_output
}

# A library does not end the process, and does not write to standard output or standard error.
check_calls() {
    never="exit|_exit|_Exit|quick_exit|abort|assert|raise|kill|printf|vprintf|puts|putchar"
    for header in $headers; do
        code_only "$H/$header" | awk -v f="$header" -v never="$never" '
            $0 ~ "(^|[^A-Za-z0-9_.>])(" never ")[ \t]*[(]" { print f ":" FNR ":" $0 }'
    done | fail_on_output
}

# Memory comes from the context's allocator. Only the lowest header calls malloc and related functions: for the default
# allocator, and for communicators, which exist before any context.
check_allocation() {
    for header in mt_kernels.cuh mt_parallel.h megatron.h; do
        code_only "$H/$header" | awk -v f="$header" '
            /(^|[^A-Za-z0-9_.>])(malloc|calloc|realloc|free|posix_memalign|aligned_alloc|strdup|alloca)[ \t]*\(/ {
                print f ":" FNR ":" $0 }'
    done | fail_on_output
}

# ---- macros and names ----------------------------------------------------------------------------------------------

# preprocess HEADER DEFINE OPTIONS...: prints the preprocessed text of the four headers, without line markers
preprocess() {
    header=$1 define=$2
    shift 2
    { [ -z "$define" ] || echo "#define $define"; echo "#include \"$header\""; } >"$work/preprocess.c"
    "$CC" -E "$@" -I "$H" "$work/preprocess.c" | awk -v ours="$H/" '
        /^# [0-9]+ "/ { split($0, part, "\""); mine = index(part[2], ours) == 1; next }
        mine'
}

check_macros() {
    for define in "" MEGATRON_IMPLEMENTATION; do
        preprocess megatron.h "$define" -dD | awk '
            /^#[ \t]*define / { n++; name = $2; sub(/\(.*/, "", name)
                if (name !~ /^(MT_|MTI_|MEGATRON_)/) print "macro " name }
            END { if (n < 3) print "no macros seen: the check is broken" }'
    done | sort -u | fail_on_output
}

# All names in file scope that the headers define: functions, variables, typedefs, tags, enum constants.
file_scope_names() {
    awk '
    function name(n) { if (n ~ /^[A-Za-z_]/ && n !~ /^(_|int$|void$|sizeof$|extern$)/) print n }
    {
        line = $0
        if (line ~ /^#/) next
        while (match(line, /[A-Za-z_][A-Za-z0-9_]*|"([^"\\]|\\.)*"|\047([^\047\\]|\\.)+\047|[^ \t]/)) {
            t = substr(line, RSTART, RLENGTH); line = substr(line, RSTART + RLENGTH)
            if (skip_parens) { # the arguments of __attribute__ and the like
                skip_parens += (t == "(") - (t == ")")
                if (skip_parens == 1 && t == ")") skip_parens = 0
                continue
            }
            if (t ~ /^__(attribute|asm|extension)/) { skip_parens = t ~ /extension/ ? 0 : 1; continue }
            if (before == "extern" && t == "\"C\"") { language = 1; before = t; continue }
            if (t == "{") {
                if (language) { language = 0; before = ";"; continue }
                is_tag = (before2 ~ /^(struct|union|enum)$/)
                if (is_tag && !depth) name(before)
                depth++; in_enum[depth] = before == "enum" || (before2 == "enum")
            } else if (t == "}") { if (depth) depth-- }
            else if (depth && in_enum[depth] && (before == "{" || before == ",") && t ~ /^[A-Za-z_]/) print t
            else if (!depth) {
                if (!parens && t ~ /^[;,(=[]$/) name(before)
                if (parens == 1 && t == ")" && before2 == "*" && before3 == "(") name(before)
                if (t == "(") parens++
                if (t == ")") parens--
            }
            before3 = before2; before2 = before; before = t
        }
    }'
}

check_names() {
    for define in "" MEGATRON_IMPLEMENTATION; do
        preprocess megatron.h "$define" | file_scope_names | awk -v define="$define" '
            { n++ } $0 == "ncclComm" { next } # the tag of NCCL'"'"'s ncclComm_t, declared only
            !/^(mt_|MT_)/ && !(define != "" && /^(mti_|MTI_)/) { print "name " $0 }
            END { if (n < 100) print "only " n " names seen: the check is broken" }'
    done | sort -u | fail_on_output
}

# ---- compilers -----------------------------------------------------------------------------------------------------

# form HEADER FORM: prints a file that includes the header in one of the usual ways
form() {
    case $2 in
    declarations) printf '#include "%s"\n' "$1" "$1" ;;
    implementation) echo '#define MEGATRON_IMPLEMENTATION'; printf '#include "%s"\n' "$1" "$1" ;;
    late) printf '#include "%s"\n#define MEGATRON_IMPLEMENTATION\n#include "%s"\n' "$1" "$1" ;;
    esac
}

# check_dialect COMPILER LANGUAGE STANDARD [OPTIONS...]: every header, in every form
check_dialect() { check_forms "$headers" "declarations implementation late" "$@"; }

# check_top FORMS ...: only megatron.h, which includes the others
check_top() { check_forms megatron.h "$@"; }

# check_forms HEADERS FORMS COMPILER LANGUAGE STANDARD [OPTIONS...]
check_forms() {
    which=$1 forms=$2 compiler=$3 language=$4 standard=$5 bad=0
    shift 5
    for header in $which; do
        for how in $forms; do
            form "$header" "$how" >"$work/form.c"
            stop=-fsyntax-only
            [ "$how" != implementation ] || stop=-S # gcc finds unused functions only when it compiles
            # shellcheck disable=SC2086  # lists of flags
            "$compiler" -x "$language" "-std=$standard" $warnings $stop "$@" -I "$H" "$work/form.c" -o /dev/null &&
                continue
            echo "^ $header, $how"
            bad=1
        done
    done
    return $bad
}

# check_optimized COMPILER LANGUAGE STANDARD LEVELS...: compiles the implementation with optimisation, because some
# warnings (of uninitialised values) need it. A level is -O and further flags.
check_optimized() {
    compiler=$1 language=$2 standard=$3 bad=0
    shift 3
    form megatron.h implementation >"$work/form.c"
    for level in "$@"; do
        # shellcheck disable=SC2086  # lists of flags
        "$compiler" -x "$language" "-std=$standard" $warnings -S $level -I "$H" "$work/form.c" -o /dev/null && continue
        echo "^ megatron.h, implementation, $level"
        bad=1
    done
    return $bad
}

# readme_commands: prints the commands of README.md that build a program of the reader with cc or mpicc, and whose
# libraries are here. Without the full matrix only the first one.
readme_commands() {
    sed -n 's/^\(cc\|mpicc\) \(.* yours\.c [^#]*[^# ]\) *\(#.*\)*$/\1 \2/p' README.md | while read -r command; do
        case $command in
        *MT_USE_ONEDNN*) have_package libdnnl-dev && in_full || continue ;;
        *MT_USE_CBLAS*) have_package libopenblas-dev && in_full || continue ;;
        mpicc*) have_package libopenmpi-dev && in_full || continue ;;
        esac
        echo "$command"
    done
}

# check_readme COMPILER: the program of README.md, compiled at -O3 by its commands for a program of the reader; in the
# full matrix also at -O2, which docs.sh always does with one compiler
check_readme() {
    awk '/^```c$/ { inside = 1; next } /^```/ { if (inside) exit } inside' README.md >"$work/yours.c"
    readme_commands >"$work/commands"
    [ "$(sed -n '1s/^cc .*-O3 .* yours\.c .*/yes/p' "$work/commands")" = yes ] ||
        { echo "README.md has no command cc -O3 ... yours.c"; return 1; }
    while read -r command; do
        flags=$(echo "${command#* }" | sed "s|yours\.c|$work/yours.c|")
        driver=$1
        [ "${command%% *}" = cc ] || driver=mpicc
        for level in $(in_full && echo -O2) -O3; do
            # shellcheck disable=SC2086  # a list of flags, of which a later -O counts
            OMPI_CC=$1 MPICH_CC=$1 "$driver" -Wall -Wextra -Werror $flags $level -o "$work/yours" </dev/null && continue
            echo "^ $1 $level: $command"
            return 1
        done
    done <"$work/commands"
}

# check_macros_before COMPILER LANGUAGE STANDARD [HEADERS...]: compiles the implementation after these system headers
# and after common macros
check_macros_before() {
    compiler=$1 language=$2 standard=$3
    shift 3
    {
        for header in "$@"; do echo "#include <$header>"; done
        echo "#include \"$sources/macros.h\""
        form megatron.h implementation
    } >"$work/form.c"
    # shellcheck disable=SC2086  # a list of flags
    "$compiler" -x "$language" "-std=$standard" $warnings -fsyntax-only -I "$H" "$work/form.c"
}

# With tgmath.h, sqrt and related names mean another function for a float than for a double. The bits of training must
# not change.
check_tgmath_bits() {
    for how in plain tgmath; do
        set -- -std=gnu17
        [ $how = plain ] || set -- "$@" -include tgmath.h -include complex.h
        "$CC" "$@" -I "$H" examples/train_gpt.c -o "$work/train_$how" -lm -lpthread || return 1
        "$work/train_$how" --data LICENSE --steps 2 --layers 2 --hidden 32 --heads 2 --seq 16 --batch 4 \
            --micro-batch 2 --dropout 0.1 --dtype bf16 --label-smoothing 0.1 \
            --hash-log "$work/$how.hashes" >"$work/$how.log" 2>&1 ||
            { cat "$work/$how.log"; return 1; }
    done
    [ -s "$work/plain.hashes" ] && diff "$work/plain.hashes" "$work/tgmath.hashes"
}

# Without the full matrix, the implementations of mt_kernels.cuh and mt_parallel.h are compiled only as parts of
# megatron.h.
check_nvcc() {
    bad=0
    for header in $headers; do
        for how in declarations implementation; do
            case $how:$header in
            implementation:mt_kernels.cuh | implementation:mt_parallel.h) in_full || continue ;;
            esac
            form "$header" $how >"$work/form.cu"
            # shellcheck disable=SC2046  # a flag, or none
            "$nvcc" $(nvcc_fast "$nvcc") -Werror all-warnings -Xcompiler -Wall -c -I "$H" "$work/form.cu" \
                -o "$work/form.o" && continue
            echo "^ $header, $how"
            bad=1
        done
    done
    return $bad
}

# ---- object files --------------------------------------------------------------------------------------------------

check_declarations_define_nothing() {
    for header in $headers; do
        form "$header" declarations >"$work/none.c"
        "$CC" -c -I "$H" "$work/none.c" -o "$work/none.o" && nm --defined-only "$work/none.o" | sed "s/^/$header: /"
    done 2>&1 | fail_on_output
}

# A first #include without the implementation must not prevent a second one from defining all of it.
check_late_symbols() {
    for how in implementation late; do
        form megatron.h $how >"$work/$how.c"
        "$CC" -c -I "$H" "$work/$how.c" -o "$work/$how.o" &&
            nm "$work/$how.o" | sed 's/^[0-9a-f]* *//' >"$work/$how.symbols"
    done
    [ -s "$work/late.symbols" ] && diff "$work/implementation.symbols" "$work/late.symbols"
}

check_symbols() {
    compiler=$1
    shift
    form megatron.h implementation >"$work/symbols.c"
    "$compiler" -c "$(in_full && echo -O1 || echo -O0)" "$@" -I "$H" "$work/symbols.c" -o "$work/symbols.o" || return 1
    nm -f sysv "$work/symbols.o" | awk -F'|' '
        NF < 7 || $1 ~ /^Name/ { next }
        { gsub(/ /, ""); class = $3; name = $1; section = $7; n++ }
        class == "U" || class == "w" { next }
        # tables that compilers make, and constants inside a function
        class ~ /[rn]/ && name ~ /^(CSWTCH|switch\.table|reltable\.|\.L|__func__|__PRETTY_FUNCTION__)/ { next }
        class ~ /[rn]/ && name ~ /\.[0-9]+$/ { next }
        class ~ /[A-Z]/ && name !~ /^mt_/ { print "exported: " name }
        class ~ /[a-z]/ && name !~ /^mti?_/ && section !~ /^\.(data|bss)/ { print "local: " name }
        # constant tables of pointers lie in .data.rel.ro until they are relocated
        section ~ /^\.(data|bss|tdata|tbss)|COM/ && section !~ /^\.data\.rel\.ro/ {
            print "mutable: " name " in " section
        }
        END { if (n < 20) print "only " n " symbols seen: the check is broken" }' | fail_on_output
}

# Builds both files of a program, implementation and use, in C and in C++ (objects *.c.o and *.cpp.o), to link all
# combinations.
build_c() {
    "$CC" -c -I "$H" "$sources/implementation.c" -o "$work/implementation.c.o" &&
        "$CC" -c -I "$H" "$sources/use.c" -o "$work/use.c.o"
}
build_cpp() {
    "$CXX" -x c++ -c -I "$H" "$sources/implementation.c" -o "$work/implementation.cpp.o" &&
        "$CXX" -c -I "$H" "$sources/use.cpp" -o "$work/use.cpp.o"
}

# check_link COMPILER IMPLEMENTATION USE
check_link() {
    "$1" "$work/implementation.$2.o" "$work/use.$3.o" -o "$work/linked" -lm -lpthread && "$work/linked"
}

check_no_implementation() {
    if "$CC" "$work/use.c.o" -o "$work/linked" -lm -lpthread >"$work/link.log" 2>&1; then
        echo "a program without any implementation links"
        return 1
    fi
    grep -q 'mt_launch' "$work/link.log" || { cat "$work/link.log"; return 1; }
}

# clang's MemorySanitizer detects reads of uninitialised memory.
msan() { clang -g -O1 -fsanitize=memory -I "$H" "$@" -o "$work/msan" -lm -lpthread && "$work/msan"; }
has_msan() {
    echo 'int main(void) { return 0; }' >"$work/empty.c"
    have_command clang && msan "$work/empty.c" >/dev/null 2>&1
}
check_msan() { msan "$sources/implementation.c" "$sources/use.c"; }

# An exception passes through a launch of one rank, with the implementation as C++, and as C with -fexceptions.
throws() {
    for language in "$CXX -x c++" "$CC -x c -fexceptions"; do
        # shellcheck disable=SC2086  # a command and its arguments
        $language -g -fsanitize=address -c -I "$H" "$sources/implementation.c" -o "$work/throws.o" &&
            "$CXX" -g -fsanitize=address -I "$H" "$1" "$work/throws.o" -o "$work/throws" -lm -lpthread &&
            "$work/throws" || return 1
    done
}
has_asan() {
    echo 'int main() { return 0; }' >"$work/empty.cpp"
    throws "$work/empty.cpp" >/dev/null 2>&1
}
check_throws() { throws "$sources/throws.cpp"; }

# With these flags infinities and NaN do not work, and a diverging loss would go unnoticed: the implementation refuses
# them.
check_fast_math() {
    printf '#define MEGATRON_IMPLEMENTATION\n#include "megatron.h"\n' >"$work/fast.c"
    for flag in -ffast-math -ffinite-math-only; do
        if "$CC" -I. "$flag" -fsyntax-only "$work/fast.c" 2>"$work/fast.log"; then
            echo "the implementation compiles with $flag"
            return 1
        fi
        grep -q 'without -ffast-math, in a file of its own: cc .*-fno-fast-math -c' "$work/fast.log" ||
            { cat "$work/fast.log"; return 1; }
    done
}

# The way out that the error names: the program has -ffast-math, and the file with the implementation -fno-fast-math
# after it.
check_fast_math_program() {
    "$CC" -c -O1 -ffast-math -I "$H" "$sources/use.c" -o "$work/use.fast.o" &&
        "$CC" -c -O1 -ffast-math -fno-fast-math -I "$H" "$sources/implementation.c" -o "$work/implementation.fast.o" &&
        "$CC" "$work/implementation.fast.o" "$work/use.fast.o" -o "$work/linked" -lm -lpthread && "$work/linked"
}

# Files have little-endian byte order, and the library swaps no bytes: on a big-endian machine the implementation is
# refused, and the declarations compile.
check_big_endian() {
    form megatron.h implementation >"$work/endian.c"
    set -- -U__BYTE_ORDER__ -D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__ -fsyntax-only -I "$H"
    if "$CC" "$@" "$work/endian.c" 2>"$work/endian.log"; then
        echo "the implementation compiles for a big-endian machine"
        return 1
    fi
    grep -q 'safetensors files are little-endian' "$work/endian.log" || { cat "$work/endian.log"; return 1; }
    form megatron.h declarations >"$work/endian.c"
    "$CC" "$@" "$work/endian.c"
}

# ---- the checks find planted faults --------------------------------------------------------------------------------

# planted WHERE FAULTS COMMAND...: appends the faults to a copy of the headers. The command must fail and name each of
# them: "bad" for one fault, "bad1", "bad2", ... for several.
planted() {
    where=$1 fault=$2 n=1
    shift 2
    H=$work/planted
    mkdir -p "$H"
    for header in $headers; do cp "$header" "$H/"; done
    case $where in
    raw) printf '%s\n' "$fault" ;;
    declarations) printf '#ifndef MTI_PLANTED\n#define MTI_PLANTED\n%s\n#endif\n' "$fault" ;;
    implementation)
        printf '#if defined(MEGATRON_IMPLEMENTATION) && !defined(MTI_PLANTED)\n#define MTI_PLANTED\n%s\n#endif\n' \
            "$fault" ;;
    esac | tee -a "$H/mt_comm.h" >>"$H/mt_kernels.cuh"
    if "$@" >"$work/planted.log" 2>&1 || ! grep -qi bad "$work/planted.log"; then
        printf 'not found by %s: %s\n' "$*" "$fault"
    fi
    while printf '%s\n' "$fault" | grep -qi "bad$n"; do
        grep -qi "bad$n" "$work/planted.log" || printf 'bad%d not found by %s: %s\n' $n "$*" "$fault"
        n=$((n + 1))
    done
    H=$PWD
}

long_function() {
    echo 'static inline int mti_bad(int x) {'
    awk 'BEGIN { for (i = 0; i < 70; i++) print "    x++;" }'
    echo '    return x;'
    echo '}'
}

# A program of each kind has a long function.
planted_programs() {
    n=0
    for file in examples/train.h examples/train_gpt.c tests/test_comm.c tests/test_cuda.cu tests/mt_test.h \
        tests/bench/bench.c; do
        n=$((n + 1))
        mkdir -p "$work/planted/${file%/*}"
        long_function | sed "s/bad/bad$n/" >"$work/planted/$file"
    done
    planted raw '/* bad1 bad2 bad3 bad4 bad5 bad6 */' check_function_length
    rm -r "$work/planted"
}

planted_text() {
    planted raw '/* XXX bad */' check_unfinished
    planted raw "$(long_function)" check_function_length
    planted_programs
    planted raw '#include "bad.h"' check_floors
    planted implementation 'static int mti_bad(const mt_param *p) { return mti_is_whole(p); }' check_private
    planted implementation 'static int mt_field1(const mt_context *ctx) { return ctx->bad1; }
static int mt_field2(const mt_block *block, mt_comm *tp) { return tp ? block->tp->bad2 : 0; }' check_private
    planted implementation 'static void mti_bad1(void) { abort(); }
static void mti_bad2(void) { if (1) exit(1); }' check_calls
    planted implementation 'static void *mti_bad(void) { return malloc(4); }' check_allocation
    planted declarations '#define BAD 1' check_macros
    planted implementation '#define BAD 1' check_macros
}

planted_names() {
    planted declarations 'typedef int bad1;
typedef void (*bad2)(int mt_x);
typedef struct bad3 { int x; } mt_good3;
typedef enum mt_good { MT_GOOD, BAD4 } mt_good;
static inline int bad5(int x) { return x; }
extern const int mti_bad6;' check_names
    planted implementation 'static const int bad[] = {1};' check_names
}

planted_symbols() {
    planted implementation 'int bad1(void) { return 0; }
int mt_bad2;
int mt_count(void) { static int bad3_calls = 1; return bad3_calls++; }
int mt_count_more(void) { static __thread int bad4_calls; return bad4_calls++; }' check_symbols "$CC"
    planted implementation 'int mt_bad;' check_symbols "$CC" -fPIC
    planted declarations 'void mt_bad(void) { }' check_declarations_define_nothing
}

planted_dialects() {
    planted raw 'struct mt_bad { int x; };' check_forms mt_comm.h declarations "$CC" c c99
    planted declarations 'static inline int mti_bad(unsigned x) { return x; }' \
        check_forms mt_comm.h declarations "$CC" c c11
    ! have_command "$CXX" || planted declarations 'static inline char *mti_bad(void *x) { char *y = x; return y; }' \
        check_forms mt_comm.h declarations "$CXX" c++ c++11
    planted implementation 'static int mti_bad(void) { return 0; }' check_forms mt_comm.h implementation "$CC" c c17
    planted implementation 'static inline int mti_bad(int N) { return N; }' check_macros_before "$CC" c c11
    case $("$CC" --version) in
    *clang*) ;; # does not check this
    *) planted implementation \
        'int mt_bad(int n); int mt_bad(int n) { int x; if (n > 3) x = n; return n > 2 ? x : 0; }' \
        check_optimized "$CC" c c99 -O1 ;;
    esac
}

check_planted() { "planted_$1" | fail_on_output; }

# ---- everything ----------------------------------------------------------------------------------------------------

check_text() {
    check "nothing unfinished" check_unfinished
    check "functions of at most 70 lines" check_function_length
    check "includes go down only" check_floors
    check "no header uses a private name of another one" check_private
    check "no exit, abort, assert or output to stdout" check_calls
    check "malloc on the ground floor only" check_allocation
    check "macros are MT_, MTI_ or MEGATRON_" check_macros
    check "functions, types, tags and constants are mt_ or MT_ (inside the implementation also mti_)" check_names
}

# check_compiler COMPILER LANGUAGE STANDARDS...
check_compiler() {
    compiler=$1 language=$2
    shift 2
    if ! have_command "$compiler"; then
        leave_out "$compiler: not here, its dialects were not checked"
        return
    fi
    check "$compiler -std=$1: each header alone, twice, declarations and implementation" \
        check_dialect "$compiler" "$language" "$1"
    for standard in "$@"; do
        [ "$standard" = "$1" ] ||
            check "$compiler -std=$standard: the implementation" check_top late "$compiler" "$language" "$standard"
    done
    for gemm in dnnl:MT_USE_ONEDNN openblas:MT_USE_CBLAS; do
        have_package "lib${gemm%%:*}-dev" || continue
        check "$compiler -std=$1 with ${gemm##*:}: the implementation" \
            check_top implementation "$compiler" "$language" "$1" "-D${gemm##*:}"
    done
    case $compiler in
    gcc) if in_full; then set -- -O1; else set --; fi ;; # -O2 and -O3: the program of README.md
    g++) if in_full; then set -- -O3; else set --; fi ;;
    *) set -- ;; # has no further warnings
    esac
    [ $# -eq 0 ] || check "$compiler with optimization: $*" check_optimized "$compiler" "$language" "$standard" "$@"
    if [ "$language" = c ]; then
        set -- c11 complex.h tgmath.h
        check "$compiler -std=c99 after tgmath.h, complex.h and the usual macros: the implementation" \
            check_macros_before "$compiler" c c99 tgmath.h complex.h
    else
        set -- c++11
    fi
    check "$compiler -std=$1 after ${2:+$2, $3 and }the usual macros: the implementation" \
        check_macros_before "$compiler" "$language" "$@"
    [ "$language" = c ] || return 0
    check "$compiler -Wall -Wextra: the commands of README.md at$(in_full && echo ' -O2 and') -O3" \
        check_readme "$compiler"
    check "$compiler: the examples in strict C99 and C11" check_examples "$compiler"
    check "$compiler: exported symbols are mt_, local ones mt_ or mti_, no mutable data" check_symbols "$compiler"
    ! in_full || check "$compiler -fPIC: the same" check_symbols "$compiler" -fPIC
}

# Compiles without the GNU extensions, which are on by default: an example must declare what it uses of POSIX. Without
# the full matrix, only one example compiles the implementation, too.
check_examples() {
    for standard in c99 c11; do
        for example in examples/*.c examples/*/*.c; do
            only=$DECLARATIONS_ONLY
            case $example in examples/train_gpt.c) only= ;; esac
            ! in_full || only=
            # shellcheck disable=SC2086  # a list of flags
            "$1" "-std=$standard" -pedantic -Wall -Wextra -Werror -fsyntax-only $only -I "$H" "$example" || return 1
        done
    done
}

check_toolkit() {
    nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
    if hidden nvcc || [ ! -x "$nvcc" ]; then
        skip "nvcc: no CUDA Toolkit here, nothing was compiled as .cu"
    else
        check "nvcc -Werror all-warnings: each header as .cu, declarations and implementation" check_nvcc
    fi
}

check_programs() {
    check "declarations define no symbols" check_declarations_define_nothing
    check "an earlier include without the implementation takes nothing from it" check_late_symbols
    check "implementation and use compile in separate files" build_c
    check "links and runs: implementation in c, use in c" check_link "$CC" c c
    check "a program without MEGATRON_IMPLEMENTATION does not link" check_no_implementation
    check "the implementation refuses -ffast-math" check_fast_math
    check "links and runs: a program with -ffast-math, the implementation without it" check_fast_math_program
    check "the implementation refuses big-endian machines" check_big_endian
    check "tgmath.h changes no bits" check_tgmath_bits
    if ! have_command "$CXX"; then
        leave_out "$CXX: not here, no program of C and C++ was linked"
        return
    fi
    check "implementation and use compile in separate files as C++" build_cpp
    for pair in "c cpp" "cpp c" "cpp cpp"; do
        # shellcheck disable=SC2086  # two words
        check "links and runs: implementation in ${pair% *}, use in ${pair#* }" check_link "$CXX" $pair
    done
}

# Checks with a sanitizer belong to the full matrix.
check_sanitized() {
    if has_msan; then
        check "ranks as threads read nothing that MemorySanitizer has not seen written" check_msan
    else
        leave_out "MemorySanitizer: clang has none here, no program was run with it"
    fi
    if have_command "$CXX" && has_asan; then
        check "an exception from a single rank reaches the caller, and nothing leaks" check_throws
    else
        leave_out "AddressSanitizer: $CXX has none here, exceptions were not looked at for leaks"
    fi
}

check_family() {
    check_compiler "$1" c c99 c11 c17
    check_compiler "$2" c++ c++11 c++17 c++20
}

check_all_planted() {
    for kind in text names dialects symbols; do
        check "planted faults are found: $kind" check_planted $kind
    done
}

[ $# -gt 0 ] || set -- text gcc clang programs sanitized planted nvcc
for part in "$@"; do
    case $part in
    text) check_text ;;
    gcc) check_family gcc g++ ;;
    clang) check_family clang clang++ ;;
    programs) check_programs ;;
    sanitized) check_sanitized ;;
    planted) check_all_planted ;;
    nvcc) check_toolkit ;;
    *) echo "no part is called $part" >&2; exit 2 ;;
    esac
done
closing_line
[ $failed -eq 0 ]
