/* test_cuda_custom_block.cu - trains the block of examples/02_custom_block.c on 1 and 2 GPUs, or on ranks that share
   one, and compares the losses with the CPU's, in f32 and bf16, with and without sequence parallelism; in invariant
   mode the bits are equal. The block uses functions that no block of megatron.h uses on a GPU: shared f and g,
   QK-norm, a gate, an activation without an epilogue.
     On GPUs:       nvcc -std=c++20 -O2 -I. tests/test_cuda_custom_block.cu -lcublasLt
     Without GPUs:  the engine in tests/engine/ runs the same file on a CPU. */

#define CUSTOM_BLOCK_NO_MAIN
#include "examples/02_custom_block.c"

#include "mt_test_ranks.h"

enum { FEW = 2 };

static settings run_on(int cuda, int ranks, mt_dtype dtype, int invariant, int sequence_parallel) {
    settings s;
    memset(&s, 0, sizeof s);
    s.steps = FEW;
    s.cuda = cuda;
    s.dtype = dtype;
    s.invariant = invariant;
    s.sequence_parallel = sequence_parallel;
    test_launch(ranks, rank_main, &s);
    return s;
}

static void check_losses(mt_dtype dtype) {
    settings cpu = run_on(0, 1, dtype, 0, 0);
    assert_true(cpu.loss[0] > 10.0f);
    for (int i = 0; i < 3; i++) {
        int ranks = i == 0 ? 1 : 2, sp = i == 2;
        settings gpu = run_on(1, ranks, dtype, 0, sp);
        for (int step = 0; step < FEW; step++)
            if (!(fabs((double)gpu.loss[step] - (double)cpu.loss[step]) <=
                  (dtype == MT_F32 ? 1e-5 : 5e-3) * (double)cpu.loss[step]))
                fail_msg("%d ranks, %s, sequence parallel %d, step %d: loss %.9g, on the CPU %.9g", ranks,
                         mt_dtype_name(dtype), sp, step, (double)gpu.loss[step], (double)cpu.loss[step]);
    }
}

static void test_losses_are_those_of_the_cpu(void **state) {
    (void)state;
    check_losses(MT_F32);
    check_losses(MT_BF16);
}

static void test_invariant_bits(void **state) {
    settings one = run_on(1, 1, MT_F32, 2, 0), two = run_on(1, 2, MT_F32, 2, 1);
    (void)state;
    assert_true(one.loss[0] > 10.0f);
    assert_memory_equal(two.loss, one.loss, FEW * sizeof *one.loss);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_losses_are_those_of_the_cpu),
        cmocka_unit_test(test_invariant_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
