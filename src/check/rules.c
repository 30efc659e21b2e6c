/* ---- the rules of operators -------------------------------------------------------------------------------------- */

#pragma once
#include "declarations.c"

struct mti_ruling;
static mt_status mti_replica_read(mt_context *ctx, const char *where, const char *with, const mt_operand *operand,
                                  const mti_known *known); /* replicas.c */
static mt_status mti_range_note(mt_context *ctx, int g, const struct mti_ruling *r, const mt_operand *o,
                                mti_known *known); /* replicas.c */

/* An operand of a rule in a call. */
typedef struct mti_ruled {
    const mt_operand *operand; /* NULL: the call leaves it out */
    int gradient_of;           /* number of the operand whose gradient the call writes here; -1: none */
    mti_known known;
} mti_ruled;

typedef struct mti_ruling {
    const mti_checker *checker;
    const char *where;
    const mt_rule *rule;
    mti_ruled operands[MTI_RULE_OPERANDS]; /* in the order of the rule */
    int count;
    int over_all;     /* 1: the call is a sum over all groups together */
    const char *with; /* name of a parameter among the operands, or NULL */
} mti_ruling;

static int mti_reads(const mti_ruled *o) { return o->operand && (o->operand->use & MT_ARG_IN); }

static int mti_writes(const mti_ruled *o) { return o->operand && (o->operand->use & MT_ARG_OUT); }

static int mti_only_reads(const mti_ruled *o) { return mti_reads(o) && !mti_writes(o); }

/* Returns the set that a letter of a case stands for. */
static int mti_letter_set(char letter) {
    static const char letters[] = "RrcP", whole[] = "owka";
    const char *at = strchr(letters, letter);
    if (letter == '-') return 0;
    if (letter && strchr(whole, letter)) return 1 << MT_REPLICATED;
    return at && *at ? 1 << (at - letters) : MTI_ALL_PLACEMENTS;
}

/* Whether the rows of different ranks of a group are other sequences. */
static int mti_is_data(const mti_axis *axis) { return strcmp(axis->name, "data") == 0; }

/* Whether they are other tokens of the batch: of other sequences, or of the same ones. */
static int mti_has_tokens(const mti_axis *axis) { return mti_is_data(axis) || strcmp(axis->name, "context") == 0; }

/* Whether operands i and k of a call are views of one tensor, with as many columns. */
static int mti_is_sibling(const mti_ruling *r, int i, int k) {
    const mti_ruled *a = &r->operands[i], *b = &r->operands[k];
    return b->operand && a->known.in.begin == b->known.in.begin && a->known.in.width == b->known.in.width &&
           a->operand->t.cols == b->operand->t.cols;
}

/* Returns how many views of one tensor the call has of which operand i is one. */
static int mti_siblings(const mti_ruling *r, int i) {
    int k, n, count = 0;
    for (k = 0; k < r->count; k++) {
        for (n = 0; n < k; n++)
            if (mti_is_sibling(r, i, n) && mti_is_sibling(r, i, k) &&
                r->operands[n].operand->t.data == r->operands[k].operand->t.data)
                break;
        if (n == k && mti_is_sibling(r, i, k)) count++;
    }
    return count;
}

/* Returns the number of shares into which views like operand i divide the columns of the tensor that has it. Returns 1
   when the operand, or it and its siblings together, are all columns, and when there is no such number. */
static int64_t mti_shares(const mti_ruling *r, int i) {
    const mti_known *k = &r->operands[i].known;
    mti_extent at = mti_extent_of(r->operands[i].operand->t);
    uintptr_t each = at.width * (uintptr_t)mti_siblings(r, i);
    if (!k->in.width || !mti_extents_share_rows(at, k->in) || k->in.width % each) return 1;
    return (int64_t)(k->in.width / each);
}

/* Whether operand i has columns of the share of this rank: of tensors side by side, [K | V], or in turn, [k v k v]. */
static int mti_has_own_columns(const mti_ruling *r, int i, int g) {
    const mti_axis *axis = &r->checker->axes[g];
    mti_extent at = mti_extent_of(r->operands[i].operand->t), in = r->operands[i].known.in;
    int64_t shares = mti_shares(r, i), siblings = mti_siblings(r, i), n;
    int64_t from = axis->rank * shares / axis->size, to = ((axis->rank + 1) * shares - 1) / axis->size;
    uintptr_t offset = (at.begin - in.begin) % (in.pitch ? in.pitch : 1);
    if (shares == 1 || offset % at.width) return 0;
    offset /= at.width;
    for (n = from; n <= to; n++)
        if (n == (int64_t)offset % shares || n == (int64_t)offset / siblings) return 1;
    return 0;
}

/* Returns the set of the placement that operand i has as exactly this rank's share of a larger tensor, or 0. */
static int mti_share_of(const mti_ruling *r, int i, int g) {
    const mti_ruled *o = &r->operands[i];
    const mti_axis *axis = &r->checker->axes[g];
    mti_extent at, in = o->known.in;
    uintptr_t size = (uintptr_t)axis->size, rank = (uintptr_t)axis->rank, rows;
    if (!o->operand || !in.width) return 0;
    at = mti_extent_of(o->operand->t);
    rows = (uintptr_t)o->operand->t.rows;
    if (at.width * size == in.width && mti_extents_share_rows(at, in) && at.begin - in.begin == rank * at.width)
        return 1 << MT_SPLIT_COLS;
    if (at.width != in.width || mti_extent_bytes(in) != rows * size * in.width) return 0;
    return at.begin - in.begin == rank * rows * in.pitch ? 1 << MT_SPLIT_ROWS : 0;
}

/* The same of what all ranks have and a call only reads. */
static int mti_own_share(const mti_ruling *r, int i, int g) {
    const mti_ruled *o = &r->operands[i];
    if (!mti_only_reads(o) || o->known.may[g] != 1 << MT_REPLICATED) return 0;
    return mti_share_of(r, i, g);
}

/* Whether a call writes this rank's share of a gradient of which each rank has a term. */
static int mti_is_term(const mti_ruling *r, int i, int g, char letter) {
    const mti_ruled *o = &r->operands[i];
    const mti_placed *p = o->known.parameter;
    if ((letter != 'r' && letter != 'c') || !mti_writes(o) || !p || !p->is_gradient) return 0;
    return p->adds[g] == 1 << MT_PARTIAL && mti_share_of(r, i, g) == mti_letter_set(letter);
}

/* Whether operand i has the first rows of a tensor, until those of this rank's share of operand 0. */
static int mti_has_first_rows(const mti_ruling *r, int i, int g) {
    const mti_ruled *o = &r->operands[i];
    int64_t rows = r->operands[0].operand ? r->operands[0].operand->t.rows : 0;
    if (o->known.in.width && mti_extent_of(o->operand->t).begin - o->known.in.begin >= o->known.in.pitch) return 0;
    return o->operand->t.rows == (r->checker->axes[g].rank + 1) * rows;
}

/* What a letter says of operand i, apart from its placement, see mt_rule. */
static int mti_extent_fits(const mti_ruling *r, int i, int g, char letter) {
    int reads = mti_reads(&r->operands[i]);
    switch (letter) {
    case 'o': return !reads || mti_has_own_columns(r, i, g);
    case 'w': return !reads || mti_shares(r, i) == 1;
    case 'k': return !mti_is_data(&r->checker->axes[g]) && mti_has_first_rows(r, i, g);
    case 'a': return !mti_is_data(&r->checker->axes[g]);
    default: return 1;
    }
}

/* Returns the set that a letter gives operand i, which a call writes. This rank's columns of a tensor of zeros are a
   term of it. */
static int mti_result_set(const mti_ruling *r, int i, int g, char letter) {
    if (mti_is_term(r, i, g, letter)) return 1 << MT_PARTIAL;
    if (letter != 'o' || !r->operands[i].operand || mti_reads(&r->operands[i])) return mti_letter_set(letter);
    return 1 << (mti_shares(r, i) > 1 ? MT_PARTIAL : MT_SPLIT_COLS);
}

/* Returns the set that an operand must have a letter of: what it is when the call reads it, and what a parameter or
   gradient may become when the call only writes it. */
static int mti_ruled_set(const mti_ruled *o, int g) {
    const mti_placed *p = o->known.parameter;
    if (mti_reads(o)) return o->known.zero && !p ? MTI_ALL_PLACEMENTS : o->known.may[g];
    return p ? p->adds[g] : MTI_ALL_PLACEMENTS;
}

/* Whether an operand may be what a letter says: all parts of it, when they have other sets. */
static int mti_letter_fits(const mti_ruling *r, int i, int g, char letter) {
    const mti_ruled *o = &r->operands[i];
    int set = mti_result_set(r, i, g, letter), part;
    if (!(mti_ruled_set(o, g) & set)) return 0;
    for (part = 0; mti_reads(o) && part < o->known.count; part++)
        if (!(o->known.parts[part][g] & set)) return 0;
    return mti_extent_fits(r, i, g, letter);
}

/* Returns the number of operands whose sets do not fit a case. *first becomes the first of them, or one that is no
   parameter. */
static int mti_case_misfits(const mti_ruling *r, const char *letters, int g, int *first) {
    int i, misfits = 0;
    *first = -1;
    for (i = 0; i < r->count; i++) {
        const mti_ruled *o = &r->operands[i];
        if (!o->operand || (letters[i] != '-' && mti_letter_fits(r, i, g, letters[i]))) continue;
        if (*first < 0 || r->operands[*first].known.parameter) *first = i;
        misfits++;
    }
    return misfits;
}

/* Goes to the next case: words of `cases`, then those of `more`. Returns NULL behind the last one. */
static const char *mti_next_case(const char *at, const char *cases, const char **more) {
    at = at ? at + strcspn(at, " ") : cases;
    at += strspn(at, " ");
    if (*at) return at;
    cases = *more;
    *more = NULL;
    return cases ? mti_next_case(NULL, cases, more) : NULL;
}

/* Returns the length of the layer's part of a parameter's name: without the last of several words, at most 120. */
static int mti_layer_length(const char *name) {
    const char *last = strrchr(name, '.');
    size_t n = last && last > name ? (size_t)(last - name) : strlen(name);
    return n < 120 ? (int)n : 120;
}

/* Writes which call has written a tensor, as in " since mt_gemm at mlp.linear_fc1". by and with may be NULL. */
static void mti_since_text(const char *by, const char *with, char *text, size_t size) {
    text[0] = 0;
    if (by)
        snprintf(text, size, " since %.60s%s%.*s", by, with ? " at " : "", with ? mti_layer_length(with) : 0,
                 with ? with : "");
}

/* Writes the layer whose parameter a call has, as in ' "mlp.linear_fc1"', or that of a call before it. */
static void mti_with_text(const mti_checker *c, const char *with, char *text, size_t size) {
    const char *name = with ? with : c->latest;
    text[0] = 0;
    if (name) snprintf(text, size, "%s\"%.*s\"", with ? " " : " after ", mti_layer_length(name), name);
}

/* Whether a case would fit if gradients of parameters might be terms of a sum. */
static int mti_fits_terms(const mti_ruling *r, int g) {
    const char *more = NULL, *at = NULL;
    int k, first, terms;
    while ((at = mti_next_case(at, r->rule->cases, &more)) != NULL) {
        for (k = terms = 0; k < r->count; k++) {
            const mti_ruled *o = &r->operands[k];
            if (!o->operand || !o->known.parameter || !o->known.parameter->is_gradient || at[k] != 'P') continue;
            if (!mti_letter_fits(r, k, g, 'P')) terms++;
        }
        if (terms && terms == mti_case_misfits(r, at, g, &first)) return 1;
    }
    return 0;
}

/* Writes what a parameter or its gradient has to do with a misfit of operand i. Returns 1 if this is the mistake. A sum
   over rows that are split is a part of a sum, a sum over replicated rows is not. */
static int mti_parameter_hint(const mti_ruling *r, int g, int i, char *text, size_t size) {
    int is = r->operands[i].known.may[g], k;
    text[0] = 0;
    for (k = 0; k < r->count; k++) {
        const mti_placed *p = r->operands[k].operand ? r->operands[k].known.parameter : NULL;
        if (p && !p->is_gradient && is == 1 << MT_SPLIT_ROWS && p->may[g] == 1 << MT_REPLICATED &&
            !mti_extent_covers(mti_extent_of(r->operands[k].operand->t), p->at))
            snprintf(text, size, ", or say with mt_check_view that the view of '%.100s' is of this rank's rows",
                     p->name);
        if (!p || !p->is_gradient || !mti_writes(&r->operands[k])) continue;
        if (mti_is_synchronised(p, g)) {
            snprintf(text, size,
                     ": the gradient of '%.100s' is synchronised already; call mt_params_zero_grad before the first "
                     "backward of a step",
                     p->name);
            return 1;
        }
        if ((is == 1 << MT_SPLIT_ROWS || (is == 1 << MT_PARTIAL && mti_fits_terms(r, g))) &&
            p->adds[g] == 1 << MT_REPLICATED)
            snprintf(text, size, ", or set sequence_partial for '%.100s' (sequence_parallel in the desc of a layer)",
                     p->name);
        if (is == 1 << MT_REPLICATED && p->adds[g] == 1 << MT_PARTIAL)
            snprintf(text, size,
                     ", or leave out sequence_partial of '%.100s' (sequence_parallel in the desc of a layer)", p->name);
    }
    return 0;
}

/* Whether an operand is a gradient: its use says so, or it was written as one. */
static int mti_is_gradient(const mti_ruled *o) { return (o->operand->use & MT_ARG_GRADIENT) || o->known.is_gradient; }

/* Returns the region call that turns a placement into another one, or NULL. */
static const char *mti_region_remedy(int is, int must, int is_gradient) {
    int from = 0, to = 0;
    static const char *const calls[4][4] = {
        {NULL, "mt_scatter_to_sequence_region", "mt_scatter_to_tensor_region", NULL},
        {"mt_gather_from_sequence_region", NULL, NULL, NULL},
        {"mt_gather_from_tensor_region", NULL, NULL, NULL},
        {"mt_reduce_from_tensor_region_forward", "mt_reduce_scatter_to_sequence_region", NULL, NULL}};
    if (is == 1 << MT_REPLICATED && must >> MT_PARTIAL & 1) return NULL; /* it was summed already */
    while (from < 3 && !(is >> from & 1)) from++;
    while (to < 3 && !(must >> to & 1)) to++;
    if (from == 3 && to == 0 && is_gradient) return "mt_copy_to_tensor_region_backward";
    return calls[from][to];
}

/* Returns the call that makes an operand what it must be, or NULL. Over the data group there are no regions: the ranks
   add up terms of a sum, and a number that each has of its own tokens. Context ranks do this, too, and gather keys. */
static const char *mti_remedy(const mti_checker *c, const mti_ruled *o, int g, int must) {
    int is = o->known.may[g], sums = is >> MT_PARTIAL & 1, whole = must >> MT_REPLICATED & 1;
    int number = o->operand->t.rows == 1 && o->operand->t.cols == 1;
    if (whole && sums && o->known.parameter && o->known.parameter->is_gradient) return "mt_sync_gradients";
    if (whole && (o->operand->use & MT_ARG_GATHERED)) return "mt_all_gather";
    if (mti_has_tokens(&c->axes[g]) && whole && (sums || number)) return "mt_all_reduce";
    return mti_is_data(&c->axes[g]) ? NULL : mti_region_remedy(is, must, mti_is_gradient(o));
}

/* Writes which operand, that all ranks have, could be this rank's term of a sum, so that a case would fit. */
static void mti_term_hint(const mti_ruling *r, int g, int ranks, char *text, size_t size) {
    const char *more = NULL, *at = NULL, *name;
    int first;
    text[0] = 0;
    while (r->count > 1 && (at = mti_next_case(at, r->rule->cases, &more)) != NULL) {
        if (mti_case_misfits(r, at, g, &first) != 1 || at[first] != 'P') continue;
        if (!mti_only_reads(&r->operands[first]) || r->operands[first].known.may[g] != 1 << MT_REPLICATED) continue;
        name = r->operands[first].operand->name;
        snprintf(
            text, size,
            ", or add %.20s on one rank only, and say so with mt_check_view (MT_PARTIAL), or a copy divided by %d on "
            "each rank, with mt_declare (MT_PARTIAL)",
            name, ranks);
        return;
    }
}

/* Writes over which other group the tensor of a call that communicates is a sum, if it must be one. */
static void mti_group_hint(const mti_ruling *r, int g, int must, char *text, size_t size) {
    const mti_ruled *o = &r->operands[0];
    char since[208];
    int other;
    text[0] = 0;
    if (r->count > 1 || r->over_all || !(must >> MT_PARTIAL & 1)) return;
    for (other = 0; other < r->checker->count; other++) {
        if (other == g || o->known.may[other] != 1 << MT_PARTIAL) continue;
        mti_since_text(o->known.by, o->known.with, since, sizeof since);
        snprintf(text, size, ": this is a sum over \"%s\"%s, so call it with the communicator of \"%s\", not of \"%s\"",
                 r->checker->axes[other].name, since, r->checker->axes[other].name, r->checker->axes[g].name);
        return;
    }
}

/* Whether parts of an operand are something else than other parts of it. *a and *b become the sets of two of them. */
static int mti_parts_differ(const mti_ruled *o, int g, int *a, int *b) {
    int i, k;
    for (i = 0; mti_reads(o) && i < o->known.count; i++)
        for (k = 0; k < i; k++) {
            *a = o->known.parts[i][g];
            *b = o->known.parts[k][g];
            if (!(*a & *b)) return 1;
        }
    return 0;
}

/* Refuses operand i: cases allow each of its parts, but none allows all of them. */
static mt_status mti_parts_refuse(mt_context *ctx, const mti_ruling *r, int g, int i, int a, int b) {
    const mti_axis *axis = &ctx->checker->axes[g];
    const mti_ruled *o = &r->operands[i];
    char some[80], others[80], at[192];
    mti_set_text(a, some, sizeof some);
    mti_set_text(b, others, sizeof others);
    snprintf(at, sizeof at, " (%.30s)", o->operand->name);
    mti_with_text(ctx->checker, r->with, at, sizeof at);
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "%s%s: a part of %s is %s and another part %s over \"%s\" (%d ranks), but the call treats all of it "
                   "alike",
                   r->where, at, o->operand->name, some, others, axis->name, axis->size);
}

/* Refuses operand i of a call: no case allows what it is. */
static mt_status mti_rule_refuse(mt_context *ctx, const mti_ruling *r, int g, int i, int must) {
    const mti_axis *axis = &ctx->checker->axes[g];
    const mti_ruled *o = &r->operands[i];
    const char *help = mti_remedy(ctx->checker, o, g, must);
    int adds_whole =
        r->count > 1 && o->known.may[g] == 1 << MT_REPLICATED && !(must & ~(MTI_LEFT_OUT | 1 << MT_PARTIAL));
    char is[80], wanted[80], at[192], since[208], cure[400] = "", more[400], term[240];
    int a, b;
    mti_set_text(o->known.may[g], is, sizeof is);
    mti_set_text(must, wanted, sizeof wanted);
    snprintf(at, sizeof at, " (%.30s)", o->operand->name);
    if (mti_parts_differ(o, g, &a, &b) && !((a | b) & ~must)) return mti_parts_refuse(ctx, r, g, i, a, b);
    if (o->known.parameter && mti_writes(o))
        return mti_write_refuse(ctx, r->where, o->known.parameter, at, g, must, mti_ruled_set(o, g));
    mti_with_text(ctx->checker, r->with, at, sizeof at);
    mti_since_text(o->known.parameter ? NULL : o->known.by, o->known.with, since, sizeof since);
    if (help) snprintf(cure, sizeof cure, ": call %s before", help);
    else if (adds_whole && strchr(r->rule->cases, 'P'))
        snprintf(cure, sizeof cure, ": each rank would add it to its term of a sum; add it after the sum");
    else if (o->known.may[g] == 1 << MT_REPLICATED && must == 1 << MT_PARTIAL)
        snprintf(cure, sizeof cure, ": this call would add up equal values");
    mti_group_hint(r, g, must, more, sizeof more);
    if (more[0]) snprintf(cure, sizeof cure, "%s", more);
    mti_term_hint(r, g, axis->size, term, sizeof term);
    if (mti_parameter_hint(r, g, i, more, sizeof more)) cure[0] = term[0] = 0;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s%s: %s%s%.100s%s is %s over \"%s\" (%d ranks)%s, must be %s%s%s%s",
                   r->where, at, o->operand->name, o->known.parameter ? ", '" : "",
                   o->known.parameter ? o->known.parameter->name : "", o->known.parameter ? "'," : "", is, axis->name,
                   axis->size, since, wanted, cure, more, term);
}

/* Whether a message had better name operand a than b: a mistake is seldom in a parameter. */
static int mti_is_better(const mti_ruling *r, int a, int b) {
    return r->operands[b].known.parameter && !r->operands[a].known.parameter;
}

/* Refuses a rule without cases, and a case that has not a letter for each operand. */
static mt_status mti_rule_valid(mt_context *ctx, const mti_ruling *r) {
    const char *more = r->rule->data_cases, *at = NULL;
    int cases = 0;
    while ((at = mti_next_case(at, r->rule->cases, &more)) != NULL) {
        if ((int)strcspn(at, " ") != r->count)
            return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: a case of its rule has %d letters, but there are %d operands",
                           r->where, (int)strcspn(at, " "), r->count);
        cases++;
    }
    return cases > 0 ? MT_SUCCESS : mt_fail(ctx, MT_ERR_ARGUMENT, "%s: its rule has no case", r->where);
}

/* Whether a call reads, apart from zeros, only what all ranks of group g have. */
static int mti_reads_replicas(const mti_ruling *r, int g) {
    int i, any = 0;
    for (i = 0; i < r->count; i++) {
        const mti_ruled *o = &r->operands[i];
        if (!mti_reads(o) || (o->known.zero && !o->known.parameter)) continue;
        if (o->known.may[g] != 1 << MT_REPLICATED) return 0;
        any = 1;
    }
    return any;
}

/* Whether a rule says of a call that it computes the same on all ranks, from nothing. */
static int mti_is_constant(const mti_ruling *r) {
    return r->count == 1 && mti_writes(&r->operands[0]) && !mti_reads(&r->operands[0]) &&
           strcmp(r->rule->cases, "R") == 0;
}

/* Whether operand i, which all ranks have, does not fit a letter only because of its extent. */
static int mti_is_other_extent(const mti_ruling *r, int i, int g, char letter) {
    const mti_ruled *o = &r->operands[i];
    if (!mti_reads(o) || o->known.may[g] != 1 << MT_REPLICATED) return 0;
    if (letter == 'o') return mti_shares(r, i) > 1 && !mti_has_own_columns(r, i, g);
    return letter == 'k' && !mti_has_first_rows(r, i, g);
}

/* Returns the first operand that has other rows or columns than a case wants, which does not fit for this alone, or -1.
   *letter becomes its letter. */
static int mti_other_extent(const mti_ruling *r, int g, char *letter) {
    const char *more = NULL, *at = NULL;
    int i, misfits, first, others, found = -1;
    while ((at = mti_next_case(at, r->rule->cases, &more)) != NULL) {
        misfits = mti_case_misfits(r, at, g, &first);
        for (i = r->count - 1, others = 0; i >= 0; i--)
            if (mti_is_other_extent(r, i, g, at[i])) others++, found = i;
        if (!others || others != misfits) continue;
        *letter = at[found];
        return found;
    }
    return -1;
}

/* Refuses operand i of a call, see mti_other_extent. */
static mt_status mti_extent_refuse(mt_context *ctx, const mti_ruling *r, int g, int i, char letter) {
    const mti_ruled *o = &r->operands[i], *by = &r->operands[0];
    const mti_axis *axis = &ctx->checker->axes[g];
    uintptr_t size = (uintptr_t)mt_dtype_size(o->operand->t.dtype), pitch = o->known.in.pitch ? o->known.in.pitch : 1;
    long long from = (long long)((mti_extent_of(o->operand->t).begin - o->known.in.begin) % pitch / size);
    char at[192];
    mti_with_text(ctx->checker, r->with, at, sizeof at);
    if (letter == 'k')
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s%s: %s has %lld rows that all %d ranks of \"%s\" have, but %s has the rows of rank %d: the "
                       "last rows of both are at one position, so %s must have the first %lld rows",
                       r->where, at, o->operand->name, (long long)o->operand->t.rows, axis->size, axis->name,
                       by->operand->name, axis->rank, o->operand->name,
                       (long long)by->operand->t.rows * (axis->rank + 1));
    return mt_fail(
        ctx, MT_ERR_ARGUMENT,
        "%s%s: %s has columns %lld to %lld of the %lld that all %d ranks of \"%s\" have, which are not those "
        "of rank %d, as in %s: take the columns of this rank, or, if the ranks share them in another order, "
        "say with mt_check_view that they are MT_SPLIT_COLS",
        r->where, at, o->operand->name, from, from + (long long)o->operand->t.cols - 1,
        (long long)(o->known.in.width / size), axis->size, axis->name, axis->rank, by->operand->name);
}

/* Whether a case fits when views of exactly this rank's share of what all ranks have are this share, with the results
   of these cases. */
static int mti_fits_shares(const mti_ruling *r, int g, unsigned char *results) {
    const char *more = mti_is_data(&r->checker->axes[g]) ? r->rule->data_cases : NULL, *at = NULL;
    mti_ruling shares = *r;
    int i, first, any = 0, fits = 0;
    for (i = 0; i < r->count; i++) {
        int part, set = mti_own_share(r, i, g);
        if (!set) continue;
        any = 1;
        shares.operands[i].known.may[g] = (unsigned char)set;
        for (part = 0; part < r->operands[i].known.count; part++)
            shares.operands[i].known.parts[part][g] = (unsigned char)set;
    }
    while (any && (at = mti_next_case(at, r->rule->cases, &more)) != NULL) {
        if (mti_case_misfits(&shares, at, g, &first) > 0) continue;
        for (i = 0; i < r->count; i++) results[i] |= (unsigned char)mti_result_set(r, i, g, at[i]);
        fits = 1;
    }
    return fits;
}

/* Finds the sets that the cases allow in a group: results[i] for operand i. */
static mt_status mti_rule_axis(mt_context *ctx, const mti_ruling *r, int g, unsigned char *results) {
    const char *more = mti_is_data(&ctx->checker->axes[g]) ? r->rule->data_cases : NULL, *at = NULL;
    int i, first, misfits, fits = 0, best = MTI_RULE_OPERANDS + 1, culprit = -1, must = 0;
    char letter;
    memset(results, 0, MTI_RULE_OPERANDS);
    while ((at = mti_next_case(at, r->rule->cases, &more)) != NULL) {
        misfits = mti_case_misfits(r, at, g, &first);
        for (i = 0; misfits == 0 && i < r->count; i++) results[i] |= (unsigned char)mti_result_set(r, i, g, at[i]);
        if (misfits == 0) fits = 1;
        else if (misfits < best || (misfits == best && (first == culprit || mti_is_better(r, first, culprit)))) {
            if (misfits < best || first != culprit) must = 0;
            best = misfits;
            culprit = first;
            must |= at[first] == '-' ? MTI_LEFT_OUT : mti_letter_set(at[first]);
        }
    }
    if (ctx->checker->axes[g].only_group && !mti_reads_replicas(r, g) && !mti_is_constant(r))
        memset(results, MTI_ALL_PLACEMENTS, MTI_RULE_OPERANDS);
    if (!fits) fits = mti_fits_shares(r, g, results);
    if (!fits && (i = mti_other_extent(r, g, &letter)) >= 0) return mti_extent_refuse(ctx, r, g, i, letter);
    return fits ? MT_SUCCESS : mti_rule_refuse(ctx, r, g, culprit, must);
}

/* Sets *word to the next name in a rule's list of operands, and moves *next behind it, and behind "(x)". Returns its
   length; 0: the list ends. */
static size_t mti_rule_word(const char **next, const char **word) {
    *word = *next + strspn(*next, " ");
    *next = *word + strcspn(*word, " ");
    return strcspn(*word, " (");
}

/* Returns the number of a rule's operand of this name, or -1. */
static int mti_rule_number(const mt_rule *rule, const char *name, size_t length) {
    const char *next = rule->operands, *word;
    size_t n;
    int i;
    for (i = 0; (n = mti_rule_word(&next, &word)) > 0; i++)
        if (n == length && strncmp(word, name, n) == 0) return i;
    return -1;
}

/* Returns the number of the operand whose gradient a word is of: that of x for "dx(x)", or -1. */
static int mti_rule_gradient(const mt_rule *rule, const char *word, size_t length) {
    return word[length] == '(' ? mti_rule_number(rule, word + length + 1, strcspn(word + length + 1, ") ")) : -1;
}

/* Looks up the operands of a call, in the order of the rule. */
static void mti_ruling_fill(mti_checker *c, mti_ruling *r, const mt_operand *operands, int count) {
    const char *next = r->rule->operands, *word;
    size_t length;
    int i;
    for (r->count = 0; r->count < MTI_RULE_OPERANDS && (length = mti_rule_word(&next, &word)) > 0; r->count++) {
        r->operands[r->count].operand = NULL;
        r->operands[r->count].gradient_of = mti_rule_gradient(r->rule, word, length);
    }
    for (i = 0; i < count; i++) {
        int k = mti_rule_number(r->rule, operands[i].name, strlen(operands[i].name));
        if (k >= 0 && k < r->count && mti_has_elements(operands[i].t)) r->operands[k].operand = &operands[i];
    }
    for (i = 0; i < r->count; i++) {
        mti_ruled *o = &r->operands[i];
        if (o->operand) o->known = mti_known_of(c, o->operand->t);
        if (o->operand && o->known.parameter && !r->with) r->with = o->known.parameter->name;
    }
}

/* Decides what numbers that were not declared are, such as ids: others on data and context ranks, as in the models, and
   what the only case that fits wants. */
static void mti_numbers_assume(mti_ruling *r, int i, int g) {
    mti_ruled *o = &r->operands[i];
    const char *more = r->rule->data_cases, *at = NULL;
    int tokens = mti_has_tokens(&r->checker->axes[g]), set = 0, first, misfits;
    if (!mti_only_reads(o) || o->operand->t.dtype != MT_I32 || o->known.zero) return;
    if (o->known.may[g] != MTI_ALL_PLACEMENTS || o->known.count > 1) return;
    if (!mti_is_data(&r->checker->axes[g])) more = NULL;
    while ((at = mti_next_case(at, r->rule->cases, &more)) != NULL) {
        misfits = mti_case_misfits(r, at, g, &first);
        if (misfits == 0 && (!tokens || at[i] == 'r')) set |= mti_letter_set(at[i]);
    }
    if (!set || set & (set - 1)) return;
    o->known.may[g] = (unsigned char)set;
    if (o->known.count) o->known.parts[0][g] = (unsigned char)set;
}

/* Refuses arguments of mt_rule_check that are NULL, and operands that the rule does not have. */
static mt_status mti_rule_arguments(mt_context *ctx, const char *where, const mt_rule *rule, const mt_operand *operands,
                                    int count) {
    const char *missing = !where                                  ? "where is NULL"
                          : !rule                                 ? "rule is NULL"
                          : !rule->operands                       ? "rule.operands is NULL"
                          : !rule->cases                          ? "rule.cases is NULL"
                          : count < 0 || (count > 0 && !operands) ? "operands is NULL, or count is negative"
                                                                  : NULL;
    int i;
    if (missing)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_rule_check%s%.60s: %s", where ? " of " : "", where ? where : "",
                       missing);
    for (i = 0; i < count; i++) {
        if (!operands[i].name)
            return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_rule_check of %.60s: operands[%d].name is NULL", where, i);
        if (mti_rule_number(rule, operands[i].name, strlen(operands[i].name)) < 0)
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "mt_rule_check of %.60s: its rule has no operand '%.60s', only: %.200s", where,
                           operands[i].name, rule->operands);
    }
    return MT_SUCCESS;
}

/* Returns the region call that would make t of a piece over a group, or NULL. */
static const char *mti_region_call(const mti_placed *p, int g, int64_t ranks, mti_extent t, int64_t rows) {
    int64_t has = p->at.pitch ? (int64_t)((p->at.end - p->at.begin - p->at.width) / p->at.pitch) + 1 : 1;
    uintptr_t n = (uintptr_t)ranks;
    int is = p->may[g];
    if (p->at.width == t.width && has * ranks == rows && is == 1 << MT_SPLIT_ROWS)
        return "mt_gather_from_sequence_region";
    if (p->at.width == t.width && has == rows * ranks && is == 1 << MT_PARTIAL)
        return "mt_reduce_scatter_to_sequence_region";
    if (p->at.width == t.width && has == rows * ranks && is == 1 << MT_REPLICATED)
        return "mt_scatter_to_sequence_region";
    if (p->at.width * n == t.width && has == rows && is == 1 << MT_SPLIT_COLS) return "mt_gather_from_tensor_region";
    if (p->at.width == t.width * n && has == rows && is == 1 << MT_REPLICATED) return "mt_scatter_to_tensor_region";
    return NULL;
}

/* Writes which call would make t of the newest tensor that fits, and which calls may be missing otherwise. */
static void mti_missing_text(const mti_checker *c, mt_tensor t, char *text, size_t bytes) {
    const mti_placed *newest = NULL;
    const char *call = NULL;
    char since[208];
    size_t i;
    int g;
    for (i = 0; i < c->written.count; i++)
        for (g = 0; g < c->count; g++) {
            const mti_placed *p = &c->written.list[i];
            const char *may = mti_region_call(p, g, c->axes[g].size, mti_extent_of(t), t.rows);
            if (!may || c->axes[g].only_group || (newest && p->age < newest->age)) continue;
            newest = p;
            call = may;
        }
    if (newest) mti_since_text(newest->by, newest->with, since, sizeof since);
    if (newest) snprintf(text, bytes, "%s of what is in another tensor%.200s, or ", call, since);
    else text[0] = 0;
}

/* Writes what was in the memory of t before it was released and allocated again. */
static void mti_released_text(const mti_checker *c, mt_tensor t, char *text, size_t bytes) {
    const mti_released *r = mti_released_at(c, mti_extent_of(t));
    char since[208];
    text[0] = 0;
    if (!r) return;
    mti_since_text(r->by, r->with, since, sizeof since);
    snprintf(text, bytes, ", or mt_arena_release came too early: what was there%s was released and overwritten", since);
}

/* Whether something was declared over a group. mt_check_group alone declares nothing. */
static int mti_declares(const mti_checker *c) {
    int g;
    for (g = 0; g < c->count; g++)
        if (!c->axes[g].only_group) return 1;
    return 0;
}

/* Refuses a call that reads memory of the arena which nothing has written. Ids and lengths are the caller's. */
static mt_status mti_written_check(mt_context *ctx, const mti_ruling *r) {
    char at[192], missing[320], before[320];
    int i;
    if (!ctx->checker->strict || !mti_declares(ctx->checker)) return MT_SUCCESS;
    for (i = 0; i < r->count; i++) {
        const mti_ruled *o = &r->operands[i];
        if (!mti_reads(o) || !o->known.unwritten) continue;
        if (!mt_dtype_is_float(o->operand->t.dtype) || !mti_is_in_arena(ctx, mti_extent_of(o->operand->t))) continue;
        mti_with_text(ctx->checker, r->with, at, sizeof at);
        mti_missing_text(ctx->checker, o->operand->t, missing, sizeof missing);
        mti_released_text(ctx->checker, o->operand->t, before, sizeof before);
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s%s: nothing has written %s [%lld, %lld], or a part of it, since it was allocated: a call is "
                       "missing, such as %smt_gather_from_sequence_region, mt_reduce_scatter_to_sequence_region, "
                       "mt_all_gather or mt_recv, or, for what the program writes itself, mt_declare (MT_UNDECLARED "
                       "with comm NULL, if its placement does not matter)%s",
                       r->where, at, o->operand->name, (long long)o->operand->t.rows, (long long)o->operand->t.cols,
                       missing, before);
    }
    return MT_SUCCESS;
}

MT_API void mt_check_slots(mt_context *ctx, int area, const void *first, size_t bytes, int count, int own) {
    mti_slots *s;
    if (!ctx || !ctx->checker || area < 0 || area > 1) return;
    s = &ctx->checker->slots[area];
    s->first = (uintptr_t)first;
    s->bytes = bytes;
    s->count = bytes ? count : 0;
    s->own = own;
}

/* Returns the first slot of an area that a view meets and that is not the own one, or -1. */
static int mti_slot_of_another(const mti_slots *s, mti_extent e) {
    int i;
    for (i = 0; i < s->count; i++) {
        uintptr_t begin = s->first + (uintptr_t)i * s->bytes;
        if (i != s->own && e.begin < begin + s->bytes && begin < e.end) return i;
    }
    return -1;
}

/* Refuses a call on memory of a slot that is not that of the action. */
static mt_status mti_slot_check(mt_context *ctx, const char *where, const char *with, const char *name, mt_tensor t) {
    char at[192];
    int area, slot;
    for (area = 0; area < 2 && mti_has_elements(t); area++) {
        const mti_slots *s = &ctx->checker->slots[area];
        slot = mti_slot_of_another(s, mti_extent_of(t));
        if (slot < 0) continue;
        mti_with_text(ctx->checker, with, at, sizeof at);
        return mt_fail(
            ctx, MT_ERR_ARGUMENT,
            "%s%s: %s is in slot %d, but the slot of this action is %d (mt_action.slot): it has what another "
            "micro-batch keeps",
            where, at, name, slot, s->own);
    }
    return MT_SUCCESS;
}

/* The same for the operands of a call. */
static mt_status mti_slots_check(mt_context *ctx, const mti_ruling *r) {
    int i;
    for (i = 0; i < r->count; i++)
        if (r->operands[i].operand)
            MT_TRY(mti_slot_check(ctx, r->where, r->with, r->operands[i].operand->name, r->operands[i].operand->t));
    return MT_SUCCESS;
}

/* Counts the operands that a call reads and that may have several placements in a group. */
static void mti_unknown_count(mti_checker *c, const mti_ruling *r) {
    char at[192];
    int i, g;
    for (i = 0; i < r->count; i++)
        for (g = 0; mti_reads(&r->operands[i]) && g < c->count; g++) {
            const mti_known *k = &r->operands[i].known;
            if (k->zero || c->axes[g].only_group || !(k->may[g] & (k->may[g] - 1))) continue;
            if (c->unknown++ > 0) continue;
            mti_with_text(c, r->with, at, sizeof at);
            snprintf(c->unknown_text, sizeof c->unknown_text, "%.40s%.140s: %.20s over \"%.16s\"", r->where, at,
                     r->operands[i].operand->name, c->axes[g].name);
        }
}

/* Whether a call reads some columns of a tensor, as many as t has. */
static int mti_reads_some_columns(const mti_ruling *r, mt_tensor t) {
    int i;
    for (i = 0; i < r->count; i++) {
        const mti_ruled *o = &r->operands[i];
        if (mti_reads(o) && o->known.some_columns && o->operand->t.cols == t.cols) return 1;
    }
    return 0;
}

/* Whether a parameter is split by a group along a dimension of this size of an operand. */
static int mti_is_split_along(const mti_ruling *r, const mti_ruled *o, int64_t size) {
    int g, rows = 0, cols = 0;
    for (g = 0; g < r->checker->count; g++) {
        rows |= o->known.parameter->allowed[g] == 1 << MT_SPLIT_ROWS;
        cols |= o->known.parameter->allowed[g] == 1 << MT_SPLIT_COLS;
    }
    return (rows && o->operand->t.rows == size) || (cols && o->operand->t.cols == size);
}

/* Returns the parameter whose features are the columns of t, which a call writes: one that the call has, or that of an
   operand with as many columns. */
static const char *mti_features_of(const mti_ruling *r, mt_tensor t) {
    const char *features = NULL;
    int i;
    for (i = 0; i < r->count; i++) {
        const mti_ruled *o = &r->operands[i];
        const mti_placed *p;
        mti_extent e;
        if (!mti_reads(o)) continue;
        if (o->known.parameter && mti_is_split_along(r, o, t.cols)) return o->known.parameter->name;
        if (o->known.parameter || o->operand->t.cols != t.cols) continue;
        e = mti_extent_of(o->operand->t);
        p = mti_placed_older(&r->checker->written, e, UINT64_MAX);
        if (p && p->features && mti_extent_covers(p->at, e) && p->at.width == e.width) features = p->features;
    }
    return features;
}

static void mti_features_note(mti_checker *c, mt_tensor t, const char *features) {
    mti_placed *p = mti_written_as(c, t);
    if (p) p->features = features;
}

/* Whether what a call writes to operand i is a term of a product with a weight whose rows a group splits: the gradient
   of what the weight was multiplied with. (A weight that is split by columns makes a term of an output.) */
static int mti_is_input_gradient(const mti_ruling *r, int i, unsigned char (*results)[MTI_RULE_OPERANDS]) {
    int g, k;
    for (g = 0; (r->operands[i].operand->use & MT_ARG_PRODUCT) && g < r->checker->count; g++)
        for (k = 0; results[g][i] == 1 << MT_PARTIAL && k < r->count; k++) {
            const mti_placed *p = mti_reads(&r->operands[k]) ? r->operands[k].known.parameter : NULL;
            if (p && !p->is_gradient && p->may[g] == 1 << MT_SPLIT_ROWS) return 1;
        }
    return 0;
}

/* Whether a call writes a gradient to operand i: by its use and the rule, or because it computes a product, sums or
   multiples of a gradient. */
static int mti_writes_gradient(const mti_ruling *r, int i, unsigned char (*results)[MTI_RULE_OPERANDS]) {
    int use = r->operands[i].operand->use, k;
    if ((use & MT_ARG_GRADIENT) || r->operands[i].gradient_of >= 0) return 1;
    for (k = 0; k < r->count; k++)
        if (mti_reads(&r->operands[k]) && ((use & MT_ARG_PRODUCT) || (r->operands[k].operand->use & MT_ARG_MOVED)) &&
            mti_is_gradient(&r->operands[k]))
            return 1;
    return mti_is_input_gradient(r, i, results);
}

/* Notes what a call writes to operand i. results: the sets that the cases allow, for each group and operand. A constant
   is replicated over the groups that become known later, too. */
static mt_status mti_result_note(mt_context *ctx, const mti_ruling *r, int i,
                                 unsigned char (*results)[MTI_RULE_OPERANDS]) {
    const mti_ruled *o = &r->operands[i];
    unsigned char may[MTI_AXES];
    const char *features;
    int g;
    if (!mti_writes(o)) return MT_SUCCESS;
    memset(may, mti_is_constant(r) ? 1 << MT_REPLICATED : MTI_ALL_PLACEMENTS, sizeof may);
    for (g = 0; g < ctx->checker->count; g++) may[g] = (unsigned char)(results[g][i] & mti_ruled_set(o, g));
    features = mti_features_of(r, o->operand->t);
    MT_TRY(mti_placement_note(ctx, o->operand->t, may, 0, r->where, r->with));
    mti_features_note(ctx->checker, o->operand->t, features);
    if (mti_writes_gradient(r, i, results)) mti_gradient_note(ctx->checker, o->operand->t);
    if (mti_reads_some_columns(r, o->operand->t)) mti_columns_note(ctx->checker, o->operand->t);
    return MT_SUCCESS;
}

static uint64_t mti_hash_number(uint64_t hash, uint64_t number) {
    return mt_hash_word(mt_hash_word(hash, (uint32_t)number), (uint32_t)(number >> 32));
}

/* Returns the piece of an operand that a call reads and an operator has written, or NULL. */
static mti_placed *mti_computed_at(const mti_checker *c, const mti_ruled *o) {
    mti_placed *p;
    if (!mti_reads(o) || o->known.parameter) return NULL;
    p = mti_placed_older(&c->written, mti_extent_of(o->operand->t), UINT64_MAX);
    if (!p || !p->by || p->is_declared) return NULL;
    return mti_extent_covers(p->at, mti_extent_of(o->operand->t)) ? p : NULL;
}

/* The activations that a backward reads: the first operand that is neither a parameter nor a gradient. */
typedef struct mti_reading {
    mti_placed *piece; /* NULL: none that is known */
    uint64_t which,
        which_all; /* hashes of what is read of it, and of all that the call reads; which_all 0: not known */
} mti_reading;

static mti_reading mti_activations_of(const mti_checker *c, const mti_ruling *r) {
    mti_reading a = {NULL, 0, 1};
    int i, known = 1;
    for (i = 0; i < r->count; i++) {
        const mti_ruled *o = &r->operands[i];
        mti_placed *p = mti_computed_at(c, o);
        mti_extent e;
        uint64_t which;
        if (!mti_reads(o) || o->known.parameter) continue;
        e = mti_extent_of(o->operand->t);
        which = mti_hash_number(mti_hash_number(p ? p->age : 0, (uint64_t)e.begin), (uint64_t)e.end);
        if (!a.piece && p && !mti_is_gradient(o)) a.piece = p, a.which = which;
        a.which_all = mti_hash_number(a.which_all, which);
        known &= p != NULL;
    }
    if (!known) a.which_all = 0;
    return a;
}

/* Whether a gradient gets twice what a call reads: the very same, or activations that a second forward has written over
   those of a first one since the gradient was zero. */
static int mti_is_used_twice(const mti_placed *gradient, const mti_reading *a, const char *where) {
    if (gradient->zero || gradient->used != a->which || gradient->used_by != where) return 0;
    return (a->which_all && a->which_all == gradient->used_all) || a->piece->lost > gradient->zeroed;
}

/* Refuses a backward that adds to the gradient of a parameter what it has added already. */
static mt_status mti_used_check(mt_context *ctx, const mti_ruling *r) {
    mti_reading a = mti_activations_of(ctx->checker, r);
    char at[192];
    int i;
    for (i = 0; a.piece && i < r->count; i++) {
        const mti_ruled *o = &r->operands[i];
        mti_placed *p =
            mti_writes(o) && o->known.parameter ? mti_parameter_at(ctx->checker, mti_extent_of(o->operand->t)) : NULL;
        if (!p || !p->is_gradient || !mti_extent_covers(mti_extent_of(o->operand->t), p->at)) continue;
        if (mti_is_used_twice(p, &a, r->where)) {
            mti_with_text(ctx->checker, r->with, at, sizeof at);
            return mt_fail(ctx, MT_ERR_ARGUMENT,
                           "%s%s: the gradient of '%.100s' would get the same activations twice: a backward has read "
                           "them already, but each forward needs its own saved, and one backward; if both are "
                           "meant, mt_declare the activations before",
                           r->where, at, p->name);
        }
        p->used = a.which;
        p->used_all = a.which_all;
        p->used_by = r->where;
        a.piece->is_used = 1;
    }
    return MT_SUCCESS;
}

/* Returns what a call writes the gradient of operand i to, which it reads, or NULL. */
static const mt_operand *mti_gradient_of(const mti_ruling *r, int i) {
    int k;
    if (!mti_reads(&r->operands[i]) || r->operands[i].known.parameter) return NULL;
    for (k = 0; k < r->count; k++)
        if (mti_writes(&r->operands[k]) && r->operands[k].gradient_of == i) return r->operands[k].operand;
    return NULL;
}

/* Refuses to compute gradients of activations that are no longer there: a backward has written their gradient over
   them. */
static mt_status mti_replaced_check(mt_context *ctx, const mti_ruling *r) {
    char at[192], since[208];
    int i;
    for (i = 0; i < r->count; i++) {
        const mti_placed *p = NULL;
        if (mti_gradient_of(r, i))
            p = mti_placed_older(&ctx->checker->written, mti_extent_of(r->operands[i].operand->t), UINT64_MAX);
        if (!p || !p->is_replaced) continue;
        mti_with_text(ctx->checker, r->with, at, sizeof at);
        mti_since_text(p->by, p->with, since, sizeof since);
        return mt_fail(
            ctx, MT_ERR_ARGUMENT,
            "%s%s: %s is its own gradient%s, which has replaced it: each forward needs its own saved, and one "
            "backward; if your code has written it again, mt_declare it",
            r->where, at, r->operands[i].operand->name, since);
    }
    return MT_SUCCESS;
}

/* Notes where a call has written the gradient of an operand over the operand. */
static void mti_replaced_note(mti_checker *c, const mti_ruling *r) {
    int i;
    for (i = 0; i < r->count; i++) {
        const mt_operand *d = mti_gradient_of(r, i);
        mti_extent e, of;
        mti_placed *p;
        if (!d) continue;
        e = mti_extent_of(d->t);
        of = mti_extent_of(r->operands[i].operand->t);
        p = mti_written_as(c, d->t);
        if (p && mti_extent_covers(e, of) && mti_extent_covers(of, e)) p->is_replaced = 1;
    }
}

/* Whether ranks may read other rows or columns of operand i: of a case with a letter for that, or, in a call of tensors
   that the group splits, this rank's share. */
static int mti_reads_apart(const mti_ruling *r, int i, int g) {
    const char *more = NULL, *at = NULL;
    int k, first, own;
    if (r->operands[i].known.may[g] != 1 << MT_REPLICATED) return 0;
    own = mti_own_share(r, i, g) || (mti_only_reads(&r->operands[i]) && mti_has_own_columns(r, i, g));
    for (k = 0; own && k < r->count; k++)
        if (r->operands[k].operand && !(r->operands[k].known.may[g] & ~MTI_SPLIT_PLACEMENTS)) return 1;
    while ((at = mti_next_case(at, r->rule->cases, &more)) != NULL)
        if ((at[i] == 'o' || at[i] == 'k') && mti_case_misfits(r, at, g, &first) == 0) return 1;
    return 0;
}

/* Whether operand k of a call, other than i, is read and split by columns over group g. */
static int mti_meets_columns(const mti_ruling *r, int i, int g) {
    int k;
    for (k = 0; k < r->count; k++)
        if (k != i && mti_reads(&r->operands[k]) && r->operands[k].known.may[g] == 1 << MT_SPLIT_COLS) return 1;
    return 0;
}

/* Notes operand i, which a call reads, to be compared: not over a group whose ranks may read other rows or columns of
   it. Of integers the rule says what they must be. */
static mt_status mti_operand_note(mt_context *ctx, const mti_ruling *r, int i,
                                  unsigned char (*results)[MTI_RULE_OPERANDS]) {
    const mt_operand *o = r->operands[i].operand;
    mti_known known;
    int g;
    if (!mti_reads(&r->operands[i])) return MT_SUCCESS;
    known = r->operands[i].known;
    for (g = 0; g < ctx->checker->count; g++) {
        if (o->t.dtype == MT_I32) known.may[g] &= results[g][i];
        if (mti_reads_apart(r, i, g)) known.apart |= 1u << g;
        else if (mti_share_of(r, i, g)) known.terms &= ~(1u << g); /* ranks add other rows or columns */
        if (mti_meets_columns(r, i, g)) MT_TRY(mti_range_note(ctx, g, r, o, &known));
    }
    return mti_replica_read(ctx, r->where, r->with, o, &known);
}

MT_API int64_t mt_check_unknown(mt_context *ctx, char *text, size_t bytes) {
    int64_t count = ctx && ctx->checker ? ctx->checker->unknown : 0;
    if (text && bytes) snprintf(text, bytes, "%s", count ? ctx->checker->unknown_text : "");
    if (count) ctx->checker->unknown = 0;
    return count;
}

MT_API mt_status mt_rule_check(mt_context *ctx, const char *where, const mt_rule *rule, const mt_operand *operands,
                               int count) {
    unsigned char results[MTI_AXES][MTI_RULE_OPERANDS];
    mti_checker *c;
    mti_ruling r;
    int g, i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!mt_check_mode(ctx)) return MT_SUCCESS;
    MT_TRY(mti_rule_arguments(ctx, where, rule, operands, count));
    c = ctx->checker;
    r.checker = c;
    r.where = where;
    r.rule = rule;
    r.over_all = 0;
    r.with = NULL;
    mti_ruling_fill(c, &r, operands, count);
    MT_TRY(mti_rule_valid(ctx, &r));
    MT_TRY(mti_slots_check(ctx, &r));
    MT_TRY(mti_written_check(ctx, &r));
    for (g = 0; g < c->count; g++) {
        for (i = 0; i < r.count; i++) mti_numbers_assume(&r, i, g);
        MT_TRY(mti_rule_axis(ctx, &r, g, results[g]));
    }
    mti_unknown_count(c, &r);
    if (r.with) c->latest = r.with;
    if (mt_check_mode(ctx) == 2) MT_TRY(mti_replaced_check(ctx, &r));
    if (mt_check_mode(ctx) == 2) MT_TRY(mti_used_check(ctx, &r));
    for (i = 0; mt_check_mode(ctx) == 2 && i < r.count; i++) MT_TRY(mti_operand_note(ctx, &r, i, results));
    for (i = 0; i < r.count; i++) MT_TRY(mti_result_note(ctx, &r, i, results));
    if (mt_check_mode(ctx) == 2) mti_replaced_note(c, &r);
    mti_notify(ctx, where, r.with, operands, count);
    return MT_SUCCESS;
}
