/* test_check_memory.c - what check mode keeps: names of parameters and pieces of memory do not pile up. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"
#include "mt_test_ranks.h"

enum { ROWS = 512, COLS = 16, WRITES = 1500 };

static const mt_context_desc meta = {.device = MT_DEVICE_META, .check = 1};

/* ---- names ------------------------------------------------------------------------------------------------------- */

/* Plans a model and destroys it. */
static void plan_model(test_rank *r) {
    mt_gpt_desc d = {.vocab = 64, .layers = 4, .max_seq = 8, .layer = {.hidden = 16, .heads = 2}};
    mt_gpt gpt;
    ASSERT_STATUS(r->ctx, MT_SUCCESS, test_rank_renew(r));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_gpt_create(r->ctx, r->params, &d, &gpt));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_params_init(r->ctx, r->params, 1));
}

static mt_param *own_weight(test_rank *r, const char *name) {
    mt_param_desc d = {.name = name, .rows = COLS, .cols = COLS, .placement = MT_SPLIT_ROWS};
    mt_param *w;
    ASSERT_STATUS(r->ctx, MT_SUCCESS, test_rank_renew(r));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_params_add(r->ctx, r->params, &d, &w));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_params_init(r->ctx, r->params, 1));
    return w;
}

/* Models come and go, with equal names and with others: as many names are kept as two or three models have. */
static void test_names_of_destroyed_parameters(void **state) {
    test_rank r;
    size_t live, most;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    plan_model(&r);
    live = r.ctx->checker->parameters.count;
    assert_true(live > 50 && r.ctx->checker->names.count >= live);
    most = 2 * live + 64;
    for (int i = 0; i < 50; i++) {
        plan_model(&r);
        assert_true(r.ctx->checker->names.count <= most && r.ctx->checker->names.capacity <= 2 * most + 64);
    }
    for (int i = 0; i < 2000; i++) {
        char name[32];
        snprintf(name, sizeof name, "trial.%d.weight", i);
        (void)own_weight(&r, name);
        assert_true(r.ctx->checker->names.count <= most && r.ctx->checker->names.capacity <= 2 * most + 64);
    }
    test_paper_rank_close(&r);
}

/* A message names the parameter with which a tensor was computed, also long after the parameter was destroyed. */
static void test_names_that_are_needed(void **state) {
    test_rank r;
    mt_tensor x, y, z, half;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, ROWS, COLS, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, ROWS, COLS / 2, &y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, ROWS, COLS / 2, &z));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, ROWS, COLS / 2, &half));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, half, MT_REPLICATED));
    for (int i = 0; i < 2; i++)
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_linear_forward(r.ctx, x, own_weight(&r, i ? "later.weight" : "gone.weight")->value, mt_none(),
                                        i ? z : y));
    for (int i = 0; i < 500; i++) (void)own_weight(&r, i % 2 ? "other.weight" : "another.weight");
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "is split by columns over \"tensor\" (2 ranks) since mt_linear_forward at gone",
            mt_add(r.ctx, y, half, half));
    test_paper_rank_close(&r);
}

/* ---- pieces ------------------------------------------------------------------------------------------------------ */

typedef struct window {
    int64_t first, count; /* of the rows, or of the columns */
} window;

static window sliding(int i, uint64_t *random) {
    (void)random;
    return (window){i % (ROWS - 1), 2};
}

static window backwards(int i, uint64_t *random) {
    (void)random;
    return (window){ROWS - 3 - i % (ROWS - 3), 3};
}

static window shrinking(int i, uint64_t *random) {
    (void)random;
    return (window){i % ROWS, ROWS - i % ROWS};
}

/* All windows, the longest ones first: none covers one before it. */
static window narrowing(int i, uint64_t *random) {
    int64_t count = ROWS;
    (void)random;
    while (i > ROWS - count) i -= (int)(ROWS - count--) + 1;
    return (window){i, count};
}

static window anywhere(int i, uint64_t *random) {
    int64_t first = (int64_t)test_below(random, ROWS), most = ROWS - first;
    (void)i;
    return (window){first, 1 + (int64_t)test_below(random, (uint64_t)most)};
}

static const struct {
    const char *name;
    window (*next)(int i, uint64_t *random);
} patterns[] = {{"sliding", sliding},
                {"backwards", backwards},
                {"shrinking", shrinking},
                {"narrowing", narrowing},
                {"anywhere", anywhere}};

/* Writes overlapping rows of x, or columns, each as what `is` says. */
static void overlapping_writes(test_rank *r, mt_tensor x, int pattern, const mt_placement *is, int kinds) {
    const mti_checker *c = r->ctx->checker;
    int are_rows = x.rows == ROWS;
    size_t most = are_rows && kinds == 1 ? 2 * MTI_OVERLAPS_MOST : ROWS + 2 * MTI_OVERLAPS_MOST;
    uint64_t random = 3;
    for (int i = 0; i < WRITES; i++) {
        window w = patterns[pattern].next(i, &random);
        mt_tensor part = are_rows ? mt_tensor_rows(x, w.first, w.count) : mt_tensor_cols(x, w.first, w.count);
        ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_declare(r->ctx, r->grid.tp, part, is[i % kinds]));
        assert_int_equal(mt_placement_of(r->ctx, r->grid.tp, part), is[i % kinds]);
        if (c->written.count > most || c->memory.count > (are_rows ? 8 : most))
            fail_msg("%s %s, write %d: %zu pieces, %zu pieces of memory", patterns[pattern].name,
                     are_rows ? "rows" : "columns", i, c->written.count, c->memory.count);
    }
}

/* Rows and columns of the arena and of the caller's memory are written again and again, each time others. The pieces
   are not many more than the rows or columns, and few for rows that are alike. */
static void test_overlapping_writes(void **state) {
    static const mt_placement same[] = {MT_SPLIT_ROWS}, other[] = {MT_REPLICATED, MT_SPLIT_COLS, MT_PARTIAL};
    static float own[ROWS * COLS];
    (void)state;
    for (int i = 0; i < 8 * (int)(sizeof patterns / sizeof *patterns); i++) {
        int64_t rows = i & 1 ? COLS : ROWS, cols = ROWS * COLS / rows;
        mt_tensor x = mt_tensor_f32(own, rows, cols);
        test_rank r;
        test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
        if (i & 2) ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, rows, cols, &x));
        overlapping_writes(&r, x, i / 8, i & 4 ? other : same, i & 4 ? 3 : 1);
        test_paper_rank_close(&r);
    }
}

/* Overlapping rows that are alike stay known, and what was written last does everywhere. */
static void test_overlapping_writes_stay_known(void **state) {
    test_rank r;
    mt_tensor x;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, ROWS, COLS, &x));
    for (int i = 0; i + 3 <= ROWS; i++)
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, mt_tensor_rows(x, i, 3), MT_SPLIT_COLS));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.tp, x), MT_SPLIT_COLS);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, mt_tensor_rows(x, 5, 2), MT_PARTIAL));
    for (int i = ROWS - 3; i >= 100; i--)
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, mt_tensor_rows(x, i, 3), MT_REPLICATED));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.tp, mt_tensor_rows(x, 0, 5)), MT_SPLIT_COLS);
    assert_int_equal(mt_placement_of(r.ctx, r.grid.tp, mt_tensor_rows(x, 5, 2)), MT_PARTIAL);
    assert_int_equal(mt_placement_of(r.ctx, r.grid.tp, mt_tensor_rows(x, 7, 93)), MT_SPLIT_COLS);
    assert_int_equal(mt_placement_of(r.ctx, r.grid.tp, mt_tensor_rows(x, 100, ROWS - 100)), MT_REPLICATED);
    test_paper_rank_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names_of_destroyed_parameters),
        cmocka_unit_test(test_names_that_are_needed),
        cmocka_unit_test(test_overlapping_writes),
        cmocka_unit_test(test_overlapping_writes_stay_known),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
