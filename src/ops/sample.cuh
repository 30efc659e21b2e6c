/* ---- sampling of the next token, on a GPU ------------------------------------------------------------------------ */

#if MT_HAS_CUDA
extern "C++" {

/* The tokens of a row for a kernel, as in mti_sample_row. `cols` are those of a part, `count` those of all parts. */
struct mti_sample_source {
    mti_view x;
    int64_t row, step, cols, count, first;

    /* Returns logit c and stores its id, which is -1 where there is no candidate. */
    template <int TYPE> __device__ __forceinline__ float get(int64_t c, int32_t *id) const {
        if (first >= 0) {
            *id = (int32_t)(first + c);
            return mti_get<TYPE>(x, row, c);
        }
        int64_t part = mt_divide(c, cols);
        const float *p = (const float *)x.data + (row + part * step) * x.ld + c - part * cols;
        *id = __float_as_int(p[cols]);
        return *p;
    }
};

/* The arguments of the kernels. */
struct mti_sampling {
    mt_sample_desc desc;
    int64_t vocab;
    double sharp;
    int greedy;
};

#define MTI_SAMPLE_THREADS 512

/* Returns the maximum, or the sum, of v over the block to all threads. shared has an element for each warp. The
   barriers separate its use from that before and after. */
template <int SUM>
static __device__ __forceinline__ unsigned long long mti_sample_total(unsigned long long v,
                                                                      unsigned long long *shared) {
    for (int o = 16; o > 0; o >>= 1) {
        unsigned long long other = __shfl_xor_sync(0xffffffffu, v, o);
        v = SUM ? v + other : v > other ? v : other;
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
    __syncthreads();
    v = shared[0];
    for (int w = 1; w < (int)blockDim.x / 32; w++) v = SUM ? v + shared[w] : v > shared[w] ? v : shared[w];
    return v;
}

/* Finds the bin in which the weights of the bins, from the last one on, reach `target`: found[0] = its number, found[1]
   = the weight of those behind it, found[2] = its own. One warp owns all bins, a lane a 32nd of them. Without such a
   bin it is bin 0. */
template <typename Bin>
static __device__ void mti_sample_find(const Bin *bins, unsigned long long target, unsigned long long *found) {
    int lane = (int)threadIdx.x, last = MTI_SAMPLE_BINS - 1 - lane * (MTI_SAMPLE_BINS / 32), bin = last;
    unsigned long long sum = 0, before, up;
    for (int b = 0; b < MTI_SAMPLE_BINS / 32; b++) sum += bins[last - b];
    before = sum;
    for (int o = 1; o < 32; o *= 2) {
        up = __shfl_up_sync(0xffffffffu, before, o);
        if (lane >= o) before += up;
    }
    unsigned reached = __ballot_sync(0xffffffffu, before >= target);
    before -= sum;
    if (lane != (reached ? __ffs((int)reached) - 1 : 31)) return;
    for (; bin > last - MTI_SAMPLE_BINS / 32 + 1 && before + bins[bin] < target; bin--) before += bins[bin];
    found[0] = (unsigned long long)bin;
    found[1] = before;
    found[2] = bins[bin];
}

/* As mti_sample_limit: returns the order of the last token that is kept, of those from `from` on. Bin is unsigned for
   counts (sharp is 0), and unsigned long long for masses relative to the logit `top`. Barriers separate clearing the
   bins, adding to them, finding the digit in them, and reading this digit. Additions of integers give the same bins in
   any order. */
template <int TYPE, typename Bin>
static __device__ uint64_t mti_sample_search(const mti_sample_source &src, uint64_t from, float top, double sharp,
                                             unsigned long long target, Bin *bins, unsigned long long *found) {
    uint64_t known = 0, mask = 0;
    for (int digit = 0; digit < MTI_SAMPLE_DIGITS; digit++) {
        int shift = mti_sample_shift(digit);
        uint64_t low = mti_sample_mask(digit);
        __syncthreads();
        for (int b = (int)threadIdx.x; b < MTI_SAMPLE_BINS; b += (int)blockDim.x) bins[b] = 0;
        __syncthreads();
        for (int64_t c = threadIdx.x; c < src.count; c += blockDim.x) {
            int32_t id;
            float x = src.get<TYPE>(c, &id);
            uint64_t order = mti_sample_order(x, id);
            if (id < 0 || order < from || ((order ^ known) & mask)) continue;
            atomicAdd(&bins[order >> shift & low], (Bin)(sharp > 0.0 ? mti_sample_mass(x, top, sharp) : 1));
        }
        __syncthreads();
        if (threadIdx.x < 32) mti_sample_find(bins, target, found);
        __syncthreads();
        known |= (uint64_t)found[0] << shift;
        mask |= low << shift;
        target -= found[1];
        if (sharp == 0.0 && found[2] == target) break; /* all tokens of the bin */
    }
    return known;
}

/* The best token that a thread knows. `rank` orders scores; that of NaN is the largest. */
struct mti_sample_best {
    double score;
    unsigned long long rank;
    int32_t id;
    float logit;

    __device__ __forceinline__ void take(float x, int32_t token, double with) {
        unsigned long long bits = (unsigned long long)__double_as_longlong(with + 0.0);
        bits = x != x ? ~0ull : bits ^ (bits >> 63 ? ~0ull : 1ull << 63);
        if (id >= 0 && (bits < rank || (bits == rank && token > id))) return;
        score = x != x ? (double)INFINITY : with;
        rank = bits;
        id = token;
        logit = x;
    }
};

/* Draws from the tokens whose order is at least `from`, and returns what the thread knows of them. A lane owns four
   tokens with the same Philox block, or one candidate. Most tokens cannot reach the best score of the warp, which their
   random word shows, so the logarithms in double are rare. */
template <int TYPE>
static __device__ mti_sample_best mti_sample_part(const mti_sampling &s, const mti_sample_source &src, mt_random at,
                                                  uint64_t from) {
    mti_sample_best own = {-(double)INFINITY, 0, -1, -INFINITY};
    int gathered = src.first < 0;
    uint64_t e = (uint64_t)(at.first_row * at.global_cols) + (gathered ? 0 : (uint64_t)src.first);
    int64_t skip = gathered ? 0 : (int64_t)(e & 3), units = gathered ? src.count : (skip + src.count + 3) / 4;
    double best = own.score;
    for (int64_t base = threadIdx.x & ~31u; base < units; base += blockDim.x) {
        int64_t unit = base + (threadIdx.x & 31);
        uint32_t words[4] = {0, 0, 0, 0}, most = 0xffffffffu;
        float x[4], top = -INFINITY;
        int32_t id[4];
        int any = 0;
        MT_DEVICE_UNROLL
        for (int j = 0; j < 4; j++) {
            int64_t c = gathered ? unit : 4 * unit - skip + j;
            id[j] = -1, x[j] = -INFINITY;
            if (unit < units && c >= 0 && c < src.count && !(gathered && j > 0)) x[j] = src.get<TYPE>(c, &id[j]);
            if (id[j] >= 0 && mti_sample_order(x[j], id[j]) < from) id[j] = -1;
            if (id[j] < 0) continue;
            any = 1;
            top = x[j] != x[j] ? INFINITY : fmaxf(top, x[j]);
        }
        double gap = (double)top * s.sharp - best;
        any = any && !(gap < (s.greedy ? 0.0 : -MTI_GUMBEL_MOST));
        if (!__any_sync(0xffffffffu, any)) continue;
        if (any && !s.greedy) {
            uint64_t block = gathered ? (e + (uint64_t)id[0]) >> 2 : (e >> 2) + (uint64_t)unit;
            mti_philox(block, mti_subsequence(&at), at.seed, words);
            if (gathered) words[0] = words[(e + (uint64_t)id[0]) & 3];
            most = mti_sample_most(gap);
        }
        MT_DEVICE_UNROLL
        for (int j = 0; j < 4; j++)
            if (any && id[j] >= 0 && (words[j] <= most || x[j] != x[j]))
                own.take(x[j], id[j], (double)x[j] * s.sharp + (s.greedy ? 0.0 : mti_gumbel(words[j])));
        best = own.score;
        for (int o = 16; o > 0; o >>= 1) best = fmax(best, __shfl_xor_sync(0xffffffffu, best, o));
    }
    return own;
}

/* Returns the token that the block draws to every thread: its id, or -1, and its logit. */
template <int TYPE>
static __device__ mti_sample_best mti_sample_draw(const mti_sampling &s, const mti_sample_source &src, mt_random at,
                                                  uint64_t from, unsigned long long *shared) {
    mti_sample_best own = mti_sample_part<TYPE>(s, src, at, from);
    unsigned long long mine = own.id < 0 ? 0 : own.rank, most = mti_sample_total<0>(mine, shared);
    unsigned long long low = own.id >= 0 && own.rank == most ? 0xffffffffull - (unsigned)own.id : 0;
    unsigned long long lowest = mti_sample_total<0>(low, shared);
    unsigned long long bits = low == lowest && low ? mt_f32_bits(own.logit) : 0;
    bits = mti_sample_total<0>(bits, shared);
    own.id = lowest ? (int32_t)(0xffffffffull - lowest) : -1;
    own.logit = mt_f32_from_bits((uint32_t)bits);
    return own;
}

/* Writes the tokens whose order is at least `from` in k places, by increasing column. A warp owns a part of the
   columns. It counts its tokens, then the warps' counts in `shared` say where it writes. */
template <int TYPE>
static __device__ void mti_sample_store(const mti_sample_source &src, uint64_t from, int64_t k, float *out,
                                        unsigned long long *shared) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x / 32;
    int64_t span = (src.count + 32 * warps - 1) / (32 * warps) * 32, begin = warp * span, n = 0, total = 0;
    int64_t end = begin + span < src.count ? begin + span : src.count;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t base = begin; base < end; base += 32) {
            int32_t id = -1;
            float x = base + lane < end ? src.get<TYPE>(base + lane, &id) : 0.0f;
            unsigned kept = __ballot_sync(0xffffffffu, id >= 0 && mti_sample_order(x, id) >= from);
            int64_t at = n + __popc(kept & ((1u << lane) - 1));
            if (pass == 1 && (kept >> lane & 1) && at < k) {
                out[at] = x;
                out[k + at] = __int_as_float(id);
            }
            n += __popc(kept);
        }
        if (pass == 1) break;
        __syncthreads();
        if (lane == 0) shared[warp] = (unsigned long long)n;
        __syncthreads();
        n = 0;
        for (int w = 0; w < warps; w++) {
            if (w < warp) n += (int64_t)shared[w];
            total += (int64_t)shared[w];
        }
    }
    for (int64_t at = total + threadIdx.x; at < k; at += blockDim.x) {
        out[at] = -INFINITY;
        out[k + at] = __int_as_float(-1);
    }
}

/* A block owns row first + blockIdx.x. Without top_k and top_p it draws a token. Otherwise it finds the order of the
   last of k tokens, and writes them. The barriers are those of the functions that it calls. */
template <int TYPE>
static __global__ void __launch_bounds__(MTI_SAMPLE_THREADS)
    mti_sample_candidates_kernel(int64_t first, mti_sampling s, mti_sample_source src, mti_view candidates, int64_t k) {
    MT_SHARED(unsigned, bins, MTI_SAMPLE_BINS);
    MT_SHARED(unsigned long long, shared, 32);
    uint64_t from = 0;
    src.row = first + blockIdx.x;
    float *out = (float *)candidates.data + src.row * candidates.ld;
    if (k == 1) {
        mti_sample_best best = mti_sample_draw<TYPE>(s, src, mti_sample_random(&s.desc, s.vocab, src.row), 0, shared);
        if (threadIdx.x > 0) return;
        out[0] = best.id < 0 ? -INFINITY : best.logit;
        out[1] = __int_as_float(best.id);
        return;
    }
    if (k < src.count) from = mti_sample_search<TYPE>(src, 0, 0.0f, 0.0, (unsigned long long)k, bins, shared);
    mti_sample_store<TYPE>(src, from, k, out, shared);
}

/* Draws the token of row first + blockIdx.x, which the block owns, from its candidates. A NaN is the first of all
   orders. The barriers are those of the functions that it calls. */
static __global__ void __launch_bounds__(MTI_SAMPLE_THREADS)
    mti_sample_ids_kernel(int64_t first, mti_sampling s, mti_sample_source src, int32_t *ids) {
    MT_SHARED(unsigned long long, bins, MTI_SAMPLE_BINS);
    MT_SHARED(unsigned long long, shared, 32);
    uint64_t from = 0, top = 0;
    unsigned long long count = 0, mass = 0;
    src.row = first + blockIdx.x;
    for (int64_t c = threadIdx.x; c < src.count; c += blockDim.x) {
        int32_t id;
        float x = src.get<MT_F32>(c, &id);
        uint64_t order = mti_sample_order(x, id);
        if (id < 0) continue;
        count++;
        top = order > top ? order : top;
    }
    top = mti_sample_total<0>(top, shared);
    count = mti_sample_total<1>(count, shared);
    int wrong = count == 0 || top >> 32 == 0xffffffffu;
    float most = mti_sample_logit(top);
    if (!wrong && !s.greedy && s.desc.top_k > 0 && (unsigned long long)s.desc.top_k < count)
        from = mti_sample_search<MT_F32>(src, 0, most, 0.0, (unsigned long long)s.desc.top_k, bins, shared);
    if (!wrong && !s.greedy && s.desc.top_p > 0.0f && s.desc.top_p < 1.0f) {
        for (int64_t c = threadIdx.x; c < src.count; c += blockDim.x) {
            int32_t id;
            float x = src.get<MT_F32>(c, &id);
            if (id >= 0 && mti_sample_order(x, id) >= from) mass += mti_sample_mass(x, most, s.sharp);
        }
        mass = mti_sample_total<1>(mass, shared);
        from = mti_sample_search<MT_F32>(src, from, most, s.sharp, mti_sample_target(s.desc.top_p, mass), bins, shared);
    }
    mti_sample_best best = mti_sample_draw<MT_F32>(s, src, mti_sample_random(&s.desc, s.vocab, src.row), from, shared);
    if (threadIdx.x == 0) ids[src.row] = wrong ? -1 : best.id;
}

static mti_sampling mti_sampling_of(const mt_sample_desc *desc, int64_t vocab) {
    mti_sampling s;
    s.desc = *desc;
    s.vocab = vocab;
    s.sharp = mti_sample_sharp(desc);
    s.greedy = mti_sample_greedy(desc);
    return s;
}

static mti_sample_source mti_sample_source_of(mt_tensor x, int64_t step, int64_t cols, int64_t parts, int64_t first) {
    mti_sample_source src;
    src.x = mti_view_of(x);
    src.row = 0;
    src.step = step;
    src.cols = cols;
    src.count = parts * cols;
    src.first = first;
    return src;
}

static unsigned mti_sample_threads(int64_t count) {
    return (unsigned)mt_max(32, mt_min(MTI_SAMPLE_THREADS, mt_round_up((count + 3) / 4, 32)));
}

static mt_status mti_cuda_sample_candidates(mt_context *ctx, const mt_sample_desc *desc, int64_t vocab,
                                            int64_t first_col, mt_tensor logits, mt_tensor candidates) {
    int64_t cols = mti_sample_columns(vocab, first_col, logits.cols), k = candidates.cols / 2;
    mti_sample_source src = mti_sample_source_of(logits, 0, cols, 1, first_col);
    mti_sampling s = mti_sampling_of(desc, vocab);
    MT_TRY(mt_cuda_enter(ctx));
    return mti_ce_by_type(logits, [&](auto type) {
        MTI_LAUNCH_BLOCKS(mti_sample_candidates_kernel<decltype(type)::value>, logits.rows, mti_sample_threads(cols), 0,
                          mt_context_stream(ctx), s, src, mti_view_of(candidates), k);
        return mt_cuda_launched(ctx, "mt_sample_candidates");
    });
}

static mt_status mti_cuda_sample_ids(mt_context *ctx, const mt_sample_desc *desc, int64_t vocab, mt_tensor gathered,
                                     int64_t shards, int32_t *ids) {
    int64_t rows = gathered.rows / shards;
    mti_sample_source src = mti_sample_source_of(gathered, rows, gathered.cols / 2, shards, -1);
    mti_sampling s = mti_sampling_of(desc, vocab);
    MT_TRY(mt_cuda_enter(ctx));
    MTI_LAUNCH_BLOCKS(mti_sample_ids_kernel, rows, mti_sample_threads(4 * src.count), 0, mt_context_stream(ctx), s, src,
                      ids);
    return mt_cuda_launched(ctx, "mt_sample_ids");
}

} /* extern "C++" */
#endif
