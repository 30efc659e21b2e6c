#!/bin/sh
# shellcheck disable=SC2317  # check calls functions
# Runs test programs as 64-bit Arm programs: cross-compiled with the flags of the README, in QEMU's user mode. They test
# the vector code for NEON, where a register holds four floats, and results with fused multiply-adds, which gcc makes
# for this processor without a flag. QEMU does not reorder memory accesses as an Arm processor may, so a barrier that
# is missing is not found.
#
#   sh tests/aarch64.sh [TEST...]      one line per program, closing line "N passed, N failed, N skipped"
#
# TEST is the name of a program, such as test_gemm. By default those below run, without the cases that take longest
# here. With MT_TEST_ALL=1 all programs in tests/ run, with all their cases.
set -u
cd "$(dirname "$0")/.." || exit 1
# shellcheck source=tests/packages.sh
. tests/packages.sh
# shellcheck source=tests/report.sh
. tests/report.sh
build=${MT_BUILD_DIR:-build}/aarch64
mkdir -p "$build" || exit 1
build=$(cd "$build" && pwd)
check_log=$build/check.log check_lines=40
compiler=aarch64-linux-gnu-gcc
packages="gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
programs="test_kernels_16bit test_gemm test_attention test_cross_attention test_sample test_golden test_kernels
    test_comm test_parallel test_train"

# The cases of a program that take longest, except in the full matrix.
slow_cases() {
    in_full || case $1 in
    test_golden)
        echo test_gpt2 test_gpt2_untied test_llama test_bert test_window_packed test_alibi_bias test_mask_packed \
            test_llama_tied test_bert_post_ln test_bert_pre_ln
        ;;
    test_attention) echo test_threads test_threads_bias ;;
    test_kernels)
        echo test_attention test_attention_dropout test_attention_layouts test_cross_entropy \
            test_cross_entropy_large_logits
        ;;
    test_sample) echo test_draws_of_every_split test_kept_tokens_are_transformers test_texts_of_a_gpt ;;
    test_train)
        echo test_gpt2_any_split test_activations test_invariant_any_split test_invariant_over_context_ranks \
            test_invariant_in_bf16 test_absurd_flags test_sampling_fits_into_the_plan test_loading_fits_into_the_plan \
            test_stuck_rank_ends_the_process
        ;;
    esac
}

implementation_builds() { "$compiler" -O3 -I. -c tests/package/implementation.c -o "$build/implementation.o"; }

# Programs that use private names compile the implementation themselves.
runs() {
    if grep -q 'mti_\|MTI_' "tests/$1.c"; then
        set -- "$1" -O3
    else
        # shellcheck disable=SC2086  # a list of flags
        set -- "$1" -O1 $DECLARATIONS_ONLY "$build/implementation.o"
    fi
    name=$1
    shift
    "$compiler" -g1 -I. -Itests "tests/$name.c" "$@" -o "$build/$name" -lm -lpthread || return 1
    MT_TEST_EXCEPT=$(slow_cases "$name") qemu-aarch64 -L /usr/aarch64-linux-gnu "$build/$name"
}

case $(uname -m) in
aarch64 | arm64)
    skip "aarch64: this processor is one, which the other tests run on"
    closing_line
    exit 0
    ;;
esac
# shellcheck disable=SC2086  # a list of packages
ensure_packages $packages
# shellcheck disable=SC2086
if [ -n "$(missing_packages $packages)" ]; then
    leave_out "aarch64: no cross compiler, its libc or qemu-aarch64 here ($packages)"
else
    if [ $# -eq 0 ]; then
        # shellcheck disable=SC2046,SC2086  # a list of names
        if in_full; then set -- $(basename -s .c -a tests/test_*.c); else set -- $programs; fi
    fi
    check "the implementation builds" implementation_builds
    for program in "$@"; do check "$program" runs "$program"; done
fi
closing_line
exit $((failed > 0))
