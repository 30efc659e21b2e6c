/* ---- softmax and log-softmax, on a GPU --------------------------------------------------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

/* The arguments of the softmax kernels, beside the rows of x, whose statistics mti_ce_part computes. */
struct mti_softmax_op {
    mti_view stats, y, dy, sums, dx;
    int64_t real, cols; /* real: columns that are not padding */
    int64_t shards, rows;
    int log;
};

/* From the maximum of a row and its sum of exponentials: y of an element. */
struct mti_softmax_scales {
    float top, log_sum, part;
    int log, fast;
    __device__ __forceinline__ float of(float x) const {
        return log ? (x - top) - log_sum : mti_cuda_exp(fast, x - top) * part;
    }
};

static __device__ __forceinline__ mti_softmax_scales mti_softmax_scales_of(const mti_softmax_op &s, float top,
                                                                           float sum) {
    mti_softmax_scales f = {top, logf(sum), 1.0f / sum, s.log, s.y.dtype != MT_F32};
    return f;
}

/* Returns the maximum and the sum of exponentials of a row to every thread of its block. */
template <int TYPE> static __device__ __forceinline__ float2 mti_softmax_row_stats(const mti_ce &c, int64_t row) {
    MT_SHARED(float, shared, 32);
    MT_SHARED(float, tops, 32);
    mti_ce_sums<TYPE> own = mti_ce_part<TYPE>(c, row, NULL);
    mti_ce_rescale(own, tops);
    return make_float2(own.top, mti_row_total(own.sum, shared));
}

/* The same, from the statistics of all shards. Thread 0 joins them; the barrier is between writing and reading them. */
static __device__ __forceinline__ float2 mti_softmax_joined(const mti_softmax_op &s, int64_t row) {
    MT_SHARED(float, all, 2);
    if (threadIdx.x == 0) mti_stats_joined<2>(s.stats, s.shards, s.rows, row, all);
    __syncthreads();
    return make_float2(all[0], all[1]);
}

/* y of COUNT chunks: i, i + blockDim.x, and so on. to: the chunks of y; wide: they are aligned to 16 bytes. */
template <int TYPE, int COUNT>
static __device__ __forceinline__ void mti_softmax_group(const mti_view &from, const mti_view &to, int wide, int64_t i,
                                                         int64_t real, const mti_softmax_scales &f) {
    mti_fetched<TYPE> held[COUNT];
    int64_t step = blockDim.x;
    float x[MTI_VECTOR];
    MT_DEVICE_UNROLL
    for (int q = 0; q < COUNT; q++) mti_row_fetch(from, 0, i + q * step, real, held[q]);
    MT_DEVICE_UNROLL
    for (int q = 0; q < COUNT; q++) {
        int64_t col = (i + q * step) * MTI_VECTOR;
        mti_values(held[q], x);
        for (int j = 0; j < MTI_VECTOR; j++) x[j] = f.of(x[j]);
        if (wide) mti_store<true>(to, 0, col, MTI_VECTOR, x);
        else mti_store<false>(to, 0, col, MTI_VECTOR, x);
    }
}

/* Writes y of a row. A thread owns every blockDim-th chunk of x (see mti_ce_head), and every blockDim-th element that
   is in no chunk, to the end of the padding. It reads an element before it writes the same one, so y may be x. */
template <int TYPE>
static __device__ __forceinline__ void mti_softmax_write(const mti_ce &c, const mti_softmax_op &s, int64_t row,
                                                         const mti_softmax_scales &f) {
    int head = mti_ce_head<TYPE>(c, row);
    int64_t step = blockDim.x, i = threadIdx.x;
    mti_view from = c.logits, to = s.y;
    from.data += (row * from.ld + head) * mti_fetched<TYPE>::size;
    to.data += (row * to.ld + head) * (to.dtype == MT_F32 ? 4 : 2);
    int wide = (uintptr_t)to.data % 16 == 0;
    for (; i + step < c.bulk; i += 2 * step) mti_softmax_group<TYPE, 2>(from, to, wide, i, c.real, f);
    if (i < c.bulk) mti_softmax_group<TYPE, 1>(from, to, wide, i, c.real, f);
    for (int64_t edge = threadIdx.x; edge < s.cols - c.bulk * MTI_VECTOR; edge += step) {
        int64_t col = edge < head ? edge : edge + c.bulk * MTI_VECTOR;
        mti_put(s.y, row, col, col < c.real ? f.of(mti_get<TYPE>(c.logits, row, col)) : 0.0f);
    }
}

/* Writes y. A block owns row first + blockIdx.x. With WHOLE the statistics are those of the row itself, which is then
   read a second time, from a cache: the barriers in mti_softmax_row_stats are behind the first reading, so y may be x.
   Otherwise they are joined from those of all shards. From bf16 to f32 on sm_90: 21 instructions for an element, which
   moves 6 bytes (budget: 41), and 30 with WHOLE; 56 registers, 2 blocks on a multiprocessor. */
template <int TYPE, bool WHOLE>
static __global__ void __launch_bounds__(MTI_CE_THREADS, 2)
    mti_softmax_kernel(int64_t first, mti_ce c, mti_softmax_op s) {
    int64_t row = first + blockIdx.x;
    float2 stats = WHOLE ? mti_softmax_row_stats<TYPE>(c, row) : mti_softmax_joined(s, row);
    mti_softmax_write<TYPE>(c, s, row, mti_softmax_scales_of(s, stats.x, stats.y));
}

/* Writes the statistics of a shard. A block owns row first + blockIdx.x. In bf16 on sm_90: 9 instructions for an
   element, which moves 2 bytes (budget: 13); 56 registers, 2 blocks on a multiprocessor. */
template <int TYPE>
static __global__ void __launch_bounds__(MTI_CE_THREADS, 2)
    mti_softmax_stats_kernel(int64_t first, mti_ce c, mti_softmax_op s) {
    int64_t row = first + blockIdx.x;
    float2 stats = mti_softmax_row_stats<TYPE>(c, row);
    if (threadIdx.x != 0) return;
    mti_put(s.stats, row, 0, stats.x);
    mti_put(s.stats, row, 1, stats.y);
}

/* Returns to every thread of a block the sum of y dy, or of dy, over a row without its padding. A thread owns every
   blockDim-th vector, so the bits do not depend on the alignment. */
template <int TYPE> static __device__ __forceinline__ float mti_softmax_row_sum(const mti_softmax_op &s, int64_t row) {
    MT_SHARED(float, shared, 32);
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i * MTI_VECTOR < s.real; i += blockDim.x) {
        mti_fetched<TYPE> a, b = {};
        float dy[MTI_VECTOR], y[MTI_VECTOR];
        mti_row_fetch(s.dy, row, i, s.cols, a);
        if (!s.log) mti_row_fetch(s.y, row, i, s.cols, b);
        mti_values(a, dy);
        mti_values(b, y);
        for (int j = 0; j < MTI_VECTOR; j++) {
            float next = s.log ? sum + dy[j] : __fmaf_rn(y[j], dy[j], sum);
            sum = i * MTI_VECTOR + j < s.real ? next : sum;
        }
    }
    return mti_row_total(sum, shared);
}

/* Writes the sums of a shard. A block owns row first + blockIdx.x. In bf16 on sm_90: 12 instructions for an element,
   which moves 4 bytes (budget: 27); 8 blocks on a multiprocessor. */
template <int TYPE>
static __global__ void __launch_bounds__(MTI_ROW_THREADS, 4) mti_softmax_sums_kernel(int64_t first, mti_softmax_op s) {
    int64_t row = first + blockIdx.x;
    float sum = mti_softmax_row_sum<TYPE>(s, row);
    if (threadIdx.x == 0) mti_put(s.sums, row, 0, sum);
}

/* Writes dx. A block owns row first + blockIdx.x, and a thread every blockDim-th vector of it. With WHOLE the sum is
   that of the row itself, which is then read a second time, from a cache. A thread reads only the vectors that it
   writes, so dx may be dy. In bf16 on sm_90: 26 instructions for an element, which moves 6 bytes (budget: 41), and 38
   with WHOLE; 8 blocks on a multiprocessor. */
template <int TYPE, bool WHOLE>
static __global__ void __launch_bounds__(MTI_ROW_THREADS, 4)
    mti_softmax_backward_kernel(int64_t first, mti_softmax_op s) {
    int64_t row = first + blockIdx.x;
    float sum = WHOLE ? mti_softmax_row_sum<TYPE>(s, row) : mti_get<MT_F32>(s.sums, row, 0);
    int fast = s.dx.dtype != MT_F32;
    for (int64_t i = threadIdx.x; i * MTI_VECTOR < s.cols; i += blockDim.x) {
        mti_fetched<TYPE> a, b;
        float y[MTI_VECTOR], dy[MTI_VECTOR];
        mti_row_fetch(s.y, row, i, s.cols, a);
        mti_row_fetch(s.dy, row, i, s.cols, b);
        mti_values(a, y);
        mti_values(b, dy);
        for (int j = 0; j < MTI_VECTOR; j++) {
            float g = s.log ? dy[j] - mti_cuda_exp(fast, y[j]) * sum : y[j] * (dy[j] - sum);
            dy[j] = i * MTI_VECTOR + j < s.real ? g : 0.0f;
        }
        mti_row_store<TYPE>(s.dx, row, i, s.cols, dy);
    }
}

static mti_softmax_op mti_softmax_op_of(const mti_softmax_args *s, mt_tensor t) {
    mti_softmax_op op = {mti_view_of(s->stats),
                         mti_view_of(s->y),
                         mti_view_of(s->dy),
                         mti_view_of(s->sums),
                         mti_view_of(s->dx),
                         s->real,
                         t.cols,
                         s->shards,
                         t.rows,
                         s->log};
    return op;
}

static mti_ce mti_softmax_rows_of(const mti_softmax_args *s) {
    const mt_cross_entropy_shard_desc whole = {s->real, 0, 0.0f, 0};
    return mti_ce_of(&whole, s->x, NULL);
}

static mt_status mti_cuda_softmax_forward(mt_context *ctx, const char *name, const mti_softmax_args *s) {
    mti_ce c = mti_softmax_rows_of(s);
    mti_softmax_op op = mti_softmax_op_of(s, s->y);
    unsigned threads = mti_ce_threads(s->y.cols);
    MT_TRY(mt_cuda_enter(ctx));
    return mti_ce_by_type(s->x, [&](auto type) {
        static const int of = decltype(type)::value;
        if (s->shards == 0)
            MTI_LAUNCH_BLOCKS((mti_softmax_kernel<of, true>), s->y.rows, threads, 0, mt_context_stream(ctx), c, op);
        else MTI_LAUNCH_BLOCKS((mti_softmax_kernel<of, false>), s->y.rows, threads, 0, mt_context_stream(ctx), c, op);
        return mt_cuda_launched(ctx, name);
    });
}

static mt_status mti_cuda_softmax_stats(mt_context *ctx, const char *name, const mti_softmax_args *s) {
    mti_ce c = mti_softmax_rows_of(s);
    mti_softmax_op op = mti_softmax_op_of(s, s->x);
    MT_TRY(mt_cuda_enter(ctx));
    return mti_ce_by_type(s->x, [&](auto type) {
        MTI_LAUNCH_BLOCKS(mti_softmax_stats_kernel<decltype(type)::value>, s->x.rows, mti_ce_threads(s->x.cols), 0,
                          mt_context_stream(ctx), c, op);
        return mt_cuda_launched(ctx, name);
    });
}

static mt_status mti_cuda_softmax_sums(mt_context *ctx, const char *name, const mti_softmax_args *s) {
    mti_softmax_op op = mti_softmax_op_of(s, s->dy);
    int type = s->log ? mti_row_type(s->dy.cols, s->dy) : mti_row_type(s->dy.cols, s->dy, s->y);
    MT_TRY(mt_cuda_enter(ctx));
    return mti_by_type(type, [&](auto of) {
        MTI_LAUNCH_BLOCKS(mti_softmax_sums_kernel<decltype(of)::value>, s->dy.rows,
                          mti_row_threads(mt_max(1, s->dy.cols)), 0, mt_context_stream(ctx), op);
        return mt_cuda_launched(ctx, name);
    });
}

static mt_status mti_cuda_softmax_backward(mt_context *ctx, const char *name, const mti_softmax_args *s) {
    mti_softmax_op op = mti_softmax_op_of(s, s->dx);
    unsigned threads = mti_row_threads(s->dx.cols);
    MT_TRY(mt_cuda_enter(ctx));
    return mti_by_type(mti_row_type(s->dx.cols, s->dx, s->y, s->dy), [&](auto type) {
        static const int of = decltype(type)::value;
        if (s->shards == 0)
            MTI_LAUNCH_BLOCKS((mti_softmax_backward_kernel<of, true>), s->dx.rows, threads, 0, mt_context_stream(ctx),
                              op);
        else
            MTI_LAUNCH_BLOCKS((mti_softmax_backward_kernel<of, false>), s->dx.rows, threads, 0, mt_context_stream(ctx),
                              op);
        return mt_cuda_launched(ctx, name);
    });
}

} /* extern "C++" */
#endif
