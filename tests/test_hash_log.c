/* test_hash_log.c - tests mt_hash and the hash log: hashes against a second implementation and on every split, one
   line for each tensor of a step, and a mark where ranks that should agree do not.
       cc -std=gnu17 -O2 -I. tests/test_hash_log.c -lpthread -lm */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test_ranks.h"

#define MAX_LINES 128

typedef struct line {
    char name[128];
    uint64_t hash;
    int differs;
} line;

typedef struct lines {
    line list[MAX_LINES];
    int count;
} lines;

static void keep_line(void *user, const char *name, uint64_t hash, int differs) {
    lines *all = (lines *)user;
    if (all->count == MAX_LINES) abort();
    snprintf(all->list[all->count].name, sizeof all->list[0].name, "%s", name);
    all->list[all->count].hash = hash;
    all->list[all->count++].differs = differs;
}

static const line *find_line(const lines *all, const char *name) {
    for (int i = 0; i < all->count; i++)
        if (strcmp(all->list[i].name, name) == 0) return &all->list[i];
    return NULL;
}

/* ---- mt_hash ----------------------------------------------------------------------------------------------------- */

/* A second implementation of the hash, from the description of splitmix64. */
static uint64_t hash_again(uint64_t element, float x) {
    uint32_t bits;
    uint64_t z;
    memcpy(&bits, &x, sizeof bits);
    z = element * 0x9e3779b97f4a7c15u + bits * (uint64_t)0xd1b54a32d192ed03u + 1;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static void test_hash_of_views_is_hash_of_the_whole(void **state) {
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1, .dp = 1}, NULL, &r);
    mt_tensor x = mt_tensor_f32(test_noise(&r, 6 * 10, 1, 1.0f), 6, 10);
    uint64_t whole = 0, sum = 0, views = 0;
    for (int i = 0; i < 60; i++) sum += hash_again(1000 + (uint64_t)i, ((float *)x.data)[i]);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_hash(r.ctx, x, 100, 0, 10, &whole));
    assert_true(whole == sum);
    for (int cut = 0; cut < 2; cut++) {
        mt_tensor left = mt_tensor_cols(x, 0, 3), right = mt_tensor_cols(x, 3, 7);
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_hash(r.ctx, mt_tensor_rows(right, 3 * cut, 3), 100 + 3 * cut, 3, 10, &views));
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_hash(r.ctx, mt_tensor_rows(left, 3 * cut, 3), 100 + 3 * cut, 0, 10, &views));
    }
    assert_true(views == whole);
    test_paper_rank_close(&r);
}

/* A change of one bit of one element, of the order of two elements, or of the sign of a zero changes the hash. */
static void test_hash_sees_every_bit(void **state) {
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1, .dp = 1}, NULL, &r);
    for (int i = 0; i < 64; i++)
        for (int bit = 0; bit < 33; bit++) {
            float *x = test_noise(&r, 64, 1, 1.0f), kept;
            uint64_t before = 0, after = 0;
            uint32_t bits;
            x[0] = 0.0f;
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_hash(r.ctx, mt_tensor_f32(x, 8, 8), 0, 0, 8, &before));
            if (bit < 32) {
                memcpy(&bits, &x[i], sizeof bits);
                bits ^= (uint32_t)1 << bit;
                memcpy(&x[i], &bits, sizeof bits);
            } else {
                kept = x[i];
                x[i] = x[(i + 1) % 64];
                x[(i + 1) % 64] = kept;
            }
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_hash(r.ctx, mt_tensor_f32(x, 8, 8), 0, 0, 8, &after));
            assert_true(before != after);
            test_rank_free_memory(&r);
        }
    test_paper_rank_close(&r);
}

/* ---- the log of one step ----------------------------------------------------------------------------------------- */

#define SEQ 8
#define BATCH 4

typedef struct job {
    mt_grid_desc shape;
    int sequence_parallel, spoil; /* spoil: the rank that changes its copy of a bias; 0: none */
    mt_recompute recompute;
    mt_qkv_layout qkv_layout;
    int kv_heads; /* 0: as many as heads */
    lines lines;  /* of rank 0 */
} job;

typedef struct logger {
    test_rank rank;
    mt_gpt gpt;
    mt_gpt_saved saved;
    mt_hash_log *log;
} logger;

static mt_status step(logger *l, const job *job) {
    mt_context *ctx = l->rank.ctx;
    mt_gpt_desc d = {.vocab = 29,
                     .layers = 1,
                     .max_seq = SEQ,
                     .embedding_dropout = 0.1f,
                     .layer = {.hidden = 16,
                               .heads = 4,
                               .kv_heads = job->kv_heads,
                               .ffn = 20,
                               .dropout.hidden = 0.1f,
                               .sequence_parallel = job->sequence_parallel,
                               .recompute = job->recompute,
                               .qkv_layout = job->qkv_layout}};
    int64_t share = BATCH / l->rank.grid.dp_size;
    int32_t ids[SEQ], targets[SEQ];
    MT_TRY(mt_gpt_create(ctx, l->rank.params, &d, &l->gpt));
    MT_TRY(mt_gpt_saved_create(ctx, &l->gpt, &l->saved));
    MT_TRY(mt_params_init(ctx, l->rank.params, 5));
    if (job->spoil && mt_comm_rank(l->rank.world) == job->spoil)
        ((float *)l->gpt.model.layers[0].mlp.fc2.bias->value.data)[3] = 1.0f;
    MT_TRY(mt_hash_log_create(ctx, &l->rank.grid, &l->log));
    for (int64_t i = l->rank.grid.dp_rank * share; i < (l->rank.grid.dp_rank + 1) * share; i++) {
        mt_batch batch = {.sequences = 1, .seq = SEQ, .first_sequence = i, .seed = 1};
        mt_tensor loss = test_tensor(&l->rank, 1, SEQ, 0.0f);
        size_t mark = mt_arena_mark(ctx);
        for (int t = 0; t < SEQ; t++) {
            ids[t] = (int32_t)((i * 5 + t) % 29);
            targets[t] = (int32_t)((i * 3 + t) % 29);
        }
        MT_TRY(mt_gpt_forward(ctx, &l->gpt, &batch, ids, targets, loss, NULL)); /* not logged */
        MT_TRY(mt_gpt_forward(ctx, &l->gpt, &batch, ids, targets, loss, &l->saved));
        MT_TRY(mt_gpt_backward(ctx, &l->gpt, 0.1f, &l->saved));
        MT_TRY(mt_accumulate_gradients(ctx, l->rank.params));
        mt_arena_release(ctx, mark);
    }
    MT_TRY(mt_sync_gradients(ctx, l->rank.params));
    for (int i = 0; i < mt_params_count(l->rank.params); i++) {
        const mt_param *p = mt_params_at(l->rank.params, i);
        MT_TRY(mt_hash_log_shard(ctx, l->log, p, ".grad", p->grad));
    }
    return mt_hash_log_value(ctx, l->log, "number", 2.5f);
}

static mt_status log_rank(mt_comm *world, void *user) {
    job *job = (struct job *)user;
    static const mt_context_desc where = {.arena_bytes = (size_t)16 << 20, .invariant = 4};
    lines here = {.count = 0}, empty = {.count = 0};
    logger l;
    memset(&l, 0, sizeof l);
    mt_status status = test_rank_open(world, job->shape, &where, &l.rank);
    if (status == MT_SUCCESS) status = step(&l, job);
    if (status == MT_SUCCESS) status = mt_hash_log_flush(l.rank.ctx, l.log, keep_line, &here);
    if (status == MT_SUCCESS) status = mt_hash_log_flush(l.rank.ctx, l.log, keep_line, &empty);
    if (status == MT_SUCCESS && empty.count != 0) status = MT_ERR_DATA;
    if (mt_comm_rank(world) == 0) job->lines = here;
    mt_hash_log_destroy(l.log);
    mt_gpt_saved_destroy(&l.saved);
    test_rank_close(&l.rank);
    return status;
}

static void run_job(job *job) { test_launch(job->shape.tp * job->shape.dp, log_rank, job); }

/* The names in order: forward, backward, and the tensors that the loop logs. */
static void test_lines_of_a_step(void **state) {
    static const char *const expected[] = {"embedding.output",
                                           "decoder.layers.0.input_layernorm.output",
                                           "decoder.layers.0.self_attention.linear_qkv.output",
                                           "decoder.layers.0.self_attention.core_attention.output",
                                           "decoder.layers.0.self_attention.linear_proj.output",
                                           "decoder.layers.0.self_attn_bda.output",
                                           "decoder.layers.0.pre_mlp_layernorm.output",
                                           "decoder.layers.0.mlp.linear_fc1.output",
                                           "decoder.layers.0.mlp.activation_func.output",
                                           "decoder.layers.0.mlp.linear_fc2.output",
                                           "decoder.layers.0.mlp_bda.output",
                                           "decoder.final_layernorm.output",
                                           "output_layer.output",
                                           "loss.output",
                                           "output_layer.output_grad",
                                           "output_layer.input_grad",
                                           "decoder.final_layernorm.input_grad",
                                           "decoder.layers.0.mlp.linear_fc2.input_grad",
                                           "decoder.layers.0.mlp.activation_func.input_grad",
                                           "decoder.layers.0.mlp.linear_fc1.input_grad",
                                           "decoder.layers.0.pre_mlp_layernorm.input_grad",
                                           "decoder.layers.0.self_attention.linear_proj.input_grad",
                                           "decoder.layers.0.self_attention.core_attention.input_grad",
                                           "decoder.layers.0.self_attention.linear_qkv.input_grad",
                                           "decoder.layers.0.input_layernorm.input_grad",
                                           "embedding.word_embeddings.weight.grad"};
    static job one = {.shape = {.tp = 1, .dp = 1}};
    (void)state;
    run_job(&one);
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++)
        assert_string_equal(one.lines.list[i].name, expected[i]);
    assert_string_equal(one.lines.list[one.lines.count - 1].name, "number");
    assert_int_equal(one.lines.count, 25 + 16 + 1); /* the 16 lines of parameters */
    assert_true(one.lines.list[one.lines.count - 1].hash == hash_again(0, 2.5f));
    for (int i = 0; i < one.lines.count; i++)
        for (int j = 0; j < i; j++) assert_true(one.lines.list[i].hash != one.lines.list[j].hash);
}

static void lines_do_not_depend_on_the_split(mt_qkv_layout qkv_layout, int kv_heads) {
    static job one;
    static const int splits[][3] = {{2, 1, 0}, {4, 1, 1}, {1, 4, 0}, {2, 2, 1}, {4, 2, 0}};
    memset(&one, 0, sizeof one);
    one.shape.tp = one.shape.dp = 1;
    one.qkv_layout = qkv_layout;
    one.kv_heads = kv_heads;
    run_job(&one);
    for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
        static job other;
        memset(&other, 0, sizeof other);
        other.shape.tp = splits[i][0];
        other.shape.dp = splits[i][1];
        other.sequence_parallel = splits[i][2];
        other.qkv_layout = qkv_layout;
        other.kv_heads = kv_heads;
        run_job(&other);
        assert_int_equal(other.lines.count, one.lines.count);
        for (int l = 0; l < one.lines.count; l++) {
            assert_string_equal(other.lines.list[l].name, one.lines.list[l].name);
            assert_int_equal(other.lines.list[l].differs, 0);
            if (other.lines.list[l].hash != one.lines.list[l].hash)
                fail_msg("%d x %d, sequence parallel %d: %s", splits[i][0], splits[i][1], splits[i][2],
                         one.lines.list[l].name);
        }
    }
}

static void test_lines_do_not_depend_on_the_split(void **state) {
    (void)state;
    lines_do_not_depend_on_the_split(MT_QKV_PER_GROUP, 0);
    lines_do_not_depend_on_the_split(MT_QKV_PER_GROUP, 1);
    lines_do_not_depend_on_the_split(MT_QKV_CONCATENATED, 0);
    lines_do_not_depend_on_the_split(MT_QKV_SEPARATE, 0);
    lines_do_not_depend_on_the_split(MT_QKV_SEPARATE, 2);
}

/* A layer that computes its forward again in the backward logs each tensor once, as a layer that saves all of them. */
static void test_recomputed_tensors_are_logged_once(void **state) {
    static job saved = {.shape = {.tp = 2, .dp = 1}}, again = {.shape = {.tp = 2, .dp = 1}};
    (void)state;
    again.recompute = MT_RECOMPUTE_FULL;
    run_job(&saved);
    run_job(&again);
    assert_int_equal(again.lines.count, saved.lines.count);
    for (int i = 0; i < saved.lines.count; i++) {
        assert_string_equal(again.lines.list[i].name, saved.lines.list[i].name);
        if (again.lines.list[i].hash != saved.lines.list[i].hash) fail_msg("%s", saved.lines.list[i].name);
    }
}

typedef struct paused_layer {
    test_rank rank;
    mt_column_parallel_linear layer;
    mt_tensor x, y, dx;
} paused_layer;

static void forward_and_backward(paused_layer *p) {
    mt_context *ctx = p->rank.ctx;
    mt_linear_saved saved;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_parallel_linear_forward(ctx, &p->layer, p->x, p->y, &saved));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_parallel_linear_backward(ctx, &p->layer, p->y, p->dx, &saved));
}

/* While the log is paused, calls of a layer add no line and change no hash. */
static void test_pause(void **state) {
    mt_linear_desc d = {.in_features = 4, .out_features = 6};
    lines once = {.count = 0}, paused = {.count = 0}, twice = {.count = 0}, none = {.count = 0};
    mt_hash_log *log;
    paused_layer p;
    mt_context *ctx;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1, .dp = 1}, NULL, &p.rank);
    ctx = p.rank.ctx;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_column_parallel_linear_create(ctx, p.rank.params, "fc", &d, &p.layer));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_init(ctx, p.rank.params, 1));
    p.x = mt_tensor_f32(test_noise(&p.rank, 8 * 4, 1, 1.0f), 8, 4);
    p.y = test_tensor(&p.rank, 8, 6, 0.0f);
    p.dx = test_tensor(&p.rank, 8, 4, 0.0f);
    mt_hash_log_pause(NULL, 1);
    mt_hash_log_pause(ctx, 1); /* without a log, nothing happens: the log that is created next is not paused */
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_hash_log_create(ctx, &p.rank.grid, &log));
    forward_and_backward(&p);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_hash_log_flush(ctx, log, keep_line, &once));
    assert_int_equal(once.count, 2);
    forward_and_backward(&p);
    mt_hash_log_pause(ctx, 1);
    mt_hash_log_pause(ctx, 1); /* pauses are not counted */
    forward_and_backward(&p);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_hash_log_flush(ctx, log, keep_line, &paused));
    assert_int_equal(paused.count, 2);
    for (int i = 0; i < 2; i++) {
        assert_string_equal(paused.list[i].name, once.list[i].name);
        assert_true(paused.list[i].hash == once.list[i].hash);
    }
    forward_and_backward(&p);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_hash_log_flush(ctx, log, keep_line, &none)); /* a flush does not end the pause */
    assert_int_equal(none.count, 0);
    mt_hash_log_pause(ctx, 0);
    forward_and_backward(&p);
    forward_and_backward(&p); /* both are logged */
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_hash_log_flush(ctx, log, keep_line, &twice));
    assert_int_equal(twice.count, 2);
    for (int i = 0; i < 2; i++) assert_true(twice.list[i].hash == 2 * once.list[i].hash);
    mt_hash_log_destroy(log);
    test_paper_rank_close(&p.rank);
}

/* Copies that differ, on a tensor rank and on a data rank. The lines before are the same, without a mark. */
static void test_ranks_that_differ(void **state) {
    static const mt_grid_desc shapes[] = {{.tp = 2, .dp = 1}, {.tp = 1, .dp = 2}, {.tp = 2, .dp = 2}};
    static job good;
    (void)state;
    for (int i = 0; i < 3; i++) {
        static job bad;
        memset(&good, 0, sizeof good);
        memset(&bad, 0, sizeof bad);
        good.shape = bad.shape = shapes[i];
        bad.spoil = i == 2 ? 3 : 1; /* 3: in another data rank than the one that writes */
        run_job(&good);
        run_job(&bad);
        const line *before = find_line(&bad.lines, "decoder.layers.0.mlp.linear_fc2.output");
        const line *at = find_line(&bad.lines, "decoder.layers.0.mlp_bda.output");
        assert_non_null(before);
        assert_non_null(at);
        assert_true(before->hash == find_line(&good.lines, before->name)->hash && !before->differs);
        assert_true(at->hash != find_line(&good.lines, at->name)->hash);
        assert_int_equal(at->differs,
                         i != 1); /* data ranks have different tokens, so there is no copy to compare with */
    }
}

static void test_refusals(void **state) {
    mt_hash_log *log = NULL, *second = NULL;
    lines none = {.count = 0};
    test_rank r;
    mt_param_desc d = {.name = "p", .rows = 2, .cols = 3};
    mt_param *p;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1, .dp = 1}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &d, &p));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_hash_log_create(r.ctx, &r.grid, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "grid", mt_hash_log_create(r.ctx, NULL, &log));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_hash_log_create(r.ctx, &r.grid, &log));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "has a hash log", mt_hash_log_create(r.ctx, &r.grid, &second));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "log is NULL", mt_hash_log_value(r.ctx, NULL, "x", 1.0f));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "param is NULL", mt_hash_log_shard(r.ctx, log, NULL, "", p->value));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "name is NULL", mt_hash_log_value(r.ctx, log, NULL, 1.0f));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "shard is NULL",
            mt_hash_log_shard(r.ctx, log, p, "", p->value)); /* the parameter is not initialised */
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "line is NULL", mt_hash_log_flush(r.ctx, log, NULL, NULL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_hash_log_flush(r.ctx, log, keep_line, &none));
    assert_int_equal(none.count, 0);
    mt_hash_log_destroy(log);
    /* a second log can be created after the first is destroyed */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_hash_log_create(r.ctx, &r.grid, &second));
    mt_hash_log_destroy(second);
    mt_hash_log_destroy(NULL);
    mt_hash_log_tokens(r.ctx, 5); /* without a log, nothing happens */
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "first_row is -1, must be at least 0",
            mt_hash(r.ctx, mt_none(), -1, 0, 0, &none.list[0].hash));
    test_paper_rank_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hash_of_views_is_hash_of_the_whole),
        cmocka_unit_test(test_hash_sees_every_bit),
        cmocka_unit_test(test_lines_of_a_step),
        cmocka_unit_test(test_lines_do_not_depend_on_the_split),
        cmocka_unit_test(test_recomputed_tensors_are_logged_once),
        cmocka_unit_test(test_pause),
        cmocka_unit_test(test_ranks_that_differ),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
