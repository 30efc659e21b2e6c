/* test_context.c - context ranks, each of which has a part of every sequence: embedding, positions, MLP and loss on
   every split of the ranks are those of one rank. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test_ranks.h"

enum { VOCAB = 23, HIDDEN = 16, SEQ = 16, SEQUENCES = 4, STEPS = 3, TOKENS = SEQ * SEQUENCES, WEIGHTS = 1 << 12 };

/* ---- a model without attention ----------------------------------------------------------------------------------- */

typedef struct found {
    float loss[STEPS], norm[STEPS], weights[WEIGHTS], grads[WEIGHTS]; /* grads: of the first step */
    int64_t count;
} found;

typedef struct split {
    int tp, cp, dp;
    int sequence_parallel, zigzag, sharded, check;
    int as_data; /* 1: the context ranks are data ranks to the grid, with the same tokens */
    found *out;
} split;

typedef struct model {
    test_rank r;
    const split *s;
    mt_vocab_parallel_embedding words;
    mt_param *positions;
    mt_norm_layer norm;
    mt_mlp mlp;
    mt_column_parallel_linear head;
    mt_optimizer adam;
    int64_t tokens;                                       /* of this rank's sequences */
    int32_t ids[TOKENS], targets[TOKENS], places[TOKENS]; /* of this rank */
} model;

/* Token `at` of a sequence. */
static int32_t token(int sequence, int at) { return (5 * sequence + at * at + at / 3) % VOCAB; }

/* The tokens that count, half of all: ranks have other numbers of them, and some of 4 context ranks have none. */
static int counts(int sequence, int at) { return sequence % 2 ? at % 5 != 0 : at < SEQ / 4; }

/* Fills in the rows of this rank: for each of its sequences one part, or chunks number c and 2 cp - 1 - c. The next
   token is the target, also where another rank has it. */
static void fill_rows(model *m) {
    const split *s = m->s;
    const int rank = mt_comm_rank(m->r.grid.dp_cp), c = rank % s->cp, d = rank / s->cp;
    const int chunks = s->zigzag ? 2 : 1, length = SEQ / s->cp / chunks;
    m->tokens = 0;
    for (int sequence = d * SEQUENCES / s->dp; sequence < (d + 1) * SEQUENCES / s->dp; sequence++)
        for (int chunk = 0; chunk < chunks; chunk++)
            for (int i = 0; i < length; i++, m->tokens++) {
                int at = (chunk ? 2 * s->cp - 1 - c : c) * length + i;
                m->ids[m->tokens] = token(sequence, at);
                m->targets[m->tokens] = counts(sequence, at) ? token(sequence, at + 1) : -100;
                m->places[m->tokens] = at;
            }
}

static mt_status model_create(model *m) {
    const int sp = m->s->sequence_parallel;
    const mt_data_parallel_desc share = {.sharded_optimizer = m->s->sharded, .bucket_bytes = 2048};
    mt_context *ctx = m->r.ctx;
    mt_params *params = m->r.params;
    MT_TRY(mt_params_set_data_parallel(ctx, params, &share));
    MT_TRY(mt_vocab_parallel_embedding_create(
        ctx, params, "words", &(mt_embedding_desc){.vocab = VOCAB, .features = HIDDEN, .sequence_parallel = sp},
        &m->words));
    MT_TRY(mt_params_add(
        ctx, params,
        &(mt_param_desc){.name = "positions", .rows = SEQ, .cols = HIDDEN, .init_std = 0.1f, .sequence_partial = sp},
        &m->positions));
    MT_TRY(mt_norm_layer_create(ctx, params, "norm", &(mt_norm_layer_desc){.features = HIDDEN, .sequence_parallel = sp},
                                &m->norm));
    MT_TRY(mt_mlp_create(ctx, params, "mlp", &(mt_mlp_desc){.hidden = HIDDEN, .sequence_parallel = sp}, &m->mlp));
    MT_TRY(mt_column_parallel_linear_create(
        ctx, params, "head",
        &(mt_linear_desc){.in_features = HIDDEN, .out_features = VOCAB, .no_bias = 1, .sequence_parallel = sp},
        &m->head));
    MT_TRY(mt_params_init(ctx, params, 1234));
    MT_TRY(disturb_params(&m->r, 0.1f));
    return mt_optimizer_create(ctx, params, NULL, &m->adam);
}

/* Returns the tokens that count, on all data ranks. */
static mt_status counted(model *m, float *total) {
    *total = 0;
    for (int64_t i = 0; i < m->tokens; i++) *total += m->targets[i] >= 0;
    return mt_all_reduce(m->r.ctx, m->r.grid.dp_cp, total, total, 1, MT_F32, MT_SUM);
}

/* loss: the mean over the tokens that count. */
static mt_status forward_backward(model *m, float *loss) {
    mt_context *ctx = m->r.ctx;
    const mt_grid *g = &m->r.grid;
    const int64_t rows = m->s->sequence_parallel ? m->tokens / g->tp_size : m->tokens;
    const int32_t *places = m->places + (m->s->sequence_parallel ? g->tp_rank * rows : 0);
    const mt_tensor of_places = mt_tensor_make(places, MT_I32, rows, 1);
    mt_tensor x, n, y, logits, losses, sum, dy, dn;
    mt_norm_saved norm;
    mt_mlp_saved mlp;
    mt_linear_saved head;
    float total;
    mt_arena_request memory[] = {{&x, MT_F32, rows, HIDDEN},  {&n, MT_F32, rows, HIDDEN},
                                 {&y, MT_F32, rows, HIDDEN},  {&dy, MT_F32, rows, HIDDEN},
                                 {&dn, MT_F32, rows, HIDDEN}, {&logits, MT_F32, m->tokens, m->head.local_features},
                                 {&sum, MT_F32, 1, 1},        {&losses, MT_F32, 1, m->tokens}};
    MT_TRY(mt_arena_tensors(ctx, memory, 8));
    MT_TRY(counted(m, &total));
    MT_TRY(mt_vocab_parallel_embedding_forward(ctx, &m->words, m->ids, m->tokens, x));
    if (m->s->as_data == 0) MT_TRY(mt_declare(ctx, g->cp, of_places, MT_SPLIT_ROWS));
    MT_TRY(mt_embedding_forward(ctx, m->positions->value, 0, places, 1.0f, x));
    MT_TRY(mt_norm_layer_forward(ctx, &m->norm, x, n, &norm));
    MT_TRY(mt_mlp_forward(ctx, &m->mlp, n, y, &mlp));
    MT_TRY(mt_add(ctx, x, y, y));
    MT_TRY(mt_parallel_linear_forward(ctx, &m->head, y, logits, &head));
    MT_TRY(mt_vocab_parallel_cross_entropy_forward_backward(ctx, g->tp, &(mt_cross_entropy_desc){.vocab = VOCAB},
                                                            logits, m->targets, mt_none(), 1.0f / total, losses));
    MT_TRY(mt_fill(ctx, sum, 0));
    MT_TRY(mt_sum(ctx, losses, sum));
    MT_TRY(mt_all_reduce(ctx, g->dp_cp, sum.data, sum.data, 1, MT_F32, MT_SUM));
    MT_TRY(mt_download(ctx, sum, loss));
    *loss /= total;
    MT_TRY(mt_parallel_linear_backward(ctx, &m->head, logits, dy, &head));
    MT_TRY(mt_mlp_backward(ctx, &m->mlp, dy, dn, &mlp));
    MT_TRY(mt_norm_layer_backward(ctx, &m->norm, dn, dy, dn, &norm));
    MT_TRY(mt_embedding_backward(ctx, dn, 0, places, m->positions->grad));
    return mt_vocab_parallel_embedding_backward(ctx, &m->words, m->ids, m->tokens, dn);
}

static mt_status model_step(model *m, int step) {
    mt_context *ctx = m->r.ctx;
    const int rank = mt_comm_rank(m->r.world);
    size_t mark = mt_arena_mark(ctx);
    float loss, norm, *grads = test_floats(&m->r, WEIGHTS, 0);
    int64_t count;
    fill_rows(m);
    MT_TRY(mt_params_zero_grad(ctx, m->r.params));
    MT_TRY(mt_sync_gradients_begin(ctx, m->r.params));
    MT_TRY(forward_backward(m, &loss));
    mt_arena_release(ctx, mark);
    MT_TRY(mt_sync_gradients(ctx, m->r.params));
    MT_TRY(mt_grad_norm(ctx, m->r.params, &norm));
    if (rank == 0) m->s->out->loss[step] = loss, m->s->out->norm[step] = norm;
    if (step == 0) MT_TRY(mt_gather_gradients(ctx, m->r.params));
    if (step == 0) MT_TRY(gather_grads(&m->r, grads, WEIGHTS, &count));
    if (step == 0 && rank == 0) memcpy(m->s->out->grads, grads, sizeof m->s->out->grads);
    return mt_optimizer_step(ctx, &m->adam, 0.01f, mt_clip_coefficient(norm, 0.5f));
}

static mt_status keep_weights(model *m) {
    found *out = m->s->out;
    int64_t n = 0;
    for (int i = 0; i < mt_params_count(m->r.params); i++) {
        const mt_param *p = mt_params_at(m->r.params, i);
        float *all = test_floats(&m->r, p->desc.rows * p->desc.cols, 0);
        MT_TRY(mt_param_gather(m->r.ctx, m->r.params, p, p->value, all));
        CHECK(n + p->desc.rows * p->desc.cols <= WEIGHTS);
        if (mt_comm_rank(m->r.world) == 0) memcpy(out->weights + n, all, (size_t)(p->desc.rows * p->desc.cols) * 4);
        n += p->desc.rows * p->desc.cols;
    }
    if (mt_comm_rank(m->r.world) == 0) out->count = n;
    return MT_SUCCESS;
}

static mt_status split_rank(mt_comm *world, void *user) {
    const split *s = (const split *)user;
    const mt_grid_desc shape = {.tp = s->tp, .cp = s->as_data ? 1 : s->cp, .dp = s->as_data ? s->cp * s->dp : s->dp};
    const mt_context_desc where = {.arena_bytes = 1 << 20, .check = s->check};
    model *m = (model *)calloc(1, sizeof *m);
    mt_status status;
    if (!m) return MT_ERR_MEMORY;
    m->s = s;
    status = test_rank_open(world, shape, &where, &m->r);
    if (status == MT_SUCCESS) status = model_create(m);
    for (int step = 0; step < STEPS && status == MT_SUCCESS; step++) status = model_step(m, step);
    if (status == MT_SUCCESS) status = keep_weights(m);
    mt_optimizer_destroy(m->r.ctx, &m->adam);
    test_rank_close(&m->r);
    free(m);
    return status;
}

static void run(split s, found *out) {
    memset(out, 0, sizeof *out);
    s.out = out;
    test_launch(s.tp * s.cp * s.dp, split_rank, &s);
}

static const char *split_name(const split *s) {
    static char text[120];
    snprintf(text, sizeof text, "tp %d x cp %d x dp %d, sequence parallel %d, zigzag %d, sharded %d", s->tp, s->cp,
             s->dp, s->sequence_parallel, s->zigzag, s->sharded);
    return text;
}

static void assert_near(const split *s, const char *what, const float *got, const float *want, int64_t n,
                        double allowed) {
    double largest = 0;
    for (int64_t i = 0; i < n; i++) largest = fmax(largest, fabs((double)want[i]));
    for (int64_t i = 0; i < n; i++)
        if (!(fabs((double)got[i] - (double)want[i]) <= allowed * largest))
            fail_msg("%s: %s %lld is %.9g, must be %.9g", split_name(s), what, (long long)i, (double)got[i],
                     (double)want[i]);
}

/* Against one rank, within the roundings of f32; against as many data ranks with the same tokens, the same bits. */
static void check_split(split s, const found *serial) {
    static found got, data;
    run(s, &got);
    assert_near(&s, "loss", got.loss, serial->loss, STEPS, 1e-6);
    assert_near(&s, "norm", got.norm, serial->norm, STEPS, 5e-6);
    assert_near(&s, "gradient", got.grads, serial->grads, serial->count, 5e-6);
    assert_int_equal(got.count, serial->count);
    s.as_data = 1;
    s.check = 0;
    run(s, &data);
    if (memcmp(&got, &data, sizeof got) != 0) fail_msg("%s: other bits than as data ranks", split_name(&s));
}

static void test_every_split_is_one_rank(void **state) {
    static found serial;
    int turn = 0;
    (void)state;
    run((split){.tp = 1, .cp = 1, .dp = 1}, &serial);
    assert_true(serial.loss[STEPS - 1] < serial.loss[0]);
    for (int cp = 1; cp <= 4; cp *= 2)
        for (int tp = 1; tp <= 2; tp++)
            for (int dp = 1; dp <= 2 && tp * cp * dp <= 8; dp++)
                for (int zigzag = 0; zigzag <= (cp > 1); zigzag++)
                    for (int sp = 0; sp < tp; sp++, turn++)
                        check_split((split){.tp = tp,
                                            .cp = cp,
                                            .dp = dp,
                                            .sequence_parallel = sp,
                                            .zigzag = zigzag,
                                            .sharded = turn % 2,
                                            .check = turn % 3},
                                    &serial);
}

/* ---- what is refused --------------------------------------------------------------------------------------------- */

/* Attention of a block would see the keys of this rank's tokens alone. */
static void test_blocks_need_whole_sequences(void **state) {
    const mt_self_attention_desc self = {.hidden = 16, .heads = 2};
    const mt_cross_attention_desc cross = {.hidden = 16, .heads = 2};
    const mt_gpt_desc gpt = {.vocab = VOCAB, .layers = 1, .max_seq = SEQ, .layer = {.hidden = 16, .heads = 2}};
    const mt_context_desc meta = {.device = MT_DEVICE_META};
    mt_self_attention a;
    mt_cross_attention c;
    mt_gpt g;
    test_rank r;
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.cp = 2}, &meta, &r);
    REFUSED(r.ctx, MT_ERR_UNSUPPORTED, "mt_self_attention_create: 'a' needs whole sequences|2 context ranks",
            mt_self_attention_create(r.ctx, r.params, "a", &self, &a));
    REFUSED(r.ctx, MT_ERR_UNSUPPORTED, "mt_cross_attention_create: 'c' needs whole sequences|2 context ranks",
            mt_cross_attention_create(r.ctx, r.params, "c", &cross, &c));
    REFUSED(r.ctx, MT_ERR_UNSUPPORTED, "needs whole sequences|2 context ranks",
            mt_gpt_create(r.ctx, r.params, &gpt, &g));
    test_paper_rank_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_split_is_one_rank),
        cmocka_unit_test(test_blocks_need_whole_sequences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
