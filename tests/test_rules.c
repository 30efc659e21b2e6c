/* test_rules.c - the rules of check mode are true: the results of the operators on 2 ranks decide.

   The operators are those of mt_test_operators.h, and here those of which the table does not say all, such as parts,
   places or ids.

   For each operator with a rule, and for each combination of placements of its inputs over a group of 2 ranks:
   1. Random whole tensors are shared out: R whole, r rows, c columns, P addends whose sum is the whole.
   2. The operator runs once on the whole tensors, and once for each rank on what this rank has.
   3. An output is R, r, c or P when the ranks' outputs are the whole, its rows, its columns, or addends of it.
   4. Check mode is asked about the same combination, on meta ranks. When it accepts, each placement that it gives an
      output must be one of step 3. When it refuses, no placement may be right, or `refusals` lists the combination.
   Combinations whose shapes do not fit together are left out: the operator refuses them without a rule. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"
#include "mt_test_operators.h"
#include "mt_test_ranks.h"

enum { RANKS = 2, OPERANDS = 12, ELEMENTS = 640 };
enum { TENSOR = 0, DATA = 1 };

/* An operand, as the table of operators describes it: "name USE ROWSxCOLS WORDS...". */
typedef struct operand {
    char name[12]; /* as in the rule */
    int reads, writes;
    int64_t rows, cols; /* of the whole tensor */
    int sum;            /* USE is `sum`: the call adds to it, so it may also begin as zeros. Others: in, out, inout, */
    int moves;          /* and `moves`: in place, and afterwards it may have another placement */
    /* the words */
    int optional, positive, bf16;
    int ids;       /* int32_t numbers */
    int halves;    /* "candidates": the second half of the columns has the bits of int32_t numbers */
    int like;      /* "like x": 1 + number of operand x, whose share decides the share of this one; 0: none */
    int parts;     /* "parts 2": a rank's columns are its share of each of these equal parts; 1: none */
    int row_parts; /* the same of rows */
    int cache;     /* keys or values of 2 sequences: c splits their groups. Check mode does not know them */
    int no_cols;   /* c makes no sense */
    int gathered;  /* with c, what is computed of the outputs of all ranks decides, see entry.gathered */
} operand;

/* An operator, as one rank or as the only rank calls it. */
typedef struct call {
    mt_context *ctx;
    mt_tensor t[OPERANDS]; /* in the order of the rule; data is NULL for one that is left out */
    char at[OPERANDS];     /* R, r or c: the share of the whole that t is */
    int rank, variant;
    const operator_entry *by_table; /* NULL: an entry of this file */
    mt_comm *comm;                  /* of a call that communicates */
} call;

typedef struct entry {
    const char *name;
    int group, variant;
    mt_status (*run)(const call *c);
    const char *operands;                                                   /* with commas between them */
    const char *letters;                                                    /* placements to try; NULL: RrcP */
    int (*gathered)(mt_context *ctx, const call *ranks, const call *whole); /* whether they mean the same */
} entry;

/* ---- how the operators are called -------------------------------------------------------------------------------- */

#define T(i) (c->t[i])
#define RUN(name, ...)                                                                                                 \
    static mt_status name(const call *c) { return __VA_ARGS__; }

/* The first row or column of the rank's share of operand i in the whole tensor. */
static int64_t first_row(const call *c, int i) { return c->at[i] == 'r' ? c->rank * T(i).rows : 0; }
static int64_t first_col(const call *c, int i) { return c->at[i] == 'c' ? c->rank * T(i).cols : 0; }

RUN(run_copy, mt_copy(c->ctx, T(0), T(1)))
RUN(run_convert, mt_convert(c->ctx, T(0), T(1)))
RUN(run_sum, mt_sum(c->ctx, T(0), T(1)))
static mt_status run_tree_sum(const call *c) {
    size_t mark = mt_arena_mark(c->ctx);
    mt_tensor rows;
    MT_TRY(mt_arena_tensor(c->ctx, MT_F32, T(0).rows, T(0).cols, &rows));
    MT_TRY(mt_copy(c->ctx, T(0), rows));
    MT_TRY(mt_tree_sum(c->ctx, rows));
    MT_TRY(mt_copy(c->ctx, mt_tensor_rows(rows, 0, 1), T(1)));
    mt_arena_release(c->ctx, mark);
    return MT_SUCCESS;
}
RUN(run_sum_of_squares, mt_sum_of_squares(c->ctx, T(0), T(1)))
RUN(run_activation_forward, mt_activation_forward(c->ctx, (mt_activation)c->variant, T(0), T(1), T(2)))
RUN(run_activation_backward, mt_activation_backward(c->ctx, (mt_activation)c->variant, T(1), T(0), T(2), T(3)))
RUN(run_linear_forward, mt_linear_forward(c->ctx, T(1), T(0), T(2), T(3)))
RUN(run_linear_activation_forward,
    mt_linear_activation_forward(c->ctx, (mt_activation)c->variant, T(1), T(0), T(2), T(3), T(4)))
RUN(run_linear_activation_backward,
    mt_linear_activation_backward(c->ctx, (mt_activation)c->variant, T(1), T(0), T(2), T(3), T(4)))
RUN(run_linear_gradients, mt_linear_gradients(c->ctx, T(1), T(2), T(0), T(3)))
RUN(run_norm_forward, mt_norm_forward(c->ctx, (mt_norm_kind)c->variant, T(0), T(1), T(2), 1e-5f, T(3), T(4)))
RUN(run_norm_backward,
    mt_norm_backward(c->ctx, (mt_norm_kind)c->variant, T(0), T(1), T(2), T(3), T(4), T(5), T(6), T(7)))
RUN(run_multiply_col_backward, mt_multiply_col_backward(c->ctx, T(1), T(2), T(0), T(3), T(4)))

static const mt_adamw third_step = {
    .lr = 0.1f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-3f, .weight_decay = 0.1f, .grad_scale = 0.5f, .step = 3};

RUN(run_adamw, mt_adamw_step(c->ctx, &third_step, T(0), T(1), T(2), T(3), T(4)))

static mt_status run_multi_adamw(const call *c) {
    mt_adamw_tensor tensor = {.param = T(0), .master = T(1), .grad = T(2), .m = T(3), .v = T(4), .weight_decay = 1};
    mt_multi_tensor *list;
    mt_status status;
    MT_TRY(mt_multi_tensor_create_adamw(c->ctx, &tensor, 1, 0, &list));
    status = mt_multi_tensor_adamw(c->ctx, list, &third_step, NULL);
    mt_multi_tensor_destroy(c->ctx, list);
    return status;
}

static mt_status run_multi_sum_of_squares(const call *c) {
    mt_square_tensor tensor = {.x = T(0)};
    mt_multi_tensor *list;
    mt_status status;
    MT_TRY(mt_multi_tensor_create_squares(c->ctx, &tensor, 1, &list));
    status = mt_multi_tensor_sum_of_squares(c->ctx, list, T(1));
    mt_multi_tensor_destroy(c->ctx, list);
    return status;
}

/* Ranks that have rows or columns of y (operand i) of their own take other random words. */
static mt_dropout dropout_of(const call *c, int i) {
    mt_dropout d = {.p = 0.4f, .at = {.seed = 5, .subsequence = 3}};
    d.at.first_row = first_row(c, i);
    d.at.first_col = first_col(c, i);
    d.at.global_cols = T(i).cols * (c->at[i] == 'c' ? RANKS : 1);
    return d;
}

RUN(run_bias_dropout_add_forward, mt_bias_dropout_add_forward(c->ctx, T(0), T(1), T(2), dropout_of(c, 3), T(3)))
RUN(run_bias_dropout_add_backward, mt_bias_dropout_add_backward(c->ctx, T(0), dropout_of(c, 1), T(1), T(2)))

enum { HEAD = 2, CACHED = 5 };
/* Variants of attention, whose bits may be combined. Without FIXED_SEQ the rows of a call are one sequence. */
enum { MHA = 1, FIXED_SEQ = 2, BATCH_BIAS = 4, DROPS = 8, ONE_GROUP = 16, BIDIRECTIONAL = 32 };
/* The columns of a query group in qkv, and of its queries alone. */
enum { QKV = 4 * HEAD, QKV_MHA = 3 * HEAD, QUERIES = 2 * HEAD };

/* Returns the sizes of a call with operand i, whose query groups have `width` columns. seq = 0: its rows. */
static mt_attention_desc attention_of(const call *c, int i, int64_t width, int64_t seq) {
    mt_attention_desc d = {.seq = seq ? seq : T(i).rows, .heads_per_group = width == QKV_MHA ? 1 : 2, .head_dim = HEAD};
    d.batch = T(i).rows / d.seq;
    d.groups = T(i).cols / width;
    d.qkv_layout = width == QKV_MHA ? MT_QKV_CONCATENATED : MT_QKV_PER_GROUP;
    return d;
}

/* Adds the bias, dropout and number of keys. A bias of more heads than those of the call has the heads of all ranks. */
static mt_attention_desc scores_of(const call *c, mt_attention_desc d, mt_tensor bias, mt_tensor dbias) {
    int64_t heads = d.groups * d.heads_per_group;
    if (c->variant & DROPS) {
        d.dropout = (mt_dropout){.p = 0.3f, .at = {.seed = 5, .global_cols = heads * (c->at[0] == 'c' ? RANKS : 1)}};
        d.dropout.at.first_row = c->at[0] == 'r' ? c->rank * d.batch : 0;
        d.dropout.at.first_col = c->at[0] == 'c' ? c->rank * heads : 0;
    }
    if (!bias.data) return d;
    d.bias.value = bias;
    d.bias.grad = dbias;
    d.bias.batch = c->variant & BATCH_BIAS ? d.batch : 1;
    d.bias.heads = bias.rows / d.seq / d.bias.batch;
    if (d.bias.heads > heads) d.bias.first_head = c->rank * heads;
    return d;
}

static mt_attention_desc qkv_desc(const call *c, mt_tensor bias, mt_tensor dbias) {
    int64_t width = c->variant & MHA ? QKV_MHA : QKV;
    return scores_of(c, attention_of(c, 0, width, c->variant & FIXED_SEQ ? 6 : 0), bias, dbias);
}

static mt_attention_desc q_desc(const call *c, mt_tensor bias, mt_tensor dbias) {
    mt_attention_desc d = attention_of(c, 0, QUERIES, c->variant & FIXED_SEQ ? 6 : 0);
    d.kv_seq = T(1).rows / d.batch;
    if (c->variant & BIDIRECTIONAL) d.scores.mask = MT_MASK_BIDIRECTIONAL;
    if (c->variant & ONE_GROUP) d.groups = 1, d.heads_per_group = T(0).cols / HEAD;
    return scores_of(c, d, bias, dbias);
}

static mt_status run_attention_forward(const call *c) {
    mt_attention_desc d = qkv_desc(c, T(3), mt_none());
    return mt_attention_forward(c->ctx, &d, T(0), T(1), T(2));
}

static mt_status run_attention_backward(const call *c) {
    mt_attention_desc d = qkv_desc(c, T(5), T(6));
    return mt_attention_backward(c->ctx, &d, T(0), T(2), T(1), T(3), T(4));
}

static mt_status run_dot_product_forward(const call *c) {
    mt_attention_desc d = q_desc(c, T(5), mt_none());
    return mt_dot_product_attention_forward(c->ctx, &d, T(0), T(1), T(2), T(3), T(4));
}

static mt_status run_dot_product_backward(const call *c) {
    mt_attention_desc d = q_desc(c, T(9), T(10));
    return mt_dot_product_attention_backward(c->ctx, &d, T(0), T(1), T(2), T(4), T(3), T(5), T(6), T(7), T(8));
}

RUN(run_rotary_table, mt_rotary_table(c->ctx, 100.0f, T(0)))

/* variant: 1: backward */
static mt_status run_merge(const call *c) { return mt_attention_merge(c->ctx, T(0), T(1), T(2), T(3)); }

static mt_status run_rotary(const call *c) {
    mt_attention_desc d = attention_of(c, 0, QKV, T(1).rows);
    return c->variant ? mt_rotary_backward(c->ctx, &d, T(1), T(0)) : mt_rotary_forward(c->ctx, &d, T(1), T(0));
}

/* Two new tokens in each of two sequences. keys, values: numbers of operands */
static mt_attention_desc cache_of(const call *c, int keys, int values, mt_kv_cache *cache) {
    static const int32_t lengths[] = {1, 2};
    mt_attention_desc d = attention_of(c, 0, QKV, 2);
    *cache = (mt_kv_cache){T(keys), T(values), CACHED, lengths + (c->at[0] == 'r' ? c->rank * d.batch : 0)};
    return d;
}

static mt_status run_cache_append(const call *c) {
    mt_kv_cache cache;
    mt_attention_desc d = cache_of(c, 2, 3, &cache);
    return mt_kv_cache_append(c->ctx, &d, T(1), T(0), &cache);
}

static mt_status run_cache_attention(const call *c) {
    mt_kv_cache cache;
    mt_attention_desc d = cache_of(c, 1, 2, &cache);
    return mt_kv_cache_attention(c->ctx, &d, T(0), &cache, T(3));
}

enum { TOKENS = 6, VOCAB = 14 };
static const int32_t targets[TOKENS] = {3, 11, 0, 7, 13, 5};

/* Operand i has the logits, or (rows = 0) a number for each token in its columns. */
static const int32_t *targets_of(const call *c, int i, int rows) {
    return targets + (rows ? first_row(c, i) : first_col(c, i));
}

static mt_cross_entropy_shard_desc shard_of(const call *c, int i) {
    return (mt_cross_entropy_shard_desc){.vocab = VOCAB, .first_col = first_col(c, i), .label_smoothing = 0.1f};
}

static mt_status run_stats(const call *c) {
    mt_cross_entropy_shard_desc d = shard_of(c, 0);
    return mt_cross_entropy_stats(c->ctx, &d, T(0), targets_of(c, 0, 1), T(1));
}

static mt_status run_combine(const call *c) {
    mt_cross_entropy_shard_desc d = {.vocab = VOCAB, .label_smoothing = 0.1f};
    return mt_cross_entropy_combine(c->ctx, &d, T(0), RANKS, targets_of(c, 1, 0), T(1), T(2));
}

static mt_status run_cross_entropy_backward(const call *c) {
    mt_cross_entropy_shard_desc d = shard_of(c, 0);
    return mt_cross_entropy_backward(c->ctx, &d, T(0), targets_of(c, 0, 1), T(1), T(2), 1.5f);
}

static mt_status run_cross_entropy(const call *c) {
    mt_cross_entropy_shard_desc d = shard_of(c, 0);
    return mt_cross_entropy_forward_backward(c->ctx, &d, T(0), targets_of(c, 0, 1), T(2), 1.5f, T(1));
}

/* variant: 1: log-softmax */
static mt_softmax_shard_desc softmax_shard_of(const call *c, int i) {
    return (mt_softmax_shard_desc){.vocab = VOCAB, .first_col = first_col(c, i), .log = c->variant};
}

static mt_status run_place_shard_stats(const call *c) {
    mt_softmax_shard_desc d = softmax_shard_of(c, 0);
    return mt_softmax_shard_stats(c->ctx, &d, T(0), T(1));
}

static mt_status run_place_shard_forward(const call *c) {
    mt_softmax_shard_desc d = softmax_shard_of(c, 0);
    return mt_softmax_shard_forward(c->ctx, &d, T(0), T(1), RANKS, T(2));
}

static mt_status run_place_shard_sums(const call *c) {
    mt_softmax_shard_desc d = softmax_shard_of(c, 1);
    return mt_softmax_shard_sums(c->ctx, &d, T(0), T(1), T(2));
}

static mt_status run_place_shard_backward(const call *c) {
    mt_softmax_shard_desc d = softmax_shard_of(c, 0);
    return mt_softmax_shard_backward(c->ctx, &d, T(0), T(1), T(2), T(3));
}

static mt_sample_desc sample_of(const call *c) {
    mt_sample_desc d = {.temperature = 0.8f, .top_k = c->variant, .seed = 9};
    d.first_sequence = (uint64_t)first_row(c, 0);
    return d;
}

static mt_status run_sample_candidates(const call *c) {
    mt_sample_desc d = sample_of(c);
    return mt_sample_candidates(c->ctx, &d, VOCAB, first_col(c, 0), T(0), T(1));
}

static mt_status run_sample_ids(const call *c) {
    mt_sample_desc d = sample_of(c);
    d.first_sequence = (uint64_t)first_row(c, 1);
    if (T(0).rows != RANKS * T(1).rows) return MT_ERR_SHAPE;
    return mt_sample_ids(c->ctx, &d, VOCAB, T(0), RANKS, (int32_t *)T(1).data);
}

/* What a step decides is the same on all ranks. Operand 2 has some of it, which check mode does not follow. */
static mt_status run_step_decide(const call *c) {
    mt_step_values values = {.lr = 0.5f, .max_norm = 2.0f};
    mt_loss_scaler_desc unscaled = {.initial_scale = 1.0f};
    ASSERT_STATUS(c->ctx, MT_SUCCESS, mt_loss_scaler_create(c->ctx, &unscaled, &values.scaler));
    MT_TRY(mt_step_decide(c->ctx, T(0), T(1), &values));
    if (c->comm) return mt_declare(c->ctx, c->comm, T(2), MT_REPLICATED);
    ((float *)T(2).data)[0] = values.norm;
    ((float *)T(2).data)[1] = values.loss;
    return MT_SUCCESS;
}

/* variant: the score, and 4: normalised */
static mt_router_desc router_of(const call *c) {
    return (mt_router_desc){.topk = 3, .score = (mt_router_score)(c->variant & 3), .normalize = (c->variant & 4) != 0};
}

/* Sets *out to the memory of a tensor that a call takes as a pointer. Returns MT_ERR_SHAPE where the call needs another
   shape. */
static mt_status ints(mt_tensor t, int64_t rows, int64_t cols, int32_t **out) {
    *out = (int32_t *)t.data;
    return !t.data || (t.rows == rows && t.cols == cols) ? MT_SUCCESS : MT_ERR_SHAPE;
}

static mt_status run_router_forward(const call *c) {
    const mt_router_desc d = router_of(c);
    int32_t *valid, *ids;
    MT_TRY(ints(T(2), T(0).rows, 1, &valid));
    MT_TRY(ints(T(4), T(0).rows, 3, &ids));
    return mt_router_forward(c->ctx, &d, T(0), T(1), valid, T(3), ids);
}

static mt_status run_router_backward(const call *c) {
    const mt_router_desc d = router_of(c);
    int32_t *ids;
    MT_TRY(ints(T(1), T(0).rows, 3, &ids));
    return mt_router_backward(c->ctx, &d, T(0), ids, T(2), T(3), T(4), T(5));
}

static mt_status run_router_sums(const call *c) {
    const mt_router_desc d = router_of(c);
    int32_t *ids, *counts;
    MT_TRY(ints(T(1), T(0).rows, 3, &ids));
    MT_TRY(ints(T(2), 1, T(0).cols, &counts));
    return mt_router_sums(c->ctx, &d, T(0), ids, counts, T(3));
}

static mt_status run_router_losses(const call *c) {
    int32_t *counts;
    MT_TRY(ints(T(0), 1, T(3).cols, &counts));
    return mt_router_losses(c->ctx, 3, 0.5f, 0.25f, counts, T(1), T(2), T(3), T(4));
}

static mt_status run_router_bias_update(const call *c) {
    int32_t *counts;
    MT_TRY(ints(T(0), 1, T(1).cols, &counts));
    return mt_router_bias_update(c->ctx, 0.125f, counts, T(1));
}

/* ids: operand 0, table or its gradient: operand 1 or 2 */
static mt_status run_embedding_forward(const call *c) {
    const int32_t *ids = (const int32_t *)T(0).data;
    if (T(0).rows != T(2).rows) return MT_ERR_SHAPE;
    return mt_embedding_forward(c->ctx, T(1), first_row(c, 1), ids, (float)c->variant, T(2));
}

static mt_status run_embedding_backward(const call *c) {
    if (T(0).rows != T(1).rows) return MT_ERR_SHAPE;
    return mt_embedding_backward(c->ctx, T(1), first_row(c, 2), (const int32_t *)T(0).data, T(2));
}

/* variant: 1: a is transposed, 2: b is transposed, 4: adds to c */
static mt_status run_gemm_of(const call *c, mt_tensor a, mt_tensor b, mt_tensor y) {
    return mt_gemm(c->ctx, c->variant & 1 ? MT_TRANS : MT_NO_TRANS, c->variant & 2 ? MT_TRANS : MT_NO_TRANS, 1.25f, a,
                   b, c->variant & 4 ? 1.0f : 0.0f, y);
}

RUN(run_gemm, run_gemm_of(c, T(0), T(1), T(2)))

enum { M = 6, N = 14, K = 10 };
/* A product for each sequence, whose matrices lie one below the other. */
static mt_status run_gemm_of_sequences(const call *c) {
    int64_t a = c->variant & 1 ? K : M, b = c->variant & 2 ? N : K, count = T(0).rows / a;
    if (T(1).rows != count * b || T(2).rows != count * M) return MT_ERR_SHAPE;
    for (int64_t i = 0; i < count; i++)
        MT_TRY(run_gemm_of(c, mt_tensor_rows(T(0), i * a, a), mt_tensor_rows(T(1), i * b, b),
                           mt_tensor_rows(T(2), i * M, M)));
    return MT_SUCCESS;
}

/* mt_linear_forward and mt_linear_gradients for each sequence. */
static mt_status run_linear_forward_of_sequences(const call *c) {
    int64_t count = T(1).rows / M;
    if (T(0).rows != count * N || T(3).rows != count * M) return MT_ERR_SHAPE;
    for (int64_t i = 0; i < count; i++)
        MT_TRY(mt_linear_forward(c->ctx, mt_tensor_rows(T(1), i * M, M), mt_tensor_rows(T(0), i * N, N), T(2),
                                 mt_tensor_rows(T(3), i * M, M)));
    return MT_SUCCESS;
}

static mt_status run_linear_gradients_of_sequences(const call *c) {
    int64_t count = T(1).rows / M;
    if (T(2).rows != count * M || T(0).rows != count * N) return MT_ERR_SHAPE;
    for (int64_t i = 0; i < count; i++)
        MT_TRY(mt_linear_gradients(c->ctx, mt_tensor_rows(T(1), i * M, M), mt_tensor_rows(T(2), i * M, M),
                                   mt_tensor_rows(T(0), i * N, N), T(3)));
    return MT_SUCCESS;
}

/* ---- operators of mt_test_operators.h ---------------------------------------------------------------------------- */

static mt_status run_by_table(const call *c) {
    const operator_entry *e = c->by_table;
    mt_tensor v[MTI_ARGS];
    for (int i = 0; i < MTI_ARGS && e->table->operands[i].name; i++) {
        const char *name = e->table->operands[i].name;
        v[i] = T(mti_rule_number(&e->table->rule, name, strlen(name)));
    }
    return e->run(c->ctx, v);
}

static int size_by_table(char letter) {
    return letter <= '9' ? letter - '0' : letter == 'n' ? 6 : letter == 'm' ? 10 : 14;
}

/* Describes the operands of an entry, in the order of the rule. */
static void describe_by_table(const operator_entry *e, char *text, size_t size) {
    const char *next = e->table->rule.operands, *word;
    size_t n = 0, length;
    while ((length = mti_rule_word(&next, &word)) > 0) {
        const mti_operand *o = e->table->operands;
        while (strlen(o->name) != length || strncmp(o->name, word, length) != 0) o++;
        int reads = (o->use & MT_ARG_IN) || operator_lists(e->reads, o->name), writes = o->use & MT_ARG_OUT;
        n += (size_t)snprintf(text + n, size - n, "%s%s %s %dx%d%s", n ? ", " : "", o->name,
                              !writes               ? "in"
                              : !reads              ? "out"
                              : o->use & MT_ARG_SUM ? "sum"
                                                    : "inout",
                              size_by_table(o->shape[0]), size_by_table(o->shape[1]),
                              o->use & MT_ARG_OPTIONAL ? " optional" : "");
    }
}

/* ---- results that must be gathered ------------------------------------------------------------------------------- */

/* Puts operand i of the calls one below the other. */
static mt_tensor gather(mt_context *ctx, const call *calls, int count, int i) {
    int64_t rows = calls[0].t[i].rows, cols = calls[0].t[i].cols;
    mt_tensor all;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_tensor(ctx, MT_F32, count * rows, cols, &all));
    for (int rank = 0; rank < count; rank++)
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_copy(ctx, calls[rank].t[i], mt_tensor_rows(all, rank * rows, rows)));
    return all;
}

/* Whether the stats of the ranks and those of the whole give the same losses. */
static int gathered_stats(mt_context *ctx, const call *ranks, const call *whole) {
    mt_cross_entropy_shard_desc d = {.vocab = VOCAB, .label_smoothing = 0.1f};
    const call *calls[] = {ranks, whole};
    mt_tensor loss[2], lse;
    if (ranks->t[1].rows != TOKENS) return 0;
    for (int i = 0; i < 2; i++) {
        int shards = i == 0 ? RANKS : 1;
        mt_tensor all = gather(ctx, calls[i], shards, 1);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_tensor(ctx, MT_F32, 1, TOKENS, &loss[i]));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_tensor(ctx, MT_F32, 2, TOKENS, &lse));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_cross_entropy_combine(ctx, &d, all, shards, targets, loss[i], lse));
    }
    for (int k = 0; k < TOKENS; k++)
        if (!(fabsf(((float *)loss[0].data)[k] - ((float *)loss[1].data)[k]) < 1e-4f)) return 0;
    return 1;
}

/* Whether the stats of the ranks and those of the whole give the same softmax of 0. */
static int gathered_softmax_stats(mt_context *ctx, const call *ranks, const call *whole) {
    mt_softmax_shard_desc d = {.vocab = 1};
    const call *calls[] = {ranks, whole};
    mt_tensor zeros, y[2];
    if (ranks->t[1].rows != TOKENS) return 0;
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_tensor(ctx, MT_F32, TOKENS, 1, &zeros));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_fill(ctx, zeros, 0.0f));
    for (int i = 0; i < 2; i++) {
        int shards = i == 0 ? RANKS : 1;
        mt_tensor all = gather(ctx, calls[i], shards, 1);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_tensor(ctx, MT_F32, TOKENS, 1, &y[i]));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_softmax_shard_forward(ctx, &d, zeros, all, shards, y[i]));
    }
    for (int k = 0; k < TOKENS; k++)
        if (!(fabsf(((float *)y[0].data)[k] - ((float *)y[1].data)[k]) < 1e-5f)) return 0;
    return 1;
}

/* Whether the candidates of the ranks and those of the whole give the same tokens. */
static int gathered_candidates(mt_context *ctx, const call *ranks, const call *whole) {
    const call *calls[] = {ranks, whole};
    mt_sample_desc d = sample_of(whole);
    int32_t ids[2][TOKENS];
    if (ranks->t[1].rows != TOKENS) return 0;
    for (int i = 0; i < 2; i++) {
        int shards = i == 0 ? RANKS : 1;
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_sample_ids(ctx, &d, VOCAB, gather(ctx, calls[i], shards, 1), shards, ids[i]));
    }
    return memcmp(ids[0], ids[1], sizeof ids[0]) == 0;
}

/* ---- calls that communicate -------------------------------------------------------------------------------------- */

#define MOVES(name) RUN(run_##name, mt_##name(c->ctx, c->comm, T(0)))
#define MOVES_TO(name) RUN(run_##name, mt_##name(c->ctx, c->comm, T(0), T(1)))
MOVES(copy_to_tensor_region_forward)
MOVES(copy_to_tensor_region_backward)
MOVES(reduce_from_tensor_region_forward)
MOVES(reduce_from_tensor_region_backward)
MOVES_TO(scatter_to_tensor_region)
MOVES_TO(gather_from_tensor_region)
MOVES_TO(scatter_to_sequence_region)
MOVES_TO(gather_from_sequence_region)
MOVES_TO(reduce_scatter_to_sequence_region)

/* The same in two chunks: the first rank, and the others. */
static mt_status run_gather_ranks_from_sequence_region(const call *c) {
    int size = mt_comm_size(c->comm);
    MT_TRY(mt_gather_ranks_from_sequence_region(c->ctx, c->comm, T(0), T(1), 0, 1));
    return size == 1 ? MT_SUCCESS : mt_gather_ranks_from_sequence_region(c->ctx, c->comm, T(0), T(1), 1, size - 1);
}

static mt_status run_reduce_scatter_ranks_to_sequence_region(const call *c) {
    int size = mt_comm_size(c->comm);
    MT_TRY(mt_reduce_scatter_ranks_to_sequence_region(c->ctx, c->comm, T(0), T(1), 0, 1));
    return size == 1 ? MT_SUCCESS
                     : mt_reduce_scatter_ranks_to_sequence_region(c->ctx, c->comm, T(0), T(1), 1, size - 1);
}

static mt_status run_reduce_rows_from_tensor_region(const call *c) {
    MT_TRY(mt_reduce_rows_from_tensor_region(c->ctx, c->comm, T(0), 0, 2));
    return mt_reduce_rows_from_tensor_region(c->ctx, c->comm, T(0), 2, T(0).rows - 2);
}

static size_t size_of(mt_tensor t) { return (size_t)(t.rows * t.cols); }

static mt_status run_all_reduce(const call *c) {
    return mt_all_reduce(c->ctx, c->comm, T(0).data, T(0).data, size_of(T(0)), MT_F32, MT_SUM);
}

static mt_status run_all_gather(const call *c) {
    if (size_of(T(1)) != RANKS * size_of(T(0))) return MT_ERR_SHAPE;
    return mt_all_gather(c->ctx, c->comm, T(0).data, T(1).data, size_of(T(0)), MT_F32);
}

static mt_status run_reduce_scatter(const call *c) {
    if (size_of(T(0)) != RANKS * size_of(T(1))) return MT_ERR_SHAPE;
    return mt_reduce_scatter(c->ctx, c->comm, T(0).data, T(1).data, size_of(T(1)), MT_F32, MT_SUM);
}

/* ---- the operators ----------------------------------------------------------------------------------------------- */

#define OP(...)                                                                                                        \
    { __VA_ARGS__, NULL, NULL }
/* Operands of several entries. */
#define ACTIVATION_FORWARD "h inout 6x10, bias in 1x10 optional, y out 6x10"
#define ACTIVATION_BACKWARD "dy in 6x10, h in 6x10, dh out 6x10, dbias sum 1x10 optional"
#define NORM_FORWARD "x in 6x10, gain in 1x10, bias in 1x10 optional, y out 6x10, stats out 6x2 optional"
#define NORM_BACKWARD                                                                                                  \
    "x in 6x10, gain in 1x10, stats in 6x2, dy in 6x10, dresidual in 6x10 optional, dx out 6x10, dgain sum 1x10, "     \
    "dbias sum 1x10 optional"
#define ROUTER_FORWARD                                                                                                 \
    "logits in 6x14, bias in 1x14 optional, valid in 6x1 ids optional, weights out 6x3, ids out 6x3 ids"
#define ROUTER_BACKWARD                                                                                                \
    "logits in 6x14, ids in 6x3 ids, dweights in 6x3, dscores in 1x14 optional, dlse in 1x1 optional, dlogits out "    \
    "6x14"
#define CACHE_APPEND                                                                                                   \
    "qkv inout 4x16, table in 5x2 optional, keys inout 20x2 like qkv cache, values inout 20x2 like qkv cache"
#define CACHE_ATTENTION "qkv in 4x16, keys in 20x2 like qkv cache, values in 20x2 like qkv cache, out out 4x8"

static const entry entries[] = {
    OP("mt_copy", TENSOR, 0, run_copy, "x in 6x10, y out 6x10"),
    OP("mt_convert", TENSOR, 0, run_convert, "x in 6x10 bf16, y out 6x10"),
    OP("mt_sum", TENSOR, 0, run_sum, "x in 6x10, out sum 1x1"),
    OP("mt_tree_sum", TENSOR, 0, run_tree_sum, "x in 6x10, sum out 1x10"),
    OP("mt_sum_of_squares", TENSOR, 0, run_sum_of_squares, "x in 6x10, out sum 1x1"),
    OP("mt_activation_forward", TENSOR, MT_GELU_TANH, run_activation_forward, ACTIVATION_FORWARD),
    OP("mt_activation_backward", TENSOR, MT_GELU_TANH, run_activation_backward, ACTIVATION_BACKWARD),
    OP("mt_activation_forward", TENSOR, MT_SQUARED_RELU, run_activation_forward, ACTIVATION_FORWARD),
    OP("mt_activation_backward", TENSOR, MT_SQUARED_RELU, run_activation_backward, ACTIVATION_BACKWARD),
    OP("mt_activation_forward", TENSOR, MT_SWIGLU, run_activation_forward,
       "h inout 6x20 parts 2, bias in 1x20 optional parts 2, y out 6x10"),
    OP("mt_activation_backward", TENSOR, MT_SWIGLU, run_activation_backward,
       "dy in 6x10, h in 6x20 parts 2, dh out 6x20 parts 2, dbias sum 1x20 optional parts 2"),
    OP("mt_linear_forward", TENSOR, 0, run_linear_forward,
       "weight in 14x10, x in 6x10, bias in 1x14 optional, y out 6x14"),
    OP("mt_linear_activation_forward", TENSOR, MT_GELU_TANH, run_linear_activation_forward,
       "weight in 14x10, x in 6x10, bias in 1x14 optional, h out 6x14, y out 6x14"),
    OP("mt_linear_activation_forward", TENSOR, MT_SWIGLU, run_linear_activation_forward,
       "weight in 12x10 row_parts 2, x in 6x10, bias in 1x12 optional parts 2, h out 6x12 parts 2, y out 6x6"),
    OP("mt_linear_activation_backward", TENSOR, MT_GELU_TANH, run_linear_activation_backward,
       "weight in 10x14, dy in 6x10, h in 6x14, dh out 6x14, dbias sum 1x14 optional"),
    OP("mt_linear_activation_backward", TENSOR, MT_SWIGLU, run_linear_activation_backward,
       "weight in 10x6, dy in 6x10, h in 6x12 parts 2, dh out 6x12 parts 2, dbias sum 1x12 optional parts 2"),
    OP("mt_linear_gradients", TENSOR, 0, run_linear_gradients,
       "dweight sum 14x10, dy in 6x14, x in 6x10, dbias sum 1x14 optional"),
    {"mt_linear_forward", DATA, 0, run_linear_forward_of_sequences,
     "weight in 28x10, x in 12x10, bias in 1x14 optional, y out 12x14", "RrP", NULL},
    {"mt_linear_gradients", DATA, 0, run_linear_gradients_of_sequences,
     "dweight sum 28x10, dy in 12x14, x in 12x10, dbias sum 1x14 optional", "RrP", NULL},
    OP("mt_norm_forward", TENSOR, MT_LAYER_NORM, run_norm_forward, NORM_FORWARD),
    OP("mt_norm_backward", TENSOR, MT_LAYER_NORM, run_norm_backward, NORM_BACKWARD),
    OP("mt_norm_forward", TENSOR, MT_RMS_NORM, run_norm_forward, NORM_FORWARD),
    OP("mt_norm_backward", TENSOR, MT_RMS_NORM, run_norm_backward, NORM_BACKWARD),
    OP("mt_bias_dropout_add_forward", TENSOR, 0, run_bias_dropout_add_forward,
       "x in 6x10, bias in 1x10 optional, residual in 6x10 optional, y out 6x10"),
    OP("mt_bias_dropout_add_backward", TENSOR, 0, run_bias_dropout_add_backward,
       "dy in 6x10, dx out 6x10, dbias sum 1x10 optional"),
    OP("mt_attention_forward", TENSOR, DROPS, run_attention_forward,
       "qkv in 6x16, out out 6x8, lse out 4x6 optional, bias in 24x6 optional"),
    OP("mt_attention_backward", TENSOR, DROPS, run_attention_backward,
       "qkv in 6x16, lse in 4x6, out in 6x8, dout in 6x8, dqkv out 6x16 like qkv, bias in 24x6 optional, dbias sum "
       "24x6 optional like bias"),
    OP("mt_attention_forward", TENSOR, MHA, run_attention_forward,
       "qkv in 6x12 parts 3, out out 6x4, lse out 2x6 optional, bias in 6x6 optional"),
    OP("mt_attention_backward", TENSOR, MHA, run_attention_backward,
       "qkv in 6x12 parts 3, lse in 2x6, out in 6x4, dout in 6x4, dqkv out 6x12 like qkv parts 3, bias in 6x6 "
       "optional, dbias sum 6x6 optional like bias"),
    OP("mt_attention_forward", TENSOR, FIXED_SEQ | BATCH_BIAS, run_attention_forward,
       "qkv in 18x16, out out 18x8, lse out 4x18 optional, bias in 72x6 row_parts 3 optional"),
    OP("mt_attention_backward", TENSOR, FIXED_SEQ | BATCH_BIAS, run_attention_backward,
       "qkv in 18x16, lse in 4x18, out in 18x8, dout in 18x8, dqkv out 18x16 like qkv, bias in 72x6 row_parts 3 "
       "optional, dbias sum 72x6 row_parts 3 optional like bias"),
    OP("mt_attention_forward", DATA, FIXED_SEQ | DROPS, run_attention_forward,
       "qkv in 12x16 no_cols, out out 12x8, lse out 4x12 optional, bias in 24x6 optional"),
    OP("mt_attention_backward", DATA, FIXED_SEQ | DROPS, run_attention_backward,
       "qkv in 12x16 no_cols, lse in 4x12, out in 12x8, dout in 12x8, dqkv out 12x16 like qkv, bias in 24x6 optional, "
       "dbias sum 24x6 optional like bias"),
    OP("mt_attention_forward", DATA, FIXED_SEQ | BATCH_BIAS, run_attention_forward,
       "qkv in 12x16 no_cols, out out 12x8, lse out 4x12 optional, bias in 48x6 optional"),
    OP("mt_attention_backward", DATA, FIXED_SEQ | BATCH_BIAS, run_attention_backward,
       "qkv in 12x16 no_cols, lse in 4x12, out in 12x8, dout in 12x8, dqkv out 12x16 like qkv, bias in 48x6 optional, "
       "dbias sum 48x6 optional like bias"),
    OP("mt_dot_product_attention_forward", TENSOR, DROPS, run_dot_product_forward,
       "q in 6x8, k in 8x4, v in 8x4, out out 6x8, lse out 4x6 optional, bias in 24x8 optional"),
    OP("mt_dot_product_attention_backward", TENSOR, DROPS, run_dot_product_backward,
       "q in 6x8, k in 8x4, v in 8x4, lse in 4x6, out in 6x8, dout in 6x8, dq out 6x8 like q, dk out 8x4 like k, dv "
       "out 8x4 like v, bias in 24x8 optional, dbias sum 24x8 optional like bias"),
    OP("mt_dot_product_attention_forward", TENSOR, FIXED_SEQ | BATCH_BIAS, run_dot_product_forward,
       "q in 18x8, k in 24x4, v in 24x4, out out 18x8, lse out 4x18 optional, bias in 72x8 row_parts 3 optional"),
    /* without P, as it takes long */
    {"mt_dot_product_attention_backward", TENSOR, FIXED_SEQ | BATCH_BIAS, run_dot_product_backward,
     "q in 18x8, k in 24x4, v in 24x4, lse in 4x18, out in 18x8, dout in 18x8, dq out 18x8 like q, dk out 24x4 like "
     "k, dv out 24x4 like v, bias in 72x8 row_parts 3 optional, dbias sum 72x8 row_parts 3 optional like bias",
     "Rrc", NULL},
    OP("mt_dot_product_attention_forward", TENSOR, ONE_GROUP | DROPS, run_dot_product_forward,
       "q in 6x8, k in 8x2 no_cols, v in 8x2 no_cols, out out 6x8, lse out 4x6 optional, bias in 24x8 optional"),
    {"mt_dot_product_attention_backward", TENSOR, ONE_GROUP | DROPS, run_dot_product_backward,
     "q in 6x8, k in 8x2 no_cols, v in 8x2 no_cols, lse in 4x6, out in 6x8, dout in 6x8, dq out 6x8 like q, dk out 8x2 "
     "like k, dv out 8x2 like v, bias in 24x8 optional, dbias sum 24x8 optional like bias",
     "Rrc", NULL},
    OP("mt_dot_product_attention_forward", DATA, FIXED_SEQ | DROPS, run_dot_product_forward,
       "q in 12x8 no_cols, k in 16x4 no_cols, v in 16x4 no_cols, out out 12x8, lse out 4x12 optional, bias in 24x8 "
       "optional"),
    OP("mt_dot_product_attention_backward", DATA, FIXED_SEQ | DROPS, run_dot_product_backward,
       "q in 12x8 no_cols, k in 16x4 no_cols, v in 16x4 no_cols, lse in 4x12, out in 12x8, dout in 12x8, dq out 12x8 "
       "like q, dk out 16x4 like k, dv out 16x4 like v, bias in 24x8 optional, dbias sum 24x8 optional like bias"),
    OP("mt_dot_product_attention_forward", DATA, ONE_GROUP | FIXED_SEQ | DROPS, run_dot_product_forward,
       "q in 12x8 no_cols, k in 16x2 no_cols, v in 16x2 no_cols, out out 12x8, lse out 4x12 optional, bias in 24x8 "
       "optional"),
    OP("mt_dot_product_attention_backward", DATA, ONE_GROUP | FIXED_SEQ | DROPS, run_dot_product_backward,
       "q in 12x8 no_cols, k in 16x2 no_cols, v in 16x2 no_cols, lse in 4x12, out in 12x8, dout in 12x8, dq out 12x8 "
       "like q, dk out 16x2 like k, dv out 16x2 like v, bias in 24x8 optional, dbias sum 24x8 optional like bias"),
    OP("mt_dot_product_attention_forward", DATA, FIXED_SEQ | BATCH_BIAS, run_dot_product_forward,
       "q in 12x8 no_cols, k in 16x4 no_cols, v in 16x4 no_cols, out out 12x8, lse out 4x12 optional, bias in 48x8 "
       "optional"),
    {"mt_dot_product_attention_backward", DATA, FIXED_SEQ | BATCH_BIAS, run_dot_product_backward,
     "q in 12x8 no_cols, k in 16x4 no_cols, v in 16x4 no_cols, lse in 4x12, out in 12x8, dout in 12x8, dq out 12x8 "
     "like q, dk out 16x4 like k, dv out 16x4 like v, bias in 48x8 optional, dbias sum 48x8 optional like bias",
     "Rrc", NULL},
    {"mt_rotary_table", TENSOR, 0, run_rotary_table, "table out 5x6", "R", NULL},
    OP("mt_attention_merge", TENSOR, 0, run_merge, "out inout 6x8, lse inout 4x6, part_out in 6x8, part_lse in 4x6"),
    OP("mt_rotary_forward", TENSOR, 0, run_rotary, "qkv inout 8x16, table in 4x2"),
    OP("mt_rotary_backward", TENSOR, 1, run_rotary, "dqkv inout 8x16, table in 4x2"),
    OP("mt_rotary_forward", DATA, 0, run_rotary, "qkv inout 8x16, table in 4x2"),
    OP("mt_rotary_backward", DATA, 1, run_rotary, "dqkv inout 8x16, table in 4x2"),
    OP("mt_kv_cache_append", TENSOR, 0, run_cache_append, CACHE_APPEND),
    OP("mt_kv_cache_attention", TENSOR, 0, run_cache_attention, CACHE_ATTENTION),
    OP("mt_kv_cache_append", DATA, 0, run_cache_append, CACHE_APPEND),
    OP("mt_kv_cache_attention", DATA, 0, run_cache_attention, CACHE_ATTENTION),
    {"mt_cross_entropy_stats", TENSOR, 0, run_stats, "logits in 6x14, stats out 6x4 gathered", NULL, gathered_stats},
    OP("mt_cross_entropy_combine", TENSOR, 0, run_combine,
       "gathered in 12x4 positive row_parts 2, loss out 1x6, lse out 2x6 like loss"),
    OP("mt_cross_entropy_backward", TENSOR, 0, run_cross_entropy_backward,
       "logits inout 6x14, lse in 2x6, dloss in 1x6 optional"),
    OP("mt_cross_entropy_forward_backward", TENSOR, 0, run_cross_entropy,
       "logits inout 6x14, loss out 1x6, dloss in 1x6 optional"),
    OP("mt_cross_entropy_backward", TENSOR, 0, run_cross_entropy_backward,
       "logits inout 6x14, lse in 2x6, dloss in 1x1 optional"),
    OP("mt_cross_entropy_forward_backward", TENSOR, 0, run_cross_entropy,
       "logits inout 6x14, loss out 1x6, dloss in 1x1 optional"),
    {"mt_softmax_shard_stats", TENSOR, 0, run_place_shard_stats, "x in 6x14, stats out 6x2 gathered", NULL,
     gathered_softmax_stats},
    OP("mt_softmax_shard_forward", TENSOR, 0, run_place_shard_forward,
       "x in 6x14, gathered in 12x2 positive row_parts 2, y out 6x14"),
    OP("mt_softmax_shard_forward", TENSOR, 1, run_place_shard_forward,
       "x in 6x14, gathered in 12x2 positive row_parts 2, y out 6x14"),
    OP("mt_softmax_shard_sums", TENSOR, 0, run_place_shard_sums, "y in 6x14, dy in 6x14, sums out 6x1"),
    OP("mt_softmax_shard_sums", TENSOR, 1, run_place_shard_sums, "y in 6x14, dy in 6x14, sums out 6x1"),
    OP("mt_softmax_shard_backward", TENSOR, 0, run_place_shard_backward,
       "y in 6x14, dy in 6x14, sums in 6x1, dx out 6x14"),
    OP("mt_softmax_shard_backward", TENSOR, 1, run_place_shard_backward,
       "y in 6x14, dy in 6x14, sums in 6x1, dx out 6x14"),
    OP("mt_router_forward", TENSOR, 0, run_router_forward, ROUTER_FORWARD),
    OP("mt_router_forward", TENSOR, 6, run_router_forward, ROUTER_FORWARD),
    OP("mt_router_backward", TENSOR, 4, run_router_backward, ROUTER_BACKWARD),
    OP("mt_router_backward", TENSOR, 1, run_router_backward, ROUTER_BACKWARD),
    OP("mt_router_backward", TENSOR, 2, run_router_backward, ROUTER_BACKWARD),
    OP("mt_router_sums", TENSOR, 0, run_router_sums,
       "logits in 6x14, ids in 6x3 ids, counts sum 1x14 ids, sums sum 1x15"),
    OP("mt_router_losses", TENSOR, 0, run_router_losses,
       "counts in 1x14 ids, sums in 1x15, losses out 1x2 optional, dscores out 1x14, dlse out 1x1"),
    OP("mt_router_bias_update", TENSOR, 0, run_router_bias_update, "counts in 1x40 ids, bias inout 1x40"),
    {"mt_sample_candidates", TENSOR, 3, run_sample_candidates, "logits in 6x14, candidates out 6x6 gathered candidates",
     NULL, gathered_candidates},
    {"mt_sample_candidates", TENSOR, 0, run_sample_candidates, "logits in 6x14, candidates out 6x2 gathered candidates",
     NULL, gathered_candidates},
    OP("mt_sample_ids", TENSOR, 3, run_sample_ids, "gathered in 12x6 row_parts 2 candidates, ids out 6x1 ids"),
    OP("mt_sample_ids", TENSOR, 0, run_sample_ids, "gathered in 12x2 row_parts 2 candidates, ids out 6x1 ids"),
    OP("mt_step_decide", TENSOR, 0, run_step_decide,
       "sums in 1x2 positive, loss in 1x1 optional, decided out 1x2 no_cols"),
    OP("mt_adamw_step", TENSOR, 0, run_adamw,
       "param inout 6x10, master inout 6x10 optional, grad in 6x10, m inout 6x10, v inout 6x10 positive"),
    OP("mt_adamw_step", TENSOR, 0, run_adamw,
       "param inout 6x10 bf16, master inout 6x10 optional, grad in 6x10, m inout 6x10, v inout 6x10 positive"),
    OP("mt_multi_tensor_adamw", TENSOR, 0, run_multi_adamw,
       "param inout 6x10, master inout 6x10 optional, grad in 6x10, m inout 6x10, v inout 6x10 positive"),
    OP("mt_multi_tensor_sum_of_squares", TENSOR, 0, run_multi_sum_of_squares, "x in 6x10, out sum 1x1"),
    OP("mt_multiply_col_backward", TENSOR, 0, run_multiply_col_backward,
       "dy in 6x10, x in 6x10, col in 6x1, dx out 6x10 optional, dcol out 6x1 optional"),
    OP("mt_embedding_forward", TENSOR, 0, run_embedding_forward, "ids in 6x1 ids, table in 14x10, y out 6x10"),
    OP("mt_embedding_forward", TENSOR, 1, run_embedding_forward, "ids in 6x1 ids, table in 14x10, y sum 6x10"),
    OP("mt_embedding_backward", TENSOR, 0, run_embedding_backward, "ids in 6x1 ids, dy in 6x10, dtable inout 14x10"),
    OP("mt_gemm", TENSOR, 0, run_gemm, "a in 6x10, b in 10x14, c out 6x14"),
    OP("mt_gemm", TENSOR, 4, run_gemm, "a in 6x10, b in 10x14, c sum 6x14"),
    OP("mt_gemm", TENSOR, 1, run_gemm, "a in 10x6, b in 10x14, c out 6x14"),
    OP("mt_gemm", TENSOR, 5, run_gemm, "a in 10x6, b in 10x14, c sum 6x14"),
    OP("mt_gemm", TENSOR, 2, run_gemm, "a in 6x10, b in 14x10, c out 6x14"),
    OP("mt_gemm", TENSOR, 6, run_gemm, "a in 6x10, b in 14x10, c sum 6x14"),
    OP("mt_gemm", TENSOR, 3, run_gemm, "a in 10x6, b in 14x10, c out 6x14"),
    OP("mt_gemm", TENSOR, 7, run_gemm, "a in 10x6, b in 14x10, c sum 6x14"),
    {"mt_gemm", DATA, 0, run_gemm_of_sequences, "a in 12x10, b in 20x14, c out 12x14", "RrP", NULL},
    {"mt_gemm", DATA, 1, run_gemm_of_sequences, "a in 20x6, b in 20x14, c out 12x14", "RrP", NULL},
    {"mt_gemm", DATA, 2, run_gemm_of_sequences, "a in 12x10, b in 28x10, c out 12x14", "RrP", NULL},
    {"mt_gemm", DATA, 3, run_gemm_of_sequences, "a in 20x6, b in 28x10, c out 12x14", "RrP", NULL},
    /* one sequence */
    OP("mt_rotary_forward", TENSOR, 0, run_rotary, "qkv inout 6x16, table in 6x2"),
    OP("mt_rotary_backward", TENSOR, 1, run_rotary, "dqkv inout 6x16, table in 6x2"),
    /* own queries of all keys; rows of the bias are r by tokens, not by heads as with c */
    {"mt_dot_product_attention_forward", TENSOR, BIDIRECTIONAL, run_dot_product_forward,
     "q in 6x8, k in 8x4, v in 8x4, out out 6x8, lse out 4x6 optional, bias in 24x8 optional row_parts 4", "RrP", NULL},
    {"mt_dot_product_attention_backward", TENSOR, BIDIRECTIONAL, run_dot_product_backward,
     "q in 6x8, k in 8x4, v in 8x4, lse in 4x6, out in 6x8, dout in 6x8, dq out 6x8 like q, dk out 8x4 like k, dv "
     "out 8x4 like v, bias in 24x8 optional row_parts 4, dbias sum 24x8 optional like bias row_parts 4",
     "Rr", NULL},
};

/* None of these changes the whole: only its placement. */
#define MOVE(name, x) OP("mt_" #name, TENSOR, 0, run_##name, x " moves 6x10")
#define MOVE_TO(name) OP("mt_" #name, TENSOR, 0, run_##name, "x in 6x10, y out 6x10")
static const entry communication[] = {
    MOVE(copy_to_tensor_region_forward, "x"),
    MOVE(copy_to_tensor_region_backward, "dx"),
    MOVE(reduce_from_tensor_region_forward, "y"),
    MOVE(reduce_from_tensor_region_backward, "dy"),
    MOVE_TO(scatter_to_tensor_region),
    MOVE_TO(gather_from_tensor_region),
    MOVE_TO(scatter_to_sequence_region),
    MOVE_TO(gather_from_sequence_region),
    MOVE_TO(reduce_scatter_to_sequence_region),
    MOVE_TO(gather_ranks_from_sequence_region),
    MOVE_TO(reduce_scatter_ranks_to_sequence_region),
    MOVE(reduce_rows_from_tensor_region, "y"),
    MOVE(all_reduce, "x"),
    /* these know only memory: a share of the columns would be gathered as rows */
    {"mt_all_gather", TENSOR, 0, run_all_gather, "x in 6x10, y out 6x10", "RrP", NULL},
    {"mt_reduce_scatter", TENSOR, 0, run_reduce_scatter, "x in 6x10, y out 6x10", "RrP", NULL},
};

/* Combinations that are right, and that check mode refuses. A word has a letter for each operand, as in a rule. An
   operand that a call leaves out fits any letter. */
typedef struct refused {
    const char *name;
    int group; /* of the words */
    const char *words;
} refused;

static const refused refusals[] = {
    /* linear in a parameter, or in what no sum gives: nothing makes these operands partial */
    {"mt_norm_forward", TENSOR, "RPPPR"},
    {"mt_norm_backward", TENSOR, "RPRRPPRR"},
    {"mt_dot_product_attention_forward", TENSOR, "RRPPRR"},
    {"mt_dot_product_attention_forward", DATA, "RRPPRR"},
    {"mt_dot_product_attention_backward", TENSOR, "RRPRPRPPRRR RRPRPRPPRRP RrrRRRPrrRR"}, /* the last: own keys */
    {"mt_dot_product_attention_backward", DATA, "RRPRPRPPRRR RRPRPRPPRRP"},
    {"mt_rotary_forward", TENSOR, "PR"},
    {"mt_rotary_forward", DATA, "PR"},
    {"mt_scale_add", TENSOR, "RPRP RPPP"}, /* the last: b = 0 */
    {"mt_multiply_row_forward", TENSOR, "RPP"},
    {"mt_multiply_col_forward", TENSOR, "RPP"},
    {"mt_embedding_forward", TENSOR, "RPP"},
    {"mt_softmax_shard_sums", TENSOR, "PRP"},
    {"mt_softmax_shard_backward", TENSOR, "PRRP"},
    /* the same in gradients; without dx, the factor does not count */
    {"mt_multiply_row_backward", TENSOR, "RRPPR RPPPP PRP-P rrP-P"},
    {"mt_multiply_col_backward", TENSOR, "RRPPR RPPPP PRP-P ccP-P"},
    /* over tensor ranks, rows are any tokens, not whole sequences as here */
    {"mt_rotary_forward", TENSOR, "rR"},
    {"mt_rotary_backward", TENSOR, "rR"},
    {"mt_kv_cache_append", TENSOR, "rR**"},
    {"mt_kv_cache_attention", TENSOR, "r**r"},
    /* these do nothing in this direction, and sum what is replicated in the other one */
    {"mt_copy_to_tensor_region_forward", TENSOR, "r c P"},
    {"mt_reduce_from_tensor_region_backward", TENSOR, "r c P"},
};

/* ---- operands ---------------------------------------------------------------------------------------------------- */

/* An operator whose operands some calls leave out, and the values of its operands. */
typedef struct trial {
    const entry *op;
    const operator_entry *by_table; /* of mt_test_operators.h, or NULL */
    operand operands[OPERANDS];
    int count, present;                           /* present: a bit for each operand that the calls have */
    char letter[OPERANDS + 1];                    /* of the inputs; 0: a sum that begins as zeros; ' ': an output */
    char at[OPERANDS + 1];                        /* R, r or c */
    double whole[OPERANDS][ELEMENTS];             /* before the call */
    double addend[OPERANDS][ELEMENTS];            /* of rank 0, for P */
    double truth[OPERANDS][ELEMENTS];             /* after the call on the whole */
    double got[RANKS][OPERANDS][ELEMENTS];        /* after the call of a rank */
    mt_context *plain, *paper;                    /* on a CPU and on the meta device, without other ranks */
    test_rank checked[RANKS];                     /* on the meta device, in check mode */
    int communicates;                             /* 1: the entry is one of communication */
    int accepted, wrong;                          /* numbers of combinations */
    int used[sizeof refusals / sizeof *refusals]; /* bits of the words of each entry that were needed */
} trial;

static int has(const trial *t, int k) { return t->present >> k & 1; }

static int operand_number(const trial *t, const char *name) {
    for (int k = 0; k < t->count; k++)
        if (strcmp(t->operands[k].name, name) == 0) return k;
    fail_msg("%s: no operand '%s'", t->op->name, name);
    return -1;
}

/* Reads a word of the description of an operand. `number` is the word behind it. Returns 1 if that belongs to it. */
static int operand_word(trial *t, operand *o, const char *word, const char *number) {
    if (strcmp(word, "optional") == 0) o->optional = 1;
    else if (strcmp(word, "positive") == 0) o->positive = 1;
    else if (strcmp(word, "bf16") == 0) o->bf16 = 1;
    else if (strcmp(word, "ids") == 0) o->ids = 1;
    else if (strcmp(word, "candidates") == 0) o->halves = 1;
    else if (strcmp(word, "cache") == 0) o->cache = 1;
    else if (strcmp(word, "gathered") == 0) o->gathered = 1;
    else if (strcmp(word, "no_cols") == 0) o->no_cols = 1;
    else if (strcmp(word, "like") == 0) o->like = 1 + operand_number(t, number);
    else if (strcmp(word, "parts") == 0) o->parts = atoi(number);
    else if (strcmp(word, "row_parts") == 0) o->row_parts = atoi(number);
    else fail_msg("%s: '%s' means nothing", t->op->name, word);
    return strcmp(word, "like") == 0 || strstr(word, "parts") != NULL;
}

static void operand_of(trial *t, char *text) {
    operand *o = &t->operands[t->count];
    char use[8], words[5][16];
    int count, rows, cols;
    memset(o, 0, sizeof *o);
    o->parts = o->row_parts = 1;
    count = sscanf(text, " %11s %7s %dx%d %15s %15s %15s %15s %15s", o->name, use, &rows, &cols, words[0], words[1],
                   words[2], words[3], words[4]);
    if (count < 4 || rows * cols > ELEMENTS) fail_msg("%s: '%s' is no operand", t->op->name, text);
    o->rows = rows;
    o->cols = cols;
    o->sum = strcmp(use, "sum") == 0;
    o->moves = strcmp(use, "moves") == 0;
    o->reads = o->sum || o->moves || strncmp(use, "in", 2) == 0;
    o->writes = o->sum || o->moves || strstr(use, "out") != NULL;
    for (int i = 0; i < count - 4; i++) i += operand_word(t, o, words[i], i + 1 < count - 4 ? words[i + 1] : "");
    t->count++;
}

static void operands_of(trial *t, const entry *op) {
    char text[512], *rest = NULL;
    t->op = op;
    t->count = 0;
    snprintf(text, sizeof text, "%s", op->operands);
    for (char *each = strtok_r(text, ",", &rest); each; each = strtok_r(NULL, ",", &rest)) operand_of(t, each);
}

/* ---- shares ------------------------------------------------------------------------------------------------------ */

/* Whether an operand can be shared out so. */
static int divides(const operand *o, char at) {
    if (at == 'r' && !o->cache) return o->rows % (RANKS * o->row_parts) == 0;
    if (at == 'c' && !o->cache) return !o->gathered && !o->no_cols && o->cols % (RANKS * o->parts) == 0;
    return 1;
}

static mt_tensor share_shape(const operand *o, char at) {
    mt_tensor t = mt_none();
    t.rows = at == 'r' || (at == 'c' && o->cache) ? o->rows / RANKS : o->rows;
    t.cols = at == 'c' && !o->cache ? o->cols / RANKS : o->cols;
    t.dtype = o->ids ? MT_I32 : o->bf16 ? MT_BF16 : MT_F32;
    return t;
}

/* The place of element i of n in the whole dimension, of which the rank has its share of each part. */
static int64_t in_parts(int64_t i, int64_t n, int parts, int rank) {
    int64_t share = n / parts;
    return i / share * share * RANKS + rank * share + i % share;
}

/* The number in the whole operand of element (i, j) of a rank's share. */
static int64_t in_whole(const operand *o, char at, int rank, mt_tensor share, int64_t i, int64_t j) {
    if (at == 'r') i = in_parts(i, share.rows, o->row_parts, rank);
    if (at == 'c' && o->cache) i = in_parts(i, share.rows, 2, rank);
    if (at == 'c' && !o->cache) j = in_parts(j, share.cols, o->parts, rank);
    return i * o->cols + j;
}

static int is_id(const operand *o, mt_tensor t, int64_t e) { return o->ids || (o->halves && e % t.cols >= t.cols / 2); }

static double element(const operand *o, mt_tensor t, int64_t e) {
    uint16_t half;
    uint32_t bits;
    float x;
    if (is_id(o, t, e)) return ((const int32_t *)t.data)[e];
    if (!o->bf16) return (double)((const float *)t.data)[e];
    half = ((const uint16_t *)t.data)[e];
    bits = (uint32_t)half << 16;
    memcpy(&x, &bits, sizeof x);
    return (double)x;
}

static void set_element(const operand *o, mt_tensor t, int64_t e, double value) {
    float x = (float)value;
    if (is_id(o, t, e)) ((int32_t *)t.data)[e] = isnan(value) ? -1 : (int32_t)value;
    else if (o->bf16) mt_f32_to_16bit(MT_BF16, &x, (uint16_t *)t.data + e, 1);
    else ((float *)t.data)[e] = x;
}

/* What a rank has of an element of operand k before the call. rank: RANKS: the only rank */
static double value_of(const trial *t, int k, int rank, int64_t e) {
    char letter = t->letter[k];
    if (letter == ' ') return (double)NAN; /* an output */
    if (letter == '0') return 0;
    if (letter != 'P' || rank == RANKS) return t->whole[k][e];
    return rank == 0 ? t->addend[k][e] : t->whole[k][e] - t->addend[k][e];
}

/* Makes the operands of a call, of which check mode knows nothing. */
static mt_status call_of(const trial *t, mt_context *ctx, int rank, call *c) {
    memset(c, 0, sizeof *c);
    c->ctx = ctx;
    c->rank = rank == RANKS ? 0 : rank;
    c->variant = t->op->variant;
    c->by_table = t->by_table;
    for (int k = 0; k < t->count; k++) {
        c->at[k] = rank == RANKS ? 'R' : t->at[k];
        if (!has(t, k)) continue;
        mt_tensor s = share_shape(&t->operands[k], c->at[k]);
        MT_TRY(mt_arena_tensor(ctx, s.dtype, s.rows, s.cols, &c->t[k]));
        MT_TRY(mt_declare(ctx, NULL, c->t[k], MT_UNDECLARED)); /* the test writes it */
    }
    return MT_SUCCESS;
}

static void fill(const trial *t, int rank, const call *c) {
    for (int k = 0; k < t->count; k++)
        for (int64_t e = 0; has(t, k) && e < c->t[k].rows * c->t[k].cols; e++) {
            int64_t i = e / c->t[k].cols, j = e % c->t[k].cols;
            int64_t at = in_whole(&t->operands[k], c->at[k], c->rank, c->t[k], i, j);
            set_element(&t->operands[k], c->t[k], e, value_of(t, k, rank, at));
        }
}

/* Reads what a call has left. */
static void read_results(const trial *t, const call *c, double (*out)[ELEMENTS]) {
    for (int k = 0; k < t->count; k++)
        for (int64_t e = 0; has(t, k) && e < c->t[k].rows * c->t[k].cols; e++)
            out[k][e] = element(&t->operands[k], c->t[k], e);
}

/* ---- what is right ----------------------------------------------------------------------------------------------- */

static int near_to(const operand *o, double got, double want) {
    return fabs(got - want) <= (o->bf16 ? 2e-2 : 1e-4) * (1 + fabs(want));
}

/* Whether the outputs of the ranks are what the letter says. */
static int is_right(const trial *t, int k, char letter, const call *c) {
    const operand *o = &t->operands[k];
    for (int rank = 0; rank < RANKS; rank++)
        for (int64_t e = 0; e < c->t[k].rows * c->t[k].cols; e++) {
            double sum = t->got[0][k][e] + t->got[1][k][e];
            int64_t at = in_whole(o, c->at[k], rank, c->t[k], e / c->t[k].cols, e % c->t[k].cols);
            if (!near_to(o, letter == 'P' ? sum : t->got[rank][k][e], t->truth[k][at])) return 0;
        }
    return 1;
}

/* Runs the entry as rank `rank`, or RANKS for the only rank. */
static mt_status compute(const trial *t, mt_context *ctx, mt_comm *comm, int rank, call *c, double (*out)[ELEMENTS]) {
    MT_TRY(call_of(t, ctx, rank, c));
    c->comm = comm;
    fill(t, rank, c);
    MT_TRY(t->op->run(c));
    read_results(t, c, out);
    return MT_SUCCESS;
}

static mt_status compute_together(mt_comm *world, void *user) {
    const mt_context_desc where = {.arena_bytes = 1 << 20};
    trial *t = (trial *)user;
    int rank = mt_comm_rank(world);
    mt_context *ctx;
    mt_status status;
    call c;
    MT_TRY(mt_context_create(world, &where, &ctx));
    status = compute(t, ctx, world, rank, &c, t->got[rank]);
    mt_context_destroy(ctx);
    return status;
}

/* Runs the entry on the whole and on all shares. whole and c become the calls. */
static void compute_all(trial *t, call *whole, call *c) {
    mt_context *ctx = t->plain;
    if (!t->communicates) ASSERT_STATUS(ctx, MT_SUCCESS, compute(t, ctx, NULL, RANKS, whole, t->truth));
    else memcpy(t->truth[t->count - 1], t->whole[0], sizeof t->whole[0]);
    for (int rank = 0; rank < RANKS && !t->communicates; rank++)
        ASSERT_STATUS(ctx, MT_SUCCESS, compute(t, ctx, NULL, rank, &c[rank], t->got[rank]));
    for (int rank = 0; rank < RANKS && t->communicates; rank++)
        ASSERT_STATUS(ctx, MT_SUCCESS, call_of(t, ctx, rank, &c[rank]));
    if (t->communicates) test_launch(RANKS, compute_together, t);
}

/* rights[k] becomes the letters that are right for output k. */
static void find_right(trial *t, char (*rights)[5]) {
    size_t mark = mt_arena_mark(t->plain);
    call whole, c[RANKS];
    compute_all(t, &whole, c);
    for (int k = 0; k < t->count; k++) {
        char shape = t->at[k], *right = rights[k];
        if (has(t, k) && t->operands[k].writes && is_right(t, k, shape, c)) *right++ = shape;
        if (has(t, k) && t->operands[k].writes && shape == 'R' && is_right(t, k, 'P', c)) *right++ = 'P';
        if (has(t, k) && t->operands[k].gathered && shape == 'R' && t->op->gathered(t->plain, c, &whole))
            *right++ = 'c';
        *right = 0;
    }
    mt_arena_release(t->plain, mark);
}

/* Returns 1 if all outputs have a right placement. word then becomes the combination. An output that the call reads
   stays what it was. */
static int all_right(const trial *t, char (*rights)[5], char *word) {
    int right = 1;
    for (int k = 0; k < t->count; k++) {
        const operand *o = &t->operands[k];
        int any = o->moves || (o->writes && (!o->reads || t->letter[k] == '0')); /* any right placement will do */
        word[k] = !has(t, k) ? '-' : o->cache ? '*' : any && !o->moves ? rights[k][0] : t->letter[k];
        if (has(t, k) && o->writes && (any ? !rights[k][0] : !strchr(rights[k], t->letter[k]))) right = 0;
    }
    word[t->count] = 0;
    return right;
}

/* ---- what check mode says ---------------------------------------------------------------------------------------- */

static const mt_comm *group_of(const trial *t, int rank) {
    const mt_grid *grid = &t->checked[rank].grid;
    return t->op->group == DATA ? grid->dp : grid->tp;
}

/* Returns 1 if check mode takes t for what the letter says. */
static int is_taken_for(const trial *t, int rank, mt_tensor tensor, char letter) {
    static const char letters[] = "RrcP";
    static const mt_rule rules[] = {{"x", "R", NULL}, {"x", "r", NULL}, {"x", "c", NULL}, {"x", "P", NULL}};
    mt_operand x = {"x", tensor, MT_ARG_IN};
    const mt_rule *rule = &rules[strchr(letters, letter) - letters];
    return mt_rule_check(t->checked[rank].ctx, "test", rule, &x, 1) == MT_SUCCESS;
}

static void declare(const trial *t, int rank, const call *c) {
    mt_context *ctx = t->checked[rank].ctx;
    for (int k = 0; k < t->count; k++) {
        const char *at = strchr("RrcP", t->letter[k]);
        mt_placement placement = (mt_placement)(MT_REPLICATED + (at ? at - "RrcP" : 0));
        if (!has(t, k) || t->letter[k] == ' ' || t->operands[k].cache) continue;
        if (t->letter[k] == '0' && t->operands[k].ids) ASSERT_STATUS(ctx, MT_SUCCESS, mt_declare_zero(ctx, c->t[k]));
        else if (t->letter[k] == '0') ASSERT_STATUS(ctx, MT_SUCCESS, mt_fill(ctx, c->t[k], 0.0f));
        else ASSERT_STATUS(ctx, MT_SUCCESS, mt_declare(ctx, group_of(t, rank), c->t[k], placement));
    }
}

/* Returns 1 when check mode accepts the call on a rank. takes[k] becomes the letters for which it takes output k: all
   four when nothing is known. */
static int is_accepted(const trial *t, int rank, char (*takes)[5]) {
    mt_context *ctx = t->checked[rank].ctx;
    size_t mark = mt_arena_mark(ctx);
    mt_tensor known; /* because of it, check mode knows the group */
    call c;
    mt_status status;
    ASSERT_STATUS(ctx, MT_SUCCESS, call_of(t, ctx, rank, &c));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_arena_tensor(ctx, MT_F32, 1, 1, &known));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_declare(ctx, group_of(t, rank), known, MT_REPLICATED));
    c.comm = t->checked[rank].grid.tp;
    declare(t, rank, &c);
    status = t->op->run(&c);
    if (status != MT_SUCCESS && status != MT_ERR_ARGUMENT)
        fail_msg("%s %s: %s", t->op->name, t->letter, mt_last_error(ctx));
    for (int k = 0; k < t->count; k++) {
        int n = 0;
        takes[k][0] = 0;
        for (const char *l = "RrcP"; has(t, k) && t->operands[k].writes && status == MT_SUCCESS && *l; l++)
            if (is_taken_for(t, rank, c.t[k], *l)) takes[k][n++] = *l;
    }
    mt_arena_release(ctx, mark);
    return status == MT_SUCCESS;
}

/* Whether an output of this share may have this placement. */
static int may_be(const operand *o, char at, char letter) {
    return letter == at || (at == 'R' && (letter == 'P' || (letter == 'c' && o->gathered)));
}

/* Compares what check mode takes the outputs for with what they are. */
static void compare_accepted(trial *t, char (*rights)[5], char (*takes)[5]) {
    for (int k = 0; k < t->count; k++) {
        const operand *o = &t->operands[k];
        int some = 0, wrong = 0;
        if (!has(t, k) || !o->writes || o->cache) continue;
        for (const char *l = takes[k]; *l; l++) {
            some |= may_be(o, t->at[k], *l);
            wrong |= may_be(o, t->at[k], *l) && !strchr(rights[k], *l);
        }
        if (some && !wrong) continue;
        fprintf(stderr, "%s (%s; variant %d) accepts '%s' over \"%s\", and takes %s for %s; right is %s\n", t->op->name,
                t->op->operands, t->op->variant, t->letter, t->op->group == DATA ? "data" : "tensor", o->name, takes[k],
                rights[k][0] ? rights[k] : "none");
        t->wrong++;
    }
}

/* ---- all combinations -------------------------------------------------------------------------------------------- */

static int word_fits(const char *words, const char *word, int length) {
    for (int i = 0; i < length; i++)
        if (word[i] != '-' && words[i] != word[i]) return 0;
    return 1;
}

static const char *next_word(const char *word) {
    word += strcspn(word, " ");
    return word + strspn(word, " ");
}

/* Notes that a right combination is refused. */
static void compare_refused(trial *t, const char *word) {
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        const refused *r = &refusals[i];
        int n = 0;
        if (strcmp(r->name, t->op->name) != 0 || r->group != t->op->group) continue;
        for (const char *w = r->words; *w; w = next_word(w), n++)
            if ((int)strcspn(w, " ") == t->count && word_fits(w, word, t->count)) {
                t->used[i] |= 1 << n;
                return;
            }
    }
    fprintf(stderr, "%s (%s; variant %d) refuses '%s' over \"%s\", which is right\n", t->op->name, t->op->operands,
            t->op->variant, word, t->op->group == DATA ? "data" : "tensor");
    t->wrong++;
}

static void try_letters(trial *t) {
    char rights[OPERANDS][5], takes[RANKS][OPERANDS][5], word[OPERANDS + 1];
    int right, accepted = 0;
    memset(takes, 0, sizeof takes);
    find_right(t, rights);
    right = all_right(t, rights, word);
    for (int rank = 0; rank < RANKS; rank++) accepted += is_accepted(t, rank, takes[rank]);
    if (accepted != 0 && (accepted != RANKS || memcmp(takes[0], takes[1], sizeof takes[0]) != 0)) {
        fprintf(stderr, "%s accepts '%s' otherwise on other ranks\n", t->op->name, t->letter);
        t->wrong++;
    }
    t->accepted += accepted == RANKS;
    if (accepted) compare_accepted(t, rights, takes[0]);
    else if (right) compare_refused(t, word);
}

/* Tries all letters of the operands from k on, with the shares t->at. */
static void each_letter(trial *t, int k) {
    char letters[4], *end = letters;
    const operand *o = &t->operands[k];
    const char *allowed = t->op->letters ? t->op->letters : "RrcP";
    if (k == t->count) {
        try_letters(t);
        return;
    }
    *end++ = has(t, k) && o->reads ? t->at[k] : ' ';
    if (has(t, k) && o->reads && t->at[k] == 'R' && !o->ids && !o->cache && strchr(allowed, 'P')) *end++ = 'P';
    if (has(t, k) && o->sum) *end++ = '0';
    for (const char *l = letters; l < end; l++) {
        t->letter[k] = *l;
        each_letter(t, k + 1);
    }
}

/* Whether the call takes these shares, by their shapes. */
static int fits_together(const trial *t) {
    mt_context *ctx = t->communicates ? t->checked[0].ctx : t->paper;
    size_t mark = mt_arena_mark(ctx);
    call c;
    mt_status status;
    ASSERT_STATUS(ctx, MT_SUCCESS, call_of(t, ctx, 0, &c));
    c.comm = t->checked[0].grid.tp;
    status = t->op->run(&c);
    mt_arena_release(ctx, mark);
    return status == MT_SUCCESS;
}

/* Tries all shares of the operands from k on. */
static void each_share(trial *t, int k) {
    const operand *o = &t->operands[k];
    if (k == t->count) {
        if (fits_together(t)) each_letter(t, 0);
        return;
    }
    for (const char *at = "Rrc"; *at; at++) {
        if (o->like ? *at != t->at[o->like - 1] : !has(t, k) && *at != 'R') continue;
        if (!divides(o, *at) || (t->op->letters && !strchr(t->op->letters, *at))) continue;
        t->at[k] = *at;
        each_share(t, k + 1);
    }
}

/* Makes the values of the whole operands. */
static void make_values(trial *t, uint64_t seed) {
    for (int k = 0; k < t->count; k++)
        for (int64_t e = 0; e < t->operands[k].rows * t->operands[k].cols; e++) {
            const operand *o = &t->operands[k];
            double x = (double)test_float(&seed);
            if (o->positive) x = fabs(x) + 0.1;
            int id = o->ids || (o->halves && e % o->cols >= o->cols / 2);
            if (id) x = (double)test_below(&seed, VOCAB);
            t->whole[k][e] = o->bf16 ? floor(x * 64) / 64 : x; /* so that bf16 has it and its addends */
            x = id ? (double)test_below(&seed, (size_t)x + 1) : (double)test_float(&seed);
            t->addend[k][e] = o->bf16 ? floor(x * 64) / 64 : x;
        }
}

static int only_optional_are_left_out(const trial *t) {
    for (int k = 0; k < t->count; k++)
        if (!has(t, k) && !t->operands[k].optional) return 0;
    return 1;
}

/* Tries all combinations of an operator, with and without its optional operands. */
static void try_operator(trial *t, const entry *op, uint64_t seed) {
    const mt_context_desc meta = {.device = MT_DEVICE_META, .check = 1};
    operands_of(t, op);
    make_values(t, seed);
    for (int rank = 0; rank < RANKS; rank++)
        test_paper_rank(RANKS, rank, (mt_grid_desc){.tp = op->group == DATA ? 1 : RANKS}, &meta, &t->checked[rank]);
    t->accepted = 0;
    for (t->present = 1; t->present < 1 << t->count; t->present++)
        if (only_optional_are_left_out(t)) each_share(t, 0);
    if (!t->accepted) fail_msg("%s (%s): nothing is accepted", op->name, op->operands);
    for (int rank = 0; rank < RANKS; rank++) test_paper_rank_close(&t->checked[rank]);
}

/* Counts the words of `refusals` that no operator has needed. */
static int stale_refusals(const trial *t) {
    int stale = 0;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        int n = 0;
        if ((strstr(refusals[i].name, "_region_") != NULL) != t->communicates) continue;
        for (const char *w = refusals[i].words; *w; w = next_word(w), n++) {
            if (t->used[i] >> n & 1) continue;
            fprintf(stderr, "%s: '%.*s' is listed as refused and right, but is not so\n", refusals[i].name,
                    (int)strcspn(w, " "), w);
            stale++;
        }
    }
    return stale;
}

static trial *open_trial(void) {
    const mt_context_desc on_paper = {.device = MT_DEVICE_META};
    static trial t;
    memset(&t, 0, sizeof t);
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &on_paper, &t.paper));
    t.plain = test_context(MT_DEVICE_CPU, 1);
    return &t;
}

static void close_trial(trial *t) {
    mt_context_destroy(t->plain);
    mt_context_destroy(t->paper);
    t->wrong += stale_refusals(t);
    if (t->wrong) fail_msg("check mode is wrong about %d combinations", t->wrong);
}

static void test_operators(void **state) {
    trial *t = open_trial();
    (void)state;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) try_operator(t, &entries[i], i + 1);
    for (size_t i = 0; i < OPERATOR_ENTRIES; i++) {
        const operator_entry *e = &operator_entries[i];
        char text[512];
        const entry op = OP(e->table->name, TENSOR, 0, run_by_table, text);
        if (e->left_out[0] || e->by_place || !e->table->rule.operands) continue; /* without left_out: tries it, too */
        describe_by_table(e, text, sizeof text);
        t->by_table = e;
        try_operator(t, &op, i + 1);
    }
    close_trial(t);
}

/* Every operator is tried, also those that have no rule in their table, unless what they write is not known. */
static void test_every_rule_is_tried(void **state) {
    static const char unruled[] = " mt_fill mt_upload mt_download mt_hash mt_random_normal ";
    (void)state;
    for (size_t k = 0; k < sizeof mti_tables / sizeof *mti_tables; k++) {
        const char *name = mti_tables[k]->name;
        int tried = operator_lists(unruled, name);
        for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) tried |= strcmp(entries[i].name, name) == 0;
        for (size_t i = 0; i < OPERATOR_ENTRIES; i++) tried |= operator_entries[i].table == mti_tables[k];
        if (!tried) fail_msg("%s is not tried", name);
    }
}

static void test_communication(void **state) {
    trial *t = open_trial();
    (void)state;
    t->communicates = 1;
    for (size_t i = 0; i < sizeof communication / sizeof *communication; i++) try_operator(t, &communication[i], i + 1);
    close_trial(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_operators), cmocka_unit_test(test_every_rule_is_tried),
                                       cmocka_unit_test(test_communication)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
