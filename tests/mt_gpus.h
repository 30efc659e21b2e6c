/* mt_gpus.h - for tests of ranks over NCCL: the GPU of each rank. From NCCL 2.30 on, ranks may share a GPU where
   NCCL_MULTI_RANK_GPU_ENABLE=1 is in the environment; then one GPU is enough for all cases. */
#ifndef MT_GPUS_H
#define MT_GPUS_H

#include "mt_test.h"

#include <nccl.h>

static inline int test_may_share(void) {
    const char *asked = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    int version = 0;
    return asked && strcmp(asked, "1") == 0 && ncclGetVersion(&version) == ncclSuccess && version >= 23000;
}

/* Are there enough of `gpus` GPUs for this number of ranks? */
static inline int test_enough_gpus(int ranks, int gpus) { return ranks <= gpus || (gpus > 0 && test_may_share()); }

/* The number of the GPU of this rank */
static inline int test_gpu_of(int rank) {
    int gpus = mt_device_count(MT_DEVICE_CUDA);
    return gpus > 0 && test_may_share() ? rank % gpus : rank;
}

/* Creates the communicators of a program that has all ranks in one thread, on the ranks' GPUs. Those that share a GPU
   have at most 4 thread blocks in a collective, so that the blocks of 8 ranks are on it at the same time. */
static inline void test_make_callers(ncclComm_t *comms, int ranks, int blocking) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclResult_t state;
    ncclUniqueId id;
    config.blocking = blocking;
    if (test_may_share()) config.maxCTAs = 4;
    assert_int_equal(ncclGetUniqueId(&id), ncclSuccess);
    ncclGroupStart();
    for (int r = 0; r < ranks; r++) {
        assert_int_equal(cudaSetDevice(test_gpu_of(r)), cudaSuccess);
        ncclCommInitRankConfig(&comms[r], ranks, id, r, &config);
    }
    assert_int_equal(ncclGroupEnd(), blocking ? ncclSuccess : ncclInProgress);
    for (int r = 0; r < ranks; r++) {
        while (ncclCommGetAsyncError(comms[r], &state) == ncclSuccess && state == ncclInProgress) continue;
        assert_int_equal(state, ncclSuccess);
    }
    assert_int_equal(cudaSetDevice(0), cudaSuccess);
}

#endif
