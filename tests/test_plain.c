/* test_plain.c - tests what works without a registry: shards of matrices in host memory. They are compared with naive
   loops, and with the registry.
       cc -std=gnu17 -O2 -I. tests/test_plain.c -lpthread -lm */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test_ranks.h"

#include <limits.h>

/* ---- shards ------------------------------------------------------------------------------------------------------ */

static const mt_param_desc matrices[] = {
    {.rows = 5, .cols = 7},
    {.rows = 1, .cols = 9, .placement = MT_SPLIT_COLS},
    {.rows = 1, .cols = 24, .placement = MT_SPLIT_COLS, .parts = 3, .unit = 2},
    {.rows = 24, .cols = 5, .placement = MT_SPLIT_ROWS},
    {.rows = 13, .cols = 5, .placement = MT_SPLIT_ROWS},
    {.rows = 2, .cols = 3, .placement = MT_SPLIT_ROWS},
    {.rows = 22, .cols = 3, .placement = MT_SPLIT_ROWS, .parts = 2},
    {.rows = 36, .cols = 3, .placement = MT_SPLIT_ROWS, .unit = 4},
    {.rows = 60, .cols = 4, .placement = MT_SPLIT_ROWS, .parts = 2, .unit = 6},
    {.rows = 3, .cols = 16, .placement = MT_SPLIT_COLS},
    {.rows = 3, .cols = 19, .placement = MT_SPLIT_COLS},
    {.rows = 4, .cols = 60, .placement = MT_SPLIT_COLS, .parts = 2, .unit = 6},
};
#define MATRICES ((int)(sizeof matrices / sizeof *matrices))
#define ELEMENTS_MAX 512

static mt_shard shard_of(const mt_param_desc *d, int rank, int ranks, int invariant) {
    return (mt_shard){.rows = d->rows,
                      .cols = d->cols,
                      .placement = d->placement,
                      .parts = d->parts,
                      .unit = d->unit,
                      .tp_rank = rank,
                      .tp_size = ranks,
                      .invariant = invariant};
}

/* Returns the index in the whole matrix of element e of the rank's shard, or -1 for padding. This follows the comments
   of mt_param_desc and mt_param: each of the rank's virtual shards is contiguous. */
static int64_t whole_index(const mt_shard *s, int64_t e) {
    int64_t parts = s->parts ? s->parts : 1, unit = s->unit ? s->unit : 1;
    int ranks = s->invariant ? s->invariant : s->tp_size, shards = ranks / s->tp_size, shard;
    int64_t n = s->placement == MT_SPLIT_COLS ? s->cols : s->rows, each = test_local(n, parts, unit, ranks), row, col;
    if (s->placement == MT_REPLICATED) return e;
    if (s->placement == MT_SPLIT_ROWS) {
        shard = (int)(e / s->cols / each);
        row = test_global(n, parts, unit, ranks, s->tp_rank * shards + shard, e / s->cols % each);
        return row < 0 ? -1 : row * s->cols + e % s->cols;
    }
    shard = (int)(e / (s->rows * each));
    col = test_global(n, parts, unit, ranks, s->tp_rank * shards + shard, e % each);
    return col < 0 ? -1 : e / each % s->rows * s->cols + col;
}

/* Compares mt_shard_copy with a loop over elements of `size` bytes, in both directions. */
static void check_copy(const mt_shard *s, mt_dtype dtype, int64_t elements) {
    unsigned char whole[ELEMENTS_MAX * 4], back[ELEMENTS_MAX * 4], local[ELEMENTS_MAX * 4], want[ELEMENTS_MAX * 4];
    size_t size = mt_dtype_size(dtype), i;
    int64_t e;
    assert_true(elements * (int64_t)size < (int64_t)sizeof local && s->rows * s->cols < ELEMENTS_MAX);
    for (i = 0; i < sizeof whole; i++) whole[i] = (unsigned char)(1 + i * 7 % 251);
    memset(local, 0xee, sizeof local);
    memset(want, 0xee, sizeof want);
    for (e = 0; e < elements; e++)
        if (whole_index(s, e) < 0) memset(want + (size_t)e * size, 0, size);
        else memcpy(want + (size_t)e * size, whole + (size_t)whole_index(s, e) * size, size);
    assert_int_equal(mt_shard_copy(s, dtype, 0, whole, local), MT_SUCCESS);
    assert_memory_equal(local, want, sizeof local);
    memset(back, 0xdd, sizeof back);
    memset(want, 0xdd, sizeof want);
    for (e = 0; e < elements; e++) {
        if (whole_index(s, e) < 0) memset(local + (size_t)e * size, 0x55, size); /* must not go to the whole matrix */
        else memcpy(want + (size_t)whole_index(s, e) * size, whole + (size_t)whole_index(s, e) * size, size);
    }
    assert_int_equal(mt_shard_copy(s, dtype, 1, local, back), MT_SUCCESS);
    assert_memory_equal(back, want, sizeof back);
}

/* Compares one rank's shard of every matrix with the registry, whose ranks are on paper. */
static void check_registry(int ranks, int rank, int invariant) {
    mt_context_desc where = {.arena_bytes = (size_t)1 << 20, .invariant = invariant};
    float whole[ELEMENTS_MAX], mine[ELEMENTS_MAX], theirs[ELEMENTS_MAX];
    test_rank r;
    for (int i = 0; i < ELEMENTS_MAX; i++) whole[i] = (float)(i + 1);
    test_paper_rank(ranks, rank, (mt_grid_desc){.tp = ranks}, &where, &r);
    for (int i = 0; i < MATRICES; i++) {
        mt_shard s = shard_of(&matrices[i], rank, ranks, invariant);
        mt_param_desc d = matrices[i];
        mt_param *p = NULL;
        int64_t rows = -1, cols = -1;
        char name[] = {'m', (char)('a' + i), 0};
        d.name = name;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &d, &p));
        assert_int_equal(mt_shard_size(&s, &rows, &cols), MT_SUCCESS);
        assert_int_equal(rows, p->value.rows);
        assert_int_equal(cols, p->value.cols);
        memset(theirs, 0xff, sizeof theirs);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_param_scatter(r.ctx, p, whole, mt_tensor_f32(theirs, rows, cols)));
        assert_int_equal(mt_shard_copy(&s, MT_F32, 0, whole, mine), MT_SUCCESS);
        for (int64_t e = 0; e < rows * cols; e++)
            if (whole_index(&s, e) >= 0) assert_true(mine[e] == theirs[e]); /* scatter does not write the padding */
        check_copy(&s, MT_F32, rows * cols);
        check_copy(&s, MT_BF16, rows * cols);
    }
    test_paper_rank_close(&r);
}

static void test_shards_are_those_of_the_registry(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 9; ranks++)
        for (int rank = 0; rank < ranks; rank++) check_registry(ranks, rank, 0);
    for (int ranks = 1; ranks <= 8; ranks *= 2)
        for (int rank = 0; rank < ranks; rank++) check_registry(ranks, rank, 8);
}

/* mt_param_gather of the shards of mt_shard_copy is the whole matrix, and so is what mt_shard_copy collects. */
static mt_status gather_body(test_rank *r, int invariant) {
    float whole[ELEMENTS_MAX], local[ELEMENTS_MAX], all[8 * ELEMENTS_MAX], out[ELEMENTS_MAX];
    for (int i = 0; i < ELEMENTS_MAX; i++) whole[i] = (float)(i + 1);
    for (int i = 0; i < MATRICES; i++) {
        mt_shard s = shard_of(&matrices[i], r->grid.tp_rank, r->grid.tp_size, invariant);
        mt_param_desc d = matrices[i];
        size_t bytes = (size_t)(d.rows * d.cols) * sizeof *whole;
        mt_param *p;
        int64_t rows, cols;
        MT_TRY(test_rank_renew(r));
        d.name = "p";
        MT_TRY(mt_params_add(r->ctx, r->params, &d, &p));
        MT_TRY(mt_params_init(r->ctx, r->params, 1));
        CHECK(mt_shard_size(&s, &rows, &cols) == MT_SUCCESS);
        CHECK(mt_shard_copy(&s, MT_F32, 0, whole, local) == MT_SUCCESS);
        memset(out, 0xff, sizeof out);
        MT_TRY(mt_param_gather(r->ctx, r->params, p, mt_tensor_f32(local, rows, cols), out));
        CHECK(memcmp(out, whole, bytes) == 0);
        MT_TRY(mt_all_gather(r->ctx, r->grid.tp, local, all, (size_t)(rows * cols), MT_F32));
        memset(out, 0xff, sizeof out);
        for (s.tp_rank = 0; s.tp_rank < s.tp_size; s.tp_rank++)
            CHECK(mt_shard_copy(&s, MT_F32, 1, all + s.tp_rank * rows * cols, out) == MT_SUCCESS);
        CHECK(memcmp(out, whole, bytes) == 0);
    }
    return MT_SUCCESS;
}

static mt_status gather_rank(mt_comm *world, void *user) {
    mt_context_desc where = {.arena_bytes = (size_t)1 << 20, .invariant = *(const int *)user};
    mt_grid_desc all = {.tp = mt_comm_size(world)};
    test_rank r;
    mt_status status;
    MT_TRY(test_rank_open(world, all, &where, &r));
    status = gather_body(&r, where.invariant);
    test_rank_close(&r);
    return status;
}

static void test_shards_make_the_whole_matrix(void **state) {
    static const int ranks[] = {1, 2, 3, 8}, invariant[] = {0, 8};
    (void)state;
    for (int i = 0; i < 4; i++)
        for (int v = 0; v < 2; v++)
            if (!invariant[v] || ranks[i] != 3) test_launch(ranks[i], gather_rank, (void *)&invariant[v]);
}

static void test_shard_defaults(void **state) {
    mt_shard s = {.rows = 3, .cols = 4, .placement = MT_SPLIT_ROWS}; /* one rank, one part, units of one */
    int64_t rows = 0, cols = 0;
    (void)state;
    assert_int_equal(mt_shard_size(&s, &rows, &cols), MT_SUCCESS);
    assert_true(rows == 3 && cols == 4);
    s = (mt_shard){.rows = 50257, .cols = 768, .placement = MT_SPLIT_ROWS, .tp_rank = 7, .tp_size = 8};
    assert_int_equal(mt_shard_size(&s, &rows, &cols), MT_SUCCESS);
    assert_true(rows == 6283 && cols == 768); /* 50257 / 8, rounded up */
}

static void test_shards_refuse(void **state) {
    static const struct {
        mt_shard shard;
        mt_status status;
    } bad[] = {
        {{.rows = 0, .cols = 4}, MT_ERR_SHAPE},
        {{.rows = 4, .cols = -1}, MT_ERR_SHAPE},
        {{.rows = INT64_MAX / 2, .cols = 4}, MT_ERR_SHAPE},
        {{.rows = 4, .cols = 4, .placement = (mt_placement)3}, MT_ERR_ARGUMENT},
        {{.rows = 4, .cols = 4, .placement = (mt_placement)-1}, MT_ERR_ARGUMENT},
        {{.rows = 4, .cols = 4, .parts = 2}, MT_ERR_ARGUMENT},
        {{.rows = 4, .cols = 4, .unit = 2}, MT_ERR_ARGUMENT},
        {{.rows = 9, .cols = 4, .placement = MT_SPLIT_ROWS, .parts = 2}, MT_ERR_SHAPE},
        {{.rows = 4, .cols = 9, .placement = MT_SPLIT_COLS, .unit = 2}, MT_ERR_SHAPE},
        {{.rows = 4, .cols = 8, .placement = MT_SPLIT_COLS, .parts = -2}, MT_ERR_SHAPE},
        {{.rows = 4, .cols = 1 << 17, .placement = MT_SPLIT_COLS, .parts = 1 << 17}, MT_ERR_ARGUMENT},
        {{.rows = 4, .cols = 4, .placement = MT_SPLIT_ROWS, .tp_size = -1}, MT_ERR_ARGUMENT},
        {{.rows = 4, .cols = 4, .placement = MT_SPLIT_ROWS, .tp_rank = 1}, MT_ERR_ARGUMENT},
        {{.rows = 4, .cols = 4, .placement = MT_SPLIT_ROWS, .tp_rank = 2, .tp_size = 2}, MT_ERR_ARGUMENT},
        {{.rows = 4, .cols = 4, .placement = MT_SPLIT_ROWS, .tp_rank = -1, .tp_size = 2}, MT_ERR_ARGUMENT},
        {{.rows = 4, .cols = 4, .placement = MT_SPLIT_ROWS, .invariant = 3}, MT_ERR_ARGUMENT},
        {{.rows = 4, .cols = 4, .placement = MT_SPLIT_ROWS, .invariant = -8}, MT_ERR_ARGUMENT},
        {{.rows = 4, .cols = 4, .placement = MT_SPLIT_ROWS, .invariant = 2048}, MT_ERR_ARGUMENT},
        {{.rows = 4, .cols = 4, .placement = MT_SPLIT_ROWS, .tp_size = 4, .invariant = 2}, MT_ERR_SHAPE},
        {{.rows = 4, .cols = 4, .placement = MT_SPLIT_ROWS, .tp_size = 3, .invariant = 8}, MT_ERR_SHAPE},
    };
    const mt_shard good = {.rows = 4, .cols = 4, .placement = MT_SPLIT_ROWS, .tp_size = 2};
    float whole[16] = {0}, local[8], both[24];
    int64_t rows = -1, cols = -1;
    (void)state;
    for (int i = 0; i < 8; i++) local[i] = 7.0f;
    for (int i = 0; i < 24; i++) both[i] = 7.0f;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(mt_shard_size(&bad[i].shard, &rows, &cols), bad[i].status);
        assert_int_equal(mt_shard_copy(&bad[i].shard, MT_F32, 0, whole, local), bad[i].status);
    }
    assert_true(rows == -1 && cols == -1);
    assert_int_equal(mt_shard_size(NULL, &rows, &cols), MT_ERR_ARGUMENT);
    assert_int_equal(mt_shard_size(&good, NULL, &cols), MT_ERR_ARGUMENT);
    assert_int_equal(mt_shard_size(&good, &rows, NULL), MT_ERR_ARGUMENT);
    assert_int_equal(mt_shard_copy(NULL, MT_F32, 0, whole, local), MT_ERR_ARGUMENT);
    assert_int_equal(mt_shard_copy(&good, MT_F32, 0, NULL, local), MT_ERR_ARGUMENT);
    assert_int_equal(mt_shard_copy(&good, MT_F32, 0, whole, NULL), MT_ERR_ARGUMENT);
    assert_int_equal(mt_shard_copy(&good, (mt_dtype)99, 0, whole, local), MT_ERR_DTYPE);
    assert_int_equal(mt_shard_copy(&good, MT_F32, 0, both, both + 15), MT_ERR_ARGUMENT); /* whole, shard */
    assert_int_equal(mt_shard_copy(&good, MT_F32, 0, both + 7, both), MT_ERR_ARGUMENT);
    assert_int_equal(mt_shard_copy(&good, MT_F32, 1, both, both + 7), MT_ERR_ARGUMENT); /* shard, whole */
    assert_int_equal(mt_shard_copy(&good, MT_F32, 1, both + 15, both), MT_ERR_ARGUMENT);
    test_untouched("local", local, 8, 7.0f);
    test_untouched("both", both, 24, 7.0f);
    assert_int_equal(mt_shard_copy(&good, MT_F32, 0, both, both + 16), MT_SUCCESS);
    assert_int_equal(mt_shard_copy(&good, MT_F32, 1, both, both + 8), MT_SUCCESS);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shards_are_those_of_the_registry),
        cmocka_unit_test(test_shards_make_the_whole_matrix),
        cmocka_unit_test(test_shard_defaults),
        cmocka_unit_test(test_shards_refuse),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
