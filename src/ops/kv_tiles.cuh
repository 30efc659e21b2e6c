/* ---- attention with a key/value cache, on tensor cores ----------------------------------------------------------- */

#if MT_HAS_CUDA
extern "C++" {

/* Attention to a cache, for bf16 and f16 on sm_80 and later, with few new tokens. As in mti_kv_attention_kernel, the
   queries of all heads of a group at all new tokens of a sequence are rows, and a block owns a tile of rows of a group
   and one split of the keys. Here a tile has 16 rows, the first operand of mma.sync, so that up to 16 queries cost as
   many instructions as one. Rows that are not there are zeros.

   The warps of a block share its queries. Of every Step keys, each warp owns 16, and keeps its own maxima, sums and
   results, as in mti_flash_forward_kernel. A warp has a ring of MTI_KV_SLOTS tiles [16, HeadDim] in shared memory. It
   uses them in turn for k0 v0 k1 v1 ...: one is in use while cp.async loads the next ones. Only the lanes of the warp
   wait for each other:
   1. k has arrived, and all lanes have read the previous v. Its slot gets the next k.
   2. The warp computes its scores and their online softmax.
   3. v has arrived, and all lanes have read k. Its slot gets the next v.
   4. The warp adds the product with v to its results.
   Behind the loop, the results of the warps meet in the memory of the rings. Splits and their merging are those of
   mti_kv_attention_kernel. So are the rules for bits: keys 16 i to 16 i + 15 always belong to the same warp, and
   rows of a tile do not change each other.

   HeadDim is 64, 128 or 256. Smaller heads have zeros behind their features, which are not read from memory.

   What limits it on an H200: a multiprocessor reads 16 bytes in a cycle when all of them together read as fast as a
   copy. 512 bytes of keys or values take 32 cycles. They need one ldmatrix (4 cycles of shared memory), one cp.async (4
   cycles) and two mma (3 cycles), and 26 of the 126 instructions that a multiprocessor can issue (42 with the beginning
   and the end of a block of 256 keys; 128 features, sm_90). So memory limits it if enough loads are under way, 29 KiB
   for each multiprocessor at 0.9 us. Three blocks with 128 features have 96 KiB. A block begins with loads that depend
   on each other, of lengths, then of queries and keys, and ends with the merging of its warps. While it does so, the
   others load. */
#define MTI_KV_ROWS 16
#define MTI_KV_SLOTS 3

/* The warps of a block. The tiles of four warps with 256 features would be too large for sm_86, sm_89 and sm_120. */
template <int HeadDim> static MT_HOST_DEVICE constexpr int mti_kv_tile_warps() { return HeadDim == 256 ? 2 : 4; }

/* The blocks that run on a multiprocessor of sm_90. */
template <int HeadDim> static MT_HOST_DEVICE constexpr int mti_kv_tile_blocks() { return HeadDim == 64 ? 5 : 3; }

/* What a warp leaves for the others. With 8 more columns, its lanes write to all banks. */
template <int HeadDim> using mti_kv_tile_part = mti_split_part<MTI_KV_ROWS, HeadDim + 8>;

/* The dynamic shared memory of a block: the tile of queries, and the rings of the warps. */
template <int HeadDim> static constexpr size_t mti_kv_tile_bytes() {
    return (size_t)2 * HeadDim * MTI_KV_ROWS * (1 + MTI_KV_SLOTS * mti_kv_tile_warps<HeadDim>());
}
static_assert(sizeof(mti_kv_tile_part<64>) * 4 <= mti_kv_tile_bytes<64>() &&
                  sizeof(mti_kv_tile_part<128>) * 4 <= mti_kv_tile_bytes<128>() &&
                  sizeof(mti_kv_tile_part<256>) * 2 <= mti_kv_tile_bytes<256>() && mti_kv_tile_bytes<256>() <= 99 << 10,
              "shared memory");

/* The threads of a block start copying its queries to a tile. */
template <int HeadDim>
static __device__ __forceinline__ void mti_kv_tile_fetch_queries(const mti_kv_gpu &k, const mti_split_block &m,
                                                                 uint16_t *tile) {
    constexpr int Across = HeadDim / 8, Threads = 32 * mti_kv_tile_warps<HeadDim>();
    int64_t h = k.s.heads_per_group;
    MT_DEVICE_UNROLL
    for (int item = 0; item < MTI_KV_ROWS * Across; item += Threads) {
        int r = (item + (int)threadIdx.x) / Across, vector = (int)threadIdx.x % Across;
        int64_t i = mt_divide(m.row + r, h), head = m.group * h + m.row + r - i * h;
        bool is = i < k.s.seq && vector * 8 < k.s.head_dim;
        const uint16_t *from = (const uint16_t *)k.qkv.data;
        if (is) from += (m.b * k.s.seq + i) * k.qkv.ld + k.query_col(head) + vector * 8;
        mti_cp_async16(tile + mti_tile_at<HeadDim>(r, vector), from, is ? 16 : 0);
    }
}

/* The lanes of a warp start copying the keys or values from `key` on to a slot, and commit the copies as one group.
   Those from `end` on become 0. row is that of position 0. */
template <int HeadDim>
static __device__ __forceinline__ void mti_kv_tile_fetch(uint16_t *slot, const mti_view &v, int64_t row, int dim,
                                                         int key, int end) {
    int lane = (int)threadIdx.x & 31, vector = lane % 8, left = end - key - lane / 8;
    const uint16_t *from = (const uint16_t *)v.data + (row + key + lane / 8) * dim + vector * 8;
    MT_DEVICE_UNROLL
    for (int r = 0; r < MTI_KV_ROWS && key < end; r += 4) {
        MT_DEVICE_UNROLL
        for (int c = 0; c < HeadDim / 8; c += 8)
            mti_cp_async16(slot + mti_tile_at<HeadDim>(r + lane / 8, c + vector), from + r * dim + c * 8,
                           r < left && (c + vector) * 8 < dim ? 16 : 0);
    }
    mti_cp_async_commit();
}

/* What a lane knows of its two rows, lane / 4 and the one 8 below it. */
struct mti_kv_tile_rows {
    int end[2];
    float slope[2];
};

/* Writes the spans of the rows of a tile, as mti_flash_find_spans does. Rows that are not there get the span of the
   last row. */
static __device__ __forceinline__ void mti_kv_tile_find_spans(const mti_kv_gpu &k, const mti_split_block &m,
                                                              mti_flash_span *spans) {
    int64_t h = k.s.heads_per_group, row = min(m.row + (int)threadIdx.x, k.s.seq * h - 1);
    if (threadIdx.x >= MTI_KV_ROWS) return;
    int end = k.tokens.end(m.b, mt_divide(row, h));
    spans[threadIdx.x].first = end > 0 ? k.tokens.first(end) : INT_MAX;
    spans[threadIdx.x].end = end;
}

static __device__ __forceinline__ mti_kv_tile_rows mti_kv_tile_rows_of(const mti_kv_gpu &k, const mti_split_block &m,
                                                                       const mti_flash_span *spans) {
    int64_t h = k.s.heads_per_group;
    mti_kv_tile_rows rows;
    MT_DEVICE_UNROLL
    for (int j = 0; j < 2; j++) {
        int r = ((int)threadIdx.x & 31) / 4 + j * 8;
        int64_t i = mt_divide(m.row + r, h);
        rows.end[j] = spans[r].end;
        rows.slope[j] =
            k.s.scores.alibi_slopes && i < k.s.seq ? k.s.scores.alibi_slopes[m.group * h + m.row + r - i * h] : 0.0f;
    }
    return rows;
}

/* Turns the products of queries and of 16 keys from `key` on into scores. */
static __device__ __forceinline__ void mti_kv_tile_scores(const mti_kv_gpu &k, const mti_kv_tile_rows &rows, int key,
                                                          float (&s)[1][2][4]) {
    float cap = k.s.scores.softcap;
    int first = key + (int)threadIdx.x % 4 * 2;
    MT_DEVICE_UNROLL
    for (int i = 0; i < 8; i++) s[0][i / 4][i % 4] *= k.s.scores.scale;
    if (cap > 0.0f) {
        MT_DEVICE_UNROLL
        for (int i = 0; i < 8; i++) s[0][i / 4][i % 4] = cap * tanhf(s[0][i / 4][i % 4] / cap);
    }
    if (k.s.scores.alibi_slopes) {
        MT_DEVICE_UNROLL
        for (int i = 0; i < 8; i++) {
            int j = i % 4 / 2, at = first + i / 4 * 8 + i % 2;
            s[0][i / 4][i % 4] -= rows.slope[j] * (float)(rows.end[j] - 1 - at);
        }
    }
}

/* Writes the results of a warp for the other warps: those of the rows that are there. */
template <int HeadDim>
static __device__ __forceinline__ void mti_kv_tile_leave(const mti_kv_gpu &k, const mti_split_block &m,
                                                         const float (&acc)[1][HeadDim / 8][4],
                                                         const float (&top)[1][2], const float (&sum)[1][2],
                                                         mti_kv_tile_part<HeadDim> *part) {
    int lane = (int)threadIdx.x & 31;
    MT_DEVICE_UNROLL
    for (int j = 0; j < 2; j++) {
        int row = lane / 4 + j * 8;
        float total = mti_quad_sum(sum[0][j]);
        if (m.row + row >= k.s.seq * k.s.heads_per_group) continue;
        MT_DEVICE_UNROLL
        for (int n = 0; n < HeadDim / 8; n++)
            *(float2 *)(part->acc[row] + n * 8 + lane % 4 * 2) = make_float2(acc[0][n][j * 2], acc[0][n][j * 2 + 1]);
        if (lane % 4 == 0) part->stats[row] = make_float2(top[0][j], total);
    }
}

/* The grid is that of mti_kv_attention_kernel. The first barrier separates writing the queries and spans from reading
   them, the second one reading the rings from writing the results of the warps, and the third one that from reading
   them. */
template <int TYPE, int HeadDim>
static __device__ __forceinline__ void mti_kv_tile_attention(const mti_kv_gpu &k, uint16_t *q, mti_flash_span *spans) {
    constexpr bool BF16 = TYPE == MT_BF16;
    constexpr int Warps = mti_kv_tile_warps<HeadDim>(), Tile = MTI_KV_ROWS * HeadDim, Step = Warps * 16,
                  Held = HeadDim == 256 ? 12 : HeadDim / 16;
    int warp = (int)threadIdx.x / 32, dim = (int)k.s.head_dim;
    uint16_t *slots = q + (1 + warp * MTI_KV_SLOTS) * Tile;
    int now = 0; /* k is at slots + now, v in the next slot */
    float s[1][2][4], acc[1][HeadDim / 8][4], top[1][2] = {{-INFINITY, -INFINITY}}, sum[1][2] = {};
    uint32_t x[HeadDim / 16][1][4], p[1][1][4];
    mti_split_block m = mti_split_find_block<MTI_KV_ROWS>(k);
    if (k.splits > 1 && m.begin >= m.end) return;
    int64_t row = k.row(m.b, m.group);
    int key = m.begin / Step * Step + warp * 16;
    mti_tile_zero(acc);
    mti_kv_tile_fetch_queries<HeadDim>(k, m, q);
    mti_kv_tile_fetch<HeadDim>(slots, k.keys, row, dim, key, m.end);
    mti_kv_tile_fetch<HeadDim>(slots + Tile, k.values, row, dim, key, m.end);
    mti_kv_tile_find_spans(k, m, spans);
    mti_cp_async_wait<1>();
    __syncthreads();
    mti_kv_tile_rows rows = mti_kv_tile_rows_of(k, m, spans);
    mti_tile_hold<HeadDim, Held>(x, q);
    for (; key < m.end; key += Step) {
        int next = now < Tile ? now + 2 * Tile : now - Tile;
        mti_cp_async_wait<1>();
        __syncwarp(); /* k has arrived, and all lanes have read the previous v */
        mti_kv_tile_fetch<HeadDim>(slots + next, k.keys, row, dim, key + Step, m.end);
        mti_tile_scores<HeadDim, BF16, Held>(s, x, q, slots + now);
        mti_kv_tile_scores(k, rows, key, s);
        mti_flash_mask_spans(s, spans, key);
        mti_flash_softmax<true>(MTI_LOG2E, s, acc, top, sum);
        mti_tile_round<BF16>(p, s);
        mti_cp_async_wait<1>();
        __syncwarp(); /* v has arrived, and all lanes have read k */
        mti_kv_tile_fetch<HeadDim>(slots + now, k.values, row, dim, key + Step, m.end);
        mti_tile_add_product<HeadDim, BF16>(acc, p, slots + (now < 2 * Tile ? now + Tile : 0));
        now = next;
    }
    mti_cp_async_wait<0>();
    __syncthreads();
    mti_kv_tile_part<HeadDim> *parts = (mti_kv_tile_part<HeadDim> *)q;
    mti_kv_tile_leave<HeadDim>(k, m, acc, top, sum, parts + warp);
    __syncthreads();
    mti_split_finish<TYPE, HeadDim / MTI_VECTOR, Warps>(k, m, 1, parts);
}

template <int TYPE, int HeadDim>
static __global__ void __launch_bounds__(32 * mti_kv_tile_warps<HeadDim>(), mti_kv_tile_blocks<HeadDim>())
    mti_kv_tile_kernel(mti_kv_gpu k) {
    MT_DYN_SHARED(uint16_t, q);
    MT_SHARED(mti_flash_span, spans, MTI_KV_ROWS);
    if (MTI_HAS_SM80) mti_kv_tile_attention<TYPE, HeadDim>(k, q, spans);
}

} /* extern "C++" */
#endif
