/* ---- the position ids of tokens, and the check of token ids ------------------------------------------------------ */

#pragma once
#include "embedding.h"
#include "ids.cuh"

/* The arguments of the loop. The desc has the length of a sequence and the documents. */
#define MTI_POSITION_COST 32 /* as elements of another operator */
typedef struct mti_positions {
    const mt_attention_desc *desc;
    int64_t first_token;
    int32_t *ids;
} mti_positions;

static void mti_cpu_position_ids(void *data, int thread, int64_t first, int64_t last) {
    const mti_positions *p = (const mti_positions *)data;
    int64_t i, seq = p->desc->seq;
    (void)thread;
    for (i = first; i < last; i++) {
        int64_t token = p->first_token + i;
        p->ids[i] = (int32_t)mti_document_position(p->desc, token / seq, token % seq);
    }
}

/* Stores the first id that is neither in [0, error->limit) nor `ignore` in *error. */
static void mti_cpu_ids_check(const int32_t *ids, int64_t count, int32_t ignore, mt_range_error *error) {
    int64_t i;
    for (i = 0; i < count && ((ids[i] >= 0 && ids[i] < error->limit) || ids[i] == ignore);) i++;
    if (i == count) return;
    error->found = 1;
    error->value = ids[i];
    error->index = i;
}

MT_API mt_status mt_ids_check(mt_context *ctx, const char *what, const int32_t *ids, int64_t count, int64_t limit,
                              int32_t ignore) {
    mt_range_error error;
    mti_operator op;
    MT_TRY(mti_expect_pointer(ctx, "mt_ids_check", "ids", ids, count));
    memset(&error, 0, sizeof error);
    error.limit = limit;
    snprintf(error.function, sizeof error.function, "mt_ids_check");
    snprintf(error.name, sizeof error.name, "%s", what ? what : "id");
    MT_TRY(mti_begin_bare(&op, ctx, "mt_ids_check"));
    op.work.bytes = (double)count * sizeof *ids;
    MT_TRY(mti_end(&op, MTI_RUN(&op, mti_cuda_ids_check(ctx, ids, count, ignore, &error),
                                mti_cpu_ids_check(ids, count, ignore, &error))));
    return error.found ? mt_range_fail(ctx, &error) : MT_SUCCESS;
}

/* Notes which positions ids has. Ranks with whole sequences may have the same ones. */
static mt_status mti_positions_note(mti_operator *op, int64_t first_token, const mt_attention_desc *s, mt_tensor ids) {
    mt_status status = mt_declare(op->ctx, NULL, ids, MT_UNDECLARED);
    if (status != MT_SUCCESS) return mti_end(op, status);
    if (s->cu_seqlens || ids.rows % s->seq == 0) mt_check_content(op->ctx, ids, MT_CONTENT_ANY);
    else mti_made(op->ctx, ids, 2, (double)(first_token % s->seq), (double)s->seq);
    return MT_SUCCESS;
}

MT_API mt_status mt_position_ids(mt_context *ctx, int64_t first_token, int64_t seq, const int32_t *cu_seqlens,
                                 int64_t documents, int32_t *ids, int64_t count) {
    mt_attention_desc s;
    mti_operator op;
    MT_TRY(mti_expect_pointer(ctx, "mt_position_ids", "ids", ids, count));
    MT_TRY(mt_check_integer(ctx, "mt_position_ids", NULL, "first_token", first_token, 0, INT64_MAX - count));
    MT_TRY(mt_check_integer(ctx, "mt_position_ids", NULL, "seq", seq, 1, INT32_MAX));
    MT_TRY(mti_expect_cu_seqlens(ctx, "mt_position_ids", cu_seqlens, documents, first_token + count, INT64_MAX));
    memset(&s, 0, sizeof s);
    s.seq = s.part.seq = seq;
    s.cu_seqlens = cu_seqlens;
    s.documents = documents;
    MT_TRY(mti_begin_bare(&op, ctx, "mt_position_ids"));
    op.work.bytes = (double)count * sizeof *ids;
    MT_TRY(mti_positions_note(&op, first_token, &s, mt_tensor_make(ids, MT_I32, count, 1)));
    mti_positions p = {&s, first_token, ids};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_position_ids(ctx, &s, first_token, ids, count),
                                mti_cpu_rows(ctx, count, MTI_POSITION_COST, mti_cpu_position_ids, &p)));
}
