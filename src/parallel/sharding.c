/* ---- which elements of a parameter a shard has ------------------------------------------------------------------- */

#pragma once
#include "params.c"

/* One of the blocks of a virtual shard: one of its `parts` or, with copies, the own features or the copied features of
   a piece. Its `count` features start at `local` in the shard and at `global` in the whole dimension. The rest of the
   block, up to `size` features, is padding. */
typedef struct mti_block {
    int shard; /* index among this rank's virtual shards */
    int copy;  /* 1: another block, which counts, has the same features */
    int64_t local, global, count, size;
} mti_block;

static int64_t mti_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Returns how many of n features each of `shards` shards has, padding included. */
static int64_t mti_shard_features(int64_t n, int64_t parts, int64_t unit, int shards) {
    return parts * mti_ceil_div(n / parts / unit, shards) * unit;
}

/* Returns n with the caller's padding: `padded` features, or n when padded is 0. */
static int64_t mti_padded(int64_t n, int64_t padded) { return padded ? padded : n; }

/* How a matrix is split over the tensor ranks. */
typedef struct mti_sharding {
    int64_t rows, cols; /* of the whole matrix */
    mt_placement placement;
    int64_t parts, unit, copies, copied;
    int shards;    /* virtual shards on a rank */
    int64_t local; /* size of the split dimension on a rank, padding included; rows if not split */
} mti_sharding;

/* Returns the size of the dimension that is split. */
static int64_t mti_sharding_features(const mti_sharding *s) {
    return s->placement == MT_SPLIT_COLS ? s->cols : s->rows;
}

/* Returns how many features a piece of a unit has of its own, and with them how many it has. */
static int64_t mti_piece_own(const mti_sharding *s) { return (s->unit - s->copied) / s->copies; }
static int64_t mti_piece_features(const mti_sharding *s) { return mti_piece_own(s) + s->copied; }

/* Returns the split over `ranks` ranks, each with `shards` virtual shards. */
static mti_sharding mti_sharding_of(const mt_param_desc *d, int shards, int ranks) {
    mti_sharding s;
    int64_t n, unit;
    s.rows = d->rows;
    s.cols = d->cols;
    s.placement = d->placement;
    s.parts = d->parts ? d->parts : 1;
    s.unit = unit = d->unit ? d->unit : 1;
    s.copies = d->copies ? d->copies : 1;
    s.copied = d->copied;
    s.shards = d->placement == MT_REPLICATED ? 1 : shards;
    s.local = n = mti_sharding_features(&s);
    if (d->placement == MT_REPLICATED) return s;
    if (s.copies > 1) {
        unit = mti_piece_features(&s);
        n = n / s.unit * s.copies * unit;
    }
    s.local = s.shards * mti_shard_features(mti_padded(n, d->padded_features), s.parts, unit, s.shards * ranks);
    return s;
}

/* Writes the shape of a rank's shard. A vector that is split by columns is one row for any number of virtual shards. */
static void mti_sharding_shape(const mti_sharding *s, int64_t *rows, int64_t *cols) {
    int vector = s->rows == 1;
    *rows = s->placement != MT_SPLIT_COLS ? s->local : vector ? 1 : s->shards * s->rows;
    *cols = s->placement != MT_SPLIT_COLS ? s->cols : vector ? s->local : s->local / s->shards;
}

/* Returns the number of blocks on a rank. Blocks are ordered by shard. A replicated matrix is a single block with all
   its rows. With copies, each piece has two blocks. */
static int64_t mti_sharding_blocks(const mti_sharding *s) {
    return s->copies > 1 ? s->local / mti_piece_features(s) * 2 : s->parts * s->shards;
}

/* Returns block number `index` of tensor rank `rank`, with copies. The blocks are the own features of a piece, then its
   copied features. */
static mti_block mti_piece_block(const mti_sharding *s, int rank, int64_t index) {
    int64_t own = mti_piece_own(s), size = own + s->copied, pieces = s->local / s->shards / size, piece = index / 2;
    int64_t global = (int64_t)rank * s->shards * pieces + piece, unit = global / s->copies;
    mti_block b;
    b.shard = (int)(piece / pieces);
    b.size = index % 2 ? s->copied : own;
    b.local = piece % pieces * size + (index % 2 ? own : 0);
    b.copy = index % 2 && global % s->copies > 0;
    b.count = b.size;
    b.global = unit * s->unit + (index % 2 ? s->unit - s->copied : global % s->copies * own);
    if (unit < mti_sharding_features(s) / s->unit) return b;
    b.count = 0; /* padding */
    b.global = mti_sharding_features(s);
    return b;
}

/* Returns block number `index` of tensor rank `rank`. */
static mti_block mti_sharding_block(const mti_sharding *s, int rank, int64_t index) {
    int64_t whole = mti_sharding_features(s) / s->parts, part = index % s->parts, before;
    mti_block b;
    if (s->copies > 1) return mti_piece_block(s, rank, index);
    if (s->placement == MT_REPLICATED) rank = 0;
    b.copy = 0;
    b.shard = (int)(index / s->parts);
    b.size = s->local / s->shards / s->parts;
    b.local = part * b.size;
    before = mt_min(whole, ((int64_t)rank * s->shards + b.shard) * b.size);
    b.global = part * whole + before;
    b.count = mt_min(b.size, whole - before);
    return b;
}

/* Returns the view of virtual shard `shard` of t, which is a rank's shard. */
static mt_tensor mti_sharding_shard(const mti_sharding *s, mt_tensor t, int shard) {
    int64_t features = s->local / s->shards;
    int64_t rows = s->placement == MT_SPLIT_COLS ? s->rows : features;
    int64_t cols = s->placement == MT_SPLIT_COLS ? features : s->cols;
    return mt_tensor_rows(mt_tensor_make(t.data, t.dtype, rows * s->shards, cols), rows * shard, rows);
}

/* Returns the view of block b of t, which is a rank's shard. */
static mt_tensor mti_sharding_view(const mti_sharding *s, mt_tensor t, mti_block b) {
    t = mti_sharding_shard(s, t, b.shard);
    return s->placement == MT_SPLIT_COLS ? mt_tensor_cols(t, b.local, b.count) : mt_tensor_rows(t, b.local, b.count);
}

/* The same for a parameter p. t is a value, a gradient or a moment of p. */
static mti_sharding mti_param_sharding(const mt_param *p) {
    mti_sharding s;
    s.rows = p->desc.rows;
    s.cols = p->desc.cols;
    s.placement = p->desc.placement;
    s.parts = p->desc.parts;
    s.unit = p->desc.unit;
    s.copies = p->desc.copies;
    s.copied = p->desc.copied;
    s.shards = p->shards;
    s.local = p->local_features;
    return s;
}

static int64_t mti_split_dimension(const mt_param *p) {
    return p->desc.placement == MT_SPLIT_COLS ? p->desc.cols : p->desc.rows;
}

static int64_t mti_param_blocks(const mt_param *p) {
    mti_sharding s = mti_param_sharding(p);
    return mti_sharding_blocks(&s);
}

static mti_block mti_param_block(const mt_param *p, int rank, int64_t index) {
    mti_sharding s = mti_param_sharding(p);
    return mti_sharding_block(&s, rank, index);
}

static mt_tensor mti_param_shard(const mt_param *p, mt_tensor t, int shard) {
    mti_sharding s = mti_param_sharding(p);
    return mti_sharding_shard(&s, t, shard);
}

static mt_tensor mti_param_block_view(const mt_param *p, mt_tensor t, mti_block b) {
    mti_sharding s = mti_param_sharding(p);
    return mti_sharding_view(&s, t, b);
}

/* Returns the columns of local [tokens, local features] that belong to block b of p's split dimension. */
static mt_tensor mti_block_cols(const mt_param *p, mt_tensor local, mti_block b) {
    return mt_tensor_cols(local, b.shard * (p->local_features / p->shards) + b.local, b.count);
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

/* Sets the shapes of this rank's value and gradient. */
static void mti_param_shape(const mt_params *params, mt_param *p) {
    mti_sharding s = mti_sharding_of(&p->desc, mti_shards(params->ctx, params->grid->tp), p->tp_size);
    int64_t rows, cols;
    p->shards = s.shards;
    p->local_features = s.local;
    mti_sharding_shape(&s, &rows, &cols);
    p->value = mt_tensor_make(NULL, params->dtype, rows, cols);
    p->grad = mt_tensor_make(NULL, MT_F32, rows, cols);
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
    p->desc = named;
    memcpy(p->name, name, sizeof name);
    p->desc.name = p->name;
    if (!p->desc.parts) p->desc.parts = 1;
    if (!p->desc.unit) p->desc.unit = 1;
    if (!p->desc.copies) p->desc.copies = 1;
    p->tp_rank = params->grid->tp_rank;
    p->tp_size = params->grid->tp_size;
    p->registry = params;
    p->index = params->count;
    mti_param_shape(params, p);
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
