/* ---- activations, on a GPU --------------------------------------------------------------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

/* For MT_SWIGLU, mti_activation_of is SiLU. `fast` is explained at mti_cuda_exp. */
static __device__ __forceinline__ float mti_activation_of(int kind, int fast, float x) {
    if (kind == MT_GELU_ERF && fast) return x * mti_cuda_normal_cdf(x, __expf(-0.5f * x * x));
    if (kind == MT_GELU_ERF) return 0.5f * x * erfcf(x * -0.70710678f); /* nothing cancels in the left tail */
    if (kind == MT_SQUARED_RELU) return mti_relu(x) * mti_relu(x);
    if (kind == MT_RELU) return mti_relu(x);
    if (kind == MT_TANH) return tanhf(x);
    float u = kind == MT_GELU_TANH ? -1.5957691216f * (x + 0.044715f * x * x * x) : -x;
    return mti_cuda_quotient(fast, x, 1.0f + mti_cuda_exp(fast, u));
}

static __device__ __forceinline__ float mti_activation_slope(int kind, int fast, float x) {
    if (kind == MT_GELU_ERF) {
        float e = mti_cuda_exp(fast, -0.5f * x * x);
        return (fast ? mti_cuda_normal_cdf(x, e) : 0.5f * erfcf(x * -0.70710678f)) + x * 0.3989422804f * e;
    }
    if (kind == MT_SQUARED_RELU) return 2.0f * mti_relu(x);
    if (kind == MT_RELU) return mti_relu_slope(x);
    if (kind == MT_TANH) {
        float e = mti_cuda_exp(fast, -2.0f * fabsf(x)), s = mti_cuda_quotient(fast, 1.0f, 1.0f + e);
        return 4.0f * e * (s * s);
    }
    if (kind == MT_GELU_TANH) {
        float u = -1.5957691216f * (x + 0.044715f * x * x * x);
        float s = mti_cuda_quotient(fast, 1.0f, 1.0f + mti_cuda_exp(fast, u));
        return s + x * s * (1.0f - s) * 1.5957691216f * (1.0f + 0.134145f * x * x);
    }
    float s = mti_cuda_quotient(fast, 1.0f, 1.0f + mti_cuda_exp(fast, -x));
    return s * (1.0f + x * (1.0f - s));
}

/* The kind is a template argument, so that no element branches on it, or MTI_ANY_TYPE: then op.kind is read. */
template <int TYPE, int KIND>
struct mti_activation_op { /* h += bias, then y = act(h). up is `width` columns after gate */
    struct input {
        mti_fetched<TYPE> h, bias, up, up_bias;
    };
    mti_view h, bias, y;
    int kind;
    int64_t width;
    __device__ int kind_of() const { return KIND == MTI_ANY_TYPE ? kind : KIND; }
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(h, row, col, n, in.h);
        if (kind_of() == MT_SWIGLU) mti_fetch<WIDE>(h, row, col + width, n, in.up);
        if (!bias.data) return;
        mti_fetch<WIDE>(bias, 0, col, n, in.bias);
        if (kind_of() == MT_SWIGLU) mti_fetch<WIDE>(bias, 0, col + width, n, in.up_bias);
    }
    template <bool WIDE>
    __device__ void biased(int64_t row, int64_t col, int n, const mti_fetched<TYPE> &in, const mti_fetched<TYPE> &b,
                           float *x) const {
        mti_values(in, x);
        if (!bias.data) return;
        mti_add_values(b, x);
        mti_store<WIDE, TYPE>(h, row, col, n, x);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &in) const {
        float x[MTI_VECTOR], up[MTI_VECTOR];
        int fast = mti_type_of<TYPE>(y) != MT_F32;
        biased<WIDE>(row, col, n, in.h, in.bias, x);
        if (kind_of() == MT_SWIGLU) biased<WIDE>(row, col + width, n, in.up, in.up_bias, up);
        for (int j = 0; j < MTI_VECTOR; j++) {
            x[j] = mti_activation_of(kind_of(), fast, x[j]);
            if (kind_of() == MT_SWIGLU) x[j] *= up[j];
        }
        mti_store<WIDE, TYPE>(y, row, col, n, x);
    }
};

/* The access of views of which MT_SWIGLU has two halves. */
static mti_access mti_activation_access(mt_activation kind, mti_access how, int64_t cols) {
    if (kind == MT_SWIGLU && cols % MTI_VECTOR != 0) how.type = MTI_ANY_TYPE, how.wide = 0;
    return how;
}

static mt_status mti_cuda_activation_forward(mt_context *ctx, mt_activation kind, mt_tensor h, mt_tensor bias,
                                             mt_tensor y) {
    mti_access how = mti_activation_access(kind, mti_access_of(h, bias, y), y.cols);
    return mti_by_type(how.type, [&](auto type) {
        return mti_by_kind<MT_ACTIVATION_COUNT>((int)kind, [&](auto k) {
            const int TYPE = decltype(type)::value, KIND = TYPE == MTI_ANY_TYPE ? MTI_ANY_TYPE : decltype(k)::value;
            mti_activation_op<TYPE, KIND> op = {mti_view_of(h), mti_view_of(bias), mti_view_of(y), (int)kind, y.cols};
            return mti_map_ahead<TYPE>(ctx, "mt_activation_forward", op, how.wide, y.rows, y.cols);
        });
    });
}

/* Writes dh and adds it to the sums. For MT_SWIGLU, sums[0] is the sum of the gradients of gate and sums[1] that of the
   gradients of up. */
template <int TYPE, int KIND> struct mti_activation_backward_op {
    struct input {
        mti_fetched<TYPE> dy, h, up;
    };
    mti_view h, dy, dh;
    int kind;
    int64_t width;
    __device__ int kind_of() const { return KIND == MTI_ANY_TYPE ? kind : KIND; }
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(dy, row, col, n, in.dy);
        mti_fetch<WIDE>(h, row, col, n, in.h);
        if (kind_of() == MT_SWIGLU) mti_fetch<WIDE>(h, row, col + width, n, in.up);
    }
    template <bool WIDE>
    __device__ void finish(int64_t row, int64_t col, int n, const input &in, float (*sums)[MTI_VECTOR]) const {
        float g[MTI_VECTOR], x[MTI_VECTOR], up[MTI_VECTOR];
        int fast = mti_type_of<TYPE>(dh) != MT_F32;
        mti_values(in.dy, g);
        mti_values(in.h, x);
        if (kind_of() == MT_SWIGLU) {
            mti_values(in.up, up);
            for (int j = 0; j < MTI_VECTOR; j++) {
                float gate = x[j];
                x[j] = g[j] * up[j] * mti_activation_slope(kind_of(), fast, gate);
                up[j] = g[j] * mti_activation_of(kind_of(), fast, gate);
                sums[1][j] += up[j];
            }
            mti_store<WIDE, TYPE>(dh, row, col + width, n, up);
        } else {
            for (int j = 0; j < MTI_VECTOR; j++) x[j] = g[j] * mti_activation_slope(kind_of(), fast, x[j]);
        }
        for (int j = 0; j < MTI_VECTOR; j++) sums[0][j] += x[j];
        mti_store<WIDE, TYPE>(dh, row, col, n, x);
    }
};

static mt_status mti_cuda_activation_backward(mt_context *ctx, mt_activation kind, mt_tensor h, mt_tensor dy,
                                              mt_tensor dh, mt_tensor dbias) {
    const char *name = "mt_activation_backward";
    mti_access how = mti_activation_access(kind, mti_access_of(h, dy, dh), dy.cols);
    mt_tensor outs[2];
    outs[0] = dbias.data ? mt_tensor_cols(dbias, 0, dy.cols) : dbias;
    if (kind == MT_SWIGLU) outs[1] = dbias.data ? mt_tensor_cols(dbias, dy.cols, dy.cols) : dbias;
    return mti_by_type(how.type, [&](auto type) {
        return mti_by_kind<MT_ACTIVATION_COUNT>((int)kind, [&](auto k) {
            const int TYPE = decltype(type)::value, SUMS = decltype(k)::value == MT_SWIGLU ? 2 : 1;
            const int KIND = TYPE == MTI_ANY_TYPE && SUMS == 1 ? MTI_ANY_TYPE : decltype(k)::value;
            mti_activation_backward_op<TYPE, KIND> op = {mti_view_of(h), mti_view_of(dy), mti_view_of(dh), (int)kind,
                                                         dy.cols};
            return mti_columns<TYPE, mti_ahead<TYPE>::value, SUMS>(ctx, name, op, how.wide, dy.rows, dy.cols, outs);
        });
    });
}

} /* extern "C++" */
#endif
