/* ---- attention: arguments and scratch memory --------------------------------------------------------------------- */

#pragma once
#include "amx.c"
#include "dropout.c"
#include "../comm/context.c"

/* Checks that the queries or keys of a call are a part of whole sequences. */
static mt_status mti_expect_part_of(mt_context *ctx, const char *where, const char *first, int64_t from,
                                    const char *name, int64_t count, const char *whole, int64_t all) {
    MT_TRY(mt_check_size(ctx, where, NULL, first, from, 0, INT_MAX));
    if (from + count <= all) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s %lld + %s %lld is more than %s %lld", where, first, (long long)from, name,
                   (long long)count, whole, (long long)all);
}

static mt_status mti_expect_part(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    const mt_attention_part *p = &s->part;
    const int64_t keys = s->kv_seq ? s->kv_seq : s->seq;
    MT_TRY(mt_check_size(ctx, where, NULL, "part.seq", p->seq, 0, INT_MAX));
    MT_TRY(mt_check_size(ctx, where, NULL, "part.kv_seq", p->kv_seq, 0, INT_MAX));
    if (p->seq == 0 && (p->kv_seq != 0 || p->first_query != 0 || p->first_key != 0))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: part.seq is 0, but another field of part is set", where);
    if (p->seq == 0) return MT_SUCCESS;
    MT_TRY(mti_expect_part_of(ctx, where, "part.first_query", p->first_query, "seq", s->seq, "part.seq", p->seq));
    return p->kv_seq
               ? mti_expect_part_of(ctx, where, "part.first_key", p->first_key, "kv_seq", keys, "part.kv_seq",
                                    p->kv_seq)
               : mti_expect_part_of(ctx, where, "part.first_key", p->first_key, "kv_seq", keys, "part.seq", p->seq);
}

/* Checks the sizes in desc, and that the shapes of the argument tables below do not overflow. */
static mt_status mti_expect_heads(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    int64_t longest;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!s) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc is NULL", where);
    MT_TRY(mt_check_size(ctx, where, NULL, "batch", s->batch, 0, INT64_MAX));
    MT_TRY(mt_check_size(ctx, where, NULL, "seq", s->seq, 1, INT_MAX));
    MT_TRY(mt_check_size(ctx, where, NULL, "groups", s->groups, 1, INT64_MAX));
    MT_TRY(mt_check_size(ctx, where, NULL, "heads_per_group", s->heads_per_group, 1, INT64_MAX - 2));
    MT_TRY(mt_check_size(ctx, where, NULL, "head_dim", s->head_dim, 1, INT64_MAX));
    MT_TRY(mt_check_size(ctx, where, NULL, "kv_seq", s->kv_seq, 0, INT_MAX));
    MT_TRY(mti_expect_part(ctx, where, s));
    longest = mt_max(mt_max(s->seq, s->kv_seq), mt_max(s->part.seq, s->part.kv_seq));
    if (mt_size_mul(s->batch, longest) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: a batch of %lld sequences of %lld tokens has too many tokens", where,
                       (long long)s->batch, (long long)longest);
    if (mt_size_mul(mt_size_mul(s->groups, s->heads_per_group + 2), s->head_dim) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %lld groups of %lld heads of %lld features have too many columns", where,
                       (long long)s->groups, (long long)s->heads_per_group, (long long)s->head_dim);
    return mt_check_enum(ctx, where, NULL, "qkv_layout", (int)s->qkv_layout, MT_QKV_LAYOUT_WORDS);
}

/* In this layout, the columns of qkv are those of all queries, if it has any, then of all keys, then of all values. */
static mt_status mti_expect_qkv_parts(mt_context *ctx, const char *where, const mt_attention_desc *s, const char *name,
                                      mt_tensor qkv) {
    if (s->qkv_layout != MT_QKV_CONCATENATED || s->heads_per_group > 1) return MT_SUCCESS;
    return mt_parts_check(ctx, where, name, qkv, s->heads_per_group ? 3 : 2);
}

static int64_t mti_attention_heads(const mt_attention_desc *s) { return s->groups * s->heads_per_group; }

/* Where the heads are in the columns of qkv: head j of group g at g * q_step + j * head_dim, the key of group g at
   key + g * kv_step, and its value `value` columns after the key. */
typedef struct mti_qkv_cols {
    int64_t q_step, kv_step, key, value;
} mti_qkv_cols;

static mti_qkv_cols mti_qkv_cols_of(const mt_attention_desc *s) {
    mti_qkv_cols c;
    int per_group = s->qkv_layout == MT_QKV_PER_GROUP;
    c.q_step = (per_group ? s->heads_per_group + 2 : s->heads_per_group) * s->head_dim;
    c.kv_step = per_group ? c.q_step : s->head_dim;
    c.key = (per_group ? s->heads_per_group : mti_attention_heads(s)) * s->head_dim;
    c.value = per_group ? s->head_dim : s->groups * s->head_dim;
    return c;
}

/* The number of columns of qkv. */
static int64_t mti_attention_width(const mt_attention_desc *s) {
    return s->groups * (s->heads_per_group + 2) * s->head_dim;
}

/* Whether a desc without defaults has other than whole sequences. */
static int mti_has_part(const mt_attention_desc *s) { return s->part.seq != s->seq || s->part.kv_seq != s->kv_seq; }

/* Sets the part of a call that has whole sequences. */
static void mti_attention_whole(mt_attention_desc *s) {
    memset(&s->part, 0, sizeof s->part);
    s->part.seq = s->seq;
    s->part.kv_seq = s->kv_seq;
}

/* Sets the fields whose 0 means another number. */
static mt_attention_desc mti_attention_defaults(const mt_attention_desc *desc) {
    mt_attention_desc s = *desc;
    if (s.kv_seq == 0) s.kv_seq = s.seq;
    if (s.part.seq == 0) mti_attention_whole(&s);
    if (s.part.kv_seq == 0) s.part.kv_seq = s.part.seq;
    s.scores.window = mt_min(s.scores.window, s.part.seq + s.part.kv_seq); /* hides nothing; it must not overflow */
    if (s.bias.batch == 0) s.bias.batch = 1;
    if (s.bias.heads == 0) s.bias.heads = 1;
    s.scores.scale = mt_or_default(s.scores.scale, (float)(1.0 / sqrt((double)s.head_dim)));
    return s;
}

static mt_status mti_expect_lengths(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    int64_t b;
    if (!s->lengths || mt_context_device(ctx) != MT_DEVICE_CPU) return MT_SUCCESS;
    for (b = 0; b < s->batch; b++)
        if (s->lengths[b] < 0 || s->lengths[b] > s->part.kv_seq)
            return mt_fail(ctx, MT_ERR_DATA, "%s: lengths[%lld] is %ld, must be in [0, %lld]", where, (long long)b,
                           (long)s->lengths[b], (long long)s->part.kv_seq);
    return MT_SUCCESS;
}

/* Checks the documents of tokens. cu_seqlens ends with a number in [least, most]. */
static mt_status mti_expect_cu_seqlens(mt_context *ctx, const char *where, const int32_t *cu_seqlens, int64_t documents,
                                       int64_t least, int64_t most) {
    int64_t d;
    if (!cu_seqlens && documents == 0) return MT_SUCCESS;
    if (!cu_seqlens || documents < 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: documents is %lld, but cu_seqlens is %s", where, (long long)documents,
                       cu_seqlens ? "set" : "NULL");
    if (mt_context_device(ctx) != MT_DEVICE_CPU) return MT_SUCCESS;
    for (d = 0; d <= documents; d++)
        if (cu_seqlens[d] < (d > 0 ? cu_seqlens[d - 1] : 0) || (d == 0 && cu_seqlens[0] > 0) || cu_seqlens[d] > most ||
            (d == documents && cu_seqlens[d] < least))
            return mt_fail(ctx, MT_ERR_DATA,
                           "%s: cu_seqlens[%lld] is %ld; the numbers must ascend from 0 to %s%lld, the tokens", where,
                           (long long)d, (long)cu_seqlens[d], least < most ? "at least " : "", (long long)least);
    return MT_SUCCESS;
}

/* s has no defaults left. */
static mt_status mti_expect_documents(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    int64_t tokens = s->batch * s->part.seq;
    if (s->cu_seqlens && s->part.kv_seq != s->part.seq)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: with cu_seqlens, kv_seq %lld must be seq %lld", where,
                       (long long)s->part.kv_seq, (long long)s->part.seq);
    return mti_expect_cu_seqlens(ctx, where, s->cu_seqlens, s->documents, tokens, tokens);
}

/* Checks the fields of the bias, except the shapes of its views. */
static mt_status mti_expect_bias(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    int64_t heads = mti_attention_heads(s);
    if (s->bias.batch != 1 && s->bias.batch != s->batch)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: bias.batch is %lld, must be 1 or %lld", where, (long long)s->bias.batch,
                       (long long)s->batch);
    MT_TRY(mt_check_size(ctx, where, NULL, "bias.first_head", s->bias.first_head, 0, INT64_MAX));
    if (s->bias.heads != 1 && (s->bias.heads < heads || s->bias.first_head > s->bias.heads - heads))
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: bias.heads is %lld, must be 1 or at least bias.first_head %lld + %lld heads", where,
                       (long long)s->bias.heads, (long long)s->bias.first_head, (long long)heads);
    if (mt_size_mul(mt_size_mul(mt_size_mul(s->bias.batch, s->bias.heads), s->part.seq), s->part.kv_seq) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: bias.batch %lld, bias.heads %lld, seq %lld: a bias has too many rows",
                       where, (long long)s->bias.batch, (long long)s->bias.heads, (long long)s->part.seq);
    if (s->bias.value.data && s->bias.value.dtype != MT_U8 && !mt_dtype_is_float(s->bias.value.dtype))
        return mt_fail(ctx, MT_ERR_DTYPE, "%s: bias is %s, must be f32, bf16 or f16, or u8 for a mask", where,
                       mt_dtype_name(s->bias.value.dtype));
    return MT_SUCCESS;
}

/* Checks the range of each field. rotary_dim, whose limit is the size of a head, is left to the caller. name: of the
   layer that has the desc; NULL: none has */
MT_API mt_status mt_scores_check(mt_context *ctx, const char *function, const char *name, const mt_scores_desc *s) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!s) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: scores is NULL", function);
    MT_TRY(mt_check_enum(ctx, function, name, "scores.mask", (int)s->mask, MT_MASK_WORDS));
    MT_TRY(mt_check_float(ctx, function, name, "scores.rotary_base", s->rotary_base, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mt_check_enum(ctx, function, name, "scores.rotary_form", (int)s->rotary_form, MT_ROTARY_FORM_WORDS));
    MT_TRY(mt_check_integer(ctx, function, name, "scores.window", s->window, 0, INT64_MAX));
    MT_TRY(mt_check_float(ctx, function, name, "scores.softcap", s->softcap, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mt_check_integer(ctx, function, name, "scores.alibi", s->alibi, 0, 1));
    return mt_check_float(ctx, function, name, "scores.scale", s->scale, MT_FLOAT_FINITE);
}

static mt_status mti_expect_slopes(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    int64_t heads = mti_attention_heads(s), h;
    if (s->scores.alibi != (s->scores.alibi_slopes != NULL))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: scores.alibi is %d, but alibi_slopes is %s", where, s->scores.alibi,
                       s->scores.alibi_slopes ? "set" : "NULL");
    for (h = 0; s->scores.alibi_slopes && mt_context_device(ctx) == MT_DEVICE_CPU && h < heads; h++)
        if (!(s->scores.alibi_slopes[h] >= 0.0f && s->scores.alibi_slopes[h] <= FLT_MAX))
            return mt_fail(ctx, MT_ERR_DATA, "%s: alibi_slopes[%lld] is %g, must be at least 0", where, (long long)h,
                           (double)s->scores.alibi_slopes[h]);
    return MT_SUCCESS;
}

/* Checks the fields that change scores. */
static mt_status mti_expect_scores(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    MT_TRY(mt_scores_check(ctx, where, NULL, &s->scores));
    MT_TRY(mti_expect_slopes(ctx, where, s));
    MT_TRY(mti_expect_bias(ctx, where, s));
    return mti_expect_documents(ctx, where, s);
}

/* s has no defaults left. */
static mt_status mti_expect_attention(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    int64_t heads = mti_attention_heads(s);
    MT_TRY(mti_expect_scores(ctx, where, s));
    MT_TRY(mti_expect_dropout(ctx, where, s->dropout, s->batch, heads));
    if (s->dropout.p > 0.0f &&
        mt_size_mul(
            mt_size_mul(mt_size_mul(s->dropout.at.first_row + s->batch, s->dropout.at.global_cols), s->part.seq),
            s->part.kv_seq) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: sequence %lld + %lld of %lld heads, seq %lld, kv_seq %lld: a probability has no 64-bit "
                       "element number",
                       where, (long long)s->dropout.at.first_row, (long long)s->batch,
                       (long long)s->dropout.at.global_cols, (long long)s->part.seq, (long long)s->part.kv_seq);
    return mti_expect_lengths(ctx, where, s);
}

/* The numbers [first, end) of the keys that a query sees, or of the queries that see a key. None if end <= first. */
typedef struct mti_span {
    int64_t first, end;
} mti_span;

/* The span of both. */
MT_INLINE MT_HOST_DEVICE mti_span mti_span_of_both(mti_span a, int64_t first, int64_t end) {
    if (first > a.first) a.first = first;
    if (end < a.end) a.end = end;
    return a;
}

/* Narrows `all` to the tokens that are in one document with the token at `position` in sequence b. The numbers of the
   span count from the token `first` of the sequence on. A binary search finds the last document that begins at or
   before the token. */
MT_INLINE MT_HOST_DEVICE mti_span mti_document_of(const mt_attention_desc *s, int64_t b, int64_t position,
                                                  int64_t first, mti_span all) {
    int64_t low = 0, high = s->documents, token = b * s->part.seq + position;
    if (!s->cu_seqlens) return all;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (s->cu_seqlens[middle] <= token) low = middle;
        else high = middle;
    }
    first += b * s->part.seq;
    return mti_span_of_both(all, s->cu_seqlens[low] - first, s->cu_seqlens[low + 1] - first);
}

/* The position of token i of sequence b in its document, or in its sequence if the document began before it. It is at
   least 0 and at most that in the sequence, whatever cu_seqlens holds. */
MT_INLINE MT_HOST_DEVICE int64_t mti_document_position(const mt_attention_desc *s, int64_t b, int64_t i) {
    int64_t position = s->part.first_query + i;
    mti_span all = {0, position};
    all = mti_document_of(s, b, position, 0, all);
    return all.first < position ? position - all.first : 0;
}

/* The number of the key at the position of query 0. It may be that of no key of the call. */
MT_INLINE MT_HOST_DEVICE int64_t mti_key_of_query(const mt_attention_desc *s) {
    return s->part.first_query + s->part.kv_seq - s->part.seq - s->part.first_key;
}

/* The keys of the call that are no padding, of which sequence b has `length` in all. */
MT_INLINE MT_HOST_DEVICE int64_t mti_keys_here(const mt_attention_desc *s, int64_t length) {
    length -= s->part.first_key;
    return length < 0 ? 0 : length < s->kv_seq ? length : s->kv_seq;
}

/* The keys that query i of sequence b sees. `length` keys of the call are no padding. */
MT_INLINE MT_HOST_DEVICE mti_span mti_keys_of(const mt_attention_desc *s, int64_t length, int64_t b, int64_t i) {
    int64_t position = i + mti_key_of_query(s);
    mti_span all = {0, length};
    all = mti_document_of(s, b, s->part.first_query + i, s->part.first_key, all);
    if (s->scores.mask == MT_MASK_CAUSAL) all = mti_span_of_both(all, 0, position + 1);
    return s->scores.window > 0 ? mti_span_of_both(all, position - s->scores.window + 1, position + s->scores.window)
                                : all;
}

/* The queries that see key j of sequence b. */
MT_INLINE MT_HOST_DEVICE mti_span mti_queries_of(const mt_attention_desc *s, int64_t length, int64_t b, int64_t j) {
    int64_t i = j - mti_key_of_query(s); /* the query at the key's position */
    mti_span all = {0, j < length ? s->seq : 0};
    all = mti_document_of(s, b, s->part.first_key + j, s->part.first_query, all);
    if (s->scores.mask == MT_MASK_CAUSAL) all = mti_span_of_both(all, i, s->seq);
    return s->scores.window > 0 ? mti_span_of_both(all, i - s->scores.window + 1, i + s->scores.window) : all;
}

/* The row of desc.bias.value and desc.bias.grad for query i of a head of sequence b. Key j has column first_key + j. */
MT_INLINE MT_HOST_DEVICE int64_t mti_bias_row(const mt_attention_desc *s, int64_t b, int64_t head, int64_t i) {
    int64_t sequence = s->bias.batch > 1 ? b : 0, of_head = s->bias.heads > 1 ? s->bias.first_head + head : 0;
    return (sequence * s->bias.heads + of_head) * s->part.seq + s->part.first_query + i;
}

/* A CPU computes the scores of MTI_QUERIES queries and MTI_KEYS keys at a time, a block that stays in L2. Both are
   multiples of every MTI_MR and of MTI_TILES, and MTI_KEYS of every MTI_NR and of MTI_PARTIALS. */
#define MTI_QUERIES 96
#define MTI_KEYS 384

/* One call of attention: its arguments, and below them what all heads share in the loops of a CPU. */
typedef struct mti_attention {
    mt_context *ctx;
    mt_attention_desc desc; /* without defaults */
    /* q has head j of group g at column g * q_step + j * head_dim; k and v have group g at g * kv_step */
    mt_tensor q, k, v, out, lse, dout, dq, dk, dv;
    int64_t q_step, kv_step;
    /* the threads that compute, and the floats from the scratch memory of one to that of the next; below, that of the
       first one */
    int64_t threads, thread_floats;
    int pairs;             /* 1: products have bf16 operands, in pairs; see mti_attention_in_pairs */
    int tiles;             /* 1: in pairs, and the products go to tiles; see amx.c */
    float *scores, *grads; /* [queries, mti_scores_width], a block; grads for backward only */
    float *grad_pairs;     /* [queries, mti_scores_width / 2]: in backward in pairs, the rows of grads */
    /* packed k and v of a group, as the right operand of products that sum over features or over keys; packed q and
       dout of MTI_QUERIES queries, for sums over queries. NULL: not needed */
    float *k_features, *k_keys, *v_features, *v_keys, *q_queries, *dout_queries;
    /* rooms for blocks of 16-bit views, see mti_attention_read and mti_f32_place: rows of k or v while they are packed,
       the queries of a block, their out and dout, dq of a head, and dk and dv of a group. NULL: not needed */
    float *kv_room, *q_room, *out_room, *dout_room, *dq_room, *dk_room, *dv_room;
} mti_attention;

typedef struct mti_head {       /* one query head of one sequence */
    int64_t batch, group, head; /* head: its index among all query heads of this shard */
    int64_t length;             /* keys that are no padding */
    int64_t query, key;         /* first rows of the sequence */
    int64_t q_col, kv_col, out_col;
} mti_head;

static mti_attention mti_attention_resolve(mt_context *ctx, const mt_attention_desc *desc, mt_tensor out,
                                           mt_tensor lse) {
    mti_attention a;
    memset(&a, 0, sizeof a);
    a.ctx = ctx;
    a.desc = *desc;
    a.out = out;
    a.lse = lse;
    a.q_step = desc->heads_per_group * desc->head_dim;
    a.kv_step = desc->head_dim;
    a.threads = 1;
    return a;
}

/* Leaves out a mask and a window that hide nothing, because kernels without them are faster. */
static void mti_attention_simplify(mt_attention_desc *s) {
    const int64_t nearest = mti_key_of_query(s) - (s->kv_seq - 1), farthest = mti_key_of_query(s) + s->seq - 1;
    if (s->scores.mask == MT_MASK_CAUSAL && nearest >= 0) s->scores.mask = MT_MASK_BIDIRECTIONAL;
    if (s->scores.window > farthest && s->scores.window > -nearest) s->scores.window = 0;
}

/* Returns the columns of t from `col` on. */
static mt_tensor mti_cols_from(mt_tensor t, int64_t col) { return mt_tensor_cols(t, col, t.cols - col); }

/* Sets the views of queries, keys and values, and of their gradients, in fused tensors. dqkv is optional. */
static void mti_attention_fused(mti_attention *a, mt_tensor qkv, mt_tensor dqkv) {
    mti_qkv_cols c = mti_qkv_cols_of(&a->desc);
    a->q = qkv;
    a->k = mti_cols_from(qkv, c.key);
    a->v = mti_cols_from(a->k, c.value);
    a->q_step = c.q_step;
    a->kv_step = c.kv_step;
    if (!dqkv.data) return;
    a->dq = dqkv;
    a->dk = mti_cols_from(dqkv, c.key);
    a->dv = mti_cols_from(a->dk, c.value);
}

/* Returns 1 if the products of a call have bf16 operands. Then two numbers that a product sums over lie in the place of
   one float, see mti_gemm_step: queries, keys, values and dout as they are, and rounded probabilities and gradients of
   scores. The sums and the softmax are in f32. */
static int mti_attention_in_pairs(const mti_attention *a, int backward) {
    return MT_HAS_AVX512_BF16 && a->q.dtype == MT_BF16 && a->k.dtype == MT_BF16 && a->v.dtype == MT_BF16 &&
           (!backward || a->dout.dtype == MT_BF16);
}

/* The places of n numbers that a product sums over. Those that have no number count as 0. */
static int64_t mti_places(const mti_attention *a, int64_t n) {
    if (a->tiles) return mt_round_up(n, MTI_TILES) / 2;
    return a->pairs ? (n + 1) / 2 : n;
}

/* The queries of a block that scratch memory has room for: whole tiles. */
static int64_t mti_query_room(const mti_attention *a) {
    int64_t queries = mt_min(MTI_QUERIES, a->desc.seq);
    return a->tiles ? mt_round_up(queries, MTI_TILES) : queries;
}

/* The floats of a row of scores: whole vectors of MTI_PARTIALS. */
static int64_t mti_scores_width(const mt_attention_desc *s) {
    return mt_min(MTI_KEYS, mt_round_up(s->kv_seq, MTI_PARTIALS));
}

static mt_status mti_attention_floats(mti_attention *a, int64_t count, float **out) {
    void *memory = NULL;
    MT_TRY(mt_arena_alloc(a->ctx, (size_t)count * sizeof(float), &memory));
    *out = (float *)memory;
    return MT_SUCCESS;
}

/* The same if t needs a room of `rows` rows of a head, as floats or as pairs of features. */
static mt_status mti_attention_head_room(mti_attention *a, mt_tensor t, int64_t rows, float **out) {
    int64_t width = mt_max(a->desc.head_dim, mti_places(a, a->desc.head_dim));
    return !t.data || t.dtype == MT_F32 ? MT_SUCCESS : mti_attention_floats(a, rows * width, out);
}

static mt_status mti_attention_rooms(mti_attention *a) {
    const mt_attention_desc *s = &a->desc;
    int64_t queries = mti_query_room(a);
    MT_TRY(mti_attention_head_room(a, a->k.dtype == MT_F32 ? a->v : a->k, mt_min(MTI_KEYS, s->kv_seq), &a->kv_room));
    MT_TRY(mti_attention_head_room(a, a->q, queries, &a->q_room));
    MT_TRY(mti_attention_head_room(a, a->out, queries, &a->out_room));
    MT_TRY(mti_attention_head_room(a, a->dout, queries, &a->dout_room));
    MT_TRY(mti_attention_head_room(a, a->dq, s->seq, &a->dq_room));
    MT_TRY(mti_attention_head_room(a, a->dk, s->kv_seq, &a->dk_room));
    return mti_attention_head_room(a, a->dv, s->kv_seq, &a->dv_room);
}

/* Allocates the scratch memory of a thread. */
static mt_status mti_attention_thread_scratch(mti_attention *a, int backward) {
    const mt_attention_desc *s = &a->desc;
    int64_t head = mt_round_up(s->head_dim, MTI_NR), queries, features, keys;
    a->pairs = mti_attention_in_pairs(a, backward);
    if (a->pairs) MT_TRY(mti_tiles_open(a->ctx, &a->tiles));
    queries = mti_query_room(a);
    features = mt_round_up(s->kv_seq, MTI_NR) * mti_places(a, s->head_dim);
    keys = mti_places(a, s->kv_seq) * head;
    MT_TRY(mti_attention_rooms(a));
    MT_TRY(mti_attention_floats(a, queries * mti_scores_width(s), &a->scores));
    MT_TRY(mti_attention_floats(a, features, &a->k_features));
    if (!backward) return mti_attention_floats(a, keys, &a->v_keys);
    MT_TRY(mti_attention_floats(a, queries * mti_scores_width(s), &a->grads));
    if (a->pairs) MT_TRY(mti_attention_floats(a, queries * mti_scores_width(s) / 2, &a->grad_pairs));
    MT_TRY(mti_attention_floats(a, keys, &a->k_keys));
    MT_TRY(mti_attention_floats(a, features, &a->v_features));
    MT_TRY(mti_attention_floats(a, mti_places(a, queries) * head, &a->q_queries));
    return mti_attention_floats(a, mti_places(a, queries) * head, &a->dout_queries);
}

/* Allocates the scratch memory of a->threads threads. */
static mt_status mti_attention_scratch(mti_attention *a, int backward) {
    size_t bytes = mt_arena_mark(a->ctx);
    void *room;
    int64_t i;
    MT_TRY(mti_attention_thread_scratch(a, backward));
    bytes = mt_arena_mark(a->ctx) - bytes;
    a->thread_floats = (int64_t)(bytes / sizeof(float));
    for (i = 1; i < a->threads; i++) MT_TRY(mt_arena_alloc(a->ctx, bytes, &room));
    return MT_SUCCESS;
}

/* Returns a call with the scratch memory of a thread. */
static mti_attention mti_attention_of_thread(const mti_attention *a, int thread) {
    mti_attention t = *a;
    float **const parts[] = {&t.scores,    &t.grads,     &t.grad_pairs,   &t.k_features, &t.k_keys, &t.v_features,
                             &t.v_keys,    &t.q_queries, &t.dout_queries, &t.kv_room,    &t.q_room, &t.out_room,
                             &t.dout_room, &t.dq_room,   &t.dk_room,      &t.dv_room};
    size_t i;
    for (i = 0; i < sizeof parts / sizeof *parts; i++)
        if (*parts[i]) *parts[i] += thread * a->thread_floats;
    return t;
}

/* Locates query head `member` of a group: its columns and its rows. */
static mti_head mti_attention_head(const mti_attention *a, int64_t batch, int64_t group, int64_t member) {
    const mt_attention_desc *s = &a->desc;
    mti_head h;
    h.batch = batch;
    h.group = group;
    h.head = group * s->heads_per_group + member;
    h.length = s->lengths ? mti_keys_here(s, s->lengths[batch]) : s->kv_seq;
    h.query = batch * s->seq;
    h.key = batch * s->kv_seq;
    h.q_col = group * a->q_step + member * s->head_dim;
    h.kv_col = group * a->kv_step;
    h.out_col = h.head * s->head_dim;
    return h;
}

static float *mti_at(mt_tensor t, int64_t row, int64_t col) { return (float *)t.data + row * mt_tensor_ld(t) + col; }

/* Reads `rows` rows of a bf16 view of a head, with pairs of neighbouring features in places of floats. */
static mt_tensor mti_feature_pairs(const mti_attention *a, mt_tensor t, int64_t row, int64_t rows, int64_t col,
                                   float *room) {
    int64_t d = a->desc.head_dim, i;
    mt_tensor x = mt_tensor_make(room, MT_F32, rows, mti_places(a, d));
    for (i = 0; i < rows; i++) {
        float *y = mti_row(x, i);
        mti_row_fill(y + d / 2, 0.0f, x.cols - d / 2);
        memcpy(y, mti_row16(t, row + i) + col, (size_t)d * sizeof(uint16_t));
    }
    return x;
}

/* Reads `rows` rows of a head for products that sum over features. room: see mti_attention. */
static mt_tensor mti_attention_read(const mti_attention *a, mt_tensor t, int64_t row, int64_t rows, int64_t col,
                                    float *room) {
    if (a->pairs) return mti_feature_pairs(a, t, row, rows, col, room);
    return mti_f32_read(t, row, rows, col, a->desc.head_dim, room);
}

/* Packs n rows of t, from column `col` on, for products that sum over features. */
static void mti_pack_features(const mti_attention *a, mt_tensor t, int64_t row, int64_t col, int64_t n, float *out) {
    int64_t places = mti_places(a, a->desc.head_dim), i;
    for (i = 0; i < n; i += MTI_KEYS) {
        mt_tensor x = mti_attention_read(a, t, row + i, mt_min(MTI_KEYS, n - i), col, a->kv_room);
        mti_pack(mti_row(x, 0), mt_tensor_ld(x), 1, x.rows, places, MTI_NR, out + i * places);
    }
}

/* Packs n rows of a bf16 view of a head, with pairs of neighbouring rows in places of floats. Rows from `length` on
   count as 0. */
static void mti_pack_row_pairs(const mti_attention *a, mt_tensor t, int64_t row, int64_t col, int64_t n, int64_t length,
                               float *out) {
    int64_t places = mti_places(a, n), head_dim = a->desc.head_dim, p, i, j, count;
    length = mt_min(length, n);
    for (p = 0; p < places; p++) {
        const uint16_t *x = mti_row16(t, row + mt_min(2 * p, n - 1)) + col;
        const uint16_t *y = mti_row16(t, row + mt_min(2 * p + 1, n - 1)) + col;
        uint32_t present = 2 * p + 1 < length ? 0xffffffffu : 2 * p < length ? 0x0000ffffu : 0;
        for (i = 0; i < head_dim; i += MTI_NR) {
            float *to = out + i * places + p * MTI_NR;
            count = mt_min(MTI_NR, head_dim - i);
            MT_INDEPENDENT
            for (j = 0; j < count; j++) to[j] = mt_f32_from_bits((x[i + j] | (uint32_t)y[i + j] << 16) & present);
            mti_row_fill(to + count, 0.0f, MTI_NR - count);
        }
    }
}

/* Packs n rows of t, from column `col` on, for products that sum over rows: at most MTI_KEYS rows at a time. Products
   sum over the first `length` rows. */
static void mti_pack_rows(const mti_attention *a, mt_tensor t, int64_t row, int64_t col, int64_t n, int64_t length,
                          float *out) {
    int64_t d = a->desc.head_dim, i;
    for (i = 0; i < n; i += MTI_KEYS) {
        int64_t rows = mt_min(MTI_KEYS, n - i);
        float *to = out + mti_places(a, i) * mt_round_up(d, MTI_NR);
        if (a->pairs) mti_pack_row_pairs(a, t, row + i, col, rows, length - i, to);
        else {
            mt_tensor x = mti_f32_read(t, row + i, rows, col, d, a->kv_room);
            mti_pack(mti_row(x, 0), 1, mt_tensor_ld(x), d, rows, MTI_NR, to);
        }
    }
}

/* Packs the keys and values of a group. */
static void mti_attention_pack(const mti_attention *a, int64_t batch, int64_t group) {
    const mt_attention_desc *s = &a->desc;
    int64_t n = s->kv_seq, row = batch * n, col = group * a->kv_step;
    int64_t length = s->lengths ? mti_keys_here(s, s->lengths[batch]) : n;
    mti_pack_features(a, a->k, row, col, n, a->k_features);
    if (a->k_keys) mti_pack_rows(a, a->k, row, col, n, length, a->k_keys);
    if (a->v_features) mti_pack_features(a, a->v, row, col, n, a->v_features);
    if (a->v_keys) mti_pack_rows(a, a->v, row, col, n, length, a->v_keys);
}
