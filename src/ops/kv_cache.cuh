/* ---- key/value cache, on a GPU ----------------------------------------------------------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

/* A call as kernels see it. */
struct mti_kv_gpu {
    mt_attention_desc s; /* without defaults */
    mti_qkv_cols cols;
    mti_view qkv, table, keys, values, out;
    mti_cached tokens;
    int64_t half, vectors; /* append: half of the features that it turns, and the vectors of a head that threads move */
    /* Attention with several splits. For each query head of a token and each split: the largest score and the sum of
       exponentials, and the sum of values, [pitch]. */
    int splits, pitch;
    float2 *stats;
    float *sums;

    __device__ int64_t row(int64_t b, int64_t group) const { return (b * s.groups + group) * tokens.max_seq; }
    __device__ int64_t query_col(int64_t head) const {
        int64_t group = mt_divide(head, s.heads_per_group);
        return group * cols.q_step + (head - group * s.heads_per_group) * s.head_dim;
    }
    __device__ int64_t split_of(int64_t b, int64_t i, int64_t head, int64_t split) const {
        return ((b * s.seq + i) * s.groups * s.heads_per_group + head) * splits + split;
    }
};

static mti_cached mti_cached_of(const mti_kv *kv) {
    const mt_attention_desc *s = &kv->desc;
    mti_cached c = {kv->cache.lengths,   s->lengths,        s->seq,          s->part.seq,
                    s->part.first_query, kv->cache.max_seq, s->scores.window};
    return c;
}

static mti_kv_gpu mti_kv_gpu_of(const mti_kv *kv) {
    mti_kv_gpu k;
    memset(&k, 0, sizeof k);
    k.s = kv->desc;
    k.cols = kv->cols;
    k.qkv = mti_view_of(kv->qkv);
    k.table = mti_view_of(kv->table);
    k.keys = mti_view_of(kv->cache.keys);
    k.values = mti_view_of(kv->cache.values);
    k.out = mti_view_of(kv->out);
    k.tokens = mti_cached_of(kv);
    return k;
}

/* Moves vector `vector` of a query (head < heads_per_group), a key (heads_per_group) or a value of a token. Queries and
   keys first have mti_rotary_op's pairs of vectors, which are turned, then the vectors behind them, which are not. */
template <int TYPE, bool PAIRS>
static __device__ __forceinline__ void mti_kv_move_vector(const mti_kv_gpu &k, int64_t row, int64_t group, int64_t head,
                                                          int64_t vector, int64_t position, int64_t to) {
    const bool WIDE = TYPE != MTI_ANY_TYPE;
    int64_t d = k.s.head_dim, turned = (k.half + MTI_VECTOR - 1) / MTI_VECTOR, angle = vector * MTI_VECTOR;
    bool query = head < k.s.heads_per_group, key = head == k.s.heads_per_group;
    int64_t col =
        query ? group * k.cols.q_step + head * d : k.cols.key + group * k.cols.kv_step + (key ? 0 : k.cols.value);
    float both[2 * MTI_VECTOR], cosine[MTI_VECTOR], sine[MTI_VECTOR];
    if ((query || key) && vector < turned) {
        int angles = mti_vector_size(k.half, angle), in_low = PAIRS ? mti_vector_size(2 * angles, 0) : angles;
        int in_high = PAIRS ? 2 * angles - in_low : angles;
        int64_t low = PAIRS ? 2 * angle : angle, high = low + (PAIRS ? MTI_VECTOR : k.half);
        mti_load<WIDE, TYPE>(k.qkv, row, col + low, in_low, both);
        mti_load<WIDE, TYPE>(k.qkv, row, col + high, in_high, both + MTI_VECTOR);
        mti_load<WIDE>(k.table, position, angle, angles, cosine);
        mti_load<WIDE>(k.table, position, k.half + angle, angles, sine);
        mti_rotary_turn<PAIRS>(both, cosine, sine, 1.0f);
        mti_store<WIDE, TYPE>(k.qkv, row, col + low, in_low, both);
        mti_store<WIDE, TYPE>(k.qkv, row, col + high, in_high, both + MTI_VECTOR);
        if (query) return;
        mti_store<WIDE, TYPE>(k.keys, to, low, in_low, both);
        mti_store<WIDE, TYPE>(k.keys, to, high, in_high, both + MTI_VECTOR);
    } else if (!query) {
        int64_t at = key ? 2 * k.half + (vector - turned) * MTI_VECTOR : angle;
        int n = at < d ? mti_vector_size(d, at) : 0;
        if (n == 0) return;
        mti_load<WIDE, TYPE>(k.qkv, row, col + at, n, both);
        if (key) mti_store<WIDE, TYPE>(k.keys, to, at, n, both);
        else mti_store<WIDE, TYPE>(k.values, to, at, n, both);
    }
}

/* A thread owns every (grid size)-th vector of the queries, keys and values of all tokens: it turns a query in qkv, and
   a key in qkv and in the cache, and copies a value to the cache. The kernel uses no shared memory and no barrier. */
template <int TYPE, bool PAIRS> static __global__ void __launch_bounds__(256) mti_kv_append_kernel(mti_kv_gpu k) {
    int64_t heads = k.s.heads_per_group + 2, of_token = k.s.groups * heads * k.vectors;
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x, items = k.s.batch * k.s.seq * of_token;
    for (; i < items; i += (int64_t)gridDim.x * 256) {
        int64_t row = mt_divide(i, of_token), b = mt_divide(row, k.s.seq),
                position = k.tokens.before(b) + row - b * k.s.seq;
        int64_t in_token = i - row * of_token, slot = mt_divide(in_token, k.vectors), group = mt_divide(slot, heads);
        if (row - b * k.s.seq >= k.tokens.tokens(b)) continue;
        mti_kv_move_vector<TYPE, PAIRS>(k, row, group, slot - group * heads, in_token - slot * k.vectors, position,
                                        k.row(b, group) + position);
    }
}

static mt_status mti_cuda_kv_cache_append(const mti_kv *kv) {
    const mt_attention_desc *s = &kv->desc;
    mti_kv_gpu k = mti_kv_gpu_of(kv);
    mti_access how = mti_access_of(kv->qkv, kv->cache.keys, kv->cache.values);
    k.half = kv->table.cols / 2; /* 0 without a table */
    k.vectors =
        mt_max((k.half + MTI_VECTOR - 1) / MTI_VECTOR + (s->head_dim - 2 * k.half + MTI_VECTOR - 1) / MTI_VECTOR,
               (s->head_dim + MTI_VECTOR - 1) / MTI_VECTOR);
    if (k.half % MTI_VECTOR != 0 || s->head_dim % MTI_VECTOR != 0 || !mti_is_wide(kv->table)) how.type = MTI_ANY_TYPE;
    MT_TRY(mt_cuda_enter(kv->ctx));
    return mti_by_type(how.type, [&](auto type) {
        return mti_by_kind<2>(s->scores.rotary_form == MT_ROTARY_PAIRS, [&](auto pairs) {
            unsigned grid = mti_grid(kv->qkv.rows * s->groups * (s->heads_per_group + 2) * k.vectors, 256);
            MT_LAUNCH_KERNEL((mti_kv_append_kernel<type.value, pairs.value != 0>), grid, 256, 0,
                             mt_context_stream(kv->ctx), k);
            return mt_cuda_launched(kv->ctx, "mt_kv_cache_append");
        });
    });
}

/* Attention to a cache without tensor cores, for any float type and for head_dim up to 256. The queries of all heads of
   a group at all new tokens of a sequence are rows: row i * heads_per_group + j is head j at token i. A block owns a
   tile of ROWS rows of a group, and one split of the keys. It reads each key and value once for the tile, 16 bytes at a
   time.

   LANES neighbouring lanes of a warp share a key, and each of them has 8 features of it. So a warp works on
   32 / LANES * MTI_KV_AHEAD keys in a step:
   1. It fetches the values of the step, while the keys that the step before has fetched arrive.
   2. Each lane multiplies its features of the queries and keys. Shuffles add the products of LANES lanes, so that all
      of them have the scores.
   3. It fetches the keys of the next step.
   4. Online softmax: each group of LANES lanes has its own maximum and sum of exponentials for each row.
   5. Each lane adds the values to its features of the result.
   At the end, shuffles merge the results of a warp, and those of the warps meet in shared memory.

   With at most MTI_KV_FEW new tokens, there are few tiles. Then the keys are divided into splits of MTI_KV_SPLIT, as in
   Flash-Decoding: the results of the splits go to scratch memory, and a second kernel merges them. The number of splits
   depends on max_seq only, because the lengths are in memory of the GPU. Blocks of splits without keys end at once.

   Steps and splits begin at multiples of their sizes, and rows of a tile do not change each other. So the bits of a row
   depend neither on the number of sequences, groups and heads, nor on max_seq. */
#define MTI_KV_SPLIT 256
#define MTI_KV_FEW 8
#define MTI_KV_WARPS 4
#define MTI_KV_AHEAD 2

/* The state of a lane: its features of the queries and of the results. The other numbers are the same in all lanes that
   share a key. */
template <int ROWS> struct mti_split_rows {
    float q[ROWS][MTI_VECTOR], acc[ROWS][MTI_VECTOR]; /* q: multiplied by scale */
    float top[ROWS], sum[ROWS];                       /* the largest score so far, and the sum of exponentials */
    int end[ROWS];                                    /* as mti_kv_gpu.end */
    float slope[ROWS];                                /* of alibi_slopes, or 0 */
};

/* The keys of a block: [begin, end), and its tile and split. */
struct mti_split_block {
    int64_t b, group, row; /* row: the first one of the tile */
    int begin, end, split;
};

template <int ROWS> static __device__ __forceinline__ mti_split_block mti_split_find_block(const mti_kv_gpu &k) {
    int64_t rows = k.s.seq * k.s.heads_per_group, tiles = (rows + ROWS - 1) / ROWS;
    mti_split_block m;
    m.b = blockIdx.z, m.group = blockIdx.y;
    m.split = (int)(blockIdx.x / tiles);
    m.row = (tiles - 1 - blockIdx.x % tiles) * ROWS; /* tiles with the most keys start first */
    int64_t last = mt_divide(min(m.row + ROWS, rows) - 1, k.s.heads_per_group);
    m.end = k.tokens.end(m.b, mt_divide(m.row, k.s.heads_per_group)); /* of the first row; 0 if no row has keys */
    m.begin = k.tokens.first(m.end);
    if (m.end > 0) m.end = k.tokens.end(m.b, min(last, k.tokens.tokens(m.b) - 1));
    if (k.splits > 1) {
        m.begin = max(m.begin, m.split * MTI_KV_SPLIT);
        m.end = min(m.end, (m.split + 1) * MTI_KV_SPLIT);
    }
    return m;
}

/* Loads the features [col, col + n) of the queries. */
template <int TYPE, int ROWS>
static __device__ __forceinline__ void mti_split_begin(const mti_kv_gpu &k, const mti_split_block &m, int col, int n,
                                                       mti_split_rows<ROWS> &x) {
    int64_t h = k.s.heads_per_group;
    MT_DEVICE_UNROLL
    for (int r = 0; r < ROWS; r++) {
        int64_t i = mt_divide(m.row + r, h), head = m.group * h + m.row + r - i * h;
        x.end[r] = i < k.s.seq ? k.tokens.end(m.b, i) : 0;
        x.slope[r] = k.s.scores.alibi_slopes && i < k.s.seq ? k.s.scores.alibi_slopes[head] : 0.0f;
        bool is = x.end[r] > 0 && n > 0;
        mti_load<TYPE != MTI_ANY_TYPE, TYPE>(k.qkv, is ? m.b * k.s.seq + i : 0, is ? k.query_col(head) + col : 0,
                                             is ? n : 0, x.q[r]);
        MT_DEVICE_UNROLL
        for (int e = 0; e < MTI_VECTOR; e++) x.q[r][e] *= k.s.scores.scale, x.acc[r][e] = 0.0f;
        x.top[r] = -INFINITY, x.sum[r] = 0.0f;
    }
}

/* Fetches the features [col, col + n) of the lane's keys or values: those at key, key + step, .... A key from `end` on
   is 0. */
template <int TYPE>
static __device__ __forceinline__ void mti_split_fetch(const mti_view &v, int64_t row, int key, int step, int end,
                                                       int col, int n, mti_fetched<TYPE> (&out)[MTI_KV_AHEAD]) {
    MT_DEVICE_UNROLL
    for (int u = 0; u < MTI_KV_AHEAD; u++) {
        memset(&out[u], 0, sizeof out[u]);
        if (n > 0 && key + u * step < end) mti_fetch<TYPE != MTI_ANY_TYPE>(v, row + key + u * step, col, n, out[u]);
    }
}

/* s = the scores of the rows and the lane's keys. Keys that a row does not see get -infinity. */
template <int TYPE, int LANES, int ROWS>
static __device__ __forceinline__ void mti_split_scores(const mti_kv_gpu &k, const mti_split_rows<ROWS> &x,
                                                        const mti_fetched<TYPE> (&keys)[MTI_KV_AHEAD], int key,
                                                        float (&s)[ROWS][MTI_KV_AHEAD]) {
    MT_DEVICE_UNROLL
    for (int u = 0; u < MTI_KV_AHEAD; u++) {
        float y[MTI_VECTOR];
        mti_values(keys[u], y);
        MT_DEVICE_UNROLL
        for (int r = 0; r < ROWS; r++) {
            s[r][u] = 0.0f;
            MT_DEVICE_UNROLL
            for (int e = 0; e < MTI_VECTOR; e++) s[r][u] += x.q[r][e] * y[e];
        }
    }
    MT_DEVICE_UNROLL
    for (int i = 0; i < ROWS * MTI_KV_AHEAD; i++) {
        int r = i / MTI_KV_AHEAD, u = i % MTI_KV_AHEAD, j = key + u * (32 / LANES);
        float score = s[r][u];
        MT_DEVICE_UNROLL
        for (int o = LANES / 2; o > 0; o >>= 1) score += __shfl_xor_sync(0xffffffffu, score, o);
        if (k.s.scores.softcap > 0.0f) score = k.s.scores.softcap * tanhf(score / k.s.scores.softcap);
        score -= x.slope[r] * (float)(x.end[r] - 1 - j);
        s[r][u] = j < x.end[r] && j >= k.tokens.first(x.end[r]) ? score : -INFINITY;
    }
}

/* The factor of what belongs to the maximum `top` when it becomes `now`. Both may be -infinity. */
static __device__ __forceinline__ float mti_split_factor(int fast, float top, float now) {
    return top == now ? 1.0f : mti_cuda_exp(fast, top - now);
}

/* Raises the maxima to those of the scores, and turns the scores into exponentials. */
template <int ROWS>
static __device__ __forceinline__ void mti_split_softmax(int fast, mti_split_rows<ROWS> &x,
                                                         float (&s)[ROWS][MTI_KV_AHEAD]) {
    MT_DEVICE_UNROLL
    for (int r = 0; r < ROWS; r++) {
        float now = x.top[r];
        MT_DEVICE_UNROLL
        for (int u = 0; u < MTI_KV_AHEAD; u++) now = fmaxf(now, s[r][u]);
        if (__any_sync(0xffffffffu, now != x.top[r])) {
            float factor = mti_split_factor(fast, x.top[r], now);
            MT_DEVICE_UNROLL
            for (int e = 0; e < MTI_VECTOR; e++) x.acc[r][e] *= factor;
            x.sum[r] *= factor;
            x.top[r] = now;
        }
        MT_DEVICE_UNROLL
        for (int u = 0; u < MTI_KV_AHEAD; u++) {
            s[r][u] = s[r][u] == -INFINITY ? 0.0f : mti_cuda_exp(fast, s[r][u] - now);
            x.sum[r] += s[r][u];
        }
    }
}

/* Merges the results of the lanes of a warp that have the same features, into its first LANES lanes. */
template <int LANES, int ROWS>
static __device__ __forceinline__ void mti_split_merge_lanes(int fast, mti_split_rows<ROWS> &x) {
    MT_DEVICE_UNROLL
    for (int o = 8; o <= 16; o += 8) {
        if (o < LANES) continue;
        MT_DEVICE_UNROLL
        for (int r = 0; r < ROWS; r++) {
            float top = __shfl_xor_sync(0xffffffffu, x.top[r], o), sum = __shfl_xor_sync(0xffffffffu, x.sum[r], o);
            float now = fmaxf(top, x.top[r]);
            float own = mti_split_factor(fast, x.top[r], now), other = mti_split_factor(fast, top, now);
            x.top[r] = now;
            x.sum[r] = x.sum[r] * own + sum * other;
            MT_DEVICE_UNROLL
            for (int e = 0; e < MTI_VECTOR; e++)
                x.acc[r][e] = x.acc[r][e] * own + __shfl_xor_sync(0xffffffffu, x.acc[r][e], o) * other;
        }
    }
}

/* What a warp leaves in shared memory for the other warps: the results of ROWS rows of at most WIDTH features. It is
   written 16 bytes at a time. */
template <int ROWS, int WIDTH> struct mti_split_part {
    alignas(16) float acc[ROWS][WIDTH];
    float2 stats[ROWS];
};

/* Merges the features [col, col + 8) of a row, in the order of the warps. Returns the maximum and the sum. */
template <int WARPS, int ROWS, int WIDTH>
static __device__ __forceinline__ float2 mti_split_merge_warps(int fast, const mti_split_part<ROWS, WIDTH> *parts,
                                                               int row, int col, float *acc) {
    float2 all = make_float2(-INFINITY, 0.0f);
    for (int w = 0; w < WARPS; w++) all.x = fmaxf(all.x, parts[w].stats[row].x);
    MT_DEVICE_UNROLL
    for (int e = 0; e < MTI_VECTOR; e++) acc[e] = 0.0f;
    for (int w = 0; w < WARPS; w++) {
        float factor = mti_split_factor(fast, parts[w].stats[row].x, all.x);
        all.y += parts[w].stats[row].y * factor;
        MT_DEVICE_UNROLL
        for (int e = 0; e < MTI_VECTOR; e++) acc[e] += parts[w].acc[row][col + e] * factor;
    }
    return all;
}

/* Stores features of out. A query without keys has the sum 0. */
template <int TYPE>
static __device__ __forceinline__ void mti_split_store_out(const mti_kv_gpu &k, int64_t token, int64_t head, int col,
                                                           float sum, float *acc) {
    float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
    MT_DEVICE_UNROLL
    for (int e = 0; e < MTI_VECTOR; e++) acc[e] *= factor;
    mti_store<TYPE != MTI_ANY_TYPE, TYPE>(k.out, token, head * k.s.head_dim + col, mti_vector_size(k.s.head_dim, col),
                                          acc);
}

/* Each thread stores 8 features of a row of the tile: in out, or in the scratch memory if there are more splits. */
template <int TYPE, int LANES, int WARPS, int ROWS, int WIDTH>
static __device__ __forceinline__ void mti_split_finish(const mti_kv_gpu &k, const mti_split_block &m, int fast,
                                                        const mti_split_part<ROWS, WIDTH> *parts) {
    int64_t h = k.s.heads_per_group;
    for (int item = (int)threadIdx.x; item < ROWS * LANES; item += 32 * WARPS) {
        int r = item / LANES, col = item % LANES * MTI_VECTOR;
        int64_t i = mt_divide(m.row + r, h), head = m.group * h + m.row + r - i * h;
        float acc[MTI_VECTOR];
        if (i >= k.s.seq || col >= k.s.head_dim) continue;
        float2 stats = mti_split_merge_warps<WARPS>(fast, parts, r, col, acc);
        if (k.splits > 1) {
            int64_t at = k.split_of(m.b, i, head, m.split);
            float4 *to = (float4 *)(k.sums + at * k.pitch + col);
            to[0] = make_float4(acc[0], acc[1], acc[2], acc[3]), to[1] = make_float4(acc[4], acc[5], acc[6], acc[7]);
            if (col == 0) k.stats[at] = stats;
        } else mti_split_store_out<TYPE>(k, m.b * k.s.seq + i, head, col, stats.y, acc);
    }
}

/* The grid is (splits x tiles) x groups x sequences. The barrier separates writing the results of the warps from
   reading them. */
template <int TYPE, int LANES, int ROWS> static __device__ __forceinline__ void mti_split_run(const mti_kv_gpu &k) {
    typedef mti_split_part<ROWS, LANES * MTI_VECTOR> part;
    constexpr int Across = 32 / LANES, Step = Across * MTI_KV_AHEAD;
    MT_SHARED(part, parts, MTI_KV_WARPS);
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x / 32, col = lane % LANES * MTI_VECTOR;
    int n = min(max((int)k.s.head_dim - col, 0), MTI_VECTOR), fast = mti_type_of<TYPE>(k.out) != MT_F32;
    mti_split_block m = mti_split_find_block<ROWS>(k);
    mti_fetched<TYPE> keys[MTI_KV_AHEAD], values[MTI_KV_AHEAD];
    mti_split_rows<ROWS> x;
    float s[ROWS][MTI_KV_AHEAD];
    if (k.splits > 1 && m.begin >= m.end) return;
    mti_split_begin<TYPE>(k, m, col, n, x);
    int64_t row = k.row(m.b, m.group);
    int step = m.begin / (MTI_KV_WARPS * Step) * (MTI_KV_WARPS * Step) + warp * Step; /* the first key of a step */
    int key = step + lane / LANES;
    mti_split_fetch(k.keys, row, key, Across, m.end, col, n, keys);
    for (; step < m.end; step += MTI_KV_WARPS * Step, key += MTI_KV_WARPS * Step) {
        mti_split_fetch(k.values, row, key, Across, m.end, col, n, values);
        mti_split_scores<TYPE, LANES>(k, x, keys, key, s);
        mti_split_fetch(k.keys, row, key + MTI_KV_WARPS * Step, Across, m.end, col, n, keys);
        mti_split_softmax(fast, x, s);
        MT_DEVICE_UNROLL
        for (int u = 0; u < MTI_KV_AHEAD; u++) {
            float y[MTI_VECTOR];
            mti_values(values[u], y);
            MT_DEVICE_UNROLL
            for (int i = 0; i < ROWS * MTI_VECTOR; i++)
                x.acc[i / MTI_VECTOR][i % MTI_VECTOR] += s[i / MTI_VECTOR][u] * y[i % MTI_VECTOR];
        }
    }
    mti_split_merge_lanes<LANES>(fast, x);
    MT_DEVICE_UNROLL
    for (int r = 0; r < ROWS && lane < LANES; r++) {
        float4 *to = (float4 *)(parts[warp].acc[r] + col);
        to[0] = make_float4(x.acc[r][0], x.acc[r][1], x.acc[r][2], x.acc[r][3]);
        to[1] = make_float4(x.acc[r][4], x.acc[r][5], x.acc[r][6], x.acc[r][7]);
        if (lane == 0) parts[warp].stats[r] = make_float2(x.top[r], x.sum[r]);
    }
    __syncthreads();
    mti_split_finish<TYPE, LANES, MTI_KV_WARPS>(k, m, fast, parts);
}

/* Code for sm_80 and later has this kernel only for f32 and MTI_ANY_TYPE: mti_kv_tile_kernel runs the others. */
#if defined(__CUDA_ARCH__) && MTI_HAS_SM80
#define MTI_SPLIT_HAS(TYPE) (mti_fetched<TYPE>::size == 4)
#else
#define MTI_SPLIT_HAS(TYPE) true
#endif
template <int TYPE, int LANES, int ROWS>
static __global__ void __launch_bounds__(32 * MTI_KV_WARPS, ROWS == 8 ? 2 : 3) mti_kv_attention_kernel(mti_kv_gpu k) {
    if (MTI_SPLIT_HAS(TYPE)) mti_split_run<TYPE, LANES, ROWS>(k);
}
#undef MTI_SPLIT_HAS

/* Merges the splits of a query. A block owns a query of a head, and each of its warps owns every fourth split that the
   query sees. A lane has 8 features. The barrier is that of mti_kv_attention_kernel. The grid is heads x tokens x
   sequences. */
template <int TYPE> static __global__ void __launch_bounds__(32 * MTI_KV_WARPS) mti_kv_merge_kernel(mti_kv_gpu k) {
    typedef mti_split_part<1, 32 * MTI_VECTOR> part;
    MT_SHARED(part, parts, MTI_KV_WARPS);
    int64_t head = blockIdx.x, i = blockIdx.y, b = blockIdx.z;
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x / 32, col = lane * MTI_VECTOR;
    int end = k.tokens.end(b, i), fast = mti_type_of<TYPE>(k.out) != MT_F32;
    float acc[MTI_VECTOR] = {}, top = -INFINITY, sum = 0.0f;
    MT_DEVICE_UNROLL_2
    for (int split = k.tokens.first(end) / MTI_KV_SPLIT + warp; split * MTI_KV_SPLIT < end; split += MTI_KV_WARPS) {
        int64_t at = k.split_of(b, i, head, split);
        float2 stats = k.stats[at];
        float now = fmaxf(top, stats.x), own = mti_split_factor(fast, top, now),
              other = mti_split_factor(fast, stats.x, now);
        if (col < k.pitch) {
            const float4 *from = (const float4 *)(k.sums + at * k.pitch + col);
            float4 low = from[0], high = from[1];
            const float x[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            MT_DEVICE_UNROLL
            for (int e = 0; e < MTI_VECTOR; e++) acc[e] = acc[e] * own + x[e] * other;
        }
        sum = sum * own + stats.y * other;
        top = now;
    }
    MT_DEVICE_UNROLL
    for (int e = 0; e < MTI_VECTOR; e++) parts[warp].acc[0][col + e] = acc[e];
    if (lane == 0) parts[warp].stats[0] = make_float2(top, sum);
    __syncthreads();
    if (warp > 0 || col >= k.s.head_dim) return;
    float2 stats = mti_split_merge_warps<MTI_KV_WARPS>(fast, parts, 0, col, acc);
    mti_split_store_out<TYPE>(k, b * k.s.seq + i, head, col, stats.y, acc);
}

/* Limits the number of blocks, and takes the scratch memory: (4 round_up(head_dim, 8) + 8) bytes for each query head of
   a token and each split. */
static mt_status mti_split_room(const mti_kv *kv, mti_kv_gpu *k) {
    const mt_attention_desc *s = &kv->desc;
    int64_t n = s->batch * s->seq * mti_attention_heads(s), rows = s->seq * s->heads_per_group;
    void *memory = NULL;
    k->splits = 1; /* max_seq is below 2^30, so it and the splits are numbers of 32 bits */
    if (s->seq <= MTI_KV_FEW) k->splits = (int)((k->tokens.max_seq + MTI_KV_SPLIT - 1) / MTI_KV_SPLIT);
    if (mt_size_mul(rows, k->splits) < 0 || rows * k->splits > INT_MAX)
        return mt_fail(kv->ctx, MT_ERR_UNSUPPORTED, "mt_kv_cache_attention: %lld queries of a group, and %d splits",
                       (long long)rows, k->splits);
    if (k->splits == 1) return MT_SUCCESS;
    k->pitch = (int)mt_round_up(s->head_dim, MTI_VECTOR);
    n = mt_size_mul(n, k->splits);
    if (mt_size_mul(mt_size_mul(n, k->pitch), sizeof(float)) < 0)
        return mt_fail(kv->ctx, MT_ERR_MEMORY, "mt_kv_cache_attention: %d splits of the keys need too much memory",
                       k->splits);
    MT_TRY(mt_arena_alloc(kv->ctx, (size_t)(n * k->pitch) * sizeof(float), &memory));
    k->sums = (float *)memory;
    MT_TRY(mt_arena_alloc(kv->ctx, (size_t)n * sizeof(float2), &memory));
    k->stats = (float2 *)memory;
    return MT_SUCCESS;
}

/* Merges the splits, if there are several. */
template <int TYPE> static mt_status mti_split_merge(const mti_kv *kv, const mti_kv_gpu &k) {
    dim3 grid((unsigned)mti_attention_heads(&k.s), (unsigned)k.s.seq, (unsigned)k.s.batch);
    if (k.splits == 1) return MT_SUCCESS;
    MT_LAUNCH_KERNEL(mti_kv_merge_kernel<TYPE>, grid, 32 * MTI_KV_WARPS, 0, mt_context_stream(kv->ctx), k);
    return mt_cuda_launched(kv->ctx, "mt_kv_cache_attention");
}

/* Launches the kernel with tiles of 1, 4 or 8 rows, and with 8, 16 or 32 lanes for a key. With 8 rows, keys and values
   in f32 would need too many registers. */
template <int TYPE> static mt_status mti_split_attention(const mti_kv *kv, const mti_kv_gpu &k) {
    int64_t d = k.s.head_dim, rows = k.s.seq * k.s.heads_per_group;
    constexpr int Tiles = mti_fetched<TYPE>::size == 2 ? 3 : 2;
    return mti_by_kind<3>(TYPE == MTI_ANY_TYPE || d > 128 ? 2 : d > 64, [&](auto lanes) {
        return mti_by_kind<Tiles>(rows > 4 ? 2 : rows > 1, [&](auto tile) {
            constexpr int Lanes = TYPE == MTI_ANY_TYPE ? 32 : 8 << decltype(lanes)::value;
            constexpr int Rows = decltype(tile)::value == 0 ? 1 : 2 << decltype(tile)::value;
            dim3 grid((unsigned)((rows + Rows - 1) / Rows * k.splits), (unsigned)k.s.groups, (unsigned)k.s.batch);
            MT_LAUNCH_KERNEL((mti_kv_attention_kernel<TYPE, Lanes, Rows>), grid, 32 * MTI_KV_WARPS, 0,
                             mt_context_stream(kv->ctx), k);
            return mt_cuda_launched(kv->ctx, "mt_kv_cache_attention");
        });
    });
}

} /* extern "C++" */
#endif
