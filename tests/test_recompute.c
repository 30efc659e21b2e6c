/* test_recompute.c - tests activation recomputation: the bits against a run without it, the memory against the
   formula of mt_recompute, and the documented collectives.
       cc -std=gnu17 -O2 -I. tests/test_recompute.c -lpthread -lm */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#define GPT_STEPS 3
#include "mt_test_gpt.h"
#include "mt_test_ranks.h"

/* ---- the same bits ----------------------------------------------------------------------------------------------- */

/* tensor, data, sequence parallel */
static const int splits[][3] = {{1, 1, 0}, {2, 1, 0}, {4, 1, 1}, {2, 2, 1}};

static void assert_same_bits(gpt_run r) {
    static gpt_result kept, again;
    gpt_execute(r, &kept);
    for (int how = MT_RECOMPUTE_SELECTIVE; how <= MT_RECOMPUTE_FULL; how++) {
        r.recompute = (mt_recompute)how;
        gpt_execute(r, &again);
        if (memcmp(&kept, &again, GPT_SAME_BYTES) != 0) fail_msg("%s: other bits", gpt_name(&r));
        if (!(again.arena_peak < kept.arena_peak))
            fail_msg("%s: %zu bytes, %zu without", gpt_name(&r), again.arena_peak, kept.arena_peak);
    }
}

/* Every placement of the norms, GPT-2 and Llama, f32 and bf16, with dropout, on every split, with and without invariant
   mode. */
static void test_same_bits(void **state) {
    static const mt_qkv_layout layouts[] = {MT_QKV_PER_GROUP, MT_QKV_SEPARATE, MT_QKV_PER_GROUP, MT_QKV_CONCATENATED};
    (void)state;
    for (int llama = 0; llama < 4; llama++)
        for (int dtype = MT_F32; dtype <= MT_BF16; dtype++)
            for (size_t i = 0; i < sizeof splits / sizeof *splits; i++)
                for (int invariant = 0; invariant <= 4; invariant += 4) {
                    gpt_run r;
                    memset(&r, 0, sizeof r);
                    r.dtype = (mt_dtype)dtype;
                    r.scores = (int)i % 4;
                    r.tp = splits[i][0];
                    r.data = splits[i][1];
                    r.sequence_parallel = splits[i][2];
                    r.invariant = invariant;
                    r.llama = llama;
                    r.qkv_layout = layouts[llama];
                    assert_same_bits(r);
                }
}

/* The memory that the meta device computes is what a real run uses. */
static void test_planned(void **state) {
    static gpt_result plan, found;
    (void)state;
    for (int how = MT_RECOMPUTE_NONE; how <= MT_RECOMPUTE_FULL; how++)
        for (int llama = 0; llama < 3; llama++) {
            gpt_run r = {
                .tp = 4, .data = 1, .sequence_parallel = llama != 2, .llama = llama, .recompute = (mt_recompute)how};
            mt_comm *world = NULL;
            gpt_execute(r, &found);
            r.device = MT_DEVICE_META;
            r.out = &plan;
            assert_int_equal(mt_comm_create_meta(4, 0, &world), MT_SUCCESS);
            assert_int_equal(gpt_rank(world, &r), MT_SUCCESS);
            mt_comm_destroy(world);
            if (plan.arena_peak != found.arena_peak)
                fail_msg("%s: %zu bytes planned, %zu used", gpt_name(&r), plan.arena_peak, found.arena_peak);
        }
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

typedef struct shape {
    int64_t seq, sequences, hidden, heads;
    int tp, sequence_parallel;
    mt_dtype dtype;
} shape;

/* The formula of mt_recompute. It is the paper's formula without the terms that flash attention and counter-based
   dropout do not keep. */
static size_t formula(const shape *s, mt_recompute how) {
    int64_t n = s->seq * s->sequences, t = s->tp, r = s->sequence_parallel ? n / t : n, h = s->hidden;
    int64_t e = (int64_t)mt_dtype_size(s->dtype), bytes = e * h * r;
    if (how == MT_RECOMPUTE_NONE) bytes = e * h * (4 * r + 12 * n / t) + 16 * r + 4 * n * s->heads / t;
    if (how == MT_RECOMPUTE_SELECTIVE) bytes = e * h * (4 * r + 11 * n / t) + 16 * r;
    return (size_t)bytes;
}

/* The memory that one layer keeps, including its input, and the memory of a step of a GPT with this number of layers,
   of which `recomputed` are recomputed as `how` says. On the meta device: nothing is computed. */
static size_t kept_by_layer(const shape *s, mt_recompute how) {
    mt_context_desc meta = {.device = MT_DEVICE_META};
    mt_transformer_layer_desc d = {.hidden = s->hidden,
                                   .heads = s->heads,
                                   .recompute = how,
                                   .dropout.hidden = 0.1f,
                                   .sequence_parallel = s->sequence_parallel,
                                   .dropout.attention = 0.1f};
    mt_batch batch = {.sequences = s->sequences, .seq = s->seq};
    int64_t rows = s->seq * s->sequences / (s->sequence_parallel ? s->tp : 1);
    mt_transformer_layer layer;
    mt_transformer_layer_saved saved;
    mt_tensor x = mt_none(), y = mt_none();
    size_t before;
    test_rank r;
    test_paper_rank(s->tp, 0, (mt_grid_desc){.tp = s->tp}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_set_dtype(r.ctx, r.params, s->dtype));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_transformer_layer_create(r.ctx, r.params, "layer", &d, &layer));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, s->dtype, rows, s->hidden, &y));
    before = mt_arena_mark(r.ctx);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, s->dtype, rows, s->hidden, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_transformer_layer_forward(r.ctx, &layer, &batch, x, y, &saved));
    before = mt_arena_mark(r.ctx) - before;
    test_paper_rank_close(&r);
    return before;
}

static size_t needed_by_gpt(const shape *s, mt_recompute how, int64_t layers, int64_t recomputed) {
    mt_context_desc meta = {.device = MT_DEVICE_META};
    mt_gpt_desc d = {.vocab = 1000,
                     .layers = layers,
                     .max_seq = s->seq,
                     .recompute_layers = how == MT_RECOMPUTE_NONE ? 0 : recomputed,
                     .layer = {.hidden = s->hidden,
                               .heads = s->heads,
                               .recompute = how,
                               .sequence_parallel = s->sequence_parallel,
                               .dropout.hidden = 0.1f}};
    mt_batch batch = {.sequences = s->sequences, .seq = s->seq};
    mt_tensor loss, ids;
    mt_gpt_saved saved;
    mt_gpt gpt;
    size_t peak;
    test_rank r;
    test_paper_rank(s->tp, 0, (mt_grid_desc){.tp = s->tp}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_set_dtype(r.ctx, r.params, s->dtype));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_create(r.ctx, r.params, &d, &gpt));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_saved_create(r.ctx, &gpt, &saved));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 1, s->sequences * s->seq, &loss));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_I32, 1, s->sequences * s->seq, &ids));
    ASSERT_STATUS(
        r.ctx, MT_SUCCESS,
        mt_gpt_forward(r.ctx, &gpt, &batch, (const int32_t *)ids.data, (const int32_t *)ids.data, loss, &saved));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gpt_backward(r.ctx, &gpt, 1.0f, &saved));
    peak = mt_arena_peak(r.ctx);
    mt_gpt_saved_destroy(&saved);
    test_paper_rank_close(&r);
    return peak;
}

/* One layer, and each further layer of a model, uses exactly what the formula says. */
static void test_memory(void **state) {
    static const shape shapes[] = {{1024, 4, 1920, 20, 1, 0, MT_BF16},
                                   {1024, 4, 2048, 32, 8, 0, MT_BF16},
                                   {2048, 1, 8192, 64, 8, 1, MT_BF16},
                                   {512, 2, 768, 12, 2, 1, MT_F32}};
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int how = MT_RECOMPUTE_NONE; how <= MT_RECOMPUTE_FULL; how++) {
            const shape *s = &shapes[i];
            size_t expected = formula(s, (mt_recompute)how), none = formula(s, MT_RECOMPUTE_NONE);
            size_t eight = needed_by_gpt(s, (mt_recompute)how, 8, 0);
            assert_int_equal(kept_by_layer(s, (mt_recompute)how), expected);
            assert_int_equal(needed_by_gpt(s, (mt_recompute)how, 9, 0) - eight, expected);
            /* this number of the 8 layers is recomputed; the others keep everything */
            for (int64_t some = 5; some < 8; some++)
                assert_int_equal(needed_by_gpt(s, (mt_recompute)how, 8, some) - eight,
                                 (size_t)(8 - some) * (none - expected));
            assert_int_equal(needed_by_gpt(s, (mt_recompute)how, 8, 8), eight);
        }
    /* arXiv 2205.05198, table 2, with sequence parallelism: 34 sbh / t, of which 2 are dropout masks, and 5 a s^2 b / t
       that flash attention does not keep. Full recomputation keeps 2 sbh. */
    assert_int_equal((formula(&shapes[2], MT_RECOMPUTE_NONE) - 4 * 2048 * (64 + 4) / 8) / ((size_t)2048 * 8192 / 8),
                     32);
    assert_int_equal(formula(&shapes[0], MT_RECOMPUTE_FULL), 2 * (size_t)4096 * 1920);
}

/* ---- communication ----------------------------------------------------------------------------------------------- */

static mt_ledger step_of_layer(mt_recompute how, mt_ln_placement placement, int sequence_parallel) {
    mt_context_desc meta = {.device = MT_DEVICE_META};
    mt_transformer_layer_desc d = {.hidden = 64,
                                   .heads = 4,
                                   .recompute = how,
                                   .norm.placement = placement,
                                   .sequence_parallel = sequence_parallel};
    mt_batch batch = {.sequences = 2, .seq = 8};
    mt_transformer_layer layer;
    mt_transformer_layer_saved saved;
    mt_tensor x;
    mt_ledger ledger;
    test_rank r;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 4}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_transformer_layer_create(r.ctx, r.params, "layer", &d, &layer));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4 * 16, 64, &x));
    x = mt_tensor_rows(x, 0, sequence_parallel ? 4 : 16);
    ASSERT_STATUS(r.ctx, MT_SUCCESS,
                  mt_transformer_layer_forward(r.ctx, &layer, &batch, x, mt_tensor_rows(x, x.rows, x.rows), &saved));
    ASSERT_STATUS(r.ctx, MT_SUCCESS,
                  mt_transformer_layer_backward(r.ctx, &layer, mt_tensor_rows(x, 2 * x.rows, x.rows),
                                                mt_tensor_rows(x, 3 * x.rows, x.rows), &saved));
    ledger = mt_comm_ledger(r.grid.tp);
    test_paper_rank_close(&r);
    return ledger;
}

static void test_communication(void **state) {
    (void)state;
    for (int how = MT_RECOMPUTE_NONE; how <= MT_RECOMPUTE_FULL; how++)
        for (int placement = MT_PRE_LN; placement <= MT_RESIDUAL_POST_LN; placement++) {
            unsigned more = how == MT_RECOMPUTE_FULL ? placement == MT_POST_LN ? 2 : 1 : 0, bytes = 16 * 64 * 4;
            mt_ledger l = step_of_layer((mt_recompute)how, (mt_ln_placement)placement, 0);
            assert_int_equal(l.calls[MT_ALL_REDUCE], 4 + more);
            assert_int_equal(l.bytes[MT_ALL_REDUCE], (4 + more) * bytes);
            assert_int_equal(l.calls[MT_ALL_GATHER] + l.calls[MT_REDUCE_SCATTER], 0);
            l = step_of_layer((mt_recompute)how, (mt_ln_placement)placement, 1);
            assert_int_equal(l.calls[MT_ALL_GATHER], 6 + (more ? 2 : 0));
            assert_int_equal(l.calls[MT_REDUCE_SCATTER], 4 + more);
            assert_int_equal(l.calls[MT_ALL_REDUCE], 0);
        }
}

/* ---- the hash log ------------------------------------------------------------------------------------------------ */

#define MAX_LINES 128

typedef struct lines {
    char name[MAX_LINES][128];
    uint64_t hash[MAX_LINES];
    int count;
} lines;

static void keep_line(void *user, const char *name, uint64_t hash, int differs) {
    lines *all = (lines *)user;
    if (all->count == MAX_LINES || differs) abort();
    snprintf(all->name[all->count], sizeof all->name[0], "%s", name);
    all->hash[all->count++] = hash;
}

static void log_of(mt_recompute how, lines *out) {
    static gpt_result result;
    gpt_run run = {.tp = 1, .data = 1, .recompute = how, .out = &result};
    mt_hash_log *log = NULL;
    mt_comm *world = NULL;
    float loss, norm;
    gpt_worker w;
    out->count = 0;
    assert_int_equal(mt_comm_create_local(1, 0, &world), MT_SUCCESS);
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, gpt_open(world, &run, &w));
    ASSERT_STATUS(w.ctx, MT_SUCCESS, mt_hash_log_create(w.ctx, &w.grid, &log));
    ASSERT_STATUS(w.ctx, MT_SUCCESS, gpt_gradients(&w, 0, &loss, &norm));
    ASSERT_STATUS(w.ctx, MT_SUCCESS, mt_hash_log_flush(w.ctx, log, keep_line, out));
    mt_hash_log_destroy(log);
    gpt_close(&w);
    mt_comm_destroy(world);
}

/* The second forward adds no lines to the log, and all gradients have the same hashes. */
static void test_hash_log(void **state) {
    static lines kept, again;
    (void)state;
    log_of(MT_RECOMPUTE_NONE, &kept);
    assert_true(kept.count > 40);
    for (int how = MT_RECOMPUTE_SELECTIVE; how <= MT_RECOMPUTE_FULL; how++) {
        log_of((mt_recompute)how, &again);
        assert_int_equal(again.count, kept.count);
        for (int i = 0; i < kept.count; i++) {
            assert_string_equal(again.name[i], kept.name[i]);
            if (again.hash[i] != kept.hash[i]) fail_msg("%s: other bits", kept.name[i]);
        }
    }
}

static void test_refusals(void **state) {
    mt_transformer_layer_desc d = {.hidden = 8, .heads = 2, .recompute = (mt_recompute)3};
    mt_gpt_desc g = {.vocab = 5, .layers = 2, .max_seq = 4, .recompute_layers = 3, .layer = {.hidden = 8, .heads = 2}};
    mt_transformer_layer layer;
    mt_gpt gpt;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "recompute is 3",
            mt_transformer_layer_create(r.ctx, r.params, "layer", &d, &layer));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "recompute_layers is 3", mt_gpt_create(r.ctx, r.params, &g, &gpt));
    g.recompute_layers = -1;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "recompute_layers is -1", mt_gpt_create(r.ctx, r.params, &g, &gpt));
    g.recompute_layers = 1;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "recompute_layers is 1, must be 0 with MT_RECOMPUTE_NONE",
            mt_gpt_create(r.ctx, r.params, &g, &gpt));
    test_paper_rank_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),     cmocka_unit_test(test_planned),  cmocka_unit_test(test_memory),
        cmocka_unit_test(test_communication), cmocka_unit_test(test_hash_log), cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
