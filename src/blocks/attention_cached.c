/* ---- attention to a key/value cache ------------------------------------------------------------------------------ */

#pragma once
#include "attention_core.c"

/* The part of a cache that belongs to the groups of desc, from mti_attention_shard. */
static mt_kv_cache mti_cache_shard(const mt_attention_desc *desc, int64_t first, const mt_kv_cache *cache) {
    int64_t rows = desc->batch * cache->max_seq; /* of a group */
    mt_kv_cache part = *cache;
    part.keys = mt_tensor_rows(cache->keys, first * rows, desc->groups * rows);
    part.values = mt_tensor_rows(cache->values, first * rows, desc->groups * rows);
    return part;
}

/* The angles of a cache's positions. */
static mt_tensor mti_cache_table(const mt_self_attention *a, const mt_kv_cache *cache) {
    return a->rotary.data ? mt_tensor_rows(a->rotary, 0, cache->max_seq) : mt_none();
}

/* The desc of a call with chunk i of a rank. */
static mt_attention_desc mti_cached_desc(const mt_attention_desc *whole, const mti_seq_chunks *c, int i) {
    mt_attention_desc s = *whole;
    if (c->chunk == c->seq) return s;
    s.seq = c->chunk;
    s.part.seq = whole->seq;
    s.part.first_query = mt_min(mti_chunk_token(c, i), whole->seq); /* chunks behind the end are padding */
    return s;
}

/* Copies the keys and values of qkv to kv [rows, groups * 2 * head_dim], in the layout of qkv without queries. */
static mt_status mti_qkv_keys(mt_context *ctx, const mt_attention_desc *desc, mt_tensor qkv, mt_tensor kv) {
    const int64_t keys = 2 * desc->head_dim, queries = mti_out_width(desc), width = queries + keys;
    int64_t g;
    if (desc->qkv_layout != MT_QKV_PER_GROUP)
        return mt_copy(ctx, mt_tensor_cols(qkv, desc->groups * queries, desc->groups * keys), kv);
    for (g = 0; g < desc->groups; g++)
        MT_TRY(mt_copy(ctx, mt_tensor_cols(qkv, g * width + queries, keys), mt_tensor_cols(kv, g * keys, keys)));
    return MT_SUCCESS;
}

/* Adds the keys and values of the other context ranks to the cache. They are turned already. */
static mt_status mti_cached_gather(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                   const mti_seq_chunks *own, const mt_kv_cache *cache, mt_tensor qkv) {
    const int64_t rows = desc->batch * own->chunk;
    const size_t mark = mt_arena_mark(ctx);
    mti_seq_chunks c = *own;
    mt_attention_desc s = *desc;
    mt_tensor kv, all;
    int i;
    if (c.size == 1) return MT_SUCCESS;
    s.heads_per_group = 0;
    s.scores.rotary_base = 0.0f;
    MT_TRY(mt_arena_tensor(ctx, qkv.dtype, qkv.rows, desc->groups * 2 * desc->head_dim, &kv));
    MT_TRY(mt_arena_tensor(ctx, qkv.dtype, qkv.rows * own->size, kv.cols, &all));
    MT_TRY(mti_qkv_keys(ctx, desc, qkv, kv));
    MT_TRY(mt_all_gather(ctx, a->cp, kv.data, all.data, (size_t)(kv.rows * kv.cols), kv.dtype));
    for (c.rank = 0; c.rank < c.size; c.rank++)
        for (i = 0; i < c.count && c.rank != own->rank; i++) {
            const mt_attention_desc part = mti_cached_desc(&s, &c, i);
            const int64_t first = c.rank * qkv.rows + i * rows;
            MT_TRY(mt_kv_cache_append(ctx, &part, mt_none(), mt_tensor_rows(all, first, rows), cache));
        }
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Attention of one virtual shard. A context rank has its chunks in qkv and out, and adds all keys and values to its
   cache. */
static mt_status mti_cached_shard(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                  int64_t first, const mt_kv_cache *cache, mt_tensor qkv, mt_tensor out) {
    const mti_seq_chunks c = mti_seq_chunks_of(a->cp, &a->context, desc->seq);
    const int64_t rows = desc->batch * c.chunk;
    const mt_kv_cache part = mti_cache_shard(desc, first, cache);
    mt_tensor to;
    int i;
    if (desc->groups == 0) return MT_SUCCESS;
    out = mti_attention_cols(desc, out, first, mti_out_width(desc));
    MT_TRY(mti_qkv_input(ctx, desc, first, qkv, &qkv));
    MT_TRY(mt_invariant_output(ctx, out, &to));
    for (i = 0; i < c.count; i++) {
        const mt_attention_desc s = mti_cached_desc(desc, &c, i);
        MT_TRY(mt_kv_cache_append(ctx, &s, mti_cache_table(a, cache), mt_tensor_rows(qkv, i * rows, rows), &part));
    }
    MT_TRY(mti_cached_gather(ctx, a, desc, &c, &part, qkv));
    for (i = 0; i < c.count; i++) {
        const mt_attention_desc s = mti_cached_desc(desc, &c, i);
        MT_TRY(mt_kv_cache_attention(ctx, &s, mt_tensor_rows(qkv, i * rows, rows), &part,
                                     mt_tensor_rows(to, i * rows, rows)));
    }
    return mt_invariant_store(ctx, to, out);
}

static mt_status mti_cached_shards(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                   const mt_kv_cache *cache, mt_tensor qkv, mt_tensor out) {
    const int shards = a->proj.weight->shards;
    int64_t first;
    int s;
    for (s = 0; s < shards && desc->groups > 0; s++) {
        const mt_attention_desc part = mti_attention_shard(desc, a->groups, s, shards, &first);
        const size_t mark = mt_arena_mark(ctx);
        MT_TRY(mti_cached_shard(ctx, a, &part, first, cache, qkv, out));
        mt_arena_release(ctx, mark);
    }
    return mti_attention_zero_rest(ctx, desc, out, mti_out_width(desc));
}

/* Core attention with a cache, which turns the queries and keys of qkv itself. Over context ranks it is one call for
   check mode. */
static mt_status mti_attention_core_cached(mt_context *ctx, const mt_self_attention *a, const mt_attention_desc *desc,
                                           const mt_kv_cache *cache, mt_tensor qkv, mt_tensor out) {
    static const mt_rule rule = {"qkv out", "RR cc rr", NULL};
    mt_operand o[2];
    if (!a->cp) return mti_cached_shards(ctx, a, desc, cache, qkv, out);
    o[0].name = "qkv", o[0].t = qkv, o[0].use = MT_ARG_IN_OUT;
    o[1].name = "out", o[1].t = out, o[1].use = MT_ARG_OUT;
    MT_TRY(mt_context_parallel_agree(ctx, a->cp, &a->context, desc));
    MT_TRY(mt_rule_check(ctx, "attention to a cache over context ranks", &rule, o, 2));
    mt_check_pause(ctx);
    return mt_check_resume(ctx, mti_cached_shards(ctx, a, desc, cache, qkv, out));
}
