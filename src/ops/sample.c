/* ---- sampling of the next token ---------------------------------------------------------------------------------- */

#pragma once
#include "sample.h"
#include "sample_shard.h"
#include "random_words.cuh"
#include "cross_entropy.c"
#include "../comm/context.c"

/* The order of tokens: the largest logit first, then the lowest id. The token with the larger number is before the
   other. NaN is before all logits, and -0 equals 0. */
MT_INLINE MT_HOST_DEVICE uint64_t mti_sample_order(float x, int32_t id) {
    uint32_t bits = mt_f32_bits(x + 0.0f);
    bits = x != x ? 0xffffffffu : bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
    return (uint64_t)bits << 32 | (0xffffffffu - (uint32_t)id);
}

/* The logit of a token, from its order. */
static MT_HOST_DEVICE float mti_sample_logit(uint64_t order) {
    uint32_t bits = (uint32_t)(order >> 32);
    return mt_f32_from_bits(bits ^ (bits >> 31 ? 0x80000000u : 0xffffffffu));
}

/* The probability of a token relative to that of the first one, in units of 2^-32. Sums of these integers do not depend
   on the order of additions. sharp is 1 / temperature. */
static MT_HOST_DEVICE uint64_t mti_sample_mass(float x, float top, double sharp) {
    double d = x == top ? 0.0 : ((double)x - (double)top) * sharp;
    return d > -100.0 ? (uint64_t)((double)mti_exp((float)d) * 4294967296.0) : 0;
}

/* A number of the Gumbel distribution, from a random word. It is below MTI_GUMBEL_MOST. */
#define MTI_GUMBEL_MOST 23.0
static MT_HOST_DEVICE double mti_gumbel(uint32_t word) {
    return -log(-log1p(-((double)word + 0.5) * 2.3283064365386963e-10));
}

/* Returns the largest word with which a logit may reach the score `best`: gap is logit / temperature - best. This is a
   bound: -log(-log(1 - v)) < -log(v). */
static MT_HOST_DEVICE uint32_t mti_sample_most(double gap) {
    double most = 0.0;
    if (!(gap < 0.0)) return 0xffffffffu;
    if (gap > -MTI_GUMBEL_MOST) most = (double)mti_exp((float)gap) * (4294967296.0 * 1.00001) + 1.0;
    return most < 4294967295.0 ? (uint32_t)most : 0xffffffffu;
}

/* A radix search through the orders of tokens takes MTI_SAMPLE_DIGITS passes, with digits of 11, 11 and 10 bits of the
   logit, then of the id. */
#define MTI_SAMPLE_DIGITS 6
#define MTI_SAMPLE_BINS 2048
static MT_HOST_DEVICE int mti_sample_shift(int digit) {
    int low = digit % 3 == 2 ? 0 : 21 - digit % 3 * 11;
    return digit < 3 ? low + 32 : low;
}
static MT_HOST_DEVICE uint64_t mti_sample_mask(int digit) { return digit % 3 == 2 ? 1023 : 2047; }

/* Whether the first token is taken, without random numbers. */
static int mti_sample_greedy(const mt_sample_desc *s) {
    return s->temperature == 0.0f || s->top_k == 1 || s->top_p == (float)MT_ZERO;
}

MT_API int64_t mt_sample_count(const mt_sample_desc *desc, int64_t cols) {
    int all_p;
    if (!desc || cols < 1) return 0;
    all_p = desc->top_p == 0.0f || desc->top_p == 1.0f;
    if (mti_sample_greedy(desc) || (desc->top_k == 0 && all_p)) return 1;
    return desc->top_k > 0 ? mt_min(desc->top_k, cols) : cols;
}

MT_API mt_status mt_sample_check(mt_context *ctx, const char *function, const mt_sample_desc *desc) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!desc) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc is NULL", function);
    MT_TRY(mt_check_float(ctx, function, NULL, "temperature", desc->temperature, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mt_check_integer(ctx, function, NULL, "top_k", desc->top_k, 0, INT64_MAX));
    if (!(desc->top_p >= 0.0f && desc->top_p <= 1.0f) && desc->top_p != (float)MT_ZERO)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: top_p is %g, must be from 0 to 1", function, (double)desc->top_p);
    return mt_check_integer(ctx, function, NULL, "position", desc->position, 0, INT32_MAX);
}

static mt_status mti_expect_sample(mt_context *ctx, const char *where, const mt_sample_desc *s, int64_t vocab) {
    MT_TRY(mt_sample_check(ctx, where, s));
    return mt_check_size(ctx, where, NULL, "vocab", vocab, 1, INT32_MAX);
}

static double mti_sample_sharp(const mt_sample_desc *s) {
    return s->temperature > 0.0f ? 1.0 / (double)s->temperature : 1.0;
}

/* The number of columns of a shard that are not padding. */
static int64_t mti_sample_columns(int64_t vocab, int64_t first_col, int64_t cols) {
    return mt_max(0, mt_min(cols, vocab - first_col));
}

/* The random words of a row: its element `id` is token `id`. */
static MT_HOST_DEVICE mt_random mti_sample_random(const mt_sample_desc *s, int64_t vocab, int64_t row) {
    mt_random at = {0, 0, 0, 0, 0, NULL};
    at.seed = s->seed;
    at.subsequence = s->sequences ? s->sequences[row] : s->first_sequence + (uint64_t)row;
    at.first_row = s->position + (s->positions ? s->positions[row] : 0);
    at.global_cols = vocab;
    return at;
}

/* The tokens of a row on a CPU: columns of a shard, or gathered candidates. These are in several parts, one of each
   shard. */
typedef struct mti_sample_row {
    mt_tensor x;
    int64_t row, step;   /* part s is row `row + s * step` of x */
    int64_t parts, cols; /* tokens of a part */
    int64_t first;       /* the id of the first column, or -1: the ids are behind the logits */
} mti_sample_row;

static int32_t mti_sample_id(const mti_sample_row *r, const float *x, int64_t j) {
    int32_t id;
    if (r->first >= 0) return (int32_t)(r->first + j);
    memcpy(&id, x + r->cols + j, sizeof id);
    return id;
}

/* What is known of the tokens that a row keeps. */
typedef struct mti_sample_kept {
    uint64_t from; /* a token is kept if its order is not below this */
    int64_t count;
    uint64_t first; /* the largest order */
} mti_sample_kept;

/* Counts the tokens that are kept, and finds the first one. */
static void mti_sample_look(const mti_sample_row *r, mti_sample_kept *kept) {
    int64_t s, j;
    kept->count = 0;
    kept->first = 0;
    for (s = 0; s < r->parts; s++) {
        const float *x = mti_row(r->x, r->row + s * r->step);
        for (j = 0; j < r->cols; j++) {
            int32_t id = mti_sample_id(r, x, j);
            uint64_t order = mti_sample_order(x[j], id);
            if (id < 0 || order < kept->from) continue;
            kept->count++;
            if (order > kept->first) kept->first = order;
        }
    }
}

/* Adds the weights of the tokens whose order begins with the digits in `known`, in bins by their next digit. The weight
   is the mass of the token, or 1 if sharp is 0. Bits of `known` that are set in `mask` count. */
static void mti_sample_weigh(const mti_sample_row *r, const mti_sample_kept *kept, double sharp, uint64_t known,
                             uint64_t mask, int digit, uint64_t *bins) {
    int shift = mti_sample_shift(digit);
    uint64_t low = mti_sample_mask(digit);
    float top = mti_sample_logit(kept->first);
    int64_t s, j;
    for (s = 0; s < r->parts; s++) {
        const float *x = mti_row(r->x, r->row + s * r->step);
        for (j = 0; j < r->cols; j++) {
            int32_t id = mti_sample_id(r, x, j);
            uint64_t order = mti_sample_order(x[j], id);
            if (id < 0 || order < kept->from || ((order ^ known) & mask)) continue;
            bins[order >> shift & low] += sharp > 0.0 ? mti_sample_mass(x[j], top, sharp) : 1;
        }
    }
}

/* Returns the mass that top_p keeps of `mass`: the tokens before the last kept one have less. */
static MT_HOST_DEVICE uint64_t mti_sample_target(float top_p, uint64_t mass) {
    uint64_t target = (uint64_t)ceil((double)top_p * (double)mass);
    return target > 0 ? target : 1;
}

static uint64_t mti_sample_sum(const uint64_t *bins) {
    uint64_t sum = 0;
    int bin;
    for (bin = 0; bin < MTI_SAMPLE_BINS; bin++) sum += bins[bin];
    return sum;
}

/* Keeps the first top_k tokens or, if sharp is not 0, the first ones that have top_p of the mass. Each pass finds the
   next digit of the last of them. */
static void mti_sample_limit(const mti_sample_row *r, mti_sample_kept *kept, double sharp, int64_t top_k, float top_p) {
    uint64_t bins[MTI_SAMPLE_BINS], known = 0, mask = 0, above = 0, target = (uint64_t)top_k;
    int digit, bin;
    for (digit = 0; digit < MTI_SAMPLE_DIGITS; digit++) {
        memset(bins, 0, sizeof bins);
        mti_sample_weigh(r, kept, sharp, known, mask, digit, bins);
        if (digit == 0 && sharp > 0.0) target = mti_sample_target(top_p, mti_sample_sum(bins));
        for (bin = (int)mti_sample_mask(digit); bin > 0 && above + bins[bin] < target; bin--) above += bins[bin];
        known |= (uint64_t)bin << mti_sample_shift(digit);
        mask |= mti_sample_mask(digit) << mti_sample_shift(digit);
        if (sharp == 0.0 && above + bins[bin] == target) break; /* all tokens of the bin */
    }
    kept->from = known;
}

/* Finds the tokens of gathered candidates that top_k and top_p keep. */
static void mti_sample_keep(const mt_sample_desc *s, const mti_sample_row *r, mti_sample_kept *kept) {
    mti_sample_look(r, kept);
    if (mti_sample_greedy(s) || kept->count < 2 || kept->first >> 32 == 0xffffffffu) return;
    if (s->top_k > 0 && s->top_k < kept->count) mti_sample_limit(r, kept, 0.0, s->top_k, 0.0f);
    if (s->top_p > 0.0f && s->top_p < 1.0f) mti_sample_limit(r, kept, mti_sample_sharp(s), 0, s->top_p);
}

/* A draw from the tokens of a row, one run of consecutive ids after the other. */
typedef struct mti_draw {
    mt_random at;
    double sharp, best; /* 1 / temperature, and the largest score so far */
    int noisy;          /* 0: no random numbers */
    int32_t id;         /* the token of this score, or -1 */
    float logit;        /* NaN: the row has one */
} mti_draw;

static mti_draw mti_draw_begin(const mt_sample_desc *s, int64_t vocab, int64_t row) {
    mti_draw d;
    d.at = mti_sample_random(s, vocab, row);
    d.sharp = mti_sample_sharp(s);
    d.noisy = !mti_sample_greedy(s);
    d.best = -(double)INFINITY;
    d.id = -1;
    d.logit = -(float)INFINITY;
    return d;
}

/* Returns the number of the first NaN, or n. */
static int64_t mti_row_nan(const float *x, int64_t n) {
    int64_t j;
    int any = 0;
    for (j = 0; j < n; j++) any |= x[j] != x[j];
    for (j = any ? 0 : n; j < n && x[j] == x[j];) j++;
    return j;
}

/* Draws from at most MTI_WORDS tokens. Most of them cannot reach the best score, which their random word shows. */
static void mti_draw_block(mti_draw *d, const float *x, int64_t n, int32_t id) {
    uint32_t room[MTI_WORDS_ROOM], most = 0xffffffffu;
    const uint32_t *words = NULL;
    double top = (double)mti_row_max(x, n) * d->sharp;
    int64_t j;
    if (d->id >= 0 && top + (d->noisy ? MTI_GUMBEL_MOST : 0.0) < d->best) return;
    if (d->noisy) {
        words = mti_random_words(d->at, mti_random_element(d->at, 0, id), n, room);
        most = mti_sample_most(top - d->best);
    }
    for (j = 0; j < n; j++) {
        double score;
        if (words && words[j] > most) continue;
        score = (double)x[j] * d->sharp + (words ? mti_gumbel(words[j]) : 0.0);
        if (d->id >= 0 && (score < d->best || (score == d->best && id + (int32_t)j > d->id))) continue;
        d->best = score;
        d->id = id + (int32_t)j;
        d->logit = x[j];
    }
}

static void mti_draw_run(mti_draw *d, const float *x, int64_t n, int32_t id) {
    int64_t j, wrong;
    for (j = 0; j < n && d->logit == d->logit; j += MTI_WORDS) {
        int64_t count = mt_min(MTI_WORDS, n - j);
        wrong = mti_row_nan(x + j, count);
        if (wrong == count) {
            mti_draw_block(d, x + j, count, id + (int32_t)j);
            continue;
        }
        d->id = id + (int32_t)(j + wrong);
        d->logit = x[j + wrong];
    }
}

/* Draws from the tokens that are kept, in runs of consecutive ids. */
static void mti_draw_kept(mti_draw *d, const mti_sample_row *r, uint64_t from) {
    int64_t s, j, n;
    for (s = 0; s < r->parts; s++) {
        const float *x = mti_row(r->x, r->row + s * r->step);
        for (j = 0; j < r->cols; j += mt_max(n, 1)) {
            int32_t id = mti_sample_id(r, x, j);
            for (n = 0; id >= 0 && j + n < r->cols; n++)
                if (mti_sample_id(r, x, j + n) != id + n || mti_sample_order(x[j + n], id + (int32_t)n) < from) break;
            mti_draw_run(d, x + j, n, id);
        }
    }
}

/* Writes the tokens of a shard that are kept, in k places. */
static void mti_sample_write(const mti_sample_row *r, uint64_t from, int64_t k, float *out) {
    const float *x = mti_row(r->x, r->row);
    int32_t none = -1;
    int64_t j, n = 0;
    for (j = 0; j < r->cols && n < k; j++) {
        int32_t id = mti_sample_id(r, x, j);
        if (mti_sample_order(x[j], id) < from) continue;
        memcpy(out + k + n, &id, sizeof id);
        out[n++] = x[j];
    }
    for (; n < k; n++) {
        out[n] = -(float)INFINITY;
        memcpy(out + k + n, &none, sizeof none);
    }
}

/* The arguments of the loops. tokens.row is not used: each row sets it in a copy. */
typedef struct mti_sample_loop {
    const mt_sample_desc *desc;
    int64_t vocab;
    mti_sample_row tokens;
    mt_tensor candidates; /* of mt_sample_candidates */
    int32_t *ids;         /* of mt_sample_ids; -1 for a row with a NaN */
} mti_sample_loop;

static void mti_sample_candidates_row(const mti_sample_loop *l, int64_t i) {
    mti_draw d = mti_draw_begin(l->desc, l->vocab, i);
    mti_sample_kept kept = {0, 0, 0};
    mti_sample_row r = l->tokens;
    float *out = mti_row(l->candidates, i);
    int64_t k = l->candidates.cols / 2;
    r.row = i;
    if (k > 1 && k < r.cols) mti_sample_limit(&r, &kept, 0.0, k, 0.0f);
    if (k > 1 || r.cols < 1) {
        mti_sample_write(&r, kept.from, k, out);
        return;
    }
    mti_draw_run(&d, mti_row(r.x, i), r.cols, (int32_t)r.first);
    out[0] = d.logit;
    memcpy(out + 1, &d.id, sizeof d.id);
}

static void mti_cpu_sample_candidates(void *data, int thread, int64_t first, int64_t last) {
    const mti_sample_loop *l = (const mti_sample_loop *)data;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) mti_sample_candidates_row(l, i);
}

static void mti_cpu_sample_ids(void *data, int thread, int64_t first, int64_t last) {
    const mti_sample_loop *l = (const mti_sample_loop *)data;
    mti_sample_row r = l->tokens;
    (void)thread;
    for (r.row = first; r.row < last; r.row++) {
        mti_draw d = mti_draw_begin(l->desc, l->vocab, r.row);
        mti_sample_kept kept = {0, 0, 0};
        mti_sample_keep(l->desc, &r, &kept);
        mti_draw_kept(&d, &r, kept.from);
        l->ids[r.row] = d.logit == d.logit ? d.id : -1;
    }
}

/* Returns the number of the first row with a NaN, or rows. */
static int64_t mti_sample_wrong(const int32_t *ids, int64_t rows) {
    int64_t i;
    for (i = 0; i < rows && ids[i] >= 0;) i++;
    return i;
}

#include "sample.cuh"

/* clang-format off */
static const mti_table mti_sample_candidates_table = {"mt_sample_candidates", {"logits candidates", "RR rr cc", NULL}, {
    {"candidates", "AB", MT_ARG_F32, MT_ARG_OUT, "logits"},
    {"logits", "nm", MT_ARG_FLOAT, MT_ARG_IN, NULL}}};

static const mti_table mti_sample_ids_table = {"mt_sample_ids", {"gathered ids", "RR rr", NULL}, {
    {"gathered", "nm", MT_ARG_F32, MT_ARG_IN | MT_ARG_GATHERED, NULL},
    {"ids", "A1", MT_ARG_ANY, MT_ARG_OUT | MTI_UNSEEN, NULL}}};
/* clang-format on */

MT_API mt_status mt_sample_candidates(mt_context *ctx, const mt_sample_desc *desc, int64_t vocab, int64_t first_col,
                                      mt_tensor logits, mt_tensor candidates) {
    const int64_t sizes[] = {logits.rows, mt_size_mul(2, mt_sample_count(desc, logits.cols))};
    mt_tensor *views[] = {&candidates, &logits};
    mti_operator op;
    mti_operands(&op, ctx, &mti_sample_candidates_table, views, sizes);
    MT_TRY(mti_expect_sample(ctx, op.name, desc, vocab));
    MT_TRY(mt_check_size(ctx, op.name, NULL, "first_col", first_col, 0, INT64_MAX));
    MT_TRY(mt_args_check(ctx, op.name, &op.args[1], 1));
    MT_TRY(mti_check(&op));
    MT_TRY(mti_begin(&op));
    const int64_t cols = mti_sample_columns(vocab, first_col, logits.cols);
    mti_sample_loop l = {desc, vocab, {logits, 0, 0, 1, cols, first_col}, candidates, NULL};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_sample_candidates(ctx, desc, vocab, first_col, logits, candidates),
                                mti_cpu_rows(ctx, logits.rows, logits.cols, mti_cpu_sample_candidates, &l)));
}

MT_API mt_status mt_sample_ids(mt_context *ctx, const mt_sample_desc *desc, int64_t vocab, mt_tensor gathered,
                               int shards, int32_t *ids) {
    mt_tensor id_rows = mt_none(), *views[] = {&gathered, &id_rows};
    mti_operator op;
    mti_operands(&op, ctx, &mti_sample_ids_table, views, &id_rows.rows);
    MT_TRY(mti_expect_sample(ctx, op.name, desc, vocab));
    MT_TRY(mt_check_integer(ctx, op.name, NULL, "shards", shards, 1, INT32_MAX));
    MT_TRY(mti_check(&op));
    if (gathered.rows % shards != 0 || gathered.cols % 2 != 0 || gathered.cols < 2)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: gathered is [%lld, %lld], must be [%d * rows, 2 * candidates]", op.name,
                       (long long)gathered.rows, (long long)gathered.cols, shards);
    const int64_t rows = gathered.rows / shards;
    MT_TRY(mti_expect_pointer(ctx, op.name, "ids", ids, rows));
    id_rows = mt_tensor_make(ids, MT_I32, rows, 1);
    MT_TRY(mti_apply_rule(&op));
    MT_TRY(mti_start(&op));
    op.work.bytes += (double)rows * sizeof *ids;
    mti_sample_loop l = {desc, vocab, {gathered, 0, rows, shards, gathered.cols / 2, -1}, mt_none(), ids};
    MT_TRY(mti_end(&op, MTI_RUN(&op, mti_cuda_sample_ids(ctx, desc, vocab, gathered, shards, ids),
                                mti_cpu_rows(ctx, rows, shards * gathered.cols, mti_cpu_sample_ids, &l))));
    const int64_t wrong = op.on_cpu ? mti_sample_wrong(ids, rows) : rows;
    if (wrong == rows) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA, "%s: the logits of row %lld have a NaN", op.name, (long long)wrong);
}
