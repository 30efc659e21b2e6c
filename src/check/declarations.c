/* ---- what is known about memory, and what a program declares ----------------------------------------------------- */

#pragma once
#include "placements.c"
#include "../comm/conjugates.c"

MT_API int mt_check_mode(const mt_context *ctx) {
    if (!ctx || !ctx->checker || ctx->checks_paused) return 0;
    return ctx->checker->replicas ? 2 : 1;
}

MT_API void mt_check_pause(mt_context *ctx) {
    if (ctx) mti_checks_pause(ctx);
}

MT_API mt_status mt_check_resume(mt_context *ctx, mt_status status) {
    return ctx ? mti_checks_resume(ctx, status) : status;
}

static void mti_axis_set(mti_axis *axis, const mt_comm *comm) {
    axis->comm = comm;
    axis->rank = comm->rank;
    axis->size = comm->size;
}

MT_API void mt_check_listen(mt_context *ctx, mt_check_listener listener, void *user) {
    if (!ctx || !ctx->checker) return;
    ctx->checker->listener = listener;
    ctx->checker->user = user;
}

static void mti_notify(mt_context *ctx, const char *where, const char *with, const mt_operand *operands, int count) {
    const mti_checker *c = ctx->checker;
    if (c->listener) c->listener(ctx, c->user, where, with, operands, count);
}

MT_API mt_status mt_check_view_end(mt_context *ctx, mt_status status) {
    if (ctx && ctx->checker && ctx->checker->views.count > 0) ctx->checker->views.count--;
    return status;
}

/* Whether an axis is that of a communicator. Groups that were given the same name are the same: a grid may be created
   again. Other communicators, which have a name of their parent, are themselves only. */
static int mti_axis_is(const mti_axis *axis, const mt_comm *comm) {
    if (strcmp(axis->name, comm->name) != 0 || axis->is_named != comm->is_named) return 0;
    return axis->is_named || axis->comm == comm;
}

/* Returns the number of a group, or -1 for a group of one and where there is none. add: 1 adds a new group. */
static int mti_axis_of(mti_checker *c, const mt_comm *comm, int add) {
    int i;
    if (!comm || comm->size == 1) return -1;
    for (i = 0; i < c->count; i++)
        if (mti_axis_is(&c->axes[i], comm)) break;
    if (i < c->count) {
        mti_axis_set(&c->axes[i], comm);
        return i;
    }
    if (!add || c->count == MTI_AXES) return -1;
    mti_axis_set(&c->axes[i], comm);
    memcpy(c->axes[i].name, comm->name, sizeof c->axes[i].name);
    c->axes[i].is_named = comm->is_named;
    return c->count++;
}

/* The groups over which a tensor has placements when a call names a communicator: this one, or its factors. */
typedef struct mti_axes {
    int at[2], count; /* count 0: there is none, as in a group of one */
} mti_axes;

static mti_axes mti_axes_of(mti_checker *c, const mt_comm *comm, int add) {
    mti_axes axes = {{0, 0}, 0};
    int i, g;
    for (i = 0; i < (comm && comm->factors[0] ? 2 : 1); i++) {
        g = mti_axis_of(c, comm && comm->factors[0] ? comm->factors[i] : comm, add);
        if (g >= 0) axes.at[axes.count++] = g;
    }
    return axes;
}

/* Returns the parameter or gradient that has all memory of e, or NULL. */
static mti_placed *mti_parameter_at(const mti_checker *c, mti_extent e) {
    size_t i = mti_placed_before(&c->parameters, e.end);
    mti_placed *p;
    while ((p = mti_placed_meets(&c->parameters, e, &i)) != NULL)
        if (mti_extent_covers(p->at, e)) return p;
    return NULL;
}

#define MTI_KNOWN_PARTS 8

/* What is known about a view: the set for each group, and where it comes from. */
typedef struct mti_known {
    unsigned char may[MTI_AXES];                    /* of all parts together */
    unsigned char parts[MTI_KNOWN_PARTS][MTI_AXES]; /* of the pieces that it meets and that are not zero, each once */
    int count;
    int zero;
    int unwritten;    /* 1: nothing has written it, or a part of it, since it was allocated */
    int some_columns; /* 1: it has, or was computed from, some columns of a tensor */
    int is_gradient;  /* of the newest piece, as are is_declared, by and with */
    int is_declared;
    mti_extent in;               /* of the newest piece that has all of the view; width 0: there is none */
    unsigned apart;              /* a bit for each group whose ranks may read other rows or columns */
    unsigned terms;              /* a bit for each group in which mt_check_view makes a term of what all ranks have */
    const char *by, *with;       /* or NULL */
    const mti_placed *parameter; /* NULL: the view is no part of one */
} mti_known;

/* Whether a view has some columns of the tensor of which a piece has all, or some, columns. */
static int mti_has_some_columns(mti_extent e, const mti_placed *p) {
    if (e.width == p->at.width) return p->some_columns;
    return e.width < p->at.width && mti_extents_share_rows(e, p->at);
}

static void mti_known_newest(mti_known *k, const mti_placed *p) {
    k->is_gradient = p->is_gradient;
    k->is_declared = p->is_declared;
    k->by = p->by;
    k->with = p->with;
}

/* Adds what a piece says about a view. covers: 1 if the piece has all of the view */
static void mti_known_add(mti_known *k, mti_extent e, const mti_placed *p, int covers) {
    unsigned char part[MTI_AXES];
    int g, i;
    if (p->zero) return;
    if (mti_has_some_columns(e, p)) k->some_columns = 1;
    if (k->count == 0) mti_known_newest(k, p);
    for (g = 0; g < MTI_AXES; g++) {
        unsigned char may = mti_seen_through(e, p->at, p->may[g]);
        int more = !covers && (may & MTI_SPLIT_PLACEMENTS) ? MTI_SPLIT_PLACEMENTS : 0; /* split in some way */
        k->may[g] = (unsigned char)(k->may[g] | may);
        part[g] = (unsigned char)(may | more);
    }
    for (i = 0; i < k->count; i++)
        if (memcmp(k->parts[i], part, sizeof part) == 0) return;
    if (k->count == MTI_KNOWN_PARTS) i--;
    else k->count++;
    for (g = 0; g < MTI_AXES; g++) k->parts[i][g] = (unsigned char)(k->parts[i][g] | part[g]);
}

static mti_known mti_known_of_parameter(mti_extent e, const mti_placed *p) {
    mti_known k;
    int g;
    memset(&k, 0, sizeof k);
    k.parameter = p;
    k.in = p->at;
    k.zero = p->zero;
    mti_known_newest(&k, p);
    k.some_columns = mti_has_some_columns(e, p);
    for (g = 0; g < MTI_AXES; g++) k.may[g] = mti_seen_through(e, p->at, p->zero ? p->adds[g] : p->may[g]);
    return k;
}

/* What is known about the memory of a view. */
static mti_known mti_memory_known(const mti_checker *c, mt_tensor t) {
    mti_extent e = mti_extent_of(t);
    const mti_placed *p = mti_parameter_at(c, e);
    uintptr_t written = 0, inside = 0, bytes = mti_extent_bytes(e); /* inside: in pieces that are parts of the view */
    mti_known k;
    if (p) return mti_known_of_parameter(e, p);
    memset(&k, 0, sizeof k);
    for (p = mti_placed_older(&c->written, e, UINT64_MAX); p && inside < bytes;
         p = mti_placed_older(&c->written, e, p->age)) {
        int covers = mti_extent_covers(p->at, e);
        if (covers && !k.in.width) k.in = p->at;
        mti_known_add(&k, e, p, covers);
        if (covers || mti_extent_covers(e, p->at)) inside += covers ? bytes : mti_extent_bytes(p->at);
        written += covers ? bytes : mti_extent_shared(e, p->at);
    }
    k.unwritten = written < bytes;
    if (!k.unwritten && k.count > 0) return k;
    k.zero = !k.unwritten;
    k.count = 0;
    memset(k.may, MTI_ALL_PLACEMENTS, sizeof k.may);
    return k;
}

MT_API const char *mt_placement_name(mt_placement placement) {
    switch (placement) {
    case MT_REPLICATED: return "replicated";
    case MT_SPLIT_ROWS: return "split by rows";
    case MT_SPLIT_COLS: return "split by columns";
    case MT_PARTIAL: return "partial";
    case MT_UNDECLARED: return "not known";
    }
    return "no such placement";
}

/* Writes a set of placements, as in "replicated or partial". */
static void mti_set_text(int set, char *text, size_t size) {
    int i;
    size_t n = 0;
    text[0] = 0;
    if (set & MTI_LEFT_OUT) n = (size_t)snprintf(text, size, "left out");
    for (i = 0; i < 4; i++)
        if (set >> i & 1)
            n += (size_t)snprintf(text + n, size - n, "%s%s", n ? " or " : "", mt_placement_name((mt_placement)i));
}

/* Whether the sum of a gradient over a group was computed, so that nothing may be added to it. */
static int mti_is_synchronised(const mti_placed *p, int g) {
    return p->is_gradient && !p->zero && p->may[g] == 1 << MT_REPLICATED && (p->adds[g] >> MT_PARTIAL & 1);
}

/* Refuses a call that would make a parameter or its gradient what the placement of the parameter does not allow.
   operand: " (NAME)" of the call, or "" */
static mt_status mti_write_refuse(mt_context *ctx, const char *where, const mti_placed *p, const char *operand, int g,
                                  int becomes, int wanted) {
    const mti_axis *axis = &ctx->checker->axes[g];
    char is[80], must[80];
    const char *cure = "";
    mti_set_text(becomes, is, sizeof is);
    mti_set_text(wanted, must, sizeof must);
    if (becomes == 1 << MT_PARTIAL && p->is_gradient && !(p->adds[g] >> MT_PARTIAL & 1))
        cure = ": set sequence_partial in its mt_param_desc (sequence_parallel in the desc of a layer), and "
               "mt_sync_gradients sums it";
    if (mti_is_synchronised(p, g))
        cure = ": it is synchronised already; call mt_params_zero_grad before the first backward of a step";
    else if (becomes == 1 << MT_REPLICATED && wanted == 1 << MT_PARTIAL)
        cure = ": its mt_param_desc has sequence_partial (sequence_parallel in the desc of a layer), and "
               "mt_sync_gradients would add up equal values";
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the %s of '%.100s'%.40s would be %s over \"%s\" (%d ranks), must be %s%s",
                   where, p->is_gradient ? "gradient" : "value", p->name, operand, is, axis->name, axis->size, must,
                   cure);
}

static mti_known mti_known_of(const mti_checker *c, mt_tensor t) {
    mti_extent e = mti_extent_of(t);
    mti_known k = mti_memory_known(c, t);
    size_t i;
    int g, part;
    for (i = 0; i < c->views.count && !k.zero; i++) {
        const mti_placed *view = &c->views.list[i];
        for (g = 0; mti_extent_covers(view->at, e) && g < c->count; g++) {
            if (view->may[g] == MTI_ALL_PLACEMENTS) continue;
            if (view->may[g] == 1 << MT_PARTIAL && k.may[g] == 1 << MT_REPLICATED) k.terms |= 1u << g;
            k.may[g] = mti_seen_through(e, view->at, view->may[g]);
            for (part = 0; part < k.count; part++) k.parts[part][g] = k.may[g];
        }
    }
    return k;
}

/* Notes what was written to a parameter or gradient, or to a part of it. */
static void mti_parameter_note(mti_placed *p, const unsigned char *may, int zero, int whole) {
    int g;
    if (zero && !whole) return;
    for (g = 0; g < MTI_AXES; g++) {
        int set = may[g] & p->allowed[g];
        p->may[g] = (unsigned char)(whole || p->zero ? set : set | p->may[g]);
    }
    p->zero = zero;
    if (whole) p->summed_over[0] = 0;
}

/* Whether two extents that meet are rows of one matrix with as many columns, so that both together are one, too. */
static int mti_extents_are_rows(mti_extent a, mti_extent b) {
    uintptr_t apart = a.begin < b.begin ? b.begin - a.begin : a.begin - b.begin;
    return a.width == b.width && a.pitch == b.pitch && a.pitch && apart % a.pitch == 0;
}

/* Makes *p a piece for its own memory and that of q, which it meets. If they are not rows of one matrix, nothing is
   known about it, except that it was written. */
static void mti_placed_join(mti_placed *p, const mti_placed *q) {
    int are_rows = mti_extents_are_rows(p->at, q->at), g;
    mti_extent all;
    for (g = 0; g < MTI_AXES; g++) {
        int both = q->zero ? p->may[g] : p->zero ? q->may[g] : p->may[g] | q->may[g];
        p->may[g] = (unsigned char)(are_rows ? both : MTI_ALL_PLACEMENTS);
    }
    p->is_gradient = (p->is_gradient || p->zero) && (q->is_gradient || q->zero);
    p->is_declared = p->is_declared && q->is_declared;
    p->zero = p->zero && q->zero;
    p->some_columns = p->some_columns || q->some_columns;
    p->is_replaced = p->is_replaced && q->is_replaced;
    if (p->by != q->by) p->by = NULL;
    if (p->with != q->with) p->with = NULL;
    if (p->age < q->age) p->age = q->age;
    all = mti_extents_together(p->at, q->at);
    if (are_rows) all.width = p->at.width, all.pitch = p->at.pitch;
    p->at = all;
}

/* Makes one piece of those that meet `at`, of those that meet these, and so on. */
static void mti_written_squash(mti_checker *c, mti_extent at) {
    mti_placed_list *w = &c->written;
    mti_placed all, *p;
    size_t i = mti_placed_before(w, at.end), from, count;
    p = mti_placed_meets(w, at, &i);
    if (!p) return;
    all = *p;
    do {
        count = w->count;
        i = mti_placed_before(w, all.at.end);
        from = count;
        while ((p = mti_placed_meets(w, all.at, &i)) != NULL) {
            mti_placed_join(&all, p);
            p->is_gone = 1;
            from = i;
        }
        if (from < count) mti_placed_compact(w, from);
    } while (w->count < count);
    p = mti_placed_insert(w, all.at); /* has memory: a piece was removed */
    all.reach = p->reach;
    *p = all;
}

/* Makes one piece of number i and the next one if they meet and say the same, and no other piece lies between them. */
static void mti_written_unite(mti_checker *c, size_t i) {
    mti_placed_list *w = &c->written;
    mti_placed *p, *q, *other;
    uint64_t older;
    size_t at;
    if (i + 1 >= w->count) return;
    p = &w->list[i];
    q = p + 1;
    if (!mti_extents_meet(p->at, q->at) || !mti_extents_are_rows(p->at, q->at)) return;
    if (p->zero != q->zero || p->some_columns != q->some_columns || memcmp(p->may, q->may, sizeof p->may) != 0) return;
    older = p->age < q->age ? p->age : q->age;
    at = mti_placed_before(w, q->at.end > p->at.end ? q->at.end : p->at.end);
    while ((other = mti_placed_meets(w, p->age == older ? p->at : q->at, &at)) != NULL)
        if (other != p && other != q && other->age > older) return;
    mti_placed_join(p, q);
    q->is_gone = 1;
    mti_placed_compact(w, i);
}

/* Returns a new piece for e, without the older ones that it covers, or NULL when there is no memory. */
static mti_placed *mti_written_add(mti_checker *c, mti_extent e) {
    size_t i = mti_placed_before(&c->written, e.end), from = c->written.count;
    int others = 0;
    mti_placed *p;
    while ((p = mti_placed_meets(&c->written, e, &i)) != NULL) {
        if (mti_extent_covers(e, p->at)) p->is_gone = 1, from = i;
        else others++;
    }
    if (from < c->written.count) mti_placed_compact(&c->written, from);
    if (others >= MTI_OVERLAPS_MOST) mti_written_squash(c, e);
    i = mti_placed_before(&c->written, e.begin);
    mti_written_unite(c, i); /* not with the new piece: more is noted about it */
    if (i > 1) mti_written_unite(c, i - 2);
    return mti_placed_insert(&c->written, e);
}

/* Whether the sets of a view say something about it. */
static int mti_sets_are_known(const mti_checker *c, const unsigned char *may) {
    int g;
    for (g = 0; g < c->count; g++)
        if (may[g] != MTI_ALL_PLACEMENTS) return 1;
    return 0;
}

MT_API void mt_check_track(mt_context *ctx) {
    if (ctx && ctx->checker) ctx->checker->tracks = 1;
}

/* Returns the age of what a call overwrites before a backward has read it, or 0. */
static uint64_t mti_lost_before(const mti_placed *p, mti_extent e, const char *by, const char *with) {
    if (!p->by || p->by != by || p->with != with || p->at.begin != e.begin) return 0;
    return p->is_used ? p->lost : p->age;
}

/* Notes the sets of a view. by: NULL when they are not known */
static mt_status mti_placement_note(mt_context *ctx, mt_tensor t, const unsigned char *may, int zero, const char *by,
                                    const char *with) {
    mti_checker *c = ctx->checker;
    mti_extent e = mti_extent_of(t);
    mti_placed *p = mti_parameter_at(c, e);
    uint64_t lost;
    int g;
    if (p) {
        for (g = 0; g < c->count; g++)
            if (!(may[g] & p->allowed[g])) return mti_write_refuse(ctx, by, p, "", g, may[g], p->allowed[g]);
        mti_parameter_note(p, may, zero, mti_extent_covers(e, p->at));
        if (zero) p->used = 0, p->zeroed = c->written.newest;
    } else {
        mti_placed_forget(&c->meant, e, 1);
        if (!mti_is_watched(ctx, e) && !(c->tracks && mti_sets_are_known(c, may))) return MT_SUCCESS;
        MT_TRY(mti_watch_extent(ctx, e, 0));
        p = mti_placed_older(&c->written, e, UINT64_MAX);
        lost = p ? mti_lost_before(p, e, by, with) : 0;
        p = mti_written_add(c, e);
        if (!p) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for the checks of placements");
        p->lost = lost;
        memcpy(p->may, may, sizeof p->may);
        p->zero = zero;
    }
    p->by = by;
    p->with = with;
    p->is_declared = 0;
    p->content = 0;
    return MT_SUCCESS;
}

/* Returns the newest piece that meets a view, if it has the same memory, or NULL. */
static mti_placed *mti_written_as(mti_checker *c, mt_tensor t) {
    mti_extent e = mti_extent_of(t);
    mti_placed *p = mti_placed_older(&c->written, e, UINT64_MAX);
    return p && mti_extent_covers(p->at, e) && mti_extent_covers(e, p->at) ? p : NULL;
}

/* Notes that t has only some columns of a tensor. */
static void mti_columns_note(mti_checker *c, mt_tensor t) {
    mti_placed *p = mti_written_as(c, t);
    if (p) p->some_columns = 1;
}

/* Notes that what was written to t is a gradient. */
static void mti_gradient_note(mti_checker *c, mt_tensor t) {
    mti_placed *p = mti_parameter_at(c, mti_extent_of(t)) ? NULL : mti_written_as(c, t);
    if (p) p->is_gradient = 1;
}

MT_API void mt_declare_forget(mt_context *ctx, const void *data, size_t bytes) {
    mti_notify_forgotten(ctx, data, bytes, 1);
    if (!ctx || !ctx->checker || !bytes) return;
    mti_forget(ctx, data, bytes);
    mti_placed_forget(&ctx->checker->memory, mti_extent_of_bytes(data, bytes), 1);
}

/* Notes that nothing is known about what was written to the parameters and gradients in a view. */
static void mti_forget_parameters(mti_checker *c, mti_extent e) {
    size_t i = mti_placed_before(&c->parameters, e.end);
    unsigned char all[MTI_AXES];
    mti_placed *p;
    memset(all, MTI_ALL_PLACEMENTS, sizeof all);
    while ((p = mti_placed_meets(&c->parameters, e, &i)) != NULL)
        if (mti_extent_covers(e, p->at)) mti_parameter_note(p, all, 0, 1);
}

/* Notes that nothing is known about what was written to a view, nor about the parameters in it. */
static mt_status mti_forget_view(mt_context *ctx, mt_tensor t) {
    unsigned char all[MTI_AXES];
    if (!mti_has_elements(t)) return MT_SUCCESS;
    memset(all, MTI_ALL_PLACEMENTS, sizeof all);
    mti_forget_parameters(ctx->checker, mti_extent_of(t));
    return mti_placement_note(ctx, t, all, 0, NULL, NULL);
}

static mt_status mti_terms_share(mt_context *ctx, int g, mt_tensor t); /* replicas.c */

/* Returns the parameter or gradient of a view, or else the newest piece that meets it, or NULL. */
static mti_placed *mti_newest_at(const mti_checker *c, mti_extent at) {
    mti_placed *p = mti_parameter_at(c, at);
    return p ? p : mti_placed_older(&c->written, at, UINT64_MAX);
}

/* Notes that t is what `set` says over a group. */
static mt_status mti_declare_set(mt_context *ctx, const mt_comm *comm, mt_tensor t, int set) {
    mti_placed *p;
    mti_known k;
    mti_axes axes;
    int i;
    MT_TRY(mti_watch_extent(ctx, mti_extent_of(t), 0));
    axes = mti_axes_of(ctx->checker, comm, 1);
    k = mti_known_of(ctx->checker, t);
    if (axes.count == 0) return k.unwritten ? mti_forget_view(ctx, t) : MT_SUCCESS; /* it was written there, too */
    if (k.zero && !k.parameter) memset(k.may, MTI_ALL_PLACEMENTS, sizeof k.may);
    for (i = 0; i < axes.count; i++) {
        if (set == 1 << MT_PARTIAL) MT_TRY(mti_terms_share(ctx, axes.at[i], t));
        ctx->checker->axes[axes.at[i]].only_group = 0;
        k.may[axes.at[i]] = (unsigned char)set;
    }
    MT_TRY(mti_placement_note(ctx, t, k.may, 0, "mt_declare", NULL));
    if (k.some_columns) mti_columns_note(ctx->checker, t);
    p = mti_newest_at(ctx->checker, mti_extent_of(t));
    if (p) p->is_declared = 1; /* NULL: of sizes that overflow */
    return MT_SUCCESS;
}

/* Whether ranks may have any content in all of e, by mt_declare_meant. */
static int mti_is_meant(const mti_checker *c, mti_extent e) {
    uintptr_t inside = 0;
    size_t i = mti_placed_before(&c->meant, e.end);
    const mti_placed *p;
    while ((p = mti_placed_meets(&c->meant, e, &i)) != NULL) {
        if (mti_extent_covers(p->at, e)) return 1;
        if (mti_extent_covers(e, p->at)) inside += mti_extent_bytes(p->at);
    }
    return inside >= mti_extent_bytes(e);
}

MT_API mt_status mt_declare_meant(mt_context *ctx, mt_tensor t) {
    mti_placed_list *meant;
    mti_placed *p;
    mti_extent e;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (mt_check_mode(ctx) != 2 || !mti_has_elements(t)) return MT_SUCCESS;
    meant = &ctx->checker->meant;
    e = mti_extent_of(t);
    if (mti_is_meant(ctx->checker, e)) return MT_SUCCESS;
    p = mti_placed_insert(meant, e);
    if (!p) return mt_fail(ctx, MT_ERR_MEMORY, "mt_declare_meant: no memory for the checks of placements");
    p->stays = mti_parameter_at(ctx->checker, e) != NULL;
    return MT_SUCCESS;
}

static mt_status mti_expect_placement(mt_context *ctx, const char *function, mt_placement placement) {
    if ((int)placement >= 0 && placement <= MT_UNDECLARED) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: placement is %d, must be from MT_REPLICATED to MT_UNDECLARED", function,
                   (int)placement);
}

MT_API mt_status mt_declare(mt_context *ctx, const mt_comm *comm, mt_tensor t, mt_placement placement) {
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_expect_placement(ctx, "mt_declare", placement));
    if (!comm && placement != MT_UNDECLARED)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_declare: comm is NULL, and placement is not MT_UNDECLARED");
    if (!mt_check_mode(ctx) || !mti_has_elements(t)) return MT_SUCCESS;
    if (!comm) return mti_forget_view(ctx, t);
    return mti_declare_set(ctx, comm, t, placement == MT_UNDECLARED ? MTI_ALL_PLACEMENTS : 1 << placement);
}

MT_API mt_status mt_declare_complete(mt_context *ctx, const mt_comm *comm, mt_tensor t) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!mt_check_mode(ctx) || !mti_has_elements(t)) return MT_SUCCESS;
    return mti_declare_set(ctx, comm, t, 1 << MT_REPLICATED | 1 << MT_SPLIT_ROWS);
}

static mt_status mti_view_share(mt_context *ctx, int g, mt_tensor t, mt_placement placement); /* replicas.c */

MT_API mt_status mt_check_view(mt_context *ctx, const mt_comm *comm, mt_tensor t, mt_placement placement) {
    mti_placed *view;
    mti_axes axes;
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_expect_placement(ctx, "mt_check_view", placement));
    if (!ctx->checker) return MT_SUCCESS;
    axes = mti_axes_of(ctx->checker, comm, 1);
    view = mti_placed_add(&ctx->checker->views);
    if (!view) return mt_fail(ctx, MT_ERR_MEMORY, "mt_check_view: no memory for the checks of placements");
    if (mti_has_elements(t)) view->at = mti_extent_of(t);
    memset(view->may, MTI_ALL_PLACEMENTS, sizeof view->may);
    for (i = 0; i < axes.count && placement != MT_UNDECLARED; i++)
        view->may[axes.at[i]] = (unsigned char)(1 << placement);
    for (i = 0; i < axes.count; i++) MT_TRY(mti_view_share(ctx, axes.at[i], t, placement));
    return MT_SUCCESS;
}

MT_API void mt_check_group(mt_context *ctx, const mt_comm *comm) {
    int count = ctx && ctx->checker ? ctx->checker->count : 0, g;
    if (!ctx || !ctx->checker) return;
    g = mti_axis_of(ctx->checker, comm, 1);
    if (g >= count) ctx->checker->axes[g].only_group = 1;
}

static mt_status mti_slot_check(mt_context *ctx, const char *where, const char *with, const char *name, mt_tensor t);

MT_API mt_status mt_declare_zero(mt_context *ctx, mt_tensor t) {
    unsigned char all[MTI_AXES];
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!ctx->checker || !mti_has_elements(t)) return MT_SUCCESS;
    memset(all, MTI_ALL_PLACEMENTS, sizeof all);
    if (mt_check_mode(ctx)) MT_TRY(mti_slot_check(ctx, "mt_fill", NULL, "y", t));
    return mti_placement_note(ctx, t, all, 1, "mt_fill", NULL);
}

MT_API mt_placement mt_placement_of(const mt_context *ctx, const mt_comm *comm, mt_tensor t) {
    const mti_placed *p;
    mti_known k;
    mti_axes axes;
    int placement, i, may = 0;
    if (!mt_check_mode(ctx) || !mti_has_elements(t)) return MT_UNDECLARED;
    axes = mti_axes_of(ctx->checker, comm, 0);
    p = axes.count == 0 && comm ? mti_parameter_at(ctx->checker, mti_extent_of(t)) : NULL;
    if (axes.count == 0) return p && strcmp(p->summed_over, comm->name) == 0 ? MT_REPLICATED : MT_UNDECLARED;
    k = mti_known_of(ctx->checker, t);
    for (i = 0; i < axes.count; i++) may |= k.may[axes.at[i]];
    for (placement = MT_REPLICATED; placement <= MT_PARTIAL; placement++)
        if ((!k.zero || k.parameter) && may == 1 << placement) return (mt_placement)placement;
    return MT_UNDECLARED;
}

/* Notes a parameter's value or gradient. */
static mt_status mti_declare_part(mt_context *ctx, const char *name, int tensor, mti_axes data, mt_tensor t, int may,
                                  int64_t parts, int is_gradient, int partial) {
    mti_checker *c = ctx->checker;
    const char *copy;
    mti_placed *p;
    int i;
    if (!mti_has_elements(t)) return MT_SUCCESS;
    mti_forget(ctx, t.data, (size_t)t.rows * (size_t)t.cols * mt_dtype_size(t.dtype));
    copy = mti_names_add(c, name);
    p = copy ? mti_placed_insert(&c->parameters, mti_extent_of(t)) : NULL;
    if (!p) return mt_fail(ctx, MT_ERR_MEMORY, "no memory for the checks of '%s'", name);
    p->name = copy;
    p->parts = parts;
    p->is_gradient = is_gradient;
    p->zero = is_gradient;
    memset(p->may, MTI_ALL_PLACEMENTS, sizeof p->may);
    memset(p->allowed, MTI_ALL_PLACEMENTS, sizeof p->allowed);
    if (tensor >= 0) p->may[tensor] = p->allowed[tensor] = (unsigned char)(may | (partial ? 1 << MT_PARTIAL : 0));
    for (i = 0; i < data.count; i++)
        p->may[data.at[i]] = p->allowed[data.at[i]] =
            (unsigned char)(is_gradient ? 1 << MT_REPLICATED | 1 << MT_PARTIAL : 1 << MT_REPLICATED);
    memcpy(p->adds, p->allowed, sizeof p->adds);
    if (tensor >= 0 && partial && may == 1 << MT_REPLICATED) p->adds[tensor] = 1 << MT_PARTIAL;
    return MT_SUCCESS;
}

MT_API mt_status mt_declare_parameter(mt_context *ctx, const char *name, const mt_comm *tensor, const mt_comm *data,
                                      mt_tensor value, mt_tensor grad, mt_placement placement, int64_t parts,
                                      int partial) {
    mti_axes d;
    int t;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!name) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_declare_parameter: name is NULL");
    MT_TRY(mti_expect_placement(ctx, "mt_declare_parameter", placement));
    if (!mt_check_mode(ctx)) return MT_SUCCESS;
    t = mti_axis_of(ctx->checker, tensor, 1);
    d = mti_axes_of(ctx->checker, data, 1);
    MT_TRY(mti_declare_part(ctx, name, t, d, value, 1 << placement, parts, 0, 0));
    return mti_declare_part(ctx, name, t, d, grad, 1 << placement, parts, 1, partial);
}
