/* ---- layers of tensors in memory of the caller ------------------------------------------------------------------- */

#pragma once
#include "linear.c"

/* Checks one tensor of a layer; suffix is its name in mt_linear_tensors. */
static mt_status mti_own_check(mt_context *ctx, const char *function, const char *name, const char *suffix, mt_tensor t,
                               int type, int64_t rows, int64_t cols) {
    char full[MT_NAME_MAX + 4];
    snprintf(full, sizeof full, "%s%s%s", name, name[0] ? "." : "", suffix);
    MT_TRY(mt_tensor_check(ctx, function, full, t, type, rows, cols));
    if (rows <= 1 || mt_tensor_ld(t) == cols) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s [%lld, %lld] has ld %lld, must be contiguous", function, full,
                   (long long)rows, (long long)cols, (long long)t.ld);
}

/* Makes a parameter of a tensor and its gradient, each of which may be mt_none(). suffix is "w" or "b". */
static mt_status mti_own_param(mt_context *ctx, const char *function, mt_comm *tp, const char *name, const char *suffix,
                               const mt_param_desc *desc, mt_tensor value, mt_tensor grad, mt_param *out) {
    const char *grad_suffix = suffix[0] == 'w' ? "dw" : "db";
    mt_param_desc named = *desc;
    int64_t rows, cols;
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%s%s%s", name, name[0] ? "." : "", suffix);
    named.name = out->name;
    MT_TRY(mti_sharding_check(ctx, function, &named));
    mti_param_describe(out, &named, mt_comm_rank(tp), mt_comm_size(tp), mti_shards(ctx, tp), value.dtype);
    rows = out->value.rows;
    cols = out->value.cols;
    if (value.data) MT_TRY(mti_own_check(ctx, function, name, suffix, value, MT_ARG_FLOAT, rows, cols));
    if (grad.data) MT_TRY(mti_own_check(ctx, function, name, grad_suffix, grad, MT_ARG_F32, rows, cols));
    out->value = value;
    out->grad = grad;
    return MT_SUCCESS;
}

/* Sets the fields of *d that the tensors give: no_bias, and the features when they are 0. */
static void mti_own_sizes(const mt_context *ctx, const mt_comm *tp, mt_placement placement, const mt_linear_tensors *t,
                          mt_linear_desc *d) {
    int columns = placement == MT_SPLIT_ROWS;                                        /* column-parallel */
    int ranks = mt_comm_size(tp), shards = t->w.rows == 1 ? 1 : mti_shards(ctx, tp); /* 1: mti_param_describe */
    if (!d->out_features) d->out_features = columns ? mt_size_mul(t->w.rows, ranks) : t->w.rows / shards;
    if (!d->in_features) d->in_features = columns ? t->w.cols : mt_size_mul(t->w.cols, (int64_t)shards * ranks);
    d->no_bias = !t->b.data;
}

/* Checks the arguments of mt_..._parallel_linear_from_tensors and fills params. *d is the desc, completed from the
   tensors. placement is that of w. */
static mt_status mti_own_linear(mt_context *ctx, const char *function, mt_comm *tp, const char *name,
                                mt_placement placement, const mt_linear_tensors *t, mt_linear_desc *d,
                                mt_param *params) {
    const char *field = d->weight                                                    ? "weight"
                        : d->init_std != 0.0f                                        ? "init_std"
                        : d->no_bias && t->b.data                                    ? "no_bias"
                        : placement == MT_SPLIT_ROWS && d->input_is_parallel         ? "input_is_parallel"
                        : placement == MT_SPLIT_COLS && d->gather_output             ? "gather_output"
                        : placement == MT_SPLIT_COLS && d->split.padded_out_features ? "split.padded_out_features"
                        : d->split.copies > 1                                        ? "split.copies"
                                                                                     : NULL;
    int whole = placement == MT_SPLIT_ROWS ? d->gather_output : !d->input_is_parallel;
    mt_param_desc w, b;
    if (!t->w.data) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: w is NULL", function);
    if (field)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc sets %s, which does not go with the tensors", function, field);
    MT_TRY(mti_expect_shards(ctx, function, tp));
    mti_own_sizes(ctx, tp, placement, t, d);
    MT_TRY(mti_linear_check(ctx, function, name[0] ? name : "w", d, whole));
    mti_linear_describe(d, placement, &w, &b);
    MT_TRY(mti_own_param(ctx, function, tp, name, "w", &w, t->w, t->dw, &params[0]));
    if (d->no_bias) return MT_SUCCESS;
    MT_TRY(mti_own_param(ctx, function, tp, name, "b", &b, t->b, t->db, &params[1]));
    if (t->b.dtype == t->w.dtype) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DTYPE, "%s: '%s' is %s, '%s' is %s", function, params[1].name, mt_dtype_name(t->b.dtype),
                   params[0].name, mt_dtype_name(t->w.dtype));
}

/* Checks the pointers and the name of a layer of tensors. */
static mt_status mti_own_begin(mt_context *ctx, const char *function, const mt_comm *tp, const char *name,
                               const mt_linear_tensors *tensors, const mt_param *params, const void *out) {
    const char *missing = !tp ? "tp" : !tensors ? "tensors" : !params ? "params" : !out ? "out" : NULL;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (missing) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, missing);
    if (tensors->db.data && !tensors->b.data) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: db comes without b", function);
    if (!name || strlen(name) <= MT_NAME_MAX - 3) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the name '%.100s' must have at most %d characters", function, name,
                   MT_NAME_MAX - 3);
}

static mt_status mti_from_tensors(mt_context *ctx, const char *function, mt_comm *tp, const char *name,
                                  mt_placement placement, const mt_linear_desc *desc, const mt_linear_tensors *tensors,
                                  mt_param *params, mt_parallel_linear *out) {
    mt_linear_desc d;
    MT_TRY(mti_own_begin(ctx, function, tp, name, tensors, params, out));
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!name) name = "";
    MT_TRY(mti_own_linear(ctx, function, tp, name, placement, tensors, &d, params));
    mti_linear_make(out, name, &d, tp, &params[0], d.no_bias ? NULL : &params[1]);
    return MT_SUCCESS;
}

MT_API mt_status mt_column_parallel_linear_from_tensors(mt_context *ctx, mt_comm *tp, const char *name,
                                                        const mt_linear_desc *desc, const mt_linear_tensors *tensors,
                                                        mt_param *params, mt_parallel_linear *out) {
    static const char *const function = "mt_column_parallel_linear_from_tensors";
    return mti_from_tensors(ctx, function, tp, name, MT_SPLIT_ROWS, desc, tensors, params, out);
}

MT_API mt_status mt_row_parallel_linear_from_tensors(mt_context *ctx, mt_comm *tp, const char *name,
                                                     const mt_linear_desc *desc, const mt_linear_tensors *tensors,
                                                     mt_param *params, mt_parallel_linear *out) {
    static const char *const function = "mt_row_parallel_linear_from_tensors";
    return mti_from_tensors(ctx, function, tp, name, MT_SPLIT_COLS, desc, tensors, params, out);
}

MT_API mt_status mt_arena_tensors(mt_context *ctx, const mt_arena_request *list, int count) {
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!list && count > 0) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_arena_tensors: list is NULL");
    for (i = 0; i < count; i++) MT_TRY(mt_arena_tensor(ctx, list[i].dtype, list[i].rows, list[i].cols, list[i].out));
    return MT_SUCCESS;
}

MT_API mt_tensor mt_tensor_reshape(mt_tensor t, int64_t rows, int64_t cols) {
    int64_t elements = mt_size_mul(rows, cols);
    if (elements < 0 || elements != mt_size_mul(t.rows, t.cols) || (t.rows > 1 && mt_tensor_ld(t) != t.cols))
        return mt_tensor_rows(t, 0, -1);
    return mt_tensor_make(t.data, t.dtype, rows, cols);
}
