/* test_sample.c - tests the sampling of tokens: mt_sample_candidates and mt_sample_ids of mt_kernels.cuh,
   mt_vocab_parallel_sample, and mt_gpt_sample. A sorted search in double precision with the same random words draws the
   same tokens on every split; the kept tokens are those of Hugging Face's transformers; frequencies agree with softmax.
       cc -std=gnu17 -O2 -I. tests/test_sample.c -lpthread -lm */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test_ranks.h"

static const int splits[] = {1, 2, 3, 4, 8};
#define SPLITS (sizeof splits / sizeof *splits)

/* ---- the reference ----------------------------------------------------------------------------------------------- */

typedef struct token {
    double x;
    int32_t id;
} token;

static int by_logit(const void *a, const void *b) {
    const token *s = (const token *)a, *t = (const token *)b;
    return s->x != t->x ? (s->x < t->x) - (s->x > t->x) : (s->id > t->id) - (s->id < t->id);
}

/* Sorts the tokens, and returns how many of them are kept. *margin is the distance of top_p to the next cumulated
   probability. */
static int64_t ref_kept(const float *x, int64_t vocab, const mt_sample_desc *s, token *out, double *margin) {
    double t = s->temperature, before = 0, total = 0;
    int64_t n = vocab, k;
    for (int64_t i = 0; i < vocab; i++) out[i] = (token){(double)x[i], (int32_t)i};
    qsort(out, (size_t)vocab, sizeof *out, by_logit);
    *margin = 1;
    if (t == 0 || s->top_p == (float)MT_ZERO) return 1;
    if (s->top_k > 0 && s->top_k < n) n = s->top_k;
    if (s->top_p == 0 || s->top_p == 1) return n;
    for (k = 0; k < n; k++) total += exp((out[k].x - out[0].x) / t);
    for (k = 0; k < n; k++) {
        if (k > 0) *margin = fmin(*margin, fabs(before / total - (double)s->top_p));
        if (k > 0 && !(before / total < (double)s->top_p)) break;
        before += exp((out[k].x - out[0].x) / t);
    }
    return k;
}

/* The random word of mt_random, from its description. */
static uint32_t ref_word(uint64_t seed, uint64_t sequence, uint64_t element) {
    uint64_t block = element / 4;
    uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)sequence, (uint32_t)(sequence >> 32)};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)}, out[4];
    mt_philox4x32(counter, key, out);
    return out[element % 4];
}

/* Draws the token of a row, or returns -1 when rounding may decide which tokens are kept. */
static int32_t ref_draw(const float *x, int64_t vocab, const mt_sample_desc *s, uint64_t sequence, int64_t position,
                        token *room) {
    double margin, best = -INFINITY;
    int64_t n = ref_kept(x, vocab, s, room, &margin);
    int32_t id = room[0].id;
    if (margin < 1e-6) return -1;
    for (int64_t k = 0; k < n && n > 1; k++) {
        uint64_t element = (uint64_t)position * (uint64_t)vocab + (uint64_t)room[k].id;
        double v = ((double)ref_word(s->seed, sequence, element) + 0.5) / 4294967296.0;
        double score = room[k].x / (double)s->temperature - log(-log(1 - v));
        if (score > best) best = score, id = room[k].id;
    }
    return id;
}

/* ---- the same tokens as the reference, on every split ------------------------------------------------------------ */

#define ROWS 5
#define VOCAB_MAX 1200

typedef struct draw_case {
    int64_t vocab, padded;
    mt_sample_desc desc;
    mt_dtype dtype;
    int invariant, levels; /* levels: the logits are multiples of 1 / levels; 0: any numbers */
    float scale;
    float *x; /* the whole logits [ROWS, vocab], rounded to dtype */
    int32_t want[ROWS];
} draw_case;

/* The shard of a rank, in rows that are longer than the shard. Padding is larger than all logits. */
static mt_status own_logits(test_rank *r, const draw_case *c, mt_tensor *out) {
    int64_t wide = c->padded ? c->padded : c->vocab, unit = c->invariant ? c->invariant : r->grid.tp_size;
    int64_t cols = test_ceil(wide, unit) * (unit / r->grid.tp_size), first = cols * r->grid.tp_rank;
    mt_tensor f = test_tensor(r, ROWS, cols, 1e4f), whole;
    for (int64_t i = 0; i < ROWS; i++)
        for (int64_t j = 0; j < cols; j++)
            if (first + j < c->vocab) ((float *)f.data)[i * cols + j] = c->x[i * c->vocab + first + j];
    MT_TRY(mt_arena_tensor(r->ctx, c->dtype, ROWS, cols + 3, &whole));
    *out = mt_tensor_cols(whole, 1, cols);
    return mt_convert(r->ctx, f, *out);
}

/* One all-gather has two numbers for each row and candidate. A group of one rank communicates nothing. */
static mt_status check_sent(test_rank *r, const draw_case *c, int64_t cols) {
    mt_ledger got = mt_comm_ledger(r->grid.tp);
    const mt_sample_desc *s = &c->desc;
    int64_t one =
        s->temperature == 0 || s->top_p == (float)MT_ZERO || (s->top_k == 0 && (s->top_p == 0 || s->top_p == 1));
    int64_t k = one ? 1 : s->top_k && s->top_k < cols ? s->top_k : cols, all = r->grid.tp_size > 1;
    CHECK(mt_sample_count(s, cols) == k);
    for (int i = 0; i < MT_COLLECTIVE_COUNT; i++) {
        CHECK((int64_t)got.calls[i] == (i == MT_ALL_GATHER ? all : 0));
        CHECK((int64_t)got.bytes[i] == (i == MT_ALL_GATHER ? all * r->grid.tp_size * ROWS * k * 8 : 0));
    }
    mt_comm_ledger_reset(r->grid.tp);
    return MT_SUCCESS;
}

static const uint64_t sequences[ROWS] = {3, 0, 0x123456789abcdef0u, 7, 3};
static const int32_t positions[ROWS] = {0, 5, 2000000000, 1, 1};

static mt_status draw_rank(mt_comm *world, void *user) {
    const draw_case *c = (const draw_case *)user;
    mt_context_desc where = {.arena_bytes = (size_t)4 << 20, .invariant = c->invariant};
    test_rank r;
    mt_tensor logits;
    mt_sample_desc s = c->desc;
    int32_t ids[ROWS + 1] = {0};
    size_t mark;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, &where, &r));
    MT_TRY(own_logits(&r, c, &logits));
    s.sequences = sequences, s.positions = positions;
    ids[ROWS] = 77;
    mark = mt_arena_mark(r.ctx);
    mt_comm_ledger_reset(r.grid.tp);
    MT_TRY(mt_vocab_parallel_sample(r.ctx, r.grid.tp, c->vocab, c->padded, &s, logits, ids));
    CHECK(mt_arena_mark(r.ctx) == mark);
    CHECK(ids[ROWS] == 77);
    MT_TRY(check_sent(&r, c, logits.cols));
    for (int i = 0; i < ROWS; i++) {
        if (c->want[i] < 0 || ids[i] == c->want[i]) continue;
        fprintf(stderr, "%d ranks, vocab %lld, T %g, top_k %lld, top_p %g, row %d: token %d, expected %d\n",
                mt_comm_size(world), (long long)c->vocab, (double)s.temperature, (long long)s.top_k, (double)s.top_p, i,
                ids[i], c->want[i]);
        return MT_ERR_DATA;
    }
    for (int i = 0; i < ROWS; i++) { /* a row alone, as another row of another batch */
        mt_sample_desc alone = c->desc;
        int32_t id = -2;
        alone.first_sequence = sequences[i];
        alone.position = positions[i];
        MT_TRY(
            mt_vocab_parallel_sample(r.ctx, r.grid.tp, c->vocab, c->padded, &alone, mt_tensor_rows(logits, i, 1), &id));
        CHECK(id == ids[i]);
    }
    test_rank_close(&r);
    return MT_SUCCESS;
}

/* A multiple of a power of two, which the type holds exactly up to 16. */
static float rounded(float x, mt_dtype dtype) {
    float step = dtype == MT_BF16 ? 16.0f : 128.0f;
    return dtype == MT_F32 ? x : floorf(x * step) / step;
}

/* Fills the logits and what the reference draws. Returns the number of rows where rounding may decide. */
static int draw_prepare(draw_case *c, uint64_t seed) {
    token *room = (token *)malloc((size_t)c->vocab * sizeof *room);
    int open = 0;
    for (int64_t i = 0; i < ROWS * c->vocab; i++) {
        float x = c->scale * test_float(&seed);
        if (c->levels) x = floorf(x * (float)c->levels) / (float)c->levels;
        c->x[i] = rounded(x, c->dtype);
    }
    for (int i = 0; i < ROWS; i++) {
        c->want[i] = ref_draw(c->x + i * c->vocab, c->vocab, &c->desc, sequences[i], positions[i], room);
        open += c->want[i] < 0;
    }
    free(room);
    return open;
}

static void test_draws_of_every_split(void **state) {
    static const int64_t vocabs[][2] = {{1003, 0}, {1003, 1100}, {5, 0}, {1, 0}, {17, 0}, {640, 0}};
    static const float temperatures[] = {1.0f, 0.0f, 0.7f, 20.0f, 0.01f},
                       tops[] = {0.0f, 0.9f, 0.3f, 1.0f, 1e-6f, MT_ZERO};
    static const int64_t ks[] = {0, 40, 1, 3, 5000};
    float *x = (float *)malloc(ROWS * VOCAB_MAX * sizeof *x);
    int open = 0, runs = 0;
    (void)state;
    for (size_t n = 0; n < 6 * 5 * 5 * 6; n++) {
        draw_case c = {.vocab = vocabs[n % 6][0], .padded = vocabs[n % 6][1], .scale = 10.0f, .x = x};
        if (!test_takes(n, 7)) continue;
        c.desc = (mt_sample_desc){.temperature = temperatures[n / 6 % 5],
                                  .top_k = ks[n / 30 % 5],
                                  .top_p = tops[n / 150],
                                  .seed = 0x900000000000000du + n};
        c.dtype = (mt_dtype)(n / 7 % 3);
        c.levels = (int)(n / 7 % 4) == 1 ? 1 : 0; /* 20 different logits: many ties */
        open += draw_prepare(&c, n), runs += ROWS;
        for (size_t i = 0; i < SPLITS; i++) test_launch(splits[i], draw_rank, &c);
        c.invariant = 8;
        for (size_t i = 0; i < SPLITS; i++)
            if (splits[i] != 3) test_launch(splits[i], draw_rank, &c);
    }
    free(x);
    assert_true(open * 50 < runs);
}

/* A top_p of MT_ZERO is the number 0: only the first token is kept, as in PyTorch and transformers. A top_p of 0 keeps
   all. */
static void test_top_p_of_zero(void **state) {
    float *x = (float *)malloc(ROWS * VOCAB_MAX * sizeof *x);
    int32_t first[ROWS];
    (void)state;
    for (int n = 0; n < 4; n++) {
        draw_case c = {.vocab = 1000, .x = x, .scale = 0.5f};
        c.desc = (mt_sample_desc){.temperature = 0, .seed = 3};
        assert_int_equal(draw_prepare(&c, 1), 0);
        memcpy(first, c.want, sizeof first);
        c.desc.temperature = n % 2 ? 20.0f : 1.0f;
        c.desc.top_k = n / 2 ? 40 : 0;
        c.desc.top_p = MT_ZERO;
        assert_int_equal(draw_prepare(&c, 1), 0);
        assert_memory_equal(first, c.want, sizeof first);
        for (size_t i = 0; i < SPLITS; i++) test_launch(splits[i], draw_rank, &c);
        c.desc.top_p = 0;
        draw_prepare(&c, 1);
        assert_memory_not_equal(first, c.want, sizeof first);
    }
    free(x);
}

/* Logits that are all equal, or of two values: the order of ids decides what is kept. */
static void test_ties(void **state) {
    float *x = (float *)malloc(ROWS * VOCAB_MAX * sizeof *x);
    (void)state;
    for (int n = 0; n < 8; n++) {
        draw_case c = {.vocab = 1000, .x = x, .scale = n < 4 ? 0.0f : 1.0f, .levels = 1};
        c.desc = (mt_sample_desc){.temperature = n % 4 ? 1.0f : 0.0f,
                                  .top_k = n % 4 == 1 ? 100 : 0,
                                  .top_p = n % 4 == 2 ? 0.3003f : 0.0f,
                                  .seed = 3};
        assert_int_equal(draw_prepare(&c, 1), 0);
        if (n == 0) assert_int_equal(c.want[0], 0);
        for (size_t i = 0; i < SPLITS; i++) test_launch(splits[i], draw_rank, &c);
    }
    free(x);
}

/* ---- one rank ---------------------------------------------------------------------------------------------------- */

static test_rank one;

static int open_one(void **state) {
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &one);
    return 0;
}

static int close_one(void **state) {
    (void)state;
    test_paper_rank_close(&one);
    return 0;
}

/* The tokens that are drawn at positions [0, n), from one row of logits. */
static void draw_many(const float *x, int64_t vocab, mt_sample_desc s, int64_t n, int32_t *ids) {
    float *logits = (float *)malloc((size_t)(vocab * 64) * sizeof *logits);
    int32_t at[64];
    for (int64_t i = 0; i < 64; i++) memcpy(logits + i * vocab, x, (size_t)vocab * sizeof *x);
    for (int64_t i = 0; i < n; i += 64) {
        int64_t rows = n - i < 64 ? n - i : 64;
        uint64_t same[64];
        for (int64_t k = 0; k < 64; k++) at[k] = (int32_t)(i + k), same[k] = s.first_sequence;
        s.positions = at, s.sequences = same;
        ASSERT_STATUS(
            one.ctx, MT_SUCCESS,
            mt_vocab_parallel_sample(one.ctx, one.grid.tp, vocab, 0, &s, mt_tensor_f32(logits, rows, vocab), ids + i));
    }
    free(logits);
}

#define DRAWS 20000

/* Pearson's chi-square statistic of the counts against probabilities p [n], of those that are expected at least 5
   times. What has probability 0 must not be drawn. */
static double chi_square(const int *counts, const double *p, int64_t n, int draws) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        if (p[i] == 0 && counts[i] > 0) return INFINITY;
        if (draws * p[i] >= 5) sum += (counts[i] - draws * p[i]) * (counts[i] - draws * p[i]) / (draws * p[i]);
    }
    return sum;
}

/* The counts differ from softmax of the kept tokens as much as chance makes them differ: for 11 degrees of freedom,
   chi-square is below 31.3 with probability 0.999, and above 1.6 with probability 0.9995. */
static void test_frequencies(void **state) {
    static const mt_sample_desc descs[] = {{.temperature = 1},
                                           {.temperature = 0.5f},
                                           {.temperature = 2.5f, .seed = 9},
                                           {.temperature = 1.5f, .top_k = 12, .seed = 1},
                                           {.temperature = 1, .top_k = 5},
                                           {.temperature = 1, .top_p = 0.8f},
                                           {.temperature = 3, .top_k = 9, .top_p = 0.9f}};
    float x[12];
    int32_t *ids = (int32_t *)malloc(DRAWS * sizeof *ids);
    uint64_t seed = 4;
    (void)state;
    for (int i = 0; i < 12; i++) x[i] = 2 * test_float(&seed);
    for (size_t d = 0; d < sizeof descs / sizeof *descs; d++) {
        token order[12];
        double p[12] = {0}, total = 0, margin, chi;
        int counts[12] = {0}, pairs[144] = {0};
        int64_t kept = ref_kept(x, 12, &descs[d], order, &margin);
        for (int64_t k = 0; k < kept; k++) total += exp(order[k].x / (double)descs[d].temperature);
        for (int64_t k = 0; k < kept; k++) p[order[k].id] = exp(order[k].x / (double)descs[d].temperature) / total;
        draw_many(x, 12, descs[d], DRAWS, ids);
        for (int i = 0; i < DRAWS; i++) counts[ids[i]]++;
        chi = chi_square(counts, p, 12, DRAWS);
        if (!(chi < 31.3 && chi > 0.1)) fail_msg("desc %zu: chi-square is %g", d, chi);
        for (int i = 0; i + 1 < DRAWS; i++) pairs[ids[i] * 12 + ids[i + 1]]++;
        double joint[144];
        for (int i = 0; i < 144; i++) joint[i] = p[i / 12] * p[i % 12];
        chi = chi_square(pairs, joint, 144, DRAWS - 1); /* 143 degrees of freedom: below 200 with probability 0.999 */
        if (!(chi < 200)) fail_msg("desc %zu: chi-square of neighbours is %g", d, chi);
    }
    free(ids);
}

/* Another seed, sequence or position draws other numbers: 2000 draws of 1000 equal logits agree by chance twice. */
static void test_independent_draws(void **state) {
    static const mt_sample_desc others[] = {
        {.temperature = 1, .seed = 1},           {.temperature = 1, .seed = (uint64_t)1 << 32},
        {.temperature = 1, .first_sequence = 1}, {.temperature = 1, .first_sequence = (uint64_t)1 << 32},
        {.temperature = 1, .position = 1},       {.temperature = 1, .position = 1 << 20}};
    float *x = test_floats(&one, 1000, 0.5f);
    int32_t a[2000], b[2000];
    (void)state;
    draw_many(x, 1000, (mt_sample_desc){.temperature = 1}, 2000, a);
    for (size_t d = 0; d < sizeof others / sizeof *others; d++) {
        int same = 0, shift = (int)others[d].position;
        draw_many(x, 1000, others[d], 2000, b);
        for (int i = 0; i < 2000; i++) same += a[i] == b[i];
        assert_true(same < 15);
        for (int i = 0; i + 1 < 2000 && shift == 1; i++) assert_int_equal(b[i], a[i + 1]);
    }
}

/* The tokens that transformers keeps are the reference's, and the ones that are drawn. */
static void test_kept_tokens_are_transformers(void **state) {
    FILE *file = fopen("tests/golden/sample.txt", "r");
    int32_t *ids = (int32_t *)malloc(4000 * sizeof *ids);
    char line[4096];
    int cases = 0;
    (void)state;
    assert_non_null(file);
    for (; fgets(line, sizeof line, file); cases++) {
        double t, p, margin, total = 0;
        int k, vocab, kept[32] = {0}, seen[32] = {0}, id, n, at = 0;
        float x[32];
        token order[32];
        assert_int_equal(sscanf(line, "%lf %d %lf %d", &t, &k, &p, &vocab), 4);
        assert_non_null(fgets(line, sizeof line, file));
        for (int i = 0; i < vocab; i++, at += n) assert_int_equal(sscanf(line + at, "%f%n", &x[i], &n), 1);
        assert_non_null(fgets(line, sizeof line, file));
        for (at = 0; sscanf(line + at, "%d%n", &id, &n) == 1; at += n) kept[id] = 1;
        mt_sample_desc s = {.temperature = (float)t, .top_k = k, .top_p = (float)p, .seed = 11};
        int64_t count = ref_kept(x, vocab, &s, order, &margin);
        assert_true(margin > 1e-6);
        for (int i = 0; i < vocab; i++) assert_int_equal(kept[order[i].id], i < count);
        for (int i = 0; i < count; i++) total += exp(order[i].x / t);
        draw_many(x, vocab, s, 4000, ids);
        for (int i = 0; i < 4000; i++) seen[ids[i]] = 1;
        for (int i = 0; i < vocab; i++) {
            assert_true(kept[i] || !seen[i]);
            if (kept[i] && exp((double)x[i] / t) / total > 0.005) assert_true(seen[i]);
        }
    }
    fclose(file);
    free(ids);
    assert_int_equal(cases, 60);
}

/* Infinities, and zeros of both signs. */
static void test_special_logits(void **state) {
    static const struct {
        float x[4];
        int32_t want; /* at every temperature, or -1: ids 0 and 2 */
    } cases[] = {{{-INFINITY, -INFINITY, -3, -INFINITY}, 2},
                 {{1, INFINITY, 2, INFINITY}, 1},
                 {{-INFINITY, -INFINITY, -INFINITY, -INFINITY}, 0},
                 {{-3e38f, -INFINITY, 3e38f, 0}, 2},
                 {{0.0f, -INFINITY, -0.0f, -INFINITY}, -1}};
    static const mt_sample_desc descs[] = {{.temperature = 0},
                                           {.temperature = 1},
                                           {.temperature = 1e-38f},
                                           {.temperature = 1, .top_k = 3},
                                           {.temperature = 2, .top_p = 0.9f},
                                           {.temperature = 1, .top_k = 2, .top_p = 0.9f}};
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (size_t d = 0; d < sizeof descs / sizeof *descs; d++) {
            int32_t ids[50];
            int seen[4] = {0};
            draw_many(cases[c].x, 4, descs[d], 50, ids);
            for (int i = 0; i < 50; i++) seen[ids[i]]++;
            if (cases[c].want >= 0) assert_int_equal(seen[cases[c].want], 50);
            else if (d == 0) assert_int_equal(seen[0], 50);
            else assert_true(seen[0] > 0 && seen[2] > 0 && seen[0] + seen[2] == 50);
        }
}

/* Candidates: the largest logits by increasing id, then -infinity with the id -1. -0 and 0 are equal. */
static void test_candidates(void **state) {
    static const float x[] = {1, 5, 2, 5, 3, 4, 9, 9}, padded[] = {3, 1}, zeros[] = {-0.0f, 0.0f, -0.0f, 0.0f};
    mt_sample_desc s = {.temperature = 1, .top_k = 3};
    float *out = test_floats(&one, 16, 7.0f);
    int32_t ids[3];
    (void)state;
    ASSERT_STATUS(one.ctx, MT_SUCCESS,
                  mt_sample_candidates(one.ctx, &s, 16, 10, mt_tensor_f32((float *)x, 1, 8), mt_tensor_f32(out, 1, 6)));
    memcpy(ids, out + 3, sizeof ids);
    assert_true(out[0] == 5 && out[1] == 5 && out[2] == 4 && ids[0] == 11 && ids[1] == 13 && ids[2] == 15);
    ASSERT_STATUS(
        one.ctx, MT_SUCCESS,
        mt_sample_candidates(one.ctx, &s, 4, 0, mt_tensor_f32((float *)zeros, 1, 4), mt_tensor_f32(out, 1, 6)));
    memcpy(ids, out + 3, sizeof ids);
    assert_true(ids[0] == 0 && ids[1] == 1 && ids[2] == 2);
    s.top_k = 4;
    ASSERT_STATUS(
        one.ctx, MT_SUCCESS,
        mt_sample_candidates(one.ctx, &s, 9, 8, mt_tensor_f32((float *)padded, 1, 2), mt_tensor_f32(out, 1, 4)));
    memcpy(ids, out + 2, 2 * sizeof *ids);
    assert_true(out[0] == 3 && out[1] == -INFINITY && ids[0] == 8 && ids[1] == -1);
    s.temperature = 0;
    ASSERT_STATUS(
        one.ctx, MT_SUCCESS,
        mt_sample_candidates(one.ctx, &s, 9, 9, mt_tensor_f32((float *)padded, 1, 2), mt_tensor_f32(out, 1, 2)));
    memcpy(ids, out + 1, sizeof *ids);
    assert_true(out[0] == -INFINITY && ids[0] == -1);
}

/* ---- refusals ---------------------------------------------------------------------------------------------------- */

/* A NaN on one rank: every rank gets the error. */
static mt_status nan_rank(mt_comm *world, void *user) {
    const mt_sample_desc *s = (const mt_sample_desc *)user;
    int rank = mt_comm_rank(world);
    test_rank r;
    int32_t ids[2] = {5, 5};
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, NULL, &r));
    mt_tensor x = test_tensor(&r, 2, 300, 1.0f);
    if (rank == 1) ((float *)x.data)[300 + 123] = NAN;
    CHECK(mt_vocab_parallel_sample(r.ctx, r.grid.tp, 300 * mt_comm_size(world), 0, s, x, ids) == MT_ERR_DATA);
    CHECK(test_has_words(mt_last_error(r.ctx), "mt_sample_ids|row 1|NaN"));
    CHECK(ids[0] >= 0 && ids[1] == -1);
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_nan(void **state) {
    static const mt_sample_desc descs[] = {{.temperature = 0},
                                           {.temperature = 1},
                                           {.temperature = 1, .top_k = 4},
                                           {.temperature = 1, .top_k = 1},
                                           {.temperature = 1, .top_p = 0.5f}};
    (void)state;
    for (size_t d = 0; d < sizeof descs / sizeof *descs; d++) test_launch(3, nan_rank, (void *)&descs[d]);
}

static void test_refusals(void **state) {
    mt_tensor x = test_tensor(&one, 2, 8, 0.0f), out = test_tensor(&one, 2, 2, 7.0f);
    const mt_sample_desc good = {.temperature = 1};
    mt_sample_desc s = good;
    int32_t ids[2] = {7, 7};
    mt_context *ctx = one.ctx;
    mt_comm *tp = one.grid.tp;
    (void)state;
#define ALL_REFUSE(status, words)                                                                                      \
    do {                                                                                                               \
        REFUSED(ctx, status, words, mt_sample_candidates(ctx, &s, 8, 0, x, out));                                      \
        REFUSED(ctx, status, words, mt_sample_ids(ctx, &s, 8, out, 1, ids));                                           \
        REFUSED(ctx, status, words, mt_vocab_parallel_sample(ctx, tp, 8, 0, &s, x, ids));                              \
        s = good;                                                                                                      \
    } while (0)
    s.temperature = -1;
    ALL_REFUSE(MT_ERR_ARGUMENT, "temperature is -1");
    s.temperature = NAN;
    ALL_REFUSE(MT_ERR_ARGUMENT, "temperature is");
    s.top_k = -1;
    ALL_REFUSE(MT_ERR_ARGUMENT, "top_k is -1");
    s.top_p = 1.5f;
    ALL_REFUSE(MT_ERR_ARGUMENT, "top_p is 1.5");
    s.top_p = -0.5f;
    ALL_REFUSE(MT_ERR_ARGUMENT, "top_p is -0.5");
    s.top_p = NAN;
    ALL_REFUSE(MT_ERR_ARGUMENT, "top_p is");
    s.position = -1;
    ALL_REFUSE(MT_ERR_ARGUMENT, "position is -1");
    REFUSED(ctx, MT_ERR_SHAPE, "vocab is 0", mt_sample_candidates(ctx, &s, 0, 0, x, out));
    REFUSED(ctx, MT_ERR_SHAPE, "first_col is -1", mt_sample_candidates(ctx, &s, 8, -1, x, out));
    REFUSED(ctx, MT_ERR_SHAPE, "candidates is [2, 2], must be [2, 6]",
            mt_sample_candidates(ctx, &(mt_sample_desc){.temperature = 1, .top_k = 3}, 8, 0, x, out));
    REFUSED(ctx, MT_ERR_DTYPE, "logits is i32", mt_sample_candidates(ctx, &s, 8, 0, with_dtype(x, MT_I32), out));
    REFUSED(ctx, MT_ERR_ARGUMENT, "overlap", mt_sample_candidates(ctx, &s, 8, 0, x, mt_tensor_cols(x, 0, 2)));
    REFUSED(ctx, MT_ERR_ARGUMENT, "desc is NULL", mt_sample_candidates(ctx, NULL, 8, 0, x, out));
    REFUSED(ctx, MT_ERR_ARGUMENT, "desc is NULL", mt_sample_ids(ctx, NULL, 8, out, 1, ids));
    REFUSED(ctx, MT_ERR_ARGUMENT, "shards is 0", mt_sample_ids(ctx, &s, 8, out, 0, ids));
    REFUSED(ctx, MT_ERR_SHAPE, "gathered is [2, 2]|3 * rows", mt_sample_ids(ctx, &s, 8, out, 3, ids));
    REFUSED(ctx, MT_ERR_SHAPE, "gathered is [2, 1]", mt_sample_ids(ctx, &s, 8, mt_tensor_cols(out, 0, 1), 1, ids));
    REFUSED(ctx, MT_ERR_ARGUMENT, "ids is NULL", mt_sample_ids(ctx, &s, 8, out, 1, NULL));
    REFUSED(ctx, MT_ERR_ARGUMENT, "desc is NULL", mt_vocab_parallel_sample(ctx, tp, 8, 0, NULL, x, ids));
    REFUSED(ctx, MT_ERR_ARGUMENT, "tp is NULL", mt_vocab_parallel_sample(ctx, NULL, 8, 0, &s, x, ids));
    REFUSED(ctx, MT_ERR_SHAPE, "logits is [2, 8], must be [2, 9]", mt_vocab_parallel_sample(ctx, tp, 9, 0, &s, x, ids));
    REFUSED(ctx, MT_ERR_SHAPE, "must be [2, 9]", mt_vocab_parallel_sample(ctx, tp, 8, 9, &s, x, ids));
    REFUSED(ctx, MT_ERR_ARGUMENT, "padded_vocab is 7", mt_vocab_parallel_sample(ctx, tp, 8, 7, &s, x, ids));
    REFUSED(ctx, MT_ERR_ARGUMENT, "vocab is 0", mt_vocab_parallel_sample(ctx, tp, 0, 0, &s, x, ids));
    assert_int_equal(mt_sample_candidates(NULL, &s, 8, 0, x, out), MT_ERR_ARGUMENT);
    assert_int_equal(mt_sample_ids(NULL, &s, 8, out, 1, ids), MT_ERR_ARGUMENT);
    assert_int_equal(mt_vocab_parallel_sample(NULL, tp, 8, 0, &s, x, ids), MT_ERR_ARGUMENT);
    assert_int_equal(mt_sample_count(NULL, 8), 0);
    test_untouched("candidates", (float *)out.data, 4, 7.0f);
    assert_true(ids[0] == 7 && ids[1] == 7);
}

/* Without rows nothing is written, and on the meta device the call is planned and counted. */
static void test_no_rows_and_meta(void **state) {
    mt_context_desc meta = {.device = MT_DEVICE_META, .arena_bytes = (size_t)1 << 20};
    mt_sample_desc s = {.temperature = 1, .top_k = 5};
    mt_tensor x = test_tensor(&one, 2, 8, 0.0f);
    test_rank r;
    (void)state;
    ASSERT_STATUS(one.ctx, MT_SUCCESS,
                  mt_vocab_parallel_sample(one.ctx, one.grid.tp, 8, 0, &s, mt_tensor_rows(x, 0, 0), NULL));
    test_paper_rank(4, 1, (mt_grid_desc){.tp = 4}, &meta, &r);
    mt_tensor logits, ids;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_BF16, 2, 8, &logits));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_I32, 1, 2, &ids));
    ASSERT_STATUS(r.ctx, MT_SUCCESS,
                  mt_vocab_parallel_sample(r.ctx, r.grid.tp, 30, 0, &s, logits, (int32_t *)ids.data));
    assert_int_equal(mt_comm_ledger(r.grid.tp).calls[MT_ALL_GATHER], 1);
    assert_int_equal(mt_comm_ledger(r.grid.tp).bytes[MT_ALL_GATHER], 4 * 2 * 5 * 8);
    test_paper_rank_close(&r);
}

/* ---- a GPT with a cache ------------------------------------------------------------------------------------------ */

enum { TEXTS = 3, PROMPT = 6, STEPS = 8, GPT_VOCAB = 101, GPT_SEQ = 16 };

typedef struct gpt_case {
    mt_sample_desc desc;
    int tp, pp, invariant, untied;
    int64_t padded;
    int32_t text[TEXTS][GPT_SEQ + 1]; /* what rank 0 has generated */
} gpt_case;

static mt_status gpt_open(mt_comm *world, const gpt_case *c, test_rank *r, mt_gpt *gpt) {
    mt_context_desc where = {.arena_bytes = (size_t)8 << 20, .invariant = c->invariant};
    mt_gpt_desc d = {.vocab = GPT_VOCAB,
                     .layers = 2,
                     .max_seq = GPT_SEQ,
                     .untied_head = c->untied,
                     .padded_vocab = c->padded,
                     .layer = {.hidden = 32, .heads = 4}};
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = c->tp, .pp = c->pp}, &where, r));
    MT_TRY(mt_gpt_create(r->ctx, r->params, &d, gpt));
    MT_TRY(mt_params_init(r->ctx, r->params, 5));
    return disturb_params(r, 0.4f);
}

/* What the reference draws from the logits of the whole text, in a batch that has no cache. */
static mt_status check_next(test_rank *r, const mt_gpt *gpt, const gpt_case *c, const int32_t *lengths,
                            const int32_t *next) {
    float *logits = test_floats(r, TEXTS * GPT_VOCAB, 0.0f);
    mt_batch batch = {.sequences = TEXTS, .seq = GPT_SEQ, .lengths = lengths};
    int32_t ids[TEXTS * GPT_SEQ] = {0};
    token room[GPT_VOCAB];
    for (int i = 0; i < TEXTS; i++) memcpy(ids + i * GPT_SEQ, c->text[i], (size_t)lengths[i] * sizeof *ids);
    MT_TRY(mt_gpt_logits(r->ctx, gpt, &batch, ids, mt_tensor_f32(logits, TEXTS, GPT_VOCAB)));
    for (int i = 0; i < TEXTS; i++) {
        uint64_t sequence = c->desc.first_sequence + (uint64_t)i;
        int32_t want =
            ref_draw(logits + i * GPT_VOCAB, GPT_VOCAB, &c->desc, sequence, c->desc.position + lengths[i], room);
        if (want >= 0 && want != next[i])
            fprintf(stderr, "text %d of %d tokens: %d, expected %d\n", i, lengths[i], next[i], want);
        CHECK(want < 0 || want == next[i]);
    }
    test_rank_free_memory(r);
    return MT_SUCCESS;
}

/* Checks that a step has gathered only candidates, and that only the last stage of a pipeline has. */
static mt_status check_gathered(const test_rank *r, const gpt_case *c, int last) {
    mt_ledger got = mt_comm_ledger(r->grid.tp);
    int64_t k = mt_sample_count(&c->desc, test_ceil(GPT_VOCAB, c->tp));
    int64_t calls = c->tp > 1 && last;
    CHECK((int64_t)got.calls[MT_ALL_GATHER] == calls);
    if (!c->padded && !c->invariant) CHECK((int64_t)got.bytes[MT_ALL_GATHER] == calls * c->tp * TEXTS * k * 8);
    return MT_SUCCESS;
}

/* The prompts have different lengths, and the second text ends after two steps. */
static mt_status gpt_rank(mt_comm *world, void *user) {
    gpt_case *c = (gpt_case *)user, mine = *c;
    int rank = mt_comm_rank(world);
    int32_t prompts[TEXTS * PROMPT], lengths[TEXTS] = {PROMPT, 2, 4}, valid[TEXTS] = {PROMPT, 2, 4}, next[TEXTS];
    mt_batch batch = {.sequences = TEXTS, .seq = PROMPT, .lengths = valid};
    mt_gpt gpt;
    mt_gpt_cache cache;
    test_rank r;
    MT_TRY(gpt_open(world, c, &r, &gpt));
    MT_TRY(mt_gpt_cache_create(r.ctx, &gpt, TEXTS, 0, &cache));
    for (int i = 0; i < TEXTS * PROMPT; i++) prompts[i] = i * 37 % GPT_VOCAB;
    for (int i = 0; i < TEXTS; i++) memcpy(mine.text[i], prompts + i * PROMPT, PROMPT * sizeof *prompts);
    for (int step = 0; step < STEPS; step++, batch.seq = 1) {
        size_t mark = mt_arena_mark(r.ctx);
        mt_comm_ledger_reset(r.grid.tp);
        MT_TRY(mt_gpt_sample(r.ctx, &gpt, &batch, step ? next : prompts, &cache, &c->desc, next));
        CHECK(mt_arena_mark(r.ctx) == mark);
        MT_TRY(check_gathered(&r, c, r.grid.pp_rank == c->pp - 1));
        for (int i = 0; i < TEXTS && step > 0; i++) lengths[i] += valid[i];
        for (int i = 0; i < TEXTS; i++) CHECK(cache.lengths[i] == lengths[i]);
        for (int i = 0; i < TEXTS; i++) CHECK(next[i] >= 0 && next[i] < GPT_VOCAB);
        if (valid[1] == 0) next[1] = mine.text[1][lengths[1]]; /* has no meaning */
        MT_TRY(check_next(&r, &gpt, &mine, lengths, next));
        for (int i = 0; i < TEXTS; i++) mine.text[i][lengths[i]] = next[i];
        valid[0] = valid[2] = 1, valid[1] = step < 2;
    }
    mt_gpt_cache_destroy(r.ctx, &cache);
    test_rank_close(&r);
    if (rank == 0) memcpy(c->text, mine.text, sizeof mine.text);
    return MT_SUCCESS;
}

/* Every split generates the same texts, as does the reference from the logits of mt_gpt_logits. */
static void test_texts_of_a_gpt(void **state) {
    static const int shapes[][2] = {{1, 1}, {2, 1}, {4, 1}, {1, 2}, {2, 2}};
    static const mt_sample_desc descs[] = {{.temperature = 0},
                                           {.temperature = 1, .seed = 8, .first_sequence = 100, .position = 7},
                                           {.temperature = 2, .top_k = 20, .top_p = 0.9f},
                                           {.temperature = 1.5f, .top_p = 0.8f, .seed = 2}};
    (void)state;
    for (int n = 0; n < 16; n++) {
        gpt_case first = {.desc = descs[n / 4], .invariant = n % 2 ? 4 : 0, .untied = n / 2 % 2};
        first.padded = first.untied ? 120 : 0;
        if (!test_takes((size_t)n, 3)) continue;
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            gpt_case c = first;
            c.tp = shapes[i][0], c.pp = shapes[i][1];
            test_launch(c.tp * c.pp, gpt_rank, &c);
            if (i == 0) memcpy(first.text, c.text, sizeof c.text);
            assert_memory_equal(first.text, c.text, sizeof c.text);
        }
    }
}

/* A NaN in the head of one rank of the last stage is an error of all ranks. */
static mt_status gpt_nan_rank(mt_comm *world, void *user) {
    const gpt_case *c = (const gpt_case *)user;
    int32_t ids[2] = {1, 2}, next[2];
    mt_batch batch = {.sequences = 2, .seq = 1};
    mt_gpt gpt;
    mt_gpt_cache cache;
    test_rank r;
    MT_TRY(gpt_open(world, c, &r, &gpt));
    MT_TRY(mt_gpt_cache_create(r.ctx, &gpt, 2, 4, &cache));
    if (r.grid.pp_rank == 1 && r.grid.tp_rank == 1) ((float *)gpt.head.weight->value.data)[3] = NAN;
    CHECK(mt_gpt_sample(r.ctx, &gpt, &batch, ids, &cache, &c->desc, next) == MT_ERR_DATA);
    CHECK(test_has_words(mt_last_error(r.ctx), r.grid.pp_rank ? "mt_sample_ids|row 0|NaN" : "sampled id -1"));
    CHECK(cache.lengths[0] == 0 && cache.lengths[1] == 0);
    mt_gpt_cache_destroy(r.ctx, &cache);
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_nan_of_a_gpt(void **state) {
    gpt_case c = {.desc = {.temperature = 1}, .tp = 2, .pp = 2, .untied = 1};
    (void)state;
    test_launch(4, gpt_nan_rank, &c);
}

static void test_gpt_refusals(void **state) {
    gpt_case c = {.tp = 1, .pp = 1};
    mt_batch batch = {.sequences = 1, .seq = 2};
    mt_sample_desc good = {.temperature = 1}, bad = {.temperature = -1};
    mt_gpt_cache cache, empty = {0};
    int32_t ids[2] = {1, 2}, next[1] = {-5};
    mt_comm *world;
    mt_gpt gpt;
    test_rank r;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_comm_create_local(1, 0, &world));
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, gpt_open(world, &c, &r, &gpt));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_cache_create(r.ctx, &gpt, 1, 3, &cache));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_gpt_sample|temperature is -1",
            mt_gpt_sample(r.ctx, &gpt, &batch, ids, &cache, &bad, next));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_gpt_sample|desc is NULL",
            mt_gpt_sample(r.ctx, &gpt, &batch, ids, &cache, NULL, next));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "gpt is NULL", mt_gpt_sample(r.ctx, NULL, &batch, ids, &cache, &good, next));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", mt_gpt_sample(r.ctx, &gpt, &batch, ids, &empty, &good, next));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "next_ids", mt_gpt_sample(r.ctx, &gpt, &batch, ids, &cache, &good, NULL));
    assert_int_equal(mt_gpt_sample(NULL, &gpt, &batch, ids, &cache, &good, next), MT_ERR_ARGUMENT);
    ids[1] = GPT_VOCAB;
    REFUSED(r.ctx, MT_ERR_DATA, "token id 101", mt_gpt_sample(r.ctx, &gpt, &batch, ids, &cache, &good, next));
    assert_true(cache.lengths[0] == 0 && next[0] == -5);
    ids[1] = 2;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_sample(r.ctx, &gpt, &batch, ids, &cache, &good, next));
    REFUSED(r.ctx, MT_ERR_DATA, "mt_gpt_sample|room for 3",
            mt_gpt_sample(r.ctx, &gpt, &batch, ids, &cache, &good, next));
    assert_int_equal(cache.lengths[0], 2);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sample_check(r.ctx, "mine", &good));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mine: temperature", mt_sample_check(r.ctx, "mine", &bad));
    mt_gpt_cache_destroy(r.ctx, &cache);
    test_rank_close(&r);
    mt_comm_destroy(world);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_draws_of_every_split),
        cmocka_unit_test(test_top_p_of_zero),
        cmocka_unit_test(test_ties),
        cmocka_unit_test_setup_teardown(test_frequencies, open_one, close_one),
        cmocka_unit_test_setup_teardown(test_independent_draws, open_one, close_one),
        cmocka_unit_test_setup_teardown(test_kept_tokens_are_transformers, open_one, close_one),
        cmocka_unit_test_setup_teardown(test_special_logits, open_one, close_one),
        cmocka_unit_test_setup_teardown(test_candidates, open_one, close_one),
        cmocka_unit_test(test_nan),
        cmocka_unit_test_setup_teardown(test_refusals, open_one, close_one),
        cmocka_unit_test_setup_teardown(test_no_rows_and_meta, open_one, close_one),
        cmocka_unit_test(test_texts_of_a_gpt),
        cmocka_unit_test(test_nan_of_a_gpt),
        cmocka_unit_test(test_gpt_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
