/* ---- embedding --------------------------------------------------------------------------------------------------- */

#pragma once
#include "embedding.h"
#include "rows.c"
#include "numbers.c"
#include "operator.c"
#include "embedding.cuh"

static mt_status mti_expect_embedding(mt_context *ctx, const char *where, const char *table_name, mt_tensor table,
                                      int64_t first_row, const int32_t *ids, const char *y_name, mt_tensor y) {
    if (table.cols != y.cols)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s is [%lld, %lld], %s is [%lld, %lld]: widths differ", where,
                       table_name, (long long)table.rows, (long long)table.cols, y_name, (long long)y.rows,
                       (long long)y.cols);
    MT_TRY(mt_check_integer(ctx, where, NULL, "first_row", first_row, 0, INT64_MAX));
    return mti_expect_pointer(ctx, where, "ids", ids, y.rows);
}

/* y = columns of row `row` of the table, from `col` on, + beta y. A row that is not in the table counts as zeros. With
   beta = 0, y is not read. */
static void mti_embedding_block(mt_tensor table, int64_t row, int64_t col, float beta, float *y, int64_t n) {
    int found = row >= 0 && row < table.rows;
    float room[MTI_BLOCK];
    if (beta != 0.0f) {
        if (beta != 1.0f) mti_row_scale(y, beta, n);
        if (found) mti_row_add(mti_row(mti_f32_read(table, row, 1, col, n, room), 0), y, y, n);
    } else if (found) mti_cpu_load(table, row, col, n, y);
    else mti_row_fill(y, 0.0f, n);
}

typedef struct mti_embedding {
    mt_tensor table, y; /* or their gradients */
    int64_t first_row;
    const int32_t *ids;
    float beta;
} mti_embedding;

static void mti_cpu_embedding_forward(void *data, int thread, int64_t first, int64_t last) {
    const mti_embedding *e = (const mti_embedding *)data;
    float room[MTI_BLOCK];
    int64_t i, j, n;
    (void)thread;
    for (i = first; i < last; i++)
        for (j = 0; j < e->y.cols; j += n) {
            mt_tensor y;
            n = mt_min(MTI_BLOCK, e->y.cols - j);
            y = e->beta == 0.0f ? mti_f32_place(e->y, i, 1, j, n, room) : mti_f32_read(e->y, i, 1, j, n, room);
            mti_embedding_block(e->table, e->ids[i] - e->first_row, j, e->beta, mti_row(y, 0), n);
            mti_f32_write(y, e->y, i, j);
        }
}

/* Adds columns of the gradient of y to that of the table. */
static void mti_cpu_embedding_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_embedding *e = (const mti_embedding *)data;
    float room[MTI_BLOCK];
    int64_t i, j, n;
    (void)thread;
    for (i = 0; i < e->y.rows; i++) {
        int64_t row = e->ids[i] - e->first_row;
        if (row < 0 || row >= e->table.rows) continue;
        for (j = first; j < last; j += n) {
            float *to = mti_row(e->table, row) + j;
            n = mt_min(MTI_BLOCK, last - j);
            mti_row_add(to, mti_row(mti_f32_read(e->y, i, 1, j, n, room), 0), to, n);
        }
    }
}

/* Applies the rule of an embedding, whose first operands are its rows and the table. */
static mt_status mti_embedding_rule(const mti_operator *op, int64_t first_row) {
    mt_tensor table = *op->args[1].view;
    mt_place place = {table.rows, table.cols, first_row, INT64_MAX, table.cols, 1, "rows of the table", 0, 0, 0, 0};
    if (!mt_check_mode(op->ctx)) return MT_SUCCESS;
    MT_TRY(mt_place_check(op->ctx, op->name, "", op->args[1].name, table, &place));
    return mti_apply_rule(op);
}

/* clang-format off */
static const mti_table mti_embedding_forward_table = {"mt_embedding_forward",
    {"ids table y", "RRR rRr RrP Rcc", NULL}, {
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, "table"},
    {"table", "vk", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"ids", "n1", MT_ARG_ANY, MT_ARG_IN | MTI_UNSEEN, NULL}}};

static const mti_table mti_embedding_backward_table = {"mt_embedding_backward",
    {"ids dy dtable", "RRR RRr rrP Rcc RPP", NULL}, {
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MTI_AS_IS, NULL},
    {"dtable", "vk", MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_GRADIENT | MT_ARG_SUM, "dy"},
    {"ids", "n1", MT_ARG_ANY, MT_ARG_IN | MTI_UNSEEN, NULL}}};
/* clang-format on */

MT_API mt_status mt_embedding_forward(mt_context *ctx, mt_tensor table, int64_t first_row, const int32_t *ids,
                                      float beta, mt_tensor y) {
    /* reads one row of the table for each token */
    const double bytes = (beta != 0.0f ? 3.0 : 2.0) * mti_view_bytes(y);
    mt_tensor id_rows = mt_tensor_make(ids, MT_I32, y.rows, 1), *views[] = {&y, &table, &id_rows};
    mti_operator op;
    mti_operands(&op, ctx, &mti_embedding_forward_table, views, NULL);
    if (beta != 0.0f) op.args[0].use |= MT_ARG_IN;
    MT_TRY(mt_args_check(ctx, op.name, op.args, op.views));
    MT_TRY(mti_expect_embedding(ctx, op.name, "table", table, first_row, ids, "y", y));
    MT_TRY(mti_expect_all_apart(&op));
    MT_TRY(mti_numbers_agree(ctx, op.name, "beta", y, 2, 1, (double)beta)); /* of the y that the call adds to */
    MT_TRY(mti_embedding_rule(&op, first_row));
    MT_TRY(mti_start(&op));
    op.work.bytes = bytes;
    mti_embedding e = {table, y, first_row, ids, beta};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_embedding_forward(ctx, table, first_row, ids, beta, y),
                                mti_cpu_rows(ctx, y.rows, y.cols, mti_cpu_embedding_forward, &e)));
}

MT_API mt_status mt_embedding_backward(mt_context *ctx, mt_tensor dy, int64_t first_row, const int32_t *ids,
                                       mt_tensor dtable) {
    /* adds to one row of the table for each token */
    const double bytes = mti_view_bytes(dy) + 8.0 * (double)dy.rows * (double)dy.cols;
    mt_tensor id_rows = mt_tensor_make(ids, MT_I32, dy.rows, 1), *views[] = {&dy, &dtable, &id_rows};
    mti_operator op;
    mti_operands(&op, ctx, &mti_embedding_backward_table, views, NULL);
    MT_TRY(mt_args_check(ctx, op.name, op.args, op.views));
    MT_TRY(mti_expect_embedding(ctx, op.name, "dtable", dtable, first_row, ids, "dy", dy));
    MT_TRY(mti_expect_all_apart(&op));
    MT_TRY(mti_embedding_rule(&op, first_row));
    MT_TRY(mti_start(&op));
    op.work.bytes = bytes;
    mti_embedding e = {dtable, dy, first_row, ids, 0.0f};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_embedding_backward(ctx, dy, first_row, ids, dtable),
                                mti_cpu_columns(ctx, dy.rows, dy.cols, mti_cpu_embedding_backward, &e)));
}
