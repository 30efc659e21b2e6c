/* test_checking.c - check mode: wrong parallel programs are refused with the call named, right ones are not. */

#include "megatron.h"
#include "mt_test_ranks.h"

enum { TOKENS = 8, HIDDEN = 16, FFN = 32 };

/* ---- a block of the caller's own, with mistakes ------------------------------------------------------------------ */

/* y = x + g(gelu(f(norm(x)) W1^T + b1) W2^T) + b2, from operators and the functions f and g. */
typedef struct own_block {
    mt_param *gain, *w1, *b1, *w2, *b2;
} own_block;

typedef struct own_tensors {
    mt_tensor x, stats, n, h, a, y, dy, da, dn, dx;
} own_tensors;

typedef enum mistake {
    NO_MISTAKE,
    NO_F,            /* the all-reduce of dn is forgotten */
    F_TWICE,         /* dn is summed twice */
    NO_G,            /* the all-reduce of y is forgotten, and the layer has a bias */
    NO_G_NO_BIAS,    /* the same without a bias */
    G_TWICE,         /* y is summed twice */
    F_FOR_G,         /* y is passed to the forward of f, which does nothing */
    BIAS_BEFORE_G,   /* each rank adds the bias to its part of the sum */
    NORM_BEFORE_G,   /* the norm of a part of a sum */
    GELU_BEFORE_G,   /* the activation of a part of a sum */
    RESIDUAL_BEFORE, /* each rank adds the residual to its part of the sum */
    SCATTERED_DY,    /* backward of g is a scatter instead of the identity */
    RAW_G_TWICE,     /* the second sum is a plain all-reduce */
    MISTAKES
} mistake;

static mt_status own_create(test_rank *r, own_block *b) {
    mt_param_desc gain = {.name = "norm.weight", .rows = 1, .cols = HIDDEN, .init_value = 1.0f};
    mt_param_desc w1 = {.name = "fc1.weight", .rows = FFN, .cols = HIDDEN, .placement = MT_SPLIT_ROWS};
    mt_param_desc b1 = {.name = "fc1.bias", .rows = 1, .cols = FFN, .placement = MT_SPLIT_COLS};
    mt_param_desc w2 = {.name = "fc2.weight", .rows = HIDDEN, .cols = FFN, .placement = MT_SPLIT_COLS};
    mt_param_desc b2 = {.name = "fc2.bias", .rows = 1, .cols = HIDDEN};
    MT_TRY(mt_params_add(r->ctx, r->params, &gain, &b->gain));
    MT_TRY(mt_params_add(r->ctx, r->params, &w1, &b->w1));
    MT_TRY(mt_params_add(r->ctx, r->params, &b1, &b->b1));
    MT_TRY(mt_params_add(r->ctx, r->params, &w2, &b->w2));
    MT_TRY(mt_params_add(r->ctx, r->params, &b2, &b->b2));
    return mt_params_init(r->ctx, r->params, 1);
}

static mt_status own_tensors_create(mt_context *ctx, int64_t ffn, own_tensors *t) {
    mt_arena_request requests[] = {{&t->x, MT_F32, TOKENS, HIDDEN},  {&t->stats, MT_F32, TOKENS, 2},
                                   {&t->n, MT_F32, TOKENS, HIDDEN},  {&t->h, MT_F32, TOKENS, ffn},
                                   {&t->a, MT_F32, TOKENS, ffn},     {&t->y, MT_F32, TOKENS, HIDDEN},
                                   {&t->dy, MT_F32, TOKENS, HIDDEN}, {&t->da, MT_F32, TOKENS, ffn},
                                   {&t->dn, MT_F32, TOKENS, HIDDEN}, {&t->dx, MT_F32, TOKENS, HIDDEN}};
    return mt_arena_tensors(ctx, requests, 10);
}

static mt_status own_reduce(const test_rank *r, own_tensors *t, mistake m) {
    mt_context *ctx = r->ctx;
    if (m == NO_G || m == NO_G_NO_BIAS) return MT_SUCCESS;
    if (m == F_FOR_G) return mt_copy_to_tensor_region_forward(ctx, r->grid.tp, t->y);
    if (m == GELU_BEFORE_G) MT_TRY(mt_activation_forward(ctx, MT_GELU_TANH, t->y, mt_none(), t->y));
    MT_TRY(mt_reduce_from_tensor_region_forward(ctx, r->grid.tp, t->y));
    if (m == G_TWICE) return mt_reduce_from_tensor_region_forward(ctx, r->grid.tp, t->y);
    if (m == RAW_G_TWICE) return mt_all_reduce(ctx, r->grid.tp, t->y.data, t->y.data, TOKENS * HIDDEN, MT_F32, MT_SUM);
    return MT_SUCCESS;
}

static mt_status own_forward(const test_rank *r, const own_block *b, own_tensors *t, mistake m) {
    mt_context *ctx = r->ctx;
    MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, t->x, b->gain->value, mt_none(), 1e-5f, t->n, t->stats));
    MT_TRY(mt_copy_to_tensor_region_forward(ctx, r->grid.tp, t->n));
    MT_TRY(mt_linear_forward(ctx, t->n, b->w1->value, b->b1->value, t->h));
    MT_TRY(mt_activation_forward(ctx, MT_GELU_TANH, t->h, mt_none(), t->a));
    MT_TRY(mt_linear_forward(ctx, t->a, b->w2->value, mt_none(), t->y));
    if (m == BIAS_BEFORE_G) MT_TRY(mt_bias_forward(ctx, t->y, b->b2->value));
    if (m == RESIDUAL_BEFORE) MT_TRY(mt_add(ctx, t->x, t->y, t->y));
    if (m == NORM_BEFORE_G)
        MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, t->y, b->gain->value, mt_none(), 1e-5f, t->y, t->stats));
    MT_TRY(own_reduce(r, t, m));
    if (m != BIAS_BEFORE_G && m != NO_G_NO_BIAS) MT_TRY(mt_bias_forward(ctx, t->y, b->b2->value));
    return m == RESIDUAL_BEFORE ? MT_SUCCESS : mt_add(ctx, t->x, t->y, t->y);
}

static mt_status own_backward(const test_rank *r, const own_block *b, own_tensors *t, mistake m) {
    mt_context *ctx = r->ctx;
    if (m == SCATTERED_DY) MT_TRY(mt_declare(ctx, r->grid.tp, t->dy, MT_SPLIT_COLS));
    else MT_TRY(mt_reduce_from_tensor_region_backward(ctx, r->grid.tp, t->dy));
    MT_TRY(mt_linear_gradients(ctx, t->dy, t->a, b->w2->grad, b->b2->grad));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1.0f, t->dy, b->w2->value, 0.0f, t->da));
    MT_TRY(mt_activation_backward(ctx, MT_GELU_TANH, t->h, t->da, t->da, mt_none()));
    MT_TRY(mt_linear_gradients(ctx, t->da, t->n, b->w1->grad, b->b1->grad));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1.0f, t->da, b->w1->value, 0.0f, t->dn));
    if (m != NO_F) MT_TRY(mt_copy_to_tensor_region_backward(ctx, r->grid.tp, t->dn));
    if (m == F_TWICE) MT_TRY(mt_copy_to_tensor_region_backward(ctx, r->grid.tp, t->dn));
    return mt_norm_backward(ctx, MT_RMS_NORM, t->x, b->gain->value, t->stats, t->dn, t->dy, t->dx, b->gain->grad,
                            mt_none());
}

/* One step with a mistake on a meta rank of 2 tensor ranks. */
static mt_status own_step(const test_rank *r, const own_block *b, mistake m) {
    mt_context *ctx = r->ctx;
    size_t mark = mt_arena_mark(ctx);
    own_tensors t;
    MT_TRY(own_tensors_create(ctx, b->b1->value.cols, &t));
    MT_TRY(mt_params_zero_grad(ctx, r->params));
    MT_TRY(mt_declare(ctx, r->grid.tp, t.x, MT_REPLICATED));
    MT_TRY(mt_declare(ctx, r->grid.tp, t.dy, MT_REPLICATED));
    MT_TRY(own_forward(r, b, &t, m));
    MT_TRY(own_backward(r, b, &t, m));
    mt_arena_release(ctx, mark);
    return mt_sync_gradients(ctx, r->params);
}

static const mt_context_desc meta = {.device = MT_DEVICE_META};

static void test_mistakes_are_refused(void **state) {
    static const char *const words[MISTAKES] = {
        [NO_F] =
            "mt_norm_backward|norm.weight|dy is partial over \"tensor\" (2 ranks)|mt_gemm with 'fc1.weight'|replicated|"
            "mt_copy_to_tensor_region_backward",
        [F_TWICE] = "mt_copy_to_tensor_region_backward|dx is replicated|must be partial",
        [NO_G] = "mt_bias_forward|fc2.bias|y is partial|mt_gemm with 'fc2.weight'|replicated|"
                 "mt_reduce_from_tensor_region_forward",
        [NO_G_NO_BIAS] = "mt_add|b is partial|mt_gemm with 'fc2.weight'|mt_reduce_from_tensor_region_forward",
        [G_TWICE] = "mt_reduce_from_tensor_region_forward|y is replicated|must be partial",
        [F_FOR_G] = "mt_copy_to_tensor_region_forward|x is partial|must be replicated",
        [BIAS_BEFORE_G] = "mt_bias_forward|y is partial|mt_reduce_from_tensor_region_forward",
        [NORM_BEFORE_G] = "mt_norm_forward|x is partial|mt_gemm with 'fc2.weight'",
        [GELU_BEFORE_G] = "mt_activation_forward|h is partial|mt_reduce_from_tensor_region_forward",
        [RESIDUAL_BEFORE] = "mt_add|b is partial|mt_reduce_from_tensor_region_forward",
        [SCATTERED_DY] = "mt_bias_backward|fc2.bias|dy is split by columns|mt_gather_from_tensor_region",
        [RAW_G_TWICE] = "mt_all_reduce|sendbuf is replicated|must be split by rows or split by columns or partial",
    };
    test_rank r;
    own_block b;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, own_create(&r, &b));
    for (int m = 1; m < MISTAKES; m++) {
        ASSERT_STATUS(r.ctx, MT_SUCCESS, own_step(&r, &b, NO_MISTAKE));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, words[m], own_step(&r, &b, (mistake)m));
    }
    test_paper_rank_close(&r);
}

static void test_one_rank_may_do_all_of_them(void **state) {
    test_rank r;
    own_block b;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, own_create(&r, &b));
    for (int m = 0; m < MISTAKES; m++) ASSERT_STATUS(r.ctx, MT_SUCCESS, own_step(&r, &b, (mistake)m));
    test_paper_rank_close(&r);
}

/* Refused calls on real data compute nothing. */
static void test_nothing_is_written(void **state) {
    const mt_context_desc checked = {.check = 1};
    test_rank r;
    mt_tensor t[3];
    (void)state;
    test_paper_rank(2, 1, (mt_grid_desc){.tp = 2}, &checked, &r);
    for (int i = 0; i < 3; i++) ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 6, &t[i]));
    for (int i = 0; i < 72; i++) ((float *)t[i / 24].data)[i % 24] = 7.0f;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, t[0], MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, t[1], MT_PARTIAL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_add|b is partial over \"tensor\" (2 ranks) since mt_declare|replicated",
            mt_add(r.ctx, t[0], t[1], t[2]));
    test_untouched("y", (float *)t[2].data, 24, 7.0f);
    test_paper_rank_close(&r);
}

/* ---- sequence parallelism ---------------------------------------------------------------------------------------- */

/* The norm of this rank's tokens, with its gradient. partial: mt_param_desc.sequence_partial of the gain. */
static mt_status own_norm(test_rank *r, int partial, int gather) {
    mt_param_desc gain = {.name = "norm.weight", .rows = 1, .cols = HIDDEN, .sequence_partial = partial};
    mt_param_desc weight = {.name = "fc1.weight", .rows = FFN, .cols = HIDDEN, .placement = MT_SPLIT_ROWS};
    mt_context *ctx = r->ctx;
    mt_param *g, *w;
    mt_tensor x, stats, n, all, h;
    MT_TRY(mt_params_add(ctx, r->params, &gain, &g));
    MT_TRY(mt_params_add(ctx, r->params, &weight, &w));
    MT_TRY(mt_params_init(ctx, r->params, 1));
    mt_arena_request requests[] = {{&x, MT_F32, TOKENS, HIDDEN},
                                   {&stats, MT_F32, TOKENS, 2},
                                   {&n, MT_F32, TOKENS, HIDDEN},
                                   {&all, MT_F32, 2 * TOKENS, HIDDEN},
                                   {&h, MT_F32, gather ? 2 * TOKENS : TOKENS, w->value.rows}};
    MT_TRY(mt_arena_tensors(ctx, requests, 5));
    MT_TRY(mt_declare(ctx, r->grid.tp, x, MT_SPLIT_ROWS));
    MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, x, g->value, mt_none(), 1e-5f, n, stats));
    if (gather) MT_TRY(mt_gather_from_sequence_region(ctx, r->grid.tp, n, all));
    MT_TRY(mt_linear_forward(ctx, gather ? all : n, w->value, mt_none(), h));
    MT_TRY(mt_norm_backward(ctx, MT_RMS_NORM, x, g->value, stats, n, mt_none(), n, g->grad, mt_none()));
    return mt_sync_gradients(ctx, r->params);
}

static void test_sequence_parallelism(void **state) {
    test_rank r;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, own_norm(&r, 1, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, test_rank_renew(&r));
    REFUSED(
        r.ctx, MT_ERR_ARGUMENT,
        "mt_norm_backward|the gradient of 'norm.weight' (dgain) would be partial over \"tensor\"|must be replicated|"
        "sequence_partial",
        own_norm(&r, 0, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, test_rank_renew(&r));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_gemm|fc1.weight|a is split by rows|mt_gather_from_sequence_region",
            own_norm(&r, 1, 0));
    test_paper_rank_close(&r);
}

/* ---- what is kept, and how it is seen ---------------------------------------------------------------------------- */

static void check_is(const test_rank *r, mt_tensor t, mt_placement placement) {
    assert_int_equal(mt_placement_of(r->ctx, r->grid.tp, t), placement);
}

static void test_placements_of_views(void **state) {
    test_rank r;
    mt_tensor t, other;
    size_t mark;
    void *block;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    mark = mt_arena_mark(r.ctx);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 12, &t));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 12, &other));
    check_is(&r, t, MT_UNDECLARED);
    for (int p = MT_REPLICATED; p <= MT_PARTIAL; p++) {
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, t, (mt_placement)p));
        check_is(&r, t, (mt_placement)p);
        check_is(&r, mt_tensor_rows(t, 1, 2), (mt_placement)p);
        check_is(&r, other, MT_UNDECLARED);
    }
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, mt_tensor_rows(t, 1, 2), MT_REPLICATED));
    check_is(&r, mt_tensor_rows(t, 2, 1), MT_REPLICATED); /* not what the whole was before */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, t, MT_PARTIAL));
    /* columns that are declared apart */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, mt_tensor_cols(t, 0, 4), MT_REPLICATED));
    check_is(&r, mt_tensor_cols(t, 0, 4), MT_REPLICATED);
    check_is(&r, mt_tensor_cols(t, 1, 2), MT_REPLICATED);
    check_is(&r, mt_tensor_cols(t, 4, 8), MT_PARTIAL);
    check_is(&r, mt_tensor_cols(t, 3, 2), MT_UNDECLARED); /* both */
    check_is(&r, t, MT_UNDECLARED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, mt_tensor_rows(t, 0, 3), MT_PARTIAL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, mt_tensor_rows(t, 1, 3), MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, mt_tensor_rows(t, 3, 1), 1.0f));
    check_is(&r, mt_tensor_rows(t, 2, 1), MT_REPLICATED); /* not what it was before */
    check_is(&r, mt_tensor_rows(t, 3, 1), MT_UNDECLARED);
    /* a new placement of the whole replaces those of the parts */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, t, MT_PARTIAL));
    check_is(&r, mt_tensor_cols(t, 0, 4), MT_PARTIAL);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, t, MT_UNDECLARED));
    check_is(&r, t, MT_UNDECLARED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, t, MT_PARTIAL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, NULL, t, MT_UNDECLARED));
    check_is(&r, t, MT_UNDECLARED);
    /* memory that is allocated again is unknown */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, t, MT_PARTIAL));
    mt_arena_release(r.ctx, mark);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 2, 12, &other));
    check_is(&r, other, MT_UNDECLARED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_context_alloc(r.ctx, 256, &block));
    other = mt_tensor_f32((const float *)block, 4, 16);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, other, MT_PARTIAL));
    check_is(&r, other, MT_PARTIAL);
    mt_context_free(r.ctx, block, 256);
    check_is(&r, other, MT_UNDECLARED);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_declare|placement is 5", mt_declare(r.ctx, r.grid.tp, t, (mt_placement)5));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_declare|placement is -1", mt_declare(r.ctx, r.grid.tp, t, (mt_placement)-1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_declare|comm is NULL", mt_declare(r.ctx, NULL, t, MT_PARTIAL));
    assert_int_equal(mt_declare(NULL, r.grid.tp, t, MT_PARTIAL), MT_ERR_ARGUMENT);
    assert_int_equal(mt_placement_of(NULL, r.grid.tp, t), MT_UNDECLARED);
    test_paper_rank_close(&r);
}

/* Zeros fit every placement. Other memory of the caller is only watched when it was declared. */
static void test_zeros_and_memory_of_the_caller(void **state) {
    const mt_context_desc checked = {.check = 1};
    test_rank r;
    mt_tensor zero, part, sum, mine;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &checked, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &zero));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &part));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &sum));
    mine = test_tensor(&r, 4, 4, 1.0f);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, zero, 0.0f));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, part, 1.0f));
    check_is(&r, zero, MT_UNDECLARED);
    for (int p = MT_REPLICATED; p <= MT_PARTIAL; p++) {
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, part, (mt_placement)p));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_add(r.ctx, zero, part, sum));
        check_is(&r, sum, (mt_placement)p);
    }
    /* rows of zeros do not count, rows that are not known do */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, sum, 0.0f));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, mt_tensor_rows(sum, 0, 2), MT_PARTIAL));
    check_is(&r, sum, MT_PARTIAL);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_add(r.ctx, mine, mine, sum));
    check_is(&r, sum, MT_UNDECLARED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, part, mine));
    check_is(&r, mine, MT_UNDECLARED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, mine, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, part, mine));
    check_is(&r, mine, MT_PARTIAL);
    mt_declare_forget(r.ctx, mine.data, 16 * sizeof(float));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, part, mine));
    check_is(&r, mine, MT_UNDECLARED); /* no longer watched */
    test_paper_rank_close(&r);
}

/* A rule of the caller's own: y = a b, where b must be replicated. */
static void test_own_rules(void **state) {
    static const mt_rule rule = {"a b y", "RRR PRP", "rRr"};
    test_rank r;
    mt_tensor t[3];
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    for (int i = 0; i < 3; i++) ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &t[i]));
    mt_operand operands[] = {{"y", t[2], 2}, {"a", t[0], 1}, {"b", t[1], 1}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, t[0], MT_PARTIAL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, t[0], MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_rule_check(r.ctx, "my_product", &rule, operands, 3));
    check_is(&r, t[2], MT_PARTIAL);
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, t[2]), MT_SPLIT_ROWS);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, t[1], MT_SPLIT_ROWS));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "my_product|b is split by rows over \"tensor\"|must be replicated",
            mt_rule_check(r.ctx, "my_product", &rule, operands, 3));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, t[0], MT_SPLIT_ROWS)); /* only over "data" */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, t[1], MT_REPLICATED));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "my_product|a is split by rows over \"tensor\"|replicated or partial",
            mt_rule_check(r.ctx, "my_product", &rule, operands, 3));
    static const mt_rule none = {"a b y", "", NULL}, few = {"a b y", "RRR RR", NULL};
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "my_product|no case", mt_rule_check(r.ctx, "my_product", &none, operands, 3));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "my_product|2 letters|3 operands",
            mt_rule_check(r.ctx, "my_product", &few, operands, 3));
    mt_check_pause(r.ctx);
    assert_int_equal(mt_check_mode(r.ctx), 0);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_rule_check(r.ctx, "my_product", &rule, operands, 3));
    assert_int_equal(mt_check_resume(r.ctx, MT_ERR_DATA), MT_ERR_DATA);
    assert_int_equal(mt_check_mode(r.ctx), 1);
    test_paper_rank_close(&r);
}

/* What a call writes to a parameter or its gradient must fit its placement; a part of it does not decide for the
   whole. */
static void test_parameters_keep_their_placement(void **state) {
    mt_param_desc weight = {.name = "fc.weight", .rows = 4, .cols = 4};
    test_rank r;
    mt_param *w;
    mt_tensor part, unknown;
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &weight, &w));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &part));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &unknown));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, part, MT_PARTIAL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_copy (with 'fc.weight')|x is partial|must be replicated",
            mt_copy(r.ctx, part, w->value));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, unknown, w->value));
    check_is(&r, w->value, MT_REPLICATED);
    /* a gradient over data: partial, overwritten by a sum of the caller's own, and zeros in one row */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, unknown, MT_PARTIAL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_add(r.ctx, w->grad, unknown, w->grad));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, w->grad), MT_PARTIAL);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, mt_tensor_rows(w->grad, 0, 1), 0.0f));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, w->grad), MT_PARTIAL);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.grid.dp, unknown.data, unknown.data, 16, MT_F32, MT_SUM));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, unknown), MT_REPLICATED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, unknown, w->grad));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, w->grad), MT_REPLICATED);
    test_paper_rank_close(&r);
}

/* Attention of one head, written with products: a rank's own heads, and the sequences of data ranks. */
static void test_products_of_own_heads(void **state) {
    test_rank r;
    mt_tensor qkv, scores, out;
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 12, &qkv));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &scores));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &out));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, qkv, MT_SPLIT_COLS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, qkv, MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS,
                  mt_gemm(r.ctx, MT_NO_TRANS, MT_TRANS, 1.0f, mt_tensor_cols(qkv, 0, 4), mt_tensor_cols(qkv, 4, 4),
                          0.0f, scores));
    ASSERT_STATUS(r.ctx, MT_SUCCESS,
                  mt_gemm(r.ctx, MT_NO_TRANS, MT_NO_TRANS, 1.0f, scores, mt_tensor_cols(qkv, 8, 4), 0.0f, out));
    assert_int_not_equal(mt_placement_of(r.ctx, r.grid.tp, out), MT_PARTIAL);
    test_paper_rank_close(&r);
}

/* The case "P-PP" of the dropout is only for a call without a bias. */
static void test_an_operand_that_must_be_left_out(void **state) {
    const mt_dropout none = {.p = 0.0f};
    test_rank r;
    mt_tensor x, bias, residual;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &residual));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 1, 4, &bias));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_PARTIAL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, residual, MT_PARTIAL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_dropout_add_forward(r.ctx, x, mt_none(), residual, none, x));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_bias_dropout_add_forward|bias|must be left out",
            mt_bias_dropout_add_forward(r.ctx, x, bias, residual, none, x));
    test_paper_rank_close(&r);
}

/* ---- data ranks and stages --------------------------------------------------------------------------------------- */

static void test_data_ranks(void **state) {
    const mt_adamw hyper = {.lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .grad_scale = 1.0f, .step = 1};
    mt_param_desc weight = {.name = "fc.weight", .rows = HIDDEN, .cols = HIDDEN};
    test_rank r;
    mt_param *w;
    mt_tensor x, y, m, v;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 1}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &weight, &w));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    mt_arena_request requests[] = {{&x, MT_F32, TOKENS, HIDDEN},
                                   {&y, MT_F32, TOKENS, HIDDEN},
                                   {&m, MT_F32, HIDDEN, HIDDEN},
                                   {&v, MT_F32, HIDDEN, HIDDEN}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, requests, 4));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, x, MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_linear_forward(r.ctx, x, w->value, mt_none(), y));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, y), MT_SPLIT_ROWS);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_linear_gradients(r.ctx, y, x, w->grad, mt_none()));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, w->grad), MT_PARTIAL);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_adamw_step|grad, 'fc.weight', is partial over \"data\" (2 ranks)|mt_all_reduce",
            mt_adamw_step(r.ctx, &hyper, w->value, mt_none(), w->grad, m, v));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sync_gradients(r.ctx, r.params));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, w->grad), MT_REPLICATED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_adamw_step(r.ctx, &hyper, w->value, mt_none(), w->grad, m, v));
    test_paper_rank_close(&r);
}

static void test_a_partial_sum_does_not_travel(void **state) {
    test_rank r;
    mt_tensor x;
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2, .pp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_PARTIAL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_send|sendbuf is partial over \"tensor\"|mt_reduce_from_tensor_region_forward",
            mt_send(r.ctx, r.grid.pp, x.data, 16, MT_F32, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_reduce_from_tensor_region_forward(r.ctx, r.grid.tp, x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_send(r.ctx, r.grid.pp, x.data, 16, MT_F32, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_recv(r.ctx, r.grid.pp, x.data, 16, MT_F32, 1));
    check_is(&r, x, MT_UNDECLARED);
    test_paper_rank_close(&r);
}

/* ---- the models of the library ----------------------------------------------------------------------------------- */

/* A step of a GPT on 2 tensor and 2 data ranks, with inputs that are declared. */
static mt_status gpt_step(test_rank *r, int sp, mt_placement ids_on_data, mt_placement *loss_on_data) {
    const mt_batch batch = {.sequences = 2, .seq = 8};
    mt_gpt_desc d = {.vocab = 40, .layers = 2, .max_seq = 8};
    mt_context *ctx = r->ctx;
    mt_gpt gpt;
    mt_gpt_saved saved;
    mt_optimizer adamw;
    mt_tensor ids, targets, loss;
    float norm;
    d.layer.hidden = HIDDEN;
    d.layer.heads = 4;
    d.layer.sequence_parallel = sp;
    MT_TRY(mt_gpt_create(ctx, r->params, &d, &gpt));
    MT_TRY(mt_params_init(ctx, r->params, 1));
    MT_TRY(mt_gpt_saved_create(ctx, &gpt, &saved));
    MT_TRY(mt_optimizer_create(ctx, r->params, NULL, &adamw));
    mt_arena_request requests[] = {{&ids, MT_I32, 16, 1}, {&targets, MT_I32, 16, 1}, {&loss, MT_F32, 1, 16}};
    MT_TRY(mt_arena_tensors(ctx, requests, 3));
    MT_TRY(mt_declare(ctx, r->grid.dp, ids, ids_on_data));
    MT_TRY(mt_declare(ctx, r->grid.tp, ids, MT_REPLICATED));
    MT_TRY(mt_gpt_forward(ctx, &gpt, &batch, (const int32_t *)ids.data, (const int32_t *)targets.data, loss, &saved));
    *loss_on_data = mt_placement_of(ctx, r->grid.dp, loss);
    check_is(r, loss, MT_REPLICATED);
    MT_TRY(mt_gpt_backward(ctx, &gpt, 1.0f, &saved));
    for (int i = 0; i < mt_params_count(r->params) && ids_on_data == MT_SPLIT_ROWS; i++)
        assert_int_equal(mt_placement_of(ctx, r->grid.dp, mt_params_at(r->params, i)->grad), MT_PARTIAL);
    MT_TRY(mt_sync_gradients(ctx, r->params));
    MT_TRY(mt_grad_norm(ctx, r->params, &norm));
    MT_TRY(mt_optimizer_step(ctx, &adamw, 1e-3f, 1.0f));
    mt_optimizer_destroy(ctx, &adamw);
    mt_gpt_saved_destroy(&saved);
    return MT_SUCCESS;
}

static void test_a_gpt_knows_its_placements(void **state) {
    mt_placement loss;
    test_rank r;
    (void)state;
    for (int sp = 0; sp <= 1; sp++) {
        test_paper_rank(4, 1, (mt_grid_desc){.tp = 2}, &meta, &r);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, gpt_step(&r, sp, MT_SPLIT_ROWS, &loss));
        assert_int_equal(loss, MT_SPLIT_COLS); /* a column for each token */
        test_paper_rank_close(&r);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mistakes_are_refused),
        cmocka_unit_test(test_one_rank_may_do_all_of_them),
        cmocka_unit_test(test_nothing_is_written),
        cmocka_unit_test(test_sequence_parallelism),
        cmocka_unit_test(test_placements_of_views),
        cmocka_unit_test(test_zeros_and_memory_of_the_caller),
        cmocka_unit_test(test_own_rules),
        cmocka_unit_test(test_parameters_keep_their_placement),
        cmocka_unit_test(test_products_of_own_heads),
        cmocka_unit_test(test_an_operand_that_must_be_left_out),
        cmocka_unit_test(test_data_ranks),
        cmocka_unit_test(test_a_partial_sum_does_not_travel),
        cmocka_unit_test(test_a_gpt_knows_its_placements),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
