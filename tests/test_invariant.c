/* test_invariant.c - invariant mode: the same bits on every split.

   Every model is trained for 20 steps, with dropout, on every grid of tensor x data ranks x sequence parallelism that 8 ranks
   allow. Losses, gradients, gradient norms, weights and optimizer state of every step are compared, bit by bit, with those of
   one rank. Each layer is compared by itself, too.

   cc -std=gnu17 -O2 -I. tests/test_invariant.c -lcmocka -lpthread -lm                                                 */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test_ranks.h"

#define RANKS 8

/* ---- models ------------------------------------------------------------------------------------------------------ */

typedef struct model {
    const char *name;
    int invariant, steps;
    int64_t sequences; /* of a step, over all ranks */
    int64_t seq;
    int padded;        /* sequences have different lengths */
    mt_gpt_desc gpt;
} model;

/* Sizes that 8 shards do not divide: vocabularies, inner widths, query groups. */
static const model models[] = {
    {"GPT-2", 8, 20, 8, 16, 0,
     {.vocab = 61, .layers = 2, .max_seq = 20, .embedding_dropout = 0.1f,
      .layer = {.hidden = 32, .heads = 8, .ffn = 52, .attention_dropout = 0.1f, .hidden_dropout = 0.1f}}},
    {"Llama, two heads per group", 8, 20, 16, 8, 0,
     {.vocab = 64, .layers = 2, .max_seq = 8, .untied_head = 1, .label_smoothing = 0.1f, .embedding_dropout = 0.1f,
      .layer = {.hidden = 64, .heads = 16, .kv_heads = 8, .ffn = 44, .norm = MT_RMS_NORM, .activation = MT_SWIGLU,
                .rotary_base = 10000.0f, .no_bias = 1, .attention_dropout = 0.1f, .hidden_dropout = 0.1f}}},
    {"BERT, padded sequences", 8, 20, 8, 16, 1,
     {.vocab = 50, .layers = 2, .max_seq = 16, .embedding_dropout = 0.1f,
      .layer = {.hidden = 48, .heads = 12, .placement = MT_POST_LN, .activation = MT_GELU_ERF,
                .mask = MT_MASK_BIDIRECTIONAL, .attention_dropout = 0.1f, .hidden_dropout = 0.1f}}},
    {"residual after norm, 10 groups of 2, micro-batches of 3", 8, 20, 12, 8, 0,
     {.vocab = 61, .layers = 2, .max_seq = 8, .untied_head = 1,
      .layer = {.hidden = 40, .heads = 20, .kv_heads = 10, .placement = MT_RESIDUAL_POST_LN, .activation = MT_SWIGLU,
                .attention_dropout = 0.1f, .hidden_dropout = 0.1f}}},
    {"4 shards, no dropout", 4, 20, 4, 8, 0,
     {.vocab = 33, .layers = 1, .max_seq = 8, .layer = {.hidden = 24, .heads = 4}}},
    {"sizes that GEMM libraries block", 8, 3, 8, 96, 0,
     {.vocab = 500, .layers = 1, .max_seq = 96, .embedding_dropout = 0.1f,
      .layer = {.hidden = 400, .heads = 8, .ffn = 1700, .attention_dropout = 0.1f, .hidden_dropout = 0.1f}}},
};
#define MODELS (sizeof models / sizeof *models)

/* ---- one run ----------------------------------------------------------------------------------------------------- */

typedef struct split {
    int tensor, data, sequence_parallel;
} split;

/* What one rank has computed in every step, float by float; then what the others are compared with. */
typedef struct trace {
    float *data;
    int64_t count, room;
} trace;

typedef struct run {
    const model *model;
    split split;
    int invariant; /* V, or 0 to see that the default differs */
    trace *reference;
    int compares;  /* 0: rank 0 writes the reference */
    int *differs;  /* when it is expected: set instead of failing */
} run;

typedef struct worker {
    test_rank rank;
    const run *run;
    mt_gpt gpt;
    mt_gpt_saved saved;
    mt_optimizer optimizer;
    int64_t at; /* in the trace */
    float *host;
} worker;

static mt_status record(worker *w, const char *what, const char *name, int step, const float *x, int64_t n) {
    const run *run = w->run;
    trace *t = run->reference;
    if (!run->compares) {
        if (mt_comm_rank(w->rank.world) != 0) return MT_SUCCESS;
        if (t->count + n > t->room) {
            t->room = 2 * (t->count + n);
            t->data = (float *)realloc(t->data, (size_t)t->room * sizeof(float));
            if (!t->data) return MT_ERR_MEMORY;
        }
        memcpy(t->data + t->count, x, (size_t)n * sizeof(float));
        t->count += n;
        return MT_SUCCESS;
    }
    CHECK(w->at + n <= t->count);
    if (memcmp(t->data + w->at, x, (size_t)n * sizeof(float)) != 0) {
        int64_t i = 0;
        if (run->differs) {
            *run->differs = 1;
            w->at += n;
            return MT_SUCCESS;
        }
        while (memcmp(t->data + w->at + i, x + i, sizeof *x) == 0) i++;
        fprintf(stderr, "%s, tensor %d x data %d%s: step %d: %s%s[%lld] of %lld is %.9g (%a), on one rank %.9g (%a)\n",
                run->model->name, run->split.tensor, run->split.data, run->split.sequence_parallel ? ", sequence parallel" : "",
                step, what, name, (long long)i, (long long)n, (double)x[i], (double)x[i], (double)t->data[w->at + i],
                (double)t->data[w->at + i]);
        return MT_ERR_DATA;
    }
    w->at += n;
    return MT_SUCCESS;
}

static mt_status record_shard(worker *w, const char *what, const mt_param *p, int step, mt_tensor shard) {
    MT_TRY(mt_param_gather(w->rank.ctx, w->rank.params, p, shard, w->host));
    return record(w, what, p->name, step, w->host, p->desc.rows * p->desc.cols);
}

static int32_t token_of(int step, int64_t sequence, int64_t position, int64_t vocab) {
    uint64_t seed = (uint64_t)step * 1000003 + (uint64_t)sequence * 1009 + (uint64_t)position;
    return (int32_t)(test_random(&seed) % (uint64_t)vocab);
}

/* Forward and backward of sequences [first, first + count); *loss is the sum of theirs. */
static mt_status micro_batch(worker *w, int step, int64_t first, int64_t count, mt_tensor loss) {
    const model *m = w->run->model;
    mt_context *ctx = w->rank.ctx;
    mt_batch batch = {.sequences = count, .seq = m->seq, .first_sequence = first, .seed = 7, .step = (uint64_t)step};
    int64_t tokens = count * m->seq;
    size_t mark = mt_arena_mark(ctx);
    mt_tensor ids, targets, lengths, losses;
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, tokens, &ids));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, tokens, &targets));
    MT_TRY(mt_arena_tensor(ctx, MT_I32, 1, count, &lengths));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 1, tokens, &losses));
    for (int64_t i = 0; i < tokens; i++) {
        ((int32_t *)ids.data)[i] = token_of(step, first + i / m->seq, i % m->seq, m->gpt.vocab);
        ((int32_t *)targets.data)[i] = token_of(step, first + i / m->seq, i % m->seq + 1, m->gpt.vocab);
    }
    for (int64_t i = 0; i < count; i++) ((int32_t *)lengths.data)[i] = (int32_t)(m->seq - (first + i) % 5);
    if (m->padded) batch.lengths = (const int32_t *)lengths.data;
    MT_TRY(mt_gpt_forward(ctx, &w->gpt, &batch, ids.data, targets.data, losses, &w->saved));
    MT_TRY(mt_sum(ctx, losses, loss));
    MT_TRY(mt_gpt_backward(ctx, &w->gpt, 1.0f / (float)(m->sequences * m->seq), &w->saved));
    mt_arena_release(ctx, mark);
    return mt_accumulate_gradients(ctx, w->rank.params);
}

static mt_status micro_batches(worker *w, int step, float *loss) {
    const model *m = w->run->model;
    mt_context *ctx = w->rank.ctx;
    int64_t each = mt_invariant_micro_batch(m->invariant, m->sequences), share = m->sequences / w->rank.grid.data_size;
    int64_t n = share / each;
    mt_tensor losses;
    size_t mark = mt_arena_mark(ctx);
    MT_TRY(mt_arena_tensor(ctx, MT_F32, n, 1, &losses));
    MT_TRY(mt_fill(ctx, losses, 0.0f));
    for (int64_t i = 0; i < n; i++)
        MT_TRY(micro_batch(w, step, w->rank.grid.data_rank * share + i * each, each, mt_tensor_rows(losses, i, 1)));
    MT_TRY(mt_tree_sum(ctx, losses));
    MT_TRY(mt_all_reduce(ctx, w->rank.grid.data, losses.data, losses.data, 1, MT_F32, MT_SUM));
    *loss = *(float *)losses.data;
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
    for (int i = 0; i < mt_params_count(params); i++)
        MT_TRY(record_shard(w, "gradient of ", mt_params_at(params, i), step, mt_params_at(params, i)->grad));
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
    for (int step = 0; step < run->model->steps; step++) MT_TRY(train_step(w, step));
    CHECK(!run->compares || w->at == run->reference->count);
    return MT_SUCCESS;
}

static mt_status train_rank(mt_comm *world, void *user) {
    worker w;
    mt_status status;
    memset(&w, 0, sizeof w);
    w.run = (const run *)user;
    mt_context_desc where = {.arena_bytes = (size_t)64 << 20, .invariant = w.run->invariant};
    mt_grid_desc shape = {.tensor = w.run->split.tensor, .data = w.run->split.data};
    status = test_rank_open(world, shape, &where, &w.rank);
    if (status == MT_SUCCESS) status = train(&w);
    mt_optimizer_destroy(w.rank.ctx, &w.optimizer);
    mt_gpt_saved_destroy(&w.saved);
    test_rank_close(&w.rank);
    return status;
}

/* Every split of up to RANKS ranks, but for the first, which is one rank. */
static int list_splits(const model *m, split *list) {
    int n = 0;
    int64_t most = m->sequences / mt_invariant_micro_batch(m->invariant, m->sequences);
    for (int tensor = 1; tensor <= m->invariant; tensor *= 2)
        for (int data = 1; data <= most && tensor * data <= RANKS; data *= 2)
            for (int sp = 0; sp <= (tensor > 1); sp++) list[n++] = (split){tensor, data, sp};
    return n;
}

static void test_models(void **state) {
    (void)state;
    for (size_t i = 0; i < MODELS; i++) {
        trace reference = {0};
        split list[64];
        int n = list_splits(&models[i], list);
        for (int s = 0; s < n; s++) {
            run r = {.model = &models[i], .split = list[s], .invariant = models[i].invariant, .reference = &reference,
                     .compares = s > 0};
            test_launch(list[s].tensor * list[s].data, train_rank, &r);
        }
        printf("      %s: %d splits, %d steps, %lld floats each\n", models[i].name, n, models[i].steps,
               (long long)reference.count);
        free(reference.data);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_models),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
