/* ---- attention on a CPU ------------------------------------------------------------------------------------------ */

#pragma once
#include "attention_desc.c"

/* A block of scores: queries [query, query + rows) of a head and keys [key, key + keys) of its group. */
typedef struct mti_score_block {
    int64_t query, rows, key, keys;
    mti_span seen[MTI_QUERIES];                /* of each query: the keys that it sees, as columns of the block */
    mti_span by_queries[MTI_QUERIES / MTI_MR]; /* the columns that the queries of a tile see together */
    mti_span by_keys[MTI_KEYS / MTI_MR];       /* the queries that see a key of a tile, as rows of the block */
} mti_score_block;

/* Extends `all` so that it also has the numbers [first, end), if these are any. */
static void mti_span_extend(mti_span *all, int64_t first, int64_t end) {
    if (end <= first) return;
    if (all->end <= all->first) all->first = first, all->end = end;
    all->first = mt_min(all->first, first);
    all->end = mt_max(all->end, end);
}

/* Notes that the queries [first, end) of a block see its columns `seen`. */
static void mti_scores_note(mti_score_block *b, int64_t first, int64_t end, mti_span seen) {
    int64_t t;
    for (t = first / MTI_MR; t * MTI_MR < end; t++) mti_span_extend(&b->by_queries[t], seen.first, seen.end);
    for (t = seen.first / MTI_MR; t * MTI_MR < seen.end; t++) mti_span_extend(&b->by_keys[t], first, end);
}

/* What query r of a block sees, as columns of the block: none if end <= first. Neither number decreases with r. */
static mti_span mti_scores_span(const mti_attention *a, const mti_head *h, const mti_score_block *b, int64_t r) {
    mti_span seen = mti_keys_of(&a->desc, h->length, h->batch, b->query + r);
    seen = mti_span_of_both(seen, b->key, b->key + b->keys);
    seen.first -= b->key;
    seen.end -= b->key;
    return seen;
}

/* Sets what the queries of a block see. Returns 0 if they see no key of it. */
static int mti_scores_see(const mti_attention *a, const mti_head *h, mti_score_block *b) {
    int64_t r, first = 0; /* the first of the queries that see the same */
    int any = 0, same;
    mti_span low = mti_scores_span(a, h, b, 0), high = mti_scores_span(a, h, b, b->rows - 1);
    if (high.end <= 0 || low.first >= b->keys) return 0;
    same = low.first == high.first && low.end == high.end;
    memset(b->by_queries, 0, sizeof b->by_queries);
    memset(b->by_keys, 0, sizeof b->by_keys);
    for (r = 0; r < b->rows; r++) {
        mti_span *seen = &b->seen[r];
        *seen = same ? low : mti_scores_span(a, h, b, r);
        if (seen->end <= seen->first) seen->first = seen->end = 0;
        any |= seen->end > 0;
        if (seen->first == b->seen[first].first && seen->end == b->seen[first].end) continue;
        mti_scores_note(b, first, r, b->seen[first]);
        first = r;
    }
    mti_scores_note(b, first, b->rows, b->seen[first]);
    return any;
}

/* The union of the spans of rows [i, end), of which MTI_MR share one. */
static mti_span mti_spans_of_rows(const mti_span *seen, int64_t i, int64_t end) {
    mti_span all = {0, 0};
    for (; i < end; i += MTI_MR) mti_span_extend(&all, seen[i / MTI_MR].first, seen[i / MTI_MR].end);
    return all;
}

/* c [m, n] = alpha a b + beta c, without the tiles whose columns no query of the tile sees. */
static void mti_score_tiles(const mti_gemm_piece *x, const mti_span *seen) {
    int64_t rows = x->tiles ? MTI_TILES : MTI_MR, i, j;
    for (j = 0; j < x->n; j += MTI_NR)
        for (i = 0; i < x->m; i += rows) {
            mti_span t = mti_spans_of_rows(seen, i, mt_min(i + rows, x->m));
            if (j >= t.end || j + MTI_NR <= t.first) continue;
            if (x->tiles) mti_tiles_product(x, i, j, 0, x->k, x->a + i * x->a_row, x->a_row);
            else mti_gemm_tile(x, i, j, 0, x->k);
        }
}

/* mti_score_sums in tiles: they sum over all steps that have a part of a span. */
static void mti_score_sums_in_tiles(const mti_gemm_piece *x, const mti_span *seen) {
    float room[MTI_TILES * MTI_QUERIES / 2];
    int64_t i, j;
    for (i = 0; i < x->m; i += MTI_TILES) {
        mti_span t = mti_spans_of_rows(seen, i, mt_min(i + MTI_TILES, x->m));
        const float *a = x->a + i * x->a_row;
        int64_t first = t.first / MTI_TILES * MTI_TILE_SIDE, end = mt_round_up(t.end, MTI_TILES) / 2, lda = x->a_row;
        a += first * x->a_col;
        if (x->a_col != 1 && end > first) {
            lda = end - first;
            mti_tiles_transpose(a, x->a_col, lda, room);
            a = room;
        }
        for (j = 0; j < x->n && end > first; j += MTI_TILES) mti_tiles_product(x, i, j, first, end, a, lda);
    }
}

/* c [m, n] += alpha a b, where the rows of a tile sum over their span, in pairs over all pairs that have a part of
   it. */
static void mti_score_sums(const mti_gemm_piece *x, const mti_span *seen) {
    int64_t i, j;
    if (x->tiles) {
        mti_score_sums_in_tiles(x, seen);
        return;
    }
    for (j = 0; j < x->n; j += MTI_NR)
        for (i = 0; i < x->m; i += MTI_MR) {
            mti_span t = seen[i / MTI_MR];
            if (t.end <= t.first) continue;
            if (x->pairs) t.first /= 2, t.end = (t.end + 1) / 2;
            mti_gemm_tile(x, i, j, t.first, t.end);
        }
}

/* out [rows, keys] = alpha x y^T, for x [rows, head_dim] of mti_attention_read and packed features y. */
static void mti_scores_of(const mti_attention *a, const mti_score_block *b, float alpha, mt_tensor x, const float *y,
                          float *out) {
    mti_gemm_piece g;
    g.a = mti_row(x, 0);
    g.packed_a = NULL;
    g.packed_b = y + b->key * x.cols;
    g.c = out;
    g.a_row = mt_tensor_ld(x);
    g.a_col = 1;
    g.ldc = mti_scores_width(&a->desc);
    g.m = b->rows;
    g.n = b->keys;
    g.k = x.cols;
    g.alpha = alpha;
    g.beta = 0.0f;
    g.pairs = a->pairs;
    g.tiles = a->tiles;
    mti_score_tiles(&g, b->by_queries);
}

/* out [rows, head_dim] += alpha x y, for x [rows, keys], whose rows are ldx apart, and packed rows y. In pairs, x has
   pairs of keys. */
static void mti_scores_to_queries(const mti_attention *a, const mti_score_block *b, float alpha, const float *x,
                                  int64_t ldx, const float *y, mt_tensor out) {
    mti_gemm_piece g;
    g.a = x;
    g.packed_a = NULL;
    g.packed_b = y + mti_places(a, b->key) * mt_round_up(a->desc.head_dim, MTI_NR);
    g.c = mti_row(out, 0);
    g.a_row = ldx;
    g.a_col = 1;
    g.ldc = mt_tensor_ld(out);
    g.m = b->rows;
    g.n = a->desc.head_dim;
    g.k = mti_places(a, b->keys);
    g.alpha = alpha;
    g.beta = 1.0f;
    g.pairs = a->pairs;
    g.tiles = a->tiles;
    mti_score_sums(&g, b->by_queries);
}

/* out [keys, head_dim] += alpha x^T y, for x [rows, keys] and y with packed queries. In pairs, every second row of x
   has pairs of queries. */
static void mti_scores_to_keys(const mti_attention *a, const mti_score_block *b, float alpha, const float *x,
                               const float *y, mt_tensor out) {
    mti_gemm_piece g;
    g.a = x;
    g.packed_a = NULL;
    g.packed_b = y;
    g.c = mti_row(out, 0);
    g.a_row = 1;
    g.a_col = (a->pairs ? 2 : 1) * mti_scores_width(&a->desc);
    g.ldc = mt_tensor_ld(out);
    g.m = b->keys;
    g.n = a->desc.head_dim;
    g.k = mti_places(a, b->rows);
    g.alpha = alpha;
    g.beta = 1.0f;
    g.pairs = a->pairs;
    g.tiles = a->tiles;
    mti_score_sums(&g, b->by_keys);
}

/* Caps n scores x. slopes, if it is not NULL, becomes the derivative of the soft cap. */
static void mti_attention_cap_row(float cap, float *x, float *slopes, int64_t n) {
    int64_t j;
    for (j = 0; j < n; j++) {
        float t = tanhf(x[j] / cap);
        x[j] = cap * t;
        if (slopes) slopes[j] = 1.0f - t * t;
    }
}

/* Adds what a distance of keys costs: x[j] belongs to key first + j. */
static void mti_attention_alibi_row(float slope, int64_t position, int64_t first, float *x, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float distance = (float)(position - first - j);
        x[j] -= slope * (distance < 0.0f ? -distance : distance);
    }
}

/* Changes the scores x of query i for n keys from `first` on as desc.softcap, alibi_slopes and bias say. */
static void mti_attention_change_row(const mti_attention *a, const mti_head *h, int64_t i, int64_t first, float *x,
                                     int64_t n, float *slopes) {
    const mt_attention_desc *s = &a->desc;
    int64_t row = mti_bias_row(s, h->batch, h->head, i), j;
    float room[MTI_KEYS];
    if (s->scores.softcap > 0.0f) mti_attention_cap_row(s->scores.softcap, x, slopes, n);
    if (s->scores.alibi_slopes)
        mti_attention_alibi_row(s->scores.alibi_slopes[h->head], i + mti_key_of_query(s), first, x, n);
    if (!s->bias.value.data) return;
    first += s->part.first_key;
    if (s->bias.value.dtype == MT_U8) {
        const uint8_t *seen = (const uint8_t *)s->bias.value.data + row * mt_tensor_ld(s->bias.value) + first;
        for (j = 0; j < n; j++)
            if (!seen[j]) x[j] = -(float)INFINITY;
    } else mti_row_add(x, mti_row(mti_f32_read(s->bias.value, row, 1, first, n, room), 0), x, n);
}

/* The global element number of the probability of query i and key 0. */
static int64_t mti_probability_element(const mti_attention *a, const mti_head *h, int64_t i) {
    const mt_attention_desc *s = &a->desc;
    int64_t query = mti_random_element(s->dropout.at, h->batch, h->head) * s->part.seq + s->part.first_query + i;
    return query * s->part.kv_seq + s->part.first_key;
}

static void mti_words_to_factors(const uint32_t *words, uint32_t threshold, float scale, float *factors, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) factors[j] = mti_select(words[j] >= threshold, scale, 0.0f);
}

/* The factors by which dropout multiplies the n elements from number e on: 0 drops one. */
static void mti_dropout_factors(const mt_dropout *dropout, int64_t e, float *factors, int64_t n) {
    uint32_t room[MTI_WORDS_ROOM], threshold = mti_dropout_threshold(dropout->p);
    int64_t j, count;
    for (j = 0; j < n; j += count) {
        count = mt_min(MTI_WORDS, n - j);
        mti_words_to_factors(mti_random_words(dropout->at, e + j, count, room), threshold,
                             mti_dropout_scale(dropout->p), factors + j, count);
    }
}

/* A dropped element becomes 0, even if it is not finite. */
static void mti_attention_drop_row(const float *factors, float *p, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) p[j] = mti_select(factors[j] > 0.0f, p[j] * factors[j], 0.0f);
}

#if MT_HAS_AVX512_BF16
/* Rounds n numbers, whole vectors of MTI_PARTIALS, to pairs of neighbours. out may be x. */
static void mti_key_pairs(const float *x, float *out, int64_t n) {
    mti_simd a, b;
    int64_t j;
    for (j = 0; j < n; j += 2 * MTI_SIMD, out += MTI_SIMD) {
        memcpy(&a, x + j, sizeof a);
        memcpy(&b, x + j + MTI_SIMD, sizeof b);
        a = (mti_simd)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
        memcpy(out, &a, sizeof a);
    }
}

/* Rounds two rows of n numbers, whole vectors, to pairs of one number of x and one of y. out may be x or y. */
static void mti_query_pairs(const float *x, const float *y, float *out, int64_t n) {
    const __m512i low = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i turns = _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(16)), 16));
    mti_simd a, b;
    int64_t j;
    for (j = 0; j < n; j += MTI_SIMD) {
        memcpy(&a, x + j, sizeof a);
        memcpy(&b, y + j, sizeof b);
        a = (mti_simd)_mm512_permutexvar_epi16(turns, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
        memcpy(out + j, &a, sizeof a);
    }
}
#else
static void mti_key_pairs(const float *x, float *out, int64_t n) { (void)x, (void)out, (void)n; }
static void mti_query_pairs(const float *x, const float *y, float *out, int64_t n) {
    (void)x, (void)y, (void)out, (void)n;
}
#endif

/* Fills the elements of x [n] outside of [first, end) with zeros. */
static void mti_attention_zero_outside(float *x, int64_t first, int64_t end, int64_t n) {
    mti_row_fill(x, 0.0f, first);
    mti_row_fill(x + end, 0.0f, n - end);
}

/* Extends a span of a row of scores to whole vectors of MTI_PARTIALS. */
static mti_span mti_span_whole(mti_span seen) {
    seen.first -= seen.first % MTI_PARTIALS;
    seen.end = mt_round_up(seen.end, MTI_PARTIALS);
    return seen;
}

/* Fills a row of scores around a span, up to whole vectors. */
static void mti_span_pad(float *x, mti_span seen, float value) {
    mti_span whole = mti_span_whole(seen);
    mti_row_fill(x + whole.first, value, seen.first - whole.first);
    mti_row_fill(x + seen.end, value, whole.end - seen.end);
}

/* The softmax of the queries of a head so far: the largest score, and the sum of e^(score - top). */
typedef struct mti_softmax {
    float top[MTI_QUERIES], sum[MTI_QUERIES];
} mti_softmax;

/* Adds the scores that query i sees to the softmax of row r. The scores x are a row of a block, the first of which is
   that of key `key`. They become e^(score - top), with dropout, and 0 around those seen, up to whole vectors. Returns 0
   if all of them are masked, and the row of the output `out` must not get them. */
static int mti_softmax_add(const mti_attention *a, const mti_head *h, mti_softmax *m, int64_t r, int64_t i, int64_t key,
                           float *x, mti_span seen, float *out) {
    const mt_dropout *dropout = &a->desc.dropout;
    mti_span whole = mti_span_whole(seen);
    float *p = x + seen.first, top, old = m->top[r], factors[MTI_KEYS];
    int64_t first = key + seen.first, n = whole.end - whole.first;
    mti_attention_change_row(a, h, i, first, p, seen.end - seen.first, NULL);
    mti_span_pad(x, seen, -(float)INFINITY);
    x += whole.first;
    top = mti_row_max(x, n);
    if (top == -(float)INFINITY && mti_row_sum(x, n) == top) return 0; /* all are masked, none is NaN */
    if (top < old) top = old;
    if (top > old && m->sum[r] != 0.0f) {
        float factor = mti_exp(old - top);
        m->sum[r] *= factor;
        mti_row_scale(out, factor, a->desc.head_dim);
    }
    m->top[r] = top;
    m->sum[r] += mti_row_exp(x, top, n);
    if (dropout->p > 0.0f) {
        mti_dropout_factors(dropout, mti_probability_element(a, h, i) + first, factors, seen.end - seen.first);
        mti_attention_drop_row(factors, p, seen.end - seen.first);
    }
    return 1;
}

/* scores = e^(scores - the largest of the row so far), with dropout. The output so far is scaled to the same number
   (arXiv 2205.14135, algorithm 1). Rows of scores that are not seen become 0. In pairs, a row then has pairs of
   keys. */
static void mti_scores_softmax(const mti_attention *a, const mti_head *h, const mti_score_block *b, mti_softmax *m,
                               mt_tensor out) {
    int64_t width = mt_round_up(b->keys, MTI_PARTIALS), r;
    for (r = 0; r < b->rows; r++) {
        float *p = a->scores + r * mti_scores_width(&a->desc);
        mti_span seen = b->seen[r];
        if (seen.end > seen.first && mti_softmax_add(a, h, m, r, b->query + r, b->key, p, seen, mti_row(out, r)))
            seen = mti_span_whole(seen);
        else seen.end = seen.first;
        mti_attention_zero_outside(p, seen.first, seen.end, width);
        if (a->pairs) mti_key_pairs(p, p, width);
    }
}

/* Divides the output by the sums, and writes lse. A query that sees no key has the output 0. */
static void mti_softmax_end(const mti_attention *a, const mti_head *h, const mti_softmax *m, int64_t row,
                            mt_tensor out) {
    int64_t r;
    for (r = 0; r < out.rows; r++) {
        float sum = m->sum[r];
        mti_row_scale(mti_row(out, r), sum == 0.0f ? 0.0f : 1.0f / sum, out.cols);
        if (a->lse.data) *mti_at(a->lse, h->head, row + r) = sum == 0.0f ? m->top[r] : m->top[r] + logf(sum);
    }
    mti_f32_write(out, a->out, row, h->out_col);
}

/* Fills a view of any type with zeros. */
static void mti_attention_clear(mt_tensor t) {
    int64_t i;
    for (i = 0; i < t.rows; i++) memset(mti_bytes_at(t, i, 0), 0, (size_t)t.cols * mt_dtype_size(t.dtype));
}

/* Computes the output of up to MTI_QUERIES queries of a head, from `query` on, block by block. */
static void mti_attention_forward_queries(const mti_attention *a, const mti_head *h, int64_t query) {
    const mt_attention_desc *s = &a->desc;
    int64_t row = h->query + query;
    mt_tensor q, out;
    mti_softmax m;
    mti_score_block b;
    b.query = query;
    b.rows = mt_min(MTI_QUERIES, s->seq - query);
    q = mti_attention_read(a, a->q, row, b.rows, h->q_col, a->q_room);
    out = mti_f32_place(a->out, row, b.rows, h->out_col, s->head_dim, a->out_room);
    mti_row_fill(m.top, -(float)INFINITY, b.rows);
    mti_row_fill(m.sum, 0.0f, b.rows);
    mti_attention_clear(out);
    for (b.key = 0; b.key < s->kv_seq; b.key += MTI_KEYS) {
        b.keys = mt_min(MTI_KEYS, s->kv_seq - b.key);
        if (!mti_scores_see(a, h, &b)) continue;
        mti_scores_of(a, &b, s->scores.scale, q, a->k_features, a->scores);
        mti_scores_softmax(a, h, &b, &m, out);
        mti_scores_to_queries(a, &b, 1.0f, a->scores, mti_scores_width(s), a->v_keys, out);
    }
    mti_softmax_end(a, h, &m, row, out);
}

/* Computes the output of a query head. */
static void mti_attention_forward_head(const mti_attention *a, const mti_head *h) {
    int64_t query;
    for (query = 0; query < a->desc.seq; query += MTI_QUERIES) mti_attention_forward_queries(a, h, query);
}

/* The number of blocks of queries. */
static int64_t mti_attention_blocks(const mt_attention_desc *s) { return (s->seq + MTI_QUERIES - 1) / MTI_QUERIES; }

/* An item is a block of queries of a head. Its number counts sequences, groups, heads and blocks, in this order. The
   last block follows the first one, and so on: with a causal mask two neighbours have as much work as any other two. */
static void mti_cpu_attention_forward(void *data, int thread, int64_t first, int64_t last) {
    const mti_attention a = mti_attention_of_thread((const mti_attention *)data, thread);
    const mt_attention_desc *s = &a.desc;
    int64_t blocks = mti_attention_blocks(s), of_group = s->heads_per_group * blocks, i;
    if (a.tiles) mti_tiles_begin();
    for (i = first; i < last; i++) {
        int64_t pair = i / of_group, block = i % blocks;
        mti_head h = mti_attention_head(&a, pair / s->groups, pair % s->groups, i % of_group / blocks);
        if (i == first || i % of_group == 0) mti_attention_pack(&a, h.batch, h.group);
        block = block % 2 ? blocks - 1 - block / 2 : block / 2;
        mti_attention_forward_queries(&a, &h, block * MTI_QUERIES);
    }
    if (a.tiles) mti_tiles_end();
}

/* scores = p = e^(scores - lse), and grads = p (grads - delta). On entry grads is the gradient of p, on return the
   gradient of the scores. */
static void mti_attention_backward_row(float *scores, float *grads, float lse, float delta, int64_t n) {
    float least = mti_unknown(-127.0f);
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float p = mti_exp_below(scores[j] - lse, least);
        scores[j] = p;
        grads[j] = p * (grads[j] - delta);
    }
}

/* The row of query i in backward: scores become p, and grads, the gradients of p, those of the scores. Around those
   seen, both become 0, up to whole vectors. With dropout D, scores become D p, which dv needs, and D is applied to the
   incoming gradient first. delta = rowsum(dout * out) holds with and without D, because out contains D. The gradient of
   the bias is that of the changed scores, before the soft cap's derivative. */
static void mti_scores_backward_row(const mti_attention *a, const mti_head *h, int64_t i, int64_t key, float *p,
                                    float *d, mti_span seen, float delta) {
    const mt_attention_desc *s = &a->desc;
    mti_span whole = mti_span_whole(seen);
    int64_t first = key + seen.first, n = seen.end - seen.first, j;
    float slopes[MTI_KEYS], factors[MTI_KEYS], lse = *mti_at(a->lse, h->head, h->query + i), *dbias;
    float *x = p + seen.first, *dx = d + seen.first;
    mti_attention_change_row(a, h, i, first, x, n, slopes);
    if (s->dropout.p > 0.0f) {
        mti_dropout_factors(&s->dropout, mti_probability_element(a, h, i) + first, factors, n);
        mti_attention_drop_row(factors, dx, n);
    }
    mti_attention_backward_row(p + whole.first, d + whole.first, lse, delta, whole.end - whole.first);
    mti_span_pad(p, seen, 0.0f);
    mti_span_pad(d, seen, 0.0f);
    if (s->dropout.p > 0.0f) mti_attention_drop_row(factors, x, n);
    if (s->bias.grad.data) {
        dbias = mti_at(s->bias.grad, mti_bias_row(s, h->batch, h->head, i), s->part.first_key + first);
        mti_row_add(dbias, dx, dbias, n);
    }
    for (j = 0; s->scores.softcap > 0.0f && j < n; j++) dx[j] *= slopes[j];
}

/* Rounds the rows of probabilities and gradients that end with row r, the second one of a pair or the last one. */
static void mti_scores_round(const mti_attention *a, int64_t r, int64_t width) {
    static const float zeros[MTI_KEYS] = {0};
    int64_t ld = mti_scores_width(&a->desc), first = r - r % 2;
    float *p = a->scores + first * ld, *d = a->grads + first * ld, *pairs = a->grad_pairs + first * ld / 2;
    mti_key_pairs(d, pairs, width);
    if (r > first) mti_key_pairs(d + ld, pairs + ld / 2, width);
    mti_query_pairs(p, r > first ? p + ld : zeros, p, width);
    mti_query_pairs(d, r > first ? d + ld : zeros, d, width);
}

/* Computes the probabilities of a block and the gradients of its scores. What is not seen becomes 0. In pairs, every
   second row gets pairs of queries, and grad_pairs gets pairs of keys. In tiles, queries that do not exist count as
   0. */
static void mti_scores_backward_rows(const mti_attention *a, const mti_head *h, const mti_score_block *b,
                                     const float *deltas) {
    int64_t width = mt_round_up(b->keys, MTI_PARTIALS), r;
    for (r = 0; r < b->rows; r++) {
        float *p = a->scores + r * mti_scores_width(&a->desc), *d = a->grads + r * mti_scores_width(&a->desc);
        mti_span seen = b->seen[r];
        if (*mti_at(a->lse, h->head, h->query + b->query + r) == -(float)INFINITY) seen.end = seen.first;
        if (seen.end > seen.first) {
            mti_scores_backward_row(a, h, b->query + r, b->key, p, d, seen, deltas[r]);
            seen = mti_span_whole(seen);
        }
        mti_attention_zero_outside(p, seen.first, seen.end, width);
        mti_attention_zero_outside(d, seen.first, seen.end, width);
        if (a->pairs && (r % 2 == 1 || r + 1 == b->rows)) mti_scores_round(a, r, width);
    }
    for (r = mt_round_up(r, 2); a->tiles && r < mt_round_up(b->rows, MTI_TILES); r += 2) {
        mti_row_fill(a->scores + r * mti_scores_width(&a->desc), 0.0f, width);
        mti_row_fill(a->grads + r * mti_scores_width(&a->desc), 0.0f, width);
    }
}

/* The queries of a block in backward: what is read for them, see mti_attention_read, and the gradient in f32. */
typedef struct mti_query_rows {
    mt_tensor q, dout, dq;
    float deltas[MTI_QUERIES]; /* rowsum(dout * out) */
} mti_query_rows;

/* Computes what a block adds to the gradients: dv += p^T dout, dq += scale ds k, dk += scale ds^T q. dk and dv are
   those of the group. */
static void mti_scores_backward(const mti_attention *a, const mti_head *h, const mti_score_block *b,
                                const mti_query_rows *x, mt_tensor dk, mt_tensor dv) {
    const float *ds = a->pairs ? a->grad_pairs : a->grads;
    int64_t width = mti_scores_width(&a->desc);
    float scale = a->desc.scores.scale;
    mti_scores_of(a, b, scale, x->q, a->k_features, a->scores);
    mti_scores_of(a, b, 1.0f, x->dout, a->v_features, a->grads);
    mti_scores_backward_rows(a, h, b, x->deltas);
    mti_scores_to_keys(a, b, 1.0f, a->scores, a->dout_queries, mt_tensor_rows(dv, b->key, b->keys));
    mti_scores_to_queries(a, b, scale, ds, mti_places(a, width), a->k_keys, x->dq);
    mti_scores_to_keys(a, b, scale, a->grads, a->q_queries, mt_tensor_rows(dk, b->key, b->keys));
}

/* Reads and packs the queries of a block. dq is that of the head. */
static void mti_query_rows_read(const mti_attention *a, const mti_head *h, const mti_score_block *b, mt_tensor dq,
                                mti_query_rows *x) {
    int64_t d = a->desc.head_dim, row = h->query + b->query, rows = b->rows, r;
    mt_tensor out = mti_f32_read(a->out, row, rows, h->out_col, d, a->out_room);
    x->dout = mti_f32_read(a->dout, row, rows, h->out_col, d, a->dout_room);
    for (r = 0; r < rows; r++) x->deltas[r] = mti_row_dot(mti_row(x->dout, r), mti_row(out, r), d);
    x->q = mti_attention_read(a, a->q, row, rows, h->q_col, a->q_room);
    x->dq = mt_tensor_rows(dq, b->query, rows);
    if (a->pairs) {
        x->dout = mti_feature_pairs(a, a->dout, row, rows, h->out_col, a->dout_room);
        mti_pack_rows(a, a->q, row, h->q_col, rows, rows, a->q_queries);
        mti_pack_rows(a, a->dout, row, h->out_col, rows, rows, a->dout_queries);
    } else {
        mti_pack_rows(a, x->q, 0, 0, rows, rows, a->q_queries);
        mti_pack_rows(a, x->dout, 0, 0, rows, rows, a->dout_queries);
    }
}

/* Computes the gradients of a query head, block by block. The keys of a block, and their gradients, stay in L2 while
   all queries use them. */
static void mti_attention_backward_head(const mti_attention *a, const mti_head *h, mt_tensor dk, mt_tensor dv) {
    const mt_attention_desc *s = &a->desc;
    mt_tensor dq = mti_f32_place(a->dq, h->query, s->seq, h->q_col, s->head_dim, a->dq_room);
    mti_query_rows x;
    mti_score_block b;
    mti_attention_clear(dq);
    for (b.key = 0; b.key < s->kv_seq; b.key += MTI_KEYS)
        for (b.query = 0; b.query < s->seq; b.query += MTI_QUERIES) {
            b.keys = mt_min(MTI_KEYS, s->kv_seq - b.key);
            b.rows = mt_min(MTI_QUERIES, s->seq - b.query);
            if (!mti_scores_see(a, h, &b)) continue;
            mti_query_rows_read(a, h, &b, dq, &x);
            mti_scores_backward(a, h, &b, &x, dk, dv);
        }
    mti_f32_write(dq, a->dq, h->query, h->q_col);
}

/* Computes the gradients of a group of a sequence. Its heads add to the same dk and dv, which are zero before the first
   of them. */
static void mti_attention_backward_group(const mti_attention *a, int64_t batch, int64_t group) {
    const mt_attention_desc *s = &a->desc;
    int64_t row = batch * s->kv_seq, col = group * a->kv_step, j;
    mt_tensor dk = mti_f32_place(a->dk, row, s->kv_seq, col, s->head_dim, a->dk_room);
    mt_tensor dv = mti_f32_place(a->dv, row, s->kv_seq, col, s->head_dim, a->dv_room);
    mti_attention_pack(a, batch, group);
    mti_attention_clear(dk);
    mti_attention_clear(dv);
    for (j = 0; j < s->heads_per_group; j++) {
        mti_head h = mti_attention_head(a, batch, group, j);
        mti_attention_backward_head(a, &h, dk, dv);
    }
    mti_f32_write(dk, a->dk, row, col);
    mti_f32_write(dv, a->dv, row, col);
}

/* The number of neighbouring items of backward that add to the same elements of dbias. One thread computes them. */
static int64_t mti_dbias_items(const mt_attention_desc *s) {
    if (!s->bias.grad.data) return 1;
    if (s->bias.heads > 1) return s->bias.batch > 1 ? 1 : s->batch;
    return s->bias.batch > 1 ? s->groups : s->batch * s->groups;
}

/* An item is a group of a sequence. Those that share a row of dbias have neighbouring numbers. */
static void mti_cpu_attention_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_attention a = mti_attention_of_thread((const mti_attention *)data, thread);
    const mt_attention_desc *s = &a.desc;
    int64_t i;
    if (a.tiles) mti_tiles_begin();
    for (i = first; i < last; i++) {
        if (s->bias.heads > 1) mti_attention_backward_group(&a, i % s->batch, i / s->batch);
        else mti_attention_backward_group(&a, i / s->groups, i % s->groups);
    }
    if (a.tiles) mti_tiles_end();
}
