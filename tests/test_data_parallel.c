/* test_data_parallel.c - tests data parallelism: gradients in buckets that are communicated during the backward
   pass, the optimizer sharded over the data group, and skipped steps. The bits are compared with runs without these,
   calls with the documentation, and memory with the formula.
       cc -O1 -g -I. -Itests tests/test_data_parallel.c -lm -lpthread */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#define GPT_STEPS 3
#include "mt_test_gpt.h"
#include "mt_test_ranks.h"

/* ---- buckets, parameter by parameter ----------------------------------------------------------------------------- */

#define MOST_PARAMS 12
#define CASES (test_all() ? 80 : 20)

typedef struct bucket_case {
    mt_grid_desc grid;
    int ranks;
} bucket_case;

/* A model drawn at random from a seed, the same on every rank. */
typedef struct drawn {
    test_rank *r;
    mt_param *list[MOST_PARAMS];
    int count;
    int said[MOST_PARAMS]; /* mt_gradients_final was called for the parameter */
} drawn;

/* The value that a rank adds to element k of a parameter in one of three micro-batches. Whole numbers make sums
   exact. */
static float share_of(int rank, int param, int64_t k, int micro) {
    uint64_t seed = (uint64_t)(((rank * 16 + param) * 4 + micro) * 1000 + k);
    return (float)(int)(test_random(&seed) % 17) - 8.0f;
}

static mt_status draw_model(test_rank *r, uint64_t *seed, drawn *d) {
    static const size_t sizes[] = {1, 64, 300, 1000, 4000, 0};
    mt_data_parallel_desc share = {.bucket_bytes = sizes[test_below(seed, 6)],
                                   .sharded_optimizer = (int)test_below(seed, 2)};
    int shared = 0;
    MT_TRY(test_rank_renew(r));
    memset(d, 0, sizeof *d);
    d->r = r;
    d->count = 1 + (int)test_below(seed, MOST_PARAMS);
    MT_TRY(mt_params_set_dtype(r->ctx, r->params, (mt_dtype)test_below(seed, 3)));
    MT_TRY(mt_params_set_data_parallel(r->ctx, r->params, &share));
    for (int i = 0; i < d->count; i++) {
        char name[16];
        mt_param_desc p = {
            .name = name, .rows = 1 + (int64_t)test_below(seed, 9), .cols = 1 + (int64_t)test_below(seed, 40)};
        int kind = (int)test_below(seed, 6);
        snprintf(name, sizeof name, "p%d", i);
        p.placement = kind == 1 || kind == 5 ? MT_SPLIT_ROWS : kind == 2 ? MT_SPLIT_COLS : MT_REPLICATED;
        p.sequence_partial = kind == 3;
        p.shared_embedding = kind == 5 && !shared++;
        MT_TRY(mt_params_add(r->ctx, r->params, &p, &d->list[i]));
    }
    return mt_params_init(r->ctx, r->params, *seed);
}

static int64_t place_of(const drawn *d, int i) { return (float *)d->list[i]->grad.data - d->r->params->grads; }

/* The number of buckets that are being reduced, by the documentation: all their gradients are final, and none of them
   is first summed over another group. */
static int64_t buckets_gone(const drawn *d) {
    int64_t elements = d->r->params->elements, size = d->r->params->buckets.size, from = 0, gone = 0;
    for (int i = 0; i < d->count; i++) {
        int64_t end = place_of(d, i) + d->list[i]->grad.rows * d->list[i]->grad.cols;
        int other = d->list[i]->desc.sequence_partial || d->list[i]->desc.shared_embedding;
        if ((other || !d->said[i]) && end > from) from = end;
    }
    for (int64_t hi = elements; hi > 0 && (hi > size ? hi - size : 0) >= from; hi -= size) gone++;
    return gone;
}

/* Adds to a gradient. A bucket that was sent too early would lack this sum. */
static void add_gradient(const drawn *d, int i, int micro) {
    float *g = (float *)d->list[i]->grad.data;
    for (int64_t k = 0; k < d->list[i]->grad.rows * d->list[i]->grad.cols; k++)
        g[k] += share_of(mt_comm_rank(d->r->world), i, k, micro);
}

/* A step of three micro-batches, the last of which is communicated while it runs. For some gradients,
   mt_gradients_final is not called. */
static mt_status drawn_backward(drawn *d, uint64_t *seed, mt_collective kind) {
    mt_context *ctx = d->r->ctx;
    int begins = test_below(seed, 4) != 0, skips = (int)test_below(seed, 3), i, first;
    MT_TRY(mt_params_zero_grad(ctx, d->r->params));
    mt_comm_ledger_reset(d->r->grid.dp_cp);
    for (int micro = 0; micro < 2; micro++)
        for (i = 0; i < d->count; i++) add_gradient(d, i, micro);
    for (i = 0; i < d->count; i += 2)
        MT_TRY(mt_gradients_final(ctx, d->list[i], d->list[i])); /* has no effect before mt_sync_gradients_begin */
    CHECK(mt_comm_ledger(d->r->grid.dp_cp).calls[kind] == 0);
    if (begins) MT_TRY(mt_sync_gradients_begin(ctx, d->r->params));
    for (i = d->count - 1; i >= 0; i = first - 1) { /* ranges of parameters, from the last to the first */
        first = i - (int)test_below(seed, (size_t)(i < 2 ? i + 1 : 3));
        for (int j = first; j <= i; j++) add_gradient(d, j, 2);
        if (skips == 1 && test_below(seed, 3) == 0) continue;
        MT_TRY(mt_gradients_final(ctx, d->list[first], d->list[i]));
        for (int j = first; j <= i; j++) d->said[j] = 1;
        if (mt_comm_size(d->r->grid.dp_cp) > 1)
            CHECK(mt_comm_ledger(d->r->grid.dp_cp).calls[kind] == (begins ? (uint64_t)buckets_gone(d) : 0));
    }
    return mt_sync_gradients(ctx, d->r->params);
}

/* Returns 1 if the gradient of `rank` belongs to the sum that this rank gets. */
static int is_summed(const test_rank *r, const mt_param *p, int rank) {
    int t = rank % r->grid.tp_size, s = rank / r->grid.tp_size / mt_comm_size(r->grid.dp_cp), stages = r->grid.pp_size;
    int ends = (s == 0 || s == stages - 1) && (r->grid.pp_rank == 0 || r->grid.pp_rank == stages - 1);
    if (s != r->grid.pp_rank && !(p->desc.shared_embedding && ends)) return 0;
    return t == r->grid.tp_rank || p->desc.sequence_partial;
}

static mt_status drawn_sums(const drawn *d) {
    for (int i = 0; i < d->count; i++) {
        const float *g = (const float *)d->list[i]->grad.data;
        for (int64_t k = 0; k < d->list[i]->grad.rows * d->list[i]->grad.cols; k++) {
            float want = 0;
            for (int rank = 0; rank < mt_comm_size(d->r->world); rank++)
                for (int micro = 0; micro < 3 && is_summed(d->r, d->list[i], rank); micro++)
                    want += share_of(rank, i, k, micro);
            CHECK(g[k] == want);
        }
    }
    return MT_SUCCESS;
}

/* The expected ledger: every element is communicated once, in buckets of the configured size. */
static mt_status drawn_ledger(const drawn *d, mt_collective kind) {
    const mt_params *params = d->r->params;
    int64_t unit = 64 / (int64_t)mt_dtype_size(params->dtype), asked = (int64_t)(params->buckets.desc.bucket_bytes / 4);
    mt_ledger l = mt_comm_ledger(d->r->grid.dp_cp);
    if (params->buckets.desc.sharded_optimizer) unit *= mt_comm_size(d->r->grid.dp_cp);
    if (asked == 0) asked = params->buckets.desc.bucket_bytes ? 1 : params->elements;
    asked = test_ceil(asked < params->elements ? asked : params->elements, unit) * unit;
    CHECK(params->buckets.size == asked && params->elements % unit == 0);
    if (mt_comm_size(d->r->grid.dp_cp) == 1) return MT_SUCCESS;
    CHECK(l.calls[kind] == (uint64_t)test_ceil(params->elements, asked) &&
          l.bytes[kind] == (uint64_t)params->elements * 4);
    CHECK(l.calls[MT_ALL_REDUCE] + l.calls[MT_REDUCE_SCATTER] == l.calls[kind]);
    return MT_SUCCESS;
}

static mt_status bucket_body(test_rank *r) {
    for (int i = 0; i < CASES; i++) {
        uint64_t seed = (uint64_t)i;
        mt_collective kind;
        drawn d;
        MT_TRY(draw_model(r, &seed, &d));
        kind = r->params->buckets.desc.sharded_optimizer ? MT_REDUCE_SCATTER : MT_ALL_REDUCE;
        if (mt_comm_size(r->grid.dp_cp) == 1) kind = MT_ALL_REDUCE;
        MT_TRY(drawn_backward(&d, &seed, kind));
        MT_TRY(drawn_ledger(&d, kind));
        MT_TRY(mt_gather_gradients(r->ctx, r->params));
        MT_TRY(drawn_sums(&d));
        CHECK(mt_arena_mark(r->ctx) == 0);
    }
    return MT_SUCCESS;
}

static mt_status bucket_rank(mt_comm *world, void *user) {
    test_rank r;
    mt_status status;
    MT_TRY(test_rank_open(world, ((const bucket_case *)user)->grid, NULL, &r));
    status = bucket_body(&r);
    test_rank_close(&r);
    return status;
}

static void test_buckets(void **state) {
    static bucket_case cases[] = {{{1, 1, 1, 1}, 1}, {{1, 2, 1, 1}, 2}, {{1, 3, 1, 1}, 3}, {{2, 2, 1, 1}, 4},
                                  {{1, 4, 1, 1}, 4}, {{1, 2, 2, 1}, 4}, {{2, 2, 2, 1}, 8}, {{1, 1, 1, 2}, 2},
                                  {{2, 2, 1, 2}, 8}, {{1, 1, 2, 3}, 6}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) test_launch(cases[i].ranks, bucket_rank, &cases[i]);
}

/* ---- a GPT: the same bits, whatever the buckets, and with the state of the optimizer sharded or not -------------- */

#define STATE_FLOATS (1 << 17) /* values, masters and moments of all parameters */
#define MOST_RANKS 8

typedef struct found {
    float loss[GPT_STEPS], norm[GPT_STEPS];
    float state[STATE_FLOATS]; /* whole tensors on rank 0; the same on every split in invariant mode */
    int64_t count;
    uint64_t raw[MOST_RANKS]; /* a hash of what each rank holds */
    int64_t skipped[MOST_RANKS], steps[MOST_RANKS];
    mt_ledger data; /* of rank 0, in the last step */
} found;

/* An event in one of the steps. */
typedef enum event { NOTHING = 0, LEFT_OUT, BAD_GRADIENT, BAD_WEIGHT } event;

typedef struct training {
    gpt_run run;
    event event;
    int step, rank, param; /* step of the event; rank: world rank, the only one on which it happens */
    float bad;
    found *out;
} training;

static mt_status keep_state(gpt_worker *w, found *out, int rank) {
    float *all = (float *)calloc(STATE_FLOATS, sizeof *all);
    int64_t n = 0;
    mt_status status = all ? MT_SUCCESS : MT_ERR_MEMORY;
    for (int i = 0; status == MT_SUCCESS && i < mt_params_count(w->params); i++) {
        const mt_param *p = mt_params_at(w->params, i);
        int64_t size = p->desc.rows * p->desc.cols;
        if (n + 4 * size > STATE_FLOATS) abort();
        status = mt_param_gather(w->ctx, w->params, p, p->value, all + n);
        for (int k = 0; status == MT_SUCCESS && k < 3; k++)
            status = mt_optimizer_gather(w->ctx, &w->optimizer, p, (mt_optimizer_state)k, all + n + (k + 1) * size);
        n += 4 * size;
    }
    if (rank == 0 && all) memcpy(out->state, all, STATE_FLOATS * sizeof *all);
    if (rank == 0) out->count = n;
    free(all);
    return status;
}

static mt_status keep_raw(gpt_worker *w, found *out, int rank) {
    const mt_optimizer *o = &w->optimizer;
    const mt_params *params = w->params;
    mt_tensor values = mt_tensor_make(params->values, params->dtype, 1, params->elements);
    MT_TRY(mt_hash(w->ctx, values, 0, 0, values.cols, &out->raw[rank]));
    MT_TRY(mt_hash(w->ctx, mt_tensor_f32(o->m, 1, o->elements), 1, 0, values.cols, &out->raw[rank]));
    MT_TRY(mt_hash(w->ctx, mt_tensor_f32(o->v, 1, o->elements), 2, 0, values.cols, &out->raw[rank]));
    if (o->master)
        MT_TRY(mt_hash(w->ctx, mt_tensor_f32(o->master, 1, o->elements), 3, 0, values.cols, &out->raw[rank]));
    out->skipped[rank] = w->scaler.skipped;
    out->steps[rank] = o->step;
    return keep_state(w, out, rank);
}

/* The step in which the event happens on one rank. A weight that the event changes is restored afterwards. */
static mt_status eventful_step(gpt_worker *w, const training *t, int mine) {
    const mt_param *p = mt_params_at(w->params, t->param);
    char kept[4], *at = (char *)p->value.data;
    mt_status status;
    if (t->event == LEFT_OUT) return MT_SUCCESS;
    memcpy(kept, at, sizeof kept);
    if (mine && t->event == BAD_GRADIENT) w->spoil = (float *)p->grad.data;
    if (mine && t->event == BAD_WEIGHT)
        MT_TRY(mt_convert(w->ctx, mt_tensor_f32(&t->bad, 1, 1), mt_tensor_make(at, p->value.dtype, 1, 1)));
    w->bad = t->bad;
    status = gpt_step(w, t->step);
    w->spoil = NULL;
    if (t->event == BAD_WEIGHT) memcpy(at, kept, sizeof kept);
    return status;
}

static mt_status training_rank(mt_comm *world, void *user) {
    const training *t = (const training *)user;
    int rank = mt_comm_rank(world), steps = GPT_STEPS;
    static gpt_result unused; /* only rank 0 writes it */
    gpt_run run = t->run;
    gpt_worker w;
    mt_status status;
    run.out = &unused;
    status = gpt_open(world, &run, &w);
    for (int step = 0; status == MT_SUCCESS && step < steps; step++) {
        if (step == steps - 1) mt_comm_ledger_reset(w.grid.dp_cp);
        status = t->event && step == t->step ? eventful_step(&w, t, rank == t->rank) : gpt_step(&w, step);
    }
    if (rank == 0) {
        memcpy(t->out->loss, unused.loss, sizeof t->out->loss);
        memcpy(t->out->norm, unused.norm, sizeof t->out->norm);
        t->out->data = mt_comm_ledger(w.grid.dp_cp);
    }
    if (status == MT_SUCCESS) status = keep_raw(&w, t->out, rank);
    gpt_close(&w);
    return status;
}

static void train(training t, found *out) {
    memset(out, 0, sizeof *out);
    t.out = out;
    gpt_launch(&t.run, training_rank, &t);
}

#define SPLITS 6
static const int splits[SPLITS][3] = {{1, 2, 0}, {1, 4, 0}, {2, 2, 1}, {2, 2, 0}, {4, 2, 0}, {2, 4, 1}};
static const size_t bucket_sizes[] = {0, 4, 4096, 20000};

/* clip: far from every gradient's norm, so that the order in which the norm is summed cannot change the coefficient.
   ffn is not a multiple of 4 ranks, so rows of a matrix have padding between them. */
static gpt_run run_of(int split, mt_dtype dtype, int llama) {
    gpt_run r = {.tp = splits[split][0],
                 .data = splits[split][1],
                 .sequence_parallel = splits[split][2],
                 .dtype = dtype,
                 .llama = llama,
                 .clip = 1e9f,
                 .ffn = 45,
                 .weight_decay = 0.1f,
                 .loss_scale = dtype == MT_F16 ? 1024.0f : 1.0f};
    return r;
}

static void assert_same(const gpt_run *r, const found *a, const found *b, int norms) {
    for (int i = 0; i < GPT_STEPS; i++) {
        if (memcmp(&a->loss[i], &b->loss[i], sizeof(float)) != 0)
            fail_msg("%s: step %d: loss %.9g, expected %.9g", gpt_name(r), i, (double)b->loss[i], (double)a->loss[i]);
        if (!(fabsf(a->norm[i] - b->norm[i]) <= (norms ? 0.0f : 1e-6f * a->norm[i])))
            fail_msg("%s: step %d: norm %.9g, expected %.9g", gpt_name(r), i, (double)b->norm[i], (double)a->norm[i]);
    }
    assert_int_equal(a->count, b->count);
    for (int64_t i = 0; i < a->count; i++)
        if (memcmp(&a->state[i], &b->state[i], sizeof(float)) != 0)
            fail_msg("%s: buckets of %zu, sharded %d: number %lld of the state is %.9g, expected %.9g", gpt_name(r),
                     r->share.bucket_bytes, r->share.sharded_optimizer, (long long)i, (double)b->state[i],
                     (double)a->state[i]);
}

/* A step sends over the data group: gradients once and, when sharded, parameters once; in invariant mode also the part
   of a shared embedding's gradient that belongs to the lookup. Two floats are for the norm, four bytes for the loss. */
static void assert_ledger(const gpt_run *r, const mt_ledger *l, int64_t elements, int64_t lookups, int64_t size) {
    uint64_t buckets = (uint64_t)test_ceil(elements, size), sharded = (uint64_t)r->share.sharded_optimizer;
    uint64_t scattered = sharded && !r->invariant, width = mt_dtype_size(r->dtype);
    assert_int_equal(l->calls[MT_ALL_REDUCE], 1 + (scattered ? 1 : buckets) + (lookups > 0));
    assert_int_equal(l->bytes[MT_ALL_REDUCE], 4 + (scattered ? 8 : 4 * (uint64_t)(elements + lookups)));
    assert_int_equal(l->calls[MT_REDUCE_SCATTER], scattered * buckets);
    assert_int_equal(l->bytes[MT_REDUCE_SCATTER], scattered * 4 * (uint64_t)elements);
    assert_int_equal(l->calls[MT_ALL_GATHER], sharded * buckets);
    assert_int_equal(l->bytes[MT_ALL_GATHER], sharded * width * (uint64_t)elements);
}

typedef struct sized {
    gpt_run run;
    int64_t elements, lookups, size;
    size_t allocated;
} sized;

/* How the registry of a run is divided, computed on a meta communicator, and the memory of the model. */
static sized size_of(const gpt_run *r) {
    sized s = {*r, 0, 0, 0, 0};
    mt_comm *world = NULL;
    gpt_worker w;
    s.run.device = MT_DEVICE_META;
    assert_int_equal(mt_comm_create_meta(r->tp * r->data, 0, &world), MT_SUCCESS);
    if (gpt_open(world, &s.run, &w) != MT_SUCCESS) fail_msg("%s: %s", gpt_name(r), mt_comm_last_error(world));
    s.elements = w.params->elements;
    s.lookups = w.params->gradients - s.elements;
    s.size = w.params->buckets.size;
    s.allocated = mt_context_allocated(w.ctx);
    gpt_close(&w);
    mt_comm_destroy(world);
    return s;
}

static void assert_variant(const gpt_run *plain, const found *want, size_t bytes, int sharded, int begins) {
    static found got;
    training t = {.run = *plain};
    sized s;
    t.run.share.bucket_bytes = bytes;
    t.run.share.sharded_optimizer = sharded;
    t.run.begins = begins;
    train(t, &got);
    assert_same(&t.run, want, &got, !sharded || plain->invariant > 0);
    s = size_of(&t.run);
    assert_ledger(&t.run, &got.data, s.elements, s.lookups, s.size);
}

/* Each size of buckets in one of three ways: sharded or not, reduced during the backward or after it. `turn` shifts the
   ways, so that the runs of a split have every size in every way, and so have the runs of a type. */
static void same_bits(gpt_run r, int turn) {
    static found want;
    training plain = {.run = r};
    train(plain, &want);
    assert_true(isfinite(want.loss[0]) && isfinite(want.norm[GPT_STEPS - 1]) &&
                want.loss[GPT_STEPS - 1] < want.loss[0]);
    for (int i = 0; i < (int)(sizeof bucket_sizes / sizeof *bucket_sizes); i++) {
        int way = 1 + (i + turn) % 3;
        if (!test_all() && i == turn % 4) continue;
        assert_variant(&r, &want, bucket_sizes[i], way / 2, way % 2);
    }
}

static void test_same_bits(void **state) {
    (void)state;
    for (int split = 0; split < SPLITS; split++) {
        for (int dtype = MT_F32; dtype <= MT_F16; dtype++)
            if (dtype == MT_F32 || test_takes((size_t)(split + dtype), 2))
                same_bits(run_of(split, (mt_dtype)dtype, (split + dtype) % 3), 4 * split + dtype);
        gpt_run r = run_of(split, split % 2 ? MT_BF16 : MT_F16, 0);
        r.stochastic = 1;
        same_bits(r, 4 * split + 3);
    }
}

/* Keys and values that several tensor ranks have: their gradients are summed before the buckets, and they count once in
   the norm. */
static void test_same_bits_copies(void **state) {
    static found one, two;
    (void)state;
    for (int layout = MT_QKV_PER_GROUP; layout <= MT_QKV_SEPARATE; layout += 2) {
        gpt_run r = run_of(4, MT_F32, 1); /* 4 tensor ranks and 2 data ranks */
        training alone = {.run = r}, split = {.run = r};
        alone.run.kv_heads = split.run.kv_heads = r.kv_heads = 1 + layout / 2;
        alone.run.qkv_layout = split.run.qkv_layout = r.qkv_layout = (mt_qkv_layout)layout;
        same_bits(r, layout);
        alone.run.tp = 1;
        train(alone, &one);
        train(split, &two);
        for (int i = 0; i < GPT_STEPS; i++) {
            assert_true(fabsf(one.loss[i] - two.loss[i]) <= 1e-5f * one.loss[i]);
            assert_true(fabsf(one.norm[i] - two.norm[i]) <= 1e-5f * one.norm[i]);
        }
    }
}

/* With clipping, whose coefficient depends on the norm: the bits are equal wherever the norm's are. */
static void test_same_bits_clipped(void **state) {
    static found want, got;
    (void)state;
    for (int split = 0; split < SPLITS; split++) {
        training t = {.run = run_of(split, MT_F32, split % 3)};
        t.run.clip = 0.1f;
        train(t, &want);
        assert_true(want.norm[0] > 0.1f);
        t.run.begins = 1;
        t.run.share.bucket_bytes = 4096;
        train(t, &got);
        assert_same(&t.run, &want, &got, 1);
        t.run.share.sharded_optimizer = 1;
        train(t, &got);
        for (int i = 0; i < GPT_STEPS; i++) {
            assert_true(fabsf(got.loss[i] - want.loss[i]) <= 1e-5f * want.loss[i]);
            assert_true(fabsf(got.norm[i] - want.norm[i]) <= 1e-4f * want.norm[i]);
        }
    }
}

/* Invariant mode: one rank with no options, and every split with all options, including clipping. */
static void test_same_bits_invariant(void **state) {
    static found want;
    (void)state;
    for (int dtype = MT_F32; dtype <= MT_F16; dtype++)
        for (int stochastic = 0; stochastic <= (dtype != MT_F32); stochastic++) {
            training one = {.run = run_of(0, (mt_dtype)dtype, stochastic)};
            one.run.tp = one.run.data = 1;
            one.run.invariant = 4;
            one.run.clip = 0.1f;
            one.run.stochastic = stochastic;
            train(one, &want);
            for (int split = 0; split < SPLITS; split++) {
                gpt_run r = one.run;
                r.tp = splits[split][0];
                r.data = splits[split][1];
                r.sequence_parallel = splits[split][2];
                assert_variant(&r, &want, bucket_sizes[split % 4], 1, split % 2);
                assert_variant(&r, &want, bucket_sizes[(split + 2) % 4], 0, 1);
            }
        }
}

/* ---- when buckets go out ----------------------------------------------------------------------------------------- */

/* The number of buckets in which all gradients are final when mt_gpt_backward ends: all except those of the embeddings
   and those that are first summed over tp ranks. */
static int64_t gpt_buckets_gone(const gpt_worker *w) {
    int64_t from = 0, gone = 0, size = w->params->buckets.size;
    for (int i = 0; i < mt_params_count(w->params); i++) {
        const mt_param *p = mt_params_at(w->params, i);
        int64_t end = (float *)p->grad.data - w->params->grads + p->grad.rows * p->grad.cols;
        if ((strncmp(p->name, "embedding.", 10) == 0 || p->desc.sequence_partial) && end > from) from = end;
    }
    for (int64_t hi = w->params->elements; hi > 0 && (hi > size ? hi - size : 0) >= from; hi -= size) gone++;
    return gone;
}

/* Four micro-batches and one reduction, most of which has started before the last backward ends. */
static mt_status timely_body(gpt_worker *w, mt_collective kind) {
    mt_ledger l = {{0}, {0}};
    int64_t gone = gpt_buckets_gone(w), all = test_ceil(w->params->elements, w->params->buckets.size);
    MT_TRY(mt_params_zero_grad(w->ctx, w->params));
    mt_comm_ledger_reset(w->grid.dp_cp);
    for (int i = 0; i < 4; i++) {
        l = mt_comm_ledger(w->grid.dp_cp);
        CHECK(l.calls[kind] == 0 && l.bytes[kind] == 0);
        MT_TRY(gpt_micro_batch(w, i, i == 3));
    }
    l = mt_comm_ledger(w->grid.dp_cp);
    CHECK(gone >= 3 && gone < all && l.calls[kind] == (uint64_t)gone);
    CHECK(l.bytes[kind] == (uint64_t)(gone * w->params->buckets.size * 4));
    MT_TRY(mt_sync_gradients(w->ctx, w->params));
    l = mt_comm_ledger(w->grid.dp_cp);
    CHECK(l.calls[kind] == (uint64_t)all && l.bytes[kind] == (uint64_t)w->params->elements * 4);
    return MT_SUCCESS;
}

static mt_status timely_rank(mt_comm *world, void *user) {
    gpt_worker w;
    const gpt_run *r = (const gpt_run *)user;
    mt_status status = gpt_open(world, r, &w);
    if (status == MT_SUCCESS) status = timely_body(&w, r->share.sharded_optimizer ? MT_REDUCE_SCATTER : MT_ALL_REDUCE);
    gpt_close(&w);
    return status;
}

static void test_buckets_go_out_during_the_backward(void **state) {
    (void)state;
    for (int split = 0; split < SPLITS; split++)
        for (int llama = 0; llama < 3; llama++) {
            gpt_run r = run_of(split, MT_F32, llama);
            r.share.bucket_bytes = 2048;
            r.share.sharded_optimizer = (split + llama) % 2;
            r.begins = 1;
            gpt_launch(&r, timely_rank, &r);
        }
}

/* A program with a parameter of its own, which is used after the GPT's backward: the buckets before it must wait,
   unless the program calls mt_gradients_final for it. */
static mt_status stranger_rank(mt_comm *world, void *user) {
    const int *says = (const int *)user;
    gpt_run run = run_of(0, MT_F32, 0);
    mt_data_parallel_desc share = {.bucket_bytes = 2048};
    mt_param_desc d = {.name = "stranger", .rows = 3, .cols = 5};
    mt_param *stranger;
    mt_gpt_desc model = gpt_model(&run);
    gpt_worker w;
    run.begins = 1;
    MT_TRY(gpt_open(world, &run, &w));
    mt_params_destroy(w.params);
    MT_TRY(mt_params_create(w.ctx, &w.grid, &w.params));
    MT_TRY(mt_params_set_data_parallel(w.ctx, w.params, &share));
    MT_TRY(mt_gpt_create(w.ctx, w.params, &model, &w.gpt));
    MT_TRY(mt_params_add(w.ctx, w.params, &d, &stranger));
    MT_TRY(mt_params_init(w.ctx, w.params, 1));
    mt_comm_ledger_reset(w.grid.dp_cp);
    if (*says) {
        run.begins = 0;
        MT_TRY(mt_sync_gradients_begin(w.ctx, w.params));
        MT_TRY(mt_fill(w.ctx, stranger->grad, 1.0f));
        MT_TRY(mt_gradients_final(w.ctx, stranger, stranger));
    }
    MT_TRY(gpt_micro_batch(&w, 0, 1));
    CHECK((int64_t)mt_comm_ledger(w.grid.dp_cp).calls[MT_ALL_REDUCE] == (*says ? gpt_buckets_gone(&w) : 0));
    /* after mt_gradients_final, it already contains the sum */
    MT_TRY(mt_fill(w.ctx, stranger->grad, *says ? 2.0f : 1.0f));
    MT_TRY(mt_sync_gradients(w.ctx, w.params));
    CHECK(((float *)stranger->grad.data)[14] == 2.0f);
    gpt_close(&w);
    return MT_SUCCESS;
}

static void test_parameters_of_ones_own(void **state) {
    (void)state;
    for (int says = 0; says < 2; says++) test_launch(2, stranger_rank, &says);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

typedef struct memory_case {
    mt_dtype dtype;
    int stochastic, data;
    double fixed, shared; /* bytes per parameter: fixed + shared / data ranks */
} memory_case;

static const memory_case memory_cases[] = {{MT_F32, 0, 1, 8, 8},   {MT_F32, 0, 2, 8, 8},    {MT_F32, 0, 4, 8, 8},
                                           {MT_BF16, 0, 1, 6, 12}, {MT_BF16, 0, 2, 6, 12},  {MT_F16, 0, 4, 6, 12},
                                           {MT_BF16, 1, 4, 6, 8},  {MT_BF16, 0, 64, 6, 12}, {MT_F32, 0, 512, 8, 8}};

/* Parameters without padding, for which the formula is exact, on a real and on the meta device. */
static mt_status memory_body(test_rank *r, const memory_case *c, int sharded) {
    mt_data_parallel_desc share = {.bucket_bytes = 1 << 16, .sharded_optimizer = sharded};
    mt_optimizer_desc adamw = {.stochastic_rounding = c->stochastic};
    mt_optimizer o;
    mt_param *p;
    size_t before = mt_context_allocated(r->ctx);
    double want;
    MT_TRY(mt_params_set_dtype(r->ctx, r->params, c->dtype));
    MT_TRY(mt_params_set_data_parallel(r->ctx, r->params, &share));
    for (int i = 0; i < 5; i++) {
        char name[8];
        mt_param_desc d = {.name = name, .rows = 64 << i, .cols = 512};
        snprintf(name, sizeof name, "p%d", i);
        MT_TRY(mt_params_add(r->ctx, r->params, &d, &p));
    }
    MT_TRY(mt_params_init(r->ctx, r->params, 1));
    MT_TRY(mt_optimizer_create(r->ctx, r->params, &adamw, &o));
    want = (double)mt_params_elements(r->params) * (c->fixed + c->shared / (sharded ? c->data : 1));
    CHECK((double)(mt_context_allocated(r->ctx) - before) == want);
    mt_optimizer_destroy(r->ctx, &o);
    CHECK((double)(mt_context_allocated(r->ctx) - before) == (double)mt_params_elements(r->params) * c->fixed);
    return MT_SUCCESS;
}

static mt_status memory_rank(mt_comm *world, void *user) {
    const memory_case *c = (const memory_case *)user;
    mt_grid_desc shape = {.dp = c->data};
    test_rank r;
    mt_status status;
    MT_TRY(test_rank_open(world, shape, NULL, &r));
    status = memory_body(&r, c, 1);
    if (status == MT_SUCCESS) status = test_rank_renew(&r);
    if (status == MT_SUCCESS) status = memory_body(&r, c, 0);
    test_rank_close(&r);
    return status;
}

static void test_memory_by_the_formula(void **state) {
    mt_context_desc paper = {.device = MT_DEVICE_META};
    (void)state;
    for (size_t i = 0; i < sizeof memory_cases / sizeof *memory_cases; i++) {
        memory_case c = memory_cases[i];
        test_rank r;
        test_paper_rank(c.data, c.data / 2, (mt_grid_desc){1, c.data, 1, 1}, &paper, &r);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, memory_body(&r, &c, 1));
        test_paper_rank_close(&r);
        if (c.data <= 4) test_launch(c.data, memory_rank, &c);
    }
}

/* ---- the state of the optimizer ---------------------------------------------------------------------------------- */

/* Half of the steps on one split and half on another, with the whole state copied between them. */
typedef struct move {
    gpt_run run;
    int from, to; /* steps */
    float *state; /* input and output: values, then exp_avg, exp_avg_sq and master of each parameter */
    found *out;
} move;

/* Overwrites other values, to detect a rank that gets none. */
static mt_status put_state(gpt_worker *w, const float *state, int steps) {
    int64_t n = 0;
    for (int i = 0; i < mt_params_count(w->params); i++) {
        const mt_param *p = mt_params_at(w->params, i);
        int64_t size = p->desc.rows * p->desc.cols;
        if (!w->optimizer.master) MT_TRY(mt_param_scatter(w->ctx, p, state + n, p->value));
        for (int k = 0; k < 3; k++)
            MT_TRY(mt_optimizer_scatter(w->ctx, &w->optimizer, p, (mt_optimizer_state)k, state + n + (k + 1) * size));
        n += 4 * size;
    }
    w->optimizer.step = steps;
    return MT_SUCCESS;
}

static mt_status move_rank(mt_comm *world, void *user) {
    const move *m = (const move *)user;
    static gpt_result unused;
    gpt_run run = m->run;
    gpt_worker w;
    mt_status status;
    run.out = &unused;
    status = gpt_open(world, &run, &w);
    if (status == MT_SUCCESS && m->from > 0) {
        for (int i = 0; i < mt_params_count(w.params); i++)
            MT_TRY(mt_fill(w.ctx, mt_params_at(w.params, i)->value, 0.0f));
        status = put_state(&w, m->state, m->from);
    }
    for (int step = m->from; status == MT_SUCCESS && step < m->to; step++) status = gpt_step(&w, step);
    if (status == MT_SUCCESS) status = keep_state(&w, m->out, mt_comm_rank(world));
    gpt_close(&w);
    return status;
}

static void test_state_moves_between_splits(void **state) {
    static found all, half, rest;
    (void)state;
    for (int dtype = MT_F32; dtype <= MT_F16; dtype++)
        for (int split = 0; split < SPLITS; split++) {
            gpt_run r = run_of(split, (mt_dtype)dtype, split % 2);
            r.invariant = 4;
            r.stochastic = dtype == MT_BF16 && split % 2;
            r.share.sharded_optimizer = 1;
            r.share.bucket_bytes = bucket_sizes[split % 4];
            move whole = {.run = r, .to = GPT_STEPS, .out = &all}, first = {.run = r, .to = 2, .out = &half}, second;
            gpt_launch(&r, move_rank, &whole);
            gpt_launch(&r, move_rank, &first);
            second = first;
            second.from = 2;
            second.to = GPT_STEPS;
            second.state = half.state;
            second.out = &rest;
            for (int other = 0; other < 2; other++) {
                int to = (split + 1 + other) % SPLITS;
                second.run.tp = splits[to][0];
                second.run.data = splits[to][1];
                second.run.sequence_parallel = splits[to][2];
                second.run.share.sharded_optimizer = !other;
                second.run.share.bucket_bytes = 4096;
                gpt_launch(&second.run, move_rank, &second);
                if (memcmp(all.state, rest.state, sizeof all.state) != 0)
                    fail_msg("%s: other bits after the state has moved there", gpt_name(&second.run));
            }
        }
}

/* Reading returns what was written, including the sign of a zero, on every rank. Padding is not changed. */
static mt_status read_body(test_rank *r, int sharded) {
    mt_data_parallel_desc share = {.bucket_bytes = 100, .sharded_optimizer = sharded};
    mt_param_desc d[] = {{.name = "rows", .rows = 7, .cols = 13, .placement = MT_SPLIT_ROWS},
                         {.name = "cols", .rows = 5, .cols = 9, .placement = MT_SPLIT_COLS, .init_std = 1},
                         {.name = "all", .rows = 3, .cols = 31}};
    mt_optimizer o;
    mt_param *p[3];
    MT_TRY(mt_params_set_dtype(r->ctx, r->params, MT_BF16));
    MT_TRY(mt_params_set_data_parallel(r->ctx, r->params, &share));
    for (int i = 0; i < 3; i++) MT_TRY(mt_params_add(r->ctx, r->params, &d[i], &p[i]));
    MT_TRY(mt_params_init(r->ctx, r->params, 1));
    MT_TRY(mt_optimizer_create(r->ctx, r->params, NULL, &o));
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 3; k++) {
            int64_t n = d[i].rows * d[i].cols, local = p[i]->grad.rows * p[i]->grad.cols;
            float *x = test_noise(r, n, (uint64_t)(10 * i + k), 1.0f), *back = test_floats(r, n, 7.0f);
            mt_tensor shard = test_tensor(r, p[i]->grad.rows, p[i]->grad.cols, 7.0f), rounded;
            mt_tensor again = test_tensor(r, shard.rows, shard.cols, 0.0f);
            x[3] = -0.0f;
            MT_TRY(mt_optimizer_scatter(r->ctx, &o, p[i], (mt_optimizer_state)k, x));
            MT_TRY(mt_optimizer_gather(r->ctx, &o, p[i], (mt_optimizer_state)k, back));
            CHECK(memcmp(x, back, (size_t)n * sizeof *x) == 0);
            MT_TRY(mt_param_scatter(r->ctx, p[i], x, again));
            MT_TRY(mt_optimizer_read(r->ctx, &o, p[i], (mt_optimizer_state)k, shard));
            CHECK(memcmp(shard.data, again.data, (size_t)local * sizeof *x) == 0);
            if (k != MT_MASTER) continue;
            MT_TRY(mt_arena_tensor(r->ctx, MT_BF16, shard.rows, shard.cols, &rounded));
            MT_TRY(mt_convert(r->ctx, again, rounded));
            CHECK(memcmp(rounded.data, p[i]->value.data, (size_t)local * 2) == 0);
            mt_arena_release(r->ctx, 0);
        }
    CHECK(mt_arena_mark(r->ctx) == 0);
    mt_optimizer_destroy(r->ctx, &o);
    return MT_SUCCESS;
}

static mt_status read_rank(mt_comm *world, void *user) {
    mt_status status = MT_SUCCESS;
    test_rank r;
    MT_TRY(test_rank_open(world, *(const mt_grid_desc *)user, NULL, &r));
    for (int sharded = 0; status == MT_SUCCESS && sharded < 2; sharded++) {
        status = test_rank_renew(&r);
        if (status == MT_SUCCESS) status = read_body(&r, sharded);
    }
    test_rank_close(&r);
    return status;
}

static void test_state_is_read_as_written(void **state) {
    static mt_grid_desc grids[] = {{1, 1, 1, 1}, {1, 2, 1, 1}, {1, 3, 1, 1}, {2, 2, 1, 1}, {3, 2, 1, 1}, {1, 8, 1, 1}};
    (void)state;
    for (size_t i = 0; i < sizeof grids / sizeof *grids; i++)
        test_launch(grids[i].tp * grids[i].dp, read_rank, &grids[i]);
}

/* ---- steps that are not finite ----------------------------------------------------------------------------------- */

/* All ranks skip the step, and then have the bits of a run without it. */
static void assert_left_out(training t) {
    static found want, got;
    training without = t;
    int ranks = t.run.tp * t.run.data;
    without.event = LEFT_OUT;
    train(without, &want);
    train(t, &got);
    if (!isnan(got.norm[t.step]))
        fail_msg("%s: event %d on rank %d was not noticed", gpt_name(&t.run), t.event, t.rank);
    for (int r = 0; r < ranks; r++) {
        if (got.skipped[r] != 1 || got.steps[r] != GPT_STEPS - 1)
            fail_msg("%s: event %d on rank %d: rank %d has skipped %lld and done %lld steps", gpt_name(&t.run), t.event,
                     t.rank, r, (long long)got.skipped[r], (long long)got.steps[r]);
        if (got.raw[r] != want.raw[r])
            fail_msg("%s: event %d on rank %d: rank %d goes on with other bits", gpt_name(&t.run), t.event, t.rank, r);
    }
    assert_true(memcmp(got.state, want.state, sizeof got.state) == 0);
    for (int i = 0; i < GPT_STEPS; i++)
        if (i != t.step) assert_true(got.loss[i] == want.loss[i] && got.norm[i] == want.norm[i]);
}

/* Each rank of each split once, with other options each time: together they are in all pairs with each other and with
   the types. */
static void test_steps_that_are_not_finite(void **state) {
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    int n = 0;
    (void)state;
    for (int split = 0; split < SPLITS; split++)
        for (int rank = 0; rank < splits[split][0] * splits[split][1]; rank++, n++) {
            mt_dtype dtype = (mt_dtype)(MT_F32 + (2 * n + n / 3) % 3); /* every type with every model */
            training t = {.run = run_of(split, dtype, n % 3), .rank = rank, .step = 1, .bad = bad[n % 3]};
            if (!test_all() && rank % 2 != split % 2) continue;
            t.event = n % 4 == 3 ? BAD_WEIGHT : BAD_GRADIENT;
            t.run.clip = n % 2 ? 0.1f : 1e9f;
            t.run.share.sharded_optimizer = n % 3 != 0;
            t.run.share.bucket_bytes = bucket_sizes[n % 4];
            t.run.begins = n / 2 % 2;
            t.run.invariant = n % 5 == 0 ? 4 : 0;
            t.param = t.event == BAD_WEIGHT ? 2 : n % 7; /* the gain of the first norm, which every token uses */
            assert_left_out(t);
        }
}

/* ---- what is refused --------------------------------------------------------------------------------------------- */

static void test_refusals(void **state) {
    mt_data_parallel_desc share = {.sharded_optimizer = 1}, huge = {.bucket_bytes = SIZE_MAX};
    mt_context_desc paper = {.device = MT_DEVICE_META};
    mt_param_desc d = {.name = "a", .rows = 2, .cols = 3};
    mt_param *a, *b, loose;
    mt_optimizer o;
    mt_tensor t;
    test_rank r;
    float x[6] = {0};
    (void)state;
    test_paper_rank(4, 1, (mt_grid_desc){1, 4, 1, 1}, &paper, &r);
    assert_int_equal(mt_params_set_data_parallel(NULL, r.params, &share), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_params_set_data_parallel|params is NULL",
            mt_params_set_data_parallel(r.ctx, NULL, &share));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "desc is NULL", mt_params_set_data_parallel(r.ctx, r.params, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "bucket_bytes is", mt_params_set_data_parallel(r.ctx, r.params, &huge));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_set_data_parallel(r.ctx, r.params, &share));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &d, &a));
    d.name = "b";
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &d, &b));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_sync_gradients_begin|mt_params_init", mt_sync_gradients_begin(r.ctx, r.params));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_gather_gradients|mt_params_init", mt_gather_gradients(r.ctx, r.params));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_gradients_final|mt_params_init", mt_gradients_final(r.ctx, a, b));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "after mt_params_init", mt_params_set_data_parallel(r.ctx, r.params, &share));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_optimizer_create(r.ctx, r.params, NULL, &o));
    REFUSED(r.ctx, MT_ERR_UNSUPPORTED, "mt_optimizer_moments|4 data ranks|mt_optimizer_read",
            mt_optimizer_moments(r.ctx, &o, a, &t, &t));
    REFUSED(r.ctx, MT_ERR_UNSUPPORTED, "mt_optimizer_master|4 data ranks", mt_optimizer_master(r.ctx, &o, a, &t));
    t = mt_tensor_f32(x, 2, 3);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_optimizer_read|state is 3",
            mt_optimizer_read(r.ctx, &o, a, (mt_optimizer_state)3, t));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_optimizer_read|NULL", mt_optimizer_read(r.ctx, &o, a, MT_EXP_AVG, mt_none()));
    REFUSED(r.ctx, MT_ERR_SHAPE, "mt_optimizer_read|shard is [1, 3]",
            mt_optimizer_read(r.ctx, &o, a, MT_EXP_AVG, mt_tensor_rows(t, 0, 1)));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sync_gradients(r.ctx, r.params));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "lr is nan", mt_optimizer_step(r.ctx, &o, NAN, 1.0f));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
    assert_int_equal(o.step, 0);
    assert_int_equal(mt_comm_ledger(r.grid.dp_cp).calls[MT_ALL_GATHER], 0);

    assert_int_equal(mt_gradients_final(NULL, a, b), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'(NULL)' to 'b'", mt_gradients_final(r.ctx, NULL, b));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'b' to 'a'", mt_gradients_final(r.ctx, b, a));
    memset(&loose, 0, sizeof loose);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not parameters of one registry", mt_gradients_final(r.ctx, &loose, &loose));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gradients_final(r.ctx, a, b)); /* allowed: no reduction has begun */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gradients_final(r.ctx, a, b));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sync_gradients_begin(r.ctx, r.params));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_sync_gradients_begin|already", mt_sync_gradients_begin(r.ctx, r.params));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gradients_final(r.ctx, b, b));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'b' was final already", mt_gradients_final(r.ctx, a, b));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params)); /* cancels the reduction */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sync_gradients_begin(r.ctx, r.params));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sync_gradients(r.ctx, r.params));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sync_gradients_begin(r.ctx, r.params));
    mt_optimizer_destroy(r.ctx, &o);
    test_paper_rank_close(&r);
}

/* A second backward after mt_sync_gradients_begin is refused: part of its gradients would be lost. */
static mt_status backward_too_many_rank(mt_comm *world, void *user) {
    gpt_run run = run_of(0, MT_F32, 0);
    gpt_worker w;
    (void)user;
    MT_TRY(gpt_open(world, &run, &w));
    MT_TRY(mt_sync_gradients_begin(w.ctx, w.params));
    MT_TRY(gpt_micro_batch(&w, 0, 0));
    CHECK(gpt_micro_batch(&w, 1, 0) == MT_ERR_ARGUMENT);
    CHECK(strstr(mt_last_error(w.ctx), "'decoder.layers.0.self_attention.linear_proj.weight' was final already"));
    gpt_close(&w);
    return MT_SUCCESS;
}

static void test_a_backward_too_many(void **state) {
    (void)state;
    test_launch(2, backward_too_many_rank, NULL);
}

/* ---- ranks that were told different things ----------------------------------------------------------------------- */

#define TOLD_RANKS 8

/* A setting that differs on one rank, and what the message on every rank says about it. */
static const struct difference {
    const char *words;
    int of_a_stage; /* 1: may differ between stages, but not between the ranks of a stage */
} differences[] = {{NULL, 0},
                   {"mt_params_init: seed is |5|6", 0},
                   {"mt_params_init: dtype is |bf16|f16", 1},
                   {"mt_params_init: mt_data_parallel_desc.bucket_bytes is |100|200", 1},
                   {"mt_params_init: mt_data_parallel_desc.sharded_optimizer is |0|1", 1},
                   {"mt_params_init: |w is |[8, 12]|[8, 16]", 1},
                   {"mt_params_init: |w [8, 12]|v [8, 12]", 1},
                   {"mt_params_init: |w is |replicated|split by rows", 1},
                   {"mt_params_init: |w is |init_std 0.5|init_std 0.5001", 1},
                   {"mt_params_init: |nothing more|more [1, 3]", 1},
                   {"mt_optimizer_create: beta1 is |0.899999976|0.800000012", 0},
                   {"mt_optimizer_create: beta2 is |0.999000013|0.949999988", 0},
                   {"mt_optimizer_create: eps is |9.99999994e-09|9.99999997e-07", 0},
                   {"mt_optimizer_create: weight_decay is |0|0.100000001", 0},
                   {"mt_optimizer_create: stochastic_rounding is |0|1", 0},
                   {"mt_optimizer_create: seed is |0|7", 0},
                   {"mt_params_init: |w is |weight_decay 0|weight_decay 1", 1}};

typedef struct told {
    mt_grid_desc grid;
    int what, rank, stages_differ;
    mt_status status[TOLD_RANKS];
    char text[TOLD_RANKS][MT_ERROR_BYTES];
} told;

static mt_status told_body(const told *t, test_rank *r, mt_optimizer *o) {
    static const char *const names[2][3] = {{"w", "v", "more"}, {"1.w", "1.v", "1.more"}};
    const char *const *name = names[r->grid.pp_rank > 0]; /* a parameter has its name on one stage only */
    int odd = mt_comm_rank(r->world) == t->rank || (t->stages_differ && r->grid.pp_rank > 0) ? t->what : 0;
    mt_data_parallel_desc share = {.bucket_bytes = odd == 3 ? 200 : 100, .sharded_optimizer = odd == 4};
    mt_param_desc d[] = {{.name = name[odd == 6],
                          .rows = 8,
                          .cols = odd == 5 ? 16 : 12,
                          .placement = odd == 7 ? MT_SPLIT_ROWS : MT_REPLICATED,
                          .init_std = odd == 8 ? 0.5001f : 0.5f},
                         {.name = name[2], .rows = 1, .cols = 3}};
    mt_optimizer_desc adamw = {.beta1 = odd == 10 ? 0.8f : 0,
                               .beta2 = odd == 11 ? 0.95f : 0,
                               .eps = odd == 12 ? 1e-6f : 0,
                               .weight_decay = odd == 13 ? 0.1f : 0,
                               .stochastic_rounding = odd == 14,
                               .seed = odd == 15 ? 7 : 0};
    mt_param *p;
    MT_TRY(mt_params_set_dtype(r->ctx, r->params, odd == 2 ? MT_F16 : MT_BF16));
    MT_TRY(mt_params_set_data_parallel(r->ctx, r->params, &share));
    for (int i = 0; i < 1 + (odd == 9); i++) MT_TRY(mt_params_add(r->ctx, r->params, &d[i], &p));
    if (odd == 16) MT_TRY(mt_param_set_weight_decay(r->ctx, p, 1));
    MT_TRY(mt_params_init(r->ctx, r->params, odd == 1 ? 6 : 5));
    return mt_optimizer_create(r->ctx, r->params, &adamw, o);
}

static mt_status told_rank(mt_comm *world, void *user) {
    told *t = (told *)user;
    int rank = mt_comm_rank(world);
    mt_optimizer o = {.step = 0};
    test_rank r;
    MT_TRY(test_rank_open(world, t->grid, NULL, &r));
    t->status[rank] = told_body(t, &r, &o);
    snprintf(t->text[rank], sizeof t->text[rank], "%s", mt_last_error(r.ctx));
    if (strstr(t->text[rank], "mt_params_init")) CHECK(mt_context_allocated(r.ctx) == 0);
    mt_optimizer_destroy(r.ctx, &o);
    MT_TRY(mt_barrier(r.ctx, world)); /* the communicators still work */
    test_rank_close(&r);
    return MT_SUCCESS;
}

/* rank -1: no rank differs, or whole stages do */
static void told_check(mt_grid_desc grid, int what, int rank, int stages_differ) {
    static told t;
    int ranks = grid.tp * grid.dp * grid.pp;
    int passes = what == 0 || (differences[what].of_a_stage && (stages_differ || grid.pp == ranks));
    memset(&t, 0, sizeof t);
    t.grid = grid;
    t.what = what;
    t.rank = rank;
    t.stages_differ = stages_differ;
    test_launch(ranks, told_rank, &t);
    for (int r = 0; r < ranks; r++) {
        char words[128];
        if (t.status[r] != (passes ? MT_SUCCESS : MT_ERR_MISMATCH) || strcmp(t.text[r], t.text[0]) != 0)
            fail_msg("%d x %d x %d, difference %d on rank %d: rank %d has %s, %s", grid.tp, grid.dp, grid.pp, what,
                     rank, r, mt_status_name(t.status[r]), t.text[r]);
        if (!passes && !test_has_words(t.text[r], differences[what].words))
            fail_msg("'%s' is not all in '%s'", differences[what].words, t.text[r]);
        snprintf(words, sizeof words, "on rank %d", rank);
        if (!passes && !stages_differ && !strstr(t.text[r], words)) fail_msg("'%s' is not in '%s'", words, t.text[r]);
    }
}

static void test_ranks_that_were_told_different_things(void **state) {
    static const mt_grid_desc grids[] = {{1, 2, 1, 1}, {2, 1, 1, 1}, {2, 2, 1, 1}, {1, 1, 2, 1}, {2, 2, 2, 1}};
    (void)state;
    for (size_t i = 0; i < sizeof grids / sizeof *grids; i++) {
        int ranks = grids[i].tp * grids[i].dp * grids[i].pp;
        told_check(grids[i], 0, -1, 0);
        for (int what = 1; what < (int)(sizeof differences / sizeof *differences); what++) {
            told_check(grids[i], what, (what + (int)i) % ranks, 0);
            if (grids[i].pp > 1) told_check(grids[i], what, -1, 1);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_buckets),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_same_bits_copies),
        cmocka_unit_test(test_same_bits_clipped),
        cmocka_unit_test(test_same_bits_invariant),
        cmocka_unit_test(test_buckets_go_out_during_the_backward),
        cmocka_unit_test(test_parameters_of_ones_own),
        cmocka_unit_test(test_memory_by_the_formula),
        cmocka_unit_test(test_state_moves_between_splits),
        cmocka_unit_test(test_state_is_read_as_written),
        cmocka_unit_test(test_steps_that_are_not_finite),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_a_backward_too_many),
        cmocka_unit_test(test_ranks_that_were_told_different_things),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
