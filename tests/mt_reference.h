/* mt_reference.h - what the operator tests compare with: guarded matrices, and references in double precision. The
   references follow the mathematical definitions, and not the way in which mt_kernels.cuh computes them. Include it
   after mt_kernels.cuh and mt_test.h. For the main thread only. */

#ifndef MT_REFERENCE_H
#define MT_REFERENCE_H

#include <math.h>

/* ---- memory that the test owns ---------------------------------------------------------------------------------- */

#define REF_OWNED 512
/* A NaN, in memory that operators must not touch. When an operator reads it, the NaN shows in the result; when an
   operator writes there, ref_check_guards finds that it is gone. */
#define REF_GUARD 0x7fc12345u

typedef struct ref_block {
    unsigned char *data;
    size_t bytes;
    mt_tensor view; /* of a matrix; otherwise view.rows is 0 */
} ref_block;

typedef struct ref_state {
    ref_block blocks[REF_OWNED];
    int count;
    uint64_t random;
    mt_context *ctx;
} ref_state;

static ref_state ref;

/* Allocates exactly `bytes` bytes, so that a sanitizer detects every access outside. ref_release frees them. */
static inline void *ref_bytes(size_t bytes) {
    void *data = malloc(bytes ? bytes : 1);
    assert_non_null(data);
    assert_true(ref.count < REF_OWNED);
    memset(&ref.blocks[ref.count], 0, sizeof ref.blocks[0]);
    ref.blocks[ref.count].data = (unsigned char *)data;
    ref.blocks[ref.count++].bytes = bytes;
    return data;
}

static inline double *ref_doubles(size_t n) {
    double *x = (double *)ref_bytes(n * sizeof(double));
    memset(x, 0, n * sizeof(double));
    return x;
}

static inline float *ref_row(mt_tensor t, int64_t i) { return (float *)t.data + i * (t.ld ? t.ld : t.cols); }

/* Returns a matrix [rows, cols] of guards, ld = cols + pad. Its memory ends with the last element of the last row. */
static inline mt_tensor ref_guarded(int64_t rows, int64_t cols, int64_t pad) {
    int64_t ld = cols + pad, n = rows > 0 && cols > 0 ? (rows - 1) * ld + cols : 0, i;
    uint32_t guard = REF_GUARD;
    float *data = (float *)ref_bytes((size_t)n * sizeof(float));
    mt_tensor t;
    for (i = 0; i < n; i++) memcpy(data + i, &guard, sizeof guard);
    t = mt_tensor_f32(data, rows, cols);
    t.ld = ld;
    ref.blocks[ref.count - 1].view = t;
    return t;
}

static inline mt_tensor ref_filled(int64_t rows, int64_t cols, int64_t pad, float value) {
    mt_tensor t = ref_guarded(rows, cols, pad);
    int64_t i, j;
    for (i = 0; i < rows; i++)
        for (j = 0; j < cols; j++) ref_row(t, i)[j] = value;
    return t;
}

/* Uniform in (-scale, scale) + shift. */
static inline mt_tensor ref_random(int64_t rows, int64_t cols, int64_t pad, float scale, float shift) {
    mt_tensor t = ref_guarded(rows, cols, pad);
    int64_t i, j;
    for (i = 0; i < rows; i++)
        for (j = 0; j < cols; j++) ref_row(t, i)[j] = scale * test_float(&ref.random) + shift;
    return t;
}

static inline mt_tensor ref_copy(mt_tensor x, int64_t pad) {
    mt_tensor t = ref_guarded(x.rows, x.cols, pad);
    int64_t i, j;
    for (i = 0; i < x.rows; i++)
        for (j = 0; j < x.cols; j++) ref_row(t, i)[j] = ref_row(x, i)[j];
    return t;
}

static inline void ref_read(mt_tensor t, double *out) {
    int64_t i, j;
    for (i = 0; i < t.rows; i++)
        for (j = 0; j < t.cols; j++) out[i * t.cols + j] = (double)ref_row(t, i)[j];
}

static inline double *ref_values(mt_tensor t) {
    double *x = ref_doubles((size_t)(t.rows * t.cols));
    ref_read(t, x);
    return x;
}

/* Checks that no operator wrote between the rows of a guarded matrix. */
static inline void ref_check_guards(void) {
    uint32_t guard = REF_GUARD;
    int b;
    for (b = 0; b < ref.count; b++) {
        mt_tensor t = ref.blocks[b].view;
        int64_t i, j;
        for (i = 0; t.cols > 0 && i + 1 < t.rows; i++)
            for (j = t.cols; j < t.ld; j++)
                if (memcmp(&ref_row(t, i)[j], &guard, sizeof guard) != 0)
                    fail_msg("block %d: row %ld was written past its end, at column %ld", b, (long)i, (long)j);
    }
}

static inline uint64_t ref_hash(void) {
    uint64_t h = 14695981039346656037u;
    int b;
    size_t i;
    for (b = 0; b < ref.count; b++)
        for (i = 0; i < ref.blocks[b].bytes; i++) h = (h ^ ref.blocks[b].data[i]) * 1099511628211u;
    return h;
}

static inline void ref_release(void) {
    while (ref.count > 0) free(ref.blocks[--ref.count].data);
}

static inline int ref_setup(void **state) {
    mt_context_desc d;
    (void)state;
    memset(&d, 0, sizeof d);
    d.arena_bytes = (size_t)64 << 20;
    d.threads = 1;
    ref.random = 20240607;
    return mt_context_create(NULL, &d, &ref.ctx) == MT_SUCCESS ? 0 : -1;
}

static inline int ref_teardown(void **state) {
    (void)state;
    ref_check_guards();
    assert_int_equal(mt_arena_mark(ref.ctx), 0);
    mt_context_destroy(ref.ctx);
    ref_release();
    return 0;
}

#define REF_TEST(f) cmocka_unit_test_setup_teardown(f, ref_setup, ref_teardown)

/* Checks that |got - want| <= absolute + relative |want| for every element. NaN fails, and infinities must be equal. */
static inline void ref_close_at(mt_tensor got, const double *want, double absolute, double relative, const char *what,
                                int line) {
    int64_t i, j;
    for (i = 0; i < got.rows; i++)
        for (j = 0; j < got.cols; j++) {
            double g = (double)ref_row(got, i)[j], w = want[i * got.cols + j];
            if (g == w || fabs(g - w) <= absolute + relative * fabs(w)) continue;
            fail_msg("line %d: %s[%ld, %ld] of [%ld, %ld] is %.9g, must be %.9g (off by %.3g)", line, what, (long)i,
                     (long)j, (long)got.rows, (long)got.cols, g, w, g - w);
        }
    ref_check_guards();
}
#define ASSERT_CLOSE(got, want, absolute, relative) ref_close_at(got, want, absolute, relative, #got, __LINE__)

/* Checks that a call returns the expected error, with these words in its message, changes no memory of the test, and
   leaves nothing in the arena. */
#define ASSERT_REFUSED(expected, words, call)                                                                          \
    do {                                                                                                               \
        uint64_t hash_ = ref_hash();                                                                                   \
        mt_status refused_ = (call);                                                                                   \
        if (refused_ != (expected) || !strstr(mt_last_error(ref.ctx), words))                                          \
            fail_msg("%s: got %s \"%s\", expected %s \"...%s...\"", #call, mt_status_name(refused_),                   \
                     mt_last_error(ref.ctx), mt_status_name(expected), words);                                         \
        assert_true(hash_ == ref_hash());                                                                              \
        assert_int_equal(mt_arena_mark(ref.ctx), 0);                                                                   \
    } while (0)
#define OK(call) ASSERT_STATUS(ref.ctx, MT_SUCCESS, call)

/* ---- derivatives ------------------------------------------------------------------------------------------------ */

/* Central differences of an objective in double precision. Their error is h^2 / 6 times the third derivative, plus a
   rounding error of 1e-16 / h. For values of order one this is about 1e-8. */
typedef double (*ref_objective)(const double *x, const void *user);

static inline double *ref_gradient(ref_objective f, const void *user, double *x, size_t n) {
    double *g = ref_doubles(n), keep, up;
    size_t i;
    for (i = 0; i < n; i++) {
        double h = 1e-4;
        keep = x[i];
        x[i] = keep + h;
        up = f(x, user);
        x[i] = keep - h;
        g[i] = (up - f(x, user)) / (2 * h);
        x[i] = keep;
    }
    return g;
}

static inline double ref_dot(const double *a, const double *b, size_t n) {
    double s = 0;
    size_t i;
    for (i = 0; i < n; i++) s += a[i] * b[i];
    return s;
}

/* Returns base + add, for operators that add to their output. */
static inline double *ref_plus(const double *base, const double *add, size_t n) {
    double *s = ref_doubles(n);
    size_t i;
    for (i = 0; i < n; i++) s[i] = base[i] + add[i];
    return s;
}

/* ---- scalar functions, as their papers write them --------------------------------------------------------------- */

static inline double ref_activation(mt_activation kind, double x) {
    const double pi = 3.14159265358979323846;
    if (kind == MT_GELU_TANH) return 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x)));
    if (kind == MT_GELU_ERF) return 0.5 * x * erfc(-x / sqrt(2.0)); /* erfc: no cancellation for negative x */
    if (kind == MT_SQUARED_RELU) return x > 0 ? x * x : 0;
    if (kind == MT_RELU) return x > 0 ? x : 0;
    if (kind == MT_TANH) return tanh(x);
    return x / (1 + exp(-x));
}

/* philox4x32-10 of Random123, word by word. */
static inline void ref_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]}, k[2] = {key[0], key[1]};
    int r;
    for (r = 0; r < 10; r++) {
        uint64_t p0 = UINT64_C(0xD2511F53) * c[0], p1 = UINT64_C(0xCD9E8D57) * c[2];
        uint32_t next[4];
        next[0] = (uint32_t)(p1 >> 32) ^ c[1] ^ k[0];
        next[1] = (uint32_t)p1;
        next[2] = (uint32_t)(p0 >> 32) ^ c[3] ^ k[1];
        next[3] = (uint32_t)p0;
        memcpy(c, next, sizeof c);
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    memcpy(out, c, sizeof c);
}

static inline uint32_t ref_word(mt_random at, uint64_t e) {
    uint32_t counter[4], key[2], out[4];
    counter[0] = (uint32_t)(e >> 2);
    counter[1] = (uint32_t)(e >> 34);
    counter[2] = (uint32_t)at.subsequence;
    counter[3] = (uint32_t)(at.subsequence >> 32);
    key[0] = (uint32_t)at.seed;
    key[1] = (uint32_t)(at.seed >> 32);
    ref_philox(counter, key, out);
    return out[e & 3];
}

static inline uint64_t ref_element(mt_random at, int64_t i, int64_t j) {
    return (uint64_t)((at.first_row + i) * at.global_cols + at.first_col + j);
}

/* Returns the factor of dropout for element e: 0 or 1 / (1 - p). */
static inline double ref_keep(mt_dropout d, uint64_t e) {
    if (d.p == 0.0f) return 1.0;
    return (double)ref_word(d.at, e) < (double)d.p * 4294967296.0 ? 0.0 : 1.0 / (1.0 - (double)d.p);
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

typedef struct ref_attention {
    mt_attention_desc s;
    const double *dout; /* [tokens, heads * head_dim] */
} ref_attention;

static inline int64_t ref_heads(const mt_attention_desc *s) { return s->groups * s->heads_per_group; }
static inline int64_t ref_qkv_cols(const mt_attention_desc *s) {
    return s->groups * (s->heads_per_group + 2) * s->head_dim;
}

static inline int ref_sees(const mt_attention_desc *s, int64_t b, int64_t i, int64_t j) {
    if (s->lengths && j >= s->lengths[b]) return 0;
    return s->scores.mask == MT_MASK_BIDIRECTIONAL || j <= i;
}

/* Returns the first column of the query of head a (part 0), or of the key (1) or value (2) of its group. */
/* The first column of query head a (part 0), or of the key (1) or the value (2) of its group. */
static inline int64_t ref_col(const mt_attention_desc *s, int64_t a, int part) {
    int64_t g = a / s->heads_per_group, first = g * (s->heads_per_group + 2), heads = ref_heads(s);
    if (s->qkv_layout != MT_QKV_PER_GROUP) /* [queries; keys; values] */
        return (part == 0 ? a : part == 1 ? heads + g : heads + s->groups + g) * s->head_dim;
    return (part == 0 ? first + a % s->heads_per_group : first + s->heads_per_group + part - 1) * s->head_dim;
}

/* Writes the probabilities, before dropout, of query i of head a of sequence b to p [seq]. Returns the log of the sum
   of the exponentials. */
static inline double ref_probabilities(const mt_attention_desc *s, const double *qkv, int64_t b, int64_t a, int64_t i,
                                       double *p) {
    double scale = s->scores.scale != 0.0f ? (double)s->scores.scale : 1 / sqrt((double)s->head_dim), top = -INFINITY,
           sum = 0;
    int64_t j, d, w = ref_qkv_cols(s);
    for (j = 0; j < s->seq; j++) {
        const double *q = qkv + (b * s->seq + i) * w + ref_col(s, a, 0),
                     *k = qkv + (b * s->seq + j) * w + ref_col(s, a, 1);
        p[j] = 0;
        for (d = 0; d < s->head_dim; d++) p[j] += scale * q[d] * k[d];
        if (ref_sees(s, b, i, j) && p[j] > top) top = p[j];
    }
    for (j = 0; j < s->seq; j++) p[j] = ref_sees(s, b, i, j) ? exp(p[j] - top) : 0;
    for (j = 0; j < s->seq; j++) sum += p[j];
    for (j = 0; j < s->seq; j++) p[j] = sum > 0 ? p[j] / sum : 0;
    return top + log(sum);
}

static inline double ref_attention_keep(const mt_attention_desc *s, int64_t b, int64_t a, int64_t i, int64_t j) {
    mt_random at = s->dropout.at;
    if (s->dropout.p == 0.0f) return 1.0;
    return ref_keep(s->dropout,
                    (uint64_t)((((at.first_row + b) * at.global_cols + at.first_col + a) * s->seq + i) * s->seq + j));
}

static inline void ref_attention_forward(const mt_attention_desc *s, const double *qkv, double *out, double *lse) {
    int64_t b, a, i, j, d, h = ref_heads(s), w = ref_qkv_cols(s);
    double *p = (double *)malloc((size_t)s->seq * sizeof *p);
    for (b = 0; b < s->batch; b++)
        for (a = 0; a < h; a++)
            for (i = 0; i < s->seq; i++) {
                double l = ref_probabilities(s, qkv, b, a, i, p),
                       *o = out + (b * s->seq + i) * h * s->head_dim + a * s->head_dim;
                if (lse) lse[a * s->batch * s->seq + b * s->seq + i] = l;
                for (d = 0; d < s->head_dim; d++) o[d] = 0;
                for (j = 0; j < s->seq; j++)
                    for (d = 0; p[j] > 0 && d < s->head_dim; d++)
                        o[d] +=
                            ref_attention_keep(s, b, a, i, j) * p[j] * qkv[(b * s->seq + j) * w + ref_col(s, a, 2) + d];
            }
    free(p);
}

/* Applies the chain rule to the probabilities. A test checks it against finite differences of the forward. */
static inline void ref_attention_backward(const ref_attention *r, const double *qkv, double *dqkv) {
    const mt_attention_desc *s = &r->s;
    int64_t b, a, i, j, d, h = ref_heads(s), w = ref_qkv_cols(s), n = s->head_dim;
    double scale = s->scores.scale != 0.0f ? (double)s->scores.scale : 1 / sqrt((double)n);
    double *p = (double *)malloc((size_t)s->seq * sizeof *p), *dp = (double *)malloc((size_t)s->seq * sizeof *p);
    memset(dqkv, 0, (size_t)(s->batch * s->seq * w) * sizeof *dqkv);
    for (b = 0; b < s->batch; b++)
        for (a = 0; a < h; a++)
            for (i = 0; i < s->seq; i++) {
                const double *g = r->dout + (b * s->seq + i) * h * n + a * n;
                int64_t qi = (b * s->seq + i) * w + ref_col(s, a, 0);
                double mean = 0;
                ref_probabilities(s, qkv, b, a, i, p);
                for (j = 0; j < s->seq; j++) {
                    int64_t vj = (b * s->seq + j) * w + ref_col(s, a, 2);
                    double keep = p[j] > 0 ? ref_attention_keep(s, b, a, i, j) : 0;
                    dp[j] = keep * ref_dot(g, qkv + vj, (size_t)n);
                    mean += p[j] * dp[j];
                    for (d = 0; d < n; d++) dqkv[vj + d] += keep * p[j] * g[d];
                }
                for (j = 0; j < s->seq; j++) {
                    int64_t kj = (b * s->seq + j) * w + ref_col(s, a, 1);
                    double ds = scale * p[j] * (dp[j] - mean);
                    for (d = 0; d < n; d++) dqkv[qi + d] += ds * qkv[kj + d];
                    for (d = 0; d < n; d++) dqkv[kj + d] += ds * qkv[qi + d];
                }
            }
    free(p);
    free(dp);
}

static inline double ref_attention_objective(const double *qkv, const void *user) {
    const ref_attention *r = (const ref_attention *)user;
    size_t n = (size_t)(r->s.batch * r->s.seq * ref_heads(&r->s) * r->s.head_dim);
    double *out = (double *)malloc(n * sizeof *out), dot;
    ref_attention_forward(&r->s, qkv, out, NULL);
    dot = ref_dot(out, r->dout, n);
    free(out);
    return dot;
}

#endif /* MT_REFERENCE_H */
