/* ---- Philox, one word for each global element -------------------------------------------------------------------- */

#pragma once
#include "random.h"
#include "system.h"
#include "../comm/hash.c"

/* Refuses a view that is not inside its global tensor, or whose global element numbers do not fit in 64 bits. */
static mt_status mti_expect_random(mt_context *ctx, const char *where, mt_random at, int64_t rows, int64_t cols) {
    if (at.first_row < 0 || at.first_col < 0 || at.global_cols < cols || at.first_col > at.global_cols - cols)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: a view [%lld, %lld] at row %lld, column %lld is not inside a tensor of "
                       "%lld columns",
                       where, (long long)rows, (long long)cols, (long long)at.first_row, (long long)at.first_col,
                       (long long)at.global_cols);
    if (at.first_row > INT64_MAX - rows || mt_size_mul(at.first_row + rows, at.global_cols) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: row %lld + %lld of %lld columns has no 64-bit element number", where,
                       (long long)at.first_row, (long long)rows, (long long)at.global_cols);
    return MT_SUCCESS;
}

/* MTI_COUNTERS is the largest number of Philox blocks (of four words) that are computed together. MTI_WORDS is the
   largest number of random words that a caller takes at a time. It is one block less, because the first word may be any
   lane of its block. */
#define MTI_COUNTERS 64
#define MTI_WORDS_ROOM (4 * MTI_COUNTERS)
#define MTI_WORDS (MTI_WORDS_ROOM - 4)

#if defined(__AVX2__) && defined(__GNUC__) && !defined(__CUDACC__)
#if defined(__AVX512F__)
#define MTI_WIDE 8 /* 64-bit lanes of a vector */
#define MTI_WIDE_LANES 0, 1, 2, 3, 4, 5, 6, 7
#define MTI_WIDE_FIRST 0, 8, 1, 9, 2, 10, 3, 11 /* the first half of the pairs of lanes of two vectors */
#define MTI_WIDE_LAST 4, 12, 5, 13, 6, 14, 7, 15
#else
#define MTI_WIDE 4
#define MTI_WIDE_LANES 0, 1, 2, 3
#define MTI_WIDE_FIRST 0, 4, 1, 5
#define MTI_WIDE_LAST 2, 6, 3, 7
#endif
typedef uint64_t mti_u64_wide __attribute__((vector_size(8 * MTI_WIDE)));
typedef long long mti_i64_wide __attribute__((vector_size(8 * MTI_WIDE)));
typedef int mti_i32_wide __attribute__((vector_size(8 * MTI_WIDE)));
#if defined(__clang__)
#define MTI_LOW_PRODUCT(a, b) (((a)&low) * (b))
#define MTI_MERGE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#if defined(__AVX512F__) /* every lane has a 1 in the mask, so the zeros are not used */
#define MTI_LOW_PRODUCT(a, b)                                                                                          \
    ((mti_u64_wide)__builtin_ia32_pmuludq512_mask((mti_i32_wide)(a), (mti_i32_wide)(b), (mti_i64_wide)zero, 0xff))
#else
#define MTI_LOW_PRODUCT(a, b) ((mti_u64_wide)__builtin_ia32_pmuludq256((mti_i32_wide)(a), (mti_i32_wide)(b)))
#endif
#define MTI_MERGE(a, b, ...) __builtin_shuffle(a, b, __extension__(mti_u64_wide){__VA_ARGS__})
#endif
#define MTI_PHILOX_GROUP (4 * MTI_WIDE) /* blocks that are computed together: enough to hide latencies */

/* The words of MTI_PHILOX_GROUP blocks. A word is the low half of a 64-bit lane. MTI_LOW_PRODUCT multiplies the low
   halves of a and b, in one instruction, and ignores the high halves: so these may have any bits until the end. gcc
   does not find this instruction itself; the plain loop below takes three times as long. */
static void mti_philox_group(uint64_t first, uint64_t stream, uint64_t seed, uint32_t *out) {
    const mti_u64_wide zero = {0}, low = zero + 0xffffffffu, at = {MTI_WIDE_LANES};
    const mti_u64_wide factor0 = zero + 0xD2511F53u, factor2 = zero + 0xCD9E8D57u;
    mti_u64_wide c0[4], c1[4], c2[4], c3[4];
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    int round, i;
    MTI_UNROLL
    for (i = 0; i < 4; i++) {
        c0[i] = at + (first + (uint64_t)(MTI_WIDE * i));
        c1[i] = c0[i] >> 32;
        c2[i] = zero + stream;
        c3[i] = zero + (stream >> 32);
    }
    MTI_UNROLL
    for (round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        MTI_UNROLL
        for (i = 0; i < 4; i++) {
            mti_u64_wide a = MTI_LOW_PRODUCT(c0[i], factor0), b = MTI_LOW_PRODUCT(c2[i], factor2);
            c0[i] = (b >> 32) ^ c1[i] ^ (zero + k0);
            c1[i] = b;
            c2[i] = (a >> 32) ^ c3[i] ^ (zero + k1);
            c3[i] = a;
        }
    }
    MTI_UNROLL
    for (i = 0; i < 4; i++, out += 4 * MTI_WIDE) {
        mti_u64_wide words01 = (c0[i] & low) | c1[i] << 32, words23 = (c2[i] & low) | c3[i] << 32;
        mti_u64_wide merged_first = MTI_MERGE(words01, words23, MTI_WIDE_FIRST);
        mti_u64_wide merged_last = MTI_MERGE(words01, words23, MTI_WIDE_LAST);
        memcpy(out, &merged_first, sizeof merged_first);
        memcpy(out + 2 * MTI_WIDE, &merged_last, sizeof merged_last);
    }
}
#else
#define MTI_PHILOX_GROUP 16
#endif

/* Computes `count` <= MTI_COUNTERS Philox blocks. Word `lane` of block first + l goes to out[4 * l + lane]. The inner
   loops run over blocks, so that they vectorise. */
static void mti_philox_loop(uint64_t first, uint64_t stream, uint64_t seed, int count, uint32_t *out) {
    uint32_t c0[MTI_COUNTERS], c1[MTI_COUNTERS], c2[MTI_COUNTERS], c3[MTI_COUNTERS];
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    int round, l;
    for (l = 0; l < count; l++) {
        c0[l] = (uint32_t)(first + (uint64_t)l);
        c1[l] = (uint32_t)((first + (uint64_t)l) >> 32);
        c2[l] = (uint32_t)stream;
        c3[l] = (uint32_t)(stream >> 32);
    }
    for (round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
        for (l = 0; l < count; l++) {
            uint64_t a = (uint64_t)c0[l] * 0xD2511F53u, b = (uint64_t)c2[l] * 0xCD9E8D57u;
            uint32_t n0 = (uint32_t)(b >> 32) ^ c1[l] ^ k0, n2 = (uint32_t)(a >> 32) ^ c3[l] ^ k1;
            c0[l] = n0;
            c1[l] = (uint32_t)b;
            c2[l] = n2;
            c3[l] = (uint32_t)a;
        }
    for (l = 0; l < count; l++) {
        out[4 * l] = c0[l];
        out[4 * l + 1] = c1[l];
        out[4 * l + 2] = c2[l];
        out[4 * l + 3] = c3[l];
    }
}

static void mti_philox_blocks(uint64_t first, uint64_t stream, uint64_t seed, int count, uint32_t *out) {
    int done = 0;
#if defined(MTI_WIDE)
    for (; done + MTI_PHILOX_GROUP <= count; done += MTI_PHILOX_GROUP)
        mti_philox_group(first + (uint64_t)done, stream, seed, out + 4 * done);
#endif
    if (done < count) mti_philox_loop(first + (uint64_t)done, stream, seed, count - done, out + 4 * done);
}

MT_API void mt_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    if (!counter || !key || !out) return;
    mti_philox_blocks(counter[0] | (uint64_t)counter[1] << 32, counter[2] | (uint64_t)counter[3] << 32,
                      key[0] | (uint64_t)key[1] << 32, 1, out);
}

static MT_HOST_DEVICE uint64_t mti_subsequence(const mt_random *at) {
    return at->offset ? at->subsequence + *at->offset : at->subsequence;
}

/* Returns the random words of the global elements [e, e + n), with n <= mti_words_fit(e, n). They are stored in
   room [MTI_WORDS_ROOM]. */
static const uint32_t *mti_random_words(mt_random at, int64_t e, int64_t n, uint32_t *room) {
    int64_t lane = e & 3, blocks = (lane + n + 3) / 4;
    mti_philox_blocks((uint64_t)e >> 2, mti_subsequence(&at), at.seed,
                      (int)mt_min(mt_round_up(blocks, MTI_PHILOX_GROUP), MTI_COUNTERS), room);
    return room + lane;
}

/* How many of the n elements from e on a caller of mti_random_words should take. The elements behind them begin a
   Philox block, so that no block is computed twice. */
static int64_t mti_words_fit(int64_t e, int64_t n) { return mt_min(MTI_WORDS_ROOM - (e & 3), n); }

/* The global element number of element (row, col) of a view. */
static int64_t mti_random_element(mt_random at, int64_t row, int64_t col) {
    return (at.first_row + row) * at.global_cols + at.first_col + col;
}
