/* test_lazy_gradients.c - tests mt_params_zero_grad_lazy: the bits of a training against those with
   mt_params_zero_grad, what each reader sees of a gradient that nothing has written, gradients that a program writes by
   hand, and the memory traffic. The memory of the gradients holds NaN before, so that nobody may read it.
       cc -std=gnu17 -O2 -I. tests/test_lazy_gradients.c -lpthread -lm */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#define GPT_STEPS 3
#include "mt_test_gpt.h"
#include "mt_test_ranks.h"

/* ---- trainings keep their bits ----------------------------------------------------------------------------------- */

static void assert_same_bits(gpt_run r) {
    static gpt_result eager, lazy;
    gpt_execute(r, &eager);
    r.lazy = 1;
    gpt_execute(r, &lazy);
    for (int i = 0; i < GPT_STEPS; i++)
        if (!isfinite(lazy.loss[i]) || !isfinite(lazy.norm[i])) fail_msg("%s: step %d: NaN", gpt_name(&r), i);
    if (memcmp(&eager, &lazy, GPT_SAME_BYTES) != 0) fail_msg("%s: other bits", gpt_name(&r));
}

static void test_splits(void **state) {
    static const int splits[][3] = {{1, 1, 0}, {2, 1, 0}, {2, 1, 1}, {1, 2, 0}, {2, 2, 1}};
    (void)state;
    for (int llama = 0; llama <= GPT_BERT; llama++)
        for (int dtype = MT_F32; dtype <= MT_F16; dtype++)
            for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
                gpt_run r = {.tp = splits[i][0], .data = splits[i][1], .sequence_parallel = splits[i][2]};
                r.llama = llama;
                r.dtype = (mt_dtype)dtype;
                r.loss_scale = dtype == MT_F16 ? 1024.0f : 0.0f;
                r.check = (int)i % 3;
                if (test_takes((size_t)(15 * llama + 5 * dtype) + i, 7)) assert_same_bits(r);
            }
}

/* Small buckets, some of which are under way before the last backward has ended, and ZeRO-1. */
static void test_buckets(void **state) {
    (void)state;
    for (int i = 0; i < 8; i++) {
        gpt_run r = {.tp = 1 + i % 2, .data = 2, .begins = i / 2 % 2, .llama = i % 3, .pipeline = 1};
        r.share.bucket_bytes = 4096;
        r.share.sharded_optimizer = i / 4;
        r.on_device = i % 2;
        assert_same_bits(r);
    }
}

/* A shared embedding on the first and the last stage, and micro-batches in another order. */
static void test_pipelines(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        gpt_run r = {.tp = 1 + i / 2, .data = 1, .pipeline = 2, .llama = i % 2, .schedule = MT_SCHEDULE_1F1B};
        r.check = i == 3 ? 2 : 0;
        assert_same_bits(r);
    }
}

static void test_invariant(void **state) {
    (void)state;
    for (int i = 0; i < 6; i++) {
        gpt_run r = {.tp = 1 + i % 2, .data = 1 + i / 2 % 2, .invariant = 4, .llama = i % 3, .pipeline = 1 + i / 4};
        r.dtype = i == 5 ? MT_BF16 : MT_F32;
        assert_same_bits(r);
    }
}

static void test_recomputed_and_bound(void **state) {
    (void)state;
    for (int i = 0; i < 6; i++) {
        static const int bound[] = {0, 2, 31, 2 | GPT_BOUND_ONE, 2 | GPT_BOUND_GAPS, 31 | GPT_BOUND_GAPS};
        gpt_run r = {.tp = 2, .data = 1 + i % 2, .bound = bound[i], .recompute = (mt_recompute)(i % 3)};
        assert_same_bits(r);
    }
}

/* ---- who reads a gradient that nothing has written --------------------------------------------------------------- */

enum { TOKENS = 8, WIDE = 16, IDS = 8 };

/* A net with a layer that no backward reaches, and an embedding whose weight is also that of a head. */
typedef struct net {
    test_rank r;
    mt_column_parallel_linear in, idle, head;
    mt_row_parallel_linear out;
    mt_vocab_parallel_embedding words;
    mt_linear_saved in_saved, out_saved, head_saved;
    mt_tensor x, h, y, dy, dh, dx, logits, dlogits;
    mt_optimizer adam;
} net;

static mt_status net_layers(net *n) {
    mt_linear_desc in = {.in_features = WIDE, .out_features = WIDE}, head = in;
    mt_linear_desc out = {.in_features = WIDE, .out_features = WIDE, .input_is_parallel = 1};
    mt_embedding_desc words = {.vocab = IDS, .features = WIDE, .shared = 1};
    MT_TRY(mt_column_parallel_linear_create(n->r.ctx, n->r.params, "in", &in, &n->in));
    MT_TRY(mt_column_parallel_linear_create(n->r.ctx, n->r.params, "idle", &in, &n->idle));
    MT_TRY(mt_row_parallel_linear_create(n->r.ctx, n->r.params, "out", &out, &n->out));
    MT_TRY(mt_vocab_parallel_embedding_create(n->r.ctx, n->r.params, "words", &words, &n->words));
    head.out_features = IDS;
    head.no_bias = 1;
    head.weight = n->words.weight;
    MT_TRY(mt_column_parallel_linear_create(n->r.ctx, n->r.params, "head", &head, &n->head));
    n->x = mt_tensor_f32(test_noise(&n->r, TOKENS * WIDE, 1, 1.0f), TOKENS, WIDE);
    n->dy = mt_tensor_f32(test_noise(&n->r, TOKENS * WIDE, 2, 1.0f), TOKENS, WIDE);
    n->dlogits =
        mt_tensor_f32(test_noise(&n->r, TOKENS * n->head.local_features, 3, 1.0f), TOKENS, n->head.local_features);
    n->y = test_tensor(&n->r, TOKENS, WIDE, 0.0f);
    n->dx = test_tensor(&n->r, TOKENS, WIDE, 0.0f);
    n->h = test_tensor(&n->r, TOKENS, n->in.local_features, 0.0f);
    n->dh = test_tensor(&n->r, TOKENS, n->in.local_features, 0.0f);
    n->logits = test_tensor(&n->r, TOKENS, n->head.local_features, 0.0f);
    return MT_SUCCESS;
}

static mt_status net_forward(net *n) {
    MT_TRY(mt_parallel_linear_forward(n->r.ctx, &n->in, n->x, n->h, &n->in_saved));
    MT_TRY(mt_parallel_linear_forward(n->r.ctx, &n->out, n->h, n->y, &n->out_saved));
    return mt_parallel_linear_forward(n->r.ctx, &n->head, n->y, n->logits, &n->head_saved);
}

/* Adds to the gradients of `in`, `out` and the head, whose weight is that of the embedding. */
static mt_status net_backward(net *n) {
    MT_TRY(mt_parallel_linear_backward(n->r.ctx, &n->head, n->dlogits, n->dx, &n->head_saved));
    MT_TRY(mt_parallel_linear_backward(n->r.ctx, &n->out, n->dy, n->dh, &n->out_saved));
    return mt_parallel_linear_backward(n->r.ctx, &n->in, n->dh, n->dx, &n->in_saved);
}

static mt_status net_lookup(net *n) {
    static const int32_t ids[TOKENS] = {1, 5, 5, 0, 2, 7, 1, 1};
    return mt_vocab_parallel_embedding_backward(n->r.ctx, &n->words, ids, TOKENS, n->dy);
}

/* The memory of all gradients holds NaN, and they count as zero. */
static mt_status net_zero(net *n) {
    for (int i = 0; i < mt_params_count(n->r.params); i++) {
        const mt_tensor g = mt_params_at(n->r.params, i)->grad;
        for (int64_t k = 0; k < g.rows * g.cols; k++) ((float *)g.data)[k] = NAN;
    }
    return mt_params_zero_grad_lazy(n->r.ctx, n->r.params);
}

static mt_status all_are(const mt_param *p, float value) {
    for (int64_t k = 0; k < p->grad.rows * p->grad.cols; k++) CHECK(((float *)p->grad.data)[k] == value);
    return MT_SUCCESS;
}

static mt_status all_are_nan(const mt_param *p) {
    for (int64_t k = 0; k < p->grad.rows * p->grad.cols; k++) CHECK(isnan(((float *)p->grad.data)[k]));
    return MT_SUCCESS;
}

/* The gradient of a weight in double precision, times `times`, plus `plus`. */
static mt_status weight_gradient_is(const mt_param *p, mt_tensor dy, mt_tensor x, int times, double plus) {
    for (int64_t i = 0; i < p->grad.rows; i++)
        for (int64_t j = 0; j < p->grad.cols; j++) {
            double sum = 0.0;
            for (int64_t t = 0; t < dy.rows; t++)
                sum += (double)((float *)dy.data)[t * dy.cols + i] * (double)((float *)x.data)[t * x.cols + j];
            sum = times * sum + plus;
            MT_TRY(test_near(p->name, (float *)p->grad.data + i * p->grad.cols + j, &sum, 1, 1e-5));
        }
    return MT_SUCCESS;
}

typedef struct reader_case {
    mt_grid_desc grid;
    int ranks, sharded, invariant, check;
} reader_case;

static void keep_line(void *user, const char *name, uint64_t hash, int differs) {
    if (strcmp(name, "idle.weight.grad") == 0 && !differs) *(uint64_t *)user = hash;
}

/* Reads the gradient of `idle`, which nothing has written, as a hash, and compares with that of zeros. */
static mt_status read_by_hash_log(net *n) {
    mt_param *p = n->idle.weight;
    mt_hash_log *log;
    uint64_t got = 1, want = 2;
    MT_TRY(mt_hash_log_create(n->r.ctx, &n->r.grid, &log));
    MT_TRY(mt_hash_log_shard(n->r.ctx, log, p, ".grad", p->grad));
    MT_TRY(mt_hash_log_flush(n->r.ctx, log, keep_line, &got));
    MT_TRY(mt_hash_log_shard(n->r.ctx, log, p, ".grad", test_tensor(&n->r, p->grad.rows, p->grad.cols, 0.0f)));
    MT_TRY(mt_hash_log_flush(n->r.ctx, log, keep_line, &want));
    mt_hash_log_destroy(log);
    CHECK(got == want);
    return MT_SUCCESS;
}

static mt_status read_by_gather(net *n) {
    mt_param *p = n->idle.weight;
    float *whole = test_floats(&n->r, WIDE * WIDE, 1.0f);
    MT_TRY(mt_param_gather(n->r.ctx, n->r.params, p, p->grad, whole));
    for (int i = 0; i < WIDE * WIDE; i++) CHECK(whole[i] == 0.0f);
    for (int i = 0; i < WIDE * WIDE; i++) whole[i] = 3.0f;
    MT_TRY(net_zero(n));
    MT_TRY(mt_param_scatter(n->r.ctx, p, whole, p->grad));
    MT_TRY(mt_sync_gradients(n->r.ctx, n->r.params));
    MT_TRY(mt_gather_gradients(n->r.ctx, n->r.params));
    return all_are(p, 3.0f * (float)n->r.grid.dp_size);
}

static mt_status read_one_by_one(net *n) {
    mt_param *const idle = n->idle.weight;
    const mt_param *const all[] = {n->in.weight, idle, n->out.weight, n->words.weight};
    MT_TRY(net_zero(n));
    for (int i = 0; i < 4; i++) MT_TRY(all_are_nan(all[i])); /* or nothing is saved */
    MT_TRY(all_are(n->in.bias, 0.0f));
    MT_TRY(all_are(n->out.bias, 0.0f));
    MT_TRY(mt_param_touch_grad(n->r.ctx, idle));
    MT_TRY(all_are(idle, 0.0f));
    MT_TRY(all_are_nan(n->in.weight));
    ((float *)idle->grad.data)[0] = 1.0f;
    MT_TRY(mt_param_touch_grad(n->r.ctx, idle)); /* only the first call fills it */
    CHECK(((float *)idle->grad.data)[0] == 1.0f);
    MT_TRY(net_zero(n));
    MT_TRY(mt_check_gradient(n->r.ctx, "f", idle));
    MT_TRY(all_are(idle, 0.0f));
    MT_TRY(net_zero(n));
    MT_TRY(mt_check_linear_gradients(n->r.ctx, "f", &n->idle));
    MT_TRY(all_are_nan(idle));
    MT_TRY(mt_params_zero_grad(n->r.ctx, n->r.params));
    MT_TRY(all_are(idle, 0.0f));
    MT_TRY(net_zero(n));
    MT_TRY(read_by_hash_log(n));
    MT_TRY(net_zero(n));
    return read_by_gather(n);
}

/* A step in which nothing is added: the norm is 0, and the optimizer changes nothing. */
static mt_status read_by_optimizer(net *n, int synchronises) {
    const mt_param *p = n->idle.weight;
    float *moment = test_floats(&n->r, p->grad.rows * p->grad.cols, 1.0f), *before, norm = 1.0f;
    before = test_floats(&n->r, p->value.rows * p->value.cols, 0.0f);
    memcpy(before, p->value.data, (size_t)(p->value.rows * p->value.cols) * sizeof *before);
    MT_TRY(net_zero(n));
    if (synchronises) MT_TRY(mt_sync_gradients(n->r.ctx, n->r.params));
    if (synchronises) MT_TRY(all_are(p, 0.0f));
    if (!synchronises) MT_TRY(mt_grad_norm(n->r.ctx, n->r.params, &norm));
    CHECK(synchronises || norm == 0.0f);
    MT_TRY(net_zero(n));
    if (synchronises) MT_TRY(mt_sync_gradients(n->r.ctx, n->r.params));
    MT_TRY(mt_optimizer_step(n->r.ctx, &n->adam, 0.1f, 1.0f));
    MT_TRY(mt_optimizer_read(n->r.ctx, &n->adam, p, MT_EXP_AVG, mt_tensor_f32(moment, p->grad.rows, p->grad.cols)));
    for (int64_t k = 0; k < p->grad.rows * p->grad.cols; k++) CHECK(moment[k] == 0.0f);
    CHECK(memcmp(before, p->value.data, (size_t)(p->value.rows * p->value.cols) * sizeof *before) == 0);
    return MT_SUCCESS;
}

/* Buckets that are sent early contain the gradient of `idle`. */
static mt_status read_by_buckets(net *n) {
    const mt_param *first = n->in.weight, *last = n->words.weight;
    float norm;
    MT_TRY(net_zero(n));
    MT_TRY(net_forward(n));
    MT_TRY(mt_sync_gradients_begin(n->r.ctx, n->r.params));
    MT_TRY(net_backward(n));
    MT_TRY(net_lookup(n));
    MT_TRY(mt_gradients_final(n->r.ctx, first, last));
    MT_TRY(all_are(n->idle.weight, 0.0f)); /* before its bucket is sent */
    MT_TRY(mt_sync_gradients(n->r.ctx, n->r.params));
    MT_TRY(mt_gather_gradients(n->r.ctx, n->r.params));
    MT_TRY(all_are(n->idle.weight, 0.0f));
    MT_TRY(mt_grad_norm(n->r.ctx, n->r.params, &norm));
    CHECK(norm > 0.0f);
    return MT_SUCCESS;
}

static mt_status reader_body(net *n, const reader_case *c) {
    mt_optimizer_desc adam = {.weight_decay = 0.0f};
    mt_data_parallel_desc share = {.bucket_bytes = 512, .sharded_optimizer = c->sharded};
    MT_TRY(mt_params_set_data_parallel(n->r.ctx, n->r.params, &share));
    MT_TRY(net_layers(n));
    MT_TRY(mt_params_init(n->r.ctx, n->r.params, 1));
    MT_TRY(mt_optimizer_create(n->r.ctx, n->r.params, &adam, &n->adam));
    MT_TRY(read_one_by_one(n));
    MT_TRY(read_by_optimizer(n, 1));
    if (c->ranks == 1 && !c->invariant) MT_TRY(read_by_optimizer(n, 0));
    if (!c->invariant) return read_by_buckets(n);
    MT_TRY(net_zero(n));
    MT_TRY(mt_accumulate_gradients(n->r.ctx, n->r.params)); /* of a micro-batch that adds nothing */
    MT_TRY(net_forward(n));
    MT_TRY(net_backward(n));
    MT_TRY(mt_accumulate_gradients(n->r.ctx, n->r.params));
    MT_TRY(mt_sync_gradients(n->r.ctx, n->r.params));
    MT_TRY(all_are(n->idle.weight, 0.0f));
    for (int64_t k = 0; k < n->in.weight->grad.rows; k++) CHECK(isfinite(((float *)n->in.weight->grad.data)[k]));
    return MT_SUCCESS;
}

static mt_status net_open(mt_comm *world, mt_grid_desc grid, int invariant, int check, net *n) {
    mt_context_desc where = {.arena_bytes = (size_t)1 << 20, .check = check};
    where.invariant = invariant;
    where.invariant_data = invariant;
    memset(n, 0, sizeof *n);
    return test_rank_open(world, grid, &where, &n->r);
}

static void net_close(net *n) {
    mt_optimizer_destroy(n->r.ctx, &n->adam);
    test_rank_close(&n->r);
}

static mt_status reader_rank(mt_comm *world, void *user) {
    const reader_case *c = (const reader_case *)user;
    net n;
    mt_status status = net_open(world, c->grid, c->invariant, c->check, &n);
    if (status == MT_SUCCESS) status = reader_body(&n, c);
    if (status != MT_SUCCESS) fprintf(stderr, "%d ranks: %s\n", c->ranks, mt_last_error(n.r.ctx));
    net_close(&n);
    return status;
}

static void test_every_reader(void **state) {
    static reader_case cases[] = {{{1, 1, 1, 1}, 1, 0, 0, 0}, {{1, 1, 1, 1}, 1, 0, 0, 1}, {{2, 1, 1, 1}, 2, 0, 0, 0},
                                  {{1, 2, 1, 1}, 2, 0, 0, 0}, {{1, 2, 1, 1}, 2, 1, 0, 0}, {{2, 2, 1, 1}, 4, 0, 0, 1},
                                  {{1, 1, 1, 1}, 1, 0, 2, 0}, {{2, 1, 1, 1}, 2, 0, 2, 0}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) test_launch(cases[i].ranks, reader_rank, &cases[i]);
}

/* ---- what is added to a gradient --------------------------------------------------------------------------------- */

/* Micro-batches, products before and behind a product of the program, and an embedding that adds to what its head has
   written. */
static mt_status sum_body(net *n) {
    mt_param *w;
    MT_TRY(net_layers(n));
    w = n->in.weight;
    MT_TRY(mt_params_init(n->r.ctx, n->r.params, 1));
    for (int times = 1; times <= 3; times++) {
        MT_TRY(net_zero(n));
        for (int i = 0; i < times; i++) MT_TRY(net_forward(n));
        for (int i = 0; i < times; i++) MT_TRY(net_backward(n));
        MT_TRY(weight_gradient_is(w, n->dh, n->x, times, 0.0));
        MT_TRY(weight_gradient_is(n->out.weight, n->dy, n->h, times, 0.0));
        MT_TRY(weight_gradient_is(n->words.weight, n->dlogits, n->y, times, 0.0));
    }
    MT_TRY(net_zero(n)); /* by hand, before the backward */
    MT_TRY(mt_param_touch_grad(n->r.ctx, w));
    for (int64_t k = 0; k < w->grad.rows * w->grad.cols; k++) ((float *)w->grad.data)[k] += 2.0f;
    MT_TRY(net_backward(n));
    MT_TRY(weight_gradient_is(w, n->dh, n->x, 1, 2.0));
    MT_TRY(mt_gemm(n->r.ctx, MT_TRANS, MT_NO_TRANS, 1.0f, n->dh, n->x, 1.0f, w->grad)); /* and behind it */
    MT_TRY(weight_gradient_is(w, n->dh, n->x, 2, 2.0));
    MT_TRY(mt_params_zero_grad(n->r.ctx, n->r.params)); /* without mt_param_touch_grad */
    MT_TRY(mt_gemm(n->r.ctx, MT_TRANS, MT_NO_TRANS, 1.0f, n->dh, n->x, 1.0f, w->grad));
    MT_TRY(net_backward(n));
    MT_TRY(weight_gradient_is(w, n->dh, n->x, 2, 0.0));
    MT_TRY(net_zero(n)); /* the lookup of a tied embedding, before and behind the head */
    MT_TRY(net_lookup(n));
    CHECK(isfinite(((float *)n->words.weight->grad.data)[3 * WIDE]));
    MT_TRY(net_backward(n));
    MT_TRY(net_lookup(n));
    for (int64_t k = 3 * WIDE; k < 4 * WIDE; k++) { /* no token has id 3 */
        double sum = 0.0;
        for (int64_t t = 0; t < TOKENS; t++)
            sum += (double)((float *)n->dlogits.data)[t * IDS + 3] * (double)((float *)n->y.data)[t * WIDE + k % WIDE];
        MT_TRY(test_near("words", (float *)n->words.weight->grad.data + k, &sum, 1, 1e-5));
    }
    return MT_SUCCESS;
}

static mt_status sum_rank(mt_comm *world, void *user) {
    net n;
    mt_status status = net_open(world, (mt_grid_desc){.tp = 1}, 0, *(const int *)user, &n);
    if (status == MT_SUCCESS) status = sum_body(&n);
    net_close(&n);
    return status;
}

static void test_sums(void **state) {
    (void)state;
    for (int check = 0; check < 2; check++) test_launch(1, sum_rank, &check);
}

/* In check mode a gradient that nothing has written holds NaN. A call in another context is refused. */
static void test_refusals(void **state) {
    mt_context_desc where = {.arena_bytes = (size_t)1 << 20, .check = 1};
    net n;
    mt_context *other;
    (void)state;
    memset(&n, 0, sizeof n);
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, &where, &n.r);
    ASSERT_STATUS(n.r.ctx, MT_SUCCESS, net_layers(&n));
    REFUSED(n.r.ctx, MT_ERR_ARGUMENT, "mt_params_zero_grad_lazy: call mt_params_init first",
            mt_params_zero_grad_lazy(n.r.ctx, n.r.params));
    ASSERT_STATUS(n.r.ctx, MT_SUCCESS, mt_params_init(n.r.ctx, n.r.params, 1));
    ASSERT_STATUS(n.r.ctx, MT_SUCCESS, mt_params_zero_grad_lazy(n.r.ctx, n.r.params));
    ASSERT_STATUS(n.r.ctx, MT_SUCCESS, all_are_nan(n.idle.weight));
    ASSERT_STATUS(n.r.ctx, MT_SUCCESS, all_are(n.idle.bias, 0.0f));
    REFUSED(n.r.ctx, MT_ERR_ARGUMENT, "mt_param_touch_grad: param is NULL", mt_param_touch_grad(n.r.ctx, NULL));
    REFUSED(n.r.ctx, MT_ERR_ARGUMENT, "f: the layer is NULL", mt_check_linear_gradients(n.r.ctx, "f", NULL));
    ASSERT_STATUS(n.r.ctx, MT_SUCCESS, mt_context_create(n.r.world, &where, &other));
    REFUSED(other, MT_ERR_ARGUMENT, "mt_params_zero_grad_lazy: ctx is not the context that mt_params_create got",
            mt_params_zero_grad_lazy(other, n.r.params));
    mt_context_destroy(other);
    if (mt_param_touch_grad(NULL, n.idle.weight) != MT_ERR_ARGUMENT ||
        mt_check_linear_gradients(NULL, "f", &n.idle) != MT_ERR_ARGUMENT ||
        mt_params_zero_grad_lazy(NULL, n.r.params) != MT_ERR_ARGUMENT)
        fail_msg("a context that is NULL is accepted");
    test_paper_rank_close(&n.r);
}

/* ---- the operator ------------------------------------------------------------------------------------------------ */

/* dweight = dy^T x + beta dweight and dbias += sum of dy, against double precision, in each type. */
static void test_operator(void **state) {
    static const float betas[] = {0.0f, 1.0f, -0.5f};
    enum { M = 12, K = 20 };
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    for (int i = 0; i < 9; i++) {
        const float beta = betas[i / 3];
        const size_t mark = mt_arena_mark(r.ctx);
        mt_tensor dy, x, dyf = mt_tensor_f32(test_noise(&r, TOKENS * M, 5, 1.0f), TOKENS, M);
        mt_tensor xf = mt_tensor_f32(test_noise(&r, TOKENS * K, 6, 1.0f), TOKENS, K);
        mt_tensor dw = mt_tensor_f32(test_noise(&r, M * K, 7, 1.0f), M, K), before = test_tensor(&r, M, K, 0.0f);
        mt_tensor db = test_tensor(&r, 1, M, 3.0f);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, (mt_dtype)(i % 3), TOKENS, M, &dy));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, (mt_dtype)(i % 3), TOKENS, K, &x));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_convert(r.ctx, dyf, dy));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_convert(r.ctx, xf, x));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_convert(r.ctx, dy, dyf)); /* rounded */
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_convert(r.ctx, x, xf));
        memcpy(before.data, dw.data, M * K * sizeof(float));
        for (int k = 0; k < M * K && beta == 0.0f; k++) ((float *)dw.data)[k] = NAN;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_linear_gradients_beta(r.ctx, dy, x, beta, dw, db));
        for (int m = 0; m < M; m++) {
            double sum = 3.0;
            for (int t = 0; t < TOKENS; t++) sum += (double)((float *)dyf.data)[t * M + m];
            ASSERT_STATUS(r.ctx, MT_SUCCESS, test_near("dbias", (float *)db.data + m, &sum, 1, 1e-5));
            for (int k = 0; k < K; k++) {
                sum = (double)beta * (double)((float *)before.data)[m * K + k];
                for (int t = 0; t < TOKENS; t++)
                    sum += (double)((float *)dyf.data)[t * M + m] * (double)((float *)xf.data)[t * K + k];
                ASSERT_STATUS(r.ctx, MT_SUCCESS, test_near("dweight", (float *)dw.data + m * K + k, &sum, 1, 1e-5));
            }
        }
        mt_arena_release(r.ctx, mark);
    }
    test_paper_rank_close(&r);
}

/* ---- memory traffic ---------------------------------------------------------------------------------------------- */

typedef struct traffic {
    double fills, products;
    int fill_count;
} traffic;

/* Runs a step of a GPT with so many micro-batches on the meta device, and adds up what fills and products of its trace
   read and write. Writes the number of elements of the weights of linear layers to *weights. */
static traffic traffic_of(int lazy, int micro_batches, double *weights) {
    mt_context_desc where = {.arena_bytes = (size_t)64 << 20, .device = MT_DEVICE_META};
    static int32_t ids[64];
    static float losses[64];
    mt_gpt_desc model = {.vocab = 64, .layers = 3, .max_seq = 16, .layer = {.hidden = 32, .heads = 4}};
    mt_batch batch = {.sequences = 2, .seq = 16};
    mt_gpt gpt;
    mt_gpt_saved saved;
    mt_trace trace;
    traffic sum = {0.0, 0.0, 0};
    test_rank r;
    mt_status (*zero)(mt_context *, mt_params *) = lazy ? mt_params_zero_grad_lazy : mt_params_zero_grad;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, &where, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_create(r.ctx, r.params, &model, &gpt));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_saved_create(r.ctx, &gpt, &saved));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_context_take_trace(r.ctx, &trace));
    mt_trace_free(&trace);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, zero(r.ctx, r.params));
    for (int i = 0; i < micro_batches; i++) {
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_gpt_forward(r.ctx, &gpt, &batch, ids, ids, mt_tensor_f32(losses, 1, 32), &saved));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_backward(r.ctx, &gpt, 1.0f, &saved));
    }
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sync_gradients(r.ctx, r.params));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_context_take_trace(r.ctx, &trace));
    for (size_t i = 0; i < trace.count; i++) {
        const mt_trace_entry *e = &trace.entries[i];
        if (strcmp(e->name, "mt_gemm") == 0) sum.products += e->bytes;
        if (strcmp(e->name, "mt_fill") != 0) continue;
        sum.fills += e->bytes;
        sum.fill_count++;
    }
    mt_trace_free(&trace);
    mt_gpt_saved_destroy(&saved);
    *weights = 3.0 * 12 * 32 * 32 + 64 * 32; /* QKV, projection and MLP of each layer, and the tied embedding */
    test_paper_rank_close(&r);
    return sum;
}

/* A lazy step writes no zeros of these weights, and its first products do not read them. */
static void test_traffic(void **state) {
    (void)state;
    for (int micro_batches = 1; micro_batches <= 3; micro_batches++) {
        double weights;
        traffic eager = traffic_of(0, micro_batches, &weights), lazy = traffic_of(1, micro_batches, &weights);
        if (eager.fills - lazy.fills != 4.0 * weights || eager.products - lazy.products != 4.0 * weights)
            fail_msg("%d micro-batches: fills %.0f, then %.0f; products %.0f, then %.0f; expected to save %.0f each",
                     micro_batches, eager.fills, lazy.fills, eager.products, lazy.products, 4.0 * weights);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_splits),
        cmocka_unit_test(test_buckets),
        cmocka_unit_test(test_pipelines),
        cmocka_unit_test(test_invariant),
        cmocka_unit_test(test_recomputed_and_bound),
        cmocka_unit_test(test_every_reader),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_operator),
        cmocka_unit_test(test_traffic),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
