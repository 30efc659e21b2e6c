/* ---- the parallel MLP -------------------------------------------------------------------------------------------- */

#pragma once
#include "mlp.h"
#include "../ops/move.h"
#include "../ops/authors.h"
#include "../parallel/authors.h"
#include "../comm/hash.c"
#include "../ops/system.h"

/* Where a block has its linear layers from, up to three column-parallel ones and a row-parallel one: a registry, or
   tensors of the caller. */
typedef struct mti_origin {
    mt_params *params; /* NULL: from tensors */
    mt_comm *tp;
    const mt_linear_tensors *columns, *row;
    int count;     /* of columns */
    mt_param *own; /* of tensors: a weight and a bias for each column-parallel layer and for the row-parallel one */
} mti_origin;

static mti_origin mti_from_registry(mt_params *params) {
    mti_origin s;
    memset(&s, 0, sizeof s);
    s.params = params;
    return s;
}

static mti_origin mti_from_own(mt_comm *tp, const mt_linear_tensors *columns, int count, const mt_linear_tensors *row,
                               mt_param *own) {
    mti_origin s;
    memset(&s, 0, sizeof s);
    s.tp = tp;
    s.columns = columns;
    s.row = row;
    s.count = count;
    s.own = own;
    return s;
}

/* Writes NAME.SUFFIX to full. A layer of tensors may have no name: then messages call it SUFFIX without "linear_". */
static mt_status mti_origin_name(mt_context *ctx, const mti_origin *s, const char *name, const char *suffix,
                                 char *full) {
    if (s->params || name[0]) return mt_param_name(ctx, full, name, suffix);
    snprintf(full, MT_NAME_MAX, "%s", suffix + (strncmp(suffix, "linear_", 7) == 0 ? 7 : 0));
    return MT_SUCCESS;
}

/* Returns 1 when column-parallel layer `index` will have a bias. */
static int mti_origin_has_bias(const mti_origin *s, int index, int no_bias) {
    return !no_bias && (s->params || s->columns[index].b.data);
}

/* Makes a column-parallel layer of a block: NAME.SUFFIX in a registry, or columns[index]. A layer of tensors without a
   name gets none, so that nothing is logged. */
static mt_status mti_origin_column(mt_context *ctx, const mti_origin *s, int index, const char *name,
                                   const char *suffix, const mt_linear_desc *desc, mt_column_parallel_linear *out) {
    char full[MT_NAME_MAX];
    MT_TRY(mti_origin_name(ctx, s, name, suffix, full));
    if (s->params) return mt_column_parallel_linear_create(ctx, s->params, full, desc, out);
    MT_TRY(mt_column_parallel_linear_from_tensors(ctx, s->tp, full, desc, &s->columns[index], s->own + 2 * index, out));
    if (!name[0]) out->name[0] = 0;
    return MT_SUCCESS;
}

/* The same for the row-parallel layer of a block. */
static mt_status mti_origin_row(mt_context *ctx, const mti_origin *s, const char *name, const char *suffix,
                                const mt_linear_desc *desc, mt_row_parallel_linear *out) {
    char full[MT_NAME_MAX];
    MT_TRY(mti_origin_name(ctx, s, name, suffix, full));
    if (s->params) return mt_row_parallel_linear_create(ctx, s->params, full, desc, out);
    MT_TRY(mt_row_parallel_linear_from_tensors(ctx, s->tp, full, desc, s->row, s->own + 2 * s->count, out));
    if (!name[0]) out->name[0] = 0;
    return MT_SUCCESS;
}

/* Checks the pointers of mt_..._from_tensors. */
static mt_status mti_own_block_check(mt_context *ctx, const char *function, const mt_comm *tp, const void *desc,
                                     const void *tensors, const mt_param *params, const void *out) {
    const char *missing = !tp ? "tp" : !desc ? "desc" : !tensors ? "tensors" : !params ? "params" : !out ? "out" : NULL;
    if (!ctx) return MT_ERR_ARGUMENT;
    return missing ? mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, missing) : MT_SUCCESS;
}

/* Checks that the layers of tensors in a block have one type. */
static mt_status mti_own_types(mt_context *ctx, const char *function, const mti_origin *s) {
    int i;
    for (i = 0; i < s->count; i++)
        if (s->columns[i].w.dtype != s->row->w.dtype)
            return mt_fail(ctx, MT_ERR_DTYPE, "%s: '%s' is %s, '%s' is %s", function, s->own[2 * i].name,
                           mt_dtype_name(s->columns[i].w.dtype), s->own[2 * s->count].name,
                           mt_dtype_name(s->row->w.dtype));
    return MT_SUCCESS;
}

/* Makes the two linear layers. d->ffn is set. */
static mt_status mti_mlp_create(mt_context *ctx, const mti_origin *from, const char *name, const mt_mlp_desc *d,
                                mt_mlp *out) {
    mt_linear_desc fc1, fc2;
    int64_t parts = d->activation == MT_SWIGLU ? 2 : 1;
    int has_bias = mti_origin_has_bias(from, 0, d->no_bias);
    memset(&fc1, 0, sizeof fc1);
    fc1.in_features = d->hidden;
    fc1.out_features = parts * d->ffn;
    fc1.parts = parts;
    fc1.parts_by_shard = parts > 1;
    fc1.no_bias = d->no_bias;
    fc1.skip_bias_add = has_bias; /* it is added with the activation */
    fc1.sequence_parallel = d->sequence_parallel;
    fc1.init_std = d->init.std;
    fc1.add_to_dx = d->add_to_dx;
    memset(&fc2, 0, sizeof fc2);
    fc2.in_features = d->ffn;
    fc2.out_features = d->hidden;
    fc2.input_is_parallel = 1;
    fc2.no_bias = d->no_bias;
    fc2.skip_bias_add = d->skip_bias_add;
    fc2.sequence_parallel = d->sequence_parallel;
    fc2.init_std = d->init.output_std;
    MT_TRY(mti_origin_column(ctx, from, 0, name, "linear_fc1", &fc1, &out->fc1));
    return mti_origin_row(ctx, from, name, "linear_fc2", &fc2, &out->fc2);
}

static mt_status mti_init_check(mt_context *ctx, const char *function, const char *name, const mt_init_desc *init) {
    float std = mt_or_default(init->std, 1), output_std = mt_or_default(init->output_std, 1);
    MT_TRY(mt_check_float(ctx, function, name, "init.std", std, MT_FLOAT_AT_LEAST_0));
    return mt_check_float(ctx, function, name, "init.output_std", output_std, MT_FLOAT_AT_LEAST_0);
}

/* Checks desc, and sets *out to zero except for its desc. */
static mt_status mti_mlp_begin(mt_context *ctx, const char *function, const char *name, const mt_mlp_desc *d,
                               mt_mlp *out) {
    MT_TRY(mt_check_integer(ctx, function, name, "hidden", d->hidden, 1, INT32_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "ffn", d->ffn, 0, INT32_MAX));
    MT_TRY(mt_check_enum(ctx, function, name, "activation", (int)d->activation, MT_ACTIVATION_WORDS));
    MT_TRY(mti_init_check(ctx, function, name, &d->init));
    memset(out, 0, sizeof *out);
    out->desc = *d;
    if (!d->ffn) out->desc.ffn = 4 * d->hidden;
    return MT_SUCCESS;
}

MT_API mt_status mt_mlp_create(mt_context *ctx, mt_params *params, const char *name, const mt_mlp_desc *desc,
                               mt_mlp *out) {
    mti_origin from = mti_from_registry(params);
    char full[MT_NAME_MAX];
    mt_mlp made;
    size_t mark;
    MT_TRY(mt_create_check(ctx, "mt_mlp_create", params, desc, out));
    MT_TRY(mt_layer_name(ctx, params, name, full));
    name = full;
    MT_TRY(mti_mlp_begin(ctx, "mt_mlp_create", name, desc, &made));
    *out = made;
    mark = mt_params_mark(params);
    return mt_create_end(params, mark, out, sizeof *out, mti_mlp_create(ctx, &from, name, &out->desc, out));
}

MT_API mt_status mt_mlp_from_tensors(mt_context *ctx, mt_comm *tp, const char *name, const mt_mlp_desc *desc,
                                     const mt_mlp_tensors *tensors, mt_param *params, mt_mlp *out) {
    static const char *const function = "mt_mlp_from_tensors";
    mt_mlp_desc d;
    mti_origin from;
    mt_mlp made;
    MT_TRY(mti_own_block_check(ctx, function, tp, desc, tensors, params, out));
    d = *desc; /* it may be that of *out */
    memset(out, 0, sizeof *out);
    MT_TRY(mti_mlp_begin(ctx, function, name ? name : "mlp", &d, &made));
    from = mti_from_own(tp, &tensors->fc1, 1, &tensors->fc2, params);
    MT_TRY(mti_mlp_create(ctx, &from, name ? name : "", &made.desc, &made));
    MT_TRY(mti_own_types(ctx, function, &from));
    *out = made;
    return MT_SUCCESS;
}

/* Returns rows [first, first + count) of t. Returns t when it is mt_none(). */
static mt_tensor mti_some_rows(mt_tensor t, int64_t first, int64_t count) {
    return t.data ? mt_tensor_rows(t, first, count) : t;
}

static mt_tensor mti_bias_value(const mt_param *bias) { return bias ? bias->value : mt_none(); }

/* When y is mt_none(), computes only the tensors of *saved, without the product of fc2. When training is 0, *saved is
   scratch memory. */
static mt_status mti_mlp_forward(mt_context *ctx, const mt_mlp *mlp, mt_tensor x, mt_tensor y, mt_mlp_saved *saved,
                                 int training) {
    int64_t tokens = mt_sequence_tokens(mlp->fc1.tp, mlp->desc.sequence_parallel, x.rows);
    mt_tensor act;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, tokens, mlp->fc1.local_features, &saved->h));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, tokens, mlp->fc2.local_features, &act));
    MT_TRY(mt_column_parallel_linear_activation_forward(ctx, &mlp->fc1, mlp->desc.activation, x, saved->h, act,
                                                        training ? &saved->fc1 : NULL));
    if (training)
        MT_TRY(mt_hash_log_activation(ctx, mlp->fc1.name, 1, "activation_func.output", act, 0, mlp->fc2.weight));
    saved->fc2.x = act;
    if (!y.data) return MT_SUCCESS;
    return mt_parallel_linear_forward(ctx, &mlp->fc2, act, y, training ? &saved->fc2 : NULL);
}

/* Checks what forward and backward have in common. in and out are x and y, or dy and dx. */
static mt_status mti_mlp_check(mt_context *ctx, const char *function, const mt_mlp *mlp, const char *in_name,
                               mt_tensor in, const char *out_name, mt_tensor out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!mlp) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: mlp is NULL", function);
    MT_TRY(mt_check_param(ctx, function, mlp->fc1.weight));
    MT_TRY(mt_check_activation(ctx, function, mlp->fc1.weight, in_name, in, in.rows, mlp->desc.hidden));
    return mt_check_activation(ctx, function, mlp->fc1.weight, out_name, out, in.rows, mlp->desc.hidden);
}

MT_API mt_status mt_mlp_forward(mt_context *ctx, const mt_mlp *mlp, mt_tensor x, mt_tensor y, mt_mlp_saved *saved) {
    static const char *const function = "mt_mlp_forward";
    mt_mlp_saved local;
    size_t mark;
    mt_status status;
    MT_TRY(mti_mlp_check(ctx, function, mlp, "x", x, "y", y));
    MT_TRY(mt_check_sent(ctx, function, mlp->fc1.tp, mlp->desc.sequence_parallel, "x", x, "y", y));
    MT_TRY(mt_check_apart(ctx, function, "x", x, "y", y));
    mark = mt_arena_mark(ctx);
    status = MT_RANGE("mlp forward", mti_mlp_forward(ctx, mlp, x, y, saved ? saved : &local, saved != NULL));
    if (status != MT_SUCCESS || !saved) mt_arena_release(ctx, mark);
    return status;
}

static mt_status mti_mlp_backward(mt_context *ctx, const mt_mlp *mlp, mt_tensor dy, mt_tensor dx,
                                  const mt_mlp_saved *saved) {
    mt_tensor dh;
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->h.rows, mlp->fc1.local_features, &dh));
    MT_TRY(mt_row_parallel_linear_activation_backward(ctx, &mlp->fc2, &mlp->fc1, mlp->desc.activation, dy, saved->h, dh,
                                                      &saved->fc2));
    MT_TRY(mt_hash_log_activation(ctx, mlp->fc1.name, 1, "activation_func.input_grad", dh, 0, mlp->fc1.weight));
    return mt_parallel_linear_backward(ctx, &mlp->fc1, dh, dx, &saved->fc1);
}

MT_API mt_status mt_mlp_backward(mt_context *ctx, const mt_mlp *mlp, mt_tensor dy, mt_tensor dx,
                                 const mt_mlp_saved *saved) {
    static const char *const function = "mt_mlp_backward";
    size_t mark;
    mt_status status;
    MT_TRY(mti_mlp_check(ctx, function, mlp, "dy", dy, dx.data ? "dx" : "dy", dx.data ? dx : dy));
    if (!saved) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mt_check_activation(ctx, function, mlp->fc1.weight, "saved.fc1.x", saved->fc1.x, dy.rows, mlp->desc.hidden));
    MT_TRY(mt_check_sent(ctx, function, mlp->fc1.tp, mlp->desc.sequence_parallel, "dy", dy, "dx", dx));
    MT_TRY(mt_check_apart(ctx, function, "dy", dy, "dx", dx));
    MT_TRY(mt_check_apart(ctx, function, "saved.fc1.x", saved->fc1.x, "dx", dx));
    MT_TRY(mt_check_linear_gradients(ctx, function, &mlp->fc1));
    MT_TRY(mt_check_gradient(ctx, function, mlp->fc1.bias)); /* it is added with the activation */
    MT_TRY(mt_check_linear_gradients(ctx, function, &mlp->fc2));
    MT_TRY(mt_defer_weight_gradients(ctx));
    mark = mt_arena_mark(ctx);
    status = mt_defer_weight_gradients_end(ctx, MT_RANGE("mlp backward", mti_mlp_backward(ctx, mlp, dy, dx, saved)));
    mt_arena_release(ctx, mark);
    return status;
}
