/* ---- the router of a mixture of experts -------------------------------------------------------------------------- */

#pragma once
#include "router.h"
#include "rows.c"
#include "pointwise.c"
#include "numbers.c"

#define MTI_ROUTER_EXPERTS 4096 /* the most: the scores of a token fit into shared memory */
#define MTI_ROUTER_LEAST 1e-20f /* is added to a sum of scores */
#define MTI_ROUTER_PADDING (-1) /* ids of a token that is padding */
#define MTI_ROUTER_WRONG (-2)   /* and of one with a logit that is not a number */
#define MTI_ROUTER_ROOMS 6      /* rows of scratch memory of a thread */

/* The arguments of the loops and kernels. Each uses those that it has. */
typedef struct mti_router {
    mt_router_desc desc; /* scale, groups and group_best are not 0 */
    mt_tensor logits, bias, weights, sums, dweights, dscores, dlse, dlogits;
    const int32_t *valid;
    int32_t *ids, *counts;
    mt_tensor rooms; /* scratch memory of the threads of a CPU */
} mti_router;

static MT_HOST_DEVICE int mti_router_is_id(int32_t id, int64_t experts) { return id >= 0 && id < experts; }

/* Whether the scores of a token are its logits, where experts are compared. */
static MT_HOST_DEVICE int mti_router_compares_logits(const mti_router *r) {
    return r->desc.score == MT_ROUTER_TOPK_SOFTMAX || (!r->bias.data && r->desc.groups == 1);
}

/* Whether number `at`, which is x, comes behind number `last_at`, which is `last`: the largest comes first, then the
   lowest number. NaN comes behind nothing. */
static MT_HOST_DEVICE int mti_router_is_behind(float x, int64_t at, float last, int64_t last_at) {
    return x < last || (x == last && at > last_at);
}

/* -- on a CPU -- */

/* Returns the next of n numbers behind number `last_at`, which is `last`; -1: there is none. */
static int64_t mti_router_next(const float *x, int64_t n, float last, int64_t last_at) {
    int64_t i, best = -1;
    for (i = 0; i < n; i++)
        if (mti_router_is_behind(x[i], i, last, last_at) && (best < 0 || x[i] > x[best])) best = i;
    return best;
}

/* The sum of the largest `best` of n numbers. */
static float mti_router_group_sum(const float *x, int64_t n, int best) {
    float last = INFINITY, sum = 0.0f;
    int64_t at = -1;
    int i;
    for (i = 0; i < best; i++) {
        at = mti_router_next(x, n, last, at);
        last = x[at];
        sum += last;
    }
    return sum;
}

/* Makes what is compared NaN for the experts of the groups that a token does not take. room [groups] */
static void mti_router_close_groups(const mt_router_desc *s, float *compared, int64_t experts, float *room) {
    const int64_t size = experts / s->groups;
    float last = INFINITY;
    int64_t at = -1, i;
    int g;
    if (s->groups == 1) return;
    for (g = 0; g < s->groups; g++) room[g] = mti_router_group_sum(compared + g * size, size, s->group_best);
    for (g = 0; g < s->group_topk; g++) {
        at = mti_router_next(room, s->groups, last, at);
        last = room[at];
    }
    for (i = 0; i < experts; i++)
        if (mti_router_is_behind(room[i / size], i / size, last, at)) compared[i] = NAN;
}

/* y = softmax(x). Returns log of the sum of e^x. */
static float mti_router_softmax(const float *x, float *y, int64_t n) {
    const float top = mti_row_max(x, n);
    float sum;
    int64_t i;
    for (i = 0; i < n; i++) y[i] = mti_exp(x[i] - top);
    sum = mti_row_sum(y, n);
    mti_row_scale(y, 1.0f / sum, n);
    return top + logf(sum);
}

/* The scores of the experts, before the choice. */
static void mti_router_scores(const mti_router *r, const float *x, float *scores) {
    const int64_t n = r->logits.cols;
    int64_t i;
    if (r->desc.score != MT_ROUTER_SIGMOID) mti_router_softmax(x, scores, n);
    for (i = 0; i < n && r->desc.score == MT_ROUTER_SIGMOID; i++) scores[i] = mti_sigmoid(x[i]);
}

/* Whether n numbers can be compared: none is NaN or infinity, and one is not -infinity. */
static int mti_router_is_right(const float *x, int64_t n) {
    float top = -INFINITY;
    int64_t i;
    for (i = 0; i < n; i++) {
        if (!(x[i] < INFINITY)) return 0;
        top = x[i] > top ? x[i] : top;
    }
    return top > -INFINITY;
}

static void mti_router_fill(const mti_router *r, int64_t token, int32_t id) {
    int j;
    for (j = 0; j < r->desc.topk; j++) {
        r->ids[token * r->desc.topk + j] = id;
        mti_row(r->weights, token)[j] = 0.0f;
    }
}

/* The scores u [topk] of the chosen experts, and the number that each score was multiplied by. */
static float mti_router_chosen(const mti_router *r, const int32_t *ids, const float *x, const float *scores, float *u) {
    const int k = r->desc.topk;
    float sum = 0.0f, factor = 1.0f;
    int j;
    for (j = 0; j < k; j++) u[j] = r->desc.score == MT_ROUTER_TOPK_SOFTMAX ? x[ids[j]] : scores[ids[j]];
    if (r->desc.score == MT_ROUTER_TOPK_SOFTMAX) mti_router_softmax(u, u, k);
    if (!r->desc.normalize) return factor;
    for (j = 0; j < k; j++) sum += u[j];
    factor = 1.0f / (sum + MTI_ROUTER_LEAST);
    mti_row_scale(u, factor, k);
    return factor;
}

/* Chooses the experts of a token. Returns 0 if it cannot. room: MTI_ROUTER_ROOMS rows of scratch memory */
static int mti_router_token(const mti_router *r, int64_t token, mt_tensor room) {
    const int64_t n = r->logits.cols;
    float *x = mti_row(room, 0), *scores = mti_row(room, 1), *compared = mti_row(room, 2);
    float *weights = mti_row(r->weights, token), last = INFINITY, top = -INFINITY;
    int32_t *ids = r->ids + token * r->desc.topk;
    int64_t at = -1;
    int j;
    mti_cpu_load(r->logits, token, 0, n, x);
    mti_router_scores(r, x, scores);
    memcpy(compared, mti_router_compares_logits(r) ? x : scores, (size_t)n * sizeof *x);
    if (r->bias.data) mti_row_add(compared, mti_row(r->bias, 0), compared, n);
    if (!mti_router_is_right(x, n) || !mti_router_is_right(compared, n)) return 0;
    mti_router_close_groups(&r->desc, compared, n, mti_row(room, 3));
    for (j = 0; j < r->desc.topk; j++) {
        at = mti_router_next(compared, n, last, at);
        last = compared[at];
        ids[j] = (int32_t)at;
        top = x[at] > top ? x[at] : top;
    }
    if (r->desc.score == MT_ROUTER_TOPK_SOFTMAX && top == -INFINITY) return 0;
    mti_router_chosen(r, ids, x, scores, weights);
    mti_row_scale(weights, r->desc.scale, r->desc.topk);
    return 1;
}

static mt_tensor mti_router_room(const mti_router *r, int thread) {
    return mt_tensor_rows(r->rooms, (int64_t)thread * MTI_ROUTER_ROOMS, MTI_ROUTER_ROOMS);
}

static void mti_cpu_router_forward(void *data, int thread, int64_t first, int64_t last) {
    const mti_router *r = (const mti_router *)data;
    int64_t i;
    for (i = first; i < last; i++) {
        if (r->valid && !r->valid[i]) mti_router_fill(r, i, MTI_ROUTER_PADDING);
        else if (!mti_router_token(r, i, mti_router_room(r, thread))) mti_router_fill(r, i, MTI_ROUTER_WRONG);
    }
}

/* Whether all ids of a token are experts: it is not padding, for instance. */
static int mti_router_is_used(const mti_router *r, int64_t token) {
    int j = 0;
    while (j < r->desc.topk && mti_router_is_id(r->ids[token * r->desc.topk + j], r->logits.cols)) j++;
    return j == r->desc.topk;
}

/* Replaces du [topk], the gradients of u, by those of the scores before the division by their sum. */
static void mti_router_chosen_back(const mti_router *r, const float *u, float factor, float *du) {
    const int k = r->desc.topk;
    float inner;
    int j;
    if (!r->desc.normalize) return;
    inner = mti_row_dot(du, u, k);
    for (j = 0; j < k; j++) du[j] = factor * (du[j] - inner);
}

/* dx += the gradients of the logits of a softmax y, from dy. */
static void mti_router_softmax_back(const float *y, const float *dy, float *dx, int64_t n) {
    const float inner = mti_row_dot(y, dy, n);
    int64_t i;
    for (i = 0; i < n; i++) dx[i] += y[i] * (dy[i] - inner);
}

/* g [experts] = the gradients of the scores from the auxiliary loss. */
static void mti_router_loss_back(const mti_router *r, const float *scores, float *g) {
    const int64_t n = r->logits.cols;
    const float *d = mti_row(r->dscores, 0);
    float factor, inner;
    int64_t i;
    mti_row_fill(g, 0.0f, n);
    if (!d) return;
    memcpy(g, d, (size_t)n * sizeof *g);
    if (r->desc.score != MT_ROUTER_SIGMOID) return;
    factor = 1.0f / (mti_row_sum(scores, n) + MTI_ROUTER_LEAST);
    inner = mti_row_dot(g, scores, n) * factor;
    for (i = 0; i < n; i++) g[i] = factor * (g[i] - inner);
}

/* dx [experts] = the gradients of the logits of a token. room: as of mti_router_token; its first two rows have the
   logits and scores */
static void mti_router_gradient(const mti_router *r, int64_t token, mt_tensor room, float *dx) {
    const int64_t n = r->logits.cols;
    const int32_t *ids = r->ids + token * r->desc.topk;
    const float *x = mti_row(room, 0), *scores = mti_row(room, 1), *dweights = mti_row(r->dweights, token);
    float *g = mti_row(room, 2), *u = mti_row(room, 3), *du = mti_row(room, 4), factor, lse;
    const int k = r->desc.topk;
    int64_t i;
    int j;
    factor = mti_router_chosen(r, ids, x, scores, u);
    for (j = 0; j < k; j++) du[j] = r->desc.scale * dweights[j];
    mti_router_chosen_back(r, u, factor, du);
    mti_router_loss_back(r, scores, g);
    mti_row_fill(dx, 0.0f, n);
    if (r->desc.score == MT_ROUTER_TOPK_SOFTMAX) {
        const float inner = mti_row_dot(u, du, k) / factor;
        for (j = 0; j < k; j++) dx[ids[j]] = u[j] / factor * (du[j] - inner);
    } else {
        for (j = 0; j < k; j++) g[ids[j]] += du[j];
    }
    if (r->desc.score != MT_ROUTER_SIGMOID) mti_router_softmax_back(scores, g, dx, n);
    for (i = 0; i < n && r->desc.score == MT_ROUTER_SIGMOID; i++) dx[i] = g[i] * (scores[i] * (1.0f - scores[i]));
    if (!r->dlse.data) return;
    lse = mti_router_softmax(x, g, n);
    for (i = 0; i < n; i++) dx[i] += 2.0f * *mti_row(r->dlse, 0) * lse * g[i];
}

static void mti_cpu_router_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_router *r = (const mti_router *)data;
    const int64_t n = r->logits.cols;
    mt_tensor room = mti_router_room(r, thread);
    int64_t i;
    for (i = first; i < last; i++) {
        mt_tensor block = mti_f32_place(r->dlogits, i, 1, 0, n, mti_row(room, 5));
        if (!mti_router_is_used(r, i)) {
            mti_row_fill(mti_row(block, 0), 0.0f, n);
        } else {
            mti_cpu_load(r->logits, i, 0, n, mti_row(room, 0));
            mti_router_scores(r, mti_row(room, 0), mti_row(room, 1));
            mti_router_gradient(r, i, room, mti_row(block, 0));
        }
        mti_f32_write(block, r->dlogits, i, 0);
    }
}

/* Adds the scores and lse^2 of tokens [first, last) to sums [experts + 1], in their order. */
static void mti_router_add_scores(const mti_router *r, int64_t first, int64_t last, mt_tensor room, float *sums) {
    const int64_t n = r->logits.cols;
    float *x = mti_row(room, 0), *scores = mti_row(room, 1), lse;
    int64_t i, e;
    for (i = first; i < last; i++) {
        if (!mti_router_is_used(r, i)) continue;
        mti_cpu_load(r->logits, i, 0, n, x);
        lse = mti_router_softmax(x, scores, n);
        if (r->desc.score == MT_ROUTER_SIGMOID) {
            mti_router_scores(r, x, scores);
            mti_row_scale(scores, 1.0f / (mti_row_sum(scores, n) + MTI_ROUTER_LEAST), n);
        }
        for (e = 0; e < n; e++) sums[e] += scores[e];
        sums[n] += lse * lse;
    }
}

/* A block of tokens whose sums are added up first, so that the sums do not depend on the number of threads. */
#define MTI_ROUTER_BLOCK 32

static int64_t mti_router_blocks(int64_t tokens) { return (tokens + MTI_ROUTER_BLOCK - 1) / MTI_ROUTER_BLOCK; }

/* sums [blocks, experts + 1] = those of each block of tokens */
static void mti_cpu_router_sums(void *data, int thread, int64_t first, int64_t last) {
    const mti_router *r = (const mti_router *)data;
    int64_t b;
    for (b = first; b < last; b++) {
        float *sums = mti_row(r->sums, b);
        mti_row_fill(sums, 0.0f, r->sums.cols);
        mti_router_add_scores(r, b * MTI_ROUTER_BLOCK, mt_min((b + 1) * MTI_ROUTER_BLOCK, r->logits.rows),
                              mti_router_room(r, thread), sums);
    }
}

static void mti_router_count(const mti_router *r) {
    int64_t i;
    int j;
    for (i = 0; i < r->logits.rows; i++)
        for (j = 0; j < r->desc.topk && mti_router_is_used(r, i); j++) r->counts[r->ids[i * r->desc.topk + j]]++;
}

/* The gradients of both losses, and the losses. */
static MT_HOST_DEVICE void mti_router_losses(const int32_t *counts, const float *sums, int64_t experts, int topk,
                                             float aux, float z, float *losses, float *dscores, float *dlse) {
    double tokens = 0.0, scale, loss = 0.0;
    int64_t e;
    for (e = 0; e < experts; e++) tokens += (double)counts[e];
    tokens /= (double)topk;
    scale = tokens > 0.0 ? (double)aux * (double)experts / ((double)topk * tokens * tokens) : 0.0;
    for (e = 0; e < experts; e++) {
        dscores[e] = (float)(scale * (double)counts[e]);
        loss += scale * (double)counts[e] * (double)sums[e];
    }
    *dlse = tokens > 0.0 ? (float)((double)z / tokens) : 0.0f;
    if (!losses) return;
    losses[0] = (float)loss;
    losses[1] = tokens > 0.0 ? (float)((double)z / tokens * (double)sums[experts]) : 0.0f;
}

static void mti_cpu_router_bias(const int32_t *counts, float rate, float *bias, int64_t experts) {
    int64_t e, all = 0;
    for (e = 0; e < experts; e++) all += counts[e];
    for (e = 0; e < experts; e++) {
        const int64_t more = all - counts[e] * experts; /* the sign of mean - counts[e] */
        bias[e] += more > 0 ? rate : more < 0 ? -rate : 0.0f;
    }
}

#include "router.cuh"

/* clang-format off */
static const mti_table mti_router_forward_table = {"mt_router_forward",
    {"logits bias valid weights ids", "RRRRR rRrrr", NULL}, {
    {"weights", "nA", MT_ARG_F32, MT_ARG_OUT, "logits bias"},
    {"logits", "ne", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"bias", "1e", MT_ARG_F32, MT_ARG_IN | MT_ARG_OPTIONAL, NULL},
    {"valid", "n1", MT_ARG_ANY, MT_ARG_IN | MT_ARG_OPTIONAL | MTI_UNSEEN, NULL},
    {"ids", "nA", MT_ARG_ANY, MT_ARG_OUT | MTI_UNSEEN, NULL}}};

static const mti_table mti_router_backward_table = {"mt_router_backward",
    {"logits ids dweights dscores dlse dlogits(logits)", "RRRRRR rrrRRr RRPPPP", NULL}, {
    {"dlogits", "ne", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MTI_AS_IS, "=logits dweights dscores dlse"},
    {"logits", "ne", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"dweights", "nA", MT_ARG_F32, MT_ARG_IN | MT_ARG_GRADIENT, NULL},
    {"dscores", "1e", MT_ARG_F32, MT_ARG_IN | MT_ARG_OPTIONAL, NULL},
    {"dlse", "11", MT_ARG_F32, MT_ARG_IN | MT_ARG_GRADIENT | MT_ARG_OPTIONAL, NULL},
    {"ids", "nA", MT_ARG_ANY, MT_ARG_IN | MTI_UNSEEN, NULL}}};

static const mti_table mti_router_sums_table = {"mt_router_sums",
    {"logits ids counts sums", "RRRR rrPP", NULL}, {
    {"logits", "ne", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"sums", "1B", MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_SUM, "logits"},
    {"ids", "nA", MT_ARG_ANY, MT_ARG_IN | MTI_UNSEEN, NULL},
    {"counts", "1e", MT_ARG_ANY, MT_ARG_IN_OUT | MTI_UNSEEN, NULL}}};

static const mti_table mti_router_losses_table = {"mt_router_losses",
    {"counts sums losses dscores dlse", "RRRRR RPPRR", NULL}, {
    {"dscores", "1e", MT_ARG_F32, MT_ARG_OUT, "sums losses dlse"},
    {"sums", "1B", MT_ARG_F32, MT_ARG_IN, NULL},
    {"dlse", "11", MT_ARG_F32, MT_ARG_OUT | MT_ARG_GRADIENT, "sums losses"},
    {"losses", "12", MT_ARG_F32, MT_ARG_OUT | MT_ARG_OPTIONAL, "sums"},
    {"counts", "1e", MT_ARG_ANY, MT_ARG_IN | MTI_UNSEEN, NULL}}};

static const mti_table mti_router_bias_update_table = {"mt_router_bias_update", {"counts bias", "RR", NULL}, {
    {"bias", "1e", MT_ARG_F32, MT_ARG_IN_OUT, NULL},
    {"counts", "1e", MT_ARG_ANY, MT_ARG_IN | MTI_UNSEEN, NULL}}};
/* clang-format on */

static mt_status mti_expect_router_groups(mt_context *ctx, const char *where, const mt_router_desc *s,
                                          int64_t experts) {
    const int none = s->groups == 0;
    MT_TRY(mt_check_integer(ctx, where, NULL, "desc.groups", s->groups, 0, INT32_MAX));
    MT_TRY(mt_check_integer(ctx, where, NULL, "desc.group_topk", s->group_topk, !none, s->groups));
    if (!none && experts % s->groups)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %lld experts cannot be divided into %d groups", where,
                       (long long)experts, s->groups);
    return mt_check_integer(ctx, where, NULL, "desc.group_best", s->group_best, 0, none ? 0 : experts / s->groups);
}

/* Checks desc, and sets *r to a copy without zeros that mean a default. */
static mt_status mti_expect_router(mt_context *ctx, const char *where, const mt_router_desc *s, int64_t experts,
                                   mti_router *r) {
    int64_t most;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!s) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc is NULL", where);
    memset(r, 0, sizeof *r);
    MT_TRY(mt_check_size(ctx, where, NULL, "the number of experts", experts, 1, MTI_ROUTER_EXPERTS));
    MT_TRY(mt_check_integer(ctx, where, NULL, "desc.topk", s->topk, 1, INT32_MAX));
    MT_TRY(mt_check_enum(ctx, where, NULL, "desc.score", (int)s->score, MT_ROUTER_SCORE_WORDS));
    MT_TRY(mt_check_integer(ctx, where, NULL, "desc.normalize", s->normalize, 0, 1));
    MT_TRY(mt_check_float(ctx, where, NULL, "desc.scale", s->scale, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mti_expect_router_groups(ctx, where, s, experts));
    r->desc = *s;
    if (s->scale == 0.0f) r->desc.scale = 1.0f;
    if (s->groups == 0) r->desc.groups = r->desc.group_topk = 1;
    most = experts / r->desc.groups * r->desc.group_topk;
    if (s->topk > most)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: desc.topk is %d, must be at most %lld, the experts that a token can choose", where, s->topk,
                       (long long)most);
    if (s->group_best == 0)
        r->desc.group_best = (int)mt_max(1, mt_min(s->topk / r->desc.group_topk, experts / r->desc.groups));
    return MT_SUCCESS;
}

static mt_tensor mti_ints(const int32_t *data, int64_t rows, int64_t cols) {
    return data ? mt_tensor_make(data, MT_I32, rows, cols) : mt_none();
}

/* Notes the numbers of desc, which must be the same on all ranks. */
static mt_status mti_router_agrees(const mti_operator *op, const mti_router *r) {
    const mt_router_desc *s = &r->desc;
    return mti_numbers_agree(op->ctx, op->name, "a number of desc", mt_none(), 1, 7, (double)s->topk, (double)s->score,
                             (double)s->normalize, (double)s->scale, (double)s->groups, (double)s->group_topk,
                             (double)s->group_best);
}

/* Returns the first token that could not choose, or -1. */
static int64_t mti_router_wrong(const mti_router *r) {
    int64_t i;
    for (i = 0; i < r->logits.rows; i++)
        if (r->ids[i * r->desc.topk] == MTI_ROUTER_WRONG) return i;
    return -1;
}

static void mti_cpu_router(mt_context *ctx, mti_router *r, mt_range_function loop) {
    mti_cpu_rows(ctx, r->logits.rows, r->logits.cols * (4 + r->desc.topk), loop, r);
}

MT_API mt_status mt_router_forward(mt_context *ctx, const mt_router_desc *desc, mt_tensor logits, mt_tensor bias,
                                   const int32_t *valid, mt_tensor weights, int32_t *ids) {
    const int64_t topk = desc ? desc->topk : 0;
    mt_tensor given = mti_ints(valid, logits.rows, 1), made = mti_ints(ids, logits.rows, topk);
    mt_tensor *views[] = {&weights, &logits, &bias, &given, &made};
    mti_operator op;
    mti_router r;
    int64_t wrong;
    mti_operands(&op, ctx, &mti_router_forward_table, views, &topk);
    MT_TRY(mti_expect_router(ctx, op.name, desc, logits.cols, &r));
    MT_TRY(mti_check(&op));
    MT_TRY(mti_expect_pointer(ctx, op.name, "ids", ids, mt_size_mul(logits.rows, topk)));
    MT_TRY(mti_router_agrees(&op, &r));
    MT_TRY(mti_begin(&op));
    r.logits = logits, r.bias = bias, r.weights = weights;
    r.valid = valid, r.ids = ids;
    MT_TRY(mti_rooms(&op, MTI_ROUTER_ROOMS, logits.cols, &r.rooms));
    MT_TRY(
        mti_end(&op, MTI_RUN(&op, mti_cuda_router_forward(ctx, &r), mti_cpu_router(ctx, &r, mti_cpu_router_forward))));
    wrong = op.on_cpu ? mti_router_wrong(&r) : -1;
    if (wrong < 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DATA,
                   "%s: the logits of token %lld, with the bias, are not numbers that can be compared", op.name,
                   (long long)wrong);
}

MT_API mt_status mt_router_backward(mt_context *ctx, const mt_router_desc *desc, mt_tensor logits, const int32_t *ids,
                                    mt_tensor dweights, mt_tensor dscores, mt_tensor dlse, mt_tensor dlogits) {
    const int64_t topk = desc ? desc->topk : 0;
    mt_tensor chosen = mti_ints(ids, logits.rows, topk);
    mt_tensor *views[] = {&dlogits, &logits, &dweights, &dscores, &dlse, &chosen};
    mti_operator op;
    mti_router r;
    mti_operands(&op, ctx, &mti_router_backward_table, views, &topk);
    MT_TRY(mti_expect_router(ctx, op.name, desc, logits.cols, &r));
    MT_TRY(mti_check(&op));
    MT_TRY(mti_expect_pointer(ctx, op.name, "ids", ids, mt_size_mul(logits.rows, topk)));
    MT_TRY(mti_router_agrees(&op, &r));
    MT_TRY(mti_begin(&op));
    r.logits = logits, r.dweights = dweights, r.dscores = dscores, r.dlse = dlse, r.dlogits = dlogits;
    r.ids = (int32_t *)chosen.data;
    MT_TRY(mti_rooms(&op, MTI_ROUTER_ROOMS, logits.cols, &r.rooms));
    return mti_end(&op,
                   MTI_RUN(&op, mti_cuda_router_backward(ctx, &r), mti_cpu_router(ctx, &r, mti_cpu_router_backward)));
}

/* Adds up the sums of blocks, which are in r->sums. */
static void mti_router_add_blocks(const mti_router *r, mt_tensor sums) {
    int64_t b;
    for (b = 0; b < r->sums.rows; b++) mti_row_add(mti_row(sums, 0), mti_row(r->sums, b), mti_row(sums, 0), sums.cols);
}

static void mti_cpu_router_all_sums(mt_context *ctx, mti_router *r, mt_tensor sums) {
    const int64_t cost = MTI_ROUTER_BLOCK * r->logits.cols;
    mti_cpu_rows(ctx, r->sums.rows, cost, mti_cpu_router_sums, r);
    mti_router_add_blocks(r, sums);
    mti_router_count(r);
}

MT_API mt_status mt_router_sums(mt_context *ctx, const mt_router_desc *desc, mt_tensor logits, const int32_t *ids,
                                int32_t *counts, mt_tensor sums) {
    const int64_t sizes[2] = {desc ? desc->topk : 0, mt_min(logits.cols, INT32_MAX) + 1};
    mt_tensor chosen = mti_ints(ids, logits.rows, sizes[0]), counted = mti_ints(counts, 1, logits.cols);
    mt_tensor *views[] = {&logits, &sums, &chosen, &counted};
    mti_operator op;
    mti_router r;
    mti_operands(&op, ctx, &mti_router_sums_table, views, sizes);
    MT_TRY(mti_expect_router(ctx, op.name, desc, logits.cols, &r));
    MT_TRY(mti_check(&op));
    MT_TRY(mti_expect_pointer(ctx, op.name, "ids", ids, mt_size_mul(logits.rows, sizes[0])));
    MT_TRY(mti_expect_pointer(ctx, op.name, "counts", counts, logits.cols));
    MT_TRY(mti_router_agrees(&op, &r));
    MT_TRY(mti_begin(&op));
    r.logits = logits, r.ids = (int32_t *)chosen.data, r.counts = counts;
    MT_TRY(mti_rooms(&op, MTI_ROUTER_ROOMS, logits.cols, &r.rooms));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, mti_router_blocks(logits.rows), sums.cols, &r.sums));
    return mti_end(&op, MTI_RUN(&op, mti_cuda_router_sums(ctx, &r, sums), mti_cpu_router_all_sums(ctx, &r, sums)));
}

MT_API mt_status mt_router_losses(mt_context *ctx, int topk, float aux, float z, const int32_t *counts, mt_tensor sums,
                                  mt_tensor losses, mt_tensor dscores, mt_tensor dlse) {
    const int64_t sizes[2] = {0, mt_min(dscores.cols, INT32_MAX) + 1};
    mt_tensor counted = mti_ints(counts, 1, dscores.cols);
    mt_tensor *views[] = {&dscores, &sums, &dlse, &losses, &counted};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_router_losses_table, views, sizes));
    MT_TRY(mti_expect_pointer(ctx, op.name, "counts", counts, dscores.cols));
    MT_TRY(mt_check_integer(ctx, op.name, NULL, "topk", topk, 1, INT32_MAX));
    MT_TRY(mt_check_float(ctx, op.name, NULL, "aux", aux, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mt_check_float(ctx, op.name, NULL, "z", z, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mti_numbers_agree(ctx, op.name, "topk, aux or z", mt_none(), 1, 3, (double)topk, (double)aux, (double)z));
    MT_TRY(mti_begin(&op));
    return mti_end(&op, MTI_RUN(&op, mti_cuda_router_losses(ctx, topk, aux, z, counts, sums, losses, dscores, dlse),
                                mti_router_losses(counts, mti_row(sums, 0), dscores.cols, topk, aux, z,
                                                  mti_row(losses, 0), mti_row(dscores, 0), mti_row(dlse, 0))));
}

MT_API mt_status mt_router_bias_update(mt_context *ctx, float rate, const int32_t *counts, mt_tensor bias) {
    mt_tensor counted = mti_ints(counts, 1, bias.cols);
    mt_tensor *views[] = {&bias, &counted};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_router_bias_update_table, views, NULL));
    MT_TRY(mti_expect_pointer(ctx, op.name, "counts", counts, bias.cols));
    MT_TRY(mti_expect_finite(ctx, op.name, "rate", rate));
    MT_TRY(mti_numbers_agree(ctx, op.name, "rate", mt_none(), 1, 1, (double)rate));
    MT_TRY(mti_begin(&op));
    return mti_end(&op, MTI_RUN(&op, mti_cuda_router_bias(ctx, rate, counts, bias),
                                mti_cpu_router_bias(counts, rate, mti_row(bias, 0), bias.cols)));
}
