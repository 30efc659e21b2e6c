/* test_cross_attention.c - tests mt_cross_attention: output and gradients against PyTorch's nn.MultiheadAttention
   (golden/cross_attention.safetensors) on every split, against finite differences, against self-attention, and in
   16-bit types; every split against one rank, with the same bits in invariant mode; recomputation, dropout, the hash
   log; what it communicates, allocates and refuses.
       cc -std=gnu17 -O2 -I. tests/test_cross_attention.c -lpthread -lm */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test_ranks.h"

/* ---- one step of one block --------------------------------------------------------------------------------------- */

enum { SEQUENCES = 2, FIRST_SEQUENCE = 3, VALUES_MAX = 4096, PARAMS_MAX = 16384, PARAMS = 8 };

typedef struct cross_case {
    const char *name;
    mt_cross_attention_desc desc;
    int64_t queries, keys;      /* of a sequence */
    int32_t lengths[SEQUENCES]; /* valid keys; the first is -1: all keys are valid */
} cross_case;

/* Values of all tokens: the outputs and gradients of a step on all ranks together. */
typedef struct outcome {
    float y[VALUES_MAX], dx[VALUES_MAX], dmemory[VALUES_MAX], grads[PARAMS_MAX];
} outcome;

typedef struct cross {
    const cross_case *c;
    test_rank *r;
    int sequence_parallel;
    mt_cross_attention layer;
} cross;

/* The tensors of one forward and backward, in the arena. */
typedef struct pass {
    mt_batch batch, memory_batch;
    int64_t row, memory_row; /* the first of this rank, of all tokens of the step */
    mt_tensor x, memory, dy, y, dx, dmemory;
    mt_cross_attention_saved saved;
} pass;

static mt_status cross_open(cross *b, const cross_case *c, test_rank *r, int sequence_parallel, mt_dtype dtype) {
    mt_cross_attention_desc d = c->desc;
    memset(b, 0, sizeof *b);
    b->c = c;
    b->r = r;
    b->sequence_parallel = d.sequence_parallel = sequence_parallel;
    MT_TRY(test_rank_renew(r));
    MT_TRY(mt_params_set_dtype(r->ctx, r->params, dtype));
    MT_TRY(mt_cross_attention_create(r->ctx, r->params, "block", &d, &b->layer));
    MT_TRY(mt_params_init(r->ctx, r->params, 7));
    return disturb_params(r, 0.3f);
}

static mt_status fill(test_rank *r, mt_tensor t, const float *from) {
    size_t mark = mt_arena_mark(r->ctx);
    mt_tensor wide;
    MT_TRY(mt_arena_tensor(r->ctx, MT_F32, t.rows, t.cols, &wide));
    MT_TRY(mt_upload(r->ctx, from, wide));
    MT_TRY(mt_convert(r->ctx, wide, t));
    mt_arena_release(r->ctx, mark);
    return MT_SUCCESS;
}

/* Makes the tensors for sequences [first, first + count) of a step. x, memory and dy are noise, the same on every
   split. */
static mt_status pass_open(const cross *b, int64_t first, int64_t count, pass *p) {
    const cross_case *c = b->c;
    const mt_cross_attention_desc *d = &b->layer.desc;
    test_rank *r = b->r;
    mt_dtype dtype = b->layer.proj.weight->value.dtype;
    int shares = b->sequence_parallel ? r->grid.tp_size : 1, share = b->sequence_parallel ? r->grid.tp_rank : 0;
    int64_t rows = count * c->queries / shares, memory_rows = count * c->keys / shares;
    mt_arena_request memory[] = {{&p->x, dtype, rows, d->hidden},  {&p->y, dtype, rows, d->hidden},
                                 {&p->dy, dtype, rows, d->hidden}, {&p->memory, dtype, memory_rows, d->kv_hidden},
                                 {&p->dx, dtype, rows, d->hidden}, {&p->dmemory, dtype, memory_rows, d->kv_hidden}};
    memset(p, 0, sizeof *p);
    p->row = first * c->queries + share * rows;
    p->memory_row = first * c->keys + share * memory_rows;
    p->batch.sequences = p->memory_batch.sequences = count;
    p->batch.first_sequence = p->memory_batch.first_sequence = FIRST_SEQUENCE + first;
    p->batch.seed = 11;
    p->batch.step = 2;
    p->batch.seq = c->queries;
    p->memory_batch.seq = c->keys;
    if (c->lengths[0] >= 0) p->memory_batch.lengths = c->lengths + first;
    MT_TRY(mt_arena_tensors(r->ctx, memory, 6));
    MT_TRY(fill(r, p->x, test_noise(r, VALUES_MAX, 1, 1.5f) + p->row * d->hidden));
    MT_TRY(fill(r, p->memory, test_noise(r, VALUES_MAX, 2, 1.5f) + p->memory_row * d->kv_hidden));
    MT_TRY(fill(r, p->dy, test_noise(r, VALUES_MAX, 3, 0.5f) + p->row * d->hidden));
    MT_TRY(mt_fill(r->ctx, p->y, NAN));
    MT_TRY(mt_fill(r->ctx, p->dx, NAN));
    return mt_fill(r->ctx, p->dmemory, NAN);
}

static mt_status pass_forward(const cross *b, pass *p, int training) {
    return mt_cross_attention_forward(b->r->ctx, &b->layer, &p->batch, p->x, &p->memory_batch, p->memory, p->y,
                                      training ? &p->saved : NULL);
}

static mt_status pass_backward(const cross *b, pass *p) {
    return mt_cross_attention_backward(b->r->ctx, &b->layer, p->dy, p->dx, p->dmemory, &p->saved);
}

/* Checks that the tensor group did exactly the calls of one forward and backward, of f32. */
static mt_status check_ledger(const cross *b, const pass *p) {
    const int sp = b->sequence_parallel;
    mt_ledger got = mt_comm_ledger(b->r->grid.tp), want = {{0}, {0}};
    uint64_t x = (uint64_t)(p->batch.sequences * p->batch.seq * b->layer.desc.hidden * 4);
    uint64_t memory = (uint64_t)(p->memory_batch.sequences * p->memory_batch.seq * b->layer.desc.kv_hidden * 4);
    want.calls[MT_ALL_REDUCE] = sp ? 0 : 3; /* y; dx, dmemory */
    want.bytes[MT_ALL_REDUCE] = sp ? 0 : 2 * x + memory;
    want.calls[MT_ALL_GATHER] = sp ? 5 : 0; /* x, memory; dy, x, memory */
    want.bytes[MT_ALL_GATHER] = sp ? 3 * x + 2 * memory : 0;
    want.calls[MT_REDUCE_SCATTER] = sp ? 3 : 0; /* y; dx, dmemory */
    want.bytes[MT_REDUCE_SCATTER] = sp ? 2 * x + memory : 0;
    if (b->r->grid.tp_size == 1) memset(&want, 0, sizeof want);
    for (int k = 0; k < MT_COLLECTIVE_COUNT; k++) CHECK(got.calls[k] == want.calls[k] && got.bytes[k] == want.bytes[k]);
    return MT_SUCCESS;
}

/* Compares a tensor with the rows of `want` that begin at `row`, or stores it there. With the tolerance 0 all bits must
   be equal. */
static mt_status record(const cross *b, const char *what, mt_tensor t, int64_t row, float *want, int store,
                        double tolerance) {
    size_t mark = mt_arena_mark(b->r->ctx), bytes = (size_t)(t.rows * t.cols) * sizeof(float);
    mt_tensor wide;
    MT_TRY(mt_arena_tensor(b->r->ctx, MT_F32, t.rows, t.cols, &wide));
    MT_TRY(mt_convert(b->r->ctx, t, wide));
    want += row * t.cols;
    if (store) memcpy(want, wide.data, bytes);
    if (tolerance == 0 && memcmp(want, wide.data, bytes) != 0) {
        fprintf(stderr, "%s: other bits\n", what);
        return MT_ERR_DATA;
    }
    if (tolerance > 0) MT_TRY(test_near_f32(what, (const float *)wide.data, want, t.rows * t.cols, tolerance));
    mt_arena_release(b->r->ctx, mark);
    return MT_SUCCESS;
}

static mt_status record_pass(const cross *b, const pass *p, outcome *out, int store, double tolerance) {
    MT_TRY(record(b, "y", p->y, p->row, out->y, store, tolerance));
    MT_TRY(record(b, "dx", p->dx, p->row, out->dx, store, tolerance));
    return record(b, "dmemory", p->dmemory, p->memory_row, out->dmemory, store, tolerance);
}

/* Runs the sequences of this data rank in micro-batches of `each`. */
static mt_status cross_step(const cross *b, int64_t each, outcome *out, int store, double tolerance) {
    test_rank *r = b->r;
    int64_t count = SEQUENCES / r->grid.dp_size, first = r->grid.dp_rank * count;
    int is_f32 = b->layer.proj.weight->value.dtype == MT_F32;
    MT_TRY(mt_params_zero_grad(r->ctx, r->params));
    for (int64_t i = first; i < first + count; i += each) {
        size_t mark = mt_arena_mark(r->ctx);
        pass p;
        MT_TRY(pass_open(b, i, each, &p));
        mt_comm_ledger_reset(r->grid.tp);
        MT_TRY(pass_forward(b, &p, 1));
        MT_TRY(pass_backward(b, &p));
        if (is_f32) MT_TRY(check_ledger(b, &p));
        MT_TRY(record_pass(b, &p, out, store, tolerance));
        mt_arena_release(r->ctx, mark);
        MT_TRY(mt_accumulate_gradients(r->ctx, r->params));
    }
    return mt_sync_gradients(r->ctx, r->params);
}

static mt_status record_gradients(const cross *b, outcome *out, int store, double tolerance) {
    float *grads = test_floats(b->r, PARAMS_MAX, NAN);
    int64_t n;
    MT_TRY(gather_grads(b->r, grads, PARAMS_MAX, &n));
    if (store) memcpy(out->grads, grads, (size_t)n * sizeof(float));
    if (tolerance > 0) return test_near_f32("gradients", grads, out->grads, n, tolerance);
    CHECK(memcmp(out->grads, grads, (size_t)n * sizeof(float)) == 0);
    return MT_SUCCESS;
}

static int rows_can_be_split(const cross_case *c, int64_t sequences, int ranks) {
    return sequences * c->queries % ranks == 0 && sequences * c->keys % ranks == 0;
}

/* ---- PyTorch ----------------------------------------------------------------------------------------------------- */

#define PYTORCH "tests/golden/cross_attention.safetensors"
#define NO_LENGTHS                                                                                                     \
    { -1, -1 }

/* The cases of golden/make_cross_attention.py. */
static const cross_case golden_cases[] = {
    {"plain", {.hidden = 16, .heads = 4}, 6, 12, NO_LENGTHS},
    {"padded", {.hidden = 16, .heads = 4, .kv_hidden = 10}, 6, 12, {7, 12}},
    {"groups", {.hidden = 24, .heads = 6, .kv_heads = 3, .kv_hidden = 12}, 6, 12, {12, 5}},
    {"one", {.hidden = 16, .heads = 8, .kv_heads = 1, .kv_hidden = 24, .no_bias = 1}, 6, 12, {1, 12}},
    {"biased", {.hidden = 24, .heads = 6, .kv_heads = 3, .kv_hidden = 12}, 6, 12, {12, 5}}};

static const char *const param_names[PARAMS] = {"query.weight", "query.bias", "key.weight",         "key.bias",
                                                "value.weight", "value.bias", "linear_proj.weight", "linear_proj.bias"};

/* Reads a tensor of a case. */
static mt_status golden(test_rank *r, const mt_safetensors *file, const char *name, const char *part, float **out) {
    char full[96];
    const mt_safetensors_tensor *t;
    snprintf(full, sizeof full, "%s.%s", name, part);
    t = mt_safetensors_find(file, full);
    CHECK(t != NULL);
    *out = test_floats(r, t->bytes / (int64_t)sizeof(float), NAN);
    return mt_safetensors_read(r->ctx, t, *out);
}

/* Sets the parameters, or compares their gradients. */
static mt_status golden_params(cross *b, const mt_safetensors *file, int gradients) {
    test_rank *r = b->r;
    float *want, *got = test_floats(r, PARAMS_MAX, NAN);
    char name[64];
    for (int i = 0; i < PARAMS; i++) {
        mt_param *p;
        snprintf(name, sizeof name, "block.%s", param_names[i]);
        p = mt_params_find(r->params, name);
        CHECK((p != NULL) == (i % 2 == 0 || !b->c->desc.no_bias));
        if (!p) continue;
        snprintf(name, sizeof name, "%s%s", gradients ? "grad." : "", param_names[i]);
        MT_TRY(golden(r, file, b->c->name, name, &want));
        if (!gradients) MT_TRY(mt_param_scatter(r->ctx, p, want, p->value));
        else {
            MT_TRY(mt_param_gather(r->ctx, r->params, p, p->grad, got));
            MT_TRY(test_near_f32(name, got, want, p->desc.rows * p->desc.cols, 2e-5));
        }
    }
    return MT_SUCCESS;
}

/* Sets the bias of the scores, and zeros for its gradient. */
static mt_status golden_bias(const cross *b, const mt_safetensors *file, mt_batch *memory_batch) {
    int64_t heads = b->c->desc.heads, rows = SEQUENCES * heads * b->c->queries;
    float *bias;
    if (strcmp(b->c->name, "biased") != 0) return MT_SUCCESS;
    MT_TRY(golden(b->r, file, b->c->name, "bias", &bias));
    memory_batch->bias.batch = SEQUENCES;
    memory_batch->bias.heads = heads;
    memory_batch->bias.value = mt_tensor_f32(bias, rows, b->c->keys);
    memory_batch->bias.grad = test_tensor(b->r, rows, b->c->keys, 0.0f);
    return MT_SUCCESS;
}

/* Compares the gradient of the bias, summed over the tensor ranks. */
static mt_status golden_bias_gradient(const cross *b, const mt_safetensors *file, mt_tensor d) {
    size_t n = (size_t)(d.rows * d.cols);
    float *want;
    if (!d.data) return MT_SUCCESS;
    MT_TRY(golden(b->r, file, b->c->name, "grad.bias", &want));
    MT_TRY(mt_all_reduce(b->r->ctx, b->r->grid.tp, d.data, d.data, n, MT_F32, MT_SUM));
    return test_near_f32("dbias", (const float *)d.data, want, (int64_t)n, 5e-6);
}

static mt_status golden_case(cross *b, const mt_safetensors *file) {
    const mt_cross_attention_desc *d = &b->layer.desc;
    test_rank *r = b->r;
    float *x, *memory, *dy, *y, *dx, *dmemory;
    int64_t at, memory_at;
    pass p;
    MT_TRY(golden_params(b, file, 0));
    MT_TRY(golden(r, file, b->c->name, "x", &x));
    MT_TRY(golden(r, file, b->c->name, "memory", &memory));
    MT_TRY(golden(r, file, b->c->name, "dy", &dy));
    MT_TRY(golden(r, file, b->c->name, "y", &y));
    MT_TRY(golden(r, file, b->c->name, "grad.x", &dx));
    MT_TRY(golden(r, file, b->c->name, "grad.memory", &dmemory));
    MT_TRY(pass_open(b, 0, SEQUENCES, &p));
    MT_TRY(golden_bias(b, file, &p.memory_batch));
    at = p.row * d->hidden;
    memory_at = p.memory_row * d->kv_hidden;
    MT_TRY(fill(r, p.x, x + at));
    MT_TRY(fill(r, p.memory, memory + memory_at));
    MT_TRY(fill(r, p.dy, dy + at));
    MT_TRY(pass_forward(b, &p, 1));
    MT_TRY(pass_backward(b, &p));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    MT_TRY(test_near_f32("y", (const float *)p.y.data, y + at, p.y.rows * p.y.cols, 5e-6));
    MT_TRY(test_near_f32("dx", (const float *)p.dx.data, dx + at, p.y.rows * p.y.cols, 5e-6));
    MT_TRY(test_near_f32("dmemory", (const float *)p.dmemory.data, dmemory + memory_at, p.dmemory.rows * p.dmemory.cols,
                         5e-6));
    MT_TRY(golden_bias_gradient(b, file, p.memory_batch.bias.grad));
    return golden_params(b, file, 1);
}

static mt_status golden_rank(mt_comm *world, void *user) {
    const int sp = *(const int *)user, ranks = mt_comm_size(world);
    mt_safetensors *file = NULL;
    test_rank r;
    mt_status status = test_rank_open(world, (mt_grid_desc){.tp = ranks}, NULL, &r);
    if (status == MT_SUCCESS) status = mt_safetensors_open(r.ctx, PYTORCH, &file);
    for (size_t i = 0; status == MT_SUCCESS && i < sizeof golden_cases / sizeof *golden_cases; i++) {
        cross b;
        status = cross_open(&b, &golden_cases[i], &r, sp, MT_F32);
        if (status == MT_SUCCESS) status = golden_case(&b, file);
        mt_arena_release(r.ctx, 0);
        if (status != MT_SUCCESS)
            fprintf(stderr, "%s on %d ranks, sequence parallelism %d: %s\n", golden_cases[i].name, ranks, sp,
                    mt_last_error(r.ctx));
    }
    mt_safetensors_close(file);
    test_rank_close(&r);
    return status;
}

static void test_pytorch(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int sp = 0; sp <= 1; sp++) test_launch(ranks, golden_rank, &sp);
}

/* ---- masks ------------------------------------------------------------------------------------------------------- */

/* A boolean mask, of all or for each sequence and head, gives the bits of a bias that is 0 or -INFINITY. */
static void test_masks(void **state) {
    static const cross_case c = {"masks", {.hidden = 16, .heads = 4, .kv_heads = 2, .dropout = 0.1f}, 6, 10, {10, 7}};
    static outcome want;
    uint8_t bytes[SEQUENCES * 4 * 6 * 10];
    test_rank r;
    cross b;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, cross_open(&b, &c, &r, 0, MT_F32));
    for (int i = 0; i < 4; i++) {
        const int full = i / 2, boolean = i % 2;
        int64_t rows = full ? SEQUENCES * 4 * 6 : 6, n = rows * 10;
        float *bias = test_noise(&r, n, 9, 1.0f);
        size_t mark = mt_arena_mark(r.ctx);
        pass p;
        for (int64_t k = 0; k < n; k++) {
            bytes[k] = bias[k] > -0.4f;
            bias[k] = bytes[k] ? 0.0f : -INFINITY;
        }
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_open(&b, 0, SEQUENCES, &p));
        p.memory_batch.bias.batch = full ? SEQUENCES : 1;
        p.memory_batch.bias.heads = full ? 4 : 1;
        p.memory_batch.bias.value = boolean ? mt_tensor_make(bytes, MT_U8, rows, 10) : mt_tensor_f32(bias, rows, 10);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_forward(&b, &p, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_backward(&b, &p));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, record_pass(&b, &p, &want, !boolean, 0));
        mt_arena_release(r.ctx, mark);
    }
    test_paper_rank_close(&r);
}

/* ---- every split against one rank -------------------------------------------------------------------------------- */

static const cross_case split_cases[] = {
    {"heads", {.hidden = 32, .heads = 8}, 12, 24, NO_LENGTHS},
    {"lengths, dropout",
     {.hidden = 32, .heads = 8, .kv_hidden = 20, .dropout = 0.2f, .layer_number = 3},
     12,
     24,
     {24, 7}},
    {"fewer keys than queries, soft cap, bias left to the caller",
     {.hidden = 16, .heads = 8, .dropout = 0.1f, .scores.softcap = 1.5f, .skip_bias_add = 1},
     12,
     4,
     {0, 3}},
    {"4 groups, recomputed core, no bias",
     {.hidden = 32, .heads = 8, .kv_heads = 4, .kv_hidden = 7, .dropout = 0.2f, .recompute_core = 1, .no_bias = 1},
     12,
     24,
     NO_LENGTHS},
    {"5 heads", {.hidden = 20, .heads = 5, .kv_hidden = 12, .dropout = 0.2f}, 12, 24, {1, 24}},
    {"6 groups", {.hidden = 24, .heads = 12, .kv_heads = 6, .dropout = 0.2f}, 12, 24, NO_LENGTHS},
    {"1 group of 8 heads", {.hidden = 32, .heads = 8, .kv_heads = 1, .dropout = 0.2f}, 12, 24, {24, 5}},
    {"2 groups of 6 heads", {.hidden = 24, .heads = 12, .kv_heads = 2, .kv_hidden = 16}, 12, 24, NO_LENGTHS},
    {"3 groups of 4 heads",
     {.hidden = 24, .heads = 12, .kv_heads = 3, .no_bias = 1, .dropout = 0.2f},
     12,
     12,
     NO_LENGTHS},
};
#define SPLIT_CASES (sizeof split_cases / sizeof *split_cases)

typedef struct split_run {
    int tp, dp, sequence_parallel;
    outcome serial[SPLIT_CASES];
} split_run;

static mt_status split_rank(mt_comm *world, void *user) {
    split_run *run = (split_run *)user;
    int store = run->tp * run->dp == 1 && !run->sequence_parallel;
    test_rank r;
    mt_status status = test_rank_open(world, (mt_grid_desc){.tp = run->tp, .dp = run->dp}, NULL, &r);
    for (size_t i = 0; status == MT_SUCCESS && i < SPLIT_CASES; i++) {
        const cross_case *c = &split_cases[i];
        cross b;
        if (c->desc.heads < run->tp) continue;
        if (run->sequence_parallel && !rows_can_be_split(c, SEQUENCES / run->dp, run->tp)) continue;
        status = cross_open(&b, c, &r, run->sequence_parallel, MT_F32);
        MT_KEEP(status, cross_step(&b, SEQUENCES / run->dp, &run->serial[i], store, 5e-6));
        MT_KEEP(status, record_gradients(&b, &run->serial[i], store, 1e-5));
        for (int k = 0; status == MT_SUCCESS && k < mt_params_count(r.params); k++)
            status = check_padding(mt_params_at(r.params, k));
        if (status != MT_SUCCESS)
            fprintf(stderr, "%s on %d x %d ranks, sequence parallelism %d: %s\n", c->name, run->tp, run->dp,
                    run->sequence_parallel, mt_last_error(r.ctx));
    }
    test_rank_close(&r);
    return status;
}

static void test_every_split(void **state) {
    static const int splits[][2] = {{1, 1}, {2, 1}, {3, 1}, {4, 1}, {7, 1}, {8, 1}, {1, 2}, {4, 2}};
    static split_run run;
    (void)state;
    for (size_t i = 0; i < sizeof splits / sizeof *splits; i++)
        for (int sp = 0; sp <= 1; sp++) {
            run.tp = splits[i][0];
            run.dp = splits[i][1];
            run.sequence_parallel = sp;
            test_launch(run.tp * run.dp, split_rank, &run);
        }
}

/* dx and dmemory that are mt_none() are not sent: what is left is y and, with sequence parallelism, the all-gathers. */
static mt_status silent_rank(mt_comm *world, void *user) {
    const int sp = *(const int *)user;
    mt_ledger ledger;
    test_rank r;
    cross b;
    pass p;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, NULL, &r));
    MT_TRY(cross_open(&b, &split_cases[1], &r, sp, MT_F32));
    MT_TRY(pass_open(&b, 0, SEQUENCES, &p));
    p.dx = p.dmemory = mt_none();
    mt_comm_ledger_reset(r.grid.tp);
    MT_TRY(pass_forward(&b, &p, 1));
    MT_TRY(pass_backward(&b, &p));
    ledger = mt_comm_ledger(r.grid.tp);
    CHECK(ledger.calls[MT_ALL_REDUCE] == (sp ? 0 : 1));
    CHECK(ledger.calls[MT_ALL_GATHER] == (sp ? 5 : 0));
    CHECK(ledger.calls[MT_REDUCE_SCATTER] == (sp ? 1 : 0));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_no_gradients_of_inputs(void **state) {
    (void)state;
    for (int sp = 0; sp < 2; sp++) test_launch(2, silent_rank, &sp);
}

/* ---- invariant mode and the hash log ----------------------------------------------------------------------------- */

enum { SHARDS = 8, LINES_MAX = 64 };

/* Numbers of groups that the virtual shards do not divide, and fewer groups than shards. */
static const cross_case invariant_cases[] = {
    {"10 groups", {.hidden = 40, .heads = 20, .kv_heads = 10, .kv_hidden = 24, .dropout = 0.2f}, 16, 8, {5, 8}},
    {"3 groups", {.hidden = 36, .heads = 18, .kv_heads = 3, .dropout = 0.1f, .recompute_core = 1}, 8, 24, NO_LENGTHS},
    {"8 heads", {.hidden = 32, .heads = 8, .scores.softcap = 2.0f, .no_bias = 1}, 8, 16, {0, 9}}};
#define INVARIANT_CASES (sizeof invariant_cases / sizeof *invariant_cases)

typedef struct line {
    char name[96];
    uint64_t hash;
} line;

typedef struct lines {
    int count, differs;
    line list[LINES_MAX];
} lines;

typedef struct invariant_run {
    mt_dtype dtype;
    int tp, dp, sequence_parallel;
    outcome one[INVARIANT_CASES];
    lines log[INVARIANT_CASES];
} invariant_run;

static void keep_line(void *user, const char *name, uint64_t hash, int differs) {
    lines *l = (lines *)user;
    if (l->count == LINES_MAX) abort();
    snprintf(l->list[l->count].name, sizeof l->list->name, "%s", name);
    l->list[l->count++].hash = hash;
    l->differs += differs;
}

static mt_status compare_log(test_rank *r, mt_hash_log *log, lines *one, int store) {
    lines here = {.count = 0};
    MT_TRY(mt_hash_log_flush(r->ctx, log, keep_line, &here));
    if (mt_comm_rank(r->world) != 0) return MT_SUCCESS;
    if (store) *one = here;
    CHECK(here.count == one->count && here.differs == 0);
    for (int i = 0; i < here.count; i++) {
        CHECK(strcmp(here.list[i].name, one->list[i].name) == 0);
        if (here.list[i].hash == one->list[i].hash) continue;
        fprintf(stderr, "the hash log differs in %s\n", here.list[i].name);
        return MT_ERR_DATA;
    }
    return MT_SUCCESS;
}

static mt_status invariant_rank(mt_comm *world, void *user) {
    invariant_run *run = (invariant_run *)user;
    const mt_context_desc where = {.invariant = SHARDS, .invariant_data = SEQUENCES, .arena_bytes = (size_t)16 << 20};
    int store = run->tp * run->dp == 1 && !run->sequence_parallel;
    mt_hash_log *log = NULL;
    test_rank r;
    mt_status status = test_rank_open(world, (mt_grid_desc){.tp = run->tp, .dp = run->dp}, &where, &r);
    MT_KEEP(status, mt_hash_log_create(r.ctx, &r.grid, &log));
    for (size_t i = 0; status == MT_SUCCESS && i < INVARIANT_CASES; i++) {
        cross b;
        status = cross_open(&b, &invariant_cases[i], &r, run->sequence_parallel, run->dtype);
        MT_KEEP(status, cross_step(&b, mt_invariant_micro_batch(SEQUENCES, SEQUENCES), &run->one[i], store, 0));
        MT_KEEP(status, record_gradients(&b, &run->one[i], store, 0));
        MT_KEEP(status, compare_log(&r, log, &run->log[i], store));
        if (status != MT_SUCCESS)
            fprintf(stderr, "%s in %s on %d x %d ranks, sequence parallelism %d: %s\n", invariant_cases[i].name,
                    mt_dtype_name(run->dtype), run->tp, run->dp, run->sequence_parallel, mt_last_error(r.ctx));
    }
    mt_hash_log_destroy(log);
    test_rank_close(&r);
    return status;
}

static void test_the_same_bits(void **state) {
    static const int splits[][2] = {{1, 1}, {2, 1}, {4, 1}, {8, 1}, {1, 2}, {4, 2}};
    static const char *const names[] = {
        "key.output",         "value.output",           "query.output",    "core_attention.output",
        "linear_proj.output", "linear_proj.input_grad", "key.output_grad", "value.output_grad",
        "key.input_grad",     "query.output_grad",      "query.input_grad"};
    static invariant_run run;
    char name[96];
    (void)state;
    for (int dtype = MT_F32; dtype <= MT_BF16; dtype++)
        for (size_t i = 0; i < sizeof splits / sizeof *splits; i++)
            for (int sp = 0; sp <= 1; sp++) {
                run.dtype = (mt_dtype)dtype;
                run.tp = splits[i][0];
                run.dp = splits[i][1];
                run.sequence_parallel = sp;
                test_launch(run.tp * run.dp, invariant_rank, &run);
            }
    assert_int_equal(run.log[0].count, sizeof names / sizeof *names);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(name, sizeof name, "block.%s", names[i]);
        assert_string_equal(run.log[0].list[i].name, name);
    }
}

/* ---- finite differences ------------------------------------------------------------------------------------------ */

typedef struct probe {
    const cross *b;
    pass *p;
} probe;

/* Returns sum(y * dy), in double. */
static double objective(const probe *at) {
    mt_context *ctx = at->b->r->ctx;
    size_t mark = mt_arena_mark(ctx);
    double sum = 0;
    ASSERT_STATUS(ctx, MT_SUCCESS, pass_forward(at->b, at->p, 1));
    mt_arena_release(ctx, mark);
    for (int64_t i = 0; i < at->p->y.rows * at->p->y.cols; i++)
        sum += (double)((const float *)at->p->y.data)[i] * (double)((const float *)at->p->dy.data)[i];
    return sum;
}

/* Compares the slope along one direction of a tensor with its gradient. The first direction is the gradient itself: it
   finds a wrong factor. The others are random: they find a missing part. Central differences at h and h / 2 are
   extrapolated. */
static void check_slope(const probe *at, const char *name, mt_tensor value, mt_tensor grad, int direction) {
    const double h = 0.05;
    int64_t n = value.rows * value.cols;
    float *w = (float *)value.data, *kept = test_floats(at->b->r, n, 0.0f), *way = test_floats(at->b->r, n, 0.0f);
    const float *g = (const float *)grad.data;
    double slope[2], want = 0, length = 0, norm = 0;
    uint64_t seed = test_name_seed(name) + (uint64_t)direction;
    memcpy(kept, w, (size_t)n * sizeof *kept);
    for (int64_t i = 0; i < n; i++) {
        way[i] = direction == 0 ? g[i] : test_float(&seed);
        length += (double)way[i] * (double)way[i];
        norm += (double)g[i] * (double)g[i];
    }
    assert_true(norm > 1e-3);
    for (int64_t i = 0; i < n; i++) want += (double)way[i] / sqrt(length) * (double)g[i];
    for (int k = 0; k < 2; k++) {
        double step = (k ? h / 2 : h) / sqrt(length);
        for (int64_t i = 0; i < n; i++) w[i] = (float)((double)kept[i] + step * (double)way[i]);
        slope[k] = objective(at);
        for (int64_t i = 0; i < n; i++) w[i] = (float)((double)kept[i] - step * (double)way[i]);
        slope[k] = (slope[k] - objective(at)) / (k ? h : 2 * h);
    }
    memcpy(w, kept, (size_t)n * sizeof *kept);
    slope[0] = (4 * slope[1] - slope[0]) / 3;
    if (!(fabs(slope[0] - want) <= 1e-3 * sqrt(norm) + 1e-4))
        fail_msg("%s, direction %d: the slope is %.9g, the gradient says %.9g", name, direction, slope[0], want);
    at->b->r->memory_count -= 2;
    free(kept);
    free(way);
}

/* The gradient of a key's bias is zero without a soft cap, because it shifts all scores of a query alike. With a soft
   cap it is not. */
static void test_finite_differences(void **state) {
    static const cross_case c = {
        "small",
        {.hidden = 12, .heads = 6, .kv_heads = 3, .kv_hidden = 5, .dropout = 0.2f, .scores.softcap = 0.7f},
        5,
        7,
        {7, 4}};
    test_rank r;
    cross b;
    pass p;
    probe at = {&b, &p};
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, cross_open(&b, &c, &r, 0, MT_F32));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_open(&b, 0, SEQUENCES, &p));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_forward(&b, &p, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_backward(&b, &p));
    for (int direction = 0; direction < 3; direction++) {
        check_slope(&at, "x", p.x, p.dx, direction);
        check_slope(&at, "memory", p.memory, p.dmemory, direction);
        for (int i = 0; i < mt_params_count(r.params); i++) {
            mt_param *q = mt_params_at(r.params, i);
            check_slope(&at, q->name, q->value, q->grad, direction);
        }
    }
    test_paper_rank_close(&r);
}

/* ---- self-attention ---------------------------------------------------------------------------------------------- */

/* Attention of x to itself is self-attention: the same bits of y, the same gradients of the parameters, and dx +
   dmemory as dx. Their dropout differs, also in a layer with one layer_number. */
static mt_status self_rank(mt_comm *world, void *user) {
    static const cross_case c = {"self", {.hidden = 16, .heads = 8, .kv_heads = 4}, 6, 6, NO_LENGTHS};
    mt_self_attention_desc d = {
        .hidden = 16, .heads = 8, .kv_heads = 4, .scores.mask = MT_MASK_BIDIRECTIONAL, .qkv_layout = MT_QKV_SEPARATE};
    mt_self_attention self;
    mt_self_attention_saved saved;
    test_rank r;
    cross b;
    pass p;
    (void)user;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, NULL, &r));
    MT_TRY(cross_open(&b, &c, &r, 0, MT_F32));
    MT_TRY(pass_open(&b, 0, SEQUENCES, &p));
    p.memory = p.x;
    MT_TRY(pass_forward(&b, &p, 1));
    MT_TRY(pass_backward(&b, &p));
    mt_tensor y = test_tensor(&r, p.y.rows, 16, NAN), dx = test_tensor(&r, p.y.rows, 16, NAN);
    float *grads = test_floats(&r, PARAMS_MAX, 0.0f), *other = test_floats(&r, PARAMS_MAX, 0.0f);
    int64_t n;
    MT_TRY(gather_grads(&r, grads, PARAMS_MAX, &n));
    mt_params *registry = r.params;
    r.params = NULL;
    MT_TRY(mt_params_create(r.ctx, &r.grid, &r.params));
    MT_TRY(mt_self_attention_create(r.ctx, r.params, "block", &d, &self));
    MT_TRY(mt_params_init(r.ctx, r.params, 7)); /* names and shapes are the same, so the values are */
    MT_TRY(disturb_params(&r, 0.3f));
    MT_TRY(mt_self_attention_forward(r.ctx, &self, &p.batch, p.x, y, &saved));
    MT_TRY(mt_self_attention_backward(r.ctx, &self, p.dy, dx, &saved));
    CHECK(memcmp(y.data, p.y.data, (size_t)(y.rows * 16) * sizeof(float)) == 0);
    MT_TRY(mt_add(r.ctx, p.dx, p.dmemory, p.dx));
    MT_TRY(test_near_f32("dx", (const float *)p.dx.data, (const float *)dx.data, dx.rows * 16, 2e-6));
    MT_TRY(gather_grads(&r, other, PARAMS_MAX, &n));
    MT_TRY(test_near_f32("gradients", grads, other, n, 2e-6));
    self.desc.dropout = b.layer.desc.dropout = 0.3f;
    MT_TRY(mt_self_attention_forward(r.ctx, &self, &p.batch, p.x, y, &saved));
    MT_TRY(pass_forward(&b, &p, 1));
    CHECK(memcmp(y.data, p.y.data, (size_t)(y.rows * 16) * sizeof(float)) != 0);
    mt_params_destroy(registry);
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_of_x_with_itself(void **state) {
    (void)state;
    test_launch(1, self_rank, NULL);
    test_launch(2, self_rank, NULL);
}

/* ---- options ----------------------------------------------------------------------------------------------------- */

static size_t bytes_of(mt_tensor t) { return (size_t)(t.rows * t.cols) * sizeof(float); }

static int same(mt_tensor a, const float *b) { return memcmp(a.data, b, bytes_of(a)) == 0; }

static float *copy_of(test_rank *r, mt_tensor t) {
    float *x = test_floats(r, t.rows * t.cols, NAN);
    memcpy(x, t.data, bytes_of(t));
    return x;
}

/* saved NULL gives the bits of training without dropout, and leaves the arena as it was. */
static void test_inference(void **state) {
    test_rank r;
    cross b;
    pass p;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    for (int recompute = 0; recompute < 2; recompute++) {
        cross_case c = split_cases[1];
        size_t mark;
        float *y;
        c.desc.recompute_core = recompute;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, cross_open(&b, &c, &r, 0, MT_F32));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_open(&b, 0, SEQUENCES, &p));
        mark = mt_arena_mark(r.ctx);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_forward(&b, &p, 0));
        assert_int_equal(mt_arena_mark(r.ctx), mark);
        y = copy_of(&r, p.y);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_forward(&b, &p, 1));
        assert_true(mt_arena_mark(r.ctx) > mark && !same(p.y, y));
        b.layer.desc.dropout = 0.0f;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_forward(&b, &p, 1));
        assert_true(same(p.y, y));
        mt_arena_release(r.ctx, 0);
    }
    test_paper_rank_close(&r);
}

/* recompute_core: the same bits, and less memory in the arena between forward and backward. The arena may be used
   between them. */
static void test_recompute_core(void **state) {
    static outcome kept, again;
    test_rank r;
    size_t bytes[2];
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    for (int recompute = 0; recompute < 2; recompute++) {
        outcome *out = recompute ? &again : &kept;
        cross_case c = split_cases[1];
        size_t mark;
        mt_tensor other;
        cross b;
        pass p;
        c.desc.recompute_core = recompute;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, cross_open(&b, &c, &r, 0, MT_F32));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_open(&b, 0, SEQUENCES, &p));
        mark = mt_arena_mark(r.ctx);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_forward(&b, &p, 1));
        bytes[recompute] = mt_arena_mark(r.ctx) - mark;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 100, 100, &other));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, other, NAN));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_backward(&b, &p));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, record_pass(&b, &p, out, 1, 0));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, record_gradients(&b, out, 1, 0));
        mt_arena_release(r.ctx, 0);
    }
    assert_memory_equal(&kept, &again, sizeof kept);
    /* out [24, 32], lse [8, 24] */
    assert_int_equal(bytes[0] - bytes[1], (24 * 32 + 8 * 24) * sizeof(float));
    test_paper_rank_close(&r);
}

/* A soft cap near 0 makes all scores equal, and so does a scale of 0. All queries of a sequence then get the same
   output. */
static void test_equal_scores(void **state) {
    cross_case c = split_cases[0];
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    for (int i = 0; i < 3; i++) {
        double apart = 0;
        cross b;
        pass p;
        c.desc.scores.softcap = i == 1 ? 1e-7f : 0.0f;
        c.desc.scores.scale = i == 2 ? MT_ZERO : 0;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, cross_open(&b, &c, &r, 0, MT_F32));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_open(&b, 0, SEQUENCES, &p));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_forward(&b, &p, 1));
        for (int k = 32; k < 12 * 32; k++)
            apart = fmax(apart, fabs((double)((float *)p.y.data)[k] - (double)((float *)p.y.data)[k % 32]));
        assert_true(i ? apart < 1e-5 : apart > 0.05);
        mt_arena_release(r.ctx, 0);
    }
    test_paper_rank_close(&r);
}

/* Masks depend on seed, step, random_offset, layer_number and first_sequence; not on the seed, the step and the offset
   of memory_batch, and not on lengths and token types of batch. */
static void test_dropout_masks(void **state) {
    static const int32_t lengths[SEQUENCES] = {3, 1};
    static const uint64_t offset = 5;
    cross_case c = split_cases[1];
    test_rank r;
    cross b;
    pass p;
    float *y;
    (void)state;
    c.lengths[0] = -1;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, cross_open(&b, &c, &r, 0, MT_F32));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_open(&b, 0, SEQUENCES, &p));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_forward(&b, &p, 1));
    y = copy_of(&r, p.y);
    for (int i = 0; i < 7; i++) {
        pass q = p;
        b.layer.desc.layer_number = i == 0 ? 4 : 3;
        q.batch.seed += i == 1;
        q.batch.step += i == 2;
        if (i == 3) q.batch.random_offset = &offset;
        q.batch.first_sequence += i == 4;
        q.memory_batch.first_sequence += i == 4;
        q.memory_batch.seed += i == 5;
        q.memory_batch.step += i == 5;
        if (i == 5) q.memory_batch.random_offset = &offset;
        if (i == 6) q.batch.lengths = lengths;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_forward(&b, &q, 1));
        assert_int_equal(same(p.y, y), i >= 5);
    }
    test_paper_rank_close(&r);
}

/* A sequence without a valid key gets zero from core attention: y is the bias of the projection, and nothing flows
   back. */
static void test_no_valid_key(void **state) {
    cross_case c = split_cases[0];
    test_rank r;
    cross b;
    pass p;
    (void)state;
    c.lengths[0] = 24;
    c.lengths[1] = 0;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, cross_open(&b, &c, &r, 0, MT_F32));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_open(&b, 0, SEQUENCES, &p));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_forward(&b, &p, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_backward(&b, &p));
    for (int64_t row = 12; row < 24; row++)
        assert_true(same(b.layer.proj.bias->value, (const float *)p.y.data + row * 32));
    test_untouched("dx", (const float *)p.dx.data + 12 * 32, 12 * 32, 0.0f);
    test_untouched("dmemory", (const float *)p.dmemory.data + 24 * 32, 24 * 32, 0.0f);
    assert_true(((const float *)p.dmemory.data)[0] != 0.0f);
    test_paper_rank_close(&r);
}

/* add_to_dx and add_to_dmemory add what the other call writes. A gradient that is mt_none() leaves the others as they
   are. */
static void test_gradients_of_inputs(void **state) {
    cross_case c = split_cases[3];
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    for (int i = 0; i < 4; i++) {
        static outcome plain, other;
        const mt_tensor none = mt_none();
        int64_t n;
        cross b;
        pass p;
        c.desc.add_to_dx = i & 1;
        c.desc.add_to_dmemory = i >> 1;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, cross_open(&b, &c, &r, 0, MT_F32));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_open(&b, 0, SEQUENCES, &p));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, p.dx, i & 1 ? 2.0f : NAN));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, p.dmemory, i >> 1 ? 4.0f : NAN));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_forward(&b, &p, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_backward(&b, &p));
        if (i == 0) ASSERT_STATUS(r.ctx, MT_SUCCESS, record_pass(&b, &p, &plain, 1, 0));
        for (int64_t k = 0; k < p.dx.rows * p.dx.cols; k++)
            assert_true(((float *)p.dx.data)[k] == plain.dx[k] + (i & 1 ? 2.0f : 0.0f));
        for (int64_t k = 0; k < p.dmemory.rows * p.dmemory.cols; k++)
            assert_true(((float *)p.dmemory.data)[k] == plain.dmemory[k] + (i >> 1 ? 4.0f : 0.0f));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, gather_grads(&r, plain.grads, PARAMS_MAX, &n));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_cross_attention_backward(r.ctx, &b.layer, p.dy, i & 1 ? none : p.dx, i >> 1 ? none : p.dmemory,
                                                  &p.saved));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, gather_grads(&r, other.grads, PARAMS_MAX, &n));
        assert_memory_equal(other.grads, plain.grads, (size_t)n * sizeof(float));
        mt_arena_release(r.ctx, 0);
    }
    test_paper_rank_close(&r);
}

/* skip_bias_add: y is that of the block without its bias, and the gradient of the bias is not changed. */
static void test_skip_bias_add(void **state) {
    cross_case c = split_cases[0];
    test_rank r;
    float *whole = NULL;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    for (int skip = 0; skip < 2; skip++) {
        static float kept[VALUES_MAX];
        cross b;
        pass p;
        c.desc.skip_bias_add = skip;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, cross_open(&b, &c, &r, 0, MT_F32));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_open(&b, 0, SEQUENCES, &p));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_forward(&b, &p, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_backward(&b, &p));
        if (!skip) {
            memcpy(kept, p.y.data, bytes_of(p.y));
            whole = kept;
            assert_true(fabs((double)*(const float *)b.layer.proj.bias->grad.data) > 1e-3);
        } else {
            test_untouched("dbias", (const float *)b.layer.proj.bias->grad.data, 32, 0.0f);
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_forward(r.ctx, p.y, b.layer.proj.bias->value));
            ASSERT_STATUS(r.ctx, MT_SUCCESS,
                          test_near_f32("y", (const float *)p.y.data, whole, p.y.rows * p.y.cols, 1e-6));
        }
        mt_arena_release(r.ctx, 0);
    }
    test_paper_rank_close(&r);
}

/* ---- 16-bit types ------------------------------------------------------------------------------------------------ */

typedef struct half_run {
    mt_dtype dtype;
    int sequence_parallel;
    outcome f32;
} half_run;

/* The weights of the 16-bit run are those of the f32 run, rounded. The tolerance allows a few roundings of values up to
   4. A wrong tensor or a missing term is far outside. */
static mt_status half_rank(mt_comm *world, void *user) {
    half_run *run = (half_run *)user;
    const double tolerance = run->dtype == MT_BF16 ? 0.06 : 0.008;
    test_rank r;
    cross b;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, NULL, &r));
    MT_TRY(cross_open(&b, &split_cases[3], &r, run->sequence_parallel, run->dtype));
    MT_TRY(cross_step(&b, SEQUENCES, &run->f32, run->dtype == MT_F32, tolerance));
    MT_TRY(record_gradients(&b, &run->f32, run->dtype == MT_F32, 4 * tolerance));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_16_bit(void **state) {
    static half_run run;
    (void)state;
    for (int dtype = MT_F32; dtype <= MT_F16; dtype++)
        for (int ranks = 1; ranks <= (dtype == MT_F32 ? 1 : 4); ranks *= 2) {
            run.dtype = (mt_dtype)dtype;
            run.sequence_parallel = ranks > 2;
            test_launch(ranks, half_rank, &run);
        }
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static mt_status arena_step(test_rank *r, pass *p) {
    cross b;
    MT_TRY(cross_open(&b, &split_cases[1], r, 0, MT_F32));
    b.r = r;
    MT_TRY(pass_open(&b, 0, SEQUENCES, p));
    size_t mark = mt_arena_mark(r->ctx);
    mt_status status = pass_forward(&b, p, 1);
    if (status != MT_SUCCESS) {
        CHECK(mt_arena_mark(r->ctx) == mark);
        return status;
    }
    mark = mt_arena_mark(r->ctx);
    status = pass_backward(&b, p);
    CHECK(mt_arena_mark(r->ctx) == mark);
    return status;
}

/* The meta device computes the peak of a real run. With less memory forward or backward fails, and leaves the arena as
   it was. */
static void test_memory(void **state) {
    mt_context_desc where = {.device = MT_DEVICE_CPU, .arena_bytes = (size_t)16 << 20};
    size_t peak[2], first = 0;
    int failed = 0;
    test_rank r;
    pass p;
    (void)state;
    for (int meta = 0; meta < 2; meta++) {
        where.device = meta ? MT_DEVICE_META : MT_DEVICE_CPU;
        where.arena_bytes = meta ? 0 : (size_t)16 << 20;
        test_paper_rank(1, 0, (mt_grid_desc){0}, &where, &r);
        if (meta) {
            cross b = {.c = &split_cases[1], .r = &r};
            ASSERT_STATUS(r.ctx, MT_SUCCESS,
                          mt_cross_attention_create(r.ctx, r.params, "block", &split_cases[1].desc, &b.layer));
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 7));
            ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_open(&b, 0, SEQUENCES, &p));
            first = mt_arena_mark(r.ctx);
            ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_forward(&b, &p, 1));
            ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_backward(&b, &p));
        } else ASSERT_STATUS(r.ctx, MT_SUCCESS, arena_step(&r, &p));
        peak[meta] = mt_arena_peak(r.ctx);
        test_paper_rank_close(&r);
    }
    assert_int_equal(peak[0], peak[1]);
    for (size_t part = 1; part <= 12; part++) {
        mt_status status;
        where.device = MT_DEVICE_CPU;
        where.arena_bytes = first + (peak[0] - first) * part / 12;
        test_paper_rank(1, 0, (mt_grid_desc){0}, &where, &r);
        status = arena_step(&r, &p);
        if (status != (part < 12 ? MT_ERR_MEMORY : MT_SUCCESS))
            fail_msg("%zu bytes: %s: %s", where.arena_bytes, mt_status_name(status), mt_last_error(r.ctx));
        failed += status == MT_ERR_MEMORY;
        test_paper_rank_close(&r);
    }
    assert_int_equal(failed, 11);
}

/* ---- refusals ---------------------------------------------------------------------------------------------------- */

#define IS_SET " is set, must be 0: queries and keys of cross-attention are of different sequences"
static const struct {
    mt_cross_attention_desc desc;
    mt_status status;
    const char *rest; /* of the message, behind the function */
} bad_descs[] = {
    {{.hidden = 0, .heads = 0}, MT_ERR_ARGUMENT, "'a': hidden is 0, must be from 1 to 2147483647"},
    {{.hidden = (int64_t)1 << 31, .heads = 4},
     MT_ERR_ARGUMENT,
     "'a': hidden is 2147483648, must be from 1 to 2147483647"},
    {{.hidden = 16, .heads = 0}, MT_ERR_ARGUMENT, "'a': heads is 0, must be at least 1"},
    {{.hidden = 16, .heads = 4, .kv_heads = -2}, MT_ERR_ARGUMENT, "'a': kv_heads is -2, must be at least 0"},
    {{.hidden = 16, .heads = 4, .kv_hidden = -1},
     MT_ERR_ARGUMENT,
     "'a': kv_hidden is -1, must be from 0 to 2147483647"},
    {{.hidden = 16, .heads = 4, .kv_hidden = (int64_t)1 << 31},
     MT_ERR_ARGUMENT,
     "'a': kv_hidden is 2147483648, must be from 0 to 2147483647"},
    {{.hidden = 16, .heads = 4, .dropout = 1.0f, .layer_number = -1},
     MT_ERR_ARGUMENT,
     "'a': dropout is 1, must be at least 0 and below 1"},
    {{.hidden = 16, .heads = 4, .dropout = NAN},
     MT_ERR_ARGUMENT,
     "'a': dropout is nan, must be at least 0 and below 1"},
    {{.hidden = 16, .heads = 4, .layer_number = -1}, MT_ERR_ARGUMENT, "'a': layer_number is -1, must be at least 0"},
    {{.hidden = 16, .heads = 4, .scores.softcap = -1.0f},
     MT_ERR_ARGUMENT,
     "'a': scores.softcap is -1, must be at least 0 and finite"},
    {{.hidden = 16, .heads = 4, .scores.softcap = INFINITY},
     MT_ERR_ARGUMENT,
     "'a': scores.softcap is inf, must be at least 0 and finite"},
    {{.hidden = 16, .heads = 4, .scores.mask = (mt_mask)2},
     MT_ERR_ARGUMENT,
     "'a': scores.mask is 2, must be MT_MASK_CAUSAL or MT_MASK_BIDIRECTIONAL"},
    {{.hidden = 16, .heads = 4, .scores.scale = NAN}, MT_ERR_ARGUMENT, "'a': scores.scale is nan, must be finite"},
    {{.hidden = 16, .heads = 4, .scores.window = 3}, MT_ERR_ARGUMENT, "'a': scores.window" IS_SET},
    {{.hidden = 16, .heads = 4, .scores.alibi = 1}, MT_ERR_ARGUMENT, "'a': scores.alibi" IS_SET},
    {{.hidden = 16, .heads = 4, .scores.rotary_base = 10}, MT_ERR_ARGUMENT, "'a': scores.rotary_base" IS_SET},
    {{.hidden = 16, .heads = 4, .scores.rotary_form = MT_ROTARY_PAIRS},
     MT_ERR_ARGUMENT,
     "'a': scores.rotary_form" IS_SET},
    {{.hidden = 16, .heads = 4, .scores.rotary_dim = -2}, MT_ERR_ARGUMENT, "'a': scores.rotary_dim" IS_SET},
    {{.hidden = 16, .heads = 4, .init.std = -1.0f},
     MT_ERR_ARGUMENT,
     "'a': init.std is -1, must be at least 0 and finite"},
    {{.hidden = 16, .heads = 4, .init.output_std = -1.0f},
     MT_ERR_ARGUMENT,
     "'a': init.output_std is -1, must be at least 0 and finite"},
    {{.hidden = 18, .heads = 4}, MT_ERR_SHAPE, "'a': hidden is 18, must be a multiple of heads 4"},
    {{.hidden = 30, .heads = 10, .kv_heads = 4}, MT_ERR_SHAPE, "'a': kv_heads is 4, must divide heads 10"},
    {{.hidden = 16, .heads = 2}, MT_ERR_SHAPE, "'a': 2 heads cannot be split over 4 tensor ranks"},
    {{.hidden = 16, .heads = 4, .no_bias = 1, .skip_bias_add = 1},
     MT_ERR_ARGUMENT,
     "'a.linear_proj' sets skip_bias_add, but with no_bias there is no bias"}};

static void test_create_refuses(void **state) {
    const mt_context_desc invariant = {.invariant = 8, .arena_bytes = 4096};
    mt_cross_attention_desc good = {.hidden = 16, .heads = 4};
    mt_cross_attention a;
    test_rank r;
    (void)state;
    open_quarter(&r);
    for (size_t i = 0; i < sizeof bad_descs / sizeof *bad_descs; i++) {
        REFUSED_EXACTLY(r.ctx, bad_descs[i].status, bad_descs[i].rest,
                        mt_cross_attention_create(r.ctx, r.params, "a", &bad_descs[i].desc, &a));
        assert_int_equal(mt_params_count(r.params), 0);
    }
    assert_int_equal(mt_cross_attention_create(NULL, r.params, "a", &good, &a), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "params is NULL", mt_cross_attention_create(r.ctx, NULL, "a", &good, &a));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "name ''|95", mt_cross_attention_create(r.ctx, r.params, "", &good, &a));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "desc is NULL", mt_cross_attention_create(r.ctx, r.params, "a", NULL, &a));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_cross_attention_create(r.ctx, r.params, "a", &good, NULL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_cross_attention_create(r.ctx, r.params, NULL, &good, &a));
    assert_string_equal(a.key_value[1].name, "layer.0.value");
    assert_int_equal(a.first_group, 1);
    test_paper_rank_close(&r);
    test_paper_rank(1, 0, (mt_grid_desc){0}, &invariant, &r);
    REFUSED(r.ctx, MT_ERR_SHAPE, "4 heads|8 virtual shards",
            mt_cross_attention_create(r.ctx, r.params, "a", &good, &a));
    test_paper_rank_close(&r);
}

/* A block on rank 1 of 4, with 2 sequences of 6 queries and 10 keys, and what a call gets. */
typedef struct call {
    mt_context *ctx;
    const mt_cross_attention *a;
    pass p;
} call;

static mt_status forward_of(const call *c) {
    mt_cross_attention_saved saved;
    return mt_cross_attention_forward(c->ctx, c->a, &c->p.batch, c->p.x, &c->p.memory_batch, c->p.memory, c->p.y,
                                      &saved);
}

static mt_status backward_of(const call *c) {
    mt_cross_attention_saved saved = c->p.saved;
    saved.batch = c->p.batch;
    saved.memory_batch = c->p.memory_batch;
    return mt_cross_attention_backward(c->ctx, c->a, c->p.dy, c->p.dx, c->p.dmemory, &saved);
}

/* Calls `call` with *PLACE = VALUE, which it must refuse. */
#define REFUSED_WITH(status, words, call, place, ...)                                                                  \
    do {                                                                                                               \
        c = good;                                                                                                      \
        c.p.place = __VA_ARGS__;                                                                                       \
        REFUSED(good.ctx, status, words, call(&c));                                                                    \
    } while (0)

static void batches_are_refused(const call *from, mt_status (*run)(const call *c)) {
    static const int32_t high[] = {10, 11}, cu_seqlens[] = {0, 20};
    static const float bias[6 * 10] = {0};
    const call good = *from;
    call c;
    REFUSED_WITH(MT_ERR_ARGUMENT, "batch.sequences is 0", run, batch.sequences, 0);
    REFUSED_WITH(MT_ERR_ARGUMENT, "memory_batch.sequences is 0", run, memory_batch.sequences, 0);
    REFUSED_WITH(MT_ERR_ARGUMENT, "batch.seq is 0", run, batch.seq, 0);
    REFUSED_WITH(MT_ERR_ARGUMENT, "memory_batch.seq is -1", run, memory_batch.seq, -1);
    REFUSED_WITH(MT_ERR_ARGUMENT, "batch.first_sequence is -1", run, batch.first_sequence, -1);
    REFUSED_WITH(MT_ERR_SHAPE, "batch has 3 sequences, memory_batch 2", run, batch.sequences, 3);
    REFUSED_WITH(MT_ERR_SHAPE, "batch has 2 sequences, memory_batch 1", run, memory_batch.sequences, 1);
    REFUSED_WITH(MT_ERR_ARGUMENT, "batch is 4|memory_batch 3", run, batch.first_sequence, 4);
    REFUSED_WITH(MT_ERR_ARGUMENT, "batch is 3|memory_batch 0", run, memory_batch.first_sequence, 0);
    REFUSED_WITH(MT_ERR_DATA, "memory_batch|lengths[1] is 11|[0, 10]", run, memory_batch.lengths, high);
    REFUSED_WITH(MT_ERR_ARGUMENT, ": batch has cu_seqlens", run, batch.cu_seqlens, cu_seqlens);
    REFUSED_WITH(MT_ERR_ARGUMENT, "memory_batch has cu_seqlens", run, memory_batch.cu_seqlens, cu_seqlens);
    REFUSED_WITH(MT_ERR_SHAPE, "bias is [10, 6], must be [6, 10]", run, memory_batch.bias.value,
                 mt_tensor_f32(bias, 10, 6));
    REFUSED_WITH(MT_ERR_SHAPE, "memory_batch|bias.heads is 2|1 or the 4 heads", run, memory_batch.bias.heads, 2);
    REFUSED_WITH(MT_ERR_SHAPE, "10", run, batch.seq, 5);
    REFUSED_WITH(MT_ERR_SHAPE, "", run, memory_batch.seq, 9);
}

static void forwards_are_refused(const call *from) {
    const call good = *from;
    const mt_tensor x = good.p.x, y = good.p.y, memory = good.p.memory;
    call c;
    REFUSED(good.ctx, MT_ERR_ARGUMENT, "forward: batch is NULL",
            mt_cross_attention_forward(good.ctx, good.a, NULL, x, &good.p.memory_batch, memory, y, NULL));
    REFUSED(good.ctx, MT_ERR_ARGUMENT, "forward: memory_batch is NULL",
            mt_cross_attention_forward(good.ctx, good.a, &good.p.batch, x, NULL, memory, y, NULL));
    REFUSED(good.ctx, MT_ERR_ARGUMENT, "attention is NULL",
            mt_cross_attention_forward(good.ctx, NULL, &good.p.batch, x, &good.p.memory_batch, memory, y, NULL));
    c = good;
    c.ctx = NULL;
    assert_int_equal(forward_of(&c), MT_ERR_ARGUMENT);
    REFUSED_WITH(MT_ERR_DTYPE, "x is bf16", forward_of, x, with_dtype(x, MT_BF16));
    REFUSED_WITH(MT_ERR_DTYPE, "memory is f16", forward_of, memory, with_dtype(memory, MT_F16));
    REFUSED_WITH(MT_ERR_DTYPE, "y is i32", forward_of, y, with_dtype(y, MT_I32));
    REFUSED_WITH(MT_ERR_SHAPE, "x is|15]|16]", forward_of, x, with_shape(x, x.rows, 15, 16));
    REFUSED_WITH(MT_ERR_SHAPE, "memory is|16]|12]", forward_of, memory, with_shape(memory, memory.rows, 16, 16));
    REFUSED_WITH(MT_ERR_SHAPE, "y is", forward_of, y, with_shape(y, y.rows - 1, 16, 16));
    REFUSED_WITH(MT_ERR_SHAPE, "y|ld 20|contiguous", forward_of, y, with_shape(y, y.rows, 16, 20));
    REFUSED_WITH(MT_ERR_ARGUMENT, "memory is|data is NULL", forward_of, memory,
                 with_shape(mt_none(), memory.rows, 12, 12));
    REFUSED_WITH(MT_ERR_ARGUMENT, "x [|and y|overlap", forward_of, y, x);
    REFUSED_WITH(MT_ERR_ARGUMENT, "memory [|and y|overlap", forward_of, y, with_shape(memory, y.rows, 16, 16));
    if (!good.a->desc.sequence_parallel) return;
    REFUSED_WITH(MT_ERR_SHAPE, "x|ld 20|contiguous", forward_of, x, with_shape(x, x.rows, 16, 20));
    REFUSED_WITH(MT_ERR_SHAPE, "memory|ld 20|contiguous", forward_of, memory, with_shape(memory, memory.rows, 12, 20));
    REFUSED_WITH(MT_ERR_SHAPE, "18 tokens|4 tensor ranks", forward_of, memory_batch.seq, 9);
}

static void backwards_are_refused(const call *from) {
    const call good = *from;
    const mt_tensor dy = good.p.dy, dx = good.p.dx, dmemory = good.p.dmemory;
    call c;
    REFUSED(good.ctx, MT_ERR_ARGUMENT, "saved is NULL",
            mt_cross_attention_backward(good.ctx, good.a, dy, dx, dmemory, NULL));
    REFUSED(good.ctx, MT_ERR_ARGUMENT, "attention is NULL",
            mt_cross_attention_backward(good.ctx, NULL, dy, dx, dmemory, &good.p.saved));
    c = good;
    c.ctx = NULL;
    assert_int_equal(backward_of(&c), MT_ERR_ARGUMENT);
    REFUSED_WITH(MT_ERR_DTYPE, "dy is bf16", backward_of, dy, with_dtype(dy, MT_BF16));
    REFUSED_WITH(MT_ERR_DTYPE, "dmemory is bf16", backward_of, dmemory, with_dtype(dmemory, MT_BF16));
    REFUSED_WITH(MT_ERR_SHAPE, "dx is|15]", backward_of, dx, with_shape(dx, dx.rows, 15, 16));
    REFUSED_WITH(MT_ERR_SHAPE, "dmemory is|11]", backward_of, dmemory, with_shape(dmemory, dmemory.rows, 11, 12));
    REFUSED_WITH(MT_ERR_ARGUMENT, "dy is|data is NULL", backward_of, dy, with_shape(mt_none(), dy.rows, 16, 16));
    REFUSED_WITH(MT_ERR_SHAPE, "dx|ld 20|contiguous", backward_of, dx, with_shape(dx, dx.rows, 16, 20));
    REFUSED_WITH(MT_ERR_SHAPE, "dmemory|ld 20|contiguous", backward_of, dmemory,
                 with_shape(dmemory, dmemory.rows, 12, 20));
    REFUSED_WITH(MT_ERR_ARGUMENT, "dy [|and dx|overlap", backward_of, dx, dy);
    REFUSED_WITH(MT_ERR_ARGUMENT, "saved.query_in.x [|and dx|overlap", backward_of, dx, good.p.x);
    REFUSED_WITH(MT_ERR_ARGUMENT, "saved.memory_in.x [|and dx|overlap", backward_of, dx,
                 with_shape(good.p.memory, dx.rows, 16, 16));
    REFUSED_WITH(MT_ERR_ARGUMENT, "dy [|and dmemory|overlap", backward_of, dmemory,
                 with_shape(dy, dmemory.rows, 12, 12));
    REFUSED_WITH(MT_ERR_ARGUMENT, "saved.query_in.x [|and dmemory|overlap", backward_of, dmemory,
                 with_shape(good.p.x, dmemory.rows, 12, 12));
    REFUSED_WITH(MT_ERR_ARGUMENT, "saved.memory_in.x [|and dmemory|overlap", backward_of, dmemory, good.p.memory);
    REFUSED_WITH(MT_ERR_ARGUMENT, "dx [|and dmemory|overlap", backward_of, dmemory,
                 with_shape(dx, dmemory.rows, 12, 12));
    REFUSED_WITH(MT_ERR_SHAPE, "saved.q", backward_of, saved.q, with_shape(good.p.saved.q, 11, 4, 4));
    REFUSED_WITH(MT_ERR_SHAPE, "saved.k", backward_of, saved.k, with_shape(good.p.saved.k, 20, 3, 4));
    REFUSED_WITH(MT_ERR_SHAPE, "saved.v", backward_of, saved.v, with_shape(good.p.saved.v, 19, 4, 4));
    REFUSED_WITH(MT_ERR_SHAPE, "saved.out", backward_of, saved.out, with_shape(good.p.saved.out, 12, 3, 4));
    REFUSED_WITH(MT_ERR_SHAPE, "saved.query_in.x", backward_of, saved.query_in.x,
                 with_shape(good.p.x, good.p.x.rows, 15, 16));
    REFUSED_WITH(MT_ERR_SHAPE, "saved.memory_in.x", backward_of, saved.memory_in.x,
                 with_shape(good.p.memory, good.p.memory.rows, 11, 12));
}

/* Fills saved as a forward does. A rank of paper cannot communicate, so it cannot run one. */
static void save_something(test_rank *r, pass *p) {
    mt_arena_request memory[] = {{&p->saved.q, MT_F32, 12, 4},
                                 {&p->saved.k, MT_F32, 20, 4},
                                 {&p->saved.v, MT_F32, 20, 4},
                                 {&p->saved.out, MT_F32, 12, 4},
                                 {&p->saved.lse, MT_F32, 1, 12}};
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_arena_tensors(r->ctx, memory, 5));
    p->saved.query_in.x = p->x;
    p->saved.memory_in.x = p->memory;
    p->saved.proj_in.x = p->saved.out;
}

static void test_calls_refuse(void **state) {
    static const cross_case c = {"refused", {.hidden = 16, .heads = 4, .kv_hidden = 12}, 6, 10, NO_LENGTHS};
    (void)state;
    for (int sp = 0; sp < 2; sp++) {
        mt_cross_attention_desc d = c.desc;
        cross b = {.c = &c, .sequence_parallel = sp};
        mt_ledger ledger;
        call good;
        test_rank r;
        open_quarter(&r);
        b.r = &r;
        d.sequence_parallel = sp;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_cross_attention_create(r.ctx, r.params, "a", &d, &b.layer));
        memset(&good, 0, sizeof good);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "call mt_params_init",
                mt_cross_attention_forward(r.ctx, &b.layer, &good.p.batch, good.p.x, &good.p.memory_batch,
                                           good.p.memory, good.p.y, NULL));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 7));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, pass_open(&b, 0, SEQUENCES, &good.p));
        save_something(&r, &good.p);
        good.ctx = r.ctx;
        good.a = &b.layer;
        mt_comm_ledger_reset(r.grid.tp);
        batches_are_refused(&good, forward_of);
        batches_are_refused(&good, backward_of);
        forwards_are_refused(&good);
        backwards_are_refused(&good);
        ledger = mt_comm_ledger(r.grid.tp);
        for (int k = 0; k < MT_COLLECTIVE_COUNT; k++) assert_int_equal(ledger.calls[k], 0);
        for (int i = 0; i < mt_params_count(r.params); i++) {
            const mt_param *p = mt_params_at(r.params, i);
            test_untouched(p->name, (const float *)p->grad.data, p->grad.rows * p->grad.cols, 0.0f);
        }
        test_paper_rank_close(&r);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pytorch),
        cmocka_unit_test(test_every_split),
        cmocka_unit_test(test_no_gradients_of_inputs),
        cmocka_unit_test(test_the_same_bits),
        cmocka_unit_test(test_masks),
        cmocka_unit_test(test_finite_differences),
        cmocka_unit_test(test_of_x_with_itself),
        cmocka_unit_test(test_inference),
        cmocka_unit_test(test_recompute_core),
        cmocka_unit_test(test_equal_scores),
        cmocka_unit_test(test_dropout_masks),
        cmocka_unit_test(test_no_valid_key),
        cmocka_unit_test(test_gradients_of_inputs),
        cmocka_unit_test(test_skip_bias_add),
        cmocka_unit_test(test_16_bit),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_create_refuses),
        cmocka_unit_test(test_calls_refuse),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
