/* ---- norms with parameters --------------------------------------------------------------------------------------- */

#pragma once
#include "norm.h"
#include "linear.c"

static mt_status mti_norm_desc_check(mt_context *ctx, const char *function, const char *name,
                                     const mt_norm_layer_desc *d) {
    MT_TRY(mt_check_integer(ctx, function, name, "features", d->features, 1, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "groups", d->groups, 0, INT32_MAX));
    MT_TRY(mt_check_enum(ctx, function, name, "kind", (int)d->kind, MT_NORM_WORDS));
    MT_TRY(mt_check_float(ctx, function, name, "eps", d->eps, MT_FLOAT_AT_LEAST_0));
    if (d->groups > 0 && d->sequence_parallel)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: '%s' has groups %lld and sequence_parallel; heads are split, and see all tokens", function,
                       name, (long long)d->groups);
    return MT_SUCCESS;
}

static mt_status mti_norm_params(mt_context *ctx, mt_params *params, const char *name, mt_norm_layer *layer) {
    mt_param_desc p;
    memset(&p, 0, sizeof p);
    p.rows = 1;
    p.cols = layer->desc.features;
    p.init_value = 1.0f;
    p.sequence_partial = layer->desc.sequence_parallel || layer->desc.groups > 0;
    MT_TRY(mti_add_param(ctx, params, name, "weight", p, &layer->weight));
    if (layer->desc.kind == MT_RMS_NORM) return MT_SUCCESS;
    p.init_value = 0.0f;
    return mti_add_param(ctx, params, name, "bias", p, &layer->bias);
}

MT_API mt_status mt_norm_layer_create(mt_context *ctx, mt_params *params, const char *name,
                                      const mt_norm_layer_desc *desc, mt_norm_layer *out) {
    static const char *const function = "mt_norm_layer_create";
    char full[MT_NAME_MAX];
    int shards;
    size_t mark;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    MT_TRY(mt_layer_name(ctx, params, name, full));
    name = full;
    MT_TRY(mti_norm_desc_check(ctx, function, name, desc));
    mark = mt_params_mark(params);
    shards = mti_shards(ctx, params->grid->tp);
    memset(out, 0, sizeof *out);
    out->desc = *desc;
    out->desc.eps = mt_or_default(desc->eps, 1e-5f);
    out->tp = params->grid->tp;
    out->local_groups = shards * mti_shard_features(desc->groups, 1, 1, shards * params->grid->tp_size);
    return mt_create_end(params, mark, out, sizeof *out, mti_norm_params(ctx, params, name, out));
}

/* The checks that forward and backward share. `in` is x or dy, `out` is y or dx. */
static mt_status mti_norm_layer_check(mt_context *ctx, const char *function, const mt_norm_layer *layer,
                                      const char *in_name, mt_tensor in, const char *out_name, mt_tensor out) {
    int64_t n, groups;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_check_params(ctx, function, layer ? layer->weight : NULL, layer ? layer->bias : NULL));
    n = layer->desc.features;
    groups = layer->local_groups;
    if (groups > 0 && (in.cols < n || in.cols % n != 0 || in.rows % groups != 0))
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: %s is [%lld, %lld], must have rows for %lld groups and whole heads of %lld features",
                       function, in_name, (long long)in.rows, (long long)in.cols, (long long)groups, (long long)n);
    MT_TRY(mt_check_activation(ctx, function, layer->weight, in_name, in, in.rows, groups > 0 ? in.cols : n));
    return mt_check_activation(ctx, function, layer->weight, out_name, out, in.rows, in.cols);
}

MT_API mt_status mt_norm_layer_forward(mt_context *ctx, const mt_norm_layer *layer, mt_tensor x, mt_tensor y,
                                       mt_norm_saved *saved) {
    mt_tensor stats = mt_none(), part = mt_none();
    int64_t head, heads, n;
    MT_TRY(mti_norm_layer_check(ctx, "mt_norm_layer_forward", layer, "x", x, "y", y));
    n = layer->desc.features;
    heads = x.cols / n;
    if (saved) MT_TRY(mt_arena_tensor(ctx, MT_F32, x.rows * heads, 2, &stats));
    for (head = 0; head < heads; head++) {
        if (saved) part = mt_tensor_rows(stats, head * x.rows, x.rows);
        MT_TRY(mt_norm_forward(ctx, layer->desc.kind, mt_tensor_cols(x, head * n, n), layer->weight->value,
                               layer->bias ? layer->bias->value : mt_none(), layer->desc.eps,
                               mt_tensor_cols(y, head * n, n), part));
    }
    if (!saved) return MT_SUCCESS;
    saved->x = x;
    saved->stats = stats;
    if (layer->desc.groups > 0) return MT_SUCCESS;
    return mt_hash_log_activation(ctx, layer->weight->name, 1, "output", y, layer->desc.sequence_parallel, NULL);
}

/* The arguments of a norm's backward. */
typedef struct mti_norm_call {
    const mt_norm_layer *layer;
    mt_tensor x, stats, dy, dresidual, dx;
    int64_t first, rows; /* of a norm per head: some rows of x */
} mti_norm_call;

/* Returns the view of `rows` rows of t, every step-th from row `first` on, and of `cols` columns from column `col`
   on. */
static mt_tensor mti_norm_view(mt_tensor t, int64_t first, int64_t step, int64_t rows, int64_t col, int64_t cols) {
    int64_t ld = mt_tensor_ld(t) * step;
    if (!t.data) return t;
    t = mt_tensor_cols(mt_tensor_rows(t, first, rows > 0), col, cols);
    t.rows = rows;
    t.ld = ld;
    return t;
}

/* Calls the backward for each head of some rows; first, step and rows are those of mti_norm_view. */
static mt_status mti_norm_heads(mt_context *ctx, const mti_norm_call *c, int64_t first, int64_t step, int64_t rows,
                                mt_tensor dgain, mt_tensor dbias) {
    int64_t n = c->layer->desc.features, heads = c->x.cols / n, h;
    for (h = 0; h < heads; h++)
        MT_TRY(mt_norm_backward(
            ctx, c->layer->desc.kind, mti_norm_view(c->x, first, step, rows, h * n, n), c->layer->weight->value,
            mti_norm_view(c->stats, h * c->x.rows + first, step, rows, 0, 2),
            mti_norm_view(c->dy, first, step, rows, h * n, n), mti_norm_view(c->dresidual, first, step, rows, h * n, n),
            mti_norm_view(c->dx, first, step, rows, h * n, n), dgain, dbias));
    return MT_SUCCESS;
}

/* The mt_token_operator of a norm over whole tokens. */
static mt_status mti_norm_tokens(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor dgain,
                                 mt_tensor dbias) {
    return mti_norm_heads(ctx, (const mti_norm_call *)arg, first, 1, count, dgain, dbias);
}

/* The mt_token_operator of a norm per head. It is called for virtual shard `shard` instead of tokens, and takes the
   shard's groups one after the other. */
static mt_status mti_norm_shard(mt_context *ctx, const void *arg, int64_t shard, int64_t one, mt_tensor dgain,
                                mt_tensor dbias) {
    const mti_norm_call *c = (const mti_norm_call *)arg;
    int64_t groups = c->layer->local_groups, each = groups / mti_shards(ctx, c->layer->tp), i;
    (void)one;
    for (i = 0; i < each; i++)
        MT_TRY(mti_norm_heads(ctx, c, c->first + shard * each + i, groups, c->rows / groups, dgain, dbias));
    return MT_SUCCESS;
}

/* With virtual context ranks, the sum over the heads of all tensor ranks comes first for each of them. Tensor rank 0
   then has the sum, and the others add nothing to it. */
static mt_status mti_norm_context(mt_context *ctx, const mti_norm_call *c, mt_tensor dgain, mt_tensor dbias) {
    const int ranks = mti_context_shards(ctx), shards = mti_shards(ctx, c->layer->tp), sums = dbias.data ? 2 : 1;
    const size_t mark = mt_arena_mark(ctx);
    mt_tensor all;
    int i;
    MT_TRY(mti_context_rows_check(ctx, c->x.rows));
    MT_TRY(mt_arena_tensor(ctx, MT_F32, ranks, sums * dgain.cols, &all));
    MT_TRY(mt_fill(ctx, all, 0.0f));
    for (i = 0; i < ranks; i++) {
        const mt_tensor to = mt_tensor_rows(all, i, 1);
        mti_norm_call part = *c;
        part.first = i * (c->x.rows / ranks);
        part.rows = c->x.rows / ranks;
        MT_TRY(mti_sum_over_shards(ctx, mti_norm_shard, &part, 1, shards, mt_tensor_cols(to, 0, dgain.cols),
                                   dbias.data ? mt_tensor_cols(to, dgain.cols, dgain.cols) : dbias));
    }
    MT_TRY(mt_all_reduce(ctx, c->layer->tp, all.data, all.data, (size_t)(ranks * sums * dgain.cols), MT_F32, MT_SUM));
    MT_TRY(mt_tree_sum(ctx, all));
    all = mt_tensor_rows(all, 0, 1);
    for (i = 0; i < sums && mt_comm_rank(c->layer->tp) == 0; i++) {
        const mt_tensor to = i ? dbias : dgain, sum = mt_tensor_cols(all, i * to.cols, to.cols);
        MT_TRY(mt_check_view(ctx, c->layer->tp, sum, MT_PARTIAL)); /* of the ranks, one has a term */
        MT_TRY(mt_check_view_end(ctx, mt_add(ctx, to, sum, to)));
    }
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Computes the backward of a norm per head. In invariant mode the gradients of gain and bias are sums over the virtual
   shards of the heads. */
static mt_status mti_norm_groups(mt_context *ctx, const mti_norm_call *c, mt_tensor dgain, mt_tensor dbias) {
    if (!mt_context_invariant(ctx)) return mti_norm_heads(ctx, c, 0, 1, c->x.rows, dgain, dbias);
    if (mti_has_context_ranks(ctx)) return mti_norm_context(ctx, c, dgain, dbias);
    return mti_sum_over_shards(ctx, mti_norm_shard, c, 1, mti_shards(ctx, c->layer->tp), dgain, dbias);
}

MT_API mt_status mt_norm_layer_backward(mt_context *ctx, const mt_norm_layer *layer, mt_tensor dy, mt_tensor dresidual,
                                        mt_tensor dx, const mt_norm_saved *saved) {
    static const char *const function = "mt_norm_layer_backward";
    mti_norm_call call;
    mt_tensor dbias;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!saved) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_norm_layer_check(ctx, function, layer, "dy", dy, "dx", dx));
    MT_TRY(mt_check_activation(ctx, function, layer->weight, "saved.x", saved->x, dy.rows, dy.cols));
    MT_TRY(mt_tensor_check(ctx, function, "saved.stats", saved->stats, MT_ARG_F32,
                           dy.rows * (dy.cols / layer->desc.features), 2));
    if (dresidual.data)
        MT_TRY(mt_check_activation(ctx, function, layer->weight, "dresidual", dresidual, dy.rows, dy.cols));
    MT_TRY(mt_check_gradient(ctx, function, layer->weight));
    MT_TRY(mt_check_gradient(ctx, function, layer->bias));
    if (layer->desc.groups == 0)
        MT_TRY(mt_check_tokens(ctx, function, mt_sequence_tokens(layer->tp, layer->desc.sequence_parallel, dy.rows)));
    call.layer = layer;
    call.first = 0;
    call.rows = saved->x.rows;
    call.x = saved->x;
    call.stats = saved->stats;
    call.dy = dy;
    call.dresidual = dresidual;
    call.dx = dx;
    dbias = layer->bias ? layer->bias->grad : mt_none();
    mti_gradient_added(layer->weight);
    if (layer->desc.groups > 0) return mti_norm_groups(ctx, &call, layer->weight->grad, dbias);
    MT_TRY(mt_sum_over_tokens(ctx, layer->tp, layer->desc.sequence_parallel, mti_norm_tokens, &call, dy.rows,
                              layer->weight->grad, dbias));
    return mt_hash_log_activation(ctx, layer->weight->name, 1, "input_grad", dx, layer->desc.sequence_parallel, NULL);
}
