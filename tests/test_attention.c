/* test_attention.c - tests attention with separate queries, keys and values, and all that changes its scores: sliding
   windows, soft caps, ALiBi, packed documents, biases and boolean masks. Forward is compared with a reference in double
   precision that follows the definitions in mt_kernels.cuh, backward with central differences of that reference, and
   both with values that PyTorch computed (golden/attention.safetensors). In bf16 both are compared with the reference,
   within the errors of rounded operands. test_kernels.c tests the rest of attention. */

#define MEGATRON_IMPLEMENTATION
#include "megatron.h"
#include "mt_test.h"
#include "mt_reference.h"

/* ---- the reference ----------------------------------------------------------------------------------------------- */

/* One call of attention in double precision. x holds q, k, v and the bias, one after the other, without padding. */
typedef struct problem {
    mt_attention_desc s;       /* without defaults, but for bias.data, which says whether there is a bias */
    const unsigned char *seen; /* the boolean mask, in the shape of a bias; NULL: none */
    const double *dout;
} problem;

static int64_t heads_of(const problem *p) { return p->s.groups * p->s.heads_per_group; }
static int64_t q_size(const problem *p) { return p->s.batch * p->s.seq * heads_of(p) * p->s.head_dim; }
static int64_t k_size(const problem *p) { return p->s.batch * p->s.kv_seq * p->s.groups * p->s.head_dim; }
static int64_t bias_rows(const problem *p) { return p->s.bias.batch * p->s.bias.heads * p->s.seq; }
static int64_t bias_size(const problem *p) { return p->s.bias.value.data ? bias_rows(p) * p->s.kv_seq : 0; }
static int64_t x_size(const problem *p) { return q_size(p) + 2 * k_size(p) + bias_size(p); }

static int64_t bias_index(const problem *p, int64_t b, int64_t a, int64_t i, int64_t j) {
    const mt_attention_desc *s = &p->s;
    int64_t n = (s->bias.batch == 1 ? 0 : b) * s->bias.heads + (s->bias.heads == 1 ? 0 : s->bias.first_head + a);
    return (n * s->seq + i) * s->kv_seq + j;
}

/* The document of a token: the number of documents that end at or before it. */
static int64_t document(const mt_attention_desc *s, int64_t token) {
    int64_t d = 0;
    while (s->cu_seqlens[d + 1] <= token) d++;
    return d;
}

static int sees(const problem *p, int64_t b, int64_t a, int64_t i, int64_t j) {
    const mt_attention_desc *s = &p->s;
    int64_t position = i + s->kv_seq - s->seq;
    if (s->lengths && j >= s->lengths[b]) return 0;
    if (s->scores.mask == MT_MASK_CAUSAL && j > position) return 0;
    if (s->scores.window && llabs((long long)(position - j)) >= s->scores.window) return 0;
    if (s->cu_seqlens && document(s, b * s->seq + i) != document(s, b * s->seq + j)) return 0;
    return !p->seen || p->seen[bias_index(p, b, a, i, j)];
}

static double score(const problem *p, const double *x, int64_t b, int64_t a, int64_t i, int64_t j) {
    const mt_attention_desc *s = &p->s;
    const double *q = x + ((b * s->seq + i) * heads_of(p) + a) * s->head_dim;
    const double *k = x + q_size(p) + ((b * s->kv_seq + j) * s->groups + a / s->heads_per_group) * s->head_dim;
    double v = ref_dot(q, k, (size_t)s->head_dim) * (double)s->scores.scale, cap = (double)s->scores.softcap;
    if (s->scores.softcap > 0) v = cap * tanh(v / cap);
    if (s->scores.alibi_slopes)
        v -= (double)s->scores.alibi_slopes[a] * (double)llabs((long long)(i + s->kv_seq - s->seq - j));
    if (s->bias.value.data) v += x[q_size(p) + 2 * k_size(p) + bias_index(p, b, a, i, j)];
    return v;
}

/* Computes the output [head_dim] of one query. Returns its lse. */
static double query(const problem *p, const double *x, int64_t b, int64_t a, int64_t i, double *out) {
    const mt_attention_desc *s = &p->s;
    const double *v = x + q_size(p) + k_size(p);
    double top = -INFINITY, sum = 0, terms[512];
    int64_t j, d;
    mt_random at = s->dropout.at;
    assert_true(s->kv_seq <= 512);
    for (j = 0; j < s->kv_seq; j++) {
        terms[j] = sees(p, b, a, i, j) ? score(p, x, b, a, i, j) : -INFINITY;
        if (terms[j] > top) top = terms[j];
    }
    for (d = 0; d < s->head_dim; d++) out[d] = 0;
    if (top == -INFINITY) return top;
    for (j = 0; j < s->kv_seq; j++) sum += exp(terms[j] - top);
    for (j = 0; j < s->kv_seq; j++) {
        uint64_t e = (ref_element(at, b, a) * (uint64_t)s->seq + (uint64_t)i) * (uint64_t)s->kv_seq + (uint64_t)j;
        double w = exp(terms[j] - top) / sum * ref_keep(s->dropout, e);
        for (d = 0; d < s->head_dim; d++)
            out[d] += w * v[((b * s->kv_seq + j) * s->groups + a / s->heads_per_group) * s->head_dim + d];
    }
    return top + log(sum);
}

/* lse may be NULL */
static void forward(const problem *p, const double *x, double *out, double *lse) {
    const mt_attention_desc *s = &p->s;
    int64_t b, a, i, tokens = s->batch * s->seq;
    for (b = 0; b < s->batch; b++)
        for (a = 0; a < heads_of(p); a++)
            for (i = 0; i < s->seq; i++) {
                double l = query(p, x, b, a, i, out + ((b * s->seq + i) * heads_of(p) + a) * s->head_dim);
                if (lse) lse[a * tokens + b * s->seq + i] = l;
            }
}

static double objective(const double *x, const void *user) {
    const problem *p = (const problem *)user;
    double *out = (double *)malloc((size_t)q_size(p) * sizeof *out), dot;
    assert_non_null(out);
    forward(p, x, out, NULL);
    dot = ref_dot(out, p->dout, (size_t)q_size(p));
    free(out);
    return dot;
}

/* ---- the library ------------------------------------------------------------------------------------------------- */

/* The inputs and results of one call. Every matrix has an ld of its own. */
typedef struct tensors {
    mt_tensor q, k, v, out, lse, dout, dq, dk, dv, dbias;
} tensors;

static tensors random_tensors(const problem *p) {
    const mt_attention_desc *s = &p->s;
    int64_t t = s->batch * s->seq, keys = s->batch * s->kv_seq, w = heads_of(p) * s->head_dim;
    int64_t kw = s->groups * s->head_dim;
    tensors x;
    x.q = ref_random(t, w, 3, 1.5f, 0), x.k = ref_random(keys, kw, 1, 1.5f, 0), x.v = ref_random(keys, kw, 0, 1.5f, 0);
    x.out = ref_guarded(t, w, 2), x.lse = ref_guarded(heads_of(p), t, 1), x.dout = ref_random(t, w, 5, 1, 0);
    x.dq = ref_guarded(t, w, 1), x.dk = ref_guarded(keys, kw, 2), x.dv = ref_guarded(keys, kw, 3);
    x.dbias = mt_none();
    if (s->bias.value.data) x.dbias = ref_filled(bias_rows(p), s->kv_seq, 4, 0.0f);
    return x;
}

/* q, k, v and bias as one array for the reference */
static double *inputs(const problem *p, const tensors *x) {
    double *all = ref_doubles((size_t)x_size(p));
    ref_read(x->q, all);
    ref_read(x->k, all + q_size(p));
    ref_read(x->v, all + q_size(p) + k_size(p));
    if (p->s.bias.value.data) ref_read(p->s.bias.value, all + q_size(p) + 2 * k_size(p));
    return all;
}

static void run(const mt_attention_desc *desc, tensors *x) {
    mt_attention_desc s = *desc;
    OK(mt_dot_product_attention_forward(ref.ctx, &s, x->q, x->k, x->v, x->out, x->lse));
    s.bias.grad = x->dbias;
    OK(mt_dot_product_attention_backward(ref.ctx, &s, x->q, x->k, x->v, x->out, x->lse, x->dout, x->dq, x->dk, x->dv));
}

/* Compares bit for bit. */
static void assert_same(mt_tensor a, mt_tensor b) {
    int64_t r;
    assert_true(a.rows == b.rows && a.cols == b.cols);
    for (r = 0; r < a.rows; r++) assert_memory_equal(ref_row(a, r), ref_row(b, r), (size_t)a.cols * sizeof(float));
}

/* ---- the same in parts ------------------------------------------------------------------------------------------- */

/* Returns the tokens [first, first + n) of each sequence, of `seq` tokens each. A matrix has a row for each token. */
static mt_tensor tokens_of(mt_tensor t, int64_t batch, int64_t seq, int64_t first, int64_t n) {
    mt_tensor part = ref_guarded(batch * n, t.cols, 1);
    int64_t b, i, j;
    for (b = 0; b < batch; b++)
        for (i = 0; i < n; i++)
            for (j = 0; j < t.cols; j++) ref_row(part, b * n + i)[j] = ref_row(t, b * seq + first + i)[j];
    return part;
}

/* Adds such tokens to those of all. */
static void add_tokens(mt_tensor part, int64_t batch, int64_t seq, int64_t first, int64_t n, mt_tensor all) {
    int64_t b, i, j;
    for (b = 0; b < batch; b++)
        for (i = 0; i < n; i++)
            for (j = 0; j < all.cols; j++) ref_row(all, b * seq + first + i)[j] += ref_row(part, b * n + i)[j];
}

/* The queries [first, end) of each sequence, and some of its keys at a time. */
typedef struct in_parts {
    const mt_attention_desc *s; /* of whole sequences, without defaults in kv_seq */
    const tensors *x;
    int64_t first, end;
    mt_tensor q, out, lse, dout;
} in_parts;

#define KEY_PARTS 3

/* Returns the desc of a call with part number k of the keys, of which it has *keys from *first on. */
static mt_attention_desc part_of(const in_parts *p, int k, int64_t *first, int64_t *keys) {
    const int64_t n = p->s->kv_seq, ends[KEY_PARTS + 1] = {0, n / 3, n - n / 4, n};
    mt_attention_desc s = *p->s;
    *first = ends[k], *keys = ends[k + 1] - ends[k];
    s.part.seq = s.seq, s.part.kv_seq = n, s.part.first_query = p->first, s.part.first_key = *first;
    s.seq = p->end - p->first, s.kv_seq = *keys;
    return s;
}

/* The results for the keys of all parts. */
static void forward_in_parts(in_parts *p) {
    const int64_t batch = p->s->batch, heads = p->s->groups * p->s->heads_per_group, n = p->end - p->first;
    int k, parts = 0;
    p->q = tokens_of(p->x->q, batch, p->s->seq, p->first, n);
    p->dout = tokens_of(p->x->dout, batch, p->s->seq, p->first, n);
    p->out = ref_guarded(batch * n, p->x->out.cols, 3), p->lse = ref_guarded(heads, batch * n, 2);
    for (k = 0; k < KEY_PARTS; k++) {
        mt_tensor out = p->out, lse = p->lse;
        int64_t first, keys;
        mt_attention_desc s = part_of(p, k, &first, &keys);
        if (keys == 0) continue;
        if (parts++) out = ref_guarded(batch * n, out.cols, 1), lse = ref_guarded(heads, batch * n, 1);
        OK(mt_dot_product_attention_forward(ref.ctx, &s, p->q, tokens_of(p->x->k, batch, p->s->kv_seq, first, keys),
                                            tokens_of(p->x->v, batch, p->s->kv_seq, first, keys), out, lse));
        if (parts > 1) OK(mt_attention_merge(ref.ctx, p->out, p->lse, out, lse));
    }
}

/* Adds the gradients of these queries to those of x. */
static void backward_in_parts(const in_parts *p, tensors *x) {
    const int64_t batch = p->s->batch, n = p->end - p->first;
    int k;
    for (k = 0; k < KEY_PARTS; k++) {
        int64_t first, keys;
        mt_attention_desc s = part_of(p, k, &first, &keys);
        mt_tensor dq = ref_guarded(batch * n, x->q.cols, 1), dk = ref_guarded(batch * keys, x->k.cols, 0);
        mt_tensor dv = ref_guarded(batch * keys, x->k.cols, 2);
        if (keys == 0) continue;
        s.bias.grad = x->dbias;
        OK(mt_dot_product_attention_backward(ref.ctx, &s, p->q, tokens_of(x->k, batch, p->s->kv_seq, first, keys),
                                             tokens_of(x->v, batch, p->s->kv_seq, first, keys), p->out, p->lse, p->dout,
                                             dq, dk, dv));
        add_tokens(dq, batch, p->s->seq, p->first, n, x->dq);
        add_tokens(dk, batch, p->s->kv_seq, first, keys, x->dk);
        add_tokens(dv, batch, p->s->kv_seq, first, keys, x->dv);
    }
}

/* Computes the results of run in two parts of the queries and KEY_PARTS of the keys. */
static void run_in_parts(const mt_attention_desc *desc, tensors *x) {
    mt_attention_desc s = *desc;
    const int64_t half = s.seq / 2, heads = s.groups * s.heads_per_group;
    int i, a;
    int64_t b, r;
    if (!s.kv_seq) s.kv_seq = s.seq;
    x->out = ref_filled(x->out.rows, x->out.cols, 1, 0), x->dq = ref_filled(x->dq.rows, x->dq.cols, 1, 0);
    x->dk = ref_filled(x->dk.rows, x->dk.cols, 0, 0), x->dv = ref_filled(x->dv.rows, x->dv.cols, 0, 0);
    x->lse = ref_guarded(heads, s.batch * s.seq, 1);
    if (x->dbias.data) x->dbias = ref_filled(x->dbias.rows, x->dbias.cols, 2, 0);
    for (i = 0; i < 2; i++) {
        in_parts p = {&s, x, i ? half : 0, i ? s.seq : half, mt_none(), mt_none(), mt_none(), mt_none()};
        if (p.end == p.first) continue;
        forward_in_parts(&p);
        add_tokens(p.out, s.batch, s.seq, p.first, p.end - p.first, x->out);
        for (a = 0; a < heads; a++)
            for (b = 0; b < s.batch; b++)
                for (r = p.first; r < p.end; r++)
                    ref_row(x->lse, a)[b * s.seq + r] = ref_row(p.lse, a)[b * (p.end - p.first) + r - p.first];
        backward_in_parts(&p, x);
    }
}

/* s is what the user sets; fields of p.s that are 0 in s get their defaults here. */
static void try_attention(mt_attention_desc s, const unsigned char *seen) {
    problem p;
    tensors x;
    double *all, *out, *lse, *g, terms;
    int parts;
    memset(&p, 0, sizeof p);
    p.s = s;
    p.seen = seen;
    if (!p.s.kv_seq) p.s.kv_seq = s.seq;
    if (!p.s.bias.batch) p.s.bias.batch = 1;
    if (!p.s.bias.heads) p.s.bias.heads = 1;
    if (p.s.scores.scale == 0) p.s.scores.scale = (float)(1 / sqrt((double)s.head_dim));
    if (s.scores.scale == (float)MT_ZERO) p.s.scores.scale = 0;
    if (seen) p.s.bias.value = mt_none();
    x = random_tensors(&p);
    all = inputs(&p, &x);
    out = ref_doubles((size_t)q_size(&p)), lse = ref_doubles((size_t)(heads_of(&p) * s.batch * s.seq));
    p.dout = ref_values(x.dout);
    forward(&p, all, out, lse);
    g = ref_gradient(objective, &p, all, (size_t)x_size(&p));
    terms = sqrt((double)(s.seq * s.heads_per_group * p.s.batch));
    for (parts = 0; parts < 2; parts++) {
        if (parts) run_in_parts(&s, &x);
        else run(&s, &x);
        ASSERT_CLOSE(x.out, out, 2e-6, 1e-6);
        ASSERT_CLOSE(x.lse, lse, 2e-6, 1e-6);
        ASSERT_CLOSE(x.dq, g, 2e-6 * (1 + terms), 1e-6);
        ASSERT_CLOSE(x.dk, g + q_size(&p), 2e-6 * (1 + terms), 1e-6);
        ASSERT_CLOSE(x.dv, g + q_size(&p) + k_size(&p), 2e-6 * (1 + terms), 1e-6);
        if (p.s.bias.value.data) ASSERT_CLOSE(x.dbias, g + q_size(&p) + 2 * k_size(&p), 2e-6 * (1 + terms), 1e-6);
    }
    ref_release();
}

static mt_attention_desc shape(int64_t batch, int64_t seq, int64_t groups, int64_t members, int64_t dim, int mask) {
    mt_attention_desc s;
    memset(&s, 0, sizeof s);
    s.batch = batch, s.seq = seq, s.groups = groups, s.heads_per_group = members, s.head_dim = dim;
    s.scores.mask = (mt_mask)mask;
    return s;
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

/* The fused call and the one with separate views have the same bits, also in the gradient of a bias. */
static void test_separate_views(void **state) {
    int i;
    (void)state;
    for (i = 0; i < 8; i++) {
        mt_attention_desc s = shape(2, 9, 2, 1 + i / 2 % 2, 6, i % 2);
        int64_t w = s.groups * s.heads_per_group * 6, kw = s.groups * 6;
        mt_tensor qkv = ref_random(18, w + 2 * kw, 1, 1.5f, 0), out = ref_guarded(18, w, 0), dqkv, lse;
        mt_tensor dbias = mt_none();
        tensors x;
        memset(&x, 0, sizeof x);
        lse = ref_guarded(s.groups * s.heads_per_group, 18, 0), dqkv = ref_guarded(18, w + 2 * kw, 0);
        x.q = ref_copy(mt_tensor_cols(qkv, 0, w), 3), x.k = ref_copy(mt_tensor_cols(qkv, w, kw), 2);
        x.v = ref_copy(mt_tensor_cols(qkv, w + kw, kw), 0), x.out = ref_guarded(18, w, 7);
        x.lse = ref_guarded(lse.rows, 18, 2), x.dout = ref_random(18, w, 0, 1, 0), x.dq = ref_guarded(18, w, 1);
        x.dk = ref_guarded(18, kw, 1), x.dv = ref_guarded(18, kw, 1);
        if (i >= 4) {
            s.bias.batch = 2, s.bias.heads = 5, s.bias.first_head = 1;
            s.bias.value = ref_random(90, 9, 2, 1.0f, 0);
            x.dbias = ref_filled(90, 9, 1, 2.0f), dbias = ref_filled(90, 9, 0, 2.0f);
        }
        run(&s, &x);
        s.qkv_layout = MT_QKV_SEPARATE, s.bias.grad = dbias;
        OK(mt_attention_forward(ref.ctx, &s, qkv, out, lse));
        OK(mt_attention_backward(ref.ctx, &s, qkv, out, lse, x.dout, dqkv));
        assert_same(out, x.out);
        assert_same(lse, x.lse);
        assert_same(mt_tensor_cols(dqkv, 0, w), x.dq);
        assert_same(mt_tensor_cols(dqkv, w, kw), x.dk);
        assert_same(mt_tensor_cols(dqkv, w + kw, kw), x.dv);
        if (i >= 4) assert_same(dbias, x.dbias);
        ref_release();
    }
}

/* More keys than queries, and fewer: the last query and the last key have one position. */
static void test_kv_seq(void **state) {
    static const int64_t sizes[][2] = {{1, 7}, {4, 9}, {5, 5}, {9, 4}, {3, 1}};
    static const int32_t lengths[] = {4, 0};
    int i;
    (void)state;
    for (i = 0; i < 5 * 2 * 3; i++) {
        mt_attention_desc s = shape(2, sizes[i / 6][0], 2, 1 + i % 3, 4, i / 3 % 2);
        s.kv_seq = sizes[i / 6][1];
        if (i % 3 == 1 && s.kv_seq >= 4) s.lengths = lengths;
        if (i % 3 == 2) s.scores.window = 3;
        try_attention(s, NULL);
    }
}

/* Tokens of a part are turned as in the whole sequence. */
static void test_rotary_in_parts(void **state) {
    static const int32_t documents[] = {0, 5, 7, 20, 22};
    int i, back;
    (void)state;
    for (i = 0; i < 8; i++) {
        mt_attention_desc s = shape(2, 11, 2, 2, 6, 0), part;
        mt_tensor qkv = ref_random(22, 48, 1, 1.5f, 0), table = ref_guarded(11, 6, 1), some;
        if (i % 2) s.cu_seqlens = documents, s.documents = 4;
        s.qkv_layout = (mt_qkv_layout)(i / 2 % 2);
        part = s, part.seq = 4, part.part.seq = 11, part.part.first_query = part.part.first_key = 3 + i / 2;
        some = tokens_of(qkv, 2, 11, part.part.first_query, 4);
        OK(mt_rotary_table(ref.ctx, 100.0f, table));
        for (back = 0; back < 2; back++) {
            OK(back ? mt_rotary_backward(ref.ctx, &s, table, qkv) : mt_rotary_forward(ref.ctx, &s, table, qkv));
            OK(back ? mt_rotary_backward(ref.ctx, &part, table, some) : mt_rotary_forward(ref.ctx, &part, table, some));
            assert_same(some, tokens_of(qkv, 2, 11, part.part.first_query, 4));
        }
        ref_release();
    }
}

/* The merged element of two results x and y with the lse a and b. */
static double merged(double x, double a, double y, double b) {
    double top = a > b ? a : b, sum = exp(a - top) + exp(b - top);
    if (top == -INFINITY) return 0;
    return (a > -INFINITY ? x * exp(a - top) / sum : 0) + (b > -INFINITY ? y * exp(b - top) / sum : 0);
}

/* Merging results: of a query that sees keys in one of them only, in none, in both, and with lse far apart. */
static void test_merge(void **state) {
    const float none = -INFINITY;
    const float lse[][2] = {{1, 2}, {none, 3}, {3, none}, {none, none}, {-200, 300}, {3e4f, 2.9e4f}, {-1e30f, 1e30f}};
    const int n = (int)(sizeof lse / sizeof *lse);
    int i, j;
    (void)state;
    for (i = 0; i < 2; i++) {
        mt_tensor out = ref_random(n, 6, 1, 1, 0), part = ref_random(n, 6, 0, 1, 0), before;
        mt_tensor l = ref_guarded(2, n, 1), m = ref_guarded(2, n, 2);
        for (j = 0; j < n; j++) {
            ref_row(l, 0)[j] = ref_row(m, 1)[j] = lse[j][0], ref_row(l, 1)[j] = ref_row(m, 0)[j] = lse[j][1];
            if (i && lse[j][0] == none) ref_row(out, j)[1] = ref_row(part, j)[4] = NAN; /* does not count */
        }
        before = ref_copy(out, 0);
        OK(mt_attention_merge(ref.ctx, out, l, part, m));
        for (j = 0; j < 6 * n; j++) {
            double a = (double)lse[j / 6][j % 6 / 3], b = (double)lse[j / 6][1 - j % 6 / 3], top = a > b ? a : b;
            double want = merged((double)ref_row(before, j / 6)[j % 6], a, (double)ref_row(part, j / 6)[j % 6], b);
            double got = (double)ref_row(l, j % 6 / 3)[j / 6];
            assert_true(fabs((double)ref_row(out, j / 6)[j % 6] - want) <= 1e-6);
            if (top == (double)none) assert_true(got == top);
            else assert_true(fabs(got - top - log(exp(a - top) + exp(b - top))) <= 4e-7 * fabs(top) + 1e-6);
        }
        ref_release();
    }
}

static void test_window(void **state) {
    int64_t window;
    int mask;
    (void)state;
    for (mask = 0; mask < 2; mask++)
        for (window = 1; window < 12; window += 1 + window / 4) {
            mt_attention_desc s = shape(2, 10, 1, 2, 5, mask);
            s.scores.window = window < 11 ? window : INT64_MAX;
            try_attention(s, NULL);
        }
}

static void test_softcap(void **state) {
    static const float caps[] = {0.5f, 3.0f, 50.0f};
    int i;
    (void)state;
    for (i = 0; i < 6; i++) {
        mt_attention_desc s = shape(1, 8, 2, 2, 6, i % 2);
        s.scores.softcap = caps[i / 2];
        try_attention(s, NULL);
    }
}

static void test_alibi(void **state) {
    static const float slopes[] = {0.5f, 0.25f, 0.0f, 1.0f};
    int i;
    (void)state;
    for (i = 0; i < 4; i++) {
        mt_attention_desc s = shape(2, 6, 2, 2, 4, i % 2);
        s.scores.alibi = 1, s.scores.alibi_slopes = slopes;
        if (i / 2) s.kv_seq = 9;
        try_attention(s, NULL);
    }
}

/* Documents that end inside of a sequence, at its end, and in the next one; empty ones; one for each token. */
static void test_documents(void **state) {
    static const int32_t packed[][17] = {{0, 3, 8, 8, 13, 16}, {0, 16}, {0, 0, 1, 7, 8, 16, 16}};
    static const int counts[] = {5, 1, 6};
    int32_t each[17];
    int i;
    (void)state;
    for (i = 0; i < 17; i++) each[i] = i;
    for (i = 0; i < 8; i++) {
        mt_attention_desc s = shape(2, 8, 1, 2, 4, i % 2);
        s.cu_seqlens = i / 2 < 3 ? packed[i / 2] : each;
        s.documents = i / 2 < 3 ? counts[i / 2] : 16;
        try_attention(s, NULL);
        s.scores.window = 2;
        try_attention(s, NULL);
    }
}

/* A token sees what it would see if its document were a sequence of its own. */
static void test_documents_are_sequences(void **state) {
    static const int32_t ends[] = {0, 5, 6, 14};
    int mask, d;
    (void)state;
    for (mask = 0; mask < 2; mask++) {
        mt_attention_desc s = shape(1, 14, 2, 2, 4, mask);
        mt_tensor qkv = ref_random(14, 32, 0, 1.5f, 0), out = ref_guarded(14, 16, 0), one = ref_guarded(14, 16, 0);
        s.cu_seqlens = ends, s.documents = 3;
        OK(mt_attention_forward(ref.ctx, &s, qkv, out, mt_none()));
        for (d = 0; d < 3; d++) {
            mt_attention_desc own = shape(1, ends[d + 1] - ends[d], 2, 2, 4, mask);
            OK(mt_attention_forward(ref.ctx, &own, mt_tensor_rows(qkv, ends[d], own.seq),
                                    mt_tensor_rows(one, ends[d], own.seq), mt_none()));
        }
        ASSERT_CLOSE(out, ref_values(one), 1e-6, 1e-6);
        ref_release();
    }
}

/* Biases of all four shapes, with -INFINITY in one row, and in all of another row. */
static void test_bias(void **state) {
    int i;
    (void)state;
    for (i = 0; i < 16; i++) {
        mt_attention_desc s = shape(2, 5, 2, 2, 4, i % 2);
        int64_t j;
        s.bias.batch = i & 2 ? 2 : 1, s.bias.heads = i & 4 ? 4 : 0;
        if (i & 8) s.kv_seq = 7, s.scores.softcap = 2.0f;
        s.bias.value = ref_random(s.bias.batch * (i & 4 ? 4 : 1) * 5, i & 8 ? 7 : 5, 3, 1.0f, 0);
        try_attention(s, NULL);
        s.bias.value = ref_random(s.bias.batch * (i & 4 ? 4 : 1) * 5, i & 8 ? 7 : 5, 3, 1.0f, 0);
        ref_row(s.bias.value, 3)[0] = -INFINITY;
        for (j = 0; j < s.bias.value.cols; j++) ref_row(s.bias.value, 1)[j] = -INFINITY;
        {
            tensors x;
            problem p;
            memset(&p, 0, sizeof p);
            p.s = s;
            if (!p.s.kv_seq) p.s.kv_seq = 5;
            if (!p.s.bias.heads) p.s.bias.heads = 1;
            x = random_tensors(&p);
            run(&s, &x);
            for (j = 0; j < 16; j++) assert_true(j / 4 > 0 && s.bias.heads == 4 ? 1 : ref_row(x.out, 1)[j] == 0.0f);
            for (j = 0; j < 16; j++) assert_true(ref_row(x.dq, 1)[j] == ref_row(x.dq, 1)[j]);
            for (j = 0; j < s.bias.value.cols; j++) assert_true(ref_row(x.dbias, 1)[j] == 0.0f);
            assert_true(ref_row(x.dbias, 3)[0] == 0.0f && ref_row(x.lse, 0)[1] == -INFINITY);
        }
        ref_release();
    }
}

/* A bias with more heads than the call. */
static void test_bias_of_more_heads(void **state) {
    int i;
    (void)state;
    for (i = 0; i < 6; i++) {
        mt_attention_desc s = shape(2, 5, 2, 2, 4, i % 2);
        s.bias.batch = i % 2 + 1, s.bias.heads = 7, s.bias.first_head = i / 2 + 1;
        s.bias.value = ref_random(s.bias.batch * 35, 5, 1, 1.0f, 0);
        try_attention(s, NULL);
    }
}

/* Two calls with half of the heads each have the bits of one call with all heads. The gradients of the heads of no
   call keep what they were. */
static void test_bias_first_head(void **state) {
    int i, half;
    (void)state;
    for (i = 0; i < 4; i++) {
        mt_attention_desc s = shape(2, 6, 2, 2, 4, i % 2);
        mt_tensor dbias = ref_filled((1 + i / 2) * 42, 6, 0, 3.0f);
        tensors x, y;
        problem p;
        int64_t b, r;
        s.bias.batch = 1 + i / 2, s.bias.heads = 7, s.bias.first_head = 2;
        s.bias.value = ref_random(s.bias.batch * 42, 6, 1, 1.0f, 0);
        memset(&p, 0, sizeof p);
        p.s = s, p.s.kv_seq = 6;
        x = random_tensors(&p), y = x;
        mt_fill(ref.ctx, x.dbias, 3.0f);
        run(&s, &x);
        y.out = ref_guarded(12, 16, 0), y.lse = ref_guarded(4, 12, 0), y.dq = ref_guarded(12, 16, 0);
        y.dk = ref_guarded(12, 8, 0), y.dv = ref_guarded(12, 8, 0), y.dbias = dbias;
        for (half = 0; half < 2; half++) {
            mt_attention_desc own = s;
            tensors z = y;
            own.groups = 1, own.bias.first_head = 2 + 2 * half;
            z.q = mt_tensor_cols(x.q, 8 * half, 8), z.out = mt_tensor_cols(y.out, 8 * half, 8);
            z.k = mt_tensor_cols(x.k, 4 * half, 4), z.dk = mt_tensor_cols(y.dk, 4 * half, 4);
            z.v = mt_tensor_cols(x.v, 4 * half, 4), z.dv = mt_tensor_cols(y.dv, 4 * half, 4);
            z.dout = mt_tensor_cols(x.dout, 8 * half, 8), z.dq = mt_tensor_cols(y.dq, 8 * half, 8);
            z.lse = mt_tensor_rows(y.lse, 2 * half, 2);
            run(&own, &z);
        }
        assert_same(y.out, x.out);
        assert_same(y.lse, x.lse);
        assert_same(y.dq, x.dq);
        assert_same(y.dk, x.dk);
        assert_same(y.dv, x.dv);
        assert_same(y.dbias, x.dbias);
        for (b = 0; b < s.bias.batch; b++)
            for (r = 0; r < 42; r++) /* a first query that sees one key has the gradient 0 */
                assert_true((ref_row(dbias, b * 42 + r)[0] == 3.0f) == (r < 2 * 6 || r >= 6 * 6) || r % 6 == 0);
        ref_release();
    }
}

/* A boolean mask hides what it says, also everything from a query. */
static void test_mask(void **state) {
    int i;
    (void)state;
    for (i = 0; i < 8; i++) {
        mt_attention_desc s = shape(2, 6, 1, 3, 4, i % 2);
        unsigned char seen[2 * 3 * 6 * 8];
        size_t n;
        s.bias.batch = i & 2 ? 2 : 1, s.bias.heads = i & 4 ? 3 : 1;
        for (n = 0; n < sizeof seen; n++) seen[n] = test_float(&ref.random) > -0.2f;
        memset(seen + 12, 0, 6);
        s.bias.value = mt_tensor_make(seen, MT_U8, s.bias.batch * s.bias.heads * 6, 6);
        try_attention(s, seen);
    }
}

/* Everything at once, with dropout. */
static void test_together(void **state) {
    static const float slopes[] = {0.5f, 0.25f, 0.125f, 1.0f};
    static const int32_t lengths[] = {11, 7}, documents[] = {0, 5, 17, 22};
    int i;
    (void)state;
    for (i = 0; i < 4; i++) {
        mt_attention_desc s = shape(2, 11, 2, 2, 6, i % 2);
        s.lengths = lengths, s.scores.window = 6, s.scores.softcap = 4.0f;
        s.scores.scale = 0.7f, s.scores.alibi = 1, s.scores.alibi_slopes = slopes;
        s.cu_seqlens = documents, s.documents = 3;
        s.bias.value = ref_random(4 * 11, 11, 0, 1, 0), s.bias.heads = 4;
        s.dropout.p = i / 2 ? 0.4f : 0.0f;
        s.dropout.at.seed = 3, s.dropout.at.subsequence = 9;
        s.dropout.at.first_row = 5, s.dropout.at.first_col = 2, s.dropout.at.global_cols = 9;
        try_attention(s, NULL);
    }
}

/* A scale of MT_ZERO is the number 0: all scores are equal. */
static void test_scale_of_zero(void **state) {
    static const float slopes[] = {0.5f, 0.25f, 0.125f, 1.0f};
    (void)state;
    for (int i = 0; i < 4; i++) {
        mt_attention_desc s = shape(2, 11, 2, 2, 6, i % 2);
        s.scores.scale = MT_ZERO;
        s.scores.alibi = i / 2, s.scores.alibi_slopes = i / 2 ? slopes : NULL;
        s.scores.softcap = i == 3 ? 4.0f : 0.0f;
        try_attention(s, NULL);
    }
}

/* Several blocks, because a CPU computes 384 keys at a time. A narrow window, with which blocks see few keys, has the
   results of the same mask as a bias. */
static void test_panels(void **state) {
    int64_t i, j, n = 484;
    int mask;
    (void)state;
    for (mask = 0; mask < 2; mask++) {
        mt_attention_desc s = shape(1, n, 1, 2, 8, mask);
        mt_tensor qkv = ref_random(n, 32, 0, 1.5f, 0), dout = ref_random(n, 16, 0, 1, 0), out[2], lse[2], dqkv[2];
        s.bias.value = ref_filled(n, n, 0, 0.0f);
        for (i = 0; i < n; i++)
            for (j = 0; j < n; j++)
                if (llabs((long long)(i - j)) >= 5) ref_row(s.bias.value, i)[j] = -INFINITY;
        for (i = 0; i < 2; i++) {
            out[i] = ref_guarded(n, 16, 0), lse[i] = ref_guarded(2, n, 0), dqkv[i] = ref_guarded(n, 32, 0);
            if (i == 1) s.bias.value = mt_none(), s.scores.window = 5;
            OK(mt_attention_forward(ref.ctx, &s, qkv, out[i], lse[i]));
            OK(mt_attention_backward(ref.ctx, &s, qkv, out[i], lse[i], dout, dqkv[i]));
        }
        ASSERT_CLOSE(out[1], ref_values(out[0]), 1e-6, 1e-6);
        ASSERT_CLOSE(lse[1], ref_values(lse[0]), 1e-6, 1e-6);
        ASSERT_CLOSE(dqkv[1], ref_values(dqkv[0]), 1e-5, 1e-6);
        ref_release();
    }
}

/* A score that is NaN, with any bits, makes its query NaN, and no other one. So are the gradients of its keys. */
static void test_nan(void **state) {
    static const uint32_t bits[] = {0x7fc00000u, 0xffffffffu, 0xff800001u};
    const int64_t n = 40;
    size_t k;
    int64_t i;
    (void)state;
    for (k = 0; k < sizeof bits / sizeof *bits; k++) {
        mt_attention_desc s = shape(1, n, 1, 1, 8, 0);
        mt_tensor qkv = ref_random(n, 24, 0, 1, 0), dout = ref_random(n, 8, 0, 1, 0), out = ref_guarded(n, 8, 0);
        mt_tensor lse = ref_guarded(1, n, 0), dqkv = ref_guarded(n, 24, 0);
        s.bias.value = ref_filled(n, n, 0, 0.0f);
        memcpy(ref_row(s.bias.value, 33) + 20, &bits[k], sizeof bits[k]);
        OK(mt_attention_forward(ref.ctx, &s, qkv, out, lse));
        OK(mt_attention_backward(ref.ctx, &s, qkv, out, lse, dout, dqkv));
        for (i = 0; i < n; i++) {
            assert_true(isnan(ref_row(out, i)[0]) == (i == 33));
            assert_true(isnan(ref_row(lse, 0)[i]) == (i == 33));
            assert_true(isnan(ref_row(dqkv, i)[0]) == (i == 33));
            assert_true(isnan(ref_row(dqkv, i)[8]) == (i <= 33)); /* of the keys that it sees */
            assert_true(isnan(ref_row(dqkv, i)[16]) == (i <= 33));
        }
        ref_release();
    }
}

/* ---- bf16 -------------------------------------------------------------------------------------------------------- */

/* g = the gradients of q, k and v, for the lse and out of a forward. */
static void backward(const problem *p, const double *x, const double *out, const double *lse, double *g) {
    const mt_attention_desc *s = &p->s;
    int64_t width = heads_of(p) * s->head_dim, b, a, i, j, d, dim = s->head_dim;
    for (b = 0; b < s->batch; b++)
        for (a = 0; a < heads_of(p); a++)
            for (i = 0; i < s->seq; i++) {
                int64_t row = b * s->seq + i, q = row * width + a * dim;
                double delta = ref_dot(p->dout + q, out + q, (size_t)dim), l = lse[a * s->batch * s->seq + row];
                for (j = 0; j < s->kv_seq; j++) {
                    int64_t k = q_size(p) + ((b * s->kv_seq + j) * s->groups + a / s->heads_per_group) * dim;
                    int64_t v = k + k_size(p);
                    uint64_t e =
                        (ref_element(s->dropout.at, b, a) * (uint64_t)s->seq + (uint64_t)i) * (uint64_t)s->kv_seq +
                        (uint64_t)j;
                    double w, keep = ref_keep(s->dropout, e), ds;
                    if (!sees(p, b, a, i, j)) continue;
                    w = exp(score(p, x, b, a, i, j) - l);
                    ds = (double)s->scores.scale * w * (keep * ref_dot(p->dout + q, x + v, (size_t)dim) - delta);
                    for (d = 0; d < dim; d++) {
                        g[q + d] += ds * x[k + d];
                        g[k + d] += ds * x[q + d];
                        g[v + d] += w * keep * p->dout[q + d];
                    }
                }
            }
}

/* A bf16 view with an ld of its own. Rounds x to the same values. */
static mt_tensor bf16_of(mt_tensor x, int64_t pad) {
    mt_tensor y = ref_filled(x.rows, (x.cols + pad + 1) / 2, 0, NAN); /* as many bytes */
    y = mt_tensor_make(y.data, MT_BF16, x.rows, x.cols);
    y.ld = x.cols + pad;
    OK(mt_convert(ref.ctx, x, y));
    OK(mt_convert(ref.ctx, y, x));
    return y;
}

static mt_tensor f32_of(mt_tensor y) {
    mt_tensor x = ref_guarded(y.rows, y.cols, 0);
    OK(mt_convert(ref.ctx, y, x));
    return x;
}

/* Compares a bf16 result with the exact one, head by head. A result is a sum with weights, probabilities or gradients
   of scores, that may be rounded to bf16, and is rounded itself. The errors of the weights are independent, so that the
   error of a vector, relative to its length, is their root mean square, 0.6 of the largest error 1 / 256. Vectors of 32
   and more numbers stay within 1.5 of it; 2 is allowed. One missing key of 200 would give 18. `noise` is the error of
   f32 where much cancels. */
static void assert_vectors(const problem *p, const char *what, mt_tensor got, const double *want, double noise) {
    int64_t dim = p->s.head_dim, i, d;
    double *x = ref_values(f32_of(got));
    for (i = 0; i < got.rows * got.cols; i += dim) {
        double error = 0, size = 0;
        for (d = 0; d < dim; d++) {
            error += (x[i + d] - want[i + d]) * (x[i + d] - want[i + d]);
            size += want[i + d] * want[i + d];
        }
        if (!(sqrt(error) <= 2.0 / 256 * sqrt(size) + noise))
            fail_msg("seq %ld, kv_seq %ld, head_dim %ld: %s, row %ld, column %ld: off by %g, size %g", (long)p->s.seq,
                     (long)p->s.kv_seq, (long)dim, what, (long)(i / got.cols), (long)(i % got.cols), sqrt(error),
                     sqrt(size));
    }
}

/* Fills the scratch memory of the next calls with NaN, as floats and as bf16. */
static void scratch_is_nan(void) {
    size_t mark = mt_arena_mark(ref.ctx), bytes = (size_t)4 << 20;
    void *memory;
    OK(mt_arena_alloc(ref.ctx, bytes, &memory));
    memset(memory, 0xff, bytes);
    mt_arena_release(ref.ctx, mark);
}

/* The same in bf16 as try_attention, with heads of at least 32 features. */
static void try_bf16(mt_attention_desc s) {
    problem p;
    tensors x, y;
    double *all, *out, *lse, *g, noise;
    memset(&p, 0, sizeof p);
    p.s = s;
    if (!p.s.kv_seq) p.s.kv_seq = s.seq;
    p.s.scores.scale = (float)(1 / sqrt((double)s.head_dim));
    x = random_tensors(&p), y = x;
    y.q = bf16_of(x.q, 3), y.k = bf16_of(x.k, 0), y.v = bf16_of(x.v, 1), y.dout = bf16_of(x.dout, 2);
    y.out = bf16_of(x.out, 1), y.dq = bf16_of(x.dq, 0), y.dk = bf16_of(x.dk, 5), y.dv = bf16_of(x.dv, 1);
    all = inputs(&p, &x);
    out = ref_doubles((size_t)q_size(&p)), lse = ref_doubles((size_t)(heads_of(&p) * s.batch * s.seq));
    g = ref_doubles((size_t)x_size(&p));
    p.dout = ref_values(x.dout);
    forward(&p, all, out, lse);
    scratch_is_nan();
    run(&s, &y);
    noise = 2e-7 * pow((double)s.head_dim, 1.5);
    assert_vectors(&p, "out", y.out, out, 0);
    ASSERT_CLOSE(y.lse, lse, 1e-5, 1e-6);
    backward(&p, all, ref_values(f32_of(y.out)), lse, g);
    assert_vectors(&p, "dq", y.dq, g, noise);
    assert_vectors(&p, "dk", y.dk, g + q_size(&p), noise);
    assert_vectors(&p, "dv", y.dv, g + q_size(&p) + k_size(&p), noise);
    ref_release();
}

/* Odd numbers of queries, keys and features, lengths and windows that end within a pair of keys, several blocks. */
static void test_bf16(void **state) {
    static const int32_t lengths[] = {407, 155};
    static const int64_t dims[] = {64, 65, 96, 128, 33, 256};
    int i;
    (void)state;
    for (i = 0; i < 6; i++) {
        mt_attention_desc s = shape(1, 111 + i, 1, 1, dims[i], 0);
        try_bf16(s);
        s = shape(2, 35, 2, 3, dims[i], 0);
        s.dropout.p = 0.25f, s.dropout.at.seed = 7, s.dropout.at.global_cols = 6;
        try_bf16(s);
        s = shape(2, 101, 1, 1, dims[i], 1);
        s.kv_seq = 407, s.lengths = lengths;
        try_bf16(s);
        s = shape(1, 97, 1, 1, dims[i], i % 2);
        s.kv_seq = 130, s.scores.window = 11;
        try_bf16(s);
        s = shape(1, 3, 1, 2, dims[i], 1);
        s.kv_seq = 1;
        try_bf16(s);
    }
}

/* Runs attention on one sequence whose keys and values from `length` on are NaN. */
static void try_padding(mt_dtype type, int64_t seq, int32_t length) {
    mt_attention_desc s = shape(1, seq, 1, 1, 64, 1);
    mt_tensor qkv = ref_random(seq, 192, 0, 1, 0), out = ref_random(seq, 64, 0, 1, 0), dqkv = ref_copy(qkv, 0);
    mt_tensor dout = ref_random(seq, 64, 0, 1, 0), lse = ref_guarded(1, seq, 0);
    mt_tensor *const views[] = {&qkv, &out, &dout, &dqkv};
    int64_t i, j;
    for (i = length; i < seq; i++)
        for (j = 64; j < 192; j++) ref_row(qkv, i)[j] = NAN;
    for (i = 0; type == MT_BF16 && i < 4; i++) *views[i] = bf16_of(*views[i], 0);
    s.lengths = &length;
    scratch_is_nan();
    OK(mt_attention_forward(ref.ctx, &s, qkv, out, lse));
    OK(mt_attention_backward(ref.ctx, &s, qkv, out, lse, dout, dqkv));
    out = f32_of(out), dqkv = f32_of(dqkv);
    for (i = 0; i < seq; i++) {
        for (j = 0; j < 64; j++) assert_true(isfinite(ref_row(out, i)[j]));
        for (j = 0; j < 192; j++) assert_true(isfinite(ref_row(dqkv, i)[j]));
    }
    ref_release();
}

/* Keys and values that are padding may be NaN: beside the last key of an odd number, whole tiles, and a whole block. */
static void test_padding_is_nan(void **state) {
    int type;
    (void)state;
    for (type = MT_F32; type <= MT_BF16; type++) {
        try_padding((mt_dtype)type, 9, 5);
        try_padding((mt_dtype)type, 70, 5);
        try_padding((mt_dtype)type, 400, 385);
        try_padding((mt_dtype)type, 400, 200);
    }
}

/* ---- threads of a context ---------------------------------------------------------------------------------------- */

/* Runs forward and backward. Returns the largest sizes of the arena in *peaks. */
static void run_on(mt_context *ctx, mt_attention_desc s, tensors *x, size_t *peaks) {
    mt_tensor dbias = s.bias.grad;
    s.bias.grad = mt_none();
    ASSERT_STATUS(ctx, MT_SUCCESS, mt_dot_product_attention_forward(ctx, &s, x->q, x->k, x->v, x->out, x->lse));
    peaks[0] = mt_arena_peak(ctx);
    s.bias.grad = dbias;
    ASSERT_STATUS(
        ctx, MT_SUCCESS,
        mt_dot_product_attention_backward(ctx, &s, x->q, x->k, x->v, x->out, x->lse, x->dout, x->dq, x->dk, x->dv));
    peaks[1] = mt_arena_peak(ctx);
}

static mt_tensor random_of(mt_dtype type, int64_t rows, int64_t cols) {
    mt_tensor x = ref_random(rows, cols, 0, 1, 0), y;
    if (type == MT_F32) return x;
    y = ref_filled(rows, (cols + 1) / 2, 0, 0.0f); /* as many bytes */
    y = mt_tensor_make(y.data, type, rows, cols);
    OK(mt_convert(ref.ctx, x, y));
    return y;
}

static size_t bytes_of(mt_tensor t) { return (size_t)(t.rows * t.cols) * mt_dtype_size(t.dtype); }

/* 1 to 5 threads give the same bits, and need as much memory as a meta context says. */
static void try_threads(mt_attention_desc s, mt_dtype type) {
    static const int numbers[] = {1, 2, 3, 5};
    int64_t t = s.batch * s.seq, n = s.kv_seq ? s.kv_seq : s.seq, heads = s.groups * s.heads_per_group;
    int64_t w = heads * s.head_dim, kw = s.groups * s.head_dim;
    int64_t rows = mt_max(1, s.bias.batch) * mt_max(1, s.bias.heads) * s.seq;
    mt_tensor bias = s.bias.value.data ? s.bias.value : mt_none();
    tensors x, one;
    size_t i, real[2], meta[2];
    memset(&one, 0, sizeof one);
    x.q = random_of(type, t, w), x.k = random_of(type, s.batch * n, kw), x.v = random_of(type, s.batch * n, kw);
    x.dout = random_of(type, t, w);
    s.bias.value = bias;
    for (i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        mt_context *ctx = test_context(MT_DEVICE_CPU, numbers[i]), *plan = test_context(MT_DEVICE_META, numbers[i]);
        x.out = random_of(type, t, w), x.lse = ref_filled(heads, t, 0, -1.0f);
        x.dq = random_of(type, t, w), x.dk = random_of(type, s.batch * n, kw), x.dv = random_of(type, s.batch * n, kw);
        s.bias.grad = x.dbias = bias.data ? ref_filled(rows, n, 0, 0.5f) : mt_none();
        run_on(plan, s, &x, meta);
        run_on(ctx, s, &x, real);
        assert_memory_equal(real, meta, sizeof real);
        if (i == 0) one = x;
        assert_memory_equal(x.out.data, one.out.data, bytes_of(x.out));
        assert_memory_equal(x.lse.data, one.lse.data, bytes_of(x.lse));
        assert_memory_equal(x.dq.data, one.dq.data, bytes_of(x.dq));
        assert_memory_equal(x.dk.data, one.dk.data, bytes_of(x.dk));
        assert_memory_equal(x.dv.data, one.dv.data, bytes_of(x.dv));
        if (bias.data) assert_memory_equal(x.dbias.data, one.dbias.data, bytes_of(x.dbias));
        mt_context_destroy(ctx);
        mt_context_destroy(plan);
    }
    ref_release();
}

static void test_threads(void **state) {
    static const int32_t cu_seqlens[] = {0, 7, 250, 251, 600};
    static const mt_dtype types[] = {MT_F32, MT_BF16, MT_F16};
    int i;
    (void)state;
    for (i = 0; i < 3; i++) {
        mt_attention_desc s = shape(2, 300, 3, 2, 20, 1);
        s.dropout.p = 0.3f, s.dropout.at.seed = 3, s.dropout.at.global_cols = 6;
        s.cu_seqlens = cu_seqlens, s.documents = 4;
        try_threads(s, types[i]);                             /* GQA, dropout, documents */
        try_threads(shape(1, 500, 1, 1, 33, 1), types[i]);    /* one head */
        try_threads(shape(1, 97 + i, 5, 1, 64, 0), types[i]); /* 5 heads of two blocks */
        s = shape(2, 100, 2, 3, 16, 0);
        s.kv_seq = 210;
        try_threads(s, types[i]); /* cross-attention */
    }
    try_threads(shape(3, 2, 2, 2, 4, 1), MT_F32); /* too little work for two threads */
}

/* Sequences or heads that share a bias add to its gradient in the same order. */
static void test_threads_bias(void **state) {
    int i;
    (void)state;
    for (i = 0; i < 4; i++) {
        mt_attention_desc s = shape(3, 120, 4, 2, 32, 1);
        s.bias.batch = i & 1 ? 3 : 1, s.bias.heads = i & 2 ? 9 : 1, s.bias.first_head = i & 2 ? 1 : 0;
        s.bias.value = ref_random(s.bias.batch * s.bias.heads * 120, 120, 0, 1, 0);
        try_threads(s, MT_F32);
    }
}

/* Where the processor multiplies bf16, packed operands are bf16, and take half of the memory that they take for f16. */
static void test_bf16_memory(void **state) {
    mt_attention_desc s = shape(1, 500, 1, 1, 64, 0);
    size_t peaks[3][2];
    int type, halves = 0;
    (void)state;
#if defined(__AVX512BF16__) && defined(__GNUC__)
    halves = 1;
#endif
    for (type = MT_F32; type <= MT_F16; type++) {
        mt_context *ctx = test_context(MT_DEVICE_CPU, 1);
        tensors x;
        mt_tensor *const views[] = {&x.q, &x.k, &x.v, &x.out, &x.dout, &x.dq, &x.dk, &x.dv};
        size_t i;
        for (i = 0; i < sizeof views / sizeof *views; i++) *views[i] = random_of((mt_dtype)type, 500, 64);
        x.lse = ref_guarded(1, 500, 0);
        s.bias.grad = mt_none();
        run_on(ctx, s, &x, peaks[type]);
        mt_context_destroy(ctx);
        ref_release();
    }
    assert_true((peaks[MT_BF16][0] < peaks[MT_F16][0]) == halves);
    assert_true((peaks[MT_BF16][1] < peaks[MT_F16][1]) == halves);
}

/* ---- the slopes of ALiBi ----------------------------------------------------------------------------------------- */

/* The slopes that the authors of ALiBi give for 8 heads, and those of their code for 12 heads. */
static void test_alibi_slopes(void **state) {
    static const double of_12[] = {0.5,       0.25,       0.125,      0.0625,     0.03125,    0.015625,
                                   0.0078125, 0.00390625, 0.70710678, 0.35355339, 0.17677669, 0.08838835};
    mt_tensor x = ref_random(1, 12, 0, 1.0f, 0);
    (void)state;
    OK(mt_alibi_slopes(ref.ctx, 8, 0, mt_tensor_cols(x, 0, 8)));
    for (int i = 0; i < 8; i++) assert_true(((const float *)x.data)[i] == ldexpf(1.0f, -1 - i));
    OK(mt_alibi_slopes(ref.ctx, 12, 0, x));
    for (int i = 0; i < 12; i++) assert_true(fabs((double)((const float *)x.data)[i] - of_12[i]) < 1e-7);
    OK(mt_alibi_slopes(ref.ctx, 12, 7, mt_tensor_cols(x, 0, 3))); /* the heads of a tensor rank */
    for (int i = 0; i < 3; i++) assert_true(fabs((double)((const float *)x.data)[i] - of_12[7 + i]) < 1e-7);
    OK(mt_alibi_slopes(ref.ctx, 1, 0, mt_tensor_cols(x, 0, 1)));
    assert_true(*(const float *)x.data == ldexpf(1.0f, -8));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "heads is 0, must be from 1 to 2147483647",
                   mt_alibi_slopes(ref.ctx, 0, 0, mt_tensor_cols(x, 0, 1)));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "there are 8 heads, not 4 from head 5 on",
                   mt_alibi_slopes(ref.ctx, 8, 5, mt_tensor_cols(x, 0, 4)));
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "first_head is -1, must be at least 0",
                   mt_alibi_slopes(ref.ctx, 8, -1, mt_tensor_cols(x, 0, 4)));
    ASSERT_REFUSED(MT_ERR_SHAPE, "slopes", mt_alibi_slopes(ref.ctx, 8, 0, mt_tensor_f32(x.data, 2, 4)));
}

/* A desc is refused before a call, with the errors of the call. */
static void test_check(void **state) {
    mt_attention_desc s = {.batch = 2, .seq = 3, .groups = 2, .heads_per_group = 2, .head_dim = 4};
    mt_tensor bias = ref_random(12, 3, 0, 1.0f, 0);
    static const int32_t lengths[] = {3, 4};
    (void)state;
    OK(mt_attention_check(ref.ctx, "f", &s));
    s.bias.value = bias, s.bias.heads = 4;
    OK(mt_attention_check(ref.ctx, "f", &s));
    s.bias.grad = bias;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "f: dbias [12, 3] and bias [12, 3] overlap", mt_attention_check(ref.ctx, "f", &s));
    s.bias.grad = mt_none(), s.bias.heads = 3;
    ASSERT_REFUSED(MT_ERR_SHAPE, "f: bias.heads is 3", mt_attention_check(ref.ctx, "f", &s));
    s.bias.heads = 1;
    ASSERT_REFUSED(MT_ERR_SHAPE, "f: bias is [12, 3], must be [3, 3]", mt_attention_check(ref.ctx, "f", &s));
    s.bias.value = mt_none(), s.lengths = lengths;
    ASSERT_REFUSED(MT_ERR_DATA, "f: lengths[1] is 4", mt_attention_check(ref.ctx, "f", &s));
    s.lengths = NULL, s.groups = 0;
    ASSERT_REFUSED(MT_ERR_SHAPE, "f: groups is 0, must be at least 1", mt_attention_check(ref.ctx, "f", &s));
}

/* ---- golden values ----------------------------------------------------------------------------------------------- */

/* What a case of golden/make_attention.py sets. */
typedef struct golden_case {
    const char *name;
    int64_t seq, kv_seq;
    int bidirectional;
    int64_t window;
    float softcap;
    int alibi, documents;
    int64_t bias_batch, bias_heads;
    int mask; /* 1: the bias is a boolean mask */
} golden_case;

static const golden_case golden_cases[] = {
    {"cross", 5, 9, 1, 0, 0, 0, 0, 0, 0, 0},       {"later", 3, 9, 0, 0, 0, 0, 0, 0, 0, 0},
    {"window", 10, 10, 0, 4, 0, 0, 0, 0, 0, 0},    {"local", 10, 10, 1, 3, 0, 0, 0, 0, 0, 0},
    {"softcap", 10, 10, 0, 0, 2, 0, 0, 0, 0, 0},   {"alibi", 10, 10, 0, 0, 0, 1, 0, 0, 0, 0},
    {"documents", 10, 10, 0, 0, 0, 0, 1, 0, 0, 0}, {"bias", 10, 10, 1, 0, 0, 0, 0, 1, 4, 0},
    {"together", 10, 10, 0, 6, 3, 1, 1, 2, 1, 0},  {"mask", 10, 10, 0, 0, 0, 0, 0, 2, 4, 1}};

/* Reads a tensor of a case as a matrix of rows with `cols` elements. */
static mt_tensor golden(const mt_safetensors *file, const char *name, const char *part, int64_t cols) {
    char full[64];
    const mt_safetensors_tensor *t;
    mt_tensor m;
    snprintf(full, sizeof full, "%s.%s", name, part);
    t = mt_safetensors_find(file, full);
    assert_non_null(t);
    m = ref_guarded(t->bytes / (int64_t)sizeof(float) / cols, cols, 0);
    OK(mt_safetensors_read(ref.ctx, t, (float *)m.data));
    return m;
}

/* The boolean mask of a case. */
static mt_tensor golden_mask(const mt_safetensors *file, const golden_case *c, unsigned char *seen) {
    mt_tensor m = golden(file, c->name, "mask", c->kv_seq);
    int64_t i;
    for (i = 0; i < m.rows * m.cols; i++) seen[i] = ((const float *)m.data)[i] != 0.0f;
    return mt_tensor_make(seen, MT_U8, m.rows, m.cols);
}

static void test_golden(void **state) {
    unsigned char seen[2 * 4 * 10 * 10];
    static const float slopes[] = {0.5f, 0.25f, 0.125f, 0.0625f};
    static const int32_t documents[] = {0, 4, 10, 13, 20};
    mt_safetensors *file;
    size_t i;
    (void)state;
    OK(mt_safetensors_open(ref.ctx, "tests/golden/attention.safetensors", &file));
    for (i = 0; i < sizeof golden_cases / sizeof *golden_cases; i++) {
        const golden_case *c = &golden_cases[i];
        mt_attention_desc s = shape(2, c->seq, 2, 2, 4, c->bidirectional);
        tensors x;
        s.kv_seq = c->kv_seq, s.scores.window = c->window, s.scores.softcap = c->softcap;
        if (c->alibi) s.scores.alibi = 1, s.scores.alibi_slopes = slopes;
        if (c->documents) s.cu_seqlens = documents, s.documents = 4;
        s.bias.batch = c->bias_batch, s.bias.heads = c->bias_heads;
        if (c->mask) s.bias.value = golden_mask(file, c, seen);
        else if (c->bias_batch) s.bias.value = golden(file, c->name, "bias", c->kv_seq);
        x.q = golden(file, c->name, "q", 16), x.k = golden(file, c->name, "k", 8);
        x.v = golden(file, c->name, "v", 8), x.dout = golden(file, c->name, "dout", 16);
        x.out = ref_guarded(x.q.rows, 16, 0), x.lse = ref_guarded(4, x.q.rows, 0), x.dq = ref_guarded(x.q.rows, 16, 0);
        x.dk = ref_guarded(x.k.rows, 8, 0), x.dv = ref_guarded(x.k.rows, 8, 0), x.dbias = mt_none();
        if (c->bias_batch && !c->mask) x.dbias = ref_filled(s.bias.value.rows, s.bias.value.cols, 0, 0.0f);
        run(&s, &x);
        ASSERT_CLOSE(x.out, ref_values(golden(file, c->name, "out", 16)), 2e-6, 1e-6);
        ASSERT_CLOSE(x.dq, ref_values(golden(file, c->name, "dq", 16)), 5e-6, 1e-6);
        ASSERT_CLOSE(x.dk, ref_values(golden(file, c->name, "dk", 8)), 5e-6, 1e-6);
        ASSERT_CLOSE(x.dv, ref_values(golden(file, c->name, "dv", 8)), 5e-6, 1e-6);
        if (x.dbias.data)
            ASSERT_CLOSE(x.dbias, ref_values(golden(file, c->name, "dbias", s.bias.value.cols)), 5e-6, 1e-6);
        ref_release();
    }
    mt_safetensors_close(file);
}

/* ---- refusals ---------------------------------------------------------------------------------------------------- */

#define FORWARD(s) mt_dot_product_attention_forward(ref.ctx, &s, x.q, x.k, x.v, x.out, x.lse)
#define BACKWARD(s)                                                                                                    \
    mt_dot_product_attention_backward(ref.ctx, &s, x.q, x.k, x.v, x.out, x.lse, x.dout, x.dq, x.dk, x.dv)

static void test_refusals(void **state) {
    static const int32_t unsorted[] = {0, 7, 5, 12}, late[] = {1, 12}, early[] = {0, 11}, far[] = {0, 13};
    static const float negative[] = {1.0f, -1.0f, 0.0f, 0.0f};
    mt_attention_desc good = shape(2, 6, 2, 2, 4, 0), s;
    problem p;
    tensors x, y;
    (void)state;
    memset(&p, 0, sizeof p);
    p.s = good;
    p.s.kv_seq = 6;
    x = random_tensors(&p);
    run(&good, &x);
    s = good, s.scores.window = -1;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "window is -1", FORWARD(s));
    s = good, s.scores.softcap = -1.0f;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "softcap is -1, must be at least 0 and finite", FORWARD(s));
    s = good, s.kv_seq = 5;
    ASSERT_REFUSED(MT_ERR_SHAPE, "k is [12, 8], must be [10, 8]", FORWARD(s));
    s = good, s.kv_seq = -1;
    ASSERT_REFUSED(MT_ERR_SHAPE, "kv_seq is -1, must be from 0 to 2147483647", FORWARD(s));
    s = good, s.scores.alibi = 1;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "scores.alibi is 1, but alibi_slopes is NULL", FORWARD(s));
    s = good, s.scores.alibi_slopes = negative;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "scores.alibi is 0, but alibi_slopes is set", FORWARD(s));
    s.scores.alibi = 1;
    ASSERT_REFUSED(MT_ERR_DATA, "alibi_slopes[1] is -1", FORWARD(s));
    s = good, s.cu_seqlens = unsorted, s.documents = 3;
    ASSERT_REFUSED(MT_ERR_DATA, "cu_seqlens[2] is 5", FORWARD(s));
    s.cu_seqlens = late, s.documents = 1;
    ASSERT_REFUSED(MT_ERR_DATA, "cu_seqlens[0] is 1", BACKWARD(s));
    s.cu_seqlens = early;
    ASSERT_REFUSED(MT_ERR_DATA, "cu_seqlens[1] is 11", FORWARD(s));
    s.cu_seqlens = far;
    ASSERT_REFUSED(MT_ERR_DATA, "cu_seqlens[1] is 13", FORWARD(s));
    s.documents = 0;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "documents is 0, but cu_seqlens is set", FORWARD(s));
    s = good, s.bias.value = ref_filled(6, 5, 0, 0.0f);
    ASSERT_REFUSED(MT_ERR_SHAPE, "bias is [6, 5], must be [6, 6]", FORWARD(s));
    s.bias.heads = 3;
    ASSERT_REFUSED(MT_ERR_SHAPE, "bias.heads is 3, must be 1 or at least bias.first_head 0 + 4 heads", FORWARD(s));
    s.bias.heads = 6, s.bias.first_head = 3;
    ASSERT_REFUSED(MT_ERR_SHAPE, "bias.heads is 6, must be 1 or at least bias.first_head 3 + 4 heads", FORWARD(s));
    s.bias.first_head = INT64_MAX;
    ASSERT_REFUSED(MT_ERR_SHAPE, "bias.heads is 6, must be 1 or at least bias.first_head 9223372036854775807",
                   FORWARD(s));
    s.bias.first_head = -1;
    ASSERT_REFUSED(MT_ERR_SHAPE, "bias.first_head is -1, must be at least 0", BACKWARD(s));
    s.bias.heads = 1;
    ASSERT_REFUSED(MT_ERR_SHAPE, "bias.first_head is -1, must be at least 0", FORWARD(s));
    s.bias.heads = INT64_MIN, s.bias.first_head = 0;
    ASSERT_REFUSED(MT_ERR_SHAPE, "bias.heads is -9223372036854775808", FORWARD(s));
    s = good, s.bias.value = mt_tensor_make(x.out.data, MT_I32, 6, 6);
    ASSERT_REFUSED(MT_ERR_DTYPE, "bias is i32", FORWARD(s));
    y = x, x.dk = x.dv;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "dv", BACKWARD(good));
    x = y, x.out = x.q;
    ASSERT_REFUSED(MT_ERR_ARGUMENT, "out", FORWARD(good));
    s = good, s.kv_seq = 7;
    ASSERT_REFUSED(MT_ERR_SHAPE, "kv_seq is 7, must be 0 or seq 6",
                   mt_attention_forward(ref.ctx, &s, y.q, y.out, y.lse));
}

/* desc.dbias: what backward refuses, separate and fused, and forward does not read. */
static void test_dbias_refusals(void **state) {
    unsigned char seen[36];
    mt_attention_desc s = shape(2, 6, 2, 2, 4, 0);
    mt_tensor bias, dbias, qkv, dqkv, *all[9];
    tensors x;
    problem p;
    size_t i;
    (void)state;
    memset(&p, 0, sizeof p);
    p.s = s, p.s.kv_seq = 6;
    x = random_tensors(&p), bias = ref_random(6, 6, 0, 1, 0), dbias = ref_filled(6, 6, 0, 0.0f);
    qkv = ref_random(12, 32, 0, 1, 0), dqkv = ref_guarded(12, 32, 0);
    memset(seen, 1, sizeof seen);
#define FUSED(s) mt_attention_backward(ref.ctx, &s, qkv, x.out, x.lse, x.dout, dqkv)
#define BOTH_REFUSE(status, part)                                                                                      \
    ASSERT_REFUSED(status, "mt_dot_product_attention_backward: " part, BACKWARD(s));                                   \
    ASSERT_REFUSED(status, "mt_attention_backward: " part, FUSED(s));                                                  \
    OK(FORWARD(s));                                                                                                    \
    OK(mt_attention_forward(ref.ctx, &s, qkv, x.out, x.lse))
    s.bias.grad = dbias;
    BOTH_REFUSE(MT_ERR_ARGUMENT, "desc.bias.grad is given, but desc.bias.value is mt_none()");
    s.bias.value = mt_tensor_make(seen, MT_U8, 6, 6);
    BOTH_REFUSE(MT_ERR_ARGUMENT, "desc.bias.grad is given, but desc.bias.value is a boolean mask");
    s.bias.value = bias, s.bias.grad = ref_filled(5, 6, 0, 0.0f);
    BOTH_REFUSE(MT_ERR_SHAPE, "dbias is [5, 6], must be [6, 6]");
    s.bias.grad = mt_tensor_make(dbias.data, MT_BF16, 6, 6);
    BOTH_REFUSE(MT_ERR_DTYPE, "dbias is bf16, must be f32");
    s.bias.grad = bias;
    BOTH_REFUSE(MT_ERR_ARGUMENT, "dbias [6, 6] and bias [6, 6] overlap");
    s.bias.grad = mt_tensor_make(x.lse.data, MT_F32, 6, 6);
    BOTH_REFUSE(MT_ERR_ARGUMENT, "dbias [6, 6] and lse [4, 12] overlap");
    all[0] = &x.q, all[1] = &x.k, all[2] = &x.v, all[3] = &x.out, all[4] = &x.dout, all[5] = &x.dq, all[6] = &x.dk;
    all[7] = &x.dv, all[8] = NULL;
    for (i = 0; all[i]; i++) {
        s.bias.grad = mt_tensor_make(all[i]->data, MT_F32, 6, 6);
        ASSERT_REFUSED(MT_ERR_ARGUMENT, "dbias [6, 6] and ", BACKWARD(s));
    }
    all[0] = &qkv, all[1] = &x.out, all[2] = &x.dout, all[3] = &dqkv, all[4] = NULL;
    for (i = 0; all[i]; i++) {
        s.bias.grad = mt_tensor_make(all[i]->data, MT_F32, 6, 6);
        ASSERT_REFUSED(MT_ERR_ARGUMENT, "dbias [6, 6] and ", FUSED(s));
    }
    s.bias.grad = dbias;
    OK(BACKWARD(s));
    OK(FUSED(s));
#undef BOTH_REFUSE
#undef FUSED
}

int main(void) {
    const struct CMUnitTest tests[] = {REF_TEST(test_separate_views),
                                       REF_TEST(test_kv_seq),
                                       REF_TEST(test_rotary_in_parts),
                                       REF_TEST(test_merge),
                                       REF_TEST(test_window),
                                       REF_TEST(test_softcap),
                                       REF_TEST(test_alibi),
                                       REF_TEST(test_documents),
                                       REF_TEST(test_documents_are_sequences),
                                       REF_TEST(test_bias),
                                       REF_TEST(test_bias_of_more_heads),
                                       REF_TEST(test_bias_first_head),
                                       REF_TEST(test_mask),
                                       REF_TEST(test_together),
                                       REF_TEST(test_scale_of_zero),
                                       REF_TEST(test_panels),
                                       REF_TEST(test_nan),
                                       REF_TEST(test_bf16),
                                       REF_TEST(test_padding_is_nan),
                                       REF_TEST(test_bf16_memory),
                                       REF_TEST(test_threads),
                                       REF_TEST(test_threads_bias),
                                       REF_TEST(test_alibi_slopes),
                                       REF_TEST(test_check),
                                       REF_TEST(test_golden),
                                       REF_TEST(test_refusals),
                                       REF_TEST(test_dbias_refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
