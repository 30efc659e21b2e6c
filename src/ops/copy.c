/* ---- copies on the device, and from and to the host -------------------------------------------------------------- */

#pragma once
#include "operator.c"
#include "copy.cuh"

/* y = x, in any type. Uses memmove because y may be x. */
static void mti_copy_stripes(void *data, int thread, int64_t first, int64_t last) {
    const mti_conversion *c = (const mti_conversion *)data;
    int64_t i, count;
    (void)thread;
    for (i = first; i < last; i += count) {
        mti_stripe p = mti_stripes_of_row(c->x.cols, i, last, &count);
        memmove(mti_bytes_at(c->y, p.row, p.col), mti_bytes_at(c->x, p.row, p.col),
                (size_t)p.cols * mt_dtype_size(c->x.dtype));
    }
}

static void mti_cpu_copy(mt_context *ctx, mt_tensor x, mt_tensor y) {
    mti_conversion c = {x, y};
    mti_cpu_stripes(ctx, x.rows, x.cols, mti_copy_stripes, &c);
}

/* clang-format off */
static const mti_table mti_copy_table = {"mt_copy", {"x y", "RR rr cc PP", NULL}, {
    {"x", "nm", MT_ARG_ANY, MT_ARG_IN | MT_ARG_MOVED, NULL},
    {"y", "ij", MT_ARG_ANY, MT_ARG_OUT, "=x"}}};

static const mti_table mti_upload_table = {"mt_upload", {NULL, NULL, NULL}, {
    {"y", "nm", MT_ARG_ANY, MT_ARG_OUT, NULL}}};

/* The rule is for floats: ids and bytes have no placement to check. */
static const mti_table mti_download_table = {"mt_download", {"x", "R r c", NULL}, {
    {"x", "nm", MT_ARG_ANY, MT_ARG_IN, NULL}}};
/* clang-format on */

MT_API mt_status mt_copy(mt_context *ctx, mt_tensor x, mt_tensor y) {
    mt_tensor *views[] = {&x, &y};
    mti_operator op;
    mti_operands(&op, ctx, &mti_copy_table, views, NULL);
    MT_TRY(mt_args_check(ctx, "mt_copy", op.args, op.views));
    if (x.dtype != y.dtype)
        return mt_fail(ctx, MT_ERR_DTYPE, "mt_copy: x is %s and y is %s, must be the same", mt_dtype_name(x.dtype),
                       mt_dtype_name(y.dtype));
    if (x.rows != y.rows || x.cols != y.cols)
        return mt_fail(ctx, MT_ERR_SHAPE, "mt_copy: x is [%lld, %lld], y is [%lld, %lld], must be the same",
                       (long long)x.rows, (long long)x.cols, (long long)y.rows, (long long)y.cols);
    MT_TRY(mti_expect_all_apart(&op));
    MT_TRY(mti_begin(&op));
    return mti_end(&op, MTI_RUN(&op, mti_cuda_copy_view(ctx, x, y), mti_cpu_copy(ctx, x, y)));
}

MT_API mt_status mt_upload(mt_context *ctx, const void *host, mt_tensor y) {
    mt_tensor *views[] = {&y};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_upload_table, views, NULL));
    MT_TRY(mti_expect_pointer(ctx, "mt_upload", "host", host, y.rows * y.cols));
    MT_TRY(mti_begin(&op));
    return mti_end(&op, MTI_RUN(&op, mti_cuda_upload(ctx, host, y),
                                mti_cpu_copy(ctx, mt_tensor_make(host, y.dtype, y.rows, y.cols), y)));
}

MT_API mt_status mt_download(mt_context *ctx, mt_tensor x, void *host) {
    mt_tensor *views[] = {&x};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_download_table, views, NULL));
    MT_TRY(mti_expect_pointer(ctx, "mt_download", "host", host, x.rows * x.cols));
    if (mt_dtype_is_float(x.dtype)) MT_TRY(mti_apply_rule(&op));
    if (mt_context_device(ctx) == MT_DEVICE_META && !mti_is_empty(x))
        memset(host, 0, (size_t)(x.rows * x.cols) * mt_dtype_size(x.dtype));
    MT_TRY(mti_start(&op));
    return mti_end(&op, MTI_RUN(&op, mti_cuda_download(ctx, x, host),
                                mti_cpu_copy(ctx, x, mt_tensor_make(host, x.dtype, x.rows, x.cols))));
}
