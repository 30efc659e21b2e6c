/* test_plain.c - tests what works without a registry: shards of matrices in host memory, and column- and row-parallel
   linear, MLP and attention on tensors of the caller. They are compared with loops, in double precision where they
   compute, and with the registry and its layers bit for bit.
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
        {{.rows = 4, .cols = 8, .placement = MT_SPLIT_COLS, .parts = -2}, MT_ERR_ARGUMENT},
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

/* ---- linear layers ----------------------------------------------------------------------------------------------- */

typedef struct linear_case {
    const char *name;
    int row; /* 1: row-parallel; 0: column-parallel */
    mt_linear_desc desc;
} linear_case;

#define TOKENS 24
static const linear_case linear_cases[] = {
    {"column", 0, {.in_features = 16, .out_features = 24}},
    {"column, uneven", 0, {.in_features = 15, .out_features = 19}},
    {"column, gathered", 0, {.in_features = 16, .out_features = 24, .gather_output = 1}},
    {"column, gathered, uneven", 0, {.in_features = 15, .out_features = 19, .gather_output = 1}},
    {"column, padded by the caller", 0, {.in_features = 16, .out_features = 19, .split.padded_out_features = 24}},
    {"column, padded by the caller, gathered",
     0,
     {.in_features = 16, .out_features = 19, .split.padded_out_features = 24, .gather_output = 1}},
    {"column, no bias", 0, {.in_features = 16, .out_features = 24, .no_bias = 1}},
    {"column, two parts", 0, {.in_features = 16, .out_features = 22, .parts = 2, .parts_by_shard = 1}},
    {"column, one rank has all features, gathered",
     0,
     {.in_features = 16, .out_features = 8, .unit = 8, .gather_output = 1}},
    {"column, units, gathered", 0, {.in_features = 16, .out_features = 20, .unit = 4, .gather_output = 1}},
    {"column, sequence-parallel", 0, {.in_features = 16, .out_features = 24, .sequence_parallel = 1}},
    {"column, sequence-parallel, gathered",
     0,
     {.in_features = 16, .out_features = 19, .gather_output = 1, .sequence_parallel = 1}},
    {"row", 1, {.in_features = 24, .out_features = 16, .input_is_parallel = 1}},
    {"row, uneven", 1, {.in_features = 19, .out_features = 15, .input_is_parallel = 1}},
    {"row, whole input", 1, {.in_features = 24, .out_features = 16}},
    {"row, whole input, one rank has all features", 1, {.in_features = 8, .out_features = 16, .unit = 8}},
    {"row, whole input, uneven", 1, {.in_features = 19, .out_features = 15}},
    {"row, no bias", 1, {.in_features = 24, .out_features = 16, .input_is_parallel = 1, .no_bias = 1}},
    {"row, sequence-parallel",
     1,
     {.in_features = 24, .out_features = 16, .input_is_parallel = 1, .sequence_parallel = 1}},
    {"row, sequence-parallel, whole input", 1, {.in_features = 19, .out_features = 16, .sequence_parallel = 1}},
};
#define LINEAR_CASES ((int)(sizeof linear_cases / sizeof *linear_cases))

/* A layer of a registry, or one of tensors. */
typedef struct linear_layer {
    mt_column_parallel_linear column;
    mt_row_parallel_linear row;
    mt_param params[2];
} linear_layer;

typedef struct linear_test {
    const linear_case *c;
    test_rank *r;
    mt_dtype dtype;
    mt_param *weight, *bias;
    linear_layer layer;
    mt_linear_tensors own;    /* copies of the layer's tensors */
    mt_tensor x, dy, y, dx;   /* y and dx: of the layer */
    mt_tensor dx_before, sum; /* sum = dx_before + dx */
} linear_test;

/* Returns a copy of t in memory of its own. */
static mt_tensor copy_of(test_rank *r, mt_tensor t) {
    int64_t bytes = t.rows * t.cols * (int64_t)mt_dtype_size(t.dtype);
    mt_tensor copy = mt_tensor_make(test_floats(r, (bytes + 3) / 4, 0.0f), t.dtype, t.rows, t.cols);
    if (t.data) memcpy(copy.data, t.data, (size_t)bytes);
    return t.data ? copy : t;
}

static mt_tensor noise_of(test_rank *r, mt_dtype dtype, int64_t rows, int64_t cols, uint64_t seed) {
    mt_tensor f = mt_tensor_f32(test_noise(r, rows * cols, seed, 0.5f), rows, cols), t = f;
    t.dtype = dtype;
    t = copy_of(r, t);
    if (mt_convert(r->ctx, f, t) != MT_SUCCESS) abort();
    return t;
}

static int same_bits(mt_tensor a, mt_tensor b) {
    return a.rows == b.rows && a.cols == b.cols && a.dtype == b.dtype &&
           memcmp(a.data, b.data, (size_t)(a.rows * a.cols) * mt_dtype_size(a.dtype)) == 0;
}

static mt_status layer_forward(linear_test *t, const linear_layer *l, mt_tensor y, mt_linear_saved *saved) {
    return t->c->row ? mt_parallel_linear_forward(t->r->ctx, &l->row, t->x, y, saved)
                     : mt_parallel_linear_forward(t->r->ctx, &l->column, t->x, y, saved);
}

static mt_status layer_backward(linear_test *t, const linear_layer *l, mt_tensor dx, const mt_linear_saved *saved) {
    return t->c->row ? mt_parallel_linear_backward(t->r->ctx, &l->row, t->dy, dx, saved)
                     : mt_parallel_linear_backward(t->r->ctx, &l->column, t->dy, dx, saved);
}

/* Makes a layer of the tensors in t->own. */
static mt_status own_layer(linear_test *t, const char *name, const mt_linear_desc *d, linear_layer *l) {
    test_rank *r = t->r;
    return t->c->row
               ? mt_row_parallel_linear_from_tensors(r->ctx, r->grid.tp, name, d, &t->own, l->params, &l->row)
               : mt_column_parallel_linear_from_tensors(r->ctx, r->grid.tp, name, d, &t->own, l->params, &l->column);
}

/* Creates the layer in a registry, and x and dy: the same on every rank where they are whole. */
static mt_status linear_open(linear_test *t) {
    const mt_linear_desc *d = &t->c->desc;
    test_rank *r = t->r;
    linear_layer *l = &t->layer;
    int ranks = r->grid.tp_size, me = r->grid.tp_rank;
    int64_t sp = TOKENS / (d->sequence_parallel ? ranks : 1), local;
    MT_TRY(test_rank_renew(r));
    MT_TRY(mt_params_set_dtype(r->ctx, r->params, t->dtype));
    if (t->c->row) MT_TRY(mt_row_parallel_linear_create(r->ctx, r->params, "layer", d, &l->row));
    else MT_TRY(mt_column_parallel_linear_create(r->ctx, r->params, "layer", d, &l->column));
    t->weight = t->c->row ? l->row.weight : l->column.weight;
    t->bias = t->c->row ? l->row.bias : l->column.bias;
    local = t->weight->local_features;
    MT_TRY(mt_params_init(r->ctx, r->params, 3));
    if (t->bias) MT_TRY(mt_param_scatter(r->ctx, t->bias, test_noise(r, d->out_features, 4, 1.0f), t->bias->value));
    if (t->c->row) {
        int split = d->input_is_parallel;
        t->x = noise_of(r, t->dtype, TOKENS, split ? local : d->in_features, split ? 10 + (uint64_t)me : 1);
        t->dy = noise_of(r, t->dtype, sp, d->out_features, d->sequence_parallel ? 30 + (uint64_t)me : 2);
    } else {
        int split = !d->gather_output;
        t->x = noise_of(r, t->dtype, sp, d->in_features, d->sequence_parallel ? 10 + (uint64_t)me : 1);
        t->dy = noise_of(r, t->dtype, TOKENS, split ? local : d->out_features, split ? 30 + (uint64_t)me : 2);
    }
    t->y = copy_of(r, t->dy);
    t->dx = copy_of(r, t->x);
    t->dx_before = noise_of(r, t->dtype, t->x.rows, t->x.cols, 50 + (uint64_t)me);
    t->sum = copy_of(r, t->x);
    return MT_SUCCESS;
}

/* Copies the parameters to memory without a registry. Their gradients start with 0.25, as those of the layer do. */
static mt_status linear_own(linear_test *t) {
    test_rank *r = t->r;
    MT_TRY(mt_fill(r->ctx, t->weight->grad, 0.25f));
    t->own.w = copy_of(r, t->weight->value);
    t->own.dw = copy_of(r, t->weight->grad);
    t->own.b = t->own.db = mt_none();
    if (!t->bias) return MT_SUCCESS;
    MT_TRY(mt_fill(r->ctx, t->bias->grad, 0.25f));
    t->own.b = copy_of(r, t->bias->value);
    t->own.db = copy_of(r, t->bias->grad);
    return MT_SUCCESS;
}

/* mt_shard_copy of the whole weight gives the same shard as the registry. */
static mt_status linear_shard(linear_test *t) {
    const mt_param_desc *d = &t->weight->desc;
    mt_shard s = shard_of(d, t->r->grid.tp_rank, t->r->grid.tp_size, mt_context_invariant(t->r->ctx));
    int64_t padded = mt_max(d->rows, d->padded_features);
    float *whole = test_floats(t->r, padded * d->cols, NAN);
    mt_tensor shard = copy_of(t->r, t->own.w);
    if (t->dtype != MT_F32) return MT_SUCCESS;
    for (int64_t i = d->rows * d->cols; i < padded * d->cols; i++) whole[i] = 0.0f;
    s.rows = padded;
    MT_TRY(mt_param_gather(t->r->ctx, t->r->params, t->weight, t->own.w, whole));
    CHECK(mt_shard_copy(&s, MT_F32, 0, whole, shard.data) == MT_SUCCESS);
    CHECK(same_bits(shard, t->own.w));
    return MT_SUCCESS;
}

static mt_status same_ledgers(const char *what, mt_ledger a, mt_ledger b) {
    for (int k = 0; k < MT_COLLECTIVE_COUNT; k++)
        if (a.calls[k] != b.calls[k] || a.bytes[k] != b.bytes[k]) {
            fprintf(stderr, "%s: %s: %d calls, the layer has %d\n", what, mt_collective_name((mt_collective)k),
                    (int)b.calls[k], (int)a.calls[k]);
            return MT_ERR_DATA;
        }
    return MT_SUCCESS;
}

/* Runs a layer of tensors with d: once, and with add_to_dx. The gradients of the caller get the layer's bits. */
static mt_status linear_plain(linear_test *t, mt_linear_desc d, const mt_ledger *forward, const mt_ledger *backward) {
    mt_tensor y = copy_of(t->r, t->dy), dx = copy_of(t->r, t->dx_before);
    size_t mark = mt_arena_mark(t->r->ctx);
    linear_layer l;
    mt_linear_saved saved;
    MT_TRY(linear_own(t));
    MT_TRY(own_layer(t, NULL, &d, &l));
    mt_comm_ledger_reset(t->r->grid.tp);
    MT_TRY(layer_forward(t, &l, y, &saved));
    MT_TRY(same_ledgers("forward", *forward, mt_comm_ledger(t->r->grid.tp)));
    CHECK(same_bits(y, t->y) && saved.x.data == t->x.data);
    mt_comm_ledger_reset(t->r->grid.tp);
    MT_TRY(layer_backward(t, &l, dx, &saved));
    MT_TRY(same_ledgers("backward", *backward, mt_comm_ledger(t->r->grid.tp)));
    CHECK(same_bits(dx, t->dx));
    l.row.desc.add_to_dx = l.column.desc.add_to_dx = 1;
    MT_TRY(mt_copy(t->r->ctx, t->dx_before, dx));
    mt_comm_ledger_reset(t->r->grid.tp);
    MT_TRY(layer_backward(t, &l, dx, &saved));
    MT_TRY(same_ledgers("backward, add_to_dx", *backward, mt_comm_ledger(t->r->grid.tp)));
    CHECK(same_bits(dx, t->sum));
    MT_TRY(layer_backward(t, &l, mt_none(), &saved));
    CHECK(mt_arena_mark(t->r->ctx) == mark);
    return MT_SUCCESS;
}

/* The layers of tensors, with and without a name. */
static mt_status linear_from_tensors(linear_test *t) {
    mt_linear_desc d = t->c->desc;
    mt_tensor y = copy_of(t->r, t->dy), dx = copy_of(t->r, t->dx_before);
    linear_layer l;
    mt_linear_saved saved;
    MT_TRY(linear_own(t));
    d.add_to_dx = 1;
    for (int pass = 0; pass < 3; pass++) {
        const char *name = pass ? "own" : NULL;
        MT_TRY(own_layer(t, name, &d, &l));
        CHECK(strcmp(l.params[0].name, pass ? "own.w" : "w") == 0 && l.params[0].value.data == t->own.w.data);
        CHECK(l.params[0].local_features == t->weight->local_features);
        MT_TRY(layer_forward(t, &l, y, &saved));
        CHECK(same_bits(y, t->y));
        MT_TRY(mt_copy(t->r->ctx, t->dx_before, dx));
        MT_TRY(layer_backward(t, &l, dx, &saved));
        CHECK(same_bits(dx, t->sum));
    }
    return MT_SUCCESS;
}

static mt_status linear_gradients_are(linear_test *t) {
    CHECK(same_bits(t->own.dw, t->weight->grad));
    CHECK(!t->bias || same_bits(t->own.db, t->bias->grad));
    return MT_SUCCESS;
}

/* A layer of a registry with add_to_dx: dx gets what mt_add would add. */
static mt_status linear_layer_adds(linear_test *t, const mt_linear_saved *saved) {
    linear_layer adds = t->layer;
    mt_tensor dx = copy_of(t->r, t->dx_before);
    adds.row.desc.add_to_dx = adds.column.desc.add_to_dx = 1;
    MT_TRY(mt_add(t->r->ctx, t->dx_before, t->dx, t->sum));
    MT_TRY(layer_backward(t, &adds, dx, saved));
    CHECK(same_bits(dx, t->sum));
    return layer_backward(t, &adds, mt_none(), saved);
}

static mt_status linear_check(linear_test *t) {
    mt_linear_desc d = t->c->desc;
    mt_ledger forward, backward;
    mt_linear_saved saved;
    MT_TRY(linear_open(t));
    MT_TRY(linear_own(t));
    MT_TRY(linear_shard(t));
    mt_comm_ledger_reset(t->r->grid.tp);
    MT_TRY(layer_forward(t, &t->layer, t->y, &saved));
    forward = mt_comm_ledger(t->r->grid.tp);
    mt_comm_ledger_reset(t->r->grid.tp);
    MT_TRY(layer_backward(t, &t->layer, t->dx, &saved));
    backward = mt_comm_ledger(t->r->grid.tp);
    MT_TRY(linear_layer_adds(t, &saved)); /* the third and last backward: those of the layers of tensors are as many */
    mt_tensor dw = copy_of(t->r, t->weight->grad), db = t->bias ? copy_of(t->r, t->bias->grad) : mt_none();
    for (int sizes = 0; sizes < 2; sizes++) { /* without sizes they are those of the tensors */
        if (sizes && (t->weight->local_features * t->r->grid.tp_size != (t->c->row ? d.in_features : d.out_features)))
            break;
        if (sizes) d.in_features = d.out_features = 0;
        MT_TRY(linear_plain(t, d, &forward, &backward));
        MT_TRY(mt_copy(t->r->ctx, dw, t->weight->grad)); /* linear_own fills the layer's */
        if (t->bias) MT_TRY(mt_copy(t->r->ctx, db, t->bias->grad));
        MT_TRY(linear_gradients_are(t));
    }
    MT_TRY(linear_from_tensors(t));
    MT_TRY(mt_copy(t->r->ctx, dw, t->weight->grad));
    if (t->bias) MT_TRY(mt_copy(t->r->ctx, db, t->bias->grad));
    return linear_gradients_are(t);
}

typedef struct linear_runs {
    mt_dtype dtype;
    int invariant, chunks;
} linear_runs;

static mt_status linear_rank(mt_comm *world, void *user) {
    const linear_runs *runs = (const linear_runs *)user;
    mt_context_desc where = {.arena_bytes = (size_t)16 << 20, .invariant = runs->invariant};
    mt_parallel_options options = {.overlap_chunks = runs->chunks};
    linear_test *t = (linear_test *)calloc(1, sizeof *t);
    test_rank r;
    mt_status status = test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, &where, &r);
    if (status == MT_SUCCESS) status = mt_parallel_set_options(r.ctx, &options);
    for (int i = 0; status == MT_SUCCESS && i < LINEAR_CASES; i++) {
        memset(t, 0, sizeof *t);
        t->c = &linear_cases[i];
        t->r = &r;
        t->dtype = runs->dtype;
        status = linear_check(t);
        if (status == MT_ERR_DATA)
            fprintf(stderr, "%s on %d ranks, %s, invariant %d, %d chunks\n", t->c->name, mt_comm_size(world),
                    mt_dtype_name(runs->dtype), runs->invariant, runs->chunks);
    }
    free(t);
    test_rank_close(&r);
    return status;
}

static void test_layers_of_tensors_are_the_layers(void **state) {
    static const linear_runs runs[] = {{MT_F32, 0, 0}, {MT_F32, 0, 3}, {MT_BF16, 0, 0},
                                       {MT_F16, 0, 3}, {MT_F32, 8, 0}, {MT_BF16, 8, 0}};
    (void)state;
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++)
        for (int ranks = 1; ranks <= 8; ranks *= 2) test_launch(ranks, linear_rank, (void *)&runs[i]);
}

/* ---- two linear layers against double precision ------------------------------------------------------------------ */

/* y = (x W1^T + b1) W2^T + b2 with a column- and a row-parallel linear. The weights are distributed and the gradients
   collected with mt_shard_copy. All numbers of a rank are in `two`. */
enum { T = 8, IN = 5, MID = 10, OUT = 7 };

typedef struct two_layers {
    double x[T * IN], w1[MID * IN], b1[MID], w2[OUT * MID], b2[OUT], dy[T * OUT];
    double y[T * OUT], dx[T * IN], dw1[MID * IN], db1[MID], dw2[OUT * MID], db2[OUT];
} two_layers;

static void two_noise(double *x, int n, uint64_t seed) {
    for (int i = 0; i < n; i++) x[i] = (double)test_float(&seed); /* exact in f32 */
}

static void two_reference(two_layers *l) {
    double h[T * MID], dh[T * MID];
    memset(l->y, 0, sizeof *l - offsetof(two_layers, y));
    for (int t = 0; t < T; t++) {
        for (int m = 0; m < MID; m++) {
            h[t * MID + m] = l->b1[m];
            for (int i = 0; i < IN; i++) h[t * MID + m] += l->x[t * IN + i] * l->w1[m * IN + i];
        }
        for (int o = 0; o < OUT; o++) {
            l->y[t * OUT + o] = l->b2[o];
            l->db2[o] += l->dy[t * OUT + o];
            for (int m = 0; m < MID; m++) {
                l->y[t * OUT + o] += h[t * MID + m] * l->w2[o * MID + m];
                l->dw2[o * MID + m] += l->dy[t * OUT + o] * h[t * MID + m];
            }
        }
        for (int m = 0; m < MID; m++) {
            dh[t * MID + m] = 0;
            for (int o = 0; o < OUT; o++) dh[t * MID + m] += l->dy[t * OUT + o] * l->w2[o * MID + m];
            l->db1[m] += dh[t * MID + m];
            for (int i = 0; i < IN; i++) {
                l->dw1[m * IN + i] += dh[t * MID + m] * l->x[t * IN + i];
                l->dx[t * IN + i] += dh[t * MID + m] * l->w1[m * IN + i];
            }
        }
    }
}

/* This rank's shard of n doubles, as floats. */
static mt_tensor two_shard(test_rank *r, mt_shard s, const double *whole) {
    float all[MID * OUT + MID * IN];
    mt_tensor t;
    int64_t rows = 0, cols = 0;
    s.tp_rank = r->grid.tp_rank;
    s.tp_size = r->grid.tp_size;
    for (int64_t i = 0; i < s.rows * s.cols; i++) all[i] = (float)whole[i];
    if (mt_shard_size(&s, &rows, &cols) != MT_SUCCESS) abort();
    t = test_tensor(r, rows, cols, NAN);
    if (mt_shard_copy(&s, MT_F32, 0, all, t.data) != MT_SUCCESS) abort();
    return t;
}

/* Compares the shards of all ranks with the whole matrix. */
static mt_status two_near(test_rank *r, const char *what, mt_shard s, mt_tensor shard, const double *want) {
    int64_t n = shard.rows * shard.cols;
    float *all = test_floats(r, n * r->grid.tp_size, NAN), *whole = test_floats(r, s.rows * s.cols, NAN);
    MT_TRY(mt_all_gather(r->ctx, r->grid.tp, shard.data, all, (size_t)n, MT_F32));
    s.tp_size = r->grid.tp_size;
    for (s.tp_rank = 0; s.tp_rank < s.tp_size; s.tp_rank++)
        CHECK(mt_shard_copy(&s, MT_F32, 1, all + s.tp_rank * n, whole) == MT_SUCCESS);
    return test_near(what, whole, want, s.rows * s.cols, 1e-5);
}

static mt_status two_body(test_rank *r, int sp) {
    const mt_shard s1 = {.rows = MID, .cols = IN, .placement = MT_SPLIT_ROWS};
    const mt_shard s2 = {.rows = OUT, .cols = MID, .placement = MT_SPLIT_COLS};
    const mt_shard v1 = {.rows = 1, .cols = MID, .placement = MT_SPLIT_COLS}, v2 = {.rows = 1, .cols = OUT};
    const mt_shard x_rows = {.rows = T, .cols = IN, .placement = sp ? MT_SPLIT_ROWS : MT_REPLICATED};
    const mt_shard y_rows = {.rows = T, .cols = OUT, .placement = sp ? MT_SPLIT_ROWS : MT_REPLICATED};
    mt_linear_desc d1 = {.in_features = IN, .out_features = MID, .sequence_parallel = sp, .add_to_dx = 1};
    mt_linear_desc d2 = {.in_features = MID, .out_features = OUT, .sequence_parallel = sp, .input_is_parallel = 1};
    two_layers l;
    mt_parallel_linear layer1, layer2;
    mt_param params[4];
    mt_linear_saved saved1, saved2;
    two_noise((double *)&l, T * IN + MID * IN + MID + OUT * MID + OUT + T * OUT, 5);
    two_reference(&l);
    mt_tensor x = two_shard(r, x_rows, l.x), dy = two_shard(r, y_rows, l.dy);
    mt_tensor w1 = two_shard(r, s1, l.w1), b1 = two_shard(r, v1, l.b1);
    mt_tensor w2 = two_shard(r, s2, l.w2), b2 = two_shard(r, v2, l.b2);
    const mt_linear_tensors t1 = {w1, b1, test_tensor(r, w1.rows, w1.cols, 0), test_tensor(r, 1, b1.cols, 0)};
    const mt_linear_tensors t2 = {w2, b2, test_tensor(r, w2.rows, w2.cols, 0), test_tensor(r, 1, OUT, 0)};
    mt_tensor h = test_tensor(r, T, w1.rows, NAN), dh = test_tensor(r, T, w1.rows, NAN);
    mt_tensor y = test_tensor(r, dy.rows, OUT, NAN), dx = test_tensor(r, x.rows, IN, 1.0f);
    MT_TRY(mt_column_parallel_linear_from_tensors(r->ctx, r->grid.tp, "1", &d1, &t1, params, &layer1));
    MT_TRY(mt_row_parallel_linear_from_tensors(r->ctx, r->grid.tp, "2", &d2, &t2, params + 2, &layer2));
    MT_TRY(mt_parallel_linear_forward(r->ctx, &layer1, x, h, &saved1));
    MT_TRY(mt_parallel_linear_forward(r->ctx, &layer2, h, y, &saved2));
    MT_TRY(mt_parallel_linear_backward(r->ctx, &layer2, dy, dh, &saved2));
    MT_TRY(mt_parallel_linear_backward(r->ctx, &layer1, dh, dx, &saved1));
    if (sp) MT_TRY(mt_all_reduce(r->ctx, r->grid.tp, t2.db.data, t2.db.data, OUT, MT_F32, MT_SUM));
    for (int i = 0; i < T * IN; i++) l.dx[i] += 1.0; /* what was in dx before */
    MT_TRY(two_near(r, "y", y_rows, y, l.y));
    MT_TRY(two_near(r, "dx", x_rows, dx, l.dx));
    MT_TRY(two_near(r, "dw1", s1, t1.dw, l.dw1));
    MT_TRY(two_near(r, "db1", v1, t1.db, l.db1));
    MT_TRY(two_near(r, "dw2", s2, t2.dw, l.dw2));
    return two_near(r, "db2", v2, t2.db, l.db2);
}

static mt_status two_rank(mt_comm *world, void *user) {
    test_rank r;
    mt_status status;
    MT_TRY(test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, NULL, &r));
    status = two_body(&r, *(const int *)user);
    test_rank_close(&r);
    return status;
}

static void test_layers_of_tensors_against_double_precision(void **state) {
    static const int sp[] = {0, 1};
    (void)state;
    for (int ranks = 1; ranks <= 8; ranks++)
        for (int i = 0; i < 2; i++)
            if (!sp[i] || T % ranks == 0) test_launch(ranks, two_rank, (void *)&sp[i]);
}

/* ---- MLP and attention ------------------------------------------------------------------------------------------- */

#define HIDDEN 48
#define SEQ 12

typedef struct block_case {
    const char *name;
    mt_mlp_desc mlp;
    mt_self_attention_desc attention;
} block_case;

static const block_case block_cases[] = {
    {"default", {.hidden = HIDDEN}, {.hidden = HIDDEN, .heads = 8}},
    {"SwiGLU; GQA, rotary, no biases",
     {.hidden = HIDDEN, .ffn = 40, .activation = MT_SWIGLU, .no_bias = 1},
     {.hidden = HIDDEN, .heads = 24, .kv_heads = 8, .scores.rotary_base = 10000.0f, .max_seq = 20, .no_bias = 1}},
    {"sequence-parallel, uneven",
     {.hidden = HIDDEN, .ffn = 36, .activation = MT_GELU_ERF, .sequence_parallel = 1},
     {.hidden = HIDDEN,
      .heads = 12,
      .sequence_parallel = 1,
      .scores.mask = MT_MASK_BIDIRECTIONAL,
      .dropout = 0.25f,
      .layer_number = 3}},
    {"concatenated QKV, two features turn as a pair",
     {.hidden = HIDDEN},
     {.hidden = HIDDEN,
      .heads = 8,
      .qkv_layout = MT_QKV_CONCATENATED,
      .scores.rotary_base = 10000.0f,
      .max_seq = 20,
      .scores.rotary_form = MT_ROTARY_PAIRS,
      .scores.rotary_dim = 2}},
    {"separate Q, K and V; GQA",
     {.hidden = HIDDEN},
     {.hidden = HIDDEN, .heads = 24, .kv_heads = 8, .qkv_layout = MT_QKV_SEPARATE}},
    {"the bias left to the caller; recomputed",
     {.hidden = HIDDEN, .skip_bias_add = 1},
     {.hidden = HIDDEN, .heads = 8, .skip_bias_add = 1, .recompute_core = 1}},
    {"ALiBi, window and soft cap",
     {.hidden = HIDDEN},
     {.hidden = HIDDEN, .heads = 12, .scores.alibi = 1, .scores.window = 5, .scores.softcap = 1.5f}},
};
#define BLOCK_CASES ((int)(sizeof block_cases / sizeof *block_cases))

typedef struct block_test {
    const block_case *c;
    test_rank *r;
    mt_mlp mlp;
    mt_self_attention attention;
    mt_mlp_tensors mlp_own;
    mt_self_attention_tensors attention_own;
    mt_tensor x, dy, before;
    mt_batch batch;
} block_test;

static mt_linear_tensors own_of(test_rank *r, const mt_param *w, const mt_param *b) {
    mt_linear_tensors t;
    t.w = copy_of(r, w->value);
    t.dw = copy_of(r, w->grad);
    t.b = b ? copy_of(r, b->value) : mt_none();
    t.db = b ? copy_of(r, b->grad) : mt_none();
    return t;
}

static mt_status gradients_are(const mt_linear_tensors *own, const mt_param *w, const mt_param *b) {
    CHECK(same_bits(own->dw, w->grad));
    CHECK(!b || same_bits(own->db, b->grad));
    return MT_SUCCESS;
}

static mt_status block_open(block_test *t) {
    test_rank *r = t->r;
    int sp = t->c->mlp.sequence_parallel;
    int64_t rows = 2 * SEQ / (sp ? r->grid.tp_size : 1);
    uint64_t me = sp ? (uint64_t)r->grid.tp_rank : 0;
    MT_TRY(mt_mlp_create(r->ctx, r->params, "mlp", &t->c->mlp, &t->mlp));
    MT_TRY(mt_self_attention_create(r->ctx, r->params, "attention", &t->c->attention, &t->attention));
    MT_TRY(mt_params_init(r->ctx, r->params, 3));
    for (int i = 0; i < mt_params_count(r->params); i++) {
        mt_param *p = mt_params_at(r->params, i); /* biases are 0 after mt_params_init */
        float *values = test_noise(r, p->desc.rows * p->desc.cols, 60 + (uint64_t)i, 0.5f);
        MT_TRY(mt_param_scatter(r->ctx, p, values, p->value));
        MT_TRY(mt_fill(r->ctx, p->grad, 0.25f));
    }
    t->mlp_own.fc1 = own_of(r, t->mlp.fc1.weight, t->mlp.fc1.bias);
    t->mlp_own.fc2 = own_of(r, t->mlp.fc2.weight, t->mlp.fc2.bias);
    if (t->c->attention.qkv_layout == MT_QKV_SEPARATE)
        for (int i = 0; i < 3; i++)
            t->attention_own.separate[i] = own_of(r, t->attention.separate[i].weight, t->attention.separate[i].bias);
    else t->attention_own.qkv = own_of(r, t->attention.qkv.weight, t->attention.qkv.bias);
    t->attention_own.proj = own_of(r, t->attention.proj.weight, t->attention.proj.bias);
    t->attention_own.rotary = copy_of(r, t->attention.rotary);
    t->attention_own.alibi_slopes = copy_of(r, t->attention.alibi_slopes);
    if (t->c->attention.scores.alibi && !t->attention_own.alibi_slopes.data) /* a rank without heads */
        t->attention_own.alibi_slopes = mt_tensor_f32(test_floats(r, 1, 0.0f), 1, 0);
    t->x = noise_of(r, mt_params_dtype(r->params), rows, HIDDEN, 1 + me);
    t->dy = noise_of(r, mt_params_dtype(r->params), rows, HIDDEN, 20 + me);
    t->before = noise_of(r, mt_params_dtype(r->params), rows, HIDDEN, 40 + me);
    t->batch = (mt_batch){.sequences = 2, .seq = SEQ, .seed = 7, .step = 5};
    return MT_SUCCESS;
}

/* The block of a registry, then that of tensors: the same output, input gradient and communication. With add_to_dx
   the gradient is added to `before`. */
static mt_status mlp_check(block_test *t, int add) {
    mt_mlp_desc d = t->c->mlp;
    mt_tensor y[2], dx[2];
    mt_ledger forward, backward;
    mt_mlp own;
    mt_param params[4];
    mt_mlp_saved saved;
    mt_comm *tp = t->r->grid.tp;
    for (int i = 0; i < 2; i++) y[i] = copy_of(t->r, t->x), dx[i] = copy_of(t->r, t->before);
    mt_comm_ledger_reset(tp);
    MT_TRY(mt_mlp_forward(t->r->ctx, &t->mlp, t->x, y[0], &saved));
    forward = mt_comm_ledger(tp);
    mt_comm_ledger_reset(tp);
    MT_TRY(mt_mlp_backward(t->r->ctx, &t->mlp, t->dy, dx[0], &saved));
    backward = mt_comm_ledger(tp);
    if (add) MT_TRY(mt_add(t->r->ctx, t->before, dx[0], dx[0]));
    d.add_to_dx = add;
    d.no_bias = 0; /* it follows from the tensors */
    mt_comm_ledger_reset(tp);
    MT_TRY(mt_mlp_from_tensors(t->r->ctx, tp, add ? "own" : NULL, &d, &t->mlp_own, params, &own));
    MT_TRY(mt_mlp_forward(t->r->ctx, &own, t->x, y[1], &saved));
    MT_TRY(same_ledgers("MLP forward", forward, mt_comm_ledger(tp)));
    mt_comm_ledger_reset(tp);
    MT_TRY(mt_mlp_backward(t->r->ctx, &own, t->dy, dx[1], &saved));
    MT_TRY(same_ledgers("MLP backward", backward, mt_comm_ledger(tp)));
    CHECK(same_bits(y[0], y[1]) && same_bits(dx[0], dx[1]));
    MT_TRY(mt_mlp_forward(t->r->ctx, &own, t->x, dx[1], NULL));
    CHECK(same_bits(y[0], dx[1]));
    MT_TRY(gradients_are(&t->mlp_own.fc1, t->mlp.fc1.weight, t->mlp.fc1.bias));
    return gradients_are(&t->mlp_own.fc2, t->mlp.fc2.weight, t->mlp.fc2.bias);
}

/* Attention with a cache: the block of a registry and that of tensors write the same keys, values and outputs. */
static mt_status cached_check(block_test *t, const mt_self_attention *own) {
    int64_t groups = mt_self_attention_cache_groups(own), rows = 2 * groups * SEQ, tokens = 2 * SEQ;
    mt_dtype dtype = t->attention.proj.weight->value.dtype;
    mt_tensor x = noise_of(t->r, dtype, tokens, HIDDEN, 70), out[2][3];
    CHECK(groups == mt_self_attention_cache_groups(&t->attention));
    for (int i = 0; i < 2; i++) {
        int32_t lengths[2] = {0, 0};
        mt_kv_cache cache = {.max_seq = SEQ, .lengths = lengths};
        for (int k = 0; k < 3; k++)
            out[i][k] = noise_of(t->r, dtype, k ? rows : tokens, k ? own->head_dim : HIDDEN, 80);
        cache.keys = groups ? out[i][1] : mt_none();
        cache.values = groups ? out[i][2] : mt_none();
        MT_TRY(mt_self_attention_cached_forward(t->r->ctx, i ? own : &t->attention, &t->batch, &cache, x, out[i][0]));
    }
    for (int k = 0; k < 3; k++) CHECK(same_bits(out[0][k], out[1][k]));
    return MT_SUCCESS;
}

static mt_status attention_check(block_test *t, int add) {
    mt_self_attention_desc d = t->c->attention;
    mt_tensor y[2], dx[2];
    mt_ledger forward, backward;
    mt_self_attention own;
    mt_param params[8];
    mt_self_attention_saved saved;
    mt_comm *tp = t->r->grid.tp;
    for (int i = 0; i < 2; i++) y[i] = copy_of(t->r, t->x), dx[i] = copy_of(t->r, t->before);
    mt_comm_ledger_reset(tp);
    MT_TRY(mt_self_attention_forward(t->r->ctx, &t->attention, &t->batch, t->x, y[0], &saved));
    forward = mt_comm_ledger(tp);
    mt_comm_ledger_reset(tp);
    MT_TRY(mt_self_attention_backward(t->r->ctx, &t->attention, t->dy, dx[0], &saved));
    backward = mt_comm_ledger(tp);
    if (add) MT_TRY(mt_add(t->r->ctx, t->before, dx[0], dx[0]));
    d.add_to_dx = add;
    d.no_bias = 0; /* it follows from the tensors */
    mt_comm_ledger_reset(tp);
    MT_TRY(mt_self_attention_from_tensors(t->r->ctx, tp, add ? "own" : NULL, &d, &t->attention_own, params, &own));
    MT_TRY(mt_self_attention_forward(t->r->ctx, &own, &t->batch, t->x, y[1], &saved));
    MT_TRY(same_ledgers("attention forward", forward, mt_comm_ledger(tp)));
    mt_comm_ledger_reset(tp);
    MT_TRY(mt_self_attention_backward(t->r->ctx, &own, t->dy, dx[1], &saved));
    MT_TRY(same_ledgers("attention backward", backward, mt_comm_ledger(tp)));
    CHECK(same_bits(y[0], y[1]) && same_bits(dx[0], dx[1]));
    MT_TRY(mt_self_attention_forward(t->r->ctx, &t->attention, &t->batch, t->x, y[0], NULL));
    MT_TRY(mt_self_attention_forward(t->r->ctx, &own, &t->batch, t->x, y[1], NULL));
    CHECK(same_bits(y[0], y[1]));
    if (d.scores.mask == MT_MASK_CAUSAL) MT_TRY(cached_check(t, &own));
    if (d.qkv_layout == MT_QKV_SEPARATE)
        for (int i = 0; i < 3; i++)
            MT_TRY(gradients_are(&t->attention_own.separate[i], t->attention.separate[i].weight,
                                 t->attention.separate[i].bias));
    else MT_TRY(gradients_are(&t->attention_own.qkv, t->attention.qkv.weight, t->attention.qkv.bias));
    return gradients_are(&t->attention_own.proj, t->attention.proj.weight, t->attention.proj.bias);
}

/* The blocks of a registry with add_to_dx. */
static mt_status blocks_add(block_test *t) {
    mt_mlp_saved mlp_saved;
    mt_self_attention_saved attention_saved;
    mt_tensor y = copy_of(t->r, t->x), dx = copy_of(t->r, t->x), sum = copy_of(t->r, t->before);
    MT_TRY(mt_mlp_forward(t->r->ctx, &t->mlp, t->x, y, &mlp_saved));
    MT_TRY(mt_mlp_backward(t->r->ctx, &t->mlp, t->dy, dx, &mlp_saved));
    MT_TRY(mt_add(t->r->ctx, sum, dx, sum));
    MT_TRY(mt_self_attention_forward(t->r->ctx, &t->attention, &t->batch, t->x, y, &attention_saved));
    MT_TRY(mt_self_attention_backward(t->r->ctx, &t->attention, t->dy, dx, &attention_saved));
    MT_TRY(mt_add(t->r->ctx, sum, dx, sum));
    t->mlp.fc1.desc.add_to_dx = t->attention.qkv.desc.add_to_dx = 1;
    for (int i = 0; i < 3; i++) t->attention.separate[i].desc.add_to_dx = 1;
    MT_TRY(mt_copy(t->r->ctx, t->before, dx));
    MT_TRY(mt_mlp_backward(t->r->ctx, &t->mlp, t->dy, dx, &mlp_saved));
    MT_TRY(mt_self_attention_backward(t->r->ctx, &t->attention, t->dy, dx, &attention_saved));
    CHECK(same_bits(dx, sum));
    return MT_SUCCESS;
}

static mt_status block_rank(mt_comm *world, void *user) {
    const linear_runs *runs = (const linear_runs *)user;
    mt_context_desc where = {.arena_bytes = (size_t)16 << 20, .invariant = runs->invariant};
    mt_parallel_options options = {.overlap_chunks = runs->chunks};
    block_test t;
    test_rank r;
    mt_status status = test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, &where, &r);
    if (status == MT_SUCCESS) status = mt_parallel_set_options(r.ctx, &options);
    for (int i = 0; status == MT_SUCCESS && i < BLOCK_CASES; i++) {
        memset(&t, 0, sizeof t);
        t.c = &block_cases[i];
        t.r = &r;
        status = test_rank_renew(&r);
        if (status == MT_SUCCESS) status = mt_params_set_dtype(r.ctx, r.params, runs->dtype);
        if (status == MT_SUCCESS) status = block_open(&t);
        for (int add = 0; status == MT_SUCCESS && add < 2; add++) {
            status = mlp_check(&t, add);
            if (status == MT_SUCCESS) status = attention_check(&t, add);
        }
        if (status == MT_SUCCESS) status = blocks_add(&t);
        mt_arena_release(r.ctx, 0);
        if (status == MT_ERR_DATA)
            fprintf(stderr, "%s on %d ranks, %s, invariant %d\n", t.c->name, mt_comm_size(world),
                    mt_dtype_name(runs->dtype), runs->invariant);
    }
    test_rank_close(&r);
    return status;
}

static void test_blocks_of_tensors_are_the_blocks(void **state) {
    static const linear_runs runs[] = {{MT_F32, 0, 0}, {MT_BF16, 0, 2}, {MT_F32, 8, 0}};
    (void)state;
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++)
        for (int ranks = 1; ranks <= 8; ranks *= 2) test_launch(ranks, block_rank, (void *)&runs[i]);
}

static void block_open_alone(block_test *t, test_rank *r) {
    memset(t, 0, sizeof *t);
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, r);
    t->c = &block_cases[0];
    t->r = r;
    ASSERT_STATUS(r->ctx, MT_SUCCESS, block_open(t));
}

static void test_mlp_of_tensors_refuses(void **state) {
    const mt_mlp_desc d = {.hidden = HIDDEN}, wide = {.hidden = HIDDEN, .ffn = 100}, none = {.hidden = 0};
    const mt_mlp_desc no_bias = {.hidden = HIDDEN, .no_bias = 1}, init = {.hidden = HIDDEN, .init.std = 1.0f};
    const mt_mlp_desc skip = {.hidden = HIDDEN, .skip_bias_add = 1};
    mt_mlp own, empty;
    mt_param params[4];
    mt_mlp_saved saved;
    block_test t;
    test_rank r;
    (void)state;
    block_open_alone(&t, &r);
    mt_tensor x = t.x, y = copy_of(&r, t.x), dx = copy_of(&r, t.before), bad = with_shape(x, x.rows, 8, HIDDEN);
    mt_context *c = r.ctx;
    mt_comm *tp = r.grid.tp;
    mt_mlp_tensors m = t.mlp_own;
    assert_int_equal(mt_mlp_from_tensors(NULL, tp, NULL, &d, &m, params, &own), MT_ERR_ARGUMENT);
#define MLP(status, words, ...) REFUSED(c, status, words, mt_mlp_from_tensors(c, __VA_ARGS__))
    MLP(MT_ERR_ARGUMENT, "mt_mlp_from_tensors: tp is NULL", NULL, NULL, &d, &m, params, &own);
    MLP(MT_ERR_ARGUMENT, "mt_mlp_from_tensors: desc is NULL", tp, NULL, NULL, &m, params, &own);
    MLP(MT_ERR_ARGUMENT, "mt_mlp_from_tensors: tensors is NULL", tp, NULL, &d, NULL, params, &own);
    MLP(MT_ERR_ARGUMENT, "mt_mlp_from_tensors: params is NULL", tp, NULL, &d, &m, NULL, &own);
    MLP(MT_ERR_ARGUMENT, "mt_mlp_from_tensors: out is NULL", tp, NULL, &d, &m, params, NULL);
    MLP(MT_ERR_ARGUMENT, "mt_mlp_from_tensors: 'mlp': hidden is 0", tp, NULL, &none, &m, params, &own);
    MLP(MT_ERR_ARGUMENT, "mt_mlp_from_tensors: 'own': hidden is 0", tp, "own", &none, &m, params, &own);
    MLP(MT_ERR_SHAPE, "fc1.w is [192, 48]|[100, 48]", tp, NULL, &wide, &m, params, &own);
    MLP(MT_ERR_SHAPE, "own.linear_fc1.w is [192, 48]|[100, 48]", tp, "own", &wide, &m, params, &own);
    MLP(MT_ERR_ARGUMENT, "no_bias", tp, NULL, &no_bias, &m, params, &own);
    MLP(MT_ERR_ARGUMENT, "init_std", tp, NULL, &init, &m, params, &own);
    m.fc2.w.dtype = m.fc2.b.dtype = MT_BF16;
    MLP(MT_ERR_DTYPE, "mt_mlp_from_tensors: 'fc1.w' is f32, 'fc2.w' is bf16", tp, NULL, &d, &m, params, &own);
    m = t.mlp_own;
    m.fc2.b = m.fc2.db = mt_none();
    MLP(MT_ERR_ARGUMENT, "skip_bias_add", tp, NULL, &skip, &m, params, &own);
    m = t.mlp_own;
    ASSERT_STATUS(c, MT_SUCCESS, mt_mlp_from_tensors(c, tp, NULL, &d, &m, params, &own));
    MLP(MT_ERR_ARGUMENT, "hidden is 0", tp, NULL, &none, &m, params, &own);
#undef MLP
    memset(&empty, 0, sizeof empty);
    assert_memory_equal(&own, &empty, sizeof own); /* after an error a call with it is refused */
    REFUSED(c, MT_ERR_ARGUMENT, "mt_mlp_forward", mt_mlp_forward(c, &own, x, y, NULL));
    ASSERT_STATUS(c, MT_SUCCESS, mt_mlp_from_tensors(c, tp, NULL, &d, &m, params, &own));
    REFUSED(c, MT_ERR_SHAPE, "mt_mlp_forward: x is [24, 8]", mt_mlp_forward(c, &own, bad, y, NULL));
    REFUSED(c, MT_ERR_ARGUMENT, "x [|y|overlap", mt_mlp_forward(c, &own, x, x, NULL));
    assert_true(same_bits(y, t.x));
    ASSERT_STATUS(c, MT_SUCCESS, mt_mlp_forward(c, &own, x, y, &saved));
    REFUSED(c, MT_ERR_ARGUMENT, "mt_mlp_backward: saved is NULL", mt_mlp_backward(c, &own, t.dy, dx, NULL));
    REFUSED(c, MT_ERR_ARGUMENT, "saved.fc1.x|overlap", mt_mlp_backward(c, &own, t.dy, x, &saved));
    m.fc2.db = m.fc1.dw = mt_none();
    ASSERT_STATUS(c, MT_SUCCESS, mt_mlp_from_tensors(c, tp, NULL, &d, &m, params, &own));
    REFUSED(c, MT_ERR_ARGUMENT, "mt_mlp_backward|gradient of 'fc1.w'", mt_mlp_backward(c, &own, t.dy, dx, &saved));
    m.fc1.dw = t.mlp_own.fc1.dw;
    ASSERT_STATUS(c, MT_SUCCESS, mt_mlp_from_tensors(c, tp, "own", &d, &m, params, &own));
    REFUSED(c, MT_ERR_ARGUMENT, "gradient of 'own.linear_fc2.b'", mt_mlp_backward(c, &own, t.dy, dx, &saved));
    m = t.mlp_own;
    m.fc1.db = mt_none(); /* the layer skips this bias, the block adds to its gradient */
    ASSERT_STATUS(c, MT_SUCCESS, mt_mlp_from_tensors(c, tp, NULL, &d, &m, params, &own));
    REFUSED(c, MT_ERR_ARGUMENT, "mt_mlp_backward: the gradient of 'fc1.b'", mt_mlp_backward(c, &own, t.dy, dx, &saved));
    assert_true(same_bits(dx, t.before));
    assert_true(same_bits(t.mlp_own.fc2.dw, t.mlp.fc2.weight->grad)); /* nothing was added */
    test_paper_rank_close(&r);
}

/* Nothing sums the gradients of keys and values that several ranks have. */
static void test_copies_of_tensors_refused(void **state) {
    const mt_self_attention_desc d = {.hidden = HIDDEN, .heads = 8, .kv_heads = 2};
    mt_self_attention_tensors s = {.rotary = {0}};
    mt_self_attention own;
    mt_param params[8];
    test_rank r;
    (void)state;
    test_paper_rank(4, 1, (mt_grid_desc){.tp = 4}, NULL, &r);
    REFUSED(r.ctx, MT_ERR_SHAPE, "mt_self_attention_from_tensors: 2 kv_heads|4 tensor ranks",
            mt_self_attention_from_tensors(r.ctx, r.grid.tp, NULL, &d, &s, params, &own));
    test_paper_rank_close(&r);
}

static void test_attention_of_tensors_refuses(void **state) {
    const mt_self_attention_desc d = {.hidden = HIDDEN, .heads = 8}, odd = {.hidden = HIDDEN, .heads = 7};
    const mt_self_attention_desc rotary = {.hidden = HIDDEN, .heads = 8, .scores.rotary_base = 1e4f, .max_seq = 20};
    const mt_self_attention_desc alibi = {.hidden = HIDDEN, .heads = 8, .scores.alibi = 1};
    mt_self_attention own, empty;
    mt_param params[8];
    mt_self_attention_saved saved;
    block_test t;
    test_rank r;
    (void)state;
    block_open_alone(&t, &r);
    mt_tensor x = t.x, y = copy_of(&r, t.x);
    mt_context *c = r.ctx;
    mt_comm *tp = r.grid.tp;
    mt_self_attention_tensors s = t.attention_own;
    assert_int_equal(mt_self_attention_from_tensors(NULL, tp, NULL, &d, &s, params, &own), MT_ERR_ARGUMENT);
#define ATTENTION(status, words, ...) REFUSED(c, status, words, mt_self_attention_from_tensors(c, __VA_ARGS__))
    ATTENTION(MT_ERR_ARGUMENT, "tp is NULL", NULL, NULL, &d, &s, params, &own);
    ATTENTION(MT_ERR_ARGUMENT, "mt_self_attention_from_tensors: desc is NULL", tp, NULL, NULL, &s, params, &own);
    ATTENTION(MT_ERR_ARGUMENT, "mt_self_attention_from_tensors: tensors is NULL", tp, NULL, &d, NULL, params, &own);
    ATTENTION(MT_ERR_ARGUMENT, "mt_self_attention_from_tensors: params is NULL", tp, NULL, &d, &s, NULL, &own);
    ATTENTION(MT_ERR_ARGUMENT, "mt_self_attention_from_tensors: out is NULL", tp, NULL, &d, &s, params, NULL);
    ATTENTION(MT_ERR_SHAPE, "mt_self_attention_from_tensors|hidden is 48|heads 7", tp, NULL, &odd, &s, params, &own);
    ATTENTION(MT_ERR_SHAPE, "rotary is [0, 0]|[20, 6]", tp, NULL, &rotary, &s, params, &own);
    s.rotary = x;
    ATTENTION(MT_ERR_ARGUMENT, "rotary table", tp, NULL, &d, &s, params, &own);
    s.rotary = mt_none();
    ATTENTION(MT_ERR_ARGUMENT, "alibi is 1, but alibi_slopes is mt_none()", tp, NULL, &alibi, &s, params, &own);
    s.alibi_slopes = x;
    ATTENTION(MT_ERR_SHAPE, "alibi_slopes is|must be [1, 8]", tp, NULL, &alibi, &s, params, &own);
    ATTENTION(MT_ERR_ARGUMENT, "there are alibi_slopes, but alibi is 0", tp, NULL, &d, &s, params, &own);
    s.alibi_slopes = mt_none();
    s.proj.w = with_shape(s.proj.w, HIDDEN, 8, 8);
    ATTENTION(MT_ERR_SHAPE, "proj.w is [48, 8]|[48, 48]", tp, NULL, &d, &s, params, &own);
    ATTENTION(MT_ERR_SHAPE, "own.linear_proj.w is [48, 8]|[48, 48]", tp, "own", &d, &s, params, &own);
    s = t.attention_own;
    s.qkv.w.dtype = s.qkv.b.dtype = MT_BF16;
    ATTENTION(MT_ERR_DTYPE, "mt_self_attention_from_tensors|bf16|f32", tp, NULL, &d, &s, params, &own);
#undef ATTENTION
    memset(&empty, 0, sizeof empty);
    assert_memory_equal(&own, &empty, sizeof own); /* after an error a call with it is refused */
    REFUSED(c, MT_ERR_ARGUMENT, "mt_self_attention_forward",
            mt_self_attention_forward(c, &own, &t.batch, x, y, &saved));
    test_paper_rank_close(&r);
}

static void test_calls_of_attention_of_tensors_refuse(void **state) {
    const mt_self_attention_desc d = {.hidden = HIDDEN, .heads = 8};
    mt_self_attention own;
    mt_param params[8];
    mt_self_attention_saved saved;
    block_test t;
    test_rank r;
    (void)state;
    block_open_alone(&t, &r);
    mt_tensor x = t.x, y = copy_of(&r, t.x), dx = copy_of(&r, t.before), bad = with_shape(x, x.rows, 8, HIDDEN);
    mt_context *c = r.ctx;
    mt_comm *tp = r.grid.tp;
    mt_self_attention_tensors s = t.attention_own;
    ASSERT_STATUS(c, MT_SUCCESS, mt_self_attention_from_tensors(c, tp, NULL, &d, &s, params, &own));
    REFUSED(c, MT_ERR_ARGUMENT, "batch is NULL", mt_self_attention_forward(c, &own, NULL, x, y, NULL));
    REFUSED(c, MT_ERR_SHAPE, "mt_self_attention_forward: x is [24, 8]",
            mt_self_attention_forward(c, &own, &t.batch, bad, y, NULL));
    assert_true(same_bits(y, t.x));
    ASSERT_STATUS(c, MT_SUCCESS, mt_self_attention_forward(c, &own, &t.batch, x, y, &saved));
#define ATTENTION(status, words, ...) REFUSED(c, status, words, mt_self_attention_backward(c, &own, t.dy, __VA_ARGS__))
    ATTENTION(MT_ERR_ARGUMENT, "mt_self_attention_backward: saved is NULL", dx, NULL);
    ATTENTION(MT_ERR_ARGUMENT, "saved.qkv_in.x|overlap", x, &saved);
    saved.qkv.cols--;
    ATTENTION(MT_ERR_SHAPE, "saved.qkv is [24, 143]|[24, 144]", dx, &saved);
    saved.qkv.cols++;
    saved.out.rows--;
    ATTENTION(MT_ERR_SHAPE, "saved.out is [23, 48]|[24, 48]", dx, &saved);
    saved.out.rows++;
    s.qkv.db = mt_none();
    ASSERT_STATUS(c, MT_SUCCESS, mt_self_attention_from_tensors(c, tp, NULL, &d, &s, params, &own));
    ATTENTION(MT_ERR_ARGUMENT, "mt_self_attention_backward|gradient of 'qkv.b'", dx, &saved);
    s.proj.dw = mt_none();
    s.qkv.db = t.attention_own.qkv.db;
    ASSERT_STATUS(c, MT_SUCCESS, mt_self_attention_from_tensors(c, tp, NULL, &d, &s, params, &own));
    ATTENTION(MT_ERR_ARGUMENT, "gradient of 'proj.w'", dx, &saved);
#undef ATTENTION
    assert_true(same_bits(dx, t.before));
    assert_true(same_bits(t.attention_own.proj.dw, t.attention.proj.weight->grad)); /* nothing was added */
    test_paper_rank_close(&r);
}

/* ---- refusals ---------------------------------------------------------------------------------------------------- */

/* A call of a layer of tensors. own_try creates the layer, and calls its forward, or with `saved` its backward. */
typedef struct own_call {
    test_rank *r;
    int row;
    mt_linear_tensors t;
    mt_tensor x, y, dx;
} own_call;

static mt_status own_try(const own_call *o, const mt_linear_desc *d, const mt_linear_saved *saved) {
    mt_context *c = o->r->ctx;
    mt_parallel_linear layer;
    mt_param params[2];
    if (o->row) MT_TRY(mt_row_parallel_linear_from_tensors(c, o->r->grid.tp, NULL, d, &o->t, params, &layer));
    else MT_TRY(mt_column_parallel_linear_from_tensors(c, o->r->grid.tp, NULL, d, &o->t, params, &layer));
    if (!saved) return mt_parallel_linear_forward(c, &layer, o->x, o->y, NULL);
    return mt_parallel_linear_backward(c, &layer, o->y, o->dx, saved);
}

static void test_row_layers_of_tensors_refuse(void **state) {
    const mt_linear_desc padded = {.split.padded_out_features = 6},
                         copies = {.unit = 2, .split.copies = 2, .split.copied = 2},
                         add = {.input_is_parallel = 1, .add_to_dx = 1}, gather = {.gather_output = 1},
                         split = {.input_is_parallel = 1};
    mt_linear_saved saved;
    own_call o = {.row = 1};
    test_rank r;
    (void)state;
    test_paper_rank(2, 1, (mt_grid_desc){.tp = 2}, NULL, &r);
    mt_tensor x = test_tensor(&r, 4, 5, 1.0f), y = test_tensor(&r, 4, 5, 7.0f), dw = test_tensor(&r, 5, 5, 7.0f);
    o.r = &r;
    o.x = o.dx = x;
    o.y = y;
    o.t = (mt_linear_tensors){test_tensor(&r, 5, 5, 1.0f), mt_none(), dw, mt_none()};
    saved.x = x;
#define OWN(status, words, ...) REFUSED(r.ctx, status, words, own_try(&o, __VA_ARGS__))
    OWN(MT_ERR_ARGUMENT, "mt_row_parallel_linear_from_tensors|padded_out_features", &padded, NULL);
    OWN(MT_ERR_ARGUMENT, "mt_row_parallel_linear_from_tensors|sets split.copies", &copies, NULL);
    OWN(MT_ERR_ARGUMENT, "mt_row_parallel_linear_from_tensors|gather_output", &gather, NULL);
    OWN(MT_ERR_SHAPE, "mt_parallel_linear_forward: x is [4, 5]|[4, 10]", NULL, NULL);
    o.dx = y;
    OWN(MT_ERR_ARGUMENT, "mt_parallel_linear_backward|dx|dy|overlap", &add, &saved);
    o.dx = test_tensor(&r, 4, 5, 7.0f);
    o.t.dw = mt_none();
    OWN(MT_ERR_ARGUMENT, "mt_parallel_linear_backward|gradient of 'w'", &split, &saved);
    o.y = with_shape(y, 4, 4, 4);
    OWN(MT_ERR_SHAPE, "mt_parallel_linear_forward: y is [4, 4]|[4, 5]", &split, NULL);
#undef OWN
    test_untouched("y", y.data, 4 * 5, 7.0f);
    test_untouched("dw", dw.data, 5 * 5, 7.0f);
    test_paper_rank_close(&r);
}

static void test_column_layers_of_tensors_refuse(void **state) {
    const mt_linear_desc sp = {.sequence_parallel = 1}, gather = {.gather_output = 1}, split = {.input_is_parallel = 1};
    const mt_linear_desc sizes = {.in_features = 8, .out_features = 12}, no_bias = {.no_bias = 1};
    const mt_linear_desc std = {.init_std = 1.0f}, parts = {.parts = 2}, shared = {.weight = (mt_param *)8};
    mt_linear_saved saved = {{0}};
    own_call o = {.row = 0}, good;
    test_rank r;
    (void)state;
    test_paper_rank(2, 1, (mt_grid_desc){.tp = 2}, NULL, &r);
    mt_tensor x = test_tensor(&r, 4, 8, 1.0f), w = test_tensor(&r, 5, 8, 1.0f), b = test_tensor(&r, 1, 5, 1.0f);
    mt_tensor y = test_tensor(&r, 4, 5, 7.0f), dw = test_tensor(&r, 5, 8, 7.0f), db = test_tensor(&r, 1, 5, 7.0f);
    mt_tensor dx = test_tensor(&r, 4, 8, 7.0f), none = mt_none(), half = b;
    half.dtype = MT_BF16;
    good = o = (own_call){&r, 0, {w, b, dw, db}, x, y, dx};
#define OWN(status, words, change, ...)                                                                                \
    do {                                                                                                               \
        o = good;                                                                                                      \
        change;                                                                                                        \
        REFUSED(r.ctx, status, words, own_try(&o, __VA_ARGS__));                                                       \
    } while (0)
    OWN(MT_ERR_ARGUMENT, "mt_column_parallel_linear_from_tensors: w is NULL", o.t.w = none, NULL, NULL);
    OWN(MT_ERR_SHAPE, "mt_parallel_linear_forward: x is [4, 7]|[4, 8]", o.x = with_shape(x, 4, 7, 8), NULL, NULL);
    OWN(MT_ERR_SHAPE, "y is [4, 4]|[4, 5]", o.y = with_shape(y, 4, 4, 5), NULL, NULL);
    OWN(MT_ERR_SHAPE, "y is [4, 5]|[4, 10]", (void)0, &gather, NULL);
    OWN(MT_ERR_SHAPE, "y is [4, 5]|[8, 5]", (void)0, &sp, NULL);
    OWN(MT_ERR_SHAPE, "b is [1, 4]|[1, 5]", o.t.b = with_shape(b, 1, 4, 4), NULL, NULL);
    OWN(MT_ERR_SHAPE, "w is [5, 8]|[6, 8]", (void)0, &sizes, NULL);
    OWN(MT_ERR_SHAPE, "w [5, 7]|ld 8|contiguous", o.t.w = with_shape(w, 5, 7, 8), NULL, NULL);
    OWN(MT_ERR_SHAPE, "10 features|2 parts", (void)0, &(mt_linear_desc){.parts = 2, .unit = 3}, NULL);
    OWN(MT_ERR_ARGUMENT, "out_features is -1", o.t.w = with_shape(w, -5, 8, 8), NULL, NULL);
    OWN(MT_ERR_DTYPE, "'b' is bf16|'w' is f32", o.t.b = half, NULL, NULL);
    OWN(MT_ERR_ARGUMENT, "input_is_parallel", (void)0, &split, NULL);
    OWN(MT_ERR_ARGUMENT, "no_bias", (void)0, &no_bias, NULL);
    OWN(MT_ERR_ARGUMENT, "skip_bias_add", o.t.b = o.t.db = none, &(mt_linear_desc){.skip_bias_add = 1}, NULL);
    OWN(MT_ERR_ARGUMENT, "init_std", (void)0, &std, NULL);
    OWN(MT_ERR_ARGUMENT, "weight", (void)0, &shared, NULL);
    OWN(MT_ERR_SHAPE, "mt_parallel_linear_backward: saved.x is [0, 0]", (void)0, NULL, &saved);
    saved.x = x;
    OWN(MT_ERR_ARGUMENT, "gradient of 'w'", o.t.dw = none, NULL, &saved);
    OWN(MT_ERR_ARGUMENT, "gradient of 'b'", o.t.db = none, NULL, &saved);
    OWN(MT_ERR_SHAPE, "dw is [5, 7]|[5, 8]", o.t.dw = with_shape(dw, 5, 7, 7), NULL, &saved);
    OWN(MT_ERR_SHAPE, "db is [1, 4]|[1, 5]", o.t.db = with_shape(db, 1, 4, 4), NULL, &saved);
    OWN(MT_ERR_DTYPE, "db is bf16", o.t.db = half, NULL, &saved);
    OWN(MT_ERR_SHAPE, "dx is [4, 7]|[4, 8]", o.dx = with_shape(dx, 4, 7, 7), NULL, &saved);
    OWN(MT_ERR_ARGUMENT, "dx [|saved.x|overlap", o.dx = x, &(mt_linear_desc){.add_to_dx = 1}, &saved);
#undef OWN
    test_untouched("y", y.data, 4 * 5, 7.0f);
    test_untouched("dx", dx.data, 4 * 8, 7.0f);
    test_untouched("dw", dw.data, 5 * 8, 7.0f);
    test_paper_rank_close(&r);
    test_paper_rank(2, 1, (mt_grid_desc){.tp = 2}, &(mt_context_desc){.invariant = 4}, &r);
    o.t = (mt_linear_tensors){test_tensor(&r, 6, 8, 1.0f), none, none, none};
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'w' has 2 parts", own_try(&o, &parts, NULL));
    test_paper_rank_close(&r);
}

static void test_layers_of_tensors_refuse(void **state) {
    char name[MT_NAME_MAX + 1];
    mt_linear_tensors t;
    linear_layer l;
    test_rank r;
    (void)state;
    memset(name, 'n', MT_NAME_MAX);
    name[MT_NAME_MAX] = 0;
    test_paper_rank(2, 1, (mt_grid_desc){.tp = 2}, NULL, &r);
    mt_context *c = r.ctx;
    mt_comm *tp = r.grid.tp;
    t.w = test_tensor(&r, 5, 8, 1.0f);
    t.b = test_tensor(&r, 1, 5, 1.0f);
    t.dw = t.db = mt_none();
    assert_int_equal(mt_column_parallel_linear_from_tensors(NULL, tp, NULL, NULL, &t, l.params, &l.column),
                     MT_ERR_ARGUMENT);
    assert_int_equal(mt_row_parallel_linear_from_tensors(NULL, tp, NULL, NULL, &t, l.params, &l.row), MT_ERR_ARGUMENT);
#define FROM(status, words, ...) REFUSED(c, status, words, mt_column_parallel_linear_from_tensors(c, __VA_ARGS__))
    FROM(MT_ERR_ARGUMENT, "tensors is NULL", tp, "l", NULL, NULL, l.params, &l.column);
    FROM(MT_ERR_ARGUMENT, "params is NULL", tp, "l", NULL, &t, NULL, &l.column);
    FROM(MT_ERR_ARGUMENT, "out is NULL", tp, "l", NULL, &t, l.params, NULL);
    FROM(MT_ERR_ARGUMENT, "tp is NULL", NULL, "l", NULL, &t, l.params, &l.column);
    FROM(MT_ERR_ARGUMENT, "nnn|93", tp, name, NULL, &t, l.params, &l.column);
    FROM(MT_ERR_SHAPE, "l.w is [5, 8]|[2, 8]", tp, "l", &(mt_linear_desc){.out_features = 3}, &t, l.params, &l.column);
#undef FROM
    REFUSED(
        c, MT_ERR_SHAPE, "l.w is [5, 8]|[3, 8]",
        mt_row_parallel_linear_from_tensors(c, tp, "l", &(mt_linear_desc){.out_features = 3}, &t, l.params, &l.row));
    name[MT_NAME_MAX - 3] = 0;
    ASSERT_STATUS(c, MT_SUCCESS, mt_column_parallel_linear_from_tensors(c, tp, name, NULL, &t, l.params, &l.column));
    assert_true(l.column.desc.in_features == 8 && l.column.desc.out_features == 10 && l.column.local_features == 5);
    t.db = t.b;
    t.b = mt_none();
    REFUSED(c, MT_ERR_ARGUMENT, "db comes without b",
            mt_column_parallel_linear_from_tensors(c, tp, "l", NULL, &t, l.params, &l.column));
    test_paper_rank_close(&r);
}

/* ---- hostile sizes, hash log ------------------------------------------------------------------------------------- */

static const int64_t hostile[] = {INT64_MIN, -1, 0, 1, (int64_t)1 << 31, (int64_t)1 << 62, INT64_MAX};
#define HOSTILE (sizeof hostile / sizeof *hostile)

static int64_t hostile_of(size_t *code) {
    int64_t value = hostile[*code % HOSTILE];
    *code /= HOSTILE;
    return value;
}

/* A sanitizer finds an overflow. Sizes that are accepted are those of the registry. */
static void test_shards_of_hostile_sizes(void **state) {
    (void)state;
    for (size_t i = 0; i < HOSTILE * HOSTILE * HOSTILE * HOSTILE * 3; i++) {
        size_t code = i;
        mt_shard s = {0};
        int64_t rows = -1, cols = -1;
        s.placement = (mt_placement)(code % 3);
        code /= 3;
        s.rows = hostile_of(&code);
        s.cols = hostile_of(&code);
        s.parts = hostile_of(&code);
        s.unit = hostile_of(&code);
        s.tp_size = 2;
        if (mt_shard_size(&s, &rows, &cols) == MT_SUCCESS) assert_true(rows > 0 && cols > 0);
        else assert_true(rows == -1 && cols == -1);
        s.parts = s.unit = 0;
        s.tp_size = INT_MAX;
        s.tp_rank = INT_MAX - 1;
        if (mt_shard_size(&s, &rows, &cols) == MT_SUCCESS) assert_true(rows > 0 && cols > 0);
    }
}

static void test_layers_of_tensors_with_hostile_sizes(void **state) {
    test_rank r;
    (void)state;
    test_paper_rank(2, 1, (mt_grid_desc){.tp = 2}, NULL, &r);
    mt_tensor t = test_tensor(&r, 2, 4, 7.0f), none = mt_none();
    int layers = 0;
    for (size_t i = 0; i < HOSTILE * HOSTILE * HOSTILE * HOSTILE; i++) {
        size_t code = i;
        mt_linear_desc d = {0};
        mt_linear_tensors own = {none, none, none, none};
        d.in_features = hostile_of(&code);
        d.out_features = hostile_of(&code);
        own.w = with_shape(t, hostile_of(&code), hostile_of(&code), 0);
        own.w.ld = own.w.cols;
        own.dw = own.w;
        for (int row = 0; row < 2; row++) {
            mt_parallel_linear layer;
            mt_linear_saved saved = {t};
            mt_param params[2];
            mt_status made =
                row ? mt_row_parallel_linear_from_tensors(r.ctx, r.grid.tp, NULL, &d, &own, params, &layer)
                    : mt_column_parallel_linear_from_tensors(r.ctx, r.grid.tp, NULL, &d, &own, params, &layer);
            layers += made == MT_SUCCESS;
            if (made != MT_SUCCESS) continue;
            assert_int_not_equal(mt_parallel_linear_forward(r.ctx, &layer, t, t, NULL), MT_SUCCESS);
            assert_int_not_equal(mt_parallel_linear_backward(r.ctx, &layer, t, t, &saved), MT_SUCCESS);
        }
    }
    assert_true(layers > 0);
    test_untouched("t", t.data, 8, 7.0f);
    test_paper_rank_close(&r);
}

typedef struct log_lines {
    int count;
    char first[MT_NAME_MAX + 32];
} log_lines;

static void log_line(void *user, const char *name, uint64_t hash, int differs) {
    log_lines *lines = (log_lines *)user;
    (void)hash;
    (void)differs;
    if (lines->count++ == 0) snprintf(lines->first, sizeof lines->first, "%s", name);
}

/* A layer of tensors with a name writes to the hash log, one without does not. */
static void test_hash_log_of_tensors(void **state) {
    mt_linear_tensors w;
    mt_column_parallel_linear layer;
    mt_linear_saved saved;
    mt_param params[2];
    mt_hash_log *log = NULL;
    log_lines lines = {0};
    test_rank r;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){0}, NULL, &r);
    mt_tensor x = test_tensor(&r, 4, 8, 1.0f), y = test_tensor(&r, 4, 6, 1.0f);
    w.w = test_tensor(&r, 6, 8, 1.0f);
    w.b = w.dw = w.db = mt_none();
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_hash_log_create(r.ctx, &r.grid, &log));
    for (int named = 0; named < 2; named++) {
        const char *name = named ? "own" : NULL;
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_column_parallel_linear_from_tensors(r.ctx, r.grid.tp, name, NULL, &w, params, &layer));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_parallel_linear_forward(r.ctx, &layer, x, y, &saved));
    }
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_hash_log_flush(r.ctx, log, log_line, &lines));
    assert_int_equal(lines.count, 1);
    assert_string_equal(lines.first, "own.output");
    mt_hash_log_destroy(log);
    test_paper_rank_close(&r);
}

/* Counts the lines, and those of a block with the name "own". */
typedef struct block_lines {
    int all, own;
} block_lines;

static void block_line(void *user, const char *name, uint64_t hash, int differs) {
    block_lines *lines = (block_lines *)user;
    (void)hash;
    (void)differs;
    lines->all++;
    lines->own += !strncmp(name, "own.", 4);
}

/* A block of tensors with a name writes what that of a registry writes, one without writes nothing. */
static void test_hash_log_of_blocks_of_tensors(void **state) {
    mt_mlp mlp;
    mt_self_attention attention;
    mt_param params[4];
    mt_mlp_saved saved;
    mt_self_attention_saved attention_saved;
    block_lines lines[3];
    block_test t;
    test_rank r;
    (void)state;
    memset(lines, 0, sizeof lines);
    block_open_alone(&t, &r);
    mt_context *c = r.ctx;
    mt_tensor y = copy_of(&r, t.x), dx = copy_of(&r, t.x);
    for (int kind = 0; kind < 3; kind++) { /* without a name, with one, of a registry */
        const char *name = kind == 1 ? "own" : NULL;
        mt_hash_log *log = NULL;
        ASSERT_STATUS(c, MT_SUCCESS, mt_hash_log_create(c, &r.grid, &log));
        ASSERT_STATUS(c, MT_SUCCESS, mt_mlp_from_tensors(c, r.grid.tp, name, &t.c->mlp, &t.mlp_own, params, &mlp));
        if (kind == 2) mlp = t.mlp;
        ASSERT_STATUS(c, MT_SUCCESS, mt_mlp_forward(c, &mlp, t.x, y, &saved));
        ASSERT_STATUS(c, MT_SUCCESS, mt_mlp_backward(c, &mlp, t.dy, dx, &saved));
        ASSERT_STATUS(
            c, MT_SUCCESS,
            mt_self_attention_from_tensors(c, r.grid.tp, name, &t.c->attention, &t.attention_own, params, &attention));
        if (kind == 2) attention = t.attention;
        ASSERT_STATUS(c, MT_SUCCESS, mt_self_attention_forward(c, &attention, &t.batch, t.x, y, &attention_saved));
        ASSERT_STATUS(c, MT_SUCCESS, mt_self_attention_backward(c, &attention, t.dy, dx, &attention_saved));
        ASSERT_STATUS(c, MT_SUCCESS, mt_hash_log_flush(c, log, block_line, &lines[kind]));
        mt_hash_log_destroy(log);
    }
    assert_int_equal(lines[0].all, 0);
    assert_int_equal(lines[1].all, lines[2].all);
    assert_int_equal(lines[1].own, lines[1].all);
    assert_int_equal(lines[1].all, 12);
    test_paper_rank_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shards_are_those_of_the_registry),
        cmocka_unit_test(test_shards_make_the_whole_matrix),
        cmocka_unit_test(test_shard_defaults),
        cmocka_unit_test(test_shards_refuse),
        cmocka_unit_test(test_layers_of_tensors_are_the_layers),
        cmocka_unit_test(test_layers_of_tensors_against_double_precision),
        cmocka_unit_test(test_column_layers_of_tensors_refuse),
        cmocka_unit_test(test_row_layers_of_tensors_refuse),
        cmocka_unit_test(test_layers_of_tensors_refuse),
        cmocka_unit_test(test_blocks_of_tensors_are_the_blocks),
        cmocka_unit_test(test_shards_of_hostile_sizes),
        cmocka_unit_test(test_layers_of_tensors_with_hostile_sizes),
        cmocka_unit_test(test_hash_log_of_tensors),
        cmocka_unit_test(test_hash_log_of_blocks_of_tensors),
        cmocka_unit_test(test_mlp_of_tensors_refuses),
        cmocka_unit_test(test_copies_of_tensors_refused),
        cmocka_unit_test(test_attention_of_tensors_refuses),
        cmocka_unit_test(test_calls_of_attention_of_tensors_refuse),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
