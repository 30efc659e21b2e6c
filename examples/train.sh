#!/bin/sh
# Compiles examples/train_gpt.c and runs it with the arguments of this script: by default it trains a small GPT on 2 CPU
# ranks. A missing C compiler or oneDNN (a fast GEMM) is installed first, when the script runs as root or sudo needs no
# password.
#
#   sh examples/train.sh                    the full run
#   sh examples/train.sh --steps 20         any option of train_gpt; --help lists them
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=tests/packages.sh
. tests/packages.sh

ensure_compiler() {
    have_library libc stdio.h m || ensure_packages build-essential
    have_library libc stdio.h m || { echo "train.sh: no working C compiler ($CC)" >&2; exit 1; }
}

gemm_flags() {
    if have_library dnnl dnnl.h dnnl; then
        echo "-DMT_USE_ONEDNN -ldnnl"
    else
        echo "train.sh: without oneDNN (Debian: libdnnl-dev), the built-in GEMM is used" >&2
    fi
}

ensure_compiler
ensure_packages libdnnl-dev
out=${MT_BUILD_DIR:-build}
flags=$(gemm_flags)
mkdir -p "$out"
set -x
# shellcheck disable=SC2086  # a list of flags
"$CC" -O3 -march=native -I. examples/train_gpt.c -o "$out/train_gpt" $flags -lm -lpthread
exec "$out/train_gpt" "$@"
