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
    int known;               /* 1: check mode knows each operand */
    const char *mistakes[4]; /* the words of the message of each */
    int group;               /* 1: the ranks are data ranks; 2: context ranks */
} program;

struct run {
    const program *p;
    mt_comm *world;
    mt_grid grid;
    mt_context *ctx;
    mt_params *params;
    mt_comm *tp;     /* the tensor group, or that of the data or context ranks */
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
static mt_status gives(run *r, mt_tensor t, char at) {
    result *out = &r->out[r->results++];
    out->rows = t.rows;
    out->cols = t.cols;
    out->at = at;
    if (t.rows * t.cols > VALUES || r->results > RESULTS) abort();
    return mt_download(r->ctx, t, out->x);
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
    return gives(r, y, 'R');
}

/* The same with mt_bias_forward, on the last rank. */
static mt_status bias_after_the_product(run *r) {
    mt_tensor x = given(r, T, F, 'c'), w = given(r, C, F, 'c'), b = given(r, 1, C, 'R'), y = room(r, T, C);
    MT_TRY(mt_linear_forward(r->ctx, x, w, mt_none(), y));
    MT_TRY(mt_check_view(r->ctx, r->tp, b, MT_PARTIAL));
    if (r->rank == r->ranks - 1 || r->mistake == 1) MT_TRY(mt_bias_forward(r->ctx, y, b));
    MT_TRY(mt_check_view_end(r->ctx, sum(r, y)));
    return gives(r, y, 'R');
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
    MT_TRY(gives(r, y, 'R'));
    return gives(r, b->grad, 'R');
}

/* y = residual + x w^T, with the residual on one rank only; mistake 1: on two. */
static mt_status residual_on_one_rank(run *r) {
    mt_tensor x = given(r, T, F, 'c'), w = given(r, C, F, 'c'), residual = given(r, T, C, 'R'), y = room(r, T, C);
    MT_TRY(mt_linear_forward(r->ctx, x, w, mt_none(), y));
    MT_TRY(mt_check_view(r->ctx, r->tp, residual, MT_PARTIAL));
    if (r->rank == 0 || (r->mistake == 1 && r->rank == 1)) MT_TRY(mt_add(r->ctx, residual, y, y));
    MT_TRY(mt_check_view_end(r->ctx, MT_SUCCESS));
    MT_TRY(sum(r, y));
    return gives(r, y, 'R');
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
    return gives(r, y, 'r');
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
    return gives(r, y, 'R');
}

/* Each rank adds the bias divided by the number of ranks. */
static mt_status bias_divided(run *r) {
    mt_tensor x = given(r, T, F, 'c'), w = given(r, C, F, 'c'), b = given(r, 1, C, 'R'), y = room(r, T, C);
    mt_tensor part = room(r, 1, C);
    for (int64_t j = 0; !r->meta && j < C; j++) ((float *)part.data)[j] = ((float *)b.data)[j] / (float)r->ranks;
    MT_TRY(mt_declare(r->ctx, r->tp, part, MT_PARTIAL));
    MT_TRY(mt_linear_forward(r->ctx, x, w, part, y));
    MT_TRY(sum(r, y));
    return gives(r, y, 'R');
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
    return gives(r, y, 'R');
}

/* ---- keys and values that all ranks have ------------------------------------------------------------------------- */

static mt_tensor zeros(run *r, int64_t rows, int64_t cols) {
    mt_tensor t = room(r, rows, cols);
    if (mt_fill(r->ctx, t, 0) != MT_SUCCESS) abort();
    return t;
}

/* Attention of this rank's heads, whose keys and values are views of k and v, and its gradients. */
typedef struct heads {
    mt_attention_desc d;
    mt_tensor q, k, v, out, lse, dout, dq, dk, dv;
} heads;

static mt_status attend(run *r, heads *h) {
    h->out = room(r, h->q.rows, h->q.cols);
    h->lse = room(r, h->d.groups * h->d.heads_per_group, h->q.rows);
    MT_TRY(mt_dot_product_attention_forward(r->ctx, &h->d, h->q, h->k, h->v, h->out, h->lse));
    if (!h->dout.data) return MT_SUCCESS;
    h->dq = room(r, h->q.rows, h->q.cols);
    return mt_dot_product_attention_backward(r->ctx, &h->d, h->q, h->k, h->v, h->out, h->lse, h->dout, h->dq, h->dk,
                                             h->dv);
}

/* The same for one of `groups` groups, whose heads are side by side. */
static mt_status attend_group(run *r, const heads *all, int64_t groups, int64_t group, mt_tensor kv, mt_tensor dkv) {
    heads h = *all;
    int64_t width = all->q.cols / groups;
    h.d.heads_per_group = width / D;
    h.q = mt_tensor_cols(all->q, group * width, width);
    h.dout = mt_tensor_cols(all->dout, group * width, width);
    h.k = mt_tensor_cols(kv, 2 * group * D, D);
    h.v = mt_tensor_cols(kv, (2 * group + 1) * D, D);
    h.dk = mt_tensor_cols(dkv, 2 * group * D, D);
    h.dv = mt_tensor_cols(dkv, (2 * group + 1) * D, D);
    MT_TRY(attend(r, &h));
    MT_TRY(mt_copy(r->ctx, h.out, mt_tensor_cols(all->out, group * width, width)));
    return mt_copy(r->ctx, h.dq, mt_tensor_cols(all->dq, group * width, width));
}

/* Grouped queries: `groups` heads of keys and values, which all ranks compute, and 4 heads of queries. A rank reads the
   groups of its heads. side_by_side: keys and values are in one tensor [K | V], not in two. mistake 1: all ranks
   read the first groups; 2: the next rank's groups */
static mt_status grouped(run *r, int64_t groups, int side_by_side) {
    int64_t own = groups > r->ranks ? groups / r->ranks : 1, rank = (r->rank + (r->mistake == 2)) % r->ranks;
    int64_t first = r->mistake == 1 ? 0 : rank * groups / r->ranks;
    mt_tensor x = given(r, T, C, 'R'), wq = given(r, HEADS * D, C, 'r'), wkv = given(r, 2 * groups * D, C, 'R');
    mt_tensor kv = room(r, T, 2 * groups * D), dkv = zeros(r, T, 2 * groups * D), dx = room(r, T, C);
    mt_tensor k = room(r, T, groups * D), v = room(r, T, groups * D), dk = zeros(r, T, groups * D);
    mt_tensor dv = zeros(r, T, groups * D), dwk = zeros(r, groups * D, C), dwkv = zeros(r, 2 * groups * D, C);
    heads h = {.d = {.batch = 1, .seq = T, .groups = own, .heads_per_group = HEADS / r->ranks / own, .head_dim = D}};
    h.q = room(r, T, HEADS / r->ranks * D);
    h.dout = given(r, T, HEADS * D, 'c');
    MT_TRY(mt_linear_forward(r->ctx, x, wq, mt_none(), h.q));
    MT_TRY(mt_linear_forward(r->ctx, x, wkv, mt_none(), kv));
    MT_TRY(mt_linear_forward(r->ctx, x, mt_tensor_rows(wkv, 0, groups * D), mt_none(), k));
    MT_TRY(mt_linear_forward(r->ctx, x, mt_tensor_rows(wkv, groups * D, groups * D), mt_none(), v));
    h.k = mt_tensor_cols(side_by_side ? kv : k, first * D, own * D);
    h.v = mt_tensor_cols(side_by_side ? kv : v, (side_by_side ? groups + first : first) * D, own * D);
    h.dk = mt_tensor_cols(side_by_side ? dkv : dk, first * D, own * D);
    h.dv = mt_tensor_cols(side_by_side ? dkv : dv, (side_by_side ? groups + first : first) * D, own * D);
    MT_TRY(attend(r, &h));
    MT_TRY(
        mt_copy_to_tensor_region_backward(r->ctx, r->tp, side_by_side ? dkv : dk)); /* f of each operand of the heads */
    MT_TRY(mt_linear_gradients(r->ctx, side_by_side ? dkv : dk, x, side_by_side ? dwkv : dwk, mt_none()));
    MT_TRY(mt_gemm(r->ctx, MT_NO_TRANS, MT_NO_TRANS, 1, h.dq, wq, 0, dx));
    MT_TRY(mt_copy_to_tensor_region_backward(r->ctx, r->tp, dx));
    MT_TRY(gives(r, h.out, 'c'));
    MT_TRY(gives(r, dx, 'R'));
    return gives(r, side_by_side ? dwkv : dwk, 'R');
}

static mt_status two_groups(run *r) { return grouped(r, 2, 0); }
static mt_status four_groups(run *r) { return grouped(r, 4, 0); }
static mt_status groups_side_by_side(run *r) { return grouped(r, 4, 1); }
/* [k v] for each of two groups. */
static mt_status groups_in_turn(run *r) {
    mt_tensor kv = given(r, T, 4 * D, 'R'), dkv = zeros(r, T, 4 * D);
    heads h = {.d = {.batch = 1, .seq = T, .groups = 1, .head_dim = D}, .q = given(r, T, HEADS * D, 'c')};
    int64_t own = 2 / r->ranks, first = r->mistake ? 0 : r->rank * own;
    h.dout = given(r, T, HEADS * D, 'c');
    h.out = room(r, T, h.q.cols);
    h.dq = room(r, T, h.q.cols);
    for (int64_t group = 0; group < own; group++)
        MT_TRY(attend_group(r, &h, own, group, mt_tensor_cols(kv, 2 * first * D, 2 * own * D),
                            mt_tensor_cols(dkv, 2 * first * D, 2 * own * D)));
    MT_TRY(sum(r, dkv));
    MT_TRY(gives(r, h.out, 'c'));
    MT_TRY(gives(r, h.dq, 'c'));
    return gives(r, dkv, 'R');
}

static mt_status one_group(run *r) { return grouped(r, 1, 0); }
static mt_status one_group_side_by_side(run *r) { return grouped(r, 1, 1); }

/* The weights of the keys are split by their own rows, and the ranks gather the keys. mistake 1: each takes the first
   groups of what it has gathered */
static mt_status gathered_groups(run *r) {
    mt_tensor x = given(r, T, C, 'R'), wq = given(r, HEADS * D, C, 'r'), wk = given(r, HEADS * D, C, 'r');
    mt_tensor mine = room(r, T, HEADS / r->ranks * D), k = room(r, T, HEADS * D);
    heads h = {.d = {.batch = 1, .seq = T, .groups = HEADS / r->ranks, .heads_per_group = 1, .head_dim = D}};
    h.q = room(r, T, HEADS / r->ranks * D);
    MT_TRY(mt_linear_forward(r->ctx, x, wq, mt_none(), h.q));
    MT_TRY(mt_linear_forward(r->ctx, x, wk, mt_none(), mine));
    MT_TRY(mt_gather_from_tensor_region(r->ctx, r->tp, mine, k));
    h.k = h.v = r->mistake ? mt_tensor_cols(k, 0, share(r, k.cols)) : own_cols(r, k);
    MT_TRY(attend(r, &h));
    return gives(r, h.out, 'c');
}

/* The queries of this rank's tokens see all keys, or, with a causal mask, those before them. */
static mt_status own_queries(run *r, mt_attention_desc d, int64_t keys) {
    mt_tensor x = given(r, T, C, 'r'), all = room(r, T, C), wq = given(r, HEADS * D, C, 'R');
    mt_tensor wk = given(r, HEADS * D, C, 'R'), memory = given(r, 2 * T, C, 'R'), dx = room(r, share(r, T), C);
    mt_tensor k = room(r, keys ? keys : T, HEADS * D), dk = zeros(r, k.rows, k.cols), dv = zeros(r, k.rows, k.cols);
    mt_tensor dwk = zeros(r, HEADS * D, C), source = keys ? memory : all;
    heads h = {.d = d, .dout = given(r, T, HEADS * D, 'r')};
    int64_t seen = d.scores.mask == MT_MASK_CAUSAL && r->mistake != 1 ? (r->rank + 1) * share(r, T) : k.rows;
    h.d.batch = 1, h.d.groups = HEADS, h.d.heads_per_group = 1, h.d.head_dim = D;
    h.d.seq = share(r, T);
    h.d.kv_seq = seen;
    h.q = room(r, share(r, T), HEADS * D);
    MT_TRY(mt_gather_from_sequence_region(r->ctx, r->tp, x, all));
    MT_TRY(mt_linear_forward(r->ctx, x, wq, mt_none(), h.q));
    MT_TRY(mt_linear_forward(r->ctx, source, wk, mt_none(), k));
    h.k = h.v = mt_tensor_rows(k, 0, seen);
    h.dk = mt_tensor_rows(dk, 0, seen);
    h.dv = mt_tensor_rows(dv, 0, seen);
    MT_TRY(attend(r, &h));
    MT_TRY(mt_add(r->ctx, dk, dv, dk));
    if (r->mistake != 2) MT_TRY(sum(r, dk));
    MT_TRY(mt_linear_gradients(r->ctx, dk, source, dwk, mt_none()));
    MT_TRY(mt_gemm(r->ctx, MT_NO_TRANS, MT_NO_TRANS, 1, h.dq, wq, 0, dx));
    MT_TRY(gives(r, h.out, 'r'));
    MT_TRY(gives(r, dx, 'r'));
    return gives(r, dwk, 'R');
}

static mt_status own_queries_of_all_keys(run *r) {
    return own_queries(r, (mt_attention_desc){.scores.mask = MT_MASK_BIDIRECTIONAL}, 0);
}
static mt_status own_queries_of_a_memory(run *r) {
    return own_queries(r, (mt_attention_desc){.scores.mask = MT_MASK_BIDIRECTIONAL}, 2 * T);
}
static mt_status own_queries_of_first_keys(run *r) {
    return own_queries(r, (mt_attention_desc){.scores.window = 3}, 0);
}

/* ---- what check mode knows --------------------------------------------------------------------------------------- */

/* Token ids that are not declared, for a table that the ranks share out. */
static mt_status ids_without_declaration(run *r) {
    int32_t *ids = mt_host_alloc(T * sizeof *ids);
    mt_tensor table = given(r, 2 * T, C, 'r'), y = room(r, T, C), dtable = zeros(r, 2 * T / r->ranks, C);
    for (int i = 0; i < T; i++) ids[i] = i * 5 % (2 * T);
    MT_TRY(mt_embedding_forward(r->ctx, table, r->rank * table.rows, ids, 0, y));
    MT_TRY(sum(r, y));
    MT_TRY(mt_declare(r->ctx, r->tp, dtable, MT_SPLIT_ROWS));
    MT_TRY(mt_embedding_backward(r->ctx, y, r->rank * table.rows, ids, dtable));
    mt_host_free(ids);
    MT_TRY(gives(r, y, 'R'));
    return gives(r, dtable, 'r');
}

/* The ids of this rank's tokens, or of all, in one row. */
static mt_status ids_in_a_row(run *r) {
    int32_t ids[T] = {0};
    mt_tensor row = mt_tensor_make(ids, MT_I32, 1, share(r, T)), all = mt_tensor_make(ids, MT_I32, 1, T);
    mt_tensor table = given(r, 2 * T, C, 'R'), y = room(r, share(r, T), C), z = room(r, T, C);
    for (int i = 0; i < row.cols; i++) ids[i] = (int32_t)(r->rank * row.cols + i);
    MT_TRY(mt_declare(r->ctx, r->tp, row, MT_SPLIT_COLS));
    MT_TRY(mt_embedding_forward(r->ctx, table, 0, ids, 0, y));
    MT_TRY(gives(r, y, 'r'));
    for (int i = 0; i < T; i++) ids[i] = i;
    MT_TRY(mt_declare(r->ctx, r->tp, all, MT_REPLICATED));
    MT_TRY(mt_embedding_forward(r->ctx, table, 0, ids, 0, z));
    mt_declare_forget(r->ctx, ids, sizeof ids);
    return gives(r, z, 'R');
}

/* A norm of each head of queries and keys, from the layer to its gradients. */
static mt_status norm_of_heads(run *r) {
    mt_linear_desc linear = {.in_features = C, .out_features = HEADS * 3 * D, .unit = 3 * D, .no_bias = 1};
    mt_norm_layer_desc norm = {.features = D, .kind = MT_RMS_NORM};
    mt_column_parallel_linear qkv;
    mt_qk_norm heads;
    mt_qk_norm_saved kept;
    mt_linear_saved saved;
    mt_attention_desc d = {.batch = 1, .seq = T, .groups = HEADS / r->ranks, .heads_per_group = 1, .head_dim = D};
    mt_tensor x = given(r, T, C, 'R'), y = room(r, T, share(r, HEADS * 3 * D)), out = room(r, T, share(r, HEADS * D));
    mt_tensor lse = room(r, d.groups, T), dout = given(r, T, HEADS * D, 'c'), dy = room(r, T, y.cols);
    mt_tensor dx = room(r, T, C);
    MT_TRY(mt_column_parallel_linear_create(r->ctx, r->params, "qkv", &linear, &qkv));
    MT_TRY(mt_qk_norm_create(r->ctx, r->params, "attention", &norm, &qkv, &heads));
    MT_TRY(mt_params_init(r->ctx, r->params, 1));
    MT_TRY(mt_params_zero_grad(r->ctx, r->params));
    MT_TRY(mt_parallel_linear_forward(r->ctx, &qkv, x, y, &saved));
    MT_TRY(mt_qk_norm_forward(r->ctx, &heads, y, &kept));
    MT_TRY(mt_attention_forward(r->ctx, &d, y, out, lse));
    MT_TRY(mt_attention_backward(r->ctx, &d, y, out, lse, dout, dy));
    MT_TRY(mt_qk_norm_backward(r->ctx, &heads, dy, &kept));
    MT_TRY(mt_parallel_linear_backward(r->ctx, &qkv, dy, dx, &saved));
    if (r->mistake == 1) MT_TRY(gives(r, heads.q.weight->grad, 'R'));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    MT_TRY(gives(r, out, 'c'));
    MT_TRY(gives(r, dx, 'R'));
    return gives(r, heads.q.weight->grad, 'R');
}

/* ---- layers and steps by hand ------------------------------------------------------------------------------------ */

static mt_status product(run *r, mt_tensor dy, mt_tensor w, float beta, mt_tensor dx) {
    return mt_gemm(r->ctx, MT_NO_TRANS, MT_NO_TRANS, 1, dy, w, beta, dx);
}
static mt_status add_param(run *r, const char *name, int64_t rows, int64_t cols, mt_placement placement, int partial,
                           mt_param **out) {
    mt_param_desc d = {.name = name, .rows = rows, .cols = cols, .placement = placement, .init_std = 0.5f};
    d.sequence_partial = partial;
    return mt_params_add(r->ctx, r->params, &d, out);
}
static mt_status start(run *r) {
    MT_TRY(mt_params_init(r->ctx, r->params, 1));
    return mt_params_zero_grad(r->ctx, r->params);
}

/* y = x W^T + (x A^T) B^T, W and B split by rows; each rank has A, and a term of its gradient. mistake 1: without f */
static mt_status lora_of_columns(run *r) {
    enum { RANK = 4 };
    mt_tensor x = given(r, T, C, 'R'), y, low = room(r, T, RANK), dlow = room(r, T, RANK), dx = room(r, T, C), dy;
    mt_param *w, *a, *b;
    MT_TRY(add_param(r, "w", F, C, MT_SPLIT_ROWS, 0, &w));
    MT_TRY(add_param(r, "a", RANK, C, MT_REPLICATED, 1, &a));
    MT_TRY(add_param(r, "b", F, RANK, MT_SPLIT_ROWS, 0, &b));
    MT_TRY(start(r));
    y = room(r, T, w->value.rows);
    MT_TRY(mt_linear_forward(r->ctx, x, w->value, mt_none(), y));
    MT_TRY(mt_linear_forward(r->ctx, x, a->value, mt_none(), low));
    MT_TRY(mt_gemm(r->ctx, MT_NO_TRANS, MT_TRANS, 1, low, b->value, 1, y));
    MT_TRY(gives(r, y, 'c'));
    dy = y;
    MT_TRY(mt_linear_gradients(r->ctx, dy, x, w->grad, mt_none()));
    MT_TRY(mt_linear_gradients(r->ctx, dy, low, b->grad, mt_none()));
    MT_TRY(product(r, dy, b->value, 0, dlow));
    MT_TRY(mt_linear_gradients(r->ctx, dlow, x, a->grad, mt_none()));
    MT_TRY(product(r, dy, w->value, 0, dx));
    MT_TRY(product(r, dlow, a->value, 1, dx));
    if (r->mistake != 1) MT_TRY(mt_copy_to_tensor_region_backward(r->ctx, r->tp, dx));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    MT_TRY(gives(r, dx, 'R'));
    MT_TRY(gives(r, a->grad, 'R'));
    return gives(r, b->grad, 'r');
}

/* y = g(x W^T) + g(x A^T) B^T, W and A split by columns. mistake 1: the low product is not summed */
static mt_status lora_of_rows(run *r) {
    enum { RANK = 4 };
    mt_tensor x = given(r, T, F, 'c'), y = room(r, T, C), low = room(r, T, RANK), dlow = room(r, T, RANK);
    mt_tensor dx = room(r, T, x.cols);
    mt_param *w, *a, *b;
    MT_TRY(add_param(r, "w", C, F, MT_SPLIT_COLS, 0, &w));
    MT_TRY(add_param(r, "a", RANK, F, MT_SPLIT_COLS, 0, &a));
    MT_TRY(add_param(r, "b", C, RANK, MT_REPLICATED, 0, &b));
    MT_TRY(start(r));
    MT_TRY(mt_linear_forward(r->ctx, x, w->value, mt_none(), y));
    MT_TRY(mt_linear_forward(r->ctx, x, a->value, mt_none(), low));
    MT_TRY(sum(r, y));
    if (r->mistake != 1) MT_TRY(sum(r, low));
    MT_TRY(mt_gemm(r->ctx, MT_NO_TRANS, MT_TRANS, 1, low, b->value, 1, y));
    MT_TRY(gives(r, y, 'R'));
    MT_TRY(mt_linear_gradients(r->ctx, y, low, b->grad, mt_none()));
    MT_TRY(product(r, y, b->value, 0, dlow));
    MT_TRY(mt_linear_gradients(r->ctx, dlow, x, a->grad, mt_none()));
    MT_TRY(mt_linear_gradients(r->ctx, y, x, w->grad, mt_none()));
    MT_TRY(product(r, y, w->value, 0, dx));
    MT_TRY(product(r, dlow, a->value, 1, dx));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    MT_TRY(gives(r, dx, 'c'));
    MT_TRY(gives(r, a->grad, 'c'));
    return gives(r, b->grad, 'R');
}

/* Two micro-batches add to the gradients of a tied table, as embedding and head. mistake 1: the ids of the second one
   are looked up without g. */
static mt_status tied_table(run *r) {
    enum { VOCAB = 16 };
    int32_t ids[T], targets[T];
    mt_cross_entropy_desc d = {.vocab = VOCAB, .label_smoothing = 0.1f};
    mt_tensor x = room(r, T, C), logits = room(r, T, share(r, VOCAB)), loss = room(r, 1, T), dx = room(r, T, C);
    mt_param *table;
    MT_TRY(add_param(r, "table", VOCAB, C, MT_SPLIT_ROWS, 0, &table));
    MT_TRY(start(r));
    for (int micro = 0; micro < 2; micro++) {
        int64_t first = r->rank * table->value.rows;
        for (int i = 0; i < T; i++) ids[i] = (i * 3 + micro) % VOCAB, targets[i] = (i + 7 * micro) % VOCAB;
        MT_TRY(mt_embedding_forward(r->ctx, table->value, first, ids, 0, x));
        if (r->mistake != 1 || micro == 0) MT_TRY(sum(r, x));
        MT_TRY(mt_linear_forward(r->ctx, x, table->value, mt_none(), logits));
        MT_TRY(mt_vocab_parallel_cross_entropy_forward_backward(r->ctx, r->tp, &d, logits, targets, mt_none(), 0.5f,
                                                                loss));
        MT_TRY(mt_linear_gradients(r->ctx, logits, x, table->grad, mt_none()));
        MT_TRY(product(r, logits, table->value, 0, dx));
        MT_TRY(mt_copy_to_tensor_region_backward(r->ctx, r->tp, dx));
        MT_TRY(mt_embedding_backward(r->ctx, dx, first, ids, table->grad));
        MT_TRY(gives(r, loss, 'R'));
    }
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    return gives(r, table->grad, 'r');
}

/* Each rank has some experts, and multiplies them by the columns of their weights in a gate that all ranks have. */
static mt_status experts(run *r) {
    enum { EXPERTS = 4 };
    mt_tensor x = given(r, T, C, 'R'), w1 = given(r, EXPERTS * C, C, 'r'), w2 = given(r, C, EXPERTS * C, 'c');
    mt_tensor gate = given(r, T, EXPERTS, 'R'), h = room(r, T, C), y = zeros(r, T, C);
    mt_tensor scaled = room(r, T, C);
    int64_t own = EXPERTS / r->ranks;
    for (int64_t e = 0; e < own; e++) {
        mt_tensor weights = mt_tensor_cols(gate, r->rank * own + e, 1);
        MT_TRY(mt_linear_forward(r->ctx, x, mt_tensor_rows(w1, e * C, C), mt_none(), h));
        MT_TRY(mt_silu_forward(r->ctx, h, h));
        MT_TRY(mt_multiply_col_forward(r->ctx, h, weights, scaled));
        MT_TRY(mt_gemm(r->ctx, MT_NO_TRANS, MT_TRANS, 1, scaled, mt_tensor_cols(w2, e * C, C), 1, y));
    }
    MT_TRY(mt_declare(r->ctx, r->tp, y, MT_PARTIAL));
    MT_TRY(sum(r, y));
    return gives(r, y, 'R');
}

/* A gated MLP whose gate and up are two weights, and a copy of the forward in the backward (recomputation). */
static mt_status gated_twice(run *r) {
    mt_tensor x = given(r, T, C, 'R'), wg = given(r, F, C, 'r'), wu = given(r, F, C, 'r'), w2 = given(r, C, F, 'c');
    mt_tensor g = room(r, T, wg.rows), u = room(r, T, wg.rows), s = room(r, T, wg.rows), y = room(r, T, C);
    mt_tensor ds = room(r, T, wg.rows), dg = room(r, T, wg.rows), du = room(r, T, wg.rows), dx = room(r, T, C);
    for (int again = 0; again < 2; again++) {
        MT_TRY(mt_linear_forward(r->ctx, x, wg, mt_none(), g));
        MT_TRY(mt_linear_forward(r->ctx, x, wu, mt_none(), u));
        MT_TRY(mt_silu_forward(r->ctx, g, s));
        MT_TRY(mt_multiply(r->ctx, s, u, s));
        if (again) break;
        MT_TRY(mt_linear_forward(r->ctx, s, w2, mt_none(), y));
        MT_TRY(sum(r, y));
    }
    MT_TRY(product(r, y, w2, 0, ds));
    MT_TRY(mt_multiply(r->ctx, ds, u, dg));
    MT_TRY(mt_silu_backward(r->ctx, g, dg, dg));
    MT_TRY(mt_silu_forward(r->ctx, g, du));
    MT_TRY(mt_multiply(r->ctx, ds, du, du));
    MT_TRY(product(r, dg, wg, 0, dx));
    MT_TRY(product(r, du, wu, 1, dx));
    if (r->mistake != 1) MT_TRY(mt_copy_to_tensor_region_backward(r->ctx, r->tp, dx));
    MT_TRY(gives(r, y, 'R'));
    return gives(r, dx, 'R');
}

/* Logits of all ranks are gathered, each rank takes its columns of the gradient. mistake 1: the next rank's */
static mt_status gathered_logits(run *r) {
    enum { VOCAB = 16 };
    int32_t targets[T];
    mt_tensor x = given(r, T, C, 'R'), w = given(r, VOCAB, C, 'r'), mine = room(r, T, share(r, VOCAB));
    mt_tensor all = room(r, T, VOCAB), loss = room(r, 1, T), dx = room(r, T, C), dw = zeros(r, w.rows, C), dlogits;
    mt_cross_entropy_shard_desc d = {.vocab = VOCAB, .label_smoothing = 0.1f};
    int64_t rank = (r->rank + r->mistake) % r->ranks;
    for (int i = 0; i < T; i++) targets[i] = i;
    MT_TRY(mt_linear_forward(r->ctx, x, w, mt_none(), mine));
    MT_TRY(mt_gather_from_tensor_region(r->ctx, r->tp, mine, all));
    MT_TRY(mt_cross_entropy_forward_backward(r->ctx, &d, all, targets, mt_none(), 1, loss));
    dlogits = mt_tensor_cols(all, rank * mine.cols, mine.cols);
    MT_TRY(product(r, dlogits, w, 0, dx));
    MT_TRY(sum(r, dx));
    MT_TRY(mt_declare(r->ctx, r->tp, dw, MT_SPLIT_ROWS));
    MT_TRY(mt_linear_gradients(r->ctx, dlogits, x, dw, mt_none()));
    MT_TRY(gives(r, loss, 'R'));
    MT_TRY(gives(r, dw, 'r'));
    return gives(r, dx, 'R');
}

/* Positions of this rank's tokens, added to its rows, and rotary of them. mistake 1: the first rows of the table */
static mt_status own_positions(run *r) {
    mt_tensor x = given(r, T, C, 'r'), table = given(r, T, C, 'R'), y = room(r, x.rows, C);
    MT_TRY(mt_add(r->ctx, x, r->mistake ? mt_tensor_rows(table, 0, x.rows) : own_rows(r, table), y));
    return gives(r, y, 'r');
}

static mt_status own_rotary(run *r) {
    mt_tensor x = given(r, T, HEADS * 3 * D, 'r'), table = room(r, T, D);
    mt_attention_desc d = {.batch = 1, .seq = x.rows, .groups = HEADS, .heads_per_group = 1, .head_dim = D};
    MT_TRY(mt_rotary_table(r->ctx, 100, table));
    MT_TRY(mt_rotary_forward(r->ctx, &d, r->mistake ? mt_tensor_rows(table, 0, x.rows) : own_rows(r, table), x));
    return gives(r, x, 'r');
}

/* RMSNorm of features that are split: the squares of a token are summed over the ranks. mistake 1: they are not */
static mt_status norm_of_split_features(run *r) {
    mt_tensor x = given(r, T, F, 'c'), square = room(r, T, x.cols), ones = room(r, x.cols, 1), total = room(r, T, 1);
    mt_tensor y = room(r, T, x.cols);
    MT_TRY(mt_multiply(r->ctx, x, x, square));
    MT_TRY(mt_fill(r->ctx, ones, 1));
    MT_TRY(mt_declare(r->ctx, r->tp, ones, MT_SPLIT_ROWS));
    MT_TRY(mt_gemm(r->ctx, MT_NO_TRANS, MT_NO_TRANS, 1.0f / F, square, ones, 0, total));
    if (r->mistake != 1) MT_TRY(sum(r, total));
    for (int i = 0; !r->meta && i < T; i++) ((float *)total.data)[i] = 1 / sqrtf(((float *)total.data)[i] + 1e-5f);
    MT_TRY(mt_multiply_col_forward(r->ctx, x, total, y));
    return gives(r, y, 'c');
}

/* A softmax of split columns: the largest of each row over all ranks, then the sum of exponentials. */
static mt_status softmax_of_split_columns(run *r) {
    mt_tensor x = given(r, T, F, 'c'), most = room(r, T, 1), total = room(r, T, 1), y = room(r, T, x.cols);
    float *v = x.data, *m = most.data, *s = total.data, *p = y.data;
    for (int64_t i = 0; !r->meta && i < T; i++) {
        m[i] = -INFINITY;
        for (int64_t j = 0; j < x.cols; j++) m[i] = fmaxf(m[i], v[i * x.cols + j]);
    }
    MT_TRY(mt_declare(r->ctx, r->tp, most, MT_SPLIT_COLS));
    MT_TRY(mt_all_reduce(r->ctx, r->tp, m, m, T, MT_F32, MT_MAX));
    for (int64_t i = 0; !r->meta && i < T; i++) {
        s[i] = 0;
        for (int64_t j = 0; j < x.cols; j++) s[i] += p[i * x.cols + j] = expf(v[i * x.cols + j] - m[i]);
    }
    MT_TRY(mt_declare(r->ctx, r->tp, total, MT_PARTIAL));
    MT_TRY(mt_declare(r->ctx, r->tp, y, MT_SPLIT_COLS));
    MT_TRY(mt_all_reduce(r->ctx, r->tp, s, s, T, MT_F32, MT_SUM));
    for (int64_t i = 0; !r->meta && i < T; i++) s[i] = 1 / s[i];
    MT_TRY(mt_multiply_col_forward(r->ctx, y, total, y));
    MT_TRY(gives(r, most, 'R'));
    return gives(r, y, 'c');
}

/* Weights as in GPT-2, [in, out]. */
static mt_status weights_of_columns(run *r) {
    mt_tensor x = given(r, T, C, 'R'), w1 = given(r, C, F, 'c'), w2 = given(r, F, C, 'r'), h = room(r, T, w1.cols);
    mt_tensor y = room(r, T, C), dh = room(r, T, w1.cols), dx = room(r, T, C), dw1 = room(r, C, w1.cols);
    MT_TRY(product(r, x, w1, 0, h));
    MT_TRY(product(r, h, w2, 0, y));
    MT_TRY(sum(r, y));
    MT_TRY(mt_gemm(r->ctx, MT_NO_TRANS, MT_TRANS, 1, y, w2, 0, dh));
    MT_TRY(mt_gemm(r->ctx, MT_TRANS, MT_NO_TRANS, 1, x, dh, 0, dw1));
    MT_TRY(mt_gemm(r->ctx, MT_NO_TRANS, MT_TRANS, 1, dh, w1, 0, dx));
    MT_TRY(mt_copy_to_tensor_region_backward(r->ctx, r->tp, dx));
    MT_TRY(gives(r, y, 'R'));
    MT_TRY(gives(r, dw1, 'c'));
    return gives(r, dx, 'R');
}

/* From own tokens with all heads to all tokens with own heads, and back (Ulysses), with packed documents and ALiBi.
   mistake 1: ALiBi begins at head 0 */
static mt_status tokens_to_heads(run *r) {
    int32_t ends[] = {0, 3, T};
    mt_tensor x = given(r, T, HEADS * 3 * D, 'r'), all = room(r, T, x.cols), mine = room(r, T, share(r, x.cols));
    mt_tensor out = room(r, T, share(r, HEADS * D)), lse = room(r, HEADS / r->ranks, T),
              whole_out = room(r, T, HEADS * D);
    mt_tensor y = room(r, x.rows, HEADS * D), slopes = room(r, 1, HEADS / r->ranks);
    mt_attention_desc d = {.batch = 1, .seq = T, .groups = HEADS / r->ranks, .heads_per_group = 1, .head_dim = D};
    d.cu_seqlens = ends;
    d.documents = 2;
    d.scores.alibi = 1;
    d.scores.alibi_slopes = slopes.data;
    MT_TRY(mt_alibi_slopes(r->ctx, HEADS, r->rank * slopes.cols, slopes));
    MT_TRY(mt_gather_from_sequence_region(r->ctx, r->tp, x, all));
    MT_TRY(mt_scatter_to_tensor_region(r->ctx, r->tp, all, mine));
    MT_TRY(mt_attention_forward(r->ctx, &d, mine, out, lse));
    MT_TRY(mt_gather_from_tensor_region(r->ctx, r->tp, out, whole_out));
    MT_TRY(mt_scatter_to_sequence_region(r->ctx, r->tp, whole_out, y));
    return gives(r, y, 'r');
}

/* The norm of a gradient by hand: squares of a split weight, and those of a whole one on one rank. */
static mt_status squares_by_hand(run *r) {
    mt_tensor w = given(r, C, F, 'c'), b = given(r, 1, C, 'R'), square = zeros(r, 1, 1);
    MT_TRY(mt_sum_of_squares(r->ctx, w, square));
    MT_TRY(mt_check_view(r->ctx, r->tp, b, MT_SPLIT_COLS)); /* not a share, but counted once */
    if (r->rank == 0) MT_TRY(mt_sum_of_squares(r->ctx, b, square));
    MT_TRY(mt_check_view_end(r->ctx, MT_SUCCESS));
    MT_TRY(mt_all_reduce(r->ctx, r->tp, square.data, square.data, 1, MT_F32, MT_SUM));
    return gives(r, square, 'R');
}

/* A rank computes what the others get by a broadcast. mistake 1: they do not get it */
static mt_status broadcast_of_a_loss(run *r) {
    mt_tensor x = given(r, T, C, 'R'), s = zeros(r, 1, 1), y = room(r, 1, 1);
    if (r->rank == 0) MT_TRY(mt_sum(r->ctx, x, s));
    if (!r->mistake) MT_TRY(mt_broadcast(r->ctx, r->tp, s.data, s.data, 1, MT_F32, 0));
    MT_TRY(mt_copy(r->ctx, s, y));
    return gives(r, y, 'R');
}

/* A sharded optimizer by hand: each rank updates its rows of a weight that all have, and the ranks gather them. */
static mt_status own_rows_of_an_update(run *r) {
    mt_adamw step = {.lr = 0.1f, .beta1 = 0.9f, .beta2 = 0.9f, .eps = 1e-3f, .grad_scale = 1, .step = 1};
    mt_tensor w = given(r, C, C, 'R'), x = given(r, T, C, 'R'), grad = zeros(r, C, C), mine = room(r, share(r, C), C);
    mt_tensor m = zeros(r, mine.rows, C), v = zeros(r, mine.rows, C);
    MT_TRY(mt_linear_gradients(r->ctx, x, x, grad, mt_none()));
    MT_TRY(mt_scatter_to_sequence_region(r->ctx, r->tp, w, mine));
    MT_TRY(mt_adamw_step(r->ctx, &step, mine, mt_none(), own_rows(r, grad), m, v));
    MT_TRY(mt_gather_from_sequence_region(r->ctx, r->tp, mine, w));
    return gives(r, w, 'R');
}

/* Dropout of own columns and of own rows. mistake 1: all ranks have the words of the first */
static mt_status dropout_of_shares(run *r) {
    mt_tensor x = given(r, T, F, 'c'), z = given(r, T, C, 'r');
    int64_t rank = r->mistake ? 0 : r->rank;
    mt_dropout d = {.p = 0.5f, .at = {.seed = 3, .first_col = rank * x.cols, .global_cols = F}};
    MT_TRY(mt_bias_dropout_add_forward(r->ctx, x, mt_none(), mt_none(), d, x));
    d.at.first_col = 0;
    d.at.first_row = rank * z.rows;
    d.at.global_cols = C;
    MT_TRY(mt_bias_dropout_add_forward(r->ctx, z, mt_none(), mt_none(), d, z));
    MT_TRY(gives(r, x, 'c'));
    return gives(r, z, 'r');
}

/* Sequence parallelism: a norm of own rows, whose gain has a term of its gradient. mistake 1: the gain is not
   sequence_partial */
static mt_status norm_of_own_rows(run *r) {
    mt_tensor x = given(r, T, C, 'r'), n = room(r, x.rows, C), stats = room(r, x.rows, 2), all = room(r, T, C);
    mt_tensor w1 = given(r, F, C, 'r'), h = room(r, T, w1.rows), w2 = given(r, C, F, 'c'), sums = room(r, T, C);
    mt_tensor y = room(r, x.rows, C), dh = room(r, T, w1.rows), dall = room(r, T, C), dn = room(r, x.rows, C);
    mt_param *gain;
    MT_TRY(add_param(r, "norm.weight", 1, C, MT_REPLICATED, r->mistake != 1, &gain));
    MT_TRY(start(r));
    MT_TRY(mt_norm_forward(r->ctx, MT_RMS_NORM, x, gain->value, mt_none(), 1e-5f, n, stats));
    MT_TRY(mt_gather_from_sequence_region(r->ctx, r->tp, n, all));
    MT_TRY(mt_linear_forward(r->ctx, all, w1, mt_none(), h));
    MT_TRY(mt_linear_forward(r->ctx, h, w2, mt_none(), sums));
    MT_TRY(mt_reduce_scatter_to_sequence_region(r->ctx, r->tp, sums, y));
    MT_TRY(mt_gather_from_sequence_region(r->ctx, r->tp, y, sums));
    MT_TRY(product(r, sums, w2, 0, dh));
    MT_TRY(product(r, dh, w1, 0, dall));
    MT_TRY(mt_reduce_scatter_to_sequence_region(r->ctx, r->tp, dall, dn));
    MT_TRY(mt_norm_backward(r->ctx, MT_RMS_NORM, x, gain->value, stats, dn, y, n, gain->grad, mt_none()));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    MT_TRY(gives(r, y, 'r'));
    MT_TRY(gives(r, n, 'r'));
    return gives(r, gain->grad, 'R');
}

/* A loop without gradients: the loss of own tokens, and the number of right answers. */
static mt_status evaluation(run *r) {
    mt_tensor losses = given(r, 1, T, 'c'), total = zeros(r, 1, 1);
    for (int batch = 0; batch < 2; batch++) MT_TRY(mt_sum(r->ctx, losses, total));
    if (r->mistake != 1) MT_TRY(mt_all_reduce(r->ctx, r->tp, total.data, total.data, 1, MT_F32, MT_SUM));
    return gives(r, total, 'R');
}

/* Heads of two layers in one buffer: queries of own heads as rows of another width. */
static mt_status heads_as_rows(run *r) {
    mt_tensor x = given(r, T, HEADS * D, 'r'), y = room(r, x.rows * HEADS, D), gain = given(r, 1, D, 'R');
    mt_tensor heads = mt_tensor_reshape(x, x.rows * HEADS, D);
    MT_TRY(mt_norm_forward(r->ctx, MT_RMS_NORM, heads, gain, mt_none(), 1e-5f, y, mt_none()));
    MT_TRY(mt_silu_forward(r->ctx, mt_tensor_reshape(y, x.rows, HEADS * D), x));
    return gives(r, x, 'r');
}

/* ---- data ranks -------------------------------------------------------------------------------------------------- */

static size_t size_of(mt_tensor t) { return (size_t)(t.rows * t.cols); }
static mt_status sum_of_any(run *r, mt_tensor t) {
    return mt_all_reduce(r->ctx, r->tp, t.data, t.data, size_of(t), MT_F32, MT_SUM);
}

/* A step of AdamW with gradients that the program sums. mistake 1: it does not */
static mt_status data_by_hand(run *r) {
    mt_adamw step = {.lr = 0.1f, .beta1 = 0.9f, .beta2 = 0.9f, .eps = 1e-3f, .grad_scale = 1.0f / T, .step = 1};
    mt_tensor x = given(r, T, C, 'r'), w = given(r, C, C, 'R'), y = room(r, x.rows, C), grad = zeros(r, C, C);
    mt_tensor m = zeros(r, C, C), v = zeros(r, C, C), squares = zeros(r, 1, 1);
    for (int micro = 0; micro < 2; micro++) {
        MT_TRY(mt_linear_forward(r->ctx, x, w, mt_none(), y));
        MT_TRY(mt_linear_gradients(r->ctx, y, x, grad, mt_none()));
    }
    MT_TRY(mt_declare(r->ctx, r->tp, grad, MT_PARTIAL)); /* the sum over all tokens */
    if (r->mistake != 1) MT_TRY(sum_of_any(r, grad));
    MT_TRY(mt_sum_of_squares(r->ctx, grad, squares));
    MT_TRY(mt_adamw_step(r->ctx, &step, w, mt_none(), grad, m, v));
    MT_TRY(gives(r, squares, 'R'));
    return gives(r, w, 'R');
}

/* ZeRO-1 by hand: the ranks share out the sum of the gradients, the moments and the update. */
static mt_status shares_of_an_update(run *r) {
    mt_adamw step = {.lr = 0.1f, .beta1 = 0.9f, .beta2 = 0.9f, .eps = 1e-3f, .grad_scale = 1.0f / T, .step = 1};
    mt_tensor x = given(r, T, C, 'r'), w = given(r, C, C, 'R'), y = room(r, x.rows, C), grad = zeros(r, C, C);
    mt_tensor mine = room(r, share(r, C), C), m = zeros(r, mine.rows, C), v = zeros(r, mine.rows, C);
    mt_tensor squares = zeros(r, 1, 1), rows = own_rows(r, w);
    MT_TRY(mt_linear_forward(r->ctx, x, w, mt_none(), y));
    MT_TRY(mt_linear_gradients(r->ctx, y, x, grad, mt_none()));
    MT_TRY(mt_declare(r->ctx, r->tp, grad, MT_PARTIAL));
    MT_TRY(mt_reduce_scatter(r->ctx, r->tp, grad.data, mine.data, size_of(mine), MT_F32, MT_SUM));
    MT_TRY(mt_sum_of_squares(r->ctx, mine, squares));
    MT_TRY(sum_of_any(r, squares));
    MT_TRY(mt_check_view(r->ctx, r->tp, rows, MT_SPLIT_ROWS));
    MT_TRY(mt_check_view_end(r->ctx, mt_adamw_step(r->ctx, &step, rows, mt_none(), mine, m, v)));
    MT_TRY(mt_all_gather(r->ctx, r->tp, rows.data, w.data, size_of(rows), MT_F32));
    MT_TRY(gives(r, squares, 'R'));
    return gives(r, w, 'R');
}

/* A registry: two micro-batches, ids that are not declared, the sum, and the norm. mistake 1: no sum */
static mt_status data_of_a_registry(run *r) {
    int32_t ids[T];
    mt_tensor y = room(r, share(r, T), C), loss = zeros(r, 1, 1);
    mt_param *table;
    float norm;
    MT_TRY(add_param(r, "table", T, C, MT_REPLICATED, 0, &table));
    MT_TRY(start(r));
    for (int micro = 0; micro < 2; micro++) {
        for (int64_t i = 0; i < y.rows; i++) ids[i] = (int32_t)(r->rank * y.rows + i + micro) % T;
        MT_TRY(mt_embedding_forward(r->ctx, table->value, 0, ids, 0, y));
        MT_TRY(mt_sum_of_squares(r->ctx, y, loss));
        MT_TRY(mt_embedding_backward(r->ctx, y, 0, ids, table->grad));
        MT_TRY(mt_accumulate_gradients(r->ctx, r->params));
    }
    if (r->mistake != 1) MT_TRY(mt_sync_gradients(r->ctx, r->params));
    MT_TRY(mt_grad_norm(r->ctx, r->params, &norm));
    MT_TRY(sum_of_any(r, loss));
    MT_TRY(gives(r, loss, 'R'));
    return gives(r, table->grad, 'R');
}

/* A loop without gradients. mistake 1: each rank takes its own loss for that of all */
static mt_status evaluation_of_data(run *r) {
    mt_tensor x = given(r, T, C, 'r'), total = zeros(r, 1, 1), out = room(r, 1, 1);
    MT_TRY(mt_sum(r->ctx, x, total));
    if (r->mistake != 1) MT_TRY(sum_of_any(r, total));
    MT_TRY(mt_copy(r->ctx, total, out));
    return gives(r, out, 'R');
}

/* Attention of own sequences, with a bias that all ranks have, and its gradient. */
static mt_status sequences_with_a_bias(run *r) {
    mt_tensor qkv = given(r, 4 * T, 3 * HEADS * D, 'r'), bias = given(r, HEADS * T, T, 'R'),
              dbias = zeros(r, HEADS * T, T);
    mt_tensor out = room(r, qkv.rows, HEADS * D), lse = room(r, HEADS, qkv.rows), dqkv = room(r, qkv.rows, qkv.cols);
    mt_attention_desc d = {.batch = 4 / r->ranks, .seq = T, .groups = HEADS, .heads_per_group = 1, .head_dim = D};
    d.bias.value = bias;
    d.bias.grad = dbias;
    d.bias.heads = HEADS;
    d.bias.batch = 1;
    MT_TRY(mt_attention_forward(r->ctx, &d, qkv, out, lse));
    MT_TRY(mt_attention_backward(r->ctx, &d, qkv, out, lse, given(r, 4 * T, HEADS * D, 'r'), dqkv));
    MT_TRY(sum_of_any(r, dbias));
    MT_TRY(gives(r, out, 'r'));
    return gives(r, dbias, 'R');
}

/* ---- more of tensor ranks ---------------------------------------------------------------------------------------- */

/* Keys and values of own heads, from rows of weights that all ranks have, and their gradients. */
static mt_status own_heads_of_whole_weights(run *r) {
    mt_tensor x = given(r, T, C, 'R'), wq = given(r, HEADS * D, C, 'r'), dx = room(r, T, C), rows, drows;
    heads h = {.d = {.batch = 1, .seq = T, .groups = HEADS / r->ranks, .heads_per_group = 1, .head_dim = D}};
    mt_param *wk;
    MT_TRY(add_param(r, "k.weight", HEADS * D, C, MT_REPLICATED, 1, &wk));
    MT_TRY(start(r));
    rows = own_rows(r, wk->value);
    drows = own_rows(r, wk->grad);
    h.q = room(r, T, share(r, HEADS * D));
    h.k = h.v = room(r, T, share(r, HEADS * D));
    h.dk = room(r, T, h.k.cols);
    h.dv = room(r, T, h.k.cols);
    h.dout = given(r, T, HEADS * D, 'c');
    MT_TRY(mt_linear_forward(r->ctx, x, wq, mt_none(), h.q));
    MT_TRY(mt_check_view(r->ctx, r->tp, rows, MT_SPLIT_ROWS));
    MT_TRY(mt_linear_forward(r->ctx, x, rows, mt_none(), h.k));
    MT_TRY(attend(r, &h));
    MT_TRY(mt_add(r->ctx, h.dk, h.dv, h.dk));
    MT_TRY(mt_linear_gradients(r->ctx, h.dk, x, drows, mt_none()));
    MT_TRY(product(r, h.dk, rows, 0, dx));
    MT_TRY(mt_check_view_end(r->ctx, MT_SUCCESS));
    MT_TRY(product(r, h.dq, wq, 1, dx));
    MT_TRY(mt_copy_to_tensor_region_backward(r->ctx, r->tp, dx));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    MT_TRY(gives(r, h.out, 'c'));
    MT_TRY(gives(r, dx, 'R'));
    return gives(r, wk->grad, 'R');
}

/* Positions of own tokens from a table of a registry, by ids and by a view, and their gradient. */
static mt_status gradient_of_own_positions(run *r) {
    int32_t ids[T];
    mt_tensor x = given(r, T, C, 'r'), y = room(r, x.rows, C), t = mt_tensor_make(ids, MT_I32, x.rows, 1);
    mt_param *table;
    MT_TRY(add_param(r, "positions", T, C, MT_REPLICATED, 1, &table));
    MT_TRY(start(r));
    for (int64_t i = 0; i < x.rows; i++) ids[i] = (int32_t)(r->rank * x.rows + i);
    MT_TRY(mt_declare(r->ctx, r->tp, t, MT_SPLIT_ROWS));
    MT_TRY(mt_copy(r->ctx, x, y));
    MT_TRY(mt_embedding_forward(r->ctx, table->value, 0, ids, 1, y));
    MT_TRY(mt_add(r->ctx, y, own_rows(r, table->value), y));
    MT_TRY(mt_embedding_backward(r->ctx, y, 0, ids, table->grad));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    mt_declare_forget(r->ctx, ids, sizeof ids);
    MT_TRY(gives(r, y, 'r'));
    return gives(r, table->grad, 'R');
}

/* The output of the product is shared out by a plain reduce-scatter and gathered by a plain all-gather. */
static mt_status plain_collectives(run *r) {
    mt_tensor x = given(r, T, F, 'c'), w = given(r, C, F, 'c'), y = room(r, T, C), mine = room(r, share(r, T), C);
    MT_TRY(mt_linear_forward(r->ctx, x, w, mt_none(), y));
    MT_TRY(mt_reduce_scatter(r->ctx, r->tp, y.data, mine.data, size_of(mine), MT_F32, MT_SUM));
    MT_TRY(mt_silu_forward(r->ctx, mine, mine));
    MT_TRY(mt_all_gather(r->ctx, r->tp, mine.data, y.data, size_of(mine), MT_F32));
    return gives(r, y, 'R');
}

/* A residual of own rows, added by its owner to the term of the sum of all. */
static mt_status own_rows_in_the_sum(run *r) {
    mt_tensor x = given(r, T, F, 'c'), w = given(r, C, F, 'c'), y = room(r, T, C), residual = given(r, T, C, 'R');
    mt_tensor mine = own_rows(r, y);
    MT_TRY(mt_linear_forward(r->ctx, x, w, mt_none(), y));
    MT_TRY(mt_check_view(r->ctx, r->tp, residual, MT_PARTIAL)); /* each rank adds other rows */
    MT_TRY(mt_check_view_end(r->ctx, mt_add(r->ctx, mine, own_rows(r, residual), mine)));
    MT_TRY(sum(r, y));
    return gives(r, y, 'R');
}

/* Keys and values of own groups by declarations; their gradient is a term of that of all. mistake 1: all ranks write
   that of the keys to the columns of the first groups */
static mt_status groups_by_declaration(run *r) {
    const int64_t all = HEADS * D, own = share(r, all), first = r->rank * own;
    mt_tensor kv = given(r, T, 2 * all, 'R'), dkv = zeros(r, T, 2 * all);
    heads h = {.d = {.batch = 1, .seq = T, .groups = HEADS / r->ranks, .heads_per_group = 1, .head_dim = D}};
    h.q = given(r, T, all, 'c');
    h.dout = given(r, T, all, 'c');
    h.k = mt_tensor_cols(kv, first, own);
    h.v = mt_tensor_cols(kv, all + first, own);
    h.dk = mt_tensor_cols(dkv, r->mistake == 1 ? 0 : first, own);
    h.dv = mt_tensor_cols(dkv, all + first, own);
    MT_TRY(mt_check_view(r->ctx, r->tp, h.k, MT_SPLIT_COLS));
    MT_TRY(mt_check_view(r->ctx, r->tp, h.v, MT_SPLIT_COLS));
    MT_TRY(mt_check_view_end(r->ctx, mt_check_view_end(r->ctx, attend(r, &h))));
    MT_TRY(mt_declare(r->ctx, r->tp, dkv, MT_PARTIAL));
    MT_TRY(sum(r, dkv));
    MT_TRY(gives(r, h.out, 'c'));
    return gives(r, dkv, 'R');
}

/* The gradient of own rows of a weight that all ranks have, as a term of that of all rows. mistake 1: all ranks write
   it to the first rows */
static mt_status rows_by_declaration(run *r) {
    mt_tensor x = given(r, T, C, 'R'), dy = given(r, T, F, 'c'), dw = zeros(r, F, C), drows = own_rows(r, dw);
    if (r->mistake == 1) drows = mt_tensor_rows(dw, 0, drows.rows);
    MT_TRY(mt_linear_gradients(r->ctx, dy, x, drows, mt_none()));
    MT_TRY(mt_declare(r->ctx, r->tp, dw, MT_PARTIAL));
    MT_TRY(sum(r, dw));
    return gives(r, dw, 'R');
}

/* The sum of the first features of all ranks, with zeros beside it: the rank says that it is a term of a sum. */
static mt_status sum_of_first_features(run *r) {
    mt_tensor x = given(r, T, F, 'c'), y = zeros(r, T, 2 * C), part = mt_tensor_cols(y, 0, C);
    mt_tensor w = given(r, C, F, 'c');
    MT_TRY(mt_linear_forward(r->ctx, x, w, mt_none(), part));
    MT_TRY(mt_declare(r->ctx, r->tp, y, MT_PARTIAL));
    MT_TRY(sum(r, y));
    return gives(r, y, 'R');
}

/* A call writes own columns to a part of a workspace. */
static mt_status cols_in(run *r, mt_tensor work, int64_t from, int64_t cols) {
    mt_tensor x = given(r, work.rows, C, 'R'), w = given(r, r->ranks * cols, C, 'r'),
              y = mt_tensor_cols(work, from, cols);
    return mt_linear_forward(r->ctx, x, w, mt_none(), y);
}

/* A kernel of the program writes its term of a sum over all that was there. */
static mt_status term_over(const run *r, mt_tensor work) {
    for (int64_t i = 0; !r->meta && i < work.rows * work.cols; i++)
        ((float *)work.data)[i] = (float)(i % 7) / (float)r->ranks;
    MT_TRY(mt_declare(r->ctx, r->tp, work, MT_PARTIAL));
    return mt_reduce_from_tensor_region_forward(r->ctx, r->tp, work);
}

/* A workspace that is used for own columns, and for a sum after them. Zeros around the columns look like the rest of a
   term, so the program says what is meant. mistake 1: it is such a term, and all ranks have the same columns */
static mt_status workspace_used_again(run *r) {
    mt_tensor work = room(r, T, F), zero = zeros(r, T, F);
    MT_TRY(mt_fill(r->ctx, mt_tensor_cols(work, 0, F / 2), 0)); /* the rest is not known */
    for (int step = 0; step < 3; step++) {                      /* later steps have a sum around the columns */
        MT_TRY(cols_in(r, work, step == 2 ? F / 2 : 0, F / 4));
        if (step == 2) MT_TRY(cols_in(r, work, 0, F / 4));
        MT_TRY(term_over(r, work));
    }
    MT_TRY(gives(r, work, 'R'));
    for (int whole = 0; whole < 2 && r->mistake != 1; whole++) {
        MT_TRY(mt_fill(r->ctx, zero, 0));
        MT_TRY(cols_in(r, zero, 0, F / 4));
        MT_TRY(mt_declare_meant(r->ctx, whole ? zero : mt_tensor_cols(zero, 0, F / 4)));
        MT_TRY(term_over(r, zero));
    }
    if (r->mistake == 1) {
        MT_TRY(cols_in(r, zero, 0, F / 4));
        MT_TRY(mt_declare(r->ctx, r->tp, zero, MT_PARTIAL));
        MT_TRY(sum(r, zero));
    }
    return gives(r, zero, 'R');
}

/* Own rows of a gradient beside zeros for the other rows, which are filled apart. mistake 1: all write the first. */
static mt_status rows_beside_zeros(run *r) {
    mt_tensor x = given(r, T, C, 'R'), dy = given(r, T, F, 'c'), dw = room(r, F, C), rows = own_rows(r, dw);
    int64_t first = 0, own = rows.rows;
    if (r->mistake != 1) first = r->rank * own;
    rows = mt_tensor_rows(dw, first, own);
    MT_TRY(mt_fill(r->ctx, rows, 0));
    if (first) MT_TRY(mt_fill(r->ctx, mt_tensor_rows(dw, 0, first), 0));
    if (first + own < F) MT_TRY(mt_fill(r->ctx, mt_tensor_rows(dw, first + own, F - first - own), 0));
    MT_TRY(mt_linear_gradients(r->ctx, dy, x, rows, mt_none()));
    MT_TRY(mt_declare(r->ctx, r->tp, dw, MT_PARTIAL));
    MT_TRY(sum(r, dw));
    return gives(r, dw, 'R');
}

/* ---- what is meant, and looks wrong ------------------------------------------------------------------------------ */

/* Attention with the scale 1 / D, whose square is off from the usual one by the number of ranks. mistake 1: the scale
   is that of a part of the features */
static mt_status scale_of_the_head_size(run *r) {
    mt_tensor qkv = given(r, T, 3 * HEADS * D, 'c'), dout = given(r, T, HEADS * D, 'c');
    mt_tensor out = room(r, T, dout.cols), lse = room(r, out.cols / D, T), dqkv = room(r, T, qkv.cols);
    mt_attention_desc d = {.batch = 1, .seq = T, .groups = HEADS / r->ranks, .heads_per_group = 1, .head_dim = D};
    d.scores.scale = r->mistake == 1 ? 1 / sqrtf((float)D / (float)r->ranks) : 1.0f / D;
    if (r->mistake != 1) MT_TRY(mt_declare_meant(r->ctx, qkv));
    MT_TRY(mt_attention_forward(r->ctx, &d, qkv, out, lse));
    MT_TRY(mt_attention_backward(r->ctx, &d, qkv, out, lse, dout, dqkv));
    MT_TRY(gives(r, out, 'c'));
    return gives(r, dqkv, 'c');
}

/* The same, with the queries of the fused qkv declared, and no more. mistake 1: the scale of a rank, and
   nothing is said of this qkv. */
static mt_status scale_of_fused_queries(run *r) {
    const int64_t heads = HEADS / r->ranks;
    mt_tensor qkv = given(r, T, 3 * HEADS * D, 'c'), other = given(r, T, 3 * HEADS * D, 'c');
    mt_tensor out = room(r, T, heads * D), lse = room(r, heads, T);
    mt_attention_desc d = {.batch = 1, .seq = T, .groups = heads, .heads_per_group = 1, .head_dim = D};
    d.scores.scale = r->mistake == 1 ? 1 / sqrtf((float)D / (float)r->ranks) : 1.0f / D;
    MT_TRY(mt_declare_meant(r->ctx, mt_tensor_cols(r->mistake == 1 ? other : qkv, 0, heads * D)));
    MT_TRY(mt_attention_forward(r->ctx, &d, qkv, out, lse));
    return gives(r, out, 'c');
}

/* The same with queries, keys and values apart. */
static mt_status scale_of_own_queries(run *r) {
    heads h = {.d = {.batch = 1, .seq = T, .groups = HEADS / r->ranks, .heads_per_group = 1, .head_dim = D}};
    h.d.scores.scale = r->mistake == 1 ? 1 / sqrtf((float)D / (float)r->ranks) : 1.0f / D;
    h.q = given(r, T, HEADS * D, 'c');
    h.k = given(r, T, HEADS * D, 'c');
    h.v = given(r, T, HEADS * D, 'c');
    h.dk = room(r, T, h.k.cols);
    h.dv = room(r, T, h.k.cols);
    h.dout = given(r, T, HEADS * D, 'c');
    if (r->mistake != 1) MT_TRY(mt_declare_meant(r->ctx, h.q));
    MT_TRY(attend(r, &h));
    MT_TRY(gives(r, h.out, 'c'));
    return gives(r, h.dq, 'c');
}

/* A step with tokens and targets in memory of the caller. */
static mt_status step_of_a_batch(run *r, const mt_param *table, const int32_t *ids, const int32_t *targets,
                                 int64_t rows) {
    const mt_cross_entropy_shard_desc vocabulary = {.vocab = C};
    mt_tensor y = room(r, rows, C), loss = room(r, 1, rows);
    MT_TRY(mt_params_zero_grad(r->ctx, r->params));
    MT_TRY(mt_embedding_forward(r->ctx, table->value, 0, ids, 0, y));
    MT_TRY(mt_cross_entropy_forward_backward(r->ctx, &vocabulary, y, targets, mt_none(), 1.0f / T, loss));
    MT_TRY(mt_embedding_backward(r->ctx, y, 0, ids, table->grad));
    return mt_sync_gradients(r->ctx, r->params);
}

/* All data ranks train on the same tokens on purpose, as a test does that wants to learn one batch by heart. That
   check = 2 refuses it otherwise is in test_replicas.c: without data nothing is known of tokens. */
static mt_status one_batch_on_all_data_ranks(run *r) {
    static const int32_t text[T / 2 + 1] = {3, 1, 4, 1, 5};
    const int64_t rows = share(r, T), each = T / 2;
    int32_t ids[T], targets[T];
    mt_param *table;
    for (int64_t i = 0; i < rows; i++) {
        ids[i] = text[i % each];
        targets[i] = text[i % each + 1];
    }
    MT_TRY(add_param(r, "table", T, C, MT_REPLICATED, 0, &table));
    MT_TRY(start(r));
    MT_TRY(mt_declare_meant(r->ctx, mt_tensor_make(ids, MT_I32, rows, 1)));
    MT_TRY(mt_declare_meant(r->ctx, mt_tensor_make(targets, MT_I32, rows, 1)));
    for (int step = 0; step < 4; step++) MT_TRY(step_of_a_batch(r, table, ids, targets, rows));
    mt_declare_forget(r->ctx, ids, sizeof ids);
    mt_declare_forget(r->ctx, targets, sizeof targets);
    return gives(r, table->grad, 'R');
}

#define TWICE "both add|to the sum over \"tensor\"|on one rank only"

static const program programs[] = {
    {"bias on one rank", bias_on_one_rank, 2, 0, {"ranks 0 and 1 " TWICE}, 0},
    {"bias after the product", bias_after_the_product, 4, 0, {"both add bias of mt_bias_forward|" TWICE}, 0},
    {"bias of a registry", bias_of_a_registry, 2, 0, {"bias of mt_bias_forward \"fc2\"|" TWICE}, 0},
    {"residual on one rank", residual_on_one_rank, 4, 0, {"a of mt_add|" TWICE}, 0},
    {"residual in the sum", residual_in_the_sum, 2, 0, {"x of mt_copy|" TWICE}, 0},
    {"dropout and add on one rank", dropout_add_on_one_rank, 2, 0, {TWICE}, 0},
    {"bias divided", bias_divided, 4, 0, {0}, 0},
    {"bias multiplied", bias_multiplied, 4, 0, {0}, 0},
    {"two groups on two ranks", two_groups, 2, 0, {"k has columns 0 to 3 of the 8|rank 1", "rank"}, 0},
    {"two groups on four ranks", two_groups, 4, 0, {"k has columns 0 to 3 of the 8", "not those of rank"}, 0},
    {"four groups on two ranks",
     four_groups,
     2,
     0,
     {"k has columns 0 to 7 of the 16", "k has columns 8 to 15 of the 16"},
     0},
    {"groups side by side", groups_side_by_side, 2, 0, {"k has columns 0 to 7 of the 32", "rank"}, 0},
    {"groups side by side on four ranks", groups_side_by_side, 4, 0, {"k has columns 0 to 3 of the 32", "rank"}, 0},
    {"groups in turn", groups_in_turn, 2, 0, {"k has columns 0 to 3 of the 16"}, 0},
    {"one group", one_group, 4, 0, {0}, 0},
    {"one group side by side", one_group_side_by_side, 4, 0, {0}, 0},
    {"gathered groups", gathered_groups, 2, 0, {"k has columns 0 to 7 of the 16"}, 0},
    {"gathered groups on four ranks", gathered_groups, 4, 0, {"k has columns 0 to 3 of the 16"}, 0},
    {"own queries of all keys", own_queries_of_all_keys, 2, 0, {0}, 0},
    {"own queries of a memory", own_queries_of_a_memory, 4, 0, {0}, 0},
    {"context ranks, all keys", own_queries_of_all_keys, 4, 0, {0}, 2},
    {"context ranks, a memory", own_queries_of_a_memory, 2, 0, {0}, 2},
    {"context ranks, first keys",
     own_queries_of_first_keys,
     4,
     0,
     {"k has 8 rows that all 4 ranks|k must have the first 2 rows",
      "mt_download|x is partial over \"context\"|mt_linear_gradients"},
     2},
    {"ids without a declaration", ids_without_declaration, 2, 1, {0}, 0},
    {"ids in a row", ids_in_a_row, 2, 1, {0}, 0},
    {"norm of heads", norm_of_heads, 2, 1, {"mt_download \"attention.q_layernorm\"|is partial"}, 0},
    {"own queries of first keys",
     own_queries_of_first_keys,
     4,
     0,
     {"k has 8 rows that all 4 ranks|k must have the first 2 rows", "mt_download|x is partial|mt_linear_gradients"},
     0},
    {"LoRA of columns", lora_of_columns, 2, 1, {"partial"}, 0},
    {"LoRA of rows", lora_of_rows, 2, 1, {"a is partial|mt_reduce_from_tensor_region_forward"}, 0},
    {"tied table", tied_table, 2, 1, {"x is partial"}, 0},
    {"experts", experts, 2, 0, {0}, 0},
    {"experts on four ranks", experts, 4, 0, {0}, 0},
    {"gated twice", gated_twice, 2, 1, {"partial"}, 0},
    {"gathered logits", gathered_logits, 2, 1, {"must be"}, 0},
    {"own positions", own_positions, 4, 1, {"must be"}, 0},
    {"own rotary", own_rotary, 4, 1, {"must be"}, 0},
    {"norm of split features", norm_of_split_features, 2, 1, {"partial"}, 0},
    {"softmax of split columns", softmax_of_split_columns, 4, 0, {0}, 0},
    {"weights of columns", weights_of_columns, 2, 1, {0}, 0},
    {"tokens to heads", tokens_to_heads, 2, 1, {0}, 0},
    {"squares by hand", squares_by_hand, 2, 1, {0}, 0},
    {"broadcast of a loss", broadcast_of_a_loss, 2, 0, {0}, 0},
    {"own rows of an update", own_rows_of_an_update, 2, 1, {0}, 0},
    {"dropout of shares", dropout_of_shares, 2, 1, {"first_col"}, 0},
    {"norm of own rows", norm_of_own_rows, 2, 1, {"sequence_partial"}, 0},
    {"evaluation", evaluation, 4, 1, {"partial"}, 0},
    {"heads as rows", heads_as_rows, 2, 1, {0}, 0},
    {"data by hand", data_by_hand, 2, 0, {"partial"}, 1},
    {"shares of an update", shares_of_an_update, 2, 1, {0}, 1},
    {"data of a registry", data_of_a_registry, 2, 1, {"synchronised"}, 1},
    {"evaluation of data", evaluation_of_data, 4, 1, {"partial"}, 1},
    {"sequences with a bias", sequences_with_a_bias, 2, 1, {0}, 1},
    {"own heads of whole weights", own_heads_of_whole_weights, 2, 1, {0}, 0},
    {"gradient of own positions", gradient_of_own_positions, 2, 1, {0}, 0},
    {"plain collectives", plain_collectives, 2, 1, {0}, 0},
    {"own rows in the sum", own_rows_in_the_sum, 2, 1, {0}, 0},
    {"groups by declaration",
     groups_by_declaration,
     2,
     0,
     {"the view of mt_dot_product_attention_backward|rank 1 has the same as rank 0"},
     0},
    {"rows by declaration", rows_by_declaration, 4, 0, {"the view of mt_linear_gradients|has the same as rank 0"}, 0},
    {"workspace used again",
     workspace_used_again,
     2,
     0,
     {"the view of mt_linear_forward|rank 1 has the same as rank 0|mt_declare_meant for it before|was written over"},
     0},
    {"rows beside zeros", rows_beside_zeros, 4, 0, {"the view of mt_linear_gradients|has the same as rank 0"}, 0},
    {"sum of first features", sum_of_first_features, 2, 0, {0}, 0},
    {"scale of the head size", scale_of_the_head_size, 4, 1, {"desc.scale is 4 times|mt_declare_meant(ctx, qkv)"}, 0},
    {"scale of fused queries", scale_of_fused_queries, 4, 1, {"desc.scale is 4 times|mt_declare_meant(ctx, qkv)"}, 0},
    {"scale of own queries", scale_of_own_queries, 4, 1, {"desc.scale is 4 times|mt_declare_meant(ctx, q)"}, 0},
    {"one batch on all data ranks", one_batch_on_all_data_ranks, 2, 1, {0}, 1},
};

/* ---- how programs run -------------------------------------------------------------------------------------------- */

/* Runs the program on a rank. text, which may be NULL, becomes the message of an error. */
static mt_status run_rank(mt_comm *world, run r, result *out, char *text) {
    mt_context_desc where = {.arena_bytes = 1 << 22, .check = r.check};
    mt_status status;
    char unknown[240];
    if (r.meta) where.device = MT_DEVICE_META;
    r.world = world;
    r.out = out;
    const int ranks = mt_comm_size(world), group = r.p->group;
    const mt_grid_desc shape = {.tp = group ? 1 : ranks, .cp = group == 2 ? ranks : 1};
    MT_TRY(mt_grid_create(world, &shape, &r.grid));
    MT_TRY(mt_context_create(world, &where, &r.ctx));
    MT_TRY(mt_params_create(r.ctx, &r.grid, &r.params));
    r.tp = group == 0 ? r.grid.tp : group == 1 ? r.grid.dp : r.grid.cp;
    r.rank = mt_comm_rank(r.tp);
    r.ranks = mt_comm_size(r.tp);
    status = r.p->main(&r);
    if (status == MT_SUCCESS) status = mt_check_replicas(r.ctx, r.tp, "the end");
    if (status == MT_SUCCESS && r.p->known && r.meta && mt_check_unknown(r.ctx, unknown, sizeof unknown))
        status = mt_fail(r.ctx, MT_ERR_DATA, "not known: %s", unknown);
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

static int failures;

/* Prints what is wrong with a program. */
#define failed(...) (failures++, fprintf(stderr, __VA_ARGS__), fputc('\n', stderr))

static void check_right(const program *p) {
    char text[MT_ERROR_BYTES];
    double off;
    for (int rank = 0; rank < p->ranks; rank++)
        if (run_alone(p, rank, 0, text)) failed("%s, rank %d alone: %s", p->name, rank, text);
    for (int check = 0; check <= 2; check++) {
        memset(shares, 0, sizeof shares);
        if (run_together(p, check, 0, 0, text)) failed("%s, check %d: %s", p->name, check, text);
        off = distance(p->ranks, results_of(whole));
        if (!(off < 1e-4)) failed("%s is not right: off by %g", p->name, off);
    }
    if (run_together(p, 2, 1, 0, text)) failed("%s, all ranks without data: %s", p->name, text);
}

/* The program with a mistake computes something else, or fails, and one way to check refuses it. */
static void check_mistake(const program *p, int mistake) {
    const char *words = p->mistakes[mistake - 1];
    char text[MT_ERROR_BYTES];
    mt_status status;
    memset(shares, 0, sizeof shares);
    if (run_together(p, 0, 0, mistake, text) == MT_SUCCESS && distance(p->ranks, results_of(whole)) < 1e-3)
        failed("%s, mistake %d computes the same", p->name, mistake);
    for (int is_meta = 0; is_meta < 2; is_meta++) {
        status = run_together(p, 2, is_meta, mistake, text);
        if (status == MT_SUCCESS) failed("%s, mistake %d, meta %d is accepted", p->name, mistake, is_meta);
        if (!test_has_words(text, words))
            failed("%s, mistake %d, meta %d: '%s' is not all in '%s'", p->name, mistake, is_meta, words, text);
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
    assert_int_equal(failures, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_right_programs)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
