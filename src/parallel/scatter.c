/* ---- whole tensors and shards of parameters ---------------------------------------------------------------------- */

#pragma once
#include "gradients.c"
#include "../comm/context.c"

MT_API const mt_grid *mt_params_grid(const mt_params *params) { return params ? params->grid : NULL; }
MT_API int mt_params_count(const mt_params *params) { return params ? params->count : 0; }

MT_API mt_param *mt_params_at(const mt_params *params, int index) {
    return index >= 0 && index < mt_params_count(params) ? params->list[index] : NULL;
}

MT_API mt_param *mt_params_find(const mt_params *params, const char *name) {
    int i;
    for (i = 0; name && i < mt_params_count(params); i++)
        if (strcmp(params->list[i]->name, name) == 0) return params->list[i];
    return NULL;
}

MT_API int64_t mt_params_elements(const mt_params *params) {
    int64_t n = 0;
    int i;
    for (i = 0; i < mt_params_count(params); i++) n += params->list[i]->value.rows * params->list[i]->value.cols;
    return n;
}

MT_API int64_t mt_params_global_elements(const mt_params *params) {
    int64_t n = 0;
    int i;
    for (i = 0; i < mt_params_count(params); i++) n += params->list[i]->desc.rows * params->list[i]->desc.cols;
    return n;
}

/* Returns the smallest number that is infinite after it is rounded to a type. */
static float mti_too_large(mt_dtype dtype) {
    return dtype == MT_F16 ? 65520.0f : dtype == MT_BF16 ? 3.39617753e38f : (float)INFINITY;
}

/* Returns the index of the first element that a type cannot hold as a finite number, or n. */
static int64_t mti_unfit(const float *x, int64_t n, mt_dtype dtype) {
    float limit = mti_too_large(dtype);
    int64_t i = 0;
    while (i < n && fabsf(x[i]) < limit) i++; /* a NaN is not less */
    return i;
}

/* Returns MT_ERR_DATA for element `index` of a tensor, which has the value x. */
static mt_status mti_unfit_fail(mt_context *ctx, const char *where, const char *name, int64_t index, float x,
                                mt_dtype dtype) {
    char text[32], wanted[48] = "must be a finite number";
    if (isfinite(x)) snprintf(wanted, sizeof wanted, "too large for %s", mt_dtype_name(dtype));
    return mt_fail(ctx, MT_ERR_DATA, "%s: element %lld of '%.150s' is %s, %s", where, (long long)index, name,
                   mt_f32_digits(isnan(x) ? (float)NAN : x, text), wanted);
}

/* Refuses finite elements that a type cannot hold. It keeps infinities and NaN. */
static mt_status mti_narrow_check(mt_context *ctx, const char *function, const mt_param *p, const float *global,
                                  mt_dtype dtype) {
    int64_t n = p->desc.rows * p->desc.cols, i;
    if (dtype == MT_F32) return MT_SUCCESS;
    for (i = mti_unfit(global, n, dtype); i < n; i += 1 + mti_unfit(global + i + 1, n - i - 1, dtype))
        if (isfinite(global[i])) return mti_unfit_fail(ctx, function, p->name, i, global[i], dtype);
    return MT_SUCCESS;
}

/* Copies rows between the device and the host. Rows of another type than f32 are converted in the arena. */
static mt_status mti_rows_copy(mt_context *ctx, mt_tensor rows, float *host, int to_host) {
    size_t mark = mt_arena_mark(ctx);
    mt_tensor f32 = rows;
    int other = rows.dtype != MT_F32;
    if (other) MT_TRY(mt_arena_tensor(ctx, MT_F32, rows.rows, rows.cols, &f32));
    if (other && to_host) MT_TRY(mt_convert(ctx, rows, f32));
    if (to_host) mt_check_pause(ctx); /* a gradient may be a term of a sum that mt_sync_gradients computes later */
    MT_TRY(to_host ? mt_check_resume(ctx, mt_download(ctx, f32, host)) : mt_upload(ctx, host, f32));
    if (other && !to_host) MT_TRY(mt_convert(ctx, f32, rows));
    mt_arena_release(ctx, mark);
    return MT_SUCCESS;
}

/* Copies between a run of a shard and the whole tensor on the host. Copies row by row where the run is not contiguous
   there. */
static mt_status mti_run_copy(mt_context *ctx, mt_tensor run, float *host, int64_t host_ld, int to_host) {
    int64_t i, step = host_ld == run.cols ? run.rows : 1;
    for (i = 0; i < run.rows; i += step)
        MT_TRY(mti_rows_copy(ctx, mt_tensor_rows(run, i, step), host + i * host_ld, to_host));
    return MT_SUCCESS;
}

/* Copies between the shard of tensor rank `rank` and the whole tensor on the host. */
static mt_status mti_shard_copy(mt_context *ctx, const mt_param *p, int rank, mt_tensor shard, float *global,
                                int to_host) {
    int64_t at = 0;
    mti_shard_run run;
    while (mti_run_next(p, rank, &at, &run)) {
        int64_t offset = p->desc.placement == MT_SPLIT_COLS ? run.global : run.global * p->desc.cols;
        MT_TRY(mti_run_copy(ctx, mti_run_view(p, shard, run), global + offset, p->desc.cols, to_host));
    }
    return MT_SUCCESS;
}

/* Checks a shard of p and another pointer, which the message calls host_name. Fills in the zeros of a gradient that has
   none yet. */
static mt_status mti_shard_check(mt_context *ctx, const char *function, const mt_param *p, mt_tensor shard,
                                 const char *host_name, const void *host) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!p || !shard.data || !host)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL", function, !p ? "param" : host ? "shard" : host_name);
    if (!mt_dtype_is_float(shard.dtype))
        return mt_fail(ctx, MT_ERR_DTYPE, "%s: the shard is %s, must be f32, bf16 or f16", function,
                       mt_dtype_name(shard.dtype));
    if (shard.rows != p->value.rows || shard.cols != p->value.cols || mt_tensor_ld(shard) != shard.cols)
        return mt_fail(ctx, MT_ERR_SHAPE,
                       "%s: the shard of '%s' is [%lld, %lld], contiguous; got [%lld, %lld], ld %lld", function,
                       p->name, (long long)p->value.rows, (long long)p->value.cols, (long long)shard.rows,
                       (long long)shard.cols, (long long)mt_tensor_ld(shard));
    return shard.data == p->grad.data ? mti_gradient_fill(ctx, p) : MT_SUCCESS;
}

MT_API mt_status mt_param_scatter(mt_context *ctx, const mt_param *param, const float *global, mt_tensor shard) {
    float *host;
    size_t mark;
    mt_status status;
    MT_TRY(mti_shard_check(ctx, "mt_param_scatter", param, shard, "global", global));
    MT_TRY(mti_pointer_check(ctx, "mt_param_scatter", param));
    MT_TRY(mti_narrow_check(ctx, "mt_param_scatter", param, global, shard.dtype));
    if (param->registry) mt_gemm_unpack(param->registry->ctx, shard);
    mark = mt_arena_mark(ctx);
    memcpy(&host, &global, sizeof host); /* casts const away; with to_host 0, mti_shard_copy only reads host */
    status = mti_shard_copy(ctx, param, param->tp_rank, shard, host, 0);
    mt_arena_release(ctx, mark);
    return status;
}

static mt_status mti_param_gather(mt_context *ctx, mt_params *params, const mt_param *p, mt_tensor shard,
                                  float *global) {
    mt_tensor all;
    int r;
    if (p->desc.placement == MT_REPLICATED || p->tp_size == 1) return mti_shard_copy(ctx, p, 0, shard, global, 1);
    MT_TRY(mt_arena_tensor(ctx, shard.dtype, shard.rows * p->tp_size, shard.cols, &all));
    MT_TRY(mt_all_gather(ctx, params->grid->tp, shard.data, all.data, (size_t)(shard.rows * shard.cols), shard.dtype));
    for (r = 0; r < p->tp_size; r++)
        MT_TRY(mti_shard_copy(ctx, p, r, mt_tensor_rows(all, r * shard.rows, shard.rows), global, 1));
    return MT_SUCCESS;
}

MT_API mt_status mt_param_gather(mt_context *ctx, mt_params *params, const mt_param *param, mt_tensor shard,
                                 float *global) {
    size_t mark;
    mt_status status;
    MT_TRY(mti_params_ready(ctx, params, "mt_param_gather"));
    MT_TRY(mti_shard_check(ctx, "mt_param_gather", param, shard, "global", global));
    mark = mt_arena_mark(ctx);
    status = mti_param_gather(ctx, params, param, shard, global);
    mt_arena_release(ctx, mark);
    return status;
}

/* Checks the desc of a shard, and makes *out a parameter of its rank. */
static mt_status mti_shard_param(const mt_shard *shard, mt_dtype dtype, mt_param *out) {
    mt_param_desc d;
    int v, ranks;
    if (!shard) return MT_ERR_ARGUMENT;
    memset(&d, 0, sizeof d);
    d.name = "";
    d.rows = shard->rows;
    d.cols = shard->cols;
    d.placement = shard->placement;
    d.parts = shard->parts;
    d.unit = shard->unit;
    MT_TRY(mti_sharding_check(NULL, "", &d));
    v = shard->invariant;
    ranks = shard->tp_size ? shard->tp_size : 1;
    if (ranks < 1 || shard->tp_rank < 0 || shard->tp_rank >= ranks || v < 0 || v > MTI_SHARDS_MAX || (v & (v - 1)))
        return MT_ERR_ARGUMENT;
    if (v % ranks != 0) return MT_ERR_SHAPE;
    mti_param_describe(out, &d, shard->tp_rank, ranks, v ? v / ranks : 1, dtype);
    return MT_SUCCESS;
}

MT_API mt_status mt_shard_size(const mt_shard *shard, int64_t *rows, int64_t *cols) {
    mt_param p;
    if (!rows || !cols) return MT_ERR_ARGUMENT;
    MT_TRY(mti_shard_param(shard, MT_F32, &p));
    *rows = p.value.rows;
    *cols = p.value.cols;
    return MT_SUCCESS;
}

static void mti_host_copy(mt_tensor from, mt_tensor to) {
    size_t size = mt_dtype_size(to.dtype), i;
    for (i = 0; i < (size_t)to.rows; i++)
        memcpy((char *)to.data + i * (size_t)mt_tensor_ld(to) * size,
               (const char *)from.data + i * (size_t)mt_tensor_ld(from) * size, (size_t)to.cols * size);
}

/* Returns 1 when [a, a + a_bytes) and [b, b + b_bytes) overlap. */
static int mti_bytes_overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
    uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return x < y ? y - x < a_bytes : x - y < b_bytes;
}

MT_API mt_status mt_shard_copy(const mt_shard *shard, mt_dtype dtype, int to_whole, const void *from, void *to) {
    size_t size = mt_dtype_size(dtype), bytes, whole_bytes;
    mt_param p;
    mt_tensor whole;
    mti_shard_run run;
    int64_t at = 0;
    MT_TRY(mti_shard_param(shard, dtype, &p));
    if (!from || !to) return MT_ERR_ARGUMENT;
    if (size == 0) return MT_ERR_DTYPE;
    whole = mt_tensor_make(to_whole ? to : from, dtype, p.desc.rows, p.desc.cols);
    p.value = mt_tensor_make(to_whole ? from : to, dtype, p.value.rows, p.value.cols);
    bytes = (size_t)(p.value.rows * p.value.cols) * size;
    whole_bytes = (size_t)(whole.rows * whole.cols) * size;
    if (mti_bytes_overlap(whole.data, whole_bytes, p.value.data, bytes)) return MT_ERR_ARGUMENT;
    if (!to_whole) memset(to, 0, bytes);
    while (mti_run_next(&p, p.tp_rank, &at, &run)) {
        mt_tensor there = mti_run_of_whole(&p, whole, run), here = mti_run_view(&p, p.value, run);
        mti_host_copy(to_whole ? here : there, to_whole ? there : here);
    }
    return MT_SUCCESS;
}

static mt_status mti_declare_shard(mt_context *ctx, const mt_comm *tp, const mt_comm *dp, const mt_own_weight *w) {
    int64_t rows, cols, parts = w->shard.parts ? w->shard.parts : 1;
    mt_placement placement = w->shard.placement;
    mt_tensor value, grad;
    mt_status status = mt_shard_size(&w->shard, &rows, &cols);
    if (status != MT_SUCCESS) return mt_fail(ctx, status, "mt_declare_shards: the shard of '%.100s'", w->name);
    value = mt_tensor_make(w->value, w->dtype, rows, cols);
    if (cols == 1) value = mt_tensor_make(w->value, w->dtype, 1, rows); /* a bias, which operators take in one row */
    if (cols == 1 && placement == MT_SPLIT_ROWS) placement = MT_SPLIT_COLS;
    grad = value;
    grad.data = w->grad;
    grad.dtype = MT_F32;
    if (!w->grad) grad = mt_none();
    MT_TRY(mti_own_guard(ctx, w->name, grad, placement == MT_REPLICATED));
    return mt_declare_parameter(ctx, w->name, tp, dp, value, grad, placement, parts, 0);
}

MT_API mt_status mt_declare_shards(mt_context *ctx, const mt_comm *tp, const mt_comm *dp, const mt_own_weight *list,
                                   int count) {
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (count < 0 || (count > 0 && !list))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_declare_shards: list is NULL, or count is %d", count);
    for (i = 0; i < count; i++)
        if (!list[i].name || !list[i].value)
            return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_declare_shards: %s of weight %d is NULL",
                           list[i].name ? "value" : "name", i);
    mt_check_track(ctx);
    for (i = 0; i < count; i++) MT_TRY(mti_declare_shard(ctx, tp, dp, &list[i]));
    return MT_SUCCESS;
}
