/* ---- core attention ---------------------------------------------------------------------------------------------- */

#pragma once
#include "attention_layers.c"
#include "../parallel/context.h"

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

/* The chunks of each sequence that this rank has, see mt_context_parallel_desc: `count`, of `chunk` tokens each. A
   sequence that they do not divide has padding at its end: `seq` counts it. */
typedef struct mti_seq_chunks {
    mt_context_parallel_desc context;
    int rank, size, count;
    int64_t seq, chunk;
} mti_seq_chunks;

/* cp NULL: one chunk, the whole sequence */
static mti_seq_chunks mti_seq_chunks_of(const mt_comm *cp, const mt_context_parallel_desc *context, int64_t seq) {
    const int ranks = cp && context->invariant > mt_comm_size(cp) ? context->invariant : mt_comm_size(cp);
    mti_seq_chunks c;
    memset(&c, 0, sizeof c);
    if (cp) c.context = *context;
    c.rank = mt_comm_rank(cp);
    c.size = mt_comm_size(cp);
    c.count = ranks / c.size * (ranks == 1 || c.context.contiguous ? 1 : 2);
    c.chunk = (seq + c.count * c.size - 1) / (c.count * c.size);
    c.seq = c.chunk * c.count * c.size;
    return c;
}

/* The first token of a chunk in its sequence. */
static int64_t mti_chunk_token(const mti_seq_chunks *c, int chunk) {
    return mt_context_parallel_token(&c->context, c->rank, c->size, 1, c->seq, chunk * c->chunk);
}

static mt_attention_part mti_chunk_part(const mti_seq_chunks *c, int chunk) {
    mt_attention_part p;
    memset(&p, 0, sizeof p);
    if (c->chunk == c->seq) return p;
    p.seq = c->seq;
    p.first_query = p.first_key = mti_chunk_token(c, chunk);
    return p;
}

/* Calls mt_rotary_forward or mt_rotary_backward on this rank's groups in qkv. Concatenated columns lie shard by
   shard. */
static mt_status mti_attention_rotate(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                      mt_status (*rotate)(mt_context *ctx, const mt_attention_desc *desc,
                                                          mt_tensor table, mt_tensor qkv),
                                      mt_tensor qkv) {
    int s, shards = desc->qkv_layout == MT_QKV_CONCATENATED ? a->proj.weight->shards : 1, i;
    const mti_seq_chunks chunks = mti_seq_chunks_of(a->cp, &a->context, desc->seq);
    const int64_t rows = desc->batch * chunks.chunk;
    int64_t first;
    for (s = 0; s < shards && a->rotary.data && desc->groups > 0; s++)
        for (i = 0; i < chunks.count; i++) {
            mt_attention_desc part = mti_attention_shard(desc, a->groups, s, shards, &first);
            part.part = mti_chunk_part(&chunks, i);
            part.seq = chunks.chunk;
            MT_TRY(rotate(ctx, &part, mt_tensor_rows(a->rotary, 0, desc->seq),
                          mti_attention_cols(&part, mt_tensor_rows(qkv, i * rows, rows), first, mti_qkv_width(desc))));
        }
    return MT_SUCCESS;
}

/* -- core attention over context ranks -- */

/* The queries, keys and values of the groups of a desc. */
typedef struct mti_split_qkv {
    mt_tensor q, k, v;
} mti_split_qkv;

/* Sets *s to room for the queries, keys and values of qkv or, where they lie side by side, to views. */
static mt_status mti_qkv_split(mt_context *ctx, const mt_attention_desc *desc, mt_tensor qkv, mti_split_qkv *s) {
    const int64_t keys = desc->groups * desc->head_dim;
    s->q = mti_qkv_part(desc, qkv, 0, 0);
    s->k = mti_qkv_part(desc, qkv, 0, 1);
    s->v = mti_qkv_part(desc, qkv, 0, 2);
    if (desc->qkv_layout != MT_QKV_PER_GROUP) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(ctx, qkv.dtype, qkv.rows, desc->groups * mti_out_width(desc), &s->q));
    MT_TRY(mt_arena_tensor(ctx, qkv.dtype, qkv.rows, keys, &s->k));
    return mt_arena_tensor(ctx, qkv.dtype, qkv.rows, keys, &s->v);
}

/* Copies between such room and qkv, for `count` groups from `first` on at a time. */
static mt_status mti_qkv_groups_copy(mt_context *ctx, const mt_attention_desc *desc, mt_tensor qkv,
                                     const mti_split_qkv *s, int back) {
    const mt_tensor parts[] = {s->q, s->k, s->v};
    const int64_t width = mti_qkv_width(desc), widths[] = {mti_out_width(desc), desc->head_dim, desc->head_dim};
    const int whole = mt_tensor_ld(qkv) == qkv.cols; /* all groups are rows of one view */
    int64_t group, from;
    int part;
    if (desc->qkv_layout != MT_QKV_PER_GROUP) return MT_SUCCESS;
    for (group = 0; group < (whole ? 1 : desc->groups); group++)
        for (part = 0, from = 0; part < 3; from += widths[part++]) {
            mt_tensor x = mt_tensor_cols(qkv, group * width, width), y = parts[part];
            if (whole) {
                x = mt_tensor_reshape(qkv, qkv.rows * desc->groups, width);
                y = mt_tensor_reshape(y, y.rows * desc->groups, widths[part]);
            } else y = mt_tensor_cols(y, group * widths[part], widths[part]);
            x = mt_tensor_cols(x, from, widths[part]);
            MT_TRY(back ? mt_copy(ctx, y, x) : mt_copy(ctx, x, y));
        }
    return MT_SUCCESS;
}

/* The core attention of one virtual shard: dout mt_none(): forward. */
static mt_status mti_context_shard(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                   int64_t first, mt_tensor qkv, mt_tensor out, mt_tensor lse, mt_tensor dout,
                                   mt_tensor dqkv) {
    const mt_context_parallel_desc *how = &a->context;
    mti_split_qkv x, dx;
    mt_tensor to, shard;
    if (desc->groups == 0) return MT_SUCCESS;
    MT_TRY(mti_qkv_input(ctx, desc, first, qkv, &qkv));
    MT_TRY(mti_qkv_split(ctx, desc, qkv, &x));
    MT_TRY(mti_qkv_groups_copy(ctx, desc, qkv, &x, 0));
    out = mti_attention_cols(desc, out, first, mti_out_width(desc));
    lse = mti_attention_lse(desc, lse, first);
    if (!dout.data) {
        MT_TRY(mt_invariant_output(ctx, out, &to));
        MT_TRY(mt_context_parallel_attention_forward(ctx, a->cp, how, desc, x.q, x.k, x.v, to, lse));
        return mt_invariant_store(ctx, to, out);
    }
    MT_TRY(mt_invariant_input(ctx, out, &out));
    MT_TRY(mt_invariant_input(ctx, mti_attention_cols(desc, dout, first, mti_out_width(desc)), &dout));
    MT_TRY(mti_qkv_shard(ctx, desc, first, dqkv, &shard));
    MT_TRY(mt_invariant_output(ctx, shard, &to));
    MT_TRY(mti_qkv_split(ctx, desc, to, &dx));
    MT_TRY(
        mt_context_parallel_attention_backward(ctx, a->cp, how, desc, x.q, x.k, x.v, out, lse, dout, dx.q, dx.k, dx.v));
    MT_TRY(mti_qkv_groups_copy(ctx, desc, to, &dx, 1));
    MT_TRY(mt_invariant_store(ctx, to, shard));
    return mti_qkv_copy(ctx, desc, first, dqkv, shard, 1);
}

/* Tells check mode of the call as a whole. Its copies see queries, keys and values in another width. */
static mt_status mti_context_rule(mt_context *ctx, const mt_self_attention_saved *saved, mt_tensor dout,
                                  mt_tensor dqkv) {
    static const mt_rule rules[2] = {{"qkv out lse", "RRR ccr rrc", NULL},
                                     {"qkv out lse dout dqkv(qkv)", "RRRRR ccrcc rrcrr", NULL}};
    const int backward = dout.data != NULL;
    mt_operand o[5];
    o[0].name = "qkv", o[0].t = saved->qkv, o[0].use = MT_ARG_IN;
    o[1].name = "out", o[1].t = saved->out, o[1].use = backward ? MT_ARG_IN : MT_ARG_OUT;
    o[2].name = "lse", o[2].t = saved->lse, o[2].use = o[1].use;
    o[3].name = "dout", o[3].t = dout, o[3].use = MT_ARG_IN | MT_ARG_GRADIENT;
    o[4].name = "dqkv", o[4].t = dqkv, o[4].use = MT_ARG_OUT | MT_ARG_GRADIENT;
    return mt_rule_check(ctx, "attention over context ranks", &rules[backward], o, backward ? 5 : 3);
}

/* Core attention over context ranks, one virtual shard after the other. */
static mt_status mti_context_core_shards(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                         const mt_self_attention_saved *saved, mt_tensor dout, mt_tensor dqkv) {
    const int shards = a->proj.weight->shards;
    int64_t first;
    int s;
    for (s = 0; s < shards && desc->groups > 0; s++) {
        mt_attention_desc part = mti_attention_shard(desc, a->groups, s, shards, &first);
        const size_t mark = mt_arena_mark(ctx);
        MT_TRY(mti_context_shard(ctx, a, &part, first, saved->qkv, saved->out, saved->lse, dout, dqkv));
        mt_arena_release(ctx, mark);
    }
    return dout.data ? mti_attention_zero_rest(ctx, desc, dqkv, mti_qkv_width(desc))
                     : mti_attention_zero_rest(ctx, desc, saved->out, mti_out_width(desc));
}

static mt_status mti_context_core(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                  const mt_self_attention_saved *saved, mt_tensor dout, mt_tensor dqkv) {
    MT_TRY(mt_context_parallel_agree(ctx, a->cp, &a->context, desc));
    MT_TRY(mti_context_rule(ctx, saved, dout, dqkv));
    mt_check_pause(ctx);
    return mt_check_resume(ctx, mti_context_core_shards(ctx, a, desc, saved, dout, dqkv));
}

static mt_status mti_attention_core_forward(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                            const mt_self_attention_saved *saved) {
    if (a->cp) return mti_context_core(ctx, a, desc, saved, mt_none(), mt_none());
    return mt_core_attention_forward(ctx, desc, a->proj.weight->shards, saved->qkv, saved->out, saved->lse);
}

static mt_status mti_attention_core_backward(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                             const mt_self_attention_saved *saved, mt_tensor dout, mt_tensor dqkv) {
    if (a->cp) MT_TRY(mti_context_core(ctx, a, desc, saved, dout, dqkv));
    else
        MT_TRY(mt_core_attention_backward(ctx, desc, a->proj.weight->shards, saved->qkv, saved->out, saved->lse, dout,
                                          dqkv));
    return mti_attention_rotate(ctx, a, desc, mt_rotary_backward, dqkv);
}
