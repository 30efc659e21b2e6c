/* ---- AdamW and sums of squares of many tensors, on a GPU --------------------------------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

/* A tensor of a list. The blocks of the launch with numbers from first_block on work on it. */
struct mti_segment {
    mti_view view[6]; /* AdamW: as in mti_adamw_op; sums of squares: x */
    int64_t rows, cols, first_block, blocks, out;
    int is_wide, weight_decay;
    mt_random random;
};

#define MTI_SEGMENT_THREADS 128 /* AdamW: threads of a block; three such blocks fit into a multiprocessor's registers */
#define MTI_SEGMENT_VECTORS 512 /* AdamW: vectors of a block, four for each thread */

static __host__ __device__ int64_t mti_segment_vectors(const mti_segment &s) {
    return s.rows * ((s.cols + MTI_VECTOR - 1) / MTI_VECTOR);
}

/* Returns the tensor that a block works on: the last one whose first block is not behind it. `count` is at least 1.
   Each step of the search divides the range by 32, because the lanes of a warp look at 32 tensors at once. The search
   of 10,000 tensors takes three steps. All lanes must call it. */
static __device__ __forceinline__ int mti_segment_of(const mti_segment *list, int count, int64_t block) {
    int first = 0, lane = (int)threadIdx.x & 31;
    while (count > 1) {
        int step = (count + 31) / 32, at = lane * step;
        int64_t begin = list[first + (at < count ? at : 0)].first_block;
        unsigned before = __ballot_sync(0xffffffffu, at < count && begin <= block);
        int skipped = (31 - __clz((int)before)) * step;
        first += skipped;
        count = count - skipped < step ? count - skipped : step;
    }
    return first;
}

/* What all tensors of a step have in common. */
struct mti_multi_step {
    mti_adamw a;
    int skip;
    int64_t number;
};

/* Computes the step from values in memory, for the kernel behind it. One thread. */
static __global__ void __launch_bounds__(32)
    mti_multi_step_kernel(mt_adamw hyper, const mt_adamw_values *values, mti_multi_step *out) {
    if (threadIdx.x != 0) return;
    hyper = mti_adamw_with(hyper, values);
    out->skip = values->skip;
    out->a = mti_adamw_resolve(&hyper);
    out->number = hyper.step;
}

/* The step is an argument, or `later`, which an earlier kernel has computed. Blocks share no data, and there is no
   barrier. On sm_90: at most 65 instructions for an element, which moves 28 bytes in f32 and 30 in bf16 with an f32
   master (budget: 190 or 204); with STOCHASTIC in bf16 at most 107 for 24 bytes (163). */
template <bool STOCHASTIC>
static __global__ void __launch_bounds__(MTI_SEGMENT_THREADS, 3)
    mti_multi_adamw_kernel(const mti_segment *list, int count, int64_t blocks, mti_multi_step step,
                           const mti_multi_step *later) {
    if (later) step = *later;
    for (int64_t block = blockIdx.x; block < blocks && !step.skip; block += gridDim.x) {
        const mti_segment &s = list[mti_segment_of(list, count, block)];
        int64_t per_row = (s.cols + MTI_VECTOR - 1) / MTI_VECTOR;
        int64_t i = (block - s.first_block) * MTI_SEGMENT_VECTORS, end = mti_segment_vectors(s);
        mti_adamw_op<STOCHASTIC> op;
        op.param = s.view[0], op.master = s.view[1], op.weights = s.view[2];
        op.grad = s.view[3], op.m = s.view[4], op.v = s.view[5];
        op.a = step.a;
        if (!s.weight_decay) op.a.keep = 1.0f;
        if (STOCHASTIC) op.at = s.random;
        if (STOCHASTIC) op.at.subsequence += (uint64_t)step.number;
        if (end > i + MTI_SEGMENT_VECTORS) end = i + MTI_SEGMENT_VECTORS;
        for (i += threadIdx.x; i < end; i += MTI_SEGMENT_THREADS) {
            int64_t row = s.rows == 1 ? 0 : mt_divide(i, per_row), col = (i - row * per_row) * MTI_VECTOR;
            if (s.is_wide) op.template run<true>(row, col, mti_vector_size(s.cols, col));
            else op.template run<false>(row, col, mti_vector_size(s.cols, col));
        }
    }
}

/* partial[block] = the sum of the squares of the vectors of the block, as in mti_sum_kernel. shared holds the sums of
   the threads. mti_block_sum_double has the barriers. The next block needs none before it, because after the last
   barrier only thread 0 uses shared: it reads and later writes shared[0]. On sm_90: 7 instructions for an f32 element,
   which moves 4 bytes (budget: 27). */
static __global__ void __launch_bounds__(256, 4)
    mti_multi_squares_kernel(const mti_segment *list, int count, int64_t blocks, double *partial) {
    MT_SHARED(double, shared, 256);
    for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
        const mti_segment &s = list[mti_segment_of(list, count, block)];
        int64_t own = block - s.first_block;
        double sum;
        if (s.is_wide) sum = mti_thread_sum<true>(s.view[0], s.rows, s.cols, 1, own, s.blocks);
        else sum = mti_thread_sum<false>(s.view[0], s.rows, s.cols, 1, own, s.blocks);
        sum = mti_block_sum_double(sum, shared);
        if (threadIdx.x == 0) partial[block] = sum;
    }
}

/* sums[tensor] = the sum of the partial sums of its blocks, as in mti_sum_end_kernel. A block of threads for each
   tensor. shared and barriers are as in mti_sum_end_kernel. */
static __global__ void __launch_bounds__(256)
    mti_multi_squares_join_kernel(int64_t first, const mti_segment *list, const double *partial, double *sums) {
    MT_SHARED(double, shared, 256);
    int64_t tensor = first + blockIdx.x;
    const mti_segment &s = list[tensor];
    double sum = 0.0;
    for (int i = (int)threadIdx.x; i < (int)s.blocks; i += 256) sum += partial[s.first_block + i];
    sum = mti_block_sum_double(sum, shared);
    if (threadIdx.x == 0) sums[tensor] = sum;
}

/* Adds the sums of the tensors to their columns of out, in the order of the list, 256 tensors at a time. A thread owns
   every 256th column. It finds the sums and the columns of the tensors in shared memory. The first barrier separates
   writing them from reading them, and the second one reading them from writing those of the next tensors. */
static __global__ void __launch_bounds__(256)
    mti_multi_squares_end_kernel(const mti_segment *list, int count, const double *sums, mti_view out, int64_t outs) {
    MT_SHARED(double, values, 256);
    MT_SHARED(int64_t, columns, 256);
    for (int first = 0; first < count; first += 256) {
        int tensors = count - first < 256 ? count - first : 256, own = (int)threadIdx.x;
        if (own < tensors) values[own] = sums[first + own], columns[own] = list[first + own].out;
        __syncthreads();
        for (int64_t column = threadIdx.x; column < outs; column += 256) {
            float sum = mti_get(out, 0, column);
            for (int i = 0; i < tensors; i++)
                if (columns[i] == column) sum = (float)((double)sum + values[i]);
            mti_put(out, 0, column, sum);
        }
        __syncthreads();
    }
}

static int mti_is_dense(mt_tensor t) { return !t.data || t.rows <= 1 || mt_tensor_ld(t) == t.cols; }

/* Fills s with the views of one tensor. Rows that follow each other without a gap become one row if one_row is set. */
static void mti_segment_fill(mti_segment *s, const mt_tensor *views, int count, int one_row) {
    int i, dense = one_row;
    memset(s, 0, sizeof *s);
    s->is_wide = 1;
    for (i = 0; i < count; i++) {
        s->view[i] = mti_view_of(views[i]);
        s->is_wide = s->is_wide && mti_is_wide(views[i]);
        dense = dense && mti_is_dense(views[i]);
    }
    s->rows = dense ? 1 : views[0].rows;
    s->cols = dense ? views[0].rows * views[0].cols : views[0].cols;
    if (dense) /* mti_is_wide has looked at the leading dimension of several rows */
        for (i = 0, s->is_wide = 1; i < count; i++) s->is_wide = s->is_wide && (uintptr_t)views[i].data % 16 == 0;
}

/* Fills the table of a list and counts its blocks. */
static void mti_segments_fill(mt_multi_tensor *list, mti_segment *table) {
    int i;
    for (i = 0; i < list->count; i++) {
        mti_segment *s = table + i;
        if (list->is_adamw) {
            const mt_adamw_tensor *t = list->adamw + i;
            mt_tensor weights = t->master.data ? t->master : t->param;
            mt_tensor views[6] = {t->param, t->master, weights, t->grad, t->m, t->v};
            mti_segment_fill(s, views, 6, !list->stochastic_rounding);
            s->blocks = (mti_segment_vectors(*s) + MTI_SEGMENT_VECTORS - 1) / MTI_SEGMENT_VECTORS;
            s->weight_decay = t->weight_decay;
            s->random = t->random;
        } else {
            mti_segment_fill(s, &list->squares[i].x, 1, 0);
            s->blocks = mti_sum_blocks(s->rows, s->cols);
            s->out = list->squares[i].out;
        }
        s->first_block = list->blocks;
        list->blocks += s->blocks;
    }
}

/* The table, and behind it the step that mti_multi_step_kernel computes. */
static size_t mti_multi_table_bytes(const mt_multi_tensor *list) {
    return (size_t)list->count * sizeof(mti_segment) + sizeof(mti_multi_step);
}

/* Makes the table on the GPU. A context that plans for CUDA only counts its bytes. */
static mt_status mti_cuda_multi_table(mt_context *ctx, mt_multi_tensor *list) {
    size_t bytes = mti_multi_table_bytes(list);
    mti_segment *table = (mti_segment *)mt_host_alloc(bytes);
    mt_status status;
    if (!table) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for %zu bytes", bytes);
    mti_segments_fill(list, table);
    status = mt_context_alloc(ctx, bytes, &list->table);
    if (status == MT_SUCCESS)
        status = mt_upload(ctx, table, mt_tensor_make(list->table, MT_I32, 1, (int64_t)(bytes / sizeof(int32_t))));
    mt_host_free(table);
    return status;
}

static mt_status mti_cuda_multi_adamw(mt_context *ctx, const mt_multi_tensor *list, const mt_adamw *hyper,
                                      const mt_adamw_values *values) {
    const mti_segment *table = (const mti_segment *)list->table;
    mti_multi_step now = {mti_adamw_resolve(hyper), 0, hyper->step}, *later = NULL;
    MT_TRY(mt_cuda_enter(ctx));
    if (values) {
        later = (mti_multi_step *)((mti_segment *)list->table + list->count);
        MT_LAUNCH_KERNEL(mti_multi_step_kernel, 1, 32, 0, mt_context_stream(ctx), *hyper, values, later);
        MT_TRY(mt_cuda_launched(ctx, "mt_multi_tensor_adamw"));
    }
    if (list->stochastic_rounding)
        MT_LAUNCH_KERNEL(mti_multi_adamw_kernel<true>, mti_grid(list->blocks, 1), MTI_SEGMENT_THREADS, 0,
                         mt_context_stream(ctx), table, list->count, list->blocks, now, later);
    else
        MT_LAUNCH_KERNEL(mti_multi_adamw_kernel<false>, mti_grid(list->blocks, 1), MTI_SEGMENT_THREADS, 0,
                         mt_context_stream(ctx), table, list->count, list->blocks, now, later);
    return mt_cuda_launched(ctx, "mt_multi_tensor_adamw");
}

static mt_status mti_cuda_multi_squares(mt_context *ctx, const mt_multi_tensor *list, mt_tensor out) {
    static const char *const where = "mt_multi_tensor_sum_of_squares";
    const mti_segment *table = (const mti_segment *)list->table;
    cudaStream_t stream = mt_context_stream(ctx);
    void *partial, *sums;
    MT_TRY(mt_arena_alloc(ctx, (size_t)list->blocks * sizeof(double), &partial));
    MT_TRY(mt_arena_alloc(ctx, (size_t)list->count * sizeof(double), &sums));
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_multi_squares_kernel, mti_grid(list->blocks, 1), 256, 0, stream, table, list->count,
                     list->blocks, (double *)partial);
    MT_TRY(mt_cuda_launched(ctx, where));
    MTI_LAUNCH_BLOCKS(mti_multi_squares_join_kernel, list->count, 256, 0, stream, table, (const double *)partial,
                      (double *)sums);
    MT_TRY(mt_cuda_launched(ctx, where));
    MT_LAUNCH_KERNEL(mti_multi_squares_end_kernel, 1, 256, 0, stream, table, list->count, (const double *)sums,
                     mti_view_of(out), list->outs);
    return mt_cuda_launched(ctx, where);
}

} /* extern "C++" */
#endif
