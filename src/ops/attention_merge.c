/* ---- merging attention to different keys ------------------------------------------------------------------------- */

#pragma once
#include "operator.c"
#include "rows.c"

/* The weights of two results for a query, and the lse of both. */
typedef struct mti_merging {
    float weight, part_weight, lse;
} mti_merging;

/* Where neither of them has seen a key, the lse is -infinity and the result 0. A NaN stays one. */
MT_INLINE MT_HOST_DEVICE mti_merging mti_merging_of(float lse, float part_lse) {
    float top = lse < part_lse ? part_lse : lse, a, b;
    mti_merging w;
    w.weight = w.part_weight = 0.0f;
    w.lse = top;
    if (lse == -(float)INFINITY && part_lse == -(float)INFINITY) return w;
    a = expf(lse - top);
    b = expf(part_lse - top);
    w.weight = a / (a + b);
    w.part_weight = b / (a + b);
    w.lse = top + logf(a + b);
    return w;
}

/* A result without weight is left out, because it may be anything: its rows were not computed. */
MT_INLINE MT_HOST_DEVICE float mti_merged(mti_merging w, float x, float part) {
    return (w.weight == 0.0f ? 0.0f : w.weight * x) + (w.part_weight == 0.0f ? 0.0f : w.part_weight * part);
}

typedef struct mti_merge_views {
    mt_tensor out, lse, part_out, part_lse;
} mti_merge_views;

static void mti_cpu_attention_merge(void *data, int thread, int64_t first, int64_t last) {
    const mti_merge_views *v = (const mti_merge_views *)data;
    int64_t head_dim = v->out.cols / v->lse.rows, row, head, d;
    (void)thread;
    for (row = first; row < last; row++)
        for (head = 0; head < v->lse.rows; head++) {
            float *x = mti_row(v->out, row) + head * head_dim, *lse = mti_row(v->lse, head) + row;
            const float *part = mti_row(v->part_out, row) + head * head_dim;
            mti_merging w = mti_merging_of(*lse, mti_row(v->part_lse, head)[row]);
            MT_INDEPENDENT
            for (d = 0; d < head_dim; d++) x[d] = mti_merged(w, x[d], part[d]);
            *lse = w.lse;
        }
}

#include "attention_merge.cuh"

/* clang-format off */
static const mti_table mti_attention_merge_table = {"mt_attention_merge",
    {"out lse part_out part_lse", "RRRR rcrc crcr PRPR", NULL}, {
    {"part_out", "nm", MT_ARG_FLOAT, MT_ARG_IN, NULL},
    {"part_lse", "An", MT_ARG_F32, MT_ARG_IN, NULL},
    {"lse", "An", MT_ARG_F32, MT_ARG_IN_OUT, "*"},
    {"out", "nm", MT_ARG_FLOAT, MT_ARG_IN_OUT, "*"}}};
/* clang-format on */

MT_API mt_status mt_attention_merge(mt_context *ctx, mt_tensor out, mt_tensor lse, mt_tensor part_out,
                                    mt_tensor part_lse) {
    mt_tensor *views[] = {&part_out, &part_lse, &lse, &out};
    const int64_t sizes[] = {lse.rows};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_attention_merge_table, views, sizes));
    if (lse.rows < 1 ? out.cols != 0 : out.cols % lse.rows != 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: out has %lld columns, which the %lld heads of lse do not divide",
                       op.name, (long long)out.cols, (long long)lse.rows);
    MT_TRY(mti_begin(&op));
    if (lse.rows == 0) return mti_end(&op, MT_SUCCESS);
    mti_merge_views v = {out, lse, part_out, part_lse};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_attention_merge(ctx, out, lse, part_out, part_lse),
                                mti_cpu_rows(ctx, out.rows, out.cols, mti_cpu_attention_merge, &v)));
}
