/* ---- dropout, on a GPU ------------------------------------------------------------------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

/* Dropout as kernels see it. An element is dropped if its random word is less than threshold, otherwise multiplied by
   scale. */
struct mti_drop {
    mt_random at;
    uint32_t threshold;
    float scale;
    int on;
    __device__ void draw(int64_t row, int64_t col, uint32_t *words) const {
        if (on) mti_words_of(at, mti_element_of(at, row, col), words);
    }
    __device__ void apply(const uint32_t *words, float *x) const {
        if (!on) return;
        for (int j = 0; j < MTI_VECTOR; j++) x[j] = words[j] < threshold ? 0.0f : x[j] * scale;
    }
};

static mti_drop mti_drop_of(mt_dropout dropout) {
    mti_drop d = {dropout.at, mti_dropout_threshold(dropout.p), mti_dropout_scale(dropout.p), dropout.p > 0.0f};
    return d;
}

template <int TYPE> struct mti_dropout_op { /* y = residual + dropout(x + bias) */
    struct input {
        mti_fetched<TYPE> x, bias, residual;
    };
    mti_view x, bias, residual, y;
    mti_drop drop;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(x, row, col, n, in.x);
        if (residual.data) mti_fetch<WIDE>(residual, row, col, n, in.residual);
        if (bias.data) mti_fetch<WIDE>(bias, 0, col, n, in.bias);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &in) const {
        uint32_t words[MTI_VECTOR];
        float v[MTI_VECTOR];
        drop.draw(row, col, words); /* while the loads are under way */
        mti_values(in.x, v);
        if (bias.data) mti_add_values(in.bias, v);
        drop.apply(words, v);
        if (residual.data) mti_add_values(in.residual, v);
        mti_store<WIDE, TYPE>(y, row, col, n, v);
    }
};

static mt_status mti_cuda_bias_dropout_add_forward(mt_context *ctx, mt_tensor x, mt_tensor bias, mt_tensor residual,
                                                   mt_dropout dropout, mt_tensor y) {
    const char *name = "mt_bias_dropout_add_forward";
    mti_access how = mti_access_of(x, bias, residual, y);
    return mti_by_type(how.type, [&](auto type) {
        mti_dropout_op<type.value> op = {mti_view_of(x), mti_view_of(bias), mti_view_of(residual), mti_view_of(y),
                                         mti_drop_of(dropout)};
        return mti_map_ahead<type.value>(ctx, name, op, how.wide, x.rows, x.cols);
    });
}

/* dx = dropout(dy), and the column sums of dx */
template <int TYPE> struct mti_dropout_backward_op {
    struct input {
        mti_fetched<TYPE> dy;
    };
    mti_view dy, dx;
    mti_drop drop;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(dy, row, col, n, in.dy);
    }
    template <bool WIDE>
    __device__ void finish(int64_t row, int64_t col, int n, const input &in, float (*sums)[MTI_VECTOR]) const {
        uint32_t words[MTI_VECTOR];
        float v[MTI_VECTOR];
        drop.draw(row, col, words);
        mti_values(in.dy, v);
        drop.apply(words, v);
        for (int j = 0; j < MTI_VECTOR; j++) sums[0][j] += v[j];
        mti_store<WIDE, TYPE>(dx, row, col, n, v);
    }
};

static mt_status mti_cuda_bias_dropout_add_backward(mt_context *ctx, mt_tensor dy, mt_dropout dropout, mt_tensor dx,
                                                    mt_tensor dbias) {
    const char *name = "mt_bias_dropout_add_backward";
    mti_access how = mti_access_of(dy, dx);
    return mti_by_type(how.type, [&](auto type) {
        mti_dropout_backward_op<type.value> op = {mti_view_of(dy), mti_view_of(dx), mti_drop_of(dropout)};
        return mti_columns<type.value, 2 * mti_ahead<type.value>::value, 1>(ctx, name, op, how.wide, dy.rows, dy.cols,
                                                                            &dbias);
    });
}

} /* extern "C++" */
#endif
