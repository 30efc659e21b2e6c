/* ---- cross-entropy ----------------------------------------------------------------------------------------------- */

#pragma once
#include "cross_entropy.h"
#include "rows.c"
#include "rows.cuh"
#include "map.cuh"
#include "ptx.cuh"
#include "numbers.c"
#include "operator.c"

static mt_status mti_expect_cross_entropy(mt_context *ctx, const char *where, const mt_cross_entropy_shard_desc *s) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!s) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc is NULL", where);
    MT_TRY(mt_check_size(ctx, where, NULL, "vocab", s->vocab, 1, INT64_MAX));
    MT_TRY(mt_check_size(ctx, where, NULL, "first_col", s->first_col, 0, INT64_MAX));
    return mt_check_float(ctx, where, NULL, "label_smoothing", s->label_smoothing, MT_FLOAT_PROBABILITY);
}

/* The number of columns of a shard that are not padding. */
static int64_t mti_real_columns(const mt_cross_entropy_shard_desc *s, int64_t cols) {
    return mt_max(0, mt_min(cols, s->vocab - s->first_col));
}

static int32_t mti_ignore_index(int32_t ignore_index) {
    if (ignore_index == MT_ZERO) return 0;
    return ignore_index ? ignore_index : -100;
}

MT_API int32_t mt_ignore_index(int32_t ignore_index) { return mti_ignore_index(ignore_index); }

/* Returns the column of the target in this shard, or -1 if the target is ignored or in another shard. */
static int64_t mti_target_column(const mt_cross_entropy_shard_desc *s, int32_t target, int64_t real) {
    int64_t col = (int64_t)target - s->first_col;
    return target != mti_ignore_index(s->ignore_index) && col >= 0 && col < real ? col : -1;
}

#define MTI_CE_STEP 128 /* columns between two prefetches */

/* y = e^(x - shift) for n columns, x - shift <= 0. Returns the sum of y. Meanwhile `bytes` bytes from `next` on come
   into the cache, `step` for each MTI_CE_STEP columns. The processor would not fetch them itself, because exponentials
   of a block in L1 take longer than its prefetcher waits. */
static float mti_row_exp_ahead(const float *x, float shift, float *y, int64_t n, const char *next, int64_t bytes,
                               int64_t step) {
    float least = mti_unknown(-88.0f);
    int64_t j, k, at = 0;
    for (j = 0; j < n; j += MTI_CE_STEP) {
        int64_t end = mt_min(n, j + MTI_CE_STEP);
        for (k = 0; k < step && at < bytes; k += 64, at += 64) MTI_PREFETCH(next + at);
        MT_INDEPENDENT
        for (k = j; k < end; k++) y[k] = mti_exp_to_88(x[k] - shift, least);
    }
    return mti_row_sum(y, n);
}

/* out[0] = max of n columns of row i of t, out[1] = sum of e^(x - max), out[3] = sum of x. It reads memory once: it
   processes a block of columns at a time, and rescales the sum in double if the maximum grows (Milakov and Gimelshein,
   arXiv 1805.02867). A NaN may hide the maximum, but the sums are then NaN. */
static void mti_row_softmax_stats(mt_tensor t, int64_t i, int64_t n, float *out) {
    float room[MTI_BLOCK], exponentials[MTI_BLOCK], top = -(float)INFINITY;
    int64_t j, size = (int64_t)mt_dtype_size(t.dtype);
    double exps = 0.0, sum = 0.0;
    for (j = 0; j < n; j += MTI_BLOCK) {
        int64_t count = mt_min(MTI_BLOCK, n - j), after = mt_min(n, j + 2 * MTI_BLOCK);
        const float *x = mti_row(mti_f32_read(t, i, 1, j, count, room), 0);
        const char *next = (const char *)mti_bytes_at(t, i, after);
        float block_top = mti_row_max(x, count);
        if (!(block_top <= top)) {
            exps = exps > 0.0 ? exps * exp((double)top - (double)block_top) : exps;
            top = block_top;
        }
        exps += (double)mti_row_exp_ahead(x, top == -(float)INFINITY ? 0.0f : top, exponentials, count, next,
                                          mt_min(MTI_BLOCK, n - after) * size, MTI_CE_STEP * size);
        sum += (double)mti_row_sum(x, count);
    }
    out[0] = top;
    out[1] = (float)exps;
    out[3] = (float)sum;
}

/* The arguments of a loop. It uses those that its function has. */
typedef struct mti_cross_entropy {
    const mt_cross_entropy_shard_desc *desc;
    const int32_t *targets;
    mt_tensor logits, stats; /* stats: those of `shards` shards, one after the other */
    int64_t shards, real;    /* real: the columns of this shard that are not padding */
    mt_tensor dloss, loss, lse;
    float scale;
} mti_cross_entropy;

static mti_cross_entropy mti_cross_entropy_of(const mt_cross_entropy_shard_desc *s, mt_tensor logits,
                                              const int32_t *targets) {
    mti_cross_entropy c;
    memset(&c, 0, sizeof c);
    c.desc = s;
    c.targets = targets;
    c.logits = logits;
    c.shards = 1;
    c.real = mti_real_columns(s, logits.cols);
    return c;
}

static void mti_cross_entropy_stats_row(const mti_cross_entropy *c, int64_t i, float out[4]) {
    int64_t target = mti_target_column(c->desc, c->targets[i], c->real);
    mti_row_softmax_stats(c->logits, i, c->real, out);
    out[2] = 0.0f;
    if (target >= 0) mti_cpu_load(c->logits, i, target, 1, &out[2]);
}

static void mti_cpu_cross_entropy_stats(void *data, int thread, int64_t first, int64_t last) {
    const mti_cross_entropy *c = (const mti_cross_entropy *)data;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) mti_cross_entropy_stats_row(c, i, mti_row(c->stats, i));
}

/* Adds the `count` statistics of b to those of a: maximum, sum of exponentials, and further sums. The sums of
   exponentials are rescaled to the larger maximum. The maximum is -infinity if both shards have padding only. */
static void mti_stats_join(float *a, const float *b, int64_t count) {
    float top = a[0] > b[0] ? a[0] : b[0];
    int64_t k;
    a[1] = top == -(float)INFINITY ? a[1] + b[1] : a[1] * expf(a[0] - top) + b[1] * expf(b[0] - top);
    a[0] = top;
    for (k = 2; k < count; k++) a[k] += b[k];
}

/* out = the joined statistics of shards [first, first + span) of a token, 2 or 4 numbers. The order is that in which
   mt_all_reduce adds ranks: ((0+1)+(2+3))+... span is a power of two. */
static void mti_stats_tree(mt_tensor gathered, int64_t tokens, int64_t token, int64_t first, int64_t span,
                           int64_t shards, float *out) {
    float right[4];
    if (span == 1) {
        memcpy(out, mti_row(gathered, first * tokens + token), (size_t)gathered.cols * sizeof *out);
        return;
    }
    mti_stats_tree(gathered, tokens, token, first, span / 2, shards, out);
    if (first + span / 2 >= shards) return;
    mti_stats_tree(gathered, tokens, token, first + span / 2, span / 2, shards, right);
    mti_stats_join(out, right, gathered.cols);
}

/* The span of a tree over all shards. */
static int64_t mti_stats_span(int64_t shards) {
    int64_t span = 1;
    while (span < shards) span *= 2;
    return span;
}

#define MTI_CE_SHARDS 1024 /* the most whose statistics are joined */

static mt_status mti_expect_stats_shards(mt_context *ctx, const char *where, int shards) {
    if (shards >= 1 && shards <= MTI_CE_SHARDS) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: shards is %d, must be 1 to %d", where, shards, MTI_CE_SHARDS);
}

/* Returns the loss of token i, from its joined statistics. With the maximum m and the sum s, the loss is log(s) + (m -
   target), not lse - target, so that the large part of the logits cancels before log(s) is added. */
static float mti_cross_entropy_loss(const mti_cross_entropy *c, int64_t i, const float all[4], float log_sum) {
    float a = c->desc->label_smoothing, value = log_sum + (1.0f - a) * (all[0] - all[2]);
    if (a > 0.0f) value += a * (all[0] - all[3] / (float)c->desc->vocab);
    return c->targets[i] == mti_ignore_index(c->desc->ignore_index) ? 0.0f : value;
}

static void mti_cpu_cross_entropy_combine(void *data, int thread, int64_t first, int64_t last) {
    const mti_cross_entropy *c = (const mti_cross_entropy *)data;
    float all[4];
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) {
        mti_stats_tree(c->stats, c->loss.cols, i, 0, mti_stats_span(c->shards), c->shards, all);
        mti_row(c->lse, 0)[i] = all[0];
        mti_row(c->lse, 1)[i] = logf(all[1]);
        mti_row(c->loss, 0)[i] = mti_cross_entropy_loss(c, i, all, mti_row(c->lse, 1)[i]);
    }
}

static void mti_cross_entropy_backward_row(float *x, float top, float log_sum, float even, float factor, int64_t n) {
    int64_t j;
    for (j = 0; j < n; j++) x[j] = factor * (mti_exp((x[j] - top) - log_sum) - even);
}

/* Overwrites the logits of row i with their gradient. Padding columns and rows with an ignored target become 0. */
static void mti_cross_entropy_gradient(const mti_cross_entropy *c, int64_t i, float top, float log_sum) {
    const mt_cross_entropy_shard_desc *s = c->desc;
    float room[MTI_BLOCK], even = s->label_smoothing / (float)s->vocab;
    float factor = c->dloss.data ? c->scale * mti_row(c->dloss, 0)[c->dloss.cols == 1 ? 0 : i] : c->scale;
    int64_t j, n, target = mti_target_column(s, c->targets[i], c->real);
    int64_t used = c->targets[i] == mti_ignore_index(s->ignore_index) ? 0 : c->real;
    for (j = 0; j < c->logits.cols; j += n) {
        int64_t count = mt_max(0, mt_min(MTI_BLOCK, used - j));
        mt_tensor block;
        float *x;
        n = mt_min(MTI_BLOCK, c->logits.cols - j);
        block = mti_f32_read(c->logits, i, 1, j, n, room);
        x = mti_row(block, 0);
        mti_cross_entropy_backward_row(x, top, log_sum, even, factor, count);
        mti_row_fill(x + count, 0.0f, n - count);
        if (target >= j && target < j + n) x[target - j] -= factor * (1.0f - s->label_smoothing);
        mti_f32_write(block, c->logits, i, j);
    }
}

static void mti_cpu_cross_entropy_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_cross_entropy *c = (const mti_cross_entropy *)data;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) mti_cross_entropy_gradient(c, i, mti_row(c->lse, 0)[i], mti_row(c->lse, 1)[i]);
}

/* Does all three steps for one row at a time, while the row is in the cache. */
static void mti_cpu_cross_entropy(void *data, int thread, int64_t first, int64_t last) {
    const mti_cross_entropy *c = (const mti_cross_entropy *)data;
    float stats[4], log_sum;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) {
        mti_cross_entropy_stats_row(c, i, stats);
        log_sum = logf(stats[1]);
        mti_row(c->loss, 0)[i] = mti_cross_entropy_loss(c, i, stats, log_sum);
        mti_cross_entropy_gradient(c, i, stats[0], log_sum);
    }
}

#include "cross_entropy.cuh"

/* Whether a CPU knows that some rows have no loss. */
static int mti_ignores_rows(mt_context *ctx, const mt_cross_entropy_shard_desc *desc, const int32_t *targets,
                            int64_t rows) {
    int64_t i;
    if (mt_check_mode(ctx) != 2 || mt_context_device(ctx) != MT_DEVICE_CPU) return 0;
    for (i = 0; i < rows; i++)
        if (targets[i] == mti_ignore_index(desc->ignore_index)) return 1;
    return 0;
}

/* Notes by what the gradient of a loss is multiplied. If rows have no loss, it is divided by the number of the others,
   which only the program knows. */
static mt_status mti_loss_scale_note(mt_context *ctx, const char *where, const mt_cross_entropy_shard_desc *desc,
                                     mt_tensor logits, const int32_t *targets, mt_tensor dloss, float scale) {
    const int is_mean = !dloss.data && !mti_ignores_rows(ctx, desc, targets, logits.rows);
    mt_check_mean(ctx, logits, is_mean ? (double)scale : (double)NAN);
    return mti_numbers_agree(ctx, where, "scale", mt_none(), 1, 1, (double)scale);
}

/* Notes the numbers of a loss, and the targets, which go with the rows of the logits. */
static mt_status mti_cross_entropy_agree(mt_context *ctx, const char *where, const mt_cross_entropy_shard_desc *desc,
                                         mt_tensor logits, const int32_t *targets) {
    MT_TRY(mti_numbers_agree(ctx, where, "a number of desc", logits, 0, 3, (double)desc->vocab,
                             (double)desc->label_smoothing, (double)desc->ignore_index));
    return mt_check_side(ctx, where, "targets", mt_tensor_make(targets, MT_I32, logits.rows, 1), logits, MT_SPLIT_ROWS,
                         0);
}

/* Checks that ranks with columns of their own take other parts of the vocabulary. */
static mt_status mti_expect_vocabulary(mt_context *ctx, const char *where, const mt_cross_entropy_shard_desc *desc,
                                       mt_tensor logits, const int32_t *targets) {
    mt_place place = {logits.rows, logits.cols, INT64_MAX, desc->first_col, logits.cols, 1, "part of the vocabulary", 0,
                      0,           desc->vocab, 0};
    MT_TRY(mt_place_check(ctx, where, "desc", "logits", logits, &place));
    return mti_cross_entropy_agree(ctx, where, desc, logits, targets);
}

/* clang-format off */
static const mti_table mti_cross_entropy_stats_table = {"mt_cross_entropy_stats", {"logits stats", "RR rr cc", NULL}, {
    {"stats", "A4", MT_ARG_F32, MT_ARG_OUT, "logits"},
    {"logits", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL}}};

static const mti_table mti_cross_entropy_combine_table = {"mt_cross_entropy_combine",
    {"gathered loss lse", "RRR rcc", NULL}, {
    {"loss", "1n", MT_ARG_F32, MT_ARG_OUT, NULL},
    {"lse", "2n", MT_ARG_F32, MT_ARG_OUT, NULL},
    {"gathered", "A4", MT_ARG_F32, MT_ARG_IN | MT_ARG_GATHERED, NULL}}};

/* dloss may have one column for all rows: A. */
static const mti_table mti_cross_entropy_backward_table = {"mt_cross_entropy_backward",
    {"logits(logits) lse dloss", "RRR cRR rcR rcc", NULL}, {
    {"logits", "nm", MT_ARG_FLOAT, MT_ARG_IN_OUT | MTI_AS_IS, NULL},
    {"lse", "2n", MT_ARG_F32, MT_ARG_IN, NULL},
    {"dloss", "1A", MT_ARG_F32, MT_ARG_IN | MT_ARG_GRADIENT | MT_ARG_OPTIONAL, NULL}}};

static const mti_table mti_cross_entropy_forward_backward_table = {"mt_cross_entropy_forward_backward",
    {"logits(logits) loss dloss", "RRR rcR rcc", NULL}, {
    {"logits", "nm", MT_ARG_FLOAT, MT_ARG_IN_OUT | MTI_AS_IS, NULL},
    {"loss", "1n", MT_ARG_F32, MT_ARG_OUT, NULL},
    {"dloss", "1A", MT_ARG_F32, MT_ARG_IN | MT_ARG_GRADIENT | MT_ARG_OPTIONAL, NULL}}};
/* clang-format on */

MT_API mt_status mt_cross_entropy_stats(mt_context *ctx, const mt_cross_entropy_shard_desc *desc, mt_tensor logits,
                                        const int32_t *targets, mt_tensor stats) {
    mt_tensor *views[] = {&stats, &logits};
    mti_cross_entropy c;
    mti_operator op;
    mti_operands(&op, ctx, &mti_cross_entropy_stats_table, views, &logits.rows);
    MT_TRY(mti_expect_cross_entropy(ctx, op.name, desc));
    MT_TRY(mt_args_check(ctx, op.name, op.args, op.views));
    MT_TRY(mti_expect_pointer(ctx, op.name, "targets", targets, logits.rows));
    MT_TRY(mti_expect_all_apart(&op));
    MT_TRY(mti_expect_vocabulary(ctx, op.name, desc, logits, targets));
    MT_TRY(mti_begin(&op));
    c = mti_cross_entropy_of(desc, logits, targets);
    c.stats = stats;
    return mti_end(&op, MTI_RUN(&op, mti_cuda_cross_entropy_stats(ctx, desc, logits, targets, stats),
                                mti_cpu_rows(ctx, logits.rows, logits.cols, mti_cpu_cross_entropy_stats, &c)));
}

MT_API mt_status mt_cross_entropy_combine(mt_context *ctx, const mt_cross_entropy_shard_desc *desc, mt_tensor gathered,
                                          int shards, const int32_t *targets, mt_tensor loss, mt_tensor lse) {
    const int64_t rows = mt_size_mul(shards, loss.cols);
    mt_tensor *views[] = {&loss, &lse, &gathered};
    mti_cross_entropy c;
    mti_operator op;
    mti_operands(&op, ctx, &mti_cross_entropy_combine_table, views, &rows);
    MT_TRY(mti_expect_cross_entropy(ctx, op.name, desc));
    MT_TRY(mti_expect_stats_shards(ctx, op.name, shards));
    MT_TRY(mti_check(&op));
    MT_TRY(mti_expect_pointer(ctx, op.name, "targets", targets, loss.cols));
    MT_TRY(mti_begin(&op));
    c = mti_cross_entropy_of(desc, mt_none(), targets);
    c.stats = gathered;
    c.shards = shards;
    c.loss = loss;
    c.lse = lse;
    return mti_end(&op, MTI_RUN(&op, mti_cuda_cross_entropy_combine(ctx, desc, gathered, shards, targets, loss, lse),
                                mti_cpu_rows(ctx, loss.cols, 4 * shards, mti_cpu_cross_entropy_combine, &c)));
}

MT_API mt_status mt_cross_entropy_backward(mt_context *ctx, const mt_cross_entropy_shard_desc *desc, mt_tensor logits,
                                           const int32_t *targets, mt_tensor lse, mt_tensor dloss, float scale) {
    const int64_t losses = dloss.cols == 1 ? 1 : logits.rows;
    mt_tensor *views[] = {&logits, &lse, &dloss};
    mti_cross_entropy c;
    mti_operator op;
    mti_operands(&op, ctx, &mti_cross_entropy_backward_table, views, &losses);
    MT_TRY(mti_expect_cross_entropy(ctx, op.name, desc));
    MT_TRY(mti_check(&op));
    MT_TRY(mti_expect_pointer(ctx, op.name, "targets", targets, logits.rows));
    MT_TRY(mti_expect_vocabulary(ctx, op.name, desc, logits, targets));
    MT_TRY(mti_loss_scale_note(ctx, op.name, desc, logits, targets, dloss, scale));
    MT_TRY(mti_begin(&op));
    c = mti_cross_entropy_of(desc, logits, targets);
    c.lse = lse;
    c.dloss = dloss;
    c.scale = scale;
    return mti_end(&op, MTI_RUN(&op, mti_cuda_cross_entropy_backward(ctx, desc, logits, targets, lse, dloss, scale),
                                mti_cpu_rows(ctx, logits.rows, logits.cols, mti_cpu_cross_entropy_backward, &c)));
}

MT_API mt_status mt_cross_entropy_forward_backward(mt_context *ctx, const mt_cross_entropy_shard_desc *desc,
                                                   mt_tensor logits, const int32_t *targets, mt_tensor dloss,
                                                   float scale, mt_tensor loss) {
    const int64_t losses = dloss.cols == 1 ? 1 : logits.rows;
    mt_tensor *views[] = {&logits, &loss, &dloss};
    mti_cross_entropy c;
    mti_operator op;
    mti_operands(&op, ctx, &mti_cross_entropy_forward_backward_table, views, &losses);
    MT_TRY(mti_expect_cross_entropy(ctx, op.name, desc));
    MT_TRY(mti_check(&op));
    if (desc->first_col != 0 || logits.cols < desc->vocab)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %lld columns from %lld on are only a part of a vocabulary of %lld",
                       op.name, (long long)logits.cols, (long long)desc->first_col, (long long)desc->vocab);
    MT_TRY(mti_expect_pointer(ctx, op.name, "targets", targets, logits.rows));
    MT_TRY(mti_cross_entropy_agree(ctx, op.name, desc, logits, targets));
    MT_TRY(mti_loss_scale_note(ctx, op.name, desc, logits, targets, dloss, scale));
    MT_TRY(mti_begin(&op));
    c = mti_cross_entropy_of(desc, logits, targets);
    c.loss = loss;
    c.dloss = dloss;
    c.scale = scale;
    return mti_end(&op, MTI_RUN(&op, mti_cuda_cross_entropy(ctx, desc, logits, targets, dloss, scale, loss),
                                mti_cpu_rows(ctx, logits.rows, logits.cols, mti_cpu_cross_entropy, &c)));
}
