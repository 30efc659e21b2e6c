/* ---- cross-entropy, on a GPU ------------------------------------------------------------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

/* The arguments of the cross-entropy kernels, and the formulas that they share. */
struct mti_ce {
    mti_view logits, stats, lse, dloss;
    const int32_t *targets;
    mt_cross_entropy_shard_desc desc;
    int64_t real; /* columns that are not padding */
    int64_t bulk; /* the number of chunks of a row, and of its vectors: see mti_ce_head */
    float scale;
    int32_t ignore;

    __device__ int64_t target_of(int64_t row) const { /* the column of the target in this shard, or -1 */
        int64_t col = (int64_t)targets[row] - desc.first_col;
        return targets[row] != ignore && col >= 0 && col < real ? col : -1;
    }
    __device__ float loss_of(int64_t row, float top, float log_sum, float target, float plain) const {
        float value = log_sum + (1.0f - desc.label_smoothing) * (top - target);
        if (desc.label_smoothing > 0.0f) value += desc.label_smoothing * (top - plain / (float)desc.vocab);
        return targets[row] == ignore ? 0.0f : value;
    }
};

/* e^(x - below), as 2^((x - below) log2 e) for 16-bit logits: one instruction after two roundings, whose relative error
   of 1.2e-7 |x - below| is far below the distance of two 16-bit gradients. */
template <int TYPE> static __device__ __forceinline__ float mti_ce_exp(float x, float below) {
    if (TYPE == MT_BF16 || TYPE == MT_F16) return mti_ex2((x - below) * 1.44269504f);
    return expf(x - below);
}

/* What a thread knows of the elements of a row that it has seen: their maximum `top`, the sum of their exponentials
   relative to `top`, and their plain sum. */
template <int TYPE> struct mti_ce_sums {
    float top, sum, plain;

    static __device__ __forceinline__ float finite(float top) { return top == -INFINITY ? 0.0f : top; }
    /* Raises the maximum. The sum is then relative to the new one. */
    __device__ __forceinline__ void rescale(float to) {
        sum *= mti_ce_exp<TYPE>(top, finite(to)); /* e^-infinity at first, when sum is 0 */
        top = to;
    }
    __device__ __forceinline__ void add(float x) {
        sum += mti_ce_exp<TYPE>(x, finite(top));
        plain += x;
    }
};

#define MTI_CE_THREADS 512 /* maximum per block; two such blocks fit into the registers of a multiprocessor */

/* At least 32, because each thread has at most one of the up to 23 elements that are in no vector. */
static unsigned mti_ce_threads(int64_t cols) {
    return (unsigned)mt_max(32,
                            mt_min(MTI_CE_THREADS, mt_round_up((cols + 4 * MTI_VECTOR - 1) / (4 * MTI_VECTOR), 32)));
}

/* Returns `head`, the last column from 1 to MTI_VECTOR whose address is a multiple of 16 bytes. A row may begin at
   any element: with 50257 columns, most rows are not aligned. So its elements are divided in two ways. Vector i
   begins at column 8 * i + 8, chunk i at column 8 * i + head. Both have 8 = MTI_VECTOR elements, and i is less than
   c.bulk. Threads load and store chunks. They add vectors, so the bits of a sum do not depend on the alignment. The
   other elements, up to 23 and the padding, are accessed one by one. So no thread accesses memory outside of its
   row. */
template <int TYPE> static __device__ __forceinline__ int mti_ce_head(const mti_ce &c, int64_t row) {
    const int size = mti_fetched<TYPE>::size;
    return MTI_VECTOR - (int)((uintptr_t)(c.logits.data + row * c.logits.ld * size) % 16) / size;
}

/* Turns a chunk into the vector that begins `skip` bytes after the beginning of the chunk, 0 < skip < 16. The last
   `skip` bytes of the vector are the first ones of `next`. skip is the same for the whole row. */
template <int TYPE>
static __device__ __forceinline__ void mti_ce_shift(mti_fetched<TYPE> &chunk, const mti_words &next, int skip) {
    const int count = sizeof chunk / 4;
    uint32_t w[count + 4];
    MT_DEVICE_UNROLL
    for (int j = 0; j < count + 4; j++) w[j] = j < count ? chunk.words[j / 4].w[j % 4] : next.w[j - count];
    MT_DEVICE_UNROLL
    for (int j = 0; j < count + 2; j++) w[j] = skip & 8 ? w[j + 2] : w[j];
    MT_DEVICE_UNROLL
    for (int j = 0; j < count + 1; j++) w[j] = skip & 4 ? w[j + 1] : w[j];
    MT_DEVICE_UNROLL
    for (int j = 0; j < count; j++)
        chunk.words[j / 4].w[j % 4] =
            TYPE == MT_F32 ? w[j] : (uint32_t)(((uint64_t)w[j + 1] << 32 | w[j]) >> 8 * (skip & 2));
}

/* Adds COUNT vectors of a thread to own: that of the chunk at element `at` of the logits, and those of every
   blockDim-th chunk behind it. Copies the chunks to `room`, if this is given. Moves `at` and `room` to the thread's
   next chunk. The last bytes of a vector are in the chunk of another thread, which loads it at the same time, so they
   are expected in the L1 cache. */
template <int TYPE, int COUNT>
static __device__ __forceinline__ void mti_ce_add_group(const mti_ce &c, int64_t &at, mti_words *&room, int skip,
                                                        mti_ce_sums<TYPE> &own) {
    static const int words = sizeof(mti_fetched<TYPE>) / sizeof(mti_words);
    mti_fetched<TYPE> held[COUNT];
    int64_t step = blockDim.x;
    float top = own.top, x[MTI_VECTOR];
    MT_DEVICE_UNROLL
    for (int q = 0; q < COUNT; q++) mti_fetch<true>(c.logits, 0, at + q * step * MTI_VECTOR, MTI_VECTOR, held[q]);
    MT_DEVICE_UNROLL
    for (int q = 0; q < COUNT && room; q++)
        for (int k = 0; k < words; k++) room[k * c.bulk + q * step] = held[q].words[k];
    MT_DEVICE_UNROLL
    for (int q = 0; q < COUNT && skip; q++)
        mti_ce_shift(held[q],
                     mti_load_words(c.logits.data + (at + (q * step + 1) * MTI_VECTOR) * mti_fetched<TYPE>::size),
                     skip);
    MT_DEVICE_UNROLL
    for (int q = 0; q < COUNT; q++) {
        mti_values(held[q], x);
        MT_DEVICE_UNROLL
        for (int j = 0; j < MTI_VECTOR; j++) top = fmaxf(top, x[j]);
    }
    own.rescale(top);
    MT_DEVICE_UNROLL
    for (int q = 0; q < COUNT; q++) {
        mti_values(held[q], x);
        MT_DEVICE_UNROLL
        for (int j = 0; j < MTI_VECTOR; j++) own.add(x[j]);
    }
    at += COUNT * step * MTI_VECTOR;
    if (room) room += COUNT * step;
}

/* What a thread knows of its part of a row, in one pass over it. The thread owns every blockDim-th vector, and one of
   the elements that are in no vector. With `room`, it also copies its chunks to shared memory. */
template <int TYPE>
static __device__ __forceinline__ mti_ce_sums<TYPE> mti_ce_part(const mti_ce &c, int64_t row, mti_words *room) {
    int head = mti_ce_head<TYPE>(c, row), skip = (MTI_VECTOR - head) * mti_fetched<TYPE>::size;
    int64_t at = row * c.logits.ld + head, end = at + c.bulk * MTI_VECTOR, step = blockDim.x * MTI_VECTOR;
    int64_t edge = threadIdx.x;
    mti_ce_sums<TYPE> own = {-INFINITY, 0.0f, 0.0f};
    at += threadIdx.x * MTI_VECTOR;
    if (room) room += threadIdx.x;
    while (TYPE != MT_F32 && at + 3 * step < end) mti_ce_add_group<TYPE, 4>(c, at, room, skip, own);
    while (at + step < end) mti_ce_add_group<TYPE, 2>(c, at, room, skip, own);
    if (at < end) mti_ce_add_group<TYPE, 1>(c, at, room, skip, own);
    if (edge >= MTI_VECTOR) edge += c.bulk * MTI_VECTOR;
    if (edge < c.real) {
        float x = mti_get<TYPE>(c.logits, row, edge);
        own.rescale(fmaxf(own.top, x));
        own.add(x);
    }
    return own;
}

/* Raises the maximum of each thread to that of its block. Shuffles give the maximum of each warp, and tops [32] holds
   those of all warps. The barrier separates writing `tops` from reading it. After it, all threads have read their
   parts of the row. */
template <int TYPE> static __device__ __forceinline__ void mti_ce_rescale(mti_ce_sums<TYPE> &own, float *tops) {
    float all = mti_warp_max(own.top);
    if ((threadIdx.x & 31) == 0) tops[threadIdx.x >> 5] = all;
    __syncthreads();
    for (int w = 0; w < (int)blockDim.x / 32; w++) all = fmaxf(all, tops[w]);
    own.rescale(all);
}

/* Returns the four statistics of a row to every thread of its block, in one pass over the row, which mti_ce_part also
   copies to `room`, if this is given.

   1. Each thread computes the maximum of its part of the row, and the sum of exponentials relative to this maximum.
      `hit` holds the logit of the target.
   2. Each thread rescales its sum to the maximum of the row. The barrier in mti_ce_rescale also separates writing `hit`
      from reading it, and ensures that the row and the logit of the target are read before the caller overwrites
      logits with gradients.
   3. mti_block_sums_once adds the sums through `shared`. */
template <int TYPE> static __device__ __forceinline__ float4 mti_ce_row(const mti_ce &c, int64_t row, mti_words *room) {
    MT_SHARED(float, shared, 64);
    MT_SHARED(float, tops, 32);
    MT_SHARED(float, hit, 1);
    int target = (int)c.target_of(row); /* a target is an int32_t */
    mti_ce_sums<TYPE> own = mti_ce_part<TYPE>(c, row, room);
    if (threadIdx.x == 0)
        *hit = target >= 0 ? mti_get<TYPE>(c.logits, row, target) : 0.0f; /* before gradients are written */
    mti_ce_rescale(own, tops);
    float2 sums = mti_block_sums_once(own.sum, own.plain, shared);
    return make_float4(own.top, sums.x, *hit, sums.y);
}

/* Writes stats. A block owns row first + blockIdx.x; shared memory and barriers are those of mti_ce_row. In bf16 on
   sm_90: 8 instructions for an element, which moves 2 bytes (budget: 13), and 10 in a row that is not aligned; 63
   registers, 2 blocks on a multiprocessor. */
template <int TYPE>
static __global__ void __launch_bounds__(MTI_CE_THREADS, 2) mti_ce_stats_kernel(int64_t first, mti_ce c) {
    int64_t row = first + blockIdx.x;
    float4 s = mti_ce_row<TYPE>(c, row, NULL);
    if (threadIdx.x != 0) return;
    mti_put(c.stats, row, 0, s.x);
    mti_put(c.stats, row, 1, s.y);
    mti_put(c.stats, row, 2, s.z);
    mti_put(c.stats, row, 3, s.w);
}

/* The numbers of a row from which its gradients are computed: factor * softmax - even, and at the target
   factor * softmax - hot. fma, so that each place that computes one rounds alike. */
struct mti_ce_scales {
    float top, log_sum, factor, even, hot;
    template <int TYPE> __device__ __forceinline__ float gradient(float x, float minus) const {
        return __fmaf_rn(factor, mti_ce_exp<TYPE>(x - top, log_sum), -minus);
    }
};

/* Replaces COUNT chunks by their gradients: i, i + blockDim.x, and so on. */
template <int TYPE, int COUNT>
static __device__ __forceinline__ void mti_ce_gradient_group(const mti_ce &c, const mti_view &chunks, int64_t i,
                                                             const mti_ce_scales &s, const mti_words *room) {
    static const int words = sizeof(mti_fetched<TYPE>) / sizeof(mti_words);
    mti_fetched<TYPE> held[COUNT];
    int64_t step = blockDim.x;
    float x[MTI_VECTOR];
    MT_DEVICE_UNROLL
    for (int q = 0; q < COUNT; q++) {
        for (int k = 0; k < words && room; k++) held[q].words[k] = mti_load_words(room + k * c.bulk + i + q * step);
        if (!room) mti_row_fetch(chunks, 0, i + q * step, c.real, held[q]);
    }
    MT_DEVICE_UNROLL
    for (int q = 0; q < COUNT; q++) {
        mti_values(held[q], x);
        MT_DEVICE_UNROLL
        for (int j = 0; j < MTI_VECTOR; j++) x[j] = s.gradient<TYPE>(x[j], s.even);
        mti_row_store<TYPE>(chunks, 0, i + q * step, c.real, x);
    }
}

/* Replaces a row of logits by its gradient. A thread owns every blockDim-th chunk, and every blockDim-th element that
   is in no chunk, to the end of the padding. With `room`, it reads its chunks from shared memory. The owner of the
   target's chunk reads the logit of the target before it writes gradients, and afterwards writes the gradient of the
   target, so that no other chunk is compared with the target. The gradient of an ignored row is 0 whatever its logits
   are. */
template <int TYPE>
static __device__ __forceinline__ void mti_ce_gradient_row(const mti_ce &c, int64_t row, int64_t cols, float top,
                                                           float log_sum, const mti_words *room) {
    int head = mti_ce_head<TYPE>(c, row), ignored = c.targets[row] == c.ignore;
    int64_t step = blockDim.x, i = threadIdx.x, target = c.target_of(row), at = (target - head) / MTI_VECTOR;
    int owner = target >= head && at < c.bulk;
    float factor = c.dloss.data ? c.scale * mti_get(c.dloss, row, 0) : c.scale;
    float even = factor * (c.desc.label_smoothing / (float)c.desc.vocab), zeros[MTI_VECTOR] = {}, hit = 0.0f;
    mti_ce_scales s = {top, log_sum, factor, even, factor * (1.0f - c.desc.label_smoothing) + even};
    mti_view chunks = c.logits;
    chunks.data += (row * c.logits.ld + head) * mti_fetched<TYPE>::size;
    if (owner) owner = at - mt_divide(at, step) * step == i;
    if (owner) hit = mti_get<TYPE>(c.logits, row, target);
    for (; ignored && i < c.bulk; i += step) mti_row_store<TYPE>(chunks, 0, i, c.real, zeros);
    for (; TYPE != MT_F32 && i + 3 * step < c.bulk; i += 4 * step)
        mti_ce_gradient_group<TYPE, 4>(c, chunks, i, s, room);
    for (; i + step < c.bulk; i += 2 * step) mti_ce_gradient_group<TYPE, 2>(c, chunks, i, s, room);
    if (i < c.bulk) mti_ce_gradient_group<TYPE, 1>(c, chunks, i, s, room);
    if (owner) mti_put<TYPE>(c.logits, row, target, s.gradient<TYPE>(hit, s.hot));
    for (int64_t edge = threadIdx.x; edge < cols - c.bulk * MTI_VECTOR; edge += step) {
        int64_t col = edge < head ? edge : edge + c.bulk * MTI_VECTOR;
        float g = 0.0f;
        if (!ignored && col < c.real)
            g = s.gradient<TYPE>(mti_get<TYPE>(c.logits, row, col), col == target ? s.hot : s.even);
        mti_put<TYPE>(c.logits, row, col, g);
    }
}

/* The gradient from lse. A block owns row first + blockIdx.x. There is no shared memory and no barrier. In bf16 on
   sm_90: 7 instructions for an element, which moves 4 bytes (budget: 27); 63 registers, 2 blocks on a
   multiprocessor. */
template <int TYPE>
static __global__ void __launch_bounds__(MTI_CE_THREADS, 2)
    mti_ce_backward_kernel(int64_t first, mti_ce c, int64_t cols) {
    int64_t row = first + blockIdx.x;
    mti_ce_gradient_row<TYPE>(c, row, cols, mti_get(c.lse, 0, row), mti_get(c.lse, 1, row), NULL);
}

/* Computes the loss and the gradient for a whole vocabulary. A block owns row first + blockIdx.x. With keep, `room` in
   shared memory holds the chunks of the row. Otherwise the row is read again, from the L2 cache. The barriers are in
   mti_ce_row: after them, all threads have read the vectors of the row, and thread 0 the logit of the target, so
   gradients may overwrite logits. All other logits that a thread reads, in `room` as well, are its own. In bf16 on
   sm_90: 17 instructions for an element, which moves 4 bytes (budget: 27), and 19 in a row that is not aligned; 64
   registers; with 50304 columns, 2 blocks on a multiprocessor. */
template <int TYPE>
static __global__ void __launch_bounds__(MTI_CE_THREADS, 2)
    mti_ce_kernel(int64_t first, mti_ce c, int64_t cols, mti_view loss, int keep) {
    MT_DYN_SHARED(mti_words, room);
    int64_t row = first + blockIdx.x;
    float4 s = mti_ce_row<TYPE>(c, row, keep ? room : NULL);
    float log_sum = logf(s.y);
    if (threadIdx.x == 0) mti_put(loss, 0, row, c.loss_of(row, s.x, log_sum, s.z, s.w));
    mti_ce_gradient_row<TYPE>(c, row, cols, s.x, log_sum, keep ? room : NULL);
}

/* dloss as a column, whose element is the same for all tokens if there is one. */
static mti_view mti_ce_dloss(mt_tensor dloss) {
    mti_view v = mti_view_of(dloss);
    v.ld = dloss.cols == 1 ? 0 : 1;
    return v;
}

static mti_ce mti_ce_of(const mt_cross_entropy_shard_desc *s, mt_tensor logits, const int32_t *targets) {
    mti_ce c;
    memset(&c, 0, sizeof c);
    c.logits = mti_view_of(logits);
    c.targets = targets;
    c.desc = *s;
    c.real = mti_real_columns(s, logits.cols);
    c.bulk = mt_max(0, c.real / MTI_VECTOR - 2);
    c.ignore = mti_ignore_index(s->ignore_index);
    return c;
}

/* mti_by_kind, for the type of the logits. */
template <typename Launch> static mt_status mti_ce_by_type(mt_tensor logits, const Launch &f) {
    static_assert(MT_F32 == 0 && MT_BF16 == 1 && MT_F16 == 2, "the float types are the first three");
    return mti_by_kind<3>((int)logits.dtype, f);
}

template <int TYPE> static mt_status mti_ce_stats_launch(mt_context *ctx, const mti_ce &c, mt_tensor logits) {
    MTI_LAUNCH_BLOCKS(mti_ce_stats_kernel<TYPE>, logits.rows, mti_ce_threads(logits.cols), 0, mt_context_stream(ctx),
                      c);
    return mt_cuda_launched(ctx, "mt_cross_entropy_stats");
}

static mt_status mti_cuda_cross_entropy_stats(mt_context *ctx, const mt_cross_entropy_shard_desc *s, mt_tensor logits,
                                              const int32_t *targets, mt_tensor stats) {
    mti_ce c = mti_ce_of(s, logits, targets);
    c.stats = mti_view_of(stats);
    if (logits.rows == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    return mti_ce_by_type(logits,
                          [&](auto type) { return mti_ce_stats_launch<decltype(type)::value>(ctx, c, logits); });
}

template <int TYPE> static mt_status mti_ce_backward_launch(mt_context *ctx, const mti_ce &c, mt_tensor logits) {
    MTI_LAUNCH_BLOCKS(mti_ce_backward_kernel<TYPE>, logits.rows, mti_ce_threads(logits.cols), 0, mt_context_stream(ctx),
                      c, logits.cols);
    return mt_cuda_launched(ctx, "mt_cross_entropy_backward");
}

template <int TYPE> static mt_status mti_ce_launch(mt_context *ctx, const mti_ce &c, mt_tensor logits, mt_tensor loss) {
    size_t bytes = (size_t)c.bulk * sizeof(mti_fetched<TYPE>), most = 0;
    MT_TRY(mti_shared_most(ctx, &most));
    int keep = bytes <= most;
    if (!keep) bytes = 0;
    MT_TRY(mti_shared_allow(ctx, mti_ce_kernel<TYPE>, bytes));
    MTI_LAUNCH_BLOCKS(mti_ce_kernel<TYPE>, logits.rows, mti_ce_threads(logits.cols), bytes, mt_context_stream(ctx), c,
                      logits.cols, mti_view_of(loss), keep);
    return mt_cuda_launched(ctx, "mt_cross_entropy_forward_backward");
}

static mt_status mti_cuda_cross_entropy(mt_context *ctx, const mt_cross_entropy_shard_desc *s, mt_tensor logits,
                                        const int32_t *targets, mt_tensor dloss, float scale, mt_tensor loss) {
    mti_ce c = mti_ce_of(s, logits, targets);
    c.dloss = mti_ce_dloss(dloss);
    c.scale = scale;
    if (logits.rows == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    return mti_ce_by_type(logits,
                          [&](auto type) { return mti_ce_launch<decltype(type)::value>(ctx, c, logits, loss); });
}

#define MTI_CE_DEPTH 11 /* levels of the tree over MTI_CE_SHARDS shards */

/* x [COUNT] = the joined statistics of all shards for token i, in the order of mti_stats_tree. The stack holds finished
   subtrees, like the bits of a binary counter: two subtrees of the same size are joined immediately, and the remaining
   ones at the end, from the right. */
template <int COUNT>
static __device__ void mti_stats_joined(const mti_view &stats, int64_t shards, int64_t tokens, int64_t i, float *x) {
    float stack[MTI_CE_DEPTH][COUNT];
    int depth = 0;
    for (int64_t s = 0; s <= shards; s++) {
        int64_t joins = s;
        if (s < shards)
            for (int q = 0; q < COUNT; q++) x[q] = mti_get(stats, s * tokens + i, q);
        else if (depth > 0)
            for (int q = 0; q < COUNT; q++) x[q] = stack[depth - 1][q];
        if (s == shards) depth--; /* at the end, join the remaining subtrees */
        while (depth > 0 && (s == shards || (joins & 1))) {
            float *l = stack[--depth], top = fmaxf(l[0], x[0]);
            x[1] = top == -INFINITY ? l[1] + x[1] : l[1] * expf(l[0] - top) + x[1] * expf(x[0] - top);
            x[0] = top;
            for (int q = 2; q < COUNT; q++) x[q] = l[q] + x[q];
            joins >>= 1;
        }
        for (int q = 0; q < COUNT && s < shards; q++) stack[depth][q] = x[q];
        if (s < shards) depth++;
    }
}

static __device__ void mti_ce_combine(const mti_ce &c, int64_t shards, int64_t tokens, int64_t i,
                                      const mti_view &loss) {
    float x[4];
    mti_stats_joined<4>(c.stats, shards, tokens, i, x);
    float log_sum = logf(x[1]);
    mti_put(loss, 0, i, c.loss_of(i, x[0], log_sum, x[2], x[3]));
    mti_put(c.lse, 0, i, x[0]);
    mti_put(c.lse, 1, i, log_sum);
}

/* Calls mti_ce_combine for all tokens. A thread owns every (grid size)-th token. The kernel uses no shared memory and
   no barrier. Latency limits it: a thread reads 16 bytes of one shard after the other, in few warps. */
static __global__ void __launch_bounds__(128)
    mti_ce_combine_kernel(mti_ce c, int64_t shards, int64_t tokens, mti_view loss) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (; i < tokens; i += step) mti_ce_combine(c, shards, tokens, i, loss);
}

static mt_status mti_cuda_cross_entropy_combine(mt_context *ctx, const mt_cross_entropy_shard_desc *s,
                                                mt_tensor gathered, int64_t shards, const int32_t *targets,
                                                mt_tensor loss, mt_tensor lse) {
    mti_ce c = mti_ce_of(s, gathered, targets);
    c.stats = mti_view_of(gathered);
    c.lse = mti_view_of(lse);
    if (loss.cols == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_ce_combine_kernel, mti_grid(loss.cols, 128), 128, 0, mt_context_stream(ctx), c, shards,
                     loss.cols, mti_view_of(loss));
    return mt_cuda_launched(ctx, "mt_cross_entropy_combine");
}

static mt_status mti_cuda_cross_entropy_backward(mt_context *ctx, const mt_cross_entropy_shard_desc *s,
                                                 mt_tensor logits, const int32_t *targets, mt_tensor lse,
                                                 mt_tensor dloss, float scale) {
    mti_ce c = mti_ce_of(s, logits, targets);
    c.lse = mti_view_of(lse);
    c.dloss = mti_ce_dloss(dloss);
    c.scale = scale;
    if (logits.rows == 0) return MT_SUCCESS;
    MT_TRY(mt_cuda_enter(ctx));
    return mti_ce_by_type(logits,
                          [&](auto type) { return mti_ce_backward_launch<decltype(type)::value>(ctx, c, logits); });
}

} /* extern "C++" */
#endif
