/* ---- checks of arguments ----------------------------------------------------------------------------------------- */

#pragma once
#include "options.c"
#include "../comm/hash.c"

#define MTI_COUNT(list) ((int)(sizeof(list) / sizeof *(list)))

static mt_status mti_expect_dtype(mt_context *ctx, const char *where, const char *name, mt_dtype dtype) {
    if (mt_dtype_size(dtype) == 0)
        return mt_fail(ctx, MT_ERR_DTYPE, "%s: %s.dtype is %d, must be MT_F32, MT_BF16, MT_F16, MT_I32 or MT_U8", where,
                       name, (int)dtype);
    return MT_SUCCESS;
}

/* Whether a view has no element. An operator does nothing on such a view. */
static int mti_is_empty(mt_tensor t) { return t.rows == 0 || t.cols == 0; }

/* Accepts every valid shape and type. data may be NULL if the view has no element. */
static mt_status mti_expect_view(mt_context *ctx, const char *where, const char *name, mt_tensor t) {
    int64_t ld = mt_tensor_ld(t);
    if (t.rows < 0 || t.cols < 0 || ld < t.cols || mt_size_mul(mt_size_mul(t.rows, ld), 8) < 0)
        return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s is [%lld, %lld] with ld %lld, which is not a valid shape", where,
                       name, (long long)t.rows, (long long)t.cols, (long long)t.ld);
    MT_TRY(mti_expect_dtype(ctx, where, name, t.dtype));
    if (mti_is_empty(t)) return MT_SUCCESS;
    if (!t.data)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is [%lld, %lld] but its data is NULL", where, name,
                       (long long)t.rows, (long long)t.cols);
    if (mt_context_has_address(ctx, t.data) && (uintptr_t)t.data % mt_dtype_size(t.dtype))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the data of %s, %p, is not aligned to its %zu-byte elements", where,
                       name, t.data, mt_dtype_size(t.dtype));
    return MT_SUCCESS;
}

static mt_status mti_expect_type(mt_context *ctx, const char *where, const mt_arg *arg) {
    mt_dtype dtype = arg->view->dtype;
    if (arg->type == MT_ARG_F32 && dtype != MT_F32)
        return mt_fail(ctx, MT_ERR_DTYPE, "%s: %s is %s, must be f32", where, arg->name, mt_dtype_name(dtype));
    if (arg->type == MT_ARG_FLOAT && !mt_dtype_is_float(dtype))
        return mt_fail(ctx, MT_ERR_DTYPE, "%s: %s is %s, must be f32, bf16 or f16", where, arg->name,
                       mt_dtype_name(dtype));
    return MT_SUCCESS;
}

MT_API mt_status mt_set_sum_check(mt_context *ctx, mt_sum_check check) {
    mti_kernels *k;
    if (!ctx) return MT_ERR_ARGUMENT;
    MT_TRY(mti_kernels_open(ctx, &k));
    k->sum_check = check;
    return MT_SUCCESS;
}

static mt_status mti_expect_sums(mt_context *ctx, const char *where, const mt_arg *args, int count) {
    const mti_kernels *k = (const mti_kernels *)mt_context_slot(ctx, MT_SLOT_KERNELS);
    return k && k->sum_check ? (k->sum_check)(ctx, where, args, count) : MT_SUCCESS;
}

MT_API mt_status mt_args_check(mt_context *ctx, const char *where, const mt_arg *args, int count) {
    int i;
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!where || count < 0 || (count > 0 && !args))
        return mt_fail(ctx, MT_ERR_ARGUMENT, "mt_args_check: where or args is NULL, or count is negative");
    for (i = 0; i < count; i++) {
        mt_tensor t;
        if (!args[i].view || !args[i].name)
            return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: the view or the name of args[%d] is NULL", where, i);
        t = *args[i].view;
        if ((args[i].use & MT_ARG_OPTIONAL) && !t.data) continue;
        MT_TRY(mti_expect_view(ctx, where, args[i].name, t));
        MT_TRY(mti_expect_type(ctx, where, &args[i]));
        if (t.rows != args[i].rows || t.cols != args[i].cols)
            return mt_fail(ctx, MT_ERR_SHAPE, "%s: %s is [%lld, %lld], must be [%lld, %lld]", where, args[i].name,
                           (long long)t.rows, (long long)t.cols, (long long)args[i].rows, (long long)args[i].cols);
    }
    return mti_expect_sums(ctx, where, args, count);
}

MT_API mt_status mt_tensor_check(mt_context *ctx, const char *where, const char *name, mt_tensor t, int type,
                                 int64_t rows, int64_t cols) {
    mt_arg arg;
    arg.name = name, arg.view = &t;
    arg.rows = rows, arg.cols = cols;
    arg.type = type, arg.use = MT_ARG_IN;
    return mt_args_check(ctx, where, &arg, 1);
}

static mt_status mti_expect_pointer(mt_context *ctx, const char *where, const char *name, const void *ptr,
                                    int64_t count) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (count < 0) return mt_fail(ctx, MT_ERR_SHAPE, "%s: the count of %s is %lld", where, name, (long long)count);
    if (!ptr && count > 0)
        return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s is NULL, must hold %lld elements", where, name, (long long)count);
    return MT_SUCCESS;
}

/* Whether b, whose memory begins in that of a, uses other columns of the rows of a. */
static int mti_other_columns(mt_tensor a, mt_tensor b) {
    int64_t size_a = (int64_t)mt_dtype_size(a.dtype), size_b = (int64_t)mt_dtype_size(b.dtype);
    int64_t pitch = mt_size_mul(mt_tensor_ld(a), size_a), from;
    if (pitch < 1 || size_b < 1 || a.cols > mt_tensor_ld(a)) return 0;
    if (b.rows > 1 && mt_size_mul(mt_tensor_ld(b), size_b) != pitch) return 0;
    from = (int64_t)(((uintptr_t)b.data - (uintptr_t)a.data) % (uintptr_t)pitch);
    return from >= a.cols * size_a && b.cols <= (pitch - from) / size_b;
}

/* Whether two valid views have elements in the same memory. */
static int mti_views_overlap(mt_context *ctx, mt_tensor a, mt_tensor b) {
    mt_tensor first = (uintptr_t)a.data <= (uintptr_t)b.data ? a : b;
    mt_tensor second = (uintptr_t)a.data <= (uintptr_t)b.data ? b : a;
    if (!a.data || !b.data || a.rows < 1 || b.rows < 1 || a.cols < 1 || b.cols < 1) return 0;
    if ((uintptr_t)second.data - (uintptr_t)first.data >= mti_view_span(first)) return 0;
    if (!mt_context_has_address(ctx, a.data) || !mt_context_has_address(ctx, b.data)) return 0;
    return !mti_other_columns(first, second);
}

MT_API mt_status mt_check_apart(mt_context *ctx, const char *where, const char *a_name, mt_tensor a, const char *b_name,
                                mt_tensor b) {
    if (!ctx) return MT_ERR_ARGUMENT;
    if (!mti_views_overlap(ctx, a, b)) return MT_SUCCESS;
    return mt_fail(ctx, MT_ERR_ARGUMENT, "%s: %s [%lld, %lld] and %s [%lld, %lld] overlap", where, a_name,
                   (long long)a.rows, (long long)a.cols, b_name, (long long)b.rows, (long long)b.cols);
}

static mt_status mti_expect_finite(mt_context *ctx, const char *where, const char *name, float value) {
    return mt_check_float(ctx, where, NULL, name, value, MT_FLOAT_FINITE);
}

/* Refuses a field. `is` is its value. */
static mt_status mti_field_fail(mt_context *ctx, mt_status status, const char *function, const char *name,
                                const char *field, const char *is, const char *wanted) {
    if (!function) function = "";
    if (!field) field = "a field";
    if (!name) return mt_fail(ctx, status, "%s: %s is %s, must be %s", function, field, is, wanted);
    return mt_fail(ctx, status, "%s: '%s': %s is %s, must be %s", function, name, field, is, wanted);
}

static mt_status mti_integer_check(mt_context *ctx, mt_status status, const char *function, const char *name,
                                   const char *field, int64_t value, int64_t low, int64_t high) {
    char is[32], wanted[64];
    if (value >= low && value <= high) return MT_SUCCESS;
    snprintf(is, sizeof is, "%lld", (long long)value);
    if (high == INT64_MAX) snprintf(wanted, sizeof wanted, "at least %lld", (long long)low);
    else if (low < high && low == high - 1)
        snprintf(wanted, sizeof wanted, "%lld or %lld", (long long)low, (long long)high);
    else snprintf(wanted, sizeof wanted, "from %lld to %lld", (long long)low, (long long)high);
    return mti_field_fail(ctx, status, function, name, field, is, wanted);
}

MT_API mt_status mt_check_integer(mt_context *ctx, const char *function, const char *name, const char *field,
                                  int64_t value, int64_t low, int64_t high) {
    return mti_integer_check(ctx, MT_ERR_ARGUMENT, function, name, field, value, low, high);
}

MT_API mt_status mt_check_size(mt_context *ctx, const char *function, const char *name, const char *field,
                               int64_t value, int64_t low, int64_t high) {
    return mti_integer_check(ctx, MT_ERR_SHAPE, function, name, field, value, low, high);
}

/* Returns the number of words, which have spaces between them. */
static int mti_word_count(const char *words) {
    int count = 1;
    for (; *words; words++) count += *words == ' ';
    return count;
}

MT_API mt_status mt_check_enum(mt_context *ctx, const char *function, const char *name, const char *field, int value,
                               const char *words) {
    char is[16], wanted[512];
    int count;
    size_t n = 0;
    if (!words) return mti_field_fail(ctx, MT_ERR_ARGUMENT, function, name, "words", "NULL", "the words of an enum");
    count = mti_word_count(words);
    if (value >= 0 && value < count) return MT_SUCCESS;
    for (; *words && n + 5 < sizeof wanted; words++) {
        const char *between = " or ";
        if (*words != ' ') {
            wanted[n++] = *words;
            continue;
        }
        if (--count > 1) between = ", ";
        memcpy(wanted + n, between, strlen(between));
        n += strlen(between);
    }
    wanted[n] = 0;
    snprintf(is, sizeof is, "%d", value);
    return mti_field_fail(ctx, MT_ERR_ARGUMENT, function, name, field, is, wanted);
}

MT_API void mt_enum_word(const char *words, int value, char text[MT_WORD_MAX]) {
    int i;
    if (!text) return;
    snprintf(text, MT_WORD_MAX, "%d", value);
    if (!words || value < 0 || value >= mti_word_count(words)) return;
    for (i = 0; i < value; i++) words = strchr(words, ' ') + 1;
    snprintf(text, MT_WORD_MAX, "%.*s", (int)strcspn(words, " "), words);
}

MT_API mt_status mt_check_float(mt_context *ctx, const char *function, const char *name, const char *field, float value,
                                mt_float_range range) {
    static const char *const wanted[] = {"finite", "at least 0 and finite", "above 0 and finite",
                                         "at least 0 and below 1"};
    char is[32];
    int finite = value >= -FLT_MAX && value <= FLT_MAX; /* a NaN is not */
    MT_TRY(mt_check_integer(ctx, function, name, "mt_float_range", (int)range, 0, MT_FLOAT_PROBABILITY));
    if (finite && (range != MT_FLOAT_ABOVE_0 || value > 0.0f) && (range != MT_FLOAT_PROBABILITY || value < 1.0f) &&
        (range == MT_FLOAT_FINITE || value >= 0.0f))
        return MT_SUCCESS;
    snprintf(is, sizeof is, "%g", (double)value);
    return mti_field_fail(ctx, MT_ERR_ARGUMENT, function, name, field, is, wanted[range]);
}
