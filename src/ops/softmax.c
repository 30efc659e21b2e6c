/* ---- softmax and log-softmax ------------------------------------------------------------------------------------- */

#pragma once
#include "softmax.h"
#include "softmax_shard.h"
#include "math.cuh"
#include "cross_entropy.c"

/* The arguments of a loop. It uses those that its function has. A whole row is the only shard. */
typedef struct mti_softmax_args {
    int log;
    int64_t real;       /* columns that are not padding */
    mt_tensor x, stats; /* stats: those of `shards` shards, one after the other */
    int64_t shards;     /* 0: the statistics or sums are those of the row itself */
    mt_tensor y, dy, sums, dx;
} mti_softmax_args;

/* y of row i, from the maximum of the whole row and its sum of exponentials. Padding columns become 0. */
static void mti_softmax_row(const mti_softmax_args *s, int64_t i, float top, float sum) {
    float room[2][MTI_BLOCK], least = mti_unknown(-88.0f), log_sum = logf(sum), part = 1.0f / sum;
    int64_t j, k, n;
    for (j = 0; j < s->y.cols; j += n) {
        int64_t count = mt_max(0, mt_min(MTI_BLOCK, s->real - j));
        n = mt_min(MTI_BLOCK, s->y.cols - j);
        mt_tensor block = mti_f32_place(s->y, i, 1, j, n, room[1]);
        const float *x = mti_row(mti_f32_read(s->x, i, 1, j, n, room[0]), 0);
        float *y = mti_row(block, 0);
        if (s->log) {
            MT_INDEPENDENT
            for (k = 0; k < count; k++) y[k] = (x[k] - top) - log_sum;
        } else {
            MT_INDEPENDENT
            for (k = 0; k < count; k++) y[k] = mti_exp_to_88(x[k] - top, least) * part;
        }
        mti_row_fill(y + count, 0.0f, n - count);
        mti_f32_write(block, s->y, i, j);
    }
}

static void mti_cpu_softmax_forward(void *data, int thread, int64_t first, int64_t last) {
    const mti_softmax_args *s = (const mti_softmax_args *)data;
    float stats[4];
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) {
        if (s->shards == 0) mti_row_softmax_stats(s->x, i, s->real, stats);
        else mti_stats_tree(s->stats, s->y.rows, i, 0, mti_stats_span(s->shards), s->shards, stats);
        mti_softmax_row(s, i, stats[0], stats[1]);
    }
}

static void mti_cpu_softmax_stats(void *data, int thread, int64_t first, int64_t last) {
    const mti_softmax_args *s = (const mti_softmax_args *)data;
    float stats[4];
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) {
        mti_row_softmax_stats(s->x, i, s->real, stats);
        memcpy(mti_row(s->stats, i), stats, 2 * sizeof *stats);
    }
}

/* Returns the sum of y dy, or of dy, over row i without its padding. */
static float mti_softmax_sum(const mti_softmax_args *s, int64_t i) {
    float room[2][MTI_BLOCK];
    double sum = 0.0;
    int64_t j, n;
    for (j = 0; j < s->real; j += n) {
        n = mt_min(MTI_BLOCK, s->real - j);
        const float *dy = mti_row(mti_f32_read(s->dy, i, 1, j, n, room[0]), 0);
        if (s->log) sum += (double)mti_row_sum(dy, n);
        else sum += (double)mti_row_dot(mti_row(mti_f32_read(s->y, i, 1, j, n, room[1]), 0), dy, n);
    }
    return (float)sum;
}

static void mti_cpu_softmax_sums(void *data, int thread, int64_t first, int64_t last) {
    const mti_softmax_args *s = (const mti_softmax_args *)data;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++) mti_row(s->sums, i)[0] = mti_softmax_sum(s, i);
}

/* dx of row i, from the sum over the whole row. Padding columns become 0. */
static void mti_softmax_gradient(const mti_softmax_args *s, int64_t i, float sum) {
    float room[3][MTI_BLOCK];
    int64_t j, k, n;
    for (j = 0; j < s->dx.cols; j += n) {
        int64_t count = mt_max(0, mt_min(MTI_BLOCK, s->real - j));
        n = mt_min(MTI_BLOCK, s->dx.cols - j);
        mt_tensor block = mti_f32_place(s->dx, i, 1, j, n, room[2]);
        const float *y = mti_row(mti_f32_read(s->y, i, 1, j, n, room[0]), 0);
        const float *dy = mti_row(mti_f32_read(s->dy, i, 1, j, n, room[1]), 0);
        float *dx = mti_row(block, 0);
        if (s->log) {
            MT_INDEPENDENT
            for (k = 0; k < count; k++) dx[k] = dy[k] - mti_exp(y[k]) * sum;
        } else {
            MT_INDEPENDENT
            for (k = 0; k < count; k++) dx[k] = y[k] * (dy[k] - sum);
        }
        mti_row_fill(dx + count, 0.0f, n - count);
        mti_f32_write(block, s->dx, i, j);
    }
}

static void mti_cpu_softmax_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_softmax_args *s = (const mti_softmax_args *)data;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++)
        mti_softmax_gradient(s, i, s->shards == 0 ? mti_softmax_sum(s, i) : mti_row(s->sums, i)[0]);
}

#include "softmax.cuh"

/* clang-format off */
static const mti_table mti_softmax_forward_table = {"mt_softmax_forward", {"x y", "RR rr", NULL}, {
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, "=x"},
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL}}};

static const mti_table mti_log_softmax_forward_table = {"mt_log_softmax_forward", {"x y", "RR rr", NULL}, {
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, "=x"},
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL}}};

static const mti_table mti_softmax_backward_table = {"mt_softmax_backward", {"y dy dx", "RRR rrr RPP", NULL}, {
    {"dx", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MTI_AS_IS, "y =dy"},
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MTI_AS_IS, NULL}}};

static const mti_table mti_log_softmax_backward_table = {"mt_log_softmax_backward", {"y dy dx", "RRR rrr RPP", NULL}, {
    {"dx", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MTI_AS_IS, "y =dy"},
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MTI_AS_IS, NULL}}};

static const mti_table mti_softmax_shard_stats_table = {"mt_softmax_shard_stats", {"x stats", "RR rr cc", NULL}, {
    {"stats", "n2", MT_ARG_F32, MT_ARG_OUT, "x"},
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL}}};

static const mti_table mti_softmax_shard_forward_table = {"mt_softmax_shard_forward",
    {"x gathered y", "RRR rrr cRc", NULL}, {
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, "=x gathered"},
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"gathered", "A2", MT_ARG_F32, MT_ARG_IN | MT_ARG_GATHERED, NULL}}};

/* y is left out with desc.log. */
static const mti_table mti_softmax_shard_sums_table = {"mt_softmax_shard_sums",
    {"y dy sums", "RRR rrr ccP RPP", NULL}, {
    {"sums", "n1", MT_ARG_F32, MT_ARG_OUT, "y dy"},
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MTI_AS_IS, NULL},
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL}}};

static const mti_table mti_softmax_shard_backward_table = {"mt_softmax_shard_backward",
    {"y dy sums dx", "RRRR rrrr ccRc RPPP", NULL}, {
    {"dx", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MTI_AS_IS, "y =dy sums"},
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MTI_AS_IS, NULL},
    {"sums", "n1", MT_ARG_F32, MT_ARG_IN, NULL}}};
/* clang-format on */

static mt_status mti_softmax_whole_forward(mt_context *ctx, const mti_table *table, int log, mt_tensor x, mt_tensor y) {
    mt_tensor *views[] = {&y, &x};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, table, views, NULL));
    MT_TRY(mti_begin(&op));
    mti_softmax_args s = {log, x.cols, x, mt_none(), 0, y, mt_none(), mt_none(), mt_none()};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_softmax_forward(ctx, op.name, &s),
                                mti_cpu_rows(ctx, y.rows, y.cols, mti_cpu_softmax_forward, &s)));
}

MT_API mt_status mt_softmax_forward(mt_context *ctx, mt_tensor x, mt_tensor y) {
    return mti_softmax_whole_forward(ctx, &mti_softmax_forward_table, 0, x, y);
}

MT_API mt_status mt_log_softmax_forward(mt_context *ctx, mt_tensor x, mt_tensor y) {
    return mti_softmax_whole_forward(ctx, &mti_log_softmax_forward_table, 1, x, y);
}

static mt_status mti_softmax_whole_backward(mt_context *ctx, const mti_table *table, int log, mt_tensor y, mt_tensor dy,
                                            mt_tensor dx) {
    mt_tensor *views[] = {&dx, &y, &dy};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, table, views, NULL));
    MT_TRY(mti_begin(&op));
    mti_softmax_args s = {log, y.cols, mt_none(), mt_none(), 0, y, dy, mt_none(), dx};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_softmax_backward(ctx, op.name, &s),
                                mti_cpu_rows(ctx, dx.rows, dx.cols, mti_cpu_softmax_backward, &s)));
}

MT_API mt_status mt_softmax_backward(mt_context *ctx, mt_tensor y, mt_tensor dy, mt_tensor dx) {
    return mti_softmax_whole_backward(ctx, &mti_softmax_backward_table, 0, y, dy, dx);
}

MT_API mt_status mt_log_softmax_backward(mt_context *ctx, mt_tensor y, mt_tensor dy, mt_tensor dx) {
    return mti_softmax_whole_backward(ctx, &mti_log_softmax_backward_table, 1, y, dy, dx);
}

static mt_status mti_expect_softmax(mt_context *ctx, const char *where, const mt_softmax_shard_desc *desc) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!desc) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc is NULL", where);
    MT_TRY(mt_check_size(ctx, where, NULL, "vocab", desc->vocab, 1, INT64_MAX));
    return mt_check_size(ctx, where, NULL, "first_col", desc->first_col, 0, INT64_MAX);
}

/* Begins an operator on a shard. t has the columns of the shard: ranks with columns of their own take other parts of
   the vocabulary. *s gets what the desc says. */
static mt_status mti_softmax_begin(mti_operator *op, const mt_softmax_shard_desc *desc, const char *name, mt_tensor t,
                                   mti_softmax_args *s) {
    mt_place place = {t.rows, t.cols,      INT64_MAX, desc->first_col, t.cols, 1, "part of the vocabulary", 0,
                      0,      desc->vocab, 0};
    MT_TRY(mt_place_check(op->ctx, op->name, "desc", name, t, &place));
    MT_TRY(mti_numbers_agree(op->ctx, op->name, "a number of desc", t, 0, 2, (double)desc->vocab, (double)desc->log));
    memset(s, 0, sizeof *s);
    s->log = desc->log;
    s->real = mt_max(0, mt_min(t.cols, desc->vocab - desc->first_col));
    s->shards = 1;
    return mti_begin(op);
}

MT_API mt_status mt_softmax_shard_stats(mt_context *ctx, const mt_softmax_shard_desc *desc, mt_tensor x,
                                        mt_tensor stats) {
    mt_tensor *views[] = {&stats, &x};
    mti_operator op;
    mti_softmax_args s;
    mti_operands(&op, ctx, &mti_softmax_shard_stats_table, views, NULL);
    MT_TRY(mti_expect_softmax(ctx, op.name, desc));
    MT_TRY(mti_check(&op));
    MT_TRY(mti_softmax_begin(&op, desc, "x", x, &s));
    s.x = x;
    s.stats = stats;
    return mti_end(&op, MTI_RUN(&op, mti_cuda_softmax_stats(ctx, op.name, &s),
                                mti_cpu_rows(ctx, x.rows, x.cols, mti_cpu_softmax_stats, &s)));
}

MT_API mt_status mt_softmax_shard_forward(mt_context *ctx, const mt_softmax_shard_desc *desc, mt_tensor x,
                                          mt_tensor gathered, int shards, mt_tensor y) {
    const int64_t rows = mt_size_mul(shards, y.rows);
    mt_tensor *views[] = {&y, &x, &gathered};
    mti_operator op;
    mti_softmax_args s;
    mti_operands(&op, ctx, &mti_softmax_shard_forward_table, views, &rows);
    MT_TRY(mti_expect_softmax(ctx, op.name, desc));
    MT_TRY(mti_expect_stats_shards(ctx, op.name, shards));
    MT_TRY(mti_check(&op));
    MT_TRY(mti_softmax_begin(&op, desc, "x", x, &s));
    s.x = x;
    s.stats = gathered;
    s.shards = shards;
    s.y = y;
    return mti_end(&op, MTI_RUN(&op, mti_cuda_softmax_forward(ctx, op.name, &s),
                                mti_cpu_rows(ctx, y.rows, y.cols, mti_cpu_softmax_forward, &s)));
}

MT_API mt_status mt_softmax_shard_sums(mt_context *ctx, const mt_softmax_shard_desc *desc, mt_tensor y, mt_tensor dy,
                                       mt_tensor sums) {
    mt_tensor *views[] = {&sums, &dy, &y};
    mti_operator op;
    mti_softmax_args s;
    if (desc && desc->log) y = mt_none();
    mti_operands(&op, ctx, &mti_softmax_shard_sums_table, views, NULL);
    MT_TRY(mti_expect_softmax(ctx, op.name, desc));
    if (desc->log) op.args[2].use |= MT_ARG_OPTIONAL;
    MT_TRY(mti_check(&op));
    MT_TRY(mti_softmax_begin(&op, desc, "dy", dy, &s));
    s.y = y;
    s.dy = dy;
    s.sums = sums;
    return mti_end(&op, MTI_RUN(&op, mti_cuda_softmax_sums(ctx, op.name, &s),
                                mti_cpu_rows(ctx, dy.rows, dy.cols, mti_cpu_softmax_sums, &s)));
}

MT_API mt_status mt_softmax_shard_backward(mt_context *ctx, const mt_softmax_shard_desc *desc, mt_tensor y,
                                           mt_tensor dy, mt_tensor sums, mt_tensor dx) {
    mt_tensor *views[] = {&dx, &y, &dy, &sums};
    mti_operator op;
    mti_softmax_args s;
    mti_operands(&op, ctx, &mti_softmax_shard_backward_table, views, NULL);
    MT_TRY(mti_expect_softmax(ctx, op.name, desc));
    MT_TRY(mti_check(&op));
    MT_TRY(mti_softmax_begin(&op, desc, "y", y, &s));
    s.y = y;
    s.dy = dy;
    s.sums = sums;
    s.dx = dx;
    return mti_end(&op, MTI_RUN(&op, mti_cuda_softmax_backward(ctx, op.name, &s),
                                mti_cpu_rows(ctx, dx.rows, dx.cols, mti_cpu_softmax_backward, &s)));
}
