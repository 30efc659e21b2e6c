/* ---- positions and lengths of a key/value cache, on a GPU -------------------------------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

/* Each thread owns every (grid size)-th id. The kernel uses no shared memory and no barrier. */
static __global__ void __launch_bounds__(256)
    mti_kv_position_kernel(int64_t max_seq, const int32_t *lengths, int64_t batch, int64_t seq, int32_t *ids) {
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (; t < batch * seq; t += step) {
        int64_t b = mt_divide(t, seq);
        ids[t] = mti_kv_position(max_seq, lengths, b, t - b * seq);
    }
}

/* The same for the lengths of the sequences. */
static __global__ void __launch_bounds__(256)
    mti_kv_advance_kernel(int64_t max_seq, int64_t batch, int64_t seq, const int32_t *added, int32_t *lengths) {
    int64_t b = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (; b < batch; b += step) lengths[b] = mti_kv_advanced(max_seq, seq, added, lengths, b);
}

static mt_status mti_cuda_kv_positions(mt_context *ctx, const mt_kv_cache *cache, int64_t batch, int64_t seq,
                                       int32_t *ids) {
    if (batch == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_kv_position_kernel, mti_grid(batch * seq, 256), 256, 0, mt_context_stream(ctx), cache->max_seq,
                     cache->lengths, batch, seq, ids);
    return mt_cuda_launched(ctx, "mt_kv_cache_positions");
}

static mt_status mti_cuda_kv_advance(mt_context *ctx, int64_t max_seq, int64_t batch, int64_t seq, const int32_t *added,
                                     int32_t *lengths) {
    if (batch == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_kv_advance_kernel, mti_grid(batch, 256), 256, 0, mt_context_stream(ctx), max_seq, batch, seq,
                     added, lengths);
    return mt_cuda_launched(ctx, "mt_kv_cache_advance");
}

} /* extern "C++" */
#endif
