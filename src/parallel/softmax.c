/* ---- softmax and log-softmax over a vocabulary that is split ----------------------------------------------------- */

#pragma once
#include "softmax.h"
#include "vocab.c"
#include "../ops/softmax_shard.h"

/* A tensor of the size of the logits, with its name. */
typedef struct mti_named {
    const char *name;
    mt_tensor t;
} mti_named;

/* The checks that forward and backward share. The first tensor decides the number of rows. */
static mt_status mti_vocab_softmax_check(mt_context *ctx, const char *function, mt_comm *tp, int64_t vocab,
                                         int64_t padded_vocab, const mti_named *tensors, int count) {
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!tp) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: tp is NULL", function);
    MT_TRY(mt_check_integer(ctx, function, NULL, "vocab", vocab, 1, INT32_MAX));
    for (i = 0; i < count; i++)
        MT_TRY(mti_expect_local_vocab(ctx, function, tp, vocab, padded_vocab, tensors[i].name, tensors[i].t,
                                      tensors[0].t.rows));
    return mti_expect_countable(ctx, function, tp, tensors[0].t.rows);
}

/* Returns the desc of virtual shard `shard` of this rank, whose shards have `cols` columns each. */
static mt_softmax_shard_desc mti_softmax_shard(mt_context *ctx, mt_comm *tp, int64_t vocab, int log, int64_t cols,
                                               int shard) {
    mt_softmax_shard_desc part;
    part.vocab = vocab;
    part.first_col = ((int64_t)mt_comm_rank(tp) * mti_shards(ctx, tp) + shard) * cols;
    part.log = log;
    return part;
}

/* One all-gather has two scalars for each token and virtual shard. A rank then computes y of all its shards at once. */
static mt_status mti_vocab_softmax_forward(mt_context *ctx, mt_comm *tp, int64_t vocab, int log, mt_tensor logits,
                                           mt_tensor y) {
    int s, shards = mti_shards(ctx, tp), all_shards = shards * mt_comm_size(tp);
    int64_t rows = logits.rows, cols = logits.cols / shards;
    mt_softmax_shard_desc part;
    mt_tensor all, own;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, rows * all_shards, 2, &all));
    own = mt_tensor_rows(all, mt_comm_rank(tp) * shards * rows, shards * rows);
    for (s = 0; s < shards; s++) {
        part = mti_softmax_shard(ctx, tp, vocab, log, cols, s);
        MT_TRY(
            mt_softmax_shard_stats(ctx, &part, mt_shard_cols(logits, s, shards), mt_tensor_rows(own, s * rows, rows)));
    }
    MT_TRY(mt_all_gather(ctx, tp, own.data, all.data, (size_t)(shards * rows) * 2, MT_F32));
    part = mti_softmax_shard(ctx, tp, vocab, log, cols, 0);
    return mt_softmax_shard_forward(ctx, &part, logits, all, all_shards, y);
}

static mt_status mti_vocab_forward(mt_context *ctx, const char *function, mt_comm *tp, int64_t vocab,
                                   int64_t padded_vocab, int log, mt_tensor logits, mt_tensor y) {
    const mti_named tensors[] = {{"logits", logits}, {"y", y}};
    size_t mark;
    mt_status status;
    MT_TRY(mti_vocab_softmax_check(ctx, function, tp, vocab, padded_vocab, tensors, 2));
    mark = mt_arena_mark(ctx);
    status = mti_vocab_softmax_forward(ctx, tp, vocab, log, logits, y);
    mt_arena_release(ctx, mark);
    return status;
}

/* The argument of mti_softmax_sums_leaf. */
typedef struct mti_softmax_backward {
    mt_comm *tp;
    int64_t vocab;
    int log;
    mt_tensor y, dy;
} mti_softmax_backward;

/* The mti_leaf of the sums: out [tokens, 1] = those of one virtual shard. */
static mt_status mti_softmax_sums_leaf(mt_context *ctx, const void *arg, int shard, mt_tensor out) {
    const mti_softmax_backward *b = (const mti_softmax_backward *)arg;
    int shards = mti_shards(ctx, b->tp);
    mt_softmax_shard_desc part = mti_softmax_shard(ctx, b->tp, b->vocab, b->log, b->dy.cols / shards, shard);
    return mt_softmax_shard_sums(ctx, &part, mt_shard_cols(b->y, shard, shards), mt_shard_cols(b->dy, shard, shards),
                                 out);
}

/* One all-reduce has a scalar for each token. */
static mt_status mti_vocab_softmax_backward(mt_context *ctx, const mti_softmax_backward *b, mt_tensor dx) {
    mt_softmax_shard_desc part;
    mt_tensor sums;
    int shards = mti_shards(ctx, b->tp);
    MT_TRY(mt_arena_tensor(ctx, MT_F32, dx.rows, 1, &sums));
    MT_TRY(mti_shard_tree(ctx, mti_softmax_sums_leaf, b, 0, shards, sums));
    MT_TRY(mt_all_reduce(ctx, b->tp, sums.data, sums.data, (size_t)dx.rows, MT_F32, MT_SUM));
    part = mti_softmax_shard(ctx, b->tp, b->vocab, b->log, dx.cols / shards, 0);
    return mt_softmax_shard_backward(ctx, &part, b->y, b->dy, sums, dx);
}

static mt_status mti_vocab_backward(mt_context *ctx, const char *function, mt_comm *tp, int64_t vocab,
                                    int64_t padded_vocab, int log, mt_tensor y, mt_tensor dy, mt_tensor dx) {
    const mti_named tensors[] = {{"y", y}, {"dy", dy}, {"dx", dx}};
    const mti_softmax_backward b = {tp, vocab, log, y, dy};
    size_t mark;
    mt_status status;
    MT_TRY(mti_vocab_softmax_check(ctx, function, tp, vocab, padded_vocab, tensors, 3));
    mark = mt_arena_mark(ctx);
    status = mti_vocab_softmax_backward(ctx, &b, dx);
    mt_arena_release(ctx, mark);
    return status;
}

MT_API mt_status mt_vocab_parallel_softmax_forward(mt_context *ctx, mt_comm *tp, int64_t vocab, int64_t padded_vocab,
                                                   mt_tensor logits, mt_tensor y) {
    return mti_vocab_forward(ctx, "mt_vocab_parallel_softmax_forward", tp, vocab, padded_vocab, 0, logits, y);
}

MT_API mt_status mt_vocab_parallel_softmax_backward(mt_context *ctx, mt_comm *tp, int64_t vocab, int64_t padded_vocab,
                                                    mt_tensor y, mt_tensor dy, mt_tensor dx) {
    return mti_vocab_backward(ctx, "mt_vocab_parallel_softmax_backward", tp, vocab, padded_vocab, 0, y, dy, dx);
}

MT_API mt_status mt_vocab_parallel_log_softmax_forward(mt_context *ctx, mt_comm *tp, int64_t vocab,
                                                       int64_t padded_vocab, mt_tensor logits, mt_tensor y) {
    return mti_vocab_forward(ctx, "mt_vocab_parallel_log_softmax_forward", tp, vocab, padded_vocab, 1, logits, y);
}

MT_API mt_status mt_vocab_parallel_log_softmax_backward(mt_context *ctx, mt_comm *tp, int64_t vocab,
                                                        int64_t padded_vocab, mt_tensor y, mt_tensor dy, mt_tensor dx) {
    return mti_vocab_backward(ctx, "mt_vocab_parallel_log_softmax_backward", tp, vocab, padded_vocab, 1, y, dy, dx);
}
