/* ---- parallel self-attention ------------------------------------------------------------------------------------- */

#pragma once
#include "attention.h"
#include "authors.h"
#include "weights.h"
#include "mlp.c"
#include "../comm/communicator.h"
#include "../ops/attention_qkv.h"
#include "../parallel/hash_log.h"

MT_API mt_dropout mt_batch_dropout(const mt_batch *batch, float p, int64_t layer, int site) {
    mt_dropout d;
    memset(&d, 0, sizeof d);
    if (!batch) return d;
    d.at.seed = batch->seed;
    d.at.subsequence = (batch->step << 20) + ((uint64_t)layer << 2) + (uint64_t)site; /* bits: 44, 18 and 2 */
    d.at.offset = batch->random_offset;
    d.p = p;
    return d;
}

/* As mt_check_integer, for a field of the batch `name`. */
static mt_status mti_batch_field_check(mt_context *ctx, const char *function, const char *name, const char *field,
                                       int64_t value, int64_t low, int64_t high) {
    char full[64];
    snprintf(full, sizeof full, "%s.%s", name, field);
    return mt_check_integer(ctx, function, NULL, full, value, low, high);
}

/* max_seq 0: there is no limit. mti_scores_check checks the fields that change scores. */
static mt_status mti_batch_check(mt_context *ctx, const char *function, const char *name, const mt_batch *batch,
                                 int64_t max_seq) {
    if (!batch) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, name);
    MT_TRY(mti_batch_field_check(ctx, function, name, "sequences", batch->sequences, 1, INT64_MAX));
    MT_TRY(mti_batch_field_check(ctx, function, name, "seq", batch->seq, 1, INT64_MAX));
    if (batch->sequences > INT32_MAX / batch->seq)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s has %lld sequences of %lld tokens, must have at most %d tokens",
                       function, name, (long long)batch->sequences, (long long)batch->seq, INT32_MAX);
    MT_TRY(mti_batch_field_check(ctx, function, name, "first_sequence", batch->first_sequence, 0,
                                 INT64_MAX / batch->seq - batch->sequences));
    if (batch->bias.first_head != 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: %s.bias.first_head is %lld, must be 0: a batch has the bias of all heads", function, name,
                       (long long)batch->bias.first_head);
    if (max_seq > 0 && batch->seq > max_seq)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s.seq is %lld, must be at most max_seq %lld", function, name,
                       (long long)batch->seq, (long long)max_seq);
    return MT_SUCCESS;
}

static const char *mti_shards_name(const mt_context *ctx) {
    return mt_context_invariant(ctx) ? "virtual shards (mt_context_desc.invariant)" : "tensor ranks";
}

/* Returns into how many pieces each query group is divided, so that each of `shards` shards has a piece. A piece has a
   copy of the key and the value. The number is 1 when there are enough groups. Otherwise it is one with which the shard
   with the most query heads has as few as possible, and of these the smallest one. */
static int64_t mti_group_pieces(int64_t heads, int64_t kv_heads, int shards) {
    int64_t n = heads / kv_heads, best = 1, most = INT64_MAX, i, k;
    if (kv_heads >= shards) return 1;
    for (i = 1; i <= n / i; i++) /* i and n / i are divisors of n */
        for (k = 0; k < 2 && n % i == 0; k++) {
            int64_t pieces = k == 0 ? i : n / i, all = kv_heads * pieces;
            int64_t share = mt_round_up(all, shards) / shards * (n / pieces);
            if (all < shards || share > most || (share == most && pieces > best)) continue;
            best = pieces;
            most = share;
        }
    return best;
}

/* Checks what a layout other than MT_QKV_PER_GROUP needs. */
static mt_status mti_qkv_layout_check(mt_context *ctx, const char *function, const char *name,
                                      const mt_self_attention_desc *d, int shards) {
    int divided = d->kv_heads < shards; /* query groups are divided into pieces */
    int64_t split = divided ? d->heads : d->kv_heads;
    if (d->qkv_layout == MT_QKV_PER_GROUP) return MT_SUCCESS;
    if (d->qkv_layout == MT_QKV_CONCATENATED && d->heads != d->kv_heads)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: '%s' has %lld heads and %lld kv_heads, which must be equal with MT_QKV_CONCATENATED; use "
                       "MT_QKV_PER_GROUP or MT_QKV_SEPARATE",
                       function, name, (long long)d->heads, (long long)d->kv_heads);
    if (split % shards != 0)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: '%s': %lld %s are not a multiple of %d %s, which %s needs; use MT_QKV_PER_GROUP", function,
                       name, (long long)split, divided ? "heads" : "kv_heads", shards, mti_shards_name(ctx),
                       d->qkv_layout == MT_QKV_SEPARATE ? "MT_QKV_SEPARATE" : "MT_QKV_CONCATENATED");
    return MT_SUCCESS;
}

/* The number of features of a head that rotary turns. */
static int64_t mti_attention_rotary_dim(const mt_self_attention_desc *d) {
    return d->scores.rotary_dim ? d->scores.rotary_dim : d->hidden / d->heads;
}

/* Checks max_seq and the fields of scores together with rotary_base. */
static mt_status mti_attention_rotary_check(mt_context *ctx, const char *function, const char *name,
                                            const mt_self_attention_desc *d) {
    const mt_scores_desc *s = &d->scores;
    if (s->rotary_base == 0.0f) {
        if (d->max_seq == 0 && s->rotary_form != MT_ROTARY_HALVES)
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "%s: '%s': scores.rotary_form is MT_ROTARY_PAIRS, must be MT_ROTARY_HALVES without "
                           "rotary_base",
                           function, name);
        if (d->max_seq == 0 && s->rotary_dim == 0) return MT_SUCCESS;
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s': %s is %lld, must be 0 without scores.rotary_base", function,
                       name, d->max_seq ? "max_seq" : "scores.rotary_dim",
                       (long long)(d->max_seq ? d->max_seq : s->rotary_dim));
    }
    MT_TRY(mt_check_size(ctx, function, name, "max_seq", d->max_seq, 1, INT32_MAX));
    MT_TRY(mt_check_size(ctx, function, name, "scores.rotary_dim", s->rotary_dim, 0, d->hidden / d->heads));
    if (mti_attention_rotary_dim(d) % 2 == 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s': %s is %lld, must be even for rotary", function, name,
                   s->rotary_dim ? "scores.rotary_dim" : "the head size", (long long)mti_attention_rotary_dim(d));
}

/* shards is the number of parts into which the query groups are split: V in invariant mode, and t otherwise. kv_heads
   must not be 0: the caller has set its default. */
static mt_status mti_heads_check(mt_context *ctx, const char *function, const char *name, int64_t hidden, int64_t heads,
                                 int64_t kv_heads, int shards) {
    if (hidden % heads != 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s': hidden is %lld, must be a multiple of heads %lld", function, name,
                       (long long)hidden, (long long)heads);
    if (heads % kv_heads != 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s': kv_heads is %lld, must divide heads %lld", function, name,
                       (long long)kv_heads, (long long)heads);
    if (heads < shards)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s': %lld heads cannot be split over %d %s", function, name,
                       (long long)heads, shards, mti_shards_name(ctx));
    return MT_SUCCESS;
}

static mt_status mti_attention_check(mt_context *ctx, const char *function, const char *name,
                                     const mt_self_attention_desc *d, int shards) {
    MT_TRY(mt_check_integer(ctx, function, name, "hidden", d->hidden, 1, INT32_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "heads", d->heads, 1, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, name, "kv_heads", d->kv_heads, 0, INT64_MAX));
    MT_TRY(mt_scores_check(ctx, function, name, &d->scores));
    MT_TRY(mt_check_integer(ctx, function, name, "max_seq", d->max_seq, 0, INT32_MAX));
    MT_TRY(mt_check_float(ctx, function, name, "dropout", d->dropout, MT_FLOAT_PROBABILITY));
    MT_TRY(mt_check_integer(ctx, function, name, "layer_number", d->layer_number, 0, INT64_MAX));
    MT_TRY(mt_check_enum(ctx, function, name, "qkv_layout", (int)d->qkv_layout, MT_QKV_LAYOUT_WORDS));
    MT_TRY(mti_init_check(ctx, function, name, &d->init));
    MT_TRY(mti_heads_check(ctx, function, name, d->hidden, d->heads, d->kv_heads, shards));
    MT_TRY(mti_attention_rotary_check(ctx, function, name, d));
    return mti_qkv_layout_check(ctx, function, name, d, shards);
}

/* Sets *out to a table [rows, cols], MT_F32, of the registry. */
static mt_status mti_attention_buffer(mt_context *ctx, mt_params *params, int64_t rows, int64_t cols, mt_tensor *out) {
    void *table;
    MT_TRY(mt_params_buffer(ctx, params, (size_t)(rows * cols) * sizeof(float), 0, &table));
    *out = mt_tensor_f32((const float *)table, rows, cols);
    return MT_SUCCESS;
}

/* The number of groups that are not empty on a rank with places for `groups` groups, which begin with number `first`.
   all is the number of groups of the model. */
static int64_t mti_used_groups(int64_t groups, int64_t first, int64_t all) {
    return mt_max(0, mt_min(groups, all - first));
}

/* The number of query heads in the non-empty groups of this rank. */
static int64_t mti_attention_heads_here(const mt_self_attention *a) {
    int64_t all = a->desc.kv_heads * a->pieces;
    return mti_used_groups(a->groups, a->first_group, all) * (a->desc.heads / all);
}

/* Makes the tables of rotary and of ALiBi. Without a registry (params NULL), the caller sets them. */
static mt_status mti_attention_tables(mt_context *ctx, mt_params *params, mt_self_attention *out) {
    const mt_self_attention_desc *d = &out->desc;
    int64_t heads = mti_attention_heads_here(out), first = out->first_group * (d->heads / (d->kv_heads * out->pieces));
    if (!params) return MT_SUCCESS;
    if (d->scores.rotary_base > 0.0f) {
        MT_TRY(mti_attention_buffer(ctx, params, d->max_seq, mti_attention_rotary_dim(d), &out->rotary));
        MT_TRY(mt_rotary_table(ctx, d->scores.rotary_base, out->rotary));
    }
    if (!d->scores.alibi || heads == 0) return MT_SUCCESS;
    MT_TRY(mti_attention_buffer(ctx, params, 1, heads, &out->alibi_slopes));
    return mt_alibi_slopes(ctx, d->heads, first, out->alibi_slopes);
}

/* What the layers of an attention block are made from, besides a desc of each kind of layer. */
typedef struct mti_heads {
    int64_t heads, kv_heads, head_dim, pieces; /* pieces: of each query group */
} mti_heads;

/* Returns the fields of a column-parallel layer of an attention block that do not depend on what it computes. */
static mt_linear_desc mti_attention_linear(int64_t in_features, int no_bias, int sequence_parallel, float init_std,
                                           int add_to_dx) {
    mt_linear_desc l;
    memset(&l, 0, sizeof l);
    l.in_features = in_features;
    l.no_bias = no_bias;
    l.sequence_parallel = sequence_parallel;
    l.init_std = init_std;
    l.add_to_dx = add_to_dx;
    return l;
}

/* Makes the layer of queries, keys or values, or of all three. l is from mti_attention_linear. The last `copied`
   features of a unit are keys and values, of which each piece of a query group has a copy. A unit is only divided when
   there are pieces. */
static mt_status mti_attention_input(mt_context *ctx, const mti_origin *from, int index, const char *name,
                                     const char *suffix, mt_linear_desc l, int64_t pieces, int64_t out_features,
                                     int64_t parts, int64_t unit, int64_t copied, mt_column_parallel_linear *out) {
    l.out_features = out_features;
    l.parts = parts;
    l.unit = unit;
    if (copied > 0 && pieces > 1) {
        l.split.copies = pieces;
        l.split.copied = copied;
    }
    l.parts_by_shard = parts > 1;
    return mti_origin_column(ctx, from, index, name, suffix, &l, out);
}

/* Makes the layers NAME.query, NAME.key and NAME.value. key_value has two layers. */
static mt_status mti_attention_separate(mt_context *ctx, const mti_origin *from, const char *name, const mti_heads *h,
                                        const mt_linear_desc *of_query, const mt_linear_desc *of_key_value,
                                        mt_column_parallel_linear *query, mt_column_parallel_linear *key_value) {
    static const char *const names[] = {"key", "value"};
    int64_t groups = h->kv_heads, head = h->head_dim, queries = h->heads / groups * head;
    int i;
    MT_TRY(mti_attention_input(ctx, from, 0, name, "query", *of_query, h->pieces, groups * queries, 1,
                               queries / h->pieces, 0, query));
    for (i = 0; i < 2; i++)
        MT_TRY(mti_attention_input(ctx, from, 1 + i, name, names[i], *of_key_value, h->pieces, groups * head, 1, head,
                                   head, &key_value[i]));
    return MT_SUCCESS;
}

/* Makes the layers that compute queries, keys and values. width is the number of columns of a query group. */
static mt_status mti_attention_inputs(mt_context *ctx, const mti_origin *from, const char *name, const mti_heads *h,
                                      mt_self_attention *out) {
    const mt_self_attention_desc *d = &out->desc;
    int64_t groups = h->kv_heads, head = h->head_dim, width = (h->heads / groups + 2) * head;
    mt_linear_desc l = mti_attention_linear(d->hidden, d->no_bias, d->sequence_parallel, d->init.std, d->add_to_dx);
    if (d->qkv_layout == MT_QKV_SEPARATE)
        return mti_attention_separate(ctx, from, name, h, &l, &l, &out->separate[0], &out->separate[1]);
    if (d->qkv_layout == MT_QKV_CONCATENATED)
        return mti_attention_input(ctx, from, 0, name, "linear_qkv", l, h->pieces, groups * width, 3, head, 0,
                                   &out->qkv);
    return mti_attention_input(ctx, from, 0, name, "linear_qkv", l, h->pieces, groups * width, 1, width, 2 * head,
                               &out->qkv);
}

/* Makes the row-parallel layer. The caller sets the other fields of l. */
static mt_status mti_attention_proj(mt_context *ctx, const mti_origin *from, const char *name, const mti_heads *h,
                                    mt_linear_desc l, mt_row_parallel_linear *out) {
    l.in_features = h->heads * h->head_dim;
    l.out_features = l.in_features;
    l.unit = h->heads / h->kv_heads / h->pieces * h->head_dim;
    l.input_is_parallel = 1;
    return mti_origin_row(ctx, from, name, "linear_proj", &l, out);
}

/* Sets what follows from a desc that was checked. */
static void mti_attention_begin(const mt_self_attention_desc *d, int64_t pieces, mt_self_attention *out) {
    memset(out, 0, sizeof *out);
    out->desc = *d;
    out->head_dim = d->hidden / d->heads;
    out->pieces = pieces;
}

/* Makes the layers. mti_attention_begin was called. */
static mt_status mti_attention_create(mt_context *ctx, const mti_origin *from, const char *name,
                                      mt_self_attention *out) {
    const mt_self_attention_desc *d = &out->desc;
    mt_linear_desc proj = mti_attention_linear(0, d->no_bias, d->sequence_parallel, d->init.output_std, 0);
    mti_heads h;
    h.heads = d->heads;
    h.kv_heads = d->kv_heads;
    h.head_dim = out->head_dim;
    h.pieces = out->pieces;
    proj.skip_bias_add = d->skip_bias_add;
    MT_TRY(mti_attention_inputs(ctx, from, name, &h, out));
    MT_TRY(mti_attention_proj(ctx, from, name, &h, proj, &out->proj));
    out->groups = out->proj.local_features / out->proj.desc.unit;
    out->first_group = out->proj.weight->tp_rank * out->groups;
    return mti_attention_tables(ctx, from->params, out);
}

/* Refuses context ranks: each would see the keys of its own tokens alone. */
static mt_status mti_expect_whole_sequences(mt_context *ctx, const char *function, const char *name,
                                            const mt_params *params) {
    const mt_grid *grid = mt_params_grid(params);
    if (grid->cp_size == 1) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_UNSUPPORTED,
                   "%s: '%s' needs whole sequences, but %d context ranks have parts of them (mt_grid_desc.cp)",
                   function, name, grid->cp_size);
}

MT_API mt_status mt_self_attention_create(mt_context *ctx, mt_params *params, const char *name,
                                          const mt_self_attention_desc *desc, mt_self_attention *out) {
    mti_origin from = mti_from_registry(params);
    mt_self_attention_desc d;
    char full[MT_NAME_MAX];
    size_t mark;
    MT_TRY(mt_create_check(ctx, "mt_self_attention_create", params, desc, out));
    MT_TRY(mt_layer_name(ctx, params, name, full));
    name = full;
    d = *desc;
    if (!d.kv_heads) d.kv_heads = d.heads;
    MT_TRY(mti_attention_check(ctx, "mt_self_attention_create", name, &d, mt_params_shards(params)));
    MT_TRY(mti_expect_whole_sequences(ctx, "mt_self_attention_create", name, params));
    mark = mt_params_mark(params);
    mti_attention_begin(&d, mti_group_pieces(d.heads, d.kv_heads, mt_params_shards(params)), out);
    return mt_create_end(params, mark, out, sizeof *out, mti_attention_create(ctx, &from, name, out));
}

/* Takes the rotary table and the slopes of ALiBi from the caller's tensors. */
static mt_status mti_own_tables(mt_context *ctx, const char *function, const mt_self_attention_tensors *tensors,
                                mt_self_attention *out) {
    const mt_self_attention_desc *d = &out->desc;
    out->rotary = tensors->rotary;
    out->alibi_slopes = tensors->alibi_slopes;
    if (d->scores.rotary_base > 0.0f)
        MT_TRY(mt_tensor_check(ctx, function, "rotary", tensors->rotary, MT_ARG_F32, d->max_seq,
                               mti_attention_rotary_dim(d)));
    else if (tensors->rotary.data)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: there is a rotary table, but rotary_base is 0", function);
    if (d->scores.alibi && !tensors->alibi_slopes.data)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: alibi is 1, but alibi_slopes is mt_none()", function);
    if (d->scores.alibi)
        return mt_tensor_check(ctx, function, "alibi_slopes", tensors->alibi_slopes, MT_ARG_F32, 1,
                               mti_attention_heads_here(out));
    if (!tensors->alibi_slopes.data) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: there are alibi_slopes, but alibi is 0", function);
}

static mt_status mti_own_attention(mt_context *ctx, const char *function, const char *name,
                                   const mt_self_attention_tensors *tensors, const mti_origin *from,
                                   mt_self_attention *out) {
    MT_TRY(mti_attention_create(ctx, from, name, out));
    MT_TRY(mti_own_types(ctx, function, from));
    return mti_own_tables(ctx, function, tensors, out);
}

MT_API mt_status mt_self_attention_from_tensors(mt_context *ctx, mt_comm *tp, const char *name,
                                                const mt_self_attention_desc *desc,
                                                const mt_self_attention_tensors *tensors, mt_param *params,
                                                mt_self_attention *out) {
    static const char *const function = "mt_self_attention_from_tensors";
    mt_self_attention_desc d;
    mti_origin from;
    mt_self_attention made;
    int shards, separate;
    MT_TRY(mti_own_block_check(ctx, function, tp, desc, tensors, params, out));
    d = *desc; /* it may be that of *out */
    memset(out, 0, sizeof *out);
    if (!d.kv_heads) d.kv_heads = d.heads;
    shards = mt_context_invariant(ctx) ? mt_context_invariant(ctx) : mt_comm_size(tp);
    MT_TRY(mti_attention_check(ctx, function, name ? name : "attention", &d, shards));
    if (d.kv_heads < shards)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %lld kv_heads cannot be split over %d %s; use mt_self_attention_create",
                       function, (long long)d.kv_heads, shards, mti_shards_name(ctx));
    separate = d.qkv_layout == MT_QKV_SEPARATE;
    from = mti_from_own(tp, separate ? tensors->separate : &tensors->qkv, separate ? 3 : 1, &tensors->proj, params);
    mti_attention_begin(&d, 1, &made);
    MT_TRY(mti_own_attention(ctx, function, name ? name : "", tensors, &from, &made));
    *out = made;
    return MT_SUCCESS;
}

/* Returns 1 when the unit of the layer can be a query group: a whole number of heads, at least three (a query, a key
   and a value), which is not divided. */
static int mti_is_per_group(const mt_column_parallel_linear *layer, int64_t head_dim) {
    int64_t unit = layer->desc.unit;
    return layer->desc.parts <= 1 && layer->desc.split.copies <= 1 && head_dim > 0 && unit / head_dim >= 3 &&
           unit % head_dim == 0;
}

/* Returns 1 when the parts of the layer can be the queries, keys and values of heads. */
static int mti_is_concatenated(const mt_column_parallel_linear *layer, int64_t head_dim) {
    return layer->desc.parts == 3 && head_dim > 0 && layer->desc.unit == head_dim;
}

/* Sets what the batch says of the scores. first_head is the first query head of the call. */
static void mti_batch_scores(const mt_batch *batch, int64_t first_head, mt_attention_desc *s) {
    s->lengths = batch->lengths;
    s->cu_seqlens = batch->cu_seqlens;
    s->documents = batch->documents;
    s->bias = batch->bias;
    s->bias.first_head = first_head;
}

/* Returns the desc of a rank that has places for `groups` query groups. all is the number of groups of the model. */
static mt_attention_desc mti_rank_attention(int64_t groups, int tp_rank, int64_t all, int64_t heads_per_group,
                                            int64_t head_dim, mt_qkv_layout qkv_layout, const mt_batch *batch) {
    int64_t first = tp_rank * groups;
    mt_attention_desc s;
    memset(&s, 0, sizeof s);
    s.batch = batch->sequences;
    s.seq = batch->seq;
    s.groups = mti_used_groups(groups, first, all);
    s.heads_per_group = heads_per_group;
    s.head_dim = head_dim;
    s.qkv_layout = qkv_layout;
    mti_batch_scores(batch, first * heads_per_group, &s);
    s.dropout.at.first_row = batch->first_sequence;
    s.dropout.at.first_col = first * heads_per_group;
    s.dropout.at.global_cols = all * heads_per_group;
    return s;
}

MT_API mt_attention_desc mt_core_attention_desc(const mt_column_parallel_linear *qkv, int64_t head_dim,
                                                const mt_batch *batch) {
    int64_t width;
    int parts;
    mt_attention_desc none;
    memset(&none, 0, sizeof none);
    if (!batch || !qkv || !qkv->weight) return none;
    parts = mti_is_concatenated(qkv, head_dim);
    if (!parts && !mti_is_per_group(qkv, head_dim)) return none;
    width = parts ? 3 * head_dim : qkv->desc.unit; /* of a query group */
    return mti_rank_attention(qkv->local_features / width, qkv->weight->tp_rank, qkv->desc.out_features / width,
                              width / head_dim - 2, head_dim, parts ? MT_QKV_CONCATENATED : MT_QKV_PER_GROUP, batch);
}

/* Sets the dropout of a desc from mti_rank_attention, which has the place of the probabilities. */
static void mti_attention_dropout(mt_attention_desc *s, mt_dropout random) {
    s->dropout.p = random.p;
    s->dropout.at.seed = random.at.seed;
    s->dropout.at.subsequence = random.at.subsequence;
    s->dropout.at.offset = random.at.offset;
}

static mt_attention_desc mti_attention_desc(const mt_self_attention *a, const mt_batch *batch, int training) {
    int64_t groups = a->desc.kv_heads * a->pieces;
    mt_attention_desc s = mti_rank_attention(a->groups, a->proj.weight->tp_rank, groups, a->desc.heads / groups,
                                             a->head_dim, a->desc.qkv_layout, batch);
    mti_attention_dropout(&s, mt_batch_dropout(batch, training ? a->desc.dropout : 0.0f, a->desc.layer_number, 0));
    s.scores = a->desc.scores;
    s.scores.alibi_slopes = (const float *)a->alibi_slopes.data;
    return s;
}

static mt_status mti_query_groups_check(mt_context *ctx, const char *function, const char *name, int64_t features,
                                        const mt_column_parallel_linear *layer) {
    const mt_linear_desc *d = &layer->desc;
    if (mti_is_per_group(layer, features)) return MT_SUCCESS;
    if (d->parts > 1 || d->split.copies > 1)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: '%s': '%s' has no query groups: its %s is %lld", function, name,
                       layer->name, d->parts > 1 ? "parts" : "copies",
                       (long long)(d->parts > 1 ? d->parts : d->split.copies));
    return mt_fail(ctx, MT_ERR_SHAPE,
                   "%s: '%s': features is %lld, must divide the unit %lld of '%s' into three heads or more", function,
                   name, (long long)features, (long long)d->unit, layer->name);
}

MT_API mt_status mt_qk_norm_create(mt_context *ctx, mt_params *params, const char *name, const mt_norm_layer_desc *desc,
                                   const mt_column_parallel_linear *layer, mt_qk_norm *out) {
    static const char *const function = "mt_qk_norm_create";
    char full[MT_NAME_MAX], q[MT_NAME_MAX], k[MT_NAME_MAX];
    mt_norm_layer_desc per_head;
    size_t mark;
    mt_status status;
    MT_TRY(mt_create_check(ctx, function, params, desc, out));
    MT_TRY(mt_layer_name(ctx, params, name, full));
    name = full;
    if (!layer || !layer->weight) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the layer was not created", function);
    if (desc->groups != 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s': groups is %lld, must be 0: they are those of '%s'", function,
                       name, (long long)desc->groups, layer->name);
    MT_TRY(mti_query_groups_check(ctx, function, name, desc->features, layer));
    per_head = *desc;
    per_head.groups = layer->desc.out_features / layer->desc.unit;
    MT_TRY(mt_param_name(ctx, q, name, "q_layernorm"));
    MT_TRY(mt_param_name(ctx, k, name, "k_layernorm"));
    out->unit = layer->desc.unit;
    mark = mt_params_mark(params);
    status = mt_norm_layer_create(ctx, params, q, &per_head, &out->q);
    if (status == MT_SUCCESS) status = mt_norm_layer_create(ctx, params, k, &per_head, &out->k);
    return mt_create_end(params, mark, out, sizeof *out, status);
}

/* Checks qkv [tokens, groups * unit], and makes the views of its queries and keys for the norm layers: *q [tokens *
   groups, unit - 2 * head_dim] and *k [tokens * groups, head_dim]. */
static mt_status mti_qk_norm_views(mt_context *ctx, const char *function, const mt_qk_norm *norm, const char *qkv_name,
                                   mt_tensor qkv, mt_tensor *q, mt_tensor *k) {
    int64_t groups, head_dim;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mt_check_param(ctx, function, norm ? norm->q.weight : NULL));
    groups = norm->q.local_groups;
    head_dim = norm->q.desc.features;
    MT_TRY(mt_check_activation(ctx, function, norm->q.weight, qkv_name, qkv, qkv.rows, groups * norm->unit));
    if (qkv.rows > 1 && mt_tensor_ld(qkv) != qkv.cols)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s [%lld, %lld] with ld %lld must be contiguous", function, qkv_name,
                       (long long)qkv.rows, (long long)qkv.cols, (long long)mt_tensor_ld(qkv));
    qkv = mt_tensor_reshape(qkv, qkv.rows * groups, norm->unit);
    *q = mt_tensor_cols(qkv, 0, norm->unit - 2 * head_dim);
    *k = mt_tensor_cols(qkv, norm->unit - 2 * head_dim, head_dim);
    return MT_SUCCESS;
}

/* Applies the rule of the heads of a rank as a whole: none describes rows and columns that are seen in another width.
   gradients: 1: of the gradients of the parameters, 0: of their values */
static mt_status mti_qk_norm_rule(mt_context *ctx, const char *function, const mt_qk_norm *norm, mt_tensor qkv,
                                  int gradients) {
    static const mt_rule rules[2] = {{"qkv q k q.bias k.bias", "RRRRR cRRRR rRRRR", NULL},
                                     {"dqkv q k q.bias k.bias", "RRRRR cPPPP rPPPP PPPPP", NULL}};
    static const char *const names[] = {"q", "k", "q.bias", "k.bias"};
    const mt_param *params[4];
    const int is = gradients ? MT_ARG_GRADIENT : 0;
    mt_operand operands[5];
    int i, count = 1;
    params[0] = norm->q.weight, params[1] = norm->k.weight, params[2] = norm->q.bias, params[3] = norm->k.bias;
    operands[0].name = gradients ? "dqkv" : "qkv";
    operands[0].t = qkv;
    operands[0].use = MT_ARG_IN_OUT | is;
    for (i = 0; i < 4; i++) {
        if (!params[i]) continue;
        operands[count].name = names[i];
        operands[count].t = gradients ? params[i]->grad : params[i]->value;
        operands[count++].use = (gradients ? MT_ARG_IN_OUT : MT_ARG_IN) | is;
    }
    return mt_rule_check(ctx, function, &rules[gradients], operands, count);
}

/* With saved, the norms read copies of the queries and keys. Backward needs the copies, because forward overwrites the
   originals in qkv. */
static mt_status mti_qk_norm_forward(mt_context *ctx, const mt_qk_norm *norm, mt_tensor q, mt_tensor k,
                                     mt_qk_norm_saved *saved) {
    mt_tensor q_in = q, k_in = k;
    if (saved) {
        MT_TRY(mt_arena_tensor(ctx, q.dtype, q.rows, q.cols, &q_in));
        MT_TRY(mt_arena_tensor(ctx, k.dtype, k.rows, k.cols, &k_in));
        MT_TRY(mt_copy(ctx, q, q_in));
        MT_TRY(mt_copy(ctx, k, k_in));
    }
    MT_TRY(mt_norm_layer_forward(ctx, &norm->q, q_in, q, saved ? &saved->q : NULL));
    return mt_norm_layer_forward(ctx, &norm->k, k_in, k, saved ? &saved->k : NULL);
}

MT_API mt_status mt_qk_norm_forward(mt_context *ctx, const mt_qk_norm *norm, mt_tensor qkv, mt_qk_norm_saved *saved) {
    static const char *const function = "mt_qk_norm_forward";
    mt_tensor q, k;
    MT_TRY(mti_qk_norm_views(ctx, function, norm, "qkv", qkv, &q, &k));
    MT_TRY(mti_qk_norm_rule(ctx, function, norm, qkv, 0));
    mt_check_pause(ctx);
    return mt_check_resume(ctx, mti_qk_norm_forward(ctx, norm, q, k, saved));
}

static mt_status mti_qk_norm_backward(mt_context *ctx, const mt_qk_norm *norm, mt_tensor q, mt_tensor k,
                                      const mt_qk_norm_saved *saved) {
    MT_TRY(mt_norm_layer_backward(ctx, &norm->q, q, mt_none(), q, &saved->q));
    return mt_norm_layer_backward(ctx, &norm->k, k, mt_none(), k, &saved->k);
}

MT_API mt_status mt_qk_norm_backward(mt_context *ctx, const mt_qk_norm *norm, mt_tensor dqkv,
                                     const mt_qk_norm_saved *saved) {
    static const char *const function = "mt_qk_norm_backward";
    mt_tensor q, k;
    MT_TRY(mti_qk_norm_views(ctx, function, norm, "dqkv", dqkv, &q, &k));
    if (!saved) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: saved is NULL", function);
    MT_TRY(mti_qk_norm_rule(ctx, function, norm, dqkv, 1));
    mt_check_pause(ctx);
    return mt_check_resume(ctx, mti_qk_norm_backward(ctx, norm, q, k, saved));
}

/* Returns the desc of virtual shard number `shard` of this rank. groups is the number of this rank's groups, empty ones
   included. *first is the first group of the shard, counted on this rank. */
static mt_attention_desc mti_attention_shard(const mt_attention_desc *whole, int64_t groups, int shard, int shards,
                                             int64_t *first) {
    int64_t each = groups / shards;
    mt_attention_desc s = *whole;
    *first = mt_min(whole->groups, shard * each);
    s.groups = mt_min(each, whole->groups - *first);
    s.dropout.at.first_col += *first * s.heads_per_group;
    s.bias.first_head += *first * s.heads_per_group;
    if (s.scores.alibi_slopes) s.scores.alibi_slopes += *first * s.heads_per_group;
    return s;
}

/* The number of columns of a query group in qkv and in out. */
static int64_t mti_qkv_width(const mt_attention_desc *s) { return (s->heads_per_group + 2) * s->head_dim; }
static int64_t mti_out_width(const mt_attention_desc *s) { return s->heads_per_group * s->head_dim; }

/* Returns the columns of t for desc->groups groups of `width` columns. first is the number of the first group. */
static mt_tensor mti_attention_cols(const mt_attention_desc *desc, mt_tensor t, int64_t first, int64_t width) {
    return mt_tensor_cols(t, first * width, desc->groups * width);
}

/* Writes zeros to the columns of the empty groups. In t they follow those of desc->groups groups of `width` columns. */
static mt_status mti_attention_zero_rest(mt_context *ctx, const mt_attention_desc *desc, mt_tensor t, int64_t width) {
    int64_t used = desc->groups * width;
    return used == t.cols ? MT_SUCCESS : mt_fill(ctx, mt_tensor_cols(t, used, t.cols - used), 0.0f);
}

static mt_tensor mti_attention_lse(const mt_attention_desc *desc, mt_tensor lse, int64_t first) {
    return mti_some_rows(lse, first * desc->heads_per_group, desc->groups * desc->heads_per_group);
}

/* Returns 1 when the columns of desc->groups groups are not one piece of qkv, but three. */
static int mti_qkv_in_pieces(const mt_attention_desc *desc, mt_tensor qkv) {
    return desc->qkv_layout == MT_QKV_SEPARATE && qkv.cols != desc->groups * mti_qkv_width(desc);
}

/* Sets *shard to the columns of desc->groups groups of qkv, or to scratch memory for mti_qkv_copy when they are in
   pieces. first is the number of the first group. */
static mt_status mti_qkv_shard(mt_context *ctx, const mt_attention_desc *desc, int64_t first, mt_tensor qkv,
                               mt_tensor *shard) {
    int64_t width = mti_qkv_width(desc);
    if (mti_qkv_in_pieces(desc, qkv)) return mt_arena_tensor(ctx, qkv.dtype, qkv.rows, desc->groups * width, shard);
    *shard = mti_attention_cols(desc, qkv, first, width);
    return MT_SUCCESS;
}

/* Returns part 0, 1 or 2 (queries, keys, values) of desc->groups groups in the columns of t, [q; k; v]. */
static mt_tensor mti_qkv_part(const mt_attention_desc *desc, mt_tensor t, int64_t first, int part) {
    int64_t groups = t.cols / mti_qkv_width(desc), queries = mti_out_width(desc), d = desc->head_dim;
    if (part == 0) return mti_attention_cols(desc, t, first, queries);
    return mt_tensor_cols(t, groups * queries + ((part - 1) * groups + first) * d, desc->groups * d);
}

/* Copies the pieces of a shard from qkv to *shard or, with `back`, from *shard to qkv. */
static mt_status mti_qkv_copy(mt_context *ctx, const mt_attention_desc *desc, int64_t first, mt_tensor qkv,
                              mt_tensor shard, int back) {
    int part;
    for (part = 0; part < 3 && mti_qkv_in_pieces(desc, qkv); part++) {
        mt_tensor all = mti_qkv_part(desc, qkv, first, part), own = mti_qkv_part(desc, shard, 0, part);
        MT_TRY(mt_copy(ctx, back ? own : all, back ? all : own));
    }
    return MT_SUCCESS;
}

/* Sets *out to the columns of a shard, as input for the operator. */
static mt_status mti_qkv_input(mt_context *ctx, const mt_attention_desc *desc, int64_t first, mt_tensor qkv,
                               mt_tensor *out) {
    mt_tensor shard;
    MT_TRY(mti_qkv_shard(ctx, desc, first, qkv, &shard));
    MT_TRY(mti_qkv_copy(ctx, desc, first, qkv, shard, 0));
    return mt_invariant_input(ctx, shard, out);
}

/* Runs core attention on one virtual shard. desc and first are from mti_attention_shard; the tensors are those of the
   whole rank. */
static mt_status mti_attention_shard_forward(mt_context *ctx, const mt_attention_desc *desc, int64_t first,
                                             mt_tensor qkv, mt_tensor out, mt_tensor lse) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor to;
    if (desc->groups == 0) return MT_SUCCESS;
    out = mti_attention_cols(desc, out, first, mti_out_width(desc));
    MT_TRY(mti_qkv_input(ctx, desc, first, qkv, &qkv));
    MT_TRY(mt_invariant_output(ctx, out, &to));
    MT_TRY(mt_attention_forward(ctx, desc, qkv, to, mti_attention_lse(desc, lse, first)));
    MT_TRY(mt_invariant_store(ctx, to, out));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Checks desc, shards and two tensors: qkv and out, or dqkv and dout. They also have the columns of empty groups. */
static mt_status mti_core_check(mt_context *ctx, const char *function, const mt_attention_desc *desc, int shards,
                                const char *qkv_name, mt_tensor qkv, const char *out_name, mt_tensor out) {
    int64_t groups, tokens;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!desc) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc is NULL", function);
    MT_TRY(mt_check_integer(ctx, function, NULL, "shards", shards, 1, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, NULL, "groups", desc->groups, 0, INT64_MAX));
    MT_TRY(mt_check_integer(ctx, function, NULL, "head_dim", desc->head_dim, 1, INT32_MAX / 3));
    MT_TRY(mt_check_integer(ctx, function, NULL, "heads_per_group", desc->heads_per_group, 1,
                            INT32_MAX / desc->head_dim - 2));
    tokens = mt_size_mul(desc->batch, desc->seq);
    groups = qkv.cols / mti_qkv_width(desc);
    if (groups < desc->groups || groups % shards != 0 || qkv.cols != groups * mti_qkv_width(desc))
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s has %lld columns, for %lld groups of %lld heads of %lld", function,
                       qkv_name, (long long)qkv.cols, (long long)desc->groups, (long long)desc->heads_per_group,
                       (long long)desc->head_dim);
    if (desc->qkv_layout != MT_QKV_PER_GROUP && groups != desc->groups)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %lld of %lld groups are empty, which needs MT_QKV_PER_GROUP", function,
                       (long long)(groups - desc->groups), (long long)groups);
    MT_TRY(mt_tensor_check(ctx, function, qkv_name, qkv, MT_ARG_FLOAT, tokens, qkv.cols));
    return mt_tensor_check(ctx, function, out_name, out, MT_ARG_FLOAT, tokens, groups * mti_out_width(desc));
}

/* Checks lse, which has rows for the non-empty groups only. */
static mt_status mti_core_check_lse(mt_context *ctx, const char *function, const mt_attention_desc *desc,
                                    mt_tensor lse) {
    return mt_tensor_check(ctx, function, "lse", lse, MT_ARG_F32, desc->groups * desc->heads_per_group,
                           desc->batch * desc->seq);
}

MT_API mt_status mt_core_attention_forward(mt_context *ctx, const mt_attention_desc *desc, int shards, mt_tensor qkv,
                                           mt_tensor out, mt_tensor lse) {
    static const char *const function = "mt_core_attention_forward";
    int64_t groups, first;
    int s;
    MT_TRY(mti_core_check(ctx, function, desc, shards, "qkv", qkv, "out", out));
    if (lse.data) MT_TRY(mti_core_check_lse(ctx, function, desc, lse));
    groups = qkv.cols / mti_qkv_width(desc);
    for (s = 0; s < shards && desc->groups > 0; s++) {
        mt_attention_desc part = mti_attention_shard(desc, groups, s, shards, &first);
        MT_TRY(mti_attention_shard_forward(ctx, &part, first, qkv, out, lse));
    }
    return mti_attention_zero_rest(ctx, desc, out, mti_out_width(desc));
}

static mt_status mti_attention_shard_backward(mt_context *ctx, const mt_attention_desc *desc, int64_t first,
                                              mt_tensor qkv, mt_tensor out, mt_tensor lse, mt_tensor dout,
                                              mt_tensor dqkv) {
    int64_t out_width = mti_out_width(desc);
    size_t mark = mt_arena_mark(ctx);
    mt_tensor to, shard;
    if (desc->groups == 0) return MT_SUCCESS;
    MT_TRY(mti_qkv_input(ctx, desc, first, qkv, &qkv));
    MT_TRY(mt_invariant_input(ctx, mti_attention_cols(desc, out, first, out_width), &out));
    MT_TRY(mt_invariant_input(ctx, mti_attention_cols(desc, dout, first, out_width), &dout));
    MT_TRY(mti_qkv_shard(ctx, desc, first, dqkv, &shard));
    MT_TRY(mt_invariant_output(ctx, shard, &to));
    MT_TRY(mt_attention_backward(ctx, desc, qkv, out, mti_attention_lse(desc, lse, first), dout, to));
    MT_TRY(mt_invariant_store(ctx, to, shard));
    MT_TRY(mti_qkv_copy(ctx, desc, first, dqkv, shard, 1));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

MT_API mt_status mt_core_attention_backward(mt_context *ctx, const mt_attention_desc *desc, int shards, mt_tensor qkv,
                                            mt_tensor out, mt_tensor lse, mt_tensor dout, mt_tensor dqkv) {
    static const char *const function = "mt_core_attention_backward";
    int64_t groups, first;
    int s;
    MT_TRY(mti_core_check(ctx, function, desc, shards, "qkv", qkv, "out", out));
    MT_TRY(mti_core_check(ctx, function, desc, shards, "dqkv", dqkv, "dout", dout));
    if (dqkv.cols != qkv.cols)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: dqkv has %lld columns, qkv %lld", function, (long long)dqkv.cols,
                       (long long)qkv.cols);
    if (desc->groups > 0) MT_TRY(mti_core_check_lse(ctx, function, desc, lse));
    groups = qkv.cols / mti_qkv_width(desc);
    for (s = 0; s < shards && desc->groups > 0; s++) {
        mt_attention_desc part = mti_attention_shard(desc, groups, s, shards, &first);
        MT_TRY(mti_attention_shard_backward(ctx, &part, first, qkv, out, lse, dout, dqkv));
    }
    return mti_attention_zero_rest(ctx, desc, dqkv, mti_qkv_width(desc));
}

/* Calls mt_rotary_forward or mt_rotary_backward on this rank's groups in qkv. Concatenated columns lie shard by
   shard. */
static mt_status mti_attention_rotate(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                      mt_status (*rotate)(mt_context *ctx, const mt_attention_desc *desc,
                                                          mt_tensor table, mt_tensor qkv),
                                      mt_tensor qkv) {
    int s, shards = desc->qkv_layout == MT_QKV_CONCATENATED ? a->proj.weight->shards : 1;
    int64_t first;
    for (s = 0; s < shards && a->rotary.data && desc->groups > 0; s++) {
        mt_attention_desc part = mti_attention_shard(desc, a->groups, s, shards, &first);
        MT_TRY(rotate(ctx, &part, mt_tensor_rows(a->rotary, 0, desc->seq),
                      mti_attention_cols(&part, qkv, first, mti_qkv_width(desc))));
    }
    return MT_SUCCESS;
}

static mt_status mti_attention_core_forward(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                            const mt_self_attention_saved *saved) {
    return mt_core_attention_forward(ctx, desc, a->proj.weight->shards, saved->qkv, saved->out, saved->lse);
}

static mt_status mti_attention_core_backward(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                             const mt_self_attention_saved *saved, mt_tensor dout, mt_tensor dqkv) {
    MT_TRY(
        mt_core_attention_backward(ctx, desc, a->proj.weight->shards, saved->qkv, saved->out, saved->lse, dout, dqkv));
    return mti_attention_rotate(ctx, a, desc, mt_rotary_backward, dqkv);
}

/* Allocates the outputs of core attention, saved->out and saved->lse. For inference, saved->lse is mt_none(). */
static mt_status mti_attention_room(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                    mt_self_attention_saved *saved, int training) {
    int64_t tokens = saved->qkv.rows;
    saved->lse = mt_none();
    MT_TRY(mt_arena_tensor(ctx, saved->qkv.dtype, tokens, a->proj.local_features, &saved->out));
    if (!training) return MT_SUCCESS;
    return mt_arena_tensor(ctx, MT_F32, desc->groups * desc->heads_per_group, tokens, &saved->lse);
}

/* Sets *layers to the layers that compute queries, keys and values. Returns their number. */
static int mti_qkv_layers(const mt_self_attention *a, const mt_column_parallel_linear **layers) {
    int separate = a->desc.qkv_layout == MT_QKV_SEPARATE;
    *layers = separate ? a->separate : &a->qkv;
    return separate ? 3 : 1;
}

/* Returns the number of layers that compute queries, keys and values, and sets *layers to the first one and cols[i] to
   the columns of qkv (or dqkv) of each. */
static int mti_attention_layers(const mt_self_attention *a, mt_tensor qkv, const mt_column_parallel_linear **layers,
                                mt_tensor cols[3]) {
    int i, count = mti_qkv_layers(a, layers);
    int64_t first = 0;
    for (i = 0; i < count; i++) {
        cols[i] = mt_tensor_cols(qkv, first, (*layers)[i].local_features);
        first += (*layers)[i].local_features;
    }
    return count;
}

/* Logs the gradients of queries, keys and values. */
static mt_status mti_attention_log(mt_context *ctx, const mt_column_parallel_linear *layers, int count,
                                   const mt_tensor *dqkv) {
    int i;
    if (count == 1)
        return mt_hash_log_activation(ctx, layers->name, 1, "core_attention.input_grad", *dqkv, 0, layers->weight);
    for (i = 0; i < count; i++)
        MT_TRY(mt_hash_log_activation(ctx, layers[i].name, 0, "output_grad", dqkv[i], 0, layers[i].weight));
    return MT_SUCCESS;
}

/* The part of a cache that belongs to the groups of desc, from mti_attention_shard. */
static mt_kv_cache mti_cache_shard(const mt_attention_desc *desc, int64_t first, const mt_kv_cache *cache) {
    int64_t rows = desc->batch * cache->max_seq; /* of a group */
    mt_kv_cache part = *cache;
    part.keys = mt_tensor_rows(cache->keys, first * rows, desc->groups * rows);
    part.values = mt_tensor_rows(cache->values, first * rows, desc->groups * rows);
    return part;
}

/* Adds the keys and values of one virtual shard to the cache, and runs core attention on it. */
static mt_status mti_attention_shard_cached(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                            int64_t first, const mt_kv_cache *cache, mt_tensor qkv, mt_tensor out) {
    size_t mark = mt_arena_mark(ctx);
    mt_kv_cache part = mti_cache_shard(desc, first, cache);
    mt_tensor table = a->rotary.data ? mt_tensor_rows(a->rotary, 0, cache->max_seq) : mt_none(), to;
    if (desc->groups == 0) return MT_SUCCESS;
    out = mti_attention_cols(desc, out, first, mti_out_width(desc));
    MT_TRY(mti_qkv_input(ctx, desc, first, qkv, &qkv));
    MT_TRY(mt_invariant_output(ctx, out, &to));
    MT_TRY(mt_kv_cache_append(ctx, desc, table, qkv, &part));
    MT_TRY(mt_kv_cache_attention(ctx, desc, qkv, &part, to));
    MT_TRY(mt_invariant_store(ctx, to, out));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Core attention with a cache, which turns the queries and keys of qkv itself. */
static mt_status mti_attention_core_cached(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                           const mt_kv_cache *cache, mt_tensor qkv, mt_tensor out) {
    int s, shards = a->proj.weight->shards;
    int64_t first;
    for (s = 0; s < shards && desc->groups > 0; s++) {
        mt_attention_desc part = mti_attention_shard(desc, a->groups, s, shards, &first);
        MT_TRY(mti_attention_shard_cached(ctx, a, &part, first, cache, qkv, out));
    }
    return mti_attention_zero_rest(ctx, desc, out, mti_out_width(desc));
}

/* Computes y from x with a cache. */
static mt_status mti_attention_cached(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                      const mt_kv_cache *cache, mt_tensor x, mt_tensor y) {
    const mt_column_parallel_linear *layers;
    mt_tensor qkv, out, cols[3];
    int count;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, a->groups * mti_qkv_width(desc), &qkv));
    MT_TRY(mt_arena_tensor(ctx, x.dtype, x.rows, a->proj.local_features, &out));
    count = mti_attention_layers(a, qkv, &layers, cols);
    MT_TRY(mt_parallel_linear_forward_shared(ctx, layers, count, &x, cols, NULL));
    MT_TRY(mti_attention_core_cached(ctx, a, desc, cache, qkv, out));
    return mt_parallel_linear_forward(ctx, &a->proj, out, y, NULL);
}

/* With recompute_core, only saved->qkv stays in the arena. */
static mt_status mti_attention_forward(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                       mt_tensor x, mt_tensor y, mt_self_attention_saved *saved, int training) {
    const mt_column_parallel_linear *layers;
    mt_tensor cols[3];
    size_t mark;
    int count;
    MT_TRY(mt_arena_tensor(ctx, x.dtype, desc->batch * desc->seq, a->groups * mti_qkv_width(desc), &saved->qkv));
    count = mti_attention_layers(a, saved->qkv, &layers, cols);
    mark = mt_arena_mark(ctx);
    MT_TRY(mti_attention_room(ctx, a, desc, saved, training));
    MT_TRY(mt_parallel_linear_forward_shared(ctx, layers, count, &x, cols, training ? &saved->qkv_in : NULL));
    MT_TRY(mti_attention_rotate(ctx, a, desc, mt_rotary_forward, saved->qkv));
    MT_TRY(mti_attention_core_forward(ctx, a, desc, saved));
    if (training)
        MT_TRY(mt_hash_log_activation(ctx, a->proj.name, 1, "core_attention.output", saved->out, 0, a->proj.weight));
    MT_TRY(mt_parallel_linear_forward(ctx, &a->proj, saved->out, y, training ? &saved->proj_in : NULL));
    if (a->desc.recompute_core) mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Checks what a batch says of the scores. s is a desc for all heads of the model on every rank, so all ranks return the
   same error. */
static mt_status mti_scores_check(mt_context *ctx, const char *function, const mt_attention_desc *s) {
    int64_t heads = s->groups * s->heads_per_group;
    if (s->bias.heads > 1 && s->bias.heads != heads)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: bias.heads is %lld, must be 1 or the %lld heads of the model", function,
                       (long long)s->bias.heads, (long long)heads);
    if (mt_context_invariant(ctx) && s->bias.grad.data && heads > 1 && s->bias.heads != heads)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: bias.grad in invariant mode needs bias.heads %lld, the heads of the model; it is %lld",
                       function, (long long)heads, (long long)s->bias.heads);
    return mt_attention_check(ctx, function, s);
}

static mt_status mti_batch_scores_check(mt_context *ctx, const char *function, const mt_self_attention *a,
                                        const mt_batch *batch) {
    int64_t groups = a->desc.kv_heads * a->pieces;
    mt_attention_desc s =
        mti_rank_attention(groups, 0, groups, a->desc.heads / groups, a->head_dim, a->desc.qkv_layout, batch);
    return mti_scores_check(ctx, function, &s);
}

/* Checks an activation that has the tokens of the batch, or with sequence parallelism this rank's share of them. */
static mt_status mti_tokens_check(mt_context *ctx, const char *function, const mt_row_parallel_linear *proj,
                                  const mt_batch *batch, const char *name, mt_tensor t, int64_t cols) {
    int64_t tokens = batch->sequences * batch->seq, rows = 0;
    MT_TRY(mt_sequence_rows(ctx, function, proj->tp, proj->desc.sequence_parallel, tokens, &rows));
    return mt_check_activation(ctx, function, proj->weight, name, t, rows, cols);
}

/* Checks the parameters, the batch and two activations: x and y, or dy and dx. For attention and the whole layer. */
static mt_status mti_block_check(mt_context *ctx, const char *function, const mt_self_attention *a,
                                 const mt_batch *batch, const char *in_name, mt_tensor in, const char *out_name,
                                 mt_tensor out) {
    MT_TRY(mt_check_param(ctx, function, a->proj.weight));
    MT_TRY(mti_batch_check(ctx, function, "batch", batch, a->rotary.data ? a->desc.max_seq : 0));
    MT_TRY(mti_batch_scores_check(ctx, function, a, batch));
    MT_TRY(mt_check_apart(ctx, function, "bias.grad", batch->bias.grad, in_name, in));
    MT_TRY(mt_check_apart(ctx, function, "bias.grad", batch->bias.grad, out_name, out));
    MT_TRY(mti_tokens_check(ctx, function, &a->proj, batch, in_name, in, a->desc.hidden));
    return mti_tokens_check(ctx, function, &a->proj, batch, out_name, out, a->desc.hidden);
}

MT_API mt_status mt_self_attention_forward(mt_context *ctx, const mt_self_attention *attention, const mt_batch *batch,
                                           mt_tensor x, mt_tensor y, mt_self_attention_saved *saved) {
    static const char *const function = "mt_self_attention_forward";
    mt_attention_desc desc;
    mt_self_attention_saved local;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!attention) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: attention is NULL", function);
    MT_TRY(mti_block_check(ctx, function, attention, batch, "x", x, "y", y));
    MT_TRY(mt_check_sent(ctx, function, attention->proj.tp, attention->desc.sequence_parallel, "x", x, "y", y));
    MT_TRY(mt_check_apart(ctx, function, "x", x, "y", y));
    desc = mti_attention_desc(attention, batch, saved != NULL);
    mt_hash_log_tokens(ctx, batch->first_sequence * batch->seq);
    mark = mt_arena_mark(ctx);
    status = MT_RANGE("attention forward",
                      mti_attention_forward(ctx, attention, &desc, x, y, saved ? saved : &local, saved != NULL));
    if (status == MT_SUCCESS && saved) saved->batch = *batch;
    else mt_arena_release(ctx, mark);
    return status;
}

/* Checks desc and the numbers of a cache, with a desc of all groups of the model, and the shapes of the cache on this
   rank. */
static mt_status mti_cache_check(mt_context *ctx, const char *function, const mt_self_attention *a,
                                 const mt_batch *batch, const mt_kv_cache *cache) {
    int64_t groups = a->desc.kv_heads * a->pieces, rows;
    mt_attention_desc s =
        mti_rank_attention(groups, 0, groups, a->desc.heads / groups, a->head_dim, a->desc.qkv_layout, batch);
    s.scores.mask = a->desc.scores.mask;
    MT_TRY(mt_kv_cache_check(ctx, function, &s, cache));
    if (a->rotary.data && cache->max_seq > a->desc.max_seq)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: the cache has max_seq %lld, must be at most that of the layer, %lld",
                       function, (long long)cache->max_seq, (long long)a->desc.max_seq);
    rows = mt_size_mul(mt_size_mul(batch->sequences, mt_self_attention_cache_groups(a)), cache->max_seq);
    if (rows == 0) return MT_SUCCESS;
    MT_TRY(mt_check_activation(ctx, function, a->proj.weight, "keys", cache->keys, rows, a->head_dim));
    return mt_check_activation(ctx, function, a->proj.weight, "values", cache->values, rows, a->head_dim);
}

/* Inference with a cache runs without sequence parallelism. Clears it in a copy of the struct of a layer. */
static void mti_attention_whole_tokens(mt_self_attention *a) {
    int i;
    a->desc.sequence_parallel = a->qkv.desc.sequence_parallel = a->proj.desc.sequence_parallel = 0;
    for (i = 0; i < 3; i++) a->separate[i].desc.sequence_parallel = 0;
}

MT_API int64_t mt_self_attention_cache_groups(const mt_self_attention *attention) {
    if (!attention || attention->pieces < 1) return 0;
    return mti_used_groups(attention->groups, attention->first_group, attention->desc.kv_heads * attention->pieces);
}

MT_API mt_status mt_self_attention_cached_forward(mt_context *ctx, const mt_self_attention *attention,
                                                  const mt_batch *batch, const mt_kv_cache *cache, mt_tensor x,
                                                  mt_tensor y) {
    static const char *const function = "mt_self_attention_cached_forward";
    mt_self_attention a;
    mt_attention_desc desc;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!attention) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: attention is NULL", function);
    a = *attention;
    mti_attention_whole_tokens(&a);
    MT_TRY(mti_block_check(ctx, function, &a, batch, "x", x, "y", y));
    MT_TRY(mti_cache_check(ctx, function, &a, batch, cache));
    MT_TRY(mt_check_sent(ctx, function, a.proj.tp, 0, "x", x, "y", y));
    MT_TRY(mt_check_apart(ctx, function, "x", x, "y", y));
    desc = mti_attention_desc(&a, batch, 0);
    mark = mt_arena_mark(ctx);
    status = MT_RANGE("attention forward", mti_attention_cached(ctx, &a, &desc, cache, x, y));
    mt_arena_release(ctx, mark);
    return status;
}

/* With recompute_core: computes out and lse of *saved again. */
static mt_status mti_attention_core_again(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                          mt_self_attention_saved *saved) {
    mt_status status;
    MT_TRY(mti_attention_room(ctx, a, desc, saved, 1));
    mt_trace_recompute(ctx, 1);
    status = mti_attention_core_forward(ctx, a, desc, saved);
    mt_trace_recompute(ctx, 0);
    saved->proj_in.x = saved->out;
    return status;
}

static mt_status mti_attention_backward(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                        mt_tensor dy, mt_tensor dx, const mt_self_attention_saved *saved) {
    mt_self_attention_saved again = *saved;
    const mt_column_parallel_linear *layers;
    mt_tensor dout, dqkv, cols[3];
    int count;
    if (a->desc.recompute_core) {
        MT_TRY(mti_attention_core_again(ctx, a, desc, &again));
        saved = &again;
    }
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->out.rows, saved->out.cols, &dout));
    MT_TRY(mt_arena_tensor(ctx, dy.dtype, saved->qkv.rows, saved->qkv.cols, &dqkv));
    MT_TRY(mt_parallel_linear_backward(ctx, &a->proj, dy, dout, &saved->proj_in));
    MT_TRY(mti_attention_core_backward(ctx, a, desc, saved, dout, dqkv));
    count = mti_attention_layers(a, dqkv, &layers, cols);
    MT_TRY(mti_attention_log(ctx, layers, count, cols));
    return mt_parallel_linear_backward_shared(ctx, layers, count, cols, &dx, &saved->qkv_in);
}

/* Checks, before anything is added to a gradient, that saved is of a forward with the same sizes. */
static mt_status mti_attention_saved_check(mt_context *ctx, const char *function, const mt_self_attention *a,
                                           const mt_self_attention_saved *saved) {
    int64_t tokens = saved->batch.sequences * saved->batch.seq,
            width = a->proj.local_features + 2 * a->groups * a->head_dim;
    MT_TRY(mt_check_activation(ctx, function, a->proj.weight, "saved.qkv", saved->qkv, tokens, width));
    if (a->desc.recompute_core) return MT_SUCCESS;
    return mt_check_activation(ctx, function, a->proj.weight, "saved.out", saved->out, tokens, a->proj.local_features);
}

/* Checks, before anything is computed, that the layers may add to their gradients. */
static mt_status mti_attention_gradients(mt_context *ctx, const char *function, const mt_self_attention *a) {
    const mt_column_parallel_linear *layers;
    int i, count = mti_qkv_layers(a, &layers);
    for (i = 0; i < count; i++) MT_TRY(mt_check_linear_gradients(ctx, function, &layers[i]));
    return mt_check_linear_gradients(ctx, function, &a->proj);
}

MT_API mt_status mt_self_attention_backward(mt_context *ctx, const mt_self_attention *attention, mt_tensor dy,
                                            mt_tensor dx, const mt_self_attention_saved *saved) {
    static const char *const function = "mt_self_attention_backward";
    mt_attention_desc desc;
    size_t mark;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!attention || !saved)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, attention ? "saved" : "attention");
    MT_TRY(
        mti_block_check(ctx, function, attention, &saved->batch, "dy", dy, dx.data ? "dx" : "dy", dx.data ? dx : dy));
    MT_TRY(mt_check_sent(ctx, function, attention->proj.tp, attention->desc.sequence_parallel, "dy", dy, "dx", dx));
    MT_TRY(mt_check_apart(ctx, function, "dy", dy, "dx", dx));
    MT_TRY(mt_check_apart(ctx, function, "saved.qkv_in.x", saved->qkv_in.x, "dx", dx));
    MT_TRY(mti_attention_saved_check(ctx, function, attention, saved));
    MT_TRY(mti_attention_gradients(ctx, function, attention));
    desc = mti_attention_desc(attention, &saved->batch, 1);
    mt_hash_log_tokens(ctx, saved->batch.first_sequence * saved->batch.seq);
    MT_TRY(mt_defer_weight_gradients(ctx));
    mark = mt_arena_mark(ctx);
    status = mt_defer_weight_gradients_end(
        ctx, MT_RANGE("attention backward", mti_attention_backward(ctx, attention, &desc, dy, dx, saved)));
    mt_arena_release(ctx, mark);
    return status;
}

static int mti_qkv_sizes_ok(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols) {
    return heads > 0 && kv_heads > 0 && head_dim > 0 && cols > 0 && heads % kv_heads == 0 && heads <= INT32_MAX &&
           head_dim <= INT32_MAX / heads && cols <= INT32_MAX;
}

MT_API mt_status mt_qkv_from_separate(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols, const float *q,
                                      const float *k, const float *v, float *qkv) {
    size_t row, queries;
    int64_t g;
    if (!mti_qkv_sizes_ok(heads, kv_heads, head_dim, cols)) return MT_ERR_SHAPE;
    if (!q || !k || !v || !qkv) return MT_ERR_ARGUMENT;
    row = (size_t)(head_dim * cols);
    queries = row * (size_t)(heads / kv_heads);
    for (g = 0; g < kv_heads; g++, q += queries, k += row, v += row, qkv += queries + 2 * row) {
        memcpy(qkv, q, queries * sizeof *qkv);
        memcpy(qkv + queries, k, row * sizeof *qkv);
        memcpy(qkv + queries + row, v, row * sizeof *qkv);
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_qkv_to_separate(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t cols, const float *qkv,
                                    float *q, float *k, float *v) {
    size_t row, queries;
    int64_t g;
    if (!mti_qkv_sizes_ok(heads, kv_heads, head_dim, cols)) return MT_ERR_SHAPE;
    if (!q || !k || !v || !qkv) return MT_ERR_ARGUMENT;
    row = (size_t)(head_dim * cols);
    queries = row * (size_t)(heads / kv_heads);
    for (g = 0; g < kv_heads; g++, q += queries, k += row, v += row, qkv += queries + 2 * row) {
        memcpy(q, qkv, queries * sizeof *qkv);
        memcpy(k, qkv + queries, row * sizeof *qkv);
        memcpy(v, qkv + queries + row, row * sizeof *qkv);
    }
    return MT_SUCCESS;
}

/* Copies `pairs` to `halves`, or back. Both are [heads * head_dim, cols]. */
static mt_status mti_rotary_convert(int64_t heads, int64_t head_dim, int64_t rotary_dim, int64_t cols,
                                    const float *pairs, const float *halves, float *to) {
    int64_t turned = rotary_dim ? rotary_dim : head_dim, h, i;
    size_t row;
    if (!mti_qkv_sizes_ok(heads, heads, head_dim, cols) || turned < 0 || turned > head_dim || turned % 2 != 0)
        return MT_ERR_SHAPE;
    if ((!pairs && !halves) || !to) return MT_ERR_ARGUMENT;
    row = (size_t)cols;
    for (h = 0; h < heads; h++)
        for (i = 0; i < head_dim; i++) {
            int64_t half = i >= turned ? i : i / 2 + i % 2 * (turned / 2); /* row i of pairs is this row of halves */
            size_t in_pairs = (size_t)(h * head_dim + i) * row, in_halves = (size_t)(h * head_dim + half) * row;
            if (pairs) memcpy(to + in_halves, pairs + in_pairs, row * sizeof *to);
            else memcpy(to + in_pairs, halves + in_halves, row * sizeof *to);
        }
    return MT_SUCCESS;
}

MT_API mt_status mt_rotary_halves_from_pairs(int64_t heads, int64_t head_dim, int64_t rotary_dim, int64_t cols,
                                             const float *pairs, float *halves) {
    return mti_rotary_convert(heads, head_dim, rotary_dim, cols, pairs, NULL, halves);
}

MT_API mt_status mt_rotary_pairs_from_halves(int64_t heads, int64_t head_dim, int64_t rotary_dim, int64_t cols,
                                             const float *halves, float *pairs) {
    return mti_rotary_convert(heads, head_dim, rotary_dim, cols, NULL, halves, pairs);
}
