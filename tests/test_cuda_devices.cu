/* test_cuda_devices.cu - tests several GPUs in one process: contexts of one thread on two GPUs, ranks on two GPUs
   without NCCL, and the scratch memory of calls on the second stream.
     On GPUs:       nvcc -std=c++17 -O2 -arch=native -I. tests/test_cuda_devices.cu -lcublasLt  (skips tests for two)
     Without GPUs:  the engine in tests/engine/ runs the same file on a CPU. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test.h"

#define WANT_TWO_GPUS()                                                                                                \
    if (mt_device_count(MT_DEVICE_CUDA) < 2) skip()

static mt_context_desc on_gpu(int ordinal) {
    mt_context_desc d;
    memset(&d, 0, sizeof d);
    d.device = MT_DEVICE_CUDA;
    d.arena_bytes = 1 << 20;
    d.ordinal = ordinal;
    return d;
}

static void launch(mt_rank_function f, void *user) {
    mt_launch_desc d;
    memset(&d, 0, sizeof d);
    d.ranks = 2;
    d.no_pinning = 1;
    d.timeout_s = TEST_NEVER_OVER;
    assert_int_equal(mt_launch(&d, f, user), MT_SUCCESS);
}

/* One thread with two contexts: each context uses the memory and the streams of its own GPU, whichever context was used
   last. */
static void test_two_contexts(void **state) {
    mt_context *ctx[2];
    void *memory[2];
    float back[8];
    (void)state;
    WANT_TWO_GPUS();
    for (int i = 0; i < 2; i++) {
        mt_context_desc d = on_gpu(i);
        ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx[i]));
    }
    for (int i = 0; i < 2; i++) {
        cudaPointerAttributes where;
        ASSERT_STATUS(ctx[i], MT_SUCCESS, mt_context_alloc(ctx[i], 4096, &memory[i]));
        assert_int_equal(cudaPointerGetAttributes(&where, memory[i]), cudaSuccess);
        assert_int_equal(where.device, i);
    }
    for (int i = 0; i < 2; i++) {
        mt_tensor x = mt_tensor_f32((const float *)memory[i], 2, 4);
        ASSERT_STATUS(ctx[i], MT_SUCCESS, mt_fill(ctx[i], x, (float)(i + 1)));
        ASSERT_STATUS(ctx[i], MT_SUCCESS,
                      mt_gemm(ctx[i], MT_NO_TRANS, MT_TRANS, 1.0f, x, x, 0.0f,
                              mt_tensor_f32((const float *)memory[i] + 64, 2, 2)));
        ASSERT_STATUS(ctx[i], MT_SUCCESS,
                      mt_download(ctx[i], mt_tensor_f32((const float *)memory[i] + 64, 2, 2), back));
        for (int j = 0; j < 4; j++) assert_true(back[j] == 4.0f * (float)((i + 1) * (i + 1)));
    }
    for (int i = 0; i < 2; i++) {
        mt_context_free(ctx[i], memory[i], 4096);
        assert_int_equal(mt_context_allocated(ctx[i]) % 4096, (size_t)0); /* the workspace of cuBLASLt */
        mt_context_destroy(ctx[i]);
    }
}

/* A CUDA error that the program has handled is not reported by the next call. */
static void test_errors_do_not_stay(void **state) {
    mt_context_desc d = on_gpu(0);
    mt_context *ctx;
    mt_tensor x;
    void *none = (void *)1;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_tensor(ctx, MT_F32, 3, 5, &x));
    ASSERT_STATUS(ctx, MT_ERR_MEMORY, mt_context_alloc(ctx, (size_t)1 << 46, &none));
    assert_null(none);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_fill(ctx, x, 1.0f));
    assert_int_not_equal(cudaMalloc(&none, (size_t)1 << 46), cudaSuccess); /* an error of the program's own call */
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_fill(ctx, x, 1.0f));
    mt_context_destroy(ctx);
}

/* The kernel that sums reads the buffers of a rank on another GPU. */
static mt_status peers_rank(mt_comm *world, void *user) {
    mt_context_desc d = on_gpu(mt_comm_rank(world));
    mt_context *ctx;
    mt_tensor x;
    float back[100];
    (void)user;
    MT_TRY(mt_context_create(world, &d, &ctx));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, 100, &x));
    for (int round = 0; round < 2; round++) {
        MT_TRY(mt_fill(ctx, x, 1.0f + (float)mt_comm_rank(world)));
        MT_TRY(mt_all_reduce(ctx, world, x.data, x.data, 100, MT_F32, MT_SUM));
        MT_TRY(mt_download(ctx, x, back));
        for (int i = 0; i < 100; i++) CHECK(back[i] == 3.0f);
    }
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

static void test_peers(void **state) {
    (void)state;
    WANT_TWO_GPUS();
    launch(peers_rank, NULL);
}

/* Arena memory that a collective on the second stream uses is not reused before the collective is complete. */
static mt_status scratch_rank(mt_comm *world, void *user) {
    int rank = mt_comm_rank(world);
    mt_context_desc d = on_gpu(rank % mt_device_count(MT_DEVICE_CUDA));
    mt_context *ctx;
    mt_comm *comm;
    mt_tensor x, y, z;
    float back[2048];
    (void)user;
    MT_TRY(mt_context_create(world, &d, &ctx));
    MT_TRY(mt_comm_create_for(ctx, world, &comm));
    for (int kind = 0; kind < 2; kind++) {
        size_t mark = mt_arena_mark(ctx), taken;
        MT_TRY(mt_arena_tensor(ctx, MT_F32, 4, 256, &x));
        MT_TRY(mt_arena_tensor(ctx, MT_F32, 4, 512, &y));
        MT_TRY(mt_fill(ctx, x, (float)(rank + 1)));
        MT_TRY(mt_context_synchronize(ctx));
        MT_TRY(mt_overlap_begin(ctx, comm, MT_STREAM_SECOND));
        MT_TRY(mt_overlap_end(ctx, 0,
                              kind ? mt_gather_from_tensor_region(ctx, comm, x, y)
                                   : mt_all_reduce(ctx, comm, x.data, y.data, 1024, MT_F32, MT_MAX)));
        taken = mt_arena_mark(ctx);
        MT_TRY(mt_arena_tensor(ctx, MT_F32, 16, 1024, &z));
        MT_TRY(mt_fill(ctx, z, 99.0f));
        mt_arena_release(ctx, taken);
        MT_TRY(mt_overlap_wait_all(ctx));
        MT_TRY(mt_download(ctx, kind ? y : mt_tensor_rows(y, 0, 2), back));
        for (int i = 0; i < (kind ? 2048 : 1024); i++) CHECK(back[i] == (kind ? (float)(i % 512 / 256 + 1) : 2.0f));
        mt_arena_release(ctx, mark);
        CHECK(mt_arena_mark(ctx) == mark);
    }
    mt_comm_destroy(comm);
    mt_context_destroy(ctx);
    return MT_SUCCESS;
}

static void test_scratch_beside(void **state) {
    (void)state;
    launch(scratch_rank, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_contexts),
        cmocka_unit_test(test_errors_do_not_stay),
        cmocka_unit_test(test_peers),
        cmocka_unit_test(test_scratch_beside),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
