/* ---- the decision of a step, on a GPU ---------------------------------------------------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

/* One thread decides. */
static __global__ void __launch_bounds__(32)
    mti_step_kernel(const float *sums, const float *loss, mt_step_values *values) {
    if (threadIdx.x == 0) mti_step_decide(sums[0], sums[1], loss ? *loss : 0.0f, values);
}

static mt_status mti_cuda_step_decide(mt_context *ctx, mt_tensor sums, mt_tensor loss, mt_step_values *values) {
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_step_kernel, 1, 32, 0, mt_context_stream(ctx), (const float *)sums.data,
                     (const float *)loss.data, values);
    return mt_cuda_launched(ctx, "mt_step_decide");
}

} /* extern "C++" */
#endif
