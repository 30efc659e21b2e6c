/* test_checking.c - check mode: wrong parallel programs are refused with the call named, right ones are not. */

#define MEGATRON_IMPLEMENTATION
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
    BIAS_IN_PRODUCT, /* the same, in one call with the product */
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
    if (m == GELU_BEFORE_G) MT_TRY(mt_activation_forward(ctx, MT_GELU_TANH, t->y, mt_none(), t->dx));
    if (m == GELU_BEFORE_G) MT_TRY(mt_copy(ctx, t->dx, t->y));
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
    MT_TRY(mt_linear_forward(ctx, t->a, b->w2->value, m == BIAS_IN_PRODUCT ? b->b2->value : mt_none(), t->y));
    if (m == BIAS_BEFORE_G) MT_TRY(mt_bias_forward(ctx, t->y, b->b2->value));
    if (m == RESIDUAL_BEFORE) MT_TRY(mt_add(ctx, t->x, t->y, t->y));
    if (m == NORM_BEFORE_G)
        MT_TRY(mt_norm_forward(ctx, MT_RMS_NORM, t->y, b->gain->value, mt_none(), 1e-5f, t->y, t->stats));
    MT_TRY(own_reduce(r, t, m));
    if (m != BIAS_BEFORE_G && m != BIAS_IN_PRODUCT && m != NO_G_NO_BIAS)
        MT_TRY(mt_bias_forward(ctx, t->y, b->b2->value));
    return m == RESIDUAL_BEFORE ? MT_SUCCESS : mt_add(ctx, t->x, t->y, t->y);
}

static mt_status own_backward(const test_rank *r, const own_block *b, own_tensors *t, mistake m) {
    mt_context *ctx = r->ctx;
    if (m == SCATTERED_DY) MT_TRY(mt_declare(ctx, r->grid.tp, t->dy, MT_SPLIT_COLS));
    else MT_TRY(mt_reduce_from_tensor_region_backward(ctx, r->grid.tp, t->dy));
    MT_TRY(mt_linear_gradients(ctx, t->dy, t->a, b->w2->grad, b->b2->grad));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1.0f, t->dy, b->w2->value, 0.0f, t->da));
    MT_TRY(mt_activation_backward(ctx, MT_GELU_TANH, t->h, t->da, t->h, mt_none()));
    MT_TRY(mt_linear_gradients(ctx, t->h, t->n, b->w1->grad, b->b1->grad));
    MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1.0f, t->h, b->w1->value, 0.0f, t->dn));
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

static const mt_context_desc meta = {.device = MT_DEVICE_META, .check = 1};

static void test_mistakes_are_refused(void **state) {
    static const char *const words[MISTAKES] = {
        [NO_F] = "mt_norm_backward \"norm\": dy is partial over \"tensor\" (2 ranks)|mt_gemm at fc1|replicated|"
                 "mt_copy_to_tensor_region_backward",
        [F_TWICE] =
            "mt_copy_to_tensor_region_backward after \"fc1\": dx is replicated|must be partial: this call would add "
            "up equal values",
        [NO_G] = "mt_bias_forward \"fc2\": y is partial|mt_linear_forward at fc2|replicated|"
                 "mt_reduce_from_tensor_region_forward",
        [NO_G_NO_BIAS] = "mt_add|b is partial|mt_linear_forward at fc2|mt_reduce_from_tensor_region_forward",
        [G_TWICE] =
            "mt_reduce_from_tensor_region_forward|y is replicated|must be partial: this call would add up equal values",
        [F_FOR_G] = "mt_copy_to_tensor_region_forward|x is partial|must be replicated",
        [BIAS_BEFORE_G] = "mt_bias_forward|y is partial|mt_reduce_from_tensor_region_forward",
        [NORM_BEFORE_G] = "mt_norm_forward|x is partial|mt_linear_forward at fc2",
        [BIAS_IN_PRODUCT] =
            "mt_linear_forward \"fc2\": bias, 'fc2.bias', is replicated over|must be left out or partial: each "
            "rank would add it to its term of a sum; add it after the sum, or add bias on one rank only, and say so "
            "with "
            "mt_check_view",
        [GELU_BEFORE_G] = "mt_activation_forward|h is partial|mt_reduce_from_tensor_region_forward",
        [RESIDUAL_BEFORE] = "mt_add|b is partial|mt_reduce_from_tensor_region_forward",
        [SCATTERED_DY] = "mt_linear_gradients \"fc2\": dy is split by columns|mt_gather_from_tensor_region",
        [RAW_G_TWICE] = "mt_all_reduce|sendbuf is replicated|must be partial",
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

/* A message names the layer of the call, and that of the call that has made the tensor what it is. */
static void test_messages_name_the_layers(void **state) {
    static const char *const names[][2] = {
        {"decoder.layers.2.mlp.linear_fc2.weight", "decoder.layers.2.mlp.linear_fc2"}, {"w", "w"}, {".w", ".w"}};
    (void)state;
    for (int i = 0; i < 3; i++) {
        mt_param_desc w = {.name = names[i][0], .rows = HIDDEN, .cols = FFN, .placement = MT_SPLIT_COLS};
        mt_param_desc b = {.name = "decoder.layers.3.input_layernorm.weight", .rows = 1, .cols = HIDDEN};
        mt_param *weight, *gain;
        mt_tensor a, y, stats;
        char words[256];
        test_rank r;
        test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &w, &weight));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &b, &gain));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        mt_arena_request requests[] = {
            {&a, MT_F32, TOKENS, FFN / 2}, {&y, MT_F32, TOKENS, HIDDEN}, {&stats, MT_F32, TOKENS, 2}};
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, requests, 3));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, a, MT_SPLIT_COLS));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_linear_forward(r.ctx, a, weight->value, mt_none(), y));
        snprintf(
            words, sizeof words,
            "mt_activation_forward after \"%s\": h is partial over \"tensor\" (2 ranks) since mt_linear_forward at "
            "%s, ",
            names[i][1], names[i][1]);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, words,
                mt_activation_forward(r.ctx, MT_GELU_TANH, y, mt_none(), mt_tensor_cols(a, 0, HIDDEN)));
        snprintf(words, sizeof words,
                 "mt_norm_forward \"decoder.layers.3.input_layernorm\": x is partial over \"tensor\" (2 ranks) since "
                 "mt_linear_forward at %s, must be",
                 names[i][1]);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, words,
                mt_norm_forward(r.ctx, MT_RMS_NORM, y, gain->value, mt_none(), 1e-5f, y, stats));
        test_paper_rank_close(&r);
    }
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

/* Views that overlap are refused without data, too, if the context has given out their memory. */
static void test_overlaps_on_meta(void **state) {
    float mine[64];
    mt_tensor t, x, block;
    test_rank r;
    void *memory;
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 8, 8, &t));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_context_alloc(r.ctx, 256, &memory));
    block = mt_tensor_f32((const float *)memory, 8, 8);
    x = mt_tensor_f32(mine, 8, 8);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, NULL, t, MT_UNDECLARED));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_copy: y [4, 8] and x [4, 8] overlap",
            mt_copy(r.ctx, mt_tensor_rows(t, 0, 4), mt_tensor_rows(t, 3, 4)));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_copy: y [4, 8] and x [4, 8] overlap",
            mt_copy(r.ctx, mt_tensor_rows(block, 0, 4), mt_tensor_rows(block, 3, 4)));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, mt_tensor_rows(t, 0, 4), mt_tensor_rows(t, 4, 4)));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, mt_tensor_cols(t, 0, 4), mt_tensor_cols(t, 4, 4)));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, t, block));
    /* one address of the caller's own may stand for several tensors */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, mt_tensor_rows(x, 0, 4), mt_tensor_rows(x, 3, 4)));
    assert_int_equal(mt_context_has_address(r.ctx, t.data), 1);
    assert_int_equal(mt_context_has_address(r.ctx, (const char *)memory + 255), 1);
    assert_int_equal(mt_context_has_address(r.ctx, (const char *)memory + 256), 0);
    assert_int_equal(mt_context_has_address(r.ctx, mine), 0);
    assert_int_equal(mt_context_has_address(NULL, mine), 1);
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
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_linear_forward \"fc1\": x is split by rows|mt_gather_from_sequence_region",
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
    assert_string_equal(mt_placement_name(MT_REPLICATED), "replicated");
    assert_string_equal(mt_placement_name(MT_SPLIT_ROWS), "split by rows");
    assert_string_equal(mt_placement_name(MT_SPLIT_COLS), "split by columns");
    assert_string_equal(mt_placement_name(MT_PARTIAL), "partial");
    assert_string_equal(mt_placement_name(MT_UNDECLARED), "not known");
    assert_string_equal(mt_placement_name((mt_placement)5), "no such placement");
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_declare|placement is 5", mt_declare(r.ctx, r.grid.tp, t, (mt_placement)5));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_declare|placement is -1", mt_declare(r.ctx, r.grid.tp, t, (mt_placement)-1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_declare|comm is NULL", mt_declare(r.ctx, NULL, t, MT_PARTIAL));
    assert_int_equal(mt_declare(NULL, r.grid.tp, t, MT_PARTIAL), MT_ERR_ARGUMENT);
    assert_int_equal(mt_placement_of(NULL, r.grid.tp, t), MT_UNDECLARED);
    test_paper_rank_close(&r);
}

/* Many declarations of runs of rows, beside a list of what each row is. */
static void test_many_pieces(void **state) {
    enum { ROWS = 48 };
    mt_placement rows[ROWS];
    uint64_t seed = 5;
    test_rank r;
    mt_tensor t;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, ROWS, 4, &t));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, t, MT_PARTIAL));
    for (int i = 0; i < ROWS; i++) rows[i] = MT_PARTIAL;
    for (int k = 0; k < 3000; k++) {
        int first = (int)(test_random(&seed) % ROWS), n = 1 + (int)(test_random(&seed) % 8);
        mt_placement p = (mt_placement)(test_random(&seed) % 5);
        if (first + n > ROWS) n = ROWS - first;
        if (k % 50 == 49) first = 0, n = ROWS; /* all of them */
        if (k % 2) {
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, mt_tensor_rows(t, first, n), p));
            for (int i = first; i < first + n; i++) rows[i] = p;
        }
        for (int i = first; i < first + n; i++)
            if (mt_placement_of(r.ctx, r.grid.tp, mt_tensor_rows(t, i, 1)) != rows[i])
                fail_msg("step %d, row %d: %d, expected %d", k, i,
                         (int)mt_placement_of(r.ctx, r.grid.tp, mt_tensor_rows(t, i, 1)), (int)rows[i]);
    }
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
    mt_operand operands[] = {{"y", t[2], MT_ARG_OUT}, {"a", t[0], MT_ARG_IN}, {"b", t[1], MT_ARG_IN}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, t[0], MT_PARTIAL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "my_product|nothing has written b [4, 4]|mt_all_gather or mt_recv|mt_declare",
            mt_rule_check(r.ctx, "my_product", &rule, operands, 3));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, NULL, mt_tensor_rows(t[1], 0, 3), MT_UNDECLARED));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "my_product|nothing has written b [4, 4], or a part of it", /* one row is missing */
            mt_rule_check(r.ctx, "my_product", &rule, operands, 3));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, NULL, t[1], MT_UNDECLARED));
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
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_rule_check(r.ctx, "my_product", &rule, NULL, 0)); /* all are left out */
    mt_check_pause(r.ctx);
    assert_int_equal(mt_check_mode(r.ctx), 0);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_rule_check(r.ctx, "my_product", &rule, operands, 3));
    assert_int_equal(mt_check_resume(r.ctx, MT_ERR_DATA), MT_ERR_DATA);
    assert_int_equal(mt_check_mode(r.ctx), 1);
    test_paper_rank_close(&r);
}

/* The message names this call for x, a term of a sum that must be the sum. */
static void cure_is(const test_rank *r, mt_tensor x, int use, const char *cure) {
    static const mt_rule rule = {"x", "R", "P"};
    const mt_operand operand = {"x", x, MT_ARG_IN | use};
    char words[80];
    snprintf(words, sizeof words, "mine|x is partial|: call mt_%s before", cure);
    REFUSED(r->ctx, MT_ERR_ARGUMENT, words, mt_rule_check(r->ctx, "mine", &rule, &operand, 1));
}

/* What a gradient is follows from the use of an operand and from the rule, whatever operands and calls are called. */
static void test_own_gradients(void **state) {
    static const char forward[] = "reduce_from_tensor_region_forward", backward[] = "copy_to_tensor_region_backward";
    static const mt_rule writes = {"from to", "PP", NULL}, replaces = {"to(to) from", "PP", NULL};
    const mt_dropout none = {.p = 0.0f};
    test_rank r;
    mt_tensor t[4];
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    for (int i = 0; i < 4; i++) {
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &t[i]));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, t[i], MT_PARTIAL));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, t[i], MT_PARTIAL));
    }
    mt_operand o[] = {{"from", t[0], MT_ARG_IN}, {"to", t[1], MT_ARG_OUT}};
    cure_is(&r, t[0], 0, forward);
    cure_is(&r, t[0], MT_ARG_GRADIENT, backward);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_rule_check(r.ctx, "d_backward", &writes, o, 2));
    cure_is(&r, t[1], 0, forward);
    o[1].use |= MT_ARG_GRADIENT;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_rule_check(r.ctx, "mine", &writes, o, 2));
    cure_is(&r, t[1], 0, backward);
    cure_is(&r, mt_tensor_rows(t[1], 1, 2), 0, backward);
    /* sums and products of it, but not what another operator makes of it */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_add(r.ctx, t[3], t[1], t[2]));
    cure_is(&r, t[2], 0, backward);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_add(r.ctx, t[3], t[3], t[2]));
    cure_is(&r, t[2], 0, forward);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, t[3], MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, t[3], MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gemm(r.ctx, MT_NO_TRANS, MT_TRANS, 1, t[1], t[3], 0, t[2]));
    cure_is(&r, t[2], 0, backward);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_dropout_add_forward(r.ctx, t[1], mt_none(), t[1], none, t[2]));
    cure_is(&r, t[2], 0, forward);
    /* it replaces an operand, and is summed over another group */
    o[1].use = MT_ARG_IN_OUT;
    o[1].t = t[2];
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_rule_check(r.ctx, "mine", &replaces, o, 2));
    cure_is(&r, t[2], 0, backward);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.grid.dp, t[2].data, t[2].data, 16, MT_F32, MT_SUM));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, t[2]), MT_REPLICATED);
    cure_is(&r, t[2], 0, backward);
    test_paper_rank_close(&r);
}

/* A name that the rule does not have is no operand that is left out; neither is a pointer that is missing. */
static void test_arguments_of_own_rules(void **state) {
    static const char *const names[] = {"bias", "b", "bia", "biass", "y bias", "", NULL};
    static const mt_rule rule = {"y bias", "RR rR cc", NULL}, unnamed = {NULL, "RR", NULL},
                         caseless = {"y", NULL, NULL};
    test_rank r;
    mt_tensor y, bias;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 1, 4, &bias));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, y, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, bias, MT_REPLICATED));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        mt_operand operands[] = {{"y", y, MT_ARG_IN_OUT}, {names[i], i % 2 ? bias : mt_none(), MT_ARG_IN}};
        char words[128] = "mt_rule_check of my_bias: operands[1].name is NULL";
        if (i == 0) ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_rule_check(r.ctx, "my_bias", &rule, operands, 2));
        if (i == 0) continue;
        if (names[i])
            snprintf(words, sizeof words, "mt_rule_check of my_bias: its rule has no operand '%s', only: y bias",
                     names[i]);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, words, mt_rule_check(r.ctx, "my_bias", &rule, operands, 2));
    }
    mt_operand one = {"y", y, MT_ARG_IN_OUT};
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_rule_check: where is NULL", mt_rule_check(r.ctx, NULL, &rule, &one, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "my_bias: rule is NULL", mt_rule_check(r.ctx, "my_bias", NULL, &one, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "rule.operands is NULL", mt_rule_check(r.ctx, "my_bias", &unnamed, &one, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "rule.cases is NULL", mt_rule_check(r.ctx, "my_bias", &caseless, &one, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "operands is NULL", mt_rule_check(r.ctx, "my_bias", &rule, NULL, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "count is negative", mt_rule_check(r.ctx, "my_bias", &rule, &one, -1));
    assert_int_equal(mt_rule_check(NULL, "my_bias", &rule, &one, 1), MT_ERR_ARGUMENT);
    test_paper_rank_close(&r);
}

/* What a call writes to a parameter or its gradient must fit its placement; a part of it does not decide for the
   whole. */
static void test_parameters_keep_their_placement(void **state) {
    mt_param_desc weight = {.name = "fc.weight", .rows = 4, .cols = 4};
    test_rank r;
    mt_param *w;
    mt_tensor part, unknown, whole;
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &weight, &w));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &part));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &unknown));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 8, 4, &whole));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, whole, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, part, MT_PARTIAL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_copy \"fc\": x is partial|must be replicated", mt_copy(r.ctx, part, w->value));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, NULL, unknown, MT_UNDECLARED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, unknown, w->value));
    check_is(&r, w->value, MT_REPLICATED);
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_declare: the value of 'fc.weight' would be partial over \"tensor\" (2 ranks), must be replicated",
            mt_declare(r.ctx, r.grid.tp, w->value, MT_PARTIAL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_declare: the value of 'fc.weight' would be split by rows over \"data\"",
            mt_declare(r.ctx, r.grid.dp, mt_tensor_rows(w->value, 0, 2), MT_SPLIT_ROWS));
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_declare: the gradient of 'fc.weight' would be partial over \"tensor\"|must be replicated: set "
            "sequence_partial",
            mt_declare(r.ctx, r.grid.tp, w->grad, MT_PARTIAL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_scatter_to_sequence_region: the value of 'fc.weight' would be split by rows over \"tensor\"",
            mt_scatter_to_sequence_region(r.ctx, r.grid.tp, whole, w->value));

    /* zeros in a parameter do not hide its placement */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, w->value, 0.0f));
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

/* Some columns of a single row, as one head of one token, are seen as those of many rows. */
static void test_columns_of_a_single_row(void **state) {
    test_rank r;
    mt_tensor x, rows, scores;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 1, 12, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 12, &rows));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 1, 1, &scores));
    for (int p = MT_REPLICATED; p <= MT_PARTIAL; p++) {
        const mt_placement part = p == MT_SPLIT_COLS ? MT_UNDECLARED : (mt_placement)p;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, (mt_placement)p));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, rows, (mt_placement)p));
        check_is(&r, mt_tensor_cols(x, 4, 4), part);
        check_is(&r, mt_tensor_cols(rows, 4, 4), part);
        check_is(&r, mt_tensor_rows(mt_tensor_cols(rows, 4, 4), 2, 1), part);
    }
    /* nothing is known about the product of a query and a key of the rank's own heads: it is no part of a sum */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_SPLIT_COLS));
    ASSERT_STATUS(
        r.ctx, MT_SUCCESS,
        mt_gemm(r.ctx, MT_NO_TRANS, MT_TRANS, 1.0f, mt_tensor_cols(x, 0, 4), mt_tensor_cols(x, 4, 4), 0.0f, scores));
    check_is(&r, scores, MT_UNDECLARED);
    /* a row that is declared in columns */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, mt_tensor_cols(x, 0, 6), MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, mt_tensor_cols(x, 6, 6), MT_SPLIT_ROWS));
    check_is(&r, x, MT_SPLIT_ROWS);
    /* elements of two rows are split in some way */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, rows, MT_SPLIT_ROWS));
    check_is(&r, mt_tensor_f32((const float *)rows.data + 8, 1, 8), MT_UNDECLARED);
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
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, bias, MT_REPLICATED));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_bias_dropout_add_forward|bias|must be left out",
            mt_bias_dropout_add_forward(r.ctx, x, bias, residual, none, x));
    test_paper_rank_close(&r);
}

/* ---- the place of random words ----------------------------------------------------------------------------------- */

typedef struct place_case {
    mt_placement is; /* over "tensor" */
    int64_t first_row, first_col, global_cols;
    const char *words; /* of the message; NULL: the place is right */
} place_case;

static mt_status drop(const test_rank *r, int backward, const place_case *c, mt_tensor x) {
    mt_dropout d = {.p = 0.5f};
    d.at.first_row = c->first_row, d.at.first_col = c->first_col, d.at.global_cols = c->global_cols;
    MT_TRY(mt_declare(r->ctx, r->grid.tp, x, c->is));
    if (backward) return mt_bias_dropout_add_backward(r->ctx, x, d, x, mt_none());
    return mt_bias_dropout_add_forward(r->ctx, x, mt_none(), mt_none(), d, x);
}

/* Tensor ranks with rows or columns of their own draw words of their own; other ranks draw the same. */
static void test_masks_by_place(void **state) {
    static const place_case cases[] = {
        {MT_SPLIT_ROWS, 8, 0, 4, NULL},
        {MT_SPLIT_ROWS, 40, 0, 4, NULL}, /* of a later micro-batch */
        {MT_SPLIT_ROWS, 0, 0, 4, "dropout.at.first_row is 0|split by rows over \"tensor\"|rank 1 of 2|at least 8|mask"},
        {MT_SPLIT_ROWS, 7, 0, 4, "dropout.at.first_row is 7"},
        {MT_SPLIT_ROWS, 8, 4, 8, "dropout.at.global_cols is 8|no group splits the columns|must be 4"},
        {MT_SPLIT_COLS, 0, 4, 8, NULL},
        {MT_SPLIT_COLS, 0, 8, 12, NULL}, /* of a tensor with other columns before them */
        {MT_SPLIT_COLS, 0, 0, 8, "dropout.at.first_col is 0|split by columns over \"tensor\"|at least 4"},
        {MT_SPLIT_COLS, 8, 4, 8, NULL},
        {MT_REPLICATED, 0, 0, 4, NULL},
        {MT_REPLICATED, 8, 0, 4, NULL},
        {MT_REPLICATED, 0, 4, 8, "dropout.at.global_cols is 8|no group splits the columns of|must be 4|the same mask"},
        {MT_PARTIAL, 0, 4, 8, "dropout.at.global_cols is 8"},
        {MT_UNDECLARED, 0, 4, 8, NULL},
    };
    mt_dropout d = {.p = 0.5f};
    test_rank r;
    mt_tensor x, wide;
    (void)state;
    test_paper_rank(4, 1, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 8, 4, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 8, 8, &wide));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, x, MT_REPLICATED));
    for (size_t i = 0; i < 2 * (sizeof cases / sizeof *cases); i++) {
        const place_case *c = &cases[i / 2];
        if (c->words) REFUSED(r.ctx, MT_ERR_ARGUMENT, c->words, drop(&r, i % 2, c, x));
        else ASSERT_STATUS(r.ctx, MT_SUCCESS, drop(&r, i % 2, c, x));
    }
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_bias_dropout_add_backward|but dx is split", drop(&r, 1, &cases[2], x));
    /* some columns of a tensor may be in any place of it */
    d.at.first_col = 4, d.at.global_cols = 8;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, wide, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, wide, MT_REPLICATED));
    x = mt_tensor_cols(wide, 4, 4);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_dropout_add_forward(r.ctx, x, mt_none(), mt_none(), d, x));
    d.p = 0.0f; /* the place is not read */
    x = wide;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_dropout_add_forward(r.ctx, x, mt_none(), mt_none(), d, x));
    test_paper_rank_close(&r);
}

/* A number of columns that is known to be wrong on the first rank, a parameter in the message, and data ranks. */
static void test_masks_of_other_ranks(void **state) {
    const place_case alone = {MT_SPLIT_COLS, 0, 0, 4, NULL}, all = {MT_SPLIT_COLS, 0, 0, 8, NULL};
    mt_param_desc desc = {.name = "fc2.bias", .rows = 1, .cols = 4};
    mt_dropout d = {.p = 0.5f, .at = {.global_cols = 4}};
    mt_param *bias;
    test_rank r;
    mt_tensor x;
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 8, 4, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, drop(&r, 0, &all, x));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "dropout.at.global_cols is 4|rank 0 of 2|at least 8", drop(&r, 0, &alone, x));
    test_paper_rank_close(&r);
    test_paper_rank(4, 2, (mt_grid_desc){.tp = 2}, &meta, &r); /* the second data rank */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &desc, &bias));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 8, 4, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, x, MT_SPLIT_ROWS));
    REFUSED(
        r.ctx, MT_ERR_ARGUMENT,
        "mt_bias_dropout_add_forward \"fc2\": dropout.at.first_row is 0, but y is split by rows over "
        "\"data\" and this is rank 1 of 2: it must be at least 8, the rank's first row of the whole tensor, so that "
        "ranks do not use the same mask",
        mt_bias_dropout_add_forward(r.ctx, x, bias->value, mt_none(), d, x));
    d.at.first_row = 8;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_dropout_add_forward(r.ctx, x, bias->value, mt_none(), d, x));
    test_paper_rank_close(&r);
}

static mt_status attend(const test_rank *r, const mt_attention_desc *s, mt_tensor qkv, mt_tensor out, mt_tensor lse) {
    mt_tensor q = mt_tensor_cols(qkv, 0, out.cols), k = mt_tensor_cols(qkv, out.cols, out.cols);
    mt_tensor v = mt_tensor_cols(qkv, 2 * out.cols, out.cols), d, dout;
    size_t mark = mt_arena_mark(r->ctx);
    MT_TRY(mt_arena_tensor(r->ctx, MT_F32, qkv.rows, qkv.cols, &d));
    MT_TRY(mt_arena_tensor(r->ctx, MT_F32, out.rows, out.cols, &dout));
    MT_TRY(mt_attention_forward(r->ctx, s, qkv, out, lse));
    MT_TRY(mt_copy(r->ctx, out, dout));
    MT_TRY(mt_attention_backward(r->ctx, s, qkv, out, lse, dout, d));
    MT_TRY(mt_declare(r->ctx, r->grid.tp, q, MT_SPLIT_COLS));
    MT_TRY(mt_dot_product_attention_forward(r->ctx, s, q, k, v, out, lse));
    MT_TRY(mt_dot_product_attention_backward(r->ctx, s, q, k, v, out, lse, dout, mt_tensor_cols(d, 0, out.cols),
                                             mt_tensor_cols(d, out.cols, out.cols),
                                             mt_tensor_cols(d, 2 * out.cols, out.cols)));
    mt_arena_release(r->ctx, mark);
    return mt_declare(r->ctx, r->grid.tp, qkv, MT_SPLIT_COLS);
}

/* Probabilities are numbered by sequences and heads. */
static void test_masks_of_heads(void **state) {
    mt_attention_desc s = {.batch = 2, .seq = 4, .groups = 1, .heads_per_group = 1, .head_dim = 4};
    test_rank r;
    mt_tensor qkv, out, lse, d, dout;
    (void)state;
    test_paper_rank(2, 1, (mt_grid_desc){.tp = 2}, &meta, &r);
    mt_arena_request requests[] = {
        {&qkv, MT_F32, 8, 12}, {&out, MT_F32, 8, 4}, {&lse, MT_F32, 1, 8}, {&d, MT_F32, 8, 12}, {&dout, MT_F32, 8, 4}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, requests, 5));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, dout, MT_SPLIT_COLS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, qkv, MT_SPLIT_COLS));
    s.dropout.p = 0.5f, s.dropout.at.first_col = 2, s.dropout.at.global_cols = 3; /* 2 on the first rank */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, attend(&r, &s, qkv, out, lse));
    s.dropout.at.first_col = 0;
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_attention_forward|dropout.at.first_col is 0, but out is split by columns|at least 1|mask",
            attend(&r, &s, qkv, out, lse));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_attention_backward|dropout.at.first_col is 0, but dqkv is split",
            mt_attention_backward(r.ctx, &s, qkv, out, lse, dout, d));
    s.dropout.p = 0.0f;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, attend(&r, &s, qkv, out, lse));
    test_paper_rank_close(&r);
}

/* The gradient of a bias of all heads is a part of a sum on each rank; that of a rank's own heads is whole. */
static void test_bias_of_scores(void **state) {
    mt_attention_desc s = {.batch = 1, .seq = 4, .groups = 1, .heads_per_group = 1, .head_dim = 4};
    test_rank r;
    mt_tensor qkv, out, lse, d;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    mt_arena_request requests[] = {{&qkv, MT_F32, 4, 12}, {&out, MT_F32, 4, 4},          {&lse, MT_F32, 1, 4},
                                   {&d, MT_F32, 4, 12},   {&s.bias.value, MT_F32, 4, 4}, {&s.bias.grad, MT_F32, 4, 4}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, requests, 6));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, qkv, MT_SPLIT_COLS));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_attention_forward: nothing has written bias [4, 4]",
            mt_attention_forward(r.ctx, &s, qkv, out, lse));
    for (int rows = 0; rows < 2; rows++) {
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_declare(r.ctx, r.grid.tp, s.bias.value, rows ? MT_SPLIT_ROWS : MT_REPLICATED));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, s.bias.grad, 0.0f));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_attention_forward(r.ctx, &s, qkv, out, lse));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_attention_backward(r.ctx, &s, qkv, out, lse, mt_tensor_cols(qkv, 0, 4), d));
        check_is(&r, s.bias.grad, rows ? MT_SPLIT_ROWS : MT_PARTIAL);
    }
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, s.bias.value, MT_PARTIAL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_attention_forward: bias is partial|must be replicated",
            mt_attention_forward(r.ctx, &s, qkv, out, lse));
    test_paper_rank_close(&r);
}

/* A view of this rank's heads in the bias of all heads is what all ranks have, until mt_check_view says that it is not
   so. */
static void test_bias_of_own_heads(void **state) {
    mt_attention_desc s = {.batch = 1, .seq = 4, .groups = 1, .heads_per_group = 1, .head_dim = 4};
    test_rank r;
    mt_tensor qkv, out, lse, d, dout, all;
    (void)state;
    test_paper_rank(2, 1, (mt_grid_desc){.tp = 2}, &meta, &r);
    mt_arena_request requests[] = {{&qkv, MT_F32, 4, 12}, {&out, MT_F32, 4, 4}, {&lse, MT_F32, 1, 4},
                                   {&d, MT_F32, 4, 12},   {&all, MT_F32, 8, 4}, {&s.bias.grad, MT_F32, 4, 4}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, requests, 6));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, qkv, MT_SPLIT_COLS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, all, MT_REPLICATED));
    dout = mt_tensor_cols(qkv, 0, 4);
    s.bias.value = mt_tensor_rows(all, 4, 4);
    for (int own = 0; own < 2; own++) {
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, s.bias.grad, 0.0f));
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_check_view(r.ctx, r.grid.tp, s.bias.value, own ? MT_SPLIT_ROWS : MT_UNDECLARED));
        for (int batch = 0; batch < 2; batch++) { /* the second one adds to dbias */
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_attention_forward(r.ctx, &s, qkv, out, lse));
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_attention_backward(r.ctx, &s, qkv, out, lse, dout, d));
        }
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_view_end(r.ctx, MT_SUCCESS));
        check_is(&r, s.bias.grad, own ? MT_SPLIT_ROWS : MT_PARTIAL);
        check_is(&r, s.bias.value, MT_REPLICATED);
    }
    test_paper_rank_close(&r);
}

/* What mt_place_check does for an operator of the caller's own. */
static void test_place_of_an_own_operator(void **state) {
    mt_place place = {.rows = 4, .cols = 4, .first_row = 4, .global_cols = 4, .what = "random words"};
    test_rank r;
    mt_tensor t;
    (void)state;
    test_paper_rank(2, 1, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &t));
    assert_int_equal(mt_place_check(NULL, "my_noise", "at", "y", t, &place), MT_ERR_ARGUMENT);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, t, MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_place_check(r.ctx, "my_noise", "at", "y", t, &place));
    place.first_row = 3;
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "my_noise: at.first_row is 3|random words",
            mt_place_check(r.ctx, "my_noise", "at", "y", t, &place));
    mt_check_pause(r.ctx);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_place_check(r.ctx, "my_noise", "at", "y", t, &place));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_resume(r.ctx, MT_SUCCESS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, t, 0.0f)); /* zeros fit every place */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_place_check(r.ctx, "my_noise", "at", "y", t, &place));
    test_paper_rank_close(&r);
}

/* mt_sync_gradients sums the gradient of a shared embedding over the embedding group. The program must not. */
static void test_own_sum_over_the_embedding_group(void **state) {
    mt_param_desc desc = {.name = "table", .rows = 8, .cols = 4, .shared_embedding = 1, .init_std = 0.1f};
    mt_tensor x, dy, grad;
    mt_arena_request memory[] = {{&x, MT_F32, 2, 4}, {&dy, MT_F32, 2, 8}};
    mt_param *table;
    test_rank r;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.pp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &desc, &table));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, memory, 2));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, dy, MT_REPLICATED));
    grad = table->grad;
    for (int sums = 1; sums >= 0; sums--) { /* in the second step, nothing is left of the sum in the first one */
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_linear_gradients(r.ctx, dy, x, grad, mt_none()));
        assert_int_equal(mt_placement_of(r.ctx, r.grid.embedding, grad), MT_UNDECLARED);
        if (!sums) break;
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_all_reduce(r.ctx, r.grid.embedding, grad.data, grad.data, 32, MT_F32, MT_SUM));
        assert_int_equal(mt_placement_of(r.ctx, r.grid.embedding, grad), MT_REPLICATED);
        REFUSED(r.ctx, MT_ERR_ARGUMENT,
                "mt_sync_gradients: the gradient of 'table' is replicated over \"embedding\" (2 ranks)",
                mt_sync_gradients(r.ctx, r.params));
    }
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sync_gradients(r.ctx, r.params));
    test_paper_rank_close(&r);
}

/* Makes a step, and memory for its loss. */
static void loss_step_create(test_rank *r, mt_optimizer *adamw, mt_step *step, mt_tensor *loss) {
    mt_param_desc desc = {.name = "gain", .rows = 1, .cols = 4, .init_value = 1};
    mt_param *gain;
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_params_add(r->ctx, r->params, &desc, &gain));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_params_init(r->ctx, r->params, 1));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_optimizer_create(r->ctx, r->params, NULL, adamw));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_step_create(r->ctx, adamw, NULL, 1.0f, step));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_arena_tensor(r->ctx, MT_F32, 1, 1, loss));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_params_zero_grad(r->ctx, r->params));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_sync_gradients(r->ctx, r->params));
}

/* Does the step, and begins the next one. */
static void loss_step_update(test_rank *r, const mt_step *step, mt_tensor loss) {
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_step_update(r->ctx, step, loss));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_params_zero_grad(r->ctx, r->params));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_sync_gradients(r->ctx, r->params));
}

/* The loss decides whether a step is skipped, so all ranks need the same one. */
static void test_loss_of_a_step(void **state) {
    mt_tensor loss;
    mt_optimizer adamw;
    mt_step step;
    test_rank r;
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    loss_step_create(&r, &adamw, &step, &loss);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, loss, MT_SPLIT_ROWS));
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_step_update|loss is split by rows over \"data\" (2 ranks)|must be replicated|mt_all_reduce",
            mt_step_update(r.ctx, &step, loss));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.grid.dp, loss.data, loss.data, 1, MT_F32, MT_SUM));
    loss_step_update(&r, &step, loss);
    mt_step_destroy(r.ctx, &step);
    mt_optimizer_destroy(r.ctx, &adamw);
    test_paper_rank_close(&r);
}

/* Only the last stage of a pipeline computes a loss. */
static void test_loss_of_a_pipeline(void **state) {
    mt_tensor loss;
    mt_optimizer adamw;
    mt_step step;
    test_rank r;
    (void)state;
    test_paper_rank(8, 0, (mt_grid_desc){.tp = 2, .pp = 2}, &meta, &r);
    loss_step_create(&r, &adamw, &step, &loss);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, loss, 0.0f));
    for (int declared = 0; declared < 2; declared++) {
        REFUSED(r.ctx, MT_ERR_ARGUMENT,
                "mt_step_update: loss is not known over \"pipeline\" (2 ranks), must be replicated|mt_broadcast",
                mt_step_update(r.ctx, &step, loss));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, loss, MT_REPLICATED));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, loss, MT_REPLICATED));
    }
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_broadcast(r.ctx, r.grid.pp, NULL, loss.data, 1, MT_F32, 1));
    loss_step_update(&r, &step, loss);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, loss, 0.0f));
    for (int i = 0; i < 2; i++) { /* the program may have written it in between */
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.grid.pp, loss.data, loss.data, 1, MT_F32, MT_SUM));
        loss_step_update(&r, &step, loss);
    }
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, NULL, loss, MT_UNDECLARED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.pp, loss, MT_REPLICATED));
    loss_step_update(&r, &step, loss);
    loss_step_update(&r, &step, mt_none());
    mt_step_destroy(r.ctx, &step);
    mt_optimizer_destroy(r.ctx, &adamw);
    test_paper_rank_close(&r);
}

/* Operands that are not known over the group of mt_check_group do not count, until something is declared over it. */
static void test_a_group_without_declarations(void **state) {
    mt_tensor x, y, gain, stats, sum, out;
    test_rank r;
    (void)state;
    test_paper_rank(8, 0, (mt_grid_desc){.tp = 2, .pp = 2}, &meta, &r);
    mt_check_group(r.ctx, r.grid.pp);
    mt_check_group(r.ctx, NULL);
    mt_check_group(NULL, r.grid.pp);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, x, y)); /* a program without declarations may write x itself */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, x, y));
    assert_int_equal(mt_check_unknown(r.ctx, NULL, 0), 0);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 2, &stats));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 1, 4, &gain));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 1, 1, &sum));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 1, 1, &out));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, gain, MT_REPLICATED));
    for (int received = 0; received < 2; received++) { /* a result is known when all that was read is */
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_norm_forward(r.ctx, MT_RMS_NORM, x, gain, mt_none(), 1e-5f, y, stats));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, sum, 0.0f));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sum(r.ctx, y, sum)); /* "RR rP": replicated or partial, */
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_activation_forward(r.ctx, MT_TANH, sum, mt_none(), out)); /* so the first */
        assert_int_equal(mt_placement_of(r.ctx, r.grid.pp, out), received ? MT_REPLICATED : MT_UNDECLARED);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_broadcast(r.ctx, r.grid.pp, x.data, x.data, 16, MT_F32, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_broadcast(r.ctx, r.grid.pp, gain.data, gain.data, 4, MT_F32, 1));
    }
    assert_int_equal(mt_check_unknown(r.ctx, NULL, 0), 4); /* what was received, over "tensor" */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, NULL, x, MT_UNDECLARED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.pp, y, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, x, y));
    assert_int_equal(mt_check_unknown(r.ctx, NULL, 0), 1);
    mt_check_group(r.ctx, r.grid.pp);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, x, y));
    assert_int_equal(mt_check_unknown(r.ctx, NULL, 0), 1);
    test_paper_rank_close(&r);
}

/* The message names the call that makes x of the newest tensor of this shape and placement. */
static void check_missing(int64_t rows, int64_t cols, mt_placement placement, int older_fits, const char *call) {
    const mt_context_desc where = {.device = MT_DEVICE_META, .check = 1};
    char words[100];
    mt_tensor other, zero, older, x, y;
    mt_arena_request memory[] = {{&other, MT_F32, rows, cols},
                                 {&zero, MT_F32, 4, 16},
                                 {&older, MT_F32, 2, 8},
                                 {&x, MT_F32, 4, 8},
                                 {&y, MT_F32, 4, 8}};
    test_rank r;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2}, &where, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, memory, 5));
    if (older_fits) ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, older, MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, other, placement));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, zero, 0.0f));
    snprintf(words, sizeof words, "mt_copy: nothing has written x [4, 8], |a call is missing, such as %s", call);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, words, mt_copy(r.ctx, x, y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, mt_tensor_cols(zero, 0, 8), x));
    test_paper_rank_close(&r);
}

static void test_the_missing_call_is_named(void **state) {
    const char *any = "mt_gather_from_sequence_region, mt_reduce_scatter_to_sequence_region, ";
    (void)state;
    check_missing(2, 8, MT_SPLIT_ROWS, 1,
                  "mt_gather_from_sequence_region of what is in another tensor since mt_declare");
    check_missing(8, 8, MT_PARTIAL, 1, "mt_reduce_scatter_to_sequence_region of what");
    check_missing(8, 8, MT_REPLICATED, 1, "mt_scatter_to_sequence_region of what");
    check_missing(4, 4, MT_SPLIT_COLS, 1, "mt_gather_from_tensor_region of what");
    check_missing(4, 16, MT_REPLICATED, 1, "mt_scatter_to_tensor_region of what");
    check_missing(2, 8, MT_REPLICATED, 0, any);
    check_missing(8, 8, MT_SPLIT_COLS, 0, any);
    check_missing(4, 4, MT_PARTIAL, 0, any);
    check_missing(4, 16, MT_SPLIT_COLS, 0, any);
    check_missing(8, 16, MT_REPLICATED, 0, any);
}

/* SwiGLU takes the columns of h as gate and up: each rank needs its share of both. */
static void check_parts(int64_t parts, mt_placement placement, mt_status want) {
    mt_param_desc desc = {.name = "gate_up.weight", .rows = 16, .cols = 4, .parts = parts, .init_std = 0.1f};
    mt_tensor x, h, y, dy, dh, w2;
    test_rank r;
    mt_param *w;
    mt_placement split = placement == MT_REPLICATED ? placement : MT_SPLIT_COLS;
    int64_t cols = placement == MT_REPLICATED ? 16 : 8;
    desc.placement = placement;
    test_paper_rank(4, 1, (mt_grid_desc){.tp = 2}, &meta, &r);
    mt_arena_request memory[] = {{&x, MT_F32, 8, 4},         {&h, MT_F32, 8, cols},  {&y, MT_F32, 8, cols / 2},
                                 {&dy, MT_F32, 8, cols / 2}, {&dh, MT_F32, 8, cols}, {&w2, MT_F32, 4, cols / 2}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &desc, &w));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, memory, 6));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, dy, split));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, w2, split));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_linear_forward(r.ctx, x, w->value, mt_none(), h));
    assert_int_equal(mt_activation_forward(r.ctx, MT_SWIGLU, h, mt_none(), y), want);
    if (want != MT_SUCCESS)
        assert_true(test_has_words(
            mt_last_error(r.ctx),
            "mt_activation_forward: h is split by columns over \"tensor\" (2 ranks) since "
            "mt_linear_forward at gate_up|2 parts|'gate_up.weight' has parts 1|set mt_param_desc.parts to 2"));
    assert_int_equal(mt_activation_backward(r.ctx, MT_SWIGLU, h, dy, dh, mt_none()), want);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_activation_forward(r.ctx, MT_GELU_TANH, h, mt_none(), dh)); /* needs no parts */
    assert_int_equal(mt_linear_activation_backward(r.ctx, MT_SWIGLU, x, w2, h, dh, mt_none()), want);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, NULL, h, MT_UNDECLARED));
    assert_int_equal(mt_linear_activation_forward(r.ctx, MT_SWIGLU, x, w->value, mt_none(), h, y), want);
    test_paper_rank_close(&r);
}

static void test_parts(void **state) {
    test_rank r;
    (void)state;
    check_parts(2, MT_SPLIT_ROWS, MT_SUCCESS);
    check_parts(4, MT_SPLIT_ROWS, MT_SUCCESS);
    check_parts(0, MT_SPLIT_ROWS, MT_ERR_ARGUMENT);
    check_parts(0, MT_REPLICATED, MT_SUCCESS); /* each rank has all columns */
    assert_int_equal(mt_parts_check(NULL, "my_glu", "h", mt_none(), 2), MT_ERR_ARGUMENT);
    test_paper_rank(4, 1, (mt_grid_desc){.tp = 2}, &meta, &r);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_parts_check: parts is 0, must be at least 1",
            mt_parts_check(r.ctx, "my_glu", "h", mt_none(), 0));
    test_paper_rank_close(&r);
}

/* Two products write gate and up side by side. */
static void test_parts_of_two_products(void **state) {
    mt_param_desc gate = {.name = "gate.weight", .rows = 16, .cols = 4, .placement = MT_SPLIT_ROWS, .init_std = 0.1f},
                  up = gate;
    mt_tensor x, h, y;
    mt_arena_request memory[] = {{&x, MT_F32, 8, 4}, {&h, MT_F32, 8, 16}, {&y, MT_F32, 8, 8}};
    mt_param *a, *b;
    test_rank r;
    (void)state;
    up.name = "up.weight";
    test_paper_rank(4, 1, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &gate, &a));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &up, &b));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, memory, 3));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_linear_forward(r.ctx, x, a->value, mt_none(), mt_tensor_cols(h, 0, 8)));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_linear_forward(r.ctx, x, b->value, mt_none(), mt_tensor_cols(h, 8, 8)));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_activation_forward(r.ctx, MT_SWIGLU, h, mt_none(), y));
    test_paper_rank_close(&r);
}

/* Some columns of a replicated tensor may be in any place of it, also when a call has moved them to other memory. */
static void test_place_of_some_columns(void **state) {
    const mt_place place = {.rows = 4, .cols = 4, .first_col = 4, .global_cols = 8, .what = "random words"};
    mt_dropout d = {.p = 0.5f, .at = {.first_col = 4, .global_cols = 8}};
    test_rank r;
    mt_tensor x, part, sum;
    (void)state;
    test_paper_rank(2, 1, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 8, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &part));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &sum));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_place_check(r.ctx, "my_noise", "at", "y", mt_tensor_cols(x, 4, 4), &place));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, mt_tensor_cols(x, 4, 4), part));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_place_check(r.ctx, "my_noise", "at", "y", part, &place));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, part, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_dropout_add_forward(r.ctx, part, mt_none(), mt_none(), d, sum));
    /* a sum of such columns */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_PARTIAL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, mt_tensor_cols(x, 4, 4), part));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_reduce_from_tensor_region_forward(r.ctx, r.grid.tp, part));
    check_is(&r, part, MT_REPLICATED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_place_check(r.ctx, "my_noise", "at", "y", part, &place));
    /* the columns of a whole tensor are in one place */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, part, mt_tensor_cols(x, 0, 4)));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, part, mt_tensor_cols(x, 4, 4)));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "my_noise: at.global_cols is 16|no group splits the columns|must be 8",
            mt_place_check(r.ctx, "my_noise", "at", "y", x,
                           &(mt_place){.rows = 4, .cols = 8, .global_cols = 16, .what = "random words"}));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, part, 1.0f));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, part, MT_REPLICATED));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "my_noise: at.global_cols is 8|no group splits the columns|must be 4",
            mt_place_check(r.ctx, "my_noise", "at", "y", part, &place));
    test_paper_rank_close(&r);
}

/* ---- the listener ------------------------------------------------------------------------------------------------ */

typedef struct told {
    const test_rank *r;
    char text[4096];
} told;

/* Adds a line: the call, the parameter, and the operands with what they are over "tensor". */
static void hear(mt_context *ctx, void *user, const char *where, const char *with, const mt_operand *operands,
                 int count) {
    static const char letters[] = "RrcP?";
    told *h = (told *)user;
    size_t n = strlen(h->text), size = sizeof h->text;
    n += (size_t)snprintf(h->text + n, size - n, "%s %s:", where + 3, with ? with : "-");
    for (int i = 0; i < count; i++) {
        const mt_operand *o = &operands[i];
        int use = o->use & MT_ARG_IN_OUT;
        char letter = o->t.data ? letters[mt_placement_of(ctx, h->r->grid.tp, o->t)] : '-';
        n += (size_t)snprintf(h->text + n, size - n, " %s%s=%c", o->name,
                              use == MT_ARG_IN    ? ""
                              : use == MT_ARG_OUT ? ">"
                                                  : "<>",
                              letter);
    }
    snprintf(h->text + n, size - n, "\n");
}

static void test_a_listener_is_told_of_each_call(void **state) {
    static const char expected[] =
        "norm_forward norm.weight: x=R gain=R bias=- y>=R stats>=R\n"
        "copy_to_tensor_region_forward -: x=R\n"
        "linear_forward fc1.weight: weight=r x=R y>=c bias=c\n"
        "activation_forward -: y>=c h=c bias=-\n"
        "linear_forward fc2.weight: weight=c x=c y>=P bias=-\n"
        "reduce_from_tensor_region_forward -: y<>=R\n"
        "bias_forward fc2.bias: y<>=R bias=R\n"
        "add -: y>=R a=R b=R\n"
        "reduce_from_tensor_region_backward -: dy=R\n"
        "linear_gradients fc2.weight: dy=R x=c dweight<>=c dbias<>=R\n"
        "gemm fc2.weight: c>=c a=R b=c\n"
        "activation_backward -: dy=c h=c dh>=c dbias<>=-\n"
        "linear_gradients fc1.weight: dy=c x=R dweight<>=r dbias<>=c\n"
        "gemm fc1.weight: c>=P a=c b=r\n"
        "copy_to_tensor_region_backward -: dx<>=R\n"
        "norm_backward norm.weight: x=R gain=R dbias<>=- stats=R dy=R dresidual=R dx>=R dgain<>=R\n";
    told h = {NULL, ""};
    test_rank r;
    own_block b;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    h.r = &r;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, own_create(&r, &b));
    mt_check_listen(r.ctx, hear, &h);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, own_step(&r, &b, NO_MISTAKE));
    assert_string_equal(h.text, expected);
    h.text[0] = 0;
    assert_int_equal(own_step(&r, &b, NO_G), MT_ERR_ARGUMENT);
    assert_non_null(strstr(h.text, "linear_forward fc2.weight:")); /* the last call that was accepted */
    assert_null(strstr(h.text, "bias_forward fc2.bias:"));
    h.text[0] = 0;
    mt_check_listen(r.ctx, NULL, NULL);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, own_step(&r, &b, NO_MISTAKE));
    assert_string_equal(h.text, "");
    test_paper_rank_close(&r);
}

/* Communication from one tensor to another, without a result, of a parameter, and by the caller's own collectives. */
static void test_a_listener_is_told_of_communication(void **state) {
    mt_param_desc weight = {.name = "fc.weight", .rows = 4, .cols = 4, .placement = MT_SPLIT_ROWS};
    told h = {NULL, ""};
    test_rank r;
    mt_param *w;
    mt_tensor x, y, all;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    h.r = &r;
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &weight, &w));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    mt_arena_request requests[] = {{&x, MT_F32, 4, 4}, {&y, MT_F32, 2, 4}, {&all, MT_F32, 4, 4}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, requests, 3));
    mt_check_listen(r.ctx, hear, &h);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_PARTIAL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_reduce_scatter_to_sequence_region(r.ctx, r.grid.tp, x, y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_gather(r.ctx, r.grid.tp, y.data, all.data, 8, MT_F32));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy_to_tensor_region_forward(r.ctx, r.grid.tp, all));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gather_from_sequence_region(r.ctx, r.grid.tp, w->value, x));
    assert_string_equal(h.text, "reduce_scatter_to_sequence_region -: x=P y>=r\n"
                                "all_gather -: sendbuf=r recvbuf>=R\n"
                                "copy_to_tensor_region_forward -: x=R\n"
                                "gather_from_sequence_region fc.weight: x=r y>=R\n");
    test_paper_rank_close(&r);
}

/* Without groups of several ranks operators are told, and without check mode nothing. */
static void test_a_listener_of_one_rank(void **state) {
    const mt_context_desc plain = {.check = 0};
#ifdef MT_TEST_CHECK_ALL_H /* check_all.h: no context is without check mode */
    const int without = 1;
#else
    const int without = 0;
#endif
    told h = {NULL, ""};
    test_rank r;
    mt_tensor x;
    (void)state;
    for (int on = 1; on >= without; on--) {
        test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, on ? &meta : &plain, &r);
        h.r = &r;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 2, 2, &x));
        mt_check_listen(r.ctx, hear, &h);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, x, x));
        assert_string_equal(h.text, on ? "copy -: x=? y>=?\n" : "");
        h.text[0] = 0;
        test_paper_rank_close(&r);
    }
    mt_check_listen(NULL, hear, &h);
}

/* A chunk of a gather or of a reduce-scatter has the blocks of some ranks. They alone are checked and noted. */
static void test_chunks_of_ranks(void **state) {
    (void)state;
    for (int rank = 0; rank < 3; rank++) {
        told h = {NULL, ""};
        test_rank r;
        mt_tensor part, whole, copy;
        test_paper_rank(3, rank, (mt_grid_desc){.tp = 3}, &meta, &r);
        h.r = &r;
        mt_arena_request requests[] = {{&part, MT_F32, 4, 4}, {&whole, MT_F32, 12, 4}, {&copy, MT_F32, 12, 4}};
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, requests, 3));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, part, MT_SPLIT_ROWS));
        mt_check_listen(r.ctx, hear, &h);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gather_ranks_from_sequence_region(r.ctx, r.grid.tp, part, whole, 0, 2));
        assert_string_equal(h.text, "gather_ranks_from_sequence_region -: x=r y>=R\n");
        check_is(&r, mt_tensor_rows(whole, 0, 8), MT_REPLICATED);
        check_is(&r, mt_tensor_rows(whole, 8, 4), MT_UNDECLARED);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_copy: nothing has written x [12, 4], or a part of it",
                mt_copy(r.ctx, whole, copy));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gather_ranks_from_sequence_region(r.ctx, r.grid.tp, part, whole, 2, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, whole, copy));
        check_is(&r, copy, MT_REPLICATED);
        /* the part is this rank's rows of the whole tensor */
        part = mt_tensor_rows(whole, 4 * rank, 4);
        for (int ranks = 1; ranks <= 3; ranks += 2) {
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, part, MT_SPLIT_ROWS));
            for (int first = 0; first < 3; first += ranks)
                ASSERT_STATUS(r.ctx, MT_SUCCESS,
                              mt_gather_ranks_from_sequence_region(r.ctx, r.grid.tp, part, whole, first, ranks));
            check_is(&r, whole, MT_REPLICATED);
        }
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, whole, MT_PARTIAL));
        for (int block = 0; block < 2; block++) {
            mt_tensor rows = mt_tensor_rows(whole, 4 * block, 4);
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, rows, MT_REPLICATED));
            REFUSED(r.ctx, MT_ERR_ARGUMENT,
                    "mt_reduce_scatter_ranks_to_sequence_region: x is replicated|must be partial",
                    mt_reduce_scatter_ranks_to_sequence_region(r.ctx, r.grid.tp, whole, part, 0, 2));
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, rows, MT_PARTIAL));
        }
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, mt_tensor_rows(whole, 8, 4), MT_REPLICATED));
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_reduce_scatter_ranks_to_sequence_region(r.ctx, r.grid.tp, whole, part, 0, 2));
        check_is(&r, part, rank < 2 ? MT_SPLIT_ROWS : MT_REPLICATED);
        check_is(&r, mt_tensor_rows(whole, rank == 0 ? 4 : 0, 4), MT_PARTIAL);
        test_paper_rank_close(&r);
    }
}

/* ---- context ranks ----------------------------------------------------------------------------------------------- */

/* Opens a rank of 2 tensor, 2 context and 2 data ranks, with the parameter "q.weight" [8, 8]. */
static void open_context(const mt_context_desc *where, test_rank *r, mt_param **weight) {
    const mt_param_desc desc = {.name = "q.weight", .rows = 8, .cols = 8};
    test_paper_rank(8, 3, (mt_grid_desc){.tp = 2, .cp = 2}, where, r);
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_params_add(r->ctx, r->params, &desc, weight));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_params_init(r->ctx, r->params, 1));
    ASSERT_STATUS(r->ctx, MT_SUCCESS, mt_params_zero_grad(r->ctx, r->params));
}

/* What is said over data x context holds over data and over context. */
static void test_placements_over_data_and_context(void **state) {
    test_rank r;
    mt_param *weight;
    mt_tensor x, y;
    (void)state;
    open_context(&meta, &r, &weight);
    mt_arena_request memory[] = {{&x, MT_F32, 4, 8}, {&y, MT_F32, 4, 8}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, memory, 2));
    for (int p = MT_REPLICATED; p <= MT_PARTIAL; p++) {
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp_cp, x, (mt_placement)p));
        assert_int_equal(mt_placement_of(r.ctx, r.grid.dp_cp, x), p);
        assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, x), p);
        assert_int_equal(mt_placement_of(r.ctx, r.grid.cp, x), p);
        assert_int_equal(mt_placement_of(r.ctx, r.grid.tp, x), MT_UNDECLARED);
    }
    /* a sum over one of them leaves a term over the other */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.grid.cp, x.data, x.data, 32, MT_F32, MT_SUM));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.cp, x), MT_REPLICATED);
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, x), MT_PARTIAL);
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp_cp, x), MT_UNDECLARED);
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_all_reduce|sendbuf is replicated over \"context\"|call it with the communicator of \"data\"",
            mt_all_reduce(r.ctx, r.grid.dp_cp, x.data, x.data, 32, MT_F32, MT_SUM));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.grid.dp, x.data, x.data, 32, MT_F32, MT_SUM));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp_cp, x), MT_REPLICATED);
    /* a sum over both */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp_cp, x, MT_PARTIAL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.grid.dp_cp, x.data, x.data, 32, MT_F32, MT_SUM));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, x), MT_REPLICATED);
    assert_int_equal(mt_placement_of(r.ctx, r.grid.cp, x), MT_REPLICATED);
    /* the root of a broadcast over both */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp_cp, x, MT_PARTIAL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_broadcast|sendbuf is partial over \"context\"",
            mt_broadcast(r.ctx, r.grid.dp_cp, x.data, y.data, 32, MT_F32, mt_comm_rank(r.grid.dp_cp)));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp_cp, x, MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS,
                  mt_broadcast(r.ctx, r.grid.dp_cp, x.data, y.data, 32, MT_F32, mt_comm_rank(r.grid.dp_cp)));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp_cp, y), MT_REPLICATED);
    /* a view for one call */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_view(r.ctx, r.grid.dp_cp, y, MT_SPLIT_ROWS));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.cp, y), MT_SPLIT_ROWS);
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, y), MT_SPLIT_ROWS);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_view_end(r.ctx, MT_SUCCESS));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp_cp, y), MT_REPLICATED);
    test_paper_rank_close(&r);
}

typedef struct context_step {
    mt_tensor x, q, keys, out, lse, dout, dq, dkeys, dk;
} context_step;

/* Attention of this rank's queries to the keys of all context ranks; keys are values, too. mistake 1: only this rank's
   keys; 2: the gradient of the keys is not summed. */
static mt_status context_attention(const test_rank *r, const mt_param *weight, context_step *t, int mistake) {
    const int64_t keys = mistake == 1 ? 4 : 8;
    const mt_attention_desc d = {.batch = 1,
                                 .seq = 4,
                                 .kv_seq = keys,
                                 .groups = 1,
                                 .heads_per_group = 1,
                                 .head_dim = 8,
                                 .scores.mask = MT_MASK_BIDIRECTIONAL};
    mt_context *ctx = r->ctx;
    mt_tensor k = mistake == 1 ? t->x : t->keys, dk = mt_tensor_rows(t->dkeys, 0, keys);
    MT_TRY(mt_linear_forward(ctx, t->x, weight->value, mt_none(), t->q));
    MT_TRY(mt_gather_from_sequence_region(ctx, r->grid.cp, t->x, t->keys));
    assert_int_equal(mt_placement_of(ctx, r->grid.cp, t->keys), MT_REPLICATED);
    assert_int_equal(mt_placement_of(ctx, r->grid.dp, t->keys), MT_SPLIT_ROWS);
    MT_TRY(mt_dot_product_attention_forward(ctx, &d, t->q, k, k, t->out, t->lse));
    assert_int_equal(mt_placement_of(ctx, r->grid.dp_cp, t->out), MT_SPLIT_ROWS);
    MT_TRY(mt_dot_product_attention_backward(ctx, &d, t->q, k, k, t->out, t->lse, t->dout, t->dq, dk, t->dk));
    if (mistake == 2) MT_TRY(mt_add(ctx, mt_tensor_rows(t->dkeys, 0, 4), t->dq, t->dq));
    return mt_reduce_scatter_to_sequence_region(ctx, r->grid.cp, t->dkeys, mt_tensor_rows(t->dk, 0, 4));
}

static void test_queries_of_context_ranks(void **state) {
    (void)state;
    for (int mistake = 0; mistake < 3; mistake++) {
        test_rank r;
        mt_param *weight;
        context_step t;
        open_context(&meta, &r, &weight);
        mt_arena_request memory[] = {{&t.x, MT_F32, 4, 8},   {&t.q, MT_F32, 4, 8},     {&t.keys, MT_F32, 8, 8},
                                     {&t.out, MT_F32, 4, 8}, {&t.lse, MT_F32, 1, 4},   {&t.dout, MT_F32, 4, 8},
                                     {&t.dq, MT_F32, 4, 8},  {&t.dkeys, MT_F32, 8, 8}, {&t.dk, MT_F32, 8, 8}};
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, memory, 9));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp_cp, t.x, MT_SPLIT_ROWS));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp_cp, t.dout, MT_SPLIT_ROWS));
        if (mistake == 1)
            REFUSED(r.ctx, MT_ERR_ARGUMENT,
                    "mt_dot_product_attention_forward|k is split by rows over \"context\" (2 ranks)|must be "
                    "replicated|mt_gather_from_sequence_region",
                    context_attention(&r, weight, &t, mistake));
        else if (mistake == 2)
            REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_add|a is partial over \"context\" (2 ranks)",
                    context_attention(&r, weight, &t, mistake));
        else ASSERT_STATUS(r.ctx, MT_SUCCESS, context_attention(&r, weight, &t, mistake));
        test_paper_rank_close(&r);
    }
}

/* A gradient is a sum over data x context. One that the program has summed over a part of the ranks is refused. */
static void test_gradients_of_context_ranks(void **state) {
    (void)state;
    for (int over = 0; over < 4; over++) {
        test_rank r;
        mt_param *weight;
        mt_tensor x, dy;
        float norm;
        open_context(&meta, &r, &weight);
        mt_comm *const groups[] = {NULL, r.grid.dp, r.grid.cp, r.grid.dp_cp};
        mt_arena_request memory[] = {{&x, MT_F32, 4, 8}, {&dy, MT_F32, 4, 8}};
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, memory, 2));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp_cp, x, MT_SPLIT_ROWS));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp_cp, dy, MT_SPLIT_ROWS));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_linear_gradients(r.ctx, dy, x, weight->grad, mt_none()));
        assert_int_equal(mt_placement_of(r.ctx, r.grid.dp_cp, weight->grad), MT_PARTIAL);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "each of the 4 data ranks has a part of its sum",
                mt_grad_norm(r.ctx, r.params, &norm));
        if (groups[over])
            ASSERT_STATUS(r.ctx, MT_SUCCESS,
                          mt_all_reduce(r.ctx, groups[over], weight->grad.data, weight->grad.data, 64, MT_F32, MT_SUM));
        if (over > 0)
            REFUSED(r.ctx, MT_ERR_ARGUMENT,
                    over == 2 ? "'q.weight' is replicated over \"context\" (2 ranks)|leave out the sum before"
                              : "'q.weight' is replicated over \"data\" (2 ranks)|leave out the sum before",
                    mt_sync_gradients(r.ctx, r.params));
        else {
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sync_gradients(r.ctx, r.params));
            assert_int_equal(mt_placement_of(r.ctx, r.grid.dp_cp, weight->grad), MT_REPLICATED);
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_grad_norm(r.ctx, r.params, &norm));
        }
        test_paper_rank_close(&r);
    }
}

/* Ranks with other tokens have terms of the gradient of a lookup, and no columns of it. */
static void test_lookups_of_context_ranks(void **state) {
    const mt_context_desc where = {.device = MT_DEVICE_META, .invariant = 1, .invariant_data = 4};
    const mt_embedding_desc words = {.vocab = 16, .features = 8, .shared = 1};
    (void)state;
    for (int over = 0; over < 2; over++) {
        mt_vocab_parallel_embedding e;
        mt_tensor y;
        test_rank r;
        test_paper_rank(4, 0, (mt_grid_desc){.cp = 2, .dp = 2}, &where, &r);
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_parallel_set_options(r.ctx, &(mt_parallel_options){.context.invariant = 2}));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_vocab_parallel_embedding_create(r.ctx, r.params, "words", &words, &e));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
        assert_non_null(e.weight->lookup_grad.data);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 16, 8, &y));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp_cp, y, MT_REPLICATED));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, over ? r.grid.cp : r.grid.dp, y, MT_SPLIT_COLS));
        REFUSED(
            r.ctx, MT_ERR_ARGUMENT,
            over ? "mt_copy \"words\": x is split by columns over \"context\" (2 ranks)|must be replicated or partial"
                 : "mt_copy \"words\": x is split by columns over \"data\" (2 ranks)|must be replicated or partial",
            mt_copy(r.ctx, y, e.weight->lookup_grad));
        test_paper_rank_close(&r);
    }
}

/* Ids that nobody has declared are this rank's. A rotary table is of a whole sequence, unless the program says which
   rows it passes. */
static void test_ids_of_context_ranks(void **state) {
    const mt_attention_desc heads = {.batch = 1, .seq = 4, .groups = 1, .heads_per_group = 1, .head_dim = 2};
    int32_t ids[4] = {0};
    test_rank r;
    mt_param *table;
    mt_tensor y, qkv, rotary;
    (void)state;
    open_context(&meta, &r, &table);
    mt_arena_request memory[] = {{&y, MT_F32, 4, 8}, {&qkv, MT_F32, 4, 6}, {&rotary, MT_F32, 8, 2}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, memory, 3));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_embedding_forward(r.ctx, table->value, 0, ids, 0.0f, y));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp_cp, y), MT_SPLIT_ROWS);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_rotary_table(r.ctx, 100.0f, rotary));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp_cp, qkv, MT_SPLIT_ROWS));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_rotary_forward|qkv is split by rows over \"context\"",
            mt_rotary_forward(r.ctx, &heads, mt_tensor_rows(rotary, 0, 4), qkv));
    ASSERT_STATUS(r.ctx, MT_SUCCESS,
                  mt_check_view(r.ctx, r.grid.cp, mt_tensor_rows(rotary, 4, 4), MT_SPLIT_ROWS)); /* its positions */
    ASSERT_STATUS(r.ctx, MT_SUCCESS,
                  mt_check_view_end(r.ctx, mt_rotary_forward(r.ctx, &heads, mt_tensor_rows(rotary, 4, 4), qkv)));
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
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, m, 0));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, v, 0));
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_adamw_step|grad, 'fc.weight', is partial over \"data\" (2 ranks)|mt_sync_gradients",
            mt_adamw_step(r.ctx, &hyper, w->value, mt_none(), w->grad, m, v));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_broadcast|sendbuf, 'fc.weight', is partial|: call mt_sync_gradients before",
            mt_broadcast(r.ctx, r.grid.dp, w->grad.data, w->grad.data, HIDDEN * HIDDEN, MT_F32, 0));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, y, MT_PARTIAL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_broadcast|sendbuf is partial over \"data\"|: call mt_all_reduce before",
            mt_broadcast(r.ctx, r.grid.dp, y.data, y.data, TOKENS * HIDDEN, MT_F32, 0));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sync_gradients(r.ctx, r.params));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, w->grad), MT_REPLICATED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_adamw_step(r.ctx, &hyper, w->value, mt_none(), w->grad, m, v));
    test_paper_rank_close(&r);
}

static void test_a_partial_sum_does_not_travel(void **state) {
    test_rank r;
    mt_tensor x, gate, dx;
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2, .pp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &gate));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &dx));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, gate, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_PARTIAL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_send|sendbuf is partial over \"tensor\"|mt_reduce_from_tensor_region_forward",
            mt_send(r.ctx, r.grid.pp, x.data, 16, MT_F32, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_all_to_all: sendbuf is partial over \"tensor\"",
            mt_all_to_all(r.ctx, r.grid.pp, x.data, dx.data, 8, MT_F32));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_silu_backward(r.ctx, gate, x, dx));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_send|sendbuf is partial over \"tensor\"|mt_copy_to_tensor_region_backward",
            mt_send(r.ctx, r.grid.pp, dx.data, 16, MT_F32, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_reduce_from_tensor_region_forward(r.ctx, r.grid.tp, x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_send(r.ctx, r.grid.pp, x.data, 16, MT_F32, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_recv(r.ctx, r.grid.pp, x.data, 16, MT_F32, 1));
    check_is(&r, x, MT_UNDECLARED);
    test_paper_rank_close(&r);
}

/* A program may read what is whole or its own, but not its term of a sum. mt_param_gather reads gradients before
   mt_sync_gradients, too. */
static void test_downloads(void **state) {
    test_rank r;
    mt_tensor x, ids;
    mt_param *weight;
    mt_param_desc desc = {.name = "fc1.weight", .rows = 4, .cols = 4, .placement = MT_SPLIT_ROWS};
    float whole[16];
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &desc, &weight));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 2, 4, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_I32, 2, 4, &ids));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_download|nothing has written x", mt_download(r.ctx, x, whole));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_download(r.ctx, ids, whole));
    for (mt_placement p = MT_REPLICATED; p < MT_PARTIAL; p = (mt_placement)(p + 1)) {
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, p));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_download(r.ctx, x, whole));
    }
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_PARTIAL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_download|: x is partial over \"tensor\" (2 ranks)|must be replicated or split by rows or split by "
            "columns: call mt_reduce_from_tensor_region_forward before",
            mt_download(r.ctx, x, whole));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, x, MT_PARTIAL)); /* such as the sum of its losses */
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_download|: x is partial over \"data\"|call mt_all_reduce before",
            mt_download(r.ctx, x, whole));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, x, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, weight->grad, MT_PARTIAL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_download|call mt_sync_gradients before",
            mt_download(r.ctx, weight->grad, whole));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_param_gather(r.ctx, r.params, weight, weight->grad, whole));
    test_paper_rank_close(&r);
}

/* A term of a sum that was computed with a weight split by rows is the gradient of an input, whatever the operand is
   called; with a weight split by columns it is an output. Rows of a replicated parameter may be those of this rank. */
static void test_calls_that_would_help(void **state) {
    test_rank r;
    mt_tensor h, x, rows, y;
    mt_param *fc1, *fc2, *positions;
    mt_param_desc first = {.name = "fc1.weight", .rows = 8, .cols = 4, .placement = MT_SPLIT_ROWS};
    mt_param_desc second = {.name = "fc2.weight", .rows = 4, .cols = 8, .placement = MT_SPLIT_COLS};
    mt_param_desc third = {.name = "positions.weight", .rows = 16, .cols = 4};
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &first, &fc1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &second, &fc2));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &third, &positions));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 2, 4, &h));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 2, 4, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 2, 4, &rows));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 2, 4, &y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, h, MT_SPLIT_COLS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, rows, MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gemm(r.ctx, MT_NO_TRANS, MT_NO_TRANS, 1, h, fc1->value, 0, y));
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_add|is partial over \"tensor\" (2 ranks) since mt_gemm at fc1|: call mt_copy_to_tensor_region_backward "
            "before",
            mt_add(r.ctx, x, y, y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gemm(r.ctx, MT_NO_TRANS, MT_TRANS, 1, h, fc2->value, 0, y));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_add|since mt_gemm at fc2|: call mt_reduce_from_tensor_region_forward before",
            mt_add(r.ctx, x, y, y));
    REFUSED(
        r.ctx, MT_ERR_ARGUMENT,
        "mt_add|is split by rows|must be replicated|, or say with mt_check_view that the view of 'positions.weight' "
        "is of this rank's rows",
        mt_add(r.ctx, rows, mt_tensor_rows(positions->value, 0, 2), rows));
    test_paper_rank_close(&r);
}

/* The sum of the rows of data ranks is a term of the sum over all ranks. A maximum of terms means nothing. */
static void test_sums_and_maxima(void **state) {
    test_rank r;
    mt_tensor x, sum;
    float host[4];
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 3, 4, &x));
    sum = mt_tensor_rows(x, 0, 1);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, x, MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_tree_sum(r.ctx, x));
    check_is(&r, sum, MT_REPLICATED);
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, sum), MT_PARTIAL);
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, mt_tensor_rows(x, 1, 2)), MT_UNDECLARED);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_download|: x is partial over \"data\"|since mt_tree_sum",
            mt_download(r.ctx, sum, host));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_all_reduce|: sendbuf is partial over \"data\"",
            mt_all_reduce(r.ctx, r.grid.dp, sum.data, sum.data, 4, MT_F32, MT_MAX));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.grid.dp, sum.data, sum.data, 4, MT_F32, MT_SUM));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_download(r.ctx, sum, host));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, x, MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.grid.dp, x.data, x.data, 12, MT_F32, MT_MAX));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, x), MT_REPLICATED);
    test_paper_rank_close(&r);
}

/* All ranks have the only group of keys and values, and each has some of the queries: the gradients of keys and values
   are then terms of sums. With two groups this would be wrong. */
static void test_multi_query_attention(void **state) {
    test_rank r;
    mt_tensor q, k, v, out, lse, dq, dk, dv;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    for (int groups = 1; groups <= 2; groups++) {
        mt_attention_desc s = {.batch = 1, .seq = 4, .groups = groups, .heads_per_group = 2, .head_dim = 4};
        int64_t width = groups * 4;
        mt_arena_request requests[] = {{&q, MT_F32, 4, 2 * width},    {&k, MT_F32, 4, width},
                                       {&v, MT_F32, 4, width},        {&out, MT_F32, 4, 2 * width},
                                       {&lse, MT_F32, 2 * groups, 4}, {&dq, MT_F32, 4, 2 * width},
                                       {&dk, MT_F32, 4, width},       {&dv, MT_F32, 4, width}};
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, requests, 8));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, q, MT_SPLIT_COLS));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, k, MT_REPLICATED));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, v, MT_REPLICATED));
        if (groups == 2) {
            REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_dot_product_attention_forward|q is split by columns",
                    mt_dot_product_attention_forward(r.ctx, &s, q, k, v, out, lse));
            break;
        }
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_dot_product_attention_forward(r.ctx, &s, q, k, v, out, lse));
        check_is(&r, out, MT_SPLIT_COLS);
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_dot_product_attention_backward(r.ctx, &s, q, k, v, out, lse, out, dq, dk, dv));
        check_is(&r, dq, MT_SPLIT_COLS);
        check_is(&r, dk, MT_PARTIAL);
        check_is(&r, dv, MT_PARTIAL);
    }
    test_paper_rank_close(&r);
}

/* What nothing has written is not sent, summed or gathered, if the context has `check`. */
static void test_what_is_sent_was_written(void **state) {
    static const mt_context_desc lenient = {.device = MT_DEVICE_META};
    (void)state;
    for (int strict = 0; strict < 2; strict++) {
        test_rank r;
        mt_tensor x, y;
        float mine[16] = {0};
        test_paper_rank(4, 0, (mt_grid_desc){.tp = 2, .pp = 2}, strict ? &meta : &lenient, &r);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &x));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &y));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, mt_tensor_rows(x, 0, 3), MT_REPLICATED));
        if (!strict) {
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_send(r.ctx, r.grid.pp, x.data, 16, MT_F32, 1));
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.world, x.data, mine, 16, MT_F32, MT_SUM));
        }
        if (strict) {
            REFUSED(r.ctx, MT_ERR_ARGUMENT,
                    "mt_send: nothing has written sendbuf [1, 16], or a part of it|: a call is "
                    "missing|mt_declare|MT_UNDECLARED",
                    mt_send(r.ctx, r.grid.pp, x.data, 16, MT_F32, 1));
            REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_send: nothing has written sendbuf",
                    mt_send_recv(r.ctx, r.grid.pp, (float *)x.data + 8, 8, 1, x.data, 8, 1, MT_F32));
            REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_broadcast: nothing has written sendbuf",
                    mt_broadcast(r.ctx, r.grid.pp, x.data, x.data, 16, MT_F32, 0));
            REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_broadcast: nothing has written sendbuf",
                    mt_broadcast(r.ctx, r.grid.tp, x.data, x.data, 16, MT_F32, 0));
            for (int g = 0; g < 3; g++) { /* also over a group of one, and over one that is not followed */
                mt_comm *group = g == 0 ? r.grid.tp : g == 1 ? r.grid.dp : r.grid.pp;
                size_t n = (size_t)mt_comm_size(group);
                REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_all_reduce: nothing has written sendbuf",
                        mt_all_reduce(r.ctx, group, x.data, x.data, 16, MT_F32, MT_SUM));
                REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_reduce_scatter: nothing has written sendbuf",
                        mt_reduce_scatter(r.ctx, group, x.data, mine, 16 / n, MT_F32, MT_SUM));
                REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_all_gather: nothing has written sendbuf",
                        mt_all_gather(r.ctx, group, (float *)x.data + 12, mine, 4, MT_F32));
                REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_all_to_all: nothing has written sendbuf",
                        mt_all_to_all(r.ctx, group, x.data, mine, 16 / n, MT_F32));
            }
            mt_check_pause(r.ctx);
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.grid.pp, x.data, mine, 16, MT_F32, MT_SUM));
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_resume(r.ctx, MT_SUCCESS));
        }
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.grid.pp, x.data, mine, 12, MT_F32, MT_SUM));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_send(r.ctx, r.grid.pp, x.data, 12, MT_F32, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_send(r.ctx, r.grid.pp, mine, 16, MT_F32, 1)); /* not in the arena */
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_recv(r.ctx, r.grid.pp, x.data, 16, MT_F32, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_send(r.ctx, r.grid.pp, x.data, 16, MT_F32, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, NULL, y, MT_UNDECLARED));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_send(r.ctx, r.grid.pp, y.data, 16, MT_F32, 1));
        test_paper_rank_close(&r);
    }
}

/* What is known about a received tensor stays; the rest is what the receiver says. */
static void test_what_was_received(void **state) {
    test_rank r;
    mt_tensor x, w, y;
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &w));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare_received(r.ctx, &r.grid, x, MT_REPLICATED, MT_SPLIT_ROWS));
    for (int again = 0; again < 2; again++) {
        check_is(&r, x, MT_REPLICATED);
        assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, x), MT_SPLIT_ROWS);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare_received(r.ctx, &r.grid, x, MT_SPLIT_ROWS, MT_UNDECLARED));
    }
    /* replicated or split by rows: a product may take it, a sum may not */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, NULL, x, MT_UNDECLARED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, w, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare_received(r.ctx, &r.grid, x, MT_UNDECLARED, MT_UNDECLARED));
    check_is(&r, x, MT_UNDECLARED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gemm(r.ctx, MT_NO_TRANS, MT_TRANS, 1.0f, x, w, 0.0f, y));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_reduce_from_tensor_region_forward: y is replicated or split by rows|partial",
            mt_reduce_from_tensor_region_forward(r.ctx, r.grid.tp, x));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_declare_received: grid is NULL",
            mt_declare_received(r.ctx, NULL, x, MT_UNDECLARED, MT_UNDECLARED));
    for (int i = 0; i < 3; i++) {
        const mt_placement bad[] = {(mt_placement)-1, (mt_placement)5, MT_PARTIAL};
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_declare_received: tp is |must be a placement other than MT_PARTIAL",
                mt_declare_received(r.ctx, &r.grid, x, bad[i], MT_UNDECLARED));
        if (i == 2) continue;
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_declare_received: dp is |must be a placement",
                mt_declare_received(r.ctx, &r.grid, x, MT_UNDECLARED, bad[i]));
    }
    /* gradients that the data ranks have not summed travel */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, NULL, x, MT_UNDECLARED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare_received(r.ctx, &r.grid, x, MT_REPLICATED, MT_PARTIAL));
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, x), MT_PARTIAL);
    assert_int_equal(mt_declare_received(NULL, &r.grid, x, MT_UNDECLARED, MT_UNDECLARED), MT_ERR_ARGUMENT);
    test_paper_rank_close(&r);
}

/* After a broadcast, all ranks of its group have the values of the root. */
static void test_a_broadcast(void **state) {
    mt_param_desc weight = {.name = "fc.weight", .rows = 8, .cols = 4, .placement = MT_SPLIT_ROWS};
    (void)state;
    for (int rank = 0; rank < 2; rank++) { /* the root, and the other rank */
        told h = {NULL, ""};
        test_rank r;
        mt_tensor x, y, other;
        mt_param *w;
        test_paper_rank(4, rank, (mt_grid_desc){.tp = 2}, &meta, &r);
        h.r = &r;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &weight, &w));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        mt_arena_request requests[] = {{&x, MT_F32, 4, 4}, {&y, MT_F32, 4, 4}, {&other, MT_F32, 4, 4}};
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, requests, 3));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_SPLIT_ROWS));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, x, MT_SPLIT_ROWS));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, y, MT_PARTIAL));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, y, MT_PARTIAL));
        mt_check_listen(r.ctx, hear, &h);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_broadcast(r.ctx, r.grid.tp, x.data, y.data, 16, MT_F32, 0));
        assert_string_equal(h.text, "broadcast -: recvbuf>=R\n");
        check_is(&r, y, MT_REPLICATED);
        check_is(&r, mt_tensor_cols(y, 0, 2), MT_REPLICATED);
        check_is(&r, x, MT_SPLIT_ROWS);
        assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, y), rank ? MT_UNDECLARED : MT_SPLIT_ROWS);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "the value of 'fc.weight' would be replicated over \"tensor\"|split by rows",
                mt_broadcast(r.ctx, r.grid.tp, x.data, w->value.data, 16, MT_F32, 0));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_PARTIAL));
        if (rank) ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_broadcast(r.ctx, r.grid.tp, NULL, x.data, 16, MT_F32, 0));
        else
            REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_broadcast: sendbuf is partial|mt_reduce_from_tensor_region_forward",
                    mt_broadcast(r.ctx, r.grid.tp, x.data, x.data, 16, MT_F32, 0));
        check_is(&r, x, rank ? MT_REPLICATED : MT_PARTIAL);
        /* over a group of which nothing is known */
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_broadcast(r.ctx, r.world, y.data, y.data, 16, MT_F32, 0));
        check_is(&r, y, rank ? MT_UNDECLARED : MT_REPLICATED);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, y, other)); /* it was written */
        test_paper_rank_close(&r);
    }
}

/* The candidates of all shards are gathered over the tensor group before a token is drawn. */
static void test_sampling(void **state) {
    const mt_sample_desc desc = {.temperature = 1.0f, .top_k = 3};
    mt_tensor logits, all, ids;
    test_rank r;
    (void)state;
    test_paper_rank(4, 1, (mt_grid_desc){.tp = 2}, &meta, &r);
    mt_arena_request requests[] = {{&logits, MT_F32, 4, 8}, {&all, MT_F32, 8, 6}, {&ids, MT_I32, 4, 1}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, requests, 3));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, logits, MT_SPLIT_COLS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, logits, MT_SPLIT_ROWS));
    mt_tensor own = mt_tensor_rows(all, 4, 4);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sample_candidates(r.ctx, &desc, 16, 8, logits, own));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_sample_ids: nothing has written gathered [8, 6], or a part of it",
            mt_sample_ids(r.ctx, &desc, 16, all, 2, (int32_t *)ids.data));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_gather(r.ctx, r.grid.dp, own.data, all.data, 4 * 6, MT_I32));
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_sample_ids: gathered is split by columns over \"tensor\" (2 ranks)|: call mt_all_gather before",
            mt_sample_ids(r.ctx, &desc, 16, all, 2, (int32_t *)ids.data));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sample_candidates(r.ctx, &desc, 16, 8, logits, own));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_gather(r.ctx, r.grid.tp, own.data, all.data, 4 * 6, MT_I32));
    check_is(&r, all, MT_REPLICATED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sample_ids(r.ctx, &desc, 16, all, 2, (int32_t *)ids.data));
    check_is(&r, ids, MT_REPLICATED);
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, ids), MT_SPLIT_ROWS);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_gather(r.ctx, r.grid.tp, ids.data, all.data, 4, MT_I32)); /* to compare */
    test_paper_rank_close(&r);
}

/* The sums and the loss of a step are the same on all ranks. Two tensors with one column are one sum. */
static void test_steps_of_the_callers_own(void **state) {
    mt_step_values values = {.lr = 0.1f};
    mt_tensor whole, part, sums, loss, state_of[2];
    mt_multi_tensor *squares, *update;
    test_rank r;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    mt_arena_request requests[] = {{&whole, MT_F32, 4, 8}, {&part, MT_F32, 4, 4},        {&sums, MT_F32, 1, 2},
                                   {&loss, MT_F32, 1, 1},  {&state_of[0], MT_F32, 4, 4}, {&state_of[1], MT_F32, 4, 4}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, requests, 6));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, whole, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, part, MT_SPLIT_COLS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, sums, 0.0f));
    for (int i = 0; i < 2; i++) ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, state_of[i], 0.0f));
    const mt_square_tensor mixed[] = {{.x = part, .out = 1}, {.x = whole, .out = 1}};
    const mt_adamw_tensor wrong = {
        .param = part, .grad = mt_tensor_cols(whole, 4, 4), .m = state_of[0], .v = state_of[1]};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_multi_tensor_create_squares(r.ctx, mixed, 2, &squares));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_multi_tensor_create_adamw(r.ctx, &wrong, 1, 0, &update));
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_multi_tensor_sum_of_squares: out is partial over \"tensor\" (2 ranks) since "
            "mt_multi_tensor_sum_of_squares, must be replicated",
            mt_multi_tensor_sum_of_squares(r.ctx, squares, sums));
    const mt_adamw hyper = {.beta1 = 0.9f, .beta2 = 0.9f, .eps = 1.0f, .grad_scale = 1.0f, .step = 1};
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_multi_tensor_adamw: param is split by columns|must be replicated",
            mt_multi_tensor_adamw(r.ctx, update, &hyper, NULL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_fill(r.ctx, loss, 0.0f));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_step_decide: sums is partial|must be replicated",
            mt_step_decide(r.ctx, sums, loss, &values));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.grid.tp, sums.data, sums.data, 2, MT_F32, MT_SUM));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_step_decide(r.ctx, sums, loss, &values));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, loss, MT_PARTIAL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_step_decide: loss is partial|must be replicated",
            mt_step_decide(r.ctx, sums, loss, &values));
    mt_multi_tensor_destroy(r.ctx, squares);
    mt_multi_tensor_destroy(r.ctx, update);
    test_paper_rank_close(&r);
}

/* ---- how features are divided, and where positions begin --------------------------------------------------------- */

/* A product with a weight and a bias whose features are divided in `parts` and `bias_parts`. */
static mt_status product_of_parts(int64_t parts, int64_t bias_parts, mt_activation kind, char *text) {
    mt_param_desc weight = {.name = "fc1.weight", .rows = 24, .cols = 4, .placement = MT_SPLIT_ROWS, .parts = parts};
    mt_param_desc bias = {.name = "fc1.bias", .rows = 1, .cols = 24, .placement = MT_SPLIT_COLS, .parts = bias_parts};
    mt_tensor x, h, y;
    mt_param *w, *b;
    mt_status status;
    test_rank r;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    mt_arena_request memory[] = {{&x, MT_F32, 8, 4}, {&h, MT_F32, 8, 12}, {&y, MT_F32, 8, 6}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &weight, &w));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &bias, &b));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, memory, 3));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    if (kind == MT_SWIGLU) { /* the bias comes with the activation */
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_linear_forward(r.ctx, x, w->value, mt_none(), h));
        status = mt_activation_forward(r.ctx, kind, h, b->value, y);
    } else status = mt_linear_forward(r.ctx, x, w->value, b->value, h);
    snprintf(text, MT_ERROR_BYTES, "%s", status ? mt_last_error(r.ctx) : "");
    test_paper_rank_close(&r);
    return status;
}

static void test_parts_of_a_bias(void **state) {
    char text[MT_ERROR_BYTES];
    (void)state;
    assert_int_equal(product_of_parts(2, 2, MT_GELU_TANH, text), MT_SUCCESS);
    assert_int_equal(product_of_parts(2, 2, MT_SWIGLU, text), MT_SUCCESS);
    assert_int_equal(product_of_parts(2, 1, MT_GELU_TANH, text), MT_ERR_ARGUMENT);
    assert_true(test_has_words(text,
                               "mt_linear_forward: 'fc1.weight' has parts 2, but 'fc1.bias' has parts 1|\"tensor\" "
                               "(2 ranks)|set mt_param_desc.parts of both"));
    assert_int_equal(product_of_parts(2, 1, MT_SWIGLU, text), MT_ERR_ARGUMENT);
    assert_true(test_has_words(text, "mt_activation_forward: bias is split by columns|2 parts|'fc1.bias' has parts 1"));
}

/* The features of a product keep their parts in elementwise calls, until a second product. SwiGLU has one part left. */
static mt_status second_product_of_parts(int64_t parts, int64_t second_parts, int how, char *text) {
    mt_param_desc first = {.name = "fc1.weight", .rows = 24, .cols = 4, .placement = MT_SPLIT_ROWS, .parts = parts};
    mt_param_desc second = {.name = "fc2.weight", .rows = 4, .cols = how == 2 ? 12 : 24, .placement = MT_SPLIT_COLS};
    mt_param_desc bias = {.name = "fc1.bias", .rows = 1, .cols = 24, .placement = MT_SPLIT_COLS, .parts = parts};
    mt_tensor x, h, a, y;
    mt_param *w1, *b, *w2;
    mt_status status;
    test_rank r;
    second.parts = second_parts;
    test_paper_rank(2, 1, (mt_grid_desc){.tp = 2}, &meta, &r);
    mt_arena_request memory[] = {
        {&x, MT_F32, 8, 4}, {&h, MT_F32, 8, 12}, {&a, MT_F32, 8, how == 2 ? 6 : 12}, {&y, MT_F32, 8, 4}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &first, &w1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &bias, &b));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &second, &w2));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, memory, 4));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_linear_forward(r.ctx, x, w1->value, mt_none(), h));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_activation_forward(r.ctx, how == 2 ? MT_SWIGLU : MT_GELU_TANH, h, b->value, a));
    if (how != 2) ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_multiply(r.ctx, a, a, a));
    status = how == 1 ? mt_gemm(r.ctx, MT_NO_TRANS, MT_TRANS, 1, a, w2->value, 0, y)
                      : mt_linear_forward(r.ctx, a, w2->value, mt_none(), y);
    snprintf(text, MT_ERROR_BYTES, "%s", status ? mt_last_error(r.ctx) : "");
    test_paper_rank_close(&r);
    return status;
}

static void test_parts_of_a_second_product(void **state) {
    char text[MT_ERROR_BYTES];
    (void)state;
    for (int how = 0; how < 2; how++) {
        for (int64_t parts = 1; parts <= 3; parts++)
            assert_int_equal(second_product_of_parts(parts, parts, how, text), MT_SUCCESS);
        assert_int_equal(second_product_of_parts(2, 1, how, text), MT_ERR_ARGUMENT);
        assert_true(test_has_words(text, ": 'fc2.weight' has parts 1, but 'fc1.bias' has parts 2|parts of both"));
        assert_int_equal(second_product_of_parts(1, 2, how, text), MT_ERR_ARGUMENT);
        assert_int_equal(second_product_of_parts(2, 3, how, text), MT_ERR_ARGUMENT);
    }
    assert_int_equal(second_product_of_parts(2, 1, 2, text), MT_SUCCESS);
}

/* A product of terms and its activation are three calls. */
static void test_an_activation_of_terms(void **state) {
    test_rank r;
    mt_tensor x, w, h, y;
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    mt_arena_request memory[] = {{&x, MT_F32, 4, 8}, {&w, MT_F32, 4, 8}, {&h, MT_F32, 4, 4}, {&y, MT_F32, 4, 4}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, memory, 4));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, x, MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, w, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_SPLIT_COLS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, w, MT_SPLIT_COLS));
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_linear_activation_forward: x and weight are split by columns|: call mt_linear_forward, "
            "mt_reduce_from_tensor_region_forward and mt_activation_forward instead",
            mt_linear_activation_forward(r.ctx, MT_GELU_TANH, x, w, mt_none(), h, y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, w, MT_REPLICATED));
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_linear_activation_forward: x is split by columns|: call mt_gather_from_tensor_region before",
            mt_linear_activation_forward(r.ctx, MT_GELU_TANH, x, w, mt_none(), h, y));
    test_paper_rank_close(&r);
}

/* Views of parameters with other parts: the rows of the queries in a weight of queries, keys and values, and a bias of
   the queries alone. */
static void test_parts_of_views(void **state) {
    mt_param_desc weight = {.name = "qkv.weight", .rows = 24, .cols = 4, .placement = MT_SPLIT_ROWS, .parts = 3};
    mt_param_desc bias = {.name = "q.bias", .rows = 1, .cols = 8, .placement = MT_SPLIT_COLS};
    mt_tensor x, y;
    mt_param *w, *b;
    test_rank r;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    mt_arena_request memory[] = {{&x, MT_F32, 8, 4}, {&y, MT_F32, 8, 4}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &weight, &w));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &bias, &b));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, memory, 2));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_linear_forward(r.ctx, x, mt_tensor_rows(w->value, 0, 4), b->value, y));
    check_is(&r, y, MT_SPLIT_COLS);
    test_paper_rank_close(&r);
}

/* Rows of queries, keys and values, one below the other, are three parts. */
static void test_parts_of_attention(void **state) {
    (void)state;
    for (int parts = 1; parts <= 3; parts += 2) {
        mt_param_desc weight = {
            .name = "qkv.weight", .rows = 24, .cols = 4, .placement = MT_SPLIT_ROWS, .parts = parts};
        const mt_attention_desc heads = {
            .batch = 1, .seq = 8, .groups = 2, .heads_per_group = 1, .head_dim = 2, .qkv_layout = MT_QKV_CONCATENATED};
        const mt_status want = parts == 3 ? MT_SUCCESS : MT_ERR_ARGUMENT;
        mt_tensor x, qkv, out, table;
        mt_param *w;
        test_rank r;
        test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
        mt_arena_request memory[] = {
            {&x, MT_F32, 8, 4}, {&qkv, MT_F32, 8, 12}, {&out, MT_F32, 8, 4}, {&table, MT_F32, 8, 2}};
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &weight, &w));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, memory, 4));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_rotary_table(r.ctx, 100.0f, table));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_linear_forward(r.ctx, x, w->value, mt_none(), qkv));
        assert_int_equal(mt_attention_forward(r.ctx, &heads, qkv, out, mt_none()), want);
        if (want != MT_SUCCESS)
            assert_true(test_has_words(mt_last_error(r.ctx), "mt_attention_forward: qkv is split by columns|3 parts|"
                                                             "'qkv.weight' has parts 1|set mt_param_desc.parts to 3"));
        assert_int_equal(mt_rotary_forward(r.ctx, &heads, table, qkv), want);
        test_paper_rank_close(&r);
    }
}

/* Tokens that sequence parallelism has divided do not begin at position 0 on each rank. Sequences of data ranks do. */
static void test_positions_of_a_rank(void **state) {
    const mt_attention_desc heads = {.batch = 1, .seq = 4, .groups = 2, .heads_per_group = 1, .head_dim = 2};
    mt_tensor qkv, table;
    test_rank r;
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    mt_arena_request memory[] = {{&qkv, MT_F32, 4, 12}, {&table, MT_F32, 4, 2}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, memory, 2));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_rotary_table(r.ctx, 100.0f, table));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, qkv, MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_rotary_forward(r.ctx, &heads, table, qkv));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, qkv, MT_SPLIT_ROWS));
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_rotary_forward: qkv is split by rows over \"tensor\"|mt_gather_from_sequence_region",
            mt_rotary_forward(r.ctx, &heads, table, qkv));
    /* with the rank's own rows of the table, a rank rotates its own tokens */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_view(r.ctx, r.grid.tp, table, MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_view_end(r.ctx, mt_rotary_forward(r.ctx, &heads, table, qkv)));
    check_is(&r, qkv, MT_SPLIT_ROWS);
    test_paper_rank_close(&r);
}

/* A sum over all ranks of the program adds up what the tensor ranks and what the data ranks have. */
static void test_a_sum_over_the_world(void **state) {
    mt_tensor y, loss;
    test_rank r;
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    mt_arena_request memory[] = {{&y, MT_F32, 4, 8}, {&loss, MT_F32, 1, 1}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, memory, 2));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, y, MT_PARTIAL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, y, MT_SPLIT_ROWS));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_all_reduce|sendbuf is split by rows over \"data\"|must be partial",
            mt_all_reduce(r.ctx, r.world, y.data, y.data, 32, MT_F32, MT_SUM));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, y, MT_REPLICATED));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_all_reduce|sendbuf is replicated over \"data\"|would add up equal values",
            mt_all_reduce(r.ctx, r.world, y.data, y.data, 32, MT_F32, MT_SUM));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, y, MT_PARTIAL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.world, y.data, y.data, 32, MT_F32, MT_SUM));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_all_reduce|sendbuf is replicated over \"tensor\"|would add up equal values",
            mt_all_reduce(r.ctx, r.grid.tp, y.data, y.data, 32, MT_F32, MT_SUM));
    /* the mean of a loss that all tensor ranks have, of which the data ranks have a part */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, loss, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, loss, MT_PARTIAL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.world, loss.data, loss.data, 1, MT_F32, MT_SUM));
    test_paper_rank_close(&r);
    /* stages have other tensors: what their sum is, is not known */
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2, .pp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, memory, 2));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, y, MT_PARTIAL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.world, y.data, y.data, 32, MT_F32, MT_SUM));
    check_is(&r, y, MT_UNDECLARED);
    test_paper_rank_close(&r);
}

/* A factor may come before g: its gradient is then a term of a sum. */
static void test_factors_before_the_sum(void **state) {
    mt_param_desc scale = {.name = "scale", .rows = 1, .cols = 8, .sequence_partial = 1};
    mt_tensor x, y, dy, dx;
    mt_param *gain;
    test_rank r;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    mt_arena_request memory[] = {{&x, MT_F32, 4, 8}, {&y, MT_F32, 4, 8}, {&dy, MT_F32, 4, 8}, {&dx, MT_F32, 4, 8}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &scale, &gain));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, memory, 4));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_PARTIAL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, dy, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_multiply_row_forward(r.ctx, x, gain->value, y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_reduce_from_tensor_region_forward(r.ctx, r.grid.tp, y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_multiply_row_backward(r.ctx, x, gain->value, dy, dx, gain->grad));
    check_is(&r, dx, MT_REPLICATED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sync_gradients(r.ctx, r.params));
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "x is partial|: the gradient of 'scale' is synchronised already; call mt_params_zero_grad",
            mt_multiply_row_backward(r.ctx, x, gain->value, dy, dx, gain->grad));
    test_paper_rank_close(&r);
}

/* What a call adds after the sum over the data ranks. */
static void test_a_gradient_after_its_sum(void **state) {
    mt_param_desc desc = {.name = "fc.bias", .rows = 1, .cols = 8};
    mt_tensor dy;
    mt_param *bias;
    test_rank r;
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &desc, &bias));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 8, &dy));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, dy, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, dy, MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_backward(r.ctx, dy, bias->grad));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_backward(r.ctx, dy, bias->grad)); /* another micro-batch */
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sync_gradients(r.ctx, r.params));
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_bias_backward|'fc.bias'|is synchronised already; call mt_params_zero_grad before",
            mt_bias_backward(r.ctx, dy, bias->grad));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_backward(r.ctx, dy, bias->grad));
    test_paper_rank_close(&r);
}

/* The words of a table that is split by rows are a term of an output, not of a gradient. */
static void test_words_without_their_sum(void **state) {
    mt_param_desc words = {.name = "words.weight", .rows = 16, .cols = 8, .placement = MT_SPLIT_ROWS};
    int32_t ids[4] = {0};
    mt_tensor y;
    mt_param *table;
    test_rank r;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &words, &table));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 8, &y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_embedding_forward(r.ctx, table->value, 0, ids, 0.0f, y));
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_sigmoid_forward|since mt_embedding_forward at words|"
            ": call mt_reduce_from_tensor_region_forward before",
            mt_sigmoid_forward(r.ctx, y, y));
    test_paper_rank_close(&r);
}

/* A broadcast into memory with several gradients: what was known about them is forgotten. */
static void test_a_broadcast_to_gradients(void **state) {
    mt_param_desc first = {.name = "a.bias", .rows = 1, .cols = 64}, second = {.name = "b.bias", .rows = 1, .cols = 64};
    (void)state;
    for (int rank = 0; rank < 2; rank++) {
        test_rank r;
        mt_param *p[2];
        size_t n;
        test_paper_rank(4, rank, (mt_grid_desc){.tp = 2}, &meta, &r);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &first, &p[0]));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &second, &p[1]));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        for (int i = 0; i < 2; i++)
            ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, p[i]->grad, MT_PARTIAL));
        n = (size_t)((float *)p[1]->grad.data - (float *)p[0]->grad.data) + 64;
        assert_true(n >= 128 && n < 1024);
        ASSERT_STATUS(r.ctx, MT_SUCCESS,
                      mt_broadcast(r.ctx, r.grid.tp, p[0]->grad.data, p[0]->grad.data, n, MT_F32, 0));
        for (int i = 0; i < 2; i++) {
            assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, p[i]->grad), MT_UNDECLARED);
            check_is(&r, p[i]->grad, MT_REPLICATED); /* all that it may be */
        }
        test_paper_rank_close(&r);
    }
}

/* A broadcast to ranks of other stages is like a send: a part of a sum must not travel, but gradients that are not
   summed over the data ranks may. Check mode does not know the embedding group. */
static void test_a_broadcast_to_other_stages(void **state) {
    test_rank r;
    mt_tensor x, y;
    (void)state;
    test_paper_rank(8, 0, (mt_grid_desc){.tp = 2, .pp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_PARTIAL));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, x, MT_PARTIAL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_broadcast|sendbuf is partial over \"tensor\"|mt_reduce_from_tensor_region_forward",
            mt_broadcast(r.ctx, r.grid.embedding, x.data, x.data, 16, MT_F32, 0));
    check_is(&r, x, MT_PARTIAL);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_reduce_from_tensor_region_forward(r.ctx, r.grid.tp, x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, y, MT_PARTIAL));
    for (int in_place = 0; in_place < 2; in_place++) { /* the root has the tensor as before */
        mt_tensor to = in_place ? x : y;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_broadcast(r.ctx, r.grid.embedding, x.data, to.data, 16, MT_F32, 0));
        check_is(&r, to, MT_REPLICATED);
        check_is(&r, mt_tensor_cols(to, 0, 2), MT_REPLICATED);
    }
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_broadcast(r.ctx, r.grid.embedding, x.data, x.data, 16, MT_F32, 0));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_reduce_from_tensor_region_forward: y is replicated or split by rows|partial",
            mt_reduce_from_tensor_region_forward(r.ctx, r.grid.tp, x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_broadcast(r.ctx, r.grid.embedding, NULL, x.data, 16, MT_F32, 1));
    check_is(&r, x, MT_UNDECLARED);
    test_paper_rank_close(&r);
}

/* ---- sums of sums ------------------------------------------------------------------------------------------------ */

/* A gradient that mt_sync_gradients sums over a group must be a part of a sum there. */
static void test_gradients_that_are_sums(void **state) {
    mt_param_desc gain = {.name = "norm.weight", .rows = 1, .cols = HIDDEN, .sequence_partial = 1};
    mt_param_desc bias = {.name = "fc.bias", .rows = 1, .cols = HIDDEN};
    test_rank r;
    mt_param *g, *b;
    mt_tensor dy;
    (void)state;
    test_paper_rank(4, 1, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &gain, &g));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &bias, &b));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, TOKENS, HIDDEN, &dy));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, dy, MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, dy, MT_REPLICATED));
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_bias_backward|dy is replicated|, or leave out sequence_partial of 'norm.weight'",
            mt_bias_backward(r.ctx, dy, g->grad));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_backward(r.ctx, dy, b->grad));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, dy, MT_SPLIT_ROWS));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_bias_backward|dy is split by rows|set sequence_partial for 'fc.bias'",
            mt_bias_backward(r.ctx, dy, b->grad));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_backward(r.ctx, dy, g->grad));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_broadcast|sendbuf, 'norm.weight', is partial|: call mt_sync_gradients before",
            mt_broadcast(r.ctx, r.grid.tp, g->grad.data, g->grad.data, HIDDEN, MT_F32, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS,
                  mt_all_reduce(r.ctx, r.grid.tp, g->grad.data, g->grad.data, HIDDEN, MT_F32, MT_SUM));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_sync_gradients: the gradient of 'norm.weight' is replicated over \"tensor\"",
            mt_sync_gradients(r.ctx, r.params));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_backward(r.ctx, dy, g->grad));
    ASSERT_STATUS(r.ctx, MT_SUCCESS,
                  mt_all_reduce(r.ctx, r.grid.dp, g->grad.data, g->grad.data, HIDDEN, MT_F32, MT_SUM));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_sync_gradients: the gradient of 'norm.weight' is replicated over \"data\"",
            mt_sync_gradients(r.ctx, r.params));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_bias_backward(r.ctx, dy, g->grad));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_sync_gradients(r.ctx, r.params));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "'norm.weight' is synchronised already; call mt_params_zero_grad",
            mt_bias_backward(r.ctx, dy, g->grad));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_all_gather|is replicated over \"data\"",
            mt_all_gather(r.ctx, r.grid.dp, g->grad.data, dy.data, HIDDEN, MT_F32));
    test_paper_rank_close(&r);
}

/* All parts of a tensor must fit. */
static void test_parts_that_differ(void **state) {
    test_rank r;
    mt_tensor h, y;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, TOKENS, 3 * HIDDEN, &h));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, TOKENS, 3 * HIDDEN, &y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, h, MT_SPLIT_COLS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_activation_forward(r.ctx, MT_GELU_TANH, h, mt_none(), y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, mt_tensor_cols(h, 0, HIDDEN), MT_PARTIAL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_activation_forward|h is split by columns or partial",
            mt_activation_forward(r.ctx, MT_GELU_TANH, h, mt_none(), y));
    test_paper_rank_close(&r);
}

/* Ranks have other rows of a table, and other columns of logits. */
static void test_vocabulary_of_a_rank(void **state) {
    const mt_cross_entropy_shard_desc first = {.vocab = 2 * HIDDEN}, mine = {.vocab = 2 * HIDDEN, .first_col = HIDDEN};
    mt_param_desc words = {.name = "words.weight", .rows = 2 * HIDDEN, .cols = HIDDEN, .placement = MT_SPLIT_ROWS};
    int32_t ids[TOKENS] = {0};
    test_rank r;
    mt_param *table;
    mt_tensor y, logits, stats;
    (void)state;
    test_paper_rank(2, 1, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &words, &table));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, TOKENS, HIDDEN, &y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, TOKENS, HIDDEN, &logits));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, TOKENS, 4, &stats));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_embedding_forward|first_row is 0|rank 1 of 2|at least 16|rows of the table",
            mt_embedding_forward(r.ctx, table->value, 0, ids, 0, y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_embedding_forward(r.ctx, table->value, HIDDEN, ids, 0, y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, logits, MT_SPLIT_COLS));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_cross_entropy_stats|desc.first_col is 0|at least 16|part of the vocabulary",
            mt_cross_entropy_stats(r.ctx, &first, logits, ids, stats));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_cross_entropy_stats(r.ctx, &mine, logits, ids, stats));
    test_paper_rank_close(&r);
}

/* A whole softmax of a rank's columns, and the steps over shards without what joins them. */
static void test_softmax_of_columns(void **state) {
    const mt_softmax_shard_desc first = {2 * HIDDEN, 0, 0}, mine = {2 * HIDDEN, HIDDEN, 0};
    test_rank r;
    mt_tensor x, y, sums;
    (void)state;
    test_paper_rank(2, 1, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, TOKENS, HIDDEN, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, TOKENS, HIDDEN, &y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, TOKENS, 1, &sums));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_SPLIT_COLS));
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_log_softmax_forward: x is split by columns over \"tensor\" (2 ranks)|must be replicated|"
            "call mt_gather_from_tensor_region before",
            mt_log_softmax_forward(r.ctx, x, y));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_softmax_shard_sums|desc.first_col is 0|at least 16|part of the vocabulary",
            mt_softmax_shard_sums(r.ctx, &first, x, x, sums));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_vocab_parallel_log_softmax_forward(r.ctx, r.grid.tp, 2 * HIDDEN, 0, x, y));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_log_softmax_backward: y is split by columns|must be replicated",
            mt_log_softmax_backward(r.ctx, y, x, x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_softmax_shard_sums(r.ctx, &mine, y, x, sums));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_softmax_shard_backward|sums is partial over \"tensor\"|must be replicated",
            mt_softmax_shard_backward(r.ctx, &mine, y, x, sums, x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_all_reduce(r.ctx, r.grid.tp, sums.data, sums.data, TOKENS, MT_F32, MT_SUM));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_softmax_shard_backward(r.ctx, &mine, y, x, sums, x));
    test_paper_rank_close(&r);
}

/* ---- the models of the library ----------------------------------------------------------------------------------- */

/* Counts the calls of f and g. */
typedef struct conjugates {
    int f_backward, g_forward;
} conjugates;

static void count_conjugates(mt_context *ctx, void *user, const char *where, const char *with,
                             const mt_operand *operands, int count) {
    conjugates *c = (conjugates *)user;
    (void)ctx;
    (void)with;
    (void)operands;
    (void)count;
    c->f_backward += strcmp(where, "mt_copy_to_tensor_region_backward") == 0;
    c->g_forward += strcmp(where, "mt_reduce_from_tensor_region_forward") == 0;
}

enum { SEQ = 8, SEQUENCES = 2, VOCAB = 40 };

typedef struct model_kind {
    const char *name;
    int bert, llama, kv_heads, invariant;
    mt_recompute recompute;
} model_kind;

static const model_kind model_kinds[] = {
    {.name = "GPT"},
    {.name = "BERT", .bert = 1},
    {.name = "Llama", .llama = 1, .kv_heads = 2},
    {.name = "Llama whose ranks copy a group", .llama = 1, .kv_heads = 1},
    {.name = "GPT, attention recomputed", .recompute = MT_RECOMPUTE_SELECTIVE},
    {.name = "Llama, recomputed", .llama = 1, .kv_heads = 2, .recompute = MT_RECOMPUTE_FULL},
    {.name = "GPT, invariant", .invariant = 4},
    {.name = "Llama, invariant", .llama = 1, .kv_heads = 4, .invariant = 4},
    {.name = "BERT, invariant, recomputed", .bert = 1, .invariant = 4, .recompute = MT_RECOMPUTE_FULL},
};

typedef struct model_step {
    const model_kind *kind;
    int sp;
    int swaps_slots; /* 1: backward takes the slot of the other micro-batch */
    test_rank r;
    mt_batch batch;
    mt_gpt gpt;
    mt_bert bert;
    mt_gpt_saved gpt_saved[2];
    mt_bert_saved bert_saved[2];
    mt_tensor ids, targets, loss, order, order_loss;
} model_step;

static mt_transformer_layer_desc short_layer(const model_step *m) {
    mt_transformer_layer_desc d = {.hidden = HIDDEN, .heads = 4, .sequence_parallel = m->sp};
    d.kv_heads = m->kind->kv_heads;
    d.recompute = m->kind->recompute;
    d.dropout.attention = d.dropout.hidden = 0.1f;
    if (!m->kind->llama) return d;
    d.norm.kind = MT_RMS_NORM;
    d.activation = MT_SWIGLU;
    d.scores.rotary_base = 10000;
    d.no_bias = 1;
    return d;
}

static mt_status open_model(model_step *m) {
    mt_gpt_desc g = {.vocab = VOCAB, .layers = 4, .max_seq = SEQ, .layer = short_layer(m), .embedding_dropout = 0.1f};
    mt_bert_desc b = {.vocab = VOCAB, .layers = 4, .max_seq = SEQ, .layer = short_layer(m), .token_types = 2};
    mt_context *ctx = m->r.ctx;
    int bert = m->kind->bert;
    mt_arena_request requests[] = {{&m->ids, MT_I32, SEQUENCES * SEQ, 1},
                                   {&m->targets, MT_I32, SEQUENCES * SEQ, 1},
                                   {&m->order, MT_I32, SEQUENCES, 1},
                                   {&m->loss, MT_F32, 1, SEQUENCES * SEQ},
                                   {&m->order_loss, MT_F32, 1, SEQUENCES}};
    m->batch = (mt_batch){.sequences = SEQUENCES, .seq = SEQ, .first_sequence = m->r.grid.dp_rank * SEQUENCES};
    if (bert) MT_TRY(mt_bert_create(ctx, m->r.params, &b, &m->bert));
    else MT_TRY(mt_gpt_create(ctx, m->r.params, &g, &m->gpt));
    MT_TRY(mt_params_init(ctx, m->r.params, 1));
    for (int i = 0; i < 2 && bert; i++) MT_TRY(mt_bert_saved_create(ctx, &m->bert, &m->bert_saved[i]));
    for (int i = 0; i < 2 && !bert; i++) MT_TRY(mt_gpt_saved_create(ctx, &m->gpt, &m->gpt_saved[i]));
    MT_TRY(mt_arena_tensors(ctx, requests, 5));
    return mt_params_zero_grad(ctx, m->r.params);
}

static mt_status model_forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    model_step *m = (model_step *)user;
    const int32_t *ids = (const int32_t *)m->ids.data, *targets = (const int32_t *)m->targets.data;
    if (!m->kind->bert)
        return mt_gpt_stage_forward(ctx, &m->gpt, &m->batch, ids, targets, input, output, m->loss,
                                    &m->gpt_saved[a->slot]);
    return mt_bert_stage_forward(ctx, &m->bert, &m->batch, ids, targets, (const int32_t *)m->order.data, input, output,
                                 m->loss, m->order_loss, &m->bert_saved[a->slot]);
}

static mt_status model_backward(mt_context *ctx, void *user, const mt_action *a, mt_tensor doutput, mt_tensor dinput) {
    model_step *m = (model_step *)user;
    int slot = m->swaps_slots ? 1 - a->slot : a->slot;
    if (m->kind->bert) MT_TRY(mt_bert_stage_backward(ctx, &m->bert, 1.0f, 1.0f, doutput, dinput, &m->bert_saved[slot]));
    else MT_TRY(mt_gpt_stage_backward(ctx, &m->gpt, 1.0f, doutput, dinput, &m->gpt_saved[slot]));
    return mt_accumulate_gradients(ctx, m->r.params);
}

/* A step with two micro-batches, whose ids are not declared. */
static mt_status run_model(model_step *m) {
    mt_context *ctx = m->r.ctx;
    mt_pipeline_stage stage = {.rows = SEQUENCES * SEQ / (m->sp ? 2 : 1),
                               .cols = HIDDEN,
                               .forward = model_forward,
                               .backward = model_backward,
                               .user = m};
    mt_action actions[12];
    mt_optimizer adamw;
    float norm;
    int count;
    MT_TRY(open_model(m));
    MT_TRY(mt_pipeline_schedule(MT_SCHEDULE_1F1B, m->r.grid.pp_size, m->r.grid.pp_rank, 2, actions, 12, &count));
    MT_TRY(mt_pipeline_run(ctx, &m->r.grid, &stage, actions, count));
    for (int i = 0; !m->kind->invariant && i < mt_params_count(m->r.params); i++)
        assert_int_equal(mt_placement_of(ctx, m->r.grid.dp, mt_params_at(m->r.params, i)->grad), MT_PARTIAL);
    MT_TRY(mt_optimizer_create(ctx, m->r.params, NULL, &adamw));
    MT_TRY(mt_sync_gradients(ctx, m->r.params));
    MT_TRY(mt_grad_norm(ctx, m->r.params, &norm));
    MT_TRY(mt_optimizer_step(ctx, &adamw, 1e-3f, 1.0f));
    mt_optimizer_destroy(ctx, &adamw);
    return MT_SUCCESS;
}

static void close_model(model_step *m) {
    for (int i = 0; i < 2; i++) mt_gpt_saved_destroy(&m->gpt_saved[i]);
    for (int i = 0; i < 2; i++) mt_bert_saved_destroy(&m->bert_saved[i]);
    test_paper_rank_close(&m->r);
}

static void check_model(const model_kind *kind, int sp, int stages, int rank) {
    mt_context_desc where = meta;
    conjugates calls = {0, 0};
    model_step m;
    char text[256];
    int64_t unknown;
    memset(&m, 0, sizeof m);
    m.kind = kind;
    m.sp = sp;
    where.invariant = kind->invariant;
    test_paper_rank(4 * stages, rank, (mt_grid_desc){.tp = 2, .pp = stages}, &where, &m.r);
    mt_check_listen(m.r.ctx, count_conjugates, &calls);
    ASSERT_STATUS(m.r.ctx, MT_SUCCESS, run_model(&m));
    if (m.r.grid.pp_rank + 1 == stages) {
        check_is(&m.r, m.loss, MT_REPLICATED);
        assert_int_equal(mt_placement_of(m.r.ctx, m.r.grid.dp, m.loss), MT_SPLIT_COLS); /* one for each token */
    }
    /* of attention and MLP in 4 layers and 2 micro-batches; f of the head, g of the embedding */
    if (stages == 1 && kind == model_kinds) assert_int_equal(calls.f_backward, sp ? 0 : 18);
    if (stages == 1 && kind == model_kinds) assert_int_equal(calls.g_forward, sp ? 0 : 18);
    unknown = mt_check_unknown(m.r.ctx, text, sizeof text);
    if (unknown && !kind->invariant) /* the products of virtual shards are of some columns of a tensor */
        fail_msg("%s, sequence parallelism %d, rank %d of %d: %d unknown operands; %s", kind->name, sp, rank,
                 4 * stages, (int)unknown, text);
    close_model(&m);
}

/* On every rank of 2 tensor and 2 data ranks and 1 or 2 stages, check mode refuses nothing. Outside invariant mode it
   knows what each operand is. */
static void test_models_know_their_placements(void **state) {
    (void)state;
    for (size_t k = 0; k < sizeof model_kinds / sizeof *model_kinds; k++)
        for (int way = 0; way < 4; way++)
            for (int stages = 1 + way / 2, rank = 0; rank < 4 * stages; rank++)
                check_model(&model_kinds[k], way % 2, stages, rank);
}

/* The first stage has two micro-batches in flight. After the run, their slots are memory like any other. */
static void test_slots_of_micro_batches(void **state) {
    model_step m;
    mt_tensor x;
    (void)state;
    memset(&m, 0, sizeof m);
    m.kind = model_kinds;
    test_paper_rank(8, 0, (mt_grid_desc){.tp = 2, .pp = 2}, &meta, &m.r);
    ASSERT_STATUS(m.r.ctx, MT_SUCCESS, run_model(&m));
    ASSERT_STATUS(m.r.ctx, MT_SUCCESS, mt_arena_tensor(m.r.ctx, MT_F32, 256, 256, &x));
    ASSERT_STATUS(m.r.ctx, MT_SUCCESS, mt_fill(m.r.ctx, x, 0.0f));
    for (int i = 0; i < 256; i++)
        ASSERT_STATUS(m.r.ctx, MT_SUCCESS,
                      mt_add(m.r.ctx, mt_tensor_rows(x, i, 1), mt_tensor_rows(x, i, 1), mt_tensor_rows(x, i, 1)));
    close_model(&m);
    memset(&m, 0, sizeof m);
    m.kind = model_kinds;
    m.swaps_slots = 1;
    test_paper_rank(8, 0, (mt_grid_desc){.tp = 2, .pp = 2}, &meta, &m.r);
    REFUSED(m.r.ctx, MT_ERR_ARGUMENT,
            "mt_gemm \"decoder.layers.1.mlp.linear_fc2\": b is in slot 1, but the slot of this action is 0 "
            "(mt_action.slot): it has what another micro-batch keeps",
            run_model(&m));
    close_model(&m);
}

/* A backward on the second stage that takes the input of the other micro-batch, or writes to what that keeps. */
typedef struct slot_user {
    mt_tensor inputs[2], kept[2];
    int writes;
    mt_comm *tp;
} slot_user;

static mt_status slot_forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    slot_user *u = (slot_user *)user;
    (void)output;
    u->inputs[a->slot] = input;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, input.rows, input.cols, &u->kept[a->slot]));
    return mt_copy(ctx, input, u->kept[a->slot]);
}

static mt_status slot_backward(mt_context *ctx, void *user, const mt_action *a, mt_tensor doutput, mt_tensor dinput) {
    slot_user *u = (slot_user *)user;
    mt_tensor kept = u->kept[1 - a->slot];
    size_t count = (size_t)(kept.rows * kept.cols);
    (void)doutput;
    MT_TRY(mt_copy(ctx, u->inputs[a->slot], dinput));
    switch (u->writes) {
    case 0: return mt_copy(ctx, u->inputs[1 - a->slot], dinput);
    case 1: return mt_copy(ctx, dinput, kept);
    case 2: return mt_fill(ctx, kept, 0);
    case 3: return mt_fill(ctx, kept, 1);
    case 4: return mt_broadcast(ctx, u->tp, kept.data, kept.data, count, MT_F32, 0);
    default: return mt_all_reduce(ctx, u->tp, kept.data, kept.data, count, MT_F32, MT_SUM);
    }
}

static void test_inputs_of_micro_batches(void **state) {
    (void)state;
    static const char *const words[] = {"mt_copy: x is", "mt_copy: y is", "mt_fill: y is",
                                        "mt_fill: y is", "mt_broadcast",  "mt_all_reduce"};
    for (int writes = 0; writes < 6; writes++) {
        slot_user u = {.writes = writes};
        char text[80];
        const mt_pipeline_stage stage = {
            .rows = 4, .cols = 8, .forward = slot_forward, .backward = slot_backward, .user = &u};
        mt_action actions[12];
        test_rank r;
        int count;
        test_paper_rank(4, 2, (mt_grid_desc){.tp = 2, .pp = 2}, &meta, &r);
        assert_int_equal(r.grid.pp_rank, 1);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_pipeline_schedule(MT_SCHEDULE_GPIPE, 2, 1, 2, actions, 12, &count));
        u.tp = r.grid.tp;
        snprintf(text, sizeof text, "%s|in slot |(mt_action.slot)", words[writes]);
        REFUSED(r.ctx, MT_ERR_ARGUMENT, text, mt_pipeline_run(r.ctx, &r.grid, &stage, actions, count));
        test_paper_rank_close(&r);
    }
}

/* What the second stage receives is known: it finds its mistakes alone. */
typedef struct own_stage {
    own_block block;
    own_tensors t;
    const test_rank *r;
    mistake m;
} own_stage;

static mt_status own_stage_forward(mt_context *ctx, void *user, const mt_action *a, mt_tensor input, mt_tensor output) {
    own_stage *s = (own_stage *)user;
    (void)a;
    MT_TRY(own_tensors_create(ctx, s->block.b1->value.cols, &s->t));
    if (input.data) s->t.x = input;
    else MT_TRY(mt_declare(ctx, s->r->grid.tp, s->t.x, MT_REPLICATED));
    if (output.data) s->t.y = output;
    MT_TRY(own_forward(s->r, &s->block, &s->t, s->m));
    if (s->m != SCATTERED_DY || !output.data) return MT_SUCCESS;
    return mt_declare(ctx, s->r->grid.tp, output, MT_SPLIT_COLS);
}

static mt_status own_stage_backward(mt_context *ctx, void *user, const mt_action *a, mt_tensor doutput,
                                    mt_tensor dinput) {
    own_stage *s = (own_stage *)user;
    (void)a;
    if (doutput.data) s->t.dy = doutput;
    else MT_TRY(mt_copy(ctx, s->t.y, s->t.dy));
    if (dinput.data) s->t.dx = dinput;
    return own_backward(s->r, &s->block, &s->t, s->m);
}

static mt_status own_pipeline(test_rank *r, mistake m) {
    own_stage s = {.r = r, .m = m};
    mt_pipeline_stage stage = {TOKENS, HIDDEN, MT_F32, own_stage_forward, own_stage_backward, &s};
    mt_action actions[6];
    int count;
    MT_TRY(test_rank_renew(r));
    MT_TRY(own_create(r, &s.block));
    MT_TRY(mt_params_zero_grad(r->ctx, r->params));
    MT_TRY(mt_pipeline_schedule(MT_SCHEDULE_1F1B, 2, r->grid.pp_rank, 1, actions, 6, &count));
    return mt_pipeline_run(r->ctx, &r->grid, &stage, actions, count);
}

static void test_stages_know_what_they_receive(void **state) {
    test_rank r;
    (void)state;
    for (int rank = 0; rank < 8; rank += 5) { /* one of each stage */
        test_paper_rank(8, rank, (mt_grid_desc){.tp = 2, .pp = 2}, &meta, &r);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, own_pipeline(&r, NO_MISTAKE));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_add|b is partial", own_pipeline(&r, NO_G_NO_BIAS));
        REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_norm_backward|dy is partial", own_pipeline(&r, NO_F));
        if (rank == 0)
            REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_pipeline_run|output is split by columns",
                    own_pipeline(&r, SCATTERED_DY));
        test_paper_rank_close(&r);
    }
}

/* Communicators of the same given name are one group, as those of a grid that is created again. Others are groups of
   their own, though a split gives them equal names. Six groups are known. */
static void test_names_of_groups(void **state) {
    enum { GROUPS = 8 };
    test_rank r;
    mt_tensor x;
    mt_comm *groups[GROUPS];
    (void)state;
    test_paper_rank(1, 0, (mt_grid_desc){.tp = 1}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 8, &x));
    for (int g = 0; g < GROUPS; g++) {
        assert_int_equal(mt_comm_create_meta(2, 0, &groups[g]), MT_SUCCESS);
        if (g < 2) mt_comm_set_name(groups[g], "mine");
        if (g == 1) continue;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, groups[g], x, (mt_placement)(MT_REPLICATED + g % 4)));
    }
    assert_string_equal(mt_comm_name(groups[3]), mt_comm_name(groups[2]));
    assert_int_equal(mt_placement_of(r.ctx, groups[1], x), MT_REPLICATED);
    for (int g = 2; g < GROUPS; g++)
        assert_int_equal(mt_placement_of(r.ctx, groups[g], x), g < 7 ? MT_REPLICATED + g % 4 : MT_UNDECLARED);
    for (int g = 0; g < GROUPS; g++) mt_comm_destroy(groups[g]);
    test_paper_rank_close(&r);
}

/* Each part of a view has to fit, however many they are. Over "data", no call makes rows of a rank those of all. */
static void test_many_parts_and_rows_of_data(void **state) {
    static const mt_rule rule = {"x", "R", NULL};
    test_rank r;
    mt_tensor x, y;
    mt_operand operand = {"x", {0}, MT_ARG_IN};
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 16, 4, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 16, 4, &y));
    for (int i = 0; i < 16; i++) {
        mt_placement is = i == 3 ? MT_PARTIAL : MT_REPLICATED;
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, mt_tensor_rows(x, i, 1), is));
    }
    REFUSED(r.ctx, MT_ERR_ARGUMENT,
            "mt_copy: a part of x is partial and another part replicated over \"tensor\" (2 ranks), but the call "
            "treats all of it alike",
            mt_copy(r.ctx, x, y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, mt_tensor_rows(x, 4, 12), mt_tensor_rows(y, 4, 12)));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, y, MT_SPLIT_ROWS));
    operand.t = mt_tensor_rows(y, 4, 12);
    REFUSED_EXACTLY(r.ctx, MT_ERR_ARGUMENT,
                    "x is split by rows over \"data\" (2 ranks) since mt_declare, must be replicated",
                    mt_rule_check(r.ctx, "mine", &rule, &operand, 1));
    test_paper_rank_close(&r);
}

/* What mt_check_view says holds until its end, and only for the view. */
static void test_views_for_some_calls(void **state) {
    test_rank r;
    mt_tensor x, y, mine;
    char text[64];
    (void)state;
    test_paper_rank(4, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 8, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &y));
    mine = mt_tensor_cols(x, 0, 4);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_view(r.ctx, r.grid.tp, mine, MT_SPLIT_COLS));
    check_is(&r, mine, MT_SPLIT_COLS);
    check_is(&r, mt_tensor_rows(mine, 1, 2), MT_SPLIT_COLS);
    check_is(&r, x, MT_REPLICATED);
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, mine), MT_UNDECLARED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_view(r.ctx, r.grid.dp, mine, MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_view(r.ctx, r.grid.tp, mine, MT_UNDECLARED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, mine, y));
    assert_int_equal(mt_check_unknown(r.ctx, text, sizeof text), 0);
    assert_string_equal(text, "");
    check_is(&r, y, MT_SPLIT_COLS);
    assert_int_equal(mt_placement_of(r.ctx, r.grid.dp, y), MT_SPLIT_ROWS);
    assert_int_equal(mt_check_view_end(r.ctx, MT_ERR_DATA), MT_ERR_DATA);
    for (int i = 0; i < 2; i++) ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_check_view_end(r.ctx, MT_SUCCESS));
    check_is(&r, mine, MT_REPLICATED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, mine, y));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_copy(r.ctx, mine, y));
    assert_int_equal(mt_check_unknown(r.ctx, text, sizeof text), 2);
    assert_string_equal(text, "mt_copy: x over \"data\"");
    assert_int_equal(mt_check_unknown(r.ctx, NULL, 0), 0);
    assert_int_equal(mt_check_unknown(NULL, NULL, 0), 0);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_check_view|placement is 5",
            mt_check_view(r.ctx, r.grid.tp, mine, (mt_placement)5));
    assert_int_equal(mt_check_view(NULL, r.grid.tp, mine, MT_PARTIAL), MT_ERR_ARGUMENT);
    test_paper_rank_close(&r);
}

/* Layers that take their columns of a whole tensor leave the tensor what it is. */
static void test_slices_leave_the_tensor_whole(void **state) {
    const mt_linear_desc up = {.in_features = HIDDEN, .out_features = FFN, .gather_output = 1};
    const mt_linear_desc down = {.in_features = FFN, .out_features = HIDDEN};
    mt_column_parallel_linear column;
    mt_row_parallel_linear row;
    mt_linear_saved saved[2];
    test_rank r;
    mt_tensor x, h, y, dh;
    (void)state;
    test_paper_rank(4, 1, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_column_parallel_linear_create(r.ctx, r.params, "up", &up, &column));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_row_parallel_linear_create(r.ctx, r.params, "down", &down, &row));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
    mt_arena_request requests[] = {{&x, MT_F32, TOKENS, HIDDEN},
                                   {&h, MT_F32, TOKENS, FFN},
                                   {&y, MT_F32, TOKENS, HIDDEN},
                                   {&dh, MT_F32, TOKENS, FFN}};
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensors(r.ctx, requests, 4));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, x, MT_SPLIT_ROWS));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_parallel_linear_forward(r.ctx, &column, x, h, &saved[0]));
    check_is(&r, h, MT_REPLICATED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_parallel_linear_forward(r.ctx, &row, h, y, &saved[1]));
    check_is(&r, h, MT_REPLICATED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_parallel_linear_backward(r.ctx, &row, y, dh, &saved[1]));
    check_is(&r, h, MT_REPLICATED);
    check_is(&r, dh, MT_REPLICATED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_parallel_linear_backward(r.ctx, &column, dh, y, &saved[0]));
    check_is(&r, dh, MT_REPLICATED);
    check_is(&r, y, MT_REPLICATED);
    assert_int_equal(mt_check_unknown(r.ctx, NULL, 0), 0);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, h, MT_PARTIAL));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_parallel_linear_forward: x is partial over \"tensor\"|must be replicated",
            mt_parallel_linear_forward(r.ctx, &row, h, y, &saved[1]));
    test_paper_rank_close(&r);
}

/* Cross-attention of a decoder layer over the output of an encoder, as in T5. */
static mt_status run_cross_attention(test_rank *r, int sp, int recompute) {
    const mt_batch batch = {.sequences = SEQUENCES, .seq = SEQ, .first_sequence = r->grid.dp_rank * SEQUENCES};
    mt_cross_attention_desc d = {.hidden = HIDDEN, .heads = 4, .dropout = 0.1f, .sequence_parallel = sp};
    mt_context *ctx = r->ctx;
    mt_cross_attention attention;
    mt_cross_attention_saved saved;
    const int64_t rows = SEQUENCES * SEQ / (sp ? 2 : 1);
    mt_tensor x, memory, y, dx, dmemory, *inputs[] = {&x, &memory};
    mt_arena_request requests[] = {{&x, MT_F32, rows, HIDDEN},
                                   {&memory, MT_F32, rows, HIDDEN},
                                   {&y, MT_F32, rows, HIDDEN},
                                   {&dx, MT_F32, rows, HIDDEN},
                                   {&dmemory, MT_F32, rows, HIDDEN}};
    d.recompute_core = recompute;
    MT_TRY(mt_cross_attention_create(ctx, r->params, "cross", &d, &attention));
    MT_TRY(mt_params_init(ctx, r->params, 1));
    MT_TRY(mt_params_zero_grad(ctx, r->params));
    MT_TRY(mt_arena_tensors(ctx, requests, 5));
    for (int i = 0; i < 2; i++) {
        MT_TRY(mt_declare(ctx, r->grid.tp, *inputs[i], sp ? MT_SPLIT_ROWS : MT_REPLICATED));
        MT_TRY(mt_declare(ctx, r->grid.dp, *inputs[i], MT_SPLIT_ROWS));
    }
    MT_TRY(mt_cross_attention_forward(ctx, &attention, &batch, x, &batch, memory, y, &saved));
    MT_TRY(mt_cross_attention_backward(ctx, &attention, y, dx, dmemory, &saved));
    check_is(r, dx, sp ? MT_SPLIT_ROWS : MT_REPLICATED);
    check_is(r, dmemory, sp ? MT_SPLIT_ROWS : MT_REPLICATED);
    return mt_sync_gradients(ctx, r->params);
}

static void test_cross_attention_knows_its_placements(void **state) {
    char text[256];
    (void)state;
    for (int k = 0; k < 16; k++) {
        test_rank r;
        test_paper_rank(4, k & 3, (mt_grid_desc){.tp = 2}, &meta, &r);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, run_cross_attention(&r, k >> 2 & 1, k >> 3));
        if (mt_check_unknown(r.ctx, text, sizeof text)) fail_msg("case %d: %s", k, text);
        test_paper_rank_close(&r);
    }
}

/* A region function over another group than that of the sum names both. */
static void test_a_sum_over_another_group(void **state) {
    test_rank r;
    mt_tensor x, y;
    (void)state;
    test_paper_rank(8, 1, (mt_grid_desc){.tp = 2, .pp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 4, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 2, 4, &y));
    for (int known = 0; known < 2; known++) {
        const mt_comm *others[] = {r.grid.dp, r.world, r.grid.pp, r.grid.embedding};
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_PARTIAL));
        if (known) ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.dp, x, MT_SPLIT_ROWS));
        for (int i = 0; i < 4; i++) {
            mt_comm *other = (mt_comm *)others[i];
            char words[160];
            snprintf(words, sizeof words,
                     "this is a sum over \"tensor\" since mt_declare, so call it with the communicator of \"tensor\", "
                     "not of \"%s\"",
                     mt_comm_name(other));
            REFUSED(r.ctx, MT_ERR_ARGUMENT, words, mt_reduce_from_tensor_region_forward(r.ctx, other, x));
            REFUSED(r.ctx, MT_ERR_ARGUMENT, words, mt_copy_to_tensor_region_backward(r.ctx, other, x));
            if (mt_comm_size(other) == 2)
                REFUSED(r.ctx, MT_ERR_ARGUMENT, words, mt_reduce_scatter_to_sequence_region(r.ctx, other, x, y));
        }
    }
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_reduce_from_tensor_region_forward(r.ctx, r.grid.tp, x));
    test_paper_rank_close(&r);
}

/* What was released and allocated again is no missing call. */
static void test_memory_that_was_released(void **state) {
    test_rank r;
    mt_tensor x, y, again, out;
    size_t mark;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 8, &x));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 8, &out));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
    for (int64_t rows = 1; rows < 8; rows += 3) {
        mark = mt_arena_mark(r.ctx);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, 4, 8, &y));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_silu_forward(r.ctx, x, y));
        mt_arena_release(r.ctx, mark);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, rows, 8, &again));
        REFUSED(r.ctx, MT_ERR_ARGUMENT,
                "mt_add: nothing has written b [4, 8]|, or mt_arena_release came too early: what was there since "
                "mt_silu_forward was released and overwritten",
                mt_add(r.ctx, x, y, out));
        mt_arena_release(r.ctx, mark);
    }
    test_paper_rank_close(&r);
}

/* Each rank has a term of the gradient of a weight that all ranks have: of LoRA's A, and of keys of all heads. */
static void test_terms_of_the_gradient_of_a_weight(void **state) {
    mt_param_desc a = {.name = "lora_a.weight", .rows = 4, .cols = HIDDEN};
    test_rank r;
    mt_param *p;
    mt_tensor dh, x;
    (void)state;
    for (int partial = 0; partial < 2; partial++) {
        a.sequence_partial = partial;
        test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_add(r.ctx, r.params, &a, &p));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_init(r.ctx, r.params, 1));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_params_zero_grad(r.ctx, r.params));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, TOKENS, HIDDEN, &x));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_arena_tensor(r.ctx, MT_F32, TOKENS, 4, &dh));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, x, MT_REPLICATED));
        ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, dh, MT_PARTIAL));
        if (partial) ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_linear_gradients(r.ctx, dh, x, p->grad, mt_none()));
        else
            REFUSED(r.ctx, MT_ERR_ARGUMENT,
                    "mt_linear_gradients \"lora_a\": dy is partial|: call mt_copy_to_tensor_region_backward before, or "
                    "set sequence_partial for 'lora_a.weight'",
                    mt_linear_gradients(r.ctx, dh, x, p->grad, mt_none()));
        if (!partial)
            REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_gemm \"lora_a\": a is partial|set sequence_partial for 'lora_a.weight'",
                    mt_gemm(r.ctx, MT_TRANS, MT_NO_TRANS, 1, dh, x, 1, p->grad));
        test_paper_rank_close(&r);
    }
}

/* ---- weights of the program's own -------------------------------------------------------------------------------- */

static void test_own_shards(void **state) {
    static float w[8 * 4], dw[8 * 4], bias[8], x[4 * 4], y[4 * 8], z[4 * 4];
    const mt_shard rows = {.rows = 16, .cols = 4, .placement = MT_SPLIT_ROWS, .tp_size = 2};
    const mt_shard one = {.rows = 16, .cols = 1, .placement = MT_SPLIT_ROWS, .tp_size = 2};
    const mt_own_weight list[] = {{"fc.w", rows, MT_F32, w, dw}, {"fc.b", one, MT_F32, bias, NULL}};
    const mt_own_weight no_name = {NULL, rows, MT_F32, w, dw}, no_value = {"v", rows, MT_F32, NULL, dw};
    mt_tensor tx = mt_tensor_f32(x, 4, 4), ty = mt_tensor_f32(y, 4, 8), tw = mt_tensor_f32(w, 8, 4);
    test_rank r;
    (void)state;
    test_paper_rank(2, 0, (mt_grid_desc){.tp = 2}, &meta, &r);
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_declare_shards|list is NULL",
            mt_declare_shards(r.ctx, r.grid.tp, NULL, NULL, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "name of weight 0", mt_declare_shards(r.ctx, r.grid.tp, NULL, &no_name, 1));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "value of weight 0", mt_declare_shards(r.ctx, r.grid.tp, NULL, &no_value, 1));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_linear_forward(r.ctx, tx, tw, mt_none(), ty));
    check_is(&r, ty, MT_UNDECLARED);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare_shards(r.ctx, r.grid.tp, NULL, list, 2));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_declare(r.ctx, r.grid.tp, tx, MT_REPLICATED));
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_linear_forward(r.ctx, tx, tw, mt_tensor_f32(bias, 1, 8), ty));
    check_is(&r, ty, MT_SPLIT_COLS);
    ASSERT_STATUS(r.ctx, MT_SUCCESS, mt_gemm(r.ctx, MT_NO_TRANS, MT_NO_TRANS, 1, ty, tw, 0, mt_tensor_f32(z, 4, 4)));
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "mt_add|partial over \"tensor\"", /* f is missing */
            mt_add(r.ctx, mt_tensor_f32(z, 4, 4), tx, mt_tensor_f32(z, 4, 4)));
    const mt_operand own[] = {{"y", mt_tensor_f32(z, 4, 4), MT_ARG_IN_OUT},
                              {"bias", mt_tensor_f32(x, 1, 4), MT_ARG_IN}};
    REFUSED(r.ctx, MT_ERR_ARGUMENT, "my_bias|y is partial",
            mt_rule_check(r.ctx, "my_bias", mt_rule_of("mt_bias_forward"), own, 2));
    assert_null(mt_rule_of("my_bias"));
    assert_null(mt_rule_of(NULL));
    assert_non_null(mt_rule_of("mt_gemm"));
    mt_declare_forget(r.ctx, z, sizeof z);
    check_is(&r, mt_tensor_f32(z, 4, 4), MT_UNDECLARED);
    test_paper_rank_close(&r);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_own_shards),
    cmocka_unit_test(test_mistakes_are_refused),
    cmocka_unit_test(test_messages_name_the_layers),
    cmocka_unit_test(test_one_rank_may_do_all_of_them),
    cmocka_unit_test(test_nothing_is_written),
    cmocka_unit_test(test_overlaps_on_meta),
    cmocka_unit_test(test_sequence_parallelism),
    cmocka_unit_test(test_placements_of_views),
    cmocka_unit_test(test_many_pieces),
    cmocka_unit_test(test_zeros_and_memory_of_the_caller),
    cmocka_unit_test(test_own_rules),
    cmocka_unit_test(test_own_gradients),
    cmocka_unit_test(test_arguments_of_own_rules),
    cmocka_unit_test(test_parameters_keep_their_placement),
    cmocka_unit_test(test_products_of_own_heads),
    cmocka_unit_test(test_columns_of_a_single_row),
    cmocka_unit_test(test_an_operand_that_must_be_left_out),
    cmocka_unit_test(test_masks_by_place),
    cmocka_unit_test(test_masks_of_other_ranks),
    cmocka_unit_test(test_masks_of_heads),
    cmocka_unit_test(test_bias_of_scores),
    cmocka_unit_test(test_bias_of_own_heads),
    cmocka_unit_test(test_place_of_an_own_operator),
    cmocka_unit_test(test_loss_of_a_step),
    cmocka_unit_test(test_loss_of_a_pipeline),
    cmocka_unit_test(test_the_missing_call_is_named),
    cmocka_unit_test(test_a_group_without_declarations),
    cmocka_unit_test(test_parts),
    cmocka_unit_test(test_own_sum_over_the_embedding_group),
    cmocka_unit_test(test_parts_of_two_products),
    cmocka_unit_test(test_place_of_some_columns),
    cmocka_unit_test(test_a_listener_is_told_of_each_call),
    cmocka_unit_test(test_a_listener_is_told_of_communication),
    cmocka_unit_test(test_a_listener_of_one_rank),
    cmocka_unit_test(test_chunks_of_ranks),
    cmocka_unit_test(test_data_ranks),
    cmocka_unit_test(test_a_partial_sum_does_not_travel),
    cmocka_unit_test(test_downloads),
    cmocka_unit_test(test_names_of_groups),
    cmocka_unit_test(test_many_parts_and_rows_of_data),
    cmocka_unit_test(test_calls_that_would_help),
    cmocka_unit_test(test_sums_and_maxima),
    cmocka_unit_test(test_multi_query_attention),
    cmocka_unit_test(test_what_is_sent_was_written),
    cmocka_unit_test(test_a_broadcast),
    cmocka_unit_test(test_slots_of_micro_batches),
    cmocka_unit_test(test_inputs_of_micro_batches),
    cmocka_unit_test(test_sampling),
    cmocka_unit_test(test_parts_of_a_bias),
    cmocka_unit_test(test_parts_of_attention),
    cmocka_unit_test(test_parts_of_views),
    cmocka_unit_test(test_positions_of_a_rank),
    cmocka_unit_test(test_a_sum_over_the_world),
    cmocka_unit_test(test_placements_over_data_and_context),
    cmocka_unit_test(test_queries_of_context_ranks),
    cmocka_unit_test(test_gradients_of_context_ranks),
    cmocka_unit_test(test_lookups_of_context_ranks),
    cmocka_unit_test(test_ids_of_context_ranks),
    cmocka_unit_test(test_factors_before_the_sum),
    cmocka_unit_test(test_words_without_their_sum),
    cmocka_unit_test(test_a_gradient_after_its_sum),
    cmocka_unit_test(test_steps_of_the_callers_own),
    cmocka_unit_test(test_a_broadcast_to_gradients),
    cmocka_unit_test(test_a_broadcast_to_other_stages),
    cmocka_unit_test(test_what_was_received),
    cmocka_unit_test(test_gradients_that_are_sums),
    cmocka_unit_test(test_parts_that_differ),
    cmocka_unit_test(test_vocabulary_of_a_rank),
    cmocka_unit_test(test_softmax_of_columns),
    cmocka_unit_test(test_models_know_their_placements),
    cmocka_unit_test(test_cross_attention_knows_its_placements),
    cmocka_unit_test(test_parts_of_a_second_product),
    cmocka_unit_test(test_an_activation_of_terms),
    cmocka_unit_test(test_a_sum_over_another_group),
    cmocka_unit_test(test_memory_that_was_released),
    cmocka_unit_test(test_terms_of_the_gradient_of_a_weight),
    cmocka_unit_test(test_stages_know_what_they_receive),
    cmocka_unit_test(test_views_for_some_calls),
    cmocka_unit_test(test_slices_leave_the_tensor_whole),
};

int main(void) { return cmocka_run_group_tests(tests, NULL, NULL); }
