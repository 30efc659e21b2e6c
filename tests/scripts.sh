#!/bin/sh
# Checks the scripts that a user runs by hand. What they need and this machine lacks has stand-ins: nvcc, and programs for a GPU.
#
#   sh tests/scripts.sh PART...        one line per check, closing line "N passed, N failed, N skipped"
#
# Parts: gpu, tests/gpu.sh with and without NCCL.
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
work=$(mktemp -d) || exit 1
check_log=$work/check.log
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# nvcc's stand-in writes programs that do nothing. With STANDIN_NCCL=no it has no NCCL. The program $STANDIN_FAILS does not build.
make_nvcc() {
    cat >"$work/nvcc" <<'END'
#!/bin/sh
out='' nccl=no
while [ $# -gt 0 ]; do
    case $1 in
    --help) exit 0 ;;
    -o) out=$2; shift ;;
    -lnccl | -DMT_USE_NCCL) nccl=yes ;;
    esac
    shift
done
[ $nccl = no ] || [ "${STANDIN_NCCL:-yes}" = yes ] || { echo "cannot find -lnccl"; exit 1; }
[ "${out##*/}" != "${STANDIN_FAILS:-}" ] || { echo "does not build"; exit 1; }
echo '#!/bin/sh' >"$out"
chmod +x "$out"
END
    chmod +x "$work/nvcc"
}

# with_standins SETTINGS... COMMAND
with_standins() {
    env PATH="$work:$PATH" MT_TEST_WITHOUT='' MT_BUILD_DIR="$work" "$@"
}

# gpu_says STATUS LAST_LINE SETTINGS...: what tests/gpu.sh ends with, built and run, or only built
gpu_says() {
    status=$1 last=$2 code=0
    shift 2
    for only in "" --build; do
        with_standins "$@" sh tests/gpu.sh $only >"$work/says" 2>&1 || code=$?
        cat "$work/says"
        if [ "$code" != "$status" ] || [ "$(tail -n 1 "$work/says")" != "$last" ]; then
            echo "status $code; not status $status and: $last"
            return 1
        fi
        code=0
    done
}

without_nccl() {
    gpu_says 0 "9 passed, 0 failed, 2 skipped" "$@" || return 1
    [ "$(grep -c '^  skip  .*NCCL' "$work/says")" = 2 ] && ! grep test_cuda_nccl "$work/says"
}

gpu() {
    make_nvcc
    check "tests/gpu.sh with NCCL" gpu_says 0 "11 passed, 0 failed, 0 skipped" STANDIN_NCCL=yes
    check "without NCCL it tests the rest, and says what it leaves out" without_nccl STANDIN_NCCL=no
    check "a program that does not build is a failure" gpu_says 1 "10 passed, 1 failed, 0 skipped" STANDIN_FAILS=test_cuda_gpt
}

[ $# -gt 0 ] || { sed -n '4,6s/^# *//p' "$0" >&2; exit 2; }
for part in "$@"; do $part; done
closing_line
[ "$failed" -eq 0 ]
