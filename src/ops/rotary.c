/* ---- rotary positions -------------------------------------------------------------------------------------------- */

#pragma once
#include "rotary.cuh"

/* The number of features of a head that are rotated. */
static int64_t mti_rotary_dim(const mt_attention_desc *s) {
    return s->scores.rotary_dim ? s->scores.rotary_dim : s->head_dim;
}

static mt_status mti_expect_even(mt_context *ctx, const char *where, const char *name, int64_t features) {
    if (features % 2 == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s is %lld, must be even", where, name, (long long)features);
}

static mt_status mti_expect_rotary(mt_context *ctx, const char *where, const mt_attention_desc *s) {
    MT_TRY(mt_check_enum(ctx, where, NULL, "scores.rotary_form", (int)s->scores.rotary_form, MT_ROTARY_FORM_WORDS));
    MT_TRY(mt_check_size(ctx, where, NULL, "scores.rotary_dim", s->scores.rotary_dim, 0, s->head_dim));
    return mti_expect_even(ctx, where, s->scores.rotary_dim ? "scores.rotary_dim" : "head_dim", mti_rotary_dim(s));
}

typedef struct mti_rotary_angles {
    float base;
    mt_tensor table;
} mti_rotary_angles;

static void mti_cpu_rotary_table(void *data, int thread, int64_t first, int64_t last) {
    const mti_rotary_angles *a = (const mti_rotary_angles *)data;
    int64_t i, j, half = a->table.cols / 2;
    (void)thread;
    for (i = first; i < last; i++)
        for (j = 0; j < half; j++) {
            double angle = (double)i * pow((double)a->base, -2.0 * (double)j / (double)a->table.cols);
            mti_row(a->table, i)[j] = (float)cos(angle);
            mti_row(a->table, i)[half + j] = (float)sin(angle);
        }
}

/* Rotates the features j * step and j * step + apart of a head by angle j of table, for j < half. With sign -1, it
   rotates them back. */
MT_INLINE void mti_rotary_head(float *x, const float *table, float sign, int64_t half, int64_t step, int64_t apart) {
    int64_t j;
    MT_INDEPENDENT
    for (j = 0; j < half; j++) {
        float low = x[j * step], high = x[j * step + apart], c = table[j], s = sign * table[half + j];
        x[j * step] = low * c - high * s;
        x[j * step + apart] = high * c + low * s;
    }
}

typedef struct mti_turns {
    const mt_attention_desc *desc;
    mt_tensor table;
    float sign;
    mt_tensor qkv;
    mt_tensor rooms; /* the queries and the key of a group for each thread, if qkv has a 16-bit type */
} mti_turns;

/* The columns of the queries and the key of a group. */
static int64_t mti_turned(const mt_attention_desc *s) { return (s->heads_per_group + 1) * s->head_dim; }

static void mti_cpu_rotary(void *data, int thread, int64_t first, int64_t last) {
    const mti_turns *r = (const mti_turns *)data;
    const mt_attention_desc *desc = r->desc;
    int64_t i, g, j, half = r->table.cols / 2, turned = mti_turned(desc);
    for (i = first; i < last; i++) {
        const float *angles = mti_row(r->table, mti_document_position(desc, i / desc->seq, i % desc->seq));
        for (g = 0; g < desc->groups; g++) {
            int64_t col = g * (turned + desc->head_dim);
            mt_tensor heads = mti_f32_read(r->qkv, i, 1, col, turned, mti_row(r->rooms, thread));
            for (j = 0; j < turned; j += desc->head_dim) {
                float *x = mti_row(heads, 0) + j;
                /* constant steps let a compiler make a fast loop of each form */
                if (desc->scores.rotary_form == MT_ROTARY_PAIRS) mti_rotary_head(x, angles, r->sign, half, 2, 1);
                else mti_rotary_head(x, angles, r->sign, half, 1, half);
            }
            mti_f32_write(heads, r->qkv, i, col);
        }
    }
}

static mt_status mti_rotary_loop(mti_operator *op, mti_turns *r) {
    MT_TRY(mti_rooms(op, r->qkv.dtype != MT_F32, mti_turned(r->desc), &r->rooms));
    if (op->on_cpu) mti_cpu_rows(op->ctx, r->qkv.rows, r->qkv.cols, mti_cpu_rotary, r);
    return MT_SUCCESS;
}

/* clang-format off */
static const mti_table mti_rotary_table_table = {"mt_rotary_table", {"table", "R", NULL}, {
    {"table", "nm", MT_ARG_FLOAT, MT_ARG_OUT, NULL}}};

static const mti_table mti_rotary_forward_table = {"mt_rotary_forward", {"qkv table", "RR cR", "rR"}, {
    {"qkv", "AB", MT_ARG_FLOAT, MT_ARG_IN_OUT | MTI_AS_IS, NULL},
    {"table", "CD", MT_ARG_FLOAT, MT_ARG_IN, NULL}}};

static const mti_table mti_rotary_backward_table = {"mt_rotary_backward", {"dqkv table", "RR cR PR", "rR"}, {
    {"dqkv", "AB", MT_ARG_FLOAT, MT_ARG_IN_OUT | MT_ARG_GRADIENT | MTI_AS_IS, NULL},
    {"table", "CD", MT_ARG_FLOAT, MT_ARG_IN, NULL}}};
/* clang-format on */

MT_API mt_status mt_rotary_table(mt_context *ctx, float base, mt_tensor table) {
    mt_tensor *views[] = {&table};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_rotary_table_table, views, NULL));
    MT_TRY(mti_expect_even(ctx, op.name, "the number of columns", table.cols));
    MT_TRY(mt_check_float(ctx, op.name, NULL, "base", base, MT_FLOAT_ABOVE_0));
    MT_TRY(mti_begin(&op));
    mti_made(ctx, table, 1, (double)base);
    mti_rotary_angles a = {base, table};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_rotary_table(ctx, base, table),
                                mti_cpu_rows(ctx, table.rows, table.cols, mti_cpu_rotary_table, &a)));
}

/* Each rank may rotate its own tokens of one sequence, with its own rows of the table, or with part, which says which
   tokens they are. [part][backward] */
static const mt_rule mti_rotary_rules[2][2] = {{{"qkv table", "RR cR rr", "rR"}, {"dqkv table", "RR cR PR rr", "rR"}},
                                               {{"qkv table", "RR cR rR", NULL}, {"dqkv table", "RR cR PR rR", NULL}}};

static mt_status mti_rotary(mt_context *ctx, const mti_table *of, const mt_attention_desc *desc, mt_tensor table,
                            float sign, mt_tensor qkv) {
    MT_TRY(mti_expect_heads(ctx, of->name, desc));
    MT_TRY(mti_expect_rotary(ctx, of->name, desc));
    mt_attention_desc s = mti_attention_defaults(desc);
    const int64_t sizes[] = {desc->batch * desc->seq, mti_attention_width(desc), s.part.seq, mti_rotary_dim(desc)};
    /* turns the first features of queries and keys */
    const double turned = (double)mti_rotary_dim(desc) * (double)(s.groups * (s.heads_per_group + 1));
    const double bytes = 2.0 * (double)qkv.rows * turned * (double)mt_dtype_size(qkv.dtype) + mti_view_bytes(table);
    mt_tensor *views[] = {&qkv, &table};
    mti_operator op;
    MT_TRY(mti_expect_documents(ctx, of->name, &s));
    MT_TRY(mti_accept(&op, ctx, of, views, sizes));
    MT_TRY(mti_expect_qkv_parts(ctx, op.name, desc, op.args[0].name, qkv));
    if (desc->batch == 1 || desc->part.seq) op.rule = &mti_rotary_rules[desc->part.seq != 0][sign < 0.0f];
    MT_TRY(mti_begin(&op));
    op.work.bytes = bytes;
    if (s.qkv_layout != MT_QKV_PER_GROUP) { /* one group, in which all queries and keys but the last are "queries" */
        s.heads_per_group = s.groups * (s.heads_per_group + 1) - 1;
        s.groups = 1;
    }
    mti_turns r = {&s, table, sign, qkv, mt_none()};
    return mti_end(&op, MTI_CHOOSE(&op, mti_cuda_rotary(ctx, &s, table, sign, qkv), mti_rotary_loop(&op, &r)));
}

MT_API mt_status mt_rotary_forward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor table, mt_tensor qkv) {
    return mti_rotary(ctx, &mti_rotary_forward_table, desc, table, 1.0f, qkv);
}

MT_API mt_status mt_rotary_backward(mt_context *ctx, const mt_attention_desc *desc, mt_tensor table, mt_tensor dqkv) {
    return mti_rotary(ctx, &mti_rotary_backward_table, desc, table, -1.0f, dqkv);
}
