/* ---- AdamW, also with a sharded state ---------------------------------------------------------------------------- */

#pragma once
#include "optimizer.h"
#include "step.h"
#include "scatter.c"
#include "sync.c"

static mt_status mti_optimizer_check(mt_context *ctx, const mt_params *params, const mt_optimizer_desc *d) {
    static const char *const function = "mt_optimizer_create";
    MT_TRY(mt_check_float(ctx, function, NULL, "beta1", d->beta1, MT_FLOAT_PROBABILITY));
    MT_TRY(mt_check_float(ctx, function, NULL, "beta2", d->beta2, MT_FLOAT_PROBABILITY));
    MT_TRY(mt_check_float(ctx, function, NULL, "eps", d->eps, MT_FLOAT_AT_LEAST_0));
    MT_TRY(mt_check_float(ctx, function, NULL, "weight_decay", d->weight_decay, MT_FLOAT_AT_LEAST_0));
    if (!d->stochastic_rounding || params->dtype != MT_F32) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: stochastic_rounding is for bf16 and f16 parameters, these are f32",
                   function);
}

/* Allocates m, v or the masters. */
static mt_status mti_optimizer_alloc(mt_context *ctx, mt_optimizer *optimizer, float **out) {
    void *memory;
    MT_TRY(mt_context_alloc(ctx, (size_t)optimizer->elements * sizeof(float), &memory));
    *out = (float *)memory;
    return MT_SUCCESS;
}

static int mti_has_masters(const mt_optimizer *optimizer) {
    return mt_params_dtype(optimizer->params) != MT_F32 && !optimizer->desc.stochastic_rounding;
}

/* Returns 1 when a parameter's value is the state. */
static int mti_state_is_value(const mt_optimizer *optimizer, mt_optimizer_state state) {
    return state == MT_MASTER && !mti_has_masters(optimizer);
}

/* Returns where element `at` of m, v or the masters is (mti_stretch.state). It must belong to p, because p's state may
   be in the caller's memory. */
static float *mti_state_at(const mt_optimizer *o, const mt_param *p, mt_optimizer_state state, int64_t at) {
    float *bound = (float *)mti_home_of(p)->bound[MTI_IN_STATES + (int)state];
    float *own = state == MT_EXP_AVG ? o->m : state == MT_EXP_AVG_SQ ? o->v : o->master;
    return bound ? bound + (at - mti_param_offset(p)) : own + at; /* bound states are not sharded: `at` is an offset */
}

/* Returns a parameter's state. This rank must have all of it. */
static mt_tensor mti_optimizer_shard(const mt_optimizer *o, const mt_param *p, mt_optimizer_state state) {
    mt_tensor t = p->grad;
    if (mti_state_is_value(o, state)) return p->value;
    t.data = mti_state_at(o, p, state, mti_param_offset(p));
    return t;
}

/* Sets the moments that the caller has bound to zero, and copies masters from the values. */
static mt_status mti_optimizer_fill(mt_context *ctx, const mt_optimizer *o, const mt_param *p) {
    int64_t offset = mti_param_offset(p), n = p->grad.rows * p->grad.cols;
    mt_tensor value = mt_tensor_make(p->value.data, p->value.dtype, 1, n);
    mti_stretch s;
    int state;
    for (state = MT_EXP_AVG; state <= MT_EXP_AVG_SQ; state++)
        if (mti_home_of(p)->bound[MTI_IN_STATES + state])
            MT_TRY(mti_zero(ctx, mti_bound_view(p, MTI_IN_STATES + state, 0, n)));
    if (!mti_has_masters(o)) return MT_SUCCESS;
    for (s = mti_param_share(p); s.count > 0; s = mti_share_after(o->params, s, offset + n))
        MT_TRY(mt_convert(ctx, mt_tensor_cols(value, s.at - offset, s.count),
                          mt_tensor_f32(mti_state_at(o, p, MT_MASTER, s.state), 1, s.count)));
    return MT_SUCCESS;
}

/* Allocates m and v, and masters for 16-bit parameters without stochastic rounding, as far as the caller has not bound
   them, and fills them. */
static mt_status mti_optimizer_memory(mt_context *ctx, mt_optimizer *optimizer) {
    const mt_params *params = optimizer->params;
    mt_status status = MT_SUCCESS;
    float **own[3];
    int i;
    own[MT_EXP_AVG] = &optimizer->m;
    own[MT_EXP_AVG_SQ] = &optimizer->v;
    own[MT_MASTER] = &optimizer->master;
    for (i = MT_EXP_AVG; i <= (mti_has_masters(optimizer) ? MT_MASTER : MT_EXP_AVG_SQ); i++)
        if (params->bound_count[MTI_IN_STATES + i] < params->count) MT_TRY(mti_optimizer_alloc(ctx, optimizer, own[i]));
    mt_check_pause(ctx); /* a share is another part of a parameter on each data rank */
    for (i = 0; status == MT_SUCCESS && i < params->count; i++)
        status = mti_optimizer_fill(ctx, optimizer, params->list[i]);
    return mt_check_resume(ctx, status);
}

/* Returns 1 when the caller has bound a state of a parameter. */
static int mti_state_is_bound(const mt_params *params) {
    const int *bound = params->bound_count + MTI_IN_STATES;
    return bound[MT_EXP_AVG] + bound[MT_EXP_AVG_SQ] + bound[MT_MASTER] > 0;
}

/* Checks that the optimizer can use the states that the caller has bound. */
static mt_status mti_optimizer_bound(mt_context *ctx, const mt_params *params, const mt_optimizer_desc *d) {
    const int *bound = params->bound_count + MTI_IN_STATES;
    if (bound[MT_MASTER] > 0 && d->stochastic_rounding)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "mt_optimizer_create: memory is bound for the masters of %d parameters, but with "
                       "stochastic_rounding there are no masters",
                       bound[MT_MASTER]);
    if (params->bound_in_use)
        return mt_fail(ctx, MT_ERR_ARGUMENT,
                       "mt_optimizer_create: exp_avg, exp_avg_sq or master is bound, and another optimizer uses it; "
                       "call mt_optimizer_destroy for that one first");
    if (params->buckets.ranks == 1 || !mti_state_is_bound(params)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "mt_optimizer_create: exp_avg, exp_avg_sq or master is bound, but the %d data ranks share the "
                   "optimizer's state (sharded_optimizer)",
                   params->buckets.ranks);
}

/* All ranks must have the same desc. `mine` is as in mti_params_compare. */
static mt_status mti_optimizer_compare(mt_context *ctx, const mt_params *params, const mt_optimizer_desc *d,
                                       mt_status mine) {
    mti_settings t;
    MT_TRY(mti_settings_begin(ctx, 7, &t));
    mti_settings_add_f32(&t, "beta1", d->beta1);
    mti_settings_add_f32(&t, "beta2", d->beta2);
    mti_settings_add_f32(&t, "eps", d->eps);
    mti_settings_add_f32(&t, "weight_decay", d->weight_decay);
    mti_settings_add(&t, "stochastic_rounding", "%d", d->stochastic_rounding);
    mti_settings_add(&t, "seed", "%llu", (unsigned long long)d->seed);
    mti_settings_add_error(ctx, &t, mine);
    MT_TRY(mti_settings_end(ctx, params, "mt_optimizer_create", 0, &t));
    return mine;
}

static mt_status mti_optimizer_tensors(mt_context *ctx, mt_optimizer *o);

MT_API mt_status mt_optimizer_create(mt_context *ctx, mt_params *params, const mt_optimizer_desc *desc,
                                     mt_optimizer *out) {
    mt_optimizer_desc d;
    mt_status status;
    MT_TRY(mti_params_ready(ctx, params, "mt_optimizer_create"));
    if (!out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_optimizer_create: out is NULL");
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    d.beta1 = mt_or_default(d.beta1, 0.9f);
    d.beta2 = mt_or_default(d.beta2, 0.999f);
    d.eps = mt_or_default(d.eps, 1e-8f);
    MT_TRY(mti_optimizer_check(ctx, params, &d));
    MT_TRY(mti_optimizer_compare(ctx, params, &d, mti_optimizer_bound(ctx, params, &d)));
    memset(out, 0, sizeof *out);
    out->desc = d;
    out->params = params;
    out->elements = params->elements / params->buckets.ranks;
    status = mti_optimizer_memory(ctx, out);
    if (status == MT_SUCCESS) status = mti_optimizer_tensors(ctx, out);
    if (status == MT_SUCCESS) params->has_optimizer = 1;
    else mt_optimizer_destroy(ctx, out);
    if (status == MT_SUCCESS) params->bound_in_use = out->uses_bound = mti_state_is_bound(params);
    return status;
}

MT_API void mt_optimizer_destroy(mt_context *ctx, mt_optimizer *optimizer) {
    size_t bytes;
    if (!ctx || !optimizer || !optimizer->params) return;
    if (optimizer->uses_bound) optimizer->params->bound_in_use = 0;
    bytes = (size_t)optimizer->elements * sizeof(float);
    mt_context_free(ctx, optimizer->m, bytes);
    mt_context_free(ctx, optimizer->v, bytes);
    mt_context_free(ctx, optimizer->master, bytes);
    mt_multi_tensor_destroy(ctx, optimizer->update);
    memset(optimizer, 0, sizeof *optimizer);
}

static mt_status mti_optimizer_shard_check(mt_context *ctx, const char *function, const mt_optimizer *optimizer,
                                           const mt_param *param, const char *name, const void *out) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!param || !out) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, param ? name : "param");
    if (!optimizer || !optimizer->params) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: no optimizer", function);
    MT_TRY(mti_params_ready(ctx, optimizer->params, function));
    if (mt_params_find(optimizer->params, param->name) == param) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: '%s' is not of this optimizer's registry", function, param->name);
}

static mt_status mti_expect_unshared(mt_context *ctx, const char *function, const mt_optimizer *optimizer) {
    if (optimizer->params->buckets.ranks == 1) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_UNSUPPORTED,
                   "%s: %d data ranks share the optimizer's state (sharded_optimizer); use "
                   "mt_optimizer_read, _gather or _scatter",
                   function, optimizer->params->buckets.ranks);
}

MT_API mt_status mt_optimizer_moments(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                      mt_tensor *m, mt_tensor *v) {
    MT_TRY(mti_optimizer_shard_check(ctx, "mt_optimizer_moments", optimizer, param, "m or v", m && v ? m : NULL));
    MT_TRY(mti_expect_unshared(ctx, "mt_optimizer_moments", optimizer));
    *m = mti_optimizer_shard(optimizer, param, MT_EXP_AVG);
    *v = mti_optimizer_shard(optimizer, param, MT_EXP_AVG_SQ);
    return MT_SUCCESS;
}

MT_API mt_status mt_optimizer_master(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                     mt_tensor *master) {
    MT_TRY(mti_optimizer_shard_check(ctx, "mt_optimizer_master", optimizer, param, "master", master));
    MT_TRY(mti_expect_unshared(ctx, "mt_optimizer_master", optimizer));
    *master = mti_optimizer_shard(optimizer, param, MT_MASTER);
    return MT_SUCCESS;
}

#define MTI_STATE_WORDS "MT_EXP_AVG MT_EXP_AVG_SQ MT_MASTER"

/* Checks the arguments of a call that reads or writes a state. */
static mt_status mti_optimizer_state_check(mt_context *ctx, const char *function, const mt_optimizer *optimizer,
                                           const mt_param *param, mt_optimizer_state state, const void *other) {
    MT_TRY(mti_optimizer_shard_check(ctx, function, optimizer, param, "the tensor", other));
    return mt_check_enum(ctx, function, NULL, "state", (int)state, MTI_STATE_WORDS);
}

/* Copies between this rank's share of a parameter's state and the place of that share in `whole`, which has the
   parameter's shape. */
static mt_status mti_optimizer_copy(mt_context *ctx, const mt_optimizer *o, const mt_param *p, mt_optimizer_state state,
                                    mt_tensor whole, int to_whole) {
    int64_t first = mti_param_offset(p), end = first + whole.rows * whole.cols;
    mti_stretch s;
    for (s = mti_param_share(p); s.count > 0; s = mti_share_after(p->registry, s, end)) {
        mt_tensor mine = mt_tensor_f32(mti_state_at(o, p, state, s.state), 1, s.count);
        mt_tensor place = mt_tensor_f32((float *)whole.data + (s.at - first), 1, s.count);
        MT_TRY(to_whole ? mt_copy(ctx, mine, place) : mt_copy(ctx, place, mine));
    }
    return MT_SUCCESS;
}

/* Sets *out to the whole state of a parameter. It is a view when this rank has all of it, and otherwise a tensor in the
   arena with the shares of all data ranks. These are added as integers, of which all but one are 0, so that every bit
   is kept. */
static mt_status mti_optimizer_whole(mt_context *ctx, const mt_optimizer *o, const mt_param *p,
                                     mt_optimizer_state state, mt_tensor *out) {
    const mt_params *params = p->registry;
    size_t count = (size_t)(p->grad.rows * p->grad.cols);
    *out = mt_none();
    if (mti_state_is_value(o, state) || params->buckets.ranks == 1) {
        *out = mti_optimizer_shard(o, p, state);
        return MT_SUCCESS;
    }
    MT_TRY(mt_arena_tensor(ctx, MT_F32, p->grad.rows, p->grad.cols, out));
    MT_TRY(mt_fill(ctx, *out, 0.0f));
    MT_TRY(mti_optimizer_copy(ctx, o, p, state, *out, 1));
    return mt_all_reduce(ctx, params->grid->dp_cp, out->data, out->data, count, MT_I32, MT_SUM);
}

MT_API mt_status mt_optimizer_read(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                   mt_optimizer_state state, mt_tensor shard) {
    static const char *const function = "mt_optimizer_read";
    mt_tensor whole;
    size_t mark;
    mt_status status;
    MT_TRY(mti_optimizer_state_check(ctx, function, optimizer, param, state, shard.data));
    MT_TRY(mt_tensor_check(ctx, function, "shard", shard, MT_ARG_F32, param->grad.rows, param->grad.cols));
    mark = mt_arena_mark(ctx);
    status = mti_optimizer_whole(ctx, optimizer, param, state, &whole);
    if (status == MT_SUCCESS) status = mt_convert(ctx, whole, shard);
    mt_arena_release(ctx, mark);
    return status;
}

MT_API mt_status mt_optimizer_gather(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                     mt_optimizer_state state, float *global) {
    mt_tensor whole;
    size_t mark;
    mt_status status;
    MT_TRY(mti_optimizer_state_check(ctx, "mt_optimizer_gather", optimizer, param, state, global));
    mark = mt_arena_mark(ctx);
    status = mti_optimizer_whole(ctx, optimizer, param, state, &whole);
    if (status == MT_SUCCESS) status = mt_param_gather(ctx, optimizer->params, param, whole, global);
    mt_arena_release(ctx, mark);
    return status;
}

/* Writes this rank's part of `global` to a state of a parameter. */
static mt_status mti_optimizer_scatter(mt_context *ctx, const mt_optimizer *o, const mt_param *p,
                                       mt_optimizer_state state, const float *global) {
    int shared = !mti_state_is_value(o, state) && p->registry->buckets.ranks > 1;
    mt_tensor whole = shared ? mt_none() : mti_optimizer_shard(o, p, state);
    if (shared) MT_TRY(mt_arena_tensor(ctx, MT_F32, p->grad.rows, p->grad.cols, &whole));
    if (shared) MT_TRY(mt_fill(ctx, whole, 0.0f)); /* the scatter does not write the padding */
    MT_TRY(mt_param_scatter(ctx, p, global, whole));
    if (shared) MT_TRY(mti_optimizer_copy(ctx, o, p, state, whole, 0));
    if (state != MT_MASTER) return MT_SUCCESS;
    mt_gemm_unpack(p->registry->ctx, p->value);
    MT_TRY(mt_declare(ctx, NULL, whole, MT_UNDECLARED)); /* it may have pieces of several calls */
    return mt_convert(ctx, whole, p->value);
}

MT_API mt_status mt_optimizer_scatter(mt_context *ctx, const mt_optimizer *optimizer, const mt_param *param,
                                      mt_optimizer_state state, const float *global) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_optimizer_state_check(ctx, "mt_optimizer_scatter", optimizer, param, state, global));
    if (state == MT_MASTER) MT_TRY(mti_narrow_check(ctx, "mt_optimizer_scatter", param, global, param->value.dtype));
    mark = mt_arena_mark(ctx);
    status = mti_optimizer_scatter(ctx, optimizer, param, state, global);
    mt_arena_release(ctx, mark);
    return status;
}

/* Rows [row, row + rows) and columns [col, col + cols) of a run. Their state begins at element `state` of m, v and
   the masters. */
typedef struct mti_patch {
    int64_t row, rows, col, cols, state;
} mti_patch;

static mt_tensor mti_patch_view(const mt_param *p, mt_tensor t, mti_shard_run run, mti_patch at) {
    return mt_tensor_cols(mt_tensor_rows(mti_run_view(p, t, run), at.row, at.rows), at.col, at.cols);
}

/* Returns the state of a patch, shaped like its gradient, or mt_none() when the value is the state. */
static mt_tensor mti_patch_state(const mt_optimizer *o, const mt_param *p, mt_optimizer_state state, mt_tensor grad,
                                 mti_patch at) {
    if (mti_state_is_value(o, state)) return mt_none();
    grad.data = mti_state_at(o, p, state, at.state);
    return grad;
}

/* The tensors that a step updates, in a list that grows. */
typedef struct mti_adamw_list {
    mt_adamw_tensor *tensors; /* NULL: only counts them */
    int count;
} mti_adamw_list;

/* Adds one patch. */
static void mti_optimizer_patch(const mt_optimizer *o, const mt_param *p, mti_shard_run run, mti_patch at,
                                mti_adamw_list *list) {
    mt_adamw_tensor *t;
    int number = list->count++;
    if (!list->tensors) return;
    t = &list->tensors[number];
    t->param = mti_patch_view(p, p->value, run, at);
    t->grad = mti_patch_view(p, p->grad, run, at);
    t->master = mti_patch_state(o, p, MT_MASTER, t->grad, at);
    t->m = mti_patch_state(o, p, MT_EXP_AVG, t->grad, at);
    t->v = mti_patch_state(o, p, MT_EXP_AVG_SQ, t->grad, at);
    t->weight_decay = p->desc.weight_decay;
    t->random = mti_param_random(p, run, o->desc.seed, 0);
    t->random.first_row += at.row;
    t->random.first_col += at.col;
}

/* Returns the offset at which a view of p's gradient begins. */
static int64_t mti_view_offset(const mt_param *p, mt_tensor view) {
    return mti_param_offset(p) + ((const float *)view.data - (const float *)p->grad.data);
}

/* Adds a stretch of a run as up to three patches: the rest of a row, whole rows, and the beginning of a row. Between
   the rows of a run there may be other columns. */
static void mti_optimizer_stretch(const mt_optimizer *o, const mt_param *p, mti_shard_run run, mti_stretch s,
                                  mti_adamw_list *list) {
    mt_tensor view = mti_run_view(p, p->grad, run);
    int64_t ld = mt_tensor_ld(view), left, at = s.at - mti_view_offset(p, view);
    mti_patch patch;
    for (left = s.count; left > 0;) {
        int64_t used;
        patch.row = at / ld;
        patch.col = at % ld;
        patch.rows = 1;
        patch.cols = mt_min(view.cols - patch.col, left);
        patch.state = s.state + s.count - left;
        if (patch.col == 0 && patch.cols == view.cols) patch.rows = (left - view.cols) / ld + 1;
        if (patch.cols > 0) mti_optimizer_patch(o, p, run, patch, list);
        used = patch.cols > 0 ? (patch.rows - 1) * ld + patch.cols : ld - patch.col;
        at += used;
        left -= used;
    }
}

/* Adds this rank's share of a parameter run by run. A run has a position in the whole parameter, which the random
   numbers need. It has no padding, which therefore stays zero. */
static void mti_optimizer_param(const mt_optimizer *o, const mt_param *p, mti_adamw_list *list) {
    mti_stretch s;
    mti_shard_run run;
    int64_t i = 0;
    while (mti_run_next(p, p->tp_rank, &i, &run)) {
        mt_tensor view = mti_run_view(p, p->grad, run);
        int64_t first = mti_view_offset(p, view), end = first + (view.rows - 1) * mt_tensor_ld(view) + view.cols;
        for (s = mti_share_next(o->params, first, end); s.count > 0; s = mti_share_after(o->params, s, end))
            mti_optimizer_stretch(o, p, run, s, list);
    }
}

static void mti_optimizer_params(const mt_optimizer *o, mti_adamw_list *list) {
    int i;
    list->count = 0;
    for (i = 0; i < o->params->count; i++) mti_optimizer_param(o, o->params->list[i], list);
}

/* Makes the list of the tensors that a step updates. */
static mt_status mti_optimizer_tensors(mt_context *ctx, mt_optimizer *o) {
    mti_adamw_list list;
    void *memory;
    mt_status status;
    memset(&list, 0, sizeof list);
    mti_optimizer_params(o, &list);
    MT_TRY(mti_host_new(ctx, (size_t)(list.count + 1) * sizeof *list.tensors, &memory));
    list.tensors = (mt_adamw_tensor *)memory;
    mti_optimizer_params(o, &list);
    status = mt_multi_tensor_create_adamw(ctx, list.tensors, list.count, o->desc.stochastic_rounding, &o->update);
    mt_host_free(memory);
    return status;
}

/* Updates this rank's share of every parameter and, when the optimizer is sharded, gathers the values. */
static mt_status mti_optimizer_apply(mt_context *ctx, mt_optimizer *optimizer, const mt_adamw *hyper,
                                     const mt_adamw_values *values) {
    MT_TRY(mt_multi_tensor_adamw(ctx, optimizer->update, hyper, values));
    mti_gradients_set(optimizer->params, MTI_GRADIENTS_USED);
    return optimizer->params->torn ? mti_buckets_gather(ctx, optimizer->params, MTI_IN_VALUES) : MT_SUCCESS;
}

/* The update of a step. numbers: lr, grad_scale and step; with `values`, those in memory of the device are used
   instead. */
static mt_status mti_optimizer_update(mt_context *ctx, mt_optimizer *optimizer, const mt_adamw *numbers,
                                      const mt_adamw_values *values) {
    mt_adamw hyper = *numbers;
    hyper.beta1 = optimizer->desc.beta1;
    hyper.beta2 = optimizer->desc.beta2;
    hyper.eps = optimizer->desc.eps;
    hyper.weight_decay = optimizer->desc.weight_decay;
    optimizer->params->torn = optimizer->params->buckets.ranks > 1;
    mti_params_unpack(optimizer->params);
    mt_check_pause(ctx); /* with a sharded optimizer, data ranks update other parts of a parameter */
    MT_TRY(mt_check_resume(ctx, mti_optimizer_apply(ctx, optimizer, &hyper, values)));
    optimizer->params->torn = 0;
    return mti_replicas_check(ctx, optimizer->params, values ? "mt_step_update" : "mt_optimizer_step");
}

/* Notes a number of a step for mt_check_replicas. The values do not show that a rank of a sharded optimizer has another
   number: each rank updates its own shard, and then all ranks get it. */
static mt_status mti_number_note(mt_context *ctx, const mt_grid *grid, const char *what, float number) {
    MT_TRY(mt_check_number(ctx, grid->tp, what, number));
    MT_TRY(mt_check_number(ctx, grid->pp, what, number));
    return mt_check_number(ctx, grid->dp_cp, what, number);
}

static mt_status mti_optimizer_step(mt_context *ctx, mt_optimizer *optimizer, float lr, float grad_scale) {
    mt_adamw numbers;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!optimizer || !optimizer->params) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_optimizer_step: no optimizer");
    MT_TRY(mti_params_ready(ctx, optimizer->params, "mt_optimizer_step"));
    MT_TRY(mti_gradients_ready(ctx, "mt_optimizer_step", optimizer->params, 0));
    memset(&numbers, 0, sizeof numbers);
    numbers.lr = lr;
    numbers.grad_scale = grad_scale;
    numbers.step = optimizer->step + 1;
    MT_TRY(mti_number_note(ctx, optimizer->params->grid, "lr", lr));
    MT_TRY(mti_number_note(ctx, optimizer->params->grid, "grad_scale", grad_scale));
    MT_TRY(mt_check_mean_end(ctx, "mt_optimizer_step", (double)grad_scale));
    MT_TRY(mti_optimizer_update(ctx, optimizer, &numbers, NULL));
    optimizer->step = numbers.step;
    return MT_SUCCESS;
}

MT_API mt_status mt_optimizer_step(mt_context *ctx, mt_optimizer *optimizer, float lr, float grad_scale) {
    return MT_RANGE("optimizer step", mti_optimizer_step(ctx, optimizer, lr, grad_scale));
}

/* -- a step that does not wait -- */

/* Returns the name of the first field of a scaler that is out of range, or NULL. */
static const char *mti_scaler_fault(const mt_loss_scaler *scaler) {
    const char *fault = mt_loss_scaler_fault(&scaler->desc);
    if (fault) return fault;
    if (!(scaler->scale >= scaler->desc.min_scale && scaler->scale <= FLT_MAX)) return "loss_scaler.scale";
    return scaler->good_steps < scaler->desc.growth_interval ? NULL : "loss_scaler.good_steps";
}

/* Takes a name that mti_scaler_fault has returned, and returns what this field must be. */
static const char *mti_scaler_wanted(const char *fault) {
    const char *wanted = mt_loss_scaler_wanted(fault);
    if (wanted) return wanted;
    return strcmp(fault, "loss_scaler.scale") == 0 ? "at least min_scale and finite" : "below growth_interval";
}

/* Writes the value of a field of a scaler, by the name that mti_scaler_fault has returned. */
static void mti_scaler_value(const mt_loss_scaler *s, const char *fault, char text[32]) {
    const struct {
        const char *name;
        const float *real;
        const int *whole;
    } fields[] = {{"loss_scaler.initial_scale", &s->desc.initial_scale, NULL},
                  {"loss_scaler.min_scale", &s->desc.min_scale, NULL},
                  {"loss_scaler.growth", &s->desc.growth, NULL},
                  {"loss_scaler.backoff", &s->desc.backoff, NULL},
                  {"loss_scaler.growth_interval", NULL, &s->desc.growth_interval},
                  {"loss_scaler.hysteresis", NULL, &s->desc.hysteresis},
                  {"loss_scaler.scale", &s->scale, NULL},
                  {"loss_scaler.good_steps", NULL, &s->good_steps}};
    int i = 0;
    while (strcmp(fields[i].name, fault) != 0) i++;
    if (fields[i].real) mt_f32_digits(*fields[i].real, text);
    else snprintf(text, 32, "%d", *fields[i].whole);
}

static mt_status mti_scaler_check(mt_context *ctx, const char *function, const mt_loss_scaler *scaler) {
    const char *fault = mti_scaler_fault(scaler);
    char text[32];
    if (!fault) return MT_SUCCESS;
    mti_scaler_value(scaler, fault, text);
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: scaler.%s%s is %s, must be %s", function,
                   mt_loss_scaler_wanted(fault) ? "desc." : "", fault + strlen("loss_scaler."), text,
                   mti_scaler_wanted(fault));
}

static mt_tensor mti_step_memory(const mt_step_values *values, size_t bytes) {
    return mt_tensor_make(values, MT_I32, 1, (int64_t)(bytes / sizeof(int32_t)));
}

MT_API mt_status mt_step_create(mt_context *ctx, mt_optimizer *optimizer, const mt_loss_scaler *scaler, float max_norm,
                                mt_step *out) {
    static const char *const function = "mt_step_create";
    mt_step_values first;
    mt_step step;
    void *memory;
    mt_status status;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!optimizer || !optimizer->params || !out)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, out ? "optimizer" : "out");
    MT_TRY(mt_check_float(ctx, function, NULL, "max_norm", max_norm, MT_FLOAT_FINITE));
    memset(&first, 0, sizeof first);
    if (scaler) {
        MT_TRY(mti_scaler_check(ctx, function, scaler));
        first.scaler = *scaler;
    } else {
        mt_loss_scaler_desc none;
        memset(&none, 0, sizeof none);
        none.initial_scale = none.growth = 1.0f;
        MT_TRY(mt_loss_scaler_create(ctx, &none, &first.scaler));
    }
    first.max_norm = max_norm;
    first.adamw.step = optimizer->step;
    MT_TRY(mt_context_alloc(ctx, sizeof first, &memory));
    step.optimizer = optimizer;
    step.values = (mt_step_values *)memory;
    status = mt_upload(ctx, &first, mti_step_memory(step.values, sizeof first));
    if (status == MT_SUCCESS) *out = step;
    else mt_context_free(ctx, memory, sizeof first);
    return status;
}

MT_API void mt_step_destroy(mt_context *ctx, mt_step *step) {
    if (!ctx || !step || !step->values) return;
    mt_context_free(ctx, step->values, sizeof *step->values);
    memset(step, 0, sizeof *step);
}

static mt_status mti_step_check(mt_context *ctx, const char *function, const mt_step *step) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!step || !step->optimizer) return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: no step", function);
    return mti_params_ready(ctx, step->optimizer->params, function);
}

/* random_offset and lr are the first fields. */
MT_API mt_status mt_step_begin(mt_context *ctx, const mt_step *step, float lr, uint64_t number) {
    mt_step_values first;
    MT_TRY(mti_step_check(ctx, "mt_step_begin", step));
    MT_TRY(mt_check_float(ctx, "mt_step_begin", NULL, "lr", lr, MT_FLOAT_FINITE));
    if (number >> 44)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_step_begin: number is %llu, must be below 2^44",
                       (unsigned long long)number);
    MT_TRY(mti_number_note(ctx, step->optimizer->params->grid, "lr", lr));
    number <<= 20;
    first.random_offset = number;
    first.lr = lr;
    return mt_upload(ctx, &first, mti_step_memory(step->values, offsetof(mt_step_values, max_norm)));
}

static mt_status mti_step_update(mt_context *ctx, const mt_step *step, mt_tensor loss) {
    mt_adamw numbers; /* not used, but valid */
    mt_tensor sums;
    size_t mark = mt_arena_mark(ctx);
    mt_status status = mt_arena_tensor(ctx, MT_F32, 1, 2, &sums);
    memset(&numbers, 0, sizeof numbers);
    numbers.step = 1;
    if (status == MT_SUCCESS) status = mti_norm_sums_of(ctx, step->optimizer->params, sums);
    if (status == MT_SUCCESS) status = mt_step_decide(ctx, sums, loss, step->values);
    mt_arena_release(ctx, mark);
    if (status != MT_SUCCESS) return status;
    return mti_optimizer_update(ctx, step->optimizer, &numbers, &step->values->adamw);
}

/* Refuses a loss that only some stages of a pipeline may have. */
static mt_status mti_loss_check(mt_context *ctx, const mt_grid *grid, mt_tensor loss) {
    if (!mt_check_mode(ctx) || !loss.data || grid->pp_size == 1 ||
        mt_placement_of(ctx, grid->pp, loss) == MT_REPLICATED)
        return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT,
                   "mt_step_update: loss is not known over \"pipeline\" (%d ranks), must be replicated: only the last "
                   "stage computes it; call mt_broadcast before, or mt_declare if all stages have it",
                   grid->pp_size);
}

MT_API mt_status mt_step_update(mt_context *ctx, const mt_step *step, mt_tensor loss) {
    static const mt_rule rule = {"loss", "R", NULL};
    mt_operand operand;
    MT_TRY(mti_step_check(ctx, "mt_step_update", step));
    MT_TRY(mti_gradients_ready(ctx, "mt_step_update", step->optimizer->params, 0));
    operand.name = "loss";
    operand.t = loss;
    operand.use = MT_ARG_IN;
    MT_TRY(mt_rule_check(ctx, "mt_step_update", &rule, &operand, 1));
    MT_TRY(mti_loss_check(ctx, step->optimizer->params->grid, loss));
    return MT_RANGE("optimizer step", mti_step_update(ctx, step, loss));
}

MT_API mt_status mt_step_read(mt_context *ctx, const mt_step *step, mt_step_values *out) {
    MT_TRY(mti_step_check(ctx, "mt_step_read", step));
    if (!out) return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_step_read: out is NULL");
    memset(out, 0, sizeof *out);
    MT_TRY(mt_download(ctx, mti_step_memory(step->values, sizeof *out), out));
    step->optimizer->step = out->adamw.step;
    return MT_SUCCESS;
}

MT_API const uint64_t *mt_step_random_offset(const mt_step *step) {
    return step && step->values ? &step->values->random_offset : NULL;
}

MT_API mt_tensor mt_step_loss_scale(const mt_step *step) {
    return step && step->values ? mt_tensor_f32(&step->values->scaler.scale, 1, 1) : mt_none();
}

/* Returns the learning rate of a step of the warm-up, or from `total` on, with *progress = -1. Otherwise *progress
   becomes the share of the decay that is done, in [0, 1). */
static float mti_schedule_ends(int64_t step, int64_t warmup, int64_t total, float lr, float min_lr, double *progress) {
    *progress = -1.0;
    if (step < 0) step = 0;
    if (warmup < 0) warmup = 0;
    if (step < warmup) return (float)((double)lr * (double)(step + 1) / (double)warmup);
    if (step >= total) return min_lr;
    *progress = (double)(step - warmup) / (double)(total - warmup);
    return lr;
}

MT_API float mt_cosine_schedule(int64_t step, int64_t warmup, int64_t total, float lr, float min_lr) {
    double progress;
    float end = mti_schedule_ends(step, warmup, total, lr, min_lr, &progress);
    if (progress < 0.0) return end;
    return (float)((double)min_lr +
                   0.5 * ((double)lr - (double)min_lr) * (1.0 + cos(3.14159265358979323846 * progress)));
}

MT_API float mt_linear_schedule(int64_t step, int64_t warmup, int64_t total, float lr, float min_lr) {
    double progress;
    float end = mti_schedule_ends(step, warmup, total, lr, min_lr, &progress);
    if (progress < 0.0) return end;
    return (float)((double)min_lr + ((double)lr - (double)min_lr) * (1.0 - progress));
}
