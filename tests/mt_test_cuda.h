/* mt_test_cuda.h - a context on the CPU and one on the GPU, for tests that compare the two. */

#ifndef MT_TEST_CUDA_H
#define MT_TEST_CUDA_H

#include "mt_test.h"

static mt_context *cpu, *gpu;

#define OK(call) ASSERT_STATUS(gpu, MT_SUCCESS, call)

static int open_contexts(void **state) {
    mt_context_desc where;
    (void)state;
    memset(&where, 0, sizeof where);
    where.arena_bytes = (size_t)64 << 20;
    OK(mt_context_create(NULL, &where, &cpu));
    where.device = MT_DEVICE_CUDA;
    return mt_context_create(NULL, &where, &gpu) == MT_SUCCESS ? 0 : 1;
}

static int close_contexts(void **state) {
    (void)state;
    mt_context_destroy(gpu);
    mt_context_destroy(cpu);
    return 0;
}

#endif /* MT_TEST_CUDA_H */
