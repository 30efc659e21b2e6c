/* ---- key/value cache --------------------------------------------------------------------------------------------- */

#pragma once
#include "kv_cache.h"
#include "attention_qkv.h"
#include "math.cuh"
#include "attention_cpu.c"
#include "attention_choice.cuh"
#include "rotary.c"

/* One call of an operator of this section. */
typedef struct mti_kv {
    mt_context *ctx;
    mt_attention_desc desc; /* without defaults */
    mt_kv_cache cache;
    mt_tensor qkv, table, out; /* table: of append, optional. out: of attention */
    mti_qkv_cols cols;         /* of qkv */
} mti_kv;

/* The number of new tokens of sequence b. */
static int64_t mti_kv_added(const mt_attention_desc *s, int64_t b) { return s->lengths ? s->lengths[b] : s->part.seq; }

/* The number of those that a call has: with a part, those from part.first_query on. */
static int64_t mti_kv_new(const mt_attention_desc *s, int64_t b) {
    return mt_min(mt_max(mti_kv_added(s, b) - s->part.first_query, 0), s->seq);
}

/* The number of tokens of sequence b that come before those of a call. */
static int64_t mti_kv_before(const mti_kv *k, int64_t b) {
    return k->cache.lengths[b] + mt_min(mti_kv_added(&k->desc, b), k->desc.part.first_query);
}

/* The row of keys and values for position 0. */
MT_INLINE MT_HOST_DEVICE int64_t mti_kv_row(const mti_kv *k, int64_t b, int64_t g) {
    return (b * k->desc.groups + g) * k->cache.max_seq;
}

/* Refuses the options of attention that have no meaning for a cache. */
static mt_status mti_kv_expect_options(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    const char *field = NULL;
    MT_TRY(mt_scores_check(ctx, where, NULL, &s->scores));
    if (s->scores.mask != MT_MASK_CAUSAL) field = "a mask other than MT_MASK_CAUSAL";
    if (s->dropout.p != 0.0f) field = "dropout";
    if (s->kv_seq != 0) field = "kv_seq";
    if (s->cu_seqlens || s->documents != 0) field = "cu_seqlens";
    if (s->bias.value.data || s->bias.grad.data) field = "a bias";
    if (!field) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: %s cannot be used with a key/value cache", where, field);
}

/* Checks the fields of the cache that all operators of this section read. */
static mt_status mti_kv_expect_cache(mt_context *ctx, const char *where, const mt_kv_cache *cache, int64_t batch) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!cache) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: cache is NULL", where);
    MT_TRY(mt_check_size(ctx, where, "cache", "max_seq", cache->max_seq, 1, INT_MAX));
    return mti_expect_pointer(ctx, where, "cache.lengths", cache->lengths, batch);
}

/* Checks the keys and values, except their shapes. */
static mt_status mti_kv_expect_views(mt_context *ctx, const char *where, const mt_attention_desc *s,
                                     const mt_kv_cache *cache, mt_dtype dtype) {
    if (mt_size_mul(mt_size_mul(mt_size_mul(s->batch, s->groups), cache->max_seq), s->head_dim) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: a cache of %lld sequences, %lld groups and %lld positions is too large",
                       where, (long long)s->batch, (long long)s->groups, (long long)cache->max_seq);
    if (cache->keys.dtype != dtype || cache->values.dtype != dtype)
        return mt_fail(ctx, MT_ERR_DTYPE, "%s: keys are %s and values %s, both must be %s, as qkv is", where,
                       mt_dtype_name(cache->keys.dtype), mt_dtype_name(cache->values.dtype), mt_dtype_name(dtype));
    if (mt_tensor_ld(cache->keys) == s->head_dim && mt_tensor_ld(cache->values) == s->head_dim) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE, "%s: the ld of keys is %lld and that of values %lld, both must be head_dim %lld",
                   where, (long long)mt_tensor_ld(cache->keys), (long long)mt_tensor_ld(cache->values),
                   (long long)s->head_dim);
}

/* Checks the numbers of tokens. */
static mt_status mti_kv_expect_lengths(const mti_kv *k, const char *where) {
    int64_t b, most = k->cache.max_seq;
    if (mt_context_device(k->ctx) != MT_DEVICE_CPU) return MT_SUCCESS;
    MT_TRY(mti_expect_lengths(k->ctx, where, &k->desc));
    for (b = 0; b < k->desc.batch; b++) {
        int64_t held = k->cache.lengths[b], added = mti_kv_added(&k->desc, b);
        if (held < 0 || held > most)
            return mt_fail(k->ctx, MT_ERR_DATA, "%s: cache.lengths[%lld] is %lld, must be in [0, %lld]", where,
                           (long long)b, (long long)held, (long long)most);
        if (held + added > most)
            return mt_fail(k->ctx, MT_ERR_DATA,
                           "%s: sequence %lld has %lld tokens and gets %lld more; the cache has room for %lld", where,
                           (long long)b, (long long)held, (long long)added, (long long)most);
    }
    return MT_SUCCESS;
}

/* Checks desc->part. The tokens of a call may end behind those of the sequence: these are padding. */
static mt_status mti_kv_expect_part(mt_context *ctx, const char *where, const mt_attention_part *p) {
    MT_TRY(mt_check_size(ctx, where, NULL, "part.seq", p->seq, 0, INT_MAX));
    MT_TRY(mt_check_size(ctx, where, NULL, "part.first_query", p->first_query, 0, p->seq));
    if (p->kv_seq == 0 && p->first_key == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_UNSUPPORTED, "%s: part.%s cannot be used with a key/value cache", where,
                   p->kv_seq ? "kv_seq" : "first_key");
}

/* Checks desc and the fields of the cache, and fills k with them. */
static mt_status mti_kv_fill(mt_context *ctx, const char *where, const mt_attention_desc *desc,
                             const mt_kv_cache *cache, mti_kv *k) {
    mt_attention_desc whole;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!desc) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc is NULL", where);
    whole = *desc;
    memset(&whole.part, 0, sizeof whole.part);
    whole.heads_per_group += desc->heads_per_group == 0; /* append: no queries */
    MT_TRY(mti_expect_heads(ctx, where, &whole));
    MT_TRY(mti_kv_expect_part(ctx, where, &desc->part));
    if (mt_size_mul(desc->batch, desc->part.seq) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: a batch of %lld sequences of %lld tokens has too many tokens", where,
                       (long long)desc->batch, (long long)desc->part.seq);
    MT_TRY(mti_kv_expect_options(ctx, where, desc));
    MT_TRY(mti_kv_expect_cache(ctx, where, cache, desc->batch));
    memset(k, 0, sizeof *k);
    k->ctx = ctx;
    k->desc = mti_attention_defaults(desc);
    k->desc.scores.window =
        mt_min(desc->scores.window, cache->max_seq); /* a larger one hides nothing, and could overflow */
    k->cache = *cache;
    k->cols = mti_qkv_cols_of(desc);
    return mti_expect_scores(ctx, where, &k->desc);
}

/* The same for an operator, which checks the views with its table of arguments. */
static mt_status mti_kv_check(mt_context *ctx, const char *where, const mt_attention_desc *desc, mt_tensor qkv,
                              const mt_kv_cache *cache, mti_kv *k) {
    MT_TRY(mti_kv_fill(ctx, where, desc, cache, k));
    k->qkv = qkv;
    return mti_kv_expect_views(ctx, where, desc, cache, qkv.dtype);
}

MT_API mt_status mt_kv_cache_check(mt_context *ctx, const char *where, const mt_attention_desc *desc,
                                   const mt_kv_cache *cache) {
    mti_kv k;
    MT_TRY(mti_kv_fill(ctx, where, desc, cache, &k));
    MT_TRY(mt_check_size(ctx, where, NULL, "heads_per_group", desc->heads_per_group, 1, INT64_MAX - 2));
    return mti_kv_expect_lengths(&k, where);
}

/* Turns a head of a token in place. */
static void mti_kv_turn(const mti_kv *k, const float *angles, float *x) {
    int64_t half = k->table.cols / 2;
    if (!k->table.data) return;
    if (k->desc.scores.rotary_form == MT_ROTARY_PAIRS) mti_rotary_head(x, angles, 1.0f, half, 2, 1);
    else mti_rotary_head(x, angles, 1.0f, half, 1, half);
}

/* Rounds a row of head_dim numbers to the type of t, and stores it in row `row` of t. */
static void mti_kv_store(mt_tensor t, int64_t row, const float *x) {
    if (t.dtype == MT_F32) memcpy(mti_row(t, row), x, (size_t)t.cols * sizeof *x);
    else mt_f32_to_16bit(t.dtype, x, mti_row16(t, row), t.cols);
}

/* Adds token i of sequence b. */
static void mti_kv_append_token(const mti_kv *k, int64_t b, int64_t i) {
    const mt_attention_desc *s = &k->desc;
    int64_t position = mti_kv_before(k, b) + i, g, j;
    const float *angles = mti_row(k->table, position);
    float *x = mti_row(k->qkv, b * s->seq + i);
    for (g = 0; g < s->groups; g++) {
        float *key = x + k->cols.key + g * k->cols.kv_step;
        int64_t row = mti_kv_row(k, b, g) + position;
        for (j = 0; j < s->heads_per_group; j++) mti_kv_turn(k, angles, x + g * k->cols.q_step + j * s->head_dim);
        mti_kv_turn(k, angles, key);
        mti_kv_store(k->cache.keys, row, key);
        mti_kv_store(k->cache.values, row, key + k->cols.value);
    }
}

/* Adds tokens [first, last) of all sequences, of which each has desc.seq. */
static void mti_cpu_kv_cache_append(void *data, int thread, int64_t first, int64_t last) {
    const mti_kv *k = (const mti_kv *)data;
    int64_t t, seq = k->desc.seq;
    (void)thread;
    for (t = first; t < last; t++)
        if (t % seq < mti_kv_new(&k->desc, t / seq)) mti_kv_append_token(k, t / seq, t % seq);
}

/* A call of attention whose keys and values are not views: each sequence has its own number of them. */
static mti_attention mti_kv_resolve(const mti_kv *k) {
    mti_attention a = mti_attention_resolve(k->ctx, &k->desc, k->out, mt_none());
    a.q = k->qkv;
    a.k = k->cache.keys;
    a.v = k->cache.values;
    a.q_step = k->cols.q_step;
    a.desc.kv_seq = k->cache.max_seq;
    mti_attention_whole(&a.desc);
    a.desc.lengths = NULL;
    return a;
}

/* Packs the keys and values of a group of sequence b, as mti_attention_pack does. */
static void mti_kv_pack(const mti_kv *k, const mti_attention *a, int64_t b, int64_t g) {
    int64_t n = a->desc.kv_seq, row = mti_kv_row(k, b, g);
    mti_pack_features(a, a->k, row, 0, n, a->k_features);
    mti_pack_rows(a, a->v, row, 0, n, n, a->v_keys);
}

/* The attention of the queries of a group, in blocks of scores. */
static void mti_kv_blocks_group(const mti_kv *k, const mti_attention *a, int64_t b, int64_t g) {
    int64_t j;
    mti_kv_pack(k, a, b, g);
    for (j = 0; j < a->desc.heads_per_group; j++) {
        mti_head h = mti_attention_head(a, b, g, j);
        h.query = b * k->desc.seq;
        mti_attention_forward_head(a, &h);
    }
}

/* Attention with few queries reads MTI_KV_KEYS keys at a time, then their values. All queries of a group use them while
   they are in L1. */
#define MTI_KV_KEYS 256

/* The scratch memory of attention with few queries, of a thread or of all threads, one after the other. The rows of q,
   out and block have `width` floats: head_dim, rounded up to whole vectors, with zeros after head_dim. */
typedef struct mti_kv_few {
    int64_t width;
    float *q, *out; /* [MT_KV_DECODE_QUERIES, width]: token by token, each with its heads of the group */
    float *scores;  /* [MT_KV_DECODE_QUERIES, MTI_KV_KEYS] */
    float *block;   /* [MTI_KV_KEYS, width]: keys or values that cannot be read in place */
    mti_softmax softmax;
} mti_kv_few;

/* Memory that is read next, `rows` rows of `bytes` bytes: while the loops compute a row, they prefetch one of these.
   Without it, a processor waits at each change between keys and values. */
typedef struct mti_kv_ahead {
    const char *next;
    int64_t rows, bytes;
} mti_kv_ahead;

/* Prefetches rows [first, first + count), or those of them that there are. */
MT_INLINE void mti_kv_prefetch(mti_kv_ahead ahead, int64_t first, int64_t count) {
    int64_t at = first * ahead.bytes, end = mt_min(first + count, ahead.rows) * ahead.bytes;
    for (; at < end; at += 64) MTI_PREFETCH(ahead.next + at);
}

static mti_kv_ahead mti_kv_ahead_of(mt_tensor t, int64_t row, int64_t rows) {
    mti_kv_ahead ahead;
    ahead.rows = rows;
    ahead.bytes = t.cols * (int64_t)mt_dtype_size(t.dtype);
    ahead.next = (const char *)t.data + row * ahead.bytes;
    return ahead;
}

/* Keys or values as the loops below read them: rows of mti_kv_few.width numbers, one after the other, in f32 or
   bf16. */
typedef struct mti_kv_block {
    const char *data;
    int is_bf16;
} mti_kv_block;

#if (defined(__clang__) || defined(__GNUC__)) && !defined(__CUDACC__)
#if defined(__clang__) || __GNUC__ >= 9
#define MTI_KV_BF16 1
typedef uint16_t mti_simd_half __attribute__((vector_size(2 * MTI_SIMD)));
typedef uint32_t mti_simd_word __attribute__((vector_size(4 * MTI_SIMD)));
#endif

/* Loads MTI_SIMD numbers from number `at` on. */
MT_INLINE mti_simd mti_kv_vector(int is_bf16, const char *data, int64_t at) {
    mti_simd x;
#ifdef MTI_KV_BF16
    if (is_bf16) {
        mti_simd_half half;
        mti_simd_word word;
        memcpy(&half, data + 2 * at, sizeof half);
        word = __builtin_convertvector(half, mti_simd_word) << 16;
        memcpy(&x, &word, sizeof x);
        return x;
    }
#endif
    (void)is_bf16;
    memcpy(&x, data + 4 * at, sizeof x);
    return x;
}

/* The sum of x in four parts: lane l of the result has the lanes l, l + 4, l + 8, ... of x. */
MT_INLINE mti_float4 mti_kv_fold(mti_simd x) {
    mti_float4 part[MTI_SIMD / 4];
    memcpy(part, &x, sizeof x);
#if MTI_SIMD == 16
    return (part[0] + part[2]) + (part[1] + part[3]);
#elif MTI_SIMD == 8
    return part[0] + part[1];
#else
    return part[0];
#endif
}

/* out[i] = scale * q k for four keys k, which begin at the numbers at[i] of the block. */
MT_INLINE void mti_kv_dot4(int is_bf16, const float *q, const char *keys, const int64_t at[4], int64_t width,
                           float scale, float *out) {
    mti_simd s[4], x, zero = {0};
    mti_float4 f[4], ab, cd;
    int64_t d;
    int i;
    MTI_UNROLL
    for (i = 0; i < 4; i++) s[i] = zero;
    for (d = 0; d < width; d += MTI_SIMD) {
        memcpy(&x, q + d, sizeof x);
        MTI_UNROLL
        for (i = 0; i < 4; i++) s[i] += x * mti_kv_vector(is_bf16, keys, at[i] + d);
    }
    MTI_UNROLL
    for (i = 0; i < 4; i++) f[i] = mti_kv_fold(s[i]);
    ab = MTI_SHUFFLE(f[0], f[1], 0, 4, 1, 5) + MTI_SHUFFLE(f[0], f[1], 2, 6, 3, 7);
    cd = MTI_SHUFFLE(f[2], f[3], 0, 4, 1, 5) + MTI_SHUFFLE(f[2], f[3], 2, 6, 3, 7);
    ab = (MTI_SHUFFLE(ab, cd, 0, 1, 4, 5) + MTI_SHUFFLE(ab, cd, 2, 3, 6, 7)) * scale;
    memcpy(out, &ab, sizeof ab);
}

/* out[r] += the sum of p[r][j] values[j] over n values, for `rows` rows of out and p, and MTI_NR features from d on. */
MT_INLINE void mti_kv_sum_tile(int rows, int is_bf16, const float *p, const char *values, int64_t width, int64_t d,
                               int64_t n, mti_kv_ahead ahead, float *out) {
    mti_simd s[4][2], x, y;
    int64_t j;
    int r;
    MTI_UNROLL
    for (r = 0; r < rows; r++) memcpy(s[r], out + r * width + d, sizeof s[r]);
    for (j = 0; j < n; j++) {
        mti_kv_prefetch(ahead, j, 1);
        x = mti_kv_vector(is_bf16, values, j * width + d);
        y = mti_kv_vector(is_bf16, values, j * width + d + MTI_SIMD);
        MTI_UNROLL
        for (r = 0; r < rows; r++) {
            s[r][0] = mti_simd_fma(p[r * MTI_KV_KEYS + j], x, s[r][0]);
            s[r][1] = mti_simd_fma(p[r * MTI_KV_KEYS + j], y, s[r][1]);
        }
    }
    MTI_UNROLL
    for (r = 0; r < rows; r++) memcpy(out + r * width + d, s[r], sizeof s[r]);
}
#else
MT_INLINE void mti_kv_dot4(int is_bf16, const float *q, const char *keys, const int64_t at[4], int64_t width,
                           float scale, float *out) {
    int i;
    (void)is_bf16;
    for (i = 0; i < 4; i++) out[i] = scale * mti_row_dot(q, (const float *)(const void *)keys + at[i], width);
}

MT_INLINE void mti_kv_sum_tile(int rows, int is_bf16, const float *p, const char *values, int64_t width, int64_t d,
                               int64_t n, mti_kv_ahead ahead, float *out) {
    const float *v = (const float *)(const void *)values + d;
    int64_t r, j, i;
    (void)is_bf16, (void)ahead;
    for (r = 0; r < rows; r++)
        for (j = 0; j < n; j++)
            for (i = 0; i < MTI_NR; i++) out[r * width + d + i] += p[r * MTI_KV_KEYS + j] * v[j * width + i];
}
#endif

/* out[j] = scale * q keys[j] for n keys. Writes up to three more numbers. */
MT_INLINE void mti_kv_scores_of(int is_bf16, const float *q, const char *keys, int64_t width, int64_t n, float scale,
                                mti_kv_ahead ahead, float *out) {
    int64_t j, i, at[4];
    for (j = 0; j < n; j += 4) {
        mti_kv_prefetch(ahead, j, 4);
        for (i = 0; i < 4; i++) at[i] = mt_min(j + i, n - 1) * width;
        mti_kv_dot4(is_bf16, q, keys, at, width, scale, out + j);
    }
}

static void mti_kv_scores(const float *q, mti_kv_block keys, int64_t width, int64_t n, float scale, mti_kv_ahead ahead,
                          float *out) {
    if (keys.is_bf16) mti_kv_scores_of(1, q, keys.data, width, n, scale, ahead, out);
    else mti_kv_scores_of(0, q, keys.data, width, n, scale, ahead, out);
}

/* out += p values, for `rows` <= 4 rows of p and n values. */
MT_INLINE void mti_kv_sums_of(int64_t rows, int is_bf16, const float *p, const char *values, int64_t width, int64_t n,
                              mti_kv_ahead ahead, float *out) {
    int64_t d;
    for (d = 0; d < width; d += MTI_NR, ahead.rows = 0) {
        if (rows == 1) mti_kv_sum_tile(1, is_bf16, p, values, width, d, n, ahead, out);
        else if (rows == 2) mti_kv_sum_tile(2, is_bf16, p, values, width, d, n, ahead, out);
        else if (rows == 3) mti_kv_sum_tile(3, is_bf16, p, values, width, d, n, ahead, out);
        else mti_kv_sum_tile(4, is_bf16, p, values, width, d, n, ahead, out);
    }
}

/* out += p values, for `rows` rows of p and n values. */
static void mti_kv_sums(int64_t rows, const float *p, mti_kv_block values, int64_t width, int64_t n, mti_kv_ahead ahead,
                        float *out) {
    int64_t r;
    for (r = 0; r < rows; r += 4, ahead.rows = 0) {
        const float *of = p + r * MTI_KV_KEYS;
        float *to = out + r * width;
        if (values.is_bf16) mti_kv_sums_of(mt_min(4, rows - r), 1, of, values.data, width, n, ahead, to);
        else mti_kv_sums_of(mt_min(4, rows - r), 0, of, values.data, width, n, ahead, to);
    }
}

static mt_status mti_kv_few_scratch(mti_attention *a, int64_t threads, mti_kv_few *f) {
    f->width = mt_round_up(a->desc.head_dim, MTI_NR);
    MT_TRY(mti_attention_floats(a, threads * MT_KV_DECODE_QUERIES * f->width, &f->q));
    MT_TRY(mti_attention_floats(a, threads * MT_KV_DECODE_QUERIES * f->width, &f->out));
    MT_TRY(mti_attention_floats(a, threads * MT_KV_DECODE_QUERIES * MTI_KV_KEYS, &f->scores));
    return mti_attention_floats(a, threads * MTI_KV_KEYS * f->width, &f->block);
}

/* Returns the part of a thread. */
static mti_kv_few mti_kv_few_of(const mti_kv_few *all, int thread) {
    mti_kv_few f = *all;
    f.q += thread * MT_KV_DECODE_QUERIES * f.width;
    f.out += thread * MT_KV_DECODE_QUERIES * f.width;
    f.scores += thread * MT_KV_DECODE_QUERIES * MTI_KV_KEYS;
    f.block += thread * MTI_KV_KEYS * f.width;
    return f;
}

/* Returns whether the loops can read a cache where it is. For more than two queries, converting bf16 once is faster. */
static int mti_kv_in_place(const mti_kv_few *f, mt_tensor t, int64_t queries) {
    if (t.cols != f->width) return 0;
#ifdef MTI_KV_BF16
    if (t.dtype == MT_BF16) return queries <= 2;
#endif
    (void)queries;
    return t.dtype == MT_F32;
}

/* Returns n rows of a cache, from `row` on: in place, or as f32 in f->block. */
static mti_kv_block mti_kv_rows(mti_kv_few *f, mt_tensor t, int64_t row, int64_t n, int64_t queries) {
    mti_kv_block out;
    int64_t j;
    out.is_bf16 = 0;
    out.data = (const char *)f->block;
    if (mti_kv_in_place(f, t, queries)) {
        out.is_bf16 = t.dtype == MT_BF16;
        out.data = (const char *)t.data + row * t.cols * (int64_t)mt_dtype_size(t.dtype);
        return out;
    }
    if (t.cols == f->width) mti_cpu_load(t, row, 0, n * t.cols, f->block);
    for (j = 0; t.cols < f->width && j < n; j++) {
        mti_cpu_load(t, row + j, 0, t.cols, f->block + j * f->width);
        mti_row_fill(f->block + j * f->width + t.cols, 0.0f, f->width - t.cols);
    }
    return out;
}

/* The keys of the block [key, key + n) that query i sees, as numbers in the block. */
static mti_span mti_kv_seen(const mti_attention *a, int64_t i, int64_t key, int64_t n) {
    mti_span seen = mti_span_of_both(mti_keys_of(&a->desc, a->desc.kv_seq, 0, i), key, key + n);
    seen.first = mt_min(seen.first - key, n);
    seen.end = mt_max(seen.end - key, seen.first);
    return seen;
}

/* Adds the block of keys [key, key + n) of a group to the softmax and the outputs of its queries. */
static void mti_kv_few_block(const mti_kv *k, const mti_attention *a, mti_kv_few *f, int64_t b, int64_t g, int64_t key,
                             int64_t n) {
    const mt_attention_desc *s = &a->desc;
    int64_t row = mti_kv_row(k, b, g) + key, queries = s->seq * s->heads_per_group, r;
    mti_kv_block keys = mti_kv_rows(f, k->cache.keys, row, n, queries);
    mti_kv_ahead values = mti_kv_ahead_of(k->cache.values, row, n);
    mti_kv_ahead next = mti_kv_ahead_of(k->cache.keys, row + n, mt_min(n, s->kv_seq - key - n));
    for (r = 0; r < queries; r++) {
        mti_head h = mti_attention_head(a, b, g, r % s->heads_per_group);
        int64_t i = r / s->heads_per_group;
        mti_span seen = mti_kv_seen(a, i, key, n);
        float *p = f->scores + r * MTI_KV_KEYS, *out = f->out + r * f->width;
        if (seen.end > seen.first) {
            mti_kv_scores(f->q + r * f->width, keys, f->width, n, s->scores.scale, values, p);
            values.rows = 0;
        }
        if (seen.end > seen.first && mti_softmax_add(a, &h, &f->softmax, r, i, key, p, seen, out))
            seen = mti_span_whole(seen);
        else seen.end = seen.first;
        mti_attention_zero_outside(p, seen.first, seen.end, n);
    }
    mti_kv_sums(queries, f->scores, mti_kv_rows(f, k->cache.values, row, n, queries), f->width, n, next, f->out);
}

/* The attention of the queries of a group. */
static void mti_kv_few_group(const mti_kv *k, const mti_attention *a, mti_kv_few *f, int64_t b, int64_t g) {
    const mt_attention_desc *s = &a->desc;
    int64_t queries = s->seq * s->heads_per_group, key = mti_keys_of(s, s->kv_seq, 0, 0).first, r, n;
    mti_row_fill(f->softmax.top, -(float)INFINITY, queries);
    mti_row_fill(f->softmax.sum, 0.0f, queries);
    mti_row_fill(f->out, 0.0f, queries * f->width);
    for (r = 0; r < queries; r++) {
        mti_head h = mti_attention_head(a, b, g, r % s->heads_per_group);
        float *q = f->q + r * f->width;
        mti_cpu_load(a->q, b * k->desc.seq + r / s->heads_per_group, h.q_col, s->head_dim, q);
        mti_row_fill(q + s->head_dim, 0.0f, f->width - s->head_dim);
    }
    for (; key < s->kv_seq; key += n) {
        n = mt_min(MTI_KV_KEYS, s->kv_seq - key);
        mti_kv_few_block(k, a, f, b, g, key, n);
    }
    for (r = 0; r < queries; r++) {
        mti_head h = mti_attention_head(a, b, g, r % s->heads_per_group);
        float *out = f->out + r * f->width, sum = f->softmax.sum[r];
        mti_row_scale(out, sum == 0.0f ? 0.0f : 1.0f / sum, s->head_dim);
        mti_kv_store(mt_tensor_cols(a->out, h.out_col, s->head_dim), b * k->desc.seq + r / s->heads_per_group, out);
    }
}

/* Returns 1 if a call has few queries. In invariant mode all calls compute blocks, so that a query has the same bits in
   every call. */
static int mti_kv_is_few(const mti_kv *k) {
    return !mt_context_invariant(k->ctx) && k->desc.heads_per_group <= MT_KV_DECODE_QUERIES / k->desc.seq;
}

/* The arguments and the scratch memory of the loop. */
typedef struct mti_kv_loop {
    const mti_kv *k;
    mti_attention a;
    int is_few;
    mti_kv_few few;
} mti_kv_loop;

/* Computes the attention of a group of sequence b. desc gets its numbers of queries and keys. Tokens behind the new
   ones get zeros. */
static void mti_kv_attention_group(mti_kv_loop *l, int64_t b, int64_t g) {
    const mti_kv *k = l->k;
    int64_t n = mti_kv_new(&k->desc, b);
    l->a.desc.seq = n;
    l->a.desc.kv_seq = mti_kv_before(k, b) + n;
    mti_attention_whole(&l->a.desc);
    if (n > 0 && l->is_few) mti_kv_few_group(k, &l->a, &l->few, b, g);
    if (n > 0 && !l->is_few) mti_kv_blocks_group(k, &l->a, b, g);
    if (g == 0) mti_attention_clear(mt_tensor_rows(k->out, b * k->desc.seq + n, k->desc.seq - n));
}

/* Item b * groups + g is group g of sequence b. */
static void mti_kv_attention_groups(void *data, int thread, int64_t first, int64_t last) {
    mti_kv_loop l = *(const mti_kv_loop *)data;
    int64_t i, groups = l.k->desc.groups;
    if (l.is_few) l.few = mti_kv_few_of(&l.few, thread);
    else l.a = mti_attention_of_thread(&l.a, thread);
    if (l.a.tiles) mti_tiles_begin();
    for (i = first; i < last; i++) mti_kv_attention_group(&l, i / groups, i % groups);
    if (l.a.tiles) mti_tiles_end();
}

/* The number of elements of keys and values that each query of a group reads, on average over the sequences. */
static int64_t mti_kv_elements(const mti_kv *k) {
    int64_t keys = 0, b;
    for (b = 0; b < k->desc.batch; b++) keys += mti_kv_before(k, b) + mti_kv_new(&k->desc, b);
    return 2 * k->desc.heads_per_group * k->desc.head_dim * (keys / k->desc.batch + 1);
}

/* Attention on a CPU. A meta context allocates the scratch memory as well. Each thread computes some of the groups. */
static mt_status mti_kv_attention_loop(mti_operator *op, mti_kv *k) {
    int64_t items = k->desc.batch * k->desc.groups;
    mti_kv_loop l;
    if (mti_is_empty(k->qkv)) return MT_SUCCESS;
    memset(&l, 0, sizeof l);
    l.k = k;
    l.a = mti_kv_resolve(k);
    l.is_few = mti_kv_is_few(k);
    l.a.threads = mt_min(items, mt_context_threads(k->ctx));
    if (l.is_few) MT_TRY(mti_kv_few_scratch(&l.a, l.a.threads, &l.few));
    else MT_TRY(mti_attention_scratch(&l.a, 0));
    if (op->on_cpu) mti_cpu_rows(k->ctx, items, mti_kv_elements(k), mti_kv_attention_groups, &l);
    return MT_SUCCESS;
}

/* Notes the work of attention. The lengths are in memory that a meta context does not have: all positions count. */
static void mti_kv_work(mti_operator *op, const mti_kv *k) {
    const mt_attention_desc *s = &k->desc;
    double queries = (double)(s->batch * s->seq) * (double)mti_attention_heads(s);
    if (!op->work.name) return;
    op->work.work = MT_WORK_ATTENTION;
    op->work.flops = 4.0 * queries * (double)k->cache.max_seq * (double)s->head_dim;
}

#include "kv_cache.cuh"
#include "kv_tiles.cuh"
#include "kv_choice.cuh"

/* clang-format off */
static const mti_table mti_kv_cache_append_table = {"mt_kv_cache_append",
    {"qkv table keys values", "RR** cR**", "rR**"}, {
    {"qkv", "AB", MT_ARG_FLOAT, MT_ARG_IN_OUT, NULL},
    {"table", "EF", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL, NULL},
    {"keys", "CD", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, "*"},
    {"values", "CD", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, "*"}}};

static const mti_table mti_kv_cache_attention_table = {"mt_kv_cache_attention",
    {"qkv keys values out", "R**R c**c", "r**r"}, {
    {"qkv", "AB", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"keys", "CD", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"values", "CD", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"out", "AE", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, "*"}}};
/* clang-format on */

MT_API mt_status mt_kv_cache_append(mt_context *ctx, const mt_attention_desc *desc, mt_tensor table, mt_tensor qkv,
                                    const mt_kv_cache *cache) {
    static const char *const where = "mt_kv_cache_append";
    mti_kv k;
    mti_operator op;
    MT_TRY(mti_kv_check(ctx, where, desc, qkv, cache, &k));
    if (table.data) MT_TRY(mti_expect_rotary(ctx, where, desc));
    else if (desc->scores.rotary_base > 0.0f)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: scores.rotary_base is %g, but table is mt_none()", where,
                       (double)desc->scores.rotary_base);
    const int64_t rows = desc->batch * desc->groups * cache->max_seq, tokens = desc->batch * desc->seq;
    const int64_t sizes[] = {tokens,         mti_attention_width(desc), rows, desc->head_dim,
                             cache->max_seq, mti_rotary_dim(desc)};
    mt_tensor *views[] = {&k.qkv, &table, &k.cache.keys, &k.cache.values};
    MT_TRY(mti_accept(&op, ctx, &mti_kv_cache_append_table, views, sizes));
    MT_TRY(mti_kv_expect_lengths(&k, where));
    MT_TRY(mti_expect_qkv_parts(ctx, where, desc, "qkv", qkv));
    MT_TRY(mti_begin(&op));
    k.table = table;
    /* reads the whole qkv and the row of the table for each token, writes the turned part back, and the cache */
    op.work.bytes = (double)tokens * (double)mt_dtype_size(qkv.dtype) * (double)desc->head_dim * (double)desc->groups *
                    (double)((table.data ? 2 : 1) * (desc->heads_per_group + 1) + 3);
    return mti_end(&op, MTI_RUN(&op, mti_cuda_kv_cache_append(&k),
                                mti_cpu_rows(ctx, tokens, k.qkv.cols, mti_cpu_kv_cache_append, &k)));
}

MT_API mt_status mt_kv_cache_attention(mt_context *ctx, const mt_attention_desc *desc, mt_tensor qkv,
                                       const mt_kv_cache *cache, mt_tensor out) {
    static const char *const where = "mt_kv_cache_attention";
    mti_kv k;
    mti_operator op;
    MT_TRY(mti_kv_check(ctx, where, desc, qkv, cache, &k));
    MT_TRY(mt_check_size(ctx, where, NULL, "heads_per_group", desc->heads_per_group, 1, INT64_MAX - 2));
    const int64_t rows = desc->batch * desc->groups * cache->max_seq, tokens = desc->batch * desc->seq;
    const int64_t sizes[] = {tokens, mti_attention_width(desc), rows, desc->head_dim,
                             mti_attention_heads(desc) * desc->head_dim};
    mt_tensor *views[] = {&k.qkv, &k.cache.keys, &k.cache.values, &k.out};
    k.out = out;
    MT_TRY(mti_accept(&op, ctx, &mti_kv_cache_attention_table, views, sizes));
    MT_TRY(mti_kv_expect_lengths(&k, where));
    MT_TRY(mti_expect_qkv_parts(ctx, where, desc, "qkv", qkv));
    MT_TRY(mti_begin(&op));
    mti_kv_work(&op, &k);
    return mti_end(&op, MTI_CHOOSE(&op, mti_cuda_kv_cache_attention(&k), mti_kv_attention_loop(&op, &k)));
}
