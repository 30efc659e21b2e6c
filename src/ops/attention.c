/* ---- attention: work, and the public functions ------------------------------------------------------------------- */

#pragma once
#include "attention.h"
#include "attention_qkv.h"
#include "gemm.c"
#include "attention_cpu.c"
#include "attention_choice.cuh"

/* The least number of items for a thread. */
static int64_t mti_attention_grain(const mt_attention_desc *s, int backward) {
    double rows = backward ? (double)s->seq * (double)s->heads_per_group : (double)mt_min(MTI_QUERIES, s->seq);
    double items = ceil(MTI_GEMM_GRAIN / (rows * (double)s->kv_seq * (double)s->head_dim));
    return backward ? mt_round_up((int64_t)items, mti_dbias_items(s)) : (int64_t)items;
}

/* Attention on a CPU. A meta context allocates the scratch memory as well. */
static mt_status mti_attention_loop(mti_operator *op, mti_attention *a, int backward) {
    const mt_attention_desc *s = &a->desc;
    int64_t items = s->batch * s->groups, grain;
    if (mti_is_empty(a->q)) return MT_SUCCESS;
    grain = mti_attention_grain(s, backward);
    if (!backward) items *= s->heads_per_group * mti_attention_blocks(s);
    a->threads = mt_min(mt_context_threads(a->ctx), (items - 1) / grain + 1);
    MT_TRY(mti_attention_scratch(a, backward));
    if (op->on_cpu)
        mt_parallel_for(a->ctx, items, grain, backward ? mti_cpu_attention_backward : mti_cpu_attention_forward, a);
    return MT_SUCCESS;
}

/* What an operator of attention requires of desc.bias.value; `use` adds to MT_ARG_IN. */
static mt_arg mti_bias_arg(mt_attention_desc *s) {
    mt_arg arg;
    arg.name = "bias";
    arg.view = &s->bias.value;
    arg.rows = s->bias.batch * s->bias.heads * s->part.seq;
    arg.cols = s->part.kv_seq;
    arg.type = s->bias.value.dtype == MT_U8 ? MT_ARG_ANY : MT_ARG_FLOAT;
    arg.use = MT_ARG_IN | MT_ARG_OPTIONAL | MTI_AS_IS;
    return arg;
}

/* What backward requires of desc.bias.grad. */
static mt_arg mti_dbias_arg(mt_attention_desc *s) {
    mt_arg arg = mti_bias_arg(s);
    arg.name = "dbias";
    arg.view = &s->bias.grad;
    arg.type = MT_ARG_F32;
    arg.use = MT_ARG_IN_OUT | MT_ARG_GRADIENT | MT_ARG_OPTIONAL;
    if (s->bias.heads == 1) arg.use |= MT_ARG_SUM; /* over the heads of this call */
    return arg;
}

/* Fills *op as mti_operands does. Operand `bias` is desc.bias.value, and operand `dbias`, if it is not 0, is
   desc.bias.grad. */
static void mti_attention_operands(mti_operator *op, mt_context *ctx, const mti_table *table, mt_tensor *const *views,
                                   mt_attention_desc *s, int bias, int dbias) {
    const int64_t heads = mti_attention_heads(s), out_width = heads * s->head_dim;
    const int64_t sizes[] = {s->batch * s->seq,
                             mti_attention_width(s),
                             out_width,
                             heads,
                             s->bias.batch * s->bias.heads * s->part.seq,
                             s->part.kv_seq,
                             s->batch * s->kv_seq,
                             s->groups * s->head_dim};
    mti_operands(op, ctx, table, views, sizes);
    op->args[bias] = mti_bias_arg(s);
    if (dbias) op->args[dbias] = mti_dbias_arg(s);
}

/* Refuses a desc.bias.grad without a bias that has a gradient. */
static mt_status mti_expect_dbias(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    if (!s->bias.grad.data || (s->bias.value.data && s->bias.value.dtype != MT_U8)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc.bias.grad is given, but desc.bias.value is %s", where,
                   s->bias.value.data ? "a boolean mask" : "mt_none()");
}

/* Checks desc and writes it to *s without defaults. A fused tensor has as many keys as queries. */
static mt_status mti_attention_desc_check(mt_context *ctx, const char *where, const mt_attention_desc *desc, int fused,
                                          mt_attention_desc *s) {
    MT_TRY(mti_expect_heads(ctx, where, desc));
    *s = mti_attention_defaults(desc);
    if (fused && s->kv_seq != s->seq)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: kv_seq is %lld, must be 0 or seq %lld in a fused qkv", where,
                       (long long)s->kv_seq, (long long)s->seq);
    if (fused && (s->part.first_key != s->part.first_query || s->part.kv_seq != s->part.seq))
        return mt_fail(
            ctx, MT_ERR_SHAPE,
            "%s: part has the keys from %lld of %lld on, must be those of the queries, from %lld of %lld on, "
            "in a fused qkv",
            where, (long long)s->part.first_key, (long long)s->part.kv_seq, (long long)s->part.first_query,
            (long long)s->part.seq);
    return mti_expect_attention(ctx, where, s);
}

/* The sum of `count` numbers from `first` on, each cut to [0, top]. */
static double mti_cut_sum(double first, double count, double top) {
    double below = first < 0 ? (-first < count ? -first : count) : 0, end = first + count - 1 - top;
    double above = end > 0 ? (end < count - below ? end : count - below) : 0, between = count - below - above;
    return between * (first + below) + between * (between - 1) / 2 + above * top;
}

/* The number of scores of a head and a sequence: for the query at position p, the keys from p - window + 1 to p or, in
   both directions, to p + window - 1. */
static double mti_scores(const mt_attention_desc *s) {
    double queries = (double)s->seq, keys = (double)s->kv_seq, first = (double)mti_key_of_query(s),
           window = (double)s->scores.window;
    double all = queries * keys;
    if (s->scores.mask == MT_MASK_CAUSAL) all = mti_cut_sum(first + 1, queries, keys);
    else if (s->scores.window > 0) all = mti_cut_sum(first + window, queries, keys);
    return s->scores.window > 0 ? all - mti_cut_sum(first - window + 1, queries, keys) : all;
}

/* Notes the floating-point operations of `products` products for each score. Documents and key padding are in memory
   that a meta context does not have: all keys count. */
static void mti_attention_work(mti_operator *op, const mt_attention_desc *s, int products) {
    if (!op->work.name) return;
    op->work.work = MT_WORK_ATTENTION;
    op->work.flops =
        2.0 * products * mti_scores(s) * (double)s->batch * (double)mti_attention_heads(s) * (double)s->head_dim;
}

/* Notes the numbers of a desc, and its arrays: lengths and documents go with the sequences, slopes with the heads. The
   program may have said of q, the queries, that their scale is meant. */
static mt_status mti_attention_agree(mt_context *ctx, const char *where, const mt_arg *q, mt_tensor t,
                                     const mt_attention_desc *s) {
    const int64_t heads = mti_attention_heads(s), documents = s->cu_seqlens ? s->documents + 1 : 0;
    MT_TRY(mt_check_factor(ctx, where, "the square of desc.scale", q->name, *q->view, MT_SPLIT_COLS,
                           (double)s->scores.scale * (double)s->scores.scale * (double)s->head_dim));
    if (mt_check_mode(ctx) != 2) return MT_SUCCESS;
    mt_check_sequences(ctx, t, s->cu_seqlens ? 0 : s->seq);
    MT_TRY(mti_numbers_agree(ctx, where, "mask", t, 1, 1, (double)s->scores.mask));
    MT_TRY(mti_numbers_agree(ctx, where, "window", t, 1, 1, (double)s->scores.window));
    MT_TRY(mti_numbers_agree(ctx, where, "scale", mt_none(), 1, 1, (double)s->scores.scale));
    MT_TRY(mti_numbers_agree(ctx, where, "lengths", t, 0, 2, (double)(s->lengths != NULL),
                             (double)(s->cu_seqlens != NULL)));
    MT_TRY(mti_numbers_agree(ctx, where, "seq or kv_seq", t, 0, 4, (double)s->seq, (double)s->kv_seq,
                             (double)s->part.seq, (double)s->part.kv_seq));
    MT_TRY(mti_numbers_agree(ctx, where, "a number of desc", mt_none(), 1, 5, (double)s->scores.softcap,
                             (double)s->head_dim, (double)s->qkv_layout, (double)s->scores.rotary_form,
                             (double)(s->scores.alibi_slopes != NULL)));
    MT_TRY(mt_check_side(ctx, where, "lengths", mt_tensor_make(s->lengths, MT_I32, s->batch, 1), t, MT_SPLIT_ROWS, 1));
    MT_TRY(mt_check_side(ctx, where, "cu_seqlens", mt_tensor_make(s->cu_seqlens, MT_I32, documents, 1), t,
                         MT_SPLIT_ROWS, 1));
    return mt_check_side(ctx, where, "alibi_slopes", mt_tensor_make(s->scores.alibi_slopes, MT_F32, 1, heads), t,
                         MT_SPLIT_COLS, 0);
}

/* As mti_expect_mask, for the dropout of probabilities: sequences are rows and heads are columns. */
static mt_status mti_expect_head_masks(mti_operator *op, const char *name, mt_tensor t, const mt_attention_desc *s) {
    mt_status status = mti_attention_agree(op->ctx, op->name, &op->args[0], t, s);
    if (status != MT_SUCCESS) return mti_end(op, status);
    return mti_expect_mask(op, name, t, &s->dropout, s->batch, mti_attention_heads(s), 1);
}

MT_API mt_status mt_attention_check(mt_context *ctx, const char *where, const mt_attention_desc *desc) {
    mt_attention_desc s;
    MT_TRY(mti_attention_desc_check(ctx, where, desc, 0, &s));
    mt_arg args[] = {mti_bias_arg(&s), mti_dbias_arg(&s)};
    MT_TRY(mti_expect_dbias(ctx, where, &s));
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    return mt_check_apart(ctx, where, "dbias", s.bias.grad, "bias", s.bias.value);
}

/* clang-format off */
/* The sizes of the tables below: A tokens, B the width of qkv, C that of the queries and of out, D heads, E and F the
   rows and columns of the bias, G the keys of all sequences, H their width. mti_bias_arg says more about the bias. */
static const mti_table mti_attention_forward_table = {"mt_attention_forward",
    {"qkv out lse bias", "RRRR ccrR ccrr", "rrcR rrcr"}, {
    {"qkv", "AB", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"out", "AC", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, "qkv"},
    {"lse", "DA", MT_ARG_F32, MT_ARG_OUT | MT_ARG_OPTIONAL, NULL},
    {"bias", "EF", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL | MTI_AS_IS, NULL}}};

static const mti_table mti_attention_backward_table = {"mt_attention_backward",
    {"qkv lse out dout dqkv(qkv) bias dbias(bias)", "RRRRRRR crcccRP crcccrr RRRPPRP", "rcrrrRP rcrrrrr"}, {
    {"qkv", "AB", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"bias", "EF", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL | MTI_AS_IS, NULL},
    {"lse", "DA", MT_ARG_F32, MT_ARG_IN, NULL},
    {"out", "AC", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"dout", "AC", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MTI_AS_IS, "out"},
    {"dqkv", "AB", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MTI_AS_IS, "*"},
    {"dbias", "EF", MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_GRADIENT | MT_ARG_OPTIONAL, "*"}}};

/* With part, the tokens of a rank may be some of a sequence over any group. [backward] */
static const mt_rule mti_attention_part_rules[2] = {
    {"qkv out lse bias", "RRRR ccrR ccrr rrcR", "rrcR rrcr"},
    {"qkv lse out dout dqkv(qkv) bias dbias(bias)", "RRRRRRR crcccRP crcccrr RRRPPRP rcrrrRP", "rcrrrRP rcrrrrr"}};

/* The rules of these two depend on the desc: mti_dot_product_rule. */
static const mti_table mti_dot_product_attention_forward_table = {"mt_dot_product_attention_forward",
    {NULL, NULL, NULL}, {
    {"q", "AC", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"k", "GH", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"v", "GH", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"out", "AC", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, "q k v"},
    {"lse", "DA", MT_ARG_F32, MT_ARG_OUT | MT_ARG_OPTIONAL, NULL},
    {"bias", "EF", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL | MTI_AS_IS, NULL}}};

static const mti_table mti_dot_product_attention_backward_table = {"mt_dot_product_attention_backward",
    {NULL, NULL, NULL}, {
    {"q", "AC", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"k", "GH", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"v", "GH", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"bias", "EF", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL | MTI_AS_IS, NULL},
    {"lse", "DA", MT_ARG_F32, MT_ARG_IN, NULL},
    {"out", "AC", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"dout", "AC", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MTI_AS_IS, NULL},
    {"dq", "AC", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MTI_AS_IS, "*"},
    {"dk", "GH", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MTI_AS_IS, "*"},
    {"dv", "GH", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MTI_AS_IS, "*"},
    {"dbias", "EF", MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_GRADIENT | MT_ARG_OPTIONAL, "*"}}};
/* clang-format on */

MT_API mt_status mt_attention_forward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor qkv, mt_tensor out,
                                      mt_tensor lse) {
    mt_attention_desc s;
    MT_TRY(mti_attention_desc_check(ctx, "mt_attention_forward", desc, 1, &s));
    mt_tensor *views[] = {&qkv, &out, &lse, &s.bias.value};
    mti_attention a;
    mti_operator op;
    mti_attention_operands(&op, ctx, &mti_attention_forward_table, views, &s, 3, 0);
    MT_TRY(mti_check(&op));
    MT_TRY(mti_expect_qkv_parts(ctx, op.name, &s, "qkv", qkv));
    if (mti_has_part(&s)) op.rule = &mti_attention_part_rules[0];
    MT_TRY(mti_begin(&op));
    MT_TRY(mti_expect_head_masks(&op, "out", out, &s));
    a = mti_attention_resolve(ctx, &s, out, lse);
    mti_attention_simplify(&a.desc);
    mti_attention_fused(&a, qkv, mt_none());
    mti_attention_work(&op, &s, 2);
    return mti_end(&op, MTI_CHOOSE(&op, mti_cuda_attention(&a, 0), mti_attention_loop(&op, &a, 0)));
}

MT_API mt_status mt_attention_backward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor qkv, mt_tensor out,
                                       mt_tensor lse, mt_tensor dout, mt_tensor dqkv) {
    mt_attention_desc s;
    MT_TRY(mti_attention_desc_check(ctx, "mt_attention_backward", desc, 1, &s));
    mt_tensor *views[] = {&qkv, &s.bias.value, &lse, &out, &dout, &dqkv, &s.bias.grad};
    mti_attention a;
    mti_operator op;
    mti_attention_operands(&op, ctx, &mti_attention_backward_table, views, &s, 1, 6);
    MT_TRY(mti_expect_dbias(ctx, op.name, &s));
    MT_TRY(mti_check(&op));
    MT_TRY(mti_expect_qkv_parts(ctx, op.name, &s, "qkv", qkv));
    if (mti_has_part(&s)) op.rule = &mti_attention_part_rules[1];
    MT_TRY(mti_begin(&op));
    MT_TRY(mti_expect_head_masks(&op, "dqkv", dqkv, &s));
    a = mti_attention_resolve(ctx, &s, out, lse);
    mti_attention_simplify(&a.desc);
    a.dout = dout;
    mti_attention_fused(&a, qkv, dqkv);
    mti_attention_work(&op, &s, 4);
    return mti_end(&op, MTI_CHOOSE(&op, mti_cuda_attention(&a, 1), mti_attention_loop(&op, &a, 1)));
}

/* Attention of queries to keys and values of their own. All ranks may have the keys and values: each rank uses those of
   its heads (o). With one group all ranks may use it, with a share of the queries each (w; multi-query attention, arXiv
   1911.02150). With more groups the queries of a rank would not meet their own group. Or each rank has the queries of
   its own tokens: when no position counts, they see all keys (a). Otherwise the last key must be that of the rank's
   last query (k). Dropout cannot number the rows of such queries. With part, a rank
   may have any queries and keys, and the bias has those of whole sequences.
   [one group][the ranks' own queries: none, of all keys, of the first keys, with part][backward] */
#define MTI_HEADS_FORWARD "RRRRRR ccccrR ccccrr coocrR coocrr"
#define MTI_HEADS_BACKWARD "RRRRRRRRRRR cccrcccccRP cccrcccccrr RRRRRPPPPRP coorcccooRP coorcccoorr"
#define MTI_HEADS_OF_ALL_FORWARD MTI_HEADS_FORWARD " cwwcrR cwwcrr"
#define MTI_HEADS_OF_ALL_BACKWARD MTI_HEADS_BACKWARD " cwwrcccPPRP cwwrcccPPrr"
#define MTI_PART_FORWARD " raarcR rrrrcR"
#define MTI_PART_BACKWARD " raacrrrPPRP rrrcrrrrrRP"
#define MTI_DOT_PRODUCT_RULES(forward, backward)                                                                       \
    {                                                                                                                  \
        {"q k v out lse bias", forward, "rrrrcR rrrrcr"}, {                                                            \
            "q k v lse out dout dq(q) dk(k) dv(v) bias dbias(bias)", backward, "rrrcrrrrrRP rrrcrrrrrrr"               \
        }                                                                                                              \
    }
static const mt_rule mti_dot_product_rules[2][4][2] = {
    {MTI_DOT_PRODUCT_RULES(MTI_HEADS_FORWARD, MTI_HEADS_BACKWARD),
     MTI_DOT_PRODUCT_RULES(MTI_HEADS_FORWARD " raarcr", MTI_HEADS_BACKWARD " raacrrrPPrr"),
     MTI_DOT_PRODUCT_RULES(MTI_HEADS_FORWARD " rkkrcr", MTI_HEADS_BACKWARD " rkkcrrrPPrr"),
     MTI_DOT_PRODUCT_RULES(MTI_HEADS_FORWARD MTI_PART_FORWARD, MTI_HEADS_BACKWARD MTI_PART_BACKWARD)},
    {MTI_DOT_PRODUCT_RULES(MTI_HEADS_OF_ALL_FORWARD, MTI_HEADS_OF_ALL_BACKWARD),
     MTI_DOT_PRODUCT_RULES(MTI_HEADS_OF_ALL_FORWARD " raarcr", MTI_HEADS_OF_ALL_BACKWARD " raacrrrPPrr"),
     MTI_DOT_PRODUCT_RULES(MTI_HEADS_OF_ALL_FORWARD " rkkrcr", MTI_HEADS_OF_ALL_BACKWARD " rkkcrrrPPrr"),
     MTI_DOT_PRODUCT_RULES(MTI_HEADS_OF_ALL_FORWARD MTI_PART_FORWARD, MTI_HEADS_OF_ALL_BACKWARD MTI_PART_BACKWARD)}};

static const mt_rule *mti_dot_product_rule(const mt_attention_desc *s, int backward) {
    int by_position = s->scores.mask == MT_MASK_CAUSAL || s->scores.window || s->scores.alibi_slopes;
    int own = s->dropout.p > 0.0f || s->cu_seqlens ? 0 : !by_position ? 1 : s->batch == 1 ? 2 : 0;
    if (mti_has_part(s)) own = 3;
    return &mti_dot_product_rules[s->groups == 1][own][backward];
}

MT_API mt_status mt_dot_product_attention_forward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor q,
                                                  mt_tensor k, mt_tensor v, mt_tensor out, mt_tensor lse) {
    mt_attention_desc s;
    MT_TRY(mti_attention_desc_check(ctx, "mt_dot_product_attention_forward", desc, 0, &s));
    mt_tensor *views[] = {&q, &k, &v, &out, &lse, &s.bias.value};
    mti_attention a;
    mti_operator op;
    mti_attention_operands(&op, ctx, &mti_dot_product_attention_forward_table, views, &s, 5, 0);
    MT_TRY(mti_check(&op));
    op.rule = mti_dot_product_rule(&s, 0);
    MT_TRY(mti_begin(&op));
    MT_TRY(mti_expect_head_masks(&op, "out", out, &s));
    a = mti_attention_resolve(ctx, &s, out, lse);
    mti_attention_simplify(&a.desc);
    a.q = q, a.k = k, a.v = v;
    mti_attention_work(&op, &s, 2);
    return mti_end(&op, MTI_CHOOSE(&op, mti_cuda_attention(&a, 0), mti_attention_loop(&op, &a, 0)));
}

MT_API mt_status mt_dot_product_attention_backward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor q,
                                                   mt_tensor k, mt_tensor v, mt_tensor out, mt_tensor lse,
                                                   mt_tensor dout, mt_tensor dq, mt_tensor dk, mt_tensor dv) {
    mt_attention_desc s;
    MT_TRY(mti_attention_desc_check(ctx, "mt_dot_product_attention_backward", desc, 0, &s));
    mt_tensor *views[] = {&q, &k, &v, &s.bias.value, &lse, &out, &dout, &dq, &dk, &dv, &s.bias.grad};
    mti_attention a;
    mti_operator op;
    mti_attention_operands(&op, ctx, &mti_dot_product_attention_backward_table, views, &s, 3, 10);
    MT_TRY(mti_expect_dbias(ctx, op.name, &s));
    MT_TRY(mti_check(&op));
    op.rule = mti_dot_product_rule(&s, 1);
    MT_TRY(mti_begin(&op));
    MT_TRY(mti_expect_head_masks(&op, "dq", dq, &s));
    a = mti_attention_resolve(ctx, &s, out, lse);
    mti_attention_simplify(&a.desc);
    a.q = q, a.k = k, a.v = v;
    a.dout = dout;
    a.dq = dq, a.dk = dk, a.dv = dv;
    mti_attention_work(&op, &s, 4);
    return mti_end(&op, MTI_CHOOSE(&op, mti_cuda_attention(&a, 1), mti_attention_loop(&op, &a, 1)));
}

/* The slope of head h, see mt_alibi_slopes. */
static float mti_alibi_slope(int64_t heads, int64_t h) {
    int64_t power = 1;
    while (2 * power <= heads) power *= 2;
    if (h < power) return (float)pow(2.0, -8.0 * (double)(h + 1) / (double)power);
    return (float)pow(2.0, -8.0 * (double)(2 * (h - power) + 1) / (double)(2 * power));
}

MT_API mt_status mt_alibi_slopes(mt_context *ctx, int64_t heads, int64_t first_head, mt_tensor slopes) {
    float host[64];
    int64_t n = slopes.cols, i, j;
    MT_TRY(mt_tensor_check(ctx, "mt_alibi_slopes", "slopes", slopes, MT_ARG_F32, 1, n));
    MT_TRY(mt_check_integer(ctx, "mt_alibi_slopes", NULL, "heads", heads, 1, INT_MAX));
    MT_TRY(mt_check_integer(ctx, "mt_alibi_slopes", NULL, "first_head", first_head, 0, INT64_MAX));
    if (n > heads || first_head > heads - n)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_alibi_slopes: there are %lld heads, not %lld from head %lld on",
                       (long long)heads, (long long)n, (long long)first_head);
    for (i = 0; i < n; i += 64) {
        int64_t count = mt_min(64, n - i);
        for (j = 0; j < count; j++) host[j] = mti_alibi_slope(heads, first_head + i + j);
        MT_TRY(mt_upload(ctx, host, mt_tensor_cols(slopes, i, count)));
    }
    mti_made(ctx, slopes, 2, (double)heads, (double)first_head);
    return MT_SUCCESS;
}
