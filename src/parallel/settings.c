/* ---- what the ranks compare with mt_comm_compare ----------------------------------------------------------------- */

#pragma once
#include "init.c"
#include "../comm/compare.h"
#include "../comm/threads.c"

/* Sizes of the text of a setting's value, and of mti_param_text, in bytes. */
#define MTI_SETTING_VALUE 384
#define MTI_SETTING_MESSAGE 308 /* of an error; with its status in front, mt_comm_compare prints it whole */
#define MTI_PARAM_TEXT 208

typedef struct mti_settings {
    mt_setting *list; /* `room` settings, followed by the memory for their values */
    int room, count;
} mti_settings;

static mt_status mti_settings_begin(mt_context *ctx, int room, mti_settings *t) {
    void *memory;
    MT_TRY(mti_host_new(ctx, (size_t)room * (sizeof *t->list + MTI_SETTING_VALUE), &memory));
    t->list = (mt_setting *)memory;
    t->room = room;
    t->count = 0;
    return MT_SUCCESS;
}

/* Adds a setting whose value is a formatted text. name must be valid until mti_settings_end. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static void
mti_settings_add(mti_settings *t, const char *name, const char *format, ...) {
    char *value = (char *)(t->list + t->room) + t->count * MTI_SETTING_VALUE;
    va_list args;
    va_start(args, format);
    vsnprintf(value, MTI_SETTING_VALUE, format, args);
    va_end(args);
    t->list[t->count].name = name;
    t->list[t->count++].value = value;
}

static void mti_settings_add_f32(mti_settings *t, const char *name, float x) {
    char text[32];
    mti_settings_add(t, name, "%s", mt_f32_digits(x, text));
}

/* Compares the settings on all ranks that pass the same `group`, and frees the list. */
static mt_status mti_settings_end(mt_context *ctx, const mt_params *params, const char *function, int group,
                                  mti_settings *t) {
    mt_status status = mt_comm_compare(ctx, params->grid->world, function, group, t->list, t->count);
    mt_host_free(t->list);
    return status;
}

/* Writes the shape, the first values and the weight decay of a parameter. */
static void mti_param_text(const mt_param *p, char text[MTI_PARAM_TEXT]) {
    const mt_param_desc *d = &p->desc;
    char deviation[32], value[32];
    snprintf(text, MTI_PARAM_TEXT,
             "[%lld, %lld], %s, parts %lld, unit %lld, init_std %s, init_value %s, weight_decay %d", (long long)d->rows,
             (long long)d->cols, mt_placement_name(d->placement), (long long)d->parts, (long long)d->unit,
             mt_f32_digits(d->init_std, deviation), mt_f32_digits(d->init_value, value), d->weight_decay);
}

static void mti_settings_add_param(mti_settings *t, const mt_param *p) {
    const mt_param_desc *d = &p->desc;
    const mti_home *home = mti_home_of(p);
    char text[MTI_PARAM_TEXT], bound[96];
    int kind, used = 0;
    bound[0] = 0;
    for (kind = 0; kind < MTI_KINDS; kind++)
        if (home->bound[kind])
            used += snprintf(bound + used, sizeof bound - (size_t)used, "%s %s", used ? "," : ", bound",
                             mti_kind_names[kind]);
    mti_param_text(p, text);
    mti_settings_add(t, p->name,
                     "%s, sequence_partial %d, shared_embedding %d, padded_features %lld, copies %lld of %lld%s", text,
                     d->sequence_partial, d->shared_embedding, (long long)d->padded_features, (long long)d->copies,
                     (long long)d->copied, bound);
}

/* Tells the other ranks of an error of this rank, so that they do not wait for it. */
static void mti_settings_add_error(mt_context *ctx, mti_settings *t, mt_status mine) {
    if (mine == MT_SUCCESS) mti_settings_add(t, "error", "none");
    else mti_settings_add(t, "error", "%s (%.*s)", mt_status_name(mine), MTI_SETTING_MESSAGE, mt_last_error(ctx));
}

/* A parameter of the first or of the last stage. */
typedef struct mti_twin {
    uint64_t name;   /* the hash of its name */
    uint64_t shared; /* 1, 2, ...: it is the first, the second, ... shared_embedding of its stage; 0: it is none */
    char text[MTI_PARAM_TEXT];
} mti_twin;

/* Compares the parameters of this stage with those of the other end of the pipeline. A name that both have must be a
   shared embedding on both, and a shared embedding must have the same name on both. */
static mt_status mti_ends_compare(mt_context *ctx, const mt_params *params, const char *function, const mti_twin *other,
                                  uint64_t count) {
    const int is_first = params->grid->pp_rank == 0;
    const char *mine = is_first ? "the first" : "the last", *theirs = is_first ? "the last" : "the first";
    uint64_t j;
    int i;
    for (i = 0; i < params->count; i++) {
        const mt_param *p = params->list[i];
        const uint64_t name = mti_name_hash(p->name);
        const int shared = p->desc.shared_embedding;
        for (j = 0; j < count && other[j].name != name; j++) continue;
        if (j < count ? shared && other[j].shared : !shared) continue;
        if (j == count)
            return mt_fail(ctx, MT_ERR_MISMATCH,
                           "%s: '%s' is a shared_embedding of %s pipeline stage, but %s has no parameter of "
                           "this name: give both the same name, so that they begin with the same values",
                           function, p->name, mine, theirs);
        return mt_fail(ctx, MT_ERR_MISMATCH,
                       "%s: '%s' is on the first and on the last pipeline stage, but shared_embedding is not set on "
                       "%s: set it (mt_embedding_desc.shared), so that mt_sync_gradients sums the gradients of both, "
                       "or give one of them another name",
                       function, p->name,
                       !shared && !other[j].shared ? "both"
                       : shared                    ? theirs
                                                   : mine);
    }
    return MT_SUCCESS;
}

/* A shared embedding must have the same shape, first values and weight decay on both stages, and mt_sync_gradients must
   sum all of them in the same order. Those that this stage does not have are left out: the other one refuses them. own:
   the twins of this stage */
static mt_status mti_shared_compare(mt_context *ctx, const mt_params *params, const char *function, const mti_twin *own,
                                    const mti_twin *other, uint64_t count) {
    const int is_first = params->grid->pp_rank == 0;
    uint64_t j;
    int i, k;
    for (i = 0; i < params->count; i++) {
        for (j = 0; j < count && (!own[i].shared || other[j].shared != own[i].shared); j++) continue;
        for (k = 0; k < params->count && j < count && own[k].name != other[j].name; k++) continue;
        if (j == count || k == params->count || k < i) continue;
        if (k > i)
            return mt_fail(
                ctx, MT_ERR_MISMATCH,
                "%s: of the shared embeddings, '%s' comes before '%s' on the first pipeline stage, but after "
                "it on the last: add them in the same order, so that mt_sync_gradients sums each with its own",
                function, params->list[is_first ? i : k]->name, params->list[is_first ? k : i]->name);
        if (strcmp(own[i].text, other[j].text) != 0)
            return mt_fail(ctx, MT_ERR_MISMATCH,
                           "%s: the shared_embedding '%s' is %s on the first pipeline stage, but %s on the last",
                           function, params->list[i]->name, is_first ? own[i].text : other[j].text,
                           is_first ? other[j].text : own[i].text);
    }
    return MT_SUCCESS;
}

/* The first and the last stage of a pipeline compare their parameters. Other stages do nothing. */
static mt_status mti_ends_check(mt_context *ctx, const mt_params *params, const char *function) {
    mt_comm *ends = params->grid->embedding;
    const uint64_t mine = (uint64_t)params->count;
    uint64_t counts[2], most, shared = 0;
    mti_twin *list, *all, *other;
    void *memory;
    mt_status status;
    int i, rank;
    if (!ends || mt_comm_size(ends) != 2 || mt_comm_is_meta(ends)) return MT_SUCCESS;
    rank = mt_comm_rank(ends);
    MT_TRY(mt_comm_gather_host(ctx, ends, &mine, sizeof mine, counts));
    most = counts[0] > counts[1] ? counts[0] : counts[1];
    MT_TRY(mti_host_new(ctx, (size_t)(3 * most) * sizeof *list, &memory));
    list = (mti_twin *)memory;
    all = list + most;
    other = all + (rank == 0 ? most : 0);
    memset(list, 0, (size_t)most * sizeof *list);
    for (i = 0; i < params->count; i++) {
        list[i].name = mti_name_hash(params->list[i]->name);
        mti_param_text(params->list[i], list[i].text);
        list[i].shared = params->list[i]->desc.shared_embedding ? ++shared : 0;
    }
    status = mt_comm_gather_host(ctx, ends, list, (size_t)most * sizeof *list, all);
    if (status == MT_SUCCESS) status = mti_ends_compare(ctx, params, function, other, counts[1 - rank]);
    if (status == MT_SUCCESS) status = mti_shared_compare(ctx, params, function, list, other, counts[1 - rank]);
    mt_host_free(memory);
    return status;
}

/* With check 2, compares the two ends of a pipeline. All its ranks return an error of the ends. */
static mt_status mti_stages_check(mt_context *ctx, const mt_params *params, const char *function) {
    mti_settings t;
    mt_status mine;
    if (mt_check_mode(ctx) != 2 || params->grid->pp_size == 1) return MT_SUCCESS;
    mine = mti_ends_check(ctx, params, function);
    MT_TRY(mti_settings_begin(ctx, 1, &t));
    mti_settings_add_error(ctx, &t, mine);
    MT_TRY(mti_settings_end(ctx, params, function, 0, &t));
    return mine;
}

/* All ranks must make the same call, with the same seed (NULL: none) and invariant mode. The ranks of a pipeline stage
   must also have the same parameters and data parallelism. `mine` is the status of this rank so far. Returns it when
   all ranks have the same. */
static mt_status mti_params_compare(mt_context *ctx, const mt_params *params, const char *function,
                                    const uint64_t *seed, mt_status mine) {
    const mt_context_parallel_desc context = mt_parallel_get_options(ctx).context;
    mti_settings t;
    int i;
    MT_TRY(mti_settings_begin(ctx, 9, &t));
    mti_settings_add(&t, "call", "%s", function);
    if (seed) mti_settings_add(&t, "seed", "%llu", (unsigned long long)*seed);
    mti_settings_add(&t, "mt_context_desc.invariant", "%d", mt_context_invariant(ctx));
    mti_settings_add(&t, "mt_context_desc.invariant_data", "%d", mt_context_invariant_data(ctx));
    mti_settings_add(&t, "mt_context_desc.check", "%s", mt_check_mode(ctx) == 2 ? "2" : "not 2");
    mti_settings_add(&t, "mt_parallel_options.context.invariant", "%d", context.invariant);
    if (params->grid->cp_size > 1) {
        mti_settings_add(&t, "mt_parallel_options.context.contiguous", "%d", context.contiguous);
        mti_settings_add(&t, "mt_parallel_options.context.comm_type", "%d", (int)context.comm_type);
    }
    mti_settings_add_error(ctx, &t, mine);
    MT_TRY(mti_settings_end(ctx, params, function, 0, &t));
    MT_TRY(mti_settings_begin(ctx, params->count + 3, &t));
    mti_settings_add(&t, "dtype", "%s", mt_dtype_name(params->dtype));
    mti_settings_add(&t, "mt_data_parallel_desc.bucket_bytes", "%zu", params->buckets.desc.bucket_bytes);
    mti_settings_add(&t, "mt_data_parallel_desc.sharded_optimizer", "%d", params->buckets.desc.sharded_optimizer);
    for (i = 0; i < params->count; i++) mti_settings_add_param(&t, params->list[i]);
    MT_TRY(mti_settings_end(ctx, params, function, params->grid->pp_rank, &t));
    return mine == MT_SUCCESS ? mti_stages_check(ctx, params, function) : mine;
}

/* Checks that the caller has not changed the address of a value or a gradient. */
static mt_status mti_pointer_check(mt_context *ctx, const char *function, const mt_param *p) {
    const mti_home *home = p->registry ? mti_home_of(p) : NULL; /* NULL: of a layer of tensors */
    const char *changed = !home                                 ? NULL
                          : p->value.data != home->value        ? "value"
                          : p->grad.data != home->grad          ? "grad"
                          : p->lookup_grad.data != home->lookup ? "lookup_grad"
                                                                : NULL;
    if (!changed) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "%s: %s.data of '%s' was changed by hand; mt_params_bind, before mt_params_init, puts parameters "
                   "into memory of yours",
                   function, changed, p->name);
}

static mt_status mti_pointers_check(mt_context *ctx, const char *function, const mt_params *params) {
    int i;
    for (i = 0; i < params->count; i++) MT_TRY(mti_pointer_check(ctx, function, params->list[i]));
    return MT_SUCCESS;
}

/* Compares the settings of the ranks, allocates values and gradients, and sets them to zero. */
static mt_status mti_params_begin(mt_context *ctx, mt_params *params, const char *function, const uint64_t *seed) {
    MT_TRY(mti_params_compare(ctx, params, function, seed, mti_pointers_check(ctx, function, params)));
    if (!params->placed) MT_TRY(mti_params_place(ctx, params));
    mti_params_unpack(params);
    MT_TRY(mti_values_zero(ctx, params));
    return mt_params_zero_grad(ctx, params);
}

MT_API mt_status mt_params_init(mt_context *ctx, mt_params *params, uint64_t seed) {
    static const char *const function = "mt_params_init";
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!params || params->count == 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s", function, params ? "there are no parameters" : "params is NULL");
    MT_TRY(mti_params_begin(ctx, params, function, &seed));
    for (i = 0; i < params->count; i++) MT_TRY(mti_param_init(ctx, params->list[i], seed));
    return MT_SUCCESS;
}
