/* test_gemm.c - tests every form of mt_gemm against a triple loop in double precision. It is built once per GEMM
   library. */

#define MEGATRON_IMPLEMENTATION
#include "mt_kernels.cuh"
#include "mt_test.h"
#include "mt_reference.h"

#include <sys/wait.h>
#include <unistd.h>

#if defined(MT_USE_ONEDNN)
#include <dnnl.h>
#endif

/* ---- reference -------------------------------------------------------------------------------------------------- */

static float op(mt_tensor t, int transposed, int64_t i, int64_t j) {
    return transposed ? ref_row(t, j)[i] : ref_row(t, i)[j];
}

/* Checks c; `before` is its previous content. The error of an fp32 sum of k products in any order is at most k * 2^-24
   times the sum of their absolute values, and almost always about sqrt(k) * 2^-24 times. (2 + sqrt k) * 2^-24 of that
   sum holds for every order of a GEMM here, and is far smaller than the effect of a single product (about 1 / k of the
   sum). */
static void check_product(int ta, int tb, float alpha, mt_tensor a, mt_tensor b, float beta, const double *before,
                          mt_tensor c) {
    int64_t i, j, p, k = ta ? a.rows : a.cols;
    for (i = 0; i < c.rows; i++)
        for (j = 0; j < c.cols; j++) {
            double sum = 0, size = 0, old = beta != 0.0f ? (double)beta * before[i * c.cols + j] : 0, want, got,
                   allowed;
            for (p = 0; p < k; p++) {
                double product = (double)op(a, ta, i, p) * (double)op(b, tb, p, j);
                sum += product;
                size += fabs(product);
            }
            want = (double)alpha * sum + old;
            got = (double)ref_row(c, i)[j];
            allowed = (2 + sqrt((double)k)) * 5.97e-8 * (fabs((double)alpha) * size + fabs(old));
            if (!(fabs(got - want) <= allowed))
                fail_msg("%c%c m %ld n %ld k %ld alpha %g beta %g: c[%ld, %ld] is %.9g, must be %.9g", ta ? 'T' : 'N',
                         tb ? 'T' : 'N', (long)c.rows, (long)c.cols, (long)k, (double)alpha, (double)beta, (long)i,
                         (long)j, got, want);
        }
}

static void try_gemm(int ta, int tb, int64_t m, int64_t n, int64_t k, float alpha, float beta, int64_t pad) {
    mt_tensor a = ref_random(ta ? k : m, ta ? m : k, pad, 1, 0), b = ref_random(tb ? n : k, tb ? k : n, 2 * pad, 1, 0);
    /* with beta 0, c is NaN */
    mt_tensor c = beta != 0.0f ? ref_random(m, n, 3 * pad, 1, 0) : ref_guarded(m, n, 3 * pad);
    double *before = ref_values(c);
    OK(mt_gemm(ref.ctx, (mt_transpose)ta, (mt_transpose)tb, alpha, a, b, beta, c));
    check_product(ta, tb, alpha, a, b, beta, before, c);
    ref_check_guards();
    ref_release();
}

static void every_form(int64_t m, int64_t n, int64_t k, float alpha, float beta, int64_t pad) {
    int form;
    for (form = 0; form < 4; form++) try_gemm(form & 1, form >> 1, m, n, k, alpha, beta, pad);
}

/* ---- tests ------------------------------------------------------------------------------------------------------ */

/* Every m and n near the sizes of the register tiles (4, 6, 8 rows; 8, 16, 32 columns). */
static void test_tails(void **state) {
    static const int64_t sizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 31, 32, 33, 48, 63, 65};
    size_t i, j, n = sizeof sizes / sizeof *sizes;
    (void)state;
    for (i = 0; i < n; i++)
        for (j = 0; j < n; j++)
            every_form(sizes[i], sizes[j], 1 + (int64_t)((i * 7 + j * 3) % 19), 1, 0, (int64_t)(i + j) % 2);
}

static void test_depths(void **state) {
    static const int64_t depths[] = {1, 2, 15, 16, 64, 255, 256, 257, 511, 512, 513, 800};
    size_t i;
    (void)state;
    for (i = 0; i < sizeof depths / sizeof *depths; i++) every_form(19, 37, depths[i], 1, 1, 3);
}

/* Larger than every cache block: 192 rows, 2048 columns, depth 256. In one case a is packed, in another it is not. */
static void test_blocks(void **state) {
    (void)state;
    every_form(200, 70, 300, 0.5f, 0, 0);
    every_form(389, 150, 260, 1, 1, 5);
    every_form(5, 2100, 260, 1, 0, 0);
    every_form(195, 2051, 7, -1, 2, 1);
    every_form(128, 64, 1000, 0.125f, 0, 8);
    every_form(1000, 64, 128, 1, 1, 64);
}

static void test_alpha_beta(void **state) {
    static const float factors[] = {0, 1, -1, 0.5f, -2.25f, 1e-3f, 1e3f};
    size_t i, j, n = sizeof factors / sizeof *factors;
    (void)state;
    for (i = 0; i < n; i++)
        for (j = 0; j < n; j++) {
            every_form(9, 35, 11, factors[i], factors[j], 2);
            every_form(9, 35, 300, factors[i], factors[j], 0);
        }
}

static void test_random_shapes(void **state) {
    int i;
    (void)state;
    for (i = 0; i < 300; i++) {
        int64_t m = 1 + (int64_t)test_below(&ref.random, 90), n = 1 + (int64_t)test_below(&ref.random, 150);
        int64_t k = 1 + (int64_t)test_below(&ref.random, 320);
        try_gemm(i & 1, i >> 1 & 1, m, n, k, test_float(&ref.random), i % 3 ? test_float(&ref.random) : 0,
                 (int64_t)test_below(&ref.random, 20));
    }
}

/* k = 0 leaves beta c. Without rows or columns, nothing is written. */
static void test_empty(void **state) {
    int64_t sizes[3];
    int form, which;
    (void)state;
    for (form = 0; form < 4; form++)
        for (which = 0; which < 3; which++) {
            sizes[0] = sizes[1] = sizes[2] = 5;
            sizes[which] = 0;
            try_gemm(form & 1, form >> 1, sizes[0], sizes[1], sizes[2], 1, 0.5f, 2);
            try_gemm(form & 1, form >> 1, sizes[0], sizes[1], sizes[2], 1, 0, 0);
        }
    OK(mt_gemm(ref.ctx, MT_NO_TRANS, MT_NO_TRANS, 1, mt_none(), mt_none(), 0, mt_none()));
}

/* The same inputs give the same bits. */
static void test_same_bits(void **state) {
    mt_tensor a = ref_random(70, 530, 3, 1, 0), b = ref_random(530, 90, 0, 1, 0);
    mt_tensor c = ref_guarded(70, 90, 0), d = ref_guarded(70, 90, 0);
    int i;
    (void)state;
    OK(mt_gemm(ref.ctx, MT_NO_TRANS, MT_NO_TRANS, 1, a, b, 0, c));
    for (i = 0; i < 5; i++) {
        OK(mt_gemm(ref.ctx, MT_NO_TRANS, MT_NO_TRANS, 1, a, b, 0, d));
        assert_memory_equal(c.data, d.data, 70 * 90 * sizeof(float));
    }
}

/* a and b may be the same memory, because both are only read. */
static void test_gram(void **state) {
    mt_tensor a = ref_random(40, 60, 4, 1, 0), c = ref_guarded(40, 40, 0);
    (void)state;
    OK(mt_gemm(ref.ctx, MT_NO_TRANS, MT_TRANS, 1, a, a, 0, c));
    check_product(0, 1, 1, a, a, 0, NULL, c);
}

/* Infinities and NaN appear in the elements whose products contain them, and in no others. */
static void test_not_finite(void **state) {
    mt_tensor a = ref_filled(20, 40, 0, 1), b = ref_filled(40, 50, 0, 1), c = ref_guarded(20, 50, 0);
    int64_t i, j;
    (void)state;
    ref_row(a, 13)[7] = INFINITY;
    ref_row(b, 30)[44] = NAN;
    OK(mt_gemm(ref.ctx, MT_NO_TRANS, MT_NO_TRANS, 1, a, b, 0, c));
    for (i = 0; i < 20; i++)
        for (j = 0; j < 50; j++) {
            float got = ref_row(c, i)[j];
            assert_true(j == 44 ? got != got : i == 13 ? got == INFINITY : got == 40.0f);
        }
}

static mt_tensor with_ld(mt_tensor t, int64_t ld) {
    t.ld = ld;
    return t;
}

static void test_bad_inputs(void **state) {
    mt_tensor a = ref_random(3, 4, 0, 1, 0), b = ref_random(4, 5, 0, 1, 0), c = ref_random(3, 5, 0, 1, 0), null = a;
    mt_context *ctx = ref.ctx;
    (void)state;
    null.data = NULL;
#define GEMM(a, b, c) mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, a, b, 0, c)
    assert_int_equal(mt_gemm(NULL, MT_NO_TRANS, MT_NO_TRANS, 1, a, b, 0, c), MT_ERR_ARGUMENT);
    ASSERT_REFUSED(MT_ERR_SHAPE, "mt_gemm: a is [3, 5], b is [4, 5]: inner sizes 5 and 4 differ", GEMM(c, b, c));
    ASSERT_REFUSED(MT_ERR_SHAPE, "a is [3, 4] transposed, b is [4, 5]: inner sizes 3 and 4",
                   mt_gemm(ctx, MT_TRANS, MT_NO_TRANS, 1, a, b, 0, c));
    ASSERT_REFUSED(MT_ERR_SHAPE, "a is [3, 4], b is [4, 5] transposed: inner sizes 4 and 5",
                   mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1, a, b, 0, c));
    ASSERT_REFUSED(MT_ERR_SHAPE, "c is [3, 4], must be [3, 5]", GEMM(a, b, a));
    ASSERT_REFUSED(MT_ERR_SHAPE, "c is [4, 5], must be [3, 5]", GEMM(a, b, b));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "trans_a is 2, must be MT_NO_TRANS or MT_TRANS",
                   mt_gemm(ctx, (mt_transpose)2, MT_NO_TRANS, 1, a, b, 0, c));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "trans_b is 3, must be MT_NO_TRANS or MT_TRANS",
                   mt_gemm(ctx, MT_NO_TRANS, (mt_transpose)3, 1, a, b, 0, c));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "a is [3, 4] but its data is NULL", GEMM(null, b, c));
    ASSERT_REFUSED(MT_ERR_SHAPE, "a is [3, 4] with ld 3", GEMM(with_ld(a, 3), b, c));
    ASSERT_REFUSED(MT_ERR_SHAPE, "b is [4, 5] with ld -5", GEMM(a, with_ld(b, -5), c));
    ASSERT_REFUSED(MT_ERR_SHAPE, "c is [3, 5] with ld 4", GEMM(a, b, with_ld(c, 4)));
    ASSERT_REFUSED(MT_ERR_SHAPE, "a is [-3, 4]", GEMM(mt_tensor_f32((float *)a.data, -3, 4), b, c));
    ASSERT_REFUSED(MT_ERR_SHAPE, "a is [3, 4] with ld 9223372036854775807", GEMM(with_ld(a, INT64_MAX), b, c));
    ASSERT_REFUSED(MT_ERR_UNSUPPORTED, "largest ld 3000000000", GEMM(with_ld(a, 3000000000), b, c));
    ASSERT_REFUSED(MT_ERR_DTYPE, "b is u8, must be f32, bf16 or f16", GEMM(a, with_dtype(b, MT_U8), c));
    ASSERT_REFUSED(MT_ERR_DTYPE, "c is i32, must be f32", GEMM(a, b, with_dtype(c, MT_I32)));
    ASSERT_REFUSED(MT_ERR_DTYPE, "a.dtype is 77, must be MT_F32, MT_BF16, MT_F16, MT_I32 or MT_U8",
                   GEMM(with_dtype(a, (mt_dtype)77), b, c));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "c [4, 4] and a [4, 4] overlap",
                   GEMM(mt_tensor_f32((float *)b.data, 4, 4), mt_tensor_f32((float *)c.data, 4, 4) /* never read */,
                        mt_tensor_f32((float *)b.data, 4, 4)));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "c [2, 2] and b [2, 2] overlap",
                   GEMM(mt_tensor_f32((float *)a.data, 2, 2), mt_tensor_f32((float *)c.data, 2, 2),
                        mt_tensor_f32((float *)c.data, 2, 2)));
#undef GEMM
}

/* A meta context checks its arguments, counts the same scratch memory as the CPU, and accesses no data. */
static void test_meta(void **state) {
    mt_tensor a = ref_random(100, 300, 0, 1, 0), b = ref_random(300, 200, 0, 1, 0), c = ref_random(100, 200, 0, 1, 0);
    mt_context_desc d;
    mt_context *meta = NULL;
    uint64_t hash = ref_hash();
    (void)state;
    memset(&d, 0, sizeof d);
    d.device = MT_DEVICE_META;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &meta));
    ASSERT_STATUS(meta, MT_SUCCESS, mt_gemm(meta, MT_NO_TRANS, MT_NO_TRANS, 1, a, b, 0, c));
    ASSERT_STATUS(meta, MT_ERR_SHAPE, mt_gemm(meta, MT_NO_TRANS, MT_NO_TRANS, 1, b, a, 0, c));
    assert_true(hash == ref_hash());
    OK(mt_gemm(ref.ctx, MT_NO_TRANS, MT_NO_TRANS, 1, a, b, 0, c));
    assert_int_equal(mt_arena_peak(meta), mt_arena_peak(ref.ctx));
    mt_context_destroy(meta);
}

/* The built-in GEMM packs into the arena. An arena that is too small gives an error, and c stays unchanged. */
static void test_small_arena(void **state) {
    mt_tensor a = ref_random(100, 300, 0, 1, 0), b = ref_random(300, 200, 0, 1, 0), c = ref_random(100, 200, 0, 1, 0);
    mt_context_desc d;
    mt_context *ctx = NULL;
    uint64_t hash = ref_hash();
    mt_status status;
    (void)state;
    memset(&d, 0, sizeof d);
    d.arena_bytes = 4096;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
    status = mt_gemm(ctx, MT_NO_TRANS, MT_NO_TRANS, 1, a, b, 0, c);
    if (strcmp(mt_gemm_library(), "built-in") == 0) {
        assert_int_equal(status, MT_ERR_MEMORY);
        assert_true(hash == ref_hash());
    } else {
        assert_int_equal(status, MT_SUCCESS);
    }
    assert_int_equal(mt_arena_mark(ctx), 0);
    mt_context_destroy(ctx);
}

/* ---- 16-bit types ----------------------------------------------------------------------------------------------- */

#define GUARD16 0x7fe5u /* a NaN in bf16 and in f16 */

typedef struct types {
    mt_dtype a, b, c;
} types;

static double value_of(mt_tensor t, int64_t i, int64_t j) {
    uint16_t h;
    if (t.dtype == MT_F32) return (double)ref_row(t, i)[j];
    h = ((const uint16_t *)t.data)[i * t.ld + j];
    if (t.dtype == MT_BF16) {
        uint32_t bits = (uint32_t)h << 16;
        float x;
        memcpy(&x, &bits, sizeof x);
        return (double)x;
    }
    if ((h & 0x7fff) > 0x7c00) return NAN;
    return (h & 0x8000 ? -1.0 : 1.0) *
           ldexp((h & 0x3ff) | (h & 0x7c00 ? 0x400 : 0), (h & 0x7c00 ? h >> 10 & 31 : 1) - 25);
}

/* A matrix of random numbers below 2 in its type. Its memory ends with the last element; the gaps between the rows are
   NaN. With `filled` 0 all of it is NaN. */
static mt_tensor random_of(mt_dtype dtype, int64_t rows, int64_t cols, int64_t pad, int filled) {
    int64_t ld = cols + pad, n = rows > 0 && cols > 0 ? (rows - 1) * ld + cols : 0, i, j;
    uint16_t *data;
    mt_tensor t;
    if (dtype == MT_F32) return filled ? ref_random(rows, cols, pad, 1, 0) : ref_guarded(rows, cols, pad);
    data = (uint16_t *)ref_bytes((size_t)n * sizeof *data);
    for (i = 0; i < n; i++) data[i] = GUARD16;
    t = with_shape(mt_tensor_make(data, dtype, rows, cols), rows, cols, ld);
    for (i = 0; filled && i < rows; i++)
        for (j = 0; j < cols; j++) {
            uint64_t word = test_random(&ref.random);
            unsigned exponent = (unsigned)(word >> 32 & 3), bits = (unsigned)(word & 0xffff);
            data[i * ld + j] = (uint16_t)(dtype == MT_BF16 ? (bits & 0x807f) | (124 + exponent) << 7
                                                           : (bits & 0x83ff) | (12 + exponent) << 10);
        }
    return t;
}

static double *values_of(mt_tensor t) {
    double *x = ref_doubles((size_t)(t.rows * t.cols));
    int64_t i, j;
    for (i = 0; i < t.rows; i++)
        for (j = 0; j < t.cols; j++) x[i * t.cols + j] = value_of(t, i, j);
    return x;
}

/* As check_product: the products of 16-bit numbers are exact, and their sum has the error of an fp32 sum. A 16-bit
   result is rounded once more. */
static void check_16bit(int ta, int tb, float alpha, mt_tensor a, mt_tensor b, float beta, const double *before,
                        mt_tensor c) {
    double round = c.dtype == MT_F32 ? 0 : c.dtype == MT_BF16 ? 1.0 / 256 : 1.0 / 2048;
    const double *va = values_of(a), *vb = values_of(b);
    int64_t i, j, p, k = ta ? a.rows : a.cols;
    for (i = 0; i < c.rows; i++) {
        for (j = 0; j < c.cols; j++) {
            double sum = 0, size = 0, old = beta != 0.0f ? (double)beta * before[i * c.cols + j] : 0, want, allowed;
            for (p = 0; p < k; p++) {
                double product = va[ta ? p * a.cols + i : i * a.cols + p] * vb[tb ? j * b.cols + p : p * b.cols + j];
                sum += product;
                size += fabs(product);
            }
            want = (double)alpha * sum + old;
            allowed = (2 + sqrt((double)k)) * 5.97e-8 * (fabs((double)alpha) * size + fabs(old));
            allowed += round * (fabs(want) + allowed) + (c.dtype == MT_F16 ? 3e-8 : 0);
            if (!(fabs(value_of(c, i, j) - want) <= allowed))
                fail_msg("%c%c %s %s %s m %ld n %ld k %ld alpha %g beta %g: c[%ld, %ld] is %.9g, must be %.9g",
                         ta ? 'T' : 'N', tb ? 'T' : 'N', mt_dtype_name(a.dtype), mt_dtype_name(b.dtype),
                         mt_dtype_name(c.dtype), (long)c.rows, (long)c.cols, (long)k, (double)alpha, (double)beta,
                         (long)i, (long)j, value_of(c, i, j), want);
        }
        for (j = c.cols; c.dtype != MT_F32 && i + 1 < c.rows && j < c.ld; j++)
            assert_int_equal(((const uint16_t *)c.data)[i * c.ld + j], GUARD16);
    }
    ref_check_guards();
}

static void try_16bit(types t, int form, int64_t m, int64_t n, int64_t k, float alpha, float beta, int64_t pad) {
    int ta = form & 1, tb = form >> 1;
    mt_tensor a = random_of(t.a, ta ? k : m, ta ? m : k, pad, 1),
              b = random_of(t.b, tb ? n : k, tb ? k : n, 2 * pad, 1);
    mt_tensor c = random_of(t.c, m, n, 3 * pad, beta != 0.0f);
    const double *before = values_of(c);
    OK(mt_gemm(ref.ctx, (mt_transpose)ta, (mt_transpose)tb, alpha, a, b, beta, c));
    check_16bit(ta, tb, alpha, a, b, beta, before, c);
    ref_release();
}

static const types type_list[] = {
    {MT_BF16, MT_BF16, MT_BF16}, {MT_BF16, MT_BF16, MT_F32}, {MT_F16, MT_F16, MT_F16},  {MT_F16, MT_F16, MT_F32},
    {MT_BF16, MT_BF16, MT_F16},  {MT_BF16, MT_F16, MT_F32},  {MT_F32, MT_BF16, MT_F32}, {MT_F16, MT_F32, MT_BF16},
};
#define TYPES (sizeof type_list / sizeof *type_list)

/* Every combination of types in which a library may read 16-bit operands as they are, and others. */
static void test_16bit_forms(void **state) {
    static const int64_t sizes[][3] = {{1, 1, 1},   {1, 1, 2},    {2, 3, 5},     {7, 19, 33},  {67, 71, 131},
                                       {8, 48, 64}, {33, 32, 31}, {5, 2100, 70}, {200, 6, 300}};
    static const float factors[][2] = {{1, 0}, {1, 1}, {1, -0.5f}, {0.25f, 0}, {-2, 2}};
    size_t t, s, f, i = 0;
    int form;
    (void)state;
    for (t = 0; t < TYPES; t++)
        for (s = 0; s < sizeof sizes / sizeof *sizes; s++)
            for (f = 0; f < sizeof factors / sizeof *factors; f++)
                for (form = 0; form < 4; form++)
                    if (test_takes(i++, 3))
                        try_16bit(type_list[t], form, sizes[s][0], sizes[s][1], sizes[s][2], factors[f][0],
                                  factors[f][1], (int64_t)(s + f + (size_t)form) % 3);
}

static void test_16bit_random(void **state) {
    int i;
    (void)state;
    for (i = 0; i < 200; i++) {
        int64_t m = 1 + (int64_t)test_below(&ref.random, 90), n = 1 + (int64_t)test_below(&ref.random, 150);
        try_16bit(type_list[i % 4], i / 4 % 4, m, n, 1 + (int64_t)test_below(&ref.random, 320), 1, (float)(i % 3) / 2,
                  (int64_t)test_below(&ref.random, 20));
    }
}

/* k or alpha is 0: c becomes beta c. */
static void test_16bit_empty(void **state) {
    size_t t;
    int form;
    (void)state;
    for (t = 0; t < TYPES; t++)
        for (form = 0; form < 4; form++) {
            try_16bit(type_list[t], form, 5, 7, 0, 1, 0.5f, 1);
            try_16bit(type_list[t], form, 5, 7, 0, 1, 0, 1);
            try_16bit(type_list[t], form, 5, 7, 3, 0, 0.5f, 1);
            try_16bit(type_list[t], form, 0, 7, 3, 1, 0.5f, 1);
        }
}

/* ---- few rows --------------------------------------------------------------------------------------------------- */

/* The products of decoding, with 1 to 9 rows of activations. The sizes are near those of a register (4, 8, 16, 32
   elements) and of a block of k (256, 384). */
static void test_few_rows(void **state) {
    static const int64_t ns[] = {1, 3, 4, 15, 16, 17, 33, 70}, ks[] = {3, 4, 16, 31, 32, 33, 47, 256, 300, 389, 801};
    static const float factors[][2] = {{1, 0}, {1, 1}, {-0.5f, 0.25f}};
    size_t n, k, f, t, i = 0;
    int64_t m;
    (void)state;
    for (t = 0; t <= TYPES; t++)
        for (n = 0; n < sizeof ns / sizeof *ns; n++)
            for (k = 0; k < sizeof ks / sizeof *ks; k++)
                for (f = 0; f < 3; f++)
                    for (m = 1; m <= 9; m++) {
                        types x = {MT_F32, MT_F32, MT_F32};
                        if (t < TYPES) x = type_list[t];
                        if (test_takes(i++, 17))
                            try_16bit(x, 2, m, ns[n], ks[k], factors[f][0], factors[f][1], (int64_t)(i % 3));
                    }
}

/* The first row of b that is not finite makes one column of c so. */
static void test_few_not_finite(void **state) {
    size_t t;
    (void)state;
    for (t = 0; t < 4; t += 2) {
        mt_tensor a = random_of(type_list[t].a, 3, 40, 0, 1), b = random_of(type_list[t].b, 21, 40, 2, 1);
        mt_tensor c = random_of(MT_F32, 3, 21, 0, 0);
        int64_t i, j;
        ((uint16_t *)b.data)[7 * b.ld + 39] = t ? 0x7c00 : 0x7f80;
        ((uint16_t *)b.data)[9 * b.ld + 1] = GUARD16;
        OK(mt_gemm(ref.ctx, MT_NO_TRANS, MT_TRANS, 1, a, b, 0, c));
        for (i = 0; i < 3; i++)
            for (j = 0; j < 21; j++) {
                float got = ref_row(c, i)[j];
                assert_true(j == 9 ? got != got : (j == 7) == (fabsf(got) > 1e30f));
            }
        ref_release();
    }
}

/* The bits of a row do not depend on the number of rows: with the built-in loop never, with a library from 1 to 4. */
static void test_rows_alone(void **state) {
    static const int64_t ks[] = {40, 256, 300, 800};
    int builtin = strcmp(mt_gemm_library(), "built-in") == 0;
    size_t t, k;
    (void)state;
    for (t = 0; t <= TYPES; t++)
        for (k = 0; k < 4; k++) {
            types x = {MT_F32, MT_F32, MT_F32};
            int64_t rows = builtin ? 40 : 4, m, i;
            mt_tensor a, b, all, some, before;
            size_t size;
            if (t < TYPES) x = type_list[t];
            size = 37 * mt_dtype_size(x.c);
            a = random_of(x.a, rows, ks[k], 0, 1);
            b = random_of(x.b, 37, ks[k], 1, 1);
            before = random_of(x.c, rows, 37, 0, 1);
            all = random_of(x.c, rows, 37, 0, 0);
            some = random_of(x.c, rows, 37, 0, 0);
            OK(mt_copy(ref.ctx, before, all));
            OK(mt_gemm(ref.ctx, MT_NO_TRANS, MT_TRANS, 0.75f, a, b, 0.5f, all));
            for (m = 1; m < rows; m++)
                for (i = 0; i + m <= rows; i += m + 3) {
                    mt_tensor y = mt_tensor_rows(some, i, m);
                    OK(mt_copy(ref.ctx, before, some));
                    OK(mt_gemm(ref.ctx, MT_NO_TRANS, MT_TRANS, 0.75f, mt_tensor_rows(a, i, m), b, 0.5f, y));
                    assert_memory_equal(y.data, mt_tensor_rows(all, i, m).data, (size_t)m * size);
                }
            ref_release();
        }
}

/* ---- threads of a context ---------------------------------------------------------------------------------------- */

/* 1 to 5 threads share a product. With the built-in loop, and with few rows, each of them gives the same bits. */
static void try_threads(types t, int form, int64_t m, int64_t n, int64_t k, float alpha, float beta) {
    int ta = form & 1, tb = form >> 1, threads, same = strcmp(mt_gemm_library(), "built-in") == 0;
    mt_tensor a = random_of(t.a, ta ? k : m, ta ? m : k, 1, 1), b = random_of(t.b, tb ? n : k, tb ? k : n, 2, 1);
    mt_tensor before = random_of(t.c, m, n, 0, 1), one = random_of(t.c, m, n, 0, 0);
    const double *values = values_of(before);
    same = same || (m <= 4 && form == 2 && k >= 32);
    for (threads = 1; threads <= 5; threads++) {
        mt_context *ctx = test_context(MT_DEVICE_CPU, threads);
        mt_tensor c = threads == 1 ? one : random_of(t.c, m, n, 0, 0);
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_copy(ctx, before, c));
        ASSERT_STATUS(ctx, MT_SUCCESS, mt_gemm(ctx, (mt_transpose)ta, (mt_transpose)tb, alpha, a, b, beta, c));
        check_16bit(ta, tb, alpha, a, b, beta, values, c);
        if (same) assert_memory_equal(c.data, one.data, (size_t)(m * n) * mt_dtype_size(t.c));
        mt_context_destroy(ctx);
    }
    ref_release();
}

static void test_threads(void **state) {
    static const int64_t sizes[][3] = {{130, 150, 140}, {150, 130, 140}, {33, 700, 70}, {700, 33, 70},
                                       {1, 3000, 64},   {3, 1500, 301},  {7, 900, 300}, {200, 300, 0}};
    size_t t, i, n = sizeof sizes / sizeof *sizes;
    int form;
    (void)state;
    for (t = 0; t <= 4; t++)
        for (i = 0; i < n; i++)
            for (form = 0; form < 4; form++) {
                types x = {MT_F32, MT_F32, MT_F32};
                if (t < 4) x = type_list[t];
                if (t == 4 || test_takes(t * n * 4 + i * 4 + (size_t)form, 3))
                    try_threads(x, form, sizes[i][0], sizes[i][1], sizes[i][2], i % 2 ? -0.5f : 1,
                                form % 2 ? 1 : 0.25f);
            }
}

/* The arena of a meta context counts the scratch memory of all threads. */
static void test_threads_memory(void **state) {
    static const types t = {MT_BF16, MT_BF16, MT_BF16};
    int threads;
    (void)state;
    for (threads = 1; threads <= 3; threads++) {
        mt_context *real = test_context(MT_DEVICE_CPU, threads), *meta = test_context(MT_DEVICE_META, threads);
        mt_tensor a = random_of(t.a, 300, 100, 0, 1), b = random_of(t.b, 200, 100, 0, 1),
                  c = random_of(t.c, 300, 200, 0, 0);
        ASSERT_STATUS(real, MT_SUCCESS, mt_gemm(real, MT_NO_TRANS, MT_TRANS, 1, a, b, 0, c));
        ASSERT_STATUS(meta, MT_SUCCESS, mt_gemm(meta, MT_NO_TRANS, MT_TRANS, 1, a, b, 0, c));
        assert_int_equal(mt_arena_peak(real), mt_arena_peak(meta));
        assert_true(mt_arena_peak(real) > 0);
        mt_context_destroy(real);
        mt_context_destroy(meta);
        ref_release();
    }
}

/* A product with few rows takes no copy of its weight. */
static void test_few_memory(void **state) {
    static const types t = {MT_BF16, MT_BF16, MT_BF16};
    (void)state;
    mt_arena_reset_peak(ref.ctx);
    try_16bit(t, 2, 3, 500, 512, 1, 0, 1);
    assert_true(mt_arena_peak(ref.ctx) < (size_t)16384);
}

/* Hashes the results of products of many shapes: more than a context keeps plans for. */
static mt_status many_shapes(mt_context *ctx, mt_tensor a, mt_tensor b, mt_tensor c, uint64_t *hash) {
    int64_t i;
    *hash = 0;
    for (i = 0; i < 100; i++) {
        int64_t m = 1 + i % 9, n = 1 + i / 9, k = 40 + i;
        mt_tensor x = mt_tensor_make(a.data, a.dtype, m, k), y = mt_tensor_make(b.data, b.dtype, n, k);
        mt_tensor z = mt_tensor_make(c.data, c.dtype, m, n);
        MT_TRY(mt_gemm(ctx, MT_NO_TRANS, MT_TRANS, 1, x, y, 0, z));
        MT_TRY(mt_hash(ctx, z, i, 0, 100, hash));
    }
    return MT_SUCCESS;
}

/* A product has the same bits after its plan was evicted, and in a new context. */
static void test_16bit_many_shapes(void **state) {
    size_t t;
    (void)state;
    for (t = 0; t < 4; t++) {
        mt_tensor a = random_of(type_list[t].a, 1, 1300, 0, 1), b = random_of(type_list[t].b, 1, 1700, 0, 1);
        mt_tensor c = random_of(type_list[t].c, 1, 110, 0, 0);
        uint64_t first = 0, again = 0, fresh = 0;
        OK(many_shapes(ref.ctx, a, b, c, &first));
        OK(many_shapes(ref.ctx, a, b, c, &again));
        mt_context_destroy(ref.ctx);
        ref_setup(state);
        OK(many_shapes(ref.ctx, a, b, c, &fresh));
        assert_true(first == again && first == fresh && first != 0);
        ref_release();
    }
}

typedef struct two_threads {
    mt_tensor a, b;
    uint64_t hash[2];
} two_threads;

static mt_status thread_of_two(mt_comm *world, void *user) {
    two_threads *t = (two_threads *)user;
    uint16_t room[110];
    mt_context_desc d;
    mt_context *ctx = NULL;
    mt_status status;
    int i;
    memset(&d, 0, sizeof d);
    d.threads = 1;
    MT_TRY(mt_context_create(NULL, &d, &ctx));
    status = MT_SUCCESS;
    for (i = 0; i < 5 && status == MT_SUCCESS; i++)
        status = many_shapes(ctx, t->a, t->b, mt_tensor_make(room, t->a.dtype, 1, 110), &t->hash[mt_comm_rank(world)]);
    mt_context_destroy(ctx);
    return status;
}

/* Two contexts in two threads compute the same bits as one context. */
static void test_16bit_two_threads(void **state) {
    mt_launch_desc launch;
    int type;
    (void)state;
    memset(&launch, 0, sizeof launch);
    launch.ranks = 2;
    for (type = 0; type < 2; type++) {
        mt_dtype dtype = type ? MT_F16 : MT_BF16;
        two_threads t;
        uint64_t want = 0;
        memset(&t, 0, sizeof t);
        t.a = random_of(dtype, 1, 1300, 0, 1);
        t.b = random_of(dtype, 1, 1700, 0, 1);
        OK(many_shapes(ref.ctx, t.a, t.b, random_of(dtype, 1, 110, 0, 0), &want));
        ASSERT_STATUS(NULL, MT_SUCCESS, mt_launch(&launch, thread_of_two, &t));
        assert_true(t.hash[0] == want && t.hash[1] == want);
        ref_release();
    }
}

#if defined(MT_USE_ONEDNN)
/* oneDNN reads bf16 as it is exactly where the processor has instructions for bf16. Elsewhere mt_gemm widens the
   operands to copies in the arena. */
static void test_16bit_memory(void **state) {
    static const types t = {MT_BF16, MT_BF16, MT_F32};
    int bf16 = (int)dnnl_cpu_isa_avx512_core_bf16, native = ((int)dnnl_get_effective_cpu_isa() & bf16) == bf16, form;
    (void)state;
    if (getenv("ONEDNN_MAX_CPU_ISA")) assert_false(native);
    for (form = 0; form < 8; form++) {
        mt_arena_reset_peak(ref.ctx);
        try_16bit(t, form & 3, 256, 256, 256, 1, 0, form / 4 * 8);
        assert_true((mt_arena_peak(ref.ctx) < (size_t)2 * 256 * 256 * sizeof(float)) == native);
    }
}
#endif

#if defined(MT_USE_ONEDNN) && defined(__x86_64__) && defined(__linux__)
/* Runs the tests of 16-bit products in a process in which oneDNN has no instructions for bf16: in AVX512_CORE it
   emulates them, and in AVX2 it has no product in bf16. */
static void test_without_bf16(void **state) {
    static const char *const sets[] = {"AVX512_CORE", "AVX2"};
    size_t i;
    (void)state;
    for (i = 0; i < 2; i++) {
        int status = 0;
        pid_t child = fork();
        if (child == 0) {
            char name[] = "test_gemm", *argv[] = {name, NULL};
            setenv("ONEDNN_MAX_CPU_ISA", sets[i], 1);
            setenv("MT_TEST_CASE", "test_16bit", 1);
            execv("/proc/self/exe", argv);
            _exit(127);
        }
        assert_true(child > 0 && waitpid(child, &status, 0) == child);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }
}
#endif

/* ---- the name of the library ------------------------------------------------------------------------------------ */

/* Returns 1 if a library with this name is loaded in the process, 0 if not, -1 if Linux's list of libraries is
   missing. */
static int is_loaded(const char *name) {
    char line[4096];
    int found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    if (!maps) return -1;
    while (fgets(line, sizeof line, maps)) {
        const char *file = strrchr(line, '/');
        found |= file && strncmp(file, "/lib", 4) == 0 && strstr(file, name) != NULL;
    }
    fclose(maps);
    return found;
}

/* mt_gemm_library names the library that is really loaded, and with oneDNN also its version. */
static void test_library_name(void **state) {
    const char *name = mt_gemm_library();
    int dnnl = is_loaded("dnnl"), blas = is_loaded("blas");
    (void)state;
    if (dnnl < 0) skip();
#if defined(MT_USE_ONEDNN)
    char expected[64];
    const dnnl_version_t *version = dnnl_version();
    snprintf(expected, sizeof expected, "oneDNN %d.%d.%d", version->major, version->minor, version->patch);
    assert_string_equal(name, expected);
#endif
    if (dnnl) assert_int_equal(strncmp(name, "oneDNN ", 7), 0);
    else if (blas) assert_string_equal(name, "CBLAS");
    else assert_string_equal(name, "built-in");
}

static void test_options(void **state) {
    mt_gemm_options o = {MT_GEMM_HEURISTIC, MT_EPILOGUE_MEASURED};
    mt_context_desc d;
    mt_context *ctx = NULL;
    (void)state;
    memset(&d, 0, sizeof d);
    d.arena_bytes = 4096;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
    assert_int_equal(mt_gemm_get_options(ctx).choice, MT_GEMM_MEASURED);
    assert_int_equal(mt_gemm_get_options(ctx).epilogue, MT_EPILOGUE_SEPARATE);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_gemm_set_options(ctx, &o));
    o.choice = (mt_gemm_choice)2;
    ASSERT_STATUS(ctx, MT_ERR_ARGUMENT, mt_gemm_set_options(ctx, &o));
    assert_non_null(strstr(mt_last_error(ctx), "choice is 2, must be MT_GEMM_MEASURED or MT_GEMM_HEURISTIC"));
    o.choice = MT_GEMM_MEASURED;
    o.epilogue = (mt_epilogue)3;
    ASSERT_STATUS(ctx, MT_ERR_ARGUMENT, mt_gemm_set_options(ctx, &o));
    assert_non_null(strstr(mt_last_error(ctx),
                           "epilogue is 3, must be MT_EPILOGUE_SEPARATE, MT_EPILOGUE_FUSED or MT_EPILOGUE_MEASURED"));
    assert_int_equal(mt_gemm_get_options(ctx).choice, MT_GEMM_HEURISTIC);
    assert_int_equal(mt_gemm_get_options(ctx).epilogue, MT_EPILOGUE_MEASURED);
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_gemm_set_options(ctx, NULL));
    assert_int_equal(mt_gemm_get_options(ctx).choice, MT_GEMM_MEASURED);
    assert_int_equal(mt_gemm_get_options(ctx).epilogue, MT_EPILOGUE_SEPARATE);
    assert_int_equal(mt_gemm_set_options(NULL, NULL), MT_ERR_ARGUMENT);
    mt_context_destroy(ctx);
    d.invariant = 2;
    o.epilogue = MT_EPILOGUE_FUSED;
    ASSERT_STATUS(NULL, MT_SUCCESS, mt_context_create(NULL, &d, &ctx));
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_gemm_set_options(ctx, &o));
    assert_int_equal(mt_gemm_get_options(ctx).epilogue, MT_EPILOGUE_SEPARATE);
    mt_context_destroy(ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        REF_TEST(test_tails),
        REF_TEST(test_depths),
        REF_TEST(test_blocks),
        REF_TEST(test_alpha_beta),
        REF_TEST(test_random_shapes),
        REF_TEST(test_empty),
        REF_TEST(test_same_bits),
        REF_TEST(test_gram),
        REF_TEST(test_not_finite),
        REF_TEST(test_bad_inputs),
        REF_TEST(test_meta),
        REF_TEST(test_small_arena),
        REF_TEST(test_16bit_forms),
        REF_TEST(test_16bit_random),
        REF_TEST(test_16bit_empty),
        REF_TEST(test_few_rows),
        REF_TEST(test_few_not_finite),
        REF_TEST(test_rows_alone),
        REF_TEST(test_few_memory),
        REF_TEST(test_threads),
        REF_TEST(test_threads_memory),
        REF_TEST(test_16bit_many_shapes),
        REF_TEST(test_16bit_two_threads),
#if defined(MT_USE_ONEDNN)
        REF_TEST(test_16bit_memory),
#endif
#if defined(MT_USE_ONEDNN) && defined(__x86_64__) && defined(__linux__)
        REF_TEST(test_without_bf16),
#endif
        REF_TEST(test_library_name),
        REF_TEST(test_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
