/* checks.h - what after.c adds for check mode: a rule for each of its operators. Include it behind the operators, and
   call declare_weight where a weight is loaded, and declare_zero where buffers are cleared. See docs/own-weights.md. */

enum { IN = MT_ARG_IN, OUT = MT_ARG_OUT, IN_OUT = MT_ARG_IN_OUT, GRADIENT = MT_ARG_GRADIENT };

#define T(data, rows, cols) mt_tensor_f32(data, data ? (rows) : 0, cols)
#define RULE(name, rule, ...)                                                                                          \
    do {                                                                                                               \
        const mt_operand operands_[] = {__VA_ARGS__};                                                                  \
        CHECK(m, mt_rule_check(m->ctx, name, rule, operands_, (int)(sizeof operands_ / sizeof *operands_)));           \
    } while (0)

static void declare_weight(model *m, const mt_shard *shard, int i, int l) {
    static const char *const names[TENSORS] = {"wte",  "wpe",   "qkv.w", "proj.w", "fc.w",  "fc2.w", "qkv.b", "proj.b",
                                               "fc.b", "fc2.b", "ln1.b", "ln2.b",  "lnf.b", "ln1.g", "ln2.g", "lnf.g"};
    const mt_own_weight w = {names[i], *shard, MT_F32, m->w[l][i], m->dw[l][i]};
    CHECK(m, mt_declare_shards(m->ctx, m->tp, NULL, &w, 1));
}

static void declare_zero(model *m) {
    for (int i = 0; i < TENSORS; i++)
        for (int l = 0; l <= LAYERS; l++) {
            tensor weights[TENSORS], activations[TENSORS];
            list_weights(&m->c, weights);
            list_activations(&m->c, activations);
            if (l < weights[i].layers)
                CHECK(m, mt_declare_zero(m->ctx, T(m->dw[l][i], weights[i].rows, weights[i].cols)));
            if (l < activations[i].layers)
                CHECK(m, mt_declare_zero(m->ctx, T(m->da[l][i], activations[i].rows, activations[i].cols)));
        }
}

static const mt_rule embed_rule = {"wte wpe x", "RRR rRP", NULL};
static const mt_rule embed_backward_rule = {"dx dwte dwpe", "RRR RrR", NULL};
static const mt_rule add_rule = {"y x bias", "RRR rrR ccc PP-", NULL};

#define embed(x, ids, wte, wpe, c)                                                                                     \
    RULE("embed", &embed_rule, {"wte", T(wte, (c)->padded_vocab, (c)->hidden), IN},                                    \
         {"wpe", T(wpe, SEQ, (c)->hidden), IN}, {"x", T(x, TOKENS, (c)->hidden), OUT});                                \
    embed(x, ids, wte, wpe, c)
#define embed_backward(dx, ids, dwte, dwpe, c)                                                                         \
    RULE("embed_backward", &embed_backward_rule, {"dx", T(dx, TOKENS, (c)->hidden), IN | GRADIENT},                    \
         {"dwte", T(dwte, (c)->padded_vocab, (c)->hidden), IN_OUT | GRADIENT},                                         \
         {"dwpe", T(dwpe, SEQ, (c)->hidden), IN_OUT | GRADIENT});                                                      \
    embed_backward(dx, ids, dwte, dwpe, c)
#define layernorm(y, stats, x, gain, bias, n)                                                                          \
    RULE("layernorm", mt_rule_of("mt_norm_forward"), {"x", T(x, TOKENS, n), IN}, {"gain", T(gain, 1, n), IN},          \
         {"bias", T(bias, 1, n), IN}, {"y", T(y, TOKENS, n), OUT}, {"stats", T(stats, TOKENS, 2), OUT});               \
    layernorm(y, stats, x, gain, bias, n)
#define layernorm_backward(dx, dgain, dbias, dy, x, stats, gain, n)                                                    \
    RULE("layernorm_backward", mt_rule_of("mt_norm_backward"), {"x", T(x, TOKENS, n), IN},                             \
         {"gain", T(gain, 1, n), IN}, {"stats", T(stats, TOKENS, 2), IN}, {"dy", T(dy, TOKENS, n), IN | GRADIENT},     \
         {"dx", T(dx, TOKENS, n), IN_OUT | GRADIENT}, {"dgain", T(dgain, 1, n), IN_OUT | GRADIENT},                    \
         {"dbias", T(dbias, 1, n), IN_OUT | GRADIENT});                                                                \
    layernorm_backward(dx, dgain, dbias, dy, x, stats, gain, n)
#define matmul(y, x, w, bias, in, out)                                                                                 \
    RULE("matmul", mt_rule_of("mt_linear_forward"), {"weight", T(w, out, in), IN}, {"x", T(x, TOKENS, in), IN},        \
         {"bias", T((const float *)(bias), 1, out), IN}, {"y", T(y, TOKENS, out), OUT});                               \
    matmul(y, x, w, bias, in, out)
#define matmul_backward(dx, dw, dbias, dy, x, w, in, out)                                                              \
    RULE("matmul_backward", mt_rule_of("mt_linear_gradients"), {"dweight", T(dw, out, in), IN_OUT | GRADIENT},         \
         {"dy", T(dy, TOKENS, out), IN | GRADIENT}, {"x", T(x, TOKENS, in), IN},                                       \
         {"dbias", T((float *)(dbias), 1, out), IN_OUT | GRADIENT});                                                   \
    RULE("matmul_backward", mt_rule_of("mt_gemm"), {"a", T(dy, TOKENS, out), IN | GRADIENT}, {"b", T(w, out, in), IN}, \
         {"c", T(dx, TOKENS, in), IN_OUT | GRADIENT});                                                                 \
    matmul_backward(dx, dw, dbias, dy, x, w, in, out)
#define attention(out, p, qkv, c)                                                                                      \
    CHECK(m, mt_parts_check(m->ctx, "attention", "qkv", T(qkv, TOKENS, 3 * A), 3));                                    \
    RULE("attention", mt_rule_of("mt_attention_forward"), {"qkv", T(qkv, TOKENS, 3 * A), IN},                          \
         {"out", T(out, TOKENS, A), OUT}, {"lse", T(p, TOKENS, (c)->heads * SEQ), OUT});                               \
    attention(out, p, qkv, c)
#define attention_backward(dqkv, dout, p, qkv, c)                                                                      \
    RULE("attention_backward", mt_rule_of("mt_attention_backward"), {"qkv", T(qkv, TOKENS, 3 * A), IN},                \
         {"lse", T(p, TOKENS, (c)->heads * SEQ), IN}, {"dout", T(dout, TOKENS, A), IN | GRADIENT},                     \
         {"dqkv", T(dqkv, TOKENS, 3 * A), IN_OUT | GRADIENT});                                                         \
    attention_backward(dqkv, dout, p, qkv, c)
#define gelu(y, x, n)                                                                                                  \
    RULE("gelu", mt_rule_of("mt_activation_forward"), {"h", T(x, TOKENS, (n) / TOKENS), IN},                           \
         {"y", T(y, TOKENS, (n) / TOKENS), OUT});                                                                      \
    gelu(y, x, n)
#define gelu_backward(dx, dy, x, n)                                                                                    \
    RULE("gelu_backward", mt_rule_of("mt_activation_backward"), {"dy", T(dy, TOKENS, (n) / TOKENS), IN | GRADIENT},    \
         {"h", T(x, TOKENS, (n) / TOKENS), IN}, {"dh", T(dx, TOKENS, (n) / TOKENS), IN_OUT | GRADIENT});               \
    gelu_backward(dx, dy, x, n)
#define add(y, x, bias, n)                                                                                             \
    RULE("add", &add_rule, {"y", T(y, TOKENS, n), IN_OUT}, {"x", T(x, TOKENS, n), IN},                                 \
         {"bias", T((const float *)(bias), 1, n), IN});                                                                \
    add(y, x, bias, n)
