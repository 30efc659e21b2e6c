/* ---- dropout ----------------------------------------------------------------------------------------------------- */

#pragma once
#include "map.cuh"
#include "columns.c"
#include "columns.cuh"
#include "random_words.cuh"
#include "numbers.c"
#include "operator.c"

static mt_status mti_expect_probability(mt_context *ctx, const char *where, float p) {
    return mt_check_float(ctx, where, NULL, "dropout.p", p, MT_FLOAT_PROBABILITY);
}

static mt_status mti_expect_dropout(mt_context *ctx, const char *where, mt_dropout dropout, int64_t rows,
                                    int64_t cols) {
    MT_TRY(mti_expect_probability(ctx, where, dropout.p));
    return dropout.p > 0.0f ? mti_expect_random(ctx, where, dropout.at, rows, cols) : MT_SUCCESS;
}

/* Checks the place by which dropout takes random words for y, operand `name`, once mti_begin has noted what y is. rows,
   cols and padded: see mt_place. If it fails, the caller must not call mti_end. */
static mt_status mti_expect_mask(mti_operator *op, const char *name, mt_tensor y, const mt_dropout *dropout,
                                 int64_t rows, int64_t cols, int padded) {
    const int is_on = dropout->p > 0.0f; /* a data rank may evaluate */
    mt_status status = mti_numbers_agree(op->ctx, op->name, "p of dropout", y, is_on, 1, (double)dropout->p);
    mt_place place;
    if (status != MT_SUCCESS) return mti_end(op, status);
    if (dropout->p <= 0.0f) return MT_SUCCESS;
    place.rows = rows;
    place.cols = cols;
    place.first_row = dropout->at.first_row;
    place.first_col = dropout->at.first_col;
    place.global_cols = dropout->at.global_cols;
    place.padded = place.sequences = padded;
    place.seed = dropout->at.seed;
    place.subsequence = dropout->at.subsequence;
    place.what = "mask";
    place.vocab = 0;
    status = mt_place_check(op->ctx, op->name, "dropout.at", name, y, &place);
    return status == MT_SUCCESS ? status : mti_end(op, status);
}

/* Returns the smallest random word whose element is kept. It is exact, because p has 24 bits and the product is
   computed in double. */
static uint32_t mti_dropout_threshold(float p) { return (uint32_t)ceil((double)p * 4294967296.0); }
static float mti_dropout_scale(float p) { return (float)(1.0 / (1.0 - (double)p)); }

static void mti_dropout_block(const float *x, const float *bias, const float *residual, const uint32_t *words,
                              uint32_t threshold, float scale, float *y, int64_t n) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < n; j++) {
        float kept = (x[j] + bias[j]) * scale;
        y[j] = residual[j] + mti_select(words[j] >= threshold, kept, 0.0f);
    }
}

static void mti_bias_add_row(const float *x, const float *bias, const float *residual, float *y, int64_t n) {
    int64_t j;
    if (bias && residual) {
        MT_INDEPENDENT
        for (j = 0; j < n; j++) y[j] = residual[j] + (x[j] + bias[j]);
    } else if (bias || residual) {
        mti_row_add(x, bias ? bias : residual, y, n);
    } else if (x != y) {
        memcpy(y, x, (size_t)n * sizeof *y);
    }
}

typedef struct mti_bias_dropout_add {
    mt_tensor x, bias, residual; /* bias is in f32 */
    mt_dropout dropout;
    mt_tensor y;
} mti_bias_dropout_add;

/* The blocks of a row begin where Philox blocks do, see mti_words_fit. */
static void mti_cpu_dropout_row(const mti_bias_dropout_add *f, int64_t row) {
    const float *bias = mti_row(f->bias, 0);
    uint32_t words[MTI_WORDS_ROOM], threshold = mti_dropout_threshold(f->dropout.p);
    float zeros[MTI_WORDS_ROOM] = {0}, room[2][MTI_WORDS_ROOM],
          scale = mti_dropout_scale(f->dropout.p); /* zeros replace an optional view that is left out */
    int64_t j, n;
    for (j = 0; j < f->x.cols; j += n) {
        int64_t e = mti_random_element(f->dropout.at, row, j);
        mt_tensor x, residual, y;
        n = mti_words_fit(e, f->x.cols - j);
        x = mti_f32_read(f->x, row, 1, j, n, room[0]);
        residual = mti_f32_read(f->residual, row, 1, j, n, room[1]);
        y = mti_f32_place(f->y, row, 1, j, n, room[0]);
        mti_dropout_block(mti_row(x, 0), bias ? bias + j : zeros, residual.data ? mti_row(residual, 0) : zeros,
                          mti_random_words(f->dropout.at, e, n, words), threshold, scale, mti_row(y, 0), n);
        mti_f32_write(y, f->y, row, j);
    }
}

static void mti_cpu_bias_add_row(const mti_bias_dropout_add *f, int64_t row) {
    const float *bias = mti_row(f->bias, 0);
    float room[2][MTI_BLOCK];
    int64_t j, n;
    for (j = 0; j < f->x.cols; j += n) {
        mt_tensor x, residual, y;
        n = mt_min(MTI_BLOCK, f->x.cols - j);
        x = mti_f32_read(f->x, row, 1, j, n, room[0]);
        residual = mti_f32_read(f->residual, row, 1, j, n, room[1]);
        y = mti_f32_place(f->y, row, 1, j, n, room[0]);
        mti_bias_add_row(mti_row(x, 0), bias ? bias + j : NULL, mti_row(residual, 0), mti_row(y, 0), n);
        mti_f32_write(y, f->y, row, j);
    }
}

static void mti_cpu_bias_dropout_add_forward(void *data, int thread, int64_t first, int64_t last) {
    const mti_bias_dropout_add *f = (const mti_bias_dropout_add *)data;
    int64_t i;
    (void)thread;
    for (i = first; i < last; i++)
        if (f->dropout.p > 0.0f) mti_cpu_dropout_row(f, i);
        else mti_cpu_bias_add_row(f, i);
}

typedef struct mti_dropout_slopes {
    mt_tensor dy;
    mt_dropout dropout;
    mt_tensor dx, dbias;
} mti_dropout_slopes;

/* A range of columns of dx and dbias. Four rows at a time: mti_cpu_column_sums reads them while they are in the
   cache. */
static void mti_cpu_bias_dropout_add_backward(void *data, int thread, int64_t first, int64_t last) {
    const mti_dropout_slopes *b = (const mti_dropout_slopes *)data;
    float room[4 * MTI_BLOCK];
    int64_t i, rows, n, most = b->dx.dtype == MT_F32 ? last - first : MTI_BLOCK;
    for (; first < last; first += n) {
        n = mt_min(most, last - first);
        for (i = 0; i < b->dy.rows; i += rows) {
            mti_bias_dropout_add four = {b->dy, mt_none(), mt_none(), b->dropout, b->dx};
            rows = mt_min(4, b->dy.rows - i);
            four.x = mt_tensor_cols(mt_tensor_rows(b->dy, i, rows), first, n);
            four.y = mti_f32_place(b->dx, i, rows, first, n, room);
            if (b->dropout.p > 0.0f) { /* without dropout, `at` may have any numbers */
                four.dropout.at.first_row += i;
                four.dropout.at.first_col += first;
            }
            mti_cpu_bias_dropout_add_forward(&four, thread, 0, rows);
            if (b->dbias.data) mti_cpu_column_sums(four.y, mt_tensor_cols(b->dbias, first, n));
            mti_f32_write(four.y, b->dx, i, first);
        }
    }
}

#include "dropout.cuh"

/* clang-format off */
static const mti_table mti_bias_dropout_add_forward_table = {"mt_bias_dropout_add_forward",
    {"x bias residual y", "RRRR rRrr cccc P-PP PPPP", NULL}, {
    {"x", "nm", MT_ARG_FLOAT, MT_ARG_IN | MTI_AS_IS, NULL},
    {"bias", "1m", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL, NULL},
    {"residual", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_OPTIONAL | MTI_AS_IS, NULL},
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, NULL}}};

static const mti_table mti_bias_dropout_add_backward_table = {"mt_bias_dropout_add_backward",
    {"dy dx dbias", "RRR rrP ccc PPP", NULL}, {
    {"dy", "nm", MT_ARG_FLOAT, MT_ARG_IN | MT_ARG_GRADIENT | MTI_AS_IS, NULL},
    {"dx", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MT_ARG_GRADIENT | MTI_AS_IS, NULL},
    {"dbias", "1m", MT_ARG_F32, MT_ARG_IN_OUT | MT_ARG_GRADIENT | MT_ARG_SUM | MT_ARG_OPTIONAL, NULL}}};
/* clang-format on */

MT_API mt_status mt_bias_dropout_add_forward(mt_context *ctx, mt_tensor x, mt_tensor bias, mt_tensor residual,
                                             mt_dropout dropout, mt_tensor y) {
    mt_tensor *views[] = {&x, &bias, &residual, &y};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_bias_dropout_add_forward_table, views, NULL));
    MT_TRY(mti_expect_dropout(ctx, op.name, dropout, x.rows, x.cols));
    MT_TRY(mti_begin(&op));
    MT_TRY(mti_expect_mask(&op, "y", y, &dropout, y.rows, y.cols, 0));
    mti_bias_dropout_add f = {x, bias, residual, dropout, y};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_bias_dropout_add_forward(ctx, x, bias, residual, dropout, y),
                                mti_cpu_rows(ctx, x.rows, x.cols, mti_cpu_bias_dropout_add_forward, &f)));
}

MT_API mt_status mt_bias_dropout_add_backward(mt_context *ctx, mt_tensor dy, mt_dropout dropout, mt_tensor dx,
                                              mt_tensor dbias) {
    mt_tensor *views[] = {&dy, &dx, &dbias};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_bias_dropout_add_backward_table, views, NULL));
    MT_TRY(mti_expect_dropout(ctx, op.name, dropout, dy.rows, dy.cols));
    MT_TRY(mti_begin(&op));
    MT_TRY(mti_expect_mask(&op, "dx", dx, &dropout, dx.rows, dx.cols, 0));
    mti_dropout_slopes b = {dy, dropout, dx, dbias};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_bias_dropout_add_backward(ctx, dy, dropout, dx, dbias),
                                mti_cpu_columns(ctx, dy.rows, dy.cols, mti_cpu_bias_dropout_add_backward, &b)));
}
