/* test_gradient_states.c - tests that a registry refuses gradients in a wrong state: not zeroed, not synchronised,
   synchronised or used already, final, or with a micro-batch that was not accumulated. A call that is refused must
   touch and send nothing, and its message must name a parameter and the call that helps. Loops in the right order must
   not be refused.
       cc -std=gnu17 -O2 -I. tests/test_gradient_states.c -lpthread -lm */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test_ranks.h"

enum { TOKENS = 16, WIDE = 8, INNER = 24, SEQ = 8 };

/* ---- what a refused call must leave as it is --------------------------------------------------------------------- */

static uint64_t add_bits(uint64_t hash, const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ ((const unsigned char *)data)[i]) * 1099511628211u;
    return hash;
}

static uint64_t add_tensor(uint64_t hash, mt_tensor t) {
    return t.data ? add_bits(hash, t.data, (size_t)(t.rows * t.cols) * mt_dtype_size(t.dtype)) : hash;
}

static uint64_t gradient_bits(const test_rank *r) {
    uint64_t hash = 14695981039346656037u;
    for (int i = 0; i < mt_params_count(r->params); i++) {
        const mt_param *p = mt_params_at(r->params, i);
        hash = add_tensor(add_tensor(hash, p->grad), p->lookup_grad);
    }
    return hash;
}

/* A hash of all gradients, values and ledgers of a rank. */
static uint64_t bits_of(const test_rank *r) {
    mt_comm *const groups[] = {r->grid.tp, r->grid.dp, r->grid.pp, r->grid.model, r->grid.embedding};
    uint64_t hash = gradient_bits(r);
    for (int i = 0; i < mt_params_count(r->params); i++) hash = add_tensor(hash, mt_params_at(r->params, i)->value);
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        mt_ledger ledger;
        if (!groups[i]) continue;
        ledger = mt_comm_ledger(groups[i]);
        hash = add_bits(add_bits(hash, ledger.calls, sizeof ledger.calls), ledger.bytes, sizeof ledger.bytes);
    }
    return hash;
}

static mt_status check_refused(const test_rank *r, uint64_t before, mt_status got, const char *words, int line) {
    const char *message = mt_last_error(r->ctx);
    int good = got == MT_ERR_ARGUMENT && test_has_words(message, words) && bits_of(r) == before;
    if (!good)
        fprintf(stderr, "line %d: got %s '%s', expected MT_ERR_ARGUMENT '%s'%s\n", line, mt_status_name(got), message,
                words, bits_of(r) == before ? "" : "; data were touched or sent");
    return good ? MT_SUCCESS : MT_ERR_DATA;
}

/* Inside a rank: checks that a call is refused with these words, and changes and sends nothing. */
#define REFUSES(r, words, ...)                                                                                         \
    do {                                                                                                               \
        uint64_t before_ = bits_of(r);                                                                                 \
        mt_status got_ = (__VA_ARGS__);                                                                                \
        MT_TRY(check_refused(r, before_, got_, words, __LINE__));                                                      \
    } while (0)

#define ZERO_FIRST "|mt_params_zero_grad before the first backward"
#define NOT_ZEROED "was not set to zero" ZERO_FIRST
#define SYNCED "is synchronised already; call mt_sync_gradients once" ZERO_FIRST
#define USED "was used by a step of the optimizer" ZERO_FIRST
#define SYNC_FIRST "; call mt_sync_gradients after the last backward"

/* ---- two layers and an optimizer --------------------------------------------------------------------------------- */

typedef struct net {
    test_rank r;
    mt_column_parallel_linear in;
    mt_row_parallel_linear out;
    mt_linear_saved in_saved, out_saved;
    mt_tensor x, h, y, dy, dh, dx;
    mt_optimizer adam;
    mt_step step;
    int on_device; /* 1: mt_step_update is the step of the optimizer */
} net;

/* A parameter has its name on one stage only. The last stage has the names without a number. */
static mt_status net_layers(net *n, int sequence_parallel) {
    const mt_grid *g = &n->r.grid;
    const int is_last = g->pp_rank + 1 == g->pp_size;
    mt_linear_desc in = {.in_features = WIDE, .out_features = INNER};
    mt_linear_desc out = {
        .in_features = INNER, .out_features = WIDE, .input_is_parallel = 1, .sequence_parallel = sequence_parallel};
    int64_t rows = sequence_parallel ? TOKENS / n->r.grid.tp_size : TOKENS;
    MT_TRY(mt_column_parallel_linear_create(n->r.ctx, n->r.params, is_last ? "in" : "0.in", &in, &n->in));
    MT_TRY(mt_row_parallel_linear_create(n->r.ctx, n->r.params, is_last ? "out" : "0.out", &out, &n->out));
    n->x = mt_tensor_f32(test_noise(&n->r, TOKENS * WIDE, 1, 1.0f), TOKENS, WIDE);
    n->dy = mt_tensor_f32(test_noise(&n->r, rows * WIDE, 2, 1.0f), rows, WIDE);
    n->y = test_tensor(&n->r, rows, WIDE, 0.0f);
    n->dx = test_tensor(&n->r, TOKENS, WIDE, 0.0f);
    n->h = test_tensor(&n->r, TOKENS, n->in.local_features, 0.0f);
    n->dh = test_tensor(&n->r, TOKENS, n->in.local_features, 0.0f);
    return MT_SUCCESS;
}

static mt_status net_optimizer(net *n) {
    MT_TRY(mt_optimizer_create(n->r.ctx, n->r.params, NULL, &n->adam));
    MT_TRY(mt_step_create(n->r.ctx, &n->adam, NULL, 1.0f, &n->step));
    return mt_step_begin(n->r.ctx, &n->step, 0.1f, 1);
}

static mt_status net_open(mt_comm *world, mt_grid_desc shape, const mt_context_desc *where, net *n) {
    memset(n, 0, sizeof *n);
    return test_rank_open(world, shape, where, &n->r);
}

static void net_close(net *n) {
    mt_step_destroy(n->r.ctx, &n->step);
    mt_optimizer_destroy(n->r.ctx, &n->adam);
    test_rank_close(&n->r);
}

static mt_status net_forward(net *n) {
    MT_TRY(mt_parallel_linear_forward(n->r.ctx, &n->in, n->x, n->h, &n->in_saved));
    return mt_parallel_linear_forward(n->r.ctx, &n->out, n->h, n->y, &n->out_saved);
}

static mt_status net_backward_out(net *n) {
    return mt_parallel_linear_backward(n->r.ctx, &n->out, n->dy, n->dh, &n->out_saved);
}

static mt_status net_backward_in(net *n) {
    return mt_parallel_linear_backward(n->r.ctx, &n->in, n->dh, n->dx, &n->in_saved);
}

static mt_status net_pass(net *n) {
    MT_TRY(net_forward(n));
    MT_TRY(net_backward_out(n));
    return net_backward_in(n);
}

static mt_status net_update(net *n) {
    if (n->on_device) return mt_step_update(n->r.ctx, &n->step, mt_none());
    return mt_optimizer_step(n->r.ctx, &n->adam, 0.1f, 1.0f);
}

static mt_status net_norm(net *n) {
    float norm;
    return mt_grad_norm(n->r.ctx, n->r.params, &norm);
}

/* The step of the optimizer with a number or a loss that it refuses. */
static mt_status net_wrong_update(net *n) {
    if (n->on_device) return mt_step_update(n->r.ctx, &n->step, n->x);
    return mt_optimizer_step(n->r.ctx, &n->adam, NAN, 1.0f);
}

/* ---- the order of a step ----------------------------------------------------------------------------------------- */

typedef struct order_case {
    mt_grid_desc grid;
    int ranks, sequence_parallel, sharded, on_device;
    const char *missing; /* what mt_sync_gradients would do; NULL: nothing */
} order_case;

/* What may not come after mt_sync_gradients or after a step. */
static mt_status order_is_closed(net *n, const char *words) {
    char with[256];
    for (size_t i = 0; i < TOKENS * WIDE; i++) ((float *)n->dx.data)[i] = 7.0f;
    snprintf(with, sizeof with, "mt_parallel_linear_backward: the gradient of 'in.weight' %s", words);
    REFUSES(&n->r, with, net_backward_in(n));
    snprintf(with, sizeof with, "mt_parallel_linear_backward: the gradient of 'out.weight' %s", words);
    REFUSES(&n->r, with, net_backward_out(n));
    for (size_t i = 0; i < TOKENS * WIDE; i++) CHECK(((float *)n->dx.data)[i] == 7.0f);
    snprintf(with, sizeof with, "mt_sync_gradients: the gradient of 'in.weight' %s", words);
    REFUSES(&n->r, with, mt_sync_gradients(n->r.ctx, n->r.params));
    snprintf(with, sizeof with, "mt_sync_gradients_begin: the gradient of 'in.weight' %s", words);
    REFUSES(&n->r, with, mt_sync_gradients_begin(n->r.ctx, n->r.params));
    return MT_SUCCESS;
}

/* Norm and step of gradients that were added to. They are refused until mt_sync_gradients, if it has anything to do. */
static mt_status order_norm_and_step(net *n, const order_case *c) {
    const char *update = n->on_device ? "mt_step_update" : "mt_optimizer_step";
    char with[256];
    if (c->missing) {
        snprintf(with, sizeof with, "mt_grad_norm: %s" SYNC_FIRST, c->missing);
        REFUSES(&n->r, with, net_norm(n));
        snprintf(with, sizeof with, "%s: %s" SYNC_FIRST, update, c->missing);
        REFUSES(&n->r, with, net_update(n));
        snprintf(with, sizeof with, "mt_gather_gradients: %s" SYNC_FIRST, c->missing);
        if (c->sharded) REFUSES(&n->r, with, mt_gather_gradients(n->r.ctx, n->r.params));
        MT_TRY(mt_sync_gradients(n->r.ctx, n->r.params));
    }
    CHECK(net_wrong_update(n) != MT_SUCCESS); /* changes no state */
    MT_TRY(net_norm(n));
    MT_TRY(mt_gather_gradients(n->r.ctx, n->r.params));
    MT_TRY(net_update(n));
    CHECK(n->on_device || n->adam.step > 0);
    MT_TRY(net_norm(n));
    snprintf(with, sizeof with, "%s: the gradient of 'in.weight' " USED, update);
    REFUSES(&n->r, with, net_update(n));
    return order_is_closed(n, USED);
}

static mt_status order_body(net *n, const order_case *c) {
    mt_context *ctx = n->r.ctx;
    mt_params *params = n->r.params;
    mt_data_parallel_desc share = {.sharded_optimizer = c->sharded};
    n->on_device = c->on_device;
    MT_TRY(mt_params_set_data_parallel(ctx, params, &share));
    MT_TRY(net_layers(n, c->sequence_parallel));
    MT_TRY(mt_params_init(ctx, params, 1));
    MT_TRY(net_optimizer(n));
    for (int i = 0; i < 2; i++) { /* two micro-batches */
        MT_TRY(net_pass(n));
        MT_TRY(mt_accumulate_gradients(ctx, params)); /* does nothing */
    }
    MT_TRY(order_norm_and_step(n, c));
    MT_TRY(mt_params_zero_grad(ctx, params)); /* gradients that are written by hand */
    MT_TRY(mt_fill(ctx, n->in.weight->grad, 0.5f));
    MT_TRY(order_norm_and_step(n, c));
    MT_TRY(mt_params_zero_grad(ctx, params));
    MT_TRY(net_pass(n));
    MT_TRY(mt_sync_gradients(ctx, params));
    MT_TRY(order_is_closed(n, SYNCED));
    MT_TRY(net_update(n));
    MT_TRY(mt_params_init(ctx, params, 2)); /* sets the gradients to zero, too */
    MT_TRY(net_pass(n));
    MT_TRY(mt_params_zero_grad(ctx, params)); /* another batch is taken instead */
    MT_TRY(net_pass(n));
    return order_norm_and_step(n, c);
}

static mt_status order_rank(mt_comm *world, void *user) {
    const order_case *c = (const order_case *)user;
    net n;
    mt_status status = net_open(world, c->grid, NULL, &n);
    if (status == MT_SUCCESS) status = order_body(&n, c);
    net_close(&n);
    return status;
}

static void test_order_of_a_step(void **state) {
    static const char data2[] = "the gradient of 'in.weight' is not synchronised: each of the 2 data ranks has a part "
                                "of its sum",
                      data4[] = "the gradient of 'in.weight' is not synchronised: each of the 4 data ranks has a part "
                                "of its sum",
                      partial2[] = "the gradient of 'out.bias' is not synchronised: it is sequence_partial, each of "
                                   "the 2 tensor ranks has a part of its sum",
                      partial4[] = "the gradient of 'out.bias' is not synchronised: it is sequence_partial, each of "
                                   "the 4 tensor ranks has a part of its sum";
    static order_case cases[] = {{{1, 1, 1, 1}, 1, 0, 0, 0, NULL},     {{1, 1, 1, 1}, 1, 1, 1, 1, NULL},
                                 {{2, 1, 1, 1}, 2, 0, 0, 0, NULL},     {{4, 1, 1, 1}, 4, 0, 0, 1, NULL},
                                 {{2, 1, 1, 1}, 2, 1, 0, 0, partial2}, {{4, 1, 1, 1}, 4, 1, 0, 1, partial4},
                                 {{1, 2, 1, 1}, 2, 0, 0, 0, data2},    {{1, 2, 1, 1}, 2, 0, 1, 1, data2},
                                 {{1, 4, 1, 1}, 4, 0, 1, 0, data4},    {{2, 2, 1, 1}, 4, 1, 0, 1, data2}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) test_launch(cases[i].ranks, order_rank, &cases[i]);
}

/* ---- why a gradient has to be synchronised ----------------------------------------------------------------------- */

typedef struct reason_case {
    mt_grid_desc grid;
    int ranks;
    mt_param_desc d;
    int invariant;
    const char *why; /* NULL: nothing has to be synchronised */
} reason_case;

static mt_status reason_body(net *n, const reason_case *c) {
    const int stage = n->r.grid.pp_rank;
    mt_param_desc plain = {.name = stage ? "1.plain" : "plain", .rows = 2, .cols = 3}, d = c->d;
    char with[256];
    mt_param *p;
    if (stage && !d.shared_embedding) d.name = "1.p"; /* only a shared parameter is on several stages */
    MT_TRY(mt_params_add(n->r.ctx, n->r.params, &d, &p));
    MT_TRY(mt_params_add(n->r.ctx, n->r.params, &plain, &p));
    MT_TRY(mt_params_init(n->r.ctx, n->r.params, 1));
    MT_TRY(net_optimizer(n));
    MT_TRY(mt_fill(n->r.ctx, p->grad, 1.0f));
    if (c->why) {
        snprintf(with, sizeof with, "mt_grad_norm: the gradient of '%s' is not synchronised: %s" SYNC_FIRST, d.name,
                 c->why);
        REFUSES(&n->r, with, net_norm(n));
        n->on_device = 1;
        snprintf(with, sizeof with, "mt_step_update: the gradient of '%s' is not synchronised", d.name);
        REFUSES(&n->r, with, net_update(n));
        n->on_device = 0;
        snprintf(with, sizeof with, "mt_optimizer_step: the gradient of '%s' is not synchronised", d.name);
        REFUSES(&n->r, with, net_update(n));
        MT_TRY(mt_sync_gradients(n->r.ctx, n->r.params));
    }
    MT_TRY(net_norm(n));
    return net_update(n);
}

static mt_status reason_rank(mt_comm *world, void *user) {
    const reason_case *c = (const reason_case *)user;
    mt_context_desc where = {.arena_bytes = (size_t)1 << 20, .invariant = c->invariant};
    net n;
    mt_status status = net_open(world, c->grid, &where, &n);
    if (status == MT_SUCCESS) status = reason_body(&n, c);
    net_close(&n);
    return status;
}

static void test_reasons(void **state) {
    static const mt_param_desc words = {
        .name = "p", .rows = 8, .cols = 3, .placement = MT_SPLIT_ROWS, .shared_embedding = 1};
    static const mt_param_desc partial = {.name = "p", .rows = 1, .cols = 3, .sequence_partial = 1};
    static const mt_param_desc rows = {.name = "p", .rows = 8, .cols = 3, .placement = MT_SPLIT_ROWS};
    static const mt_param_desc copies = {
        .name = "p", .rows = 24, .cols = 4, .placement = MT_SPLIT_ROWS, .unit = 8, .copies = 3, .copied = 2};
    static const char ends[] = "it is a shared embedding, the first and the last pipeline stage have parts of its sum";
    static const char lookup[] = "it is a shared embedding, the part of the lookup is not added to that of the head";
    static const char three[] = "it has 3 copies, each of them has a part of its sum";
    reason_case cases[] = {
        {{1, 1, 1, 1}, 1, words, 0, NULL},
        {{1, 1, 1, 1}, 1, words, 2, lookup},
        {{2, 1, 1, 1}, 2, words, 2, lookup},
        {{1, 1, 2, 1}, 2, words, 0, ends},
        {{2, 1, 2, 1}, 4, words, 0, ends},
        {{1, 1, 2, 1}, 2, words, 2, ends},
        {{1, 1, 2, 1}, 2, rows, 0, NULL},
        {{2, 1, 1, 1}, 2, rows, 2, NULL},
        {{1, 1, 1, 1}, 1, partial, 0, NULL},
        {{2, 1, 1, 1}, 2, partial, 0, "it is sequence_partial, each of the 2 tensor ranks has a part of its sum"},
        {{2, 1, 2, 1}, 4, partial, 0, "it is sequence_partial, each of the 2 tensor ranks has a part of its sum"},
        {{1, 1, 1, 1}, 1, copies, 0, three},
        {{2, 1, 1, 1}, 2, copies, 0, three},
        {{1, 2, 1, 1}, 2, rows, 0, "each of the 2 data ranks has a part of its sum"},
        {{2, 2, 1, 1}, 4, rows, 2, "each of the 2 data ranks has a part of its sum"}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) test_launch(cases[i].ranks, reason_rank, &cases[i]);
}

/* ---- bound memory ------------------------------------------------------------------------------------------------ */

/* mt_params_bind does not zero gradients, and mt_params_init after it does. */
static mt_status bound_rank(mt_comm *world, void *user) {
    enum { MOST = 4096 };
    static float values[2][MOST], grads[2][MOST];
    int rank = mt_comm_rank(world);
    mt_params_memory m = {.values = values[rank], .grads = grads[rank], .elements = MOST};
    net n;
    (void)user;
    memset(values[rank], 0, sizeof values[rank]); /* a launch before has trained rank 0 */
    MT_TRY(net_open(world, (mt_grid_desc){.tp = 1}, NULL, &n));
    MT_TRY(net_layers(&n, 0));
    MT_TRY(mt_params_bind(n.r.ctx, n.r.params, &m));
    MT_TRY(net_optimizer(&n));
    MT_TRY(net_forward(&n));
    REFUSES(&n.r, "mt_parallel_linear_backward: the gradient of 'out.weight' " NOT_ZEROED, net_backward_out(&n));
    REFUSES(&n.r, "mt_grad_norm: the gradient of 'in.weight' " NOT_ZEROED, net_norm(&n));
    REFUSES(&n.r, "mt_optimizer_step: the gradient of 'in.weight' " NOT_ZEROED, net_update(&n));
    REFUSES(&n.r, "mt_sync_gradients: the gradient of 'in.weight' " NOT_ZEROED, mt_sync_gradients(n.r.ctx, n.r.params));
    MT_TRY(mt_params_zero_grad(n.r.ctx, n.r.params));
    MT_TRY(net_pass(&n));
    MT_TRY(mt_sync_gradients(n.r.ctx, n.r.params));
    MT_TRY(net_update(&n));
    net_close(&n);
    return MT_SUCCESS;
}

static void test_bound_gradients(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++) test_launch(ranks, bound_rank, NULL);
}

/* ---- sums that overlap with the backward ------------------------------------------------------------------------- */

/* A gradient that is final may not be added to. Afterwards the sums are those of a step without an overlap. */
static mt_status final_body(net *n) {
    mt_context *ctx = n->r.ctx;
    mt_params *params = n->r.params;
    mt_data_parallel_desc share = {.bucket_bytes = 64};
    uint64_t want;
    MT_TRY(mt_params_set_data_parallel(ctx, params, &share));
    MT_TRY(net_layers(n, 0));
    MT_TRY(mt_params_init(ctx, params, 1));
    MT_TRY(net_optimizer(n));
    MT_TRY(net_pass(n));
    MT_TRY(net_pass(n));
    MT_TRY(mt_sync_gradients(ctx, params));
    want = gradient_bits(&n->r);
    MT_TRY(mt_params_zero_grad(ctx, params));
    MT_TRY(net_pass(n));
    MT_TRY(mt_sync_gradients_begin(ctx, params));
    MT_TRY(net_backward_out(n));
    MT_TRY(mt_gradients_final(ctx, n->out.weight, n->out.bias));
    REFUSES(&n->r,
            "mt_parallel_linear_backward: the gradient of 'out.weight' was final already (mt_gradients_final)|call "
            "mt_sync_gradients_begin before the last backward of a step",
            net_backward_out(n));
    MT_TRY(net_backward_in(n));
    MT_TRY(mt_gradients_final(ctx, n->in.weight, n->in.bias));
    REFUSES(&n->r, "mt_parallel_linear_backward: the gradient of 'in.weight' was final", net_backward_in(n));
    if (n->r.grid.dp_size > 1) REFUSES(&n->r, "mt_grad_norm|data ranks has a part of its sum" SYNC_FIRST, net_norm(n));
    MT_TRY(mt_sync_gradients(ctx, params));
    CHECK(gradient_bits(&n->r) == want);
    REFUSES(&n->r, "mt_sync_gradients_begin: |" SYNCED, mt_sync_gradients_begin(ctx, params));
    MT_TRY(net_update(n));
    MT_TRY(mt_params_zero_grad(ctx, params));
    return net_pass(n); /* nothing is final in the next step */
}

static mt_status final_rank(mt_comm *world, void *user) {
    net n;
    mt_status status = net_open(world, (mt_grid_desc){.tp = 1}, NULL, &n);
    (void)user;
    if (status == MT_SUCCESS) status = final_body(&n);
    net_close(&n);
    return status;
}

static void test_final_gradients(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks *= 2) test_launch(ranks, final_rank, NULL);
}

/* ---- micro-batches in invariant mode ----------------------------------------------------------------------------- */

static mt_status accumulate(net *n) { return mt_accumulate_gradients(n->r.ctx, n->r.params); }

/* A micro-batch of which the call is missing. */
static mt_status accumulate_forgotten(net *n) {
    static const char forgotten[] = "has a micro-batch that is not accumulated, after 1 that are|call "
                                    "mt_accumulate_gradients after the backward of each micro-batch, also of the last";
    char with[512];
    MT_TRY(mt_params_zero_grad(n->r.ctx, n->r.params));
    MT_TRY(net_pass(n));
    MT_TRY(accumulate(n));
    MT_TRY(net_pass(n));
    snprintf(with, sizeof with, "mt_sync_gradients: the gradient of 'out.bias' %s", forgotten);
    REFUSES(&n->r, with, mt_sync_gradients(n->r.ctx, n->r.params));
    snprintf(with, sizeof with, "mt_grad_norm: the gradient of 'out.bias' %s", forgotten);
    REFUSES(&n->r, with, net_norm(n));
    snprintf(with, sizeof with, "mt_optimizer_step: the gradient of 'out.bias' %s", forgotten);
    REFUSES(&n->r, with, net_update(n));
    MT_TRY(accumulate(n));
    REFUSES(&n->r,
            "mt_optimizer_step: the gradient of 'in.weight' is not synchronised: its 2 accumulated micro-batches are "
            "not added up" SYNC_FIRST,
            net_update(n));
    MT_TRY(mt_sync_gradients(n->r.ctx, n->r.params));
    REFUSES(&n->r, "mt_accumulate_gradients: the gradient of 'in.weight' " SYNCED, accumulate(n));
    MT_TRY(net_update(n));
    REFUSES(&n->r, "mt_accumulate_gradients: the gradient of 'in.weight' " USED, accumulate(n));
    return MT_SUCCESS;
}

static mt_status accumulate_body(net *n) {
    mt_context *ctx = n->r.ctx;
    mt_params *params = n->r.params;
    MT_TRY(net_layers(n, n->r.grid.tp_size > 1));
    MT_TRY(mt_params_init(ctx, params, 1));
    MT_TRY(net_optimizer(n));
    MT_TRY(accumulate_forgotten(n));
    MT_TRY(mt_params_zero_grad(ctx, params)); /* a single micro-batch does not need the call */
    MT_TRY(net_pass(n));
    MT_TRY(mt_sync_gradients(ctx, params));
    MT_TRY(net_update(n));
    MT_TRY(mt_params_zero_grad(ctx, params)); /* layers that are used twice in a micro-batch */
    for (int i = 0; i < 2; i++) {
        MT_TRY(net_pass(n));
        MT_TRY(net_pass(n));
        MT_TRY(accumulate(n));
    }
    MT_TRY(mt_sync_gradients(ctx, params));
    MT_TRY(net_update(n));
    MT_TRY(mt_params_zero_grad(ctx, params)); /* a backward that is refused adds nothing */
    MT_TRY(net_pass(n));
    MT_TRY(accumulate(n));
    CHECK(mt_parallel_linear_backward(ctx, &n->out, mt_tensor_rows(n->dy, 0, 1), n->dh, &n->out_saved) == MT_ERR_SHAPE);
    MT_TRY(mt_sync_gradients(ctx, params));
    return net_update(n);
}

static mt_status accumulate_rank(mt_comm *world, void *user) {
    mt_context_desc where = {.arena_bytes = (size_t)4 << 20, .invariant = 2, .invariant_data = 4};
    net n;
    mt_status status = net_open(world, *(const mt_grid_desc *)user, &where, &n);
    if (status == MT_SUCCESS) status = accumulate_body(&n);
    net_close(&n);
    return status;
}

static void test_accumulated_gradients(void **state) {
    static mt_grid_desc grids[] = {{1, 1, 1, 1}, {2, 1, 1, 1}, {1, 2, 1, 1}, {2, 2, 1, 1}};
    (void)state;
    for (size_t i = 0; i < sizeof grids / sizeof *grids; i++)
        test_launch(grids[i].tp * grids[i].dp, accumulate_rank, &grids[i]);
}

/* ---- pipelines --------------------------------------------------------------------------------------------------- */

typedef struct pipe_case {
    int stages, invariant, accumulates;
} pipe_case;

typedef struct pipeline {
    net n;
    const pipe_case *c;
} pipeline;

static mt_status pipe_forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    net *n = &((pipeline *)user)->n;
    (void)a;
    if (input.data) MT_TRY(mt_copy(ctx, input, n->x));
    MT_TRY(net_forward(n));
    return output.data ? mt_copy(ctx, n->y, output) : MT_SUCCESS;
}

/* Adds to its gradients twice. */
static mt_status pipe_backward(mt_context *ctx, void *user, const mt_action *a, mt_tensor doutput, mt_tensor dinput) {
    pipeline *p = (pipeline *)user;
    net *n = &p->n;
    (void)a;
    if (doutput.data) MT_TRY(mt_copy(ctx, doutput, n->dy));
    for (int i = 0; i < 2; i++) {
        MT_TRY(net_backward_out(n));
        MT_TRY(net_backward_in(n));
    }
    if (dinput.data) MT_TRY(mt_copy(ctx, n->dx, dinput));
    return p->c->accumulates ? accumulate(n) : MT_SUCCESS;
}

static mt_status pipe_run(pipeline *p, int micro_batches) {
    mt_pipeline_stage stage = {
        .rows = TOKENS, .cols = WIDE, .forward = pipe_forward, .backward = pipe_backward, .user = p};
    const mt_grid *g = &p->n.r.grid;
    mt_action actions[24];
    int count;
    MT_TRY(mt_pipeline_schedule(MT_SCHEDULE_1F1B, g->pp_size, g->pp_rank, micro_batches, actions, 24, &count));
    return mt_pipeline_run(p->n.r.ctx, g, &stage, actions, count);
}

/* The last stage is the first to run a second backward. The others wait for it, until it ends. */
static mt_status pipe_body(pipeline *p) {
    net *n = &p->n;
    mt_status got;
    MT_TRY(net_layers(n, 0));
    MT_TRY(mt_params_init(n->r.ctx, n->r.params, 1));
    MT_TRY(net_optimizer(n));
    for (int i = 0; i < 2; i++) { /* one micro-batch in each step */
        MT_TRY(pipe_run(p, 1));
        MT_TRY(mt_sync_gradients(n->r.ctx, n->r.params));
        MT_TRY(net_update(n));
        MT_TRY(mt_params_zero_grad(n->r.ctx, n->r.params));
    }
    got = pipe_run(p, 2);
    if (!p->c->accumulates && p->c->invariant) {
        int last = n->r.grid.pp_rank + 1 == n->r.grid.pp_size;
        CHECK(last ? got == MT_ERR_ARGUMENT : got == MT_ERR_PEER || got == MT_ERR_TIMEOUT);
        if (last)
            CHECK(test_has_words(mt_last_error(n->r.ctx),
                                 "mt_parallel_linear_backward: the gradient of 'out.bias' has another micro-batch "
                                 "that is not accumulated|mt_accumulate_gradients after the backward of each"));
        return MT_SUCCESS;
    }
    MT_TRY(got);
    MT_TRY(mt_sync_gradients(n->r.ctx, n->r.params));
    return net_update(n);
}

static mt_status pipe_rank(mt_comm *world, void *user) {
    const pipe_case *c = (const pipe_case *)user;
    mt_context_desc where = {.arena_bytes = (size_t)4 << 20, .invariant = c->invariant};
    pipeline p;
    mt_status status = net_open(world, (mt_grid_desc){.pp = c->stages}, &where, &p.n);
    p.c = c;
    if (status == MT_SUCCESS) status = pipe_body(&p);
    net_close(&p.n);
    return status;
}

static void test_pipelines(void **state) {
    static pipe_case cases[] = {{1, 0, 0}, {1, 2, 1}, {1, 2, 0}, {2, 0, 0}, {2, 2, 1}, {2, 2, 0}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) test_launch(cases[i].stages, pipe_rank, &cases[i]);
}

/* ---- models ------------------------------------------------------------------------------------------------------ */

/* A GPT or a BERT, with one call for what they have in common. */
typedef struct model {
    test_rank r;
    int is_bert;
    mt_gpt gpt;
    mt_bert bert;
    mt_gpt_saved saved[2];
    mt_bert_saved bert_saved[2];
    int32_t ids[SEQ], order[1];
} model;

static mt_status model_create(model *m) {
    mt_transformer_layer_desc layer = {.hidden = 16, .heads = 4};
    mt_gpt_desc d = {.vocab = 21, .layers = 2, .max_seq = SEQ, .layer = layer};
    mt_bert_desc b = {.vocab = 21, .layers = 2, .max_seq = SEQ, .layer = layer};
    for (int i = 0; i < SEQ; i++) m->ids[i] = (i * 5 + m->r.grid.dp_rank) % 21;
    if (m->is_bert) MT_TRY(mt_bert_create(m->r.ctx, m->r.params, &b, &m->bert));
    else MT_TRY(mt_gpt_create(m->r.ctx, m->r.params, &d, &m->gpt));
    for (int i = 0; i < 2; i++) {
        if (m->is_bert) MT_TRY(mt_bert_saved_create(m->r.ctx, &m->bert, &m->bert_saved[i]));
        else MT_TRY(mt_gpt_saved_create(m->r.ctx, &m->gpt, &m->saved[i]));
    }
    return mt_params_init(m->r.ctx, m->r.params, 1);
}

static mt_status model_forward(model *m, int i, int64_t first) {
    mt_batch batch = {.sequences = 1, .seq = SEQ, .first_sequence = first};
    mt_tensor loss = test_tensor(&m->r, 1, SEQ, 0.0f), sop = test_tensor(&m->r, 1, 1, 0.0f);
    if (m->is_bert)
        return mt_bert_forward(m->r.ctx, &m->bert, &batch, m->ids, m->ids, m->order, loss, sop, &m->bert_saved[i]);
    return mt_gpt_forward(m->r.ctx, &m->gpt, &batch, m->ids, m->ids, loss, &m->saved[i]);
}

static mt_status model_backward(model *m, int i) {
    if (m->is_bert) return mt_bert_backward(m->r.ctx, &m->bert, 1.0f, 1.0f, &m->bert_saved[i]);
    return mt_gpt_backward(m->r.ctx, &m->gpt, 1.0f, &m->saved[i]);
}

/* Two micro-batches. With `forgets`, the call between them is missing at first, and with `closed` there is a backward
   after mt_sync_gradients. Both must be refused, and must not change the gradients of the right step. */
static mt_status model_step(model *m, int forgets, int closed, uint64_t *bits) {
    const char *name = m->is_bert ? "mt_bert_backward" : "mt_gpt_backward";
    mt_context *ctx = m->r.ctx;
    mt_params *params = m->r.params;
    char with[256];
    MT_TRY(model_forward(m, 0, 4));
    MT_TRY(model_forward(m, 1, 5));
    if (closed) {
        MT_TRY(mt_sync_gradients(ctx, params));
        snprintf(with, sizeof with, "%s: the gradient of '%s.layers.0.self_attention.linear_proj.weight' " SYNCED, name,
                 m->is_bert ? "encoder" : "decoder");
        REFUSES(&m->r, with, model_backward(m, 0));
        MT_TRY(mt_params_zero_grad(ctx, params));
    }
    MT_TRY(model_backward(m, 0));
    if (forgets && mt_context_invariant(ctx)) {
        snprintf(
            with, sizeof with,
            "%s: the gradient of|has another micro-batch that is not accumulated|call mt_accumulate_gradients after",
            name);
        REFUSES(&m->r, with, model_backward(m, 1));
    }
    MT_TRY(mt_accumulate_gradients(ctx, params));
    MT_TRY(model_backward(m, 1));
    MT_TRY(mt_accumulate_gradients(ctx, params));
    MT_TRY(mt_sync_gradients(ctx, params));
    *bits = gradient_bits(&m->r);
    mt_arena_release(ctx, 0);
    return mt_params_zero_grad(ctx, params);
}

static mt_status model_body(model *m) {
    uint64_t want, got;
    MT_TRY(model_create(m));
    MT_TRY(model_step(m, 0, 0, &want));
    for (int i = 1; i < 4; i++) {
        MT_TRY(model_step(m, i & 1, i >> 1, &got));
        CHECK(got == want);
    }
    for (int i = 0; i < 2; i++) { /* the same sequences twice in one micro-batch */
        MT_TRY(model_forward(m, 0, 3 + i));
        MT_TRY(model_forward(m, 1, 3 + i));
        MT_TRY(model_backward(m, 0));
        MT_TRY(model_backward(m, 1));
        MT_TRY(mt_accumulate_gradients(m->r.ctx, m->r.params));
    }
    return mt_sync_gradients(m->r.ctx, m->r.params);
}

typedef struct model_case {
    mt_grid_desc grid;
    int invariant, is_bert;
} model_case;

static mt_status model_rank(mt_comm *world, void *user) {
    const model_case *c = (const model_case *)user;
    mt_context_desc where = {.arena_bytes = (size_t)4 << 20, .invariant = c->invariant, .invariant_data = 4};
    model m;
    mt_status status;
    memset(&m, 0, sizeof m);
    if (!c->invariant) where.invariant_data = 0;
    m.is_bert = c->is_bert;
    status = test_rank_open(world, c->grid, &where, &m.r);
    if (status == MT_SUCCESS) status = model_body(&m);
    for (int i = 0; i < 2; i++) mt_gpt_saved_destroy(&m.saved[i]);
    for (int i = 0; i < 2; i++) mt_bert_saved_destroy(&m.bert_saved[i]);
    test_rank_close(&m.r);
    return status;
}

static void test_models(void **state) {
    static const mt_grid_desc grids[] = {{1, 1, 1, 1}, {2, 1, 1, 1}, {1, 2, 1, 1}, {2, 2, 1, 1}};
    (void)state;
    for (int i = 0; i < 16; i++) {
        model_case c = {grids[i / 4], i & 1 ? 2 : 0, i >> 1 & 1};
        test_launch(c.grid.tp * c.grid.dp, model_rank, &c);
    }
}

/* ---- every layer and block --------------------------------------------------------------------------------------- */

enum {
    COLUMN,
    ROW,
    COLUMNS,
    ROWS,
    ACTIVATION,
    ROW_AND_ACTIVATION,
    NORM,
    HEADS_NORM,
    EMBEDDING,
    MLP,
    ATTENTION,
    CROSS,
    LAYER,
    LANGUAGE_MODEL,
    KINDS
};

/* One of each; `kind` says which is created. */
typedef struct zoo {
    test_rank r;
    int kind;
    mt_column_parallel_linear column[2];
    mt_row_parallel_linear row[2];
    mt_norm_layer norm;
    mt_qk_norm heads_norm;
    mt_vocab_parallel_embedding embedding;
    mt_mlp mlp;
    mt_self_attention attention;
    mt_cross_attention cross;
    mt_transformer_layer layer;
    mt_language_model model;
    mt_linear_saved linear_saved[2];
    mt_norm_saved norm_saved;
    mt_qk_norm_saved heads_saved;
    mt_mlp_saved mlp_saved;
    mt_self_attention_saved attention_saved;
    mt_cross_attention_saved cross_saved;
    mt_transformer_layer_saved layer_saved;
    mt_language_model_saved model_saved;
    mt_batch batch;
    mt_tensor x, y, h[2], d[2], dx, dh[2];
    int32_t ids[TOKENS];
} zoo;

static mt_status zoo_linear(zoo *z) {
    mt_linear_desc c = {.in_features = 16, .out_features = 16, .skip_bias_add = z->kind >= ACTIVATION};
    mt_linear_desc r = {.in_features = 16, .out_features = 16, .input_is_parallel = 1};
    for (int i = 0; i < 2; i++) {
        MT_TRY(mt_column_parallel_linear_create(z->r.ctx, z->r.params, i ? "column.1" : "column.0", &c, &z->column[i]));
        MT_TRY(mt_row_parallel_linear_create(z->r.ctx, z->r.params, i ? "row.1" : "row.0", &r, &z->row[i]));
    }
    return MT_SUCCESS;
}

static mt_status zoo_create(zoo *z) {
    mt_context *ctx = z->r.ctx;
    mt_params *params = z->r.params;
    mt_norm_layer_desc norm = {.features = 16};
    mt_linear_desc qkv = {.in_features = 16, .out_features = 48, .unit = 12};
    mt_norm_layer_desc head = {.features = 4};
    mt_embedding_desc embedding = {.vocab = 21, .features = 16};
    mt_mlp_desc mlp = {.hidden = 16};
    mt_self_attention_desc attention = {.hidden = 16, .heads = 4};
    mt_cross_attention_desc cross = {.hidden = 16, .heads = 4};
    mt_transformer_layer_desc layer = {.hidden = 16, .heads = 4};
    mt_language_model_desc model = {.vocab = 21, .layers = 1, .max_seq = SEQ, .layer = layer};
    switch (z->kind) {
    case NORM: return mt_norm_layer_create(ctx, params, "norm", &norm, &z->norm);
    case HEADS_NORM:
        MT_TRY(mt_column_parallel_linear_create(ctx, params, "qkv", &qkv, &z->column[0]));
        return mt_qk_norm_create(ctx, params, "heads", &head, &z->column[0], &z->heads_norm);
    case EMBEDDING: return mt_vocab_parallel_embedding_create(ctx, params, "words", &embedding, &z->embedding);
    case MLP: return mt_mlp_create(ctx, params, "mlp", &mlp, &z->mlp);
    case ATTENTION: return mt_self_attention_create(ctx, params, "attention", &attention, &z->attention);
    case CROSS: return mt_cross_attention_create(ctx, params, "cross", &cross, &z->cross);
    case LAYER: return mt_transformer_layer_create(ctx, params, "layer", &layer, &z->layer);
    case LANGUAGE_MODEL:
        MT_TRY(mt_language_model_create(ctx, params, &model, &z->model));
        return mt_language_model_saved_create(ctx, &z->model, &z->model_saved);
    default: return zoo_linear(z);
    }
}

static mt_status zoo_forward(zoo *z) {
    mt_context *ctx = z->r.ctx;
    mt_linear_saved *s = z->linear_saved;
    switch (z->kind) {
    case COLUMN: return mt_parallel_linear_forward(ctx, &z->column[0], z->x, z->h[0], s);
    case ROW: return mt_parallel_linear_forward(ctx, &z->row[0], z->h[0], z->y, s);
    case COLUMNS: return mt_parallel_linear_forward_shared(ctx, z->column, 2, &z->x, z->h, s);
    case ROWS: return mt_parallel_linear_forward_shared(ctx, z->row, 2, z->h, &z->y, s);
    case ACTIVATION: return MT_SUCCESS;
    case ROW_AND_ACTIVATION: return mt_parallel_linear_forward(ctx, &z->row[0], z->h[0], z->y, s);
    case NORM: return mt_norm_layer_forward(ctx, &z->norm, z->x, z->y, &z->norm_saved);
    case HEADS_NORM: return mt_qk_norm_forward(ctx, &z->heads_norm, z->h[1], &z->heads_saved);
    case EMBEDDING: return mt_vocab_parallel_embedding_forward(ctx, &z->embedding, z->ids, TOKENS, z->y);
    case MLP: return mt_mlp_forward(ctx, &z->mlp, z->x, z->y, &z->mlp_saved);
    case ATTENTION: return mt_self_attention_forward(ctx, &z->attention, &z->batch, z->x, z->y, &z->attention_saved);
    case CROSS:
        return mt_cross_attention_forward(ctx, &z->cross, &z->batch, z->x, &z->batch, z->x, z->y, &z->cross_saved);
    case LAYER: return mt_transformer_layer_forward(ctx, &z->layer, &z->batch, z->x, z->y, &z->layer_saved);
    default: return mt_language_model_forward(ctx, &z->model, &z->batch, z->ids, mt_none(), z->y, &z->model_saved);
    }
}

static mt_status zoo_backward(zoo *z) {
    mt_context *ctx = z->r.ctx;
    const mt_linear_saved *s = z->linear_saved;
    mt_tensor none = mt_none();
    switch (z->kind) {
    case COLUMN: return mt_parallel_linear_backward(ctx, &z->column[0], z->d[0], z->dx, s);
    case ROW: return mt_parallel_linear_backward(ctx, &z->row[0], z->y, z->dh[0], s);
    case COLUMNS: return mt_parallel_linear_backward_shared(ctx, z->column, 2, z->d, &z->dx, s);
    case ROWS: return mt_parallel_linear_backward_shared(ctx, z->row, 2, &z->y, z->dh, s);
    case ACTIVATION:
        return mt_column_parallel_activation_backward(ctx, &z->column[0], MT_GELU_TANH, z->h[0], z->d[0], z->dh[0]);
    case ROW_AND_ACTIVATION:
        return mt_row_parallel_linear_activation_backward(ctx, &z->row[0], &z->column[0], MT_GELU_TANH, z->y, z->h[0],
                                                          z->dh[0], s);
    case NORM: return mt_norm_layer_backward(ctx, &z->norm, z->y, none, z->dx, &z->norm_saved);
    case HEADS_NORM: return mt_qk_norm_backward(ctx, &z->heads_norm, z->dh[1], &z->heads_saved);
    case EMBEDDING: return mt_vocab_parallel_embedding_backward(ctx, &z->embedding, z->ids, TOKENS, z->y);
    case MLP: return mt_mlp_backward(ctx, &z->mlp, z->y, z->dx, &z->mlp_saved);
    case ATTENTION: return mt_self_attention_backward(ctx, &z->attention, z->y, z->dx, &z->attention_saved);
    case CROSS: return mt_cross_attention_backward(ctx, &z->cross, z->y, z->dx, none, &z->cross_saved);
    case LAYER: return mt_transformer_layer_backward(ctx, &z->layer, z->y, z->dx, &z->layer_saved);
    default: return mt_language_model_backward(ctx, &z->model, z->y, none, &z->model_saved);
    }
}

static uint64_t zoo_bits(const zoo *z) {
    uint64_t hash = add_tensor(add_tensor(1, z->dx), z->y);
    for (int i = 0; i < 2; i++) hash = add_tensor(add_tensor(add_tensor(hash, z->h[i]), z->d[i]), z->dh[i]);
    return hash;
}

static mt_status zoo_body(zoo *z, const char *name) {
    test_rank *r = &z->r;
    int64_t local = 16 / r->grid.tp_size;
    uint64_t zeros, before;
    char with[256];
    z->batch = (mt_batch){.sequences = TOKENS / SEQ, .seq = SEQ};
    z->x = mt_tensor_f32(test_noise(r, TOKENS * 16, 1, 1.0f), TOKENS, 16);
    z->y = test_tensor(r, TOKENS, 16, 0.0f);
    z->dx = test_tensor(r, TOKENS, 16, 7.0f);
    for (int i = 0; i < 2; i++) {
        int64_t cols = i == 1 && z->kind == HEADS_NORM ? 3 * local : local;
        z->h[i] = mt_tensor_f32(test_noise(r, TOKENS * cols, 2, 1.0f), TOKENS, cols);
        z->d[i] = mt_tensor_f32(test_noise(r, TOKENS * cols, 3, 1.0f), TOKENS, cols);
        z->dh[i] = test_tensor(r, TOKENS, cols, 7.0f);
    }
    MT_TRY(zoo_create(z));
    MT_TRY(mt_params_init(r->ctx, r->params, 1));
    zeros = gradient_bits(r);
    MT_TRY(zoo_forward(z));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    snprintf(with, sizeof with, "%s: the gradient of '|" SYNCED, name);
    before = zoo_bits(z);
    for (int i = 0; i < 2; i++) REFUSES(r, with, zoo_backward(z));
    CHECK(zoo_bits(z) == before);
    MT_TRY(mt_params_zero_grad(r->ctx, r->params));
    if (z->kind >= MLP) MT_TRY(mt_copy(r->ctx, z->x, z->y)); /* a gradient that is not all zeros */
    MT_TRY(zoo_backward(z));
    CHECK(gradient_bits(r) != zeros);
    return MT_SUCCESS;
}

static mt_status zoo_rank(mt_comm *world, void *user) {
    static const char *const names[KINDS] = {"mt_parallel_linear_backward",
                                             "mt_parallel_linear_backward",
                                             "mt_parallel_linear_backward_shared",
                                             "mt_parallel_linear_backward_shared",
                                             "mt_column_parallel_activation_backward",
                                             "mt_row_parallel_linear_activation_backward",
                                             "mt_norm_layer_backward",
                                             "mt_norm_layer_backward",
                                             "mt_vocab_parallel_embedding_backward",
                                             "mt_mlp_backward",
                                             "mt_self_attention_backward",
                                             "mt_cross_attention_backward",
                                             "mt_transformer_layer_backward",
                                             "mt_language_model_backward"};
    int kind = *(const int *)user;
    mt_status status;
    zoo z;
    memset(&z, 0, sizeof z);
    z.kind = kind;
    for (int i = 0; i < TOKENS; i++) z.ids[i] = i * 5 % 21;
    status = test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, NULL, &z.r);
    if (status == MT_SUCCESS) status = zoo_body(&z, names[kind]);
    mt_language_model_saved_destroy(&z.model_saved);
    test_rank_close(&z.r);
    return status;
}

static void test_every_layer(void **state) {
    (void)state;
    for (int kind = 0; kind < KINDS; kind++)
        for (int ranks = 1; ranks <= 4; ranks *= 2) test_launch(ranks, zoo_rank, &kind);
}

/* ---- CUDA graphs ------------------------------------------------------------------------------------------------- */

/* A graph has a part of a step, from `first` to `last` of zeroing, backward, sum and step. The other calls are made in
   each step, and a launch does the rest. */
static mt_status graph_step(net *n, int first, int last) {
    for (int i = first; i <= last; i++)
        MT_TRY(i == 0   ? mt_params_zero_grad(n->r.ctx, n->r.params)
               : i == 1 ? net_pass(n)
               : i == 2 ? mt_sync_gradients(n->r.ctx, n->r.params)
                        : net_update(n));
    return MT_SUCCESS;
}

static void test_graphs(void **state) {
    mt_context_desc paper = {.device = MT_DEVICE_META};
    (void)state;
    for (int first = 0; first < 4; first++)
        for (int last = first; last < 4; last++) {
            mt_graph *graph = NULL;
            mt_comm *world = NULL;
            net n;
            memset(&n, 0, sizeof n);
            test_paper_rank(2, 1, (mt_grid_desc){1, 2, 1, 1}, &paper, &n.r);
            world = n.r.world;
            n.on_device = 1;
            assert_false(mt_context_records(n.r.ctx) || mt_context_records(NULL));
            ASSERT_STATUS(n.r.ctx, MT_SUCCESS, net_layers(&n, 0));
            ASSERT_STATUS(n.r.ctx, MT_SUCCESS, mt_params_init(n.r.ctx, n.r.params, 1));
            ASSERT_STATUS(n.r.ctx, MT_SUCCESS, net_optimizer(&n));
            ASSERT_STATUS(n.r.ctx, MT_SUCCESS, graph_step(&n, 0, 1));
            REFUSED(n.r.ctx, MT_ERR_ARGUMENT, "mt_step_update|data ranks has a part of its sum" SYNC_FIRST,
                    net_update(&n));
            ASSERT_STATUS(n.r.ctx, MT_SUCCESS, graph_step(&n, 2, 3));
            REFUSED(n.r.ctx, MT_ERR_ARGUMENT, "mt_step_update|" USED, net_update(&n));
            ASSERT_STATUS(n.r.ctx, MT_SUCCESS, mt_graph_begin(n.r.ctx, NULL));
            assert_true(mt_context_records(n.r.ctx));
            ASSERT_STATUS(n.r.ctx, MT_SUCCESS, graph_step(&n, first, last));
            ASSERT_STATUS(n.r.ctx, MT_SUCCESS, mt_graph_end(n.r.ctx, &graph));
            for (int step = 0; step < 2; step++) {
                ASSERT_STATUS(n.r.ctx, MT_SUCCESS, graph_step(&n, 0, first - 1));
                ASSERT_STATUS(n.r.ctx, MT_SUCCESS, mt_graph_launch(n.r.ctx, graph));
                ASSERT_STATUS(n.r.ctx, MT_SUCCESS, graph_step(&n, last + 1, 3));
                ASSERT_STATUS(n.r.ctx, MT_SUCCESS, net_norm(&n));
            }
            mt_graph_destroy(n.r.ctx, graph);
            net_close(&n);
            mt_comm_destroy(world);
        }
}

/* ---- the checks for authors of blocks ---------------------------------------------------------------------------- */

static void test_checks(void **state) {
    mt_param_desc d = {.name = "p", .rows = 2, .cols = 3};
    mt_context_desc where = {.arena_bytes = 1 << 16, .invariant = 2};
    mt_param *p, loose;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, &where, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &d, &p));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    memset(&loose, 0, sizeof loose);
    assert_int_equal(mt_check_gradient(NULL, "f", p), MT_ERR_ARGUMENT);
    assert_int_equal(mt_check_micro_batch(NULL, "f", p, 0), MT_ERR_ARGUMENT);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_gradient(r.ctx, "f", NULL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_micro_batch(r.ctx, "f", NULL, 0));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_micro_batch(r.ctx, "f", &loose, 0));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "f: the gradient of '' is NULL", mt_check_gradient(r.ctx, "f", &loose));
    loose.grad = p->grad;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_gradient(r.ctx, "f", &loose)); /* of a layer of tensors: no state */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_gradient(r.ctx, "f", p));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_micro_batch(r.ctx, "f", p, 0));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_micro_batch(r.ctx, "f", p, 1)); /* nothing was added */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sync_gradients(r.ctx, r.params));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "f: the gradient of 'p' " SYNCED, mt_check_gradient(r.ctx, "f", p));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_gradient(r.ctx, "f", &loose));
    test_paper_rank_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order_of_a_step),
        cmocka_unit_test(test_reasons),
        cmocka_unit_test(test_bound_gradients),
        cmocka_unit_test(test_final_gradients),
        cmocka_unit_test(test_accumulated_gradients),
        cmocka_unit_test(test_pipelines),
        cmocka_unit_test(test_models),
        cmocka_unit_test(test_every_layer),
        cmocka_unit_test(test_graphs),
        cmocka_unit_test(test_checks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
