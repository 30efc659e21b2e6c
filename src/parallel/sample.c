/* ---- sampling from a vocabulary shard ---------------------------------------------------------------------------- */

#pragma once
#include "vocab.c"
#include "../ops/sample_shard.h"

static mt_status mti_sample_check(mt_context *ctx, const char *function, mt_comm *tp, int64_t vocab,
                                  int64_t padded_vocab, const mt_sample_desc *desc, mt_tensor logits) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!tp || !desc) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, tp ? "desc" : "tp");
    MT_TRY(mt_check_integer(ctx, function, NULL, "vocab", vocab, 1, INT32_MAX));
    return mti_expect_local_vocab(ctx, function, tp, vocab, padded_vocab, "logits", logits, logits.rows);
}

/* The columns of a rank have consecutive ids, also in invariant mode: the padding of its virtual shards is at the end
   of the vocabulary. So a rank is one shard. Ids are sent as they are, so the type of the all-gather is MT_I32. */
static mt_status mti_sample(mt_context *ctx, mt_comm *tp, int64_t vocab, const mt_sample_desc *desc, mt_tensor logits,
                            int32_t *ids) {
    int64_t rows = logits.rows, k = mt_sample_count(desc, logits.cols);
    mt_tensor all, own;
    MT_TRY(mt_arena_tensor(ctx, MT_F32, mt_size_mul(rows, mt_comm_size(tp)), 2 * k, &all));
    own = mt_tensor_rows(all, mt_comm_rank(tp) * rows, rows);
    MT_TRY(mt_sample_candidates(ctx, desc, vocab, mt_comm_rank(tp) * logits.cols, logits, own));
    MT_TRY(mt_all_gather(ctx, tp, own.data, all.data, (size_t)(rows * 2 * k), MT_I32));
    MT_TRY(mt_sample_ids(ctx, desc, vocab, all, mt_comm_size(tp), ids));
    return mt_ids_check(ctx, "sampled id", ids, rows, vocab, 0);
}

MT_API mt_status mt_vocab_parallel_sample(mt_context *ctx, mt_comm *tp, int64_t vocab, int64_t padded_vocab,
                                          const mt_sample_desc *desc, mt_tensor logits, int32_t *ids) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_sample_check(ctx, "mt_vocab_parallel_sample", tp, vocab, padded_vocab, desc, logits));
    mark = mt_arena_mark(ctx);
    status = mti_sample(ctx, tp, vocab, desc, logits, ids);
    mt_arena_release(ctx, mark);
    return status;
}
