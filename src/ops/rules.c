/* ---- the rules of operators, for check mode ---------------------------------------------------------------------- */

#pragma once
#include "attention.h"
#include "authors.h"
#include "system.h"

#define MTI_ARGS 12 /* maximum number of views of an operator */
#define MTI_NUMBERS 16

typedef struct mti_named_rule {
    const char *name;
    mt_rule rule;
} mti_named_rule;

/* clang-format off */
static const mti_named_rule mti_rules[] = {
    {"mt_copy", {"x y", "RR rr cc PP", NULL}},
    {"mt_convert", {"x y", "RR rr cc PP", NULL}},
    {"mt_add", {"a b y", "RRR rrr ccc PPP", NULL}},
    {"mt_sum", {"x out", "RR rP cP PP", NULL}},
    {"mt_tree_sum", {"x sum", "RR rP cc PP", NULL}},
    {"mt_sum_of_squares", {"x out", "RR rP cP", NULL}},
    {"mt_bias_forward", {"y bias", "RR rR cc PP", NULL}},
    {"mt_bias_backward", {"dy dbias", "RR rP cc PP", NULL}},
    {"mt_linear_forward", {"weight x bias y", "RRRR RrRr rRcc cc-P RP-P PR-P ccPP RPPP PRPP", "rrRr"}},
    {"mt_linear_activation_forward", {"weight x bias h y", "RRRRR RrRrr rRccc", "rrRrr"}},
    {"mt_linear_activation_backward",
        {"weight dy h dh dbias", "RRRRR RrrrP cRccc rcRPP RPRPP PRRPP", "rrrrP"}},
    {"mt_linear_gradients", {"dweight dy x dbias", "RRRR rcRc cRcR PrrP PPRP PRPR", "rrrP"}},
    {"mt_activation_forward", {"h bias y", "RRR rRr ccc", NULL}},
    {"mt_activation_backward", {"dy h dh dbias", "RRRR rrrP cccc PRPP", NULL}},
    {"mt_norm_forward", {"x gain bias y stats", "RRRRR rRRrr", NULL}},
    {"mt_norm_backward", {"x gain stats dy dresidual dx dgain dbias", "RRRRRRRR rRrrrrPP RRRPPPPP", NULL}},
    {"mt_bias_dropout_add_forward", {"x bias residual y", "RRRR rRrr cccc P-PP PPPP", NULL}},
    {"mt_bias_dropout_add_backward", {"dy dx dbias", "RRR rrP ccc PPP", NULL}},
    {"mt_attention_forward", {"qkv out lse bias", "RRRR ccrR ccrr", "rrcR rrcr"}},
    {"mt_attention_backward",
        {"qkv lse out dout dqkv bias dbias", "RRRRRRR crcccRP crcccrr RRRPPRP", "rcrrrRP rcrrrrr"}},
    {"mt_rotary_table", {"table", "R", NULL}},
    {"mt_rotary_forward", {"qkv table", "RR cR", "rR"}},
    {"mt_rotary_backward", {"dqkv table", "RR cR PR", "rR"}},
    {"mt_kv_cache_append", {"qkv table keys values", "RR** cR**", "rR**"}},
    {"mt_kv_cache_attention", {"qkv keys values out", "R**R c**c", "r**r"}},
    {"mt_cross_entropy_stats", {"logits stats", "RR rr cc", NULL}},
    {"mt_cross_entropy_combine", {"gathered loss lse", "RRR rcc", NULL}},
    {"mt_cross_entropy_backward", {"logits lse dloss", "RRR cRR rcR rcc", NULL}},
    {"mt_cross_entropy_forward_backward", {"logits loss dloss", "RRR rcR rcc", NULL}},
    {"mt_sample_candidates", {"logits candidates", "RR rr cc", NULL}},
    {"mt_sample_ids", {"gathered ids", "RR rr", NULL}},
    {"mt_adamw_step", {"param master grad m v", "RRRRR rrrrr ccccc", NULL}},
    {"mt_step_decide", {"sums loss", "RR", NULL}},
    {"mt_multiply", {"a b y", "RRR rrr ccc PRP RPP", NULL}},
    {"mt_multiply_row_forward", {"x row y", "RRR rRr ccc PRP", NULL}},
    {"mt_multiply_row_backward", {"dy x row dx drow", "RRRRR rrRrP ccccc PRRPP RPRRP", NULL}},
    {"mt_multiply_col_forward", {"x col y", "RRR rrr cRc PRP", NULL}},
    {"mt_multiply_col_backward", {"dy x col dx dcol", "RRRRR rrrrr ccRcP PRRPP RPRRP", NULL}},
    {"mt_sigmoid_forward", {"x y", "RR rr cc", NULL}},
    {"mt_sigmoid_backward", {"x dy dx", "RRR rrr ccc RPP", NULL}},
    {"mt_silu_forward", {"x y", "RR rr cc", NULL}},
    {"mt_silu_backward", {"x dy dx", "RRR rrr ccc RPP", NULL}},
    {"mt_sigmoid_gate_forward", {"gate x y", "RRR rrr ccc RPP", NULL}},
    {"mt_sigmoid_gate_backward", {"dy gate x dgate dx", "RRRRR rrrrr ccccc PRRPP RRPPR", NULL}},
};
/* clang-format on */

/* C = op(A) op(B), by transpose of A and B. */
static const mt_rule mti_gemm_rules[2][2] = {
    {{"a b c", "RRR rRr Rcc crP PRP RPP", "rrr"}, {"a b c", "RRR rRr Rrc ccP PRP RPP", "rrr"}},
    {{"a b c", "RRR cRr Rcc rrP PRP RPP", "rrr"}, {"a b c", "RRR cRr Rrc rcP PRP RPP", "rrr"}}};

/* Each rank may rotate its own tokens of one sequence, with its own rows of the table. */
static const mt_rule mti_rotary_rules[2] = {{"qkv table", "RR cR rr", "rR"}, {"dqkv table", "RR cR PR rr", "rR"}};

/* Attention of queries to keys and values of their own. All ranks may have the keys and values: each rank uses those of
   its heads (o). With one group all ranks may use it, with a share of the queries each (w; multi-query attention, arXiv
   1911.02150). With more groups the queries of a rank would not meet their own group. Or each rank has the queries of
   its own tokens: when no position counts, they see all keys (a). Otherwise the last key must be that of the rank's
   last query (k). Dropout cannot number the rows of such queries.
   [one group][the ranks' own queries: none, of all keys, of the first keys][backward] */
#define MTI_HEADS_FORWARD "RRRRRR ccccrR ccccrr coocrR coocrr"
#define MTI_HEADS_BACKWARD "RRRRRRRRRRR cccrcccccRP cccrcccccrr RRRRRPPPPRP coorcccooRP coorcccoorr"
#define MTI_HEADS_OF_ALL_FORWARD MTI_HEADS_FORWARD " cwwcrR cwwcrr"
#define MTI_HEADS_OF_ALL_BACKWARD MTI_HEADS_BACKWARD " cwwrcccPPRP cwwrcccPPrr"
#define MTI_DOT_PRODUCT_RULES(forward, backward)                                                                       \
    {                                                                                                                  \
        {"q k v out lse bias", forward, "rrrrcR rrrrcr"}, {                                                            \
            "q k v lse out dout dq dk dv bias dbias", backward, "rrrcrrrrrRP rrrcrrrrrrr"                              \
        }                                                                                                              \
    }
static const mt_rule mti_dot_product_rules[2][3][2] = {
    {MTI_DOT_PRODUCT_RULES(MTI_HEADS_FORWARD, MTI_HEADS_BACKWARD),
     MTI_DOT_PRODUCT_RULES(MTI_HEADS_FORWARD " raarcr", MTI_HEADS_BACKWARD " raacrrrPPrr"),
     MTI_DOT_PRODUCT_RULES(MTI_HEADS_FORWARD " rkkrcr", MTI_HEADS_BACKWARD " rkkcrrrPPrr")},
    {MTI_DOT_PRODUCT_RULES(MTI_HEADS_OF_ALL_FORWARD, MTI_HEADS_OF_ALL_BACKWARD),
     MTI_DOT_PRODUCT_RULES(MTI_HEADS_OF_ALL_FORWARD " raarcr", MTI_HEADS_OF_ALL_BACKWARD " raacrrrPPrr"),
     MTI_DOT_PRODUCT_RULES(MTI_HEADS_OF_ALL_FORWARD " rkkrcr", MTI_HEADS_OF_ALL_BACKWARD " rkkcrrrPPrr")}};

static const mt_rule *mti_dot_product_rule(const mt_attention_desc *s, int backward) {
    int by_position = s->mask == MT_MASK_CAUSAL || s->window || s->alibi_slopes;
    int own = s->dropout.p > 0.0f || s->cu_seqlens ? 0 : !by_position ? 1 : s->batch == 1 ? 2 : 0;
    return &mti_dot_product_rules[s->groups == 1][own][backward];
}

static mt_status mti_apply_rule(mt_context *ctx, const char *name, const mt_rule *rule, const mt_arg *args, int count) {
    mt_operand operands[MTI_ARGS + 1];
    int i;
    for (i = 0; i < count; i++) {
        operands[i].name = args[i].name;
        operands[i].t = *args[i].view;
        operands[i].use = args[i].use & MT_ARG_IN_OUT;
        if ((args[i].use & MT_ARG_GRADIENT) == MT_ARG_GRADIENT) operands[i].use = 7;
    }
    return mt_rule_check(ctx, name, rule, operands, count);
}

static const mt_rule *mti_rule_of(const char *name) {
    size_t i;
    for (i = 0; i < sizeof mti_rules / sizeof *mti_rules; i++)
        if (strcmp(mti_rules[i].name, name) == 0) return &mti_rules[i].rule;
    return NULL;
}

MT_API const mt_rule *mt_rule_of(const char *name) {
    if (!name) return NULL;
    return strcmp(name, "mt_gemm") == 0 ? &mti_gemm_rules[0][0] : mti_rule_of(name);
}

/* Applies the rule of an operator. What an operator without a rule writes is not known. */
static mt_status mti_apply_rule_of(mt_context *ctx, const char *name, const mt_arg *args, int count) {
    const mt_rule *rule;
    int i;
    if (count == 0 || !mt_check_mode(ctx)) return MT_SUCCESS;
    rule = mti_rule_of(name);
    if (rule) return mti_apply_rule(ctx, name, rule, args, count);
    for (i = 0; i < count; i++)
        if (args[i].use & MT_ARG_OUT) MT_TRY(mt_declare(ctx, NULL, *args[i].view, MT_UNDECLARED));
    return MT_SUCCESS;
}

/* Takes `count` doubles of a list. Returns how many there are room for. */
static int mti_numbers_take(va_list list, int count, double *numbers) {
    int i;
    for (i = 0; i < count && i < MTI_NUMBERS; i++) numbers[i] = va_arg(list, double);
    return i;
}

/* Notes numbers of a call, which must be the same on all ranks. t and data: see mt_check_numbers. */
static mt_status mti_numbers_agree(mt_context *ctx, const char *where, const char *what, mt_tensor t, int data,
                                   int count, ...) {
    double numbers[MTI_NUMBERS];
    va_list list;
    if (mt_check_mode(ctx) != 2) return MT_SUCCESS;
    va_start(list, count);
    count = mti_numbers_take(list, count, numbers);
    va_end(list);
    return mt_check_numbers(ctx, where, what, t, data, numbers, count);
}

/* Notes from which numbers a tensor is made. */
static void mti_made(mt_context *ctx, mt_tensor t, int count, ...) {
    double numbers[MTI_NUMBERS];
    va_list list;
    if (!mt_check_mode(ctx)) return;
    va_start(list, count);
    count = mti_numbers_take(list, count, numbers);
    va_end(list);
    mt_check_content(ctx, t, mt_check_content_of(numbers, count));
}
