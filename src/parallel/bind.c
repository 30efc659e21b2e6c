/* ---- parameters in memory of the caller -------------------------------------------------------------------------- */

#pragma once
#include "state.h"
#include "settings.c"

static char *mti_memory_of(const mt_params_memory *memory, int kind) {
    switch (kind) {
    case MTI_IN_VALUES: return (char *)memory->values;
    case MTI_IN_GRADS: return (char *)memory->grads;
    case MTI_IN_STATES + (int)MT_EXP_AVG: return (char *)memory->exp_avg;
    case MTI_IN_STATES + (int)MT_EXP_AVG_SQ: return (char *)memory->exp_avg_sq;
    default: return (char *)memory->master;
    }
}

/* Checks whether parameter p may be given memory of a kind now. */
static mt_status mti_bind_kind_check(mt_context *ctx, const char *function, const mt_param *p, int kind) {
    const mt_params *params = p->registry;
    const char *name = mti_kind_names[kind], *late = NULL;
    if (kind < MTI_IN_STATES && params->placed)
        late = "mt_params_init, or after the values of all parameters were bound";
    if (kind >= MTI_IN_STATES && params->has_optimizer) late = "mt_optimizer_create";
    if (mti_home_of(p)->bound[kind])
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the %s of '%s' are already bound", function, name, p->name);
    if (late) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s of '%s' comes after %s", function, name, p->name, late);
    if (kind >= MTI_IN_STATES && params->buckets.desc.sharded_optimizer && mt_comm_size(params->grid->dp_cp) > 1)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "%s: %s cannot be bound, because the %d data ranks share the optimizer's state "
                       "(sharded_optimizer)",
                       function, name, mt_comm_size(params->grid->dp_cp));
    if (kind == MTI_IN_STATES + (int)MT_MASTER && params->dtype == MT_F32)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: master is bound, but parameters are f32 and have no master",
                       function);
    return MT_SUCCESS;
}

/* Checks that `count` parameters from `first` on fit into buffers of memory->elements. */
static mt_status mti_bind_size_check(mt_context *ctx, const char *function, const mt_params *params, int first,
                                     int count, const mt_params_memory *memory) {
    int64_t at = 0, end = 0, n;
    int i, outside = -1;
    for (i = 0; i < count; i++) {
        const mt_param *p = params->list[first + i];
        n = p->value.rows * p->value.cols;
        if (memory->offsets) at = memory->offsets[i];
        if (at < 0 || at > INT64_MAX / 8 - n)
            return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the offset of '%s' is %lld", function, p->name, (long long)at);
        if (outside < 0 && at + n > memory->elements) outside = first + i;
        at += n;
        end = mt_max(end, at);
    }
    if (outside < 0) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "%s: the parameters need %lld elements, but mt_params_memory.elements is %lld; the first that does "
                   "not fit is '%s'",
                   function, (long long)end, (long long)memory->elements, params->list[outside]->name);
}

/* Bytes [begin, end) that are bound. */
typedef struct mti_bound_range {
    uintptr_t begin, end;
    const mt_param *param;
    int kind;
} mti_bound_range;

static int mti_bound_by_begin(const void *a, const void *b) {
    const mti_bound_range *x = (const mti_bound_range *)a, *y = (const mti_bound_range *)b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* Checks that all memory that is bound in a registry is apart. */
static mt_status mti_bind_apart_check(mt_context *ctx, const char *function, const mt_params *params) {
    mti_bound_range *all;
    mt_status status = MT_SUCCESS;
    void *memory;
    uintptr_t at;
    int i, kind, n = 0;
    MT_TRY(mti_host_new(ctx, (size_t)params->count * MTI_KINDS * sizeof *all, &memory));
    all = (mti_bound_range *)memory;
    for (i = 0; i < params->count * MTI_KINDS; i++) {
        const mt_param *p = params->list[i / MTI_KINDS];
        kind = i % MTI_KINDS;
        at = (uintptr_t)mti_home_of(p)->bound[kind];
        if (!at && mt_context_has_data(ctx) && kind == MTI_IN_VALUES)
            at = (uintptr_t)p->value.data; /* the registry's */
        if (!at && mt_context_has_data(ctx) && kind == MTI_IN_GRADS) at = (uintptr_t)p->grad.data;
        if (!at) continue;
        all[n].begin = at;
        all[n].end = all[n].begin + (uintptr_t)(p->value.rows * p->value.cols) *
                                        mt_dtype_size(kind == MTI_IN_VALUES ? p->value.dtype : MT_F32);
        all[n].param = p;
        all[n++].kind = kind;
    }
    qsort(all, (size_t)n, sizeof *all, mti_bound_by_begin);
    for (i = 1; i < n && status == MT_SUCCESS; i++)
        if (all[i].begin < all[i - 1].end)
            status = mt_fail(ctx, MT_ERR_ARGUMENT,
                             "%s: the %s of '%s' have %llu bytes, but the %s of '%s' begin %llu bytes behind their "
                             "beginning",
                             function, mti_kind_names[all[i - 1].kind], all[i - 1].param->name,
                             (unsigned long long)(all[i - 1].end - all[i - 1].begin), mti_kind_names[all[i].kind],
                             all[i].param->name, (unsigned long long)(all[i].begin - all[i - 1].begin));
    mt_host_free(memory);
    return status;
}

/* Sets or, with memory NULL, clears what is bound of a kind. */
static void mti_bind_set(mt_params *params, int first, int count, const mt_params_memory *memory, int kind) {
    int64_t at = 0, size = kind == MTI_IN_VALUES ? (int64_t)mt_dtype_size(params->dtype) : (int64_t)sizeof(float);
    int i;
    for (i = 0; i < count; i++) {
        mt_param *p = params->list[first + i];
        mti_home *home = mti_home_of(p);
        if (memory && memory->offsets) at = memory->offsets[i];
        home->bound[kind] = memory ? mti_memory_of(memory, kind) + at * size : NULL;
        if (kind == MTI_IN_VALUES) home->value = p->value.data = home->bound[kind];
        if (kind == MTI_IN_GRADS) home->grad = p->grad.data = home->bound[kind];
        at += p->value.rows * p->value.cols;
    }
    params->bound_count[kind] += memory ? count : -count;
}

/* Undoes mti_bind. */
static void mti_bind_undo(mt_params *params, int first, int count, const mt_params_memory *memory) {
    int kind;
    for (kind = 0; memory && kind < MTI_KINDS; kind++)
        if (mti_memory_of(memory, kind)) mti_bind_set(params, first, count, NULL, kind);
}

/* Binds memory of `count` parameters from `first` on, or nothing when there is an error. */
static mt_status mti_bind(mt_context *ctx, const char *function, mt_params *params, int first, int count,
                          const mt_params_memory *memory) {
    mt_status status;
    int i, kind;
    MT_TRY(mti_pointers_check(ctx, function, params));
    if (!memory) return MT_SUCCESS;
    MT_TRY(mti_bind_size_check(ctx, function, params, first, count, memory));
    for (kind = 0; kind < MTI_KINDS; kind++) {
        const char *data = mti_memory_of(memory, kind);
        size_t size = mt_dtype_size(kind == MTI_IN_VALUES ? params->dtype : MT_F32);
        if (!data) continue;
        if ((uintptr_t)data % size != 0)
            return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s %p is not aligned to its %zu-byte elements", function,
                           mti_kind_names[kind], (const void *)data, size);
        if (mt_context_device(ctx) == MT_DEVICE_CUDA)
            MT_TRY(mt_cuda_check_memory(ctx, function, mti_kind_names[kind], data, (size_t)memory->elements * size));
        for (i = first; i < first + count; i++) MT_TRY(mti_bind_kind_check(ctx, function, params->list[i], kind));
    }
    for (kind = 0; kind < MTI_KINDS; kind++)
        if (mti_memory_of(memory, kind)) mti_bind_set(params, first, count, memory, kind);
    status = mti_bind_apart_check(ctx, function, params);
    if (status != MT_SUCCESS) mti_bind_undo(params, first, count, memory);
    return status;
}

MT_API mt_status mt_params_bind(mt_context *ctx, mt_params *params, const mt_params_memory *memory) {
    static const char *const function = "mt_params_bind";
    mt_status mine, status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || params->count == 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function, params ? "there are no parameters" : "params is NULL");
    mine = mti_bind(ctx, function, params, 0, params->count, memory);
    status = mti_params_compare(ctx, params, function, NULL, mine);
    if (status != MT_SUCCESS && mine == MT_SUCCESS) mti_bind_undo(params, 0, params->count, memory);
    MT_TRY(status);
    if (!params->placed && params->bound_count[MTI_IN_VALUES] == params->count) status = mti_params_place(ctx, params);
    if (status == MT_SUCCESS) params->is_bound = 1;
    else if (!params->placed) mti_bind_undo(params, 0, params->count, memory);
    return status;
}

MT_API mt_status mt_param_bind(mt_context *ctx, mt_param *param, const mt_params_memory *memory) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (param && !param->registry)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_param_bind: '%s' is of a layer of tensors", param->name);
    if (!param || !memory)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_param_bind: %s is NULL", param ? "memory" : "param");
    return mti_bind(ctx, "mt_param_bind", param->registry, param->index, 1, memory);
}

/* Checks the registry of a call, whose parameters need not have memory yet. */
static mt_status mti_params_known(mt_context *ctx, const mt_params *params, const char *function) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || params->count == 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function, params ? "there are no parameters" : "params is NULL");
    if (mt_context_invariant(ctx) != mt_context_invariant(params->ctx) ||
        mt_context_invariant_data(ctx) != mt_context_invariant_data(params->ctx))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the registry was made with invariant %d, %d, the context has %d, %d",
                       function, mt_context_invariant(params->ctx), mt_context_invariant_data(params->ctx),
                       mt_context_invariant(ctx), mt_context_invariant_data(ctx));
    return mti_pointers_check(ctx, function, params);
}

static mt_status mti_params_ready(mt_context *ctx, const mt_params *params, const char *function) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || !params->placed)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function,
                       params ? "call mt_params_init first" : "params is NULL");
    return mti_params_known(ctx, params, function);
}
