/* ---- position ids and token ids, on a GPU ------------------------------------------------------------------------ */

#pragma once
#include "attention_desc.c"

#if MT_HAS_CUDA
extern "C++" {

/* ids[i] = the position of token first + i in its sequence. A thread owns every (grid size)-th id. The kernel uses no
   shared memory and no barrier. */
static __global__ void __launch_bounds__(256)
    mti_position_kernel(int64_t first, int64_t seq, int32_t *ids, int64_t count) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (; i < count; i += step) ids[i] = (int32_t)((first + i) % seq);
}

/* The same for packed documents, in a kernel of its own: the search takes longer than the division. */
static __global__ void __launch_bounds__(256)
    mti_document_position_kernel(mt_attention_desc s, int64_t first, int32_t *ids, int64_t count) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (; i < count; i += step) {
        int64_t b = (first + i) / s.seq;
        ids[i] = (int32_t)mti_document_position(&s, b, first + i - b * s.seq);
    }
}

static mt_status mti_cuda_position_ids(mt_context *ctx, const mt_attention_desc *s, int64_t first_token, int32_t *ids,
                                       int64_t count) {
    if (count == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    if (s->cu_seqlens)
        MT_LAUNCH_KERNEL(mti_document_position_kernel, mti_grid(count, 256), 256, 0, mt_context_stream(ctx), *s,
                         first_token, ids, count);
    else
        MT_LAUNCH_KERNEL(mti_position_kernel, mti_grid(count, 256), 256, 0, mt_context_stream(ctx), first_token, s->seq,
                         ids, count);
    return mt_cuda_launched(ctx, "mt_position_ids");
}

#define MTI_IDS_THREADS 1024

/* Stores the first wrong id in *to, unless there is an error already. One block owns all ids, so that no other kernel
   has to find the first of several errors; each thread owns every blockDim-th id. The first barrier separates
   initialising `first` from its atomicMin, which gives the same index in any order. The second one separates this from
   reading it. */
static __global__ void __launch_bounds__(MTI_IDS_THREADS)
    mti_ids_kernel(const int32_t *ids, int64_t count, int32_t ignore, mt_range_error error, mt_range_error *to) {
    MT_SHARED(unsigned long long, first, 1);
    int64_t mine = count;
    if (threadIdx.x == 0) *first = (unsigned long long)count;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < count; i += 4 * (int64_t)blockDim.x) {
        int32_t id[4];
        MT_DEVICE_UNROLL
        for (int k = 0; k < 4; k++) id[k] = i + k * (int64_t)blockDim.x < count ? ids[i + k * (int64_t)blockDim.x] : 0;
        MT_DEVICE_UNROLL
        for (int k = 3; k >= 0; k--)
            if ((id[k] < 0 || id[k] >= error.limit) && id[k] != ignore && i + k * (int64_t)blockDim.x < mine)
                mine = i + k * (int64_t)blockDim.x;
    }
    if (mine < count) atomicMin(first, (unsigned long long)mine);
    __syncthreads();
    if (threadIdx.x != 0 || *first == (unsigned long long)count || to->found) return;
    error.found = 1;
    error.index = (int64_t)*first;
    error.value = ids[error.index];
    *to = error;
}

static mt_status mti_cuda_ids_check(mt_context *ctx, const int32_t *ids, int64_t count, int32_t ignore,
                                    const mt_range_error *error) {
    if (count == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_ids_kernel, 1, MTI_IDS_THREADS, 0, mt_context_stream(ctx), ids, count, ignore, *error,
                     mt_cuda_range_error(ctx));
    return mt_cuda_launched(ctx, "mt_ids_check");
}

} /* extern "C++" */
#endif
