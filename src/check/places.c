/* ---- numbers, scales and parts ----------------------------------------------------------------------------------- */

#pragma once
#include "rules.c"

static mt_status mti_place_note(mt_context *ctx, const char *where, const char *field, const mti_known *known,
                                const mt_place *place); /* replicas.c */

/* Refuses a number of a place. `is` says what t is, and `must` what the number must be. */
static mt_status mti_place_refuse(mt_context *ctx, const char *where, const char *field, const char *number,
                                  int64_t value, const mti_known *k, const char *is, const char *must) {
    char at[192];
    mti_with_text(ctx->checker, k->with, at, sizeof at);
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s%s: %s%s%s is %lld, but %s: it must be %s", where, at, field,
                   field[0] ? "." : "", number, (long long)value, is, must);
}

/* The check for a group that splits t. */
static mt_status mti_place_split(mt_context *ctx, const char *where, const char *field, const char *name,
                                 const mti_known *k, int g, const mt_place *place) {
    const mti_axis *axis = &ctx->checker->axes[g];
    int by_rows = k->may[g] == 1 << MT_SPLIT_ROWS;
    int64_t each = by_rows ? place->rows : place->cols, first = by_rows ? place->first_row : place->first_col;
    int64_t before = mt_size_mul(each, axis->rank), all = mt_size_mul(each, axis->size); /* -1: too large */
    char is[160], must[160];
    snprintf(is, sizeof is, "%.60s is split by %s over \"%s\" and this is rank %d of %d", name,
             by_rows ? "rows" : "columns", axis->name, axis->rank, axis->size);
    if (before < 0 || first < before) {
        snprintf(must, sizeof must,
                 "at least %lld, the rank's first %s of the whole tensor, so that ranks do not use the same %s",
                 (long long)before, by_rows ? "row" : "column", place->what);
        return mti_place_refuse(ctx, where, field, by_rows ? "first_row" : "first_col", first, k, is, must);
    }
    if (!by_rows && place->vocab > 1 && place->vocab == each) {
        snprintf(must, sizeof must, "that of all ranks, of which only the first would have tokens");
        return mti_place_refuse(ctx, where, field, "vocab", place->vocab, k, is, must);
    }
    if (by_rows || place->padded || (all >= 0 && place->global_cols >= all)) return MT_SUCCESS;
    snprintf(must, sizeof must, "at least %lld, the columns of all ranks", (long long)all);
    return mti_place_refuse(ctx, where, field, "global_cols", place->global_cols, k, is, must);
}

MT_API void mt_check_scattered(mt_context *ctx, int scattered) {
    if (ctx && ctx->checker) ctx->checker->scattered = scattered;
}

/* Whether the rows of t are those of tokens that are in parts over "context", so that other groups that divide them do
   not have them in their order. */
static int mti_is_scattered_rows(const mti_checker *c, const mti_known *k, int group) {
    int g;
    if (c->scattered) return 1;
    for (g = 0; g < c->count; g++)
        if (g != group && mti_has_tokens(&c->axes[g]) && !mti_is_data(&c->axes[g]) && k->may[g] == 1 << MT_SPLIT_ROWS)
            return 1;
    return 0;
}

MT_API mt_status mt_place_check(mt_context *ctx, const char *where, const char *field, const char *name, mt_tensor t,
                                const mt_place *place) {
    mti_known k;
    char is[160], must[160];
    int g, whole = t.rows > 1 && mt_tensor_ld(t) == t.cols; /* 0: t may be a part of the columns */
    int alike = 0;                                          /* 1: ranks of a group have the same columns */
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!where || !field || !name || !place)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_place_check: where, field, name or place is NULL");
    if (!mt_check_mode(ctx) || ctx->checker->count == 0 || !mti_has_elements(t)) return MT_SUCCESS;
    k = mti_known_of(ctx->checker, t);
    MT_TRY(mti_place_note(ctx, where, field[0] ? field : name, &k, place));
    if (k.some_columns) whole = 0;
    for (g = 0; g < ctx->checker->count && !(k.zero && !k.parameter); g++) {
        int by_rows = k.may[g] == 1 << MT_SPLIT_ROWS, by_cols = k.may[g] == 1 << MT_SPLIT_COLS;
        if (by_rows && place->sequences && mti_has_tokens(&ctx->checker->axes[g]) &&
            !mti_is_data(&ctx->checker->axes[g]))
            continue;
        if (by_cols || (by_rows && !mti_is_scattered_rows(ctx->checker, &k, g)))
            MT_TRY(mti_place_split(ctx, where, field, name, &k, g, place));
        if (!by_rows && (k.may[g] & MTI_SPLIT_PLACEMENTS)) whole = 0;
        if (!(k.may[g] & MTI_SPLIT_PLACEMENTS)) alike = 1;
    }
    if (k.zero || !whole || !alike || place->global_cols == place->cols) return MT_SUCCESS;
    snprintf(is, sizeof is, "no group splits the columns of %.60s", name);
    snprintf(must, sizeof must, "%lld, the number of its columns, so that ranks use the same %s",
             (long long)place->cols, place->what);
    return mti_place_refuse(ctx, where, field, "global_cols", place->global_cols, &k, is, must);
}

/* Whether a factor is n or 1 / n, up to rounding. */
static int mti_is_ratio(double factor, int n) {
    double over = factor / n - 1.0, under = factor * n - 1.0;
    return (over < 1e-6 && over > -1e-6) || (under < 1e-6 && under > -1e-6);
}

MT_API mt_status mt_check_factor(mt_context *ctx, const char *where, const char *number, const char *name, mt_tensor t,
                                 mt_placement along, double factor) {
    mti_known k;
    int g;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (mt_check_mode(ctx) != 2 || !mti_has_elements(t)) return MT_SUCCESS;
    if (mti_placed_older(&ctx->checker->meant, mti_extent_of(t), UINT64_MAX)) return MT_SUCCESS; /* such as q of qkv */
    k = mti_known_of(ctx->checker, t);
    for (g = 0; g < ctx->checker->count && !k.zero; g++) {
        const mti_axis *axis = &ctx->checker->axes[g];
        if (k.may[g] != 1 << along || !mti_is_ratio(factor, axis->size)) continue;
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: %s is %.4g times what it usually is, and \"%s\" has %d ranks: compute it with the sizes of "
                       "the whole model, not with those of a rank, or call mt_declare_meant(ctx, %s) before, if it is "
                       "meant so",
                       where, number, factor, axis->name, axis->size, name);
    }
    return MT_SUCCESS;
}

MT_API void mt_check_mean(mt_context *ctx, mt_tensor t, double scale) {
    mti_checker *c = ctx ? ctx->checker : NULL;
    double rows = (double)t.rows;
    mti_known k;
    int g;
    if (mt_check_mode(ctx) != 2 || !mti_has_elements(t)) return;
    k = mti_known_of(c, t);
    for (g = 0; g < c->count; g++) {
        rows *= k.may[g] == 1 << MT_SPLIT_ROWS ? c->axes[g].size : 1;
        if (!c->axes[g].only_group && (k.may[g] & (k.may[g] - 1))) c->mean_rows = -1.0; /* not known */
    }
    if (mt_tensor_ld(t) != t.cols) c->mean_rows = -1.0; /* some columns: the rows would count again */
    if (scale != scale || k.zero || (c->mean_rows != 0.0 && c->mean_scale != scale)) c->mean_rows = -1.0;
    if (c->mean_rows >= 0.0) c->mean_rows += rows;
    c->mean_scale = scale;
}

static mt_status mti_mean_refuse(mt_context *ctx, const char *where, double factor, const char *group, int ranks) {
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "%s: the scale of the loss makes the gradients %.4g times those of the mean over the rows of all "
                   "ranks, and \"%s\" has %d ranks: divide by the rows of all ranks once, or call "
                   "mt_check_mean(ctx, logits, NAN) before, if it is meant so",
                   where, factor, group, ranks);
}

MT_API mt_status mt_check_mean_end(mt_context *ctx, const char *where, double grad_scale) {
    double factor;
    int g, all = 1, groups = 0;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (mt_check_mode(ctx) != 2) return MT_SUCCESS;
    factor = ctx->checker->mean_rows * ctx->checker->mean_scale * grad_scale;
    ctx->checker->mean_rows = 0.0;
    for (g = 0; g < ctx->checker->count; g++) {
        const mti_axis *axis = &ctx->checker->axes[g];
        if (axis->only_group) continue;
        if (mti_is_ratio(factor, axis->size)) return mti_mean_refuse(ctx, where, factor, axis->name, axis->size);
        all *= axis->size;
        groups++;
    }
    return groups > 1 && mti_is_ratio(factor, all) ? mti_mean_refuse(ctx, where, factor, "the world", all) : MT_SUCCESS;
}

/* Returns the number of parts of a parameter, or of the one with which a view was computed last, or 0. *of becomes the
   name of the parameter. */
static int64_t mti_parts_of(const mti_checker *c, mti_extent e, const char **of) {
    const mti_placed *p = mti_parameter_at(c, e);
    size_t i;
    *of = p ? p->name : NULL;
    if (p) return p->parts;
    p = mti_placed_older(&c->written, e, UINT64_MAX);
    if (p && !mti_extent_covers(p->at, e)) return 0;
    *of = p ? p->features : NULL;
    if (!p || !p->features) return 0;
    for (i = 0; i < c->parameters.count; i++)
        if (c->parameters.list[i].name == p->features) return c->parameters.list[i].parts;
    return 0;
}

MT_API mt_status mt_parts_check(mt_context *ctx, const char *where, const char *name, mt_tensor t, int64_t parts) {
    mti_known k;
    const char *of;
    char since[208];
    int64_t has;
    int g;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (parts < 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_parts_check: parts is %lld, must be at least 1", (long long)parts);
    if (!mt_check_mode(ctx) || ctx->checker->count == 0 || !mti_has_elements(t)) return MT_SUCCESS;
    has = mti_parts_of(ctx->checker, mti_extent_of(t), &of);
    if (has == 0 || has % parts == 0) return MT_SUCCESS;
    k = mti_known_of(ctx->checker, t);
    mti_since_text(k.by, k.with, since, sizeof since);
    for (g = 0; g < ctx->checker->count; g++)
        if (k.may[g] == 1 << MT_SPLIT_COLS)
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "%s: %s is split by columns over \"%s\" (%d ranks)%s, and its columns are %lld parts, but "
                           "'%s' has parts %lld, so a rank has other columns than its share of each part: set "
                           "mt_param_desc.parts to %lld",
                           where, name, ctx->checker->axes[g].name, ctx->checker->axes[g].size, since, (long long)parts,
                           of, (long long)has, (long long)parts);
    return MT_SUCCESS;
}

/* Returns the parameter or gradient that is a view, not only a part of it, and that group g splits, or NULL. */
static const mti_placed *mti_whole_split(const mti_checker *c, mt_tensor t, int g) {
    mti_extent e = mti_extent_of(t);
    const mti_placed *p = mti_has_elements(t) ? mti_parameter_at(c, e) : NULL;
    if (!p || !mti_extent_covers(e, p->at) || (p->allowed[g] >> MT_REPLICATED & 1)) return NULL;
    return p->allowed[g] & MTI_SPLIT_PLACEMENTS ? p : NULL;
}

/* Returns the parts of the columns of t over group g and the parameter that has them: t itself, or the one whose
   features t has. 0: not known, or the group does not split them. */
static int64_t mti_parts_over(const mti_checker *c, mt_tensor t, int g, const char **of) {
    const mti_placed *p = mti_whole_split(c, t, g);
    mti_extent e = mti_extent_of(t);
    *of = p ? p->name : NULL;
    if (p) return p->parts;
    p = mti_has_elements(t) && !mti_parameter_at(c, e) ? mti_placed_older(&c->written, e, UINT64_MAX) : NULL;
    if (!p || p->at.width != e.width || p->may[g] != 1 << MT_SPLIT_COLS) return 0;
    return mti_parts_of(c, e, of);
}

MT_API mt_status mt_parts_agree(mt_context *ctx, const char *where, mt_tensor weight, mt_tensor other) {
    const mti_placed *w;
    const char *of;
    int64_t parts;
    int g;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!where) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_parts_agree: where is NULL");
    for (g = 0; mt_check_mode(ctx) && g < ctx->checker->count; g++) {
        w = mti_whole_split(ctx->checker, weight, g);
        parts = w ? mti_parts_over(ctx->checker, other, g, &of) : 0;
        if (parts && w->parts != parts)
            return mt_fail(
                ctx, MT_ERR_ARGUMENT,
                "%s: '%.100s' has parts %lld, but '%.100s' has parts %lld, so a rank of \"%s\" (%d ranks) has "
                "other features of the one than of the other: set mt_param_desc.parts of both to the same",
                where, w->name, (long long)w->parts, of, (long long)parts, ctx->checker->axes[g].name,
                ctx->checker->axes[g].size);
    }
    return MT_SUCCESS;
}
