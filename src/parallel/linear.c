/* ---- column- and row-parallel linear ----------------------------------------------------------------------------- */

#pragma once
#include "linear.h"
#include "deferred.c"
#include "../comm/conjugates.h"
#include "../ops/linear.h"

/* The first functions are those of authors.h that layers share. */

MT_API mt_status mt_check_sent(mt_context *ctx, const char *function, mt_comm *tp, int sequence_parallel,
                               const char *in_name, mt_tensor in, const char *out_name, mt_tensor out) {
    int in_ok = !sequence_parallel || in.rows <= 1 || mt_tensor_ld(in) == in.cols;
    mt_tensor bad = in_ok ? out : in;
    if (mt_comm_size(tp) == 1 || (in_ok && (out.rows <= 1 || mt_tensor_ld(out) == out.cols))) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE,
                   "%s: %s [%lld, %lld] has ld %lld; it is sent between %d ranks and must be contiguous", function,
                   in_ok ? out_name : in_name, (long long)bad.rows, (long long)bad.cols, (long long)bad.ld,
                   mt_comm_size(tp));
}

MT_API mt_status mt_check_activation(mt_context *ctx, const char *function, const mt_param *weight, const char *name,
                                     mt_tensor t, int64_t rows, int64_t cols) {
    MT_TRY(mt_tensor_check(ctx, function, name, t, MT_ARG_FLOAT, rows, cols));
    if (!weight)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the parameter that gives %s its type is NULL", function, name);
    if (t.dtype == weight->value.dtype) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_DTYPE, "%s: %s is %s, '%s' is %s", function, name, mt_dtype_name(t.dtype), weight->name,
                   mt_dtype_name(weight->value.dtype));
}

MT_API mt_status mt_check_param(mt_context *ctx, const char *function, const mt_param *weight) {
    if (weight && (weight->registry ? weight->registry->placed : weight->value.data != NULL))
        return mti_pointer_check(ctx, function, weight);
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function,
                   weight ? "call mt_params_init before the first forward" : "the layer was not created");
}

/* mt_check_param for the weight of a layer and its bias. bias may be NULL. */
static mt_status mti_check_params(mt_context *ctx, const char *function, const mt_param *weight, const mt_param *bias) {
    MT_TRY(mt_check_param(ctx, function, weight));
    return bias ? mti_pointer_check(ctx, function, bias) : MT_SUCCESS;
}

/* mt_check_gradient for a layer whose product may write the gradient: the zeros are not filled in. */
static mt_status mti_gradient_check(mt_context *ctx, const char *function, const mt_param *p) {
    const mti_parallel *options = mti_parallel_of(ctx);
    if (!p) return MT_SUCCESS;
    if (!p->grad.data) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the gradient of '%s' is NULL", function, p->name);
    if (!p->registry) return MT_SUCCESS;
    MT_TRY(mti_gradients_open(ctx, function, p));
    if (p->registry->ctx != ctx) MT_TRY(mti_gradient_fill(ctx, p)); /* which may record a graph by itself */
    if (p->registry->buckets.begun && p->final)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: the gradient of '%s' was final already (mt_gradients_final), and its sum over the data "
                       "ranks may be under way; call mt_sync_gradients_begin before the last backward of a step",
                       function, p->name);
    return mti_micro_batch_check(ctx, function, p, options ? options->micro_batch : 0);
}

MT_API mt_status mt_check_gradient(mt_context *ctx, const char *function, const mt_param *p) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_gradient_check(ctx, function, p));
    return mti_gradient_fill(ctx, p);
}

MT_API mt_status mt_check_linear_gradients(mt_context *ctx, const char *function, const mt_parallel_linear *layer) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!layer) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the layer is NULL", function);
    MT_TRY(mti_gradient_check(ctx, function, layer->weight));
    return mti_gradient_check(ctx, function, layer->desc.skip_bias_add ? NULL : layer->bias);
}

MT_API mt_status mt_check_micro_batch(mt_context *ctx, const char *function, const mt_param *p, int64_t sequence) {
    const mti_parallel *options = ctx ? mti_parallel_of(ctx) : NULL;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!p || !p->registry || (options && options->micro_batch)) return MT_SUCCESS;
    return mti_micro_batch_check(ctx, function, p, -1 - sequence);
}

MT_API mt_status mt_param_name(mt_context *ctx, char *out, const char *name, const char *suffix) {
    int n;
    if (!out || !suffix) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_param_name: %s is NULL", out ? "suffix" : "out");
    n = name ? snprintf(out, MT_NAME_MAX, "%s.%s", name, suffix) : -1;
    if (n > 0 && n < MT_NAME_MAX) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "the parameter name '%.100s.%s' must have at most %d characters",
                   name ? name : "(NULL)", suffix, MT_NAME_MAX - 1);
}

static mt_status mti_add_param(mt_context *ctx, mt_params *params, const char *name, const char *suffix,
                               mt_param_desc desc, mt_param **out) {
    char full[MT_NAME_MAX];
    MT_TRY(mt_param_name(ctx, full, name, suffix));
    desc.name = full;
    return mt_params_add(ctx, params, &desc, out);
}

/* Refuses a field that has no effect because of another field. */
static mt_status mti_linear_unused(mt_context *ctx, const char *function, const char *name, const mt_linear_desc *d) {
    const char *field = NULL, *why = NULL;
    if (d->skip_bias_add && d->no_bias) field = "skip_bias_add", why = "with no_bias there is no bias";
    if (d->init_std != 0.0f && d->weight) field = "init_std", why = "its weight is that of another layer";
    if (!field) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' sets %s, but %s", function, name, field, why);
}

/* Checks the desc of a linear layer. whole is 1 when the layer gathers its output or takes an input that is not
   split. */
static mt_status mti_linear_check(mt_context *ctx, const char *function, const char *name, const mt_linear_desc *d,
                                  int whole) {
    MT_TRY(mt_check_integer(ctx, function, name, "in_features", d->in_features, 1, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "out_features", d->out_features, 1, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "parts", d->parts, 0, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "unit", d->unit, 0, INT64_MAX));
    MT_TRY(mt_check_float(ctx, function, name, "init_std", mt_or_default(d->init_std, 1), MT_FLOAT_AT_LEAST_0));
    MT_TRY(mti_linear_unused(ctx, function, name, d));
    if (!mt_context_invariant(ctx) || d->parts < 2 || d->parts_by_shard || whole) return MT_SUCCESS;
    return mt_fail(
        ctx, MT_ERR_ARGUMENT,
        "%s: '%s' has %lld parts, which lie shard by shard in invariant mode: work on each virtual shard, and "
        "set parts_by_shard",
        function, name, (long long)d->parts);
}

/* Describes the weight and the bias of a linear layer. placement is that of the weight. */
static void mti_linear_describe(const mt_linear_desc *d, mt_placement placement, mt_param_desc *w, mt_param_desc *b) {
    memset(w, 0, sizeof *w);
    w->rows = d->out_features;
    w->cols = d->in_features;
    w->placement = placement;
    w->parts = d->parts;
    w->unit = d->unit;
    w->padded_features = d->split.padded_out_features;
    w->copies = d->split.copies;
    w->copied = d->split.copied;
    w->init_std = mt_or_default(d->init_std, 0.02f);
    w->weight_decay = 1;
    memset(b, 0, sizeof *b);
    b->rows = 1;
    b->cols = d->out_features;
    if (placement == MT_SPLIT_ROWS) {
        b->placement = MT_SPLIT_COLS;
        b->padded_features = d->weight ? d->weight->desc.padded_features : d->split.padded_out_features;
        b->parts = d->parts;
        b->unit = d->unit;
        b->copies = d->split.copies;
        b->copied = d->split.copied;
    } else {
        b->sequence_partial = d->sequence_parallel;
    }
}

/* Adds the weight and the bias of a linear layer. placement is that of the weight. */
static mt_status mti_linear_params(mt_context *ctx, mt_params *params, const char *name, const mt_linear_desc *d,
                                   mt_placement placement, mt_param **weight, mt_param **bias) {
    mt_param_desc w, b;
    mti_linear_describe(d, placement, &w, &b);
    *weight = d->weight;
    *bias = NULL;
    if (!d->weight) MT_TRY(mti_add_param(ctx, params, name, "weight", w, weight));
    if (!d->no_bias) MT_TRY(mti_add_param(ctx, params, name, "bias", b, bias));
    if ((*weight)->registry) mti_entry_of(*weight)->is_linear = 1;
    return MT_SUCCESS;
}

/* In check mode, refuses a tensor that is known not to be replicated over the tensor group. */
static mt_status mti_replicated_check(mt_context *ctx, const mt_comm *tp, const char *what, mt_tensor t) {
    mt_placement is = mt_placement_of(ctx, tp, t);
    if (is == MT_UNDECLARED || is == MT_REPLICATED) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s is %s over \"tensor\" (%d ranks), must be replicated", what,
                   mt_placement_name(is), mt_comm_size(tp));
}

/* Sets *out to the columns of x [tokens, n] that belong to this rank. It is a view when they are one piece, and
   otherwise a copy in the arena. Call mt_check_view_end, which ends what check mode knows of the view, after the calls
   that read it. what: x, for messages */
static mt_status mti_local_slice(mt_context *ctx, const mt_comm *tp, const mt_param *p, const char *what, mt_tensor x,
                                 mt_tensor *out) {
    int64_t first, at = 0;
    mti_shard_run run;
    MT_TRY(mti_replicated_check(ctx, tp, what, x));
    if (mti_is_one_run(p, &first)) {
        *out = mt_tensor_cols(x, first, p->local_features);
        return mt_check_view(ctx, tp, *out, MT_SPLIT_COLS); /* nothing in a group of one */
    }
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, p->local_features, out));
    MT_TRY(mt_fill(ctx, *out, 0.0f));
    while (mti_run_next(p, p->tp_rank, &at, &run)) /* a copied feature is taken once, from the piece that counts */
        if (run.counts) MT_TRY(mt_copy(ctx, mt_tensor_cols(x, run.global, run.count), mti_run_cols(p, *out, run)));
    return mt_check_view(ctx, tp, *out, MT_SPLIT_COLS);
}

/* The inverse of mti_local_slice: gathers `local` [tokens, local features], which is contiguous, from all ranks into y
   [tokens, n], without the padding. */
static mt_status mti_gather_features(mt_context *ctx, mt_comm *tp, const mt_param *p, mt_tensor local, mt_tensor y) {
    mt_tensor all;
    int r;
    MT_TRY(mt_arena_tensor(ctx, local.dtype, local.rows * p->tp_size, local.cols, &all));
    MT_TRY(mt_all_gather(ctx, tp, local.data, all.data, (size_t)(local.rows * local.cols), local.dtype));
    for (r = 0; r < p->tp_size; r++) {
        mt_tensor from = mt_tensor_rows(all, r * local.rows, local.rows);
        int64_t at = 0;
        mti_shard_run run;
        while (mti_run_next(p, r, &at, &run))
            if (run.counts) MT_TRY(mt_copy(ctx, mti_run_cols(p, from, run), mt_tensor_cols(y, run.global, run.count)));
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_gather_tokens(mt_context *ctx, mt_comm *tp, int sequence_parallel, mt_tensor x, mt_tensor *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_gather_tokens: out is NULL");
    *out = x;
    if (!sequence_parallel || mt_comm_size(tp) == 1) return MT_SUCCESS;
    MT_TRY(mt_tensor_check(ctx, "mt_gather_tokens", "x", x, MT_ARG_ANY, x.rows, x.cols));
    if (mt_sequence_tokens(tp, 1, x.rows) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "mt_gather_tokens: x has %lld rows, too many for %d ranks", (long long)x.rows,
                       mt_comm_size(tp));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, mt_sequence_tokens(tp, 1, x.rows), x.cols, out));
    return mt_gather_from_sequence_region(ctx, tp, x, *out);
}

/* Sets *out to the tensor for partial sums [tokens, n], which mti_reduce_tokens then reduces to y. It is y itself, or
   scratch memory in the arena under sequence parallelism and for 16-bit types in invariant mode. In invariant mode
   partial sums are f32 and only the last sum is rounded, so that sums over ranks and over virtual shards have the same
   bits. */
static mt_status mti_partial_tokens(mt_context *ctx, mt_comm *tp, int sequence_parallel, mt_tensor y, mt_tensor *out) {
    int ranks = sequence_parallel ? mt_comm_size(tp) : 1;
    *out = y;
    if (ranks == 1 && (!mt_context_invariant(ctx) || y.dtype == MT_F32)) return MT_SUCCESS;
    return mt_arena_tensor(ctx, mt_context_invariant(ctx) ? MT_F32 : y.dtype, y.rows * ranks, y.cols, out);
}

/* -- tokens in chunks: one chunk is multiplied while another is communicated -- */

#define MTI_CHUNK_TOKENS 1024
#define MTI_CHUNKS 4
#define MTI_CHUNKS_OF_RANKS 2

/* How a call cuts its tokens into chunks. A chunk has whole units: rows or, under sequence parallelism, all rows of a
   rank, so that a product of a chunk is one call and its rows are contiguous. Tokens that are not communicated are a
   single chunk. The cut does not depend on what overlaps, so neither do the GEMMs and their bits. */
typedef struct mti_chunks {
    int count;
    int64_t units, unit; /* unit: rows of each of the `units` units */
} mti_chunks;

/* Returns the number of chunks of a call with so many tokens, when the options do not say it. Few large chunks: a
   product must fill the GPU. */
static int64_t mti_default_chunks(const mt_context *ctx, int sequence_parallel, int64_t tokens) {
    if (!mt_overlap_is_planned(ctx)) return 1;
    return mt_min(tokens / MTI_CHUNK_TOKENS, sequence_parallel ? MTI_CHUNKS_OF_RANKS : MTI_CHUNKS);
}

/* Cuts the tokens of a call. rows is the number of rows on this rank; travel is 0 when they are not communicated. */
static mti_chunks mti_chunks_of(const mt_context *ctx, mt_comm *tp, int sequence_parallel, int travel, int64_t rows) {
    int ranks = mt_comm_size(tp);
    int64_t count = mt_parallel_get_options(ctx).overlap_chunks;
    mti_chunks c;
    c.units = sequence_parallel ? ranks : rows;
    c.unit = sequence_parallel ? rows : 1;
    if (count == 0) count = mti_default_chunks(ctx, sequence_parallel, c.units * c.unit);
    if (ranks == 1 || !travel || mt_context_invariant(ctx) || mti_holds(ctx, sequence_parallel)) count = 1;
    c.count = (int)mt_max(mt_min(count, c.units), 1);
    return c;
}

/* Returns the first unit of a chunk. */
static int64_t mti_chunk_first(const mti_chunks *c, int chunk) { return c->units * chunk / c->count; }

/* Returns the view of the rows of a chunk of t. */
static mt_tensor mti_chunk(const mti_chunks *c, mt_tensor t, int chunk) {
    int64_t first = mti_chunk_first(c, chunk);
    return mt_tensor_rows(t, first * c->unit, (mti_chunk_first(c, chunk + 1) - first) * c->unit);
}

/* Gathers the rows of all ranks into *all, with one ticket (mt_overlap_end) for each chunk. *all is x when there is
   nothing to gather. */
static mt_status mti_gather_chunks(mt_context *ctx, mt_comm *tp, int sequence_parallel, const mti_chunks *c,
                                   mt_tensor x, mt_tensor *all) {
    int i;
    if (c->count == 1) return mt_gather_tokens(ctx, tp, sequence_parallel, x, all);
    *all = x;
    if (!sequence_parallel) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows * mt_comm_size(tp), x.cols, all));
    for (i = 0; i < c->count; i++) {
        int first = (int)mti_chunk_first(c, i), ranks = (int)mti_chunk_first(c, i + 1) - first;
        MT_TRY(mti_overlap_begin(ctx, tp, MT_OVERLAP_ALL_GATHER));
        MT_TRY(mt_overlap_end(ctx, i, mt_gather_ranks_from_sequence_region(ctx, tp, x, *all, first, ranks)));
    }
    return MT_SUCCESS;
}

/* Sums the partial results of all ranks into y with an all-reduce, or with a reduce-scatter under sequence parallelism.
   It is the forward of g, or with `backward` the backward of f. An f32 partial of a 16-bit y is summed in f32, without
   sequence parallelism in place, and then rounded into y. */
static mt_status mti_reduce_tokens(mt_context *ctx, mt_comm *tp, int sequence_parallel, int backward, mt_tensor partial,
                                   mt_tensor y) {
    mt_tensor sum = y;
    if (partial.dtype != y.dtype && sequence_parallel) MT_TRY(mt_arena_tensor(ctx, MT_F32, y.rows, y.cols, &sum));
    else if (partial.dtype != y.dtype) sum = partial;
    if (sequence_parallel) MT_TRY(mt_reduce_scatter_to_sequence_region(ctx, tp, partial, sum));
    else if (backward) MT_TRY(mt_copy_to_tensor_region_backward(ctx, tp, sum));
    else MT_TRY(mt_reduce_from_tensor_region_forward(ctx, tp, sum));
    return sum.dtype != y.dtype ? mt_convert(ctx, sum, y) : MT_SUCCESS;
}

/* Does the same as mti_reduce_tokens for one chunk. */
static mt_status mti_reduce_chunk(mt_context *ctx, mt_comm *tp, int sequence_parallel, const mti_chunks *c, int chunk,
                                  mt_tensor partial, mt_tensor y) {
    int64_t first = mti_chunk_first(c, chunk), units = mti_chunk_first(c, chunk + 1) - first;
    if (c->count == 1) return mti_reduce_tokens(ctx, tp, sequence_parallel, 0, partial, y);
    if (!sequence_parallel) return mt_reduce_rows_from_tensor_region(ctx, tp, y, first, units);
    return mt_reduce_scatter_ranks_to_sequence_region(ctx, tp, partial, y, (int)first, (int)units);
}

MT_API int64_t mt_sequence_tokens(mt_comm *tp, int sequence_parallel, int64_t rows) {
    return sequence_parallel ? mt_size_mul(rows, mt_comm_size(tp)) : rows;
}

MT_API mt_status mt_sequence_rows(mt_context *ctx, const char *function, mt_comm *tp, int sequence_parallel,
                                  int64_t tokens, int64_t *rows) {
    int ranks = sequence_parallel ? mt_comm_size(tp) : 1;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!rows) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: rows is NULL", function);
    *rows = tokens / ranks;
    if (tokens >= 0 && tokens % ranks == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE, "%s: %lld tokens cannot be split over %d tensor ranks", function,
                   (long long)tokens, ranks);
}

/* Checks that a field, in which 0 means 1, has the value of the shared weight. */
static mt_status mti_shared_check(mt_context *ctx, const char *function, const char *name, const char *field,
                                  int64_t value, const mt_param *weight, int64_t shared) {
    if ((value ? value : 1) == shared) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s': %s is %lld, that of the shared weight '%s' is %lld", function, name,
                   field, (long long)value, weight->name, (long long)shared);
}

/* Checks the weight of another layer that a column-parallel layer uses. */
static mt_status mti_shared_weight(mt_context *ctx, const char *function, const char *name, const mt_linear_desc *d) {
    const mt_param *w = d->weight;
    if (!w) return MT_SUCCESS;
    if (w->desc.placement != MT_SPLIT_ROWS)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s' shares the weight '%s', whose placement is not MT_SPLIT_ROWS",
                       function, name, w->name);
    if (w->desc.rows != d->out_features || w->desc.cols != d->in_features)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s' is [%lld, %lld], the shared weight '%s' is [%lld, %lld]", function,
                       name, (long long)d->out_features, (long long)d->in_features, w->name, (long long)w->desc.rows,
                       (long long)w->desc.cols);
    MT_TRY(mti_shared_check(ctx, function, name, "parts", d->parts, w, w->desc.parts));
    MT_TRY(mti_shared_check(ctx, function, name, "unit", d->unit, w, w->desc.unit));
    if (d->split.copies > 1 || w->desc.copies > 1)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s' shares the weight '%s', and one of them has copies", function, name,
                       w->name);
    if (!d->split.padded_out_features ||
        d->split.padded_out_features == mti_padded(d->out_features, w->desc.padded_features))
        return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE,
                   "%s: '%s': split.padded_out_features is %lld, that of the shared weight '%s' is %lld", function,
                   name, (long long)d->split.padded_out_features, w->name, (long long)w->desc.padded_features);
}

/* Makes a layer of its parameters. bias may be NULL. */
static void mti_linear_make(mt_parallel_linear *out, const char *name, const mt_linear_desc *desc, mt_comm *tp,
                            mt_param *weight, mt_param *bias) {
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%s", name);
    out->desc = *desc;
    out->weight = weight;
    out->bias = bias;
    out->tp = tp;
    out->local_features = weight->local_features;
}

/* Refuses fields of desc that are for the other kind of layer. placement is that of the weight. */
static mt_status mti_linear_kind(mt_context *ctx, const char *function, const char *name, const mt_linear_desc *d,
                                 mt_placement placement) {
    int column = placement == MT_SPLIT_ROWS;
    const char *field = column                         ? (d->input_is_parallel ? "input_is_parallel" : NULL)
                        : d->weight                    ? "weight"
                        : d->gather_output             ? "gather_output"
                        : d->split.padded_out_features ? "split.padded_out_features"
                                                       : NULL;
    if (!field) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' sets %s, which is for %s-parallel layers", function, name, field,
                   column ? "row" : "column");
}

static mt_status mti_linear_create(mt_context *ctx, const char *function, mt_params *params, const char *name,
                                   const mt_linear_desc *desc, mt_placement placement, mt_parallel_linear *out) {
    char full[MT_NAME_MAX];
    mt_param *weight, *bias;
    size_t mark;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    MT_TRY(mt_layer_name(ctx, params, name, full));
    MT_TRY(mti_linear_check(ctx, function, full, desc,
                            placement == MT_SPLIT_ROWS ? desc->gather_output : !desc->input_is_parallel));
    MT_TRY(mti_linear_kind(ctx, function, full, desc, placement));
    MT_TRY(mti_shared_weight(ctx, function, full, desc));
    mark = mt_params_mark(params);
    MT_TRY(mt_create_end(params, mark, out, sizeof *out,
                         mti_linear_params(ctx, params, full, desc, placement, &weight, &bias)));
    mti_linear_make(out, full, desc, params->grid->tp, weight, bias);
    return MT_SUCCESS;
}

MT_API mt_status mt_column_parallel_linear_create(mt_context *ctx, mt_params *params, const char *name,
                                                  const mt_linear_desc *desc, mt_parallel_linear *out) {
    return mti_linear_create(ctx, "mt_column_parallel_linear_create", params, name, desc, MT_SPLIT_ROWS, out);
}

MT_API mt_status mt_row_parallel_linear_create(mt_context *ctx, mt_params *params, const char *name,
                                               const mt_linear_desc *desc, mt_parallel_linear *out) {
    return mti_linear_create(ctx, "mt_row_parallel_linear_create", params, name, desc, MT_SPLIT_COLS, out);
}

/* -- the layers of a call -- */

/* The layers of a call, either column-parallel or row-parallel. Column-parallel layers share x, and row-parallel layers
   share y: a call has one of these, and for each layer one of the other. */
typedef struct mti_layers {
    const mt_parallel_linear *list;
    int count, columns; /* columns: 1 when they are column-parallel */
} mti_layers;

static int mti_is_column(const mt_parallel_linear *layer) { return layer->weight->desc.placement == MT_SPLIT_ROWS; }

/* Returns the bias that the layer adds itself, or NULL. */
static const mt_param *mti_own_bias(const mt_parallel_linear *layer) {
    return layer->desc.skip_bias_add ? NULL : layer->bias;
}

/* Returns the bias that the layer leaves to the next operator (skip_bias_add), or NULL. */
static const mt_param *mti_left_bias(const mt_parallel_linear *layer) {
    return layer->desc.skip_bias_add ? layer->bias : NULL;
}

/* Returns the index of x, and of y, for layer i of a call. */
static int mti_x_of(const mti_layers *l, int i) { return l->columns ? 0 : i; }
static int mti_y_of(const mti_layers *l, int i) { return l->columns ? i : 0; }

/* Checks layers of a call, which may be NULL, and fills *out. */
static mt_status mti_layers_of(mt_context *ctx, const char *function, const mt_parallel_linear *layers, int count,
                               mti_layers *out) {
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    for (i = 0; i < count; i++)
        MT_TRY(mti_check_params(ctx, function, layers ? layers[i].weight : NULL, layers ? layers[i].bias : NULL));
    out->list = layers;
    out->count = count;
    out->columns = mti_is_column(layers);
    return MT_SUCCESS;
}

/* The same for a function of column-parallel layers. */
static mt_status mti_column_of(mt_context *ctx, const char *function, const mt_parallel_linear *layer,
                               mti_layers *out) {
    MT_TRY(mti_layers_of(ctx, function, layer, 1, out));
    if (out->columns) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' is row-parallel, must be column-parallel", function, layer->name);
}

/* Checks, for layer i, the shape of `in`, which is x or dx, and that of `out`, y or dy. in_name and out_name are their
   names in messages. */
static mt_status mti_shapes_check(mt_context *ctx, const char *function, const mti_layers *l, int i,
                                  const char *in_name, mt_tensor in, const char *out_name, mt_tensor out) {
    const mt_parallel_linear *n = &l->list[i];
    int64_t tokens = mt_sequence_tokens(n->tp, n->desc.sequence_parallel, l->columns ? in.rows : out.rows);
    int64_t in_cols = !l->columns && n->desc.input_is_parallel ? n->local_features : n->desc.in_features;
    int64_t out_cols = l->columns && !n->desc.gather_output ? n->local_features : n->desc.out_features;
    MT_TRY(mt_check_activation(ctx, function, n->weight, in_name, in, l->columns ? in.rows : tokens, in_cols));
    return mt_check_activation(ctx, function, n->weight, out_name, out, l->columns ? tokens : out.rows, out_cols);
}

/* Does mti_layers_of for layers that share f or g, and checks that the pointer `other` is not NULL. */
static mt_status mti_shared_of(mt_context *ctx, const char *function, const mt_parallel_linear *layers, int count,
                               const void *other, mti_layers *out) {
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!layers || !other || count < 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %d layers%s", function, count,
                       layers && other ? ", needs one" : ", a list is NULL");
    MT_TRY(mti_layers_of(ctx, function, layers, count, out));
    for (i = 0; i < count; i++) {
        const mt_linear_desc *d = &layers[i].desc, *first = &layers[0].desc;
        if (d->sequence_parallel == first->sequence_parallel && layers[i].tp == layers[0].tp &&
            mti_is_column(&layers[i]) == out->columns &&
            (out->columns ? !d->gather_output && !d->add_to_dx == !first->add_to_dx : d->input_is_parallel))
            continue;
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: '%s' and '%s' must both be %s, with the same sequence_parallel%s tensor group", function,
                       layers[0].name, layers[i].name,
                       out->columns ? "column-parallel without gather_output" : "row-parallel with input_is_parallel",
                       out->columns ? ", add_to_dx and" : " and");
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_parallel_linear_tensors(mt_context *ctx, const mt_parallel_linear *layers, int count,
                                            mt_tensor like, mt_tensor *out) {
    mti_layers l;
    int64_t tokens;
    int i;
    MT_TRY(mti_shared_of(ctx, "mt_parallel_linear_tensors", layers, count, out, &l));
    tokens = mt_sequence_tokens(layers[0].tp, layers[0].desc.sequence_parallel, like.rows);
    for (i = 0; i < count; i++) MT_TRY(mt_arena_tensor(ctx, like.dtype, tokens, layers[i].local_features, &out[i]));
    return MT_SUCCESS;
}

/* -- forward -- */

/* Calls the bias operator op with y and the bias, or in backward with dy (as y) and the gradient of the bias. */
static mt_status mti_column_bias(mt_context *ctx, const mt_param *bias, mt_tensor y,
                                 mt_status (*op)(mt_context *ctx, mt_tensor y, mt_tensor bias), int backward) {
    mt_tensor b = backward ? bias->grad : bias->value;
    int s;
    for (s = 0; s < bias->shards; s++)
        MT_TRY(op(ctx, mt_shard_cols(y, s, bias->shards), mt_shard_cols(b, s, bias->shards)));
    return MT_SUCCESS;
}

/* Computes y [tokens, local features] = x W^T + bias. */
static mt_status mti_column_product(mt_context *ctx, const mt_parallel_linear *n, mt_tensor x, mt_tensor y) {
    const mt_param *w = n->weight;
    int s;
    if (!mt_context_invariant(ctx))
        return mt_linear_forward(ctx, x, w->value, mti_own_bias(n) ? mti_own_bias(n)->value : mt_none(), y);
    MT_TRY(mt_invariant_input(ctx, x, &x)); /* one copy for all shards */
    for (s = 0; s < w->shards; s++)
        MT_TRY(
            mti_token_product(ctx, MT_TRANS, x, mti_param_shard(w, w->value, s), 0.0f, mt_shard_cols(y, s, w->shards)));
    return mti_own_bias(n) ? mti_column_bias(ctx, mti_own_bias(n), y, mt_bias_forward, 0) : MT_SUCCESS;
}

/* The products x op(W) whose inner dimension is the split dimension. Each virtual shard of W [rows, cols] gives one
   partial sum, to which all layers of the call add. */
typedef struct mti_partial {
    const mti_layers *layers;
    mt_transpose trans;   /* of W */
    const mt_tensor *x;   /* one for each layer: x, or dy in backward, [tokens, local features] */
    const mti_chunks *of; /* the product is of one chunk of x; NULL: of all of x */
    int chunk;
} mti_partial;

/* The mti_leaf of mti_partial_product. */
static mt_status mti_partial_leaf(mt_context *ctx, const void *arg, int shard, mt_tensor out) {
    const mti_partial *p = (const mti_partial *)arg;
    int i;
    for (i = 0; i < p->layers->count; i++) {
        const mt_param *w = p->layers->list[i].weight;
        mt_tensor x = p->of ? mti_chunk(p->of, p->x[i], p->chunk) : p->x[i];
        MT_TRY(mti_token_product(ctx, p->trans, mt_shard_cols(x, shard, w->shards), mti_param_shard(w, w->value, shard),
                                 i == 0 ? 0.0f : 1.0f, out));
    }
    return MT_SUCCESS;
}

/* Computes out = the sum of x op(W) over layers and virtual shards: what this rank contributes to the sum over the
   tensor group. */
static mt_status mti_partial_product(mt_context *ctx, const mti_partial *p, mt_tensor out) {
    return mti_shard_tree(ctx, mti_partial_leaf, p, 0, p->layers->list[0].weight->shards, out);
}

/* The activation after a column-parallel layer, when one operator computes both: h = x W^T + bias, which is the layer's
   y, and out = act(h). bias may be mt_none(). */
typedef struct mti_activation_after {
    mt_activation kind;
    mt_tensor bias, out;
} mti_activation_after;

/* Computes one chunk of a layer's output y and, with act, the same chunk of the activation's output. */
static mt_status mti_column_chunk(mt_context *ctx, const mt_parallel_linear *n, const mti_activation_after *act,
                                  mt_tensor x, mt_tensor y, mt_tensor out) {
    if (act) return mt_linear_activation_forward(ctx, act->kind, x, n->weight->value, act->bias, y, out);
    return mti_column_product(ctx, n, x, y);
}

/* Computes y[i] [tokens, local features] of each layer from the same x. act may be NULL; with act there is one
   layer. */
static mt_status mti_column_forward(mt_context *ctx, const mti_layers *l, mt_tensor x, const mt_tensor *y,
                                    const mti_activation_after *act) {
    const mt_parallel_linear *first = l->list;
    int sp = first->desc.sequence_parallel, i, k;
    mti_chunks c = mti_chunks_of(ctx, first->tp, sp, sp, x.rows);
    mt_tensor all;
    MT_TRY(mti_gather_chunks(ctx, first->tp, sp, &c, x, &all));
    for (i = 0; i < c.count; i++) {
        MT_TRY(mt_overlap_wait(ctx, i));
        for (k = 0; k < l->count; k++)
            MT_TRY(mti_column_chunk(ctx, &l->list[k], act, mti_chunk(&c, all, i), mti_chunk(&c, y[k], i),
                                    act ? mti_chunk(&c, act->out, i) : mt_none()));
    }
    return MT_SUCCESS;
}

/* Computes y = the sum of x W^T over layers and ranks, plus the biases. The reduction of a chunk overlaps with the
   GEMMs of the next chunk. */
static mt_status mti_row_forward(mt_context *ctx, const mti_layers *l, const mt_tensor *x, mt_tensor y) {
    const mt_parallel_linear *first = l->list;
    int sp = first->desc.sequence_parallel, holds = mti_holds(ctx, sp), i;
    mti_chunks c = mti_chunks_of(ctx, first->tp, sp, 1, y.rows);
    mti_partial p = {l, MT_TRANS, x, &c, 0};
    mt_tensor partial;
    MT_TRY(mti_partial_tokens(ctx, first->tp, sp, y, &partial));
    for (p.chunk = 0; p.chunk < c.count; p.chunk++) {
        MT_TRY(mti_partial_product(ctx, &p, mti_chunk(&c, partial, p.chunk)));
        MT_TRY(mti_overlap_begin(ctx, first->tp, c.count > 1 || holds ? MT_OVERLAP_ROW_FORWARD : 0));
        MT_TRY(mt_overlap_end(ctx, mti_reduction_ticket(ctx, sp, p.chunk),
                              mti_reduce_chunk(ctx, first->tp, sp, &c, p.chunk, partial, y)));
    }
    if (!holds) MT_TRY(mt_overlap_wait_all(ctx));
    for (i = 0; i < l->count; i++) {
        if (!mti_own_bias(&l->list[i])) continue;
        MT_TRY(mt_overlap_wait(ctx, mti_reduction_ticket(ctx, sp, 0)));
        MT_TRY(mt_bias_forward(ctx, y, l->list[i].bias->value));
    }
    return MT_SUCCESS;
}

/* Computes the outputs of the layers. The output of a column-parallel layer with gather_output is gathered. A
   row-parallel layer without input_is_parallel takes its columns of x. */
static mt_status mti_layers_run(mt_context *ctx, const mti_layers *l, const mt_tensor *x, const mt_tensor *y) {
    const mt_parallel_linear *n = l->list;
    mt_tensor local;
    if (!l->columns && n->desc.input_is_parallel) return mti_row_forward(ctx, l, x, y[0]);
    if (!l->columns) {
        MT_TRY(mti_local_slice(ctx, n->tp, n->weight, "mt_parallel_linear_forward: x", x[0], &local));
        return mt_check_view_end(ctx, mti_row_forward(ctx, l, &local, y[0]));
    }
    if (!n->desc.gather_output || mti_is_whole(n->weight)) return mti_column_forward(ctx, l, x[0], y, NULL);
    MT_TRY(mt_arena_tensor(ctx, y[0].dtype, y[0].rows, n->local_features, &local));
    MT_TRY(mti_column_forward(ctx, l, x[0], &local, NULL));
    return mti_gather_features(ctx, n->tp, n->weight, local, y[0]);
}

/* Ends a call: waits for its collectives, except for a reduction that is held, and releases the arena to `mark`. */
static mt_status mti_linear_end(mt_context *ctx, size_t mark, mt_status status) {
    int count = mti_holds(ctx, 0) && status == MT_SUCCESS ? MTI_HOLD_TICKET : MT_OVERLAP_TICKETS, i;
    for (i = 0; i < count; i++) MT_KEEP(status, mt_overlap_wait(ctx, i)); /* they may still use the arena */
    mt_arena_release(ctx, mark);
    return status;
}

/* Writes an output or, in backward, an input gradient of layer i to the hash log. */
static mt_status mti_layer_log(mt_context *ctx, const mti_layers *l, int i, int backward, mt_tensor t) {
    const mt_parallel_linear *n = &l->list[i];
    int split = l->columns ? !backward && !n->desc.gather_output : backward && n->desc.input_is_parallel;
    int by_rows = l->columns == backward && n->desc.sequence_parallel;
    if (mti_hash_log_of(ctx)) MT_TRY(mt_overlap_wait(ctx, mti_reduction_ticket(ctx, n->desc.sequence_parallel, 0)));
    return mt_hash_log_activation(ctx, n->name, 0, backward ? "input_grad" : "output", t, by_rows,
                                  split ? n->weight : NULL);
}

/* The forward of a call. saved has one entry for each x. */
static mt_status mti_layers_forward(mt_context *ctx, const char *function, const mti_layers *l, const mt_tensor *x,
                                    const mt_tensor *y, mt_linear_saved *saved) {
    const mt_parallel_linear *first = l->list;
    size_t mark;
    int i;
    for (i = 0; i < l->count; i++)
        MT_TRY(mti_shapes_check(ctx, function, l, i, "x", x[mti_x_of(l, i)], "y", y[mti_y_of(l, i)]));
    MT_TRY(mt_check_sent(ctx, function, first->tp, l->columns && first->desc.sequence_parallel, "x", x[0], "y",
                         l->columns ? mt_none() : y[0]));
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_linear_end(ctx, mark, mti_layers_run(ctx, l, x, y)));
    if (!saved) return MT_SUCCESS;
    for (i = 0; i < (l->columns ? 1 : l->count); i++) saved[i].x = x[i];
    for (i = 0; i < (l->columns ? l->count : 1); i++) MT_TRY(mti_layer_log(ctx, l, i, 0, y[i]));
    return MT_SUCCESS;
}

MT_API mt_status mt_parallel_linear_forward(mt_context *ctx, const mt_parallel_linear *layer, mt_tensor x, mt_tensor y,
                                            mt_linear_saved *saved) {
    static const char *const function = "mt_parallel_linear_forward";
    mti_layers l;
    MT_TRY(mti_layers_of(ctx, function, layer, 1, &l));
    return mti_layers_forward(ctx, function, &l, &x, &y, saved);
}

MT_API mt_status mt_parallel_linear_forward_shared(mt_context *ctx, const mt_parallel_linear *layers, int count,
                                                   const mt_tensor *x, const mt_tensor *y, mt_linear_saved *saved) {
    static const char *const function = "mt_parallel_linear_forward_shared";
    mti_layers l;
    MT_TRY(mti_shared_of(ctx, function, layers, count, x ? y : NULL, &l));
    return mti_layers_forward(ctx, function, &l, x, y, saved);
}

/* -- backward -- */

/* The mt_token_operator for a bias: arg points to dy, and dbias += the sum of some rows of dy. */
static mt_status mti_row_bias_gradient(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor dbias,
                                       mt_tensor none) {
    (void)none;
    return mt_bias_backward(ctx, mt_tensor_rows(*(const mt_tensor *)arg, first, count), dbias);
}

/* As mt_bias_backward, in the order of sums over context ranks. */
static mt_status mti_bias_rows_backward(mt_context *ctx, mt_tensor dy, mt_tensor dbias) {
    return mti_sum_over_context(ctx, mti_row_bias_gradient, &dy, dy.rows, dbias, mt_none());
}

/* Computes dW += dy^T x with dy [tokens, local features] (mti_gradient_beta), and adds to the gradient of the bias. */
static mt_status mti_column_weight_gradient(mt_context *ctx, const mt_parallel_linear *n, mt_tensor dy, mt_tensor x) {
    const mt_param *w = n->weight;
    const float beta = mti_gradient_beta(w);
    int s;
    mti_gradient_added(w);
    if (!mt_context_invariant(ctx)) {
        MT_TRY(
            mt_linear_gradients_beta(ctx, dy, x, beta, w->grad, mti_own_bias(n) ? mti_own_bias(n)->grad : mt_none()));
        mti_gradient_written(w);
        return MT_SUCCESS;
    }
    if (mti_own_bias(n)) MT_TRY(mti_column_bias(ctx, mti_own_bias(n), dy, mti_bias_rows_backward, 1));
    MT_TRY(mt_invariant_input(ctx, x, &x));
    for (s = 0; s < w->shards; s++)
        MT_TRY(mti_weight_product(ctx, mt_shard_cols(dy, s, w->shards), x, beta, mti_param_shard(w, w->grad, s)));
    mti_gradient_written(w);
    return MT_SUCCESS;
}

/* Computes dx = the sum of dy W over layers and ranks. The reduction may still run on return. */
static mt_status mti_column_input_gradient(mt_context *ctx, const mti_layers *l, const mt_tensor *dy, mt_tensor dx) {
    const mt_parallel_linear *first = l->list;
    int sp = first->desc.sequence_parallel;
    mti_partial p = {l, MT_NO_TRANS, dy, NULL, 0};
    mt_tensor partial;
    MT_TRY(mti_partial_tokens(ctx, first->tp, sp, dx, &partial));
    MT_TRY(mti_partial_product(ctx, &p, partial));
    MT_TRY(mti_overlap_begin(ctx, first->tp, MT_OVERLAP_COLUMN_BACKWARD));
    return mt_overlap_end(ctx, mti_reduction_ticket(ctx, sp, 0), mti_reduce_tokens(ctx, first->tp, sp, 1, partial, dx));
}

/* Computes dx and adds to the parameter gradients. The gather of x (ticket 1) overlaps with the GEMMs of dx, and the
   reduction of dx (ticket 0, or that of a slot) with the GEMMs of the weight gradients, also of those that were
   deferred. With add_to_dx the reduction is
   in scratch memory, because it would otherwise also sum what dx has had before. */
static mt_status mti_column_backward(mt_context *ctx, const mti_layers *l, const mt_tensor *dy, mt_tensor dx,
                                     mt_tensor x) {
    const mt_parallel_linear *first = l->list;
    int add = dx.data && first->desc.add_to_dx, sp = first->desc.sequence_parallel, i;
    mt_tensor all, sum = dx;
    if (add) MT_TRY(mt_arena_tensor(ctx, dx.dtype, dx.rows, dx.cols, &sum));
    MT_TRY(mti_overlap_begin(ctx, first->tp, sp ? MT_OVERLAP_COLUMN_BACKWARD : 0));
    MT_TRY(mt_overlap_end(ctx, 1, mt_gather_tokens(ctx, first->tp, sp, x, &all)));
    if (dx.data) MT_TRY(mti_column_input_gradient(ctx, l, dy, sum));
    MT_TRY(mti_deferred_run(ctx));
    MT_TRY(mt_overlap_wait(ctx, 1));
    for (i = 0; i < l->count; i++) MT_TRY(mti_column_weight_gradient(ctx, &l->list[i], dy[i], all));
    if (!add) return MT_SUCCESS;
    MT_TRY(mt_overlap_wait(ctx, mti_reduction_ticket(ctx, sp, 0)));
    return mt_add(ctx, dx, sum, dx);
}

/* The activation before a row-parallel layer, when one operator computes the gradient through both. */
typedef struct mti_activation_before {
    mt_activation kind;
    mt_tensor h, dbias;
} mti_activation_before;

/* Computes dx [tokens, local features] = dy W, or adds it with `add`. With act, dx is the gradient of h, the input of
   the activation. */
static mt_status mti_row_input_gradient(mt_context *ctx, const mt_parallel_linear *n, int add,
                                        const mti_activation_before *act, mt_tensor dy, mt_tensor h, mt_tensor dx) {
    const mt_param *w = n->weight;
    size_t mark = mt_arena_mark(ctx);
    mt_tensor part = dx;
    int s;
    if (act && act->dbias.data) mti_gradient_added(w); /* the bias of the layer before it is in the same registry */
    if (act) return mt_linear_activation_backward(ctx, act->kind, dy, w->value, h, dx, act->dbias);
    if (add) MT_TRY(mt_arena_tensor(ctx, dx.dtype, dx.rows, dx.cols, &part));
    for (s = 0; s < w->shards; s++)
        MT_TRY(mti_token_product(ctx, MT_NO_TRANS, dy, mti_param_shard(w, w->value, s), 0.0f,
                                 mt_shard_cols(part, s, w->shards)));
    if (add) MT_TRY(mt_add(ctx, dx, part, dx));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Adds to the gradients of the biases that the layers add themselves. */
static mt_status mti_row_bias_gradients(mt_context *ctx, const mti_layers *l, mt_tensor dy) {
    int i;
    for (i = 0; i < l->count; i++) {
        const mt_parallel_linear *n = &l->list[i];
        if (!mti_own_bias(n)) continue;
        mti_gradient_added(mti_own_bias(n));
        MT_TRY(mt_sum_over_tokens(ctx, n->tp, n->desc.sequence_parallel, mti_row_bias_gradient, &dy, dy.rows,
                                  mti_own_bias(n)->grad, mt_none()));
    }
    return MT_SUCCESS;
}

/* Computes dx[i] [tokens, local features] of each layer and adds to the parameter gradients. dx[i] may be mt_none().
   With may_add 0, add_to_dx is ignored. act may be NULL; with act there is one layer. */
static mt_status mti_row_backward(mt_context *ctx, const mti_layers *l, mt_tensor dy, const mt_tensor *dx, int may_add,
                                  const mt_linear_saved *saved, const mti_activation_before *act) {
    const mt_parallel_linear *first = l->list;
    int sp = first->desc.sequence_parallel, stays, i, k;
    mti_chunks c = mti_chunks_of(ctx, first->tp, sp, sp, dy.rows);
    mt_tensor all;
    MT_TRY(mti_gather_chunks(ctx, first->tp, sp, &c, dy, &all));
    MT_TRY(mti_row_bias_gradients(ctx, l, dy));
    MT_TRY(mt_invariant_input(ctx, all, &all)); /* one copy for all shards */
    for (i = 0; i < c.count; i++) {
        MT_TRY(mt_overlap_wait(ctx, i));
        for (k = 0; k < l->count; k++) {
            const mt_parallel_linear *n = &l->list[k];
            if (!dx[k].data) continue;
            MT_TRY(mti_row_input_gradient(ctx, n, may_add && n->desc.add_to_dx, act, mti_chunk(&c, all, i),
                                          act ? mti_chunk(&c, act->h, i) : mt_none(), mti_chunk(&c, dx[k], i)));
        }
    }
    /* gathered tokens, and an input that was cut out, are in scratch memory of this call */
    stays = all.data == dy.data && first->desc.input_is_parallel && mt_comm_size(first->tp) > 1;
    for (k = 0; k < l->count; k++) MT_TRY(mti_weight_gradient_later(ctx, stays, l->list[k].weight, all, saved[k].x));
    return MT_SUCCESS;
}

/* Computes the backward of one row-parallel layer without input_is_parallel: takes this rank's columns of x, and
   gathers dx, which is whole. */
static mt_status mti_row_backward_whole(mt_context *ctx, const mti_layers *l, mt_tensor dy, mt_tensor dx, mt_tensor x) {
    const mt_parallel_linear *n = l->list;
    int gather = dx.data && !mti_is_whole(n->weight), add = gather && n->desc.add_to_dx;
    mt_linear_saved sliced;
    mt_tensor local = dx, whole = dx;
    MT_TRY(mti_local_slice(ctx, n->tp, n->weight, "mt_parallel_linear_backward: saved.x", x, &sliced.x));
    if (gather) MT_TRY(mt_arena_tensor(ctx, dx.dtype, x.rows, n->local_features, &local));
    if (add) MT_TRY(mt_arena_tensor(ctx, dx.dtype, dx.rows, dx.cols, &whole)); /* the gathered gradient is added */
    MT_TRY(mti_row_backward(ctx, l, dy, &local, !gather, &sliced, NULL));
    if (gather) MT_TRY(mti_gather_features(ctx, n->tp, n->weight, local, whole));
    return add ? mt_add(ctx, dx, whole, dx) : MT_SUCCESS;
}

/* The inverse of mti_layers_run. */
static mt_status mti_layers_run_back(mt_context *ctx, const mti_layers *l, const mt_tensor *dy, const mt_tensor *dx,
                                     const mt_linear_saved *saved) {
    const mt_parallel_linear *n = l->list;
    mt_tensor local;
    if (!l->columns && n->desc.input_is_parallel) return mti_row_backward(ctx, l, dy[0], dx, 1, saved, NULL);
    if (!l->columns) return mt_check_view_end(ctx, mti_row_backward_whole(ctx, l, dy[0], dx[0], saved[0].x));
    if (!n->desc.gather_output) return mti_column_backward(ctx, l, dy, dx[0], saved[0].x);
    MT_TRY(mti_local_slice(ctx, n->tp, n->weight, "mt_parallel_linear_backward: dy", dy[0], &local));
    return mt_check_view_end(ctx, mti_column_backward(ctx, l, &local, dx[0], saved[0].x));
}

/* Checks the tensors of layer i in backward, and that its parameters have the gradients to which it adds. */
static mt_status mti_backward_check(mt_context *ctx, const char *function, const mti_layers *l, int i, mt_tensor dy,
                                    mt_tensor dx, mt_tensor x) {
    const mt_parallel_linear *n = &l->list[i];
    int sp = n->desc.sequence_parallel;
    MT_TRY(mti_shapes_check(ctx, function, l, i, "saved.x", x, "dy", dy));
    if (dx.data) MT_TRY(mt_check_activation(ctx, function, n->weight, "dx", dx, x.rows, x.cols));
    MT_TRY(l->columns ? mt_check_sent(ctx, function, n->tp, sp, "saved.x", x, "dx", dx)
                      : mt_check_sent(ctx, function, n->tp, sp, "dy", dy, "dx", mt_none()));
    MT_TRY(mt_check_apart(ctx, function, "dx", dx, "saved.x", x));
    if (!l->columns && n->desc.add_to_dx) MT_TRY(mt_check_apart(ctx, function, "dx", dx, "dy", dy));
    MT_TRY(mti_gradient_check(ctx, function, n->weight));
    MT_TRY(mti_gradient_check(ctx, function, mti_own_bias(n)));
    if (l->columns || !mti_own_bias(n)) return MT_SUCCESS;
    return mt_check_tokens(ctx, function, mt_sequence_tokens(n->tp, sp, dy.rows));
}

/* The backward of a call: the inverse of mti_layers_forward. */
static mt_status mti_layers_backward(mt_context *ctx, const char *function, const mti_layers *l, const mt_tensor *dy,
                                     const mt_tensor *dx, const mt_linear_saved *saved) {
    size_t mark;
    int i;
    if (!saved) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    for (i = 0; i < l->count; i++) {
        int k = mti_x_of(l, i);
        MT_TRY(mti_backward_check(ctx, function, l, i, dy[mti_y_of(l, i)], dx[k], saved[k].x));
    }
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_linear_end(ctx, mark, mti_layers_run_back(ctx, l, dy, dx, saved)));
    for (i = 0; i < (l->columns ? 1 : l->count); i++) MT_TRY(mti_layer_log(ctx, l, i, 1, dx[i]));
    return MT_SUCCESS;
}

MT_API mt_status mt_parallel_linear_backward(mt_context *ctx, const mt_parallel_linear *layer, mt_tensor dy,
                                             mt_tensor dx, const mt_linear_saved *saved) {
    static const char *const function = "mt_parallel_linear_backward";
    mti_layers l;
    MT_TRY(mti_layers_of(ctx, function, layer, 1, &l));
    return mti_layers_backward(ctx, function, &l, &dy, &dx, saved);
}

MT_API mt_status mt_parallel_linear_backward_shared(mt_context *ctx, const mt_parallel_linear *layers, int count,
                                                    const mt_tensor *dy, const mt_tensor *dx,
                                                    const mt_linear_saved *saved) {
    static const char *const function = "mt_parallel_linear_backward_shared";
    mti_layers l;
    MT_TRY(mti_shared_of(ctx, function, layers, count, dx ? dy : NULL, &l));
    return mti_layers_backward(ctx, function, &l, dy, dx, saved);
}

/* -- without f or g, and with an activation -- */

/* Computes the local columns of the product and gathers those of all ranks into y. */
static mt_status mti_column_product_gathered(mt_context *ctx, const mt_parallel_linear *n, mt_tensor x, mt_tensor y) {
    mt_tensor local;
    MT_TRY(mt_arena_tensor(ctx, y.dtype, y.rows, n->local_features, &local));
    MT_TRY(mti_column_product(ctx, n, x, local));
    return mti_gather_features(ctx, n->tp, n->weight, local, y);
}

MT_API mt_status mt_column_parallel_linear_product(mt_context *ctx, const mt_parallel_linear *layer, mt_tensor x,
                                                   int gather_output, mt_tensor y) {
    static const char *const function = "mt_column_parallel_linear_product";
    mti_layers l;
    size_t mark;
    mt_status status;
    MT_TRY(mti_column_of(ctx, function, layer, &l));
    MT_TRY(mt_check_activation(ctx, function, layer->weight, "x", x, x.rows, layer->desc.in_features));
    MT_TRY(mt_tensor_check(ctx, function, "y", y, MT_ARG_FLOAT, x.rows,
                           gather_output ? layer->desc.out_features : layer->local_features));
    mark = mt_arena_mark(ctx);
    status = gather_output && !mti_is_whole(layer->weight) ? mti_column_product_gathered(ctx, layer, x, y)
                                                           : mti_column_product(ctx, layer, x, y);
    mt_arena_release(ctx, mark);
    return status;
}

/* Returns the value of the bias that a layer leaves to the activation, or in backward its gradient. Without such a bias
   returns mt_none(). */
static mt_tensor mti_left_tensor(const mt_parallel_linear *layer, int backward) {
    const mt_param *bias = mti_left_bias(layer);
    return !bias ? mt_none() : backward ? bias->grad : bias->value;
}

/* Returns the number of shards of h; the activation is called once for each. A gathered h is whole and in global order,
   so it is one shard. */
static int mti_activation_shards(const mt_parallel_linear *layer) {
    return layer->desc.gather_output ? 1 : layer->weight->shards;
}

/* Checks everything that the activation of a layer's output h reads or writes. y has the shape of the activation's
   output. */
static mt_status mti_activation_check(mt_context *ctx, const char *function, const mt_parallel_linear *layer,
                                      mt_activation kind, mt_tensor h, const char *y_name, mt_tensor y) {
    int64_t features, width = kind == MT_SWIGLU ? 2 : 1;
    mti_layers l;
    MT_TRY(mti_column_of(ctx, function, layer, &l));
    MT_TRY(mt_check_enum(ctx, function, NULL, "kind", (int)kind, MT_ACTIVATION_WORDS));
    if (layer->desc.gather_output && mti_left_bias(layer))
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: '%s' has gather_output and skip_bias_add; its output is whole, but its bias is split",
                       function, layer->name);
    features = layer->desc.gather_output ? layer->desc.out_features : layer->local_features;
    if (features % (width * mti_activation_shards(layer)) != 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: the %lld features of '%s' in %d shards are not gate and up", function,
                       (long long)features, layer->name, mti_activation_shards(layer));
    MT_TRY(mt_check_activation(ctx, function, layer->weight, "h", h, h.rows, features));
    return mt_check_activation(ctx, function, layer->weight, y_name, y, h.rows, features / width);
}

MT_API mt_status mt_column_parallel_activation_forward(mt_context *ctx, const mt_parallel_linear *layer,
                                                       mt_activation kind, mt_tensor h, mt_tensor y) {
    int s, shards;
    MT_TRY(mti_activation_check(ctx, "mt_column_parallel_activation_forward", layer, kind, h, "y", y));
    shards = mti_activation_shards(layer);
    for (s = 0; s < shards; s++)
        MT_TRY(mt_activation_forward(ctx, kind, mt_shard_cols(h, s, shards),
                                     mt_shard_cols(mti_left_tensor(layer, 0), s, shards), mt_shard_cols(y, s, shards)));
    return MT_SUCCESS;
}

/* The mt_token_operator of an activation's backward. */
typedef struct mti_activation_rows {
    mt_activation kind;
    mt_tensor h, dy, dh;
} mti_activation_rows;

static mt_status mti_activation_of_rows(mt_context *ctx, const void *arg, int64_t first, int64_t count, mt_tensor dbias,
                                        mt_tensor none) {
    const mti_activation_rows *r = (const mti_activation_rows *)arg;
    (void)none;
    return mt_activation_backward(ctx, r->kind, mt_tensor_rows(r->h, first, count), mt_tensor_rows(r->dy, first, count),
                                  mt_tensor_rows(r->dh, first, count), dbias);
}

MT_API mt_status mt_column_parallel_activation_backward(mt_context *ctx, const mt_parallel_linear *layer,
                                                        mt_activation kind, mt_tensor h, mt_tensor dy, mt_tensor dh) {
    static const char *const function = "mt_column_parallel_activation_backward";
    mt_tensor dbias;
    int s, shards;
    MT_TRY(mti_activation_check(ctx, function, layer, kind, h, "dy", dy));
    MT_TRY(mt_check_activation(ctx, function, layer->weight, "dh", dh, h.rows, h.cols));
    MT_TRY(mt_check_gradient(ctx, function, mti_left_bias(layer)));
    if (mti_left_bias(layer)) mti_gradient_added(layer->bias);
    dbias = mti_left_tensor(layer, 1);
    shards = mti_activation_shards(layer);
    for (s = 0; s < shards; s++) {
        mti_activation_rows rows;
        rows.kind = kind;
        rows.h = mt_shard_cols(h, s, shards);
        rows.dy = mt_shard_cols(dy, s, shards);
        rows.dh = mt_shard_cols(dh, s, shards);
        if (dbias.data)
            MT_TRY(mti_sum_over_context(ctx, mti_activation_of_rows, &rows, h.rows, mt_shard_cols(dbias, s, shards),
                                        mt_none()));
        else MT_TRY(mti_activation_of_rows(ctx, &rows, 0, h.rows, mt_none(), mt_none()));
    }
    return MT_SUCCESS;
}

/* Returns 1 when one operator cannot compute both a layer and the activation of its output. */
static int mti_is_separate(const mt_context *ctx, const mt_parallel_linear *layer) {
    return mt_gemm_get_options(ctx).epilogue == MT_EPILOGUE_SEPARATE || layer->desc.gather_output ||
           mti_own_bias(layer);
}

MT_API mt_status mt_column_parallel_linear_activation_forward(mt_context *ctx, const mt_parallel_linear *layer,
                                                              mt_activation kind, mt_tensor x, mt_tensor h, mt_tensor y,
                                                              mt_linear_saved *saved) {
    static const char *const function = "mt_column_parallel_linear_activation_forward";
    mti_layers l;
    mti_activation_after act;
    size_t mark;
    MT_TRY(mti_column_of(ctx, function, layer, &l));
    MT_TRY(mti_shapes_check(ctx, function, &l, 0, "x", x, "h", h));
    MT_TRY(mti_activation_check(ctx, function, layer, kind, h, "y", y));
    if (mti_is_separate(ctx, layer)) {
        MT_TRY(mt_parallel_linear_forward(ctx, layer, x, h, saved));
        return mt_column_parallel_activation_forward(ctx, layer, kind, h, y);
    }
    MT_TRY(mt_check_sent(ctx, function, layer->tp, layer->desc.sequence_parallel, "x", x, "h", mt_none()));
    act.kind = kind;
    act.bias = mti_left_tensor(layer, 0);
    act.out = y;
    mark = mt_arena_mark(ctx);
    if (saved) saved->x = x;
    return mti_linear_end(ctx, mark, mti_column_forward(ctx, &l, x, &h, &act));
}

/* Computes dact, the gradient of the activation's output, and then dh, when one operator does not compute both. */
static mt_status mti_row_activation_separate(mt_context *ctx, const mt_parallel_linear *layer,
                                             const mt_parallel_linear *before, mt_activation kind, mt_tensor dy,
                                             mt_tensor h, mt_tensor dh, const mt_linear_saved *saved) {
    mt_tensor dact;
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, h.rows, layer->local_features, &dact));
    MT_TRY(mt_parallel_linear_backward(ctx, layer, dy, dact, saved));
    return mt_column_parallel_activation_backward(ctx, before, kind, h, dact, dh);
}

MT_API mt_status mt_row_parallel_linear_activation_backward(mt_context *ctx, const mt_parallel_linear *layer,
                                                            const mt_parallel_linear *before, mt_activation kind,
                                                            mt_tensor dy, mt_tensor h, mt_tensor dh,
                                                            const mt_linear_saved *saved) {
    static const char *const function = "mt_row_parallel_linear_activation_backward";
    mti_layers l;
    mti_activation_before act;
    mt_status status;
    size_t mark;
    MT_TRY(mti_layers_of(ctx, function, layer, 1, &l));
    if (!saved) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_backward_check(ctx, function, &l, 0, dy, mt_none(), saved->x));
    if (!before || l.columns || !layer->desc.input_is_parallel || layer->desc.add_to_dx || before->desc.gather_output)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: '%s' must be row-parallel with input_is_parallel and without add_to_dx, and the layer "
                       "before it must not have gather_output",
                       function, layer->name);
    MT_TRY(mti_activation_check(ctx, function, before, kind, h, "saved.x", saved->x));
    MT_TRY(mt_check_activation(ctx, function, layer->weight, "dh", dh, h.rows, h.cols));
    MT_TRY(mt_check_gradient(ctx, function, mti_left_bias(before)));
    mark = mt_arena_mark(ctx);
    act.kind = kind;
    act.h = h;
    act.dbias = mti_left_tensor(before, 1);
    status = mti_is_separate(ctx, before) ? mti_row_activation_separate(ctx, layer, before, kind, dy, h, dh, saved)
                                          : mti_row_backward(ctx, &l, dy, &dh, 1, saved, &act);
    return mti_linear_end(ctx, mark, status);
}
