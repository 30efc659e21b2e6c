/* test_invariant.c - tests invariant mode: the bits of every split against those of one rank.

   Every model is trained with dropout on the grids of tensor x data ranks x sequence parallelism that 8 ranks allow:
   for 3 steps on one grid in three, or with MT_TEST_ALL=1 for 20 steps on every grid. Losses, gradients, gradient
   norms, weights and optimizer state of every step are compared bit by bit with those of one rank. Each layer is
   also compared by itself.

       cc -std=gnu17 -O2 -I. tests/test_invariant.c -lpthread -lm */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test_ranks.h"

#define RANKS 8
#ifndef SMALL_MODELS_ONLY
#define SMALL_MODELS_ONLY 0
#endif

/* ---- models ------------------------------------------------------------------------------------------------------ */

typedef struct model {
    const char *name;
    int invariant, invariant_data, steps;
    int64_t sequences; /* per step, on all ranks together */
    int64_t seq;
    int padded; /* 1: the sequences have different lengths */
    mt_gpt_desc gpt;
} model;

/* Vocabularies, inner widths and numbers of query groups that 8 shards do not divide evenly. */
static const model models[] = {
    {"GPT-2",
     8,
     8,
     20,
     8,
     16,
     0,
     {.vocab = 61,
      .layers = 2,
      .max_seq = 20,
      .embedding_dropout = 0.1f,
      .layer = {.hidden = 32, .heads = 8, .ffn = 52, .dropout.attention = 0.1f, .dropout.hidden = 0.1f}}},
    {"Llama, two heads per group",
     8,
     8,
     20,
     16,
     8,
     0,
     {.vocab = 64,
      .layers = 2,
      .max_seq = 8,
      .untied_head = 1,
      .label_smoothing = 0.1f,
      .embedding_dropout = 0.1f,
      .layer = {.hidden = 64,
                .heads = 16,
                .kv_heads = 8,
                .ffn = 44,
                .norm.kind = MT_RMS_NORM,
                .activation = MT_SWIGLU,
                .scores.rotary_base = 10000.0f,
                .no_bias = 1,
                .dropout.attention = 0.1f,
                .dropout.hidden = 0.1f}}},
    {"BERT, padded sequences",
     8,
     8,
     20,
     8,
     16,
     1,
     {.vocab = 50,
      .layers = 2,
      .max_seq = 16,
      .embedding_dropout = 0.1f,
      .layer = {.hidden = 48,
                .heads = 12,
                .norm.placement = MT_POST_LN,
                .activation = MT_GELU_ERF,
                .scores.mask = MT_MASK_BIDIRECTIONAL,
                .dropout.attention = 0.1f,
                .dropout.hidden = 0.1f}}},
    {"residual after norm, 10 groups of 2, micro-batches of 3",
     8,
     8,
     20,
     12,
     8,
     0,
     {.vocab = 61,
      .layers = 2,
      .max_seq = 8,
      .untied_head = 1,
      .layer = {.hidden = 40,
                .heads = 20,
                .kv_heads = 10,
                .norm.placement = MT_RESIDUAL_POST_LN,
                .activation = MT_SWIGLU,
                .dropout.attention = 0.1f,
                .dropout.hidden = 0.1f}}},
    {"4 shards, no dropout",
     4,
     4,
     20,
     4,
     8,
     0,
     {.vocab = 33, .layers = 1, .max_seq = 8, .layer = {.hidden = 24, .heads = 4}}},
    {"2 query groups on 8 data ranks",
     2,
     8,
     20,
     8,
     8,
     0,
     {.vocab = 35,
      .layers = 1,
      .max_seq = 8,
      .embedding_dropout = 0.1f,
      .layer = {.hidden = 24, .heads = 6, .kv_heads = 2, .dropout.attention = 0.1f, .dropout.hidden = 0.1f}}},
    {"3 query groups on 8 shards",
     8,
     2,
     20,
     4,
     8,
     0,
     {.vocab = 33,
      .layers = 1,
      .max_seq = 8,
      .layer = {.hidden = 36, .heads = 18, .kv_heads = 3, .scores.rotary_base = 100.0f, .dropout.attention = 0.1f}}},
    {"packed documents; ALiBi, window and soft cap of 9 heads on 8 shards",
     8,
     2,
     20,
     4,
     8,
     0,
     {.vocab = 33,
      .layers = 1,
      .max_seq = 8,
      .layer = {.hidden = 36,
                .heads = 9,
                .scores.alibi = 1,
                .scores.window = 5,
                .scores.softcap = 2.0f,
                .dropout.attention = 0.1f}}},
    {"separate queries, one key and one value on 4 shards",
     4,
     2,
     20,
     4,
     8,
     0,
     {.vocab = 33,
      .layers = 1,
      .max_seq = 8,
      .layer = {.hidden = 32, .heads = 8, .kv_heads = 1, .qkv_layout = MT_QKV_SEPARATE, .dropout.hidden = 0.1f}}},
    {"16 shards, some of the vocabulary empty",
     16,
     2,
     20,
     4,
     16,
     0,
     {.vocab = 9, .layers = 1, .max_seq = 16, .untied_head = 1, .layer = {.hidden = 32, .heads = 16, .ffn = 17}}},
    {"9 groups on 8 shards",
     8,
     8,
     20,
     8,
     8,
     0,
     {.vocab = 61,
      .layers = 1,
      .max_seq = 8,
      .layer = {.hidden = 36, .heads = 9, .scores.rotary_base = 100.0f, .ffn = 8}}},
    {"concatenated queries, keys and values",
     8,
     8,
     20,
     8,
     8,
     0,
     {.vocab = 61,
      .layers = 1,
      .max_seq = 8,
      .layer = {.hidden = 32,
                .heads = 16,
                .ffn = 20,
                .qkv_layout = MT_QKV_CONCATENATED,
                .scores.rotary_base = 100.0f,
                .dropout.attention = 0.1f}}},
    {"separate queries, keys and values, two heads per group",
     8,
     8,
     20,
     8,
     8,
     0,
     {.vocab = 61,
      .layers = 1,
      .max_seq = 8,
      .untied_head = 1,
      .layer = {.hidden = 64,
                .heads = 32,
                .kv_heads = 16,
                .ffn = 20,
                .qkv_layout = MT_QKV_SEPARATE,
                .scores.rotary_base = 100.0f,
                .dropout.attention = 0.1f}}},
    {"sizes that GEMM libraries block",
     8,
     8,
     3,
     8,
     96,
     0,
     {.vocab = 500,
      .layers = 1,
      .max_seq = 96,
      .embedding_dropout = 0.1f,
      .layer = {.hidden = 400, .heads = 8, .ffn = 1700, .dropout.attention = 0.1f, .dropout.hidden = 0.1f}}},
};
#define MODELS (sizeof models / sizeof *models)

static int steps_of(const model *m) { return SANITIZED ? 2 : test_all() ? m->steps : 3; }

/* ---- one run ----------------------------------------------------------------------------------------------------- */

typedef struct split {
    int tp, data, sequence_parallel;
} split;

/* The values that one rank has computed. Other splits are compared with them. */
typedef struct trace {
    float *data;
    int64_t count, room;
} trace;

typedef struct run {
    const char *name;
    const model *model;
    int layer; /* index into the list of layers, for layer_rank */
    split split;
    int invariant; /* number of virtual shards V; 0: invariant mode is off */
    trace *reference;
    int compares; /* 0: rank 0 writes the reference */
    size_t arena_bytes;
    int *differs; /* if not NULL: count differences instead of failing */
} run;

typedef struct worker {
    test_rank rank;
    const run *run;
    mt_gpt gpt;
    mt_gpt_saved saved;
    mt_optimizer optimizer;
    int64_t at; /* position in the trace */
    float *host;
} worker;

static mt_status extend(trace *t, const float *x, int64_t n) {
    if (t->count + n > t->room) {
        t->room = 2 * (t->count + n);
        t->data = (float *)realloc(t->data, (size_t)t->room * sizeof(float));
        if (!t->data) return MT_ERR_MEMORY;
    }
    memcpy(t->data + t->count, x, (size_t)n * sizeof(float));
    t->count += n;
    return MT_SUCCESS;
}

static mt_status complain(const run *run, const char *what, const char *name, int step, const float *x,
                          const float *want) {
    int64_t i = 0;
    while (memcmp(want + i, x + i, sizeof *x) == 0) i++;
    fprintf(stderr, "%s, tensor %d x data %d%s: step %d: %s%s[%lld] is %.9g (%a), on one rank %.9g (%a)\n", run->name,
            run->split.tp, run->split.data, run->split.sequence_parallel ? ", sequence parallel" : "", step, what, name,
            (long long)i, (double)x[i], (double)x[i], (double)want[i], (double)want[i]);
    return MT_ERR_DATA;
}

static int is_real(const worker *w) { return mt_context_device(w->rank.ctx) != MT_DEVICE_META; }

static mt_status record(worker *w, const char *what, const char *name, int step, const float *x, int64_t n) {
    const run *run = w->run;
    const float *want = run->reference->data + w->at;
    if (!is_real(w)) return MT_SUCCESS;
    if (!run->compares) return mt_comm_rank(w->rank.world) == 0 ? extend(run->reference, x, n) : MT_SUCCESS;
    CHECK(w->at + n <= run->reference->count);
    w->at += n;
    if (memcmp(want, x, (size_t)n * sizeof(float)) == 0) return MT_SUCCESS;
    if (!run->differs) return complain(run, what, name, step, x, want);
    if (mt_comm_rank(w->rank.world) == 0) ++*run->differs;
    return MT_SUCCESS;
}

static mt_status record_shard(worker *w, const char *what, const mt_param *p, int step, mt_tensor shard) {
    MT_TRY(mt_param_gather(w->rank.ctx, w->rank.params, p, shard, w->host));
    return record(w, what, p->name, step, w->host, p->desc.rows * p->desc.cols);
}

static mt_status record_gradients(worker *w, int step) {
    for (int i = 0; i < mt_params_count(w->rank.params); i++) {
        const mt_param *p = mt_params_at(w->rank.params, i);
        MT_TRY(record_shard(w, "gradient of ", p, step, p->grad));
    }
    return MT_SUCCESS;
}

static int32_t token_of(int step, int64_t sequence, int64_t position, int64_t vocab) {
    uint64_t seed = (uint64_t)step * 1000003 + (uint64_t)sequence * 1009 + (uint64_t)position;
    return (int32_t)(test_random(&seed) % (uint64_t)vocab);
}

/* A model with ALiBi has packed documents: two in each sequence. */
static mt_status pack_documents(worker *w, mt_batch *batch) {
    int64_t seq = batch->seq, n = 2 * batch->sequences;
    mt_tensor ends;
    if (!w->run->model->gpt.layer.scores.alibi) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(w->rank.ctx, MT_I32, 1, n + 1, &ends));
    for (int64_t i = 0; i <= n && is_real(w); i++)
        ((int32_t *)ends.data)[i] = (int32_t)(i / 2 * seq + i % 2 * (seq / 3 + 1));
    batch->cu_seqlens = (const int32_t *)ends.data;
    batch->documents = n;
    return MT_SUCCESS;
}

/* Runs forward and backward for sequences [first, first + count). *loss is the sum of their losses. */
static mt_status micro_batch(worker *w, int step, int64_t first, int64_t count, mt_tensor loss) {
    const model *m = w->run->model;
    mt_context *ctx = w->rank.ctx;
    mt_batch batch = {.sequences = count, .seq = m->seq, .first_sequence = first, .seed = 7, .step = (uint64_t)step};
    int64_t tokens = count * m->seq;
    float scale = 1.0f / (float)(m->sequences * m->seq);
    size_t mark = mt_arena_mark(ctx);
    mt_tensor ids, targets, lengths, losses;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, tokens, &ids));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, tokens, &targets));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, count, &lengths));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, tokens, &losses));
    for (int64_t i = 0; i < tokens && is_real(w); i++) {
        ((int32_t *)ids.data)[i] = token_of(step, first + i / m->seq, i % m->seq, m->gpt.vocab);
        ((int32_t *)targets.data)[i] = token_of(step, first + i / m->seq, i % m->seq + 1, m->gpt.vocab);
    }
    for (int64_t i = 0; i < count && is_real(w); i++)
        ((int32_t *)lengths.data)[i] = (int32_t)(m->seq - (first + i) % 5);
    if (w->rank.grid.tp_size % 4 == 2) batch.backward_scale = scale; /* the loss and its gradient in one call */
    if (m->padded) batch.lengths = (const int32_t *)lengths.data;
    MT_TRY(pack_documents(w, &batch));
    MT_TRY(mt_gpt_forward(ctx, &w->gpt, &batch, ids.data, targets.data, losses, &w->saved));
    MT_TRY(mt_sum(ctx, losses, loss));
    MT_TRY(mt_gpt_backward(ctx, &w->gpt, scale, &w->saved));
    mt_arena_release(ctx, mark);
    return mt_accumulate_gradients(ctx, w->rank.params);
}

static mt_status micro_batches(worker *w, int step, float *loss) {
    const model *m = w->run->model;
    mt_context *ctx = w->rank.ctx;
    int64_t each = mt_invariant_micro_batch(m->invariant_data, m->sequences),
            share = m->sequences / w->rank.grid.dp_size;
    int64_t n = share / each;
    mt_tensor losses;
    size_t mark = mt_arena_mark(ctx);
    MT_TRY(mt_arena_tensor(ctx, MT_F32, n, 1, &losses));
    MT_TRY(mt_fill(ctx, losses, 0.0f));
    for (int64_t i = 0; i < n; i++)
        MT_TRY(micro_batch(w, step, w->rank.grid.dp_rank * share + i * each, each, mt_tensor_rows(losses, i, 1)));
    MT_TRY(mt_tree_sum(ctx, losses));
    MT_TRY(mt_all_reduce(ctx, w->rank.grid.dp, losses.data, losses.data, 1, MT_F32, MT_SUM));
    MT_TRY(mt_download(ctx, mt_tensor_rows(losses, 0, 1), loss));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

static mt_status train_step(worker *w, int step) {
    mt_context *ctx = w->rank.ctx;
    mt_params *params = w->rank.params;
    float loss, norm;
    MT_TRY(mt_params_zero_grad(ctx, params));
    MT_TRY(micro_batches(w, step, &loss));
    MT_TRY(record(w, "loss", "", step, &loss, 1));
    MT_TRY(mt_sync_gradients(ctx, params));
    MT_TRY(record_gradients(w, step));
    MT_TRY(mt_grad_norm(ctx, params, &norm));
    MT_TRY(record(w, "gradient norm", "", step, &norm, 1));
    MT_TRY(mt_optimizer_step(ctx, &w->optimizer, 1e-2f, mt_clip_coefficient(norm, 0.5f)));
    for (int i = 0; i < mt_params_count(params); i++) {
        const mt_param *p = mt_params_at(params, i);
        mt_tensor m, v;
        MT_TRY(mt_optimizer_moments(ctx, &w->optimizer, p, &m, &v));
        MT_TRY(record_shard(w, "", p, step, p->value));
        MT_TRY(record_shard(w, "first moment of ", p, step, m));
        MT_TRY(record_shard(w, "second moment of ", p, step, v));
    }
    return MT_SUCCESS;
}

/* Compares the logits of inference, also for a single token. */
static mt_status infer(worker *w) {
    const model *m = w->run->model;
    mt_context *ctx = w->rank.ctx;
    int64_t tp = w->run->split.sequence_parallel ? w->rank.grid.tp_size : 1, lengths[] = {1, 2, m->seq};
    size_t mark = mt_arena_mark(ctx);
    for (int i = 0; i < 3; i++) {
        mt_batch batch = {.sequences = 1, .seq = lengths[i]};
        int64_t n = lengths[i] * m->gpt.vocab;
        mt_tensor ids, logits;
        if (lengths[i] % tp != 0) {
            w->at += w->run->compares ? n : 0; /* sequence parallelism cannot divide so few tokens */
            continue;
        }
        MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, lengths[i], &ids));
        MT_TRY(mt_arena_tensor(ctx, MT_F32, lengths[i], m->gpt.vocab, &logits));
        for (int64_t t = 0; t < lengths[i] && is_real(w); t++)
            ((int32_t *)ids.data)[t] = token_of(0, 0, t, m->gpt.vocab);
        MT_TRY(mt_gpt_logits(ctx, &w->gpt, &batch, ids.data, logits));
        MT_TRY(record(w, "logits", "", 0, logits.data, n));
        mt_arena_release(ctx, mark);
    }
    return MT_SUCCESS;
}

static int64_t largest_parameter(const mt_params *params) {
    int64_t most = 0;
    for (int i = 0; i < mt_params_count(params); i++) {
        const mt_param *p = mt_params_at(params, i);
        if (p->desc.rows * p->desc.cols > most) most = p->desc.rows * p->desc.cols;
    }
    return most;
}

static mt_status train(worker *w) {
    const run *run = w->run;
    mt_gpt_desc gpt = run->model->gpt;
    mt_optimizer_desc adamw = {.weight_decay = 0.1f};
    mt_context *ctx = w->rank.ctx;
    gpt.layer.sequence_parallel = run->split.sequence_parallel;
    MT_TRY(mt_gpt_create(ctx, w->rank.params, &gpt, &w->gpt));
    MT_TRY(mt_gpt_saved_create(ctx, &w->gpt, &w->saved));
    MT_TRY(mt_params_init(ctx, w->rank.params, 99));
    MT_TRY(mt_optimizer_create(ctx, w->rank.params, &adamw, &w->optimizer));
    w->host = test_floats(&w->rank, largest_parameter(w->rank.params), 0.0f);
    for (int step = 0; step < steps_of(run->model); step++) MT_TRY(train_step(w, step));
    MT_TRY(infer(w));
    CHECK(!run->compares || !is_real(w) || w->at == run->reference->count);
    return MT_SUCCESS;
}

/* peak: receives the arena's peak; may be NULL. */
static mt_status in_rank(mt_comm *world, const run *run, mt_context_desc where, mt_status (*f)(worker *),
                         size_t *peak) {
    worker w = {.run = run};
    mt_grid_desc shape = {.tp = run->split.tp, .dp = run->split.data};
    where.invariant = run->invariant;
    where.invariant_data = run->invariant ? run->model ? run->model->invariant_data : 0 : 0;
    mt_status status = test_rank_open(world, shape, &where, &w.rank);
    if (status == MT_SUCCESS) status = f(&w);
    if (status == MT_SUCCESS && peak) *peak = mt_arena_peak(w.rank.ctx);
    mt_optimizer_destroy(w.rank.ctx, &w.optimizer);
    mt_gpt_saved_destroy(&w.saved);
    test_rank_close(&w.rank);
    return status;
}

static mt_status train_rank(mt_comm *world, void *user) {
    const run *run = (const struct run *)user;
    return in_rank(world, run, (mt_context_desc){.arena_bytes = run->arena_bytes}, train, NULL);
}

/* Sets the arena size for every rank to what rank 0 needs on the meta device. */
static void plan(run *run) {
    mt_comm *world = NULL;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_comm_create_meta(run->split.tp * run->split.data, 0, &world));
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS,
                  in_rank(world, run, (mt_context_desc){.device = MT_DEVICE_META}, train, &run->arena_bytes));
    mt_comm_destroy(world);
}

/* Lists every split of up to RANKS ranks. The first is one rank. */
static int list_splits(const model *m, split *list) {
    int n = 0;
    int64_t most = m->sequences / mt_invariant_micro_batch(m->invariant_data, m->sequences);
    for (int tp = 1; tp <= m->invariant; tp *= 2)
        for (int data = 1; data <= most && tp * data <= RANKS; data *= 2)
            for (int sp = 0; sp <= (tp > 1); sp++) list[n++] = (split){tp, data, sp};
    return n;
}

static void check_model(const model *m) {
    trace reference = {0};
    split list[64];
    int n = list_splits(m, list);
    for (int s = 0; s < n; s++) {
        if (s > 0 && !test_takes((size_t)(s + (m - models)), 3)) continue;
        run r = {.name = m->name,
                 .model = m,
                 .split = list[s],
                 .invariant = m->invariant,
                 .reference = &reference,
                 .compares = s > 0};
        plan(&r);
        test_launch(list[s].tp * list[s].data, train_rank, &r);
    }
    printf("      %s: %d splits, %d steps, %lld floats each\n", m->name, n, steps_of(m), (long long)reference.count);
    free(reference.data);
}

static void test_models(void **state) {
    (void)state;
    for (size_t i = 0; i < MODELS; i++)
        if (!((SMALL_MODELS_ONLY || SANITIZED) && models[i].gpt.vocab > 100)) check_model(&models[i]);
}

/* The comparison is sensitive to the rounding of one reordered sum: without invariant mode, most tensors differ. */
static void test_default_mode_differs(void **state) {
    static const split splits[] = {{1, 1, 0}, {2, 1, 0}, {2, 1, 1}, {1, 2, 0}};
    trace reference = {0};
    (void)state;
    for (int i = 0; i < 4; i++) {
        int differs = 0;
        run r = {.name = "default",
                 .model = &models[0],
                 .split = splits[i],
                 .reference = &reference,
                 .compares = i > 0,
                 .differs = &differs};
        plan(&r);
        test_launch(splits[i].tp * splits[i].data, train_rank, &r);
        assert_true(i == 0 || differs > 5 * steps_of(&models[0]));
    }
    free(reference.data);
}

/* ---- layers by themselves ---------------------------------------------------------------------------------------- */

#define TOKENS 32
#define SEQ 8
#define HIDDEN 40

/* This rank's rows of noise [TOKENS, cols]. */
static mt_tensor input(worker *w, int64_t cols, uint64_t seed, int sequence_parallel) {
    mt_tensor x = mt_tensor_f32(test_noise(&w->rank, TOKENS * cols, seed, 1.0f), TOKENS, cols);
    int64_t rows = TOKENS / (sequence_parallel ? w->rank.grid.tp_size : 1);
    return mt_tensor_rows(x, sequence_parallel ? w->rank.grid.tp_rank * rows : 0, rows);
}

static mt_tensor output_like(worker *w, mt_tensor x) { return test_tensor(&w->rank, x.rows, x.cols, NAN); }

/* Records all rows of an output, of which every rank has some or all. */
static mt_status record_rows(worker *w, const char *what, mt_tensor t) {
    mt_tensor all = test_tensor(&w->rank, TOKENS, t.cols, NAN);
    if (t.rows == TOKENS) return record(w, what, "", 0, (const float *)t.data, TOKENS * t.cols);
    MT_TRY(mt_all_gather(w->rank.ctx, w->rank.grid.tp, t.data, all.data, (size_t)(t.rows * t.cols), MT_F32));
    return record(w, what, "", 0, (const float *)all.data, TOKENS * t.cols);
}

static mt_batch layer_batch(void) { return (mt_batch){.sequences = TOKENS / SEQ, .seq = SEQ, .seed = 3, .step = 1}; }

static mt_status run_column(worker *w, mt_linear_desc d, int *sp) {
    mt_context *ctx = w->rank.ctx;
    mt_column_parallel_linear layer;
    mt_linear_saved saved;
    mt_tensor x = input(w, d.in_features, 1, *sp), dx = output_like(w, x), y, dy = input(w, d.out_features, 2, 0);
    d.sequence_parallel = *sp;
    d.gather_output = 1;
    y = output_like(w, dy);
    MT_TRY(mt_column_parallel_linear_create(ctx, w->rank.params, "layer", &d, &layer));
    MT_TRY(mt_params_init(ctx, w->rank.params, 5));
    MT_TRY(mt_parallel_linear_forward(ctx, &layer, x, y, &saved));
    MT_TRY(record_rows(w, "y", y));
    MT_TRY(mt_parallel_linear_backward(ctx, &layer, dy, dx, &saved));
    return record_rows(w, "dx", dx);
}

static mt_status column(worker *w, int sp) {
    return run_column(w, (mt_linear_desc){.in_features = HIDDEN, .out_features = 50}, &sp);
}

static mt_status column_in_parts(worker *w, int sp) {
    return run_column(w, (mt_linear_desc){.in_features = HIDDEN, .out_features = 2 * 36, .parts = 2, .unit = 2}, &sp);
}

static mt_status run_row(worker *w, mt_linear_desc d, int sp) {
    mt_context *ctx = w->rank.ctx;
    mt_row_parallel_linear layer;
    mt_linear_saved saved;
    mt_tensor x = input(w, d.in_features, 1, 0), dx = output_like(w, x), dy = input(w, d.out_features, 2, sp);
    mt_tensor y = output_like(w, dy);
    d.sequence_parallel = sp;
    MT_TRY(mt_row_parallel_linear_create(ctx, w->rank.params, "layer", &d, &layer));
    MT_TRY(mt_params_init(ctx, w->rank.params, 5));
    MT_TRY(mt_parallel_linear_forward(ctx, &layer, x, y, &saved));
    MT_TRY(record_rows(w, "y", y));
    MT_TRY(mt_parallel_linear_backward(ctx, &layer, dy, dx, &saved));
    return record_rows(w, "dx", dx);
}

static mt_status row(worker *w, int sp) {
    return run_row(w, (mt_linear_desc){.in_features = 50, .out_features = HIDDEN}, sp);
}

static mt_status row_in_parts(worker *w, int sp) {
    return run_row(w, (mt_linear_desc){.in_features = 2 * 36, .out_features = HIDDEN, .parts = 2, .unit = 2}, sp);
}

/* Rows that are not contiguous, with an unaligned start: a part of a wider buffer. */
static mt_status row_of_a_wider_buffer(worker *w, int sp) {
    mt_context *ctx = w->rank.ctx;
    mt_row_parallel_linear layer;
    mt_linear_desc d = {.in_features = 48, .out_features = HIDDEN, .input_is_parallel = 1, .sequence_parallel = sp};
    int64_t local = 48 / w->rank.grid.tp_size, first = local * w->rank.grid.tp_rank;
    mt_tensor wide = input(w, 50, 1, 0), dwide = test_tensor(&w->rank, TOKENS, 50, 0.0f), dy = input(w, HIDDEN, 2, sp);
    mt_tensor y = output_like(w, dy);
    mt_linear_saved saved;
    MT_TRY(mt_row_parallel_linear_create(ctx, w->rank.params, "layer", &d, &layer));
    MT_TRY(mt_params_init(ctx, w->rank.params, 5));
    MT_TRY(mt_parallel_linear_forward(ctx, &layer, mt_tensor_cols(wide, 1 + first, local), y, &saved));
    MT_TRY(record_rows(w, "y", y));
    MT_TRY(mt_parallel_linear_backward(ctx, &layer, dy, mt_tensor_cols(dwide, 1 + first, local), &saved));
    /* the other ranks' parts are 0 */
    MT_TRY(mt_all_reduce(ctx, w->rank.grid.tp, dwide.data, dwide.data, TOKENS * 50, MT_F32, MT_SUM));
    return record_rows(w, "dx", dwide);
}

static mt_status norm(worker *w, int sp) {
    mt_norm_layer_desc d = {.features = HIDDEN, .sequence_parallel = sp};
    mt_norm_layer layer;
    mt_norm_saved saved;
    mt_tensor x = input(w, HIDDEN, 1, sp), dy = input(w, HIDDEN, 2, sp), y = output_like(w, x), dx = output_like(w, x);
    MT_TRY(mt_norm_layer_create(w->rank.ctx, w->rank.params, "layer", &d, &layer));
    MT_TRY(mt_params_init(w->rank.ctx, w->rank.params, 5));
    MT_TRY(mt_norm_layer_forward(w->rank.ctx, &layer, x, y, &saved));
    MT_TRY(record_rows(w, "y", y));
    MT_TRY(mt_norm_layer_backward(w->rank.ctx, &layer, dy, mt_none(), dx, &saved));
    return record_rows(w, "dx", dx);
}

/* A norm over two heads of 3 features in each of 10 groups of 8 columns, between a column- and a row-parallel layer. */
static mt_status norm_per_head(worker *w, int sp) {
    mt_context *ctx = w->rank.ctx;
    mt_linear_desc in = {.in_features = HIDDEN, .out_features = 80, .unit = 8, .sequence_parallel = sp};
    mt_linear_desc out = {
        .in_features = 80, .out_features = HIDDEN, .unit = 8, .input_is_parallel = 1, .sequence_parallel = sp};
    mt_norm_layer_desc d = {.features = 3, .groups = 10};
    mt_column_parallel_linear column;
    mt_row_parallel_linear row;
    mt_norm_layer layer;
    mt_linear_saved column_saved, row_saved;
    mt_norm_saved saved;
    mt_tensor x = input(w, HIDDEN, 1, sp), dy = input(w, HIDDEN, 2, sp), y = output_like(w, x), dx = output_like(w, x);
    mt_tensor h, n, dn, view, dview;
    MT_TRY(mt_column_parallel_linear_create(ctx, w->rank.params, "column", &in, &column));
    MT_TRY(mt_row_parallel_linear_create(ctx, w->rank.params, "row", &out, &row));
    MT_TRY(mt_norm_layer_create(ctx, w->rank.params, "norm", &d, &layer));
    MT_TRY(mt_params_init(ctx, w->rank.params, 5));
    h = test_tensor(&w->rank, TOKENS, column.local_features, NAN);
    n = test_tensor(&w->rank, TOKENS, column.local_features, 0.5f);
    dn = test_tensor(&w->rank, TOKENS, column.local_features, NAN);
    view = mt_tensor_cols(mt_tensor_reshape(n, TOKENS * column.local_features / 8, 8), 0, 6);
    dview = mt_tensor_cols(mt_tensor_reshape(dn, TOKENS * column.local_features / 8, 8), 0, 6);
    MT_TRY(mt_parallel_linear_forward(ctx, &column, x, h, &column_saved));
    MT_TRY(mt_norm_layer_forward(
        ctx, &layer, mt_tensor_cols(mt_tensor_reshape(h, TOKENS * column.local_features / 8, 8), 0, 6), view, &saved));
    MT_TRY(mt_parallel_linear_forward(ctx, &row, n, y, &row_saved));
    MT_TRY(record_rows(w, "y", y));
    MT_TRY(mt_parallel_linear_backward(ctx, &row, dy, dn, &row_saved));
    MT_TRY(mt_norm_layer_backward(ctx, &layer, dview, mt_none(), dview, &saved));
    MT_TRY(mt_parallel_linear_backward(ctx, &column, dn, dx, &column_saved));
    return record_rows(w, "dx", dx);
}

/* A layer in parts needs parts_by_shard in invariant mode: without it, a caller could expect each part to be
   contiguous, which is the case only on one rank without the mode. */
static void test_parts_that_nobody_looks_after(void **state) {
    mt_linear_desc d = {.in_features = 8, .out_features = 16, .parts = 2};
    mt_column_parallel_linear column;
    mt_row_parallel_linear row;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, &(mt_context_desc){.invariant = 2}, &r);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'c'|2 parts|parts_by_shard",
            mt_column_parallel_linear_create(r.ctx, r.params, "c", &d, &column));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_row_parallel_linear_create(r.ctx, r.params, "whole", &d, &row));
    d.input_is_parallel = 1;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'r'|parts_by_shard",
            mt_row_parallel_linear_create(r.ctx, r.params, "r", &d, &row));
    d.parts_by_shard = 1;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_row_parallel_linear_create(r.ctx, r.params, "r", &d, &row));
    test_paper_rank_close(&r);
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    d.parts_by_shard = d.input_is_parallel = 0;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "c", &d, &column));
    d.input_is_parallel = 1;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'d'|input_is_parallel",
            mt_column_parallel_linear_create(r.ctx, r.params, "d", &d, &column));
    test_paper_rank_close(&r);
}

/* Two paths that share f and g. One of them has an activation in parts. */
static mt_status shared(worker *w, int sp) {
    static const int64_t inner[] = {50, 36};
    mt_context *ctx = w->rank.ctx;
    mt_column_parallel_linear in[2];
    mt_row_parallel_linear out[2];
    mt_linear_saved in_saved, out_saved[2];
    mt_tensor x = input(w, HIDDEN, 1, sp), dy = input(w, HIDDEN, 2, sp), y = output_like(w, x), dx = output_like(w, x);
    mt_tensor h[2], act[2], dact[2];
    for (int i = 0; i < 2; i++) {
        mt_linear_desc a = {.in_features = HIDDEN,
                            .out_features = (1 + i) * inner[i],
                            .parts = 1 + i,
                            .parts_by_shard = 1,
                            .sequence_parallel = sp};
        mt_linear_desc b = {
            .in_features = inner[i], .out_features = HIDDEN, .input_is_parallel = 1, .sequence_parallel = sp};
        MT_TRY(mt_column_parallel_linear_create(ctx, w->rank.params, i ? "in1" : "in0", &a, &in[i]));
        MT_TRY(mt_row_parallel_linear_create(ctx, w->rank.params, i ? "out1" : "out0", &b, &out[i]));
        h[i] = act[i] = test_tensor(&w->rank, TOKENS, in[i].local_features, NAN);
        dact[i] = test_tensor(&w->rank, TOKENS, out[i].local_features, NAN);
    }
    act[1] = test_tensor(&w->rank, TOKENS, out[1].local_features, NAN);
    MT_TRY(mt_params_init(ctx, w->rank.params, 5));
    MT_TRY(mt_parallel_linear_forward_shared(ctx, in, 2, &x, h, &in_saved));
    MT_TRY(mt_column_parallel_activation_forward(ctx, &in[1], MT_SWIGLU, h[1], act[1]));
    MT_TRY(mt_parallel_linear_forward_shared(ctx, out, 2, act, &y, out_saved));
    MT_TRY(record_rows(w, "y", y));
    MT_TRY(mt_parallel_linear_backward_shared(ctx, out, 2, &dy, dact, out_saved));
    MT_TRY(mt_column_parallel_activation_backward(ctx, &in[1], MT_SWIGLU, h[1], dact[1], h[1]));
    dact[1] = h[1];
    MT_TRY(mt_parallel_linear_backward_shared(ctx, in, 2, dact, &dx, &in_saved));
    return record_rows(w, "dx", dx);
}

static mt_status mlp(worker *w, int sp) {
    mt_context *ctx = w->rank.ctx;
    mt_mlp_desc d = {.hidden = HIDDEN, .ffn = 52, .activation = MT_SWIGLU, .sequence_parallel = sp};
    mt_mlp layer;
    mt_mlp_saved saved;
    mt_tensor x = input(w, HIDDEN, 1, sp), dy = input(w, HIDDEN, 2, sp), y = output_like(w, x), dx = output_like(w, x);
    MT_TRY(mt_mlp_create(ctx, w->rank.params, "layer", &d, &layer));
    MT_TRY(mt_params_init(ctx, w->rank.params, 5));
    MT_TRY(mt_mlp_forward(ctx, &layer, x, y, &saved));
    MT_TRY(record_rows(w, "y", y));
    MT_TRY(mt_mlp_backward(ctx, &layer, dy, dx, &saved));
    return record_rows(w, "dx", dx);
}

/* With one row, the leading dimension has no effect, but it may be set. */
static mt_status mlp_of_one_token(worker *w, int sp) {
    mt_context *ctx = w->rank.ctx;
    mt_mlp_desc d = {.hidden = HIDDEN, .ffn = 52, .no_bias = 1};
    mt_mlp layer;
    mt_mlp_saved saved;
    mt_tensor x = mt_tensor_rows(input(w, HIDDEN, 1, 0), 0, 1), dy = mt_tensor_rows(input(w, HIDDEN, 2, 0), 0, 1);
    mt_tensor y = output_like(w, x), dx = output_like(w, x);
    (void)sp;
    MT_TRY(mt_mlp_create(ctx, w->rank.params, "layer", &d, &layer));
    MT_TRY(mt_params_init(ctx, w->rank.params, 5));
    MT_TRY(mt_mlp_forward(ctx, &layer, x, y, &saved));
    MT_TRY(record(w, "y", "", 0, (const float *)y.data, HIDDEN));
    MT_TRY(mt_mlp_backward(ctx, &layer, dy, dx, &saved));
    return record(w, "dx", "", 0, (const float *)dx.data, HIDDEN);
}

static mt_status attention(worker *w, int sp) {
    mt_context *ctx = w->rank.ctx;
    mt_self_attention_desc d = {.hidden = HIDDEN,
                                .heads = 20,
                                .kv_heads = 10,
                                .scores.rotary_base = 100.0f,
                                .max_seq = SEQ,
                                .dropout = 0.2f,
                                .sequence_parallel = sp};
    mt_self_attention layer;
    mt_self_attention_saved saved;
    mt_batch batch = layer_batch();
    mt_tensor x = input(w, HIDDEN, 1, sp), dy = input(w, HIDDEN, 2, sp), y = output_like(w, x), dx = output_like(w, x);
    MT_TRY(mt_self_attention_create(ctx, w->rank.params, "layer", &d, &layer));
    MT_TRY(mt_params_init(ctx, w->rank.params, 5));
    MT_TRY(mt_self_attention_forward(ctx, &layer, &batch, x, y, &saved));
    MT_TRY(record_rows(w, "y", y));
    MT_TRY(mt_self_attention_backward(ctx, &layer, dy, dx, &saved));
    return record_rows(w, "dx", dx);
}

/* Invariant mode changes what ranks compute, but not what they send. */
static mt_status same_communication(const test_rank *r, int sp) {
    mt_ledger ledger = mt_comm_ledger(r->grid.tp);
    int many = r->grid.tp_size > 1;
    CHECK(ledger.calls[MT_ALL_REDUCE] == (many && !sp ? 4 : 0));
    CHECK(ledger.calls[MT_ALL_GATHER] == (many && sp ? 6 : 0));
    CHECK(ledger.calls[MT_REDUCE_SCATTER] == (many && sp ? 4 : 0));
    return MT_SUCCESS;
}

static mt_status transformer_layer(worker *w, int sp) {
    mt_context *ctx = w->rank.ctx;
    mt_transformer_layer_desc d = {
        .hidden = HIDDEN, .heads = 10, .dropout.attention = 0.1f, .dropout.hidden = 0.1f, .sequence_parallel = sp};
    mt_transformer_layer layer;
    mt_transformer_layer_saved saved;
    mt_batch batch = layer_batch();
    mt_tensor x = input(w, HIDDEN, 1, sp), dy = input(w, HIDDEN, 2, sp), y = output_like(w, x), dx = output_like(w, x);
    MT_TRY(mt_transformer_layer_create(ctx, w->rank.params, "layer", &d, &layer));
    MT_TRY(mt_params_init(ctx, w->rank.params, 5));
    mt_comm_ledger_reset(w->rank.grid.tp);
    MT_TRY(mt_transformer_layer_forward(ctx, &layer, &batch, x, y, &saved));
    MT_TRY(mt_transformer_layer_backward(ctx, &layer, dy, dx, &saved));
    MT_TRY(same_communication(&w->rank, sp));
    MT_TRY(record_rows(w, "y", y));
    return record_rows(w, "dx", dx);
}

/* A row of the table contains only -0. The result is 0 + -0 = 0, on one rank, too. */
static mt_status embedding(worker *w, int sp) {
    mt_context *ctx = w->rank.ctx;
    mt_embedding_desc d = {.vocab = 61, .features = HIDDEN, .sequence_parallel = sp};
    mt_vocab_parallel_embedding layer;
    int32_t ids[TOKENS];
    mt_tensor dy = input(w, HIDDEN, 2, sp), y = output_like(w, dy);
    float *table = test_noise(&w->rank, 61 * HIDDEN, 4, 1.0f);
    for (int i = 0; i < TOKENS; i++) ids[i] = i * 7 % 61;
    for (int i = 0; i < HIDDEN; i++) table[7 * HIDDEN + i] = -0.0f;
    MT_TRY(mt_vocab_parallel_embedding_create(ctx, w->rank.params, "layer", &d, &layer));
    MT_TRY(mt_params_init(ctx, w->rank.params, 5));
    MT_TRY(mt_param_scatter(ctx, layer.weight, table, layer.weight->value));
    MT_TRY(mt_vocab_parallel_embedding_forward(ctx, &layer, ids, TOKENS, y));
    MT_TRY(record_rows(w, "y", y));
    return mt_vocab_parallel_embedding_backward(ctx, &layer, ids, TOKENS, dy);
}

/* The head of a GPT, with padding in the last shards. sp has no effect. */
static mt_status cross_entropy(worker *w, int sp) {
    mt_context *ctx = w->rank.ctx;
    mt_linear_desc d = {.in_features = HIDDEN, .out_features = 61, .no_bias = 1};
    mt_cross_entropy_desc loss_of = {.vocab = 61, .label_smoothing = 0.1f, .ignore_index = 3};
    mt_column_parallel_linear head;
    mt_cross_entropy_saved saved;
    mt_linear_saved x_saved;
    int32_t targets[TOKENS];
    mt_tensor x = input(w, HIDDEN, 1, 0), dx = output_like(w, x), loss = test_tensor(&w->rank, 1, TOKENS, NAN), logits;
    (void)sp;
    for (int i = 0; i < TOKENS; i++) targets[i] = i * 11 % 61;
    MT_TRY(mt_column_parallel_linear_create(ctx, w->rank.params, "layer", &d, &head));
    MT_TRY(mt_params_init(ctx, w->rank.params, 5));
    logits = test_tensor(&w->rank, TOKENS, head.local_features, NAN);
    MT_TRY(mt_parallel_linear_forward(ctx, &head, x, logits, &x_saved));
    MT_TRY(mt_vocab_parallel_cross_entropy_forward(ctx, w->rank.grid.tp, &loss_of, logits, targets, loss, &saved));
    MT_TRY(record(w, "loss", "", 0, (const float *)loss.data, TOKENS));
    MT_TRY(mt_vocab_parallel_cross_entropy_backward(ctx, w->rank.grid.tp, &loss_of, mt_none(), 0.3f, &saved));
    MT_TRY(mt_parallel_linear_backward(ctx, &head, logits, dx, &x_saved));
    return record_rows(w, "dx", dx);
}

/* y [TOKENS, columns of this rank], in the columns of all ranks. */
static mt_status record_columns(worker *w, const char *what, mt_tensor y) {
    mt_tensor all = test_tensor(&w->rank, TOKENS, y.cols * w->rank.grid.tp_size, NAN);
    MT_TRY(mt_gather_from_tensor_region(w->rank.ctx, w->rank.grid.tp, y, all));
    return record(w, what, "", 0, (const float *)all.data, TOKENS * all.cols);
}

/* The head of a GPT with a loss of the program's own: softmax and log-softmax, each with the other's result as its
   gradient. sp has no effect. */
static mt_status softmax(worker *w, int sp) {
    mt_context *ctx = w->rank.ctx;
    mt_comm *tp = w->rank.grid.tp;
    mt_linear_desc d = {.in_features = HIDDEN, .out_features = 61, .no_bias = 1};
    mt_column_parallel_linear head;
    mt_linear_saved x_saved;
    mt_tensor x = input(w, HIDDEN, 1, 0), dx = output_like(w, x), logits, p, log_p, dlogits;
    (void)sp;
    MT_TRY(mt_column_parallel_linear_create(ctx, w->rank.params, "layer", &d, &head));
    MT_TRY(mt_params_init(ctx, w->rank.params, 5));
    logits = test_tensor(&w->rank, TOKENS, head.local_features, NAN);
    p = test_tensor(&w->rank, TOKENS, head.local_features, NAN);
    log_p = test_tensor(&w->rank, TOKENS, head.local_features, NAN);
    dlogits = test_tensor(&w->rank, TOKENS, head.local_features, NAN);
    MT_TRY(mt_parallel_linear_forward(ctx, &head, x, logits, &x_saved));
    MT_TRY(mt_vocab_parallel_softmax_forward(ctx, tp, 61, 0, logits, p));
    MT_TRY(mt_vocab_parallel_log_softmax_forward(ctx, tp, 61, 0, logits, log_p));
    MT_TRY(record_columns(w, "p", p));
    MT_TRY(record_columns(w, "log p", log_p));
    MT_TRY(mt_vocab_parallel_softmax_backward(ctx, tp, 61, 0, p, log_p, dlogits));
    MT_TRY(mt_vocab_parallel_log_softmax_backward(ctx, tp, 61, 0, log_p, p, p));
    MT_TRY(mt_add(ctx, dlogits, p, dlogits));
    MT_TRY(record_columns(w, "dlogits", dlogits));
    MT_TRY(mt_parallel_linear_backward(ctx, &head, dlogits, dx, &x_saved));
    return record_rows(w, "dx", dx);
}

static const struct {
    const char *name;
    mt_status (*run)(worker *w, int sequence_parallel);
} layers[] = {{"column", column},
              {"column in parts", column_in_parts},
              {"row", row},
              {"row in parts", row_in_parts},
              {"row of a wider buffer", row_of_a_wider_buffer},
              {"shared f and g", shared},
              {"norm", norm},
              {"norm per head", norm_per_head},
              {"mlp", mlp},
              {"mlp of one token", mlp_of_one_token},
              {"attention", attention},
              {"transformer layer", transformer_layer},
              {"embedding", embedding},
              {"cross-entropy", cross_entropy},
              {"softmax", softmax}};
#define LAYERS (int)(sizeof layers / sizeof *layers)

static mt_status one_layer(worker *w) {
    w->host = test_floats(&w->rank, 1 << 14, 0.0f);
    MT_TRY(layers[w->run->layer].run(w, w->run->split.sequence_parallel));
    MT_TRY(mt_sync_gradients(w->rank.ctx, w->rank.params));
    MT_TRY(record_gradients(w, 0));
    CHECK(!w->run->compares || w->at == w->run->reference->count);
    return MT_SUCCESS;
}

static mt_status layer_rank(mt_comm *world, void *user) {
    return in_rank(world, (const run *)user, (mt_context_desc){.arena_bytes = (size_t)4 << 20}, one_layer, NULL);
}

static void test_layers(void **state) {
    (void)state;
    for (int i = 0; i < LAYERS; i++) {
        trace reference = {0};
        for (int tp = 1; tp <= RANKS; tp *= 2)
            for (int sp = 0; sp <= (tp > 1); sp++) {
                run r = {.name = layers[i].name,
                         .layer = i,
                         .split = {tp, 1, sp},
                         .invariant = 8,
                         .reference = &reference,
                         .compares = tp > 1};
                test_launch(tp, layer_rank, &r);
            }
        assert_true(reference.count > TOKENS);
        free(reference.data);
    }
}

/* ---- operators that a program calls itself ----------------------------------------------------------------------- */

#define WIDTH 16 /* columns of the tensors, and rows of a table */
#define MANY 400 /* tokens; few of them have the same sum in any order */

/* The tensors of an operator: some rows and columns of [MANY, WIDTH]. dout is of one feature, so that a product with it
   has no sum. */
typedef struct operands {
    mt_tensor x, dy, dout, dx, stats, row, weight;
    const int32_t *ids;
    mt_dropout dropout;
    int64_t first_row; /* of the table */
} operands;

static mt_tensor part_of(mt_tensor t, int64_t first, int64_t rows, int64_t col, int64_t cols) {
    return mt_tensor_cols(mt_tensor_rows(t, first, rows), col, cols);
}

/* Rows [first, first + rows) and columns [col, col + cols) of all operands. */
static operands operands_of(const operands *all, int64_t first, int64_t rows, int64_t col, int64_t cols) {
    operands o = *all;
    o.x = part_of(all->x, first, rows, col, cols);
    o.dy = part_of(all->dy, first, rows, col, cols);
    o.dx = part_of(all->dx, first, rows, col, cols);
    o.dout = mt_tensor_rows(all->dout, first, rows);
    o.stats = mt_tensor_rows(all->stats, first, rows);
    o.row = mt_tensor_cols(all->row, col, cols);
    o.weight = mt_tensor_cols(all->weight, col, cols);
    o.ids += first;
    o.dropout.at.first_row += first;
    o.dropout.at.first_col += col;
    return o;
}

static mt_status add_bias(mt_context *ctx, const operands *o, mt_tensor a, mt_tensor b) {
    (void)b;
    return mt_bias_backward(ctx, o->dy, a);
}

static mt_status add_dropped_bias(mt_context *ctx, const operands *o, mt_tensor a, mt_tensor b) {
    (void)b;
    return mt_bias_dropout_add_backward(ctx, o->dy, o->dropout, o->dx, a);
}

static mt_status add_norm(mt_context *ctx, const operands *o, mt_tensor a, mt_tensor b) {
    return mt_norm_backward(ctx, MT_LAYER_NORM, o->x, o->row, o->stats, o->dy, mt_none(), o->dx, a, b);
}

static mt_status add_rms_norm(mt_context *ctx, const operands *o, mt_tensor a, mt_tensor b) {
    (void)b;
    return mt_norm_backward(ctx, MT_RMS_NORM, o->x, o->row, o->stats, o->dy, mt_none(), o->dx, a, mt_none());
}

static mt_status add_row(mt_context *ctx, const operands *o, mt_tensor a, mt_tensor b) {
    (void)b;
    return mt_multiply_row_backward(ctx, o->x, o->row, o->dy, mt_none(), a);
}

static mt_status add_activation(mt_context *ctx, const operands *o, mt_tensor a, mt_tensor b) {
    (void)b;
    return mt_activation_backward(ctx, MT_SQUARED_RELU, o->x, o->dy, o->dx, a);
}

static mt_status add_linear_activation(mt_context *ctx, const operands *o, mt_tensor a, mt_tensor b) {
    (void)b;
    return mt_linear_activation_backward(ctx, MT_SQUARED_RELU, o->dout, o->weight, o->x, o->dx, a);
}

static mt_status add_linear(mt_context *ctx, const operands *o, mt_tensor a, mt_tensor b) {
    mt_tensor dy, x;
    MT_TRY(mt_invariant_input(ctx, o->dy, &dy));
    MT_TRY(mt_invariant_input(ctx, o->x, &x));
    return mt_linear_gradients(ctx, dy, x, a, b);
}

static mt_status add_product(mt_context *ctx, const operands *o, mt_tensor a, mt_tensor b) {
    mt_tensor dy, x;
    (void)b;
    MT_TRY(mt_invariant_input(ctx, o->dy, &dy));
    MT_TRY(mt_invariant_input(ctx, o->x, &x));
    return mt_gemm(ctx, MT_TRANS, MT_NO_TRANS, 1.0f, dy, x, 1.0f, a);
}

/* Overwrites the gradient, which is as much a sum over tokens. */
static mt_status write_product(mt_context *ctx, const operands *o, mt_tensor a, mt_tensor b) {
    mt_tensor dy, x;
    (void)b;
    MT_TRY(mt_invariant_input(ctx, o->dy, &dy));
    MT_TRY(mt_invariant_input(ctx, o->x, &x));
    return mt_gemm(ctx, MT_TRANS, MT_NO_TRANS, 1.0f, dy, x, 0.0f, a);
}

static mt_status add_table(mt_context *ctx, const operands *o, mt_tensor a, mt_tensor b) {
    (void)b;
    return mt_embedding_backward(ctx, o->dy, o->first_row, o->ids, a);
}

static mt_status add_sum(mt_context *ctx, const operands *o, mt_tensor a, mt_tensor b) {
    (void)b;
    return mt_sum(ctx, o->x, a);
}

static mt_status add_squares(mt_context *ctx, const operands *o, mt_tensor a, mt_tensor b) {
    (void)b;
    return mt_sum_of_squares(ctx, o->x, a);
}

/* a has a_rows x cols elements, and b, if there is one, 1 x cols. */
static const struct {
    const char *name, *argument;
    mt_status (*add)(mt_context *ctx, const operands *o, mt_tensor a, mt_tensor b);
    int64_t a_rows, cols;
    int has_b;
    mt_placement split; /* of a in a parameter that tensor ranks share; MT_REPLICATED: there is no such parameter */
    int is_product;
} adders[] = {{"mt_bias_backward", "dbias", add_bias, 1, WIDTH, 0, MT_SPLIT_COLS, 0},
              {"mt_bias_dropout_add_backward", "dbias", add_dropped_bias, 1, WIDTH, 0, MT_SPLIT_COLS, 0},
              {"mt_norm_backward", "dbias", add_norm, 1, WIDTH, 1, MT_REPLICATED, 0},
              {"mt_norm_backward", "dgain", add_rms_norm, 1, WIDTH, 0, MT_REPLICATED, 0},
              {"mt_multiply_row_backward", "drow", add_row, 1, WIDTH, 0, MT_SPLIT_COLS, 0},
              {"mt_activation_backward", "dbias", add_activation, 1, WIDTH, 0, MT_SPLIT_COLS, 0},
              {"mt_linear_activation_backward", "dbias", add_linear_activation, 1, WIDTH, 0, MT_SPLIT_COLS, 0},
              {"mt_linear_gradients", "dweight", add_linear, WIDTH, WIDTH, 1, MT_SPLIT_ROWS, 1},
              {"mt_gemm", "c", add_product, WIDTH, WIDTH, 0, MT_SPLIT_ROWS, 1},
              {"mt_gemm", "c", write_product, WIDTH, WIDTH, 0, MT_SPLIT_ROWS, 1},
              {"mt_embedding_backward", "dtable", add_table, WIDTH, WIDTH, 0, MT_SPLIT_ROWS, 0},
              {"mt_sum", "out", add_sum, 1, 1, 0, MT_REPLICATED, 0},
              {"mt_sum_of_squares", "out", add_squares, 1, 1, 0, MT_REPLICATED, 0}};
#define ADDERS (int)(sizeof adders / sizeof *adders)

/* How a program adds to a gradient. */
typedef enum adding {
    IN_SCRATCH,  /* one call for all rows of this rank, into memory that the test itself then adds to the gradient */
    OVER_TOKENS, /* mt_sum_over_tokens calls the operator */
    SPLIT        /* one call for all rows, into the gradient of a parameter that tensor ranks share */
} adding;

typedef struct adder_run {
    run run; /* run.layer: index into adders */
    adding how;
} adder_run;

typedef struct adder_call {
    int index; /* into adders */
    const operands *operands;
} adder_call;

static mt_status call_adder(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor a, mt_tensor b) {
    const adder_call *c = (const adder_call *)arg;
    operands o = operands_of(c->operands, first, count, 0, WIDTH);
    return adders[c->index].add(ctx, &o, a, b);
}

/* The operands of `rows` tokens from `first` on. */
static mt_status make_operands(worker *w, int64_t first, int64_t rows, operands *o) {
    mt_tensor y = test_tensor(&w->rank, rows, WIDTH, NAN), all;
    int32_t *ids = (int32_t *)test_floats(&w->rank, rows, 0.0f);
    for (int64_t i = 0; i < rows; i++) ids[i] = (int32_t)((first + i) * (first + i) % 13);
    *o = (operands){.ids = ids, .dropout = {.at = {.seed = 5, .global_cols = WIDTH}, .p = 0.3f}};
    all = mt_tensor_f32(test_noise(&w->rank, MANY * WIDTH, 1, 1.0f), MANY, WIDTH);
    o->x = mt_tensor_rows(all, first, rows);
    all = mt_tensor_f32(test_noise(&w->rank, MANY * WIDTH, 2, 1.0f), MANY, WIDTH);
    o->dy = mt_tensor_rows(all, first, rows);
    o->dout = mt_tensor_cols(o->dy, 3, 1);
    o->dx = test_tensor(&w->rank, rows, WIDTH, NAN);
    o->stats = test_tensor(&w->rank, rows, 2, NAN);
    o->row = mt_tensor_f32(test_noise(&w->rank, WIDTH, 3, 1.0f), 1, WIDTH);
    o->weight = mt_tensor_f32(test_noise(&w->rank, WIDTH, 4, 1.0f), 1, WIDTH);
    o->dropout.at.first_row = first;
    return mt_norm_forward(w->rank.ctx, MT_LAYER_NORM, o->x, o->row, mt_none(), 1e-5f, y, o->stats);
}

/* Adds this rank's share of the columns or rows of a parameter. */
static mt_status add_split(worker *w, int index, const operands *all, mt_tensor a, mt_tensor b) {
    int64_t n = WIDTH / w->rank.grid.tp_size, at = n * w->rank.grid.tp_rank;
    operands o = operands_of(all, 0, all->x.rows, at, n);
    if (adders[index].split == MT_SPLIT_ROWS) {
        o.x = all->x;
        o.first_row = at;
    }
    if (adders[index].add == add_table) o.dy = all->dy;
    return adders[index].add(w->rank.ctx, &o, a, b);
}

/* Adds x to y without the library. */
static void add_on_host(mt_tensor x, mt_tensor y) {
    for (int64_t i = 0; i < x.rows * x.cols; i++) ((float *)y.data)[i] += ((const float *)x.data)[i];
}

static mt_status add_in_scratch(worker *w, int index, const operands *o, mt_tensor a, mt_tensor b) {
    mt_tensor to[2] = {test_tensor(&w->rank, a.rows, a.cols, 0.0f), mt_none()};
    if (b.data) to[1] = test_tensor(&w->rank, b.rows, b.cols, 0.0f);
    MT_TRY(adders[index].add(w->rank.ctx, o, to[0], to[1]));
    if (b.data) add_on_host(to[1], b);
    add_on_host(to[0], a);
    return MT_SUCCESS;
}

/* Every micro-batch has the tokens of V virtual shards. */
static mt_status add_micro_batch(worker *w, int64_t first, int64_t rows, mt_param *a, mt_param *b) {
    const adder_run *r = (const adder_run *)w->run;
    int sp = r->run.split.sequence_parallel;
    mt_tensor db = b ? b->grad : mt_none();
    operands o;
    adder_call call = {r->run.layer, &o};
    if (sp) rows /= w->rank.grid.tp_size;
    MT_TRY(make_operands(w, first + (sp ? rows * w->rank.grid.tp_rank : 0), rows, &o));
    if (r->how == SPLIT) MT_TRY(add_split(w, call.index, &o, a->grad, db));
    if (r->how == IN_SCRATCH) MT_TRY(add_in_scratch(w, call.index, &o, a->grad, db));
    if (r->how == OVER_TOKENS)
        MT_TRY(mt_sum_over_tokens(w->rank.ctx, w->rank.grid.tp, sp, call_adder, &call, rows, a->grad, db));
    return mt_accumulate_gradients(w->rank.ctx, w->rank.params);
}

static mt_status run_adder(worker *w) {
    const adder_run *r = (const adder_run *)w->run;
    int index = r->run.layer, each = r->run.invariant / r->run.split.data;
    int64_t rows = MANY / r->run.invariant;
    mt_param_desc d = {.name = "a", .rows = adders[index].a_rows, .cols = adders[index].cols};
    mt_param *a, *b = NULL;
    w->host = test_floats(&w->rank, WIDTH * WIDTH, 0.0f);
    if (r->how == SPLIT) d.placement = adders[index].split;
    else d.sequence_partial = r->run.split.sequence_parallel;
    MT_TRY(mt_params_add(w->rank.ctx, w->rank.params, &d, &a));
    d.name = "b";
    d.rows = 1;
    if (r->how == SPLIT) d.placement = MT_SPLIT_COLS;
    if (adders[index].has_b) MT_TRY(mt_params_add(w->rank.ctx, w->rank.params, &d, &b));
    MT_TRY(mt_params_init(w->rank.ctx, w->rank.params, 5));
    MT_TRY(mt_params_zero_grad(w->rank.ctx, w->rank.params));
    for (int i = 0; i < each; i++) MT_TRY(add_micro_batch(w, (w->rank.grid.dp_rank * each + i) * rows, rows, a, b));
    MT_TRY(mt_sync_gradients(w->rank.ctx, w->rank.params));
    return record_gradients(w, 0);
}

static mt_status adder_rank(mt_comm *world, void *user) {
    return in_rank(world, (const run *)user, (mt_context_desc){.arena_bytes = (size_t)4 << 20}, run_adder, NULL);
}

/* Returns on how many splits an operator computes other bits than on one rank. With IN_SCRATCH, tensor ranks always
   have rows of their own: if all have the same, a GEMM that rounds by the address gives them other bits by chance. */
static int count_other_splits(int index, adding how, int sequence_parallel) {
    trace reference = {0};
    int others = 0;
    for (int tp = 1; tp <= 4; tp *= 2)
        for (int data = 1; tp * data <= 4; data *= 2)
            for (int sp = how == IN_SCRATCH && tp > 1; sp <= (sequence_parallel && tp > 1); sp++) {
                int differs = 0;
                adder_run r = {{.name = adders[index].name,
                                .layer = index,
                                .split = {tp, data, sp},
                                .invariant = 4,
                                .reference = &reference,
                                .compares = tp * data > 1,
                                .differs = &differs},
                               how};
                test_launch(tp * data, adder_rank, &r);
                others += differs > 0;
            }
    assert_true(reference.count > 0);
    free(reference.data);
    return others;
}

/* mt_sum_over_tokens gives the same bits on every split; a call for all rows of a rank does not, so mt_sum_check
   refuses it. It does when each rank has columns or rows of the parameter of its own. */
static void test_sums_of_operators(void **state) {
    (void)state;
    for (int i = 0; i < ADDERS; i++) {
        assert_true(count_other_splits(i, IN_SCRATCH, 1) > 0);
        if (adders[i].add != write_product) assert_int_equal(count_other_splits(i, OVER_TOKENS, 1), 0);
        if (adders[i].split != MT_REPLICATED && !adders[i].is_product)
            assert_int_equal(count_other_splits(i, SPLIT, 0), 0);
    }
}

/* Attention with a bias of the scores, whose gradient is that of a parameter. With `whole`, every tensor rank has all
   rows of the parameter; otherwise those of a head are on the rank of the head. */
static mt_status run_scores(worker *w, int whole) {
    enum { HEADS = 4, HEAD = 4, QUERIES = 8 };
    mt_param_desc d = {.name = "bias", .rows = HEADS * QUERIES, .cols = QUERIES, .init_std = 1.0f};
    int local = HEADS / w->rank.grid.tp_size, first = local * w->rank.grid.tp_rank, unit = 3 * HEAD;
    int64_t tokens = 2 * QUERIES;
    mt_tensor all = mt_tensor_f32(test_noise(&w->rank, tokens * HEADS * unit, 1, 1.0f), tokens, HEADS * unit), lse;
    mt_tensor qkv = test_tensor(&w->rank, tokens, local * unit, 0.0f),
              dqkv = test_tensor(&w->rank, tokens, local * unit, 0);
    mt_tensor out = test_tensor(&w->rank, tokens, local * HEAD, 0),
              dout = test_tensor(&w->rank, tokens, local * HEAD, 1);
    mt_attention_desc s = {.batch = 2, .seq = QUERIES, .groups = local, .heads_per_group = 1, .head_dim = HEAD};
    mt_param *bias;
    lse = test_tensor(&w->rank, local, tokens, 0.0f);
    if (whole) d.sequence_partial = 1;
    else d.placement = MT_SPLIT_ROWS;
    w->host = test_floats(&w->rank, HEADS * QUERIES * QUERIES, 0.0f);
    MT_TRY(mt_params_add(w->rank.ctx, w->rank.params, &d, &bias));
    MT_TRY(mt_params_init(w->rank.ctx, w->rank.params, 5));
    MT_TRY(mt_copy(w->rank.ctx, mt_tensor_cols(all, first * unit, local * unit), qkv));
    s.bias.value = bias->value;
    s.bias.grad = bias->grad;
    s.bias.heads = whole ? HEADS : local;
    s.bias.first_head = whole ? first : 0;
    MT_TRY(mt_attention_forward(w->rank.ctx, &s, qkv, out, lse));
    MT_TRY(mt_attention_backward(w->rank.ctx, &s, qkv, out, lse, dout, dqkv));
    MT_TRY(mt_sync_gradients(w->rank.ctx, w->rank.params));
    MT_TRY(record_gradients(w, 0));
    if (!whole) return MT_SUCCESS;
    s.bias.value = mt_tensor_rows(bias->value, 0, QUERIES);
    s.bias.grad = mt_tensor_rows(bias->grad, 0, QUERIES);
    s.bias.heads = 1;
    s.bias.first_head = 0;
    CHECK(mt_attention_backward(w->rank.ctx, &s, qkv, out, lse, dout, dqkv) == MT_ERR_ARGUMENT);
    CHECK(strstr(mt_last_error(w->rank.ctx), "dbias is in the gradient of 'bias'"));
    return MT_SUCCESS;
}

static mt_status scores_of_rows(worker *w) { return run_scores(w, 0); }
static mt_status scores_of_all(worker *w) { return run_scores(w, 1); }

static mt_status scores_rank(mt_comm *world, void *user) {
    const run *r = (const run *)user;
    return in_rank(world, r, (mt_context_desc){.arena_bytes = (size_t)4 << 20},
                   r->layer ? scores_of_all : scores_of_rows, NULL);
}

/* A gradient of one head on each row has the same bits on every split. One of all heads is refused. */
static void test_bias_of_scores(void **state) {
    (void)state;
    for (int whole = 0; whole < 2; whole++) {
        trace reference = {0};
        for (int tp = 1; tp <= 4; tp *= 2) {
            run r = {.name = "bias of scores",
                     .layer = whole,
                     .split = {tp, 1, 0},
                     .invariant = 4,
                     .reference = &reference,
                     .compares = tp > 1};
            test_launch(tp, scores_rank, &r);
        }
        free(reference.data);
    }
}

/* Opens one rank, with parameters a and b for an operator, and operands of 8 rows. The gradient of a is 2. */
static void open_adder(int index, int invariant, mt_param_desc d, worker *w, mt_param **a, mt_param **b, operands *o) {
    const mt_context_desc where = {.invariant = invariant, .arena_bytes = (size_t)1 << 20};
    mt_context *ctx;
    *w = (worker){0};
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1, .dp = 1}, &where, &w->rank);
    ctx = w->rank.ctx;
    d.name = "a";
    d.rows = adders[index].a_rows;
    d.cols = adders[index].cols;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_add(ctx, w->rank.params, &d, a));
    d.name = "b";
    d.rows = 1;
    if (d.placement) d.placement = MT_SPLIT_COLS;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_add(ctx, w->rank.params, &d, b));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_init(ctx, w->rank.params, 1));
    ASSERT_STATUS(ctx, MT_SUCCESS, make_operands(w, 0, 8, o));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_fill(ctx, (*a)->grad, 2.0f));
}

/* Calls operator `index` for 8 rows and the gradients a and b of a new registry. `words`: it is refused. */
static void sum_into_gradients(int index, int invariant, mt_param_desc d, const char *words) {
    worker w;
    mt_param *a, *b;
    operands o;
    open_adder(index, invariant, d, &w, &a, &b, &o);
    mt_context *ctx = w.rank.ctx;
    mt_tensor db = adders[index].has_b ? b->grad : mt_none();
    int64_t n = adders[index].a_rows * adders[index].cols;
    if (!words) ASSERT_STATUS(ctx, MT_SUCCESS, adders[index].add(ctx, &o, a->grad, db));
    if (words) {
        REFUSED(ctx, MT_ERR_ARGUMENT, words, adders[index].add(ctx, &o, a->grad, db));
        test_untouched("a->grad", (const float *)a->grad.data, n, 2.0f);
    }
    /* scratch memory and memory behind the gradients are free to use */
    mt_tensor to = test_tensor(&w.rank, a->grad.rows, a->grad.cols, 0.0f);
    if (db.data) db = test_tensor(&w.rank, 1, WIDTH, 0.0f);
    ASSERT_STATUS(ctx, MT_SUCCESS, adders[index].add(ctx, &o, to, db));
    test_paper_rank_close(&w.rank);
}

static void test_refused_sums(void **state) {
    char words[128];
    (void)state;
    for (int i = 0; i < ADDERS; i++) {
        const mt_param_desc whole = {0}, partial = {.sequence_partial = 1}, split = {.placement = adders[i].split};
        /* mt_norm_backward checks dbias first, which is the gradient of b */
        snprintf(words, sizeof words, "%s: %s is|'%s'|mt_sum_over_tokens", adders[i].name, adders[i].argument,
                 adders[i].add == add_norm ? "b" : "a");
        sum_into_gradients(i, 4, whole, words);
        sum_into_gradients(i, 4, partial, words);
        sum_into_gradients(i, 1, whole, NULL); /* one virtual shard: one split */
        sum_into_gradients(i, 0, partial, NULL);
        snprintf(words, sizeof words, "%s: %s is|'a'|4 virtual shards|mt_invariant_output", adders[i].name,
                 adders[i].argument);
        if (split.placement) sum_into_gradients(i, 4, split, adders[i].is_product ? words : NULL);
    }
}

/* Moves x to y, which has another value then. */
typedef mt_status (*mover)(test_rank *r, mt_tensor x, mt_tensor y);

/* Zeros in the arena. */
static mt_tensor scratch(test_rank *r, mt_dtype dtype, int64_t rows, int64_t cols) {
    mt_tensor t = mt_none();
    if (mt_arena_tensor(r->ctx, dtype, rows, cols, &t) != MT_SUCCESS || mt_fill(r->ctx, t, 0.0f) != MT_SUCCESS) abort();
    return t;
}

static mt_status move_first(test_rank *r, mt_tensor x, mt_tensor y) { return mt_add(r->ctx, x, y, y); }
static mt_status move_second(test_rank *r, mt_tensor x, mt_tensor y) { return mt_add(r->ctx, y, x, y); }
static mt_status move_copy(test_rank *r, mt_tensor x, mt_tensor y) { return mt_copy(r->ctx, x, y); }
static mt_status move_convert(test_rank *r, mt_tensor x, mt_tensor y) { return mt_convert(r->ctx, x, y); }
static mt_status move_product(test_rank *r, mt_tensor x, mt_tensor y) {
    return mt_multiply(r->ctx, test_tensor(r, x.rows, x.cols, 2.0f), x, y);
}
static mt_status move_scaled(test_rank *r, mt_tensor x, mt_tensor y) {
    return mt_multiply_col_forward(r->ctx, x, test_tensor(r, x.rows, 1, 2.0f), y);
}
static mt_status move_by_row(test_rank *r, mt_tensor x, mt_tensor y) {
    return mt_multiply_row_forward(r->ctx, x, test_tensor(r, 1, x.cols, 2.0f), y);
}
static mt_status move_part(test_rank *r, mt_tensor x, mt_tensor y) {
    return mt_copy(r->ctx, mt_tensor_cols(x, x.cols - 1, 1), mt_tensor_cols(y, 0, 1));
}
static mt_status move_twice(test_rank *r, mt_tensor x, mt_tensor y) {
    mt_tensor half = scratch(r, MT_BF16, x.rows, x.cols), full = scratch(r, MT_F32, x.rows, x.cols);
    MT_TRY(mt_convert(r->ctx, x, half));
    MT_TRY(mt_convert(r->ctx, half, full));
    return mt_add(r->ctx, y, full, y);
}
static mt_status move_reduced(test_rank *r, mt_tensor x, mt_tensor y) {
    size_t n = (size_t)(x.rows * x.cols);
    MT_TRY(mt_all_reduce(r->ctx, r->grid.tp, x.data, x.data, n, MT_F32, MT_SUM));
    return mt_add(r->ctx, y, x, y);
}

static const mover movers[] = {move_first,  move_second, move_copy, move_convert, move_product,
                               move_scaled, move_by_row, move_part, move_twice,   move_reduced};
#define MOVERS (int)(sizeof movers / sizeof *movers)

/* Calls operator `index` for 8 rows and scratch memory, which is then moved to a gradient. `words`: it is refused. */
static void move_sum(int index, mover move, int invariant, mt_param_desc d, const char *words) {
    worker w;
    mt_param *a, *b;
    operands o;
    open_adder(index, invariant, d, &w, &a, &b, &o);
    mt_context *ctx = w.rank.ctx;
    mt_tensor to = scratch(&w.rank, MT_F32, a->grad.rows, a->grad.cols), db = scratch(&w.rank, MT_F32, 1, WIDTH);
    ASSERT_STATUS(ctx, MT_SUCCESS, adders[index].add(ctx, &o, to, adders[index].has_b ? db : mt_none()));
    if (!words) ASSERT_STATUS(ctx, MT_SUCCESS, move(&w.rank, to, a->grad));
    if (words) {
        REFUSED(ctx, MT_ERR_ARGUMENT, words, move(&w.rank, to, a->grad));
        test_untouched("a->grad", (const float *)a->grad.data, a->grad.rows * a->grad.cols, 2.0f);
        if (adders[index].has_b) REFUSED(ctx, MT_ERR_ARGUMENT, "'b'", move(&w.rank, db, b->grad));
    }
    test_paper_rank_close(&w.rank);
}

/* One call for all rows into scratch memory, which then becomes the gradient. */
static void test_refused_sums_in_scratch(void **state) {
    char words[128];
    (void)state;
    for (int i = 0; i < ADDERS; i++)
        for (int k = 0; k < MOVERS; k++) {
            const mt_param_desc whole = {0}, partial = {.sequence_partial = 1}, split = {.placement = adders[i].split};
            snprintf(words, sizeof words, "'a', which every tensor rank has whole|has a sum of %s|mt_sum_over_tokens",
                     adders[i].name);
            if (!adders[i].has_b || split.placement) move_sum(i, movers[k], 4, k % 2 ? whole : partial, words);
            move_sum(i, movers[k], k % 2, whole, NULL); /* one virtual shard, or none */
            snprintf(words, sizeof words, "'a'|has a product of %s|4 virtual shards|mt_invariant_output",
                     adders[i].name);
            if (!split.placement || (adders[i].is_product && adders[i].has_b)) continue;
            move_sum(i, movers[k], 4, split, adders[i].is_product ? words : NULL);
        }
}

/* One rank of 4 virtual shards, with a weight of which each has rows, and a bias that all have. */
static void open_shards(test_rank *r, mt_param **w, mt_param **bias) {
    static const mt_context_desc where = {.invariant = 4, .arena_bytes = (size_t)1 << 20};
    mt_param_desc d = {.name = "w", .rows = 16, .cols = WIDTH, .placement = MT_SPLIT_ROWS};
    mt_param_desc e = {.name = "e", .rows = 1, .cols = WIDTH};
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1, .dp = 1}, &where, r);
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_params_add(r->ctx, r->params, &e, bias));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_params_add(r->ctx, r->params, &d, w));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_params_init(r->ctx, r->params, 1));
}

/* Memory of a sum over rows is free to use for something else. */
static void test_accepted_memory_of_sums(void **state) {
    mt_param *w, *bias;
    test_rank r;
    (void)state;
    open_shards(&r, &w, &bias);
    mt_context *ctx = r.ctx;
    mt_tensor x = test_tensor(&r, 8, WIDTH, 1.0f), to = scratch(&r, MT_F32, 1, WIDTH), other, again;
    /* memory that something else has written since */
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_bias_backward(ctx, x, to));
    REFUSED(ctx, MT_ERR_ARGUMENT, "'e'", mt_add(ctx, to, bias->grad, bias->grad));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_fill(ctx, to, 0.0f));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_add(ctx, to, bias->grad, bias->grad));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_bias_backward(ctx, x, to));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_copy(ctx, mt_tensor_rows(x, 0, 1), to));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_add(ctx, to, bias->grad, bias->grad));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_bias_backward(ctx, x, to));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_all_gather(ctx, r.grid.tp, x.data, to.data, WIDTH, MT_F32));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_add(ctx, to, bias->grad, bias->grad));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_bias_backward(ctx, x, to));
    mt_declare_forget(ctx, to.data, WIDTH * sizeof(float));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_add(ctx, to, bias->grad, bias->grad));
    /* memory of the arena, given out again */
    size_t mark = mt_arena_mark(ctx);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_tensor(ctx, MT_F32, 1, WIDTH, &other));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_fill(ctx, other, 0.0f));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_bias_backward(ctx, x, other));
    mt_arena_release(ctx, mark);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_tensor(ctx, MT_F32, 1, WIDTH, &again));
    assert_ptr_equal(again.data, other.data);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_add(ctx, again, bias->grad, bias->grad));
    /* memory of the program, which may have been freed and used again */
    mt_tensor own = test_tensor(&r, 1, WIDTH, 0.0f);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_bias_backward(ctx, x, own));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_copy(ctx, own, bias->grad));
    /* more sums than are remembered */
    for (int i = 0; i < 100; i++)
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_bias_backward(ctx, x, scratch(&r, MT_F32, 1, WIDTH)));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_bias_backward(ctx, x, to));
    REFUSED(ctx, MT_ERR_ARGUMENT, "'e'", mt_copy(ctx, to, bias->grad));
    test_paper_rank_close(&r);
}

/* Sums that have the same bits on every split may be moved. */
static void test_accepted_sums_in_scratch(void **state) {
    mt_param *w, *bias;
    test_rank r;
    (void)state;
    open_shards(&r, &w, &bias);
    mt_context *ctx = r.ctx;
    mt_tensor x = test_tensor(&r, 8, WIDTH, 1.0f), dy = test_tensor(&r, 8, 16, 1.0f);
    mt_tensor to = scratch(&r, MT_F32, 1, WIDTH), wide = scratch(&r, MT_F32, 16, WIDTH);
    /* one row has no order, in a gradient or in scratch memory, unless its elements are added up */
    REFUSED(ctx, MT_ERR_ARGUMENT, "mt_sum: out is|'e'",
            mt_sum(ctx, mt_tensor_rows(x, 0, 1), mt_tensor_cols(bias->grad, 0, 1)));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_sum_of_squares(ctx, mt_tensor_rows(x, 0, 1), mt_tensor_cols(to, 0, 1)));
    REFUSED(ctx, MT_ERR_ARGUMENT, "a sum of mt_sum_of_squares", mt_copy(ctx, to, bias->grad));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_fill(ctx, to, 0.0f));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_bias_backward(ctx, mt_tensor_rows(x, 0, 1), bias->grad));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_bias_backward(ctx, mt_tensor_rows(x, 0, 1), to));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_add(ctx, to, bias->grad, bias->grad));
    mt_tensor one = mt_tensor_cols(mt_tensor_rows(dy, 0, 1), 0, 1);
    ASSERT_STATUS(ctx, MT_SUCCESS,
                  mt_gemm(ctx, MT_TRANS, MT_NO_TRANS, 1.0f, one, mt_tensor_rows(x, 0, 1), 1.0f, bias->grad));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_linear_gradients(ctx, one, mt_tensor_rows(x, 0, 1), to, mt_none()));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_add(ctx, to, bias->grad, bias->grad));
    /* the product of each virtual shard in scratch memory of all of them, and a sum beside another tensor */
    for (int i = 0; i < 4; i++)
        ASSERT_STATUS(
            ctx, MT_SUCCESS,
            mt_linear_gradients(ctx, mt_tensor_cols(dy, 4 * i, 4), x, mt_tensor_rows(wide, 4 * i, 4), mt_none()));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_add(ctx, wide, w->grad, w->grad));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_fill(ctx, wide, 0.0f));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_bias_backward(ctx, dy, mt_tensor_rows(wide, 3, 1)));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_copy(ctx, mt_tensor_rows(wide, 4, 1), bias->grad));
    mt_tensor left = mt_tensor_cols(wide, 0, 4), right = mt_tensor_cols(wide, 4, 12);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_fill(ctx, wide, 0.0f));
    ASSERT_STATUS(ctx, MT_SUCCESS,
                  mt_bias_backward(ctx, mt_tensor_cols(dy, 0, 4), mt_tensor_cols(mt_tensor_rows(wide, 3, 1), 4, 4)));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_copy(ctx, mt_tensor_rows(left, 2, 3), mt_tensor_f32(bias->grad.data, 3, 4)));
    REFUSED(ctx, MT_ERR_ARGUMENT, "'e'", mt_copy(ctx, mt_tensor_rows(right, 3, 1), mt_tensor_cols(bias->grad, 0, 12)));
    test_paper_rank_close(&r);
}

/* Gradients of a program without a registry, declared with mt_declare_shards. */
static void test_refused_sums_of_own_gradients(void **state) {
    (void)state;
    for (int check = 0; check <= 1; check++)
        for (int i = 0; i < ADDERS; i++) {
            const mt_context_desc where = {.invariant = 4, .arena_bytes = (size_t)1 << 20, .check = check};
            const int64_t n = adders[i].a_rows * adders[i].cols;
            worker w = {0};
            operands o;
            char words[128];
            test_paper_rank(1, 0, (mt_grid_desc){.tp = 1, .dp = 1}, &where, &w.rank);
            mt_context *ctx = w.rank.ctx;
            float *grad = test_floats(&w.rank, n, 2.0f), *split = test_floats(&w.rank, n, 2.0f);
            mt_own_weight own[] = {{.name = "a", .value = test_floats(&w.rank, n, 0.0f), .grad = grad},
                                   {.name = "s", .value = test_floats(&w.rank, n, 0.0f), .grad = split}};
            own[0].shard = own[1].shard = (mt_shard){.rows = adders[i].a_rows, .cols = adders[i].cols, .tp_size = 1};
            own[1].shard.placement = MT_SPLIT_ROWS;
            mt_tensor to = mt_tensor_f32(grad, adders[i].a_rows, adders[i].cols), db = mt_none();
            mt_tensor other = scratch(&w.rank, MT_F32, adders[i].a_rows, adders[i].cols);
            ASSERT_STATUS(ctx, MT_SUCCESS, make_operands(&w, 0, 8, &o));
            ASSERT_STATUS(ctx, MT_SUCCESS, mt_declare_shards(ctx, w.rank.grid.tp, NULL, own, 2));
            if (adders[i].has_b) db = test_tensor(&w.rank, 1, WIDTH, 0.0f);
            snprintf(words, sizeof words, "%s: %s is|'a'|mt_sum_over_tokens", adders[i].name, adders[i].argument);
            if (adders[i].add == add_norm) snprintf(words, sizeof words, "%s: dgain is|'a'", adders[i].name);
            REFUSED(ctx, MT_ERR_ARGUMENT, words, adders[i].add(ctx, &o, to, db));
            ASSERT_STATUS(ctx, MT_SUCCESS, adders[i].add(ctx, &o, other, db));
            snprintf(words, sizeof words, "mt_add: y is|'a'|has a sum of %s", adders[i].name);
            REFUSED(ctx, MT_ERR_ARGUMENT, words, mt_add(ctx, other, to, to));
            test_untouched("grad", grad, n, 2.0f);
            ASSERT_STATUS(ctx, MT_SUCCESS,
                          adders[i].add(ctx, &o, mt_tensor_f32(split, adders[i].a_rows, adders[i].cols), db));
            /* a collective writes into it */
            ASSERT_STATUS(ctx, MT_SUCCESS, mt_broadcast(ctx, w.rank.grid.dp, split, grad, (size_t)n, MT_F32, 0));
            REFUSED(ctx, MT_ERR_ARGUMENT, "'a'", adders[i].add(ctx, &o, to, db));
            /* the same name in other memory: another layer has it, too */
            own[0].grad = test_floats(&w.rank, n, 2.0f);
            ASSERT_STATUS(ctx, MT_SUCCESS, mt_declare_shards(ctx, w.rank.grid.tp, NULL, own, 1));
            REFUSED(ctx, MT_ERR_ARGUMENT, "'a'", adders[i].add(ctx, &o, to, db));
            mt_declare_forget(ctx, grad, (size_t)n * sizeof(float));
            ASSERT_STATUS(ctx, MT_SUCCESS, adders[i].add(ctx, &o, to, db));
            to.data = own[0].grad;
            REFUSED(ctx, MT_ERR_ARGUMENT, "'a'", adders[i].add(ctx, &o, to, db));
            /* from now on each rank has a part */
            own[0].shard.placement = MT_SPLIT_ROWS;
            ASSERT_STATUS(ctx, MT_SUCCESS, mt_declare_shards(ctx, w.rank.grid.tp, NULL, own, 1));
            ASSERT_STATUS(ctx, MT_SUCCESS, adders[i].add(ctx, &o, to, db));
            test_paper_rank_close(&w.rank);
        }
}

/* A second registry, memory of the caller, some columns of a gradient, one virtual shard, and a registry that is no
   more. */
static void test_refused_sums_of_other_memory(void **state) {
    static const mt_context_desc where = {.invariant = 4, .arena_bytes = (size_t)1 << 20};
    mt_param_desc d = {.name = "w", .rows = 16, .cols = WIDTH, .placement = MT_SPLIT_ROWS};
    mt_param_desc e = {.name = "e", .rows = 1, .cols = WIDTH};
    mt_param *w, *bias;
    mt_params *other;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1, .dp = 1}, &where, &r);
    float *values = test_floats(&r, WIDTH, 0.0f), *grads = test_floats(&r, WIDTH, 0.0f);
    mt_params_memory memory = {.values = values, .grads = grads, .elements = WIDTH};
    mt_tensor x = test_tensor(&r, 8, WIDTH, 1.0f), dy = test_tensor(&r, 8, 4, 1.0f);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_create(r.ctx, &r.grid, &other));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, other, &e, &bias));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &d, &w));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_param_bind(r.ctx, bias, &memory));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, other, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_bias_backward: dbias|'e'", mt_bias_backward(r.ctx, x, bias->grad));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_bias_backward: dbias|'e'",
            mt_bias_backward(r.ctx, dy, mt_tensor_f32(grads + 8, 1, 4)));
    for (int i = 0; i < 4; i++)
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_linear_gradients(r.ctx, dy, x, mt_tensor_rows(w->grad, 4 * i, 4), mt_none()));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_linear_gradients: dweight|'w'|shards",
            mt_linear_gradients(r.ctx, dy, x, mt_tensor_rows(w->grad, 2, 4), mt_none()));
    mt_params_destroy(other);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_backward(r.ctx, x, mt_tensor_f32(grads, 1, WIDTH)));
    test_paper_rank_close(&r);
}

/* ---- what is refused --------------------------------------------------------------------------------------------- */

static void refuse_context(int invariant, int invariant_data, const char *rest) {
    mt_comm *world = NULL;
    mt_context *ctx = NULL;
    mt_context_desc where = {.invariant = invariant, .invariant_data = invariant_data};
    char message[128];
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_comm_create_local(1, 0, &world));
    ASSERT_STATUS((mt_context *)NULL, MT_ERR_ARGUMENT, mt_context_create(world, &where, &ctx));
    snprintf(message, sizeof message, "mt_context_create: %s", rest);
    assert_string_equal(mt_comm_last_error(world), message);
    mt_comm_destroy(world);
}

static void test_refused_shards(void **state) {
    (void)state;
    refuse_context(-1, 0, "invariant is -1, must be 0 or a power of two up to 1024");
    refuse_context(6, 0, "invariant is 6, must be 0 or a power of two up to 1024");
    refuse_context(2048, 0, "invariant is 2048, must be 0 or a power of two up to 1024");
    refuse_context(8, 3, "invariant_data is 3, must be 0 or a power of two up to 1024");
    refuse_context(0, 8, "invariant_data is 8, must be 0 without invariant");
}

/* Checks that a registry is refused on this grid, on the meta device. */
static void refuse_grid(int invariant, mt_grid_desc shape, const char *words) {
    mt_context_desc where = {.invariant = invariant, .device = MT_DEVICE_META};
    mt_comm *world = NULL;
    mt_context *ctx = NULL;
    mt_grid grid;
    mt_params *params = NULL;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_comm_create_meta(shape.tp * shape.dp, 0, &world));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_context_create(world, &where, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_grid_create(world, &shape, &grid));
    REFUSED(ctx, MT_ERR_SHAPE, words, mt_params_create(ctx, &grid, &params));
    assert_null(params);
    mt_grid_destroy(&grid);
    mt_context_destroy(ctx);
    mt_comm_destroy(world);
}

static void test_refused_grids(void **state) {
    (void)state;
    refuse_grid(8, (mt_grid_desc){.tp = 3, .dp = 1}, "8 virtual shards|3 tensor ranks");
    refuse_grid(4, (mt_grid_desc){.tp = 8, .dp = 1}, "4 virtual shards|8 tensor ranks");
    refuse_grid(8, (mt_grid_desc){.tp = 2, .dp = 3}, "8 virtual data shards|3 data ranks");
    refuse_grid(2, (mt_grid_desc){.tp = 1, .dp = 4}, "2 virtual data shards|4 data ranks");
}

static void test_refused_calls(void **state) {
    static const mt_context_desc where = {.invariant = 8, .arena_bytes = (size_t)16 << 20};
    mt_transformer_layer_desc d = {.hidden = 16, .heads = 8};
    mt_self_attention_desc few = {.hidden = 16, .heads = 4, .kv_heads = 2};
    mt_self_attention attention_layer;
    mt_transformer_layer layer;
    mt_transformer_layer_saved saved;
    mt_linear_desc plain = {.in_features = 8, .out_features = 8};
    mt_row_parallel_linear linear;
    mt_linear_saved linear_saved;
    mt_batch batch = {.sequences = 1, .seq = 12};
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1, .dp = 1}, &where, &r);
    mt_tensor x = test_tensor(&r, 12, 16, 1.0f), y = test_tensor(&r, 12, 16, 2.0f);
    mt_tensor small = test_tensor(&r, 12, 8, 1.0f), dsmall = test_tensor(&r, 12, 8, 2.0f);
    mt_tensor ysmall = test_tensor(&r, 12, 8, 0.0f);
    REFUSED(r.ctx, MT_ERR_SHAPE, "4 heads|8 virtual shards",
            mt_self_attention_create(r.ctx, r.params, "a", &few, &attention_layer));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_transformer_layer_create(r.ctx, r.params, "l", &d, &layer));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_row_parallel_linear_create(r.ctx, r.params, "r", &plain, &linear));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    REFUSED(r.ctx, MT_ERR_SHAPE, "12 tokens|8 virtual shards",
            mt_transformer_layer_forward(r.ctx, &layer, &batch, x, y, &saved));
    test_untouched("y", (const float *)y.data, 12 * 16, 2.0f);
    ASSERT_STATUS(r.ctx, MT_SUCCESS,
                  mt_transformer_layer_forward(r.ctx, &layer, &batch, x, y, NULL)); /* inference is allowed */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_parallel_linear_forward(r.ctx, &linear, small, ysmall, &linear_saved));
    REFUSED(r.ctx, MT_ERR_SHAPE, "12 tokens|8 virtual shards",
            mt_parallel_linear_backward(r.ctx, &linear, small, dsmall, &linear_saved));
    test_untouched("dx", (const float *)dsmall.data, 12 * 8, 2.0f);
    test_paper_rank_close(&r);
}

/* The number of micro-batches must be the number of leaves of the tree on a data rank, and a power of two. */
static void test_refused_micro_batches(void **state) {
    static const mt_context_desc where = {.invariant = 4};
    mt_param_desc d = {.name = "p", .rows = 2, .cols = 3};
    mt_param *p;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1, .dp = 1}, &where, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &d, &p));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    for (int count = 1; count <= 5; count++) {
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
        for (int i = 0; i < count && i < 4; i++) {
            for (int j = 0; j < 6; j++) ((float *)p->grad.data)[j] += (float)(1 << i);
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_accumulate_gradients(r.ctx, r.params));
        }
        if (count == 5) {
            REFUSED(r.ctx, MT_ERR_SHAPE, "more than 4|invariant_data is 4", mt_accumulate_gradients(r.ctx, r.params));
        } else if (count == 3) {
            REFUSED(r.ctx, MT_ERR_SHAPE, "3 micro-batches|power of two", mt_sync_gradients(r.ctx, r.params));
        } else {
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sync_gradients(r.ctx, r.params));
            for (int j = 0; j < 6; j++) assert_true(((float *)p->grad.data)[j] == (float)((1 << count) - 1));
        }
    }
    test_paper_rank_close(&r);
}

/* A context with another invariant mode than the registry's is refused: the sizes would not match. */
static void test_refused_context_of_another_mode(void **state) {
    static const mt_context_desc where = {.invariant = 64};
    mt_param_desc d = {.name = "p", .rows = 64, .cols = 3, .placement = MT_SPLIT_ROWS};
    mt_param *p;
    mt_context *other;
    test_rank r;
    float norm;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1, .dp = 1}, &where, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &d, &p));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_context_create(NULL, NULL, &other));
    REFUSED(other, MT_ERR_ARGUMENT, "invariant 64, 64|0, 0", mt_grad_norm(other, r.params, &norm));
    REFUSED(other, MT_ERR_ARGUMENT, "invariant 64, 64", mt_sync_gradients(other, r.params));
    mt_context_destroy(other);
    test_paper_rank_close(&r);
}

/* ---- small parts ------------------------------------------------------------------------------------------------- */

static void test_micro_batch_sizes(void **state) {
    (void)state;
    assert_int_equal(mt_invariant_micro_batch(8, 8), 1);
    assert_int_equal(mt_invariant_micro_batch(8, 64), 8);
    assert_int_equal(mt_invariant_micro_batch(8, 12), 3);
    assert_int_equal(mt_invariant_micro_batch(8, 7), 7);
    assert_int_equal(mt_invariant_micro_batch(1, 6), 6);
    assert_int_equal(mt_invariant_micro_batch(0, 6), 6);
}

/* Numbers whose sum depends on the order are summed as in the tree of mt_all_reduce. */
static void test_tree_sum(void **state) {
    static const mt_context_desc where = {0};
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1, .dp = 1}, &where, &r);
    for (int n = 1; n <= 9; n++) {
        float x[9];
        uint64_t seed = 11;
        for (int i = 0; i < n; i++) x[i] = test_float(&seed);
        volatile float a01 = x[0] + x[1], a23 = x[2] + x[3], a45 = x[4] + x[5], a67 = x[6] + x[7];
        volatile float a03 = a01 + (n > 3 ? a23 : x[2]), a47 = a45 + (n > 7 ? a67 : x[6]);
        volatile float a07 = a03 + (n > 6 ? a47 : n > 5 ? a45 : x[4]), a08 = a07 + x[8];
        float want = n == 1 ? x[0] : n == 2 ? a01 : n < 5 ? a03 : n < 9 ? a07 : a08;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_tree_sum(r.ctx, mt_tensor_f32(x, n, 1)));
        assert_memory_equal(&x[0], &want, sizeof want);
    }
    test_paper_rank_close(&r);
}

/* The tree over the micro-batches needs log2(V_d / data ranks) further gradients, and no more. */
static void test_memory(void **state) {
    (void)state;
    for (int data = 1; data <= 8; data *= 2) {
        mt_context_desc where = {.invariant = 8, .device = MT_DEVICE_META};
        mt_param_desc d = {.name = "p", .rows = 64, .cols = 16};
        mt_param *p;
        test_rank r;
        int more = data == 1 ? 3 : data == 2 ? 2 : data == 4 ? 1 : 0;
        test_paper_rank(data, 0, (mt_grid_desc){.tp = 1, .dp = data}, &where, &r);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &d, &p));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        assert_int_equal(mt_context_allocated(r.ctx), (2 + more) * 64 * 16 * (int)sizeof(float));
        test_paper_rank_close(&r);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_models),
        cmocka_unit_test(test_default_mode_differs),
        cmocka_unit_test(test_layers),
        cmocka_unit_test(test_parts_that_nobody_looks_after),
        cmocka_unit_test(test_sums_of_operators),
        cmocka_unit_test(test_bias_of_scores),
        cmocka_unit_test(test_refused_sums),
        cmocka_unit_test(test_refused_sums_in_scratch),
        cmocka_unit_test(test_accepted_memory_of_sums),
        cmocka_unit_test(test_accepted_sums_in_scratch),
        cmocka_unit_test(test_refused_sums_of_own_gradients),
        cmocka_unit_test(test_refused_sums_of_other_memory),
        cmocka_unit_test(test_refused_shards),
        cmocka_unit_test(test_refused_grids),
        cmocka_unit_test(test_refused_calls),
        cmocka_unit_test(test_refused_micro_batches),
        cmocka_unit_test(test_refused_context_of_another_mode),
        cmocka_unit_test(test_micro_batch_sizes),
        cmocka_unit_test(test_tree_sum),
        cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
