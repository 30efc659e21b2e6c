/* ---- the router of a mixture of experts, on a GPU ---------------------------------------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

/* A warp owns a token. Lane l has the experts l, l + 32, ... */
#define MTI_ROUTER_WARPS 8 /* at most, in a block */
#define MTI_ROUTER_LANES 32

/* As mti_router, for kernels. */
struct mti_router_op {
    mt_router_desc desc;
    mti_view logits, dlogits;
    const float *bias, *dscores, *dlse;
    float *weights;
    const float *dweights;
    int64_t weights_ld, tokens;
    int experts;
    const int32_t *valid;
    int32_t *ids;
    int compares_logits;
};

/* A number and where it is; at -1: there is none. */
struct mti_router_place {
    float x;
    int at;
};

static __device__ __forceinline__ mti_router_place mti_router_warp_first(mti_router_place p) {
    for (int o = 16; o > 0; o >>= 1) {
        mti_router_place other;
        other.x = __shfl_xor_sync(0xffffffffu, p.x, o);
        other.at = __shfl_xor_sync(0xffffffffu, p.at, o);
        if (other.at >= 0 && (p.at < 0 || mti_router_is_behind(p.x, p.at, other.x, other.at))) p = other;
    }
    return p;
}

/* As mti_router_next, by a warp. x is in shared memory. */
static __device__ __forceinline__ mti_router_place mti_router_warp_next(const float *x, int n, mti_router_place last) {
    mti_router_place p = {0.0f, -1};
    for (int i = (int)threadIdx.x; i < n; i += MTI_ROUTER_LANES)
        if (mti_router_is_behind(x[i], i, last.x, last.at) && (p.at < 0 || x[i] > p.x)) p = {x[i], i};
    return mti_router_warp_first(p);
}

/* As mti_router_close_groups. sums [groups] is shared memory of the warp. */
static __device__ __forceinline__ void mti_router_warp_close(const mt_router_desc &s, float *compared, int experts,
                                                             float *sums) {
    const int size = experts / s.groups;
    mti_router_place last = {INFINITY, -1};
    for (int g = 0; g < s.groups; g++) {
        mti_router_place p = {INFINITY, -1};
        float sum = 0.0f;
        for (int i = 0; i < s.group_best; i++) {
            p = mti_router_warp_next(compared + g * size, size, p);
            sum += p.x;
        }
        if (threadIdx.x == 0) sums[g] = sum;
    }
    __syncwarp();
    for (int g = 0; g < s.group_topk; g++) last = mti_router_warp_next(sums, s.groups, last);
    for (int i = (int)threadIdx.x; i < experts; i += MTI_ROUTER_LANES) {
        if (mti_router_is_behind(sums[i / size], i / size, last.x, last.at)) compared[i] = NAN;
    }
    __syncwarp();
}

/* The softmax of the logits of a token. */
struct mti_router_soft {
    float top, sum; /* sum of e^(x - top) */
    int right;      /* as mti_router_is_right */
};

static __device__ __forceinline__ mti_router_soft mti_router_warp_soft(const mti_router_op &r, int64_t token) {
    mti_router_soft s = {-INFINITY, 0.0f, 1};
    for (int e = (int)threadIdx.x; e < r.experts; e += MTI_ROUTER_LANES) {
        const float x = mti_get(r.logits, token, e);
        s.right &= x < INFINITY;
        s.top = fmaxf(s.top, x);
    }
    s.top = mti_warp_max(s.top);
    s.right = __all_sync(0xffffffffu, s.right) && s.top > -INFINITY;
    for (int e = (int)threadIdx.x; e < r.experts; e += MTI_ROUTER_LANES)
        s.sum += expf(mti_get(r.logits, token, e) - s.top);
    s.sum = mti_warp_sum(s.sum);
    return s;
}

static __device__ __forceinline__ float mti_router_score_of(const mti_router_op &r, const mti_router_soft &s, float x) {
    return r.desc.score == MT_ROUTER_SIGMOID ? mti_sigmoid(x) : expf(x - s.top) / s.sum;
}

/* What is known of the scores u of the chosen experts. */
struct mti_router_chosen_soft {
    float top, sum; /* of their softmax: MT_ROUTER_TOPK_SOFTMAX */
    float factor;   /* which makes their sum 1, or 1 */
};

/* The score of the chosen expert j, before it is multiplied by the factor. */
static __device__ __forceinline__ float mti_router_chosen_score(const mti_router_op &r, const mti_router_soft &s,
                                                                const mti_router_chosen_soft &c, int64_t token, int j) {
    const float x = mti_get(r.logits, token, r.ids[token * r.desc.topk + j]);
    return r.desc.score == MT_ROUTER_TOPK_SOFTMAX ? expf(x - c.top) / c.sum : mti_router_score_of(r, s, x);
}

static __device__ __forceinline__ mti_router_chosen_soft mti_router_warp_chosen(const mti_router_op &r,
                                                                                const mti_router_soft &s,
                                                                                int64_t token) {
    mti_router_chosen_soft c = {-INFINITY, 0.0f, 1.0f};
    const int32_t *ids = r.ids + token * r.desc.topk;
    float sum = 0.0f;
    if (r.desc.score == MT_ROUTER_TOPK_SOFTMAX) {
        for (int j = (int)threadIdx.x; j < r.desc.topk; j += MTI_ROUTER_LANES)
            c.top = fmaxf(c.top, mti_get(r.logits, token, ids[j]));
        c.top = mti_warp_max(c.top);
        for (int j = (int)threadIdx.x; j < r.desc.topk; j += MTI_ROUTER_LANES)
            c.sum += expf(mti_get(r.logits, token, ids[j]) - c.top);
        c.sum = mti_warp_sum(c.sum);
    }
    if (!r.desc.normalize) return c;
    for (int j = (int)threadIdx.x; j < r.desc.topk; j += MTI_ROUTER_LANES)
        sum += mti_router_chosen_score(r, s, c, token, j);
    c.factor = 1.0f / (mti_warp_sum(sum) + MTI_ROUTER_LEAST);
    return c;
}

static __device__ __forceinline__ void mti_router_warp_fill(const mti_router_op &r, int64_t token, int32_t id) {
    for (int j = (int)threadIdx.x; j < r.desc.topk; j += MTI_ROUTER_LANES) {
        r.ids[token * r.desc.topk + j] = id;
        r.weights[token * r.weights_ld + j] = 0.0f;
    }
}

/* Writes what is compared. Returns 1 if it can be. */
static __device__ __forceinline__ int mti_router_warp_compare(const mti_router_op &r, const mti_router_soft &s,
                                                              int64_t token, float *compared) {
    float top = -INFINITY;
    int right = s.right;
    for (int e = (int)threadIdx.x; e < r.experts; e += MTI_ROUTER_LANES) {
        const float x = mti_get(r.logits, token, e);
        compared[e] = (r.compares_logits ? x : mti_router_score_of(r, s, x)) + (r.bias ? r.bias[e] : 0.0f);
        right &= compared[e] < INFINITY;
        top = fmaxf(top, compared[e]);
    }
    __syncwarp();
    return __all_sync(0xffffffffu, right) && mti_warp_max(top) > -INFINITY;
}

/* Writes the experts of a token. Returns 0 if it cannot choose. */
static __device__ __forceinline__ int mti_router_warp_choose(const mti_router_op &r, const mti_router_soft &s,
                                                             int64_t token, float *compared) {
    mti_router_place last = {INFINITY, -1};
    float top = -INFINITY;
    if (!mti_router_warp_compare(r, s, token, compared)) return 0;
    if (r.desc.groups > 1) mti_router_warp_close(r.desc, compared, r.experts, compared + r.experts);
    for (int j = 0; j < r.desc.topk; j++) {
        last = mti_router_warp_next(compared, r.experts, last);
        top = fmaxf(top, mti_get(r.logits, token, last.at));
        if (threadIdx.x == 0) r.ids[token * r.desc.topk + j] = last.at;
    }
    __syncwarp();
    return r.desc.score != MT_ROUTER_TOPK_SOFTMAX || top > -INFINITY;
}

/* As mti_router_is_used, by a warp. */
static __device__ __forceinline__ int mti_router_warp_is_used(const mti_router_op &r, int64_t token) {
    int used = 1;
    for (int j = (int)threadIdx.x; j < r.desc.topk; j += MTI_ROUTER_LANES)
        used &= mti_router_is_id(r.ids[token * r.desc.topk + j], r.experts);
    return __all_sync(0xffffffffu, used);
}

/* Block: MTI_ROUTER_LANES x up to MTI_ROUTER_WARPS. A warp owns a token, then the one that is a grid behind, and
   experts + groups floats of shared memory, for what is compared. Lanes read what others of the warp have written only
   behind __syncwarp. */
static __global__ void __launch_bounds__(MTI_ROUTER_LANES *MTI_ROUTER_WARPS)
    mti_router_forward_kernel(mti_router_op r) {
    MT_DYN_SHARED(float, room);
    float *compared = room + threadIdx.y * (r.experts + r.desc.groups);
    for (int64_t token = (int64_t)blockIdx.x * blockDim.y + threadIdx.y; token < r.tokens;
         token += (int64_t)gridDim.x * blockDim.y) {
        mti_router_soft s;
        mti_router_chosen_soft c;
        if (r.valid && !r.valid[token]) {
            mti_router_warp_fill(r, token, MTI_ROUTER_PADDING);
            continue;
        }
        s = mti_router_warp_soft(r, token);
        if (!mti_router_warp_choose(r, s, token, compared)) {
            mti_router_warp_fill(r, token, MTI_ROUTER_WRONG);
            continue;
        }
        c = mti_router_warp_chosen(r, s, token);
        for (int j = (int)threadIdx.x; j < r.desc.topk; j += MTI_ROUTER_LANES)
            r.weights[token * r.weights_ld + j] = r.desc.scale * c.factor * mti_router_chosen_score(r, s, c, token, j);
        __syncwarp();
    }
}

/* g [experts], in shared memory, = the gradients of the scores of a token from the losses. */
static __device__ __forceinline__ void mti_router_warp_loss_back(const mti_router_op &r, const mti_router_soft &s,
                                                                 int64_t token, float *g) {
    float sum = 0.0f, inner = 0.0f;
    for (int e = (int)threadIdx.x; e < r.experts; e += MTI_ROUTER_LANES) {
        const float score = mti_router_score_of(r, s, mti_get(r.logits, token, e));
        g[e] = r.dscores ? r.dscores[e] : 0.0f;
        sum += score;
        inner += g[e] * score;
    }
    if (r.desc.score == MT_ROUTER_SIGMOID && r.dscores) {
        const float factor = 1.0f / (mti_warp_sum(sum) + MTI_ROUTER_LEAST);
        inner = mti_warp_sum(inner) * factor;
        for (int e = (int)threadIdx.x; e < r.experts; e += MTI_ROUTER_LANES) g[e] = factor * (g[e] - inner);
    }
    __syncwarp();
}

/* Adds to g the gradients of the scores of the chosen experts, or with MT_ROUTER_TOPK_SOFTMAX to d those of their
   logits. g and d [experts] are shared memory of the warp. */
static __device__ __forceinline__ void mti_router_warp_chosen_back(const mti_router_op &r, const mti_router_soft &s,
                                                                   int64_t token, float *g, float *d) {
    const mti_router_chosen_soft c = mti_router_warp_chosen(r, s, token);
    const int32_t *ids = r.ids + token * r.desc.topk;
    const float *dw = r.dweights + token * r.weights_ld;
    float inner = 0.0f, outer = 0.0f;
    for (int j = (int)threadIdx.x; j < r.desc.topk && r.desc.normalize; j += MTI_ROUTER_LANES)
        inner += r.desc.scale * dw[j] * c.factor * mti_router_chosen_score(r, s, c, token, j);
    inner = mti_warp_sum(inner);
    for (int j = (int)threadIdx.x; j < r.desc.topk; j += MTI_ROUTER_LANES)
        outer += c.factor * (r.desc.scale * dw[j] - inner) * mti_router_chosen_score(r, s, c, token, j);
    outer = mti_warp_sum(outer);
    for (int j = (int)threadIdx.x; j < r.desc.topk; j += MTI_ROUTER_LANES) {
        const float du = c.factor * (r.desc.scale * dw[j] - inner);
        if (r.desc.score == MT_ROUTER_TOPK_SOFTMAX)
            d[ids[j]] = mti_router_chosen_score(r, s, c, token, j) * (du - outer);
        else g[ids[j]] += du;
    }
    __syncwarp();
}

/* Block and owners as mti_router_forward_kernel; a warp has 2 experts floats of shared memory, for g and d. dlogits may
   be logits: a lane reads the logits of its experts before it writes their gradients, and the other lanes read them
   before the last __syncwarp. */
static __global__ void __launch_bounds__(MTI_ROUTER_LANES *MTI_ROUTER_WARPS)
    mti_router_backward_kernel(mti_router_op r) {
    MT_DYN_SHARED(float, room);
    float *g = room + threadIdx.y * 2 * r.experts, *d = g + r.experts;
    for (int64_t token = (int64_t)blockIdx.x * blockDim.y + threadIdx.y; token < r.tokens;
         token += (int64_t)gridDim.x * blockDim.y) {
        const int used = mti_router_warp_is_used(r, token);
        mti_router_soft s = {0.0f, 1.0f, 1};
        float inner = 0.0f, dlse = 0.0f;
        for (int e = (int)threadIdx.x; e < r.experts; e += MTI_ROUTER_LANES) d[e] = 0.0f;
        __syncwarp();
        if (used) {
            s = mti_router_warp_soft(r, token);
            dlse = r.dlse ? 2.0f * *r.dlse * (s.top + logf(s.sum)) : 0.0f;
            mti_router_warp_loss_back(r, s, token, g);
            mti_router_warp_chosen_back(r, s, token, g, d);
            for (int e = (int)threadIdx.x; e < r.experts; e += MTI_ROUTER_LANES)
                inner += g[e] * mti_router_score_of(r, s, mti_get(r.logits, token, e));
            inner = mti_warp_sum(inner);
        }
        for (int e = (int)threadIdx.x; e < r.experts; e += MTI_ROUTER_LANES) {
            float x = used ? mti_get(r.logits, token, e) : 0.0f, y = d[e];
            const float score = mti_router_score_of(r, s, x);
            if (used) y += r.desc.score == MT_ROUTER_SIGMOID ? g[e] * (score * (1.0f - score)) : score * (g[e] - inner);
            if (used && r.dlse) y += dlse * (expf(x - s.top) / s.sum);
            mti_put(r.dlogits, token, e, y);
        }
        __syncwarp();
    }
}

/* partial [blocks, experts + 1] = the sums of the tokens of a block of MTI_ROUTER_BLOCK, which one warp adds in their
   order. Block: MTI_ROUTER_LANES x 1. A lane owns its experts, and lane 0 the last column. */
static __global__ void __launch_bounds__(MTI_ROUTER_LANES) mti_router_sums_kernel(mti_router_op r, float *partial) {
    for (int64_t b = blockIdx.x; b * MTI_ROUTER_BLOCK < r.tokens; b += gridDim.x) {
        float *sums = partial + b * (r.experts + 1);
        const int64_t end = (b + 1) * MTI_ROUTER_BLOCK < r.tokens ? (b + 1) * MTI_ROUTER_BLOCK : r.tokens;
        float squares = 0.0f;
        for (int e = (int)threadIdx.x; e < r.experts; e += MTI_ROUTER_LANES) sums[e] = 0.0f;
        for (int64_t token = b * MTI_ROUTER_BLOCK; token < end; token++) {
            mti_router_soft s;
            float lse, factor = 0.0f;
            if (!mti_router_warp_is_used(r, token)) continue;
            s = mti_router_warp_soft(r, token);
            lse = s.top + logf(s.sum);
            squares += lse * lse;
            for (int e = (int)threadIdx.x; e < r.experts && r.desc.score == MT_ROUTER_SIGMOID; e += MTI_ROUTER_LANES)
                factor += mti_router_score_of(r, s, mti_get(r.logits, token, e));
            factor = r.desc.score == MT_ROUTER_SIGMOID ? 1.0f / (mti_warp_sum(factor) + MTI_ROUTER_LEAST) : 1.0f;
            for (int e = (int)threadIdx.x; e < r.experts; e += MTI_ROUTER_LANES)
                sums[e] += factor * mti_router_score_of(r, s, mti_get(r.logits, token, e));
        }
        if (threadIdx.x == 0) sums[r.experts] = squares;
    }
}

/* sums [1, cols] += the rows of partial [blocks, cols], in their order. A thread owns every (grid size)-th column. */
static __global__ void __launch_bounds__(256)
    mti_router_add_kernel(const float *partial, int64_t blocks, int64_t cols, float *sums) {
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < cols; e += (int64_t)gridDim.x * blockDim.x) {
        float sum = sums[e];
        for (int64_t b = 0; b < blocks; b++) sum += partial[b * cols + e];
        sums[e] = sum;
    }
}

/* counts += the number of each id of the tokens that are used. The order of atomicAdd of integers makes no difference.
   A warp owns a token, then the one that is a grid behind. Block: MTI_ROUTER_LANES x MTI_ROUTER_WARPS. */
static __global__ void __launch_bounds__(MTI_ROUTER_LANES *MTI_ROUTER_WARPS)
    mti_router_count_kernel(mti_router_op r, int32_t *counts) {
    for (int64_t token = (int64_t)blockIdx.x * blockDim.y + threadIdx.y; token < r.tokens;
         token += (int64_t)gridDim.x * blockDim.y) {
        if (!mti_router_warp_is_used(r, token)) continue;
        for (int j = (int)threadIdx.x; j < r.desc.topk; j += MTI_ROUTER_LANES)
            atomicAdd(counts + r.ids[token * r.desc.topk + j], 1);
    }
}

/* One thread: there are few experts. */
static __global__ void mti_router_losses_kernel(const int32_t *counts, const float *sums, int64_t experts, int topk,
                                                float aux, float z, float *losses, float *dscores, float *dlse) {
    mti_router_losses(counts, sums, experts, topk, aux, z, losses, dscores, dlse);
}

/* One block. A thread owns every blockDim-th expert, and adds up the counts of all. */
static __global__ void __launch_bounds__(256)
    mti_router_bias_kernel(const int32_t *counts, float rate, float *bias, int64_t experts) {
    int64_t all = 0;
    for (int64_t e = 0; e < experts; e++) all += counts[e];
    for (int64_t e = threadIdx.x; e < experts; e += blockDim.x) {
        const int64_t more = all - counts[e] * experts;
        bias[e] += more > 0 ? rate : more < 0 ? -rate : 0.0f;
    }
}

static mti_router_op mti_router_op_of(const mti_router *r) {
    mti_router_op op;
    op.desc = r->desc;
    op.logits = mti_view_of(r->logits);
    op.dlogits = mti_view_of(r->dlogits);
    op.bias = (const float *)r->bias.data;
    op.dscores = (const float *)r->dscores.data;
    op.dlse = (const float *)r->dlse.data;
    op.weights = (float *)r->weights.data;
    op.dweights = (const float *)r->dweights.data;
    op.weights_ld = mt_tensor_ld(r->weights.data ? r->weights : r->dweights);
    op.tokens = r->logits.rows;
    op.experts = (int)r->logits.cols;
    op.valid = r->valid;
    op.ids = r->ids;
    op.compares_logits = mti_router_compares_logits(r);
    return op;
}

/* Launches a kernel whose warps own a token each and `floats` floats of shared memory. */
static mt_status mti_router_launch(mt_context *ctx, const char *name, void (*kernel)(mti_router_op),
                                   const mti_router *r, int64_t floats) {
    const int64_t fit = (int64_t)MTI_SHARED_LEAST / (floats * (int64_t)sizeof(float));
    const dim3 block(MTI_ROUTER_LANES, (unsigned)mt_max(1, mt_min(MTI_ROUTER_WARPS, fit)));
    const size_t bytes = (size_t)floats * sizeof(float) * block.y;
    MT_TRY(mt_cuda_enter(ctx));
    MT_TRY(mti_shared_allow(ctx, kernel, bytes));
    MT_LAUNCH_KERNEL(kernel, mti_grid(r->logits.rows, block.y), block, bytes, mt_context_stream(ctx),
                     mti_router_op_of(r));
    return mt_cuda_launched(ctx, name);
}

static mt_status mti_cuda_router_forward(mt_context *ctx, const mti_router *r) {
    return mti_router_launch(ctx, "mt_router_forward", mti_router_forward_kernel, r, r->logits.cols + r->desc.groups);
}

static mt_status mti_cuda_router_backward(mt_context *ctx, const mti_router *r) {
    return mti_router_launch(ctx, "mt_router_backward", mti_router_backward_kernel, r, 2 * r->logits.cols);
}

static mt_status mti_cuda_router_sums(mt_context *ctx, const mti_router *r, mt_tensor sums) {
    const dim3 block(MTI_ROUTER_LANES, MTI_ROUTER_WARPS);
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_router_sums_kernel, mti_grid(r->sums.rows, 1), MTI_ROUTER_LANES, 0, mt_context_stream(ctx),
                     mti_router_op_of(r), (float *)r->sums.data);
    MT_LAUNCH_KERNEL(mti_router_add_kernel, mti_grid(sums.cols, 256), 256, 0, mt_context_stream(ctx),
                     (const float *)r->sums.data, r->sums.rows, sums.cols, (float *)sums.data);
    MT_LAUNCH_KERNEL(mti_router_count_kernel, mti_grid(r->logits.rows, MTI_ROUTER_WARPS), block, 0,
                     mt_context_stream(ctx), mti_router_op_of(r), r->counts);
    return mt_cuda_launched(ctx, "mt_router_sums");
}

static mt_status mti_cuda_router_losses(mt_context *ctx, int topk, float aux, float z, const int32_t *counts,
                                        mt_tensor sums, mt_tensor losses, mt_tensor dscores, mt_tensor dlse) {
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_router_losses_kernel, 1, 1, 0, mt_context_stream(ctx), counts, (const float *)sums.data,
                     dscores.cols, topk, aux, z, (float *)losses.data, (float *)dscores.data, (float *)dlse.data);
    return mt_cuda_launched(ctx, "mt_router_losses");
}

static mt_status mti_cuda_router_bias(mt_context *ctx, float rate, const int32_t *counts, mt_tensor bias) {
    MT_TRY(mt_cuda_enter(ctx));
    MT_LAUNCH_KERNEL(mti_router_bias_kernel, 1, 256, 0, mt_context_stream(ctx), counts, rate, (float *)bias.data,
                     bias.cols);
    return mt_cuda_launched(ctx, "mt_router_bias_update");
}

} /* extern "C++" */
#endif
