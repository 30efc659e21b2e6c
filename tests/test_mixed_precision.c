/* test_mixed_precision.c - tests models in bf16 and f16: master weights and AdamW against double precision, stochastic
   rounding, loss scaling against Megatron-LM's, communication and memory against f32, a GPT against the same GPT in
   f32, and the same bits on every split. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test_gpt.h"
#include "mt_test_ranks.h"

static const mt_dtype halves[2] = {MT_BF16, MT_F16};

static float round16(mt_dtype dtype, float x) { /* test_kernels_16bit.c tests the conversions */
    return dtype == MT_BF16  ? mti_bf16_to_f32(mti_f32_to_bf16(x))
           : dtype == MT_F16 ? mti_f16_to_f32(mti_f32_to_f16(x))
                             : x;
}

static float element(mt_tensor t, int64_t i) {
    if (t.dtype == MT_F32) return ((float *)t.data)[i];
    return t.dtype == MT_BF16 ? mti_bf16_to_f32(((uint16_t *)t.data)[i]) : mti_f16_to_f32(((uint16_t *)t.data)[i]);
}

/* ---- a registry of every kind of parameter ----------------------------------------------------------------------- */

#define KINDS 5
#define MOST 128 /* elements of the largest parameter */

static const mt_param_desc kinds[KINDS] = {
    {.name = "rows", .rows = 10, .cols = 12, .placement = MT_SPLIT_ROWS, .init_std = 0.5f, .weight_decay = 1}, /* padded
                                                                                                                */
    {.name = "gate_up",
     .rows = 12,
     .cols = 3,
     .placement = MT_SPLIT_ROWS,
     .parts = 2,
     .init_std = 0.5f,
     .weight_decay = 1},
    {.name = "cols", .rows = 5, .cols = 14, .placement = MT_SPLIT_COLS, .unit = 2, .init_std = 0.5f, .weight_decay = 1},
    {.name = "bias", .rows = 1, .cols = 11, .placement = MT_SPLIT_COLS, .init_value = 0.3f},
    {.name = "norm", .rows = 1, .cols = 9, .init_value = 1.0f},
};

static int64_t kind_elements(int k) { return kinds[k].rows * kinds[k].cols; }

typedef struct registry_case {
    mt_dtype dtype;
    mt_optimizer_desc adamw;
    int steps;
    float values[KINDS][MOST], masters[KINDS][MOST], first[KINDS][MOST]; /* of rank 0; first: initial values */
} registry_case;

static mt_status registry_open(mt_comm *world, mt_dtype dtype, mt_grid_desc shape, test_rank *r) {
    mt_param *p;
    MT_TRY(test_rank_open(world, shape, NULL, r));
    MT_TRY(mt_params_set_dtype(r->ctx, r->params, dtype));
    for (int k = 0; k < KINDS; k++) MT_TRY(mt_params_add(r->ctx, r->params, &kinds[k], &p));
    return mt_params_init(r->ctx, r->params, 42);
}

/* The gradient of a whole parameter in one step. */
static void whole_gradient(int kind, int step, float *g) {
    uint64_t seed = (uint64_t)(1000 * step + kind);
    for (int64_t i = 0; i < kind_elements(kind); i++) g[i] = test_float(&seed);
}

static mt_status registry_step(test_rank *r, mt_optimizer *o, int step) {
    float g[MOST];
    MT_TRY(mt_params_zero_grad(r->ctx, r->params));
    for (int k = 0; k < KINDS; k++) {
        mt_param *p = mt_params_at(r->params, k);
        whole_gradient(k, step, g);
        MT_TRY(mt_param_scatter(r->ctx, p, g, p->grad));
    }
    return mt_optimizer_step(r->ctx, o, 1e-2f, 0.5f);
}

static mt_status registry_keep(test_rank *r, mt_optimizer *o, float values[KINDS][MOST], float masters[KINDS][MOST]) {
    float room[MOST];
    for (int k = 0; k < KINDS; k++) {
        mt_param *p = mt_params_at(r->params, k);
        mt_tensor master;
        int speaks = mt_comm_rank(r->world) == 0;
        MT_TRY(mt_param_gather(r->ctx, r->params, p, p->value, room));
        if (speaks) memcpy(values[k], room, sizeof room);
        MT_TRY(mt_optimizer_master(r->ctx, o, p, &master));
        MT_TRY(mt_param_gather(r->ctx, r->params, p, master, room));
        if (speaks && masters) memcpy(masters[k], room, sizeof room);
    }
    return MT_SUCCESS;
}

static mt_status registry_body(test_rank *r, registry_case *c, mt_optimizer *o) {
    MT_TRY(mt_optimizer_create(r->ctx, r->params, &c->adamw, o));
    MT_TRY(registry_keep(r, o, c->first, NULL));
    for (int step = 1; step <= c->steps; step++) MT_TRY(registry_step(r, o, step));
    return registry_keep(r, o, c->values, c->masters);
}

static mt_status registry_rank(mt_comm *world, void *user) {
    registry_case *c = (registry_case *)user;
    mt_grid_desc all = {.tp = mt_comm_size(world)};
    mt_optimizer o = {0};
    test_rank r;
    mt_status status = registry_open(world, c->dtype, all, &r);
    if (status == MT_SUCCESS) status = registry_body(&r, c, &o);
    mt_optimizer_destroy(r.ctx, &o);
    test_rank_close(&r);
    return status;
}

/* ---- parameters -------------------------------------------------------------------------------------------------- */

/* A 16-bit model has the rounded initial values of the f32 model, on every split. */
static void test_initial_values(void **state) {
    static registry_case f32, half;
    (void)state;
    f32.dtype = MT_F32;
    test_launch(1, registry_rank, &f32);
    for (int h = 0; h < 2; h++)
        for (int ranks = 1; ranks <= 4; ranks *= 2) {
            half.dtype = halves[h];
            test_launch(ranks, registry_rank, &half);
            for (int k = 0; k < KINDS; k++)
                for (int64_t i = 0; i < kind_elements(k); i++) {
                    assert_true(half.first[k][i] == round16(halves[h], f32.first[k][i]));
                    assert_true(half.masters[k][i] == half.first[k][i]);
                }
        }
}

/* Master weights follow AdamW in double, from the rounded initial values. The parameter is the rounded master weight,
   to the bit. */
static void check_masters(const registry_case *c) {
    for (int k = 0; k < KINDS; k++) {
        double x[MOST], m[MOST] = {0}, v[MOST] = {0};
        float g[MOST];
        for (int64_t i = 0; i < kind_elements(k); i++) x[i] = (double)c->first[k][i];
        for (int step = 1; step <= c->steps; step++) {
            whole_gradient(k, step, g);
            for (int64_t i = 0; i < kind_elements(k); i++) {
                double grad = 0.5 * (double)g[i], b1 = (double)0.9f, b2 = (double)0.999f;
                m[i] = b1 * m[i] + (1 - b1) * grad;
                v[i] = b2 * v[i] + (1 - b2) * grad * grad;
                if (kinds[k].weight_decay) x[i] -= (double)1e-2f * (double)c->adamw.weight_decay * x[i];
                x[i] -=
                    (double)1e-2f * (m[i] / (1 - pow(b1, step))) / (sqrt(v[i] / (1 - pow(b2, step))) + (double)1e-8f);
            }
        }
        for (int64_t i = 0; i < kind_elements(k); i++) {
            double off = fabs((double)c->masters[k][i] - x[i]);
            /* two roundings of a number below 2 in each step, and those of the moments */
            if (!(off <= c->steps * 2e-7))
                fail_msg("%s[%lld]: master %.9g, must be %.9g", kinds[k].name, (long long)i, (double)c->masters[k][i],
                         x[i]);
            if (c->values[k][i] != round16(c->dtype, c->masters[k][i]))
                fail_msg("%s[%lld]: %.9g is not the rounded master %.9g", kinds[k].name, (long long)i,
                         (double)c->values[k][i], (double)c->masters[k][i]);
        }
    }
}

static void test_masters(void **state) {
    static registry_case c;
    (void)state;
    for (int d = 0; d < 3; d++)
        for (int ranks = 1; ranks <= 4; ranks *= 2) {
            memset(&c, 0, sizeof c);
            c.dtype = d == 2 ? MT_F32 : halves[d];
            c.adamw.weight_decay = 0.1f;
            c.steps = 30;
            test_launch(ranks, registry_rank, &c);
            check_masters(&c);
        }
}

/* 16-bit shards are converted to and from f32 on the host. The padding of values, masters and moments stays zero. */
static mt_status shard_body(test_rank *r, mt_optimizer *o) {
    float whole[MOST], back[MOST];
    MT_TRY(mt_optimizer_create(r->ctx, r->params, NULL, o));
    for (int k = 0; k < KINDS; k++) {
        mt_param *p = mt_params_at(r->params, k);
        CHECK((uintptr_t)p->value.data % 64 == 0 && (uintptr_t)p->grad.data % 64 == 0);
        whole_gradient(k, 7, whole);
        MT_TRY(mt_param_scatter(r->ctx, p, whole, p->value));
        MT_TRY(mt_param_gather(r->ctx, r->params, p, p->value, back));
        for (int64_t i = 0; i < kind_elements(k); i++) CHECK(back[i] == round16(mt_params_dtype(r->params), whole[i]));
    }
    for (int step = 1; step <= 3; step++) MT_TRY(registry_step(r, o, step));
    for (int k = 0; k < KINDS; k++) {
        mt_param *p = mt_params_at(r->params, k);
        mt_tensor all[4];
        MT_TRY(mt_optimizer_master(r->ctx, o, p, &all[0]));
        MT_TRY(mt_optimizer_moments(r->ctx, o, p, &all[1], &all[2]));
        all[3] = p->value;
        for (int t = 0; t < 4; t++) {
            int64_t real = 0, n = all[t].rows * all[t].cols, zero = 0;
            mti_shard_run run;
            for (int64_t at = 0; mti_run_next(p, p->tp_rank, &at, &run);) real += run.count * (n / p->local_features);
            for (int64_t i = 0; i < n; i++) zero += element(all[t], i) == 0.0f;
            if (p->desc.placement != MT_REPLICATED) CHECK(zero == n - real);
        }
    }
    return MT_SUCCESS;
}

static mt_status shard_rank(mt_comm *world, void *user) {
    mt_grid_desc all = {.tp = mt_comm_size(world)};
    mt_optimizer o = {0};
    test_rank r;
    mt_status status = registry_open(world, *(const mt_dtype *)user, all, &r);
    if (status == MT_SUCCESS) status = shard_body(&r, &o);
    mt_optimizer_destroy(r.ctx, &o);
    test_rank_close(&r);
    return status;
}

static void test_shards(void **state) {
    mt_dtype dtype;
    (void)state;
    for (int h = 0; h < 2; h++)
        for (int ranks = 1; ranks <= 4; ranks *= 2) {
            dtype = halves[h];
            test_launch(ranks, shard_rank, &dtype);
        }
}

/* The hash log has the same lines for 16-bit parameters and their masters on every split, and other lines after another
   step. */
typedef struct log_case {
    mt_dtype dtype;
    int steps, count;
    uint64_t hashes[2 * KINDS];
} log_case;

static void keep_hash(void *user, const char *name, uint64_t hash, int differs) {
    log_case *c = (log_case *)user;
    (void)name;
    c->hashes[c->count++] = differs ? 0 : hash;
}

static mt_status log_body(test_rank *r, log_case *c, mt_optimizer *o, mt_hash_log *log) {
    log_case mine = {c->dtype, 0, 0, {0}};
    MT_TRY(mt_optimizer_create(r->ctx, r->params, NULL, o));
    for (int step = 1; step <= c->steps; step++) MT_TRY(registry_step(r, o, step));
    for (int k = 0; k < KINDS; k++) {
        mt_param *p = mt_params_at(r->params, k);
        mt_tensor master;
        MT_TRY(mt_optimizer_master(r->ctx, o, p, &master));
        MT_TRY(mt_hash_log_shard(r->ctx, log, p, "", p->value));
        MT_TRY(mt_hash_log_shard(r->ctx, log, p, ".master", master));
    }
    MT_TRY(mt_hash_log_flush(r->ctx, log, keep_hash, &mine));
    CHECK(mine.count == 2 * KINDS);
    if (mt_comm_rank(r->world) == 0) memcpy(c->hashes, mine.hashes, sizeof mine.hashes);
    return MT_SUCCESS;
}

static mt_status log_rank(mt_comm *world, void *user) {
    log_case *c = (log_case *)user;
    mt_grid_desc all = {.tp = mt_comm_size(world)};
    mt_hash_log *log = NULL;
    mt_optimizer o = {0};
    test_rank r;
    mt_status status = registry_open(world, c->dtype, all, &r);
    if (status == MT_SUCCESS) status = mt_hash_log_create(r.ctx, &r.grid, &log);
    if (status == MT_SUCCESS) status = log_body(&r, c, &o, log);
    mt_hash_log_destroy(log);
    mt_optimizer_destroy(r.ctx, &o);
    test_rank_close(&r);
    return status;
}

static void test_hash_log(void **state) {
    (void)state;
    for (int h = 0; h < 2; h++) {
        log_case one = {halves[h], 2, 0, {0}}, later = {halves[h], 3, 0, {0}};
        test_launch(1, log_rank, &one);
        test_launch(1, log_rank, &later);
        for (int i = 0; i < 2 * KINDS; i++) {
            assert_true(one.hashes[i] != later.hashes[i] && one.hashes[i] != 0);
            assert_true(i % 2 == 0 || one.hashes[i] != one.hashes[i - 1]);
        }
        for (int ranks = 2; ranks <= 4; ranks *= 2) {
            log_case many = {halves[h], 2, 0, {0}};
            test_launch(ranks, log_rank, &many);
            assert_memory_equal(many.hashes, one.hashes, sizeof one.hashes);
        }
    }
}

/* ---- stochastic rounding ----------------------------------------------------------------------------------------- */

/* The mean of n roundings of x. Checks that each is one of the two neighbours of x. */
static double mean_of_roundings(mt_dtype dtype, float x, int n, uint64_t *seed) {
    float low = INFINITY, high = -INFINITY;
    double sum = 0, gap;
    for (int i = 0; i < n; i++) {
        float y = mti_round_stochastic((int)dtype, x, (uint32_t)test_random(seed));
        assert_true(y == round16(dtype, y));
        low = fminf(low, y);
        high = fmaxf(high, y);
        sum += (double)y;
    }
    gap = fmax(fabs((double)x) * 2 * gpt_roundoff(dtype), dtype == MT_F16 ? ldexp(1, -24) : ldexp(1, -133));
    assert_true(low <= x && x <= high && (double)high - (double)low <= gap);
    return sum / n;
}

/* Unbiased: the mean of n roundings is off by at most five standard deviations; a single rounding has at most half a
   gap. The numbers lie anywhere between neighbours, including denormal f16 numbers. */
static void test_stochastic_rounding_is_unbiased(void **state) {
    const int n = 4000;
    uint64_t seed = 3;
    (void)state;
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 200; i++) {
            float x = ldexpf(test_float(&seed), -(int)test_below(&seed, halves[h] == MT_F16 ? 26 : 60));
            double gap = fmax(fabs((double)x) * 2 * gpt_roundoff(halves[h]), halves[h] == MT_F16 ? ldexp(1, -24) : 0);
            double off = mean_of_roundings(halves[h], x, n, &seed) - (double)x;
            if (!(fabs(off) <= 5 * gap / 2 / sqrt(n)))
                fail_msg("%s: %.9g is rounded to %.9g in the mean", mt_dtype_name(halves[h]), (double)x,
                         (double)x + off);
        }
}

/* The rule of mt_adamw, to the bit: exact values are unchanged, otherwise the random word decides. */
static void test_stochastic_rounding_rule(void **state) {
    static const float exact[] = {0.0f, -0.0f, 1.0f, -1.5f, 0.0078125f, 5.9604645e-8f, -6.0975552e-5f, 65504.0f};
    (void)state;
    for (int h = 0; h < 2; h++)
        for (size_t i = 0; i < sizeof exact / sizeof *exact; i++) {
            float x = round16(halves[h], exact[i]);
            assert_int_equal(mt_f32_bits(mti_round_stochastic((int)halves[h], x, 0)), mt_f32_bits(x));
            assert_int_equal(mt_f32_bits(mti_round_stochastic((int)halves[h], x, 0xffffffffu)), mt_f32_bits(x));
        }
    /* A quarter of the gap above 1: a word of at least three quarters of 2^32 rounds up. */
    assert_true(mti_round_stochastic(MT_BF16, 1 + 1 / 512.0f, 0xbfffffffu) == 1.0f);
    assert_true(mti_round_stochastic(MT_BF16, 1 + 1 / 512.0f, 0xc0000000u) == 1 + 1 / 128.0f);
    assert_true(mti_round_stochastic(MT_BF16, -1 - 1 / 512.0f, 0xc0000000u) == -1 - 1 / 128.0f);
    assert_true(mti_round_stochastic(MT_F16, 1 + 1 / 4096.0f, 0xbfffffffu) == 1.0f);
    assert_true(mti_round_stochastic(MT_F16, 1 + 1 / 4096.0f, 0xc0000000u) == 1 + 1 / 1024.0f);
    assert_true(mti_round_stochastic(MT_F16, 1.25f * 0x1p-24f, 0xbfffffffu) == 0x1p-24f);
    assert_true(mti_round_stochastic(MT_F16, 1.25f * 0x1p-24f, 0xc0000000u) == 0x1p-23f);
    assert_true(mti_round_stochastic(MT_BF16, INFINITY, 0xffffffffu) == INFINITY);
    assert_true(mti_round_stochastic(MT_F16, -INFINITY, 0) == -INFINITY);
    assert_true(isnan(mti_round_stochastic(MT_F16, NAN, 0xffffffffu)));
    assert_true(mti_round_stochastic(MT_BF16, 3.39e38f, 0xffffffffu) == INFINITY);
}

/* The operator uses the words of mt_random for the elements; tested through the operator, with a step of 1e-3 below
   1. */
static void test_stochastic_rounding_words(void **state) {
    enum { ROWS = 3, COLS = 1100 }; /* more than one block of the loop */
    static float g[ROWS * COLS], m[ROWS * COLS], v[ROWS * COLS];
    static uint16_t p[ROWS * COLS];
    mt_random at = {9, 1u << 31, 2, 5, COLS + 7, NULL};
    mt_adamw h = {1e-3f, 0, 0, 0, 0, 1, 1, NULL};
    mt_context *ctx = NULL;
    (void)state;
    h.stochastic_rounding = &at;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    for (int i = 0; i < ROWS * COLS; i++) {
        p[i] = mti_f32_to_bf16(1.0f);
        g[i] = 1.0f;
        m[i] = v[i] = 0;
    }
    ASSERT_STATUS(ctx, MT_SUCCESS,
                  mt_adamw_step(ctx, &h, mt_tensor_make(p, MT_BF16, ROWS, COLS), mt_none(),
                                mt_tensor_f32(g, ROWS, COLS), mt_tensor_f32(m, ROWS, COLS),
                                mt_tensor_f32(v, ROWS, COLS)));
    for (int i = 0; i < ROWS * COLS; i++) {
        uint64_t e = (uint64_t)((2 + i / COLS) * (COLS + 7) + 5 + i % COLS);
        uint32_t counter[4] = {(uint32_t)(e >> 2), 0, 1u << 31, 0}, key[2] = {9, 0}, words[4];
        mt_philox4x32(counter, key, words);
        assert_int_equal(p[i], mti_f32_to_bf16(mti_round_stochastic(MT_BF16, 1.0f - 1e-3f, words[e & 3])));
    }
    mt_context_destroy(ctx);
}

/* The bits are the same on every split, and others with another seed. There are no master weights apart from the
   values. */
static void test_stochastic_rounding_is_split_independent(void **state) {
    static registry_case one, many;
    int differ = 0;
    (void)state;
    for (int h = 0; h < 2; h++)
        for (int ranks = 1; ranks <= 4; ranks *= 2) {
            registry_case *c = ranks == 1 ? &one : &many;
            memset(c, 0, sizeof *c);
            c->dtype = halves[h];
            c->adamw.stochastic_rounding = 1;
            c->adamw.seed = 5;
            c->adamw.weight_decay = 0.1f;
            c->steps = 10;
            test_launch(ranks, registry_rank, c);
            if (ranks > 1)
                for (int k = 0; k < KINDS; k++)
                    assert_memory_equal(many.values[k], one.values[k], (size_t)kind_elements(k) * sizeof(float));
            assert_memory_equal(c->values, c->masters, sizeof c->values);
        }
    many.adamw.seed = 6;
    test_launch(1, registry_rank, &many);
    for (int64_t i = 0; i < kind_elements(0); i++) differ += many.values[0][i] != one.values[0][i];
    assert_true(differ > 10);
}

/* The purpose of stochastic rounding: 100 steps of 1e-4 below 1, each of which is lost when bf16 rounds to nearest. */
static mt_status small_steps_rank(mt_comm *world, void *user) {
    mt_param_desc desc = {.name = "x", .rows = 64, .cols = 64, .init_value = 1.0f};
    mt_optimizer_desc adamw = {.beta1 = 0, .beta2 = 0, .stochastic_rounding = 1};
    mt_optimizer o = {0};
    mt_param *p;
    test_rank r;
    float *x;
    double sum = 0;
    (void)user;
    MT_TRY(test_rank_open(world, (mt_grid_desc){0}, NULL, &r));
    MT_TRY(mt_params_set_dtype(r.ctx, r.params, MT_BF16));
    MT_TRY(mt_params_add(r.ctx, r.params, &desc, &p));
    MT_TRY(mt_params_init(r.ctx, r.params, 1));
    MT_TRY(mt_optimizer_create(r.ctx, r.params, &adamw, &o));
    for (int step = 0; step < 100; step++) {
        MT_TRY(mt_params_zero_grad(r.ctx, r.params));
        MT_TRY(mt_fill(r.ctx, p->grad, 1.0f));
        MT_TRY(mt_optimizer_step(r.ctx, &o, 1e-4f, 1.0f));
    }
    x = test_floats(&r, 64 * 64, 0.0f);
    MT_TRY(mt_param_gather(r.ctx, r.params, p, p->value, x));
    for (int i = 0; i < 64 * 64; i++) {
        sum += (double)x[i];
        CHECK(x[i] > 0.9f); /* 2.6 of the 100 steps fall by a gap; 25 or 100 would not be random */
    }
    /* 100 roundings of up to half a gap of 2^-8 each, 4096 elements: five standard deviations of the mean. */
    CHECK(fabs(sum / 4096 - 0.99) <= 5 * sqrt(100.0 / 4096) * ldexp(1, -9));
    mt_optimizer_destroy(r.ctx, &o);
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_small_steps_are_not_lost(void **state) {
    (void)state;
    test_launch(1, small_steps_rank, NULL);
}

/* ---- loss scaling ------------------------------------------------------------------------------------------------ */

/* Megatron-LM's DynamicGradScaler, translated line by line (megatron/core/optimizer/grad_scaler.py, update). */
typedef struct megatron_scaler {
    double scale, min_scale, growth_factor, backoff_factor;
    int growth_interval, hysteresis, growth_tracker, hysteresis_tracker;
} megatron_scaler;

static void megatron_update(megatron_scaler *s, int found_inf) {
    if (found_inf) {
        s->growth_tracker = 0;
        s->hysteresis_tracker -= 1;
        if (s->hysteresis_tracker <= 0) s->scale = fmax(s->scale * s->backoff_factor, s->min_scale);
    } else {
        s->growth_tracker += 1;
        if (s->growth_tracker == s->growth_interval) {
            s->growth_tracker = 0;
            s->hysteresis_tracker = s->hysteresis;
            s->scale = s->scale * s->growth_factor;
        }
    }
}

static void run_scaler(mt_context *ctx, mt_loss_scaler_desc d, megatron_scaler want, int steps, int one_overflow_in) {
    mt_loss_scaler s;
    uint64_t seed = (uint64_t)one_overflow_in;
    int64_t skipped = 0;
    want.hysteresis_tracker = want.hysteresis;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_loss_scaler_create(ctx, &d, &s));
    for (int i = 0; i < steps; i++) {
        int overflow = test_below(&seed, (size_t)one_overflow_in) == 0;
        float norm = !overflow ? 3.0f * s.scale : i % 2 ? NAN : INFINITY, unscale;
        assert_true((double)s.scale == want.scale);
        unscale = mt_loss_scaler_update(&s, &norm);
        assert_true((double)unscale == (overflow ? 0 : 1 / want.scale));
        assert_true(overflow ? !isfinite(norm) : norm == 3.0f);
        megatron_update(&want, overflow);
        skipped += overflow;
        assert_true(s.skipped == skipped);
    }
}

static void test_loss_scaler(void **state) {
    mt_loss_scaler_desc d = {0}, small = {.initial_scale = 64,
                                          .min_scale = 4,
                                          .growth = 4,
                                          .backoff = 0.25f,
                                          .growth_interval = 3,
                                          .hysteresis = 1};
    mt_context *ctx = NULL;
    mt_loss_scaler s;
    float norm = INFINITY;
    (void)state;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    run_scaler(ctx, d, (megatron_scaler){4294967296.0, 1, 2, 0.5, 1000, 2, 0, 0}, 20000, 600);
    run_scaler(ctx, small, (megatron_scaler){64, 4, 4, 0.25, 3, 1, 0, 0}, 300, 3);
    small.hysteresis = 3;
    run_scaler(ctx, small, (megatron_scaler){64, 4, 4, 0.25, 3, 3, 0, 0}, 300, 2);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_loss_scaler_create(ctx, NULL, &s));
    /* the first overflow is tolerated (hysteresis); 2^32 is halved 32 times */
    for (int i = 0; i < 40; i++) mt_loss_scaler_update(&s, &norm);
    assert_true(s.scale == 1.0f && s.skipped == 40);
    small.initial_scale = 1e38f; /* it must not grow to infinity */
    small.growth_interval = 1;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_loss_scaler_create(ctx, &small, &s));
    for (int i = 0; i < 3; i++) assert_true(mt_loss_scaler_update(&s, &(float){1}) > 0 && s.scale == 1e38f);
    mt_context_destroy(ctx);
}

static void test_loss_scaler_refuses(void **state) {
    static const struct {
        mt_loss_scaler_desc desc;
        const char *rest; /* of the message, behind the function */
    } bad[] = {{{.initial_scale = -1}, "initial_scale is -1, must be at least min_scale and finite"},
               {{.initial_scale = NAN}, "initial_scale is nan, must be at least min_scale and finite"},
               {{.initial_scale = INFINITY}, "initial_scale is inf, must be at least min_scale and finite"},
               {{.initial_scale = 1, .min_scale = 2}, "initial_scale is 1, must be at least min_scale and finite"},
               {{.initial_scale = 16777216, .min_scale = 33554432},
                "initial_scale is 16777216, must be at least min_scale and finite"},
               {{.min_scale = -1}, "min_scale is -1, must be above 0, and so large that 1 / min_scale is finite"},
               {{.min_scale = 1e-40f},
                "min_scale is 9.9999461e-41, must be above 0, and so large that 1 / min_scale is finite"},
               {{.growth = 0.5f}, "growth is 0.5, must be at least 1 and finite"},
               {{.growth = INFINITY}, "growth is inf, must be at least 1 and finite"},
               {{.backoff = 2}, "backoff is 2, must be above 0 and at most 1"},
               {{.backoff = -0.5f}, "backoff is -0.5, must be above 0 and at most 1"},
               {{.growth_interval = -1}, "growth_interval is -1, must be at least 1"},
               {{.hysteresis = -1}, "hysteresis is -1, must be at least 1"}};
    mt_context *ctx = NULL;
    mt_loss_scaler s;
    (void)state;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &ctx));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        REFUSED_EXACTLY(ctx, MT_ERR_ARGUMENT, bad[i].rest, mt_loss_scaler_create(ctx, &bad[i].desc, &s));
    assert_string_equal(mt_loss_scaler_wanted("loss_scaler.backoff"), "above 0 and at most 1");
    assert_null(mt_loss_scaler_wanted("backoff"));
    assert_null(mt_loss_scaler_wanted(NULL));
    REFUSED(ctx, MT_ERR_ARGUMENT, "out is NULL", mt_loss_scaler_create(ctx, NULL, NULL));
    assert_int_equal(mt_loss_scaler_create(NULL, NULL, &s), MT_ERR_ARGUMENT);
    mt_context_destroy(ctx);
}

/* One rank of 2 x 2 has a gradient that is not finite: all ranks skip the step, and only the scaler changes. */
static mt_status state_hash(test_rank *r, const mt_optimizer *o, uint64_t *hash) {
    *hash = (uint64_t)o->step;
    for (int k = 0; k < KINDS; k++) {
        mt_param *p = mt_params_at(r->params, k);
        mt_tensor all[4];
        MT_TRY(mt_optimizer_moments(r->ctx, o, p, &all[0], &all[1]));
        MT_TRY(mt_optimizer_master(r->ctx, o, p, &all[2]));
        all[3] = p->value;
        for (int t = 0; t < 4; t++) MT_TRY(mt_hash(r->ctx, all[t], 10 * k + t, 0, 1000, hash));
    }
    return MT_SUCCESS;
}

static mt_status overflow_step(test_rank *r, mt_optimizer *o, mt_loss_scaler *s, int bad_rank, float bad,
                               float *unscale) {
    float norm, g[MOST];
    MT_TRY(mt_params_zero_grad(r->ctx, r->params));
    for (int k = 0; k < KINDS; k++) {
        mt_param *p = mt_params_at(r->params, k);
        whole_gradient(k, 1, g);
        for (int64_t i = 0; i < kind_elements(k); i++) g[i] *= s->scale / 2; /* two data ranks */
        MT_TRY(mt_param_scatter(r->ctx, p, g, p->grad));
    }
    if (mt_comm_rank(r->world) == bad_rank) ((float *)mt_params_at(r->params, 1)->grad.data)[2] = bad;
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    MT_TRY(mt_grad_norm(r->ctx, r->params, &norm));
    *unscale = mt_loss_scaler_update(s, &norm);
    if (*unscale > 0) MT_TRY(mt_optimizer_step(r->ctx, o, 1e-2f, *unscale * mt_clip_coefficient(norm, 1.0f)));
    return MT_SUCCESS;
}

static mt_status overflow_body(test_rank *r, mt_optimizer *o) {
    mt_loss_scaler_desc d = {.initial_scale = 1024, .hysteresis = 1};
    mt_loss_scaler s;
    uint64_t before, after;
    float unscale;
    MT_TRY(mt_optimizer_create(r->ctx, r->params, NULL, o));
    MT_TRY(mt_loss_scaler_create(r->ctx, &d, &s));
    MT_TRY(overflow_step(r, o, &s, -1, 0, &unscale));
    CHECK(unscale == 1 / 1024.0f && o->step == 1);
    MT_TRY(state_hash(r, o, &before));
    for (int bad = 0; bad < 4; bad++) {
        MT_TRY(overflow_step(r, o, &s, bad, bad % 2 ? NAN : -INFINITY, &unscale));
        MT_TRY(state_hash(r, o, &after));
        CHECK(unscale == 0 && before == after && o->step == 1 && s.skipped == bad + 1);
    }
    CHECK(s.scale == 64.0f);
    MT_TRY(overflow_step(r, o, &s, -1, 0, &unscale));
    MT_TRY(state_hash(r, o, &after));
    CHECK(unscale == 1 / 64.0f && o->step == 2 && before != after);
    return MT_SUCCESS;
}

static mt_status overflow_rank(mt_comm *world, void *user) {
    mt_grid_desc shape = {.tp = 2, .dp = 2};
    mt_optimizer o = {0};
    test_rank r;
    mt_status status = registry_open(world, *(const mt_dtype *)user, shape, &r);
    if (status == MT_SUCCESS) status = overflow_body(&r, &o);
    mt_optimizer_destroy(r.ctx, &o);
    test_rank_close(&r);
    return status;
}

static void test_one_rank_overflows(void **state) {
    mt_dtype dtype;
    (void)state;
    for (int h = 0; h < 2; h++) {
        dtype = halves[h];
        test_launch(4, overflow_rank, &dtype);
    }
}

/* ---- what is held, saved and sent -------------------------------------------------------------------------------- */

static mt_transformer_layer_desc layer_desc(int sequence_parallel) {
    mt_transformer_layer_desc d = {.hidden = 64,
                                   .heads = 4,
                                   .dropout.attention = 0.1f,
                                   .dropout.hidden = 0.1f,
                                   .sequence_parallel = sequence_parallel};
    return d;
}

typedef struct layer_case {
    mt_dtype dtype;
    int sequence_parallel;
    size_t saved; /* arena bytes that are in use after a forward */
    mt_ledger tp; /* of one forward and one backward */
} layer_case;

static mt_status layer_body(test_rank *r, layer_case *c) {
    mt_transformer_layer_desc d = layer_desc(c->sequence_parallel);
    mt_batch batch = {.sequences = 2, .seq = 16};
    int64_t rows = 32 / (c->sequence_parallel ? r->grid.tp_size : 1);
    mt_transformer_layer layer;
    mt_transformer_layer_saved saved;
    mt_tensor x, y, dx;
    size_t mark;
    MT_TRY(mt_params_set_dtype(r->ctx, r->params, c->dtype));
    MT_TRY(mt_transformer_layer_create(r->ctx, r->params, "layer", &d, &layer));
    MT_TRY(mt_params_init(r->ctx, r->params, 1));
    MT_TRY(mt_arena_tensor(r->ctx, c->dtype, rows, 64, &x));
    MT_TRY(mt_arena_tensor(r->ctx, c->dtype, rows, 64, &y));
    MT_TRY(mt_arena_tensor(r->ctx, c->dtype, rows, 64, &dx));
    MT_TRY(mt_fill(r->ctx, x, 0.25f));
    mt_comm_ledger_reset(r->grid.tp);
    mark = mt_arena_mark(r->ctx);
    MT_TRY(mt_transformer_layer_forward(r->ctx, &layer, &batch, x, y, &saved));
    if (mt_comm_rank(r->world) == 0) c->saved = mt_arena_mark(r->ctx) - mark;
    MT_TRY(mt_transformer_layer_backward(r->ctx, &layer, y, dx, &saved));
    if (mt_comm_rank(r->world) == 0) c->tp = mt_comm_ledger(r->grid.tp);
    return MT_SUCCESS;
}

static mt_status layer_rank(mt_comm *world, void *user) {
    mt_grid_desc all = {.tp = mt_comm_size(world)};
    test_rank r;
    mt_status status = test_rank_open(world, all, NULL, &r);
    if (status == MT_SUCCESS) status = layer_body(&r, (layer_case *)user);
    test_rank_close(&r);
    return status;
}

/* The bytes between tensor ranks are half of those in f32, in the same number of calls. Activations need half the
   memory, except the statistics (mean and rstd of two norms, and the log of the sums of attention). */
static void test_layer_moves_and_saves_half(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int sp = 0; sp < 2; sp++)
            for (int h = 0; h < 2; h++) {
                layer_case f32 = {MT_F32, sp, 0, {{0}, {0}}}, half = {halves[h], sp, 0, {{0}, {0}}};
                size_t rows = 32u / (sp ? (unsigned)ranks : 1),
                       stats = 2 * rows * 2 * 4 + 4u / (unsigned)ranks * 32 * 4;
                test_launch(ranks, layer_rank, &f32);
                test_launch(ranks, layer_rank, &half);
                assert_int_equal(half.saved - stats, (f32.saved - stats) / 2);
                for (int k = 0; k < MT_COLLECTIVE_COUNT; k++) {
                    assert_int_equal(half.tp.calls[k], f32.tp.calls[k]);
                    assert_int_equal(2 * half.tp.bytes[k], f32.tp.bytes[k]);
                }
                assert_true(ranks == 1 || half.tp.bytes[sp ? MT_REDUCE_SCATTER : MT_ALL_REDUCE] > 0);
            }
}

/* Bytes per parameter, on the CPU and on the meta device: value, gradient, two moments, and a master weight if there is
   one. */
static void test_bytes_of_a_parameter(void **state) {
    static const struct {
        mt_dtype dtype;
        int stochastic;
        size_t bytes;
    } cases[] = {{MT_F32, 0, 16}, {MT_BF16, 0, 18}, {MT_F16, 0, 18}, {MT_BF16, 1, 14}, {MT_F16, 1, 14}};
    mt_param_desc desc = {.name = "x", .rows = 64, .cols = 128, .placement = MT_SPLIT_ROWS};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int meta = 0; meta < 2; meta++) {
            mt_context_desc where = {.arena_bytes = 1 << 20, .device = meta ? MT_DEVICE_META : MT_DEVICE_CPU};
            mt_optimizer_desc adamw = {.stochastic_rounding = cases[i].stochastic};
            mt_optimizer o = {0};
            mt_param *p;
            test_rank r;
            size_t before;
            test_paper_rank(1, 0, (mt_grid_desc){0}, &where, &r);
            before = mt_context_allocated(r.ctx);
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_set_dtype(r.ctx, r.params, cases[i].dtype));
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &desc, &p));
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_optimizer_create(r.ctx, r.params, &adamw, &o));
            assert_int_equal(mt_context_allocated(r.ctx) - before, cases[i].bytes * 64 * 128);
            mt_optimizer_destroy(r.ctx, &o);
            assert_int_equal(mt_context_allocated(r.ctx), before + (cases[i].dtype == MT_F32 ? 8u : 6u) * 64 * 128);
            test_paper_rank_close(&r);
        }
}

/* ---- linear layers with whole inputs and outputs ----------------------------------------------------------------- */

enum { LINEAR_TOKENS = 6, LINEAR_IN = 10, LINEAR_OUT = 13 }; /* no multiples of 2 or 4 ranks */

static mt_tensor noise_16bit(test_rank *r, int64_t rows, int64_t cols, uint64_t seed, float *wide) {
    mt_dtype dtype = mt_params_dtype(r->params);
    uint16_t *x = (uint16_t *)test_floats(r, rows * cols, 0.0f);
    for (int64_t i = 0; i < rows * cols; i++) {
        wide[i] = round16(dtype, test_float(&seed));
        x[i] = dtype == MT_BF16 ? mti_f32_to_bf16(wide[i]) : mti_f32_to_f16(wide[i]);
    }
    return mt_tensor_make(x, dtype, rows, cols);
}

/* Compares c [m, n], which a layer computed from 16-bit a and b, with op(a) op(b) in double. The sum was rounded in
   `roundings` places, each time by at most u times the sum of the absolute values of all terms. */
static mt_status check_product(const char *what, const float *a, int ta, const float *b, int tb, int m, int n, int k,
                               const float *bias, mt_tensor c, double u, int roundings) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = bias ? (double)bias[j] : 0, size = fabs(sum), got;
            for (int l = 0; l < k; l++) {
                double term = (double)a[ta ? l * m + i : i * k + l] * (double)b[tb ? j * k + l : l * n + j];
                sum += term;
                size += fabs(term);
            }
            got = (double)element(c, i * n + j);
            if (fabs(got - sum) <= (u * roundings + 1e-6) * size) continue;
            fprintf(stderr, "%s[%d, %d] is %.9g, must be %.9g\n", what, i, j, got, sum);
            return MT_ERR_DATA;
        }
    return MT_SUCCESS;
}

static mt_status linear_body(test_rank *r, int column) {
    mt_linear_desc d = {
        .in_features = LINEAR_IN, .out_features = LINEAR_OUT, .init_std = 0.5f, .gather_output = column};
    mt_column_parallel_linear c;
    mt_row_parallel_linear w;
    mt_param *weight, *bias;
    mt_linear_saved saved;
    float x[LINEAR_TOKENS * LINEAR_IN], dy[LINEAR_TOKENS * LINEAR_OUT], all[LINEAR_IN * LINEAR_OUT], b[LINEAR_OUT];
    double u = gpt_roundoff(mt_params_dtype(r->params));
    int ranks = mt_comm_size(r->world);
    mt_tensor tx, ty, tdx, tdy;
    if (column) MT_TRY(mt_column_parallel_linear_create(r->ctx, r->params, "fc", &d, &c));
    else MT_TRY(mt_row_parallel_linear_create(r->ctx, r->params, "fc", &d, &w));
    MT_TRY(mt_params_init(r->ctx, r->params, 3));
    weight = mt_params_find(r->params, "fc.weight");
    bias = mt_params_find(r->params, "fc.bias");
    for (int i = 0; i < LINEAR_OUT; i++) b[i] = 0.125f * (float)(i - 5);
    MT_TRY(mt_param_scatter(r->ctx, bias, b, bias->value));
    MT_TRY(mt_param_gather(r->ctx, r->params, weight, weight->value, all));
    tx = noise_16bit(r, LINEAR_TOKENS, LINEAR_IN, 1, x);
    tdy = noise_16bit(r, LINEAR_TOKENS, LINEAR_OUT, 2, dy);
    MT_TRY(mt_arena_tensor(r->ctx, tx.dtype, LINEAR_TOKENS, LINEAR_IN, &tdx));
    MT_TRY(mt_arena_tensor(r->ctx, tx.dtype, LINEAR_TOKENS, LINEAR_OUT, &ty));
    if (column) {
        MT_TRY(mt_parallel_linear_forward(r->ctx, &c, tx, ty, &saved));
        MT_TRY(mt_parallel_linear_backward(r->ctx, &c, tdy, tdx, &saved));
    } else {
        MT_TRY(mt_parallel_linear_forward(r->ctx, &w, tx, ty, &saved));
        MT_TRY(mt_parallel_linear_backward(r->ctx, &w, tdy, tdx, &saved));
    }
    /* Roundings: each rank's part (if there are parts), their sum, the sum with the bias. */
    MT_TRY(check_product("y", x, 0, all, 1, LINEAR_TOKENS, LINEAR_OUT, LINEAR_IN, b, ty, u, 3));
    MT_TRY(check_product("dx", dy, 0, all, 0, LINEAR_TOKENS, LINEAR_IN, LINEAR_OUT, NULL, tdx, u,
                         column && ranks > 1 ? 2 : 1));
    MT_TRY(mt_param_gather(r->ctx, r->params, weight, weight->grad, all));
    return check_product("dW", dy, 1, x, 0, LINEAR_OUT, LINEAR_IN, LINEAR_TOKENS, NULL,
                         mt_tensor_f32(all, LINEAR_OUT, LINEAR_IN), 0, 0);
}

typedef struct linear_case {
    mt_dtype dtype;
    int column;
} linear_case;

static mt_status linear_rank(mt_comm *world, void *user) {
    const linear_case *c = (const linear_case *)user;
    mt_grid_desc all = {.tp = mt_comm_size(world)};
    test_rank r;
    mt_status status = test_rank_open(world, all, NULL, &r);
    if (status == MT_SUCCESS) status = mt_params_set_dtype(r.ctx, r.params, c->dtype);
    if (status == MT_SUCCESS) status = linear_body(&r, c->column);
    test_rank_close(&r);
    return status;
}

static void test_linear_layers(void **state) {
    (void)state;
    for (int h = 0; h < 2; h++)
        for (int column = 0; column < 2; column++)
            for (int ranks = 1; ranks <= 4; ranks *= 2) {
                linear_case c = {halves[h], column};
                test_launch(ranks, linear_rank, &c);
            }
}

/* ---- what is refused --------------------------------------------------------------------------------------------- */

static void test_refused_types(void **state) {
    mt_linear_desc d = {.in_features = 8, .out_features = 8};
    mt_optimizer_desc adamw = {.stochastic_rounding = 1};
    mt_column_parallel_linear layer;
    mt_optimizer o = {0};
    mt_tensor x;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "params is NULL", mt_params_set_dtype(r.ctx, NULL, MT_BF16));
    REFUSED(r.ctx, MT_ERR_DTYPE, "dtype is MT_I32, must be MT_F32, MT_BF16 or MT_F16",
            mt_params_set_dtype(r.ctx, r.params, MT_I32));
    assert_int_equal(mt_params_set_dtype(NULL, r.params, MT_BF16), MT_ERR_ARGUMENT);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_set_dtype(r.ctx, r.params, MT_BF16));
    assert_int_equal(mt_params_dtype(r.params), MT_BF16);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "fc", &d, &layer));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "there are parameters", mt_params_set_dtype(r.ctx, r.params, MT_F16));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    x = test_tensor(&r, 4, 8, 0.0f);
    REFUSED(r.ctx, MT_ERR_DTYPE, "x is f32|'fc.weight' is bf16",
            mt_parallel_linear_forward(r.ctx, &layer, x, mt_tensor_make(x.data, MT_BF16, 4, 8), NULL));
    REFUSED(r.ctx, MT_ERR_DTYPE, "y is f16|'fc.weight' is bf16",
            mt_parallel_linear_forward(r.ctx, &layer, mt_tensor_make(x.data, MT_BF16, 4, 8),
                                       mt_tensor_make(x.data, MT_F16, 4, 8), NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "no optimizer", mt_optimizer_master(r.ctx, &o, layer.weight, &x));
    test_paper_rank_close(&r);
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "fc", &d, &layer));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "stochastic_rounding|f32", mt_optimizer_create(r.ctx, r.params, &adamw, &o));
    assert_null(o.params);
    test_paper_rank_close(&r);
}

/* ---- a GPT ------------------------------------------------------------------------------------------------------- */

/* Compares with the gradients of the same weights in f32: each is within gpt_half_error of its length. */
static mt_status compare_gradients(gpt_worker *half, gpt_worker *f32) {
    static const float big = 1e30f;
    double allowed = gpt_half_error(half->r->dtype);
    float *a = (float *)malloc(2 * GPT_MAX_FLOATS * sizeof *a), *b = a + GPT_MAX_FLOATS, loss[2], norm = big;
    mt_status status = a ? MT_SUCCESS : MT_ERR_MEMORY;
    for (int i = 0; status == MT_SUCCESS && i < mt_params_count(half->params); i++) {
        mt_param *p = mt_params_at(half->params, i), *q = mt_params_at(f32->params, i);
        status = mt_param_gather(half->ctx, half->params, p, p->value, a);
        if (status == MT_SUCCESS) status = mt_param_scatter(f32->ctx, q, a, q->value);
    }
    if (status == MT_SUCCESS) status = gpt_gradients(half, 0, &loss[0], &norm);
    if (status == MT_SUCCESS) status = gpt_gradients(f32, 0, &loss[1], &norm);
    for (int i = 0; status == MT_SUCCESS && i < mt_params_count(half->params); i++) {
        mt_param *p = mt_params_at(half->params, i), *q = mt_params_at(f32->params, i);
        double off = 0, whole = 0, scale = half->scaler.scale > 0 ? (double)half->scaler.scale : 1;
        status = mt_param_gather(half->ctx, half->params, p, p->grad, a);
        if (status == MT_SUCCESS) status = mt_param_gather(f32->ctx, f32->params, q, q->grad, b);
        for (int64_t j = 0; status == MT_SUCCESS && j < p->desc.rows * p->desc.cols; j++) {
            off += pow((double)a[j] / scale - (double)b[j], 2);
            whole += pow((double)b[j], 2);
        }
        if (status == MT_SUCCESS && !(sqrt(off) <= allowed * sqrt(whole) && whole > 0)) {
            fprintf(stderr, "%s: the gradient of %s is off by %.3g of its length, allowed %.3g\n", gpt_name(half->r),
                    p->name, sqrt(off / whole), allowed);
            status = MT_ERR_DATA;
        }
    }
    free(a);
    if (status == MT_SUCCESS) CHECK(fabs((double)loss[0] - (double)loss[1]) <= allowed * 0.12);
    return status;
}

static mt_status gradients_rank(mt_comm *world, void *user) {
    gpt_run r = *(const gpt_run *)user, f = r;
    gpt_worker half, f32;
    mt_status status;
    f.dtype = MT_F32;
    f.loss_scale = 0;
    memset(&f32, 0, sizeof f32);
    status = gpt_open(world, &r, &half);
    if (status == MT_SUCCESS) status = gpt_open(world, &f, &f32);
    if (status == MT_SUCCESS) status = compare_gradients(&half, &f32);
    gpt_close(&half);
    gpt_close(&f32);
    return status;
}

#define F16_SCALE 1024.0f /* raises gradients above f16's smallest numbers, and keeps the largest far below the limit */

static void test_gpt_gradients(void **state) {
    gpt_run r = {.dtype = MT_F32, .tp = 1, .data = 1};
    (void)state;
    for (r.llama = 0; r.llama < 3; r.llama++)
        for (int h = 0; h < 2; h++)
            for (r.tp = 1; r.tp <= 4; r.tp *= 2)
                for (r.sequence_parallel = 0; r.sequence_parallel < 2; r.sequence_parallel++) {
                    r.dtype = halves[h];
                    r.loss_scale = halves[h] == MT_F16 ? F16_SCALE : 0;
                    gpt_launch(&r, gradients_rank, &r);
                }
}

static void test_gpt_trains_as_in_f32(void **state) {
    static gpt_result f32, half;
    gpt_run r = {.dtype = MT_F32, .tp = 1, .data = 1}, x;
    (void)state;
    for (r.llama = 0; r.llama < 2; r.llama++) {
        gpt_execute(r, &f32);
        assert_true(f32.loss[GPT_STEPS - 1] < 0.9f * f32.loss[0]);
        for (int h = 0; h < 2; h++)
            for (int i = 0; i < 12; i++) {
                x = r;
                x.dtype = halves[h];
                x.loss_scale = halves[h] == MT_F16 ? F16_SCALE : 0;
                x.tp = 1 << i % 3;
                x.data = i < 6 ? 1 : 2;
                x.sequence_parallel = i / 3 % 2;
                gpt_execute(x, &half);
                gpt_assert_near(&x, &f32, &half, gpt_half_error(x.dtype));
                assert_int_equal(half.scaler.skipped, 0);
                for (int64_t j = 0; j < half.count; j++)
                    assert_true(half.weights[j] == round16(x.dtype, half.masters[j]));
            }
    }
}

/* Logits in f32 are those of a 16-bit model before they are rounded to its own type. */
static mt_status logits_rank(mt_comm *world, void *user) {
    const gpt_run *r = (const gpt_run *)user;
    mt_batch batch = {.sequences = 1, .seq = GPT_SEQ};
    int32_t ids[GPT_SEQ] = {3, 1, 4, 1, 5, 9, 2, 6};
    mt_tensor f32, half;
    gpt_worker w;
    mt_status status = gpt_open(world, r, &w);
    if (status == MT_SUCCESS) status = mt_arena_tensor(w.ctx, MT_F32, GPT_SEQ, GPT_VOCAB, &f32);
    if (status == MT_SUCCESS) status = mt_arena_tensor(w.ctx, r->dtype, GPT_SEQ, GPT_VOCAB, &half);
    if (status == MT_SUCCESS) status = mt_gpt_logits(w.ctx, &w.gpt, &batch, ids, f32);
    if (status == MT_SUCCESS) status = mt_gpt_logits(w.ctx, &w.gpt, &batch, ids, half);
    for (int i = 0, exact = 0; status == MT_SUCCESS && i < GPT_SEQ * GPT_VOCAB; i++) {
        float x = element(f32, i);
        exact += x == round16(r->dtype, x);
        if (element(half, i) != round16(r->dtype, x) || exact > GPT_VOCAB) status = MT_ERR_DATA;
    }
    gpt_close(&w);
    return status;
}

static void test_logits(void **state) {
    gpt_run r = {.dtype = MT_F32, .tp = 1, .data = 1};
    (void)state;
    for (int h = 0; h < 2; h++)
        for (r.tp = 1; r.tp <= 4; r.tp *= 2) {
            r.dtype = halves[h];
            r.llama = h;
            gpt_launch(&r, logits_rank, &r);
        }
}

/* From 2^32 on, the loss overflows until the scale is small enough. Skipped steps have no other effect: the steps up to
   the next skipped one have the bits of a run that starts there, with this scale. */
static void test_gpt_finds_its_scale(void **state) {
    static gpt_result all, rest;
    gpt_run r = {.dtype = MT_F16, .tp = 2, .data = 2, .sequence_parallel = 1, .loss_scale = 4294967296.0f};
    int first = 0, end, skipped = 0;
    (void)state;
    gpt_execute(r, &all);
    for (int i = 0; i < GPT_STEPS; i++) skipped += isnan(all.norm[i]) != 0;
    assert_int_equal(all.scaler.skipped, skipped);
    assert_int_equal(all.steps, GPT_STEPS - skipped);
    assert_true(all.scaler.scale == ldexpf(4294967296.0f, 1 - skipped)); /* the first overflow is tolerated */
    while (first < GPT_STEPS && isnan(all.norm[first])) first++;
    for (end = first; end < GPT_STEPS && !isnan(all.norm[end]);) end++;
    assert_in_range(first, 5, GPT_STEPS);
    assert_in_range(end - first, 3, GPT_STEPS);
    r.first_step = first;
    r.loss_scale = ldexpf(4294967296.0f, 1 - first);
    gpt_execute(r, &rest);
    assert_memory_equal(all.loss + first, rest.loss, (size_t)(end - first) * sizeof(float));
    assert_memory_equal(all.norm + first, rest.norm, (size_t)(end - first) * sizeof(float));
}

/* The same bits on every split, including skipped steps and stochastic rounding. */
static void test_gpt_invariant(void **state) {
    static const struct {
        int tp, data, sequence_parallel;
    } splits[] = {{1, 1, 0}, {2, 1, 0}, {2, 1, 1}, {4, 1, 1}, {8, 1, 0}, {4, 2, 0}, {2, 2, 1}, {1, 4, 0}};
    static gpt_result one, many;
    (void)state;
    for (int kind = 0; kind < 4; kind++) /* bf16, f16; each of them also with stochastic rounding */
        for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
            gpt_run r = {.dtype = halves[kind % 2],
                         .tp = splits[i].tp,
                         .data = splits[i].data,
                         .sequence_parallel = splits[i].sequence_parallel,
                         .invariant = 8,
                         .llama = kind % 2 != kind / 2,
                         .stochastic = kind / 2,
                         .loss_scale = halves[kind % 2] == MT_F16 ? ldexpf(1, 26) : 0};
            gpt_execute(r, i ? &many : &one);
            if (halves[kind % 2] == MT_F16) assert_true((i ? many : one).scaler.skipped > 0);
            if (i && memcmp(&one, &many, GPT_SAME_BYTES) != 0)
                fail_msg("%s: other bits than on one rank", gpt_name(&r));
        }
}

/* Steps whose numbers are in memory of the device have the bits of steps that the host decides. */
static void test_gpt_steps_on_the_device(void **state) {
    static const gpt_run runs[] = {
        {.dtype = MT_F32, .tp = 1, .data = 1, .clip = 0.5f},
        {.dtype = MT_F16, .tp = 2, .data = 2, .sequence_parallel = 1, .loss_scale = 4294967296.0f},
        {.dtype = MT_F16, .tp = 1, .data = 1, .llama = 1, .loss_scale = 67108864.0f, .recompute = MT_RECOMPUTE_FULL},
        {.dtype = MT_BF16, .tp = 2, .data = 1, .invariant = 8, .stochastic = 1, .weight_decay = 0.1f},
        {.dtype = MT_F16, .tp = 1, .data = 2, .invariant = 8, .loss_scale = 67108864.0f, .pipeline = 2},
        {.dtype = MT_BF16, .tp = 1, .data = 4, .share = {.sharded_optimizer = 1}, .begins = 1}};
    static gpt_result host, device;
    (void)state;
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        gpt_run r = runs[i];
        gpt_execute(r, &host);
        if (r.dtype == MT_F16) assert_true(host.scaler.skipped > 0);
        r.on_device = 1;
        gpt_execute(r, &device);
        if (memcmp(&host, &device, GPT_SAME_BYTES) != 0) fail_msg("%s: other bits on the device", gpt_name(&r));
    }
}

/* When forward also computes the gradient of the loss, a run has the bits of the usual one, and its arena is not
   larger. */
static void test_gpt_loss_in_one_pass(void **state) {
    static const gpt_run runs[] = {
        {.dtype = MT_F32, .tp = 1, .data = 1},
        {.dtype = MT_BF16, .tp = 1, .data = 2, .llama = 1, .recompute = MT_RECOMPUTE_FULL, .padded_vocab = 48},
        {.dtype = MT_F16, .tp = 1, .data = 1, .llama = 2, .loss_scale = 67108864.0f, .on_device = 1},
        {.dtype = MT_F16, .tp = 2, .data = 2, .sequence_parallel = 1, .loss_scale = 67108864.0f},
        {.dtype = MT_BF16, .tp = 1, .data = 2, .pipeline = 2, .schedule = MT_SCHEDULE_GPIPE},
        {.dtype = MT_F16, .tp = 2, .data = 1, .pipeline = 2, .loss_scale = 67108864.0f, .on_device = 1, .begins = 1},
        {.dtype = MT_BF16, .tp = 1, .data = 1, .invariant = 8, .stochastic = 1},
        {.dtype = MT_BF16, .tp = 4, .data = 2, .invariant = 8, .stochastic = 1, .sequence_parallel = 1}};
    static gpt_result two, one;
    (void)state;
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        gpt_run r = runs[i];
        gpt_execute(r, &two);
        r.one_pass = 1;
        gpt_execute(r, &one);
        if (memcmp(&two, &one, GPT_SAME_BYTES) != 0) fail_msg("%s: other bits than in two passes", gpt_name(&r));
        for (int s = 0; s < 8; s++) assert_true(one.stage_peaks[s] <= two.stage_peaks[s]);
    }
}

/* Without invariant mode, sums of 16-bit activations are rounded between ranks. The bits differ, so the test above can
   fail. */
static void test_gpt_differs_without_the_mode(void **state) {
    static gpt_result one, two;
    gpt_run r = {.dtype = MT_BF16, .tp = 1, .data = 1};
    (void)state;
    gpt_execute(r, &one);
    r.tp = 2;
    gpt_execute(r, &two);
    assert_memory_not_equal(one.loss, two.loss, sizeof one.loss);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_initial_values),
        cmocka_unit_test(test_masters),
        cmocka_unit_test(test_shards),
        cmocka_unit_test(test_hash_log),
        cmocka_unit_test(test_stochastic_rounding_is_unbiased),
        cmocka_unit_test(test_stochastic_rounding_rule),
        cmocka_unit_test(test_stochastic_rounding_words),
        cmocka_unit_test(test_stochastic_rounding_is_split_independent),
        cmocka_unit_test(test_small_steps_are_not_lost),
        cmocka_unit_test(test_loss_scaler),
        cmocka_unit_test(test_loss_scaler_refuses),
        cmocka_unit_test(test_one_rank_overflows),
        cmocka_unit_test(test_layer_moves_and_saves_half),
        cmocka_unit_test(test_bytes_of_a_parameter),
        cmocka_unit_test(test_linear_layers),
        cmocka_unit_test(test_refused_types),
        cmocka_unit_test(test_gpt_gradients),
        cmocka_unit_test(test_gpt_trains_as_in_f32),
        cmocka_unit_test(test_logits),
        cmocka_unit_test(test_gpt_finds_its_scale),
        cmocka_unit_test(test_gpt_invariant),
        cmocka_unit_test(test_gpt_steps_on_the_device),
        cmocka_unit_test(test_gpt_loss_in_one_pass),
        cmocka_unit_test(test_gpt_differs_without_the_mode),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
