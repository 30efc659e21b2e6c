/* test_kernels_16bit.c - tests bf16 and f16: the conversions against the definition of the formats, and every operator
   in every combination of types against the f32 operator on widened inputs, rounded once at the end: the bits are
   equal. Only products of oneDNN may add in another order, and those in attention may have bf16 operands. When one of
   mt_linear_* calls two operators, its bits are those of the two. */

#define MEGATRON_IMPLEMENTATION
#include "mt_kernels.cuh"
#include "mt_test.h"
#include "mt_reference.h"

#include <float.h>

/* ---- the two formats, by definition ----------------------------------------------------------------------------- */

#define PATTERNS 65536
#define GUARD16 0x7fe5u /* a NaN in both formats */

static uint32_t f32_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static float f32_from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

typedef struct format {
    mt_dtype dtype;
    int exponent_bits, mantissa_bits;
    uint16_t infinity;
} format;

static const format formats[2] = {{MT_BF16, 8, 7, 0x7f80}, {MT_F16, 5, 10, 0x7c00}};
static double magnitudes[2][0x8000]; /* of the bit patterns without sign; infinity counts as the next power of two */

static const format *format_of(mt_dtype dtype) { return &formats[dtype == MT_F16]; }

static int is_nan16(mt_dtype dtype, uint16_t h) { return (h & 0x7fff) > format_of(dtype)->infinity; }

static int fill_magnitudes(void **state) {
    int f, p;
    (void)state;
    for (f = 0; f < 2; f++)
        for (p = 0; p <= formats[f].infinity; p++) {
            int bias = (1 << (formats[f].exponent_bits - 1)) - 1, one = 1 << formats[f].mantissa_bits;
            int exponent = p / one, mantissa = p % one;
            if (exponent == 0) exponent = 1;
            else mantissa += one;
            magnitudes[f][p] = ldexp((double)mantissa, exponent - bias - formats[f].mantissa_bits);
        }
    return 0;
}

static float widened(mt_dtype dtype, uint16_t h) {
    uint16_t size = h & 0x7fff;
    double value = magnitudes[dtype == MT_F16][size];
    if (is_nan16(dtype, h)) return NAN;
    if (size == format_of(dtype)->infinity) value = INFINITY;
    return (float)(h & 0x8000 ? -value : value);
}

/* The nearer of two neighbours; in the middle, the even one. */
static uint16_t rounded(mt_dtype dtype, float x) {
    const double *value = magnitudes[dtype == MT_F16];
    int low = 0, high = format_of(dtype)->infinity;
    double size = fabs((double)x), middle;
    if (x != x) return GUARD16; /* any NaN is correct */
    if (size >= value[high]) low = high;
    while (high - low > 1) {
        int p = (low + high) / 2;
        if (value[p] <= size) low = p;
        else high = p;
    }
    middle = (value[low] + value[high]) / 2; /* exact */
    if (size > middle || (size == middle && low % 2 == 1)) low = high;
    return (uint16_t)(low | (signbit(x) ? 0x8000 : 0));
}

static int same16(mt_dtype dtype, uint16_t a, uint16_t b) {
    return a == b || (is_nan16(dtype, a) && is_nan16(dtype, b));
}

/* ---- views of any type ------------------------------------------------------------------------------------------ */

static uint16_t *row16(mt_tensor t, int64_t i) { return (uint16_t *)t.data + i * (t.ld ? t.ld : t.cols); }

/* A view full of guard values with ld = cols + pad, in memory of exactly this size. */
static mt_tensor new_view(mt_dtype dtype, int64_t rows, int64_t cols, int64_t pad) {
    int64_t ld = cols + pad, n = rows > 0 && cols > 0 ? (rows - 1) * ld + cols : 0, i;
    uint16_t *data;
    mt_tensor t;
    if (dtype == MT_F32) return ref_guarded(rows, cols, pad);
    data = (uint16_t *)ref_bytes((size_t)n * sizeof(uint16_t));
    for (i = 0; i < n; i++) data[i] = GUARD16;
    t = mt_tensor_make(data, dtype, rows, cols);
    t.ld = ld;
    return t;
}

static float get(mt_tensor t, int64_t i, int64_t j) {
    return t.dtype == MT_F32 ? ref_row(t, i)[j] : widened(t.dtype, row16(t, i)[j]);
}

static void put(mt_tensor t, int64_t i, int64_t j, float x) {
    if (t.dtype == MT_F32) ref_row(t, i)[j] = x;
    else row16(t, i)[j] = rounded(t.dtype, x);
}

/* Whether x, of the type, is a number from low to high, rounded. */
static int is_between(mt_dtype dtype, float x, float low, float high) {
    if (dtype == MT_F32) return x >= low && x <= high;
    return x >= widened(dtype, rounded(dtype, low)) && x <= widened(dtype, rounded(dtype, high));
}

/* Checks that every element of t is that of the f32 view, or a number that differs from it by at most `slack`, rounded,
   and that the gaps between rows still contain guards. */
static void assert_rounded(mt_tensor t, mt_tensor want, float slack, const char *what) {
    int64_t i, j;
    for (i = 0; i < t.rows; i++) {
        for (j = 0; j < t.cols; j++) {
            float w = ref_row(want, i)[j];
            int same = t.dtype == MT_F32 ? f32_bits(ref_row(t, i)[j]) == f32_bits(w)
                                         : same16(t.dtype, row16(t, i)[j], rounded(t.dtype, w));
            same |= slack > 0 && is_between(t.dtype, get(t, i, j), w - slack, w + slack);
            if (!same)
                fail_msg("%s: [%ld, %ld] is %.9g, must be %.9g as %s", what, (long)i, (long)j, (double)get(t, i, j),
                         (double)w, mt_dtype_name(t.dtype));
        }
        for (j = t.cols; t.dtype != MT_F32 && t.cols > 0 && i + 1 < t.rows && j < t.ld; j++)
            if (row16(t, i)[j] != GUARD16) fail_msg("%s: row %ld was written past its end", what, (long)i);
    }
}

/* ---- conversions ------------------------------------------------------------------------------------------------ */

/* All bit patterns, in rows of 31, so that vector loops end in the middle of a row. */
static mt_tensor all_patterns(mt_dtype dtype) {
    mt_tensor t = new_view(dtype, PATTERNS / 31 + 1, 31, 2);
    int64_t i, j;
    for (i = 0; i < t.rows; i++)
        for (j = 0; j < t.cols; j++) row16(t, i)[j] = (uint16_t)(i * 31 + j);
    return t;
}

static void test_widen(void **state) {
    int f;
    (void)state;
    for (f = 0; f < 2; f++) {
        mt_tensor x = all_patterns(formats[f].dtype), y = new_view(MT_F32, x.rows, 31, 5), back;
        int64_t i, j;
        back = new_view(formats[f].dtype, x.rows, 31, 0);
        OK(mt_convert(ref.ctx, x, y));
        OK(mt_convert(ref.ctx, y, back));
        for (i = 0; i < x.rows; i++)
            for (j = 0; j < 31; j++) {
                uint16_t h = row16(x, i)[j];
                float got = ref_row(y, i)[j], want = widened(x.dtype, h);
                if (is_nan16(x.dtype, h) ? got == got : f32_bits(got) != f32_bits(want))
                    fail_msg("%s %04x is %.9g, must be %.9g", mt_dtype_name(x.dtype), h, (double)got, (double)want);
                if ((signbit(got) != 0) != (h >> 15)) fail_msg("%04x lost its sign", h);
                assert_true(same16(x.dtype, row16(back, i)[j], h));
                assert_int_equal(row16(back, i)[j] & 0x8000, h & 0x8000);
            }
    }
}

/* For every bit pattern: its value, the middle to the next value, and floats beside both, with both signs. */
static int64_t edge_floats(mt_dtype dtype, float *x) {
    const double *value = magnitudes[dtype == MT_F16];
    int64_t n = 0, k, half;
    int p;
    for (p = 0; p <= format_of(dtype)->infinity; p++) {
        double middle = p == format_of(dtype)->infinity ? value[p] : (value[p] + value[p + 1]) / 2;
        float exact = value[p] < (double)FLT_MAX ? (float)value[p] : INFINITY;
        float at = middle < (double)FLT_MAX ? (float)middle : FLT_MAX;
        x[n++] = exact;
        x[n++] = nextafterf(exact, INFINITY);
        x[n++] = at;
        x[n++] = nextafterf(at, 0.0f);
        x[n++] = nextafterf(at, INFINITY);
    }
    half = n;
    for (k = 0; k < half; k++) x[n++] = -x[k];
    return n;
}

static void check_rounding(mt_dtype dtype, const float *x, int64_t n) {
    mt_tensor y = new_view(dtype, 1, n, 0);
    int64_t j;
    OK(mt_convert(ref.ctx, mt_tensor_f32(x, 1, n), y));
    for (j = 0; j < n; j++) {
        uint16_t got = row16(y, 0)[j], want = rounded(dtype, x[j]), alone;
        if (!same16(dtype, got, want) || (signbit(x[j]) != 0) != (got >> 15))
            fail_msg("%.9g (%08x) as %s is %04x, must be %04x", (double)x[j], f32_bits(x[j]), mt_dtype_name(dtype), got,
                     want);
        /* a number alone is not rounded by vector instructions: the same bits, also of NaN */
        mt_f32_to_16bit(dtype, &x[j], &alone, 1);
        assert_int_equal(got, alone);
    }
}

static void test_round(void **state) {
    static const uint32_t ends[] = {0,          1,          0x007fffff, 0x00800000, 0x33000000, 0x33000001, 0x387fffff,
                                    0x477fefff, 0x477ff000, 0x477fffff, 0x47800000, 0x7f7f7fff, 0x7f7f8000, 0x7f7fffff,
                                    0x7f800000, 0x7f800001, 0x7f80ffff, 0x7f900000, 0x7fbfffff, 0x7fc00000, 0x7fffffff};
    enum { ENDS = sizeof ends / sizeof ends[0], DRAWN = 400000 };
    int f;
    (void)state;
    for (f = 0; f < 2; f++) {
        float *edges = (float *)ref_bytes((size_t)10 * 0x8001 * sizeof(float));
        float *drawn = (float *)ref_bytes(DRAWN * sizeof(float));
        float end[2 * ENDS];
        int64_t i;
        check_rounding(formats[f].dtype, edges, edge_floats(formats[f].dtype, edges));
        for (i = 0; i < 2 * ENDS; i++) end[i] = f32_from_bits(ends[i / 2] | (i % 2 ? 0x80000000u : 0u));
        check_rounding(formats[f].dtype, end, 2 * ENDS);
        for (i = 0; i < DRAWN; i++) drawn[i] = f32_from_bits((uint32_t)test_random(&ref.random));
        check_rounding(formats[f].dtype, drawn, DRAWN);
    }
}

/* Known bit patterns, because a definition written here could contain the same error as the library. */
static void test_known_bits(void **state) {
    static const float x[] = {1.0f,          -2.0f,         65504.0f,      65519.996f,  65520.0f,   6.1035156e-5f,
                              5.9604645e-8f, 2.9802322e-8f, 2.9802326e-8f, 0.33325195f, 3.1415927f, 3.4e38f,
                              -0.0f,         1.00390625f,   1.01171875f,   1e-40f};
    static const uint16_t f16[] = {0x3c00, 0xc000, 0x7bff, 0x7bff, 0x7c00, 0x0400, 0x0001, 0x0000,
                                   0x0001, 0x3555, 0x4248, 0x7c00, 0x8000, 0x3c04, 0x3c0c, 0x0000};
    static const uint16_t bf16[] = {0x3f80, 0xc000, 0x4780, 0x4780, 0x4780, 0x3880, 0x3380, 0x3300,
                                    0x3300, 0x3eab, 0x4049, 0x7f80, 0x8000, 0x3f80, 0x3f82, 0x0001};
    uint16_t got[16] = {0};
    (void)state;
    OK(mt_convert(ref.ctx, mt_tensor_f32(x, 1, 16), mt_tensor_make(got, MT_F16, 1, 16)));
    assert_memory_equal(got, f16, sizeof got);
    OK(mt_convert(ref.ctx, mt_tensor_f32(x, 1, 16), mt_tensor_make(got, MT_BF16, 1, 16)));
    assert_memory_equal(got, bf16, sizeof got);
}

/* bf16 to f16 and back, with more elements than a block of the conversion has; a type to itself; no elements. */
static void test_convert(void **state) {
    int f;
    (void)state;
    for (f = 0; f < 2; f++) {
        mt_dtype from = formats[f].dtype, to = formats[!f].dtype;
        mt_tensor x = new_view(from, 3, 32768, 1), y = new_view(to, 3, 32768, 3), z = new_view(from, 3, 32768, 0);
        int64_t i, j;
        for (i = 0; i < 3; i++)
            for (j = 0; j < x.cols; j++) row16(x, i)[j] = (uint16_t)(i * x.cols + j);
        OK(mt_convert(ref.ctx, x, y));
        for (i = 0; i < 3; i++)
            for (j = 0; j < x.cols; j++)
                if (!same16(to, row16(y, i)[j], rounded(to, get(x, i, j)))) fail_msg("%04x", row16(x, i)[j]);
        OK(mt_convert(ref.ctx, x, z));
        OK(mt_convert(ref.ctx, x, x));
        for (i = 0; i < 3; i++) assert_memory_equal(row16(x, i), row16(z, i), (size_t)x.cols * 2);
        OK(mt_convert(ref.ctx, new_view(from, 0, 5, 0), new_view(to, 0, 5, 0)));
        OK(mt_convert(ref.ctx, mt_tensor_make(NULL, from, 4, 0), mt_tensor_make(NULL, MT_F32, 4, 0)));
        ASSERT_REFUSED(MT_ERR_DTYPE, "mt_convert: y is i32, must be f32, bf16 or f16",
                       mt_convert(ref.ctx, x, mt_tensor_make(z.data, MT_I32, 3, 9)));
        ASSERT_REFUSED(MT_ERR_DTYPE, "mt_convert: x is u8",
                       mt_convert(ref.ctx, mt_tensor_make(z.data, MT_U8, 3, 9), y));
        ASSERT_REFUSED(MT_ERR_SHAPE, "mt_convert: y is [3, 9], must be [3, 32768]",
                       mt_convert(ref.ctx, x, mt_tensor_make(z.data, to, 3, 9)));
        ASSERT_REFUSED(MT_ERR_ARGUMENT, "mt_convert: y [3, 32768] and x [3, 32768] overlap",
                       mt_convert(ref.ctx, x, mt_tensor_make(x.data, to, 3, x.cols)));
        assert_int_equal(mt_convert(NULL, x, y), MT_ERR_ARGUMENT);
    }
}

/* Operators that only move bits accept every type. */
static void test_moves(void **state) {
    int f;
    (void)state;
    for (f = 0; f < 2; f++) {
        mt_tensor x = new_view(formats[f].dtype, 5, 7, 3), y = new_view(formats[f].dtype, 5, 7, 1);
        mt_tensor wide = ref_guarded(5, 7, 0);
        uint16_t host[35], back[35];
        uint64_t hash = 1, parts = 1, same = 1, other = 1;
        int64_t i, j;
        for (i = 0; i < 35; i++) host[i] = (uint16_t)(i * 1871 + 0x7f7f); /* some are NaN */
        OK(mt_upload(ref.ctx, host, x));
        OK(mt_copy(ref.ctx, x, y));
        OK(mt_download(ref.ctx, y, back));
        assert_memory_equal(host, back, sizeof host);
        for (i = 0; i < 5; i++)
            for (j = 0; j < 7; j++) {
                uint32_t bits = row16(x, i)[j];
                memcpy(ref_row(wide, i) + j, &bits, sizeof bits);
            }
        OK(mt_hash(ref.ctx, y, 2, 3, 50, &hash));
        OK(mt_hash(ref.ctx, mt_tensor_rows(y, 0, 2), 2, 3, 50, &parts));
        OK(mt_hash(ref.ctx, mt_tensor_cols(mt_tensor_rows(y, 2, 3), 0, 4), 4, 3, 50, &parts));
        OK(mt_hash(ref.ctx, mt_tensor_cols(mt_tensor_rows(y, 2, 3), 4, 3), 4, 7, 50, &parts));
        OK(mt_hash(ref.ctx, wide, 2, 3, 50, &same));
        assert_true(hash == parts && hash == same && hash != 1);
        row16(y, 4)[6] ^= 1;
        OK(mt_hash(ref.ctx, y, 2, 3, 50, &other));
        assert_true(other != hash);
        ASSERT_REFUSED(MT_ERR_DTYPE, "mt_copy: x is bf16 and y is f16",
                       mt_copy(ref.ctx, mt_tensor_make(x.data, MT_BF16, 5, 7), mt_tensor_make(y.data, MT_F16, 5, 7)));
        ASSERT_REFUSED(MT_ERR_DTYPE, "mt_hash: x is i32, must be f32, bf16 or f16",
                       mt_hash(ref.ctx, mt_tensor_make(x.data, MT_I32, 1, 2), 0, 0, 2, &hash));
    }
}

/* ---- every operator, in every combination of types -------------------------------------------------------------- */

#define VIEWS 11
#define PAIRS 6

typedef struct view {
    const char *name;
    int64_t rows, cols;
    int any;    /* any float type; otherwise f32 */
    int filled; /* has values before the call */
} view;

typedef struct operation {
    const char *name;
    mt_status (*run)(mt_context *c, const mt_tensor *v);
    view views[VIEWS];
    int in_place[PAIRS][2]; /* pairs {result, input} that may be the same memory; ended by {0, 0} */
} operation;

#define IN(name, rows, cols)                                                                                           \
    { name, rows, cols, 1, 1 }
#define OUT(name, rows, cols)                                                                                          \
    { name, rows, cols, 1, 0 }
#define F32(name, rows, cols)                                                                                          \
    { name, rows, cols, 0, 1 }
#define F32_OUT(name, rows, cols)                                                                                      \
    { name, rows, cols, 0, 0 }

static int count_views(const operation *o) {
    int n = 0;
    while (n < VIEWS && o->views[n].name) n++;
    return n;
}

static int64_t pad_of(int v) { return v % 4 == 1 ? 0 : v % 4 + 1; }

typedef struct operands {
    int count, in_place;
    mt_tensor given[VIEWS], f32[VIEWS]; /* the same values; f32 has the layout of the library's own copies */
} operands;

/* types: a number in base 3, with one digit for each view that may have any type. alias: a pair of in_place, if both
   views have the same type. */
static operands make_operands(const operation *o, int types, const int alias[2]) {
    operands x;
    int v;
    memset(&x, 0, sizeof x);
    x.count = count_views(o);
    for (v = 0; v < x.count; v++) {
        const view *w = &o->views[v];
        mt_dtype dtype = w->any ? (mt_dtype)(types % 3) : MT_F32;
        int64_t i, j;
        if (w->any) types /= 3;
        x.given[v] = new_view(dtype, w->rows, w->cols, pad_of(v));
        x.f32[v] = new_view(MT_F32, w->rows, w->cols, dtype == MT_F32 ? pad_of(v) : 0);
        for (i = 0; w->filled && i < w->rows; i++)
            for (j = 0; j < w->cols; j++) {
                put(x.given[v], i, j, 1.5f * test_float(&ref.random));
                ref_row(x.f32[v], i)[j] = get(x.given[v], i, j);
            }
    }
    x.in_place = alias && x.given[alias[0]].dtype == x.given[alias[1]].dtype;
    if (x.in_place) x.given[alias[0]] = x.given[alias[1]];
    return x;
}

static const char *described(const operation *o, const operands *x, char text[256]) {
    int v, n = snprintf(text, 256, "%s(", o->name);
    for (v = 0; v < x->count; v++)
        n += snprintf(text + n, 256 - (size_t)n, "%s%s %s", v ? ", " : "", o->views[v].name,
                      mt_dtype_name(x->given[v].dtype));
    return text;
}

/* oneDNN multiplies two matrices of the same 16-bit type as they are, so it may add in another order than in f32. The
   sums of fewer than 150 products of numbers below 1.5 then differ by at most (2 + sqrt(150)) * 2^-24 * 150 * 1.5^2. */
static float slack_of(const operation *o, const operands *x) {
    int product = strcmp(o->name, "mt_gemm") == 0 || strncmp(o->name, "mt_linear", 9) == 0;
    int widens = strncmp(mt_gemm_library(), "oneDNN", 6) != 0 || x->given[0].dtype == MT_F32;
    return product && !widens && x->given[0].dtype == x->given[1].dtype ? 3e-4f : 0.0f;
}

/* Whether attention may round probabilities and gradients of scores to bf16: if all its operands have this type. */
static int attention_rounds(const operation *o, const operands *x) {
    int v, rounds = 0;
#if defined(__AVX512BF16__)
    rounds = strstr(o->name, "attention") != NULL;
#endif
    for (v = 0; v < x->count; v++) {
        const char *name = o->views[v].name;
        if (!strcmp(name, "qkv") || !strcmp(name, "dout") || (strlen(name) == 1 && strchr("qkv", name[0])))
            rounds &= x->given[v].dtype == MT_BF16;
    }
    return rounds;
}

/* The weights of sums have independent errors of at most 1 / 256. Twice this is allowed, relative to the largest
   result. test_attention.c compares more closely. */
static float attention_slack(mt_tensor want) {
    float most = 0;
    int64_t i, j;
    for (i = 0; i < want.rows; i++)
        for (j = 0; j < want.cols; j++) most = fmaxf(most, fabsf(ref_row(want, i)[j]));
    return most / 128;
}

static void compare(const operation *o, const operands *x, int except) {
    int v, rounds = attention_rounds(o, x);
    float slack = slack_of(o, x);
    char text[256], what[300];
    described(o, x, text);
    for (v = 0; v < x->count; v++) {
        snprintf(what, sizeof what, "%s): %s", text, o->views[v].name);
        if (rounds) slack = attention_slack(x->f32[v]);
        if (v != except) assert_rounded(x->given[v], x->f32[v], slack, what);
    }
    ref_check_guards();
    assert_int_equal(mt_arena_mark(ref.ctx), 0);
}

static int has_half(const operands *x) {
    int v;
    for (v = 0; v < x->count; v++)
        if (x->given[v].dtype != MT_F32) return 1;
    return 0;
}

static mt_context *other_context(mt_device device, size_t arena_bytes) {
    mt_context_desc d;
    mt_context *c = NULL;
    memset(&d, 0, sizeof d);
    d.device = device;
    d.arena_bytes = arena_bytes;
    d.threads = 1; /* as ref.ctx */
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &c));
    return c;
}

/* A meta context counts the same scratch memory. An arena that is one byte too small gives an error before anything is
   written, if `whole`. */
static void check_scratch(const operation *o, operands *x, size_t peak, mt_context *meta, int whole) {
    uint64_t hash = ref_hash();
    mt_arena_reset_peak(meta);
    ASSERT_STATUS(meta, MT_SUCCESS, o->run(meta, x->given));
    assert_int_equal(mt_arena_peak(meta), peak);
    assert_int_equal(mt_arena_mark(meta), 0);
    if (peak > 0) {
        mt_context *tight = other_context(MT_DEVICE_CPU, peak - 1);
        ASSERT_STATUS(tight, MT_ERR_MEMORY, o->run(tight, x->given));
        assert_int_equal(mt_arena_mark(tight), 0);
        mt_context_destroy(tight);
    }
    if (whole) assert_true(hash == ref_hash());
}

static void check_combination(const operation *o, int types, mt_context *meta) {
    operands x = make_operands(o, types, NULL);
    size_t f32_peak, peak;
    mt_arena_reset_peak(ref.ctx);
    OK(o->run(ref.ctx, x.f32));
    f32_peak = mt_arena_peak(ref.ctx);
    mt_arena_reset_peak(ref.ctx);
    OK(o->run(ref.ctx, x.given));
    peak = mt_arena_peak(ref.ctx);
    compare(o, &x, -1);
    assert_true(has_half(&x) || peak == f32_peak); /* without 16-bit operands, the same memory as in f32 */
    if (types % 7 <= 1) check_scratch(o, &x, peak, meta, 1);
    ref_release();
}

static void check_in_place(const operation *o, int types) {
    int k;
    for (k = 0; k < PAIRS && o->in_place[k][0] != o->in_place[k][1]; k++) {
        const int *alias = o->in_place[k];
        operands x = make_operands(o, types, alias);
        if (x.in_place) {
            OK(o->run(ref.ctx, x.f32));
            OK(o->run(ref.ctx, x.given));
            compare(o, &x, alias[1]);
        }
        ref_release();
    }
}

static void refuse(const operation *o, operands *x, int v, mt_dtype dtype) {
    mt_tensor keep = x->given[v];
    char words[128];
    snprintf(words, sizeof words, "%s: %s is %s, must be f32%s", o->name, o->views[v].name, mt_dtype_name(dtype),
             o->views[v].any ? ", bf16 or f16" : "");
    x->given[v].dtype = dtype;
    ASSERT_REFUSED(MT_ERR_DTYPE, words, o->run(ref.ctx, x->given));
    x->given[v] = keep;
}

static void check_refusals(const operation *o) {
    operands x = make_operands(o, 0, NULL);
    int v;
    for (v = 0; v < x.count; v++) {
        refuse(o, &x, v, MT_I32);
        refuse(o, &x, v, MT_U8);
        if (o->views[v].any) continue;
        refuse(o, &x, v, MT_BF16);
        refuse(o, &x, v, MT_F16);
    }
    ref_release();
}

static int count_combinations(const operation *o) {
    int v, n = count_views(o), combinations = 1;
    for (v = 0; v < n; v++) combinations *= o->views[v].any ? 3 : 1;
    return combinations;
}

static void check_operations(const operation *o, size_t count) {
    mt_context *meta = other_context(MT_DEVICE_META, 0);
    size_t k;
    for (k = 0; k < count; k++, o++) {
        int types, combinations = count_combinations(o);
        for (types = 0; types < combinations; types++) {
            check_combination(o, types, meta);
            check_in_place(o, types);
        }
        check_refusals(o);
    }
    mt_context_destroy(meta);
}
#define CHECK_OPERATIONS(list) check_operations(list, sizeof(list) / sizeof(list)[0])

/* Operators that read and write 16 bits block by block take no copies from the arena. */
static void check_blocks(const operation *o, size_t count) {
    size_t k;
    for (k = 0; k < count; k++, o++) {
        operands x = make_operands(o, count_combinations(o) / 2, NULL); /* all views that may have any type are bf16 */
        mt_arena_reset_peak(ref.ctx);
        OK(o->run(ref.ctx, x.given));
        assert_int_equal(mt_arena_peak(ref.ctx), 0);
        ref_release();
    }
}
#define CHECK_BLOCKS(list) check_blocks(list, sizeof(list) / sizeof(list)[0])

/* ---- moving, bias, activations ---------------------------------------------------------------------------------- */

static mt_status run_fill(mt_context *c, const mt_tensor *v) { return mt_fill(c, v[0], 0.3f); }
static mt_status run_add(mt_context *c, const mt_tensor *v) { return mt_add(c, v[0], v[1], v[2]); }
static mt_status run_convert(mt_context *c, const mt_tensor *v) { return mt_convert(c, v[0], v[1]); }
static mt_status run_sum(mt_context *c, const mt_tensor *v) { return mt_sum(c, v[0], v[1]); }
static mt_status run_squares(mt_context *c, const mt_tensor *v) { return mt_sum_of_squares(c, v[0], v[1]); }
static mt_status run_bias(mt_context *c, const mt_tensor *v) { return mt_bias_forward(c, v[0], v[1]); }
static mt_status run_bias_backward(mt_context *c, const mt_tensor *v) { return mt_bias_backward(c, v[0], v[1]); }

static void test_simple(void **state) {
    static const operation list[] = {
        {"mt_fill", run_fill, {OUT("y", 5, 37)}, {{0, 0}}},
        {"mt_add", run_add, {IN("a", 5, 37), IN("b", 5, 37), OUT("y", 5, 37)}, {{2, 0}, {2, 1}}},
        {"mt_add", run_add, {IN("a", 2, 1100), IN("b", 2, 1100), OUT("y", 2, 1100)}, {{2, 0}, {2, 1}}},
        {"mt_add", run_add, {IN("a", 0, 3), IN("b", 0, 3), OUT("y", 0, 3)}, {{0, 0}}},
        {"mt_add", run_add, {IN("a", 3, 0), IN("b", 3, 0), OUT("y", 3, 0)}, {{0, 0}}},
        {"mt_sum", run_sum, {IN("x", 7, 133), F32("out", 1, 1)}, {{0, 0}}},
        {"mt_sum_of_squares", run_squares, {IN("x", 7, 133), F32("out", 1, 1)}, {{0, 0}}},
        {"mt_sum", run_sum, {IN("x", 3, 9001), F32("out", 1, 1)}, {{0, 0}}},
        {"mt_bias_forward", run_bias, {IN("y", 5, 37), IN("bias", 1, 37)}, {{0, 0}}},
        {"mt_bias_backward", run_bias_backward, {IN("dy", 7, 37), F32("dbias", 1, 37)}, {{0, 0}}},
        {"mt_convert", run_convert, {IN("x", 5, 37), OUT("y", 5, 37)}, {{1, 0}}},
    };
    (void)state;
    CHECK_OPERATIONS(list);
    mt_arena_reset_peak(ref.ctx); /* a sum copies nothing */
    OK(mt_sum(ref.ctx, new_view(MT_BF16, 7, 133, 0), new_view(MT_F32, 1, 1, 0)));
    assert_int_equal(mt_arena_peak(ref.ctx), 0);
    ref_release();
}

static mt_status run_gelu(mt_context *c, const mt_tensor *v) {
    return mt_activation_forward(c, MT_GELU_TANH, v[0], v[1], v[2]);
}
static mt_status run_erf(mt_context *c, const mt_tensor *v) {
    return mt_activation_forward(c, MT_GELU_ERF, v[0], mt_none(), v[1]);
}
static mt_status run_swiglu(mt_context *c, const mt_tensor *v) {
    return mt_activation_forward(c, MT_SWIGLU, v[0], v[1], v[2]);
}
static mt_status run_squared_relu(mt_context *c, const mt_tensor *v) {
    return mt_activation_forward(c, MT_SQUARED_RELU, v[0], v[1], v[2]);
}
static mt_status run_squared_relu_backward(mt_context *c, const mt_tensor *v) {
    return mt_activation_backward(c, MT_SQUARED_RELU, v[0], v[1], v[2], v[3]);
}
static mt_status run_relu(mt_context *c, const mt_tensor *v) {
    return mt_activation_forward(c, MT_RELU, v[0], v[1], v[2]);
}
static mt_status run_relu_backward(mt_context *c, const mt_tensor *v) {
    return mt_activation_backward(c, MT_RELU, v[0], v[1], v[2], v[3]);
}
static mt_status run_tanh(mt_context *c, const mt_tensor *v) {
    return mt_activation_forward(c, MT_TANH, v[0], v[1], v[2]);
}
static mt_status run_tanh_backward(mt_context *c, const mt_tensor *v) {
    return mt_activation_backward(c, MT_TANH, v[0], v[1], v[2], v[3]);
}
static mt_status run_gelu_backward(mt_context *c, const mt_tensor *v) {
    return mt_activation_backward(c, MT_GELU_TANH, v[0], v[1], v[2], v[3]);
}
static mt_status run_erf_backward(mt_context *c, const mt_tensor *v) {
    return mt_activation_backward(c, MT_GELU_ERF, v[0], v[1], v[2], mt_none());
}
static mt_status run_swiglu_backward(mt_context *c, const mt_tensor *v) {
    return mt_activation_backward(c, MT_SWIGLU, v[0], v[1], v[2], v[3]);
}

static void test_activation(void **state) {
    static const operation list[] = {
        {"mt_activation_forward", run_gelu, {IN("h", 5, 37), IN("bias", 1, 37), OUT("y", 5, 37)}, {{0, 0}}},
        {"mt_activation_forward", run_erf, {IN("h", 5, 37), OUT("y", 5, 37)}, {{0, 0}}},
        {"mt_activation_forward", run_swiglu, {IN("h", 2, 2062), IN("bias", 1, 2062), OUT("y", 2, 1031)}, {{0, 0}}},
        {"mt_activation_forward", run_squared_relu, {IN("h", 5, 37), IN("bias", 1, 37), OUT("y", 5, 37)}, {{0, 0}}},
        {"mt_activation_backward",
         run_squared_relu_backward,
         {IN("h", 5, 37), IN("dy", 5, 37), OUT("dh", 5, 37), F32("dbias", 1, 37)},
         {{2, 0}}},
        {"mt_activation_forward", run_relu, {IN("h", 5, 37), IN("bias", 1, 37), OUT("y", 5, 37)}, {{0, 0}}},
        {"mt_activation_backward",
         run_relu_backward,
         {IN("h", 5, 37), IN("dy", 5, 37), OUT("dh", 5, 37), F32("dbias", 1, 37)},
         {{2, 0}}},
        {"mt_activation_forward", run_tanh, {IN("h", 5, 37), IN("bias", 1, 37), OUT("y", 5, 37)}, {{0, 0}}},
        {"mt_activation_backward",
         run_tanh_backward,
         {IN("h", 5, 37), IN("dy", 5, 37), OUT("dh", 5, 37), F32("dbias", 1, 37)},
         {{2, 0}}},
        {"mt_activation_backward",
         run_gelu_backward,
         {IN("h", 5, 37), IN("dy", 5, 37), OUT("dh", 5, 37), F32("dbias", 1, 37)},
         {{2, 0}}},
        {"mt_activation_backward", run_erf_backward, {IN("h", 5, 37), IN("dy", 5, 37), OUT("dh", 5, 37)}, {{2, 0}}},
        {"mt_activation_backward",
         run_swiglu_backward,
         {IN("h", 5, 74), IN("dy", 5, 37), OUT("dh", 5, 74), F32("dbias", 1, 74)},
         {{2, 0}}},
        {"mt_activation_backward",
         run_swiglu_backward,
         {IN("h", 2, 2062), IN("dy", 2, 1031), OUT("dh", 2, 2062), F32("dbias", 1, 2062)},
         {{2, 0}}},
    };
    (void)state;
    CHECK_OPERATIONS(list);
    CHECK_BLOCKS(list);
}

/* ---- element by element ----------------------------------------------------------------------------------------- */

static mt_status run_multiply(mt_context *c, const mt_tensor *v) { return mt_multiply(c, v[0], v[1], v[2]); }
static mt_status run_by_row(mt_context *c, const mt_tensor *v) { return mt_multiply_row_forward(c, v[0], v[1], v[2]); }
static mt_status run_by_row_backward(mt_context *c, const mt_tensor *v) {
    return mt_multiply_row_backward(c, v[0], v[1], v[2], v[3], v[4]);
}
static mt_status run_by_row_backward_dx(mt_context *c, const mt_tensor *v) {
    return mt_multiply_row_backward(c, v[0], v[1], v[2], v[3], mt_none());
}
static mt_status run_by_row_backward_drow(mt_context *c, const mt_tensor *v) {
    return mt_multiply_row_backward(c, v[0], v[1], v[2], mt_none(), v[3]);
}
static mt_status run_by_col(mt_context *c, const mt_tensor *v) { return mt_multiply_col_forward(c, v[0], v[1], v[2]); }
static mt_status run_by_col_backward(mt_context *c, const mt_tensor *v) {
    return mt_multiply_col_backward(c, v[0], v[1], v[2], v[3], v[4]);
}
static mt_status run_by_col_backward_dx(mt_context *c, const mt_tensor *v) {
    return mt_multiply_col_backward(c, v[0], v[1], v[2], v[3], mt_none());
}
static mt_status run_by_col_backward_dcol(mt_context *c, const mt_tensor *v) {
    return mt_multiply_col_backward(c, v[0], v[1], v[2], mt_none(), v[3]);
}

static void test_multiply(void **state) {
    static const operation list[] = {
        {"mt_multiply", run_multiply, {IN("a", 5, 37), IN("b", 5, 37), OUT("y", 5, 37)}, {{2, 0}, {2, 1}}},
        {"mt_multiply_row_forward", run_by_row, {IN("x", 5, 37), IN("row", 1, 37), OUT("y", 5, 37)}, {{2, 0}}},
        {"mt_multiply_row_backward",
         run_by_row_backward,
         {IN("x", 7, 37), IN("row", 1, 37), IN("dy", 7, 37), OUT("dx", 7, 37), F32("drow", 1, 37)},
         {{3, 0}, {3, 2}}},
        {"mt_multiply_row_backward",
         run_by_row_backward_dx,
         {IN("x", 7, 37), IN("row", 1, 37), IN("dy", 7, 37), OUT("dx", 7, 37)},
         {{3, 0}, {3, 2}}},
        {"mt_multiply_row_backward",
         run_by_row_backward_drow,
         {IN("x", 7, 37), IN("row", 1, 37), IN("dy", 7, 37), F32("drow", 1, 37)},
         {{0, 0}}},
        {"mt_multiply_col_forward", run_by_col, {IN("x", 5, 37), IN("col", 5, 1), OUT("y", 5, 37)}, {{2, 0}}},
        {"mt_multiply_col_backward",
         run_by_col_backward,
         {IN("x", 5, 37), IN("col", 5, 1), IN("dy", 5, 37), OUT("dx", 5, 37), OUT("dcol", 5, 1)},
         {{3, 0}, {3, 2}}},
        {"mt_multiply_col_backward",
         run_by_col_backward_dx,
         {IN("x", 5, 37), IN("col", 5, 1), IN("dy", 5, 37), OUT("dx", 5, 37)},
         {{3, 0}, {3, 2}}},
        {"mt_multiply_col_backward",
         run_by_col_backward_dcol,
         {IN("x", 5, 37), IN("col", 5, 1), IN("dy", 5, 37), OUT("dcol", 5, 1)},
         {{0, 0}}},
        {"mt_multiply", run_multiply, {IN("a", 2, 1100), IN("b", 2, 1100), OUT("y", 2, 1100)}, {{2, 0}, {2, 1}}},
        {"mt_multiply_row_backward",
         run_by_row_backward,
         {IN("x", 5, 1100), IN("row", 1, 1100), IN("dy", 5, 1100), OUT("dx", 5, 1100), F32("drow", 1, 1100)},
         {{3, 0}, {3, 2}}},
        {"mt_multiply_col_backward",
         run_by_col_backward,
         {IN("x", 2, 1100), IN("col", 2, 1), IN("dy", 2, 1100), OUT("dx", 2, 1100), OUT("dcol", 2, 1)},
         {{3, 0}, {3, 2}}},
    };
    (void)state;
    CHECK_OPERATIONS(list);
    CHECK_BLOCKS(list);
}

static mt_status run_sigmoid(mt_context *c, const mt_tensor *v) { return mt_sigmoid_forward(c, v[0], v[1]); }
static mt_status run_sigmoid_backward(mt_context *c, const mt_tensor *v) {
    return mt_sigmoid_backward(c, v[0], v[1], v[2]);
}
static mt_status run_silu(mt_context *c, const mt_tensor *v) { return mt_silu_forward(c, v[0], v[1]); }
static mt_status run_silu_backward(mt_context *c, const mt_tensor *v) { return mt_silu_backward(c, v[0], v[1], v[2]); }
static mt_status run_gate(mt_context *c, const mt_tensor *v) { return mt_sigmoid_gate_forward(c, v[0], v[1], v[2]); }
static mt_status run_gate_backward(mt_context *c, const mt_tensor *v) {
    return mt_sigmoid_gate_backward(c, v[0], v[1], v[2], v[3], v[4]);
}

static void test_sigmoid(void **state) {
    static const operation list[] = {
        {"mt_sigmoid_forward", run_sigmoid, {IN("x", 5, 37), OUT("y", 5, 37)}, {{1, 0}}},
        {"mt_sigmoid_backward",
         run_sigmoid_backward,
         {IN("x", 5, 37), IN("dy", 5, 37), OUT("dx", 5, 37)},
         {{2, 0}, {2, 1}}},
        {"mt_silu_forward", run_silu, {IN("x", 5, 37), OUT("y", 5, 37)}, {{1, 0}}},
        {"mt_silu_backward", run_silu_backward, {IN("x", 5, 37), IN("dy", 5, 37), OUT("dx", 5, 37)}, {{2, 0}, {2, 1}}},
        {"mt_sigmoid_gate_forward", run_gate, {IN("gate", 5, 37), IN("x", 5, 37), OUT("y", 5, 37)}, {{2, 0}, {2, 1}}},
        {"mt_sigmoid_gate_backward",
         run_gate_backward,
         {IN("gate", 5, 37), IN("x", 5, 37), IN("dy", 5, 37), OUT("dgate", 5, 37), OUT("dx", 5, 37)},
         {{3, 0}, {3, 1}, {3, 2}, {4, 0}, {4, 1}, {4, 2}}},
        {"mt_sigmoid_gate_backward",
         run_gate_backward,
         {IN("gate", 1, 1100), IN("x", 1, 1100), IN("dy", 1, 1100), OUT("dgate", 1, 1100), OUT("dx", 1, 1100)},
         {{3, 0}, {4, 1}}},
    };
    (void)state;
    CHECK_OPERATIONS(list);
    CHECK_BLOCKS(list);
}

/* ---- normalisation, random numbers, dropout --------------------------------------------------------------------- */

static mt_status run_layer_norm(mt_context *c, const mt_tensor *v) {
    return mt_norm_forward(c, MT_LAYER_NORM, v[0], v[1], v[2], 1e-5f, v[3], v[4]);
}
static mt_status run_rms_norm(mt_context *c, const mt_tensor *v) {
    return mt_norm_forward(c, MT_RMS_NORM, v[0], v[1], mt_none(), 1e-5f, v[2], mt_none());
}
static mt_status run_layer_norm_backward(mt_context *c, const mt_tensor *v) {
    return mt_norm_backward(c, MT_LAYER_NORM, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]);
}
static mt_status run_rms_norm_backward(mt_context *c, const mt_tensor *v) {
    return mt_norm_backward(c, MT_RMS_NORM, v[0], v[1], v[2], v[3], mt_none(), v[4], v[5], mt_none());
}

static void test_norm(void **state) {
    static const operation list[] = {
        {"mt_norm_forward",
         run_layer_norm,
         {IN("x", 5, 37), IN("gain", 1, 37), IN("bias", 1, 37), OUT("y", 5, 37), F32_OUT("stats", 5, 2)},
         {{3, 0}}},
        {"mt_norm_forward", run_rms_norm, {IN("x", 5, 37), IN("gain", 1, 37), OUT("y", 5, 37)}, {{2, 0}}},
        {"mt_norm_backward",
         run_layer_norm_backward,
         {IN("x", 3, 37), IN("gain", 1, 37), F32("stats", 3, 2), IN("dy", 3, 37), IN("dresidual", 3, 37),
          OUT("dx", 3, 37), F32("dgain", 1, 37), F32("dbias", 1, 37)},
         {{5, 3}, {5, 4}}},
        {"mt_norm_backward",
         run_rms_norm_backward,
         {IN("x", 3, 37), IN("gain", 1, 37), F32("stats", 3, 2), IN("dy", 3, 37), OUT("dx", 3, 37),
          F32("dgain", 1, 37)},
         {{4, 3}}},
        {"mt_norm_forward", run_rms_norm, {IN("x", 5, 1100), IN("gain", 1, 1100), OUT("y", 5, 1100)}, {{2, 0}}},
    };
    (void)state;
    CHECK_OPERATIONS(list);
}

static const mt_random place = {5, 77, 3, 11, 100, NULL};

static mt_dropout dropout_of(float p) {
    mt_dropout d;
    d.at = place;
    d.p = p;
    return d;
}

static mt_status run_normal(mt_context *c, const mt_tensor *v) { return mt_random_normal(c, v[0], 0.02f, place); }
static mt_status run_normal_of_long_rows(mt_context *c, const mt_tensor *v) {
    mt_random at = place;
    at.global_cols = 3001;
    return mt_random_normal(c, v[0], 0.02f, at);
}
static mt_status run_dropout(mt_context *c, const mt_tensor *v) {
    return mt_bias_dropout_add_forward(c, v[0], v[1], v[2], dropout_of(0.3f), v[3]);
}
static mt_status run_no_dropout(mt_context *c, const mt_tensor *v) {
    return mt_bias_dropout_add_forward(c, v[0], mt_none(), mt_none(), dropout_of(0), v[1]);
}
static mt_status run_dropout_backward(mt_context *c, const mt_tensor *v) {
    return mt_bias_dropout_add_backward(c, v[0], dropout_of(0.3f), v[1], v[2]);
}
static mt_dropout wide_dropout(void) {
    mt_dropout d = dropout_of(0.3f);
    d.at.global_cols = 1200;
    return d;
}
static mt_status run_wide_dropout(mt_context *c, const mt_tensor *v) {
    return mt_bias_dropout_add_forward(c, v[0], v[1], v[2], wide_dropout(), v[3]);
}
static mt_status run_bias_add(mt_context *c, const mt_tensor *v) {
    return mt_bias_dropout_add_forward(c, v[0], v[1], v[2], dropout_of(0), v[3]);
}
static mt_status run_wide_dropout_backward(mt_context *c, const mt_tensor *v) {
    return mt_bias_dropout_add_backward(c, v[0], wide_dropout(), v[1], v[2]);
}
static mt_status run_no_dropout_backward(mt_context *c, const mt_tensor *v) {
    return mt_bias_dropout_add_backward(c, v[0], dropout_of(0), v[1], mt_none());
}

static void test_random_and_dropout(void **state) {
    static const operation list[] = {
        {"mt_random_normal", run_normal, {OUT("y", 5, 37)}, {{0, 0}}},
        {"mt_random_normal", run_normal_of_long_rows, {OUT("y", 2, 2 * 1024 + 3)}, {{0, 0}}},
        {"mt_bias_dropout_add_forward",
         run_dropout,
         {IN("x", 5, 37), IN("bias", 1, 37), IN("residual", 5, 37), OUT("y", 5, 37)},
         {{3, 0}, {3, 2}}},
        {"mt_bias_dropout_add_forward", run_no_dropout, {IN("x", 5, 37), OUT("y", 5, 37)}, {{1, 0}}},
        {"mt_bias_dropout_add_backward",
         run_dropout_backward,
         {IN("dy", 5, 37), OUT("dx", 5, 37), F32("dbias", 1, 37)},
         {{1, 0}}},
        {"mt_bias_dropout_add_backward", run_no_dropout_backward, {IN("dy", 5, 37), OUT("dx", 5, 37)}, {{1, 0}}},
        {"mt_bias_dropout_add_forward",
         run_wide_dropout,
         {IN("x", 2, 1100), IN("bias", 1, 1100), IN("residual", 2, 1100), OUT("y", 2, 1100)},
         {{3, 0}, {3, 2}}},
        {"mt_bias_dropout_add_forward",
         run_bias_add,
         {IN("x", 2, 1100), IN("bias", 1, 1100), IN("residual", 2, 1100), OUT("y", 2, 1100)},
         {{3, 0}, {3, 2}}},
        {"mt_bias_dropout_add_backward",
         run_wide_dropout_backward,
         {IN("dy", 6, 1100), OUT("dx", 6, 1100), F32("dbias", 1, 1100)},
         {{1, 0}}},
    };
    (void)state;
    CHECK_OPERATIONS(list);
}

/* ---- products --------------------------------------------------------------------------------------------------- */

static mt_status run_nn(mt_context *c, const mt_tensor *v) {
    return mt_gemm(c, MT_NO_TRANS, MT_NO_TRANS, 1.25f, v[0], v[1], 0, v[2]);
}
static mt_status run_nt(mt_context *c, const mt_tensor *v) {
    return mt_gemm(c, MT_NO_TRANS, MT_TRANS, 1, v[0], v[1], 0.5f, v[2]);
}
static mt_status run_tn(mt_context *c, const mt_tensor *v) {
    return mt_gemm(c, MT_TRANS, MT_NO_TRANS, 1, v[0], v[1], 1, v[2]);
}
static mt_status run_tt(mt_context *c, const mt_tensor *v) {
    return mt_gemm(c, MT_TRANS, MT_TRANS, 0.1f, v[0], v[1], 0, v[2]);
}

static void test_gemm(void **state) {
    static const operation list[] = {
        {"mt_gemm", run_nn, {IN("a", 7, 33), IN("b", 33, 19), OUT("c", 7, 19)}, {{0, 0}}},
        {"mt_gemm", run_nt, {IN("a", 7, 33), IN("b", 19, 33), IN("c", 7, 19)}, {{0, 0}}},
        {"mt_gemm", run_tn, {IN("a", 33, 7), IN("b", 33, 19), IN("c", 7, 19)}, {{0, 0}}},
        {"mt_gemm", run_tt, {IN("a", 33, 7), IN("b", 19, 33), OUT("c", 7, 19)}, {{0, 0}}},
        {"mt_gemm", run_nt, {IN("a", 7, 0), IN("b", 19, 0), IN("c", 7, 19)}, {{0, 0}}},
        {"mt_gemm", run_nn, {IN("a", 67, 131), IN("b", 131, 71), OUT("c", 67, 71)}, {{0, 0}}},
    };
    mt_tensor a = new_view(MT_BF16, 2, 2, 0), b = new_view(MT_F16, 2, 2, 0), c = new_view(MT_F32, 2, 2, 0);
    (void)state;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "c [2, 2] and a [2, 2] overlap",
                   mt_gemm(ref.ctx, MT_NO_TRANS, MT_NO_TRANS, 1, a, b, 0, a));
    b.ld = 3000000000;
    ASSERT_REFUSED(MT_ERR_UNSUPPORTED, "largest ld 3000000000",
                   mt_gemm(ref.ctx, MT_NO_TRANS, MT_NO_TRANS, 1, a, b, 0, c));
    ref_release();
    CHECK_OPERATIONS(list);
}

/* ---- linear layers ---------------------------------------------------------------------------------------------- */

/* In f32, rounded once */
static mt_status run_linear(mt_context *c, const mt_tensor *v) {
    return mt_linear_forward(c, v[0], v[1], mt_none(), v[2]);
}
static mt_status run_weight_gradient(mt_context *c, const mt_tensor *v) {
    return mt_linear_gradients(c, v[0], v[1], v[2], mt_none());
}

/* Rounded twice: the two operators that each function must equal follow it. */
static mt_status run_linear_bias(mt_context *c, const mt_tensor *v) {
    return mt_linear_forward(c, v[0], v[1], v[2], v[3]);
}
static mt_status apart_linear_bias(mt_context *c, const mt_tensor *v) {
    MT_TRY(mt_gemm(c, MT_NO_TRANS, MT_TRANS, 1, v[0], v[1], 0, v[3]));
    return mt_bias_forward(c, v[3], v[2]);
}
static mt_status run_linear_gelu(mt_context *c, const mt_tensor *v) {
    return mt_linear_activation_forward(c, MT_GELU_TANH, v[0], v[1], v[2], v[3], v[4]);
}
static mt_status apart_linear_gelu(mt_context *c, const mt_tensor *v) {
    MT_TRY(mt_gemm(c, MT_NO_TRANS, MT_TRANS, 1, v[0], v[1], 0, v[3]));
    return mt_activation_forward(c, MT_GELU_TANH, v[3], v[2], v[4]);
}
static mt_status run_linear_swiglu(mt_context *c, const mt_tensor *v) {
    return mt_linear_activation_forward(c, MT_SWIGLU, v[0], v[1], mt_none(), v[2], v[3]);
}
static mt_status apart_linear_swiglu(mt_context *c, const mt_tensor *v) {
    MT_TRY(mt_gemm(c, MT_NO_TRANS, MT_TRANS, 1, v[0], v[1], 0, v[2]));
    return mt_activation_forward(c, MT_SWIGLU, v[2], mt_none(), v[3]);
}
static mt_status run_linear_swiglu_backward(mt_context *c, const mt_tensor *v) {
    return mt_linear_activation_backward(c, MT_SWIGLU, v[0], v[1], v[2], v[3], v[4]);
}
static mt_status apart_linear_swiglu_backward(mt_context *c, const mt_tensor *v) {
    size_t mark = mt_arena_mark(c);
    mt_tensor dact;
    MT_TRY(mt_arena_tensor(c, v[3].dtype, v[0].rows, v[1].cols, &dact));
    MT_TRY(mt_gemm(c, MT_NO_TRANS, MT_NO_TRANS, 1, v[0], v[1], 0, dact));
    MT_TRY(mt_activation_backward(c, MT_SWIGLU, v[2], dact, v[3], v[4]));
    mt_arena_release(c, mark);
    return MT_SUCCESS;
}
static mt_status run_gradients(mt_context *c, const mt_tensor *v) {
    return mt_linear_gradients(c, v[0], v[1], v[2], v[3]);
}
static mt_status apart_gradients(mt_context *c, const mt_tensor *v) {
    MT_TRY(mt_bias_backward(c, v[0], v[3]));
    return mt_gemm(c, MT_TRANS, MT_NO_TRANS, 1, v[0], v[1], 1, v[2]);
}

/* o->run and `apart` give the same bits. When the arena is too small for its second operator, o->run may have
   written. */
static void check_as_apart(const operation *o, mt_status (*apart)(mt_context *, const mt_tensor *), int types,
                           mt_context *meta) {
    uint64_t random = ref.random;
    operands x = make_operands(o, types, NULL), want;
    size_t peak;
    char text[256];
    int v;
    ref.random = random; /* the same values again */
    want = make_operands(o, types, NULL);
    mt_arena_reset_peak(ref.ctx);
    OK(o->run(ref.ctx, x.given));
    peak = mt_arena_peak(ref.ctx);
    OK(apart(ref.ctx, want.given));
    for (v = 0; v < x.count; v++) {
        mt_tensor a = x.given[v], b = want.given[v];
        size_t size = mt_dtype_size(a.dtype);
        int64_t i;
        for (i = 0; i < a.rows; i++)
            if (memcmp((char *)a.data + (size_t)(i * a.ld) * size, (char *)b.data + (size_t)(i * b.ld) * size,
                       (size_t)a.cols * size) != 0)
                fail_msg("%s): row %ld of %s has other bits than from two operators", described(o, &x, text), (long)i,
                         o->views[v].name);
    }
    ref_check_guards();
    if (types % 7 <= 1) check_scratch(o, &x, peak, meta, 0);
    ref_release();
}

typedef struct two_operators {
    operation whole;
    mt_status (*apart)(mt_context *c, const mt_tensor *v);
} two_operators;

static void test_linear(void **state) {
    static const operation list[] = {
        {"mt_linear_forward", run_linear, {IN("x", 7, 33), IN("weight", 19, 33), OUT("y", 7, 19)}, {{0, 0}}},
        {"mt_linear_gradients",
         run_weight_gradient,
         {IN("dy", 7, 19), IN("x", 7, 33), F32("dweight", 19, 33)},
         {{0, 0}}},
    };
    static const two_operators both[] = {
        {{"mt_linear_forward",
          run_linear_bias,
          {IN("x", 7, 33), IN("weight", 19, 33), IN("bias", 1, 19), OUT("y", 7, 19)},
          {{0, 0}}},
         apart_linear_bias},
        {{"mt_linear_activation_forward",
          run_linear_gelu,
          {IN("x", 7, 33), IN("weight", 19, 33), IN("bias", 1, 19), OUT("h", 7, 19), OUT("y", 7, 19)},
          {{0, 0}}},
         apart_linear_gelu},
        {{"mt_linear_activation_forward",
          run_linear_swiglu,
          {IN("x", 7, 33), IN("weight", 38, 33), OUT("h", 7, 38), OUT("y", 7, 19)},
          {{0, 0}}},
         apart_linear_swiglu},
        {{"mt_linear_activation_backward",
          run_linear_swiglu_backward,
          {IN("dy", 7, 33), IN("weight", 33, 19), IN("h", 7, 38), OUT("dh", 7, 38), F32("dbias", 1, 38)},
          {{0, 0}}},
         apart_linear_swiglu_backward},
        {{"mt_linear_gradients",
          run_gradients,
          {IN("dy", 7, 19), IN("x", 7, 33), F32("dweight", 19, 33), F32("dbias", 1, 19)},
          {{0, 0}}},
         apart_gradients},
    };
    mt_context *meta = other_context(MT_DEVICE_META, 0);
    size_t k;
    (void)state;
    CHECK_OPERATIONS(list);
    for (k = 0; k < sizeof both / sizeof both[0]; k++) {
        int types, combinations = count_combinations(&both[k].whole);
        for (types = 0; types < combinations; types++) check_as_apart(&both[k].whole, both[k].apart, types, meta);
        check_refusals(&both[k].whole);
    }
    mt_context_destroy(meta);
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

static const int32_t lengths[2] = {5, 67};

static mt_attention_desc attention_of(int64_t seq, float p) {
    mt_attention_desc s;
    memset(&s, 0, sizeof s);
    s.batch = 2;
    s.seq = seq;
    s.groups = 2;
    s.heads_per_group = 2;
    s.head_dim = 6;
    s.scores.mask = seq > 10 ? MT_MASK_BIDIRECTIONAL : MT_MASK_CAUSAL;
    s.lengths = seq > 10 ? lengths : NULL;
    s.dropout.p = p;
    s.dropout.at.global_cols = 4;
    return s;
}

static mt_status run_attention(mt_context *c, const mt_tensor *v) {
    mt_attention_desc s = attention_of(9, 0.2f);
    return mt_attention_forward(c, &s, v[0], v[1], v[2]);
}
static mt_status run_padded_attention(mt_context *c, const mt_tensor *v) {
    mt_attention_desc s = attention_of(67, 0);
    return mt_attention_forward(c, &s, v[0], v[1], mt_none());
}
static mt_status run_attention_backward(mt_context *c, const mt_tensor *v) {
    mt_attention_desc s = attention_of(9, 0.2f);
    return mt_attention_backward(c, &s, v[0], v[1], v[2], v[3], v[4]);
}
static mt_status run_padded_attention_backward(mt_context *c, const mt_tensor *v) {
    mt_attention_desc s = attention_of(67, 0);
    return mt_attention_backward(c, &s, v[0], v[1], v[2], v[3], v[4]);
}
/* Several blocks of queries, and two blocks of keys, which have 384 keys on a CPU. */
#define LONG 393
static mt_attention_desc long_attention(void) {
    static const int32_t all[2] = {150, LONG};
    mt_attention_desc s = attention_of(LONG, 0);
    s.lengths = all;
    return s;
}
static mt_status run_long_attention(mt_context *c, const mt_tensor *v) {
    mt_attention_desc s = long_attention();
    return mt_attention_forward(c, &s, v[0], v[1], mt_none());
}
static mt_status run_long_attention_backward(mt_context *c, const mt_tensor *v) {
    mt_attention_desc s = long_attention();
    return mt_attention_backward(c, &s, v[0], v[1], v[2], v[3], v[4]);
}
static mt_status run_concatenated(mt_context *c, const mt_tensor *v) {
    mt_attention_desc s = attention_of(9, 0.2f);
    s.qkv_layout = MT_QKV_CONCATENATED;
    return mt_attention_forward(c, &s, v[0], v[1], v[2]);
}
static mt_status run_concatenated_backward(mt_context *c, const mt_tensor *v) {
    mt_attention_desc s = attention_of(9, 0.2f);
    s.qkv_layout = MT_QKV_CONCATENATED;
    return mt_attention_backward(c, &s, v[0], v[1], v[2], v[3], v[4]);
}
static mt_status run_concatenated_rotary(mt_context *c, const mt_tensor *v) {
    mt_attention_desc s = attention_of(9, 0);
    s.qkv_layout = MT_QKV_CONCATENATED;
    return mt_rotary_forward(c, &s, v[0], v[1]);
}
static mt_status run_rotary_table(mt_context *c, const mt_tensor *v) { return mt_rotary_table(c, 10000, v[0]); }
static mt_status run_rotary(mt_context *c, const mt_tensor *v) {
    mt_attention_desc s = attention_of(9, 0);
    return mt_rotary_forward(c, &s, v[0], v[1]);
}
static mt_status run_rotary_backward(mt_context *c, const mt_tensor *v) {
    mt_attention_desc s = attention_of(9, 0);
    return mt_rotary_backward(c, &s, v[0], v[1]);
}

static mt_attention_desc dot_product_of(mt_tensor bias) {
    mt_attention_desc s = attention_of(9, 0.2f);
    s.kv_seq = 11;
    s.scores.softcap = 3.0f;
    s.bias.value = bias;
    s.bias.heads = 4;
    return s;
}
static mt_status run_dot_product(mt_context *c, const mt_tensor *v) {
    mt_attention_desc s = dot_product_of(v[3]);
    return mt_dot_product_attention_forward(c, &s, v[0], v[1], v[2], v[4], mt_none());
}
static mt_status run_dot_product_backward(mt_context *c, const mt_tensor *v) {
    mt_attention_desc s = dot_product_of(v[3]);
    s.bias.grad = v[10];
    return mt_dot_product_attention_backward(c, &s, v[0], v[1], v[2], v[4], v[5], v[6], v[7], v[8], v[9]);
}
static mt_status run_biased_attention_backward(mt_context *c, const mt_tensor *v) {
    mt_attention_desc s = attention_of(9, 0.2f);
    s.bias.value = v[1], s.bias.grad = v[6];
    s.bias.heads = 5, s.bias.first_head = 1;
    return mt_attention_backward(c, &s, v[0], v[3], v[2], v[4], v[5]);
}

static mt_status run_merge(mt_context *c, const mt_tensor *v) { return mt_attention_merge(c, v[0], v[1], v[2], v[3]); }

static void test_attention(void **state) {
    static const operation list[] = {
        {"mt_attention_merge",
         run_merge,
         {IN("out", 18, 24), F32("lse", 4, 18), IN("part_out", 18, 24), F32("part_lse", 4, 18)},
         {{0, 0}}},
        {"mt_attention_forward",
         run_attention,
         {IN("qkv", 18, 48), OUT("out", 18, 24), F32_OUT("lse", 4, 18)},
         {{0, 0}}},
        {"mt_attention_forward", run_padded_attention, {IN("qkv", 134, 48), OUT("out", 134, 24)}, {{0, 0}}},
        {"mt_attention_forward", run_long_attention, {IN("qkv", 2 * LONG, 48), OUT("out", 2 * LONG, 24)}, {{0, 0}}},
        {"mt_attention_backward",
         run_attention_backward,
         {IN("qkv", 18, 48), IN("out", 18, 24), F32("lse", 4, 18), IN("dout", 18, 24), OUT("dqkv", 18, 48)},
         {{0, 0}}},
        {"mt_attention_forward",
         run_concatenated,
         {IN("qkv", 18, 48), OUT("out", 18, 24), F32_OUT("lse", 4, 18)},
         {{0, 0}}},
        {"mt_attention_backward",
         run_concatenated_backward,
         {IN("qkv", 18, 48), IN("out", 18, 24), F32("lse", 4, 18), IN("dout", 18, 24), OUT("dqkv", 18, 48)},
         {{0, 0}}},
        {"mt_rotary_forward", run_concatenated_rotary, {IN("table", 9, 6), IN("qkv", 18, 48)}, {{0, 0}}},
        {"mt_rotary_table", run_rotary_table, {OUT("table", 9, 6)}, {{0, 0}}},
        {"mt_rotary_forward", run_rotary, {IN("table", 9, 6), IN("qkv", 18, 48)}, {{0, 0}}},
        {"mt_rotary_backward", run_rotary_backward, {IN("table", 9, 6), IN("dqkv", 18, 48)}, {{0, 0}}},
    };
    static const operation biased = {"mt_attention_backward",
                                     run_biased_attention_backward,
                                     {IN("qkv", 18, 48), IN("bias", 45, 9), F32("lse", 4, 18), IN("out", 18, 24),
                                      IN("dout", 18, 24), OUT("dqkv", 18, 48), F32("dbias", 45, 9)},
                                     {{0, 0}}};
    static const operation padded = {
        "mt_attention_backward",
        run_padded_attention_backward,
        {IN("qkv", 134, 48), IN("out", 134, 24), F32("lse", 4, 134), IN("dout", 134, 24), OUT("dqkv", 134, 48)},
        {{0, 0}}};
    static const operation longer = {"mt_attention_backward",
                                     run_long_attention_backward,
                                     {IN("qkv", 2 * LONG, 48), IN("out", 2 * LONG, 24), F32("lse", 4, 2 * LONG),
                                      IN("dout", 2 * LONG, 24), OUT("dqkv", 2 * LONG, 48)},
                                     {{0, 0}}};
    static const operation dot_product = {
        "mt_dot_product_attention_forward",
        run_dot_product,
        {IN("q", 18, 24), IN("k", 22, 12), IN("v", 22, 12), IN("bias", 36, 11), OUT("out", 18, 24)},
        {{0, 0}}};
    static const operation dot_product_backward = {
        "mt_dot_product_attention_backward",
        run_dot_product_backward,
        {IN("q", 18, 24), IN("k", 22, 12), IN("v", 22, 12), IN("bias", 36, 11), IN("out", 18, 24), F32("lse", 4, 18),
         IN("dout", 18, 24), OUT("dq", 18, 24), OUT("dk", 22, 12), OUT("dv", 22, 12), F32("dbias", 36, 11)},
        {{0, 0}}};
    mt_context *meta = other_context(MT_DEVICE_META, 0);
    int types;
    (void)state;
    CHECK_OPERATIONS(list);
    /* all of one type, and mixed types */
    for (types = 0; types < 81; types += 10) {
        check_combination(&padded, types, meta);
        check_combination(&longer, types, meta);
    }
    for (types = 0; types < 243; types += 10) check_combination(&biased, types, meta);
    for (types = 0; types < 243; types += 10) check_combination(&dot_product, types, meta);
    for (types = 0; types < 19683; types += 757) check_combination(&dot_product_backward, types, meta);
    mt_context_destroy(meta);
}

/* The scratch memory does not grow with the number of heads or sequences, so it has no copy of a whole view. */
static void test_attention_memory(void **state) {
    size_t forward[3][2], backward[3][2], cached[3][2], decoded[3][2];
    const int32_t zeros[8] = {0};
    int type, many;
    (void)state;
    for (type = MT_F32; type <= MT_F16; type++)
        for (many = 0; many < 2; many++) {
            mt_attention_desc s = attention_of(9, 0);
            mt_dtype t = (mt_dtype)type;
            mt_tensor lse;
            s.batch = many ? 8 : 1;
            s.groups = many ? 6 : 1;
            lse = ref_random(2 * s.groups, 9 * s.batch, 0, 1, 0);
            mt_tensor qkv = new_view(t, lse.cols, 24 * s.groups, 0), out = new_view(t, lse.cols, 12 * s.groups, 0);
            mt_tensor dout = new_view(t, lse.cols, out.cols, 0), dqkv = new_view(t, lse.cols, qkv.cols, 0);
            mt_arena_reset_peak(ref.ctx);
            OK(mt_attention_forward(ref.ctx, &s, qkv, out, lse));
            forward[type][many] = mt_arena_peak(ref.ctx);
            mt_arena_reset_peak(ref.ctx);
            OK(mt_attention_backward(ref.ctx, &s, qkv, out, lse, dout, dqkv));
            backward[type][many] = mt_arena_peak(ref.ctx);
            mt_kv_cache cache = {new_view(t, 9 * s.batch * s.groups, 6, 0), new_view(t, 9 * s.batch * s.groups, 6, 0),
                                 9, zeros};
            mt_arena_reset_peak(ref.ctx);
            OK(mt_kv_cache_attention(ref.ctx, &s, qkv, &cache, out));
            cached[type][many] = mt_arena_peak(ref.ctx);
            s.seq = 1;
            mt_arena_reset_peak(ref.ctx);
            OK(mt_kv_cache_attention(ref.ctx, &s, mt_tensor_rows(qkv, 0, s.batch), &cache,
                                     mt_tensor_rows(out, 0, s.batch)));
            decoded[type][many] = mt_arena_peak(ref.ctx);
        }
    for (type = MT_F32; type <= MT_F16; type++) {
        assert_int_equal(forward[type][0], forward[type][1]);
        assert_int_equal(backward[type][0], backward[type][1]);
        assert_int_equal(cached[type][0], cached[type][1]);
        assert_int_equal(decoded[type][0], decoded[type][1]);
    }
    ref_release();
}

/* ---- embedding and cross-entropy -------------------------------------------------------------------------------- */

static const int32_t ids[5] = {12, 10, 9, 12, 17}; /* the third and the last are of other shards */

static mt_status run_embedding(mt_context *c, const mt_tensor *v) {
    return mt_embedding_forward(c, v[0], 10, ids, 0, v[1]);
}
static mt_status run_embedding_add(mt_context *c, const mt_tensor *v) {
    return mt_embedding_forward(c, v[0], 10, ids, 0.7f, v[1]);
}
static mt_status run_embedding_backward(mt_context *c, const mt_tensor *v) {
    return mt_embedding_backward(c, v[0], 10, ids, v[1]);
}

static void test_embedding(void **state) {
    static const operation list[] = {
        {"mt_embedding_forward", run_embedding, {IN("table", 7, 37), OUT("y", 5, 37)}, {{0, 0}}},
        {"mt_embedding_forward", run_embedding_add, {IN("table", 7, 37), IN("y", 5, 37)}, {{0, 0}}},
        {"mt_embedding_forward", run_embedding_add, {IN("table", 7, 1100), IN("y", 5, 1100)}, {{0, 0}}},
        {"mt_embedding_forward", run_embedding, {IN("table", 7, 1100), OUT("y", 5, 1100)}, {{0, 0}}},
        {"mt_embedding_backward", run_embedding_backward, {IN("dy", 5, 37), F32("dtable", 7, 37)}, {{0, 0}}},
        {"mt_embedding_backward", run_embedding_backward, {IN("dy", 5, 1100), F32("dtable", 7, 1100)}, {{0, 0}}},
    };
    (void)state;
    CHECK_OPERATIONS(list);
}

/* A table is large, and a call reads a few of its rows: the call copies none of it. */
static void test_embedding_memory(void **state) {
    static const mt_dtype dtypes[] = {MT_F32, MT_BF16, MT_F16};
    mt_tensor y = new_view(MT_F32, 5, 37, 0);
    int i;
    (void)state;
    for (i = 0; i < 3; i++) {
        mt_arena_reset_peak(ref.ctx);
        OK(mt_embedding_forward(ref.ctx, new_view(dtypes[i], 700, 37, 0), 10, ids, (float)(i % 2), y));
        assert_int_equal(mt_arena_peak(ref.ctx), 0);
    }
    ref_release();
}

static const mt_cross_entropy_shard_desc vocabulary = {1040, 5, 0.1f, 0};
static const int32_t targets[3] = {7, -100, 1039};

static mt_status run_stats(mt_context *c, const mt_tensor *v) {
    return mt_cross_entropy_stats(c, &vocabulary, v[0], targets, v[1]);
}
static mt_status run_combine(mt_context *c, const mt_tensor *v) {
    return mt_cross_entropy_combine(c, &vocabulary, v[0], 2, targets, v[1], v[2]);
}
static mt_status run_cross_entropy_backward(mt_context *c, const mt_tensor *v) {
    return mt_cross_entropy_backward(c, &vocabulary, v[0], targets, v[1], v[2], 0.25f);
}
static mt_status run_cross_entropy_backward_plain(mt_context *c, const mt_tensor *v) {
    return mt_cross_entropy_backward(c, &vocabulary, v[0], targets, v[1], mt_none(), 1);
}
static mt_status run_cross_entropy(mt_context *c, const mt_tensor *v) {
    static const mt_cross_entropy_shard_desc whole = {1040, 0, 0.1f, 0};
    return mt_cross_entropy_forward_backward(c, &whole, v[0], targets, v[1], 0.25f, v[2]);
}

static void test_cross_entropy(void **state) {
    static const operation list[] = {
        {"mt_cross_entropy_stats", run_stats, {IN("logits", 3, 1051), F32_OUT("stats", 3, 4)}, {{0, 0}}},
        {"mt_cross_entropy_combine",
         run_combine,
         {F32("gathered", 6, 4), F32_OUT("loss", 1, 3), F32_OUT("lse", 2, 3)},
         {{0, 0}}},
        {"mt_cross_entropy_backward",
         run_cross_entropy_backward,
         {IN("logits", 3, 1051), F32("lse", 2, 3), F32("dloss", 1, 3)},
         {{0, 0}}},
        {"mt_cross_entropy_backward",
         run_cross_entropy_backward_plain,
         {IN("logits", 3, 51), F32("lse", 2, 3)},
         {{0, 0}}},
        {"mt_cross_entropy_forward_backward",
         run_cross_entropy,
         {IN("logits", 3, 1051), F32("dloss", 1, 3), F32_OUT("loss", 1, 3)},
         {{0, 0}}},
    };
    (void)state;
    CHECK_OPERATIONS(list);
    CHECK_BLOCKS(list);
}

static mt_status run_adamw(mt_context *c, const mt_tensor *v) {
    static const mt_adamw h = {0.1f, 0.9f, 0.99f, 1e-8f, 0.01f, 1, 3, NULL};
    return mt_adamw_step(c, &h, v[0], mt_none(), v[1], v[2], v[3]);
}

static void test_adamw(void **state) {
    static const operation list[] = {
        {"mt_adamw_step", run_adamw, {IN("param", 3, 5), F32("grad", 3, 5), F32("m", 3, 5), F32("v", 3, 5)}, {{0, 0}}},
    };
    (void)state;
    CHECK_OPERATIONS(list);
}

/* ---- scratch memory --------------------------------------------------------------------------------------------- */

#define ROWS 9 /* of the views of token_list with as many rows as there are tokens */

static mt_status run_rotary_of_tokens(mt_context *c, const mt_tensor *v) {
    mt_attention_desc s = attention_of(3, 0);
    s.batch = v[1].rows / 3;
    return mt_rotary_forward(c, &s, v[0], v[1]);
}

static const int32_t many_ids[10 * ROWS] = {3, 0, 1};

static mt_status run_embedding_of_tokens(mt_context *c, const mt_tensor *v) {
    return mt_embedding_forward(c, v[0], 0, many_ids, 0.5f, v[1]);
}
static mt_status run_embedding_backward_of_tokens(mt_context *c, const mt_tensor *v) {
    return mt_embedding_backward(c, v[0], 0, many_ids, v[1]);
}

/* These operators work block by block. */
static const operation token_list[] = {
    {"mt_random_normal", run_normal, {OUT("y", ROWS, 37)}, {{0, 0}}},
    {"mt_norm_forward",
     run_layer_norm,
     {IN("x", ROWS, 37), IN("gain", 1, 37), IN("bias", 1, 37), OUT("y", ROWS, 37), F32_OUT("stats", ROWS, 2)},
     {{0, 0}}},
    {"mt_norm_backward",
     run_layer_norm_backward,
     {IN("x", ROWS, 37), IN("gain", 1, 37), F32("stats", ROWS, 2), IN("dy", ROWS, 37), IN("dresidual", ROWS, 37),
      OUT("dx", ROWS, 37), F32("dgain", 1, 37), F32("dbias", 1, 37)},
     {{0, 0}}},
    {"mt_embedding_forward", run_embedding_of_tokens, {IN("table", 7, 37), IN("y", ROWS, 37)}, {{0, 0}}},
    {"mt_embedding_backward", run_embedding_backward_of_tokens, {IN("dy", ROWS, 37), F32("dtable", 7, 37)}, {{0, 0}}},
    {"mt_rotary_forward", run_rotary_of_tokens, {IN("table", 3, 6), IN("qkv", ROWS, 48)}, {{0, 0}}},
    {"mt_bias_dropout_add_forward",
     run_dropout,
     {IN("x", ROWS, 37), IN("bias", 1, 37), IN("residual", ROWS, 37), OUT("y", ROWS, 37)},
     {{0, 0}}},
    {"mt_bias_dropout_add_backward",
     run_dropout_backward,
     {IN("dy", ROWS, 37), OUT("dx", ROWS, 37), F32("dbias", 1, 37)},
     {{0, 0}}},
    {"mt_add", run_add, {IN("a", ROWS, 37), IN("b", ROWS, 37), OUT("y", ROWS, 37)}, {{0, 0}}},
};

/* The scratch memory of an operator with times as many tokens. */
static size_t peak_with(const operation *o, int64_t times, mt_dtype dtype) {
    mt_tensor views[VIEWS];
    int v, count = count_views(o);
    for (v = 0; v < count; v++) {
        const view *w = &o->views[v];
        views[v] = new_view(w->any ? dtype : MT_F32, w->rows == ROWS ? times * ROWS : w->rows, w->cols, 0);
    }
    mt_arena_reset_peak(ref.ctx);
    OK(o->run(ref.ctx, views));
    ref_release();
    return mt_arena_peak(ref.ctx);
}

/* More tokens need no more scratch memory, so no tensor has an f32 copy. */
static void test_scratch(void **state) {
    size_t i;
    int dtype;
    (void)state;
    for (i = 0; i < sizeof token_list / sizeof token_list[0]; i++)
        for (dtype = 0; dtype < 3; dtype++) {
            size_t one = peak_with(&token_list[i], 1, (mt_dtype)dtype);
            size_t many = peak_with(&token_list[i], 10, (mt_dtype)dtype);
            if (one != many)
                fail_msg("%s in %s: %zu bytes of scratch memory, and %zu for ten times as many tokens",
                         token_list[i].name, mt_dtype_name((mt_dtype)dtype), one, many);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        REF_TEST(test_widen),         REF_TEST(test_round),
        REF_TEST(test_known_bits),    REF_TEST(test_convert),
        REF_TEST(test_moves),         REF_TEST(test_simple),
        REF_TEST(test_activation),    REF_TEST(test_multiply),
        REF_TEST(test_sigmoid),       REF_TEST(test_linear),
        REF_TEST(test_norm),          REF_TEST(test_random_and_dropout),
        REF_TEST(test_gemm),          REF_TEST(test_attention),
        REF_TEST(test_embedding),     REF_TEST(test_embedding_memory),
        REF_TEST(test_cross_entropy), REF_TEST(test_adamw),
        REF_TEST(test_scratch),       REF_TEST(test_attention_memory),
    };
    return cmocka_run_group_tests(tests, fill_magnitudes, NULL);
}
