/* ---- the layers of self-attention -------------------------------------------------------------------------------- */

#pragma once
#include "attention.h"
#include "authors.h"
#include "mlp.c"
#include "../comm/communicator.h"
#include "../ops/attention_qkv.h"
#include "../parallel/options.h"
#include "../parallel/hash_log.h"

/* The context ranks of a block, or NULL when it has whole sequences in their order. */
static mt_comm *mti_context_group(const mt_params *params, const mt_context_parallel_desc *context) {
    const mt_grid *grid = mt_params_grid(params);
    return grid->cp_size > 1 || context->invariant > 1 ? grid->cp : NULL;
}

/* The tokens of a batch on this context rank. cp NULL: all of the batch. */
static int64_t mti_batch_tokens(const mt_comm *cp, const mt_batch *batch) {
    return batch->sequences * batch->seq / mt_comm_size(cp);
}

/* Tells the hash log which tokens of the global batch the rows of this rank are. cp NULL: all of the batch. */
static void mti_log_batch(mt_context *ctx, const mt_comm *cp, const mt_context_parallel_desc *context,
                          const mt_batch *batch) {
    mt_hash_log_tokens(ctx, batch->first_sequence * batch->seq);
    if (cp) mt_hash_log_parts(ctx, cp, context, batch->sequences, batch->seq);
}

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
    mark = mt_params_mark(params);
    mti_attention_begin(&d, mti_group_pieces(d.heads, d.kv_heads, mt_params_shards(params)), out);
    out->context = mt_parallel_get_options(ctx).context;
    out->context.whole_keys = 0;
    out->cp = mti_context_group(params, &out->context);
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
