/* ---- products of packed panels on a CPU -------------------------------------------------------------------------- */

#pragma once
#include "vector_loads.cuh"

/* The micro-kernel holds MTI_MR x MTI_NR sums in registers: 8 x 32 sums take 16 of the 32 registers of AVX-512, 8 x 8
   sums take 16 of the 32 registers of NEON, and 6 x 16 sums take 12 of the 16 registers of AVX2. A register holds
   MTI_SIMD floats. The sum for an element of c adds the products over k in the same order, whatever its place in a
   tile. */
#if defined(__AVX512F__)
#define MTI_SIMD 16
#define MTI_MR 8
#elif defined(__AVX__)
#define MTI_SIMD 8
#define MTI_MR 6
#elif defined(__aarch64__)
#define MTI_SIMD 4
#define MTI_MR 8
#else
#define MTI_SIMD 4
#define MTI_MR 4
#endif
#define MTI_NR (2 * MTI_SIMD)

/* A product sums at most MTI_KC products over k at once, and adds these sums in the order of k. A panel of b, MTI_KC x
   MTI_NR, stays in L1. */
#define MTI_KC (MTI_SIMD == 16 ? 256 : 384)

#if defined(__GNUC__) && !defined(__CUDACC__)
typedef float mti_float4 __attribute__((vector_size(16)));
typedef int32_t mti_int4 __attribute__((vector_size(16)));
#ifdef __clang__
#define MTI_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define MTI_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, __extension__(mti_int4){i, j, k, l})
#endif

/* Writes the transpose of x [4, 4], whose rows are `row` apart, to out, whose rows are `width` apart. */
MT_INLINE void mti_transpose4(const float *x, int64_t row, float *out, int width) {
    mti_float4 a, b, c, d, ab, cd;
    memcpy(&a, x, sizeof a);
    memcpy(&b, x + row, sizeof b);
    memcpy(&c, x + 2 * row, sizeof c);
    memcpy(&d, x + 3 * row, sizeof d);
    ab = MTI_SHUFFLE(a, b, 0, 4, 1, 5);
    cd = MTI_SHUFFLE(c, d, 0, 4, 1, 5);
    a = MTI_SHUFFLE(a, b, 2, 6, 3, 7);
    c = MTI_SHUFFLE(c, d, 2, 6, 3, 7);
    b = MTI_SHUFFLE(ab, cd, 0, 1, 4, 5);
    ab = MTI_SHUFFLE(ab, cd, 2, 3, 6, 7);
    memcpy(out, &b, sizeof b);
    memcpy(out + width, &ab, sizeof ab);
    b = MTI_SHUFFLE(a, c, 0, 1, 4, 5);
    ab = MTI_SHUFFLE(a, c, 2, 3, 6, 7);
    memcpy(out + 2 * width, &b, sizeof b);
    memcpy(out + 3 * width, &ab, sizeof ab);
}

/* Packs `width` rows of contiguous elements, four at a time. The last four may repeat rows. Returns the number of
   columns that it has packed. */
MT_INLINE int64_t mti_pack_rows4(const float *x, int64_t row, int64_t k, int width, float *out) {
    int64_t p;
    int i;
    for (p = 0; p + 4 <= k; p += 4)
        for (i = 0; i < width; i += 4) {
            int first = i + 4 <= width ? i : width - 4;
            mti_transpose4(x + first * row + p, row, out + p * width + first, width);
        }
    return p;
}
#else
MT_INLINE int64_t mti_pack_rows4(const float *x, int64_t row, int64_t k, int width, float *out) {
    (void)x, (void)row, (void)k, (void)width, (void)out;
    return 0;
}
#endif

/* Packs a panel of `rows` <= `width` rows of a matrix whose element (i, p) is x[i * row + p * col]. Element (i, p) goes
   to out[p * width + i]. Rows from `rows` to `width` become 0. */
MT_INLINE void mti_pack_panel(const float *x, int64_t row, int64_t col, int64_t rows, int64_t k, int width,
                              float *out) {
    int64_t i, p, done = 0;
    if (row == 1 && rows == width) {
        for (p = 0; p < k; p++, x += col, out += width) memcpy(out, x, (size_t)width * sizeof(float));
        return;
    }
    if (col == 1 && rows == width) done = mti_pack_rows4(x, row, k, width, out);
    for (i = 0; i < rows; i++)
        for (p = done; p < k; p++) out[p * width + i] = x[i * row + p * col];
    for (; i < width; i++)
        for (p = 0; p < k; p++) out[p * width + i] = 0.0f;
}

/* Packs all rows, in panels of `width` rows. */
static void mti_pack(const float *x, int64_t row, int64_t col, int64_t rows, int64_t k, int width, float *out) {
    int64_t i;
    for (i = 0; i < rows; i += width)
        mti_pack_panel(x + i * row, row, col, mt_min(width, rows - i), k, width, out + i * k);
}

#if defined(__GNUC__) && !defined(__CUDACC__)
typedef float mti_simd __attribute__((vector_size(4 * MTI_SIMD)));
typedef int32_t mti_simd_ints __attribute__((vector_size(4 * MTI_SIMD)));

/* a * b + s, rounded once where the processor has an instruction for it. A compiler that may choose, as for s + a * b,
   rounds once in one loop and twice in another (gcc 12 for Zen 3), and a row's bits would depend on the rows beside
   it. */
MT_INLINE mti_simd mti_simd_fma(float a, mti_simd b, mti_simd s) {
#if defined(__AVX512F__)
    return (mti_simd)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)s);
#elif defined(__FMA__)
    return (mti_simd)_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)b, (__m256)s);
#elif defined(__aarch64__)
    return (mti_simd)vfmaq_n_f32((float32x4_t)s, (float32x4_t)b, a);
#else
    return s + a * b;
#endif
}

/* MTI_EXCHANGE takes the blocks of d elements that have the even numbers (h = 0) or the odd ones (h = 1) from a and
   from b, in turns. */
#define MTI_FROM(j, d, h) ((j) & (d) ? MTI_SIMD + (j) - ((h) ? 0 : (d)) : (j) + ((h) ? (d) : 0))
#define MTI_FROM4(j, d, h) MTI_FROM(j, d, h), MTI_FROM(j + 1, d, h), MTI_FROM(j + 2, d, h), MTI_FROM(j + 3, d, h)
#if MTI_SIMD == 16
#define MTI_FROMS(d, h) MTI_FROM4(0, d, h), MTI_FROM4(4, d, h), MTI_FROM4(8, d, h), MTI_FROM4(12, d, h)
#elif MTI_SIMD == 8
#define MTI_FROMS(d, h) MTI_FROM4(0, d, h), MTI_FROM4(4, d, h)
#else
#define MTI_FROMS(d, h) MTI_FROM4(0, d, h)
#endif
#ifdef __clang__
#define MTI_EXCHANGE(a, b, d, h) __builtin_shufflevector(a, b, MTI_FROMS(d, h))
#else
#define MTI_EXCHANGE(a, b, d, h) __builtin_shuffle(a, b, __extension__(mti_simd_ints){MTI_FROMS(d, h)})
#endif

/* One of the steps of mti_transpose_simd: exchanges blocks of d elements between rows whose numbers differ by d. */
#define MTI_TRANSPOSE_STEP(t, d)                                                                                       \
    MTI_UNROLL                                                                                                         \
    for (i = 0; i < MTI_SIMD; i++)                                                                                     \
        if (!(i & (d))) {                                                                                              \
            mti_simd low = t[i], high = t[i + (d)];                                                                    \
            t[i] = MTI_EXCHANGE(low, high, d, 0);                                                                      \
            t[i + (d)] = MTI_EXCHANGE(low, high, d, 1);                                                                \
        }

/* Transposes t [MTI_SIMD, MTI_SIMD] in registers. */
MT_INLINE void mti_transpose_simd(mti_simd *t) {
    int i;
#if MTI_SIMD == 16
    MTI_TRANSPOSE_STEP(t, 8)
#endif
#if MTI_SIMD >= 8
    MTI_TRANSPOSE_STEP(t, 4)
#endif
    MTI_TRANSPOSE_STEP(t, 2)
    MTI_TRANSPOSE_STEP(t, 1)
}

/* Widens the low (which = 0) or the high half of each element, 16 bits of the type, as mt_f32_from_16bit does. */
MT_INLINE mti_simd mti_simd_widen(mt_dtype type, mti_simd t, int which) {
    mti_simd_ints u = (mti_simd_ints)t, high = __extension__(mti_simd_ints){0} + (int32_t)0xffff0000, size, less, more;
    u = which ? u & high : u << 16;
    if (type == MT_BF16) return (mti_simd)u;
    size = (u & 0x7fffffff) >> 3;
    less = size < 0x00800000;
    more = size >= 0x0f800000;
    size += 0x38000000 + (more & 0x38000000) + (less & 0x00800000);
    t = (mti_simd)size - (mti_simd)(less & 0x38800000);
    return (mti_simd)((mti_simd_ints)t | (u & (int32_t)0x80000000));
}

/* Returns s + a b. In pairs, a and each place of b hold two bf16 numbers, neighbours in k, the first one in the low
   half. The instruction adds both products in f32. It reads denormal numbers as 0. */
MT_INLINE mti_simd mti_gemm_step(int pairs, float a, mti_simd b, mti_simd s) {
#if MT_HAS_AVX512_BF16
    if (pairs) return (mti_simd)_mm512_dpbf16_ps((__m512)s, (__m512bh)_mm512_set1_ps(a), (__m512bh)b);
#endif
    (void)pairs;
    return mti_simd_fma(a, b, s);
}

/* alpha * s + beta * c; alpha * s if beta is 0. */
MT_INLINE mti_simd mti_gemm_end(mti_simd s, float alpha, float beta, mti_simd c) {
    return beta != 0.0f ? mti_simd_fma(beta, c, s * alpha) : s * alpha;
}

/* c [MTI_MR, MTI_NR] = alpha a b + beta c, a sum over k. Row i of a is a[i][p * step]; b is a packed panel. In pairs, k
   counts pairs. */
MT_INLINE void mti_gemm_sums(int pairs, int64_t k, const float *const *a, int64_t step, const float *b, float alpha,
                             float beta, float *c, int64_t ldc) {
    mti_simd s[MTI_MR][2], zero = {0}, b0 = zero, b1;
    int64_t p;
    int i, j;
    MTI_UNROLL
    for (i = 0; i < MTI_MR; i++) s[i][0] = s[i][1] = zero;
    for (p = 0; p < k; p++, b += MTI_NR) {
        memcpy(&b0, b, sizeof b0);
        memcpy(&b1, b + MTI_SIMD, sizeof b1);
        MTI_UNROLL
        for (i = 0; i < MTI_MR; i++) {
            s[i][0] = mti_gemm_step(pairs, a[i][p * step], b0, s[i][0]);
            s[i][1] = mti_gemm_step(pairs, a[i][p * step], b1, s[i][1]);
        }
    }
    MTI_UNROLL
    for (i = 0; i < MTI_MR; i++)
        for (j = 0; j < 2; j++, c += MTI_SIMD) {
            if (beta != 0.0f) memcpy(&b0, c, sizeof b0);
            b0 = mti_gemm_end(s[i][j], alpha, beta, b0);
            memcpy(c, &b0, sizeof b0);
            if (j == 1) c += ldc - MTI_NR;
        }
}
#else
MT_INLINE void mti_gemm_sums(int pairs, int64_t k, const float *const *a, int64_t step, const float *b, float alpha,
                             float beta, float *c, int64_t ldc) {
    float sums[MTI_MR * MTI_NR];
    int64_t p;
    int i, j;
    (void)pairs;
    for (i = 0; i < MTI_MR * MTI_NR; i++) sums[i] = 0.0f;
    for (p = 0; p < k; p++, b += MTI_NR)
        for (i = 0; i < MTI_MR; i++)
            for (j = 0; j < MTI_NR; j++) sums[i * MTI_NR + j] += a[i][p * step] * b[j];
    for (i = 0; i < MTI_MR; i++, c += ldc)
        for (j = 0; j < MTI_NR; j++) c[j] = alpha * sums[i * MTI_NR + j] + (beta != 0.0f ? beta * c[j] : 0.0f);
}
#endif

/* A product with few rows: c [m, n] = alpha a [m, k] b^T [n, k] + beta c. a and c are f32. */
typedef struct mti_few_product {
    const float *a;
    const unsigned char *b;
    float *c;
    int64_t lda, ldb, ldc, m, n, k;
    float alpha, beta;
} mti_few_product;

#define MTI_FEW 4                    /* rows of a that are multiplied at once */
#define MTI_FEW_LEAST (2 * MTI_SIMD) /* the shortest rows of b: a register of 16-bit elements */
#define MTI_FEW_AHEAD (1 << 19)      /* bytes of the next rows of b that L2 can hold together with the present ones */

#if defined(__GNUC__) && !defined(__CUDACC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define MTI_HAS_FEW 1

/* How a register gets elements of b. In pairs: it holds two 16-bit elements in each place, which become floats after
   the transposition. Otherwise: it holds one float in each place; an instruction of F16C widens f16. */
#if defined(__F16C__) && MTI_SIMD >= 8
#define MTI_FEW_PAIRS(type) ((type) == MT_BF16)
#else
#define MTI_FEW_PAIRS(type) ((type) != MT_F32)
#endif
#define MTI_FEW_STEP(type) (MTI_FEW_PAIRS(type) ? 2 * MTI_SIMD : MTI_SIMD) /* elements of b in a register */

MT_INLINE mti_simd mti_few_load(mt_dtype type, const unsigned char *b) {
    mti_simd t;
#if defined(__F16C__) && MTI_SIMD >= 8
    if (type == MT_F16) {
#if MTI_SIMD == 16
        /* the form with a mask: gcc 12 warns of the other one */
        return (mti_simd)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i *)(const void *)b));
#else
        return (mti_simd)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)b));
#endif
    }
#endif
    (void)type;
    memcpy(&t, b, sizeof t);
    return t;
}

/* Adds to s [m, MTI_SIMD] the products of MTI_FEW_STEP elements of k, without those before `first`. These are elements
   p and following of m rows x, and are `at` bytes after the addresses b of MTI_SIMD rows. The order of the sums is that
   of mti_gemm_sums. The lines of the cache `ahead` of b are brought into L2. */
MT_INLINE void mti_few_step(int m, mt_dtype type, const unsigned char *const *b, int64_t at, int64_t ahead,
                            const float *const *x, int64_t p, int first, mti_simd *s) {
    mti_simd t[MTI_SIMD];
    int i, r;
    MTI_UNROLL
    for (i = 0; i < MTI_SIMD; i++) {
        t[i] = mti_few_load(type, b[i] + at);
        MTI_PREFETCH_L2(b[i] + at + ahead);
    }
    mti_transpose_simd(t);
    MTI_UNROLL
    for (i = 0; i < MTI_SIMD; i++) {
        if (!MTI_FEW_PAIRS(type)) {
            if (i < first) continue;
            for (r = 0; r < m; r++) s[r] = mti_simd_fma(x[r][p + i], t[i], s[r]);
        } else {
            mti_simd even = mti_simd_widen(type, t[i], 0), odd = mti_simd_widen(type, t[i], 1);
            if (2 * i + 1 < first) continue;
            if (2 * i >= first)
                for (r = 0; r < m; r++) s[r] = mti_simd_fma(x[r][p + 2 * i], even, s[r]);
            for (r = 0; r < m; r++) s[r] = mti_simd_fma(x[r][p + 2 * i + 1], odd, s[r]);
        }
    }
}

/* Copies MTI_SIMD elements of row i of c from column j on to *s, or *s to them. Leaves out what c does not have. */
MT_INLINE void mti_few_copy(const mti_few_product *g, int64_t i, int64_t j, int writes, mti_simd *s) {
    size_t size = (size_t)mt_min(MTI_SIMD, g->n - j) * sizeof *g->c;
    if (i >= g->m || j >= g->n) return;
    if (writes) memcpy(g->c + i * g->ldc + j, s, size);
    else memcpy(s, g->c + i * g->ldc + j, size);
}

/* Computes c for m rows of a from row i on, and `groups` times MTI_SIMD rows of b from row j on. Rows that do not exist
   repeat the last one. k is at least MTI_FEW_LEAST. */
MT_INLINE void mti_few_tile(const mti_few_product *g, int m, int groups, mt_dtype type, int64_t i, int64_t j) {
    const unsigned char *b[2 * MTI_SIMD];
    const float *x[MTI_FEW];
    mti_simd s[MTI_FEW], sums[MTI_FEW], zero = {0}; /* [groups, m] */
    int64_t size = (int64_t)mt_dtype_size(type), step = MTI_FEW_STEP(type), rows = groups * MTI_SIMD, p, q, end;
    int64_t ahead = j + 2 * rows <= g->n && rows * g->k * size <= MTI_FEW_AHEAD ? rows * g->ldb * size : 0;
    int r, u, each = groups * m;
    for (r = 0; r < rows; r++) b[r] = g->b + mt_min(j + r, g->n - 1) * g->ldb * size;
    for (r = 0; r < m; r++) x[r] = g->a + mt_min(i + r, g->m - 1) * g->lda;
    for (r = 0; r < each; r++) {
        sums[r] = zero;
        if (g->beta != 0.0f) mti_few_copy(g, i + r % m, j + r / m * MTI_SIMD, 0, &sums[r]);
    }
    for (p = 0; p < g->k; p = end) {
        float beta = p == 0 ? g->beta : 1.0f;
        end = mt_min(p + MTI_KC, g->k);
        for (r = 0; r < each; r++) s[r] = zero;
        for (q = p; q + step <= end; q += step)
            for (u = 0; u < groups; u++) mti_few_step(m, type, b + u * MTI_SIMD, q * size, ahead, x, q, 0, s + u * m);
        for (u = 0; q < end && u < groups; u++)
            mti_few_step(m, type, b + u * MTI_SIMD, (end - step) * size, 0, x, end - step, (int)(step - (end - q)),
                         s + u * m);
        for (r = 0; r < each; r++) sums[r] = mti_gemm_end(s[r], g->alpha, beta, sums[r]);
    }
    for (r = 0; r < each; r++) mti_few_copy(g, i + r % m, j + r / m * MTI_SIMD, 1, &sums[r]);
}

/* With one row, the sums of two groups hide each other's latency. */
static void mti_few_tile1(const mti_few_product *g, mt_dtype type, int64_t i, int64_t j) {
    if (type == MT_F32) mti_few_tile(g, 1, 2, MT_F32, i, j);
    else if (type == MT_BF16) mti_few_tile(g, 1, 2, MT_BF16, i, j);
    else mti_few_tile(g, 1, 2, MT_F16, i, j);
}

static void mti_few_tile4(const mti_few_product *g, mt_dtype type, int64_t i, int64_t j) {
    if (type == MT_F32) mti_few_tile(g, MTI_FEW, 1, MT_F32, i, j);
    else if (type == MT_BF16) mti_few_tile(g, MTI_FEW, 1, MT_BF16, i, j);
    else mti_few_tile(g, MTI_FEW, 1, MT_F16, i, j);
}

/* The product g. Reads b, whose elements have the type, once from memory. The bits of a row of c do not depend on m. */
static void mti_few_rows(const mti_few_product *g, mt_dtype type) {
    int64_t i, j;
    for (j = 0; j < g->n; j += 2 * MTI_SIMD)
        for (i = 0; i < g->m; i += MTI_FEW) {
            if (g->m - i == 1) {
                mti_few_tile1(g, type, i, j);
                continue;
            }
            mti_few_tile4(g, type, i, j);
            if (j + MTI_SIMD < g->n) mti_few_tile4(g, type, i, j + MTI_SIMD);
        }
}
#else
#define MTI_HAS_FEW 0
static void mti_few_rows(const mti_few_product *g, mt_dtype type) { (void)g, (void)type; }
#endif

typedef struct mti_gemm_piece { /* one block of a product: c [m, n] = alpha a [m, k] b [k, n] + beta c */
    const float *a;
    const float *packed_a; /* NULL: a is read in place, with its strides */
    const float *packed_b;
    float *c;
    int64_t a_row, a_col, ldc, m, n, k;
    float alpha, beta;
    int pairs; /* 1: a and packed_b hold pairs of bf16 numbers, and k counts them; see mti_gemm_step */
    int tiles; /* 1: in pairs, and mti_tiles_product computes it */
} mti_gemm_piece;

/* mti_gemm_sums for the tile from row i on, over [first, end) of the inner dimension. b is the panel. Rows that a does
   not have repeat its last one. */
static void mti_gemm_panel(const mti_gemm_piece *x, int64_t i, int64_t first, int64_t end, const float *b, float *c,
                           int64_t ldc) {
    const float *rows[MTI_MR], *a;
    int64_t last = x->m - i - 1, k = end - first;
    int r;
    b += first * MTI_NR;
    if (x->packed_a) {
        MTI_UNROLL
        for (r = 0; r < MTI_MR; r++) rows[r] = x->packed_a + i * x->k + first * MTI_MR + r;
        mti_gemm_sums(0, k, rows, MTI_MR, b, x->alpha, x->beta, c, ldc);
        return;
    }
    a = x->a + i * x->a_row + first * x->a_col;
    MTI_UNROLL
    for (r = 0; r < MTI_MR; r++) rows[r] = a + mt_min(r, last) * x->a_row;
    if (MT_HAS_AVX512_BF16 && x->pairs) {
        if (x->a_col == 1) mti_gemm_sums(1, k, rows, 1, b, x->alpha, x->beta, c, ldc);
        else mti_gemm_sums(1, k, rows, x->a_col, b, x->alpha, x->beta, c, ldc);
    } else if (x->a_col == 1) mti_gemm_sums(0, k, rows, 1, b, x->alpha, x->beta, c, ldc);
    else mti_gemm_sums(0, k, rows, x->a_col, b, x->alpha, x->beta, c, ldc);
}

/* Copies m rows of n elements. */
static void mti_gemm_copy(const float *x, int64_t ldx, float *y, int64_t ldy, int64_t m, int64_t n) {
    int64_t i, j;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) y[i * ldy + j] = x[i * ldx + j];
}

/* Computes the tile of a block from row i and column j on. It sums over [first, end) of the inner dimension. A part of
   a tile goes through a whole one, so that an element has the same bits in any place of a tile. */
static void mti_gemm_tile(const mti_gemm_piece *x, int64_t i, int64_t j, int64_t first, int64_t end) {
    float room[MTI_MR * MTI_NR], *c = x->c + i * x->ldc + j;
    const float *b = x->packed_b + j * x->k;
    int64_t m = mt_min(MTI_MR, x->m - i), n = mt_min(MTI_NR, x->n - j), r;
    if (m == MTI_MR && n == MTI_NR) {
        for (r = 0; r < m; r++) MTI_PREFETCH(c + r * x->ldc);
        mti_gemm_panel(x, i, first, end, b, c, x->ldc);
        return;
    }
    memset(room, 0, sizeof room);
    if (x->beta != 0.0f) mti_gemm_copy(c, x->ldc, room, MTI_NR, m, n);
    mti_gemm_panel(x, i, first, end, b, room, MTI_NR);
    mti_gemm_copy(room, MTI_NR, c, x->ldc, m, n);
}
