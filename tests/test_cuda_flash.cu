/* test_cuda_flash.cu - tests attention on tensor cores against the CPU backend in f32, with the same 16-bit inputs.
     On a GPU:       nvcc -std=c++17 -O2 -arch=native -I. tests/test_cuda_flash.cu -lcublasLt
     Without a GPU:  the engine in tests/engine/ runs the same file on a CPU. */

#define MEGATRON_IMPLEMENTATION
#include "mt_kernels.cuh"

#include "mt_test_cuda.h"

#include <math.h>

#if defined(MT_CUDA_ENGINE)
#include "core.h"
#include "runtime.h"
#endif

typedef struct config {
    int64_t batch = 1, seq = 1, groups = 1, per_group = 1, dim = 64;
    mt_dtype type = MT_BF16;
    mt_mask mask = MT_MASK_CAUSAL;
    int padded = 0;
    float p = 0.0f;
    int64_t window = 0;
    float softcap = 0.0f;
    int packed = 0;     /* which documents: see set_documents */
    int64_t kv_seq = 0; /* 0: seq */
    int alibi = 0;
    int64_t whole = 0, first_query = 0, first_key = 0; /* a part of sequences of `whole` tokens; 0: all of them */
} config;

/* The arguments of one call, on the GPU. The 8 elements between rows must stay unchanged. */
typedef struct call {
    mt_attention_desc s;
    mt_tensor qkv, out, lse, dout, dqkv;
} call;

static const char *describe(const config *c) {
    static char text[320];
    snprintf(text, sizeof text,
             "%s, head_dim %d, %s, batch %d, seq %d, kv_seq %d, %d groups of %d%s, dropout %g, window %d, softcap %g, "
             "documents %d%s, from %d and %d of %d on",
             mt_dtype_name(c->type), (int)c->dim, c->mask == MT_MASK_CAUSAL ? "causal" : "bidirectional", (int)c->batch,
             (int)c->seq, (int)c->kv_seq, (int)c->groups, (int)c->per_group, c->padded ? ", padded" : "", (double)c->p,
             (int)c->window, (double)c->softcap, c->packed, c->alibi ? ", ALiBi" : "", (int)c->first_query,
             (int)c->first_key, (int)c->whole);
    return text;
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

#define GAP 8

/* A tensor filled with NaN, to detect elements that are not written. */
static mt_tensor tensor_new(mt_dtype type, int64_t rows, int64_t cols) {
    mt_tensor whole;
    OK(mt_arena_tensor(gpu, type, rows, cols + GAP, &whole));
    OK(mt_fill(gpu, whole, NAN));
    return mt_tensor_cols(whole, 0, cols);
}

static mt_tensor noise(mt_dtype type, int64_t rows, int64_t cols, uint64_t seed, float scale) {
    float *x = (float *)malloc((size_t)(rows * cols) * sizeof *x);
    size_t mark;
    mt_tensor f, t = tensor_new(type, rows, cols);
    for (int64_t i = 0; i < rows * cols; i++) x[i] = scale * test_float(&seed);
    mark = mt_arena_mark(gpu);
    OK(mt_arena_tensor(gpu, MT_F32, rows, cols, &f));
    OK(mt_upload(gpu, x, f));
    OK(mt_convert(gpu, f, t));
    mt_arena_release(gpu, mark);
    free(x);
    return t;
}

static mt_tensor on_cpu(int64_t rows, int64_t cols) {
    mt_tensor t;
    OK(mt_arena_tensor(cpu, MT_F32, rows, cols, &t));
    return t;
}

static void gap_untouched(const char *what, mt_tensor t) {
    float *x = download(gpu, mt_tensor_cols(mt_tensor_make(t.data, t.dtype, t.rows, t.cols + GAP), t.cols, GAP));
    for (int64_t i = 0; i < t.rows * GAP; i++)
        if (!isnan(x[i])) fail_msg("%s: something was written behind row %lld", what, (long long)(i / GAP));
    free(x);
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

#define DOCUMENTS 256 /* the most documents of a call */

/* Sets the documents of a call. packed is
   1: documents of 1 and of no tokens, ends inside a tile and between tiles, a document over the end of a sequence
   2: one document
   3: documents of five tokens */
static void set_documents(const config *c, mt_attention_desc *s) {
    static int32_t ends[DOCUMENTS + 1];
    int32_t tokens = (int32_t)(c->batch * (c->whole ? c->whole : c->seq)), half = tokens / 2, n = 1;
    const int32_t mixed[] = {1, 1, 2, 37, 64, 65, half - 20, half + 25, tokens - 1, tokens};
    mt_tensor ids;
    if (c->packed == 1)
        for (; n <= 10; n++) ends[n] = mt_max(ends[n - 1], mt_min(mixed[n - 1], tokens));
    if (c->packed == 3)
        for (; ends[n - 1] < tokens && n < DOCUMENTS; n++) ends[n] = mt_min(n * 5, tokens);
    if (c->packed > 1) ends[n++] = tokens;
    OK(mt_arena_tensor(gpu, MT_I32, 1, n, &ids));
    OK(mt_upload(gpu, ends, ids));
    s->cu_seqlens = (const int32_t *)ids.data;
    s->documents = n - 1;
}

static mt_attention_desc desc_new(const config *c) {
    static const uint64_t offset = 0x123456789abu;
    static int32_t lengths[8];
    int64_t heads = c->groups * c->per_group, keys = c->whole ? c->whole : c->kv_seq ? c->kv_seq : c->seq;
    mt_tensor ids;
    mt_attention_desc s;
    memset(&s, 0, sizeof s);
    s.batch = c->batch, s.seq = c->seq, s.groups = c->groups, s.heads_per_group = c->per_group, s.head_dim = c->dim,
    s.kv_seq = c->kv_seq;
    s.part.seq = c->whole, s.part.first_query = c->first_query, s.part.first_key = c->first_key;
    s.scores.mask = c->mask;
    s.scores.window = c->window;
    s.scores.softcap = c->softcap;
    if (c->packed) set_documents(c, &s);
    if (c->alibi) {
        mt_tensor slopes;
        OK(mt_arena_tensor(gpu, MT_F32, 1, heads, &slopes));
        OK(mt_alibi_slopes(gpu, heads + 1, 1, slopes));
        s.scores.alibi = 1;
        s.scores.alibi_slopes = (const float *)slopes.data;
    }
    s.dropout.p = c->p;
    s.dropout.at.seed = 0x123456789abcdefu, s.dropout.at.subsequence = 0xfedcba987654321u;
    s.dropout.at.first_row = 5, s.dropout.at.first_col = 3, s.dropout.at.global_cols = heads + 7;
    if (c->p > 0) { /* a part of the subsequence is in the GPU's memory */
        OK(mt_arena_tensor(gpu, MT_I32, 1, 2, &ids));
        OK(mt_upload(gpu, &offset, ids));
        s.dropout.at.subsequence -= offset;
        s.dropout.at.offset = (const uint64_t *)ids.data;
    }
    if (c->padded) { /* full, empty, one token less, not quite half */
        const int64_t some[4] = {keys, 0, keys - 1, keys * 4 / 9};
        for (int64_t b = 0; b < c->batch; b++) lengths[b] = (int32_t)some[b % 4];
        OK(mt_arena_tensor(gpu, MT_I32, 1, c->batch, &ids));
        OK(mt_upload(gpu, lengths, ids));
        s.lengths = (const int32_t *)ids.data;
    }
    return s;
}

static call call_new(const config *c, float size) {
    int64_t heads = c->groups * c->per_group, tokens = c->batch * c->seq;
    call k;
    k.s = desc_new(c);
    k.qkv = noise(c->type, tokens, (heads + 2 * c->groups) * c->dim, 1, size);
    k.dout = noise(c->type, tokens, heads * c->dim, 2, 1.0f);
    k.out = tensor_new(c->type, tokens, heads * c->dim);
    k.lse = tensor_new(MT_F32, heads, tokens);
    k.dqkv = tensor_new(c->type, tokens, k.qkv.cols);
    return k;
}

/* Tells the context whether the program has code for sm_90a: 1 or -1. 0: it has not asked yet. Test cases come twice:
   with the kernels that wgmma has, and (with mma in their names) without them. */
static void set_hopper(int built) {
    mti_kernels *k = NULL;
    OK(mti_kernels_open(gpu, &k));
    k->hopper = built;
}

static int without_hopper(void **state) {
    (void)state;
    set_hopper(-1);
    return 0;
}

static int with_hopper(void **state) {
    (void)state;
    set_hopper(0);
    return 0;
}

static int has_hopper() {
    int built = 0;
    OK(mti_hopper_built(gpu, &built));
    return built;
}

static void run(const call *k) {
    OK(mt_attention_forward(gpu, &k->s, k->qkv, k->out, k->lse));
    OK(mt_attention_backward(gpu, &k->s, k->qkv, k->out, k->lse, k->dout, k->dqkv));
}

/* ---- against the CPU --------------------------------------------------------------------------------------------- */

/* The largest relative error of rounding to nearest. Its root mean square over all mantissas is 0.42 times this. */
static double unit_roundoff(mt_dtype type) { return type == MT_BF16 ? 1.0 / 256 : 1.0 / 2048; }

/* Compares a result with the CPU's, which rounds nothing, head by head.

   Every result is a sum over rows of a 16-bit matrix, weighted by p or ds, which are rounded to 16 bits; the sum is
   then rounded itself. The errors of the weights are independent, so the error of a head's vector, relative to the
   vector, is their root mean square: sqrt(2) 0.42 = 0.6 unit roundoffs. Vectors of 64 and more numbers stay within
   1.5 of it; 2 is allowed, and 3 for fewer numbers (in bf16, one missing key of 200 would give 18).

   noise: error of f32 where much cancels, and of weights so small that f16 has few bits for them. */
static void near(const config *c, const char *what, mt_tensor got, mt_tensor expected, double noise) {
    float *x = download(gpu, got), *y = (float *)expected.data;
    for (int64_t i = 0; i < got.rows * got.cols; i += c->dim) {
        double error = 0, size = 0, bound;
        for (int64_t d = 0; d < c->dim; d++) {
            error += ((double)x[i + d] - (double)y[i + d]) * ((double)x[i + d] - (double)y[i + d]);
            size += (double)y[i + d] * (double)y[i + d];
        }
        bound = (c->dim < 64 ? 3 : 2) * unit_roundoff(c->type) * sqrt(size) + noise;
        if (!(sqrt(error) <= bound))
            fail_msg("%s: %s, row %lld, column %lld: off by %g, %g is allowed, size %g", describe(c), what,
                     (long long)(i / got.cols), (long long)(i % got.cols), sqrt(error), bound, sqrt(size));
    }
    gap_untouched(what, got);
    free(x);
}

/* A capped score is softcap times a tanh, whose error is at most 3e-7. */
static void near_lse(const config *c, mt_tensor got, mt_tensor expected) {
    float *x = download(gpu, got), *y = (float *)expected.data, bound = 1e-5f + c->softcap * 3e-7f;
    for (int64_t i = 0; i < got.rows * got.cols; i++)
        if (!(fabsf(x[i] - y[i]) <= bound) && x[i] != y[i]) /* -infinity without keys */
            fail_msg("%s: lse %lld is %.9g, on the CPU %.9g", describe(c), (long long)i, (double)x[i], (double)y[i]);
    gap_untouched("lse", got);
    free(x);
}

/* Scales query i of all heads by even or odd, and key j by low (j < 64) or high. Tiles of 64 keys are compared with the
   first one. */
static void rescale(const config *c, call *k, float even, float odd, float low, float high) {
    size_t mark = mt_arena_mark(gpu);
    float *x = download(gpu, k->qkv);
    int64_t width = k->qkv.cols, keys = c->per_group * c->dim, group = keys + 2 * c->dim;
    mt_tensor f;
    for (int64_t i = 0; i < k->qkv.rows * width; i++) {
        int64_t token = i / width % c->seq, col = i % width % group;
        if (col < keys) x[i] *= token % 2 ? odd : even;
        else if (col < keys + c->dim) x[i] *= token < 64 ? low : high;
    }
    OK(mt_arena_tensor(gpu, MT_F32, k->qkv.rows, width, &f));
    OK(mt_upload(gpu, x, f));
    OK(mt_convert(gpu, f, k->qkv));
    mt_arena_release(gpu, mark);
    free(x);
}

/* Returns a desc with copies of what it has on the GPU. They are valid until the next call. */
static mt_attention_desc desc_on_cpu(const config *c, const mt_attention_desc *on_gpu) {
    static int32_t lengths[8], ends[DOCUMENTS + 1];
    static float slopes[16];
    static uint64_t offset;
    mt_attention_desc s = *on_gpu;
    if (c->padded) {
        OK(mt_download(gpu, mt_tensor_make(s.lengths, MT_I32, 1, c->batch), lengths));
        s.lengths = lengths;
    }
    if (c->packed) {
        OK(mt_download(gpu, mt_tensor_make(s.cu_seqlens, MT_I32, 1, s.documents + 1), ends));
        s.cu_seqlens = ends;
    }
    if (c->alibi) {
        OK(mt_download(gpu, mt_tensor_f32((float *)s.scores.alibi_slopes, 1, c->groups * c->per_group), slopes));
        s.scores.alibi_slopes = slopes;
    }
    offset = 0;
    if (c->p > 0) OK(mt_download(gpu, mt_tensor_make(s.dropout.at.offset, MT_I32, 1, 2), &offset));
    s.dropout.at.offset = &offset;
    return s;
}

/* The CPU's backward gets the GPU's out and lse. The gradient of a score is p (dp - delta), where dp and delta are sums
   of dim products that f32 rounds, and cancel where one key has all of p. 2^-25 is half of f16's last place for small
   numbers. */
static void against_cpu_with(config c, call k) {
    mt_attention_desc s = desc_on_cpu(&c, &k.s);
    double ds = (double)c.dim * 6e-8 + sqrt((double)c.seq) / 33554432.0, size = 2.0 * sqrt((double)c.dim);
    mt_tensor qkv = widened(k.qkv), out = on_cpu(k.out.rows, k.out.cols), lse = on_cpu(k.lse.rows, k.lse.cols);
    mt_tensor dqkv = on_cpu(k.dqkv.rows, k.dqkv.cols);
    run(&k);
    ASSERT_STATUS(cpu, MT_SUCCESS, mt_attention_forward(cpu, &s, qkv, out, lse));
    near(&c, "out", k.out, out, 1e-6 * size);
    near_lse(&c, k.lse, lse);
    ASSERT_STATUS(cpu, MT_SUCCESS,
                  mt_attention_backward(cpu, &s, qkv, widened(k.out), widened(k.lse), widened(k.dout), dqkv));
    near(&c, "dqkv", k.dqkv, dqkv, ds * size);
}

static void against_cpu(config c) {
    size_t at_cpu = mt_arena_mark(cpu), at_gpu = mt_arena_mark(gpu);
    against_cpu_with(c, call_new(&c, 2.0f));
    mt_arena_release(cpu, at_cpu);
    mt_arena_release(gpu, at_gpu);
}

static const int64_t sizes[] = {64, 96, 128, 192, 256}; /* of the kernels, without padding */

/* Every head size up to 128 and type, with sequences longer than three tiles of keys and queries. The last tile is
   partial. */
static void each(mt_mask mask, int padded, float p, int64_t batch, int64_t seq, int64_t groups, int64_t per_group) {
    for (int i = 0; i < 6; i++) {
        config c = {batch, seq, groups, per_group, 64 + i / 2 * 32, i % 2 ? MT_F16 : MT_BF16, mask, padded, p};
        against_cpu(c);
    }
}

static void test_causal(void **state) {
    (void)state;
    each(MT_MASK_CAUSAL, 0, 0.0f, 1, 231, 1, 1);
}

static void test_bidirectional(void **state) {
    (void)state;
    each(MT_MASK_BIDIRECTIONAL, 0, 0.0f, 1, 203, 1, 1);
}

/* More tiles than a block has room for: with wgmma, up to six tiles of 128 keys, three of which are there at a time. */
static void test_many_tiles(void **state) {
    (void)state;
    for (int i = 0; i < 5; i++) {
        config c = {1, 700, 1, 1, sizes[i], i % 2 ? MT_F16 : MT_BF16, i % 2 ? MT_MASK_CAUSAL : MT_MASK_BIDIRECTIONAL};
        against_cpu(c);
    }
}

static void test_groups(void **state) {
    (void)state;
    each(MT_MASK_CAUSAL, 0, 0.0f, 2, 70, 2, 3);
}

static void test_padding(void **state) {
    (void)state;
    each(MT_MASK_CAUSAL, 1, 0.0f, 4, 150, 1, 1);
    each(MT_MASK_BIDIRECTIONAL, 1, 0.0f, 4, 140, 1, 1);
}

/* Rows with a multiple of four probabilities start at a block of random words, other rows do not. */
static void test_dropout(void **state) {
    (void)state;
    each(MT_MASK_CAUSAL, 0, 0.25f, 1, 140, 1, 2);
    each(MT_MASK_BIDIRECTIONAL, 1, 0.25f, 1, 133, 1, 1);
}

/* The largest score of a row rises by more than 2^8 of the exponentials after the first tile, in all rows (in the even
   ones first), in half of them, in none. */
static void test_rising_scores(void **state) {
    static const float odd[] = {3.0f, 0.1f, 3.0f};
    (void)state;
    for (int i = 0; i < 15; i++) {
        config c = {
            1, 200, 1, 1, sizes[i / 3], i % 2 ? MT_BF16 : MT_F16, i & 2 ? MT_MASK_CAUSAL : MT_MASK_BIDIRECTIONAL,
            0, 0.0f};
        size_t at_cpu = mt_arena_mark(cpu), at_gpu = mt_arena_mark(gpu);
        call k = call_new(&c, 2.0f);
        if (i % 3 == 2) rescale(&c, &k, 3.0f, 3.0f, 1.0f, 0.3f);
        else rescale(&c, &k, 3.0f, odd[i % 3], 0.1f, 1.0f);
        against_cpu_with(c, k);
        mt_arena_release(cpu, at_cpu);
        mt_arena_release(gpu, at_gpu);
    }
}

/* Heads that the kernels pad with zeros, and the largest ones, with every option: variant 0 is a causal mask, 1 none
   and padding, 2 a window with several heads of a group, 3 a soft cap, 4 documents, 5 dropout. Two variants for each
   head size, or all. Behind the last head of a row is NaN, in qkv and in dout: a product with it would be NaN. */
static void test_head_sizes(void **state) {
    static const int64_t dims[] = {8, 16, 32, 40, 72, 80, 112, 160, 192, 224, 256};
    (void)state;
    for (int i = 0; i < 11 * 6; i++) {
        int variant = i / 11;
        config c = {1 + (int64_t)(variant == 4), 150, 1, 1, dims[i % 11], i % 2 ? MT_F16 : MT_BF16};
        if (i % 3 != 0 && !test_all()) continue;
        if (variant % 2) c.mask = MT_MASK_BIDIRECTIONAL;
        if (variant == 1) c.batch = 4, c.padded = 1;
        if (variant == 2) c.window = 33, c.per_group = 3;
        if (variant == 3) c.softcap = 1.5f;
        if (variant == 4) c.packed = 1;
        if (variant == 5) c.p = 0.25f, c.groups = 2;
        against_cpu(c);
    }
}

static void test_short(void **state) {
    static const int64_t lengths[] = {1, 2, 17, 64, 65, 127, 128, 129};
    (void)state;
    for (int i = 0; i < 16; i++) {
        config c = {1,
                    lengths[i / 2],
                    1,
                    1,
                    i % 3 * 32 + 64,
                    i & 1 ? MT_BF16 : MT_F16,
                    i & 1 ? MT_MASK_CAUSAL : MT_MASK_BIDIRECTIONAL,
                    0,
                    i & 4 ? 0.1f : 0.0f};
        against_cpu(c);
    }
}

/* ---- windows, soft caps and documents --------------------------------------------------------------------------- */

/* Every head size up to 128 and type, with i < 6; with 6 and more also the others. c has the rest, except what differs
   between the calls. */
static config of_each(config c, int i) {
    c.dim = sizes[i / 2], c.type = i % 2 ? MT_F16 : MT_BF16;
    c.mask = (i + i / 2) % 2 ? MT_MASK_CAUSAL : MT_MASK_BIDIRECTIONAL;
    return c;
}

static void test_window(void **state) {
    static const int64_t windows[] = {40, 150, 1, 64, 66, 33};
    (void)state;
    for (int i = 0; i < 6; i++) {
        config c = of_each({1, 277, 1, 1}, i);
        c.window = windows[i];
        against_cpu(c);
    }
}

/* Scores are up to five times the cap, or far below it. */
static void test_softcap(void **state) {
    static const float caps[] = {0.8f, 50.0f, 3.0f};
    (void)state;
    for (int i = 0; i < 6; i++) {
        config c = of_each({1, 150, 1, 1}, i);
        c.softcap = caps[i % 3];
        against_cpu(c);
    }
}

static void test_documents(void **state) {
    (void)state;
    for (int i = 0; i < 6; i++) {
        config c = of_each({2, 141, 1, 1}, i);
        c.packed = 1 + i * 2 % 3;
        against_cpu(c);
    }
}

/* Slopes of several heads of a group, alone and with what moves or hides tiles. Half of the cases, or all. */
static void test_alibi(void **state) {
    (void)state;
    for (int i = 0; i < (test_all() ? 20 : 10); i++) {
        config c = of_each({2, 150, 1 + i % 2, 1 + i / 2 % 3}, i % 10);
        c.alibi = 1;
        if (i == 6) c.dim = 40;
        if (i % 5 == 1) c.window = 30 + i;
        if (i % 5 == 2) c.batch = 4, c.padded = 1;
        if (i % 5 == 3) c.packed = 1;
        if (i % 5 == 4) c.p = 0.25f;
        against_cpu(c);
    }
}

/* Queries without keys share a warp with others: those of a window behind the length. */
static void test_window_and_padding(void **state) {
    (void)state;
    for (int i = 0; i < 6; i++) {
        config c = of_each({4, 150, 1, 1}, i);
        c.padded = 1, c.window = 30 + i, c.packed = i % 2;
        against_cpu(c);
    }
}

/* ---- queries and keys of different lengths, in tensors of their own ---------------------------------------------- */

/* q has another distance between its rows than k and v, which lie beside each other. The same for the gradients. */
static void apart_against_cpu(config c) {
    size_t at_cpu = mt_arena_mark(cpu), at_gpu = mt_arena_mark(gpu);
    int64_t heads = c.groups * c.per_group, rows = c.batch * c.seq, width = c.groups * c.dim,
            keys = c.batch * (c.kv_seq ? c.kv_seq : c.seq);
    mt_attention_desc s = desc_new(&c), host = desc_on_cpu(&c, &s);
    mt_tensor q = noise(c.type, rows, heads * c.dim, 1, 2.0f), kv = noise(c.type, keys, 2 * width, 3, 2.0f);
    mt_tensor out = tensor_new(c.type, rows, heads * c.dim), lse = tensor_new(MT_F32, heads, rows);
    mt_tensor dout = noise(c.type, rows, heads * c.dim, 2, 1.0f), dq = tensor_new(c.type, rows, heads * c.dim);
    mt_tensor dkv = tensor_new(c.type, keys, 2 * width), k = mt_tensor_cols(kv, 0, width);
    mt_tensor v = mt_tensor_cols(kv, width, width), dk = mt_tensor_cols(dkv, 0, width);
    mt_tensor dv = mt_tensor_cols(dkv, width, width);
    mt_tensor out_cpu = on_cpu(rows, out.cols), lse_cpu = on_cpu(heads, rows), dq_cpu = on_cpu(rows, dq.cols);
    mt_tensor dkv_cpu = on_cpu(keys, 2 * width), kv_cpu = widened(kv);
    double size = 2.0 * sqrt((double)c.dim), ds = (double)c.dim * 6e-8 + sqrt((double)(keys / c.batch)) / 33554432.0;
    OK(mt_dot_product_attention_forward(gpu, &s, q, k, v, out, lse));
    OK(mt_dot_product_attention_backward(gpu, &s, q, k, v, out, lse, dout, dq, dk, dv));
    ASSERT_STATUS(cpu, MT_SUCCESS,
                  mt_dot_product_attention_forward(cpu, &host, widened(q), mt_tensor_cols(kv_cpu, 0, width),
                                                   mt_tensor_cols(kv_cpu, width, width), out_cpu, lse_cpu));
    near(&c, "out", out, out_cpu, 1e-6 * size);
    near_lse(&c, lse, lse_cpu);
    ASSERT_STATUS(cpu, MT_SUCCESS,
                  mt_dot_product_attention_backward(cpu, &host, widened(q), mt_tensor_cols(kv_cpu, 0, width),
                                                    mt_tensor_cols(kv_cpu, width, width), widened(out), widened(lse),
                                                    widened(dout), dq_cpu, mt_tensor_cols(dkv_cpu, 0, width),
                                                    mt_tensor_cols(dkv_cpu, width, width)));
    near(&c, "dq", dq, dq_cpu, ds * size);
    near(&c, "dk and dv", dkv, dkv_cpu, ds * size);
    mt_arena_release(cpu, at_cpu);
    mt_arena_release(gpu, at_gpu);
}

/* More keys than queries, so that the last query has the position of the last key, and fewer, so that under a causal
   mask the first queries see none. One query. One more block of keys or of queries. As many. Half of the cases, or
   all. */
static void test_keys_of_their_own(void **state) {
    static const int64_t sizes_of[][2] = {{70, 200}, {200, 70}, {1, 150}, {127, 129}, {129, 127}, {141, 141}};
    (void)state;
    for (int i = 0; i < (test_all() ? 30 : 15); i++) {
        config c = of_each({2, sizes_of[i % 6][0], 1 + i % 2, 1 + i / 2 % 3}, i % 10);
        c.kv_seq = sizes_of[i % 6][1];
        if (i % 10 == 6) c.dim = 40;
        if (i % 5 == 1) c.window = 30;
        if (i % 5 == 2) c.batch = 4, c.padded = 1;
        if (i % 5 == 3) c.softcap = 1.5f;
        if (i % 5 == 4) c.p = 0.25f;
        if (i % 6 == 5 && i % 2) c.packed = 1;
        c.alibi = i % 7 > 3 && c.softcap == 0.0f;
        apart_against_cpu(c);
    }
}

/* Parts of sequences: before the queries, so that all keys are seen, at their positions, partly, behind them, so that
   no key is seen, and apart by more than a window. Half of the cases, or all. */
static void test_parts(void **state) {
    static const struct {
        int64_t seq, kv_seq, whole, first_query, first_key;
    } parts[] = {{70, 70, 280, 140, 70}, {70, 70, 280, 140, 140}, {64, 130, 259, 129, 65}, {129, 70, 259, 65, 100},
                 {70, 70, 280, 70, 140}, {100, 60, 400, 300, 0},  {1, 64, 128, 100, 64}};
    (void)state;
    for (int i = 0; i < (test_all() ? 42 : 21); i++) {
        config c = of_each({2, parts[i % 7].seq, 1 + i % 2, 1 + i / 2 % 3}, i % 10);
        c.kv_seq = parts[i % 7].kv_seq, c.whole = parts[i % 7].whole;
        c.first_query = parts[i % 7].first_query, c.first_key = parts[i % 7].first_key;
        if (i % 10 == 6) c.dim = 40;
        if (i % 6 == 1) c.window = 30;
        if (i % 6 == 2) c.batch = 4, c.padded = 1;
        if (i % 6 == 3) c.softcap = 1.5f;
        if (i % 6 == 4) c.p = 0.25f;
        if (i % 6 == 5) c.packed = 1 + i / 6 % 3;
        c.alibi = i % 5 > 2 && c.softcap == 0.0f;
        apart_against_cpu(c);
    }
}

/* Options together: one combination in 7, which takes a minute or two, or one in 307. */
static void test_options_together(void **state) {
    static const int64_t windows[] = {0, 1, 20, 64, 131}, seqs[] = {130, 77, 192};
    static const float caps[] = {0.0f, 1.5f, 30.0f};
    (void)state;
    for (int i = 0; i < 6 * 5 * 3 * 3 * 4 * 2 * 2; i++) {
        int j = i / 6;
        config c = of_each({}, i % 6);
        if (i % (test_all() ? 7 : 307) != 0) continue;
        c.window = windows[j % 5], c.softcap = caps[j / 5 % 3], c.seq = seqs[j / 15 % 3], c.packed = j / 45 % 4;
        c.padded = j / 180 % 2, c.p = j / 360 ? 0.2f : 0.0f;
        c.batch = 1 + j % 2, c.groups = 1 + j / 2 % 2, c.per_group = 1 + j % 3;
        against_cpu(c);
    }
}

/* Fills columns [from, to) of the tokens [first, end) with NaN. */
static void poison(mt_tensor t, int64_t first, int64_t end, int64_t from, int64_t to) {
    OK(mt_fill(gpu, mt_tensor_cols(mt_tensor_rows(t, first, end - first), from, to - from), NAN));
}

/* Checks rows of two results: they have the same bits where no row of the warp sees a token of the tile [tile, 256). A
   warp has `warp` rows, and a row sees `before` tokens before it and `after` behind it. */
static void same_where_hidden(const config *c, const char *what, mt_tensor a, mt_tensor b, int64_t col, int64_t cols,
                              int64_t tile, int64_t warp, int64_t before, int64_t after) {
    float *x = download(gpu, mt_tensor_cols(a, col, cols)), *y = download(gpu, mt_tensor_cols(b, col, cols));
    int64_t hidden = 0;
    for (int64_t i = 0; i < c->seq; i++) {
        int64_t first = i / warp * warp - before, end = i / warp * warp + warp + after;
        bool same = memcmp(x + i * cols, y + i * cols, (size_t)cols * sizeof *x) == 0;
        if (end > tile && first < 256) continue;
        hidden++;
        if (!same) fail_msg("%s: %s: row %d depends on a token that its warp does not see", describe(c), what, (int)i);
    }
    assert_true(hidden > c->seq / 3);
    free(x);
    free(y);
}

/* A warp skips the tiles that all of its rows do not see: NaN in them changes no result. With wgmma, the same is true
   of the 64 rows of a warpgroup, and of tiles of 128 keys up to 128 features. */
static void test_hidden_tiles_are_skipped(void **state) {
    (void)state;
    for (int i = 0; i < 10; i++) {
        config c = of_each({1, 400, 1, 1}, i);
        c.window = 20;
        size_t mark = mt_arena_mark(gpu);
        int64_t after = c.mask == MT_MASK_CAUSAL ? 0 : 19, dim = c.dim;
        bool both = has_hopper() && dim <= 128; /* forward and backward */
        int64_t tile = both ? 128 : 192, rows = has_hopper() ? 64 : 32, warp = both ? 64 : dim == 64 ? 32 : 16;
        call a = call_new(&c, 2.0f), b = call_new(&c, 2.0f), d = call_new(&c, 2.0f);
        run(&a);
        poison(b.qkv, 192, 256, dim, 3 * dim); /* keys and values */
        OK(mt_attention_forward(gpu, &b.s, b.qkv, b.out, b.lse));
        OK(mt_attention_backward(gpu, &b.s, b.qkv, a.out, a.lse, b.dout, b.dqkv));
        same_where_hidden(&c, "out", a.out, b.out, 0, dim, tile, rows, 19, after);
        same_where_hidden(&c, "dq", a.dqkv, b.dqkv, 0, dim, tile, rows, 19, after);
        poison(d.qkv, 192, 256, 0, dim); /* queries */
        poison(d.dout, 192, 256, 0, dim);
        OK(mt_attention_backward(gpu, &d.s, d.qkv, a.out, a.lse, d.dout, d.dqkv));
        same_where_hidden(&c, "dk and dv", a.dqkv, d.dqkv, dim, 2 * dim, 192, warp, after, 19);
        mt_arena_release(gpu, mark);
    }
}

/* A block loads only the tiles that one of its rows sees. In a window of 32 these are at most 128 + 31 * 2 columns,
   and up to 63 more on both sides; in documents of 32 tokens, 128. Without that a block would load 1024, or on average
   576 in a causal mask. Heads of more than 128 features have blocks of 64 rows in backward. */
static void test_loads(void **state) {
#if defined(MT_CUDA_ENGINE)
    (void)state;
    for (int i = 0; i < 10; i++) {
        config c = of_each({1, 1024, 1, 1}, i);
        size_t mark = mt_arena_mark(gpu), before, forward, all;
        size_t more = i % 2 == 0 ? 62 + 2 * 63 : 0, rows = c.dim > 128 ? 64 : 128;
        size_t longer = has_hopper() && c.dim <= 128 ? 2 * 64 : 0; /* tiles of 128 keys */
        int32_t ends[33];
        mt_tensor ids;
        c.window = i % 2 == 0 ? 32 : 0;
        call k = call_new(&c, 2.0f);
        for (int d = 0; d <= 32; d++) ends[d] = d * 32;
        OK(mt_arena_tensor(gpu, MT_I32, 1, 33, &ids));
        OK(mt_upload(gpu, ends, ids));
        if (i % 2) k.s.cu_seqlens = (const int32_t *)ids.data, k.s.documents = 32;
        before = mte::copies_that_read();
        OK(mt_attention_forward(gpu, &k.s, k.qkv, k.out, k.lse));
        forward = mte::copies_that_read() - before;
        OK(mt_attention_backward(gpu, &k.s, k.qkv, k.out, k.lse, k.dout, k.dqkv));
        all = mte::copies_that_read() - before;
        size_t row = (size_t)c.dim / 8; /* copies of a row; lse and delta take two for four rows */
        if (forward > 8 * (128 + 2 * (128 + more + (more ? longer : 0))) * row)
            fail_msg("%s: forward copies %zu times", describe(&c), forward);
        size_t keys = 2 * (rows + more + (more ? longer : 0)), queries = 2 * (rows + more);
        if (all - forward > 1024 / rows * ((4 * rows + keys + queries) * row + rows / 2 + (rows + more) / 2))
            fail_msg("%s: backward copies %zu times", describe(&c), all - forward);
        mt_arena_release(gpu, mark);
    }
#else
    (void)state;
    skip(); /* a GPU does not count them */
#endif
}

/* A GPU does not check lengths and cu_seqlens. Wrong ones give results of no use, but access no other memory. */
static void test_wrong_numbers(void **state) {
    static const int32_t wrong[][6] = {{0, 900, -7, 50, 300, 282},
                                       {1 << 30, 0, 0, 5, -(1 << 30), 1},
                                       {-5, -5, 0x7fffffff, 0x7fffffff, 9, -0x7fffffff}};
    (void)state;
    for (int i = 0; i < 9; i++) {
        config c = of_each({2, 141, 1, 1}, i % 6);
        size_t mark = mt_arena_mark(gpu);
        mt_tensor ids;
        c.window = i % 2 * 50;
        call k = call_new(&c, 2.0f);
        OK(mt_arena_tensor(gpu, MT_I32, 1, 6, &ids));
        OK(mt_upload(gpu, wrong[i % 3], ids));
        k.s.cu_seqlens = (const int32_t *)ids.data, k.s.documents = 5;
        if (i % 4 > 1) k.s.lengths = k.s.cu_seqlens + 1;
        run(&k);
        gap_untouched("out", k.out);
        gap_untouched("lse", k.lse);
        gap_untouched("dqkv", k.dqkv);
        mt_arena_release(gpu, mark);
    }
}

static __global__ void cap_kernel(float cap, float *x) {
    float s[1][1][4];
    for (int i = 0; i < 4; i++) s[0][0][i] = x[threadIdx.x * 4 + i];
    mti_flash_cap(cap, s);
    for (int i = 0; i < 4; i++) x[threadIdx.x * 4 + i] = s[0][0][i];
}

/* tanh with a relative error of at most 6e-7, from numbers that it does not change to those where it is 1. */
static void test_tanh(void **state) {
    enum { N = 1024 };
    float x[N], y[N], cap = 0.25f;
    mt_tensor t;
    (void)state;
    for (int i = 0; i < N; i++) x[i] = (i % 2 ? -4.0f : 4.0f) * (i < 512 ? (float)i / 256 : ldexpf(1.0f, 700 - i));
    x[2] = INFINITY, x[3] = -INFINITY, x[4] = NAN;
    for (int i = 5; i < 9; i++) x[i] = 40.0f * (float)i;
    OK(mt_arena_tensor(gpu, MT_F32, 1, N, &t));
    OK(mt_upload(gpu, x, t));
    MT_LAUNCH_KERNEL(cap_kernel, 1, N / 4, 0, gpu->stream, cap, (float *)t.data);
    OK(mt_download(gpu, t, y));
    for (int i = 0; i < N; i++) {
        double expected = tanh((double)x[i] * (double)cap);
        if (fabs(expected) < 1e-37) continue; /* subnormal */
        if (i == 4 ? !isnan(y[i]) : !(fabs((double)y[i] - expected) <= 6e-7 * fabs(expected)))
            fail_msg("tanh(%.9g) is %.9g, expected %.9g", (double)(x[i] * cap), (double)y[i], expected);
    }
}

/* ---- the same bits ----------------------------------------------------------------------------------------------- */

static void same_bits(const char *what, mt_tensor a, mt_tensor b) {
    float *x = download(gpu, a), *y = download(gpu, b);
    for (int64_t i = 0; i < a.rows * a.cols; i++)
        if (memcmp(&x[i], &y[i], sizeof x[i]) != 0)
            fail_msg("%s: row %lld, column %lld is %.9g and %.9g", what, (long long)(i / a.cols),
                     (long long)(i % a.cols), (double)x[i], (double)y[i]);
    free(x);
    free(y);
}

static const config several = {2, 137, 2, 2, 64, MT_BF16, MT_MASK_CAUSAL, 0, 0.2f};

static void test_run_to_run(void **state) {
    static const int64_t dims[] = {64, 80, 200};
    (void)state;
    for (int i = 0; i < 3; i++) {
        size_t mark = mt_arena_mark(gpu);
        config c = several;
        c.dim = dims[i];
        call a = call_new(&c, 2.0f), b = call_new(&c, 2.0f);
        run(&a);
        run(&b);
        same_bits("out", a.out, b.out);
        same_bits("lse", a.lse, b.lse);
        same_bits("dqkv", a.dqkv, b.dqkv);
        OK(mt_fill(gpu, b.out, NAN));
        OK(mt_attention_forward(gpu, &b.s, b.qkv, b.out, mt_none())); /* inference */
        same_bits("out without lse", a.out, b.out);
        mt_arena_release(gpu, mark);
    }
}

/* A warp rescales 32 queries together, when the largest score of any of them has risen enough. The bits of a query do
   not depend on the others. */
static void test_rows_are_independent(void **state) {
    size_t mark = mt_arena_mark(gpu);
    config c = {1, 200, 1, 1, 64, MT_BF16, MT_MASK_BIDIRECTIONAL, 0, 0.0f};
    call a = call_new(&c, 2.0f), b = call_new(&c, 2.0f);
    float *x, *y;
    (void)state;
    rescale(&c, &a, 1.0f, 0.1f, 0.5f, 1.0f);
    rescale(&c, &b, 1.0f, 6.0f, 0.5f, 1.0f);
    run(&a);
    run(&b);
    x = download(gpu, a.out), y = download(gpu, b.out);
    for (int64_t i = 0; i < c.seq; i++)
        assert_true((memcmp(x + i * c.dim, y + i * c.dim, (size_t)c.dim * sizeof *x) == 0) == (i % 2 == 0));
    free(x);
    free(y);
    mt_arena_release(gpu, mark);
}

/* One group of one sequence alone: its rows and columns of a bigger call, including the elements that dropout drops. */
static void test_split(void **state) {
    size_t mark = mt_arena_mark(gpu);
    call all = call_new(&several, 2.0f), part = all;
    int64_t seq = several.seq, heads = several.per_group, width = heads * several.dim,
            fused = (heads + 2) * several.dim;
    (void)state;
    run(&all);
    part.s.batch = part.s.groups = 1;
    part.s.dropout.at.first_row += 1;
    part.s.dropout.at.first_col += heads;
    part.qkv = mt_tensor_cols(mt_tensor_rows(all.qkv, seq, seq), fused, fused);
    part.dout = mt_tensor_cols(mt_tensor_rows(all.dout, seq, seq), width, width);
    part.out = tensor_new(several.type, seq, width);
    part.lse = tensor_new(MT_F32, heads, seq);
    part.dqkv = tensor_new(several.type, seq, fused);
    run(&part);
    same_bits("out", part.out, mt_tensor_cols(mt_tensor_rows(all.out, seq, seq), width, width));
    same_bits("lse", part.lse, mt_tensor_cols(mt_tensor_rows(all.lse, heads, heads), seq, seq));
    same_bits("dqkv", part.dqkv, mt_tensor_cols(mt_tensor_rows(all.dqkv, seq, seq), fused, fused));
    mt_arena_release(gpu, mark);
}

/* The first column of query head a (part 0), or of the key (1) or the value (2) of group a. */
static int64_t first_col(const mt_attention_desc *s, int part, int64_t a) {
    int64_t n = s->heads_per_group, heads = s->groups * n;
    if (s->qkv_layout == MT_QKV_PER_GROUP)
        return (part == 0 ? a / n * (n + 2) + a % n : a * (n + 2) + n + part - 1) * s->head_dim;
    return (part == 0 ? a : heads + (part - 1) * s->groups + a) * s->head_dim;
}

/* Returns qkv with the columns of the layout of `from` in the order of the layout of `to`. */
static mt_tensor in_layout(const mt_attention_desc *from, mt_tensor qkv, const mt_attention_desc *to) {
    mt_tensor y = tensor_new(qkv.dtype, qkv.rows, qkv.cols);
    for (int part = 0; part < 3; part++)
        for (int64_t a = 0; a < from->groups * (part == 0 ? from->heads_per_group : 1); a++)
            OK(mt_copy(gpu, mt_tensor_cols(qkv, first_col(from, part, a), from->head_dim),
                       mt_tensor_cols(y, first_col(to, part, a), from->head_dim)));
    return y;
}

/* Attention and rotary of the same numbers with the columns in another order. */
static void try_layout(const config *c, mt_qkv_layout layout) {
    size_t mark = mt_arena_mark(gpu);
    call a = call_new(c, 2.0f), b = call_new(c, 2.0f);
    mt_tensor table = tensor_new(MT_F32, c->seq, c->dim);
    OK(mt_rotary_table(gpu, 100.0f, table));
    b.s.qkv_layout = layout;
    b.qkv = in_layout(&a.s, a.qkv, &b.s);
    OK(mt_rotary_forward(gpu, &a.s, table, a.qkv));
    OK(mt_rotary_forward(gpu, &b.s, table, b.qkv));
    run(&a);
    run(&b);
    OK(mt_rotary_backward(gpu, &a.s, table, a.dqkv));
    OK(mt_rotary_backward(gpu, &b.s, table, b.dqkv));
    same_bits("rotary", a.qkv, in_layout(&b.s, b.qkv, &a.s));
    same_bits("out", a.out, b.out);
    same_bits("lse", a.lse, b.lse);
    same_bits("dqkv", a.dqkv, in_layout(&b.s, b.dqkv, &a.s));
    gap_untouched("qkv", b.qkv);
    gap_untouched("dqkv", b.dqkv);
    mt_arena_release(gpu, mark);
}

/* On tensor cores with several head sizes, and (f32, and head_dim 36) with the plain kernels. */
static void test_layouts(void **state) {
    static const int64_t dims[] = {64, 80, 256, 36};
    static const mt_dtype types[] = {MT_BF16, MT_F16, MT_F32};
    (void)state;
    for (int i = 0; i < 12; i++) {
        config c = {2,
                    i % 4 == 3 || i / 4 == 2 ? 9 : 70,
                    2,
                    1 + i % 2 * 2,
                    dims[i % 4],
                    types[i / 4],
                    i & 1 ? MT_MASK_CAUSAL : MT_MASK_BIDIRECTIONAL,
                    i & 2,
                    i & 4 ? 0.25f : 0.0f};
        try_layout(&c, i % 3 == 2 ? MT_QKV_SEPARATE : MT_QKV_CONCATENATED);
    }
}

/* ---- which path -------------------------------------------------------------------------------------------------- */

static int differ(mt_tensor a, mt_tensor b) {
    float *x = download(gpu, a), *y = download(gpu, b);
    int result = memcmp(x, y, (size_t)(a.rows * a.cols) * sizeof *x) != 0;
    free(x);
    free(y);
    return result;
}

/* Which row of the table runs a call with this head size and type. Every row is chosen by some call. */
static void test_table(void **state) {
    static const struct {
        int64_t dim;
        int size; /* of the kernels on tensor cores; 0: none */
    } heads[] = {{1, 0},     {4, 0},     {8, 64},    {32, 64}, {60, 0},    {63, 0},    {64, 64},
                 {65, 0},    {72, 96},   {80, 96},   {96, 96}, {104, 128}, {112, 128}, {128, 128},
                 {136, 192}, {160, 192}, {192, 192}, {193, 0}, {200, 256}, {252, 0},   {256, 256}};
    const int count = (int)(sizeof heads / sizeof heads[0]);
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    static const int chips[] = {60, 70, 75, 80, 86, 87, 89, 90, 100, 103, 120, 121};
    int rows = (int)(sizeof mti_attention_table / sizeof mti_attention_table[0]), chosen[24] = {};
    (void)state;
    for (int i = 0; i < count * 3 * 12 * 12 * 2 * 2; i++) {
        int64_t dim = heads[i % count].dim;
        int rest = i / count, size = heads[i % count].size;
        mt_dtype type = types[rest % 3];
        int chip = chips[rest / 3 % 12], built_for = chips[rest / 36 % 12], spans = rest / 432 % 2,
            hopper = rest / 864 && chip == 90;
        config c = {1, 2, 1, 1, dim, type, MT_MASK_CAUSAL, 0, 0.0f};
        size_t mark = mt_arena_mark(gpu);
        mt_attention_desc s = {};
        mti_attention a;
        const mti_attention_kernels *k;
        char name[24] = "plain";
        if (built_for > chip) continue; /* does not run */
        if (type != MT_F32 && chip >= 80 && built_for >= 80 && size > 0)
            snprintf(name, sizeof name, "%s_%d%s", hopper ? "hopper" : "flash", size,
                     spans && size <= 128 ? "_spans" : "");
        s.batch = 1, s.seq = c.seq, s.groups = 1, s.heads_per_group = 1, s.head_dim = dim;
        s.scores.window = spans;
        s = mti_attention_defaults(&s);
        a = mti_attention_resolve(gpu, &s, tensor_new(type, c.seq, dim), mt_none());
        mti_attention_fused(&a, tensor_new(type, c.seq, 3 * dim), mt_none());
        k = mti_attention_choose(&a, chip, built_for, hopper);
        if (strcmp(k->name, name) != 0)
            fail_msg("%s runs on sm_%d, compiled for %d: %s, expected %s", describe(&c), chip, built_for, k->name,
                     name);
        chosen[k - mti_attention_table]++;
        mt_arena_release(gpu, mark);
    }
    assert_string_equal(mti_attention_table[rows - 1].name, "plain");
    for (int i = 0; i < rows; i++) assert_true(chosen[i] > 0);
}

/* One row, whose distance to the next one keeps the alignment or not. */
static void test_one_row(void **state) {
    (void)state;
    for (int apart = 0; apart < 2; apart++) {
        size_t mark = mt_arena_mark(gpu);
        mt_attention_desc s = {};
        mt_tensor qkv = mt_tensor_cols(tensor_new(MT_BF16, 1, 3 * 64 + (apart ? 3 : 8)), 0, 3 * 64);
        s.batch = s.seq = s.groups = s.heads_per_group = 1, s.head_dim = 64;
        s = mti_attention_defaults(&s);
        mti_attention a = mti_attention_resolve(gpu, &s, tensor_new(MT_BF16, 1, 64), mt_none());
        mti_attention_fused(&a, qkv, mt_none());
        assert_string_equal(mti_attention_choose(&a, 90, 90, 0)->name, apart ? "plain" : "flash_64");
        mt_arena_release(gpu, mark);
    }
}

/* Which row of the table runs a call with options, forward and backward. */
static void test_table_of_options(void **state) {
    static const struct {
        const char *name;
        int64_t window = 0;
        float softcap = 0.0f;
        int packed = 0, kv_seq = 0, alibi = 0, bias = 0;
        int whole = 0, first_query = 0, first_key = 0;
    } cases[] = {{"flash_64"}, /* a window of seq hides nothing */
                 {"flash_64", 141},
                 {"flash_64", 1000000},
                 {"flash_64_spans", 140},
                 {"flash_64_spans", 1},
                 {"flash_64_spans", 0, 50.0f},
                 {"flash_64_spans", 0, 0.0f, 1},
                 {"flash_64_spans", 20, 1.0f, 1},
                 {"plain", 0, 1e35f},
                 {"plain", 0, 1e-35f}, /* a factor of the kernels would overflow */
                 {"flash_64_spans", 0, 0.0f, 0, 150},
                 {"flash_64_spans", 141, 0.0f, 0, 140},
                 {"flash_64", 0, 0.0f, 0, 141},
                 {"flash_64_spans", 0, 0.0f, 0, 0, 1},
                 {"flash_64_spans", 20, 0.0f, 1, 0, 1},
                 {"plain", 0, 1.0f, 0, 0, 1}, /* the kernels do not know the slope of such a cap */
                 {"plain", 0, 1.0f, 0, 0, 0, 1},
                 {"flash_64", 0, 0.0f, 0, 0, 0, 0, 423, 141, 141},       /* the queries' own keys */
                 {"flash_64", 0, 0.0f, 0, 0, 0, 0, 423, 282, 141},       /* earlier keys, all of which are seen */
                 {"flash_64_spans", 0, 0.0f, 0, 0, 0, 0, 423, 200, 100}, /* some of them */
                 {"flash_64_spans", 200, 0.0f, 0, 0, 0, 0, 423, 282, 141}};
    static const float slope = 1.0f;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        config c = {
            1, 141, 1, 1, 64, MT_BF16, MT_MASK_CAUSAL, 0, 0.0f, cases[i].window, cases[i].softcap, cases[i].packed};
        size_t mark = mt_arena_mark(gpu);
        call k = call_new(&c, 1.0f);
        k.s.kv_seq = cases[i].kv_seq;
        if (cases[i].whole) k.s.part = {cases[i].whole, 0, cases[i].first_query, cases[i].first_key};
        if (cases[i].alibi) k.s.scores.alibi = 1, k.s.scores.alibi_slopes = &slope;
        if (cases[i].bias) k.s.bias.value = k.lse; /* not read */
        mt_attention_desc s = mti_attention_defaults(&k.s);
        mti_attention a = mti_attention_resolve(gpu, &s, k.out, k.lse);
        mti_attention_simplify(&a.desc);
        mti_attention_fused(&a, k.qkv, mt_none());
        assert_string_equal(mti_attention_choose(&a, 90, 90, 0)->name, cases[i].name);
        a.dout = k.dout;
        mti_attention_fused(&a, k.qkv, k.dqkv);
        assert_string_equal(mti_attention_choose(&a, 90, 90, 0)->name, cases[i].name);
        mt_arena_release(gpu, mark);
    }
}

/* The plain kernels do not round probabilities: different bits of nearly the same numbers show that they were used. */
static void test_built_for_older_chips(void **state) {
    config c = {1, 70, 1, 2, 64, MT_BF16, MT_MASK_CAUSAL, 0, 0.2f};
    size_t mark = mt_arena_mark(gpu);
    call fast = call_new(&c, 2.0f), plain = call_new(&c, 2.0f), third = call_new(&c, 2.0f);
    (void)state;
    assert_true(mt_context_compute_capability(gpu) >= 80);
    run(&fast);
    set_built_for(75);
    run(&plain);
    against_cpu(c);
    set_built_for(80);
    run(&third);
    set_built_for(0);
    assert_true(differ(fast.out, plain.out) && differ(fast.dqkv, plain.dqkv));
    assert_false(differ(fast.out, third.out) || differ(fast.dqkv, third.dqkv));
    mt_arena_release(gpu, mark);
}

/* A program without -arch on this GPU: the driver translates the PTX of compute_75, in which each PTX instruction of
   sm_80 is a trap. */
static void test_build_without_arch(void **state) {
#if defined(MT_CUDA_ENGINE)
    config c = {1, 70, 1, 2, 64, MT_F16, MT_MASK_CAUSAL, 0, 0.2f};
    size_t mark = mt_arena_mark(gpu);
    call fast = call_new(&c, 2.0f), plain = call_new(&c, 2.0f), unasked = call_new(&c, 2.0f);
    (void)state;
    run(&fast);
    mte::set_ptx_arch(75);
    run(&unasked); /* the context has asked before */
    set_built_for(0);
    run(&plain);
    mte::set_ptx_arch(90);
    assert_false(differ(fast.out, unasked.out) || differ(fast.dqkv, unasked.dqkv));
    assert_true(differ(fast.out, plain.out) && differ(fast.dqkv, plain.dqkv));
    set_built_for(0);
    mt_arena_release(gpu, mark);
#else
    (void)state;
    skip(); /* the architecture of a program cannot be changed while it runs */
#endif
}

/* Rows that are not aligned to 16 bytes, two types in one call, scores in descending order. */
static void test_what_only_the_plain_path_does(void **state) {
    config c = {1, 70, 1, 2, 64, MT_F16, MT_MASK_CAUSAL, 0, 0.0f};
    size_t mark = mt_arena_mark(gpu), host_mark = mt_arena_mark(cpu);
    call k = call_new(&c, 2.0f);
    mt_tensor qkv = widened(k.qkv), expected = on_cpu(k.out.rows, k.out.cols), out = k.out, other;
    (void)state;
    ASSERT_STATUS(cpu, MT_SUCCESS, mt_attention_forward(cpu, &k.s, qkv, expected, mt_none()));
    OK(mt_arena_tensor(gpu, c.type, out.rows, out.cols + 1, &other));
    k.out = mt_tensor_cols(other, 1, out.cols);
    OK(mt_attention_forward(gpu, &k.s, k.qkv, k.out, mt_none()));
    k.out = tensor_new(MT_F32, out.rows, out.cols);
    OK(mt_attention_forward(gpu, &k.s, k.qkv, k.out, mt_none()));
    near(&c, "out in f32", k.out, expected, 1e-5);
    k.s.scores.scale = -0.3f;
    ASSERT_STATUS(cpu, MT_SUCCESS, mt_attention_forward(cpu, &k.s, qkv, expected, mt_none()));
    OK(mt_attention_forward(gpu, &k.s, k.qkv, out, mt_none()));
    near(&c, "out with a negative scale", out, expected, 1e-5);
    mt_arena_release(gpu, mark);
    mt_arena_release(cpu, host_mark);
}

/* Two numbers per query are scratch memory of the backward. The arena is unchanged after the call; when it has too
   little memory, the call reports this. */
static void test_arena(void **state) {
    config c = {1, 70, 1, 1, 64, MT_BF16, MT_MASK_CAUSAL, 0, 0.0f};
    size_t mark = mt_arena_mark(gpu), before;
    call k = call_new(&c, 1.0f);
    void *rest;
    (void)state;
    before = mt_arena_mark(gpu);
    run(&k);
    assert_true(mt_arena_mark(gpu) == before);
    OK(mt_arena_alloc(gpu, gpu->arena_bytes - before - 1000, &rest)); /* 2 * 128 floats are 1024 bytes */
    ASSERT_STATUS(gpu, MT_ERR_MEMORY, mt_attention_backward(gpu, &k.s, k.qkv, k.out, k.lse, k.dout, k.dqkv));
    mt_arena_release(gpu, mark);
}

/* ---- the order of blocks ----------------------------------------------------------------------------------------- */

/* Every block of every head of every sequence is there once, sections have whole heads of one sequence and read no more
   than fits, and in each of them no block follows a shorter one. */
static void try_order(int64_t heads, int64_t batch, int64_t blocks, int64_t bytes) {
    int64_t width = mti_flash_section(heads, batch, bytes), sections = heads / width, last, length;
    char *seen = (char *)calloc((size_t)(heads * batch * blocks), 1);
    assert_true(width >= 1 && heads % width == 0 && sections * batch <= MTI_FLASH_GRID);
    assert_true(width == 1 || width * bytes <= MTI_FLASH_SECTION || heads * batch > MTI_FLASH_GRID);
    for (int64_t z = 0; z < sections * batch; z++) {
        last = blocks;
        for (int64_t y = 0; y < blocks; y++)
            for (int64_t x = 0; x < width; x++) {
                mti_flash_place place =
                    mti_flash_place_of((unsigned)x, (unsigned)z, (unsigned)width, (unsigned)sections);
                assert_true(place.head < heads && place.sequence < batch);
                assert_int_equal(place.sequence, z / sections);
                assert_int_equal(seen[(place.sequence * heads + place.head) * blocks + y]++, 0);
                length = blocks - y; /* of the tiles under a causal mask, see mti_flash_place */
                assert_true(length <= last);
                last = length;
            }
    }
    for (int64_t i = 0; i < heads * batch * blocks; i++) assert_int_equal(seen[i], 1);
    free(seen);
}

static void test_order(void **state) {
    static const int64_t heads[] = {1, 2, 7, 12, 32, 40, 65535}, bytes[] = {0, 1, 1 << 20, 3 << 20, 10 << 20, 33 << 20};
    (void)state;
    for (int i = 0; i < 7 * 6; i++)
        for (int64_t batch = 1; batch < 4; batch++)
            try_order(heads[i % 7], batch, heads[i % 7] > 100 ? 1 : 1 + i % 5, bytes[i / 7]);
    assert_int_equal(mti_flash_section(12, 1, 5 << 20), 6);
    assert_int_equal(mti_flash_section(40, 1, 5 << 20), 5);
}

/* The division into sections changes no bit. */
static void test_sections(void **state) {
    config c = {2, 300, 2, 3, 64};
    size_t mark = mt_arena_mark(gpu);
    call k = call_new(&c, 2.0f);
    mt_attention_desc s = mti_attention_defaults(&k.s);
    mt_tensor out = tensor_new(c.type, k.out.rows, k.out.cols), lse = tensor_new(MT_F32, k.lse.rows, k.lse.cols);
    mti_attention a = mti_attention_resolve(gpu, &s, out, lse);
    mti_flash f;
    (void)state;
    OK(mt_attention_forward(gpu, &k.s, k.qkv, k.out, k.lse));
    mti_attention_fused(&a, k.qkv, mt_none());
    f = mti_flash_of(&a);
    f.sections = 3;
    if (has_hopper())
        MT_LAUNCH_KERNEL((mti_hopper_forward_kernel<64, true, false>), dim3(2, 3, 6), MTI_HOPPER_THREADS,
                         (size_t)(mti_hopper_shape<64>::bytes(false)), gpu->stream, f);
    else
        MT_LAUNCH_KERNEL((mti_flash_forward_kernel<64, true, false, false>), dim3(2, 3, 6), 128,
                         (size_t)(mti_flash_forward_bytes<64, false>()), gpu->stream, f);
    same_bits("out", k.out, out);
    same_bits("lse", k.lse, lse);
    mt_arena_release(gpu, mark);
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

template <int D> static __global__ void place_kernel(int *at, int *on) {
    for (int i = (int)threadIdx.x; i < 16 * D / 8; i += 32) {
        int row = i / (D / 8), vector = i % (D / 8);
        at[i] = mti_tile_at<D>(row, vector);
        on[i] = mti_tile_on<D>(mti_tile_at<D>(row, vector % 2), vector - vector % 2);
    }
}

/* Every vector has its own place in its row, and eight rows below each other use all 32 banks. */
template <int D> static void places() {
    int at[16 * D / 8], on[16 * D / 8], taken[16 * D / 8] = {};
    mt_tensor t;
    OK(mt_arena_tensor(gpu, MT_I32, 2, 16 * D / 8, &t));
    MT_LAUNCH_KERNEL(place_kernel<D>, 1, 32, 0, gpu->stream, (int *)t.data, (int *)t.data + 16 * D / 8);
    OK(mt_download(gpu, mt_tensor_rows(t, 0, 1), at));
    OK(mt_download(gpu, mt_tensor_rows(t, 1, 1), on));
    for (int i = 0; i < 16 * D / 8; i++) {
        assert_true(at[i] % 8 == 0 && at[i] / D == i / (D / 8) && taken[at[i] / 8]++ == 0);
        assert_int_equal(on[i], at[i]);
    }
    for (int first = 0; first < 16; first += 8)
        for (int vector = 0; vector < D / 8; vector++) {
            int banks = 0;
            for (int row = first; row < first + 8; row++) banks |= 1 << at[row * (D / 8) + vector] / 8 % 8;
            assert_int_equal(banks, 255);
        }
}

static void test_places(void **state) {
    size_t mark = mt_arena_mark(gpu);
    (void)state;
    places<64>();
    places<96>();
    places<128>();
    places<192>();
    places<256>();
    mt_arena_release(gpu, mark);
}

#define WITH_AND_WITHOUT_WGMMA(test)                                                                                   \
    cmocka_unit_test(test), { #test "_mma", test, without_hopper, with_hopper, NULL }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_places),
        WITH_AND_WITHOUT_WGMMA(test_short),
        WITH_AND_WITHOUT_WGMMA(test_rising_scores),
        WITH_AND_WITHOUT_WGMMA(test_causal),
        WITH_AND_WITHOUT_WGMMA(test_bidirectional),
        WITH_AND_WITHOUT_WGMMA(test_many_tiles),
        WITH_AND_WITHOUT_WGMMA(test_groups),
        WITH_AND_WITHOUT_WGMMA(test_padding),
        WITH_AND_WITHOUT_WGMMA(test_dropout),
        WITH_AND_WITHOUT_WGMMA(test_head_sizes),
        cmocka_unit_test(test_tanh),
        WITH_AND_WITHOUT_WGMMA(test_window),
        WITH_AND_WITHOUT_WGMMA(test_softcap),
        WITH_AND_WITHOUT_WGMMA(test_documents),
        WITH_AND_WITHOUT_WGMMA(test_window_and_padding),
        WITH_AND_WITHOUT_WGMMA(test_alibi),
        WITH_AND_WITHOUT_WGMMA(test_keys_of_their_own),
        WITH_AND_WITHOUT_WGMMA(test_parts),
        WITH_AND_WITHOUT_WGMMA(test_options_together),
        WITH_AND_WITHOUT_WGMMA(test_hidden_tiles_are_skipped),
        WITH_AND_WITHOUT_WGMMA(test_loads),
        WITH_AND_WITHOUT_WGMMA(test_wrong_numbers),
        cmocka_unit_test(test_order),
        WITH_AND_WITHOUT_WGMMA(test_sections),
        WITH_AND_WITHOUT_WGMMA(test_run_to_run),
        WITH_AND_WITHOUT_WGMMA(test_split),
        WITH_AND_WITHOUT_WGMMA(test_rows_are_independent),
        WITH_AND_WITHOUT_WGMMA(test_layouts),
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_one_row),
        cmocka_unit_test(test_table_of_options),
        cmocka_unit_test(test_built_for_older_chips),
        cmocka_unit_test(test_build_without_arch),
        cmocka_unit_test(test_arena),
        cmocka_unit_test(test_what_only_the_plain_path_does),
    };
    return cmocka_run_group_tests(tests, open_contexts, close_contexts);
}
