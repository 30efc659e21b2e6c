/* ---- copies on the device, and from and to the host -------------------------------------------------------------- */

#pragma once
#include "dispatch.c"
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

MT_API mt_status mt_copy(mt_context *ctx, mt_tensor x, mt_tensor y) {
    mt_arg args[] = {{"x", &x, x.rows, x.cols, MT_ARG_ANY, MT_ARG_IN | MT_ARG_MOVED},
                     {"y", &y, y.rows, y.cols, MT_ARG_ANY, MT_ARG_OUT}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, "mt_copy", args, MTI_COUNT(args)));
    if (x.dtype != y.dtype)
        return mt_fail(ctx, MT_ERR_DTYPE, "mt_copy: x is %s and y is %s, must be the same", mt_dtype_name(x.dtype),
                       mt_dtype_name(y.dtype));
    if (x.rows != y.rows || x.cols != y.cols)
        return mt_fail(ctx, MT_ERR_SHAPE, "mt_copy: x is [%lld, %lld], y is [%lld, %lld], must be the same",
                       (long long)x.rows, (long long)x.cols, (long long)y.rows, (long long)y.cols);
    MT_TRY(mti_expect_same_or_apart(ctx, "mt_copy", x, y));
    MT_TRY(mti_begin(&op, ctx, "mt_copy", args, MTI_COUNT(args)));
    return mti_end(&op, MTI_RUN(&op, mti_cuda_copy_view(ctx, x, y), mti_cpu_copy(ctx, x, y)));
}

MT_API mt_status mt_upload(mt_context *ctx, const void *host, mt_tensor y) {
    mt_arg args[] = {{"y", &y, y.rows, y.cols, MT_ARG_ANY, MT_ARG_OUT}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, "mt_upload", args, MTI_COUNT(args)));
    MT_TRY(mti_expect_pointer(ctx, "mt_upload", "host", host, y.rows * y.cols));
    MT_TRY(mti_begin(&op, ctx, "mt_upload", args, MTI_COUNT(args)));
    return mti_end(&op, MTI_RUN(&op, mti_cuda_upload(ctx, host, y),
                                mti_cpu_copy(ctx, mt_tensor_make(host, y.dtype, y.rows, y.cols), y)));
}

MT_API mt_status mt_download(mt_context *ctx, mt_tensor x, void *host) {
    static const char *const where = "mt_download";
    static const mt_rule rule = {"x", "R r c", NULL}; /* for floats: ids and bytes have no placement to check */
    mt_arg args[] = {{"x", &x, x.rows, x.cols, MT_ARG_ANY, MT_ARG_IN}};
    mti_operator op;
    MT_TRY(mt_args_check(ctx, where, args, MTI_COUNT(args)));
    MT_TRY(mti_expect_pointer(ctx, where, "host", host, x.rows * x.cols));
    if (mt_dtype_is_float(x.dtype)) MT_TRY(mti_apply_rule(ctx, where, &rule, args, MTI_COUNT(args)));
    if (mt_context_device(ctx) == MT_DEVICE_META && !mti_is_empty(x))
        memset(host, 0, (size_t)(x.rows * x.cols) * mt_dtype_size(x.dtype));
    MT_TRY(mti_begin(&op, ctx, where, args, MTI_COUNT(args)));
    return mti_end(&op, MTI_RUN(&op, mti_cuda_download(ctx, x, host),
                                mti_cpu_copy(ctx, x, mt_tensor_make(host, x.dtype, x.rows, x.cols))));
}
