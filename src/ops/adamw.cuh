/* ---- AdamW, on a GPU --------------------------------------------------------------------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

/* Each operation rounds on its own, as in mti_adamw_row when the compiler contracts nothing. nvcc could contract the
   two values of WIDE differently, and the bits would then depend on how a parameter is split. On sm_90: 59 instructions
   for an f32 element, which moves 28 bytes (budget: 190); with STOCHASTIC in bf16 at most 110 for 24 bytes (163). */
template <bool STOCHASTIC> struct mti_adamw_op {
    mti_view param, master, weights, grad, m, v; /* weights: master, or param without one, as with STOCHASTIC */
    mti_adamw a;
    mt_random at;
    __device__ void moments(float g, float *first, float *second) const {
        float scaled = __fmul_rn(a.grad_scale, g), square = __fmul_rn(scaled, scaled);
        *first = __fadd_rn(__fmul_rn(a.beta1, *first), __fmul_rn(a.one_minus_beta1, scaled));
        *second = __fadd_rn(__fmul_rn(a.beta2, *second), __fmul_rn(a.one_minus_beta2, square));
    }
    __device__ float updated(float p, float first, float second) const {
        float divisor = __fadd_rn(__fmul_rn(__fsqrt_rn(second), a.inverse_root2), a.eps);
        return __fsub_rn(__fmul_rn(a.keep, p), __fdiv_rn(__fmul_rn(a.step_size, first), divisor));
    }
    template <bool WIDE> __device__ void run(int64_t row, int64_t col, int n) const {
        float p[MTI_VECTOR], g[MTI_VECTOR], first[MTI_VECTOR], second[MTI_VECTOR];
        const bool early = WIDE || STOCHASTIC; /* loads p first; otherwise later, because a register would be spilled */
        if (early) mti_load<WIDE>(STOCHASTIC ? param : weights, row, col, n, p);
        mti_load<WIDE, MT_F32>(grad, row, col, n, g);
        mti_load<WIDE, MT_F32>(m, row, col, n, first);
        mti_load<WIDE, MT_F32>(v, row, col, n, second);
        for (int j = 0; j < MTI_VECTOR; j++) {
            moments(g[j], &first[j], &second[j]);
            if (early) p[j] = updated(p[j], first[j], second[j]);
        }
        if (!early) {
            mti_load<WIDE>(weights, row, col, n, p);
            for (int j = 0; j < MTI_VECTOR; j++) p[j] = updated(p[j], first[j], second[j]);
        }
        if (!STOCHASTIC && master.data) mti_store<WIDE, MT_F32>(master, row, col, n, p);
        mti_store<WIDE, MT_F32>(m, row, col, n, first);
        mti_store<WIDE, MT_F32>(v, row, col, n, second);
        if (STOCHASTIC) {
            uint32_t words[MTI_VECTOR];
            mti_words_of(at, mti_element_of(at, row, col), words);
            for (int j = 0; j < MTI_VECTOR; j++) p[j] = mti_round_stochastic(param.dtype, p[j], words[j]);
        }
        if (param.dtype == MT_F32) mti_store<WIDE, MT_F32>(param, row, col, n, p);
        else if (param.dtype == MT_BF16) mti_store<WIDE, MT_BF16>(param, row, col, n, p);
        else mti_store<WIDE, MT_F16>(param, row, col, n, p);
    }
};

template <bool STOCHASTIC>
static mt_status mti_cuda_adamw(mt_context *ctx, const mt_adamw *hyper, mt_tensor param, mt_tensor master,
                                mt_tensor grad, mt_tensor m, mt_tensor v) {
    int wide = mti_is_wide(param) && mti_is_wide(master) && mti_is_wide(grad) && mti_is_wide(m) && mti_is_wide(v);
    mti_adamw_op<STOCHASTIC> op;
    op.param = mti_view_of(param);
    op.master = mti_view_of(master);
    op.weights = mti_view_of(master.data ? master : param);
    op.grad = mti_view_of(grad);
    op.m = mti_view_of(m);
    op.v = mti_view_of(v);
    op.a = mti_adamw_resolve(hyper);
    if (STOCHASTIC) op.at = *hyper->stochastic_rounding;
    return mti_map(ctx, "mt_adamw_step", op, wide, param.rows, param.cols);
}

} /* extern "C++" */
#endif
