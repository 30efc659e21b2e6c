/* ---- check mode: lists of the pieces of memory whose placement is known ------------------------------------------ */

#pragma once
#include "placements.h"
#include "authors.h"
#include "../comm/cuda.c"

/* The checker keeps, for each piece of memory and each group, the set of placements that it may have: a bit for each
   mt_placement. An operator's rule is a list of cases. The cases that fit what is known about its operands give the
   sets of its results. Unknown memory may have all placements. Memory that is zero has all of them at once.

   There are two lists of pieces. `parameters` has the values and gradients of registries; they stay until they are
   forgotten. `written` has what operators have written. A new piece removes the older ones that it covers. A view finds
   the newest pieces that it meets, until one of them covers it. Memory that is allocated again is unknown:
   mt_arena_alloc and mt_context_free forget it. Pieces that overlap and say the same become one. Where too many
   overlap, one piece takes their place, too, and what they do not agree on is not known any more.

   Lists are in the order of addresses. A search begins at the last piece that begins before the end of a view, goes
   back, and ends where no piece before reaches the view. */

#define MTI_ALL_PLACEMENTS 15 /* a set */
#define MTI_LEFT_OUT 16       /* in a set that an operand must have a placement of: the call must leave it out */
#define MTI_SPLIT_PLACEMENTS (1 << MT_SPLIT_ROWS | 1 << MT_SPLIT_COLS)
#define MTI_AXES 6
#define MTI_OVERLAPS_MOST 64 /* pieces that a new one may meet without covering them */
#define MTI_RULE_OPERANDS 16
#define MTI_RELEASED 256

/* A view in memory, for comparisons. */
typedef struct mti_extent {
    uintptr_t begin, end;   /* of all rows, with the gaps between them */
    uintptr_t width, pitch; /* bytes of a row, and from one row to the next */
} mti_extent;

typedef struct mti_placed {
    mti_extent at;
    unsigned char may[MTI_AXES];     /* one set of placements for each group */
    unsigned char allowed[MTI_AXES]; /* of a parameter or gradient: the sets that it may get */
    unsigned char adds[MTI_AXES];    /* of a gradient: the sets that it may get before it is synchronised */
    int zero;                        /* 1: all elements are 0 */
    const char *by, *with;           /* the operator that has written it, and the parameter that it used, or NULL */
    const char *name;                /* of a parameter; in mti_checker.names */
    int64_t parts;                   /* of a parameter, see mt_param_desc */
    int is_gradient;                 /* 1: the gradient of a parameter, or written by a call as a gradient */
    int is_declared;                 /* 1: mt_declare has said what it is */
    const char *features; /* the parameter whose features these columns are, after elementwise calls, too; or NULL */
    char summed_over[16]; /* of a gradient: the program has summed it over this group, which is not in axes; or "" */
    int some_columns;     /* 1: it was computed from some columns of a tensor, and has as many */
    uint64_t content;     /* see mt_check_content; 0: not known */
    uint64_t used;        /* of a gradient: a hash of the activations that a call has added to it last, or 0 */
    uint64_t used_all;    /* a hash of all that the call has read, or 0 */
    const char *used_by;  /* the call */
    uint64_t zeroed;      /* of a gradient: the age of the newest piece when it became zero */
    int is_used;          /* of activations: 1: a backward has read them */
    int is_replaced;      /* 1: the gradient of what was here, which the call had read here */
    uint64_t lost;        /* the age of what the same call has written here before, and no backward has read; or 0 */
    int stays;            /* 1: a block of mt_context_alloc; of what is meant: in a parameter */
    int is_gone;          /* 1: mti_placed_compact removes it */
    uint64_t age;         /* number of the piece; the newest has the largest */
    uintptr_t reach;      /* the largest at.end of this piece and those before it in the list */
} mti_placed;

typedef struct mti_placed_list {
    mti_placed *list;
    size_t count, capacity;
    uint64_t newest; /* the age of the newest piece */
} mti_placed_list;

typedef struct mti_kept_name {
    char *text;
    int is_used;
} mti_kept_name;

/* The names of parameters, also of those that were destroyed: messages may name the parameter with which a tensor was
   computed. When the list is full, mti_names_sweep frees the names to which nothing points any more. */
typedef struct mti_names {
    mti_kept_name *list;
    size_t count, capacity;
} mti_names;

/* A group of ranks over which tensors have placements. */
typedef struct mti_axis {
    const mt_comm *comm;
    char name[16];
    int is_named;
    int rank, size;
    int only_group; /* 1: mt_check_group has added it, and no tensor was declared over it */
} mti_axis;

/* What was in memory of the arena that was released and allocated again. */
typedef struct mti_released {
    mti_extent at;
    const char *by, *with;
} mti_released;

/* Where micro-batches keep their tensors, see mt_check_slots. */
typedef struct mti_slots {
    uintptr_t first, bytes;
    int count, own;
} mti_slots;

typedef struct mti_checker {
    mti_axis axes[MTI_AXES];
    int count;  /* of the groups */
    int strict; /* mt_context_desc.check */
    int tracks; /* 1: mt_check_track was called */
    mti_placed_list parameters, written;
    mti_placed_list memory; /* what is not in the arena: blocks of mt_context_alloc, and memory that was declared */
    mti_placed_list meant;  /* of mt_declare_meant, until it is written or declared; only `at` and `stays` count */
    mti_placed_list views;  /* of mt_check_view, the last one last; `may` is for one group, and all for the others */
    mti_names names;        /* what points to one of them is known to mti_names_mark */
    mti_slots slots[2];
    mti_released released[MTI_RELEASED]; /* for messages: the newest is number releases - 1, modulo MTI_RELEASED */
    size_t releases;
    const char *latest; /* name of the parameter that an operator has used last, or NULL */
    mt_check_listener listener;
    void *user;                    /* of the listener */
    struct mti_replicas *replicas; /* what mt_check_replicas compares; NULL: check is 1 */
    int scattered;                 /* see mt_check_scattered */
    double mean_rows, mean_scale;  /* see mt_check_mean; mean_rows 0: none, below 0: with several scales */
    int64_t unknown;               /* see mt_check_unknown */
    char unknown_text[240];
} mti_checker;

static void mti_replicas_use_names(mti_checker *c); /* replicas.c */

static int mti_name_by_address(const void *a, const void *b) {
    uintptr_t x = (uintptr_t)((const mti_kept_name *)a)->text, y = (uintptr_t)((const mti_kept_name *)b)->text;
    return x < y ? -1 : x > y;
}

/* Notes that something points to `text`, which may also be NULL or a string of the caller. The list is sorted. */
static void mti_name_use(mti_names *n, const char *text) {
    size_t low = 0, high = n->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if ((uintptr_t)n->list[middle].text < (uintptr_t)text) low = middle + 1;
        else high = middle;
    }
    if (low < n->count && n->list[low].text == text) n->list[low].is_used = 1;
}

static void mti_names_mark(mti_checker *c) {
    size_t i;
    for (i = 0; i < c->parameters.count; i++) {
        mti_name_use(&c->names, c->parameters.list[i].name);
        mti_name_use(&c->names, c->parameters.list[i].with);
    }
    for (i = 0; i < c->written.count; i++) mti_name_use(&c->names, c->written.list[i].with);
    mti_name_use(&c->names, c->latest);
    mti_replicas_use_names(c);
}

/* Frees the names to which nothing points. */
static void mti_names_sweep(mti_checker *c) {
    mti_names *n = &c->names;
    size_t i, kept = 0;
    if (n->count > 0) qsort(n->list, n->count, sizeof *n->list, mti_name_by_address);
    for (i = 0; i < n->count; i++) n->list[i].is_used = 0;
    mti_names_mark(c);
    for (i = 0; i < n->count; i++) {
        if (n->list[i].is_used) n->list[kept++] = n->list[i];
        else mt_host_free(n->list[i].text);
    }
    n->count = kept;
}

/* Makes the list twice as long as the names that are used, but never shorter. Returns 0 when there is no memory. */
static int mti_names_grow(mti_checker *c) {
    mti_names *n = &c->names;
    mti_kept_name *list;
    mti_names_sweep(c);
    if (n->capacity && n->count <= n->capacity / 2) return 1;
    list = (mti_kept_name *)mt_host_alloc((2 * n->count + 64) * sizeof *list);
    if (!list) return 0;
    if (n->count) memcpy(list, n->list, n->count * sizeof *list);
    mt_host_free(n->list);
    n->list = list;
    n->capacity = 2 * n->count + 64;
    return 1;
}

/* Returns the checker's copy of a name, or NULL when there is no memory. */
static const char *mti_names_add(mti_checker *c, const char *text) {
    mti_names *n = &c->names;
    size_t bytes = strlen(text) + 1;
    char *copy;
    if (n->count == n->capacity && !mti_names_grow(c)) return NULL;
    copy = (char *)mt_host_alloc(bytes);
    if (!copy) return NULL;
    memcpy(copy, text, bytes);
    n->list[n->count++].text = copy;
    return copy;
}

/* Returns a new, empty piece at the end of the list, or NULL when there is no memory. */
static mti_placed *mti_placed_add(mti_placed_list *p) {
    if (p->count == p->capacity) {
        size_t capacity = p->capacity ? 2 * p->capacity : 64;
        mti_placed *list = (mti_placed *)mt_host_alloc(capacity * sizeof *list);
        if (!list) return NULL;
        if (p->count) memcpy(list, p->list, p->count * sizeof *list);
        mt_host_free(p->list);
        p->list = list;
        p->capacity = capacity;
    }
    memset(&p->list[p->count], 0, sizeof *p->list);
    return &p->list[p->count++];
}

static mti_extent mti_extent_of(mt_tensor t) {
    uintptr_t size = (uintptr_t)mt_dtype_size(t.dtype);
    mti_extent e;
    e.begin = (uintptr_t)t.data;
    e.width = (uintptr_t)t.cols * size;
    e.pitch = t.rows > 1 ? (uintptr_t)mt_tensor_ld(t) * size : e.width;
    e.end = e.begin + ((uintptr_t)t.rows - 1) * e.pitch + e.width;
    return e;
}

static int mti_extent_is_dense(mti_extent e) { return e.pitch == e.width; }

/* Whether the rows of one extent are parts of the rows of the other one. A single row has no pitch of its own. */
static int mti_extents_share_rows(mti_extent a, mti_extent b) {
    mti_extent narrow = a.width < b.width ? a : b, wide = a.width < b.width ? b : a;
    if (a.pitch == b.pitch) return 1;
    if (narrow.end - narrow.begin != narrow.width || narrow.begin < wide.begin || narrow.end > wide.end) return 0;
    return (narrow.begin - wide.begin) % wide.pitch + narrow.width <= wide.width;
}

/* Whether a view has whole rows of a piece, or a part of a single one, in one row or in rows of another width. */
static int mti_is_reshaped(mti_extent view, mti_extent piece) {
    if (!mti_extent_is_dense(view) || !mti_extent_is_dense(piece) || view.begin < piece.begin) return 0;
    if (piece.end - piece.begin == piece.width) return 1;
    return (view.begin - piece.begin) % piece.width == 0 && (view.end - piece.begin) % piece.width == 0;
}

/* Returns what a piece says about a view of it. Some columns of a tensor that is split by columns, such as one head,
   are a matrix of their own: nothing is known about it. Some columns of a tensor that is split by rows are split by
   rows. The rows of a rank lie one after the other: they are columns of one row, and rows of another width. Other views
   of a split tensor are split in some way. */
static unsigned char mti_seen_through(mti_extent view, mti_extent piece, unsigned char may) {
    int is_row = view.end - view.begin == view.width, in_rows = piece.end - piece.begin > piece.width;
    if (!(may & MTI_SPLIT_PLACEMENTS) || view.width == piece.width) return may;
    if (!mti_extents_share_rows(view, piece)) {
        if (!mti_is_reshaped(view, piece) || (in_rows && may >> MT_SPLIT_COLS & 1))
            return (unsigned char)(may | MTI_SPLIT_PLACEMENTS);
        return (unsigned char)((may & ~MTI_SPLIT_PLACEMENTS) | 1 << (is_row ? MT_SPLIT_COLS : MT_SPLIT_ROWS));
    }
    if (may == 1 << MT_SPLIT_ROWS) return may;
    if (view.width < piece.width) return may >> MT_SPLIT_COLS & 1 ? MTI_ALL_PLACEMENTS : may;
    return (unsigned char)(may | MTI_SPLIT_PLACEMENTS);
}

/* Whether two extents share memory. Columns of the same rows do not. */
static int mti_extents_meet(mti_extent a, mti_extent b) {
    mti_extent first = a.begin <= b.begin ? a : b, second = a.begin <= b.begin ? b : a;
    uintptr_t from;
    if (second.begin >= first.end) return 0;
    if (mti_extent_is_dense(first) || (!mti_extent_is_dense(second) && second.pitch != first.pitch)) return 1;
    if (mti_extent_is_dense(second)) second.width = second.end - second.begin;
    if (second.width > first.pitch) return 1;
    from = (second.begin - first.begin) % first.pitch;
    return from < first.width || from + second.width > first.pitch;
}

/* Whether all memory of `part` is in `whole`. Returns 0 when this is not certain. */
static int mti_extent_covers(mti_extent whole, mti_extent part) {
    if (part.begin < whole.begin || part.end > whole.end) return 0;
    if (mti_extent_is_dense(whole)) return 1;
    if (part.end - part.begin != part.width && part.pitch != whole.pitch) return 0;
    return (part.begin - whole.begin) % whole.pitch + part.width <= whole.width;
}

static uintptr_t mti_extent_bytes(mti_extent e) {
    return ((e.end - e.begin - e.width) / (e.pitch ? e.pitch : 1) + 1) * e.width;
}

/* Returns how many bytes of e a piece has that meets it. It may return more, but not less. */
static uintptr_t mti_extent_shared(mti_extent e, mti_extent piece) {
    uintptr_t begin = e.begin > piece.begin ? e.begin : piece.begin, end = e.end < piece.end ? e.end : piece.end;
    if (mti_extent_covers(e, piece)) return mti_extent_bytes(piece);
    return mti_extent_is_dense(e) && mti_extent_is_dense(piece) ? end - begin : mti_extent_bytes(e);
}

/* Returns all memory from the begin of one extent to the end of the other, as one row. */
static mti_extent mti_extents_together(mti_extent a, mti_extent b) {
    if (b.begin < a.begin) a.begin = b.begin;
    if (b.end > a.end) a.end = b.end;
    a.width = a.pitch = a.end - a.begin;
    return a;
}

static mti_extent mti_extent_of_bytes(const void *data, size_t bytes) {
    return mti_extent_of(mt_tensor_make(data, MT_U8, 1, (int64_t)bytes));
}

/* Returns the number of pieces that begin before `end`. */
static size_t mti_placed_before(const mti_placed_list *p, uintptr_t end) {
    size_t low = 0, high = p->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (p->list[middle].at.begin < end) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Goes from piece *i, or from the end of the list, back to the next one that meets e, and returns it, or NULL. Begin
   with *i = mti_placed_before(p, e.end). */
static mti_placed *mti_placed_meets(const mti_placed_list *p, mti_extent e, size_t *i) {
    while (*i > 0 && p->list[*i - 1].reach > e.begin) {
        --*i;
        if (mti_extents_meet(p->list[*i].at, e)) return &p->list[*i];
    }
    return NULL;
}

/* Returns the newest piece that meets e and is older than `age`, or NULL. */
static mti_placed *mti_placed_older(const mti_placed_list *p, mti_extent e, uint64_t age) {
    size_t i = mti_placed_before(p, e.end);
    mti_placed *found = NULL, *piece;
    while ((piece = mti_placed_meets(p, e, &i)) != NULL)
        if (piece->age < age && (!found || piece->age > found->age)) found = piece;
    return found;
}

static void mti_placed_reach(mti_placed_list *p, size_t from) {
    size_t i;
    for (i = from; i < p->count; i++) {
        uintptr_t before = i > 0 ? p->list[i - 1].reach : 0;
        p->list[i].reach = p->list[i].at.end > before ? p->list[i].at.end : before;
    }
}

/* Returns a new piece for e in its place of the list, or NULL when there is no memory. */
static mti_placed *mti_placed_insert(mti_placed_list *p, mti_extent e) {
    size_t at = mti_placed_before(p, e.begin);
    if (!mti_placed_add(p)) return NULL;
    memmove(&p->list[at + 1], &p->list[at], (p->count - 1 - at) * sizeof *p->list);
    memset(&p->list[at], 0, sizeof *p->list);
    p->list[at].at = e;
    p->list[at].age = ++p->newest;
    mti_placed_reach(p, at);
    return &p->list[at];
}

/* Removes pieces that are gone. The first of them is number `from`. */
static void mti_placed_compact(mti_placed_list *p, size_t from) {
    size_t i, kept = from;
    for (i = from; i < p->count; i++)
        if (!p->list[i].is_gone) p->list[kept++] = p->list[i];
    p->count = kept;
    mti_placed_reach(p, from);
}

/* Removes the pieces that meet e, with keeps 1 not those that stay. */
static void mti_placed_forget(mti_placed_list *p, mti_extent e, int keeps) {
    size_t i = mti_placed_before(p, e.end), from = p->count;
    mti_placed *piece;
    while ((piece = mti_placed_meets(p, e, &i)) != NULL) {
        if (keeps && piece->stays) continue;
        piece->is_gone = 1;
        from = i;
    }
    if (from < p->count) mti_placed_compact(p, from);
}

static void mti_forget(mt_context *ctx, const void *data, size_t bytes) {
    mti_checker *c = ctx->checker;
    if (!c || !bytes) return;
    mti_placed_forget(&c->written, mti_extent_of_bytes(data, bytes), 0);
    mti_placed_forget(&c->meant, mti_extent_of_bytes(data, bytes), 0);
    mti_placed_forget(&c->parameters, mti_extent_of_bytes(data, bytes), 0);
}

/* Forgets memory of the arena that is allocated, and remembers what was there before it was released. */
static void mti_memory_reused(mt_context *ctx, const void *data, size_t bytes) {
    mti_checker *c = ctx->checker;
    mti_extent e = mti_extent_of_bytes(data, bytes);
    const mti_placed *p;
    size_t i;
    if (!bytes) return;
    i = mti_placed_before(&c->written, e.end);
    while ((p = mti_placed_meets(&c->written, e, &i)) != NULL) {
        mti_released *r = &c->released[c->releases++ % MTI_RELEASED];
        r->at = p->at;
        r->by = p->by;
        r->with = p->with;
    }
    mti_forget(ctx, data, bytes);
}

/* Returns what was in the memory of a view before it was released, or NULL. */
static const mti_released *mti_released_at(const mti_checker *c, mti_extent e) {
    size_t i;
    for (i = 0; i < MTI_RELEASED && i < c->releases; i++) {
        const mti_released *r = &c->released[(c->releases - 1 - i) % MTI_RELEASED];
        if (r->by && memcmp(&r->at, &e, sizeof e) == 0) return r;
    }
    return NULL;
}

static int mti_is_in_arena(const mt_context *ctx, mti_extent e) {
    uintptr_t arena = (uintptr_t)ctx->arena;
    return e.begin >= arena && e.end <= arena + ctx->arena_bytes;
}

/* Whether placements of this memory are kept: the arena, blocks of the context, parameters, and what the caller has
   declared. Other memory may be written, freed and allocated again behind the library's back. */
static int mti_is_watched(const mt_context *ctx, mti_extent e) {
    const mti_placed_list *memory = &ctx->checker->memory;
    size_t i = mti_placed_before(memory, e.end);
    const mti_placed *p;
    if (mti_is_in_arena(ctx, e)) return 1;
    while ((p = mti_placed_meets(memory, e, &i)) != NULL)
        if (mti_extent_covers(p->at, e)) return 1;
    return 0;
}

/* Takes the memory that was declared and that meets e out of the list, and returns e with it. Rows with gaps stay: what
   is between them may belong to others. */
static mti_extent mti_watched_with(mti_placed_list *memory, mti_extent e) {
    size_t i = mti_placed_before(memory, e.end), from = memory->count;
    mti_placed *p;
    while ((p = mti_placed_meets(memory, e, &i)) != NULL) {
        int are_dense = mti_extent_is_dense(e) && mti_extent_is_dense(p->at);
        if (p->stays || (!are_dense && !mti_extent_covers(e, p->at))) continue;
        if (are_dense) e = mti_extents_together(e, p->at);
        p->is_gone = 1;
        from = i;
    }
    if (from < memory->count) mti_placed_compact(memory, from);
    return e;
}

static mt_status mti_watch_extent(mt_context *ctx, mti_extent e, int is_block) {
    mti_placed *p;
    if (!is_block && mti_is_watched(ctx, e)) return MT_SUCCESS;
    if (!is_block) e = mti_watched_with(&ctx->checker->memory, e);
    p = mti_placed_insert(&ctx->checker->memory, e);
    if (!p) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for the checks of placements");
    p->stays = is_block;
    return MT_SUCCESS;
}

/* Forgets a block of the context that is freed. */
static void mti_memory_freed(mt_context *ctx, const void *data, size_t bytes) {
    mti_forget(ctx, data, bytes);
    mti_placed_forget(&ctx->checker->memory, mti_extent_of_bytes(data, bytes), 0);
}

static mt_status mti_memory_allocated(mt_context *ctx, const void *data, size_t bytes) {
    return mti_watch_extent(ctx, mti_extent_of_bytes(data, bytes), 1);
}
