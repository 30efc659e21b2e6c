/* ---- products and gates, element by element, on a GPU ------------------------------------------------------------ */

#if MT_HAS_CUDA
extern "C++" {

/* sigmoid(x) and sigmoid(-x), for 16-bit results. e is at most 1, so nothing overflows. */
static __device__ __forceinline__ float mti_cuda_sigmoid(float x, float *opposite) {
    float e = __expf(-fabsf(x)), high = __fdividef(1.0f, 1.0f + e), low = e * high;
    *opposite = x < 0.0f ? high : low;
    return x < 0.0f ? low : high;
}

/* mti_pointwise_row for a vector of 16-bit results. a becomes y. */
static __device__ __forceinline__ void mti_pointwise_fast(mti_pointwise kind, float *a, const float *b) {
    float closed;
    switch (kind) {
    case MTI_SIGMOID:
        for (int j = 0; j < MTI_VECTOR; j++) a[j] = mti_cuda_sigmoid(a[j], &closed);
        break;
    case MTI_SIGMOID_SLOPE:
        for (int j = 0; j < MTI_VECTOR; j++) {
            float open = mti_cuda_sigmoid(a[j], &closed);
            a[j] = b[j] * (open * closed);
        }
        break;
    case MTI_SILU:
        for (int j = 0; j < MTI_VECTOR; j++) a[j] *= mti_cuda_sigmoid(a[j], &closed);
        break;
    case MTI_SILU_SLOPE:
        for (int j = 0; j < MTI_VECTOR; j++) {
            float open = mti_cuda_sigmoid(a[j], &closed);
            a[j] = b[j] * (open * (1.0f + a[j] * closed));
        }
        break;
    case MTI_SIGMOID_GATE:
        for (int j = 0; j < MTI_VECTOR; j++) a[j] = b[j] * mti_cuda_sigmoid(a[j], &closed);
        break;
    default: mti_pointwise_row(kind, a, b, a, MTI_VECTOR);
    }
}

/* KIND is a mti_pointwise, or MTI_ANY_TYPE: then op.kind is read. */
template <int TYPE, int KIND> struct mti_pointwise_op {
    struct input {
        mti_fetched<TYPE> a, b;
        float factor; /* of the row, for MTI_MULTIPLY_COL */
    };
    mti_view a, b, y;
    mti_pointwise kind;
    __device__ mti_pointwise kind_of() const { return KIND == MTI_ANY_TYPE ? kind : (mti_pointwise)KIND; }
    __device__ int has_b() const { return kind_of() != MTI_SIGMOID && kind_of() != MTI_SILU; }
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(a, row, col, n, in.a);
        if (kind_of() == MTI_MULTIPLY_COL) in.factor = mti_get<TYPE>(b, row, 0);
        else if (has_b()) mti_fetch<WIDE>(b, kind_of() == MTI_MULTIPLY_ROW ? 0 : row, col, n, in.b);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &in) const {
        float x[MTI_VECTOR], z[MTI_VECTOR] = {};
        mti_values(in.a, x);
        if (kind_of() == MTI_MULTIPLY_COL) z[0] = in.factor;
        else if (has_b()) mti_values(in.b, z);
        if (mti_type_of<TYPE>(y) != MT_F32) mti_pointwise_fast(kind_of(), x, z);
        else mti_pointwise_row(kind_of(), x, z, x, MTI_VECTOR);
        mti_store<WIDE, TYPE>(y, row, col, n, x);
    }
};

static mt_status mti_cuda_pointwise(mt_context *ctx, const char *name, mti_pointwise kind, mt_tensor a, mt_tensor b,
                                    mt_tensor y) {
    mti_access how = mti_access_of(a, kind == MTI_MULTIPLY_COL ? mt_none() : b, y);
    if (kind == MTI_MULTIPLY_COL && b.dtype != y.dtype) how.type = MTI_ANY_TYPE;
    return mti_by_type(how.type, [&](auto type) {
        return mti_by_kind<MTI_SIGMOID_GATE + 1>((int)kind, [&](auto k) {
            const int TYPE = decltype(type)::value, KIND = TYPE == MTI_ANY_TYPE ? MTI_ANY_TYPE : decltype(k)::value;
            mti_pointwise_op<TYPE, KIND> op = {mti_view_of(a), mti_view_of(b), mti_view_of(y), kind};
            return mti_map_ahead<TYPE>(ctx, name, op, how.wide, y.rows, y.cols);
        });
    });
}

/* A thread reads a vector of all inputs before it writes the same vector of dgate and dx, which may be inputs. */
template <int TYPE> struct mti_gate_backward_op {
    struct input {
        mti_fetched<TYPE> gate, x, dy;
    };
    mti_view gate, x, dy, dgate, dx;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(gate, row, col, n, in.gate);
        mti_fetch<WIDE>(x, row, col, n, in.x);
        mti_fetch<WIDE>(dy, row, col, n, in.dy);
    }
    template <bool WIDE> __device__ void finish(int64_t row, int64_t col, int n, const input &in) const {
        float g[MTI_VECTOR], a[MTI_VECTOR], up[MTI_VECTOR];
        int fast = mti_type_of<TYPE>(dgate) != MT_F32 && mti_type_of<TYPE>(dx) != MT_F32;
        mti_values(in.gate, g);
        mti_values(in.x, a);
        mti_values(in.dy, up);
        if (!fast) mti_gate_backward_row(g, a, up, a, up, MTI_VECTOR);
        for (int j = 0; j < MTI_VECTOR && fast; j++) {
            float closed, open = mti_cuda_sigmoid(g[j], &closed);
            a[j] = up[j] * a[j] * (open * closed);
            up[j] *= open;
        }
        mti_store<WIDE, TYPE>(dgate, row, col, n, a);
        mti_store<WIDE, TYPE>(dx, row, col, n, up);
    }
};

static mt_status mti_cuda_gate_backward(mt_context *ctx, mt_tensor gate, mt_tensor x, mt_tensor dy, mt_tensor dgate,
                                        mt_tensor dx) {
    mti_access how = mti_access_of(gate, x, dy, dgate, dx);
    return mti_by_type(how.type, [&](auto type) {
        mti_gate_backward_op<type.value> op = {mti_view_of(gate), mti_view_of(x), mti_view_of(dy), mti_view_of(dgate),
                                               mti_view_of(dx)};
        return mti_map_ahead<type.value>(ctx, "mt_sigmoid_gate_backward", op, how.wide, dy.rows, dy.cols);
    });
}

/* finish writes dx, if it is given, and adds dy * x, the products that one row adds to drow. */
template <int TYPE> struct mti_multiply_row_backward_op {
    struct input {
        mti_fetched<TYPE> dy, x;
    };
    mti_view x, factors, dy, dx;
    template <bool WIDE> __device__ void fetch(int64_t row, int64_t col, int n, input &in) const {
        mti_fetch<WIDE>(dy, row, col, n, in.dy);
        mti_fetch<WIDE>(x, row, col, n, in.x);
    }
    template <bool WIDE>
    __device__ void finish(int64_t row, int64_t col, int n, const input &in, float (*sums)[MTI_VECTOR]) const {
        float d[MTI_VECTOR], f[MTI_VECTOR];
        mti_values(in.dy, d);
        mti_values(in.x, f);
        for (int j = 0; j < MTI_VECTOR; j++) sums[0][j] += d[j] * f[j];
        if (!dx.data) return;
        mti_load<WIDE, TYPE>(factors, 0, col, n, f); /* L1 has this row, and nvcc has no registers for it earlier */
        mti_multiply_row(d, f, d, MTI_VECTOR);
        mti_store<WIDE, TYPE>(dx, row, col, n, d);
    }
};

static mt_status mti_cuda_multiply_row_backward(mt_context *ctx, mt_tensor x, mt_tensor row, mt_tensor dy, mt_tensor dx,
                                                mt_tensor drow) {
    mti_access how = mti_access_of(x, row, dy, dx);
    return mti_by_type(how.type, [&](auto type) {
        mti_multiply_row_backward_op<type.value> op = {mti_view_of(x), mti_view_of(row), mti_view_of(dy),
                                                       mti_view_of(dx)};
        return mti_columns<type.value, mti_ahead<type.value>::value, 1>(ctx, "mt_multiply_row_backward", op, how.wide,
                                                                        dy.rows, dy.cols, &drow);
    });
}

struct mti_multiply_col_backward_op {
    mti_view x, factors, dy, dx, dcol;
};

/* A block computes every gridDim-th row. Thread t has vectors t, t + blockDim.x, ... of the row. It adds their products
   dy * x and writes their dx, if dx is given. Then mti_block_sums adds the sums of all threads. It has the barriers,
   and `shared` is its memory for the sums of the warps. dx may be x, dy or col, so a thread reads these before it
   writes dx. In bf16 on sm_90: 12 instructions for an element, which moves 6 bytes (budget: 41); 31 registers. */
template <int TYPE, bool WIDE>
static __global__ void __launch_bounds__(MTI_ROW_THREADS)
    mti_multiply_col_backward_kernel(mti_multiply_col_backward_op op, int64_t rows, int64_t cols) {
    MT_SHARED(float, shared, 64);
    int64_t vectors = (cols + MTI_VECTOR - 1) / MTI_VECTOR;
    float d[MTI_VECTOR], x[MTI_VECTOR];
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        float sum = 0.0f;
        for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) {
            mti_fetched<TYPE> in_dy, in_x;
            int n = mti_vector_size(cols, i * MTI_VECTOR);
            mti_fetch<WIDE>(op.dy, row, i * MTI_VECTOR, n, in_dy);
            mti_fetch<WIDE>(op.x, row, i * MTI_VECTOR, n, in_x);
            mti_values(in_dy, d);
            mti_values(in_x, x);
            for (int j = 0; j < MTI_VECTOR; j++) sum += d[j] * x[j];
            if (!op.dx.data) continue;
            mti_scale_row(d, mti_get(op.factors, row, 0), d, MTI_VECTOR);
            mti_store<WIDE, TYPE>(op.dx, row, i * MTI_VECTOR, n, d);
        }
        sum = mti_block_sums(sum, 0.0f, shared).x;
        if (threadIdx.x == 0) mti_put(op.dcol, row, 0, sum);
    }
}

static mt_status mti_cuda_multiply_col_backward(mt_context *ctx, mt_tensor x, mt_tensor col, mt_tensor dy, mt_tensor dx,
                                                mt_tensor dcol) {
    mti_multiply_col_backward_op op = {mti_view_of(x), mti_view_of(col), mti_view_of(dy), mti_view_of(dx),
                                       mti_view_of(dcol)};
    unsigned blocks = mti_grid(dy.rows, 1), threads = mti_row_threads(mt_max(1, dy.cols));
    mti_access how = mti_access_of(x, dy, dx);
    MT_TRY(mt_cuda_enter(ctx));
    return mti_by_type(how.type, [&](auto type) {
        const int TYPE = decltype(type)::value;
        if (how.wide)
            MT_LAUNCH_KERNEL((mti_multiply_col_backward_kernel<TYPE, true>), blocks, threads, 0, mt_context_stream(ctx),
                             op, dy.rows, dy.cols);
        else
            MT_LAUNCH_KERNEL((mti_multiply_col_backward_kernel<TYPE, TYPE != MTI_ANY_TYPE>), blocks, threads, 0,
                             mt_context_stream(ctx), op, dy.rows, dy.cols);
        return mt_cuda_launched(ctx, "mt_multiply_col_backward");
    });
}

} /* extern "C++" */
#endif
