/* ---- vocabulary-parallel embedding and cross-entropy ------------------------------------------------------------- */

#pragma once
#include "vocab.h"
#include "linear.c"
#include "../ops/embedding.h"
#include "../ops/cross_entropy.h"

MT_API mt_status mt_vocab_parallel_embedding_create(mt_context *ctx, mt_params *params, const char *name,
                                                    const mt_embedding_desc *desc, mt_vocab_parallel_embedding *out) {
    static const char *const function = "mt_vocab_parallel_embedding_create";
    char full[MT_NAME_MAX];
    mt_param_desc w;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    MT_TRY(mt_layer_name(ctx, params, name, full));
    MT_TRY(mt_check_integer(ctx, function, full, "vocab", desc->vocab, 1, INT32_MAX));
    MT_TRY(mt_check_integer(ctx, function, full, "features", desc->features, 1, INT64_MAX));
    MT_TRY(mt_check_float(ctx, function, full, "init_std", mt_or_default(desc->init_std, 1), MT_FLOAT_AT_LEAST_0));
    if (desc->padded_vocab)
        MT_TRY(mt_check_integer(ctx, function, full, "padded_vocab", desc->padded_vocab, desc->vocab, INT32_MAX));
    memset(out, 0, sizeof *out);
    memset(&w, 0, sizeof w);
    w.rows = desc->vocab;
    w.cols = desc->features;
    w.placement = MT_SPLIT_ROWS;
    w.padded_features = desc->padded_vocab;
    w.init_std = mt_or_default(desc->init_std, 0.02f);
    w.weight_decay = 1;
    w.shared_embedding = desc->shared;
    MT_TRY(mti_add_param(ctx, params, full, "weight", w, &out->weight));
    out->desc = *desc;
    out->tp = params->grid->tp;
    out->first_row = params->grid->tp_rank * out->weight->value.rows;
    return MT_SUCCESS;
}

/* The checks that forward and backward share. y is y or dy, and `what` is its name. */
static mt_status mti_embedding_check(mt_context *ctx, const char *function, const mt_vocab_parallel_embedding *layer,
                                     const int32_t *ids, int64_t tokens, const char *what, mt_tensor y) {
    int64_t rows = 0;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mt_check_param(ctx, function, layer ? layer->weight : NULL));
    MT_TRY(mt_sequence_rows(ctx, function, layer->tp, layer->desc.sequence_parallel, tokens, &rows));
    MT_TRY(mt_check_activation(ctx, function, layer->weight, what, y, rows, layer->desc.features));
    return mti_ids_are_trusted(ctx) ? MT_SUCCESS : mt_ids_check(ctx, "token id", ids, tokens, layer->desc.vocab, 0);
}

/* Writes the rows of the table that this rank has, and 0 for the others. One rank has the row and all others have 0, so
   the sum over ranks is exact in any order. The sum turns -0 into 0, because 0 + -0 is 0. In invariant mode a single
   rank must have the same bits, so it also adds the row to 0. */
static mt_status mti_embedding_lookup(mt_context *ctx, const mt_vocab_parallel_embedding *layer, const int32_t *ids,
                                      mt_tensor y) {
    if (mt_context_invariant(ctx)) MT_TRY(mt_fill(ctx, y, 0.0f));
    return mt_embedding_forward(ctx, layer->weight->value, layer->first_row, ids,
                                mt_context_invariant(ctx) ? 1.0f : 0.0f, y);
}

MT_API mt_status mt_vocab_parallel_embedding_forward(mt_context *ctx, const mt_vocab_parallel_embedding *layer,
                                                     const int32_t *ids, int64_t tokens, mt_tensor y) {
    size_t mark;
    mt_tensor partial;
    mt_status status;
    MT_TRY(mti_embedding_check(ctx, "mt_vocab_parallel_embedding_forward", layer, ids, tokens, "y", y));
    MT_TRY(mt_check_sent(ctx, "mt_vocab_parallel_embedding_forward", layer->tp, 0, "", y, "y", y));
    mark = mt_arena_mark(ctx);
    status = mti_partial_tokens(ctx, layer->tp, layer->desc.sequence_parallel, y, &partial);
    if (status == MT_SUCCESS) status = mti_embedding_lookup(ctx, layer, ids, partial);
    if (status == MT_SUCCESS) status = mti_reduce_tokens(ctx, layer->tp, layer->desc.sequence_parallel, 0, partial, y);
    mt_arena_release(ctx, mark);
    return status;
}

/* The mt_token_operator of mti_embedding_add. */
typedef struct mti_lookup {
    int64_t first_row;
    const int32_t *ids;
    mt_tensor dy;
} mti_lookup;

static mt_status mti_lookup_rows(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor dtable,
                                 mt_tensor none) {
    const mti_lookup *l = (const mti_lookup *)arg;
    (void)none;
    return mt_embedding_backward(ctx, mt_tensor_rows(l->dy, first, count), l->first_row, l->ids + first, dtable);
}

/* Adds the rows of dy to those of the gradient of the table. */
static mt_status mti_embedding_add(mt_context *ctx, const mt_vocab_parallel_embedding *layer, const int32_t *ids,
                                   mt_tensor dy) {
    mti_lookup l;
    l.first_row = layer->first_row;
    l.ids = ids;
    l.dy = dy;
    return mti_sum_over_context(ctx, mti_lookup_rows, &l, dy.rows,
                                layer->weight->lookup_grad.data ? layer->weight->lookup_grad : layer->weight->grad,
                                mt_none());
}

MT_API mt_status mt_vocab_parallel_embedding_backward(mt_context *ctx, const mt_vocab_parallel_embedding *layer,
                                                      const int32_t *ids, int64_t tokens, mt_tensor dy) {
    size_t mark;
    mt_tensor all;
    mt_status status;
    MT_TRY(mti_embedding_check(ctx, "mt_vocab_parallel_embedding_backward", layer, ids, tokens, "dy", dy));
    MT_TRY(mt_check_sent(ctx, "mt_vocab_parallel_embedding_backward", layer->tp, layer->desc.sequence_parallel, "dy",
                         dy, "", mt_none()));
    MT_TRY(mt_check_gradient(ctx, "mt_vocab_parallel_embedding_backward", layer->weight));
    mark = mt_arena_mark(ctx);
    status = mt_gather_tokens(ctx, layer->tp, layer->desc.sequence_parallel, dy, &all);
    if (status == MT_SUCCESS) mti_gradient_added(layer->weight);
    if (status == MT_SUCCESS) status = mti_embedding_add(ctx, layer, ids, all);
    mt_arena_release(ctx, mark);
    return status;
}

/* Returns the desc of virtual shard `shard` of this rank. */
static mt_cross_entropy_shard_desc mti_cross_entropy_shard(mt_comm *tp, const mt_cross_entropy_desc *desc,
                                                           int64_t shard_cols, int shard, int shards) {
    mt_cross_entropy_shard_desc part;
    memset(&part, 0, sizeof part);
    part.vocab = desc->vocab;
    part.first_col = ((int64_t)mt_comm_rank(tp) * shards + shard) * shard_cols;
    part.label_smoothing = desc->label_smoothing;
    part.ignore_index = desc->ignore_index;
    return part;
}

/* Checks padded_vocab, and that t has `rows` rows, and the columns of this rank's share of the vocabulary. */
static mt_status mti_expect_local_vocab(mt_context *ctx, const char *function, mt_comm *tp, int64_t vocab,
                                        int64_t padded_vocab, const char *name, mt_tensor t, int64_t rows) {
    int shards;
    if (padded_vocab) MT_TRY(mt_check_integer(ctx, function, NULL, "padded_vocab", padded_vocab, vocab, INT32_MAX));
    MT_TRY(mti_expect_shards(ctx, function, tp));
    shards = mti_shards(ctx, tp);
    return mt_tensor_check(ctx, function, name, t, MT_ARG_FLOAT, rows,
                           shards *
                               mti_shard_features(mti_padded(vocab, padded_vocab), 1, 1, shards * mt_comm_size(tp)));
}

/* Checks that statistics of all shards, up to four for each row, can be counted. */
static mt_status mti_expect_countable(mt_context *ctx, const char *function, mt_comm *tp, int64_t rows) {
    int64_t shards = (int64_t)mti_shards(ctx, tp) * mt_comm_size(tp);
    if (mt_size_mul(rows, 32 * shards) >= 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %lld tokens of %lld shards have more scalars than can be counted",
                   function, (long long)rows, (long long)shards);
}

/* The checks that forward and backward share. */
static mt_status mti_cross_entropy_check(mt_context *ctx, const char *function, mt_comm *tp,
                                         const mt_cross_entropy_desc *desc, mt_tensor logits) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!tp || !desc) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, tp ? "desc" : "tp");
    MT_TRY(mt_check_integer(ctx, function, NULL, "vocab", desc->vocab, 1, INT32_MAX));
    MT_TRY(mt_check_float(ctx, function, NULL, "label_smoothing", desc->label_smoothing, MT_FLOAT_PROBABILITY));
    MT_TRY(mti_expect_local_vocab(ctx, function, tp, desc->vocab, desc->padded_vocab, "logits", logits, logits.rows));
    return mti_expect_countable(ctx, function, tp, logits.rows);
}

/* Computes loss and lse. One all-gather has four scalars for each token and shard. Megatron-LM uses three all-reduces:
   maximum, target, sum. */
static mt_status mti_cross_entropy_forward(mt_context *ctx, mt_comm *tp, const mt_cross_entropy_desc *desc,
                                           mt_tensor logits, const int32_t *targets, mt_tensor loss, mt_tensor lse) {
    int s, shards = mti_shards(ctx, tp), all_shards = shards * mt_comm_size(tp);
    int64_t rows = logits.rows, cols = logits.cols / shards;
    mt_cross_entropy_shard_desc part;
    mt_tensor all, own;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, rows * all_shards, 4, &all));
    own = mt_tensor_rows(all, mt_comm_rank(tp) * shards * rows, shards * rows);
    for (s = 0; s < shards; s++) {
        part = mti_cross_entropy_shard(tp, desc, cols, s, shards);
        MT_TRY(mt_cross_entropy_stats(ctx, &part, mt_shard_cols(logits, s, shards), targets,
                                      mt_tensor_rows(own, s * rows, rows)));
    }
    MT_TRY(mt_all_gather(ctx, tp, own.data, all.data, (size_t)(shards * rows) * 4, MT_F32));
    return mt_cross_entropy_combine(ctx, &part, all, all_shards, targets, loss, lse);
}

/* Checks the arguments of forward. */
static mt_status mti_cross_entropy_expect(mt_context *ctx, const char *function, mt_comm *tp,
                                          const mt_cross_entropy_desc *desc, mt_tensor logits, const int32_t *targets,
                                          mt_tensor loss) {
    MT_TRY(mti_cross_entropy_check(ctx, function, tp, desc, logits));
    MT_TRY(mt_tensor_check(ctx, function, "loss", loss, MT_ARG_F32, 1, logits.rows));
    if (mti_ids_are_trusted(ctx)) return MT_SUCCESS;
    return mt_ids_check(ctx, "target", targets, logits.rows, desc->vocab, mt_ignore_index(desc->ignore_index));
}

MT_API mt_status mt_vocab_parallel_cross_entropy_forward(mt_context *ctx, mt_comm *tp,
                                                         const mt_cross_entropy_desc *desc, mt_tensor logits,
                                                         const int32_t *targets, mt_tensor loss,
                                                         mt_cross_entropy_saved *saved) {
    static const char *const function = "mt_vocab_parallel_cross_entropy_forward";
    mt_tensor lse;
    size_t keep, mark;
    mt_status status;
    MT_TRY(mti_cross_entropy_expect(ctx, function, tp, desc, logits, targets, loss));
    keep = mt_arena_mark(ctx);
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 2, logits.rows, &lse));
    mark = mt_arena_mark(ctx);
    status = mti_cross_entropy_forward(ctx, tp, desc, logits, targets, loss, lse);
    mt_arena_release(ctx, saved && status == MT_SUCCESS ? mark : keep);
    if (status != MT_SUCCESS || !saved) return status;
    saved->logits = logits;
    saved->lse = lse;
    saved->targets = targets;
    return MT_SUCCESS;
}

/* Overwrites the logits with their gradient, one virtual shard after the other. */
static mt_status mti_cross_entropy_backward(mt_context *ctx, mt_comm *tp, const mt_cross_entropy_desc *desc,
                                            mt_tensor logits, const int32_t *targets, mt_tensor lse, mt_tensor dloss,
                                            float scale) {
    int s, shards = mti_shards(ctx, tp);
    for (s = 0; s < shards; s++) {
        mt_cross_entropy_shard_desc part = mti_cross_entropy_shard(tp, desc, logits.cols / shards, s, shards);
        MT_TRY(mt_cross_entropy_backward(ctx, &part, mt_shard_cols(logits, s, shards), targets, lse, dloss, scale));
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_vocab_parallel_cross_entropy_backward(mt_context *ctx, mt_comm *tp,
                                                          const mt_cross_entropy_desc *desc, mt_tensor dloss,
                                                          float scale, const mt_cross_entropy_saved *saved) {
    static const char *const function = "mt_vocab_parallel_cross_entropy_backward";
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_cross_entropy_check(ctx, function, tp, desc, saved->logits));
    return mti_cross_entropy_backward(ctx, tp, desc, saved->logits, saved->targets, saved->lse, dloss, scale);
}

MT_API mt_status mt_vocab_parallel_cross_entropy_forward_backward(mt_context *ctx, mt_comm *tp,
                                                                  const mt_cross_entropy_desc *desc, mt_tensor logits,
                                                                  const int32_t *targets, mt_tensor dloss, float scale,
                                                                  mt_tensor loss) {
    static const char *const function = "mt_vocab_parallel_cross_entropy_forward_backward";
    mt_tensor lse;
    size_t mark;
    mt_status status;
    MT_TRY(mti_cross_entropy_expect(ctx, function, tp, desc, logits, targets, loss));
    if (dloss.data)
        MT_TRY(mt_tensor_check(ctx, function, "dloss", dloss, MT_ARG_F32, 1, dloss.cols == 1 ? 1 : logits.rows));
    if (mt_comm_size(tp) == 1 && !mt_context_invariant(ctx)) {
        mt_cross_entropy_shard_desc whole = mti_cross_entropy_shard(tp, desc, logits.cols, 0, 1);
        return mt_cross_entropy_forward_backward(ctx, &whole, logits, targets, dloss, scale, loss);
    }
    mark = mt_arena_mark(ctx);
    MT_TRY(mt_arena_tensor(ctx, MT_F32, 2, logits.rows, &lse));
    status = mti_cross_entropy_forward(ctx, tp, desc, logits, targets, loss, lse);
    if (status == MT_SUCCESS) status = mti_cross_entropy_backward(ctx, tp, desc, logits, targets, lse, dloss, scale);
    mt_arena_release(ctx, mark);
    return status;
}
