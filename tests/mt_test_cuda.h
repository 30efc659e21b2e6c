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

/* Tells the context what nvcc has compiled the kernels for. With 75, attention in 16 bits runs without tensor cores. 0:
   it has not asked yet. */
static inline void set_built_for(int arch) {
    mti_kernels *k = NULL;
    OK(mti_kernels_open(gpu, &k));
    k->built_for = arch;
}

/* Returns the values in f32 in host memory. The caller frees them. */
static inline float *download(mt_context *ctx, mt_tensor t) {
    size_t mark = mt_arena_mark(ctx);
    float *x = (float *)malloc((size_t)(t.rows * t.cols + 1) * sizeof *x);
    mt_tensor f;
    OK(mt_arena_tensor(ctx, MT_F32, t.rows, t.cols, &f));
    OK(mt_convert(ctx, t, f));
    OK(mt_download(ctx, f, x));
    mt_arena_release(ctx, mark);
    return x;
}

/* The values of a tensor on the GPU, in f32 on the CPU. */
static inline mt_tensor widened(mt_tensor t) {
    float *x = download(gpu, t);
    mt_tensor f;
    OK(mt_arena_tensor(cpu, MT_F32, t.rows, t.cols, &f));
    OK(mt_upload(cpu, x, f));
    free(x);
    return f;
}

#endif /* MT_TEST_CUDA_H */
