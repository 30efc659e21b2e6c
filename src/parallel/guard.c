/* ---- invariant mode refuses sums in an order that depends on the split ------------------------------------------- */

#pragma once
#include "params.c"

/* Returns 1 when t, which is not empty, has bytes of `grad`, a gradient of a parameter. */
static int mti_is_in_gradient(const mt_context *ctx, mt_tensor t, mt_tensor grad) {
    uintptr_t from = (uintptr_t)t.data, of = (uintptr_t)grad.data;
    int64_t elements = (t.rows - 1) * mt_tensor_ld(t) + t.cols;
    if (grad.rows * grad.cols == 0 || !mt_context_has_address(ctx, t.data) || !mt_context_has_address(ctx, grad.data))
        return 0;
    return from < of + (size_t)(grad.rows * grad.cols) * sizeof(float) &&
           of < from + (size_t)elements * mt_dtype_size(t.dtype);
}

/* Returns 1 when t is in one virtual shard of a parameter's gradient `grad`, and a GEMM may use it as it is. */
static int mti_is_in_shard(const mt_context *ctx, const mt_param *p, mt_tensor grad, mt_tensor t) {
    size_t bytes = (size_t)(grad.rows * grad.cols) * sizeof(float) / (size_t)p->shards;
    size_t at = (size_t)((uintptr_t)t.data - (uintptr_t)grad.data);
    return mti_is_canonical(ctx, t) && at / bytes == (at + (size_t)(t.rows * t.cols) * sizeof(float) - 1) / bytes;
}

/* A gradient that the check knows, of a parameter or of the program. */
typedef struct mti_guarded {
    const char *name;
    const mt_param *param; /* NULL: every sum over tokens depends on the split */
    const char *why;       /* then: "every tensor rank has whole", for instance */
    mt_tensor grad;
} mti_guarded;

static mti_guarded mti_guarded_make(const mt_context *ctx, const char *name, const mt_param *p, mt_tensor grad) {
    const int parts = mti_has_context_ranks(ctx);
    mti_guarded g;
    g.name = name;
    g.param = p && p->desc.placement != MT_REPLICATED && !parts ? p : NULL;
    g.why = !parts ? "every tensor rank has whole" : "context ranks have parts of";
    g.grad = grad;
    return g;
}

/* Returns 1 when t has bytes of a gradient that the check knows. */
static int mti_guarded_find(const mt_context *ctx, mt_tensor t, mti_guarded *out) {
    const mti_guard *guard = &mti_parallel_of(ctx)->guard;
    const mti_own_gradient *own;
    const mt_params *params;
    int i;
    if (!t.data || t.rows * t.cols == 0) return 0;
    for (params = mti_parallel_of(ctx)->registries; params; params = params->next_registry)
        for (i = 0; i < params->count; i++) {
            const mt_param *p = params->list[i];
            const int is_grad = mti_is_in_gradient(ctx, t, p->grad);
            if (!is_grad && !mti_is_in_gradient(ctx, t, p->lookup_grad)) continue;
            *out = mti_guarded_make(ctx, p->name, p, is_grad ? p->grad : p->lookup_grad);
            return 1;
        }
    for (own = guard->own; own && !mti_is_in_gradient(ctx, t, own->grad); own = own->next) continue;
    if (own) *out = mti_guarded_make(ctx, own->name, NULL, own->grad);
    return own != NULL;
}

/* Returns 0 when an operator adds up nothing in `sum`: its inputs have one row, and no more elements than the sum.
   mt_sum, for instance, adds up the elements of a row. */
static int mti_adds_up(const mt_arg *args, int count, mt_tensor sum) {
    int i;
    for (i = 0; i < count; i++) {
        const mt_tensor *t = args[i].view;
        if ((args[i].use & MT_ARG_IN_OUT) != MT_ARG_IN || !t->data) continue;
        if (t->rows > 1 || t->rows * t->cols > sum.rows * sum.cols) return 1;
    }
    return 0;
}

/* Refuses a sum that an operator adds to a gradient, when its order depends on the split. */
static mt_status mti_gradient_sum_check(mt_context *ctx, const char *where, const mt_arg *arg, const mti_guarded *g) {
    const mt_param *p = g->param;
    if (!p)
        return mt_fail(
            ctx, MT_ERR_ARGUMENT,
            "%s: %s is in the gradient of '%s', which %s; in invariant mode call %s in the function of "
            "mt_sum_over_tokens, with the memory that it gets, because otherwise the bits depend on the split",
            where, arg->name, g->name, g->why, where);
    /* the columns of a matrix are stored shard by shard, so only a shard is a matrix */
    if (!(arg->use & MT_ARG_PRODUCT) && (p->desc.placement != MT_SPLIT_COLS || p->desc.rows == 1)) return MT_SUCCESS;
    if (mti_is_in_shard(ctx, p, g->grad, *arg->view)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "%s: %s is in the gradient of '%s', but is not a contiguous, aligned part of one of its %d virtual "
                   "shards on this rank; in invariant mode call %s once for each shard, with the tensors of "
                   "mt_invariant_input and mt_invariant_output, because otherwise the bits depend on the split",
                   where, arg->name, g->name, p->shards, where);
}

static void mti_noted_sum_forget(mti_guard *guard, uintptr_t from, uintptr_t to) {
    int i = 0;
    while (i < guard->count) {
        if (guard->sums[i].from < to && from < guard->sums[i].to) guard->sums[i] = guard->sums[--guard->count];
        else i++;
    }
}

/* Returns 1 when the sum has elements of t. The gaps between the rows of t are not elements. */
static int mti_noted_sum_meets(const mti_noted_sum *s, mt_tensor t) {
    const size_t size = mt_dtype_size(t.dtype), row = (size_t)t.cols * size, step = (size_t)mt_tensor_ld(t) * size;
    const uintptr_t from = (uintptr_t)t.data;
    size_t at;
    if (s->to <= from || s->from >= from + (size_t)(t.rows - 1) * step + row) return 0;
    if (s->from <= from) return 1;
    at = (s->from - from) % step;
    return at < row || s->to - s->from > step - at;
}

/* Returns a sum that has elements of t, or NULL. */
static const mti_noted_sum *mti_noted_sum_find(const mti_guard *guard, mt_tensor t) {
    int i;
    for (i = 0; i < guard->count && t.data && t.rows * t.cols > 0; i++)
        if (mti_noted_sum_meets(&guard->sums[i], t)) return &guard->sums[i];
    return NULL;
}

/* Notes that t is a sum. t with gaps between its rows is left out, because what is in the gaps is another tensor. */
static void mti_noted_sum_add(mti_guard *guard, mt_tensor t, size_t product, const char *where) {
    mti_noted_sum s;
    memset(&s, 0, sizeof s);
    s.from = (uintptr_t)t.data;
    s.to = s.from + (size_t)(t.rows * t.cols) * mt_dtype_size(t.dtype);
    s.product = product;
    snprintf(s.where, sizeof s.where, "%s", where);
    mti_noted_sum_forget(guard, s.from, s.to);
    if ((t.rows > 1 && mt_tensor_ld(t) != t.cols) || t.rows * t.cols == 0) return;
    if (guard->count < MTI_NOTED_SUMS) guard->sums[guard->count++] = s;
    else {
        guard->sums[guard->oldest] = s;
        guard->oldest = (guard->oldest + 1) % MTI_NOTED_SUMS;
    }
}

/* The mt_forget_function of invariant mode. */
static void mti_guard_forget(mt_context *ctx, const void *data, size_t bytes, int gone) {
    mti_parallel *p = mti_parallel_of(ctx);
    uintptr_t from = (uintptr_t)data;
    mti_own_gradient **link = p ? &p->guard.own : NULL;
    if (!p) return;
    mti_noted_sum_forget(&p->guard, from, from + bytes);
    while (gone && *link) {
        mti_own_gradient *own = *link;
        uintptr_t at = (uintptr_t)own->grad.data;
        if (at < from || at >= from + bytes) {
            link = &own->next;
            continue;
        }
        *link = own->next;
        mt_host_free(own);
    }
}

/* Refuses to move a sum over rows into a gradient whose bits then depend on the split. `moved` has elements of s. */
static mt_status mti_gradient_move_check(mt_context *ctx, const char *where, const mt_arg *out, const mt_arg *moved,
                                         const mti_noted_sum *s, const mti_guarded *g) {
    const mt_param *p = g->param;
    if (!p)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: %s is in the gradient of '%s', which %s, and %s has a sum of %s over rows; in invariant "
                       "mode call %s in the function of mt_sum_over_tokens, because otherwise the bits depend on the "
                       "split",
                       where, out->name, g->name, g->why, moved->name, s->where, s->where);
    if (s->product * (size_t)p->shards <= (size_t)(g->grad.rows * g->grad.cols) * sizeof(float)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "%s: %s is in the gradient of '%s', and %s has a product of %s that is larger than one of its %d "
                   "virtual shards on this rank; in invariant mode call %s once for each shard, with the tensors of "
                   "mt_invariant_input and mt_invariant_output, because otherwise the bits depend on the split",
                   where, out->name, g->name, moved->name, s->where, p->shards, s->where);
}

/* Follows the sum s of the operand `moved` to what an operator writes. */
static mt_status mti_noted_sum_moves(mt_context *ctx, const char *where, const mt_arg *args, int count,
                                     const mt_arg *moved, const mti_noted_sum *s) {
    const mti_noted_sum sum = *s;
    mti_guarded g;
    int i;
    for (i = 0; i < count; i++) {
        if (!(args[i].use & MT_ARG_OUT)) continue;
        if (mti_guarded_find(ctx, *args[i].view, &g))
            MT_TRY(mti_gradient_move_check(ctx, where, &args[i], moved, &sum, &g));
        else if (mt_arena_has(ctx, args[i].view->data))
            mti_noted_sum_add(&mti_parallel_of(ctx)->guard, *args[i].view, sum.product, sum.where);
    }
    return MT_SUCCESS;
}

/* Looks at a view that an operator sums into: refuses a sum into a gradient, or notes it. */
static mt_status mti_sum_begins(mt_context *ctx, const char *where, const mt_arg *arg, int adds_up) {
    mti_guard *guard = &mti_parallel_of(ctx)->guard;
    mt_tensor t = *arg->view;
    const mti_noted_sum *noted;
    mti_guarded g;
    if (mti_guarded_find(ctx, t, &g)) {
        if (!adds_up && !g.param && (arg->use & MT_ARG_SUM)) return MT_SUCCESS;
        return mti_gradient_sum_check(ctx, where, arg, &g);
    }
    if (guard->over_tokens || !adds_up || !(arg->use & MT_ARG_SUM) || !mt_arena_has(ctx, t.data)) return MT_SUCCESS;
    /* an operator that another one calls, or one that adds to a part */
    noted = (arg->use & MT_ARG_IN) ? mti_noted_sum_find(guard, t) : NULL;
    if (noted && noted->from <= (uintptr_t)t.data &&
        noted->to >= (uintptr_t)t.data + (size_t)(t.rows * t.cols) * mt_dtype_size(t.dtype))
        return MT_SUCCESS;
    mti_noted_sum_add(guard, t, arg->use & MT_ARG_PRODUCT ? (size_t)(t.rows * t.cols) * sizeof(float) : 0, where);
    return MT_SUCCESS;
}

/* The mt_sum_check of invariant mode. mt_sum_over_tokens and the layers sum into scratch memory or, for parameters that
   are split, into one virtual shard. */
static mt_status mti_guarded_sum_check(mt_context *ctx, const char *where, const mt_arg *args, int count) {
    mti_guard *guard = &mti_parallel_of(ctx)->guard;
    const mt_arg *moved = NULL;
    const mti_noted_sum *sum = NULL;
    int i;
    for (i = 0; i < count && !sum && !guard->over_tokens; i++)
        if ((args[i].use & MT_ARG_MOVED) && (sum = mti_noted_sum_find(guard, *args[i].view)) != NULL) moved = &args[i];
    if (sum) return mti_noted_sum_moves(ctx, where, args, count, moved, sum);
    for (i = 0; i < count; i++) {
        mt_tensor t = *args[i].view;
        if (!t.data || t.rows * t.cols == 0 || !(args[i].use & MT_ARG_OUT)) continue;
        if (!(args[i].use & MT_ARG_IN))
            mti_noted_sum_forget(guard, (uintptr_t)t.data,
                                 (uintptr_t)t.data +
                                     (size_t)((t.rows - 1) * mt_tensor_ld(t) + t.cols) * mt_dtype_size(t.dtype));
        if (args[i].use & (MT_ARG_SUM | MT_ARG_PRODUCT))
            MT_TRY(mti_sum_begins(ctx, where, &args[i], mti_adds_up(args, count, t)));
    }
    return MT_SUCCESS;
}

/* Sets the checks of invariant mode. With one virtual shard, no bits depend on the split, and *out is NULL. */
static mt_status mti_guard_open(mt_context *ctx, mti_guard **out) {
    mti_parallel *p;
    *out = NULL;
    MT_TRY(mti_parallel_open(ctx, &p));
    if (mt_context_invariant(ctx) < 2 && p->context_ranks < 2) return MT_SUCCESS;
    MT_TRY(mt_set_sum_check(ctx, mti_guarded_sum_check));
    mt_context_set_forget(ctx, mti_guard_forget);
    *out = &p->guard;
    return MT_SUCCESS;
}

/* Adds a registry, whose parameters have memory now, to those of its context. From now on invariant mode refuses sums
   into its gradients whose bits would depend on the split. */
static mt_status mti_params_list(mt_context *ctx, mt_params *params) {
    mti_guard *guard;
    mti_parallel *p;
    MT_TRY(mti_guard_open(ctx, &guard));
    MT_TRY(mti_parallel_open(ctx, &p));
    params->next_registry = p->registries;
    p->registries = params;
    return MT_SUCCESS;
}

static void mti_params_unlist(mt_context *ctx, const mt_params *params) {
    mti_parallel *p = mti_parallel_of(ctx);
    mt_params **link = p ? &p->registries : NULL;
    while (link && *link && *link != params) link = &(*link)->next_registry;
    if (link && *link) *link = params->next_registry;
}

/* The same for a gradient of the program. It replaces what was in the memory before. is_whole 1: every tensor rank has
   it whole; 0: sums into it are allowed. */
static mt_status mti_own_guard(mt_context *ctx, const char *name, mt_tensor grad, int is_whole) {
    mti_guard *guard;
    mti_own_gradient *own;
    MT_TRY(mti_guard_open(ctx, &guard));
    if (!guard || !grad.data) return MT_SUCCESS;
    mti_guard_forget(ctx, grad.data, (size_t)(grad.rows * grad.cols) * sizeof(float), 1);
    if (!is_whole) return MT_SUCCESS;
    own = (mti_own_gradient *)mt_host_alloc(sizeof *own);
    if (!own) return mt_fail(ctx, MT_ERR_MEMORY, "mt_declare_shards: no memory for the gradient of '%.100s'", name);
    own->grad = grad;
    snprintf(own->name, sizeof own->name, "%s", name);
    own->next = guard->own;
    guard->own = own;
    return MT_SUCCESS;
}

/* Drops what check mode knows about memory of the caller; mt_context_free does so for the registry's. */
static void mti_params_forget(mt_context *ctx, const mt_params *params) {
    int i;
    for (i = 0; i < params->count; i++) {
        const mt_param *p = params->list[i];
        size_t n = (size_t)(p->value.rows * p->value.cols);
        mt_declare_forget(ctx, p->value.data, n * mt_dtype_size(p->value.dtype));
        mt_declare_forget(ctx, p->grad.data, n * sizeof(float));
    }
}
