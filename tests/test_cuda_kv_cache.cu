/* test_cuda_kv_cache.cu - tests attention with a key/value cache on MT_DEVICE_CUDA, against loops in double precision
   and against the CPU backend in f32, with the same 16-bit inputs. Compares a GPT with a cache with mt_gpt_logits.
     On a GPU:       nvcc -std=c++20 -O2 -arch=native -I. tests/test_cuda_kv_cache.cu -lcublasLt
     Without a GPU:  the engine in tests/engine/ runs the same file on a CPU. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"

#include "mt_test_cuda.h"
#include "mt_test_ranks.h"

#include <math.h>
#include <vector>

enum { NO_ROTARY, HALVES, PAIRS };
enum { BATCH = 8 }; /* the most sequences of a call */

typedef std::vector<float> floats;

typedef struct config {
    int64_t batch = 1, seq = 1, groups = 1, per_group = 1, dim = 64, max_seq = 64;
    mt_dtype type = MT_F32;
    mt_qkv_layout layout = MT_QKV_PER_GROUP;
    int rotary = NO_ROTARY;
    int64_t rotary_dim = 0, window = 0;
    float softcap = 0.0f;
    int alibi = 0;
    bool old_gpu = false; /* the kernels are those of a build for sm_75 */
    int offset = 0; /* elements by which qkv, out, keys and values miss an address that is a multiple of 16 bytes */
    std::vector<int32_t> held = {0}, added; /* of each sequence; no `added`: all have seq */
    int64_t whole = 0, first = 0;           /* the call has seq of `whole` new tokens, those from `first` on; 0: all */
} config;

/* The arguments of a call, on the GPU. All views have elements before and behind them, and qkv and out between their
   rows, too. They are NaN and must stay so. */
typedef struct call {
    mt_attention_desc s;
    mt_kv_cache cache;
    mt_tensor table, qkv, out;
    int32_t held[BATCH], added[BATCH]; /* tokens before those of the call, and tokens of the call */
} call;

static const char *describe(const config *c) {
    static char text[320];
    int n = snprintf(text, sizeof text,
                     "%s, head_dim %d, batch %d, seq %d, %d groups of %d, max_seq %d, layout %d, "
                     "rotary %d %d, window %d, softcap %g, alibi %d, offset %d, from %d of %d, held",
                     mt_dtype_name(c->type), (int)c->dim, (int)c->batch, (int)c->seq, (int)c->groups, (int)c->per_group,
                     (int)c->max_seq, (int)c->layout, c->rotary, (int)c->rotary_dim, (int)c->window, (double)c->softcap,
                     c->alibi, c->offset, (int)c->first, (int)c->whole);
    for (int32_t h : c->held) n += snprintf(text + n, sizeof text - (size_t)n, " %d", (int)h);
    return text;
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

#define GAP 8    /* elements between rows */
#define GUARD 64 /* elements before and behind a tensor */

/* A tensor of NaN, with `gap` elements between its rows. */
static mt_tensor tensor_new(const config *c, int64_t rows, int64_t cols, int64_t gap) {
    int64_t n = rows * (cols + gap) + 2 * GUARD;
    mt_tensor whole;
    OK(mt_arena_tensor(gpu, c->type, 1, n, &whole));
    OK(mt_fill(gpu, whole, NAN));
    whole = mt_tensor_cols(whole, GUARD + c->offset, rows * (cols + gap));
    return with_shape(whole, rows, cols, cols + gap);
}

/* Returns the values in f32. */
static floats download(mt_tensor t) {
    size_t mark = mt_arena_mark(gpu);
    floats x((size_t)(t.rows * t.cols) + 1);
    mt_tensor f;
    OK(mt_arena_tensor(gpu, MT_F32, t.rows, t.cols, &f));
    OK(mt_convert(gpu, t, f));
    OK(mt_download(gpu, f, x.data()));
    mt_arena_release(gpu, mark);
    return x;
}

static void upload(const floats &x, mt_tensor t) {
    size_t mark = mt_arena_mark(gpu);
    mt_tensor f;
    OK(mt_arena_tensor(gpu, MT_F32, t.rows, t.cols, &f));
    OK(mt_upload(gpu, x.data(), f));
    OK(mt_convert(gpu, f, t));
    mt_arena_release(gpu, mark);
}

static void upload_noise(mt_tensor t, uint64_t seed, float scale) {
    floats x((size_t)(t.rows * t.cols));
    for (float &e : x) e = scale * test_float(&seed);
    upload(x, t);
}

static const int32_t *upload_numbers(const int32_t *x, int64_t n) {
    mt_tensor t;
    OK(mt_arena_tensor(gpu, MT_I32, 1, n, &t));
    OK(mt_upload(gpu, x, t));
    return (const int32_t *)t.data;
}

/* The memory around and between the rows of a tensor is as tensor_new left it. */
static void gaps_untouched(const config *c, const char *what, mt_tensor t) {
    int64_t ld = mt_tensor_ld(t), n = t.rows * ld + 2 * GUARD, first = GUARD + c->offset;
    char *begin = (char *)t.data - first * (int64_t)mt_dtype_size(t.dtype);
    floats x = download(mt_tensor_make(begin, t.dtype, 1, n));
    for (int64_t i = 0; i < n; i++) {
        bool inside = i >= first && i < first + t.rows * ld && (i - first) % ld < t.cols;
        if (!inside && !isnan(x[(size_t)i]))
            fail_msg("%s: %s: something was written at element %lld", describe(c), what, (long long)(i - first));
    }
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

/* The column of query head a (part 0), or of the key (1) or the value (2) of group a. */
static int64_t column(const config *c, int part, int64_t a) {
    int64_t n = c->per_group, heads = c->groups * n;
    if (c->layout == MT_QKV_PER_GROUP)
        return (part == 0 ? a / n * (n + 2) + a % n : a * (n + 2) + n + part - 1) * c->dim;
    return (part == 0 ? a : heads + (part - 1) * c->groups + a) * c->dim;
}

static int64_t cache_row(const config *c, int64_t b, int64_t g, int64_t position) {
    return (b * c->groups + g) * c->max_seq + position;
}

/* Noise at the positions that the cache holds. The others stay NaN. */
static void fill_cache(const config *c, const call *k, mt_tensor t, uint64_t seed) {
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t g = 0; g < c->groups; g++) {
            int64_t n = mt_min(mt_max(k->held[b], 0), c->max_seq);
            if (n > 0) upload_noise(mt_tensor_rows(t, cache_row(c, b, g, 0), n), seed + (uint64_t)(b * 64 + g), 1.0f);
        }
}

static call call_new(const config *c) {
    int64_t heads = c->groups * c->per_group, tokens = c->batch * c->seq, rows = c->batch * c->groups * c->max_seq;
    mt_tensor slopes;
    call k;
    memset(&k, 0, sizeof k);
    k.s.batch = c->batch, k.s.seq = c->seq, k.s.groups = c->groups, k.s.heads_per_group = c->per_group;
    k.s.head_dim = c->dim;
    k.s.qkv_layout = c->layout;
    k.s.scores.rotary_form = c->rotary == PAIRS ? MT_ROTARY_PAIRS : MT_ROTARY_HALVES;
    k.s.scores.rotary_dim = c->rotary_dim;
    k.s.scores.window = c->window;
    k.s.scores.softcap = c->softcap;
    for (int64_t b = 0; b < c->batch; b++) {
        k.held[b] = c->held[(size_t)b % c->held.size()];
        k.added[b] = c->added.empty() ? (int32_t)mt_max(c->seq, c->whole) : c->added[(size_t)b % c->added.size()];
    }
    if (!c->added.empty()) k.s.lengths = upload_numbers(k.added, c->batch);
    k.s.part.seq = c->whole, k.s.part.first_query = c->first;
    if (c->alibi) {
        OK(mt_arena_tensor(gpu, MT_F32, 1, heads, &slopes));
        OK(mt_alibi_slopes(gpu, heads, 0, slopes));
        k.s.scores.alibi = 1;
        k.s.scores.alibi_slopes = (const float *)slopes.data;
    }
    k.table = mt_none();
    if (c->rotary != NO_ROTARY) {
        OK(mt_arena_tensor(gpu, MT_F32, c->max_seq, c->rotary_dim ? c->rotary_dim : c->dim, &k.table));
        OK(mt_rotary_table(gpu, 10000.0f, k.table));
    }
    k.qkv = tensor_new(c, tokens, (heads + 2 * c->groups) * c->dim, GAP);
    k.out = tensor_new(c, tokens, heads * c->dim, GAP);
    upload_noise(k.qkv, 1, 2.0f);
    k.cache.keys = tensor_new(c, rows, c->dim, 0);
    k.cache.values = tensor_new(c, rows, c->dim, 0);
    k.cache.max_seq = c->max_seq;
    k.cache.lengths = upload_numbers(k.held, c->batch);
    for (int64_t b = 0; b < c->batch && c->whole > 0; b++) {
        k.held[b] += (int32_t)mt_min(k.added[b], c->first);
        k.added[b] = (int32_t)mt_min(mt_max(k.added[b] - c->first, 0), c->seq);
    }
    fill_cache(c, &k, k.cache.keys, 100);
    fill_cache(c, &k, k.cache.values, 200);
    return k;
}

static void run(const call *k) {
    OK(mt_kv_cache_append(gpu, &k->s, k->table, k->qkv, &k->cache));
    OK(mt_kv_cache_attention(gpu, &k->s, k->qkv, &k->cache, k->out));
}

static void check_gaps(const config *c, const call *k) {
    gaps_untouched(c, "qkv", k->qkv);
    gaps_untouched(c, "keys", k->cache.keys);
    gaps_untouched(c, "values", k->cache.values);
    gaps_untouched(c, "out", k->out);
}

/* ---- append against double precision ----------------------------------------------------------------------------- */

/* The largest relative error of one rounding. */
static double unit_roundoff(mt_dtype type) { return type == MT_BF16 ? 1.0 / 256 : type == MT_F16 ? 1.0 / 2048 : 6e-8; }

/* The turned feature d of a head x at a position. */
static double turned(const config *c, const float *x, int64_t position, int64_t d) {
    int64_t dim = c->rotary_dim ? c->rotary_dim : c->dim, half = dim / 2, pairs = c->rotary == PAIRS;
    if (c->rotary == NO_ROTARY || d >= dim) return x[d];
    int64_t i = pairs ? d / 2 : d % half, second = pairs ? d % 2 : d / half;
    double angle = (double)position * pow(10000.0, -2.0 * (double)i / (double)dim);
    double a = x[pairs ? 2 * i : i], b = x[pairs ? 2 * i + 1 : half + i];
    return second ? b * cos(angle) + a * sin(angle) : a * cos(angle) - b * sin(angle);
}

/* Compares a head of a new token with the turned one: 3 is above the largest sum of two products of noise. */
static void head_is_turned(const config *c, const char *what, const float *before, const float *after,
                           int64_t position) {
    for (int64_t d = 0; d < c->dim; d++) {
        double y = turned(c, before, position, d), bound = unit_roundoff(c->type) * fabs(y) + 3 * 2.4e-7;
        if (!(fabs(after[d] - y) <= bound))
            fail_msg("%s: %s at position %lld, feature %lld is %.9g, must be %.9g", describe(c), what,
                     (long long)position, (long long)d, (double)after[d], y);
    }
}

static void heads_are_same(const config *c, const char *what, const float *a, const float *b) {
    if (memcmp(a, b, (size_t)c->dim * sizeof *a) != 0) fail_msg("%s: %s is not the same", describe(c), what);
}

/* Checks token i of sequence b in qkv and in the cache. A token that is not new changes nothing. */
static void token_is_appended(const config *c, const call *k, int64_t b, int64_t i, const floats &before,
                              const floats &after, const floats &keys, const floats &values) {
    int64_t position = k->held[b] + i;
    const float *x = &before[(size_t)((b * c->seq + i) * k->qkv.cols)];
    const float *y = &after[(size_t)((b * c->seq + i) * k->qkv.cols)];
    if (i >= k->added[b]) {
        if (memcmp(x, y, (size_t)k->qkv.cols * sizeof *x) != 0) fail_msg("%s: padding was changed", describe(c));
        return;
    }
    for (int64_t a = 0; a < c->groups * c->per_group; a++)
        head_is_turned(c, "query", x + column(c, 0, a), y + column(c, 0, a), position);
    for (int64_t g = 0; g < c->groups; g++) {
        size_t row = (size_t)(cache_row(c, b, g, position) * c->dim);
        head_is_turned(c, "key", x + column(c, 1, g), y + column(c, 1, g), position);
        heads_are_same(c, "key in the cache", y + column(c, 1, g), &keys[row]);
        heads_are_same(c, "value", x + column(c, 2, g), y + column(c, 2, g));
        heads_are_same(c, "value in the cache", y + column(c, 2, g), &values[row]);
    }
}

/* Rows of the cache that no new token has are as before. */
static void others_are_same(const config *c, const call *k, const char *what, const floats &before,
                            const floats &after) {
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t g = 0; g < c->groups; g++)
            for (int64_t p = 0; p < c->max_seq; p++) {
                size_t row = (size_t)(cache_row(c, b, g, p) * c->dim);
                if (p >= k->held[b] && p < k->held[b] + k->added[b]) continue;
                heads_are_same(c, what, &before[row], &after[row]);
            }
}

static void check_append(const config *c, const call *k) {
    floats before = download(k->qkv), keys = download(k->cache.keys), values = download(k->cache.values);
    OK(mt_kv_cache_append(gpu, &k->s, k->table, k->qkv, &k->cache));
    floats after = download(k->qkv), new_keys = download(k->cache.keys), new_values = download(k->cache.values);
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t i = 0; i < c->seq; i++) token_is_appended(c, k, b, i, before, after, new_keys, new_values);
    others_are_same(c, k, "an old key", keys, new_keys);
    others_are_same(c, k, "an old value", values, new_values);
}

/* ---- attention against double precision -------------------------------------------------------------------------- */

/* out [dim] = the attention of a query of head a at a position. keys and values are those of its group. */
static void reference(const config *c, const float *q, int64_t a, int64_t position, const float *keys,
                      const float *values, std::vector<double> *out) {
    int64_t first = c->window > 0 ? mt_max(position - c->window + 1, 0) : 0, d = c->dim;
    std::vector<double> s;
    double top = -INFINITY, sum = 0;
    for (int64_t j = first; j <= position; j++) {
        double x = 0;
        for (int64_t e = 0; e < d; e++) x += (double)q[e] * (double)keys[j * d + e];
        x /= sqrt((double)d);
        if (c->softcap > 0) x = c->softcap * tanh(x / c->softcap);
        if (c->alibi) {
            int64_t heads = c->groups * c->per_group;
            if ((heads & (heads - 1)) != 0) fail_msg("the formula of the slopes is that of a power of two");
            x -= pow(2.0, -8.0 * (double)(a + 1) / (double)heads) * (double)(position - j);
        }
        s.push_back(x);
        top = fmax(top, x);
    }
    out->assign((size_t)d, 0.0);
    for (double &x : s) sum += x = exp(x - top);
    for (int64_t j = first; j <= position; j++)
        for (int64_t e = 0; e < d; e++) (*out)[(size_t)e] += s[(size_t)(j - first)] / sum * (double)values[j * d + e];
}

/* The error before the last rounding: an exponential is off by about 1e-7 of the size of its score, which is less than
   16 here, and values are below 2. */
static void check_row(const config *c, const char *what, const float *row, const std::vector<double> &expected,
                      double roundoff) {
    for (int64_t e = 0; e < c->dim; e++) {
        double y = expected[(size_t)e], bound = roundoff * fabs(y) + 4e-6;
        if (!(fabs(row[e] - y) <= bound))
            fail_msg("%s: %s, feature %lld is %.9g, must be %.9g", describe(c), what, (long long)e, (double)row[e], y);
    }
}

/* The row of mti_kv_table that runs a call. */
static const char *kernel_of(const call *k) {
    mti_kv kv;
    int built_for = 0;
    OK(mti_kv_check(gpu, "test", &k->s, k->qkv, &k->cache, &kv));
    kv.out = k->out;
    OK(mti_built_for(gpu, &built_for));
    return mti_kv_choose(&kv, mti_kv_type(&kv), built_for)->name;
}

/* Asserts that the GPU computes a call with the kernel that it should. Returns whether this runs on tensor cores and
   rounds probabilities to 16 bits. */
static bool on_tensor_cores(const config *c, const call *k) {
    bool fits = c->type != MT_F32 && c->dim % 8 == 0 && c->offset == 0 && !c->old_gpu;
    const char *expected = !fits                                            ? "split"
                           : c->seq > 8 && !(c->alibi && c->softcap > 0.0f) ? "flash"
                                                                            : "tile",
               *name = kernel_of(k);
    if (strcmp(name, expected) != 0) fail_msg("%s: runs %s, not %s", describe(c), name, expected);
    return fits;
}

/* As in test_cuda_flash.cu: the errors of the probabilities and of the result are independent, so the error of a head's
   vector, relative to the vector, is their root mean square, 0.6 unit roundoffs. 2 is allowed, and 3 for fewer than 64
   numbers. */
static void check_vector(const config *c, const float *row, const std::vector<double> &expected) {
    double error = 0, size = 0, bound;
    for (int64_t e = 0; e < c->dim; e++) {
        double y = expected[(size_t)e];
        error += (row[e] - y) * (row[e] - y);
        size += y * y;
    }
    bound = (c->dim < 64 ? 3 : 2) * unit_roundoff(c->type) * sqrt(size) + 4e-6 * sqrt((double)c->dim);
    if (!(sqrt(error) <= bound))
        fail_msg("%s: a token is off by %g, %g is allowed, size %g", describe(c), sqrt(error), bound, sqrt(size));
}

/* The CPU backend computes the same call in f32. */
static floats on_cpu(const config *c, const call *k, const floats &qkv, const floats &keys, const floats &values) {
    size_t mark = mt_arena_mark(cpu);
    floats out((size_t)(k->out.rows * k->out.cols)), host_slopes;
    mt_attention_desc s = k->s;
    mt_kv_cache cache = k->cache;
    if (s.lengths) s.lengths = k->added;
    if (c->whole > 0) s.lengths = k->added, memset(&s.part, 0, sizeof s.part); /* as a call of its own */
    if (s.scores.alibi_slopes) {
        host_slopes = download(mt_tensor_f32((float *)s.scores.alibi_slopes, 1, c->groups * c->per_group));
        s.scores.alibi_slopes = host_slopes.data();
    }
    cache.lengths = k->held;
    cache.keys = mt_tensor_f32((float *)keys.data(), k->cache.keys.rows, c->dim);
    cache.values = mt_tensor_f32((float *)values.data(), k->cache.values.rows, c->dim);
    ASSERT_STATUS(cpu, MT_SUCCESS,
                  mt_kv_cache_attention(cpu, &s, mt_tensor_f32((float *)qkv.data(), k->qkv.rows, k->qkv.cols), &cache,
                                        mt_tensor_f32(out.data(), k->out.rows, k->out.cols)));
    mt_arena_release(cpu, mark);
    return out;
}

static void check_attention(const config *c, const call *k) {
    floats qkv = download(k->qkv), keys = download(k->cache.keys), values = download(k->cache.values);
    OK(mt_kv_cache_attention(gpu, &k->s, k->qkv, &k->cache, k->out));
    floats out = download(k->out), same = on_cpu(c, k, qkv, keys, values);
    bool rounds = on_tensor_cores(c, k);
    std::vector<double> y;
    for (int64_t row = 0; row < k->out.rows; row++)
        for (int64_t a = 0; a < c->groups * c->per_group; a++) {
            int64_t b = row / c->seq, i = row % c->seq;
            size_t first = (size_t)(cache_row(c, b, a / c->per_group, 0) * c->dim);
            size_t at = (size_t)(row * k->out.cols + a * c->dim);
            y.assign((size_t)c->dim, 0.0);
            if (i < k->added[b])
                reference(c, &qkv[(size_t)(row * k->qkv.cols + column(c, 0, a))], a, k->held[b] + i, &keys[first],
                          &values[first], &y);
            if (rounds) check_vector(c, &out[at], y);
            else check_row(c, "a token", &out[at], y, unit_roundoff(c->type));
            check_row(c, "a token on the CPU", &same[at], y, 6e-8);
            for (int64_t e = 0; i >= k->added[b] && e < c->dim; e++) assert_true(out[at + (size_t)e] == 0.0f);
        }
}

static void check_with(const config &c) {
    size_t mark = mt_arena_mark(gpu);
    call k = call_new(&c);
    check_append(&c, &k);
    check_attention(&c, &k);
    check_gaps(&c, &k);
    mt_arena_release(gpu, mark);
}

/* In every float type. */
static void check(config c) {
    const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    for (mt_dtype type : types) {
        c.type = type;
        check_with(c);
    }
}

/* Sizes of heads in whole vectors and in parts, with 8, 16 and 32 lanes for a key. */
static void test_head_sizes(void **state) {
    const int64_t sizes[] = {1, 4, 8, 20, 64, 72, 96, 128, 136, 192, 251, 256};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        config c;
        c.dim = sizes[i];
        c.batch = 2, c.per_group = 1 + (int64_t)i % 3;
        c.max_seq = 40;
        c.held = {38, 5};
        if (c.dim % 2 == 0) c.rotary = i % 2 ? HALVES : PAIRS;
        check(c);
    }
}

/* One token for each sequence: no token before, one, a few, a whole split, parts of splits, a full cache. */
static void test_one_token(void **state) {
    (void)state;
    config c;
    c.batch = 8, c.groups = 2, c.per_group = 2, c.max_seq = 700;
    c.held = {0, 1, 7, 255, 256, 257, 600, 699};
    c.rotary = HALVES;
    check(c);
}

/* Each of the four warps that merge splits has several of them. */
static void test_many_splits(void **state) {
    (void)state;
    config c;
    c.batch = 2, c.dim = 32, c.max_seq = 2600;
    c.held = {2599, 1400};
    check(c);
}

/* A tile has 1, 4 or 8 rows, or 16 on tensor cores, of the heads of a group and of several tokens. */
static void test_tiles(void **state) {
    const int64_t sizes[] = {1, 2, 3, 4, 5, 7, 8, 9, 16, 17};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        config c;
        c.per_group = sizes[i];
        c.seq = 1 + (int64_t)i % 4;
        c.batch = 2, c.dim = 32, c.max_seq = 300;
        c.held = {290, 17};
        c.layout = (mt_qkv_layout)(i % 3);
        c.groups = 1 + (int64_t)i % 2;
        check(c);
    }
}

/* Tiles on tensor cores of several tokens, whose windows begin and end at different keys: of a tile, of a warp, of a
   split; with padding, and with 8 tokens of 8 heads. */
static void test_tiles_of_tokens(void **state) {
    const int64_t sizes[] = {64, 128, 256, 96, 200};
    (void)state;
    for (int i = 0; i < 10; i++) {
        config c;
        c.dim = sizes[i % 5];
        c.type = i % 2 ? MT_F16 : MT_BF16;
        c.batch = 3, c.per_group = i % 3 == 0 ? 8 : 2 + i % 3, c.seq = i % 3 == 0 ? 8 : 5, c.max_seq = 530;
        c.held = {0, 250, 521};
        c.added = {5, 3, 5};
        c.window = i % 4 == 0 ? 0 : i % 4 == 1 ? 3 : i % 4 == 2 ? 18 : 270;
        check_with(c);
    }
}

/* Each key and value is read once for a group. The queries of the group are read once for each split. */
static void test_reads(void **state) {
#if defined(MT_CUDA_ENGINE)
    const int64_t sizes[] = {64, 80, 256};
    (void)state;
    for (int64_t dim : sizes) {
        size_t mark = mt_arena_mark(gpu);
        long before;
        config c;
        c.type = MT_BF16, c.batch = 2, c.groups = 2, c.per_group = 8, c.dim = dim, c.max_seq = 1000;
        c.held = {599, 17};
        call k = call_new(&c);
        OK(mt_kv_cache_append(gpu, &k.s, k.table, k.qkv, &k.cache));
        before = (long)mte::copies_that_read();
        OK(mt_kv_cache_attention(gpu, &k.s, k.qkv, &k.cache, k.out));
        OK(mt_context_synchronize(gpu));
        assert_int_equal((long)mte::copies_that_read() - before, 2 * dim / 8 * (8 * (3 + 1) + 2 * (600 + 18)));
        mt_arena_release(gpu, mark);
    }
#else
    (void)state;
    skip(); /* a GPU does not count them */
#endif
}

/* A build for sm_75, or one without -arch, has no tensor cores for bf16. */
static void test_older_gpus(void **state) {
#if defined(MT_CUDA_ENGINE)
    const int64_t sizes[] = {64, 128, 256}, heads[] = {1, 3, 8};
    (void)state;
    set_built_for(75);
    for (int i = 0; i < 18; i++) {
        config c;
        c.old_gpu = true;
        c.type = i < 9 ? MT_BF16 : MT_F16;
        c.dim = sizes[i % 3], c.per_group = heads[i / 3 % 3];
        c.max_seq = 300;
        c.held = {i % 2 ? 290 : 17};
        check_with(c);
    }
    set_built_for(0);
#else
    (void)state;
    skip(); /* a build for newer GPUs does not have these kernels */
#endif
}

/* Prompts of several lengths in an empty cache and in one with tokens; padding; sequences without new tokens. */
static void test_prompts(void **state) {
    (void)state;
    config c;
    c.batch = 5, c.groups = 2, c.per_group = 2, c.dim = 64, c.seq = 37, c.max_seq = 330;
    c.held = {0, 0, 290, 100, 330};
    c.added = {37, 1, 37, 12, 0};
    c.rotary = HALVES;
    check(c);
    c.seq = 4;
    c.added = {4, 0, 3, 1, 0};
    check(c);
    c.layout = MT_QKV_CONCATENATED;
    c.per_group = 3;
    check(c);
}

/* More queries than a tile of the kernel on tensor cores has, in all of its head sizes, in some that it pads, and in
   one that it does not run, also with a window or a cap. */
static void test_long_prompts(void **state) {
    const int64_t sizes[] = {64, 96, 128, 40, 80, 192, 256, 36};
    (void)state;
    for (int i = 0; i < 12; i++) {
        config c;
        c.dim = sizes[i % 8];
        c.batch = 4, c.per_group = i % 2 ? 2 : 1, c.groups = i % 2 ? 1 : 2, c.seq = 140, c.max_seq = 300;
        c.held = {0, 77, 160, 299};
        c.added = {140, 129, 140, 1};
        c.layout = (mt_qkv_layout)(i % 3);
        c.rotary = HALVES;
        c.type = i < 6 ? MT_BF16 : MT_F16;
        c.window = i % 3 == 1 ? 70 : 0;
        c.softcap = i % 3 == 2 ? 1.5f : 0.0f;
        check_with(c);
    }
}

/* Parts of prompts, such as those of context ranks, with padding behind the last token. */
static void test_parts_of_prompts(void **state) {
    (void)state;
    for (int64_t seq = 3; seq < 40; seq += 17)
        for (int part = 0; part < 3; part++) {
            config c;
            c.batch = 4, c.groups = 2, c.per_group = 2, c.max_seq = 120, c.rotary = HALVES;
            c.seq = seq, c.whole = 3 * seq - 1, c.first = part * seq;
            c.held = {0, 2, 17, 9};
            if (part > 0) c.added = {(int32_t)(3 * seq - 1), (int32_t)seq + 1, 0, (int32_t)(2 * seq)};
            c.window = seq == 20 ? 11 : 0;
            check(c);
        }
}

static void test_window(void **state) {
    const int64_t windows[] = {1, 2, 31, 256, 257, 300, 1000};
    (void)state;
    for (int64_t window : windows) {
        config c;
        c.batch = 3, c.per_group = 4, c.dim = 64, c.max_seq = 800;
        c.held = {0, 300, 799};
        c.window = window;
        c.type = window % 2 ? MT_BF16 : MT_F32;
        check_with(c);
        c.seq = 7;
        c.held = {0, 300, 780};
        c.added = {7, 1, 7};
        check_with(c);
        c.seq = 20;
        c.added = {20, 13, 20};
        check_with(c);
    }
}

static void test_softcap_and_alibi(void **state) {
    (void)state;
    for (int i = 0; i < 8; i++) {
        config c;
        c.batch = 2, c.groups = i & 4 ? 2 : 1, c.per_group = i & 4 ? 4 : 16, c.dim = 64, c.max_seq = 300;
        c.seq = i & 4 ? 11 : 1;
        c.held = {3, 280};
        c.softcap = i & 1 ? 0.7f : 0.0f;
        c.alibi = i & 2 ? 1 : 0;
        check(c);
    }
}

static void test_rotary(void **state) {
    (void)state;
    for (int i = 0; i < 12; i++) {
        const int64_t dims[] = {0, 16, 32, 6};
        config c;
        c.rotary = i % 2 ? HALVES : PAIRS;
        c.rotary_dim = dims[i % 4];
        c.layout = (mt_qkv_layout)(i % 3);
        c.batch = 2, c.groups = 2, c.per_group = 2, c.seq = 3, c.max_seq = 50;
        c.held = {40, 0};
        c.added = {3, 2};
        check(c);
    }
}

/* Addresses that are not multiples of 16 bytes. */
static void test_offsets(void **state) {
    (void)state;
    for (int offset = 1; offset < 4; offset++) {
        config c;
        c.batch = 2, c.per_group = 2, c.dim = 64, c.max_seq = 300;
        c.held = {299, 3};
        c.rotary = offset % 2 ? HALVES : PAIRS;
        c.offset = offset;
        check(c);
    }
}

/* ---- bits -------------------------------------------------------------------------------------------------------- */

static void same_bits(const char *what, const floats &a, const floats &b, size_t n) {
    if (memcmp(a.data(), b.data(), n * sizeof(float)) != 0) fail_msg("%s: other bits", what);
}

static floats out_of(const config *c) {
    size_t mark = mt_arena_mark(gpu);
    call k = call_new(c);
    run(&k);
    floats out = download(k.out);
    mt_arena_release(gpu, mark);
    return out;
}

static config usual(mt_dtype type, int64_t seq) {
    config c;
    c.type = type;
    c.batch = 3, c.groups = 2, c.per_group = 4, c.seq = seq, c.max_seq = 700;
    c.held = {690, 10, 300};
    c.rotary = HALVES;
    return c;
}

static void test_run_to_run(void **state) {
    (void)state;
    for (int64_t seq = 1; seq < 12; seq += 9) {
        config c = usual(MT_BF16, seq);
        floats a = out_of(&c), b = out_of(&c);
        same_bits("two runs", a, b, a.size() - 1);
    }
}

/* A rank with some of the sequences and groups, or with one of four heads of a group, has the bits of the whole. The
   caches of the two calls also differ in max_seq. */
static void part_has_bits_of_whole(mt_dtype type, int64_t seq) {
    size_t mark = mt_arena_mark(gpu);
    config c = usual(type, seq);
    c.window = seq == 6 ? 7 : 0;
    call all = call_new(&c), part = all;
    c.groups = c.per_group = c.batch = 1;
    c.held = {10};
    run(&all);
    for (int64_t head = 0; head < 8; head += 3) { /* of sequence 1 */
        int64_t group = head / 4, d = c.dim, token = c.seq;
        mt_tensor rows = mt_tensor_rows(all.qkv, token, c.seq);
        size_t inner = mt_arena_mark(gpu);
        c.max_seq = head == 3 ? 64 : 1100; /* with one split and with several */
        part = call_new(&c);
        OK(mt_copy(gpu, mt_tensor_cols(rows, (group * 6 + head % 4) * d, d), mt_tensor_cols(part.qkv, 0, d)));
        OK(mt_copy(gpu, mt_tensor_cols(rows, (group * 6 + 4) * d, 2 * d), mt_tensor_cols(part.qkv, d, 2 * d)));
        for (int64_t i = 0; i < 2; i++) {
            mt_tensor from = i ? all.cache.values : all.cache.keys, to = i ? part.cache.values : part.cache.keys;
            OK(mt_copy(gpu, mt_tensor_rows(from, (1 * 2 + group) * 700, 10 + c.seq),
                       mt_tensor_rows(to, 0, 10 + c.seq)));
        }
        OK(mt_kv_cache_attention(gpu, &part.s, part.qkv, &part.cache, part.out));
        same_bits("a part", download(part.out),
                  download(mt_tensor_cols(mt_tensor_rows(all.out, token, c.seq), head * d, d)), (size_t)(c.seq * d));
        mt_arena_release(gpu, inner);
    }
    mt_arena_release(gpu, mark);
}

static void test_parts(void **state) {
    (void)state;
    for (int64_t seq = 1; seq < 12; seq += 5) {
        part_has_bits_of_whole(MT_F32, seq);
        part_has_bits_of_whole(MT_BF16, seq);
    }
}

/* ---- wrong numbers, memory, graphs ------------------------------------------------------------------------------- */

/* A GPU does not check lengths, but it writes nowhere else: neither behind the cache of the last sequence, nor in that
   of another one. */
static void test_wrong_lengths(void **state) {
    const int32_t held[] = {-1, INT32_MIN, 65, INT32_MAX, 63, 64}, added[] = {3, 9, -5, INT32_MAX, INT32_MIN, 2};
    (void)state;
    for (int i = 0; i < 6; i++)
        for (int64_t seq = 1; seq < 12; seq += 9) {
            size_t mark = mt_arena_mark(gpu);
            config c;
            c.batch = 3, c.groups = 2, c.seq = seq, c.rotary = HALVES;
            c.held = {held[i], 3, held[i]};
            if (i > 0) c.added = {added[i], (int32_t)seq, added[i]};
            c.type = i % 2 ? MT_BF16 : MT_F32;
            call k = call_new(&c);
            if (i == 0) k.s.lengths = NULL;
            mt_tensor other = mt_tensor_rows(k.cache.keys, cache_row(&c, 1, 0, 0), 3);
            floats before = download(other);
            run(&k);
            same_bits("another sequence", before, download(other), before.size() - 1);
            check_gaps(&c, &k);
            mt_arena_release(gpu, mark);
        }
}

/* The meta device plans the memory of the splits. */
static void test_memory(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        mt_context_desc where;
        mt_context *meta = NULL;
        size_t mark = mt_arena_mark(gpu), peak;
        config c = usual(i % 2 ? MT_BF16 : MT_F32, i / 2 ? 20 : 8);
        call k = call_new(&c);
        size_t used = mt_arena_mark(gpu), splits = 3, rows = 3 * 8 * 8;
        mt_arena_set_peak(gpu, used);
        OK(mt_kv_cache_attention(gpu, &k.s, k.qkv, &k.cache, k.out));
        assert_true(mt_arena_mark(gpu) == used);
        peak = mt_arena_peak(gpu) - used;
        assert_true(peak == (i / 2 ? 0 : rows * splits * (c.dim * 4 + 8)));
        memset(&where, 0, sizeof where);
        where.device = MT_DEVICE_META, where.planned = MT_DEVICE_CUDA;
        where.arena_bytes = (size_t)1 << 30;
        OK(mt_context_create(NULL, &where, &meta));
        ASSERT_STATUS(meta, MT_SUCCESS, mt_kv_cache_append(meta, &k.s, k.table, k.qkv, &k.cache));
        ASSERT_STATUS(meta, MT_SUCCESS, mt_kv_cache_attention(meta, &k.s, k.qkv, &k.cache, k.out));
        assert_true(mt_arena_peak(meta) == peak);
        mt_context_destroy(meta);
        mt_arena_release(gpu, mark);
    }
}

/* A recorded step runs with the lengths that are in memory when it is launched. */
static void test_graph(void **state) {
    const int32_t later[] = {300, 699, 0};
    size_t mark = mt_arena_mark(gpu);
    config c = usual(MT_BF16, 1);
    mt_graph *graph = NULL;
    (void)state;
    c.rotary = NO_ROTARY; /* append then changes no query */
    c.held = {699};
    call k = call_new(&c);
    run(&k);
    OK(mt_graph_begin(gpu, NULL));
    OK(mt_kv_cache_append(gpu, &k.s, k.table, k.qkv, &k.cache));
    OK(mt_kv_cache_attention(gpu, &k.s, k.qkv, &k.cache, k.out));
    OK(mt_graph_end(gpu, &graph));
    for (int i = 0; i < 3; i++) k.held[i] = later[i];
    OK(mt_upload(gpu, k.held, mt_tensor_make((void *)k.cache.lengths, MT_I32, 1, 3)));
    OK(mt_graph_launch(gpu, graph));
    floats launched = download(k.out);
    OK(mt_kv_cache_attention(gpu, &k.s, k.qkv, &k.cache, k.out));
    same_bits("a graph", launched, download(k.out), launched.size() - 1);
    mt_graph_destroy(gpu, graph);
    check_attention(&c, &k);
    mt_arena_release(gpu, mark);
}

static void test_positions_and_lengths(void **state) {
    const int32_t held[BATCH] = {0, 5, 62, 63, 64, 1, 60, 0}, added[BATCH] = {0, 3, 2, 1, 0, 2, 3, 3};
    (void)state;
    for (int with = 0; with < 2; with++) {
        size_t mark = mt_arena_mark(gpu);
        int32_t lengths[BATCH], positions[3 * BATCH];
        mt_kv_cache cache;
        mt_tensor ids;
        memset(&cache, 0, sizeof cache);
        cache.max_seq = 64;
        cache.lengths = upload_numbers(held, BATCH);
        OK(mt_arena_tensor(gpu, MT_I32, 1, 3 * BATCH, &ids));
        OK(mt_kv_cache_positions(gpu, &cache, BATCH, 3, (int32_t *)ids.data));
        OK(mt_kv_cache_advance(gpu, 64, BATCH, 3, with ? upload_numbers(added, BATCH) : NULL,
                               (int32_t *)cache.lengths));
        OK(mt_download(gpu, ids, positions));
        OK(mt_download(gpu, mt_tensor_make((void *)cache.lengths, MT_I32, 1, BATCH), lengths));
        for (int b = 0; b < BATCH; b++) {
            for (int i = 0; i < 3; i++) assert_int_equal(positions[b * 3 + i], mt_min(held[b] + i, 63));
            assert_int_equal(lengths[b], mt_min(held[b] + (with ? added[b] : 3), 64));
        }
        mt_arena_release(gpu, mark);
    }
}

static void test_refusals(void **state) {
    size_t mark = mt_arena_mark(gpu);
    config c;
    (void)state;
    c.dim = 257;
    call k = call_new(&c);
    OK(mt_kv_cache_append(gpu, &k.s, k.table, k.qkv, &k.cache));
    ASSERT_STATUS(gpu, MT_ERR_UNSUPPORTED, mt_kv_cache_attention(gpu, &k.s, k.qkv, &k.cache, k.out));
    assert_non_null(strstr(mt_last_error(gpu), "head_dim is 257"));
    mt_arena_release(gpu, mark);
}

/* ---- a GPT ------------------------------------------------------------------------------------------------------- */

enum { TEXTS = 3, TEXT = 44, VOCAB = 37 };

/* invariant: virtual shards, or 0. logits: of rank 0, those of all calls in their order. */
typedef struct model_run {
    mt_dtype dtype;
    int tp, cp, invariant;
    floats logits;
} model_run;

static mt_gpt_desc model_desc(void) {
    mt_gpt_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = VOCAB;
    d.layers = 1;
    d.max_seq = 48;
    d.layer.hidden = 128;
    d.layer.heads = 2, d.layer.kv_heads = 1; /* heads of 64 features: prompts run on tensor cores in 16 bits */
    d.layer.norm.kind = MT_RMS_NORM;
    d.layer.scores.rotary_base = 100.0f;
    return d;
}

static mt_status ids_of(test_rank *r, const int32_t *host, int64_t n, const int32_t **out) {
    mt_tensor t;
    MT_TRY(mt_arena_tensor(r->ctx, MT_I32, 1, n, &t));
    *out = (const int32_t *)t.data;
    return mt_upload(r->ctx, host, t);
}

/* Feeds the tokens [at[b], at[b] + n[b]) of each text, and compares their logits with those of the whole texts. */
static mt_status feed(test_rank *r, model_run *run, const mt_gpt *gpt, const mt_gpt_cache *cache, const int32_t *text,
                      int32_t *at, const int32_t *n, int64_t seq, const floats &whole, double tolerance) {
    size_t mark = mt_arena_mark(r->ctx);
    std::vector<int32_t> host((size_t)(TEXTS * seq));
    floats got((size_t)(TEXTS * seq * VOCAB));
    const int32_t *ids;
    mt_tensor logits;
    mt_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.sequences = TEXTS, batch.seq = seq;
    for (int b = 0; b < TEXTS; b++)
        for (int i = 0; i < n[b]; i++) host[(size_t)(b * seq + i)] = text[b * TEXT + at[b] + i];
    MT_TRY(ids_of(r, host.data(), TEXTS * seq, &ids));
    MT_TRY(ids_of(r, n, TEXTS, &batch.lengths));
    MT_TRY(mt_arena_tensor(r->ctx, MT_F32, TEXTS * seq, VOCAB, &logits));
    MT_TRY(mt_gpt_cached_logits(r->ctx, gpt, &batch, ids, cache, logits));
    MT_TRY(mt_download(r->ctx, logits, got.data()));
    for (int b = 0; b < TEXTS; at[b] += n[b], b++)
        for (int i = 0; i < n[b]; i++) {
            const float *x = &got[(size_t)((b * seq + i) * VOCAB)];
            MT_TRY(test_near_f32("logits", x, &whole[(size_t)((b * TEXT + at[b] + i) * VOCAB)], VOCAB, tolerance));
            if (mt_comm_rank(r->world) == 0) run->logits.insert(run->logits.end(), x, x + VOCAB);
        }
    mt_arena_release(r->ctx, mark);
    return MT_SUCCESS;
}

/* The logits of whole texts. Context ranks compute those of their tokens, and exchange them. */
static mt_status whole_logits(test_rank *r, const mt_gpt *gpt, const int32_t *text, floats *whole) {
    const int64_t ranks = r->grid.cp_size, rows = TEXTS * TEXT / ranks;
    std::vector<int32_t> own((size_t)rows);
    floats all((size_t)(TEXTS * TEXT * VOCAB));
    const int32_t *ids;
    mt_tensor logits, gathered;
    mt_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.sequences = TEXTS, batch.seq = TEXT;
    for (int64_t i = 0; i < rows; i++)
        own[(size_t)i] = text[mt_context_parallel_token(NULL, r->grid.cp_rank, (int)ranks, TEXTS, TEXT, i)];
    MT_TRY(ids_of(r, own.data(), rows, &ids));
    MT_TRY(mt_arena_tensor(r->ctx, MT_F32, rows, VOCAB, &logits));
    MT_TRY(mt_arena_tensor(r->ctx, MT_F32, TEXTS * TEXT, VOCAB, &gathered));
    MT_TRY(mt_gpt_logits(r->ctx, gpt, &batch, ids, logits));
    MT_TRY(mt_all_gather(r->ctx, r->grid.cp, logits.data, gathered.data, (size_t)(rows * VOCAB), MT_F32));
    MT_TRY(mt_download(r->ctx, gathered, all.data()));
    *whole = floats(all.size()); /* resize would be instrumented code that the engine runs, too */
    for (int64_t i = 0; i < TEXTS * TEXT; i++)
        memcpy(whole->data() +
                   mt_context_parallel_token(NULL, (int)(i / rows), (int)ranks, TEXTS, TEXT, i % rows) * VOCAB,
               all.data() + i * VOCAB, VOCAB * sizeof(float));
    return MT_SUCCESS;
}

/* Prompts of 34, 3 and no tokens, which two context ranks divide, then tokens one by one, with a text that begins
   late. */
static mt_status generate_like(test_rank *r, model_run *run, const mt_gpt *gpt, const mt_gpt_cache *cache) {
    const int32_t prompts[] = {34, 3, 0}, one[] = {1, 1, 1}, late[] = {1, 2, 6};
    int32_t text[TEXTS * TEXT], at[TEXTS] = {0, 0, 0};
    floats whole;
    uint64_t seed = 11;
    double most = 0, tolerance;
    for (int32_t &t : text) t = (int32_t)test_below(&seed, VOCAB);
    MT_TRY(whole_logits(r, gpt, text, &whole));
    for (float x : whole) most = fmax(most, fabs(x));
    tolerance = most * (run->dtype == MT_F32 ? 4e-6 : 4e-2);
    MT_TRY(feed(r, run, gpt, cache, text, at, prompts, 34, whole, tolerance));
    for (int i = 0; i < 2; i++) {
        MT_TRY(feed(r, run, gpt, cache, text, at, one, 1, whole, tolerance));
        MT_TRY(feed(r, run, gpt, cache, text, at, late, 6, whole, tolerance));
    }
    return MT_SUCCESS;
}

static mt_status model_main(mt_comm *world, void *user) {
    model_run *run = (model_run *)user;
    mt_gpt_desc d = model_desc();
    mt_grid_desc shape;
    mt_context_desc where;
    mt_gpt_cache cache;
    test_rank r;
    mt_gpt gpt;
    memset(&shape, 0, sizeof shape);
    memset(&where, 0, sizeof where);
    memset(&cache, 0, sizeof cache);
    shape.tp = run->tp, shape.cp = run->cp;
    where.device = MT_DEVICE_CUDA;
    where.arena_bytes = (size_t)32 << 20;
    where.invariant = run->invariant;
    MT_TRY(test_rank_open(world, shape, &where, &r)); /* ranks share a GPU */
    mt_status status = mt_params_set_dtype(r.ctx, r.params, run->dtype);
    if (status == MT_SUCCESS) status = mt_gpt_create(r.ctx, r.params, &d, &gpt);
    if (status == MT_SUCCESS) status = mt_params_init(r.ctx, r.params, 3);
    if (status == MT_SUCCESS) status = mt_gpt_cache_create(r.ctx, &gpt, TEXTS, TEXT, &cache);
    if (status == MT_SUCCESS) status = generate_like(&r, run, &gpt, &cache);
    mt_gpt_cache_destroy(r.ctx, &cache);
    test_rank_close(&r);
    return status;
}

static void run_gpt(model_run *run, int type, int invariant, int tp, int cp) {
    run->dtype = type ? MT_BF16 : MT_F32;
    run->invariant = invariant;
    run->tp = tp, run->cp = cp;
    test_launch(tp * cp, model_main, run);
    assert_int_equal(run->logits.size(), 61 * VOCAB);
}

static void test_gpt(void **state) {
    (void)state;
    for (int type = 0; type < 2; type++) {
        model_run one, two, context;
        run_gpt(&one, type, 2, 1, 1);
        run_gpt(&two, type, 2, 2, 1);
        same_bits("another split", one.logits, two.logits, one.logits.size());
        for (int tp = 1; tp <= 2; tp++) {
            model_run plain;
            run_gpt(&plain, type, 0, tp, 1);
        }
        run_gpt(&context, type, 0, 1, 2);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_head_sizes),      cmocka_unit_test(test_one_token),
        cmocka_unit_test(test_many_splits),     cmocka_unit_test(test_tiles),
        cmocka_unit_test(test_tiles_of_tokens), cmocka_unit_test(test_reads),
        cmocka_unit_test(test_older_gpus),      cmocka_unit_test(test_prompts),
        cmocka_unit_test(test_long_prompts),    cmocka_unit_test(test_parts_of_prompts),
        cmocka_unit_test(test_window),          cmocka_unit_test(test_softcap_and_alibi),
        cmocka_unit_test(test_rotary),          cmocka_unit_test(test_offsets),
        cmocka_unit_test(test_run_to_run),      cmocka_unit_test(test_parts),
        cmocka_unit_test(test_wrong_lengths),   cmocka_unit_test(test_memory),
        cmocka_unit_test(test_graph),           cmocka_unit_test(test_positions_and_lengths),
        cmocka_unit_test(test_refusals),        cmocka_unit_test(test_gpt),
    };
    return cmocka_run_group_tests(tests, open_contexts, close_contexts);
}
