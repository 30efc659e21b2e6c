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
   groups of its heads. side_by_side: keys and values are in one tensor [K | V], not in two. mistake 1: all ranks read the first groups; 2: the next rank's groups */
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
    int64_t seen = d.mask == MT_MASK_CAUSAL && r->mistake != 1 ? (r->rank + 1) * share(r, T) : k.rows;
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
    return own_queries(r, (mt_attention_desc){.mask = MT_MASK_BIDIRECTIONAL}, 0);
}
static mt_status own_queries_of_a_memory(run *r) {
    return own_queries(r, (mt_attention_desc){.mask = MT_MASK_BIDIRECTIONAL}, 2 * T);
}
static mt_status own_queries_of_first_keys(run *r) { return own_queries(r, (mt_attention_desc){.window = 3}, 0); }

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
    MT_TRY(mt_column_parallel_linear_forward(r->ctx, &qkv, x, y, &saved));
    MT_TRY(mt_qk_norm_forward(r->ctx, &heads, y, &kept));
    MT_TRY(mt_attention_forward(r->ctx, &d, y, out, lse));
    MT_TRY(mt_attention_backward(r->ctx, &d, y, out, lse, dout, dy));
    MT_TRY(mt_qk_norm_backward(r->ctx, &heads, dy, &kept));
    MT_TRY(mt_column_parallel_linear_backward(r->ctx, &qkv, dy, dx, &saved));
    if (r->mistake == 1) MT_TRY(gives(r, heads.q.weight->grad, 'R'));
    MT_TRY(mt_sync_gradients(r->ctx, r->params));
    MT_TRY(gives(r, out, 'c'));
    MT_TRY(gives(r, dx, 'R'));
    return gives(r, heads.q.weight->grad, 'R');
}

#define TWICE "both add|to the sum over \"tensor\"|on one rank only"

static const program programs[] = {
    {"bias on one rank", bias_on_one_rank, 2, 0, {"ranks 0 and 1 " TWICE}},
    {"bias after the product", bias_after_the_product, 4, 0, {"both add bias of mt_bias_forward|" TWICE}},
    {"bias of a registry", bias_of_a_registry, 2, 0, {"bias of mt_bias_forward \"fc2\"|" TWICE}},
    {"residual on one rank", residual_on_one_rank, 4, 0, {"a of mt_add|" TWICE}},
    {"residual in the sum", residual_in_the_sum, 2, 0, {"x of mt_copy|" TWICE}},
    {"dropout and add on one rank", dropout_add_on_one_rank, 2, 0, {TWICE}},
    {"bias divided", bias_divided, 4, 0, {0}},
    {"bias multiplied", bias_multiplied, 4, 0, {0}},
    {"two groups on two ranks", two_groups, 2, 0, {"k has columns 0 to 3 of the 8|rank 1", "rank"}},
    {"two groups on four ranks", two_groups, 4, 0, {"k has columns 0 to 3 of the 8", "not those of rank"}},
    {"four groups on two ranks",
     four_groups,
     2,
     0,
     {"k has columns 0 to 7 of the 16", "k has columns 8 to 15 of the 16"}},
    {"groups side by side", groups_side_by_side, 2, 0, {"k has columns 0 to 7 of the 32", "rank"}},
    {"groups side by side on four ranks", groups_side_by_side, 4, 0, {"k has columns 0 to 3 of the 32", "rank"}},
    {"groups in turn", groups_in_turn, 2, 0, {"k has columns 0 to 3 of the 16"}},
    {"one group", one_group, 4, 0, {0}},
    {"one group side by side", one_group_side_by_side, 4, 0, {0}},
    {"gathered groups", gathered_groups, 2, 0, {"k has columns 0 to 7 of the 16"}},
    {"gathered groups on four ranks", gathered_groups, 4, 0, {"k has columns 0 to 3 of the 16"}},
    {"own queries of all keys", own_queries_of_all_keys, 2, 0, {0}},
    {"own queries of a memory", own_queries_of_a_memory, 4, 0, {0}},
    {"ids without a declaration", ids_without_declaration, 2, 1, {0}},
    {"ids in a row", ids_in_a_row, 2, 1, {0}},
    {"norm of heads", norm_of_heads, 2, 1, {"mt_download \"attention.q_layernorm\"|is partial"}},
    {"own queries of first keys",
     own_queries_of_first_keys,
     4,
     0,
     {"k has 8 rows that all 4 ranks|k must have the first 2 rows", "mt_download|x is partial|mt_linear_gradients"}},
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
    MT_TRY(mt_grid_create(world, &(mt_grid_desc){.tp = mt_comm_size(world)}, &r.grid));
    MT_TRY(mt_context_create(world, &where, &r.ctx));
    MT_TRY(mt_params_create(r.ctx, &r.grid, &r.params));
    r.tp = r.grid.tp;
    r.rank = r.grid.tp_rank;
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
