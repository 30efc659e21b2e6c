/* ---- attention on a GPU: kernels for tensor cores ---------------------------------------------------------------- */

#pragma once
#include "tile.cuh"
#include "attention_plain.cuh"

#if MT_HAS_CUDA
extern "C++" {

/* The tokens of a key/value cache, see mt_kv_cache_attention. A GPU does not check lengths: these functions limit them,
   so that every position that they return is in the cache. A token that finds no room counts as padding. */
struct mti_cached {
    const int32_t *lengths, *added; /* of the cache and of the desc; added is optional */
    int64_t seq, whole, begin;      /* a call has seq of `whole` new tokens of a sequence, those from begin on */
    int64_t max_seq, window;

    __device__ int64_t held(int64_t b) const { return min(max((int64_t)lengths[b], (int64_t)0), max_seq); }
    __device__ int64_t all(int64_t b) const { /* new tokens */
        return min(added ? min(max((int64_t)added[b], (int64_t)0), whole) : whole, max_seq - held(b));
    }
    __device__ int64_t before(int64_t b) const { return held(b) + min(all(b), begin); } /* tokens before the call's */
    __device__ int64_t tokens(int64_t b) const { return min(max(all(b) - begin, (int64_t)0), seq); } /* the call's */
    /* token i sees the keys [first, end): none if it is padding */
    __device__ int end(int64_t b, int64_t i) const { return i < tokens(b) ? (int)(before(b) + i + 1) : 0; }
    __device__ int first(int end) const { return window > 0 ? max(end - (int)window, 0) : 0; }
};

/* The tensor-core path on a GPU: FlashAttention-2 (arXiv 2307.08691) for bf16 and f16 on sm_80 and later. Its three
   kernels have the same form. A block keeps a tile of its own rows in shared memory. It goes over the tiles of the
   other operand. cp.async loads the next tiles while the tensor cores work on the current ones. A warp owns 16 or 32
   rows, and accumulates their results in registers. ldmatrix loads the next fragment while the tensor cores work on the
   current one. Warps exchange no data, and sums are added in the order of the tiles.

     kernel    rows      goes over
     forward   queries   keys                    s = q k^T, online softmax, out += p v
     dq        queries   keys                    s = q k^T, dp = dout v^T, ds = p (dp - delta), dq += ds k
     dkv       keys      queries of all heads    s^T = k q^T, dp^T = v dout^T, dv += p^T dout, dk += ds^T q
                         of the group

   Exponentials are powers of 2, so the factor `scale` of the scores includes 1 / ln 2. A block skips the tiles that the
   mask hides from all of its rows. A warp skips those that the mask hides from all rows of the warp. Only tiles on an
   edge of the mask are masked element by element.

   HeadDim of a kernel is a multiple of 32, and the features of a head may be fewer: a multiple of 8. Tiles have zeros
   in the columns behind them, which add nothing to a product, and of the results only the features are stored.

   The kernels with SPANS = true also have a window, packed documents, a soft cap, ALiBi, and a kv_seq that is not seq.
   Their blocks begin by computing the span [first, end) of each of their rows, the keys that a query sees or the
   queries that see a key, and keep the spans in shared memory. A block goes over the tiles from the first one that any
   of its rows sees to the last one. In each step a warp votes whether any of its rows sees any column of the tile,
   otherwise it skips the tile, and whether all of its rows see all columns, otherwise it masks the tile. So the work is
   proportional to the window, or to the sizes of the documents. The kernels with SPANS = false have only a causal mask
   and lengths, which need no memory. */
#define MTI_FLASH_ROWS 128 /* rows of a block, but see mti_flash_back_rows */
#define MTI_LOG2E 1.4426950408889634f

/* The blocks of a launch start in the order of a grid (heads of a section, blocks of rows, sections): a GPU counts x up
   first, then y, then z. A section has `width` heads of one sequence, and `sections` sections are a sequence. Within a
   section, the y-th blocks of rows of all its heads start before the next ones of any head. The blocks of queries are
   counted from the last one, those of keys from the first one: under a causal mask the blocks with the most work start
   first, and no long block is left for the end. */
struct mti_flash_place {
    unsigned head, sequence;
};
static MT_HOST_DEVICE mti_flash_place mti_flash_place_of(unsigned x, unsigned z, unsigned width, unsigned sections) {
    mti_flash_place place = {z % sections * width + x, z / sections};
    return place;
}

/* Returns the heads of a section: as many of `heads` as divide them and together read at most MTI_FLASH_SECTION bytes
   in their loops, each of them `bytes`. Otherwise the blocks of a head that run at the same time would not find in the
   L2 cache what they read one after the other. A section has at least one head, and all heads if there would be more
   sections than a grid may have. */
#define MTI_FLASH_SECTION ((int64_t)32 << 20)
#define MTI_FLASH_GRID 65535
static int64_t mti_flash_section(int64_t heads, int64_t batch, int64_t bytes) {
    int64_t width = mt_max(1, mt_min(heads, MTI_FLASH_SECTION / mt_max(bytes, 1)));
    while (heads % width != 0) width--;
    return heads / width * batch > MTI_FLASH_GRID ? heads : width;
}

/* Returns x, a number that all lanes of the warp have in common. The compiler does not know that a shuffle returns the
   same number, so it computes what follows from it again, and keeps no registers for that. Kernels that would spill use
   it behind their loop, or in a branch of the loop. */
static __device__ __forceinline__ int mti_flash_again(int x) { return __shfl_sync(0xffffffffu, x, 0); }

struct mti_flash {
    mti_plain p;
    float scale; /* p.scale / ln 2 */
    /* Backward only, both [batch, heads, pitch]. lse: lse / ln 2, which is infinite for a row without keys. delta:
       rowsum(dout * out). */
    float *lse, *delta;
    int64_t pitch;     /* seq, rounded up to whole blocks */
    float cap;         /* with a soft cap c: p.scale / c, and scale is c / ln 2; see mti_flash_cap. 0: none */
    float alibi;       /* with ALiBi: -1 / p.scale; 0: none */
    unsigned sections; /* of a sequence, see mti_flash_place */
    /* The forward kernel with CACHED only, where p.k and p.v are those of mt_kv_cache. */
    mti_cached cached;

    /* the sequence of this block, and its query head or, in dkv, its group */
    __device__ mti_flash_place place(unsigned z) const {
        return mti_flash_place_of(blockIdx.x, z, gridDim.x, sections);
    }
    __device__ mti_flash_place place() const { return place(blockIdx.z); }
    __device__ mti_flash_place place_again() const { return place((unsigned)mti_flash_again((int)blockIdx.z)); }
    __device__ int dim() const { return (int)p.s.head_dim; } /* at most HeadDim of the kernel, which pads the rest */
    __device__ int causal() const { return p.s.scores.mask == MT_MASK_CAUSAL; }
    /* Whether a query sees a key. A tile is hidden if its last query does not see its first key. Nothing in a tile is
       masked if its first query sees its last key. */
    __device__ bool sees(int query, int key, int length) const { return key < length && (!causal() || key <= query); }
    /* the keys that the queries [first, first + MTI_FLASH_ROWS) see together */
    __device__ int keys(int64_t b, int first) const {
        int length = p.length(b);
        return causal() ? min(length, first + MTI_FLASH_ROWS) : length;
    }
    __device__ const uint16_t *in(const mti_view &v, int64_t b, int64_t col) const {
        return (const uint16_t *)v.data + b * p.s.seq * v.ld + col;
    }
    __device__ const uint16_t *keys_in(int64_t b, int64_t col) const {
        return (const uint16_t *)p.k.data + b * p.s.kv_seq * p.k.ld + col;
    }
    __device__ uint16_t *out(const mti_view &v, int64_t b, int64_t row, int64_t col) const {
        return (uint16_t *)v.data + (b * p.s.seq + row) * v.ld + col;
    }
    __device__ uint16_t *keys_out(int64_t b, int64_t row, int64_t col) const {
        return (uint16_t *)p.dk.data + (b * p.s.kv_seq + row) * p.dk.ld + col;
    }
    __device__ const uint16_t *cached_keys(int64_t b, int64_t head) const {
        return (const uint16_t *)p.k.data +
               (b * p.s.groups + head / p.s.heads_per_group) * cached.max_seq * p.s.head_dim;
    }
    __device__ mti_span cached_span(int64_t b, int64_t i) const {
        mti_span all = {0, cached.end(b, i)};
        all.first = cached.first((int)all.end);
        return all;
    }
    /* the position of query 0 of a sequence among its keys */
    __device__ int position(int64_t b) const {
        return (int)(cached.lengths ? cached.before(b) : mti_key_of_query(&p.s));
    }
    __device__ int64_t stat(int64_t b, int64_t head) const {
        return (b * p.s.groups * p.s.heads_per_group + head) * pitch;
    }
    /* the element number of a probability */
    __device__ uint64_t element(int64_t b, int64_t head, int query, int key) const {
        return p.element(b, head, query, key);
    }
};

/* These two functions set masked scores to -infinity: mask_rows in scores [RowTiles * 16 queries, N8 * 8 keys],
   mask_columns in scores [16 keys, N8 * 8 queries]. query and key are the first ones of the warp. The limits are
   relative to them, because the compiler would otherwise keep the limits of all rows in registers. */
template <int RowTiles, int N8>
static __device__ __forceinline__ void mti_flash_mask_rows(const mti_flash &f, float (&s)[RowTiles][N8][4], int length,
                                                           int query, int key) {
    int lane = (int)threadIdx.x & 31, left = length - key - lane % 4 * 2,
        diagonal = query - key + lane / 4 - lane % 4 * 2;
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * N8 * 4; i++) {
        int r = i % (RowTiles * 2), j = i / (RowTiles * 2), k = j / 2 * 8 + j % 2, end = left;
        if (RowTiles == 1 && f.causal()) end = min(left, diagonal + r * 8 + 1); /* two limits, in registers */
        if (k >= end || (RowTiles > 1 && f.causal() && k > diagonal + r * 8))
            s[r / 2][j / 2][r % 2 * 2 + j % 2] = -INFINITY;
    }
}

template <int RowTiles, int N8>
static __device__ __forceinline__ void mti_flash_mask_columns(const mti_flash &f, float (&s)[RowTiles][N8][4],
                                                              int length, int key, int query) {
    int lane = (int)threadIdx.x & 31, left = length - key - lane / 4, diagonal = key - query + lane / 4 - lane % 4 * 2;
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * N8 * 4; i++) {
        int r = i % (RowTiles * 2), j = i / (RowTiles * 2), q = j / 2 * 8 + j % 2;
        if (r * 8 >= left || (f.causal() && q < diagonal + r * 8)) s[r / 2][j / 2][r % 2 * 2 + j % 2] = -INFINITY;
    }
}

/* The numbers [first, end) of the keys that a query sees, or of the queries that see a key. An empty span is [INT_MAX,
   0), which changes neither the smallest first number nor the largest end of several spans. */
struct alignas(8) mti_flash_span {
    int first, end;
};

/* Writes the spans of the rows of a block: KEYS for queries, otherwise for keys. Rows behind the end of the sequence
   get the span of its last row, so that they do not make every tile one that must be masked. They are not stored. */
template <bool KEYS, int Rows, bool CACHED>
static __device__ __forceinline__ void mti_flash_find_spans(const mti_flash &f, mti_flash_span *spans, int first) {
    int64_t row = min((int64_t)first + threadIdx.x, (KEYS ? f.p.s.seq : f.p.s.kv_seq) - 1), b = f.place().sequence;
    if (threadIdx.x >= Rows) return;
    mti_span all = CACHED ? f.cached_span(b, row) : KEYS ? f.p.keys(b, row) : f.p.queries(b, row);
    bool none = all.end <= all.first;
    spans[threadIdx.x].first = none ? INT_MAX : (int)all.first;
    spans[threadIdx.x].end = none ? 0 : (int)all.end;
}

/* Returns the columns that the rows of a block see together, from the beginning of a tile of Step columns on. */
template <int Step, int Rows>
static __device__ __forceinline__ mti_flash_span mti_flash_block_span(const mti_flash_span *spans) {
    mti_flash_span all = {INT_MAX, 0};
    for (int r = (int)threadIdx.x & 31; r < Rows; r += 32)
        all.first = min(all.first, spans[r].first), all.end = max(all.end, spans[r].end);
    MT_DEVICE_UNROLL
    for (int o = 16; o > 0; o >>= 1) {
        all.first = min(all.first, __shfl_xor_sync(0xffffffffu, all.first, o));
        all.end = max(all.end, __shfl_xor_sync(0xffffffffu, all.end, o));
    }
    all.first = all.end > 0 ? all.first / Step * Step : 0;
    return all;
}

/* Finds the spans of the rows of a block, and the columns of all of them as in mti_flash_block_span. The barrier
   separates writing the spans from reading them. */
template <bool KEYS, int Step, int Rows, bool CACHED = false>
static __device__ __forceinline__ void mti_flash_begin_spans(const mti_flash &f, mti_flash_span *spans, int first,
                                                             int *begin, int *end) {
    mti_flash_find_spans<KEYS, Rows, CACHED>(f, spans, first);
    __syncthreads();
    mti_flash_span all = mti_flash_block_span<Step, Rows>(spans);
    *begin = all.first;
    *end = all.end;
}

/* Whether any of Rows rows sees any of the columns [at, at + count), and whether each row sees them all. The rows are
   those of the warp, or of more warps. Each lane looks at every 32nd row. */
template <int Rows>
static __device__ __forceinline__ bool mti_flash_meets(const mti_flash_span *spans, int at, int count) {
    bool meets = false;
    MT_DEVICE_UNROLL
    for (int r = 0; r < Rows; r += 32) {
        mti_flash_span of = spans[r + (int)(threadIdx.x & (Rows < 32 ? Rows - 1 : 31))];
        meets |= of.first < at + count && of.end > at;
    }
    return __any_sync(0xffffffffu, meets);
}
template <int Rows>
static __device__ __forceinline__ bool mti_flash_covers(const mti_flash_span *spans, int at, int count) {
    mti_flash_span of = spans[threadIdx.x & (Rows - 1)];
    return __all_sync(0xffffffffu, of.first <= at && of.end >= at + count);
}

/* s = tanh(cap s). A capped score is c tanh(x / c), where x is p.scale s: with cap = p.scale / c it is c tanh(cap s).
   The factor c is a part of f.scale, which the online softmax applies. It may take the maximum of a row before that,
   because c is positive and tanh rises. With x = cap s:
   |x| < 0.5:  x + x^3 P(x^2). P is fitted like q in mti_exp, with a relative error of 1.5e-8.
   |x| >= 0.5: 1 - 2 / (1 + e^2x), which is -1 or 1 for large |x|.
   The relative error is at most 6e-7, also for small x, so a cap that is far above all scores hardly changes them. An
   element takes 14 instructions. The single instruction tanh.approx is not exact enough, because its relative error is
   2^-11: near a cap of 50 this changes an exponential by 2 %, while bf16 rounds it by at most 0.4 %. */
template <int RowTiles, int N8>
static __device__ __forceinline__ void mti_flash_cap(float cap, float (&s)[RowTiles][N8][4]) {
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * N8 * 4; i++) {
        float *element = &s[i / 4 / N8][i / 4 % N8][i % 4], x = *element * cap, z = x * x;
        float large = 1.0f - 2.0f * mti_reciprocal(1.0f + mti_ex2(x * (2 * MTI_LOG2E)));
        float p = 1.72569938e-2f * z - 5.30529507e-2f;
        p = p * z + 1.33259878e-1f;
        p = p * z - 3.33331496e-1f;
        *element = fabsf(x) < 0.5f ? x + x * (z * p) : large;
    }
}

/* The derivative of the soft cap, 1 - t^2 with t = tanh(cap s). For a masked score, t is -infinity and the result 0. */
static __device__ __forceinline__ float mti_flash_cap_slope(float t) { return fmaxf(1.0f - t * t, 0.0f); }

/* Sets the scores of the rows of a warp outside their spans to -infinity. The scores begin at column `at`. A lane has
   RowTiles * 2 rows. The limits are relative to its first column, as above. */
template <int RowTiles, int N8>
static __device__ __forceinline__ void mti_flash_mask_spans(float (&s)[RowTiles][N8][4], const mti_flash_span *spans,
                                                            int at) {
    int lane = (int)threadIdx.x & 31;
    if (mti_flash_covers<RowTiles * 16>(spans, at, N8 * 8)) return;
    MT_DEVICE_UNROLL
    for (int r = 0; r < RowTiles * 2; r++) {
        mti_flash_span of = spans[r * 8 + lane / 4];
        int first = of.first - at - lane % 4 * 2, end = of.end - at - lane % 4 * 2;
        MT_DEVICE_UNROLL
        for (int j = 0; j < N8 * 2; j++) {
            int k = j / 2 * 8 + j % 2;
            if (k < first || k >= end) s[r / 2][j / 2][r % 2 * 2 + j % 2] = -INFINITY;
        }
    }
}

/* Adds ALiBi to the scores of a tile, in units of f.scale. `apart` is the position of the first row of the warp, minus
   that of the first column. The distance of two tokens is the same, whether queries or keys are in rows. */
template <int RowTiles, int N8>
static __device__ __forceinline__ void mti_flash_add_alibi(const mti_flash &f, float (&s)[RowTiles][N8][4],
                                                           int64_t head, int apart) {
    int lane = (int)threadIdx.x & 31;
    float slope = f.alibi * f.p.s.scores.alibi_slopes[head], from = (float)(apart + lane / 4 - lane % 4 * 2);
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * N8 * 4; i++) {
        int r = i % (RowTiles * 2), j = i / (RowTiles * 2);
        float *element = &s[r / 2][j / 2][r % 2 * 2 + j % 2];
        *element = fmaf(slope, fabsf(from + (float)(r * 8 - j / 2 * 8 - j % 2)), *element);
    }
}

template <int RowTiles, int N8>
static __device__ __forceinline__ void mti_flash_cap_and_mask(const mti_flash &f, float (&s)[RowTiles][N8][4],
                                                              const mti_flash_span *spans, int at) {
    if (f.cap != 0.0f) mti_flash_cap(f.cap, s);
    mti_flash_mask_spans(s, spans, at);
}

/* The dropout mask of a tile [RowTiles * 16 queries, N8 * 8 keys] has one word for every 16 queries. With h = N8 / 2,
   bit n % h * 8 + n / h * 4 + e of word m is 1 if element e of acc[m][n] is kept. The four lanes of a row also share
   the row 8 below it. Each of these lanes computes the mask of one half of one of the two rows, and shuffles distribute
   the masks. */
template <int N8, int RowTiles>
static __device__ __forceinline__ void mti_flash_kept_rows(const mti_flash &f, int64_t head, int row, int key,
                                                           uint32_t (&kept)[RowTiles]) {
    int lane = (int)threadIdx.x & 31;
    MT_DEVICE_UNROLL
    for (int m = 0; m < RowTiles; m++) {
        uint64_t e =
            f.element(f.place().sequence, head, row + m * 16 + lane / 4 + lane % 2 * 8, key + lane / 2 % 2 * N8 * 4);
        uint32_t half = 0;
        MT_DEVICE_NO_UNROLL
        for (int k = 0; k < N8 * 4; k += 4) half |= mti_kept(f.p.drop, e + (uint64_t)k) << k;
        kept[m] = 0;
        MT_DEVICE_UNROLL
        for (int i = 0; i < 4; i++) { /* row i % 2, half i / 2 */
            uint32_t bits = __shfl_sync(0xffffffffu, half, (lane & ~3) + i) >> (lane % 4 * 2);
            kept[m] |= (bits & 0x03030303u) << (i / 2 * 4 + i % 2 * 2);
        }
    }
}

/* Sets the dropped elements of such a tile to 0, before or after it is rounded. */
template <int RowTiles, int N8>
static __device__ __forceinline__ void mti_flash_drop(float (&p)[RowTiles][N8][4], const uint32_t (&kept)[RowTiles]) {
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * N8 * 4; i++) {
        int m = i / 4 / N8, n = i / 4 % N8, e = i % 4;
        if (!(kept[m] >> (n % (N8 / 2) * 8 + n / (N8 / 2) * 4 + e) & 1)) p[m][n][e] = 0.0f;
    }
}

template <int RowTiles, int K16>
static __device__ __forceinline__ void mti_flash_drop(uint32_t (&p)[K16][RowTiles][4],
                                                      const uint32_t (&kept)[RowTiles]) {
    MT_DEVICE_UNROLL
    for (int i = 0; i < K16 * RowTiles * 4; i++) {
        int m = i / 4 % RowTiles, e = i % 4, n = i / 4 / RowTiles * 2 + e / 2;
        uint32_t pair = kept[m] >> (n % K16 * 8 + n / K16 * 4 + e % 2 * 2);
        p[n / 2][m][e] &= ((pair & 1) ? 0xffffu : 0) | ((pair & 2) ? 0xffff0000u : 0);
    }
}

/* Returns the dropout mask of a tile [RowTiles * 16 keys, N8 * 8 queries]. Bit (m * N8 + n) * 4 + e is 1 if element e
   of acc[m][n] is kept. A lane computes the bits of four keys for every eighth query, and shuffles distribute them. */
template <int RowTiles, int N8>
static __device__ __forceinline__ uint32_t mti_flash_kept_columns(const mti_flash &f, int64_t head, int key,
                                                                  int query) {
    static_assert(RowTiles * N8 <= 8, "one word");
    int lane = (int)threadIdx.x & 31;
    uint32_t kept = 0;
    MT_DEVICE_UNROLL
    for (int m = 0; m < RowTiles; m++) {
        uint64_t e = f.element(f.place().sequence, head, query + lane % 8, key + m * 16 + lane / 8 * 4);
        uint32_t mine = 0;
        MT_DEVICE_NO_UNROLL
        for (int n = 0; n < N8; n++) mine |= mti_kept(f.p.drop, e + (uint64_t)(n * 8 * f.p.s.part.kv_seq)) << (n * 4);
        MT_DEVICE_UNROLL
        for (int i = 0; i < 4; i++) {
            int from = (lane / 16 + i / 2 * 2) * 8 + lane % 4 * 2 + i % 2;
            uint32_t bits = __shfl_sync(0xffffffffu, mine, from) >> (lane / 4 % 4) & 0x11111111u;
            kept |= bits << (m * N8 * 4 + i);
        }
    }
    return kept;
}

/* mti_quad_sum and mti_quad_max return the sum and the maximum over the four lanes of a row. */
static __device__ __forceinline__ float mti_quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

static __device__ __forceinline__ float mti_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/* Raises top, the reference of a row, to the largest score of the row so far, if that is larger by more than a factor
   of 2^8 of the exponentials. So a probability before the division by the sum is at most 2^8, which f16 can hold, and
   most tiles raise no row. acc and sum are rescaled to the new reference. A row that is not raised has the factor 1,
   which changes no bit: whether the warp skips the rescaling depends on other rows, but the result of a row does not.
   The new top is finite, because in the first tile every row has a visible key. With SPANS that may be a later tile:
   top stays -infinity until then, and the row is not raised. */
template <bool SPANS, int RowTiles, int N8, int D8>
static __device__ __forceinline__ void mti_flash_raise(float scale, const float (&s)[RowTiles][N8][4],
                                                       float (&acc)[RowTiles][D8][4], float (&top)[RowTiles][2],
                                                       float (&sum)[RowTiles][2]) {
    float factor[RowTiles][2];
    int raised = 0;
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * 2; i++) {
        int m = i / 2, h = i % 2 * 2;
        float now = s[m][0][h];
        MT_DEVICE_UNROLL
        for (int n = 0; n < N8; n++) now = fmaxf(now, fmaxf(s[m][n][h], s[m][n][h + 1]));
        now = mti_quad_max(now);
        if (!((now - top[m][i % 2]) * scale > 8.0f)) now = top[m][i % 2];
        factor[m][i % 2] = SPANS && now == top[m][i % 2] ? 1.0f : mti_ex2((top[m][i % 2] - now) * scale);
        raised |= now != top[m][i % 2];
        top[m][i % 2] = now;
    }
    if (!__any_sync(0xffffffffu, raised)) return;
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * 2; i++) {
        int m = i / 2, h = i % 2 * 2;
        MT_DEVICE_UNROLL
        for (int d = 0; d < D8; d++) acc[m][d][h] *= factor[m][i % 2], acc[m][d][h + 1] *= factor[m][i % 2];
        sum[m][i % 2] *= factor[m][i % 2];
    }
}

/* Online softmax: s = exp(scale * (s - top)). sum has only the elements of this lane, and mti_flash_finish adds the
   four lanes of a row. With SPANS a row may have seen no key yet: all its s are -infinity and become 0. */
template <bool SPANS, int RowTiles, int N8, int D8>
static __device__ __forceinline__ void mti_flash_softmax(float scale, float (&s)[RowTiles][N8][4],
                                                         float (&acc)[RowTiles][D8][4], float (&top)[RowTiles][2],
                                                         float (&sum)[RowTiles][2]) {
    mti_flash_raise<SPANS>(scale, s, acc, top, sum);
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * 2; i++) {
        int m = i / 2, h = i % 2 * 2;
        float base = SPANS && top[m][i % 2] == -INFINITY ? 0.0f : top[m][i % 2] * scale, total = 0.0f;
        MT_DEVICE_UNROLL
        for (int n = 0; n < N8; n++) {
            s[m][n][h] = mti_ex2(s[m][n][h] * scale - base);
            s[m][n][h + 1] = mti_ex2(s[m][n][h + 1] * scale - base);
            total += s[m][n][h] + s[m][n][h + 1];
        }
        sum[m][i % 2] += total;
    }
}

/* Writes out = acc / sum and lse = the log of the sum of exponentials, for the rows of the warp from `row` on. For a
   row without keys, out = 0 and lse = -infinity. */
template <int HeadDim, bool BF16, int RowTiles>
static __device__ __forceinline__ void mti_flash_finish(const mti_flash &f, float (&acc)[RowTiles][HeadDim / 8][4],
                                                        const float (&top)[RowTiles][2],
                                                        const float (&sum)[RowTiles][2], int row, uint16_t *tile) {
    mti_flash_place place = f.place_again();
    int64_t b = place.sequence, head = place.head;
    int lane = (int)threadIdx.x & 31;
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * 2; i++) {
        int m = i / 2, h = i % 2 * 2, r = row + m * 16 + i % 2 * 8 + lane / 4;
        float total = mti_quad_sum(sum[m][i % 2]), factor = total == 0.0f ? 0.0f : f.p.drop.scale / total;
        MT_DEVICE_UNROLL
        for (int d = 0; d < HeadDim / 8; d++) acc[m][d][h] *= factor, acc[m][d][h + 1] *= factor;
        if (f.p.lse.data && lane % 4 == 0 && r < f.p.s.seq)
            mti_put(f.p.lse, head, b * f.p.s.seq + r,
                    total == 0.0f ? -INFINITY : (top[m][i % 2] * f.scale + log2f(total)) / MTI_LOG2E);
    }
    mti_tile_store<HeadDim, BF16>(acc, tile, f.out(f.p.out, b, row, head * f.p.s.head_dim), f.p.out.ld, f.dim(),
                                  (int)f.p.s.seq - row);
}

/* mti_flash_held, mti_flash_dq_held and mti_flash_dkv_held are the numbers of fragments of its own rows that a warp
   holds in registers: as many as fit beside the scores and the results without spilling, on every architecture. */
template <int HeadDim, bool DROP, bool SPANS> static MT_HOST_DEVICE constexpr int mti_flash_held() {
    return HeadDim == 256 ? 15 : HeadDim == 192 ? 12 : HeadDim == 64 ? 4 : HeadDim == 96 ? (DROP && SPANS ? 1 : 3) : 0;
}

/* Sizes of the forward kernel: the keys of a tile. A warp owns mti_flash_rows * 16 queries, also in dq. */
template <int HeadDim> static MT_HOST_DEVICE constexpr int mti_flash_keys() {
    return HeadDim == 256 ? 16 : HeadDim == 192 ? 32 : 64;
}
template <int HeadDim> static MT_HOST_DEVICE constexpr int mti_flash_rows() { return HeadDim > 128 ? 1 : 2; }
template <int HeadDim> static MT_HOST_DEVICE constexpr int mti_flash_threads() {
    return MTI_FLASH_ROWS / mti_flash_rows<HeadDim>() * 2;
}

/* Whether this call drops probabilities. Kernels with DROP = false never do. With SPANS, and for HeadDim > 128, kernels
   without a cache have DROP = true and ask, so that nvcc has fewer of them to compile. */
template <int HeadDim, bool SPANS> static MT_HOST_DEVICE constexpr bool mti_flash_asks() {
    return SPANS || HeadDim > 128;
}
template <int HeadDim, bool DROP, bool SPANS>
static __device__ __forceinline__ bool mti_flash_drops(const mti_flash &f) {
    return DROP && (!mti_flash_asks<HeadDim, SPANS>() || f.p.drop.on);
}

/* A block owns 128 queries of a head, and each of its four warps owns 32 of them. Shared memory has q [128, HeadDim]
   and three tiles [Step, HeadDim]. The tiles are used in turn for k0 v0 k1 v1 ...: one is in use while the next two are
   in flight.

   1. First barrier of a step: k has arrived (and q in the first step), and all warps have read the previous v. The tile
      of the previous v then gets the next k.
   2. Each warp computes its scores and their online softmax.
   3. Second barrier: v has arrived, and all warps have read k. The tile of k then gets the next v.
   4. Each warp adds the product with v to its output.

   After the barrier that follows the loop, all copies have arrived, and each warp may overwrite its rows of q with its
   output.

   With CACHED (and SPANS), k and v are those of a key/value cache, and the spans those of its new tokens.

   head size                      64    96   128
   mma per ldmatrix in the loop   4.0   3.6  3.2   (96 with SPANS: fewer)
   registers (sm_90)              226   255  255   (with SPANS: 242, 250, 255)
   blocks of an SM, sm_80, sm_90  2     2    2     and with the 100 KiB of sm_86, sm_89, sm_120: 2, 1, 1

   A warp owns 16 queries of 192 or 256 features, and a block has eight warps. Two products take a fragment of k or v
   instead of four, so mma per ldmatrix is 2. Registers (sm_90): 242, 255. A multiprocessor runs one block. */
template <int HeadDim, bool BF16, bool DROP, bool SPANS, bool CACHED = false>
static __global__ void __launch_bounds__(mti_flash_threads<HeadDim>(), mti_flash_rows<HeadDim>())
    mti_flash_forward_kernel(mti_flash f) {
    constexpr int Step = mti_flash_keys<HeadDim>(), Tile = Step * HeadDim,
                  Held = mti_flash_held<HeadDim, DROP, SPANS>(), RowTiles = mti_flash_rows<HeadDim>(),
                  Threads = mti_flash_threads<HeadDim>();
    MT_DYN_SHARED(uint16_t, q);
    int64_t b = f.place().sequence, head = f.place().head, ld = CACHED ? f.p.s.head_dim : f.p.k.ld;
    int first = ((int)gridDim.y - 1 - (int)blockIdx.y) * MTI_FLASH_ROWS; /* blocks with the most keys start first */
    int warp = (int)threadIdx.x / 32 * RowTiles * 16, row = first + warp;
    int begin = 0, keys = SPANS ? 0 : f.keys(b, first);
    const uint16_t *k = CACHED ? f.cached_keys(b, head) : f.keys_in(b, f.p.k_col(head));
    uint16_t *own = q + warp * HeadDim, *tiles = q + MTI_FLASH_ROWS * HeadDim;
    mti_flash_span *spans = (mti_flash_span *)(tiles + 3 * Tile), *own_spans = spans + warp;
    int now = 0; /* k is at tiles + now, v in the next of the three tiles */
    float s[RowTiles][Step / 8][4], acc[RowTiles][HeadDim / 8][4], top[RowTiles][2], sum[RowTiles][2] = {};
    uint32_t x[HeadDim / 16][RowTiles][4], p[Step / 16][RowTiles][4] = {}, kept[RowTiles];
    for (int i = 0; i < RowTiles * 2; i++) top[i / 2][i % 2] = -INFINITY;
    mti_tile_zero(acc);
    mti_tile_fetch<MTI_FLASH_ROWS, HeadDim, Threads>(q, f.in(f.p.q, b, f.p.q_col(head)), f.p.q.ld, f.dim(), first,
                                                     (int)f.p.s.seq);
    if (SPANS) mti_flash_begin_spans<true, Step, MTI_FLASH_ROWS, CACHED>(f, spans, first, &begin, &keys);
    mti_tile_fetch<Step, HeadDim, Threads>(tiles, k, ld, f.dim(), begin, keys);
    mti_cp_async_commit();
    mti_tile_fetch<Step, HeadDim, Threads>(tiles + Tile, k + f.p.value, ld, f.dim(), begin, keys);
    mti_cp_async_commit();
    mti_cp_async_wait<1>();
    __syncthreads(); /* q has arrived */
    mti_tile_hold<HeadDim, Held>(x, own);
    for (int key = begin; key < keys; key += Step) {
        bool seen =
            SPANS ? mti_flash_meets<RowTiles * 16>(own_spans, key, Step) : f.sees(row + RowTiles * 16 - 1, key, keys);
        uint16_t *k_tile = tiles + now, *v_tile = tiles + (now < 2 * Tile ? now + Tile : 0);
        int free_tile = now < Tile ? now + 2 * Tile : now - Tile;
        int dim = SPANS && HeadDim == 128 ? mti_flash_again(f.dim()) : f.dim();
        mti_cp_async_wait<1>();
        __syncthreads(); /* k has arrived, and all warps have read the previous v */
        if (key + Step < keys) mti_tile_fetch<Step, HeadDim, Threads>(tiles + free_tile, k, ld, dim, key + Step, keys);
        mti_cp_async_commit();
        if (seen) {
            mti_tile_scores<HeadDim, BF16, Held>(s, x, own, k_tile);
            if (SPANS && f.alibi != 0.0f) {
                mti_flash_place place = f.place_again();
                mti_flash_add_alibi(f, s, place.head, f.position(place.sequence) + first + mti_flash_again(warp) - key);
            }
            if (SPANS) mti_flash_cap_and_mask(f, s, own_spans, key);
            else if (!f.sees(row, key + Step - 1, keys)) mti_flash_mask_rows(f, s, keys, row, key);
            mti_flash_softmax<SPANS>(f.scale, s, acc, top, sum);
            mti_tile_round<BF16>(p, s);
            if (mti_flash_drops<HeadDim, DROP, SPANS>(f)) {
                mti_flash_kept_rows<Step / 8>(f, head, SPANS ? first + mti_flash_again(warp) : row, key, kept);
                mti_flash_drop(p, kept);
            }
        }
        mti_cp_async_wait<1>();
        __syncthreads(); /* v has arrived, and all warps have read k */
        if (key + Step < keys) mti_tile_fetch<Step, HeadDim, Threads>(k_tile, k + f.p.value, ld, dim, key + Step, keys);
        mti_cp_async_commit();
        if (seen) mti_tile_add_product<HeadDim, BF16>(acc, p, v_tile);
        now = free_tile;
    }
    mti_cp_async_wait<0>();
    __syncthreads();
    row = first + mti_flash_again(warp);
    mti_flash_finish<HeadDim, BF16>(f, acc, top, sum, row, own);
}

/* Computes f.lse and f.delta of each query, for backward. A block owns 64 queries of a head. Four lanes own a query.
   Each of them sums every fourth vector, and shuffles add the four sums. The kernel uses no shared memory and no
   barrier. In bf16 on sm_90, with heads of 128 features: 12 instructions for an element of out and dout, which moves 4
   bytes (budget: 27). */
static __global__ void __launch_bounds__(256) mti_flash_stats_kernel(mti_flash f) {
    int64_t b = blockIdx.z, head = blockIdx.y, i = (int64_t)blockIdx.x * 64 + threadIdx.x / 4, row = b * f.p.s.seq + i;
    int64_t d = f.p.s.head_dim, lane = threadIdx.x % 4;
    float x[MTI_VECTOR], y[MTI_VECTOR], sum = 0.0f, lse = -INFINITY;
    for (int64_t c = lane * MTI_VECTOR; i < f.p.s.seq && c < d; c += 4 * MTI_VECTOR) {
        mti_load<true>(f.p.out, row, head * d + c, MTI_VECTOR, x);
        mti_load<true>(f.p.dout, row, head * d + c, MTI_VECTOR, y);
        for (int j = 0; j < MTI_VECTOR; j++) sum += x[j] * y[j];
    }
    sum = mti_quad_sum(sum);
    if (lane > 0) return;
    if (i < f.p.s.seq) lse = mti_get(f.p.lse, head, row);
    f.lse[f.stat(b, head) + i] = lse == -INFINITY ? INFINITY : lse * MTI_LOG2E;
    f.delta[f.stat(b, head) + i] = sum;
}

/* Sizes of the dq kernel, and the rows of a block of the dq and dkv kernels. */
template <int HeadDim> static MT_HOST_DEVICE constexpr int mti_flash_dq_keys() { return HeadDim == 256 ? 16 : 32; }
template <int HeadDim> static MT_HOST_DEVICE constexpr int mti_flash_back_rows() {
    return HeadDim > 128 ? MTI_FLASH_ROWS / 2 : MTI_FLASH_ROWS;
}
template <int HeadDim, bool DROP, bool SPANS> static MT_HOST_DEVICE constexpr int mti_flash_dq_held() {
    return HeadDim == 256 ? 5 : HeadDim == 192 ? 8 : HeadDim == 64 ? 3 : HeadDim == 96 && !DROP && !SPANS ? 1 : 0;
}

/* Starts copying a pair of tiles, k and v, and commits the copies as one group. */
template <int HeadDim, int Step>
static __device__ __forceinline__ void mti_flash_fetch_keys(uint16_t *pair, const uint16_t *k, const uint16_t *v,
                                                            int64_t ld, int dim, int key, int length) {
    mti_tile_fetch<Step, HeadDim, 128>(pair, k, ld, dim, key, length);
    mti_tile_fetch<Step, HeadDim, 128>(pair + Step * HeadDim, v, ld, dim, key, length);
    mti_cp_async_commit();
}

/* s = the gradient of the scores, p (D dp - delta), times the derivative of a soft cap. For a dropped element dp is 0
   already. The factor of the dropout D for the other elements, drop.scale, is applied here. lse and delta belong to the
   rows of the warp. They are read from shared memory in each step, because registers for them would be spilled. */
template <bool CAPPED, int RowTiles, int N8>
static __device__ __forceinline__ void mti_flash_score_grads(const mti_flash &f, float (&s)[RowTiles][N8][4],
                                                             const float (&dp)[RowTiles][N8][4], const float *lse,
                                                             const float *delta) {
    int lane = (int)threadIdx.x & 31;
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * N8 * 4; i++) {
        int m = i / 4 / N8, n = i / 4 % N8, e = i % 4, r = m * 16 + e / 2 * 8 + lane / 4;
        float slope = CAPPED ? mti_flash_cap_slope(s[m][n][e]) : 1.0f;
        s[m][n][e] = mti_ex2(s[m][n][e] * f.scale - lse[r]) * (dp[m][n][e] * f.p.drop.scale - delta[r]);
        if (CAPPED) s[m][n][e] *= slope;
    }
}

/* A block owns 128 queries of a head, and each of its four warps owns 32 of them. Shared memory has q and dout [128,
   HeadDim], two pairs of tiles (k, v) [Step, HeadDim], and lse and delta of the queries. One pair is in use while the
   other is in flight. After the barrier of a step, the pair has arrived, and all warps have read the other pair, which
   the next copy overwrites. After the barrier that follows the loop, the warps may overwrite their rows of q with dq.

   head size                      64    96    128
   mma per ldmatrix in the loop   3.4   2.6   2.4   (96 with dropout or SPANS: 2.4)
   registers (sm_90)              248   246   253   (with SPANS: 243, 242, 254)
   blocks of an SM, sm_90         2     2     2     sm_80: 2, 2, 1; sm_86, sm_89, sm_120: 2, 1, 1, with SPANS 1, 1, 1

   With 192 or 256 features a block owns 64 queries, and each of its warps owns 16 of them. mma per ldmatrix: 1.8, 1.4.
   Blocks of an SM: 2 on sm_90, 1 on the others. */
template <int HeadDim, bool BF16, bool DROP, bool SPANS>
static __global__ void __launch_bounds__(128, 2) mti_flash_dq_kernel(mti_flash f) {
    constexpr int Step = mti_flash_dq_keys<HeadDim>(), Held = mti_flash_dq_held<HeadDim, DROP, SPANS>(),
                  Rows = mti_flash_back_rows<HeadDim>(), RowTiles = mti_flash_rows<HeadDim>();
    MT_DYN_SHARED(uint16_t, q);
    int64_t b = f.place().sequence, head = f.place().head, ld = f.p.k.ld, seq = f.p.s.seq;
    int first = ((int)gridDim.y - 1 - (int)blockIdx.y) * Rows;
    int warp = (int)threadIdx.x / 32 * RowTiles * 16, row = first + warp, i = (int)threadIdx.x;
    int begin = 0, keys = SPANS ? 0 : f.keys(b, first);
    const uint16_t *k = f.keys_in(b, f.p.k_col(head));
    uint16_t *dout = q + Rows * HeadDim, *pairs = dout + Rows * HeadDim;
    float *lse = (float *)(pairs + 4 * Step * HeadDim), *delta = lse + Rows;
    mti_flash_span *spans = (mti_flash_span *)(delta + Rows);
    int now = 0; /* the pair in use is at pairs + now, the other one at pairs + 2 * Step * HeadDim - now */
    float s[RowTiles][Step / 8][4], dp[RowTiles][Step / 8][4], dq[RowTiles][HeadDim / 8][4];
    uint32_t x[HeadDim / 16][RowTiles][4], y[HeadDim / 16][RowTiles][4], ds[Step / 16][RowTiles][4], kept[RowTiles];
    mti_tile_zero(dq);
    mti_tile_fetch<Rows, HeadDim, 128>(q, f.in(f.p.q, b, f.p.q_col(head)), f.p.q.ld, f.dim(), first, (int)seq);
    mti_tile_fetch<Rows, HeadDim, 128>(dout, f.in(f.p.dout, b, head * f.p.s.head_dim), f.p.dout.ld, f.dim(), first,
                                       (int)seq);
    if (i < Rows / 2) /* 16 bytes of lse or delta */
        mti_cp_async16(lse + i * 4, (i < Rows / 4 ? f.lse : f.delta) + f.stat(b, head) + first + i % (Rows / 4) * 4,
                       16);
    if (SPANS) mti_flash_begin_spans<true, Step, Rows>(f, spans, first, &begin, &keys);
    mti_flash_fetch_keys<HeadDim, Step>(pairs, k, k + f.p.value, ld, f.dim(), begin, keys);
    mti_cp_async_wait<0>();
    __syncthreads(); /* q and dout have arrived */
    mti_tile_hold<HeadDim, Held>(x, q + warp * HeadDim);
    mti_tile_hold<HeadDim, Held>(y, dout + warp * HeadDim);
    for (int key = begin; key < keys; key += Step) {
        mti_cp_async_wait<0>();
        __syncthreads(); /* the pair has arrived, and all warps have read the other one */
        if (key + Step < keys)
            mti_flash_fetch_keys<HeadDim, Step>(pairs + 2 * Step * HeadDim - now, k, k + f.p.value, ld, f.dim(),
                                                key + Step, keys);
        if (SPANS ? mti_flash_meets<RowTiles * 16>(spans + (DROP ? warp : mti_flash_again(warp)), key, Step)
                  : f.sees(row + RowTiles * 16 - 1, key, keys)) {
            mti_tile_scores<HeadDim, BF16, Held>(dp, y, dout + warp * HeadDim, pairs + now + Step * HeadDim);
            if (mti_flash_drops<HeadDim, DROP, SPANS>(f)) {
                mti_flash_kept_rows<Step / 8>(f, head, SPANS ? first + mti_flash_again(warp) : row, key, kept);
                mti_flash_drop(dp, kept);
            }
            mti_tile_scores<HeadDim, BF16, Held>(s, x, q + warp * HeadDim, pairs + now);
            if (SPANS && f.alibi != 0.0f)
                mti_flash_add_alibi(f, s, head, f.position(b) + first + mti_flash_again(warp) - key);
            if (SPANS) mti_flash_cap_and_mask(f, s, spans + (DROP ? warp : mti_flash_again(warp)), key);
            else if (!f.sees(row, key + Step - 1, keys)) mti_flash_mask_rows(f, s, keys, row, key);
            if (SPANS && f.cap != 0.0f) mti_flash_score_grads<true>(f, s, dp, lse + warp, delta + warp);
            else mti_flash_score_grads<false>(f, s, dp, lse + warp, delta + warp);
            mti_tile_round<BF16>(ds, s);
            mti_tile_add_product<HeadDim, BF16>(dq, ds, pairs + now);
        }
        now = 2 * Step * HeadDim - now;
    }
    mti_cp_async_wait<0>();
    __syncthreads();
    mti_flash_place place = f.place_again();
    if (SPANS) row = first + mti_flash_again(warp);
    mti_tile_scale(dq, f.p.scale);
    mti_tile_store<HeadDim, BF16>(dq, q + warp * HeadDim, f.out(f.p.dq, place.sequence, row, f.p.q_col(place.head)),
                                  f.p.dq.ld, f.dim(), (int)seq - row);
}

/* Sizes of the dkv kernel. queries: of a tile; part: the queries whose scores a warp computes at a time; rows: a warp
   owns rows * 16 keys; split: of two warps that own the same keys, one computes dk and the other dv. */
template <int HeadDim> static MT_HOST_DEVICE constexpr int mti_flash_dkv_queries() {
    return HeadDim == 256 ? 16 : HeadDim == 96 ? 64 : 32;
}
template <int HeadDim> static MT_HOST_DEVICE constexpr int mti_flash_dkv_part() {
    return HeadDim == 64 || HeadDim == 256 ? 16 : 32;
}
template <int HeadDim> static MT_HOST_DEVICE constexpr int mti_flash_dkv_rows() { return HeadDim == 64 ? 2 : 1; }
template <int HeadDim> static MT_HOST_DEVICE constexpr bool mti_flash_dkv_split() { return HeadDim > 128; }
template <int HeadDim> static MT_HOST_DEVICE constexpr int mti_flash_dkv_threads() {
    return MTI_FLASH_ROWS / mti_flash_dkv_rows<HeadDim>() * 2;
}
template <int HeadDim, bool DROP> static MT_HOST_DEVICE constexpr int mti_flash_dkv_held() {
    return HeadDim == 256 ? 4 : HeadDim == 192 ? 8 : HeadDim == 64 ? (DROP ? 1 : 2) : HeadDim == 128 ? 3 : 6;
}

/* The size of a set: the tiles of q and dout, and lse and delta of their rows. */
template <int HeadDim> static MT_HOST_DEVICE constexpr int mti_flash_set() { /* in 16-bit elements */
    return mti_flash_dkv_queries<HeadDim>() * (2 * HeadDim + 4);
}

/* Starts copying a set, and commits the copies as one group. */
template <int HeadDim>
static __device__ __forceinline__ void mti_flash_fetch_queries(const mti_flash &f, uint16_t *set, int64_t head,
                                                               int query) {
    constexpr int Step = mti_flash_dkv_queries<HeadDim>(), Threads = mti_flash_dkv_threads<HeadDim>();
    int64_t b = f.place().sequence;
    int seq = (int)f.p.s.seq, i = (int)threadIdx.x;
    mti_tile_fetch<Step, HeadDim, Threads>(set, f.in(f.p.q, b, f.p.q_col(head)), f.p.q.ld, f.dim(), query, seq);
    mti_tile_fetch<Step, HeadDim, Threads>(set + Step * HeadDim, f.in(f.p.dout, b, head * f.p.s.head_dim), f.p.dout.ld,
                                           f.dim(), query, seq);
    if (i < Step / 2) {
        const float *stats = (i < Step / 4 ? f.lse : f.delta) + f.stat(b, head) + query;
        mti_cp_async16((float *)(set + 2 * Step * HeadDim) + i * 4, stats + i % (Step / 4) * 4, 16);
    }
    mti_cp_async_commit();
}

/* s = D p for dv, and dp = the gradient of the scores for dk, both transposed, with the derivative of a soft cap. lse
   and delta point to the columns of this lane. drop.scale is applied to dv later. */
template <bool DROP, bool CAPPED, int RowTiles, int N8>
static __device__ __forceinline__ void mti_flash_pairs(const mti_flash &f, float (&s)[RowTiles][N8][4],
                                                       float (&dp)[RowTiles][N8][4], const float *lse,
                                                       const float *delta, uint32_t kept) {
    MT_DEVICE_UNROLL
    for (int i = 0; i < RowTiles * N8 * 4; i++) {
        int m = i / 4 % RowTiles, n = i / 4 / RowTiles, e = i % 4;
        float p = mti_ex2(s[m][n][e] * f.scale - lse[n * 8 + e % 2]);
        float slope = CAPPED ? mti_flash_cap_slope(s[m][n][e]) : 1.0f;
        int stays = !DROP || kept >> ((m * N8 + n) * 4 + e) & 1;
        dp[m][n][e] = p * ((stays ? dp[m][n][e] * f.p.drop.scale : 0.0f) - delta[n * 8 + e % 2]);
        if (CAPPED) dp[m][n][e] *= slope;
        s[m][n][e] = stays ? p : 0.0f;
    }
}

/* The keys and values of a warp in the dkv kernel: their rows and spans in shared memory, the fragments of them that
   the warp holds, and the results. */
template <int HeadDim> struct mti_flash_own {
    static constexpr int RowTiles = mti_flash_dkv_rows<HeadDim>();
    const uint16_t *k, *v;
    const mti_flash_span *spans;
    uint32_t held_k[HeadDim / 16][RowTiles][4], held_v[HeadDim / 16][RowTiles][4];
    float sums[mti_flash_dkv_split<HeadDim>() ? 1 : 2][RowTiles][HeadDim / 8][4]; /* dk, dv */
    bool values;                                                                  /* split: sums[0] is dv */
};

/* Adds what part of a set gives to dk and dv of the keys of a warp. q, dout, lse and delta belong to the part, whose
   first query is `query`. The first key is `row`. */
template <int HeadDim, bool BF16, bool DROP, bool SPANS>
static __device__ __forceinline__ void mti_flash_dkv_add(const mti_flash &f, mti_flash_own<HeadDim> &own,
                                                         const uint16_t *q, const uint16_t *dout, const float *lse,
                                                         const float *delta, int head, int row, int query, int length) {
    constexpr bool Split = mti_flash_dkv_split<HeadDim>();
    constexpr int Last = Split ? 0 : 1;
    constexpr int Part = mti_flash_dkv_part<HeadDim>(), RowTiles = mti_flash_own<HeadDim>::RowTiles,
                  Held = mti_flash_dkv_held<HeadDim, DROP>();
    float s[RowTiles][Part / 8][4], dp[RowTiles][Part / 8][4];
    uint32_t p[Part / 16][RowTiles][4], ds[Part / 16][RowTiles][4];
    uint32_t kept = mti_flash_drops<HeadDim, DROP, SPANS>(f)
                        ? mti_flash_kept_columns<RowTiles, Part / 8>(f, head, row, query)
                        : ~0u;
    mti_tile_scores<HeadDim, BF16, Held>(s, own.held_k, own.k, q);
    if (Split && own.values) mti_tile_zero(dp);
    else mti_tile_scores<HeadDim, BF16, Held>(dp, own.held_v, own.v, dout);
    if (SPANS && f.alibi != 0.0f) mti_flash_add_alibi(f, s, mti_flash_again(head), row - query - f.position(0));
    if (SPANS) mti_flash_cap_and_mask(f, s, own.spans, query);
    else if (!f.sees(query, row + RowTiles * 16 - 1, length)) mti_flash_mask_columns(f, s, length, row, query);
    if (SPANS && f.cap != 0.0f) mti_flash_pairs<DROP, true>(f, s, dp, lse, delta, kept);
    else mti_flash_pairs<DROP, false>(f, s, dp, lse, delta, kept);
    if (!Split || own.values) mti_tile_round<BF16>(p, s);
    if (!Split) mti_tile_add_product<HeadDim, BF16>(own.sums[Last], p, dout);
    if (!Split || !own.values) mti_tile_round<BF16>(Split ? p : ds, dp);
    mti_tile_add_product<HeadDim, BF16>(own.sums[0], Split ? p : ds, Split && own.values ? dout : q);
}

/* A block owns 128 keys of a group, and each of its warps owns 16 or 32 of them. Shared memory has k and v [128,
   HeadDim], and two sets of mti_flash_fetch_queries: one set is in use while the other is in flight. The block goes
   over the queries of all heads of the group. After the barrier of a step, the set has arrived, and all warps have read
   the other set, which the next copy overwrites. After the barrier that follows the loop, the warps may overwrite their
   rows of k and v with dk and dv.

   One kernel for dq, dk and dv would need five products instead of seven: dq and dkv both compute s and dp. But dq is a
   sum over blocks of keys. To have the same bits in each run, blocks would have to wait for each other and add in a
   fixed order to an f32 copy of dq in memory: 64 KiB read and written for 64 queries and 128 keys of head size 128.

   head size                      64    96    128
   mma per ldmatrix in the loop   2.7   2.0   1.7   (64 with dropout or SPANS: 2.3)
   registers (sm_90)              255   239   255   (with SPANS: 251, 247, 255)
   blocks of an SM                2     1     1     with 128, 256, 256 threads; 64 with SPANS on sm_86, sm_89, sm_120: 1

   With 192 or 256 features, dk and dv of 16 keys are too large for the registers of a warp. A block then owns 64 keys.
   Four of its eight warps compute dk, with three products, and four dv, with two: the scores are computed twice. mma
   per ldmatrix: 1.8, 1.4. A multiprocessor runs one block. */
template <int HeadDim, bool BF16, bool DROP, bool SPANS>
static __global__ void __launch_bounds__(mti_flash_dkv_threads<HeadDim>(), mti_flash_dkv_rows<HeadDim>())
    mti_flash_dkv_kernel(mti_flash f) {
    constexpr int Step = mti_flash_dkv_queries<HeadDim>(), Part = mti_flash_dkv_part<HeadDim>(),
                  Threads = mti_flash_dkv_threads<HeadDim>(), Held = mti_flash_dkv_held<HeadDim, DROP>(),
                  Rows = mti_flash_back_rows<HeadDim>(), Own = mti_flash_own<HeadDim>::RowTiles * 16;
    constexpr bool Split = mti_flash_dkv_split<HeadDim>();
    MT_DYN_SHARED(uint16_t, k);
    int64_t b = f.place().sequence, ld = f.p.k.ld, seq = f.p.s.seq, k_col = f.place().head * f.p.kv_step;
    int head = (int)(f.place().head * f.p.s.heads_per_group),
        heads = head + (int)f.p.s.heads_per_group; /* one past the last head */
    int first = (int)blockIdx.y * Rows, length = f.p.length(b), lane = (int)threadIdx.x % 32;
    int warp = (int)threadIdx.x / 32 * Own % Rows, row = first + warp;
    int begin = !SPANS && f.causal() ? first : 0, end = SPANS ? 0 : (int)seq, query;
    uint16_t *v = k + Rows * HeadDim, *sets = v + Rows * HeadDim;
    mti_flash_span *spans = (mti_flash_span *)(sets + 2 * mti_flash_set<HeadDim>());
    int now = 0; /* the set in use is at sets + now, the other one at sets + mti_flash_set<HeadDim>() - now */
    mti_flash_own<HeadDim> own;
    own.k = k + warp * HeadDim, own.v = v + warp * HeadDim, own.spans = spans + warp;
    own.values = (int)threadIdx.x / 32 * Own >= Rows;
    for (int i = 0; i < (Split ? 1 : 2); i++) mti_tile_zero(own.sums[i]);
    mti_tile_fetch<Rows, HeadDim, Threads>(k, f.keys_in(b, k_col), ld, f.dim(), first, length);
    mti_tile_fetch<Rows, HeadDim, Threads>(v, f.keys_in(b, k_col + f.p.value), ld, f.dim(), first, length);
    mti_cp_async_commit();
    if (SPANS) mti_flash_begin_spans<false, Step, Rows>(f, spans, first, &begin, &end);
    query = begin;
    mti_flash_fetch_queries<HeadDim>(f, sets, head, begin);
    mti_cp_async_wait<1>();
    __syncthreads(); /* k and v have arrived */
    mti_tile_hold<HeadDim, Held>(own.held_k, own.k);
    mti_tile_hold<HeadDim, Held>(own.held_v, own.v);
    while ((SPANS ? begin < end : first < length) && head < heads) {
        int next = query + Step < (SPANS ? end : seq) ? query + Step : begin,
            next_head = next > query ? head : head + 1;
        mti_cp_async_wait<0>();
        __syncthreads(); /* the set has arrived, and all warps have read the other one */
        if (next_head < heads)
            mti_flash_fetch_queries<HeadDim>(f, sets + mti_flash_set<HeadDim>() - now, next_head, next);
        MT_DEVICE_NO_UNROLL
        for (int i = 0; i < Step; i += Part) {
            const uint16_t *q = sets + now + i * HeadDim;
            const float *lse = (const float *)(sets + now + 2 * Step * HeadDim) + i + lane % 4 * 2;
            if (SPANS ? mti_flash_meets<Own>(own.spans, query + i, Part) : f.sees(query + i + Part - 1, row, length))
                mti_flash_dkv_add<HeadDim, BF16, DROP, SPANS>(f, own, q, q + Step * HeadDim, lse, lse + Step, head, row,
                                                              query + i, length);
        }
        now = mti_flash_set<HeadDim>() - now;
        query = next, head = next_head;
    }
    mti_cp_async_wait<0>();
    __syncthreads();
    mti_flash_place place = f.place_again();
    MT_DEVICE_UNROLL
    for (int i = 0; i < (Split ? 1 : 2); i++) {
        bool values = Split ? own.values : i == 1;
        float factor = f.p.scale;
        if (values) factor = f.p.drop.scale;
        mti_tile_scale(own.sums[i], factor);
        mti_tile_store<HeadDim, BF16>(
            own.sums[i], (values ? v : k) + warp * HeadDim,
            f.keys_out(place.sequence, row, place.head * f.p.kv_step + (values ? f.p.dvalue : 0)), f.p.dk.ld, f.dim(),
            (int)f.p.s.kv_seq - row);
    }
}

/* The shared memory of a block. */
template <bool SPANS> static constexpr int mti_flash_span_bytes(int rows) {
    return SPANS ? rows * (int)sizeof(mti_flash_span) : 0;
}
template <int HeadDim, bool SPANS> static constexpr int mti_flash_forward_bytes() {
    return 2 * HeadDim * (MTI_FLASH_ROWS + 3 * mti_flash_keys<HeadDim>()) + mti_flash_span_bytes<SPANS>(MTI_FLASH_ROWS);
}
template <int HeadDim, bool SPANS> static constexpr int mti_flash_dq_bytes() {
    return 2 * HeadDim * (2 * mti_flash_back_rows<HeadDim>() + 4 * mti_flash_dq_keys<HeadDim>()) +
           2 * mti_flash_back_rows<HeadDim>() * (int)sizeof(float) +
           mti_flash_span_bytes<SPANS>(mti_flash_back_rows<HeadDim>());
}
template <int HeadDim, bool SPANS> static constexpr int mti_flash_dkv_bytes() {
    return 2 * (2 * HeadDim * mti_flash_back_rows<HeadDim>() + 2 * mti_flash_set<HeadDim>()) +
           mti_flash_span_bytes<SPANS>(mti_flash_back_rows<HeadDim>());
}

/* Whether the three kernels fit in 99 KiB of shared memory, the limit of a block on sm_86, sm_89 and sm_120. */
template <int HeadDim> static constexpr bool mti_flash_is_small() {
    return mti_flash_forward_bytes<HeadDim, true>() <= 99 << 10 && mti_flash_dq_bytes<HeadDim, true>() <= 99 << 10 &&
           mti_flash_dkv_bytes<HeadDim, true>() <= 99 << 10;
}
static_assert(mti_flash_is_small<64>() && mti_flash_is_small<96>() && mti_flash_is_small<128>() &&
                  mti_flash_is_small<192>() && mti_flash_is_small<256>(),
              "shared memory");

/* Launches a kernel with blocks of `rows` of the `seq` rows of so many heads, or groups. `reads` is the number of rows
   of a head's width that a head, or a group, reads in its loop. */
static mt_status mti_flash_launch(const mti_attention *a, const char *name, void (*kernel)(mti_flash), int64_t rows,
                                  int64_t seq, int64_t heads, int64_t reads, unsigned threads, int bytes, mti_flash f) {
    int64_t width = mti_flash_section(heads, a->desc.batch, reads * a->desc.head_dim * 2);
    dim3 grid((unsigned)width, (unsigned)((seq + rows - 1) / rows), (unsigned)(heads / width * a->desc.batch));
    f.sections = (unsigned)(heads / width);
    MT_CUDA_TRY(a->ctx, cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    MT_LAUNCH_KERNEL(kernel, grid, threads, (size_t)bytes, mt_context_stream(a->ctx), f);
    return mt_cuda_launched(a->ctx, name);
}

static mti_flash mti_flash_of(const mti_attention *a) {
    float softcap = a->desc.scores.softcap, factor = softcap > 0.0f ? softcap : a->desc.scores.scale;
    mti_flash f = {
        mti_plain_of(a), factor * MTI_LOG2E, NULL, NULL, mt_round_up(a->desc.seq, MTI_FLASH_ROWS), 0.0f, 0.0f, 1, {}};
    if (softcap > 0.0f) f.cap = a->desc.scores.scale / softcap;
    if (a->desc.scores.alibi_slopes) f.alibi = -1.0f / a->desc.scores.scale;
    return f;
}

template <int HeadDim, bool SPANS> static mt_status mti_flash_run_forward(const mti_attention *a) {
    constexpr bool Asks = mti_flash_asks<HeadDim, SPANS>(); /* see mti_flash_drops */
    mti_flash f = mti_flash_of(a);
    void (*kernels[2][2])(mti_flash) = {
        {mti_flash_forward_kernel<HeadDim, false, Asks, SPANS>, mti_flash_forward_kernel<HeadDim, false, true, SPANS>},
        {mti_flash_forward_kernel<HeadDim, true, Asks, SPANS>, mti_flash_forward_kernel<HeadDim, true, true, SPANS>}};
    MT_TRY(mt_cuda_enter(a->ctx));
    return mti_flash_launch(a, "mt_attention_forward", kernels[a->q.dtype == MT_BF16][f.p.drop.on != 0], MTI_FLASH_ROWS,
                            a->desc.seq, mti_attention_heads(&a->desc), 2 * a->desc.kv_seq / a->desc.heads_per_group,
                            mti_flash_threads<HeadDim>(), mti_flash_forward_bytes<HeadDim, SPANS>(), f);
}

/* The two kernels of backward: the rows and the threads of their blocks, and their shared memory. */
struct mti_flash_back {
    void (*dq)(mti_flash), (*dkv)(mti_flash);
    int64_t rows;
    unsigned dq_threads, dkv_threads;
    int dq_bytes, dkv_bytes;
};

/* mt_attention_backward releases the memory of lse and delta when it ends. */
static mt_status mti_flash_backward(const mti_attention *a, const mti_flash_back &k) {
    const mt_attention_desc *s = &a->desc;
    static const char *const name = "mt_attention_backward";
    mti_flash f = mti_flash_of(a);
    int64_t heads = mti_attention_heads(s), stats = s->batch * heads * f.pitch;
    void *memory = NULL;
    MT_TRY(mt_arena_alloc(a->ctx, (size_t)(2 * stats) * sizeof(float), &memory));
    f.lse = (float *)memory;
    f.delta = f.lse + stats;
    MT_TRY(mt_cuda_enter(a->ctx));
    MT_LAUNCH_KERNEL(mti_flash_stats_kernel, dim3((unsigned)(f.pitch / 64), (unsigned)heads, (unsigned)s->batch), 256,
                     0, mt_context_stream(a->ctx), f);
    MT_TRY(mt_cuda_launched(a->ctx, name));
    MT_TRY(mti_flash_launch(a, name, k.dq, k.rows, s->seq, heads, 2 * s->kv_seq / s->heads_per_group, k.dq_threads,
                            k.dq_bytes, f));
    return mti_flash_launch(a, name, k.dkv, k.rows, s->kv_seq, s->groups, 2 * s->seq * s->heads_per_group,
                            k.dkv_threads, k.dkv_bytes, f);
}

template <int HeadDim, bool SPANS> static mt_status mti_flash_run_backward(const mti_attention *a) {
    constexpr bool Asks = mti_flash_asks<HeadDim, SPANS>(); /* see mti_flash_drops */
    int bf16 = a->q.dtype == MT_BF16, drop = a->desc.dropout.p > 0.0f;
    void (*dq[2][2])(mti_flash) = {
        {mti_flash_dq_kernel<HeadDim, false, Asks, SPANS>, mti_flash_dq_kernel<HeadDim, false, true, SPANS>},
        {mti_flash_dq_kernel<HeadDim, true, Asks, SPANS>, mti_flash_dq_kernel<HeadDim, true, true, SPANS>}};
    void (*dkv[2][2])(mti_flash) = {
        {mti_flash_dkv_kernel<HeadDim, false, Asks, SPANS>, mti_flash_dkv_kernel<HeadDim, false, true, SPANS>},
        {mti_flash_dkv_kernel<HeadDim, true, Asks, SPANS>, mti_flash_dkv_kernel<HeadDim, true, true, SPANS>}};
    mti_flash_back back = {dq[bf16][drop],
                           dkv[bf16][drop],
                           mti_flash_back_rows<HeadDim>(),
                           128,
                           mti_flash_dkv_threads<HeadDim>(),
                           mti_flash_dq_bytes<HeadDim, SPANS>(),
                           mti_flash_dkv_bytes<HeadDim, SPANS>()};
    return mti_flash_backward(a, back);
}

} /* extern "C++" */
#endif
