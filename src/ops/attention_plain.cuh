/* ---- attention on a GPU: kernels without tensor cores ------------------------------------------------------------ */

#pragma once
#include "rows.cuh"
#include "attention_desc.c"

#if MT_HAS_CUDA
extern "C++" {

/* Bit k of the result of mti_kept is 1 if the probability of element e + k is kept, for k = 0 ... 3. The four elements
   need one block of random words if e % 4 is 0, otherwise two. */
static __device__ __forceinline__ uint32_t mti_kept_block(const mti_drop &drop, uint64_t block) {
    uint32_t words[4], bits = 0;
    mti_philox(block, mti_subsequence(&drop.at), drop.at.seed, words);
    MT_DEVICE_UNROLL
    for (int k = 0; k < 4; k++) bits |= (uint32_t)(words[k] >= drop.threshold) << k;
    return bits;
}
static __device__ __forceinline__ uint32_t mti_kept(const mti_drop &drop, uint64_t e) {
    uint32_t bits = mti_kept_block(drop, e >> 2), skip = (uint32_t)e & 3;
    if (skip) bits = (bits | mti_kept_block(drop, (e >> 2) + 1) << 4) >> skip;
    return bits & 15;
}

/* The plain path on a GPU, for any type and for head_dim up to MTI_PLAIN_DIM. Its products are multiplications and
   additions in f32, on tiles in shared memory. Its three large kernels have the same form. A block owns a few rows and
   goes over the columns, a tile at a time:

     kernel    rows      columns                 work
     forward   queries   keys                    s = q k^T, online softmax, out += D p v
     dq        queries   keys                    dp = dout v^T, s = q k^T, ds = p (D dp - delta), dq += ds k
     dkv       keys      queries of all heads    s = k q^T, dp = v dout^T, dv += D p dout, dk += ds q
                         of the group

   D is the factor of dropout. The first column of a tile is a multiple of the size of a tile, and sums are added in the
   order of the tiles. A block skips the tiles before and behind those that any of its rows sees. A warp skips the tiles
   that none of its rows sees.

   The 32 lanes of a warp are 4 x 8. In a tile, lane (r, c) owns the scores of rows r * LaneRows + m and columns c *
   LaneCols + n. Of the results it owns elements 32 * w + 4 * c + k of its rows, for k = 0 ... 3. Scores become weights
   of the products that add to the results, and go through shared memory. A load of shared memory has 16 bytes for each
   lane. (LaneRows + LaneCols) loads serve 4 * LaneRows * LaneCols multiplications for scores, and (1 + Slices) loads
   serve 4 * LaneRows * Slices multiplications for results. */
#define MTI_PLAIN_DIM 256 /* at most, of head_dim */
#define MTI_PLAIN_WARPS 4 /* of a block of the kernels without tiles */

struct mti_plain {
    mt_attention_desc s; /* without defaults */
    mti_view q, k, v, out, lse, dout, dq, dk, dv, bias, dbias;
    int64_t q_step, kv_step;
    int64_t value, dvalue; /* v begins this number of elements after k, and dv after dk; see mti_flash_fits */
    float scale;
    mti_drop drop;
    /* The plain path only. wide: q, k, v and dout can be loaded 16 bytes at a time. delta: backward only, rowsum(dout *
       out), in the order of lse. */
    int wide;
    mti_view delta;

    __device__ int64_t q_col(int64_t head) const {
        return head / s.heads_per_group * q_step + head % s.heads_per_group * s.head_dim;
    }
    __device__ int64_t k_col(int64_t head) const { return head / s.heads_per_group * kv_step; }
    __device__ int length(int64_t b) const { /* mti_keys_here; a GPU does not check lengths */
        return s.lengths ? max(0, min((int)s.lengths[b] - (int)s.part.first_key, (int)s.kv_seq)) : (int)s.kv_seq;
    }
    /* the keys that query i sees; a GPU does not check cu_seqlens either */
    __device__ mti_span keys(int64_t b, int64_t i) const {
        return mti_span_of_both(mti_keys_of(&s, length(b), b, i), 0, s.kv_seq);
    }
    __device__ mti_span queries(int64_t b, int64_t j) const {
        return mti_span_of_both(mti_queries_of(&s, length(b), b, j), 0, s.seq);
    }
    /* the element number of a probability */
    __device__ uint64_t element(int64_t b, int64_t head, int64_t i, int64_t j) const {
        uint64_t query = mti_element_of(drop.at, b, head) * (uint64_t)s.part.seq + (uint64_t)(s.part.first_query + i);
        return query * (uint64_t)s.part.kv_seq + (uint64_t)(s.part.first_key + j);
    }
    __device__ float dot(const mti_view &a, int64_t a_row, int64_t a_col, const mti_view &b, int64_t b_row,
                         int64_t b_col) const {
        float sum = 0.0f;
        for (int64_t d = 0; d < s.head_dim; d++) sum += mti_get(a, a_row, a_col + d) * mti_get(b, b_row, b_col + d);
        return sum;
    }
};

/* The sizes of a kernel. Slices: a head has up to 32 * Slices elements. LaneRows and LaneCols: of a tile for a lane.
   Blocks: of a multiprocessor, for which the registers must be enough. */
template <int SLICES, int WARPS, int LANE_ROWS, int LANE_COLS, int BLOCKS> struct mti_plain_shape {
    static constexpr int Slices = SLICES, LaneRows = LANE_ROWS, LaneCols = LANE_COLS;
    static constexpr int Threads = 32 * WARPS, Blocks = BLOCKS;
    static constexpr int WarpRows = 4 * LANE_ROWS, Rows = WARPS * WarpRows; /* of a block */
    static constexpr int Cols = 8 * LANE_COLS;                              /* of a tile */
    /* The floats of a row in shared memory. Eight neighbours begin in different groups of four banks. */
    static constexpr int Pitch = 32 * SLICES + 4;
    /* The shared memory of a block with the rows of so many tensors, and tiles of as many. */
    static constexpr size_t bytes(int of_rows, int of_tiles) {
        return sizeof(float) * (size_t)(Pitch * (of_rows * Rows + of_tiles * Cols) + Rows * Cols) +
               sizeof(mti_span) * (size_t)Rows;
    }
};

static __device__ __forceinline__ int mti_plain_r() { return (int)threadIdx.x % 32 / 8; }
static __device__ __forceinline__ int mti_plain_c() { return (int)threadIdx.x % 8; }

/* The place in shared memory of element d of row x. Row x of each Lanes * Each rows becomes row x % Each * Lanes + x /
   Each: the rows that Lanes lanes load at the same time are then neighbours. */
template <typename T, int Lanes, int Each>
static __device__ __forceinline__ float *mti_plain_place(float *to, int x, int d) {
    constexpr int Group = Lanes * Each;
    return to + (x / Group * Group + x % Each * Lanes + x % Group / Each) * T::Pitch + d;
}

/* Copies vector e of the rows from `first` on of a head to shared memory, as f32, and zeros instead of the rows outside
   of `all`. base is the row of the view for row 0. WIDE: the rows are f32 and can be loaded 16 bytes at a time. */
template <typename T, int Lanes, int Each, bool WIDE>
static __device__ __forceinline__ void mti_plain_copy(const mti_plain &p, const mti_view &v, int64_t base, int64_t col,
                                                      int64_t first, mti_span all, float *to, int e) {
    constexpr int Vectors = 32 * T::Slices / MTI_VECTOR;
    int x = e / Vectors, d = e % Vectors * MTI_VECTOR, dim = (int)p.s.head_dim;
    int64_t row = first + x;
    bool is = row >= all.first && row < all.end && d < dim;
    float *at = mti_plain_place<T, Lanes, Each>(to, x, d), y[MTI_VECTOR] = {};
    if (!WIDE && !p.wide) {
        MT_DEVICE_NO_UNROLL
        for (int j = 0; j < MTI_VECTOR; j++) at[j] = is && d + j < dim ? mti_get(v, base + row, col + d + j) : 0.0f;
        return;
    }
    if (is) mti_load<true, WIDE ? MT_F32 : MTI_ANY_TYPE>(v, base + row, col + d, MTI_VECTOR, y);
    *(float4 *)at = make_float4(y[0], y[1], y[2], y[3]);
    *(float4 *)(at + 4) = make_float4(y[4], y[5], y[6], y[7]);
}

/* Copies the rows [first, first + Count). The loop for f32 is unrolled. The other one is for calls that are rare. It is
   short, because nvcc compiles it several times for each kernel. */
template <typename T, int Count, int Lanes, int Each>
static __device__ __forceinline__ void mti_plain_load(const mti_plain &p, const mti_view &v, int64_t base, int64_t col,
                                                      int64_t first, mti_span all, float *to) {
    constexpr int Items = Count * 32 * T::Slices / MTI_VECTOR;
    int e = (int)threadIdx.x;
    if (p.wide && v.dtype == MT_F32) {
        MT_DEVICE_UNROLL_2
        for (; e < Items; e += T::Threads) mti_plain_copy<T, Lanes, Each, true>(p, v, base, col, first, all, to, e);
    }
    MT_DEVICE_NO_UNROLL
    for (; e < Items; e += T::Threads) mti_plain_copy<T, Lanes, Each, false>(p, v, base, col, first, all, to, e);
}

/* The same for the rows of a block, of which there are `rows`, and for a tile. */
template <typename T>
static __device__ __forceinline__ void mti_plain_load_rows(const mti_plain &p, const mti_view &v, int64_t rows,
                                                           int64_t col, int64_t first, float *to) {
    mti_span all = {0, rows};
    mti_plain_load<T, T::Rows, 4, T::LaneRows>(p, v, blockIdx.z * rows, col, first, all, to);
}
template <typename T>
static __device__ __forceinline__ void mti_plain_load_tile(const mti_plain &p, const mti_view &v, int64_t cols,
                                                           int64_t col, int64_t first, mti_span all, float *to) {
    mti_plain_load<T, T::Cols, 8, T::LaneCols>(p, v, blockIdx.z * cols, col, first, all, to);
}

/* Computes the span of each row of a block: the keys that a query sees or, with KEYS, the queries that see a key.
   Returns the smallest span that has them all. The barrier separates the writes of the spans from the reads. */
template <typename T, bool KEYS>
static __device__ __forceinline__ mti_span mti_plain_spans(const mti_plain &p, int64_t first, mti_span *spans) {
    int64_t b = blockIdx.z, rows = KEYS ? p.s.kv_seq : p.s.seq;
    mti_span all = {INT64_MAX, 0};
    for (int x = (int)threadIdx.x; x < T::Rows; x += T::Threads) {
        mti_span span = {0, 0};
        if (first + x < rows) span = KEYS ? p.queries(b, first + x) : p.keys(b, first + x);
        spans[x] = span;
    }
    __syncthreads();
    for (int x = (int)threadIdx.x % 32; x < T::Rows; x += 32)
        if (spans[x].first < spans[x].end) {
            all.first = min(all.first, spans[x].first);
            all.end = max(all.end, spans[x].end);
        }
    for (int o = 16; o > 0; o >>= 1) {
        all.first = min(all.first, __shfl_xor_sync(0xffffffffu, all.first, o));
        all.end = max(all.end, __shfl_xor_sync(0xffffffffu, all.end, o));
    }
    all.first = min(all.first, all.end); /* {0, 0} if no row sees anything */
    return all;
}

/* Returns what the rows of a lane see of its columns, from column `col` on. Bit m * LaneCols + n stands for a pair. */
template <typename T> static __device__ __forceinline__ uint32_t mti_plain_seen(const mti_span *spans, int64_t col) {
    const int64_t most = T::LaneCols;
    uint32_t seen = 0;
    MT_DEVICE_UNROLL
    for (int m = 0; m < T::LaneRows; m++) {
        mti_span span = spans[mti_plain_r() * T::LaneRows + m];
        int first = (int)min(max(span.first - col, (int64_t)0), most);
        int end = (int)min(max(span.end - col, (int64_t)0), most);
        seen |= (((1u << end) - 1) & ~((1u << first) - 1)) << (m * T::LaneCols);
    }
    return seen;
}

/* s = the products of the rows of a warp and the columns of a tile. A step of the loop has at least 32 multiplications.
   Behind the head, rows are 0. */
template <typename T>
static __device__ __forceinline__ void mti_plain_product(const mti_plain &p, float (&s)[T::LaneRows][T::LaneCols],
                                                         const float *rows, const float *cols) {
    constexpr int M = T::LaneRows, N = T::LaneCols, Step = M * N >= 16 ? 4 : M * N >= 8 ? 8 : 16;
    const float *end = rows + p.s.head_dim;
    int r = mti_plain_r() * T::Pitch;
    cols += mti_plain_c() * T::Pitch;
    MT_DEVICE_UNROLL
    for (int e = 0; e < M * N; e++) s[e / N][e % N] = 0.0f;
    MT_DEVICE_NO_UNROLL
    for (; rows < end; rows += Step, cols += Step) {
        MT_DEVICE_UNROLL
        for (int d = 0; d < Step; d += 4) {
            float4 x[M], y[N];
            MT_DEVICE_UNROLL
            for (int m = 0; m < M; m++) x[m] = *(const float4 *)(rows + r + m * 4 * T::Pitch + d);
            MT_DEVICE_UNROLL
            for (int n = 0; n < N; n++) y[n] = *(const float4 *)(cols + n * 8 * T::Pitch + d);
            MT_DEVICE_UNROLL
            for (int e = 0; e < M * N; e++) s[e / N][e % N] += x[e / N].x * y[e % N].x;
            MT_DEVICE_UNROLL
            for (int e = 0; e < M * N; e++) s[e / N][e % N] += x[e / N].y * y[e % N].y;
            MT_DEVICE_UNROLL
            for (int e = 0; e < M * N; e++) s[e / N][e % N] += x[e / N].z * y[e % N].z;
            MT_DEVICE_UNROLL
            for (int e = 0; e < M * N; e++) s[e / N][e % N] += x[e / N].w * y[e % N].w;
        }
    }
}

/* Writes the weights of a warp to shared memory, [Cols, WarpRows], for mti_plain_add. */
template <typename T>
static __device__ __forceinline__ void mti_plain_weigh(const float (&s)[T::LaneRows][T::LaneCols], float *weights) {
    constexpr int M = T::LaneRows;
    static_assert(M == 4 || M == 2, "one store");
    weights += mti_plain_c() * T::WarpRows + mti_plain_r() * M;
    __syncwarp(); /* all lanes have read the weights before */
    MT_DEVICE_UNROLL
    for (int n = 0; n < T::LaneCols; n++) {
        float *to = weights + n * 8 * T::WarpRows;
        if (M == 4) *(float4 *)to = make_float4(s[0][n], s[1][n], s[M - 2][n], s[M - 1][n]);
        else *(float2 *)to = make_float2(s[0][n], s[1][n]);
    }
    __syncwarp();
}

/* acc += the products of the weights of a warp and the columns of a tile. */
template <typename T>
static __device__ __forceinline__ void mti_plain_add(float (&acc)[T::LaneRows][T::Slices][4], const float *weights,
                                                     const float *cols) {
    constexpr int M = T::LaneRows;
    weights += mti_plain_r() * M;
    cols += mti_plain_c() * 4;
    MT_DEVICE_UNROLL_2
    for (int x = 0; x < T::Cols; x++) {
        float a[M];
        float2 low = *(const float2 *)(weights + x * T::WarpRows);
        a[0] = low.x, a[1] = low.y;
        if (M == 4) {
            float4 all = *(const float4 *)(weights + x * T::WarpRows);
            a[0] = all.x, a[1] = all.y, a[M - 2] = all.z, a[M - 1] = all.w;
        }
        MT_DEVICE_UNROLL
        for (int w = 0; w < T::Slices; w++) {
            float4 y = *(const float4 *)(cols + x * T::Pitch + w * 32);
            MT_DEVICE_UNROLL
            for (int m = 0; m < M; m++) {
                acc[m][w][0] += a[m] * y.x, acc[m][w][1] += a[m] * y.y;
                acc[m][w][2] += a[m] * y.z, acc[m][w][3] += a[m] * y.w;
            }
        }
    }
}

template <typename T> static __device__ __forceinline__ void mti_plain_zero(float (&acc)[T::LaneRows][T::Slices][4]) {
    MT_DEVICE_UNROLL
    for (int e = 0; e < T::LaneRows * T::Slices * 4; e++) acc[e / 4 / T::Slices][e / 4 % T::Slices][e % 4] = 0.0f;
}

/* Writes scale * acc to the rows of a head, from row `first` of the warp on. `own` are the rows of the warp in shared
   memory. */
template <typename T>
static __device__ __forceinline__ void mti_plain_store(const mti_plain &p, float scale,
                                                       const float (&acc)[T::LaneRows][T::Slices][4], const mti_view &v,
                                                       int64_t rows, int64_t col, int64_t first, float *own) {
    constexpr int M = T::LaneRows;
    __syncwarp(); /* all lanes have read the rows */
    MT_DEVICE_UNROLL
    for (int e = 0; e < M * T::Slices; e++) {
        const float *x = acc[e / T::Slices][e % T::Slices];
        *(float4 *)(own + (e / T::Slices * 4 + mti_plain_r()) * T::Pitch + e % T::Slices * 32 + mti_plain_c() * 4) =
            make_float4(scale * x[0], scale * x[1], scale * x[2], scale * x[3]);
    }
    __syncwarp();
    for (int x = 0; x < T::WarpRows && first + x < rows; x++)
        for (int64_t d = threadIdx.x % 32; d < p.s.head_dim; d += 32)
            mti_put(v, blockIdx.z * rows + first + x, col + d, own[(x % M * 4 + x / M) * T::Pitch + d]);
}

/* Turns the products s of the rows from `row` on and the columns from `col` on into scores. A score is -infinity where
   the row does not see the column. The rows are queries or, with KEYS, keys. With CHAIN, g is multiplied by the
   derivative of a score by the scaled product. */
template <bool KEYS, bool CHAIN, int M, int N>
static __device__ __forceinline__ void mti_plain_scores(const mti_plain &p, float (&s)[M][N], float (&g)[M][N],
                                                        uint32_t seen, int64_t b, int64_t head, int64_t row,
                                                        int64_t col) {
    int64_t query = KEYS ? col : row, key = KEYS ? row : col;
    MT_DEVICE_UNROLL
    for (int e = 0; e < M * N; e++) s[e / N][e % N] *= p.scale;
    if (p.s.scores.softcap > 0.0f) {
        MT_DEVICE_UNROLL
        for (int e = 0; e < M * N; e++) {
            float t = tanhf(s[e / N][e % N] / p.s.scores.softcap);
            s[e / N][e % N] = p.s.scores.softcap * t;
            if (CHAIN) g[e / N][e % N] *= 1.0f - t * t;
        }
    }
    if (p.s.scores.alibi_slopes) {
        float slope = p.s.scores.alibi_slopes[head], between = (float)(query + mti_key_of_query(&p.s) - key);
        MT_DEVICE_UNROLL
        for (int e = 0; e < M * N; e++)
            s[e / N][e % N] -= slope * fabsf(between + (float)(KEYS ? e % N - e / N : e / N - e % N));
    }
    if (p.bias.data) {
        MT_DEVICE_UNROLL
        for (int e = 0; e < M * N; e++) {
            int64_t at = mti_bias_row(&p.s, b, head, query + (KEYS ? e % N : e / N)), j = key + (KEYS ? e / N : e % N);
            if (!(seen >> e & 1)) continue;
            j += p.s.part.first_key;
            if (p.bias.dtype != MT_U8) s[e / N][e % N] += mti_get(p.bias, at, j);
            else if (!((const uint8_t *)p.bias.data)[at * p.bias.ld + j]) s[e / N][e % N] = -INFINITY;
        }
    }
    MT_DEVICE_UNROLL
    for (int e = 0; e < M * N; e++)
        if (!(seen >> e & 1)) s[e / N][e % N] = -INFINITY;
}

/* Returns which probabilities dropout keeps, in the same bits as mti_plain_seen. A call of mti_kept serves all keys of
   a query. */
template <bool KEYS, int M, int N>
static __device__ __forceinline__ uint32_t mti_plain_kept(const mti_plain &p, int64_t b, int64_t head, int64_t row,
                                                          int64_t col) {
    uint32_t kept = 0;
    if (!p.drop.on) return ~0u;
    uint64_t e = p.element(b, head, KEYS ? col : row, KEYS ? row : col);
    MT_DEVICE_NO_UNROLL
    for (int x = 0; x < (KEYS ? N : M); x++) {
        uint32_t bits = mti_kept(p.drop, e + (uint64_t)x * (uint64_t)p.s.part.kv_seq);
        MT_DEVICE_UNROLL
        for (int y = 0; y < (KEYS ? M : N); y++) kept |= (bits >> y & 1) << (KEYS ? y * N + x : x * N + y);
    }
    return kept;
}

/* Online softmax: s = e^(score - top) and, of a dropped key, 0. top is the largest score of a row so far. sum has only
   the columns of this lane. */
template <typename T>
static __device__ __forceinline__ void mti_plain_softmax(const mti_plain &p, float (&s)[T::LaneRows][T::LaneCols],
                                                         uint32_t kept, float (&acc)[T::LaneRows][T::Slices][4],
                                                         float (&top)[T::LaneRows], float (&sum)[T::LaneRows]) {
    constexpr int N = T::LaneCols;
    MT_DEVICE_UNROLL
    for (int m = 0; m < T::LaneRows; m++) {
        float now = s[m][0], before;
        MT_DEVICE_UNROLL
        for (int n = 1; n < N; n++) now = fmaxf(now, s[m][n]);
        MT_DEVICE_UNROLL
        for (int o = 4; o > 0; o >>= 1) now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, o));
        now = fmaxf(top[m], now);
        before = now == top[m] ? 1.0f : expf(top[m] - now);
        top[m] = now;
        sum[m] *= before;
        MT_DEVICE_UNROLL
        for (int n = 0; n < N; n++) {
            float e = s[m][n] == -INFINITY ? 0.0f : expf(s[m][n] - now);
            sum[m] += e;
            s[m][n] = kept >> (m * N + n) & 1 ? e * p.drop.scale : 0.0f;
        }
        MT_DEVICE_UNROLL
        for (int d = 0; d < T::Slices * 4; d++) acc[m][d / 4][d % 4] *= before;
    }
}

/* Writes out = acc / sum, and lse = the log of the sum of exponentials. For a row without keys, out = 0 and lse =
   -infinity. */
template <typename T>
static __device__ __forceinline__ void mti_plain_finish(const mti_plain &p, float (&acc)[T::LaneRows][T::Slices][4],
                                                        const float (&top)[T::LaneRows],
                                                        const float (&sum)[T::LaneRows], int64_t first, float *own) {
    int64_t head = blockIdx.y, row = first + mti_plain_r() * T::LaneRows;
    MT_DEVICE_UNROLL
    for (int m = 0; m < T::LaneRows; m++) {
        float total = sum[m], factor;
        MT_DEVICE_UNROLL
        for (int o = 4; o > 0; o >>= 1) total += __shfl_xor_sync(0xffffffffu, total, o);
        factor = total == 0.0f ? 0.0f : 1.0f / total;
        MT_DEVICE_UNROLL
        for (int d = 0; d < T::Slices * 4; d++) acc[m][d / 4][d % 4] *= factor;
        if (p.lse.data && mti_plain_c() == 0 && row + m < p.s.seq)
            mti_put(p.lse, head, blockIdx.z * p.s.seq + row + m, total == 0.0f ? -INFINITY : top[m] + logf(total));
    }
    mti_plain_store<T>(p, 1.0f, acc, p.out, p.s.seq, head * p.s.head_dim, first, own);
}

/* A block owns queries of a head, and a warp WarpRows of them. Shared memory has q [Rows, Pitch], a tile [Cols, Pitch]
   that is used for k and v in turn, the weights [Cols, WarpRows] of each warp, and the spans of the queries. The first
   two barriers of a step follow the copy of k and the last read of it, the other two do so for v. The last blocks of
   a causal mask have the most keys, so they come first. */
template <typename T>
static __global__ void __launch_bounds__(T::Threads, T::Blocks) mti_plain_forward_kernel(mti_plain p) {
    constexpr int M = T::LaneRows, N = T::LaneCols;
    MT_DYN_SHARED(float, shared);
    int warp = (int)threadIdx.x / 32;
    float *own = shared + warp * T::WarpRows * T::Pitch, *tile = shared + T::Rows * T::Pitch;
    float *weights = tile + T::Cols * T::Pitch + warp * T::WarpRows * T::Cols;
    mti_span *spans = (mti_span *)(tile + T::Cols * T::Pitch + T::Rows * T::Cols);
    int64_t b = blockIdx.z, head = blockIdx.y, first = ((int64_t)gridDim.x - 1 - blockIdx.x) * T::Rows, k_col;
    float s[M][N] = {}, unused[M][N] = {}, acc[M][T::Slices][4], top[M], sum[M];
    k_col = p.k_col(head);
    mti_plain_zero<T>(acc);
    MT_DEVICE_UNROLL
    for (int m = 0; m < M; m++) top[m] = -INFINITY, sum[m] = 0.0f;
    mti_plain_load_rows<T>(p, p.q, p.s.seq, p.q_col(head), first, shared);
    mti_span all = mti_plain_spans<T, false>(p, first, spans);
    first += warp * T::WarpRows;
    for (int64_t at = all.first / T::Cols * T::Cols; at < all.end; at += T::Cols) {
        int64_t row = first + mti_plain_r() * M, col = at + mti_plain_c() * N;
        uint32_t seen = mti_plain_seen<T>(spans + warp * T::WarpRows, col);
        int any = __any_sync(0xffffffffu, seen != 0);
        mti_plain_load_tile<T>(p, p.k, p.s.kv_seq, k_col, at, all, tile);
        __syncthreads();
        if (any) mti_plain_product<T>(p, s, own, tile);
        __syncthreads();
        mti_plain_load_tile<T>(p, p.v, p.s.kv_seq, k_col, at, all, tile);
        if (any) {
            mti_plain_scores<false, false, M, N>(p, s, unused, seen, b, head, row, col);
            mti_plain_softmax<T>(p, s, mti_plain_kept<false, M, N>(p, b, head, row, col), acc, top, sum);
            mti_plain_weigh<T>(s, weights);
        }
        __syncthreads();
        if (any) mti_plain_add<T>(acc, weights, tile);
        __syncthreads();
    }
    mti_plain_finish<T>(p, acc, top, sum, first, own);
}

/* Finds the sequence, head and row of a warp in a kernel without tiles. Returns 0 if the warp has no row. The grid is
   rows x heads x sequences. */
static __device__ __forceinline__ int mti_plain_row(int64_t rows, int64_t *b, int64_t *head, int64_t *i) {
    *b = blockIdx.z;
    *head = blockIdx.y;
    *i = (int64_t)blockIdx.x * MTI_PLAIN_WARPS + (threadIdx.x >> 5);
    return *i < rows;
}

/* Computes p.delta, for backward. A warp owns a query of a head, and a lane every 32nd element of it. */
static __global__ void __launch_bounds__(32 * MTI_PLAIN_WARPS) mti_plain_stats_kernel(mti_plain p) {
    int64_t b, head, i, row, lane = threadIdx.x & 31;
    float sum = 0.0f;
    if (!mti_plain_row(p.s.seq, &b, &head, &i)) return;
    row = b * p.s.seq + i;
    for (int64_t d = lane; d < p.s.head_dim; d += 32)
        sum += mti_get(p.dout, row, head * p.s.head_dim + d) * mti_get(p.out, row, head * p.s.head_dim + d);
    sum = mti_warp_sum(sum);
    if (lane == 0) mti_put<MT_F32>(p.delta, head, row, sum);
}

/* Loads lse or delta of the queries [i, i + COUNT), and zeros instead of queries that do not exist. */
template <int COUNT>
static __device__ __forceinline__ void mti_plain_stats(const mti_plain &p, const mti_view &v, int64_t b, int64_t head,
                                                       int64_t i, float (&x)[COUNT]) {
    MT_DEVICE_UNROLL
    for (int e = 0; e < COUNT; e++) x[e] = i + e < p.s.seq ? mti_get<MT_F32>(v, head, b * p.s.seq + i + e) : 0.0f;
}

/* From the products s of queries and keys, and g of dout and v: with p = e^(score - lse) and the factor D of dropout,
   s = D p, and g = p (D g - delta). The other arguments are those of mti_plain_scores. lse and delta are loaded where
   they are used: held for longer, they would be spilled. */
template <bool KEYS, bool CHAIN, int M, int N>
static __device__ __forceinline__ void mti_plain_pairs(const mti_plain &p, float (&s)[M][N], float (&g)[M][N],
                                                       uint32_t seen, int64_t b, int64_t head, int64_t row,
                                                       int64_t col) {
    uint32_t kept = mti_plain_kept<KEYS, M, N>(p, b, head, row, col);
    float lse[KEYS ? N : M], delta[KEYS ? N : M];
    mti_plain_stats(p, p.delta, b, head, KEYS ? col : row, delta);
    MT_DEVICE_UNROLL
    for (int e = 0; e < M * N; e++)
        g[e / N][e % N] = (kept >> e & 1 ? p.drop.scale * g[e / N][e % N] : 0.0f) - delta[KEYS ? e % N : e / N];
    mti_plain_scores<KEYS, CHAIN, M, N>(p, s, g, seen, b, head, row, col);
    mti_plain_stats(p, p.lse, b, head, KEYS ? col : row, lse);
    MT_DEVICE_UNROLL
    for (int e = 0; e < M * N; e++) {
        float score = s[e / N][e % N], prob = score == -INFINITY ? 0.0f : expf(score - lse[KEYS ? e % N : e / N]);
        g[e / N][e % N] *= prob;
        s[e / N][e % N] = kept >> e & 1 ? p.drop.scale * prob : 0.0f;
    }
}

/* As the forward kernel, with the rows q and dout [Rows, Pitch] of a block, and a tile for v and k in turn. */
template <typename T> static __global__ void __launch_bounds__(T::Threads, T::Blocks) mti_plain_dq_kernel(mti_plain p) {
    constexpr int M = T::LaneRows, N = T::LaneCols;
    MT_DYN_SHARED(float, shared);
    int warp = (int)threadIdx.x / 32;
    float *own = shared + warp * T::WarpRows * T::Pitch, *tile = shared + 2 * T::Rows * T::Pitch;
    float *weights = tile + T::Cols * T::Pitch + warp * T::WarpRows * T::Cols;
    mti_span *spans = (mti_span *)(tile + T::Cols * T::Pitch + T::Rows * T::Cols);
    int64_t b = blockIdx.z, head = blockIdx.y, first = ((int64_t)gridDim.x - 1 - blockIdx.x) * T::Rows, k_col, row;
    float s[M][N] = {}, g[M][N] = {}, acc[M][T::Slices][4];
    k_col = p.k_col(head);
    mti_plain_zero<T>(acc);
    mti_plain_load_rows<T>(p, p.q, p.s.seq, p.q_col(head), first, shared);
    mti_plain_load_rows<T>(p, p.dout, p.s.seq, head * p.s.head_dim, first, shared + T::Rows * T::Pitch);
    mti_span all = mti_plain_spans<T, false>(p, first, spans);
    first += warp * T::WarpRows;
    row = first + mti_plain_r() * M;
    for (int64_t at = all.first / T::Cols * T::Cols; at < all.end; at += T::Cols) {
        int64_t col = at + mti_plain_c() * N;
        uint32_t seen = mti_plain_seen<T>(spans + warp * T::WarpRows, col);
        int any = __any_sync(0xffffffffu, seen != 0);
        mti_plain_load_tile<T>(p, p.v, p.s.kv_seq, k_col, at, all, tile);
        __syncthreads();
        if (any) mti_plain_product<T>(p, g, own + T::Rows * T::Pitch, tile);
        __syncthreads();
        mti_plain_load_tile<T>(p, p.k, p.s.kv_seq, k_col, at, all, tile);
        __syncthreads();
        if (any) {
            mti_plain_product<T>(p, s, own, tile);
            mti_plain_pairs<false, true, M, N>(p, s, g, seen, b, head, row, col);
            mti_plain_weigh<T>(g, weights);
            mti_plain_add<T>(acc, weights, tile);
        }
        __syncthreads();
    }
    mti_plain_store<T>(p, p.scale, acc, p.dq, p.s.seq, p.q_col(head), first, own);
}

/* A block owns keys of a group, and a warp WarpRows of them. Shared memory has k and v [Rows, Pitch], a tile of q and a
   tile of dout, the weights [Cols, WarpRows] of each warp, first for dv and then for dk, and the spans of the keys. The
   block goes over the queries of all heads of the group in order. It counts heads and tiles in 32 bits. With 64,
   registers would be spilled. */
template <typename T>
static __global__ void __launch_bounds__(T::Threads, T::Blocks) mti_plain_dkv_kernel(mti_plain p) {
    constexpr int M = T::LaneRows, N = T::LaneCols;
    MT_DYN_SHARED(float, shared);
    int warp = (int)threadIdx.x / 32;
    float *k = shared + warp * T::WarpRows * T::Pitch, *v = k + T::Rows * T::Pitch;
    float *q = shared + 2 * T::Rows * T::Pitch, *dout = q + T::Cols * T::Pitch;
    float *weights = dout + T::Cols * T::Pitch + warp * T::WarpRows * T::Cols;
    mti_span *spans = (mti_span *)(dout + T::Cols * T::Pitch + T::Rows * T::Cols);
    int64_t b = blockIdx.z, first = (int64_t)blockIdx.x * T::Rows, k_col = blockIdx.y * p.kv_step;
    float s[M][N], g[M][N], dk[M][T::Slices][4], dv[M][T::Slices][4];
    mti_plain_zero<T>(dk);
    mti_plain_zero<T>(dv);
    mti_plain_load_rows<T>(p, p.k, p.s.kv_seq, k_col, first, shared);
    mti_plain_load_rows<T>(p, p.v, p.s.kv_seq, k_col, first, shared + T::Rows * T::Pitch);
    mti_span all = mti_plain_spans<T, true>(p, first, spans);
    first += warp * T::WarpRows;
    for (int head = (int)(blockIdx.y * p.s.heads_per_group), end = head + (int)p.s.heads_per_group; head < end; head++)
        for (int tile = (int)(all.first / T::Cols); (int64_t)tile * T::Cols < all.end; tile++) {
            int64_t at = (int64_t)tile * T::Cols, row = first + mti_plain_r() * M, col = at + mti_plain_c() * N;
            uint32_t seen = mti_plain_seen<T>(spans + warp * T::WarpRows, col);
            mti_plain_load_tile<T>(p, p.q, p.s.seq, p.q_col(head), at, all, q);
            mti_plain_load_tile<T>(p, p.dout, p.s.seq, head * p.s.head_dim, at, all, dout);
            __syncthreads();
            if (__any_sync(0xffffffffu, seen != 0)) {
                mti_plain_product<T>(p, s, k, q);
                mti_plain_product<T>(p, g, v, dout);
                mti_plain_pairs<true, true, M, N>(p, s, g, seen, b, head, row, col);
                mti_plain_weigh<T>(s, weights);
                mti_plain_add<T>(dv, weights, dout);
                mti_plain_weigh<T>(g, weights);
                mti_plain_add<T>(dk, weights, q);
            }
            __syncthreads();
        }
    mti_plain_store<T>(p, p.scale, dk, p.dk, p.s.kv_seq, k_col, first, k);
    mti_plain_store<T>(p, 1.0f, dv, p.dv, p.s.kv_seq, k_col, first, v);
}

/* A warp owns a row of the bias, without shared memory or a barrier, and a lane every 32nd element of it. The lane adds
   the gradients of the scores of all sequences and heads that share the element, in their order. The grid is queries x
   heads of this call x bias.batch. If heads share the bias, it has one of them, which stands for all. */
static __global__ void __launch_bounds__(32 * MTI_PLAIN_WARPS, 4) mti_plain_dbias_kernel(mti_plain p) {
    int64_t first_b, first_head, i, lane = threadIdx.x & 31, heads = p.s.groups * p.s.heads_per_group;
    float s[1][1], g[1][1];
    if (!mti_plain_row(p.s.seq, &first_b, &first_head, &i)) return;
    int64_t row = mti_bias_row(&p.s, first_b, first_head, i);
    int64_t end_b = p.s.bias.batch > 1 ? first_b + 1 : p.s.batch,
            end_head = p.s.bias.heads > 1 ? first_head + 1 : heads;
    for (int64_t j = lane; j < p.s.kv_seq; j += 32) {
        float sum = 0.0f;
        for (int64_t b = first_b; b < end_b; b++) {
            mti_span keys = p.keys(b, i);
            for (int64_t head = first_head; j >= keys.first && j < keys.end && head < end_head; head++) {
                int64_t query = b * p.s.seq + i, key = b * p.s.kv_seq + j, k = p.k_col(head);
                s[0][0] = p.dot(p.q, query, p.q_col(head), p.k, key, k);
                g[0][0] = p.dot(p.dout, query, head * p.s.head_dim, p.v, key, k);
                mti_plain_pairs<false, false, 1, 1>(p, s, g, 1, b, head, i, j);
                sum += g[0][0];
            }
        }
        int64_t col = p.s.part.first_key + j;
        mti_put(p.dbias, row, col, mti_get(p.dbias, row, col) + sum);
    }
}

/* Returns the number of elements from a to b, two views of one tensor or of two. */
static int64_t mti_elements_between(mt_tensor a, mt_tensor b) {
    return ((intptr_t)b.data - (intptr_t)a.data) / (intptr_t)mt_dtype_size(a.dtype);
}

/* Whether each head of a view begins at a whole vector, for all views that the tiles are loaded from. */
static int mti_plain_is_wide(const mti_attention *a) {
    return mti_is_wide(a->q) && mti_is_wide(a->k) && mti_is_wide(a->v) && mti_is_wide(a->dout) &&
           a->desc.head_dim % MTI_VECTOR == 0 && a->q_step % MTI_VECTOR == 0 && a->kv_step % MTI_VECTOR == 0;
}

static mti_plain mti_plain_of(const mti_attention *a) {
    mti_plain p;
    memset(&p, 0, sizeof p);
    p.s = a->desc;
    p.q = mti_view_of(a->q);
    p.k = mti_view_of(a->k);
    p.v = mti_view_of(a->v);
    p.out = mti_view_of(a->out);
    p.lse = mti_view_of(a->lse);
    p.dout = mti_view_of(a->dout);
    p.dq = mti_view_of(a->dq);
    p.dk = mti_view_of(a->dk);
    p.dv = mti_view_of(a->dv);
    p.bias = mti_view_of(a->desc.bias.value);
    p.dbias = mti_view_of(a->desc.bias.grad);
    p.q_step = a->q_step;
    p.kv_step = a->kv_step;
    p.value = mti_elements_between(a->k, a->v);
    p.dvalue = mti_elements_between(a->dk, a->dv);
    p.scale = a->desc.scores.scale;
    p.drop = mti_drop_of(a->desc.dropout);
    p.wide = mti_plain_is_wide(a);
    return p;
}

static dim3 mti_plain_grid(int64_t rows, int64_t heads, int64_t batch) {
    return dim3((unsigned)((rows + MTI_PLAIN_WARPS - 1) / MTI_PLAIN_WARPS), (unsigned)heads, (unsigned)batch);
}

} /* extern "C++" */
#endif
