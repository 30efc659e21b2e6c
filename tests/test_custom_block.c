/* test_custom_block.c - tests the block of examples/02_custom_block.c: its gradients against finite differences; its
   losses on every split, with and without sequence parallelism, against one rank; in invariant mode the same bits on
   every split, in f32 and bf16; and its communication.
       cc -std=gnu17 -O2 -I. -Itests tests/test_custom_block.c -lpthread -lm */

#define CUSTOM_BLOCK_NO_MAIN
#include "examples/02_custom_block.c"

#include "mt_test_ranks.h"

/* ---- gradients --------------------------------------------------------------------------------------------------- */

typedef struct probe {
    test_rank r;
    block b;
    mt_tensor x, dy;
} probe;

/* Returns sum(y * dy), in double. */
static double objective(probe *p) {
    size_t mark = mt_arena_mark(p->r.ctx);
    mt_tensor y = test_tensor(&p->r, TOKENS, HIDDEN, NAN);
    block_saved saved;
    double sum = 0;
    ASSERT_STATUS(p->r.ctx, MT_SUCCESS, block_forward(p->r.ctx, &p->b, p->x, y, &saved));
    for (int i = 0; i < TOKENS * HIDDEN; i++) sum += (double)((float *)y.data)[i] * (double)((float *)p->dy.data)[i];
    mt_arena_release(p->r.ctx, mark);
    free(p->r.memory[--p->r.memory_count]);
    return sum;
}

/* Compares the slope along a random direction of one tensor with its gradient. */
static void check_slope(probe *p, const char *name, float *value, const float *grad, int64_t n) {
    const double h = 2e-3; /* the slope of squared ReLU has kinks, so h is small next to the inputs of fc1 */
    float *kept = (float *)malloc((size_t)n * sizeof *kept), *way = (float *)malloc((size_t)n * sizeof *way);
    double slope, want = 0, size = 0;
    uint64_t seed = test_name_seed(name);
    assert_non_null(kept);
    assert_non_null(way);
    memcpy(kept, value, (size_t)n * sizeof *kept);
    for (int64_t i = 0; i < n; i++) {
        way[i] = test_float(&seed);
        want += (double)grad[i] * (double)way[i];
        size += fabs((double)grad[i] * (double)way[i]);
    }
    for (int64_t i = 0; i < n; i++) value[i] = kept[i] + (float)h * way[i];
    slope = objective(p);
    for (int64_t i = 0; i < n; i++) value[i] = kept[i] - (float)h * way[i];
    slope = (slope - objective(p)) / (2 * h);
    memcpy(value, kept, (size_t)n * sizeof *kept);
    if (!(fabs(slope - want) <= 2e-3 * size / sqrt((double)n) + 1e-2 * fabs(want) + 2e-3))
        fail_msg("%s: the slope is %.9g, the gradient says %.9g", name, slope, want);
    free(kept);
    free(way);
}

static void test_gradients_are_finite_differences(void **state) {
    probe p;
    block_saved saved;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, NULL, &p.r);
    ASSERT_STATUS(p.r.ctx, MT_SUCCESS, block_create(p.r.ctx, p.r.params, 0, &p.b));
    ASSERT_STATUS(p.r.ctx, MT_SUCCESS, mt_params_init(p.r.ctx, p.r.params, 5));
    for (int i = 0; i < mt_params_count(p.r.params); i++) { /* gains and biases of different size */
        mt_param *q = mt_params_at(p.r.params, i);
        uint64_t seed = test_name_seed(q->name) + 1;
        for (int64_t j = 0; j < q->value.cols && q->value.rows == 1; j++)
            ((float *)q->value.data)[j] += 0.5f * test_float(&seed);
    }
    p.x = mt_tensor_f32(test_noise(&p.r, TOKENS * HIDDEN, 1, 1.0f), TOKENS, HIDDEN);
    p.dy = mt_tensor_f32(test_noise(&p.r, TOKENS * HIDDEN, 2, 1.0f), TOKENS, HIDDEN);
    mt_tensor y = test_tensor(&p.r, TOKENS, HIDDEN, NAN), dx = test_tensor(&p.r, TOKENS, HIDDEN, NAN);
    ASSERT_STATUS(p.r.ctx, MT_SUCCESS, block_forward(p.r.ctx, &p.b, p.x, y, &saved));
    ASSERT_STATUS(p.r.ctx, MT_SUCCESS, block_backward(p.r.ctx, &p.b, p.dy, dx, &saved));
    check_slope(&p, "x", (float *)p.x.data, (const float *)dx.data, TOKENS * HIDDEN);
    for (int i = 0; i < mt_params_count(p.r.params); i++) {
        mt_param *q = mt_params_at(p.r.params, i);
        check_slope(&p, q->name, (float *)q->value.data, (const float *)q->grad.data, q->value.rows * q->value.cols);
    }
    assert_int_equal(mt_params_count(p.r.params), 14);
    test_paper_rank_close(&p.r);
}

/* ---- splits ------------------------------------------------------------------------------------------------------ */

static void test_losses_do_not_depend_on_the_split(void **state) {
    const int steps = SANITIZED ? 6 : STEPS;
    const float learned = SANITIZED ? 0.9f : 0.1f; /* the last loss, of the first, is less */
    (void)state;
    for (int dtype = MT_F32; dtype <= MT_BF16; dtype++)
        for (int invariant = 0; invariant <= 1; invariant++) {
            settings one;
            memset(&one, 0, sizeof one);
            one.steps = steps;
            one.dtype = (mt_dtype)dtype;
            one.invariant = invariant * HEADS;
            settings split = one;
            test_launch(1, rank_main, &one);
            assert_true(one.loss[steps - 1] < learned * one.loss[0] && one.loss[0] > 10.0f);
            for (int i = 0; i < 4; i++) {
                split.sequence_parallel = i % 2;
                test_launch(2 + i / 2 * 2, rank_main, &split);
                if (invariant) assert_memory_equal(split.loss, one.loss, sizeof one.loss);
                for (int step = 0; step < steps; step++)
                    assert_float_equal((double)split.loss[step], (double)one.loss[step],
                                       (dtype == MT_F32 ? 2e-3 : 5e-2) * (double)one.loss[step]);
            }
        }
}

static mt_status ledger_rank(mt_comm *world, void *user) {
    const int sp = *(const int *)user;
    test_rank r;
    block b;
    block_saved saved;
    mt_ledger ledger;
    mt_status status = test_rank_open(world, (mt_grid_desc){.tp = mt_comm_size(world)}, NULL, &r);
    int64_t rows = sp ? TOKENS / mt_comm_size(world) : TOKENS;
    MT_KEEP(status, block_create(r.ctx, r.params, sp, &b));
    MT_KEEP(status, mt_params_init(r.ctx, r.params, 5));
    mt_tensor x = test_tensor(&r, rows, HIDDEN, 1.0f), y = test_tensor(&r, rows, HIDDEN, 1.0f);
    mt_tensor dx = test_tensor(&r, rows, HIDDEN, 1.0f);
    if (status == MT_SUCCESS) mt_comm_ledger_reset(r.grid.tp);
    MT_KEEP(status, block_forward(r.ctx, &b, x, y, &saved));
    MT_KEEP(status, block_backward(r.ctx, &b, y, dx, &saved));
    if (status == MT_SUCCESS) {
        ledger = mt_comm_ledger(r.grid.tp);
        if (ledger.calls[MT_ALL_REDUCE] != (sp ? 0 : 2) || ledger.calls[MT_REDUCE_SCATTER] != (sp ? 2 : 0) ||
            ledger.calls[MT_ALL_GATHER] != (sp ? 3 : 0)) /* the normalised input twice, dy once */
            status = MT_ERR_DATA;
    }
    test_rank_close(&r);
    return status;
}

static void test_one_f_and_one_g(void **state) {
    int sp;
    (void)state;
    for (sp = 0; sp <= 1; sp++) test_launch(2, ledger_rank, &sp);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradients_are_finite_differences),
        cmocka_unit_test(test_losses_do_not_depend_on_the_split),
        cmocka_unit_test(test_one_f_and_one_g),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
