/* test_router.c - the router of a mixture of experts, against definitions in double precision.

   Choice, weights and gradients for every kind of score, with and without normalisation, bias, groups and padding;
   gradients also against finite differences of the definition; sums and losses that do not depend on how ranks share
   the tokens out; ties; and what is refused. test_cuda_router.cu runs the same on a GPU. */

#define MEGATRON_IMPLEMENTATION
#include "mt_kernels.cuh"
#include "mt_test.h"

#if defined(ROUTER_ON_GPU)
#define DEVICE MT_DEVICE_CUDA
#else
#define DEVICE MT_DEVICE_CPU
#endif

enum { TOKENS = 70, EXPERTS = 160, CHOICES = 160 };

static mt_context *ctx;
#define OK(call) ASSERT_STATUS(ctx, MT_SUCCESS, call)

static int open_context(void **state) {
    mt_context_desc where;
    (void)state;
    memset(&where, 0, sizeof where);
    where.device = DEVICE;
    where.arena_bytes = (size_t)64 << 20;
    OK(mt_context_create(NULL, &where, &ctx));
    return 0;
}

static int close_context(void **state) {
    (void)state;
    mt_context_destroy(ctx);
    return 0;
}

/* The difference may be the tolerance, times the value if this is larger than 1. */
#define assert_close(got, want, tolerance)                                                                             \
    do {                                                                                                               \
        const double g = (double)(got), w = (double)(want);                                                            \
        if (!(fabs(g - w) <= (tolerance)*fmax(1.0, fabs(w)))) fail_msg("%s is %.9g, must be %.9g", #got, g, w);        \
    } while (0)

/* ---- a router: its call, and its definition ---------------------------------------------------------------------- */

typedef struct router {
    mt_router_desc desc;
    int64_t tokens, experts;
    int has_bias, has_valid, has_losses, in_place;
    mt_dtype dtype;
    /* on the host */
    float logits[TOKENS * EXPERTS], bias[EXPERTS], dweights[TOKENS * CHOICES], dscores[EXPERTS], dlse;
    int32_t valid[TOKENS], ids[TOKENS * CHOICES];
    float weights[TOKENS * CHOICES], dlogits[TOKENS * EXPERTS];
} router;

static router now; /* too large for the stack */

/* A router of these numbers of tokens and experts, without anything special. */
static void begin(int64_t tokens, int64_t experts, int topk, mt_router_score score) {
    memset(&now, 0, sizeof now);
    now.tokens = tokens, now.experts = experts;
    now.desc.topk = topk;
    now.desc.score = score;
}

static mt_tensor on_device(mt_dtype dtype, int64_t rows, int64_t cols, const void *values) {
    mt_tensor t;
    OK(mt_arena_tensor(ctx, dtype, rows, cols, &t));
    if (values && rows * cols > 0) OK(mt_upload(ctx, values, t));
    return t;
}

/* Values of any float type, from floats, which become what the type can hold. */
static mt_tensor rounded(mt_dtype dtype, int64_t rows, int64_t cols, float *values) {
    static uint16_t narrow[TOKENS * EXPERTS];
    if (dtype == MT_F32) return on_device(dtype, rows, cols, values);
    mt_f32_to_16bit(dtype, values, narrow, rows * cols);
    mt_f32_from_16bit(dtype, narrow, values, rows * cols);
    return on_device(dtype, rows, cols, narrow);
}

static void read_back(mt_tensor t, float *out) {
    static uint16_t narrow[TOKENS * EXPERTS];
    if (t.rows * t.cols == 0) return;
    if (t.dtype == MT_F32) {
        OK(mt_download(ctx, t, out));
        return;
    }
    OK(mt_download(ctx, t, narrow));
    mt_f32_from_16bit(t.dtype, narrow, out, t.rows * t.cols);
}

/* Runs forward and backward of `now`. */
static mt_status run_router(router *r) {
    const size_t mark = mt_arena_mark(ctx);
    const int k = r->desc.topk;
    mt_tensor logits = rounded(r->dtype, r->tokens, r->experts, r->logits);
    mt_tensor dlogits = rounded(r->dtype, r->tokens, r->experts, r->dlogits);
    mt_tensor bias = r->has_bias ? on_device(MT_F32, 1, r->experts, r->bias) : mt_none();
    mt_tensor weights = on_device(MT_F32, r->tokens, k, NULL), ids = on_device(MT_I32, r->tokens, k, NULL);
    mt_tensor dweights = on_device(MT_F32, r->tokens, k, r->dweights);
    mt_tensor dscores = r->has_losses ? on_device(MT_F32, 1, r->experts, r->dscores) : mt_none();
    mt_tensor dlse = r->has_losses ? on_device(MT_F32, 1, 1, &r->dlse) : mt_none();
    mt_tensor valid = on_device(MT_I32, 1, r->tokens, r->valid);
    const int32_t *given = r->has_valid ? (const int32_t *)valid.data : NULL;
    mt_status status = mt_router_forward(ctx, &r->desc, logits, bias, given, weights, (int32_t *)ids.data);
    if (status == MT_SUCCESS) {
        if (r->in_place) dlogits = logits;
        OK(mt_router_backward(ctx, &r->desc, logits, (const int32_t *)ids.data, dweights, dscores, dlse, dlogits));
        read_back(weights, r->weights);
        read_back(dlogits, r->dlogits);
        if (r->tokens > 0) OK(mt_download(ctx, ids, r->ids));
    }
    mt_arena_release(ctx, mark);
    return status;
}

/* The score of each expert of a token, as it is compared. */
static void define_compared(const router *r, const double *x, double *compared) {
    double sum = 0.0;
    for (int64_t e = 0; e < r->experts; e++) sum += exp(x[e]);
    for (int64_t e = 0; e < r->experts; e++) {
        compared[e] = r->desc.score == MT_ROUTER_TOPK_SOFTMAX ? x[e]
                      : r->desc.score == MT_ROUTER_SIGMOID    ? 1.0 / (1.0 + exp(-x[e]))
                                                              : exp(x[e]) / sum;
        if (r->has_bias) compared[e] += (double)r->bias[e];
    }
}

/* Takes the number of the largest x that is not taken; the lowest of equal ones. */
static int64_t take_largest(const double *x, int64_t n, char *taken) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
    taken[best] = 1;
    return best;
}

static void define_groups(const router *r, const double *compared, char *taken) {
    const int64_t groups = r->desc.groups, size = groups ? r->experts / groups : 0;
    const int best = r->desc.group_best ? r->desc.group_best : (int)(r->desc.topk / mt_max(1, r->desc.group_topk));
    double sums[EXPERTS] = {0};
    char used[EXPERTS] = {0}, open[EXPERTS] = {0};
    memset(taken, 0, EXPERTS);
    if (groups == 0) return;
    for (int64_t g = 0; g < groups; g++)
        for (int i = 0; i < mt_max(best, 1); i++)
            sums[g] += compared[g * size + take_largest(compared + g * size, size, used + g * size)];
    for (int i = 0; i < r->desc.group_topk; i++) take_largest(sums, groups, open);
    for (int64_t e = 0; e < r->experts; e++) taken[e] = !open[e / size];
}

static void define_choice(const router *r, const double *x, int32_t *ids) {
    double compared[EXPERTS];
    char taken[EXPERTS];
    define_compared(r, x, compared);
    define_groups(r, compared, taken);
    for (int j = 0; j < r->desc.topk; j++) ids[j] = (int32_t)take_largest(compared, r->experts, taken);
}

/* The weights of chosen experts. */
static void define_weights(const router *r, const double *x, const int32_t *ids, double *weights) {
    const double scale = r->desc.scale == 0.0f ? 1.0 : (double)r->desc.scale;
    double all = 0.0, chosen = 0.0, sum = 0.0;
    for (int64_t e = 0; e < r->experts; e++) all += exp(x[e]);
    for (int j = 0; j < r->desc.topk; j++) chosen += exp(x[ids[j]]);
    for (int j = 0; j < r->desc.topk; j++) {
        weights[j] = r->desc.score == MT_ROUTER_SIGMOID        ? 1.0 / (1.0 + exp(-x[ids[j]]))
                     : r->desc.score == MT_ROUTER_TOPK_SOFTMAX ? exp(x[ids[j]]) / chosen
                                                               : exp(x[ids[j]]) / all;
        sum += weights[j];
    }
    for (int j = 0; j < r->desc.topk; j++) weights[j] *= scale / (r->desc.normalize ? sum + 1e-20 : 1.0);
}

/* The scores that the auxiliary loss adds up. Returns the log of the sum of e^x. */
static double define_scores(const router *r, const double *x, double *scores) {
    double all = 0.0, sum = 0.0;
    for (int64_t e = 0; e < r->experts; e++) all += exp(x[e]);
    for (int64_t e = 0; e < r->experts; e++) {
        scores[e] = r->desc.score == MT_ROUTER_SIGMOID ? 1.0 / (1.0 + exp(-x[e])) : exp(x[e]) / all;
        sum += scores[e];
    }
    for (int64_t e = 0; e < r->experts && r->desc.score == MT_ROUTER_SIGMOID; e++) scores[e] /= sum + 1e-20;
    return log(all);
}

/* The number whose gradient backward computes: sums of weights, of scores and of lse^2, each times its gradient. */
static double define_total(const router *r, const double *x, int64_t token) {
    double weights[CHOICES], scores[EXPERTS], total = 0.0, lse;
    define_weights(r, x, r->ids + token * r->desc.topk, weights);
    for (int j = 0; j < r->desc.topk; j++) total += weights[j] * (double)r->dweights[token * r->desc.topk + j];
    if (!r->has_losses) return total;
    lse = define_scores(r, x, scores);
    for (int64_t e = 0; e < r->experts; e++) total += scores[e] * (double)r->dscores[e];
    return total + (double)r->dlse * lse * lse;
}

static void row_of(const router *r, int64_t token, double *x) {
    for (int64_t e = 0; e < r->experts; e++) x[e] = (double)r->logits[token * r->experts + e];
}

static void check_token(const router *r, int64_t token) {
    const double rounding = r->dtype == MT_F32 ? 0.0 : r->dtype == MT_BF16 ? 1.0 / 256 : 1.0 / 2048;
    double x[EXPERTS] = {0}, weights[CHOICES];
    int32_t ids[CHOICES];
    row_of(r, token, x);
    define_choice(r, x, ids);
    define_weights(r, x, ids, weights);
    for (int j = 0; j < r->desc.topk; j++) {
        assert_int_equal(r->ids[token * r->desc.topk + j], ids[j]);
        assert_close(r->weights[token * r->desc.topk + j], weights[j], 2e-6);
    }
    for (int64_t e = 0; e < r->experts; e++) {
        const double at = x[e], step = 1e-4;
        double slope;
        x[e] = at + step;
        slope = define_total(r, x, token);
        x[e] = at - step;
        slope = (slope - define_total(r, x, token)) / (2.0 * step);
        x[e] = at;
        assert_close(r->dlogits[token * r->experts + e], slope, 4e-6 + rounding * (fabs(slope) + 1e-4));
    }
}

static void check_padding(const router *r, int64_t token) {
    for (int j = 0; j < r->desc.topk; j++) {
        assert_int_equal(r->ids[token * r->desc.topk + j], -1);
        assert_true(r->weights[token * r->desc.topk + j] == 0.0f);
    }
    for (int64_t e = 0; e < r->experts; e++) assert_true(r->dlogits[token * r->experts + e] == 0.0f);
}

static void fill(router *r, uint64_t seed) {
    uint64_t random = seed;
    for (int64_t i = 0; i < r->tokens * r->experts; i++) r->logits[i] = 3.0f * test_float(&random);
    for (int64_t e = 0; e < r->experts; e++) r->bias[e] = test_float(&random), r->dscores[e] = test_float(&random);
    for (int64_t i = 0; i < r->tokens * r->desc.topk; i++) r->dweights[i] = test_float(&random);
    for (int64_t t = 0; t < r->tokens; t++) r->valid[t] = t % 5 != 3;
    for (int64_t i = 0; i < r->tokens * r->experts; i++) r->dlogits[i] = 77.0f;
    r->dlse = 0.02f;
}

static void check_router(router *r) {
    fill(r, (uint64_t)(r->experts * 31 + r->desc.topk));
    OK(run_router(r));
    for (int64_t t = 0; t < r->tokens; t++) {
        if (r->has_valid && !r->valid[t]) check_padding(r, t);
        else check_token(r, t);
    }
}

/* What the ranks of a group add up: the sums of tokens [first, last). */
typedef struct totals {
    int32_t counts[EXPERTS];
    float sums[EXPERTS + 1], losses[2], dscores[EXPERTS], dlse;
} totals;

static void add_tokens(router *r, int64_t first, int64_t last, totals *t) {
    const size_t mark = mt_arena_mark(ctx);
    const int k = r->desc.topk;
    mt_tensor logits = on_device(MT_F32, last - first, r->experts, r->logits + first * r->experts);
    mt_tensor ids = on_device(MT_I32, last - first, k, r->ids + first * k);
    mt_tensor counts = on_device(MT_I32, 1, r->experts, t->counts);
    mt_tensor sums = on_device(MT_F32, 1, r->experts + 1, t->sums);
    OK(mt_router_sums(ctx, &r->desc, logits, (const int32_t *)ids.data, (int32_t *)counts.data, sums));
    OK(mt_download(ctx, counts, t->counts));
    OK(mt_download(ctx, sums, t->sums));
    mt_arena_release(ctx, mark);
}

static void expect(mt_status status, mt_status got, const char *words) {
    assert_int_equal(got, status);
    if (!strstr(mt_last_error(ctx), words)) fail_msg("\"%s\" is not in \"%s\"", words, mt_last_error(ctx));
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

static const struct shape {
    int64_t tokens, experts;
    int topk, groups, group_topk, group_best;
} shapes[] = {{1, 1, 1, 0, 0, 0},   {5, 4, 2, 0, 0, 0},  {3, 7, 7, 0, 0, 0},  {9, 40, 3, 0, 0, 0},
              {40, 64, 8, 0, 0, 0}, {6, 33, 1, 0, 0, 0}, {7, 16, 4, 4, 2, 0}, {5, 160, 6, 8, 3, 0},
              {4, 64, 40, 2, 2, 1}, {8, 12, 2, 6, 2, 2}};

static void test_values(void **state) {
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int how = 0; how < 48; how++) {
            const struct shape *p = &shapes[s];
            begin(p->tokens, p->experts, p->topk, (mt_router_score)(how % 3));
            now.desc.normalize = how / 3 % 2, now.desc.scale = how / 6 % 2 ? 2.5f : 0.0f;
            now.desc.groups = p->groups, now.desc.group_topk = p->group_topk, now.desc.group_best = p->group_best;
            now.has_bias = how / 12 % 2, now.has_valid = how / 24, now.has_losses = how / 3 % 2 != how / 24;
            now.in_place = how % 7 == 2;
            now.dtype = how % 5 == 3 ? MT_BF16 : how % 5 == 4 ? MT_F16 : MT_F32;
            check_router(&now);
        }
}

/* Equal logits: the lowest numbers are chosen, also of groups, and in 16 bits. Scores that round to the same are equal,
   too: those of 20 and 30 behind a sigmoid. */
static void test_ties(void **state) {
    (void)state;
    for (int how = 0; how < 12; how++) {
        double compared[EXPERTS];
        int32_t ids[CHOICES];
        begin(6, 96, 3, MT_ROUTER_SIGMOID);
        now.dtype = how / 4 == 1 ? MT_BF16 : MT_F32;
        now.has_bias = how & 1;
        now.desc.groups = how & 2 ? 8 : 0, now.desc.group_topk = how & 2 ? 2 : 0;
        for (int i = 0; i < 6 * 96; i++) now.logits[i] = (float)(how / 4 == 2 ? 20 + 10 * (i % 2) : i * 7 % 3);
        OK(run_router(&now));
        for (int64_t t = 0; t < now.tokens; t++) {
            for (int64_t e = 0; e < 96; e++) {
                compared[e] = (double)now.logits[t * 96 + e];
                if (how / 4 == 2 && (how & 3)) compared[e] = 1.0;
            }
            now.desc.score = MT_ROUTER_TOPK_SOFTMAX; /* compares these */
            define_choice(&now, compared, ids);
            now.desc.score = MT_ROUTER_SIGMOID;
            for (int j = 0; j < 3; j++) assert_int_equal(now.ids[3 * t + j], ids[j]);
        }
    }
}

/* Logits that are far apart: scores of 0 and 1, and no number that is not finite. */
static void test_large_logits(void **state) {
    (void)state;
    for (int how = 0; how < 12; how++) {
        begin(5, 24, 3, (mt_router_score)(how % 3));
        now.desc.normalize = how / 3 % 2;
        now.has_bias = now.has_losses = how / 6;
        fill(&now, 8);
        for (int i = 0; i < 5 * 24; i++) now.logits[i] *= i < 48 ? 30.0f : 3000.0f;
        OK(run_router(&now));
        for (int i = 0; i < 5 * 3; i++) assert_true(now.weights[i] >= 0.0f && now.weights[i] <= 1.0f);
        for (int i = 0; i < 5 * 24; i++) assert_true(fabsf(now.dlogits[i]) < 1e9f);
    }
}

/* A logit of -infinity is an expert that is chosen last, and has the weight 0. */
static void test_closed_experts(void **state) {
    (void)state;
    for (int how = 0; how < 12; how++) {
        begin(1, 4, 3, (mt_router_score)(how % 3));
        now.desc.normalize = how / 3 % 2;
        now.has_bias = now.has_losses = how / 6;
        fill(&now, 6);
        for (int e = 0; e < 4; e++) now.bias[e] = 0.0f;
        now.logits[0] = -INFINITY, now.logits[1] = 1.0f, now.logits[2] = -INFINITY, now.logits[3] = 2.0f;
        OK(run_router(&now));
        assert_int_equal(now.ids[0], 3);
        assert_int_equal(now.ids[1], 1);
        assert_int_equal(now.ids[2], 0);
        assert_true(now.weights[2] == 0.0f && now.weights[1] > 0.0f);
        for (int e = 0; e < 4; e++) assert_true(fabsf(now.dlogits[e]) < 10.0f);
    }
}

/* Backward reads nothing for ids that are no experts, and their tokens have the gradient 0. */
static void test_wrong_ids(void **state) {
    static const int32_t wrong[] = {-1, -2, 6, INT32_MAX, INT32_MIN};
    static totals sums;
    (void)state;
    for (int how = 0; how < 15; how++) {
        const size_t mark = mt_arena_mark(ctx);
        mt_tensor logits, ids, dweights, dlogits;
        begin(4, 6, 2, (mt_router_score)(how % 3));
        fill(&now, 2);
        for (int i = 0; i < 8; i++) now.ids[i] = i % 2;
        now.ids[3] = wrong[how / 3];
        logits = on_device(MT_F32, 4, 6, now.logits), ids = on_device(MT_I32, 4, 2, now.ids);
        dweights = on_device(MT_F32, 4, 2, now.dweights), dlogits = on_device(MT_F32, 4, 6, NULL);
        OK(mt_router_backward(ctx, &now.desc, logits, (const int32_t *)ids.data, dweights, mt_none(), mt_none(),
                              dlogits));
        OK(mt_download(ctx, dlogits, now.dlogits));
        for (int e = 0; e < 6; e++) assert_true(now.dlogits[6 + e] == 0.0f);
        assert_true(now.dlogits[0] != 0.0f);
        memset(&sums, 0, sizeof sums);
        add_tokens(&now, 0, 4, &sums);
        assert_int_equal(sums.counts[0], 3);
        assert_int_equal(sums.counts[1], 3);
        mt_arena_release(ctx, mark);
    }
}

/* As many experts as there may be, and one more. */
static void test_many_experts(void **state) {
    static float logits[4097], dweights[2] = {1.0f, -1.0f}, dlogits[4096], sum = 0.0f;
    const mt_router_desc desc = {2, MT_ROUTER_SIGMOID, 1, 0.0f, 4096, 2, 0};
    const size_t mark = mt_arena_mark(ctx);
    int32_t ids[2];
    mt_tensor x, weights = on_device(MT_F32, 1, 2, NULL), chosen = on_device(MT_I32, 1, 2, NULL), dx;
    (void)state;
    logits[4095] = 2.0f, logits[17] = 1.0f;
    x = on_device(MT_F32, 1, 4096, logits), dx = on_device(MT_F32, 1, 4096, NULL);
    OK(mt_router_forward(ctx, &desc, x, mt_none(), NULL, weights, (int32_t *)chosen.data));
    OK(mt_router_backward(ctx, &desc, x, (const int32_t *)chosen.data, on_device(MT_F32, 1, 2, dweights), mt_none(),
                          mt_none(), dx));
    OK(mt_download(ctx, chosen, ids));
    OK(mt_download(ctx, dx, dlogits));
    assert_int_equal(ids[0], 4095);
    assert_int_equal(ids[1], 17);
    for (int e = 0; e < 4096; e++) sum += fabsf(dlogits[e]);
    assert_true(sum > 0.0f && sum == fabsf(dlogits[17]) + fabsf(dlogits[4095]));
    x = on_device(MT_F32, 1, 4097, logits);
    expect(MT_ERR_SHAPE, mt_router_forward(ctx, &desc, x, mt_none(), NULL, weights, (int32_t *)chosen.data),
           "the number of experts is 4097, must be from 1 to 4096");
    mt_arena_release(ctx, mark);
}

static void test_no_tokens(void **state) {
    (void)state;
    begin(0, 4, 2, MT_ROUTER_SOFTMAX);
    OK(run_router(&now));
}

/* ---- sums and losses --------------------------------------------------------------------------------------------- */

static void compute_losses(const router *r, float aux, float z, totals *t) {
    const size_t mark = mt_arena_mark(ctx);
    mt_tensor counts = on_device(MT_I32, 1, r->experts, t->counts);
    mt_tensor sums = on_device(MT_F32, 1, r->experts + 1, t->sums), losses = on_device(MT_F32, 1, 2, NULL);
    mt_tensor dscores = on_device(MT_F32, 1, r->experts, NULL), dlse = on_device(MT_F32, 1, 1, NULL);
    OK(mt_router_losses(ctx, r->desc.topk, aux, z, (const int32_t *)counts.data, sums, losses, dscores, dlse));
    OK(mt_download(ctx, losses, t->losses));
    OK(mt_download(ctx, dscores, t->dscores));
    OK(mt_download(ctx, dlse, &t->dlse));
    mt_arena_release(ctx, mark);
}

/* Against the definition, for each kind of score; and the same losses, and bits of gradients, when two ranks have parts
   of the tokens. Padding counts in nothing: its logits are NaN. */
static void test_losses(void **state) {
    (void)state;
    for (int how = 0; how < 6; how++) {
        static totals whole, parts;
        double scores[EXPERTS], x[EXPERTS] = {0}, sums[EXPERTS + 1] = {0}, tokens = 0.0, loss = 0.0;
        memset(&whole, 0, sizeof whole), memset(&parts, 0, sizeof parts);
        begin(TOKENS, 20, 3, (mt_router_score)(how % 3));
        now.has_valid = how / 3;
        fill(&now, 5);
        OK(run_router(&now));
        for (int64_t t = 0; t < TOKENS; t++) {
            const double lse = (row_of(&now, t, x), define_scores(&now, x, scores));
            if (now.has_valid && !now.valid[t]) {
                for (int64_t e = 0; e < 20; e++) now.logits[t * 20 + e] = NAN;
                continue;
            }
            for (int64_t e = 0; e < 20; e++) sums[e] += scores[e];
            sums[20] += lse * lse, tokens += 1.0;
        }
        add_tokens(&now, 0, TOKENS, &whole);
        add_tokens(&now, 0, 13, &parts), add_tokens(&now, 13, TOKENS, &parts);
        compute_losses(&now, 0.01f, 0.001f, &whole), compute_losses(&now, 0.01f, 0.001f, &parts);
        for (int64_t e = 0; e < 20; e++) {
            int32_t count = 0;
            for (int64_t i = 0; i < TOKENS * 3; i++) count += now.ids[i] == e;
            assert_int_equal(whole.counts[e], count);
            assert_close(whole.sums[e], sums[e], 1e-5);
            loss += 0.01 * 20 / (3.0 * tokens * tokens) * count * sums[e];
            assert_close(whole.dscores[e], 0.01 * 20 / (3.0 * tokens * tokens) * count, 1e-9);
        }
        assert_close(whole.losses[0], loss, 1e-7);
        assert_close(whole.losses[1], 0.001 * sums[20] / tokens, 1e-7);
        assert_close(whole.dlse, 0.001 / tokens, 1e-10);
        assert_memory_equal(whole.counts, parts.counts, sizeof whole.counts);
        assert_memory_equal(whole.dscores, parts.dscores, sizeof whole.dscores);
        assert_close(parts.losses[0], whole.losses[0], 1e-8);
    }
}

/* Counts are integers: one more token than a float can count is one more token. */
static void test_large_counts(void **state) {
    totals t;
    (void)state;
    memset(&t, 0, sizeof t);
    begin(1, 2, 1, MT_ROUTER_SOFTMAX);
    now.logits[0] = 1.0f;
    t.counts[0] = 1 << 24;
    add_tokens(&now, 0, 1, &t);
    assert_int_equal(t.counts[0], (1 << 24) + 1);
    t.counts[1] = (1 << 24) + 3, t.sums[0] = t.sums[1] = 1.0f;
    compute_losses(&now, 1.0f, 0.0f, &t);
    assert_true(t.dscores[1] >= t.dscores[0]);
    assert_close(t.losses[0], 2.0 / (33554436.0 * 33554436.0) * 33554436.0, 1e-12);
}

/* Without a token there is no loss. */
static void test_losses_of_nothing(void **state) {
    totals t;
    (void)state;
    memset(&t, 0, sizeof t);
    begin(0, 3, 1, MT_ROUTER_SOFTMAX);
    compute_losses(&now, 1.0f, 1.0f, &t);
    assert_true(t.losses[0] == 0.0f && t.losses[1] == 0.0f && t.dscores[2] == 0.0f && t.dlse == 0.0f);
}

/* The bias moves towards experts with fewer tokens than the mean, and stays where an expert has exactly the mean. */
static void test_bias_update(void **state) {
    const int32_t counts[] = {5, 3, 4, 4, 2000000000, 0};
    const float before[] = {0.5f, 0.5f, -1.0f, 0.0f};
    const size_t mark = mt_arena_mark(ctx);
    mt_tensor c = on_device(MT_I32, 1, 6, counts), bias = on_device(MT_F32, 1, 4, before);
    float after[4];
    (void)state;
    OK(mt_router_bias_update(ctx, 0.125f, (const int32_t *)c.data, bias));
    OK(mt_download(ctx, bias, after));
    assert_true(after[0] == 0.375f && after[1] == 0.625f && after[2] == -1.0f && after[3] == 0.0f);
    bias = on_device(MT_F32, 1, 2, before);
    OK(mt_router_bias_update(ctx, 0.125f, (const int32_t *)c.data + 4, bias));
    OK(mt_download(ctx, bias, after));
    assert_true(after[0] == 0.375f && after[1] == 0.625f);
    mt_arena_release(ctx, mark);
}

/* ---- what is refused --------------------------------------------------------------------------------------------- */

static void test_bad_descs(void **state) {
    static const struct {
        mt_router_desc desc;
        mt_status status;
        const char *words;
    } bad[] = {
        {{0, MT_ROUTER_SOFTMAX, 0, 0.0f, 0, 0, 0}, MT_ERR_ARGUMENT, "desc.topk is 0, must be"},
        {{9, MT_ROUTER_SOFTMAX, 0, 0.0f, 0, 0, 0}, MT_ERR_SHAPE, "desc.topk is 9, must be at most 8"},
        {{1, (mt_router_score)3, 0, 0.0f, 0, 0, 0}, MT_ERR_ARGUMENT, "desc.score is 3"},
        {{1, MT_ROUTER_SOFTMAX, 2, 0.0f, 0, 0, 0}, MT_ERR_ARGUMENT, "desc.normalize is 2"},
        {{1, MT_ROUTER_SOFTMAX, 0, -1.0f, 0, 0, 0}, MT_ERR_ARGUMENT, "desc.scale is -1"},
        {{1, MT_ROUTER_SOFTMAX, 0, 0.0f, 3, 1, 0}, MT_ERR_SHAPE, "8 experts cannot be divided into 3 groups"},
        {{1, MT_ROUTER_SOFTMAX, 0, 0.0f, 4, 0, 0}, MT_ERR_ARGUMENT, "desc.group_topk is 0, must be from 1 to 4"},
        {{1, MT_ROUTER_SOFTMAX, 0, 0.0f, 4, 5, 0}, MT_ERR_ARGUMENT, "desc.group_topk is 5"},
        {{1, MT_ROUTER_SOFTMAX, 0, 0.0f, 0, 1, 0}, MT_ERR_ARGUMENT, "desc.group_topk is 1"},
        {{1, MT_ROUTER_SOFTMAX, 0, 0.0f, 4, 1, 3}, MT_ERR_ARGUMENT, "desc.group_best is 3"},
        {{5, MT_ROUTER_SOFTMAX, 0, 0.0f, 4, 2, 0}, MT_ERR_SHAPE, "desc.topk is 5, must be at most 4"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        begin(2, 8, 1, MT_ROUTER_SOFTMAX);
        now.desc = bad[i].desc;
        expect(bad[i].status, run_router(&now), bad[i].words);
    }
}

/* A token whose logits, with the bias, cannot be compared. */
static void expect_wrong(int64_t token) {
    const size_t mark = mt_arena_mark(ctx);
    const int k = now.desc.topk;
    mt_tensor logits = on_device(MT_F32, now.tokens, now.experts, now.logits);
    mt_tensor bias = now.has_bias ? on_device(MT_F32, 1, now.experts, now.bias) : mt_none();
    mt_tensor ids = on_device(MT_I32, now.tokens, k, NULL), weights = on_device(MT_F32, now.tokens, k, NULL);
    mt_status status = mt_router_forward(ctx, &now.desc, logits, bias, NULL, weights, (int32_t *)ids.data);
    char words[96];
    if (DEVICE == MT_DEVICE_CUDA) {
        ASSERT_STATUS(ctx, MT_SUCCESS, status);
        OK(mt_ids_check(ctx, "expert", (const int32_t *)ids.data, now.tokens * k, now.experts, -1));
        status = mt_context_synchronize(ctx);
        snprintf(words, sizeof words, "expert -2 at index %d is not in", (int)token * k);
    } else {
        snprintf(words, sizeof words, "the logits of token %d, with the bias, are not numbers", (int)token);
    }
    expect(MT_ERR_DATA, status, words);
    OK(mt_download(ctx, ids, now.ids));
    for (int64_t i = 0; i < now.tokens * k; i++) assert_true((now.ids[i] == -2) == (i / k == token));
    mt_arena_release(ctx, mark);
}

static void test_bad_logits(void **state) {
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    (void)state;
    for (int how = 0; how < 18; how++) {
        begin(7, 4, 2, (mt_router_score)(how % 3));
        now.desc.groups = how / 9 ? 2 : 0, now.desc.group_topk = how / 9;
        fill(&now, 3);
        for (int e = 0; e < (how / 3 % 3 == 2 ? 4 : 1); e++) now.logits[5 * 4 + e] = bad[how / 3 % 3];
        expect_wrong(5);
    }
    for (int how = 0; how < 2; how++) { /* of the bias, in the only token */
        begin(1, 4, 2, MT_ROUTER_SIGMOID);
        fill(&now, 3);
        now.has_bias = 1, now.bias[2] = bad[how];
        expect_wrong(0);
    }
    begin(1, 4, 2, MT_ROUTER_TOPK_SOFTMAX); /* the sums of both groups are equal: the first one has no weights */
    now.desc.groups = now.desc.group_best = 2, now.desc.group_topk = 1;
    now.logits[0] = now.logits[1] = now.logits[3] = -INFINITY, now.logits[2] = 5.0f;
    expect_wrong(0);
}

#if !defined(ROUTER_ON_GPU)
/* Any number of threads gives the same bits. */
static void test_threads(void **state) {
    static router first;
    static totals sums[3];
    (void)state;
    for (int threads = 1; threads <= 3; threads++) {
        mt_context_desc where = {.arena_bytes = (size_t)64 << 20, .threads = threads};
        mt_context *saved = ctx;
        begin(TOKENS, EXPERTS, 4, MT_ROUTER_SOFTMAX);
        now.desc.normalize = now.has_losses = 1;
        fill(&now, 9);
        OK(mt_context_create(NULL, &where, &ctx));
        OK(run_router(&now));
        add_tokens(&now, 0, TOKENS, &sums[threads - 1]);
        mt_context_destroy(ctx);
        ctx = saved;
        if (threads == 1) first = now;
        assert_memory_equal(&first, &now, sizeof now);
        assert_memory_equal(&sums[0], &sums[threads - 1], sizeof *sums);
    }
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_ties),
        cmocka_unit_test(test_large_logits),
        cmocka_unit_test(test_closed_experts),
        cmocka_unit_test(test_wrong_ids),
        cmocka_unit_test(test_many_experts),
        cmocka_unit_test(test_no_tokens),
        cmocka_unit_test(test_losses),
        cmocka_unit_test(test_large_counts),
        cmocka_unit_test(test_losses_of_nothing),
        cmocka_unit_test(test_bias_update),
        cmocka_unit_test(test_bad_descs),
        cmocka_unit_test(test_bad_logits),
#if !defined(ROUTER_ON_GPU)
        cmocka_unit_test(test_threads),
#endif
    };
    return cmocka_run_group_tests(tests, open_context, close_context);
}
