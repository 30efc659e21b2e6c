/* ---- invariant mode ---------------------------------------------------------------------------------------------- */

#pragma once
#include "invariant.h"
#include "options.c"
#include "../comm/communicator.h"
#include "../ops/move.h"
#include "../ops/gemm.h"
#include "../comm/hash.c"

/* Returns the number of virtual shards on a rank of the tensor group; 1 outside invariant mode. */
static int mti_shards(const mt_context *ctx, const mt_comm *tp) {
    return mt_context_invariant(ctx) ? mt_context_invariant(ctx) / mt_comm_size(tp) : 1;
}

static mt_status mti_expect_shards(mt_context *ctx, const char *function, const mt_comm *tp) {
    if (!mt_context_invariant(ctx) || mt_context_invariant(ctx) % mt_comm_size(tp) == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE,
                   "%s: %d virtual shards (mt_context_desc.invariant) cannot be split over %d tensor ranks", function,
                   mt_context_invariant(ctx), mt_comm_size(tp));
}

MT_API mt_tensor mt_shard_cols(mt_tensor t, int shard, int shards) {
    if (!t.data) return t;
    if (shard < 0 || shard >= shards || t.cols % shards != 0) return mt_tensor_rows(t, 0, -1);
    return mt_tensor_cols(t, t.cols / shards * shard, t.cols / shards);
}

/* Writes to out, without adding, what virtual shard `shard` of this rank contributes to a sum. */
typedef mt_status (*mti_leaf)(mt_context *ctx, const void *arg, int shard, mt_tensor out);

/* Computes out = the sum of leaf over the shards [first, first + count), where count is a power of two. All sums over
   virtual shards in a call use this function. Its order of additions is the tree ((0+1)+(2+3))+..., which mt_all_reduce
   continues across ranks. Scratch memory: log2(count) tensors like out. */
static mt_status mti_shard_tree(mt_context *ctx, mti_leaf leaf, const void *arg, int first, int count, mt_tensor out) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor other;
    if (count == 1) return leaf(ctx, arg, first, out);
    MT_TRY(mti_shard_tree(ctx, leaf, arg, first, count / 2, out));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, out.rows, out.cols, &other));
    MT_TRY(mti_shard_tree(ctx, leaf, arg, first + count / 2, count / 2, other));
    MT_TRY(mt_add(ctx, out, other, out));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Returns 1 when a GEMM may use t as it is. With another leading dimension or alignment, a GEMM library may choose
   another kernel, which gives other bits. In invariant mode every operand is therefore contiguous and aligned; others
   are copied. */
static int mti_is_canonical(const mt_context *ctx, mt_tensor t) {
    return !mt_context_invariant(ctx) || mt_tensor_is_aligned(ctx, t);
}

MT_API mt_status mt_invariant_output(mt_context *ctx, mt_tensor t, mt_tensor *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_invariant_output: out is NULL");
    *out = t;
    if (!mti_is_canonical(ctx, t)) return mt_arena_tensor(ctx, t.dtype, t.rows, t.cols, out);
    if (mt_context_invariant(ctx)) out->ld = t.cols; /* one row is contiguous with any ld */
    return MT_SUCCESS;
}

MT_API mt_status mt_invariant_store(mt_context *ctx, mt_tensor room, mt_tensor t) {
    if (!ctx) return MT_ERR_ARGUMENT;
    return room.data == t.data ? MT_SUCCESS : mt_copy(ctx, room, t);
}

MT_API mt_status mt_invariant_input(mt_context *ctx, mt_tensor t, mt_tensor *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_invariant_input: out is NULL");
    MT_TRY(mt_invariant_output(ctx, t, out));
    return mt_invariant_store(ctx, t, *out);
}

/* Computes c = op(a) op(b) + beta c, where beta is 0 or 1. In invariant mode it copies operands that are not contiguous
   and aligned. */
static mt_status mti_gemm(mt_context *ctx, mt_transpose trans_a, mt_transpose trans_b, mt_tensor a, mt_tensor b,
                          float beta, mt_tensor c) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor out;
    MT_TRY(mt_invariant_input(ctx, a, &a));
    MT_TRY(mt_invariant_input(ctx, b, &b));
    MT_TRY(beta == 0.0f ? mt_invariant_output(ctx, c, &out) : mt_invariant_input(ctx, c, &out));
    MT_TRY(mt_gemm(ctx, trans_a, trans_b, 1.0f, a, b, beta, out));
    MT_TRY(mt_invariant_store(ctx, out, c));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* The argument of mti_sum_leaf. */
typedef struct mti_shard_sum {
    mt_token_operator op;
    const void *arg;
    int64_t rows;   /* rows of each virtual shard */
    int64_t a_rows; /* rows of the first gradient in out; those of the second follow */
} mti_shard_sum;

/* The mti_leaf of mti_sum_over_shards: out = what op adds for one virtual shard. */
static mt_status mti_sum_leaf(mt_context *ctx, const void *arg, int shard, mt_tensor out) {
    const mti_shard_sum *s = (const mti_shard_sum *)arg;
    mt_tensor b = mt_none();
    if (s->a_rows < out.rows) b = mt_tensor_rows(out, s->a_rows, out.rows - s->a_rows);
    MT_TRY(mt_fill(ctx, out, 0.0f));
    return s->op(ctx, s->arg, shard * s->rows, s->rows, mt_tensor_rows(out, 0, s->a_rows), b);
}

/* Adds to a and b the sum over the virtual shards of what op adds for each shard. b may be mt_none(). */
static mt_status mti_sum_over_shards(mt_context *ctx, mt_token_operator op, const void *arg, int64_t rows, int shards,
                                     mt_tensor a, mt_tensor b) {
    mti_shard_sum sum;
    mt_tensor out;
    size_t mark = mt_arena_mark(ctx);
    mti_parallel *p;
    mt_status status;
    int before;
    MT_TRY(mti_parallel_open(ctx, &p));
    sum.op = op;
    sum.arg = arg;
    sum.rows = rows;
    sum.a_rows = a.rows;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, a.rows + b.rows, a.cols, &out));
    before = p->guard.over_tokens;
    p->guard.over_tokens = 1;
    status = mti_shard_tree(ctx, mti_sum_leaf, &sum, 0, shards, out);
    p->guard.over_tokens = before;
    MT_TRY(status);
    MT_TRY(mt_add(ctx, a, mt_tensor_rows(out, 0, a.rows), a));
    if (b.data) MT_TRY(mt_add(ctx, b, mt_tensor_rows(out, a.rows, b.rows), b));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Whether virtual context ranks divide the rows of tensors. */
static int mti_has_context_ranks(const mt_context *ctx) {
    const mti_parallel *p = mti_parallel_of(ctx);
    return p && p->context_ranks > 1 && !p->rows_are_sequences;
}

/* Returns how many virtual context ranks this rank is. */
static int mti_context_shards(const mt_context *ctx) {
    return mti_has_context_ranks(ctx) ? mti_parallel_of(ctx)->context_shards : 1;
}

/* Refuses rows that this rank's virtual context ranks cannot divide. */
static mt_status mti_context_rows_check(mt_context *ctx, int64_t rows) {
    const int shards = mti_context_shards(ctx);
    if (rows % shards == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE,
                   "the gradients of %lld rows cannot be summed for %d virtual context ranks each "
                   "(mt_parallel_options.context.invariant); if the rows are sequences, call mt_rows_are_sequences "
                   "before",
                   (long long)rows, shards);
}

/* Computes c = a op(b) + beta c, whose rows are tokens, for each virtual context rank alone: the bits of a row may
   depend on the number of rows. beta is 0 or 1. */
static mt_status mti_token_product(mt_context *ctx, mt_transpose trans_b, mt_tensor a, mt_tensor b, float beta,
                                   mt_tensor c) {
    const int shards = mti_context_shards(ctx), count = a.rows % shards == 0 ? shards : 1;
    const int64_t rows = a.rows / count;
    int i;
    for (i = 0; i < count; i++)
        MT_TRY(mti_gemm(ctx, MT_NO_TRANS, trans_b, mt_tensor_rows(a, i * rows, rows), b, beta,
                        mt_tensor_rows(c, i * rows, rows)));
    return MT_SUCCESS;
}

/* Adds to a and b what op adds for the rows of each virtual context rank, in the tree that the sum over context ranks
   goes on with. All sums over the tokens of a rank that are not sums over its virtual shards use this function. */
static mt_status mti_sum_over_context(mt_context *ctx, mt_token_operator op, const void *arg, int64_t rows, mt_tensor a,
                                      mt_tensor b) {
    const int shards = mti_context_shards(ctx);
    if (!mti_has_context_ranks(ctx)) return op(ctx, arg, 0, rows, a, b);
    MT_TRY(mti_context_rows_check(ctx, rows));
    return mti_sum_over_shards(ctx, op, arg, rows / shards, shards, a, b);
}

/* The mt_token_operator of mti_weight_product: adds dy^T x. */
typedef struct mti_rows_product {
    mt_tensor dy, x;
} mti_rows_product;

static mt_status mti_product_rows(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor dw,
                                  mt_tensor none) {
    const mti_rows_product *p = (const mti_rows_product *)arg;
    (void)none;
    return mti_gemm(ctx, MT_TRANS, MT_NO_TRANS, mt_tensor_rows(p->dy, first, count), mt_tensor_rows(p->x, first, count),
                    1.0f, dw);
}

/* Computes dw = beta dw + dy^T x, a sum over the tokens of this rank. beta is 0 or 1. */
static mt_status mti_weight_product(mt_context *ctx, mt_tensor dy, mt_tensor x, float beta, mt_tensor dw) {
    mti_rows_product p;
    if (!mti_has_context_ranks(ctx)) return mti_gemm(ctx, MT_TRANS, MT_NO_TRANS, dy, x, beta, dw);
    p.dy = dy;
    p.x = x;
    if (beta == 0.0f) MT_TRY(mt_fill(ctx, dw, 0.0f));
    return mti_sum_over_context(ctx, mti_product_rows, &p, dy.rows, dw, mt_none());
}

MT_API int mt_rows_are_sequences(mt_context *ctx, int are) {
    mti_parallel *p = ctx ? mti_parallel_of(ctx) : NULL;
    int before;
    if (!p) return 0;
    before = p->rows_are_sequences;
    p->rows_are_sequences = are != 0;
    return before;
}

MT_API mt_status mt_sum_over_tokens(mt_context *ctx, mt_comm *tp, int sequence_parallel, mt_token_operator op,
                                    const void *arg, int64_t rows, mt_tensor a, mt_tensor b) {
    int shards;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!op) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_sum_over_tokens: op is NULL");
    if (!mt_context_invariant(ctx)) return op(ctx, arg, 0, rows, a, b);
    MT_TRY(mt_check_tokens(ctx, "mt_sum_over_tokens", mt_sequence_tokens(tp, sequence_parallel, rows)));
    shards = (sequence_parallel ? mti_shards(ctx, tp) : mt_context_invariant(ctx)) * mti_context_shards(ctx);
    return mti_sum_over_shards(ctx, op, arg, rows / shards, shards, a, b);
}

MT_API mt_status mt_check_tokens(mt_context *ctx, const char *function, int64_t tokens) {
    int shards;
    if (!ctx) return MT_ERR_ARGUMENT;
    shards = mt_context_invariant(ctx) * mti_context_shards(ctx);
    if (shards == 0 || tokens % shards == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE,
                   "%s: %lld tokens cannot be split into %d virtual shards (mt_context_desc.invariant%s)", function,
                   (long long)tokens, shards, mti_has_context_ranks(ctx) ? ", for each virtual context rank" : "");
}

MT_API int64_t mt_invariant_micro_batch(int data_shards, int64_t sequences) {
    int64_t parts = 1;
    while (2 * parts <= data_shards && sequences % (2 * parts) == 0) parts *= 2;
    return sequences / parts;
}
