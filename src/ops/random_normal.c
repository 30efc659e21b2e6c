/* ---- normal random numbers --------------------------------------------------------------------------------------- */

#pragma once
#include "numbers.c"
#include "operator.c"
#include "random_normal.cuh"

/* A word w becomes the uniform number (w + 1/2) / 2^32 in (0, 1). The first word of a pair gives the radius and the
   second one the angle of the Box-Muller transform. All of it is computed in double. The functions of libm would take
   ten times as long, because loops with them do not vectorise. The polynomials are fitted like q in mti_exp. */
#define MTI_NORMALS (4 * MTI_PHILOX_GROUP) /* numbers that are computed together */
#define MTI_UNIT 2.3283064365386963e-10    /* 2^-32 */

MT_INLINE uint64_t mti_f64_bits(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

MT_INLINE double mti_f64_from_bits(uint64_t u) {
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* u as a double, for u < 2^52: the low bits of 2^52 + u are u. Compilers vectorise this for every processor. */
MT_INLINE double mti_f64_from_small(uint64_t u) {
    return mti_f64_from_bits(0x4330000000000000u | u) - 4503599627370496.0;
}

/* log(x) for a positive normal x. x = 2^k (1 + f) with sqrt(1/2) < 1 + f < sqrt(2), and s = f / (2 + f). Then
   log(1 + f) = 2 atanh(s) = f - (f^2/2 - s (f^2/2 + R(s^2))). ln 2 is split into two parts. The first one has zeros
   in its last bits, so that its product with k is exact. The error of the polynomial R is 1.2e-18 of the logarithm. The
   relative error of the function is at most 1.5e-16. */
MT_INLINE double mti_log(double x) {
    uint64_t t = mti_f64_bits(x) + (0x3ff0000000000000u - 0x3fe6a09e667f3bcdu); /* 1 over sqrt(1/2) */
    double k = mti_f64_from_small(t >> 52) - 1023.0;
    double f = mti_f64_from_bits((t & 0x000fffffffffffffu) + 0x3fe6a09e667f3bcdu) - 1.0;
    double s = f / (2.0 + f), z = s * s, half = 0.5 * f * f;
    double r = 0.14795589293255956 * z + 0.15314086467533619;
    r = r * z + 0.18183562936423375;
    r = r * z + 0.22222198599339862;
    r = r * z + 0.28571428742143673;
    r = r * z + 0.39999999999415681;
    r = r * z + 0.6666666666666734;
    return k * 0.69314670562744141 - ((half - (s * (half + r * z) + k * 4.7493250390316726e-07)) - f);
}

/* sqrt(x) for a positive normal x, as in mti_sqrt: an estimate from the bits of x, three Newton steps for 1 / sqrt(x),
   and a Heron step. The relative error is at most 1.7e-16. */
MT_INLINE double mti_sqrt64(double x) {
    double y = mti_f64_from_bits(0x5fe6eb50c7b537a9u - (mti_f64_bits(x) >> 1)), half = 0.5 * x, s;
    y = y * (1.5 - half * y * y);
    y = y * (1.5 - half * y * y);
    y = y * (1.5 - half * y * y);
    s = x * y;
    return s + 0.5 * y * (x - s * s);
}

/* The cosine and the sine of the angle 2 pi (w + 1/2) / 2^32. It subtracts a multiple of pi / 2, so that |r| <= pi / 4.
   pi / 2 is split into two parts like ln 2 in mti_log. The relative errors of the polynomials are 5.6e-20 and 3.6e-18,
   and those of the results at most 2.2e-16. `turn` is the quadrant of the angle, 0 to 4. It says which result is which,
   and which one is negative. */
MT_INLINE void mti_cos_sin(uint32_t w, double *cosine, double *sine) {
    uint64_t turn = (((uint64_t)w >> 29) + 1) >> 1, swap = 0u - (turn & 1), c_bits, s_bits;
    double n = mti_f64_from_small(turn), angle = 6.283185307179586 * (mti_f64_from_small(w) + 0.5) * MTI_UNIT;
    double r = (angle - n * 1.5707963267948912) - n * 5.390302858158119e-15, z = r * r;
    double c = -1.1358519527043562e-11 * z + 2.0875700508847285e-09, s = 1.5896199135672115e-10 * z;
    s = (s - 2.5050747206257849e-08) * z + 2.7557313617632498e-06;
    c = c * z - 2.755731417679271e-07;
    s = s * z - 0.00019841269829577851;
    c = c * z + 2.4801587288842763e-05;
    s = s * z + 0.0083333333333221026;
    c = c * z - 0.0013888888888873041;
    s = s * z - 0.1666666666666663;
    c = c * z + 0.041666666666666595;
    s_bits = mti_f64_bits(r + r * (z * s));
    c_bits = mti_f64_bits(1.0 - (0.5 * z - z * z * c));
    *cosine = mti_f64_from_bits(((c_bits & ~swap) | (s_bits & swap)) ^ (((turn + 1) & 2) << 62));
    *sine = mti_f64_from_bits(((s_bits & ~swap) | (c_bits & swap)) ^ ((turn & 2) << 62));
}

/* y = MTI_NORMALS normal numbers from as many words. */
static void mti_normal_group(const uint32_t *words, double std, float *y) {
    int i;
    MT_INDEPENDENT
    for (i = 0; i < MTI_NORMALS / 2; i++) {
        double radius = std * mti_sqrt64(-2.0 * mti_log((mti_f64_from_small(words[2 * i]) + 0.5) * MTI_UNIT));
        double cosine, sine;
        mti_cos_sin(words[2 * i + 1], &cosine, &sine);
        y[2 * i] = (float)(radius * cosine);
        y[2 * i + 1] = (float)(radius * sine);
    }
}

/* y = the normal numbers of the global elements [e, e + n). A group begins at the Philox block of its first element. */
static void mti_normal_row(mt_random at, int64_t e, double std, float *y, int64_t n) {
    uint32_t words[MTI_NORMALS];
    float room[MTI_NORMALS];
    int64_t done, count;
    for (done = 0; done < n; done += count) {
        int64_t skip = (e + done) & 3;
        count = mt_min(MTI_NORMALS - skip, n - done);
        mti_philox_blocks((uint64_t)(e + done) >> 2, mti_subsequence(&at), at.seed, MTI_PHILOX_GROUP, words);
        mti_normal_group(words, std, room);
        memcpy(y + done, room + skip, (size_t)count * sizeof *y);
    }
}

typedef struct mti_normal {
    mt_tensor y;
    float std;
    mt_random at;
} mti_normal;

static void mti_cpu_random_normal(void *data, int thread, int64_t first, int64_t last) {
    const mti_normal *r = (const mti_normal *)data;
    float room[MTI_BLOCK];
    int64_t i, j, n;
    (void)thread;
    for (i = first; i < last; i++)
        for (j = 0; j < r->y.cols; j += n) {
            int64_t e = mti_random_element(r->at, i, j);
            mt_tensor y;
            n = mt_min(MTI_BLOCK - (e & 3), r->y.cols - j); /* the next block begins where a Philox block does */
            y = mti_f32_place(r->y, i, 1, j, n, room);
            mti_normal_row(r->at, e, (double)r->std, mti_row(y, 0), n);
            mti_f32_write(y, r->y, i, j);
        }
}

/* Checks the place of the random words of a parameter, which ranks must not share. */
static mt_status mti_expect_words(mt_context *ctx, const char *where, mt_tensor y, float std, const mt_random *at) {
    mt_place place = {y.rows, y.cols,         at->first_row, at->first_col,   at->global_cols,
                      1,      "random words", at->seed,      at->subsequence, 0,
                      0};
    return std == 0.0f ? MT_SUCCESS : mt_place_check(ctx, where, "at", "y", y, &place);
}

/* clang-format off */
static const mti_table mti_random_normal_table = {"mt_random_normal", {NULL, NULL, NULL}, {
    {"y", "nm", MT_ARG_FLOAT, MT_ARG_OUT | MTI_AS_IS, NULL}}};
/* clang-format on */

MT_API mt_status mt_random_normal(mt_context *ctx, mt_tensor y, float std, mt_random at) {
    mt_tensor *views[] = {&y};
    mti_operator op;
    MT_TRY(mti_accept(&op, ctx, &mti_random_normal_table, views, NULL));
    MT_TRY(mti_expect_finite(ctx, op.name, "std", std));
    MT_TRY(mti_expect_random(ctx, op.name, at, y.rows, y.cols));
    MT_TRY(mti_expect_words(ctx, op.name, y, std, &at));
    MT_TRY(mti_begin(&op));
    mti_made(ctx, y, 6, (double)at.seed, (double)at.subsequence, (double)at.first_row, (double)at.first_col,
             (double)at.global_cols, (double)std);
    mti_normal r = {y, std, at};
    return mti_end(&op, MTI_RUN(&op, mti_cuda_random_normal(ctx, y, std, at),
                                mti_cpu_rows(ctx, y.rows, y.cols, mti_cpu_random_normal, &r)));
}
