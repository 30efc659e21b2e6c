/* ---- products with bias and activation, by cuBLASLt -------------------------------------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

/* Whether cuBLASLt can take these views without converting them. */
static int mti_lt_is_direct(mt_tensor a, mt_tensor b, mt_tensor c) {
    return a.dtype == b.dtype && (c.dtype == MT_F32 || c.dtype == a.dtype) && mti_is_wide(a) && mti_is_wide(b) &&
           mti_is_wide(c) && a.rows > 0 && a.cols > 0 && b.rows > 0 && b.cols > 0;
}

/* Returns the leading dimension of the auxiliary matrix of an epilogue, or 0 if cuBLASLt cannot take this view. */
static int64_t mti_lt_ld_aux(mt_tensor aux, mt_tensor c) {
    int64_t ld = aux.rows <= 1 ? mt_round_up(aux.cols, 8) : mt_tensor_ld(aux);
    return aux.dtype == c.dtype && mti_is_wide(aux) && ld % 8 == 0 ? ld : 0;
}

/* Runs the product with its epilogue. For an f32 C, the epilogue writes the bias gradient to g->bias, and a kernel adds
   that to dbias. For a 16-bit C, a kernel sums the bias gradient in f32 instead. p->fused = whether cuBLASLt has the
   product. If it does not, separate(c, dbias) runs, because the heuristic may propose what cuBLASLt then refuses. */
template <typename Separate>
static mt_status mti_lt_fused(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, const mti_lt_call *g, mt_tensor dbias,
                              const Separate &separate) {
    MT_TRY(mti_lt_point(ctx, p, g));
    cublasStatus_t status = mti_lt_enqueue(ctx, lt, p, g);
    p->fused = !mti_lt_lacks(&p->key, status);
    if (!p->fused) return separate(g->c, dbias);
    MT_TRY(mti_lt_check(ctx, status, "cublasLtMatmul"));
    if (!dbias.data) return MT_SUCCESS;
    if (!g->bias) return mti_cuda_bias_backward(ctx, g->c, dbias);
    return mti_cuda_add(ctx, dbias, mt_tensor_f32((const float *)g->bias, 1, dbias.cols), dbias);
}

/* Replaces *t by a view of the same layout in the arena, filled with zeros. */
static mt_status mti_lt_zeros(mt_context *ctx, mt_tensor *t) {
    mt_tensor whole;
    MT_TRY(mt_arena_tensor(ctx, t->dtype, t->rows, mt_tensor_ld(*t), &whole));
    *t = mt_tensor_cols(whole, 0, t->cols);
    return mti_cuda_fill(ctx, whole, 0.0f);
}

/* *yes = whether the fused product is faster, or 0 during stream capture. The measured runs add to zeros in the arena,
   not to the gradients of the caller. */
template <typename Separate>
static mt_status mti_lt_measure(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, mti_lt_call g, mt_tensor dbias,
                                const Separate &separate, int *yes) {
    float fused = 0.0f, apart = 0.0f;
    int may_wait = 0;
    *yes = 0;
    MT_TRY(mti_lt_may_wait(ctx, &may_wait));
    if (!may_wait) return MT_SUCCESS;
    if (g.beta != 0.0f) MT_TRY(mti_lt_zeros(ctx, &g.c));
    if (dbias.data) MT_TRY(mti_lt_zeros(ctx, &dbias));
    MT_TRY(mti_lt_time(
        ctx, lt, [&]() { return mti_lt_fused(ctx, lt, p, &g, dbias, separate); }, &fused));
    MT_TRY(mti_lt_time(
        ctx, lt, [&]() { return separate(g.c, dbias); }, &apart));
    *yes = fused < apart;
    return MT_SUCCESS;
}

/* Decides whether a plan is fused. With MT_EPILOGUE_FUSED it always is. With MT_EPILOGUE_MEASURED it is if that is
   faster, but not if the arena is too small for the measurement, during stream capture, or if half of the plans have
   `stays`. A decision by measurement is kept, because the two ways give different bits. After an error nothing is
   decided, and the next call measures again. */
template <typename Separate>
static mt_status mti_lt_decide(mt_context *ctx, mti_lt *lt, mti_lt_plan *p, const mti_lt_call &g, mt_tensor dbias,
                               const Separate &separate) {
    size_t mark = mt_arena_mark(ctx), peak = mt_arena_peak(ctx);
    size_t bytes = (g.beta != 0.0f ? mti_lt_bytes(g.c) : 0) + (dbias.data ? mti_lt_bytes(dbias) : 0);
    int fused = mt_gemm_get_options(ctx).epilogue == MT_EPILOGUE_FUSED, stays = !fused && lt->stay < MTI_LT_PLANS / 2;
    if (stays && bytes <= mt_arena_available(ctx)) {
        mt_status status = mti_lt_measure(ctx, lt, p, g, dbias, separate, &fused);
        mt_arena_release(ctx, mark);
        mt_arena_set_peak(ctx, peak);
        MT_TRY(status);
    }
    p->fused = fused;
    p->stays = stays;
    lt->stay += stays;
    p->undecided = 0;
    return MT_SUCCESS;
}

/* Runs the fused product or separate(c, dbias), as the plan says. Both write or add to g->c and dbias. */
template <typename Separate>
static mt_status mti_lt_either(mt_context *ctx, mti_lt_call *g, mt_tensor dbias, const Separate &separate) {
    mti_lt *lt;
    mti_lt_plan *p = NULL;
    MT_TRY(mt_cuda_enter(ctx));
    MT_TRY(mti_lt_open(ctx, &lt));
    if (dbias.data && g->c.dtype == MT_F32) MT_TRY(mt_arena_alloc(ctx, (size_t)dbias.cols * sizeof(float), &g->bias));
    MT_TRY(mti_lt_plan_of(ctx, lt, g, &p));
    if (p->undecided) MT_TRY(mti_lt_decide(ctx, lt, p, *g, dbias, separate));
    return p->fused ? mti_lt_fused(ctx, lt, p, g, dbias, separate) : separate(g->c, dbias);
}

/* mti_lt_either, after which the arena memory is released. */
template <typename Separate>
static mt_status mti_lt_linear(mt_context *ctx, mti_lt_call *g, mt_tensor dbias, const Separate &separate) {
    size_t mark = mt_arena_mark(ctx);
    mt_status status = mti_lt_either(ctx, g, dbias, separate);
    mt_arena_release(ctx, mark);
    return status;
}

static mti_matmul mti_lt_sizes(int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, float beta) {
    mti_matmul s;
    memset(&s, 0, sizeof s);
    s.trans_a = trans_a, s.trans_b = trans_b;
    s.m = m, s.n = n, s.k = k;
    s.alpha = 1.0f, s.beta = beta;
    return s;
}

/* mti_cuda_linear_forward and the three functions after it call mti_lt_linear if cuBLASLt has the epilogue and can take
   all views as they are. Otherwise they call the separate operators. */
static mt_status mti_cuda_linear_forward(mt_context *ctx, mt_tensor x, mt_tensor weight, mt_tensor bias, mt_tensor y) {
    mti_matmul s = mti_lt_sizes(0, 1, x.rows, weight.rows, x.cols, 0.0f);
    auto separate = [&](mt_tensor c, mt_tensor) { return mti_linear_forward(ctx, x, weight, bias, c); };
    mti_lt_call g;
    if (!bias.data || bias.dtype != y.dtype || !mti_is_wide(bias) || !mti_lt_is_direct(x, weight, y))
        return separate(y, mt_none());
    mti_lt_call_make(&s, x, weight, y, CUBLASLT_EPILOGUE_BIAS, &g);
    g.bias = bias.data;
    return mti_lt_linear(ctx, &g, mt_none(), separate);
}

/* cuBLASLt has an epilogue that also writes h for MT_GELU_TANH only. That of ReLU writes one bit of each element. */
static mt_status mti_cuda_linear_activation_forward(mt_context *ctx, mt_activation kind, mt_tensor x, mt_tensor weight,
                                                    mt_tensor bias, mt_tensor h, mt_tensor y) {
    mti_matmul s = mti_lt_sizes(0, 1, x.rows, weight.rows, x.cols, 0.0f);
    auto separate = [&](mt_tensor c, mt_tensor) {
        return mti_linear_activation_forward(ctx, kind, x, weight, bias, h, c);
    };
    int64_t ld_aux = mti_lt_ld_aux(h, y);
    mti_lt_call g;
    if (kind != MT_GELU_TANH || ld_aux == 0 || !mti_lt_is_direct(x, weight, y) ||
        (bias.data && (bias.dtype != y.dtype || !mti_is_wide(bias))))
        return separate(y, mt_none());
    mti_lt_call_make(&s, x, weight, y, bias.data ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX, &g);
    g.key.ld_aux = ld_aux;
    g.bias = bias.data;
    g.aux = h.data;
    return mti_lt_linear(ctx, &g, mt_none(), separate);
}

static mt_status mti_cuda_linear_activation_backward(mt_context *ctx, mt_activation kind, mt_tensor dy,
                                                     mt_tensor weight, mt_tensor h, mt_tensor dh, mt_tensor dbias) {
    mti_matmul s = mti_lt_sizes(0, 0, dy.rows, weight.cols, dy.cols, 0.0f);
    auto separate = [&](mt_tensor c, mt_tensor db) {
        return mti_linear_activation_backward(ctx, kind, dy, weight, h, c, db);
    };
    int64_t ld_aux = mti_lt_ld_aux(h, dh);
    int sums = dbias.data && dh.dtype == MT_F32;
    mti_lt_call g;
    if (kind != MT_GELU_TANH || ld_aux == 0 || !mti_lt_is_direct(dy, weight, dh)) return separate(dh, dbias);
    mti_lt_call_make(&s, dy, weight, dh, sums ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_DGELU, &g);
    g.key.ld_aux = ld_aux;
    g.aux = h.data;
    return mti_lt_linear(ctx, &g, dbias, separate);
}

static mt_status mti_cuda_linear_gradients(mt_context *ctx, mt_tensor dy, mt_tensor x, float beta, mt_tensor dweight,
                                           mt_tensor dbias) {
    mti_matmul s = mti_lt_sizes(1, 0, dy.cols, x.cols, dy.rows, beta);
    auto separate = [&](mt_tensor c, mt_tensor db) { return mti_linear_gradients(ctx, dy, x, beta, c, db); };
    mti_lt_call g;
    if (!dbias.data || dweight.dtype != MT_F32 || !mti_lt_is_direct(dy, x, dweight)) return separate(dweight, dbias);
    /* B, because our first operand is the second one of cuBLASLt */
    mti_lt_call_make(&s, dy, x, dweight, CUBLASLT_EPILOGUE_BGRADB, &g);
    return mti_lt_linear(ctx, &g, dbias, separate);
}

} /* extern "C++" */
#endif
