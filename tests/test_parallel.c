/* test_parallel.c - tests mt_parallel.h: grid, parameters, parallel linear layers, embedding, cross-entropy,
   gradients, AdamW. Every layer runs on 1, 2, 3, 4 and 8 tensor ranks and is compared with the same computation in
   plain double precision, and with the library on one rank.
       cc -std=gnu17 -O2 -I. tests/test_parallel.c -lpthread -lm */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test_grids.h"
#include "mt_test_ranks.h"

#include <limits.h>

static const int splits[] = {1, 2, 3, 4, 8};
#define SPLITS (sizeof splits / sizeof *splits)

/* ---- grid -------------------------------------------------------------------------------------------------------- */

#define WORLD 32 /* the largest grid of Megatron */
#define GROUPS 7
#define GRIDS (int)(sizeof megatron_grids / sizeof *megatron_grids)

static int ranks_of(mt_grid_desc d) { return d.tp * d.cp * d.dp * d.pp; }

/* Finds the group of `rank` in a list, as in "0 2|1 3". Writes its ranks, and returns their number, 0 for none. */
static int golden_group(const char *list, int rank, int ranks[WORLD]) {
    int count = 0, found = 0;
    for (;;) {
        ranks[count] = (int)strtol(list, (char **)&list, 10);
        found |= ranks[count++] == rank;
        if (*list == ' ') continue;
        if (found) return count;
        if (*list++ == 0) return 0;
        count = 0;
    }
}

static void test_grid_ranks_are_megatrons(void **state) {
    (void)state;
    for (int i = 0; i < GRIDS; i++)
        for (int group = 0; group < GROUPS; group++)
            for (int rank = 0; rank < ranks_of(megatron_grids[i].shape); rank++) {
                int want[WORLD], ranks[WORLD], count = -1;
                ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS,
                              mt_grid_ranks(&megatron_grids[i].shape, ranks_of(megatron_grids[i].shape),
                                            (mt_group)group, rank, ranks, &count));
                assert_int_equal(count, golden_group(megatron_grids[i].groups[group], rank, want));
                for (int k = 0; k < count; k++) assert_int_equal(ranks[k], want[k]);
            }
}

static void test_grid_ranks_of_one_stage_and_defaults(void **state) {
    static const mt_grid_desc one = {.tp = 4}, none = {0}, context = {.tp = 2, .cp = 2};
    int ranks[8], count = -1;
    (void)state;
    for (int r = 0; r < 8; r++) { /* with one stage, the embedding group has one rank */
        ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_grid_ranks(&one, 8, MT_GROUP_EMBEDDING, r, ranks, &count));
        assert_int_equal(count, 1);
        assert_int_equal(ranks[0], r);
        ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_grid_ranks(&none, 8, MT_GROUP_DATA, r, ranks, &count));
        assert_int_equal(count, 8);
        assert_int_equal(ranks[r], r);
        ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_grid_ranks(&none, 8, MT_GROUP_TENSOR, r, ranks, &count));
        assert_int_equal(count, 1);
        ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_grid_ranks(&none, 8, MT_GROUP_CONTEXT, r, ranks, &count));
        assert_int_equal(count, 1);
        ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_grid_ranks(&context, 8, MT_GROUP_DATA, r, ranks, &count));
        assert_int_equal(count, 2); /* 8 / (2 * 2) */
    }
}

static mt_comm *grid_comm(const mt_grid *grid, int group) {
    mt_comm *const comms[GROUPS] = {grid->tp, grid->dp, grid->pp, grid->model, grid->embedding, grid->cp, grid->dp_cp};
    return comms[group];
}

/* Checks the group sizes, group ranks and coordinates of `rank` in grid number i. */
static mt_status check_grid(const mt_grid *grid, int i, int rank) {
    static const char *const names[] = {"tensor",    "data",    "pipeline",      "model",
                                        "embedding", "context", "data x context"};
    const mt_grid_desc d = megatron_grids[i].shape;
    CHECK(grid->tp_size == d.tp && grid->dp_size == d.dp && grid->pp_size == d.pp && grid->cp_size == d.cp);
    CHECK(grid->tp_rank + d.tp * (grid->cp_rank + d.cp * (grid->dp_rank + d.dp * grid->pp_rank)) == rank);
    for (int group = 0; group < GROUPS; group++) {
        mt_comm *comm = grid_comm(grid, group);
        int want[WORLD], count = golden_group(megatron_grids[i].groups[group], rank, want);
        CHECK((comm == NULL) == (count == 0));
        if (!comm) continue;
        CHECK(mt_comm_size(comm) == count);
        CHECK(want[mt_comm_rank(comm)] == rank);
        CHECK(strcmp(mt_comm_name(comm), names[comm == grid->dp ? MT_GROUP_DATA : group]) == 0);
    }
    CHECK((grid->dp_cp == grid->dp) == (d.cp == 1));
    CHECK(mt_comm_rank(grid->tp) == grid->tp_rank && mt_comm_rank(grid->dp) == grid->dp_rank);
    CHECK(mt_comm_rank(grid->pp) == grid->pp_rank && mt_comm_rank(grid->cp) == grid->cp_rank);
    CHECK(mt_comm_rank(grid->dp_cp) == grid->cp_rank + d.cp * grid->dp_rank);
    return MT_SUCCESS;
}

/* Checks the members of each communicator: its ranks exchange their world ranks. */
static mt_status check_members(test_rank *r, int i, int rank) {
    for (int group = 0; group < GROUPS; group++) {
        mt_comm *comm = grid_comm(&r->grid, group);
        int want[WORLD], count = golden_group(megatron_grids[i].groups[group], rank, want);
        int32_t members[WORLD], me = (int32_t)rank;
        if (!comm) continue;
        MT_TRY(mt_all_gather(r->ctx, comm, &me, members, 1, MT_I32));
        for (int k = 0; k < count; k++) CHECK(members[k] == want[k]);
    }
    return MT_SUCCESS;
}

static mt_status grid_rank(mt_comm *world, void *user) {
    const int i = *(const int *)user;
    test_rank r;
    mt_status status;
    MT_TRY(test_rank_open(world, megatron_grids[i].shape, NULL, &r));
    status = check_grid(&r.grid, i, mt_comm_rank(world));
    if (status == MT_SUCCESS) status = check_members(&r, i, mt_comm_rank(world));
    test_rank_close(&r);
    return status;
}

static void test_grids_on_their_ranks(void **state) {
    (void)state;
    for (int i = 0; i < GRIDS; i++)
        if (ranks_of(megatron_grids[i].shape) <= 16) test_launch(ranks_of(megatron_grids[i].shape), grid_rank, &i);
}

static void test_grids_on_paper(void **state) {
    (void)state;
    for (int i = 0; i < GRIDS; i++)
        for (int rank = 0; rank < ranks_of(megatron_grids[i].shape); rank++) {
            mt_comm *world = NULL;
            mt_grid grid;
            ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS,
                          mt_comm_create_meta(ranks_of(megatron_grids[i].shape), rank, &world));
            ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_grid_create(world, &megatron_grids[i].shape, &grid));
            ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, check_grid(&grid, i, rank));
            mt_grid_destroy(&grid);
            mt_comm_destroy(world);
        }
}

static void test_grids_that_do_not_fit(void **state) {
    static const struct {
        mt_grid_desc desc;
        mt_status status;
        const char *words[3];
    } bad[] = {{{.tp = 3}, MT_ERR_SHAPE, {"tp 3", "8 ranks", ""}},
               {{.cp = 3}, MT_ERR_SHAPE, {"cp 3", "8 ranks", ""}},
               {{.cp = 16}, MT_ERR_SHAPE, {"cp 16", "8 ranks", ""}},
               {{.tp = 2, .cp = 2, .dp = 4}, MT_ERR_SHAPE, {"tp 2 x cp 2 x dp 4 x pp 1", "8 ranks", ""}},
               {{.cp = -1}, MT_ERR_ARGUMENT, {"cp is -1, must be at least 0", "", ""}},
               {{.tp = 2, .dp = 2}, MT_ERR_SHAPE, {"tp 2", "dp 2", "8 ranks"}},
               {{.tp = 2, .dp = 2, .pp = 3}, MT_ERR_SHAPE, {"pp 3", "dp 2", "8 ranks"}},
               {{.tp = 16}, MT_ERR_SHAPE, {"tp 16", "8 ranks", ""}},
               {{.tp = 2, .dp = 16}, MT_ERR_SHAPE, {"dp 16", "", ""}},
               {{.tp = -2}, MT_ERR_ARGUMENT, {"tp is -2, must be at least 0", "", ""}},
               {{.tp = 2, .dp = -1}, MT_ERR_ARGUMENT, {"dp is -1, must be at least 0", "", ""}},
               {{.tp = 2, .pp = -4}, MT_ERR_ARGUMENT, {"pp is -4, must be at least 0", "", ""}},
               {{INT_MAX, INT_MAX, INT_MAX, INT_MAX}, MT_ERR_SHAPE, {"2147483647", "8 ranks", ""}}};
    mt_comm *world = NULL;
    mt_grid grid;
    int ranks[8], count;
    (void)state;
    ASSERT_STATUS((mt_context *)NULL, MT_SUCCESS, mt_comm_create_meta(8, 3, &world));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(mt_grid_create(world, &bad[i].desc, &grid), bad[i].status);
        for (int w = 0; w < 3; w++)
            if (!strstr(mt_comm_last_error(world), bad[i].words[w]))
                fail_msg("'%s' is not in '%s'", bad[i].words[w], mt_comm_last_error(world));
        assert_null(grid.tp);
        assert_int_equal(mt_grid_ranks(&bad[i].desc, 8, MT_GROUP_TENSOR, 0, ranks, &count), bad[i].status);
        assert_int_equal(count, 0);
    }
    assert_int_equal(mt_grid_create(NULL, &megatron_grids[0].shape, &grid), MT_ERR_ARGUMENT);
    assert_int_equal(mt_grid_create(world, NULL, NULL), MT_ERR_ARGUMENT);
    assert_non_null(strstr(mt_comm_last_error(world), "out is NULL"));
    mt_comm_destroy(world);
}

static void test_grid_ranks_refuses(void **state) {
    static const mt_grid_desc d = {.tp = 2};
    int ranks[8], count = 0;
    (void)state;
    assert_int_equal(mt_grid_ranks(NULL, 8, MT_GROUP_TENSOR, 0, ranks, &count), MT_ERR_ARGUMENT);
    assert_int_equal(mt_grid_ranks(&d, 8, MT_GROUP_TENSOR, 0, NULL, &count), MT_ERR_ARGUMENT);
    assert_int_equal(mt_grid_ranks(&d, 8, MT_GROUP_TENSOR, 0, ranks, NULL), MT_ERR_ARGUMENT);
    assert_int_equal(mt_grid_ranks(&d, 8, MT_GROUP_TENSOR, 8, ranks, &count), MT_ERR_ARGUMENT);
    assert_int_equal(mt_grid_ranks(&d, 8, MT_GROUP_TENSOR, -1, ranks, &count), MT_ERR_ARGUMENT);
    assert_int_equal(mt_grid_ranks(&d, 8, (mt_group)GROUPS, 0, ranks, &count), MT_ERR_ARGUMENT);
    assert_int_equal(mt_grid_ranks(&d, 0, MT_GROUP_TENSOR, 0, ranks, &count), MT_ERR_ARGUMENT);
    assert_int_equal(mt_grid_ranks(&d, -8, MT_GROUP_TENSOR, 0, ranks, &count), MT_ERR_ARGUMENT);
    mt_grid_destroy(NULL);
}

/* ---- parameters -------------------------------------------------------------------------------------------------- */

static const mt_param_desc some_params[] = {
    {.name = "replicated", .rows = 5, .cols = 7, .init_std = 0.5f},
    {.name = "constant", .rows = 1, .cols = 9, .init_value = 1.5f, .placement = MT_SPLIT_COLS},
    {.name = "rows", .rows = 24, .cols = 5, .init_std = 0.5f, .placement = MT_SPLIT_ROWS},
    {.name = "rows.uneven", .rows = 13, .cols = 5, .init_std = 0.5f, .placement = MT_SPLIT_ROWS},
    {.name = "rows.few", .rows = 2, .cols = 3, .init_std = 0.5f, .placement = MT_SPLIT_ROWS},
    {.name = "rows.parts", .rows = 22, .cols = 3, .init_std = 0.5f, .placement = MT_SPLIT_ROWS, .parts = 2},
    {.name = "rows.units", .rows = 36, .cols = 3, .init_std = 0.5f, .placement = MT_SPLIT_ROWS, .unit = 4},
    {.name = "cols", .rows = 3, .cols = 16, .init_std = 0.5f, .placement = MT_SPLIT_COLS},
    {.name = "cols.uneven", .rows = 3, .cols = 19, .init_std = 0.5f, .placement = MT_SPLIT_COLS},
    {.name = "cols.parts.units",
     .rows = 4,
     .cols = 60,
     .init_std = 0.5f,
     .placement = MT_SPLIT_COLS,
     .parts = 2,
     .unit = 6},
    {.name = "rows.padded", .rows = 13, .cols = 5, .init_std = 0.5f, .placement = MT_SPLIT_ROWS, .padded_features = 32},
    {.name = "bias.padded",
     .rows = 1,
     .cols = 10,
     .init_value = 1.5f,
     .placement = MT_SPLIT_COLS,
     .unit = 2,
     .padded_features = 30},
    {.name = "rows.copies",
     .rows = 24,
     .cols = 3,
     .init_std = 0.5f,
     .placement = MT_SPLIT_ROWS,
     .unit = 8,
     .copies = 3,
     .copied = 2},
    {.name = "bias.copies",
     .rows = 1,
     .cols = 8,
     .init_std = 0.5f,
     .placement = MT_SPLIT_COLS,
     .unit = 4,
     .copies = 2,
     .copied = 4},
};
#define SOME_PARAMS ((int)(sizeof some_params / sizeof *some_params))
#define PARAM_MAX 512

typedef struct params_test {
    float serial[SOME_PARAMS][PARAM_MAX]; /* initial values on one rank */
} params_test;

static int64_t param_elements(const mt_param_desc *d) { return d->rows * d->cols; }

/* The index in the global tensor of the shard's element (i, j), or -1 for padding, computed from the description. */
static int64_t global_element(const mt_param_desc *d, int ranks, int rank, int64_t i, int64_t j) {
    if (d->placement == MT_SPLIT_ROWS) i = test_param_global(d, ranks, rank, i);
    if (d->placement == MT_SPLIT_COLS) j = test_param_global(d, ranks, rank, j);
    return i < 0 || j < 0 ? -1 : i * d->cols + j;
}

static mt_status check_shard_shape(const mt_param *p, const mt_param_desc *d, int ranks) {
    int64_t parts = d->parts ? d->parts : 1, unit = d->unit ? d->unit : 1;
    int64_t rows = d->padded_features && d->placement == MT_SPLIT_ROWS ? d->padded_features : d->rows;
    int64_t cols = d->padded_features && d->placement == MT_SPLIT_COLS ? d->padded_features : d->cols;
    if (d->copies > 1) { /* as many features as all pieces have, without their copies */
        unit = (d->unit - d->copied) / d->copies + d->copied;
        if (d->placement == MT_SPLIT_ROWS) rows = rows / d->unit * d->copies * unit;
        else cols = cols / d->unit * d->copies * unit;
    }
    CHECK(p->value.rows == (d->placement == MT_SPLIT_ROWS ? test_local(rows, parts, unit, ranks) : d->rows));
    CHECK(p->value.cols == (d->placement == MT_SPLIT_COLS ? test_local(cols, parts, unit, ranks) : d->cols));
    CHECK(p->grad.rows == p->value.rows && p->grad.cols == p->value.cols);
    CHECK(((uintptr_t)p->value.data & 63) == 0 && ((uintptr_t)p->grad.data & 63) == 0);
    CHECK(p->tp_size == ranks);
    CHECK(p->desc.name == p->name && strcmp(p->name, d->name) == 0 && p->desc.rows == d->rows &&
          p->desc.cols == d->cols);
    return MT_SUCCESS;
}

/* Checks that the shard contains its own elements of `global`, and zeros in the padding. */
static mt_status check_shard(const mt_param *p, const mt_param_desc *d, const float *global, mt_tensor shard) {
    const float *x = (const float *)shard.data;
    for (int64_t i = 0; i < shard.rows; i++)
        for (int64_t j = 0; j < shard.cols; j++) {
            int64_t e = global_element(d, p->tp_size, p->tp_rank, i, j);
            CHECK(x[i * shard.cols + j] == (e < 0 ? 0.0f : global[e]));
        }
    return MT_SUCCESS;
}

static mt_status check_param(test_rank *r, params_test *t, int index) {
    const mt_param_desc *d = &some_params[index];
    const mt_param *p = mt_params_find(r->params, d->name);
    int64_t n = param_elements(d);
    float *x = test_floats(r, n, NAN), *mine = test_noise(r, n, 77 + (uint64_t)index, 1.0f);
    mt_tensor shard;
    CHECK(p != NULL);
    MT_TRY(check_shard_shape(p, d, r->grid.tp_size));
    MT_TRY(mt_param_gather(r->ctx, r->params, p, p->value, x));
    if (r->grid.tp_size == 1) memcpy(t->serial[index], x, (size_t)n * sizeof *x);
    CHECK(memcmp(t->serial[index], x, (size_t)n * sizeof *x) == 0);
    MT_TRY(check_shard(p, d, x, p->value));
    shard = test_tensor(r, p->value.rows, p->value.cols, 0.0f);
    MT_TRY(mt_param_scatter(r->ctx, p, mine, shard));
    MT_TRY(check_shard(p, d, mine, shard));
    MT_TRY(mt_param_gather(r->ctx, r->params, p, shard, x));
    CHECK(memcmp(mine, x, (size_t)n * sizeof *x) == 0);
    for (int64_t i = 0; i < p->grad.rows * p->grad.cols; i++) CHECK(((const float *)p->grad.data)[i] == 0.0f);
    return MT_SUCCESS;
}

static mt_status add_some_params(test_rank *r, int backwards) {
    for (int i = 0; i < SOME_PARAMS; i++) {
        mt_param *p = NULL;
        MT_TRY(mt_params_add(r->ctx, r->params, &some_params[backwards ? SOME_PARAMS - 1 - i : i], &p));
        CHECK(p->value.data == NULL && mt_params_count(r->params) == i + 1);
    }
    return MT_SUCCESS;
}

static mt_status check_counts(test_rank *r) {
    int64_t global = 0, local = 0;
    CHECK(mt_params_grid(r->params) == &r->grid && mt_params_count(r->params) == SOME_PARAMS);
    for (int i = 0; i < SOME_PARAMS; i++) {
        const mt_param *p = mt_params_find(r->params, some_params[i].name);
        global += param_elements(&some_params[i]);
        local += p->value.rows * p->value.cols;
        CHECK(mt_params_at(r->params, i) != NULL);
    }
    CHECK(mt_params_global_elements(r->params) == global && mt_params_elements(r->params) == local);
    CHECK(!mt_params_at(r->params, -1) && !mt_params_at(r->params, SOME_PARAMS) && !mt_params_find(r->params, "row"));
    return MT_SUCCESS;
}

/* With an even number of ranks, the parameters are created in reverse order: the values depend on the name, not on the
   order. Then they are overwritten and initialised again. */
static mt_status params_body(test_rank *r, params_test *t) {
    MT_TRY(add_some_params(r, r->grid.tp_size % 2 == 0));
    MT_TRY(check_counts(r));
    MT_TRY(mt_params_init(r->ctx, r->params, 42));
    for (int i = 0; i < SOME_PARAMS; i++) MT_TRY(check_param(r, t, i));
    for (int i = 0; i < SOME_PARAMS; i++) {
        MT_TRY(mt_fill(r->ctx, mt_params_at(r->params, i)->value, 3.0f)); /* including the padding */
        MT_TRY(mt_fill(r->ctx, mt_params_at(r->params, i)->grad, 3.0f));
    }
    MT_TRY(mt_params_init(r->ctx, r->params, 42));
    for (int i = 0; i < SOME_PARAMS; i++) MT_TRY(check_param(r, t, i));
    return MT_SUCCESS;
}

static mt_status params_rank(mt_comm *world, void *user) {
    mt_grid_desc all = {.tp = mt_comm_size(world)};
    test_rank r;
    mt_status status;
    MT_TRY(test_rank_open(world, all, NULL, &r));
    status = params_body(&r, (params_test *)user);
    test_rank_close(&r);
    return status;
}

static void test_params_do_not_depend_on_the_split(void **state) {
    static params_test t;
    (void)state;
    for (size_t i = 0; i < SPLITS; i++) test_launch(splits[i], params_rank, &t);
}

static void open_alone(test_rank *r) { test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, r); }

static mt_param *add_matrix(test_rank *r, const char *name, int64_t rows, int64_t cols, float std) {
    mt_param_desc d = {.name = name, .rows = rows, .cols = cols, .init_std = std};
    mt_param *p = NULL;
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_params_add(r->ctx, r->params, &d, &p));
    return p;
}

/* n = 60000 draws. The mean has a standard error of std / 245, the variance of std^2 * 0.6 %, the share beyond two
   standard deviations (4.55 %) of 0.085 %, a correlation of 0.4 %. Four standard errors are allowed; the seed is
   fixed. */
static void test_initial_values_are_normal(void **state) {
    const int64_t n = 200 * 300;
    double sum = 0, square = 0, cross = 0, beyond = 0;
    mt_param *a, *b;
    test_rank r;
    (void)state;
    open_alone(&r);
    a = add_matrix(&r, "a", 200, 300, 0.25f);
    b = add_matrix(&r, "b", 200, 300, 0.25f);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 5));
    for (int64_t i = 0; i < n; i++) {
        double x = 4 * (double)((const float *)a->value.data)[i], y = 4 * (double)((const float *)b->value.data)[i];
        sum += x;
        square += x * x;
        cross += x * y;
        beyond += fabs(x) > 2;
    }
    assert_true(fabs(sum / (double)n) < 4.0 / 245);
    assert_true(fabs(square / (double)n - 1) < 4 * 0.006);
    assert_true(fabs(beyond / (double)n - 0.0455) < 4 * 0.00085);
    assert_true(fabs(cross / (double)n) < 4 * 0.004);
    test_paper_rank_close(&r);
}

static void test_seeds_give_different_models(void **state) {
    float first;
    mt_param *p;
    test_rank r;
    (void)state;
    open_alone(&r);
    p = add_matrix(&r, "a", 4, 4, 1.0f);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 5));
    first = *(const float *)p->value.data;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 6));
    assert_true(first != *(const float *)p->value.data);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 5));
    assert_true(first == *(const float *)p->value.data);
    test_paper_rank_close(&r);
}

static char longest_name[MT_NAME_MAX + 1]; /* one character too long */

static const struct {
    mt_param_desc desc;
    mt_status status;
    const char *words;
} bad_params[] = {
    {{.name = NULL, .rows = 0, .cols = 3}, MT_ERR_SHAPE, "'param.0': rows is 0, must be at least 1"},
    {{.name = "", .rows = 1, .cols = 1}, MT_ERR_ARGUMENT, "1 to 95"},
    {{.name = longest_name, .rows = 1, .cols = 1}, MT_ERR_ARGUMENT, "xxxx|95"},
    {{.name = "there", .rows = 1, .cols = 1}, MT_ERR_ARGUMENT, "already|'there'"},
    {{.name = "a", .rows = 0, .cols = 3}, MT_ERR_SHAPE, "'a': rows is 0, must be at least 1"},
    {{.name = "a", .rows = 3, .cols = -7}, MT_ERR_SHAPE, "'a': cols is -7, must be at least 1"},
    {{.name = "a", .rows = INT64_MAX / 2, .cols = 4}, MT_ERR_SHAPE, "[4611686018427387903, 4]"},
    {{.name = "a", .rows = 9, .cols = 4, .placement = MT_SPLIT_ROWS, .parts = 2}, MT_ERR_SHAPE, "9 features|2 parts"},
    {{.name = "a", .rows = 8, .cols = 9, .placement = MT_SPLIT_COLS, .parts = 2}, MT_ERR_SHAPE, "9 features|2 parts"},
    {{.name = "a", .rows = 12, .cols = 4, .placement = MT_SPLIT_ROWS, .unit = 5},
     MT_ERR_SHAPE,
     "12 features|units of 5"},
    {{.name = "a", .rows = 12, .cols = 4, .placement = MT_SPLIT_ROWS, .parts = 2, .unit = 4}, MT_ERR_SHAPE, "12|2|4"},
    {{.name = "a", .rows = 12, .cols = 4, .placement = MT_SPLIT_ROWS, .parts = -2},
     MT_ERR_ARGUMENT,
     "'a': parts is -2, must be from 0 to 65536"},
    {{.name = "a", .rows = 12, .cols = 4, .placement = MT_SPLIT_ROWS, .unit = -1},
     MT_ERR_SHAPE,
     "'a': unit is -1, must be at least 0"},
    {{.name = "a", .rows = 12, .cols = 4, .placement = (mt_placement)3},
     MT_ERR_ARGUMENT,
     "'a': placement is 3, must be MT_REPLICATED, MT_SPLIT_ROWS or MT_SPLIT_COLS"},
    {{.name = "a", .rows = 12, .cols = 4, .init_std = -0.5f},
     MT_ERR_ARGUMENT,
     "'a': init_std is -0.5, must be at least 0 and finite"},
    {{.name = "a", .rows = 12, .cols = 4, .init_std = NAN},
     MT_ERR_ARGUMENT,
     "'a': init_std is nan, must be at least 0 and finite"},
    {{.name = "a", .rows = 2, .cols = 4, .init_std = 1.0f, .init_value = 1.0f},
     MT_ERR_ARGUMENT,
     "'a': init_value is 1, must be 0 with init_std"},
    {{.name = "a", .rows = 12, .cols = 4, .parts = 2},
     MT_ERR_ARGUMENT,
     "'a': parts is 2, but placement is MT_REPLICATED"},
    {{.name = "a", .rows = 12, .cols = 4, .unit = 3},
     MT_ERR_ARGUMENT,
     "'a': unit is 3, but placement is MT_REPLICATED"},
};

static void test_params_add_refuses(void **state) {
    mt_param_desc good = {.name = "b", .rows = 1, .cols = 1};
    mt_param *p = NULL;
    test_rank r;
    (void)state;
    memset(longest_name, 'x', MT_NAME_MAX);
    open_alone(&r);
    add_matrix(&r, "there", 2, 2, 0.0f);
    for (size_t i = 0; i < sizeof bad_params / sizeof *bad_params; i++) {
        REFUSED(r.ctx, bad_params[i].status, bad_params[i].words,
                mt_params_add(r.ctx, r.params, &bad_params[i].desc, &p));
        assert_int_equal(mt_params_count(r.params), 1);
        assert_null(p);
    }
    assert_int_equal(mt_params_add(NULL, r.params, &good, &p), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "NULL", mt_params_add(r.ctx, NULL, &good, &p));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "NULL", mt_params_add(r.ctx, r.params, NULL, &p));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "NULL", mt_params_add(r.ctx, r.params, &good, NULL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'b'|after mt_params_init", mt_params_add(r.ctx, r.params, &good, &p));
    assert_int_equal(mt_params_count(r.params), 1);
    longest_name[MT_NAME_MAX - 1] = 0; /* 95 characters are allowed */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, test_rank_renew(&r));
    add_matrix(&r, longest_name, 2, 2, 0.0f);
    assert_non_null(mt_params_find(r.params, longest_name));
    test_paper_rank_close(&r);
}

static void test_copied_params_refuse(void **state) {
    static const mt_param_desc good = {
        .name = "a", .rows = 24, .cols = 4, .placement = MT_SPLIT_ROWS, .unit = 8, .copies = 3, .copied = 2};
    static const char *const rest[] = {"'a': copies is 4, must divide the 6 features that are not copied",
                                       "'a': copied is 9, must be from 1 to 8",
                                       "'a': copied is 0, must be from 1 to 8",
                                       "'a': copied is 2, must be 0 with one copy",
                                       "'a': copies is -3, must be from 0 to 21845",
                                       "'a': copies is 9223372036854775806, must be from 0 to 21845",
                                       "'a': copies is 3, must be 0 or 1 with several parts",
                                       "'a': copies is 3, must be 0 or 1 with padded_features",
                                       "'a': copies is 3, must be 0 or 1 for a matrix with placement MT_SPLIT_COLS",
                                       "'a': copies is 3, must be 0 or 1 with placement MT_REPLICATED"};
    mt_param *p = NULL;
    test_rank r;
    (void)state;
    test_paper_rank(4, 1, (mt_grid_desc){.tp = 4}, NULL, &r);
    for (int i = 0; i < (int)(sizeof rest / sizeof *rest); i++) {
        mt_param_desc d = good;
        if (i == 0) d.copies = 4;
        if (i == 1) d.copied = 9;
        if (i == 2) d.copied = 0;
        if (i == 3) d.copies = 1;
        if (i == 4) d.copies = -3;
        if (i == 5) d.copies = INT64_MAX - 1;
        if (i == 6) d.parts = 3;
        if (i == 7) d.padded_features = 48;
        if (i == 8) d.placement = MT_SPLIT_COLS, d.rows = 4, d.cols = 24;
        if (i == 9) d.placement = MT_REPLICATED, d.unit = 0;
        REFUSED_EXACTLY(r.ctx, MT_ERR_ARGUMENT, rest[i], mt_params_add(r.ctx, r.params, &d, &p));
        assert_int_equal(mt_params_count(r.params), 0);
    }
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &good, &p));
    test_paper_rank_close(&r);
}

static void test_padded_params_refuse(void **state) {
    static const struct {
        mt_param_desc desc;
        mt_status status;
        const char *words;
    } bad[] = {
        {{.name = "a", .rows = 12, .cols = 4, .padded_features = 16},
         MT_ERR_ARGUMENT,
         "'a': padded_features is 16, must be 0 with placement MT_REPLICATED"},
        {{.name = "a", .rows = 12, .cols = 4, .placement = MT_SPLIT_ROWS, .parts = 2, .padded_features = 16},
         MT_ERR_ARGUMENT,
         "'a': padded_features is 16, must be 0 with several parts"},
        {{.name = "a", .rows = 12, .cols = 4, .placement = MT_SPLIT_ROWS, .padded_features = 11},
         MT_ERR_SHAPE,
         "'a': padded_features is 11, must be from 12 to 70368744177664"},
        {{.name = "a", .rows = 1, .cols = 12, .placement = MT_SPLIT_COLS, .unit = 4, .padded_features = 18},
         MT_ERR_SHAPE,
         "'a': padded_features is 18, must be a multiple of unit 4"},
        {{.name = "a", .rows = 12, .cols = 4, .placement = MT_SPLIT_ROWS, .padded_features = INT64_MAX},
         MT_ERR_SHAPE,
         "'a': padded_features is 9223372036854775807, must be from 12 to 70368744177664"},
        {{.name = "a", .rows = 12, .cols = 4, .placement = MT_SPLIT_ROWS, .padded_features = -1},
         MT_ERR_SHAPE,
         "'a': padded_features is -1, must be from 12 to 70368744177664"},
    };
    mt_param *p = NULL;
    test_rank r;
    (void)state;
    open_alone(&r);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        REFUSED(r.ctx, bad[i].status, bad[i].words, mt_params_add(r.ctx, r.params, &bad[i].desc, &p));
        assert_true(p == NULL && mt_params_count(r.params) == 0);
    }
    test_paper_rank_close(&r);
}

static void test_params_refuse(void **state) {
    float x[16] = {0};
    mt_grid nowhere = {0};
    mt_params *params = NULL;
    mt_param *p;
    mt_tensor t, other = mt_tensor_f32(x, 2, 4);
    test_rank r;
    (void)state;
    open_alone(&r);
    assert_int_equal(mt_params_create(NULL, &r.grid, &params), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "grid", mt_params_create(r.ctx, NULL, &params));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "grid", mt_params_create(r.ctx, &nowhere, &params));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out", mt_params_create(r.ctx, &r.grid, NULL));
    mt_params_destroy(NULL);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "no parameters", mt_params_init(r.ctx, r.params, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "NULL", mt_params_init(r.ctx, NULL, 1));
    assert_int_equal(mt_params_init(NULL, r.params, 1), MT_ERR_ARGUMENT);
    p = add_matrix(&r, "a", 2, 3, 0.0f);
    assert_int_equal(mt_param_set_weight_decay(NULL, p, 1), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "param is NULL", mt_param_set_weight_decay(r.ctx, NULL, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'a' is 2", mt_param_set_weight_decay(r.ctx, p, 2));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_params_init first", mt_params_zero_grad(r.ctx, r.params));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_params_init first", mt_param_gather(r.ctx, r.params, p, p->value, x));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "shard is NULL", mt_param_scatter(r.ctx, p, x, p->value));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'a' comes after mt_params_init", mt_param_set_weight_decay(r.ctx, p, 1));
    assert_int_equal(p->desc.weight_decay, 0);
    assert_int_equal(mt_params_zero_grad(NULL, r.params), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "NULL", mt_params_zero_grad(r.ctx, NULL));
    assert_int_equal(mt_param_scatter(NULL, p, x, p->value), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "param is NULL", mt_param_scatter(r.ctx, NULL, x, p->value));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "global is NULL", mt_param_scatter(r.ctx, p, NULL, p->value));
    REFUSED(r.ctx, MT_ERR_SHAPE, "'a'|[2, 3]|[2, 4]", mt_param_scatter(r.ctx, p, x, other));
    t = p->value;
    t.dtype = MT_I32;
    REFUSED(r.ctx, MT_ERR_DTYPE, "i32|f32, bf16 or f16", mt_param_scatter(r.ctx, p, x, t));
    t = p->value;
    t.ld = 4;
    REFUSED(r.ctx, MT_ERR_SHAPE, "contiguous|ld 4", mt_param_scatter(r.ctx, p, x, t));
    assert_int_equal(mt_param_gather(NULL, r.params, p, p->value, x), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "NULL", mt_param_gather(r.ctx, NULL, p, p->value, x));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "param is NULL", mt_param_gather(r.ctx, r.params, NULL, p->value, x));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "global is NULL", mt_param_gather(r.ctx, r.params, p, p->value, NULL));
    REFUSED(r.ctx, MT_ERR_SHAPE, "[2, 3]|[2, 4]", mt_param_gather(r.ctx, r.params, p, other, x));
    test_untouched("x", x, 16, 0.0f);
    test_paper_rank_close(&r);
}

static void test_reading_a_registry_that_is_not_there(void **state) {
    (void)state;
    assert_null(mt_params_grid(NULL));
    assert_int_equal(mt_params_count(NULL), 0);
    assert_null(mt_params_at(NULL, 0));
    assert_null(mt_params_find(NULL, "a"));
    assert_int_equal(mt_params_elements(NULL), 0);
    assert_int_equal(mt_params_global_elements(NULL), 0);
}

/* ---- linear ------------------------------------------------------------------------------------------------------ */

typedef struct linear_case {
    const char *name;
    int row; /* 1: row-parallel; 0: column-parallel */
    mt_linear_desc desc;
} linear_case;

#define TOKENS 24
static const linear_case linear_cases[] = {
    {"column, one rank has all features, gathered",
     0,
     {.in_features = 16, .out_features = 8, .unit = 8, .gather_output = 1, .init_std = 0.5f}},
    {"row, one rank has all features", 1, {.in_features = 8, .out_features = 16, .unit = 8, .init_std = 0.5f}},
    {"column", 0, {.in_features = 16, .out_features = 24}},
    {"column, uneven", 0, {.in_features = 15, .out_features = 19}},
    {"column, fewer than ranks", 0, {.in_features = 8, .out_features = 3}},
    {"column, gathered", 0, {.in_features = 16, .out_features = 24, .gather_output = 1}},
    {"column, gathered, uneven", 0, {.in_features = 15, .out_features = 19, .gather_output = 1}},
    {"column, gathered, copies",
     0,
     {.in_features = 15, .out_features = 24, .unit = 8, .split.copies = 3, .split.copied = 2, .gather_output = 1}},
    {"column, no bias", 0, {.in_features = 16, .out_features = 24, .no_bias = 1}},
    {"column, bias left to the caller", 0, {.in_features = 16, .out_features = 19, .skip_bias_add = 1}},
    {"column, two parts", 0, {.in_features = 16, .out_features = 22, .parts = 2}},
    {"column, two parts, gathered", 0, {.in_features = 16, .out_features = 22, .parts = 2, .gather_output = 1}},
    {"column, units", 0, {.in_features = 16, .out_features = 20, .unit = 4}},
    {"column, padded", 0, {.in_features = 16, .out_features = 19, .split.padded_out_features = 24}},
    {"column, padded, gathered",
     0,
     {.in_features = 16, .out_features = 11, .gather_output = 1, .split.padded_out_features = 24}},
    {"column, padded, units, sequence-parallel",
     0,
     {.in_features = 16, .out_features = 12, .unit = 2, .sequence_parallel = 1, .split.padded_out_features = 20}},
    {"column, sequence-parallel", 0, {.in_features = 16, .out_features = 19, .sequence_parallel = 1}},
    {"column, sequence-parallel, gathered, two parts",
     0,
     {.in_features = 16, .out_features = 22, .parts = 2, .gather_output = 1, .sequence_parallel = 1}},
    {"row", 1, {.in_features = 24, .out_features = 16, .input_is_parallel = 1}},
    {"row, uneven", 1, {.in_features = 19, .out_features = 15, .input_is_parallel = 1}},
    {"row, whole input", 1, {.in_features = 24, .out_features = 16}},
    {"row, whole input, uneven", 1, {.in_features = 19, .out_features = 15}},
    {"row, whole input, fewer than ranks", 1, {.in_features = 3, .out_features = 8}},
    {"row, whole input, two parts", 1, {.in_features = 22, .out_features = 16, .parts = 2}},
    {"row, two parts of units",
     1,
     {.in_features = 24, .out_features = 16, .parts = 2, .unit = 2, .input_is_parallel = 1}},
    {"row, no bias", 1, {.in_features = 24, .out_features = 16, .input_is_parallel = 1, .no_bias = 1}},
    {"row, bias left to the caller", 1, {.in_features = 24, .out_features = 16, .skip_bias_add = 1}},
    {"row, sequence-parallel",
     1,
     {.in_features = 19, .out_features = 16, .input_is_parallel = 1, .sequence_parallel = 1}},
    {"row, sequence-parallel, whole input", 1, {.in_features = 19, .out_features = 16, .sequence_parallel = 1}},
};
#define LINEAR_CASES ((int)(sizeof linear_cases / sizeof *linear_cases))
#define LINEAR_MAX (TOKENS * 24)

/* One case on one rank: global inputs (the same on every rank), this rank's layer, and the assembled results. */
typedef struct linear_run {
    const linear_case *c;
    test_rank *r;
    mt_column_parallel_linear column;
    mt_row_parallel_linear row;
    mt_param *weight, *bias;
    mt_dtype dtype;         /* of the weight and the bias; with a 16-bit type, the global tensors have its values */
    int64_t in, out, local; /* local: features of the split dimension on this rank, including padding */
    float *x, *dy, *w, *b;  /* global tensors */
    double y[LINEAR_MAX], dx[LINEAR_MAX], dw[LINEAR_MAX], db[24];
} linear_run;

typedef struct linear_results {
    float y[LINEAR_MAX], dx[LINEAR_MAX], dw[LINEAR_MAX], db[24];
} linear_results;

/* Computes y = x w^T + b and the gradients of one backward pass in double precision. */
static void linear_reference(linear_run *l) {
    int64_t i, j, k, in = l->in, out = l->out;
    int add = l->b && !l->c->desc.skip_bias_add;
    memset(l->y, 0, sizeof l->y);
    memset(l->dx, 0, sizeof l->dx);
    memset(l->dw, 0, sizeof l->dw);
    memset(l->db, 0, sizeof l->db);
    for (i = 0; i < TOKENS; i++)
        for (j = 0; j < out; j++) {
            double dy = (double)l->dy[i * out + j];
            l->y[i * out + j] = add ? (double)l->b[j] : 0.0;
            if (add) l->db[j] += dy;
            for (k = 0; k < in; k++) {
                l->y[i * out + j] += (double)l->x[i * in + k] * (double)l->w[j * in + k];
                l->dx[i * in + k] += dy * (double)l->w[j * in + k];
                l->dw[j * in + k] += dy * (double)l->x[i * in + k];
            }
        }
}

static mt_status linear_create(linear_run *l, const mt_linear_desc *d) {
    test_rank *r = l->r;
    if (l->c->row) {
        MT_TRY(mt_row_parallel_linear_create(r->ctx, r->params, "layer", d, &l->row));
        l->weight = l->row.weight;
        l->bias = l->row.bias;
        l->local = l->row.local_features;
    } else {
        MT_TRY(mt_column_parallel_linear_create(r->ctx, r->params, "layer", d, &l->column));
        l->weight = l->column.weight;
        l->bias = l->column.bias;
        l->local = l->column.local_features;
    }
    CHECK((l->bias == NULL) == (d->no_bias != 0) && strcmp(l->weight->name, "layer.weight") == 0);
    CHECK(l->weight->desc.weight_decay == 1 && (!l->bias || l->bias->desc.weight_decay == 0));
    return mt_params_init(r->ctx, r->params, 3);
}

/* Rounds to values that bf16 and f16 represent exactly. */
static void linear_round(float *x, int64_t n) {
    for (int64_t i = 0; x && i < n; i++) x[i] = roundf(x[i] * 128) / 128;
}

/* Creates inputs of a size that keeps every result near 1: |x| < 1, |dy| < 0.25, |w| < 0.5, |b| < 1, sums of at most 24
   products. A rounding error of 6e-8 per step then stays well below the tolerance of 1e-6. */
static mt_status linear_open(linear_run *l) {
    const mt_linear_desc *d = &l->c->desc;
    test_rank *r = l->r;
    MT_TRY(test_rank_renew(r));
    MT_TRY(mt_params_set_dtype(r->ctx, r->params, l->dtype));
    l->in = d->in_features;
    l->out = d->out_features;
    MT_TRY(linear_create(l, d));
    l->x = test_noise(r, TOKENS * l->in, 1, 1.0f);
    l->dy = test_noise(r, TOKENS * l->out, 2, 0.25f);
    l->w = test_noise(r, l->in * l->out, 3, 0.5f);
    l->b = l->bias ? test_noise(r, l->out, 4, 1.0f) : NULL;
    if (l->dtype != MT_F32) {
        linear_round(l->x, TOKENS * l->in);
        linear_round(l->w, l->in * l->out);
        linear_round(l->b, l->out);
    }
    MT_TRY(mt_param_scatter(r->ctx, l->weight, l->w, l->weight->value));
    if (l->bias) MT_TRY(mt_param_scatter(r->ctx, l->bias, l->b, l->bias->value));
    linear_reference(l);
    return MT_SUCCESS;
}

/* This rank's part of a global tensor [TOKENS, n]: its tokens with sequence parallelism, its features when split. */
typedef struct share {
    int64_t first, rows, n, cols;
    int split;
} share;

static share share_of(const linear_run *l, int64_t n, int split, int by_tokens) {
    int ranks = l->r->grid.tp_size;
    share s = {0, TOKENS, n, split ? l->local : n, split};
    if (by_tokens) s.rows = TOKENS / ranks;
    if (by_tokens) s.first = s.rows * l->r->grid.tp_rank;
    return s;
}

static share input_share(const linear_run *l) {
    const mt_linear_desc *d = &l->c->desc;
    return share_of(l, l->in, l->c->row && d->input_is_parallel, !l->c->row && d->sequence_parallel);
}

static share output_share(const linear_run *l) {
    const mt_linear_desc *d = &l->c->desc;
    return share_of(l, l->out, !l->c->row && !d->gather_output, l->c->row && d->sequence_parallel);
}

/* The index in the global tensor, or -1 for padding. */
static int64_t share_element(const linear_run *l, share s, int64_t i, int64_t j) {
    const mt_param_desc *w = &l->weight->desc;
    if (s.split) j = test_param_global(w, l->r->grid.tp_size, l->r->grid.tp_rank, j);
    return j < 0 ? -1 : (s.first + i) * s.n + j;
}

static mt_tensor share_take(linear_run *l, share s, const float *global) {
    mt_tensor t = test_tensor(l->r, s.rows, s.cols, 0.0f);
    for (int64_t i = 0; i < s.rows; i++)
        for (int64_t j = 0; j < s.cols; j++) {
            int64_t e = share_element(l, s, i, j);
            if (e >= 0) ((float *)t.data)[i * s.cols + j] = global[e];
        }
    return t;
}

/* Compares a share with the double-precision reference. If `all` is not NULL, one rank also stores the share there, and
   more than one compare their share with it. */
static mt_status share_check(linear_run *l, share s, const char *what, mt_tensor t, const double *want, float *all) {
    for (int64_t i = 0; i < s.rows; i++)
        for (int64_t j = 0; j < s.cols; j++) {
            int64_t e = share_element(l, s, i, j);
            const float *got = (const float *)t.data + i * s.cols + j;
            double zero = 0.0, serial;
            MT_TRY(test_near(what, got, e < 0 ? &zero : &want[e], 1, e < 0 ? 0.0 : 1e-6));
            if (e < 0) continue;
            if (l->r->grid.tp_size == 1) all[e] = *got;
            serial = (double)all[e];
            MT_TRY(test_near("against one rank", got, &serial, 1, 1e-6));
        }
    return MT_SUCCESS;
}

static mt_status linear_forward(linear_run *l, mt_tensor x, mt_tensor y, mt_linear_saved *saved) {
    return l->c->row ? mt_parallel_linear_forward(l->r->ctx, &l->row, x, y, saved)
                     : mt_parallel_linear_forward(l->r->ctx, &l->column, x, y, saved);
}

static mt_status linear_backward(linear_run *l, mt_tensor dy, mt_tensor dx, const mt_linear_saved *saved) {
    return l->c->row ? mt_parallel_linear_backward(l->r->ctx, &l->row, dy, dx, saved)
                     : mt_parallel_linear_backward(l->r->ctx, &l->column, dy, dx, saved);
}

/* Checks that the ledger of the tensor group contains exactly these calls. */
static mt_status check_ledger(test_rank *r, const char *what, mt_ledger want) {
    mt_ledger got = mt_comm_ledger(r->grid.tp);
    if (r->grid.tp_size == 1) memset(&want, 0, sizeof want);
    for (int k = 0; k < MT_COLLECTIVE_COUNT; k++) {
        if (got.calls[k] == want.calls[k] && got.bytes[k] == want.bytes[k]) continue;
        fprintf(stderr, "%s: %s: %llu calls of %llu bytes, expected %llu of %llu\n", what,
                mt_collective_name((mt_collective)k), (unsigned long long)got.calls[k],
                (unsigned long long)got.bytes[k], (unsigned long long)want.calls[k], (unsigned long long)want.bytes[k]);
        return MT_ERR_DATA;
    }
    mt_comm_ledger_reset(r->grid.tp);
    return MT_SUCCESS;
}

static void count(mt_ledger *ledger, mt_collective kind, int64_t floats) {
    ledger->calls[kind]++;
    ledger->bytes[kind] += (uint64_t)floats * sizeof(float);
}

static mt_ledger forward_ledger(const linear_run *l) {
    const mt_linear_desc *d = &l->c->desc;
    int ranks = l->r->grid.tp_size;
    mt_ledger want = {{0}, {0}};
    if (l->c->row) {
        count(&want, d->sequence_parallel ? MT_REDUCE_SCATTER : MT_ALL_REDUCE, TOKENS * l->out);
    } else {
        if (d->sequence_parallel) count(&want, MT_ALL_GATHER, TOKENS * l->in);
        if (d->gather_output) count(&want, MT_ALL_GATHER, ranks * TOKENS * l->local);
    }
    return want;
}

static mt_ledger backward_ledger(const linear_run *l, int with_dx) {
    const mt_linear_desc *d = &l->c->desc;
    int ranks = l->r->grid.tp_size;
    mt_ledger want = {{0}, {0}};
    if (l->c->row) {
        if (d->sequence_parallel) count(&want, MT_ALL_GATHER, TOKENS * l->out);
        if (with_dx && !d->input_is_parallel) count(&want, MT_ALL_GATHER, ranks * TOKENS * l->local);
    } else {
        if (with_dx) count(&want, d->sequence_parallel ? MT_REDUCE_SCATTER : MT_ALL_REDUCE, TOKENS * l->in);
        if (d->sequence_parallel) count(&want, MT_ALL_GATHER, TOKENS * l->in);
    }
    return want;
}

/* After three backward passes, the gradients are three times those of one. */
static mt_status linear_check_gradients(linear_run *l, linear_results *serial) {
    test_rank *r = l->r;
    float *dw = test_floats(r, l->in * l->out, NAN), *db = test_floats(r, l->out, NAN);
    for (int64_t i = 0; i < l->in * l->out; i++) l->dw[i] *= 3;
    for (int64_t i = 0; i < l->out; i++) l->db[i] *= 3;
    MT_TRY(
        /* until then, the bias gradient of a sequence-parallel row layer covers only the rank's own tokens */
        mt_sync_gradients(r->ctx, r->params));
    MT_TRY(mt_param_gather(r->ctx, r->params, l->weight, l->weight->grad, dw));
    MT_TRY(test_near("dw", dw, l->dw, l->in * l->out, 1e-6));
    if (r->grid.tp_size == 1) memcpy(serial->dw, dw, (size_t)(l->in * l->out) * sizeof *dw);
    MT_TRY(test_near_f32("dw against one rank", dw, serial->dw, l->in * l->out, 1e-6));
    if (!l->bias) return MT_SUCCESS;
    MT_TRY(mt_param_gather(r->ctx, r->params, l->bias, l->bias->grad, db));
    MT_TRY(test_near("db", db, l->db, l->out, 1e-6));
    if (r->grid.tp_size == 1) memcpy(serial->db, db, (size_t)l->out * sizeof *db);
    return test_near_f32("db against one rank", db, serial->db, l->out, 1e-6);
}

static mt_status linear_check(linear_run *l, linear_results *serial) {
    share in = input_share(l), out = output_share(l);
    mt_tensor x = share_take(l, in, l->x), dy = share_take(l, out, l->dy);
    mt_tensor y = test_tensor(l->r, out.rows, out.cols, NAN), dx = test_tensor(l->r, in.rows, in.cols, NAN);
    mt_linear_saved saved;
    size_t mark = mt_arena_mark(l->r->ctx);
    mt_comm_ledger_reset(l->r->grid.tp);
    MT_TRY(linear_forward(l, x, y, &saved));
    MT_TRY(check_ledger(l->r, "forward", forward_ledger(l)));
    MT_TRY(share_check(l, out, "y", y, l->y, serial->y));
    MT_TRY(linear_forward(l, x, y, NULL));
    MT_TRY(share_check(l, out, "y of inference", y, l->y, serial->y));
    mt_comm_ledger_reset(l->r->grid.tp);
    MT_TRY(linear_backward(l, dy, dx, &saved));
    MT_TRY(check_ledger(l->r, "backward", backward_ledger(l, 1)));
    MT_TRY(linear_backward(l, dy, dx, &saved)); /* overwrites dx again */
    MT_TRY(share_check(l, in, "dx", dx, l->dx, serial->dx));
    mt_comm_ledger_reset(l->r->grid.tp);
    MT_TRY(linear_backward(l, dy, mt_none(), &saved));
    MT_TRY(check_ledger(l->r, "backward without dx", backward_ledger(l, 0)));
    CHECK(mt_arena_mark(l->r->ctx) == mark);
    return linear_check_gradients(l, serial);
}

typedef struct linear_runs {
    linear_results *serial;
    int chunks; /* number of chunks of tokens */
} linear_runs;

static mt_status linear_rank(mt_comm *world, void *user) {
    const linear_runs *runs = (const linear_runs *)user;
    mt_grid_desc all = {.tp = mt_comm_size(world)};
    mt_context_desc where = {.arena_bytes = (size_t)16 << 20};
    mt_parallel_options options = {.overlap_chunks = runs->chunks};
    linear_run *l = (linear_run *)calloc(1, sizeof *l);
    test_rank r;
    mt_status status = test_rank_open(world, all, &where, &r);
    if (status == MT_SUCCESS) status = mt_parallel_set_options(r.ctx, &options);
    for (int i = 0; status == MT_SUCCESS && i < LINEAR_CASES; i++) {
        memset(l, 0, sizeof *l);
        l->c = &linear_cases[i];
        l->r = &r;
        status = linear_open(l);
        if (status == MT_SUCCESS) status = linear_check(l, &runs->serial[i]);
        if (status == MT_ERR_DATA)
            fprintf(stderr, "%s on %d ranks, %d chunks\n", l->c->name, mt_comm_size(world), runs->chunks);
    }
    free(l);
    test_rank_close(&r);
    return status;
}

static void test_linear_layers_on_every_split(void **state) {
    static linear_results serial[LINEAR_CASES];
    (void)state;
    for (int chunks = 0; chunks <= 5; chunks += 5) /* the ledger is the same for chunks */
        for (size_t i = 0; i < SPLITS; i++) {
            linear_runs runs = {serial, chunks};
            test_launch(splits[i], linear_rank, &runs);
        }
}

/* Computes y = x w^T with sums of k products, which the ranks divide. The bound is that of README.md. */
static mt_status long_sums_body(test_rank *r, int64_t k) {
    enum { OUT = 16 };
    mt_linear_desc d = {.in_features = k, .out_features = OUT, .no_bias = 1};
    mt_row_parallel_linear layer;
    float *x = test_noise(r, TOKENS * k, 1, 1.0f), *w = test_noise(r, OUT * k, 3, 1.0f);
    mt_tensor y = test_tensor(r, TOKENS, OUT, NAN);
    MT_TRY(mt_row_parallel_linear_create(r->ctx, r->params, "layer", &d, &layer));
    MT_TRY(mt_params_init(r->ctx, r->params, 3));
    MT_TRY(mt_param_scatter(r->ctx, layer.weight, w, layer.weight->value));
    MT_TRY(mt_parallel_linear_forward(r->ctx, &layer, mt_tensor_f32(x, TOKENS, k), y, NULL));
    for (int64_t i = 0; i < TOKENS * OUT; i++) {
        double want = 0, size = 0;
        for (int64_t j = 0; j < k; j++) {
            double product = (double)x[i / OUT * k + j] * (double)w[i % OUT * k + j];
            want += product;
            size += fabs(product);
        }
        MT_TRY(test_near("a long sum", (const float *)y.data + i, &want, 1, (2 + sqrt((double)k)) * 5.97e-8 * size));
    }
    return MT_SUCCESS;
}

static mt_status long_sums_rank(mt_comm *world, void *user) {
    static const int64_t lengths[] = {24, 136, 1000, 1001};
    mt_grid_desc all = {.tp = mt_comm_size(world)};
    test_rank r;
    mt_status status = test_rank_open(world, all, NULL, &r);
    (void)user;
    for (size_t i = 0; status == MT_SUCCESS && i < sizeof lengths / sizeof *lengths; i++) {
        status = test_rank_renew(&r);
        if (status == MT_SUCCESS) status = long_sums_body(&r, lengths[i]);
    }
    test_rank_close(&r);
    return status;
}

static void test_linear_sums_of_many_products(void **state) {
    (void)state;
    for (size_t i = 0; i < SPLITS; i++) test_launch(splits[i], long_sums_rank, NULL);
}

/* A column-parallel layer that uses the weight of another layer: both add to one gradient, and each has its own
   bias. */
static mt_status shared_weight_body(test_rank *r, int64_t padded) {
    mt_linear_desc d = {.in_features = 6, .out_features = 8, .split.padded_out_features = padded};
    mt_column_parallel_linear a, b;
    mt_linear_saved sa, sb;
    mt_tensor x, y, dy;
    MT_TRY(mt_column_parallel_linear_create(r->ctx, r->params, "a", &d, &a));
    d.weight = a.weight;
    if (r->grid.tp_size > 1) d.split.padded_out_features = 0; /* the same: the padding is that of the weight */
    MT_TRY(mt_column_parallel_linear_create(r->ctx, r->params, "b", &d, &b));
    CHECK(mt_params_count(r->params) == 3 && b.weight == a.weight && b.bias != a.bias);
    CHECK(b.local_features == (padded ? padded : 8) / r->grid.tp_size && b.bias->value.cols == b.local_features);
    MT_TRY(mt_params_init(r->ctx, r->params, 1));
    x = mt_tensor_f32(test_noise(r, 4 * 6, 1, 1.0f), 4, 6);
    y = test_tensor(r, 4, a.local_features, 0.0f);
    dy = test_tensor(r, 4, a.local_features, 1.0f);
    MT_TRY(mt_parallel_linear_forward(r->ctx, &a, x, y, &sa));
    MT_TRY(mt_parallel_linear_forward(r->ctx, &b, x, y, &sb));
    MT_TRY(mt_parallel_linear_backward(r->ctx, &a, dy, mt_none(), &sa));
    MT_TRY(mt_parallel_linear_backward(r->ctx, &b, dy, mt_none(), &sb));
    for (int64_t j = 0; j < 6; j++) {
        double want = 0;
        for (int64_t i = 0; i < 4; i++) want += 2 * (double)((const float *)x.data)[i * 6 + j];
        MT_TRY(test_near("dw", (const float *)a.weight->grad.data + j, &want, 1, 1e-6));
    }
    return MT_SUCCESS;
}

static mt_status shared_weight_rank(mt_comm *world, void *user) {
    mt_grid_desc all = {.tp = mt_comm_size(world)};
    test_rank r;
    mt_status status;
    (void)user;
    MT_TRY(test_rank_open(world, all, NULL, &r));
    status = shared_weight_body(&r, 0);
    MT_KEEP(status, test_rank_renew(&r));
    MT_KEEP(status, shared_weight_body(&r, 20));
    test_rank_close(&r);
    return status;
}

static void test_column_layers_share_a_weight(void **state) {
    (void)state;
    test_launch(1, shared_weight_rank, NULL);
    test_launch(2, shared_weight_rank, NULL);
}

/* ---- vocabulary-parallel embedding ------------------------------------------------------------------------------- */

#define FEATURES 5

typedef struct embedding_case {
    int64_t vocab, padded;
    int sequence_parallel;
    float y[TOKENS * FEATURES], dw[64 * FEATURES]; /* results of one rank */
} embedding_case;

static mt_status embedding_check(test_rank *r, embedding_case *c) {
    mt_embedding_desc d = {
        .vocab = c->vocab, .features = FEATURES, .sequence_parallel = c->sequence_parallel, .padded_vocab = c->padded};
    int ranks = c->sequence_parallel ? r->grid.tp_size : 1, alone = r->grid.tp_size == 1;
    int64_t rows = TOKENS / ranks, first = ranks > 1 ? rows * r->grid.tp_rank : 0, n = c->vocab * FEATURES;
    mt_vocab_parallel_embedding e;
    mt_ledger want = {{0}, {0}};
    int32_t ids[TOKENS];
    uint64_t seed = 5;
    double dw[64 * FEATURES] = {0}, y[TOKENS * FEATURES];
    float *table = test_noise(r, n, 1, 1.0f), *dy = test_noise(r, TOKENS * FEATURES, 2, 0.25f), *got;
    mt_tensor out, dout = mt_tensor_f32(dy + first * FEATURES, rows, FEATURES);
    MT_TRY(mt_vocab_parallel_embedding_create(r->ctx, r->params, "words", &d, &e));
    CHECK(strcmp(e.weight->name, "words.weight") == 0 && e.first_row == r->grid.tp_rank * e.weight->value.rows);
    CHECK(e.weight->value.rows == test_ceil(c->padded ? c->padded : c->vocab, r->grid.tp_size));
    MT_TRY(mt_params_init(r->ctx, r->params, 1));
    MT_TRY(mt_param_scatter(r->ctx, e.weight, table, e.weight->value));
    for (int i = 0; i < TOKENS; i++) {
        ids[i] = i < 2 ? (int32_t)(i * (c->vocab - 1)) : (int32_t)test_below(&seed, (size_t)c->vocab);
        for (int j = 0; j < FEATURES; j++) {
            y[i * FEATURES + j] = (double)table[ids[i] * FEATURES + j];
            dw[ids[i] * FEATURES + j] += 2 * (double)dy[i * FEATURES + j]; /* two backward passes */
        }
    }
    out = test_tensor(r, rows, FEATURES, NAN);
    mt_comm_ledger_reset(r->grid.tp);
    MT_TRY(mt_vocab_parallel_embedding_forward(r->ctx, &e, ids, TOKENS, out));
    count(&want, c->sequence_parallel ? MT_REDUCE_SCATTER : MT_ALL_REDUCE, TOKENS * FEATURES);
    MT_TRY(check_ledger(r, "embedding forward", want));
    MT_TRY(test_near("y", (const float *)out.data, y + first * FEATURES, rows * FEATURES, 1e-12));
    if (alone) memcpy(c->y, out.data, sizeof c->y);
    MT_TRY(
        test_near_f32("y against one rank", (const float *)out.data, c->y + first * FEATURES, rows * FEATURES, 1e-12));
    memset(&want, 0, sizeof want);
    if (c->sequence_parallel) count(&want, MT_ALL_GATHER, TOKENS * FEATURES);
    MT_TRY(mt_vocab_parallel_embedding_backward(r->ctx, &e, ids, TOKENS, dout));
    MT_TRY(check_ledger(r, "embedding backward", want));
    MT_TRY(mt_vocab_parallel_embedding_backward(r->ctx, &e, ids, TOKENS, dout));
    got = test_floats(r, n, NAN);
    MT_TRY(mt_param_gather(r->ctx, r->params, e.weight, e.weight->grad, got));
    MT_TRY(test_near("dw", got, dw, n, 1e-6)); /* sums of up to 24 floats of 0.25 */
    if (alone) memcpy(c->dw, got, (size_t)n * sizeof *got);
    MT_TRY(test_near_f32("dw against one rank", got, c->dw, n, 1e-12));
    for (int64_t i = 0; i < e.weight->value.rows * FEATURES; i++) /* the padding and its gradient stay zero */
        if (e.first_row * FEATURES + i >= n)
            CHECK(((float *)e.weight->value.data)[i] == 0.0f && ((float *)e.weight->grad.data)[i] == 0.0f);
    return MT_SUCCESS;
}

#define EMBEDDING_CASES 9

static mt_status embedding_rank(mt_comm *world, void *user) {
    embedding_case *cases = (embedding_case *)user;
    mt_grid_desc all = {.tp = mt_comm_size(world)};
    test_rank r;
    mt_status status = test_rank_open(world, all, NULL, &r);
    for (int i = 0; status == MT_SUCCESS && i < EMBEDDING_CASES; i++) {
        status = test_rank_renew(&r);
        if (status == MT_SUCCESS) status = embedding_check(&r, &cases[i]);
    }
    test_rank_close(&r);
    return status;
}

static void test_embedding_on_every_split(void **state) {
    static embedding_case cases[EMBEDDING_CASES] = {{.vocab = 48},
                                                    {.vocab = 37},
                                                    {.vocab = 5},
                                                    {.vocab = 48, .sequence_parallel = 1},
                                                    {.vocab = 37, .sequence_parallel = 1},
                                                    {.vocab = 3, .sequence_parallel = 1},
                                                    {.vocab = 37, .padded = 48},
                                                    {.vocab = 37, .padded = 38, .sequence_parallel = 1},
                                                    {.vocab = 5, .padded = 64}};
    (void)state;
    for (size_t i = 0; i < SPLITS; i++) test_launch(splits[i], embedding_rank, cases);
}

/* ---- vocabulary-parallel cross-entropy --------------------------------------------------------------------------- */

typedef struct loss_case {
    int64_t vocab;
    float smoothing, scale;
    int32_t ignore;
    double loss_tolerance, gradient_tolerance;
    float loss[TOKENS], dlogits[TOKENS * 64]; /* results of one rank */
    int64_t padded;
} loss_case;

typedef struct loss_reference {
    double loss[TOKENS], dlogits[TOKENS * 64];
} loss_reference;

/* Computes PyTorch's cross_entropy(reduction='none') and the gradient of sum factor[i] * loss[i] from the
   definition. */
static void loss_reference_of(const loss_case *c, const float *logits, const int32_t *targets, const double *factor,
                              loss_reference *out) {
    double a = (double)c->smoothing, v = (double)c->vocab;
    for (int64_t i = 0; i < TOKENS; i++) {
        const float *x = logits + i * c->vocab;
        double top = -INFINITY, sum = 0, mean = 0, lse;
        int ignored = targets[i] == test_ignored(c->ignore);
        for (int64_t j = 0; j < c->vocab; j++) top = fmax(top, (double)x[j]);
        for (int64_t j = 0; j < c->vocab; j++) {
            sum += exp((double)x[j] - top);
            mean += (double)x[j] / v;
        }
        lse = top + log(sum);
        out->loss[i] = ignored ? 0 : (1 - a) * (lse - (double)x[targets[i]]) + a * (lse - mean);
        for (int64_t j = 0; j < c->vocab; j++)
            out->dlogits[i * c->vocab + j] =
                ignored ? 0 : factor[i] * (exp((double)x[j] - lse) - a / v - (targets[i] == j ? 1 - a : 0));
    }
}

/* Tokens 0 to 3 have nearly equal largest logits, so that softmax is neither 0 nor 1 even at scale 1000. There is a
   target of each kind. */
static void loss_inputs(const loss_case *c, float *logits, int32_t *targets) {
    uint64_t seed = 9;
    for (int64_t i = 0; i < TOKENS; i++) {
        for (int64_t j = 0; j < c->vocab; j++) logits[i * c->vocab + j] = c->scale * test_float(&seed);
        targets[i] = i % 5 == 4 ? test_ignored(c->ignore) : (int32_t)test_below(&seed, (size_t)c->vocab);
        if (i < 4 && c->vocab > 1) {
            logits[i * c->vocab] = c->scale;
            logits[(i + 1) * c->vocab - 1] = c->scale - (float)i;
            targets[i] = i % 2 ? 0 : (int32_t)c->vocab - 1;
        }
    }
}

/* Loss and gradient in one call have the bits and the ledger of two calls. */
static mt_status loss_at_once(test_rank *r, const mt_cross_entropy_desc *d, mt_tensor logits, const int32_t *targets,
                              mt_tensor dloss, mt_tensor loss, mt_tensor gradient) {
    mt_tensor value = test_tensor(r, 1, TOKENS, NAN);
    mt_ledger want = {{0}, {0}};
    size_t mark = mt_arena_mark(r->ctx);
    mt_comm_ledger_reset(r->grid.tp);
    MT_TRY(
        mt_vocab_parallel_cross_entropy_forward_backward(r->ctx, r->grid.tp, d, logits, targets, dloss, 0.5f, value));
    CHECK(mt_arena_mark(r->ctx) == mark);
    count(&want, MT_ALL_GATHER, r->grid.tp_size * TOKENS * 4);
    MT_TRY(check_ledger(r, "cross-entropy at once", want));
    CHECK(memcmp(value.data, loss.data, TOKENS * sizeof(float)) == 0);
    CHECK(memcmp(logits.data, gradient.data, (size_t)(logits.rows * logits.cols) * sizeof(float)) == 0);
    return MT_SUCCESS;
}

static mt_status loss_check(test_rank *r, loss_case *c) {
    mt_cross_entropy_desc d = {
        .vocab = c->vocab, .label_smoothing = c->smoothing, .ignore_index = c->ignore, .padded_vocab = c->padded};
    int ranks = r->grid.tp_size;
    int64_t local = test_ceil(c->padded ? c->padded : c->vocab, ranks), first = local * r->grid.tp_rank;
    float *logits = test_floats(r, TOKENS * c->vocab, 0.0f), *dloss = test_noise(r, TOKENS, 3, 1.0f);
    mt_tensor mine = test_tensor(r, TOKENS, local, 1e30f); /* the padding may contain anything */
    mt_tensor loss = test_tensor(r, 1, TOKENS, NAN), again = test_tensor(r, TOKENS, local, NAN);
    mt_cross_entropy_saved saved;
    mt_ledger want = {{0}, {0}};
    int32_t targets[TOKENS];
    double factor[TOKENS];
    loss_reference *ref = (loss_reference *)test_floats(r, (int64_t)(sizeof *ref / sizeof(float)), 0.0f);
    size_t mark = mt_arena_mark(r->ctx);
    loss_inputs(c, logits, targets);
    for (int64_t i = 0; i < TOKENS; i++) {
        factor[i] = 0.5 * (double)dloss[i];
        for (int64_t j = 0; j < local && first + j < c->vocab; j++)
            ((float *)mine.data)[i * local + j] = logits[i * c->vocab + first + j];
    }
    loss_reference_of(c, logits, targets, factor, ref);
    MT_TRY(mt_copy(r->ctx, mine, again));
    mt_comm_ledger_reset(r->grid.tp);
    MT_TRY(mt_vocab_parallel_cross_entropy_forward(r->ctx, r->grid.tp, &d, mine, targets, loss, NULL));
    CHECK(mt_arena_mark(r->ctx) == mark);
    count(&want, MT_ALL_GATHER, ranks * TOKENS * 4);
    MT_TRY(check_ledger(r, "cross-entropy forward", want));
    MT_TRY(test_near("loss of evaluation", (const float *)loss.data, ref->loss, TOKENS, c->loss_tolerance));
    MT_TRY(mt_fill(r->ctx, loss, NAN));
    MT_TRY(mt_vocab_parallel_cross_entropy_forward(r->ctx, r->grid.tp, &d, mine, targets, loss, &saved));
    MT_TRY(test_near("loss", (const float *)loss.data, ref->loss, TOKENS, c->loss_tolerance));
    if (ranks == 1) memcpy(c->loss, loss.data, sizeof c->loss);
    MT_TRY(test_near_f32("loss against one rank", (const float *)loss.data, c->loss, TOKENS,
                         c->smoothing > 0 ? c->loss_tolerance : 1e-6)); /* the mean is rounded on each shard */
    mt_comm_ledger_reset(r->grid.tp);
    MT_TRY(mt_vocab_parallel_cross_entropy_backward(r->ctx, r->grid.tp, &d, mt_tensor_f32(dloss, 1, TOKENS), 0.5f,
                                                    &saved));
    memset(&want, 0, sizeof want);
    MT_TRY(check_ledger(r, "cross-entropy backward", want));
    for (int64_t i = 0; i < TOKENS; i++)
        for (int64_t j = 0; j < local; j++) {
            const float *got = (const float *)mine.data + i * local + j;
            int64_t e = i * c->vocab + first + j;
            double zero = 0;
            MT_TRY(test_near("dlogits", got, first + j < c->vocab ? &ref->dlogits[e] : &zero, 1,
                             first + j < c->vocab ? c->gradient_tolerance : 0.0));
            if (first + j >= c->vocab) continue;
            if (ranks == 1) c->dlogits[e] = *got;
            MT_TRY(test_near_f32("dlogits against one rank", got, &c->dlogits[e], 1, 1e-6));
        }
    return loss_at_once(r, &d, again, targets, mt_tensor_f32(dloss, 1, TOKENS), loss, mine);
}

#define LOSS_CASES 14

static mt_status loss_rank(mt_comm *world, void *user) {
    loss_case *cases = (loss_case *)user;
    mt_grid_desc all = {.tp = mt_comm_size(world)};
    test_rank r;
    mt_status status = test_rank_open(world, all, NULL, &r);
    for (int i = 0; status == MT_SUCCESS && i < LOSS_CASES; i++) {
        status = test_rank_renew(&r);
        if (status == MT_SUCCESS) status = loss_check(&r, &cases[i]);
        if (status == MT_ERR_DATA)
            fprintf(stderr, "vocab %lld, smoothing %g, scale %g on %d ranks\n", (long long)cases[i].vocab,
                    (double)cases[i].smoothing, (double)cases[i].scale, mt_comm_size(world));
    }
    test_rank_close(&r);
    return status;
}

/* Logits scaled by 1000, as in Megatron's test. The loss is at most 2000, where neighbouring floats are 1.2e-4 apart.
   The tolerance is half of that. With label smoothing it is four times as much, because four numbers of this size are
   rounded. The tolerance of gradients, and between splits, is 1e-6 (for a smoothed loss of 100, a few ulps). */
static void test_cross_entropy_on_every_split(void **state) {
    static loss_case cases[LOSS_CASES] = {
        {48, 0, 3, 0, 1e-6, 1e-6, {0}, {0}, 0},         {37, 0, 3, 0, 1e-6, 1e-6, {0}, {0}, 0},
        {37, 0.1f, 3, 0, 1e-6, 1e-6, {0}, {0}, 0},      {5, 0.2f, 3, -7, 1e-6, 1e-6, {0}, {0}, 0},
        {1, 0.2f, 3, 0, 1e-6, 1e-6, {0}, {0}, 0},       {37, 0.1f, 3, 64, 1e-6, 1e-6, {0}, {0}, 0},
        {37, 0, 1000, 0, 6.2e-5, 1e-6, {0}, {0}, 0},    {37, 0.1f, 1000, 0, 2.5e-4, 1e-6, {0}, {0}, 0},
        {37, 0, 3, -1, 1e-6, 1e-6, {0}, {0}, 0},        {37, 0.1f, 3, 5, 1e-6, 1e-6, {0}, {0}, 0},
        {37, 0, 3, 0, 1e-6, 1e-6, {0}, {0}, 48},        {37, 0.1f, 3, 45, 1e-6, 1e-6, {0}, {0}, 48},
        {5, 0.2f, 1000, 0, 2.5e-4, 1e-6, {0}, {0}, 64}, {37, 0.1f, 3, MT_ZERO, 1e-6, 1e-6, {0}, {0}, 0}};
    (void)state;
    for (size_t i = 0; i < SPLITS; i++) test_launch(splits[i], loss_rank, cases);
}

/* ---- softmax over a vocabulary that is split --------------------------------------------------------------------- */

typedef struct softmax_case {
    int64_t vocab, padded;
    mt_dtype type; /* of the logits and dy; y and dx are f32 */
    float scale;   /* of the logits */
    double y_error, dx_error;
} softmax_case;

/* y of one row, in double precision. */
static void softmax_reference(const double *x, int64_t n, int log_of_it, double *y) {
    double top = -INFINITY, sum = 0;
    for (int64_t j = 0; j < n; j++) top = fmax(top, x[j]);
    for (int64_t j = 0; j < n; j++) sum += exp(x[j] - top);
    for (int64_t j = 0; j < n; j++) y[j] = log_of_it ? x[j] - top - log(sum) : exp(x[j] - top) / sum;
}

/* dx of one row: central differences of the sum of dy y in double precision. */
static void softmax_slopes(double *x, const float *dy, int64_t n, int log_of_it, double *dx) {
    double y[64], h = 1e-5;
    for (int64_t j = 0; j < n; j++) {
        double at = x[j], value[2] = {0, 0};
        for (int side = 0; side < 2; side++) {
            x[j] = side ? at + h : at - h;
            softmax_reference(x, n, log_of_it, y);
            for (int64_t k = 0; k < n; k++) value[side] += (double)dy[k] * y[k];
        }
        x[j] = at;
        dx[j] = (value[1] - value[0]) / (2 * h);
    }
}

/* Rounds n numbers to a type, and returns this rank's columns of them, with NaN in the padding. */
static mt_tensor columns_of(test_rank *r, float *whole, int64_t vocab, int64_t local, mt_dtype type) {
    mt_tensor f = test_tensor(r, TOKENS, local, NAN), t = f;
    int64_t first = local * r->grid.tp_rank, n = TOKENS * vocab;
    uint16_t *narrow = (uint16_t *)test_floats(r, n, 0.0f);
    if (type != MT_F32) mt_f32_to_16bit(type, whole, narrow, n), mt_f32_from_16bit(type, narrow, whole, n);
    for (int64_t i = 0; i < TOKENS; i++)
        for (int64_t j = 0; j < local && first + j < vocab; j++)
            ((float *)f.data)[i * local + j] = whole[i * vocab + first + j];
    if (type == MT_F32) return f;
    t = mt_tensor_make(test_floats(r, TOKENS * local, 0.0f), type, TOKENS, local);
    mt_f32_to_16bit(type, (const float *)f.data, (uint16_t *)t.data, TOKENS * local);
    return t;
}

/* Compares this rank's columns with whole rows. Padding must be 0. */
static mt_status columns_are(test_rank *r, const char *what, mt_tensor got, const double *whole, int64_t vocab,
                             double error) {
    for (int64_t e = 0; e < TOKENS * got.cols; e++) {
        int64_t j = got.cols * r->grid.tp_rank + e % got.cols;
        double want = j < vocab ? whole[e / got.cols * vocab + j] : 0.0;
        MT_TRY(test_near(what, (const float *)got.data + e, &want, 1, j < vocab ? error * fmax(1.0, fabs(want)) : 0.0));
    }
    return MT_SUCCESS;
}

static mt_status softmax_forward(test_rank *r, const softmax_case *c, int log_of_it, mt_tensor x, mt_tensor y) {
    if (log_of_it) return mt_vocab_parallel_log_softmax_forward(r->ctx, r->grid.tp, c->vocab, c->padded, x, y);
    return mt_vocab_parallel_softmax_forward(r->ctx, r->grid.tp, c->vocab, c->padded, x, y);
}

static mt_status softmax_backward(test_rank *r, const softmax_case *c, int log_of_it, mt_tensor y, mt_tensor dy,
                                  mt_tensor dx) {
    if (log_of_it) return mt_vocab_parallel_log_softmax_backward(r->ctx, r->grid.tp, c->vocab, c->padded, y, dy, dx);
    return mt_vocab_parallel_softmax_backward(r->ctx, r->grid.tp, c->vocab, c->padded, y, dy, dx);
}

/* Values, gradients and communication of a case, then the same in place, in the type of the logits. */
static mt_status softmax_check(test_rank *r, const softmax_case *c, int log_of_it) {
    int64_t local = test_ceil(c->padded ? c->padded : c->vocab, r->grid.tp_size), n = TOKENS * c->vocab;
    float *whole = test_noise(r, n, 5, c->scale), *up = test_noise(r, n, 6, 1.0f);
    mt_tensor x = columns_of(r, whole, c->vocab, local, c->type), dy = columns_of(r, up, c->vocab, local, c->type);
    mt_tensor y = test_tensor(r, TOKENS, local, NAN), dx = test_tensor(r, TOKENS, local, NAN);
    mt_tensor narrow = test_tensor(r, TOKENS, local, NAN);
    double want[TOKENS * 64], slopes[TOKENS * 64], row[64];
    double rounding = c->type == MT_F32 ? 0.0 : c->type == MT_BF16 ? 1.0 / 256 : 1.0 / 2048;
    mt_ledger ledger = {{0}, {0}};
    size_t mark = mt_arena_mark(r->ctx);
    for (int64_t i = 0; i < TOKENS; i++) {
        for (int64_t j = 0; j < c->vocab; j++) row[j] = (double)whole[i * c->vocab + j];
        softmax_reference(row, c->vocab, log_of_it, want + i * c->vocab);
        softmax_slopes(row, up + i * c->vocab, c->vocab, log_of_it, slopes + i * c->vocab);
    }
    mt_comm_ledger_reset(r->grid.tp);
    MT_TRY(softmax_forward(r, c, log_of_it, x, y));
    count(&ledger, MT_ALL_GATHER, r->grid.tp_size * TOKENS * 2);
    MT_TRY(check_ledger(r, "softmax forward", ledger));
    MT_TRY(columns_are(r, "softmax", y, want, c->vocab, c->y_error));
    mt_comm_ledger_reset(r->grid.tp);
    MT_TRY(softmax_backward(r, c, log_of_it, y, dy, dx));
    memset(&ledger, 0, sizeof ledger);
    count(&ledger, MT_ALL_REDUCE, TOKENS);
    MT_TRY(check_ledger(r, "softmax backward", ledger));
    MT_TRY(columns_are(r, "the gradient of softmax", dx, slopes, c->vocab, c->dx_error));
    MT_TRY(softmax_forward(r, c, log_of_it, x, x));
    MT_TRY(mt_convert(r->ctx, x, narrow));
    MT_TRY(columns_are(r, "softmax in place", narrow, want, c->vocab, c->y_error + rounding));
    MT_TRY(softmax_backward(r, c, log_of_it, y, dy, dy));
    MT_TRY(mt_convert(r->ctx, dy, narrow));
    MT_TRY(columns_are(r, "the gradient of softmax in place", narrow, slopes, c->vocab, c->dx_error + rounding));
    CHECK(mt_arena_mark(r->ctx) == mark);
    return MT_SUCCESS;
}

static const softmax_case softmax_cases[] = {
    {48, 0, MT_F32, 3, 1e-6, 1e-6}, {37, 0, MT_F32, 3, 1e-6, 1e-6},   {5, 0, MT_F32, 3, 1e-6, 1e-6},
    {1, 0, MT_F32, 3, 1e-6, 1e-6},  {5, 64, MT_F32, 3, 1e-6, 1e-6},   {37, 48, MT_BF16, 3, 1e-6, 1e-6},
    {37, 0, MT_F16, 3, 1e-6, 1e-6}, {37, 0, MT_F32, 300, 1e-6, 1e-5}, {5, 0, MT_BF16, 3, 1e-6, 1e-6}};

static mt_status softmax_rank(mt_comm *world, void *user) {
    test_rank r;
    mt_status status = test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, NULL, &r);
    (void)user;
    for (size_t i = 0; status == MT_SUCCESS && i < 2 * sizeof softmax_cases / sizeof *softmax_cases; i++) {
        const softmax_case *c = &softmax_cases[i / 2];
        status = test_rank_renew(&r);
        if (status == MT_SUCCESS) status = softmax_check(&r, c, i % 2);
        if (status == MT_ERR_DATA)
            fprintf(stderr, "vocab %lld, padded %lld, %s, log %d on %d ranks\n", (long long)c->vocab,
                    (long long)c->padded, mt_dtype_name(c->type), (int)(i % 2), mt_comm_size(world));
    }
    test_rank_close(&r);
    return status;
}

/* With 5 columns on 4 ranks, one of them has padding only, and so have most of them with 64 columns for a vocabulary of
   5. */
static void test_softmax_on_every_split(void **state) {
    (void)state;
    for (size_t i = 0; i < SPLITS; i++) test_launch(splits[i], softmax_rank, NULL);
}

enum { WORDS = 37, WORDS_PADDED = 44 };

/* A loss of the program's own: distillation. With p_t and p_s, the softmax of a teacher's and of a student's logits,
   the loss of a token is KL(p_t || p_s) = sum of p_t (log p_t - log p_s). Writes to loss [1, 1] `scale` times the sum
   over the tokens, and to dstudent its gradient. All tensors have this rank's columns of the vocabulary. */
static mt_status distill(test_rank *r, float scale, mt_tensor teacher, mt_tensor student, mt_tensor loss,
                         mt_tensor dstudent) {
    mt_context *ctx = r->ctx;
    mt_comm *tp = r->grid.tp;
    size_t mark = mt_arena_mark(ctx);
    mt_tensor p_t, log_t, log_s;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, student.rows, student.cols, &p_t));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, student.rows, student.cols, &log_t));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, student.rows, student.cols, &log_s));
    MT_TRY(mt_vocab_parallel_softmax_forward(ctx, tp, WORDS, WORDS_PADDED, teacher, p_t));
    MT_TRY(mt_vocab_parallel_log_softmax_forward(ctx, tp, WORDS, WORDS_PADDED, teacher, log_t));
    MT_TRY(mt_vocab_parallel_log_softmax_forward(ctx, tp, WORDS, WORDS_PADDED, student, log_s));
    MT_TRY(mt_scale_add(ctx, -scale, mt_none(), log_s, scale, mt_none(), log_t)); /* scale (log p_t - log p_s) */
    MT_TRY(mt_multiply(ctx, p_t, log_t, log_t));
    MT_TRY(mt_fill(ctx, loss, 0.0f));
    MT_TRY(mt_sum(ctx, log_t, loss)); /* of this rank's columns */
    MT_TRY(mt_all_reduce(ctx, tp, loss.data, loss.data, 1, MT_F32, MT_SUM));
    MT_TRY(mt_scale_add(ctx, -scale, mt_none(), p_t, 0.0f, mt_none(), p_t)); /* the gradient of log p_s */
    MT_TRY(mt_vocab_parallel_log_softmax_backward(ctx, tp, WORDS, WORDS_PADDED, log_s, p_t, dstudent));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* The gradient is scale (p_s - p_t). The teacher's logits are 16-bit, and so is the student's gradient. */
static mt_status distillation_rank(mt_comm *world, void *user) {
    const float scale = 0.25f;
    test_rank r;
    double row[WORDS], p[2][WORDS], value = 0.0, slopes[TOKENS * WORDS];
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, NULL, &r));
    int64_t local = test_ceil(WORDS_PADDED, r.grid.tp_size);
    float *x[2] = {test_noise(&r, TOKENS * WORDS, 5, 4.0f), test_noise(&r, TOKENS * WORDS, 6, 4.0f)};
    mt_tensor teacher = columns_of(&r, x[0], WORDS, local, MT_BF16);
    mt_tensor student = columns_of(&r, x[1], WORDS, local, MT_F32), loss = test_tensor(&r, 1, 1, NAN);
    mt_tensor got = test_tensor(&r, TOKENS, local, NAN);
    (void)user;
    for (int64_t i = 0; i < TOKENS; i++) {
        for (int s = 0; s < 2; s++) {
            for (int j = 0; j < WORDS; j++) row[j] = (double)x[s][i * WORDS + j];
            softmax_reference(row, WORDS, 0, p[s]);
        }
        for (int j = 0; j < WORDS; j++) value += (double)scale * p[0][j] * log(p[0][j] / p[1][j]);
        for (int j = 0; j < WORDS; j++) slopes[i * WORDS + j] = (double)scale * (p[1][j] - p[0][j]);
    }
    MT_TRY(mt_declare(r.ctx, r.grid.tp, teacher, MT_SPLIT_COLS));
    MT_TRY(mt_declare(r.ctx, r.grid.tp, student, MT_SPLIT_COLS));
    MT_TRY(distill(&r, scale, teacher, student, loss, got));
    MT_TRY(test_near("the loss of distillation", (const float *)loss.data, &value, 1, 1e-5 * value));
    MT_TRY(columns_are(&r, "the gradient of distillation", got, slopes, WORDS, 1e-6));
    MT_TRY(distill(&r, scale, teacher, student, loss, student)); /* in place of the logits */
    MT_TRY(columns_are(&r, "the gradient of distillation in place", student, slopes, WORDS, 1e-6));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_distillation(void **state) {
    (void)state;
    for (size_t i = 0; i < SPLITS; i++) test_launch(splits[i], distillation_rank, NULL);
}

/* ---- gradients: sync, norm, clip --------------------------------------------------------------------------------- */

typedef struct sync_case {
    mt_grid_desc grid;
    int ranks;
} sync_case;

static mt_param *add_or_null(test_rank *r, mt_param_desc d) {
    mt_param *p = NULL;
    return mt_params_add(r->ctx, r->params, &d, &p) == MT_SUCCESS ? p : NULL;
}

static mt_status expect_all(mt_tensor t, float value) {
    for (int64_t i = 0; i < t.rows * t.cols; i++) CHECK(((const float *)t.data)[i] == value);
    return MT_SUCCESS;
}

/* Every rank's gradient is another power of two, so a sum tells which gradients it contains. */
static float rank_bit(const mt_grid *g, int tp, int data, int pipeline) {
    return (float)(1 << (tp + g->tp_size * (data + g->dp_size * pipeline)));
}

static mt_status sync_body(test_rank *r) {
    const mt_grid *g = &r->grid;
    mt_param *split =
        add_or_null(r, (mt_param_desc){.name = "split", .rows = 6, .cols = 3, .placement = MT_SPLIT_ROWS});
    mt_param *whole = add_or_null(r, (mt_param_desc){.name = "whole", .rows = 1, .cols = 5});
    mt_param *partial = add_or_null(r, (mt_param_desc){.name = "partial", .rows = 1, .cols = 5, .sequence_partial = 1});
    mt_param *words = add_or_null(
        r, (mt_param_desc){.name = "words", .rows = 8, .cols = 2, .placement = MT_SPLIT_ROWS, .shared_embedding = 1});
    mt_param *more = add_or_null(r, (mt_param_desc){.name = "more", .rows = 2, .cols = 20, .sequence_partial = 1});
    int own_data = mt_comm_rank(g->dp_cp), data_ranks = mt_comm_size(g->dp_cp);
    float own = rank_bit(g, g->tp_rank, own_data, g->pp_rank), data = 0, both = 0, ends = 0;
    int last = g->pp_size - 1, is_end = g->pp_rank == 0 || g->pp_rank == last;
    CHECK(split && whole && partial && words && more);
    MT_TRY(mt_params_init(r->ctx, r->params, 1));
    for (int i = 0; i < mt_params_count(r->params); i++) MT_TRY(mt_fill(r->ctx, mt_params_at(r->params, i)->grad, own));
    for (int d = 0; d < data_ranks; d++) {
        data += rank_bit(g, g->tp_rank, d, g->pp_rank);
        for (int t = 0; t < g->tp_size; t++) both += rank_bit(g, t, d, g->pp_rank);
        ends += rank_bit(g, g->tp_rank, d, 0) + (last > 0 ? rank_bit(g, g->tp_rank, d, last) : 0.0f);
    }
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    MT_TRY(expect_all(split->grad, data));
    MT_TRY(expect_all(whole->grad, data));
    MT_TRY(expect_all(partial->grad, both));
    MT_TRY(expect_all(more->grad, both));
    MT_TRY(expect_all(words->grad, is_end ? ends : data));
    CHECK(mt_comm_ledger(g->tp).calls[MT_ALL_REDUCE] == (g->tp_size > 1));
    CHECK(mt_comm_ledger(g->dp_cp).calls[MT_ALL_REDUCE] == (data_ranks > 1));
    MT_TRY(mt_params_zero_grad(r->ctx, r->params));
    for (int i = 0; i < mt_params_count(r->params); i++) MT_TRY(expect_all(mt_params_at(r->params, i)->grad, 0.0f));
    return MT_SUCCESS;
}

static mt_status sync_rank(mt_comm *world, void *user) {
    test_rank r;
    mt_status status;
    MT_TRY(test_rank_open(world, ((const sync_case *)user)->grid, NULL, &r));
    status = sync_body(&r);
    test_rank_close(&r);
    return status;
}

static void test_sync_gradients(void **state) {
    static sync_case cases[] = {{{1, 1, 1, 1}, 1}, {{4, 1, 1, 1}, 4}, {{1, 3, 1, 1}, 3}, {{2, 2, 1, 1}, 4},
                                {{1, 1, 2, 1}, 2}, {{2, 1, 2, 1}, 4}, {{2, 2, 2, 1}, 8}, {{1, 2, 3, 1}, 6},
                                {{1, 1, 1, 2}, 2}, {{2, 2, 1, 2}, 8}, {{1, 1, 3, 2}, 6}, {{1, 2, 2, 2}, 8}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) test_launch(cases[i].ranks, sync_rank, &cases[i]);
}

/* Sets the gradient of a model with one parameter of each kind to the same global values on every split. Each pipeline
   stage has its own parameters, and the first and the last share the embedding. Adds the squares of this stage's
   parameters, each counted once, to *square, and creates the parameters if this rank holds the stage. */
static mt_status norm_stage(test_rank *r, int stage, double *square) {
    static const char *const kinds[] = {"whole", "rows", "partial", "cols"};
    char name[4][16];
    mt_param_desc d[] = {{.name = name[0], .rows = 3, .cols = 5},
                         {.name = name[1], .rows = 26, .cols = 3, .placement = MT_SPLIT_ROWS, .parts = 2},
                         {.name = name[2], .rows = 1, .cols = 7, .sequence_partial = 1},
                         {.name = name[3], .rows = 4, .cols = 9, .placement = MT_SPLIT_COLS},
                         {.name = "words", .rows = 11, .cols = 3, .placement = MT_SPLIT_ROWS, .shared_embedding = 1}};
    for (int i = 0; i < 4; i++) snprintf(name[i], sizeof name[i], "%s.%d", kinds[i], stage);
    for (int i = 0; i < 5; i++) {
        uint64_t seed = test_name_seed(d[i].name);
        if (stage == r->grid.pp_rank) CHECK(add_or_null(r, d[i]) != NULL);
        for (int64_t k = 0; k < d[i].rows * d[i].cols && !(d[i].shared_embedding && stage > 0); k++) {
            double x = (double)(3 * test_float(&seed));
            *square += x * x;
        }
    }
    return MT_SUCCESS;
}

/* A non-finite element of any parameter on a single rank of the model group, even in a copy that the norm does not
   count, makes the norm non-finite on every rank. */
static mt_status norm_finds(test_rank *r) {
    static const float bad[] = {NAN, INFINITY, -INFINITY, 3e38f, -NAN};
    float norm = 0;
    for (int i = 0; i < mt_params_count(r->params); i++)
        for (int rank = 0; rank < mt_comm_size(r->grid.model); rank++) {
            float *x = (float *)mt_params_at(r->params, i)->grad.data, old = *x;
            if (rank == mt_comm_rank(r->grid.model)) *x = bad[(i + rank) % 5]; /* the square of 3e38 is not finite */
            MT_TRY(mt_grad_norm(r->ctx, r->params, &norm));
            CHECK(!isfinite(norm));
            CHECK(!isnan(norm) || memcmp(&norm, &bad[0], sizeof norm) == 0); /* all NaN norms have the same bits */
            *x = old;
        }
    MT_TRY(mt_grad_norm(r->ctx, r->params, &norm));
    CHECK(isfinite(norm));
    return MT_SUCCESS;
}

/* An infinite element, the same in all copies, makes the norm infinite on every split, and a NaN makes it NaN. */
static mt_status norm_of_overflow(test_rank *r) {
    static const float bad[] = {INFINITY, -INFINITY, 3e38f, -NAN};
    static const float want[] = {INFINITY, INFINITY, INFINITY, NAN};
    float norm = 0;
    for (int i = 0; i < mt_params_count(r->params); i++) {
        mt_param *p = mt_params_at(r->params, i);
        for (int k = 0; k < 4; k++) {
            float *x = test_noise(r, p->desc.rows * p->desc.cols, test_name_seed(p->name), 3.0f), old = x[0];
            x[0] = bad[k];
            MT_TRY(mt_param_scatter(r->ctx, p, x, p->grad));
            MT_TRY(mt_grad_norm(r->ctx, r->params, &norm));
            CHECK(memcmp(&norm, &want[k], sizeof norm) == 0);
            x[0] = old;
            MT_TRY(mt_param_scatter(r->ctx, p, x, p->grad));
        }
    }
    return MT_SUCCESS;
}

static mt_status norm_body(test_rank *r) {
    double square = 0, want;
    float norm = NAN, again = NAN;
    for (int s = 0; s < r->grid.pp_size; s++) MT_TRY(norm_stage(r, s, &square));
    MT_TRY(mt_params_init(r->ctx, r->params, 1));
    MT_TRY(mt_sync_gradients(r->ctx, r->params)); /* of zeros; what follows writes the sums */
    for (int i = 0; i < mt_params_count(r->params); i++) {
        mt_param *p = mt_params_at(r->params, i);
        float *x = test_noise(r, p->desc.rows * p->desc.cols, test_name_seed(p->name), 3.0f);
        MT_TRY(mt_param_scatter(r->ctx, p, x, p->grad));
    }
    want = sqrt(square);
    mt_comm_ledger_reset(r->grid.model);
    MT_TRY(mt_grad_norm(r->ctx, r->params, &norm));
    MT_TRY(test_near("norm", &norm, &want, 1, 1e-6 * want));
    if (mt_comm_size(r->grid.model) > 1) {
        CHECK(mt_comm_ledger(r->grid.model).calls[MT_ALL_REDUCE] == 1);
        CHECK(mt_comm_ledger(r->grid.model).bytes[MT_ALL_REDUCE] == 8);
    }
    MT_TRY(mt_grad_norm(r->ctx, r->params, &again));
    CHECK(norm == again && mt_arena_mark(r->ctx) == 0);
    MT_TRY(norm_of_overflow(r));
    return norm_finds(r);
}

static mt_status norm_rank(mt_comm *world, void *user) {
    test_rank r;
    mt_status status;
    MT_TRY(test_rank_open(world, ((const sync_case *)user)->grid, NULL, &r));
    status = norm_body(&r);
    test_rank_close(&r);
    return status;
}

static void test_grad_norm_counts_each_element_once(void **state) {
    static sync_case cases[] = {{{1, 1, 1, 1}, 1}, {{2, 1, 1, 1}, 2}, {{4, 1, 1, 1}, 4}, {{8, 1, 1, 1}, 8},
                                {{1, 2, 1, 1}, 2}, {{2, 2, 1, 1}, 4}, {{3, 2, 1, 1}, 6}, {{1, 1, 2, 1}, 2},
                                {{2, 1, 2, 1}, 4}, {{2, 2, 2, 1}, 8}, {{2, 1, 2, 2}, 8}, {{1, 2, 1, 2}, 4}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) test_launch(cases[i].ranks, norm_rank, &cases[i]);
}

static void test_clip_coefficient(void **state) {
    (void)state;
    assert_true(mt_clip_coefficient(0.5f, 1.0f) == 1.0f);
    assert_true(mt_clip_coefficient(0.0f, 1.0f) == 1.0f);
    assert_true(fabs((double)mt_clip_coefficient(4.0f, 1.0f) - 1.0 / 4.000001) < 3e-8);
    assert_true(fabs((double)mt_clip_coefficient(1e-3f, 1e-4f) - 1e-4 / 1.001e-3) < 3e-8);
    assert_true(mt_clip_coefficient(4.0f, 0.0f) == 1.0f);
    assert_true(mt_clip_coefficient(4.0f, -1.0f) == 1.0f);
    assert_true(mt_clip_coefficient(INFINITY, 1.0f) == 0.0f);
}

/* ---- optimizer --------------------------------------------------------------------------------------------------- */

typedef struct adam_case {
    mt_optimizer_desc desc;
    double beta1, beta2, eps; /* the values that the description stands for */
    int sets;                 /* 1: mt_param_set_weight_decay says what is decayed, and the descriptions the opposite */
} adam_case;

/* One parameter with weight decay and one without, six steps. */
static mt_status adam_body(test_rank *r, const adam_case *c) {
    mt_param *p[2] = {
        add_or_null(r, (mt_param_desc){.name = "matrix",
                                       .rows = 13,
                                       .cols = 5,
                                       .placement = MT_SPLIT_ROWS,
                                       .init_std = 1.0f,
                                       .weight_decay = c->sets ? 0 : 1}),
        add_or_null(r,
                    (mt_param_desc){.name = "bias", .rows = 1, .cols = 65, .init_std = 1.0f, .weight_decay = c->sets})};
    double x[2][65], m[2][65] = {{0}}, v[2][65] = {{0}}, decay[2] = {(double)c->desc.weight_decay, 0};
    float *got = test_floats(r, 65, NAN), lr = 0.01f, scale = 0.25f;
    mt_optimizer o = {0};
    CHECK(p[0] && p[1]);
    for (int k = 0; c->sets && k < 2; k++) MT_TRY(mt_param_set_weight_decay(r->ctx, p[k], k == 0));
    MT_TRY(mt_params_init(r->ctx, r->params, 8));
    for (int k = 0; k < 2; k++) {
        MT_TRY(mt_param_gather(r->ctx, r->params, p[k], p[k]->value, got));
        for (int i = 0; i < 65; i++) x[k][i] = (double)got[i];
    }
    MT_TRY(mt_optimizer_create(r->ctx, r->params, &c->desc, &o));
    CHECK(o.desc.beta1 == (float)c->beta1 && o.desc.beta2 == (float)c->beta2 && o.desc.eps == (float)c->eps);
    for (int64_t step = 1; step <= 6; step++) {
        MT_TRY(mt_params_zero_grad(r->ctx, r->params));
        for (int k = 0; k < 2; k++) {
            float *g = test_noise(r, 65, (uint64_t)(100 * k + step), 2.0f);
            MT_TRY(mt_param_scatter(r->ctx, p[k], g, p[k]->grad));
            for (int i = 0; i < 65; i++) {
                double gi = (double)scale * (double)g[i];
                m[k][i] = c->beta1 * m[k][i] + (1 - c->beta1) * gi;
                v[k][i] = c->beta2 * v[k][i] + (1 - c->beta2) * gi * gi;
                x[k][i] -= (double)lr * decay[k] * x[k][i];
                x[k][i] -= (double)lr * m[k][i] / (1 - pow(c->beta1, (double)step)) /
                           (sqrt(v[k][i] / (1 - pow(c->beta2, (double)step))) + c->eps);
            }
        }
        MT_TRY(mt_optimizer_step(r->ctx, &o, lr, scale));
        CHECK(o.step == step);
        for (int k = 0; k < 2; k++) { /* for values up to 3: floats are 2.4e-7 apart, and each step rounds */
            MT_TRY(mt_param_gather(r->ctx, r->params, p[k], p[k]->value, got));
            MT_TRY(test_near(p[k]->name, got, x[k], 65, 2e-6));
            MT_TRY(
                /* for values up to 3 and 9, like gradients and squares */
                mt_optimizer_gather(r->ctx, &o, p[k], MT_EXP_AVG, got));
            MT_TRY(test_near("first moment", got, m[k], 65, 1e-6));
            MT_TRY(mt_optimizer_gather(r->ctx, &o, p[k], MT_EXP_AVG_SQ, got));
            MT_TRY(test_near("second moment", got, v[k], 65, 2e-6));
        }
    }
    /* gather returns what scatter stored; a master weight is also the value */
    for (int s = MT_EXP_AVG; s <= MT_MASTER; s++) {
        MT_TRY(
            mt_optimizer_scatter(r->ctx, &o, p[0], (mt_optimizer_state)s, test_noise(r, 65, 7u + (uint64_t)s, 1.0f)));
        MT_TRY(mt_optimizer_gather(r->ctx, &o, p[0], (mt_optimizer_state)s, got));
        CHECK(memcmp(got, test_noise(r, 65, 7u + (uint64_t)s, 1.0f), 65 * sizeof *got) == 0);
    }
    MT_TRY(mt_param_gather(r->ctx, r->params, p[0], p[0]->value, got));
    CHECK(memcmp(got, test_noise(r, 65, 7u + MT_MASTER, 1.0f), 65 * sizeof *got) == 0);
    for (int64_t i = 0; i < p[0]->value.rows * p[0]->value.cols; i++) /* the padding stays zero */
        if (global_element(&p[0]->desc, r->grid.tp_size, r->grid.tp_rank, i / 5, i % 5) < 0)
            CHECK(((const float *)p[0]->value.data)[i] == 0.0f);
    mt_optimizer_destroy(r->ctx, &o);
    CHECK(!o.params && !o.m);
    mt_optimizer_destroy(r->ctx, &o);
    return MT_SUCCESS;
}

static mt_status adam_rank(mt_comm *world, void *user) {
    mt_grid_desc all = {.tp = mt_comm_size(world)};
    test_rank r;
    mt_status status;
    MT_TRY(test_rank_open(world, all, NULL, &r));
    status = adam_body(&r, (const adam_case *)user);
    test_rank_close(&r);
    return status;
}

static void test_adamw(void **state) {
    static adam_case cases[] = {{{0}, (double)0.9f, (double)0.999f, 1e-8, 0},
                                {{.weight_decay = 0.1f}, (double)0.9f, (double)0.999f, 1e-8, 0},
                                {{0.8f, 0.95f, 1e-3f, 0.5f, 0, 0}, (double)0.8f, (double)0.95f, 1e-3, 0},
                                {{.weight_decay = 0.5f}, (double)0.9f, (double)0.999f, 1e-8, 1},
                                {{.beta1 = MT_ZERO, .weight_decay = 0.1f}, 0, (double)0.999f, 1e-8, 0},
                                {{.beta2 = MT_ZERO}, (double)0.9f, 0, 1e-8, 0},
                                {{.eps = MT_ZERO}, (double)0.9f, (double)0.999f, 0, 0},
                                {{.beta1 = MT_ZERO, .beta2 = MT_ZERO, .eps = MT_ZERO}, 0, 0, 0, 0}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int ranks = 1; ranks <= 4; ranks *= 2) test_launch(ranks, adam_rank, &cases[i]);
}

static void test_optimizer_refuses(void **state) {
    static const struct {
        mt_optimizer_desc desc;
        const char *rest; /* of the message, behind the function */
    } bad[] = {{{.beta1 = 1.0f, .beta2 = 1.5f}, "beta1 is 1, must be at least 0 and below 1"},
               {{.beta1 = -0.5f}, "beta1 is -0.5, must be at least 0 and below 1"},
               {{.beta2 = 1.5f}, "beta2 is 1.5, must be at least 0 and below 1"},
               {{.beta2 = NAN}, "beta2 is nan, must be at least 0 and below 1"},
               {{.eps = -1e-8f}, "eps is -1e-08, must be at least 0 and finite"},
               {{.eps = INFINITY}, "eps is inf, must be at least 0 and finite"},
               {{.weight_decay = MT_ZERO}, "weight_decay is -2.14748e+09, must be at least 0 and finite"},
               {{.weight_decay = -0.1f}, "weight_decay is -0.1, must be at least 0 and finite"},
               {{.weight_decay = NAN}, "weight_decay is nan, must be at least 0 and finite"},
               {{.weight_decay = INFINITY}, "weight_decay is inf, must be at least 0 and finite"},
               {{.stochastic_rounding = 1}, "stochastic_rounding is for bf16 and f16 parameters, these are f32"}};
    mt_optimizer o = {0};
    mt_param *p, other;
    mt_tensor m;
    float one = 0;
    test_rank r;
    size_t held;
    (void)state;
    open_alone(&r);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "no optimizer", mt_optimizer_step(r.ctx, &o, 0.1f, 1.0f));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "no optimizer", mt_optimizer_step(r.ctx, NULL, 0.1f, 1.0f));
    p = add_matrix(&r, "a", 2, 3, 1.0f);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_params_init first", mt_optimizer_create(r.ctx, r.params, NULL, &o));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, p->value, 2.0f));
    held = mt_context_allocated(r.ctx);
    assert_int_equal(mt_optimizer_create(NULL, r.params, NULL, &o), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "NULL", mt_optimizer_create(r.ctx, NULL, NULL, &o));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_optimizer_create(r.ctx, r.params, NULL, NULL));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        REFUSED_EXACTLY(r.ctx, MT_ERR_ARGUMENT, bad[i].rest, mt_optimizer_create(r.ctx, r.params, &bad[i].desc, &o));
    assert_int_equal(mt_context_allocated(r.ctx), held);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_optimizer_create(r.ctx, r.params, NULL, &o));
    assert_int_equal(mt_optimizer_step(NULL, &o, 0.1f, 1.0f), MT_ERR_ARGUMENT);
    other = *p;
    assert_int_equal(mt_optimizer_moments(NULL, &o, p, &m, &m), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "no optimizer", mt_optimizer_moments(r.ctx, NULL, p, &m, &m));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "param is NULL", mt_optimizer_moments(r.ctx, &o, NULL, &m, &m));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "m or v is NULL", mt_optimizer_moments(r.ctx, &o, p, &m, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'a' is not of this", mt_optimizer_moments(r.ctx, &o, &other, &m, &m));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "state is 3, must be MT_EXP_AVG, MT_EXP_AVG_SQ or MT_MASTER",
            mt_optimizer_gather(r.ctx, &o, p, (mt_optimizer_state)3, &one));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'a' is not of this", mt_optimizer_scatter(r.ctx, &o, &other, MT_MASTER, &one));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "lr|nan", mt_optimizer_step(r.ctx, &o, NAN, 1.0f));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "grad_scale|inf", mt_optimizer_step(r.ctx, &o, 0.1f, INFINITY));
    assert_true(o.step == 0);
    test_untouched("value", (const float *)p->value.data, 6, 2.0f);
    mt_optimizer_destroy(r.ctx, &o);
    mt_optimizer_destroy(r.ctx, NULL);
    mt_optimizer_destroy(NULL, &o);
    assert_int_equal(mt_context_allocated(r.ctx), held);
    test_paper_rank_close(&r);
}

static void test_step_refuses(void **state) {
    mt_optimizer o = {0};
    mt_loss_scaler scaler, good;
    mt_step step = {0};
    mt_step_values values;
    mt_param *p;
    test_rank r;
    size_t held;
    (void)state;
    open_alone(&r);
    p = add_matrix(&r, "a", 2, 3, 1.0f);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "optimizer is NULL", mt_step_create(r.ctx, NULL, NULL, 1.0f, &step));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "no step", mt_step_begin(r.ctx, &step, 0.1f, 0));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "no step", mt_step_update(r.ctx, NULL, mt_none()));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "no step", mt_step_read(r.ctx, &step, &values));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_optimizer_create(r.ctx, r.params, NULL, &o));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_loss_scaler_create(r.ctx, NULL, &good));
    scaler = good;
    scaler.desc.growth = 0.5f;
    held = mt_context_allocated(r.ctx);
    assert_int_equal(mt_step_create(NULL, &o, NULL, 1.0f, &step), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_step_create(r.ctx, &o, NULL, 1.0f, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "max_norm|nan", mt_step_create(r.ctx, &o, NULL, NAN, &step));
    REFUSED_EXACTLY(r.ctx, MT_ERR_ARGUMENT, "scaler.desc.growth is 0.5, must be at least 1 and finite",
                    mt_step_create(r.ctx, &o, &scaler, 1.0f, &step));
    scaler = good;
    scaler.scale = INFINITY;
    REFUSED_EXACTLY(r.ctx, MT_ERR_ARGUMENT, "scaler.scale is inf, must be at least min_scale and finite",
                    mt_step_create(r.ctx, &o, &scaler, 1.0f, &step));
    scaler = good;
    scaler.good_steps = scaler.desc.growth_interval;
    REFUSED_EXACTLY(r.ctx, MT_ERR_ARGUMENT, "scaler.good_steps is 1000, must be below growth_interval",
                    mt_step_create(r.ctx, &o, &scaler, 1.0f, &step));
    assert_int_equal(mt_context_allocated(r.ctx), held);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_step_create(r.ctx, &o, NULL, 1.0f, &step));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, p->value, 2.0f));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "lr is nan, must be finite", mt_step_begin(r.ctx, &step, NAN, 0));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "number|17592186044416", mt_step_begin(r.ctx, &step, 0.1f, (uint64_t)1 << 44));
    REFUSED(r.ctx, MT_ERR_SHAPE, "loss", mt_step_update(r.ctx, &step, p->value));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_step_read(r.ctx, &step, NULL));
    assert_int_equal(mt_step_begin(NULL, &step, 0.1f, 0), MT_ERR_ARGUMENT);
    test_untouched("value", (const float *)p->value.data, 6, 2.0f);
    mt_step_destroy(r.ctx, NULL);
    mt_step_destroy(NULL, &step);
    mt_step_destroy(r.ctx, &step);
    mt_step_destroy(r.ctx, &step);
    assert_int_equal(mt_context_allocated(r.ctx), held);
    mt_optimizer_destroy(r.ctx, &o);
    test_paper_rank_close(&r);
}

static void test_cosine_schedule(void **state) {
    static const struct {
        int64_t step, warmup, total;
        double want;
    } golden[] = {{0, 4, 20, 0.25},
                  {1, 4, 20, 0.5},
                  {3, 4, 20, 1.0},
                  {4, 4, 20, 1.0},
                  {12, 4, 20, 0.55},
                  {20, 4, 20, 0.1},
                  {1000, 4, 20, 0.1},
                  {8, 4, 20, 0.868198051533946},
                  {16, 4, 20, 0.231801948466054},
                  {0, 0, 10, 1.0},
                  {5, 0, 10, 0.55},
                  {7, 10, 5, 0.8},
                  {10, 10, 5, 0.1},
                  {0, 1, 2, 1.0}};
    (void)state;
    for (size_t i = 0; i < sizeof golden / sizeof *golden; i++) {
        float got = mt_cosine_schedule(golden[i].step, golden[i].warmup, golden[i].total, 1.0f, 0.1f);
        if (fabs((double)got - golden[i].want) > 6e-8)
            fail_msg("step %lld of %lld after %lld: %.9g, expected %.9g", (long long)golden[i].step,
                     (long long)golden[i].total, (long long)golden[i].warmup, (double)got, golden[i].want);
    }
}

/* Up to 4 steps of warm-up, a line from 1 to 0.1 until step 20, then 0.1. */
static void test_linear_schedule(void **state) {
    static const struct {
        int64_t step, warmup, total;
        double want;
    } golden[] = {{0, 4, 20, 0.25},   {3, 4, 20, 1.0},  {4, 4, 20, 1.0},  {8, 4, 20, 0.775}, {12, 4, 20, 0.55},
                  {16, 4, 20, 0.325}, {20, 4, 20, 0.1}, {99, 4, 20, 0.1}, {0, 0, 10, 1.0},   {5, 0, 10, 0.55},
                  {9, 0, 10, 0.19},   {7, 10, 5, 0.8},  {10, 10, 5, 0.1}, {-3, -3, 10, 1.0}, {0, 1, 2, 1.0}};
    (void)state;
    for (size_t i = 0; i < sizeof golden / sizeof *golden; i++) {
        float got = mt_linear_schedule(golden[i].step, golden[i].warmup, golden[i].total, 1.0f, 0.1f);
        if (fabs((double)got - golden[i].want) > 6e-8)
            fail_msg("step %lld of %lld after %lld: %.9g, expected %.9g", (long long)golden[i].step,
                     (long long)golden[i].total, (long long)golden[i].warmup, (double)got, golden[i].want);
    }
}

/* ---- bad input --------------------------------------------------------------------------------------------------- */

/* Creations are refused on rank 1 of a meta tensor group of 4 ranks: arguments are checked before any communication. */
static const mt_linear_desc good_linear = {.in_features = 8, .out_features = 12};

static void test_linear_create_refuses(void **state) {
    static const struct {
        mt_linear_desc desc;
        mt_status status;
        const char *rest; /* of the message, behind the function */
    } bad[] = {
        {{0, -3, .parts = 0}, MT_ERR_ARGUMENT, "'l': in_features is 0, must be at least 1"},
        {{8, -3, .parts = -1}, MT_ERR_ARGUMENT, "'l': out_features is -3, must be at least 1"},
        {{8, 12, .parts = -1, .unit = -1}, MT_ERR_ARGUMENT, "'l': parts is -1, must be at least 0"},
        {{8, 12, .unit = -1}, MT_ERR_ARGUMENT, "'l': unit is -1, must be at least 0"},
        {{8, 12, .init_std = -1.0f}, MT_ERR_ARGUMENT, "'l': init_std is -1, must be at least 0 and finite"},
        {{8, 12, .init_std = NAN}, MT_ERR_ARGUMENT, "'l': init_std is nan, must be at least 0 and finite"},
        {{8, 12, .no_bias = 1, .skip_bias_add = 1},
         MT_ERR_ARGUMENT,
         "'l' sets skip_bias_add, but with no_bias there is no bias"},
        {{INT64_MAX / 2, INT64_MAX / 2, .parts = 0},
         MT_ERR_SHAPE,
         "'l.weight' is [4611686018427387903, 4611686018427387903], which is more than 281474976710656 elements"},
        {{10, 10, .parts = 4},
         MT_ERR_SHAPE,
         "10 features of 'l.weight' cannot be split into 4 parts of whole units of 1"},
        {{10, 10, .unit = 4},
         MT_ERR_SHAPE,
         "10 features of 'l.weight' cannot be split into 1 parts of whole units of 4"}};
    mt_column_parallel_linear column;
    mt_row_parallel_linear row;
    mt_linear_desc d = good_linear;
    test_rank r;
    (void)state;
    open_quarter(&r);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        REFUSED_EXACTLY(r.ctx, bad[i].status, bad[i].rest,
                        mt_column_parallel_linear_create(r.ctx, r.params, "l", &bad[i].desc, &column));
        REFUSED_EXACTLY(r.ctx, bad[i].status, bad[i].rest,
                        mt_row_parallel_linear_create(r.ctx, r.params, "l", &bad[i].desc, &row));
    }
    d.input_is_parallel = 1;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'l'|input_is_parallel|row-parallel",
            mt_column_parallel_linear_create(r.ctx, r.params, "l", &d, &column));
    d = good_linear;
    d.gather_output = 1;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "gather_output", mt_row_parallel_linear_create(r.ctx, r.params, "l", &d, &row));
    d = good_linear;
    d.split.padded_out_features = 16;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "padded_out_features",
            mt_row_parallel_linear_create(r.ctx, r.params, "l", &d, &row));
    d.split.padded_out_features = 11;
    REFUSED(r.ctx, MT_ERR_SHAPE, "'l.weight': padded_features is 11, must be from 12 to",
            mt_column_parallel_linear_create(r.ctx, r.params, "l", &d, &column));
    assert_int_equal(mt_params_count(r.params), 0);
    test_paper_rank_close(&r);
}

static void test_linear_create_refuses_null(void **state) {
    static char name[MT_NAME_MAX];
    const mt_linear_desc good = good_linear;
    mt_column_parallel_linear column;
    mt_row_parallel_linear row;
    test_rank r;
    (void)state;
    memset(name, 'n', MT_NAME_MAX - 6); /* the name NAME.bias fits, NAME.weight does not */
    open_quarter(&r);
    assert_int_equal(mt_column_parallel_linear_create(NULL, r.params, "l", &good, &column), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "params is NULL",
            mt_column_parallel_linear_create(r.ctx, NULL, "l", &good, &column));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "name ''|95",
            mt_column_parallel_linear_create(r.ctx, r.params, "", &good, &column));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "desc is NULL",
            mt_column_parallel_linear_create(r.ctx, r.params, "l", NULL, &column));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_column_parallel_linear_create(r.ctx, r.params, "l", &good, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "nnnn|95", mt_column_parallel_linear_create(r.ctx, r.params, name, &good, &column));
    assert_int_equal(mt_row_parallel_linear_create(NULL, r.params, "l", &good, &row), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "params is NULL", mt_row_parallel_linear_create(r.ctx, NULL, "l", &good, &row));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "name ''|95", mt_row_parallel_linear_create(r.ctx, r.params, "", &good, &row));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "desc is NULL", mt_row_parallel_linear_create(r.ctx, r.params, "l", NULL, &row));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_row_parallel_linear_create(r.ctx, r.params, "l", &good, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "nnnn|95", mt_row_parallel_linear_create(r.ctx, r.params, name, &good, &row));
    assert_int_equal(mt_params_count(r.params), 0);
    test_paper_rank_close(&r);
}

/* Layers that use another layer's weight, and a layer whose bias is refused: its weight is removed again. */
static void test_linear_create_refuses_weights(void **state) {
    mt_column_parallel_linear column;
    mt_row_parallel_linear row;
    mt_linear_desc d = good_linear;
    mt_tensor x;
    test_rank r;
    (void)state;
    open_quarter(&r);
    x = test_tensor(&r, 1, 8, 0.0f);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "a", &d, &column));
    d.weight = column.weight;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "weight", mt_row_parallel_linear_create(r.ctx, r.params, "l", &d, &row));
    d.init_std = 0.02f;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'l'|init_std|another layer",
            mt_column_parallel_linear_create(r.ctx, r.params, "l", &d, &column));
    d.init_std = 0.0f;
    d.out_features = 13;
    REFUSED(r.ctx, MT_ERR_SHAPE, "[13, 8]|[12, 8]",
            mt_column_parallel_linear_create(r.ctx, r.params, "l", &d, &column));
    d.out_features = 12;
    d.parts = 2;
    REFUSED_EXACTLY(r.ctx, MT_ERR_SHAPE, "'l': parts is 2, that of the shared weight 'a.weight' is 1",
                    mt_column_parallel_linear_create(r.ctx, r.params, "l", &d, &column));
    d.parts = 0;
    d.unit = 3;
    REFUSED_EXACTLY(r.ctx, MT_ERR_SHAPE, "'l': unit is 3, that of the shared weight 'a.weight' is 1",
                    mt_column_parallel_linear_create(r.ctx, r.params, "l", &d, &column));
    d.unit = 0;
    d.split.padded_out_features = 16;
    REFUSED(r.ctx, MT_ERR_SHAPE, "padded_out_features is 16|'a.weight' is 0",
            mt_column_parallel_linear_create(r.ctx, r.params, "l", &d, &column));
    assert_int_equal(mt_params_count(r.params), 2);
    d.split.padded_out_features = 0;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_row_parallel_linear_create(r.ctx, r.params, "row", &good_linear, &row));
    d.weight = row.weight;
    REFUSED_EXACTLY(r.ctx, MT_ERR_SHAPE, "'l' shares the weight 'row.weight', whose placement is not MT_SPLIT_ROWS",
                    mt_column_parallel_linear_create(r.ctx, r.params, "l", &d, &column));
    add_matrix(&r, "l.bias", 1, 1, 0.0f);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "already|l.bias",
            mt_column_parallel_linear_create(r.ctx, r.params, "l", &good_linear, &column));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "already|l.bias",
            mt_row_parallel_linear_create(r.ctx, r.params, "l", &good_linear, &row));
    assert_int_equal(mt_params_count(r.params), 5);
    assert_null(mt_params_find(r.params, "l.weight"));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", /* a layer whose creation failed cannot be used */
            mt_parallel_linear_forward(r.ctx, &column, x, mt_none(), NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", mt_parallel_linear_forward(r.ctx, &row, x, mt_none(), NULL));
    test_paper_rank_close(&r);
}

/* In invariant mode the parts lie shard by shard, which a layer with split features must say that it knows. */
static void test_parts_by_shard(void **state) {
    const mt_context_desc where = {.invariant = 2, .arena_bytes = (size_t)1 << 20};
    mt_linear_desc d = {.in_features = 8, .out_features = 8, .parts = 2};
    mt_column_parallel_linear column;
    mt_row_parallel_linear row;
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, &where, &r);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'c'|2 parts|parts_by_shard",
            mt_column_parallel_linear_create(r.ctx, r.params, "c", &d, &column));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_row_parallel_linear_create(r.ctx, r.params, "r", &d, &row)); /* whole input */
    d.gather_output = 1;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "whole", &d, &column));
    d.gather_output = 0, d.parts_by_shard = 1;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "c", &d, &column));
    d.input_is_parallel = 1, d.parts_by_shard = 0;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'s'|2 parts|parts_by_shard",
            mt_row_parallel_linear_create(r.ctx, r.params, "s", &d, &row));
    test_paper_rank_close(&r);
}

/* A layer behind function pointers, so that the refusals are written once for both kinds. */
typedef struct any_linear {
    const mt_column_parallel_linear *column;
    const mt_row_parallel_linear *row;
    mt_context *ctx;
} any_linear;

static mt_status any_forward(const any_linear *l, mt_tensor x, mt_tensor y, mt_linear_saved *saved) {
    return l->row ? mt_parallel_linear_forward(l->ctx, l->row, x, y, saved)
                  : mt_parallel_linear_forward(l->ctx, l->column, x, y, saved);
}

static mt_status any_backward(const any_linear *l, mt_tensor dy, mt_tensor dx, const mt_linear_saved *saved) {
    return l->row ? mt_parallel_linear_backward(l->ctx, l->row, dy, dx, saved)
                  : mt_parallel_linear_backward(l->ctx, l->column, dy, dx, saved);
}

static mt_linear_saved saved_of(mt_tensor x) {
    mt_linear_saved s;
    s.x = x;
    return s;
}

/* x and y are valid arguments. No call below may write to y, dx or a gradient. */
static void linear_calls_are_refused(const any_linear *l, mt_tensor x, mt_tensor y) {
    mt_context *ctx = l->ctx;
    mt_linear_saved saved = saved_of(x), wrong;
    char words[64];
    REFUSED(ctx, MT_ERR_DTYPE, "x|bf16", any_forward(l, with_dtype(x, MT_BF16), y, NULL));
    REFUSED(ctx, MT_ERR_DTYPE, "y|f16", any_forward(l, x, with_dtype(y, MT_F16), NULL));
    REFUSED(ctx, MT_ERR_DTYPE, "x|i32", any_forward(l, with_dtype(x, MT_I32), y, NULL));
    REFUSED(ctx, MT_ERR_DTYPE, "y|u8", any_forward(l, x, with_dtype(y, MT_U8), NULL));
    snprintf(words, sizeof words, "[%lld, %lld]", (long long)x.rows, (long long)x.cols + 1);
    REFUSED(ctx, MT_ERR_SHAPE, words, any_forward(l, with_shape(x, x.rows, x.cols + 1, 0), y, NULL));
    REFUSED(ctx, MT_ERR_SHAPE, "ld 1", any_forward(l, with_shape(x, x.rows, x.cols, 1), y, NULL));
    REFUSED(ctx, MT_ERR_SHAPE, "", any_forward(l, with_shape(x, x.rows - 1, x.cols, 0), y, NULL));
    REFUSED(ctx, MT_ERR_SHAPE, "-1", any_forward(l, with_shape(x, -1, x.cols, 0), with_shape(y, -1, y.cols, 0), NULL));
    snprintf(words, sizeof words, "y is|[%lld, %lld]", (long long)y.rows, (long long)y.cols - 1);
    REFUSED(ctx, MT_ERR_SHAPE, words, any_forward(l, x, with_shape(y, y.rows, y.cols - 1, 0), NULL));
    REFUSED(ctx, MT_ERR_ARGUMENT, "x is|data is NULL", any_forward(l, mt_tensor_f32(NULL, x.rows, x.cols), y, NULL));
    REFUSED(ctx, MT_ERR_ARGUMENT, "y is|data is NULL", any_forward(l, x, mt_tensor_f32(NULL, y.rows, y.cols), NULL));
    REFUSED(ctx, MT_ERR_ARGUMENT, "saved is NULL", any_backward(l, y, x, NULL));
    REFUSED(ctx, MT_ERR_DTYPE, "dy|bf16", any_backward(l, with_dtype(y, MT_BF16), x, &saved));
    REFUSED(ctx, MT_ERR_DTYPE, "dx|bf16", any_backward(l, y, with_dtype(x, MT_BF16), &saved));
    REFUSED(ctx, MT_ERR_DTYPE, "dx|i32", any_backward(l, y, with_dtype(x, MT_I32), &saved));
    REFUSED(ctx, MT_ERR_SHAPE, "dy", any_backward(l, with_shape(y, y.rows, y.cols - 1, 0), x, &saved));
    REFUSED(ctx, MT_ERR_SHAPE, "dx", any_backward(l, y, with_shape(x, x.rows, x.cols - 1, 0), &saved));
    REFUSED(ctx, MT_ERR_SHAPE, "dx", any_backward(l, y, with_shape(x, x.rows - 1, x.cols, 0), &saved));
    REFUSED(ctx, MT_ERR_ARGUMENT, "dy is|data is NULL",
            any_backward(l, mt_tensor_f32(NULL, y.rows, y.cols), x, &saved));
    memset(&wrong, 0, sizeof wrong);
    REFUSED(ctx, MT_ERR_SHAPE, "saved.x", any_backward(l, y, x, &wrong));
    wrong = saved_of(with_dtype(x, MT_BF16));
    REFUSED(ctx, MT_ERR_DTYPE, "saved.x", any_backward(l, y, x, &wrong));
    REFUSED(ctx, MT_ERR_ARGUMENT, "dx [|saved.x|overlap", any_backward(l, y, x, &saved));
}

static void test_linear_calls_refuse(void **state) {
    mt_linear_desc d = {.in_features = 8, .out_features = 12, .sequence_parallel = 0};
    (void)state;
    /* bits: column or row; whole or split input or output; with or without sequence parallelism */
    for (int kind = 0; kind < 8; kind++) {
        int is_row = kind & 1, split = (kind >> 1) & 1;
        mt_column_parallel_linear column = {0};
        mt_row_parallel_linear row = {0};
        any_linear l = {&column, is_row ? &row : NULL, NULL};
        mt_tensor x, y, gx, gy;
        test_rank r;
        open_quarter(&r);
        l.ctx = r.ctx;
        d.sequence_parallel = kind >> 2;
        d.input_is_parallel = is_row && split;
        d.gather_output = !is_row && !split;
        x = test_tensor(&r, is_row || !d.sequence_parallel ? 16 : 4, d.input_is_parallel ? 2 : 8, 7.0f);
        y = test_tensor(&r, is_row && d.sequence_parallel ? 4 : 16, is_row || !split ? 12 : 3, 7.0f);
        assert_int_equal(is_row ? mt_parallel_linear_forward(NULL, &row, x, y, NULL)
                                : mt_parallel_linear_forward(NULL, &column, x, y, NULL),
                         MT_ERR_ARGUMENT);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", any_forward(&l, x, y, NULL));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created",
                is_row ? mt_parallel_linear_forward(r.ctx, NULL, x, y, NULL)
                       : mt_parallel_linear_forward(r.ctx, NULL, x, y, NULL));
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      is_row ? mt_row_parallel_linear_create(r.ctx, r.params, "l", &d, &row)
                             : mt_column_parallel_linear_create(r.ctx, r.params, "l", &d, &column));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_params_init before", any_forward(&l, x, y, NULL));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        gx = is_row ? row.weight->grad : column.weight->grad;
        gy = is_row ? row.bias->grad : column.bias->grad;
        linear_calls_are_refused(&l, x, y);
        test_untouched("x", (const float *)x.data, x.rows * x.cols, 7.0f);
        test_untouched("y", (const float *)y.data, y.rows * y.cols, 7.0f);
        test_untouched("dw", (const float *)gx.data, gx.rows * gx.cols, 0.0f);
        test_untouched("db", (const float *)gy.data, gy.rows * gy.cols, 0.0f);
        assert_int_equal(mt_comm_ledger(r.grid.tp).calls[MT_ALL_GATHER], 0);
        assert_int_equal(mt_comm_ledger(r.grid.tp).calls[MT_ALL_REDUCE], 0);
        assert_int_equal(mt_comm_ledger(r.grid.tp).calls[MT_REDUCE_SCATTER], 0);
        test_paper_rank_close(&r);
    }
}

/* ---- the product of a column-parallel layer ---------------------------------------------------------------------- */

typedef struct product_run {
    int invariant;
    mt_dtype weights;                             /* the type of the weight, the bias and x */
    float (*serial)[LINEAR_CASES][3][LINEAR_MAX]; /* y of one rank, for each type of y */
} product_run;

static const mt_dtype product_types[] = {MT_F32, MT_BF16, MT_F16};

/* Writes the values of t to a view with one column of 7 before it and two behind it. */
static mt_status product_view(test_rank *r, mt_dtype dtype, mt_tensor t, mt_tensor *wide, mt_tensor *view) {
    MT_TRY(mt_arena_tensor(r->ctx, dtype, t.rows, t.cols + 3, wide));
    MT_TRY(mt_fill(r->ctx, *wide, 7.0f));
    *view = mt_tensor_cols(*wide, 1, t.cols);
    return mt_convert(r->ctx, t, *view);
}

/* Checks the columns beside the view, and writes the view to `out`, which is f32. */
static mt_status product_read(test_rank *r, mt_tensor wide, mt_tensor out) {
    mt_tensor f;
    MT_TRY(mt_arena_tensor(r->ctx, MT_F32, wide.rows, wide.cols, &f));
    MT_TRY(mt_convert(r->ctx, wide, f));
    for (int64_t i = 0; i < f.rows; i++) {
        const float *row = (const float *)f.data + i * f.cols;
        CHECK(row[0] == 7.0f && row[f.cols - 2] == 7.0f && row[f.cols - 1] == 7.0f);
    }
    return mt_convert(r->ctx, mt_tensor_cols(wide, 1, out.cols), out);
}

/* Compares y with the reference. The sum is rounded to the type of y, before and after the bias is added. */
static mt_status product_compare(linear_run *l, share out, mt_tensor y, mt_dtype type) {
    double last = type == MT_F32 ? 0 : type == MT_BF16 ? 1.0 / 256 : 1.0 / 2048;
    for (int64_t i = 0; i < out.rows; i++)
        for (int64_t j = 0; j < out.cols; j++) {
            int64_t e = share_element(l, out, i, j);
            double want = e < 0 ? 0 : l->y[e];
            double allowed = e < 0 ? 0 : 1e-6 + last * (fabs(want) + 1);
            MT_TRY(test_near("y", (const float *)y.data + i * out.cols + j, &want, 1, allowed));
        }
    return MT_SUCCESS;
}

/* One call, with columns beside x and y. In invariant mode, a gathered y has the same bits on every split. */
static mt_status product_check(linear_run *l, int invariant, int gather, mt_dtype type, float *serial) {
    test_rank *r = l->r;
    share in = share_of(l, l->in, 0, 0), out = share_of(l, l->out, !gather, 0);
    mt_tensor x, y, x_wide, y_wide, got = test_tensor(r, out.rows, out.cols, NAN);
    size_t mark = mt_arena_mark(r->ctx), called, bytes = (size_t)(out.rows * out.cols) * sizeof(float);
    mt_ledger want = {{0}, {0}};
    MT_TRY(product_view(r, l->dtype, share_take(l, in, l->x), &x_wide, &x));
    MT_TRY(product_view(r, type, got, &y_wide, &y));
    called = mt_arena_mark(r->ctx);
    mt_comm_ledger_reset(r->grid.tp);
    MT_TRY(mt_column_parallel_linear_product(r->ctx, &l->column, x, gather, y));
    CHECK(mt_arena_mark(r->ctx) == called);
    want.calls[MT_ALL_GATHER] = gather != 0;
    want.bytes[MT_ALL_GATHER] = gather ? (uint64_t)(r->grid.tp_size * TOKENS * l->local) * mt_dtype_size(type) : 0;
    MT_TRY(check_ledger(r, "product", want));
    MT_TRY(product_read(r, y_wide, got));
    mt_arena_release(r->ctx, mark);
    if (invariant && !gather) return MT_SUCCESS; /* the layout of virtual shards is tested elsewhere */
    MT_TRY(product_compare(l, out, got, type));
    if (!invariant) return MT_SUCCESS;
    if (r->grid.tp_size == 1) memcpy(serial, got.data, bytes);
    CHECK(memcmp(serial, got.data, bytes) == 0);
    return MT_SUCCESS;
}

/* The forward of the layer computes the product of all tokens, with the layer's own gather_output. */
static mt_status product_is_forward(linear_run *l) {
    share part = input_share(l), in = share_of(l, l->in, 0, 0), out = output_share(l);
    mt_tensor y = test_tensor(l->r, out.rows, out.cols, NAN), product = test_tensor(l->r, out.rows, out.cols, NAN);
    mt_tensor x = share_take(l, in, l->x);
    MT_TRY(linear_forward(l, share_take(l, part, l->x), y, NULL));
    MT_TRY(mt_column_parallel_linear_product(l->r->ctx, &l->column, x, l->c->desc.gather_output, product));
    return test_near_f32("the product", product.data, y.data, out.rows * out.cols, 1e-6);
}

static mt_status product_case(linear_run *l, const product_run *p, float (*serial)[LINEAR_MAX]) {
    MT_TRY(linear_open(l));
    for (int gather = 0; gather < 2; gather++)
        for (int t = 0; t < 3; t++) {
            mt_status status = product_check(l, p->invariant, gather, product_types[t], serial[t]);
            if (status == MT_ERR_DATA)
                fprintf(stderr, "x is %s, y is %s, gather_output %d\n", mt_dtype_name(l->dtype),
                        mt_dtype_name(product_types[t]), gather);
            MT_TRY(status);
        }
    return l->dtype == MT_F32 ? product_is_forward(l) : MT_SUCCESS;
}

static mt_status product_rank(mt_comm *world, void *user) {
    const product_run *p = (const product_run *)user;
    mt_context_desc where = {.arena_bytes = (size_t)16 << 20, .invariant = p->invariant};
    linear_run *l = (linear_run *)calloc(1, sizeof *l);
    test_rank r;
    mt_status status = test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, &where, &r);
    for (int i = 0; status == MT_SUCCESS && i < LINEAR_CASES; i++) {
        const mt_linear_desc *d = &linear_cases[i].desc;
        if (linear_cases[i].row || (p->invariant && d->parts > 1 && !d->gather_output)) continue;
        memset(l, 0, sizeof *l);
        l->c = &linear_cases[i];
        l->r = &r;
        l->dtype = p->weights;
        status = product_case(l, p, (*p->serial)[i]);
        if (status == MT_ERR_DATA)
            fprintf(stderr, "%s on %d ranks, invariant %d\n", l->c->name, mt_comm_size(world), p->invariant);
    }
    free(l);
    test_rank_close(&r);
    return status;
}

static void test_product_on_every_split(void **state) {
    static float serial[LINEAR_CASES][3][LINEAR_MAX];
    (void)state;
    for (int w = 0; w < 3; w++)
        for (int invariant = 0; invariant <= 8; invariant += 8)
            for (size_t i = 0; i < SPLITS; i++) {
                product_run p = {invariant, product_types[w], &serial};
                if (!invariant || invariant % splits[i] == 0) test_launch(splits[i], product_rank, &p);
            }
}

/* x and y are valid arguments, with gather_output as `gather`. Another tensor may not be written. */
static void product_calls_are_refused(mt_context *ctx, const mt_column_parallel_linear *l, int gather, mt_tensor x,
                                      mt_tensor y) {
    int64_t rows = x.rows, other = gather ? l->local_features : l->desc.out_features;
    char words[64];
    REFUSED(ctx, MT_ERR_DTYPE, "mt_column_parallel_linear_product|x|bf16|'l.weight'|f32",
            mt_column_parallel_linear_product(ctx, l, with_dtype(x, MT_BF16), gather, y));
    REFUSED(ctx, MT_ERR_DTYPE, "x|i32", mt_column_parallel_linear_product(ctx, l, with_dtype(x, MT_I32), gather, y));
    REFUSED(ctx, MT_ERR_DTYPE, "y|i32", mt_column_parallel_linear_product(ctx, l, x, gather, with_dtype(y, MT_I32)));
    REFUSED(ctx, MT_ERR_SHAPE, "x is|[16, 7]",
            mt_column_parallel_linear_product(ctx, l, with_shape(x, rows, 7, 8), gather, y));
    REFUSED(ctx, MT_ERR_SHAPE, "ld 1",
            mt_column_parallel_linear_product(ctx, l, with_shape(x, rows, x.cols, 1), gather, y));
    REFUSED(
        ctx, MT_ERR_SHAPE, "-1",
        mt_column_parallel_linear_product(ctx, l, with_shape(x, -1, x.cols, 0), gather, with_shape(y, -1, y.cols, 0)));
    REFUSED(ctx, MT_ERR_SHAPE, "y is|[15,",
            mt_column_parallel_linear_product(ctx, l, x, gather, with_shape(y, rows - 1, y.cols, 0)));
    snprintf(words, sizeof words, "y is|[16, %lld]", (long long)other);
    REFUSED(ctx, MT_ERR_SHAPE, words,
            mt_column_parallel_linear_product(ctx, l, x, gather, with_shape(y, rows, other, 0)));
    REFUSED(ctx, MT_ERR_ARGUMENT, "x is|data is NULL",
            mt_column_parallel_linear_product(ctx, l, mt_tensor_f32(NULL, rows, x.cols), gather, y));
    REFUSED(ctx, MT_ERR_ARGUMENT, "y is|data is NULL",
            mt_column_parallel_linear_product(ctx, l, x, gather, mt_tensor_f32(NULL, rows, y.cols)));
}

/* The argument gather_output gives the shape of y, with every desc.gather_output. */
static void test_product_refuses(void **state) {
    mt_linear_desc d = {.in_features = 8, .out_features = 12};
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        int gather = kind & 1;
        mt_column_parallel_linear l = {.weight = NULL};
        mt_tensor x, y;
        test_rank r;
        test_paper_rank(4, 1, (mt_grid_desc){.tp = 4}, &(mt_context_desc){.arena_bytes = 256}, &r);
        d.gather_output = kind >> 1;
        x = test_tensor(&r, 16, 8, 7.0f);
        y = with_shape(test_tensor(&r, 16, 12, 7.0f), 16, gather ? 12 : 3, 0);
        assert_int_equal(mt_column_parallel_linear_product(NULL, &l, x, gather, y), MT_ERR_ARGUMENT);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", mt_column_parallel_linear_product(r.ctx, NULL, x, gather, y));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", mt_column_parallel_linear_product(r.ctx, &l, x, gather, y));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "l", &d, &l));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_params_init before",
                mt_column_parallel_linear_product(r.ctx, &l, x, gather, y));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        product_calls_are_refused(r.ctx, &l, gather, x, y);
        if (gather) { /* the columns of all ranks do not fit into the arena */
            REFUSED(r.ctx, MT_ERR_MEMORY, "arena", mt_column_parallel_linear_product(r.ctx, &l, x, gather, y));
            assert_int_equal(mt_arena_mark(r.ctx), 0);
        }
        test_untouched("x", (const float *)x.data, 16 * 8, 7.0f);
        test_untouched("y", (const float *)y.data, 16 * 12, 7.0f);
        assert_int_equal(mt_comm_ledger(r.grid.tp).calls[MT_ALL_GATHER], 0);
        test_paper_rank_close(&r);
    }
}

/* Tensors that are sent between ranks must be contiguous. This is checked before anything is computed. */
static void test_strided_views_are_refused_where_they_travel(void **state) {
    mt_linear_desc d = {.in_features = 8, .out_features = 12, .input_is_parallel = 1};
    mt_column_parallel_linear column;
    mt_row_parallel_linear row;
    mt_tensor x, y, part, dw;
    mt_linear_saved saved;
    test_rank r;
    (void)state;
    open_quarter(&r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_row_parallel_linear_create(r.ctx, r.params, "row", &d, &row));
    d.input_is_parallel = 0;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "column", &d, &column));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    y = with_shape(test_tensor(&r, 4, 16, 7.0f), 4, 12, 16);
    part = test_tensor(&r, 4, 2, 7.0f);
    REFUSED(r.ctx, MT_ERR_SHAPE, "contiguous|ld 16", mt_parallel_linear_forward(r.ctx, &row, part, y, NULL));
    x = with_shape(test_tensor(&r, 4, 16, 7.0f), 4, 8, 16);
    part = test_tensor(&r, 4, 3, 7.0f);
    saved = saved_of(x);
    dw = column.weight->grad;
    REFUSED(r.ctx, MT_ERR_SHAPE, "contiguous|ld 16", mt_parallel_linear_backward(r.ctx, &column, part, x, &saved));
    test_untouched("y", (const float *)y.data, 4 * 16, 7.0f);
    test_untouched("dx", (const float *)x.data, 4 * 16, 7.0f);
    test_untouched("dw", (const float *)dw.data, dw.rows * dw.cols, 0.0f);
    test_paper_rank_close(&r);
}

static mt_status trusted_loss(test_rank *r, mt_tensor logits, const int32_t *targets, mt_tensor loss) {
    static const mt_cross_entropy_desc d = {.vocab = 10};
    return mt_vocab_parallel_cross_entropy_forward(r->ctx, r->grid.tp, &d, logits, targets, loss, NULL);
}

/* mt_layers_trust_ids changes no result for valid ids and targets, and the checks can be turned on again. */
static void test_trusted_ids(void **state) {
    mt_embedding_desc d = {.vocab = 10, .features = 4};
    int32_t ids[3] = {0, 9, 3}, bad[3] = {0, 9, 10};
    mt_vocab_parallel_embedding e = {0};
    mt_tensor logits, y[2], losses[2];
    test_rank r;
    (void)state;
    open_alone(&r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_vocab_parallel_embedding_create(r.ctx, r.params, "e", &d, &e));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    logits = mt_tensor_f32(test_noise(&r, 30, 1, 1.0f), 3, 10);
    for (int trust = 1; trust >= 0; trust--) {
        y[trust] = test_tensor(&r, 3, 4, 7.0f);
        losses[trust] = test_tensor(&r, 1, 3, 7.0f);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_layers_trust_ids(r.ctx, trust));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_vocab_parallel_embedding_forward(r.ctx, &e, ids, 3, y[trust]));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, trusted_loss(&r, logits, ids, losses[trust]));
    }
    assert_memory_equal(y[0].data, y[1].data, 12 * sizeof(float));
    assert_memory_equal(losses[0].data, losses[1].data, 3 * sizeof(float));
    REFUSED(r.ctx, MT_ERR_DATA, "token id 10|index 2", mt_vocab_parallel_embedding_forward(r.ctx, &e, bad, 3, y[0]));
    REFUSED(r.ctx, MT_ERR_DATA, "target 10|index 2", trusted_loss(&r, logits, bad, losses[0]));
    test_paper_rank_close(&r);
}

static const struct {
    mt_embedding_desc desc;
    mt_status status;
    const char *rest; /* of the message, behind the function */
} bad_embeddings[] = {{{.vocab = 0, .features = 0}, MT_ERR_ARGUMENT, "'e': vocab is 0, must be from 1 to 2147483647"},
                      {{.vocab = (int64_t)INT32_MAX + 1, .features = 4},
                       MT_ERR_ARGUMENT,
                       "'e': vocab is 2147483648, must be from 1 to 2147483647"},
                      {{.vocab = 10, .features = 0}, MT_ERR_ARGUMENT, "'e': features is 0, must be at least 1"},
                      {{.vocab = 10, .features = INT64_MAX / 2},
                       MT_ERR_SHAPE,
                       "'e.weight' is [10, 4611686018427387903], which is more than 281474976710656 elements"},
                      {{.vocab = 10, .features = 4, .init_std = -1.0f},
                       MT_ERR_ARGUMENT,
                       "'e': init_std is -1, must be at least 0 and finite"},
                      {{.vocab = 10, .features = 4, .padded_vocab = 9},
                       MT_ERR_ARGUMENT,
                       "'e': padded_vocab is 9, must be from 10 to 2147483647"},
                      {{.vocab = 10, .features = 4, .padded_vocab = -1},
                       MT_ERR_ARGUMENT,
                       "'e': padded_vocab is -1, must be from 10 to 2147483647"},
                      {{.vocab = 10, .features = 4, .padded_vocab = (int64_t)INT32_MAX + 1},
                       MT_ERR_ARGUMENT,
                       "'e': padded_vocab is 2147483648, must be from 10 to 2147483647"}};

static void test_embedding_refuses(void **state) {
    mt_embedding_desc d = {.vocab = 10, .features = 4, .sequence_parallel = 1};
    int32_t ids[8] = {0, 9, 3, 4, 5, 6, 7, 8}, worse[8] = {0, 9, 3, 4, 10, 6, -1, 8};
    mt_vocab_parallel_embedding e = {0};
    mt_tensor y, dw;
    test_rank r;
    (void)state;
    open_quarter(&r);
    for (size_t i = 0; i < sizeof bad_embeddings / sizeof *bad_embeddings; i++)
        REFUSED_EXACTLY(r.ctx, bad_embeddings[i].status, bad_embeddings[i].rest,
                        mt_vocab_parallel_embedding_create(r.ctx, r.params, "e", &bad_embeddings[i].desc, &e));
    assert_int_equal(mt_vocab_parallel_embedding_create(NULL, r.params, "e", &d, &e), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "NULL", mt_vocab_parallel_embedding_create(r.ctx, NULL, "e", &d, &e));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "name ''|95", mt_vocab_parallel_embedding_create(r.ctx, r.params, "", &d, &e));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "NULL", mt_vocab_parallel_embedding_create(r.ctx, r.params, "e", NULL, &e));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "NULL", mt_vocab_parallel_embedding_create(r.ctx, r.params, "e", &d, NULL));
    assert_int_equal(mt_params_count(r.params), 0);
    y = test_tensor(&r, 2, 4, 7.0f);
    memset(&e, 0, sizeof e);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", mt_vocab_parallel_embedding_forward(r.ctx, NULL, ids, 8, y));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", mt_vocab_parallel_embedding_forward(r.ctx, &e, ids, 8, y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_vocab_parallel_embedding_create(r.ctx, r.params, "e", &d, &e));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "already|e.weight",
            mt_vocab_parallel_embedding_create(r.ctx, r.params, "e", &d, &e));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, test_rank_renew(&r));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_vocab_parallel_embedding_create(r.ctx, r.params, "e", &d, &e));
    y = test_tensor(&r, 2, 4, 7.0f);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_params_init before", mt_vocab_parallel_embedding_forward(r.ctx, &e, ids, 8, y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    dw = e.weight->grad;
    for (int backward = 0; backward < 2; backward++) {
        mt_status (*f)(mt_context *, const mt_vocab_parallel_embedding *, const int32_t *, int64_t, mt_tensor) =
            backward ? mt_vocab_parallel_embedding_backward : mt_vocab_parallel_embedding_forward;
        assert_int_equal(f(NULL, &e, ids, 8, y), MT_ERR_ARGUMENT);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", f(r.ctx, NULL, ids, 8, y));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "ids is NULL", f(r.ctx, &e, NULL, 8, y));
        REFUSED(r.ctx, MT_ERR_DATA, "token id 10|index 4|[0, 10)", f(r.ctx, &e, worse, 8, y));
        worse[4] = 0;
        REFUSED(r.ctx, MT_ERR_DATA, "token id -1|index 6", f(r.ctx, &e, worse, 8, y));
        worse[4] = 10;
        REFUSED(r.ctx, MT_ERR_SHAPE, "7 tokens|4 tensor ranks", f(r.ctx, &e, ids, 7, y));
        REFUSED(r.ctx, MT_ERR_SHAPE, "-4 tokens", f(r.ctx, &e, ids, -4, y));
        REFUSED(r.ctx, MT_ERR_SHAPE, "[2, 4]|[1, 4]", f(r.ctx, &e, ids, 4, y));
        REFUSED(r.ctx, MT_ERR_SHAPE, "[2, 3]", f(r.ctx, &e, ids, 8, with_shape(y, 2, 3, 0)));
        REFUSED(r.ctx, MT_ERR_SHAPE, "contiguous|ld 8", f(r.ctx, &e, ids, 8, with_shape(y, 2, 4, 8)));
        REFUSED(r.ctx, MT_ERR_DTYPE, "bf16", f(r.ctx, &e, ids, 8, with_dtype(y, MT_BF16)));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "data is NULL", f(r.ctx, &e, ids, 8, mt_tensor_f32(NULL, 2, 4)));
    }
    test_untouched("y", (const float *)y.data, 8, 7.0f);
    test_untouched("dw", (const float *)dw.data, dw.rows * dw.cols, 0.0f);
    test_paper_rank_close(&r);
}

/* Impossible numbers of shards, rows and steps. */
static void test_sizes_that_cannot_be(void **state) {
    mt_param_desc parts = {.name = "w", .rows = 65537, .cols = 1, .parts = 65537};
    mt_linear_desc d = {.in_features = 1, .out_features = 1, .sequence_parallel = 1};
    mt_column_parallel_linear column;
    mt_loss_scaler scaler;
    float norm = 3.0f;
    mt_param *p;
    mt_tensor x;
    test_rank r;
    (void)state;
    test_paper_rank(64, 0, (mt_grid_desc){.tp = 64}, &(mt_context_desc){.device = MT_DEVICE_META}, &r);
    x = test_tensor(&r, 3, 4, 7.0f);
    REFUSED(r.ctx, MT_ERR_SHAPE, "[-1, 4]", mt_fill(r.ctx, mt_shard_cols(x, 0, 0), 0.0f));
    REFUSED(r.ctx, MT_ERR_SHAPE, "[-1, 4]", mt_fill(r.ctx, mt_shard_cols(x, 2, 2), 0.0f));
    REFUSED(r.ctx, MT_ERR_SHAPE, "[-1, 4]", mt_fill(r.ctx, mt_shard_cols(x, -1, 2), 0.0f));
    REFUSED(r.ctx, MT_ERR_SHAPE, "[-1, 4]", mt_fill(r.ctx, mt_shard_cols(x, 1, 3), 0.0f));
    assert_int_equal(mt_shard_cols(x, 1, 2).cols, 2);
    assert_null(mt_shard_cols(mt_none(), 0, 0).data);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_tree_sum(r.ctx, mt_tensor_f32((const float *)x.data, INT64_MAX, 0)));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "parts is 65537, must be from 0 to 65536",
            mt_params_add(r.ctx, r.params, &parts, &p));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "c", &d, &column));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    REFUSED(r.ctx, MT_ERR_SHAPE, "y is",
            mt_parallel_linear_forward(r.ctx, &column, with_shape(x, (int64_t)1 << 59, 1, 0), x, NULL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_loss_scaler_create(r.ctx, NULL, &scaler));
    assert_true(mt_loss_scaler_update(NULL, &norm) == 0.0f && mt_loss_scaler_update(&scaler, NULL) == 0.0f);
    assert_true(norm == 3.0f && scaler.good_steps == 0 && scaler.skipped == 0);
    assert_true(mt_cosine_schedule(INT64_MIN, INT64_MIN, INT64_MAX, 1.0f, 0.5f) == 1.0f);
    assert_true(mt_cosine_schedule(INT64_MAX - 1, INT64_MIN, INT64_MAX, 1.0f, 0.5f) == 0.5f);
    assert_true(mt_linear_schedule(INT64_MIN, INT64_MIN, INT64_MAX, 1.0f, 0.5f) == 1.0f);
    assert_true(mt_linear_schedule(INT64_MAX - 1, INT64_MIN, INT64_MAX, 1.0f, 0.5f) == 0.5f);
    test_paper_rank_close(&r);
}

/* A rank of four with logits of three tokens and what a forward would save. Each refused call must leave all of it as
   it is, and must not communicate. */
typedef struct entropy {
    test_rank r;
    mt_tensor x, loss;
    mt_cross_entropy_saved good;
} entropy;

static void entropy_open(entropy *e, const int32_t *targets) {
    open_quarter(&e->r);
    e->x = test_tensor(&e->r, 3, 3, 7.0f);
    e->loss = test_tensor(&e->r, 1, 3, 7.0f);
    e->good.logits = e->x;
    e->good.lse = test_tensor(&e->r, 2, 3, 7.0f);
    e->good.targets = targets;
}

static void entropy_close(entropy *e) {
    assert_int_equal(mt_arena_mark(e->r.ctx), 0);
    assert_int_equal(mt_comm_ledger(e->r.grid.tp).calls[MT_ALL_GATHER], 0);
    test_untouched("logits", (const float *)e->x.data, 9, 7.0f);
    test_untouched("loss", (const float *)e->loss.data, 3, 7.0f);
    test_paper_rank_close(&e->r);
}

/* Ranks that pad differently would have other borders. */
static mt_status pads_differently_rank(mt_comm *world, void *user) {
    mt_embedding_desc words = {.vocab = 10, .features = 4, .padded_vocab = 15 + mt_comm_rank(world)};
    mt_vocab_parallel_embedding e;
    test_rank r;
    mt_status status;
    (void)user;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = 2}, NULL, &r));
    MT_TRY(mt_vocab_parallel_embedding_create(r.ctx, r.params, "e", &words, &e));
    CHECK(e.weight->value.rows == 8); /* on both ranks */
    status = mt_params_init(r.ctx, r.params, 1);
    CHECK(status == MT_ERR_MISMATCH &&
          test_has_words(mt_last_error(r.ctx), "e.weight is|padded_features 15|padded_features 16"));
    test_rank_close(&r);
    return MT_SUCCESS;
}

static void test_ranks_that_pad_differently(void **state) {
    (void)state;
    test_launch(2, pads_differently_rank, NULL);
}

/* Ids and targets in the padding are refused, and logits have the columns of the padded vocabulary. */
static void test_padded_vocabulary_refuses(void **state) {
    mt_embedding_desc words = {.vocab = 10, .features = 4, .padded_vocab = 16};
    mt_cross_entropy_desc d = {.vocab = 10, .padded_vocab = 16};
    int32_t ids[2] = {9, 10};
    mt_vocab_parallel_embedding e;
    mt_tensor y, logits, loss;
    test_rank r;
    (void)state;
    open_alone(&r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_vocab_parallel_embedding_create(r.ctx, r.params, "e", &words, &e));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    assert_int_equal(e.weight->value.rows, 16);
    y = test_tensor(&r, 2, 4, 7.0f);
    logits = test_tensor(&r, 2, 16, 7.0f);
    loss = test_tensor(&r, 1, 2, 7.0f);
    REFUSED(r.ctx, MT_ERR_DATA, "token id 10|[0, 10)", mt_vocab_parallel_embedding_forward(r.ctx, &e, ids, 2, y));
    REFUSED(r.ctx, MT_ERR_DATA, "target 10|[0, 10)",
            mt_vocab_parallel_cross_entropy_forward(r.ctx, r.grid.tp, &d, logits, ids, loss, NULL));
    REFUSED(
        r.ctx, MT_ERR_SHAPE, "[2, 10]|[2, 16]",
        mt_vocab_parallel_cross_entropy_forward(r.ctx, r.grid.tp, &d, with_shape(logits, 2, 10, 16), ids, loss, NULL));
    test_untouched("y", y.data, 8, 7.0f);
    test_untouched("loss", loss.data, 2, 7.0f);
    test_paper_rank_close(&r);
}

static void test_cross_entropy_refuses(void **state) {
    static const struct {
        mt_cross_entropy_desc desc;
        const char *rest; /* of the message, behind the function */
    } bad[] = {{{.vocab = 0, .label_smoothing = 1.0f}, "vocab is 0, must be from 1 to 2147483647"},
               {{.vocab = -3}, "vocab is -3, must be from 1 to 2147483647"},
               {{.vocab = INT64_MAX}, "vocab is 9223372036854775807, must be from 1 to 2147483647"},
               {{.vocab = (int64_t)INT32_MAX + 1}, "vocab is 2147483648, must be from 1 to 2147483647"},
               {{.vocab = 10, .label_smoothing = 1.0f, .padded_vocab = 9},
                "label_smoothing is 1, must be at least 0 and below 1"},
               {{.vocab = 10, .label_smoothing = -0.1f}, "label_smoothing is -0.1, must be at least 0 and below 1"},
               {{.vocab = 10, .label_smoothing = NAN}, "label_smoothing is nan, must be at least 0 and below 1"},
               {{.vocab = 10, .padded_vocab = 9}, "padded_vocab is 9, must be from 10 to 2147483647"},
               {{.vocab = 10, .padded_vocab = (int64_t)INT32_MAX + 1},
                "padded_vocab is 2147483648, must be from 10 to 2147483647"}};
    mt_cross_entropy_saved saved = {0};
    int32_t targets[3] = {0, -100, 9};
    entropy e;
    mt_context *ctx;
    mt_comm *tp;
    (void)state;
    entropy_open(&e, targets);
    ctx = e.r.ctx, tp = e.r.grid.tp;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        REFUSED_EXACTLY(ctx, MT_ERR_ARGUMENT, bad[i].rest,
                        mt_vocab_parallel_cross_entropy_forward(ctx, tp, &bad[i].desc, e.x, targets, e.loss, &saved));
        REFUSED_EXACTLY(ctx, MT_ERR_ARGUMENT, bad[i].rest,
                        mt_vocab_parallel_cross_entropy_backward(ctx, tp, &bad[i].desc, mt_none(), 1.0f, &e.good));
    }
    assert_null(saved.targets);
    entropy_close(&e);
}

/* Each tensor has the columns of the padded vocabulary. */
static void test_softmax_refuses(void **state) {
    mt_tensor x, y, z, wide;
    test_rank r;
    (void)state;
    open_alone(&r);
    x = test_tensor(&r, 2, 16, 7.0f), y = test_tensor(&r, 2, 16, 7.0f), z = test_tensor(&r, 2, 16, 7.0f);
    wide = with_shape(x, 2, 10, 16);
#define BOTH_REFUSE(status, words, tp, vocab, padded, a, b, c)                                                         \
    REFUSED(r.ctx, status, "mt_vocab_parallel_softmax_forward: |" words,                                               \
            mt_vocab_parallel_softmax_forward(r.ctx, tp, vocab, padded, a, c));                                        \
    REFUSED(r.ctx, status, "mt_vocab_parallel_log_softmax_backward: |" words,                                          \
            mt_vocab_parallel_log_softmax_backward(r.ctx, tp, vocab, padded, a, b, c))
    BOTH_REFUSE(MT_ERR_ARGUMENT, "tp is NULL", NULL, 10, 16, x, y, z);
    BOTH_REFUSE(MT_ERR_ARGUMENT, "vocab is 0, must be from 1", r.grid.tp, 0, 16, x, y, z);
    BOTH_REFUSE(MT_ERR_ARGUMENT, "padded_vocab is 9, must be from 10", r.grid.tp, 10, 9, x, y, z);
    BOTH_REFUSE(MT_ERR_SHAPE, "is [2, 10], must be [2, 16]", r.grid.tp, 10, 16, wide, y, z);
    BOTH_REFUSE(MT_ERR_SHAPE, "is [2, 10], must be [2, 16]", r.grid.tp, 10, 16, x, y, wide);
    BOTH_REFUSE(MT_ERR_SHAPE, "is [1, 16], must be [2, 16]", r.grid.tp, 10, 16, x, y, mt_tensor_rows(z, 0, 1));
    BOTH_REFUSE(MT_ERR_DTYPE, "is i32", r.grid.tp, 10, 16, x, y, with_dtype(z, MT_I32));
    REFUSED(r.ctx, MT_ERR_SHAPE, "dy is [2, 10], must be [2, 16]",
            mt_vocab_parallel_softmax_backward(r.ctx, r.grid.tp, 10, 16, x, wide, z));
    assert_int_equal(mt_vocab_parallel_softmax_forward(NULL, r.grid.tp, 10, 16, x, y), MT_ERR_ARGUMENT);
    assert_int_equal(mt_vocab_parallel_softmax_backward(NULL, r.grid.tp, 10, 16, x, y, z), MT_ERR_ARGUMENT);
    test_untouched("x", x.data, 32, 7.0f);
    test_untouched("y", y.data, 32, 7.0f);
    test_untouched("z", z.data, 32, 7.0f);
    test_paper_rank_close(&r);
}

static void test_cross_entropy_forward_refuses(void **state) {
    mt_cross_entropy_desc d = {.vocab = 10};
    mt_cross_entropy_saved saved = {0};
    int32_t targets[3] = {0, -100, 9}, worse[3] = {0, -100, 10};
    mt_tensor x, loss;
    entropy e;
    mt_context *ctx;
    mt_comm *tp;
    (void)state;
    entropy_open(&e, targets);
    ctx = e.r.ctx, tp = e.r.grid.tp, x = e.x, loss = e.loss;
#define FORWARD(...) mt_vocab_parallel_cross_entropy_forward(__VA_ARGS__, &saved)
    assert_int_equal(FORWARD(NULL, tp, &d, x, targets, loss), MT_ERR_ARGUMENT);
    REFUSED(ctx, MT_ERR_ARGUMENT, "tp is NULL", FORWARD(ctx, NULL, &d, x, targets, loss));
    REFUSED(ctx, MT_ERR_ARGUMENT, "desc is NULL", FORWARD(ctx, tp, NULL, x, targets, loss));
    REFUSED(ctx, MT_ERR_ARGUMENT, "ids is NULL", FORWARD(ctx, tp, &d, x, NULL, loss));
    REFUSED(ctx, MT_ERR_DATA, "target 10|index 2|[0, 10)", FORWARD(ctx, tp, &d, x, worse, loss));
    worse[2] = -1;
    REFUSED(ctx, MT_ERR_DATA, "target -1|index 2", FORWARD(ctx, tp, &d, x, worse, loss));
    REFUSED(ctx, MT_ERR_SHAPE, "logits|[3, 2]|[3, 3]", FORWARD(ctx, tp, &d, with_shape(x, 3, 2, 0), targets, loss));
    REFUSED(ctx, MT_ERR_SHAPE, "loss|[1, 2]|[1, 3]", FORWARD(ctx, tp, &d, x, targets, with_shape(loss, 1, 2, 0)));
    REFUSED(ctx, MT_ERR_SHAPE, "loss|[3, 1]", FORWARD(ctx, tp, &d, x, targets, with_shape(loss, 3, 1, 0)));
    REFUSED(ctx, MT_ERR_SHAPE, "-1",
            FORWARD(ctx, tp, &d, with_shape(x, -1, 3, 0), targets, with_shape(loss, 1, -1, 0)));
    REFUSED(ctx, MT_ERR_DTYPE, "logits|i32", FORWARD(ctx, tp, &d, with_dtype(x, MT_I32), targets, loss));
    REFUSED(ctx, MT_ERR_DTYPE, "loss|bf16", FORWARD(ctx, tp, &d, x, targets, with_dtype(loss, MT_BF16)));
    REFUSED(ctx, MT_ERR_ARGUMENT, "logits is|data is NULL",
            FORWARD(ctx, tp, &d, mt_tensor_f32(NULL, 3, 3), targets, loss));
    REFUSED(ctx, MT_ERR_ARGUMENT, "loss is|data is NULL", FORWARD(ctx, tp, &d, x, targets, mt_tensor_f32(NULL, 1, 3)));
#undef FORWARD
    assert_null(saved.targets);
    entropy_close(&e);
}

static void test_cross_entropy_backward_refuses(void **state) {
    mt_cross_entropy_desc d = {.vocab = 10};
    mt_cross_entropy_saved saved = {0};
    int32_t targets[3] = {0, -100, 9}, worse[3] = {0, -100, -1};
    mt_tensor loss;
    entropy e;
    mt_context *ctx;
    mt_comm *tp;
    (void)state;
    entropy_open(&e, targets);
    ctx = e.r.ctx, tp = e.r.grid.tp, loss = e.loss;
#define BACKWARD(...) mt_vocab_parallel_cross_entropy_backward(__VA_ARGS__)
    assert_int_equal(BACKWARD(NULL, tp, &d, mt_none(), 1.0f, &e.good), MT_ERR_ARGUMENT);
    REFUSED(ctx, MT_ERR_ARGUMENT, "tp is NULL", BACKWARD(ctx, NULL, &d, mt_none(), 1.0f, &e.good));
    REFUSED(ctx, MT_ERR_ARGUMENT, "desc is NULL", BACKWARD(ctx, tp, NULL, mt_none(), 1.0f, &e.good));
    REFUSED(ctx, MT_ERR_ARGUMENT, "saved is NULL", BACKWARD(ctx, tp, &d, mt_none(), 1.0f, NULL));
    REFUSED(ctx, MT_ERR_SHAPE, "[0, 0]", BACKWARD(ctx, tp, &d, mt_none(), 1.0f, &saved));
    REFUSED(ctx, MT_ERR_SHAPE, "dloss|[1, 2]", BACKWARD(ctx, tp, &d, with_shape(loss, 1, 2, 0), 1.0f, &e.good));
    REFUSED(ctx, MT_ERR_DTYPE, "dloss|bf16", BACKWARD(ctx, tp, &d, with_dtype(loss, MT_BF16), 1.0f, &e.good));
#undef BACKWARD
#define AT_ONCE(targets, dloss)                                                                                        \
    mt_vocab_parallel_cross_entropy_forward_backward(ctx, tp, &d, e.x, targets, dloss, 1.0f, loss)
    REFUSED(ctx, MT_ERR_DATA, "target -1|index 2", AT_ONCE(worse, mt_none()));
    REFUSED(ctx, MT_ERR_SHAPE, "dloss|[1, 2]", AT_ONCE(targets, with_shape(loss, 1, 2, 0)));
#undef AT_ONCE
    entropy_close(&e);
}

static void test_gradient_calls_refuse(void **state) {
    float norm = 7.0f;
    test_rank r;
    (void)state;
    open_alone(&r);
    add_matrix(&r, "a", 2, 2, 1.0f);
    assert_int_equal(mt_sync_gradients(NULL, r.params), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_sync_gradients|NULL", mt_sync_gradients(r.ctx, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_sync_gradients|mt_params_init first", mt_sync_gradients(r.ctx, r.params));
    assert_int_equal(mt_grad_norm(NULL, r.params, &norm), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_grad_norm|NULL", mt_grad_norm(r.ctx, NULL, &norm));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_grad_norm|mt_params_init first", mt_grad_norm(r.ctx, r.params, &norm));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "norm is NULL", mt_grad_norm(r.ctx, r.params, NULL));
    assert_true(norm == 7.0f);
    test_paper_rank_close(&r);
}

/* Out of memory at every allocation of a creation in turn. The failed call leaves nothing behind, and the next call
   works. */
typedef struct failing_allocator {
    int left; /* number of allocations that still succeed; -1: all */
    size_t held;
} failing_allocator;

static void *failing_alloc(void *user, size_t bytes, size_t alignment) {
    failing_allocator *a = (failing_allocator *)user;
    void *p = NULL;
    if (a->left == 0) return NULL;
    if (a->left > 0) a->left--;
    if (posix_memalign(&p, alignment, bytes) != 0) return NULL;
    a->held += bytes;
    return p;
}

static void failing_free(void *user, void *ptr, size_t bytes) {
    ((failing_allocator *)user)->held -= bytes;
    free(ptr);
}

static void test_memory_that_runs_out(void **state) {
    failing_allocator a = {-1, 0};
    mt_context_desc where = {.arena_bytes = 1 << 16, .allocator = {failing_alloc, failing_free, &a}};
    mt_linear_desc d = {.in_features = 8, .out_features = 12};
    mt_column_parallel_linear l;
    mt_optimizer o;
    test_rank r;
    int n;
    (void)state;
    test_paper_rank(4, 1, (mt_grid_desc){.tp = 4}, &where, &r);
    for (n = 0; n < 10; n++) {
        a.left = n;
        if (mt_column_parallel_linear_create(r.ctx, r.params, "l", &d, &l) == MT_SUCCESS) break;
        assert_int_equal(mt_params_count(r.params), 0);
    }
    assert_int_equal(n, 0); /* descriptions are on the host, the allocator is for device memory */
    for (n = 0; n < 10; n++) {
        a.left = n;
        if (mt_params_init(r.ctx, r.params, 1) == MT_SUCCESS) break;
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_params_init first", mt_params_zero_grad(r.ctx, r.params));
    }
    assert_int_equal(n, 2);
    for (n = 0; n < 10; n++) {
        a.left = n;
        if (mt_optimizer_create(r.ctx, r.params, NULL, &o) == MT_SUCCESS) break;
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "no optimizer", mt_optimizer_step(r.ctx, &o, 0.1f, 1.0f));
    }
    assert_int_equal(n, 2);
    mt_optimizer_destroy(r.ctx, &o);
    test_paper_rank_close(&r);
    assert_int_equal(a.held, 0);
}

/* ---- norm layers ------------------------------------------------------------------------------------------------- */

enum { NORM_TOKENS = 8, NORM_GROUPS = 5, NORM_HEADS = 2, NORM_FEATURES = 3, NORM_UNIT = 8, NORM_COLS = 40 };

typedef struct norm_case {
    mt_norm_kind kind;
    int per_head, sequence_parallel, tp;
} norm_case;

/* Computes y, dx and the gradients of one row in double. */
static void norm_reference(const norm_case *c, const float *x, const float *dy, const double *gain, const double *bias,
                           double *y, double *dx, double *dgain, double *dbias, int n) {
    double mean = 0, square = 0, rstd, g = 0, gx = 0;
    for (int i = 0; i < n && c->kind == MT_LAYER_NORM; i++) mean += (double)x[i] / n;
    for (int i = 0; i < n; i++) square += ((double)x[i] - mean) * ((double)x[i] - mean) / n;
    rstd = 1 / sqrt(square + 1e-5);
    for (int i = 0; i < n; i++) {
        double hat = ((double)x[i] - mean) * rstd;
        y[i] = hat * gain[i] + (c->kind == MT_LAYER_NORM ? bias[i] : 0);
        dgain[i] += (double)dy[i] * hat;
        dbias[i] += (double)dy[i];
        g += (double)dy[i] * gain[i] / n;
        gx += (double)dy[i] * gain[i] * hat / n;
    }
    for (int i = 0; i < n; i++)
        dx[i] =
            rstd * ((double)dy[i] * gain[i] - (c->kind == MT_LAYER_NORM ? g : 0) - ((double)x[i] - mean) * rstd * gx);
}

/* This rank's part of x [NORM_TOKENS, NORM_COLS]: some groups of NORM_UNIT columns, or some rows. */
static mt_tensor norm_part(test_rank *r, const norm_case *c, const float *x) {
    int64_t groups = test_ceil(NORM_GROUPS, c->tp), first = r->grid.tp_rank * groups;
    int64_t rows = c->sequence_parallel ? NORM_TOKENS / c->tp : NORM_TOKENS;
    mt_tensor t = test_tensor(r, rows, c->per_head ? groups * NORM_UNIT : NORM_COLS, 0.0f);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < t.cols; j++) {
            int64_t row = c->sequence_parallel ? r->grid.tp_rank * rows + i : i;
            int64_t col = c->per_head ? first * NORM_UNIT + j : j;
            if (col < NORM_COLS) ((float *)t.data)[i * t.cols + j] = x[row * NORM_COLS + col];
        }
    return t;
}

/* The view that the layer gets: the whole tensor, or per head the first NORM_HEADS heads of each group. */
static mt_tensor norm_view(const norm_case *c, mt_tensor t) {
    if (!c->per_head) return t;
    return mt_tensor_cols(mt_tensor_reshape(t, t.rows * t.cols / NORM_UNIT, NORM_UNIT), 0, NORM_HEADS * NORM_FEATURES);
}

static mt_status norm_layer_check(test_rank *r, const norm_case *c) {
    int n = c->per_head ? NORM_FEATURES : NORM_COLS, all = NORM_TOKENS * NORM_COLS;
    const float *x = test_noise(r, all, 1, 2.0f), *dy = test_noise(r, all, 2, 1.0f);
    const float *extra = test_noise(r, all, 3, 1.0f);
    double y[NORM_TOKENS * NORM_COLS] = {0}, dx[NORM_TOKENS * NORM_COLS] = {0}, gain[NORM_COLS], bias[NORM_COLS];
    double dgain[NORM_COLS] = {0}, dbias[NORM_COLS] = {0};
    float *want_y = test_floats(r, all, 0.0f), *want_dx = test_floats(r, all, 0.0f);
    mt_norm_layer_desc d = {.features = n, .kind = c->kind, .sequence_parallel = c->sequence_parallel};
    mt_norm_layer layer;
    mt_norm_saved saved;
    if (c->per_head) d.groups = NORM_GROUPS;
    MT_TRY(mt_norm_layer_create(r->ctx, r->params, "norm", &d, &layer));
    MT_TRY(mt_params_init(r->ctx, r->params, 1));
    CHECK(!layer.bias == (c->kind == MT_RMS_NORM));
    for (int i = 0; i < n; i++) {
        gain[i] = (double)(((float *)layer.weight->value.data)[i] = 0.5f + 0.25f * (float)(i % 5));
        bias[i] = layer.bias ? (double)(((float *)layer.bias->value.data)[i] = 0.125f * (float)(i % 3)) : 0;
    }
    for (int at = 0; at < all; at += n) {
        if (c->per_head && at % NORM_UNIT >= NORM_HEADS * NORM_FEATURES) at += NORM_UNIT - NORM_HEADS * NORM_FEATURES;
        if (at < all) norm_reference(c, x + at, dy + at, gain, bias, y + at, dx + at, dgain, dbias, n);
    }
    for (int i = 0; i < all; i++) want_y[i] = (float)y[i];
    for (int i = 0; i < all; i++)
        want_dx[i] =
            (float)(dx[i] + (!c->per_head || i % NORM_UNIT < NORM_HEADS * NORM_FEATURES ? (double)extra[i] : 0));
    mt_tensor px = norm_part(r, c, x), pdy = norm_part(r, c, dy), got = norm_part(r, c, want_y);
    mt_tensor pextra = norm_part(r, c, extra), want = norm_part(r, c, want_y);
    mt_tensor got_y = norm_view(c, got), got_dx;
    MT_TRY(mt_fill(r->ctx, got_y, NAN));
    MT_TRY(mt_norm_layer_forward(r->ctx, &layer, norm_view(c, px), got_y, &saved));
    for (int64_t i = 0; i < got.rows * got.cols && c->per_head; i++) /* an empty group has the bias */
        if (r->grid.tp_rank * got.cols + i % got.cols >= NORM_COLS)
            ((float *)got.data)[i] = ((float *)want.data)[i] = 0;
    MT_TRY(test_near_f32("y", got.data, want.data, got.rows * got.cols, 1e-5));
    got = norm_part(r, c, want_dx);
    want = norm_part(r, c, want_dx);
    got_dx = norm_view(c, got);
    MT_TRY(mt_fill(r->ctx, got_dx, NAN));
    MT_TRY(mt_norm_layer_backward(r->ctx, &layer, norm_view(c, pdy), norm_view(c, pextra), got_dx, &saved));
    MT_TRY(test_near_f32("dx", got.data, want.data, got.rows * got.cols, 2e-5));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    MT_TRY(test_near("dgain", layer.weight->grad.data, dgain, n, 1e-4));
    return layer.bias ? test_near("dbias", layer.bias->grad.data, dbias, n, 1e-4) : MT_SUCCESS;
}

static mt_status norm_layer_rank(mt_comm *world, void *user) {
    const norm_case *c = (const norm_case *)user;
    test_rank r;
    mt_status status = test_rank_open(world, (mt_grid_desc){.tp = c->tp}, NULL, &r);
    if (status == MT_SUCCESS) status = norm_layer_check(&r, c);
    test_rank_close(&r);
    return status;
}

/* Against the formulas in double: whole rows, with and without sequence parallelism, and two heads of each of 5 groups,
   which cannot be divided evenly among 2 or 4 ranks. */
static void test_norm_layer_on_every_split(void **state) {
    (void)state;
    for (int tp = 1; tp <= 4; tp *= 2)
        for (int kind = MT_LAYER_NORM; kind <= MT_RMS_NORM; kind++)
            for (int form = 0; form < 3; form++) {
                norm_case c = {(mt_norm_kind)kind, form == 2, form == 1, tp};
                test_launch(tp, norm_layer_rank, &c);
            }
}

static void test_norm_layer_refuses(void **state) {
    static const struct {
        mt_norm_layer_desc desc;
        const char *rest; /* of the message, behind the function */
    } bad[] = {
        {{.features = 0, .groups = -1}, "'n': features is 0, must be at least 1"},
        {{.features = 4, .groups = -1}, "'n': groups is -1, must be from 0 to 2147483647"},
        {{.features = 4, .groups = INT64_MAX}, "'n': groups is 9223372036854775807, must be from 0 to 2147483647"},
        {{.features = 4, .kind = (mt_norm_kind)2}, "'n': kind is 2, must be MT_LAYER_NORM or MT_RMS_NORM"},
        {{.features = 4, .kind = (mt_norm_kind)-1, .eps = NAN},
         "'n': kind is -1, must be MT_LAYER_NORM or MT_RMS_NORM"},
        {{.features = 4, .eps = -1.0f}, "'n': eps is -1, must be at least 0 and finite"},
        {{.features = 4, .eps = NAN}, "'n': eps is nan, must be at least 0 and finite"},
        {{.features = 4, .groups = 2, .sequence_parallel = 1},
         "'n' has groups 2 and sequence_parallel; heads are split, and see all tokens"}};
    mt_norm_layer_desc d = {.features = 4, .groups = 2};
    mt_norm_layer layer;
    mt_norm_saved saved = {0};
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        REFUSED_EXACTLY(r.ctx, MT_ERR_ARGUMENT, bad[i].rest,
                        mt_norm_layer_create(r.ctx, r.params, "n", &bad[i].desc, &layer));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "desc is NULL", mt_norm_layer_create(r.ctx, r.params, "n", NULL, &layer));
    assert_int_equal(mt_params_count(r.params), 0);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_norm_layer_create(r.ctx, r.params, "n", &d, &layer));
    mt_tensor x = test_tensor(&r, 6, 8, 1.0f);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_params_init", mt_norm_layer_forward(r.ctx, &layer, x, x, NULL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    REFUSED(r.ctx, MT_ERR_SHAPE, "[5, 8]|2 groups",
            mt_norm_layer_forward(r.ctx, &layer, mt_tensor_rows(x, 0, 5), mt_tensor_rows(x, 0, 5), NULL));
    REFUSED(r.ctx, MT_ERR_SHAPE, "[6, 7]|heads of 4",
            mt_norm_layer_forward(r.ctx, &layer, mt_tensor_cols(x, 0, 7), x, NULL));
    REFUSED(r.ctx, MT_ERR_SHAPE, "y", mt_norm_layer_forward(r.ctx, &layer, x, mt_tensor_cols(x, 0, 4), NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "saved is NULL", mt_norm_layer_backward(r.ctx, &layer, x, mt_none(), x, NULL));
    REFUSED(r.ctx, MT_ERR_SHAPE, "saved.x", mt_norm_layer_backward(r.ctx, &layer, x, mt_none(), x, &saved));
    mt_tensor stats = test_tensor(&r, 12, 2, 0.0f), dx = test_tensor(&r, 6, 8, 7.0f);
    saved = (mt_norm_saved){x, mt_tensor_rows(stats, 0, 6)};
    REFUSED(r.ctx, MT_ERR_SHAPE, "saved.stats|[12, 2]", mt_norm_layer_backward(r.ctx, &layer, x, x, dx, &saved));
    saved.stats = mt_tensor_cols(stats, 0, 1);
    REFUSED(r.ctx, MT_ERR_SHAPE, "saved.stats|[12, 2]", mt_norm_layer_backward(r.ctx, &layer, x, x, dx, &saved));
    saved.stats = with_dtype(stats, MT_BF16);
    REFUSED(r.ctx, MT_ERR_DTYPE, "saved.stats|bf16", mt_norm_layer_backward(r.ctx, &layer, x, x, dx, &saved));
    saved.stats = stats;
    REFUSED(r.ctx, MT_ERR_SHAPE, "dresidual|[5, 8]",
            mt_norm_layer_backward(r.ctx, &layer, x, mt_tensor_rows(x, 0, 5), dx, &saved));
    REFUSED(r.ctx, MT_ERR_SHAPE, "dresidual|[6, 4]",
            mt_norm_layer_backward(r.ctx, &layer, x, mt_tensor_cols(x, 0, 4), dx, &saved));
    REFUSED(r.ctx, MT_ERR_DTYPE, "dresidual|bf16",
            mt_norm_layer_backward(r.ctx, &layer, x, with_dtype(x, MT_BF16), dx, &saved));
    test_untouched("dx", dx.data, 6 * 8, 7.0f);
    test_untouched("dgain", layer.weight->grad.data, 4, 0.0f);
    assert_int_equal(mt_tensor_reshape(x, 12, 4).rows, 12);
    assert_int_equal(mt_tensor_reshape(x, 12, 5).rows, -1);
    assert_int_equal(mt_tensor_reshape(x, -6, -8).rows, -1);
    assert_int_equal(mt_tensor_reshape(mt_tensor_cols(x, 0, 4), 12, 2).rows, -1);
    test_paper_rank_close(&r);
}

static void test_options(void **state) {
    mt_parallel_options o = {.no_overlap = MT_OVERLAP_GRADIENTS, .overlap_chunks = MT_OVERLAP_CHUNKS_MAX};
    test_rank r;
    (void)state;
    open_alone(&r);
    assert_int_equal(mt_parallel_get_options(r.ctx).no_overlap, 0);
    assert_int_equal(mt_parallel_get_options(r.ctx).overlap_chunks, 0);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_parallel_set_options(r.ctx, &o));
    o.overlap_chunks++;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "overlap_chunks is 9, must be from 0 to 8", mt_parallel_set_options(r.ctx, &o));
    o.overlap_chunks = -1;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "overlap_chunks is -1", mt_parallel_set_options(r.ctx, &o));
    o.overlap_chunks = 1;
    o.interleave = 2;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "interleave is 2, must be 0 or 1", mt_parallel_set_options(r.ctx, &o));
    o.interleave = 0;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "slot is 2, must be from -1 to 1", mt_layers_hold_reduction(r.ctx, 2));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "slot is -1, must be 0 or 1", mt_layers_wait_reduction(r.ctx, -1));
    o.no_overlap = 16;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "no_overlap is 16, must be bits of mt_overlap", mt_parallel_set_options(r.ctx, &o));
    assert_int_equal(mt_parallel_get_options(r.ctx).no_overlap, MT_OVERLAP_GRADIENTS);
    assert_int_equal(mt_parallel_get_options(r.ctx).overlap_chunks, MT_OVERLAP_CHUNKS_MAX);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_parallel_set_options(r.ctx, NULL));
    assert_int_equal(mt_parallel_get_options(r.ctx).no_overlap, 0);
    assert_int_equal(mt_parallel_set_options(NULL, &o), MT_ERR_ARGUMENT);
    assert_int_equal(mt_layers_trust_ids(NULL, 1), MT_ERR_ARGUMENT);
    test_paper_rank_close(&r);
}

/* ---- layers that share f and g ----------------------------------------------------------------------------------- */

enum { SHARED = 2, SHARED_TOKENS = 8, SHARED_IN = 6, SHARED_OUT = 5 };
static const int64_t shared_inner[SHARED] = {7, 12}; /* the first is padded */

typedef struct shared_case {
    int tp, sequence_parallel, chunks;
} shared_case;

typedef struct shared_block {
    mt_column_parallel_linear in[SHARED];
    mt_row_parallel_linear out[SHARED];
} shared_block;

static mt_status shared_create(test_rank *r, int sp, shared_block *b) {
    for (int i = 0; i < SHARED; i++) {
        mt_linear_desc in = {
            .in_features = SHARED_IN, .out_features = shared_inner[i], .init_std = 0.5f, .sequence_parallel = sp};
        mt_linear_desc out = {.in_features = shared_inner[i],
                              .out_features = SHARED_OUT,
                              .init_std = 0.5f,
                              .input_is_parallel = 1,
                              .sequence_parallel = sp};
        MT_TRY(mt_column_parallel_linear_create(r->ctx, r->params, i ? "in1" : "in0", &in, &b->in[i]));
        MT_TRY(mt_row_parallel_linear_create(r->ctx, r->params, i ? "out1" : "out0", &out, &b->out[i]));
    }
    return mt_params_init(r->ctx, r->params, 3);
}

/* Computes c [m, n] += op(a) op(b) with inner dimension k, in double. */
static void product(int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, const double *a, const double *b,
                    double *c) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            for (int64_t l = 0; l < k; l++)
                c[i * n + j] += a[trans_a ? l * m + i : i * k + l] * b[trans_b ? j * k + l : l * n + j];
}

static mt_status gathered(test_rank *r, const mt_param *p, mt_tensor shard, double *out) {
    float *f = test_floats(r, p->desc.rows * p->desc.cols, 0.0f);
    MT_TRY(mt_param_gather(r->ctx, r->params, p, shard, f));
    for (int64_t i = 0; i < p->desc.rows * p->desc.cols; i++) out[i] = (double)f[i];
    return MT_SUCCESS;
}

static mt_status gradient_is(test_rank *r, const mt_param *p, const double *want) {
    float *f = test_floats(r, p->desc.rows * p->desc.cols, 0.0f);
    MT_TRY(mt_param_gather(r->ctx, r->params, p, p->grad, f));
    return test_near(p->name, f, want, p->desc.rows * p->desc.cols, 1e-4);
}

/* Computes one path x -> h -> y of the block in double: adds to y and dx, and compares the gradients of its
   parameters. */
static mt_status shared_path(test_rank *r, const shared_block *b, int i, const double *x, const double *dy, double *y,
                             double *dx) {
    enum { MOST = 12 * 12 };
    double w[MOST] = {0}, v[MOST] = {0}, bias[12], c[12], h[SHARED_TOKENS * 12] = {0}, dh[SHARED_TOKENS * 12] = {0};
    double dw[MOST] = {0}, dv[MOST] = {0}, ones[SHARED_TOKENS], dbias[12] = {0}, dc[12] = {0};
    int64_t n = shared_inner[i], t = SHARED_TOKENS;
    MT_TRY(gathered(r, b->in[i].weight, b->in[i].weight->value, w));
    MT_TRY(gathered(r, b->out[i].weight, b->out[i].weight->value, v));
    MT_TRY(gathered(r, b->in[i].bias, b->in[i].bias->value, bias));
    MT_TRY(gathered(r, b->out[i].bias, b->out[i].bias->value, c));
    for (int64_t j = 0; j < t * n; j++) h[j] = bias[j % n];
    product(0, 1, t, n, SHARED_IN, x, w, h);
    for (int64_t j = 0; j < t * SHARED_OUT; j++) y[j] += c[j % SHARED_OUT];
    product(0, 1, t, SHARED_OUT, n, h, v, y);
    for (int64_t j = 0; j < t; j++) ones[j] = 1;
    product(0, 0, t, n, SHARED_OUT, dy, v, dh);
    product(0, 0, t, SHARED_IN, n, dh, w, dx);
    product(1, 0, SHARED_OUT, n, t, dy, h, dv);
    product(1, 0, n, SHARED_IN, t, dh, x, dw);
    product(0, 0, 1, SHARED_OUT, t, ones, dy, dc);
    product(0, 0, 1, n, t, ones, dh, dbias);
    MT_TRY(gradient_is(r, b->out[i].weight, dv));
    MT_TRY(gradient_is(r, b->in[i].weight, dw));
    MT_TRY(gradient_is(r, b->out[i].bias, dc));
    return gradient_is(r, b->in[i].bias, dbias);
}

static mt_status shared_check(test_rank *r, const shared_case *c) {
    shared_block b;
    double x[SHARED_TOKENS * SHARED_IN], dy[SHARED_TOKENS * SHARED_OUT], dx[SHARED_TOKENS * SHARED_IN] = {0};
    double y[SHARED_TOKENS * SHARED_OUT] = {0};
    int sp = c->sequence_parallel;
    int64_t rows = SHARED_TOKENS / (sp ? c->tp : 1), first = sp ? r->grid.tp_rank * rows : 0;
    mt_tensor fx = mt_tensor_f32(test_noise(r, SHARED_TOKENS * SHARED_IN, 1, 1.0f), SHARED_TOKENS, SHARED_IN);
    mt_tensor fdy = mt_tensor_f32(test_noise(r, SHARED_TOKENS * SHARED_OUT, 2, 1.0f), SHARED_TOKENS, SHARED_OUT);
    mt_tensor fy = test_tensor(r, rows, SHARED_OUT, NAN), fdx = test_tensor(r, rows, SHARED_IN, NAN);
    mt_tensor h[SHARED], dh[SHARED], own;
    mt_linear_saved in_saved, out_saved[SHARED];
    mt_ledger ledger;
    MT_TRY(shared_create(r, sp, &b));
    for (int i = 0; i < SHARED; i++) MT_TRY(mt_fill(r->ctx, b.out[i].bias->value, 0.5f + (float)i));
    for (int i = 0; i < SHARED_TOKENS * SHARED_IN; i++) x[i] = (double)((float *)fx.data)[i];
    for (int i = 0; i < SHARED_TOKENS * SHARED_OUT; i++) dy[i] = (double)((float *)fdy.data)[i];
    MT_TRY(mt_parallel_linear_tensors(r->ctx, b.in, SHARED, fdx, h));
    MT_TRY(mt_parallel_linear_tensors(r->ctx, b.out, SHARED, fy, dh));
    for (int i = 0; i < SHARED; i++) {
        CHECK(h[i].rows == SHARED_TOKENS && h[i].cols == b.in[i].local_features && h[i].dtype == MT_F32);
        CHECK(dh[i].rows == SHARED_TOKENS && dh[i].cols == b.out[i].local_features && dh[i].dtype == MT_F32);
        MT_TRY(mt_fill(r->ctx, h[i], NAN));
        MT_TRY(mt_fill(r->ctx, dh[i], NAN));
    }
    mt_comm_ledger_reset(r->grid.tp);
    own = mt_tensor_rows(fx, first, rows);
    MT_TRY(mt_parallel_linear_forward_shared(r->ctx, b.in, SHARED, &own, h, &in_saved));
    MT_TRY(mt_parallel_linear_forward_shared(r->ctx, b.out, SHARED, h, &fy, out_saved));
    own = mt_tensor_rows(fdy, first, rows);
    MT_TRY(mt_parallel_linear_backward_shared(r->ctx, b.out, SHARED, &own, dh, out_saved));
    MT_TRY(mt_parallel_linear_backward_shared(r->ctx, b.in, SHARED, dh, &fdx, &in_saved));
    ledger = mt_comm_ledger(r->grid.tp);
    if (c->tp > 1 && c->chunks == 1) {
        CHECK(ledger.calls[MT_ALL_REDUCE] == (sp ? 0 : 2));
        CHECK(ledger.calls[MT_REDUCE_SCATTER] == (sp ? 2 : 0));
        CHECK(ledger.calls[MT_ALL_GATHER] == (sp ? 3 : 0));
    }
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    for (int i = 0; i < SHARED; i++) MT_TRY(shared_path(r, &b, i, x, dy, y, dx));
    MT_TRY(test_near("y", fy.data, y + first * SHARED_OUT, rows * SHARED_OUT, 1e-5));
    return test_near("dx", fdx.data, dx + first * SHARED_IN, rows * SHARED_IN, 1e-5);
}

static mt_status shared_rank(mt_comm *world, void *user) {
    const shared_case *c = (const shared_case *)user;
    mt_context_desc where = {.arena_bytes = 1 << 20};
    mt_parallel_options options = {.overlap_chunks = c->chunks};
    test_rank r;
    mt_status status = test_rank_open(world, (mt_grid_desc){.tp = c->tp}, &where, &r);
    if (status == MT_SUCCESS) status = mt_parallel_set_options(r.ctx, &options);
    if (status == MT_SUCCESS) status = shared_check(&r, c);
    test_rank_close(&r);
    return status;
}

/* Two paths from one input to one sum, against double: their results, and that they communicate as much as one path. */
static void test_shared_f_and_g_on_every_split(void **state) {
    (void)state;
    for (int tp = 1; tp <= 4; tp *= 2)
        for (int sp = 0; sp <= (tp > 1); sp++)
            for (int chunks = 1; chunks <= 2; chunks++) test_launch(tp, shared_rank, &(shared_case){tp, sp, chunks});
}

static void test_shared_f_and_g_refuse(void **state) {
    shared_block b;
    test_rank r;
    mt_linear_saved saved[SHARED] = {{{0}}};
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, shared_create(&r, 0, &b));
    mt_column_parallel_linear hole[SHARED] = {b.in[0]}; /* the second layer is not created */
    mt_tensor x = test_tensor(&r, 8, SHARED_IN, 1.0f), y = test_tensor(&r, 8, SHARED_OUT, 7.0f);
    mt_tensor h[] = {test_tensor(&r, 8, 7, 7.0f), test_tensor(&r, 8, 12, 7.0f)}, swapped[] = {h[1], h[0]};
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "0 layers", mt_parallel_linear_forward_shared(r.ctx, b.in, 0, &x, h, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "NULL", mt_parallel_linear_forward_shared(r.ctx, b.in, 2, &x, NULL, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", mt_parallel_linear_forward_shared(r.ctx, hole, 2, &x, h, NULL));
    REFUSED(r.ctx, MT_ERR_SHAPE, "[8, 12]", mt_parallel_linear_forward_shared(r.ctx, b.in, 2, &x, swapped, NULL));
    REFUSED(r.ctx, MT_ERR_SHAPE, "[8, 12]", mt_parallel_linear_forward_shared(r.ctx, b.out, 2, swapped, &y, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "saved is NULL", mt_parallel_linear_backward_shared(r.ctx, b.out, 2, &y, h, NULL));
    REFUSED(r.ctx, MT_ERR_SHAPE, "saved.x", mt_parallel_linear_backward_shared(r.ctx, b.out, 2, &y, h, saved));
    saved[0] = saved_of(x);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "dx [|saved.x|overlap",
            mt_parallel_linear_backward_shared(r.ctx, b.in, 2, h, &x, saved));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "NULL", mt_parallel_linear_tensors(r.ctx, b.in, 2, x, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "0 layers", mt_parallel_linear_tensors(r.ctx, b.out, 0, y, h));
    b.in[1].desc.sequence_parallel = 1;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'in0'|'in1'|sequence_parallel",
            mt_parallel_linear_forward_shared(r.ctx, b.in, 2, &x, h, NULL));
    b.in[1].desc.sequence_parallel = 0;
    b.in[1].desc.gather_output = 1;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "gather_output", mt_parallel_linear_backward_shared(r.ctx, b.in, 2, h, &x, saved));
    b.out[1].desc.input_is_parallel = 0;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'out1'|input_is_parallel",
            mt_parallel_linear_forward_shared(r.ctx, b.out, 2, h, &y, NULL));
    hole[1] = b.out[0];
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'in0'|'out0'|column-parallel",
            mt_parallel_linear_forward_shared(r.ctx, hole, 2, &x, h, NULL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'out0' is row-parallel, must be column-parallel",
            mt_column_parallel_linear_product(r.ctx, &b.out[0], h[0], 0, y));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'out0' is row-parallel",
            mt_column_parallel_activation_forward(r.ctx, &b.out[0], MT_GELU_TANH, h[0], h[0]));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'in0' must be row-parallel",
            mt_row_parallel_linear_activation_backward(r.ctx, &b.in[0], &b.in[0], MT_GELU_TANH, h[0], x, x, saved));
    test_untouched("h", h[0].data, 8 * 7, 7.0f);
    test_untouched("y", y.data, 8 * SHARED_OUT, 7.0f);
    test_paper_rank_close(&r);
}

/* ---- activations beside a layer ---------------------------------------------------------------------------------- */

static double swiglu(double gate, double up) { return gate / (1 + exp(-gate)) * up; }

/* A gathered h is whole, [gate | up], also in invariant mode, where each virtual shard of the weight is padded. */
static mt_status gathered_activation_body(test_rank *r) {
    enum { HALF = 6, ROWS = 8, E = 2 * HALF };
    mt_linear_desc d = {.in_features = 5, .out_features = E, .parts = 2, .gather_output = 1, .init_std = 0.5f};
    mt_column_parallel_linear c;
    mt_tensor x = mt_tensor_f32(test_noise(r, ROWS * 5, 1, 2.0f), ROWS, 5);
    mt_tensor dy = mt_tensor_f32(test_noise(r, ROWS * HALF, 2, 1.0f), ROWS, HALF);
    mt_tensor h = test_tensor(r, ROWS, E, NAN), y = test_tensor(r, ROWS, HALF, NAN), dh = test_tensor(r, ROWS, E, NAN);
    mt_tensor again = test_tensor(r, ROWS, HALF, NAN);
    const float *hs = h.data;
    MT_TRY(mt_column_parallel_linear_create(r->ctx, r->params, "c", &d, &c));
    MT_TRY(mt_params_init(r->ctx, r->params, 3));
    MT_TRY(mt_column_parallel_linear_activation_forward(r->ctx, &c, MT_SWIGLU, x, h, y, NULL));
    MT_TRY(mt_column_parallel_activation_forward(r->ctx, &c, MT_SWIGLU, h, again));
    MT_TRY(mt_column_parallel_activation_backward(r->ctx, &c, MT_SWIGLU, h, dy, dh));
    for (int64_t i = 0; i < ROWS; i++)
        for (int64_t j = 0; j < HALF; j++) {
            double gate = hs[i * E + j], up = hs[i * E + HALF + j], g = ((float *)dy.data)[i * HALF + j], eps = 1e-5;
            double slope = (swiglu(gate + eps, up) - swiglu(gate - eps, up)) / (2 * eps);
            const float got[] = {((float *)y.data)[i * HALF + j], ((float *)again.data)[i * HALF + j],
                                 ((float *)dh.data)[i * E + j], ((float *)dh.data)[i * E + HALF + j]};
            const double want[] = {swiglu(gate, up), swiglu(gate, up), g * slope, g * swiglu(gate, 1)};
            for (int k = 0; k < 4; k++)
                if (!(fabs(got[k] - want[k]) <= 1e-6))
                    return mt_fail(r->ctx, MT_ERR_DATA, "value %d of [%d, %d] is %.9g, should be %.9g", k, (int)i,
                                   (int)j, got[k], want[k]);
        }
    return MT_SUCCESS;
}

static mt_status gathered_activation_rank(mt_comm *world, void *user) {
    mt_context_desc context = {.invariant = *(const int *)user, .arena_bytes = 1 << 20};
    test_rank r;
    mt_status status = test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, &context, &r);
    if (status == MT_SUCCESS) status = gathered_activation_body(&r);
    test_rank_close(&r);
    return status;
}

static void test_activation_of_a_gathered_layer(void **state) {
    (void)state;
    for (int invariant = 0; invariant <= 4; invariant += 4)
        for (int tp = 1; tp <= 4; tp *= 2) test_launch(tp, gathered_activation_rank, &invariant);
}

/* When the activation is refused, the fused call has not computed the layer either. */
static void test_layer_and_activation_refuse(void **state) {
    mt_linear_desc in = {.in_features = 4, .out_features = 12, .parts = 2};
    mt_linear_desc out = {.in_features = 6, .out_features = 4, .input_is_parallel = 1};
    mt_activation none = (mt_activation)7;
    (void)state;
    for (int skip = 0; skip < 2; skip++) { /* as two operators, or as one */
        mt_gemm_options options = {.epilogue = skip ? MT_EPILOGUE_FUSED : MT_EPILOGUE_SEPARATE};
        mt_column_parallel_linear before;
        mt_row_parallel_linear layer;
        test_rank r;
        open_alone(&r);
        mt_tensor x = test_tensor(&r, 8, 4, 1.0f), h = test_tensor(&r, 8, 12, 7.0f), y = test_tensor(&r, 8, 6, 7.0f);
        mt_tensor dy = test_tensor(&r, 8, 4, 1.0f), dh = test_tensor(&r, 8, 12, 7.0f);
        mt_linear_saved saved = saved_of(y);
        in.skip_bias_add = skip;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gemm_set_options(r.ctx, &options));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "in", &in, &before));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_row_parallel_linear_create(r.ctx, r.params, "out", &out, &layer));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
#define FORWARD(kind, y) mt_column_parallel_linear_activation_forward(r.ctx, &before, kind, x, h, y, NULL)
#define BACKWARD(kind, h) mt_row_parallel_linear_activation_backward(r.ctx, &layer, &before, kind, dy, h, dh, &saved)
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "kind is 7, must be MT_GELU_TANH, ", FORWARD(none, y));
        REFUSED(r.ctx, MT_ERR_SHAPE, "y is [8, 6]", FORWARD(MT_GELU_ERF, y));
        REFUSED(r.ctx, MT_ERR_SHAPE, "y is [7, 6]", FORWARD(MT_SWIGLU, mt_tensor_rows(y, 0, 7)));
        REFUSED(r.ctx, MT_ERR_DTYPE, "y is bf16", FORWARD(MT_SWIGLU, with_dtype(y, MT_BF16)));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "kind is 7, must be MT_GELU_TANH, ", BACKWARD(none, h));
        REFUSED(r.ctx, MT_ERR_SHAPE, "saved.x is [8, 6]|[8, 12]", BACKWARD(MT_GELU_TANH, h));
        REFUSED(r.ctx, MT_ERR_SHAPE, "h is [8, 6]|[8, 12]", BACKWARD(MT_SWIGLU, mt_tensor_cols(h, 0, 6)));
        before.desc.gather_output = 1;
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "'out'|gather_output", BACKWARD(MT_SWIGLU, h));
#undef FORWARD
#undef BACKWARD
        test_untouched("h", h.data, 8 * 12, 7.0f);
        test_untouched("dh", dh.data, 8 * 12, 7.0f);
        test_untouched("dw", layer.weight->grad.data, 4 * 6, 0.0f);
        test_untouched("db", layer.bias->grad.data, 4, 0.0f);
        test_paper_rank_close(&r);
    }
}

static void test_activation_refuses(void **state) {
    mt_linear_desc d = {.in_features = 4, .out_features = 10, .skip_bias_add = 1};
    mt_activation none = (mt_activation)7;
    mt_column_parallel_linear c, whole;
    test_rank r;
    (void)state;
    open_alone(&r);
    mt_tensor h = test_tensor(&r, 8, 10, 7.0f), y = test_tensor(&r, 8, 10, 7.0f), dh = test_tensor(&r, 8, 10, 7.0f);
    mt_tensor half = mt_tensor_cols(y, 0, 5);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "c", &d, &c));
    d.gather_output = 1;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "w", &d, &whole));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
#define FORWARD(layer, ...) mt_column_parallel_activation_forward(r.ctx, layer, __VA_ARGS__)
#define BACKWARD(layer, ...) mt_column_parallel_activation_backward(r.ctx, layer, __VA_ARGS__)
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "not created", FORWARD(NULL, MT_GELU_ERF, h, y));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "kind is 7, must be MT_GELU_TANH, ", FORWARD(&c, none, h, y));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "kind is 7, must be MT_GELU_TANH, ", BACKWARD(&c, none, h, y, dh));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'w'|gather_output|skip_bias_add", FORWARD(&whole, MT_GELU_ERF, h, y));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'w'|gather_output|skip_bias_add", BACKWARD(&whole, MT_GELU_ERF, h, y, dh));
    c.bias = NULL; /* otherwise the kernel compares h with the bias */
    REFUSED(r.ctx, MT_ERR_SHAPE, "h is [8, 9]|[8, 10]",
            FORWARD(&c, MT_GELU_ERF, mt_tensor_cols(h, 0, 9), mt_tensor_cols(y, 0, 9)));
    REFUSED(r.ctx, MT_ERR_SHAPE, "h is [8, 8]|[8, 10]",
            BACKWARD(&c, MT_SWIGLU, mt_tensor_cols(h, 0, 8), mt_tensor_cols(y, 0, 4), mt_tensor_cols(dh, 0, 8)));
    REFUSED(r.ctx, MT_ERR_SHAPE, "y is [8, 10]|[8, 5]", FORWARD(&c, MT_SWIGLU, h, y));
    REFUSED(r.ctx, MT_ERR_DTYPE, "h is bf16", FORWARD(&c, MT_GELU_ERF, with_dtype(h, MT_BF16), y));
    REFUSED(r.ctx, MT_ERR_DTYPE, "y is bf16", FORWARD(&c, MT_GELU_ERF, h, with_dtype(y, MT_BF16)));
    REFUSED(r.ctx, MT_ERR_SHAPE, "dh is [8, 9]", BACKWARD(&c, MT_SWIGLU, h, half, mt_tensor_cols(dh, 0, 9)));
    REFUSED(r.ctx, MT_ERR_DTYPE, "dh is f16", BACKWARD(&c, MT_SWIGLU, h, half, with_dtype(dh, MT_F16)));
    c.local_features = 9;
    REFUSED(r.ctx, MT_ERR_SHAPE, "9 features of 'c'", FORWARD(&c, MT_SWIGLU, mt_tensor_cols(h, 0, 9), half));
#undef FORWARD
#undef BACKWARD
    test_untouched("h", h.data, 8 * 10, 7.0f);
    test_untouched("y", y.data, 8 * 10, 7.0f);
    test_untouched("dh", dh.data, 8 * 10, 7.0f);
    test_paper_rank_close(&r);
}

/* ---- for authors of blocks --------------------------------------------------------------------------------------- */

static mt_status add_some_and_fail(test_rank *r, int *block) {
    mt_param_desc d = {.name = "a", .rows = 2, .cols = 2};
    mt_param *p;
    void *buffer;
    size_t mark = mt_params_mark(r->params);
    mt_status status = mt_params_buffer(r->ctx, r->params, 1000, 0, &buffer);
    MT_KEEP(status, mt_params_add(r->ctx, r->params, &d, &p));
    MT_KEEP(status, mt_params_buffer(r->ctx, r->params, 1000, 1, &buffer));
    MT_KEEP(status, mt_params_buffer(r->ctx, r->params, 3000, 0, &buffer));
    d.name = "b";
    MT_KEEP(status, mt_params_add(r->ctx, r->params, &d, &p));
    *block = 1;
    return mt_create_end(r->params, mark, block, sizeof *block, status == MT_SUCCESS ? MT_ERR_DATA : status);
}

static mt_status count_rows(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor a, mt_tensor b) {
    (void)ctx, (void)arg, (void)b;
    for (int64_t i = 0; i < count; i++) ((float *)a.data)[0] += (float)(first + i);
    ((float *)a.data)[1] += 1;
    return MT_SUCCESS;
}

static void test_logging_an_activation_refuses(void **state) {
    mt_linear_desc d = {.in_features = 4, .out_features = 12, .parts = 2};
    mt_column_parallel_linear fc1;
    mt_hash_log *log = NULL;
    test_rank r;
    (void)state;
    open_alone(&r);
    mt_tensor h = test_tensor(&r, 8, 12, 1.0f), act = test_tensor(&r, 8, 6, 1.0f);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "fc1", &d, &fc1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "name is NULL", mt_hash_log_activation(r.ctx, NULL, 0, "a", h, 0, NULL));
    /* without a log, nothing is done */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_hash_log_activation(r.ctx, "b", 0, "a", h, 0, NULL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_hash_log_create(r.ctx, &r.grid, &log));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_hash_log_activation(r.ctx, "fc1", 0, "output", h, 0, fc1.weight));
    REFUSED(r.ctx, MT_ERR_SHAPE, "act|'fc1'|6 columns|'fc1.weight' has 12",
            mt_hash_log_activation(r.ctx, "fc1", 0, "act", act, 0, fc1.weight));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "what is NULL", mt_hash_log_activation(r.ctx, "fc1", 0, NULL, h, 0, fc1.weight));
    mt_hash_log_destroy(log);
    test_paper_rank_close(&r);
}

static void test_helpers_of_blocks_refuse(void **state) {
    static const int invariant[] = {0, 2};
    char name[MT_NAME_MAX] = "kept";
    mt_dropout none = mt_batch_dropout(NULL, 0.5f, 1, 2);
    int block = 1;
    (void)state;
    assert_true(none.p == 0.0f && none.at.seed == 0 && none.at.subsequence == 0);
    assert_int_equal(mt_create_end(NULL, 0, &block, sizeof block, MT_ERR_DATA), MT_ERR_DATA);
    assert_int_equal(block, 0);
    for (int i = 0; i < 2; i++) {
        mt_context_desc where = {.invariant = invariant[i], .arena_bytes = 1 << 20};
        mt_param_desc d = {.name = "a", .rows = 2, .cols = 2};
        mt_arena_request no_out = {NULL, MT_F32, 1, 1};
        mt_param *p;
        test_rank r;
        test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, &where, &r);
        mt_tensor x = test_tensor(&r, 2, 2, 7.0f), all;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &d, &p));
        assert_int_equal(mt_create_end(r.params, 0, NULL, 8, MT_ERR_DATA), MT_ERR_DATA);
        assert_int_equal(mt_params_count(r.params), 0);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "f: the parameter|x", mt_check_activation(r.ctx, "f", NULL, "x", x, 2, 2));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_param_name(r.ctx, NULL, "a", "b"));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "suffix is NULL", mt_param_name(r.ctx, name, "a", NULL));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "list is NULL", mt_arena_tensors(r.ctx, NULL, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, NULL, 0));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "out NULL", mt_arena_tensors(r.ctx, &no_out, 1));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_gather_tokens(r.ctx, r.grid.tp, 1, x, NULL));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "f: rows is NULL", mt_sequence_rows(r.ctx, "f", r.grid.tp, 1, 2, NULL));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_invariant_input: out is NULL", mt_invariant_input(r.ctx, x, NULL));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_invariant_output: out is NULL", mt_invariant_output(r.ctx, x, NULL));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "op is NULL",
                mt_sum_over_tokens(r.ctx, r.grid.tp, 0, NULL, NULL, 2, x, mt_none()));
        assert_int_equal(mt_arena_tensors(NULL, NULL, 1), MT_ERR_ARGUMENT);
        assert_int_equal(mt_gather_tokens(NULL, r.grid.tp, 0, x, &all), MT_ERR_ARGUMENT);
        assert_string_equal(name, "kept");
        test_untouched("x", x.data, 4, 7.0f);
        test_paper_rank_close(&r);
    }
}

static void test_helpers_of_blocks(void **state) {
    mt_param_desc d = {.name = "kept", .rows = 4, .cols = 4};
    char name[MT_NAME_MAX], longest[MT_NAME_MAX];
    mt_tensor a, b, sum;
    mt_arena_request two[] = {{&a, MT_F32, 3, 5}, {&b, MT_BF16, 1, 7}}, too_many = {&a, MT_F32, 1 << 20, 1 << 20};
    mt_param *p;
    test_rank r;
    void *buffer;
    int block;
    size_t before;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &d, &p));
    /* the buffer of the previous block */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_buffer(r.ctx, r.params, 500, 0, &buffer));
    before = mt_context_allocated(r.ctx);
    assert_int_equal(add_some_and_fail(&r, &block), MT_ERR_DATA);
    assert_int_equal(mt_params_count(r.params), 1);
    assert_int_equal(mt_params_mark(r.params), 2);
    assert_int_equal(mt_context_allocated(r.ctx), before);
    memset(buffer, 1, 500);
    assert_int_equal(block, 0);
    block = 1;
    assert_int_equal(mt_create_end(r.params, 1, &block, sizeof block, MT_SUCCESS), MT_SUCCESS);
    assert_int_equal(mt_params_mark(r.params), 2);
    assert_int_equal(block, 1);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_param_name(r.ctx, name, "block", "gate"));
    assert_string_equal(name, "block.gate");
    memset(longest, 'x', sizeof longest);
    longest[MT_NAME_MAX - 3] = 0;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_param_name(r.ctx, name, longest, "y"));
    assert_int_equal(strlen(name), MT_NAME_MAX - 1);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "at most", mt_param_name(r.ctx, name, longest, "yz"));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_buffer(r.ctx, r.params, 64, 1, &buffer));
    for (int i = 0; i < 64; i++) assert_int_equal(((char *)buffer)[i], 0);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_buffer(r.ctx, r.params, 64, 0, &buffer));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "params is NULL", mt_params_buffer(r.ctx, NULL, 64, 0, &buffer));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_params_init", mt_check_param(r.ctx, "f", p));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, two, 2));
    assert_int_equal(a.rows * 10 + a.cols, 35);
    assert_int_equal(b.cols * 10 + (int)b.dtype, 71);
    assert_int_equal(mt_arena_tensors(r.ctx, &too_many, 1), MT_ERR_MEMORY);
    sum = test_tensor(&r, 1, 2, 0.0f);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sum_over_tokens(r.ctx, r.grid.tp, 0, count_rows, NULL, 8, sum, mt_none()));
    assert_float_equal(((float *)sum.data)[0], 28, 0);
    assert_float_equal(((float *)sum.data)[1], 1, 0); /* one call */
    assert_int_equal(mt_params_shards(r.params), 1);
    test_paper_rank_close(&r);
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, &(mt_context_desc){.invariant = 4, .arena_bytes = 1 << 20}, &r);
    sum = test_tensor(&r, 1, 2, 0.0f);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sum_over_tokens(r.ctx, r.grid.tp, 0, count_rows, NULL, 8, sum, mt_none()));
    assert_float_equal(((float *)sum.data)[0], 28, 0);
    assert_float_equal(((float *)sum.data)[1], 4, 0); /* one call for each virtual shard */
    REFUSED(r.ctx, MT_ERR_SHAPE, "7 tokens|4 virtual shards",
            mt_sum_over_tokens(r.ctx, r.grid.tp, 0, count_rows, NULL, 7, sum, mt_none()));
    assert_int_equal(mt_params_shards(r.params), 4);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_invariant_input(r.ctx, mt_tensor_cols(sum, 1, 1), &a));
    assert_float_equal(*(float *)a.data, 4, 0);
    assert_ptr_not_equal(a.data, (float *)sum.data + 1);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_invariant_output(r.ctx, mt_tensor_cols(sum, 1, 1), &b));
    *(float *)b.data = 9;
    assert_float_equal(((float *)sum.data)[1], 4, 0);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_invariant_store(r.ctx, b, mt_tensor_cols(sum, 1, 1)));
    assert_float_equal(((float *)sum.data)[1], 9, 0);
    test_paper_rank_close(&r);
}

/* mt_check_sent: `in` has ld 16 and `out` ld 12, and the same without a gap between the rows. */
static void test_check_sent(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks += 3)
        for (int sp = 0; sp < 2; sp++) {
            test_rank r;
            test_paper_rank(ranks, 0, (mt_grid_desc){.tp = ranks}, NULL, &r);
            mt_context *ctx = r.ctx;
            mt_comm *tp = r.grid.tp;
            mt_tensor x = test_tensor(&r, 3, 16, 1.0f), y = test_tensor(&r, 5, 12, 1.0f), none = mt_none();
            mt_tensor in = mt_tensor_cols(x, 0, 8), out = mt_tensor_cols(y, 2, 6);
            mt_tensor row = mt_tensor_rows(in, 1, 1), empty = mt_tensor_rows(out, 0, 0);
            ASSERT_STATUS(ctx, MT_SUCCESS, mt_check_sent(ctx, "f", tp, sp, "a", x, "b", y));
            ASSERT_STATUS(ctx, MT_SUCCESS, mt_check_sent(ctx, "f", tp, sp, "a", none, "b", none));
            ASSERT_STATUS(ctx, MT_SUCCESS, mt_check_sent(ctx, "f", tp, sp, "a", row, "b", empty));
            ASSERT_STATUS(ctx, MT_SUCCESS, mt_check_sent(ctx, "f", tp, sp, "a", empty, "b", row));
            ASSERT_STATUS(ctx, MT_SUCCESS, mt_check_sent(ctx, "f", tp, sp, "a", with_shape(x, 3, 16, 0), "b", y));
            if (ranks == 1) { /* nothing is sent */
                ASSERT_STATUS(ctx, MT_SUCCESS, mt_check_sent(ctx, "f", tp, sp, "a", in, "b", out));
            } else {
                REFUSED(ctx, MT_ERR_SHAPE, "f: b [5, 6] has ld 12|between 4 ranks|contiguous",
                        mt_check_sent(ctx, "f", tp, sp, "a", none, "b", out));
                REFUSED(ctx, MT_ERR_SHAPE, sp ? "f: a [3, 8] has ld 16" : "f: b [5, 6] has ld 12",
                        mt_check_sent(ctx, "f", tp, sp, "a", in, "b", out));
            }
            if (ranks > 1 && sp)
                REFUSED(ctx, MT_ERR_SHAPE, "f: a [3, 8] has ld 16|between 4 ranks|contiguous",
                        mt_check_sent(ctx, "f", tp, sp, "a", in, "b", none));
            else ASSERT_STATUS(ctx, MT_SUCCESS, mt_check_sent(ctx, "f", tp, sp, "a", in, "b", y));
            test_paper_rank_close(&r);
        }
}

/* Tokens and rows: with sequence parallelism a rank has 1 / t of the tokens. V must divide the tokens. */
static void test_tokens_and_rows(void **state) {
    static const mt_context_desc plain = {.arena_bytes = 4096}, invariant = {.invariant = 8, .arena_bytes = 4096};
    test_rank r;
    int64_t rows = 99;
    (void)state;
    test_paper_rank(4, 1, (mt_grid_desc){.tp = 4}, &plain, &r);
    mt_comm *tp = r.grid.tp;
    assert_true(mt_sequence_tokens(tp, 0, 5) == 5 && mt_sequence_tokens(tp, 1, 5) == 20);
    assert_true(mt_sequence_tokens(tp, 0, 0) == 0 && mt_sequence_tokens(tp, 1, 0) == 0);
    assert_true(mt_sequence_tokens(tp, 0, INT64_MAX) == INT64_MAX);
    assert_true(mt_sequence_tokens(tp, 1, INT64_MAX / 4) == INT64_MAX / 4 * 4);
    assert_true(mt_sequence_tokens(tp, 1, INT64_MAX / 4 + 1) == -1);
    assert_true(mt_sequence_tokens(tp, 1, INT64_MAX) == -1);
    for (int sp = 0; sp < 2; sp++) {
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sequence_rows(r.ctx, "f", tp, sp, 20, &rows));
        assert_true(rows == (sp ? 5 : 20) && mt_sequence_tokens(tp, sp, rows) == 20);
    }
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sequence_rows(r.ctx, "f", tp, 0, 21, &rows));
    REFUSED(r.ctx, MT_ERR_SHAPE, "f: 21 tokens|4 tensor ranks", mt_sequence_rows(r.ctx, "f", tp, 1, 21, &rows));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_tokens(r.ctx, "f", 7)); /* not in invariant mode */
    assert_int_equal(mt_check_tokens(NULL, "f", 8), MT_ERR_ARGUMENT);
    test_paper_rank_close(&r);
    test_paper_rank(4, 1, (mt_grid_desc){.tp = 4}, &invariant, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_tokens(r.ctx, "f", 24));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_tokens(r.ctx, "f", 0));
    REFUSED(r.ctx, MT_ERR_SHAPE, "f: 20 tokens|8 virtual shards", mt_check_tokens(r.ctx, "f", 20)); /* t divides 20 */
    REFUSED(r.ctx, MT_ERR_SHAPE, "f: -1 tokens",
            mt_check_tokens(r.ctx, "f", mt_sequence_tokens(r.grid.tp, 1, INT64_MAX)));
    test_paper_rank_close(&r);
}

/* mt_create_check, mt_check_param and mt_check_activation, which name what is wrong. */
static void test_checks_of_blocks(void **state) {
    mt_param_desc d = {.name = "w", .rows = 4, .cols = 4};
    mt_param *p;
    test_rank r;
    (void)state;
    open_alone(&r);
    mt_context *ctx = r.ctx;
    mt_tensor x = test_tensor(&r, 3, 4, 1.0f);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_create_check(ctx, "f", r.params, &d, &p));
    assert_int_equal(mt_create_check(NULL, "f", r.params, &d, &p), MT_ERR_ARGUMENT);
    REFUSED(ctx, MT_ERR_ARGUMENT, "f: params is NULL", mt_create_check(ctx, "f", NULL, &d, &p));
    REFUSED(ctx, MT_ERR_ARGUMENT, "f: desc is NULL", mt_create_check(ctx, "f", r.params, NULL, &p));
    REFUSED(ctx, MT_ERR_ARGUMENT, "f: out is NULL", mt_create_check(ctx, "f", r.params, &d, NULL));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_add(ctx, r.params, &d, &p));
    REFUSED(ctx, MT_ERR_ARGUMENT, "f: |not created", mt_check_param(ctx, "f", NULL));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_params_init(ctx, r.params, 1));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_check_param(ctx, "f", p));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_check_activation(ctx, "f", p, "x", x, 3, 4));
    REFUSED(ctx, MT_ERR_SHAPE, "f: x is [3, 4]", mt_check_activation(ctx, "f", p, "x", x, 4, 4));
    REFUSED(ctx, MT_ERR_SHAPE, "f: x is [3, 4]", mt_check_activation(ctx, "f", p, "x", x, 3, 5));
    REFUSED(ctx, MT_ERR_DTYPE, "f: x is bf16|'w' is f32",
            mt_check_activation(ctx, "f", p, "x", with_dtype(x, MT_BF16), 3, 4));
    test_paper_rank_close(&r);
}

/* ---- names that the registry gives ------------------------------------------------------------------------------- */

/* The names of the layers that create_unnamed creates, in order. Only "mine" is given. */
static const char *const layer_names[] = {"layer.0", "layer.1", "mine",    "layer.2", "layer.3",
                                          "layer.4", "layer.5", "layer.6", "layer.7"};

/* Creates a layer of every kind, and two parameters. Without `automatic` it gives the names that the registry would
   give. */
static mt_status create_unnamed(test_rank *r, int automatic) {
    mt_linear_desc linear = {.in_features = 8, .out_features = 24, .unit = 12};
    mt_linear_desc back = {.in_features = 24, .out_features = 8};
    mt_norm_layer_desc norm = {.features = 8}, per_head = {.features = 4};
    mt_embedding_desc table = {.vocab = 10, .features = 8};
    mt_mlp_desc mlp_desc = {.hidden = 8};
    mt_self_attention_desc attention_desc = {.hidden = 8, .heads = 2};
    mt_transformer_layer_desc layer_desc = {.hidden = 8, .heads = 2};
    mt_param_desc matrix = {.rows = 3, .cols = 5, .init_std = 1.0f};
    mt_column_parallel_linear column;
    mt_row_parallel_linear row;
    mt_norm_layer gain;
    mt_vocab_parallel_embedding words;
    mt_mlp mlp;
    mt_self_attention attention;
    mt_transformer_layer layer;
    mt_qk_norm qk;
    mt_param *first, *second;
#define NAME_OF(i) (automatic && (i) != 2 ? NULL : layer_names[i])
    MT_TRY(mt_column_parallel_linear_create(r->ctx, r->params, NAME_OF(0), &linear, &column));
    MT_TRY(mt_row_parallel_linear_create(r->ctx, r->params, NAME_OF(1), &back, &row));
    CHECK(strcmp(column.name, "layer.0") == 0 && strcmp(row.name, "layer.1") == 0);
    MT_TRY(mt_norm_layer_create(r->ctx, r->params, NAME_OF(2), &norm, &gain));
    MT_TRY(mt_norm_layer_create(r->ctx, r->params, NAME_OF(3), &norm, &gain));
    matrix.name = automatic ? NULL : "param.0";
    MT_TRY(mt_params_add(r->ctx, r->params, &matrix, &first));
    MT_TRY(mt_vocab_parallel_embedding_create(r->ctx, r->params, NAME_OF(4), &table, &words));
    MT_TRY(mt_mlp_create(r->ctx, r->params, NAME_OF(5), &mlp_desc, &mlp));
    MT_TRY(mt_self_attention_create(r->ctx, r->params, NAME_OF(6), &attention_desc, &attention));
    MT_TRY(mt_transformer_layer_create(r->ctx, r->params, NAME_OF(7), &layer_desc, &layer));
    MT_TRY(mt_qk_norm_create(r->ctx, r->params, NAME_OF(8), &per_head, &column, &qk));
#undef NAME_OF
    matrix.name = automatic ? NULL : "param.1";
    MT_TRY(mt_params_add(r->ctx, r->params, &matrix, &second));
    CHECK(strcmp(first->name, "param.0") == 0 && strcmp(second->name, "param.1") == 0);
    return mt_params_init(r->ctx, r->params, 7); /* compares the names of all ranks */
}

static mt_status automatic_rank(mt_comm *world, void *user) {
    test_rank r[2];
    mt_status status = MT_SUCCESS;
    mt_grid_desc shape = {.tp = *(const int *)user};
    for (int k = 0; k < 2; k++) MT_KEEP(status, test_rank_open(world, shape, NULL, &r[k]));
    for (int k = 0; k < 2; k++) MT_KEEP(status, create_unnamed(&r[k], k));
    CHECK(status != MT_SUCCESS || mt_params_count(r[0].params) == mt_params_count(r[1].params));
    for (int i = 0; status == MT_SUCCESS && i < mt_params_count(r[0].params); i++) {
        const mt_param *p[2] = {mt_params_at(r[0].params, i), mt_params_at(r[1].params, i)};
        size_t bytes = (size_t)(p[0]->value.rows * p[0]->value.cols) * sizeof(float);
        if (strcmp(p[0]->name, p[1]->name) != 0 || memcmp(p[0]->value.data, p[1]->value.data, bytes) != 0) {
            fprintf(stderr, "'%s' and '%s' differ\n", p[0]->name, p[1]->name);
            status = MT_ERR_DATA;
        }
    }
    for (int k = 0; k < 2; k++) test_rank_close(&r[k]);
    return status;
}

static void test_automatic_names(void **state) {
    int tp[] = {1, 2, 1};
    (void)state;
    for (int i = 0; i < 3; i++) test_launch(i ? 2 : 1, automatic_rank, &tp[i]);
}

/* A create function that fails uses up no number. */
static void test_automatic_names_after_errors(void **state) {
    static const char *const names[] = {"layer.x", "layer.", "layers.8.w", "layer.3", "param.3.w", "param", "layer"};
    mt_transformer_layer_desc bad_desc = {.hidden = 8, .heads = 2, .activation = (mt_activation)99};
    mt_linear_desc d = {.in_features = 4, .out_features = 4, .no_bias = 1};
    mt_param_desc matrix = {.rows = 2, .cols = 2}, no_shape = {.rows = 0, .cols = 2};
    mt_transformer_layer bad;
    mt_column_parallel_linear fc;
    char name[MT_NAME_MAX];
    mt_param *p;
    test_rank r;
    (void)state;
    open_alone(&r);
    for (int k = 0; k < 2; k++) {
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "layer.0", mt_transformer_layer_create(r.ctx, r.params, NULL, &bad_desc, &bad));
        REFUSED(r.ctx, MT_ERR_SHAPE, "'param.0'", mt_params_add(r.ctx, r.params, &no_shape, &p));
        assert_int_equal(mt_params_count(r.params), 0);
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) add_matrix(&r, names[i], 2, 2, 0.0f);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, NULL, &d, &fc));
    assert_string_equal(fc.weight->name, "layer.4.weight");
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &matrix, &p));
    assert_string_equal(p->name, "param.4");
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_layer_name(r.ctx, r.params, NULL, name));
    assert_string_equal(name, "layer.5");
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_layer_name(r.ctx, r.params, "mine", name));
    assert_string_equal(name, "mine");
    add_matrix(&r, "layer.18446744073709551616", 2, 2, 0.0f); /* has no number that could be counted on */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_layer_name(r.ctx, r.params, NULL, name));
    assert_null(mt_params_find(r.params, name));
    assert_int_equal(mt_layer_name(NULL, r.params, NULL, name), MT_ERR_ARGUMENT);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "params is NULL", mt_layer_name(r.ctx, NULL, NULL, name));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "out is NULL", mt_layer_name(r.ctx, r.params, NULL, NULL));
    test_paper_rank_close(&r);
}

/* The stages of a pipeline would all have layer.0, with the same random numbers. */
static void test_automatic_names_of_stages(void **state) {
    mt_param_desc matrix = {.rows = 2, .cols = 2};
    mt_mlp_desc d = {.hidden = 8};
    mt_param *p;
    mt_mlp mlp;
    test_rank r;
    (void)state;
    test_paper_rank(2, 1, (mt_grid_desc){.pp = 2}, NULL, &r);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "2 pipeline stages|name", mt_params_add(r.ctx, r.params, &matrix, &p));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "2 pipeline stages|name", mt_mlp_create(r.ctx, r.params, NULL, &d, &mlp));
    assert_int_equal(mt_params_count(r.params), 0);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_mlp_create(r.ctx, r.params, "stage1", &d, &mlp));
    test_paper_rank_close(&r);
}

/* ---- the variants of this program -------------------------------------------------------------------------------- */

#ifdef MT_TEST_CHECK_WANTED
/* Variants with check_all.h run in the check mode that CMakeLists.txt means. */
static void test_the_check_mode_of_the_variant(void **state) {
    mt_context *ctx;
    (void)state;
    assert_int_equal(mt_context_create(NULL, NULL, &ctx), MT_SUCCESS);
    assert_int_equal(mt_check_mode(ctx), MT_TEST_CHECK_WANTED);
    mt_context_destroy(ctx);
}
#endif

static const struct CMUnitTest tests[] = {
#ifdef MT_TEST_CHECK_WANTED
    cmocka_unit_test(test_the_check_mode_of_the_variant),
#endif
    cmocka_unit_test(test_grid_ranks_are_megatrons),
    cmocka_unit_test(test_grid_ranks_of_one_stage_and_defaults),
    cmocka_unit_test(test_grids_on_their_ranks),
    cmocka_unit_test(test_grids_on_paper),
    cmocka_unit_test(test_grids_that_do_not_fit),
    cmocka_unit_test(test_grid_ranks_refuses),
    cmocka_unit_test(test_params_do_not_depend_on_the_split),
    cmocka_unit_test(test_initial_values_are_normal),
    cmocka_unit_test(test_seeds_give_different_models),
    cmocka_unit_test(test_params_add_refuses),
    cmocka_unit_test(test_automatic_names),
    cmocka_unit_test(test_automatic_names_after_errors),
    cmocka_unit_test(test_automatic_names_of_stages),
    cmocka_unit_test(test_copied_params_refuse),
    cmocka_unit_test(test_padded_params_refuse),
    cmocka_unit_test(test_params_refuse),
    cmocka_unit_test(test_reading_a_registry_that_is_not_there),
    cmocka_unit_test(test_linear_layers_on_every_split),
    cmocka_unit_test(test_linear_sums_of_many_products),
    cmocka_unit_test(test_column_layers_share_a_weight),
    cmocka_unit_test(test_norm_layer_on_every_split),
    cmocka_unit_test(test_norm_layer_refuses),
    cmocka_unit_test(test_shared_f_and_g_on_every_split),
    cmocka_unit_test(test_shared_f_and_g_refuse),
    cmocka_unit_test(test_activation_of_a_gathered_layer),
    cmocka_unit_test(test_activation_refuses),
    cmocka_unit_test(test_layer_and_activation_refuse),
    cmocka_unit_test(test_logging_an_activation_refuses),
    cmocka_unit_test(test_helpers_of_blocks),
    cmocka_unit_test(test_helpers_of_blocks_refuse),
    cmocka_unit_test(test_check_sent),
    cmocka_unit_test(test_tokens_and_rows),
    cmocka_unit_test(test_checks_of_blocks),
    cmocka_unit_test(test_embedding_on_every_split),
    cmocka_unit_test(test_cross_entropy_on_every_split),
    cmocka_unit_test(test_softmax_on_every_split),
    cmocka_unit_test(test_distillation),
    cmocka_unit_test(test_softmax_refuses),
    cmocka_unit_test(test_sync_gradients),
    cmocka_unit_test(test_grad_norm_counts_each_element_once),
    cmocka_unit_test(test_clip_coefficient),
    cmocka_unit_test(test_adamw),
    cmocka_unit_test(test_optimizer_refuses),
    cmocka_unit_test(test_step_refuses),
    cmocka_unit_test(test_cosine_schedule),
    cmocka_unit_test(test_linear_schedule),
    cmocka_unit_test(test_linear_create_refuses),
    cmocka_unit_test(test_linear_create_refuses_null),
    cmocka_unit_test(test_linear_create_refuses_weights),
    cmocka_unit_test(test_parts_by_shard),
    cmocka_unit_test(test_linear_calls_refuse),
    cmocka_unit_test(test_product_on_every_split),
    cmocka_unit_test(test_product_refuses),
    cmocka_unit_test(test_strided_views_are_refused_where_they_travel),
    cmocka_unit_test(test_trusted_ids),
    cmocka_unit_test(test_embedding_refuses),
    cmocka_unit_test(test_sizes_that_cannot_be),
    cmocka_unit_test(test_padded_vocabulary_refuses),
    cmocka_unit_test(test_ranks_that_pad_differently),
    cmocka_unit_test(test_cross_entropy_refuses),
    cmocka_unit_test(test_cross_entropy_forward_refuses),
    cmocka_unit_test(test_cross_entropy_backward_refuses),
    cmocka_unit_test(test_gradient_calls_refuse),
    cmocka_unit_test(test_memory_that_runs_out),
    cmocka_unit_test(test_options),
};

int main(void) { return cmocka_run_group_tests(tests, NULL, NULL); }
