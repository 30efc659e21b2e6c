/* ---- AdamW and sums of squares of many tensors ------------------------------------------------------------------- */

#pragma once
#include "multi_tensor.h"
#include "sum.c"
#include "adamw.c"

struct mt_multi_tensor {
    int is_adamw; /* 0: a list for sums of squares */
    int count, stochastic_rounding;
    mt_adamw_tensor *adamw;    /* [count] */
    mt_square_tensor *squares; /* [count] */
    int64_t outs;              /* sums of squares: the largest column + 1 */
    void *table;               /* the same list as kernels see it: mti_segment [count], on the GPU */
    int64_t blocks;            /* of the launch */
};

#include "multi_tensor.cuh"

/* Fills *op with a tensor of a list, as the operands of mt_adamw_step. name: of the call */
static void mti_adamw_operands(mti_operator *op, mt_context *ctx, const char *name, mt_adamw_tensor *t) {
    mt_tensor *views[] = {&t->param, &t->master, &t->grad, &t->m, &t->v};
    mti_operands(op, ctx, &mti_adamw_step_table, views, NULL);
    op->name = name;
}

static mt_status mti_expect_adamw_tensor(mt_context *ctx, const mt_adamw_tensor *t, int stochastic_rounding) {
    mt_adamw_tensor c = *t;
    mti_operator op;
    mti_adamw_operands(&op, ctx, "mt_multi_tensor_create_adamw", &c);
    MT_TRY(mti_check(&op));
    return mti_expect_rounding(ctx, stochastic_rounding ? &c.random : NULL, c.param, c.master);
}

static mt_status mti_expect_square_tensor(mt_context *ctx, const mt_square_tensor *t) {
    static const char *const where = "mt_multi_tensor_create_squares";
    MT_TRY(mt_tensor_check(ctx, where, "x", t->x, MT_ARG_F32, t->x.rows, t->x.cols));
    return mt_check_integer(ctx, where, NULL, "out", t->out, 0, INT64_MAX);
}

/* Copies the tensors that are not empty into a new list. One of adamw and squares may be not NULL. */
static mt_status mti_multi_copy(mt_context *ctx, const mt_adamw_tensor *adamw, const mt_square_tensor *squares,
                                int count, mt_multi_tensor *list) {
    int i;
    list->adamw = adamw ? (mt_adamw_tensor *)mt_host_alloc((size_t)count * sizeof *adamw) : NULL;
    list->squares = squares ? (mt_square_tensor *)mt_host_alloc((size_t)count * sizeof *squares) : NULL;
    if (count > 0 && !list->adamw && !list->squares)
        return mt_fail(ctx, MT_ERR_MEMORY, "no memory for a list of %d tensors", count);
    for (i = 0; i < count; i++) {
        if (mti_is_empty(adamw ? adamw[i].param : squares[i].x)) continue;
        if (adamw) list->adamw[list->count] = adamw[i];
        else list->squares[list->count] = squares[i];
        if (!adamw && list->outs <= squares[i].out) list->outs = squares[i].out + 1;
        list->count++;
    }
#if MT_HAS_CUDA
    if (mt_context_planned(ctx) == MT_DEVICE_CUDA && list->count > 0) return mti_cuda_multi_table(ctx, list);
#endif
    return MT_SUCCESS;
}

static mt_status mti_multi_create(mt_context *ctx, int is_adamw, int stochastic_rounding, const void *tensors,
                                  int count, mt_multi_tensor **out) {
    const mt_adamw_tensor *adamw = is_adamw ? (const mt_adamw_tensor *)tensors : NULL;
    const mt_square_tensor *squares = is_adamw ? NULL : (const mt_square_tensor *)tensors;
    mt_multi_tensor *list = (mt_multi_tensor *)mt_host_alloc(sizeof *list);
    mt_status status;
    if (!list) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for a list of tensors");
    list->is_adamw = is_adamw;
    list->stochastic_rounding = stochastic_rounding;
    status = mti_multi_copy(ctx, adamw, squares, count, list);
    if (status == MT_SUCCESS) *out = list;
    else mt_multi_tensor_destroy(ctx, list);
    return status;
}

static mt_status mti_multi_check(mt_context *ctx, const char *where, const void *tensors, int count, const void *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mt_check_integer(ctx, where, NULL, "count", count, 0, INT64_MAX));
    if (out && (tensors || count == 0)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", where, out ? "tensors" : "out");
}

MT_API mt_status mt_multi_tensor_create_adamw(mt_context *ctx, const mt_adamw_tensor *tensors, int count,
                                              int stochastic_rounding, mt_multi_tensor **out) {
    int i;
    MT_TRY(mti_multi_check(ctx, "mt_multi_tensor_create_adamw", tensors, count, out));
    for (i = 0; i < count; i++) MT_TRY(mti_expect_adamw_tensor(ctx, tensors + i, stochastic_rounding));
    return mti_multi_create(ctx, 1, stochastic_rounding != 0, tensors, count, out);
}

MT_API mt_status mt_multi_tensor_create_squares(mt_context *ctx, const mt_square_tensor *tensors, int count,
                                                mt_multi_tensor **out) {
    int i;
    MT_TRY(mti_multi_check(ctx, "mt_multi_tensor_create_squares", tensors, count, out));
    for (i = 0; i < count; i++) MT_TRY(mti_expect_square_tensor(ctx, tensors + i));
    return mti_multi_create(ctx, 0, 0, tensors, count, out);
}

MT_API void mt_multi_tensor_destroy(mt_context *ctx, mt_multi_tensor *list) {
    if (!ctx || !list) return;
#if MT_HAS_CUDA
    mt_context_free(ctx, list->table, mti_multi_table_bytes(list));
#endif
    mt_host_free(list->adamw);
    mt_host_free(list->squares);
    mt_host_free(list);
}

static void mti_cpu_multi_adamw(mt_context *ctx, const mt_multi_tensor *list, const mt_adamw *hyper,
                                const mt_adamw_values *values) {
    int i;
    mt_adamw step = mti_adamw_with(*hyper, values);
    for (i = 0; i < list->count && !(values && values->skip); i++) {
        const mt_adamw_tensor *t = list->adamw + i;
        mt_random random = t->random;
        mt_adamw h = step;
        random.subsequence += (uint64_t)h.step;
        if (list->stochastic_rounding) h.stochastic_rounding = &random;
        if (!t->weight_decay) h.weight_decay = 0.0f;
        mti_cpu_adamw(ctx, &h, t->param, t->master, t->grad, t->m, t->v);
    }
}

/* Applies the rule of mt_adamw_step to each tensor of a list. */
static mt_status mti_multi_adamw_rule(mt_context *ctx, const char *where, const mt_multi_tensor *list) {
    mti_operator op;
    int i;
    for (i = 0; mt_check_mode(ctx) && i < list->count; i++) {
        mti_adamw_operands(&op, ctx, where, &list->adamw[i]);
        MT_TRY(mti_apply_rule(&op));
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_multi_tensor_adamw(mt_context *ctx, const mt_multi_tensor *list, const mt_adamw *hyper,
                                       const mt_adamw_values *values) {
    static const char *const where = "mt_multi_tensor_adamw";
    mti_operator op;
    int i;
    MT_TRY(mt_adamw_check(ctx, hyper));
    if (!list || !list->is_adamw || hyper->stochastic_rounding)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", where,
                       !list            ? "list is NULL"
                       : list->is_adamw ? "stochastic_rounding must be NULL, because the list says how to round"
                                        : "the list is for sums of squares");
    if (list->count == 0) return MT_SUCCESS;
    MT_TRY(mti_multi_adamw_rule(ctx, where, list));
    MT_TRY(mti_begin_bare(&op, ctx, where));
    op.work.work = MT_WORK_OPTIMIZER;
    for (i = 0; i < list->count; i++) mti_packed_drop(ctx, list->adamw[i].param);
    for (i = 0; op.work.name && i < list->count; i++) {
        const mt_adamw_tensor *t = &list->adamw[i];
        op.work.bytes += (t->master.data ? 1.0 : 2.0) * mti_view_bytes(t->param) + mti_view_bytes(t->grad) +
                         2.0 * (mti_view_bytes(t->master) + mti_view_bytes(t->m) + mti_view_bytes(t->v));
    }
    return mti_end(&op, MTI_RUN(&op, mti_cuda_multi_adamw(ctx, list, hyper, values),
                                mti_cpu_multi_adamw(ctx, list, hyper, values)));
}

static void mti_cpu_multi_squares(mt_context *ctx, const mt_multi_tensor *list, mt_tensor out) {
    int i;
    for (i = 0; i < list->count; i++)
        mti_cpu_sum(ctx, list->squares[i].x, 1, mt_tensor_cols(out, list->squares[i].out, 1));
}

/* Applies the rule of mt_sum_of_squares to each tensor of a list. */
static mt_status mti_multi_squares_rule(mt_context *ctx, const char *where, const mt_multi_tensor *list,
                                        mt_tensor out) {
    mti_operator op;
    int i;
    for (i = 0; mt_check_mode(ctx) && i < list->count; i++) {
        mt_tensor x = list->squares[i].x, sum = mt_tensor_cols(out, list->squares[i].out, 1), *views[] = {&x, &sum};
        mti_operands(&op, ctx, &mti_sum_of_squares_table, views, NULL);
        op.name = where;
        MT_TRY(mti_apply_rule(&op));
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_multi_tensor_sum_of_squares(mt_context *ctx, const mt_multi_tensor *list, mt_tensor out) {
    static const char *const where = "mt_multi_tensor_sum_of_squares";
    mti_operator op;
    int i;
    MT_TRY(mt_tensor_check(ctx, where, "out", out, MT_ARG_F32, 1, out.cols));
    if (!list || list->is_adamw)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", where, list ? "the list is for AdamW" : "list is NULL");
    if (list->outs > out.cols)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: a tensor has column %lld of out, which has %lld columns", where,
                       (long long)(list->outs - 1), (long long)out.cols);
    if (list->count == 0) return MT_SUCCESS;
    MT_TRY(mti_multi_squares_rule(ctx, where, list, out));
    MT_TRY(mti_begin_bare(&op, ctx, where));
    op.work.work = MT_WORK_OPTIMIZER;
    for (i = 0; op.work.name && i < list->count; i++) op.work.bytes += mti_view_bytes(list->squares[i].x);
    return mti_end(&op, MTI_RUN(&op, mti_cuda_multi_squares(ctx, list, out), mti_cpu_multi_squares(ctx, list, out)));
}
