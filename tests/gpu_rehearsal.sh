#!/bin/sh
# Rehearses tests/gpu.sh without a GPU, with stand-ins for nvcc, nvidia-smi, compute-sanitizer, python3 with PyTorch,
# and for the programs. Whatever goes wrong, the page must come out and say so.
#
#   sh tests/gpu_rehearsal.sh        one line per check, closing line "N passed, N failed, N skipped"
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
engine=${MT_BUILD_DIR:-build}/engine/fast
engine=$(cd "$engine" 2>/dev/null && pwd)
work=$(mktemp -d) || exit 1
check_log=$work/check.log
trap 'rm -rf "$work"' EXIT
begun=
# shellcheck disable=SC2086  # a list of ids
trap '[ -z "$begun" ] || kill $begun 2>/dev/null; exit 1' HUP INT TERM

# ---- stand-ins -------------------------------------------------------------------------------------------------------

# A test program of four cases. STANDIN_HANGS, STANDIN_CRASHES, STANDIN_FAILS and STANDIN_SLOW name the program, or
# "all", with which this is wrong; STANDIN_SHARES_NOT one that leaves out ranks for which there are no GPUs. It adds its
# name to the file $STANDIN_RUNS. When it hangs, it has a child that ignores SIGTERM, adds the child's id to the file
# $STANDIN_CHILD, and says so in the file $STANDIN_HANGING.
make_program() {
    cat >"$work/program.c" <<'END'
#include "mt_harness.h"
#include <signal.h>
#include <unistd.h>
static const char *name;
static int is(const char *what) {
    const char *which = getenv(what);
    return which && (strcmp(which, name) == 0 || strcmp(which, "all") == 0);
}
static void add(const char *to, const char *format, const char *text, int number) {
    FILE *file = getenv(to) ? fopen(getenv(to), "a") : NULL;
    if (!file) return;
    fprintf(file, format, text, number);
    fclose(file);
}
static void test_short(void **state) {
    (void)state;
    if (is("STANDIN_SLOW")) usleep(900000);
    if (is("STANDIN_SHARES_NOT")) printf("      skipped: 2 ranks need 2 GPUs, and there are 1\n");
}
static void test_two(void **state) {
    (void)state;
    if (is("STANDIN_CRASHES")) raise(SIGSEGV);
    if (is("STANDIN_FAILS")) fail_msg("row 2, column 3 is 1, not 2");
    if (!is("STANDIN_HANGS")) return;
    pid_t child = fork();
    if (child == 0) signal(SIGTERM, SIG_IGN);
    else {
        add("STANDIN_CHILD", "%s%d\n", "", (int)child);
        add("STANDIN_HANGING", "%s%d\n", "", (int)child);
    }
    for (;;) pause();
}
static void test_two_more(void **state) { (void)state; }
static void test_three(void **state) {
    (void)state;
    if (is("STANDIN_FAILS")) fail_msg("row 4, column 5 is NaN");
}
int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_short), cmocka_unit_test(test_two),
                                       cmocka_unit_test(test_two_more), cmocka_unit_test(test_three)};
    name = argc && strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : "";
    if (!getenv("MT_TEST_CASE") && !getenv("MT_TEST_LIST")) add("STANDIN_RUNS", "%s\n", name, 0);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
END
    "$CC" -O0 -Wno-format-extra-args -I. -Itests "$work/program.c" -o "$work/program"
}

# nvcc copies $STANDIN_PROGRAMS/NAME or the test program, and links -lNAME when one of its folders has libNAME.so. It
# does not build $STANDIN_BROKEN, and hangs at $STANDIN_STUCK. Programs load the NCCL $STANDIN_NCCL. timeout has no
# clock, so that no program is too slow: it ends a program as soon as that says that it hangs. With STANDIN_CLOCK=yes it
# is the machine's. It waits for ever for $STANDIN_IMMORTAL, a program that no signal ends, and adds its id to the file
# $STANDIN_CHILD.
make_tools() {
    mkdir "$work/bin" "$work/libs" "$work/programs"
    cat >"$work/bin/nvcc" <<'END'
#!/bin/sh
here=$(dirname "$(dirname "$0")") out='' folders='' libraries=''
while [ $# -gt 0 ]; do
    case $1 in
    --help) exit 0 ;;
    --dryrun) exit 0 ;;
    --version) echo "Cuda compilation tools, release ${STANDIN_VERSION:-13.0}, V13.0.48"; exit 0 ;;
    -o) out=$2; shift ;;
    -L*) folders="$folders ${1#-L}" ;;
    -lineinfo | -ldl) ;;
    -l*) libraries="$libraries ${1#-l}" ;;
    esac
    shift
done
for library in $libraries; do
    found=no
    for folder in $folders; do [ ! -e "$folder/lib$library.so" ] || found=yes; done
    [ $found = yes ] || { echo "ld: error: cannot find -l$library"; exit 1; }
done
name=${out##*/}
[ "$name" != "${STANDIN_BROKEN:-}" ] || { echo "tests/$name.cu(3): error: identifier \"x\" is undefined"; exit 2; }
[ "$name" != "${STANDIN_STUCK:-}" ] || { echo $$ >>"$STANDIN_CHILD"; exec sleep 3600; }
rm -f "$out"
if [ -e "${STANDIN_PROGRAMS:-/none}/$name" ]; then cp "$STANDIN_PROGRAMS/$name" "$out"
elif [ -e "$here/programs/$name" ]; then cp "$here/programs/$name" "$out"
else cp "$here/program" "$out"; fi
END
    printf '#!/bin/sh\necho "NVIDIA of a stand-in, sm_90, 1 of them"\n' >"$work/programs/probe"
    cat >"$work/programs/bench_cuda" <<'END'
#!/bin/sh
case $* in
--list) printf 'limits\nmemory\nadd\nattention\ngemm\n'; exit ;;
*"--only ${STANDIN_CRASHES_IN:-none}") kill -SEGV $$ ;;
*"--only ${STANDIN_HANGS_IN:-none}") echo hangs >"$STANDIN_HANGING"; sleep 3600 ;;
esac
echo 'item,name,median,min,max,unit,us,ratio,versus'
case $* in
*limits) echo 'limits,"copy",3000,2990,3010,GB/s,100,,' ;;
*memory)
    echo 'memory,"norm, forward",1500,1490,1510,GB/s,200,0.5,"copy"'
    echo 'memory,"bias, of 1024",2400,2390,2410,GB/s,80,0.8,"copy"' ;;
*attention) echo 'attention,"causal, forward",330,320,340,TFLOP/s,100,0.45,"large GEMM"' ;;
*gemm) echo 'gemm,"h 64, s 16",1,1,1,TFLOP/s,2,0.97,"large GEMM"' ;;
*"--quick --only add") echo 'add,"quick add",2400,2390,2410,GB/s,80,0.8,"copy"' ;;
*add) echo 'add,"add",2400,2390,2410,GB/s,80,0.8,"copy"' ;;
esac
END
    cat >"$work/programs/bench_cuda_order" <<'END'
#!/bin/sh
[ "$*" = "--csv --only attention" ] && echo 'attention,"causal, forward",300,290,310,TFLOP/s,110,0.4,"large GEMM"'
END
    cat >"$work/programs/nccl_version" <<'END'
#!/bin/sh
case $LD_LIBRARY_PATH in */gpu/nccl:*) ;; *) echo "the NCCL that has travelled does not come first"; exit 1 ;; esac
version=${STANDIN_NCCL:-23007}
echo "NCCL $version from ${LD_LIBRARY_PATH%%:*}"
[ "${1:-$version}" = "$version" ] || { echo "not the version that was brought along, $1"; exit 1; }
[ "$version" -ge 23000 ] || { echo "ranks share a GPU from NCCL 2.30 on"; exit 77; }
END
    cat >"$work/bin/ncu" <<'END'
#!/bin/sh
case "$*" in *"--clock-control none "*"bench_cuda --quick --arena 8 --only repeat") ;; *) exit 1 ;; esac
[ "${STANDIN_COUNTERS:-yes}" = yes ] || { echo "==ERROR== Failed to initialize: LibraryNotLoaded"; exit 1; }
cat <<'ROWS'
  mti_flash_forward_kernel<128>(mti_flash) (16, 16, 8)x(128, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Duration                         us       310.50
    Memory Throughput                 %        21.30
    Compute (SM) Throughput           %        61.20
    Registers Per Thread register/thread         255
    Achieved Occupancy                %        12.10
ROWS
END
    cat >"$work/bin/nvidia-smi" <<'END'
#!/bin/sh
case $* in
*driver*) echo '580.1, 81559' ;;
*reasons*) echo '1980, 2619, 41, 310.5, Not Active, Not Active, Not Active' ;;
*) echo '1980, 2619, 41, 310.5' ;;
esac
END
    cat >"$work/bin/timeout" <<END
#!/bin/sh
case "\$*" in
*"/\${STANDIN_IMMORTAL:-none}") setsid sleep 3600 & echo \$! >>"\$STANDIN_CHILD"; wait ;;
esac
[ "\${STANDIN_CLOCK:-no}" = no ] || exec $(command -v timeout) "\$@"
END
    cat >>"$work/bin/timeout" <<'END'
[ "$1" != --foreground ] || shift
[ "$1" != -k ] || shift 2
shift
STANDIN_HANGING=$(dirname "$(dirname "$0")")/hanging.$$ ended=$STANDIN_HANGING.code
export STANDIN_HANGING
("$@"; echo $? >"$ended.new"; mv "$ended.new" "$ended") &
until [ -e "$ended" ] || [ -e "$STANDIN_HANGING" ]; do sleep 0.05; done
[ ! -e "$STANDIN_HANGING" ] || { rm "$STANDIN_HANGING"; exit 124; }
code=$(cat "$ended")
rm "$ended"
exit "$code"
END
    cat >"$work/bin/compute-sanitizer" <<'END'
#!/bin/sh
[ "$2" != racecheck ] || [ "${STANDIN_RACES:-no}" = no ] || {
    echo "========= Error: Race reported between Write access and Read access"; exit 9; }
shift 4
exec "$@"
END
    real=$(command -v python3 || echo false)
    cat >"$work/bin/python3" <<END
#!/bin/sh
case \$* in
*peer_pytorch_cuda.py*) ;;
*) exec $real "\$@" ;;
esac
case \$* in
*--list) echo memory; exit ;;
esac
[ "\${STANDIN_PYTORCH:-yes}" = yes ] || { echo "PyTorch is not installed" >&2; exit 77; }
echo "# PyTorch of a stand-in" >&2
echo 'memory,"norm, forward",1600,1590,1610,GB/s,150,,"torch.compile"'
END
    chmod +x "$work"/bin/* "$work"/programs/*
    echo '#define NCCL_MAJOR 2' >"$work/libs/nccl.h"
    : >"$work/libs/libnccl.so.2"
    : >"$work/libs/libcublasLt.so.13"
}

# Sets where the run NAME leaves its page, its output and its state.
of_run() { page=$work/$1/gpu/out/page.md said=$work/$1.txt folder=$work/$1; }

# become_gpu_sh NAME SETTINGS... -- ARGUMENTS: replaces this shell by tests/gpu.sh with build folder NAME
become_gpu_sh() {
    of_run "$1"
    shift
    words=$#
    while [ $words -gt 0 ]; do
        if [ "$1" = -- ]; then set -- "$@" sh tests/gpu.sh; else set -- "$@" "$1"; fi
        shift
        words=$((words - 1))
    done
    exec env PATH="$work/bin:$PATH" MT_TEST_WITHOUT='' MT_BUILD_DIR="$folder" MT_GPU_LIBS="$work/libs" MT_GPU_LIMIT=20 \
        "$@" >"$said" 2>&1
}

gpu_sh() {
    of_run "$1"
    (become_gpu_sh "$@")
    code=$?
    cat "$said"
}

# A run that takes long begins in the background: begin NAME SETTINGS... -- ARGUMENTS, later ended NAME ID.
begin() { (become_gpu_sh "$@") & }
ended() {
    of_run "$1"
    code=0
    wait "$2" || code=$?
    cat "$said"
}

# ends STATUS LAST_LINE
ends() {
    [ "$code" = "$1" ] && [ "$(tail -n 1 "$said")" = "$2" ] && return
    echo "status $code; not status $1 and: $2"
    return 1
}

# page_has REGEX...: the page has a line that matches each of them
page_has() {
    for regex in "$@"; do
        grep -q -e "$regex" "$page" || { echo "the page does not have: $regex"; return 1; }
    done
}

# ---- rehearsals ------------------------------------------------------------------------------------------------------

all_is_well() {
    gpu_sh well -- --seconds 3000 && ends 0 "57 passed, 0 failed, 0 skipped" || return 1
    page_has '^- GPU: NVIDIA of a stand-in' "^- nccl 2: $work/libs/libnccl.so.2" '^- peer: PyTorch of a stand-in' \
        '^| test_cuda_gemm | passed | .* 4 cases' 'SM clock 1980 to 1980 MHz' \
        '^| memory | norm, forward | 200.0 | 1500 GB/s | 3000 GB/s | 0.50 | .* | torch.compile 150.0 | 0.75 |$' &&
        page_has '^| version | passed | .* NCCL 23007 from ' '^| test_cuda_gpt_nccl | passed | .* 4 cases' \
            '^| causal, forward | 100.0 | 110.0 | 1.10 |$' \
            '^| mti_flash_forward_kernel<128> | 310.50 us | 61.20 % | 21.30 % | 255 | 12.10 % |$' &&
        [ "$(grep -c , "$folder/gpu/out/results.csv")" = 8 ] && runs_in_order &&
        grep '^add,"add"' "$folder/gpu/out/as_it_came.txt" &&
        tar -tzf "$folder/gpu/out/logs.tar.gz" | grep 'logs/test/test_cuda.log' &&
        [ "$(readlink "$folder/gpu/libs/lib/libnccl.so")" = "$work/libs/libnccl.so.2" ]
}

# The additions are the first item of the benchmark. The rest follows PyTorch.
runs_in_order() {
    sed -n 's/^  passed  \([a-z-]*\)  *\([a-z_]*\), .*/\1 \2/p' "$said" | grep -v '^build\|^test\|^nccl\|^sanitize' |
        tr '\n' ' ' >"$work/order"
    cat "$work/order"
    [ "$(cat "$work/order")" = "limits limits bench list bench attention bench add order attention profile attention \
peers list rest memory rest gemm rest-peers memory " ]
}

# One call too many runs nothing. --again forgets what the stage has found. --quick reaches the benchmark.
all_is_done() {
    of_run well
    cp "$page" "$work/before"
    gpu_sh well STANDIN_CRASHES_IN=add STANDIN_PYTORCH=no -- --seconds 3000
    ! grep '^  [a-z]*  *[a-z-]*  *[a-z_]*, ' "$said" || return 1
    sed 1,4d "$work/before" >"$work/old" && sed 1,4d "$page" | diff "$work/old" - || return 1
    gpu_sh well STANDIN_CRASHES_IN=gemm -- --again --quick bench && ends 0 "57 passed, 0 failed, 0 skipped" &&
        page_has '^| add | quick add'
}

much_is_wrong() {
    gpu_sh wrong STANDIN_HANGS=test_cuda_gemm STANDIN_CRASHES=test_cuda_flash STANDIN_FAILS=test_cuda_plain \
        STANDIN_BROKEN=test_cuda_gpt STANDIN_CRASHES_IN=gemm STANDIN_RACES=yes STANDIN_PYTORCH=no MT_TEST_WITHOUT=nccl \
        STANDIN_CHILD="$work/children" -- --seconds 3000
    ends 1 "32 passed, 7 failed, 18 skipped" || return 1
    page_has '^| test_cuda_gemm | hung | .* killed after 20 s; cases that fail alone: 1' \
        '^- test_cuda_gemm, test_two: hung' '^| test_cuda_flash | crashed | .* signal 11 (SEGV)' \
        '^- test_cuda_flash, test_two: crashed' '^| test_cuda_plain | failed | .* cases that fail alone: 2' \
        '^- test_cuda_plain, test_three: failed' '^ *row 2, column 3 is 1, not 2' '^ *row 4, column 5 is NaN' \
        '^- build test_cuda_gpt: failed' '^ *tests/test_cuda_gpt.cu(3): error' \
        '^| test_cuda_gpt | skipped | 0 | test_cuda_gpt is not built' \
        '^| test_cuda_nccl | skipped | 0 | NCCL is not here' \
        '^- nccl: not found' '^| gemm | crashed | .* signal 11 (SEGV)' '^| memory | bias, of 1024 | 80.0 ' \
        '^| memory | skipped | .* PyTorch is not installed' '^ *========= Error: Race' || return 1
    no_child_is_left && grep -F 'Running 1 test(s)' "$folder/gpu/state/test/test_cuda_plain/test_two.log"
}

no_child_is_left() {
    while read -r child; do
        case $(sed 's/.*) //' "/proc/$child/stat" 2>/dev/null) in
        '' | Z*) ;; # it has ended, and maybe nobody has waited for it
        *) echo "process $child is still there"; return 1 ;;
        esac
    done <"$work/children"
    [ -s "$work/children" ]
}

# The tools of the machine are missing, the implementation does not build, and an item of the benchmark hangs.
more_is_wrong() {
    gpu_sh more MT_TEST_WITHOUT="compute-sanitizer nvidia-smi python3" STANDIN_BROKEN=implementation.o --
    ends 1 "30 passed, 1 failed, 23 skipped" || return 1
    page_has '^- build implementation: failed' '^| test_cuda_gemm | skipped | 0 | the implementation is not built' \
        '^| test_cuda_flash | passed' 'no readings by nvidia-smi' '^| list | skipped | 0 | python3 is not here' \
        '^| memcheck.test_cuda_ptx | skipped | 0 | compute-sanitizer is not here' || return 1
    gpu_sh item STANDIN_HANGS_IN=memory -- limits bench rest
    page_has '^| memory | hung | .* killed after 20 s' '^| gemm | h 64, s 16 | 2.0 '
}

# Programs that another machine has built run as they are.
built_elsewhere() {
    gpu_sh elsewhere -- --build sm_90
    [ "$code" = 0 ] && rm "$folder/gpu/test_cuda_gpt" "$folder/gpu/travel/programs.tar.xz" || return 1
    gpu_sh elsewhere STANDIN_BROKEN=test_cuda -- --built build test
    page_has '^| test_cuda | passed' '^| test_cuda_gpt | skipped | 0 | test_cuda_gpt is not built' \
        '^[0-9]* passed, 0 failed,'
}

# A sitting with programs and NCCL that have travelled: the parts that matter most come first, and then the rest.
has_a_sitting() {
    gpu_sh sitting -- --build sm_90 && ends 0 "24 passed, 0 failed, 0 skipped" || return 1
    travels=$folder/gpu/travel
    echo 'machine code' | xz >"$travels/libnccl.so.2.xz" && echo '23007 sm_90' >"$travels/version" || return 1
    mkdir -p "$work/sitting2/gpu" && cp -R "$travels" "$work/sitting2/gpu/travel" || return 1
    gpu_sh sitting2 -- --built --seconds 3000 sitting && ends 0 "57 passed, 0 failed, 0 skipped" || return 1
    [ "$(cat "$folder/gpu/nccl/libnccl.so")" = 'machine code' ] &&
        page_has '^- code: .*sm_90a' '^- NCCL brought along: 23007' \
            '^| version | passed | .* NCCL 23007 from .*gpu/nccl' &&
        sits_in_order || return 1
    echo "exit 1" >"$folder/gpu/test_cuda" # of an older package: it is replaced by that of the next one
    echo 'other machine code' | xz >"$folder/gpu/travel/libnccl.so.2.xz" || return 1
    gpu_sh sitting2 -- --built build
    [ "$(cat "$folder/gpu/nccl/libnccl.so")" = 'other machine code' ] &&
        [ "$(cat "$folder/gpu/test_cuda")" != "exit 1" ]
}

# Programs of a part run at the same time, so their order among each other is not known.
sits_in_order() {
    sed -n 's/^  passed  \([a-z-]*\)  *\([a-z_.]*\), .*/\1 \2/p' "$said" | grep -v '^build' | tr '\n' ' ' >"$work/order"
    cat "$work/order"
    for each in test_cuda test_cuda_custom_block test_cuda_nccl test_cuda_flash; do
        sed 's/ nccl version .*//' "$work/order" | grep "test $each\( \|$\)" >/dev/null || return 1
    done
    ! sed 's/ nccl version .*//' "$work/order" | grep test_cuda_gemm || return 1
    tr '\n' ' ' <"$work/order" | sed 's/.* nccl version/nccl version/; s/sanitize [a-z_.]* //g
        s/ test test_cuda_[a-oq-z].* bench add/ others bench add/' | tee "$work/after"
    [ "$(cat "$work/after")" = "nccl version \
nccl test_cuda_sharing nccl test_cuda_devices_nccl nccl test_cuda_gpt_nccl \
nccl test_cuda_processes nccl test_cuda_nccl limits limits bench list bench attention order attention \
test test_cuda_ptx peers list profile attention others bench add rest memory rest gemm rest-peers memory " ]
}

# With another NCCL than the one that was brought along nothing is believed, and with an old one nothing runs. A program
# whose ranks could not share the GPU has failed.
has_another_nccl() {
    mkdir -p "$work/nccl1/gpu/travel" && echo '23007 sm_90' >"$work/nccl1/gpu/travel/version" || return 1
    gpu_sh nccl1 STANDIN_NCCL=22809 -- --seconds 3000 nccl
    [ "$code" = 1 ] && page_has '^- nccl version: failed' '^ *not the version that was brought along, 23007' \
        '^| test_cuda_nccl | skipped | 0 | there is no NCCL with which ranks share a GPU' || return 1
    gpu_sh nccl2 STANDIN_NCCL=22809 -- --seconds 3000 nccl
    [ "$code" = 0 ] && page_has '^| version | skipped | .* ranks share a GPU from NCCL 2.30 on' \
        '^| test_cuda_gpt_nccl | skipped | 0 | there is no NCCL' || return 1
    gpu_sh nccl3 STANDIN_SHARES_NOT=test_cuda_nccl STANDIN_FAILS=test_cuda_sharing -- --seconds 3000 nccl
    [ "$code" = 1 ] && page_has '^- nccl test_cuda_nccl: failed, the ranks could not share the GPU' \
        '^- test_cuda_sharing, test_two: failed' '^| test_cuda_gpt_nccl | passed'
}

# The machine is taken away in the middle: what has a result is in a file, with rows, and with the log of a failure.
is_taken_away() {
    rm -f "$work/children"
    (become_gpu_sh taken MT_GPU_LIMIT=600 STANDIN_CLOCK=yes STANDIN_CHILD="$work/children" \
        STANDIN_FAILS=test_cuda_flash STANDIN_HANGS=test_cuda_gemm -- --seconds 3000 limits test) &
    pid=$!
    of_run taken
    came=$folder/gpu/out/as_it_came.txt
    wait_for test -s "$work/children" && wait_for grep -q 'test  *test_cuda_flash, ' "$came"
    kill -KILL $pid
    wait $pid
    for group in "$folder/gpu/running"/[0-9]*; do kill -KILL -- "-${group##*/}" 2>/dev/null; done
    cat "$came"
    grep '^limits,"copy",3000' "$came" && grep '^  failed  test       test_cuda_flash, ' "$came" &&
        grep 'row 2, column 3 is 1, not 2' "$came"
}

# A process that SIGKILL does not end costs its own result and 8 s.
is_immortal() {
    ended immortal $immortal
    while read -r child; do kill -KILL "$child" || return 1; done <"$work/ids"
    page_has '^| test_cuda_flash | hung | .* SIGKILL did not end it after 20 s' '^| test_cuda_gemm | passed'
}

# The GPU is not looked for, or does not answer. What was found before stays on the page.
no_probe() {
    gpu_sh probe -- limits && page_has '^| limits | passed' || return 1
    gpu_sh probe STANDIN_BROKEN=probe --
    ends 1 "3 passed, 1 failed, 51 skipped" &&
        page_has '^- build probe: failed, a program that uses CUDA does not compile' '^ *tests/probe.cu(3): error' \
            '^| limits | passed' '^- test test_cuda: not run: a program that uses CUDA' || return 1
    mkdir "$work/silent"
    printf '#!/bin/sh\necho hangs >"$STANDIN_HANGING"\nexec sleep 3600\n' >"$work/silent/probe"
    chmod +x "$work/silent/probe"
    gpu_sh probe STANDIN_PROGRAMS="$work/silent" --
    [ "$code" = 1 ] && page_has '^- build probe: failed, the GPU does not answer' '^| limits | passed' || return 1
    gpu_sh probe -- limits && ! grep probe "$page"
}

# The second command goes on with what the first has not run. The third forgets its stage first. The fourth has another
# nvcc, so it builds again.
time_runs_out() {
    gpu_sh late STANDIN_SLOW=all STANDIN_RUNS="$work/runs" -- --seconds 25 build test limits
    page_has '^- test test_cuda_processes: not run: out of time$' '^- bench: not asked for$' || return 1
    gpu_sh late STANDIN_SLOW=all STANDIN_RUNS="$work/runs" -- --seconds 3000 build test limits
    ends 0 "40 passed, 0 failed, 0 skipped" || return 1
    sort "$work/runs" | uniq -c | awk '$1 != 1 { print "ran again: " $0; wrong = 1 } END { exit wrong || NR != 16 }' &&
        ! grep 'not run: ' "$page" || return 1
    gpu_sh late STANDIN_CRASHES_IN=limits -- --again limits
    page_has '^| limits | crashed' '^| test_cuda | passed' || return 1
    gpu_sh late STANDIN_BROKEN=test_cuda STANDIN_VERSION=13.1 -- build
    page_has '^| test_cuda | failed' '^| test_cuda_gpt | passed' \
        '^- test test_cuda_gpt: not run: its program was built anew$'
}

# A program that is killed because the command has to end is no failure.
time_cuts_a_program() {
    ended cut $cut
    page_has '^- test test_cuda_flash: not run: out of time$' '^[0-9]* passed, 0 failed,'
}

# stopped NAME SETTINGS...: sends SIGTERM as soon as a process has written its id, and waits for the end
stopped() {
    rm -f "$work/children"
    (become_gpu_sh "$@" MT_GPU_LIMIT=600 STANDIN_CLOCK=yes STANDIN_CHILD="$work/children" -- --seconds 3000) &
    pid=$!
    wait_for test -s "$work/children"
    kill -TERM $pid
    code=0
    wait $pid || code=$?
    of_run "$1"
    cat "$said"
    sleep 0.5 # for a process that might still write a result
    [ $code = 143 ] && no_child_is_left
}

is_stopped() {
    stopped test STANDIN_HANGS=test_cuda_gemm &&
        page_has '^| test_cuda_flash | passed' '^- test test_cuda_gemm: not run: stopped by a signal' \
            '^[0-9]* passed, 0 failed, [0-9]* skipped$' || return 1
    stopped build STANDIN_STUCK=test_cuda && page_has '^- build test_cuda: not run: stopped by a signal' &&
        [ ! -e "$folder/gpu/state/build/test_cuda.result" ]
}

# Programs that the engine executes, so the harness and the benchmark print what they print on a GPU. Of the benchmark
# three items run, with tiny shapes. The last one is the training step, which is also a CUDA graph.
with_real_programs() {
    mkdir "$work/real"
    for program in test_cuda_ptx test_cuda_graph; do
        printf '#!/bin/sh\nexec "%s" "$@"\n' "$engine/$program" >"$work/real/$program"
    done
    stages="test"
    if "$engine/bench_cuda" --list >/dev/null 2>&1; then
        cat >"$work/real/bench_cuda" <<END
#!/bin/sh
case \$1 in
--list) "$engine/bench_cuda" --list | grep -x -e limits -e add -e gpt2 ;;
*) exec "$engine/bench_cuda" --tiny "\$@" ;;
esac
END
        stages="test limits bench"
    fi
    chmod +x "$work"/real/*
    # shellcheck disable=SC2086  # a list of stages
    gpu_sh real STANDIN_PROGRAMS="$work/real" MT_GPU_LIMIT=600 -- --seconds 3000 $stages
    [ $code = 0 ] && page_has '^| test_cuda_ptx | passed | .* [1-9][0-9]* cases' \
        '^| test_cuda_graph | passed | .* [1-9][0-9]* cases' || return 1
    [ "$stages" = test ] || page_has '^| limits | .* | [0-9.]* [TG]B/s ' '^| add | .* GB/s' \
        '^| gpt2 | .*, step as a graph | '
}

# The longest prefix counts; 10 % beside the range are as predicted; the fastest peer counts.
compares() {
    cat >"$work/predictions" <<'END'
norm,"norm",0.1,0.2,"not the longest"
norm,"norm, h 8",0.40,0.50,"a note, with a comma"
norm,"bias",0.40,0.50,""
norm,"gelu",0.40,0.50,""
norm,"cached",2,9,""
add,"norm",0.1,0.2,"of another item"
END
    cat >"$work/rows" <<'END'
norm,"norm, h 8, forward",900,1,1,GB/s,10,0.45,"copy"
norm,"norm, h 8, backward",1080,1,1,GB/s,10,0.54,"copy"
norm,"norm, h 8, wide",1120,1,1,GB/s,10,0.56,"copy"
norm,"bias",700,1,1,GB/s,10,0.35,"copy"
norm,"gelu",700,1,1,GB/s,10,,""
norm,"norm, h 8, forward, host",5,1,1,us,5,0.5,"its time on the GPU, above"
norm,"norm, h 8, forward, launches",2,2,2,launches,2,,""
norm,"cached",2000,1,1,GB/s,10,10,"copy"
END
    cat >"$work/peers" <<'END'
norm,"norm, h 8, forward",1,1,1,GB/s,30,,"eager"
norm,"norm, h 8, forward",1,1,1,GB/s,20,,"compiled"
norm,"softmax",1,1,1,GB/s,20,,"compiled"
END
    awk -f tests/gpu_kernels.awk part=predictions "$work/predictions" part=peers "$work/peers" \
        part=ours "$work/rows" | cut -d '|' -f 3,6- | tee "$work/table"
    diff - "$work/table" <<'END'
 norm, h 8, forward | 2000 GB/s | 0.45 | 0.40 to 0.50 | as predicted | eager 30.0, compiled 20.0 | 2.00 |
 norm, h 8, backward | 2000 GB/s | 0.54 | 0.40 to 0.50 | as predicted | - | - |
 norm, h 8, wide | 2000 GB/s | 0.56 | 0.40 to 0.50 | better | - | - |
 bias | 2000 GB/s | 0.35 | 0.40 to 0.50 | worse | - | - |
 gelu | - | - | 0.40 to 0.50 | missing | - | - |
 norm, h 8, forward, host | 10 us | 0.50 | - | - | - | - |
 norm, h 8, forward, launches | - | - | - | - | - | - |
 cached | 200 GB/s | 10.00 | 2 to 9 | better | - | - |
 norm ... | | | 0.1 to 0.2 | missing | | |
 norm ... | | | 0.1 to 0.2 | missing | | |
 softmax | - | - | - | - | compiled 20.0 | - |

Against the predictions: 2 as predicted, 2 better, 1 worse, 3 missing
END
}

# logs STATE STAGE NUMBER: makes logs of 4 KB that no program compresses
logs() {
    mkdir -p "$1/$2"
    head -c $((4096 * $3)) /dev/urandom | (cd "$1/$2" && split -a 4 -b 4096 --additional-suffix=.log - noise)
}

# Long logs are cut, and of too many logs only those of failures are packed.
packs() {
    for each in build test sanitize limits bench peers rest rest-peers; do
        mkdir -p "$work/long/$each"
        : >"$work/long/$each/items"
    done
    head -c 2000000 /dev/urandom >"$work/long/build/one.log"
    echo 'failed|1|exit status 1' >"$work/long/build/one.result"
    echo 'passed|1|' >"$work/long/build/two.result"
    echo well >"$work/long/build/two.log"
    is_packed 300000 && grep -a 'cut: 2000000 bytes' "$work/packed/logs/build/one.log" &&
        [ -e "$work/packed/logs/build/two.log" ] || return 1
    logs "$work/long" rest 100
    is_packed 300000 && grep -a 'cut: 2000000 bytes' "$work/packed/logs/build/one.log" &&
        grep passed "$work/packed/logs/build/two.result" && [ -s "$work/packed/logs/page.md" ] &&
        [ ! -e "$work/packed/logs/build/two.log" ] && [ ! -e "$work/packed/logs/rest/noiseaaaa.log" ]
}

# is_packed BYTES: unpacks the logs, too
is_packed() {
    sh tests/gpu_page.sh "$work/long" "$work/out" "$1" || return 1
    rm -rf "$work/packed"
    mkdir "$work/packed"
    [ "$(wc -c <"$work/out/logs.tar.gz")" -le "$1" ] && tar -C "$work/packed" -xzf "$work/out/logs.tar.gz"
}

# The first folder has no headers, the second those of another version, the third all, and the fourth is too late.
# Without the third, the first counts.
finds_headers() {
    nccl=$work/nccl
    mkdir -p "$nccl/one" "$nccl/two/lib" "$nccl/two/include" "$nccl/three/lib" "$nccl/three/include" "$nccl/into/lib" \
        "$nccl/into/include"
    : >"$nccl/one/libnccl.so" && : >"$nccl/two/lib/libnccl.so.2.27.3" && : >"$nccl/three/lib/libnccl.so.2"
    version_of_headers 2 19 3 >"$nccl/two/include/nccl.h"
    version_of_headers 2 27 3 >"$nccl/three/include/nccl.h"
    printf '%s\n' "$nccl/one" "$nccl/two/lib" "$nccl/none" '' "$nccl/three/lib" "$work/libs" >"$nccl/into/folders"
    [ "$(link_cuda_library "$nccl/into" nccl nccl)" = "nccl 2.27.3: $nccl/three/lib/libnccl.so.2" ] &&
        [ "$(readlink "$nccl/into/lib/libnccl.so")" = "$nccl/three/lib/libnccl.so.2" ] &&
        grep 'MINOR 27' "$nccl/into/include/nccl.h" || return 1
    rm -rf "$nccl/into/lib"/* "$nccl/into/include"/*
    printf '%s\n' "$nccl/one" "$nccl/two/lib" >"$nccl/into/folders"
    [ "$(link_cuda_library "$nccl/into" nccl nccl)" = "nccl of unknown version: $nccl/one/libnccl.so" ]
}

version_of_headers() { printf '#define NCCL_MAJOR %s\n#define NCCL_MINOR %s\n#define NCCL_PATCH %s\n' "$@"; }

builds() {
    gpu_sh builds -- --build && ends 0 "18 passed, 0 failed, 0 skipped" || return 1
    gpu_sh builds MT_TEST_WITHOUT=nccl -- --build "$work/program" && ends 0 "14 passed, 0 failed, 3 skipped" || return 1
    gpu_sh builds STANDIN_BROKEN=test_cuda_gpt -- --build
    ends 1 "17 passed, 1 failed, 0 skipped"
}

# Of a library with code for two architectures and PTX, only the code of the one that is asked for is left.
slims() {
    python3 - "$work/fat.so" <<'END' || return 1
import struct, sys
code = {(2, 80): b"A" * 64, (2, 90): b"B" * 72, (1, 90): b"C" * 80}
inside = b"".join(struct.pack("<HHIQ12xI32x", kind, 0, 64, len(d), arch) + d for (kind, arch), d in code.items())
fatbin = b"x" * 8 + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(inside)) + inside
names = b"\0.nv_fatbin\0.shstrtab\0"
head = b"\x7fELF\x02\x01".ljust(40, b"\0")
head += struct.pack("<QIHHHHHH", 64 + len(fatbin) + len(names), 0, 64, 0, 0, 64, 3, 2)
section = lambda name, at, size: struct.pack("<IIQQQQ24x", name, 1, 0, 0, at, size)
open(sys.argv[1], "wb").write(head + fatbin + names + section(0, 0, 0) + section(1, 64, len(fatbin)) +
                              section(12, 64 + len(fatbin), len(names)))
END
    python3 tests/gpu_nccl.py --slim "$work/fat.so" "$work/slim.so" 90 &&
        [ "$(tr -cd ABC <"$work/slim.so")" = "$(tr -cd B <"$work/fat.so")" ] &&
        [ "$(wc -c <"$work/slim.so")" = "$(wc -c <"$work/fat.so")" ] &&
        ! python3 tests/gpu_nccl.py --slim "$work/fat.so" "$work/none.so" 75
}

no_gpu() {
    mkdir "$work/none"
    printf '#!/bin/sh\nexit 1\n' >"$work/none/probe"
    chmod +x "$work/none/probe"
    gpu_sh none STANDIN_PROGRAMS="$work/none" --
    ends 77 "no GPU: CUDA finds none; nothing was tested"
}

make_program || exit 1
make_tools
begin cut STANDIN_HANGS=test_cuda_flash STANDIN_CLOCK=yes MT_GPU_LIMIT=60 -- --seconds 40 test
cut=$!
begin immortal STANDIN_IMMORTAL=test_cuda_flash STANDIN_CHILD="$work/ids" -- --seconds 3000 test
immortal=$! begun="$cut $!"
check "everything passes; NCCL is only libnccl.so.2 in a folder; PyTorch's times stand beside" all_is_well
check "nothing is left to run; --again and --quick" all_is_done
check "a hang, crashes, failures, a race; a program that does not build; no NCCL; no PyTorch" much_is_wrong
check "programs that another machine has built" built_elsewhere
check "a sitting, with programs and NCCL that have travelled" has_a_sitting
check "an NCCL of another version; ranks that do not share the GPU" has_another_nccl
check "the machine is taken away" is_taken_away
check "no tools, no implementation; an item of the benchmark hangs" more_is_wrong
check "no program compiles; the GPU does not answer" no_probe
check "the time runs out, and the next command goes on" time_runs_out
check "a process that no signal ends" is_immortal
check "the end of the time kills a program" time_cuts_a_program
check "a signal stops it: the page says what has run, and no process is left" is_stopped
if [ -x "$engine/test_cuda_ptx" ]; then
    check "programs on the engine" with_real_programs
else
    leave_out "gpu.sh with programs on the engine: they are not built"
fi
check "rows beside predictions and peers" compares
check "logs above the limit" packs
check "a library without headers, and one with them in a later folder" finds_headers
check "--build builds all programs, with and without NCCL" builds
check "without a GPU" no_gpu
if have_command python3; then check "a library with the code of one architecture" slims
else leave_out "gpu_nccl.py: python3 is not here"; fi
closing_line
[ "$failed" -eq 0 ]
