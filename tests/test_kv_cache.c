/* test_kv_cache.c - tests inference with a key/value cache. The operators are compared with double precision. The
   logits of a GPT, computed in chunks of any size for sequences of different lengths, are compared with mt_gpt_logits
   of the whole texts, for all kinds of models and splits. Greedy continuations are compared with those of transformers
   (golden/generate.txt). */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"
#include "mt_test_ranks.h"
#include "mt_reference.h"

#if !defined(MT_USE_ONEDNN) && !defined(MT_USE_CBLAS)
#define BUILT_IN_GEMM 1
#else
#define BUILT_IN_GEMM 0
#endif

/* ---- the operators ----------------------------------------------------------------------------------------------- */

/* One cache and its tensors. The tests keep all numbers in f32; 16-bit tensors are converted for each call. */
typedef struct cached {
    mt_attention_desc s;
    mt_kv_cache cache;
    mt_tensor table, qkv, out; /* of the type under test */
    double *keys, *values;     /* those of the cache, for the reference */
    int32_t *lengths, *added;
    double base;
} cached;

static int64_t width(const mt_attention_desc *s) { return s->groups * (s->heads_per_group + 2) * s->head_dim; }

/* A contiguous tensor of NaN, with exactly its bytes of memory. */
static mt_tensor of_type(mt_dtype dtype, int64_t rows, int64_t cols) {
    size_t bytes = (size_t)(rows * cols) * mt_dtype_size(dtype);
    mt_tensor t = mt_tensor_make(ref_bytes(bytes), dtype, rows, cols);
    memset(t.data, 0xff, bytes);
    return t;
}

static double element(mt_tensor t, int64_t i, int64_t j) {
    int64_t at = i * mt_tensor_ld(t) + j;
    float x;
    if (t.dtype == MT_F32) return (double)((const float *)t.data)[at];
    mt_f32_from_16bit(t.dtype, (const uint16_t *)t.data + at, &x, 1);
    return (double)x;
}

static double *elements(mt_tensor t) {
    double *x = ref_doubles((size_t)(t.rows * t.cols));
    for (int64_t i = 0; i < t.rows; i++)
        for (int64_t j = 0; j < t.cols; j++) x[i * t.cols + j] = element(t, i, j);
    return x;
}

static void set_element(mt_tensor t, int64_t i, int64_t j, float x) {
    int64_t at = i * mt_tensor_ld(t) + j;
    if (t.dtype == MT_F32) ((float *)t.data)[at] = x;
    else mt_f32_to_16bit(t.dtype, &x, (uint16_t *)t.data + at, 1);
}

static cached open_cache(mt_attention_desc s, int64_t max_seq, mt_dtype dtype, double base) {
    int64_t rows = s.batch * s.groups * max_seq;
    cached c;
    memset(&c, 0, sizeof c);
    c.s = s;
    c.cache.keys = of_type(dtype, rows, s.head_dim);
    c.cache.values = of_type(dtype, rows, s.head_dim);
    c.cache.max_seq = max_seq;
    c.lengths = (int32_t *)ref_bytes((size_t)s.batch * sizeof(int32_t));
    c.added = (int32_t *)ref_bytes((size_t)s.batch * sizeof(int32_t));
    memset(c.lengths, 0, (size_t)s.batch * sizeof(int32_t));
    c.cache.lengths = c.lengths;
    c.base = base;
    c.table = mt_none();
    if (base > 0) {
        c.table = of_type(MT_F32, max_seq, s.scores.rotary_dim ? s.scores.rotary_dim : s.head_dim);
        OK(mt_rotary_table(ref.ctx, (float)base, c.table));
    }
    return c;
}

/* Feature d of a head with the features x [head_dim] at a position, turned in double precision. */
static double turned(const cached *c, const double *x, int64_t position, int64_t d) {
    int64_t n = c->s.scores.rotary_dim ? c->s.scores.rotary_dim : c->s.head_dim, half = n / 2, angle, other;
    double a;
    int second;
    if (c->base == 0 || d >= n) return x[d];
    if (c->s.scores.rotary_form == MT_ROTARY_PAIRS) angle = d / 2, second = d % 2 == 1, other = d ^ 1;
    else angle = d % half, second = d >= half, other = second ? d - half : d + half;
    a = (double)position * pow(c->base, -2.0 * (double)angle / (double)n);
    return second ? x[d] * cos(a) + x[other] * sin(a) : x[d] * cos(a) - x[other] * sin(a);
}

static double tolerance_of(mt_dtype dtype) { return dtype == MT_F32 ? 2e-6 : dtype == MT_BF16 ? 8e-3 : 1e-3; }

/* Checks head `col` of a row of qkv, which was `before`, and row `row` of a tensor of the cache. row -1: neither. */
static void check_head(const cached *c, const double *before, mt_tensor after, int64_t r, int64_t col, int64_t position,
                       int turns, mt_tensor kept, int64_t row) {
    int64_t d;
    for (d = 0; d < c->s.head_dim; d++) {
        double want = turns ? turned(c, before + col, position, d) : before[col + d], got = element(after, r, col + d);
        double allowed = tolerance_of(after.dtype) * (1 + fabs(want));
        if (!(fabs(got - want) <= allowed))
            fail_msg("qkv[%ld, %ld] is %g, not %g", (long)r, (long)(col + d), got, want);
        if (kept.data && element(kept, row, d) != got) fail_msg("the cache has %g, not %g", element(kept, row, d), got);
    }
}

/* Adds tokens, and checks queries, keys and values. Rows that no token has keep their NaN. */
static void append(cached *c, const int32_t *added, float scale) {
    const mt_attention_desc *s = &c->s;
    int64_t w = width(s), b, i, j, g, a, heads = s->groups * s->heads_per_group;
    double *before = ref_doubles((size_t)(s->batch * s->seq * w));
    c->qkv = of_type(c->cache.keys.dtype, s->batch * s->seq, w);
    memcpy(c->added, added, (size_t)s->batch * sizeof *added);
    for (i = 0; i < s->batch * s->seq; i++)
        for (j = 0; j < w && i % s->seq < added[i / s->seq]; j++) {
            set_element(c->qkv, i, j, scale * test_float(&ref.random));
            before[i * w + j] = element(c->qkv, i, j);
        }
    OK(mt_kv_cache_append(ref.ctx, s, c->table, c->qkv, &c->cache));
    for (b = 0; b < s->batch; b++)
        for (i = 0; i < added[b]; i++) {
            int64_t r = b * s->seq + i, position = c->lengths[b] + i;
            const double *x = before + r * w;
            for (a = 0; a < heads; a++) check_head(c, x, c->qkv, r, ref_col(s, a, 0), position, 1, mt_none(), 0);
            for (g = 0; g < s->groups; g++) {
                int64_t row = (b * s->groups + g) * c->cache.max_seq + position, head = g * s->heads_per_group;
                check_head(c, x, c->qkv, r, ref_col(s, head, 1), position, 1, c->cache.keys, row);
                check_head(c, x, c->qkv, r, ref_col(s, head, 2), position, 0, c->cache.values, row);
            }
        }
    for (b = 0; b < s->batch; b++)
        for (g = 0; g < s->groups; g++)
            for (i = c->lengths[b] + added[b]; i < c->cache.max_seq; i++)
                assert_true(isnan(element(c->cache.keys, (b * s->groups + g) * c->cache.max_seq + i, 0)) &&
                            isnan(element(c->cache.values, (b * s->groups + g) * c->cache.max_seq + i, 0)));
}

/* The output of query i of head a in double precision, from the turned query and the cache as they are. */
static void attend(const cached *c, int64_t b, int64_t a, int64_t i, double *out) {
    const mt_attention_desc *s = &c->s;
    int64_t position = c->lengths[b] + i, row = (b * s->groups + a / s->heads_per_group) * c->cache.max_seq, p, d;
    int64_t first = s->scores.window && position + 1 > s->scores.window ? position + 1 - s->scores.window : 0;
    double *w = (double *)malloc((size_t)(position + 1) * sizeof *w), top = -INFINITY, sum = 0;
    double scale = s->scores.scale != 0.0f ? (double)s->scores.scale : 1 / sqrt((double)s->head_dim),
           cap = (double)s->scores.softcap;
    double q[130];
    assert_true(w && s->head_dim <= 130);
    for (d = 0; d < s->head_dim; d++) q[d] = element(c->qkv, b * s->seq + i, ref_col(s, a, 0) + d);
    for (p = first; p <= position; p++) {
        for (w[p] = 0, d = 0; d < s->head_dim; d++) w[p] += scale * q[d] * c->keys[(row + p) * s->head_dim + d];
        if (cap > 0) w[p] = cap * tanh(w[p] / cap);
        if (s->scores.alibi_slopes) w[p] -= (double)s->scores.alibi_slopes[a] * (double)(position - p);
        top = fmax(top, w[p]);
    }
    for (d = 0; d < s->head_dim; d++) out[d] = 0;
    for (p = first; p <= position; p++) sum += w[p] = exp(w[p] - top);
    for (p = first; p <= position; p++)
        for (d = 0; d < s->head_dim; d++) out[d] += w[p] / sum * c->values[(row + p) * s->head_dim + d];
    free(w);
}

static void check_attention(cached *c) {
    const mt_attention_desc *s = &c->s;
    int64_t b, i, a, d, heads = s->groups * s->heads_per_group;
    double *want = ref_doubles((size_t)s->head_dim);
    c->keys = elements(c->cache.keys);
    c->values = elements(c->cache.values);
    c->out = of_type(c->qkv.dtype, s->batch * s->seq, heads * s->head_dim);
    OK(mt_kv_cache_attention(ref.ctx, s, c->qkv, &c->cache, c->out));
    for (b = 0; b < s->batch; b++)
        for (i = 0; i < s->seq; i++)
            for (a = 0; a < heads; a++) {
                if (i < c->added[b]) attend(c, b, a, i, want);
                else memset(want, 0, (size_t)s->head_dim * sizeof *want);
                for (d = 0; d < s->head_dim; d++) {
                    double got = element(c->out, b * s->seq + i, a * s->head_dim + d);
                    if (!(fabs(got - want[d]) <= (s->scores.softcap > 0 ? 2 : 1) * tolerance_of(c->out.dtype)))
                        fail_msg("sequence %ld, token %ld, head %ld, feature %ld is %.9g, not %.9g (lengths %d + %d)",
                                 (long)b, (long)i, (long)a, (long)d, got, want[d], c->lengths[b], c->added[b]);
                }
            }
}

/* Adds the tokens of one call, and checks everything. */
static void step(cached *c, int64_t seq, const int32_t *added, int whole) {
    c->s.seq = seq;
    c->s.lengths = whole ? NULL : c->added;
    append(c, added, 1.5f);
    check_attention(c);
    OK(mt_kv_cache_advance(ref.ctx, c->cache.max_seq, c->s.batch, seq, c->s.lengths, c->lengths));
}

/* Prompts of different lengths, a second prompt for some sequences, and single tokens until the cache is full. */
static void try_cache(mt_attention_desc s, int64_t max_seq, mt_dtype dtype, double base) {
    int32_t prompts[2][3] = {{(int32_t)max_seq / 2, 1, 0}, {2, 0, (int32_t)max_seq / 3}}, ones[3] = {1, 1, 1}, more[3];
    cached c = open_cache(s, max_seq, dtype, base);
    int i, b;
    s.lengths = NULL;
    c.s.batch = 3;
    step(&c, max_seq / 2, prompts[0], 0);
    step(&c, max_seq / 3 > 2 ? max_seq / 3 : 2, prompts[1], 0);
    for (i = 0; i < 3; i++) step(&c, 1, ones, 1);
    for (b = 0; b < 3; b++) more[b] = (int32_t)max_seq - c.lengths[b] - 1;
    step(&c, max_seq, more, 0);
    step(&c, 1, ones, 1);
    for (b = 0; b < 3; b++) assert_int_equal(c.lengths[b], max_seq);
    ref_check_guards();
    ref_release();
}

/* Adds the keys and values of the last call, which it has turned, to another cache: without queries. */
static void append_keys(const cached *c, const mt_kv_cache *other) {
    const mt_attention_desc *s = &c->s;
    const int64_t n = s->head_dim, heads = s->heads_per_group;
    mt_attention_desc keys = *s;
    mt_tensor kv = of_type(c->qkv.dtype, c->qkv.rows, 2 * s->groups * n);
    keys.heads_per_group = 0;
    for (int64_t g = 0; g < s->groups; g++)
        for (int part = 0; part < 2; part++) {
            const int64_t at = s->qkv_layout == MT_QKV_PER_GROUP ? 2 * g + part : part * s->groups + g;
            OK(mt_copy(ref.ctx, mt_tensor_cols(c->qkv, ref_col(s, g * heads, 1 + part), n),
                       mt_tensor_cols(kv, at * n, n)));
        }
    OK(mt_kv_cache_append(ref.ctx, &keys, mt_none(), kv, other));
}

static void same_memory(mt_tensor a, mt_tensor b) {
    assert_memory_equal(a.data, b.data, (size_t)(a.rows * a.cols) * mt_dtype_size(a.dtype));
}

/* Adds `seq` tokens in calls that have `each` of them, as context ranks do. c->lengths are those before a call, and the
   cache has those before all of them. Another cache gets keys and values alone. */
static void step_in_parts(cached *c, int64_t seq, int64_t each, const int32_t *added, mt_kv_cache *other) {
    int32_t held[3], all[3], own[3];
    memcpy(held, c->lengths, sizeof held);
    memcpy(all, added, sizeof all);
    c->cache.lengths = other->lengths = held;
    c->s.seq = each;
    c->s.lengths = all;
    c->s.part.seq = seq;
    for (c->s.part.first_query = 0; c->s.part.first_query < seq; c->s.part.first_query += each) {
        for (int b = 0; b < 3; b++) {
            c->lengths[b] = held[b] + (int32_t)mt_min(added[b], c->s.part.first_query);
            own[b] = (int32_t)mt_max(0, mt_min(added[b] - c->s.part.first_query, each));
        }
        append(c, own, 1.5f);
        append_keys(c, other);
        check_attention(c);
    }
    for (int b = 0; b < 3; b++) c->lengths[b] = held[b] + added[b];
    c->cache.lengths = c->lengths;
    memset(&c->s.part, 0, sizeof c->s.part);
    same_memory(c->cache.keys, other->keys);
    same_memory(c->cache.values, other->values);
}

static mt_attention_desc sizes(int64_t groups, int64_t heads_per_group, int64_t head_dim) {
    mt_attention_desc s;
    memset(&s, 0, sizeof s);
    s.batch = 3;
    s.groups = groups;
    s.heads_per_group = heads_per_group;
    s.head_dim = head_dim;
    return s;
}

static void test_operators_like_double_precision(void **state) {
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    static const int64_t head_dims[] = {1, 6, 16, 64, 80, 130}, max_seqs[] = {12, 65, 200, 460};
    static const float slopes[] = {0.5f, 0.01f, 0.0f, 0.25f, 1.0f, 0.125f, 0.3f, 0.2f};
    size_t n = 0, i;
    (void)state;
    for (i = 0; i < 6 * 4 * 3 * 3; i++) {
        mt_attention_desc s = sizes(1 + (int64_t)(i % 2), 1 + (int64_t)(i % 5 == 3 ? 3 : i % 2), head_dims[i % 6]);
        double base = i % 3 == 0 || head_dims[i % 6] == 1 ? 0 : 100;
        if (!test_takes(i, 7)) continue;
        s.qkv_layout = (mt_qkv_layout)(i / 7 % 3);
        s.scores.rotary_form = (mt_rotary_form)(i / 3 % 2);
        if (base > 0 && i % 4 == 1) s.scores.rotary_dim = s.head_dim / 2 / 2 * 2;
        if (i % 4 == 2) s.scores.window = 1 + (int64_t)(i % 23);
        if (i % 7 == 3) s.scores.softcap = 0.75f;
        if (i % 5 == 2) s.scores.alibi = 1, s.scores.alibi_slopes = slopes;
        if (i % 11 == 4) s.scores.scale = 0.3f;
        try_cache(s, max_seqs[i / 6 % 4], types[i / 24 % 3], base);
        n++;
    }
    assert_true(n > 20);
}

/* Prompts in parts: 4 of 5 tokens for 17 of them, where the last one has padding, and 2 of 3 after some tokens. */
static void test_parts_of_prompts(void **state) {
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    const int32_t prompts[] = {17, 6, 0}, more[] = {5, 0, 6}, ones[] = {1, 1, 1};
    (void)state;
    for (int i = 0; i < 18; i++) {
        mt_attention_desc s = sizes(1 + i % 2, 1 + i / 2 % 3 * 3, i % 4 == 3 ? 6 : 32);
        mt_kv_cache other;
        cached c;
        s.qkv_layout = (mt_qkv_layout)(i / 6);
        s.scores.window = i % 5 == 2 ? 4 : 0;
        c = open_cache(s, 26, types[i % 3], i % 4 == 1 ? 0 : 100);
        other = c.cache;
        other.keys = of_type(types[i % 3], c.cache.keys.rows, s.head_dim);
        other.values = of_type(types[i % 3], c.cache.keys.rows, s.head_dim);
        c.s.batch = 3;
        step_in_parts(&c, 17, 5, prompts, &other);
        step_in_parts(&c, 6, 3, more, &other);
        step(&c, 1, ones, 1);
        ref_check_guards();
        ref_release();
    }
}

/* A window that is larger than the cache hides nothing, whatever its size. */
static void test_huge_windows(void **state) {
    static const int64_t windows[] = {12, 13, 100, INT64_MAX};
    (void)state;
    for (int i = 0; i < 4; i++) {
        mt_attention_desc s = sizes(1, 2, 8);
        s.scores.window = windows[i];
        try_cache(s, 12, MT_F32, 0);
    }
}

static void test_positions_and_lengths(void **state) {
    int32_t lengths[3] = {0, 4, 7}, added[3] = {2, 0, 1}, ids[6], n[3];
    mt_kv_cache c;
    (void)state;
    memset(&c, 0, sizeof c);
    c.max_seq = 8;
    c.lengths = lengths;
    OK(mt_kv_cache_positions(ref.ctx, &c, 3, 2, ids));
    assert_memory_equal(ids, ((const int32_t[]){0, 1, 4, 5, 7, 7}), sizeof ids);
    memcpy(n, lengths, sizeof n);
    OK(mt_kv_cache_advance(ref.ctx, 8, 3, 2, added, n));
    assert_memory_equal(n, ((const int32_t[]){2, 4, 8}), sizeof n);
    OK(mt_kv_cache_advance(ref.ctx, 8, 3, 3, NULL, n));
    assert_memory_equal(n, ((const int32_t[]){5, 7, 8}), sizeof n);
    OK(mt_kv_cache_advance(ref.ctx, 8, 3, 2, (const int32_t[]){-1, 9, 0}, memcpy(n, lengths, sizeof n)));
    assert_memory_equal(n, ((const int32_t[]){0, 6, 7}), sizeof n);
    OK(mt_kv_cache_advance(ref.ctx, 8, 0, 1, NULL, NULL));
    ASSERT_REFUSED(MT_ERR_SHAPE, "max_seq is 0", mt_kv_cache_advance(ref.ctx, 0, 3, 1, NULL, n));
    ASSERT_REFUSED(MT_ERR_SHAPE, "seq is 0", mt_kv_cache_advance(ref.ctx, 8, 3, 0, NULL, n));
    ASSERT_REFUSED(MT_ERR_SHAPE, "batch is -1", mt_kv_cache_advance(ref.ctx, 8, -1, 1, NULL, n));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "lengths is NULL", mt_kv_cache_advance(ref.ctx, 8, 3, 1, NULL, NULL));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "ids is NULL", mt_kv_cache_positions(ref.ctx, &c, 3, 2, NULL));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "cache is NULL", mt_kv_cache_positions(ref.ctx, NULL, 3, 2, ids));
    ASSERT_REFUSED(MT_ERR_SHAPE, "seq is 0", mt_kv_cache_positions(ref.ctx, &c, 3, 0, ids));
    c.lengths = NULL;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "cache.lengths is NULL", mt_kv_cache_positions(ref.ctx, &c, 3, 2, ids));
}

/* Calls both operators, which must refuse in the same way. */
#define BOTH_REFUSE(status, words)                                                                                     \
    do {                                                                                                               \
        ASSERT_REFUSED(status, words, mt_kv_cache_append(ref.ctx, &s, c.table, c.qkv, &k));                            \
        ASSERT_REFUSED(status, words, mt_kv_cache_attention(ref.ctx, &s, c.qkv, &k, c.out));                           \
        s = good, k = c.cache;                                                                                         \
    } while (0)

/* A cache and tensors for two new tokens of each of three sequences. */
static cached small_cache(void) {
    cached c = open_cache(sizes(2, 2, 8), 8, MT_F32, 100);
    c.s.seq = 2;
    c.qkv = ref_random(6, width(&c.s), 0, 1, 0);
    c.out = ref_random(6, 32, 0, 1, 0);
    return c;
}

static void test_operators_refuse(void **state) {
    cached c = small_cache();
    mt_attention_desc good = c.s, s = good;
    int32_t cu_seqlens[2] = {0, 6};
    mt_kv_cache k = c.cache;
    (void)state;
    s.scores.mask = MT_MASK_BIDIRECTIONAL;
    BOTH_REFUSE(MT_ERR_UNSUPPORTED, "MT_MASK_CAUSAL");
    s.scores.mask = (mt_mask)7;
    BOTH_REFUSE(MT_ERR_ARGUMENT, "mask is 7");
    s.dropout.p = 0.1f;
    BOTH_REFUSE(MT_ERR_UNSUPPORTED, "dropout");
    s.kv_seq = 2;
    BOTH_REFUSE(MT_ERR_UNSUPPORTED, "kv_seq");
    s.part.seq = 2, s.part.kv_seq = 2;
    BOTH_REFUSE(MT_ERR_UNSUPPORTED, "part.kv_seq cannot be used");
    s.part.seq = 2, s.part.first_key = 1;
    BOTH_REFUSE(MT_ERR_UNSUPPORTED, "part.first_key cannot be used");
    s.part.seq = 2, s.part.first_query = 3;
    BOTH_REFUSE(MT_ERR_SHAPE, "part.first_query is 3");
    s.part.first_query = 1;
    BOTH_REFUSE(MT_ERR_SHAPE, "part.first_query is 1");
    s.part.seq = -1;
    BOTH_REFUSE(MT_ERR_SHAPE, "part.seq is -1");
    s.cu_seqlens = cu_seqlens, s.documents = 1;
    BOTH_REFUSE(MT_ERR_UNSUPPORTED, "cu_seqlens");
    s.bias.value = c.qkv;
    BOTH_REFUSE(MT_ERR_UNSUPPORTED, "bias");
    s.bias.grad = c.qkv;
    BOTH_REFUSE(MT_ERR_UNSUPPORTED, "bias");
    s.scores.window = -1;
    BOTH_REFUSE(MT_ERR_ARGUMENT, "window is -1");
    s.scores.softcap = -1;
    BOTH_REFUSE(MT_ERR_ARGUMENT, "softcap is -1");
    s.scores.rotary_base = 10.0f;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "scores.rotary_base is 10, but table is mt_none()",
                   mt_kv_cache_append(ref.ctx, &s, mt_none(), c.qkv, &k));
    s.seq = 3;
    BOTH_REFUSE(MT_ERR_SHAPE, "qkv is [6, 64], must be [9, 64]");
    s.groups = 0;
    BOTH_REFUSE(MT_ERR_SHAPE, "groups is 0");
    k.max_seq = 0;
    BOTH_REFUSE(MT_ERR_SHAPE, "max_seq is 0");
    k.keys.rows--;
    BOTH_REFUSE(MT_ERR_SHAPE, "keys is [47, 8], must be [48, 8]");
    k.values.cols--, k.values.ld = 8;
    BOTH_REFUSE(MT_ERR_SHAPE, "values is [48, 7], must be [48, 8]");
    k.keys.rows = 24, k.keys.ld = 16;
    BOTH_REFUSE(MT_ERR_SHAPE, "the ld of keys is 16");
    k.keys.dtype = MT_BF16;
    BOTH_REFUSE(MT_ERR_DTYPE, "keys are bf16 and values f32, both must be f32");
    k.lengths = NULL;
    BOTH_REFUSE(MT_ERR_ARGUMENT, "cache.lengths is NULL");
    k.keys.data = NULL;
    BOTH_REFUSE(MT_ERR_ARGUMENT, "keys is [48, 8] but its data is NULL");
}

/* Numbers of tokens, and arguments that only one of the operators has. */
static void test_operators_refuse_lengths(void **state) {
    cached c = small_cache();
    mt_attention_desc good = c.s, s = good;
    mt_kv_cache k = c.cache;
    (void)state;
    c.lengths[1] = 7;
    BOTH_REFUSE(MT_ERR_DATA, "sequence 1 has 7 tokens and gets 2 more; the cache has room for 8");
    c.lengths[1] = 9;
    BOTH_REFUSE(MT_ERR_DATA, "cache.lengths[1] is 9, must be in [0, 8]");
    c.lengths[1] = -1;
    BOTH_REFUSE(MT_ERR_DATA, "cache.lengths[1] is -1");
    c.lengths[1] = 0;
    memset(c.added, 0, 3 * sizeof *c.added);
    c.added[2] = 3, s.lengths = c.added;
    BOTH_REFUSE(MT_ERR_DATA, "lengths[2] is 3, must be in [0, 2]");
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "cache is NULL", mt_kv_cache_append(ref.ctx, &s, c.table, c.qkv, NULL));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "desc is NULL", mt_kv_cache_attention(ref.ctx, NULL, c.qkv, &k, c.out));
    ASSERT_REFUSED(MT_ERR_SHAPE, "table is [7, 8], must be [8, 8]",
                   mt_kv_cache_append(ref.ctx, &s, mt_tensor_rows(c.table, 0, 7), c.qkv, &k));
    k.values = k.keys;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "overlap", mt_kv_cache_append(ref.ctx, &s, c.table, c.qkv, &k));
    k = c.cache;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "overlap",
                   mt_kv_cache_attention(ref.ctx, &s, c.qkv, &k, mt_tensor_cols(c.qkv, 0, 32)));
    ASSERT_REFUSED(MT_ERR_SHAPE, "out is [6, 31], must be [6, 32]",
                   mt_kv_cache_attention(ref.ctx, &s, c.qkv, &k, mt_tensor_cols(c.out, 0, 31)));
    c.lengths[0] = 8;
    ASSERT_REFUSED(MT_ERR_DATA, "the test: sequence 0", mt_kv_cache_check(ref.ctx, "the test", &s, &k));
    c.lengths[0] = 0;
    OK(mt_kv_cache_check(ref.ctx, "the test", &s, &k));
}

/* ---- models ------------------------------------------------------------------------------------------------------ */

#define TEXTS 3
#define TEXT 12      /* tokens of a text */
#define LONG_TEXT 80 /* of one whose prompts context ranks divide */
#define VOCAB 37
#define LOGITS_MAX (4 * TEXTS * LONG_TEXT * VOCAB)

/* How a run is split. */
typedef struct places {
    int tp, pp, cp, sequence_parallel, invariant;
    int prompts; /* prompts are so long that this many context ranks divide them; 0: short texts */
    int parts;   /* virtual context ranks in invariant mode; 0: 4 */
} places;

typedef struct model_run {
    const char *name;
    mt_gpt_desc d;
    mt_dtype dtype;
    places on;
    float logits[LOGITS_MAX]; /* of rank 0: the logits of all calls, in their order */
    int64_t count;
} model_run;

/* One rank. at: the tokens that each sequence has in the cache. */
typedef struct model_rank {
    model_run *run;
    test_rank r;
    mt_gpt gpt;
    mt_gpt_cache cache;
    int64_t length; /* of the texts */
    int32_t text[TEXTS * LONG_TEXT], at[TEXTS];
    float *whole; /* the logits of mt_gpt_logits for the whole texts, [TEXTS * length, VOCAB] */
    double tolerance;
} model_rank;

enum { ALL_TOKENS, LAST_TOKENS, NO_LOGITS };

static mt_status check_logits(model_rank *m, const float *got, int64_t sequence, int64_t position) {
    const float *want = m->whole + (sequence * m->length + position) * VOCAB;
    if (m->run->on.invariant && !m->run->on.prompts && BUILT_IN_GEMM && memcmp(got, want, VOCAB * sizeof *got) != 0) {
        fprintf(stderr, "%s: the logits of token %d of sequence %d have other bits\n", m->run->name, (int)position,
                (int)sequence);
        return MT_ERR_DATA;
    }
    if (mt_comm_rank(m->r.world) == 0) {
        CHECK(m->run->count + VOCAB <= LOGITS_MAX);
        memcpy(m->run->logits + m->run->count, got, VOCAB * sizeof *got);
        m->run->count += VOCAB;
    }
    return test_near_f32(m->run->name, got, want, VOCAB, m->tolerance);
}

/* Feeds the next n[b] tokens of each text, and checks their logits. */
static mt_status feed(model_rank *m, int64_t seq, const int32_t *n, int what) {
    int64_t rows = what == ALL_TOKENS ? TEXTS * seq : TEXTS, b, i;
    int32_t *ids = (int32_t *)test_floats(&m->r, TEXTS * seq, 0.0f), *lengths;
    float *logits = test_floats(&m->r, rows * VOCAB, NAN);
    mt_batch batch;
    int full = 1;
    memset(&batch, 0, sizeof batch);
    batch.sequences = TEXTS;
    batch.seq = seq;
    lengths = (int32_t *)test_floats(&m->r, TEXTS, 0.0f);
    memcpy(lengths, n, TEXTS * sizeof *n);
    for (b = 0; b < TEXTS; b++) {
        full &= n[b] == seq;
        for (i = 0; i < seq; i++)
            ids[b * seq + i] = i < n[b] ? m->text[b * m->length + m->at[b] + i] : (int32_t)(i % VOCAB);
    }
    if (!full) batch.lengths = lengths;
    MT_TRY(mt_gpt_cached_logits(m->r.ctx, &m->gpt, &batch, ids, &m->cache,
                                what == NO_LOGITS ? mt_none() : mt_tensor_f32(logits, rows, VOCAB)));
    for (i = 0; what != NO_LOGITS && i < rows * VOCAB; i++) CHECK(isfinite(logits[i]));
    for (b = 0; b < TEXTS; b++) {
        for (i = 0; what == ALL_TOKENS && i < n[b]; i++)
            MT_TRY(check_logits(m, logits + (b * seq + i) * VOCAB, b, m->at[b] + i));
        if (what == LAST_TOKENS && n[b] > 0) MT_TRY(check_logits(m, logits + b * VOCAB, b, m->at[b] + n[b] - 1));
        m->at[b] += n[b];
        CHECK(m->cache.lengths[b] == m->at[b]);
    }
    CHECK(mt_arena_mark(m->r.ctx) == 0);
    return MT_SUCCESS;
}

static mt_status set_length(model_rank *m, int64_t sequence, int32_t length) {
    m->at[sequence] = length;
    return mt_gpt_cache_set_length(m->r.ctx, &m->cache, sequence, length);
}

/* A call that every rank refuses, because sequence 1 is full. The cache stays as it is. */
static mt_status overfill(model_rank *m) {
    int32_t ids[TEXTS] = {0}, lengths[TEXTS] = {0, 1, 0};
    mt_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.sequences = TEXTS;
    batch.seq = 1;
    batch.lengths = lengths;
    CHECK(mt_gpt_cached_logits(m->r.ctx, &m->gpt, &batch, ids, &m->cache, mt_none()) == MT_ERR_DATA);
    CHECK(test_has_words(mt_last_error(m->r.ctx), "mt_gpt_cached_logits|sequence 1 has 12 tokens|1 more|room for 12"));
    CHECK(m->cache.lengths[1] == TEXT);
    return MT_SUCCESS;
}

/* Prompts in one and in several calls, single tokens, a sequence that pauses, a slot that gets a text again, and tokens
   that are taken back. */
static mt_status generate_like(model_rank *m) {
    static const int32_t prompt[] = {5, 3, 0}, second[] = {2, 0, 1}, third[] = {1, 4, 4}, one[] = {1, 1, 1};
    static const int32_t rest[] = {0, 1, 3}, again[] = {0, TEXT, 0}, back[] = {5, 0, 0}, none[] = {0, 0, 0};
    MT_TRY(feed(m, 5, prompt, LAST_TOKENS));
    MT_TRY(feed(m, 2, second, ALL_TOKENS));
    MT_TRY(feed(m, 4, third, NO_LOGITS));
    MT_TRY(feed(m, 1, one, LAST_TOKENS));
    MT_TRY(feed(m, 1, one, ALL_TOKENS));
    MT_TRY(feed(m, 2, none, LAST_TOKENS));
    for (int i = 0; i < 2; i++) MT_TRY(feed(m, 1, one, LAST_TOKENS));
    MT_TRY(feed(m, 4, rest, ALL_TOKENS));
    MT_TRY(overfill(m));
    MT_TRY(set_length(m, 1, 0));
    MT_TRY(feed(m, TEXT, again, ALL_TOKENS));
    MT_TRY(set_length(m, 0, 7));
    MT_TRY(feed(m, 5, back, ALL_TOKENS));
    MT_TRY(set_length(m, 2, 1));
    MT_TRY(set_length(m, 0, TEXT - 1));
    MT_TRY(set_length(m, 1, TEXT - 1));
    return feed(m, 1, one, LAST_TOKENS);
}

/* Checks the calls over the context group since the last check: those of a prompt that its ranks divide, or none. */
static mt_status check_context_calls(model_rank *m, int divided) {
    const mt_ledger got = mt_comm_ledger(m->r.grid.cp);
    const int last = m->r.grid.pp_rank + 1 == m->r.grid.pp_size, layers = (int)m->gpt.model.local_layers;
    const int groups = mt_self_attention_cache_groups(&m->gpt.model.layers[0].attention) > 0;
    mt_comm_ledger_reset(m->r.grid.cp);
    if (m->run->on.cp == 1 || (m->run->on.invariant && divided)) return MT_SUCCESS; /* a call for each virtual shard */
    CHECK((int)got.calls[MT_ALL_GATHER] == (divided && groups ? layers : 0));
    CHECK((int)got.calls[MT_ALL_REDUCE] == (divided && last));
    return MT_SUCCESS;
}

/* Prompts and later turns whose tokens context ranks divide, though not into equal parts, and single tokens. */
static mt_status chat_like(model_rank *m) {
    const int32_t n = MT_PREFILL_TOKENS * m->run->on.prompts + 1, prompt[] = {n, n - 1, 5}, turn[] = {0, 3, n + 2};
    static const int32_t one[] = {1, 1, 1}, second[] = {2, 1, 0}, whole[] = {LONG_TEXT, LONG_TEXT, LONG_TEXT};
    const int32_t last[] = {n, n, n}; /* the cache has no room for the padding behind them */
    MT_TRY(feed(m, n, prompt, LAST_TOKENS));
    MT_TRY(check_context_calls(m, 1));
    MT_TRY(feed(m, 1, one, LAST_TOKENS));
    MT_TRY(check_context_calls(m, 0));
    MT_TRY(feed(m, n + 2, turn, ALL_TOKENS));
    MT_TRY(feed(m, n + 1, second, NO_LOGITS));
    MT_TRY(feed(m, 1, one, ALL_TOKENS));
    for (int b = 0; b < TEXTS; b++) MT_TRY(set_length(m, b, 0));
    MT_TRY(feed(m, LONG_TEXT, whole, ALL_TOKENS));
    for (int b = 0; b < TEXTS; b++) MT_TRY(set_length(m, b, LONG_TEXT - n));
    return feed(m, n, last, LAST_TOKENS);
}

/* 32 virtual context ranks, each with one token of two chunks: with padding, one of two ranks would compute as many
   tokens of a prompt of 32 as alone. */
static mt_status many_parts(model_rank *m) {
    static const int32_t prompt[] = {32, 20, 5}, one[] = {1, 1, 1}, turn[] = {0, 3, 36};
    MT_TRY(feed(m, 32, prompt, LAST_TOKENS));
    MT_TRY(check_context_calls(m, 0));
    MT_TRY(feed(m, 1, one, ALL_TOKENS));
    return feed(m, 36, turn, ALL_TOKENS);
}

/* The logits of the texts, which each context rank computes for its part of the tokens. */
static mt_status whole_logits(model_rank *m) {
    const mt_context_parallel_desc context = mt_parallel_get_options(m->r.ctx).context;
    const int64_t tokens = TEXTS * m->length, rows = tokens / m->r.grid.cp_size;
    float most = 0, *own = test_floats(&m->r, rows * VOCAB, 0.0f), *all = test_floats(&m->r, tokens * VOCAB, 0.0f);
    int32_t *ids = (int32_t *)test_floats(&m->r, rows, 0.0f);
    mt_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.sequences = TEXTS;
    batch.seq = m->length;
    m->whole = test_floats(&m->r, tokens * VOCAB, 0.0f);
    for (int64_t i = 0; i < rows; i++)
        ids[i] =
            m->text[mt_context_parallel_token(&context, m->r.grid.cp_rank, m->r.grid.cp_size, TEXTS, m->length, i)];
    MT_TRY(mt_gpt_logits(m->r.ctx, &m->gpt, &batch, ids, mt_tensor_f32(own, rows, VOCAB)));
    MT_TRY(mt_all_gather(m->r.ctx, m->r.grid.cp, own, all, (size_t)(rows * VOCAB), MT_F32));
    for (int64_t i = 0; i < tokens; i++) {
        const int rank = (int)(i / rows);
        const int64_t at = mt_context_parallel_token(&context, rank, m->r.grid.cp_size, TEXTS, m->length, i % rows);
        memcpy(m->whole + at * VOCAB, all + i * VOCAB, VOCAB * sizeof *all);
    }
    for (int64_t i = 0; i < tokens * VOCAB; i++) most = fmaxf(most, fabsf(m->whole[i]));
    m->tolerance = (double)most * (m->run->dtype == MT_F32 ? 2e-6 : m->run->dtype == MT_BF16 ? 4e-2 : 5e-3);
    return MT_SUCCESS;
}

/* The bytes of the cache on all tensor ranks of a stage, by the formula. */
static int64_t cache_bytes(const model_rank *m) {
    const mt_self_attention *a = &m->gpt.model.layers[0].attention;
    int64_t n = mt_self_attention_cache_groups(a),
            part = n * TEXTS * m->length * a->head_dim * (int64_t)mt_dtype_size(m->run->dtype);
    return 2 * m->gpt.model.local_layers * ((part + 63) / 64 * 64);
}

static mt_status model_rank_run(model_rank *m) {
    model_run *run = m->run;
    const mt_parallel_options parts = {.context.invariant = run->on.parts ? run->on.parts : 4};
    uint64_t seed = 11;
    size_t before;
    m->length = run->on.parts ? 64 : run->on.prompts ? LONG_TEXT : TEXT;
    for (int i = 0; i < TEXTS * m->length; i++) m->text[i] = (int32_t)test_below(&seed, VOCAB);
    MT_TRY(mt_params_set_dtype(m->r.ctx, m->r.params, run->dtype));
    if (run->on.invariant && run->on.prompts) MT_TRY(mt_parallel_set_options(m->r.ctx, &parts));
    MT_TRY(mt_gpt_create(m->r.ctx, m->r.params, &run->d, &m->gpt));
    MT_TRY(mt_params_init(m->r.ctx, m->r.params, 3));
    MT_TRY(disturb_params(&m->r, 0.2f));
    MT_TRY(whole_logits(m));
    before = mt_context_allocated(m->r.ctx);
    MT_TRY(mt_gpt_cache_create(m->r.ctx, &m->gpt, TEXTS, m->length, &m->cache));
    CHECK(mt_gpt_cache_bytes(&m->gpt, TEXTS, m->length) == cache_bytes(m) && (int64_t)m->cache.bytes == cache_bytes(m));
    CHECK(mt_context_allocated(m->r.ctx) == before + mt_align_up(m->cache.bytes ? m->cache.bytes : 1) + 64);
    mt_comm_ledger_reset(m->r.grid.cp);
    MT_TRY(run->on.parts ? many_parts(m) : run->on.prompts ? chat_like(m) : generate_like(m));
    mt_gpt_cache_destroy(m->r.ctx, &m->cache);
    CHECK(mt_context_allocated(m->r.ctx) == before && m->cache.layers == NULL);
    return MT_SUCCESS;
}

static mt_status model_main(mt_comm *world, void *user) {
    model_run *run = (model_run *)user;
    mt_context_desc where = {.arena_bytes = (size_t)8 << 20, .invariant = run->on.invariant};
    model_rank m;
    mt_status status;
    memset(&m, 0, sizeof m);
    m.run = run;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = run->on.tp, .pp = run->on.pp, .cp = run->on.cp}, &where, &m.r));
    status = model_rank_run(&m);
    if (status != MT_SUCCESS) fprintf(stderr, "%s: %s\n", run->name, mt_last_error(m.r.ctx));
    mt_gpt_cache_destroy(m.r.ctx, &m.cache);
    test_rank_close(&m.r);
    return status;
}

static mt_gpt_desc small_model(int64_t hidden, int64_t heads, int64_t kv_heads) {
    mt_gpt_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = VOCAB;
    d.layers = 2;
    d.max_seq = 16;
    d.embedding_dropout = 0.1f; /* none in inference */
    d.layer.hidden = hidden;
    d.layer.heads = heads;
    d.layer.kv_heads = kv_heads;
    d.layer.dropout.attention = d.layer.dropout.hidden = 0.1f;
    return d;
}

#define KINDS 10
static const char *const kinds[KINDS] = {"learned positions",
                                         "Llama",
                                         "post-LN",
                                         "residual post-LN",
                                         "ALiBi, a window and a soft cap",
                                         "concatenated, rotary pairs",
                                         "empty groups",
                                         "pieces of groups",
                                         "pieces, separate",
                                         "padded vocabulary"};

static mt_gpt_desc model_of_kind(int kind) {
    mt_gpt_desc d = kind == 6   ? small_model(40, 5, 5)
                    : kind == 1 ? small_model(32, 8, 4)
                    : kind == 7 ? small_model(24, 6, 3)
                    : kind == 8 ? small_model(32, 8, 1)
                                : small_model(32, 8, 8);
    if (kind == 2) d.layer.norm.placement = MT_POST_LN;
    if (kind == 3) d.layer.norm.placement = MT_RESIDUAL_POST_LN;
    if (kind == 4) d.layer.scores.alibi = 1, d.layer.scores.window = 4, d.layer.scores.softcap = 2;
    if (kind == 5) d.layer.qkv_layout = MT_QKV_CONCATENATED, d.layer.scores.rotary_form = MT_ROTARY_PAIRS;
    if (kind == 5) d.layer.scores.rotary_base = 100, d.layer.scores.rotary_dim = 2;
    if (kind == 8) d.layer.qkv_layout = MT_QKV_SEPARATE, d.layer.scores.rotary_base = 100;
    if (kind == 9) d.padded_vocab = 48;
    if (kind != 1) return d;
    d.untied_head = 1;
    d.layer.norm.kind = MT_RMS_NORM;
    d.layer.activation = MT_SWIGLU;
    d.layer.scores.rotary_base = 100.0f;
    d.layer.no_bias = 1;
    d.layer.qkv_layout = MT_QKV_SEPARATE;
    return d;
}

static model_run *run_model(int kind, mt_dtype dtype, places on) {
    static char name[160];
    model_run *run = (model_run *)calloc(1, sizeof *run);
    assert_non_null(run);
    snprintf(name, sizeof name, "%s, %s, %d x tensor, %d stages, %d x context%s%s", kinds[kind], mt_dtype_name(dtype),
             on.tp, on.pp, on.cp, on.sequence_parallel ? ", sequence parallel" : "", on.invariant ? ", invariant" : "");
    run->name = name;
    run->d = model_of_kind(kind);
    if (on.prompts) run->d.max_seq = LONG_TEXT;
    run->d.layer.sequence_parallel = on.sequence_parallel;
    run->dtype = dtype;
    run->on = on;
    test_launch(on.tp * on.pp * on.cp, model_main, run);
    assert_true(run->count > (on.parts ? 20 : 40) * VOCAB);
    return run;
}

static void test_logits_like_the_whole_text(void **state) {
    static const places splits[] = {{1, 1, 1, 0, 0, 0, 0}, {2, 1, 1, 0, 0, 0, 0}, {4, 1, 1, 0, 0, 0, 0},
                                    {1, 2, 1, 0, 0, 0, 0}, {2, 2, 1, 0, 0, 0, 0}, {2, 1, 1, 1, 0, 0, 0},
                                    {4, 1, 1, 1, 0, 0, 0}};
    (void)state;
    for (int kind = 0; kind < KINDS; kind++)
        for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) free(run_model(kind, MT_F32, splits[i]));
}

static void test_16_bit_models(void **state) {
    (void)state;
    for (int kind = 0; kind < KINDS; kind++) {
        free(run_model(kind, kind % 2 ? MT_BF16 : MT_F16, (places){1 << kind % 3, 1, 1, 0, 0, 0, 0}));
        free(run_model(kind, kind % 2 ? MT_F16 : MT_BF16, (places){2, 1 + kind % 2, 1, kind % 2, 0, 0, 0}));
    }
}

/* Context ranks divide the tokens of prompts. Each rank gets all logits, which are those of the whole text. */
static void test_prefill_on_context_ranks(void **state) {
    static const places splits[] = {{1, 1, 2, 0, 0, 2, 0},
                                    {2, 1, 2, 1, 0, 2, 0},
                                    {1, 2, 2, 0, 0, 2, 0},
                                    {1, 1, 4, 0, 0, 4, 0},
                                    {1, 1, 2, 0, 0, 4, 0}};
    (void)state;
    for (int kind = 0; kind < KINDS; kind++) {
        for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) free(run_model(kind, MT_F32, splits[i]));
        free(run_model(kind, kind % 2 ? MT_BF16 : MT_F16, splits[kind % 4]));
    }
}

/* Runs a model on each split. All of them compute the bits of the first one. */
static void same_bits(int kind, mt_dtype dtype, const places *splits, size_t count) {
    model_run *one = run_model(kind, dtype, splits[0]);
    for (size_t i = 1; i < count; i++) {
        model_run *other = run_model(kind, dtype, splits[i]);
        assert_int_equal(one->count, other->count);
        assert_memory_equal(one->logits, other->logits, (size_t)one->count * sizeof(float));
        free(other);
    }
    free(one);
}

/* With the built-in GEMM, check_logits also compares the bits of short texts with those of the whole text. */
static void test_same_bits(void **state) {
    static const places splits[] = {{1, 1, 1, 0, 4, 0, 0},
                                    {2, 1, 1, 0, 4, 0, 0},
                                    {4, 1, 1, 0, 4, 0, 0},
                                    {2, 1, 1, 1, 4, 0, 0},
                                    {1, 2, 1, 0, 4, 0, 0}};
    static const places with_context[] = {{1, 1, 1, 0, 4, 4, 0}, {1, 1, 4, 0, 4, 4, 0}, {2, 1, 2, 1, 4, 4, 0}};
    static const places with_parts[] = {{1, 1, 1, 0, 4, 2, 32}, {1, 1, 2, 0, 4, 2, 32}};
    (void)state;
    for (int kind = 0; kind < KINDS; kind++)
        for (int type = 0; type < 2; type++) {
            same_bits(kind, type ? MT_BF16 : MT_F32, splits, sizeof splits / sizeof *splits);
            if (BUILT_IN_GEMM) /* another one may round differently for the tokens of a part */
                same_bits(kind, type ? MT_BF16 : MT_F32, with_context, sizeof with_context / sizeof *with_context);
            if (BUILT_IN_GEMM && type == 0) same_bits(kind, MT_F32, with_parts, 2);
        }
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

/* A layer alone: two calls with a cache give what one call without it gives. */
static mt_status layer_main(mt_comm *world, void *user) {
    mt_transformer_layer_desc d = {.hidden = 16,
                                   .heads = 4,
                                   .kv_heads = 2,
                                   .scores.rotary_base = 100,
                                   .max_seq = 8,
                                   .dropout.hidden = 0.1f,
                                   .sequence_parallel = *(const int *)user};
    mt_transformer_layer layer;
    mt_batch batch = {.sequences = 2, .seq = 6}, first = {.sequences = 2, .seq = 4},
             second = {.sequences = 2, .seq = 2};
    int32_t lengths[2] = {0, 0};
    mt_kv_cache cache = {.max_seq = 6, .lengths = lengths};
    test_rank r;
    float *x, *y, *part, *out;
    int64_t n, local = 12 / (d.sequence_parallel ? mt_comm_size(world) : 1), from;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, NULL, &r));
    MT_TRY(mt_transformer_layer_create(r.ctx, r.params, "layer", &d, &layer));
    MT_TRY(mt_params_init(r.ctx, r.params, 5));
    MT_TRY(disturb_params(&r, 0.2f));
    n = mt_self_attention_cache_groups(&layer.attention);
    CHECK(n == 2 / mt_comm_size(world));
    cache.keys = test_tensor(&r, 2 * n * 6, 4, NAN);
    cache.values = test_tensor(&r, 2 * n * 6, 4, NAN);
    x = test_noise(&r, 12 * 16, 9, 1), y = test_floats(&r, 12 * 16, 0), part = test_floats(&r, 8 * 16, 0);
    out = test_floats(&r, 8 * 16, 0);
    from = d.sequence_parallel ? mt_comm_rank(world) * local : 0;
    MT_TRY(mt_transformer_layer_forward(r.ctx, &layer, &batch, mt_tensor_f32(x + from * 16, local, 16),
                                        mt_tensor_f32(y + from * 16, local, 16), NULL));
    if (d.sequence_parallel) MT_TRY(mt_all_gather(r.ctx, r.grid.tp, y + from * 16, y, (size_t)local * 16, MT_F32));
    for (int b = 0; b < 2; b++) memcpy(part + b * 64, x + b * 96, 64 * sizeof *x);
    mt_comm_ledger_reset(r.grid.tp);
    MT_TRY(mt_transformer_layer_cached_forward(r.ctx, &layer, &first, &cache, mt_tensor_f32(part, 8, 16),
                                               mt_tensor_f32(out, 8, 16)));
    CHECK(mt_comm_ledger(r.grid.tp).calls[MT_ALL_REDUCE] == (mt_comm_size(world) > 1 ? 2u : 0u));
    for (int b = 0; b < 2; b++) MT_TRY(test_near_f32("tokens 0 to 3", out + b * 64, y + b * 96, 64, 1e-5));
    MT_TRY(mt_kv_cache_advance(r.ctx, 6, 2, 4, NULL, lengths));
    for (int b = 0; b < 2; b++) memcpy(part + b * 32, x + b * 96 + 64, 32 * sizeof *x);
    MT_TRY(mt_transformer_layer_cached_forward(r.ctx, &layer, &second, &cache, mt_tensor_f32(part, 4, 16),
                                               mt_tensor_f32(out, 4, 16)));
    for (int b = 0; b < 2; b++) MT_TRY(test_near_f32("tokens 4 and 5", out + b * 32, y + b * 96 + 64, 32, 1e-5));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_layer(void **state) {
    int no = 0, yes = 1;
    (void)state;
    test_launch(1, layer_main, &no);
    test_launch(2, layer_main, &no);
    test_launch(2, layer_main, &yes);
}

static void test_blocks_refuse(void **state) {
    mt_self_attention_desc d = {.hidden = 8, .heads = 2, .scores.rotary_base = 100, .max_seq = 4};
    mt_transformer_layer_desc ld = {.hidden = 8, .heads = 2, .scores.mask = MT_MASK_BIDIRECTIONAL};
    mt_self_attention a, none;
    mt_transformer_layer layer;
    mt_batch batch = {.sequences = 1, .seq = 2};
    int32_t lengths[1] = {0}, ends[2] = {0, 2};
    mt_kv_cache cache = {.max_seq = 4, .lengths = lengths}, k;
    mt_tensor x, y;
    test_rank r;
    (void)state;
    memset(&none, 0, sizeof none);
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_self_attention_create(r.ctx, r.params, "a", &d, &a));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_transformer_layer_create(r.ctx, r.params, "l", &ld, &layer));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    assert_int_equal(mt_self_attention_cache_groups(&a), 2);
    assert_int_equal(mt_self_attention_cache_groups(NULL), 0);
    assert_int_equal(mt_self_attention_cache_groups(&none), 0);
    x = test_tensor(&r, 2, 8, 1), y = test_tensor(&r, 2, 8, 2);
    cache.keys = test_tensor(&r, 8, 4, 0), cache.values = test_tensor(&r, 8, 4, 0);
#define ATTENTION mt_self_attention_cached_forward(r.ctx, &a, &batch, &k, x, y)
    k = cache, k.max_seq = 5;
    REFUSED(r.ctx, MT_ERR_SHAPE, "mt_self_attention_cached_forward|max_seq 5|4", ATTENTION);
    k = cache, k.keys.rows = 7;
    REFUSED(r.ctx, MT_ERR_SHAPE, "keys|[7, 4]|[8, 4]", ATTENTION);
    k = cache, k.values.dtype = MT_F16;
    REFUSED(r.ctx, MT_ERR_DTYPE, "values|f16", ATTENTION);
    k = cache, batch.cu_seqlens = ends, batch.documents = 1;
    REFUSED(r.ctx, MT_ERR_UNSUPPORTED, "cu_seqlens", ATTENTION);
    batch.cu_seqlens = NULL, batch.documents = 0, batch.bias.value = mt_tensor_make(x.data, MT_F32, 2, 2);
    REFUSED(r.ctx, MT_ERR_UNSUPPORTED, "bias", ATTENTION);
    batch.bias.value = mt_none(), lengths[0] = 3;
    REFUSED(r.ctx, MT_ERR_DATA, "3 tokens|2 more|4", ATTENTION);
    lengths[0] = 0;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "overlap", mt_self_attention_cached_forward(r.ctx, &a, &batch, &k, x, x));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "cache is NULL", mt_self_attention_cached_forward(r.ctx, &a, &batch, NULL, x, y));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "attention is NULL",
            mt_self_attention_cached_forward(r.ctx, NULL, &batch, &k, x, y));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "layer is NULL",
            mt_transformer_layer_cached_forward(r.ctx, NULL, &batch, &k, x, y));
    REFUSED(r.ctx, MT_ERR_UNSUPPORTED, "MT_MASK_CAUSAL",
            mt_transformer_layer_cached_forward(r.ctx, &layer, &batch, &k, x, y));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "overlap", mt_transformer_layer_cached_forward(r.ctx, &layer, &batch, &k, x, x));
    test_untouched("y", (const float *)y.data, 16, 2);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, ATTENTION);
    test_paper_rank_close(&r);
}

/* A model with its initial weights. */
static void create_model(test_rank *r, const mt_gpt_desc *d, mt_gpt *gpt) {
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_gpt_create(r->ctx, r->params, d, gpt));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_params_init(r->ctx, r->params, 1));
}

static void test_models_refuse_caches(void **state) {
    mt_gpt_desc d = small_model(16, 4, 2), bidirectional;
    mt_gpt gpt, other, fresh = {0};
    mt_gpt_cache c, empty = {0}, short_one;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    create_model(&r, &d, &gpt);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "sequences is 0", mt_gpt_cache_create(r.ctx, &gpt, 0, 0, &c));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "max_seq is 17|from 0 to 16", mt_gpt_cache_create(r.ctx, &gpt, 2, 17, &c));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "max_seq is -1", mt_gpt_cache_create(r.ctx, &gpt, 2, -1, &c));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_gpt_cache_create(r.ctx, &gpt, 2, 0, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "the model was not created", mt_gpt_cache_create(r.ctx, NULL, 2, 0, &c));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "the model was not created", mt_gpt_cache_create(r.ctx, &fresh, 2, 0, &c));
    assert_int_equal(mt_gpt_cache_bytes(NULL, 1, 1), -1);
    assert_int_equal(mt_gpt_cache_bytes(&fresh, 1, 1), -1);
    assert_int_equal(mt_gpt_cache_bytes(&gpt, -1, 1), -1);
    assert_int_equal(mt_gpt_cache_bytes(&gpt, 1, -1), -1);
    assert_int_equal(mt_gpt_cache_bytes(&gpt, INT64_MAX / 2, 1), -1);
    assert_int_equal(mt_gpt_cache_bytes(&gpt, INT32_MAX, INT32_MAX), -1);
    assert_int_equal(mt_gpt_cache_bytes(&gpt, 2, 0), 2 * 2 * 2 * 2 * 16 * 4 * 4);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_cache_create(r.ctx, &gpt, 2, 0, &c));
    assert_int_equal(c.max_seq, 16);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "sequence is 2", mt_gpt_cache_set_length(r.ctx, &c, 2, 0));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "sequence is -1", mt_gpt_cache_set_length(r.ctx, &c, -1, 0));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "length is 17", mt_gpt_cache_set_length(r.ctx, &c, 0, 17));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_gpt_cache_create", mt_gpt_cache_set_length(r.ctx, &empty, 0, 0));
    assert_int_equal(c.lengths[0], 0);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_cache_create(r.ctx, &gpt, 2, 1, &short_one));
    mt_gpt_cache_destroy(r.ctx, &short_one);
    mt_gpt_cache_destroy(r.ctx, &c);
    mt_gpt_cache_destroy(r.ctx, &empty);
    mt_gpt_cache_destroy(r.ctx, NULL);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, test_rank_renew(&r));
    bidirectional = d, bidirectional.layer.scores.mask = MT_MASK_BIDIRECTIONAL;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_create(r.ctx, r.params, &bidirectional, &other));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_gpt_cache_create|mt_params_init", mt_gpt_cache_create(r.ctx, &other, 2, 0, &c));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    REFUSED(r.ctx, MT_ERR_UNSUPPORTED, "MT_MASK_CAUSAL", mt_gpt_cache_create(r.ctx, &other, 2, 0, &c));
    test_paper_rank_close(&r);
}

static void test_models_refuse(void **state) {
    mt_gpt_desc d = small_model(16, 4, 2);
    mt_gpt gpt, fresh = {0};
    mt_gpt_cache c, empty = {0};
    mt_batch batch = {.sequences = 2, .seq = 1};
    int32_t ids[4] = {0, 1, 2, 3};
    mt_tensor logits;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    create_model(&r, &d, &gpt);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_cache_create(r.ctx, &gpt, 2, 0, &c));
    logits = test_tensor(&r, 2, VOCAB, 5);
#define LOGITS mt_gpt_cached_logits(r.ctx, &gpt, &batch, ids, &c, logits)
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "gpt is NULL", mt_gpt_cached_logits(r.ctx, NULL, &batch, ids, &c, logits));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", mt_gpt_cached_logits(r.ctx, &fresh, &batch, ids, &c, logits));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "batch is NULL", mt_gpt_cached_logits(r.ctx, &gpt, NULL, ids, &c, logits));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_gpt_cache_create",
            mt_gpt_cached_logits(r.ctx, &gpt, &batch, ids, &empty, logits));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_gpt_cache_create",
            mt_gpt_cached_logits(r.ctx, &gpt, &batch, ids, NULL, logits));
    batch.sequences = 1;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "1 sequences|2 layers|2 and 2", LOGITS);
    batch.sequences = 2, ids[1] = VOCAB;
    REFUSED(r.ctx, MT_ERR_DATA, "token id|37", LOGITS);
    ids[1] = 1, batch.seq = 17;
    REFUSED(r.ctx, MT_ERR_SHAPE, "seq is 17", LOGITS);
    batch.seq = 1, batch.token_types = ids;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "token_types", LOGITS);
    batch.token_types = NULL, logits.cols--, logits.ld = VOCAB;
    REFUSED(r.ctx, MT_ERR_SHAPE, "logits", LOGITS);
    logits.cols++, c.lengths[1] = 16;
    REFUSED(r.ctx, MT_ERR_DATA, "sequence 1 has 16 tokens|1 more", LOGITS);
    c.lengths[1] = 0;
    test_untouched("logits", (const float *)logits.data, 2 * VOCAB, 5);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, LOGITS);
    assert_int_equal(c.lengths[0], 1);
    mt_gpt_cache_destroy(r.ctx, &c);
    test_paper_rank_close(&r);
}

/* A dry run counts the bytes of the cache and of the arena, and traces the operators. */
static void test_dry_run(void **state) {
    mt_context_desc where = {.device = MT_DEVICE_META, .arena_bytes = (size_t)1 << 40};
    mt_gpt_desc d = small_model(64, 8, 4);
    mt_batch prompt = {.sequences = 4, .seq = 10}, one = {.sequences = 4, .seq = 1};
    mt_gpt_cache c;
    mt_gpt gpt;
    mt_trace trace;
    test_rank r;
    size_t before, appended = 0, attended = 0, positions = 0;
    (void)state;
    test_paper_rank(4, 1, (mt_grid_desc){.tp = 4}, &where, &r);
    create_model(&r, &d, &gpt);
    before = mt_context_allocated(r.ctx);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_cache_create(r.ctx, &gpt, 4, 16, &c));
    assert_int_equal(mt_context_allocated(r.ctx) - before, 2 * 2 * 4 * 1 * 16 * 8 * 4 + 64);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_cache_set_length(r.ctx, &c, 0, 3));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_cached_logits(r.ctx, &gpt, &prompt, c.lengths, &c, mt_none()));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_context_take_trace(r.ctx, &trace));
    mt_trace_free(&trace);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_cached_logits(r.ctx, &gpt, &one, c.lengths, &c, mt_none()));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_context_take_trace(r.ctx, &trace));
    for (size_t i = 0; i < trace.count; i++) {
        const mt_trace_entry *e = &trace.entries[i];
        if (!e->name) continue;
        appended += strcmp(e->name, "mt_kv_cache_append") == 0;
        positions += strcmp(e->name, "mt_kv_cache_positions") == 0;
        if (strcmp(e->name, "mt_kv_cache_attention") != 0) continue;
        attended++;
        assert_true(e->work == MT_WORK_ATTENTION);
        assert_true(e->flops == 4.0 * 4 * 2 * 16 * 8);                           /* all positions of the cache */
        assert_true(e->bytes == 4.0 * (4 * 4 * 8 + 2 * 4 * 16 * 8 + 4 * 2 * 8)); /* qkv, the cache, out */
    }
    assert_int_equal(appended, 2);
    assert_int_equal(attended, 2);
    assert_int_equal(positions, 1);
    mt_trace_free(&trace);
    mt_gpt_cache_destroy(r.ctx, &c);
    assert_int_equal(mt_context_allocated(r.ctx), before);
    test_paper_rank_close(&r);
}

/* ---- transformers ------------------------------------------------------------------------------------------------ */

#define GOLDEN_TEXTS 3
#define GOLDEN_TOKENS 9

/* The prompts of one model in golden/generate.txt, and the tokens with which transformers continues them. */
typedef struct golden {
    char directory[64];
    int32_t prompt[GOLDEN_TEXTS][8], length[GOLDEN_TEXTS], want[GOLDEN_TEXTS][GOLDEN_TOKENS];
    int texts;
} golden;

static int read_numbers(const char *text, int32_t *out, int most) {
    int n = 0;
    for (char *end; n < most; text = end + 1) {
        out[n++] = (int32_t)strtol(text, &end, 10);
        if (*end != ',') break;
    }
    return n;
}

static int32_t most_probable(const float *logits, int64_t vocab) {
    int32_t best = 0;
    for (int32_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

/* The prompts of the three texts are one call. */
static mt_status continue_texts(test_rank *r, const mt_gpt *gpt, const golden *g) {
    int64_t vocab = gpt->desc.vocab;
    int32_t ids[GOLDEN_TEXTS * 8] = {0};
    float *logits = test_floats(r, GOLDEN_TEXTS * vocab, 0);
    mt_batch batch = {.sequences = GOLDEN_TEXTS, .seq = 8, .lengths = g->length};
    mt_gpt_cache cache;
    MT_TRY(mt_gpt_cache_create(r->ctx, gpt, GOLDEN_TEXTS, 0, &cache));
    memcpy(ids, g->prompt, sizeof ids);
    for (int n = 0; n < GOLDEN_TOKENS; n++) {
        MT_TRY(mt_gpt_cached_logits(r->ctx, gpt, &batch, ids, &cache, mt_tensor_f32(logits, GOLDEN_TEXTS, vocab)));
        for (int b = 0; b < GOLDEN_TEXTS; b++) {
            ids[b] = most_probable(logits + b * vocab, vocab);
            if (ids[b] == g->want[b][n]) continue;
            fprintf(stderr, "%s: text %d: token %d is %d, transformers has %d\n", g->directory, b, n, (int)ids[b],
                    (int)g->want[b][n]);
            return MT_ERR_DATA;
        }
        batch.seq = 1, batch.lengths = NULL;
    }
    mt_gpt_cache_destroy(r->ctx, &cache);
    return MT_SUCCESS;
}

static mt_status golden_main(mt_comm *world, void *user) {
    const golden *g = (const golden *)user;
    mt_checkpoint_desc files = {.directory = NULL};
    mt_checkpoint *checkpoint = NULL;
    mt_gpt_desc d;
    mt_gpt gpt;
    test_rank r;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, NULL, &r));
    MT_TRY(mt_gpt_desc_read(r.ctx, g->directory, &d));
    MT_TRY(mt_gpt_create(r.ctx, r.params, &d, &gpt));
    MT_TRY(mt_gpt_checkpoint_create(r.ctx, r.params, &gpt, &files, &checkpoint));
    MT_TRY(mt_checkpoint_import(r.ctx, checkpoint, g->directory));
    MT_TRY(continue_texts(&r, &gpt, g));
    mt_checkpoint_destroy(r.ctx, checkpoint);
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_continuations_of_transformers(void **state) {
    char line[256], name[64], prompt[64], tokens[128];
    FILE *file = fopen("tests/golden/generate.txt", "r");
    golden g;
    int models = 0;
    (void)state;
    assert_non_null(file);
    memset(&g, 0, sizeof g);
    while (fgets(line, sizeof line, file)) {
        assert_int_equal(sscanf(line, "%63s %63s %127s", name, prompt, tokens), 3);
        snprintf(g.directory, sizeof g.directory, "tests/golden/%.40s", name);
        g.length[g.texts] = read_numbers(prompt, g.prompt[g.texts], 8);
        assert_int_equal(read_numbers(tokens, g.want[g.texts], GOLDEN_TOKENS), GOLDEN_TOKENS);
        if (++g.texts < GOLDEN_TEXTS) continue;
        for (int tp = 1; tp <= 4; tp *= 2) test_launch(tp, golden_main, &g);
        memset(&g, 0, sizeof g);
        models++;
    }
    fclose(file);
    assert_true(models >= 4 && g.texts == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        REF_TEST(test_operators_like_double_precision),
        REF_TEST(test_parts_of_prompts),
        REF_TEST(test_huge_windows),
        REF_TEST(test_positions_and_lengths),
        REF_TEST(test_operators_refuse),
        REF_TEST(test_operators_refuse_lengths),
        cmocka_unit_test(test_logits_like_the_whole_text),
        cmocka_unit_test(test_16_bit_models),
        cmocka_unit_test(test_prefill_on_context_ranks),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_layer),
        cmocka_unit_test(test_blocks_refuse),
        cmocka_unit_test(test_models_refuse_caches),
        cmocka_unit_test(test_models_refuse),
        cmocka_unit_test(test_dry_run),
        cmocka_unit_test(test_continuations_of_transformers),
    };
    return cmocka_run_group_tests_name("kv_cache", tests, NULL, NULL);
}
