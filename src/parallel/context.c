/* ---- attention over context ranks -------------------------------------------------------------------------------- */

#pragma once
#include "context.h"
#include "grid.c"
#include "invariant.c"
#include "authors.h"
#include "../comm/collectives.h"
#include "../comm/overlap.h"
#include "../ops/authors.h"
#include "../ops/move.h"

/* A call of attention over context ranks. A half is the chunk of each sequence that a rank has one after the other: 2
   with zigzag, 1 without. */
typedef struct mti_ring {
    mt_context *ctx;
    mt_comm *cp;
    mt_attention_desc s; /* of whole sequences; kv_seq is set */
    mt_cp_comm_type type;
    int halves, key_halves, rank, size; /* key_halves: of keys and values */
    int own;                            /* virtual ranks from `rank` on; without invariant mode 1 */
    int whole_keys;                     /* each rank has all keys, in one half */
    int64_t queries, keys;              /* of a sequence in a half */
    int64_t rows, key_rows;             /* of a half */
    mt_tensor q, lse, out, dout;        /* of the rank */
    mt_tensor dq;                       /* in MT_F32: the sum so far */
    mt_tensor part_out, part_lse, part_dq, part_dk, part_dv; /* of a call, for a half */
    int has[2];                                              /* forward: the half has results for some keys */
} mti_ring;

/* The number of a chunk of a rank among those of a sequence. */
static int64_t mti_ring_chunk(const mti_ring *r, int rank, int half) { return half ? 2 * r->size - 1 - rank : rank; }

/* The rows of a half. */
static mt_tensor mti_half(mt_tensor t, int half, int64_t rows) { return mt_tensor_rows(t, half * rows, rows); }

/* The columns of lse of a half. */
static mt_tensor mti_half_cols(mt_tensor t, int half, int64_t cols) { return mt_tensor_cols(t, half * cols, cols); }

/* Returns the desc of the call for half `half` of this rank's queries, and half `of` of the keys of `owner`. */
static mt_attention_desc mti_ring_part(const mti_ring *r, int half, int owner, int of) {
    mt_attention_desc s = r->s;
    s.seq = r->queries;
    s.kv_seq = r->keys;
    s.part.seq = r->s.seq;
    s.part.kv_seq = r->s.kv_seq;
    s.part.first_query = mti_ring_chunk(r, r->rank, half) * r->queries;
    s.part.first_key = r->whole_keys ? 0 : mti_ring_chunk(r, owner, of) * r->keys;
    return s;
}

/* Whether a query of such a call may see a key. */
static int mti_ring_sees(const mt_attention_desc *s) {
    const int64_t first = s->part.first_query + s->part.kv_seq - s->part.seq, last = first + s->seq - 1;
    const int64_t end = s->part.first_key + s->kv_seq;
    if (s->scores.mask == MT_MASK_CAUSAL && s->part.first_key > last) return 0;
    return s->scores.window <= 0 ||
           (first - (end - 1) < s->scores.window && s->part.first_key - last < s->scores.window);
}

/* Adds the results for a part of the keys to those of a half. */
static mt_status mti_ring_forward(mti_ring *r, int half, const mt_attention_desc *s, mt_tensor k, mt_tensor v) {
    const mt_tensor out = mti_half(r->out, half, r->rows), lse = mti_half_cols(r->lse, half, r->rows);
    const int direct = !r->has[half] && out.dtype == r->q.dtype;
    const mt_tensor to = direct ? out : r->part_out, to_lse = r->has[half] ? r->part_lse : lse;
    MT_TRY(mt_dot_product_attention_forward(r->ctx, s, mti_half(r->q, half, r->rows), k, v, to, to_lse));
    if (r->has[half]) return mt_attention_merge(r->ctx, out, lse, to, to_lse);
    r->has[half] = 1;
    return direct ? MT_SUCCESS : mt_convert(r->ctx, to, out);
}

/* Adds x, of any float type, to sum in MT_F32, or writes it there. */
static mt_status mti_ring_add(mt_context *ctx, mt_tensor x, mt_tensor sum, int has) {
    return has ? mt_add(ctx, sum, x, sum) : mt_convert(ctx, x, sum);
}

/* Adds the gradients of a half of the queries and a part of the keys: to dq, and to dk and dv in MT_F32. */
static mt_status mti_ring_backward(mti_ring *r, int half, const mt_attention_desc *s, mt_tensor k, mt_tensor v,
                                   mt_tensor dk, mt_tensor dv, int has_keys) {
    MT_TRY(mt_dot_product_attention_backward(r->ctx, s, mti_half(r->q, half, r->rows), k, v,
                                             mti_half(r->out, half, r->rows), mti_half_cols(r->lse, half, r->rows),
                                             mti_half(r->dout, half, r->rows), r->part_dq, r->part_dk, r->part_dv));
    MT_TRY(mti_ring_add(r->ctx, r->part_dq, mti_half(r->dq, half, r->rows), r->has[half]));
    r->has[half] = 1;
    MT_TRY(mti_ring_add(r->ctx, r->part_dk, dk, has_keys));
    return mti_ring_add(r->ctx, r->part_dv, dv, has_keys);
}

/* Computes with half `of` of the keys and values of a rank. Backward: dk and dv, in MT_F32, become their gradients by
   this rank's queries. */
static mt_status mti_ring_half(mti_ring *r, int owner, int of, mt_tensor k, mt_tensor v, mt_tensor dk, mt_tensor dv) {
    int half, has_keys = 0;
    for (half = 0; half < r->halves; half++) {
        const mt_attention_desc s = mti_ring_part(r, half, owner, of);
        if (!mti_ring_sees(&s)) continue;
        if (!dk.data) MT_TRY(mti_ring_forward(r, half, &s, k, v));
        else MT_TRY(mti_ring_backward(r, half, &s, k, v, dk, dv, has_keys));
        has_keys = 1;
    }
    if (!dk.data || has_keys) return MT_SUCCESS;
    MT_TRY(mt_fill(r->ctx, dk, 0.0f));
    return mt_fill(r->ctx, dv, 0.0f);
}

/* Computes with the keys and values of a rank: kv has those of all its halves, first the keys and then the values.
   Backward: dkv [of the same shape] becomes their gradients. */
static mt_status mti_ring_block(mti_ring *r, int owner, mt_tensor kv, mt_tensor dkv) {
    const int64_t rows = r->key_rows;
    int of;
    for (of = 0; of < r->key_halves; of++) {
        const int values = r->key_halves + of;
        MT_TRY(mti_ring_half(r, owner, of, mti_half(kv, of, rows), mti_half(kv, values, rows),
                             dkv.data ? mti_half(dkv, of, rows) : dkv, dkv.data ? mti_half(dkv, values, rows) : dkv));
    }
    return MT_SUCCESS;
}

/* Where no query of a half sees a key: out, lse, and in backward dq. */
static mt_status mti_ring_rest(const mti_ring *r) {
    int half;
    for (half = 0; half < r->halves; half++) {
        if (r->has[half]) continue;
        if (r->dq.data) MT_TRY(mt_fill(r->ctx, mti_half(r->dq, half, r->rows), 0.0f));
        if (r->dq.data) continue;
        MT_TRY(mt_fill(r->ctx, mti_half(r->out, half, r->rows), 0.0f));
        MT_TRY(mt_fill(r->ctx, mti_half_cols(r->lse, half, r->rows), -(float)INFINITY));
    }
    return MT_SUCCESS;
}

/* Half a ring step, in the second stream: sends x to the next rank and receives y from the one before. */
static mt_status mti_ring_pass(mti_ring *r, mt_tensor x, mt_tensor y, int ticket) {
    const size_t count = (size_t)(x.rows * x.cols);
    MT_TRY(mt_overlap_begin(r->ctx, r->cp, MT_STREAM_SECOND));
    return mt_overlap_end(r->ctx, ticket,
                          mt_send_recv(r->ctx, r->cp, x.data, count, (r->rank + 1) % r->size, y.data, count,
                                       (r->rank + r->size - 1) % r->size, x.dtype));
}

/* Copies the keys and values of this rank to kv: those of a virtual rank, first the keys and then the values, after
   those of another. */
static mt_status mti_ring_pack(mti_ring *r, mt_tensor k, mt_tensor v, mt_tensor kv) {
    const int64_t rows = k.rows / r->own;
    int i;
    for (i = 0; i < r->own; i++) {
        MT_TRY(mt_copy(r->ctx, mti_half(k, i, rows), mti_half(kv, 2 * i, rows)));
        MT_TRY(mt_copy(r->ctx, mti_half(v, i, rows), mti_half(kv, 2 * i + 1, rows)));
    }
    return MT_SUCCESS;
}

/* The same from dkv to the gradients. */
static mt_status mti_ring_unpack(mti_ring *r, mt_tensor dkv, mt_tensor dk, mt_tensor dv) {
    const int64_t rows = dk.rows / r->own;
    int i;
    for (i = 0; i < r->own; i++) {
        MT_TRY(mt_convert(r->ctx, mti_half(dkv, 2 * i, rows), mti_half(dk, i, rows)));
        MT_TRY(mt_convert(r->ctx, mti_half(dkv, 2 * i + 1, rows), mti_half(dv, i, rows)));
    }
    return MT_SUCCESS;
}

/* In step i a rank has the keys of the rank i places before it. Backward: the gradients of keys travel one step behind
   them, and each rank adds its own. After the last step they are at the rank before their owner. */
static mt_status mti_ring_steps(mti_ring *r, mt_tensor k, mt_tensor v, mt_tensor dk, mt_tensor dv) {
    mt_tensor kv[2], dkv[2], own = mt_none();
    const int backward = dk.data != NULL;
    int i;
    dkv[0] = dkv[1] = mt_none();
    for (i = 0; i < 2; i++) MT_TRY(mt_arena_tensor(r->ctx, k.dtype, 2 * k.rows, k.cols, &kv[i]));
    for (i = 0; i < 2 && backward; i++) MT_TRY(mt_arena_tensor(r->ctx, MT_F32, 2 * k.rows, k.cols, &dkv[i]));
    if (backward) MT_TRY(mt_arena_tensor(r->ctx, MT_F32, 2 * k.rows, k.cols, &own));
    MT_TRY(mti_ring_pack(r, k, v, kv[0]));
    for (i = 0; i < r->size; i++) {
        const int owner = (r->rank + r->size - i) % r->size, now = i % 2, later = 1 - now;
        if (i + 1 < r->size) MT_TRY(mti_ring_pass(r, kv[now], kv[later], 0));
        if (backward && i > 0) MT_TRY(mti_ring_pass(r, dkv[later], dkv[now], 1));
        MT_TRY(mti_ring_block(r, owner, kv[now], i > 0 ? own : dkv[now]));
        MT_TRY(mt_overlap_wait(r->ctx, 0));
        if (!backward || i == 0) continue;
        MT_TRY(mt_overlap_wait(r->ctx, 1));
        MT_TRY(mt_add(r->ctx, dkv[now], own, dkv[now]));
    }
    MT_TRY(mti_ring_rest(r));
    if (!backward) return MT_SUCCESS;
    if (r->size > 1) MT_TRY(mti_ring_pass(r, dkv[1 - r->size % 2], own, 1));
    MT_TRY(mt_overlap_wait(r->ctx, 1));
    return mti_ring_unpack(r, r->size == 1 ? dkv[0] : own, dk, dv);
}

/* -- the keys and values of all ranks -- */

/* The rows of virtual rank number i of this rank. */
static mt_tensor mti_ring_own(const mti_ring *r, mt_tensor t, int i) {
    return t.data ? mti_half(t, i, r->halves * r->rows) : t;
}

static mt_tensor mti_ring_own_cols(const mti_ring *r, mt_tensor t, int i) {
    return mti_half_cols(t, i, r->halves * r->rows);
}

/* The call of virtual rank number i of this rank. */
static mti_ring mti_ring_of(const mti_ring *r, int i) {
    mti_ring one = *r;
    one.rank += i;
    one.own = 1;
    one.q = mti_ring_own(r, r->q, i);
    one.out = mti_ring_own(r, r->out, i);
    one.dout = mti_ring_own(r, r->dout, i);
    one.dq = mti_ring_own(r, r->dq, i);
    one.lse = mti_ring_own_cols(r, r->lse, i);
    return one;
}

/* The argument of mti_ring_leaf. */
typedef struct mti_ring_all {
    const mti_ring *r;
    mt_tensor kv; /* of all virtual ranks, one after the other */
} mti_ring_all;

/* The mti_leaf of a call: computes for virtual rank number i of this rank. Backward: dkv [of the shape of all keys and
   values, in MT_F32] becomes their gradients by its queries. */
static mt_status mti_ring_leaf(mt_context *ctx, const void *arg, int i, mt_tensor dkv) {
    const mti_ring_all *all = (const mti_ring_all *)arg;
    const int64_t rows = 2 * all->r->key_halves * all->r->key_rows;
    mti_ring one = mti_ring_of(all->r, i);
    int owner;
    (void)ctx;
    for (owner = 0; owner < one.size; owner++)
        MT_TRY(
            mti_ring_block(&one, owner, mti_half(all->kv, owner, rows), dkv.data ? mti_half(dkv, owner, rows) : dkv));
    return mti_ring_rest(&one);
}

/* The keys and values of all ranks, one rank after the other. The gradients of all of them are summed at once. */
static mt_status mti_ring_gathered(mti_ring *r, mt_tensor k, mt_tensor v, mt_tensor dk, mt_tensor dv) {
    const int64_t rows = 2 * k.rows, of_all = rows * mt_comm_size(r->cp);
    const size_t count = (size_t)(rows * k.cols);
    mt_tensor kv, dkv, dall;
    mti_ring_all all;
    int i;
    all.r = r;
    MT_TRY(mt_arena_tensor(r->ctx, k.dtype, rows, k.cols, &kv));
    MT_TRY(mt_arena_tensor(r->ctx, k.dtype, of_all, k.cols, &all.kv));
    MT_TRY(mti_ring_pack(r, k, v, kv));
    MT_TRY(mt_all_gather(r->ctx, r->cp, kv.data, all.kv.data, count, k.dtype));
    for (i = 0; i < r->own && !dk.data; i++) MT_TRY(mti_ring_leaf(r->ctx, &all, i, mt_none()));
    if (!dk.data) return MT_SUCCESS;
    MT_TRY(mt_arena_tensor(r->ctx, MT_F32, rows, k.cols, &dkv));
    MT_TRY(mt_arena_tensor(r->ctx, MT_F32, of_all, k.cols, &dall));
    MT_TRY(mti_shard_tree(r->ctx, mti_ring_leaf, &all, 0, r->own, dall));
    MT_TRY(mt_reduce_scatter(r->ctx, r->cp, dall.data, dkv.data, count, MT_F32, MT_SUM));
    return mti_ring_unpack(r, dkv, dk, dv);
}

/* Each rank has all keys and values: nothing travels. */
static mt_status mti_ring_local(mti_ring *r, mt_tensor k, mt_tensor v, mt_tensor dk, mt_tensor dv) {
    mt_tensor sum[2];
    sum[0] = dk, sum[1] = dv;
    if (dk.data && dk.dtype != MT_F32) MT_TRY(mt_arena_tensor(r->ctx, MT_F32, dk.rows, dk.cols, &sum[0]));
    if (dv.data && dv.dtype != MT_F32) MT_TRY(mt_arena_tensor(r->ctx, MT_F32, dv.rows, dv.cols, &sum[1]));
    MT_TRY(mti_ring_half(r, 0, 0, k, v, sum[0], sum[1]));
    MT_TRY(mti_ring_rest(r));
    if (!dk.data || dk.dtype == MT_F32) return MT_SUCCESS;
    MT_TRY(mt_convert(r->ctx, sum[0], dk));
    return mt_convert(r->ctx, sum[1], dv);
}

/* -- all tokens of some heads -- */

/* What a rank computes with MT_CP_A2A: `heads` query heads of `groups` groups, those from first_group on. If there are
   fewer groups than ranks, several ranks have the same group. */
typedef struct mti_shared_heads {
    int64_t heads, groups, first_group;
} mti_shared_heads;

static mti_shared_heads mti_heads_of(const mti_ring *r, int rank) {
    mti_shared_heads h;
    h.heads = r->s.groups * r->s.heads_per_group / r->size;
    h.groups = r->s.groups >= r->size ? r->s.groups / r->size : 1;
    h.first_group = r->s.groups * rank / r->size;
    return h;
}

/* Whether MT_CP_A2A can divide the heads. */
static int mti_heads_fit(const mti_ring *r) {
    const int64_t groups = r->s.groups, size = r->size;
    if (groups % size == 0) return 1;
    return size % groups == 0 && r->s.heads_per_group % (size / groups) == 0;
}

/* Copies between `all`, which has the rows of all ranks one after the other, and `whole`, which has them in the order
   of whole sequences of `seq` tokens. */
static mt_status mti_ring_reorder(const mti_ring *r, mt_tensor all, mt_tensor whole, int64_t seq, int to_whole) {
    const int64_t chunk = seq / r->halves / r->size, batch = r->s.batch;
    int rank, half;
    for (rank = 0; rank < r->size; rank++)
        for (half = 0; half < r->halves; half++) {
            mt_tensor x = mti_half(mti_half(all, rank, all.rows / r->size), half, batch * chunk);
            mt_tensor y = mt_tensor_rows(whole, mti_ring_chunk(r, rank, half) * chunk, chunk);
            x = mt_tensor_reshape(x, batch, chunk * all.cols); /* the chunks of a sequence are rows of these views */
            y = mt_tensor_reshape(y, 1, chunk * all.cols);
            y.rows = batch;
            y.ld = seq * all.cols;
            MT_TRY(to_whole ? mt_copy(r->ctx, x, y) : mt_copy(r->ctx, y, x));
        }
    return MT_SUCCESS;
}

/* Sends columns of x to each rank, from first(rank) * unit on, and returns the tokens of all ranks in the order of
   whole sequences. */
static mt_status mti_heads_scatter(const mti_ring *r, mt_tensor x, int64_t seq, int are_keys, mt_tensor *whole) {
    const int64_t cols = (are_keys ? mti_heads_of(r, 0).groups : mti_heads_of(r, 0).heads) * r->s.head_dim;
    mt_tensor sent, all;
    int rank;
    MT_TRY(mt_arena_tensor(r->ctx, x.dtype, r->size * x.rows, cols, &sent));
    MT_TRY(mt_arena_tensor(r->ctx, x.dtype, r->size * x.rows, cols, &all));
    for (rank = 0; rank < r->size; rank++) {
        const int64_t first = are_keys ? mti_heads_of(r, rank).first_group * r->s.head_dim : rank * cols;
        MT_TRY(mt_copy(r->ctx, mt_tensor_cols(x, first, cols), mti_half(sent, rank, x.rows)));
    }
    MT_TRY(mt_all_to_all(r->ctx, r->cp, sent.data, all.data, (size_t)(x.rows * cols), x.dtype));
    *whole = sent;
    return mti_ring_reorder(r, all, *whole, seq, 1);
}

/* The way back. Of keys, which several ranks may have, the terms are added up, in MT_F32. */
static mt_status mti_heads_gather(const mti_ring *r, mt_tensor whole, int64_t seq, int are_keys, mt_tensor x) {
    mt_tensor sent, all, sum = x;
    int64_t done = 0; /* columns of x that have a term */
    int rank;
    MT_TRY(mt_arena_tensor(r->ctx, whole.dtype, whole.rows, whole.cols, &sent));
    MT_TRY(mt_arena_tensor(r->ctx, whole.dtype, whole.rows, whole.cols, &all));
    MT_TRY(mti_ring_reorder(r, sent, whole, seq, 0));
    MT_TRY(mt_all_to_all(r->ctx, r->cp, sent.data, all.data, (size_t)(x.rows * whole.cols), whole.dtype));
    if (are_keys && r->s.groups < r->size && x.dtype != MT_F32)
        MT_TRY(mt_arena_tensor(r->ctx, MT_F32, x.rows, x.cols, &sum));
    for (rank = 0; rank < r->size; rank++) {
        const int64_t first = are_keys ? mti_heads_of(r, rank).first_group * r->s.head_dim : rank * whole.cols;
        const mt_tensor y = mt_tensor_cols(sum, first, whole.cols), term = mti_half(all, rank, x.rows);
        MT_TRY(first < done ? mt_add(r->ctx, y, term, y) : mt_convert(r->ctx, term, y));
        done = first + whole.cols;
    }
    return sum.data == x.data ? MT_SUCCESS : mt_convert(r->ctx, sum, x);
}

/* lse of this rank's heads and all tokens becomes that of all heads and this rank's tokens, or the reverse. Rows of lse
   are heads. */
static mt_status mti_heads_lse(const mti_ring *r, mt_tensor whole, mt_tensor lse, int to_whole) {
    const int64_t heads = whole.rows, chunk = r->queries, rows = lse.cols;
    mt_tensor sent, all; /* [rank of the tokens, heads, tokens of a rank] */
    int rank, half;
    int64_t b;
    MT_TRY(mt_arena_tensor(r->ctx, MT_F32, r->size * heads, rows, &sent));
    MT_TRY(mt_arena_tensor(r->ctx, MT_F32, r->size * heads, rows, &all));
    if (to_whole) {
        MT_TRY(mt_copy(r->ctx, lse, sent));
        MT_TRY(mt_all_to_all(r->ctx, r->cp, sent.data, all.data, (size_t)(heads * rows), MT_F32));
    }
    for (rank = 0; rank < r->size; rank++)
        for (half = 0; half < r->halves; half++)
            for (b = 0; b < r->s.batch; b++) {
                const mt_tensor x =
                    mt_tensor_cols(mti_half(to_whole ? all : sent, rank, heads), half * r->rows + b * chunk, chunk);
                const mt_tensor y = mt_tensor_cols(whole, b * r->s.seq + mti_ring_chunk(r, rank, half) * chunk, chunk);
                MT_TRY(to_whole ? mt_copy(r->ctx, x, y) : mt_copy(r->ctx, y, x));
            }
    if (to_whole) return MT_SUCCESS;
    MT_TRY(mt_all_to_all(r->ctx, r->cp, sent.data, all.data, (size_t)(heads * rows), MT_F32));
    return mt_copy(r->ctx, all, lse);
}

/* The desc of whole sequences and this rank's heads. */
static mt_attention_desc mti_heads_desc(const mti_ring *r) {
    const mti_shared_heads h = mti_heads_of(r, r->rank);
    mt_attention_desc s = r->s;
    const int64_t first = r->rank * h.heads;
    s.groups = h.groups;
    s.heads_per_group = h.heads / h.groups;
    s.dropout.at.first_col += first;
    if (s.scores.alibi_slopes) s.scores.alibi_slopes += first;
    if (s.bias.heads > 1) s.bias.first_head += first;
    return s;
}

typedef struct mti_heads_views {
    mt_tensor q, k, v, out, lse;
} mti_heads_views;

/* Gets the queries, keys and values of this rank's heads, and room for its results. */
static mt_status mti_heads_open(mti_ring *r, mt_tensor k, mt_tensor v, mti_heads_views *w) {
    MT_TRY(mti_heads_scatter(r, r->q, r->s.seq, 0, &w->q));
    MT_TRY(mti_heads_scatter(r, k, r->s.kv_seq, 1, &w->k));
    MT_TRY(mti_heads_scatter(r, v, r->s.kv_seq, 1, &w->v));
    MT_TRY(mt_arena_tensor(r->ctx, w->q.dtype, w->q.rows, w->q.cols, &w->out));
    return mt_arena_tensor(r->ctx, MT_F32, mti_heads_of(r, 0).heads, w->q.rows, &w->lse);
}

static mt_status mti_heads_forward(mti_ring *r, mt_tensor k, mt_tensor v, mt_tensor out, mt_tensor lse) {
    const mt_attention_desc s = mti_heads_desc(r);
    mti_heads_views w;
    MT_TRY(mti_heads_open(r, k, v, &w));
    MT_TRY(mt_dot_product_attention_forward(r->ctx, &s, w.q, w.k, w.v, w.out, lse.data ? w.lse : lse));
    MT_TRY(mti_heads_gather(r, w.out, r->s.seq, 0, out));
    return lse.data ? mti_heads_lse(r, w.lse, lse, 0) : MT_SUCCESS;
}

static mt_status mti_heads_backward(mti_ring *r, mt_tensor k, mt_tensor v, mt_tensor dq, mt_tensor dk, mt_tensor dv) {
    const mt_attention_desc s = mti_heads_desc(r);
    mt_tensor dout, whole[3];
    mti_heads_views w;
    MT_TRY(mti_heads_open(r, k, v, &w));
    MT_TRY(mti_heads_scatter(r, r->out, r->s.seq, 0, &w.out));
    MT_TRY(mti_heads_scatter(r, r->dout, r->s.seq, 0, &dout));
    MT_TRY(mti_heads_lse(r, w.lse, r->lse, 1));
    MT_TRY(mt_arena_tensor(r->ctx, dq.dtype, w.q.rows, w.q.cols, &whole[0]));
    MT_TRY(mt_arena_tensor(r->ctx, dk.dtype, w.k.rows, w.k.cols, &whole[1]));
    MT_TRY(mt_arena_tensor(r->ctx, dv.dtype, w.k.rows, w.k.cols, &whole[2]));
    MT_TRY(
        mt_dot_product_attention_backward(r->ctx, &s, w.q, w.k, w.v, w.out, w.lse, dout, whole[0], whole[1], whole[2]));
    MT_TRY(mti_heads_gather(r, whole[0], r->s.seq, 0, dq));
    MT_TRY(mti_heads_gather(r, whole[1], r->s.kv_seq, 1, dk));
    return mti_heads_gather(r, whole[2], r->s.kv_seq, 1, dv);
}

/* -- a call -- */

/* How a call communicates, with the default resolved. */
static mt_cp_comm_type mti_ring_type(const mti_ring *r, const mt_context_parallel_desc *context) {
    if (mt_context_invariant(r->ctx)) return MT_CP_ALL_GATHER;
    return context && context->comm_type && !context->whole_keys ? context->comm_type : MT_CP_P2P;
}

/* Divides a sequence of `seq` tokens among the ranks. */
static mt_status mti_ring_divide(const mti_ring *r, const char *function, const char *name, int64_t seq,
                                 int64_t *part) {
    const int64_t chunks = (int64_t)r->halves * r->size;
    *part = seq / chunks;
    if (seq % chunks == 0) return MT_SUCCESS;
    return mt_fail(r->ctx, MT_ERR_SHAPE, "%s: %s is %lld, must be a multiple of %lld, %s %d context ranks", function,
                   name, (long long)seq, (long long)chunks,
                   r->halves == 2 ? "2 chunks for each of" : "one chunk for each of", r->size);
}

static mt_status mti_ring_sizes(mti_ring *r, const char *function) {
    MT_TRY(mti_ring_divide(r, function, "seq", r->s.seq, &r->queries));
    r->keys = r->s.kv_seq;
    if (!r->whole_keys) MT_TRY(mti_ring_divide(r, function, "kv_seq", r->s.kv_seq, &r->keys));
    r->rows = r->s.batch * r->queries;
    r->key_rows = r->s.batch * r->keys;
    if (r->type != MT_CP_A2A || mti_heads_fit(r)) return MT_SUCCESS;
    return mt_fail(r->ctx, MT_ERR_SHAPE,
                   "%s: MT_CP_A2A cannot divide %lld groups of %lld query heads among %d context ranks", function,
                   (long long)r->s.groups, (long long)r->s.heads_per_group, r->size);
}

/* Notes which ranks there are, and which of them are on this one. */
static void mti_ring_place(mti_ring *r, const mt_context_parallel_desc *context) {
    const mti_cp_layout l = mti_cp_layout_of(context, mt_comm_rank(r->cp), mt_comm_size(r->cp), r->s.seq);
    r->rank = l.first;
    r->own = l.own;
    r->size = l.ranks;
    r->halves = l.halves;
    r->key_halves = r->whole_keys ? 1 : l.halves;
}

/* Checks a call, and notes its sizes in *r. */
static mt_status mti_ring_open(mt_context *ctx, const char *function, mt_comm *cp,
                               const mt_context_parallel_desc *context, const mt_attention_desc *desc, mti_ring *r) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!cp || !desc) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, cp ? "desc" : "cp");
    MT_TRY(mt_attention_check(ctx, function, desc));
    if (desc->part.seq != 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: desc->part.seq is %lld, must be 0", function,
                       (long long)desc->part.seq);
    MT_TRY(mt_check_enum(ctx, function, NULL, "context->comm_type", context ? (int)context->comm_type : 0,
                         MT_CP_COMM_TYPE_WORDS));
    memset(r, 0, sizeof *r);
    r->ctx = ctx;
    r->cp = cp;
    r->s = *desc;
    if (r->s.kv_seq == 0) r->s.kv_seq = r->s.seq;
    r->type = mti_ring_type(r, context);
    r->whole_keys = context && context->whole_keys;
    MT_TRY(mti_cp_layout_check(ctx, function, context, mt_comm_size(cp)));
    mti_ring_place(r, context);
    MT_TRY(mt_context_parallel_agree(ctx, cp, context, desc));
    return mti_ring_sizes(r, function);
}

static mt_status mti_ring_numbers(mt_context *ctx, const mt_comm *cp, const mt_context_parallel_desc *context,
                                  const mt_attention_desc *s) {
    MT_TRY(mt_check_number(ctx, cp, "desc.batch of attention", (float)s->batch));
    MT_TRY(mt_check_number(ctx, cp, "desc.seq of attention", (float)s->seq));
    MT_TRY(mt_check_number(ctx, cp, "desc.kv_seq of attention", (float)s->kv_seq));
    MT_TRY(mt_check_number(ctx, cp, "mask of attention", (float)s->scores.mask));
    MT_TRY(mt_check_number(ctx, cp, "window of attention", (float)s->scores.window));
    MT_TRY(mt_check_number(ctx, cp, "softcap of attention", s->scores.softcap));
    MT_TRY(mt_check_number(ctx, cp, "scale of attention", s->scores.scale));
    MT_TRY(mt_check_number(ctx, cp, "dropout of attention", s->dropout.p));
    MT_TRY(mt_check_number(ctx, cp, "comm_type of attention", (float)(context ? context->comm_type : 0)));
    MT_TRY(mt_check_number(ctx, cp, "context.invariant of attention", (float)(context ? context->invariant : 0)));
    return mt_check_number(ctx, cp, "contiguous of attention", (float)(context ? context->contiguous : 0));
}

MT_API mt_status mt_context_parallel_agree(mt_context *ctx, const mt_comm *cp, const mt_context_parallel_desc *context,
                                           const mt_attention_desc *desc) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!desc) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_context_parallel_agree: desc is NULL");
    if (mt_check_mode(ctx) != 2) return MT_SUCCESS;
    MT_TRY(mti_ring_numbers(ctx, cp, context, desc));
    if (desc->lengths)
        MT_TRY(mt_check_replica(ctx, cp, "lengths of attention", NULL,
                                mt_tensor_make(desc->lengths, MT_I32, 1, desc->batch)));
    if (!desc->cu_seqlens) return MT_SUCCESS;
    return mt_check_replica(ctx, cp, "cu_seqlens of attention", NULL,
                            mt_tensor_make(desc->cu_seqlens, MT_I32, 1, desc->documents + 1));
}

/* The rules for the tensors of a rank: heads over the tensor ranks, rows over the context and data ranks. [backward]
   With whole keys, their gradients are terms of sums over the context ranks. [2 + backward] */
static const mt_rule mti_ring_rules[4] = {
    {"q k v out lse", "RRRRR ccccr rrrrc", NULL},
    {"q k v out lse dout dq(q) dk(k) dv(v)", "RRRRRRRRR ccccrcccc rrrrcrrrr", NULL},
    {"q k v out lse", "RRRRR ccccr rrrrc rRRrc", NULL},
    {"q k v out lse dout dq(q) dk(k) dv(v)", "RRRRRRRRR ccccrcccc rrrrcrrrr rRRrcrrPP", NULL}};

/* Checks the tensors of a call, in the order of the rules, and tells check mode of it. */
static mt_status mti_ring_check(const mti_ring *r, const char *function, mt_tensor *const *views, int backward) {
    const mt_attention_desc *s = &r->s;
    const int64_t heads = s->groups * s->heads_per_group, q = r->own * r->halves * r->rows;
    const int64_t k = r->own * r->key_halves * r->key_rows; /* whole keys: one virtual rank */
    static const char *const names[] = {"q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv"};
    static const char of_keys[] = "011000011", results[] = "000110111";
    mt_arg args[9];
    mt_operand operands[9];
    int count = backward ? 9 : 5, i;
    for (i = 0; i < count; i++) {
        const int written = backward ? i > 5 : results[i] == '1';
        args[i].name = operands[i].name = names[i];
        args[i].view = views[i];
        args[i].rows = i == 4 ? heads : of_keys[i] == '1' ? k : q;
        args[i].cols = i == 4 ? q : (of_keys[i] == '1' ? s->groups : heads) * s->head_dim;
        args[i].type = i == 4 ? MT_ARG_F32 : MT_ARG_FLOAT;
        args[i].use = written ? MT_ARG_OUT : MT_ARG_IN;
        if (i > 4) args[i].use |= MT_ARG_GRADIENT;
        if (i == 4 && !backward) args[i].use |= MT_ARG_OPTIONAL;
        operands[i].t = *views[i];
        operands[i].use = args[i].use & ~MT_ARG_OPTIONAL;
    }
    MT_TRY(mt_args_check(r->ctx, function, args, count));
    for (i = 0; i < count * count; i++)
        if (i / count != i % count && (args[i / count].use & MT_ARG_OUT))
            MT_TRY(mt_check_apart(r->ctx, function, names[i / count], *views[i / count], names[i % count],
                                  *views[i % count]));
    return mt_rule_check(r->ctx, function, &mti_ring_rules[2 * r->whole_keys + backward], operands, count);
}

/* Refuses a group whose ranks do not have parts of the sequences, as far as check mode knows. */
static mt_status mti_ring_group(const mti_ring *r, const char *function, mt_tensor q) {
    const mt_placement is = mt_placement_of(r->ctx, r->cp, q);
    const char *group = mt_comm_name(r->cp);
    if (mt_comm_size(r->cp) == 1 || is == MT_UNDECLARED) return MT_SUCCESS;
    if (is != MT_SPLIT_ROWS)
        return mt_fail(r->ctx, MT_ERR_ARGUMENT,
                       "%s: q is %s over \"%s\", and cp must be the group whose ranks have other tokens", function,
                       mt_placement_name(is), group);
    if (strcmp(group, "data") == 0)
        return mt_fail(
            r->ctx, MT_ERR_ARGUMENT,
            "%s: the ranks of \"data\" have other sequences, and cp must be the group whose ranks have parts of "
            "the same",
            function);
    return MT_SUCCESS;
}

static mt_status mti_ring_travel(mti_ring *r, mt_tensor k, mt_tensor v, mt_tensor dk, mt_tensor dv) {
    if (r->whole_keys) return mti_ring_local(r, k, v, dk, dv);
    return r->type == MT_CP_ALL_GATHER ? mti_ring_gathered(r, k, v, dk, dv) : mti_ring_steps(r, k, v, dk, dv);
}

/* The room of a call, and the sums in MT_F32 of what is not MT_F32 itself. */
static mt_status mti_ring_rooms(mti_ring *r, mt_tensor k, mt_tensor v, int backward) {
    mt_context *ctx = r->ctx;
    if (!backward) {
        MT_TRY(mt_arena_tensor(ctx, r->q.dtype, r->rows, r->q.cols, &r->part_out));
        return mt_arena_tensor(ctx, MT_F32, r->lse.rows, r->rows, &r->part_lse);
    }
    MT_TRY(mt_arena_tensor(ctx, r->q.dtype, r->rows, r->q.cols, &r->part_dq));
    MT_TRY(mt_arena_tensor(ctx, k.dtype, r->key_rows, k.cols, &r->part_dk));
    return mt_arena_tensor(ctx, v.dtype, r->key_rows, v.cols, &r->part_dv);
}

static mt_status mti_ring_run_forward(mti_ring *r, mt_tensor k, mt_tensor v, mt_tensor out, mt_tensor lse) {
    if (r->type == MT_CP_A2A) return mti_heads_forward(r, k, v, out, lse);
    r->out = out;
    r->lse = lse;
    if (out.dtype != MT_F32) MT_TRY(mt_arena_tensor(r->ctx, MT_F32, out.rows, out.cols, &r->out));
    if (!lse.data) MT_TRY(mt_arena_tensor(r->ctx, MT_F32, r->s.groups * r->s.heads_per_group, out.rows, &r->lse));
    MT_TRY(mti_ring_rooms(r, k, v, 0));
    MT_TRY(mti_ring_travel(r, k, v, mt_none(), mt_none()));
    return out.dtype == MT_F32 ? MT_SUCCESS : mt_convert(r->ctx, r->out, out);
}

static mt_status mti_ring_run_backward(mti_ring *r, mt_tensor k, mt_tensor v, mt_tensor dq, mt_tensor dk,
                                       mt_tensor dv) {
    if (r->type == MT_CP_A2A) return mti_heads_backward(r, k, v, dq, dk, dv);
    r->dq = dq;
    if (dq.dtype != MT_F32) MT_TRY(mt_arena_tensor(r->ctx, MT_F32, dq.rows, dq.cols, &r->dq));
    MT_TRY(mti_ring_rooms(r, k, v, 1));
    MT_TRY(mti_ring_travel(r, k, v, dk, dv));
    return dq.dtype == MT_F32 ? MT_SUCCESS : mt_convert(r->ctx, r->dq, dq);
}

MT_API mt_status mt_context_parallel_attention_forward(mt_context *ctx, mt_comm *cp,
                                                       const mt_context_parallel_desc *context,
                                                       const mt_attention_desc *desc, mt_tensor q, mt_tensor k,
                                                       mt_tensor v, mt_tensor out, mt_tensor lse) {
    static const char *const function = "mt_context_parallel_attention_forward";
    mt_tensor *const views[] = {&q, &k, &v, &out, &lse};
    mti_ring r;
    mt_status status;
    size_t mark;
    MT_TRY(mti_ring_open(ctx, function, cp, context, desc, &r));
    MT_TRY(mti_ring_group(&r, function, q));
    MT_TRY(mti_ring_check(&r, function, views, 0));
    mark = mt_arena_mark(ctx);
    r.q = q;
    mt_check_pause(ctx);
    status = mt_check_resume(ctx, mti_ring_run_forward(&r, k, v, out, lse));
    mt_arena_release(ctx, mark);
    return status;
}

MT_API mt_status mt_context_parallel_attention_backward(mt_context *ctx, mt_comm *cp,
                                                        const mt_context_parallel_desc *context,
                                                        const mt_attention_desc *desc, mt_tensor q, mt_tensor k,
                                                        mt_tensor v, mt_tensor out, mt_tensor lse, mt_tensor dout,
                                                        mt_tensor dq, mt_tensor dk, mt_tensor dv) {
    static const char *const function = "mt_context_parallel_attention_backward";
    mt_tensor *const views[] = {&q, &k, &v, &out, &lse, &dout, &dq, &dk, &dv};
    mti_ring r;
    mt_status status;
    size_t mark;
    MT_TRY(mti_ring_open(ctx, function, cp, context, desc, &r));
    MT_TRY(mti_ring_group(&r, function, q));
    MT_TRY(mti_ring_check(&r, function, views, 1));
    mark = mt_arena_mark(ctx);
    r.q = q, r.out = out, r.lse = lse, r.dout = dout;
    mt_check_pause(ctx);
    status = mt_check_resume(ctx, mti_ring_run_backward(&r, k, v, dq, dk, dv));
    mt_arena_release(ctx, mark);
    return status;
}
