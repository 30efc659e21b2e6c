/* test_cuda_plain.cu - runs layers of tensors (column- and row-parallel linear, MLP, attention) on 1 and 2 GPUs, or on
   ranks that share one, and compares their outputs and gradients bit for bit with those of the layers of a registry,
   with and without overlap, and with add_to_dx.
     On GPUs:       nvcc -std=c++20 -O2 -I. tests/test_cuda_plain.cu -lcublasLt
     Without GPUs:  the engine in tests/engine/ runs the same file on a CPU. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test_ranks.h"

enum { SEQUENCES = 2, SEQ = 16, TOKENS = SEQUENCES * SEQ, HIDDEN = 64, HEADS = 4 };

typedef struct plain_run {
    mt_dtype dtype;
    int sequence_parallel, no_overlap;
} plain_run;

typedef struct plain_test {
    test_rank *r;
    mt_mlp mlp;
    mt_self_attention attention;
    mt_mlp_tensors mlp_own;
    mt_self_attention_tensors attention_own;
    mt_mlp_desc mlp_desc;
    mt_self_attention_desc attention_desc;
    mt_batch batch;
    mt_tensor x, dy, before, y[2], dx[2], h[2], dh[2];
} plain_test;

/* -- tensors on the device -- */

static mt_status copy_of(test_rank *r, mt_tensor t, mt_tensor *out) {
    *out = t;
    if (!t.data) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(r->ctx, t.dtype, t.rows, t.cols, out));
    return mt_copy(r->ctx, t, *out);
}

static mt_status noise_of(test_rank *r, mt_dtype dtype, int64_t rows, int64_t cols, uint64_t seed, mt_tensor *out) {
    mt_tensor wide;
    MT_TRY(mt_arena_tensor(r->ctx, dtype, rows, cols, out));
    MT_TRY(mt_arena_tensor(r->ctx, MT_F32, rows, cols, &wide));
    MT_TRY(mt_upload(r->ctx, test_noise(r, rows * cols, seed, 0.5f), wide));
    return mt_convert(r->ctx, wide, *out);
}

/* Compares two tensors of the device bit for bit. Values of 16 bits are widened, which loses nothing. */
static mt_status same(test_rank *r, const char *what, mt_tensor a, mt_tensor b) {
    size_t mark = mt_arena_mark(r->ctx);
    float *host[2];
    for (int i = 0; i < 2; i++) {
        mt_tensor t = i ? b : a, wide;
        host[i] = test_floats(r, t.rows * t.cols, 0.0f);
        MT_TRY(mt_arena_tensor(r->ctx, MT_F32, t.rows, t.cols, &wide));
        MT_TRY(mt_convert(r->ctx, t, wide));
        MT_TRY(mt_download(r->ctx, wide, host[i]));
    }
    mt_arena_release(r->ctx, mark);
    for (int64_t i = 0; i < a.rows * a.cols; i++)
        if (memcmp(&host[0][i], &host[1][i], sizeof(float)) != 0) {
            fprintf(stderr, "%s: element %lld is %.9g, that of the layer %.9g\n", what, (long long)i,
                    (double)host[1][i], (double)host[0][i]);
            return MT_ERR_DATA;
        }
    return MT_SUCCESS;
}

static mt_status own_of(test_rank *r, const mt_param *w, const mt_param *b, mt_linear_tensors *out) {
    MT_TRY(copy_of(r, w->value, &out->w));
    MT_TRY(copy_of(r, w->grad, &out->dw));
    MT_TRY(copy_of(r, b->value, &out->b));
    return copy_of(r, b->grad, &out->db);
}

static mt_status same_gradients(test_rank *r, const char *what, const mt_param *w, const mt_param *b,
                                const mt_linear_tensors *own) {
    MT_TRY(same(r, what, w->grad, own->dw));
    return same(r, what, b->grad, own->db);
}

static mt_status blocks_open(plain_test *t, const plain_run *run) {
    test_rank *r = t->r;
    int sp = run->sequence_parallel;
    int64_t rows = TOKENS / (sp ? r->grid.tp_size : 1), features;
    uint64_t me = sp ? (uint64_t)r->grid.tp_rank : 0;
    t->mlp_desc.hidden = t->attention_desc.hidden = HIDDEN;
    t->mlp_desc.sequence_parallel = t->attention_desc.sequence_parallel = sp;
    t->attention_desc.heads = HEADS;
    t->attention_desc.scores.rotary_base = 1e4f;
    t->attention_desc.max_seq = SEQ;
    t->batch.sequences = SEQUENCES;
    t->batch.seq = SEQ;
    MT_TRY(mt_params_set_dtype(r->ctx, r->params, run->dtype));
    MT_TRY(mt_mlp_create(r->ctx, r->params, "mlp", &t->mlp_desc, &t->mlp));
    MT_TRY(mt_self_attention_create(r->ctx, r->params, "attention", &t->attention_desc, &t->attention));
    MT_TRY(mt_params_init(r->ctx, r->params, 3));
    for (int i = 0; i < mt_params_count(r->params); i++)
        MT_TRY(mt_fill(r->ctx, mt_params_at(r->params, i)->grad, 1.0f));
    MT_TRY(own_of(r, t->mlp.fc1.weight, t->mlp.fc1.bias, &t->mlp_own.fc1));
    MT_TRY(own_of(r, t->mlp.fc2.weight, t->mlp.fc2.bias, &t->mlp_own.fc2));
    MT_TRY(own_of(r, t->attention.qkv.weight, t->attention.qkv.bias, &t->attention_own.qkv));
    MT_TRY(own_of(r, t->attention.proj.weight, t->attention.proj.bias, &t->attention_own.proj));
    MT_TRY(copy_of(r, t->attention.rotary, &t->attention_own.rotary));
    MT_TRY(noise_of(r, run->dtype, rows, HIDDEN, 1 + me, &t->x));
    MT_TRY(noise_of(r, run->dtype, rows, HIDDEN, 20 + me, &t->dy));
    MT_TRY(noise_of(r, run->dtype, rows, HIDDEN, 40 + me, &t->before));
    features = t->mlp.fc1.local_features;
    for (int i = 0; i < 2; i++) {
        MT_TRY(copy_of(r, t->x, &t->y[i]));
        MT_TRY(copy_of(r, t->before, &t->dx[i]));
        MT_TRY(mt_arena_tensor(r->ctx, run->dtype, TOKENS, features, &t->h[i]));
        MT_TRY(noise_of(r, run->dtype, TOKENS, features, 60, &t->dh[i]));
    }
    return MT_SUCCESS;
}

/* Makes the layer's input gradient, dx[0], what that of tensors with add_to_dx computes from `before`, in dx[1]. */
static mt_status added(plain_test *t, int add) {
    if (add) MT_TRY(mt_add(t->r->ctx, t->before, t->dx[0], t->dx[0]));
    return mt_copy(t->r->ctx, t->before, t->dx[1]);
}

/* fc1 and fc2 of the MLP as single layers. */
static mt_status linear_check(plain_test *t, int add) {
    mt_context *c = t->r->ctx;
    mt_comm *tp = t->r->grid.tp;
    mt_linear_desc d1 = t->mlp.fc1.desc, d2 = t->mlp.fc2.desc;
    mt_column_parallel_linear fc1 = t->mlp.fc1, own1;
    mt_row_parallel_linear own2;
    mt_param params[4];
    mt_linear_saved saved1, saved2;
    d1.skip_bias_add = fc1.desc.skip_bias_add = 0;
    MT_TRY(mt_parallel_linear_forward(c, &fc1, t->x, t->h[0], &saved1));
    MT_TRY(mt_parallel_linear_forward(c, &t->mlp.fc2, t->h[0], t->y[0], &saved2));
    MT_TRY(mt_parallel_linear_backward(c, &t->mlp.fc2, t->dy, t->dh[0], &saved2));
    MT_TRY(mt_parallel_linear_backward(c, &fc1, t->dh[0], t->dx[0], &saved1));
    MT_TRY(added(t, add));
    d1.add_to_dx = add;
    MT_TRY(mt_column_parallel_linear_from_tensors(c, tp, NULL, &d1, &t->mlp_own.fc1, params, &own1));
    MT_TRY(mt_row_parallel_linear_from_tensors(c, tp, NULL, &d2, &t->mlp_own.fc2, params + 2, &own2));
    MT_TRY(mt_parallel_linear_forward(c, &own1, t->x, t->h[1], &saved1));
    MT_TRY(mt_parallel_linear_forward(c, &own2, t->h[1], t->y[1], &saved2));
    MT_TRY(mt_parallel_linear_backward(c, &own2, t->dy, t->dh[1], &saved2));
    MT_TRY(mt_parallel_linear_backward(c, &own1, t->dh[1], t->dx[1], &saved1));
    MT_TRY(same(t->r, "linear y", t->y[0], t->y[1]));
    MT_TRY(same(t->r, "linear h", t->h[0], t->h[1]));
    MT_TRY(same(t->r, "linear dh", t->dh[0], t->dh[1]));
    return same(t->r, "linear dx", t->dx[0], t->dx[1]);
}

static mt_status mlp_check(plain_test *t, int add) {
    mt_context *c = t->r->ctx;
    mt_mlp_desc d = t->mlp_desc;
    mt_mlp own;
    mt_param params[4];
    mt_mlp_saved saved;
    MT_TRY(mt_mlp_forward(c, &t->mlp, t->x, t->y[0], &saved));
    MT_TRY(mt_mlp_backward(c, &t->mlp, t->dy, t->dx[0], &saved));
    MT_TRY(added(t, add));
    d.add_to_dx = add;
    MT_TRY(mt_mlp_from_tensors(c, t->r->grid.tp, NULL, &d, &t->mlp_own, params, &own));
    MT_TRY(mt_mlp_forward(c, &own, t->x, t->y[1], &saved));
    MT_TRY(mt_mlp_backward(c, &own, t->dy, t->dx[1], &saved));
    MT_TRY(same(t->r, "MLP y", t->y[0], t->y[1]));
    MT_TRY(same(t->r, "MLP dx", t->dx[0], t->dx[1]));
    MT_TRY(same_gradients(t->r, "fc1", t->mlp.fc1.weight, t->mlp.fc1.bias, &t->mlp_own.fc1));
    return same_gradients(t->r, "fc2", t->mlp.fc2.weight, t->mlp.fc2.bias, &t->mlp_own.fc2);
}

static mt_status attention_check(plain_test *t, int add) {
    mt_context *c = t->r->ctx;
    mt_self_attention_desc d = t->attention_desc;
    const mt_self_attention *a = &t->attention;
    mt_self_attention own;
    mt_param params[8];
    mt_self_attention_saved saved;
    MT_TRY(mt_self_attention_forward(c, a, &t->batch, t->x, t->y[0], &saved));
    MT_TRY(mt_self_attention_backward(c, a, t->dy, t->dx[0], &saved));
    MT_TRY(added(t, add));
    d.add_to_dx = add;
    MT_TRY(mt_self_attention_from_tensors(c, t->r->grid.tp, NULL, &d, &t->attention_own, params, &own));
    MT_TRY(mt_self_attention_forward(c, &own, &t->batch, t->x, t->y[1], &saved));
    MT_TRY(mt_self_attention_backward(c, &own, t->dy, t->dx[1], &saved));
    MT_TRY(same(t->r, "attention y", t->y[0], t->y[1]));
    MT_TRY(same(t->r, "attention dx", t->dx[0], t->dx[1]));
    MT_TRY(same_gradients(t->r, "qkv", a->qkv.weight, a->qkv.bias, &t->attention_own.qkv));
    return same_gradients(t->r, "proj", a->proj.weight, a->proj.bias, &t->attention_own.proj);
}

static mt_status plain_body(plain_test *t, const plain_run *run) {
    mt_parallel_options options;
    memset(&options, 0, sizeof options);
    options.overlap_chunks = 2;
    options.no_overlap = run->no_overlap ? MT_OVERLAP_ALL : 0;
    MT_TRY(mt_parallel_set_options(t->r->ctx, &options));
    MT_TRY(blocks_open(t, run));
    for (int add = 0; add < 2; add++) {
        size_t mark = mt_arena_mark(t->r->ctx);
        MT_TRY(linear_check(t, add));
        MT_TRY(mlp_check(t, add));
        MT_TRY(attention_check(t, add));
        mt_arena_release(t->r->ctx, mark);
    }
    return MT_SUCCESS;
}

static mt_status plain_rank(mt_comm *world, void *user) {
    mt_grid_desc shape;
    mt_context_desc where;
    plain_test t;
    test_rank r;
    memset(&shape, 0, sizeof shape);
    memset(&where, 0, sizeof where);
    memset(&t, 0, sizeof t);
    shape.tp = mt_comm_size(world);
    where.device = MT_DEVICE_CUDA;
    where.ordinal = mt_comm_rank(world) % mt_device_count(MT_DEVICE_CUDA);
    where.arena_bytes = (size_t)16 << 20;
    mt_status status = test_rank_open(world, shape, &where, &r);
    t.r = &r;
    if (status == MT_SUCCESS) status = plain_body(&t, (const plain_run *)user);
    test_rank_close(&r);
    return status;
}

static void test_layers_of_tensors_are_the_layers(void **state) {
    (void)state;
    for (int dtype = MT_F32; dtype <= MT_BF16; dtype++)
        for (int ranks = 1; ranks <= 2; ranks++)
            for (int kind = 0; kind < (ranks == 1 ? 1 : 4); kind++) {
                plain_run run;
                run.dtype = (mt_dtype)dtype;
                run.sequence_parallel = kind & 1;
                run.no_overlap = kind >> 1;
                test_launch(ranks, plain_rank, &run);
            }
}

/* ---- how many operators a layer has, on paper -------------------------------------------------------------------- */

typedef struct layer_work {
    int products, operators, overlaps; /* operators: with products, attention and collectives */
    int64_t least_rows;                /* of a product of activations and a weight */
    int hidden;                        /* overlaps that end after a product that began later */
} layer_work;

/* Counts the work of one transformer layer on 8 ranks that are planned for GPUs: 8192 tokens, hidden 4096, bf16. */
static layer_work work_of_layer(int sequence_parallel, int chunks, int interleave) {
    mt_context_desc where;
    mt_grid_desc shape;
    mt_transformer_layer_desc d;
    mt_parallel_options options;
    mt_transformer_layer layer;
    mt_transformer_layer_saved saved;
    mt_batch batch;
    mt_trace trace;
    mt_tensor t[4];
    layer_work work;
    test_rank r;
    memset(&where, 0, sizeof where), memset(&shape, 0, sizeof shape), memset(&d, 0, sizeof d);
    memset(&options, 0, sizeof options), memset(&batch, 0, sizeof batch), memset(&work, 0, sizeof work);
    where.device = MT_DEVICE_META, where.planned = MT_DEVICE_CUDA, where.arena_bytes = (size_t)1 << 34;
    shape.tp = 8, d.hidden = 4096, d.heads = 32, d.sequence_parallel = sequence_parallel;
    batch.sequences = 4, batch.seq = 2048, options.overlap_chunks = chunks, options.interleave = interleave;
    test_paper_rank(8, 1, shape, &where, &r);
    mt_context *c = r.ctx;
    ASSERT_STATUS(c, MT_SUCCESS, mt_parallel_set_options(c, &options));
    ASSERT_STATUS(c, MT_SUCCESS, mt_params_set_dtype(c, r.params, MT_BF16));
    ASSERT_STATUS(c, MT_SUCCESS, mt_transformer_layer_create(c, r.params, "layer", &d, &layer));
    ASSERT_STATUS(c, MT_SUCCESS, mt_params_init(c, r.params, 1));
    ASSERT_STATUS(c, MT_SUCCESS, mt_params_zero_grad(c, r.params));
    for (int i = 0; i < 4; i++)
        ASSERT_STATUS(c, MT_SUCCESS, mt_arena_tensor(c, MT_BF16, sequence_parallel ? 1024 : 8192, 4096, &t[i]));
    ASSERT_STATUS(c, MT_SUCCESS, mt_context_take_trace(c, &trace));
    mt_trace_free(&trace);
    ASSERT_STATUS(c, MT_SUCCESS, mt_transformer_layer_forward(c, &layer, &batch, t[0], t[1], &saved));
    ASSERT_STATUS(c, MT_SUCCESS, mt_transformer_layer_backward(c, &layer, t[2], t[3], &saved));
    ASSERT_STATUS(c, MT_SUCCESS, mt_context_take_trace(c, &trace));
    work.least_rows = 8192;
    int products_at[MT_OVERLAP_TICKETS]; /* the products before the end of the last overlap with a ticket */
    for (size_t i = 0; i < trace.count; i++) {
        const mt_trace_entry *e = &trace.entries[i];
        if (e->work == MT_WORK_OVERLAP_END) products_at[e->ticket] = work.products;
        work.hidden += e->work == MT_WORK_OVERLAP_WAIT && products_at[e->ticket] < work.products;
        work.products += e->work == MT_WORK_GEMM;
        work.operators += e->work <= MT_WORK_COMMUNICATION;
        work.overlaps += e->work == MT_WORK_OVERLAP_BEGIN;
        if (e->work == MT_WORK_GEMM && e->k != 8192 && e->m < work.least_rows) work.least_rows = e->m;
    }
    mt_trace_free(&trace);
    test_paper_rank_close(&r);
    return work;
}

/* A chunk is one product, of many rows, and sequence parallelism does not change that. */
static void test_few_large_products(void **state) {
    layer_work whole = work_of_layer(1, 1, 0), chunks = work_of_layer(1, 0, 0), most = work_of_layer(1, 8, 0);
    layer_work all_reduce = work_of_layer(0, 0, 0);
    (void)state;
    assert_int_equal(whole.products, 12);
    assert_true(chunks.products == 12 + 6 && chunks.operators <= 60 && chunks.least_rows == 4096);
    assert_int_equal(chunks.overlaps, whole.overlaps + 6 * 2); /* each gather and reduce-scatter beside a product */
    assert_true(most.products == 12 + 6 * 7 && most.least_rows == 1024);
    assert_true(all_reduce.products == 12 + 2 * 3 && all_reduce.least_rows == 2048);
    assert_true(all_reduce.operators <= 60);
}

/* Halves in turn: of the 8 all-reduces of half a batch only the last one of forward has no product beside it. Whole,
   none of the two of forward has, and in chunks all but the last chunk of each. */
static void test_halves_hide_reductions(void **state) {
    layer_work whole = work_of_layer(0, 1, 0), halves = work_of_layer(0, 0, 1), ignored = work_of_layer(1, 0, 1);
    (void)state;
    assert_true(whole.products == 12 && whole.overlaps == 2 && whole.hidden == 2);
    assert_true(halves.products == 24 && halves.overlaps == 8 && halves.hidden == 7);
    assert_int_equal(ignored.products, work_of_layer(1, 0, 0).products); /* sequence parallelism */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_few_large_products),
        cmocka_unit_test(test_halves_hide_reductions),
        cmocka_unit_test(test_layers_of_tensors_are_the_layers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
