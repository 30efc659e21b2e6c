/* ---- which elements of a parameter a shard has ------------------------------------------------------------------- */

#pragma once
#include "params.c"

/* A run: `count` features of a parameter's split dimension, which are neighbours in the whole dimension, from `global`
   on, and in a rank's shard, from `local` on. What a rank has of a parameter is a list of runs, in the order of its
   shard. Padding is in none. A replicated parameter is one run, of all its rows. */
typedef struct mti_shard_run {
    int shard;  /* index among this rank's virtual shards; `local` counts from its first feature */
    int copied; /* 1: other pieces have the same features (mt_param_desc.copies) */
    int counts; /* 0: the same features count where another piece has them */
    int64_t local, global, count;
} mti_shard_run;

static int64_t mti_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Returns how many of n features each of `shards` shards has, padding included. */
static int64_t mti_shard_features(int64_t n, int64_t parts, int64_t unit, int shards) {
    return parts * mti_ceil_div(n / parts / unit, shards) * unit;
}

/* Returns n with the caller's padding: `padded` features, or n when padded is 0. */
static int64_t mti_padded(int64_t n, int64_t padded) { return padded ? padded : n; }

/* Returns the size of the dimension that is split. */
static int64_t mti_split_dimension(const mt_param *p) {
    return p->desc.placement == MT_SPLIT_COLS ? p->desc.cols : p->desc.rows;
}

/* Returns how many features a piece of a unit has of its own, and with them how many it has. */
static int64_t mti_piece_own(const mt_param_desc *d) { return (d->unit - d->copied) / d->copies; }
static int64_t mti_piece_features(const mt_param_desc *d) { return mti_piece_own(d) + d->copied; }

/* Returns how many features a rank with p->shards virtual shards has, padding included. */
static int64_t mti_local_features(const mt_param *p) {
    const mt_param_desc *d = &p->desc;
    int64_t n = mti_split_dimension(p), unit = d->unit;
    if (d->placement == MT_REPLICATED) return n;
    if (d->copies > 1) {
        unit = mti_piece_features(d);
        n = n / d->unit * d->copies * unit;
    }
    return p->shards * mti_shard_features(mti_padded(n, d->padded_features), d->parts, unit, p->shards * p->tp_size);
}

/* Makes *p a parameter of rank `rank` of `ranks`, each with `shards` virtual shards: its sizes, and the shapes of value
   and grad, without memory. A vector that is split by columns is one row for any number of virtual shards. */
static void mti_param_describe(mt_param *p, const mt_param_desc *d, int rank, int ranks, int shards, mt_dtype dtype) {
    int64_t rows, cols, local;
    p->desc = *d;
    if (!d->parts) p->desc.parts = 1;
    if (!d->unit) p->desc.unit = 1;
    if (!d->copies) p->desc.copies = 1;
    p->tp_rank = rank;
    p->tp_size = ranks;
    p->shards = d->placement == MT_REPLICATED ? 1 : shards;
    p->local_features = local = mti_local_features(p);
    rows = d->placement != MT_SPLIT_COLS ? local : d->rows == 1 ? 1 : p->shards * d->rows;
    cols = d->placement != MT_SPLIT_COLS ? d->cols : d->rows == 1 ? local : local / p->shards;
    p->value = mt_tensor_make(NULL, dtype, rows, cols);
    p->grad = mt_tensor_make(NULL, MT_F32, rows, cols);
}

/* Sets *run to run number `index` of tensor rank `rank` of a parameter with copies; its count may be 0. A piece has two
   runs: its own features, then the copied ones. */
static void mti_piece_run(const mt_param *p, int rank, int64_t index, mti_shard_run *run) {
    const mt_param_desc *d = &p->desc;
    int64_t own = mti_piece_own(d), size = own + d->copied, pieces = p->local_features / p->shards / size;
    int64_t piece = index / 2, global = (int64_t)rank * p->shards * pieces + piece, unit = global / d->copies;
    run->shard = (int)(piece / pieces);
    run->copied = (int)(index % 2);
    run->counts = !run->copied || global % d->copies == 0;
    run->local = piece % pieces * size + (run->copied ? own : 0);
    run->global = unit * d->unit + (run->copied ? d->unit - d->copied : global % d->copies * own);
    run->count = unit >= mti_split_dimension(p) / d->unit ? 0 : run->copied ? d->copied : own;
}

/* The same for a parameter without copies: each virtual shard has a run of each part. */
static void mti_part_run(const mt_param *p, int rank, int64_t index, mti_shard_run *run) {
    int64_t whole = mti_split_dimension(p) / p->desc.parts, part = index % p->desc.parts;
    int64_t size = p->local_features / p->shards / p->desc.parts, before;
    if (p->desc.placement == MT_REPLICATED) rank = 0;
    run->shard = (int)(index / p->desc.parts);
    run->copied = 0;
    run->counts = 1;
    before = mt_min(whole, ((int64_t)rank * p->shards + run->shard) * size);
    run->local = part * size;
    run->global = part * whole + before;
    run->count = mt_min(size, whole - before);
}

/* Walks the runs of tensor rank `rank`: sets *run to the next one, and returns 0 when there is none. *at is 0 before
   the first. The list is computed, not stored: calls also walk those of other ranks, and a layer of tensors owns no
   memory. */
static int mti_run_next(const mt_param *p, int rank, int64_t *at, mti_shard_run *run) {
    int64_t pieces = p->desc.copies > 1 ? p->local_features / mti_piece_features(&p->desc) : 0;
    int64_t runs = pieces ? 2 * pieces : p->desc.parts * p->shards;
    for (run->count = 0; run->count == 0 && *at < runs; ++*at) {
        if (pieces) mti_piece_run(p, rank, *at, run);
        else mti_part_run(p, rank, *at, run);
    }
    return run->count > 0;
}

/* Returns the view of virtual shard `shard` of t, which is a value, a gradient or a moment of p. */
static mt_tensor mti_param_shard(const mt_param *p, mt_tensor t, int shard) {
    int64_t features = p->local_features / p->shards;
    int64_t rows = p->desc.placement == MT_SPLIT_COLS ? p->desc.rows : features;
    int64_t cols = p->desc.placement == MT_SPLIT_COLS ? features : p->desc.cols;
    return mt_tensor_rows(mt_tensor_make(t.data, t.dtype, rows * p->shards, cols), rows * shard, rows);
}

/* Returns the view of a run of t. */
static mt_tensor mti_run_view(const mt_param *p, mt_tensor t, mti_shard_run run) {
    t = mti_param_shard(p, t, run.shard);
    return p->desc.placement == MT_SPLIT_COLS ? mt_tensor_cols(t, run.local, run.count)
                                              : mt_tensor_rows(t, run.local, run.count);
}

/* Returns the view of a run of a whole tensor. */
static mt_tensor mti_run_of_whole(const mt_param *p, mt_tensor whole, mti_shard_run run) {
    return p->desc.placement == MT_SPLIT_COLS ? mt_tensor_cols(whole, run.global, run.count)
                                              : mt_tensor_rows(whole, run.global, run.count);
}

/* Returns the columns of local [tokens, local features] that belong to a run. */
static mt_tensor mti_run_cols(const mt_param *p, mt_tensor local, mti_shard_run run) {
    return mt_tensor_cols(local, run.shard * (p->local_features / p->shards) + run.local, run.count);
}

/* Returns 1 when the features of this rank are neighbours in the whole dimension, from *first on, without padding. */
static int mti_is_one_run(const mt_param *p, int64_t *first) {
    int64_t at = 0, end = -1;
    mti_shard_run run;
    *first = -1;
    while (mti_run_next(p, p->tp_rank, &at, &run)) {
        if (*first < 0) *first = end = run.global;
        if (run.global != end) return 0;
        end += run.count;
    }
    return end - *first == p->local_features;
}

/* Returns 1 when the local features of p are the global features, in the same order and without padding, on each rank:
   of several ranks, one may have all features, and the others padding. */
static int mti_is_whole(const mt_param *p) {
    int64_t first;
    return p->tp_size == 1 && mti_is_one_run(p, &first) && p->local_features == mti_split_dimension(p);
}

#define MTI_PARAM_ELEMENTS ((int64_t)1 << 48) /* padded to 1024 shards, they still fit in int64_t */
#define MTI_PARAM_PARTS 65536                 /* calls loop over the parts or pieces of a parameter */
#define MTI_SHARDS_MAX 1024                   /* of mt_context_desc.invariant */

static mt_status mti_padding_check(mt_context *ctx, const char *function, const mt_param_desc *d) {
    int64_t n = d->placement == MT_SPLIT_COLS ? d->cols : d->rows;
    int64_t other = d->placement == MT_SPLIT_COLS ? d->rows : d->cols;
    if (!d->padded_features) return MT_SUCCESS;
    if (d->placement == MT_REPLICATED || d->parts > 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s': padded_features is %lld, must be 0 %s", function, d->name,
                       (long long)d->padded_features,
                       d->parts > 1 ? "with several parts" : "with placement MT_REPLICATED");
    MT_TRY(mt_check_size(ctx, function, d->name, "padded_features", d->padded_features, n, MTI_PARAM_ELEMENTS / other));
    if (d->padded_features % mt_max(d->unit, 1) == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s': padded_features is %lld, must be a multiple of unit %lld", function,
                   d->name, (long long)d->padded_features, (long long)d->unit);
}

static mt_status mti_copies_check(mt_context *ctx, const char *function, const mt_param_desc *d) {
    int64_t copies = d->copies ? d->copies : 1, unit = d->unit ? d->unit : 1;
    int64_t n = d->placement == MT_SPLIT_COLS ? d->cols : d->rows;
    int64_t most = mt_min(MTI_PARAM_ELEMENTS / d->rows / d->cols, MTI_PARAM_PARTS / (n / unit));
    const char *without = d->placement == MT_REPLICATED                   ? "with placement MT_REPLICATED"
                          : d->placement == MT_SPLIT_COLS && d->rows != 1 ? "for a matrix with placement MT_SPLIT_COLS"
                          : d->parts > 1                                  ? "with several parts"
                          : d->padded_features                            ? "with padded_features"
                                                                          : NULL;
    if (copies == 1 && d->copied == 0) return MT_SUCCESS;
    if (copies == 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s': copied is %lld, must be 0 with one copy", function, d->name,
                       (long long)d->copied);
    if (without)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s': copies is %lld, must be 0 or 1 %s", function, d->name,
                       (long long)d->copies, without);
    MT_TRY(mt_check_integer(ctx, function, d->name, "copies", d->copies, 0, most));
    MT_TRY(mt_check_integer(ctx, function, d->name, "copied", d->copied, 1, unit));
    if ((unit - d->copied) % copies == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s': copies is %lld, must divide the %lld features that are not copied",
                   function, d->name, (long long)copies, (long long)(unit - d->copied));
}

/* Checks the fields that say how a parameter is split. ctx NULL: without a message. */
static mt_status mti_sharding_check(mt_context *ctx, const char *function, const mt_param_desc *d) {
    int64_t n = d->placement == MT_SPLIT_COLS ? d->cols : d->rows, parts = d->parts ? d->parts : 1;
    int64_t unit = d->unit ? d->unit : 1;
    MT_TRY(mt_check_size(ctx, function, d->name, "rows", d->rows, 1, INT64_MAX));
    MT_TRY(mt_check_size(ctx, function, d->name, "cols", d->cols, 1, INT64_MAX));
    MT_TRY(mt_check_enum(ctx, function, d->name, "placement", (int)d->placement, MT_PLACEMENT_WORDS));
    if (d->rows > MTI_PARAM_ELEMENTS / d->cols)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s' is [%lld, %lld], which is more than %lld elements", function,
                       d->name, (long long)d->rows, (long long)d->cols, (long long)MTI_PARAM_ELEMENTS);
    MT_TRY(mt_check_integer(ctx, function, d->name, "parts", d->parts, 0, MTI_PARAM_PARTS));
    MT_TRY(mt_check_size(ctx, function, d->name, "unit", d->unit, 0, INT64_MAX));
    if (n % parts != 0 || n / parts % unit != 0)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: %lld features of '%s' cannot be split into %lld parts of whole units of %lld", function,
                       (long long)n, d->name, (long long)parts, (long long)unit);
    if (d->placement == MT_REPLICATED && (parts > 1 || unit > 1))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s': %s is %lld, but placement is MT_REPLICATED", function, d->name,
                       parts > 1 ? "parts" : "unit", (long long)(parts > 1 ? parts : unit));
    MT_TRY(mti_copies_check(ctx, function, d));
    return mti_padding_check(ctx, function, d);
}

/* Checks that the descriptions of the parameters may still change. */
static mt_status mti_params_open_check(mt_context *ctx, const char *function, const mt_params *params,
                                       const char *name) {
    if (!params->placed && !params->is_bound) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' comes after %s", function, name,
                   params->is_bound ? "mt_params_bind" : "mt_params_init");
}

static mt_status mti_param_check(mt_context *ctx, const mt_params *params, const mt_param_desc *d) {
    MT_TRY(mti_params_open_check(ctx, "mt_params_add", params, d->name));
    if (mt_params_find(params, d->name))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_params_add: there is already a parameter '%s'", d->name);
    MT_TRY(mti_sharding_check(ctx, "mt_params_add", d));
    MT_TRY(mt_check_float(ctx, "mt_params_add", d->name, "init_std", d->init_std, MT_FLOAT_AT_LEAST_0));
    if (d->init_std > 0.0f && d->init_value != 0.0f)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_params_add: '%s': init_value is %g, must be 0 with init_std", d->name,
                       (double)d->init_value);
    if (d->sequence_partial && d->placement != MT_REPLICATED)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_params_add: '%s' is sequence_partial, but placement is %s", d->name,
                       d->placement == MT_SPLIT_ROWS ? "MT_SPLIT_ROWS" : "MT_SPLIT_COLS");
    return MT_SUCCESS;
}

/* Makes space for one more parameter in the list. */
static mt_status mti_params_reserve(mt_context *ctx, mt_params *params) {
    int capacity = params->capacity ? 2 * params->capacity : 64;
    void *memory;
    if (params->count < params->capacity) return MT_SUCCESS;
    MT_TRY(mti_host_new(ctx, (size_t)capacity * sizeof *params->list, &memory));
    if (params->list) {
        memcpy(memory, params->list, (size_t)params->count * sizeof *params->list);
        mt_host_free(params->list);
    }
    params->list = (mt_param **)memory;
    params->capacity = capacity;
    return MT_SUCCESS;
}

MT_API mt_status mt_params_add(mt_context *ctx, mt_params *params, const mt_param_desc *desc, mt_param **out) {
    mt_param_desc named;
    mt_param *p;
    char name[MT_NAME_MAX];
    void *memory;
    MT_TRY(mt_create_check(ctx, "mt_params_add", params, desc, out));
    MT_TRY(mti_name(ctx, "mt_params_add", params, desc->name, "param", name));
    named = *desc;
    named.name = name;
    MT_TRY(mti_param_check(ctx, params, &named));
    MT_TRY(mti_params_reserve(ctx, params));
    MT_TRY(mti_host_new(ctx, sizeof(mti_entry), &memory)); /* its first member is the parameter */
    p = (mt_param *)memory;
    memcpy(p->name, name, sizeof name);
    named.name = p->name;
    mti_param_describe(p, &named, params->grid->tp_rank, params->grid->tp_size,
                       mti_shards(params->ctx, params->grid->tp), params->dtype);
    p->registry = params;
    p->index = params->count;
    params->list[params->count++] = p;
    *out = p;
    return MT_SUCCESS;
}

MT_API mt_status mt_param_set_weight_decay(mt_context *ctx, mt_param *param, int weight_decay) {
    static const char *const function = "mt_param_set_weight_decay";
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!param) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: param is NULL", function);
    if (!param->registry)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' is of a layer of tensors", function, param->name);
    if (weight_decay != 0 && weight_decay != 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: weight_decay of '%s' is %d, must be 0 or 1", function, param->name,
                       weight_decay);
    MT_TRY(mti_params_open_check(ctx, function, param->registry, param->name));
    param->desc.weight_decay = weight_decay;
    return MT_SUCCESS;
}

/* Removes the newest parameter, which mt_param_bind may have bound. */
static void mti_params_remove_last(mt_params *params) {
    const mt_param *last = params->list[params->count - 1];
    int kind;
    for (kind = 0; kind < MTI_KINDS; kind++) params->bound_count[kind] -= mti_home_of(last)->bound[kind] != NULL;
    mt_host_free(params->list[--params->count]);
}

MT_API mt_status mt_create_end(mt_params *params, size_t mark, void *block, size_t block_bytes, mt_status status) {
    if (status == MT_SUCCESS) return status;
    while (mt_params_mark(params) > mark) { /* the newest is a buffer or a parameter */
        if (params->buffers && params->buffers->mark + 1 == mt_params_mark(params)) mti_params_free_buffer(params);
        else if (!params->placed && !params->is_bound) mti_params_remove_last(params);
        else break;
    }
    if (block) memset(block, 0, block_bytes);
    return status;
}

MT_API int mt_params_shards(const mt_params *params) {
    return params ? mti_shards(params->ctx, params->grid->tp) * params->grid->tp_size : 1;
}
