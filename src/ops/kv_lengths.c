/* ---- positions and lengths of a key/value cache ------------------------------------------------------------------ */

#pragma once
#include "kv_cache.c"

/* The position of token i of sequence b, at most max_seq - 1. */
MT_INLINE MT_HOST_DEVICE int32_t mti_kv_position(int64_t max_seq, const int32_t *lengths, int64_t b, int64_t i) {
    int64_t position = lengths[b] + i;
    return (int32_t)(position < max_seq ? position : max_seq - 1);
}

/* The length of sequence b after a call that adds added[b] or seq tokens. */
MT_INLINE MT_HOST_DEVICE int32_t mti_kv_advanced(int64_t max_seq, int64_t seq, const int32_t *added,
                                                 const int32_t *lengths, int64_t b) {
    int64_t some = added ? added[b] : seq, length = lengths[b] < 0 ? 0 : lengths[b];
    length += some < 0 ? 0 : some < seq ? some : seq;
    return (int32_t)(length < max_seq ? length : max_seq);
}

static void mti_cpu_kv_positions(const mt_kv_cache *cache, int64_t batch, int64_t seq, int32_t *ids) {
    int64_t b, i;
    for (b = 0; b < batch; b++)
        for (i = 0; i < seq; i++) ids[b * seq + i] = mti_kv_position(cache->max_seq, cache->lengths, b, i);
}

static void mti_cpu_kv_advance(int64_t max_seq, int64_t batch, int64_t seq, const int32_t *added, int32_t *lengths) {
    int64_t b;
    for (b = 0; b < batch; b++) lengths[b] = mti_kv_advanced(max_seq, seq, added, lengths, b);
}

#include "kv_lengths.cuh"

/* Checks the numbers of sequences and of tokens. */
static mt_status mti_kv_expect_tokens(mt_context *ctx, const char *where, int64_t batch, int64_t seq) {
    MT_TRY(mt_check_size(ctx, where, NULL, "batch", batch, 0, INT_MAX));
    return mt_check_size(ctx, where, NULL, "seq", seq, 1, INT_MAX);
}

MT_API mt_status mt_kv_cache_positions(mt_context *ctx, const mt_kv_cache *cache, int64_t batch, int64_t seq,
                                       int32_t *ids) {
    static const char *const where = "mt_kv_cache_positions";
    mti_operator op;
    MT_TRY(mti_kv_expect_tokens(ctx, where, batch, seq));
    MT_TRY(mti_kv_expect_cache(ctx, where, cache, batch));
    MT_TRY(mti_expect_pointer(ctx, where, "ids", ids, batch * seq));
    MT_TRY(mti_begin_bare(&op, ctx, where));
    op.work.bytes = (double)(batch * (seq + 1)) * sizeof *ids;
    return mti_end(&op, MTI_RUN(&op, mti_cuda_kv_positions(ctx, cache, batch, seq, ids),
                                mti_cpu_kv_positions(cache, batch, seq, ids)));
}

MT_API mt_status mt_kv_cache_advance(mt_context *ctx, int64_t max_seq, int64_t batch, int64_t seq, const int32_t *added,
                                     int32_t *lengths) {
    static const char *const where = "mt_kv_cache_advance";
    mti_operator op;
    MT_TRY(mti_kv_expect_tokens(ctx, where, batch, seq));
    MT_TRY(mt_check_size(ctx, where, NULL, "max_seq", max_seq, 1, INT_MAX));
    MT_TRY(mti_expect_pointer(ctx, where, "lengths", lengths, batch));
    MT_TRY(mti_begin_bare(&op, ctx, where));
    op.work.bytes = (double)(batch * (added ? 3 : 2)) * sizeof *lengths;
    return mti_end(&op, MTI_RUN(&op, mti_cuda_kv_advance(ctx, max_seq, batch, seq, added, lengths),
                                mti_cpu_kv_advance(max_seq, batch, seq, added, lengths)));
}
