/* test_bert.c - tests mt_bert, and mt_language_model with a head of the test's own: every split against one rank,
   finite differences, communication, logits, bits, memory and refusals. test_golden.c compares BERTs with PyTorch.
       cc -std=gnu17 -O2 -I. tests/test_bert.c -lpthread -lm */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#define GPT_STEPS 3
#include "mt_test_gpt.h"
#include "mt_test_ranks.h"

/* ---- models ------------------------------------------------------------------------------------------------------ */

#define SEQUENCES 4
#define SEQ 6
#define TOKENS (SEQUENCES * SEQ)
#define VOCAB 37
#define PARAMS_MAX 32768
#define NAMES_MAX 64

typedef struct bert_case {
    const char *name;
    mt_bert_desc desc;
    int lengths, types; /* 1: the batch has them */
    float disturbed;    /* what is added to the initial parameters is in (-disturbed, disturbed) */
} bert_case;

static const bert_case cases[] = {
    {"post-LN, types, lengths",
     {.vocab = VOCAB,
      .layers = 2,
      .max_seq = 8,
      .embedding_dropout = 0.1f,
      .layer = {.hidden = 24,
                .heads = 8,
                .ffn = 20,
                .norm.placement = MT_POST_LN,
                .activation = MT_GELU_ERF,
                .norm.eps = 1e-12f,
                .dropout.attention = 0.1f,
                .dropout.hidden = 0.1f}},
     1,
     1,
     0.2f},
    {"pre-LN, 3 types, padded vocabulary",
     {.vocab = VOCAB,
      .padded_vocab = 48,
      .layers = 2,
      .max_seq = SEQ,
      .token_types = 3,
      .ignore_index = -1,
      .embedding_dropout = 0.2f,
      .layer = {.hidden = 20, .heads = 10, .kv_heads = 5, .dropout.hidden = 0.1f}},
     0,
     1,
     0.2f},
    {"residual post-RMS, rotary, no biases, lengths, no types",
     {.vocab = VOCAB,
      .layers = 2,
      .max_seq = SEQ,
      .ignore_index = MT_ZERO,
      .layer = {.hidden = 16,
                .heads = 8,
                .norm.placement = MT_RESIDUAL_POST_LN,
                .norm.kind = MT_RMS_NORM,
                .activation = MT_SQUARED_RELU,
                .scores.rotary_base = 100.0f,
                .no_bias = 1,
                .dropout.attention = 0.1f}},
     1,
     0,
     0.2f},
    {"without a binary head, post-RMS",
     {.vocab = VOCAB,
      .layers = 2,
      .max_seq = SEQ,
      .no_binary_head = 1,
      .ignore_index = MT_ZERO,
      .embedding_dropout = 0.1f,
      .layer =
          {.hidden = 16, .heads = 8, .norm.placement = MT_POST_LN, .norm.kind = MT_RMS_NORM, .dropout.hidden = 0.1f}},
     1,
     1,
     0.2f},
};
#define CASES ((int)(sizeof cases / sizeof *cases))

typedef struct split {
    int tp, data, stages, sequence_parallel;
    int micro;    /* sequences of a micro-batch */
    int one_pass; /* 1: forward computes the gradient of the tokens' loss, too; a pipeline runs GPipe */
} split;
static const split alone = {1, 1, 1, 0, SEQUENCES, 0};

/* One rank with its part of a model and the data of the whole batch. */
typedef struct worker {
    test_rank r;
    const bert_case *c;
    split s;
    mt_bert bert;
    mt_bert_saved saved[SEQUENCES];
    mt_batch batch; /* the fields that all micro-batches share */
    int32_t ids[TOKENS], targets[TOKENS], types[TOKENS], order[SEQUENCES], lengths[SEQUENCES];
    float lm_scale, sop_scale;
    float lm_loss[TOKENS], sop_loss[SEQUENCES]; /* at the places of this rank's sequences; on the last stage */
    int evaluates;                              /* 1: forward gets no saved */
} worker;

static void fill_data(worker *w) {
    int32_t ignored = test_ignored(w->c->desc.ignore_index), types = w->c->desc.token_types ? 3 : 2;
    uint64_t seed = 4;
    for (int i = 0; i < SEQUENCES; i++) {
        w->lengths[i] = i < 3 ? SEQ - 2 * i : SEQ;
        w->order[i] = i == 2 ? -100 : i % 2; /* also with MT_ZERO: 0 is a class */
    }
    for (int i = 0; i < TOKENS; i++) {
        int padding = w->c->lengths && i % SEQ >= w->lengths[i / SEQ];
        w->ids[i] = (int32_t)test_below(&seed, VOCAB);
        w->targets[i] = i % 5 == 3 || padding ? ignored : (int32_t)test_below(&seed, VOCAB);
        w->types[i] = (i % SEQ + i / SEQ) / 3 % types;
    }
}

/* Creates the model and disturbs its parameters, so that none has a special value. */
static mt_status open_model(worker *w) {
    mt_bert_desc d = w->c->desc;
    MT_TRY(test_rank_renew(&w->r));
    d.layer.sequence_parallel = w->s.sequence_parallel;
    MT_TRY(mt_bert_create(w->r.ctx, w->r.params, &d, &w->bert));
    MT_TRY(mt_params_init(w->r.ctx, w->r.params, 7));
    MT_TRY(disturb_params(&w->r, w->c->disturbed));
    for (int i = 0; i < SEQUENCES; i++) MT_TRY(mt_bert_saved_create(w->r.ctx, &w->bert, &w->saved[i]));
    return MT_SUCCESS;
}

static mt_status open_worker(worker *w, mt_comm *world, const bert_case *c, split s, const mt_context_desc *where) {
    mt_grid_desc shape = {.tp = s.tp, .dp = s.data, .pp = s.stages};
    memset(w, 0, sizeof *w);
    w->c = c;
    w->s = s;
    w->batch = (mt_batch){.seq = SEQ, .seed = 21, .step = 5};
    w->lm_scale = 4.0f / TOKENS;
    w->sop_scale = 0.7f;
    fill_data(w);
    MT_TRY(test_rank_open(world, shape, where, &w->r));
    return open_model(w);
}

static void close_worker(worker *w) {
    for (int i = 0; i < SEQUENCES; i++) mt_bert_saved_destroy(&w->saved[i]);
    test_rank_close(&w->r);
}

static int is_last(const worker *w) { return w->r.grid.pp_rank + 1 == w->r.grid.pp_size; }

/* ---- forward and backward of all micro-batches ------------------------------------------------------------------- */

static mt_batch batch_of(const worker *w, int64_t first, int64_t sequences) {
    mt_batch b = w->batch;
    b.sequences = sequences;
    b.first_sequence = first;
    if (w->c->lengths) b.lengths = w->lengths + first;
    if (w->c->types) b.token_types = w->types + first * SEQ;
    if (w->s.one_pass && !w->evaluates) b.backward_scale = w->lm_scale;
    return b;
}

/* The forward of `count` sequences from the first one on. */
static mt_status forward_of(worker *w, int64_t first, int64_t count, mt_tensor input, mt_tensor output,
                            mt_bert_saved *saved) {
    int binary = !w->c->desc.no_binary_head;
    mt_batch b = batch_of(w, first, count);
    mt_tensor lm = mt_tensor_f32(w->lm_loss + first * SEQ, 1, count * SEQ);
    mt_tensor sop = binary ? mt_tensor_f32(w->sop_loss + first, 1, count) : mt_none();
    const int32_t *ids = w->ids + first * SEQ, *targets = w->targets + first * SEQ,
                  *order = binary ? w->order + first : NULL;
    if (w->s.stages == 1) return mt_bert_forward(w->r.ctx, &w->bert, &b, ids, targets, order, lm, sop, saved);
    return mt_bert_stage_forward(w->r.ctx, &w->bert, &b, ids, targets, order, input, output, lm, sop, saved);
}

static mt_status stage_forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    worker *w = (worker *)user;
    int64_t share = SEQUENCES / w->s.data;
    (void)ctx;
    return forward_of(w, share * w->r.grid.dp_rank + a->micro_batch * w->s.micro, w->s.micro, input, output,
                      w->evaluates ? NULL : &w->saved[a->slot]);
}

static mt_status stage_backward(mt_context *ctx, void *user, const mt_action *a, mt_tensor doutput, mt_tensor dinput) {
    worker *w = (worker *)user;
    MT_TRY(mt_bert_stage_backward(ctx, &w->bert, w->lm_scale, w->sop_scale, doutput, dinput, &w->saved[a->slot]));
    return mt_accumulate_gradients(ctx, w->r.params);
}

static mt_status run_schedule(worker *w, mt_schedule schedule) {
    mt_pipeline_stage stage = {.rows = w->s.micro * SEQ / (w->s.sequence_parallel ? w->s.tp : 1),
                               .cols = w->c->desc.layer.hidden,
                               .forward = stage_forward,
                               .backward = stage_backward,
                               .user = w};
    mt_action actions[6 * SEQUENCES];
    int count;
    MT_TRY(mt_pipeline_schedule(schedule, w->s.stages, w->r.grid.pp_rank, SEQUENCES / w->s.data / w->s.micro, actions,
                                6 * SEQUENCES, &count));
    return mt_pipeline_run(w->r.ctx, &w->r.grid, &stage, actions, count);
}

/* Forward and backward of this rank's sequences. On one stage all micro-batches are in flight, and the backwards run
   last first, or in invariant mode first first. */
static mt_status run_passes(worker *w) {
    int64_t share = SEQUENCES / w->s.data, first = share * w->r.grid.dp_rank, n = share / w->s.micro;
    int invariant = mt_context_invariant(w->r.ctx) > 0;
    size_t mark = mt_arena_mark(w->r.ctx);
    if (w->s.stages > 1) return run_schedule(w, w->s.one_pass ? MT_SCHEDULE_GPIPE : MT_SCHEDULE_1F1B);
    for (int64_t k = 0; k < n; k++)
        MT_TRY(forward_of(w, first + k * w->s.micro, w->s.micro, mt_none(), mt_none(), &w->saved[k]));
    for (int64_t k = 0; k < n; k++) {
        mt_bert_saved *saved = &w->saved[invariant ? k : n - 1 - k];
        MT_TRY(mt_bert_backward(w->r.ctx, &w->bert, w->lm_scale, w->sop_scale, saved));
        MT_TRY(mt_accumulate_gradients(w->r.ctx, w->r.params));
    }
    mt_arena_release(w->r.ctx, mark);
    return MT_SUCCESS;
}

/* ---- every split against one rank -------------------------------------------------------------------------------- */

/* What one rank computes. Parameters are found by name, because each stage has others. */
typedef struct outcome {
    char names[NAMES_MAX][MT_NAME_MAX];
    int64_t at[NAMES_MAX], n[NAMES_MAX];
    int count;
    float lm_loss[TOKENS], sop_loss[SEQUENCES], grads[PARAMS_MAX], norm;
    float evaluation[TOKENS], sop_evaluation[SEQUENCES], logits[TOKENS * VOCAB], sop_logits[2 * SEQUENCES];
} outcome;

typedef struct run {
    const bert_case *c;
    split s;
    int invariant;
    int keeps; /* 1: this is the one rank */
    outcome *serial;
} run;

static mt_status keep_gradients(worker *w, outcome *o) {
    int64_t at = 0;
    CHECK(mt_params_count(w->r.params) <= NAMES_MAX);
    o->count = mt_params_count(w->r.params);
    for (int i = 0; i < o->count; i++) {
        const mt_param *p = mt_params_at(w->r.params, i);
        snprintf(o->names[i], MT_NAME_MAX, "%s", p->name);
        o->at[i] = at;
        o->n[i] = p->desc.rows * p->desc.cols;
        at += o->n[i];
    }
    CHECK(at <= PARAMS_MAX);
    return gather_grads(&w->r, o->grads, PARAMS_MAX, &at);
}

static int find_name(const outcome *o, const char *name) {
    for (int i = 0; i < o->count; i++)
        if (strcmp(o->names[i], name) == 0) return i;
    return -1;
}

/* tolerance 0: the same bits, apart from the sign of zeros */
static mt_status compare_gradients(worker *w, const outcome *o, double tolerance) {
    float *got = test_floats(&w->r, PARAMS_MAX, NAN);
    for (int i = 0; i < mt_params_count(w->r.params); i++) {
        const mt_param *p = mt_params_at(w->r.params, i);
        int at = find_name(o, p->name);
        CHECK(at >= 0);
        MT_TRY(mt_param_gather(w->r.ctx, w->r.params, p, p->grad, got));
        MT_TRY(test_near_f32(p->name, got, o->grads + o->at[at], o->n[at], tolerance));
        MT_TRY(check_padding(p));
    }
    return MT_SUCCESS;
}

static void add_calls(mt_ledger *l, mt_collective kind, uint64_t calls, int64_t floats) {
    l->calls[kind] += calls;
    l->bytes[kind] += calls * (uint64_t)floats * sizeof(float);
}

/* The calls over the tensor group that megatron.h documents, of a forward and a backward of this stage. */
static mt_ledger expected_calls(const worker *w) {
    const mt_bert_desc *d = &w->c->desc;
    int64_t tokens = w->s.micro * SEQ, hidden = d->layer.hidden, t = w->s.tp, all = tokens * hidden;
    int64_t columns = test_ceil(hidden, t) * t, pooled = w->s.micro * hidden; /* columns: with those that are padding */
    uint64_t layers = (uint64_t)(d->layers / w->s.stages), first = w->r.grid.pp_rank == 0;
    mt_ledger l = {{0}, {0}};
    if (w->s.sequence_parallel) {
        add_calls(&l, MT_REDUCE_SCATTER, 4 * layers + first, all); /* backward of the embedding: 1 all-gather */
        add_calls(&l, MT_ALL_GATHER, 6 * layers + first, all);
    } else add_calls(&l, MT_ALL_REDUCE, 4 * layers + first, all);
    if (!is_last(w)) return l;
    add_calls(&l, MT_ALL_GATHER, 1, tokens * columns); /* the output of lm_head.dense */
    add_calls(&l, MT_ALL_GATHER, 1, 4 * tokens * t);   /* the loss */
    add_calls(&l, MT_ALL_REDUCE, 1, all);              /* backward of the logits */
    if (w->s.sequence_parallel) {                      /* lm_head.dense gathers its input twice */
        add_calls(&l, MT_ALL_GATHER, 2, all);
        add_calls(&l, MT_REDUCE_SCATTER, 1, all);
    } else add_calls(&l, MT_ALL_REDUCE, 1, all);
    if (d->no_binary_head) return l;
    add_calls(&l, MT_ALL_GATHER, 1, w->s.micro * columns);               /* the output of the pooler */
    add_calls(&l, MT_ALL_GATHER, 1, 4 * w->s.micro * t);                 /* the loss */
    add_calls(&l, MT_ALL_REDUCE, 2, pooled);                             /* backward of binary_head and pooler */
    if (w->s.sequence_parallel) add_calls(&l, MT_ALL_REDUCE, 1, pooled); /* the first tokens */
    return l;
}

/* Checks the calls of all micro-batches over the tensor group, and that other groups have none. */
static mt_status check_calls(const worker *w) {
    mt_ledger got = mt_comm_ledger(w->r.grid.tp), want = expected_calls(w), data = mt_comm_ledger(w->r.grid.dp);
    uint64_t micro = (uint64_t)(SEQUENCES / w->s.data / w->s.micro);
    if (w->s.tp == 1) memset(&want, 0, sizeof want);
    for (int k = 0; k < MT_COLLECTIVE_COUNT; k++) {
        CHECK(data.calls[k] == 0);
        if (got.calls[k] == micro * want.calls[k] && got.bytes[k] == micro * want.bytes[k]) continue;
        fprintf(stderr, "stage %d: %s: %llu calls of %llu bytes, expected %llu of %llu\n", w->r.grid.pp_rank,
                mt_collective_name((mt_collective)k), (unsigned long long)got.calls[k],
                (unsigned long long)got.bytes[k], (unsigned long long)(micro * want.calls[k]),
                (unsigned long long)(micro * want.bytes[k]));
        return MT_ERR_DATA;
    }
    return MT_SUCCESS;
}

static mt_status train_once(worker *w, const run *run) {
    int64_t share = SEQUENCES / w->s.data, first = share * w->r.grid.dp_rank;
    double tolerance = run->invariant ? 0 : 2e-5;
    outcome *o = run->serial;
    float norm = NAN;
    mt_comm_ledger_reset(w->r.grid.tp);
    MT_TRY(run_passes(w));
    if (!run->invariant) MT_TRY(check_calls(w));
    MT_TRY(mt_sync_gradients(w->r.ctx, w->r.params));
    MT_TRY(mt_grad_norm(w->r.ctx, w->r.params, &norm));
    if (run->keeps) {
        MT_TRY(keep_gradients(w, o));
        memcpy(o->lm_loss, w->lm_loss, sizeof o->lm_loss);
        memcpy(o->sop_loss, w->sop_loss, sizeof o->sop_loss);
        o->norm = norm;
    }
    if (is_last(w)) {
        MT_TRY(test_near_f32("lm_loss", w->lm_loss + first * SEQ, o->lm_loss + first * SEQ, share * SEQ, tolerance));
        MT_TRY(test_near_f32("sop_loss", w->sop_loss + first, o->sop_loss + first, share, tolerance));
    }
    MT_TRY(compare_gradients(w, o, tolerance));
    return test_near_f32("norm", &norm, &o->norm, 1, tolerance * (double)o->norm);
}

static mt_status complain(const worker *w, const run *run, mt_status status) {
    if (status != MT_SUCCESS)
        fprintf(stderr, "%s, tensor %d, data %d, stages %d, sequence parallelism %d, micro-batches of %d%s: %s\n",
                run->c->name, run->s.tp, run->s.data, run->s.stages, run->s.sequence_parallel, run->s.micro,
                run->s.one_pass ? ", one pass" : "", w->r.ctx ? mt_last_error(w->r.ctx) : "");
    return status;
}

/* Opens a rank, calls f, and closes it. */
static mt_status with_worker(mt_comm *world, const run *run, mt_status (*f)(worker *w, const struct run *run)) {
    mt_context_desc where = {.arena_bytes = (size_t)4 << 20, .invariant = run->invariant};
    worker *w = (worker *)malloc(sizeof *w);
    mt_status status = w ? open_worker(w, world, run->c, run->s, &where) : MT_ERR_MEMORY;
    if (status == MT_SUCCESS) status = f(w, run);
    if (w) complain(w, run, status);
    if (w) close_worker(w);
    free(w);
    return status;
}

static mt_status train_rank(mt_comm *world, void *user) { return with_worker(world, (const run *)user, train_once); }

static void launch_split(run *run, split s, mt_rank_function f) {
    run->s = s;
    test_launch(s.tp * s.data * s.stages, f, run);
    run->keeps = 0;
}

static const split splits[] = {{1, 1, 1, 1, 4, 0}, {1, 1, 1, 0, 1, 1}, {2, 1, 1, 0, 4, 1}, {2, 1, 1, 1, 2, 0},
                               {3, 1, 1, 0, 2, 0}, {3, 1, 1, 1, 4, 1}, {4, 1, 1, 0, 1, 0}, {4, 1, 1, 1, 4, 0},
                               {8, 1, 1, 0, 2, 1}, {8, 1, 1, 1, 4, 0}, {1, 2, 1, 0, 1, 1}, {1, 4, 1, 0, 1, 0},
                               {2, 2, 1, 1, 1, 0}, {4, 2, 1, 1, 2, 1}, {1, 1, 2, 0, 1, 0}, {1, 1, 2, 0, 2, 1},
                               {2, 1, 2, 1, 2, 0}, {2, 2, 2, 0, 1, 1}, {2, 2, 2, 1, 2, 0}, {3, 1, 2, 1, 4, 0}};
#define SPLITS (sizeof splits / sizeof *splits)

static int case_fits(const bert_case *c, split s) {
    return s.tp <= (c->desc.layer.kv_heads ? c->desc.layer.kv_heads : c->desc.layer.heads);
}

/* Losses, gradients, their norm and the communication, with dropout. */
static void test_every_split(void **state) {
    static outcome serial;
    (void)state;
    for (int i = 0; i < CASES; i++) {
        run run = {.c = &cases[i], .keeps = 1, .serial = &serial};
        launch_split(&run, alone, train_rank);
        for (size_t k = 0; k < SPLITS; k++)
            if (case_fits(run.c, splits[k])) launch_split(&run, splits[k], train_rank);
    }
}

/* In invariant mode the same bits, with several sequences in a micro-batch. */
static void test_every_split_has_the_same_bits(void **state) {
    static const split ways[] = {{2, 1, 1, 0, 2, 1}, {2, 1, 1, 1, 2, 0}, {4, 1, 1, 1, 2, 1}, {4, 1, 1, 0, 2, 0},
                                 {1, 1, 2, 0, 2, 0}, {2, 1, 2, 1, 2, 0}, {1, 2, 1, 0, 2, 0}, {2, 2, 2, 1, 2, 0}};
    static outcome serial;
    (void)state;
    for (int i = 0; i < CASES; i++) {
        run run = {.c = &cases[i], .keeps = 1, .serial = &serial, .invariant = 4};
        launch_split(&run, (split){1, 1, 1, 0, 2, 0}, train_rank);
        for (size_t k = 0; k < sizeof ways / sizeof *ways; k++) launch_split(&run, ways[k], train_rank);
    }
}

/* ---- logits and evaluation --------------------------------------------------------------------------------------- */

/* -log softmax(logits)[target] in double. */
static double loss_of_logits(const float *x, int n, int32_t target, int32_t ignored) {
    double sum = 0;
    if (target == ignored) return 0;
    for (int j = 0; j < n; j++) sum += exp((double)x[j]);
    return log(sum) - (double)x[target];
}

static mt_status losses_are_those_of_the_logits(const worker *w, const float *lm, const float *sop) {
    int32_t ignored = test_ignored(w->c->desc.ignore_index);
    double want[TOKENS];
    if (!is_last(w)) return MT_SUCCESS;
    for (int i = 0; i < TOKENS; i++) want[i] = loss_of_logits(lm + i * VOCAB, VOCAB, w->targets[i], ignored);
    MT_TRY(test_near("lm_loss from the logits", w->lm_loss, want, TOKENS, 1e-5));
    for (int i = 0; i < SEQUENCES; i++) want[i] = loss_of_logits(sop + i * 2, 2, w->order[i], -100);
    return w->c->desc.no_binary_head ? MT_SUCCESS
                                     : test_near("sop_loss from the logits", w->sop_loss, want, SEQUENCES, 1e-5);
}

/* Both logits with gaps between their rows; each alone; and as bf16. */
static mt_status evaluate_once(worker *w, const run *run) {
    int binary = !w->c->desc.no_binary_head;
    outcome *o = run->serial;
    mt_batch b = batch_of(w, 0, SEQUENCES);
    float *lm = test_floats(&w->r, TOKENS * VOCAB, NAN), *sop = test_floats(&w->r, SEQUENCES * 2, NAN);
    float *wide = test_floats(&w->r, TOKENS * (VOCAB + 3), NAN), *again = test_floats(&w->r, SEQUENCES * 5, NAN);
    mt_tensor none = mt_none(), sop_out = binary ? mt_tensor_f32(sop, SEQUENCES, 2) : none;
    w->evaluates = 1;
    MT_TRY(run_schedule(w, MT_SCHEDULE_FORWARD_ONLY));
    MT_TRY(mt_bert_logits(w->r.ctx, &w->bert, &b, w->ids, mt_tensor_f32(lm, TOKENS, VOCAB), sop_out));
    MT_TRY(mt_bert_logits(w->r.ctx, &w->bert, &b, w->ids, (mt_tensor){wide, TOKENS, VOCAB, VOCAB + 3, MT_F32}, none));
    if (binary)
        MT_TRY(mt_bert_logits(w->r.ctx, &w->bert, &b, w->ids, none, (mt_tensor){again, SEQUENCES, 2, 5, MT_F32}));
    CHECK(mt_arena_mark(w->r.ctx) == 0);
    if (run->keeps) {
        memcpy(o->logits, lm, sizeof o->logits);
        memcpy(o->sop_logits, sop, sizeof o->sop_logits);
        memcpy(o->evaluation, w->lm_loss, sizeof o->evaluation);
        memcpy(o->sop_evaluation, w->sop_loss, sizeof o->sop_evaluation);
    }
    MT_TRY(test_near_f32("logits", lm, o->logits, TOKENS * VOCAB, 1e-5));
    if (binary) MT_TRY(test_near_f32("sop_logits", sop, o->sop_logits, 2 * SEQUENCES, 1e-5));
    if (is_last(w)) MT_TRY(test_near_f32("lm_loss", w->lm_loss, o->evaluation, TOKENS, 1e-5));
    if (is_last(w)) MT_TRY(test_near_f32("sop_loss", w->sop_loss, o->sop_evaluation, SEQUENCES, 1e-5));
    for (int i = 0; i < TOKENS; i++) MT_TRY(test_near_f32("alone", wide + i * (VOCAB + 3), lm + i * VOCAB, VOCAB, 0));
    for (int i = 0; i < TOKENS; i++) CHECK(isnan(wide[i * (VOCAB + 3) + VOCAB]));
    for (int i = 0; i < SEQUENCES && binary; i++) MT_TRY(test_near_f32("alone", again + i * 5, sop + i * 2, 2, 0));
    for (int i = 0; i < SEQUENCES; i++) CHECK(isnan(again[i * 5 + 2]));
    return losses_are_those_of_the_logits(w, lm, sop);
}

static mt_status evaluate_rank(mt_comm *world, void *user) {
    return with_worker(world, (const run *)user, evaluate_once);
}

static void test_logits_and_evaluation(void **state) {
    static const split ways[] = {{2, 1, 1, 0, 4, 0}, {4, 1, 1, 0, 4, 0}, {2, 1, 1, 1, 4, 0}, {4, 1, 1, 1, 4, 0},
                                 {3, 1, 1, 0, 4, 0}, {1, 1, 2, 0, 4, 0}, {2, 1, 2, 1, 4, 0}};
    static outcome serial;
    (void)state;
    for (int i = 0; i < CASES; i++) {
        run run = {.c = &cases[i], .keeps = 1, .serial = &serial};
        launch_split(&run, alone, evaluate_rank);
        for (size_t k = 0; k < sizeof ways / sizeof *ways; k++) launch_split(&run, ways[k], evaluate_rank);
    }
}

/* ---- finite differences on any split ----------------------------------------------------------------------------- */

/* f, which all ranks call together and which returns the same number on all of them, is differentiated along directions
   of each parameter: see the comment of DIFFERENCE_STEP in test_blocks.c for the step, the directions and the
   tolerance. The gradients were summed over the ranks. */
#define DIFFERENCE_STEP 0.05
#define DIRECTIONS 4
#define DIFFERENCE_MAX 512

typedef struct differentiable {
    const outcome *all; /* the names of the parameters of all stages */
    double (*f)(void *user);
    void *user;
    const char *unused; /* "a|b": the gradients of parameters whose names begin like this are 0 */
} differentiable;

static int is_unused(const char *list, const char *name) {
    for (; list; list = strchr(list, '|') ? strchr(list, '|') + 1 : NULL) {
        size_t n = strcspn(list, "|");
        if (n > 0 && strncmp(list, name, n) == 0) return 1;
    }
    return 0;
}

/* Every rank gets the whole value and the whole gradient of a parameter, which only some stages have. */
static mt_status share_gradient(test_rank *r, const mt_param *p, int64_t n, float *x, float *g) {
    float owner = p ? (float)(r->grid.pp_size - r->grid.pp_rank) : 0.0f;
    if (p) MT_TRY(mt_param_gather(r->ctx, r->params, p, p->value, x));
    if (p) MT_TRY(mt_param_gather(r->ctx, r->params, p, p->grad, g));
    MT_TRY(mt_all_reduce(r->ctx, r->grid.pp, &owner, &owner, 1, MT_F32, MT_MAX));
    CHECK(owner > 0.0f);
    return mt_broadcast(r->ctx, r->grid.pp, g, g, (size_t)n, MT_F32, r->grid.pp_size - (int)owner);
}

/* The central difference of width `step` along v from x. */
static mt_status central_difference(test_rank *r, const differentiable *d, const mt_param *p, const float *x,
                                    const double *v, int64_t n, double step, double *out) {
    float y[DIFFERENCE_MAX];
    double at[2];
    for (int side = 0; side < 2; side++) {
        for (int64_t i = 0; i < n; i++) y[i] = (float)((double)x[i] + (side ? step : -step) * v[i]);
        if (p) MT_TRY(mt_param_scatter(r->ctx, p, y, p->value));
        at[side] = d->f(d->user);
    }
    *out = (at[1] - at[0]) / (2 * step);
    return p ? mt_param_scatter(r->ctx, p, x, p->value) : MT_SUCCESS;
}

static mt_status check_parameter(test_rank *r, const differentiable *d, const char *name, int64_t n) {
    const mt_param *p = mt_params_find(r->params, name);
    float x[DIFFERENCE_MAX] = {0}, g[DIFFERENCE_MAX] = {0};
    double norm = 0, v[DIFFERENCE_MAX], length, want, wide, narrow;
    uint64_t seed = test_name_seed(name);
    CHECK(n <= DIFFERENCE_MAX);
    MT_TRY(share_gradient(r, p, n, x, g));
    for (int64_t i = 0; i < n; i++) norm += (double)g[i] * (double)g[i];
    norm = sqrt(norm);
    if (!(is_unused(d->unused, name) ? norm == 0 : norm > 0.01)) {
        fprintf(stderr, "%s: the norm of the gradient is %g\n", name, norm);
        return MT_ERR_DATA;
    }
    for (int k = norm > 0 ? 0 : 1; k < DIRECTIONS; k++) {
        length = want = 0;
        for (int64_t i = 0; i < n; i++) v[i] = k == 0 ? (double)g[i] : (double)test_float(&seed);
        for (int64_t i = 0; i < n; i++) length += v[i] * v[i];
        for (int64_t i = 0; i < n; i++) {
            v[i] /= sqrt(length);
            want += v[i] * (double)g[i];
        }
        MT_TRY(central_difference(r, d, p, x, v, n, DIFFERENCE_STEP, &wide));
        MT_TRY(central_difference(r, d, p, x, v, n, DIFFERENCE_STEP / 2, &narrow));
        narrow = (4 * narrow - wide) / 3;
        if (fabs(narrow - want) <= 1e-3 * norm + 1e-4) continue;
        fprintf(stderr, "%s, direction %d: difference %.7g, gradient %.7g, norm %.4g\n", name, k, narrow, want, norm);
        return MT_ERR_DATA;
    }
    return MT_SUCCESS;
}

static mt_status check_all_parameters(test_rank *r, const differentiable *d) {
    for (int i = 0; i < d->all->count; i++) MT_TRY(check_parameter(r, d, d->all->names[i], d->all->n[i]));
    return MT_SUCCESS;
}

/* The last stage and tensor rank 0 give a number to all ranks, with more digits than a float has. NaN: an error */
static double from_last_stage(test_rank *r, double x) {
    float parts[2] = {(float)x, (float)(x - (double)(float)x)};
    if (mt_broadcast(r->ctx, r->grid.pp, parts, parts, 2, MT_F32, r->grid.pp_size - 1) != MT_SUCCESS) return NAN;
    return (double)parts[0] + (double)parts[1];
}

/* lm_scale * sum(lm_loss) + sop_scale * sum(sop_loss) of a training forward. */
static double bert_scalar(void *user) {
    worker *w = (worker *)user;
    double sum = 0;
    if (run_schedule(w, MT_SCHEDULE_FORWARD_ONLY) != MT_SUCCESS) return NAN;
    for (int i = 0; i < TOKENS; i++) sum += (double)w->lm_scale * (double)w->lm_loss[i];
    for (int i = 0; i < SEQUENCES; i++) sum += (double)w->sop_scale * (double)w->sop_loss[i];
    return from_last_stage(&w->r, sum);
}

static const bert_case small_cases[] = {
    {"post-LN, erf",
     {.vocab = VOCAB,
      .layers = 2,
      .max_seq = SEQ,
      .embedding_dropout = 0.2f,
      .layer = {.hidden = 8,
                .heads = 2,
                .ffn = 12,
                .norm.placement = MT_POST_LN,
                .activation = MT_GELU_ERF,
                .dropout.attention = 0.2f,
                .dropout.hidden = 0.2f}},
     1,
     1,
     0.3f},
    {"pre-LN, tanh",
     {.vocab = VOCAB,
      .layers = 2,
      .max_seq = SEQ,
      .token_types = 3,
      .embedding_dropout = 0.2f,
      .layer = {.hidden = 8, .heads = 2, .ffn = 12, .dropout.hidden = 0.2f}},
     0,
     1,
     0.3f},
};

/* Each loss alone, and both with other scales. On several ranks only the last, unless the test runs everything. */
static mt_status differentiate(worker *w, const run *run) {
    static const struct {
        float lm, sop;
        const char *unused;
    } ways[] = {{1.0f, 0.0f, "pooler.|binary_head."}, {0.0f, 1.0f, "lm_head.|output_layer."}, {0.3f, 2.0f, NULL}};
    for (int i = mt_comm_size(w->r.world) > 1 && !test_all() ? 2 : 0; i < 3; i++) {
        differentiable d = {.all = run->serial, .f = bert_scalar, .user = w, .unused = ways[i].unused};
        w->lm_scale = ways[i].lm;
        w->sop_scale = ways[i].sop;
        MT_TRY(mt_params_zero_grad(w->r.ctx, w->r.params));
        MT_TRY(run_passes(w));
        MT_TRY(mt_sync_gradients(w->r.ctx, w->r.params));
        MT_TRY(check_all_parameters(&w->r, &d));
    }
    return MT_SUCCESS;
}

static mt_status differentiate_rank(mt_comm *world, void *user) {
    return with_worker(world, (const run *)user, differentiate);
}

static mt_status keep_names(worker *w, const run *run) { return keep_gradients(w, run->serial); }
static mt_status name_rank(mt_comm *world, void *user) { return with_worker(world, (const run *)user, keep_names); }

static void test_finite_differences(void **state) {
    static const split ways[] = {{1, 1, 1, 0, 4, 0}, {1, 1, 1, 0, 4, 1}, {2, 1, 1, 0, 4, 0},
                                 {2, 1, 1, 1, 4, 1}, {1, 1, 2, 0, 4, 0}, {2, 1, 2, 1, 4, 0}};
    static outcome names;
    (void)state;
    for (int i = 0; i < 2; i++) {
        run run = {.c = &small_cases[i], .serial = &names};
        launch_split(&run, alone, name_rank);
        for (size_t k = 0; k < sizeof ways / sizeof *ways; k++)
            if (test_takes(k + (size_t)i, 2)) launch_split(&run, ways[k], differentiate_rank);
    }
}

/* ---- a language model with a head of the test's own -------------------------------------------------------------- */

/* The scalar is sum(c[s, j] * mean over the tokens of sequence s of y[token, j]). */
typedef struct headed {
    test_rank r;
    split s;
    mt_language_model model;
    mt_language_model_saved saved;
    mt_batch batch;
    int32_t ids[TOKENS], types[TOKENS];
    mt_tensor y, dy;
    const float *c;
} headed;

#define HEADED_WIDTH 8

static mt_status headed_open(headed *h, mt_comm *world, split s) {
    mt_language_model_desc d = {.vocab = VOCAB,
                                .layers = 2,
                                .max_seq = SEQ,
                                .token_types = 2,
                                .embedding_norm = 1,
                                .embedding_dropout = 0.2f,
                                .layer = {.hidden = HEADED_WIDTH,
                                          .heads = 2,
                                          .ffn = 12,
                                          .sequence_parallel = s.sequence_parallel,
                                          .dropout.hidden = 0.2f}};
    mt_grid_desc shape = {.tp = s.tp, .pp = s.stages};
    int64_t rows = TOKENS / (s.sequence_parallel ? s.tp : 1), first = s.sequence_parallel ? rows : 0;
    uint64_t seed = 8;
    memset(h, 0, sizeof *h);
    h->s = s;
    MT_TRY(test_rank_open(world, shape, NULL, &h->r));
    MT_TRY(mt_language_model_create(h->r.ctx, h->r.params, &d, &h->model));
    MT_TRY(mt_params_init(h->r.ctx, h->r.params, 7));
    MT_TRY(disturb_params(&h->r, 0.3f));
    MT_TRY(mt_language_model_saved_create(h->r.ctx, &h->model, &h->saved));
    for (int i = 0; i < TOKENS; i++) h->ids[i] = (int32_t)test_below(&seed, VOCAB), h->types[i] = i % 5 > 2;
    h->batch = (mt_batch){.sequences = SEQUENCES, .seq = SEQ, .seed = 3, .token_types = h->types};
    h->c = test_noise(&h->r, SEQUENCES * HEADED_WIDTH, 2, 1.0f);
    h->y = test_tensor(&h->r, rows, HEADED_WIDTH, NAN);
    h->dy = test_tensor(&h->r, rows, HEADED_WIDTH, NAN);
    for (int64_t i = 0; i < rows * HEADED_WIDTH; i++) {
        int64_t token = i / HEADED_WIDTH + first * h->r.grid.tp_rank;
        ((float *)h->dy.data)[i] = h->c[token / SEQ * HEADED_WIDTH + i % HEADED_WIDTH] / SEQ;
    }
    return MT_SUCCESS;
}

static mt_status headed_forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    headed *h = (headed *)user;
    (void)a;
    return mt_language_model_forward(ctx, &h->model, &h->batch, h->ids, input, output.data ? output : h->y, &h->saved);
}

static mt_status headed_backward(mt_context *ctx, void *user, const mt_action *a, mt_tensor doutput, mt_tensor dinput) {
    headed *h = (headed *)user;
    (void)a;
    return mt_language_model_backward(ctx, &h->model, doutput.data ? doutput : h->dy, dinput, &h->saved);
}

static mt_status headed_run(headed *h, mt_schedule schedule) {
    mt_pipeline_stage stage = {
        .rows = h->y.rows, .cols = HEADED_WIDTH, .forward = headed_forward, .backward = headed_backward, .user = h};
    mt_action actions[6];
    int count;
    MT_TRY(mt_pipeline_schedule(schedule, h->s.stages, h->r.grid.pp_rank, 1, actions, 6, &count));
    return mt_pipeline_run(h->r.ctx, &h->r.grid, &stage, actions, count);
}

static double headed_scalar(void *user) {
    headed *h = (headed *)user;
    float all[TOKENS * HEADED_WIDTH];
    size_t n = (size_t)(h->y.rows * HEADED_WIDTH);
    double sum = 0;
    if (headed_run(h, MT_SCHEDULE_FORWARD_ONLY) != MT_SUCCESS) return NAN;
    if (h->s.sequence_parallel) {
        if (mt_all_gather(h->r.ctx, h->r.grid.tp, h->y.data, all, n, MT_F32) != MT_SUCCESS) return NAN;
    } else memcpy(all, h->y.data, sizeof all);
    for (int i = 0; i < TOKENS * HEADED_WIDTH; i++)
        sum += (double)h->c[i / HEADED_WIDTH / SEQ * HEADED_WIDTH + i % HEADED_WIDTH] * (double)all[i] / SEQ;
    return from_last_stage(&h->r, sum);
}

typedef struct headed_run_of {
    split s;
    outcome names; /* of the run on one rank, which is the first */
} headed_run_of;

static mt_status headed_rank(mt_comm *world, void *user) {
    headed_run_of *run = (headed_run_of *)user;
    headed h;
    mt_status status = headed_open(&h, world, run->s);
    if (status == MT_SUCCESS && mt_comm_size(world) == 1) {
        run->names.count = mt_params_count(h.r.params);
        for (int i = 0; i < run->names.count; i++) {
            const mt_param *p = mt_params_at(h.r.params, i);
            snprintf(run->names.names[i], MT_NAME_MAX, "%s", p->name);
            run->names.n[i] = p->desc.rows * p->desc.cols;
        }
    }
    if (status == MT_SUCCESS) status = headed_run(&h, MT_SCHEDULE_1F1B);
    if (status == MT_SUCCESS) status = mt_sync_gradients(h.r.ctx, h.r.params);
    if (status == MT_SUCCESS) {
        differentiable d = {.all = &run->names, .f = headed_scalar, .user = &h};
        status = check_all_parameters(&h.r, &d);
    }
    if (status != MT_SUCCESS)
        fprintf(stderr, "tensor %d, stages %d, sequence parallelism %d: %s\n", run->s.tp, run->s.stages,
                run->s.sequence_parallel, mt_last_error(h.r.ctx));
    mt_language_model_saved_destroy(&h.saved);
    test_rank_close(&h.r);
    return status;
}

static void test_language_model_with_another_head(void **state) {
    static const split ways[] = {
        {1, 1, 1, 0, 4, 0}, {2, 1, 1, 0, 4, 0}, {2, 1, 1, 1, 4, 0}, {1, 1, 2, 0, 4, 0}, {2, 1, 2, 1, 4, 0}};
    static headed_run_of run;
    (void)state;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        run.s = ways[i];
        test_launch(run.s.tp * run.s.stages, headed_rank, &run);
        assert_int_equal(run.names.count, 3 + 2 + 2 * 12 + 2);
    }
}

/* ---- what does not change a bit ---------------------------------------------------------------------------------- */

static mt_comm *open_alone(worker *w, const bert_case *c, split s) {
    mt_comm *world = NULL;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_comm_create_local(1, 0, &world));
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, open_worker(w, world, c, s, NULL));
    return world;
}

static void close_alone(worker *w, mt_comm *world) {
    close_worker(w);
    mt_comm_destroy(world);
}

/* Runs a step, and keeps its losses and gradients. */
static void step_alone(worker *w, outcome *o) {
    ASSERT_STATUS(w->r.ctx, MT_SUCCESS, mt_params_zero_grad(w->r.ctx, w->r.params));
    ASSERT_STATUS(w->r.ctx, MT_SUCCESS, run_passes(w));
    ASSERT_STATUS(w->r.ctx, MT_SUCCESS, keep_gradients(w, o));
    memcpy(o->lm_loss, w->lm_loss, sizeof o->lm_loss);
    memcpy(o->sop_loss, w->sop_loss, sizeof o->sop_loss);
}

static void assert_same(const outcome *a, const outcome *b, const char *what) {
    if (memcmp(a->lm_loss, b->lm_loss, sizeof a->lm_loss) != 0 ||
        memcmp(a->sop_loss, b->sop_loss, sizeof a->sop_loss) != 0)
        fail_msg("%s: other losses", what);
    for (int i = 0; i < a->count; i++)
        for (int64_t k = 0; k < a->n[i]; k++)
            if (a->grads[a->at[i] + k] != b->grads[a->at[i] + k])
                fail_msg("%s: another gradient of %s[%lld]", what, a->names[i], (long long)k);
}

/* Evaluation has the bits of training without dropout, and leaves the arena as it was. */
static void test_inference(void **state) {
    static worker w;
    static outcome trained;
    (void)state;
    for (int i = 0; i < CASES; i++) {
        bert_case c = cases[i];
        mt_comm *world;
        size_t mark;
        c.desc.embedding_dropout = c.desc.layer.dropout.attention = c.desc.layer.dropout.hidden = 0.0f;
        world = open_alone(&w, &c, alone);
        step_alone(&w, &trained);
        mark = mt_arena_mark(w.r.ctx);
        w.evaluates = 1;
        for (int k = 0; k < TOKENS; k++) w.lm_loss[k] = NAN;
        for (int k = 0; k < SEQUENCES; k++) w.sop_loss[k] = c.desc.no_binary_head ? 0.0f : NAN;
        ASSERT_STATUS(w.r.ctx, MT_SUCCESS, forward_of(&w, 0, SEQUENCES, mt_none(), mt_none(), NULL));
        assert_int_equal(mt_arena_mark(w.r.ctx), mark);
        assert_memory_equal(w.lm_loss, trained.lm_loss, sizeof w.lm_loss);
        assert_memory_equal(w.sop_loss, trained.sop_loss, sizeof w.sop_loss);
        close_alone(&w, world);
    }
}

/* Tokens after the length of a sequence change neither the losses of the others nor a gradient. */
static void test_lengths(void **state) {
    static worker w;
    static outcome before, after, valid;
    mt_comm *world = open_alone(&w, &cases[0], alone);
    (void)state;
    step_alone(&w, &before);
    for (int i = 0; i < TOKENS; i++)
        if (i % SEQ >= w.lengths[i / SEQ]) {
            w.ids[i] = (w.ids[i] + 11) % VOCAB;
            w.types[i] = 1 - w.types[i];
        }
    step_alone(&w, &after);
    assert_same(&before, &after, "other padding");
    w.ids[2] = (w.ids[2] + 11) % VOCAB; /* a valid token */
    step_alone(&w, &valid);
    assert_true(memcmp(before.lm_loss, valid.lm_loss, SEQ * sizeof(float)) != 0);
    assert_true(before.sop_loss[0] != valid.sop_loss[0] && before.sop_loss[1] == valid.sop_loss[1]);
    close_alone(&w, world);
}

/* Without token types in the batch all are 0. With others the losses change. */
static void test_no_token_types(void **state) {
    static worker w;
    static outcome none, zeros, types;
    bert_case c = cases[0];
    mt_comm *world;
    (void)state;
    world = open_alone(&w, &c, alone);
    step_alone(&w, &types);
    memset(w.types, 0, sizeof w.types);
    step_alone(&w, &zeros);
    c.types = 0;
    step_alone(&w, &none);
    assert_same(&zeros, &none, "token_types NULL");
    assert_true(zeros.lm_loss[0] != types.lm_loss[0]);
    close_alone(&w, world);
}

/* backward_scale does not change a bit on a CPU; loss_scale multiplies all gradients; so do the scales of backward. */
static void test_scales(void **state) {
    static worker w;
    static outcome plain, other;
    float four = 4.0f;
    (void)state;
    for (int i = 0; i < CASES; i++) {
        mt_comm *world = open_alone(&w, &cases[i], alone);
        step_alone(&w, &plain);
        w.s.one_pass = 1;
        step_alone(&w, &other);
        assert_same(&plain, &other, "backward_scale");
        for (int k = 0; k < PARAMS_MAX; k++) plain.grads[k] *= 4.0f;
        w.batch.loss_scale = mt_tensor_f32(&four, 1, 1);
        for (w.s.one_pass = 0; w.s.one_pass < 2; w.s.one_pass++) {
            step_alone(&w, &other);
            assert_same(&plain, &other, "loss_scale");
        }
        w.s.one_pass = 0;
        w.batch.loss_scale = mt_none();
        w.lm_scale *= 4.0f;
        w.sop_scale *= 4.0f;
        step_alone(&w, &other);
        assert_same(&plain, &other, "scales");
        close_alone(&w, world);
    }
}

/* Each dropout changes the losses of training. */
static void test_dropout(void **state) {
    static worker w;
    static outcome without, with;
    (void)state;
    for (int k = 0; k < 4; k++) {
        bert_case c = cases[0];
        mt_comm *world;
        c.desc.embedding_dropout = k == 1 ? 0.2f : 0.0f;
        c.desc.layer.dropout.attention = k == 2 ? 0.2f : 0.0f;
        c.desc.layer.dropout.hidden = k == 3 ? 0.2f : 0.0f;
        world = open_alone(&w, &c, alone);
        step_alone(&w, k ? &with : &without);
        if (k) assert_true(fabs((double)with.lm_loss[0] - (double)without.lm_loss[0]) > 1e-3);
        close_alone(&w, world);
    }
}

/* ---- parameters -------------------------------------------------------------------------------------------------- */

static void test_parameters(void **state) {
    static const char *const names[] = {"embedding.word_embeddings.weight",
                                        "embedding.position_embeddings.weight",
                                        "embedding.tokentype_embeddings.weight",
                                        "embedding.layernorm.weight",
                                        "embedding.layernorm.bias",
                                        "encoder.layers.0.input_layernorm.weight",
                                        "encoder.layers.1.mlp.linear_fc2.bias",
                                        "lm_head.dense.weight",
                                        "lm_head.dense.bias",
                                        "lm_head.layer_norm.weight",
                                        "lm_head.layer_norm.bias",
                                        "output_layer.bias",
                                        "pooler.dense.weight",
                                        "pooler.dense.bias",
                                        "binary_head.weight",
                                        "binary_head.bias"};
    static worker w;
    mt_comm *world = open_alone(&w, &cases[0], alone);
    const mt_param *p;
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!mt_params_find(w.r.params, names[i])) fail_msg("there is no %s", names[i]);
    assert_int_equal(mt_params_count(w.r.params), 5 + 2 * 12 + 5 + 4);
    assert_ptr_equal(w.bert.head.weight, w.bert.model.tokens.weight);
    p = mt_params_find(w.r.params, "output_layer.bias");
    assert_true(p->desc.rows == 1 && p->desc.cols == VOCAB && !p->desc.weight_decay);
    p = mt_params_find(w.r.params, "embedding.tokentype_embeddings.weight");
    assert_true(p->desc.rows == 2 && p->desc.cols == 24 && p->desc.weight_decay);
    p = mt_params_find(w.r.params, "binary_head.weight");
    assert_true(p->desc.rows == 2 && p->desc.cols == 24 && p->desc.weight_decay);
    close_alone(&w, world);
    world = open_alone(&w, &cases[1], alone);
    assert_non_null(mt_params_find(w.r.params, "encoder.final_layernorm.weight"));
    assert_null(mt_params_find(w.r.params, "embedding.layernorm.weight"));
    assert_int_equal(mt_params_find(w.r.params, "embedding.tokentype_embeddings.weight")->desc.rows, 3);
    close_alone(&w, world);
    world = open_alone(&w, &cases[2], alone);
    assert_null(mt_params_find(w.r.params, "embedding.position_embeddings.weight")); /* rotary */
    assert_null(mt_params_find(w.r.params, "encoder.layers.0.mlp.linear_fc1.bias"));
    assert_non_null(mt_params_find(w.r.params, "lm_head.dense.bias")); /* the heads keep theirs */
    close_alone(&w, world);
    world = open_alone(&w, &cases[3], alone);
    assert_null(mt_params_find(w.r.params, "pooler.dense.weight"));
    assert_null(mt_params_find(w.r.params, "binary_head.weight"));
    assert_null(mt_params_find(w.r.params, "encoder.final_layernorm.weight"));
    assert_true(!w.bert.pooler.weight && !w.bert.binary_head.weight);
    close_alone(&w, world);
}

/* ---- training ---------------------------------------------------------------------------------------------------- */

/* tensor, data, pipeline, sequence parallel, schedule */
static const int train_splits[][5] = {
    {2, 1, 1, 0, 0}, {4, 1, 1, 1, 0}, {8, 1, 1, 1, 0}, {1, 4, 1, 0, 0},
    {2, 2, 1, 1, 0}, {1, 1, 2, 0, 0}, {2, 1, 4, 1, 0}, {2, 2, 2, 1, MT_SCHEDULE_GPIPE},
    {4, 1, 2, 1, 0}, {1, 2, 4, 0, 0}};
#define TRAIN_SPLITS ((int)(sizeof train_splits / sizeof *train_splits))

static gpt_run train_run(int at, mt_dtype dtype, int llama, int invariant) {
    gpt_run r = {.dtype = dtype, .llama = llama, .invariant = invariant, .layers = 4, .tp = 1, .data = 1};
    r.loss_scale = dtype == MT_F16 ? 1024.0f : 0.0f;
    r.weight_decay = 0.1f;
    if (at < 0) return r;
    r.tp = train_splits[at][0];
    r.data = train_splits[at][1];
    r.pipeline = train_splits[at][2];
    r.sequence_parallel = train_splits[at][3];
    r.schedule = (mt_schedule)train_splits[at][4];
    return r;
}

/* Losses, norms and weights after the steps have the bits of one rank in invariant mode, with every recomputation, with
   one or two passes, and with a sharded optimizer. */
static void test_invariant_training(void **state) {
    static gpt_result one, many;
    (void)state;
    for (int llama = GPT_BERT; llama < GPT_BERT + 2; llama++)
        for (int dtype = MT_F32; dtype <= MT_BF16; dtype++) {
            gpt_execute(train_run(-1, (mt_dtype)dtype, llama, 8), &one);
            assert_true(one.loss[GPT_STEPS - 1] < one.loss[0]);
            for (int i = 0; i < TRAIN_SPLITS; i++) {
                gpt_run r = train_run(i, (mt_dtype)dtype, llama, 8);
                if (!test_takes((size_t)(i + llama + dtype), 2)) continue;
                r.recompute = (mt_recompute)(i % 3);
                r.one_pass = i % 2;
                r.share.sharded_optimizer = r.begins = r.data > 1;
                r.share.bucket_bytes = r.data > 1 ? 3000 : 0;
                gpt_execute(r, &many);
                if (memcmp(&one, &many, GPT_SAME_BYTES) != 0) fail_msg("%s: other bits", gpt_name(&r));
            }
        }
}

static void test_hash_log(void **state) {
    static gpt_lines one, many;
    (void)state;
    for (int llama = GPT_BERT; llama < GPT_BERT + 2; llama++) {
        one.run = train_run(-1, MT_F32, llama, 8);
        one.run.padded_vocab = llama == GPT_BERT ? 48 : 0;
        gpt_launch(&one.run, gpt_log_rank, &one);
        for (int i = 0; i < TRAIN_SPLITS; i++) {
            if (!test_takes((size_t)(i + llama), 2)) continue;
            many.run = train_run(i, MT_F32, llama, 8);
            many.run.padded_vocab = one.run.padded_vocab;
            many.run.junk = one.run.padded_vocab ? 2.0f : 0.0f;
            gpt_launch(&many.run, gpt_log_rank, &many);
            assert_int_equal(one.count, many.count);
            for (int j = 0; j < one.count; j++) {
                assert_string_equal(one.name[j], many.name[j]);
                if (one.hash[j] != many.hash[j]) fail_msg("%s: %s", gpt_name(&many.run), one.name[j]);
            }
        }
    }
}

/* The log of a step on one rank. The pooler has no weight: its output is its bias, whose bits do not depend on the
   number of rows that a product has. */
static void log_of_micro_batches(int micro, gpt_lines *out) {
    static worker w;
    split s = {1, 1, 1, 0, micro, 0};
    mt_comm *world = open_alone(&w, &cases[0], s);
    mt_hash_log *log = NULL;
    out->count = 0;
    ASSERT_STATUS(w.r.ctx, MT_SUCCESS, mt_fill(w.r.ctx, w.bert.pooler.weight->value, 0.0f));
    ASSERT_STATUS(w.r.ctx, MT_SUCCESS, mt_hash_log_create(w.r.ctx, &w.r.grid, &log));
    ASSERT_STATUS(w.r.ctx, MT_SUCCESS, run_passes(&w));
    ASSERT_STATUS(w.r.ctx, MT_SUCCESS, mt_hash_log_flush(w.r.ctx, log, gpt_keep_line, out));
    mt_hash_log_destroy(log);
    close_alone(&w, world);
}

/* The lines do not depend on the number of sequences in a micro-batch. Those of the pooler have a row for each
   sequence. */
static void test_hash_log_of_micro_batches(void **state) {
    static gpt_lines one, many;
    int compared = 0;
    (void)state;
    log_of_micro_batches(1, &one);
    for (int micro = 2; micro <= SEQUENCES; micro *= 2) {
        log_of_micro_batches(micro, &many);
        assert_int_equal(one.count, many.count);
        for (int i = 0; i < one.count; i++) {
            assert_string_equal(one.name[i], many.name[i]);
            if (!strstr(one.name[i], "pooler.dense.output") || strstr(one.name[i], "output_grad")) continue;
            compared++;
            if (one.hash[i] != many.hash[i]) fail_msg("micro-batches of %d: %s", micro, one.name[i]);
        }
    }
    assert_int_equal(compared, 2);
}

/* Outside invariant mode: the losses are near those of one rank; every recomputation, also of one layer of each stage,
   and a sharded optimizer give the same bits. */
static void test_options(void **state) {
    static gpt_result one, many, other;
    (void)state;
    for (int llama = GPT_BERT; llama < GPT_BERT + 2; llama++) {
        gpt_execute(train_run(-1, MT_F32, llama, 0), &one);
        for (int i = 0; i < TRAIN_SPLITS; i++) {
            gpt_run r = train_run(i, MT_F32, llama, 0);
            if (!test_takes((size_t)(i + llama), 2)) continue;
            r.clip = 1e9f; /* the coefficient does not depend on the order in which the norm is summed */
            gpt_execute(r, &many);
            assert_int_equal(one.count, many.count);
            for (int k = MT_RECOMPUTE_SELECTIVE; k <= MT_RECOMPUTE_FULL; k++) {
                r.recompute = (mt_recompute)k;
                gpt_execute(r, &other);
                if (memcmp(&many, &other, GPT_SAME_BYTES) != 0) fail_msg("%s: other bits", gpt_name(&r));
                if (!(other.arena_peak < many.arena_peak)) fail_msg("%s: no less memory", gpt_name(&r));
            }
            r.recompute = MT_RECOMPUTE_NONE;
            if (r.data > 1) {
                r.begins = r.share.sharded_optimizer = 1;
                r.share.bucket_bytes = 3000;
                gpt_execute(r, &other);
                if (memcmp(many.weights, other.weights, sizeof many.weights) != 0)
                    fail_msg("%s: other bits with a sharded optimizer", gpt_name(&r));
            }
            r.clip = 0;
            gpt_execute(r, &many);
            gpt_assert_near(&r, &one, &many, 1e-6);
        }
    }
}

/* A vocabulary with padding of the program's trains as one without, and what is in the padding changes no bit. */
static void test_padded_vocabulary(void **state) {
    static gpt_result one, many, with_junk;
    (void)state;
    for (int llama = GPT_BERT; llama < GPT_BERT + 2; llama++) {
        gpt_execute(train_run(-1, MT_F32, llama, 0), &one);
        for (int i = -1; i < TRAIN_SPLITS; i++) {
            gpt_run r = train_run(i, MT_F32, llama, 0);
            if (!test_takes((size_t)(i + 1 + llama), 3)) continue;
            r.padded_vocab = 48;
            gpt_execute(r, &many);
            gpt_assert_near(&r, &one, &many, 1e-6);
            r.junk = -300.0f;
            gpt_execute(r, &with_junk);
            if (memcmp(&many, &with_junk, GPT_SAME_BYTES) != 0)
                fail_msg("%s: the padding changes the results", gpt_name(&r));
        }
    }
}

/* Recomputation of only some layers: the bits of none, and less memory with each further layer. */
static void test_recompute_layers(void **state) {
    static worker w;
    static outcome none, some;
    size_t peak = 0;
    (void)state;
    for (int layers = 0; layers <= 4; layers++) {
        bert_case c = cases[0];
        mt_comm *world;
        c.desc.layers = 4;
        c.desc.recompute_layers = layers;
        c.desc.layer.recompute = layers ? MT_RECOMPUTE_FULL : MT_RECOMPUTE_NONE;
        world = open_alone(&w, &c, alone);
        step_alone(&w, layers ? &some : &none);
        if (layers) assert_same(&none, &some, "recompute_layers");
        if (layers > 1) assert_true(mt_arena_peak(w.r.ctx) < peak);
        peak = mt_arena_peak(w.r.ctx);
        close_alone(&w, world);
    }
}

/* In bf16 and f16 the losses are near those in f32, and fall. */
static void test_16bit(void **state) {
    static const int ways[] = {-1, 0, 1, 6};
    static gpt_result f32, half;
    (void)state;
    for (int llama = GPT_BERT; llama < GPT_BERT + 2; llama++) {
        gpt_execute(train_run(-1, MT_F32, llama, 0), &f32);
        for (int dtype = MT_BF16; dtype <= MT_F16; dtype++)
            for (int i = 0; i < 4; i++) {
                gpt_run r = train_run(ways[i], (mt_dtype)dtype, llama, 0);
                gpt_execute(r, &half);
                gpt_assert_near(&r, &f32, &half, gpt_half_error(r.dtype));
                assert_true(half.loss[GPT_STEPS - 1] < half.loss[0]);
                assert_int_equal(half.scaler.skipped, 0);
            }
    }
}

/* The arena that a meta context plans is what each stage uses. */
static void test_planned(void **state) {
    static gpt_result plan, found;
    (void)state;
    for (int llama = GPT_BERT; llama < GPT_BERT + 2; llama++)
        for (int i = -1; i < TRAIN_SPLITS; i++) {
            gpt_run r = train_run(i, i % 2 ? MT_BF16 : MT_F32, llama, 0), p;
            int ranks = r.tp * r.data, stages = r.pipeline ? r.pipeline : 1;
            if (!test_takes((size_t)(i + 1 + llama), 2)) continue;
            r.recompute = (mt_recompute)((i + 1) % 3);
            r.one_pass = i % 2 == 0;
            gpt_execute(r, &found);
            p = r;
            p.device = MT_DEVICE_META;
            p.out = &plan;
            for (int s = 0; s < stages; s++) {
                mt_comm *world = NULL;
                assert_int_equal(mt_comm_create_meta(ranks * stages, s * ranks, &world), MT_SUCCESS);
                if (gpt_rank(world, &p) != MT_SUCCESS) fail_msg("%s: %s", gpt_name(&r), mt_comm_last_error(world));
                mt_comm_destroy(world);
                if (plan.stage_peaks[s] != found.stage_peaks[s])
                    fail_msg("%s: stage %d: %zu bytes planned, %zu used", gpt_name(&r), s, plan.stage_peaks[s],
                             found.stage_peaks[s]);
            }
        }
}

/* ---- refusals ---------------------------------------------------------------------------------------------------- */

static const mt_transformer_layer_desc small_layer = {.hidden = 16, .heads = 4};

static void test_create_refuses(void **state) {
    static const struct {
        mt_bert_desc desc;
        const char *rest; /* of the message, behind the function */
    } bad[] = {
        {{.vocab = 0, .layers = 0, .max_seq = 4}, "vocab is 0, must be from 1 to 2147483647"},
        {{.vocab = (int64_t)INT32_MAX + 1, .layers = 2, .max_seq = 4},
         "vocab is 2147483648, must be from 1 to 2147483647"},
        {{.vocab = 8, .layers = 0}, "layers is 0, must be from 1 to 131072"},
        {{.vocab = 8, .layers = (1 << 17) + 1, .max_seq = 4}, "layers is 131073, must be from 1 to 131072"},
        {{.vocab = 8, .layers = 2, .max_seq = -1}, "max_seq is -1, must be at least 1"},
        {{.vocab = 8, .layers = 2, .max_seq = 4, .layer.max_seq = 5}, "layer.max_seq is 5, must be 0 or max_seq 4"},
        {{.vocab = 8, .layers = 2, .max_seq = 4, .layer.dropout.layer_number = 1},
         "layer.dropout.layer_number is 1, must be 0: the model numbers its layers"},
        {{.vocab = 8, .layers = 2, .max_seq = 4, .recompute_layers = 1},
         "recompute_layers is 1, must be 0 with MT_RECOMPUTE_NONE"},
        {{.vocab = 8, .layers = 2, .max_seq = 4, .recompute_layers = 3}, "recompute_layers is 3, must be from 0 to 2"},
        {{.vocab = 8, .layers = 2, .max_seq = 4, .token_types = -1}, "token_types is -1, must be from 0 to 2147483647"},
        {{.vocab = 8, .layers = 2, .max_seq = 4, .token_types = (int64_t)1 << 31},
         "token_types is 2147483648, must be from 0 to 2147483647"},
        {{.vocab = 8, .layers = 2, .max_seq = 4, .recompute_layers = -1},
         "recompute_layers is -1, must be from 0 to 2"},
        {{.vocab = 8, .layers = 2, .max_seq = 4, .embedding_dropout = 1.0f},
         "embedding_dropout is 1, must be at least 0 and below 1"},
        {{.vocab = 8, .layers = 2, .max_seq = 4, .embedding_dropout = NAN},
         "embedding_dropout is nan, must be at least 0 and below 1"},
        {{.vocab = 8, .layers = 2, .max_seq = 4, .padded_vocab = 7}, "padded_vocab is 7, must be from 8 to 2147483647"},
        {{.vocab = 8, .layers = 2, .max_seq = 4, .padded_vocab = (int64_t)1 << 31},
         "padded_vocab is 2147483648, must be from 8 to 2147483647"},
        {{.vocab = 8, .layers = 2, .max_seq = 4, .layer.activation = MT_SWIGLU},
         "layer.activation is MT_SWIGLU, which the masked-LM head cannot use; use mt_language_model_create and a head "
         "of your own"}};
    mt_bert_desc d = {.vocab = 8, .layers = 2, .max_seq = 4, .layer = small_layer};
    mt_language_model_desc m = {.vocab = 8, .layers = 2, .max_seq = 4, .token_types = -1, .layer = small_layer};
    mt_language_model model;
    mt_bert bert;
    test_rank r;
    (void)state;
    test_paper_rank(4, 1, (mt_grid_desc){.tp = 4}, NULL, &r);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        mt_bert_desc each = bad[i].desc;
        each.layer.hidden = small_layer.hidden, each.layer.heads = small_layer.heads;
        REFUSED_EXACTLY(r.ctx, MT_ERR_ARGUMENT, bad[i].rest, mt_bert_create(r.ctx, r.params, &each, &bert));
    }
    assert_int_equal(mt_bert_create(NULL, r.params, &d, &bert), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "params is NULL", mt_bert_create(r.ctx, NULL, &d, &bert));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "desc is NULL", mt_bert_create(r.ctx, r.params, NULL, &bert));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_bert_create(r.ctx, r.params, &d, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_language_model_create: token_types is -1",
            mt_language_model_create(r.ctx, r.params, &m, &model));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "desc is NULL", mt_language_model_create(r.ctx, r.params, NULL, &model));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_language_model_create(r.ctx, r.params, &m, NULL));
    d.layer.heads = 3;
    REFUSED(r.ctx, MT_ERR_SHAPE, "encoder.layers.0|hidden is 16|heads 3", mt_bert_create(r.ctx, r.params, &d, &bert));
    assert_int_equal(mt_params_count(r.params), 0);
    test_paper_rank_close(&r);
}

/* A head is refused after all other parts were created: these are removed again, and the BERT cannot be used. */
static void test_create_refuses_a_head(void **state) {
    mt_bert_desc d = {.vocab = 8, .layers = 3, .max_seq = 4, .layer = small_layer};
    mt_param_desc taken = {.name = "binary_head.bias", .rows = 1, .cols = 1};
    mt_bert_saved saved = {0};
    mt_param *p;
    mt_bert bert;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &taken, &p));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "already|binary_head.bias", mt_bert_create(r.ctx, r.params, &d, &bert));
    assert_int_equal(mt_params_mark(r.params), 1);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", mt_bert_saved_create(r.ctx, &bert, &saved));
    test_paper_rank_close(&r);
    test_paper_rank(2, 1, (mt_grid_desc){.pp = 2}, NULL, &r);
    REFUSED(r.ctx, MT_ERR_SHAPE, "3 layers|2 pipeline stages", mt_bert_create(r.ctx, r.params, &d, &bert));
    test_paper_rank_close(&r);
}

/* The arguments of a call, which the tests change one at a time. */
typedef struct call {
    const mt_bert *bert;
    const mt_batch *batch;
    const int32_t *ids, *targets, *order;
    mt_tensor lm, sop;
    mt_bert_saved *saved;
} call;

static mt_status call_forward(mt_context *ctx, call c) {
    return mt_bert_forward(ctx, c.bert, c.batch, c.ids, c.targets, c.order, c.lm, c.sop, c.saved);
}

static mt_status call_logits(mt_context *ctx, call c) {
    return mt_bert_logits(ctx, c.bert, c.batch, c.ids, c.lm, c.sop);
}

#define BAD_SEQ 6
#define BAD_TOKENS (2 * BAD_SEQ)

/* What forward and logits refuse alike. */
static void batches_are_refused(mt_context *ctx, call good, mt_status (*f)(mt_context *ctx, call c)) {
    static const int32_t lengths[] = {6, 7}, types[BAD_TOKENS] = {0, 1, 0, 2}, negative[BAD_TOKENS] = {0, -1};
    int32_t ids[BAD_TOKENS] = {0};
    mt_batch b = *good.batch;
    call c = good;
    c.batch = &b;
    assert_int_equal(f(NULL, good), MT_ERR_ARGUMENT);
    b.seq = 9;
    REFUSED(ctx, MT_ERR_SHAPE, "batch.seq is 9, must be at most max_seq 8", f(ctx, c));
    b.seq = 5;
    REFUSED(ctx, MT_ERR_SHAPE, "10 tokens|4 tensor ranks", f(ctx, c));
    b = *good.batch;
    b.sequences = 0;
    REFUSED(ctx, MT_ERR_ARGUMENT, "batch.sequences is 0", f(ctx, c));
    b = *good.batch;
    b.lengths = lengths;
    REFUSED(ctx, MT_ERR_DATA, "lengths[1] is 7|[0, 6]", f(ctx, c));
    b = *good.batch;
    b.token_types = types;
    REFUSED(ctx, MT_ERR_DATA, "token type 2|index 3|[0, 2)", f(ctx, c));
    b.token_types = negative;
    REFUSED(ctx, MT_ERR_DATA, "token type -1|index 1", f(ctx, c));
    c = good;
    c.batch = NULL;
    REFUSED(ctx, MT_ERR_ARGUMENT, "batch is NULL", f(ctx, c));
    c = good;
    c.bert = NULL;
    REFUSED(ctx, MT_ERR_ARGUMENT, "not created", f(ctx, c));
    c = good;
    c.ids = NULL;
    REFUSED(ctx, MT_ERR_ARGUMENT, "ids is NULL", f(ctx, c));
    c.ids = ids;
    ids[7] = 10;
    REFUSED(ctx, MT_ERR_DATA, "token id 10|index 7|[0, 10)", f(ctx, c));
}

static void losses_are_refused(mt_context *ctx, call good) {
    int32_t targets[BAD_TOKENS] = {0}, order[2] = {0, 2};
    mt_bert_saved none = {0};
    mt_batch b = *good.batch;
    call c = good;
    targets[7] = 10;
    c.targets = targets;
    REFUSED(ctx, MT_ERR_DATA, "target 10|index 7|[0, 10)", call_forward(ctx, c));
    targets[7] = -1;
    REFUSED(ctx, MT_ERR_DATA, "target -1|index 7", call_forward(ctx, c));
    c.targets = NULL;
    REFUSED(ctx, MT_ERR_ARGUMENT, "NULL|12 elements", call_forward(ctx, c));
    c = good;
    c.order = order;
    REFUSED(ctx, MT_ERR_DATA, "sentence order 2|index 1|[0, 2)", call_forward(ctx, c));
    order[1] = -1;
    REFUSED(ctx, MT_ERR_DATA, "sentence order -1|index 1", call_forward(ctx, c));
    c.order = NULL;
    REFUSED(ctx, MT_ERR_ARGUMENT, "NULL|2 elements", call_forward(ctx, c));
    c = good;
    c.lm.cols = 11;
    REFUSED(ctx, MT_ERR_SHAPE, "lm_loss|[1, 11]|[1, 12]", call_forward(ctx, c));
    c.lm = mt_none();
    REFUSED(ctx, MT_ERR_SHAPE, "lm_loss|[0, 0]|[1, 12]", call_forward(ctx, c));
    c.lm = with_dtype(good.lm, MT_BF16);
    REFUSED(ctx, MT_ERR_DTYPE, "lm_loss|bf16", call_forward(ctx, c));
    c = good;
    c.sop.cols = 1;
    REFUSED(ctx, MT_ERR_SHAPE, "sop_loss|[1, 1]|[1, 2]", call_forward(ctx, c));
    c.sop = mt_none();
    REFUSED(ctx, MT_ERR_SHAPE, "sop_loss|[0, 0]|[1, 2]", call_forward(ctx, c));
    c = good;
    c.saved = &none;
    REFUSED(ctx, MT_ERR_ARGUMENT, "mt_bert_saved_create", call_forward(ctx, c));
    c = good;
    c.batch = &b;
    b.backward_scale = NAN;
    REFUSED(ctx, MT_ERR_ARGUMENT, "backward_scale is|nan", call_forward(ctx, c));
}

static void logits_are_refused(mt_context *ctx, call good) {
    call c = good;
    c.lm.rows = 2;
    REFUSED(ctx, MT_ERR_SHAPE, "lm_logits|[2, 10]|[12, 10]", call_logits(ctx, c));
    c.lm = with_dtype(good.lm, MT_I32);
    REFUSED(ctx, MT_ERR_DTYPE, "lm_logits|i32", call_logits(ctx, c));
    c = good;
    c.sop.cols = 1;
    REFUSED(ctx, MT_ERR_SHAPE, "sop_logits|[2, 1]|[2, 2]", call_logits(ctx, c));
    c.sop = with_dtype(good.sop, MT_I32);
    REFUSED(ctx, MT_ERR_DTYPE, "sop_logits|i32", call_logits(ctx, c));
}

static void test_calls_refuse(void **state) {
    static const int32_t zeros[BAD_TOKENS] = {0};
    static const mt_batch batch = {.sequences = 2, .seq = BAD_SEQ};
    mt_bert_desc d = {.vocab = 10, .layers = 2, .max_seq = 8, .layer = small_layer};
    mt_bert_saved saved = {0};
    mt_bert bert;
    float *out;
    call losses = {&bert, &batch, zeros, zeros, zeros, mt_none(), mt_none(), &saved}, logits;
    test_rank r;
    (void)state;
    test_paper_rank(4, 1, (mt_grid_desc){.tp = 4}, NULL, &r);
    out = test_floats(&r, BAD_TOKENS * 10 + 8, 7.0f);
    d.layer.sequence_parallel = 1;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bert_create(r.ctx, r.params, &d, &bert));
    assert_int_equal(mt_bert_saved_create(NULL, &bert, &saved), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_bert_saved_create|not created", mt_bert_saved_create(r.ctx, NULL, &saved));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_bert_saved_create(r.ctx, &bert, NULL));
    mt_bert_saved_destroy(NULL);
    mt_bert_saved_destroy(&saved);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bert_saved_create(r.ctx, &bert, &saved));
    logits = losses;
    losses.lm = mt_tensor_f32(out, 1, BAD_TOKENS);
    losses.sop = mt_tensor_f32(out + BAD_TOKENS, 1, 2);
    logits.lm = mt_tensor_f32(out, BAD_TOKENS, 10);
    logits.sop = mt_tensor_f32(out + BAD_TOKENS * 10, 2, 2);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_params_init before", call_forward(r.ctx, losses));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_params_init before", call_logits(r.ctx, logits));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    batches_are_refused(r.ctx, losses, call_forward);
    batches_are_refused(r.ctx, logits, call_logits);
    losses_are_refused(r.ctx, losses);
    logits_are_refused(r.ctx, logits);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "holds no forward", mt_bert_backward(r.ctx, &bert, 1, 1, &saved));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "holds no forward", mt_bert_backward(r.ctx, &bert, 1, 1, NULL));
    assert_int_equal(mt_bert_backward(NULL, &bert, 1, 1, &saved), MT_ERR_ARGUMENT);
    test_untouched("out", out, BAD_TOKENS * 10 + 8, 7.0f);
    for (int i = 0; i < MT_COLLECTIVE_COUNT; i++) assert_int_equal(mt_comm_ledger(r.grid.tp).calls[i], 0);
    assert_int_equal(mt_arena_mark(r.ctx), 0);
    mt_bert_saved_destroy(&saved);
    test_paper_rank_close(&r);
}

/* A model without a binary head refuses what belongs to one. A GPT refuses token types. */
static void test_missing_parts_refuse(void **state) {
    static const int32_t ids[BAD_TOKENS] = {0};
    mt_batch batch = {.sequences = 2, .seq = BAD_SEQ};
    mt_bert_desc d = {.vocab = 10, .layers = 2, .max_seq = 8, .no_binary_head = 1, .layer = small_layer};
    mt_gpt_desc g = {.vocab = 10, .layers = 2, .max_seq = 8, .layer = small_layer};
    mt_bert bert;
    mt_gpt gpt;
    float *out;
    mt_tensor lm, sop;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    out = test_floats(&r, BAD_TOKENS * 10 + 8, 7.0f);
    lm = mt_tensor_f32(out, 1, BAD_TOKENS);
    sop = mt_tensor_f32(out + BAD_TOKENS * 10, 1, 2);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bert_create(r.ctx, r.params, &d, &bert));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "sentence_order|no_binary_head",
            mt_bert_forward(r.ctx, &bert, &batch, ids, ids, ids, lm, mt_none(), NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "sop_loss|no_binary_head",
            mt_bert_forward(r.ctx, &bert, &batch, ids, ids, NULL, lm, sop, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "sop_logits|no_binary_head",
            mt_bert_logits(r.ctx, &bert, &batch, ids, mt_none(), mt_tensor_f32(sop.data, 2, 2)));
    test_untouched("out", out, BAD_TOKENS * 10 + 8, 7.0f);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, test_rank_renew(&r));
    out = test_floats(&r, BAD_TOKENS * 10, 7.0f);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_create(r.ctx, r.params, &g, &gpt));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    batch.token_types = ids;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_gpt_forward|token_types|none",
            mt_gpt_forward(r.ctx, &gpt, &batch, ids, ids, mt_tensor_f32(out, 1, BAD_TOKENS), NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_gpt_logits|token_types|none",
            mt_gpt_logits(r.ctx, &gpt, &batch, ids, mt_tensor_f32(out, BAD_TOKENS, 10)));
    test_untouched("out", out, BAD_TOKENS * 10, 7.0f);
    test_paper_rank_close(&r);
}

/* One forward allows one backward. With backward_scale backward refuses another lm_scale, but takes any sop_scale. */
static void test_backward_refuses(void **state) {
    static const float others[] = {0.0f, 1.0f, NAN};
    static worker w;
    split s = alone;
    mt_comm *world;
    (void)state;
    s.one_pass = 1;
    world = open_alone(&w, &cases[0], s);
    ASSERT_STATUS(w.r.ctx, MT_SUCCESS, forward_of(&w, 0, SEQUENCES, mt_none(), mt_none(), &w.saved[0]));
    for (int i = 0; i < 3; i++)
        REFUSED(w.r.ctx, MT_ERR_ARGUMENT, "mt_bert_backward: lm_scale is|, must be|the backward_scale of the batch",
                mt_bert_backward(w.r.ctx, &w.bert, others[i], 1.0f, &w.saved[0]));
    ASSERT_STATUS(w.r.ctx, MT_SUCCESS, mt_bert_backward(w.r.ctx, &w.bert, w.lm_scale, -3.0f, &w.saved[0]));
    REFUSED(w.r.ctx, MT_ERR_ARGUMENT, "holds no forward",
            mt_bert_backward(w.r.ctx, &w.bert, w.lm_scale, 1.0f, &w.saved[0]));
    mt_arena_release(w.r.ctx, 0);
    close_alone(&w, world);
}

/* Tensors that a stage lacks, or does not take. */
static void test_stages_refuse(void **state) {
    static const mt_context_desc meta = {.device = MT_DEVICE_META};
    mt_bert_desc d = {.vocab = 11, .layers = 2, .max_seq = 4, .layer = small_layer};
    mt_batch batch = {.sequences = 1, .seq = 4};
    (void)state;
    for (int stage = 0; stage < 2; stage++) {
        mt_tensor x = mt_none(), none = mt_none(), dx = mt_none(), in, out, lm, sop;
        const int32_t *ids;
        mt_bert_saved saved;
        mt_bert bert;
        test_rank r;
        test_paper_rank(2, stage, (mt_grid_desc){.pp = 2}, &meta, &r);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bert_create(r.ctx, r.params, &d, &bert));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bert_saved_create(r.ctx, &bert, &saved));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 16, &x));
        if (stage) ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 16, &dx));
        ids = (const int32_t *)x.data;
        lm = mt_tensor_f32((float *)x.data, 1, 4), sop = mt_tensor_f32((float *)x.data, 1, 1);
        in = stage ? x : none, out = stage ? none : x;
        REFUSED(r.ctx, MT_ERR_ARGUMENT, stage ? "mt_bert_forward: stage 1 of 2 needs input" : "needs output",
                mt_bert_forward(r.ctx, &bert, &batch, ids, ids, ids, lm, sop, &saved));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, stage ? "takes no output" : "takes no input",
                mt_bert_stage_forward(r.ctx, &bert, &batch, ids, ids, ids, x, x, lm, sop, &saved));
        if (stage)
            REFUSED(r.ctx, MT_ERR_SHAPE, "lm_loss|[0, 0]|[1, 4]",
                    mt_bert_stage_forward(r.ctx, &bert, &batch, ids, ids, ids, in, out, none, sop, &saved));
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_bert_stage_forward(r.ctx, &bert, &batch, ids, ids, ids, in, out, stage ? lm : none,
                                            stage ? sop : none, &saved));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, stage ? "takes no doutput" : "takes no dinput",
                mt_bert_stage_backward(r.ctx, &bert, 1, 1, x, x, &saved));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, stage ? "needs dinput" : "needs doutput",
                mt_bert_backward(r.ctx, &bert, 1, 1, &saved));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bert_stage_backward(r.ctx, &bert, 1, 1, out, dx, &saved));
        mt_bert_saved_destroy(&saved);
        test_paper_rank_close(&r);
    }
}

static void test_language_model_refuses(void **state) {
    static const int32_t ids[BAD_TOKENS] = {0};
    mt_language_model_desc d = {.vocab = 10, .layers = 1, .max_seq = 8, .layer = small_layer};
    mt_batch batch = {.sequences = 2, .seq = BAD_SEQ}, typed = batch;
    mt_language_model_saved saved = {0}, kept;
    mt_tensor y, dy, none = mt_none();
    mt_language_model m;
    test_rank r;
    (void)state;
    typed.token_types = ids;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_language_model_create(r.ctx, r.params, &d, &m));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_language_model_saved_create(r.ctx, &m, &kept));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", mt_language_model_saved_create(r.ctx, NULL, &saved));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_language_model_saved_create(r.ctx, &m, NULL));
    mt_language_model_saved_destroy(NULL);
    y = test_tensor(&r, BAD_TOKENS, 16, 7.0f);
    dy = test_tensor(&r, BAD_TOKENS, 16, 0.5f);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_language_model_saved_create",
            mt_language_model_forward(r.ctx, &m, &batch, ids, none, y, &saved));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "token_types|none",
            mt_language_model_forward(r.ctx, &m, &typed, ids, none, y, &kept));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "needs output",
            mt_language_model_forward(r.ctx, &m, &batch, ids, none, none, &kept));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "takes no input", mt_language_model_forward(r.ctx, &m, &batch, ids, dy, y, &kept));
    REFUSED(r.ctx, MT_ERR_SHAPE, "output|[11, 16]|[12, 16]",
            mt_language_model_forward(r.ctx, &m, &batch, ids, none, mt_tensor_rows(y, 0, 11), &kept));
    REFUSED(r.ctx, MT_ERR_DTYPE, "output|bf16",
            mt_language_model_forward(r.ctx, &m, &batch, ids, none, with_dtype(y, MT_BF16), &kept));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "batch is NULL", mt_language_model_forward(r.ctx, &m, NULL, ids, none, y, &kept));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "ids is NULL", mt_language_model_forward(r.ctx, &m, &batch, NULL, none, y, &kept));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "holds no forward", mt_language_model_backward(r.ctx, &m, dy, none, &kept));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "holds no forward", mt_language_model_backward(r.ctx, &m, dy, none, NULL));
    test_untouched("y", (const float *)y.data, BAD_TOKENS * 16, 7.0f);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_language_model_forward(r.ctx, &m, &batch, ids, none, y, &kept));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "needs doutput", mt_language_model_backward(r.ctx, &m, none, none, &kept));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "takes no dinput", mt_language_model_backward(r.ctx, &m, dy, y, &kept));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_language_model_backward(r.ctx, &m, dy, none, &kept));
    test_untouched("doutput", (const float *)dy.data, BAD_TOKENS * 16, 0.5f);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "holds no forward", mt_language_model_backward(r.ctx, &m, dy, none, &kept));
    mt_language_model_saved_destroy(&kept);
    test_paper_rank_close(&r);
}

/* Backward does not change doutput, with and without a final norm. */
static void test_language_model_keeps_doutput(void **state) {
    static const int32_t ids[BAD_TOKENS] = {0, 1, 2};
    (void)state;
    for (int placement = MT_PRE_LN; placement <= MT_RESIDUAL_POST_LN; placement++) {
        mt_language_model_desc d = {.vocab = 10, .layers = 3, .max_seq = 8, .layer = small_layer};
        mt_batch batch = {.sequences = 2, .seq = BAD_SEQ};
        mt_language_model_saved saved;
        mt_language_model m;
        mt_tensor y, dy;
        test_rank r;
        test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
        d.layer.norm.placement = (mt_ln_placement)placement;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_language_model_create(r.ctx, r.params, &d, &m));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_language_model_saved_create(r.ctx, &m, &saved));
        y = test_tensor(&r, BAD_TOKENS, 16, NAN);
        dy = test_tensor(&r, BAD_TOKENS, 16, 0.5f);
        ((float *)dy.data)[0] = 0.25f;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_language_model_forward(r.ctx, &m, &batch, ids, mt_none(), y, &saved));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_language_model_backward(r.ctx, &m, dy, mt_none(), &saved));
        assert_true(((const float *)dy.data)[0] == 0.25f);
        test_untouched("doutput", (const float *)dy.data + 1, BAD_TOKENS * 16 - 1, 0.5f);
        mt_language_model_saved_destroy(&saved);
        test_paper_rank_close(&r);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_split),
        cmocka_unit_test(test_every_split_has_the_same_bits),
        cmocka_unit_test(test_logits_and_evaluation),
        cmocka_unit_test(test_finite_differences),
        cmocka_unit_test(test_language_model_with_another_head),
        cmocka_unit_test(test_inference),
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_no_token_types),
        cmocka_unit_test(test_scales),
        cmocka_unit_test(test_dropout),
        cmocka_unit_test(test_parameters),
        cmocka_unit_test(test_invariant_training),
        cmocka_unit_test(test_hash_log),
        cmocka_unit_test(test_hash_log_of_micro_batches),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_padded_vocabulary),
        cmocka_unit_test(test_recompute_layers),
        cmocka_unit_test(test_16bit),
        cmocka_unit_test(test_planned),
        cmocka_unit_test(test_create_refuses),
        cmocka_unit_test(test_create_refuses_a_head),
        cmocka_unit_test(test_calls_refuse),
        cmocka_unit_test(test_missing_parts_refuse),
        cmocka_unit_test(test_backward_refuses),
        cmocka_unit_test(test_stages_refuse),
        cmocka_unit_test(test_language_model_refuses),
        cmocka_unit_test(test_language_model_keeps_doutput),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
