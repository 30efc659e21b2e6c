/* test_right_programs.c - programs that compute the same on any split, and that check mode must not refuse.

   Each program runs on one rank, which has everything, and on several ranks, and their results are compared: so the
   program is right. Check mode must then accept it on each rank alone without data, on all ranks without data, and on
   ranks that compute, with check = 2. Many programs have mistakes, with numbers from 1. With a mistake the results of
   several ranks are others, and check mode must refuse the program with the words of the table. */

#include "megatron.h"
#include "mt_test_ranks.h"

enum { MOST_RANKS = 4, RESULTS = 8, VALUES = 4096 };
enum { T = 8, C = 16, F = 32, HEADS = 4, D = 4 }; /* tokens, features, features of an MLP, heads, features of a head */

/* What a rank has of a tensor, or has computed. */
typedef struct result {
    int64_t rows, cols;
    char at; /* R, r or c */
    float x[VALUES];
} result;

typedef struct run run;
typedef struct program {
    const char *name;
    mt_status (*main)(run *r);
    int ranks;
    const char *mistakes[4]; /* the words of the message of each */
} program;

struct run {
    const program *p;
    mt_comm *world;
    mt_grid grid;
    mt_context *ctx;
    mt_params *params;
    mt_comm *tp;
    int rank, ranks; /* of the tensor group */
    int check, meta, mistake;
    int given, results; /* numbers of tensors */
    result *out;        /* [RESULTS] */
};

static result whole[RESULTS], shares[MOST_RANKS][RESULTS];

/* ---- what programs call ------------------------------------------------------------------------------------------ */

/* Returns memory for a tensor that the program computes. */
static mt_tensor room(run *r, int64_t rows, int64_t cols) {
    mt_tensor t = mt_none();
    if (mt_arena_tensor(r->ctx, MT_F32, rows, cols, &t) != MT_SUCCESS) abort();
    return t;
}

static int64_t share(const run *r, int64_t n) { return n / r->ranks; }

/* Returns this rank's share of a whole tensor [rows, cols] of random numbers: R, r or c. */
static mt_tensor given(run *r, int64_t rows, int64_t cols, char at) {
    static const mt_placement placements[] = {MT_REPLICATED, MT_SPLIT_ROWS, MT_SPLIT_COLS};
    int64_t first_row = at == 'r' ? r->rank * share(r, rows) : 0, first_col = at == 'c' ? r->rank * share(r, cols) : 0;
    mt_tensor t = room(r, at == 'r' ? share(r, rows) : rows, at == 'c' ? share(r, cols) : cols);
    int number = ++r->given;
    for (int64_t i = 0; !r->meta && i < t.rows; i++)
        for (int64_t j = 0; j < t.cols; j++) {
            uint64_t seed = (uint64_t)(number * 1000000 + (first_row + i) * 1000 + first_col + j);
            ((float *)t.data)[i * t.cols + j] = test_float(&seed);
        }
    if (mt_declare(r->ctx, r->tp, t, placements[strchr("Rrc", at) - "Rrc"]) != MT_SUCCESS) abort();
    return t;
}

/* Notes a result of the program, which is this rank's share of a whole. */
static void gives(run *r, mt_tensor t, char at) {
    result *out = &r->out[r->results++];
    out->rows = t.rows;
    out->cols = t.cols;
    out->at = at;
    if (t.rows * t.cols > VALUES || r->results > RESULTS) abort();
    for (int64_t i = 0; !r->meta && i < t.rows; i++)
        memcpy(out->x + i * t.cols, (float *)t.data + i * mt_tensor_ld(t), (size_t)t.cols * sizeof(float));
}

static mt_tensor own_cols(const run *r, mt_tensor t) {
    return mt_tensor_cols(t, r->rank * share(r, t.cols), share(r, t.cols));
}
static mt_tensor own_rows(const run *r, mt_tensor t) {
    return mt_tensor_rows(t, r->rank * share(r, t.rows), share(r, t.rows));
}
static mt_status sum(run *r, mt_tensor t) { return mt_reduce_from_tensor_region_forward(r->ctx, r->tp, t); }

/* ---- terms of a sum ---------------------------------------------------------------------------------------------- */

/* y = x w^T + b, with the bias on one rank only. mistake 1: on every rank */
static mt_status bias_on_one_rank(run *r) {
    mt_tensor x = given(r, T, F, 'c'), w = given(r, C, F, 'c'), b = given(r, 1, C, 'R'), y = room(r, T, C);
    mt_tensor bias = r->rank == 0 || r->mistake == 1 ? b : mt_none();
    MT_TRY(mt_check_view(r->ctx, r->tp, b, MT_PARTIAL));
    MT_TRY(mt_check_view_end(r->ctx, mt_linear_forward(r->ctx, x, w, bias, y)));
    MT_TRY(sum(r, y));
    gives(r, y, 'R');
    return MT_SUCCESS;
}

/* The same with mt_bias_forward, on the last rank. */
static mt_status bias_after_the_product(run *r) {
    mt_tensor x = given(r, T, F, 'c'), w = given(r, C, F, 'c'), b = given(r, 1, C, 'R'), y = room(r, T, C);
    MT_TRY(mt_linear_forward(r->ctx, x, w, mt_none(), y));
    MT_TRY(mt_check_view(r->ctx, r->tp, b, MT_PARTIAL));
    if (r->rank == r->ranks - 1 || r->mistake == 1) MT_TRY(mt_bias_forward(r->ctx, y, b));
    MT_TRY(mt_check_view_end(r->ctx, sum(r, y)));
    gives(r, y, 'R');
    return MT_SUCCESS;
}

/* A bias of a registry, and its gradient on all ranks. */
static mt_status bias_of_a_registry(run *r) {
    mt_param_desc desc = {.name = "fc2.bias", .rows = 1, .cols = C, .init_std = 1};
    mt_tensor x = given(r, T, F, 'c'), w = given(r, C, F, 'c'), y = room(r, T, C);
    mt_param *b;
    MT_TRY(mt_params_add(r->ctx, r->params, &desc, &b));
    MT_TRY(mt_params_init(r->ctx, r->params, 1));
    MT_TRY(mt_params_zero_grad(r->ctx, r->params));
    MT_TRY(mt_linear_forward(r->ctx, x, w, mt_none(), y));
    MT_TRY(mt_check_view(r->ctx, r->tp, b->value, MT_PARTIAL));
    if (r->rank == 0 || r->mistake == 1) MT_TRY(mt_bias_forward(r->ctx, y, b->value));
    MT_TRY(mt_check_view_end(r->ctx, sum(r, y)));
    MT_TRY(mt_bias_backward(r->ctx, y, b->grad));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    gives(r, y, 'R');
    gives(r, b->grad, 'R');
    return MT_SUCCESS;
}

/* y = residual + x w^T, with the residual on one rank only; mistake 1: on two. */
static mt_status residual_on_one_rank(run *r) {
    mt_tensor x = given(r, T, F, 'c'), w = given(r, C, F, 'c'), residual = given(r, T, C, 'R'), y = room(r, T, C);
    MT_TRY(mt_linear_forward(r->ctx, x, w, mt_none(), y));
    MT_TRY(mt_check_view(r->ctx, r->tp, residual, MT_PARTIAL));
    if (r->rank == 0 || (r->mistake == 1 && r->rank == 1)) MT_TRY(mt_add(r->ctx, residual, y, y));
    MT_TRY(mt_check_view_end(r->ctx, MT_SUCCESS));
    MT_TRY(sum(r, y));
    gives(r, y, 'R');
    return MT_SUCCESS;
}

/* The product is added to the residual on one rank, and to zeros on the others; y has rows of its own afterwards. */
static mt_status residual_in_the_sum(run *r) {
    mt_tensor x = given(r, T, F, 'c'), w = given(r, C, F, 'c'), residual = given(r, T, C, 'R'), sums = room(r, T, C);
    mt_tensor y = room(r, share(r, T), C);
    MT_TRY(mt_fill(r->ctx, sums, 0));
    MT_TRY(mt_check_view(r->ctx, r->tp, residual, MT_PARTIAL));
    if (r->rank == 0 || r->mistake == 1) MT_TRY(mt_copy(r->ctx, residual, sums));
    MT_TRY(mt_check_view_end(r->ctx, MT_SUCCESS));
    MT_TRY(mt_gemm(r->ctx, MT_NO_TRANS, MT_TRANS, 1, x, w, 1, sums));
    MT_TRY(mt_reduce_scatter_to_sequence_region(r->ctx, r->tp, sums, y));
    gives(r, y, 'r');
    return MT_SUCCESS;
}

/* Both, in one call. */
static mt_status dropout_add_on_one_rank(run *r) {
    mt_tensor x = given(r, T, F, 'c'), w = given(r, C, F, 'c'), residual = given(r, T, C, 'R'), b = given(r, 1, C, 'R');
    mt_tensor y = room(r, T, C);
    mt_dropout none = {.p = 0};
    MT_TRY(mt_linear_forward(r->ctx, x, w, mt_none(), y));
    MT_TRY(mt_check_view(r->ctx, r->tp, residual, MT_PARTIAL));
    MT_TRY(mt_check_view(r->ctx, r->tp, b, MT_PARTIAL));
    if (r->rank == 0 || r->mistake == 1) MT_TRY(mt_bias_dropout_add_forward(r->ctx, y, b, residual, none, y));
    MT_TRY(mt_check_view_end(r->ctx, MT_SUCCESS));
    MT_TRY(mt_check_view_end(r->ctx, MT_SUCCESS));
    MT_TRY(sum(r, y));
    gives(r, y, 'R');
    return MT_SUCCESS;
}

/* Each rank adds the bias divided by the number of ranks. */
static mt_status bias_divided(run *r) {
    mt_tensor x = given(r, T, F, 'c'), w = given(r, C, F, 'c'), b = given(r, 1, C, 'R'), y = room(r, T, C);
    mt_tensor part = room(r, 1, C);
    for (int64_t j = 0; !r->meta && j < C; j++) ((float *)part.data)[j] = ((float *)b.data)[j] / (float)r->ranks;
    MT_TRY(mt_declare(r->ctx, r->tp, part, MT_PARTIAL));
    MT_TRY(mt_linear_forward(r->ctx, x, w, part, y));
    MT_TRY(sum(r, y));
    gives(r, y, 'R');
    return MT_SUCCESS;
}

/* The same with operators, without a declaration. */
static mt_status bias_multiplied(run *r) {
    mt_tensor x = given(r, T, F, 'c'), w = given(r, C, F, 'c'), b = given(r, 1, C, 'R'), y = room(r, T, C);
    mt_tensor part = room(r, 1, C), factor = room(r, 1, C);
    MT_TRY(mt_fill(r->ctx, factor, 1.0f / (float)r->ranks));
    MT_TRY(mt_multiply(r->ctx, b, factor, part));
    MT_TRY(mt_linear_forward(r->ctx, x, w, mt_none(), y));
    MT_TRY(mt_bias_forward(r->ctx, y, part));
    MT_TRY(sum(r, y));
    gives(r, y, 'R');
    return MT_SUCCESS;
}

#define TWICE "both add|to the sum over \"tensor\"|on one rank only"

static const program programs[] = {
    {"bias on one rank", bias_on_one_rank, 2, {"ranks 0 and 1 " TWICE}},
    {"bias after the product", bias_after_the_product, 4, {"both add bias of mt_bias_forward|" TWICE}},
    {"bias of a registry", bias_of_a_registry, 2, {"bias of mt_bias_forward \"fc2\"|" TWICE}},
    {"residual on one rank", residual_on_one_rank, 4, {"a of mt_add|" TWICE}},
    {"residual in the sum", residual_in_the_sum, 2, {"x of mt_copy|" TWICE}},
    {"dropout and add on one rank", dropout_add_on_one_rank, 2, {TWICE}},
    {"bias divided", bias_divided, 4, {0}},
    {"bias multiplied", bias_multiplied, 4, {0}},
};

/* ---- how programs run -------------------------------------------------------------------------------------------- */

/* Runs the program on a rank. text, which may be NULL, becomes the message of an error. */
static mt_status run_rank(mt_comm *world, run r, result *out, char *text) {
    mt_context_desc where = {.arena_bytes = 1 << 22, .check = r.check};
    mt_status status;
    if (r.meta) where.device = MT_DEVICE_META;
    r.world = world;
    r.out = out;
    MT_TRY(mt_grid_create(world, &(mt_grid_desc){.tp = mt_comm_size(world)}, &r.grid));
    MT_TRY(mt_context_create(world, &where, &r.ctx));
    MT_TRY(mt_params_create(r.ctx, &r.grid, &r.params));
    r.tp = r.grid.tp;
    r.rank = r.grid.tp_rank;
    r.ranks = mt_comm_size(r.tp);
    status = r.p->main(&r);
    if (status == MT_SUCCESS) status = mt_check_replicas(r.ctx, r.tp, "the end");
    if (text) snprintf(text, MT_ERROR_BYTES, "%s", status ? mt_last_error(r.ctx) : "");
    mt_params_destroy(r.params);
    mt_context_destroy(r.ctx);
    mt_grid_destroy(&r.grid);
    return status;
}

typedef struct together {
    run r;
    mt_status status[MOST_RANKS];
    char text[MOST_RANKS][MT_ERROR_BYTES];
} together;

static mt_status run_of_several(mt_comm *world, void *user) {
    together *t = (together *)user;
    int rank = mt_comm_rank(world);
    t->status[rank] = run_rank(world, t->r, shares[rank], t->text[rank]);
    return MT_SUCCESS;
}

/* Runs all ranks. text becomes the message of the lowest one with another error than MT_ERR_PEER. */
static mt_status run_together(const program *p, int check, int is_meta, int mistake, char *text) {
    static together t;
    mt_status status = MT_SUCCESS;
    t.r = (run){.p = p, .check = check, .meta = is_meta, .mistake = mistake};
    test_launch(p->ranks, run_of_several, &t);
    text[0] = 0;
    for (int i = p->ranks - 1; i >= 0; i--)
        if (t.status[i] && (t.status[i] != MT_ERR_PEER || !status)) {
            status = t.status[i];
            snprintf(text, MT_ERROR_BYTES, "%s", t.text[i]);
        }
    return status;
}

static mt_status run_alone(const program *p, int rank, int mistake, char *text) {
    mt_comm *world;
    mt_status status;
    static result none[RESULTS];
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_comm_create_meta(p->ranks, rank, &world));
    status = run_rank(world, (run){.p = p, .check = 1, .meta = 1, .mistake = mistake}, none, text);
    mt_comm_destroy(world);
    return status;
}

static mt_status run_whole(mt_comm *world, void *user) {
    return run_rank(world, (run){.p = (const program *)user}, whole, NULL);
}

/* Returns the largest difference of the results of the ranks from those of one rank. */
static double distance(int ranks, int results) {
    double most = 0;
    for (int rank = 0; rank < ranks; rank++)
        for (int k = 0; k < results; k++) {
            const result *w = &whole[k], *s = &shares[rank][k];
            int64_t row = s->at == 'r' ? rank * s->rows : 0, col = s->at == 'c' ? rank * s->cols : 0;
            if (w->rows != s->rows * (s->at == 'r' ? ranks : 1) || w->cols != s->cols * (s->at == 'c' ? ranks : 1))
                return INFINITY;
            for (int64_t e = 0; e < s->rows * s->cols; e++) {
                double want = (double)w->x[(row + e / s->cols) * w->cols + col + e % s->cols];
                double off = fabs((double)s->x[e] - want) / (1 + fabs(want));
                if (!(off <= most)) most = isnan(off) ? INFINITY : off;
            }
        }
    return most;
}

static int results_of(const result *r) {
    int n = 0;
    while (n < RESULTS && r[n].rows) n++;
    return n;
}

static void check_right(const program *p) {
    char text[MT_ERROR_BYTES];
    double off;
    for (int rank = 0; rank < p->ranks; rank++)
        if (run_alone(p, rank, 0, text)) fail_msg("%s, rank %d alone: %s", p->name, rank, text);
    for (int check = 0; check <= 2; check++) {
        memset(shares, 0, sizeof shares);
        if (run_together(p, check, 0, 0, text)) fail_msg("%s, check %d: %s", p->name, check, text);
        off = distance(p->ranks, results_of(whole));
        if (!(off < 1e-5)) fail_msg("%s is not right: off by %g", p->name, off);
    }
    if (run_together(p, 2, 1, 0, text)) fail_msg("%s, all ranks without data: %s", p->name, text);
}

/* The program with a mistake computes something else, or fails, and one way to check refuses it. */
static void check_mistake(const program *p, int mistake) {
    const char *words = p->mistakes[mistake - 1];
    char text[MT_ERROR_BYTES];
    mt_status status;
    memset(shares, 0, sizeof shares);
    if (run_together(p, 0, 0, mistake, text) == MT_SUCCESS && distance(p->ranks, results_of(whole)) < 1e-3)
        fail_msg("%s, mistake %d computes the same", p->name, mistake);
    for (int is_meta = 0; is_meta < 2; is_meta++) {
        status = run_together(p, 2, is_meta, mistake, text);
        if (status == MT_SUCCESS) fail_msg("%s, mistake %d, meta %d is accepted", p->name, mistake, is_meta);
        if (!test_has_words(text, words))
            fail_msg("%s, mistake %d, meta %d: '%s' is not all in '%s'", p->name, mistake, is_meta, words, text);
    }
}

static void test_right_programs(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
        const program *p = &programs[i];
        memset(whole, 0, sizeof whole);
        test_launch(1, run_whole, (void *)p);
        check_right(p);
        for (int m = 1; m <= 4 && p->mistakes[m - 1]; m++) check_mistake(p, m);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_right_programs)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
