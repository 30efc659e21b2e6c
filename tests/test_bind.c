/* test_bind.c - tests mt_params_bind and mt_param_bind: parameters, gradients and optimizer state in memory of the
   caller. A training on bound memory must have the same bits as one on the registry's memory, on every split; wrong
   calls must be refused before anything is written.
       cc -O1 -g -I. -Itests tests/test_bind.c -lm -lpthread */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#define GPT_STEPS 3
#include "mt_test_gpt.h"
#include "mt_test_ranks.h"
#include "mt_test_scratch.h"

/* ---- the same bits ----------------------------------------------------------------------------------------------- */

/* What a rank with bound memory checks besides its training. */
static mt_status check_views(const gpt_worker *w) {
    for (int i = 0; i < mt_params_count(w->params); i++) {
        const mt_param *p = mt_params_at(w->params, i);
        mt_tensor state[5];
        int each = w->r->bound & GPT_BOUND_ONE && !(w->r->bound & GPT_BOUND_FILLED);
        state[0] = p->value;
        state[1] = p->grad;
        if (!w->r->share.sharded_optimizer || w->grid.dp_size == 1) {
            MT_TRY(mt_optimizer_moments(w->ctx, &w->optimizer, p, &state[2], &state[3]));
            MT_TRY(mt_optimizer_master(w->ctx, &w->optimizer, p, &state[4]));
        }
        for (int k = 0; k < 5; k++)
            if (w->memory[k].data && !(each && i % 2))
                CHECK(state[k].data == mt_tensor_cols(w->memory[k], w->offsets[i], 1).data);
    }
    return MT_SUCCESS;
}

/* The elements of bound memory that belong to no parameter must still be -77. */
static mt_status check_gaps(const gpt_worker *w) {
    for (int k = 0; k < 5; k++) {
        mt_tensor memory = w->memory[k];
        float *all;
        if (!memory.data) continue;
        all = (float *)malloc((size_t)memory.cols * sizeof *all);
        CHECK(all != NULL);
        MT_TRY(mt_convert(w->ctx, memory, mt_tensor_f32(all, 1, memory.cols)));
        for (int i = 0; i < mt_params_count(w->params); i++) {
            const mt_param *p = mt_params_at(w->params, i);
            for (int64_t j = 0; j < p->value.rows * p->value.cols; j++) all[w->offsets[i] + j] = -77.0f;
        }
        for (int64_t j = 0; j < memory.cols; j++) CHECK(all[j] == -77.0f);
        free(all);
    }
    return MT_SUCCESS;
}

static mt_status bound_rank(mt_comm *world, void *user) {
    const gpt_run *r = (const gpt_run *)user;
    gpt_worker w;
    mt_status status = gpt_open(world, r, &w);
    for (int step = 0; status == MT_SUCCESS && step < GPT_STEPS; step++) status = gpt_step(&w, step);
    if (status == MT_SUCCESS) status = mt_gather_gradients(w.ctx, w.params);
    if (status == MT_SUCCESS) status = gpt_keep_weights(&w);
    if (status == MT_SUCCESS) status = check_views(&w);
    if (status == MT_SUCCESS) status = check_gaps(&w);
    if (status == MT_SUCCESS && r->wide && r->tp == 1 && !(r->bound & (GPT_BOUND_ONE | GPT_BOUND_GAPS)))
        CHECK(!w.params->room);
    gpt_close(&w);
    return status;
}

static void same_bits(gpt_run r, const gpt_result *want, int bound) {
    static gpt_result got;
    memset(&got, 0, sizeof got);
    r.out = &got;
    r.bound = bound;
    gpt_launch(&r, bound_rank, &r);
    for (int i = 0; i < GPT_STEPS; i++)
        if (got.loss[i] != want->loss[i] || got.norm[i] != want->norm[i])
            fail_msg("%s, bound %d, step %d: loss %.9g, norm %.9g, must be %.9g, %.9g", gpt_name(&r), bound, i,
                     (double)got.loss[i], (double)got.norm[i], (double)want->loss[i], (double)want->norm[i]);
    assert_int_equal(got.count, want->count);
    for (int64_t i = 0; i < want->count; i++)
        if (memcmp(&got.weights[i], &want->weights[i], 4) != 0 || memcmp(&got.masters[i], &want->masters[i], 4) != 0)
            fail_msg("%s, bound %d: weight %lld is %.9g, must be %.9g", gpt_name(&r), bound, (long long)i,
                     (double)got.weights[i], (double)want->weights[i]);
}

static const int ways[] = {31,
                           31 | GPT_BOUND_GAPS,
                           31 | GPT_BOUND_GAPS | GPT_BOUND_FILLED,
                           31 | GPT_BOUND_ONE | GPT_BOUND_FILLED,
                           1 | GPT_BOUND_GAPS,
                           2 | GPT_BOUND_GAPS,
                           3 | GPT_BOUND_FILLED,
                           3 | GPT_BOUND_ONE,
                           7 | GPT_BOUND_ONE | GPT_BOUND_GAPS};
#define WAYS (sizeof ways / sizeof *ways)

static void every_way(const gpt_run *r, size_t first, size_t step) {
    static gpt_result want;
    gpt_execute(*r, &want);
    assert_true(want.count > 0 && want.norm[0] > 0.0f);
    for (size_t i = first % WAYS; i < WAYS; i += step) {
        int shared = r->share.sharded_optimizer && r->data > 1;
        same_bits(*r, &want, shared ? ways[i] & ~28 : ways[i]); /* a sharded optimizer's state cannot be bound */
    }
}

static const int splits[][4] = {{1, 1, 1, 0}, {2, 1, 1, 1}, {1, 2, 1, 0}, {2, 2, 1, 1}, {1, 2, 2, 0},
                                {4, 1, 2, 0}, {2, 4, 1, 1}, {1, 1, 2, 0}, {4, 2, 1, 1}};
#define SPLITS (sizeof splits / sizeof *splits)

static gpt_run run_of(size_t split, mt_dtype dtype) {
    gpt_run r = {.tp = splits[split][0],
                 .data = splits[split][1],
                 .pipeline = splits[split][2],
                 .sequence_parallel = splits[split][3],
                 .dtype = dtype,
                 .llama = (int)(split + (size_t)dtype) % 2,
                 .ffn = 45,
                 .weight_decay = 0.1f,
                 .loss_scale = dtype == MT_F16 ? 1024.0f : 0.0f};
    r.share.bucket_bytes = split % 3 == 0 ? 4 : split % 3 == 1 ? 4096 : 20000;
    r.share.sharded_optimizer = (split + (size_t)dtype) % 2 != 0;
    r.begins = split % 2 != 0;
    return r;
}

static void test_the_same_bits_on_every_split(void **state) {
    (void)state;
    for (size_t split = 0; split < SPLITS; split++)
        for (int dtype = MT_F32; dtype <= MT_F16; dtype++) {
            gpt_run r = run_of(split, (mt_dtype)dtype);
            every_way(&r, split + (size_t)dtype, test_all() ? 1 : 4);
            r.share.sharded_optimizer = !r.share.sharded_optimizer;
            if (test_all()) every_way(&r, 0, 1);
        }
}

/* Every parameter is a multiple of 64 bytes: the collectives use the caller's memory directly. */
static void test_memory_without_gaps_is_sent_as_it_is(void **state) {
    (void)state;
    for (size_t split = 2; split < SPLITS; split += 2) {
        gpt_run r = run_of(split, MT_F32);
        r.wide = 1;
        r.llama = 0;
        if (r.tp > 2) r.tp = 2;
        every_way(&r, 0, 6); /* the ways without gaps */
    }
}

static void test_the_same_bits_in_invariant_mode(void **state) {
    static gpt_result one;
    (void)state;
    for (int dtype = MT_F32; dtype <= MT_F16; dtype++) {
        gpt_run r = run_of(0, (mt_dtype)dtype);
        r.invariant = 4;
        r.stochastic = dtype == MT_BF16;
        r.llama = 0;
        gpt_execute(r, &one);
        for (size_t split = 0; split < SPLITS; split++) {
            gpt_run other = run_of(split, (mt_dtype)dtype);
            other.invariant = 4;
            other.stochastic = r.stochastic;
            other.llama = 0;
            same_bits(other, &one, ways[(split + (size_t)dtype) % WAYS] & (other.share.sharded_optimizer ? ~28 : -1));
        }
    }
}

/* ---- checkpoints, the hash log and whole tensors ----------------------------------------------------------------- */

typedef struct saved_job {
    gpt_run run;
    int loads;         /* 1: loads the checkpoint of step 1 before the last steps; 0: saves it after the first step */
    uint64_t lines[2]; /* a hash of the lines of the hash log: of the first step, and of the later ones */
} saved_job;

static void add_line(void *user, const char *name, uint64_t hash, int differs) {
    uint64_t *sum = (uint64_t *)user;
    *sum = (*sum ^ hash ^ test_name_seed(name) ^ (uint64_t)differs) * 1099511628211u;
}

static mt_status saved_steps(gpt_worker *w, saved_job *job) {
    mt_checkpoint_desc d = {.directory = in_scratch("run"), .optimizer = &w->optimizer};
    mt_training_state state = {.step = 1};
    mt_checkpoint *c = NULL;
    mt_hash_log *log;
    MT_TRY(mt_checkpoint_create(w->ctx, w->params, &d, &c));
    MT_TRY(mt_hash_log_create(w->ctx, &w->grid, &log));
    if (job->loads) MT_TRY(mt_checkpoint_load(w->ctx, c, 1, &state));
    for (int step = job->loads; step < GPT_STEPS; step++) {
        uint64_t unused = 0, *lines = &job->lines[step > 0];
        MT_TRY(gpt_step(w, step));
        MT_TRY(mt_hash_log_flush(w->ctx, log, add_line, mt_comm_rank(w->world) == 0 ? lines : &unused));
        if (step == 0) MT_TRY(mt_checkpoint_save(w->ctx, c, &state));
    }
    mt_hash_log_destroy(log);
    mt_checkpoint_destroy(w->ctx, c);
    return gpt_keep_weights(w);
}

static mt_status saved_rank(mt_comm *world, void *user) {
    saved_job *job = (saved_job *)user;
    gpt_worker w;
    mt_status status = gpt_open(world, &job->run, &w);
    if (status == MT_SUCCESS) status = saved_steps(&w, job);
    gpt_close(&w);
    return status;
}

static void assert_same_end(const gpt_result *a, const gpt_result *b) {
    for (int i = 1; i < GPT_STEPS; i++) assert_true(a->loss[i] == b->loss[i] && a->norm[i] == b->norm[i]);
    assert_true(a->count == b->count && a->count > 0);
    assert_memory_equal(a->weights, b->weights, (size_t)a->count * sizeof(float));
    assert_memory_equal(a->masters, b->masters, (size_t)a->count * sizeof(float));
}

/* A checkpoint is saved by an unbound run and loaded by a bound one, and the other way round. The hash logs are the
   same. */
static void test_checkpoints_and_hash_logs(void **state) {
    static gpt_result out[4];
    (void)state;
    for (size_t split = 0; split < SPLITS; split += test_all() ? 1 : 3) {
        saved_job job[4];
        memset(out, 0, sizeof out);
        memset(job, 0, sizeof job);
        for (int i = 0; i < 4; i++) {
            int bound = i == 1 || i == 2; /* saves unbound, loads bound, saves bound, loads unbound */
            job[i].run = run_of(split, split % 2 ? MT_BF16 : MT_F32);
            job[i].run.out = &out[i];
            if (bound) job[i].run.bound = ways[1 + (split + (size_t)i) % 3];
            if (job[i].run.share.sharded_optimizer && job[i].run.data > 1) job[i].run.bound &= ~28;
            job[i].loads = i % 2;
            gpt_launch(&job[i].run, saved_rank, &job[i]);
            assert_same_end(&out[0], &out[i]);
            assert_true(job[i].lines[1] == job[0].lines[1] && job[0].lines[1] != 0);
            if (!job[i].loads) assert_true(job[i].lines[0] == job[0].lines[0]);
            if (job[i].loads) forget("run");
        }
    }
}

/* ---- what is refused --------------------------------------------------------------------------------------------- */

#define FLOATS 64

/* A registry with the parameters a [3, 4] and b [1, 5] on one rank, and memory for them. */
typedef struct small {
    test_rank r;
    mt_param *a, *b;
    float values[FLOATS], grads[FLOATS];
} small;

static void small_open(small *s, mt_dtype dtype, const mt_context_desc *where) {
    mt_param_desc a = {.name = "a", .rows = 3, .cols = 4, .init_std = 0.5f, .weight_decay = 1};
    mt_param_desc b = {.name = "b", .rows = 1, .cols = 5, .init_value = 2.0f};
    memset(s, 0, sizeof *s);
    test_paper_rank(1, 0, (mt_grid_desc){0}, where, &s->r);
    ASSERT_STATUS(s->r.ctx, MT_SUCCESS, mt_params_set_dtype(s->r.ctx, s->r.params, dtype));
    ASSERT_STATUS(s->r.ctx, MT_SUCCESS, mt_params_add(s->r.ctx, s->r.params, &a, &s->a));
    ASSERT_STATUS(s->r.ctx, MT_SUCCESS, mt_params_add(s->r.ctx, s->r.params, &b, &s->b));
    for (int i = 0; i < FLOATS; i++) s->values[i] = s->grads[i] = -1.0f;
}

/* Nothing is bound and nothing was written. */
static void small_close_untouched(small *s) {
    assert_null(s->a->value.data);
    assert_null(s->b->grad.data);
    test_untouched("values", s->values, FLOATS, -1.0f);
    test_untouched("grads", s->grads, FLOATS, -1.0f);
    ASSERT_STATUS(s->r.ctx, MT_SUCCESS, mt_params_init(s->r.ctx, s->r.params, 1));
    test_untouched("values", s->values, FLOATS, -1.0f);
    test_paper_rank_close(&s->r);
}

static void test_memory_that_does_not_fit(void **state) {
    small s;
    mt_context *ctx;
    mt_params_memory m;
    static const int64_t behind[] = {0, 60}, negative[] = {0, -1}, over[] = {0, 11}, huge[] = {0, INT64_MAX - 2};
    (void)state;
    small_open(&s, MT_F32, NULL);
    ctx = s.r.ctx;
    m = (mt_params_memory){.values = s.values, .grads = s.grads, .elements = 16};
    REFUSED(ctx, MT_ERR_ARGUMENT, "mt_params_bind|need 17 elements|elements is 16|'b'",
            mt_params_bind(ctx, s.r.params, &m));
    m.elements = -1;
    REFUSED(ctx, MT_ERR_ARGUMENT, "17|-1|'a'", mt_params_bind(ctx, s.r.params, &m));
    m.elements = FLOATS;
    m.offsets = behind;
    REFUSED(ctx, MT_ERR_ARGUMENT, "65|64|'b'", mt_params_bind(ctx, s.r.params, &m));
    m.offsets = negative;
    REFUSED(ctx, MT_ERR_ARGUMENT, "'b'|-1", mt_params_bind(ctx, s.r.params, &m));
    m.offsets = huge;
    REFUSED(ctx, MT_ERR_ARGUMENT, "'b'|offset", mt_params_bind(ctx, s.r.params, &m));
    m.offsets = over;
    REFUSED(ctx, MT_ERR_ARGUMENT, "values of 'a' have 48 bytes|values of 'b' begin 44 bytes",
            mt_params_bind(ctx, s.r.params, &m));
    m.offsets = NULL;
    m.grads = s.values + 16;
    REFUSED(ctx, MT_ERR_ARGUMENT, "values of 'b'|grads of 'a'", mt_params_bind(ctx, s.r.params, &m));
    m.grads = (float *)((char *)s.grads + 2);
    REFUSED(ctx, MT_ERR_ARGUMENT, "grads|aligned|4-byte", mt_params_bind(ctx, s.r.params, &m));
    m = (mt_params_memory){.values = s.values, .elements = 4};
    REFUSED(ctx, MT_ERR_ARGUMENT, "mt_param_bind|5 elements|elements is 4|'b'", mt_param_bind(ctx, s.b, &m));
    m = (mt_params_memory){.master = s.values, .elements = FLOATS};
    REFUSED(ctx, MT_ERR_ARGUMENT, "master|f32", mt_params_bind(ctx, s.r.params, &m));
    REFUSED(ctx, MT_ERR_ARGUMENT, "param is NULL", mt_param_bind(ctx, NULL, &m));
    REFUSED(ctx, MT_ERR_ARGUMENT, "memory is NULL", mt_param_bind(ctx, s.a, NULL));
    REFUSED(ctx, MT_ERR_ARGUMENT, "params is NULL", mt_params_bind(ctx, NULL, &m));
    assert_int_equal(mt_params_bind(NULL, s.r.params, &m), MT_ERR_ARGUMENT);
    assert_int_equal(mt_param_bind(NULL, s.a, &m), MT_ERR_ARGUMENT);
    small_close_untouched(&s);
}

/* Too late: values and gradients after mt_params_init, a kind twice, moments after the optimizer, parameters after the
   memory. */
static void test_binding_too_late(void **state) {
    small s;
    mt_context *ctx;
    mt_param *p;
    mt_optimizer o;
    mt_param_desc more = {.name = "more", .rows = 1, .cols = 1};
    mt_data_parallel_desc share = {0};
    float m1[FLOATS], m2[FLOATS];
    mt_params_memory m;
    (void)state;
    small_open(&s, MT_F32, NULL);
    ctx = s.r.ctx;
    m = (mt_params_memory){.grads = s.grads, .elements = FLOATS};
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_bind(ctx, s.r.params, &m));
    REFUSED(ctx, MT_ERR_ARGUMENT, "mt_params_zero_grad|mt_params_init", mt_params_zero_grad(ctx, s.r.params));
    REFUSED(ctx, MT_ERR_ARGUMENT, "grads of 'a' are already", mt_params_bind(ctx, s.r.params, &m));
    REFUSED(ctx, MT_ERR_ARGUMENT, "grads of 'b' are already", mt_param_bind(ctx, s.b, &m));
    REFUSED(ctx, MT_ERR_ARGUMENT, "'more' comes after mt_params_bind", mt_params_add(ctx, s.r.params, &more, &p));
    REFUSED(ctx, MT_ERR_ARGUMENT, "mt_params_bind", mt_params_set_data_parallel(ctx, s.r.params, &share));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_init(ctx, s.r.params, 1));
    m = (mt_params_memory){.values = s.values, .elements = FLOATS};
    REFUSED(ctx, MT_ERR_ARGUMENT, "values of 'a' comes after mt_params_init", mt_params_bind(ctx, s.r.params, &m));
    REFUSED(ctx, MT_ERR_ARGUMENT, "values of 'b' comes after mt_params_init", mt_param_bind(ctx, s.b, &m));
    test_untouched("values", s.values, FLOATS, -1.0f);
    m = (mt_params_memory){.exp_avg = m1, .elements = FLOATS};
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_bind(ctx, s.r.params, &m));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_optimizer_create(ctx, s.r.params, NULL, &o));
    assert_true(o.m == NULL && o.v != NULL && m1[0] == 0.0f && m1[16] == 0.0f);
    m = (mt_params_memory){.exp_avg_sq = m2, .elements = FLOATS};
    REFUSED(ctx, MT_ERR_ARGUMENT, "exp_avg_sq of 'a' comes after mt_optimizer_create",
            mt_params_bind(ctx, s.r.params, &m));
    mt_optimizer_destroy(ctx, &o);
    test_paper_rank_close(&s.r);
    small_open(&s, MT_BF16, NULL);
    m = (mt_params_memory){.master = s.values, .elements = FLOATS};
    ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_params_bind(s.r.ctx, s.r.params, &m));
    ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_params_init(s.r.ctx, s.r.params, 1));
    REFUSED(s.r.ctx, MT_ERR_ARGUMENT, "masters of 2 parameters|stochastic_rounding",
            mt_optimizer_create(s.r.ctx, s.r.params, &(mt_optimizer_desc){.stochastic_rounding = 1}, &o));
    test_paper_rank_close(&s.r);
}

/* Every call that uses the parameters refuses an address that was changed by hand. */
static void refuses_changed(small *s, mt_optimizer *o, mt_checkpoint *c, const char *words) {
    mt_context *ctx = s->r.ctx;
    mt_params *params = s->r.params;
    mt_training_state state = {.step = 1};
    float norm, whole[12] = {0};
    mt_tensor m, v;
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_params_zero_grad(ctx, params));
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_params_init(ctx, params, 1));
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_params_bind(ctx, params, NULL));
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_accumulate_gradients(ctx, params));
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_sync_gradients_begin(ctx, params));
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_gradients_final(ctx, s->a, s->b));
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_sync_gradients(ctx, params));
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_gather_gradients(ctx, params));
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_grad_norm(ctx, params, &norm));
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_optimizer_step(ctx, o, 0.1f, 1.0f));
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_optimizer_moments(ctx, o, s->a, &m, &v));
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_optimizer_gather(ctx, o, s->a, MT_MASTER, whole));
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_optimizer_scatter(ctx, o, s->a, MT_MASTER, whole));
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_param_gather(ctx, params, s->a, s->a->value, whole));
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_param_scatter(ctx, s->a, whole, s->a->value));
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_check_param(ctx, "f", s->a));
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_checkpoint_save(ctx, c, &state));
    REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_checkpoint_load(ctx, c, 1, &state));
}

static void test_addresses_changed_by_hand(void **state) {
    small s;
    mt_optimizer o, second;
    mt_checkpoint *c;
    mt_checkpoint_desc d = {.directory = in_scratch("run"), .optimizer = &o};
    float other[FLOATS];
    mt_context *ctx;
    mt_params_memory m;
    (void)state;
    for (int i = 0; i < FLOATS; i++) other[i] = 5.0f;
    for (int bound = 0; bound < 2; bound++) {
        void *value, *grad;
        small_open(&s, MT_F32, NULL);
        ctx = s.r.ctx;
        m = (mt_params_memory){.values = s.values, .grads = s.grads, .elements = FLOATS};
        s.a->value.data = other; /* before */
        REFUSED(ctx, MT_ERR_ARGUMENT, "value.data of 'a'", mt_params_init(ctx, s.r.params, 1));
        REFUSED(ctx, MT_ERR_ARGUMENT, "value.data of 'a'", mt_params_bind(ctx, s.r.params, &m));
        s.a->value.data = NULL;
        if (bound) ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_bind(ctx, s.r.params, &m));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_init(ctx, s.r.params, 1));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_optimizer_create(ctx, s.r.params, NULL, &o));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_checkpoint_create(ctx, s.r.params, &d, &c));
        value = s.a->value.data;
        grad = s.a->grad.data;
        s.a->value.data = other;
        refuses_changed(&s, &o, c, "value.data of 'a'|by hand");
        REFUSED(ctx, MT_ERR_ARGUMENT, "value.data of 'a'", mt_optimizer_create(ctx, s.r.params, NULL, &second));
        s.a->value.data = value;
        s.a->grad.data = other;
        refuses_changed(&s, &o, c, "grad.data of 'a'|by hand");
        s.a->grad.data = grad;
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_zero_grad(ctx, s.r.params));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_optimizer_step(ctx, &o, 0.1f, 1.0f));
        test_untouched("other", other, FLOATS, 5.0f);
        mt_checkpoint_destroy(ctx, c);
        forget("run");
        mt_optimizer_destroy(ctx, &o);
        test_paper_rank_close(&s.r);
    }
}

/* A second init of a bound registry fills the caller's memory again. */
static void test_init_again(void **state) {
    small s, other;
    mt_params_memory m;
    (void)state;
    small_open(&s, MT_F32, NULL);
    small_open(&other, MT_F32, NULL);
    m = (mt_params_memory){.values = s.values, .grads = s.grads, .elements = 17};
    ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_params_bind(s.r.ctx, s.r.params, &m));
    test_untouched("values", s.values, FLOATS, -1.0f);
    ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_params_zero_grad(s.r.ctx, s.r.params));
    for (int i = 0; i < FLOATS; i++) assert_true(s.grads[i] == (i < 17 ? 0.0f : -1.0f));
    ASSERT_STATUS(other.r.ctx, MT_SUCCESS, mt_params_init(other.r.ctx, other.r.params, 3));
    for (int i = 0; i < 2; i++) {
        memset(s.values, 0xff, 17 * sizeof(float));
        ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_params_init(s.r.ctx, s.r.params, 3));
        assert_true(s.a->value.data == s.values && s.b->value.data == s.values + 12);
        assert_memory_equal(s.values, other.a->value.data, 12 * sizeof(float));
        assert_memory_equal(s.values + 12, other.b->value.data, 5 * sizeof(float));
        test_untouched("values", s.values + 17, FLOATS - 17, -1.0f);
    }
    test_paper_rank_close(&other.r);
    test_paper_rank_close(&s.r);
}

/* On the meta device bound memory is not read, and not counted. */
static void test_meta(void **state) {
    static float nowhere[4]; /* far less than the parameters need */
    mt_context_desc where = {.device = MT_DEVICE_META};
    mt_params_memory m = {.values = nowhere, .elements = 17};
    mt_optimizer o;
    float norm;
    size_t with, without;
    small s;
    (void)state;
    for (int bound = 0; bound < 2; bound++) {
        small_open(&s, MT_F32, &where);
        m.grads = (float *)((char *)nowhere + (1 << 20));
        if (bound) ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_params_bind(s.r.ctx, s.r.params, &m));
        ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_params_init(s.r.ctx, s.r.params, 1));
        *(bound ? &with : &without) = mt_context_allocated(s.r.ctx);
        ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_optimizer_create(s.r.ctx, s.r.params, NULL, &o));
        ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_sync_gradients(s.r.ctx, s.r.params));
        ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_grad_norm(s.r.ctx, s.r.params, &norm));
        ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_optimizer_step(s.r.ctx, &o, 0.1f, 1.0f));
        mt_optimizer_destroy(s.r.ctx, &o);
        test_paper_rank_close(&s.r);
    }
    assert_true(with == 0 && without > 0);
    for (int i = 0; i < 4; i++) assert_true(nowhere[i] == 0.0f);
}

typedef struct failing {
    int left; /* allocations that still succeed; -1: all */
    size_t held;
} failing;

static void *failing_alloc(void *user, size_t bytes, size_t alignment) {
    failing *f = (failing *)user;
    void *ptr = NULL;
    if (f->left == 0 || posix_memalign(&ptr, alignment, bytes) != 0) return NULL;
    if (f->left > 0) f->left--;
    f->held += bytes;
    return ptr;
}

static void failing_free(void *user, void *ptr, size_t bytes) {
    ((failing *)user)->held -= bytes;
    free(ptr);
}

/* When the registry cannot allocate what is not bound, nothing is bound, and a second call may succeed. */
static void test_memory_that_runs_out(void **state) {
    failing f = {-1, 0};
    mt_context_desc where = {.arena_bytes = 1 << 16, .allocator = {failing_alloc, failing_free, &f}};
    mt_params_memory m;
    size_t held;
    small s;
    (void)state;
    small_open(&s, MT_F32, &where);
    m = (mt_params_memory){.values = s.values, .elements = FLOATS};
    held = f.held;
    f.left = 0;
    assert_int_equal(mt_params_bind(s.r.ctx, s.r.params, &m), MT_ERR_MEMORY);
    assert_null(s.a->value.data);
    assert_int_equal(f.held, held);
    REFUSED(s.r.ctx, MT_ERR_ARGUMENT, "mt_params_init first", mt_params_zero_grad(s.r.ctx, s.r.params));
    f.left = -1;
    ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_param_set_weight_decay(s.r.ctx, s.a, 1)); /* nothing was bound */
    ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_params_bind(s.r.ctx, s.r.params, &m));
    ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_params_zero_grad(s.r.ctx, s.r.params));
    assert_true(s.a->value.data == s.values && f.held > held);
    test_untouched("values", s.values, FLOATS, -1.0f);
    test_paper_rank_close(&s.r);
    assert_int_equal(f.held, 0);
}

/* ---- ranks that bind different things ---------------------------------------------------------------------------- */

enum { ODD_NONE, ODD_UNBOUND, ODD_KIND, ODD_CAPACITY, ODD_POINTER, ODD_ONE, ODDS };

typedef struct odd_job {
    int what, rank;
    mt_status status[4];
    char text[4][MT_ERROR_BYTES];
} odd_job;

static mt_status odd_body(const odd_job *job, test_rank *r) {
    int odd = mt_comm_rank(r->world) == job->rank ? job->what : ODD_NONE;
    mt_param_desc d = {.name = "w", .rows = 8, .cols = 6, .placement = MT_SPLIT_ROWS, .init_std = 0.1f};
    mt_params_memory m = {.values = test_floats(r, 48, -1.0f), .grads = test_floats(r, 48, -1.0f), .elements = 48};
    mt_param *p;
    MT_TRY(mt_params_add(r->ctx, r->params, &d, &p));
    if (odd == ODD_KIND) m.grads = NULL;
    if (odd == ODD_CAPACITY) m.elements = 23;
    if (odd == ODD_POINTER) p->grad.data = test_floats(r, 48, 1.0f);
    if (job->what == ODD_ONE) {
        if (odd) MT_TRY(mt_param_bind(r->ctx, p, &m));
        return mt_params_init(r->ctx, r->params, 1);
    }
    if (odd != ODD_UNBOUND) MT_TRY(mt_params_bind(r->ctx, r->params, &m));
    return mt_params_init(r->ctx, r->params, 1);
}

static mt_status odd_rank(mt_comm *world, void *user) {
    odd_job *job = (odd_job *)user;
    int rank = mt_comm_rank(world);
    test_rank r;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, NULL, &r));
    job->status[rank] = odd_body(job, &r);
    snprintf(job->text[rank], sizeof job->text[rank], "%s", mt_last_error(r.ctx));
    MT_TRY(mt_barrier(r.ctx, world)); /* the communicators still work */
    test_rank_close(&r);
    return MT_SUCCESS;
}

/* Every rank gets the error, at once. */
static void test_ranks_that_bind_different_things(void **state) {
    static const char *const words[ODDS] = {"",
                                            "call is|mt_params_bind|mt_params_init",
                                            "w is|bound values, grads",
                                            "error is|need 24 elements|elements is 23",
                                            "error is|grad.data of 'w' was changed by hand",
                                            "mt_params_init: w is|bound values, grads"};
    (void)state;
    for (int what = 0; what < ODDS; what++)
        for (int rank = 0; rank < 4; rank += 3) {
            odd_job job = {.what = what, .rank = rank};
            test_launch(4, odd_rank, &job);
            for (int i = 0; i < 4; i++) {
                if (job.status[i] != (what ? MT_ERR_MISMATCH : MT_SUCCESS))
                    fail_msg("difference %d: rank %d has %s, %s", what, i, mt_status_name(job.status[i]), job.text[i]);
                if (!test_has_words(job.text[i], words[what]))
                    fail_msg("'%s' is not all in '%s'", words[what], job.text[i]);
            }
        }
}

/* One of two data ranks has changed an address. Saving a checkpoint tells the other rank; in a sum, the other rank gets
   an error when this one leaves. */
static mt_status changed_body(test_rank *r, int call, mt_checkpoint **c, mt_optimizer *o) {
    mt_checkpoint_desc d = {.directory = in_scratch("run")};
    mt_data_parallel_desc share = {.sharded_optimizer = 1};
    mt_param_desc w = {.name = "w", .rows = 8, .cols = 6};
    mt_training_state state = {.step = 1};
    float *other = test_floats(r, 48, 5.0f);
    int odd = mt_comm_rank(r->world) == 1;
    float norm;
    mt_param *p;
    mt_status status;
    MT_TRY(mt_params_set_data_parallel(r->ctx, r->params, &share));
    MT_TRY(mt_params_add(r->ctx, r->params, &w, &p));
    MT_TRY(mt_params_init(r->ctx, r->params, 1));
    MT_TRY(mt_optimizer_create(r->ctx, r->params, NULL, o));
    MT_TRY(mt_checkpoint_create(r->ctx, r->params, &d, c));
    if (call > 0) MT_TRY(mt_sync_gradients(r->ctx, r->params));
    if (odd) p->grad.data = other;
    CHECK(mt_checkpoint_save(r->ctx, *c, &state) == MT_ERR_ARGUMENT);
    CHECK(strstr(mt_last_error(r->ctx), "grad.data of 'w' was changed by hand") != NULL);
    status = call == 0   ? mt_sync_gradients(r->ctx, r->params)
             : call == 1 ? mt_grad_norm(r->ctx, r->params, &norm)
                         : mt_optimizer_step(r->ctx, o, 0.1f, 1.0f);
    CHECK(status == (odd ? MT_ERR_ARGUMENT : MT_ERR_PEER));
    for (int i = 0; i < 48; i++) CHECK(other[i] == 5.0f);
    return MT_SUCCESS;
}

static mt_status changed_rank(mt_comm *world, void *user) {
    mt_checkpoint *c = NULL;
    mt_optimizer o = {0};
    test_rank r;
    mt_status status;
    MT_TRY(test_rank_open(world, (mt_grid_desc){0}, NULL, &r));
    status = changed_body(&r, *(const int *)user, &c, &o);
    mt_checkpoint_destroy(r.ctx, c);
    mt_optimizer_destroy(r.ctx, &o);
    test_rank_close(&r);
    return status;
}

static void test_an_address_changed_on_one_rank(void **state) {
    (void)state;
    for (int call = 0; call < 3; call++) {
        test_launch(2, changed_rank, &call);
        forget("run");
    }
}

/* The state of a sharded optimizer cannot be bound. */
static mt_status sharded_rank(mt_comm *world, void *user) {
    mt_data_parallel_desc share = {.sharded_optimizer = 1};
    mt_param_desc d = {.name = "w", .rows = 8, .cols = 6};
    mt_params_memory m = {.elements = 48};
    mt_optimizer o;
    mt_param *p;
    test_rank r;
    (void)user;
    MT_TRY(test_rank_open(world, (mt_grid_desc){0}, NULL, &r));
    MT_TRY(mt_params_add(r.ctx, r.params, &d, &p));
    m.exp_avg = test_floats(&r, 48, -1.0f);
    MT_TRY(mt_param_bind(r.ctx, p, &m));
    MT_TRY(mt_params_set_data_parallel(r.ctx, r.params, &share));
    m = (mt_params_memory){.exp_avg_sq = test_floats(&r, 48, -1.0f), .elements = 48};
    CHECK(mt_params_bind(r.ctx, r.params, &m) == MT_ERR_ARGUMENT);
    CHECK(strstr(mt_last_error(r.ctx), "exp_avg_sq cannot be bound, because the 2 data ranks") != NULL);
    MT_TRY(mt_params_init(r.ctx, r.params, 1));
    CHECK(mt_optimizer_create(r.ctx, r.params, NULL, &o) == MT_ERR_ARGUMENT);
    CHECK(strstr(mt_last_error(r.ctx), "the 2 data ranks share") != NULL);
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_the_state_of_a_sharded_optimizer(void **state) {
    (void)state;
    test_launch(2, sharded_rank, NULL);
}

typedef struct layers_of_all_kinds {
    mt_column_parallel_linear column;
    mt_row_parallel_linear row;
    mt_norm_layer norm;
    mt_linear_saved saved;
    mt_norm_saved norm_saved;
    mt_tensor x, y;
} layers_of_all_kinds;

/* All calls of a layer refuse its parameters after a change by hand. */
static void layers_refuse(mt_context *ctx, layers_of_all_kinds *l, const char *words) {
    mt_tensor x = l->x, y = l->y, none = mt_none();
    if (strstr(words, "column")) {
        REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_parallel_linear_forward(ctx, &l->column, x, y, NULL));
        REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_parallel_linear_backward(ctx, &l->column, y, none, &l->saved));
        REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_column_parallel_linear_product(ctx, &l->column, x, 0, y));
        REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_parallel_linear_forward_shared(ctx, &l->column, 1, &x, &y, &l->saved));
        REFUSED(ctx, MT_ERR_ARGUMENT, words,
                mt_column_parallel_activation_forward(ctx, &l->column, MT_GELU_TANH, x, y));
    } else if (strstr(words, "row")) {
        REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_parallel_linear_forward(ctx, &l->row, x, y, NULL));
        REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_parallel_linear_backward(ctx, &l->row, y, none, &l->saved));
        REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_parallel_linear_forward_shared(ctx, &l->row, 1, &x, &y, &l->saved));
    } else {
        REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_norm_layer_forward(ctx, &l->norm, x, y, NULL));
        REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_norm_layer_backward(ctx, &l->norm, x, none, y, &l->norm_saved));
    }
}

static void test_layers_whose_memory_changed_by_hand(void **state) {
    mt_linear_desc column = {.in_features = 4, .out_features = 4};
    mt_linear_desc row = {.in_features = 4, .out_features = 4, .input_is_parallel = 1};
    mt_norm_layer_desc norm = {.features = 4};
    layers_of_all_kinds l;
    test_rank r;
    (void)state;
    memset(&l, 0, sizeof l);
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "column", &column, &l.column));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_row_parallel_linear_create(r.ctx, r.params, "row", &row, &l.row));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_norm_layer_create(r.ctx, r.params, "norm", &norm, &l.norm));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    l.x = test_tensor(&r, 2, 4, 1.0f);
    l.y = test_tensor(&r, 2, 4, 2.0f);
    l.saved.x = l.x;
    for (int i = 0; i < mt_params_count(r.params); i++) {
        mt_param *p = mt_params_at(r.params, i);
        mt_tensor value = p->value, grad = p->grad;
        char words[MT_NAME_MAX + 32];
        p->value.data = test_floats(&r, 16, 5.0f);
        snprintf(words, sizeof words, "value.data of '%s'", p->name);
        layers_refuse(r.ctx, &l, words);
        p->value = value;
        p->grad.data = test_floats(&r, 16, 5.0f);
        snprintf(words, sizeof words, "grad.data of '%s'", p->name);
        layers_refuse(r.ctx, &l, words);
        p->grad = grad;
    }
    test_untouched("y", l.y.data, 8, 2.0f);
    test_paper_rank_close(&r);
}

/* The positions of a GPT are no layer. */
static void test_positions_changed_by_hand(void **state) {
    mt_gpt_desc d = {.vocab = 8, .layers = 1, .max_seq = 4, .layer = {.hidden = 8, .heads = 2}};
    mt_batch batch = {.sequences = 1, .seq = 4};
    int32_t ids[4] = {1, 2, 3, 4};
    mt_tensor logits;
    mt_gpt gpt;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_create(r.ctx, r.params, &d, &gpt));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    logits = test_tensor(&r, 4, 8, 7.0f);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_logits(r.ctx, &gpt, &batch, ids, logits));
    gpt.model.positions->value.data = test_floats(&r, 32, 5.0f);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_gpt_logits|value.data of 'embedding.position_embeddings.weight'",
            mt_gpt_logits(r.ctx, &gpt, &batch, ids, logits));
    test_paper_rank_close(&r);
}

/* A parameter that mt_create_end removes is not bound any more. */
static void test_a_bound_parameter_is_removed(void **state) {
    mt_param_desc d = {.rows = 1, .cols = 4};
    float values[4] = {0}, grads[4] = {0};
    mt_params_memory m = {.values = values, .grads = grads, .elements = 4};
    mt_param *a, *b;
    size_t mark;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &d, &a));
    mark = mt_params_mark(r.params);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &d, &b));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_param_bind(r.ctx, b, &m));
    assert_int_equal(mt_create_end(r.params, mark, NULL, 0, MT_ERR_SHAPE), MT_ERR_SHAPE);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
    assert_non_null(a->value.data);
    assert_non_null(a->grad.data);
    test_paper_rank_close(&r);
}

/* Moments in the memory of values would be set to zero with them. */
static void test_moments_in_the_memory_of_the_registry(void **state) {
    mt_param_desc d = {.rows = 1, .cols = 4, .init_value = 2.0f};
    mt_params_memory m = {.elements = 4};
    mt_param *a;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &d, &a));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    m.exp_avg = (float *)a->value.data;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_params_bind|values|exp_avg|begin 0 bytes", mt_params_bind(r.ctx, r.params, &m));
    m.exp_avg = (float *)a->grad.data + 3;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_params_bind|grads|exp_avg|begin 12 bytes", mt_params_bind(r.ctx, r.params, &m));
    test_paper_rank_close(&r);
}

/* One step with gradients of 1, after which the first moment is 0.1 in each element. */
static void one_step(small *s, mt_optimizer *o) {
    ASSERT_STATUS(s->r.ctx, MT_SUCCESS, mt_params_zero_grad(s->r.ctx, s->r.params));
    for (int i = 0; i < 12; i++) ((float *)s->a->grad.data)[i] = 1.0f;
    ASSERT_STATUS(s->r.ctx, MT_SUCCESS, mt_optimizer_step(s->r.ctx, o, 0.1f, 1.0f));
}

/* Bits of `bound`: exp_avg, exp_avg_sq and master of all parameters; 8: of one parameter only. */
static void bind_states(small *s, int bound, float state[3][FLOATS]) {
    mt_params_memory m = {.elements = FLOATS};
    m.exp_avg = bound & 1 ? state[0] : NULL;
    m.exp_avg_sq = bound & 2 ? state[1] : NULL;
    m.master = bound & 4 ? state[2] : NULL;
    if (bound & 8) ASSERT_STATUS(s->r.ctx, MT_SUCCESS, mt_param_bind(s->r.ctx, s->a, &m));
    else ASSERT_STATUS(s->r.ctx, MT_SUCCESS, mt_params_bind(s->r.ctx, s->r.params, &m));
    ASSERT_STATUS(s->r.ctx, MT_SUCCESS, mt_params_init(s->r.ctx, s->r.params, 1));
}

/* The state of an optimizer that is in use stays as it is: a second one gets no bound state, and state of its own where
   nothing is bound. After mt_optimizer_destroy the next one begins with zeros. */
static void test_a_second_optimizer(void **state) {
    static const char words[] = "mt_optimizer_create|is bound, and another optimizer uses it|mt_optimizer_destroy";
    static const int ways[] = {0, 1, 2, 3, 7, 9, 10, 15};
    (void)state;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        float memory[3][FLOATS] = {{0}}, before[3][FLOATS];
        mt_optimizer first, second = {.step = 77}, third;
        mt_tensor m, v;
        small s;
        small_open(&s, ways[i] & 4 ? MT_BF16 : MT_F32, NULL);
        bind_states(&s, ways[i], memory);
        ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_optimizer_create(s.r.ctx, s.r.params, NULL, &first));
        one_step(&s, &first);
        memcpy(before, memory, sizeof before);
        if (ways[i]) {
            REFUSED(s.r.ctx, MT_ERR_ARGUMENT, words, mt_optimizer_create(s.r.ctx, s.r.params, NULL, &second));
            assert_true(second.step == 77 && second.m == NULL);
        } else {
            ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_optimizer_create(s.r.ctx, s.r.params, NULL, &second));
            mt_optimizer_destroy(s.r.ctx, &second);
        }
        assert_memory_equal(memory, before, sizeof before);
        ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_optimizer_moments(s.r.ctx, &first, s.a, &m, &v));
        for (int k = 0; k < 12; k++) assert_true(fabsf(((float *)m.data)[k] - 0.1f) < 1e-6f && first.step == 1);
        mt_optimizer_destroy(s.r.ctx, &first);
        mt_optimizer_destroy(s.r.ctx, &first);
        ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_optimizer_create(s.r.ctx, s.r.params, NULL, &third));
        ASSERT_STATUS(s.r.ctx, MT_SUCCESS, mt_optimizer_moments(s.r.ctx, &third, s.a, &m, &v));
        for (int k = 0; k < 12; k++) assert_true(((float *)m.data)[k] == 0.0f && third.step == 0);
        one_step(&s, &third);
        mt_optimizer_destroy(s.r.ctx, &third);
        test_paper_rank_close(&s.r);
    }
}

static int open_all(void **state) {
    (void)state;
    return scratch_open("test_bind");
}

static int close_all(void **state) {
    (void)state;
    return scratch_close();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_same_bits_on_every_split),
        cmocka_unit_test(test_memory_without_gaps_is_sent_as_it_is),
        cmocka_unit_test(test_the_same_bits_in_invariant_mode),
        cmocka_unit_test(test_checkpoints_and_hash_logs),
        cmocka_unit_test(test_memory_that_does_not_fit),
        cmocka_unit_test(test_binding_too_late),
        cmocka_unit_test(test_addresses_changed_by_hand),
        cmocka_unit_test(test_init_again),
        cmocka_unit_test(test_meta),
        cmocka_unit_test(test_memory_that_runs_out),
        cmocka_unit_test(test_ranks_that_bind_different_things),
        cmocka_unit_test(test_an_address_changed_on_one_rank),
        cmocka_unit_test(test_the_state_of_a_sharded_optimizer),
        cmocka_unit_test(test_layers_whose_memory_changed_by_hand),
        cmocka_unit_test(test_positions_changed_by_hand),
        cmocka_unit_test(test_a_bound_parameter_is_removed),
        cmocka_unit_test(test_moments_in_the_memory_of_the_registry),
        cmocka_unit_test(test_a_second_optimizer),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
