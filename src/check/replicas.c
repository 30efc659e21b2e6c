/* ---- check mode compares values ---------------------------------------------------------------------------------- */

#pragma once
#include "places.c"
#include "../comm/compare.c"

/* When check is 2, each call hashes what it reads and what is replicated over a group. That is when the values exist,
   and it finds them changed after they were written, too. Each group has a list of these hashes. mt_check_replicas
   compares one hash of the whole list, and then forgets the list. If the hashes differ, two ranks exchange the lists. A
   rank may read more than others, such as a loss that rank 0 prints. So two entries are compared when the same calls
   lie between the last collective of the group and them. Notes, such as the gradients in mt_sync_gradients, are
   compared apart from what calls read. */

#define MTI_REPLICAS_MOST 1048576 /* entries of a list; further ones are dropped */
#define MTI_REPLICAS_EVERY 256    /* a list is compared at the latest after so many collectives of its group */
#define MTI_REPLICA_SUMS 4096     /* hashes that a GPU keeps until the host fetches them */
#define MTI_REPLICA_TEXT 512      /* bytes that describe an entry, at most */
#define MTI_REPLICA_DIGITS 16

typedef struct mti_replica {
    const char *where, *with; /* the call that read it, and a parameter of the call, or NULL */
    const char *by, *by_with; /* the call that wrote it, or NULL */
    char operand[24];
    /* what the hash is of: v values, p a place, n numbers, c the shape of a view, z of one that is zero, t the rank
       that adds what all ranks have to a sum; u any */
    char differs;
    uint64_t moves; /* number of collectives of the group before */
    uint64_t hash;
    int sum; /* on a GPU: 1 + its place in `sums`, until the host has fetched it */
} mti_replica;

typedef struct mti_replica_list {
    mti_replica *list;
    size_t count, capacity;
    uint64_t moves;
} mti_replica_list;

/* What ranks of a group have each for itself. Kinds:
   s  not all ranks may have the same
   S  no two ranks may have the same
   d  of ranks with other tokens: two ranks may have the same, but not in all entries of the same name, in
      MTI_DATA_ALIKE comparisons from the first one on
   c  ids of context ranks: if they count up, also with jumps, no two ranks may have the same
   i  ids of rows: not all ranks may have the same, unless they have whole sequences
   p  the same ids: if they count up on each rank, the ranks together must have each position as often as any other
   g  a range of the columns of what all ranks have: all columns must be read by some rank */
typedef struct mti_share {
    const char *where, *with;
    char what[24], kind;
    int is_view;    /* 1: of mti_view_add */
    int64_t rows;   /* of kinds i, p and c */
    uint64_t piece; /* of kind g: the age of the whole */
    uint64_t mark;  /* a hash; of kind g the first column, the columns, and those of the whole, in 1024ths of it */
} mti_share;

typedef struct mti_share_list {
    mti_share *list;
    size_t count, capacity;
    int64_t seq;    /* of mt_check_sequences; 0: none was noted, -1: several, or not known */
    int data_alike; /* comparisons, from the first one on, in which data ranks had the same; -1: they had not */
} mti_share_list;

#define MTI_DATA_ALIKE 3 /* so many are no chance */

typedef struct mti_replicas {
    mti_replica_list groups[MTI_AXES];
    mti_share_list shares[MTI_AXES];
    uint64_t *sums; /* [MTI_REPLICA_SUMS] on a GPU; NULL: none yet */
    int used;       /* of the sums */
} mti_replicas;

static void mti_replicas_use_names(mti_checker *c) {
    size_t i;
    int g;
    for (g = 0; c->replicas && g < MTI_AXES; g++)
        for (i = 0; i < c->replicas->groups[g].count; i++) {
            mti_name_use(&c->names, c->replicas->groups[g].list[i].with);
            mti_name_use(&c->names, c->replicas->groups[g].list[i].by_with);
        }
}

/* Whether values are hashed now. A recorded graph cannot be compared, and work that overlaps is not waited for. */
static int mti_replicas_on(const mt_context *ctx) {
    return mt_check_mode(ctx) == 2 && !ctx->recording && ctx->stream == ctx->compute_stream;
}

/* Fetches the hashes that a GPU has computed. */
static mt_status mti_replicas_fetch(mt_context *ctx) {
    mti_replicas *r = ctx->checker->replicas;
    size_t i, bytes = (size_t)r->used * sizeof *r->sums;
    uint64_t *sums;
    mt_status status;
    int g;
    if (r->used == 0) return MT_SUCCESS;
    sums = (uint64_t *)mt_host_alloc(bytes);
    if (!sums) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for the hashes of %d tensors", r->used);
    status = mt_cuda_fetch(ctx, sums, r->sums, bytes);
    if (status == MT_SUCCESS) status = mt_cuda_zero(ctx, r->sums, bytes);
    for (g = 0; status == MT_SUCCESS && g < ctx->checker->count; g++)
        for (i = 0; i < r->groups[g].count; i++) {
            mti_replica *e = &r->groups[g].list[i];
            if (e->sum) e->hash = sums[e->sum - 1];
            e->sum = 0;
        }
    r->used = 0;
    mt_host_free(sums);
    return status;
}

/* Without data, the hash of a view is its shape, whether it is zero and, if it is a part of a piece, its place there.
   So it is found when ranks multiply different columns of what all have, or when only some ranks have computed it. */
static void mti_replica_shape(const mti_checker *c, mt_tensor t, mti_replica *e) {
    mti_extent at = mti_extent_of(t);
    const mti_placed *p = mti_newest_at(c, at);
    if (p && p->content > MT_CONTENT_ANY && mti_extent_covers(at, p->at)) {
        e->differs = 'v';
        e->hash = p->content;
        return;
    }
    e->differs = mti_known_of(c, t).zero ? 'z' : 'c';
    e->hash = mti_hash_number(mti_hash_number((uint64_t)e->differs, (uint64_t)t.rows), (uint64_t)t.cols);
    if (p && mti_extent_covers(p->at, at))
        e->hash = mti_hash_number(e->hash, (uint64_t)at.begin - (uint64_t)p->at.begin);
}

static mt_status mti_replica_hash(mt_context *ctx, mt_tensor t, mti_replica *e) {
    mti_replicas *r = ctx->checker->replicas;
    void *memory = NULL;
    e->differs = 'v';
    if (ctx->device == MT_DEVICE_META) return mti_replica_shape(ctx->checker, t, e), MT_SUCCESS;
    if (ctx->device != MT_DEVICE_CUDA) return mt_hash_add(ctx, t, 0, 0, t.cols, &e->hash);
    if (!r->sums) {
        MT_TRY(mt_context_alloc(ctx, MTI_REPLICA_SUMS * sizeof *r->sums, &memory));
        r->sums = (uint64_t *)memory;
    }
    if (r->used == MTI_REPLICA_SUMS) MT_TRY(mti_replicas_fetch(ctx));
    e->sum = ++r->used;
    return mt_hash_add(ctx, t, 0, 0, t.cols, &r->sums[e->sum - 1]);
}

/* Adds a copy of *e to the list of group g. */
static mt_status mti_replica_add(mt_context *ctx, int g, const mti_replica *e) {
    mti_replica_list *l = &ctx->checker->replicas->groups[g];
    if (l->count == MTI_REPLICAS_MOST) return MT_SUCCESS;
    if (l->count == l->capacity) {
        size_t capacity = l->capacity ? 2 * l->capacity : 256;
        mti_replica *list = (mti_replica *)mt_host_alloc(capacity * sizeof *list);
        if (!list) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for the hashes of %zu tensors", capacity);
        if (l->count) memcpy(list, l->list, l->count * sizeof *list);
        mt_host_free(l->list);
        l->list = list;
        l->capacity = capacity;
    }
    l->list[l->count] = *e;
    l->list[l->count++].moves = l->moves;
    return MT_SUCCESS;
}

/* Notes that a call takes an operand that all ranks have for this rank's term of a sum. Only one of them may. */
static mt_status mti_term_note(mt_context *ctx, mti_replica e, unsigned terms) {
    int g;
    e.differs = 't';
    for (g = 0; g < ctx->checker->count; g++) {
        if (!(terms >> g & 1)) continue;
        e.hash = mti_hash_number('t', (uint64_t)ctx->checker->axes[g].rank);
        MT_TRY(mti_replica_add(ctx, g, &e));
    }
    return MT_SUCCESS;
}

/* Notes that ranks may have read other rows or columns, so that their lists have the same entries. */
static mt_status mti_apart_note(mt_context *ctx, int g, mti_replica e) {
    e.differs = 'u';
    e.hash = 0;
    e.sum = 0;
    return mti_replica_add(ctx, g, &e);
}

/* -- shares: what ranks must not have alike -- */

static mt_status mti_share_add(mt_context *ctx, int g, const mti_share *e) {
    mti_share_list *l = &ctx->checker->replicas->shares[g];
    if (l->count == MTI_REPLICAS_MOST) return MT_SUCCESS;
    if (l->count == l->capacity) {
        size_t capacity = l->capacity ? 2 * l->capacity : 64;
        mti_share *list = (mti_share *)mt_host_alloc(capacity * sizeof *list);
        if (!list) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for the shares of %zu tensors", capacity);
        if (l->count) memcpy(list, l->list, l->count * sizeof *list);
        mt_host_free(l->list);
        l->list = list;
        l->capacity = capacity;
    }
    l->list[l->count++] = *e;
    return MT_SUCCESS;
}

static const char *mti_element_at(mt_tensor t, int64_t row, int64_t col) {
    return (const char *)t.data + (size_t)(row * mt_tensor_ld(t) + col) * mt_dtype_size(t.dtype);
}

/* Whether t tells ranks apart: neither all of its rows nor all of its columns are equal. */
static int mti_varies(mt_tensor t) {
    size_t size = mt_dtype_size(t.dtype);
    int64_t i, j;
    int rows = t.rows == 1, cols = t.cols == 1;
    for (i = 0; i < t.rows && !(rows && cols); i++)
        for (j = 0; j < t.cols; j++) {
            rows |= memcmp(mti_element_at(t, i, j), mti_element_at(t, 0, j), size) != 0;
            cols |= memcmp(mti_element_at(t, i, j), mti_element_at(t, i, 0), size) != 0;
        }
    return rows && cols && t.rows * t.cols > 1;
}

/* Where ids do not count up: the number of rows that have neither the id after that of the row before, nor that of the
   first row, with which a sequence may begin. */
static int64_t mti_ids_jumps(mt_tensor t) {
    int32_t first = 0, id;
    int64_t i, last = 0, jumps = 0, n = t.rows * t.cols; /* ids may be as large as INT32_MAX */
    for (i = 0; i < n; i++) {
        memcpy(&id, mti_element_at(t, i / t.cols, i % t.cols), sizeof id);
        if (i == 0) first = id;
        jumps += i > 0 && id != last + 1 && id != first;
        last = id;
    }
    return jumps;
}

/* Whether ids tell ranks apart: there are more than two different ones, which may be the same in each sequence. */
static int mti_ids_differ(mt_tensor t) {
    int32_t low = 0, high = 0, id;
    int64_t i, others = 0, n = t.rows * t.cols;
    for (i = 0; i < n; i++) {
        memcpy(&id, mti_element_at(t, i / t.cols, i % t.cols), sizeof id);
        if (i == 0) low = high = id;
        low = id < low ? id : low;
        high = id > high ? id : high;
    }
    for (i = 0; i < n; i++) {
        memcpy(&id, mti_element_at(t, i / t.cols, i % t.cols), sizeof id);
        others += id != low && id != high;
    }
    return others > 0;
}

/* Positions that count up, and begin at 0 again at the end of each sequence. */
typedef struct mti_counting {
    int64_t first, wrap, rows; /* wrap: the length of a sequence, if one ends before the last row; 0: none does */
} mti_counting;

#define MTI_COUNTING_BITS 21 /* of each number in a mark */
#define MTI_NO_MARK UINT64_MAX

/* Returns the mark of kind p: that of ids that count up, or MTI_NO_MARK. */
static uint64_t mti_counting_mark(mt_tensor ids) {
    const int64_t most = 1 << MTI_COUNTING_BITS, rows = ids.rows * ids.cols;
    mti_counting c = {0, 0, rows};
    int32_t id;
    int64_t i, last = 0; /* ids may be as large as INT32_MAX */
    for (i = 0; i < rows; i++) {
        memcpy(&id, mti_element_at(ids, i / ids.cols, i % ids.cols), sizeof id);
        if (i == 0) c.first = id;
        else if (id == 0 && (c.wrap == 0 || c.wrap == last + 1)) c.wrap = last + 1;
        else if (id != last + 1) return MTI_NO_MARK;
        last = id;
    }
    if (c.first < 0 || c.first >= most || c.wrap < 0 || c.wrap >= most || rows >= most) return MTI_NO_MARK;
    return (uint64_t)c.first | (uint64_t)c.wrap << MTI_COUNTING_BITS | (uint64_t)rows << 2 * MTI_COUNTING_BITS;
}

static mti_counting mti_counting_of(uint64_t mark) {
    const uint64_t mask = ((uint64_t)1 << MTI_COUNTING_BITS) - 1;
    mti_counting c;
    c.first = (int64_t)(mark & mask);
    c.wrap = (int64_t)(mark >> MTI_COUNTING_BITS & mask);
    c.rows = (int64_t)(mark >> 2 * MTI_COUNTING_BITS);
    return c;
}

/* Whether ids of `rows` rows are positions in sequences of `seq` tokens. */
static int mti_is_counting(uint64_t mark, int64_t rows, int64_t seq) {
    mti_counting c = mti_counting_of(mark);
    if (mark == MTI_NO_MARK || c.rows != rows) return 0;
    return c.wrap ? c.wrap == seq && c.first < seq : c.first + c.rows <= seq;
}

/* Whether two ranks have positions that do not fit together: if each rank has the next `rows` rows of sequences, their
   first positions are multiples of a step apart, and each of these is that of equally many ranks. Without the last
   position on any rank they may be tokens that count up. mark(rank) is all[rank * count]. */
static int mti_positions_misfit(const uint64_t *all, size_t count, int ranks, int64_t rows, int64_t seq, int *a,
                                int *b) {
    int64_t step = seq, rest = rows, next, apart;
    int i, alike, ends = 0;
    if (seq <= 0 || rows < 3 || rows % seq == 0 || rows * ranks % seq != 0) return 0;
    for (i = 0; i < ranks; i++) {
        if (!mti_is_counting(all[(size_t)i * count], rows, seq)) return 0;
        ends |= mti_counting_of(all[(size_t)i * count]).first + rows >= seq;
    }
    if (!ends) return 0;
    while (rest) next = step % rest, step = rest, rest = next; /* the greatest common divisor */
    for (*b = 1; *b < ranks; ++*b)
        for (*a = 0, alike = 1; *a < *b; ++*a) {
            apart = mti_counting_of(all[(size_t)*a * count]).first - mti_counting_of(all[(size_t)*b * count]).first;
            alike += apart == 0;
            if (apart % step != 0 || alike > ranks * step / seq) return 1;
        }
    return 0;
}

/* Sets *mark to a hash of what a rank has in t. Returns 0 when nothing can be said: values that are all equal, those of
   a GPU, and on MT_DEVICE_META what no operator has made of numbers. */
static int mti_share_mark(mt_context *ctx, mt_tensor t, uint64_t *mark) {
    const mti_extent at = mti_extent_of(t);
    const mti_placed *p = mti_newest_at(ctx->checker, at);
    *mark = p ? p->content : 0;
    if (*mark == MT_CONTENT_ANY || mti_is_meant(ctx->checker, at) || (*mark && !mti_extent_covers(at, p->at))) return 0;
    if (ctx->device == MT_DEVICE_META) return *mark != 0;
    if (ctx->device != MT_DEVICE_CPU || t.dtype == MT_U8 || !mti_varies(t)) return 0;
    *mark = 0;
    return mt_hash_add(ctx, t, 0, 0, t.cols, mark) == MT_SUCCESS;
}

/* Notes ids that the ranks of g have for tokens of their own. Those that tell nothing are noted, too, so that the lists
   of all ranks have the same entries. */
static mt_status mti_token_ids_add(mt_context *ctx, int g, mt_tensor ids, mti_share *e) {
    const uint64_t content = e->mark;
    const int64_t jumps = mti_ids_jumps(ids);
    const int counts_up = 2 * jumps < ids.rows * ids.cols; /* positions, which jump to a rank's second chunk */
    const int differ = mti_ids_differ(ids);
    if (counts_up || !differ) e->mark = MTI_NO_MARK;
    MT_TRY(mti_share_add(ctx, g, e));
    if (mti_is_data(&ctx->checker->axes[g])) return MT_SUCCESS;
    e->kind = 'c';
    e->mark = !differ ? MTI_NO_MARK : counts_up && jumps ? content : mti_counting_mark(ids);
    return mti_share_add(ctx, g, e);
}

/* Notes ids of which the ranks of g have rows. */
static mt_status mti_row_ids_add(mt_context *ctx, int g, mt_tensor ids, mti_share *e) {
    if (!mti_ids_differ(ids)) return MT_SUCCESS;
    MT_TRY(mti_share_add(ctx, g, e));
    e->kind = 'p';
    e->mark = mti_counting_mark(ids);
    return mti_share_add(ctx, g, e);
}

/* Notes an operand that a call reads and that group g splits: what the program has declared, and integers. */
static mt_status mti_share_read(mt_context *ctx, int g, const char *where, const char *with, const mt_operand *o,
                                const mti_known *known) {
    const int is_ids = o->t.dtype == MT_I32, tokens = mti_has_tokens(&ctx->checker->axes[g]);
    mti_share e;
    if (known->may[g] != 1 << MT_SPLIT_ROWS && known->may[g] != 1 << MT_SPLIT_COLS) return MT_SUCCESS;
    if (ctx->checker->axes[g].only_group) return MT_SUCCESS;
    if (!is_ids && !known->is_declared) return MT_SUCCESS;
    if (is_ids && tokens && ctx->device != MT_DEVICE_CPU) return MT_SUCCESS;
    memset(&e, 0, sizeof e);
    e.where = where;
    e.with = with;
    e.kind = tokens ? 'd' : is_ids ? 'i' : 's';
    e.rows = o->t.rows * o->t.cols;
    snprintf(e.what, sizeof e.what, "%s", o->name);
    if (!mti_share_mark(ctx, o->t, &e.mark) && !(is_ids && tokens && !mti_varies(o->t))) return MT_SUCCESS;
    if (!is_ids || ctx->device != MT_DEVICE_CPU) return mti_share_add(ctx, g, &e);
    return tokens ? mti_token_ids_add(ctx, g, o->t, &e) : mti_row_ids_add(ctx, g, o->t, &e);
}

/* The newest piece that has all of a view and is replicated over group g, or NULL. */
static const mti_placed *mti_replicated_at(const mti_checker *c, int g, mti_extent at) {
    const mti_placed *p = mti_newest_at(c, at);
    return p && mti_extent_covers(p->at, at) && p->may[g] == 1 << MT_REPLICATED ? p : NULL;
}

/* Notes a view of a call in memory that is at `whole`: it must not be that of all ranks. */
static mt_status mti_view_add(mt_context *ctx, int g, const char *where, const char *with, mti_extent view,
                              mti_extent whole) {
    mti_share e;
    memset(&e, 0, sizeof e);
    e.where = where;
    e.with = with;
    e.kind = 's';
    e.is_view = 1;
    e.mark = (uint64_t)(view.end - view.begin) << 32 ^ (uint64_t)(view.begin - whole.begin);
    snprintf(e.what, sizeof e.what, "the view");
    return mti_share_add(ctx, g, &e);
}

/* Notes the view that mt_check_view takes for this rank's part of what all ranks have. */
static mt_status mti_view_share(mt_context *ctx, int g, mt_tensor t, mt_placement placement) {
    const mti_placed *p;
    if (!mti_replicas_on(ctx) || !mti_has_elements(t)) return MT_SUCCESS;
    if (placement != MT_SPLIT_ROWS && placement != MT_SPLIT_COLS) return MT_SUCCESS;
    p = mti_replicated_at(ctx->checker, g, mti_extent_of(t));
    if (!p || mti_extent_covers(mti_extent_of(t), p->at)) return MT_SUCCESS;
    if (mti_is_meant(ctx->checker, mti_extent_of(t))) return MT_SUCCESS;
    return mti_view_add(ctx, g, "mt_check_view", p->name ? p->name : p->with, mti_extent_of(t), p->at);
}

/* Whether a piece inside e is this rank's part of what a call has written, and what group g splits. */
static int mti_is_own_part(const mti_placed *p, int g, mti_extent e) {
    if (!p->by || p->zero || p->is_declared || !mti_extent_covers(e, p->at)) return 0;
    return p->may[g] == 1 << MT_SPLIT_ROWS || p->may[g] == 1 << MT_SPLIT_COLS;
}

/* Whether t has zeros, with parts or terms of this rank written in. If it has something else, the program has written
   it since, and what calls have written before is no longer there. */
static int mti_is_of_parts(const mti_checker *c, int g, mt_tensor t) {
    const mti_extent e = mti_extent_of(t);
    const mti_placed *p = NULL;
    if (mti_known_of(c, t).unwritten) return 0;
    while ((p = mti_placed_older(&c->written, e, p ? p->age : UINT64_MAX)) != NULL) {
        if (mti_extent_covers(p->at, e)) return p->zero;
        if (!p->zero && p->may[g] != 1 << MT_PARTIAL && !mti_is_own_part(p, g, e)) return 0;
    }
    return 1;
}

/* Notes the views of t, a term of a sum, to which calls have written this rank's part of what is split: if it is the
   same view on all ranks, the sum adds up other parts. */
static mt_status mti_terms_share(mt_context *ctx, int g, mt_tensor t) {
    const mti_extent e = mti_extent_of(t);
    const mti_placed *p = NULL;
    if (!mti_replicas_on(ctx) || mti_is_data(&ctx->checker->axes[g])) return MT_SUCCESS;
    if (!mti_is_of_parts(ctx->checker, g, t)) return MT_SUCCESS;
    while ((p = mti_placed_older(&ctx->checker->written, e, p ? p->age : UINT64_MAX)) != NULL) {
        if (mti_extent_covers(p->at, e)) return MT_SUCCESS; /* what is older is no longer there */
        if (mti_is_own_part(p, g, e) && !mti_is_meant(ctx->checker, p->at))
            MT_TRY(mti_view_add(ctx, g, p->by, p->with, p->at, e));
    }
    return MT_SUCCESS;
}

#define MTI_RANGE_PARTS 1024 /* a range is counted in these parts of the columns */

/* Notes which columns of what all ranks have a call reads together with an operand that is split by columns. Each rank
   may read its own, so the values are not compared then. */
static mt_status mti_range_note(mt_context *ctx, int g, const mti_ruling *r, const mt_operand *o, mti_known *known) {
    const mti_extent at = mti_extent_of(o->t);
    const mti_placed *p;
    uintptr_t first;
    mti_share e;
    if (!mti_replicas_on(ctx) || known->may[g] != 1 << MT_REPLICATED || known->parameter) return MT_SUCCESS;
    p = mti_replicated_at(ctx->checker, g, at);
    if (!p || at.width >= p->at.width || !mti_extents_share_rows(at, p->at)) return MT_SUCCESS;
    known->apart |= 1u << g;
    first = (at.begin - p->at.begin) % p->at.pitch;
    memset(&e, 0, sizeof e);
    e.where = r->where;
    e.with = p->with;
    e.kind = 'g';
    e.piece = p->age;
    e.mark = (uint64_t)(first * MTI_RANGE_PARTS / p->at.width) << 16;
    e.mark |= (uint64_t)((first + at.width) * MTI_RANGE_PARTS / p->at.width);
    snprintf(e.what, sizeof e.what, "%s", o->name);
    return mti_share_add(ctx, g, &e);
}

/* Whether the ranges that ranks have read of the piece of entry i leave columns that none has read. */
static int mti_range_misses(const mti_share_list *l, size_t i, const uint64_t *all, int ranks) {
    unsigned char read[MTI_RANGE_PARTS];
    size_t k;
    uint64_t part;
    int rank;
    memset(read, 0, sizeof read);
    for (k = 0; k < l->count; k++)
        for (rank = 0; rank < ranks && l->list[k].kind == 'g' && l->list[k].piece == l->list[i].piece; rank++) {
            uint64_t mark = all[(size_t)rank * l->count + k];
            for (part = mark >> 16; part < (mark & 0xffff) && part < MTI_RANGE_PARTS; part++) read[part] = 1;
        }
    return memchr(read, 0, sizeof read) != NULL;
}

/* Whether ranks a and b have alike what they must not, where entry i is. Of data, in all entries of the name. */
static int mti_pair_alike(const mti_share_list *l, size_t i, const uint64_t *all, int a, int b) {
    const uint64_t *of_a = all + (size_t)a * l->count, *of_b = all + (size_t)b * l->count;
    const int is_data = l->list[i].kind == 'd';
    size_t k;
    if ((is_data || l->list[i].kind == 'c') && (of_a[i] == MTI_NO_MARK || of_b[i] == MTI_NO_MARK)) return 0;
    for (k = 0; k < l->count; k++) {
        if (k != i && (!is_data || l->list[k].kind != 'd')) continue;
        if (strcmp(l->list[k].what, l->list[i].what) != 0) continue;
        if (is_data && (of_a[k] == MTI_NO_MARK || of_b[k] == MTI_NO_MARK)) continue; /* it tells nothing */
        if (of_a[k] != of_b[k]) return 0;
    }
    return 1;
}

/* Counts the comparisons, from the first one on, in which two data ranks have had the same everywhere. One in which all
   differ ends it: ranks may draw the same of a small text by chance. */
static void mti_data_count(mti_share_list *l, const uint64_t *all, int ranks) {
    size_t i;
    int a, b, found = 0, has = 0;
    for (i = 0; i < l->count && !found; i++) {
        if (l->list[i].kind != 'd') continue;
        has = 1;
        for (b = 1; b < ranks; b++)
            for (a = 0; a < b; a++) found |= mti_pair_alike(l, i, all, a, b);
    }
    if (has && l->data_alike >= 0) l->data_alike = found ? l->data_alike + 1 : -1;
}

/* Whether entry i is alike on two ranks that must not have it alike. *a and *b become the ranks. */
static int mti_share_alike(const mti_share_list *l, size_t i, const uint64_t *all, int ranks, int *a, int *b) {
    const char kind = l->list[i].kind;
    int pairs = 0;
    *a = 0, *b = 1;
    if (kind == 'g') return mti_range_misses(l, i, all, ranks);
    if (kind == 'p') return mti_positions_misfit(all + i, l->count, ranks, l->list[i].rows, l->seq, a, b);
    if (kind == 'd' && l->data_alike < MTI_DATA_ALIKE) return 0;
    if (kind == 'i' && (l->seq <= 0 || l->list[i].rows % l->seq == 0)) return 0;
    for (*b = 1; *b < ranks; ++*b)
        for (*a = 0; *a < *b; ++*a) {
            int alike = mti_pair_alike(l, i, all, *a, *b);
            if (alike && kind != 's' && kind != 'i') return 1;
            pairs += alike;
        }
    *a = 0, *b = 1;
    return (kind == 's' || kind == 'i') && pairs == ranks * (ranks - 1) / 2;
}

/* of_a and of_b: the marks of the two ranks */
static mt_status mti_share_refuse(mt_context *ctx, const mt_comm *comm, const char *where, const mti_share *e, int a,
                                  int b, uint64_t of_a, uint64_t of_b) {
    char what[256];
    if (e->where)
        snprintf(what, sizeof what, "%s of %.60s%s%.*s%s", e->what, e->where, e->with ? " \"" : "",
                 e->with ? mti_layer_length(e->with) : 0, e->with ? e->with : "", e->with ? "\"" : "");
    else snprintf(what, sizeof what, "the %s of '%.100s'", e->what, e->with ? e->with : "");
    if (e->kind == 'g')
        return mt_fail(ctx, MT_ERR_MISMATCH,
                       "%s: %s is a part of the columns of what all ranks of \"%s\" (%d ranks) have, and no rank reads "
                       "the others: each rank needs its own part, such as its own group of keys and values",
                       where, what, comm->name, comm->size);
    if (e->kind == 'p')
        return mt_fail(ctx, MT_ERR_MISMATCH,
                       "%s: %s is split over \"%s\" (%d ranks), but rank %d has the positions from %lld on and rank %d "
                       "those from %lld on, and each has %lld rows: check offsets by the rank, or call "
                       "mt_declare_meant for it before, if they are meant so",
                       where, what, comm->name, comm->size, a, (long long)mti_counting_of(of_a).first, b,
                       (long long)mti_counting_of(of_b).first, (long long)e->rows);
    return mt_fail(ctx, MT_ERR_MISMATCH,
                   "%s: %s is split over \"%s\" (%d ranks), but rank %d has the same as rank %d: each rank needs its "
                   "own part; check offsets by the rank, and what each rank reads and loads, or call mt_declare_meant "
                   "for it before, if equal parts are meant%s",
                   where, what, comm->name, comm->size, b, a, e->is_view ? " or it was written over" : "");
}

#define MTI_SHARE_HEAD 3 /* numbers that ranks gather first */

/* Gathers the marks of all ranks, if all have the same entries. *all [ranks, count], which the caller frees, stays NULL
   otherwise. If a rank says nothing about the mean of the loss, none does: see mt_check_mean. */
static mt_status mti_shares_gather(mt_context *ctx, mt_comm *comm, const mti_share_list *l, uint64_t **all) {
    uint64_t mine[MTI_SHARE_HEAD], *told, *marks;
    size_t i, k, ranks = (size_t)comm->size;
    mt_status status;
    int alike = 1;
    mine[0] = l->count;
    mine[1] = 0;
    mine[2] = ctx->checker->mean_rows < 0.0;
    for (i = 0; i < l->count; i++)
        for (k = 0; l->list[i].what[k]; k++)
            mine[1] = mti_hash_number(mine[1], (uint64_t)(unsigned char)l->list[i].what[k] + (uint64_t)l->list[i].kind);
    told = (uint64_t *)mt_host_alloc((ranks * (l->count + MTI_SHARE_HEAD) + l->count) * sizeof *told);
    if (!told) return mti_refuse(ctx, comm, MT_ERR_MEMORY, "no memory for the shares of %d ranks", comm->size);
    marks = told + ranks * (l->count + MTI_SHARE_HEAD);
    status = mt_comm_gather_host(ctx, comm, mine, sizeof mine, told);
    for (i = 0; i < ranks && status == MT_SUCCESS; i++) {
        const uint64_t *head = told + MTI_SHARE_HEAD * i;
        alike &= head[0] == mine[0] && head[1] == mine[1];
        if (head[2]) ctx->checker->mean_rows = -1.0;
    }
    for (i = 0; i < l->count; i++) marks[i] = l->list[i].mark;
    if (status == MT_SUCCESS && alike && l->count)
        status = mt_comm_gather_host(ctx, comm, marks, l->count * sizeof *marks, told);
    *all = status == MT_SUCCESS && alike ? told : NULL;
    if (!*all) mt_host_free(told);
    return status;
}

/* Compares what ranks have each for itself, and forgets it. */
static mt_status mti_shares_compare(mt_context *ctx, mt_comm *comm, const char *where, int g) {
    mti_share_list *l = &ctx->checker->replicas->shares[g];
    uint64_t *all = NULL;
    mt_status status = mti_shares_gather(ctx, comm, l, &all);
    size_t i;
    int a = 0, b = 0;
    if (status == MT_SUCCESS && all) mti_data_count(l, all, comm->size);
    for (i = 0; status == MT_SUCCESS && all && i < l->count; i++)
        if (mti_share_alike(l, i, all, comm->size, &a, &b))
            status = mti_share_refuse(ctx, comm, where, &l->list[i], a, b, all[(size_t)a * l->count + i],
                                      all[(size_t)b * l->count + i]);
    mt_host_free(all);
    l->count = 0;
    l->seq = 0;
    return status;
}

/* Hashes an operand that a call reads, once, for all groups over which it is replicated. Parameters and gradients are
   compared once in a step instead (mt_parallel.h). What the program says to be split must differ between ranks. */
static mt_status mti_replica_read(mt_context *ctx, const char *where, const char *with, const mt_operand *operand,
                                  const mti_known *known) {
    mti_replica e;
    int g, hashed = 0;
    if (!mti_replicas_on(ctx) || !(operand->use & MT_ARG_IN)) return MT_SUCCESS;
    memset(&e, 0, sizeof e);
    e.where = where;
    e.with = with;
    e.by = known->by;
    e.by_with = known->with;
    snprintf(e.operand, sizeof e.operand, "%s", operand->name);
    MT_TRY(mti_term_note(ctx, e, known->terms));
    for (g = 0; g < ctx->checker->count && !known->parameter && operand->t.dtype != MT_U8; g++) {
        MT_TRY(mti_share_read(ctx, g, where, with, operand, known));
        if (known->may[g] != 1 << MT_REPLICATED) continue;
        if (!hashed) MT_TRY(mti_replica_hash(ctx, operand->t, &e));
        hashed = 1;
        if (known->apart >> g & 1) MT_TRY(mti_apart_note(ctx, g, e));
        else MT_TRY(mti_replica_add(ctx, g, &e));
    }
    return MT_SUCCESS;
}

/* Notes a number of a place for group g. known is 0 if ranks may have other numbers. */
static mt_status mti_place_number_note(mt_context *ctx, int g, mti_replica *e, const char *field, const char *number,
                                       uint64_t hash, int known) {
    e->differs = known ? 'p' : 'u';
    e->hash = hash;
    snprintf(e->operand, sizeof e->operand, "%.12s%s", field, number);
    return mti_replica_add(ctx, g, e);
}

/* Notes from what seed a call takes random words, which must be the same on all ranks, and by what place for the rows
   or columns that ranks have alike. What a rank does not know is noted, too, so that its list has the entries of other
   ranks. */
static mt_status mti_place_note(mt_context *ctx, const char *where, const char *field, const mti_known *known,
                                const mt_place *place) {
    mti_replica e;
    uint64_t words;
    int g;
    if (!mti_replicas_on(ctx)) return MT_SUCCESS;
    memset(&e, 0, sizeof e);
    e.where = where;
    e.with = known->with;
    words = mti_hash_number(mti_hash_number(0, place->seed), place->subsequence);
    for (g = 0; g < ctx->checker->count; g++) {
        int rows = known->may[g] == 1 << MT_REPLICATED || known->may[g] == 1 << MT_SPLIT_COLS;
        int cols = known->may[g] == 1 << MT_REPLICATED || known->may[g] == 1 << MT_SPLIT_ROWS;
        int some = known->may[g] != MTI_ALL_PLACEMENTS;
        MT_TRY(mti_place_number_note(ctx, g, &e, field, "", words, some));
        MT_TRY(mti_place_number_note(ctx, g, &e, field, ".first_row", (uint64_t)place->first_row, rows));
        MT_TRY(mti_place_number_note(ctx, g, &e, field, ".first_col", (uint64_t)place->first_col, cols));
    }
    return MT_SUCCESS;
}

MT_API mt_status mt_check_replica(mt_context *ctx, const mt_comm *comm, const char *what, const char *name,
                                  mt_tensor t) {
    const mti_placed *p;
    mti_axes axes;
    mti_replica e;
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!what || mt_dtype_size(t.dtype) < 2)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_check_replica: what is NULL, or t is %s", mt_dtype_name(t.dtype));
    if (!mti_replicas_on(ctx) || !mti_has_elements(t)) return MT_SUCCESS;
    axes = mti_axes_of(ctx->checker, comm, 1);
    if (axes.count == 0) return MT_SUCCESS;
    memset(&e, 0, sizeof e);
    p = mti_parameter_at(ctx->checker, mti_extent_of(t));
    e.with = p ? p->name : name; /* the checker's name outlives the parameter */
    snprintf(e.operand, sizeof e.operand, "%s", what);
    MT_TRY(mti_replica_hash(ctx, t, &e));
    for (i = 0; i < axes.count; i++) MT_TRY(mti_replica_add(ctx, axes.at[i], &e));
    return MT_SUCCESS;
}

MT_API uint64_t mt_check_content_of(const double *numbers, int count) {
    uint64_t hash = 2, bits;
    int i;
    for (i = 0; numbers && i < count; i++) {
        memcpy(&bits, &numbers[i], sizeof bits);
        hash = mti_hash_number(hash, bits);
    }
    return hash > MT_CONTENT_ANY ? hash : hash + 2;
}

MT_API void mt_check_content(mt_context *ctx, mt_tensor t, uint64_t content) {
    mti_extent e;
    mti_placed *p;
    if (!mt_check_mode(ctx) || !mti_has_elements(t)) return;
    e = mti_extent_of(t);
    p = mti_newest_at(ctx->checker, e);
    if (p && mti_extent_covers(e, p->at)) p->content = content;
}

/* Whether numbers of a call with t must be the same on the ranks of a group. */
static int mti_numbers_bind(const mti_checker *c, int g, mt_tensor t, int data) {
    const int is_data = mti_is_data(&c->axes[g]);
    int others = 1 << (data == 2 ? MT_PARTIAL : MT_SPLIT_ROWS); /* what ranks with other numbers have */
    if (c->axes[g].only_group) return 0;
    if (!mti_has_elements(t) || (data == 1 && is_data)) return 1;
    if (mti_has_tokens(&c->axes[g])) others |= 1 << MT_SPLIT_ROWS;
    return !(mti_known_of(c, t).may[g] & others);
}

MT_API mt_status mt_check_numbers(mt_context *ctx, const char *where, const char *what, mt_tensor t, int data,
                                  const double *numbers, int count) {
    mti_replica e;
    int g;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!mti_replicas_on(ctx)) return MT_SUCCESS;
    memset(&e, 0, sizeof e);
    e.where = where;
    e.differs = 'n';
    e.hash = mt_check_content_of(numbers, count);
    snprintf(e.operand, sizeof e.operand, "%s", what);
    for (g = 0; g < ctx->checker->count; g++)
        if (mti_numbers_bind(ctx->checker, g, t, data)) MT_TRY(mti_replica_add(ctx, g, &e));
    return MT_SUCCESS;
}

/* Returns the set of an operand that has an element for each row or column of t, by what t is. */
static int mti_side_set(int set, mt_placement along) {
    if (set == 1 << along) return set;
    if (set & (set - 1)) return MTI_ALL_PLACEMENTS;
    return 1 << MT_REPLICATED;
}

MT_API mt_status mt_check_side(mt_context *ctx, const char *where, const char *name, mt_tensor side, mt_tensor t,
                               mt_placement along, int alike) {
    mti_known known, of;
    mt_operand o;
    int g;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!mti_replicas_on(ctx) || !mti_has_elements(side) || !mti_has_elements(t)) return MT_SUCCESS;
    of = mti_known_of(ctx->checker, t);
    memset(&known, 0, sizeof known);
    memset(known.may, MTI_ALL_PLACEMENTS, sizeof known.may);
    for (g = 0; g < ctx->checker->count && !of.zero; g++)
        if (!ctx->checker->axes[g].only_group) known.may[g] = (unsigned char)mti_side_set(of.may[g], along);
    for (g = 0; alike && g < ctx->checker->count; g++)
        if (known.may[g] == 1 << along) known.may[g] = MTI_ALL_PLACEMENTS;
    known.by = "mt_declare";
    known.is_declared = 1;
    o.name = name;
    o.t = side;
    o.use = MT_ARG_IN;
    return mti_replica_read(ctx, where, NULL, &o, &known);
}

MT_API mt_status mt_check_share(mt_context *ctx, const mt_comm *comm, const char *what, const char *name, mt_tensor t) {
    const mti_placed *p;
    mti_share e;
    int g;
    if (!ctx) return MT_ERR_ARGUMENT;
    g = mti_replicas_on(ctx) && mti_has_elements(t) ? mti_axis_of(ctx->checker, comm, 1) : -1;
    if (g < 0) return MT_SUCCESS;
    memset(&e, 0, sizeof e);
    p = mti_parameter_at(ctx->checker, mti_extent_of(t));
    e.with = p ? p->name : name;
    e.kind = 'S';
    snprintf(e.what, sizeof e.what, "%s", what);
    if (!mti_share_mark(ctx, t, &e.mark)) return MT_SUCCESS;
    return mti_share_add(ctx, g, &e);
}

MT_API void mt_check_sequences(mt_context *ctx, mt_tensor t, int64_t seq) {
    mti_known k;
    int g;
    if (!ctx || !mti_replicas_on(ctx) || !mti_has_elements(t)) return;
    k = mti_known_of(ctx->checker, t);
    for (g = 0; g < ctx->checker->count; g++) {
        mti_share_list *l = &ctx->checker->replicas->shares[g];
        int parts = k.may[g] == 1 << MT_SPLIT_COLS && seq > 0 && (l->seq == 0 || l->seq == seq);
        if (!k.zero) l->seq = parts ? seq : -1;
    }
}

MT_API mt_status mt_check_number(mt_context *ctx, const mt_comm *comm, const char *what, float number) {
    mti_axes axes;
    mti_replica e;
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!what) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_check_number: what is NULL");
    if (!mti_replicas_on(ctx)) return MT_SUCCESS;
    axes = mti_axes_of(ctx->checker, comm, 1);
    memset(&e, 0, sizeof e);
    e.differs = 'v';
    e.hash = mt_hash_word(0, mt_f32_bits(number));
    snprintf(e.operand, sizeof e.operand, "%s", what);
    for (i = 0; i < axes.count; i++) MT_TRY(mti_replica_add(ctx, axes.at[i], &e));
    return MT_SUCCESS;
}

/* What rank b has, and rank a has not. */
static const char *mti_say_differs(char a, char b) {
    if (a != b) return b == 'z' ? "only zeros, unlike" : "not only zeros, unlike";
    if (b == 'n') return "other numbers than";
    return b == 'p' ? "another seed or place than" : b == 'c' ? "other rows or columns than" : "other values than";
}

/* Returns the text of a list: for each entry its name, NUL, the collectives before, the hash, what the hash is of, n
   for a note and r for what a call reads, who wrote it, NUL. */
static mti_compared_text mti_replicas_write(const void *user) {
    const mti_replica_list *l = (const mti_replica_list *)user;
    mti_compared_text t;
    size_t i;
    t.bytes = 0;
    t.data = (char *)mt_host_alloc(l->count * MTI_REPLICA_TEXT + 1);
    for (i = 0; t.data && i < l->count; i++) {
        const mti_replica *e = &l->list[i];
        char *at = t.data + t.bytes, since[208];
        if (e->where)
            snprintf(at, MTI_REPLICA_TEXT / 2, "%s of %.60s%s%.*s%s", e->operand, e->where, e->with ? " \"" : "",
                     e->with ? mti_layer_length(e->with) : 0, e->with ? e->with : "", e->with ? "\"" : "");
        else if (e->with) snprintf(at, MTI_REPLICA_TEXT / 2, "the %s of '%.100s'", e->operand, e->with);
        else snprintf(at, MTI_REPLICA_TEXT / 2, "%s", e->operand);
        t.bytes += strlen(at) + 1;
        at = t.data + t.bytes;
        mti_since_text(e->by, e->by_with, since, sizeof since);
        snprintf(at, MTI_REPLICA_TEXT / 2, "%016llx%016llx%c%c%s", (unsigned long long)e->moves,
                 (unsigned long long)e->hash, e->differs, e->where ? 'r' : 'n', since);
        t.bytes += strlen(at) + 1;
    }
    return t;
}

/* An entry in the text of a list. */
typedef struct mti_replica_text {
    const char *name, *value; /* NULL: there is none */
    uint64_t end;             /* where the next entry begins */
} mti_replica_text;

/* Returns the next entry that is a note, or that is none. */
static mti_replica_text mti_replica_next(const mti_compared_text *t, uint64_t from, int is_note) {
    mti_replica_text e;
    e.end = from;
    do {
        e.name = mti_compared_next(t, &e.end);
        e.value = mti_compared_next(t, &e.end);
    } while (e.value && (e.value[2 * MTI_REPLICA_DIGITS + 1] == 'n') != is_note);
    return e;
}

/* Finds the first note, or the first entry that is none, that has another hash in list y than in list x. Entries are
   compared when the same calls lie between the last collective and them. */
static int mti_replica_differs(const mti_compared_text *x, const mti_compared_text *y, int is_note,
                               mti_replica_text *in_x, mti_replica_text *in_y) {
    mti_replica_text a = mti_replica_next(x, 0, is_note), b = mti_replica_next(y, 0, is_note);
    char skip[MTI_REPLICA_DIGITS + 1] = ""; /* the collectives after which the ranks have made different calls */
    while (a.value && b.value) {
        int order = strncmp(a.value, b.value, MTI_REPLICA_DIGITS);
        int alike = order == 0 && strcmp(a.name, b.name) == 0 && strncmp(a.value, skip, MTI_REPLICA_DIGITS) != 0;
        int known = a.value[2 * MTI_REPLICA_DIGITS] != 'u' && b.value[2 * MTI_REPLICA_DIGITS] != 'u';
        if (alike && known && strncmp(a.value, b.value, 2 * MTI_REPLICA_DIGITS) != 0) break;
        if (order == 0 && !alike) memcpy(skip, a.value, MTI_REPLICA_DIGITS);
        if (order <= 0) a = mti_replica_next(x, a.end, is_note);
        if (order >= 0) b = mti_replica_next(y, b.end, is_note);
    }
    *in_x = a;
    *in_y = b;
    return a.value && b.value;
}

/* Writes the first entry that has other values on rank b than on rank a. */
static int mti_say_replica(mti_text *text, const mti_compared *all, const mt_comm *comm, int a, int b,
                           const mti_compared_text *x, const mti_compared_text *y) {
    mti_replica_text in_x, in_y, note, other;
    int found = mti_replica_differs(x, y, 0, &in_x, &in_y), noted = mti_replica_differs(x, y, 1, &note, &other);
    (void)all;
    if (!found && !noted) return 0;
    if (!found || (noted && note.end < in_x.end)) in_x = note, in_y = other;
    if (in_x.value[2 * MTI_REPLICA_DIGITS] == 't') {
        mti_say(text,
                "ranks %d and %d both add %s to the sum over \"%s\" (%d ranks), but each has the whole: add it on one "
                "rank only, or declare what is 1/%d of it as MT_PARTIAL",
                a, b, in_x.name, comm->name, comm->size, comm->size);
        return 1;
    }
    mti_say(text,
            "%s %s over \"%s\" (%d ranks)%s, but rank %d has %s rank %d: check seeds, dropout, inputs, and memory that "
            "is written behind the library's back",
            in_x.name, strchr("pn", in_x.value[2 * MTI_REPLICA_DIGITS]) ? "must agree" : "is replicated", comm->name,
            comm->size, in_x.value + 2 * MTI_REPLICA_DIGITS + 2, b,
            mti_say_differs(in_x.value[2 * MTI_REPLICA_DIGITS], in_y.value[2 * MTI_REPLICA_DIGITS]), a);
    return 1;
}

/* Compares the list of a group, and forgets it. */
static mt_status mti_replicas_compare(mt_context *ctx, mt_comm *comm, const char *where, mti_replica_list *l) {
    mt_ledger ledger = comm->ledger;
    mti_comparison comparison;
    mti_compared told;
    mt_status status;
    size_t i;
    MT_TRY(mti_replicas_fetch(ctx));
    told.hash = 0;
    told.group = 0;
    for (i = 0; i < l->count; i++) told.hash = mt_hash_word(told.hash + l->list[i].hash, (uint32_t)l->list[i].moves);
    comparison.user = l;
    comparison.write = mti_replicas_write;
    comparison.say = mti_say_replica;
    mt_check_pause(ctx);
    status = comm->transport->has_peers ? mti_compare_ranks(ctx, comm, where, told, &comparison) : MT_SUCCESS;
    comm->ledger = ledger; /* that of the program alone */
    l->count = 0;
    l->moves = 0;
    return mt_check_resume(ctx, status);
}

MT_API mt_status mt_check_replicas(mt_context *ctx, mt_comm *comm, const char *where) {
    mt_status status;
    int g;
    if (!ctx || !comm || !where)
        return mti_refuse(ctx, comm, MT_ERR_ARGUMENT, "mt_check_replicas: %s is NULL",
                          !ctx   ? "ctx"
                          : comm ? "where"
                                 : "comm");
    if (comm->factors[0]) {
        status = mt_check_replicas(ctx, comm->factors[0], where);
        MT_KEEP(status, mt_check_replicas(ctx, comm->factors[1], where)); /* the others of this group wait for it */
        return status;
    }
    g = mti_replicas_on(ctx) ? mti_axis_of(ctx->checker, comm, 0) : -1;
    if (g < 0) return MT_SUCCESS;
    MT_TRY(mti_replicas_compare(ctx, comm, where, &ctx->checker->replicas->groups[g]));
    return comm->transport->has_peers ? mti_shares_compare(ctx, comm, where, g) : MT_SUCCESS;
}

/* Counts a collective of a group, and compares the list of the group when it is due. */
static mt_status mti_collective_passed(mt_context *ctx, mt_comm *comm, const char *name) {
    mti_replica_list *l;
    mt_status status;
    char where[64];
    int g;
    if (comm->factors[0]) {
        status = mti_collective_passed(ctx, comm->factors[0], name);
        MT_KEEP(status, mti_collective_passed(ctx, comm->factors[1], name));
        return status;
    }
    g = mti_replicas_on(ctx) ? mti_axis_of(ctx->checker, comm, 0) : -1;
    if (g < 0) return MT_SUCCESS;
    l = &ctx->checker->replicas->groups[g];
    if (++l->moves < MTI_REPLICAS_EVERY) return MT_SUCCESS;
    snprintf(where, sizeof where, "mt_%s", name);
    return mti_replicas_compare(ctx, comm, where, l);
}
